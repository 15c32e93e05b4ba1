"""XRC domains and what they join; dynamically connected queue pairs."""

import errno
import os
import struct
import tempfile

import pytest
from emulated.uverbs import Raw
from emulated.verbs import CQ, PD, QP, Context, full_attr, modify, refused
from pyverbs import enums as e
from pyverbs.providers.mlx5 import mlx5_enums as dve
from pyverbs.providers.mlx5.mlx5dv import (
    Mlx5Context,
    Mlx5DCIStreamInitAttr,
    Mlx5DVContextAttr,
    Mlx5DVDCInitAttr,
    Mlx5DVQPInitAttr,
    Mlx5QP,
)
from pyverbs.qp import QPCap, QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr, SrqInitAttrEx
from pyverbs.xrcd import XRCD, XRCDInitAttr

pytestmark = pytest.mark.usefixtures("leak_check")

FILE = e.IBV_XRCD_INIT_ATTR_FD | e.IBV_XRCD_INIT_ATTR_OFLAGS


def domain(context: Context, fd: int = -1, flags: int = os.O_CREAT) -> XRCD:
    return XRCD(context, XRCDInitAttr(FILE, flags, fd))


# ------------------------------------------------------------------ XRC


def test_a_domain_is_known_by_its_file() -> None:
    with (
        tempfile.TemporaryFile() as file,
        tempfile.TemporaryFile() as another,
        Context(name="mlx5_0") as one,
        Context(name="mlx5_0") as two,
        Context(name="mlx5_1") as elsewhere,
    ):
        with refused(errno.EAGAIN):  # nobody has made it yet
            domain(one, file.fileno(), 0)
        first = domain(one, file.fileno())
        second = domain(two, file.fileno(), 0)
        with refused(errno.EINVAL):
            domain(two, file.fileno(), os.O_CREAT | os.O_EXCL)
        for context, f in ((two, another), (elsewhere, file)):
            with refused(errno.EAGAIN):
                domain(context, f.fileno(), 0)
        with refused(errno.EBADF):
            domain(one, 987)
        first.close()
        domain(one, file.fileno(), 0).close()
        second.close()
        with refused(errno.EAGAIN):
            domain(one, file.fileno(), 0)


def xrc_srq(context: Context, pd: PD, cq: CQ, xrcd: XRCD) -> SRQ:
    attr = SrqInitAttrEx(max_wr=8)
    attr.srq_type, attr.pd, attr.xrcd, attr.cq = e.IBV_SRQT_XRC, pd, xrcd, cq
    attr.comp_mask = (
        e.IBV_SRQ_INIT_ATTR_TYPE | e.IBV_SRQ_INIT_ATTR_PD | e.IBV_SRQ_INIT_ATTR_CQ | e.IBV_SRQ_INIT_ATTR_XRCD
    )
    return SRQ(context, attr)


def test_an_xrc_srq_has_a_number_and_holds_its_domain_and_queue() -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd, CQ(context, 8) as cq, domain(context) as xrcd:
        first, second = xrc_srq(context, pd, cq, xrcd), xrc_srq(context, pd, cq, xrcd)
        assert first.get_srq_num() != second.get_srq_num()
        with refused(errno.EINVAL):  # it's for XRC only
            QP(pd, _with_srq(cq, first))
        first.close()
        second.close()


def _with_srq(cq: CQ, srq: SRQ):
    from pyverbs.qp import QPInitAttr

    return QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, srq=srq, cap=QPCap(4, 0, 1, 0))


@pytest.mark.parametrize("user", ["srq", "target"])
def test_a_domain_in_use_is_busy(user: str) -> None:
    open_xrcd, close_xrcd, create_xsrq = 37, 38, 39
    with Raw("mlx5_0") as raw:
        pd, cq = raw.alloc_pd(), raw.create_cq()
        xrcd = struct.unpack_from("=I", raw.command(open_xrcd, struct.pack("=Ii", 0xFFFFFFFF, os.O_CREAT), 4))[0]
        if user == "srq":
            # user_handle, srq_type, pd, max_wr, max_sge, limit, tags, xrcd, cq; then mlx5's part
            core = struct.pack("=QIIIIIIII", 1, 1, pd, 3, 1, 0, 0, xrcd, cq)
            mlx5 = struct.pack("=QQIIII", raw.address + 0x4000, raw.address + 0x8200, 0, 0, 1, 0)
            handle = struct.unpack_from("=I", raw.command(create_xsrq, core + mlx5, 16 + 8))[0]
        else:
            handle = raw.create_qp(xrcd, 0, qp_type=e.IBV_QPT_XRC_RECV)
        kind = {"srq": "srq", "target": "qp"}[user]
        assert raw.error(close_xrcd, struct.pack("=I", xrcd), has_response=False) == errno.EBUSY
        assert raw.destroy(kind, handle) == 0
        assert raw.error(close_xrcd, struct.pack("=I", xrcd), has_response=False) == 0
        assert raw.error(close_xrcd, struct.pack("=I", xrcd), has_response=False) == errno.ENOENT


def test_an_xrc_queue_pair_needs_its_domain_and_a_sending_one_no_receive_queue() -> None:
    with Raw("mlx5_0") as raw:
        pd, cq = raw.alloc_pd(), raw.create_cq()
        assert raw.create_qp_error(pd, cq, qp_type=e.IBV_QPT_XRC_RECV) == errno.EINVAL
        assert raw.create_qp_error(pd, cq, 999, qp_type=e.IBV_QPT_XRC_SEND) == 0


# ------------------------------------------------------------------ DC


@pytest.fixture
def dc():
    with (
        Mlx5Context(Mlx5DVContextAttr(), "mlx5_0") as context,
        PD(context) as pd,
        CQ(context, 8) as cq,
        SRQ(pd, SrqInitAttr(SrqAttr(max_wr=8, max_sge=1))) as srq,
    ):
        yield context, pd, cq, srq


def dc_qp(dc, *, target: bool, srq: bool = True, streams: tuple[int, int] | None = None) -> Mlx5QP:
    context, pd, cq, queue = dc
    attr = QPInitAttrEx(
        qp_type=e.IBV_QPT_DRIVER,
        comp_mask=e.IBV_QP_INIT_ATTR_PD,
        pd=pd,
        scq=cq,
        rcq=cq,
        srq=queue if target and srq else None,
        cap=QPCap(4, 0, 1, 0),
    )
    mask = dve.MLX5DV_QP_INIT_ATTR_MASK_DC
    more = {}
    if streams:
        mask |= dve.MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS
        more["dci_streams"] = Mlx5DCIStreamInitAttr(*streams)
    kind = dve.MLX5DV_DCTYPE_DCT if target else dve.MLX5DV_DCTYPE_DCI
    init = Mlx5DVDCInitAttr(dc_type=kind, dct_access_key=0xAB, **more)
    return Mlx5QP(context, attr, Mlx5DVQPInitAttr(comp_mask=mask, dc_init_attr=init))


def test_a_target_gets_its_number_when_it_is_ready(dc) -> None:
    context = dc[0]
    with dc_qp(dc, target=True) as qp:
        assert qp.qp_num == 0
        attr = full_attr(context)
        init = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
        attr.qp_state = e.IBV_QPS_INIT
        assert modify(qp, attr, init) == 0
        with refused(errno.EINVAL):
            qp.query(e.IBV_QP_STATE)
        attr.qp_state = e.IBV_QPS_RTR
        ready = e.IBV_QP_STATE | e.IBV_QP_MIN_RNR_TIMER | e.IBV_QP_AV | e.IBV_QP_PATH_MTU
        assert modify(qp, attr, ready) == 0
        assert qp.qp_num != 0
        assert qp.query(e.IBV_QP_STATE | e.IBV_QP_PATH_MTU)[0].path_mtu == e.IBV_MTU_1024
        with refused(errno.EINVAL):
            qp.query(e.IBV_QP_SQ_PSN)


def test_a_target_receives_from_a_shared_queue(dc) -> None:
    with refused(errno.EINVAL):
        dc_qp(dc, target=True, srq=False)


def test_an_initiator_may_have_streams_up_to_what_the_device_says(dc) -> None:
    context = dc[0]
    caps = context.query_mlx5_device(dve.MLX5DV_CONTEXT_MASK_DCI_STREAMS).dci_streams_caps
    log_streams, log_errored = caps["max_log_num_concurent"], caps["max_log_num_errored"]
    assert (log_streams, log_errored) == (16, 16)
    dc_qp(dc, target=False, streams=(log_streams, log_errored)).close()
    with refused(errno.EINVAL):
        dc_qp(dc, target=False, streams=(log_streams + 1, 0))


def test_a_driver_queue_pair_is_one_of_both_kinds_and_no_other_has_streams() -> None:
    with Raw("mlx5_0") as raw:
        pd, cq = raw.alloc_pd(), raw.create_cq()
        srq = raw.create_srq(pd)
        page, dct, dci, streams = 1 << 10, 1 << 4, 1 << 5, 1 << 11
        for flags, code in (
            (page, errno.EINVAL),
            (page | dct | dci, errno.EINVAL),
            (page | dct, 0),
            (page | dci, 0),
            (page | dct | streams, errno.EOPNOTSUPP),
        ):
            assert raw.create_qp_error(pd, cq, srq=srq, qp_type=255, flags=flags) == code, hex(flags)
        assert raw.create_qp_error(pd, cq, flags=page | dci) == errno.EOPNOTSUPP
        assert raw.create_qp_error(pd, cq, flags=page | streams) == errno.EOPNOTSUPP


# ------------------------------------------------------------------ devices without


def test_a_device_without_them_says_so(run_python) -> None:
    run_python("""
        import errno, os
        import aiordma.emulator as emulator
        limits = emulator.Limits(dc=False, xrc=False)
        emulator.attach([emulator.EmulatedDevice(name="mlx5_0", limits=limits)])
        from pyverbs import enums as e
        from pyverbs.cq import CQ
        from pyverbs.pd import PD
        from pyverbs.providers.mlx5 import mlx5_enums as dve
        from pyverbs.providers.mlx5.mlx5dv import (Mlx5Context, Mlx5DVContextAttr, Mlx5DVDCInitAttr,
                                                   Mlx5DVQPInitAttr, Mlx5QP)
        from pyverbs.pyverbs_error import PyverbsRDMAError
        from pyverbs.qp import QPCap, QPInitAttrEx
        from pyverbs.xrcd import XRCD, XRCDInitAttr
        context = Mlx5Context(Mlx5DVContextAttr(), "mlx5_0")
        assert not context.query_device().device_cap_flags & e.IBV_DEVICE_XRC
        caps = context.query_mlx5_device(dve.MLX5DV_CONTEXT_MASK_DCI_STREAMS).dci_streams_caps
        assert caps["max_log_num_concurent"] == 0
        pd, cq = PD(context), CQ(context, 8)
        def refused(make):
            try:
                make()
            except PyverbsRDMAError as x:
                assert x.error_code == errno.EOPNOTSUPP, x
            else:
                raise SystemExit("made")
        flags = e.IBV_XRCD_INIT_ATTR_FD | e.IBV_XRCD_INIT_ATTR_OFLAGS
        refused(lambda: XRCD(context, XRCDInitAttr(flags, os.O_CREAT, -1)))
        attr = QPInitAttrEx(qp_type=e.IBV_QPT_DRIVER, comp_mask=e.IBV_QP_INIT_ATTR_PD, pd=pd, scq=cq, rcq=cq,
                            cap=QPCap(4, 0, 1, 0))
        dc = Mlx5DVQPInitAttr(comp_mask=dve.MLX5DV_QP_INIT_ATTR_MASK_DC, dc_init_attr=Mlx5DVDCInitAttr())
        refused(lambda: Mlx5QP(context, attr, dc))
    """)

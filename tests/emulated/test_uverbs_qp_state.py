"""A queue pair's states: what each change needs, what it allows, and that everything else is refused.

The expected table is written out again here, from the kernel's qp_state_table (drivers/infiniband/core/verbs.c), in
another form than in the emulator.
"""

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from emulated.verbs import CQ, PD, QP, REMOTE, Context, full_attr, init_attr, modify
from pyverbs import enums as e
from pyverbs.providers.mlx5 import mlx5_enums as dve
from pyverbs.providers.mlx5.mlx5dv import (
    Mlx5Context,
    Mlx5DVContextAttr,
    Mlx5DVDCInitAttr,
    Mlx5DVQPInitAttr,
    Mlx5QP,
)
from pyverbs.qp import QPAttr, QPCap, QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.xrcd import XRCD, XRCDInitAttr

RC, UC, UD = e.IBV_QPT_RC, e.IBV_QPT_UC, e.IBV_QPT_UD
XRC_SEND, XRC_RECV = e.IBV_QPT_XRC_SEND, e.IBV_QPT_XRC_RECV
#: Not verbs' own numbers: both are IBV_QPT_DRIVER.
DCI, DCT = 1001, 1002
TYPES = {
    "RC": RC,
    "UC": UC,
    "UD": UD,
    "XRC_SEND": XRC_SEND,
    "XRC_RECV": XRC_RECV,
    "DCI": DCI,
    "DCT": DCT,
}
RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
STATES = {"RESET": RESET, "INIT": INIT, "RTR": RTR, "RTS": RTS, "SQD": SQD, "SQE": SQE, "ERR": ERR}

BITS = {
    "PKEY": e.IBV_QP_PKEY_INDEX,
    "PORT": e.IBV_QP_PORT,
    "QKEY": e.IBV_QP_QKEY,
    "ACCESS": e.IBV_QP_ACCESS_FLAGS,
    "AV": e.IBV_QP_AV,
    "MTU": e.IBV_QP_PATH_MTU,
    "DEST": e.IBV_QP_DEST_QPN,
    "RQ_PSN": e.IBV_QP_RQ_PSN,
    "SQ_PSN": e.IBV_QP_SQ_PSN,
    "RD_DEST": e.IBV_QP_MAX_DEST_RD_ATOMIC,
    "RD_INIT": e.IBV_QP_MAX_QP_RD_ATOMIC,
    "RNR_TIMER": e.IBV_QP_MIN_RNR_TIMER,
    "TIMEOUT": e.IBV_QP_TIMEOUT,
    "RETRY": e.IBV_QP_RETRY_CNT,
    "RNR_RETRY": e.IBV_QP_RNR_RETRY,
    "CUR": e.IBV_QP_CUR_STATE,
    "ALT": e.IBV_QP_ALT_PATH,
    "MIG": e.IBV_QP_PATH_MIG_STATE,
    "SQD_EVENT": e.IBV_QP_EN_SQD_ASYNC_NOTIFY,
    "CAP": e.IBV_QP_CAP,
}

#: (from, to, type): (required, optional). RoCE has no alternate path, so ALT is optional nowhere here. Attributes that
#: the kernel passes over for one half of an XRC connection, having them in the other one, are optional.
#: DCI: modify_dci_qp_is_ok(), DCT: mlx5_ib_modify_dct(), both in drivers/infiniband/hw/mlx5/qp.c.
TABLE: dict[tuple[int, int, int], tuple[str, str]] = {
    (RESET, INIT, RC): ("PKEY PORT ACCESS", ""),
    (RESET, INIT, UC): ("PKEY PORT ACCESS", ""),
    (RESET, INIT, UD): ("PKEY PORT QKEY", ""),
    (INIT, INIT, RC): ("", "PKEY PORT ACCESS"),
    (INIT, INIT, UC): ("", "PKEY PORT ACCESS"),
    (INIT, INIT, UD): ("", "PKEY PORT QKEY"),
    (INIT, RTR, RC): ("AV MTU DEST RQ_PSN RD_DEST RNR_TIMER", "ACCESS PKEY"),
    (INIT, RTR, UC): ("AV MTU DEST RQ_PSN", "ACCESS PKEY"),
    (INIT, RTR, UD): ("", "PKEY QKEY"),
    (RTR, RTS, RC): ("TIMEOUT RETRY RNR_RETRY SQ_PSN RD_INIT", "CUR ACCESS RNR_TIMER MIG"),
    (RTR, RTS, UC): ("SQ_PSN", "CUR ACCESS MIG"),
    (RTR, RTS, UD): ("SQ_PSN", "CUR QKEY"),
    (RTS, RTS, RC): ("", "CUR ACCESS RNR_TIMER MIG"),
    (RTS, RTS, UC): ("", "CUR ACCESS MIG"),
    (RTS, RTS, UD): ("", "CUR QKEY"),
    (RESET, INIT, XRC_SEND): ("PKEY PORT ACCESS", ""),
    (INIT, INIT, XRC_SEND): ("", "PKEY PORT ACCESS"),
    (INIT, RTR, XRC_SEND): ("AV MTU DEST RQ_PSN", "ACCESS PKEY"),
    (RTR, RTS, XRC_SEND): ("TIMEOUT RETRY RNR_RETRY SQ_PSN RD_INIT", "CUR ACCESS MIG"),
    (RTS, RTS, XRC_SEND): ("", "CUR ACCESS MIG"),
    (RESET, INIT, XRC_RECV): ("PKEY PORT ACCESS", ""),
    (INIT, INIT, XRC_RECV): ("", "PKEY PORT ACCESS"),
    (INIT, RTR, XRC_RECV): ("AV MTU DEST RQ_PSN RD_DEST RNR_TIMER", "ACCESS PKEY"),
    (RTR, RTS, XRC_RECV): ("TIMEOUT SQ_PSN", "CUR ACCESS RNR_TIMER MIG"),
    (RTS, RTS, XRC_RECV): ("", "CUR ACCESS RNR_TIMER MIG"),
    (RESET, INIT, DCI): ("PKEY PORT", ""),
    (INIT, INIT, DCI): ("", "PKEY PORT"),
    (INIT, RTR, DCI): ("MTU", "AV PKEY"),
    (RTR, RTS, DCI): ("TIMEOUT RETRY RNR_RETRY SQ_PSN RD_INIT", "RNR_TIMER"),
    (RTS, RTS, DCI): ("", "RNR_TIMER"),
    (RESET, INIT, DCT): ("PKEY PORT ACCESS", ""),
    (INIT, RTR, DCT): ("AV MTU RNR_TIMER", ""),
}
#: Passed over: modify_qp_mask() in drivers/infiniband/core/uverbs_cmd.c.
IGNORED = {XRC_SEND: {"RD_DEST", "RNR_TIMER"}, XRC_RECV: {"RD_INIT", "RETRY", "RNR_RETRY"}}
for _state, _type in itertools.product(range(7), set(TYPES.values()) - {DCT}):
    TABLE[_state, RESET, _type] = ("", "")
    if _state != RESET:
        TABLE[_state, ERR, _type] = ("", "")


def mask(names: str) -> int:
    return sum(BITS[name] for name in names.split())


@dataclass
class Bed:
    """What queue pairs of every type are made on."""

    context: Context
    pd: PD
    cq: CQ
    srq: SRQ
    xrcd: XRCD


@pytest.fixture(scope="module")
def bed(emulated_nic) -> Iterator[Bed]:
    with Mlx5Context(Mlx5DVContextAttr(), "mlx5_0") as context, PD(context) as pd, CQ(context, 64) as cq:
        srq = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=8, max_sge=1)))
        no_file = XRCDInitAttr(e.IBV_XRCD_INIT_ATTR_FD | e.IBV_XRCD_INIT_ATTR_OFLAGS, os.O_CREAT, -1)
        xrcd = XRCD(context, no_file)
        yield Bed(context, pd, cq, srq, xrcd)
        srq.close()
        xrcd.close()


def make(bed: Bed, qp_type: int) -> QP:
    """A new queue pair of any of the types."""
    cap = QPCap(max_send_wr=8, max_recv_wr=8)
    if qp_type == XRC_RECV:
        return QP(bed.context, QPInitAttrEx(qp_type=qp_type, comp_mask=e.IBV_QP_INIT_ATTR_XRCD, xrcd=bed.xrcd))
    if qp_type == XRC_SEND:
        cap = QPCap(max_send_wr=8, max_recv_wr=0, max_recv_sge=0)
        mask = e.IBV_QP_INIT_ATTR_PD
        return QP(bed.context, QPInitAttrEx(qp_type=qp_type, comp_mask=mask, pd=bed.pd, scq=bed.cq, cap=cap))
    if qp_type in (DCI, DCT):
        attr = QPInitAttrEx(
            qp_type=e.IBV_QPT_DRIVER,
            comp_mask=e.IBV_QP_INIT_ATTR_PD,
            pd=bed.pd,
            scq=bed.cq,
            rcq=bed.cq,
            srq=bed.srq if qp_type == DCT else None,
            cap=cap,
        )
        kind = dve.MLX5DV_DCTYPE_DCT if qp_type == DCT else dve.MLX5DV_DCTYPE_DCI
        dc = Mlx5DVDCInitAttr(dc_type=kind, dct_access_key=0x1234)
        mask = dve.MLX5DV_QP_INIT_ATTR_MASK_DC
        return Mlx5QP(bed.context, attr, Mlx5DVQPInitAttr(comp_mask=mask, dc_init_attr=dc))
    return QP(bed.pd, init_attr(bed.cq, qp_type))


def state_of(qp: QP, qp_type: int, otherwise: int) -> int:
    """The state, where it can be asked for: a DCT's can only once it is ready to receive."""
    if qp_type == DCT and otherwise != RTR:
        return otherwise
    return int(qp.query(e.IBV_QP_STATE)[0].qp_state)


def change(context: Context, qp: QP, to: int | None, bits: int, current: int = RTS) -> int:
    attr = full_attr(context, dest_qpn=qp.qp_num)
    attr.cur_qp_state = current
    if to is not None:
        attr.qp_state = to
        bits |= e.IBV_QP_STATE
    return modify(qp, attr, bits)


def queue_pair(bed: Bed, qp_type: int, state: int) -> QP:
    """A queue pair, taken to a state on the shortest way."""
    qp = make(bed, qp_type)
    way = {RESET: [], INIT: [INIT], RTR: [INIT, RTR], RTS: [INIT, RTR, RTS], ERR: [INIT, ERR]}[state]
    at = RESET
    for to in way:
        assert change(bed.context, qp, to, mask(TABLE[at, to, qp_type][0])) == 0
        at = to
    assert state_of(qp, qp_type, state) == state
    return qp


REACHABLE = [RESET, INIT, RTR, RTS, ERR]
PAIRS = [
    (at, to, kind)
    for at, to, kind in itertools.product(REACHABLE, range(7), TYPES)
    if kind != "DCT" or at in (RESET, INIT, RTR)
]


def name_of(value: object) -> str:
    names = [k for k, v in STATES.items() if v == value]
    return names[0] if isinstance(value, int) else str(value)


@pytest.mark.parametrize(("at", "to", "kind"), PAIRS, ids=lambda v: name_of(v))
def test_every_change_of_state_is_allowed_or_refused_as_the_kernel_does(bed: Bed, at: int, to: int, kind: str) -> None:
    qp_type = TYPES[kind]
    with queue_pair(bed, qp_type, at) as qp:
        required, _ = TABLE.get((at, to, qp_type), ("", ""))
        allowed = (at, to, qp_type) in TABLE
        assert change(bed.context, qp, to, mask(required)) == (0 if allowed else errno.EINVAL)
        now = to if allowed else at
        assert state_of(qp, qp_type, now) == now


REQUIRED = [
    (at, to, kind, missing)
    for (at, to, qp_type), (required, _) in TABLE.items()
    for kind in TYPES
    if TYPES[kind] == qp_type and at in REACHABLE
    for missing in required.split()
]


@pytest.mark.parametrize(("at", "to", "kind", "missing"), REQUIRED, ids=lambda v: name_of(v))
def test_a_required_attribute_may_not_be_missing(bed: Bed, at: int, to: int, kind: str, missing: str) -> None:
    with queue_pair(bed, TYPES[kind], at) as qp:
        required = mask(TABLE[at, to, TYPES[kind]][0]) & ~BITS[missing]
        assert change(bed.context, qp, to, required) == errno.EINVAL
        assert state_of(qp, TYPES[kind], at) == at


@pytest.mark.parametrize(
    ("at", "to", "kind"),
    [(at, to, kind) for (at, to, t) in TABLE for kind in TYPES if TYPES[kind] == t and at in REACHABLE],
    ids=lambda v: name_of(v),
)
def test_optional_attributes_are_allowed_and_no_others(bed: Bed, at: int, to: int, kind: str) -> None:
    required, optional = TABLE[at, to, TYPES[kind]]
    for name in BITS:
        if name in required.split():
            continue
        with queue_pair(bed, TYPES[kind], at) as qp:
            got = change(bed.context, qp, to, mask(required) | BITS[name], current=at)
            fine = name in optional.split() or name in IGNORED.get(TYPES[kind], ())
            assert got == (0 if fine else errno.EINVAL), name


def test_without_a_state_the_queue_pair_stays_and_attributes_are_as_for_that(bed: Bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        assert change(bed.context, qp, None, e.IBV_QP_MIN_RNR_TIMER) == 0
        assert change(bed.context, qp, None, e.IBV_QP_TIMEOUT) == errno.EINVAL
        assert qp.query(e.IBV_QP_STATE)[0].qp_state == RTS


@pytest.mark.parametrize("claimed", [RTR, SQD, SQE])
def test_a_wrong_current_state_is_refused(bed: Bed, claimed: int) -> None:
    with queue_pair(bed, UD, RTS) as qp:
        assert change(bed.context, qp, RTS, e.IBV_QP_CUR_STATE, current=claimed) == errno.EINVAL


def test_a_state_that_does_not_exist_is_refused(bed: Bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        assert change(bed.context, qp, 7, 0) == errno.EINVAL
        assert change(bed.context, qp, 255, 0) == errno.EINVAL


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("port_num", 0, errno.EINVAL),
        ("port_num", 2, errno.EINVAL),
        ("pkey_index", 1, errno.EINVAL),
        ("pkey_index", 0xFFFF, errno.EINVAL),
    ],
)
def test_values_of_init(bed: Bed, name: str, value: int, code: int) -> None:
    context = bed.context
    with make(bed, RC) as qp:
        attr = full_attr(context)
        setattr(attr, name, value)
        attr.qp_state = INIT
        assert modify(qp, attr, mask("PKEY PORT ACCESS") | e.IBV_QP_STATE) == code


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("path_mtu", 0, errno.EINVAL),
        ("path_mtu", 6, errno.EINVAL),
        ("path_mtu", e.IBV_MTU_256, 0),
        ("path_mtu", e.IBV_MTU_4096, 0),
        ("max_dest_rd_atomic", 16, 0),
        ("max_dest_rd_atomic", 17, errno.EINVAL),
        ("max_dest_rd_atomic", 0, 0),
        ("rq_psn", 0xFFFFFF, 0),
    ],
)
def test_values_of_ready_to_receive(bed: Bed, name: str, value: int, code: int) -> None:
    context = bed.context
    with queue_pair(bed, RC, INIT) as qp:
        attr = full_attr(context, dest_qpn=qp.qp_num)
        setattr(attr, name, value)
        attr.qp_state = RTR
        assert modify(qp, attr, mask(TABLE[INIT, RTR, RC][0]) | e.IBV_QP_STATE) == code
        if not code and name != "path_mtu":
            assert getattr(qp.query(0xFFFFF)[0], name) == value


@pytest.mark.parametrize(("value", "code"), [(0, 0), (16, 0), (17, errno.EINVAL)])
def test_the_depth_of_reads_is_limited(bed: Bed, value: int, code: int) -> None:
    context = bed.context
    with queue_pair(bed, RC, RTR) as qp:
        attr = full_attr(context)
        attr.max_rd_atomic = value
        attr.qp_state = RTS
        assert modify(qp, attr, mask(TABLE[RTR, RTS, RC][0]) | e.IBV_QP_STATE) == code


@pytest.mark.parametrize(("gid_index", "code"), [(0, 0), (3, 0), (4, errno.ENODATA), (16, errno.EINVAL)])
def test_the_source_address_must_be_in_the_table(bed: Bed, gid_index: int, code: int) -> None:
    context = bed.context
    with queue_pair(bed, RC, INIT) as qp:
        attr = full_attr(context, dest_qpn=qp.qp_num)
        from pyverbs.addr import AHAttr, GlobalRoute

        route = GlobalRoute(dgid=context.query_gid(1, 3), sgid_index=gid_index)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        attr.qp_state = RTR
        assert modify(qp, attr, mask(TABLE[INIT, RTR, RC][0]) | e.IBV_QP_STATE) == code


def test_the_path_must_leave_through_the_port_of_init() -> None:
    with Context(name="mlx5_small") as context, PD(context) as pd, CQ(context, 8) as cq, QP(pd, init_attr(cq)) as qp:
        attr = full_attr(context)
        attr.qp_state = INIT
        assert modify(qp, attr, mask("PKEY PORT ACCESS") | e.IBV_QP_STATE) == 0
        from pyverbs.addr import AHAttr, GlobalRoute

        route = GlobalRoute(dgid=context.query_gid(2, 3), sgid_index=3)
        attr.ah_attr = AHAttr(port_num=2, is_global=1, gr=route)
        attr.max_dest_rd_atomic = 1
        attr.qp_state = RTR
        assert modify(qp, attr, mask(TABLE[INIT, RTR, RC][0]) | e.IBV_QP_STATE) == errno.EINVAL


# ------------------------------------------------------------------ query


def test_query_gives_back_what_modify_set(bed: Bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        attr, init = qp.query(0xFFFFF)
        assert (attr.qp_state, attr.cur_qp_state) == (RTS, RTS)
        assert attr.path_mtu == e.IBV_MTU_1024
        assert attr.dest_qp_num == qp.qp_num
        assert (attr.rq_psn, attr.sq_psn) == (1, 1)
        assert attr.qp_access_flags == REMOTE
        assert (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer) == (14, 7, 7, 12)
        assert (attr.max_rd_atomic, attr.max_dest_rd_atomic) == (1, 1)
        assert (attr.port_num, attr.pkey_index) == (1, 0)
        assert attr.ah_attr.port_num == 1
        assert init.cap.max_recv_wr == 8


def test_reset_forgets_everything(bed: Bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        assert change(bed.context, qp, RESET, 0) == 0
        attr: QPAttr = qp.query(0xFFFFF)[0]
        assert (attr.dest_qp_num, attr.rq_psn, attr.timeout, attr.path_mtu, attr.port_num) == (0, 0, 0, 0, 0)
        assert change(bed.context, qp, INIT, mask("PKEY PORT ACCESS")) == 0


def test_a_queue_pair_can_go_round_again_and_again(bed: Bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        for _ in range(20):
            assert change(bed.context, qp, ERR, 0) == 0
            assert change(bed.context, qp, RESET, 0) == 0
            for at, to in ((RESET, INIT), (INIT, RTR), (RTR, RTS)):
                assert change(bed.context, qp, to, mask(TABLE[at, to, RC][0])) == 0


def test_a_privileged_q_key_needs_the_capability(run_python) -> None:
    """IB_QP_SET_QKEY: only who may use raw sockets may set the upper bit."""
    run_python("""
        import ctypes, errno, os
        import aiordma.emulator
        aiordma.emulator.attach()
        from pyverbs import enums as e
        from pyverbs.device import Context
        from pyverbs.pd import PD
        from pyverbs.cq import CQ
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
        from pyverbs.pyverbs_error import PyverbsRDMAError
        context = Context(name="mlx5_0")
        pd, cq = PD(context), CQ(context, 8)
        mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_QKEY
        def to_init():
            qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=QPCap(1, 1, 1, 1)))
            attr = QPAttr(port_num=1)
            attr.qp_state, attr.qkey = e.IBV_QPS_INIT, 0x80000001
            try:
                qp.modify(attr, mask)
                return 0
            except PyverbsRDMAError as x:
                return x.error_code
        root = os.geteuid() == 0
        if root:
            assert to_init() == 0
            os.seteuid(65534)
        assert to_init() == errno.EPERM
        if root:
            os.seteuid(0)
    """)

"""Lives of verbs objects: who keeps whom, what is busy, what goes with its context."""

import errno
import os
import select

import pytest
from emulated.uverbs import Raw
from emulated.verbs import CQ, LOCAL, MR, PD, QP, REMOTE, Context, address, init_attr, refused
from pyverbs import enums as e
from pyverbs.addr import AH
from pyverbs.cq import CQEX, CompChannel, CqInitAttrEx
from pyverbs.device import Context as _Context
from pyverbs.mr import MW
from pyverbs.qp import QPEx, QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr

from aiordma import emulator

pytestmark = pytest.mark.usefixtures("leak_check")


def counts(name: str = "mlx5_0") -> dict[str, int]:
    return emulator.object_counts(name)


def test_counts_follow_every_kind_of_object() -> None:
    with Context(name="mlx5_0") as context:
        channel = CompChannel(context)
        pd, cq = PD(context), CQ(context, 10, None, channel)
        srq = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=4, max_sge=1)))
        objects = [
            MR(pd, 4096, LOCAL),
            MW(pd, e.IBV_MW_TYPE_1),
            AH(pd, attr=address(context)),
            QP(pd, init_attr(cq)),
            srq,
        ]
        got = counts()
        assert {k: got[k] for k in ("pd", "mr", "mw", "ah", "cq", "qp", "srq")} == dict.fromkeys(
            ("pd", "mr", "mw", "ah", "cq", "qp", "srq"), 1
        )
        assert got["channel"] == 2  # the context's asynchronous events have one too
        for o in objects:
            o.close()
        got = counts()
        assert not any(got[k] for k in ("mr", "mw", "ah", "qp", "srq"))


def test_a_closed_context_takes_everything_with_it() -> None:
    context = Context(name="mlx5_0")
    pd, channel = PD(context), CompChannel(context)
    cq = CQ(context, 10, None, channel)
    keep = [MR(pd, 4096, LOCAL), MW(pd, e.IBV_MW_TYPE_2), AH(pd, attr=address(context)), QP(pd, init_attr(cq))]
    context.close()
    assert not any(counts().values())
    assert keep


@pytest.mark.parametrize("child", ["mr", "mw", "ah", "qp", "srq"])
def test_a_protection_domain_in_use_is_busy(child: str) -> None:
    with Raw("mlx5_0") as raw:
        pd, cq = raw.alloc_pd(), raw.create_cq()
        handle = {
            "mr": lambda: raw.reg_mr(pd),
            "mw": lambda: raw.alloc_mw(pd),
            "ah": lambda: raw.create_ah(pd),
            "qp": lambda: raw.create_qp(pd, cq),
            "srq": lambda: raw.create_srq(pd),
        }[child]()
        assert raw.destroy("pd", pd) == errno.EBUSY
        assert raw.destroy(child, handle) == 0
        assert raw.destroy("pd", pd) == 0
        assert raw.destroy("pd", pd) == errno.ENOENT


def test_a_completion_queue_is_busy_as_long_as_a_queue_pair_uses_it_for_anything() -> None:
    with Raw("mlx5_0") as raw:
        pd, send, receive = raw.alloc_pd(), raw.create_cq(), raw.create_cq()
        qp = raw.create_qp(pd, send, receive)
        assert raw.destroy("cq", send) == errno.EBUSY
        assert raw.destroy("cq", receive) == errno.EBUSY
        assert raw.destroy("qp", qp) == 0
        assert raw.destroy("cq", send) == 0
        assert raw.destroy("cq", receive) == 0


def test_a_shared_receive_queue_is_busy_while_a_queue_pair_receives_from_it() -> None:
    with Raw("mlx5_0") as raw:
        pd, cq = raw.alloc_pd(), raw.create_cq()
        srq = raw.create_srq(pd)
        qp = raw.create_qp(pd, cq, srq=srq)
        assert raw.destroy("srq", srq) == errno.EBUSY
        assert raw.destroy("qp", qp) == 0
        assert raw.destroy("srq", srq) == 0


def test_handles_belong_to_one_context() -> None:
    with Raw("mlx5_0") as one, Raw("mlx5_0") as other:
        pd = one.alloc_pd()
        assert other.destroy("pd", pd) == errno.ENOENT
        assert one.destroy("pd", pd) == 0


def test_a_handle_of_another_kind_is_invalid_and_an_unknown_one_does_not_exist() -> None:
    with Raw("mlx5_0") as raw:
        pd, cq = raw.alloc_pd(), raw.create_cq()
        assert raw.destroy("cq", pd) == errno.EINVAL
        assert raw.destroy("pd", cq) == errno.EINVAL
        for kind in ("pd", "cq", "qp", "mr", "mw", "ah", "srq"):
            assert raw.destroy(kind, 12345) == errno.ENOENT
            assert raw.destroy(kind, 0xFFFFFFFF) == errno.ENOENT
        assert raw.create_qp_error(pd, 999) == errno.EINVAL
        assert raw.create_qp_error(999, cq) == errno.EINVAL


def test_the_lowest_free_handle_is_given_again() -> None:
    with Raw("mlx5_0") as raw:
        first, second, third = raw.alloc_pd(), raw.alloc_pd(), raw.alloc_pd()
        assert [first, second, third] == [0, 1, 2]
        raw.destroy("pd", second)
        assert raw.alloc_pd() == second
        assert raw.alloc_pd() == 3


def test_queue_numbers_are_not_given_again_at_once() -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd, CQ(context, 10) as cq:
        numbers = []
        for _ in range(5):
            with QP(pd, init_attr(cq)) as qp:
                numbers.append(qp.qp_num)
        assert len(set(numbers)) == 5


# ------------------------------------------------------------------ channels


def test_a_channel_of_another_context_or_no_channel_at_all_is_a_bad_descriptor() -> None:
    with Raw("mlx5_0") as one, Raw("mlx5_0") as other:
        channel = one.create_comp_channel()
        assert other.create_cq_error(channel=channel) == errno.EBADF
        assert one.create_cq_error(channel=0) == errno.EBADF
        assert one.create_cq_error(channel=1 << 20) == errno.EBADF


def test_a_channel_closed_under_its_completion_queue_only_loses_events() -> None:
    with Raw("mlx5_0") as raw:
        channel = raw.create_comp_channel()
        cq = raw.create_cq(channel=channel)
        assert raw.close(channel) == 0
        assert raw.destroy("cq", cq) == 0
        assert counts()["channel"] == 0 or counts()["channel"] == 1


def test_events_of_a_closed_context_end_with_the_end_of_file() -> None:
    raw = Raw("mlx5_0")
    with raw:
        channel = raw.create_comp_channel()
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    assert poll.poll(20_000)[0][1] & select.POLLHUP
    assert os.read(channel, 8) == b""
    os.close(channel)


# ------------------------------------------------------------------ completion queues


def test_sizes_are_rounded_up_to_a_power_of_two_less_one() -> None:
    with Context(name="mlx5_0") as context:
        for asked, got in ((1, 1), (2, 3), (100, 127), (4096, 8191)):
            with CQ(context, asked) as cq:
                assert cq.cqe == got


def test_a_completion_queue_needs_a_vector_that_exists() -> None:
    with Context(name="mlx5_small") as context:
        CQ(context, 1, comp_vector=1).close()
        with refused(errno.EINVAL):
            CQ(context, 1, comp_vector=2)


def test_extended_completion_queues_and_their_moderation() -> None:
    with Context(name="mlx5_0") as context:
        attr = CqInitAttrEx(cqe=64, wc_flags=e.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
        cq = CQEX(context, attr)
        cq.modify(e.IBV_CQ_ATTR_MODERATE, 10, 20) if hasattr(cq, "modify") else None
        cq.close()


def test_resizing_keeps_the_queue_usable() -> None:
    with Context(name="mlx5_0") as context, CQ(context, 10) as cq:
        cq.resize(100)
        assert cq.cqe == 127
        cq.resize(3)
        assert cq.cqe == 3
        with refused(errno.EINVAL):
            cq.resize(1 << 23)


# ------------------------------------------------------------------ queue pairs


@pytest.mark.parametrize("qp_type", [e.IBV_QPT_RC, e.IBV_QPT_UC, e.IBV_QPT_UD])
def test_queue_pairs_of_both_interfaces(qp_type: int) -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd, CQ(context, 10) as cq:
        with QP(pd, init_attr(cq, qp_type)) as qp:
            assert qp.qp_state == e.IBV_QPS_RESET
        attr = QPInitAttrEx(
            qp_type=qp_type,
            scq=cq,
            rcq=cq,
            pd=pd,
            cap=init_attr(cq).cap,
            comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=e.IBV_QP_EX_WITH_SEND,
        )
        with QPEx(context, attr) as qp:
            assert qp.qp_num


@pytest.mark.parametrize("qp_type", [e.IBV_QPT_RAW_PACKET])
def test_kinds_that_are_not_implemented_say_so(qp_type: int) -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd, CQ(context, 10) as cq, refused(errno.EOPNOTSUPP):
        QP(pd, init_attr(cq, qp_type, max_recv_wr=0, max_recv_sge=0))


def test_a_number_that_is_no_kind_is_invalid() -> None:
    with Raw("mlx5_0") as raw:
        assert raw.create_qp_error(raw.alloc_pd(), raw.create_cq(), qp_type=77) == errno.EINVAL


# ------------------------------------------------------------------ address handles


def test_an_address_needs_a_route_a_port_and_a_source() -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd:
        AH(pd, attr=address(context)).close()
        for change, code in (
            ({"port_num": 2}, errno.EINVAL),
            ({"is_global": 0}, errno.EINVAL),
        ):
            attr = address(context)
            for name, value in change.items():
                setattr(attr, name, value)
            with refused(code):
                AH(pd, attr=attr)
    with Raw("mlx5_0") as raw:
        domain = raw.alloc_pd()
        assert raw.create_ah_error(domain, sgid_index=4) == errno.ENODATA
        assert raw.create_ah_error(domain, sgid_index=16) == errno.EINVAL


# ------------------------------------------------------------------ shared receive queues


def test_a_shared_receive_queue_reports_what_it_really_holds() -> None:
    attr = SrqAttr(max_wr=100, max_sge=3, srq_limit=7)
    with Context(name="mlx5_0") as context, PD(context) as pd, SRQ(pd, SrqInitAttr(attr)) as srq:
        attr = srq.query()
        # libmlx5 asks for twice the size, and keeps WQEs there whose completions weren't polled yet. The limit is
        # irrelevant at creation: ibv_create_srq(3).
        assert (attr.max_wr, attr.max_sge, attr.srq_limit) == (255, 3, 0)
        with refused(errno.EINVAL):
            srq.modify(SrqAttr(srq_limit=256), e.IBV_SRQ_LIMIT)
        with refused(errno.EINVAL):
            srq.modify(SrqAttr(max_wr=200), e.IBV_SRQ_MAX_WR)


def test_a_descriptor_may_be_duplicated_and_the_context_lives_until_the_last_is_closed() -> None:
    with Context(name="mlx5_0") as context:
        second = _Context(cmd_fd=os.dup(context.cmd_fd))
        pd = PD(context)
        context.close()
        assert counts()["pd"] == 0 or counts()["pd"] == 1
        assert second.query_port(1).state == e.IBV_PORT_ACTIVE
        second.close()
        assert pd
    assert not any(counts().values())


def test_remote_access_needs_nothing_but_itself() -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd:
        MR(pd, 64, LOCAL | REMOTE).close()

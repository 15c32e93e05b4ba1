"""Limits of a device: each is kept, counted over all contexts, and given back."""

import errno
from collections.abc import Callable

import pytest
from emulated.conftest import SMALL_LIMITS
from emulated.uverbs import Raw
from emulated.verbs import CQ, PD, QP, Context, full_attr, init_attr, modify, refused
from pyverbs import enums as e

pytestmark = pytest.mark.usefixtures("leak_check")


def makers(raw: Raw) -> dict[str, Callable[[], int]]:
    pd, cq = raw.alloc_pd(), raw.create_cq()
    return {
        "pd": raw.alloc_pd,
        "mr": lambda: raw.reg_mr(pd),
        "mw": lambda: raw.alloc_mw(pd),
        "ah": lambda: raw.create_ah(pd),
        "cq": raw.create_cq,
        "qp": lambda: raw.create_qp(pd, cq),
        "srq": lambda: raw.create_srq(pd),
    }


@pytest.mark.parametrize("kind", ["pd", "mr", "mw", "ah", "cq", "qp", "srq"])
def test_one_object_too_many_is_out_of_memory(kind: str) -> None:
    limit = getattr(SMALL_LIMITS, f"max_{kind}")
    with Raw("mlx5_small") as raw, Raw("mlx5_small") as other:
        make, make_there = makers(raw)[kind], makers(other)[kind]
        there_already = 2 if kind in ("pd", "cq") else 0  # makers() has made one in each context
        made = [make() for _ in range(limit - there_already)]
        for full in (make, make_there):
            with pytest.raises(OSError) as caught:
                full()
            assert caught.value.errno == errno.ENOMEM
        assert raw.destroy(kind, made.pop()) == 0
        make_there()


@pytest.mark.parametrize(
    ("cap", "fits"),
    [
        ({"max_send_wr": 64}, True),
        ({"max_send_wr": 65}, False),
        ({"max_recv_wr": 64}, True),
        ({"max_recv_wr": 65}, False),
        ({"max_send_sge": 4}, True),
        ({"max_recv_sge": 4}, True),
        ({"max_inline": 64}, True),
        # What libmlx5 asks for is rounded up: with the control segments, to WQEs of whole 64 bytes.
        ({"max_inline": 143}, True),
        ({"max_inline": 144}, False),
    ],
)
def test_a_queue_pair_is_limited_in_every_way(cap: dict[str, int], fits: bool) -> None:
    with Raw("mlx5_small") as raw:
        counts = {"sq_wqe_count": 64, "rq_wqe_count": 64, "rq_wqe_shift": 6}
        code = raw.create_qp_error(raw.alloc_pd(), raw.create_cq(), **counts, **cap)
        assert code == (0 if fits else errno.EINVAL)


def test_the_library_knows_the_limits_too() -> None:
    with Context(name="mlx5_small") as context, PD(context) as pd, CQ(context, 64) as cq:
        QP(pd, init_attr(cq, max_send_wr=16, max_recv_wr=64)).close()
        for cap in ({"max_send_wr": 1000}, {"max_recv_wr": 65}, {"max_send_sge": 5}):
            with pytest.raises(Exception, match="QP"):
                QP(pd, init_attr(cq, **cap))


def test_a_completion_queue_is_as_long_as_the_device_can_make_it() -> None:
    with Context(name="mlx5_small") as context:
        with CQ(context, 127) as cq:
            assert cq.cqe == 127
            with refused(errno.EINVAL):
                cq.resize(128)
        with refused(errno.EINVAL):
            CQ(context, 128)


def test_a_shared_receive_queue_is_as_long_as_the_device_can_make_it() -> None:
    with Raw("mlx5_small") as raw:
        pd = raw.alloc_pd()
        assert raw.create_srq_error(pd, max_wr=63) == 0
        assert raw.create_srq_error(pd, max_wr=64) == errno.EINVAL
        assert raw.create_srq_error(pd, max_sge=2) == 0
    with Raw("mlx5_small") as raw:
        assert raw.create_srq_error(raw.alloc_pd(), max_sge=3) == errno.EINVAL


@pytest.mark.parametrize(("initiator", "responder", "at"), [(2, 4, None), (3, 4, "RTS"), (2, 5, "RTR")])
def test_the_depth_of_reads_is_limited_each_way(initiator: int, responder: int, at: str | None) -> None:
    with Context(name="mlx5_small") as context, PD(context) as pd, CQ(context, 8) as cq, QP(pd, init_attr(cq)) as qp:
        attr = full_attr(context, dest_qpn=qp.qp_num)
        attr.max_rd_atomic, attr.max_dest_rd_atomic = initiator, responder
        steps = {
            "INIT": e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS,
            "RTR": e.IBV_QP_AV
            | e.IBV_QP_PATH_MTU
            | e.IBV_QP_DEST_QPN
            | e.IBV_QP_RQ_PSN
            | e.IBV_QP_MAX_DEST_RD_ATOMIC
            | e.IBV_QP_MIN_RNR_TIMER,
            "RTS": e.IBV_QP_TIMEOUT
            | e.IBV_QP_RETRY_CNT
            | e.IBV_QP_RNR_RETRY
            | e.IBV_QP_SQ_PSN
            | e.IBV_QP_MAX_QP_RD_ATOMIC,
        }
        for state, mask in steps.items():
            attr.qp_state = getattr(e, f"IBV_QPS_{state}")
            code = modify(qp, attr, mask | e.IBV_QP_STATE)
            assert code == (errno.EINVAL if state == at else 0), state
            if code:
                break


def test_devices_have_limits_of_their_own() -> None:
    with Raw("mlx5_small") as small, Raw("mlx5_0") as large:
        for _ in range(3):
            small.alloc_pd()
        assert [large.alloc_pd() for _ in range(10)]


def test_ten_thousand_objects() -> None:
    with Context(name="mlx5_0") as context:
        domains = [PD(context) for _ in range(10_000)]
        for domain in domains[::2]:
            domain.close()
        more = [PD(context) for _ in range(5_000)]
        assert len(more) == 5000

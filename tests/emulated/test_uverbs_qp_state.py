"""A queue pair's states: what each change needs, what it allows, and that everything else is refused.

The expected table is written out again here, from the kernel's qp_state_table (drivers/infiniband/core/verbs.c), in
another form than in the emulator.
"""

import errno
import itertools
from collections.abc import Iterator

import pytest
from emulated.verbs import CQ, PD, QP, REMOTE, Context, full_attr, init_attr, modify
from pyverbs import enums as e
from pyverbs.qp import QPAttr

RC, UC, UD = e.IBV_QPT_RC, e.IBV_QPT_UC, e.IBV_QPT_UD
TYPES = {"RC": RC, "UC": UC, "UD": UD}
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

#: (from, to, type): (required, optional). RoCE has no alternate path, so ALT is optional nowhere here.
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
}
for _state, _type in itertools.product(range(7), TYPES.values()):
    TABLE[_state, RESET, _type] = ("", "")
    if _state != RESET:
        TABLE[_state, ERR, _type] = ("", "")


def mask(names: str) -> int:
    return sum(BITS[name] for name in names.split())


@pytest.fixture(scope="module")
def bed(emulated_nic) -> Iterator[tuple[Context, PD, CQ]]:
    with Context(name="mlx5_0") as context, PD(context) as pd, CQ(context, 64) as cq:
        yield context, pd, cq


def change(context: Context, qp: QP, to: int | None, bits: int, current: int = RTS) -> int:
    attr = full_attr(context, dest_qpn=qp.qp_num)
    attr.cur_qp_state = current
    if to is not None:
        attr.qp_state = to
        bits |= e.IBV_QP_STATE
    return modify(qp, attr, bits)


def queue_pair(bed: tuple[Context, PD, CQ], qp_type: int, state: int) -> QP:
    """A queue pair, taken to a state on the shortest way."""
    context, pd, cq = bed
    qp = QP(pd, init_attr(cq, qp_type))
    way = {RESET: [], INIT: [INIT], RTR: [INIT, RTR], RTS: [INIT, RTR, RTS], ERR: [INIT, ERR]}[state]
    at = RESET
    for to in way:
        assert change(context, qp, to, mask(TABLE[at, to, qp_type][0])) == 0
        at = to
    assert qp.query(e.IBV_QP_STATE)[0].qp_state == state
    return qp


REACHABLE = [RESET, INIT, RTR, RTS, ERR]
PAIRS = list(itertools.product(REACHABLE, range(7), TYPES))


def name_of(value: object) -> str:
    names = [k for k, v in STATES.items() if v == value]
    return names[0] if isinstance(value, int) else str(value)


@pytest.mark.parametrize(("at", "to", "kind"), PAIRS, ids=lambda v: name_of(v))
def test_every_change_of_state_is_allowed_or_refused_as_the_kernel_does(bed, at: int, to: int, kind: str) -> None:
    qp_type = TYPES[kind]
    with queue_pair(bed, qp_type, at) as qp:
        required, _ = TABLE.get((at, to, qp_type), ("", ""))
        allowed = (at, to, qp_type) in TABLE
        assert change(bed[0], qp, to, mask(required)) == (0 if allowed else errno.EINVAL)
        assert qp.query(e.IBV_QP_STATE)[0].qp_state == (to if allowed else at)


REQUIRED = [
    (at, to, kind, missing)
    for (at, to, qp_type), (required, _) in TABLE.items()
    for kind in TYPES
    if TYPES[kind] == qp_type and at in REACHABLE
    for missing in required.split()
]


@pytest.mark.parametrize(("at", "to", "kind", "missing"), REQUIRED, ids=lambda v: name_of(v))
def test_a_required_attribute_may_not_be_missing(bed, at: int, to: int, kind: str, missing: str) -> None:
    with queue_pair(bed, TYPES[kind], at) as qp:
        required = mask(TABLE[at, to, TYPES[kind]][0]) & ~BITS[missing]
        assert change(bed[0], qp, to, required) == errno.EINVAL
        assert qp.query(e.IBV_QP_STATE)[0].qp_state == at


@pytest.mark.parametrize(
    ("at", "to", "kind"),
    [(at, to, kind) for (at, to, t) in TABLE for kind in TYPES if TYPES[kind] == t and at in REACHABLE],
    ids=lambda v: name_of(v),
)
def test_optional_attributes_are_allowed_and_no_others(bed, at: int, to: int, kind: str) -> None:
    required, optional = TABLE[at, to, TYPES[kind]]
    for name in BITS:
        if name in required.split():
            continue
        with queue_pair(bed, TYPES[kind], at) as qp:
            got = change(bed[0], qp, to, mask(required) | BITS[name], current=at)
            assert got == (0 if name in optional.split() else errno.EINVAL), name


def test_without_a_state_the_queue_pair_stays_and_attributes_are_as_for_that(bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        assert change(bed[0], qp, None, e.IBV_QP_MIN_RNR_TIMER) == 0
        assert change(bed[0], qp, None, e.IBV_QP_TIMEOUT) == errno.EINVAL
        assert qp.query(e.IBV_QP_STATE)[0].qp_state == RTS


@pytest.mark.parametrize("claimed", [RTR, SQD, SQE])
def test_a_wrong_current_state_is_refused(bed, claimed: int) -> None:
    with queue_pair(bed, UD, RTS) as qp:
        assert change(bed[0], qp, RTS, e.IBV_QP_CUR_STATE, current=claimed) == errno.EINVAL


def test_a_state_that_does_not_exist_is_refused(bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        assert change(bed[0], qp, 7, 0) == errno.EINVAL
        assert change(bed[0], qp, 255, 0) == errno.EINVAL


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
def test_values_of_init(bed, name: str, value: int, code: int) -> None:
    context, pd, cq = bed
    with QP(pd, init_attr(cq)) as qp:
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
def test_values_of_ready_to_receive(bed, name: str, value: int, code: int) -> None:
    context, _, _ = bed
    with queue_pair(bed, RC, INIT) as qp:
        attr = full_attr(context, dest_qpn=qp.qp_num)
        setattr(attr, name, value)
        attr.qp_state = RTR
        assert modify(qp, attr, mask(TABLE[INIT, RTR, RC][0]) | e.IBV_QP_STATE) == code
        if not code and name != "path_mtu":
            assert getattr(qp.query(0xFFFFF)[0], name) == value


@pytest.mark.parametrize(("value", "code"), [(0, 0), (16, 0), (17, errno.EINVAL)])
def test_the_depth_of_reads_is_limited(bed, value: int, code: int) -> None:
    context, _, _ = bed
    with queue_pair(bed, RC, RTR) as qp:
        attr = full_attr(context)
        attr.max_rd_atomic = value
        attr.qp_state = RTS
        assert modify(qp, attr, mask(TABLE[RTR, RTS, RC][0]) | e.IBV_QP_STATE) == code


@pytest.mark.parametrize(("gid_index", "code"), [(0, 0), (3, 0), (4, errno.ENODATA), (16, errno.EINVAL)])
def test_the_source_address_must_be_in_the_table(bed, gid_index: int, code: int) -> None:
    context, _, _ = bed
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


def test_query_gives_back_what_modify_set(bed) -> None:
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


def test_reset_forgets_everything(bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        assert change(bed[0], qp, RESET, 0) == 0
        attr: QPAttr = qp.query(0xFFFFF)[0]
        assert (attr.dest_qp_num, attr.rq_psn, attr.timeout, attr.path_mtu, attr.port_num) == (0, 0, 0, 0, 0)
        assert change(bed[0], qp, INIT, mask("PKEY PORT ACCESS")) == 0


def test_a_queue_pair_can_go_round_again_and_again(bed) -> None:
    with queue_pair(bed, RC, RTS) as qp:
        for _ in range(20):
            assert change(bed[0], qp, ERR, 0) == 0
            assert change(bed[0], qp, RESET, 0) == 0
            for at, to in ((RESET, INIT), (INIT, RTR), (RTR, RTS)):
                assert change(bed[0], qp, to, mask(TABLE[at, to, RC][0])) == 0


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

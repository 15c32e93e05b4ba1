"""Connected QPs on the emulated NIC, through pyverbs, and short forms of posting and polling."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from pyverbs import enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC, CompChannel
from pyverbs.device import AsyncEvent, Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ
from pyverbs.wr import SGE, RecvWR, SendWR

from aiordma import emulator

ALL_ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
)
GID_INDEX = 3
QKEY = 0x11111111


class End:
    """One end of a connection: a context with a PD, two CQs, a QP and some memory, filled with a pattern of its own."""

    def __init__(
        self,
        device: str = "mlx5_0",
        *,
        qp_type: int = e.IBV_QPT_RC,
        size: int = 65536,
        cqe: int = 255,
        recv_cqe: int | None = None,
        events: bool = False,
        srq: SRQ | None = None,
        context: Context | None = None,
        pd: PD | None = None,
        access: int = ALL_ACCESS,
        sq_sig_all: int = 0,
        **cap: int,
    ) -> None:
        self._stack = contextlib.ExitStack()
        own = self._stack.enter_context
        self.device = device
        self.context = context or own(Context(name=device))
        self.pd = pd or own(PD(self.context))
        self.channel = own(CompChannel(self.context)) if events else None
        self.scq = own(CQ(self.context, cqe))
        self.rcq = own(CQ(self.context, recv_cqe or cqe, None, self.channel))
        self.mr = own(MR(self.pd, size, access))
        caps = {"max_send_wr": 128, "max_recv_wr": 128, "max_send_sge": 4, "max_recv_sge": 4, "max_inline_data": 256}
        attr = QPInitAttr(
            qp_type=qp_type,
            scq=self.scq,
            rcq=self.rcq,
            cap=QPCap(**(caps | cap)),
            srq=srq,
            sq_sig_all=sq_sig_all,
        )
        self.qp = own(QP(self.pd, attr))
        self.seed = self.qp.qp_num & 0xFF

    def close(self) -> None:
        self._stack.close()

    def fill(self, length: int, offset: int = 0) -> bytes:
        data = bytes((i * 31 + self.seed + offset) & 0xFF for i in range(length))
        self.mr.write(data, length, offset)
        return data

    def read(self, length: int, offset: int = 0) -> bytes:
        return bytes(self.mr.read(length, offset))

    def sge(self, length: int, offset: int = 0, **other: int) -> SGE:
        return SGE(self.mr.buf + offset, length, other.get("key", self.mr.lkey))

    def address(self, peer: "End") -> AHAttr:
        route = GlobalRoute(dgid=peer.context.query_gid(1, GID_INDEX), sgid_index=GID_INDEX)
        return AHAttr(port_num=1, is_global=1, gr=route)

    def connect(self, peer: "End", **changes: Any) -> None:
        attr = QPAttr(port_num=1)
        defaults = {
            "qp_access_flags": ALL_ACCESS,
            "path_mtu": e.IBV_MTU_1024,
            "dest_qp_num": peer.qp.qp_num,
            "rq_psn": 100,
            "sq_psn": 100,
            "max_rd_atomic": 16,
            "max_dest_rd_atomic": 16,
            "min_rnr_timer": 1,
            "timeout": 18,  # 1 s: what another process is to answer it does
            "retry_cnt": 7,
            "rnr_retry": 7,
            "qkey": QKEY,
            "ah_attr": self.address(peer),
        }
        for name, value in (defaults | changes).items():
            setattr(attr, name, value)
        self.qp.to_rts(attr)

    def state(self, state: int) -> None:
        attr = QPAttr()
        attr.qp_state = state
        self.qp.modify(attr, e.IBV_QP_STATE)

    def query_state(self) -> int:
        return int(self.qp.query(e.IBV_QP_STATE)[0].qp_state)

    def recv(self, *sges: SGE, wr_id: int = 0) -> None:
        self.qp.post_recv(RecvWR(wr_id=wr_id, num_sge=len(sges), sg=list(sges)))

    def post(
        self,
        opcode: int,
        *sges: SGE,
        peer: "End | None" = None,
        offset: int = 0,
        wr_id: int = 0,
        flags: int = e.IBV_SEND_SIGNALED,
        imm: int = 0,
        atomic: tuple[int, int] | None = None,
        ah: AH | None = None,
        qkey: int = QKEY,
        rkey: int | None = None,
    ) -> None:
        wr = SendWR(wr_id=wr_id, opcode=opcode, num_sge=len(sges), sg=list(sges), imm_data=imm, send_flags=flags)
        if ah is not None:
            assert peer is not None
            wr.set_wr_ud(ah, peer.qp.qp_num, qkey)
        elif peer is not None:
            rkey = peer.mr.rkey if rkey is None else rkey
            if atomic is None:
                wr.set_wr_rdma(rkey, peer.mr.buf + offset)
            else:
                wr.set_wr_atomic(rkey, peer.mr.buf + offset, *atomic)
        self.qp.post_send(wr)

    def sent(self, timeout: float = 10) -> WC:
        return poll(self.scq, timeout)

    def received(self, timeout: float = 10) -> WC:
        return poll(self.rcq, timeout)

    def async_event(self) -> int:
        """The type of the next asynchronous event: to be called only when one is certain to come."""
        event: AsyncEvent = self.context.get_async_event()
        event.ack()
        return int(event.event_type)


def poll(cq: CQ, timeout: float = 10) -> WC:
    end = time.monotonic() + timeout
    while True:
        n, completions = cq.poll(1)
        if n:
            return completions[0]
        assert time.monotonic() < end, "no completion"


def nothing(cq: CQ, seconds: float = 0.01) -> None:
    time.sleep(seconds)
    n, completions = cq.poll(1)
    assert not n, f"unexpected completion: {completions[0]}"


@contextlib.contextmanager
def pair(
    *, devices: tuple[str, str] = ("mlx5_0", "mlx5_1"), connect: bool = True, **options: Any
) -> Iterator[tuple[End, End]]:
    """Two ends, each on a device of its own, connected."""
    before = {d: emulator.object_counts(d) for d in set(devices)}
    a, b = (End(d, **options) for d in devices)
    try:
        if connect:
            a.connect(b)
            b.connect(a)
        yield a, b
    finally:
        b.close()
        a.close()
    assert {d: emulator.object_counts(d) for d in set(devices)} == before


def ok(completion: WC, wr_id: int | None = None) -> WC:
    assert completion.status == e.IBV_WC_SUCCESS, f"status {completion.status}"
    if wr_id is not None:
        assert completion.wr_id == wr_id
    return completion

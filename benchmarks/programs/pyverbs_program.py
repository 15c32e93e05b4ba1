"""pyverbs alone, what a program without aiordma would do: DEVICE WORKLOAD SIZE WINDOW QPS HOW [LOOP]

  write      WINDOW in flight, each signalled, a new one for each that completes
  pingpong   messages there and back

HOW: "reuse" is pyverbs at its best, and only possible where the same bytes go to the same place every time: one work
request, made beforehand. "new" makes one for each operation, as a program does whose addresses differ. "await" is the first
idea of somebody on asyncio: a future for each operation, and add_reader() on the completion channel's descriptor.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
from collections import deque

import blocking
import protocol
import pyverbs.enums as e
from protocol import INLINE, PORT, Options
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR


def gid_index(context: Context) -> int:
    """The port's first RoCE v2 entry; 0 where there is none."""
    for index in range(context.query_port(PORT).gid_tbl_len):
        try:
            if context.query_gid_ex(PORT, index).gid_type == e.IBV_GID_TYPE_ROCE_V2:
                return index
        except Exception:
            continue
    return 0


def connect(context: Context, qp: QP, peer: int) -> None:
    port = context.query_port(PORT)
    index = gid_index(context)
    route = GlobalRoute(GID(context.query_gid(PORT, index).gid), index)
    route.hop_limit = 64
    path = AHAttr(port_num=PORT, is_global=1, gr=route, dlid=port.lid)
    attr = QPAttr(port_num=PORT)
    attr.dest_qp_num = peer
    attr.path_mtu = port.active_mtu
    attr.max_dest_rd_atomic = attr.max_rd_atomic = 1
    attr.min_rnr_timer = 12
    attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
    attr.ah_attr = path
    attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 7, 7
    qp.to_rts(attr)


def readable_descriptors() -> set[tuple[int, str]]:
    """Descriptors that are open for reading only, and what they are."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:
            continue  # that of the listing itself
    return found


class World:
    """A device, two connected QPs, memory."""

    def __init__(self, o: Options, events: bool = False) -> None:
        self.o = o
        self.context = Context(name=o.device)
        self.pd = PD(self.context)
        self.channel = self.fd = None
        if events:
            before = readable_descriptors()
            self.channel = CompChannel(self.context)
            # Older versions of pyverbs don't tell the descriptor: it's the new one that can be read.
            self.fd = getattr(self.channel, "fd", None) or (readable_descriptors() - before).pop()[0]
        self.send_cq = CQ(self.context, 2 * o.window + 64, None, self.channel, 0)
        self.recv_cq = CQ(self.context, 256)
        init = QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self.send_cq, rcq=self.recv_cq, cap=QPCap(o.depth, 16, 1, 1, INLINE)
        )
        self.qps = [QP(self.pd, init) for _ in range(2)]
        for qp, other in (self.qps, reversed(self.qps)):
            connect(self.context, qp, other.qp_num)
        self.memory = [protocol.memory(o.size), protocol.memory(o.size)]
        self.source, self.target = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.memory)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.source_mr, self.target_mr = (MR(self.pd, o.size, access, a) for a in (self.source, self.target))
        self.flags = e.IBV_SEND_SIGNALED | (e.IBV_SEND_INLINE if o.size <= INLINE else 0)

    def write(self, wr_id: int = 0) -> SendWR:
        wr = SendWR(
            wr_id=wr_id,
            opcode=e.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[SGE(self.source, self.o.size, self.source_mr.lkey)],
            send_flags=self.flags,
        )
        wr.set_wr_rdma(self.target_mr.rkey, self.target)
        return wr

    def message(self) -> SendWR:
        sge = SGE(self.source, self.o.size, self.source_mr.lkey)
        return SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=self.flags)

    def receive(self) -> RecvWR:
        return RecvWR(num_sge=1, sg=[SGE(self.target, self.o.size, self.target_mr.lkey)])


def reap(cq: CQ, most: int) -> int:
    while True:
        n, completions = cq.poll(most)
        if n:
            break
    for completion in completions:
        if completion.status:
            raise RuntimeError(f"an operation failed with status {completion.status}")
    return n


async def naive(o: Options) -> None:
    """A future for each write; the channel's descriptor wakes the loop."""
    w = World(o, events=True)
    assert w.channel is not None
    assert w.fd is not None
    os.set_blocking(w.fd, False)
    loop = asyncio.get_running_loop()
    pending: dict[int, asyncio.Future[None]] = {}
    number = 0

    def readable() -> None:
        w.channel.get_cq_event(w.send_cq)
        w.send_cq.ack_events(1)
        w.send_cq.req_notify()
        while True:
            n, completions = w.send_cq.poll(32)
            if not n:
                return
            for completion in completions:
                future = pending.pop(completion.wr_id)
                if completion.status:
                    future.set_exception(RuntimeError(f"a write failed with status {completion.status}"))
                else:
                    future.set_result(None)

    def post() -> asyncio.Future[None]:
        nonlocal number
        number += 1
        pending[number] = future = loop.create_future()
        w.qps[0].post_send(w.write(number))
        return future

    async def run(ops: int) -> int:
        flying = deque(post() for _ in range(min(o.window, ops)))
        for _ in range(ops - len(flying)):
            await flying.popleft()
            flying.append(post())
        while flying:
            await flying.popleft()
        return ops

    w.send_cq.req_notify()
    loop.add_reader(w.fd, readable)
    await protocol.serve_async(run, post)
    loop.remove_reader(w.fd)


if __name__ == "__main__":
    chosen = protocol.options()
    how = chosen.rest[0]
    if how == "await":
        protocol.run_on(chosen.rest[1], naive, chosen)
    else:
        world = World(chosen)  # to the end: its regions deregister themselves when nothing holds them
        loop = {"write": blocking.write, "pingpong": blocking.pingpong}[chosen.workload]
        protocol.serve(loop(world, reap, how == "reuse"))

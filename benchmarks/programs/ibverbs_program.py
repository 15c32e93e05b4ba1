"""PyPI's `ibverbs` (rdma4py), synchronously: DEVICE WORKLOAD SIZE WINDOW QPS HOW

Workloads and HOW as in pyverbs_program.py, and "batch": WINDOW at a time with one doorbell, the last one signalled.
"""

from __future__ import annotations

import ctypes
from typing import Any

import blocking
import ibverbs as ib
import protocol
from protocol import INLINE, PORT, Options


def gid_index(context: Any) -> int:
    """The port's first RoCE v2 entry. The package doesn't tell types of GIDs; Linux does, in a file."""
    for index in range(context.query_port(PORT).gid_tbl_len):
        path = f"/class/infiniband/{context.name}/ports/{PORT}/gid_attrs/types/{index}"
        for root in protocol.sysfs_roots():
            try:
                with open(root + path) as f:
                    if f.read().strip() == "RoCE v2":
                        return index
            except OSError:
                continue
    return 0


class World:
    """A device, two connected QPs, memory."""

    def __init__(self, o: Options) -> None:
        self.o = o
        self.context = next(d for d in ib.get_device_list() if d.name == o.device).open()
        self.pd = self.context.alloc_pd()
        self.send_cq = self.context.create_cq(2 * o.window + 64)
        self.recv_cq = self.context.create_cq(256)
        init = ib.QPInitAttr(
            send_cq=self.send_cq,
            recv_cq=self.recv_cq,
            qp_type=ib.QPType.RC,
            max_send_wr=o.depth,
            max_recv_wr=16,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=INLINE,
        )
        self.qps = [self.pd.create_qp(init) for _ in range(2)]
        access = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE
        index = gid_index(self.context)
        port, gid = self.context.query_port(PORT), self.context.query_gid(PORT, index)
        infos = [ib.local_qp_info(qp, port, gid, port=PORT, psn=0) for qp in self.qps]
        for qp, peer in zip(self.qps, reversed(infos), strict=True):
            ib.connect_rc(qp, peer, port=PORT, sgid_index=index, access=access)
        self.memory = [protocol.memory(o.size), protocol.memory(o.size)]
        self.source, self.target = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.memory)
        self.source_mr, self.target_mr = (self.pd.reg_mr(a, o.size, access) for a in (self.source, self.target))
        self.inline = ib.SendFlags.INLINE if o.size <= INLINE else 0

    def write(self, flags: int | None = None) -> Any:
        return ib.SendWR(
            sg_list=[ib.SGE(self.source, self.o.size, self.source_mr.lkey)],
            opcode=ib.WROpcode.RDMA_WRITE,
            send_flags=ib.SendFlags.SIGNALED | self.inline if flags is None else flags,
            remote_addr=self.target,
            rkey=self.target_mr.rkey,
        )

    def message(self) -> Any:
        sge = ib.SGE(self.source, self.o.size, self.source_mr.lkey)
        return ib.SendWR(sg_list=[sge], opcode=ib.WROpcode.SEND, send_flags=ib.SendFlags.SIGNALED | self.inline)

    def receive(self) -> Any:
        return ib.RecvWR(sg_list=[ib.SGE(self.target, self.o.size, self.target_mr.lkey)])


def reap(cq: Any, most: int) -> int:
    while not (found := cq.poll(most)):
        pass
    for completion in found:
        if completion.status:
            raise RuntimeError(f"an operation failed with status {completion.status}")
    return len(found)


def batch(w: World, reap: Any, reuse: bool) -> Any:
    def make() -> list[Any]:
        return [*(w.write(0) for _ in range(w.o.window - 1)), w.write(ib.SendFlags.SIGNALED)]

    made = make()

    def run(ops: int) -> int:
        done = 0
        while done < ops:
            w.qps[0].post_send(made if reuse else make())
            reap(w.send_cq, 1)
            done += w.o.window
        return done

    return run


if __name__ == "__main__":
    chosen = protocol.options()
    world = World(chosen)  # to the end: its regions deregister themselves when nothing holds them
    workload = {"write": blocking.write, "batch": batch, "pingpong": blocking.pingpong}[chosen.workload]
    protocol.serve(workload(world, reap, chosen.rest[0] == "reuse"))

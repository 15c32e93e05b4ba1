"""8-byte RDMA writes on pyverbs alone, synchronously: what a program without aiordma would do.

pyverbs_loop.py DEVICE one|many SLICES OPS N reuse|new

Prints one line of JSON, as benchmarks/c/write_loop.c does. "reuse" is pyverbs at its best, and only possible where the
same bytes go to the same place every time: one work request, made beforehand. "new" makes one for each write, as a
program does whose addresses differ. In both the bound methods are looked up once, and data goes inline.
"""

import ctypes
import json
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

PORT = 1
DEPTH = 1024


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


def main() -> None:
    device, mode, slices, ops = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    outstanding, reuse = int(sys.argv[5]), sys.argv[6] == "reuse"
    context = Context(name=device)
    pd = PD(context)
    cq = CQ(context, 4096)
    init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(DEPTH, 1, 1, 1, 64))
    qps = [QP(pd, init) for _ in range(2)]
    for qp, other in (qps, reversed(qps)):
        connect(context, qp, other.qp_num)

    memory = (ctypes.c_uint64 * 2)()
    address = ctypes.addressof(memory)
    mr = MR(pd, 16, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE, address)

    def make() -> SendWR:
        wr = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[SGE(address, 8, mr.lkey)],
            send_flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE,
        )
        wr.set_wr_rdma(mr.rkey, address + 8)
        return wr

    only = make()
    wr_for = (lambda: only) if reuse else make
    post, poll = qps[0].post_send, cq.poll

    def one_at_a_time() -> None:
        for _ in range(ops):
            post(wr_for())
            while True:
                n, completions = poll(1)
                if n:
                    break
            if completions[0].status:
                raise RuntimeError(f"a write failed with status {completions[0].status}")

    def many() -> None:
        posted = min(outstanding, ops)
        done = 0
        for _ in range(posted):
            post(wr_for())
        while done < ops:
            n, completions = poll(32)
            for completion in completions:
                if completion.status:
                    raise RuntimeError(f"a write failed with status {completion.status}")
            done += n
            for _ in range(min(n, ops - posted)):
                post(wr_for())
            posted += min(n, ops - posted)

    loop = {"one": one_at_a_time, "many": many}[mode]
    loop()  # warm up
    ns = []
    for _ in range(slices):
        began = time.perf_counter_ns()
        loop()
        ns.append(round((time.perf_counter_ns() - began) / ops, 1))
    print(json.dumps({"ns": ns}))
    for thing in (*qps, mr, cq, pd, context):
        thing.close()


main()

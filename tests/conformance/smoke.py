"""That the emulated NIC attaches to the rdma-core in use: an RDMA WRITE by pyverbs and one by aiordma, in this process.

Run by ``scripts/rdma-core-59.sh`` with a newer rdma-core than the distribution's. The argument is the version that it must
be.
"""

from __future__ import annotations

import asyncio
import sys

from aiordma import _pyverbs, emulator


def write_by_pyverbs() -> None:
    """Connect two queue pairs and write from one to the other."""
    try:
        import pyverbs.enums as e
    except ImportError:  # newer ones
        import pyverbs.libibverbs_enums as e
    from pyverbs.addr import AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, SendWR

    with Context(name="mlx5_0") as context, PD(context) as pd, CQ(context, 16) as cq:
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        source, target = MR(pd, 64, access), MR(pd, 64, access)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1))
        a, b = QP(pd, init), QP(pd, init)
        gid = context.query_gid(1, 3)
        for mine, other in ((a, b), (b, a)):
            route = GlobalRoute(dgid=gid, sgid_index=3)
            attr = QPAttr(
                qp_state=e.IBV_QPS_INIT,
                cur_qp_state=e.IBV_QPS_RESET,
                port_num=1,
                path_mtu=e.IBV_MTU_1024,
            )
            attr.qp_access_flags = access
            attr.dest_qp_num = other.qp_num
            attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
            attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
            attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
            mine.to_rts(attr)
        source.write(b"over the emulated wire", 22)
        wr = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(source.buf, 22, source.lkey)])
        wr.set_wr_rdma(target.rkey, target.buf)
        a.post_send(wr)
        for _ in range(1_000_000):
            _, completions = cq.poll(1)
            if completions:
                break
        assert [c.status for c in completions] == [e.IBV_WC_SUCCESS]
        assert target.read(22, 0) == b"over the emulated wire"


async def write_by_aiordma() -> None:
    """Do the same through aiordma, whose compiled parts must get along with this pyverbs."""
    import aiordma

    source, target = bytearray(b"aiordma"), bytearray(7)
    async with (
        aiordma.open_device("emulated") as device,
        device.reg_mr(source) as local,
        device.reg_mr(target) as remote,
        device.create_qp() as here,
        device.create_qp() as there,
    ):
        await here.connect(there.info)
        await there.connect(here.info)
        await here.rdma_write(local, remote.remote())
        assert target == source


def main() -> None:
    """Run both."""
    emulator.attach()
    assert _pyverbs.version() == sys.argv[1], f"this is rdma-core {_pyverbs.version()}"
    write_by_pyverbs()
    asyncio.run(write_by_aiordma())
    print(f"rdma-core {_pyverbs.version()}: attached in-process; writes by pyverbs and by aiordma")


if __name__ == "__main__":
    main()

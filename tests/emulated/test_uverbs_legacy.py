"""The write form of commands under real libraries: what an older kernel offers, and an older libibverbs uses."""

import pytest

TRAFFIC = """
    import sys
    import aiordma.emulator as emulator
    emulator.attach(devices=2, legacy_write={legacy})
    from pyverbs import enums as e
    from pyverbs.addr import AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR
    import time

    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ

    class Side:
        def __init__(self, name, srq=False):
            self.context = Context(name=name)
            self.pd = PD(self.context)
            self.mr = MR(self.pd, 4096, access)
            self.channel = CompChannel(self.context)
            self.cq = CQ(self.context, 16, None, self.channel)
            self.cq.resize(40)
            self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(max_wr=8, max_sge=1))) if srq else None
            self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, srq=self.srq,
                                             cap=QPCap(8, 8, 1, 1)))

        def connect(self, other):
            route = GlobalRoute(dgid=other.context.query_gid(1, 3), sgid_index=3)
            attr = QPAttr(port_num=1)
            attr.qp_access_flags, attr.dest_qp_num, attr.path_mtu = access, other.qp.qp_num, e.IBV_MTU_1024
            attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
            attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
            attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 7, 7, 12
            self.qp.to_rts(attr)

        def complete(self):
            end = time.monotonic() + 10
            while time.monotonic() < end:
                n, wcs = self.cq.poll(1)
                if n:
                    assert wcs[0].status == e.IBV_WC_SUCCESS, wcs[0]
                    return wcs[0]
            raise SystemExit("no completion")

    one, two = Side("mlx5_0"), Side("mlx5_1", srq=True)
    one.connect(two)
    two.connect(one)
    one.mr.write("hello", 5)

    write = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(one.mr.buf, 5, one.mr.lkey)])
    write.set_wr_rdma(two.mr.rkey, two.mr.buf + 100)
    one.qp.post_send(write)
    one.complete()
    assert two.mr.read(5, 100) == b"hello"

    two.cq.req_notify()
    two.srq.post_recv(RecvWR(num_sge=1, sg=[SGE(two.mr.buf, 64, two.mr.lkey)]))
    one.qp.post_send(SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[SGE(one.mr.buf, 5, one.mr.lkey)]))
    one.complete()
    two.channel.get_cq_event(two.cq)
    two.cq.ack_events(1)
    assert two.complete().byte_len == 5
    assert two.mr.read(5, 0) == b"hello"

    for side in (one, two):
        side.context.close()
    for name in ("mlx5_0", "mlx5_1"):
        assert not any(emulator.object_counts(name).values()), emulator.object_counts(name)
"""


@pytest.mark.parametrize("legacy", [False, True], ids=["ioctl", "write"])
def test_traffic_between_two_devices_in_either_form_of_the_abi(run_python, legacy: bool) -> None:
    done = run_python(TRAFFIC.format(legacy=legacy), AIORDMA_EMULATOR_LOG="debug")
    assert ("write CREATE_QP: ok" in done.stderr) == legacy
    assert ("ioctl UVERBS_METHOD_QP_CREATE: ok" in done.stderr) == (not legacy)


def test_traffic_over_doorbell_pages_mapped_by_index(run_python) -> None:
    """MLX5_SHUT_UP_BF makes libmlx5 map them as non-cached, another command in the offset."""
    run_python(TRAFFIC.format(legacy=True), MLX5_SHUT_UP_BF="1")


def test_a_fork_safe_program(run_python) -> None:
    """RDMAV_FORK_SAFE keeps registered memory out of children: libibverbs' own work, which must not trouble us."""
    run_python(TRAFFIC.format(legacy=False), RDMAV_FORK_SAFE="1")


def test_a_single_threaded_program(run_python) -> None:
    run_python(TRAFFIC.format(legacy=False), MLX5_SINGLE_THREADED="1")

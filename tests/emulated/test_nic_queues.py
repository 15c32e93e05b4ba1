"""Completion queues, shared receive queues, unreliable transports and windows of the emulated NIC."""

import os
import struct
import time

import pytest
from emulated.core import goes_quiet
from emulated.nic import ALL_ACCESS, GID_INDEX, QKEY, End, nothing, ok, pair, poll
from emulated.verbs import gid_text
from pyverbs import enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR, MW, MWBind, MWBindInfo
from pyverbs.pd import PD
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

# ---------------------------------------------------------------- completion queues


def test_overrun_kills_the_cq_and_the_qp_that_completed_on_it() -> None:
    with pair(recv_cqe=3) as (a, b):
        for _ in range(6):
            b.recv(b.sge(8))
        for _ in range(4):
            a.post(e.IBV_WR_SEND, a.sge(8))
            ok(a.sent())
        a.post(e.IBV_WR_SEND, a.sge(8))
        a.sent()
        assert b.async_event() == e.IBV_EVENT_CQ_ERR
        assert b.async_event() == e.IBV_EVENT_QP_FATAL
        assert b.query_state() == e.IBV_QPS_ERR
        for _ in range(4):
            ok(b.received())
        nothing(b.rcq)


def test_every_place_of_a_cq_can_be_used_over_and_over() -> None:
    with pair(recv_cqe=3) as (a, b):
        for _ in range(20):
            for i in range(4):
                b.recv(b.sge(8), wr_id=i)
                a.post(e.IBV_WR_SEND, a.sge(8))
                ok(a.sent())
            for i in range(4):
                ok(b.received(), i)


def test_an_event_is_raised_once_for_each_time_it_was_asked_for() -> None:
    with pair(events=True) as (a, b):
        assert b.channel is not None
        for round_ in range(10):
            b.rcq.req_notify()
            for i in range(2):
                b.recv(b.sge(8), wr_id=i)
                a.post(e.IBV_WR_SEND, a.sge(8))
                ok(a.sent())
            b.channel.get_cq_event(b.rcq)
            b.rcq.ack_events(1)
            for i in range(2):
                ok(b.received(), i)
            del round_


def test_arming_after_the_completion_still_raises_the_event() -> None:
    with pair(events=True) as (a, b):
        assert b.channel is not None
        b.recv(b.sge(8))
        a.post(e.IBV_WR_SEND, a.sge(8))
        ok(a.sent())
        time.sleep(0.02)  # the device sleeps: the doorbell has to wake it
        b.rcq.req_notify()
        b.channel.get_cq_event(b.rcq)
        b.rcq.ack_events(1)
        ok(b.received())


def test_destroying_a_cq_takes_its_unread_events_along() -> None:
    with Context(name="mlx5_0") as context, CompChannel(context) as channel, PD(context) as pd:
        end = End(context=context, pd=pd)
        cq = CQ(context, 10, None, channel)
        loop = End(context=context, pd=pd)
        loop.close()
        cq.req_notify()
        end.close()
        cq.close()  # would wait for ever for an event that nobody reads


def test_resized_cq_keeps_its_completions() -> None:
    with pair(recv_cqe=15) as (a, b):
        for cqe in (100, 7, 63):
            for i in range(5):
                b.recv(b.sge(8), wr_id=i)
                a.post(e.IBV_WR_SEND, a.sge(8))
                ok(a.sent())
            b.rcq.resize(cqe)
            for i in range(5, 7):
                b.recv(b.sge(8), wr_id=i)
                a.post(e.IBV_WR_SEND, a.sge(8))
                ok(a.sent())
            for i in range(7):
                ok(b.received(), i)
            nothing(b.rcq)


# ---------------------------------------------------------------- shared receive queues


def srq_receive(srq: SRQ, end: End, wr_id: int, length: int = 64) -> None:
    srq.post_recv(RecvWR(wr_id=wr_id, num_sge=1, sg=[end.sge(length, 64 * wr_id)]))


def test_srq_serves_all_its_qps_in_posting_order_and_tells_its_limit_once() -> None:
    with Context(name="mlx5_1") as context, PD(context) as pd:
        srq = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=16, max_sge=2)))
        receivers = [End("mlx5_1", context=context, pd=pd, srq=srq) for _ in range(2)]
        senders = [End() for _ in range(2)]
        for s, r in zip(senders, receivers, strict=True):
            s.connect(r)
            r.connect(s)
        for i in range(10):
            srq_receive(srq, receivers[0], i)
        srq.modify(SrqAttr(srq_limit=5), e.IBV_SRQ_LIMIT)
        data = senders[0].fill(64)
        for i in range(10):
            s, r = senders[i % 2], receivers[i % 2]
            s.mr.write(data, 64, 0)
            s.post(e.IBV_WR_SEND, s.sge(64))
            ok(s.sent())
            completion = ok(r.received(), i)
            assert completion.qp_num == r.qp.qp_num
            assert receivers[0].read(64, 64 * i) == data
        assert receivers[0].async_event() == e.IBV_EVENT_SRQ_LIMIT_REACHED
        # Dry: the next sender waits for a receive.
        senders[0].post(e.IBV_WR_SEND, senders[0].sge(8))
        nothing(senders[0].scq)
        srq_receive(srq, receivers[0], 11)
        ok(senders[0].sent())
        ok(receivers[0].received(), 11)
        # A QP that goes to ERR leaves the others' receives alone, and tells that it takes no more.
        srq_receive(srq, receivers[0], 12)
        receivers[0].state(e.IBV_QPS_ERR)
        assert receivers[0].async_event() == e.IBV_EVENT_QP_LAST_WQE_REACHED
        senders[1].post(e.IBV_WR_SEND, senders[1].sge(8))
        ok(receivers[1].received(), 12)
        for end in (*senders, *receivers):
            end.close()
        srq.close()


# ---------------------------------------------------------------- unreliable


def test_datagrams_carry_their_header_and_get_lost_in_silence() -> None:
    with pair(qp_type=e.IBV_QPT_UD) as (a, b):
        ah = AH(a.pd, attr=a.address(b))
        data = a.fill(1000)
        b.recv(b.sge(1040), wr_id=1)
        a.post(e.IBV_WR_SEND_WITH_IMM, a.sge(1000), peer=b, ah=ah, imm=0xCAFEBABE)
        ok(a.sent())
        completion = ok(b.received(), 1)
        assert completion.byte_len == 1040
        assert completion.src_qp == a.qp.qp_num
        assert completion.imm_data == 0xCAFEBABE
        assert completion.wc_flags & e.IBV_WC_GRH
        assert b.read(1000, 40) == data
        header = b.read(40)
        assert header[20] == 0x45  # IPv4, RoCE v2
        assert header[32:36] == bytes.fromhex(a.context.query_gid(1, GID_INDEX).gid.replace(":", ""))[12:]
        # The answer finds its way by what came in.
        back = AH(b.pd, attr=b.address(a))
        a.recv(a.sge(100))
        b.post(e.IBV_WR_SEND, b.sge(10), peer=a, ah=back)
        ok(a.received())
        # A wrong key, and no receive: gone.
        b.recv(b.sge(1040), wr_id=2)
        a.post(e.IBV_WR_SEND, a.sge(8), peer=b, ah=ah, qkey=QKEY + 1)
        ok(a.sent())
        nothing(b.rcq)
        a.post(e.IBV_WR_SEND, a.sge(8), peer=b, ah=ah)
        ok(b.received(), 2)
        ok(a.sent())
        a.post(e.IBV_WR_SEND, a.sge(8), peer=b, ah=ah)
        ok(a.sent())
        nothing(b.rcq)
        ah.close()
        back.close()


# GID index: what the completion's service level says of the header (MLX5_CQE_ROCE_L3_HEADER_TYPE_* of the kernel's
# mlx5/device.h), and its first byte in place.
@pytest.mark.parametrize(
    ("gid_index", "kind", "offset", "version"),
    [(0, 0, 0, 6), (1, 1, 0, 6), (2, 0, 0, 6), (3, 2, 20, 4)],
    ids=["v1", "v2 over IPv6", "v1, address of IPv4", "v2 over IPv4"],
)
def test_datagrams_completion_says_which_header_came_with_it(
    gid_index: int, kind: int, offset: int, version: int
) -> None:
    with pair(qp_type=e.IBV_QPT_UD) as (a, b):
        source, sink = a.context.query_gid(1, gid_index), b.context.query_gid(1, gid_index)
        route = GlobalRoute(dgid=sink, sgid_index=gid_index)
        ah = AH(a.pd, attr=AHAttr(port_num=1, is_global=1, gr=route))
        b.recv(b.sge(100))
        a.post(e.IBV_WR_SEND, a.sge(8), peer=b, ah=ah)
        ok(a.sent())
        completion = ok(b.received())
        assert completion.sl == kind
        header = b.read(40)
        assert header[offset] >> 4 == version
        assert not any(header[:offset])
        gids = [bytes.fromhex(gid_text(gid).replace(":", "")) for gid in (source, sink)]
        if version == 4:
            assert [header[32:36], header[36:40]] == [gid[12:] for gid in gids]
            words = struct.unpack_from(">10H", header, 20)
            assert sum(words) % 0xFFFF == 0, "the checksum of an IPv4 header"
        else:
            assert [header[8:24], header[24:40]] == gids
        ah.close()


def test_datagram_longer_than_the_mtu_stops_the_sender_until_rts() -> None:
    with pair(qp_type=e.IBV_QPT_UD) as (a, b):
        ah = AH(a.pd, attr=a.address(b))
        a.post(e.IBV_WR_SEND, a.sge(4097), peer=b, ah=ah)
        assert a.sent().status == e.IBV_WC_LOC_LEN_ERR
        assert a.query_state() == e.IBV_QPS_SQE
        a.post(e.IBV_WR_SEND, a.sge(8), peer=b, ah=ah)
        assert a.sent().status == e.IBV_WC_WR_FLUSH_ERR
        ah.close()


def test_unreliable_connection_writes_and_sends_without_answers() -> None:
    with pair(qp_type=e.IBV_QPT_UC) as (a, b):
        data = a.fill(40000)
        b.recv(b.sge(8))
        a.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, a.sge(40000), peer=b, imm=1)
        ok(a.sent())
        assert ok(b.received()).byte_len == 40000
        assert b.read(40000) == data
        a.post(e.IBV_WR_SEND, a.sge(8))
        ok(a.sent())
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b, offset=65536)
        ok(a.sent())
        nothing(b.rcq)
        assert b.query_state() == e.IBV_QPS_RTS
        b.state(e.IBV_QPS_ERR)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b)
        ok(a.sent())


# ---------------------------------------------------------------- memory windows


def test_window_opens_its_part_of_a_region_until_it_is_closed() -> None:
    with pair(access=ALL_ACCESS | e.IBV_ACCESS_MW_BIND) as (a, b):
        mw = MW(b.pd, e.IBV_MW_TYPE_1)
        info = MWBindInfo(b.mr, b.mr.buf + 100, 50, e.IBV_ACCESS_REMOTE_WRITE)
        b.qp.bind_mw(mw, MWBind(info, e.IBV_SEND_SIGNALED))
        assert ok(b.sent()).opcode == e.IBV_WC_BIND_MW
        data = a.fill(50)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(50), peer=b, offset=100, rkey=mw.rkey)
        ok(a.sent())
        assert b.read(50, 100) == data
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(50), peer=b, offset=101, rkey=mw.rkey)
        assert a.sent().status == e.IBV_WC_REM_ACCESS_ERR
        mw.close()


def test_window_of_type_2_is_gone_once_the_peer_invalidates_it() -> None:
    with pair(access=ALL_ACCESS | e.IBV_ACCESS_MW_BIND) as (a, b):
        mw = MW(b.pd, e.IBV_MW_TYPE_2)
        wr = SendWR(opcode=e.IBV_WR_BIND_MW, send_flags=e.IBV_SEND_SIGNALED)
        wr.set_bind_wr(mw, MWBindInfo(b.mr, b.mr.buf, 4096, e.IBV_ACCESS_REMOTE_READ))
        b.qp.post_send(wr)
        ok(b.sent())
        a.post(e.IBV_WR_RDMA_READ, a.sge(8), peer=b, rkey=wr.rkey)
        ok(a.sent())
        b.recv(b.sge(8))
        a.post(e.IBV_WR_SEND_WITH_INV, a.sge(8), imm=wr.rkey)
        ok(a.sent())
        completion = ok(b.received())
        assert completion.wc_flags & e.IBV_WC_WITH_INV
        a.post(e.IBV_WR_RDMA_READ, a.sge(8), peer=b, rkey=wr.rkey)
        assert a.sent().status == e.IBV_WC_REM_ACCESS_ERR
        mw.close()


# ---------------------------------------------------------------- several of each


def test_devices_contexts_and_many_qps_do_not_mix_up() -> None:
    names = ["mlx5_0", "mlx5_1"]
    ends = [(End(names[i % 2]), End(names[i // 2 % 2])) for i in range(24)]
    for a, b in ends:
        a.connect(b)
        b.connect(a)
    datas = []
    for i, (a, b) in enumerate(ends):
        datas.append(a.fill(100, i))
        b.recv(b.sge(100), wr_id=i)
        a.post(e.IBV_WR_SEND, a.sge(100, i), wr_id=i)
    for i, (a, b) in enumerate(ends):
        ok(a.sent(), i)
        assert ok(b.received(), i).src_qp == a.qp.qp_num
        assert b.read(100) == datas[i]
    for pair_ in ends:
        for end in pair_:
            end.close()


@pytest.mark.parametrize("seconds", [0.5])
def test_idle_device_takes_next_to_no_cpu(seconds: float) -> None:
    with pair() as (a, b):
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b)
        ok(a.sent())
        assert goes_quiet(os.getpid(), time.process_time, seconds, 0.1)
        # And it still hears.
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b)
        ok(a.sent())


def test_registering_part_of_a_buffer_offers_no_more_than_that() -> None:
    with pair() as (a, b), MR(b.pd, 100, ALL_ACCESS, address=b.mr.buf + 1000) as part:
        for offset, status in ((1000, e.IBV_WC_SUCCESS), (1092, e.IBV_WC_SUCCESS), (1093, e.IBV_WC_REM_ACCESS_ERR)):
            a.post(e.IBV_WR_RDMA_WRITE, SGE(a.mr.buf, 8, a.mr.lkey), peer=b, offset=offset, rkey=part.rkey)
            assert poll(a.scq).status == status

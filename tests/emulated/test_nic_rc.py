"""Reliable connections on the emulated NIC: what every operation moves, reports and refuses."""

import itertools
import time

import pytest
from emulated.nic import ALL_ACCESS, End, nothing, ok, pair
from pyverbs import enums as e
from pyverbs.mr import MR
from pyverbs.pyverbs_error import PyverbsRDMAError

LENGTHS = [0, 1, 7, 8, 9, 1023, 1024, 1025, 5000]


@pytest.mark.parametrize("length", LENGTHS)
def test_rdma_write_puts_exactly_its_bytes(length: int) -> None:
    with pair() as (a, b):
        data = a.fill(length)
        b.mr.write(b"\xee" * (length + 2), length + 2, 99)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(length), peer=b, offset=100, wr_id=5)
        assert ok(a.sent(), 5).opcode == e.IBV_WC_RDMA_WRITE
        assert b.read(length + 2, 99) == b"\xee" + data + b"\xee"
        nothing(b.rcq)


@pytest.mark.parametrize("length", LENGTHS)
def test_rdma_read_gets_exactly_its_bytes(length: int) -> None:
    with pair() as (a, b):
        data = b.fill(length, 3)
        a.mr.write(b"\xee" * (length + 2), length + 2, 0)
        a.post(e.IBV_WR_RDMA_READ, a.sge(length, 1), peer=b, offset=3)
        completion = ok(a.sent())
        assert completion.opcode == e.IBV_WC_RDMA_READ
        assert completion.byte_len == length
        assert a.read(length + 2) == b"\xee" + data + b"\xee"


@pytest.mark.parametrize("length", LENGTHS)
def test_send_fills_the_receive_and_no_more(length: int) -> None:
    with pair() as (a, b):
        data = a.fill(length)
        b.recv(b.sge(length + 10), wr_id=8)
        b.mr.write(b"\xee" * (length + 10), length + 10, 0)
        a.post(e.IBV_WR_SEND, a.sge(length), wr_id=7)
        assert ok(a.sent(), 7).opcode == e.IBV_WC_SEND
        completion = ok(b.received(), 8)
        assert completion.opcode == e.IBV_WC_RECV
        assert completion.byte_len == length
        assert b.read(length + 10) == data + b"\xee" * 10


def test_immediate_data_of_32_bits_arrives_with_send_and_write() -> None:
    with pair() as (a, b):
        data = a.fill(16)
        b.recv(b.sge(100))
        b.recv(b.sge(0))
        a.post(e.IBV_WR_SEND_WITH_IMM, a.sge(16), imm=0x89ABCDEF)
        a.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, a.sge(16), peer=b, offset=200, imm=0xFFFFFFFE)
        ok(a.sent())
        ok(a.sent())
        first, second = ok(b.received()), ok(b.received())
        assert (first.opcode, first.imm_data) == (e.IBV_WC_RECV, 0x89ABCDEF)
        assert first.wc_flags & e.IBV_WC_WITH_IMM
        assert (second.opcode, second.imm_data) == (e.IBV_WC_RECV_RDMA_WITH_IMM, 0xFFFFFFFE)
        assert second.byte_len == 16
        assert b.read(16, 200) == data


def test_atomics_return_the_old_value_and_change_the_target() -> None:
    with pair() as (a, b):
        b.mr.write((2**63 + 5).to_bytes(8, "little"), 8, 64)
        a.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, a.sge(8), peer=b, offset=64, atomic=(2**63, 0))
        completion = ok(a.sent())
        assert completion.opcode == e.IBV_WC_FETCH_ADD
        assert int.from_bytes(a.read(8), "little") == 2**63 + 5
        assert int.from_bytes(b.read(8, 64), "little") == 5
        for expected, new, after in ((5, 77, 77), (5, 99, 77)):
            a.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, a.sge(8, 8), peer=b, offset=64, atomic=(expected, new))
            assert ok(a.sent()).opcode == e.IBV_WC_COMP_SWAP
            assert int.from_bytes(b.read(8, 64), "little") == after
        assert int.from_bytes(a.read(8, 8), "little") == 77


def test_lists_are_gathered_and_scattered_in_order() -> None:
    with pair() as (a, b):
        data = a.fill(4000)
        b.recv(b.sge(1, 0), b.sge(1500, 1000), b.sge(8, 3000), b.sge(4000, 4000))
        a.post(e.IBV_WR_SEND, a.sge(10, 0), a.sge(990, 10), a.sge(1000, 3000), a.sge(7, 2000))
        ok(a.sent())
        assert ok(b.received()).byte_len == 2007
        expected = data[:1000] + data[3000:4000] + data[2000:2007]
        assert b.read(1) + b.read(1500, 1000) + b.read(8, 3000) + b.read(498, 4000) == expected
        a.post(e.IBV_WR_RDMA_READ, a.sge(3, 9000), a.sge(2000, 10000), peer=b, offset=1000)
        ok(a.sent())
        assert a.read(3, 9000) + a.read(1497, 10000) == b.read(1500, 1000)


def test_inline_data_may_be_overwritten_at_once() -> None:
    with pair() as (a, b):
        for length in (1, 12, 13, 60, 100, 256):
            data = a.fill(length)
            b.recv(b.sge(256))
            a.post(e.IBV_WR_SEND, a.sge(length, key=0xBAD), flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE)
            a.mr.write(b"\0" * length, length, 0)
            ok(a.sent())
            assert ok(b.received()).byte_len == length
            assert b.read(length) == data


def test_unsignalled_work_is_done_in_order_and_reports_nothing() -> None:
    with pair() as (a, b):
        for _ in range(20):
            for i in range(50):
                a.mr.write(bytes([i]), 1, i)
                a.post(e.IBV_WR_RDMA_WRITE, a.sge(1, i), peer=b, flags=0)
            a.post(e.IBV_WR_RDMA_READ, a.sge(1, 100), peer=b, wr_id=9, flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_FENCE)
            ok(a.sent(), 9)
            assert a.read(1, 100) == bytes([49])
        nothing(a.scq)


def test_sq_sig_all_reports_everything() -> None:
    with pair(sq_sig_all=1) as (a, b):
        for i in range(3):
            a.post(e.IBV_WR_RDMA_WRITE, a.sge(1), peer=b, flags=0, wr_id=i)
        for i in range(3):
            ok(a.sent(), i)


@pytest.mark.parametrize("offset", [4, 1])
def test_misaligned_atomic_is_an_invalid_request(offset: int) -> None:
    with pair() as (a, b):
        a.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, a.sge(8), peer=b, offset=offset, atomic=(1, 0))
        assert a.sent().status == e.IBV_WC_REM_INV_REQ_ERR
        assert b.async_event() == e.IBV_EVENT_QP_REQ_ERR
        assert (a.query_state(), b.query_state()) == (e.IBV_QPS_ERR, e.IBV_QPS_ERR)


@pytest.mark.parametrize(
    ("changes", "status", "event"),
    [
        ({"offset": 65536 - 7}, e.IBV_WC_REM_ACCESS_ERR, e.IBV_EVENT_QP_ACCESS_ERR),
        ({"offset": -1}, e.IBV_WC_REM_ACCESS_ERR, e.IBV_EVENT_QP_ACCESS_ERR),
        ({"rkey": 0x1234500}, e.IBV_WC_REM_ACCESS_ERR, e.IBV_EVENT_QP_ACCESS_ERR),
    ],
)
def test_memory_the_peer_did_not_offer_is_refused_and_both_ends_learn(
    changes: dict[str, int], status: int, event: int
) -> None:
    with pair() as (a, b):
        a.fill(8)
        before = b.read(65536)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b, wr_id=1, **changes)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b, wr_id=2, flags=0)
        first, second = a.sent(), a.sent()
        assert (first.wr_id, first.status) == (1, status)
        assert (second.wr_id, second.status) == (2, e.IBV_WC_WR_FLUSH_ERR)
        assert b.async_event() == event
        assert b.read(65536) == before


def test_rights_of_the_region_and_of_the_qp_are_told_apart() -> None:
    with pair(access=e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ) as (a, b):
        a.post(e.IBV_WR_RDMA_READ, a.sge(8), peer=b)
        ok(a.sent())
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b)
        assert a.sent().status == e.IBV_WC_REM_ACCESS_ERR
    with pair(connect=False) as (a, b):
        a.connect(b)
        b.connect(a, qp_access_flags=e.IBV_ACCESS_REMOTE_READ)
        a.post(e.IBV_WR_RDMA_READ, a.sge(8), peer=b)
        ok(a.sent())
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b)
        assert a.sent().status == e.IBV_WC_REM_INV_REQ_ERR
        assert b.async_event() == e.IBV_EVENT_QP_REQ_ERR


def test_no_responder_resources_means_no_reads() -> None:
    with pair(connect=False) as (a, b):
        a.connect(b)
        b.connect(a, max_dest_rd_atomic=0)
        a.post(e.IBV_WR_RDMA_READ, a.sge(8), peer=b)
        assert a.sent().status == e.IBV_WC_REM_INV_REQ_ERR


def test_keys_belong_to_a_protection_domain() -> None:
    with pair() as (a, b):
        stranger = End("mlx5_1")
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=stranger)
        assert a.sent().status == e.IBV_WC_REM_ACCESS_ERR
        assert b.query_state() == e.IBV_QPS_ERR
        stranger.close()


@pytest.mark.parametrize("fault", ["key", "end", "closed"])
def test_own_bad_memory_is_a_local_error_that_the_peer_never_sees(fault: str) -> None:
    with pair() as (a, b):
        sge = {"key": a.sge(8, key=0xBAD00), "end": a.sge(8, 65536 - 7), "closed": a.sge(8)}[fault]
        if fault == "closed":
            mr = MR(a.pd, 4096, ALL_ACCESS)
            sge = type(sge)(mr.buf, 8, mr.lkey)
            mr.close()
        b.recv(b.sge(100))
        a.post(e.IBV_WR_SEND, sge)
        assert a.sent().status == e.IBV_WC_LOC_PROT_ERR
        nothing(b.rcq)
        assert b.query_state() == e.IBV_QPS_RTS


def test_read_into_read_only_memory_is_a_local_error() -> None:
    with pair() as (a, b), MR(a.pd, 4096, 0) as target:
        sge = a.sge(8)
        sge = type(sge)(target.buf, 8, target.lkey)
        a.post(e.IBV_WR_RDMA_READ, sge, peer=b)
        assert a.sent().status == e.IBV_WC_LOC_PROT_ERR
        assert b.query_state() == e.IBV_QPS_RTS


def test_message_longer_than_the_receive_fails_on_both_sides() -> None:
    with pair() as (a, b):
        b.recv(b.sge(99), wr_id=3)
        b.recv(b.sge(99), wr_id=4)
        before = b.read(200)
        a.post(e.IBV_WR_SEND, a.sge(100))
        assert a.sent().status == e.IBV_WC_REM_INV_REQ_ERR
        first, second = b.received(), b.received()
        assert (first.wr_id, first.status) == (3, e.IBV_WC_LOC_LEN_ERR)
        assert (second.wr_id, second.status) == (4, e.IBV_WC_WR_FLUSH_ERR)
        assert b.read(200) == before


def test_bad_receive_buffer_fails_on_both_sides() -> None:
    with pair() as (a, b):
        b.recv(b.sge(100, key=0xBAD00), wr_id=3)
        a.post(e.IBV_WR_SEND, a.sge(100))
        assert a.sent().status == e.IBV_WC_REM_OP_ERR
        completion = b.received()
        assert (completion.wr_id, completion.status) == (3, e.IBV_WC_LOC_PROT_ERR)


def test_message_above_the_maximum_is_a_local_length_error() -> None:
    with pair(devices=("mlx5_0", "mlx5_0")) as (a, b):
        a.post(e.IBV_WR_RDMA_WRITE, *[a.sge(1 << 30)] * 2, peer=b)
        assert a.sent().status == e.IBV_WC_LOC_LEN_ERR


def test_different_mtus_work_until_a_message_needs_two_packets() -> None:
    with pair(connect=False) as (a, b):
        a.connect(b, path_mtu=e.IBV_MTU_1024)
        b.connect(a, path_mtu=e.IBV_MTU_4096)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(1024), peer=b)
        ok(a.sent())
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(1025), peer=b)
        assert a.sent().status == e.IBV_WC_REM_INV_REQ_ERR


def test_rnr_retries_run_out_after_their_timers() -> None:
    with pair(connect=False) as (a, b):
        a.connect(b, rnr_retry=2)
        b.connect(a, min_rnr_timer=20)  # 10.24 ms
        start = time.monotonic()
        a.post(e.IBV_WR_SEND, a.sge(8))
        assert a.sent().status == e.IBV_WC_RNR_RETRY_EXC_ERR
        assert time.monotonic() - start >= 0.02
        assert b.query_state() == e.IBV_QPS_RTS


@pytest.mark.parametrize("opcode", [e.IBV_WR_SEND, e.IBV_WR_RDMA_WRITE_WITH_IMM])
def test_late_receive_lets_waiting_sends_through_in_order(opcode: int) -> None:
    with pair() as (a, b):
        for i in range(3):
            a.mr.write(bytes([i]), 1, i)
            a.post(opcode, a.sge(1, i), peer=b, offset=50 + i, wr_id=i)
        nothing(a.scq)
        for i in range(3):
            b.recv(b.sge(8, 50 + i), wr_id=i)
            ok(a.sent(), i)
            ok(b.received(), i)
            assert b.read(1, 50 + i) == bytes([i])


def test_unanswered_requests_fail_after_their_retries() -> None:
    with pair(connect=False) as (a, b):
        a.connect(b, timeout=10, retry_cnt=4)  # 4.2 ms, five times
        start = time.monotonic()
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b, wr_id=1)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b, wr_id=2)
        first, second = a.sent(), a.sent()
        assert (first.wr_id, first.status) == (1, e.IBV_WC_RETRY_EXC_ERR)
        assert (second.wr_id, second.status) == (2, e.IBV_WC_WR_FLUSH_ERR)
        assert time.monotonic() - start >= 0.0209


def test_timeout_zero_waits_for_ever() -> None:
    with pair(connect=False) as (a, b):
        a.connect(b, timeout=0, retry_cnt=0)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b)
        nothing(a.scq, 0.1)
        a.state(e.IBV_QPS_ERR)
        assert a.sent().status == e.IBV_WC_WR_FLUSH_ERR


@pytest.mark.parametrize("change", [{"rq_psn": 101}, {"dest_qp_num": 0x77777}])
def test_peer_that_expects_something_else_does_not_answer(change: dict[str, int]) -> None:
    with pair(connect=False) as (a, b):
        a.connect(b, timeout=8, retry_cnt=1)
        b.connect(a, **change)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8), peer=b)
        assert a.sent().status == e.IBV_WC_RETRY_EXC_ERR


def test_error_flushes_both_queues_in_order_and_later_posts_too() -> None:
    with pair() as (a, b):
        for i in range(5):
            a.recv(a.sge(8), wr_id=i)
        for i in range(5):
            a.post(e.IBV_WR_SEND, a.sge(8), wr_id=100 + i, flags=0)  # nobody receives
        a.state(e.IBV_QPS_ERR)
        for i in range(5):
            completion = a.received()
            assert (completion.wr_id, completion.status) == (i, e.IBV_WC_WR_FLUSH_ERR)
            completion = a.sent()
            assert (completion.wr_id, completion.status) == (100 + i, e.IBV_WC_WR_FLUSH_ERR)
        time.sleep(0.05)
        a.recv(a.sge(8), wr_id=50)
        assert a.received().wr_id == 50
        a.post(e.IBV_WR_SEND, a.sge(8), wr_id=51)
        assert a.sent().wr_id == 51
        b.recv(b.sge(8))
        nothing(b.rcq)


def test_reset_forgets_and_the_pair_can_connect_again() -> None:
    with pair() as (a, b):
        a.recv(a.sge(8))
        a.post(e.IBV_WR_SEND, a.sge(8))
        for end in (a, b):
            end.state(e.IBV_QPS_RESET)
        nothing(a.scq)
        nothing(a.rcq)
        a.connect(b)
        b.connect(a)
        b.recv(b.sge(8))
        data = a.fill(8)
        a.post(e.IBV_WR_SEND, a.sge(8))
        ok(a.sent())
        assert b.read(8) == data


def test_solicited_completions_wake_and_others_do_not() -> None:
    with pair(events=True) as (a, b):
        assert b.channel is not None
        for _ in range(3):
            b.recv(b.sge(8))
        b.rcq.req_notify(True)
        a.post(e.IBV_WR_SEND, a.sge(8))
        ok(a.sent())
        ok(b.received())
        a.post(e.IBV_WR_SEND, a.sge(8), flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_SOLICITED)
        ok(a.sent())
        b.channel.get_cq_event(b.rcq)  # hangs if there is none
        b.rcq.ack_events(1)
        ok(b.received())


def test_gigabyte_message_arrives_whole_while_others_go_on() -> None:
    size = 1 << 30
    block = bytes(range(251)) * 4179
    with pair(devices=("mlx5_0", "mlx5_0"), size=size) as (a, b), pair() as (c, d):
        for offset in range(0, size, 64 << 20):
            a.mr.write(block, len(block), offset + offset // (64 << 20))
        a.mr.write(b"end", 3, size - 3)
        # If the small ones waited for the large one, there would be one of them, however often this is tried. This thread may
        # be off the CPU for most of a large one, though.
        small = 0
        for _ in range(10):
            a.post(e.IBV_WR_RDMA_WRITE, a.sge(size), peer=b)
            n, completions = a.scq.poll(1)
            while not n:
                c.post(e.IBV_WR_RDMA_WRITE, c.sge(8), peer=d)
                ok(c.sent())
                small += 1
                n, completions = a.scq.poll(1)
            ok(completions[0])
            if small > 100:
                break
        assert small > 100
        for offset in range(0, size, 64 << 20):
            assert b.read(len(block), offset + offset // (64 << 20)) == block
        assert b.read(3, size - 3) == b"end"
        b.mr.write(b"END", 3, size - 3)
        a.post(e.IBV_WR_RDMA_READ, a.sge(size), peer=b)
        completion = ok(a.sent(60))
        assert completion.byte_len == size
        assert a.read(3, size - 3) == b"END"
        b.recv(b.sge(size))
        a.post(e.IBV_WR_SEND, a.sge(size))
        assert ok(b.received(60)).byte_len == size


def test_destroying_a_busy_qp_ends_it_at_once() -> None:
    size = 256 << 20
    with pair(devices=("mlx5_0", "mlx5_0"), size=size) as (a, b):
        a.mr.write(b"at first", 8, 0)
        a.mr.write(b"the end!", 8, 8)
        # Seconds of work, and what nobody gets to see if it isn't waited for.
        for _ in range(100):
            a.post(e.IBV_WR_RDMA_WRITE, a.sge(size), peer=b)
        a.post(e.IBV_WR_RDMA_WRITE, a.sge(8, 8), peer=b)
        a.qp.close()
        assert b.read(8) != b"the end!"
        nothing(a.scq)
        assert b.read(8) != b"the end!"


def test_closing_a_region_in_use_ends_the_transfer_with_an_error() -> None:
    size = 512 << 20
    with pair(devices=("mlx5_0", "mlx5_0"), size=4096) as (a, b):
        source, target = MR(a.pd, size, ALL_ACCESS), MR(b.pd, size, ALL_ACCESS)
        wr_sge = type(a.sge(0))(source.buf, size, source.lkey)
        count = 100  # seconds of work: it's closed before it's over
        for i in range(count):
            a.post(e.IBV_WR_RDMA_WRITE, wr_sge, peer=b, offset=target.buf - b.mr.buf, rkey=target.rkey, wr_id=i)
        target.close()
        statuses = [a.sent(60).status for _ in range(count)]
        assert e.IBV_WC_REM_ACCESS_ERR in statuses
        bad = statuses.index(e.IBV_WC_REM_ACCESS_ERR)
        assert statuses[:bad] == [e.IBV_WC_SUCCESS] * bad
        assert statuses[bad + 1 :] == [e.IBV_WC_WR_FLUSH_ERR] * (count - 1 - bad)
        source.close()


def test_full_send_queue_refuses_and_loses_nothing() -> None:
    with pair(max_send_wr=4, connect=False) as (a, b):
        a.connect(b)
        for posted in itertools.count():
            try:
                a.post(e.IBV_WR_SEND, a.sge(1), wr_id=posted)
            except PyverbsRDMAError:
                break
        assert posted >= 4
        b.connect(a)
        for _ in range(posted):
            b.recv(b.sge(8))
        for i in range(posted):
            ok(a.sent(), i)

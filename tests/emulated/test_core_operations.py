"""Each operation does what it says, on every loop: data, completion fields, options."""

import struct
from typing import Any

import anyio
import pytest
from emulated.core import DEVICE, TOO_LONG_RECEIVED, TOO_LONG_SENT, connected, eventually, open_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiordma
from aiordma import (
    Access,
    LocalQpOperationError,
    MemorySlice,
    RemoteBuffer,
    RemoteInvalidRequestError,
    UsageError,
    WrFlushError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]

# enum ibv_wc_opcode
WC_SEND, WC_RDMA_WRITE, WC_RDMA_READ, WC_COMP_SWAP, WC_FETCH_ADD = range(5)
WC_RECV, WC_RECV_RDMA_WITH_IMM = 128, 129

MASK64 = (1 << 64) - 1


async def test_send_arrives_in_the_posted_receive_and_only_there() -> None:
    async with open_pair() as p:
        p.local.view()[:11] = b"hello world"
        receive = p.b.recv(p.peer[100:200])
        sent = await p.a.send(p.local[:11])
        got = await receive
        assert bytes(p.right[100:111]) == b"hello world"
        assert not any(p.right[:100])
        assert not any(p.right[111:])
        assert (sent.opcode, sent.status, sent.request, sent.imm_data) == (WC_SEND, 0, "SEND", None)
        assert (got.opcode, got.byte_len, got.imm_data, got.request) == (WC_RECV, 11, None, "RECV")
        assert (sent.qp_num, got.qp_num, got.receiver_qp_num) == (p.a.qp_num, p.b.qp_num, p.b.qp_num)


@pytest.mark.parametrize("imm", [0, 1, 0x01020304, 0xFFFFFFFF])
async def test_send_with_imm_gives_the_number_in_host_order(imm: int) -> None:
    async with open_pair() as p:
        receive = p.b.recv(p.peer)
        await p.a.send(p.local[:4], imm=imm)
        assert (await receive).imm_data == imm


@pytest.mark.parametrize("imm", [0, 0xDEADBEEF])
async def test_write_with_imm_places_data_and_uses_a_receive(imm: int) -> None:
    async with open_pair() as p:
        p.local.view()[:8] = b"12345678"
        receive = p.b.recv(None)
        await p.a.rdma_write(p.local[:8], p.remote[64:], imm=imm)
        got = await receive
        assert (got.opcode, got.byte_len, got.imm_data) == (WC_RECV_RDMA_WITH_IMM, 8, imm)
        assert bytes(p.right[64:72]) == b"12345678"


async def test_write_is_in_the_peers_memory_when_it_completes() -> None:
    async with open_pair() as p:
        for i in range(200):
            p.local.view()[:4] = struct.pack("!I", i)
            done = await p.a.rdma_write(p.local[:4], p.remote[8 * i :])
            assert p.right[8 * i : 8 * i + 4] == struct.pack("!I", i)
        assert done.opcode == WC_RDMA_WRITE


async def test_read_is_in_local_memory_when_it_completes() -> None:
    async with open_pair() as p:
        p.right[:] = bytes(i & 0xFF for i in range(len(p.right)))
        done = await p.a.rdma_read(p.local[:1000], p.remote[300:1300])
        assert p.left[:1000] == p.right[300:1300]
        assert not any(p.left[1000:])
        assert (done.opcode, done.byte_len) == (WC_RDMA_READ, 1000)


@pytest.mark.parametrize(
    ("before", "add"),
    [(0, 1), (41, 1), (MASK64, 1), (5, -3), (0, MASK64), (1 << 63, 1 << 63), (7, 0), (0, -(1 << 63))],
)
async def test_fetch_add_wraps_and_returns_what_was_there(before: int, add: int) -> None:
    async with open_pair() as p:
        p.right[8:16] = struct.pack("=Q", before)
        done = await p.a.atomic_fetch_add(p.local[:8], p.remote[8:16], add)
        assert done.value == before
        assert struct.unpack("=Q", p.left[:8]) == (before,)
        assert struct.unpack("=Q", p.right[8:16]) == ((before + add) & MASK64,)
        assert done.opcode == WC_FETCH_ADD


@pytest.mark.parametrize(("before", "compare", "swap"), [(5, 5, 9), (5, 6, 9), (MASK64, -1, 0), (0, 0, -1)])
async def test_cmp_swp_stores_only_on_equality_and_returns_what_was_there(before: int, compare: int, swap: int) -> None:
    async with open_pair() as p:
        p.right[:8] = struct.pack("=Q", before)
        done = await p.a.atomic_cmp_swp(p.local[:8], p.remote, compare, swap)
        assert done.value == before
        expected = swap & MASK64 if before == compare & MASK64 else before
        assert struct.unpack("=Q", p.right[:8]) == (expected,)
        assert done.opcode == WC_COMP_SWAP


async def test_the_value_of_an_atomic_stays_when_its_buffer_is_used_again() -> None:
    async with open_pair() as p:
        ops = [p.a.atomic_fetch_add(p.local[8 * i :][:8], p.remote, 1) for i in range(50)]
        for op in ops:
            await op
        p.local.view()[:400] = b"\xff" * 400
        assert [op.value for op in ops] == list(range(50))
        assert struct.unpack("=Q", p.right[:8]) == (50,)
        with pytest.raises(AttributeError, match="RDMA_WRITE has no value"):
            _ = (await p.a.rdma_write(p.local[:8], p.remote)).value


async def test_concurrent_atomics_lose_no_addition() -> None:
    async with open_pair() as p, connected(p.device, other=p.other) as other:
        ops = []
        for i in range(200):
            ops.append(p.a.atomic_fetch_add(p.local[8 * i :][:8], p.remote, 1))
            ops.append(other.a.atomic_fetch_add(other.local[8 * i :][:8], p.remote, 1))
        values = [(await op).value for op in ops]
        assert sorted(values) == list(range(400))


async def test_local_inv_of_what_can_not_be_invalidated_fails_and_says_so() -> None:
    # An MR of ibv_reg_mr() isn't a window or an mkey: ibv_post_send(3) names those two.
    async with open_pair() as p:
        with pytest.raises(aiordma.CompletionError) as caught:
            await p.a.local_inv(p.local.rkey)
        assert caught.value.opcode == "LOCAL_INV"
        assert not isinstance(caught.value, LocalQpOperationError) or caught.value.status == 2
        assert p.a.state == "ERR"
        with pytest.raises(WrFlushError, match="LOCAL_INV"):
            await p.a.send(None)


async def test_send_with_invalidate_of_an_unknown_rkey_fails_at_the_receiver() -> None:
    async with open_pair() as p:
        receive = p.b.recv(p.peer)
        p.a.send(p.local[:4], invalidate_rkey=0x12345600)
        with pytest.raises(aiordma.CompletionError):
            await receive
        with pytest.raises(UsageError, match="not both"):
            p.a.send(p.local[:4], imm=1, invalidate_rkey=2)


@pytest.mark.parametrize("size", [0, 1, 8, 63, 64])
@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "mr"])
async def test_inline_data_is_copied_when_the_call_returns(kind: str, size: int) -> None:
    async with open_pair(max_inline_data=64) as p:
        data = bytearray(range(1, size + 1))
        source: Any = data
        if kind == "bytes":
            source = bytes(data)
        elif kind == "memoryview":
            source = memoryview(data)
        elif kind == "mr":
            p.local.view()[:size] = data
            source = p.local[:size]
        blocker = p.block()
        op = p.a.rdma_write(source, p.remote, inline=True)
        for i in range(size):
            data[i] = 0
        p.local.view()[:size] = bytes(size)
        p.unblock()
        await blocker
        await op
        assert bytes(p.right[:size]) == bytes(range(1, size + 1))


async def test_inline_data_that_waits_for_a_slot_is_copied_too() -> None:
    async with open_pair(max_send_wr=2) as p:
        data = bytearray(16)
        ops = [p.block()]
        for i in range(100):
            data[:] = bytes([i]) * 16
            ops.append(p.a.rdma_write(data, p.remote[16 * i :]))
        assert p.a.statistics()["send"]["waiting"] == 99
        data[:] = bytes(16)
        p.unblock()
        for op in ops:
            await op
        for i in range(100):
            assert bytes(p.right[16 * i : 16 * i + 16]) == bytes([i]) * 16


async def test_several_inline_buffers_are_gathered() -> None:
    async with open_pair() as p:
        p.local.view()[:3] = b"mr!"
        await p.a.rdma_write([b"ab", p.local[:3], memoryview(b"xyz")[1:], b""], p.remote)
        assert bytes(p.right[:7]) == b"abmr!yz"


async def test_more_than_fits_inline_is_refused_by_size() -> None:
    async with open_pair(max_inline_data=32) as p:
        limit = p.a.max_inline_data
        assert limit >= 32
        with pytest.raises(UsageError, match=f"max_inline_data={limit}"):
            p.a.rdma_write(p.local[: limit + 1], p.remote, inline=True)
        with pytest.raises(UsageError, match=f"max_inline_data={limit}"):
            p.a.rdma_write(bytes(limit + 1), p.remote)
        with pytest.raises(UsageError, match="inline is False"):
            p.a.rdma_write(b"x", p.remote, inline=False)
        await p.a.rdma_write(p.local[: limit + 1], p.remote, inline=False)
        await p.check()


# ---------------------------------------------------------------- scatter and gather


def _pieces(draw: Any, whole: MemorySlice, most: int) -> list[MemorySlice]:
    pieces = []
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, len(whole)))
        pieces.append(whole[start : draw(st.integers(start, min(len(whole), start + 5000)))])
    return pieces


def _disjoint(draw: Any, whole: MemorySlice, most: int) -> list[MemorySlice]:
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), min_size=2 * most, max_size=2 * most)))
    return [whole[cuts[2 * i] : cuts[2 * i + 1]] for i in range(most)]


async def test_gather_and_scatter_move_exactly_the_listed_bytes() -> None:
    async with open_pair(size=20_000, max_send_sge=5, max_recv_sge=5) as p:
        examples: list[tuple[str, list[MemorySlice], list[MemorySlice]]] = []

        @given(data=st.data(), kind=st.sampled_from(["send", "write", "read"]))
        @settings(max_examples=60, suppress_health_check=list(HealthCheck), database=None)
        def collect(data: st.DataObject, kind: str) -> None:
            if kind == "read":
                examples.append((kind, _disjoint(data.draw, p.local, 5), []))
            else:
                examples.append((kind, _pieces(data.draw, p.local, 5), _disjoint(data.draw, p.peer, 5)))

        collect()
        for number, (kind, here, there) in enumerate(examples):
            p.local.view()[:] = bytes((7 * i + number) & 0xFF for i in range(20_000))
            p.peer.view()[:] = bytes((11 * i + 3 * number) & 0xFF for i in range(20_000))
            before = bytes(p.left), bytes(p.right)
            total = sum(len(part) for part in here)
            if kind == "write":
                if total > len(p.remote):
                    with pytest.raises(UsageError, match="don't fit"):
                        p.a.rdma_write(here, p.remote)
                    continue
                await p.a.rdma_write(here, p.remote[-total or len(p.remote) :])
                expected = bytearray(before[1])
                expected[len(expected) - total :] = b"".join(
                    before[0][part.offset : part.offset + len(part)] for part in here
                )
                assert p.right == expected
                assert p.left == before[0]
            elif kind == "read":
                await p.a.rdma_read(here, p.remote)
                expected, at = bytearray(before[0]), 0
                for part in here:
                    expected[part.offset : part.offset + len(part)] = before[1][at : at + len(part)]
                    at += len(part)
                assert p.left == expected
                assert p.right == before[1]
            else:
                if total > sum(len(part) for part in there):
                    continue
                receive = p.b.recv(there)
                await p.a.send(here)
                assert (await receive).byte_len == total
                message = b"".join(before[0][part.offset : part.offset + len(part)] for part in here)
                expected, at = bytearray(before[1]), 0
                for part in there:
                    piece = message[at : at + len(part)]
                    expected[part.offset : part.offset + len(piece)] = piece
                    at += len(piece)
                assert p.right == expected


@pytest.mark.parametrize("count", [1, 4, 16, 30])
async def test_lists_as_long_as_asked_for_work_and_longer_ones_are_refused(count: int) -> None:
    async with open_pair(max_send_sge=count, max_recv_sge=count, max_inline_data=0) as p:
        for i in range(count):
            p.left[i * 10] = i + 1
        parts = [p.local[i * 10 : i * 10 + 1] for i in range(count)]
        receive = p.b.recv([p.peer[i * 3 : i * 3 + 1] for i in range(count)])
        await p.a.send(parts)
        await receive
        assert [p.right[i * 3] for i in range(count)] == [i + 1 for i in range(count)]
        with pytest.raises(UsageError, match="max_send_sge"):
            p.a.rdma_write([p.local[:1]] * 33, p.remote)
        with pytest.raises(UsageError, match="max_recv_sge"):
            p.b.recv([p.peer[:1]] * 33)
        await p.check()


# ---------------------------------------------------------------- no data, much data


async def test_zero_length_operations_of_every_kind_complete() -> None:
    async with open_pair() as p:
        for nothing in (None, p.local[5:5], [], [p.local[:0], p.local[9:9]], b"", [b"", p.local[:0]]):
            receives = [p.b.recv(p.peer), p.b.recv(p.peer), p.b.recv(None), p.b.recv([])]
            await p.a.send(nothing)
            await p.a.send(nothing, imm=7)
            await p.a.rdma_write(nothing, p.remote, imm=8)
            await p.a.send(nothing)
            assert [(await r).byte_len for r in receives] == [0, 0, 0, 0]
            assert [r.imm_data for r in receives] == [None, 7, 8, None]
            await p.a.rdma_write(nothing, p.remote)
            await p.a.rdma_write(nothing, p.remote[3:3])
            if nothing is None or isinstance(nothing, MemorySlice):
                await p.a.rdma_read(nothing, p.remote)
        # Nothing is accessed, so not even the rkey matters.
        await p.a.rdma_write(None, RemoteBuffer(0, 0, 0))
        await p.a.rdma_read(None, RemoteBuffer(0, 0, 0))
        assert not any(p.right)
        await p.check()


@pytest.mark.parametrize("size", [255, 256, 257, 4095, 4096, 4097, 12_289, 1 << 20, (1 << 20) + 1])
async def test_messages_around_the_packet_size_arrive_whole(size: int) -> None:
    async with open_pair(size=size + 16) as p:
        p.local.view()[:size] = bytes(range(251)) * (size // 251) + bytes(range(size % 251))
        receive = p.b.recv(p.peer[8:])
        await p.a.send(p.local[:size])
        assert (await receive).byte_len == size
        assert p.right[8 : 8 + size] == p.left[:size]
        assert not any(p.right[:8])
        assert not any(p.right[8 + size :])
        p.peer.view()[:] = bytes(size + 16)
        await p.a.rdma_write(p.local[:size], p.remote[8:])
        assert p.right[8 : 8 + size] == p.left[:size]
        back = bytes(p.right[8 : 8 + size])
        p.local.view()[:] = bytes(size + 16)
        await p.a.rdma_read(p.local[16:], p.remote[8 : 8 + size])
        assert p.left[16:] == back


async def test_a_message_too_long_for_its_receive_fails_on_both_sides() -> None:
    async with open_pair() as p:
        receive = p.b.recv(p.peer[:10])
        with pytest.raises(TOO_LONG_SENT):
            await p.a.send(p.local[:11])
        with pytest.raises(TOO_LONG_RECEIVED):
            await receive
        assert (p.a.state, p.b.state) == ("ERR", "ERR")


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33, 500])
async def test_a_batch_of_any_size_is_one_completion_in_order(count: int) -> None:
    async with open_pair(max_send_wr=16, max_recv_wr=16) as p:
        for i in range(count):
            p.left[i] = (i % 255) + 1
        batch = p.a.batch()
        for i in range(count):
            batch.rdma_write(p.local[i : i + 1], p.remote[i : i + 1])
        batch.rdma_write(p.local[count - 1 : count], p.remote[60_000:60_001])
        assert len(batch) == count + 1
        assert p.right[0] == 0
        done = await batch
        assert await batch is done
        assert batch.post() is done
        assert p.right[:count] == p.left[:count]
        assert p.right[60_000] == p.left[count - 1]
        back = await p.a.rdma_read_many((p.local[30_000 + i :][:1], p.remote[i : i + 1]) for i in range(count))
        assert back.done
        assert p.left[30_000 : 30_000 + count] == p.left[:count]
        await p.a.rdma_write_many([(p.local[:1], p.remote[1000 + i :]) for i in range(count)])
        assert p.right[1000 : 1000 + count] == bytes([p.left[0]]) * count


async def test_a_batch_mixes_operations_and_several_batches_pipeline() -> None:
    async with open_pair(max_send_wr=8) as p:
        ends = []
        receives = [p.b.recv(p.peer[40_000 + 16 * i :][:16]) for i in range(20)]
        for i in range(10):
            batch = p.a.batch()
            p.local.view()[16 * i : 16 * i + 16] = bytes([i + 1]) * 16
            batch.rdma_write([p.local[16 * i :][:8], p.local[16 * i + 8 :][:8]], p.remote[16 * i :])
            batch.send(p.local[16 * i :][:16], imm=i)
            batch.rdma_read(p.local[10_000 + 16 * i :][:16], p.remote[16 * i :][:16], fence=True)
            batch.send(None)
            ends.append(batch.post())
        for end in ends:
            await end
        for i in range(10):
            first = await receives[2 * i]
            second = await receives[2 * i + 1]
            assert (first.byte_len, first.imm_data, second.byte_len) == (16, i, 0)
            assert p.left[10_000 + 16 * i :][:16] == bytes([i + 1]) * 16


async def test_a_batch_that_fails_carries_the_error_of_the_one_that_failed() -> None:
    async with open_pair(max_send_wr=4) as p:
        bad = RemoteBuffer(p.remote.addr, 8, p.remote.rkey ^ 0x5500)
        batch = p.a.batch()
        for i in range(20):
            batch.rdma_write(p.local[:8], bad if i == 9 else p.remote[8 * i :])
        with pytest.raises(aiordma.RemoteAccessError, match=f"{bad.rkey:#x}"):
            await batch
        with pytest.raises(aiordma.RemoteAccessError):
            await batch


async def test_a_batch_that_was_posted_takes_no_more() -> None:
    async with open_pair() as p:
        batch = p.a.batch()
        batch.rdma_write(p.local[:1], p.remote)
        await batch
        with pytest.raises(UsageError, match="posted"):
            batch.rdma_write(p.local[:1], p.remote)
        with pytest.raises(aiordma.BufferAccessError, match="registered"):
            p.a.batch().send(b"inline")
        await p.check()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("depth", [1, 2, 16, 64])
async def test_unsignalled_operations_resolve_whichever_is_awaited(depth: int) -> None:
    async with open_pair(max_send_wr=depth) as p:
        for count in (1, 2, depth, 3 * depth + 1):
            for awaited in (0, count // 2, count - 1):
                ops = [p.a.rdma_write(p.local[:8], p.remote[8 * i :], signaled=False) for i in range(count)]
                with anyio.fail_after(20):
                    await ops[awaited]
                    assert all(op.done for op in ops[:awaited])
                    for op in reversed(ops):
                        assert (await op).status == 0
        assert p.a.statistics()["send"]["in_flight"] == 0


async def test_unsignalled_ones_are_resolved_by_the_next_signalled_one() -> None:
    async with open_pair() as p:
        quiet = [p.a.rdma_write(p.local[:8], p.remote, signaled=False) for _ in range(10)]
        posted = p.a.statistics()["send"]["posted"]
        await p.a.rdma_write(p.local[:8], p.remote)
        assert all(op.done for op in quiet)
        assert p.a.statistics()["send"]["posted"] == posted + 1, "no marker was needed"


@pytest.mark.parametrize("depth", [2, 16])
async def test_wait_idle_ends_after_everything_unsignalled_and_queued_too(depth: int) -> None:
    async with open_pair(max_send_wr=depth) as p:
        for count in [*range(2 * depth + 2), 5 * depth + 3]:
            ops = [p.a.rdma_write(p.local[:8], p.remote, signaled=False) for _ in range(count)]
            with anyio.fail_after(20):
                await p.a.wait_idle()
            assert all(op.done for op in ops)


async def test_wait_idle_waits_for_what_is_posted_meanwhile_and_raises_nothing() -> None:
    async with open_pair(max_send_wr=8) as p:
        blocker = p.block()
        more = []

        async def waiter() -> None:
            await p.a.wait_idle()
            assert all(op.done for op in more)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(waiter)
                group.start_soon(waiter)
                await anyio.sleep(0.01)
                more += [p.a.rdma_write(p.local[:8], p.remote, signaled=False) for _ in range(13)]
                p.unblock()
            await blocker
            await p.a.wait_idle()
            failing = p.a.rdma_write(p.local[:8], RemoteBuffer(p.remote.addr, 8, 1))
            await p.a.wait_idle()
            assert isinstance(failing.exception(), aiordma.RemoteAccessError)


async def test_a_fenced_operation_sees_the_data_of_the_read_before_it() -> None:
    async with open_pair(size=1 << 20) as p:
        for round_ in range(20):
            p.peer.view()[: 1 << 19] = bytes([round_ + 1]) * (1 << 19)
            read = p.a.rdma_read(p.local[: 1 << 19], p.remote[: 1 << 19])
            write = p.a.rdma_write(p.local[: 1 << 19], p.remote[1 << 19 :], fence=True, inline=False)
            await write
            assert read.done
            assert p.right[1 << 19 :] == p.right[: 1 << 19]


async def test_solicited_and_every_other_option_together_work() -> None:
    async with open_pair() as p:
        for signaled in (True, False):
            for fence in (True, False):
                for solicited in (True, False):
                    for inline in (True, False, None):
                        receives = [p.b.recv(p.peer) for _ in range(2)]
                        ops = [
                            p.a.send(p.local[:8], signaled=signaled, fence=fence, solicited=solicited, inline=inline),
                            p.a.rdma_write(
                                p.local[:8],
                                p.remote,
                                imm=3,
                                signaled=signaled,
                                fence=fence,
                                solicited=solicited,
                                inline=inline,
                            ),
                        ]
                        for op in [*ops, *receives]:
                            await op


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
async def test_sends_and_writes_work_on_both_qp_types(qp_type: str) -> None:
    async with open_pair(qp_type=qp_type) as p:
        receive = p.b.recv(p.peer[:16])
        p.local.view()[:4] = b"data"
        await p.a.send(p.local[:4], imm=5)
        got = await receive
        assert (got.imm_data, bytes(p.right[:4])) == (5, b"data")
        await p.a.rdma_write(p.local[:4], p.remote[100:])
        await eventually(lambda: bytes(p.right[100:104]) == b"data")


@pytest.mark.parametrize(
    ("access", "allowed"),
    [
        (Access.LOCAL_WRITE, set()),
        (Access.REMOTE_READ, {"read"}),
        (Access.LOCAL_WRITE | Access.REMOTE_WRITE, {"write"}),
        (Access.LOCAL_WRITE | Access.REMOTE_ATOMIC, {"atomic"}),
        (Access.ALL, {"read", "write", "atomic"}),
    ],
)
async def test_rights_of_the_region_are_known_here_and_enforced_there(access: Access, allowed: set[str]) -> None:
    async with aiordma.open_device(DEVICE) as device:
        for kind in ("read", "write", "atomic"):
            async with connected(device) as p, device.reg_mr(bytearray(64), access) as mr:

                def start(remote: RemoteBuffer, kind: str = kind, p: Any = p) -> aiordma.Completion:
                    if kind == "read":
                        return p.a.rdma_read(p.local[:8], remote)
                    if kind == "write":
                        return p.a.rdma_write(p.local[:8], remote)
                    return p.a.atomic_fetch_add(p.local[:8], remote, 1)

                known = mr.remote()
                unknown = RemoteBuffer(known.addr, known.length, known.rkey)
                if kind in allowed:
                    await start(known)
                    await start(unknown)
                else:
                    with pytest.raises(aiordma.AccessFlagsError, match="without REMOTE_"):
                        start(known)
                    with pytest.raises(aiordma.RemoteAccessError, match=f"{known.rkey:#x}"):
                        await start(unknown)


@pytest.mark.parametrize("access", [Access.NONE, Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC])
async def test_rights_of_the_qp_are_enforced_there(access: Access) -> None:
    async with aiordma.open_device(DEVICE) as device:
        for kind, needed in (
            ("rdma_read", Access.REMOTE_READ),
            ("rdma_write", Access.REMOTE_WRITE),
            ("atomic_fetch_add", Access.REMOTE_ATOMIC),
        ):
            async with connected(device, access=access) as p:
                extra = (1,) if kind == "atomic_fetch_add" else ()
                op = getattr(p.a, kind)(p.local[:8], p.remote[:8], *extra)
                if needed & access:
                    await op
                else:
                    with pytest.raises((aiordma.RemoteAccessError, RemoteInvalidRequestError)):
                        await op

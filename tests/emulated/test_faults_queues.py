"""Queues, connections and errors: faults that users of RDMA met, each with its source."""

import errno
import mmap
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from emulated.core import DEVICE, ON_EMULATED, connect, connected, eventually, reported

import aiordma
from aiordma import (
    Access,
    AccessFlagsError,
    AsyncEvent,
    BufferAccessError,
    ClosedError,
    CompletionQueueError,
    Device,
    DeviceFatalError,
    EventType,
    LocalLengthError,
    MemoryRegion,
    QueuePair,
    RemoteAccessError,
    RemoteBuffer,
    RemoteInvalidRequestError,
    RetryExceededError,
    RnrRetryExceededError,
    UsageError,
    VerbsError,
    WrFlushError,
    _control,
)
from aiordma._offload import Pending
from aiordma.emulator import _inject as inject
from aiordma.emulator import faults

pytestmark = pytest.mark.anyio

SOON = 20
#: What the small device can do.
SMALL: dict[str, Any] = {
    "max_send_wr": 16,
    "max_recv_wr": 16,
    "max_send_sge": 1,
    "max_recv_sge": 1,
    "max_inline_data": 0,
}


@pytest.fixture(autouse=True)
def no_injection(leak_check: None) -> Iterator[None]:
    yield
    if ON_EMULATED:
        faults.reset()


@asynccontextmanager
async def opened(name: str | None = None, **options: Any) -> AsyncIterator[Device]:
    options.setdefault("spin_us", 0)
    async with aiordma.open_device(DEVICE if name is None else f"emulated:{name}", **options) as device:
        yield device


async def all_of(operations: Any) -> None:
    with anyio.fail_after(SOON):
        for operation in operations:
            await operation


async def errors_of(operations: Any) -> list[BaseException | None]:
    found: list[BaseException | None] = []
    with anyio.fail_after(SOON):
        for operation in operations:
            try:
                await operation
            except aiordma.RdmaError as e:
                found.append(e)
            else:
                found.append(None)
    return found


def attributes(qp: QueuePair) -> Any:
    """What the device has for the QP (ibv_query_qp(3))."""
    attr, _ = qp.pyverbs.query((1 << 8) | (1 << 13) | (1 << 17))  # path_mtu, max_rd_atomic, max_dest_rd_atomic
    return attr


# ------------------------------------------------------------------ full queues


async def test_more_operations_than_slots_wait_their_turn() -> None:
    """uccl#267: posting to a full queue gave ENOMEM."""
    async with opened() as device, connected(device, max_send_wr=16, max_recv_wr=16) as pair:
        with faults.hold(pair.a) as go:
            operations = []
            for i in range(40):
                pair.left[i : i + 1] = bytes([i])
                operations.append(pair.a.rdma_write(pair.local[i : i + 1], pair.remote[i : i + 1]))
            statistics = pair.a.statistics()["send"]
            assert (statistics["in_flight"], statistics["waiting"]) == (16, 24)
            await anyio.sleep(0.02)
            go.stop()
            await all_of(operations)
        assert pair.right[:40] == bytes(range(40))
        receives = [pair.b.recv(pair.peer[i : i + 1]) for i in range(40)]
        assert pair.b.statistics()["recv"]["waiting"] == 24
        await all_of([pair.a.send(bytes([i])) for i in range(40)])
        await all_of(receives)
        assert pair.right[:40] == bytes(range(40))


@pytest.mark.any_device
async def test_what_never_fits_is_refused_and_says_why() -> None:
    """uccl#267, spdk#3195: ENOMEM again, for too many buffers and too much inline data."""
    async with opened() as device, connected(device, max_send_sge=3, max_recv_sge=3, max_inline_data=64) as pair:
        parts = [pair.local[i * 8 : i * 8 + 8] for i in range(100)]
        await pair.a.rdma_write(parts[:3], pair.remote)
        for post in (
            lambda: pair.a.rdma_write(parts, pair.remote),
            lambda: pair.a.rdma_read(parts, pair.remote),
            lambda: pair.a.send(parts),
        ):
            with pytest.raises(UsageError, match="max_send_sge"):
                post()
        with pytest.raises(UsageError, match="max_recv_sge"):
            pair.a.recv(parts)
        inline = pair.a.max_inline_data
        await pair.a.rdma_write(bytes(inline), pair.remote)
        with pytest.raises(BufferAccessError, match=f"max_inline_data={inline}"):
            pair.a.rdma_write(bytes(inline + 1), pair.remote)
        with pytest.raises(UsageError, match=f"max_inline_data={inline}"):
            pair.a.rdma_write(pair.local[: inline + 1], pair.remote, inline=True)
        await pair.check()


@pytest.mark.parametrize("slots", [1, 2, 3, 16])
async def test_unsignalled_requests_never_fill_the_queue(slots: int) -> None:
    """brpc#3132: slots came back only by completions that nobody had asked for."""
    async with opened() as device, connected(device, max_send_wr=slots) as pair:
        operations = [
            pair.a.rdma_write(pair.local[:4], pair.remote[4 * i : 4 * i + 4], signaled=False) for i in range(1000)
        ]
        with anyio.fail_after(SOON):
            await pair.a.wait_idle()
        assert all(operation.status == 0 for operation in operations)
        assert pair.a.statistics()["send"]["in_flight"] == 0
        assert device.engine.statistics()["send"][0]["outstanding"] == 0
        # In order, too: one that is done has none before it that isn't.
        with faults.hold(pair.a) as go:
            operations = [pair.a.rdma_write(pair.local[:4], pair.remote, signaled=False) for _ in range(100)]
            seen: list[int] = []
            for i, operation in enumerate(operations):
                operation.on_finish(lambda i=i: seen.append(i))
            go.stop()
            await all_of(operations[50:51])
        assert seen[:51] == list(range(51))
        await all_of(operations)
        assert seen == list(range(100))


# ------------------------------------------------------------------ completion queues


async def test_a_small_completion_queue_is_never_overrun() -> None:
    """libfabric PR4913: one completion too many, and every QP on that CQ was dead."""
    async with opened("mlx5_small") as device:
        queue = await Pending(device.control, device.engine.create("send", 4))
        size = queue.statistics()["capacity"]
        assert size < 8
        async with (
            device.reg_mr(bytearray(64)) as mr,
            device.create_qp(**SMALL | {"max_send_wr": 4}) as a,
            device.create_qp(**SMALL | {"max_send_wr": 4}) as b,
        ):
            await connect(a, b)
            events = device.events()
            with faults.hold() as go:
                operations = [qp.rdma_write(mr[:8], mr[8:16].remote()) for _ in range(10) for qp in (a, b)]
                await anyio.sleep(0.02)
                go.stop()
                await all_of(operations)
            # Both can be full at a time, so the second one has a CQ of its own.
            assert len(device.engine.statistics()["send"]) == 2
            faults.raise_event(EventType.CLIENT_REREGISTER, device="mlx5_small", port=1)
            assert (await anext(events)).type is EventType.CLIENT_REREGISTER


async def test_the_error_of_a_completion_queue_ends_everything_on_it() -> None:
    """libfabric PR4913: awaits on a CQ that was in error never ended."""
    async with opened() as device, connected(device) as pair, connected(device) as other:
        events = device.events()
        with faults.hold():
            operations = [qp.rdma_write(pair.local[:8], pair.remote) for qp in (pair.a, other.a) for _ in range(4)]
            receive = pair.b.recv(pair.peer[:8])
            faults.cq_error(pair.a)
            for error in await errors_of(operations):
                assert isinstance(error, CompletionQueueError)
            with anyio.fail_after(SOON):
                assert (await anext(events)).type is EventType.CQ_ERR
            for qp in (pair.a, other.a):
                with pytest.raises(CompletionQueueError):
                    qp.send(pair.local[:8])
            # What is on another CQ goes on.
            assert not receive.done
        # New ones don't come onto the old one.
        async with connected(device) as fresh:
            await fresh.check()
        with anyio.fail_after(SOON):
            await pair.b.close()
        assert isinstance(receive.exception(), WrFlushError)


async def test_a_lost_device_ends_everything() -> None:
    """libfabric PR4913: the same of a device."""
    async with opened() as device, connected(device) as pair:
        events = device.events()
        operations = [pair.b.recv(pair.peer[:8])]
        with faults.hold(pair.a):
            operations += [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(200)]
            faults.device_fatal("mlx5_0")
            for error in await errors_of(operations):
                assert isinstance(error, DeviceFatalError)
            assert device.lost
            assert await anext(events) == AsyncEvent(EventType.DEVICE_FATAL)
            with pytest.raises(DeviceFatalError):
                pair.a.send(pair.local[:8])
            with anyio.fail_after(SOON):
                await device.close()


async def test_a_batch_larger_than_the_queue_goes_in_parts() -> None:
    """spdk#3069: an operation that needed more credits than there were waited for ever."""
    async with opened() as device, connected(device, max_send_wr=16, max_rd_atomic=2) as pair:
        pair.right[: 17 * 8] = bytes(range(17 * 8))
        batch = pair.a.rdma_read_many(
            (pair.local[i * 8 : i * 8 + 8], pair.remote[i * 8 : i * 8 + 8]) for i in range(17)
        )
        await all_of([batch])
        assert pair.left[: 17 * 8] == bytes(range(17 * 8))
        with faults.hold(pair.a) as go:
            # Others are in the queue already, and come behind it.
            operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(10)]
            operations.append(
                pair.a.rdma_write_many(
                    (pair.local[i * 8 : i * 8 + 8], pair.remote[i * 8 : i * 8 + 8]) for i in range(500)
                )
            )
            operations += [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(10)]
            go.stop()
            await all_of(operations)
        assert pair.left[: 500 * 8] == pair.right[: 500 * 8]


# ------------------------------------------------------------------ errors


def some_of_each(a: QueuePair, local: MemoryRegion, remote: RemoteBuffer) -> list[Any]:
    return [
        a.rdma_write(local[:8], remote),
        a.rdma_read(local[8:16], remote),
        a.send(local[:8]),
        a.atomic_fetch_add(local[16:24], remote[:8], 1),
        a.rdma_write(local[:8], remote, imm=7),
        a.atomic_cmp_swp(local[16:24], remote[:8], 1, 2),
        a.recv(local[:64]),
        a.recv(None),
    ]


_REQUESTS = [
    "RDMA_WRITE",
    "RDMA_READ",
    "SEND",
    "ATOMIC_FETCH_AND_ADD",
    "RDMA_WRITE_WITH_IMM",
    "ATOMIC_CMP_AND_SWP",
    "RECV",
    "RECV",
]


async def test_garbage_in_failed_completions_reaches_nobody() -> None:
    """tensorpipe PR416: the opcode of a failed completion is undefined, and was used to tell whose it was."""
    async with opened() as device, connected(device) as pair:
        with reported() as reports, inject.garbage(device.context_address), faults.hold(pair.a):
            operations = some_of_each(pair.a, pair.local, pair.remote)
            with anyio.fail_after(SOON):
                await pair.a.close()
            for operation, error, request in zip(operations, await errors_of(operations), _REQUESTS, strict=True):
                assert isinstance(error, WrFlushError)
                assert error.opcode == operation.request == request
                assert error.qp_num == pair.a.qp_num
                assert error.wr_id == operation.wr_id
                assert operation.opcode is None
                assert operation.byte_len == 0
                assert operation.imm_data is None
                assert operation.invalidated_rkey is None
                assert operation.wc_flags == 0
        assert not reports.found


async def test_a_failure_is_told_of_the_request_that_failed() -> None:
    """tensorpipe PR416: and the rest of the queue tells what failed first."""
    async with opened() as device, connected(device) as pair:
        with inject.garbage(device.context_address), faults.hold(pair.a) as go:
            nobodys = RemoteBuffer(pair.remote.addr, 8, pair.remote.rkey ^ 0x100)
            operations = [
                pair.a.rdma_write(pair.local[:8], pair.remote),
                pair.a.rdma_read(pair.local[:8], nobodys),
                *some_of_each(pair.a, pair.local, pair.remote),
            ]
            go.stop()
            first, failed, *flushed = await errors_of(operations)
        assert first is None
        assert isinstance(failed, RemoteAccessError)
        assert failed.opcode == "RDMA_READ"
        assert f"{nobodys.rkey:#x}" in str(failed)
        for error, request in zip(flushed, _REQUESTS, strict=True):
            assert isinstance(error, WrFlushError)
            assert error.opcode == request
            if request != "RECV":
                assert "RDMA_READ with IBV_WC_REM_ACCESS_ERR" in str(error)
        assert pair.a.state == "ERR"


async def test_closing_flushes_and_leaves_nobody_waiting() -> None:
    """Mooncake PR2427: work requests of a QP that was destroyed, or reset, completed never."""
    async with opened() as device:
        # As it should be: through ERR.
        async with connected(device, max_send_wr=2) as pair:
            with faults.hold(pair.a):
                operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(5)]
                operations.append(pair.a.rdma_write(pair.local[:8], pair.remote, signaled=False))
                with anyio.fail_after(SOON):
                    await pair.a.close()
            assert all(isinstance(error, WrFlushError) for error in await errors_of(operations))
        # Reset by somebody else: no completions.
        async with connected(device) as pair:
            with faults.hold(pair.a):
                operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(3)]
                _control.modify_qp(pair.a.address, 1, {"qp_state": 0})
                with anyio.fail_after(SOON):
                    await pair.a.close()
            assert all(isinstance(error, ClosedError) for error in await errors_of(operations))
        # Destroyed by somebody else.
        async with connected(device) as pair:
            with faults.hold(pair.a):
                operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(3)]
                pair.a.pyverbs.close()
                with anyio.fail_after(SOON):
                    await pair.a.close()
            assert all(isinstance(error, ClosedError) for error in await errors_of(operations))


async def test_a_device_that_doesnt_flush_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake PR2427: a flush that never comes."""
    monkeypatch.setattr("aiordma.qp.DRAIN_SECONDS", 0.2)
    async with opened() as device, connected(device) as pair:
        with faults.hang(pair.a):
            operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(200)]
            operations.append(pair.a.recv(pair.local[:8]))
            closing = pair.local.close()
            with anyio.fail_after(SOON):
                await pair.a.close()
                assert all(isinstance(error, ClosedError) for error in await errors_of(operations))
                # The memory is free only with the QP.
                await closing
        # And one that doesn't even take the command.
        async with connected(device) as pair:
            with faults.hang(pair.a), faults.verb("modify_qp", errno.EIO, state="ERR"):
                operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(3)]
                with anyio.fail_after(SOON):
                    await pair.a.close()
                assert all(isinstance(error, ClosedError) for error in await errors_of(operations))


# ------------------------------------------------------------------ receives


@pytest.mark.any_device
async def test_receives_posted_before_connecting_are_there_for_the_first_send() -> None:
    """DLSlime PR71: a peer that sent as soon as it could found no receive, and gave up."""
    async with (
        opened() as device,
        device.reg_mr(bytearray(4096)) as mr,
        device.create_qp(rnr_retry=0) as a,
        device.create_qp() as b,
    ):
        receives = [b.recv(mr[i * 8 : i * 8 + 8]) for i in range(64)]
        connecting = b.connect(a.info)
        await a.connect(b.info)
        await connecting
        await all_of([a.send(struct.pack("=Q", i)) for i in range(64)])
        await all_of(receives)
        assert mr.view()[: 64 * 8] == struct.pack("=64Q", *range(64))


@pytest.mark.any_device
async def test_a_late_receive_is_waited_for_or_the_sender_is_told() -> None:
    """DLSlime PR71: by default the sender waits; a QP with a limit says what ran out."""
    async with opened() as device:
        async with connected(device) as pair:
            send = pair.a.send(pair.local[:8])
            await anyio.sleep(0.1)
            assert not send.done
            await all_of([pair.b.recv(pair.peer[:8]), send])
        async with connected(device, rnr_retry=1) as pair:
            with pytest.raises(RnrRetryExceededError, match="post receives before"):
                await pair.a.send(pair.local[:8])


# ------------------------------------------------------------------ connecting

_GIDS = """
    import asyncio
    import aiordma
    from aiordma import emulator
    from aiordma.emulator import EmulatedDevice, EmulatedPort, Gid

    LINK, LINK2 = "fe80::1", "fe80::2"
    # Tables of two peers, and what they have to use: v1 entries come first, as the kernel makes them.
    cases = {
        "v1 first": (
            [Gid(LINK, "v1"), Gid(LINK), Gid("192.0.2.1", "v1"), Gid("192.0.2.1")],
            [Gid(LINK2, "v1"), Gid(LINK2), Gid("192.0.2.2", "v1"), Gid("192.0.2.2")],
            ("192.0.2.1 (RoCE v2, index 3)", "192.0.2.2 (RoCE v2, index 3)"),
        ),
        "link-local only": (
            [Gid(LINK, "v1"), Gid(LINK)],
            [Gid(LINK2, "v1"), Gid(LINK2)],
            ("fe80::1 (RoCE v2, index 1)", "fe80::2 (RoCE v2, index 1)"),
        ),
        "v1 only": (
            [Gid(LINK, "v1")],
            [Gid(LINK2, "v1")],
            ("fe80::1 (RoCE v1, index 0)", "fe80::2 (RoCE v1, index 0)"),
        ),
        "pure IPv6": (
            [Gid(LINK, "v1"), Gid(LINK), Gid("2001:db8::1", "v1"), Gid("2001:db8::1")],
            [Gid(LINK2, "v1"), Gid(LINK2), Gid("2001:db8::2", "v1"), Gid("2001:db8::2")],
            ("2001:db8::1 (RoCE v2, index 3)", "2001:db8::2 (RoCE v2, index 3)"),
        ),
        "mixed, with holes": (
            [None, Gid(LINK), None, Gid("2001:db8::1"), Gid("192.0.2.1")],
            [Gid("2001:db8::2"), None, Gid("192.0.2.2", "v1"), Gid("192.0.2.2")],
            ("192.0.2.1 (RoCE v2, index 4)", "192.0.2.2 (RoCE v2, index 3)"),
        ),
        "no common family": (
            [Gid("2001:db8::1"), Gid("2001:db8::1", "v1")],
            [Gid("192.0.2.2")],
            None,
        ),
    }

    async def transfer(expected):
        async with aiordma.open_device("emulated:left") as left, aiordma.open_device("emulated:right") as right:
            if expected:
                assert (str(left.gid), str(right.gid)) == expected, (left.gid, right.gid)
            async with left.reg_mr(bytearray(b"payload!")) as source, right.reg_mr(bytearray(8)) as sink:
                async with left.create_qp() as a, right.create_qp() as b:
                    try:
                        await a.connect(b.info)
                        await b.connect(a.info)
                    except aiordma.GidError as e:
                        assert expected is None
                        for entry in ("192.0.2.2", "2001:db8::1 (RoCE v2, index 0)", "2001:db8::1 (RoCE v1, index 1)"):
                            assert entry in str(e), e
                        return
                    assert expected
                    await a.rdma_write(source, sink.remote())
                    await b.rdma_read(sink, source.remote())
                    assert bytes(sink.view()) == b"payload!"

    async def by_index():
        async with aiordma.open_device("emulated:left", gid_index=0) as device:
            assert device.gid.index == 0
        try:
            await aiordma.open_device("emulated:left", gid_index=7)
        except aiordma.GidError as e:
            assert "index 7" in str(e)
            assert "0: 2001:db8::1 (RoCE v2, index 0)" in str(e)
        else:
            raise AssertionError("an index that isn't there")

    for name, (left, right, expected) in cases.items():
        emulator.detach()
        emulator.attach([
            EmulatedDevice(name="left", ports=(EmulatedPort(gids=tuple(left)),)),
            EmulatedDevice(name="right", ports=(EmulatedPort(gids=tuple(right)),)),
        ])
        asyncio.run(transfer(expected))
        print(name)
    asyncio.run(by_index())
    emulator.detach()
    emulator.attach([EmulatedDevice(name="bare", ports=(EmulatedPort(gids=()),))])

    async def bare():
        try:
            await aiordma.open_device("emulated")
        except aiordma.GidError as e:
            assert "no GID" in str(e)
        else:
            raise AssertionError("a port without a GID")

    asyncio.run(bare())
"""


def test_a_gid_that_reaches_the_peer_is_chosen(run_python: Callable[..., Any]) -> None:
    """nccl#769, Mooncake PR113: index 0 was taken, which is link-local and RoCE v1."""
    done = run_python(_GIDS)
    assert len(done.stdout.splitlines()) == 6
    assert done.stderr == ""


async def test_the_smaller_mtu_of_two_peers_is_used() -> None:
    """Mooncake#3868: two MTUs connected well, and the first long message failed."""
    async with opened("mlx5_0") as large, opened("mlx5_small") as small:
        assert (large.active_mtu, small.active_mtu) == (4096, 1024)
        data = bytes(range(256)) * 256
        async with (
            large.reg_mr(bytearray(data)) as left,
            small.reg_mr(bytearray(len(data))) as right,
            large.create_qp() as a,
            small.create_qp(**SMALL) as b,
        ):
            await connect(a, b)
            assert attributes(a).path_mtu == attributes(b).path_mtu == 3  # IBV_MTU_1024
            await a.rdma_write(left, right.remote())
            assert right.view() == data
            right.view()[:] = bytes(len(data))
            await b.rdma_read(right, left.remote())
            assert right.view() == data
            receive = a.recv(left)
            await b.send(right)
            assert (await receive).byte_len == len(data)


async def test_reads_in_flight_are_what_both_ends_can() -> None:
    """perftest#114: depths that differed failed in the step to RTS."""
    async with opened("mlx5_0") as large, opened("mlx5_small") as small:
        assert (small.max_qp_rd_atom, small.max_qp_init_rd_atom) == (4, 2)
        assert large.max_qp_rd_atom > 4
        async with (
            large.reg_mr(bytearray(4096)) as left,
            small.reg_mr(bytearray(4096)) as right,
            large.create_qp(max_rd_atomic=64) as a,
            small.create_qp(**SMALL) as b,
        ):
            await connect(a, b)
            assert (attributes(a).max_rd_atomic, attributes(a).max_dest_rd_atomic) == (4, 2)
            assert (attributes(b).max_rd_atomic, attributes(b).max_dest_rd_atomic) == (2, 4)
            await all_of([a.rdma_read(left[i * 8 : i * 8 + 8], right.remote()) for i in range(100)])
            await all_of([b.rdma_read(right[i * 8 : i * 8 + 8], left.remote()) for i in range(100)])
        async with (
            large.reg_mr(bytearray(4096)) as left,
            large.create_qp(max_rd_atomic=16) as a,
            large.create_qp(max_rd_atomic=1) as b,
        ):
            await connect(a, b)
            assert (attributes(a).max_rd_atomic, attributes(a).max_dest_rd_atomic) == (1, 1)


async def test_slow_verbs_leave_the_loop_running() -> None:
    """sglang#6548: everything stood still while a connection was made."""
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            await anyio.sleep(0.005)
            beats += 1

    async with opened() as device, device.create_qp() as a, device.create_qp() as b, anyio.create_task_group() as group:
        group.start_soon(heart)
        with faults.verb("modify_qp", delay=3600, state="RTR") as modify, faults.verb("reg_mr", delay=3600) as register:
            working = [a.connect(b.info), b.connect(a.info), device.reg_mr(bytearray(64))]
            await eventually(lambda: modify.hits and register.hits)
            before = beats
            await eventually(lambda: beats - before > 50)
            assert not any(pending.done for pending in working)
            modify.stop()
            register.stop()
            for pending in working:
                await pending
        mr = await working[-1]
        with faults.verb("dereg_mr", delay=3600) as deregister:
            closing = mr.close()
            await eventually(lambda: deregister.hits)
            before = beats
            await eventually(lambda: beats - before > 10)
            assert not closing.done
            deregister.stop()
            await closing
        group.cancel_scope.cancel()


async def test_events_of_another_port_are_told_apart_and_broken_qps_are_not_reused() -> None:
    """Mooncake#3596: a flap of one port stopped another; after one of its own, dead QPs were given work."""
    quick: dict[str, Any] = {**SMALL, "timeout": 8, "retry_cnt": 1}
    async with opened("mlx5_small") as device, device.reg_mr(bytearray(64)) as mr:
        remote = mr[8:16].remote()
        events = device.events()
        async with device.create_qp(**quick) as a, device.create_qp(**quick) as b:
            await connect(a, b)
            try:
                faults.raise_event(EventType.PORT_ACTIVE, device="mlx5_small", port=2)
                faults.raise_event(EventType.PORT_ERR, device="mlx5_small", port=2)
                with anyio.fail_after(SOON):
                    assert await anext(events) == AsyncEvent(EventType.PORT_ACTIVE, port=2)
                    assert await anext(events) == AsyncEvent(EventType.PORT_ERR, port=2)
                assert (a.state, b.state) == ("RTS", "RTS")
                await a.rdma_write(mr[:8], remote)

                faults.raise_event(EventType.PORT_ERR, device="mlx5_small", port=1)
                with anyio.fail_after(SOON):
                    assert await anext(events) == AsyncEvent(EventType.PORT_ERR, port=1)
                with pytest.raises(RetryExceededError):
                    await a.rdma_write(mr[:8], remote)
            finally:
                faults.raise_event(EventType.PORT_ACTIVE, device="mlx5_small", port=1)
            with anyio.fail_after(SOON):
                assert await anext(events) == AsyncEvent(EventType.PORT_ACTIVE, port=1)
            # It's dead, says so, and stays so.
            assert a.state == "ERR"
            with pytest.raises(WrFlushError, match="RDMA_WRITE with IBV_WC_RETRY_EXC_ERR"):
                await a.rdma_write(mr[:8], remote)
        async with device.create_qp(**quick) as a, device.create_qp(**quick) as b:
            await connect(a, b)
            await a.rdma_write(mr[:8], remote)
            # One that nothing was posted on learns it by an event.
            faults.raise_event(EventType.QP_FATAL, b)
            with anyio.fail_after(SOON):
                assert await anext(events) == AsyncEvent(EventType.QP_FATAL, element=b)
            assert b.state == "ERR" == await b.query_state()
            with pytest.raises(WrFlushError):
                await b.rdma_write(mr[:8], remote)


@pytest.mark.any_device
async def test_the_limit_of_a_shared_receive_queue_is_told_each_time() -> None:
    """ompi#9079: the limit's event comes once, and the queue ran dry the second time."""
    async with opened() as device, device.reg_mr(bytearray(4096)) as mr:
        srq = await device.create_srq(16)
        async with device.create_qp() as a, device.create_qp(srq=srq) as b:
            await connect(a, b)
            receives = [srq.recv(mr[i * 8 : i * 8 + 8]) for i in range(8)]
            for _ in range(3):
                crossed: list[bool] = []

                async def watch(crossed: list[bool] = crossed) -> None:
                    await srq.limit_reached(4)
                    crossed.append(True)

                with anyio.fail_after(SOON):
                    async with anyio.create_task_group() as group:
                        group.start_soon(watch)
                        await anyio.sleep(0.05)
                        await all_of([a.send(mr[:8]) for _ in range(4)])
                        await anyio.sleep(0.05)
                        assert not crossed  # four are left
                        await a.send(mr[:8])
                assert crossed
                await all_of(receives[:5])
                receives = receives[5:] + [srq.recv(mr[i * 8 : i * 8 + 8]) for i in range(5)]
            # Nobody waits any more, and none of the receives is lost.
            await all_of([a.send(mr[:8]) for _ in range(6)])
            await all_of(receives[:6])
        left = receives[6:]
        await srq.close()
        assert [type(error) for error in await errors_of(left)] == [ClosedError] * 2


# ------------------------------------------------------------------ atomics, numbers


@pytest.mark.any_device
async def test_atomics_are_checked_first_and_give_numbers_of_this_host() -> None:
    """ucx PR9771: NAKs for misaligned targets and missing rights, and replies of the wrong byte order."""
    async with opened() as device, connected(device) as pair:
        pair.right[:8] = struct.pack("=Q", 0x0102030405060708)
        old = await pair.a.atomic_fetch_add(pair.local[:8], pair.remote[:8], 0x10)
        assert old.value == 0x0102030405060708
        assert pair.left[:8] == struct.pack("=Q", 0x0102030405060708)
        assert pair.right[:8] == struct.pack("=Q", 0x0102030405060718)
        old = await pair.a.atomic_cmp_swp(pair.local[:8], pair.remote[:8], 0x0102030405060718, (1 << 64) - 2)
        assert old.value == 0x0102030405060718
        old = await pair.a.atomic_fetch_add(pair.local[:8], pair.remote[:8], 3)
        assert old.value == (1 << 64) - 2
        assert pair.right[:8] == struct.pack("=Q", 1)

        for remote in (pair.remote[4:12], pair.remote[1:9]):
            with pytest.raises(UsageError, match="multiple of 8"):
                pair.a.atomic_fetch_add(pair.local[:8], remote, 1)
        with pytest.raises(UsageError, match="8 bytes"):
            pair.a.atomic_fetch_add(pair.local[:8], pair.remote[:4], 1)
        with pytest.raises(BufferAccessError, match="8 bytes"):
            pair.a.atomic_fetch_add(pair.local[:16], pair.remote[:8], 1)
        for operand in (1 << 64, -(1 << 63) - 1, 1.5):
            with pytest.raises(UsageError, match="64-bit"):
                pair.a.atomic_fetch_add(pair.local[:8], pair.remote[:8], operand)  # type: ignore[arg-type]
        async with device.reg_mr(bytearray(8), Access.LOCAL_WRITE | Access.REMOTE_WRITE) as plain:
            with pytest.raises(AccessFlagsError, match="REMOTE_ATOMIC"):
                pair.a.atomic_fetch_add(pair.local[:8], plain.remote(), 1)
            await pair.check()
            # Rights that only the peer knows.
            unknown = RemoteBuffer(plain.addr, 8, plain.rkey)
            with pytest.raises(RemoteAccessError):
                await pair.a.atomic_fetch_add(pair.local[:8], unknown, 1)


_NO_ATOMICS = """
    import asyncio
    import aiordma
    from aiordma import emulator
    from aiordma.emulator import EmulatedDevice, Limits

    emulator.attach([EmulatedDevice(name="plain", limits=Limits(atomics=False))])

    async def main():
        async with aiordma.open_device("emulated", spin_us=0) as device:
            assert not device.remote_access & aiordma.Access.REMOTE_ATOMIC
            async with device.reg_mr(bytearray(64)) as mr, device.create_qp() as a, device.create_qp() as b:
                await a.connect(b.info)
                await b.connect(a.info)
                for post in (
                    lambda: a.atomic_fetch_add(mr[:8], mr[8:16].remote(), 1),
                    lambda: a.atomic_cmp_swp(mr[:8], mr[8:16].remote(), 1, 2),
                ):
                    try:
                        post()
                    except aiordma.UnsupportedError as e:
                        assert e.device == "plain" and "atomic" in e.capability, e
                    else:
                        raise AssertionError("posted")
                await a.rdma_write(mr[:8], mr[8:16].remote())
        print("done")

    asyncio.run(main())
"""


def test_a_device_without_atomics_says_so(run_python: Callable[..., Any]) -> None:
    """ucx PR9771: on a device without atomics."""
    assert run_python(_NO_ATOMICS).stdout == "done\n"


@pytest.mark.any_device
async def test_numbers_are_unsigned_and_whole() -> None:
    """RDMA-example#3, libfabric PR9379: immediate data in the wrong byte order, addresses cut to 32 bits."""
    async with opened() as device, connected(device) as pair:
        for imm in (0x89ABCDEF, 0, 1, 0xFFFFFFFF, 0x80000000):
            for post in (
                lambda imm=imm: pair.a.send(pair.local[:4], imm=imm),
                lambda imm=imm: pair.a.rdma_write(pair.local[:4], pair.remote, imm=imm),
            ):
                receive = pair.b.recv(pair.peer[:8])
                await post()
                assert (await receive).imm_data == imm
        for imm in (-1, 1 << 32, 1.0, "1"):
            with pytest.raises(UsageError, match="32-bit"):
                pair.a.send(pair.local[:4], imm=imm)  # type: ignore[arg-type]

        with mmap.mmap(-1, 8192) as high:
            async with device.reg_mr(high) as mr:
                assert mr.addr > 1 << 32
                await pair.a.rdma_write(b"high up", mr.remote()[4096:])
                assert high[4096:4103] == b"high up"

        top = RemoteBuffer(0xFFFF_FFFF_FFFF_F000, 0x1000, 0xFFFF_FFFF)
        for again in (RemoteBuffer.from_bytes(top.to_bytes()), RemoteBuffer.from_json(top.to_json())):
            assert (again.addr, again.length, again.rkey) == (top.addr, top.length, top.rkey)
        assert top[0xFF8:].addr == 0xFFFF_FFFF_FFFF_FFF8
        for address, length, rkey in ((-1, 1, 0), (0, -1, 0), (0, 1, -1), (1 << 64, 0, 0), (0, 1, 1 << 32)):
            with pytest.raises(UsageError):
                RemoteBuffer(address, length, rkey)


@pytest.mark.any_device
async def test_immediate_data_is_big_endian_on_the_wire() -> None:
    """RDMA-example#3: what another program makes of it is what we meant."""
    from pyverbs import enums as e
    from pyverbs.cq import CQ
    from pyverbs.qp import QP, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR

    async with opened() as device, device.create_qp() as a, device.reg_mr(bytearray(64)) as mr:
        cq = CQ(device.context, 16)
        qp = QP(device.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1, 0)))
        address = _control.qp_address(qp, device.context_address)
        try:
            init = {"qp_state": 1, "port_num": 1, "qp_access_flags": 15}
            _control.modify_qp(address, 1 << 0 | 1 << 3 | 1 << 4 | 1 << 5, init)
            qp.post_recv(RecvWR(wr_id=5, num_sge=1, sg=[SGE(mr.addr, 64, mr.lkey)]))
            info = a.info
            rtr = {
                "qp_state": 2,
                "path_mtu": 5,
                "dest_qp_num": info.qp_num,
                "rq_psn": info.psn,
                "max_dest_rd_atomic": 1,
                "min_rnr_timer": 12,
                "ah_port": 1,
                "is_global": 1,
                "dgid": info.gid,
                "sgid_index": device.gid.index if device.gid else 0,
                "hop_limit": 64,
            }
            mask = 1 << 0 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20
            _control.modify_qp(address, mask, rtr)
            await a.connect(
                aiordma.QPInfo("RC", qp.qp_num, 0, info.gid, info.gid_type, info.lid, 4096, 1, 1),
            )
            await a.send(b"hello", imm=0x89ABCDEF)
            count, completions = cq.poll()
            assert count == 1
            # pyverbs shows the __be32 of struct ibv_wc as it is.
            assert struct.pack("=I", completions[0].imm_data) == bytes([0x89, 0xAB, 0xCD, 0xEF])
        finally:
            qp.close()
            cq.close()


async def test_a_message_longer_than_its_receive_fails_on_both_ends() -> None:
    """DLSlime PR71: what a receive window that is too small looks like."""
    async with opened() as device, connected(device) as pair:
        receive = pair.b.recv(pair.peer[:8])
        with pytest.raises(RemoteInvalidRequestError):
            await pair.a.send(pair.local[:9])
        with pytest.raises(LocalLengthError):
            await receive
        with pytest.raises(VerbsError), faults.verb("create_qp", errno.ENOMEM, count=1):
            await device.create_qp()

"""A pool of DCIs: many targets, errors that stay where they happened, streams that come back."""

import gc
import struct
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest
from emulated.core import eventually, reported, settle
from emulated.mlx5 import Bytes, opened, targets, wrong_key

from aiordma import (
    BufferAccessError,
    ClosedError,
    Device,
    MemoryRegion,
    QPConfig,
    RemoteAccessError,
    RemoteBuffer,
    RetryExceededError,
    SharedReceiveQueue,
    UsageError,
    VerbsError,
    WrFlushError,
    mlx5,
)
from aiordma._offload import Pending
from aiordma.emulator import _inject, faults
from aiordma.mlx5 import DCIPool, DcPeer, DCTarget, Lane, PoolOperation, dci_pool, least_loaded, sticky

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

SOON = 30
QUICK = QPConfig(timeout=8, retry_cnt=1)


@dataclass
class Setting:
    """A pool, and targets with memory: ``left`` is random, ``right[i]`` zeros."""

    device: Device
    pool: DCIPool
    targets: list[DCTarget]
    peers: list[DcPeer]
    bad: DcPeer
    srq: SharedReceiveQueue
    left: Bytes
    right: list[Bytes]
    local: MemoryRegion
    there: list[MemoryRegion]
    remote: list[RemoteBuffer]

    def write(self, i: int, at: int, n: int = 8) -> PoolOperation:
        """To target ``i``, what is on the left at the same place."""
        return self.pool.rdma_write(self.peers[i], self.local[at : at + n], self.remote[i][at : at + n])

    def write_bad(self) -> PoolOperation:
        return self.pool.rdma_write(self.bad, self.local[:8], self.remote[0])


@asynccontextmanager
async def setting(n: int = 2, size: int = 1, memory: int = 4096, **options: Any) -> AsyncIterator[Setting]:
    options.setdefault("config", QUICK)
    left = np.random.default_rng(n).integers(0, 256, memory, dtype=np.uint8)
    async with (
        opened() as device,
        device.reg_mr(left) as local,
        targets(device, n, memory) as made,
        mlx5.create_dci_pool(device, size, **options) as pool,
    ):
        peers = [await pool.reach(target.info) for target, _, _ in made]
        bad = await pool.reach(wrong_key(made[0][0].info))
        there = [mr for _, _, mr in made]
        yield Setting(
            device,
            pool,
            [target for target, _, _ in made],
            peers,
            bad,
            made[0][0].srq,
            left,
            [buffer for _, buffer, _ in made],
            local,
            there,
            [mr.remote() for mr in there],
        )


def only(stream: int) -> Callable[[Sequence[Lane], DcPeer], Lane | None]:
    """A policy with one lane."""

    def policy(lanes: Sequence[Lane], target: DcPeer) -> Lane | None:
        return next(lane for lane in lanes if lane.stream_id == stream)

    return policy


# ------------------------------------------------------------------ operations


async def test_every_operation() -> None:
    async with setting(3, 2, log_streams=2) as s:
        for i, peer in enumerate(s.peers):
            operation = s.write(i, 100, 50)
            assert isinstance(operation, PoolOperation)
            done = await operation
            assert await operation is done
            assert (done.opcode, done.status) == (1, 0)
            assert (s.right[i][100:150] == s.left[100:150]).all()
            assert operation.exception() is None
            receives = [s.srq.recv(s.there[i][1000:1100]) for _ in range(2)]
            await s.pool.rdma_write(peer, s.local[:4], s.remote[i], imm=5)
            assert (await receives[0]).imm_data == 5
            await s.pool.send(peer, b"hello", imm=6)
            assert ((await receives[1]).imm_data, receives[1].receiver_qp_num) == (6, s.targets[i].dctn)
            assert s.right[i][1000:1005].tobytes() == b"hello"
            s.right[i][8:16] = np.frombuffer(struct.pack("=Q", 10), np.uint8)
            word = s.remote[i][8:16]
            assert (await s.pool.atomic_fetch_add(peer, s.local[8:16], word, 5)).value == 10
            assert (await s.pool.atomic_cmp_swp(peer, s.local[8:16], word, 15, 1)).value == 15
            await s.pool.rdma_read(peer, s.local[200:208], word)
            assert struct.unpack("=Q", s.left[200:208].tobytes()) == (1,)
        totals = s.pool.statistics()
        assert len(totals) == 8
        assert sum(lane.posted for lane in totals) == 3 * 6
        assert sum(lane.bytes for lane in totals) == 3 * (50 + 4 + 5 + 8 + 8 + 8)
        assert {(lane.errors, lane.resets, lane.in_flight, lane.ready) for lane in totals} == {(0, 0, 0, True)}
        assert {lane.stream_id for lane in totals} == {1, 2, 3, 4}
        assert {lane.dci for lane in totals} == {0, 1}


async def test_awaiting_what_completes_at_once_takes_no_turn_of_the_loop() -> None:
    """Also where an operation waits for a lane that others free."""
    async with setting(3, 1, log_streams=0) as s:
        with _inject.stepping() as step:
            first = s.write(0, 0)
            while not first.done:  # a queue pair that was idle isn't found by the first step
                step()
                await anyio.lowlevel.checkpoint()
            writes = [s.write(i, 8) for i in range(3)]
            turns: list[int] = []
            s.device.control.backend.call_soon(lambda: turns.append(1))
            for write in writes:
                step()
                await write
            assert not turns
            await settle()
            assert turns


async def test_it_is_as_large_as_asked() -> None:
    async with opened() as device:
        async with mlx5.create_dci_pool(device, 3) as pool:
            assert len(pool.dcis) == 3
            assert len(pool.lanes) == 3 * 16
            assert repr(pool) == "<DCIPool of 3 DCIs, 48 lanes on mlx5_0>"
        for size, options in (
            (0, {}),
            (1025, {}),
            (1, {"log_streams": 17}),
            (1, {"log_streams": 2, "log_errored": 17}),
            (1, {"log_errored": -1}),
            (1, {"config": QPConfig(timeout=77)}),
        ):
            with pytest.raises(UsageError):
                mlx5.create_dci_pool(device, size, **options)  # type: ignore[arg-type]


async def test_no_operation_without_a_target_of_the_pool() -> None:
    async with setting() as s:
        for target in (None, s.targets[0].info, s.targets[0]):
            with pytest.raises(UsageError, match="DcPeer"):
                s.pool.rdma_write(target, s.local[:8], s.remote[0])  # type: ignore[arg-type]
        with pytest.raises(BufferAccessError, match="inline"):
            s.pool.send(s.peers[0], bytes(5000))
        with pytest.raises(BufferAccessError):
            s.pool.rdma_write(s.peers[0], 5, s.remote[0])  # type: ignore[arg-type]
        endless: list[Any] = []
        endless.append(endless)
        with pytest.raises(BufferAccessError):
            s.pool.rdma_write(s.peers[0], endless, s.remote[0])
        await s.peers[0].close()
        with pytest.raises(ClosedError):
            s.write(0, 0)
        await s.write(1, 0)


# ------------------------------------------------------------------ policies


async def test_least_loaded_spreads() -> None:
    async with setting(4, 2, log_streams=1, config=QPConfig(max_send_wr=64)) as s:
        held = [faults.hold(dci) for dci in s.pool.dcis]
        writes = [s.write(i % 4, 8 * i) for i in range(16)]
        # Four lanes and four targets: one each, since targets don't share lanes while there is another.
        assert [lane.in_flight for lane in s.pool.lanes] == [4, 4, 4, 4]
        for hold in held:
            hold.stop()
        for write in writes:
            await write


async def test_targets_do_not_share_a_lane_while_it_works() -> None:
    async with setting(2, 1, log_streams=0) as s:
        (lane,) = s.pool.lanes
        with faults.hold(s.pool.dcis[0]):
            first = [s.write(0, 8 * i) for i in range(3)]
            second = s.write(1, 0)
            assert lane.in_flight == 3
            assert second.lane is None
            assert "waits for a lane" in repr(second)
            # What is called later stays behind it.
            third = s.write(0, 64)
            assert third.lane is None
        for write in (*first, second, third):
            await write
        assert s.right[1][:8].tobytes() == s.left[:8].tobytes()


async def test_sticky_keeps_the_order_of_a_target() -> None:
    async with setting(4, 2, log_streams=3, policy=sticky, config=QPConfig(max_send_wr=4)) as s:
        lanes: dict[int, set[Lane]] = {}
        finished: dict[int, list[int]] = {i: [] for i in range(4)}
        operations = []
        for n in range(100):
            for i in range(4):
                operation = s.pool.rdma_write(s.peers[i], struct.pack("=I", n), s.remote[i])
                operation.on_finish(lambda i=i, n=n: finished[i].append(n))
                operations.append((i, operation))
        for i, operation in operations:
            await operation
            assert operation.lane is not None
            lanes.setdefault(i, set()).add(operation.lane)
        assert all(len(used) == 1 for used in lanes.values())
        assert all(order == list(range(100)) for order in finished.values())
        assert all(struct.unpack("=I", right[:4].tobytes()) == (99,) for right in s.right)


async def test_lanes_of_one_dci_do_not_starve_each_other() -> None:
    """A full send queue of one lane's requests, and another lane that waits for room with nothing in flight."""

    def by_target(lanes: Sequence[Lane], target: DcPeer) -> Lane | None:
        return lanes[order.index(target.dctn) % len(lanes)]

    async with setting(3, 1, log_streams=2, policy=by_target, config=QPConfig(max_send_wr=4)) as s:
        order = [target.dctn for target in s.targets]
        done: list[int] = []
        with faults.hold(s.pool.dcis[0]):
            for _ in range(50):
                s.write(0, 0).on_finish(lambda: done.append(0))
            others = [s.write(1, 8), s.write(2, 16)]
            for operation, i in zip(others, (1, 2), strict=True):
                operation.on_finish(lambda i=i: done.append(i))
            assert [operation.lane for operation in others] == [None, None]
        with anyio.fail_after(SOON):
            for operation in others:
                await operation
            await eventually(lambda: len(done) == 52)
        # In turns, not behind everything that came before.
        assert done.index(1) < 20
        assert done.index(2) < 20


async def test_a_policy_of_ones_own() -> None:
    async with setting(2, 1, log_streams=2, policy=only(3)) as s:
        for _ in range(10):
            await s.write(0, 0)
            await s.write(1, 8)
        assert [lane.posted for lane in s.pool.statistics()] == [0, 0, 20, 0]


async def test_a_policy_that_raises_ends_what_it_was_asked_for() -> None:
    broken = False

    def moody(lanes: Sequence[Lane], target: DcPeer) -> Lane | None:
        if broken:
            raise ZeroDivisionError("no lane")
        return least_loaded(lanes, target)

    async with setting(2, 1, log_streams=0, policy=moody) as s:
        with faults.hold(s.pool.dcis[0]):
            first = s.write(0, 0)
            waits = [s.write(1, 8 * i) for i in range(3)]
            broken = True
        await first
        for operation in waits:
            with pytest.raises(ZeroDivisionError):
                await operation
        with pytest.raises(ZeroDivisionError):
            s.write(0, 0)
        broken = False
        await s.write(1, 0)


async def test_a_policy_gives_a_lane_of_its_pool_or_none() -> None:
    class Same:
        """Equal to everything."""

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    answers: list[Any] = []
    async with (
        setting(1, 1) as s,
        mlx5.create_dci_pool(s.device, 1, policy=lambda lanes, target: answers[-1]) as pool,
    ):
        for answer in (1, "lane", Same(), Lane.__new__(Lane), s.pool.lanes[0]):
            answers.append(answer)
            with pytest.raises(UsageError, match="neither a lane of this pool nor None"):
                pool.rdma_write(s.peers[0], s.local[:8], s.remote[0])
        answers.append(pool.lanes[3])
        await pool.rdma_write(s.peers[0], s.local[:8], s.remote[0])
        for policy in (None, 5, "sticky"):
            with pytest.raises(UsageError, match="policy"):
                mlx5.create_dci_pool(s.device, 1, policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("lane", [None, 0])
async def test_a_policy_that_closes_its_pool_leaves_nothing_waiting(lane: int | None) -> None:
    made: list[DCIPool] = []

    def closing(lanes: Sequence[Lane], target: DcPeer) -> Lane | None:
        for pool in made:
            pool.close()
        return None if lane is None else lanes[lane]

    async with setting(1, 1, policy=closing) as s:
        made.append(s.pool)
        with pytest.raises(ClosedError):
            s.write(0, 0)
        with anyio.fail_after(SOON):
            await s.pool.close()
            await s.local.close()  # nothing holds it


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("log_errored", [0, 1, 2])
async def test_a_bad_target_costs_its_own_operations(log_errored: int) -> None:
    async with setting(4, 2, log_streams=2, log_errored=log_errored) as s:
        operations, bad = [], []
        for i in range(120):
            operations.append(s.write(i % 4, 8 * i))
            if i % 10 == 0:
                bad.append(s.write_bad())
        for operation in operations:
            await operation
        for operation in bad:
            with pytest.raises((RetryExceededError, WrFlushError)) as error:
                await operation
            assert f"DCT {s.bad.dctn:#x} key={s.bad.key:#x}" in str(error.value)
        for i in range(120):
            assert (s.right[i % 4][8 * i : 8 * i + 8] == s.left[8 * i : 8 * i + 8]).all()
        await eventually(lambda: all(lane.ready for lane in s.pool.lanes))
        statistics = s.pool.statistics()
        assert sum(lane.errors for lane in statistics) >= 1
        if log_errored == 0:
            assert s.pool.rebuilds >= 1
        else:
            assert sum(lane.resets for lane in statistics) + s.pool.rebuilds >= 1
        await s.write(0, 0)


async def test_nothing_is_posted_on_a_stream_until_it_is_reset() -> None:
    """F61 (ucx pull request 6646): requests that were posted before the reset was over failed again."""
    async with setting(1, 1, log_streams=2, log_errored=2, policy=only(2)) as s:
        with faults.verb("query_qp", delay=3600) as slow:
            with pytest.raises(RetryExceededError):
                await s.write_bad()
            lane = s.pool.lanes[1]
            assert not lane.ready
            operations = [s.write(0, 8 * i) for i in range(50)]
            await anyio.sleep(0.05)
            assert not lane.ready
            assert lane.posted == 1
            assert all(operation.lane is None for operation in operations)
            slow.stop()
            with anyio.fail_after(SOON):
                for operation in operations:
                    await operation
        assert (lane.resets, lane.posted, s.pool.rebuilds) == (1, 51, 0)
        assert (s.right[0][:400] == s.left[:400]).all()


async def test_others_of_the_stream_are_done_again() -> None:
    async with setting(2, 1, log_streams=1, log_errored=1, policy=only(1)) as s:
        with faults.hold(s.pool.dcis[0]):
            before = s.write(0, 0)
            failing = s.write_bad()
            behind = [s.write(1, 8 * i) for i in range(5)]
            read = s.pool.rdma_read(s.peers[1], s.local[1000:1008], s.remote[1][2000:2008])
            send = s.pool.send(s.peers[1], b"once only")
            flushed_too = s.write_bad()
        await before
        for operation in (failing, flushed_too):
            with pytest.raises((RetryExceededError, WrFlushError)):
                await operation
        for operation in (*behind, read):
            await operation
            assert operation.attempts == 2
        assert (s.right[1][:40] == s.left[:40]).all()
        with pytest.raises(WrFlushError):
            await send  # a message isn't sent twice


async def test_what_is_done_again_is_what_was_asked() -> None:
    """Though the caller has changed its buffer and its list meanwhile."""
    async with setting(2, 1, log_streams=1, policy=only(1)) as s:
        data, parts = bytearray(b"asked..."), [s.local[:8]]
        with faults.hold(s.pool.dcis[0]):
            bad = s.write_bad()
            writes = [
                s.pool.rdma_write(s.peers[1], data, s.remote[1]),
                s.pool.rdma_write(s.peers[1], [b"as", data], s.remote[1][8:]),
                s.pool.rdma_write(s.peers[1], parts, s.remote[1][32:]),
            ]
            data[:] = b"changed."
            parts[0] = s.local[100:108]
        with pytest.raises(RetryExceededError):
            await bad
        for write in writes:
            await write
            assert write.attempts == 2
        assert s.right[1][:18].tobytes() == b"asked...asasked..."
        assert (s.right[1][32:40] == s.left[:8]).all()


async def test_a_dci_past_its_limit_is_replaced() -> None:
    async with setting(2, 2, log_streams=1, log_errored=0, policy=least_loaded) as s:
        numbers = [dci.qp_num for dci in s.pool.dcis]
        for _ in range(3):
            with pytest.raises(RetryExceededError):
                await s.write_bad()
            with anyio.fail_after(SOON):
                for _ in range(10):
                    await s.write(1, 0)
        await eventually(lambda: all(lane.ready for lane in s.pool.lanes))
        assert s.pool.rebuilds == 3
        assert {dci.qp_num for dci in s.pool.dcis} != set(numbers)
        assert s.device.statistics()["queue_pairs"] == 2


async def test_a_pool_without_streams_replaces_its_dcis() -> None:
    async with opened() as device, targets(device, 2) as made:
        config = (QPConfig(timeout=8, retry_cnt=1), None, 0, 0)
        pool = await Pending(device.control, dci_pool._create(device, 2, config, least_loaded))
        good, bad = await pool.reach(made[0][0].info), await pool.reach(wrong_key(made[1][0].info))
        _, buffer, mr = made[0]
        async with device.reg_mr(bytearray(b"12345678")) as local:
            for i in range(6):
                failing = pool.rdma_write(bad, local, mr.remote())
                for n in range(20):
                    await pool.rdma_write(good, local, mr.remote()[8 * n : 8 * n + 8])
                with pytest.raises(RetryExceededError):
                    await failing
                await eventually(lambda i=i: pool.rebuilds == i + 1)
            assert buffer[:160].tobytes() == b"12345678" * 20
            await pool.close()


async def test_a_dci_that_cannot_be_replaced_now_is_later() -> None:
    async with setting(2, 1, log_streams=1, log_errored=0) as s:
        with faults.verb("create_qp", 12), faults.verb("query_qp", delay=0.02):
            with pytest.raises(RetryExceededError):
                await s.write_bad()
            for _ in range(3):
                waiting = s.write(0, 0)
                with pytest.raises(VerbsError, match="mlx5dv_create_qp"), anyio.fail_after(SOON):
                    await waiting
        with anyio.fail_after(SOON):
            await s.write(0, 0)
        assert s.pool.rebuilds == 1


async def test_a_dci_that_was_destroyed_through_pyverbs_is_replaced() -> None:
    async with setting(2, 1, log_streams=1) as s:
        with faults.hold(s.pool.dcis[0]):
            flying = [s.write(0, 0), s.write(1, 0)]
            s.pool.dcis[0].pyverbs.close()
            with pytest.raises(ClosedError, match="pyverbs"):
                s.write(0, 8)
        for operation in flying:
            with pytest.raises(ClosedError, match="pyverbs"):
                await operation
        with anyio.fail_after(SOON):
            await s.write(0, 16)
            await s.write(1, 16)
        assert s.pool.rebuilds == 1


async def test_a_dci_that_the_user_has_closed_is_replaced() -> None:
    async with setting(1, 2, log_streams=1) as s:
        await s.pool.dcis[0].close()
        with pytest.raises(ClosedError):
            s.write(0, 0)
        with anyio.fail_after(SOON):
            await s.write(0, 8)
            await eventually(lambda: s.pool.rebuilds == 1)
        assert all(lane.ready for lane in s.pool.lanes)


async def test_an_error_of_one_request_is_that_requests() -> None:
    async with setting(1, 1, log_streams=2, log_errored=2) as s:
        with pytest.raises(RemoteAccessError, match=rf"DCT {s.peers[0].dctn:#x}"):
            await s.pool.rdma_write(s.peers[0], s.local[:8], RemoteBuffer(s.remote[0].addr, 8, 0xDEAD00))
        await s.write(0, 0)
        with reported() as reports:
            s.pool.rdma_write(s.peers[0], s.local[:8], RemoteBuffer(s.remote[0].addr, 8, 0xDEAD00))
            await eventually(lambda: s.pool.statistics()[0].errors + s.pool.statistics()[1].errors >= 2)
            await settle()
        assert [type(found) for found in reports.found] == [RemoteAccessError]
        with reported() as reports:
            seen = [s.pool.rdma_write(s.peers[0], s.local[:8], RemoteBuffer(s.remote[0].addr, 8, 0xDEAD00))]
            await eventually(lambda: seen[0].done)
            assert isinstance(seen[0].exception(), RemoteAccessError)
            seen.clear()
            await settle()
        assert reports.found == []


# ------------------------------------------------------------------ memory


async def test_memory_is_kept_while_an_operation_waits() -> None:
    async with setting(2, 1, log_streams=0) as s:
        memory = bytearray(b"12345678")
        mr = await s.device.reg_mr(memory)
        with faults.hold(s.pool.dcis[0]):
            first = s.write(0, 0)
            waits = s.pool.rdma_write(s.peers[1], mr, s.remote[1])
            assert waits.lane is None
            closing = mr.close()
            await settle()
            assert not closing.done
            # What is no registered memory is the caller's again.
            buffer = bytearray(b"before")
            inline = s.pool.rdma_write(s.peers[1], buffer, s.remote[1][100:])
            mixed = s.pool.rdma_write(s.peers[1], [buffer, b"!"], s.remote[1][200:])
            buffer[:] = b"after!"
        await first
        with pytest.raises(ClosedError):
            await waits  # its region was closed before its turn came
        with anyio.fail_after(SOON):
            await closing
            await inline
            await mixed
        assert s.right[1][100:106].tobytes() == b"before"
        assert s.right[1][200:207].tobytes() == b"before!"


# ------------------------------------------------------------------ ends


async def test_closing_flushes_what_is_in_flight_and_ends_what_waits() -> None:
    async with setting(2, 1, log_streams=0, config=QPConfig(max_send_wr=4)) as s:
        with reported() as reports:
            with faults.hold(s.pool.dcis[0]):
                flying = [s.write(0, 0) for _ in range(4)]
                waiting = [s.write(i % 2, 0) for i in range(10)]
                unseen = s.write(1, 0)
                with anyio.fail_after(SOON):
                    closing = s.pool.close()
                    assert s.pool.close() is closing
                    await closing
            for operation in flying:
                with pytest.raises(WrFlushError):
                    await operation
            for operation in waiting:
                with pytest.raises(ClosedError, match="before this was posted"):
                    await operation
            assert unseen.done
            del unseen
            await settle()
        assert reports.found == []
        assert s.pool.closed
        with pytest.raises(ClosedError):
            s.write(0, 0)
        with pytest.raises(ClosedError):
            s.pool.reach(s.targets[0].info)


async def test_closing_in_a_callback_of_what_closing_ends() -> None:
    async with setting(1, 1, log_streams=0, config=QPConfig(max_send_wr=4)) as s:
        closings: list[Pending[None]] = []
        with faults.hold(s.pool.dcis[0]):
            operations = [s.write(0, 0) for _ in range(8)]
            operations[6].on_finish(lambda: closings.append(s.pool.close()))
            closings.append(s.pool.close())
            assert closings == [s.pool.close()] * 2
            with anyio.fail_after(SOON):
                await closings[0]
        assert [type(operation.exception()) for operation in operations] == [WrFlushError] * 4 + [ClosedError] * 4


@pytest.mark.parametrize("during", ["query_qp", "create_qp", "destroy_qp"])
async def test_closing_during_a_recovery(during: str) -> None:
    async with setting(2, 1, log_streams=1, log_errored=0) as s:
        with faults.verb(during, delay=0.1):
            with pytest.raises(RetryExceededError):
                await s.write_bad()
            waiting = s.write(0, 0)
            await anyio.sleep(0.02)
            with anyio.fail_after(SOON):
                await s.pool.close()
            # On a busy machine its turn may have come before.
            assert isinstance(waiting.exception(), ClosedError | WrFlushError | None)
        assert s.device.statistics()["queue_pairs"] == 0


async def test_a_device_closes_its_pools() -> None:
    async with opened() as device:
        srq = await device.create_srq(4)
        target = await mlx5.create_dc_target(device, srq)
        mr = await device.reg_mr(bytearray(64))
        pool = await mlx5.create_dci_pool(device, 1, log_streams=0, config=QPConfig(max_send_wr=2))
        peer = await pool.reach(target.info)
        with faults.hold(pool.dcis[0]):
            operations = [pool.rdma_write(peer, mr[:8], mr.remote()) for _ in range(6)]
            with anyio.fail_after(SOON):
                await device.close()
        for operation in operations[:2]:
            with pytest.raises(WrFlushError):
                await operation
        for operation in operations[2:]:
            with pytest.raises(ClosedError):
                await operation


async def test_a_forgotten_pool_warns_and_is_closed() -> None:
    async with opened() as device:
        held = [await mlx5.create_dci_pool(device, 2)]
        with pytest.warns(ResourceWarning, match="unclosed <DCIPool"):
            held.clear()
        await eventually(lambda: not device.statistics()["queue_pairs"])


async def test_an_operation_that_is_over_keeps_nothing() -> None:
    async with opened() as device, targets(device, 1) as made:
        pool = await mlx5.create_dci_pool(device, 1)
        peer = await pool.reach(made[0][0].info)
        memory = bytearray(8)
        mr = await device.reg_mr(memory)
        operation = pool.rdma_write(peer, mr, made[0][2].remote())
        await operation
        gone = [weakref.ref(pool), weakref.ref(mr)]
        await pool.close()
        await mr.close()
        del pool, mr
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        assert repr(operation).startswith("<PoolOperation rdma_write")


async def test_cancelling_an_await_leaves_the_operation() -> None:
    async with setting(2, 1, log_streams=0) as s:
        with faults.hold(s.pool.dcis[0]):
            flying, waiting = s.write(0, 0), s.write(1, 8)
            for operation in (flying, waiting):
                with anyio.move_on_after(0.01) as scope:
                    await operation
                assert scope.cancelled_caught
                with pytest.raises(RuntimeError, match="under way"):
                    operation.exception()
        with anyio.fail_after(SOON):
            assert (await waiting).status == (await flying).status == 0
        assert (s.right[1][8:16] == s.left[8:16]).all()


async def test_several_tasks_await_one_operation() -> None:
    async with setting(1, 1, log_streams=0) as s:
        got = []
        with faults.hold(s.pool.dcis[0]):
            operation = s.write(0, 0)
            async with anyio.create_task_group() as tasks:

                async def wait() -> None:
                    got.append(await operation)

                for _ in range(5):
                    tasks.start_soon(wait)
                await settle()
                faults.reset()
        assert len(set(map(id, got))) == 1


# ------------------------------------------------------------------ many


async def test_64_targets_16_streams_1000_writes_each(request: pytest.FixtureRequest) -> None:
    """Every write lands, once. On the first loop; fewer on the others."""
    per_target = 1000 if "[asyncio" in request.node.name else 40
    n = 64
    async with setting(n, 4, 8 * per_target, log_streams=4, log_errored=4) as s:
        assert len(s.pool.lanes) == 64
        operations: list[PoolOperation] = []
        with anyio.fail_after(250):
            for w in range(per_target):
                at = 8 * w
                here = s.local[at : at + 8]
                operations.extend(
                    s.pool.rdma_write(peer, here, remote[at : at + 8])
                    for peer, remote in zip(s.peers, s.remote, strict=True)
                )
                if len(operations) >= 2048:
                    for operation in operations:
                        await operation
                    operations.clear()
            for operation in operations:
                await operation
        assert all((right == s.left).all() for right in s.right)
        statistics = s.pool.statistics()
        assert sum(lane.posted for lane in statistics) == n * per_target
        assert sum(lane.bytes for lane in statistics) == 8 * n * per_target
        assert sum(lane.errors for lane in statistics) == 0
        assert all(lane.posted for lane in statistics)


async def test_a_poisoned_target_among_64() -> None:
    per_target = 20
    async with setting(64, 2, 8 * per_target, log_streams=4, log_errored=4) as s:
        good, bad = [], []
        with anyio.fail_after(250):
            for w in range(per_target):
                good.extend(s.write(i, 8 * w) for i in range(64))
                if w % 4 == 0:
                    bad.append(s.write_bad())
            for operation in good:
                await operation
            for operation in bad:
                with pytest.raises((RetryExceededError, WrFlushError)):
                    await operation
        assert all((right == s.left).all() for right in s.right)
        assert len(bad) == 5

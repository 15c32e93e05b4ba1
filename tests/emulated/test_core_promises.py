"""The promises that hold at any size: nothing lost, nothing twice, nothing leaked, nothing that hangs."""

# ruff: noqa: SIM117

import gc
import mmap
import random
import sys
from typing import Any

import anyio
import pytest
from emulated.core import (
    DEVICE,
    ON_EMULATED,
    ON_RXE,
    connected,
    eventually,
    object_counts,
    open_pair,
    reported,
    rss_kib,
)
from pyverbs.qp import QPAttr

import aiordma
from aiordma import ClosedError, Completion, WrFlushError

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]

# A million on one loop; fewer on the others, to keep the time down, and on Soft-RoCE, whose every packet is the
# processor's work.
WRITES = {"uvloop": 1_000_000, "asyncio": 100_000, "trio": 60_000}
if ON_RXE:
    WRITES = dict.fromkeys(WRITES, 10_000)


def _loop_name(anyio_backend: Any) -> str:
    name, options = anyio_backend
    return "uvloop" if options.get("use_uvloop") else name


async def test_a_million_awaited_writes_lose_and_duplicate_no_completion(anyio_backend: Any) -> None:
    total = WRITES[_loop_name(anyio_backend)] // (10 if sys.flags.dev_mode else 1)
    slots = 1024
    rng = random.Random(1)
    async with aiordma.open_device(DEVICE) as device, connected(device, 8 * slots, max_send_wr=64) as p:
        left = memoryview(p.left).cast("Q")
        right = memoryview(p.right).cast("Q")
        finished = 0
        number = 0
        last = -1

        def finish() -> None:
            nonlocal finished
            finished += 1

        polled_before = sum(cq["polled"] for cq in device.statistics()["completion_queues"]["send"])
        sent_before = p.a.statistics()["send"]["posted"]
        parts = [(p.local[8 * i : 8 * i + 8], p.remote[8 * i : 8 * i + 8]) for i in range(slots)]
        while number < total:
            # Polling, spinning for long, and sleeping until the event, in turns and of any length.
            device.spin_us = rng.choice([0, 0, 1, 20, 200])
            for _ in range(rng.choice([1, 3, 30])):
                window = min(rng.choice([1, 2, 63, 64, 65, 300]), total - number)
                ops = []
                for _ in range(window):
                    slot = number % slots
                    left[slot] = number
                    op = p.a.rdma_write(*parts[slot])
                    if number % 97 == 0:
                        op.on_finish(finish)
                        finished -= 1
                    ops.append(op)
                    number += 1
                for op in ops:
                    await op
                    assert op.wr_id > last
                    last = op.wr_id
                assert finished == 0
                assert right[slot] == number - 1
                if number >= total:
                    break
        assert right.tolist() == left.tolist()
        statistics = p.a.statistics()["send"]
        assert statistics["posted"] - sent_before == total
        assert (statistics["in_flight"], statistics["waiting"], statistics["failed"]) == (0, 0, 0)
        cqs = device.statistics()["completion_queues"]["send"]
        assert sum(cq["polled"] for cq in cqs) - polled_before == total
        assert sum(cq["unknown"] for cq in cqs) == 0
        assert sum(cq["outstanding"] for cq in cqs) == 0
        assert sum(cq["events"] for cq in cqs) > 0
        # Nothing of Soft-RoCE's in a VM ends as soon as that.
        assert sum(cq["spin_hits"] for cq in cqs) > 0 or ON_RXE
        left.release()
        right.release()


async def test_256_tasks_on_a_queue_of_16_all_finish_in_the_order_they_came() -> None:
    async with open_pair(max_send_wr=16, max_recv_wr=4096) as p:
        rounds, tasks = 8, 256
        receives: list[Completion] = []
        posted: list[int] = []
        ended: list[int] = []

        async def work(number: int) -> None:
            for round_ in range(rounds):
                mark = number * rounds + round_
                posted.append(mark)
                op = p.a.send(None, imm=mark)
                op.on_finish(lambda mark=mark: ended.append(mark))
                await op

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(tasks):
                    group.start_soon(work, number)
                # All of them have posted, and wait.
                while len(posted) < tasks:
                    await anyio.lowlevel.checkpoint()
                assert p.a.statistics()["send"]["waiting"] == tasks - 16
                receives += [p.b.recv(None) for _ in range(rounds * tasks)]
            arrived = [(await receive).imm_data for receive in receives]
        assert len(posted) == rounds * tasks
        assert ended == posted
        assert arrived == posted
        assert p.a.statistics()["send"]["waited"] >= tasks - 16


async def test_cancelling_10000_awaits_leaks_nothing_and_corrupts_no_buffer() -> None:
    # Python's development mode makes tasks expensive.
    rounds, size = 20 if sys.flags.dev_mode else 100, 100
    async with open_pair(size=64 * size, max_send_wr=32) as p:
        regions_before = object_counts()["mr"]

        async def wait(op: Completion) -> None:
            await op

        cancelled = 0
        for round_ in range(rounds):
            data = bytes((round_ + i) & 0xFF for i in range(64 * size))
            p.local.view()[:] = data
            blocker = p.block()
            ops = [p.a.rdma_write(p.local[64 * i :][:64], p.remote[64 * i :], inline=False) for i in range(size)]
            async with anyio.create_task_group() as group:
                for op in ops:
                    group.start_soon(wait, op)
                await anyio.lowlevel.checkpoint()
                if round_ % 2:
                    # Half of the rounds: cancelled in the very turns in which they complete.
                    p.unblock()
                    await blocker
                group.cancel_scope.cancel()
            cancelled += sum(not op.done for op in ops) if round_ % 2 == 0 else size
            if not round_ % 2:
                assert not any(op.done for op in ops)
                p.unblock()
            with anyio.fail_after(30):
                await p.a.wait_idle()
            assert all(op.status == 0 for op in ops)
            assert p.right == data
            assert p.local.region.inflight == 0
            del ops, op, blocker
            if round_ == rounds // 3:
                gc.collect()
                rss_before = rss_kib()
        assert cancelled == rounds * size
        gc.collect()
        assert rss_kib() - rss_before < 4096
        assert object_counts()["mr"] == regions_before
        assert sum(type(thing) is Completion for thing in gc.get_objects()) == 0
        await p.check()


async def test_completions_are_freed_when_they_are_over() -> None:
    async with open_pair() as p:
        blocks = 0
        for round_ in range(6):
            for _ in range(1000):
                await p.a.rdma_write(p.local[:8], p.remote)
            op = None
            for _ in range(1000):
                op = p.a.rdma_write(p.local[:8], p.remote, signaled=False)
            await p.a.wait_idle()
            del op
            gc.collect()
            if round_ == 1:
                blocks = sys.getallocatedblocks()
        assert sys.getallocatedblocks() - blocks < 500


async def test_a_message_of_a_gibibyte_or_as_long_as_the_port_carries_arrives_whole() -> None:
    async with aiordma.open_device(DEVICE) as device:
        size = min(device.max_message, 1 << 30)
    assert size == 1 << 30 or not ON_EMULATED
    source, sink = mmap.mmap(-1, size), mmap.mmap(-1, size)
    marks = [0, 1, 4095, 4096, size // 2 - 1, size // 2, size - 4097, size - 1]
    try:
        for mark in marks:
            source[mark] = mark % 251 + 1
        async with aiordma.open_device(DEVICE) as device:
            async with device.reg_mr(source) as mr, device.reg_mr(sink) as target, connected(device) as p:
                with anyio.fail_after(250):
                    done = await p.a.rdma_write(mr, target.remote())
                assert done.status == 0
                assert [sink[mark] for mark in marks] == [mark % 251 + 1 for mark in marks]
                assert [sink[mark + 2] for mark in marks[:-1]] == [source[mark + 2] for mark in marks[:-1]]
    finally:
        source.close()
        sink.close()


async def test_longer_than_the_port_carries_is_refused() -> None:
    async with aiordma.open_device(DEVICE) as device:
        if device.max_message >= device.attributes.max_mr_size:
            pytest.skip(f"{device.name} registers no memory that's longer than a message")
        file = mmap.mmap(-1, device.max_message + 4096)
        async with device.reg_mr(file) as mr, connected(device) as p:
            with pytest.raises(aiordma.UsageError, match="split it"):
                p.a.rdma_write(mr, mr.remote())
            await p.check()
        file.close()


# ---------------------------------------------------------------- nothing hangs


async def _end(op: Completion, ends: list[type | None]) -> None:
    try:
        await op
    except (aiordma.CompletionError, ClosedError) as e:
        ends.append(type(e))
    else:
        ends.append(None)


@pytest.mark.parametrize("how", ["access error", "peer gone", "qp closed", "device closed", "set to ERR"])
async def test_everybody_waiting_gets_an_answer_when_the_qp_fails(how: str) -> None:
    with anyio.fail_after(60), reported():
        async with open_pair(max_send_wr=16, timeout=8, retry_cnt=1) as p:
            ends: list[type | None] = []
            idle = []

            async def wait_idle() -> None:
                await p.a.wait_idle()
                idle.append(True)

            # On Soft-RoCE no more than have slots, before anything can fail: what is posted later isn't flushed there
            # (docs/soft-roce.md).
            ops = [p.a.recv(p.local) for _ in range(128 if ON_RXE else 200)]
            p.block()
            if how == "access error":
                p.a.rdma_write(p.local[:8], aiordma.RemoteBuffer(p.remote.addr, 8, 0x1234500))
            ops += [p.a.rdma_write(p.local[:8], p.remote, signaled=i % 5 == 0) for i in range(200)]
            ops += [p.a.rdma_write_many([(p.local[:8], p.remote)] * 40)]
            async with anyio.create_task_group() as group:
                for op in ops:
                    group.start_soon(_end, op, ends)
                group.start_soon(wait_idle)
                group.start_soon(wait_idle)
                await anyio.sleep(0.01)
                if how == "access error":
                    p.unblock()
                elif how == "peer gone":
                    await p.b.close()
                elif how == "qp closed":
                    await p.a.close()
                elif how == "device closed":
                    await p.device.close()
                else:
                    p.a.pyverbs.modify(QPAttr(qp_state=6), 1)
            assert len(ends) == len(ops)
            assert None not in ends
            assert idle == [True, True]
            gc.collect()


async def test_a_receiver_learns_that_the_sender_failed() -> None:
    async with open_pair() as p:
        receives = [p.b.recv(p.peer) for _ in range(10)]
        ends: list[type | None] = []
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for receive in receives:
                    group.start_soon(_end, receive, ends)
                with pytest.raises(aiordma.RemoteAccessError):
                    await p.a.rdma_write(p.local[:8], aiordma.RemoteBuffer(p.remote.addr, 8, 0x1234500))
        assert ends == [WrFlushError] * 10


async def test_two_qps_of_one_cq_share_it_without_starving_each_other() -> None:
    async with open_pair(max_send_wr=4) as p, connected(p.device, max_send_wr=4) as q:
        done = {"p": 0, "q": 0}

        async def work(name: str, pair: Any, count: int) -> None:
            for _ in range(count):
                ops = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(9)]
                for op in ops:
                    await op
                done[name] += 1

        async with anyio.create_task_group() as group:
            group.start_soon(work, "p", p, 200)
            group.start_soon(work, "q", q, 200)
            await eventually(lambda: min(done.values()) > 0)
        assert done == {"p": 200, "q": 200}

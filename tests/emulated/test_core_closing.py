"""Closing: in any order, twice, cancelled, forgotten, with work in flight. Everybody who waits gets an answer."""

# ruff: noqa: PT012, PT031

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import anyio
import pytest
from emulated.core import DEVICE, connect, connected, eventually, object_counts, open_pair, settle

import aiordma
from aiordma import ClosedError, Completion, WrFlushError
from aiordma._workqueue import WorkQueue

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]


# librdmacm keeps a context of its own for the rest of a process that has connected with it.
_before = 0


def _objects() -> int:
    """Objects that came since the test began."""
    return sum(object_counts().values()) - _before


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    global _before
    before = object_counts()
    _before = sum(before.values())
    yield
    if object_counts() != before:
        gc.collect()
    assert object_counts() == before


async def _outcome(op: Completion) -> type[BaseException] | None:
    try:
        with anyio.fail_after(20):
            await op
    except aiordma.RdmaError as e:
        return type(e)
    return None


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("order", list(permutations(["a", "b", "local", "peer"])), ids="-".join)
async def test_objects_close_in_any_order_with_work_in_flight(order: tuple[str, ...]) -> None:
    async with open_pair() as p:
        ops = [p.block(), *(p.a.rdma_write(p.local[:8], p.remote) for _ in range(3)), p.b.recv(p.peer)]
        ops[0].on_finish(lambda: None)
        closings = [getattr(p, name).close() for name in order]
        with anyio.fail_after(20):
            for closing in reversed(closings):
                await closing
        assert all(op.done for op in ops)
        assert p.device.statistics()["memory_regions"] == 0
        assert p.device.statistics()["queue_pairs"] == 0
        for op in ops:
            op.exception()


async def test_a_device_closes_everything_it_owns() -> None:
    device = await aiordma.open_device(DEVICE)
    mrs = [await device.reg_mr(bytearray(100)) for _ in range(5)]
    srq = await device.create_srq()
    qps = [await device.create_qp(srq=srq if i % 2 else None) for i in range(6)]
    await connect(qps[0], qps[1])
    receive = srq.recv(mrs[0])
    op = qps[1].send(mrs[1])
    await device.close()
    assert all(thing.closed for thing in [*mrs, srq, *qps, device])
    assert await _outcome(receive) in (ClosedError, WrFlushError)
    assert await _outcome(op) is WrFlushError
    assert _objects() == 0
    assert "closed" in repr(device)


async def test_closing_twice_is_closing_once() -> None:
    async with aiordma.open_device(DEVICE) as device:
        mr = await device.reg_mr(bytearray(8))
        srq = await device.create_srq()
        qp = await device.create_qp(srq=srq)
        for thing in (qp, srq, mr, device):
            first = thing.close()
            assert thing.close() is first
            await first
            await first
            await thing.close()
            assert thing.closed


async def test_async_with_and_close_inside_go_together() -> None:
    async with aiordma.open_device(DEVICE) as device:
        async with device.reg_mr(bytearray(8)) as mr, device.create_qp() as qp:
            await qp.close()
            await mr.close()
        await device.close()


async def test_everything_refuses_to_work_once_the_device_is_closed() -> None:
    async with aiordma.open_device(DEVICE) as device:
        mr = await device.reg_mr(bytearray(8))
    for call in (lambda: device.reg_mr(bytearray(8)), device.create_qp, device.create_srq, device.events):
        with pytest.raises(ClosedError):
            call()
    assert mr.closed
    with pytest.raises(ClosedError):
        mr.remote()


async def test_an_srq_with_qps_is_not_closed_before_them() -> None:
    async with aiordma.open_device(DEVICE) as device:
        srq = await device.create_srq()
        qp = await device.create_qp(srq=srq)
        with pytest.raises(aiordma.UsageError, match="close them first"):
            srq.close()
        closing_qp = qp.close()
        await srq.close()
        assert closing_qp.done


# ---------------------------------------------------------------- while things are under way


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_closing_a_device_while_things_are_made_leaves_nothing(turns: int) -> None:
    for _ in range(5):
        device = await aiordma.open_device(DEVICE)
        pending: list[Any] = [device.reg_mr(bytearray(1 << 16)) for _ in range(3)]
        pending += [device.create_qp() for _ in range(3)]
        pending += [device.create_srq()]
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        closing = device.close()
        things = [await one for one in pending]
        await closing
        assert all(thing.closed for thing in things)
        assert _objects() == 0


async def test_closing_a_qp_while_it_connects() -> None:
    async with aiordma.open_device(DEVICE) as device:
        for turns in (0, 1, 2, 3):
            a, b = await device.create_qp(), await device.create_qp()
            connecting = a.connect(b.info)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            closing = a.close()
            try:
                await connecting
            except ClosedError:
                pass
            await closing
            await b.close()
        assert device.statistics()["queue_pairs"] == 0


@pytest.mark.parametrize("who", ["qp", "device"])
async def test_closing_with_100_requests_in_flight_flushes_them_all(who: str) -> None:
    async with open_pair(max_send_wr=32) as p:
        ops = [p.block()]
        for i in range(99):
            ops.append(p.a.rdma_write(p.local[:8], p.remote, signaled=i % 4 == 0))
        receives = [p.a.recv(p.local) for _ in range(20)]
        outcomes: list[type[BaseException] | None] = []

        async def wait(op: Completion) -> None:
            outcomes.append(await _outcome(op))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for op in ops:
                    group.start_soon(wait, op)
                await (p.a if who == "qp" else p.device).close()
        assert len(outcomes) == 100
        assert set(outcomes) == {WrFlushError}
        if who == "device":
            assert {await _outcome(receive) for receive in receives} == {WrFlushError}
            assert p.local.region.inflight == 0


async def test_closing_with_100_blocked_requests_flushes_every_one() -> None:
    async with open_pair(max_send_wr=32) as p:
        ops = [p.block(), *(p.a.rdma_write(p.local[:8], p.remote) for _ in range(99))]
        with anyio.fail_after(20):
            await p.a.close()
        assert [await _outcome(op) for op in ops] == [WrFlushError] * 100
        assert p.local.region.inflight == 0
        assert p.device.statistics()["queue_pairs"] == (p.other is p.device)
        with pytest.raises(WrFlushError, match="closed on this side"):
            await ops[0]


async def test_a_region_closes_as_soon_as_its_last_work_request_is_over() -> None:
    async with open_pair() as p:
        mr = await p.device.reg_mr(bytearray(64))
        p.block()
        p.a.rdma_write(mr, p.remote, inline=False)
        p.a.rdma_write([mr[:8], mr[8:16]], p.remote, inline=False)
        assert mr.region.inflight == 3
        closing = mr.close()
        with anyio.move_on_after(0.02):
            await closing
        assert not closing.done
        p.unblock()
        with anyio.fail_after(20):
            await closing
        assert mr.region.inflight == 0


async def test_tasks_waiting_for_a_peer_that_closes_get_an_error() -> None:
    async with open_pair(timeout=8, retry_cnt=1) as p:
        op = p.block()
        await p.b.close()
        assert await _outcome(op) in (aiordma.RetryExceededError, WrFlushError)


async def test_an_error_is_not_held_up_by_a_receive_that_nobody_sends_to() -> None:
    with anyio.fail_after(20), pytest.raises(ZeroDivisionError):
        async with open_pair() as p, p.other.reg_mr(bytearray(64)) as mr:
            receive = p.b.recv(mr)
            raise ZeroDivisionError
    assert await _outcome(receive) is WrFlushError
    assert mr.closed


async def test_waiting_for_a_region_in_use_can_be_cancelled_and_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma.memory.SLOW_CLOSE_SECONDS", 0.01)
    async with open_pair() as p:
        scope = anyio.CancelScope()
        regions = []

        async def leave_in_use() -> None:
            with scope:
                async with p.other.reg_mr(bytearray(64)) as mr:
                    regions.append(mr)
                    p.b.recv(mr)

        async with anyio.create_task_group() as group:
            group.start_soon(leave_in_use)
            await eventually(lambda: caplog.records)
            scope.cancel()
        assert scope.cancelled_caught
        assert regions[0].closed
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "1 work requests" in caplog.text
        async with p.device.reg_mr(bytearray(64)) as mr:
            # What does come to its end is waited for.
            op = p.a.rdma_write(mr, p.remote)
        assert op.done
        caplog.clear()
    assert caplog.text == ""


# ---------------------------------------------------------------- cancellation


async def test_leaving_async_with_cancelled_closes_all_the_same() -> None:
    with anyio.CancelScope() as scope:
        async with open_pair() as p:
            p.block()
            p.a.rdma_write(p.local[:8], p.remote)
            scope.cancel()
            await anyio.sleep(10)
    assert p.device.closed
    assert p.a.closed
    assert p.local.closed
    assert _objects() == 0


async def test_leaving_async_with_cancelled_again_and_again_closes_all_the_same() -> None:
    async def use() -> None:
        async with open_pair() as p:
            p.block()
            started.set()
            await anyio.sleep(10)

    for _ in range(5):
        started = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(use)
            await started.wait()
            group.cancel_scope.cancel()
        assert _objects() == 0


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})])
async def test_a_task_cancelled_many_times_while_it_closes_ends_cancelled_with_all_closed() -> None:
    async def use() -> None:
        async with open_pair() as p:
            p.block()
            started.set()
            await asyncio.sleep(10)

    started = asyncio.Event()
    task = asyncio.ensure_future(use())
    await started.wait()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert _objects() == 0


@pytest.mark.parametrize("what", ["reg_mr", "create_qp", "create_srq", "open_device"])
async def test_making_something_and_being_cancelled_at_any_moment_leaves_nothing(what: str) -> None:
    async with aiordma.open_device(DEVICE) as device:
        before = object_counts()

        def make() -> Any:
            if what == "open_device":
                return aiordma.open_device(DEVICE)
            return getattr(device, what)(*([bytearray(100)] if what == "reg_mr" else []))

        for delay in (0, 0.0001, 0.0003, 0.001, 0.002, 0.005) * 5:
            with anyio.CancelScope(deadline=anyio.current_time() + delay):
                async with make():
                    await anyio.sleep(10)
            with anyio.CancelScope(deadline=anyio.current_time() + delay):
                thing = await make()
                with anyio.CancelScope(shield=True):
                    await thing.close()

        def kinds(counts: dict[str, int]) -> dict[str, int]:
            # CQs stay with their device for the next QP.
            return {kind: n for kind, n in counts.items() if kind not in ("cq", "channel", "uar")}

        await eventually(lambda: kinds(object_counts()) == kinds(before))


async def test_what_is_being_made_is_closed_when_its_only_await_is_cancelled_and_kept_when_another_goes_on() -> None:
    async with aiordma.open_device(DEVICE) as device:
        for delay in (0, 0, 0.0002, 0.001, 0.002):
            making = device.reg_mr(bytearray(100))
            delivered = False
            with anyio.move_on_after(delay):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await making
                    # It was there before the cancellation came.
                    delivered = True
                await anyio.sleep(1)
            mr = await making
            assert mr.closed is not delivered
            await mr.close()
            making, got = device.reg_mr(bytearray(100)), []

            async def other(making: Any = making, got: list[Any] = got) -> None:
                got.append(await making)

            async with anyio.create_task_group() as group:
                group.start_soon(other)
                await anyio.lowlevel.checkpoint()
                with anyio.move_on_after(delay):
                    await making
            assert not got[0].closed
            await got[0].close()
        assert device.statistics()["memory_regions"] == 0


async def test_an_error_inside_async_with_comes_out_and_all_is_closed() -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_pair() as p:
            p.block()
            raise ZeroDivisionError
    assert _objects() == 0


# ---------------------------------------------------------------- forgotten


@pytest.mark.parametrize("what", ["MemoryRegion", "QueuePair", "SharedReceiveQueue"])
async def test_a_forgotten_object_warns_and_is_cleaned_up(what: str) -> None:
    async with aiordma.open_device(DEVICE) as device:
        make = {
            "MemoryRegion": lambda: device.reg_mr(bytearray(100)),
            "QueuePair": device.create_qp,
            "SharedReceiveQueue": device.create_srq,
        }[what]
        kind = {"MemoryRegion": "mr", "QueuePair": "qp", "SharedReceiveQueue": "srq"}[what]
        before = object_counts()[kind]
        thing: Any = await make()
        assert object_counts()[kind] == before + 1
        with pytest.warns(ResourceWarning, match=f"unclosed <{what}"):
            del thing
            gc.collect()
        await eventually(lambda: object_counts()[kind] == before)
        # In a cycle too, which the garbage collector finds.
        cycle: list[Any] = [await make()]
        cycle.append(cycle)
        with pytest.warns(ResourceWarning, match=f"unclosed <{what}"):
            del cycle
            gc.collect()
        await eventually(lambda: object_counts()[kind] == before)


async def test_a_forgotten_qp_in_a_cycle_is_closed_before_its_device() -> None:
    async with open_pair() as p:
        p.block()
        cycle: list[Any] = [await p.device.create_qp()]
        cycle.append(cycle)
        with pytest.warns(ResourceWarning, match="unclosed <QueuePair"):
            del cycle
            gc.collect()
    assert _objects() == 0


async def test_a_device_forgotten_on_a_running_loop_warns_and_is_cleaned_up() -> None:
    device = await aiordma.open_device(DEVICE)
    qp = await device.create_qp()
    await qp.close()
    del qp
    await settle()
    assert _objects() > 0
    with pytest.warns(ResourceWarning, match="unclosed <Device"):
        del device
        gc.collect()
    # A worker thread may have let go of it last; then its loop closes it in a later turn.
    await eventually(lambda: _objects() == 0)


async def test_an_object_collected_in_another_thread_is_closed_on_its_loop() -> None:
    async with aiordma.open_device(DEVICE) as device:
        things: list[Any] = [[await device.create_qp(), await device.create_srq(), await device.reg_mr(bytearray(9))]]

        def drop() -> None:
            things.pop()

        with pytest.warns(ResourceWarning) as found:
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
        assert len(found) == 3
        await eventually(
            lambda: (
                device.statistics().items()
                >= {
                    "memory_regions": 0,
                    "queue_pairs": 0,
                    "shared_receive_queues": 0,
                }.items()
            )
        )
        await eventually(lambda: object_counts()["qp"] == 0)


async def test_a_device_collected_in_another_thread_is_closed_on_its_loop() -> None:
    devices = [await aiordma.open_device(DEVICE)]
    with pytest.warns(ResourceWarning, match="unclosed <Device"):
        thread = threading.Thread(target=devices.pop)
        thread.start()
        thread.join()
        gc.collect()
    await eventually(lambda: _objects() == 0)


# ---------------------------------------------------------------- many


async def test_closing_many_qps_at_once_is_no_slower_than_their_flushes() -> None:
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(64)) as mr:
        qps = [await device.create_qp(max_send_wr=4, max_recv_wr=4) for _ in range(60)]
        receives = [qp.recv(mr) for qp in qps]
        before = threading.active_count()
        closings = [qp.close() for qp in qps]
        assert threading.active_count() - before < 20
        for closing in closings:
            await closing
        assert {await _outcome(receive) for receive in receives} == {WrFlushError}


async def test_opening_and_closing_over_and_over_leaks_nothing() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(15):
        async with aiordma.open_device(DEVICE) as device:
            for _ in range(rng.randrange(3)):
                async with connected(device, max_send_wr=rng.randrange(1, 50)) as p:
                    ops = [p.a.rdma_write(p.local[:8], p.remote) for _ in range(rng.randrange(60))]
                    for op in rng.sample(ops, len(ops) // 2):
                        await op
        assert _objects() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("count", [1, 3, 40])
async def test_closing_a_region_resolves_unsignalled_requests_that_nothing_signalled_follows(count: int) -> None:
    async with open_pair(max_send_wr=16) as p:
        mr = await p.device.reg_mr(bytearray(64))
        ops = [p.a.rdma_write(mr, p.remote[:64], signaled=False, inline=False) for _ in range(count)]
        with anyio.fail_after(20):
            await mr.close()
        assert all(op.done and op.exception() is None for op in ops)


@pytest.mark.parametrize(("what", "which"), [("qp", 1), ("qp", 2), ("srq", 1)])
async def test_what_has_queues_that_can_not_be_made_leaves_nothing(
    what: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for 65,536 queues on a device. The verbs QP or SRQ is made by then."""
    made = 0

    def limited(*arguments: Any) -> WorkQueue:
        nonlocal made
        made += 1
        if made == which:
            raise ClosedError("more than 65,536 work queues on one device")
        return WorkQueue(*arguments)

    async with aiordma.open_device() as device, device.create_qp():
        before = object_counts(), [queue.reserved for queue in device.engine.completion_queues]
        monkeypatch.setattr(f"aiordma.{what}.WorkQueue", limited)
        with pytest.raises(ClosedError, match="65,536"):
            await (device.create_qp() if what == "qp" else device.create_srq())
        assert (object_counts(), [queue.reserved for queue in device.engine.completion_queues]) == before


IN_SUBMIT = """
    import asyncio, concurrent.futures.thread, faulthandler, gc, os, warnings
    import aiordma

    class WorkItem(concurrent.futures.thread._WorkItem):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            gc.collect()  # the executor's lock is held

    async def main():
        async with aiordma.open_device(os.environ["AIORDMA_DEVICE"]) as device:
            a, b = await device.create_qp(), await device.create_qp()
            cycle = [b]
            cycle.append(cycle)
            gc.disable()
            del b, cycle
            concurrent.futures.thread._WorkItem = WorkItem
            await a.query_state()
            while len(device.objects()) > 1:
                await asyncio.sleep(0.001)
            print("CLOSED")

    warnings.simplefilter("ignore", ResourceWarning)
    faulthandler.dump_traceback_later(60, exit=True)
    asyncio.run(main())
"""


def test_a_qp_collected_while_a_worker_thread_is_given_something_to_do_does_not_wait_for_itself(
    run_python: Callable[..., Any],
) -> None:
    assert run_python(IN_SUBMIT).stdout == "CLOSED\n"

"""What an operation promises to whoever awaits it, or doesn't."""

# ruff: noqa: PT012, PT031

import asyncio
import gc
import sys
import weakref

import anyio
import pytest
import trio
from emulated.core import DEVICE, ON_RXE, Pair, connected, eventually, open_pair, reported, settle

import aiordma
from aiordma import ClosedError, Completion, RemoteAccessError, RemoteBuffer, WrFlushError

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]


def _bad(p: Pair) -> Completion:
    """An operation that fails with a remote access error."""
    return p.a.rdma_write(p.local[:8], RemoteBuffer(p.remote.addr, 8, p.remote.rkey ^ 0x7700))


async def _finished(op: Completion) -> None:
    await eventually(lambda: op.done)


# ---------------------------------------------------------------- awaiting


async def test_awaiting_gives_the_completion_itself_however_often() -> None:
    async with open_pair() as p:
        op = p.a.rdma_write(p.local[:8], p.remote)
        assert await op is op
        assert await op is op
        assert op.result() is op
        assert op.exception() is None
        assert (op.done, op.status) == (True, 0)


async def test_many_tasks_may_await_one_operation() -> None:
    async with open_pair() as p:
        blocker = p.block()
        op = p.a.rdma_write(p.local[:8], p.remote)
        got = []

        async def wait() -> None:
            got.append(await op)

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(wait)
            await anyio.sleep(0.005)
            assert not got
            p.unblock()
        assert got == [op] * 50
        await blocker


async def test_many_tasks_all_get_the_error() -> None:
    async with open_pair() as p:
        op = _bad(p)
        errors = []

        async def wait() -> None:
            try:
                await op
            except RemoteAccessError as e:
                errors.append(e)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(wait)
        assert len(errors) == 20
        with pytest.raises(RemoteAccessError):
            await op
        with pytest.raises(RemoteAccessError):
            op.result()
        assert isinstance(op.exception(), RemoteAccessError)
        assert (op.status, op.opcode, op.vendor_err != 0) == (10, None, not ON_RXE)


async def test_while_in_flight_there_is_no_result_yet() -> None:
    async with open_pair(max_send_wr=2) as p:
        blocker = p.block()
        ops = [p.a.rdma_write(p.local[:8], p.remote) for _ in range(4)]
        for op in [blocker, *ops]:
            assert not op.done
            assert op.status is None
            assert op.opcode is None
            for ask in (op.result, op.exception):
                with pytest.raises(RuntimeError, match="await it"):
                    ask()
        assert "queued" in repr(ops[-1])
        assert "in flight" in repr(ops[0])
        p.unblock()
        for op in ops:
            assert "success" in repr(await op)


async def test_an_operation_nobody_awaits_completes_all_the_same() -> None:
    async with open_pair() as p:
        op = p.a.rdma_write(p.local[:8], p.remote)
        await _finished(op)
        receive = p.b.recv(p.peer)
        p.a.send(p.local[:8])
        await _finished(receive)
        assert receive.byte_len == 8


async def test_an_operation_dropped_at_once_takes_effect() -> None:
    async with open_pair() as p:
        p.left[:8] = b"dropped!"
        p.a.rdma_write(p.local[:8], p.remote)
        await eventually(lambda: p.right[:8] == b"dropped!")


async def test_an_await_on_what_has_completed_takes_no_turn_of_the_loop() -> None:
    async with open_pair() as p:
        op = await p.a.rdma_write(p.local[:8], p.remote)
        iterator = op.__await__()
        with pytest.raises(StopIteration) as caught:
            next(iterator)
        assert caught.value.value is op


async def test_awaits_that_complete_at_once_let_other_tasks_run() -> None:
    async with open_pair() as p:
        turns = 0
        stop = False

        async def other() -> None:
            nonlocal turns
            while not stop:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(other)
            op = await p.a.rdma_write(p.local[:8], p.remote)
            for _ in range(200_000):
                await op
                if turns > 3:
                    break
            stop = True
        assert turns > 3


@pytest.mark.parametrize("spin_us", [0, 20, 1000])
async def test_every_spin_budget_gives_the_same_results(spin_us: float) -> None:
    async with aiordma.open_device(DEVICE, spin_us=spin_us) as device, connected(device) as p:
        assert device.spin_us == spin_us
        for i in range(300):
            p.left[:4] = i.to_bytes(4, "big")
            await p.a.rdma_write(p.local[:4], p.remote)
            assert p.right[:4] == p.left[:4]
            if i % 50 == 0:
                await p.check()


async def test_operations_complete_in_the_order_they_were_posted() -> None:
    async with open_pair(max_send_wr=8) as p:
        order: list[int] = []
        ops = []
        for number in range(100):
            op = p.a.rdma_write(p.local[:8], p.remote, signaled=number % 3 != 0)
            op.on_finish(lambda number=number: order.append(number))
            ops.append(op)
        for op in reversed(ops):
            await op
        assert order == list(range(100))


# ---------------------------------------------------------------- with what the loops offer


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})])
async def test_completions_work_with_gather_wait_for_and_timeout() -> None:
    async with open_pair() as p:
        ops = [p.a.rdma_write(p.local[:8], p.remote) for _ in range(20)]
        assert await asyncio.gather(*ops) == ops
        blocker = p.block()
        op = p.a.rdma_write(p.local[:8], p.remote)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(op, 0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await op
        assert not op.done
        task = asyncio.ensure_future(op)
        p.unblock()
        assert await task is op
        assert await asyncio.shield(asyncio.ensure_future(blocker)) is blocker
        found = await asyncio.gather(_bad(p), p.a.rdma_write(p.local[:8], p.remote), return_exceptions=True)
        assert [type(error) for error in found] == [RemoteAccessError, WrFlushError]


@pytest.mark.parametrize("anyio_backend", [("trio", {})])
async def test_completions_work_in_trio_nurseries_and_scopes() -> None:
    async with open_pair() as p:
        blocker = p.block()
        op = p.a.rdma_write(p.local[:8], p.remote)
        with trio.move_on_after(0.01) as scope:
            await op
        assert scope.cancelled_caught
        assert not op.done
        p.unblock()
        with trio.fail_after(20):
            await op
            await blocker


# ---------------------------------------------------------------- cancelling an await


async def test_a_cancelled_await_leaves_the_operation_and_its_other_waiters_alone() -> None:
    async with open_pair() as p:
        p.left[:4] = b"data"
        blocker = p.block()
        op = p.a.rdma_write(p.local[:4], p.remote, inline=False)
        got = []

        async def wait() -> None:
            got.append(await op)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            for _ in range(10):
                with anyio.move_on_after(0.001) as scope:
                    await op
                assert scope.cancelled_caught
            p.unblock()
        assert got == [op]
        assert bytes(p.right[:4]) == b"data"
        await blocker
        await p.check()


async def test_cancellation_and_completion_in_the_same_turn_lose_nothing() -> None:
    async with open_pair() as p:
        for i in range(200):
            p.left[:4] = i.to_bytes(4, "big")
            op = p.a.rdma_write(p.local[:4], p.remote, inline=False)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def wait(op: Completion = op) -> None:
                        await op

                    group.start_soon(wait)
                    group.start_soon(wait)
                    await anyio.lowlevel.checkpoint()
                    scope.cancel()
            assert await op is op
            assert p.right[:4] == i.to_bytes(4, "big")


# ---------------------------------------------------------------- failures that nobody looks at


async def test_a_failure_nobody_looks_at_is_reported_once() -> None:
    async with open_pair() as p:
        with reported() as reports:
            op = _bad(p)
            await _finished(op)
            del op
            await settle()
        assert [type(error) for error in reports.found] == [RemoteAccessError]


@pytest.mark.parametrize("how", ["await", "result", "exception", "await_before", "await_twice", "gather"])
async def test_a_failure_that_was_looked_at_is_not_reported(how: str) -> None:
    async with open_pair() as p:
        with reported() as reports:
            op = _bad(p)
            if how == "await_before":
                with pytest.raises(RemoteAccessError):
                    await op
            elif how == "gather":

                async def wait(op: Completion = op) -> None:
                    with pytest.raises(RemoteAccessError):
                        await op

                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    group.start_soon(wait)
                del wait
            else:
                await _finished(op)
                if how == "exception":
                    assert isinstance(op.exception(), RemoteAccessError)
                else:
                    for _ in range(2 if how == "await_twice" else 1):
                        with pytest.raises(RemoteAccessError):
                            if how == "result":
                                op.result()
                            else:
                                await op
            del op
            await settle()
        assert reports.found == []


async def test_a_failure_whose_only_await_was_cancelled_is_reported() -> None:
    async with open_pair() as p:
        with reported() as reports:
            p.block()
            op = _bad(p)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await op
            p.unblock()
            await _finished(op)
            del op
            await settle()
        assert [type(error) for error in reports.found] == [RemoteAccessError]


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})])
async def test_a_failure_whose_waiter_is_cancelled_in_the_same_turn_is_reported() -> None:
    async with open_pair() as p:
        with reported() as reports:
            p.block()
            op = _bad(p)

            async def wait(op: Completion = op) -> None:
                await op

            task = asyncio.ensure_future(wait())
            del wait
            await asyncio.sleep(0.001)
            p.unblock()
            while not op.done:
                p.device.engine.completion_queues[0].poll()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del op, task
            await settle()
        assert [type(error) for error in reports.found] == [RemoteAccessError]


async def test_successes_and_flushes_of_closing_are_not_reported() -> None:
    with reported() as reports:
        async with open_pair(max_send_wr=4) as p:
            for _ in range(5):
                p.a.rdma_write(p.local[:8], p.remote)
            await p.a.wait_idle()
            p.block()
            for _ in range(10):
                p.a.rdma_write(p.local[:8], p.remote)
                p.b.recv(p.peer)
                p.a.recv(p.local)
        await settle()
    assert reports.found == []


async def test_an_error_of_a_posting_call_is_raised_there_and_not_reported_again() -> None:
    async with open_pair() as p:
        with reported() as reports:
            for _ in range(3):
                with pytest.raises(aiordma.UsageError):
                    p.a.rdma_write(p.local, p.remote[:8])
            await settle()
        assert reports.found == []


# ---------------------------------------------------------------- errors say what happened


async def test_a_remote_access_error_names_the_rkey_and_leaves_other_qps_working() -> None:
    async with open_pair() as p, connected(p.device) as other:
        bad = RemoteBuffer(p.remote.addr, 64, p.remote.rkey ^ 0x5A00)
        for start in (
            lambda: p.a.rdma_write(p.local[:8], bad),
            lambda: p.a.rdma_read(p.local[:8], bad),
            lambda: p.a.atomic_fetch_add(p.local[:8], bad[:8], 1),
        ):
            async with connected(p.device) as fresh:
                p.a = fresh.a
                with pytest.raises(RemoteAccessError) as caught:
                    await start()
                text = str(caught.value)
                assert f"rkey {bad.rkey:#x}" in text
                assert f"{bad.addr:#x}" in text
                assert f"{fresh.a.qp_num:#x}" in text
                assert fresh.a.state == "ERR"
                assert await fresh.a.query_state() == "ERR"
                await other.check()


async def test_what_follows_a_failure_is_flushed_and_names_what_failed_first() -> None:
    async with open_pair(max_send_wr=4) as p:
        failing = _bad(p)
        ops = [p.a.rdma_write(p.local[:8], p.remote) for _ in range(20)]
        with pytest.raises(RemoteAccessError):
            await failing
        for op in ops:
            with pytest.raises(WrFlushError, match="RDMA_WRITE with IBV_WC_REM_ACCESS_ERR"):
                await op
        with pytest.raises(WrFlushError):
            await p.a.rdma_write(p.local[:8], p.remote)


async def test_a_write_outside_the_region_fails_although_the_rkey_is_right() -> None:
    async with open_pair(size=4096) as p:
        beyond = RemoteBuffer(p.remote.addr + 4090, 8, p.remote.rkey)
        with pytest.raises(RemoteAccessError):
            await p.a.rdma_write(p.local[:8], beyond)
        assert not any(p.right)


async def test_a_peer_without_a_receive_fails_after_the_retries_it_allows() -> None:
    async with open_pair(rnr_retry=2) as p:
        with pytest.raises(aiordma.RnrRetryExceededError) as caught:
            await p.a.send(p.local[:8])
        assert isinstance(caught.value, ConnectionError)


async def test_a_peer_that_is_gone_fails_with_retry_exceeded() -> None:
    async with open_pair(timeout=8, retry_cnt=1) as p:
        await p.b.close()
        with pytest.raises(aiordma.RetryExceededError):
            await p.a.rdma_write(p.local[:8], p.remote)


# ---------------------------------------------------------------- what is kept alive


async def test_a_buffer_dropped_while_its_work_request_is_in_flight_stays_alive() -> None:
    class Buffer(bytearray):
        pass

    async with open_pair() as p:
        source = Buffer(b"keep me alive until the device has read me" * 100)
        expected = bytes(source)
        gone = weakref.ref(source)
        mr = await p.device.reg_mr(source)
        del source
        blocker = p.block()
        op = p.a.rdma_write(mr[: len(expected)], p.remote)
        region = mr.region
        del mr
        await settle()
        # The same size again, so that freed memory would be written over.
        clutter = [bytearray(len(expected)) for _ in range(50)]
        assert gone() is not None
        assert region.open
        # Only the work request held it: it goes with it.
        with pytest.warns(ResourceWarning, match="unclosed <MemoryRegion"):
            p.unblock()
            await op
            await blocker
            gc.collect()
        assert p.right[: len(expected)] == expected
        del clutter
        assert gone() is None


async def test_a_completion_lets_go_of_its_buffers_when_it_is_over() -> None:
    async with open_pair() as p:
        mr = await p.device.reg_mr(bytearray(100))
        before = sys.getrefcount(mr)
        ops = [p.a.rdma_write(mr, p.remote) for _ in range(10)]
        assert sys.getrefcount(mr) > before or all(op.done for op in ops)
        for op in ops:
            await op
        assert sys.getrefcount(mr) == before
        assert mr.region.inflight == 0
        await mr.close()


async def test_a_qp_with_work_in_flight_finishes_it_when_the_completion_is_dropped() -> None:
    async with open_pair() as p:
        op = p.block()
        del op
        await settle()
        assert p.a.statistics()["send"]["in_flight"] == 1
        p.unblock()
        await p.a.wait_idle()
        await p.check()


async def test_operations_in_flight_when_their_qp_closes_all_end() -> None:
    async with open_pair(max_send_wr=8) as p:
        ops = [p.block(), *(p.a.rdma_write(p.local[:8], p.remote, signaled=i % 3 == 0) for i in range(50))]
        receives = [p.a.recv(p.local) for _ in range(5)]
        ended = []

        async def wait(op: Completion) -> None:
            try:
                await op
            except (WrFlushError, ClosedError) as e:
                ended.append(e)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for op in [*ops, *receives]:
                    group.start_soon(wait, op)
                await anyio.lowlevel.checkpoint()
                await p.a.close()
        assert len(ended) == len(ops) + len(receives)
        assert all(isinstance(error, WrFlushError) for error in ended)
        assert p.local.region.inflight == 0

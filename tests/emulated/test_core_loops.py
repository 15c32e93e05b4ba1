"""One device, one loop, one thread: what else is tried is refused, and several of them work side by side."""

# ruff: noqa: SIM117

import asyncio
import gc
import os
import select
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio
import uvloop
from emulated.core import DEVICE, Pair, connect, connected, open_pair

import aiordma
from aiordma import ForkError, WrongLoopError

pytestmark = pytest.mark.any_device

RUNNERS: dict[str, Callable[[Callable[[], Awaitable[Any]]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),  # type: ignore[arg-type]
    "uvloop": lambda main: uvloop.run(main()),  # type: ignore[arg-type]
    "trio": trio.run,
}


def _calls(p: Pair) -> dict[str, Callable[[], object]]:
    return {
        "send": lambda: p.a.send(p.local[:8]),
        "recv": lambda: p.a.recv(p.local[:8]),
        "rdma_write": lambda: p.a.rdma_write(p.local[:8], p.remote),
        "rdma_read": lambda: p.a.rdma_read(p.local[:8], p.remote),
        "atomic": lambda: p.a.atomic_fetch_add(p.local[:8], p.remote, 1),
        "batch": lambda: p.a.rdma_write_many([(p.local[:8], p.remote)]),
        "local_inv": lambda: p.a.local_inv(1),
        "query_state": p.a.query_state,
        "connect": lambda: p.b.connect(p.a.info),
        "reg_mr": lambda: p.device.reg_mr(bytearray(8)),
        "create_qp": p.device.create_qp,
        "create_srq": p.device.create_srq,
        "events": p.device.events,
        "qp.close": p.a.close,
        "mr.close": p.local.close,
        "device.close": p.device.close,
    }


@pytest.mark.anyio
async def test_every_call_from_another_thread_is_refused_and_changes_nothing() -> None:
    async with open_pair() as p, p.device.create_qp() as fresh:
        calls = _calls(p)
        calls["connect"] = lambda: fresh.connect(p.a.info)
        op = p.block()
        calls["await"] = lambda: op.__await__()
        for name, call in calls.items():
            errors: list[BaseException | None] = []

            def run(call: Callable[[], object] = call, errors: list[BaseException | None] = errors) -> None:
                try:
                    call()
                except BaseException as e:
                    errors.append(e)
                else:
                    errors.append(None)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            assert isinstance(errors[0], WrongLoopError), (name, errors[0])
            assert "thread" in str(errors[0])
        p.unblock()
        await op
        assert fresh.state == "INIT"
        await p.check()


@pytest.mark.parametrize("inner", RUNNERS)
@pytest.mark.parametrize("outer", RUNNERS)
def test_a_device_is_refused_on_another_loop_than_its_own(outer: str, inner: str) -> None:
    async def open_() -> tuple[Pair, Any]:
        # No context manager: the loop would close it at its end.
        device = await aiordma.open_device(DEVICE)
        left, right = bytearray(64), bytearray(64)
        mrs = await device.reg_mr(left), await device.reg_mr(right)
        qps = await device.create_qp(), await device.create_qp()
        await connect(*qps)
        p = Pair(device, device, *qps, left, right, *mrs)
        return p, p.block()

    p, op = RUNNERS[outer](open_)
    names: list[str] = []

    async def use() -> None:
        for name, call in _calls(p).items():
            if name == "connect":
                continue
            with pytest.raises(WrongLoopError, match="loop"):
                call()
            names.append(name)
        with pytest.raises(WrongLoopError, match="loop"):
            await op

    RUNNERS[inner](use)
    assert len(names) == len(_calls(p)) - 1
    p.device.close_now()
    assert op.exception() is not None


@pytest.mark.parametrize("kind", RUNNERS)
def test_nothing_is_posted_when_the_loop_has_ended(kind: str) -> None:
    async def open_() -> Pair:
        device = await aiordma.open_device(DEVICE)
        left, right = bytearray(b"x" * 64), bytearray(64)
        mrs = await device.reg_mr(left), await device.reg_mr(right)
        qps = await device.create_qp(), await device.create_qp()
        await connect(*qps)
        return Pair(device, device, *qps, left, right, *mrs)

    p = RUNNERS[kind](open_)
    for name, call in _calls(p).items():
        with pytest.raises((WrongLoopError, aiordma.QPStateError)) as caught:
            call()
        assert isinstance(caught.value, WrongLoopError) == (name != "connect"), name
    with pytest.raises(WrongLoopError, match="has ended"):
        p.device.close()
    assert p.a.statistics()["send"]["posted"] == 0
    p.device.close_now()
    assert p.right == bytearray(64)


def test_without_a_loop_there_is_no_device() -> None:
    with pytest.raises(WrongLoopError, match="no event loop"):
        aiordma.open_device(DEVICE)


@pytest.mark.parametrize("kinds", [("asyncio", "trio"), ("uvloop", "uvloop"), ("asyncio", "uvloop", "trio")])
def test_loops_in_several_threads_work_at_the_same_time(kinds: tuple[str, ...]) -> None:
    barrier = threading.Barrier(len(kinds), timeout=30)
    errors: list[str] = []

    async def work() -> None:
        async with open_pair(max_send_wr=8) as p:
            barrier.wait()
            for i in range(300):
                p.left[:8] = i.to_bytes(8, "little")
                ops = [p.a.rdma_write(p.local[:8], p.remote[8 * k :]) for k in range(20)]
                if i % 30 == 0:
                    await p.check()
                await p.a.rdma_read(p.local[64:72], p.remote[8 * 19 :][:8])
                for op in ops:
                    assert op.done
                assert p.left[64:72] == p.left[:8]
            barrier.wait()

    def run(kind: str) -> None:
        try:
            RUNNERS[kind](work)
        except BaseException:
            errors.append(traceback.format_exc())
            barrier.abort()

    threads = [threading.Thread(target=run, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]


@pytest.mark.anyio
async def test_two_devices_on_one_loop_talk_to_each_other() -> None:
    async with aiordma.open_device(DEVICE) as one, aiordma.open_device(DEVICE) as two:
        async with one.create_qp() as a, two.create_qp() as b:
            async with one.reg_mr(bytearray(b"to the other")) as source, two.reg_mr(bytearray(12)) as sink:
                await a.connect(b.info)
                await b.connect(a.info)
                await a.rdma_write(source, sink.remote())
                assert bytes(sink.view()) == b"to the other"


@pytest.mark.anyio
async def test_device_to_device_across_loops_in_two_threads() -> None:
    """One side in this loop, its peer in a trio loop of another thread."""
    to_peer: list[Any] = []
    from_peer: list[Any] = []
    ready, connected_, done = threading.Event(), threading.Event(), threading.Event()
    errors: list[str] = []

    async def peer() -> None:
        async with aiordma.open_device(DEVICE) as device, device.create_qp() as qp:
            async with device.reg_mr(bytearray(64)) as mr:
                receive = qp.recv(mr)
                from_peer.extend([qp.info, mr.remote()])
                ready.set()
                await anyio.to_thread.run_sync(connected_.wait)
                await qp.connect(to_peer[0])
                done.set()
                got = await receive
                assert bytes(mr.view()[: got.byte_len]) == b"across"
                await qp.rdma_write(b"answer", to_peer[1])

    def run() -> None:
        try:
            trio.run(peer)
        except BaseException:
            errors.append(traceback.format_exc())

    thread = threading.Thread(target=run)
    thread.start()
    async with aiordma.open_device(DEVICE) as device, device.create_qp() as qp:
        async with device.reg_mr(bytearray(64)) as mr:
            await anyio.to_thread.run_sync(ready.wait)
            to_peer.extend([qp.info, mr.remote()])
            await qp.connect(from_peer[0])
            connected_.set()
            await anyio.to_thread.run_sync(done.wait)
            await qp.send(b"across")
            await anyio.to_thread.run_sync(thread.join)
            assert bytes(mr.view()[:6]) == b"answer"
    assert not errors, errors[0]


# ---------------------------------------------------------------- fork


def _in_child(fn: Callable[[], None], *, hard: bool) -> int:
    """Runs ``fn`` in a fork; its exit status. ``hard``: it ends with os._exit(), else with all that Python does at exit."""
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fn()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            if hard:
                os._exit(code)
            # The test session ends here too, in the child: only what the interpreter does at its end is wanted of it.
            import atexit

            atexit._run_exitfuncs()
            gc.collect()
            os._exit(code)
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], 60)[0]:
            os.kill(pid, 9)
            pytest.fail("the child hangs")
    finally:
        os.close(fd)
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


@pytest.mark.anyio
@pytest.mark.parametrize("hard", [True, False], ids=["_exit", "exit"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_fork_child_can_use_nothing_of_its_parents_and_does_not_disturb_it(hard: bool) -> None:
    async with open_pair() as p:
        blocker = p.block()
        op = p.a.rdma_write(p.local[:8], p.remote)
        calls = _calls(p)

        def child() -> None:
            for name, call in calls.items():
                if name == "connect":
                    continue
                try:
                    call()
                except ForkError:
                    continue
                raise AssertionError(f"{name} worked in the child")
            try:
                op.__await__()
            except ForkError:
                pass
            else:
                raise AssertionError("await worked in the child")

        assert _in_child(child, hard=hard) == 0
        assert not op.done
        p.unblock()
        await blocker
        await op
        await p.check()
        async with connected(p.device) as fresh:
            await fresh.check()


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_fork_child_that_drops_everything_closes_nothing_of_its_parents() -> None:
    holder = [open_pair()]
    p = await holder[0].__aenter__()
    try:
        p.block()

        def child() -> None:
            import warnings

            warnings.simplefilter("error")
            for name in ("a", "b", "local", "peer", "device", "remote"):
                setattr(p, name, None)
            gc.collect()

        assert _in_child(child, hard=False) == 0
        p.unblock()
        await p.check()
    finally:
        await holder[0].__aexit__(None, None, None)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_child_opens_a_device_of_its_own() -> None:
    async def work() -> None:
        async with open_pair() as p:
            await p.check()

    asyncio.run(work())

    def child() -> None:
        for kind in RUNNERS:
            RUNNERS[kind](work)

    assert _in_child(child, hard=False) == 0
    asyncio.run(work())

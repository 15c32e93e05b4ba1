"""Completion events, the event loop and what happens around it: faults that users of RDMA met, each with its source."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import pytest
import trio
import uvloop
from emulated.core import DEVICE, ON_EMULATED, Pair, connected, object_counts, reported

import aiordma
from aiordma import (
    ClosedError,
    Device,
    EventType,
    RdmaError,
    WrFlushError,
    WrongLoopError,
)
from aiordma.emulator import _inject as inject
from aiordma.emulator import faults

pytestmark = pytest.mark.anyio

#: Everything here takes milliseconds; what takes this long never comes.
SOON = 20


@pytest.fixture(autouse=True)
def no_injection(leak_check: None) -> Iterator[None]:
    yield
    if ON_EMULATED:
        faults.reset()


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Device]:
    options.setdefault("spin_us", 0)
    async with aiordma.open_device(DEVICE, **options) as device:
        yield device


@asynccontextmanager
async def parked(*waits: Callable[[], Coroutine[Any, Any, Any]]) -> AsyncIterator[None]:
    """Tasks that wait, and have been waiting for a while when the block begins; all have ended when it's left."""
    with anyio.fail_after(SOON):
        async with anyio.create_task_group() as group:
            for wait in waits:
                group.start_soon(wait)
            await anyio.sleep(0.05)
            yield


def waiting_for(awaitable: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def wait() -> None:
        await awaitable

    return wait


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what nothing tells of."""
    with anyio.fail_after(SOON):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


def device_has(done: Callable[[], bool]) -> None:
    """Waits, and the loop with it, until the device has done something and told of it: it holds its lock meanwhile."""
    deadline = time.monotonic() + SOON
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    object_counts()


def send_statistics(device: Device) -> dict[str, int]:
    statistics: dict[str, int] = device.engine.statistics()["send"][0]
    return statistics


# ------------------------------------------------------------------ events


async def test_a_completion_between_the_last_poll_and_arming_is_found() -> None:
    """brpc#3415, libfabric#796: it raises no event, and with poll, then arm, it lay there for ever."""
    async with opened() as device, connected(device) as one, connected(device) as two:
        with inject.strict_arming(), faults.hold(one.a) as go_one, faults.hold(two.a) as go_two:
            two.left[:8] = b"stranded"
            first = one.a.rdma_write(one.local[:8], one.remote)
            second = two.a.rdma_write(two.local[:8], two.remote)

            def second_completes() -> None:
                go_two.stop()
                device_has(lambda: bytes(two.right[:8]) == b"stranded")

            before = send_statistics(device)
            async with parked(waiting_for(first), waiting_for(second)):
                with inject.before_arm(device.context_address, second_completes):
                    go_one.stop()
                    with anyio.fail_after(SOON):
                        await first
                        await second
            assert send_statistics(device)["events"] - before["events"] == 1


@pytest.mark.parametrize("count", [64, 1500])
async def test_every_completion_behind_one_event_is_handled(count: int) -> None:
    """perftest#137: a wake-up took one batch of completions and slept on the rest."""
    async with opened() as device, connected(device, max_send_wr=count) as pair:
        with faults.hold(pair.a) as go:
            pair.left[8:16] = b"the last"
            operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(count - 1)]
            operations.append(pair.a.rdma_write(pair.local[8:16], pair.remote[8:16]))
            before = send_statistics(device)
            async with parked(waiting_for(operations[-1])):
                go.stop()
                # The loop stands still until all of them are there.
                device_has(lambda: bytes(pair.right[8:16]) == b"the last")
            after = send_statistics(device)
        assert all(operation.done for operation in operations)
        assert after["events"] - before["events"] == 1
        assert after["polled"] - before["polled"] == count


@pytest.mark.any_device
async def test_the_first_receive_of_a_new_queue_wakes_its_waiter() -> None:
    """libfabric#795: a CQ that was never armed raised no event for its first completion."""
    async with opened() as device, connected(device) as pair:
        receive = pair.b.recv(pair.peer[:8])
        async with parked(waiting_for(receive)):
            pair.a.send(pair.local[:8])
        assert receive.byte_len == 8


_TWO_QUEUES = """
    import asyncio, faulthandler, select
    import aiordma
    from aiordma import _control
    from aiordma._cq import CompletionQueue, QueueTable

    faulthandler.dump_traceback_later(20, exit=True)  # a hanging ibv_destroy_cq() holds the GIL


    async def main():
        loop = asyncio.get_running_loop()

        def handler(loop, context):
            raise RuntimeError("the application's own handler fails")

        async with aiordma.open_device(spin_us=0) as device:
            from pyverbs import enums as e
            from pyverbs.cq import CQ, CompChannel
            from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
            from pyverbs.wr import SGE, RecvWR

            channel = CompChannel(device.context)
            cqs = [CQ(device.context, 16, None, channel, 0) for _ in range(2)]
            context = device.context_address
            addresses = [_control.cq_address(cq, context) for cq in cqs]
            channel_address = _control.channel_address(channel, context)
            import os
            fd = _control.channel_fd(channel_address)
            os.set_blocking(fd, False)
            queue = CompletionQueue(device.control.hooks, QueueTable(), addresses[0], channel_address, cqs[0], channel, 0)
            qps = []
            for cq in cqs:
                cq.req_notify()
                init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1, 0))
                qp = QP(device.pd, init, QPAttr(port_num=1))
                qp.post_recv(RecvWR(wr_id=1 << 63, num_sge=1, sg=[SGE(0, 0, 0)]))
                qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)  # flushes: an event on each CQ
                qps.append(qp)
                assert select.select([fd], [], [], 15)[0]  # that of the first CQ
            await asyncio.sleep(0.1)
            loop.set_exception_handler(handler)
            queue.on_readable()
            statistics = queue.statistics()
            assert statistics["events"] == 1, statistics
            assert statistics["unknown"] == 1, statistics
            loop.set_exception_handler(None)
            for obj in (*qps, *reversed(cqs), channel):
                obj.close()

            # And ours, with an event that nobody has read.
            async with device.create_qp() as qp:
                qp.recv(None)
                await asyncio.sleep(0.05)
                _control.modify_qp(qp.address, 1, {"qp_state": 6})
                import time
                time.sleep(0.1)
                device.close()
        print("closed")

    asyncio.run(main())
"""


@pytest.mark.any_device
def test_events_on_a_shared_channel_are_acknowledged_on_their_own_queue(run_python: Callable[..., Any]) -> None:
    """ucx#1039, rdma-core PR657: events not acknowledged, or on another CQ, made ibv_destroy_cq() wait for ever."""
    done = run_python(_TWO_QUEUES)
    assert done.stdout == "closed\n"


@pytest.mark.any_device
async def test_channels_never_block_and_readiness_without_an_event_is_harmless() -> None:
    """uvloop#712: loops differ in what they do to the blocking mode of a descriptor that they watch."""
    from aiordma import _control

    async with opened() as device, connected(device) as pair:
        await pair.check()
        queues = device.engine.completion_queues
        assert len(queues) == 2
        assert not os.get_blocking(_control.async_fd(device.context_address))
        for queue in queues:
            address = _control.channel_address(queue.pyverbs_channel, device.context_address)
            assert not os.get_blocking(_control.channel_fd(address))
        object_counts()  # with the device's lock: it has told of all that was polled
        await anyio.sleep(0.05)  # events that came while their completions were polled already
        for queue in queues:
            before = queue.statistics()
            queue.on_readable()
            after = queue.statistics()
            assert after["events"] == before["events"]
            assert after["wakeups"] == before["wakeups"] + 1
        device._on_async_event()
        await pair.check()


async def test_one_event_wakes_the_loop_once() -> None:
    """ucx#7864: an event that isn't taken leaves the descriptor readable, and the loop spins."""
    async with opened() as device, connected(device) as pair:
        with faults.hold(pair.a) as go:
            operation = pair.a.rdma_write(pair.local[:8], pair.remote)
            before = send_statistics(device)
            async with parked(waiting_for(operation)):
                go.stop()
            await anyio.sleep(1)
        after = send_statistics(device)
        assert after["wakeups"] - before["wakeups"] == 1
        assert after["events"] - before["events"] == 1


# ------------------------------------------------------------------ closing, threads, loops

# For programs of their own: the loop that their first argument names.
_LOOP = """
    import logging, sys

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # not that a step was slow
    backend = sys.argv[1].partition("+")[0]
    options = {"use_uvloop": True} if "+" in sys.argv[1] else {}
"""

_OTHER_THREAD = (
    _LOOP
    + """
    import threading
    import anyio
    import aiordma
    from aiordma import WrongLoopError

    async def main():
        async with aiordma.open_device(spin_us=0) as device:
            async with device.create_qp() as a, device.create_qp() as b, device.reg_mr(bytearray(64)) as mr:
                await a.connect(b.info)
                await b.connect(a.info)
                refused = []

                def elsewhere():
                    for name, call in {
                        "device.close": device.close, "qp.close": b.close, "mr.close": mr.close,
                        "post": lambda: a.send(None), "recv": lambda: b.recv(None), "query": a.query_state,
                        "reg_mr": lambda: device.reg_mr(bytearray(8)),
                    }.items():
                        try:
                            call()
                        except WrongLoopError as e:
                            assert "thread" in str(e)
                            refused.append(name)

                receive = b.recv(mr[:8])

                async def wait():
                    await receive

                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await anyio.sleep(0.05)
                    thread = threading.Thread(target=elsewhere)
                    thread.start()
                    thread.join()
                    await a.send(mr[8:16])
                assert len(refused) == 7, refused

                # pyverbs' own close isn't ours to refuse, but must not end the process either.
                receive = b.recv(mr[:8])

                async def wait_for_the_end():
                    try:
                        await receive
                    except aiordma.ClosedError:
                        pass

                async with anyio.create_task_group() as group:
                    group.start_soon(wait_for_the_end)
                    await anyio.sleep(0.05)
                    failed = []

                    def close_context():
                        try:
                            b.pyverbs.close()
                        except Exception as e:
                            failed.append(e)

                    thread = threading.Thread(target=close_context)
                    thread.start()
                    thread.join()
                    assert not failed, failed
                    assert b.state == "ERR"
                    await b.close()
        print("alive")

    anyio.run(main, backend=backend, backend_options=options)
"""
)


@pytest.mark.any_device
@pytest.mark.parametrize("backend", ["asyncio", "asyncio+uvloop", "trio"])
def test_another_thread_is_told_so_and_ends_no_wait(backend: str, run_python: Callable[..., Any]) -> None:
    """libuv#5130: a watched descriptor closed by another thread aborted the process."""
    assert run_python(_OTHER_THREAD, backend).stdout == "alive\n"


@pytest.mark.any_device
async def test_closing_ends_every_kind_of_wait() -> None:
    """trio#36, anyio PR896: a task that waited on what was closed slept for ever."""
    ended: dict[str, BaseException | str] = {}

    def watcher(name: str, wait: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Coroutine[Any, Any, Any]]:
        async def run() -> None:
            try:
                ended[name] = str(await wait())
            except RdmaError as e:
                ended[name] = e

        return run

    async with opened() as device, connected(device) as pair:
        srq = await device.create_srq(16)
        receive = pair.b.recv(pair.peer[:8])
        shared = srq.recv(pair.peer[8:16])
        for _ in range(4):
            srq.recv(None)
        events = device.events()

        async def first_event() -> str:
            async for _ in events:
                return "an event"
            return "the end"

        async def wait_for(completion: Any) -> None:
            await completion

        waits = {
            "recv": lambda: wait_for(receive),
            "srq recv": lambda: wait_for(shared),
            "srq limit": lambda: srq.limit_reached(2),
            "events": first_event,
        }
        async with parked(*(watcher(name, wait) for name, wait in waits.items())):
            closing = pair.b.close()
            await closing
            assert isinstance(ended["recv"], WrFlushError)
            assert "closed" in str(ended["recv"])
            await device.close()
        assert isinstance(ended["srq recv"], ClosedError)
        assert isinstance(ended["srq limit"], ClosedError)
        assert ended["events"] == "the end"


async def test_a_hundred_tasks_wait_on_one_queue() -> None:
    """trio-asyncio#153: a second waiter on a descriptor is an error in trio."""
    async with opened() as device, connected(device) as pair:
        with faults.hold(pair.a) as go:
            operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(100)]
            async with parked(*(waiting_for(operation) for operation in operations)):
                assert not any(operation.done for operation in operations)
                go.stop()
        assert all(operation.status == 0 for operation in operations)


@pytest.mark.any_device
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("other", ["asyncio", "trio"])
def test_what_belongs_to_another_loop_refuses_at_once(
    new_loop: Callable[[], asyncio.AbstractEventLoop], other: str
) -> None:
    """ucx-py PR155: awaiting an endpoint that was made on another loop hung."""
    loop = new_loop()

    async def create() -> tuple[Device, Pair, Any]:
        device = await aiordma.open_device(DEVICE, spin_us=0)
        made = connected(device)
        return device, await made.__aenter__(), made

    device, pair, made = loop.run_until_complete(create())
    receive = pair.b.recv(pair.peer[:8])
    pending = device.reg_mr(bytearray(64))

    async def use() -> None:
        async def wait(awaitable: Any) -> None:
            await awaitable

        for attempt in (
            lambda: wait(receive),
            lambda: wait(pending),
            lambda: wait(pair.b.wait_idle()),
        ):
            with anyio.fail_after(SOON), pytest.raises(WrongLoopError, match="another event loop"):
                await attempt()
        for call in (
            lambda: pair.a.send(None),
            lambda: pair.b.recv(None),
            lambda: device.reg_mr(bytearray(64)),
            device.create_qp,
            device.events,
            pair.a.close,
            pair.local.close,
            device.close,
        ):
            with pytest.raises(WrongLoopError, match="another event loop"):
                call()

    if other == "trio":
        trio.run(use)
    else:
        asyncio.run(use())

    async def finish() -> None:
        await (await pending).close()
        await pair.a.send(pair.local[:8])
        await receive
        await made.__aexit__(None, None, None)
        await device.close()

    loop.run_until_complete(finish())
    loop.close()


# ------------------------------------------------------------------ the end of a program

_OUTSTANDING = (
    _LOOP
    + """
    import anyio
    import aiordma
    from aiordma.emulator import faults

    keep = []

    async def main():
        async with aiordma.open_device("emulated", spin_us=0) as device:
            async with device.reg_mr(bytearray(4096)) as mr, device.create_qp() as a, device.create_qp() as b:
                await a.connect(b.info)
                await b.connect(a.info)
                faults.hold(a)
                operations = [a.rdma_write(mr[:64], mr.remote()) for _ in range(200)]
                operations += [b.recv(mr[:64]) for _ in range(10)]
                if sys.argv[2] == "keep":
                    keep.extend([device, a, b, mr, *operations])

                async def wait(operation):
                    try:
                        await operation
                    except aiordma.WrFlushError:
                        pass

                async with anyio.create_task_group() as group:
                    for operation in operations:
                        group.start_soon(wait, operation)
                    await anyio.sleep(0.05)
                    if sys.argv[3] == "cancel":
                        group.cancel_scope.cancel()
                    else:
                        device.close()

    anyio.run(main, backend=backend, backend_options=options)
    print("ended")
"""
)

_BACKENDS = ["asyncio", "asyncio+uvloop", "trio"]


def run_all(program: str, argument_lists: list[list[str]], *options: str) -> list[tuple[int, str, str]]:
    """Programs that run beside each other: (exit status, stdout, stderr) of each."""
    running = [
        subprocess.Popen(
            [sys.executable, *options, "-c", textwrap.dedent(program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in argument_lists
    ]
    ended = []
    try:
        for process in running:
            out, err = process.communicate(timeout=100)
            ended.append((process.returncode, out, err))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return ended


def besides_warnings(err: str) -> list[str]:
    """The lines that belong to no ResourceWarning, which has a second line with its source or a hint on tracemalloc."""
    return [
        line
        for line in err.splitlines()
        if "ResourceWarning" not in line and not line.startswith(("  ", "ResourceWarning:"))
    ]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_loop_that_ends_with_operations_in_flight_ends_quietly(how: str) -> None:
    """ucx-py PR288: completions after the loop had ended made noise, or ended the process."""
    cases = [[backend, kept, how] for backend in _BACKENDS for kept in ("keep", "drop")]
    for case, (status, out, err) in zip(cases, run_all(_OUTSTANDING, cases, "-X", "dev", "-W", "error"), strict=True):
        assert (status, out, err) == (0, "ended\n", ""), case


_FORGOTTEN = (
    _LOOP
    + """
    import anyio
    import aiordma
    from aiordma.emulator import faults

    keep = []

    async def main():
        device = await aiordma.open_device("emulated", spin_us=0)
        mr = await device.reg_mr(bytearray(4096))
        a, b = await device.create_qp(), await device.create_qp()
        await a.connect(b.info)
        await b.connect(a.info)
        faults.hold(a)
        operations = [a.rdma_write(mr[:64], mr.remote()) for _ in range(200)] + [b.recv(mr[:64])]

        async def wait(operation):
            await operation

        keep.extend([device, a, b, mr, *operations])
        async with anyio.create_task_group() as group:
            for operation in operations:
                group.start_soon(wait, operation)
            await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        if sys.argv[2] == "closing":
            mr.close()
            b.close()
            a.close()  # and the loop ends before any of them has

    anyio.run(main, backend=backend, backend_options=options)
    if sys.argv[2] == "drop":
        del keep[:]
    print("ended")
"""
)


def test_a_forgotten_device_warns_and_nothing_else() -> None:
    """ucx-py PR288: the same, where nothing was closed."""
    cases = [[backend, kept] for backend in _BACKENDS for kept in ("keep", "drop", "closing")]
    for case, (status, out, err) in zip(cases, run_all(_FORGOTTEN, cases, "-X", "dev"), strict=True):
        assert (status, out) == (0, "ended\n"), (case, err)
        assert "ResourceWarning: unclosed <Device" in err, case
        assert not besides_warnings(err), (case, err)


_WAITING_TASKS = """
    import asyncio, sys
    import uvloop
    import aiordma

    loop = uvloop.new_event_loop() if sys.argv[1] == "uvloop" else asyncio.new_event_loop()

    async def main():
        global device, qp, mr, task
        device = await aiordma.open_device("emulated", spin_us=0)
        mr = await device.reg_mr(bytearray(64))
        qp = await device.create_qp()

        async def wait():
            await qp.recv(mr[:8])

        task = loop.create_task(wait())
        task._log_destroy_pending = False  # it's true, and asyncio's to say
        await asyncio.sleep(0.05)

    loop.run_until_complete(main())
    loop.close()
    print("ended")
"""


def test_a_loop_closed_under_waiting_tasks_leaves_nothing_behind() -> None:
    """ucx-py PR288: the same, where the loop was closed and its tasks were neither ended nor cancelled."""
    cases = [["asyncio"], ["uvloop"]]
    for case, (status, out, err) in zip(cases, run_all(_WAITING_TASKS, cases, "-W", "always"), strict=True):
        assert (status, out) == (0, "ended\n"), (case, err)
        assert not besides_warnings(err), (case, err)


async def test_a_lost_peer_leaves_timeouts_working() -> None:
    """mlx#3910: the wait for a peer that was gone could not be interrupted."""
    async with opened(spin_us=20) as device, connected(device, timeout=0) as pair:
        with faults.drop(pair.a):
            operation = pair.a.rdma_write(pair.local[:8], pair.remote)
            with anyio.move_on_after(0.2) as scope:
                await operation
            assert scope.cancelled_caught
            assert not operation.done
            # It's in flight still, and closing flushes it.
            await pair.a.close()
            with pytest.raises(WrFlushError):
                await operation


_LOST_PEER = (
    _LOOP
    + """
    import anyio
    import aiordma
    from aiordma.emulator import faults

    async def main():
        async with aiordma.open_device("emulated") as device:
            async with device.reg_mr(bytearray(64)) as mr, device.create_qp(timeout=0) as a, device.create_qp() as b:
                await a.connect(b.info)
                await b.connect(a.info)
                with faults.drop(a):
                    print("waiting", flush=True)
                    operation = a.rdma_write(mr[:8], mr.remote())
                    await operation

    try:
        anyio.run(main, backend=backend, backend_options=options)
    except KeyboardInterrupt:
        print("interrupted")
"""
)


def test_a_lost_peer_leaves_interrupts_working() -> None:
    """mlx#3910: nor did SIGINT do anything."""
    running = {
        backend: subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(_LOST_PEER), backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for backend in _BACKENDS
    }
    try:
        for process in running.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for backend, process in running.items():
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out, err) == (0, "interrupted\n", ""), backend
    finally:
        for process in running.values():
            process.kill()
            process.wait()


@pytest.mark.any_device
async def test_a_close_that_nobody_awaits_still_releases() -> None:
    """torchstore PR64: an awaitable that was dropped never ran, and the pinned memory stayed."""
    async with opened() as device:
        before = object_counts()
        mr = await device.reg_mr(bytearray(4096))
        qp = await device.create_qp()
        srq = await device.create_srq(16)
        made = object_counts()
        assert {kind for kind in made if made[kind] > before[kind]} >= {"mr", "qp", "srq"}
        mr.close()
        qp.close()
        srq.close()
        kinds = ("mr", "qp", "srq")
        await until(lambda: all(object_counts()[kind] == before[kind] for kind in kinds))


@pytest.mark.any_device
async def test_a_registration_that_nobody_takes_warns_and_is_released() -> None:
    """torchstore PR64: the other half, memory that was registered and never handed to anybody."""
    async with opened() as device:
        before = object_counts()["mr"]
        pending = device.reg_mr(bytearray(4096))
        await until(lambda: pending.done)
        assert object_counts()["mr"] == before + 1
        with pytest.warns(ResourceWarning, match="unclosed <MemoryRegion"):
            # The only reference to the result is the operation's.
            pending = None
        assert object_counts()["mr"] == before


async def test_a_callback_that_raises_loses_no_completion() -> None:
    """rdma-core PR657: a handler that raised left what came behind it unhandled, and events unacknowledged."""
    async with opened() as device, connected(device) as pair:
        with reported() as reports, faults.hold(pair.a) as go:
            operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(16)]

            def broken() -> None:
                raise ZeroDivisionError("the application's own")

            operations[3].on_finish(broken)
            async with parked(waiting_for(operations[-1])):
                go.stop()
            await anyio.sleep(0.05)
        assert all(operation.done for operation in operations)
        assert [type(error) for error in reports.found] == [ZeroDivisionError]
        await pair.check()


async def test_events_of_the_device_reach_every_listener() -> None:
    """Each listener has its own copy, and a slow one doesn't hold up the others."""
    async with opened() as device:
        first, second = device.events(limit=2), device.events()
        for event_type in (EventType.CLIENT_REREGISTER, EventType.SM_CHANGE, EventType.PKEY_CHANGE):
            faults.raise_event(event_type, device="mlx5_0", port=1)
        with anyio.fail_after(SOON):
            assert [(await anext(second)).type for _ in range(3)] == [
                EventType.CLIENT_REREGISTER,
                EventType.SM_CHANGE,
                EventType.PKEY_CHANGE,
            ]
            assert [(await anext(first)).type for _ in range(2)] == [EventType.SM_CHANGE, EventType.PKEY_CHANGE]
        assert first.dropped == 1

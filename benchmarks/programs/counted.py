"""The workloads of benchmarks/instructions.py, to be run under callgrind.

counted.py LIBRARY

LIBRARY is benchmarks/c/counted.c, compiled. The device's thread rests, and its work is done when a workload says so: what
is counted then doesn't depend on how long anything is waited for.
"""

import asyncio
import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import uvloop

import aiordma
from aiordma import MemorySlice, QueuePair, RemoteBuffer, _control, mlx5
from aiordma._waitable import Waitable
from aiordma.emulator import _inject, attach

MANY, BATCH, TARGETS, STREAMS = 100, 64, 64, 16
Step = Callable[[], int]

library = ctypes.CDLL(sys.argv[1])


class Loop(ctypes.Structure):
    """struct loop of counted.c."""

    _fields_ = (
        ("qp", ctypes.c_void_p),
        ("cq", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("local", ctypes.c_uint64),
        ("remote", ctypes.c_uint64),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("ops", ctypes.c_uint32),
        ("n", ctypes.c_uint32),
    )


def counted(name: str, begin: bool) -> None:
    if begin:
        gc.collect()
        library.counted_begin()
    else:
        library.counted_end(name.encode())


async def measure(name: str, run: Callable[[int], Awaitable[object]], ops: int) -> None:
    """``run`` once to warm up, and once to be counted."""
    await run(ops)
    counted(name, True)
    await run(ops)
    counted(name, False)


# ---------------------------------------------------------------- workloads


def workloads(
    qp: QueuePair, peer: QueuePair, local: MemorySlice, remote: RemoteBuffer, sink: MemorySlice, step: Step
) -> dict[str, tuple[Callable[[int], Awaitable[object]], int]]:
    async def steps(ops: int) -> None:
        for _ in range(ops):
            step()

    async def one(ops: int) -> None:
        for _ in range(ops):
            write = qp.rdma_write(local, remote)
            step()
            await write

    async def many(ops: int) -> None:
        writes: deque[aiordma.Completion] = deque()
        for _ in range(ops // MANY):
            for _ in range(MANY):
                writes.append(qp.rdma_write(local, remote))
            step()
            for _ in range(MANY):
                await writes.popleft()

    async def batch(ops: int) -> None:
        pairs = [(local, remote)] * BATCH
        for _ in range(ops // BATCH):
            write = qp.rdma_write_many(pairs)
            step()
            await write

    again = qp.batch()
    for _ in range(BATCH):
        again.rdma_write(local, remote)

    async def repost(ops: int) -> None:
        for _ in range(ops // BATCH):
            write = again.repost()
            step()
            await write

    async def message(ops: int) -> None:
        for _ in range(ops):
            receive = peer.recv(sink)
            send = qp.send(local)
            step()
            await send
            await receive

    return {
        "steps": (steps, 1000),
        "one": (one, 1000),
        "many": (many, 20 * MANY),
        "batch": (batch, 50 * BATCH),
        "repost": (repost, 50 * BATCH),
        "message": (message, 1000),
    }


def c_loops(qp: QueuePair, local: MemorySlice, remote: RemoteBuffer, step: Any) -> None:
    cq = qp.device.engine.completion_queues[0]
    loop = Loop(
        qp.address,
        _control.cq_address(cq.pyverbs, qp.device.context_address),
        ctypes.cast(step, ctypes.c_void_p).value,
        local.addr,
        remote.addr,
        local.lkey,
        remote.rkey,
        len(local),
    )
    for name, ops, n in (("one", 1000, 1), ("many", 20 * MANY, MANY), ("batch", 50 * BATCH, BATCH)):
        loop.ops, loop.n = ops, n
        for _ in range(2):  # the first warms up, and its profile is overwritten
            getattr(library, f"counted_{name}")(ctypes.byref(loop))


async def run_mlx5() -> None:
    """On a device of its own, whose work is more with so many targets. All is made and closed while it works by itself."""
    async with (
        aiordma.open_device("emulated") as device,
        device.reg_mr(bytearray(8)) as source,
        device.reg_mr(bytearray(8)) as sink,
        mlx5.create_dma_engine(device) as engine,
        device.create_srq(16) as srq,
        mlx5.create_dci_pool(device, 1, log_streams=4) as pool,
    ):
        targets = [await mlx5.create_dc_target(device, srq) for _ in range(TARGETS)]
        peers = [await pool.reach(target.info) for target in targets]
        with _inject.stepping() as step:
            await copied(engine, source[0:8], sink[0:8], step)
            await fanned_out(pool, peers, source[0:8], sink.remote(), step)
        for closing in [thing.close() for thing in (*peers, *targets)]:
            await closing


async def run(spin_us: float, body: Callable[..., Awaitable[None]]) -> None:
    async with (
        aiordma.open_device("emulated", spin_us=spin_us) as device,
        device.reg_mr(bytearray(8)) as source,
        device.reg_mr(bytearray(8)) as target,
        device.create_qp() as here,
        device.create_qp() as there,
    ):
        await here.connect(there.info)
        await there.connect(here.info)
        await here.rdma_write(source, target.remote())
        with _inject.stepping() as step:
            await body(here, there, source[0:8], target.remote(), target[0:8], step)


async def awaited(
    qp: QueuePair, peer: QueuePair, local: MemorySlice, remote: RemoteBuffer, sink: MemorySlice, step: Step
) -> None:
    c_loops(qp, local, remote, step)
    for name, (work, ops) in workloads(qp, peer, local, remote, sink, step).items():
        await measure(name, work, ops)


def found(operation: Waitable, device: aiordma.Device, step: Step) -> None:
    """Steps the device until an operation is done: the first on a queue pair that was idle isn't found by the first step."""
    while not operation.done:
        step()
        for cq in device.engine.completion_queues:
            cq.poll()


async def fanned_out(
    pool: mlx5.DCIPool, peers: list[mlx5.DcPeer], local: MemorySlice, remote: RemoteBuffer, step: Step
) -> None:
    """To 64 DC targets in turn from one initiator with 16 streams: most of 64 wait for a lane."""
    cqs = pool.device.engine.completion_queues

    async def fanout(ops: int) -> None:
        writes: deque[mlx5.PoolOperation] = deque()
        for _ in range(ops // TARGETS):
            for peer in peers:
                writes.append(pool.rdma_write(peer, local, remote))
            for _ in range(TARGETS // STREAMS - 1):
                step()
                for cq in cqs:
                    cq.poll()
            step()
            for _ in range(TARGETS):
                await writes.popleft()

    found(pool.rdma_write(peers[0], local, remote), pool.device, step)
    await measure("fanout", fanout, 30 * TARGETS)


async def copied(engine: mlx5.DmaEngine, source: MemorySlice, target: MemorySlice, step: Step) -> None:
    memcpy = engine.qp.memcpy

    async def memcpys(ops: int) -> None:
        for _ in range(ops):
            copy = memcpy(target, source)
            step()
            await copy

    found(memcpy(target, source), engine.device, step)
    await measure("memcpy", memcpys, 1000)

    def posted(to: MemorySlice, what: MemorySlice) -> aiordma.Completion:
        copy = memcpy(to, what)
        step()
        return copy

    # The engine's own part too. Who steps the device comes in between.
    engine._memcpy = posted  # type: ignore[method-assign, assignment]

    async def copies(ops: int) -> None:
        for _ in range(ops):
            await engine.copy(target, source)

    await measure("copy", copies, 1000)


async def parked(
    qp: QueuePair, peer: QueuePair, local: MemorySlice, remote: RemoteBuffer, sink: MemorySlice, step: Step
) -> None:
    """No spinning, and the device does its work in the loop's next turn: every await parks, and the channel wakes it.

    Beside it what the loop itself takes for that: a task that waits until a descriptor is readable.
    """
    call_soon = qp.device.control.backend.call_soon
    fd = os.eventfd(0, os.EFD_NONBLOCK)

    async def wake(ops: int) -> None:
        for _ in range(ops):
            write = qp.rdma_write(local, remote)
            call_soon(step)
            await write

    async def bare_asyncio(ops: int) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        def readable() -> None:
            os.eventfd_read(fd)
            waiter.set_result(None)

        loop.add_reader(fd, readable)
        for _ in range(ops):
            waiter = loop.create_future()
            call_soon(ring)
            await waiter
        loop.remove_reader(fd)

    async def bare_trio(ops: int) -> None:
        for _ in range(ops):
            call_soon(ring)
            await trio.lowlevel.wait_readable(fd)
            os.eventfd_read(fd)

    def ring() -> None:
        os.eventfd_write(fd, 1)

    await measure(f"parked, {loop_name}", wake, 500)
    await measure(f"bare, {loop_name}", bare_trio if loop_name == "trio" else bare_asyncio, 500)
    os.close(fd)


attach()
uvloop.run(run(20, awaited))
uvloop.run(run_mlx5())
for loop_name in ("asyncio", "uvloop", "trio"):
    if loop_name == "trio":
        trio.run(run, 0, parked)
    else:
        factory = uvloop.new_event_loop if loop_name == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run(0, parked))

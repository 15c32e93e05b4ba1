"""aiordma: DEVICE WORKLOAD SIZE WINDOW QPS LOOP SPIN_US

write      WINDOW in flight, each awaited, a new one for each that completes
turns      the same, where QPS queue pairs take turns
regions    the same, and ten times as many memory regions of SIZE take turns too; pages: each region on a page of its own
batch      WINDOW at a time with one doorbell and one Completion; repost: built once, posted again and again
tasks      WINDOW tasks, each awaiting one write at a time
write2     as write, to another process; target is that other process
pingpong   messages there and back
fanout     to 64 DC targets in turn from a pool of one initiator with 16 streams
memcpy     copies by the device; copy: by a DmaEngine, which takes a coroutine each
strided    a block of a matrix through an mkey (UMR); packed: through a staging buffer filled by numpy
heap       bytes of Python heap for each of so many operations in flight
rss        resident memory while so many operations pass
qp_memory  resident memory of so many queue pairs, of each
idle       CPU time of a loop with an open device; waiting: and of an await for which nothing comes
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import protocol
from protocol import Options

import aiordma
from aiordma import mlx5

Runner = Callable[[int], Awaitable[int]]
LINE, PAGE = 64, 4096  # bytes
MANY = 32_000  # entries of a CQ: room for a thousand queue pairs of 16 sends and their peers
ROW, PITCH = 256, 1024  # of the strided block, as benchmarks/c/strided.c


@asynccontextmanager
async def connected(
    device: aiordma.Device, o: Options, create: Callable[..., Any] | None = None, **more: Any
) -> AsyncIterator[list[Any]]:
    """QPs that post, each connected to a peer of this process, which comes behind them all."""
    make = create or (lambda **config: device.create_qp(**config))
    config = {"max_send_wr": o.depth, "max_recv_wr": 16, "max_send_sge": 1, "max_recv_sge": 1, "max_rd_atomic": 1}
    active = [await make(**config, **more) for _ in range(o.qps)]
    passive = [await device.create_qp(**config) for _ in range(o.qps)]
    try:
        for here, there in zip(active, passive, strict=True):
            await here.connect(there.info)
            await there.connect(here.info)
        yield active + passive
    finally:
        for closing in [qp.close() for qp in active + passive]:
            await closing


@asynccontextmanager
async def both_ends(device: aiordma.Device, o: Options) -> AsyncIterator[tuple[list[Any], Any, Any]]:
    """QPs as connected() makes them, SIZE bytes to write, and the place that they are written to."""
    async with (
        device.reg_mr(protocol.memory(o.size)) as source,
        device.reg_mr(protocol.memory(o.size)) as target,
        connected(device, o) as qps,
    ):
        yield qps, source[0 : o.size], target.remote()[0 : o.size]


def one_at_a_time(qp: Any, local: Any, remote: Any) -> Runner:
    async def run(ops: int) -> int:
        write = qp.rdma_write
        for _ in range(ops):
            await write(local, remote)
        return ops

    return run


def windowed(post: Callable[[], Any], window: int) -> Runner:
    """``post()`` gives an awaitable that is under way."""

    async def run(ops: int) -> int:
        flying = deque(post() for _ in range(min(window, ops)))
        for _ in range(ops - len(flying)):
            await flying.popleft()
            flying.append(post())
        while flying:
            await flying.popleft()
        return ops

    return run


def windowed_on_one(write: Any, local: Any, remote: Any, window: int) -> Runner:
    """The same for one QP's writes, without a call of a Python function for each."""

    async def run(ops: int) -> int:
        flying = deque(write(local, remote) for _ in range(min(window, ops)))
        take, put = flying.popleft, flying.append
        for _ in range(ops - len(flying)):
            await take()
            put(write(local, remote))
        while flying:
            await take()
        return ops

    return run


def windowed_writes(qps: list[Any], locals_: list[Any], remote: Any, window: int) -> Runner:
    async def run(ops: int) -> int:
        flying: deque[Any] = deque()
        n, m = len(qps), len(locals_)
        for i in range(ops):
            if i >= window:
                await flying.popleft()
            flying.append(qps[i % n].rdma_write(locals_[i % m], remote))
        while flying:
            await flying.popleft()
        return ops

    return run


async def write(device: aiordma.Device, o: Options) -> None:
    async with both_ends(device, o) as (qps, local, remote):
        if o.window == 1:
            await protocol.serve_async(one_at_a_time(qps[0], local, remote), lambda: qps[0].rdma_write(local, remote))
        else:
            await protocol.serve_async(windowed_on_one(qps[0].rdma_write, local, remote, o.window))


async def turns(device: aiordma.Device, o: Options) -> None:
    async with both_ends(device, o) as (qps, local, remote):
        await protocol.serve_async(windowed_writes(qps[: o.qps], [local], remote, o.window))


async def regions(device: aiordma.Device, o: Options, apart: int = LINE) -> None:
    """``apart``: bytes from a region's beginning to the next one's, at least SIZE."""
    buffer = memoryview(protocol.memory(apart * 10 * o.qps))
    async with (
        AsyncExitStack() as stack,
        device.reg_mr(protocol.memory(o.size)) as target,
        connected(device, o) as qps,
    ):
        pieces = [buffer[i : i + o.size] for i in range(0, len(buffer), apart)]
        sources = [await stack.enter_async_context(device.reg_mr(piece)) for piece in pieces]
        locals_, remote = [source[0 : o.size] for source in sources], target.remote()[0 : o.size]
        await protocol.serve_async(windowed_writes(qps[: o.qps], locals_, remote, o.window))


async def pages(device: aiordma.Device, o: Options) -> None:
    await regions(device, o, PAGE)


async def batch(device: aiordma.Device, o: Options) -> None:
    async with both_ends(device, o) as (qps, local, remote):
        pairs = [(local, remote)] * o.window

        async def run(ops: int) -> int:
            done = 0
            while done < ops:
                await qps[0].rdma_write_many(pairs)
                done += o.window
            return done

        await protocol.serve_async(run)


async def repost(device: aiordma.Device, o: Options) -> None:
    async with both_ends(device, o) as (qps, local, remote):
        built = qps[0].batch()
        for _ in range(o.window):
            built.rdma_write(local, remote)

        async def run(ops: int) -> int:
            done = 0
            while done < ops:
                await built.repost()
                done += o.window
            return done

        await protocol.serve_async(run)


async def tasks(device: aiordma.Device, o: Options) -> None:
    async with both_ends(device, o) as (qps, local, remote):
        each = one_at_a_time(qps[0], local, remote)

        async def run(ops: int) -> int:
            share = -(-ops // o.window)
            async with anyio.create_task_group() as group:
                for _ in range(o.window):
                    group.start_soon(each, share)
            return share * o.window

        await protocol.serve_async(run)


async def write2(device: aiordma.Device, o: Options) -> None:
    command = [sys.executable, __file__, o.device, "target", str(o.size), "1", "1", *o.rest]
    config = {"max_send_wr": o.depth, "max_recv_wr": 16, "max_send_sge": 1, "max_recv_sge": 1, "max_rd_atomic": 1}
    async with device.reg_mr(protocol.memory(o.size)) as source, device.create_qp(**config) as qp:
        # Blocking reads: nothing else happens on this loop yet.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:  # noqa: ASYNC220
            assert peer.stdin is not None
            assert peer.stdout is not None
            info, memory = peer.stdout.readline(), peer.stdout.readline()
            peer.stdin.write(qp.info.to_json() + "\n")
            peer.stdin.flush()
            await qp.connect(aiordma.QPInfo.from_json(info))
            peer.stdout.readline()
            local, remote = source[0 : o.size], aiordma.RemoteBuffer.from_json(json.loads(memory))[0 : o.size]
            if o.window == 1:
                await protocol.serve_async(one_at_a_time(qp, local, remote), lambda: qp.rdma_write(local, remote))
            else:
                await protocol.serve_async(windowed_on_one(qp.rdma_write, local, remote, o.window))


async def target(device: aiordma.Device, o: Options) -> None:
    config = {"max_send_wr": 16, "max_recv_wr": 16, "max_send_sge": 1, "max_recv_sge": 1, "max_rd_atomic": 1}
    async with device.reg_mr(protocol.memory(o.size)) as memory, device.create_qp(**config) as qp:
        print(qp.info.to_json(), json.dumps(memory.remote().to_json()), sep="\n", flush=True)
        await qp.connect(aiordma.QPInfo.from_json(sys.stdin.readline()))
        print("connected", flush=True)
        sys.stdin.read()  # until the other ends; the device does the rest


async def pingpong(device: aiordma.Device, o: Options) -> None:
    async with (
        device.reg_mr(protocol.memory(o.size)) as source,
        device.reg_mr(protocol.memory(o.size)) as sink,
        connected(device, o) as qps,
    ):
        local, place = source[0 : o.size], sink[0 : o.size]
        receives = [deque(qp.recv(place) for _ in range(4)) for qp in qps]
        turn = 0

        async def message() -> None:
            nonlocal turn
            sender, receiver = qps[turn], qps[1 - turn]
            turn = 1 - turn
            sent = sender.send(local)
            await receives[turn].popleft()
            receives[turn].append(receiver.recv(place))
            await sent

        async def run(ops: int) -> int:
            for _ in range(ops):
                await message()
            return ops

        await protocol.serve_async(run, message)
        for closing in [qp.close() for qp in qps]:
            await closing
        for queue in receives:
            for receive in queue:
                receive.on_finish(receive.exception)  # flushed, which is as it should be


async def fanout(device: aiordma.Device, o: Options) -> None:
    config = aiordma.QPConfig(max_send_wr=o.depth, max_send_sge=1, max_rd_atomic=1)
    async with (
        device.reg_mr(protocol.memory(o.size)) as source,
        device.reg_mr(protocol.memory(o.size)) as sink,
        device.create_srq(16) as srq,
        mlx5.create_dci_pool(device, 1, log_streams=4, config=config) as pool,
    ):
        targets = [await mlx5.create_dc_target(device, srq) for _ in range(64)]
        peers = [await pool.reach(target.info) for target in targets]
        local, remote, turn = source[0 : o.size], sink.remote()[0 : o.size], 0

        def post() -> Any:
            nonlocal turn
            turn = turn + 1 & 63
            return pool.rdma_write(peers[turn], local, remote)

        await protocol.serve_async(windowed(post, o.window))
        await device.close()


async def memcpy(device: aiordma.Device, o: Options) -> None:
    async with (
        device.reg_mr(protocol.memory(o.size)) as source,
        device.reg_mr(protocol.memory(o.size)) as sink,
        mlx5.create_dma_engine(device, depth=o.depth) as engine,
    ):
        local, remote = source[0 : o.size], sink[0 : o.size]
        post = engine.copy if o.workload == "copy" else engine.qp.memcpy

        async def one(ops: int) -> int:
            for _ in range(ops):
                await post(remote, local)
            return ops

        many = windowed(lambda: engine.qp.memcpy(remote, local), o.window)
        await protocol.serve_async(one if o.window == 1 else many)


copy = memcpy


@asynccontextmanager
async def matrix(device: aiordma.Device, o: Options) -> AsyncIterator[tuple[Any, Any, Any, Any]]:
    """A view of a matrix, its region, where it's to go, and the QP."""
    import numpy as np

    rows = o.size // ROW
    whole = np.frombuffer(protocol.memory(rows * PITCH), "u1").reshape(rows, PITCH)

    def create(**config: Any) -> Any:
        return mlx5.create_qp(device, max_umr_entries=4, **config)

    async with (
        device.reg_mr(whole) as region,
        device.reg_mr(protocol.memory(o.size)) as sink,
        connected(device, o, create) as qps,
    ):
        yield whole[:, :ROW], region, sink.remote()[0 : o.size], qps[0]


async def strided(device: aiordma.Device, o: Options) -> None:
    async with matrix(device, o) as (view, region, remote, qp), mlx5.create_mkey(device, 4) as mkey:
        block = await qp.map_strided(mkey, view, mr=region)
        await protocol.serve_async(windowed_on_one(qp.rdma_write, block, remote, o.window))


async def packed(device: aiordma.Device, o: Options) -> None:
    import numpy as np

    async with (
        device.reg_mr(protocol.memory(o.size * o.window)) as staging,
        matrix(device, o) as (view, _region, remote, qp),
    ):
        places = [staging[i * o.size : (i + 1) * o.size] for i in range(o.window)]
        arrays = [np.frombuffer(place.view(), "u1").reshape(view.shape) for place in places]
        turn = 0

        def post() -> Any:
            nonlocal turn
            turn = (turn + 1) % o.window
            np.copyto(arrays[turn], view)
            return qp.rdma_write(places[turn], remote)

        await protocol.serve_async(windowed(post, o.window))


# ---------------------------------------------------------------- what isn't a time an operation


async def heap(device: aiordma.Device, o: Options) -> None:
    async with both_ends(device, o) as (qps, local, remote):
        write = qps[0].rdma_write

        async def measure(number: int) -> dict[str, Any]:
            held: list[Any] = [None] * number
            found = {}
            # Twice: the first time makes what stays, as the growth of tables.
            for _ in range(2):
                gc.collect()
                tracemalloc.start()
                before = tracemalloc.get_traced_memory()[0]
                for i in range(number):
                    held[i] = write(local, remote)
                found["bytes"] = (tracemalloc.get_traced_memory()[0] - before) / number
                tracemalloc.stop()
                for i in range(number):
                    await held[i]
                    held[i] = None
            return found

        await protocol.answer_async(measure)


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


async def rss(device: aiordma.Device, o: Options) -> None:
    async with both_ends(device, o) as (qps, local, remote):
        run = windowed_on_one(qps[0].rdma_write, local, remote, o.window)

        async def measure(number: int) -> dict[str, Any]:
            found = []
            for _ in range(10):
                await run(number // 10)
                found.append(resident())
            return {"rss": found, "ops": number // 10 * 10}

        await protocol.answer_async(measure)


async def qp_memory(device: aiordma.Device, o: Options) -> None:
    async def measure(number: int) -> dict[str, Any]:
        async with connected(device, o):  # what is there once
            before = resident()
            async with connected(device, replace(o, qps=number // 2)):
                return {"bytes": (resident() - before) / number}
        raise AssertionError

    await protocol.answer_async(measure)


async def spent(what: Awaitable[Any]) -> dict[str, Any]:
    began, thread, process = time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()
    await what
    return {
        "ns": time.perf_counter_ns() - began,
        "loop_cpu_ns": time.thread_time_ns() - thread,
        "process_cpu_ns": time.process_time_ns() - process,
    }


async def idle(device: aiordma.Device, o: Options) -> None:
    await anyio.sleep(0.01)  # the first time imports something
    await protocol.answer_async(lambda ms: spent(anyio.sleep(ms / 1000)))


async def waiting(device: aiordma.Device, o: Options) -> None:
    async with device.reg_mr(protocol.memory(o.size)) as sink, connected(device, o) as qps:
        await anyio.sleep(0.01)  # the first time imports something

        async def measure(ms: int) -> dict[str, Any]:
            receive = qps[1].recv(sink[0 : o.size])

            async def send_late() -> None:
                await anyio.sleep(ms / 1000)
                await qps[0].send(b"x" * min(o.size, 8))

            async with anyio.create_task_group() as group:
                group.start_soon(send_late)
                return await spent(receive)
            raise AssertionError

        await protocol.answer_async(measure)


WORKLOADS = {"copy": copy} | {
    f.__name__: f
    for f in (
        write,
        turns,
        regions,
        pages,
        batch,
        repost,
        tasks,
        write2,
        target,
        pingpong,
        fanout,
        memcpy,
        strided,
        packed,
        heap,
        rss,
        qp_memory,
        idle,
        waiting,
    )
}


async def main(o: Options, spin_us: float) -> None:
    # A few queue pairs or a thousand: they take turns on one CQ, the same in each case.
    cq_depth = MANY if o.workload in ("turns", "regions", "pages") else None
    async with aiordma.open_device(o.device, spin_us=spin_us, cq_depth=cq_depth) as device:
        await WORKLOADS[o.workload](device, o)


if __name__ == "__main__":
    os.environ.setdefault("AIORDMA_EMULATOR_LOG", "error")
    chosen = protocol.options()
    protocol.run_on(chosen.rest[0], main, chosen, float(chosen.rest[1]))

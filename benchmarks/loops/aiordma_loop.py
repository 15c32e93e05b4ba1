"""8-byte RDMA writes with aiordma, awaited.

aiordma_loop.py DEVICE one|many|batch SLICES OPS N LOOP SPIN_US

LOOP is asyncio, uvloop or trio. Prints one line of JSON, as benchmarks/c/write_loop.c does.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable

import aiordma


async def one_at_a_time(
    qp: aiordma.QueuePair, local: aiordma.MemorySlice, remote: aiordma.RemoteBuffer, ops: int
) -> None:
    for _ in range(ops):
        await qp.rdma_write(local, remote)


def many(outstanding: int) -> Callable[..., Awaitable[None]]:
    async def loop(qp: aiordma.QueuePair, local: aiordma.MemorySlice, remote: aiordma.RemoteBuffer, ops: int) -> None:
        writes = deque(qp.rdma_write(local, remote) for _ in range(min(outstanding, ops)))
        for _ in range(ops - len(writes)):
            await writes.popleft()
            writes.append(qp.rdma_write(local, remote))
        for write in writes:
            await write

    return loop


def batches(size: int) -> Callable[..., Awaitable[None]]:
    async def loop(qp: aiordma.QueuePair, local: aiordma.MemorySlice, remote: aiordma.RemoteBuffer, ops: int) -> None:
        pairs = [(local, remote)] * size
        for _ in range(ops // size):
            await qp.rdma_write_many(pairs)

    return loop


async def main(device_name: str, mode: str, slices: int, ops: int, n: int, spin_us: float) -> None:
    loop = {"one": one_at_a_time, "many": many(n), "batch": batches(n)}[mode]
    if mode == "batch":
        ops -= ops % n
    async with (
        aiordma.open_device(device_name, spin_us=spin_us) as device,
        device.reg_mr(bytearray(8)) as source,
        device.reg_mr(bytearray(8)) as target,
        device.create_qp() as here,
        device.create_qp() as there,
    ):
        await here.connect(there.info)
        await there.connect(here.info)
        local, remote = source[0:8], target.remote()
        await loop(here, local, remote, ops)  # warm up
        ns = []
        for _ in range(slices):
            began = time.perf_counter_ns()
            await loop(here, local, remote, ops)
            ns.append(round((time.perf_counter_ns() - began) / ops, 1))
        print(json.dumps({"ns": ns}))


device_name, mode, slices, ops, n, loop_name, spin_us = sys.argv[1:]
arguments = (device_name, mode, int(slices), int(ops), int(n), float(spin_us))
if loop_name == "trio":
    import trio

    trio.run(main, *arguments)
else:
    factory = None
    if loop_name == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(*arguments))

"""Copying by the device, beside an event loop that has other things to do.

Run it:  python examples/dma_memcpy.py
"""

import asyncio
import time

import aiordma
from aiordma import mlx5

MIB = 1 << 20


async def heartbeat(stop: asyncio.Event) -> tuple[int, float]:
    """What the loop is there for: something every millisecond. Tells how often, and the longest it had to wait."""
    beats, longest, last = 0, 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        beats, longest, last = beats + 1, max(longest, now - last), now
    return beats, longest


async def main() -> None:
    cache = bytearray(b"a cached page... " * (2 * MIB // 17 + 1))[: 2 * MIB]
    frames = bytearray(8 * MIB)
    async with (
        aiordma.open_device() as device,
        device.reg_mr(cache, aiordma.Access.NONE) as source,
        device.reg_mr(frames) as target,
        # A pair of queue pairs of its own. Longer copies than `chunk` are split, several pieces in flight.
        mlx5.create_dma_engine(device, depth=8, chunk=256 * 1024) as engine,
    ):
        print(f"device: {device.describe()}")

        # The loop goes on while the device copies.
        stop = asyncio.Event()
        beating = asyncio.create_task(heartbeat(stop))
        await engine.copy(
            target[0 : 2 * MIB],
            source,
            progress=lambda done, total: print(f"  {done * 100 // total}%") if done % MIB == 0 else None,
        )
        print(f"copied: {frames[: 2 * MIB] == cache}")

        # Many small ones at once: scattered pages into one frame.
        pages = [(target[4 * MIB + 4096 * i :][:4096], source[4096 * (7 * i % 512) :][:4096]) for i in range(64)]
        print(f"gathered {await engine.copy_many(pages):,} bytes of {len(pages)} pages")
        expected = b"".join(cache[4096 * (7 * i % 512) :][:4096] for i in range(64))
        print(f"gathered right: {frames[4 * MIB : 4 * MIB + 64 * 4096] == expected}")

        # One after the other: the second waits for the first on the device, not here.
        first = engine.qp.memcpy(target[6 * MIB : 6 * MIB + 4096], source[0:4096])
        await engine.copy(target[7 * MIB : 7 * MIB + 4096], target[6 * MIB : 6 * MIB + 4096], after=first)
        print(f"chained: {frames[7 * MIB : 7 * MIB + 4096] == cache[:4096]}")

        stop.set()
        beats, longest = await beating
        print(f"meanwhile the loop ran on: {beats > 0} ({beats} beats, the longest wait {longest * 1000:.1f} ms)")


asyncio.run(main())

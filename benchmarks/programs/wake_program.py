"""How long a loop takes to be woken through a descriptor, with nothing else: DEVICE WORKLOAD SIZE WINDOW QPS LOOP LIBRARY

  wake_self     this thread writes to an eventfd, and awaits the future that its reader resolves
  wake_thread   a thread in C, which sees a word of memory change, writes to it (LIBRARY: benchmarks/c/echo.c, built)

DEVICE, SIZE, WINDOW and QPS mean nothing here.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Awaitable, Callable

import protocol
from protocol import Options


async def asyncio_loop(descriptor: int, ring: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        os.read(descriptor, 8)
        waiter.set_result(None)

    async def one() -> None:
        nonlocal waiter
        waiter = loop.create_future()
        ring()
        await waiter

    loop.add_reader(descriptor, readable)
    return one


async def trio_loop(descriptor: int, ring: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    import trio

    async def one() -> None:
        ring()
        await trio.lowlevel.wait_readable(descriptor)
        os.read(descriptor, 8)

    return one


async def main(o: Options) -> None:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    word = memoryview(bytearray(8)).cast("Q")
    library = ctypes.CDLL(o.rest[1])

    def change() -> None:
        word[0] += 1

    def write() -> None:
        os.eventfd_write(descriptor, 1)

    by_thread = o.workload == "wake_thread"
    make = trio_loop if o.rest[0] == "trio" else asyncio_loop
    one = await make(descriptor, change if by_thread else write)

    async def run(ops: int) -> int:
        if by_thread:
            library.echo_start(ctypes.byref(ctypes.c_uint64.from_buffer(word)), descriptor)
        try:
            for _ in range(ops):
                await one()
        finally:
            if by_thread:
                library.echo_stop()
        return ops

    await protocol.serve_async(run, None if by_thread else one)


if __name__ == "__main__":
    chosen = protocol.options()
    protocol.run_on(chosen.rest[0], main, chosen)

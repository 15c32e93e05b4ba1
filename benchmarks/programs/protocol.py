"""What the Python contenders share: the protocol with bench.py (benchmarks/c/harness.h describes it), and memory."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

#: As aiordma's QPConfig and benchmarks/c/harness.h: what is no longer goes inline.
INLINE = 64
PORT = 1


@dataclass(frozen=True)
class Options:
    """The words after the program's name. ``rest``: what only this program knows."""

    device: str
    workload: str
    size: int
    window: int
    qps: int
    rest: tuple[str, ...]

    @property
    def depth(self) -> int:
        """Work requests that a send queue has room for, in every contender."""
        return 16 if self.workload in ("turns", "regions", "pages", "qp_memory") else max(self.window, 128)


def options() -> Options:
    device, workload, size, window, qps, *rest = sys.argv[1:]
    return Options(device, workload, int(size), int(window), int(qps), tuple(rest))


def memory(size: int) -> mmap.mmap:
    """Page-aligned, like the C contenders': copying is faster then."""
    found = mmap.mmap(-1, max(size, 8))
    found.write(b"\x5a" * len(found))
    return found


def sysfs_roots() -> list[str]:
    """Where /sys may lie: the emulated NIC's is named by SYSFS_PATH, which stands for /sys itself."""
    return [path.removesuffix("/") for path in (os.environ.get("SYSFS_PATH"), "/sys") if path]


def reply(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _requests() -> Iterator[tuple[str, int]]:
    print("ready", flush=True)
    for line in sys.stdin:
        word, number = line.split()
        yield word, int(number)


def serve(run: Callable[[int], int]) -> None:
    """``run(ops)`` does ops operations, or where they go in groups, some more, and tells how many."""
    for word, ops in _requests():
        if word == "run":
            cpu, began = time.thread_time_ns(), time.perf_counter_ns()
            done = run(ops)
            ended = time.perf_counter_ns()
            reply({"ns": ended - began, "ops": done, "cpu_ns": time.thread_time_ns() - cpu})
        else:
            samples, last = [], time.perf_counter_ns()
            for _ in range(ops):
                run(1)
                now = time.perf_counter_ns()
                samples.append(now - last)
                last = now
            reply({"samples": samples})


async def serve_async(run: Callable[[int], Awaitable[int]], one: Callable[[], Awaitable[object]] | None = None) -> None:
    """The same for coroutines. Standard input is read without the loop's help: between runs there is nothing else to do.

    ``one``: an awaitable for a single operation, for samples.
    """
    for word, ops in _requests():
        if word == "run":
            cpu, began = time.thread_time_ns(), time.perf_counter_ns()
            done = await run(ops)
            ended = time.perf_counter_ns()
            reply({"ns": ended - began, "ops": done, "cpu_ns": time.thread_time_ns() - cpu})
        else:
            assert one is not None, "this workload has no samples"
            samples, last = [], time.perf_counter_ns()
            for _ in range(ops):
                await one()
                now = time.perf_counter_ns()
                samples.append(now - last)
                last = now
            reply({"samples": samples})


async def answer_async(measure: Callable[[int], Awaitable[dict[str, Any]]]) -> None:
    """For what isn't a time an operation: whatever ``measure(number)`` gives is the answer."""
    for _word, number in _requests():
        reply(await measure(number))


def run_on(loop_name: str, main: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """``main`` on asyncio, uvloop or trio."""
    if loop_name == "trio":
        import trio

        trio.run(main, *arguments)
        return
    factory = None
    if loop_name == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(*arguments))  # type: ignore[arg-type]  # a coroutine

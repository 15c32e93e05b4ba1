"""asyncio, and uvloop, which is an asyncio loop."""

from __future__ import annotations

import asyncio
from asyncio.events import _get_running_loop
from collections.abc import Callable, Iterator
from typing import Any

from aiordma._backends import Finishing
from aiordma._waitable import FutureWait, Waitable, YieldOnce

__all__ = ["AsyncioBackend", "find"]


def find() -> AsyncioBackend | None:
    """A backend for the asyncio loop that runs in this thread."""
    loop = _get_running_loop()
    return None if loop is None else AsyncioBackend(loop)


class _ReaderWatch:
    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        # A closed loop has forgotten its readers.
        if fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(fd)


class AsyncioBackend:
    """One asyncio loop. A parked task waits on a Future of the loop's own making."""

    name = "asyncio"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        # The C function itself: it's called for every posted operation.
        self.running_loop: Callable[[], object | None] = _get_running_loop
        self._create_future = loop.create_future
        self.call_soon: Callable[[Callable[[], object]], object] = loop.call_soon
        self.call_soon_threadsafe: Callable[[Callable[[], object]], object] = loop.call_soon_threadsafe

    def wait(self, waitable: Waitable) -> Iterator[Any]:
        return FutureWait(waitable, self._create_future)

    def wake(self, waiter: asyncio.Future[None]) -> None:
        # A cancelled task has cancelled its Future already.
        if not waiter.done():
            try:
                waiter.set_result(None)
            except RuntimeError:
                # The loop was closed with its tasks still waiting: there is nobody to wake any more.
                if not self.loop.is_closed():
                    raise

    def yield_once(self, waitable: Waitable) -> Iterator[Any]:
        return YieldOnce(waitable)

    def watch(self, fd: int, callback: Callable[[], object]) -> _ReaderWatch:
        self.loop.add_reader(fd, callback)
        return _ReaderWatch(self.loop, fd)

    async def shielded(self, waitable: Finishing) -> None:
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await waitable
                break
            except asyncio.CancelledError as e:
                if waitable.done:
                    raise
                # It goes on by itself; whoever cancelled waits until what must be undone is undone.
                cancelled = e
        if cancelled is not None:
            raise cancelled

    def report(self, message: str, exception: BaseException) -> None:
        self.loop.call_exception_handler({"message": message, "exception": exception})

"""The event loops. Nothing outside this package knows which one runs.

:func:`current` gives the backend of the running loop: asyncio (uvloop included, which is an asyncio loop) or trio.
"""

from __future__ import annotations

import sys
from asyncio.events import _get_running_loop
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from aiordma._waitable import Waitable
from aiordma.errors import WrongLoopError

__all__ = ["Backend", "Finishing", "Watch", "current"]


class Watch(Protocol):
    """A watched file descriptor. ``close()`` on the loop's thread, before the descriptor is closed."""

    def close(self) -> None: ...


class Finishing(Protocol):
    """Something that finishes whether it's awaited or not."""

    @property
    def done(self) -> bool: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class Backend(Protocol):
    """What the rest of aiordma needs of an event loop; one object for each loop and device."""

    name: str

    @property
    def loop(self) -> object:
        """What identifies the loop: the asyncio loop, or trio's token."""

    def running_loop(self) -> object | None:
        """The loop that runs in this thread, to compare with ``loop``."""

    def wait(self, waitable: Waitable) -> Iterator[Any]:
        """The iterator of an await on ``waitable`` that parks the running task."""

    def wake(self, waiter: Any) -> None:
        """Ends the wait of a waiter that ``wait`` registered. On the loop's thread."""

    def yield_once(self, waitable: Waitable) -> Iterator[Any]:
        """The iterator of an await on a finished ``waitable`` that gives the other tasks one turn."""

    def call_soon(self, fn: Callable[[], object], /) -> object:
        """Runs ``fn`` on the loop in its next turn. On the loop's thread."""

    def call_soon_threadsafe(self, fn: Callable[[], object], /) -> object:
        """The same, from any thread; :class:`RuntimeError` when the loop is closed."""

    def watch(self, fd: int, callback: Callable[[], object]) -> Watch:
        """Calls ``callback`` whenever ``fd`` is readable."""

    async def shielded(self, waitable: Finishing) -> None:
        """Awaits to the end, however often the running task is cancelled meanwhile; the cancellation comes after."""

    def report(self, message: str, exception: BaseException) -> None:
        """An error that nobody awaits."""


def running() -> object | None:
    """What identifies the loop that runs in this thread, whichever library's it is; None if none does."""
    if "trio" in sys.modules:
        from aiordma._backends.trio import running_token

        token = running_token()
        if token is not None:
            return token
    return _get_running_loop()


def current() -> Backend:
    """The backend of the loop that runs now; :class:`WrongLoopError` outside of any."""
    # A trio task can run inside an asyncio loop in guest mode, so trio is asked first, and only if it's loaded.
    if "trio" in sys.modules:
        from aiordma._backends import trio as trio_backend

        found = trio_backend.find()
        if found is not None:
            return found
    from aiordma._backends import asyncio as asyncio_backend

    found_asyncio = asyncio_backend.find()
    if found_asyncio is not None:
        return found_asyncio
    raise WrongLoopError("no event loop runs here: call this from a coroutine under asyncio, uvloop or trio")

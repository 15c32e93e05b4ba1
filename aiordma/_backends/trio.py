"""trio: parked tasks are rescheduled, descriptors are watched by a system task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import trio

from aiordma._backends import Finishing
from aiordma._waitable import Waitable

__all__ = ["TrioBackend", "find", "running_token"]

_log = logging.getLogger("aiordma")


def running_token() -> trio.lowlevel.TrioToken | None:
    """What identifies the trio run of this thread, if there is one."""
    try:
        return trio.lowlevel.current_trio_token()
    except RuntimeError:
        return None


def find() -> TrioBackend | None:
    """A backend for the trio run of this thread."""
    token = running_token()
    return None if token is None else TrioBackend(token)


class _TaskWatch:
    """A system task that waits for the descriptor; trio allows one waiter for each, so there is one task."""

    def __init__(self, fd: int, callback: Callable[[], object]) -> None:
        self._fd = fd
        self._callback = callback
        self._scope = trio.CancelScope()
        self._closed = False
        trio.lowlevel.spawn_system_task(self._run, name=f"aiordma watch fd {fd}")

    async def _run(self) -> None:
        with self._scope:
            while not self._closed:
                try:
                    await trio.lowlevel.wait_readable(self._fd)
                except trio.ClosedResourceError:
                    return
                if not self._closed:
                    self._callback()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if running_token() is not None:
                # The waiting task must leave epoll before the descriptor is closed, or it would watch its successor.
                trio.lowlevel.notify_closing(self._fd)
            self._scope.cancel()


class _Pump:
    """Calls functions in the next turn: a system task that is rescheduled for it.

    run_sync_soon() would do, but it's made for other threads: it writes to a socket that wakes the loop, and takes some ten
    times as long.
    """

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._due: list[Callable[[], object]] = []
        self._parked = False
        self._ended = False
        self._task = trio.lowlevel.spawn_system_task(self._run, name="aiordma pump")

    def call(self, fn: Callable[[], object]) -> None:
        if self._ended:
            self._token.run_sync_soon(fn)
            return
        self._due.append(fn)
        if self._parked:
            self._parked = False
            trio.lowlevel.reschedule(self._task)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._parked = False
        return trio.lowlevel.Abort.SUCCEEDED

    async def _run(self) -> None:
        try:
            while True:
                due, self._due = self._due, []
                for fn in due:
                    fn()
                if self._due:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                else:
                    self._parked = True
                    await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            # The run is about to end, but isn't over.
            self._ended = True
            for fn in self._due:
                self._token.run_sync_soon(fn)


_pump: trio.lowlevel.RunVar[_Pump] = trio.lowlevel.RunVar("aiordma_pump")


class TrioBackend:
    """One trio run."""

    name = "trio"

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self.loop: trio.lowlevel.TrioToken = token
        try:
            pump = _pump.get()
        except LookupError:
            pump = _Pump(token)
            _pump.set(pump)
        self.call_soon: Callable[[Callable[[], object]], object] = pump.call

    def running_loop(self) -> object | None:
        return running_token()

    def wait(self, waitable: Waitable) -> Iterator[Any]:
        return self._wait(waitable).__await__()

    async def _wait(self, waitable: Waitable) -> Any:
        if not waitable.done:
            task = trio.lowlevel.current_task()
            waitable.add_waiter(task)

            def abort(_: object) -> trio.lowlevel.Abort:
                waitable.remove_waiter(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        return waitable.result()

    def wake(self, waiter: trio.lowlevel.Task) -> None:
        trio.lowlevel.reschedule(waiter)

    def yield_once(self, waitable: Waitable) -> Iterator[Any]:
        return self._yield_once(waitable).__await__()

    async def _yield_once(self, waitable: Waitable) -> Any:
        await trio.lowlevel.checkpoint()
        return waitable.result()

    def call_soon_threadsafe(self, fn: Callable[[], object]) -> None:
        self.loop.run_sync_soon(fn)

    def watch(self, fd: int, callback: Callable[[], object]) -> _TaskWatch:
        return _TaskWatch(fd, callback)

    async def shielded(self, waitable: Finishing) -> None:
        with trio.CancelScope(shield=True):
            await waitable

    def report(self, message: str, exception: BaseException) -> None:
        # trio has no handler for errors outside of tasks; raising in a system task would end the whole run.
        _log.error("%s", message, exc_info=exception)

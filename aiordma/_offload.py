"""Verbs that can take milliseconds, off the loop: started at once, awaited whenever.

A control operation is a coroutine that awaits only :func:`until` and :func:`in_thread`. :class:`Pending` drives it from
callbacks rather than as a task: it runs on whether or not anybody awaits it, can't be cancelled half way, and needs
nothing of the event loop but ``call_soon_threadsafe``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from aiordma._backends import Backend
from aiordma._waitable import Alarm, Hooks, Signal, Waitable, no_copy
from aiordma.errors import ClosedError

__all__ = [
    "Control",
    "Pending",
    "delay",
    "in_thread",
    "in_use",
    "make_in_thread",
    "make_verbs_object",
    "outcome",
    "until",
    "unused",
    "using",
]

T = TypeVar("T")
P = ParamSpec("P")

_lock = threading.Lock()
_executors: dict[str, ThreadPoolExecutor] = {}
# Few: the kernel serialises most control verbs of one context anyway. One for what makes objects: make_verbs_object().
_THREADS = {"aiordma-verbs": 8, "aiordma-make": 1}


def _threads(kind: str) -> ThreadPoolExecutor:
    with _lock:
        if kind not in _executors:
            _executors[kind] = ThreadPoolExecutor(max_workers=_THREADS[kind], thread_name_prefix=kind)
        return _executors[kind]


def _forget_threads() -> None:
    global _lock
    _executors.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


class Control:
    """What control operations of one device need: its backend and hooks."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.hooks = Hooks(backend)
        # Calls under way on verbs objects, by the object's address, and who waits for them to end: see using().
        self.users: dict[int, int] = {}
        self.waiting: dict[int, list[Signal]] = {}
        # How to destroy what worker threads made, while its way to the loop isn't over: see make_in_thread().
        self.undelivered: dict[object, Callable[[], object]] = {}


@types.coroutine
def until(waitable: Waitable) -> Generator[Waitable, None, Any]:
    """Inside a control operation: waits for ``waitable`` and gives its result."""
    if not waitable.done:
        yield waitable
    return waitable.result()


async def _run(kind: str, control: Control, fn: Callable[[], T]) -> T:
    signal = Signal(control.hooks)

    def run() -> None:
        try:
            value = fn()
        except BaseException as e:
            _deliver(control, signal.fail, e)
        else:
            _deliver(control, signal.finish, value)

    _threads(kind).submit(run)
    result: T = await until(signal)
    return result


async def in_thread(control: Control, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Inside a control operation: runs ``fn`` in a worker thread."""
    return await _run("aiordma-verbs", control, lambda: fn(*args, **kwargs))


async def make_verbs_object(control: Control, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like :func:`in_thread`, for what makes a queue through pyverbs: one at a time, and always in the same thread.

    pyverbs has the GIL meanwhile, so that one would wait for another in any case. But glibc has memory for each thread
    (its "arenas", which begin 64 MiB apart): a thousand queue pairs that were made in three threads take a quarter longer to
    post on in turn than those of one.
    """
    return await _run("aiordma-make", control, lambda: fn(*args, **kwargs))


async def make_in_thread(control: Control, destroy: Callable[[T], object], fn: Callable[..., T], *args: Any) -> T:
    """Like :func:`in_thread`, for what doesn't go with its last reference.

    A loop may end with the result on its way, after it took the call and before it made it: then the device's own end
    finds it.
    """
    key = object()

    def run() -> T:
        made = fn(*args)
        control.undelivered[key] = lambda: destroy(made)
        return made

    made = await in_thread(control, run)
    del control.undelivered[key]
    return made


@contextlib.contextmanager
def using(control: Control, *addresses: int) -> Iterator[None]:
    """A call on the verbs objects at ``addresses`` is under way: :func:`unused` waits for it."""
    for address in addresses:
        control.users[address] = control.users.get(address, 0) + 1
    try:
        yield
    finally:
        for address in addresses:
            control.users[address] -= 1
            if not control.users[address]:
                del control.users[address]
                for signal in control.waiting.pop(address, ()):
                    signal.finish(None)


async def in_use(control: Control, address: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like :func:`in_thread`, for a call on the verbs object at ``address``."""
    with using(control, address):
        return await in_thread(control, fn, *args, **kwargs)


async def unused(control: Control, address: int) -> None:
    """Inside a control operation, before the verbs object at ``address`` is destroyed: no call on it is under way."""
    while address in control.users:
        signal = Signal(control.hooks)
        control.waiting.setdefault(address, []).append(signal)
        await until(signal)


def _deliver(control: Control, call: Callable[[Any], None], argument: Any) -> None:
    try:
        control.backend.call_soon_threadsafe(lambda: call(argument))
    except RuntimeError:
        # The loop is closed, so nobody is there to be told; the device's own teardown finds what fn() made.
        pass


async def delay(control: Control, seconds: float) -> Signal:
    """A signal that finishes after ``seconds``; returned at once."""
    signal = Signal(control.hooks)
    timer = threading.Timer(seconds, lambda: _deliver(control, signal.finish, None))
    timer.daemon = True
    timer.start()
    signal_done: Callable[[], None] = timer.cancel
    signal.on_finish(signal_done)
    return signal


class Closable(Protocol):
    def close(self) -> Any: ...


class Pending(Generic[T]):
    """A control operation under way: it was started by the call and runs to its end, awaited or not.

    ``await`` it for the result, from any number of tasks. Where the result is something that closes (a Device,
    MemoryRegion, QueuePair), it also works as ``async with``. When the only await is cancelled before the result is
    there, the result is closed as soon as it is.

    An error that nobody awaited is reported when this goes away, as asyncio reports an exception that was never retrieved:
    to the loop's exception handler, or under trio in the log ``aiordma``. Not that it was given up because something was
    closed here.
    """

    _alarm: Alarm | None = None

    def __init__(self, control: Control, operation: Coroutine[Any, Any, T], *, dispose: bool = False) -> None:
        self._control = control
        self._operation = operation
        self._dispose = dispose
        self._abandoned = False
        self._delivered = False
        self._done_well = False
        self._waiting = 0
        self._looked_at = False
        self._signal = Signal(control.hooks)
        self._entered: T | None = None
        self._step()

    def __reduce__(self) -> NoReturn:
        no_copy(self)

    def _step(self) -> None:
        try:
            waitable = self._operation.send(None)
        except StopIteration as e:
            self._done_well = True
            if self._abandoned and self._dispose:
                e.value.close()
            self._signal.finish(e.value)
        except BaseException as e:
            # Without this frame, or the error would keep this alive, and be reported by a garbage collection.
            self._signal.fail(e.with_traceback(e.__traceback__ and e.__traceback__.tb_next))
            if not self._looked_at and not isinstance(e, ClosedError):
                self._alarm = Alarm(self._control.hooks, "a control operation failed and nobody awaited it", e)
            # In some versions of Python (3.13) a coroutine's frame, which is in the traceback, leads to this one.
            del self
        else:
            waitable.on_finish(self._step)

    @property
    def done(self) -> bool:
        """Whether it has come to its end."""
        return self._signal.done

    @property
    def ended(self) -> Signal:
        """What finishes with it, for those who wait for its end and not for its result."""
        return self._signal

    def on_done(self, fn: Callable[[], object]) -> None:
        """Calls ``fn`` on the loop's thread when it has come to its end."""
        self._signal.on_finish(fn)

    def result(self) -> T:
        """The result, once it is done."""
        self._look()
        value: T = self._signal.result()
        return value

    def _look(self) -> None:
        """Somebody hears of an error, or has given it up."""
        self._looked_at = True
        if self._alarm is not None:
            self._alarm.silence()

    async def _wait(self) -> T:
        self._look()
        self._waiting += 1
        try:
            value: T = await self._signal
        except BaseException:
            self._waiting -= 1
            if not self._waiting and not self._delivered:
                self._abandoned = True
                if self._done_well and self._dispose:
                    # Cancelled in the turn in which the result came: it was on its way, and now nobody takes it.
                    self._signal.result().close()
            raise
        self._waiting -= 1
        self._delivered = True
        return value

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def __aenter__(self) -> T:
        self._entered = await self
        return self._entered

    async def __aexit__(self, *error: Any) -> None:
        entered: Any = self._entered
        await entered.__aexit__(*error)


async def outcome(pending: Pending[T]) -> T:
    """Inside a control operation: the result of another one."""
    pending._look()
    value: T = await until(pending._signal)
    return value

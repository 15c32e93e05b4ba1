# cython: language_level=3, nonecheck=True
"""What can be awaited: the base of operations, drains and anything else that finishes on the loop's thread."""

from cpython.pythread cimport PyThread_get_thread_ident

from aiordma.errors import ForkError, WrongLoopError

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define aior_finalizing() Py_IsFinalizing()
    #else
    #define aior_finalizing() _Py_IsFinalizing()
    #endif
    """
    int aior_finalizing()

# Grows in every fork child, so that what was made before the fork is told from what the child makes itself.
cdef unsigned long _generation = 0


def after_fork_in_child() -> None:
    """From here on, whatever exists belongs to the parent."""
    global _generation
    _generation += 1


def no_copy(self):
    """``__reduce__`` of what stands for something of this process: a copy would end it when it goes, or never finish."""
    raise TypeError(f"a {type(self).__name__} can't be copied or pickled: it stands for something of this process")


def _nothing() -> None:
    pass


cdef class Hooks:
    """What an event-loop backend (aiordma._backends) lends to the data plane, as bound methods.

    ``wait(waitable)`` gives the iterator of an await that has to park, ``wake(waiter)`` ends it; ``call_soon(fn)`` runs
    fn in the next turn; ``yield_once()`` is an iterator that takes one turn; ``running_loop()`` is compared with
    ``loop``; ``report(message, exception)`` is for errors that nobody awaits.
    """

    def __init__(self, backend):
        self.wait = backend.wait
        self.wake = backend.wake
        self.call_soon = backend.call_soon
        self.report = backend.report
        self.yield_once = backend.yield_once
        self.running_loop = backend.running_loop
        self.loop = backend.loop
        self.generation = _generation
        self.thread = PyThread_get_thread_ident()

    cdef int check(self) except -1:
        """Raises unless this is the thread and, where one runs, the loop that the device was opened on."""
        if self.generation != _generation:
            raise ForkError("made before fork(): open the device again in the child")
        if PyThread_get_thread_ident() != self.thread:
            raise WrongLoopError(
                "used from another thread than the one its device was opened in: open a device in each thread, or hand "
                "the call over with loop.call_soon_threadsafe() or trio.from_thread.run_sync()"
            )
        # Asking which loop runs costs a system call on some versions of Python, so it's asked once a turn: something
        # that is scheduled for the next turn takes the mark away again.
        return 0 if self.verified else self.check_loop()

    cdef int check_loop(self) except -1:
        cdef object running = self.running_loop()
        if running is self.loop:
            return 0
        if running is None:
            # No loop of its own library, which leaves another library's.
            from aiordma._backends import running as running_of_any

            running = running_of_any()
        if running is not None:
            raise WrongLoopError(
                "used on another event loop than the one its device was opened on: open the device inside the loop that "
                "uses it (one device a loop)"
            )
        # Between two runs of its loop nothing is wrong; after its last one nobody would hear of a completion.
        try:
            self.call_soon(_nothing)
        except RuntimeError:
            raise WrongLoopError(
                "the event loop that the device was opened on has ended: close what it has before the loop ends, and "
                "open the device again in the next one"
            ) from None
        return 0

    def verify(self) -> None:
        """check(), for Python callers, with the loop always asked."""
        self.check()
        self.check_loop()


cdef class Callback:
    """A waiter that is called, on the loop's thread, instead of being woken through the backend."""

    cdef object fn

    def __init__(self, fn):
        self.fn = fn


cdef class _Ready:
    """The iterator of an await on something that has finished: no turn of the loop."""

    cdef Waitable waitable

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration(self.waitable._result())


cdef class Waitable:
    """Finishes once, on the loop's thread; any number of tasks may await it, before and after.

    Cancelling an await only detaches the waiter.
    """

    def __cinit__(self):
        self.finished = False

    def __reduce__(self):
        no_copy(self)

    cdef int _finish(self) except -1:
        """Marks it finished and wakes everything that waits. Once."""
        if self.finished:
            return 0
        self.finished = True
        cdef object waiters = self.waiters
        if waiters is not None:
            self.waiters = None
            if type(waiters) is list:
                for waiter in <list>waiters:
                    self._wake(waiter)
            else:
                self._wake(waiters)
        return 0

    cdef int _wake(self, object waiter) except -1:
        if isinstance(waiter, Callback):
            try:
                (<Callback>waiter).fn()
            except Exception as e:
                # What comes behind it, in this wait and in the CQ, has nothing to do with it.
                self.hooks.report("a callback of a finished operation failed", e)
        elif isinstance(waiter, Waitable):
            (<Waitable>waiter)._notified(self)
        else:
            self.hooks.wake(waiter)
        return 0

    cdef int _notified(self, Waitable finished) except -1:
        """One that this was added to as a waiter has finished. Raises nothing that is this one's own failure."""
        return 0

    cdef object _result(self):
        return None

    cdef int _prepare_wait(self) except -1:
        """Called before a waiter parks: a chance to finish now (poll, spin, arm)."""
        return 0

    def add_waiter(self, waiter) -> None:
        """For backends: ``waiter`` is passed to ``wake`` when this finishes."""
        self._add_waiter(waiter)

    cdef int _add_waiter(self, object waiter) except -1:
        if self.waiters is None:
            self.waiters = waiter
        elif type(self.waiters) is list:
            (<list>self.waiters).append(waiter)
        else:
            self.waiters = [self.waiters, waiter]
        return 0

    def remove_waiter(self, waiter) -> None:
        """For backends: the waiter was cancelled. Without effect when it has been woken already."""
        if self.waiters is waiter:
            self.waiters = None
        elif type(self.waiters) is list and waiter in <list>self.waiters:
            (<list>self.waiters).remove(waiter)

    def _finish_from_callback(self) -> None:
        self._finish()

    def on_finish(self, fn) -> None:
        """Calls ``fn()`` on the loop's thread when this finishes; at once if it has."""
        if self.finished:
            fn()
        else:
            self._add_waiter(Callback(fn))

    def result(self):
        """The result, or the error raised; :class:`RuntimeError` while it hasn't finished."""
        if not self.finished:
            raise RuntimeError("not finished yet: await it")
        return self._result()

    @property
    def done(self) -> bool:
        """Whether it has finished, with a result or an error."""
        return self.finished

    def __await__(self):
        if not self.finished:
            self.hooks.check()
            self._prepare_wait()
        if self.finished:
            return await_ready(self)
        self.hooks.check_loop()
        return self.hooks.wait(self)


cdef object await_ready(Waitable waitable):
    """The iterator of an await on something that has finished."""
    cdef _Ready ready = _Ready.__new__(_Ready)
    ready.waitable = waitable
    return ready


cdef class Alarm:
    """Reports a failure that nobody looked at, when what holds it goes away. Looking at it takes the error out."""

    def __init__(self, Hooks hooks not None, message, error):
        self.hooks = hooks
        self.message = message
        self.error = error

    cpdef object silence(self):
        """Somebody has looked at it."""
        self.error = None

    def __del__(self):
        # While the interpreter ends there's nobody to be told, and nothing left to do it with.
        if self.error is not None and self.hooks is not None and not aior_finalizing():
            self._ring()

    cdef int _ring(self) except -1:
        self.hooks.report(self.message, self.error)
        return 0


cdef class Signal(Waitable):
    """A bare Waitable that Python code finishes, with a value or an exception. On the loop's thread."""

    cdef object _value
    cdef object _error

    def __init__(self, Hooks hooks not None):
        self.hooks = hooks

    def finish(self, value=None) -> None:
        if not self.finished:
            self._value = value
            self._finish()

    def fail(self, error) -> None:
        if not self.finished:
            self._error = error
            self._finish()

    cdef object _result(self):
        if self._error is not None:
            raise self._error
        return self._value


cdef class FutureWait:
    """The iterator of an await that parks on a loop Future (asyncio and uvloop).

    A Task drives it as it drives ``Future.__await__``: the first step yields the Future with its blocking flag set; the
    next comes when the Future is done.
    """

    cdef Waitable waitable
    cdef object create_future
    cdef object future

    def __init__(self, Waitable waitable not None, create_future):
        self.waitable = waitable
        self.create_future = create_future

    def __iter__(self):
        return self

    def __next__(self):
        cdef object future = self.future
        if future is None:
            if self.waitable.finished:
                raise StopIteration(self.waitable._result())
            self.future = future = self.create_future()
            self.waitable.add_waiter(future)
            future._asyncio_future_blocking = True
            return future
        if not self.waitable.finished:
            raise RuntimeError("the waiter was woken by something else than its operation")
        raise StopIteration(self.waitable._result())

    def send(self, value):
        return self.__next__()

    def throw(self, type_, value=None, traceback=None):
        self._detach()
        if value is None:
            value = type_() if isinstance(type_, type) else type_
        if traceback is not None:
            value = value.with_traceback(traceback)
        raise value

    def close(self):
        self._detach()

    cdef int _detach(self) except -1:
        if self.future is not None:
            self.waitable.remove_waiter(self.future)
        return 0


cdef class YieldOnce:
    """The iterator of an await on something finished that takes one turn of an asyncio loop (a bare yield)."""

    cdef Waitable waitable
    cdef bint yielded

    def __init__(self, Waitable waitable not None):
        self.waitable = waitable

    def __iter__(self):
        return self

    def __next__(self):
        if not self.yielded:
            self.yielded = True
            return None
        raise StopIteration(self.waitable._result())

    def send(self, value):
        return self.__next__()

    def throw(self, type_, value=None, traceback=None):
        if value is None:
            value = type_() if isinstance(type_, type) else type_
        raise value

    def close(self):
        pass

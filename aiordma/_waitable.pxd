# What can be awaited, and what the event-loop backend lends to it.


cdef class Hooks:
    """What the event-loop backend lends to the data plane."""
    cdef object wait
    cdef object wake
    cdef object call_soon
    cdef object report
    cdef object running_loop
    cdef object loop
    cdef object yield_once
    cdef unsigned long thread
    cdef unsigned long generation
    cdef bint verified
    cdef int check(self) except -1
    cdef int check_loop(self) except -1


cdef class Waitable:
    cdef Hooks hooks
    cdef bint finished
    cdef object waiters
    cdef int _finish(self) except -1
    cdef int _wake(self, object waiter) except -1
    cdef object _result(self)
    cdef int _prepare_wait(self) except -1
    cdef int _notified(self, Waitable finished) except -1
    cdef int _add_waiter(self, object waiter) except -1


cdef class Alarm:
    cdef Hooks hooks
    cdef object message
    cdef object error
    cpdef object silence(self)
    cdef int _ring(self) except -1


cdef object await_ready(Waitable waitable)

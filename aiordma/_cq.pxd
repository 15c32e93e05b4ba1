# Completion queues.

from libc.stdint cimport uint32_t, uint64_t

from aiordma cimport _ibv as v
from aiordma._waitable cimport Hooks, Waitable

cdef extern from *:
    """
    #include <stdint.h>
    #include <time.h>
    static inline uint64_t aior_now_ns(void)
    {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    """
    uint64_t aior_now_ns() nogil

cdef enum:
    SEQ_BITS = 40  # of a wr_id; above them is the queue's
    # How many awaits may complete with no turn of the loop before the clock is looked at, and how long they may go on.
    IMMEDIATE_LIMIT = 64
    TURN_NS = 1_000_000


cdef void **word_of(object obj, void *value)


cdef class Queue:
    cdef CompletionQueue cq
    cdef uint64_t base
    cdef uint64_t last_signaled
    cdef bint any_signaled
    cdef readonly bint closed
    cdef readonly uint32_t qp_num
    cdef bint blocked_on_cq
    cdef str first_failure
    cdef public bint disconnected
    cdef bint flush_reported
    cdef readonly uint64_t n_failed
    cdef int _flush_deferred(self) except -1
    cdef int _complete(self, v.ibv_wc *wc) except -1
    cdef int _mark(self) except -1


cdef class QueueTable:
    cdef list queues
    cdef list generations
    cdef list free
    cdef uint64_t add(self, Queue queue) except 0
    cdef int remove(self, Queue queue) except -1
    cdef Queue find(self, uint64_t wr_id)


cdef class CompletionQueue:
    cdef v.ibv_cq *cq
    cdef v.ibv_comp_channel *channel
    cdef readonly object pyverbs
    cdef readonly object pyverbs_channel
    cdef Hooks hooks
    cdef QueueTable table
    cdef readonly uint32_t capacity
    cdef readonly uint32_t outstanding
    cdef readonly uint32_t reserved
    cdef readonly bint armed
    cdef readonly bint closed
    cdef readonly object error
    cdef list blocked
    cdef void **held
    cdef int _gone(self) except -1
    cdef bint tick_scheduled
    cdef bint polling
    cdef object tick_callback
    cdef uint64_t spin_max_ns
    cdef uint32_t spin_misses
    cdef uint32_t budget
    cdef uint32_t immediate
    cdef uint64_t last_turn_ns
    cdef uint64_t spinning_since_ns  # when the first of those awaits spun that count in ``immediate``; 0 where none has
    cdef readonly uint64_t n_events
    cdef readonly uint64_t n_polled
    cdef readonly uint64_t n_wakeups
    cdef readonly uint64_t n_spin_hits
    cdef readonly uint64_t n_spin_misses
    cdef readonly uint64_t n_arms
    cdef readonly uint64_t n_unknown
    cdef int _dispatch(self, v.ibv_wc *wc, int n) except -1
    cdef int _poll(self, uint32_t budget) except -1
    cdef int _arm(self) except -1
    cdef int _spin(self, Waitable until) except -1
    cdef int _progress(self) except -1
    cdef int _before_post(self) except -1
    cdef int _after_post(self) except -1
    cdef void _turn_begins(self) noexcept
    cdef int _schedule_tick(self) except -1
    cdef int _fail_all(self, object error) except -1

# Work queues.

from libc.stdint cimport uint32_t, uint64_t

from aiordma cimport _ibv as v
from aiordma._cq cimport Queue
from aiordma._operation cimport Completion
from aiordma._waitable cimport Waitable


# Posts one work request that struct ibv_send_wr can't express. ``payload`` is what the poster gave to _submit_custom();
# ``flags`` are of enum ibv_send_flags, SIGNALED among them if it must be. Returns 0 or an errno.
ctypedef int (*PostFunction)(v.ibv_qp *qp, uint64_t wr_id, unsigned int flags, const void *payload) noexcept nogil


cdef struct Deferred:
    Deferred *next
    v.ibv_send_wr wr
    v.ibv_sge *sges
    PostFunction post
    void *payload
    void *completion


cdef class WorkQueue(Queue):
    # What every operation touches comes first: with many queues each of its cache lines is one to wait for.
    cdef v.ibv_qp *qp
    cdef void **entries
    cdef void **held
    cdef Deferred *deferred_head
    cdef uint64_t head
    cdef uint64_t tail
    cdef uint32_t mask
    cdef uint32_t used
    cdef readonly uint32_t capacity
    cdef uint32_t unsignaled_run
    cdef readonly uint64_t n_posted
    cdef readonly uint64_t n_completed
    cdef bint unordered
    cdef bint broken
    cdef bint draining
    cdef int kind
    cdef Waitable idle
    cdef uint32_t *free_slots
    cdef uint32_t n_free
    cdef bint can_mark
    cdef Deferred *deferred_tail
    cdef readonly uint32_t deferred
    cdef uint32_t max_deferred
    cdef uint32_t posted_before_error
    cdef readonly uint64_t n_deferred
    cdef v.ibv_srq *srq
    cdef readonly str name
    cdef list limbo
    cdef object pyverbs
    cdef int _check_alive(self) except -1
    cdef uint32_t _room(self)
    cdef int _admit(self, Completion c) except -1
    cdef int _check_waiting(self, uint32_t more) except -1
    cdef int _post_chain(self, v.ibv_send_wr *first, uint32_t n, Completion c) except -1
    cdef int _submit(self, v.ibv_send_wr *wr, Completion c) except -1
    cdef int _submit_custom(self, PostFunction post, const void *payload, size_t size, unsigned int flags,
                            Completion c) except -1
    cdef int _post_custom(self, PostFunction post, const void *payload, unsigned int flags, Completion c) except -1
    cdef int _defer_custom(self, PostFunction post, const void *payload, size_t size, unsigned int flags,
                           Completion c) except -1
    cdef int _link(self, Deferred *node, Completion c) except -1
    cdef int _count_signal(self, unsigned int *flags, uint64_t seq) except -1
    cdef int _defer(self, v.ibv_send_wr *wr, Completion c) except -1
    cdef int _retire(self, uint64_t slot, v.ibv_wc *wc, int status) except -1
    cdef int _retire_before(self, uint64_t n) except -1
    cdef int _post_one_recv(self, v.ibv_sge *sges, int n, Completion c) except -1
    cdef int _submit_recv(self, v.ibv_sge *sges, int n, Completion c) except -1
    cdef int _drop_deferred(self, object error) except -1
    cdef uint64_t _next_slot(self)
    cdef int _put(self, uint64_t slot, Completion c) except -1
    cdef int _check_idle(self) except -1
    cdef int _mark_idle(self) except -1
    cdef Completion _marker(self, v.ibv_send_wr *wr)
    cdef int _mark_drain(self) except -1
    cdef int _chain(self, Waitable signal) except -1

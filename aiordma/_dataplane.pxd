# Work queues, completion queues and the operations in flight on them.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from aiordma cimport _ibv as v
from aiordma._waitable cimport Hooks, Waitable


cdef class Completion(Waitable):
    cdef WorkQueue queue
    cdef object keepalive
    cdef object companion
    cdef str target
    cdef object batch
    cdef uint64_t seq
    cdef uint8_t state
    cdef bint signaled
    cdef bint internal
    cdef uint32_t remaining
    cdef uint32_t total
    cdef int asked
    cdef int _status
    cdef int _opcode
    cdef uint32_t _vendor_err
    cdef uint32_t _byte_len
    cdef uint32_t _imm
    cdef uint32_t _wc_flags
    cdef uint32_t _src_qp
    cdef uint32_t _qp_num
    cdef uint64_t _wr_id
    cdef uint64_t local_addr
    cdef uint64_t local_len
    cdef uint32_t local_key
    cdef uint64_t remote_addr
    cdef uint32_t remote_key
    cdef object error
    cdef object alarm
    cdef uint64_t atomic_value
    cdef int _done_part(self, v.ibv_wc *wc, int status) except -1
    cdef int _done_quietly(self, uint32_t n) except -1
    cdef int _settle(self) except -1
    cdef int _part_failed(self, object error) except -1
    cdef str _describe_request(self)
    cdef int _fail(self, object error) except -1


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


cdef class QueueTable:
    cdef list queues
    cdef list generations
    cdef list free
    cdef uint64_t add(self, WorkQueue queue) except 0
    cdef int remove(self, WorkQueue queue) except -1
    cdef WorkQueue find(self, uint64_t wr_id)


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
    cdef uint64_t spin_ns
    cdef uint32_t spin_misses
    cdef uint32_t budget
    cdef uint32_t immediate
    cdef uint64_t last_turn_ns
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
    cdef int _schedule_tick(self) except -1
    cdef int _fail_all(self, object error) except -1


cdef class WorkQueue:
    cdef CompletionQueue cq
    cdef v.ibv_qp *qp
    cdef v.ibv_srq *srq
    cdef readonly str name
    cdef int kind
    cdef bint unordered
    cdef readonly uint32_t capacity
    cdef readonly uint32_t qp_num
    cdef uint64_t base
    cdef uint64_t head
    cdef uint64_t tail
    cdef void **entries
    cdef uint32_t mask
    cdef uint32_t used
    cdef uint32_t *free_slots
    cdef uint32_t n_free
    cdef Deferred *deferred_head
    cdef Deferred *deferred_tail
    cdef readonly uint32_t deferred
    cdef uint32_t unsignaled_run
    cdef uint64_t last_signaled
    cdef bint any_signaled
    cdef bint broken
    cdef readonly bint closed
    cdef bint draining
    cdef bint blocked_on_cq
    cdef bint can_mark
    cdef Waitable idle
    cdef str first_failure
    cdef bint flush_reported
    cdef public bint disconnected
    cdef list limbo
    cdef uint32_t posted_before_error
    cdef readonly uint64_t n_posted
    cdef readonly uint64_t n_completed
    cdef readonly uint64_t n_failed
    cdef readonly uint64_t n_deferred
    cdef void **held
    cdef object pyverbs
    cdef int _check_alive(self) except -1
    cdef uint32_t _room(self)
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
    cdef int _flush_deferred(self) except -1
    cdef int _complete(self, v.ibv_wc *wc) except -1
    cdef int _retire(self, uint64_t slot, v.ibv_wc *wc, int status) except -1
    cdef int _retire_before(self, uint64_t n) except -1
    cdef int _post_one_recv(self, v.ibv_sge *sges, int n, Completion c) except -1
    cdef int _submit_recv(self, v.ibv_sge *sges, int n, Completion c) except -1
    cdef int _drop_deferred(self, object error) except -1
    cdef uint64_t _next_slot(self)
    cdef int _put(self, uint64_t slot, Completion c) except -1
    cdef int _check_idle(self) except -1
    cdef int _mark(self) except -1
    cdef int _mark_idle(self) except -1
    cdef Completion _marker(self, v.ibv_send_wr *wr)
    cdef int _mark_drain(self) except -1
    cdef int _chain(self, Waitable signal) except -1



# cython: language_level=3, nonecheck=True
"""Work queues: their slots, what is in them, and what waits for one.

A work request's wr_id is (queue << 40) | sequence: the queue's index and generation in the engine's table, and the
request's running number in that queue. So one array access finds its operation, a stale wr_id is recognised, and the
requests before a signalled one are retired with it in order (unsignalled work requests produce no completion of their
own; ibv_post_send(3)).
"""

from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from aiordma cimport _ibv as v
from aiordma._cq cimport SEQ_BITS, CompletionQueue, Queue, word_of
from aiordma._memory cimport leave_all
from aiordma._operation cimport POSTED, REQUEST_MARKER, Completion
from aiordma._waitable cimport Waitable

from aiordma.errors import ClosedError, QueueFullError, VerbsError, status_name

cdef extern from *:
    """
    /* n references to o, or n fewer, at once: a batch has one for each of its work requests. */
    static inline void aior_refs(PyObject *o, Py_ssize_t n)
    {
    #ifdef Py_GIL_DISABLED
        for (; n > 0; n--)
            Py_INCREF(o);
        for (; n < 0; n++)
            Py_DECREF(o);
    #else
        Py_SET_REFCNT(o, Py_REFCNT(o) + n);
    #endif
    }
    """
    void aior_refs(PyObject *, Py_ssize_t)

cdef uint64_t SEQ_MASK = (<uint64_t>1 << SEQ_BITS) - 1

# Kinds of queue.
cdef enum:
    KIND_SEND = 0
    KIND_RECV = 1
    KIND_SRQ = 2


cdef class WorkQueue(Queue):
    """A send queue, receive queue or SRQ: its slots, what is in them, and what waits for one, in FIFO order.

    ``kind`` is "send", "recv", "srq", or "streams": a send queue whose requests may complete in any order, and of which one
    may fail alone (a DCI with streams). There everything is signalled.
    """

    def __init__(self, CompletionQueue cq not None, str kind, uint32_t capacity, uintptr_t qp=0, uintptr_t srq=0,
                 uint32_t qp_num=0, bint can_mark=False, pyverbs=None, max_deferred=None):
        cdef uint32_t i
        self.cq = cq
        self.kind = {"send": KIND_SEND, "streams": KIND_SEND, "recv": KIND_RECV, "srq": KIND_SRQ}[kind]
        self.unordered = kind == "srq" or kind == "streams"
        self.name = kind
        self.qp = <v.ibv_qp *>qp
        self.srq = <v.ibv_srq *>srq
        self.qp_num = qp_num
        self.capacity = capacity
        self.max_deferred = 0xFFFFFFFF if max_deferred is None else max_deferred
        self.can_mark = can_mark
        self.limbo = []
        self.pyverbs = pyverbs
        if pyverbs is not None:
            self.held = word_of(pyverbs, <void *>self.qp if qp else <void *>self.srq)
        self.mask = 1
        while self.mask < capacity:
            self.mask <<= 1
        self.entries = <void **>calloc(self.mask, sizeof(void *))
        if self.entries == NULL:
            raise MemoryError()
        if self.unordered:
            # The requests of an SRQ, or of several streams, complete in any order: slots come from a list instead of
            # following each other.
            self.free_slots = <uint32_t *>malloc(self.mask * sizeof(uint32_t))
            if self.free_slots == NULL:
                raise MemoryError()
            self.n_free = self.mask
            for i in range(self.mask):
                self.free_slots[i] = self.mask - 1 - i
        self.mask -= 1
        self.base = cq.table.add(self)

    def __dealloc__(self):
        # Whatever is left here was never completed; the engine abandons a queue before it lets go of it.
        cdef Deferred *node = self.deferred_head
        cdef Deferred *following
        while node != NULL:
            following = node.next
            Py_DECREF(<object>node.completion)
            free(node)
            node = following
        free(self.entries)
        free(self.free_slots)

    # -------------------------------------------------------------- posting

    cdef int _check_alive(self) except -1:
        """Raises where the QP or SRQ was destroyed through a pyverbs object: posting would be the end of the process."""
        if self.held == NULL or self.held[0] != NULL:
            return 0
        self.held = NULL
        cdef object error = ClosedError(
            f"the {'SRQ' if self.kind == KIND_SRQ else 'QP'} was destroyed by closing a pyverbs object (its own, the PD's or "
            "the context's); close the aiordma object instead"
        )
        self.abandon(error)
        raise error

    cdef uint32_t _room(self):
        cdef uint32_t cq_room
        if self.deferred_head != NULL or self.closed:
            return 0
        cq_room = self.cq.capacity - self.cq.outstanding if self.cq.capacity > self.cq.outstanding else 0
        return min(self.capacity - self.used, cq_room)

    cdef int _admit(self, Completion c) except -1:
        """Whether one more work request can be posted now, or 0 where it has to wait; raises where it can do neither."""
        cdef CompletionQueue cq = self.cq
        if self.closed:
            raise ClosedError("the SRQ is closed" if self.kind == KIND_SRQ else f"QP {self.qp_num:#x} is closed")
        if cq.error is not None:
            raise cq.error
        cq._before_post()
        if self.deferred_head == NULL and self.used < self.capacity and cq.outstanding < cq.capacity:
            return 1
        if not c.internal:
            self._check_waiting(1)
        return 0

    cdef int _check_waiting(self, uint32_t more) except -1:
        """Raises where more would wait than may. Nothing has been posted then."""
        if self.deferred + <uint64_t>more > self.max_deferred:
            raise QueueFullError(
                f"{self.deferred} work requests wait for a slot of QP {self.qp_num:#x}'s {self.name} queue, which has "
                f"{self.capacity}, and max_queued is {self.max_deferred}: await some of them first"
            )
        return 0

    cdef int _put(self, uint64_t slot, Completion c) except -1:
        Py_INCREF(c)
        self.entries[slot & self.mask] = <void *>c
        self.used += 1
        self.cq.outstanding += 1
        self.n_posted += 1
        c.state = POSTED
        return 0

    cdef int _count_signal(self, unsigned int *flags, uint64_t seq) except -1:
        """Keeps count of what is signalled, and signals one request in half a queue: slots are given back only by a
        signalled completion."""
        if not flags[0] & v.IBV_SEND_SIGNALED:
            self.unsignaled_run += 1
            if self.unsignaled_run >= self.capacity // 2:
                flags[0] |= v.IBV_SEND_SIGNALED
        if flags[0] & v.IBV_SEND_SIGNALED:
            self.unsignaled_run = 0
            self.last_signaled = seq
            self.any_signaled = True
        return 0

    cdef int _post_chain(self, v.ibv_send_wr *first, uint32_t n, Completion c) except -1:
        """Posts n linked work requests of one operation, with one doorbell. There is room for them."""
        cdef v.ibv_send_wr *wr = first
        cdef v.ibv_send_wr *bad = NULL
        cdef void **entries = self.entries
        cdef uint64_t seq = self.head
        cdef uint32_t _, posted
        cdef int rc
        for _ in range(n):
            wr.wr_id = self.base | (seq & SEQ_MASK)
            # As _count_signal().
            if not wr.send_flags & v.IBV_SEND_SIGNALED:
                self.unsignaled_run += 1
                if self.unsignaled_run >= self.capacity // 2:
                    wr.send_flags |= v.IBV_SEND_SIGNALED
            if wr.send_flags & v.IBV_SEND_SIGNALED:
                self.unsignaled_run = 0
                self.last_signaled = seq
                self.any_signaled = True
            entries[seq & self.mask] = <void *>c
            seq += 1
            wr = wr.next
        aior_refs(<PyObject *>c, n)
        c.seq = seq - 1
        c._wr_id = self.base | (c.seq & SEQ_MASK)
        c.state = POSTED
        self.head = seq
        self.used += n
        self.cq.outstanding += n
        self.n_posted += n
        rc = v.ibv_post_send(self.qp, first, &bad)
        if rc == 0:
            return 0
        posted = 0
        wr = first
        while wr != bad and wr != NULL:
            posted += 1
            wr = wr.next
        # The rest wasn't taken by the device: their slots are free again. The caller settles the operation.
        for _ in range(n - posted):
            self.head -= 1
            self.entries[self.head & self.mask] = NULL
            self.used -= 1
            self.cq.outstanding -= 1
            self.n_posted -= 1
            Py_DECREF(c)
        if self.any_signaled and <int64_t>(self.last_signaled - self.head) >= 0:
            self.any_signaled = False
        c.seq = self.head - 1
        self.posted_before_error = posted
        raise VerbsError("ibv_post_send", rc, _post_hint(rc))

    cdef int _submit(self, v.ibv_send_wr *wr, Completion c) except -1:
        """Posts one work request, or queues it where the queue or the CQ is full."""
        cdef CompletionQueue cq = self.cq
        if self._admit(c):
            self._post_chain(wr, 1, c)
        else:
            self._defer(wr, c)
        cq._after_post()
        return 0

    cdef int _defer(self, v.ibv_send_wr *wr, Completion c) except -1:
        cdef size_t inline_bytes = 0
        cdef Deferred *node
        cdef uint8_t *data
        cdef int i
        if wr.send_flags & v.IBV_SEND_INLINE:
            for i in range(wr.num_sge):
                inline_bytes += wr.sg_list[i].length
        node = <Deferred *>malloc(sizeof(Deferred) + <size_t>wr.num_sge * sizeof(v.ibv_sge) + inline_bytes)
        if node == NULL:
            raise MemoryError()
        node.next = NULL
        node.wr = wr[0]
        node.wr.next = NULL
        node.sges = <v.ibv_sge *>(node + 1)
        node.wr.sg_list = node.sges
        if wr.num_sge:
            memcpy(node.sges, wr.sg_list, <size_t>wr.num_sge * sizeof(v.ibv_sge))
        if inline_bytes:
            # Inline data is the caller's again when the call returns, so it's copied now.
            data = <uint8_t *>(node.sges + wr.num_sge)
            for i in range(wr.num_sge):
                memcpy(data, <void *><uintptr_t>wr.sg_list[i].addr, wr.sg_list[i].length)
                node.sges[i].addr = <uint64_t><uintptr_t>data
                data += wr.sg_list[i].length
        node.post = NULL
        return self._link(node, c)

    cdef int _link(self, Deferred *node, Completion c) except -1:
        """Puts a work request behind those that wait."""
        node.next = NULL
        node.completion = <void *>c
        Py_INCREF(c)
        if self.deferred_tail == NULL:
            self.deferred_head = node
        else:
            self.deferred_tail.next = node
        self.deferred_tail = node
        self.deferred += 1
        self.n_deferred += 1
        if self.used < self.capacity and not self.blocked_on_cq and self.cq.outstanding >= self.cq.capacity:
            self.blocked_on_cq = True
            self.cq.blocked.append(self)
        return 0

    cdef int _submit_custom(self, PostFunction post, const void *payload, size_t size, unsigned int flags,
                            Completion c) except -1:
        """As _submit(), for a work request that ``post`` builds from ``payload``; waiting, ``size`` bytes are copied."""
        cdef CompletionQueue cq = self.cq
        if self._admit(c):
            self._post_custom(post, payload, flags, c)
        else:
            self._defer_custom(post, payload, size, flags, c)
        cq._after_post()
        return 0

    cdef int _post_custom(self, PostFunction post, const void *payload, unsigned int flags, Completion c) except -1:
        cdef uint64_t seq = self._next_slot()
        cdef uint32_t run = self.unsignaled_run
        cdef uint64_t last = self.last_signaled
        cdef bint any_signaled = self.any_signaled
        cdef int rc
        self._count_signal(&flags, seq)
        c.seq = seq
        c._wr_id = self.base | (seq & SEQ_MASK)
        rc = post(self.qp, c._wr_id, flags, payload)
        if rc:
            self.unsignaled_run, self.last_signaled, self.any_signaled = run, last, any_signaled
            raise VerbsError("ibv_wr_complete", rc, _post_hint(rc))
        if self.unordered:
            self.n_free -= 1
        self._put(seq, c)
        self.head += 1
        return 0

    cdef int _defer_custom(self, PostFunction post, const void *payload, size_t size, unsigned int flags,
                           Completion c) except -1:
        cdef Deferred *node = <Deferred *>malloc(sizeof(Deferred) + size)
        if node == NULL:
            raise MemoryError()
        memset(node, 0, sizeof(Deferred))
        node.post = post
        node.payload = <void *>(node + 1)
        node.wr.send_flags = flags
        memcpy(node.payload, payload, size)
        return self._link(node, c)

    cdef int _flush_deferred(self) except -1:
        """Posts what waits, in order, as far as there is room."""
        cdef Deferred *node
        cdef Completion c
        cdef CompletionQueue cq = self.cq
        if self.held != NULL and self.held[0] == NULL:
            return 0  # destroyed: whoever posts next is told
        while self.deferred_head != NULL and self.used < self.capacity and not self.closed:
            if cq.outstanding >= cq.capacity:
                if not self.blocked_on_cq:
                    self.blocked_on_cq = True
                    cq.blocked.append(self)
                return 0
            node = self.deferred_head
            self.deferred_head = node.next
            if node.next == NULL:
                self.deferred_tail = NULL
            self.deferred -= 1
            c = <Completion>node.completion
            Py_DECREF(c)
            try:
                if self.kind == KIND_SEND:
                    if c.signaled and c.remaining == 1:
                        node.wr.send_flags |= v.IBV_SEND_SIGNALED
                    node.wr.next = NULL
                    if node.post != NULL:
                        self._post_custom(node.post, node.payload, node.wr.send_flags, c)
                    else:
                        self._post_chain(&node.wr, 1, c)
                else:
                    self._post_one_recv(node.sges, node.wr.num_sge, c)
            except VerbsError as e:
                c._part_failed(e)
            finally:
                free(node)
        return 0

    cdef int _post_one_recv(self, v.ibv_sge *sges, int n, Completion c) except -1:
        cdef v.ibv_recv_wr wr
        cdef v.ibv_recv_wr *bad = NULL
        cdef uint64_t slot
        cdef int rc
        memset(&wr, 0, sizeof(wr))
        slot = self._next_slot()
        wr.wr_id = self.base | (slot & SEQ_MASK)
        wr.sg_list = sges
        wr.num_sge = n
        if self.kind == KIND_SRQ:
            rc = v.ibv_post_srq_recv(self.srq, &wr, &bad)
        else:
            rc = v.ibv_post_recv(self.qp, &wr, &bad)
        if rc:
            raise VerbsError("ibv_post_srq_recv" if self.kind == KIND_SRQ else "ibv_post_recv", rc, _post_hint(rc))
        if self.unordered:
            self.n_free -= 1
        self._put(slot, c)
        c.seq = slot
        c._wr_id = wr.wr_id
        self.head += 1
        return 0

    cdef uint64_t _next_slot(self):
        """Where the next request goes: its running number, or a free slot with part of that number above it."""
        if self.unordered:
            return self.free_slots[self.n_free - 1] | (self.head << 20 & SEQ_MASK)
        return self.head

    cdef int _submit_recv(self, v.ibv_sge *sges, int n, Completion c) except -1:
        cdef v.ibv_send_wr wr
        cdef CompletionQueue cq = self.cq
        if self._admit(c):
            self._post_one_recv(sges, n, c)
        else:
            memset(&wr, 0, sizeof(wr))
            wr.sg_list = sges
            wr.num_sge = n
            self._defer(&wr, c)
        cq._after_post()
        return 0

    cdef int _mark(self) except -1:
        """Posts a signalled work request of no effect, whose completion retires the unsignalled ones before it.

        A zero-length RDMA WRITE touches no memory: neither its address nor its rkey is looked at (InfiniBand
        Architecture Specification vol. 1, 9.7.4.1.3 and C9-88).
        """
        cdef v.ibv_send_wr wr
        cdef Completion c = self._marker(&wr)
        return self._submit(&wr, c)

    cdef Completion _marker(self, v.ibv_send_wr *wr):
        cdef Completion c = Completion.__new__(Completion)
        memset(wr, 0, sizeof(v.ibv_send_wr))
        wr.opcode = v.IBV_WR_RDMA_WRITE
        wr.send_flags = v.IBV_SEND_SIGNALED
        c.hooks = self.cq.hooks
        c.queue = self
        c.asked = REQUEST_MARKER
        c.internal = True
        c.signaled = True
        c.remaining = 1
        c._status = -1
        c._opcode = -1
        return c

    # -------------------------------------------------------------- completing

    cdef int _complete(self, v.ibv_wc *wc) except -1:
        """Retires what a work completion stands for; 0 where its wr_id isn't in flight here."""
        cdef uint64_t seq = wc.wr_id & SEQ_MASK
        cdef uint64_t ahead
        cdef Completion c
        if self.unordered:
            if (seq & 0xFFFFF) > self.mask or self.entries[seq & 0xFFFFF] == NULL:
                return 0
            c = <Completion>self.entries[seq & 0xFFFFF]
            if c.seq & SEQ_MASK != seq:
                return 0
            self.free_slots[self.n_free] = seq & 0xFFFFF
            self.n_free += 1
            self._retire(seq & 0xFFFFF, wc, wc.status)
        else:
            ahead = (seq - self.tail) & SEQ_MASK
            if ahead >= self.head - self.tail:
                return 0
            if ahead:
                self._retire_before(ahead)
            if wc.status != v.IBV_WC_SUCCESS and not self.broken:
                self.broken = True
                if wc.status != v.IBV_WC_WR_FLUSH_ERR and self.entries[self.tail & self.mask] != NULL:
                    c = <Completion>self.entries[self.tail & self.mask]
                    self.first_failure = f"{c._describe_request()} with {status_name(<int>wc.status)}"
            self.tail += 1
            self._retire(self.tail - 1, wc, wc.status)
        if self.deferred_head != NULL:
            self._flush_deferred()
        if self.draining:
            self._mark_drain()
        elif self.idle is not None:
            self._mark_idle()
        self._check_idle()
        return 1

    cdef int _retire(self, uint64_t slot, v.ibv_wc *wc, int status) except -1:
        cdef void *entry = self.entries[slot & self.mask]
        cdef Completion c
        if entry == NULL:
            return 0  # a callback of one before it ended the queue, and this one with it
        self.entries[slot & self.mask] = NULL
        self.used -= 1
        self.cq.outstanding -= 1
        self.n_completed += 1
        c = <Completion>entry
        Py_DECREF(c)
        return c._done_part(wc, status)

    cdef int _retire_before(self, uint64_t n) except -1:
        """The n oldest, which reported nothing, are over."""
        cdef void **entries = self.entries
        cdef void *entry
        cdef Completion c
        cdef uint64_t run, i
        # They went well, or would have reported themselves; unless the queue is in error, where a completion that never
        # came is a flush.
        while n and self.broken:
            self.tail += 1
            n -= 1
            self._retire(self.tail - 1, NULL, v.IBV_WC_WR_FLUSH_ERR)
        while n:
            # The work requests of a batch lie side by side.
            entry = entries[self.tail & self.mask]
            run = 1
            while run < n and entries[(self.tail + run) & self.mask] == entry:
                run += 1
            n -= run
            if entry == NULL:
                self.tail += run
                continue  # a callback of one before it ended the queue, and this one with it
            for i in range(run):
                entries[(self.tail + i) & self.mask] = NULL
            self.tail += run
            self.used -= <uint32_t>run
            self.cq.outstanding -= <uint32_t>run
            self.n_completed += run
            c = <Completion>entry
            aior_refs(<PyObject *>c, -<Py_ssize_t>run)
            c._done_quietly(<uint32_t>run)
        return 0

    cdef int _check_idle(self) except -1:
        cdef Waitable idle
        if self.used:
            return 0
        if self.closed and self.deferred_head != NULL:
            self._drop_deferred(None)
        if self.idle is not None and self.deferred_head == NULL:
            idle = self.idle
            self.idle = None
            idle._finish()
        return 0

    cdef int _drop_deferred(self, object error) except -1:
        """Ends what was never posted: with ``error``, or as flushed."""
        cdef Deferred *node
        cdef Completion c
        while self.deferred_head != NULL:
            node = self.deferred_head
            self.deferred_head = node.next
            self.deferred -= 1
            c = <Completion>node.completion
            Py_DECREF(c)
            free(node)
            if error is not None:
                c._fail(error)
            else:
                c._done_part(NULL, v.IBV_WC_WR_FLUSH_ERR)
        self.deferred_tail = NULL
        return 0

    # -------------------------------------------------------------- called by QueuePair, SRQ and the engine

    def close(self) -> None:
        """Nothing more is posted; what waits for a slot is flushed after what is in flight."""
        self.closed = True
        self._check_idle()

    def abandon(self, error) -> None:
        """No completion will come any more: what is in flight or waits ends with ``error``."""
        cdef uint64_t slot
        cdef Completion c
        cdef void *entry
        cdef uint32_t i
        self.closed = True
        for i in range(self.mask + 1):
            slot = i if self.unordered else (self.tail + i) & self.mask
            entry = self.entries[slot]
            if entry == NULL:
                continue
            self.entries[slot] = NULL
            self.used -= 1
            self.cq.outstanding -= 1
            c = <Completion>entry
            Py_DECREF(c)
            # The device may still use the buffers: they are kept until the QP is destroyed (release()).
            if c.keepalive is not None:
                self.limbo.append(c.keepalive)
                c.keepalive = None
            c._fail(error)
        self.tail = self.head
        self._drop_deferred(error)
        self._check_idle()

    def release(self) -> None:
        """The QP is destroyed: gives back its place in the engine's table and what the device might have used."""
        self.closed = True
        self.cq.table.remove(self)
        if self in self.cq.blocked:
            self.cq.blocked.remove(self)
        self.qp = NULL
        self.srq = NULL
        cdef list limbo = self.limbo
        self.limbo = []
        for keepalive in limbo:
            leave_all(keepalive)

    def when_idle(self, Waitable signal not None) -> None:
        """``signal`` finishes when nothing is in flight and nothing waits."""
        if self.used == 0 and self.deferred_head == NULL:
            signal._finish()
            return
        self._chain(signal)
        self._mark_idle()
        self.cq._progress()

    @property
    def ends_unsignaled(self) -> bool:
        """Whether what is last in it, or will be, reports nothing when it's done."""
        if self.kind != KIND_SEND or not self.can_mark or self.closed:
            return False
        return self.deferred_head != NULL or (
            self.used != 0 and (not self.any_signaled or self.head - 1 != self.last_signaled)
        )

    def drain(self, Waitable signal not None) -> None:
        """After the QP went to ERR: ``signal`` finishes when everything posted has been flushed."""
        self.closed = True
        self.draining = True
        self._chain(signal)
        self._mark_drain()
        self.cq._progress()
        self._check_idle()

    cdef int _mark_idle(self) except -1:
        """For whoever waits until the queue is idle: something signalled is always last in it."""
        # While something waits for a slot the queue is full, and then holds a signalled request (see _count_signal).
        # Where no marker can be posted everything is signalled.
        if not self.can_mark or self.closed or self.used == 0 or self.deferred_head != NULL:
            return 0
        if self.cq.error is None and (not self.any_signaled or self.head - 1 != self.last_signaled):
            self._mark()
        return 0

    cdef int _chain(self, Waitable signal) except -1:
        """``signal`` finishes when the queue is idle; any number of them."""
        if self.idle is None:
            self.idle = signal
        else:
            self.idle.on_finish(signal._finish_from_callback)
        return 0

    cdef int _mark_drain(self) except -1:
        """Unsignalled requests that had succeeded before the QP went to ERR report nothing; a marker behind them does."""
        cdef v.ibv_send_wr wr
        cdef bint pending = self.any_signaled and <int64_t>(self.last_signaled - self.tail) >= 0
        if self.kind != KIND_SEND or not self.can_mark or self.used == 0 or self.used >= self.capacity:
            return 0
        if pending and self.last_signaled == self.head - 1:
            return 0
        if self.cq.outstanding >= self.cq.capacity or self.qp == NULL:
            return 0
        try:
            self._post_chain(&wr, 1, self._marker(&wr))
        except VerbsError:
            return 0  # the drain's time limit ends it
        return 0

    @property
    def in_flight(self) -> int:
        """Work requests that the device has."""
        return self.used

    @property
    def failed(self) -> bool:
        """Whether a completion with an error came back: the QP is in the error state."""
        return self.broken

    def statistics(self) -> dict:
        """Counters since creation."""
        return {
            "capacity": self.capacity,
            "in_flight": self.used,
            "waiting": self.deferred,
            "posted": self.n_posted,
            "completed": self.n_completed,
            "failed": self.n_failed,
            "waited": self.n_deferred,
        }


def _post_hint(int rc):
    """What an errno of ibv_post_send or ibv_post_recv usually means, once the obvious was checked."""
    import errno as codes

    if rc == codes.ENOMEM:
        return "the queue is full although its slots are counted: something else posts on this QP"
    if rc == codes.EINVAL:
        return "the provider refused the work request: an opcode or a flag that this QP doesn't do"
    return ""

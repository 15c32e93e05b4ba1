# cython: language_level=3, nonecheck=True
"""The hot path: operations in flight, the work queues they are posted to, the completion queues they come back on.

A work request's wr_id is (queue << 40) | sequence: the queue's index and generation in the engine's table, and the
request's running number in that queue. So one array access finds its operation, a stale wr_id is recognised, and the
requests before a signalled one are retired with it in order (unsignalled work requests produce no completion of their
own; ibv_post_send(3)). Nothing here knows which event loop runs: see Hooks.
"""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from aiordma cimport _ibv as v
from aiordma._memory cimport leave_all
from aiordma._waitable cimport Hooks, Waitable

from aiordma.errors import (
    ClosedError,
    CompletionQueueError,
    QPStateError,
    UnknownCompletionError,
    VerbsError,
    completion_error,
    status_name,
)

cdef extern from "Python.h":
    ctypedef PyObject *(*iternextfunc)(PyObject *)

    ctypedef struct PyTypeObject:
        iternextfunc tp_iternext

    void PyErr_SetObject(object, object)

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
    static inline void aior_relax(void)
    {
    #if defined(__x86_64__)
        __builtin_ia32_pause();
    #elif defined(__aarch64__)
        __asm__ volatile("yield");
    #endif
    }
    /* Polls until something comes or the deadline passes; the clock is read every 32 empty polls. */
    static inline int aior_spin_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc, uint64_t deadline)
    {
        for (;;)
            for (int i = 0; ; i++) {
                int got = ibv_poll_cq(cq, n, wc);
                if (got)
                    return got;
                if (i == 32) {
                    if (aior_now_ns() >= deadline)
                        return 0;
                    break;
                }
                aior_relax();
            }
    }
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
    uint64_t aior_now_ns() nogil
    int aior_spin_cq(v.ibv_cq *, int, v.ibv_wc *, uint64_t) nogil

cdef enum:
    BATCH = 32
    SEQ_BITS = 40

cdef uint64_t SEQ_MASK = (<uint64_t>1 << SEQ_BITS) - 1

# States of an operation.
cdef enum:
    QUEUED = 0  # waits in its queue for a slot
    POSTED = 1  # the device has it
    DONE = 2

# Kinds of queue.
cdef enum:
    KIND_SEND = 0
    KIND_RECV = 1
    KIND_SRQ = 2

# How many awaits may complete with no turn of the loop before the clock is looked at, and how long they may go on.
cdef enum:
    IMMEDIATE_LIMIT = 64
cdef uint64_t TURN_NS = 1_000_000

REQUEST_RECV = -1
REQUEST_MARKER = -2
REQUEST_UMR = -3
REQUEST_MEMCPY = -4
REQUEST_RAW_WQE = -5

_REQUEST_NAMES = {
    <int>v.IBV_WR_RDMA_WRITE: "RDMA_WRITE",
    <int>v.IBV_WR_RDMA_WRITE_WITH_IMM: "RDMA_WRITE_WITH_IMM",
    <int>v.IBV_WR_SEND: "SEND",
    <int>v.IBV_WR_SEND_WITH_IMM: "SEND_WITH_IMM",
    <int>v.IBV_WR_RDMA_READ: "RDMA_READ",
    <int>v.IBV_WR_ATOMIC_CMP_AND_SWP: "ATOMIC_CMP_AND_SWP",
    <int>v.IBV_WR_ATOMIC_FETCH_AND_ADD: "ATOMIC_FETCH_AND_ADD",
    <int>v.IBV_WR_LOCAL_INV: "LOCAL_INV",
    <int>v.IBV_WR_SEND_WITH_INV: "SEND_WITH_INV",
    REQUEST_RECV: "RECV",
    REQUEST_MARKER: "marker",
    REQUEST_UMR: "UMR",
    REQUEST_MEMCPY: "MEMCPY",
    REQUEST_RAW_WQE: "RAW_WQE",
}


cdef void **_word_of(object obj, void *value):
    """Where a pyverbs object keeps a pointer: it turns to NULL when the object is closed, by whoever."""
    cdef void **words = <void **><PyObject *>obj
    cdef Py_ssize_t i
    for i in range(2, type(obj).__basicsize__ // <Py_ssize_t>sizeof(void *)):
        if words[i] == value:
            return &words[i]
    return NULL


cdef class _Alarm:
    """Reports a failure that nobody looked at, when the operation that holds it goes away.

    Of those that were only flushed, one a queue: a queue that dies flushes everything, and says nothing new each time.
    """

    cdef Hooks hooks
    cdef WorkQueue queue
    cdef bint flushed
    cdef object error

    def __del__(self):
        if self.error is None or self.hooks is None:
            return
        if self.flushed:
            if self.queue.flush_reported:
                return
            self.queue.flush_reported = True
        self.hooks.report("an RDMA operation failed and nobody awaited it", self.error)


cdef class Completion(Waitable):
    """One posted operation, and what became of it.

    Returned by every posting call, at once: the operation is under way (or waits for a free slot of the queue) whether
    it's awaited or not. ``await`` gives the Completion itself when the device has reported it, and raises the
    :class:`CompletionError` of its status when it failed. Awaiting twice, from several tasks, or after it has completed
    is fine; on one that has completed the await takes no turn of the loop. Cancelling an await detaches only the
    waiter: a posted work request can't be recalled, and its buffers and MRs are kept until it completes.
    """

    def __init__(self):
        raise TypeError("made by the posting calls of a QueuePair")

    # -------------------------------------------------------------- state changes

    cdef int _done_part(self, v.ibv_wc *wc, int status) except -1:
        """One of its work requests is over. ``wc`` is NULL for one retired by a later completion."""
        if wc != NULL:
            self._qp_num = wc.qp_num
        if status:
            if self._status <= 0:
                self._status = status
                if self.batch is not None:
                    self.batch._blame(self, self.total - self.remaining)
                if wc != NULL:
                    self._vendor_err = wc.vendor_err
                    self._wr_id = wc.wr_id
        elif wc != NULL:
            # Everything but wr_id, status, qp_num and vendor_err is undefined when the status is an error
            # (ibv_poll_cq(3)), so these are read on success only.
            self._opcode = wc.opcode
            self._byte_len = wc.byte_len
            self._wc_flags = wc.wc_flags
            self._src_qp = wc.src_qp
            self._wr_id = wc.wr_id
            if wc.wc_flags & v.IBV_WC_WITH_IMM:
                self._imm = v.be32toh(wc.imm_data)
            elif wc.wc_flags & v.IBV_WC_WITH_INV:
                self._imm = wc.invalidated_rkey
        self.remaining -= 1
        if self.remaining == 0:
            self._settle()
        return 0

    cdef int _done_quietly(self, uint32_t n) except -1:
        """n of its work requests went well, and said nothing."""
        self.remaining -= n
        if self.remaining == 0:
            self._settle()
        return 0

    cdef int _settle(self) except -1:
        """Lets go of buffers and wakes the waiters."""
        cdef object keepalive = self.keepalive
        cdef _Alarm alarm
        if self.state == DONE:
            return 0
        self.state = DONE
        if self._status < 0:
            self._status = 0
        if self.companion is not None:
            if self._status > 0 and self.target is None:
                self.target = repr(self.companion)
            self.companion = None
        if self._status > 0 or self.error is not None:
            self.queue.n_failed += 1
            # Whoever waits now may be cancelled before it runs again, so only looking at the error disarms this.
            if not self.internal and not self.queue.closed:
                alarm = _Alarm.__new__(_Alarm)
                alarm.hooks = self.hooks
                alarm.queue = self.queue
                alarm.flushed = self._status == v.IBV_WC_WR_FLUSH_ERR
                alarm.error = self._error()
                self.alarm = alarm
        self.keepalive = None
        self.batch = None
        if self._status == 0 and self.error is None and self.asked in (
            v.IBV_WR_ATOMIC_CMP_AND_SWP, v.IBV_WR_ATOMIC_FETCH_AND_ADD
        ):
            memcpy(&self.atomic_value, <void *><uintptr_t>self.local_addr, 8)
        leave_all(keepalive)
        self._finish()
        return 0

    cdef int _fail(self, object error) except -1:
        """Ends it with an error that no completion reported."""
        if self.state != DONE:
            self.error = error
            self.remaining = 0
            self._settle()
        return 0

    cdef int _part_failed(self, object error) except -1:
        """One of its work requests could not be posted."""
        if self.error is None:
            self.error = error
        self.remaining -= 1
        if self.remaining == 0:
            self._settle()
        return 0

    # -------------------------------------------------------------- awaiting

    cdef int _prepare_wait(self) except -1:
        cdef WorkQueue q = self.queue
        cdef CompletionQueue cq = q.cq
        if not self.signaled:
            if self.state == QUEUED:
                self.signaled = True  # posted signalled when its turn comes
            elif not q.closed and (not q.any_signaled or <int64_t>(self.seq - q.last_signaled) > 0):
                q._mark()
        cq._spin(self)
        if not self.finished:
            cq._progress()
        return 0

    def __await__(self):
        cdef CompletionQueue cq = self.queue.cq
        if not self.finished:
            self.hooks.check()
            self._prepare_wait()
            if not self.finished:
                self.hooks.check_loop()
                return self.hooks.wait(self)
        cq.immediate += 1
        if cq.immediate >= IMMEDIATE_LIMIT and aior_now_ns() - cq.last_turn_ns > TURN_NS:
            # A task whose operations all complete at once would never let another run.
            cq.immediate = 0
            cq.last_turn_ns = aior_now_ns()
            return self.hooks.yield_once(self)
        cdef _Now now = _Now.__new__(_Now)
        now.completion = self
        return now

    cdef object _result(self):
        if self._status == 0 and self.error is None:
            return self
        if self.alarm is not None:
            (<_Alarm>self.alarm).error = None
        raise self._error()

    cdef str _describe_request(self):
        return _REQUEST_NAMES.get(self.asked, f"work request {self.asked}")

    def _error(self):
        if self.error is None and self._status > 0:
            local = f"local {self.local_addr:#x}+{self.local_len} lkey {self.local_key:#x}" if self.local_key else ""
            remote = f"remote {self.remote_addr:#x} rkey {self.remote_key:#x}" if self.remote_key else ""
            if self.target is not None:
                remote = f"{remote}, to {self.target}" if remote else f"to {self.target}"
            note = ""
            if self._status == v.IBV_WC_WR_FLUSH_ERR:
                if self.queue.first_failure:
                    note = f"What failed first: {self.queue.first_failure}."
                elif self.queue.closed:
                    note = "The QP was closed on this side."
            self.error = completion_error(
                status=self._status,
                vendor_err=self._vendor_err,
                opcode=self._describe_request(),
                qp_num=self.queue.qp_num,
                wr_id=self._wr_id,
                local=local,
                remote=remote,
                note=note,
                disconnected=self.queue.disconnected,
            )
        return self.error

    # -------------------------------------------------------------- what users read

    def exception(self):
        """The error it ended with, or None; :class:`RuntimeError` while it's in flight. Counts as looking at it."""
        if not self.finished:
            raise RuntimeError("in flight: await it first")
        if self.alarm is not None:
            (<_Alarm>self.alarm).error = None
        return self._error()

    @property
    def status(self) -> int | None:
        """enum ibv_wc_status, None while in flight. 0 is success. None too where an error came without a completion."""
        if not self.finished or (self._status == 0 and self.error is not None):
            return None
        return self._status

    @property
    def opcode(self) -> int | None:
        """enum ibv_wc_opcode of the completion; None while in flight or when it failed (undefined then)."""
        return self._opcode if self.finished and self._status == 0 and self._opcode >= 0 else None

    @property
    def byte_len(self) -> int:
        """Bytes transferred, as ibv_wc has it: meaningful for receives, reads and atomics."""
        return self._byte_len

    @property
    def imm_data(self) -> int | None:
        """The immediate value (host order, unsigned 32 bits) of a receive that carries one, else None."""
        return self._imm if self._wc_flags & v.IBV_WC_WITH_IMM else None

    @property
    def invalidated_rkey(self) -> int | None:
        """The rkey that a SEND_WITH_INV invalidated here, else None."""
        return self._imm if self._wc_flags & v.IBV_WC_WITH_INV else None

    @property
    def wc_flags(self) -> int:
        """enum ibv_wc_flags of the completion."""
        return self._wc_flags

    @property
    def vendor_err(self) -> int:
        """The provider's syndrome; 0 on success."""
        return self._vendor_err

    @property
    def src_qp(self) -> int:
        """The sender's QP number, for receives on UD QPs."""
        return self._src_qp

    @property
    def qp_num(self) -> int:
        """Number of the QP it was posted on; 0 for an SRQ."""
        return self.queue.qp_num

    @property
    def receiver_qp_num(self) -> int:
        """Number of the QP whose completion it is: for SRQ receives, the QP that the message came to."""
        return self._qp_num if self._qp_num else self.queue.qp_num

    @property
    def wr_id(self) -> int:
        """The wr_id it was posted with (its last work request's); 0 while it waits for a slot."""
        return self._wr_id

    @property
    def request(self) -> str:
        """What was asked, as verbs call it: ``"RDMA_WRITE"``, ``"RECV"``, ..."""
        return self._describe_request()

    @property
    def value(self) -> int:
        """Atomics: the 8 bytes that were in the remote memory before, as an unsigned number of this host's order.

        The device returns them in this host's byte order (ibv_post_send(3)); read once the operation has completed.
        """
        if self.asked not in (v.IBV_WR_ATOMIC_CMP_AND_SWP, v.IBV_WR_ATOMIC_FETCH_AND_ADD):
            raise AttributeError(f"{self._describe_request()} has no value: only atomics do")
        if not self.finished:
            raise RuntimeError("in flight: await it first")
        self._result()
        return self.atomic_value

    def __repr__(self) -> str:
        if not self.finished:
            state = "queued" if self.state == QUEUED else "in flight"
        elif self._status == 0 and self.error is None:
            state = "success"
        else:
            state = f"failed: {type(self._error()).__name__}"
        return f"<Completion {self._describe_request()} qp={self.queue.qp_num:#x} {state}>"


@cython.freelist(16)
cdef class _Now:
    """The iterator of an await on a Completion that has completed."""

    cdef Completion completion

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration(self.completion._result())


cdef iternextfunc _now_next_slow = (<PyTypeObject *>_Now).tp_iternext


cdef PyObject *_now_next(PyObject *self) noexcept:
    """The same without what raising an exception from Python code costs: a frame and a traceback for each await."""
    cdef Completion c = (<_Now>self).completion
    if c._status == 0 and c.error is None:
        PyErr_SetObject(StopIteration, c)
        return NULL
    return _now_next_slow(self)


(<PyTypeObject *>_Now).tp_iternext = _now_next


cdef class QueueTable:
    """Finds a work queue by the upper bits of a wr_id: 16 bits of index, 8 of generation."""

    def __init__(self):
        self.queues = []
        self.generations = []
        self.free = []

    cdef uint64_t add(self, WorkQueue queue) except 0:
        cdef uint64_t index, generation
        # The oldest free index is taken first, so that a stale wr_id meets its own generation as late as can be.
        if len(self.free) > 256 or len(self.queues) >= 65536:
            if not self.free:
                raise ClosedError("more than 65,536 work queues on one device: open it a second time")
            index = self.free.pop(0)
        else:
            index = len(self.queues)
            self.queues.append(None)
            self.generations.append(0)
        generation = self.generations[index] % 255 + 1
        self.generations[index] = generation
        self.queues[index] = queue
        return (generation << 16 | index) << SEQ_BITS

    cdef int remove(self, WorkQueue queue) except -1:
        cdef uint64_t index = (queue.base >> SEQ_BITS) & 0xFFFF
        if index < <uint64_t>len(self.queues) and self.queues[index] is queue:
            self.queues[index] = None
            self.free.append(index)
        return 0

    cdef WorkQueue find(self, uint64_t wr_id):
        cdef uint64_t index = (wr_id >> SEQ_BITS) & 0xFFFF
        cdef WorkQueue queue
        if index >= <uint64_t>len(self.queues):
            return None
        queue = <WorkQueue>self.queues[index]
        if queue is None or queue.base >> SEQ_BITS != wr_id >> SEQ_BITS:
            return None
        return queue


cdef class CompletionQueue:
    """A CQ with a completion channel of its own, polled and armed on the loop's thread.

    ``capacity`` is the CQ's size in entries. A work request is posted only when an entry is free for its completion
    (even unsignalled ones produce one when they are flushed), so the CQ can't overflow.
    """

    def __init__(self, Hooks hooks not None, QueueTable table not None, uintptr_t cq, uintptr_t channel, pyverbs,
                 pyverbs_channel, double spin_us, uint32_t budget=1024):
        self.hooks = hooks
        self.table = table
        self.cq = <v.ibv_cq *>cq
        self.channel = <v.ibv_comp_channel *>channel
        self.pyverbs = pyverbs
        self.pyverbs_channel = pyverbs_channel
        self.capacity = self.cq.cqe
        self.held = _word_of(pyverbs, <void *>self.cq)
        self.blocked = []
        self.tick_callback = self.tick
        self.spin_max_ns = <uint64_t>(spin_us * 1000)
        self.spin_ns = self.spin_max_ns
        self.budget = budget

    # -------------------------------------------------------------- polling

    cdef int _dispatch(self, v.ibv_wc *wc, int n) except -1:
        cdef int i = 0
        cdef WorkQueue queue
        cdef list blocked
        cdef object error = None
        self.n_polled += n
        while i < n:
            try:
                while i < n:
                    i += 1
                    queue = self.table.find(wc[i - 1].wr_id)
                    if queue is None or not queue._complete(&wc[i - 1]):
                        self.n_unknown += 1
                        self.hooks.report(
                            "a completion belongs to no operation",
                            UnknownCompletionError(wc[i - 1].wr_id, wc[i - 1].qp_num, wc[i - 1].status),
                        )
            except BaseException as e:
                # An interrupt while a waiter was woken, or a loop that is closed: the rest of them is polled already, and
                # would be lost.
                error = e
        if self.blocked and self.outstanding < self.capacity:
            blocked, self.blocked = self.blocked, []
            for waiting in blocked:
                queue = <WorkQueue>waiting
                queue.blocked_on_cq = False
                queue._flush_deferred()
        if error is not None:
            raise error
        return 0

    cdef int _poll(self, uint32_t budget) except -1:
        """Polls until empty or until ``budget`` completions were handled; how many were."""
        cdef v.ibv_wc wc[BATCH]
        cdef uint32_t total = 0
        cdef int n
        if self.closed or self.polling or self._gone():
            return 0
        self.polling = True
        try:
            while total < budget:
                n = v.ibv_poll_cq(self.cq, BATCH, wc)
                if n == 0:
                    break
                if n < 0:
                    self._fail_all(CompletionQueueError(f"ibv_poll_cq failed ({n})"))
                    break
                self._dispatch(wc, n)
                total += n
                if n < BATCH or self.closed:
                    break  # fewer than asked for: it was emptied (ibv_poll_cq(3))
        finally:
            self.polling = False
        return total

    cdef int _gone(self) except -1:
        """Whether the CQ was destroyed through its pyverbs object, or the PD's or context's, instead of the device's close()."""
        if self.held == NULL or self.held[0] == <void *>self.cq:
            return 0
        self.held = NULL
        self._fail_all(ClosedError("the CQ was destroyed by closing a pyverbs object; close the aiordma device instead"))
        self.closed = True
        return 1

    cdef int _spin(self, Waitable until) except -1:
        """Polls for up to the adaptive spin budget, without the GIL, until ``until`` has finished."""
        cdef v.ibv_wc wc[BATCH]
        cdef uint64_t deadline
        cdef int n
        self._poll(self.budget)
        if until.finished or self.spin_max_ns == 0 or self.closed or self.polling:
            return 0
        if self.spin_misses >= 8:
            # It has missed for a while: what is awaited takes longer than a spin. Try one in sixteen.
            self.spin_misses += 1
            if self.spin_misses & 15:
                return 0
        deadline = aior_now_ns() + self.spin_ns
        self.polling = True
        try:
            while True:
                with nogil:
                    n = aior_spin_cq(self.cq, BATCH, wc, deadline)
                if n < 0:
                    self._fail_all(CompletionQueueError(f"ibv_poll_cq failed ({n})"))
                    return 0
                if n == 0:
                    break
                self._dispatch(wc, n)
                if until.finished or self.closed:
                    self.n_spin_hits += 1
                    self.spin_misses = 0
                    self.spin_ns = min(self.spin_max_ns, self.spin_ns * 2)
                    return 0
        finally:
            self.polling = False
        self.n_spin_misses += 1
        self.spin_misses += 1
        self.spin_ns = max(self.spin_max_ns // 8, self.spin_ns // 2)
        return 0

    cdef int _arm(self) except -1:
        cdef int rc = v.ibv_req_notify_cq(self.cq, 0)
        if rc:
            raise VerbsError("ibv_req_notify_cq", rc)
        self.armed = True
        self.n_arms += 1
        return 0

    cdef int _progress(self) except -1:
        """Polls until empty, arms if anything is still to come, and polls again: a completion that came between the
        last poll and the arming raises no event (ibv_get_cq_event(3))."""
        cdef int n
        if self.closed or self.error is not None:
            return 0
        n = self._poll(self.budget)
        if <uint32_t>n >= self.budget:
            self._schedule_tick()
            return 0
        if self.armed or self.outstanding == 0 or self.closed or self.polling:
            return 0
        self._arm()
        if <uint32_t>self._poll(self.budget) >= self.budget:
            self._schedule_tick()
        return 0

    cdef int _before_post(self) except -1:
        """Without spinning an await will park, most likely, and the CQ be armed. Armed before anything is posted, whatever
        completes raises an event: no poll has to follow, and the loop need not take a turn for a tick."""
        if self.spin_max_ns == 0 and self.outstanding == 0 and not self.armed:
            self._arm()
        return 0

    cdef int _after_post(self) except -1:
        """What nobody awaits makes progress too: by an event, or in the loop's next turn."""
        if self.spin_max_ns or not self.armed:
            self._schedule_tick()
        return 0

    cdef int _schedule_tick(self) except -1:
        if not self.tick_scheduled:
            self.hooks.call_soon(self.tick_callback)
            self.tick_scheduled = True
            # Where no loop runs yet, the next thing may come on another one.
            self.hooks.verified = self.hooks.running_loop() is self.hooks.loop
            self.immediate = 0
            self.last_turn_ns = aior_now_ns()
        return 0

    # -------------------------------------------------------------- called by the engine, on the loop's thread

    def tick(self) -> None:
        """Once a loop turn in which something was posted: whatever nobody awaits makes progress too."""
        self.tick_scheduled = False
        self.hooks.verified = False
        self.immediate = 0
        self.last_turn_ns = aior_now_ns()
        self._progress()

    def on_readable(self) -> None:
        """The channel's descriptor is readable: take the event, acknowledge it, poll, arm again.

        Were there more, the descriptor would go on being readable.
        """
        cdef v.ibv_cq *cq
        cdef void *context
        cdef unsigned int events = 0
        cdef int rc
        if self.closed or self._gone():
            return
        self.n_wakeups += 1
        self.immediate = 0
        self.last_turn_ns = aior_now_ns()
        while True:
            rc = v.ibv_get_cq_event(self.channel, &cq, &context)
            if rc:
                if errno == EINTR:
                    continue
                break
            if cq == self.cq:
                events += 1
                break  # no second one comes before it's armed again
            else:
                # A channel that the user shares between CQs: acknowledged on the CQ it belongs to, or that CQ's
                # destruction waits for ever.
                v.ibv_ack_cq_events(cq, 1)
        if events:
            v.ibv_ack_cq_events(self.cq, events)
            self.n_events += events
            self.armed = False
        self._progress()

    def poll(self) -> int:
        """Handles what has completed; how many completions."""
        self.hooks.check()
        return self._poll(self.budget)

    def reserve(self, uint32_t entries) -> bool:
        """Sets entries aside for a new QP; False where they aren't there."""
        if self.closed or self.error is not None or self.reserved + entries > self.capacity:
            return False
        self.reserved += entries
        return True

    def unreserve(self, uint32_t entries) -> None:
        self.reserved -= min(entries, self.reserved)

    cdef int _fail_all(self, object error) except -1:
        cdef WorkQueue queue
        if self.error is None:
            self.error = error
            for item in list(self.table.queues):
                queue = <WorkQueue>item
                if queue is not None and queue.cq is self:
                    queue.abandon(error)
        return 0

    def fail(self, error) -> None:
        """The CQ or its device is lost: everything in flight ends with ``error``."""
        self._fail_all(error)

    def close(self) -> None:
        """No verb is called on it any more. What is still in flight ends with ClosedError."""
        if not self.closed:
            self._fail_all(ClosedError("the device was closed"))
            self.closed = True
            self.cq = NULL
            self.channel = NULL

    @property
    def spin_us(self) -> float:
        """The spin budget in microseconds; 0 turns spinning off."""
        return self.spin_max_ns / 1000

    @spin_us.setter
    def spin_us(self, double value):
        if not 0 <= value <= 10_000:
            raise ValueError("spin_us: 0 to 10000 microseconds")
        self.spin_max_ns = <uint64_t>(value * 1000)
        self.spin_ns = self.spin_max_ns
        self.spin_misses = 0

    def statistics(self) -> dict:
        """Counters since creation."""
        return {
            "capacity": self.capacity,
            "outstanding": self.outstanding,
            "events": self.n_events,
            "wakeups": self.n_wakeups,
            "polled": self.n_polled,
            "arms": self.n_arms,
            "spin_hits": self.n_spin_hits,
            "spin_misses": self.n_spin_misses,
            "unknown": self.n_unknown,
        }


cdef class WorkQueue:
    """A send queue, receive queue or SRQ: its slots, what is in them, and what waits for one, in FIFO order.

    ``kind`` is "send", "recv", "srq", or "streams": a send queue whose requests may complete in any order, and of which one
    may fail alone (a DCI with streams). There everything is signalled.
    """

    def __init__(self, CompletionQueue cq not None, str kind, uint32_t capacity, uintptr_t qp=0, uintptr_t srq=0,
                 uint32_t qp_num=0, bint can_mark=False, pyverbs=None):
        cdef uint32_t i
        self.cq = cq
        self.kind = {"send": KIND_SEND, "streams": KIND_SEND, "recv": KIND_RECV, "srq": KIND_SRQ}[kind]
        self.unordered = kind == "srq" or kind == "streams"
        self.name = kind
        self.qp = <v.ibv_qp *>qp
        self.srq = <v.ibv_srq *>srq
        self.qp_num = qp_num
        self.capacity = capacity
        self.can_mark = can_mark
        self.limbo = []
        self.pyverbs = pyverbs
        if pyverbs is not None:
            self.held = _word_of(pyverbs, <void *>self.qp if qp else <void *>self.srq)
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
        cdef uint32_t i, posted
        cdef int rc
        for i in range(n):
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
        for i in range(n - posted):
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
        if self.closed:
            raise ClosedError(f"QP {self.qp_num:#x} is closed")
        if cq.error is not None:
            raise cq.error
        cq._before_post()
        if self._room():
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
        if self.closed:
            raise ClosedError(f"QP {self.qp_num:#x} is closed")
        if cq.error is not None:
            raise cq.error
        cq._before_post()
        if self._room():
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
        if self.closed:
            raise ClosedError(f"QP {self.qp_num:#x} is closed" if self.kind == KIND_RECV else "the SRQ is closed")
        if cq.error is not None:
            raise cq.error
        cq._before_post()
        if self._room():
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

# cython: language_level=3, nonecheck=True
"""Completion queues: polled, armed, and their completions handed to the queues that they belong to.

Nothing here knows which event loop runs: see Hooks.
"""

from cpython.ref cimport PyObject
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from aiordma cimport _ibv as v
from aiordma._waitable cimport Hooks, Waitable

from aiordma.errors import ClosedError, CompletionQueueError, UnknownCompletionError, VerbsError

cdef extern from *:
    """
    static inline void aior_relax(void)
    {
    #if defined(__x86_64__)
        __builtin_ia32_pause();
    #elif defined(__aarch64__)
        __asm__ volatile("yield");
    #endif
    }
    /* Polls until something comes or the deadline passes; the clock is read every 32 empty polls, into *now. */
    static inline int aior_spin_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc, uint64_t deadline, uint64_t *now)
    {
        for (;;)
            for (int i = 0; ; i++) {
                int got = ibv_poll_cq(cq, n, wc);
                if (got)
                    return got;
                if (i == 32) {
                    *now = aior_now_ns();
                    if (*now >= deadline)
                        return 0;
                    break;
                }
                aior_relax();
            }
    }
    """
    int aior_spin_cq(v.ibv_cq *, int, v.ibv_wc *, uint64_t, uint64_t *) nogil

cdef enum:
    BATCH = 32


cdef void **word_of(object obj, void *value):
    """Where a pyverbs object keeps a pointer: it turns to NULL when the object is closed, by whoever."""
    cdef void **words = <void **><PyObject *>obj
    cdef Py_ssize_t i
    for i in range(2, type(obj).__basicsize__ // <Py_ssize_t>sizeof(void *)):
        if words[i] == value:
            return &words[i]
    return NULL


cdef class Queue:
    """What a CQ and the operations know of a queue that work requests are posted to."""

    cdef int _complete(self, v.ibv_wc *wc) except -1:
        return 0

    cdef int _flush_deferred(self) except -1:
        return 0

    cdef int _mark(self) except -1:
        return 0

    def abandon(self, error) -> None:
        """No completion will come any more."""


cdef class QueueTable:
    """Finds a work queue by the upper bits of a wr_id: 16 bits of index, 8 of generation."""

    def __init__(self):
        self.queues = []
        self.generations = []
        self.free = []

    cdef uint64_t add(self, Queue queue) except 0:
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

    cdef int remove(self, Queue queue) except -1:
        cdef uint64_t index = (queue.base >> SEQ_BITS) & 0xFFFF
        if index < <uint64_t>len(self.queues) and self.queues[index] is queue:
            self.queues[index] = None
            self.free.append(index)
        return 0

    cdef Queue find(self, uint64_t wr_id):
        cdef uint64_t index = (wr_id >> SEQ_BITS) & 0xFFFF
        cdef Queue queue
        if index >= <uint64_t>len(self.queues):
            return None
        queue = <Queue>self.queues[index]
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
        self.held = word_of(pyverbs, <void *>self.cq)
        self.blocked = []
        self.tick_callback = self.tick
        self.spin_max_ns = <uint64_t>(spin_us * 1000)
        self.budget = budget

    # -------------------------------------------------------------- polling

    cdef int _dispatch(self, v.ibv_wc *wc, int n) except -1:
        cdef int i = 0
        cdef Queue queue
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
                queue = <Queue>waiting
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
        """Whether the CQ was destroyed by closing its pyverbs object, or the PD's or context's, instead of the device."""
        if self.held == NULL or self.held[0] == <void *>self.cq:
            return 0
        self.held = NULL
        self._fail_all(ClosedError("the CQ was destroyed by closing a pyverbs object; close the aiordma device instead"))
        self.closed = True
        return 1

    cdef int _spin(self, Waitable until) except -1:
        """Polls for up to the spin budget, without the GIL, until ``until`` has finished.

        The whole of it or not at all: a shorter spin would give up on what takes a little longer, and a look now and then
        whether completions come sooner again costs a sixteenth of the budget.
        """
        cdef v.ibv_wc wc[BATCH]
        cdef uint64_t now, start, deadline
        cdef int n
        self._poll(self.budget)
        if until.finished or self.spin_max_ns == 0 or self.closed or self.polling:
            return 0
        if self.spin_misses >= 8:
            # It has missed for a while: what is awaited takes longer than a spin. Try one in sixteen.
            self.spin_misses += 1
            if self.spin_misses & 15:
                return 0
        now = start = aior_now_ns()
        deadline = start + self.spin_max_ns
        self.polling = True
        try:
            while True:
                with nogil:
                    n = aior_spin_cq(self.cq, BATCH, wc, deadline, &now)
                if n < 0:
                    self._fail_all(CompletionQueueError(f"ibv_poll_cq failed ({n})"))
                    return 0
                if n == 0:
                    break
                self._dispatch(wc, n)
                if until.finished or self.closed:
                    self.n_spin_hits += 1
                    self.spin_misses = 0
                    # An await that spins can take as long as a thousand others, and has read the clock already.
                    if self.spinning_since_ns == 0:
                        self.spinning_since_ns = start
                    if now - self.spinning_since_ns > TURN_NS:
                        self.immediate = IMMEDIATE_LIMIT
                    return 0
        finally:
            self.polling = False
        self.n_spin_misses += 1
        self.spin_misses += 1
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

    cdef inline void _turn_begins(self) noexcept:
        self.immediate = 0
        self.spinning_since_ns = 0
        self.last_turn_ns = aior_now_ns()

    cdef int _schedule_tick(self) except -1:
        if not self.tick_scheduled:
            self.hooks.call_soon(self.tick_callback)
            self.tick_scheduled = True
            # Where no loop runs yet, the next thing may come on another one.
            self.hooks.verified = self.hooks.running_loop() is self.hooks.loop
            self._turn_begins()
        return 0

    # -------------------------------------------------------------- called by the engine, on the loop's thread

    def tick(self) -> None:
        """Once a loop turn in which something was posted: whatever nobody awaits makes progress too."""
        self.tick_scheduled = False
        self.hooks.verified = False
        self._turn_begins()
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
        self._turn_begins()
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
        cdef Queue queue
        if self.error is None:
            self.error = error
            for item in list(self.table.queues):
                queue = <Queue>item
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

# cython: language_level=3, nonecheck=True
"""Operations in flight: one object is the operation and what is awaited."""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.string cimport memcpy

from aiordma cimport _ibv as v
from aiordma._cq cimport IMMEDIATE_LIMIT, TURN_NS, CompletionQueue, Queue, aior_now_ns
from aiordma._memory cimport leave_all
from aiordma._waitable cimport Alarm, Waitable

from aiordma.errors import completion_error

cdef extern from "Python.h":
    ctypedef PyObject *(*iternextfunc)(PyObject *)

    ctypedef struct PyTypeObject:
        iternextfunc tp_iternext

    void PyErr_SetObject(object, object)

# After how many awaits more the clock is looked at again. Reading it takes as long as a tenth of an await, and waits for all
# memory accesses.
cdef enum:
    IMMEDIATE_AGAIN = 8

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
    <int>REQUEST_RECV: "RECV",
    <int>REQUEST_MARKER: "marker",
    <int>REQUEST_UMR: "UMR",
    <int>REQUEST_MEMCPY: "MEMCPY",
    <int>REQUEST_RAW_WQE: "RAW_WQE",
}


cdef class _FlushAlarm(Alarm):
    """Of those that were only flushed, one a queue is reported: a queue that dies flushes everything, and says nothing new
    each time."""

    cdef Queue queue

    cdef int _ring(self) except -1:
        if not self.queue.flush_reported:
            self.queue.flush_reported = True
            Alarm._ring(self)
        return 0


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
        cdef Alarm alarm
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
            # The receives that wait for a peer end with its connection; that's no failure that somebody must hear of.
            if not self.internal and not self.queue.closed and not (
                self.queue.disconnected
                and self.asked == REQUEST_RECV
                and self._status == v.IBV_WC_WR_FLUSH_ERR
            ):
                if self._status == v.IBV_WC_WR_FLUSH_ERR:
                    alarm = _FlushAlarm.__new__(_FlushAlarm)
                    (<_FlushAlarm>alarm).queue = self.queue
                else:
                    alarm = Alarm.__new__(Alarm)
                alarm.hooks = self.hooks
                alarm.message = "an RDMA operation failed and nobody awaited it"
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
        cdef Queue q = self.queue
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
        if cq.immediate >= IMMEDIATE_LIMIT:
            if aior_now_ns() - cq.last_turn_ns > TURN_NS:
                # A task whose operations all complete at once would never let another run. The millisecond is the turn's,
                # and not this task's: many such tasks take turns of 64 awaits, or of a millisecond of those that spin,
                # once it's over. What begins it anew is the next turn.
                cq.immediate = 0
                cq.spinning_since_ns = 0
                cq._schedule_tick()
                return self.hooks.yield_once(self)
            cq.immediate = IMMEDIATE_LIMIT - IMMEDIATE_AGAIN
        cdef _Now now = _Now.__new__(_Now)
        now.completion = self
        return now

    cdef object _result(self):
        if self._status == 0 and self.error is None:
            return self
        if self.alarm is not None:
            self.alarm.silence()
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
            self.alarm.silence()
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

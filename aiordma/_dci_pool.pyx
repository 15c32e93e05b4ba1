# cython: language_level=3, nonecheck=True
"""What a pool of DCIs does for every operation: choosing a lane, posting, waiting for one.

What happens once in a while (recovery, closing) is in aiordma/mlx5/dci_pool.py.
"""

cimport cython
from cpython.list cimport PyList_GET_SIZE
from cpython.ref cimport PyObject
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from aiordma cimport _ibv as v
from aiordma._cq cimport CompletionQueue
from aiordma._memory cimport MemorySlice, enter_all, leave_all
from aiordma._mlx5 cimport DcAddress, DcInitiatorBase
from aiordma._operation cimport Completion
from aiordma._waitable cimport Alarm, Hooks, Waitable, await_ready

from aiordma._waitable import no_copy
from aiordma.errors import ClosedError, UsageError

cdef extern from "Python.h":
    PyObject *PyTuple_GET_ITEM(object, Py_ssize_t)
    Py_ssize_t PyTuple_GET_SIZE(object)

    ctypedef object (*unaryfunc)(object)

    ctypedef struct PyAsyncMethods:
        unaryfunc am_await

    ctypedef struct PyTypeObject:
        PyAsyncMethods *tp_as_async

    PyTypeObject *Py_TYPE(object)

_CALLS = {
    <int>v.IBV_WR_RDMA_WRITE: "rdma_write",
    <int>v.IBV_WR_RDMA_WRITE_WITH_IMM: "rdma_write",
    <int>v.IBV_WR_RDMA_READ: "rdma_read",
    <int>v.IBV_WR_SEND: "send",
    <int>v.IBV_WR_SEND_WITH_IMM: "send",
    <int>v.IBV_WR_ATOMIC_FETCH_AND_ADD: "atomic_fetch_add",
    <int>v.IBV_WR_ATOMIC_CMP_AND_SWP: "atomic_cmp_swp",
}


@cython.final
cdef class Fifo:
    """Operations that wait, in order: a list, of which ``head`` at its beginning have gone and ``n`` are left."""

    def __cinit__(self):
        self.items = []

    def __len__(self) -> int:
        return self.n

    cdef int push(self, PoolOperation operation) except -1:
        self.items.append(operation)
        self.n += 1
        return 0

    cdef PoolOperation pop(self):
        """Takes the oldest; there is one."""
        cdef PoolOperation operation = <PoolOperation>self.items[self.head]
        self.items[self.head] = None
        self.head += 1
        self.n -= 1
        if self.n == 0 or self.head >= 64 and self.head >= self.n:
            del self.items[:self.head]
            self.head = 0
        return operation

    def put_before(self, list operations not None) -> None:
        """Before the others."""
        self.items[:self.head] = operations
        self.head = 0
        self.n = PyList_GET_SIZE(self.items)

    def clear(self) -> list:
        """Takes all."""
        cdef list found = self.items[self.head:]
        self.items = []
        self.head = self.n = 0
        return found


cdef class Slot:
    """A place for a DCI in the pool, which keeps its lanes when the DCI is replaced."""

    def __init__(self, uint32_t index, DcInitiatorBase dci not None, uint32_t depth, streams):
        self.index = index
        self.dci = dci
        self.depth = depth
        self.lanes = [Lane(self, stream_id) for stream_id in streams]
        self.idle = []


cdef class Lane:
    """One stream of one DCI of the pool.

    ``ready``: whether it takes work: not while it's in error, being reset, or its DCI being replaced. ``in_flight``
    operations; ``target`` whose they are, None while there are none, or of several targets.
    """

    def __init__(self, Slot slot not None, uint16_t stream_id):
        self.slot = slot
        self.stream_id = stream_id
        self.ready = True
        self.waiting = Fifo()
        self.returned = []

    def has_room(self) -> bool:
        """Whether its DCI's send queue has a free slot: the pool never makes one wait in a DCI, where it couldn't be held
        back while a stream is reset."""
        return self.slot.in_flight < self.slot.depth

    def takes(self, target) -> bool:
        """Whether nothing of another target is in flight on it, so that neither's error can flush the other's work."""
        return self.in_flight == 0 or self.target is target

    def give_back(self, PoolOperation operation not None) -> None:
        """One that was flushed by another target's error is to be posted again before what waits."""
        self.returned.append(operation)

    def revive(self) -> None:
        """Its stream takes work again, first what was given back."""
        self.ready = True
        self.culprit = None
        if self.returned:
            self.waiting.put_before(self.returned)
            self.slot.waiting += len(self.returned)
            self.returned = []

    def give_up(self) -> list:
        """What waits for it, taken away."""
        cdef list found = self.returned + self.waiting.clear()
        self.slot.waiting -= len(found) - len(self.returned)
        self.returned = []
        self.ready = False
        return found


cdef Lane _least_loaded(tuple lanes, DcAddress target):
    cdef Py_ssize_t i
    cdef PyObject *item
    cdef PyObject *best = NULL
    cdef uint32_t n, m, best_n = 0, best_m = 0
    for i in range(PyTuple_GET_SIZE(lanes)):
        item = PyTuple_GET_ITEM(lanes, i)
        n = (<Lane>item).in_flight
        if not (<Lane>item).ready or n != 0 and <void *>(<Lane>item).target != <void *>target:
            continue
        m = (<Lane>item).slot.in_flight
        if m >= (<Lane>item).slot.depth:
            continue
        if m == 0:
            return <Lane>item
        if best == NULL or n < best_n or n == best_n and m < best_m:
            best = item
            best_n = n
            best_m = m
    return None if best == NULL else <Lane>best


def least_loaded(lanes, target):
    """The lane with the fewest operations in flight, of those that hold no other target's; None where there is none."""
    cdef tuple all_lanes = tuple(lanes)
    for lane in all_lanes:
        if not isinstance(lane, Lane):
            raise TypeError(f"lanes of a pool, not {type(lane).__name__}")
    return _least_loaded(all_lanes, target)


cdef class PoolOperation(Waitable):
    """An operation of a :class:`DCIPool`, under way or waiting for a lane. ``await`` gives its :class:`Completion`.

    It keeps its registered memory registered until it is over. Cancelling an await only detaches the waiter. An error
    that nobody looked at is reported when the operation goes away.
    """

    def __init__(self):
        raise TypeError("made by the calls of a DCIPool")

    cdef int _end(self, object error, bint report) except -1:
        """It is over. Only the first end counts: a callback of one that fails may close the pool, which ends it too."""
        if self.finished:
            return 0
        cdef object held = self.held
        # Who keeps an operation that is over keeps neither the pool nor its memory with it.
        self.held = self.local = self.remote = self.pool = None
        self.error = error
        if error is not None and report:
            self.alarm = Alarm.__new__(Alarm)
            self.alarm.hooks = self.hooks
            self.alarm.message = "an operation of a DCI pool failed and nobody awaited it"
            self.alarm.error = error
        leave_all(held)
        return self._finish()

    cdef int _notified(self, Waitable finished) except -1:
        try:
            return self.pool._over(self)
        except Exception as e:
            self.hooks.report("a DCI pool failed at the end of an operation", e)
            return 0

    cdef int _prepare_wait(self) except -1:
        """Polls and spins where its completion comes from; while it waits for a lane, where one that comes first does."""
        cdef CompletionQueue cq = None
        cdef Slot slot
        if self.completion is not None and not self.completion.finished:
            cq = self.completion.queue.cq
        else:
            for item in self.pool.slots:
                slot = <Slot>item
                if slot.in_flight:
                    cq = slot.dci._send.cq
                    break
        if cq is not None:
            cq._spin(self)
            if not self.finished:
                cq._progress()
        return 0

    cdef object _result(self):
        if self.error is None:
            return self.completion
        if self.alarm is not None:
            self.alarm.silence()
        raise self.error

    def __await__(self):
        if not self.finished:
            self.hooks.check()
            self._prepare_wait()
            if not self.finished:
                self.hooks.check_loop()
                return self.hooks.wait(self)
        if self.error is None:
            return Py_TYPE(self.completion).tp_as_async.am_await(self.completion)
        return await_ready(self)

    def exception(self):
        """The error it ended with, or None; :class:`RuntimeError` while it's under way. Counts as looking at it."""
        if not self.finished:
            raise RuntimeError("under way: await it first")
        if self.alarm is not None:
            self.alarm.silence()
        return self.error

    def __repr__(self) -> str:
        state = "done" if self.finished else "waits for a lane" if self.completion is None else "under way"
        return f"<PoolOperation {_CALLS[self.opcode]} to {self.target!r}, {state}>"


cdef class PoolBase:
    """The calls of a :class:`DCIPool`: those of a DCInitiator, without a stream."""

    def __reduce__(self):
        no_copy(self)

    def _set_up_pool(self, Hooks hooks not None, list slots not None, tuple lanes not None, policy, uint64_t inline_limit):
        self.hooks = hooks
        self.slots = slots
        self.all_lanes = lanes
        for lane in lanes:
            if not isinstance(lane, Lane):
                raise TypeError("lanes")
        self.policy = policy
        self.by_load = policy is least_loaded
        self.inline_limit = inline_limit
        self.waiting = Fifo()

    # -------------------------------------------------------------- the calls

    def rdma_write(self, target, local, remote, *, imm=None) -> PoolOperation:
        """RDMA WRITE; with ``imm`` it uses a receive of the target's, and is never repeated."""
        return self._start(
            v.IBV_WR_RDMA_WRITE if imm is None else v.IBV_WR_RDMA_WRITE_WITH_IMM, target, local, remote, imm, None, None,
            imm is None,
        )

    def rdma_read(self, target, local, remote) -> PoolOperation:
        """RDMA READ."""
        return self._start(v.IBV_WR_RDMA_READ, target, local, remote, None, None, None, True)

    def send(self, target, local, *, imm=None) -> PoolOperation:
        """SEND, with immediate."""
        return self._start(
            v.IBV_WR_SEND if imm is None else v.IBV_WR_SEND_WITH_IMM, target, local, None, imm, None, None, False
        )

    def atomic_fetch_add(self, target, local, remote, add) -> PoolOperation:
        """Atomic addition."""
        return self._start(v.IBV_WR_ATOMIC_FETCH_AND_ADD, target, local, remote, None, add, 0, False)

    def atomic_cmp_swp(self, target, local, remote, compare, swap) -> PoolOperation:
        """Atomic compare and swap."""
        return self._start(v.IBV_WR_ATOMIC_CMP_AND_SWP, target, local, remote, None, compare, swap, False)

    # -------------------------------------------------------------- under way

    cdef PoolOperation _start(self, int opcode, object target, object local, object remote, object imm, object compare_add,
                              object swap, bint repeatable):
        cdef PoolOperation operation
        if self.shut:
            raise ClosedError(f"{self!r} is closed")
        self.hooks.check()
        if not isinstance(target, DcAddress):
            raise UsageError(f"the target is a DcPeer, made by pool.reach(info), not {type(target).__name__}")
        if (<DcAddress>target).domain is None:
            raise ClosedError(f"{target!r} is closed")
        operation = PoolOperation.__new__(PoolOperation)
        operation.hooks = self.hooks
        operation.pool = self
        operation.target = <DcAddress>target
        operation.opcode = opcode
        operation.local = local
        operation.remote = remote
        operation.imm = imm
        operation.compare_add = compare_add
        operation.swap = swap
        operation.repeatable = repeatable
        if isinstance(local, MemorySlice):
            operation.held = local
            operation.nbytes = (<MemorySlice>local).length
        elif local is not None:
            operation.held = _slices(local)
            operation.nbytes = _length(local)
            # The caller may change what is no registered memory as soon as the call returns, and it may be posted later, or
            # again.
            operation.local = _copied(local, 0 if opcode == v.IBV_WR_RDMA_READ else self.inline_limit)
        enter_all(operation.held)
        try:
            if self._dead:
                self._revive_the_dead()
            self._place(operation, False)
        except BaseException as e:
            operation._end(e, False)
            if isinstance(e, ClosedError):
                self._replace_closed()
            raise
        return operation

    cdef int _place(self, PoolOperation operation, bint again) except -1:
        """Posts an operation where the policy says, or makes it wait; 0 where it waits in the pool."""
        cdef Lane lane = None
        if again or not self.waiting.n:
            if self.by_load:
                lane = _least_loaded(self.all_lanes, operation.target)
            else:
                lane = self._ask(operation)
                if operation.finished:
                    return 1
        if lane is None:
            if not again:
                self.waiting.push(operation)
            return 0
        if not lane.ready or lane.slot.in_flight >= lane.slot.depth or lane.waiting.n:
            lane.waiting.push(operation)
            lane.slot.waiting += 1
        else:
            self._post(lane, operation)
        return 1

    cdef Lane _ask(self, PoolOperation operation):
        """What a policy of the user's says, which may be anything and do anything."""
        cdef object lane = self.policy(self.all_lanes, operation.target)
        cdef Py_ssize_t i
        if self.shut:
            raise ClosedError(f"{self!r} is closed")
        if lane is None:
            return None
        for i in range(PyTuple_GET_SIZE(self.all_lanes)):
            if PyTuple_GET_ITEM(self.all_lanes, i) == <PyObject *>lane:
                break
        else:
            raise UsageError(f"the policy gave {lane!r}, which is neither a lane of this pool nor None")
        if (<Lane>lane).slot.error is not None:
            # Nobody else would have its DCI replaced.
            self._revive_the_dead()
        return <Lane>lane

    cdef int _post(self, Lane lane, PoolOperation operation) except -1:
        cdef Slot slot = lane.slot
        cdef Completion c = slot.dci._post_request(
            operation.target, operation.opcode, operation.local, operation.remote, operation.imm, None, v.IBV_SEND_SIGNALED,
            lane.stream_id, operation.compare_add, operation.swap,
        )
        operation.lane = lane
        operation.completion = c
        operation.attempts += 1
        if lane.in_flight == 0:
            lane.target = operation.target
        elif lane.target is not operation.target:
            lane.target = None
        lane.in_flight += 1
        slot.in_flight += 1
        lane.posted += 1
        lane.bytes += operation.nbytes
        c._add_waiter(operation)
        return 0

    cdef int _over(self, PoolOperation operation) except -1:
        """The device has reported what was posted for it."""
        cdef Completion c = operation.completion
        cdef Lane lane = operation.lane
        cdef Slot slot = lane.slot
        lane.in_flight -= 1
        slot.in_flight -= 1
        if lane.in_flight == 0:
            lane.target = None
        if c._status == 0 and c.error is None:
            operation._end(None, False)
        else:
            self._failed(lane, operation, c)
        if slot.idle and (lane.in_flight == 0 or slot.in_flight == 0):
            for signal in slot.idle[:]:
                signal.finish()
            slot.idle.clear()
        self._serve(slot)
        return 0

    def _end(self, PoolOperation operation not None, error) -> None:
        """It failed without being posted, or won't be posted again."""
        operation._end(error, not self.shut)

    def _failed(self, Lane lane, PoolOperation operation, Completion completion) -> None:
        """What becomes of an operation whose work request failed."""
        raise NotImplementedError

    def _revive_the_dead(self) -> None:
        """A slot has no DCI, and there is work."""
        raise NotImplementedError

    def _replace_closed(self) -> None:
        """Something was closed: a DCI, perhaps."""
        raise NotImplementedError

    def _wait_again(self, PoolOperation operation not None) -> None:
        """It goes on whichever lane is free next."""
        self.waiting.push(operation)

    def _give_up_waiting(self) -> list:
        """What waits for any lane, taken away."""
        return self.waiting.clear()

    def _shut_pool(self) -> None:
        """Nothing more is posted."""
        self.shut = True

    def _dispatch(self, Slot slot not None) -> None:
        """Lanes of a DCI take work again."""
        self._serve(slot)

    cdef int _serve(self, Slot slot) except -1:
        """Something may be posted now: first what waits in the lanes of a DCI, the lanes in turn, then the pool's."""
        cdef PoolOperation operation
        cdef Lane lane
        cdef uint32_t idle = 0, n
        if slot.waiting:
            n = <uint32_t>PyList_GET_SIZE(slot.lanes)
            while slot.waiting and idle < n and slot.in_flight < slot.depth:
                lane = <Lane>slot.lanes[slot.turn]
                slot.turn = (slot.turn + 1) % n
                if not lane.ready or not lane.waiting.n:
                    idle += 1
                    continue
                idle = 0
                slot.waiting -= 1
                operation = lane.waiting.pop()
                try:
                    self._post(lane, operation)
                except Exception as e:
                    self._end(operation, e)
        while self.waiting.n:
            operation = <PoolOperation>self.waiting.items[self.waiting.head]
            try:
                if not self._place(operation, True):
                    return 0
            except Exception as e:
                self._end(operation, e)
            # Unless a policy that closes the pool has taken it.
            if self.waiting.n and self.waiting.items[self.waiting.head] is operation:
                self.waiting.pop()
        return 0


cdef object _slices(object local):
    """The registered memory in a source or target."""
    if isinstance(local, (list, tuple)):
        return tuple([part for part in local if isinstance(part, MemorySlice)])
    return None


def _length(local):
    """Bytes of a source or target, for the counters."""
    if isinstance(local, (list, tuple)):
        return sum([_part_length(part) for part in local])
    return _part_length(local)


def _part_length(part):
    if isinstance(part, MemorySlice):
        return part.length
    try:
        with memoryview(part) as view:
            return view.nbytes
    except TypeError:  # no memory: posting it says so
        return 0


def _copied(local, limit):
    """A source with a copy of what is no registered memory, where it may be sent inline at all."""
    if isinstance(local, (list, tuple)):
        return tuple([_part_copied(part, limit) for part in local])
    return _part_copied(local, limit)


def _part_copied(part, limit):
    if isinstance(part, (MemorySlice, bytes)):
        return part
    return bytes(part) if 0 < _part_length(part) <= limit else part

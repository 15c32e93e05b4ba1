"""A pool of DCIs: asynchronous operations to many targets, spread over DCIs and their streams.

Each (DCI, stream) pair is a :class:`Lane`. An operation goes on the lane that the policy chooses. When one fails, its
stream is in error: what else was on that stream is flushed, the stream is reset, and operations on other lanes go on
meanwhile. When too many streams of a DCI are in error at a time the DCI itself is, and is replaced by a new one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from aiordma import _control
from aiordma._memory import MemorySlice, RemoteBuffer
from aiordma._mlx5 import hold, let_go
from aiordma._offload import Pending, in_use, outcome, until
from aiordma._operation import Completion
from aiordma._owned import Owned
from aiordma._values import whole
from aiordma._waitable import Signal
from aiordma.errors import ClosedError, RdmaError, UnsupportedError, UsageError, VerbsError
from aiordma.mlx5.dc import DCInitiator, DcPeer, DCTInfo, check_dc, create_initiator, reach
from aiordma.qp import ERR, QPConfig, check_limits

if TYPE_CHECKING:
    from aiordma._post import Source, Target
    from aiordma.device import Device

__all__ = ["DCIPool", "Lane", "LaneStatistics", "PoolOperation", "create_dci_pool", "least_loaded", "sticky"]

_WR_FLUSH_ERR = 5  # enum ibv_wc_status
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Counters of one stream of one DCI."""

    dci: int
    stream_id: int
    ready: bool
    in_flight: int
    posted: int
    bytes: int
    errors: int
    resets: int


class Lane:
    """One stream of one DCI of the pool."""

    __slots__ = (
        "bytes",
        "errors",
        "in_flight",
        "posted",
        "ready",
        "resets",
        "returned",
        "slot",
        "stream_id",
        "target",
        "waiting",
    )

    def __init__(self, slot: _Slot, stream_id: int) -> None:
        self.slot = slot
        self.stream_id = stream_id
        self.ready = True
        """Whether the stream takes work: not while it's in error, being reset, or its DCI being replaced."""
        self.in_flight = 0
        self.target: DcPeer | None = None
        """Whose operations are in flight; None while there are none, or of several targets."""
        self.waiting: deque[PoolOperation] = deque()
        self.returned: list[PoolOperation] = []
        """Flushed by another target's error, to be posted again before what waits."""
        self.posted = self.bytes = self.errors = self.resets = 0

    def has_room(self) -> bool:
        """Whether its DCI's send queue has a free slot: the pool never makes one wait in a DCI, where it couldn't be held
        back while a stream is reset."""
        return self.slot.in_flight < self.slot.depth

    def takes(self, target: DcPeer) -> bool:
        """Whether nothing of another target is in flight on it, so that neither's error can flush the other's work."""
        return self.in_flight == 0 or self.target is target


class _Slot:
    """A place for a DCI in the pool, which keeps its lanes when the DCI is replaced."""

    def __init__(self, index: int, dci: DCInitiator) -> None:
        self.index = index
        self.dci = dci
        self.depth = dci.config.max_send_wr
        self.in_flight = 0
        self.lanes = [Lane(self, stream_id) for stream_id in dci.streams]
        self.waiting = 0  # operations in its lanes' queues
        self.turn = 0  # the lane whose queue is served first
        self.recovering: Pending[None] | None = None
        self.error: RdmaError | None = None  # why the DCI couldn't be replaced
        self.idle: list[Signal] = []
        self.rebuilds = 0


Policy = Callable[[Sequence[Lane], DcPeer], Lane | None]
"""Chooses the lane of an operation: one that isn't ready makes it wait there (in order); None makes it wait in the pool.
A policy whose targets' operations are to keep their order says so by an attribute ``ordered = True``."""


def least_loaded(lanes: Sequence[Lane], target: DcPeer) -> Lane | None:
    """The lane with the fewest operations in flight, of those that hold no other target's; None where there is none."""
    best: Lane | None = None
    for lane in lanes:
        if lane.ready and lane.has_room() and lane.takes(target):
            if lane.in_flight == 0 and lane.slot.in_flight == 0:
                return lane
            if best is None or (lane.in_flight, lane.slot.in_flight) < (best.in_flight, best.slot.in_flight):
                best = lane
    return best


def sticky(lanes: Sequence[Lane], target: DcPeer) -> Lane | None:
    """Always the same lane for a target: its operations happen in the order in which they were called.

    Targets that share a lane share its errors.
    """
    return lanes[hash((target.dctn, target.key)) % len(lanes)]


class PoolOperation(Signal):
    """An operation of a :class:`DCIPool`, under way or waiting for a lane. ``await`` gives its :class:`Completion`.

    It keeps its registered memory registered until it is over. Cancelling an await only detaches the waiter. An error
    that nobody looked at is reported when the operation goes away.
    """

    _unseen: BaseException | None = None

    def __init__(
        self,
        pool: DCIPool,
        call: Callable[..., Completion],
        target: DcPeer,
        local: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        repeatable: bool,
    ) -> None:
        super().__init__(pool.device.control.hooks)
        self._backend = pool.device.control.backend
        self.call = call
        self.target = target
        self.local = local
        self.arguments = arguments
        self.options = options
        self.repeatable = repeatable
        self.held = _slices(local)
        self.nbytes = _length(local)
        self.attempts = 0
        self.lane: Lane | None = None
        self.completion: Completion | None = None
        hold(self.held)

    def post(self, lane: Lane) -> Completion:
        """Posts it on a lane's stream."""
        return self.call(
            lane.slot.dci, self.target, self.local, *self.arguments, stream_id=lane.stream_id, **self.options
        )

    def end(self, error: BaseException | None, *, report: bool = True) -> None:
        """It is over."""
        let_go(self.held)
        self.held = ()
        if error is None:
            self.finish(self.completion)
            return
        self._unseen = error if report else None
        self.fail(error)

    def exception(self) -> BaseException | None:
        """The error it ended with, or None; :class:`RuntimeError` while it's under way. Counts as looking at it."""
        if not self.done:
            raise RuntimeError("under way: await it first")
        self._unseen = None
        try:
            self.result()
        except Exception as e:
            return e
        return None

    def __await__(self) -> Generator[Any, None, Completion]:
        try:
            result: Completion = yield from super().__await__()
        except Exception:
            if self.done:
                self._unseen = None
            raise
        return result

    def __del__(self) -> None:
        if self._unseen is not None:
            self._backend.report("an operation of a DCI pool failed and nobody awaited it", self._unseen)

    def __repr__(self) -> str:
        state = "done" if self.done else "waits for a lane" if self.completion is None else "under way"
        return f"<PoolOperation {self.call.__name__} to {self.target!r}, {state}>"


class DCIPool(Owned):
    """Spreads operations over several DCIs and their streams. Made by :func:`create_dci_pool`.

    The calls are those of :class:`DCInitiator`, without a stream: ``await pool.rdma_write(peer, local, remote)``. They start
    at once and return a :class:`PoolOperation` to await.

    An error costs the target that it came from: its operations in flight on the same stream fail (or are flushed). Writes
    and reads of other targets that were flushed with them are posted again, since doing them twice does no harm;
    sends and atomics never share a stream with another target's work, unless the policy has it so, as ``sticky``.
    When a DCI fails as a whole, writes and reads in flight on its other lanes are posted again too, sends and atomics
    fail with :class:`WrFlushError`.

    What waits for a lane is checked when it's posted, so its await may raise what a call would have raised at once.
    """

    kind: ClassVar[str] = "dci_pools"
    close_order: ClassVar[int] = -1  # before its DCIs
    teardown: ClassVar[None] = None

    def __init__(
        self,
        device: Device,
        dcis: list[DCInitiator],
        settings: tuple[QPConfig, int | None, int, int],
        policy: Policy,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._ordered = policy is sticky or getattr(policy, "ordered", False)
        self._slots = [_Slot(index, dci) for index, dci in enumerate(dcis)]
        # Round the DCIs first, then their streams, so that equal lanes fill evenly.
        self._lanes = [
            lane
            for group in itertools.zip_longest(*(slot.lanes for slot in self._slots))
            for lane in group
            if lane is not None
        ]
        self._waiting: deque[PoolOperation] = deque()
        # Whose operation put a lane into error; None where the DCI's own error flushed it.
        self._culprits: dict[Lane, DcPeer | None] = {}
        self._inline = min(dci.max_inline_data for dci in dcis)
        self._dead = 0  # slots whose DCI couldn't be replaced
        self._unfinished = 0
        self._belong(device)

    # ---------------------------------------------------------------- what it is

    @property
    def lanes(self) -> Sequence[Lane]:
        """All (DCI, stream) pairs."""
        return tuple(self._lanes)

    @property
    def dcis(self) -> list[DCInitiator]:
        """The DCIs, as they are now; one that failed is replaced."""
        return [slot.dci for slot in self._slots]

    @property
    def rebuilds(self) -> int:
        """How many DCIs were replaced."""
        return sum(slot.rebuilds for slot in self._slots)

    def statistics(self) -> list[LaneStatistics]:
        """Counters of each lane."""
        return [
            LaneStatistics(
                lane.slot.index,
                lane.stream_id,
                lane.ready,
                lane.in_flight,
                lane.posted,
                lane.bytes,
                lane.errors,
                lane.resets,
            )
            for lane in self._lanes
        ]

    def reach(self, info: DCTInfo) -> Pending[DcPeer]:
        """Makes the address of a target, off the loop; close it when it's of no more use."""
        self._check()
        return reach(self._device, info, self._settings[0])

    # ---------------------------------------------------------------- operations

    def rdma_write(
        self, target: DcPeer, local: Source, remote: RemoteBuffer, *, imm: int | None = None
    ) -> PoolOperation:
        """RDMA WRITE; with ``imm`` it uses a receive of the target's, and is never repeated."""
        return self._start(DCInitiator.rdma_write, target, local, (remote,), {"imm": imm}, imm is None)

    def rdma_read(self, target: DcPeer, local: Target, remote: RemoteBuffer) -> PoolOperation:
        """RDMA READ."""
        return self._start(DCInitiator.rdma_read, target, local, (remote,), {}, True)

    def send(self, target: DcPeer, local: Source, *, imm: int | None = None) -> PoolOperation:
        """SEND, with immediate."""
        return self._start(DCInitiator.send, target, local, (), {"imm": imm}, False)

    def atomic_fetch_add(self, target: DcPeer, local: MemorySlice, remote: RemoteBuffer, add: int) -> PoolOperation:
        """Atomic addition."""
        return self._start(DCInitiator.atomic_fetch_add, target, local, (remote, add), {}, False)

    def atomic_cmp_swp(
        self, target: DcPeer, local: MemorySlice, remote: RemoteBuffer, compare: int, swap: int
    ) -> PoolOperation:
        """Atomic compare and swap."""
        return self._start(DCInitiator.atomic_cmp_swp, target, local, (remote, compare, swap), {}, False)

    def _check(self) -> None:
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        self._device.control.hooks.verify()

    def _start(
        self,
        call: Callable[..., Completion],
        target: DcPeer,
        local: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        repeatable: bool,
    ) -> PoolOperation:
        self._check()
        if not isinstance(target, DcPeer):
            raise UsageError(f"the target is a DcPeer, made by pool.reach(info), not {type(target).__name__}")
        if target.closed:
            raise ClosedError(f"{target!r} is closed")
        operation = PoolOperation(self, call, target, local, arguments, options, repeatable)
        self._unfinished += 1
        try:
            self._revive_the_dead()
            self._place(operation)
        except BaseException as e:
            self._unfinished -= 1
            operation.end(e, report=False)
            raise
        if operation.completion is None and not operation.done:
            # The caller may change what is no registered memory as soon as the call returns.
            operation.local = _copied(local, self._inline)
        return operation

    def _place(self, operation: PoolOperation, *, again: bool = False) -> bool:
        """Posts an operation where the policy says, or makes it wait; False where it waits in the pool."""
        if self._waiting and not again:
            self._waiting.append(operation)
            return False
        lane = self._policy(self._lanes, operation.target)
        if lane is None:
            if not again:
                self._waiting.append(operation)
            return False
        slot = lane.slot
        if not lane.ready or not lane.has_room() or lane.waiting:
            lane.waiting.append(operation)
            slot.waiting += 1
        else:
            self._post(lane, operation)
        return True

    def _post(self, lane: Lane, operation: PoolOperation) -> None:
        completion = operation.post(lane)
        operation.lane = lane
        operation.completion = completion
        operation.attempts += 1
        lane.target = operation.target if lane.takes(operation.target) else None
        lane.in_flight += 1
        lane.slot.in_flight += 1
        lane.posted += 1
        lane.bytes += operation.nbytes
        completion.on_finish(lambda: self._finished(lane, operation, completion))

    # ---------------------------------------------------------------- completions and recovery

    def _finished(self, lane: Lane, operation: PoolOperation, completion: Completion) -> None:
        slot = lane.slot
        lane.in_flight -= 1
        slot.in_flight -= 1
        if lane.in_flight == 0:
            lane.target = None
        if completion.status == 0:
            self._end(operation, None)
        else:
            error = completion.exception()
            flushed = completion.status == _WR_FLUSH_ERR
            culprit = lane.ready and not flushed
            if not flushed:
                lane.errors += 1
            if lane.ready:
                lane.ready = False
                self._culprits[lane] = operation.target if culprit else None
            innocent = flushed and self._culprits.get(lane) is not operation.target
            if innocent and operation.repeatable and operation.attempts < _ATTEMPTS and not self.closed:
                if self._ordered:
                    lane.returned.append(operation)
                else:
                    self._waiting.append(operation)
            else:
                self._end(operation, error)
            self._start_recovery(slot)
        if slot.idle and (lane.in_flight == 0 or slot.in_flight == 0):
            for signal in slot.idle:
                signal.finish()
            slot.idle.clear()
        self._dispatch(slot)

    def _end(self, operation: PoolOperation, error: BaseException | None) -> None:
        self._unfinished -= 1
        operation.end(error, report=not self.closed)

    def _dispatch(self, slot: _Slot) -> None:
        """Something may be posted now: first what waits in the lanes of a DCI, the lanes in turn, then the pool's."""
        lanes = slot.lanes
        idle = 0
        while slot.waiting and idle < len(lanes) and slot.in_flight < slot.depth:
            lane = lanes[slot.turn]
            slot.turn = (slot.turn + 1) % len(lanes)
            if not lane.waiting or not lane.ready:
                idle += 1
                continue
            idle = 0
            slot.waiting -= 1
            self._post_late(lane, lane.waiting.popleft())
        while self._waiting:
            operation = self._waiting[0]
            try:
                if not self._place(operation, again=True):
                    return
            except Exception as e:
                self._waiting.popleft()
                self._end(operation, e)
            else:
                self._waiting.popleft()

    def _post_late(self, lane: Lane, operation: PoolOperation) -> None:
        try:
            self._post(lane, operation)
        except Exception as e:
            self._end(operation, e)

    def _start_recovery(self, slot: _Slot) -> None:
        if slot.recovering is None and not self.closed:
            recovering = Pending(self._device.control, self._recover(slot))
            if not recovering.done:
                slot.recovering = recovering

    def _revive_the_dead(self) -> None:
        """What couldn't be replaced before is tried again when there is work."""
        if self._dead:
            for slot in self._slots:
                if slot.error is not None:
                    slot.error = None
                    self._dead -= 1
                    self._start_recovery(slot)

    async def _state(self, dci: DCInitiator) -> int:
        if dci.closed:
            raise ClosedError(f"{dci!r} is closed")
        return await in_use(self._device.control, dci.address, _control.query_qp_state, dci.address)

    async def _recover(self, slot: _Slot) -> None:
        """Brings the streams of a DCI back, or the DCI: runs while any of its lanes isn't ready."""
        try:
            while not self.closed and not all(lane.ready for lane in slot.lanes):
                # An error completion doesn't tell whether the stream failed or the whole DCI: ibv_query_qp() does
                # (mlx5dv_dci_stream_id_reset(3)).
                if slot.dci.closed or await self._state(slot.dci) == ERR:
                    await self._rebuild(slot)
                    continue
                flushed = [lane for lane in slot.lanes if not lane.ready and lane.in_flight == 0]
                if not flushed:
                    await self._lane_idle(slot)
                for lane in flushed:
                    if not await self._reset(slot.dci, lane):
                        break
                    self._revive(lane)
        except RdmaError as e:
            if not self.closed:
                self._give_up(slot, e)
        finally:
            slot.recovering = None

    async def _reset(self, dci: DCInitiator, lane: Lane) -> bool:
        """Resets a lane's stream; False where it's the DCI that is in error."""
        try:
            await dci.reset_stream_now(lane.stream_id)
        except VerbsError:
            # Flushed by the DCI's own error, or never in error.
            if await self._state(dci) == ERR:
                return False
        lane.resets += 1
        return True

    async def _rebuild(self, slot: _Slot) -> None:
        for lane in slot.lanes:
            lane.ready = False
        while slot.in_flight and not self.closed:
            await self._lane_idle(slot)
        await outcome(slot.dci.close())
        if self.closed:
            return
        slot.dci = await create_initiator(self._device, *self._settings)
        slot.rebuilds += 1
        for lane in slot.lanes:
            self._revive(lane)

    def _revive(self, lane: Lane) -> None:
        lane.ready = True
        self._culprits.pop(lane, None)
        lane.waiting.extendleft(reversed(lane.returned))
        lane.slot.waiting += len(lane.returned)
        lane.returned.clear()
        if not self.closed:
            self._dispatch(lane.slot)

    async def _lane_idle(self, slot: _Slot) -> None:
        signal = Signal(self._device.control.hooks)
        slot.idle.append(signal)
        await until(signal)

    def _give_up(self, slot: _Slot, error: RdmaError) -> None:
        """A DCI that can't be replaced now: what waits for its lanes fails, others go on without it. The next operation
        has it tried again."""
        slot.error = error
        self._dead += 1
        self._fail_waiting(slot, error)
        if not any(lane.ready for lane in self._lanes) and all(s.error is not None for s in self._slots):
            while self._waiting:
                self._end(self._waiting.popleft(), error)

    def _fail_waiting(self, slot: _Slot, error: RdmaError) -> None:
        for lane in slot.lanes:
            lane.ready = False
            for operation in (*lane.returned, *lane.waiting):
                self._end(operation, error)
            lane.returned.clear()
            lane.waiting.clear()
        slot.waiting = 0

    # ---------------------------------------------------------------- closing

    def close(self) -> Pending[None]:
        """Closes the DCIs; started by the call. Operations in flight are flushed; those that wait end with ClosedError."""
        return super().close()

    def _stop(self) -> None:
        error = ClosedError("the DCI pool was closed before this was posted")
        for slot in self._slots:
            self._fail_waiting(slot, error)
        while self._waiting:
            self._end(self._waiting.popleft(), error)

    async def _quiesce(self) -> None:
        for slot in self._slots:
            for signal in slot.idle:
                signal.finish()
            slot.idle.clear()
            slot.dci.close()
        for slot in self._slots:
            if slot.recovering is not None:
                ended = Signal(self._device.control.hooks)
                slot.recovering.on_done(ended.finish)
                await until(ended)
            await outcome(slot.dci.close())

    def _destroy(self) -> None:
        """Its DCIs are the device's too: in a teardown without a loop that is who closes them."""

    def __repr__(self) -> str:
        return f"<DCIPool of {len(self._slots)} DCIs, {len(self._lanes)} lanes on {self._device.name}>"


def _slices(local: Any) -> tuple[MemorySlice, ...]:
    """The registered memory in a source or target."""
    if isinstance(local, MemorySlice):
        return (local,)
    if isinstance(local, list | tuple):
        return tuple(part for part in local if isinstance(part, MemorySlice))
    return ()


def _length(local: Any) -> int:
    """Bytes of a source or target, for the counters."""
    if isinstance(local, MemorySlice):
        return local.length
    if isinstance(local, list | tuple):
        return sum(_length(part) for part in local)
    try:
        with memoryview(local) as view:
            return view.nbytes
    except TypeError:  # no memory: posting it says so
        return 0


def _copied(local: Any, limit: int) -> Any:
    """A source with a copy of what is no registered memory, where it may be sent inline at all."""
    if local is None or isinstance(local, MemorySlice | bytes):
        return local
    if isinstance(local, list | tuple):
        return tuple(_copied(part, limit) for part in local)
    return bytes(local) if 0 < _length(local) <= limit else local


def create_dci_pool(
    device: Device,
    size: int = 4,
    *,
    log_streams: int | None = None,
    log_errored: int | None = None,
    policy: Policy = least_loaded,
    config: QPConfig | None = None,
) -> Pending[DCIPool]:
    """Makes a pool of ``size`` DCIs, off the loop; or ``async with``.

    ``log_streams``, ``log_errored``: of each DCI (:func:`create_dc_initiator`); None: what the device can, and no streams
    where it has none (each DCI is one lane then, and is replaced when an operation fails). ``policy``:
    :func:`least_loaded`, :func:`sticky` or a function like them.
    """
    check_dc(device)
    size = whole(size)
    if not isinstance(size, int) or not 1 <= size <= 1024:
        raise UsageError(f"size: 1 to 1024 DCIs, not {size!r}")
    caps = device.mlx5.dci_streams_caps
    most, most_errored = caps["max_log_num_concurent"], caps["max_log_num_errored"]
    streams: int | None = whole(log_streams)
    if streams is None:
        streams = min(most, 4) if most else None
    errored = whole(log_errored) if log_errored is not None else min(most_errored, streams or 0)
    if streams is not None and not most:
        raise UnsupportedError(device.name, "DCI streams", "max_log_num_concurent is 0 (mlx5dv_query_device(3))")
    if streams is not None and (not isinstance(streams, int) or not 0 <= streams <= most):
        raise UsageError(f"log_streams: 0 to {most} on {device.name}, not {streams}")
    if not isinstance(errored, int) or not 0 <= errored <= most_errored:
        raise UsageError(f"log_errored: 0 to {most_errored} on {device.name}, not {errored}")
    wanted = config if config is not None else QPConfig()
    wanted.check()
    check_limits(device, wanted)
    creation = _create(device, size, (wanted, streams, errored, 0), policy)
    return device._made(Pending(device.control, creation, dispose=True))


async def _create(device: Device, size: int, settings: Any, policy: Policy) -> DCIPool:
    dcis: list[DCInitiator] = []
    try:
        for _ in range(size):
            dcis.append(await create_initiator(device, *settings))
    except BaseException:
        for dci in dcis:
            dci.close()
        raise
    pool = DCIPool(device, dcis, settings, policy)
    device.adopt(pool)
    return pool

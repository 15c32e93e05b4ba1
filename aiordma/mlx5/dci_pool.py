"""A pool of DCIs: asynchronous operations to many targets, spread over DCIs and their streams.

Each (DCI, stream) pair is a :class:`Lane`. An operation goes on the lane that the policy chooses. When one fails, its
stream is in error: what else was on that stream is flushed, the stream is reset, and operations on other lanes go on
meanwhile. When too many streams of a DCI are in error at a time the DCI itself is, and is replaced by a new one.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiordma import _control
from aiordma._dataplane import Completion
from aiordma._memory import MemorySlice, RemoteBuffer
from aiordma._offload import Pending, in_thread, outcome, until
from aiordma._waitable import Signal
from aiordma.errors import ClosedError, RdmaError, UsageError, VerbsError
from aiordma.mlx5.dc import DCInitiator, DcPeer, DCTInfo, check_dc, create_initiator, reach
from aiordma.qp import ERR, QPConfig

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
        self.recovering: Pending[None] | None = None
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
    """An operation of a :class:`DCIPool`, under way or waiting for a lane. ``await`` gives its :class:`Completion`."""

    def __init__(
        self,
        pool: DCIPool,
        post: Callable[[DCInitiator, int], Completion],
        target: DcPeer,
        nbytes: int,
        repeatable: bool,
    ) -> None:
        super().__init__(pool.device.control.hooks)
        self.post = post
        self.target = target
        self.nbytes = nbytes
        self.repeatable = repeatable
        self.attempts = 0
        self.lane: Lane | None = None
        self.completion: Completion | None = None

    def __await__(self) -> Generator[Any, None, Completion]:
        if self.completion is not None and self.done:
            self.completion.exception()  # looked at
        result: Completion = yield from super().__await__()
        return result


class DCIPool:
    """Spreads operations over several DCIs and their streams. Made by :func:`create_dci_pool`.

    The calls are those of :class:`DCInitiator`, without a stream: ``await pool.rdma_write(peer, local, remote)``. They start
    at once and return a :class:`PoolOperation` to await.

    An error costs the target that it came from: its operations in flight on the same stream fail (or are flushed). Writes
    and reads of other targets that were flushed with them are posted again, since doing them twice does no harm;
    sends and atomics never share a stream with another target's work (but with the ``sticky`` policy, where they
    would wait for ever).
    """

    def __init__(
        self,
        device: Device,
        dcis: list[DCInitiator],
        settings: tuple[QPConfig, int | None, int, int],
        policy: Policy,
    ) -> None:
        self.device = device
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
        self._unfinished = 0
        self._closing: Pending[None] | None = None
        self._pid = os.getpid()

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

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._closing is not None

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
        return reach(self.device, info, self._settings[0])

    # ---------------------------------------------------------------- operations

    def rdma_write(
        self, target: DcPeer, local: Source, remote: RemoteBuffer, *, imm: int | None = None
    ) -> PoolOperation:
        """RDMA WRITE; with ``imm`` it uses a receive of the target's, and is never repeated."""
        return self._start(
            target,
            lambda dci, stream: dci.rdma_write(target, local, remote, imm=imm, stream_id=stream),
            _length(local),
            imm is None,
        )

    def rdma_read(self, target: DcPeer, local: Target, remote: RemoteBuffer) -> PoolOperation:
        """RDMA READ."""
        return self._start(
            target,
            lambda dci, stream: dci.rdma_read(target, local, remote, stream_id=stream),
            _length(local),
            True,
        )

    def send(self, target: DcPeer, local: Source, *, imm: int | None = None) -> PoolOperation:
        """SEND, with immediate."""
        return self._start(
            target, lambda dci, stream: dci.send(target, local, imm=imm, stream_id=stream), _length(local), False
        )

    def atomic_fetch_add(self, target: DcPeer, local: MemorySlice, remote: RemoteBuffer, add: int) -> PoolOperation:
        """Atomic addition."""
        return self._start(
            target,
            lambda dci, stream: dci.atomic_fetch_add(target, local, remote, add, stream_id=stream),
            8,
            False,
        )

    def atomic_cmp_swp(
        self, target: DcPeer, local: MemorySlice, remote: RemoteBuffer, compare: int, swap: int
    ) -> PoolOperation:
        """Atomic compare and swap."""
        return self._start(
            target,
            lambda dci, stream: dci.atomic_cmp_swp(target, local, remote, compare, swap, stream_id=stream),
            8,
            False,
        )

    def _check(self) -> None:
        if self._closing is not None:
            raise ClosedError(f"{self!r} is closed")
        self.device.control.hooks.verify()

    def _start(
        self, target: DcPeer, post: Callable[[DCInitiator, int], Completion], nbytes: int, repeatable: bool
    ) -> PoolOperation:
        self._check()
        if not isinstance(target, DcPeer):
            raise UsageError(f"the target is a DcPeer, made by pool.reach(info), not {type(target).__name__}")
        operation = PoolOperation(self, post, target, nbytes, repeatable)
        self._unfinished += 1
        try:
            self._place(operation)
        except BaseException:
            self._unfinished -= 1
            raise
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
        if not lane.ready or not lane.has_room() or lane.waiting:
            lane.waiting.append(operation)
        else:
            self._post(lane, operation)
        return True

    def _post(self, lane: Lane, operation: PoolOperation) -> None:
        completion = operation.post(lane.slot.dci, lane.stream_id)
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
            if innocent and operation.repeatable and operation.attempts < _ATTEMPTS and self._closing is None:
                if self._ordered:
                    lane.returned.append(operation)
                else:
                    self._waiting.append(operation)
            else:
                self._end(operation, error)
            if slot.recovering is None and self._closing is None:
                slot.recovering = Pending(self.device.control, self._recover(slot))
        if slot.idle and (lane.in_flight == 0 or slot.in_flight == 0):
            for signal in slot.idle:
                signal.finish()
            slot.idle.clear()
        self._dispatch(lane)

    def _end(self, operation: PoolOperation, error: BaseException | None) -> None:
        self._unfinished -= 1
        if error is None:
            operation.finish(operation.completion)
        else:
            operation.fail(error)

    def _dispatch(self, lane: Lane | None = None) -> None:
        """Something may be posted now."""
        lanes = (lane,) if lane is not None else tuple(self._lanes)
        for candidate in lanes:
            while candidate.waiting and candidate.ready and candidate.has_room():
                self._post_late(candidate, candidate.waiting.popleft())
        while self._waiting:
            operation = self._waiting[0]
            try:
                if not self._place(operation, again=True):
                    return
            except RdmaError as e:
                self._end(operation, e)
            self._waiting.popleft()

    def _post_late(self, lane: Lane, operation: PoolOperation) -> None:
        try:
            self._post(lane, operation)
        except RdmaError as e:
            self._end(operation, e)

    async def _recover(self, slot: _Slot) -> None:
        """Brings the streams of a DCI back, or the DCI: runs while any of its lanes isn't ready."""
        control = self.device.control
        try:
            while self._closing is None and not all(lane.ready for lane in slot.lanes):
                # An error completion doesn't tell whether the stream failed or the whole DCI: ibv_query_qp() does
                # (mlx5dv_dci_stream_id_reset(3)).
                state = await in_thread(control, _control.query_qp_state, slot.dci.address)
                if state == ERR:
                    await self._rebuild(slot)
                    continue
                flushed = [lane for lane in slot.lanes if not lane.ready and lane.in_flight == 0]
                for lane in flushed:
                    try:
                        await slot.dci.reset_stream_now(lane.stream_id)
                    except VerbsError:
                        # Flushed by the DCI's own error, which the next look at its state shows, or never in error.
                        if await in_thread(control, _control.query_qp_state, slot.dci.address) == ERR:
                            break
                    lane.resets += 1
                    self._revive(lane)
                else:
                    if not flushed:
                        await self._lane_idle(slot)
        except ClosedError:
            pass  # the pool is being closed
        except RdmaError as e:
            self._give_up(slot, e)
        finally:
            slot.recovering = None

    async def _rebuild(self, slot: _Slot) -> None:
        for lane in slot.lanes:
            lane.ready = False
        while slot.in_flight:
            await self._lane_idle(slot)
        await outcome(slot.dci.close())
        slot.dci = await create_initiator(self.device, *self._settings)
        slot.rebuilds += 1
        for lane in slot.lanes:
            self._revive(lane)

    def _revive(self, lane: Lane) -> None:
        lane.ready = True
        self._culprits.pop(lane, None)
        lane.waiting.extendleft(reversed(lane.returned))
        lane.returned.clear()
        self._dispatch(lane)

    async def _lane_idle(self, slot: _Slot) -> None:
        signal = Signal(self.device.control.hooks)
        slot.idle.append(signal)
        await until(signal)

    def _give_up(self, slot: _Slot, error: RdmaError) -> None:
        """A DCI that can't be replaced: what waits for its lanes fails, others go on without it."""
        for lane in slot.lanes:
            lane.ready = False
            for operation in (*lane.returned, *lane.waiting):
                self._end(operation, error)
            lane.returned.clear()
            lane.waiting.clear()
        if not any(lane.ready for lane in self._lanes):
            while self._waiting:
                self._end(self._waiting.popleft(), error)

    # ---------------------------------------------------------------- closing

    def close(self) -> Pending[None]:
        """Closes the DCIs; started by the call. Operations in flight are flushed; those that wait end with ClosedError."""
        if self._closing is None:
            self.device.control.hooks.verify()
            self._closing = Pending(self.device.control, self._close())
        return self._closing

    async def _close(self) -> None:
        error = ClosedError("the DCI pool was closed before this was posted")
        for lane in self._lanes:
            for operation in (*lane.returned, *lane.waiting):
                self._end(operation, error)
            lane.returned.clear()
            lane.waiting.clear()
        while self._waiting:
            self._end(self._waiting.popleft(), error)
        for slot in self._slots:
            for signal in slot.idle:
                signal.finish()
            slot.idle.clear()
            if slot.recovering is not None:
                ended = Signal(self.device.control.hooks)
                slot.recovering.on_done(ended.finish)
                await until(ended)
            await outcome(slot.dci.close())

    async def __aenter__(self) -> DCIPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.device.control.backend.shielded(self.close())

    def __del__(self) -> None:
        if getattr(self, "_pid", None) != os.getpid() or self._closing is not None or self.device.closed:
            return
        warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<DCIPool of {len(self._slots)} DCIs, {len(self._lanes)} lanes on {self.device.name}>"


def _length(local: Any) -> int:
    """Bytes of a source or target, for the counters."""
    if local is None:
        return 0
    if isinstance(local, list | tuple):
        return sum(_length(part) for part in local)
    return len(local) if not isinstance(local, memoryview) else local.nbytes


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
    if not 1 <= size <= 1024:
        raise UsageError(f"size: 1 to 1024 DCIs, not {size}")
    caps = device.mlx5.dci_streams_caps
    most, most_errored = caps["max_log_num_concurent"], caps["max_log_num_errored"]
    streams: int | None = log_streams
    if streams is None:
        streams = min(most, 4) if most else None
    errored = log_errored if log_errored is not None else min(most_errored, streams or 0)
    if streams is not None and not 0 <= streams <= most:
        raise UsageError(f"log_streams: 0 to {most} on {device.name}, not {streams}")
    if not 0 <= errored <= max(most_errored, 0):
        raise UsageError(f"log_errored: 0 to {most_errored} on {device.name}, not {errored}")
    wanted = config if config is not None else QPConfig()
    wanted.check()
    return Pending(device.control, _create(device, size, (wanted, streams, errored, 0), policy), dispose=True)


async def _create(device: Device, size: int, settings: Any, policy: Policy) -> DCIPool:
    dcis: list[DCInitiator] = []
    try:
        for _ in range(size):
            dcis.append(await create_initiator(device, *settings))
    except BaseException:
        for dci in dcis:
            dci.close()
        raise
    return DCIPool(device, dcis, settings, policy)

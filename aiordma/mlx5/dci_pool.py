"""A pool of DCIs: asynchronous operations to many targets, spread over DCIs and their streams.

Each (DCI, stream) pair is a :class:`Lane`. An operation goes on the lane that the policy chooses. When one fails, its
stream is in error: what else was on that stream is flushed, the stream is reset, and operations on other lanes go on
meanwhile. When too many streams of a DCI are in error at a time the DCI itself is, and is replaced by a new one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from aiordma import _control
from aiordma._dci_pool import Lane, PoolBase, PoolOperation, Slot, least_loaded
from aiordma._offload import Pending, in_use, outcome, until
from aiordma._operation import Completion
from aiordma._owned import Owned
from aiordma._values import whole
from aiordma._waitable import Signal
from aiordma.errors import ClosedError, RdmaError, UnsupportedError, UsageError, VerbsError
from aiordma.mlx5.dc import DCInitiator, DcPeer, DCTInfo, check_dc, create_initiator, reach
from aiordma.qp import ERR, QPConfig, check_limits

if TYPE_CHECKING:
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


Policy = Callable[[Sequence[Lane], DcPeer], Lane | None]
"""Chooses the lane of an operation: one that isn't ready makes it wait there (in order); None makes it wait in the pool.
A policy whose targets' operations are to keep their order says so by an attribute ``ordered = True``."""


def sticky(lanes: Sequence[Lane], target: DcPeer) -> Lane | None:
    """Always the same lane for a target: its operations happen in the order in which they were called.

    Targets that share a lane share its errors.
    """
    return lanes[hash((target.dctn, target.key)) % len(lanes)]


class DCIPool(Owned, PoolBase):
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
        self._ordered = policy is sticky or getattr(policy, "ordered", False)
        self._slots = [Slot(index, dci, dci.config.max_send_wr, dci.streams) for index, dci in enumerate(dcis)]
        # Round the DCIs first, then their streams, so that equal lanes fill evenly.
        self._lanes = tuple(
            lane
            for group in itertools.zip_longest(*(slot.lanes for slot in self._slots))
            for lane in group
            if lane is not None
        )
        inline = min(dci.max_inline_data for dci in dcis)
        self._set_up_pool(device.control.hooks, self._slots, self._lanes, policy, inline)
        self._belong(device)

    # ---------------------------------------------------------------- what it is

    @property
    def lanes(self) -> Sequence[Lane]:
        """All (DCI, stream) pairs."""
        return self._lanes

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
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        self._device.control.hooks.verify()
        return reach(self._device, info, self._settings[0])

    # ---------------------------------------------------------------- recovery

    def _failed(self, lane: Lane, operation: PoolOperation, completion: Completion) -> None:
        error = completion.exception()
        flushed = completion.status == _WR_FLUSH_ERR
        if not flushed:
            lane.errors += 1
        if lane.ready:
            lane.ready = False
            lane.culprit = None if flushed else operation.target
        innocent = flushed and lane.culprit is not operation.target
        if innocent and operation.repeatable and operation.attempts < _ATTEMPTS and not self.closed:
            if self._ordered:
                lane.give_back(operation)
            else:
                self._wait_again(operation)
        else:
            self._end(operation, error)
        self._start_recovery(lane.slot)

    def _start_recovery(self, slot: Slot) -> None:
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

    def _replace_closed(self) -> None:
        """A DCI that the user has closed is replaced as one that failed."""
        for slot in self._slots:
            if slot.dci.closed and slot.error is None and not self.closed:
                for lane in slot.lanes:
                    lane.ready = False
                self._start_recovery(slot)

    async def _state(self, dci: DCInitiator) -> int:
        if dci.closed:
            raise ClosedError(f"{dci!r} is closed")
        if not _control.holds(dci.pyverbs, dci.address):
            return ERR
        return await in_use(self._device.control, dci.address, _control.query_qp_state, dci.address)

    async def _recover(self, slot: Slot) -> None:
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

    async def _rebuild(self, slot: Slot) -> None:
        for lane in slot.lanes:
            lane.ready = False
        # What was in flight on one that was destroyed through its pyverbs object ends when that's closed here.
        while slot.in_flight and not self.closed and _control.holds(slot.dci.pyverbs, slot.dci.address):
            await self._lane_idle(slot)
        await outcome(slot.dci.close())
        if self.closed:
            return
        slot.dci = await create_initiator(self._device, *self._settings)
        slot.rebuilds += 1
        for lane in slot.lanes:
            self._revive(lane)

    def _revive(self, lane: Lane) -> None:
        lane.revive()
        if not self.closed:
            self._dispatch(lane.slot)

    async def _lane_idle(self, slot: Slot) -> None:
        signal = Signal(self._device.control.hooks)
        slot.idle.append(signal)
        await until(signal)

    def _give_up(self, slot: Slot, error: RdmaError) -> None:
        """A DCI that can't be replaced now: what waits for its lanes fails, others go on without it. The next operation
        has it tried again."""
        slot.error = error
        self._dead += 1
        self._fail_waiting(slot, error)
        if not any(lane.ready for lane in self._lanes) and all(s.error is not None for s in self._slots):
            for operation in self._give_up_waiting():
                self._end(operation, error)

    def _fail_waiting(self, slot: Slot, error: RdmaError) -> None:
        for lane in slot.lanes:
            for operation in lane.give_up():
                self._end(operation, error)

    # ---------------------------------------------------------------- closing

    def close(self) -> Pending[None]:
        """Closes the DCIs; started by the call. Operations in flight are flushed; those that wait end with ClosedError."""
        return super().close()

    def _stop(self) -> None:
        self._shut_pool()
        error = ClosedError("the DCI pool was closed before this was posted")
        for slot in self._slots:
            self._fail_waiting(slot, error)
        for operation in self._give_up_waiting():
            self._end(operation, error)

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
    if not callable(policy):
        raise UsageError(f"policy: least_loaded, sticky or a function like them, not {policy!r}")
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

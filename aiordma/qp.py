"""Queue pairs."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from aiordma import _control, _pyverbs
from aiordma._batch import Batch, BatchingQueuePair
from aiordma._cq import CompletionQueue
from aiordma._offload import Pending, delay, in_thread, in_use, make_verbs_object, until, using
from aiordma._owned import Owned
from aiordma._values import whole_fields
from aiordma._waitable import Signal
from aiordma._workqueue import WorkQueue
from aiordma.access import Access, known_access
from aiordma.errors import ClosedError, QPStateError, UnsupportedError, UsageError, VerbsError
from aiordma.gid import GidType, match
from aiordma.info import QPInfo

if TYPE_CHECKING:
    from aiordma.device import Device
    from aiordma.srq import SharedReceiveQueue

__all__ = ["Batch", "QPConfig", "QueuePair", "VerbsQueuePair"]

# enum ibv_qp_state, ibv_qp_type, ibv_qp_attr_mask (verbs.h)
RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
STATE_NAMES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
QP_TYPES = {"RC": 2, "UC": 3}
_STATE, _ACCESS, _PKEY, _PORT = 1 << 0, 1 << 3, 1 << 4, 1 << 5
_AV, _MTU, _TIMEOUT, _RETRY, _RNR_RETRY = 1 << 7, 1 << 8, 1 << 9, 1 << 10, 1 << 11
_RQ_PSN, _RD_ATOMIC, _MIN_RNR, _SQ_PSN = 1 << 12, 1 << 13, 1 << 15, 1 << 16
_DEST_RD_ATOMIC, _DEST_QPN = 1 << 17, 1 << 20

# How long the flush of a QP in the error state is waited for before it's destroyed anyway.
DRAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class QPConfig:
    """What a QP is made for. Numbers beyond the device's limits are refused by ibv_create_qp(3).

    ``max_send_wr``, ``max_recv_wr``: work requests in flight (more may be posted; they wait in the QP).
    ``max_send_sge``, ``max_recv_sge``: buffers in one work request. ``max_inline_data``: bytes that may be copied into a
    work request. ``max_rd_atomic``: RDMA reads and atomics in flight, offered in both directions; None for what the
    device can. ``timeout``: the ACK timeout is 4.096 us * 2**timeout, 0 waits for ever; ``retry_cnt``: 0..7 retries of
    it. ``rnr_retry``: 0..6 retries when the peer has no receive posted, 7 for ever; ``min_rnr_timer``: the code of the
    delay that this side asks for then (12 is 0.64 ms; IBTA table 45). ``access``: what the peer may do to memory
    through this QP. ``traffic_class``, ``hop_limit``, ``flow_label``, ``service_level``: of its packets. ``max_queued``:
    how many work requests may wait for a free slot of the send queue, and of the receive queue; posting more is a
    :class:`QueueFullError`. None: any number, at a few hundred bytes of memory each.
    """

    qp_type: str = "RC"
    max_send_wr: int = 128
    max_recv_wr: int = 128
    max_send_sge: int = 4
    max_recv_sge: int = 4
    max_inline_data: int = 64
    max_rd_atomic: int | None = None
    timeout: int = 14
    retry_cnt: int = 7
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    access: Access = Access.REMOTE
    traffic_class: int = 0
    hop_limit: int = 64
    flow_label: int = 0
    service_level: int = 0
    max_queued: int | None = None

    def __post_init__(self) -> None:
        whole_fields(self)

    def check(self) -> None:
        """:class:`UsageError` for a value that no device takes."""
        if self.qp_type not in QP_TYPES:
            raise UsageError(f"qp_type is one of {', '.join(QP_TYPES)}, not {self.qp_type!r}")
        for name, low, high in (
            ("max_send_wr", 1, 1 << 20),
            ("max_recv_wr", 1, 1 << 20),
            ("max_send_sge", 1, 32),
            ("max_recv_sge", 1, 32),
            ("max_inline_data", 0, 4096),
            ("timeout", 0, 31),
            ("retry_cnt", 0, 7),
            ("rnr_retry", 0, 7),
            ("min_rnr_timer", 0, 31),
            ("traffic_class", 0, 255),
            ("hop_limit", 0, 255),
            ("flow_label", 0, (1 << 20) - 1),
            ("service_level", 0, 15),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name}: a number from {low} to {high}, not {value!r}")
        depth = self.max_rd_atomic
        if depth is not None and (not isinstance(depth, int) or not 0 <= depth <= 255):
            raise UsageError(f"max_rd_atomic: 0 to 255, or None for what the device can, not {depth!r}")
        if self.max_queued is not None and (not isinstance(self.max_queued, int) or not 0 <= self.max_queued < 1 << 32):
            raise UsageError(f"max_queued: a number from 0, or None for no limit, not {self.max_queued!r}")
        known_access(self.access)


class VerbsQueuePair(BatchingQueuePair, Owned):
    """What QPs of every transport have: identity, state, and an end.

    ``close()`` flushes and destroys it. Use it as ``async with``, or close it; a forgotten one warns (ResourceWarning).
    """

    __slots__ = ()  # see QueuePairBase's fields

    kind: ClassVar[str] = "queue_pairs"
    close_order: ClassVar[int] = 0

    def __init__(
        self,
        device: Device,
        pyverbs: Any,
        config: QPConfig,
        cqs: tuple[CompletionQueue, CompletionQueue],
        srq: SharedReceiveQueue | None,
        caps: dict[str, int],
        reserved: tuple[int, int],
    ) -> None:
        address = _control.qp_address(pyverbs, device.context_address)
        self._pyverbs = pyverbs
        self._config = config
        self._cqs = cqs
        self._caps = caps
        self._reserved = reserved
        self._srq = srq
        self._address = address
        self._number: int = pyverbs.qp_num
        # The end of what changes its state, and not the operation: who started that hears of its error.
        self._connecting: Signal | None = None
        self._fatal = False
        can_mark = config.qp_type in ("RC", "UC")
        send = WorkQueue(
            cqs[0],
            self._send_kind(),
            caps["max_send_wr"],
            address,
            0,
            self._number,
            can_mark,
            pyverbs,
            config.max_queued,
        )
        recv = None
        if srq is None:
            try:
                recv = WorkQueue(
                    cqs[1], "recv", caps["max_recv_wr"], address, 0, self._number, False, pyverbs, config.max_queued
                )
            except BaseException:
                send.release()
                raise
        self._send_queue = send
        self._recv_queue = recv
        self._setup(
            address,
            send,
            recv,
            device.pd,
            caps["max_send_sge"],
            caps["max_recv_sge"],
            caps["max_inline_data"],
            device.max_message,
            not can_mark,
        )
        self._belong(device)

    def _send_kind(self) -> str:
        """How its send queue's requests complete: one after the other (``"send"``), or in any order (``"streams"``)."""
        return "send"

    # ---------------------------------------------------------------- what it is

    @property
    def pyverbs(self) -> Any:
        """The pyverbs QP. Don't post on it or close it: that goes through this object."""
        return self._pyverbs

    @property
    def address(self) -> int:
        """Address of the ``struct ibv_qp``."""
        return self._address

    @property
    def qp_num(self) -> int:
        """The QP number, 24 bits."""
        return self._number

    @property
    def qp_type(self) -> str:
        """``"RC"`` or ``"UC"``."""
        return self._config.qp_type

    @property
    def config(self) -> QPConfig:
        """What it was made with."""
        return self._config

    @property
    def max_inline_data(self) -> int:
        """Bytes that fit into a work request, as granted by the device."""
        return self._caps["max_inline_data"]

    @property
    def state(self) -> str:
        """The state that verbs last set: RESET, INIT, RTR, RTS, SQD, SQE or ERR.

        ERR too when a completion with an error or an event of the QP (IBV_EVENT_QP_FATAL and the like) came, which move it
        there by themselves (for what the device says, see :meth:`query_state`).
        """
        if self._closing is not None or self._send_queue.failed:
            return "ERR"
        if self._recv_queue is not None and self._recv_queue.failed:
            return "ERR"
        if self._fatal or not _control.holds(self._pyverbs, self._address):
            return "ERR"
        return STATE_NAMES[self._pyverbs.qp_state]

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters of the send queue and the receive queue (none of the latter with an SRQ)."""
        found = {"send": self._send_queue.statistics()}
        if self._recv_queue is not None:
            found["recv"] = self._recv_queue.statistics()
        return found

    def _modify(self, mask: int, values: dict[str, Any]) -> None:
        if self._closing is not None:
            raise ClosedError(f"QP {self._number:#x} was closed while it connected")
        self._modify_held(mask, values)

    def _modify_held(self, mask: int, values: dict[str, Any]) -> None:
        """In a worker thread: it may have been destroyed since it was asked for."""
        if not _control.holds(self._pyverbs, self._address):
            raise ClosedError(f"QP {self._number:#x} was destroyed by closing a pyverbs object")
        _control.modify_qp(self._address, mask, values)

    def on_error_event(self) -> None:
        """The device's event loop saw that the QP went to the error state."""
        self._fatal = True

    def query_state(self) -> Pending[str]:
        """The state that the device reports (ibv_query_qp(3)), off the loop."""
        if self._closing is not None:
            raise ClosedError(f"{self!r} is closed")
        self._device.control.hooks.verify()
        return Pending(self._device.control, self._query_state())

    async def _query_state(self) -> str:
        return STATE_NAMES[await in_use(self._device.control, self._address, self._query)]

    def _query(self) -> int:
        if not _control.holds(self._pyverbs, self._address):
            raise ClosedError(f"QP {self._number:#x} was destroyed by closing a pyverbs object")
        known = self._pyverbs.qp_state
        state = _control.query_qp_state(self._address)
        if self._device.is_iwarp:
            # ibv_query_qp(3) has the library believe what the driver says, and siw's says RESET of any QP.
            _control.note_qp_state(self._address, known)
        return state

    # ---------------------------------------------------------------- finishing

    def resolve_unsignaled(self) -> None:
        """Has the unsignalled work requests in flight resolved, although nothing signalled follows them."""
        if self._send_queue.ends_unsignaled:
            self._send_queue.when_idle(Signal(self._device.control.hooks))

    async def wait_idle(self) -> None:
        """Waits until everything posted to the send queue, queued or unsignalled too, has completed.

        It doesn't raise the errors of those operations: their own awaits do. Receives aren't waited for.
        """
        self._device.control.hooks.verify()
        signal = Signal(self._device.control.hooks)
        self._send_queue.when_idle(signal)
        await signal

    def end_by_peer(self) -> Pending[None]:
        """The peer has disconnected: the QP goes to ERR, off the loop.

        What is flushed by that, and what is posted later, ends with :class:`DisconnectedFlushError`.
        """
        for queue in self._queues():
            queue.disconnected = True
        ending = Pending(self._device.control, self._end_by_peer(self._connecting))
        self._connecting = ending.ended
        return ending

    async def _end_by_peer(self, before: Signal | None) -> None:
        if before is not None and not before.done:
            ended = Signal(self._device.control.hooks)
            before.on_finish(ended.finish)
            await until(ended)
        if not self.closed:
            await in_thread(self._device.control, self._modify, _STATE, {"qp_state": ERR})

    def close(self) -> Pending[None]:
        """Flushes and destroys the QP; started by the call, awaited or not; a second call gives the same operation.

        The QP goes to ERR, so that everything in flight completes (with :class:`WrFlushError`, if it hadn't), receives
        included; what waited for a slot is flushed after it; then the QP is destroyed. Nobody who awaits an
        operation is left waiting: what the device doesn't flush within some seconds ends with :class:`ClosedError`.
        """
        return super().close()

    def _used_at(self) -> int:
        return self._address

    def _stop(self) -> None:
        for queue in self._queues():
            queue.close()

    async def _quiesce(self) -> None:
        control = self._device.control
        if self._connecting is not None and not self._connecting.done:
            # The transition under way in a worker thread must not follow the one to ERR.
            ended = Signal(control.hooks)
            self._connecting.on_finish(ended.finish)
            await until(ended)
        # A pyverbs QP that was closed by somebody else has nothing left to flush; what was in flight is failed below.
        there = _control.holds(self._pyverbs, self._address)
        if there and self._pyverbs.qp_state != RESET and not self._device.lost:
            try:
                await in_thread(control, self._modify_held, _STATE, {"qp_state": ERR})
            except (VerbsError, ClosedError):
                # Nothing more can be learnt from a device that refuses this; what is in flight is failed below.
                pass
            else:
                drains = []
                for queue in self._queues():
                    drained = Signal(control.hooks)
                    queue.drain(drained)
                    drains.append(drained)
                # Mostly they are over by now; a timer is a thread.
                if not all(drained.done for drained in drains):
                    timer = await delay(control, DRAIN_SECONDS)
                    for drained in drains:
                        timer.on_finish(drained.finish)
                        await until(drained)
                    timer.finish()

    def _queues(self) -> list[WorkQueue]:
        return [queue for queue in (self._send_queue, self._recv_queue) if queue is not None]

    def _destroy(self) -> None:
        try:
            self._pyverbs.close()
        except Exception as e:
            raise _pyverbs.translate(e, "ibv_destroy_qp", f"QP {self._number:#x}") from e

    def _release(self) -> None:
        self._detach()
        for queue in self._queues():
            queue.abandon(ClosedError(f"QP {self._number:#x} was closed before this completed"))
            queue.release()
        for cq, entries in zip(self._cqs, self._reserved, strict=True):
            cq.unreserve(entries)
        if self._srq is not None:
            self._srq.detach(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.state
        return f"<QueuePair {self._config.qp_type} {self._number:#x} {state} on {self._device.name}>"


class QueuePair(VerbsQueuePair):
    """A QP: ``await qp.rdma_write(local, remote)`` and its kin, see :class:`QueuePairBase` for the posting calls.

    Made by :meth:`Device.create_qp`, in INIT: receives can be posted. :meth:`connect` with the peer's :attr:`info`
    brings it to RTS. ``close()`` flushes and destroys it. Use it as ``async with``, or close it; a forgotten one warns
    (ResourceWarning).
    """

    __slots__ = ()

    def __init__(
        self,
        device: Device,
        pyverbs: Any,
        config: QPConfig,
        cqs: tuple[CompletionQueue, CompletionQueue],
        srq: SharedReceiveQueue | None,
        caps: dict[str, int],
        reserved: tuple[int, int],
    ) -> None:
        self._psn = secrets.randbits(24)
        self._peer: QPInfo | None = None
        super().__init__(device, pyverbs, config, cqs, srq, caps, reserved)

    @property
    def info(self) -> QPInfo:
        """What the peer needs for its :meth:`connect`."""
        device = self._device
        depth = self._rd_atomic_depth
        return QPInfo(
            qp_type=self._config.qp_type,
            qp_num=self._number,
            psn=self._psn,
            gid=device.gid.raw if device.gid is not None else bytes(16),
            gid_type=device.gid.type if device.gid is not None else GidType.IB,
            lid=device.lid,
            mtu=device.active_mtu,
            max_rd_atomic=min(depth, device.max_qp_init_rd_atom),
            max_dest_rd_atomic=min(depth, device.max_qp_rd_atom),
        )

    @property
    def peer(self) -> QPInfo | None:
        """The peer it's connected to, or None."""
        return self._peer

    @property
    def _rd_atomic_depth(self) -> int:
        return 255 if self._config.max_rd_atomic is None else self._config.max_rd_atomic

    # ---------------------------------------------------------------- connecting

    def connect(self, peer: QPInfo) -> Pending[None]:
        """Connects to the QP that ``peer`` describes: INIT to RTR to RTS (ibv_modify_qp(3)), off the loop.

        Both sides call it with the other's :attr:`info`. It completes when this side may send; a peer that isn't in RTR
        yet makes the first sends wait and, after timeout and retries, fail. The path MTU is the smaller of the two, and
        RDMA reads in flight the smaller of what one side starts and the other serves, in each direction. Started by the
        call, awaited or not.

        Raises :class:`UsageError` for a peer of another QP type, :class:`GidError` when no local GID reaches the peer's,
        :class:`QPStateError` when it's connected already, :class:`UnsupportedError` on an iWARP device, :class:`VerbsError`
        when the device refuses.
        """
        if self._closing is not None:
            raise ClosedError(f"{self!r} is closed")
        if self._peer is not None or (self._connecting is not None and not self._connecting.done):
            raise QPStateError(f"QP {self._number:#x} is connected or connecting: a new connection needs a new QP")
        if not isinstance(peer, QPInfo):
            raise UsageError(f"connect() takes the peer's QPInfo, not {type(peer).__name__}")
        if peer.qp_type != self._config.qp_type:
            raise UsageError(f"this is an {self._config.qp_type} QP, the peer's an {peer.qp_type} one")
        if self._device.is_iwarp:
            # The kernel's iw_cm makes the TCP connection that an iWARP QP is of, and takes the QP to RTS itself.
            raise UnsupportedError(
                self._device.name,
                "connecting QPs by their info",
                'it\'s iWARP: aiordma.connect(..., via="rdma_cm") does it',
            )
        self._device.control.hooks.verify()
        connecting = Pending(self._device.control, self._connect(peer))
        self._connecting = connecting.ended
        return connecting

    async def _connect(self, peer: QPInfo) -> None:
        device, config, mine = self._device, self._config, self.info
        rtr: dict[str, Any] = {
            "qp_state": RTR,
            "path_mtu": {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}[min(mine.mtu, peer.mtu)],
            "dest_qp_num": peer.qp_num,
            "rq_psn": peer.psn,
            "sl": config.service_level,
            "ah_port": device.port,
            "dlid": peer.lid,
            "_detail": f"QP {self._number:#x} to RTR, peer {peer}",
        }
        if any(peer.gid) and device.gid is not None:
            gid = match(device.gids, device.gid, peer.gid, peer.gid_type)
            rtr |= {
                "is_global": 1,
                "dgid": peer.gid,
                "sgid_index": gid.index,
                "hop_limit": config.hop_limit,
                "traffic_class": config.traffic_class,
                "flow_label": config.flow_label,
            }
        mask = _STATE | _AV | _MTU | _DEST_QPN | _RQ_PSN
        rts: dict[str, Any] = {
            "qp_state": RTS,
            "sq_psn": self._psn,
            "_detail": f"QP {self._number:#x} to RTS",
        }
        rts_mask = _STATE | _SQ_PSN
        if config.qp_type == "RC":
            rtr["max_dest_rd_atomic"] = min(mine.max_dest_rd_atomic, peer.max_rd_atomic)
            rtr["min_rnr_timer"] = config.min_rnr_timer
            mask |= _DEST_RD_ATOMIC | _MIN_RNR
            rts["timeout"] = config.timeout
            rts["retry_cnt"] = config.retry_cnt
            rts["rnr_retry"] = config.rnr_retry
            rts["max_rd_atomic"] = min(mine.max_rd_atomic, peer.max_dest_rd_atomic)
            rts_mask |= _TIMEOUT | _RETRY | _RNR_RETRY | _RD_ATOMIC
        await in_thread(device.control, self._modify, mask, rtr)
        await in_thread(device.control, self._modify, rts_mask, rts)
        self._peer = peer

    def transition(self, steps: Callable[[], Iterable[tuple[int, dict[str, Any]]]]) -> Pending[None]:
        """Modifies it with attributes that somebody else knows, a connection manager say, off the loop.

        ``steps`` is called in the worker thread and gives, for each ibv_modify_qp(3), the mask and the values, as
        ``_control.modify_qp`` takes them; whatever they take it to, the QP is connected then. Started by the call.
        """
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        if self._connecting is not None:
            raise QPStateError(f"QP {self._number:#x} is connected or connecting: a new connection needs a new QP")
        connecting = Pending(self._device.control, self._transition(steps))
        self._connecting = connecting.ended
        return connecting

    async def _transition(self, steps: Callable[[], Iterable[tuple[int, dict[str, Any]]]]) -> None:
        def run() -> None:
            for mask, values in steps():
                self._modify(mask, values)

        await in_thread(self._device.control, run)

    def note_ready(self) -> None:
        """The kernel has taken it to RTS by itself, as it does with iWARP's when they connect."""
        if not self.closed and _control.holds(self._pyverbs, self._address):
            _control.note_qp_state(self._address, RTS)


def create(device: Device, config: QPConfig, srq: SharedReceiveQueue | None) -> Pending[QueuePair]:
    """See :meth:`Device.create_qp`."""
    config.check()
    check_limits(device, config)
    if srq is not None:
        srq.check_usable(device)
    return Pending(device.control, make(device, config, srq, QueuePair, make_plain), dispose=True)


def check_limits(device: Device, config: QPConfig) -> None:
    """:class:`UsageError` that names the device's limit (ibv_query_device(3)), of which the kernel's EINVAL says nothing."""
    attributes = device.attributes
    for name, limit, what in (
        ("max_send_wr", attributes.max_qp_wr, "max_qp_wr"),
        ("max_recv_wr", attributes.max_qp_wr, "max_qp_wr"),
        ("max_send_sge", attributes.max_sge, "max_sge"),
        ("max_recv_sge", attributes.max_sge, "max_sge"),
    ):
        value = getattr(config, name)
        if value > limit:
            raise UsageError(f"{name}={value}, but {what} of {device.name} is {limit}")


Made = TypeVar("Made", bound=VerbsQueuePair)


class Maker(Protocol):
    """Makes the verbs QP: gives the pyverbs QP, and an object with the granted ``max_send_sge`` and so on."""

    def __call__(
        self, device: Device, config: QPConfig, cqs: tuple[Any, Any], srq: SharedReceiveQueue | None, /
    ) -> tuple[Any, Any]: ...


async def make(
    device: Device,
    config: QPConfig,
    srq: SharedReceiveQueue | None,
    cls: type[Made],
    maker: Maker,
    *,
    initialise: bool = True,
) -> Made:
    """Inside a control operation: a QP of class ``cls`` around what ``maker`` makes, in INIT."""
    if srq is None:
        return await _make_and_adopt(device, config, srq, cls, maker, initialise)
    srq.check_usable(device)  # it may have been closed since the call
    with using(device.control, srq.address):
        return await _make_and_adopt(device, config, srq, cls, maker, initialise)


async def _make_and_adopt(
    device: Device,
    config: QPConfig,
    srq: SharedReceiveQueue | None,
    cls: type[Made],
    maker: Maker,
    initialise: bool,
) -> Made:
    recv_entries = 0 if srq is not None else config.max_recv_wr
    send_cq = await device.engine.acquire("send", config.max_send_wr)
    try:
        recv_cq = srq.cq if srq is not None else await device.engine.acquire("recv", recv_entries)
    except BaseException:
        send_cq.unreserve(config.max_send_wr)
        raise
    try:
        pyverbs, caps = await make_verbs_object(
            device.control, _make, device, config, (send_cq.pyverbs, recv_cq.pyverbs), srq, maker, initialise
        )
        # The device may grant more than was asked for; slots are counted by what the CQs were reserved for.
        caps["max_send_wr"], caps["max_recv_wr"] = config.max_send_wr, config.max_recv_wr
        try:
            qp = cls(device, pyverbs, config, (send_cq, recv_cq), srq, caps, (config.max_send_wr, recv_entries))
        except BaseException:
            await in_thread(device.control, pyverbs.close)
            raise
    except BaseException:
        send_cq.unreserve(config.max_send_wr)
        recv_cq.unreserve(recv_entries)
        raise
    if srq is not None:
        srq.attach(qp)
    device.adopt(qp)
    return qp


def make_plain(
    device: Device, config: QPConfig, cqs: tuple[Any, Any], srq: SharedReceiveQueue | None
) -> tuple[Any, Any]:
    """The Maker of plain verbs QPs (ibv_create_qp(3))."""
    module = _pyverbs.module("qp")
    init = module.QPInitAttr(
        qp_type=QP_TYPES[config.qp_type],
        scq=cqs[0],
        rcq=cqs[1],
        srq=srq.pyverbs if srq is not None else None,
        cap=cap(config, srq is None),
        sq_sig_all=0,
    )
    return module.QP(device.qp_pd, init), init


def cap(config: QPConfig, own_receives: bool) -> Any:
    """pyverbs' QPCap for a config."""
    return _pyverbs.module("qp").QPCap(
        config.max_send_wr,
        config.max_recv_wr if own_receives else 0,
        config.max_send_sge,
        config.max_recv_sge if own_receives else 0,
        config.max_inline_data,
    )


def _make(
    device: Device,
    config: QPConfig,
    cqs: tuple[Any, Any],
    srq: SharedReceiveQueue | None,
    maker: Maker,
    initialise: bool,
) -> tuple[Any, dict[str, int]]:
    try:
        qp, granted = maker(device, config, cqs, srq)
    except UnsupportedError:
        raise
    except Exception as e:
        error = _pyverbs.translate(e, "ibv_create_qp", f"{config}")
        if isinstance(error, VerbsError) and error.errno == errno.EOPNOTSUPP:
            raise UnsupportedError(device.name, f"{config.qp_type} QPs of this kind", str(error)) from e
        raise error from e
    try:
        if initialise:
            _initialise(device, config, qp)
    except BaseException:
        qp.close()
        raise
    return qp, {
        "max_send_sge": granted.max_send_sge,
        "max_recv_sge": granted.max_recv_sge,
        "max_inline_data": granted.max_inline_data,
    }


def _initialise(device: Device, config: QPConfig, qp: Any) -> None:
    """RESET to INIT, so that receives can be posted."""
    _control.modify_qp(
        _control.qp_address(qp, device.context_address),
        _STATE | _PKEY | _PORT | _ACCESS,
        {
            "qp_state": INIT,
            "pkey_index": 0,
            "port_num": device.port,
            "qp_access_flags": int(config.access & device.remote_access),
            "_detail": f"QP {qp.qp_num:#x} to INIT on port {device.port}",
        },
    )

"""One end of a connection: carries out what its :class:`Core` says, over a link of one kind or another."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import threading
from collections.abc import Callable
from typing import Any, Protocol

import anyio

from aiordma import _backends
from aiordma._offload import Control, Pending, outcome, until
from aiordma._waitable import Signal
from aiordma.cm._address import Address, Via
from aiordma.cm._core import Action, Core, Event, Phase
from aiordma.cm._shared import Lease
from aiordma.device import Device
from aiordma.errors import ConnectTimeoutError, UsageError
from aiordma.qp import QPConfig, QueuePair
from aiordma.srq import SharedReceiveQueue

__all__ = [
    "REJECT_DATA",
    "REPLY_DATA",
    "REQUEST_DATA",
    "End",
    "Link",
    "Offer",
    "Plan",
    "check_private_data",
    "check_timeout",
    "padded",
]

#: Bytes of private data that the InfiniBand CM carries for a program, with a request, its acceptance and its rejection
#: (kernel: include/rdma/ib_cm.h, less struct cma_hdr in requests). In a rejection 8 are aiordma's, see _rdmacm.py.
REQUEST_DATA = 56
REPLY_DATA = 196
REJECT_DATA = 140


def check_private_data(data: object, limit: int, what: str) -> bytes:
    """``data`` as bytes; :class:`UsageError` that names the limit."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UsageError(f"private_data: bytes, not {type(data).__name__}")
    found = bytes(data)
    if len(found) > limit:
        raise UsageError(f"private_data: {len(found)} bytes, but {what} carries at most {limit}")
    return found


def check_timeout(timeout: Any) -> float | None:
    """``timeout`` in seconds, None where it has no end; :class:`UsageError` for what is no time."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or timeout != timeout:
        raise UsageError(f"timeout: seconds, or None for no limit, not {timeout!r}")
    seconds: Any = timeout
    # A limit of centuries is none, whether or not a float holds it.
    if seconds >= threading.TIMEOUT_MAX:
        return None
    return float(seconds) if seconds > 0 else 0.0


def padded(data: bytes, size: int) -> bytes:
    """What the peer sees of it: the CM's messages have a fixed size, and don't say how much of it was given."""
    return data.ljust(size, b"\0")[:size]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """RDMA reads and atomics in flight: how many this side starts, and how many it serves."""

    initiated: int
    served: int

    def within(self, other: Offer) -> Offer:
        """No more than another offer of the same side."""
        return Offer(min(self.initiated, other.initiated), min(self.served, other.served))


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a connection is made with."""

    config: QPConfig
    private_data: bytes
    prepare: Callable[[QueuePair], Any] | None
    srq: SharedReceiveQueue | None

    @classmethod
    def make(
        cls,
        call: str,
        config: QPConfig | None,
        options: dict[str, Any],
        private_data: object,
        limit: int,
        prepare: Callable[[QueuePair], Any] | None,
        srq: SharedReceiveQueue | None,
    ) -> Plan:
        if config is not None and not isinstance(config, QPConfig):
            raise UsageError(f"{call}: config is a QPConfig, not {type(config).__name__}")
        try:
            config = dataclasses.replace(config if config is not None else QPConfig(), **options)
        except TypeError as e:
            raise UsageError(f"{call}: {e}; the options are the fields of aiordma.QPConfig") from e
        config.check()
        if config.qp_type != "RC":
            raise UsageError(f"{call}: connections are of RC QPs, not {config.qp_type}")
        if prepare is not None and not callable(prepare):
            raise UsageError(f"{call}: prepare is called with the new QP, and {prepare!r} can't be")
        return cls(config, check_private_data(private_data, limit, call), prepare, srq)

    def offer(self, device: Device) -> Offer:
        """What ``device`` can do of it."""
        depth = 255 if self.config.max_rd_atomic is None else self.config.max_rd_atomic
        return Offer(min(depth, device.max_qp_init_rd_atom, 254), min(depth, device.max_qp_rd_atom, 254))


class Link(Protocol):
    """How an end talks to the other: rdma_cm or TCP.

    ``step()`` runs in the user's task and may be cancelled. The rest are control operations (see aiordma._offload).
    What the other side does comes through :meth:`End.event`.
    """

    @property
    def via(self) -> Via: ...

    #: The status, reason and private data of reject().
    refusal: tuple[int, int, bytes]

    @property
    def local_address(self) -> Address: ...

    @property
    def remote_address(self) -> Address: ...

    async def device(self) -> Lease[Device]:
        """The device that the connection's address belongs to, where the user named none."""

    def check_device(self, device: Device) -> None:
        """:class:`UsageError` if the user's device isn't the one that leads to the peer."""

    async def step(self, action: Action, end: End) -> None:
        """Carries out a step that isn't PREPARE."""

    async def reject(self) -> None: ...

    async def disconnect(self) -> None: ...

    async def destroy(self) -> None:
        """Once nothing else runs: the end of it."""

    def destroy_now(self) -> None:
        """The same in this thread, without a loop; any number of times."""


class End:
    """One end. :meth:`open` brings it up in the user's task; from then on it works by itself, without a task."""

    def __init__(self, link: Link, plan: Plan | None, *, active: bool, where: str) -> None:
        self.core = Core(active=active)
        self.link = link
        self.plan = plan
        self.where = where
        self.backend = _backends.current()
        self.control = Control(self.backend)
        self.lease: Lease[Device] | None = None
        #: A Connection has it, which releases the device after itself.
        self.owned = False
        self.qp: QueuePair | None = None
        self.prepared: Any = None
        #: What came from the peer with its request or acceptance.
        self.private_data = b""
        self.peer_offer: Offer | None = None
        self.offer = Offer(0, 0)
        #: Nobody opens it yet: a request that waits to be answered.
        self.idle = not active
        self.timeout: float | None = None
        self.on_lost: Callable[[], object] | None = None
        self._creating: Pending[QueuePair] | None = None
        self._changed: Signal | None = None
        self._failure: Exception | None = None
        self._running: Pending[None] | None = None

    @property
    def negotiated(self) -> Offer:
        """RDMA reads in flight, by what is known so far."""
        return self.offer if self.peer_offer is None else self.offer.within(self.peer_offer)

    # ---------------------------------------------------------------- opening, in the user's task

    async def open(self, timeout: float | None) -> None:
        """Until it's open. Whatever else happens (errors, a timeout, a cancellation), nothing is left of it."""
        self.idle = False
        self.timeout = timeout
        try:
            with anyio.fail_after(timeout):
                while not self.core.settled:
                    action = self.core.next()
                    if action is None:
                        await self._change()
                    else:
                        await self._carry_out(action)
        except TimeoutError:
            if self.core.phase is not Phase.OPEN:
                self.core.stop(ConnectTimeoutError(self.where, self.core.step.value))
        except BaseException as e:
            self.core.stop(e)
            await self.abandon()
            raise
        if self.core.phase is not Phase.OPEN:
            error = self.core.error
            await self.abandon()
            assert error is not None
            raise error

    async def _carry_out(self, action: Action) -> None:
        try:
            if action is Action.PREPARE:
                await self._prepare()
            else:
                await self.link.step(action, self)
        except TimeoutError as e:
            # One of the work's own, not of fail_after(), which cancels.
            self.core.failed(action, e)
        except Exception as e:
            self.core.failed(action, e)
        except BaseException:
            self.core.cut(action)
            raise
        else:
            self.core.done(action)

    async def _prepare(self) -> None:
        assert self.plan is not None
        if self.lease is None:
            self.lease = await self.link.device()
        else:
            self.link.check_device(self.lease.thing)
        device = self.lease.thing
        self._creating = device.create_qp(self.plan.config, srq=self.plan.srq)
        self.qp = await self._creating
        self.offer = self.plan.offer(device)
        if self.plan.prepare is not None:
            self.prepared = self.plan.prepare(self.qp)
            # Not whatever can be awaited: the Completion of a receive is a result here.
            if inspect.iscoroutine(self.prepared):
                self.prepared = await self.prepared

    async def abandon(self) -> None:
        """In the user's task: releases everything at once, and comes back when it's done."""
        self.core.close(patient=False)
        await self.backend.shielded(Pending(self.control, self.until_ended()))

    # ---------------------------------------------------------------- events, on the loop's thread

    def event(self, event: Event, error: BaseException | None = None) -> None:
        """Something happened at the peer or in the connection manager."""
        was_lost = self.core.lost
        self.core.event(event, error)
        self._wake()
        if self.core.phase is Phase.OPEN:
            self.work()
            if self.core.lost and not was_lost and self.on_lost is not None:
                self.on_lost()
        elif self.idle and self.core.error is not None:
            self.work()

    def drop(self, error: BaseException) -> None:
        """Nobody will open it: it's rejected and released. On the loop's thread."""
        self.core.stop(error)
        self.core.close(patient=False)
        self.work()

    def _wake(self) -> None:
        signal, self._changed = self._changed, None
        if signal is not None:
            signal.finish()

    def _change(self) -> Signal:
        if self._changed is None:
            self._changed = Signal(self.control.hooks)
        return self._changed

    # ---------------------------------------------------------------- ending, without a task

    def work(self) -> None:
        """Carries out what is due, off the task, unless that's under way."""
        if self._running is None:
            self._running = Pending(self.control, self._work())
            if self._running.done:
                self._running = None
            else:
                self._running.on_done(self._stopped)

    def _stopped(self) -> None:
        self._running = None
        self._wake()
        if self.core.phase is Phase.OPEN:
            self.work()

    async def _work(self) -> None:
        while (action := self.core.next()) is not None:
            try:
                if action is Action.FLUSH:
                    assert self.qp is not None
                    await outcome(self.qp.end_by_peer())
                elif action is Action.DISCONNECT:
                    await self.link.disconnect()
                elif action is Action.REJECT:
                    await self.link.reject()
                else:
                    await self._release()
            except Exception as e:
                self.core.failed(action, e)
                if action is Action.RELEASE:
                    self._failure = e
            else:
                self.core.done(action)
            self._wake()

    async def until_ended(self) -> None:
        """Control operation: to the end of it all, which core.close() or a failure brought about."""
        while not self.core.ended:
            await self._work()
            if not self.core.ended:
                await until(self._change())
        if self._failure is not None:
            raise self._failure

    async def _release(self) -> None:
        errors: list[Exception] = []
        for end in (self._release_qp, self.link.destroy, self._release_device):
            try:
                await end()
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]

    async def _release_qp(self) -> None:
        if self.qp is None and self._creating is not None:
            # Cancelled while it was made: it closes itself when it's there, and until then nothing else may go.
            try:
                self.qp = await outcome(self._creating)
            except Exception:
                return
        if self.qp is not None:
            await outcome(self.qp.close())

    async def _release_device(self) -> None:
        closing = self.lease.release() if self.lease is not None and not self.owned else None
        if closing is not None:
            await outcome(closing)

"""Listeners, and the requests that come to them."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, Self

from aiordma import _backends
from aiordma._offload import Control, Pending
from aiordma._values import whole
from aiordma._waitable import Signal
from aiordma.cm._address import Address, Via, text
from aiordma.cm._core import Phase
from aiordma.cm._devices import given
from aiordma.cm._endpoint import REJECT_DATA, REPLY_DATA, End, Plan, check_private_data, check_timeout
from aiordma.cm._ends import HasEnds
from aiordma.cm._opening import Opening
from aiordma.cm._reasons import CONSUMER, NO_RESOURCES
from aiordma.cm._shared import Lease
from aiordma.cm.connection import Connection
from aiordma.device import Device
from aiordma.errors import ClosedError, UsageError
from aiordma.qp import QPConfig, QueuePair
from aiordma.srq import SharedReceiveQueue

__all__ = ["Listener", "Request", "Source"]


class Source(Protocol):
    """Where requests come from: listening sockets or ids. It calls :meth:`Listener.put`."""

    @property
    def via(self) -> Via: ...

    @property
    def addresses(self) -> list[Address]: ...

    def stop(self) -> None:
        """On the loop's thread, first: nothing comes any more."""

    async def destroy(self) -> None:
        """Control operation: lets go of what is left."""

    def destroy_now(self) -> None:
        """Both in this thread, without a loop."""


class Request(HasEnds):
    """A peer that wants to connect: :meth:`accept` it or :meth:`reject` it. One that is dropped is rejected, with a warning.

    ``private_data``: what it sent along, 56 bytes, zero bytes behind what the peer gave.
    """

    def __init__(self, end: End) -> None:
        self._end = end
        self._answered = False
        self._pid = os.getpid()
        self._device: Device | None = None
        self._config: QPConfig | None = None

    def belong(self, device: Device | None, config: QPConfig | None) -> None:
        """The listener's defaults."""
        self._device = device
        self._config = config

    @property
    def gone(self) -> bool:
        """Whether the peer is known to have given up meanwhile. It may have without that being known."""
        return self._end.core.error is not None

    def _check_unanswered(self) -> None:
        self._end.control.hooks.verify()
        if self._answered:
            raise UsageError(f"{self!r} was answered already")

    def accept(
        self,
        device: Device | None = None,
        *,
        config: QPConfig | None = None,
        private_data: bytes | bytearray | memoryview = b"",
        prepare: Callable[[QueuePair], Any] | None = None,
        srq: SharedReceiveQueue | None = None,
        timeout: float | None = 10.0,
        **options: Any,
    ) -> Opening[Connection]:
        """Accepts it: ``connection = await request.accept()``, or ``async with``.

        It completes when the peer has confirmed. ``device``: on which the QP is made, by default the listener's, else
        the one that the request came in on, opened for this and shared with other connections. ``prepare``,
        ``config``, ``srq``, ``options``: as in :func:`connect`. ``private_data``: for the peer, up to 196 bytes.

        Raises :class:`DisconnectedError` when the peer has given up, :class:`ConnectTimeoutError`, and what making the
        QP or ``prepare`` raises: the request is then rejected.
        """
        self._check_unanswered()
        config = config if config is not None else self._config
        plan = Plan.make("an acceptance", config, options, private_data, REPLY_DATA, prepare, srq)
        lease = given(device if device is not None else self._device)
        return Opening(self._accept(plan, lease, check_timeout(timeout)))

    async def _accept(self, plan: Plan, lease: Lease[Device] | None, timeout: float | None) -> Connection:
        # Not before it's awaited: the answer that never is must leave a request that nobody has answered.
        self._check_unanswered()
        self._answered = True
        self._end.plan, self._end.lease = plan, lease
        await self._end.open(timeout)
        return Connection(self._end)

    async def reject(self, reason: int = 0, private_data: bytes | bytearray | memoryview = b"") -> None:
        """Rejects it: the peer gets :class:`RejectedError` with both.

        ``reason``: a number of your own, 0 to 65535; ``private_data``: up to 140 bytes.
        """
        reason = whole(reason)
        if not isinstance(reason, int) or isinstance(reason, bool) or not 0 <= reason <= 0xFFFF:
            raise UsageError(f"reason: a number from 0 to 65535, not {reason!r}")
        data = check_private_data(private_data, REJECT_DATA, "a rejection")
        self._check_unanswered()
        self._answered = True
        self._end.link.refusal = (CONSUMER, reason, data)
        self._end.core.stop(ClosedError(f"{self!r} was rejected"))
        await self._end.abandon()

    def refuse_now(self, status: int, why: str) -> None:
        """The listener's answer to one that nobody has taken."""
        self._answered = True
        self._end.link.refusal = (status, 0, b"")
        self._end.drop(ClosedError(why))

    async def until_ended(self) -> None:
        """Control operation: after refuse_now()."""
        await self._end.until_ended()

    def __del__(self) -> None:
        if getattr(self, "_pid", None) != os.getpid() or self._answered or self._end.core.phase is Phase.ENDED:
            return
        try:
            warnings.warn(f"unanswered {self!r}", ResourceWarning, stacklevel=2, source=self)
        finally:
            end = self._end
            error = ClosedError("the request was dropped")
            try:
                end.backend.call_soon_threadsafe(lambda: end.drop(error))
            except RuntimeError:  # the loop is closed
                end.link.destroy_now()

    def __repr__(self) -> str:
        return f"<Request from {text(self.remote_address)} over {self.via}>"


class Listener(AsyncIterator[Request]):
    """Listens for connections: ``async for request in listener``. Made by :func:`aiordma.listen`.

    Up to ``backlog`` requests wait to be taken; those beyond are rejected. Use it as ``async with``, or ``await
    aclose()``; a forgotten one warns (ResourceWarning).
    """

    def __init__(self, device: Device | None, config: QPConfig | None, backlog: int) -> None:
        self._control = Control(_backends.current())
        self._device = device
        self._config = config
        self._backlog = backlog
        self._waiting: deque[Request] = deque()
        self._arrival: Signal | None = None
        self._source: Source | None = None
        self._closing: Pending[None] | None = None
        self._pid = os.getpid()

    def begin(self, source: Source) -> None:
        """Its source listens."""
        self._source = source

    @property
    def addresses(self) -> list[Address]:
        """The addresses that it listens on."""
        return list(self._source.addresses) if self._source is not None else []

    @property
    def port(self) -> int:
        """The port, useful where 0 was asked for."""
        return self.addresses[0].port

    @property
    def via(self) -> Via:
        """How it listens."""
        assert self._source is not None
        return self._source.via

    @property
    def closed(self) -> bool:
        """Whether ``aclose()`` was called."""
        return self._closing is not None

    @property
    def waiting(self) -> int:
        """Requests that wait to be taken."""
        return sum(not request.gone for request in self._waiting)

    def put(self, request: Request) -> None:
        """A request came. On the loop's thread."""
        while self._waiting and self._waiting[0].gone:
            self._waiting.popleft().refuse_now(CONSUMER, "the peer gave up")
        if self._closing is not None:
            request.refuse_now(CONSUMER, "the listener was closed")
        elif self.waiting >= self._backlog:
            request.refuse_now(NO_RESOURCES, "the backlog is full")
        else:
            request.belong(self._device, self._config)
            self._waiting.append(request)
            self._wake()

    def _wake(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.finish()

    async def accept(self) -> Request:
        """The next request; :class:`ClosedError` once it's closed, also for those that wait."""
        self._control.hooks.verify()
        while True:
            if self._closing is not None:
                raise ClosedError(f"{self!r} is closed")
            while self._waiting:
                request = self._waiting.popleft()
                if not request.gone:
                    return request
                request.refuse_now(CONSUMER, "the peer gave up")
            if self._arrival is None:
                self._arrival = Signal(self._control.hooks)
            await self._arrival

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request:
        try:
            return await self.accept()
        except ClosedError:
            raise StopAsyncIteration from None

    def close(self) -> Pending[None]:
        """Stops listening, and rejects what waits; started by the call, awaited or not. Connections live on."""
        if self._closing is None:
            self._control.hooks.verify()
            if self._source is not None:
                self._source.stop()
            self._closing = Pending(self._control, self._close())
            self._wake()
        return self._closing

    async def _close(self) -> None:
        left = list(self._waiting)
        self._waiting.clear()
        for request in left:
            request.refuse_now(CONSUMER, "the listener was closed")
        for request in left:
            await request.until_ended()
        if self._source is not None:
            await self._source.destroy()

    async def aclose(self) -> None:
        """The same, to the end. A task that waits in ``async for`` leaves it; one in :meth:`accept` gets ClosedError."""
        await self._control.backend.shielded(self.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_pid", None) != os.getpid() or self._closing is not None or self._source is None:
            return
        try:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
        finally:
            source, left = self._source, list(self._waiting)
            for request in left:
                request._answered = True
            self._waiting.clear()
            control = self._control

            def end() -> None:
                source.stop()
                for request in left:
                    request.refuse_now(CONSUMER, "the listener was dropped")
                Pending(control, source.destroy())

            try:
                control.backend.call_soon_threadsafe(end)
            except RuntimeError:  # the loop is closed
                source.destroy_now()
                for request in left:
                    request._end.link.destroy_now()

    def __repr__(self) -> str:
        where = ", ".join(text(address) for address in self.addresses)
        return f"<Listener on {where}{' closed' if self.closed else ''}>"

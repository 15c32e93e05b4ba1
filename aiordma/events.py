"""Asynchronous events of a device: errors and changes that belong to no work request."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NoReturn

from aiordma._offload import Control
from aiordma._waitable import Signal, no_copy

__all__ = ["AsyncEvent", "EventType", "Events"]


class EventType(enum.IntEnum):
    """enum ibv_event_type (ibv_get_async_event(3))."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """One event. Exactly one of ``port``, ``element`` tells what it concerns, or neither (the whole device).

    ``element``: the QueuePair or SharedReceiveQueue of this device, or None where it isn't one of ours (or a CQ).
    Events are acknowledged before they are handed out (ibv_ack_async_event(3)), so that none can block a close.
    """

    type: EventType | int
    port: int | None = None
    element: object | None = None


class Events(AsyncIterator[AsyncEvent]):
    """``async for event in device.events()``: every event from the call on, until the device is closed.

    At most ``limit`` events wait to be taken; beyond that the oldest are dropped and counted in ``dropped``.
    """

    def __init__(self, control: Control, limit: int) -> None:
        self._control = control
        self._waiting: deque[AsyncEvent] = deque(maxlen=limit)
        self._signal: Signal | None = None
        self._closed = False
        self.dropped = 0

    def __reduce__(self) -> NoReturn:
        no_copy(self)

    def put(self, event: AsyncEvent) -> None:
        if len(self._waiting) == self._waiting.maxlen:
            self.dropped += 1
        self._waiting.append(event)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        signal, self._signal = self._signal, None
        if signal is not None:
            signal.finish()

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> AsyncEvent:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._signal is None:
                self._signal = Signal(self._control.hooks)
            await self._signal
        return self._waiting.popleft()

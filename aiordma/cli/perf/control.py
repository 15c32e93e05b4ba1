"""What the two ends tell each other: JSON in messages over a connection of their own, beside those that are measured.

The order is fixed. The client says what it wants (``hello``), the server what it offers (``welcome``); they connect the other
QPs; then for each size ``begin`` and ``ready``, the measurement, ``end`` and ``result``; and in the end ``bye``.
"""

from __future__ import annotations

import json
import mmap
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from aiordma import Completion, Connection, MemoryRegion, MemorySlice, QPInfo, QueuePair, UsageError

__all__ = ["MAGIC", "VERSION", "Control", "PeerError", "connect_all", "prepare", "taken"]

MAGIC = b"aiordma-perf"
VERSION = 2
_SIZE, _WINDOW = 1 << 16, 2


class PeerError(Exception):
    """The peer doesn't go along, or doesn't speak this language; the message says why."""


Inbox = tuple[MemoryRegion, deque[tuple[MemorySlice, Completion]]]


def prepare() -> Callable[[QueuePair], Awaitable[Inbox]]:
    """For connect() and accept(): receives are posted before the peer can send."""

    async def post(qp: QueuePair) -> Inbox:
        region = await qp.device.reg_mr(mmap.mmap(-1, _SIZE * (_WINDOW + 1)))
        slices = [region[_SIZE * i : _SIZE * (i + 1)] for i in range(_WINDOW)]
        return region, deque((part, qp.recv(part)) for part in slices)

    return post


class Control:
    """One side of the conversation; it closes the connection's memory, not the connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._region, self._receives = connection.prepared

    async def send(self, kind: str, **facts: Any) -> None:
        """Says something; returns when the peer has it."""
        data = json.dumps({"kind": kind, **facts}).encode()
        if len(data) > _SIZE:
            raise PeerError(f"{kind}: {len(data)} bytes are too many for a message")
        out = self._region[_SIZE * _WINDOW : _SIZE * _WINDOW + len(data)]
        out.view()[:] = data
        await self.connection.send(out)

    async def receive(self, *kinds: str) -> dict[str, Any]:
        """What the peer says next, which must be of one of these kinds."""
        part, completion = self._receives[0]
        await completion
        self._receives.popleft()
        try:
            message = json.loads(bytes(part.view()[: completion.byte_len]))
            kind = message["kind"]
        except (ValueError, TypeError, KeyError) as e:
            raise PeerError(f"what the peer said can't be understood: {e}") from e
        self._receives.append((part, self.connection.recv(part)))
        if kind == "error":
            raise PeerError(f"the peer refused: {message.get('text')}")
        if kind not in kinds:
            raise PeerError(f"the peer said {kind!r} where {' or '.join(kinds)} was expected")
        return dict(message)

    async def close(self) -> None:
        """Lets go of the memory; the connection must be closed before."""
        taken(self._receives)
        await self._region.close()


async def connect_all(queue_pairs: Sequence[QueuePair], message: Mapping[str, Any]) -> None:
    """Connects QPs with those that the peer's message describes."""
    try:
        infos = [QPInfo.from_json(info) for info in message["infos"]]
    except (KeyError, TypeError, UsageError) as e:
        raise PeerError(f"what the peer says of its QPs can't be understood: {e}") from e
    if len(infos) != len(queue_pairs):
        raise PeerError(f"the peer has {len(infos)} QPs to connect, this side {len(queue_pairs)}")
    for qp, info in zip(queue_pairs, infos, strict=True):
        await qp.connect(info)


def taken(receives: Iterable[tuple[MemorySlice, Completion]]) -> None:
    """Receives that are over with their connection: that nothing came to them is no news to anybody."""
    for _, completion in receives:
        if completion.done:
            completion.exception()

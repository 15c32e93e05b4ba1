"""The client: get, put and delete, through restarts of the server."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import anyio

import aiordma
from aiordma import Completion, Connection, Device, MemoryRegion, QPConfig, QueuePair
from kv_cache.layout import HEADER, KEY_BYTES, MESSAGE, WINDOW, Greeting, LayoutError, Message, Op, Status, seal, unseal

# A second, eight times, for an answer: the other side may have other things to do. That it has gone the connection tells.
CONFIG = QPConfig(max_send_wr=8, max_recv_wr=WINDOW, max_inline_data=MESSAGE, timeout=18)
KNOWN_PLACES = 4096
T = TypeVar("T")


class CacheError(Exception):
    """The server refused: a value too long, or no slot to be had."""


@dataclass
class _Session:
    """What lives as long as one connection."""

    connection: Connection
    greeting: Greeting
    inbox: MemoryRegion
    scratch: MemoryRegion
    window: deque[tuple[Completion, int]]
    places: OrderedDict[bytes, Message]

    async def close(self) -> None:
        await self.connection.aclose()
        await self.inbox.close()
        await self.scratch.close()


class Client:
    """``async with Client(device, host, port) as cache: await cache.put(b"key", b"value")``.

    Any number of tasks may use it; they take turns. When the connection breaks, what was under way begins again on a new
    one, for up to ``patience`` seconds: each operation can be done twice without harm.
    """

    def __init__(
        self, device: Device, host: str, port: int, *, via: aiordma.cm.Via | None = None, patience: float = 30.0
    ) -> None:
        self._device = device
        self._address = (host, port)
        self._via = via
        self._patience = patience
        self._turn = anyio.Lock()
        self._session: _Session | None = None
        self._numbers = itertools.count(1)
        self.reconnects = -1
        self.reads = 0
        self.stale_reads = 0

    async def __aenter__(self) -> Self:
        await self._do(self._nothing)
        return self

    async def __aexit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._drop()

    # ---------------------------------------------------------------- operations

    async def get(self, key: bytes) -> bytes | None:
        """The value, whole, as some put() gave it; None where the cache has none."""
        _check(key)

        async def run(session: _Session) -> bytes | None:
            place = session.places.get(key)
            if place is not None:
                value = await self._read(session, key, place)
                if value is not None:
                    return value
            while (place := await self._ask(session, Op.LOOKUP, key)).code == Status.OK:
                value = await self._read(session, key, place)
                if value is not None:
                    session.places[key] = place
                    session.places.move_to_end(key)
                    if len(session.places) > KNOWN_PLACES:
                        session.places.popitem(last=False)
                    return value
            return None

        return await self._do(run)

    async def put(self, key: bytes, value: bytes) -> None:
        """Stores it. Others see the old value or the new one, never a mixture."""
        _check(key)
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"a value is bytes, not {type(value).__name__}")
        value = bytes(value)

        async def run(session: _Session) -> None:
            if len(value) > session.greeting.slot_bytes - HEADER:
                raise CacheError(f"{len(value)} bytes: values have at most {session.greeting.slot_bytes - HEADER}")
            place = await self._ask(session, Op.RESERVE, key, length=len(value))
            while place.code == Status.FULL:
                await anyio.sleep(0.001)
                place = await self._ask(session, Op.RESERVE, key, length=len(value))
            if place.code != Status.OK:
                raise CacheError(f"the server refused: {Status(place.code).name}")
            with session.scratch.view() as view:
                view[: HEADER + len(value)] = seal(place.version, key, value) + value
            # The slot is this client's alone until it's committed.
            await session.connection.rdma_write(
                session.scratch[: HEADER + len(value)], session.greeting.slot(place.slot)[: HEADER + len(value)]
            )
            done = await self._ask(session, Op.COMMIT, key, slot=place.slot, version=place.version)
            if done.code != Status.OK:
                raise CacheError(f"the server refused: {Status(done.code).name}")
            session.places[key] = place

        await self._do(run)

    async def delete(self, key: bytes) -> bool:
        """Whether it was there."""
        _check(key)

        async def run(session: _Session) -> bool:
            session.places.pop(key, None)
            return (await self._ask(session, Op.DELETE, key)).code == Status.OK

        return await self._do(run)

    async def count(self) -> int:
        """Values in the cache."""

        async def run(session: _Session) -> int:
            return (await self._ask(session, Op.COUNT)).length

        return await self._do(run)

    # ---------------------------------------------------------------- one connection

    async def _read(self, session: _Session, key: bytes, place: Message) -> bytes | None:
        """One RDMA read; None where the slot has something else by now."""
        size = HEADER + place.length
        await session.connection.rdma_read(session.scratch[:size], session.greeting.slot(place.slot)[:size])
        self.reads += 1
        with session.scratch.view() as view:
            value = unseal(view[:size], place.version, key)
        if value is None:
            self.stale_reads += 1
            session.places.pop(key, None)
        return value

    async def _ask(
        self, session: _Session, op: Op, key: bytes = b"", *, slot: int = 0, length: int = 0, version: int = 0
    ) -> Message:
        number = next(self._numbers) & 0xFFFFFFFF
        await session.connection.send(Message(op, number, slot, length, version, key).pack())
        while True:
            completion, i = session.window[0]
            received = await completion  # cancelled here, it stays the first of the window
            session.window.popleft()
            with session.inbox.view() as view:
                answer = Message.unpack(bytes(view[i * MESSAGE :][: received.byte_len]))
            session.window.append((session.connection.recv(_part(session.inbox, i)), i))
            if answer.number == number:
                return answer
            # The answer to a question whose asker was cancelled.

    # ---------------------------------------------------------------- any number of connections

    async def _do(self, run: Callable[[_Session], Awaitable[T]]) -> T:
        """Runs an operation, again on a new connection if the one that it ran on broke."""
        problem: Exception | None = None
        async with self._turn:
            try:
                with anyio.fail_after(self._patience):
                    pause = 0.005
                    while True:
                        try:
                            if self._session is None:
                                self._session = await self._connect()
                            return await run(self._session)
                        except (ConnectionError, aiordma.CompletionError) as e:
                            # The server has gone, or is just coming back. Places were of its old memory.
                            problem = e
                            await self._drop()
                            await anyio.sleep(pause)
                            pause = min(pause * 2, 0.2)
                        except LayoutError:
                            await self._drop()
                            raise
            except TimeoutError:
                host, port = self._address
                why = f": {problem}" if problem is not None else ""
                raise TimeoutError(f"nothing from {host}:{port} within {self._patience} seconds{why}") from problem

    async def _connect(self) -> _Session:
        inbox = await self._device.reg_mr(bytearray(WINDOW * MESSAGE))
        try:

            def window(qp: QueuePair) -> deque[tuple[Completion, int]]:
                return deque((qp.recv(_part(inbox, i)), i) for i in range(WINDOW))

            host, port = self._address
            connection = await aiordma.connect(
                host, port, device=self._device, config=CONFIG, via=self._via, prepare=window, timeout=5
            )
        except BaseException:
            with anyio.CancelScope(shield=True):
                await inbox.close()
            raise
        try:
            greeting = Greeting.unpack(connection.private_data)
            scratch = await self._device.reg_mr(bytearray(greeting.slot_bytes))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await connection.aclose()
                await inbox.close()
            raise
        self.reconnects += 1
        return _Session(connection, greeting, inbox, scratch, connection.prepared, OrderedDict())

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.close()

    async def _nothing(self, session: _Session) -> None:
        """Connecting is all."""


def _check(key: bytes) -> None:
    if not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, not {type(key).__name__}")
    if not 0 < len(key) <= KEY_BYTES:
        raise ValueError(f"a key has 1 to {KEY_BYTES} bytes, not {len(key)}")


def _part(inbox: MemoryRegion, i: int) -> aiordma.MemorySlice:
    return inbox[i * MESSAGE : (i + 1) * MESSAGE]


__all__ = ["CacheError", "Client", "LayoutError"]

"""Setting up a pair of QPs over a TCP connection: one await on each side.

::

    async with await exchange.serve("127.0.0.1", 18515) as listener:          # one side
        peer = await listener.accept(qp, buffers={"inbox": mr.remote()})

    peer = await exchange.connect("127.0.0.1", 18515, qp)                      # the other
    await qp.rdma_write(local, peer.buffers["inbox"])

Each side sends its :class:`QPInfo`, descriptions of buffers, and any JSON value; connects its QP; and returns when the
other has too, so that the first send finds the peer ready. Nothing is encrypted or authenticated: whoever can connect
to the port gets the rkeys. Use it where the network is trusted, or wrap the exchange yourself with
:attr:`QueuePair.info` and :meth:`QueuePair.connect`.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketListener, SocketStream

from aiordma._memory import RemoteBuffer
from aiordma.errors import ClosedError, ExchangeError, RdmaError, UsageError
from aiordma.info import QPInfo
from aiordma.qp import QueuePair

__all__ = ["Listener", "Peer", "connect", "serve"]

_VERSION = 1
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side: its QP, the buffers it offered by name, and the JSON value it sent along."""

    info: QPInfo
    buffers: Mapping[str, RemoteBuffer] = field(default_factory=dict)
    data: Any = None


def _encode(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > _MAX_MESSAGE:
        raise UsageError(f"buffers and data are {len(body)} bytes of JSON: at most {_MAX_MESSAGE} can be exchanged")
    return _LENGTH.pack(len(body)) + body


def _hello(qp: QueuePair, buffers: Mapping[str, RemoteBuffer] | None, data: Any) -> bytes:
    """What this side says of itself; :class:`UsageError` for what can't be said."""
    if not isinstance(qp, QueuePair):
        raise UsageError(f"an exchange connects a QueuePair, not {type(qp).__name__}")
    if buffers is not None and not isinstance(buffers, Mapping):
        raise UsageError(f"buffers: a mapping of names to RemoteBuffers, not {type(buffers).__name__}")
    for name, buffer in (buffers or {}).items():
        if not isinstance(name, str) or not isinstance(buffer, RemoteBuffer):
            raise UsageError(
                f"buffers[{name!r}]: a RemoteBuffer under a name, not {type(buffer).__name__}: mr.remote()"
            )
    try:
        return _encode(
            {
                "aiordma": _VERSION,
                "qp": json.loads(qp.info.to_json()),
                "buffers": {name: buffer.to_json() for name, buffer in (buffers or {}).items()},
                "data": data,
            }
        )
    except UsageError:
        raise
    except (TypeError, ValueError, RecursionError) as e:
        raise UsageError(f"data: a JSON value ({e})") from e


async def _send(stream: ByteStream, message: bytes) -> None:
    try:
        await stream.send(message)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError) as e:
        raise ExchangeError("the peer closed the connection during the exchange") from e


async def _receive_exactly(stream: ByteStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            data += await stream.receive(size - len(data))
        except (anyio.EndOfStream, anyio.BrokenResourceError) as e:
            raise ExchangeError("the peer closed the connection during the exchange") from e
    return bytes(data)


async def _receive(stream: ByteStream) -> dict[str, Any]:
    (size,) = _LENGTH.unpack(await _receive_exactly(stream, _LENGTH.size))
    if size > _MAX_MESSAGE:
        raise ExchangeError(f"the peer announces {size} bytes: it doesn't speak aiordma's exchange")
    try:
        message = json.loads(await _receive_exactly(stream, size))
    except (ValueError, RecursionError) as e:
        raise ExchangeError("what the peer sent isn't JSON: it doesn't speak aiordma's exchange") from e
    if not isinstance(message, dict):
        raise ExchangeError("what the peer sent isn't a JSON object: it doesn't speak aiordma's exchange")
    if "error" in message:
        raise ExchangeError(f"the peer gave up: {message['error']}")
    return message


async def _exchange(stream: ByteStream, qp: QueuePair, hello: bytes) -> Peer:
    await _send(stream, hello)
    message = await _receive(stream)
    version = message.get("aiordma")
    if type(version) is not int or version != _VERSION:
        raise ExchangeError(f"the peer speaks version {version!r} of the exchange, this side {_VERSION}")
    try:
        peer = Peer(
            QPInfo.from_json(message["qp"]),
            {str(name): RemoteBuffer.from_json(item) for name, item in message["buffers"].items()},
            message.get("data"),
        )
    except (UsageError, KeyError, TypeError, AttributeError) as e:
        raise ExchangeError(f"the peer's message can't be understood: {e}") from e
    try:
        await qp.connect(peer.info)
    except RdmaError as e:
        with contextlib.suppress(ExchangeError):  # it's gone, which matters less than why this failed
            await _send(stream, _encode({"error": str(e)}))
        raise
    await _send(stream, _encode({"ready": True}))
    if (await _receive(stream)).get("ready") is not True:
        raise ExchangeError("the peer didn't say that it's ready: it doesn't speak aiordma's exchange")
    return peer


async def connect(
    host: str,
    port: int,
    qp: QueuePair,
    *,
    buffers: Mapping[str, RemoteBuffer] | None = None,
    data: Any = None,
    timeout: float = 10.0,
) -> Peer:
    """Connects ``qp`` with the one that a listener at ``host``:``port`` offers.

    ``buffers``: what the peer may access, by name. ``data``: a JSON value for it. ``timeout``: seconds for all of it.

    Raises :class:`ExchangeError` (a ConnectionError), :class:`OSError` where nothing listens, :class:`TimeoutError`, and
    whatever ``qp.connect`` does. The QP is then to be closed, unless nothing had been sent.
    """
    hello = _hello(qp, buffers, data)
    with anyio.fail_after(timeout):
        async with await anyio.connect_tcp(host, port) as stream:
            return await _exchange(stream, qp, hello)


class Listener:
    """A TCP listener for exchanges; made by :func:`serve`. ``async with``, or ``await aclose()``."""

    def __init__(self, listeners: list[SocketListener]) -> None:
        self._listeners = listeners
        self._accepted: list[SocketStream] = []
        self._closed = False

    @property
    def port(self) -> int:
        """The TCP port, useful where 0 was asked for."""
        port: int = self._listeners[0].extra(SocketAttribute.local_port)
        return port

    async def _accept(self) -> SocketStream:
        if len(self._listeners) == 1 and not self._closed:
            try:
                return await self._listeners[0].accept()
            except anyio.ClosedResourceError:
                self._closed = True
        errors: list[OSError] = []
        if not self._accepted and not self._closed:
            async with anyio.create_task_group() as group:

                async def accept(listener: SocketListener) -> None:
                    try:
                        # Two may come at once, or with a cancellation: the next call takes the other one.
                        self._accepted.append(await listener.accept())
                    except anyio.ClosedResourceError:
                        self._closed = True
                    except OSError as e:
                        errors.append(e)
                    group.cancel_scope.cancel()

                for listener in self._listeners:
                    group.start_soon(accept, listener)
        if self._accepted:
            return self._accepted.pop(0)
        if errors:
            raise errors[0]
        raise ClosedError("the listener was closed")

    async def accept(
        self,
        qp: QueuePair,
        *,
        buffers: Mapping[str, RemoteBuffer] | None = None,
        data: Any = None,
        timeout: float = 10.0,
    ) -> Peer:
        """Waits for a client and connects ``qp`` with its QP.

        Waiting for the client has no limit; the exchange with it then takes at most ``timeout`` seconds. Errors as in
        :func:`connect`, and :class:`ClosedError` when the listener is closed.
        """
        hello = _hello(qp, buffers, data)
        stream = await self._accept()
        async with stream:
            with anyio.fail_after(timeout):
                return await _exchange(stream, qp, hello)

    async def aclose(self) -> None:
        """Stops listening; an ``accept`` that waits raises :class:`ClosedError`."""
        self._closed = True
        for listener in self._listeners:
            await listener.aclose()
        for stream in self._accepted:
            await anyio.aclose_forcefully(stream)
        self._accepted.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def serve(host: str | None = None, port: int = 0) -> Listener:
    """Listens for exchanges on ``host`` (None: every address) and ``port`` (0: any free one)."""
    multi = await anyio.create_tcp_listener(local_host=host, local_port=port)
    return Listener([listener for listener in multi.listeners if isinstance(listener, SocketListener)])

"""A TCP connection that carries a few small JSON messages, read by the loop's callbacks rather than by a task."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from aiordma._backends import Backend, Watch

__all__ = ["Wire", "WireError"]

_LENGTH = struct.Struct("!I")
_MAX_MESSAGE = 1 << 14


class WireError(Exception):
    """The other side doesn't speak this protocol, or the connection broke; says which."""


class Wire:
    """``on_message`` is called with each JSON object, ``on_end`` once when no more will come: with None where the peer
    ended the connection in order, otherwise with why.
    """

    def __init__(
        self,
        backend: Backend,
        sock: socket.socket,
        on_message: Callable[[dict[str, Any]], object],
        on_end: Callable[[WireError | None], object],
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.on_message = on_message
        self.on_end = on_end
        self._buffer = bytearray()
        self._ended = False
        self._watch: Watch | None = backend.watch(sock.fileno(), self._on_readable)

    def send(self, message: dict[str, Any]) -> None:
        """Messages are few and small: one that doesn't fit into the socket's buffer is a connection that has stopped."""
        body = json.dumps(message).encode()
        frame = _LENGTH.pack(len(body)) + body
        try:
            sent = self.sock.send(frame)
        except OSError as e:
            raise WireError(f"the connection broke: {e}") from e
        if sent < len(frame):
            raise WireError("the peer doesn't take what is sent to it")

    def end(self) -> None:
        """Nothing more is sent: the peer sees the end of the connection."""
        with contextlib.suppress(OSError):  # it's gone at the other side already
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Any number of times. No callback comes any more."""
        self._ended = True
        self._unwatch()
        self.sock.close()

    def close_now(self) -> None:
        """The same without a loop, whose watches are its own business."""
        self._ended = True
        self.sock.close()

    def _unwatch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _on_readable(self) -> None:
        if self._ended:
            return
        try:
            data = self.sock.recv(1 << 14)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            self._finish(WireError(f"the connection broke: {e}"))
            return
        if not data:
            self._finish(WireError("the connection ended in the middle of a message") if self._buffer else None)
            return
        self._buffer += data
        try:
            for message in self._messages():
                if not self._ended:
                    self.on_message(message)
        except WireError as e:
            self._finish(e)

    def _messages(self) -> list[dict[str, Any]]:
        found = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > _MAX_MESSAGE:
                raise WireError(f"the peer announces {size} bytes: it doesn't speak this protocol")
            if len(self._buffer) < _LENGTH.size + size:
                break
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
            del self._buffer[: _LENGTH.size + size]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError) as e:
                raise WireError("what the peer sent isn't JSON: it doesn't speak this protocol") from e
            if not isinstance(message, dict):
                raise WireError("what the peer sent isn't a JSON object: it doesn't speak this protocol")
            found.append(message)
        return found

    def _finish(self, error: WireError | None) -> None:
        self._ended = True
        self._unwatch()
        self.on_end(error)

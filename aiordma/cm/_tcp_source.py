"""The listening side of connections over TCP."""

from __future__ import annotations

import errno
import socket
import weakref
from functools import partial
from typing import Any

from aiordma._backends import Backend, Watch
from aiordma._offload import Control, Pending, delay, until
from aiordma.cm._address import Address, Endpoint, Via, as_address, text
from aiordma.cm._endpoint import REQUEST_DATA, End
from aiordma.cm._reasons import CONSUMER, TIMEOUT
from aiordma.cm._tcp import VERSION, TcpLink, read_peer, refuse
from aiordma.cm._wire import Wire, WireError
from aiordma.cm.listener import Listener, Request
from aiordma.errors import UsageError

__all__ = ["TcpSource", "bind"]

# Clients that have connected and not said yet what they want. Beyond that the oldest go.
_MAX_SILENT = 256
# How long nobody is taken after no descriptor was left for one: the loop would call again at once.
_PAUSE_SECONDS = 0.2
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _listening(endpoint: Endpoint, backlog: int) -> socket.socket:
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if endpoint.family == socket.AF_INET6:
            # The wildcard takes IPv4 too.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if endpoint.sockaddr[0] == "::" else 1)
        sock.bind(endpoint.sockaddr)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def bind(endpoints: list[Endpoint], wildcard: bool, backlog: int) -> list[socket.socket]:
    """Sockets that listen on all of ``endpoints``, on one port; of a wildcard's only on the first that this machine has."""
    found: list[socket.socket] = []
    problem: OSError | None = None
    try:
        for endpoint in endpoints:
            if found and endpoint.sockaddr[1] == 0:
                port = found[0].getsockname()[1]
                endpoint = Endpoint(endpoint.family, (endpoint.sockaddr[0], port, *endpoint.sockaddr[2:]))
            try:
                found.append(_listening(endpoint, backlog))
            except OSError as e:
                if e.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                problem = e
            else:
                if wildcard:
                    break
    except BaseException:
        for sock in found:
            sock.close()
        raise
    if not found:
        assert problem is not None
        raise problem
    return found


class TcpSource:
    """See :class:`aiordma.cm.listener.Source`."""

    via: Via = "tcp"

    def __init__(self, backend: Backend, sockets: list[socket.socket], listener: Listener) -> None:
        self._backend = backend
        self._listener = weakref.ref(listener)
        self._sockets = sockets
        self._addresses = [as_address(sock.getsockname()) for sock in sockets]
        self._silent: dict[Wire, None] = {}
        self._watches: list[Watch] = []
        self._stopped = False
        self._watch()

    @property
    def addresses(self) -> list[Address]:
        return self._addresses

    def _watch(self) -> None:
        for sock in self._sockets:
            self._watches.append(self._backend.watch(sock.fileno(), partial(self._on_client, sock)))

    def _unwatch(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.close()

    async def _pause(self) -> None:
        self._unwatch()
        await until(await delay(Control(self._backend), _PAUSE_SECONDS))
        if not self._stopped:
            self._watch()

    def _on_client(self, listening: socket.socket) -> None:
        while self._watches:
            try:
                sock, _ = listening.accept()
            except OSError as e:
                # None left, or one that was gone before it was taken: the loop calls again.
                if e.errno in _EXHAUSTED:
                    Pending(Control(self._backend), self._pause())
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = Wire(self._backend, sock, _ignore, _ignore)
            wire.on_message = partial(self._on_hello, wire)
            wire.on_end = partial(self._on_silent_end, wire)
            self._silent[wire] = None
            if len(self._silent) > _MAX_SILENT:
                oldest = next(iter(self._silent))
                refuse(oldest, TIMEOUT)
                self._forget(oldest)

    def _on_silent_end(self, wire: Wire, _: WireError | None) -> None:
        self._forget(wire)

    def _forget(self, wire: Wire) -> None:
        self._silent.pop(wire, None)
        wire.close()

    def _on_hello(self, wire: Wire, message: dict[str, Any]) -> None:
        listener = self._listener()
        version = message.get("aiordma-cm")
        try:
            if type(version) is not int or version != VERSION or listener is None:
                raise ValueError(f"version {version!r}")
            peer, private_data = read_peer(message["request"], REQUEST_DATA)
        except (ValueError, KeyError, TypeError, AttributeError, UsageError):
            refuse(wire, CONSUMER)
            self._forget(wire)
            return
        del self._silent[wire]
        link = TcpLink(self._backend, wire=wire)
        end = End(link, None, active=False, where=f"the request from {text(link.remote_address)}")
        end.private_data = private_data
        link.attach(end, peer)
        listener.put(Request(end))

    def stop(self) -> None:
        self._stopped = True
        self._unwatch()
        for wire in list(self._silent):
            self._forget(wire)
        for sock in self._sockets:
            sock.close()

    async def destroy(self) -> None:
        """Nothing is left."""

    def destroy_now(self) -> None:
        self._stopped = True
        self._watches = []
        for wire in self._silent:
            wire.close_now()
        for sock in self._sockets:
            sock.close()


def _ignore(_: object) -> None:
    pass

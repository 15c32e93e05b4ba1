"""Connections over TCP, for devices and machines without rdma_cm.

The TCP connection stands for the CM's: a request, an answer and a confirmation, as JSON with a length before it, and then
nothing until it ends, which is the disconnect. Messages::

    -> {"aiordma-cm": 1, "request": {"qp": QPInfo, "private_data": hex}}
    <- {"accept": {"qp": QPInfo, "private_data": hex}}  or  {"reject": {"status": 28, "reason": 0, "private_data": hex}}
    -> {"established": true}

Nothing is encrypted or authenticated, as in the CM.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from typing import Any

import anyio

from aiordma._backends import Backend
from aiordma.cm._address import Address, Endpoint, Via, as_address
from aiordma.cm._core import Action, Event
from aiordma.cm._devices import lease
from aiordma.cm._endpoint import REJECT_DATA, REPLY_DATA, End, Offer, padded
from aiordma.cm._reasons import CONSUMER, NOBODY, reason_text
from aiordma.cm._shared import Lease
from aiordma.cm._wire import Wire, WireError
from aiordma.device import Device
from aiordma.errors import ConnectError, DisconnectedError, RejectedError, UnreachableError, UsageError
from aiordma.info import QPInfo

__all__ = ["TcpLink", "VERSION", "refuse"]

VERSION = 1


def _qp_message(end: End) -> dict[str, Any]:
    assert end.qp is not None
    assert end.plan is not None
    return {"qp": json.loads(end.qp.info.to_json()), "private_data": end.plan.private_data.hex()}


def read_peer(message: Any, size: int) -> tuple[QPInfo, bytes]:
    """The QP and the private data of a request or an acceptance; ValueError and its like where they make no sense."""
    data = bytes.fromhex(message["private_data"])
    if len(data) > size:
        raise ValueError(f"{len(data)} bytes of private data")
    return QPInfo.from_json(message["qp"]), padded(data, size)


def _number(value: object) -> int:
    """A status or a reason of a rejection, which come in 16 bits."""
    if type(value) is not int or not 0 <= value <= 0xFFFF:
        raise ValueError("neither a status nor a reason")
    return value


def refuse(wire: Wire, status: int, reason: int = 0, private_data: bytes = b"") -> None:
    """Tells the peer no; it's gone, where that fails."""
    with contextlib.suppress(WireError):
        wire.send({"reject": {"status": status, "reason": reason, "private_data": private_data.hex()}})
    wire.end()


class TcpLink:
    """See :class:`aiordma.cm._endpoint.Link`."""

    via: Via = "tcp"

    def __init__(self, backend: Backend, endpoint: Endpoint | None = None, wire: Wire | None = None) -> None:
        self._backend = backend
        self._endpoint = endpoint
        self._wire = wire
        self._end: End | None = None
        self._peer: QPInfo | None = None
        self._local = self._remote = Address("", 0)
        self.refusal: tuple[int, int, bytes] = (CONSUMER, 0, b"")
        if wire is not None:
            self._learn_addresses(wire.sock)

    def _learn_addresses(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer may be gone already
            self._local = as_address(sock.getsockname())
            self._remote = as_address(sock.getpeername())

    @property
    def local_address(self) -> Address:
        return self._local

    @property
    def remote_address(self) -> Address:
        return self._remote

    def attach(self, end: End, peer: QPInfo) -> None:
        """The passive side: messages are for ``end`` from now on."""
        assert self._wire is not None
        self._end = end
        self._set_peer(peer)
        self._wire.on_message = self._on_message
        self._wire.on_end = self._on_end

    def _set_peer(self, peer: QPInfo) -> None:
        assert self._end is not None
        self._peer = peer
        self._end.peer_offer = Offer(initiated=peer.max_dest_rd_atomic, served=peer.max_rd_atomic)

    async def device(self) -> Lease[Device]:
        return await lease(None)

    def check_device(self, device: Device) -> None:
        """TCP says nothing of the device."""

    # ---------------------------------------------------------------- steps

    async def step(self, action: Action, end: End) -> None:
        if action is Action.RESOLVE:
            await self._connect(end)
        elif action is Action.ROUTE:
            end.event(Event.ROUTED)
        elif action is Action.REQUEST:
            self._send(end, {"aiordma-cm": VERSION, "request": _qp_message(end)})
        elif action is Action.READY:
            assert end.qp is not None
            assert self._peer is not None
            try:
                await end.qp.connect(self._peer)
            except UsageError as e:
                raise ConnectError(f"{end.where}: the peer's QP can't be connected to: {e}") from e
        elif action is Action.CONFIRM:
            self._send(end, {"established": True})
        else:
            self._send(end, {"accept": _qp_message(end)})

    async def _connect(self, end: End) -> None:
        assert self._endpoint is not None
        self._end = end
        try:
            sock = socket.socket(self._endpoint.family, socket.SOCK_STREAM)
        except OSError as e:  # no IPv6 here
            raise UnreachableError(f"{end.where}: {e}") from e
        try:
            sock.setblocking(False)
            code = sock.connect_ex(self._endpoint.sockaddr)
            if code in (errno.EINPROGRESS, errno.EAGAIN):
                await anyio.wait_writable(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == errno.ECONNREFUSED:
                raise RejectedError(end.where, NOBODY, reason_text(NOBODY))
            if code:
                raise UnreachableError(f"{end.where}: {os.strerror(code)}")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._learn_addresses(sock)
            self._wire = Wire(self._backend, sock, self._on_message, self._on_end)
        except BaseException:
            sock.close()
            raise
        end.event(Event.RESOLVED)

    def _send(self, end: End, message: dict[str, Any]) -> None:
        assert self._wire is not None
        try:
            self._wire.send(message)
        except WireError as e:
            raise DisconnectedError(f"{end.where}: {e}") from e

    # ---------------------------------------------------------------- what the peer says

    def _on_message(self, message: dict[str, Any]) -> None:
        end = self._end
        assert end is not None
        try:
            if "reject" in message:
                said = message["reject"]
                data = padded(bytes.fromhex(said["private_data"]), REJECT_DATA)
                status, reason = _number(said["status"]), _number(said["reason"])
                end.event(Event.FAILED, RejectedError(end.where, status, reason_text(status), reason, data))
            elif "accept" in message and self._endpoint is not None and self._peer is None:
                peer, end.private_data = read_peer(message["accept"], REPLY_DATA)
                self._set_peer(peer)
                end.event(Event.RESPONSE)
            elif message.get("established") is True and self._endpoint is None:
                end.event(Event.ESTABLISHED)
            else:
                raise ValueError("neither an answer nor a confirmation")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            end.event(Event.FAILED, ConnectError(f"{end.where}: the peer's message can't be understood: {e}"))

    def _on_end(self, error: WireError | None) -> None:
        assert self._end is not None
        said = "the peer disconnected" if error is None else str(error)
        self._end.event(Event.DISCONNECTED, DisconnectedError(f"{self._end.where}: {said}"))

    # ---------------------------------------------------------------- control operations

    async def reject(self) -> None:
        if self._wire is not None:
            refuse(self._wire, *self.refusal)

    async def disconnect(self) -> None:
        if self._wire is not None:
            self._wire.end()

    async def destroy(self) -> None:
        if self._wire is not None:
            self._wire.close()

    def destroy_now(self) -> None:
        if self._wire is not None:
            self._wire.close_now()

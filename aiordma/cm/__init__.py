"""Connections by name or address: over rdma_cm, or over TCP where a system has none.

::

    async with aiordma.listen("0.0.0.0", 18515) as listener:                    # one side
        async for request in listener:
            async with request.accept(device) as connection:
                ...

    async with aiordma.connect("storage-1", 18515, device=device) as connection:    # the other
        await connection.rdma_write(local, remote)

Both sides must use the same of the two: None, the default of ``via``, is rdma_cm where the system has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio

from aiordma import _backends
from aiordma._cm import Id
from aiordma._offload import Control, Pending, in_thread, outcome
from aiordma._values import whole
from aiordma.cm._address import Address, Endpoint, Via, check_port, resolve, text
from aiordma.cm._channel import Channel, channel
from aiordma.cm._devices import given
from aiordma.cm._endpoint import REJECT_DATA, REPLY_DATA, REQUEST_DATA, End, Link, Plan, check_timeout
from aiordma.cm._opening import Opening
from aiordma.cm._rdmacm import RdmaLink
from aiordma.cm._rdmacm_source import RdmaSource, bind_ids
from aiordma.cm._reasons import CONSUMER, NOBODY
from aiordma.cm._shared import Lease
from aiordma.cm._tcp import TcpLink
from aiordma.cm._tcp_source import TcpSource, bind
from aiordma.cm.connection import Connection
from aiordma.cm.listener import Listener, Request
from aiordma.device import Device
from aiordma.errors import (
    ConnectError,
    ConnectTimeoutError,
    RejectedError,
    ResolutionError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from aiordma.qp import QPConfig, QueuePair
from aiordma.srq import SharedReceiveQueue

__all__ = [
    "Address",
    "Connection",
    "Listener",
    "Opening",
    "REJECT_DATA",
    "REPLY_DATA",
    "REQUEST_DATA",
    "Request",
    "Via",
    "connect",
    "listen",
]


def _check_via(via: object) -> None:
    if via not in (None, "rdma_cm", "tcp"):
        raise UsageError(f'via: "rdma_cm", "tcp" or None, not {via!r}')


async def _manager(via: Via | None) -> Lease[Channel] | None:
    """The loop's channel of the connection manager; None where it's to be TCP."""
    if via == "tcp":
        return None
    try:
        return await channel()
    except UnsupportedError:
        if via == "rdma_cm":
            raise
        return None


async def _leave(lease: Lease[Any] | None) -> None:
    closing = lease.release() if lease is not None else None
    if closing is not None:
        await _backends.current().shielded(closing)


def connect(
    host: str,
    port: int,
    *,
    device: Device | None = None,
    config: QPConfig | None = None,
    private_data: bytes | bytearray | memoryview = b"",
    prepare: Callable[[QueuePair], Any] | None = None,
    srq: SharedReceiveQueue | None = None,
    via: Via | None = None,
    timeout: float | None = 10.0,
    **options: Any,
) -> Opening[Connection]:
    """Connects to a listener: ``connection = await aiordma.connect("storage-1", 18515)``, or ``async with``.

    ``host``: a name or an IPv4 or IPv6 address; of a name with several addresses each is tried until something listens.
    ``device``: on which the QP is made; None for the one that leads to the address, which is opened for this, shared
    with the loop's other connections, and closed with the last of them. ``config``: a :class:`QPConfig`; ``options``
    are fields of it, and replace its. ``private_data``: for the peer to see in its request, up to 56 bytes.
    ``prepare``: called with the QP before the peer hears of the connection, and awaited if it is a coroutine: the
    place to post receives, so that no message of the peer finds none. ``srq``: take receives from it. ``via``: see
    :mod:`aiordma.cm`. ``timeout``: seconds for all of it, None for no limit.

    It completes when the QP is in RTS and the peer has been told. RDMA reads in flight are negotiated: no more than
    either side can or its config says. Whatever ends it early leaves nothing behind, a cancellation too.

    Raises :class:`ResolutionError`, :class:`RejectedError` (a ConnectionRefusedError) with the peer's reason and private
    data, :class:`UnreachableError`, :class:`ConnectTimeoutError`, :class:`UnsupportedError` where ``via="rdma_cm"`` and
    the system has none, :class:`UsageError`, and what making a QP or ``prepare`` raises.
    """
    plan = Plan.make("connect", config, options, private_data, REQUEST_DATA, prepare, srq)
    check_port(port, 1)
    _check_via(via)
    given(device)
    return Opening(_connect(host, port, device, plan, via, check_timeout(timeout)))


async def _connect(
    host: str,
    port: int,
    device: Device | None,
    plan: Plan,
    via: Via | None,
    timeout: float | None,
) -> Connection:
    where = text((host, port))
    deadline = math.inf if timeout is None else anyio.current_time() + timeout
    manager: Lease[Channel] | None = None
    try:
        try:
            with anyio.fail_after(timeout):
                endpoints = await resolve(host, port)
                manager = await _manager(via)
        except TimeoutError:
            raise ConnectTimeoutError(where, "resolving the name") from None
        problem: ConnectError | None = None
        for number, endpoint in enumerate(endpoints):
            end = _end(manager, endpoint, plan, where)
            end.lease = given(device)
            left = len(endpoints) - number
            try:
                # An address that doesn't answer leaves time for the others.
                await end.open(None if timeout is None else max(0.0, deadline - anyio.current_time()) / left)
            except (ResolutionError, UnreachableError) as e:
                problem = e
            except ConnectTimeoutError as e:
                if left == 1:
                    raise
                problem = e
            except RejectedError as e:
                if not _nobody(e):
                    raise
                problem = e
            else:
                return Connection(end)
        assert problem is not None
        raise problem
    finally:
        await _leave(manager)


def _nobody(error: RejectedError) -> bool:
    """Whether it may be for want of a listener at this address that it was rejected.

    For a port that is listened on at another address only, Linux' CM rejects as a program would that says nothing.
    """
    return error.status == NOBODY or (error.status == CONSUMER and not error.reason and not any(error.private_data))


def _end(manager: Lease[Channel] | None, endpoint: Endpoint, plan: Plan, where: str) -> End:
    backend = _backends.current()
    tried = text(endpoint.sockaddr)
    link: Link
    if manager is None:
        link = TcpLink(backend, endpoint)
    else:
        link = RdmaLink(Control(backend), manager.another(), endpoint)
    return End(link, plan, active=True, where=where if tried == where else f"{where} ({tried})")


def listen(
    host: str | None = None,
    port: int = 0,
    *,
    device: Device | None = None,
    config: QPConfig | None = None,
    backlog: int = 128,
    via: Via | None = None,
) -> Opening[Listener]:
    """Listens for connections: ``async with aiordma.listen("0.0.0.0", 18515) as listener``, or ``await``.

    ``host``: a name or an address of this machine, None for all addresses, IPv4 and IPv6. ``port``: 0 for any free one,
    which is then :attr:`Listener.port`. ``device``, ``config``: what :meth:`Request.accept` takes by default.
    ``backlog``: requests that may wait to be taken. ``via``: see :mod:`aiordma.cm`.

    Raises :class:`ResolutionError`, :class:`OSError` with EADDRINUSE or EADDRNOTAVAIL, :class:`UnsupportedError`.
    """
    check_port(port, 0)
    _check_via(via)
    given(device)
    if config is not None and not isinstance(config, QPConfig):
        raise UsageError(f"listen: config is a QPConfig, not {type(config).__name__}")
    backlog = whole(backlog)
    if not isinstance(backlog, int) or isinstance(backlog, bool) or not 1 <= backlog <= 65535:
        raise UsageError(f"backlog: a number from 1 to 65535, not {backlog!r}")
    return Opening(_listen(host, port, device, config, backlog, via))


async def _listen(
    host: str | None,
    port: int,
    device: Device | None,
    config: QPConfig | None,
    backlog: int,
    via: Via | None,
) -> Listener:
    endpoints = await resolve(host, port, passive=True)
    manager = await _manager(via)
    listener = Listener(device, config, backlog)
    if manager is None:
        listener.begin(TcpSource(_backends.current(), bind(endpoints, host is None, backlog), listener))
        return listener
    control = Control(_backends.current())
    try:
        ids = await _bound(control, manager.thing, endpoints, host is None)
    except BaseException:
        await _leave(manager)
        raise
    source = RdmaSource(control, manager, ids, listener)
    listener.begin(source)
    try:
        await source.listen()
    except BaseException:
        await listener.aclose()
        raise
    return listener


async def _bound(control: Control, manager: Channel, endpoints: list[Endpoint], wildcard: bool) -> list[Id]:
    """Ids that are bound; where this is cancelled they are destroyed before it ends."""
    binding = Pending(control, in_thread(control, bind_ids, manager.native, endpoints, wildcard))
    try:
        return await binding
    except BaseException:
        await control.backend.shielded(Pending(control, _unbind(control, binding)))
        raise


async def _unbind(control: Control, binding: Pending[list[Id]]) -> None:
    try:
        ids = await outcome(binding)
    except Exception:
        return
    for made in ids:
        await in_thread(control, made.destroy)

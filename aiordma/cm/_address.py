"""Names, addresses, and what of them stands in a ``struct sockaddr``."""

from __future__ import annotations

import socket
from typing import Any, Literal, NamedTuple

import anyio

from aiordma._values import whole
from aiordma.errors import ResolutionError, UsageError

__all__ = ["Address", "Endpoint", "Via", "as_address", "check_port", "resolve", "text"]

#: How a connection is made.
Via = Literal["rdma_cm", "tcp"]


class Address(NamedTuple):
    """An IP address and a port."""

    host: str
    port: int


class Endpoint(NamedTuple):
    """What socket.getaddrinfo() gives: the address family, and the address as the socket module has it."""

    family: int
    sockaddr: tuple[Any, ...]


def as_address(sockaddr: tuple[Any, ...]) -> Address:
    """The socket module's address of either family; an IPv4 address that is mapped into IPv6 is shown as IPv4."""
    host = str(sockaddr[0])
    if host.lower().startswith("::ffff:") and "." in host:
        host = host.rpartition(":")[2]
    if len(sockaddr) == 4 and sockaddr[3] and "%" not in host:
        try:
            host = f"{host}%{socket.if_indextoname(sockaddr[3])}"
        except OSError:  # the interface is gone
            host = f"{host}%{sockaddr[3]}"
    return Address(host, int(sockaddr[1]))


def text(address: tuple[Any, ...]) -> str:
    """``host:port``, with IPv6 addresses in brackets."""
    host = str(address[0])
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def check_port(port: object, low: int) -> int:
    """``port`` if it's a port number from ``low``; :class:`UsageError` if not."""
    port = whole(port)
    if not isinstance(port, int) or isinstance(port, bool) or not low <= port <= 65535:
        raise UsageError(f"port: a number from {low} to 65535, not {port!r}")
    return port


def _sockaddr(family: int, found: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the socket module has; anyio gives the scope of an IPv6 address as part of its text."""
    if family != socket.AF_INET6:
        return found
    host, _, scope = str(found[0]).partition("%")
    number = found[3] if len(found) > 3 else 0
    if scope:
        number = int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
    return host, found[1], found[2] if len(found) > 2 else 0, number


async def resolve(host: str | None, port: int, *, passive: bool = False) -> list[Endpoint]:
    """The addresses of ``host``, in the order to try them, off the loop.

    ``passive``: to listen on; ``host`` None is then every address of this machine. :class:`ResolutionError` for a name that
    nobody knows.
    """
    if not (host is None and passive) and (not isinstance(host, str) or not host or "\0" in host):
        raise UsageError(f"host: a name or an address, not {host!r}")
    if host is None:
        # An IPv6 socket takes IPv4 too; where there is no IPv6, IPv4 alone.
        return [Endpoint(socket.AF_INET6, ("::", port, 0, 0)), Endpoint(socket.AF_INET, ("0.0.0.0", port))]
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        endpoints = _endpoints(found)
    except (OSError, UnicodeError) as e:
        raise ResolutionError(f"{host!r} can't be resolved: {e}") from e
    if not endpoints:
        raise ResolutionError(f"{host!r} has no IP address")
    return endpoints


def _endpoints(found: list[Any]) -> list[Endpoint]:
    endpoints = dict.fromkeys(
        Endpoint(int(family), _sockaddr(family, tuple(sockaddr)))
        for family, _, _, _, sockaddr in found
        if family in (socket.AF_INET, socket.AF_INET6)
    )
    return list(endpoints)

"""GIDs: the addresses of ports, and which one to use.

A RoCE port has a table of them: for each address of its network interface one entry of type RoCE v1 and one of RoCE v2.
Using the wrong one is a classic: RoCE v1 isn't routed, link-local addresses work on one link only, and two peers must
use the same type. :func:`choose` prefers what is routable; :func:`match` picks the local entry that fits a peer's.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from aiordma.errors import GidError

__all__ = ["Gid", "GidType", "choose", "match", "table"]


class GidType(enum.IntEnum):
    """enum ibv_gid_type (ibv_query_gid_ex(3))."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


_NAMES = {GidType.IB: "IB", GidType.ROCE_V1: "RoCE v1", GidType.ROCE_V2: "RoCE v2"}


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table: ``index`` in the table, ``raw`` its 16 bytes, and its type."""

    index: int
    raw: bytes
    type: GidType

    @property
    def address(self) -> ipaddress.IPv6Address:
        """The GID as an IPv6 address, which it is in RoCE v2."""
        return ipaddress.IPv6Address(self.raw)

    @property
    def is_ipv4(self) -> bool:
        """Whether it's an IPv4-mapped address."""
        return self.address.ipv4_mapped is not None

    @property
    def is_link_local(self) -> bool:
        """Whether it works on one link only."""
        mapped = self.address.ipv4_mapped
        return mapped.is_link_local if mapped is not None else self.address.is_link_local

    @property
    def is_null(self) -> bool:
        """Whether the entry is empty."""
        return not any(self.raw)

    def __str__(self) -> str:
        mapped = self.address.ipv4_mapped
        return f"{mapped if mapped is not None else self.address} ({_NAMES[self.type]}, index {self.index})"


def table(gids: Sequence[Gid]) -> str:
    """The table as text, one line an entry, for error messages."""
    if not gids:
        return "  (the port's GID table is empty)"
    return "\n".join(f"  {gid.index}: {gid}" for gid in gids)


def _rank(gid: Gid) -> tuple[int, int, int]:
    """Smaller is better: routable RoCE v2 (IPv4-mapped before IPv6), IB, link-local RoCE v2, RoCE v1."""
    if gid.type is GidType.ROCE_V2:
        family = 0 if gid.is_ipv4 else 1
        return (2 if gid.is_link_local else 0), family, gid.index
    if gid.type is GidType.IB:
        return 1, 0, gid.index
    return 3, 0, gid.index


def choose(gids: Sequence[Gid], index: int | None = None) -> Gid:
    """The entry to use: ``index`` if it's given, else the best by type and scope.

    :class:`GidError` with the whole table when there is none, or none at ``index``.
    """
    usable = [gid for gid in gids if not gid.is_null]
    if index is not None:
        for gid in usable:
            if gid.index == index:
                return gid
        raise GidError(f"no GID at index {index}. The port has:\n{table(usable)}")
    if not usable:
        raise GidError("the port has no GID: does its network interface have an address, and is it up?")
    return min(usable, key=_rank)


def match(gids: Sequence[Gid], preferred: Gid, peer: bytes, peer_type: GidType) -> Gid:
    """The local entry for a connection to ``peer``: of the peer's type and family, ``preferred`` if that fits.

    :class:`GidError` with the table when no entry fits: the packets would never arrive.
    """
    other = Gid(0, peer, peer_type)

    def fits(gid: Gid) -> bool:
        return (
            not gid.is_null
            and gid.type == peer_type
            and gid.is_ipv4 == other.is_ipv4
            and gid.is_link_local == other.is_link_local
        )

    if fits(preferred):
        return preferred
    for gid in sorted(gids, key=_rank):
        if fits(gid):
            return gid
    name = _NAMES[peer_type]
    raise GidError(
        f"the peer uses {other.address.ipv4_mapped or other.address} ({name}), and this port has no GID of that type and "
        f"family to reach it from. It has:\n{table([gid for gid in gids if not gid.is_null])}"
    )

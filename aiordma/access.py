"""Access flags of memory regions and QPs."""

from __future__ import annotations

import enum

from aiordma._values import whole
from aiordma.errors import AccessFlagsError

__all__ = ["Access", "check_access"]


class Access(enum.IntFlag):
    """enum ibv_access_flags (ibv_reg_mr(3)).

    Local read is always allowed. ``REMOTE_WRITE`` and ``REMOTE_ATOMIC`` need ``LOCAL_WRITE``.
    """

    NONE = 0
    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    ON_DEMAND = 1 << 6
    HUGETLB = 1 << 7
    RELAXED_ORDERING = 1 << 20

    REMOTE = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC
    """Everything that a peer may do."""

    ALL = LOCAL_WRITE | REMOTE
    """The default of :meth:`Device.reg_mr`."""


_KNOWN = Access(0)
for _flag in Access:
    _KNOWN |= _flag


def check_access(access: int) -> Access:
    """``access`` as :class:`Access`; :class:`AccessFlagsError` for what ibv_reg_mr(3) refuses with a bare EINVAL."""
    flags = known_access(access)
    if flags & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not flags & Access.LOCAL_WRITE:
        raise AccessFlagsError(f"{flags!r}: REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE too (ibv_reg_mr(3))")
    if flags & Access.ZERO_BASED:
        raise AccessFlagsError("ZERO_BASED regions aren't supported: addresses in work requests are virtual addresses")
    return flags


def known_access(access: int) -> Access:
    """``access`` as :class:`Access`, whatever the combination; :class:`AccessFlagsError` where it isn't flags at all."""
    access = whole(access)
    if not isinstance(access, int):
        raise AccessFlagsError(f"access is flags of aiordma.Access, not {access!r}")
    if access & ~int(_KNOWN):
        raise AccessFlagsError(f"unknown access flags {access & ~int(_KNOWN):#x}; see aiordma.Access")
    return Access(access)

"""What a connection and a request tell of their two ends."""

from __future__ import annotations

from aiordma.cm._address import Address, Via
from aiordma.cm._endpoint import End

__all__ = ["HasEnds"]


class HasEnds:
    """Base of what stands for one end of a connection, open or not yet."""

    _end: End

    @property
    def via(self) -> Via:
        """How it was made."""
        return self._end.link.via

    @property
    def local_address(self) -> Address:
        """This side's ``(host, port)``; of a request as the peer named it."""
        return self._end.link.local_address

    @property
    def remote_address(self) -> Address:
        """The peer's ``(host, port)``."""
        return self._end.link.remote_address

    @property
    def private_data(self) -> bytes:
        """What the peer gave along: 196 bytes of its acceptance, or 56 of its request; zero bytes behind what it gave."""
        return self._end.private_data

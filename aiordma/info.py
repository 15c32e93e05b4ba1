"""What two QPs must know of each other before they can connect."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aiordma._values import whole_fields
from aiordma.errors import UsageError
from aiordma.gid import GidType

__all__ = ["QPInfo"]

_MAGIC = b"aiQP"
_VERSION = 1
_WIRE = struct.Struct("!4sBBBBIIHBB16s4x")
_TYPES = ("RC", "UC")
_LIMITS = {
    "qp_num": 1 << 24,
    "psn": 1 << 24,
    "lid": 1 << 16,
    "mtu": 4097,
    "max_rd_atomic": 256,
    "max_dest_rd_atomic": 256,
}
_MTUS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class QPInfo:
    """One side of a connection, for the other to pass to :meth:`QueuePair.connect`.

    ``qp_num`` and ``psn`` (the first packet sequence number it sends): 24 bits. ``gid``: 16 bytes, with its type; ``lid``
    on InfiniBand. ``mtu``: the port's active path MTU in bytes; the two sides use the smaller. ``max_rd_atomic``: RDMA
    reads and atomics that it wants in flight as initiator, ``max_dest_rd_atomic``: those it serves as responder; each
    direction uses the smaller of the two ends' numbers.
    """

    qp_type: str
    qp_num: int
    psn: int
    gid: bytes
    gid_type: GidType
    lid: int
    mtu: int
    max_rd_atomic: int
    max_dest_rd_atomic: int

    def __post_init__(self) -> None:
        whole_fields(self)
        if self.qp_type not in _TYPES:
            raise UsageError(f"QPInfo: qp_type is one of {', '.join(_TYPES)}, not {self.qp_type!r}")
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
                raise UsageError(f"QPInfo: {name} is a number below {limit}, not {value!r}")
        if self.mtu not in _MTUS:
            raise UsageError(f"QPInfo: mtu is one of {', '.join(map(str, _MTUS))} bytes, not {self.mtu}")
        if not isinstance(self.gid, bytes | bytearray) or len(self.gid) != 16:
            raise UsageError(f"QPInfo: gid is 16 bytes, not {self.gid!r}")
        object.__setattr__(self, "gid", bytes(self.gid))
        try:
            object.__setattr__(self, "gid_type", GidType(self.gid_type))
        except ValueError:
            raise UsageError(f"QPInfo: gid_type is a GidType, not {self.gid_type!r}") from None

    def to_bytes(self) -> bytes:
        """40 bytes in network byte order, for :meth:`from_bytes`."""
        return _WIRE.pack(
            _MAGIC,
            _VERSION,
            _TYPES.index(self.qp_type),
            int(self.gid_type),
            0,
            self.qp_num,
            self.psn,
            self.mtu,
            self.max_rd_atomic,
            self.max_dest_rd_atomic,
            self.gid,
        )[:-4] + struct.pack("!HH", self.lid, 0)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> QPInfo:
        """The inverse of :meth:`to_bytes`; :class:`UsageError` for anything else."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UsageError(f"a QPInfo is made from {_WIRE.size} bytes, not from {type(data).__name__}")
        data = bytes(data)
        if len(data) != _WIRE.size:
            raise UsageError(f"a QPInfo is {_WIRE.size} bytes, not {len(data)}")
        magic, version, qp_type, gid_type, reserved, qp_num, psn, mtu, initiator, responder, gid = _WIRE.unpack(data)
        if magic != _MAGIC or version != _VERSION:
            raise UsageError(f"not a QPInfo of version {_VERSION}: starts with {data[:5]!r}")
        lid, more_reserved = struct.unpack_from("!HH", data, _WIRE.size - 4)
        if reserved or more_reserved:
            raise UsageError("not a QPInfo: reserved bytes aren't zero")
        try:
            return cls(_TYPES[qp_type], qp_num, psn, gid, GidType(gid_type), lid, mtu, initiator, responder)
        except (IndexError, ValueError) as e:
            raise UsageError(f"not a QPInfo: {e}") from e

    def to_json(self) -> str:
        """A JSON object, for :meth:`from_json`."""
        return json.dumps({**asdict(self), "gid": self.gid.hex(), "gid_type": int(self.gid_type)})

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any]) -> QPInfo:
        """From JSON text or from a dict that was decoded from it; :class:`UsageError` names what is wrong."""
        try:
            fields: Mapping[str, Any] = json.loads(data) if isinstance(data, str | bytes) else data
            values = {name: fields[name] for name in cls.__slots__}
            values["gid"] = bytes.fromhex(values["gid"])
            values["gid_type"] = GidType(values["gid_type"])
            return cls(**values)
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise UsageError(f"not a QPInfo: {type(e).__name__}: {e}") from e

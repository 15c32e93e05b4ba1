"""Raw WQEs: work requests written segment by segment, as the device reads them.

A WQE is a control segment and then others, each a multiple of 16 bytes; its ``ds`` field counts them in units of 16
bytes. All numbers are big-endian. The layouts: struct mlx5_wqe_* of infiniband/mlx5dv.h.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field

from aiordma._memory import MemorySlice, RemoteBuffer
from aiordma.errors import UsageError

__all__ = [
    "AtomicSegment",
    "CtrlFlags",
    "DataSegment",
    "InlineSegment",
    "MaskedAtomicSegment",
    "Opcode",
    "RaddrSegment",
    "RawSegment",
    "UmrCtrlSegment",
    "Wqe",
]

MAX_DS = 63  # six bits


class Opcode(enum.IntEnum):
    """Opcodes of the control segment (enum mlx5dv's MLX5_OPCODE_*, mlx5dv.h)."""

    NOP = 0x00
    SEND_INVAL = 0x01
    RDMA_WRITE = 0x08
    RDMA_WRITE_IMM = 0x09
    SEND = 0x0A
    SEND_IMM = 0x0B
    TSO = 0x0E
    RDMA_READ = 0x10
    ATOMIC_CS = 0x11
    ATOMIC_FA = 0x12
    ATOMIC_MASKED_CS = 0x14
    ATOMIC_MASKED_FA = 0x15
    LOCAL_INVAL = 0x1B
    UMR = 0x25
    MMO = 0x2F


class CtrlFlags(enum.IntFlag):
    """The control segment's fm_ce_se byte (mlx5dv.h, MLX5_WQE_CTRL_*)."""

    NONE = 0
    SOLICITED = 1 << 1
    CQ_UPDATE = 2 << 2
    """A completion when it's done. Without it, only when it fails."""
    INITIATOR_SMALL_FENCE = 1 << 5
    FENCE = 4 << 5


@dataclass(frozen=True, slots=True)
class RaddrSegment:
    """Where a write, read or atomic goes: 16 bytes (struct mlx5_wqe_raddr_seg)."""

    raddr: int
    rkey: int

    @classmethod
    def of(cls, remote: RemoteBuffer) -> RaddrSegment:
        """The start of a RemoteBuffer."""
        return cls(remote.addr, remote.rkey)

    def to_bytes(self) -> bytes:
        """The segment as the device reads it."""
        _range("raddr", self.raddr, 64)
        _range("rkey", self.rkey, 32)
        return struct.pack("!QII", self.raddr, self.rkey, 0)


@dataclass(frozen=True, slots=True)
class DataSegment:
    """One local buffer: 16 bytes (struct mlx5_wqe_data_seg). ``byte_count`` has 31 bits."""

    byte_count: int
    lkey: int
    addr: int
    source: MemorySlice | None = None

    @classmethod
    def of(cls, local: MemorySlice) -> DataSegment:
        """A slice of registered memory, which is kept until the WQE has completed."""
        return cls(local.length, local.lkey, local.addr, local)

    def to_bytes(self) -> bytes:
        """The segment as the device reads it."""
        _range("byte_count", self.byte_count, 31)
        _range("lkey", self.lkey, 32)
        _range("addr", self.addr, 64)
        return struct.pack("!IIQ", self.byte_count, self.lkey, self.addr)


@dataclass(frozen=True, slots=True)
class InlineSegment:
    """Data in the WQE itself, padded to 16 bytes (struct mlx5_wqe_inl_data_seg)."""

    data: bytes

    def to_bytes(self) -> bytes:
        """The segment as the device reads it."""
        if not 0 < len(self.data) <= MAX_DS * 16:
            raise UsageError(f"inline data of {len(self.data)} bytes: 1 to what a WQE holds")
        body = struct.pack("!I", 1 << 31 | len(self.data)) + self.data
        return body + bytes(-len(body) % 16)


@dataclass(frozen=True, slots=True)
class AtomicSegment:
    """Operands of an atomic: 16 bytes (struct mlx5_wqe_atomic_seg)."""

    swap_add: int
    compare: int = 0

    def to_bytes(self) -> bytes:
        """The segment as the device reads it."""
        _range("swap_add", self.swap_add, 64)
        _range("compare", self.compare, 64)
        return struct.pack("!QQ", self.swap_add, self.compare)


@dataclass(frozen=True, slots=True)
class MaskedAtomicSegment:
    """Operands of a masked compare and swap of 64 bits: 32 bytes."""

    swap: int
    compare: int
    swap_mask: int
    compare_mask: int

    def to_bytes(self) -> bytes:
        """The segment as the device reads it."""
        for name in ("swap", "compare", "swap_mask", "compare_mask"):
            _range(name, getattr(self, name), 64)
        return struct.pack("!QQQQ", self.swap, self.compare, self.swap_mask, self.compare_mask)


@dataclass(frozen=True, slots=True)
class UmrCtrlSegment:
    """Control of a UMR: 48 bytes (struct mlx5_wqe_umr_ctrl_seg). Octowords are of 16 bytes."""

    flags: int
    klm_octowords: int
    mkey_mask: int
    translation_offset: int = 0

    def to_bytes(self) -> bytes:
        """The segment as the device reads it."""
        _range("flags", self.flags, 8)
        _range("klm_octowords", self.klm_octowords, 16)
        _range("translation_offset", self.translation_offset, 16)
        _range("mkey_mask", self.mkey_mask, 64)
        head = struct.pack("!B3xHHQ", self.flags, self.klm_octowords, self.translation_offset, self.mkey_mask)
        return head + bytes(48 - len(head))


@dataclass(frozen=True, slots=True)
class RawSegment:
    """Any other segment, given as its bytes: a multiple of 16."""

    data: bytes

    def to_bytes(self) -> bytes:
        """The segment as the device reads it."""
        if not self.data or len(self.data) % 16:
            raise UsageError(f"a segment of {len(self.data)} bytes: a multiple of 16")
        return self.data


Segment = RaddrSegment | DataSegment | InlineSegment | AtomicSegment | MaskedAtomicSegment | UmrCtrlSegment | RawSegment


@dataclass(frozen=True, slots=True)
class Wqe:
    """A WQE: control segment fields, then segments in order.

    ``opmod``: the opcode's modifier, 8 bits. ``imm``: the control segment's last word (immediate data, an rkey, an mkey),
    as a number of this host. :meth:`Mlx5QueuePair.post_raw_wqe` puts its QP number in.
    """

    opcode: Opcode | int
    segments: tuple[Segment, ...] = ()
    flags: CtrlFlags = CtrlFlags.CQ_UPDATE
    opmod: int = 0
    imm: int = 0
    extra_slices: tuple[MemorySlice, ...] = field(default=())

    @property
    def slices(self) -> tuple[MemorySlice, ...]:
        """The registered memory that it names."""
        named = (s.source for s in self.segments if isinstance(s, DataSegment))
        return (*(source for source in named if source is not None), *self.extra_slices)

    @property
    def ds(self) -> int:
        """Its size in units of 16 bytes; :class:`UsageError` beyond what the field holds."""
        return len(self._body()) // 16 + 1

    def _body(self) -> bytes:
        body = b"".join(segment.to_bytes() for segment in self.segments)
        if len(body) // 16 + 1 > MAX_DS:
            raise UsageError(f"a WQE of {len(body) // 16 + 1} units of 16 bytes: at most {MAX_DS}")
        return body

    def to_bytes(self, qp_num: int = 0) -> bytes:
        """The WQE for the QP ``qp_num``, whose number the device checks."""
        _range("opcode", self.opcode, 8)
        _range("opmod", self.opmod, 8)
        _range("imm", self.imm, 32)
        _range("qp_num", qp_num, 24)
        body = self._body()
        ds = len(body) // 16 + 1
        ctrl = struct.pack(
            "!IIBBBBI", self.opmod << 24 | self.opcode, qp_num << 8 | ds, 0, 0, 0, int(self.flags), self.imm
        )
        return ctrl + body


def _range(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise UsageError(f"{name}: an unsigned number of {bits} bits, not {value!r}")

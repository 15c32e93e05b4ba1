"""Raw WQEs: segments as the device reads them (struct mlx5_wqe_* of infiniband/mlx5dv.h), and what can't be written."""

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import RemoteBuffer, UsageError
from aiordma.mlx5 import Wqe
from aiordma.mlx5.raw_wqe import (
    AtomicSegment,
    CtrlFlags,
    DataSegment,
    InlineSegment,
    MaskedAtomicSegment,
    Opcode,
    RaddrSegment,
    RawSegment,
    Segment,
    UmrCtrlSegment,
)


def test_the_control_segment() -> None:
    wqe = Wqe(Opcode.RDMA_WRITE_IMM, (RawSegment(bytes(32)),), CtrlFlags.CQ_UPDATE | CtrlFlags.FENCE, 0x5A, 0x12345678)
    data = wqe.to_bytes(0xABCDEF)
    # opmod_idx_opcode, qpn_ds, signature, dci_stream_channel_id (16 bits), fm_ce_se, imm
    assert data[:16] == bytes.fromhex("5a000009 abcdef03 00000088 12345678")
    assert wqe.ds == len(data) // 16 == 3


def test_segments() -> None:
    assert RaddrSegment(0x0102030405060708, 0x0A0B0C0D).to_bytes().hex() == "01020304050607080a0b0c0d00000000"
    assert RaddrSegment.of(RemoteBuffer(0x1000, 64, 7)[16:32]) == RaddrSegment(0x1010, 7)
    assert (
        DataSegment(0x7FFFFFFF, 0x11223344, 0x5566778899AABBCC).to_bytes().hex() == "7fffffff112233445566778899aabbcc"
    )
    assert AtomicSegment(1, 2).to_bytes() == struct.pack(">QQ", 1, 2)
    assert MaskedAtomicSegment(1, 2, 3, 4).to_bytes() == struct.pack(">QQQQ", 1, 2, 3, 4)
    umr = UmrCtrlSegment(0x80, 4, 1 << 40 | 3, 7).to_bytes()
    assert umr == bytes.fromhex("80000000 0004 0007 0000010000000003") + bytes(32)
    assert RawSegment(b"x" * 16).to_bytes() == b"x" * 16


@given(st.binary(min_size=1, max_size=900))
def test_inline_data_is_padded_to_16_bytes(data: bytes) -> None:
    segment = InlineSegment(data).to_bytes()
    assert len(segment) % 16 == 0
    assert struct.unpack(">I", segment[:4])[0] == 1 << 31 | len(data)
    assert segment[4 : 4 + len(data)] == data
    assert not any(segment[4 + len(data) :])
    assert len(segment) - len(data) < 20


@given(
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 255),
    st.lists(st.integers(1, 8), max_size=7),
)
def test_fields_stay_where_they_belong(
    opcode: int, opmod: int, imm: int, qpn: int, flags: int, sizes: list[int]
) -> None:
    segments: tuple[Segment, ...] = tuple(RawSegment(bytes([n]) * 16 * n) for n in sizes)
    data = Wqe(opcode, segments, CtrlFlags(flags), opmod, imm).to_bytes(qpn)
    first, second, _, _, fm_ce_se, word = struct.unpack(">IIBHBI", data[:16])
    assert first == opmod << 24 | opcode  # the driver puts the WQE's index between them
    assert second == qpn << 8 | len(data) // 16
    assert (fm_ce_se, word) == (flags, imm)
    assert data[16:] == b"".join(bytes([n]) * 16 * n for n in sizes)


def test_a_wqe_has_at_most_63_units() -> None:
    assert Wqe(Opcode.NOP, (RawSegment(bytes(62 * 16)),)).ds == 63
    too_long = Wqe(Opcode.NOP, (RawSegment(bytes(63 * 16)),))
    with pytest.raises(UsageError, match="64 units of 16 bytes: at most 63"):
        too_long.ds  # noqa: B018
    with pytest.raises(UsageError, match="at most 63"):
        too_long.to_bytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RaddrSegment(1 << 64, 0),
        lambda: RaddrSegment(-1, 0),
        lambda: RaddrSegment(0, 1 << 32),
        lambda: DataSegment(1 << 31, 0, 0),
        lambda: DataSegment(0, 0, 1 << 64),
        lambda: InlineSegment(b""),
        lambda: InlineSegment(bytes(1009)),
        lambda: AtomicSegment(1 << 64),
        lambda: AtomicSegment(0, -1),
        lambda: MaskedAtomicSegment(0, 0, 0, 1 << 64),
        lambda: UmrCtrlSegment(256, 0, 0),
        lambda: UmrCtrlSegment(0, 1 << 16, 0),
        lambda: UmrCtrlSegment(0, 0, 1 << 64),
        lambda: RawSegment(b""),
        lambda: RawSegment(b"x" * 17),
    ],
)
def test_what_no_segment_can_hold(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        make().to_bytes()


@pytest.mark.parametrize(
    "fields", [{"opcode": 256}, {"opcode": -1}, {"opmod": 256}, {"imm": 1 << 32}, {"imm": -1}, {"qp_num": 1 << 24}]
)
def test_what_no_control_segment_can_hold(fields: dict[str, int]) -> None:
    qp_num = fields.pop("qp_num", 0)
    with pytest.raises(UsageError, match="unsigned number"):
        Wqe(**{"opcode": 0, **fields}).to_bytes(qp_num)  # type: ignore[arg-type]

"""WQEs written by hand: mlx5dv_wr_raw_wqe() in mlx5dv_wr_post(3)."""

import struct
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from emulated.core import connect, settle
from emulated.mlx5 import WC_DRIVER2, Mlx5Pair, opened, pair

from aiordma import (
    BufferAccessError,
    ClosedError,
    LocalProtectionError,
    LocalQpOperationError,
    RemoteAccessError,
    UnsupportedError,
    UsageError,
    WrFlushError,
    mlx5,
)
from aiordma.emulator import faults
from aiordma.mlx5 import Wqe
from aiordma.mlx5.raw_wqe import (
    AtomicSegment,
    CtrlFlags,
    DataSegment,
    InlineSegment,
    Opcode,
    RaddrSegment,
    RawSegment,
    UmrCtrlSegment,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

SOON = 20


def write(p: Mlx5Pair, at: int, length: int, **fields: Any) -> Wqe:
    """Writes ``length`` bytes of the left at ``at`` to the same place on the right."""
    segments = (RaddrSegment.of(p.remote[at:]), DataSegment.of(p.local[at : at + length]))
    return Wqe(Opcode.RDMA_WRITE, segments, **fields)


# ------------------------------------------------------------------ what it does


async def test_whatever_the_opcode_the_completion_says_driver2() -> None:
    """F57 (rdma-core pull request 1116): so completions are told apart by wr_id alone."""
    async with pair(raw_wqe=True) as p:
        counter = p.local[0:8]
        p.left[0:8] = 0
        p.right[64:72] = np.frombuffer(struct.pack("=Q", 41), np.uint8)
        receives = [p.b.recv(p.peer[512:600]) for _ in range(3)]
        there = RaddrSegment.of(p.remote[64:72])
        requests = {
            "nop": Wqe(Opcode.NOP),
            "write": write(p, 100, 50),
            "write_imm": Wqe(
                Opcode.RDMA_WRITE_IMM, (RaddrSegment.of(p.remote[200:]), DataSegment.of(p.local[200:210])), imm=0xABC
            ),
            "read": Wqe(Opcode.RDMA_READ, (RaddrSegment.of(p.remote[100:]), DataSegment.of(p.local[1000:1050]))),
            "fetch_add": Wqe(Opcode.ATOMIC_FA, (there, AtomicSegment(1), DataSegment.of(counter))),
            "send": Wqe(Opcode.SEND, (DataSegment.of(p.local[300:305]), DataSegment.of(p.local[310:315]))),
            "send_imm_inline": Wqe(Opcode.SEND_IMM, (InlineSegment(b"hello"),), imm=7),
        }
        for name, wqe in requests.items():
            done = await p.a.post_raw_wqe(wqe)
            assert (done.status, done.opcode, done.request) == (0, WC_DRIVER2, "RAW_WQE"), name
        assert (p.right[100:150] == p.left[100:150]).all()
        assert (p.right[200:210] == p.left[200:210]).all()
        assert (p.left[1000:1050] == p.left[100:150]).all()
        assert struct.unpack("=Q", p.left[0:8].tobytes()) == (41,)
        assert struct.unpack("=Q", p.right[64:72].tobytes()) == (42,)
        first, second, third = [await receive for receive in receives]
        assert first.imm_data == 0xABC
        assert second.byte_len == 10
        assert (third.byte_len, third.imm_data) == (5, 7)
        assert p.right[512:517].tobytes() == b"hello"


async def test_compare_and_swap_by_hand() -> None:
    async with pair(raw_wqe=True) as p:
        p.right[0:8] = np.frombuffer(struct.pack("=Q", 5), np.uint8)
        for compare, swap, expected in ((5, 9, 9), (5, 1, 9)):
            there = RaddrSegment.of(p.remote[0:8])
            wqe = Wqe(Opcode.ATOMIC_CS, (there, AtomicSegment(swap, compare), DataSegment.of(p.local[8:16])))
            await p.a.post_raw_wqe(wqe)
            assert struct.unpack("=Q", p.right[0:8].tobytes()) == (expected,)


async def test_a_umr_by_hand_is_what_libmlx5_builds() -> None:
    async with pair(raw_wqe=True, max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        inline = 1 << 7
        # MLX5_WQE_UMR_CTRL_MKEY_MASK_*: LEN, the access rights, FREE
        mask = 1 << 0 | 1 << 18 | 1 << 19 | 1 << 20 | 1 << 29
        context = bytearray(64)  # struct mlx5_wqe_mkey_context_seg
        context[2] = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5  # local read and write, remote read and write
        context[4:8] = (0xFFFFFF00 | (mkey.lkey & 0xFF)).to_bytes(4, "big")
        context[24:32] = (30).to_bytes(8, "big")
        entries = (DataSegment.of(p.local[100:110]), DataSegment.of(p.local[0:20]))
        segments = (UmrCtrlSegment(inline, 4, mask), RawSegment(bytes(context)), *entries, RawSegment(bytes(32)))
        done = await p.a.post_raw_wqe(Wqe(Opcode.UMR, segments, imm=mkey.lkey))
        assert done.opcode == WC_DRIVER2
        there = RaddrSegment.of(p.remote)
        await p.a.post_raw_wqe(Wqe(Opcode.RDMA_WRITE, (there, DataSegment(30, mkey.lkey, 0))))
        assert p.right[:30].tobytes() == p.left[100:110].tobytes() + p.left[0:20].tobytes()


async def test_bytes_are_posted_as_they_are() -> None:
    async with pair(raw_wqe=True) as p:
        data = write(p, 0, 10).to_bytes(p.a.qp_num)
        memory = np.frombuffer(data + b"more than the ds field says", np.uint8)
        for wqe in (data, bytearray(data), memoryview(data), memory):
            p.right[:10] = 0
            await p.a.post_raw_wqe(wqe, keep=[p.local])
            assert (p.right[:10] == p.left[:10]).all()


@pytest.mark.parametrize("ds", [1, 2, 4, 5, 33, 62, 63])
async def test_any_length_wraps_round_the_queue(ds: int) -> None:
    async with pair(raw_wqe=True, max_send_wr=4, max_inline_data=800) as p:
        n = min(ds - 2, 61) * 16 - 4
        for i in range(25):
            if ds < 3:
                await p.a.post_raw_wqe(Wqe(Opcode.NOP, (RawSegment(bytes(16)),) * (ds - 1)))
                continue
            wqe = Wqe(Opcode.RDMA_WRITE, (RaddrSegment.of(p.remote), InlineSegment(p.left[i : i + n].tobytes())))
            assert wqe.ds == ds
            await p.a.post_raw_wqe(wqe)
            assert (p.right[:n] == p.left[i : i + n]).all()
        await p.a.rdma_write(p.local[:8], p.remote)


# ------------------------------------------------------------------ completions


async def test_without_a_completion_of_its_own_it_is_resolved_by_the_next() -> None:
    async with pair(raw_wqe=True, max_send_wr=8) as p:
        quiet = [p.a.post_raw_wqe(write(p, 10 * i, 10, flags=CtrlFlags.NONE)) for i in range(100)]
        await p.a.rdma_write(p.local[2000:2001], p.remote[2000:])
        assert all(wqe.done for wqe in quiet)
        assert {(wqe.status, wqe.opcode) for wqe in quiet} <= {(0, None), (0, WC_DRIVER2)}
        assert (p.right[:1000] == p.left[:1000]).all()
        # Awaited by itself, it gets one.
        with anyio.fail_after(SOON):
            await p.a.post_raw_wqe(write(p, 1000, 10, flags=CtrlFlags.NONE))
            await p.a.post_raw_wqe(write(p, 1010, 10, flags=CtrlFlags.NONE))
            p.a.post_raw_wqe(write(p, 1020, 10, flags=CtrlFlags.NONE))
            await p.a.wait_idle()
        assert (p.right[:1030] == p.left[:1030]).all()


async def test_raw_and_normal_requests_are_told_apart() -> None:
    async with (
        pair(raw_wqe=True, max_umr_entries=2, memcpy=True, max_send_wr=16) as p,
        mlx5.create_mkey(p.device, 2) as mkey,
    ):
        await p.a.register_list(mkey, [p.local[0:100]])
        kinds: list[tuple[str, Callable[[int], Any]]] = [
            ("RAW_WQE", lambda i: p.a.post_raw_wqe(write(p, 8 * i, 8))),
            ("RDMA_WRITE", lambda i: p.a.rdma_write(p.local[8 * i : 8 * i + 8], p.remote[8 * i :])),
            ("RDMA_READ", lambda i: p.a.rdma_read(p.local[60_000:60_008], p.remote[:8])),
            ("MEMCPY", lambda i: p.a.memcpy(p.peer[8 * i : 8 * i + 8], p.local[8 * i : 8 * i + 8])),
            ("RAW_WQE", lambda _: p.a.post_raw_wqe(Wqe(Opcode.NOP))),
            ("RDMA_WRITE", lambda _: p.a.rdma_write(mkey[:8], p.remote[60_000:])),
        ]
        opcodes = {"RAW_WQE": WC_DRIVER2, "RDMA_WRITE": 1, "RDMA_READ": 2, "MEMCPY": 137}
        posted = [(kinds[i * 5 % 6][0], kinds[i * 5 % 6][1](i)) for i in range(600)]
        for name, operation in posted:
            await operation
            assert (operation.request, operation.opcode) == (name, opcodes[name])


async def test_one_that_fails_is_named_and_takes_the_queue_with_it() -> None:
    async with pair(raw_wqe=True) as p:
        wrong = Wqe(Opcode.RDMA_WRITE, (RaddrSegment(p.remote.addr, 0xDEAD00), DataSegment.of(p.local[:8])))
        with faults.hold(p.a):
            first = p.a.post_raw_wqe(wrong)
            second = p.a.post_raw_wqe(Wqe(Opcode.NOP))
        with pytest.raises(RemoteAccessError, match="RAW_WQE"):
            await first
        with pytest.raises(WrFlushError, match="RAW_WQE with IBV_WC_REM_ACCESS_ERR"):
            await second


async def test_an_unsignalled_one_that_fails_says_so() -> None:
    async with pair(raw_wqe=True) as p:
        segments = (RaddrSegment(p.remote.addr, 0xDEAD00), DataSegment.of(p.local[:8]))
        with pytest.raises(RemoteAccessError), anyio.fail_after(SOON):
            await p.a.post_raw_wqe(Wqe(Opcode.RDMA_WRITE, segments, CtrlFlags.NONE))


@pytest.mark.parametrize("opcode", [0x03, Opcode.TSO, Opcode.ATOMIC_MASKED_CS, 0xFF])
async def test_an_opcode_that_the_queue_does_not_do(opcode: int) -> None:
    async with pair(raw_wqe=True) as p:
        with pytest.raises(LocalQpOperationError):
            await p.a.post_raw_wqe(Wqe(opcode, (RawSegment(bytes(48)),)))


# ------------------------------------------------------------------ what can't be posted


async def test_what_ds_says_is_held_against_what_is_there() -> None:
    """F58: ds alone sets how much libmlx5 copies, from wherever the bytes end."""
    async with pair(raw_wqe=True) as p:
        ctrl = struct.pack(">II", Opcode.NOP, p.a.qp_num << 8)
        refused: list[tuple[bytes | str | None, str]] = [
            (ctrl[:7] + b"\x00" + bytes(8), "ds field is 0"),
            (ctrl[:7] + b"\x40" + bytes(8), "ds field is 0"),  # six bits
            (ctrl[:7] + b"\x3f" + bytes(56), "says 1008 bytes, but only 64 are given"),
            (ctrl[:7] + b"\x02" + bytes(8), "says 32 bytes, but only 16"),
            (b"", "has 0 bytes"),
            (bytes(15), "has 15 bytes"),
            (ctrl[:7] + b"\x3f" + bytes(1000), f"room for {p.a.wqe_limit} in one work request"),
        ]
        assert 64 <= p.a.wqe_limit < 1008
        for data, match in refused:
            with pytest.raises(UsageError, match=match):
                p.a.post_raw_wqe(data)  # type: ignore[arg-type]
        for odd in ("text", None, 5, np.zeros(64, np.uint8)[::2]):
            with pytest.raises(BufferAccessError, match="contiguous bytes"):
                p.a.post_raw_wqe(odd)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=rf"names QP 0x1234, but this one is {p.a.qp_num:#x}"):
            p.a.post_raw_wqe(write(p, 0, 8).to_bytes(0x1234))
        assert p.a.statistics()["send"]["posted"] == 0
        await p.a.post_raw_wqe(write(p, 0, 8))


async def test_it_must_be_asked_for() -> None:
    async with pair() as p:
        with pytest.raises(UnsupportedError, match=r"mlx5_0.*raw_wqe=True"):
            p.a.post_raw_wqe(Wqe(Opcode.NOP))


async def test_memory_is_kept_as_long_as_the_wqe_is_under_way() -> None:
    async with pair(raw_wqe=True) as p, opened("mlx5_1") as other, other.reg_mr(bytearray(8)) as foreign:
        mr = await p.device.reg_mr(bytearray(b"kept    "))
        extra = await p.device.reg_mr(bytearray(8))
        wqe = Wqe(Opcode.RDMA_WRITE, (RaddrSegment.of(p.remote), DataSegment.of(mr[0:8])), extra_slices=(extra,))
        assert wqe.slices == (wqe.segments[1].source, extra)  # type: ignore[union-attr]
        with faults.hold(p.a):
            done = p.a.post_raw_wqe(wqe)
            closing, also = mr.close(), extra.close()
            await settle()
            assert not closing.done
            assert not also.done
        await closing
        await also
        await done
        assert p.right[:8].tobytes() == b"kept    "
        with pytest.raises(ClosedError):
            p.a.post_raw_wqe(wqe)
        with pytest.raises(UsageError, match="another device"):
            p.a.post_raw_wqe(Wqe(Opcode.NOP), keep=[foreign])
        with pytest.raises(BufferAccessError, match="keep"):
            p.a.post_raw_wqe(Wqe(Opcode.NOP), keep=[b"x"])  # type: ignore[list-item]
        # An lkey that means nothing is the device's to refuse.
        with pytest.raises(LocalProtectionError):
            await p.a.post_raw_wqe(Wqe(Opcode.RDMA_WRITE, (RaddrSegment.of(p.remote), DataSegment(8, 0xBAD00, 0))))


async def test_they_wait_for_room_like_others() -> None:
    async with pair(raw_wqe=True, max_send_wr=2) as p, mlx5.create_qp(p.device, raw_wqe=True, max_send_wr=1) as c:
        writes = [p.a.post_raw_wqe(write(p, 100 * i, 100)) for i in range(100)]
        for done in writes:
            await done
        assert (p.right[:10_000] == p.left[:10_000]).all()
        async with mlx5.create_qp(p.device) as d:
            await connect(c, d)
            for done in [c.post_raw_wqe(Wqe(Opcode.NOP, flags=CtrlFlags.NONE)) for _ in range(50)]:
                with anyio.fail_after(SOON):
                    await done

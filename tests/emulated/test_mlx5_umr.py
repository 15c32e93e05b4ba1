"""UMR: layouts of memory behind one key, registered by work requests. mlx5dv_wr_post(3), mlx5dv_create_mkey(3)."""

import errno
import mmap
from typing import Any

import anyio
import pytest
from emulated.core import connect, eventually, object_counts, settle
from emulated.mlx5 import WC_LOCAL_INV, WC_UMR, opened, pair
from pyverbs import enums as e
from pyverbs.providers.mlx5.mlx5dv_mkey import Mlx5Mkey, Mlx5MrInterleaved
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import SGE

from aiordma import (
    Access,
    AccessFlagsError,
    BufferAccessError,
    ClosedError,
    LocalProtectionError,
    MemoryWindowBindError,
    RemoteAccessError,
    RemoteBuffer,
    UnsupportedError,
    UsageError,
    VerbsError,
    WrFlushError,
    mlx5,
)
from aiordma.emulator import faults
from aiordma.mlx5.raw_wqe import DataSegment, Opcode, RaddrSegment, RawSegment, UmrCtrlSegment

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

SOON = 20


# ------------------------------------------------------------------ the calls


@pytest.mark.parametrize("configure", [False, True])
async def test_a_list_is_its_buffers_one_after_the_other(configure: bool) -> None:
    async with pair(max_umr_entries=4, mkey_configure=configure) as p, mlx5.create_mkey(p.device, 4) as mkey:
        assert not mkey.bound
        done = await p.a.register_list(mkey, [p.local[10:20], p.local[0:5], p.local[100:107]], configure=configure)
        assert (done.opcode, done.request, done.status) == (WC_UMR, "UMR", 0)
        assert mkey.bound
        assert len(mkey) == 22
        await p.a.rdma_write(mkey.whole(), p.remote)
        expected = bytes(p.left[10:20]) + bytes(p.left[0:5]) + bytes(p.left[100:107])
        assert bytes(p.right[:22]) == expected
        assert not p.right[22:].any()
        inv = p.a.invalidate(mkey)
        await inv
        assert not mkey.bound


@pytest.mark.parametrize("configure", [False, True])
async def test_an_interleaved_layout_takes_a_piece_of_each_block_in_turn(configure: bool) -> None:
    async with pair(max_umr_entries=4, mkey_configure=configure) as p, mlx5.create_mkey(p.device, 3) as mkey:
        blocks = [(p.local[0:1000], 3, 7), (p.local[2000:], 5, 0)]
        done = await p.a.register_interleaved(mkey, blocks, repeat_count=6, configure=configure)
        assert done.opcode == WC_UMR
        assert len(mkey) == 6 * 8
        await p.a.rdma_write(mkey.whole(), p.remote)
        expected = b"".join(
            bytes(p.left[10 * i : 10 * i + 3]) + bytes(p.left[2000 + 5 * i : 2005 + 5 * i]) for i in range(6)
        )
        assert bytes(p.right[:48]) == expected
        # The other way round: what is read into it is scattered, and the skipped bytes stay as they are.
        before = p.left.copy()
        p.right[:48] = range(48)
        await p.a.rdma_read(mkey.whole(), p.remote[:48])
        for i in range(6):
            before[10 * i : 10 * i + 3] = range(8 * i, 8 * i + 3)
            before[2000 + 5 * i : 2005 + 5 * i] = range(8 * i + 3, 8 * i + 8)
        assert (p.left == before).all()


async def test_local_inv_has_its_own_completion_and_ends_the_layout() -> None:
    async with pair(max_umr_entries=1) as p, mlx5.create_mkey(p.device, 1) as mkey:
        await p.a.register_list(mkey, [p.local[:64]])
        done = await p.a.local_inv(mkey.rkey)
        assert (done.opcode, done.request) == (WC_LOCAL_INV, "LOCAL_INV")
        with pytest.raises(LocalProtectionError):
            await p.a.rdma_write(mkey.whole(), p.remote)


async def test_mkey_configure_must_be_asked_for() -> None:
    async with pair(max_umr_entries=1) as p, mlx5.create_mkey(p.device, 2) as mkey:
        with pytest.raises(UnsupportedError, match=r"mlx5_0.*mkey_configure"):
            p.a.register_list(mkey, [p.local[:8]], configure=True)


async def test_unsignalled_layouts_are_there_for_what_follows_and_resolved_by_it() -> None:
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        quiet = p.a.register_list(mkey, [p.local[8:16], p.local[0:8]], signaled=False)
        written = p.a.rdma_write(mkey.whole(), p.remote)
        await written
        assert quiet.done
        assert (quiet.status, quiet.opcode) == (0, None)
        assert bytes(p.right[:16]) == bytes(p.left[8:16]) + bytes(p.left[0:8])
        await p.a.invalidate(mkey)
        # Awaited by itself.
        with anyio.fail_after(SOON):
            await p.a.register_list(mkey, [p.local[8:16]], signaled=False)


async def test_invalidating_does_not_wait_for_a_signal_that_never_comes() -> None:
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        p.a.register_list(mkey, [p.local[8:16]], signaled=False)
        with anyio.fail_after(SOON):
            await p.a.invalidate(mkey)


@pytest.mark.parametrize("entries", [1, 3, 4, 5, 51])
async def test_a_qp_is_sized_for_its_longest_layout(entries: int) -> None:
    """F52: libmlx5 takes what fits in place of inline data, and says ENOMEM beyond. 51 entries and a header fill a WQE."""
    async with pair(max_umr_entries=entries, max_send_wr=8) as p, mlx5.create_mkey(p.device, 60) as mkey:
        assert p.a.umr_list >= entries
        assert p.a.umr_interleaved >= entries
        n = p.a.umr_interleaved
        for _ in range(20):  # round the queue's end too
            await p.a.register_interleaved(mkey, [(p.local[100 * i :], 2, 3) for i in range(n)], repeat_count=2)
            await p.a.rdma_write(mkey.whole(), p.remote)
            expected = b"".join(bytes(p.left[100 * i + r : 100 * i + r + 2]) for r in (0, 5) for i in range(n))
            assert bytes(p.right[: 4 * n]) == expected
            await p.a.invalidate(mkey)
            p.right[:] = 0
            n_list = p.a.umr_list
            await p.a.register_list(mkey, [p.local[100 * i : 100 * i + 3] for i in range(n_list)])
            await p.a.rdma_write(mkey.whole(), p.remote)
            assert bytes(p.right[: 3 * n_list]) == b"".join(bytes(p.left[100 * i : 100 * i + 3]) for i in range(n_list))
            await p.a.invalidate(mkey)
        with pytest.raises(UsageError, match=r"larger max_umr_entries"):
            p.a.register_list(mkey, [p.local[:1]] * (n_list + 1))
        with pytest.raises(UsageError, match=r"larger max_umr_entries"):
            p.a.register_interleaved(mkey, [(p.local, 1, 1)] * (n + 1), repeat_count=1)


async def test_more_entries_than_a_wqe_holds_are_refused_at_creation() -> None:
    async with opened() as device:
        for entries in (52, 55, -1, 1.5):
            with pytest.raises(UsageError, match="max_umr_entries: 0 to 51"):
                mlx5.create_qp(device, max_umr_entries=entries)  # type: ignore[arg-type]


# ------------------------------------------------------------------ use


async def test_an_mkey_is_local_and_remote_side_of_every_operation() -> None:
    async with (
        pair(max_umr_entries=4) as p,
        mlx5.create_mkey(p.device, 4) as here,
        mlx5.create_mkey(p.device, 4) as there,
    ):
        await p.a.register_list(here, [p.local[0:10], p.local[50:60]])
        await p.a.register_interleaved(there, [(p.peer[0:400], 4, 16)], repeat_count=5)
        assert there.remote().addr == 0
        # write from one layout into another
        await p.a.rdma_write(here.whole(), there.remote())
        sent = bytes(p.left[0:10]) + bytes(p.left[50:60])
        assert b"".join(bytes(p.right[20 * i : 20 * i + 4]) for i in range(5)) == sent
        assert not p.right[4:20].any()
        # read from one layout into another
        p.left[:100] = 0
        await p.a.rdma_read(here[0:20], there.remote())
        assert bytes(p.left[0:10]) + bytes(p.left[50:60]) == sent
        assert not p.left[10:50].any()
        # send from one, receive into the other
        p.right[:] = 0
        receive = p.b.recv(there[4:20])
        await p.a.send(here[2:12], imm=5)
        got = await receive
        assert (got.byte_len, got.imm_data) == (10, 5)
        assert bytes(p.right[20:24]) + bytes(p.right[40:44]) + bytes(p.right[60:62]) == sent[2:12]
        # gathered with slices of memory regions
        await p.a.rdma_write([p.local[0:2], here[10:12], p.local[2:4]], p.remote[1000:])
        assert bytes(p.right[1000:1006]) == bytes(p.left[0:2]) + bytes(p.left[50:52]) + bytes(p.left[2:4])


async def test_mkeys_of_mkeys() -> None:
    async with (
        pair(max_umr_entries=4) as p,
        mlx5.create_mkey(p.device, 4) as outer,
        mlx5.create_mkey(p.device, 4) as inner,
        mlx5.create_mkey(p.device, 4) as strided,
    ):
        await p.a.register_interleaved(strided, [(p.local[0:100], 1, 1)], repeat_count=50)
        await p.a.register_list(inner, [p.local[1000:1004], strided[10:14]])
        await p.a.register_list(outer, [inner[2:8], p.local[5:6], inner[0:1]])
        await p.a.rdma_write(outer.whole(), p.remote)
        flat = bytes(p.left[1000:1004]) + bytes(p.left[20:28:2])
        assert bytes(p.right[:8]) == flat[2:8] + bytes(p.left[5:6]) + flat[0:1]
        with pytest.raises(UsageError, match="part of its own"):
            p.a.register_list(inner, [inner[0:4]], rebind=True)
        # The layouts underneath stay as long as they are used.
        under = p.a.invalidate(inner)
        await settle()
        assert not under.done
        await p.a.invalidate(outer)
        with anyio.fail_after(SOON):
            await under


async def test_as_deep_as_the_device_says() -> None:
    async with pair(max_umr_entries=1) as p:
        assert p.a.layout_depth == 4
        mkeys = [await mlx5.create_mkey(p.device, 1) for _ in range(5)]
        below = p.local[10:20]
        for mkey in mkeys[:4]:
            await p.a.register_list(mkey, [below])
            below = mkey.whole()
        await p.a.rdma_write(below, p.remote)
        assert bytes(p.right[:10]) == bytes(p.left[10:20])
        await p.a.register_list(mkeys[4], [below])
        with pytest.raises(LocalProtectionError):
            await p.a.rdma_write(mkeys[4].whole(), p.remote)
        for mkey in reversed(mkeys):
            await mkey.close()


async def test_offsets_begin_at_0_and_are_checked() -> None:
    """F55 (monarch#3759): an offset taken for an address."""
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        await p.a.register_list(mkey, [p.peer[0:100], p.peer[500:600]])
        for local, remote, where in ((p.local[0:1], mkey.remote()[0:1], 0), (p.local[1:2], mkey.remote()[199:], 599)):
            await p.a.rdma_write(local, remote)
            assert p.right[where] == bytes(local.view())[0]
        await p.a.rdma_write(mkey[199:200], p.remote[1000:])
        assert p.right[1000] == p.right[599]
        for outside in ((lambda: mkey[200:201]), (lambda: mkey[0:201]), (lambda: mkey.remote()[200:201])):
            with pytest.raises(UsageError, match="outside"):
                outside()
        # The device checks too, for whoever doesn't.
        with pytest.raises(RemoteAccessError):
            await p.a.rdma_write(p.local[0:1], RemoteBuffer(200, 1, mkey.rkey))


async def test_access_is_what_the_layout_allows() -> None:
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        await p.a.register_list(mkey, [p.peer[0:100]], access=Access.REMOTE_READ)
        await p.a.rdma_read(p.local[:100], mkey.remote())
        with pytest.raises(AccessFlagsError, match="without REMOTE_WRITE"):
            p.a.rdma_write(p.local[:4], mkey.remote())
        with pytest.raises(AccessFlagsError, match="without LOCAL_WRITE"):
            p.a.rdma_read(mkey.whole(), p.remote[:100])
        with pytest.raises(RemoteAccessError):
            await p.a.rdma_write(p.local[:4], RemoteBuffer(0, 4, mkey.rkey))


async def test_impossible_layouts_are_refused_before_anything_is_posted() -> None:
    read_only = b"x" * 64
    async with (
        pair(max_umr_entries=4) as p,
        mlx5.create_mkey(p.device, 4) as mkey,
        p.device.reg_mr(read_only, Access.REMOTE_READ) as ro,
        opened("mlx5_1") as other,
        mlx5.create_mkey(other, 4) as foreign,
        other.reg_mr(bytearray(64)) as foreign_mr,
    ):
        interleaved = p.a.register_interleaved

        def refused(error: type[Exception], match: str, call: Any, *arguments: Any, **options: Any) -> None:
            with pytest.raises(error, match=match):
                call(*arguments, **options)

        refused(UsageError, "at least one entry", p.a.register_list, mkey, [])
        refused(BufferAccessError, "slices of registered memory", p.a.register_list, mkey, [bytearray(4)])
        refused(BufferAccessError, "slices of registered memory", interleaved, mkey, [(b"", 1, 1)], repeat_count=1)
        refused(UsageError, "1 to 2147483647 bytes", p.a.register_list, mkey, [p.local[0:0]])
        refused(AccessFlagsError, "LOCAL_WRITE", p.a.register_list, mkey, [ro])
        refused(AccessFlagsError, "need LOCAL_WRITE", p.a.register_list, mkey, [p.local], access=Access.REMOTE_WRITE)
        refused(AccessFlagsError, "not 0x20", p.a.register_list, mkey, [p.local], access=0x20)
        refused(UsageError, "another device", p.a.register_list, foreign, [p.local])
        refused(UsageError, "another device", p.a.register_list, mkey, [foreign_mr])
        refused(UsageError, "repeat_count", interleaved, mkey, [(p.local, 1, 1)], repeat_count=0)
        refused(UsageError, "repeat_count", interleaved, mkey, [(p.local, 1, 1)], repeat_count=1 << 32)
        for count, skip in ((0, 1), (65536, 0), (65535, 1), (1, -1)):
            refused(UsageError, "65535", interleaved, mkey, [(p.local, count, skip)], repeat_count=1)
        refused(UsageError, "reach beyond", interleaved, mkey, [(p.local[0:99], 10, 10)], repeat_count=6)
        # F53: one entry is for the header. libmlx5 would let it pass, and the layout would lack its end.
        refused(UsageError, "4 entries and one for", interleaved, mkey, [(p.local, 1, 1)] * 4, repeat_count=1)
        refused(UsageError, "made for 4", p.a.register_list, mkey, [p.local[0:1]] * 5)
        refused(UsageError, "no layout", mkey.whole)
        refused(UsageError, "no layout", lambda: mkey[0:1])
        refused(UsageError, "no layout", p.a.invalidate, mkey)
        refused(UnsupportedError, "UMR on this QP", p.b.register_list, mkey, [p.local])
        await interleaved(mkey, [(p.local[0:110], 10, 10)] * 3, repeat_count=6)
        refused(UsageError, r"await qp.invalidate\(mkey\)", p.a.register_list, mkey, [p.local])
        await p.a.rdma_write(mkey.whole(), p.remote)


async def test_a_key_one_entry_too_small_loses_the_end_of_its_layout_on_the_device() -> None:
    """F53 (xccl; monarch pull request 4410), as libmlx5 lets it pass: the reason for the check above."""
    async with pair(max_umr_entries=8, raw_wqe=True) as p:
        small = Mlx5Mkey(p.device.pd, e_indirect(), 4)
        qp = p.a.pyverbs
        data = [Mlx5MrInterleaved(p.local.addr + 100 * i, 8, 0, p.local.lkey) for i in range(4)]
        qp.wr_start()
        qp.wr_id, qp.wr_flags = 1, e.IBV_SEND_INLINE
        qp.wr_mr_interleaved(small, e.IBV_ACCESS_LOCAL_WRITE, 1, data)
        qp.wr_complete()

        def write(offset: int) -> Any:
            raddr = RaddrSegment.of(p.remote)
            return p.a.post_raw_wqe(mlx5.Wqe(Opcode.RDMA_WRITE, (raddr, DataSegment(8, small.lkey, offset))))

        await write(16)
        assert bytes(p.right[:8]) == bytes(p.left[200:208])
        with pytest.raises(LocalProtectionError):
            await write(24)
        small.close()


def e_indirect() -> int:
    return 1  # MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT


async def test_libmlx5_wants_the_inline_flag_and_gets_it() -> None:
    """F51: without it, wr_complete says EOPNOTSUPP, and only then. The framework sets it."""
    async with pair(max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        qp = p.a.pyverbs
        qp.wr_start()
        qp.wr_id, qp.wr_flags = 1, e.IBV_SEND_SIGNALED
        qp.wr_mr_list(mkey.pyverbs, e.IBV_ACCESS_LOCAL_WRITE, [SGE(p.local.addr, 8, p.local.lkey)])
        with pytest.raises(PyverbsRDMAError) as refused:
            qp.wr_complete()
        assert refused.value.error_code == errno.EOPNOTSUPP
        await p.a.register_list(mkey, [p.local[:8]])


async def test_three_entries_of_1_gib_over_one_memory() -> None:
    """F56 (monarch pull request 2921): the length of a list counted in 31 bits."""
    gib = 1 << 30
    memory = mmap.mmap(-1, gib)
    async with pair(max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        try:
            big = await p.device.reg_mr(memory)
        except VerbsError as error:
            if error.errno != errno.ENOMEM:
                raise
            pytest.skip(f"1 GiB of locked memory isn't allowed here: {error}")
        await p.a.register_list(mkey, [big[0:gib], big[0:gib], big[0:gib]])
        assert len(mkey) == 3 * gib
        for offset in (0, gib - 1, gib, 2 * gib, 2 * gib + 5, 3 * gib - 1):
            memory[offset % gib] = offset % 251 + 1
            await p.a.rdma_write(mkey[offset : offset + 1], p.remote)
            assert p.right[0] == offset % 251 + 1
            await p.a.rdma_read(p.local[0:1], mkey.remote()[offset : offset + 1])
            assert p.left[0] == offset % 251 + 1
        await mkey.close()
        await big.close()
    memory.close()


# ------------------------------------------------------------------ another layout


async def test_a_new_layout_waits_until_nobody_uses_the_old_one() -> None:
    """F54 (monarch#3805): rebinding a live mkey redirected another task's DMA."""
    async with (
        pair(max_umr_entries=2) as p,
        mlx5.create_qp(p.device, max_umr_entries=2) as c,
        mlx5.create_qp(p.device) as d,
        mlx5.create_mkey(p.device, 2) as mkey,
    ):
        await connect(c, d)
        await c.register_list(mkey, [p.local[0:8]])
        with faults.hold(p.a) as release:
            delayed = p.a.rdma_write(mkey.whole(), p.remote)
            going = c.invalidate(mkey)
            await anyio.sleep(0.05)
            assert not going.done
            with pytest.raises(ClosedError):
                p.a.rdma_write(mkey.whole() if mkey.bound else p.local, p.remote)
            with pytest.raises(UsageError, match="is bound"):
                c.register_list(mkey, [p.local[100:108]])
            release.stop()
            with anyio.fail_after(SOON):
                await going
                await delayed
        await c.register_list(mkey, [p.local[100:108]])
        assert bytes(p.right[:8]) == bytes(p.left[0:8])
        await p.a.rdma_write(mkey.whole(), p.remote)
        assert bytes(p.right[:8]) == bytes(p.left[100:108])


async def test_a_layout_is_replaced_without_local_inv_as_hardware_does() -> None:
    """libmlx5's work request doesn't ask for a free key (mlx5_send_wr_mkey_configure() in rdma-core's qp.c sets the flag
    INLINE alone), so the device takes it, and the last layout counts."""
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        await p.a.register_list(mkey, [p.local[0:8]])
        old = mkey.whole()
        await p.a.register_list(mkey, [p.local[100:104]], rebind=True)
        assert len(mkey) == 4
        await p.a.rdma_write(mkey.whole(), p.remote)
        assert bytes(p.right[:4]) == bytes(p.left[100:104])
        with pytest.raises(ClosedError):
            p.a.rdma_write(old, p.remote)


async def test_a_umr_that_asks_for_a_free_key_fails_on_a_bound_one() -> None:
    """MLX5_WQE_UMR_CTRL_FLAG_CHECK_FREE of mlx5dv.h, which the kernel calls MLX5_UMR_CHECK_NOT_FREE: "fail if not free",
    set_reg_umr_segment() in drivers/infiniband/hw/mlx5/wr.c."""
    async with pair(max_umr_entries=2, raw_wqe=True) as p, mlx5.create_mkey(p.device, 4) as mkey:
        # Keys are made not free (mkc.free 0): what LOCAL_INV has freed can be bound by such a request.
        await p.a.register_list(mkey, [p.local[0:8]])
        await p.a.invalidate(mkey)
        check_free, inline, mask_len, mask_free = 1 << 5, 1 << 7, 1, 1 << 29
        context = bytearray(64)
        context[20:24] = (0xFFFFFF00 | (mkey.lkey & 0xFF)).to_bytes(4, "big")
        context[32:40] = (8).to_bytes(8, "big")

        def bind() -> Any:
            segments = (
                UmrCtrlSegment(check_free | inline, 4, mask_len | mask_free),
                RawSegment(bytes(context)),
                DataSegment(8, p.local.lkey, p.local.addr + 16),
                RawSegment(bytes(48)),
            )
            return p.a.post_raw_wqe(mlx5.Wqe(Opcode.UMR, segments, imm=mkey.lkey))

        await bind()
        with pytest.raises(MemoryWindowBindError):
            await bind()


async def test_a_layout_that_failed_is_none() -> None:
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        with pytest.raises(RemoteAccessError):
            await p.a.rdma_write(p.local[:8], RemoteBuffer(0, 8, 0xDEAD00))
        with pytest.raises(WrFlushError):
            await p.a.register_list(mkey, [p.local[:8]])
        assert not mkey.bound
        async with mlx5.create_qp(p.device, max_umr_entries=2) as c, mlx5.create_qp(p.device) as d:
            await connect(c, d)
            await c.register_list(mkey, [p.local[:8]])
            # A QP that can't invalidate any more leaves it to another.
            with pytest.raises(WrFlushError):
                await p.a.invalidate(mkey)
            await c.invalidate(mkey)
            assert not mkey.bound


async def test_invalidating_twice_is_once() -> None:
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        await p.a.register_list(mkey, [p.local[:8]])
        with faults.hold(p.a):
            first, second = p.a.invalidate(mkey), p.a.invalidate(mkey)
            assert first is second
        await second
        with pytest.raises(UsageError, match="no layout"):
            p.a.invalidate(mkey)
        assert await p.a.query_state() == "RTS"


async def test_the_peer_gets_an_error_from_an_invalidated_key() -> None:
    async with pair(max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        await p.a.register_list(mkey, [p.local[:8]])
        remote = mkey.remote()
        await p.b.rdma_write(p.peer[:8], remote)
        await p.a.invalidate(mkey)
        with pytest.raises(RemoteAccessError):
            await p.b.rdma_write(p.peer[:8], remote)


# ------------------------------------------------------------------ errors and ends


async def test_what_a_number_raises_itself_comes_through_and_leaves_nothing_behind() -> None:
    class Odd:
        def __index__(self) -> int:
            raise ZeroDivisionError("odd")

    odd: Any = Odd()
    async with pair(max_umr_entries=4, memcpy=True) as p, mlx5.create_mkey(p.device, 4) as mkey:
        before = object_counts()
        for call in (
            lambda: mlx5.create_mkey(p.device, odd),
            lambda: mlx5.create_qp(p.device, max_umr_entries=odd),
            lambda: mlx5.create_dma_engine(p.device, depth=odd),
            lambda: mlx5.create_dma_engine(p.device, chunk=odd),
            lambda: mlx5.create_dc_initiator(p.device, log_streams=odd),
            lambda: mlx5.create_dci_pool(p.device, odd),
            lambda: p.a.register_interleaved(mkey, [(p.local, 1, 1)], repeat_count=odd),
        ):
            with pytest.raises(ZeroDivisionError):
                await call()
        assert object_counts() == before
        assert not mkey.bound
        await p.a.register_list(mkey, [p.local[:8]])


async def test_an_error_while_posting_does_not_hang_the_next_post() -> None:
    """F50: between ibv_wr_start() and ibv_wr_complete() libmlx5 holds the send queue's lock."""

    def slices() -> Any:
        yield p.local[:8]
        raise TypeError("no more")

    class Odd:
        def __index__(self) -> int:
            raise TypeError("odd")

    async with pair(max_umr_entries=4, raw_wqe=True, memcpy=True) as p, mlx5.create_mkey(p.device, 4) as mkey:
        attempts: list[Any] = [
            lambda: p.a.register_list(mkey, slices()),
            lambda: p.a.register_interleaved(mkey, [(p.local, Odd(), 1)], repeat_count=1),  # type: ignore[list-item]
            lambda: p.a.register_interleaved(mkey, [(p.local, 1)], repeat_count=1),  # type: ignore[list-item]
            lambda: p.a.register_list(mkey, None),  # type: ignore[arg-type]
            lambda: p.a.register_list(None, [p.local]),  # type: ignore[arg-type]
            lambda: p.a.memcpy(p.local, None),  # type: ignore[arg-type]
            lambda: p.a.post_raw_wqe(None),  # type: ignore[arg-type]
        ]
        for attempt in attempts:
            with pytest.raises((TypeError, ValueError, BufferAccessError)):
                attempt()
            with anyio.fail_after(SOON):
                await p.a.rdma_write(p.local[:8], p.remote)
        assert not mkey.bound
        await p.a.register_list(mkey, [p.local[:8]])


async def test_regions_stay_registered_under_a_layout() -> None:
    async with pair(max_umr_entries=2) as p:
        memory = bytearray(b"12345678")
        mr = await p.device.reg_mr(memory)
        mkey = await mlx5.create_mkey(p.device, 2)
        await p.a.register_list(mkey, [mr[0:4], mr[4:8]])
        closing = mr.close()
        await settle()
        assert not closing.done
        await p.a.rdma_write(mkey.whole(), p.remote)
        assert bytes(p.right[:8]) == b"12345678"
        await mkey.close()
        with anyio.fail_after(SOON):
            await closing
        for use in (mkey.whole, lambda: mkey.lkey, lambda: p.a.register_list(mkey, [p.local])):
            with pytest.raises((ClosedError, UsageError)):
                use()
        with pytest.raises(ClosedError):
            p.a.invalidate(mkey)
        with pytest.raises(ClosedError):
            p.a.map_strided(mkey, p.left)


async def test_an_mkey_closes_when_nothing_uses_it() -> None:
    async with pair(max_umr_entries=2) as p:
        mkey = await mlx5.create_mkey(p.device, 2)
        await p.a.register_list(mkey, [p.local[:8]])
        with faults.hold(p.a):
            write = p.a.rdma_write(mkey.whole(), p.remote)
            closing = mkey.close()
            assert mkey.close() is closing
            await anyio.sleep(0.02)
            assert not closing.done
        await closing
        assert (await write).status == 0
        assert repr(mkey) == "<Mkey closed>"


async def test_a_device_closes_with_layouts_of_layouts() -> None:
    async with opened() as device:
        memory = bytearray(64)
        mr = await device.reg_mr(memory)
        a = await mlx5.create_qp(device, max_umr_entries=2)
        b = await mlx5.create_qp(device)
        await connect(a, b)
        mkeys = [await mlx5.create_mkey(device, 2) for _ in range(3)]
        below = mr[0:8]
        for mkey in mkeys:
            await a.register_list(mkey, [below])
            below = mkey.whole()
        with anyio.fail_after(SOON):
            await device.close()
        memory.append(1)  # no buffer is held any more
        with pytest.raises(ClosedError):
            mlx5.create_mkey(device, 2)
        with pytest.raises(ClosedError):
            mlx5.create_qp(device)


async def test_a_forgotten_mkey_warns_and_is_closed() -> None:
    async with opened() as device:
        held = [await mlx5.create_mkey(device, 2)]
        assert device.statistics()["mkeys"] == 1
        with pytest.warns(ResourceWarning, match="unclosed <Mkey"):
            held.clear()
        await eventually(lambda: not device.statistics().get("mkeys"))


@pytest.mark.parametrize("entries", [0, 65536, -1, "4", None])
async def test_an_mkey_has_1_to_65535_entries(entries: Any) -> None:
    async with opened() as device:
        with pytest.raises(UsageError, match="1 to 65535"):
            mlx5.create_mkey(device, entries)


async def test_many_tasks_each_with_a_layout_of_its_own() -> None:
    async with pair(max_umr_entries=4) as p:

        async def work(n: int) -> None:
            async with mlx5.create_mkey(p.device, 4) as mkey:
                for i in range(20):
                    at = 1000 * n + i
                    await p.a.register_interleaved(mkey, [(p.local[at : at + 100], 2, 3)], repeat_count=20)
                    await p.a.rdma_write(mkey.whole(), p.remote[1000 * n :])
                    expected = p.left[at : at + 100].reshape(20, 5)[:, :2].tobytes()
                    assert bytes(p.right[1000 * n : 1000 * n + 40]) == expected
                    await p.a.invalidate(mkey)

        async with anyio.create_task_group() as tasks:
            for n in range(30):
                tasks.start_soon(work, n)

"""Batches: what the regions in them are owed, and posting one again."""

import contextlib
import gc
import warnings

import anyio
import pytest
from emulated.core import DEVICE, OTHER_DEVICE, connect, open_pair, reported

import aiordma
from aiordma import ClosedError, Completion, RemoteBuffer, UsageError

pytestmark = [pytest.mark.anyio, pytest.mark.any_device, pytest.mark.usefixtures("leak_check")]


async def test_a_batch_of_nothing_has_completed_at_once() -> None:
    async with open_pair() as p:
        for nothing in (p.a.rdma_write_many([]), p.a.rdma_read_many(iter(())), p.a.batch().post()):
            assert nothing.done
            assert (await nothing).status == 0
        assert p.a.statistics()["send"]["posted"] == 0
        await p.check()
        await p.a.close()
        with pytest.raises(ClosedError):
            p.a.rdma_write_many([])


@pytest.mark.parametrize("depth", [3, 16, 128])
async def test_a_batch_posted_again_does_the_same_again(depth: int) -> None:
    async with open_pair(max_send_wr=depth) as p:
        batch = p.a.batch()
        for i in range(40):
            batch.rdma_write(p.local[i : i + 1], p.remote[i : i + 1])
        first = batch.repost()
        assert batch.post() is first
        ends: list[Completion] = [first]
        for value in range(5):
            await ends[-1]
            p.left[:40] = bytes([value + 1]) * 40
            ends.append(batch.repost())
            assert ends[-1] is not ends[-2]
            await ends[-1]
            assert p.right[:40] == p.left[:40]
        # Any number of them may be in flight.
        ends = [batch.repost() for _ in range(10)]
        for end in reversed(ends):
            assert (await end).status == 0
        assert p.local.region.inflight == 0
        assert p.a.statistics()["send"]["completed"] == 40 * 16


@pytest.mark.parametrize("bad", [0, 1, 9, 19])
async def test_each_posting_of_a_batch_tells_which_of_it_failed(bad: int) -> None:
    async with open_pair(max_send_wr=8) as p:
        there = RemoteBuffer(p.remote.addr + bad, 8, p.remote.rkey ^ 0x5500)
        batch = p.a.batch()
        for i in range(20):
            batch.rdma_write(p.local[8 * i :][:8], there if i == bad else p.remote[8 * i :])
        ends = [batch.post(), batch.repost()]
        with pytest.raises(aiordma.RemoteAccessError, match=f"{there.addr:#x} rkey {there.rkey:#x}") as failed:
            await ends[0]
        assert f"local {p.local.addr + 8 * bad:#x}+8" in str(failed.value)
        with pytest.raises(aiordma.WrFlushError):
            await ends[1]
        assert p.local.region.inflight == 0


async def test_a_batch_is_posted_again_only_while_its_regions_are_open() -> None:
    async with open_pair() as p:
        mr = await p.device.reg_mr(bytearray(64))
        batch = p.a.batch()
        batch.rdma_write(p.local[:8], p.remote)
        batch.rdma_write(mr[8:16], p.remote)
        await batch
        await mr.close()
        with pytest.raises(ClosedError, match="memory region is closed"):
            batch.repost()
        assert p.local.region.inflight == 0
        await p.check()


async def test_a_region_is_held_by_every_work_request_of_a_batch_that_uses_it() -> None:
    async with open_pair() as p, contextlib.AsyncExitStack() as stack:
        mrs = [await stack.enter_async_context(p.device.reg_mr(bytearray(64))) for _ in range(6)]
        block = p.block()
        # One region after the other, in turns, and several in one request.
        batch = p.a.batch()
        for mr in mrs:
            batch.rdma_write(mr[:8], p.remote)
            batch.rdma_write(mr, p.remote)
        for _ in range(3):
            for mr in mrs:
                batch.rdma_write(mr[8:16], p.remote)
        batch.rdma_write([mrs[0][:1], mrs[1][:1], mrs[0][1:2]], p.remote)
        assert all(mr.region.inflight == 0 for mr in mrs)
        done = batch.post()
        assert [mr.region.inflight for mr in mrs] == [7, 6, 5, 5, 5, 5]
        closing = mrs[0].close()
        await anyio.sleep(0.01)
        assert not closing.done
        p.unblock()
        await block
        await done
        await closing
        assert all(mr.region.inflight == 0 for mr in mrs)


async def test_a_batch_keeps_memory_that_its_owner_forgot() -> None:
    async with open_pair() as p:
        mr = await p.device.reg_mr(bytearray(b"kept" * 16))
        block = p.block()
        done = p.a.rdma_write_many([(mr[i : i + 1], p.remote[i:]) for i in range(64)])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            del mr
            gc.collect()
            await anyio.sleep(0.01)
            assert not done.done
            assert not warned, "it's still in use"
            p.unblock()
            await block
            await done
            del done
            gc.collect()
        assert ["unclosed <MemoryRegion" in str(w.message) for w in warned] == [True]
        assert p.right[:64] == b"kept" * 16


async def test_pairs_may_be_anything_that_unpacks_into_two() -> None:
    async with open_pair() as p:
        p.left[:8] = b"abcdefgh"
        pairs = [[p.local[0:2], p.remote[0:2]], iter((p.local[2:4], p.remote[2:4])), (p.local[4:6], p.remote[4:6])]
        await p.a.rdma_write_many(iter(pairs))
        assert p.right[:8] == b"abcdef\0\0"
        await p.a.rdma_write_many([([p.local[:2], p.local[4:6]], p.remote), (None, p.remote), (p.local[:0], p.remote)])
        assert p.right[:4] == b"abef"
        for wrong in ([p.local], [(p.local,)], [(p.local, p.remote, 1)], 1):
            with pytest.raises((TypeError, ValueError)):
                p.a.rdma_write_many(wrong)
        for item in ((b"inline", p.remote), (p.local, p.peer), (p.local, None)):
            with pytest.raises(aiordma.BufferAccessError):
                p.a.rdma_write_many([item])
        await p.check()


@pytest.mark.skipif(OTHER_DEVICE is None, reason="there is only one device")
async def test_what_is_wrong_with_a_pair_is_found_before_anything_is_posted() -> None:
    async with open_pair() as p, p.device.reg_mr(bytes(64), access=aiordma.Access.NONE) as readonly:
        remote = p.remote
        writable = RemoteBuffer(remote.addr, 8, remote.rkey, int(aiordma.Access.REMOTE_WRITE))
        readable = RemoteBuffer(remote.addr, 8, remote.rkey, int(aiordma.Access.REMOTE_READ))
        good = (p.local[:8], remote[:8])
        for verb, pair, error in (
            (p.a.rdma_write_many, (p.local[:9], remote[:8]), UsageError),
            (p.a.rdma_write_many, (p.local[:8], readable), aiordma.AccessFlagsError),
            (p.a.rdma_read_many, (p.local[:8], writable), aiordma.AccessFlagsError),
            (p.a.rdma_read_many, (readonly[:8], remote), aiordma.AccessFlagsError),
        ):
            with pytest.raises(error):
                verb([good, good, pair])
        closed = await p.device.reg_mr(bytearray(8))
        await closed.close()
        with pytest.raises(ClosedError):
            p.a.rdma_write_many([good, (closed, remote)])
        async with aiordma.open_device(OTHER_DEVICE) as other, other.reg_mr(bytearray(8)) as foreign:
            with pytest.raises(UsageError, match="another device"):
                p.a.rdma_write_many([good, (foreign, remote)])
        assert p.a.statistics()["send"]["posted"] == 0
        assert p.local.region.inflight == 0


async def test_a_batch_is_refused_before_the_qp_is_connected() -> None:
    async with (
        aiordma.open_device(DEVICE) as device,
        device.reg_mr(bytearray(8)) as mr,
        device.create_qp() as a,
        device.create_qp() as b,
    ):
        with pytest.raises(aiordma.QPStateError):
            a.rdma_write_many([(mr, mr.remote())])
        await connect(a, b)
        await a.rdma_write_many([(mr, mr.remote())])


async def test_a_failed_batch_that_nobody_awaits_is_reported_once() -> None:
    async with open_pair() as p:
        bad = RemoteBuffer(p.remote.addr, 8, p.remote.rkey ^ 0x5500)
        with reported() as reports:
            p.a.rdma_write_many([(p.local[:8], bad)] * 30)
            await p.a.wait_idle()
            gc.collect()
        assert [type(e) for e in reports.found] == [aiordma.RemoteAccessError]

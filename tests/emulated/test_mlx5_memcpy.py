"""Copies by the device: mlx5dv_wr_memcpy(), and the engine on top of it. The result is memmove's."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from emulated.core import connected, eventually, reported, settle
from emulated.mlx5 import WC_MEMCPY, opened, pair
from pyverbs import enums as e
from pyverbs.qp import QPAttr

from aiordma import (
    Access,
    AccessFlagsError,
    BufferAccessError,
    ClosedError,
    RemoteAccessError,
    RemoteBuffer,
    UnsupportedError,
    UsageError,
    VerbsError,
    WrFlushError,
    mlx5,
)
from aiordma.emulator import faults

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

SOON = 30
TESTS = str(Path(__file__).parents[1])
COPIES = 10_000


# ------------------------------------------------------------------ the work request


async def test_it_copies_and_says_so() -> None:
    async with pair(memcpy=True) as p:
        done = await p.a.memcpy(p.peer[10:1010], p.local[3:1003])
        assert (done.opcode, done.request, done.status) == (WC_MEMCPY, "MEMCPY", 0)
        assert (p.right[10:1010] == p.left[3:1003]).all()
        assert not p.right[:10].any()
        assert not p.right[1010:].any()


async def test_unsignalled_copies_are_resolved_by_what_follows() -> None:
    async with pair(memcpy=True, max_send_wr=8) as p:
        copies = [p.a.memcpy(p.peer[i : i + 1], p.local[i : i + 1], signaled=False) for i in range(100)]
        with anyio.fail_after(SOON):
            await copies[-1]
            for copy in copies:
                assert (await copy).status == 0
        assert (p.right[:100] == p.left[:100]).all()


async def test_a_fence_orders_a_send_behind_the_copy() -> None:
    async with pair(memcpy=True) as p:
        staging = p.local[40_000:]
        copy = p.a.memcpy(staging[:10_000], p.local[:10_000])
        await p.a.rdma_write(staging[:10_000], p.remote, fence=True)
        assert copy.done
        assert (p.right[:10_000] == p.left[:10_000]).all()


async def test_a_10_000_random_copies_equal_memmove(anyio_backend_name: str, request: pytest.FixtureRequest) -> None:
    first_loop = "asyncio" in request.node.name
    n = COPIES if first_loop else COPIES // 10
    rng = random.Random(7)
    size = 1 << 16
    expected = np.zeros(size, np.uint8)
    async with pair(size, memcpy=True) as p, mlx5.create_dma_engine(p.device) as engine:
        done = 0
        while done < n:
            batch: list[tuple[slice, slice]] = []
            taken = np.zeros(size, bool)
            # Copies of one batch are in flight together, so their targets are apart.
            while len(batch) < 100 and done + len(batch) < n:
                length = int(2 ** rng.uniform(0, 9.5)) if rng.random() < 0.95 else rng.randrange(1, 5000)
                dst, src = rng.randrange(size - length), rng.randrange(size - length)
                if taken[dst : dst + length].any():
                    break
                taken[dst : dst + length] = True
                batch.append((slice(dst, dst + length), slice(src, src + length)))
            for to, source in batch:
                expected[to] = p.left[source]
            if rng.random() < 0.5:
                pairs = [(p.peer[to], p.local[source]) for to, source in batch]
                assert await engine.copy_many(pairs) == sum(source.stop - source.start for _, source in batch)
            else:
                for copy in [p.a.memcpy(p.peer[to], p.local[source]) for to, source in batch]:
                    await copy
            done += len(batch)
            assert (p.right == expected).all()


async def test_what_is_no_copy_is_refused_before_it_is_posted() -> None:
    async with (
        pair(memcpy=True) as p,
        opened("mlx5_1") as other,
        other.reg_mr(bytearray(64)) as foreign,
        p.device.reg_mr(b"x" * 64, Access.NONE) as read_only,
    ):
        refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (UsageError, "don't fit", lambda: p.a.memcpy(p.peer[:10], p.local[:11])),
            (UsageError, "1 to 2147483648 bytes", lambda: p.a.memcpy(p.peer[:10], p.local[:0])),
            (UsageError, "overlap", lambda: p.a.memcpy(p.local[0:10], p.local[9:19])),
            (UsageError, "overlap", lambda: p.a.memcpy(p.local[9:19], p.local[0:10])),
            (UsageError, "another device", lambda: p.a.memcpy(p.local, foreign)),
            (UsageError, "another device", lambda: p.a.memcpy(foreign, p.local[:8])),
            (AccessFlagsError, "without LOCAL_WRITE", lambda: p.a.memcpy(read_only, p.local[:8])),
            (UnsupportedError, "mlx5_0.*memcpy=True", lambda: p.b.memcpy(p.local[:8], p.peer[:8])),
        ]
        for error, match, call in refused:
            with pytest.raises(error, match=match):
                call()
        assert p.a.statistics()["send"]["posted"] == 0
        await p.a.memcpy(p.peer[:8], read_only[:8])
        await p.a.memcpy(p.local[10:20], p.local[0:10])  # side by side


async def test_layouts_are_copied_too() -> None:
    async with pair(memcpy=True, max_umr_entries=2) as p, mlx5.create_mkey(p.device, 3) as mkey:
        data = await p.a.map_strided(mkey, p.left.reshape(256, 256)[:, 5:9])
        await p.a.memcpy(p.peer, data)
        assert p.right[: data.length].tobytes() == p.left.reshape(256, 256)[:, 5:9].tobytes()


# ------------------------------------------------------------------ the engine


@pytest.mark.parametrize("extra", [-1, 0, 1, 3 * 4096])
async def test_longer_copies_are_split(extra: int) -> None:
    async with (
        opened() as device,
        mlx5.create_dma_engine(device, depth=4, chunk=4096) as engine,
    ):
        assert engine.max_length == 4096
        assert engine.device is device
        length = 4096 + extra
        source = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8)
        target = np.zeros(length + 1, np.uint8)
        async with device.reg_mr(source) as src, device.reg_mr(target) as dst:
            steps: list[tuple[int, int]] = []
            assert await engine.copy(dst, src, progress=lambda *step: steps.append(step)) == length
            assert (target[:length] == source).all()
            assert target[length] == 0
            assert steps[-1] == (length, length)
            assert [done for done, _ in steps] == sorted({done for done, _ in steps})
            assert len(steps) == -(-length // 4096)
            assert engine.qp.statistics()["send"]["posted"] == len(steps)


async def test_nothing_is_copied_at_once() -> None:
    async with pair() as p, mlx5.create_dma_engine(p.device) as engine:
        assert await engine.copy(p.peer, p.local[:0]) == 0
        assert await engine.copy_many([]) == 0
        assert await engine.copy_many([(p.peer, p.local[:0])]) == 0
        assert engine.qp.statistics()["send"]["posted"] == 0
        # It happens after what it's to come after, nevertheless.
        failing = p.a.rdma_write(p.local[:8], RemoteBuffer(0, 8, 0xDEAD00))
        with pytest.raises(RemoteAccessError):
            await engine.copy(p.peer, p.local[:0], after=failing)


async def test_a_copy_of_what_is_no_registered_memory_says_so() -> None:
    async with opened() as device, mlx5.create_dma_engine(device) as engine, device.reg_mr(bytearray(64)) as mr:
        wrong: Any
        for wrong in (None, 5, b"bytes", bytearray(8), np.zeros(8, np.uint8)):
            for dst, src in ((mr[:8], wrong), (mr[:0], wrong), (wrong, mr[:0])):
                with pytest.raises(BufferAccessError, match=type(wrong).__name__):
                    await engine.copy(dst, src)
            with pytest.raises(BufferAccessError, match=type(wrong).__name__):
                await engine.copy_many([(mr[:8], mr[8:16]), (wrong, mr[:8])])
            with pytest.raises(TypeError, match="dst"):
                await engine.copy(wrong, mr[:8])


async def test_a_copy_after_another_of_the_engine_is_fenced() -> None:
    async with pair() as p, mlx5.create_dma_engine(p.device, depth=8) as engine:
        middle = p.local[20_000:]
        first = engine.qp.memcpy(middle[:10_000], p.local[:10_000])
        await engine.copy(p.peer[:10_000], middle[:10_000], after=first)
        assert (p.right[:10_000] == p.left[:10_000]).all()
        await engine.copy(p.peer[10_000:20_000], middle[:10_000], after=first)  # done long since
        assert (p.right[10_000:20_000] == p.left[:10_000]).all()


async def test_a_copy_after_another_qps_operation_waits_for_it() -> None:
    """Also where both QPs have the same number, on two devices."""
    async with opened("mlx5_0") as one, opened("mlx5_1") as two, connected(one, timeout=8) as other:
        engines = [await mlx5.create_dma_engine(two) for _ in range(8)]
        numbers = {engine.qp.qp_num: engine for engine in engines}
        engine = numbers.get(other.a.qp_num, engines[0])
        source, target = bytearray(b"after"), bytearray(5)
        async with two.reg_mr(source) as src, two.reg_mr(target) as dst:
            with faults.hold(other.a) as release:
                before = other.a.rdma_write(other.local[:8], other.remote)
                async with anyio.create_task_group() as tasks:

                    async def copy() -> None:
                        await engine.copy(dst, src, after=before)

                    tasks.start_soon(copy)
                    await anyio.sleep(0.03)
                    assert target == bytes(5)
                    release.stop()
            assert target == source
            failing = other.a.rdma_write(other.local[:8], RemoteBuffer(0, 8, 0xDEAD00))
            with pytest.raises(RemoteAccessError):
                await engine.copy(dst, src, after=failing)
        for engine in engines:
            await engine.close()


async def test_copy_many_reports_progress_and_checks_all_first() -> None:
    async with pair() as p, mlx5.create_dma_engine(p.device, depth=3, chunk=1000) as engine:
        pairs = [(p.peer[3000 * i : 3000 * i + 2500], p.local[3000 * i : 3000 * i + 2500]) for i in range(10)]
        steps: list[tuple[int, int]] = []
        assert await engine.copy_many(iter(pairs), progress=lambda *step: steps.append(step)) == 25_000
        assert steps[-1] == (25_000, 25_000)
        assert len(steps) == 30
        for i in range(10):
            at = slice(3000 * i, 3000 * i + 2500)
            assert (p.right[at] == p.left[at]).all()
        posted = engine.qp.statistics()["send"]["posted"]
        for bad in ((p.peer[:10], p.local[:11]), (p.local[0:10], p.local[5:15])):
            with pytest.raises(UsageError):
                await engine.copy_many([*pairs, bad])
            with pytest.raises(UsageError):
                await engine.copy(*bad)
        assert engine.qp.statistics()["send"]["posted"] == posted


async def test_many_tasks_share_an_engine() -> None:
    async with pair() as p, mlx5.create_dma_engine(p.device, depth=4, chunk=256) as engine:

        async def copy(i: int) -> None:
            at = slice(1000 * i, 1000 * i + 1000)
            assert await engine.copy(p.peer[at], p.local[at]) == 1000

        async with anyio.create_task_group() as tasks:
            for i in range(60):
                tasks.start_soon(copy, i)
        assert (p.right[:60_000] == p.left[:60_000]).all()


async def test_a_cancelled_copy_posts_no_more_and_keeps_its_buffers() -> None:
    async with pair() as p, mlx5.create_dma_engine(p.device, depth=2, chunk=1000) as engine:
        target = bytearray(20_000)
        mr = await p.device.reg_mr(target)
        with faults.hold(engine.qp):
            with anyio.move_on_after(0.02) as scope:
                await engine.copy(mr, p.local[:20_000])
            assert scope.cancelled_caught
            assert engine.qp.statistics()["send"]["in_flight"] == 2
            closing = mr.close()
            await anyio.sleep(0.01)
            assert not closing.done
        with anyio.fail_after(SOON):
            await closing
        assert engine.qp.statistics()["send"]["posted"] == 2
        assert bytes(target[:2000]) == p.left[:2000].tobytes()
        assert not any(target[2000:])
        assert await engine.copy(p.peer, p.local) == len(p.local)  # it works on
        assert (p.right == p.left).all()


async def test_an_error_is_told_once_and_by_the_copy() -> None:
    async with pair() as p, mlx5.create_dma_engine(p.device, depth=8, chunk=1000) as engine:
        with reported() as reports:
            with faults.hold(engine.qp):
                async with anyio.create_task_group() as tasks:
                    errors: list[BaseException] = []

                    async def copy() -> None:
                        try:
                            await engine.copy(p.peer, p.local)
                        except WrFlushError as error:
                            errors.append(error)

                    tasks.start_soon(copy)
                    await eventually(lambda: engine.qp.statistics()["send"]["in_flight"] == 8)
                    _to_error(engine.qp)
            await settle()
        assert len(errors) == 1
        assert reports.found == []
        with pytest.raises(WrFlushError):
            await engine.copy(p.peer[:8], p.local[:8])


def _to_error(qp: Any) -> None:
    attr = QPAttr()
    attr.qp_state = e.IBV_QPS_ERR
    qp.pyverbs.modify(attr, e.IBV_QP_STATE)


async def test_closing_flushes_what_is_in_flight() -> None:
    async with pair() as p:
        engine = await mlx5.create_dma_engine(p.device)
        with faults.hold(engine.qp):
            copy = engine.qp.memcpy(p.peer, p.local)
            assert not engine.closed
            await engine.close()
        assert engine.closed
        assert engine.close().done
        with pytest.raises(WrFlushError):
            await copy
        with pytest.raises(ClosedError):
            await engine.copy(p.peer, p.local)
        assert repr(engine) == "<DmaEngine on mlx5_0 closed>"


async def test_an_engine_that_cannot_be_made_leaves_nothing_behind() -> None:
    async with opened() as device:
        with faults.verb("modify_qp", 12, state="RTS", count=1), pytest.raises(VerbsError, match="ibv_modify_qp"):
            await mlx5.create_dma_engine(device)
        await eventually(lambda: device.statistics()["queue_pairs"] == 0)
        with pytest.raises(UsageError, match="depth"):
            mlx5.create_dma_engine(device, depth=0)
        for chunk in (0, (1 << 31) + 1, 1.5):
            with pytest.raises(UsageError, match="max_wr_memcpy_length"):
                mlx5.create_dma_engine(device, chunk=chunk)  # type: ignore[arg-type]


async def test_a_forgotten_engine_warns() -> None:
    async with opened() as device:
        held = [await mlx5.create_dma_engine(device)]
        with pytest.warns(ResourceWarning, match="unclosed <DmaEngine"):
            held.clear()
        await eventually(lambda: device.statistics()["queue_pairs"] == 0)


# ------------------------------------------------------------------ other devices


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_devices_limit(backend: str, run_python: Any) -> None:
    """F59: length 0 or beyond the limit is EINVAL, from libmlx5 and only at wr_complete."""
    run_python(
        """
        import sys
        import anyio
        import aiordma
        from aiordma import UsageError, emulator, mlx5
        from emulated.mlx5 import pair

        limits = emulator.Limits(max_wr_memcpy_length=4096)
        emulator.attach([emulator.EmulatedDevice(name="mlx5_0", limits=limits)])

        async def main():
            async with pair(1 << 16, memcpy=True) as p, mlx5.create_dma_engine(p.device) as engine:
                assert p.device.mlx5.max_wr_memcpy_length == 4096 == p.a.memcpy_limit == engine.max_length
                await p.a.memcpy(p.peer[:4096], p.local[:4096])
                for length in (0, 4097):
                    try:
                        p.a.memcpy(p.peer, p.local[:length])
                    except UsageError as e:
                        assert f"1 to 4096 bytes on mlx5_0, not {length}" in str(e), e
                    else:
                        raise SystemExit("copied")
                for length in (0, 1, 4095, 4096, 4097, 10000, 1 << 16):
                    p.right[:] = 0
                    assert await engine.copy(p.peer, p.local[:length]) == length
                    assert (p.right[:length] == p.left[:length]).all() and not p.right[length:].any()
                try:
                    mlx5.create_dma_engine(p.device, chunk=4097)
                except UsageError as e:
                    assert "4096" in str(e)
                else:
                    raise SystemExit("made")

        anyio.run(main, backend=sys.argv[1])
        """,
        backend,
        PYTHONPATH=TESTS,
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_device_without_memcpy(backend: str, run_python: Any) -> None:
    run_python(
        """
        import sys
        import anyio
        import aiordma
        from aiordma import UnsupportedError, emulator, mlx5

        limits = emulator.Limits(max_wr_memcpy_length=0)
        emulator.attach([emulator.EmulatedDevice(name="mlx5_0", limits=limits)])

        async def main():
            async with aiordma.open_device() as device:
                for make in (lambda: mlx5.create_dma_engine(device), lambda: mlx5.create_qp(device, memcpy=True),
                             lambda: mlx5.create_dc_initiator(device, memcpy=True)):
                    try:
                        make()
                    except UnsupportedError as e:
                        assert "mlx5_0" in str(e) and "DMA memcpy" in str(e) and "max_wr_memcpy_length" in str(e), e
                    else:
                        raise SystemExit("made")
                async with mlx5.create_qp(device, raw_wqe=True) as qp:
                    assert qp.memcpy_limit == 0

        anyio.run(main, backend=sys.argv[1])
        """,
        backend,
        PYTHONPATH=TESTS,
    )

"""numpy views moved by one RDMA operation, with no packing copy: the bytes are those of numpy's own copy."""

import math
import random
import sys
from typing import Any

import anyio
import numpy as np
import pytest
import sniffio
from emulated.core import connect
from emulated.mlx5 import opened, pair

from aiordma import (
    Access,
    AccessFlagsError,
    BufferAccessError,
    RemoteAccessError,
    RemoteBuffer,
    UsageError,
    WrFlushError,
    mlx5,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

VIEWS = 1000 if sys.gettrace() is None else 50


def random_view(rng: random.Random, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view of up to four dimensions: transposed, sliced, with steps, some of them backwards."""
    dtype = rng.choice(["u1", "<u2", "<f4", "<f8", "<c16"])
    size = np.dtype(dtype).itemsize
    base = memory[: memory.size // size * size].view(dtype)
    base = base[rng.randrange(16) :]
    shape = [rng.choice([1, 2, 3, 4, 5, 7, 8]) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.2:
        shape = [rng.randint(1, 40), rng.randint(1, 200)]
    view = base[: math.prod(shape)].reshape(shape)
    view = view.transpose(rng.sample(range(view.ndim), view.ndim))
    view = view[tuple(slice(rng.randrange(n), None, rng.choice([1, 1, 1, 2, 3])) for n in view.shape)]
    for axis in range(view.ndim):
        if view.shape[axis] <= 8 and rng.random() < 0.15:
            view = np.flip(view, axis)
    return view


async def round_trips(entries: int, seed: int, n: int) -> None:
    rng = random.Random(seed)
    async with (
        pair(1 << 17, max_umr_entries=entries) as p,
        mlx5.create_mkey(p.device, rng.choice([entries + 1, 60])) as mkey,
    ):
        done = 0
        while done < n:
            view = random_view(rng, p.left)
            try:
                data = await p.a.map_strided(mkey, view)
            except UsageError as e:
                # The device follows four levels of keys.
                assert "levels of mkeys" in str(e)  # noqa: PT017
                continue
            assert data.length == view.nbytes
            p.right[: view.nbytes] = 0
            await p.a.rdma_write(data, p.remote[: view.nbytes])
            assert p.right[: view.nbytes].tobytes() == view.tobytes(), (view.shape, view.strides)
            expected = p.left.copy()
            p.right[: view.nbytes] = rng.choice([3, 5, 7]) * np.arange(view.nbytes, dtype=np.uint8)
            offset = view.__array_interface__["data"][0] - p.left.__array_interface__["data"][0]
            target = np.ndarray(view.shape, view.dtype, expected, offset, view.strides)
            target[...] = p.right[: view.nbytes].view(view.dtype).reshape(view.shape)
            await p.a.rdma_read(data, p.remote[: view.nbytes])
            assert (p.left == expected).all(), (view.shape, view.strides)
            await p.a.invalidate(mkey)
            done += 1


async def test_random_views_make_the_round_trip() -> None:
    total = VIEWS if sniffio.current_async_library() == "asyncio" and not _uvloop() else VIEWS // 10
    limits = (2, 4, 8, 16, 51)
    for entries in limits:
        await round_trips(entries, entries, total // len(limits))


def _uvloop() -> bool:
    import asyncio

    return type(asyncio.get_running_loop()).__module__.startswith("uvloop")


async def test_columns_of_a_matrix_are_one_work_request() -> None:
    async with pair(1 << 16, max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        matrix = p.left.view(np.float64).reshape(64, 128)
        columns = await p.a.map_strided(mkey, matrix[:, 10:14])
        assert not mkey.children
        posted = p.a.statistics()["send"]["posted"]
        assert posted == 1
        await p.a.rdma_write(columns, p.remote)
        assert p.right[: columns.length].tobytes() == matrix[:, 10:14].tobytes()
        # A part of the view.
        await p.a.rdma_write(columns[32:64], p.remote)
        assert p.right[:32].tobytes() == matrix[1, 10:14].tobytes()


async def test_the_peer_reads_and_writes_a_view() -> None:
    async with pair(1 << 16, max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        block = p.left.view(np.uint32).reshape(128, 128)[3:9, 5:90:2]
        data = await p.a.map_strided(mkey, block)
        await p.b.rdma_read(p.peer[: data.length], data.remote())
        assert p.right[: data.length].tobytes() == block.tobytes()
        p.right[: data.length] = 0xAB
        await p.b.rdma_write(p.peer[: data.length], mkey.remote())
        assert (block == 0xABABABAB).all()
        assert not (p.left.view(np.uint32).reshape(128, 128)[3:9, 6:90:2] == 0xABABABAB).any()


async def test_the_mkeys_of_a_nested_layout_are_kept_and_go_with_it() -> None:
    async with pair(1 << 16, max_umr_entries=4) as p:
        mkey = await mlx5.create_mkey(p.device, 5)
        view = p.left[::-3][:60]
        for _ in range(3):
            data = await p.a.map_strided(mkey, view)
            assert 15 <= len(mkey.children) <= 21
            await p.a.rdma_write(data, p.remote)
            assert p.right[:60].tobytes() == view.tobytes()
            await p.a.invalidate(mkey)
            assert not any(child.bound for child in mkey.children)
        made = len(mkey.children)
        await p.a.map_strided(mkey, p.left[::2])
        assert len(mkey.children) == made
        assert p.device.statistics()["mkeys"] == made + 1
        await mkey.close()
        assert not p.device.statistics().get("mkeys")


async def test_a_view_deeper_than_the_device_follows_is_refused() -> None:
    async with pair(1 << 16, max_umr_entries=1) as p, mlx5.create_mkey(p.device, 2) as mkey:
        per_list = min(p.a.umr_list, 2)
        view = p.left[::-5][: per_list**4]
        await p.a.map_strided(mkey, view)
        await p.a.invalidate(mkey)
        with pytest.raises(UsageError, match="5 levels of mkeys, of which the device follows 4"):
            await p.a.map_strided(mkey, p.left[::-5][: per_list**4 + 1])
        assert not mkey.bound
        await p.a.map_strided(mkey, view)


async def test_repeated_elements_are_read_as_often() -> None:
    async with pair(1 << 12, max_umr_entries=8) as p, mlx5.create_mkey(p.device, 9) as mkey:
        view = np.broadcast_to(p.left[16:32].view(np.uint32), (3, 4))
        data = await p.a.map_strided(mkey, view)
        await p.a.rdma_write(data, p.remote)
        assert p.right[:48].tobytes() == view.tobytes()


async def test_the_array_must_lie_in_registered_memory() -> None:
    async with (
        pair(1 << 12, max_umr_entries=4) as p,
        opened("mlx5_1") as other,
        mlx5.create_mkey(p.device, 4) as mkey,
        mlx5.create_mkey(other, 4) as foreign,
    ):
        elsewhere = np.zeros(64)
        with pytest.raises(BufferAccessError, match="no open memory region of mlx5_0"):
            await p.a.map_strided(mkey, elsewhere)
        with pytest.raises(UsageError, match="isn't inside"):
            await p.a.map_strided(mkey, p.left[10:20:2], mr=p.local[0:16])
        with pytest.raises(BufferAccessError, match="doesn't tell its strides"):
            await p.a.map_strided(mkey, bytearray(10))
        with pytest.raises(UsageError, match="no elements"):
            await p.a.map_strided(mkey, p.left[10:10])
        with pytest.raises(UsageError, match="another device"):
            await p.a.map_strided(foreign, p.left[::2])
        assert not mkey.bound
        data = await p.a.map_strided(mkey, p.left[10:20:2], mr=p.local[8:24])
        await p.a.rdma_write(data, p.remote)
        assert p.right[:5].tobytes() == p.left[10:20:2].tobytes()


async def test_a_bound_mkey_keeps_its_layout() -> None:
    async with pair(1 << 12, max_umr_entries=2) as p, mlx5.create_mkey(p.device, 2) as mkey:
        view = p.left[::-7][:4]  # nested
        data = await p.a.map_strided(mkey, view)
        with pytest.raises(UsageError, match="is bound"):
            p.a.map_strided(mkey, p.left[::2])
        await p.a.rdma_write(data, p.remote)
        assert p.right[:4].tobytes() == view.tobytes()
        await p.a.invalidate(mkey)
        mapping = p.a.map_strided(mkey, p.left[::-3][:4])
        if not mapping.done:
            with pytest.raises(UsageError, match="is bound"):
                p.a.map_strided(mkey, p.left[::2])
        await mapping


async def test_access_of_a_view() -> None:
    async with pair(1 << 12, max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        frozen = np.arange(64, dtype=np.uint8)
        frozen.flags.writeable = False
        async with p.device.reg_mr(frozen, Access.REMOTE_READ):
            with pytest.raises(AccessFlagsError, match="LOCAL_WRITE"):
                await p.a.map_strided(mkey, frozen[::2])
            data = await p.a.map_strided(mkey, frozen[::2], access=Access.REMOTE_READ)
            await p.b.rdma_read(p.peer[:32], data.remote())
            assert p.right[:32].tobytes() == frozen[::2].tobytes()
            with pytest.raises(RemoteAccessError):
                await p.b.rdma_write(p.peer[:32], RemoteBuffer(0, 32, mkey.rkey))
            await mkey.close()


async def test_a_qp_in_error_leaves_the_mkey_usable_on_another() -> None:
    async with pair(1 << 12, max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        with pytest.raises(RemoteAccessError):
            await p.a.rdma_write(p.local[:8], RemoteBuffer(0, 8, 0xDEAD00))
        view = p.left[::-5][:13]  # nested
        with pytest.raises(WrFlushError):
            await p.a.map_strided(mkey, view)
        assert not mkey.bound
        async with mlx5.create_qp(p.device, max_umr_entries=4) as c, mlx5.create_qp(p.device) as d:
            await connect(c, d)
            data = await c.map_strided(mkey, view)
            await c.rdma_write(data, p.remote)
            assert p.right[:13].tobytes() == view.tobytes()


async def test_a_cancelled_mapping_goes_on() -> None:
    async with pair(1 << 12, max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        mapping = p.a.map_strided(mkey, p.left[::-5][:13])
        with anyio.CancelScope() as scope:
            scope.cancel()
            await mapping
        with anyio.fail_after(20):
            data = await mapping
        await p.a.rdma_write(data, p.remote)
        assert p.right[:13].tobytes() == p.left[::-5][:13].tobytes()


async def test_a_torch_tensor_is_taken_by_its_strides() -> None:
    class Tensor:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.array = array

        def detach(self) -> "Tensor":
            return self

        def numpy(self) -> np.ndarray[Any, Any]:
            return self.array

    Tensor.__module__ = "torch"
    async with pair(1 << 12, max_umr_entries=4) as p, mlx5.create_mkey(p.device, 4) as mkey:
        data = await p.a.map_strided(mkey, Tensor(p.left[1:100:9]))
        await p.a.rdma_write(data, p.remote)
        assert p.right[:11].tobytes() == p.left[1:100:9].tobytes()

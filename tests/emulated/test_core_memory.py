"""What can be registered, what is refused and why, and who keeps whom alive."""

# ruff: noqa: SIM117

import array
import ctypes
import mmap
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from emulated.core import DEVICE, connected

import aiordma
from aiordma import Access, AccessFlagsError, BufferAccessError, UsageError, VerbsError

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]

DTYPES = ["u1", "i2", "f2", "f4", "f8", "c16", "?", ">i4", "S5", "M8[ns]", [("a", "i4"), ("b", "f8")]]


def _sources() -> dict[str, tuple[Any, int]]:
    file = mmap.mmap(-1, 8192)
    return {
        "bytearray": (bytearray(1000), 1000),
        "memoryview": (memoryview(bytearray(1000))[100:300], 200),
        "memoryview-cast": (memoryview(bytearray(800)).cast("d", (10, 10)), 800),
        "mmap": (file, 8192),
        "mmap-part": (memoryview(file)[4096:], 4096),
        "array": (array.array("d", range(50)), 400),
        "ctypes": ((ctypes.c_uint32 * 25)(), 100),
        "one-byte": (bytearray(1), 1),
        "numpy-2d": (np.zeros((7, 9), dtype=np.float32), 252),
        "numpy-0d": (np.zeros((), dtype=np.float64), 8),
        "numpy-slice": (np.zeros((10, 8), dtype=np.uint8)[2:5], 24),
        "numpy-of-bytearray": (np.frombuffer(bytearray(64), dtype=np.int16), 64),
    }


@pytest.mark.parametrize("name", _sources())
async def test_every_writable_buffer_can_be_registered_and_transferred(name: str) -> None:
    source, size = _sources()[name]
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        async with device.reg_mr(source) as mr:
            assert (len(mr), mr.length, mr.offset) == (size, size, 0)
            with memoryview(source).cast("B") if not _is_2d(source) else mr.view() as view:
                view[:] = bytes(i * 7 & 0xFF for i in range(size))
                await p.a.rdma_write(mr, p.remote)
                assert p.right[:size] == view.tobytes()
                p.right[:size] = bytes(i * 3 & 0xFF for i in range(size))
                await p.a.rdma_read(mr, p.remote[:size])
                assert view.tobytes() == p.right[:size]
            with mr.view() as view:
                assert bytes(view) == p.right[:size]
        del mr


def _is_2d(source: Any) -> bool:
    with memoryview(source) as view:
        return view.ndim != 1 or view.format not in ("B", "b", "c")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_numpy_arrays_of_any_dtype_are_their_bytes(dtype: Any) -> None:
    array_ = np.zeros(20, dtype=dtype)
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        async with device.reg_mr(array_) as mr:
            assert len(mr) == array_.nbytes
            p.right[:] = b"\x01" * len(p.right)
            await p.a.rdma_read(mr, p.remote[: len(mr)])
        assert array_.tobytes() == b"\x01" * array_.nbytes


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "bfloat16", "float32", "float64", "bool"])
async def test_torch_cpu_tensors_are_their_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 5), dtype=getattr(torch, dtype))
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        async with device.reg_mr(tensor) as mr:
            assert mr.addr == tensor.data_ptr()
            assert len(mr) == tensor.numel() * tensor.element_size()
            p.right[:] = b"\x01" * len(p.right)
            await p.a.rdma_read(mr, p.remote[: len(mr)])
            assert tensor.view(torch.uint8).sum().item() == len(mr)
        with pytest.raises(BufferAccessError, match="contiguous"):
            device.reg_mr(tensor.T)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "source",
    [b"constant", memoryview(b"constant"), memoryview(bytearray(8)).toreadonly(), np.broadcast_to(np.zeros(1), 1)],
    ids=["bytes", "memoryview", "readonly-view", "numpy"],
)
async def test_read_only_memory_is_refused_as_a_target_and_taken_as_a_source(source: Any) -> None:
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        for access in (Access.ALL, Access.LOCAL_WRITE):
            with pytest.raises(BufferAccessError, match=r"read-only.*Access\.NONE"):
                device.reg_mr(source, access)
        for access in (Access.NONE, Access.REMOTE_READ):
            async with device.reg_mr(source, access) as mr:
                await p.a.rdma_write(mr, p.remote)
                assert p.right[: len(mr)] == bytes(source)
                assert mr.view().readonly


@pytest.mark.parametrize(
    "source",
    [
        memoryview(bytearray(16))[::2],
        np.zeros((8, 8))[:, :4],
        np.zeros((8, 8)).T[1:],
        np.zeros(16)[::2],
        np.asfortranarray(np.zeros((3, 4))),
    ],
    ids=["memoryview", "columns", "transposed", "strided", "fortran"],
)
async def test_memory_with_holes_is_refused_with_what_to_do(source: Any) -> None:
    async with aiordma.open_device(DEVICE) as device:
        for access in (Access.ALL, Access.NONE):
            with pytest.raises(BufferAccessError, match="contiguous"):
                device.reg_mr(source, access)


@pytest.mark.parametrize("source", [None, 5, "text", [1, 2], object(), 1.0, {1}, range(5)], ids=repr)
async def test_what_is_no_buffer_is_refused_by_type(source: Any) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises(BufferAccessError, match=type(source).__name__):
            device.reg_mr(source)


@pytest.mark.parametrize("source", [bytearray(), b"", np.zeros(0), memoryview(bytearray(5))[5:]], ids=str)
async def test_empty_memory_is_refused(source: Any) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises(UsageError, match="empty"):
            device.reg_mr(source, Access.NONE)


async def test_an_object_array_is_refused() -> None:
    # Its memory holds pointers of this interpreter: a peer that writes there would end the process.
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises(BufferAccessError, match=r"object|pointers"):
            device.reg_mr(np.array([object(), None], dtype=object))


@pytest.mark.parametrize("access", [Access.REMOTE_WRITE, Access.REMOTE_ATOMIC, 1 << 30, -1, "all", Access.ZERO_BASED])
async def test_flags_that_no_device_takes_are_refused_at_once(access: Any) -> None:
    async with aiordma.open_device(DEVICE) as device:
        buffer = bytearray(64)
        with pytest.raises(AccessFlagsError):
            device.reg_mr(buffer, access)
        buffer.append(1)  # it isn't exported


@pytest.mark.emulated_only("wants a device with small limits")
async def test_a_region_larger_than_the_device_takes_is_a_verbs_error_and_holds_nothing() -> None:
    async with aiordma.open_device("emulated:mlx5_small") as device:
        buffer = bytearray((1 << 20) + 1)
        with pytest.raises(VerbsError, match="ibv_reg_mr"):
            await device.reg_mr(buffer)
        buffer.append(1)
        assert device.statistics()["memory_regions"] == 0


@pytest.mark.emulated_only("wants a device with small limits")
async def test_more_regions_than_the_device_has_is_a_verbs_error_and_the_others_stay() -> None:
    async with aiordma.open_device("emulated:mlx5_small") as device:
        kept = [await device.reg_mr(bytearray(64)) for _ in range(4)]
        with pytest.raises(VerbsError) as caught:
            await device.reg_mr(bytearray(64))
        assert caught.value.verb == "ibv_reg_mr"
        await kept[0].close()
        await (await device.reg_mr(bytearray(64))).close()
        assert not kept[1].closed


# ---------------------------------------------------------------- kept


async def test_a_registered_buffer_can_not_move_or_go() -> None:
    async with aiordma.open_device(DEVICE) as device:
        buffer, file, numbers = bytearray(64), mmap.mmap(-1, 4096), array.array("i", [1, 2])
        mrs = [await device.reg_mr(thing) for thing in (buffer, file, numbers)]
        with pytest.raises(BufferError):
            buffer.append(1)
        with pytest.raises(BufferError):
            file.close()
        with pytest.raises(BufferError):
            numbers.append(1)
        for mr in mrs:
            await mr.close()
        buffer.append(1)
        numbers.append(1)
        file.close()


async def test_memory_whose_owner_dropped_it_stays_while_it_is_registered() -> None:
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        async with device.reg_mr(np.full(10_000, 7, dtype=np.uint8)) as mr:
            clutter = [np.zeros(10_000, dtype=np.uint8) for _ in range(20)]
            await p.a.rdma_write(mr, p.remote)
            assert p.right[:10_000] == b"\x07" * 10_000
            del clutter


async def test_a_view_outlives_its_region_without_touching_freed_memory() -> None:
    async with aiordma.open_device(DEVICE) as device:
        mr = await device.reg_mr(bytearray(b"still here"))
        view = mr.view()
        await mr.close()
        assert bytes(view) == b"still here"
        with pytest.raises(aiordma.ClosedError):
            mr.view()
        view.release()


async def test_one_buffer_may_be_registered_several_times_with_keys_of_their_own() -> None:
    buffer = bytearray(64)
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        async with device.reg_mr(buffer) as first, device.reg_mr(buffer, Access.REMOTE_READ) as second:
            assert first.lkey != second.lkey
            assert first.addr == second.addr
            await p.a.rdma_write(second, p.remote)
            await first.close()
            await p.a.rdma_write(second, p.remote)
            with pytest.raises(BufferError):
                buffer.append(1)
        buffer.append(1)


async def test_many_registrations_at_once_all_come_and_go() -> None:
    async with aiordma.open_device(DEVICE) as device:
        buffers = [bytearray(100 + i) for i in range(200)]
        mrs = []

        async def register(buffer: bytearray) -> None:
            mrs.append(await device.reg_mr(buffer))

        async with anyio.create_task_group() as group:
            for buffer in buffers:
                group.start_soon(register, buffer)
        assert len({mr.lkey for mr in mrs}) == 200
        assert device.statistics()["memory_regions"] == 200
        async with anyio.create_task_group() as group:
            for mr in mrs:
                group.start_soon(_close, mr)
        assert device.statistics()["memory_regions"] == 0
        for buffer in buffers:
            buffer.append(1)


async def _close(mr: aiordma.MemoryRegion) -> None:
    await mr.close()


async def test_a_stale_key_is_refused_by_the_device() -> None:
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        mr = await device.reg_mr(bytearray(64))
        remote = mr.remote()
        await mr.close()
        with pytest.raises(aiordma.RemoteAccessError, match=f"{remote.rkey:#x}"):
            await p.a.rdma_write(p.local[:8], remote)


@pytest.mark.slow_in_vm
async def test_registering_a_gigabyte_leaves_the_loop_running() -> None:
    file = mmap.mmap(-1, 1 << 30)
    async with aiordma.open_device(DEVICE) as device:
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            async with device.reg_mr(file) as mr:
                assert len(mr) == 1 << 30
            group.cancel_scope.cancel()
        assert turns > 1
    file.close()


async def test_pyverbs_regions_can_be_wrapped_and_pyverbs_can_import_ours() -> None:
    from pyverbs.mr import MR

    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        theirs = MR(device.pd, 4096, int(Access.ALL))
        wrapped = device.wrap_mr(theirs, Access.ALL)
        theirs.write("hello", 5)
        await p.a.rdma_write(wrapped[:5], p.remote)
        assert p.right[:5] == b"hello"
        await p.b.rdma_write(p.peer[:5], wrapped.remote()[100:])
        assert theirs.read(5, 100) == b"hello"
        await wrapped.close()
        with pytest.raises(aiordma.ClosedError):
            p.a.rdma_write(wrapped[:5], p.remote)
        theirs.close()

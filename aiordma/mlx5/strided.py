"""Mapping strided memory onto an mkey: one RDMA operation moves a numpy view, with no packing copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiordma._memory import MemorySlice
from aiordma._offload import Control, until
from aiordma._operation import Completion
from aiordma._waitable import Signal
from aiordma.errors import BufferAccessError, UsageError
from aiordma.memory import MemoryRegion
from aiordma.mlx5.layout import Interleaved, Limits, Node, Piece, extent, plan
from aiordma.mlx5.umr import Mkey, create

if TYPE_CHECKING:
    from aiordma.device import Device
    from aiordma.mlx5.qp import Mlx5QueuePair

__all__ = ["map_strided"]


class _View:
    """Address, shape and strides of an array, whatever library made it."""

    def __init__(self, array: Any) -> None:
        source = array
        if type(array).__module__.partition(".")[0] == "torch":
            source = array.detach().numpy()
        interface = getattr(source, "__array_interface__", None)
        if interface is None:
            raise BufferAccessError(
                f"{type(array).__name__} doesn't tell its strides: pass a numpy array or view (or a CPU tensor)"
            )
        self.keep = source
        self.address: int = interface["data"][0]
        self.shape: tuple[int, ...] = interface["shape"]
        if 0 in self.shape:
            raise UsageError(f"an array of shape {self.shape} has no elements")
        self.itemsize: int = source.itemsize
        self.strides: tuple[int, ...] = source.strides
        self.low, self.high = extent(self.shape, self.strides, self.itemsize)


def _covering(device: Device, view: _View) -> MemoryRegion:
    """The open region that holds all of the view."""
    first, last = view.address + view.low, view.address + view.high
    for mr in device.memory_regions():
        if mr.addr <= first and last <= mr.addr + mr.length:
            return mr
    raise BufferAccessError(
        f"no open memory region of {device.name} holds the array's bytes ({first:#x}..{last:#x}): register the array that "
        "it's a view of"
    )


async def map_strided(qp: Mlx5QueuePair, mkey: Mkey, array: Any, mr: MemorySlice | None, access: int) -> MemorySlice:
    """Inside a control operation: see :meth:`Mlx5QueuePair.map_strided`."""
    device = qp.device
    view = _View(array)
    region = mr if mr is not None else _covering(device, view)
    base = view.address - region.addr
    if base + view.low < 0 or base + view.high > region.length:
        raise UsageError(f"the array isn't inside {region!r}")
    # An interleaved layout takes one entry of the mkey for its header.
    limits = Limits(min(qp.umr_list, mkey.max_entries), min(qp.umr_interleaved, mkey.max_entries - 1), qp.layout_depth)
    node = plan(view.shape, view.strides, view.itemsize, limits)
    children = _Children(mkey)
    posted: list[Completion] = []
    mkey.mapping = True
    try:
        await _register(qp, mkey, node, region, base, access, children, posted)
        for registration in posted:
            await _finished(device.control, registration)
    except BaseException:
        # The first that the device refused is what counts: the others failed, or could no longer be posted, because of it.
        errors = [await _error(device.control, registration) for registration in posted]
        mkey.unbind_children()
        for error in errors:
            if error is not None:
                raise error from None
        raise
    finally:
        mkey.mapping = False
        mkey.children = children.used + children.free
    return mkey.whole()


class _Children:
    """The mkeys that a nested layout is made of. ``used`` has each before those that it's made of in turn, which is the
    order to invalidate them in."""

    def __init__(self, mkey: Mkey) -> None:
        self._mkey = mkey
        self.free = list(mkey.children)
        self.used: list[Mkey] = []

    async def take(self) -> Mkey:
        child = self.free.pop() if self.free else await create(self._mkey.device, self._mkey.max_entries)
        self.used.append(child)
        return child


async def _register(
    qp: Mlx5QueuePair,
    mkey: Mkey,
    node: Node,
    region: MemorySlice,
    base: int,
    access: int,
    children: _Children,
    posted: list[Completion],
) -> None:
    """Posts the layout of ``node`` for ``mkey``, and before it those of the mkeys that it's made of."""
    if isinstance(node, Interleaved):
        span = (node.repeat - 1) * node.stride + node.length
        blocks = [
            (region[base + offset : base + offset + span], node.length, node.stride - node.length)
            for offset in node.offsets
        ]
        posted.append(qp.register_interleaved(mkey, blocks, repeat_count=node.repeat, access=access))
        return
    entries: list[MemorySlice] = []
    for entry in (node,) if isinstance(node, Piece) else node.entries:
        if isinstance(entry, Piece):
            start = base + entry.offset
            entries.append(region[start : start + entry.length])
            continue
        child = await children.take()
        await _register(qp, child, entry, region, base, access, children, posted)
        entries.append(child.whole())
    posted.append(qp.register_list(mkey, entries, access=access))


async def _error(control: Control, operation: Completion) -> BaseException | None:
    over = Signal(control.hooks)
    operation.on_finish(over.finish)
    await until(over)
    return operation.exception()


async def _finished(control: Control, operation: Completion) -> None:
    error = await _error(control, operation)
    if error is not None:
        raise error

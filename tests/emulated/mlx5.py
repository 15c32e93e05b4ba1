"""What the tests of mlx5's own work requests share."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from emulated.core import connect

import aiordma
from aiordma import Device, MemoryRegion, RemoteBuffer, mlx5
from aiordma.mlx5 import DCTarget, DCTInfo, Mlx5QueuePair

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# enum ibv_wc_opcode and enum mlx5dv_wc_opcode (mlx5dv.h)
WC_LOCAL_INV, WC_UMR, WC_DRIVER2, WC_MEMCPY = 6, 135, 136, 137


@dataclass
class Mlx5Pair:
    """Two connected QPs of one device, ``a`` with mlx5's work requests, and memory on both sides.

    ``left`` is random, ``right`` zeros.
    """

    device: Device
    a: Mlx5QueuePair
    b: Mlx5QueuePair
    left: Bytes
    right: Bytes
    local: MemoryRegion
    peer: MemoryRegion
    remote: RemoteBuffer


@contextlib.asynccontextmanager
async def opened(name: str = "mlx5_0") -> AsyncIterator[Device]:
    """A device of its own."""
    async with aiordma.open_device(f"emulated:{name}") as device:
        yield device


@contextlib.asynccontextmanager
async def pair(size: int = 1 << 16, *, device: Device | None = None, **options: Any) -> AsyncIterator[Mlx5Pair]:
    """A Mlx5Pair; ``options`` are those of ``a``, plus ``min_rnr_timer``."""
    left = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    right = np.zeros(size, np.uint8)
    options.setdefault("min_rnr_timer", 1)
    async with contextlib.AsyncExitStack() as stack:
        on = device if device is not None else await stack.enter_async_context(opened())
        local = await stack.enter_async_context(on.reg_mr(left))
        peer = await stack.enter_async_context(on.reg_mr(right))
        a = await stack.enter_async_context(mlx5.create_qp(on, **options))
        b = await stack.enter_async_context(mlx5.create_qp(on, min_rnr_timer=1))
        await connect(a, b)
        yield Mlx5Pair(on, a, b, left, right, local, peer, peer.remote())


def wrong_key(info: DCTInfo) -> DCTInfo:
    """The same target with another DC access key."""
    return DCTInfo(info.dctn, info.dc_key ^ 1, info.gid, info.gid_type, info.lid)


@contextlib.asynccontextmanager
async def targets(
    device: Device, n: int, size: int = 4096
) -> AsyncIterator[list[tuple[DCTarget, Bytes, MemoryRegion]]]:
    """DC targets on one SRQ, each with zeroed memory of its own."""
    async with contextlib.AsyncExitStack() as stack:
        srq = await stack.enter_async_context(device.create_srq(256))
        made = []
        for _ in range(n):
            buffer = np.zeros(size, np.uint8)
            mr = await stack.enter_async_context(device.reg_mr(buffer))
            made.append((await stack.enter_async_context(mlx5.create_dc_target(device, srq)), buffer, mr))
        yield made

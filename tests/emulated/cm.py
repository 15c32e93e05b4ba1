"""What the tests of connections share. They run on any device whose address is given in the environment."""

import contextlib
import gc
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import aiordma
from aiordma import Connection, Device, Listener, Request
from aiordma.cm._shared import _shared

#: An address of this machine that leads to DEVICE, and the device's name.
HOST = os.environ.get("AIORDMA_TEST_CM_HOST", "127.0.0.1")
HOST6 = os.environ.get("AIORDMA_TEST_CM_HOST6", "::1")
DEVICE = os.environ.get("AIORDMA_TEST_CM_DEVICE", "emulated:mlx5_0")
EMULATED = DEVICE.startswith("emulated")
VIAS = ["tcp"]

both = pytest.mark.parametrize("via", VIAS)


def fds() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def qps(device: Device) -> int:
    """QPs that the device has."""
    found: int = device.statistics()["queue_pairs"]
    return found


class World:
    """A device and a listener on it; :meth:`serve` accepts what comes."""

    def __init__(self, device: Device, listener: Listener, via: Any, host: str) -> None:
        self.device = device
        self.listener = listener
        self.via = via
        self.host = host

    def connect(self, **options: Any) -> Any:
        """A connection to the listener."""
        options.setdefault("device", self.device)
        options.setdefault("via", self.via)
        return aiordma.connect(self.host, self.listener.port, **options)

    async def both(self, **options: Any) -> tuple[Connection, Connection]:
        """A pair of connections, connecting side first. ``accept_...``: options of the other side."""
        theirs = {key.removeprefix("accept_"): options.pop(key) for key in list(options) if key.startswith("accept_")}
        found: list[Connection] = []

        async def accept() -> None:
            request = await self.listener.accept()
            found.append(await request.accept(**theirs))

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            mine = await self.connect(**options)
        return mine, found[0]

    async def serve(self, handle: Callable[[Request], Awaitable[Any]]) -> None:
        """Hands each request to a task of its own."""
        async with anyio.create_task_group() as group:
            async for request in self.listener:
                group.start_soon(handle, request)


async def hold(request: Request) -> None:
    """Accepts, and keeps the connection until the peer leaves."""
    async with request.accept() as connection:
        await connection.wait_disconnected()


@contextlib.asynccontextmanager
async def world(via: str, host: str = HOST, **options: Any) -> AsyncIterator[World]:
    """A World; at its end nothing may be left of what was connected in it."""
    async with aiordma.open_device(DEVICE) as device:
        async with aiordma.listen(host, via=via, device=device, **options) as listener:
            yield World(device, listener, via, host)
        assert qps(device) == 0, "a connection left its QP"
        assert device.statistics().get("connections", 0) == 0, "a connection is still open"
    assert not _shared, "a device or an event channel is still shared"


async def let_go() -> None:
    """What was dropped is collected, and what follows from that is done."""
    for _ in range(3):
        await checkpoint()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    await anyio.sleep(0.01)

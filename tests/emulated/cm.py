"""What the tests of connections share. They run on any device whose address is given in the environment."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from emulated import ipc

import aiordma
from aiordma import Connection, Device, DisconnectedError, Listener, Request
from aiordma.cm._shared import _shared

#: An address of this machine that leads to DEVICE, and the device's name.
HOST = os.environ.get("AIORDMA_TEST_CM_HOST", "127.0.0.1")
HOST6 = os.environ.get("AIORDMA_TEST_CM_HOST6", "::1")
DEVICE = os.environ.get("AIORDMA_TEST_CM_DEVICE", "emulated:mlx5_0")
EMULATED = DEVICE.startswith("emulated")
VIAS = ["tcp", "rdma_cm"]

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
    """Accepts, and keeps the connection until the peer leaves, which it may before this side knows that it's there."""
    with contextlib.suppress(DisconnectedError):
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


PEER = """
import asyncio, os, signal, sys
import aiordma
from aiordma import QPConfig

VIA, HOST, PORT, DEVICE = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def say(*words):
    print(*words, flush=True)

def hear():
    return sys.stdin.readline().strip()
"""


class Peer:
    """A process of its own: a program that says lines and hears lines. It's killed at the end if it still lives."""

    def __init__(self, program: str, via: str, host: str, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER + textwrap.dedent(program), via, host, str(port), DEVICE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def heard(self) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = await anyio.to_thread.run_sync(self._process.stdout.readline, abandon_on_cancel=True)
        assert line, f"the peer has ended: {self._process.wait(60)}"
        return line.strip()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it, and wait until all its threads stand."""
        ipc.stop(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    async def ended(self) -> int:
        return await anyio.to_thread.run_sync(self._process.wait, 30)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def peer(program: str, via: str, host: str = HOST, port: int = 0) -> Iterator[Peer]:
    """A Peer for the length of a block."""
    started = Peer(program, via, host, port)
    try:
        yield started
    finally:
        started.close()

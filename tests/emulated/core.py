"""What the tests of the async core share: connected QPs, and ways to keep work requests in flight."""

import contextlib
import functools
import gc
import json
import logging
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import sniffio
from anyio.lowlevel import checkpoint

import aiordma
from aiordma import (
    Completion,
    CompletionError,
    Device,
    LocalLengthError,
    LocalQpOperationError,
    MemoryRegion,
    QueuePair,
    RemoteBuffer,
    RemoteInvalidRequestError,
    RemoteOperationError,
    emulator,
)

#: The device that tests run on (see docs/development.md). Those marked ``any_device`` do on any.
DEVICE = os.environ.get("AIORDMA_DEVICE") or "emulated:mlx5_0"
#: Another device that DEVICE reaches over a network, or none: then a Pair is of one device.
PEER_DEVICE = os.environ.get("AIORDMA_PEER_DEVICE") or None
ON_EMULATED = DEVICE.partition(":")[0] == "emulated"
#: Another device than DEVICE, for what only wants two; there may be none.
OTHER_DEVICE = PEER_DEVICE or ("emulated:mlx5_1" if ON_EMULATED else None)
#: Soft-RoCE, which differs in some ways from what tests expect otherwise (docs/soft-roce.md).
ON_RXE = DEVICE.startswith("rxe")
#: How a message ends that is longer than its receive, at the sender and at the receiver.
TOO_LONG_SENT: tuple[type[CompletionError], ...] = (RemoteInvalidRequestError,)
TOO_LONG_RECEIVED: tuple[type[CompletionError], ...] = (LocalLengthError,)
if ON_RXE:
    TOO_LONG_SENT += (RemoteOperationError,)
    TOO_LONG_RECEIVED += (LocalQpOperationError,)


@dataclass
class Pair:
    """Two connected QPs; ``a`` of ``device`` is the active one, ``b`` of ``other`` its peer. Both may be one device."""

    device: Device
    other: Device
    a: QueuePair
    b: QueuePair
    left: bytearray
    right: bytearray
    local: MemoryRegion
    peer: MemoryRegion
    remote: RemoteBuffer = field(init=False)

    def __post_init__(self) -> None:
        self.remote = self.peer.remote()

    def block(self) -> Completion:
        """A send for which the peer has no receive: with it everything behind it stays in flight, until unblock()."""
        return self.a.send(None)

    def unblock(self) -> Completion:
        """The receive that block() waits for."""
        return self.b.recv(None)

    async def check(self) -> None:
        """Both directions work."""
        for here, there, source, sink in (
            (self.a, self.b, self.local, self.peer),
            (self.b, self.a, self.peer, self.local),
        ):
            receive = there.recv(sink[-8:])
            source.view()[-16:-8] = b"aiordma!"
            with anyio.fail_after(20):
                await here.send(source[-16:-8])
                await receive
            assert bytes(sink.view()[-8:]) == b"aiordma!"
            await here.rdma_write(source[-16:-8], sink.remote()[-16:-8])


async def connect(a: QueuePair, b: QueuePair) -> None:
    """Connects two QPs of one process."""
    await a.connect(b.info)
    await b.connect(a.info)


@contextlib.asynccontextmanager
async def connected(
    device: Device, size: int = 1 << 16, *, other: Device | None = None, **config: Any
) -> AsyncIterator[Pair]:
    """A Pair with ``size`` bytes on each side, the peer's on ``other`` if that's given.

    The QPs' ``min_rnr_timer`` is short: tests wait for it.
    """
    left, right = bytearray(size), bytearray(size)
    config.setdefault("min_rnr_timer", 1)
    other = other or device
    async with (
        device.reg_mr(left) as local,
        other.reg_mr(right) as peer,
        device.create_qp(**config) as a,
        other.create_qp(**config) as b,
    ):
        await connect(a, b)
        yield Pair(device, other, a, b, left, right, local, peer)


@contextlib.asynccontextmanager
async def open_pair(size: int = 1 << 16, **config: Any) -> AsyncIterator[Pair]:
    """The same with devices of its own: what tests run on, and that one's peer if there is one."""
    async with contextlib.AsyncExitStack() as stack:
        device = await stack.enter_async_context(aiordma.open_device(DEVICE))
        other = await stack.enter_async_context(aiordma.open_device(PEER_DEVICE)) if PEER_DEVICE else None
        yield await stack.enter_async_context(connected(device, size, other=other, **config))


def object_counts(device: str = DEVICE) -> dict[str, int]:
    """How many verbs objects of each kind a device has at the moment, beside those that it had before the tests."""
    if ON_EMULATED:
        return emulator.object_counts(device.partition(":")[2] or device)
    counts = _kernel_counts(device)
    before = _counts_before.setdefault(device, counts)
    return {kind: number - before[kind] for kind, number in counts.items()}


# The kernel has some of its own: rxe makes a QP for management messages with each device.
_counts_before: dict[str, dict[str, int]] = {}


@functools.cache
def why_uncounted() -> str:
    """Why the objects on another device than the emulated NIC aren't counted; empty where they are."""
    if ON_EMULATED:
        return ""
    try:
        done = _resources(DEVICE)
    except FileNotFoundError:
        return "there is no rdma (iproute2)"
    return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""


def _resources(device: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["rdma", "-j", "resource", "show", device], capture_output=True, text=True, check=False, timeout=60
    )


def _kernel_counts(device: str) -> dict[str, int]:
    if why_uncounted():
        return {}
    answer = _resources(device)
    assert answer.returncode == 0, answer.stderr
    (counts,) = json.loads(answer.stdout)
    return {kind: number for kind, number in counts.items() if isinstance(number, int) and kind != "ifindex"}


async def eventually(condition: Callable[[], object]) -> None:
    """Waits for something that announces itself to nobody."""
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)


def goes_quiet(pid: int, cpu_time: Callable[[], float], seconds: float, share: float) -> bool:
    """Whether there comes a time of ``seconds`` in which a process's ``cpu_time()`` grows by less than that share of them.

    Who is idle gets there, if not at once on a busy machine. Who spins for ever doesn't: if it gets no CPU, it wants one.
    """

    def wants_a_cpu() -> bool:
        for task in Path(f"/proc/{pid}/task").iterdir():
            # One that has just ended has no state, and of the one that asks for the time nothing is to be learnt.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if task.name != str(pid) and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                    return True
        return False

    for _ in range(20):
        before = cpu_time()
        time.sleep(seconds)
        if cpu_time() - before < share * seconds and not wants_a_cpu():
            return True
    return False


async def settle() -> None:
    """Lets everything that is ready to run do so."""
    for _ in range(5):
        await checkpoint()
    gc.collect()
    for _ in range(5):
        await checkpoint()


@dataclass
class Reports:
    """What was reported of errors that nobody awaited."""

    found: list[BaseException] = field(default_factory=list)


@contextlib.contextmanager
def reported() -> Iterator[Reports]:
    """Catches reports: the loop's exception handler on asyncio and uvloop, the log on trio. In a coroutine."""
    reports = Reports()
    if sniffio.current_async_library() == "asyncio":
        import asyncio

        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(lambda _, context: reports.found.append(context["exception"]))
        try:
            yield reports
        finally:
            gc.collect()
            loop.set_exception_handler(before)
        return

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                reports.found.append(record.exc_info[1])

    handler = Handler()
    log = logging.getLogger("aiordma")
    log.addHandler(handler)
    try:
        yield reports
    finally:
        gc.collect()
        log.removeHandler(handler)


def complaints(stderr: str) -> str:
    """What a program in development mode had to say, but for what asyncio says of a busy machine: steps of the loop that
    took more than 100 ms."""
    return re.sub(r"^Executing <.*> took [0-9.]+ seconds\n", "", stderr, flags=re.MULTILINE)


def rss_kib() -> int:
    """Resident memory of this process."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    pytest.fail("/proc/self/status has no VmRSS")

"""A peer that is killed in the middle of everything: what is under way ends with "retries exceeded", whatever it was."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from emulated.core import DEVICE

import aiordma
from aiordma import (
    Completion,
    Device,
    MemoryRegion,
    QueuePair,
    RemoteBuffer,
    RetryExceededError,
    WrFlushError,
    exchange,
)

#: Makes a child for each line that comes, which connects and then only is there.
NURSERY = """
import asyncio, os, signal, sys
import aiordma, aiordma.emulator
from aiordma import exchange

async def child():
    async with (
        aiordma.open_device("emulated") as device,
        device.reg_mr(bytearray(3 << 20)) as mr,
        device.create_qp(max_recv_wr=64) as qp,
        await exchange.serve("127.0.0.1") as listener,
    ):
        receives = [qp.recv(mr) for _ in range(64)]
        print(os.getpid(), listener.port, flush=True)
        await listener.accept(qp, buffers={"memory": mr.remote()})
        await asyncio.sleep(100)

aiordma.emulator.attach()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not os.fork():
        asyncio.run(child())
"""

ROUNDS = 4


@pytest.fixture(scope="module")
def nursery() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as p:
        yield p
        p.kill()


def make_child(nursery: "subprocess.Popen[str]") -> tuple[int, int]:
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write("\n")
    nursery.stdin.flush()
    pid, port = nursery.stdout.readline().split()
    return int(pid), int(port)


def operation(kind: str, qp: QueuePair, mr: MemoryRegion, there: RemoteBuffer, length: int) -> Completion:
    match kind:
        case "read":
            return qp.rdma_read(mr[:length], there[:length])
        case "write":
            return qp.rdma_write(mr[:length], there[:length])
        case "send":
            return qp.send(mr[:length])
        case _:
            return qp.atomic_fetch_add(mr[:8], there[:8], 1)


async def killed(
    nursery: "subprocess.Popen[str]",
    kind: str,
    device: Device,
    mr: MemoryRegion,
    length: int,
    left: int,
    timeout: int,
) -> bool:
    """Kills a peer after so many operations. False: it didn't get that far, since the peer had to wait for a CPU too long."""
    pid, port = make_child(nursery)
    try:
        async with device.create_qp(timeout=timeout, retry_cnt=2) as qp:
            there = (await exchange.connect("127.0.0.1", port, qp)).buffers["memory"]
            under_way = [operation(kind, qp, mr, there, length) for _ in range(8)]
            for _ in range(left):
                try:
                    await under_way.pop(0)
                except RetryExceededError:
                    for one in under_way:
                        with contextlib.suppress(WrFlushError):
                            await one
                    return False
                under_way.append(operation(kind, qp, mr, there, length))
            os.kill(pid, signal.SIGKILL)
            pid = 0
            failed = False
            while not failed:
                under_way.append(operation(kind, qp, mr, there, length))
                try:
                    await under_way.pop(0)
                except RetryExceededError:
                    failed = True
            for one in under_way:
                with pytest.raises(WrFlushError):
                    await one
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
    return True


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["read", "write", "send", "atomic"])
async def test_a_peer_killed_at_any_moment_is_a_timeout(nursery: "subprocess.Popen[str]", kind: str) -> None:
    rng = random.Random(kind)
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(3 << 20)) as mr:
        for _ in range(ROUNDS):
            length, left = rng.choice([9000, 1 << 20, 3 << 20]), rng.randint(0, 40)
            timeout = 12  # 17 ms, three times
            while not await killed(nursery, kind, device, mr, length, left, timeout):
                timeout += 1
                assert timeout < 20, "a peer that lives doesn't answer"

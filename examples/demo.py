"""Sends a file between two endpoints by RDMA writes, checks it, and measures small writes.

Run it:  make demo            a generated file of 64 MiB
         make demo FILE=path  a file of yours
         python examples/demo.py --help

The endpoints are two tasks, each with a device context of its own, which share nothing but a TCP port to meet at. The file
streams through a ring of registered chunks on each side, so its size doesn't matter:

    sender    reads a chunk into its ring, writes it into the receiver's by RDMA, with the length as immediate value
    receiver  is woken by the immediate value, takes the chunk, and sends an empty message: that slot is free again
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import stat
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

import aiordma
from aiordma import exchange, mlx5

MIB = 1 << 20
OUTSTANDING = 100
BAD_FILE, FAILED, INTERRUPTED = 2, 1, 130


class FileProblem(Exception):
    """Something about a file that its owner has to put right."""


class ChecksumProblem(Exception):
    """What no reliable connection lets happen."""


# ---------------------------------------------------------------- the file


@dataclass
class Source:
    """What is sent."""

    file: BinaryIO
    name: str
    size: int

    def fill(self, view: memoryview, digest: Any) -> int:
        """Read the next bytes into a slot of the ring; fewer than fit only at the end. In a worker thread."""
        done = 0
        try:
            while done < len(view) and (n := self.file.readinto(view[done:])):  # type: ignore[attr-defined]
                done += n
        except OSError as e:
            raise FileProblem(f"reading {self.name}: {e.strerror}") from e
        digest.update(view[:done])
        return done


@contextlib.contextmanager
def open_source(path: str | None, generated_mib: int) -> Iterator[Source]:
    if path is None:
        with tempfile.TemporaryFile(buffering=0) as file:
            for _ in range(generated_mib):
                file.write(os.urandom(MIB))
            file.seek(0)
            yield Source(file, "a generated file", generated_mib * MIB)
        return
    try:
        # Asked before it's opened: opening a named pipe would wait for a writer.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise FileProblem(f"{path}: not a regular file")
        file = open(path, "rb", buffering=0)  # noqa: SIM115
    except OSError as e:
        raise FileProblem(f"{path}: {e.strerror}") from e
    with file:
        yield Source(file, path, found.st_size)


@contextlib.contextmanager
def open_copy(path: str | None, source: str | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    try:
        if source is not None and os.path.exists(path) and os.path.samefile(path, source):
            raise FileProblem(f"{path}: is the file that is sent")
        file = open(path, "wb")  # noqa: SIM115
    except OSError as e:
        raise FileProblem(f"{path}: {e.strerror}") from e
    with file:
        yield file


# ---------------------------------------------------------------- progress


@contextlib.contextmanager
def progress_of(size: int) -> Iterator[Callable[[int], None]]:
    """What to call with the bytes that are done: a bar on a terminal, a line now and then elsewhere."""
    if sys.stdout.isatty():
        bar = Progress("sending", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with bar:
            task = bar.add_task("sending", total=size)
            yield lambda done: bar.update(task, completed=done)
        return
    last = time.monotonic()

    def line(done: int) -> None:
        nonlocal last
        if done >= size or time.monotonic() - last > 1:
            last = time.monotonic()
            print(f"sent {done / MIB:.1f} of {size / MIB:.1f} MiB", flush=True)

    yield line


# ---------------------------------------------------------------- the two endpoints


async def send_file(
    qp: aiordma.QueuePair,
    ring: aiordma.MemoryRegion,
    window: aiordma.RemoteBuffer,
    chunk: int,
    source: Source,
    progress: Callable[[int], None],
) -> tuple[str, int]:
    """Stream the file; return its checksum and length when the receiver says that it has the same."""
    slots = len(ring) // chunk
    digest = hashlib.sha256()
    # The receiver answers each chunk, in order, and the checksum at the end.
    answers = deque(qp.recv(None) for _ in range(slots + 1))
    written = answered = sent = 0
    while True:
        if written - answered == slots:
            await answers.popleft()
            answers.append(qp.recv(None))
            answered += 1
        at = written % slots * chunk
        # Files have no readiness that a loop could wait for: reading blocks, so it's for a thread, as is hashing.
        length = await asyncio.to_thread(source.fill, ring.view()[at : at + chunk], digest)
        if not length:
            break
        await qp.rdma_write(ring[at : at + length], window[at : at + length], imm=length)
        written += 1
        sent += length
        progress(sent)
    await qp.send(digest.digest())
    for _ in range(written - answered):
        await answers.popleft()
    verdict = await answers.popleft()
    if not verdict.imm_data:
        raise ChecksumProblem("what arrived has another checksum than what was sent")
    return digest.hexdigest(), sent


async def receive_file(
    qp: aiordma.QueuePair,
    ring: aiordma.MemoryRegion,
    checksum: aiordma.MemoryRegion,
    messages: deque[aiordma.Completion],
    chunk: int,
    copy: BinaryIO | None,
) -> None:
    """Take chunks until the sender's checksum comes; compare it with that of what arrived, and tell the sender."""
    slots = len(ring) // chunk
    digest = hashlib.sha256()

    def take(view: memoryview) -> None:
        digest.update(view)
        if copy is not None:
            try:
                copy.write(view)
            except OSError as e:
                raise FileProblem(f"writing {copy.name}: {e.strerror}") from e

    number = 0
    while True:
        message = await messages.popleft()
        messages.append(qp.recv(checksum))
        length = message.imm_data
        if length is None:  # a message of another kind: the checksum
            break
        at = number % slots * chunk
        await asyncio.to_thread(take, ring.view()[at : at + length])
        await qp.send(None, imm=0)
        number += 1
    await qp.send(None, imm=int(bytes(checksum.view()) == digest.digest()))


async def receiver(device: aiordma.Device, options: argparse.Namespace, port: asyncio.Future[int], copy: Any) -> None:
    async with (
        device.reg_mr(bytearray(options.chunk * options.slots)) as ring,
        device.reg_mr(bytearray(hashlib.sha256().digest_size)) as checksum,
        device.create_qp(max_recv_wr=options.slots + 1) as qp,
        await exchange.serve("127.0.0.1") as listener,
    ):
        # One receive a slot, and one for the checksum, which is the only message with a body.
        messages = deque(qp.recv(checksum) for _ in range(options.slots + 1))
        port.set_result(listener.port)
        await listener.accept(qp, buffers={"ring": ring.remote()})
        await receive_file(qp, ring, checksum, messages, options.chunk, copy)
        # What the sender measures now it does alone: RDMA writes ask nothing of this side. The next message is goodbye.
        await messages.popleft()


async def sender(
    device: aiordma.Device, options: argparse.Namespace, port: asyncio.Future[int], source: Source
) -> None:
    async with (
        device.reg_mr(bytearray(options.chunk * options.slots)) as ring,
        device.create_qp(max_send_wr=128, max_recv_wr=options.slots + 1) as qp,
    ):
        peer = await exchange.connect("127.0.0.1", await port, qp)
        window = peer.buffers["ring"]
        began = time.perf_counter()
        with progress_of(source.size) as progress:
            checksum, sent = await send_file(qp, ring, window, options.chunk, source, progress)
        seconds = time.perf_counter() - began
        print(f"SHA-256  {checksum}, the same on both sides")
        if sent:
            print(
                f"file     {sent / MIB:,.1f} MiB in {seconds:.3f} s: {sent / seconds / 1e9:.2f} GB/s, with reading it and "
                "two checksums"
            )
        else:
            print("file     empty: nothing to transfer")
        await measure(qp, ring, window, options)
        await qp.send(None, imm=0)


# ---------------------------------------------------------------- measuring


async def measure(
    qp: aiordma.QueuePair, ring: aiordma.MemoryRegion, window: aiordma.RemoteBuffer, options: argparse.Namespace
) -> None:
    print(f"writes   of {options.chunk // 1024} KiB: {await bandwidth(qp, ring, window, options.chunk) / 1e9:.2f} GB/s")
    small, there, n = ring[0:8], window[0:8], options.operations

    for _ in range(min(n, 1000)):  # warm up
        await qp.rdma_write(small, there)

    times = []
    for _ in range(n):
        began = time.perf_counter_ns()
        await qp.rdma_write(small, there)
        times.append(time.perf_counter_ns() - began)
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    print(f"latency  of an awaited 8-byte write: p50 {cuts[49] / 1000:.2f} us, p99 {cuts[98] / 1000:.2f} us")

    began = time.perf_counter_ns()
    window_of = deque(qp.rdma_write(small, there) for _ in range(min(n, OUTSTANDING)))
    for _ in range(n - len(window_of)):
        await window_of.popleft()
        window_of.append(qp.rdma_write(small, there))
    for write in window_of:
        await write
    rate("each awaited, 100 outstanding", n, time.perf_counter_ns() - began)

    began = time.perf_counter_ns()
    for _ in range(max(1, n // OUTSTANDING)):
        await qp.rdma_write_many((small, there) for _ in range(OUTSTANDING))
    rate("in batches of 100", max(1, n // OUTSTANDING) * OUTSTANDING, time.perf_counter_ns() - began)


def rate(how: str, operations: int, ns: int) -> None:
    print(f"rate     of 8-byte writes, {how}: {operations * 1e9 / ns:,.0f} a second")


async def bandwidth(
    qp: aiordma.QueuePair, ring: aiordma.MemoryRegion, window: aiordma.RemoteBuffer, chunk: int
) -> float:
    """Bytes a second of RDMA writes alone, a ring full of them outstanding."""
    slots = [(ring[at : at + chunk], window[at : at + chunk]) for at in range(0, len(ring), chunk)]
    began = now = time.perf_counter()
    done = 0
    while now - began < 0.3:
        await qp.rdma_write_many(slots)
        done += len(ring)
        now = time.perf_counter()
    return done / (now - began)


# ---------------------------------------------------------------- mlx5


async def tour(device: aiordma.Device) -> None:
    """What mlx5 devices do beyond verbs, on a few KiB; examples/ has a program for each."""
    memory = bytearray(os.urandom(16384))
    async with device.reg_mr(memory) as mr:
        for show in (show_layout, show_memcpy, show_dc):
            try:
                await show(device, mr, memory)
            except aiordma.UnsupportedError as e:
                print(f"mlx5     {e}")


async def show_layout(device: aiordma.Device, mr: aiordma.MemoryRegion, memory: bytearray) -> None:
    async with (
        mlx5.create_mkey(device, 2) as mkey,
        mlx5.create_qp(device, max_umr_entries=1) as here,
        mlx5.create_qp(device) as there,
    ):
        await here.connect(there.info)
        await there.connect(here.info)
        await here.register_interleaved(mkey, [(mr[:4096], 16, 48)], repeat_count=64)
        await here.rdma_write(mkey.whole(), mr.remote()[8192:])
        right = bytes(memory[8192:9216]) == b"".join(memory[i : i + 16] for i in range(0, 4096, 64))
        print(f"UMR      one write gathered 64 pieces of 16 bytes, 64 apart: {'right' if right else 'WRONG'}")


async def show_memcpy(device: aiordma.Device, mr: aiordma.MemoryRegion, memory: bytearray) -> None:
    async with mlx5.create_dma_engine(device) as engine:
        copied = await engine.copy(mr[8192:12288], mr[:4096])
        right = memory[8192:12288] == memory[:4096]
        print(f"memcpy   the device copied {copied:,} bytes: {'right' if right else 'WRONG'}")


async def show_dc(device: aiordma.Device, mr: aiordma.MemoryRegion, memory: bytearray) -> None:
    async with (
        device.create_srq(4) as srq,
        mlx5.create_dc_target(device, srq) as target,
        mlx5.create_dci_pool(device, 1) as pool,
        pool.reach(target.info) as peer,
    ):
        for write in [pool.rdma_write(peer, mr[i : i + 64], mr.remote()[8192 + i :]) for i in range(0, 4096, 64)]:
            await write
        right = memory[8192:12288] == memory[:4096]
        print(
            f"DC       64 writes over {len(pool.lanes)} streams, without a connection: {'right' if right else 'WRONG'}"
        )


# ---------------------------------------------------------------- the program


async def run(options: argparse.Namespace, source: Source, copy: Any) -> None:
    async with (
        aiordma.open_device(options.device) as one,
        aiordma.open_device(options.device) as other,
    ):
        print(f"device   {one.describe()}")
        if one.is_emulated:
            print("         No hardware is involved: these numbers tell of the software and of this machine.")
        print(f"loop     {type(asyncio.get_running_loop()).__module__.partition('.')[0]}")
        print(f"sending  {source.name}, {source.size:,} bytes, in chunks of {options.chunk:,}", flush=True)
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receiver(other, options, port, copy))
            tasks.create_task(sender(one, options, port, source))
        await tour(one)


def loop_factory(name: str | None) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if name == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        if name == "uvloop":
            raise
        return None
    return uvloop.new_event_loop


def number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"a number from {low} to {high}, not {text}")
        return int(text)

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Send a file between two endpoints by RDMA writes, and measure.")
    parser.add_argument("file", nargs="?", help="what to send (default: a generated file)")
    parser.add_argument("--size", type=number(0, 1 << 20), default=64, help="MiB to generate (default: 64)")
    parser.add_argument("--save", metavar="PATH", help="keep what was received")
    parser.add_argument("--device", help='an RDMA device, or "emulated" (default: hardware if there is any)')
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), help="(default: uvloop if it's installed)")
    # Small by default, because registered memory counts against a limit that is often 8 MiB (ulimit -l).
    parser.add_argument("--chunk", type=number(8, 1 << 30), default=256 * 1024, help="bytes in a write (262144)")
    parser.add_argument("--slots", type=number(1, 1024), default=8, help="chunks in each ring (8)")
    parser.add_argument("--operations", type=number(2, 10**9), default=20_000, help="small writes to measure (20000)")
    return parser.parse_args()


def leaf(error: BaseException) -> BaseException:
    """The first error inside of groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    options = arguments()
    try:
        with (
            open_source(options.file, options.size) as source,
            open_copy(options.save, options.file) as copy,
            asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner,
        ):
            runner.run(run(options, source, copy))
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (Exception, BaseExceptionGroup) as e:
        error = leaf(e)
        if isinstance(error, FileProblem | ChecksumProblem | aiordma.RdmaError | OSError | ImportError):
            print(f"demo: {error}", file=sys.stderr)
            return BAD_FILE if isinstance(error, FileProblem) else FAILED
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The end that measures."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Protocol

import anyio

import aiordma
from aiordma import Completion, Connection, Device, MemoryRegion, MemorySlice, QPConfig, QueuePair, RemoteBuffer
from aiordma.cli._perf_settings import Kind, QpType, Settings
from aiordma.cli.perf.control import MAGIC, VERSION, Control, PeerError, connect_all, prepare
from aiordma.cli.perf.pattern import first_difference, pattern
from aiordma.cli.perf.report import Outcome, Result

__all__ = ["LAST", "WARM_UP", "Watcher", "config", "measure"]

# Immediate data of messages: of the last one of a ping-pong, and of those of a bandwidth test that aren't counted.
LAST = 1
WARM_UP = 2


class Watcher(Protocol):
    """Who wants to know how far it is, and may stop it."""

    stop: bool

    def opened(self, outcome: Outcome) -> None: ...

    def begun(self, result: Result) -> None: ...

    def ended(self, result: Result) -> None: ...


#: A second, as librdmacm has it: that a peer is gone the connection tells, and one whose CPU is elsewhere for a moment isn't.
ACK_TIMEOUT = 18


def config(settings: Settings) -> QPConfig:
    """What the QPs that are measured are made with."""
    return QPConfig(
        qp_type=settings.qp_type,
        max_send_wr=max(settings.depth, 16),
        max_recv_wr=max(settings.depth, 16),
        max_inline_data=settings.inline or 0,
        timeout=ACK_TIMEOUT,
    )


class _Client:
    def __init__(self, settings: Settings, outcome: Outcome, watcher: Watcher, control: Control) -> None:
        self.settings = settings
        self.outcome = outcome
        self.watcher = watcher
        self.control = control
        self.queue_pairs: list[QueuePair] = []
        self.remotes: list[RemoteBuffer] = []
        self.memory: MemoryRegion
        self.warmed_up = 0

    def local(self, index: int, size: int) -> MemorySlice:
        stride = _stride(self.settings)
        return self.memory[index * stride : index * stride + size]

    # ------------------------------------------------------------ one operation

    def operations(self, size: int, imm: int | None = None) -> list[Callable[[], Completion]]:
        """For each QP what posts an operation of that size; ``imm`` is of sends."""
        made: list[Callable[[], Completion]] = []
        for index, qp in enumerate(self.queue_pairs):
            local = self.local(index, size)
            remote = self.remotes[index][:size] if self.remotes else None
            made.append(self._operation(qp, local, remote, imm))
        return made

    def _operation(
        self, qp: QueuePair, local: MemorySlice, remote: RemoteBuffer | None, imm: int | None
    ) -> Callable[[], Completion]:
        verb = self.settings.test.verb
        inline = None if self.settings.inline is None else local.length <= self.settings.inline
        if verb == "send":
            if self.settings.batch > 1:
                return self._batches(qp, lambda batch: batch.send(local, imm=imm))
            return lambda: qp.send(local, imm=imm, inline=inline)
        assert remote is not None
        target = remote
        if verb == "write":
            if self.settings.batch > 1:
                return self._batches(qp, lambda batch: batch.rdma_write(local, target))
            return lambda: qp.rdma_write(local, target, inline=inline)
        if verb == "read":
            if self.settings.batch > 1:
                return self._batches(qp, lambda batch: batch.rdma_read(local, target))
            return lambda: qp.rdma_read(local, target)
        return lambda: qp.atomic_fetch_add(local, target, 1)

    def _batches(self, qp: Any, add: Callable[[Any], None]) -> Callable[[], Completion]:
        count = self.settings.batch

        def post() -> Completion:
            batch = qp.batch()
            for _ in range(count):
                add(batch)
            done: Completion = batch.post()
            return done

        return post

    # ------------------------------------------------------------ loops

    def _more(self, result: Result) -> Callable[[], bool]:
        """Whether another operation is to be posted."""
        watcher, count = self.watcher, self.settings.count
        if count is not None:
            return lambda: result.operations < count and not watcher.stop
        assert self.settings.duration is not None
        end = time.perf_counter() + self.settings.duration
        return lambda: time.perf_counter() < end and not watcher.stop

    async def one_at_a_time(self, result: Result, once: Callable[[], Awaitable[object]], divisor: int = 1) -> None:
        """From the call until its result is there, each."""
        for _ in range(self.settings.warmup):
            if self.watcher.stop:
                return
            await once()
            self.warmed_up += 1
        more, record, now = self._more(result), result.samples.record, time.perf_counter_ns
        began = time.perf_counter()
        try:
            while more():
                start = now()
                await once()
                record((now() - start) // divisor)
                result.operations += 1
        finally:
            result.seconds = time.perf_counter() - began

    async def many_at_a_time(
        self, result: Result, posts: list[Callable[[], Completion]], warmups: list[Callable[[], Completion]]
    ) -> None:
        """As many outstanding as the depth allows; what is counted has completed. Each of ``warmups`` comes once, before."""
        batch = self.settings.batch
        room = self.settings.depth // batch * len(posts)
        pending: deque[Completion] = deque()
        for post in warmups:
            if self.settings.warmup and not self.watcher.stop:
                await post()
                self.warmed_up += batch
        count, duration = self.settings.count, self.settings.duration
        left = None if count is None else -(-count // batch)
        began = time.perf_counter()
        end = None if duration is None else began + duration
        turns = self._turns(posts)
        try:
            while (left is None or left > 0) and not self.watcher.stop:
                if end is not None and time.perf_counter() >= end:
                    break
                if len(pending) >= room:
                    await pending.popleft()
                    result.operations += batch
                pending.append(next(turns)())
                if left is not None:
                    left -= 1
            while pending:
                await pending.popleft()
                result.operations += batch
        finally:
            result.seconds = time.perf_counter() - began

    def _turns(self, posts: list[Callable[[], Completion]]) -> Iterator[Callable[[], Completion]]:
        while True:
            yield from posts

    async def ping_pong(self, result: Result, size: int) -> None:
        """A message there and one back: a latency is half of that, as ib_send_lat's."""
        (qp,) = self.queue_pairs
        local, answer = self.local(0, size), self.local(1, size)
        inline = None if self.settings.inline is None else size <= self.settings.inline

        async def once(imm: int | None = None) -> None:
            receive = qp.recv(answer)
            sent = qp.send(local, imm=imm, inline=inline)
            await receive
            await sent

        await self.one_at_a_time(result, once, 2)
        # And one that isn't counted ends it on the other side.
        await once(LAST)

    # ------------------------------------------------------------ sizes

    async def run(self, size: int) -> None:
        result = Result(size)
        self.outcome.results.append(result)
        self.watcher.begun(result)
        await self.control.send("begin", size=size)
        await self.control.receive("ready")
        self._fill(size)
        test = self.settings.test
        self.warmed_up = 0
        if test is Kind.SEND_LAT:
            await self.ping_pong(result, size)
        elif test.is_latency:
            (post,) = self.operations(size)
            await self.one_at_a_time(result, post)
        else:
            await self.many_at_a_time(result, self.operations(size), self.operations(size, WARM_UP))
        await self.control.send("end", operations=result.operations, warmed_up=self.warmed_up)
        answer = await self.control.receive("result")
        result.lost = answer["lost"]
        if self.settings.verify:
            result.verified = answer["wrong"] is None and self._right(size)
        result.complete = not self.watcher.stop
        self.watcher.ended(result)

    def _fill(self, size: int) -> None:
        """What is to be sent, and for reads and answers something that isn't there yet."""
        for index in range(self.settings.qps):
            if self.settings.test.verb in ("write", "send"):
                self.local(index, size).view()[:] = pattern(size, index)
            else:
                self.local(index, size).view()[:] = bytes(size)
        if self.settings.test is Kind.SEND_LAT:
            self.local(1, size).view()[:] = bytes(size)

    def _right(self, size: int) -> bool:
        if self.settings.test.verb == "read":
            return all(
                first_difference(self.local(index, size).view(), pattern(size, index)) is None
                for index in range(self.settings.qps)
            )
        if self.settings.test is Kind.SEND_LAT:
            return first_difference(self.local(1, size).view(), pattern(size, 0)) is None
        return True


def _stride(settings: Settings) -> int:
    """Bytes of a QP's part of the memory: so many that each begins on a page."""
    return -(-max(settings.sizes) // 4096) * 4096


async def measure(
    settings: Settings, device: Device | None, host: str, port: int, outcome: Outcome, watcher: Watcher
) -> None:
    """Connects, measures each size, says good-bye. Raises what goes wrong."""
    token = secrets.token_bytes(8)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(
            aiordma.connect(
                host, port, device=device, private_data=MAGIC + b"\0" + token, prepare=prepare(), via=settings.via
            )
        )
        control = Control(connection)
        # In the order in which it ends: connections, what was posted on them, memory.
        stack.push_async_callback(control.close)
        stack.push_async_exit(connection)
        used = connection.qp.device
        outcome.device, outcome.emulated = used.name, used.is_emulated
        outcome.peer = f"{connection.remote_address.host}:{connection.remote_address.port}"
        # aiordma's connections are of RC QPs; others are connected by what the two sides say of them.
        unconnected = [
            await stack.enter_async_context(used.create_qp(config(settings)))
            for _ in range(settings.qps if settings.qp_type is QpType.UC else 0)
        ]
        await control.send(
            "hello",
            infos=[qp.info.to_json() for qp in unconnected],
            version=VERSION,
            test=settings.test.value,
            sizes=list(settings.sizes),
            qps=settings.qps,
            qp_type=settings.qp_type.value,
            depth=settings.depth,
            verify=settings.verify,
        )
        welcome = await control.receive("welcome")
        client = _Client(settings, outcome, watcher, control)
        areas = settings.qps + (1 if settings.test is Kind.SEND_LAT else 0)
        client.memory = await stack.enter_async_context(_region(used, _stride(settings) * areas))
        try:
            client.remotes = [RemoteBuffer.from_json(buffer) for buffer in welcome["buffers"]]
        except (KeyError, TypeError) as e:
            raise PeerError(f"what the peer offers can't be understood: {e}") from e
        await connect_all(unconnected, welcome)
        client.queue_pairs += unconnected
        for index in range(settings.qps - len(unconnected)):
            made = await stack.enter_async_context(
                aiordma.connect(
                    host,
                    port,
                    device=used,
                    config=config(settings),
                    private_data=MAGIC + bytes([1]) + token + index.to_bytes(4, "big"),
                    via=settings.via,
                )
            )
            client.queue_pairs.append(made.qp)
        watcher.opened(outcome)
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, connection)
            for size in settings.sizes:
                await client.run(size)
                if watcher.stop:
                    break
            group.cancel_scope.cancel()
        await control.send("bye")


async def _watch(connection: Connection) -> None:
    """Operations of RC fail when the peer is gone; those of UC go on, into the void."""
    await connection.wait_disconnected()
    host, port = connection.remote_address
    raise aiordma.DisconnectedError(f"{host}:{port} disconnected")


def _region(device: Device, size: int) -> Any:
    import mmap

    return device.reg_mr(mmap.mmap(-1, max(size, 4096)))

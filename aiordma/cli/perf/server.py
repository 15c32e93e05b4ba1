"""The end that is measured against: it owns the memory that is written and read, receives, and answers."""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import AsyncExitStack
from typing import Any

import anyio

from aiordma import Completion, Device, MemoryRegion, MemorySlice, QPConfig, QueuePair
from aiordma.cli._perf_settings import MAX_QPS, MAX_SIZE, Kind, QpType
from aiordma.cli.perf.client import ACK_TIMEOUT, LAST, WARM_UP
from aiordma.cli.perf.control import MAGIC, VERSION, Control, PeerError, connect_all, prepare, taken
from aiordma.cli.perf.pattern import first_difference, pattern
from aiordma.cli.perf.report import Outcome, Result
from aiordma.cm import Listener, Request

__all__ = ["serve"]

_WINDOW = 64
#: How long a client's QPs may take to be there, and the messages that it says it has sent.
_PATIENCE = 30.0
_QUIET = 0.2


class _Receiver:
    """Receives on one QP: a window of receives, each posted again. Of the ``count`` messages ``warmups`` weren't measured."""

    def __init__(self, qp: QueuePair, memory: MemoryRegion, start: int, stride: int, window: int) -> None:
        self.qp = qp
        self.slices = [memory[start + stride * i : start + stride * (i + 1)] for i in range(window)]
        self.posted: deque[tuple[MemorySlice, Completion]] = deque((part, self.qp.recv(part)) for part in self.slices)
        self.count = self.warmups = 0
        self.wrong: str | None = None

    async def receive(self, expected: bytes | None) -> Completion:
        # It stays in its place while it's awaited: a cancelled wait must not lose it.
        part, completion = self.posted[0]
        await completion
        self.posted.popleft()
        self.count += 1
        if completion.imm_data == WARM_UP:
            self.warmups += 1
        if expected is not None and self.wrong is None:
            length = completion.byte_len
            place = first_difference(part.view()[:length], expected)
            if place is not None:
                self.wrong = f"message {self.count}: byte {place} of {length}"
        self.posted.append((part, self.qp.recv(part)))
        return completion


class _Server:
    def __init__(self, control: Control, hello: dict[str, Any]) -> None:
        self.control = control
        self.test = Kind(hello["test"])
        self.sizes = [int(size) for size in hello["sizes"]]
        self.qps = int(hello["qps"])
        self.qp_type = QpType(hello["qp_type"])
        self.depth = int(hello["depth"])
        self.verify = bool(hello["verify"])
        if not self.sizes or not all(1 <= s <= MAX_SIZE for s in self.sizes) or not 1 <= self.qps <= MAX_QPS:
            raise ValueError("sizes or QPs beyond what is sensible")
        self.stride = -(-max(self.sizes) // 4096) * 4096
        # Memory for a whole window of long messages would be too much.
        self.window = max(2, min(_WINDOW, (64 << 20) // (self.stride * self.qps)))
        self.queue_pairs: list[QueuePair] = []
        self.receivers: list[_Receiver] = []
        self.memory: MemoryRegion

    @property
    def config(self) -> QPConfig:
        return QPConfig(
            qp_type=self.qp_type,
            max_send_wr=max(self.depth, 16),
            max_recv_wr=self.window + 1,
            timeout=ACK_TIMEOUT,
        )

    @property
    def memory_size(self) -> int:
        return self.stride * self.qps * (self.window + 1 if self.test.verb == "send" else 1)

    def local(self, index: int, size: int) -> MemorySlice:
        return self.memory[self.stride * index : self.stride * index + size]

    def add(self, qp: QueuePair) -> None:
        """A QP is there; the client sends nothing before it's told that this side is ready."""
        self.queue_pairs.append(qp)
        if self.test.verb == "send":
            start = self.stride * (self.qps + len(self.receivers) * self.window)
            self.receivers.append(_Receiver(qp, self.memory, start, self.stride, self.window))

    def close(self) -> None:
        """After the connections."""
        for receiver in self.receivers:
            taken(receiver.posted)

    async def run(self, size: int, result: Result) -> None:
        for index in range(self.qps):
            what = self.test.verb in ("read", "send")
            self.local(index, size).view()[:] = pattern(size, index) if what else bytes(size)
        async with anyio.create_task_group() as group:
            for index, receiver in enumerate(self.receivers):
                receiver.count, receiver.warmups, receiver.wrong = 0, 0, None
                expected = pattern(size, index) if self.verify else None
                task = self._answer if self.test is Kind.SEND_LAT else self._take
                group.start_soon(task, receiver, size, expected)
            await self.control.send("ready")
            end = await self.control.receive("end")
            operations, warmups = int(end["operations"]), int(end["warmed_up"])
            lost = 0
            if self.test is Kind.SEND_BW:
                await self._until_received(operations + warmups)
                lost = max(0, operations - sum(receiver.count - receiver.warmups for receiver in self.receivers))
                group.cancel_scope.cancel()
        result.operations = operations
        wrong = self._wrong(size, operations + warmups) if self.verify else None
        result.verified = wrong is None if self.verify else None
        result.lost = lost
        result.complete = True
        await self.control.send("result", lost=lost, wrong=wrong)

    async def _take(self, receiver: _Receiver, size: int, expected: bytes | None) -> None:
        while True:
            await receiver.receive(expected)

    async def _answer(self, receiver: _Receiver, size: int, expected: bytes | None) -> None:
        local = self.local(0, size)
        last = False
        while not last:
            message = await receiver.receive(expected)
            last = message.imm_data == LAST
            await receiver.qp.send(local)

    async def _until_received(self, messages: int) -> None:
        """Until so many have come, or no more come."""
        with anyio.move_on_after(_PATIENCE):
            before, quiet = -1, 0.0
            while (count := sum(receiver.count for receiver in self.receivers)) < messages:
                quiet = quiet + 0.001 if count == before else 0.0
                # Of RC none is lost: the completions are on their way.
                if self.qp_type is QpType.UC and quiet >= _QUIET:
                    break
                before = count
                await anyio.sleep(0.001)

    def _wrong(self, size: int, operations: int) -> str | None:
        """What isn't as it should be after a run of so many, warming up and all."""
        if self.test.verb == "send":
            return next((f"QP {i}: {r.wrong}" for i, r in enumerate(self.receivers) if r.wrong), None)
        for index in range(self.qps):
            view = self.local(index, size).view()
            if self.test.verb == "write":
                place = first_difference(view, pattern(size, index))
                if place is not None and operations >= self.qps:
                    return f"QP {index}: byte {place} of {size}"
        if self.test.verb == "atomic":
            total = sum(int.from_bytes(self.local(i, 8).view(), "little") for i in range(self.qps))
            if total != operations:
                return f"{operations} additions of 1 gave {total}"
        return None


async def serve(listener: Listener, test: Kind, device: Device | None, outcome: Outcome) -> None:
    """Serves one client to its end. Raises what goes wrong, :class:`PeerError` where it is of another mind."""
    while True:
        request = await listener.accept()
        if request.private_data.startswith(MAGIC + b"\0"):
            break
        await request.reject(1, b"not aiordma perf, or a test that is over")
    token = request.private_data[len(MAGIC) + 1 :][:8]
    async with AsyncExitStack() as stack:
        # In the order in which it ends: connections, what was posted on them, memory.
        connection = await stack.enter_async_context(request.accept(device, prepare=prepare()))
        control = Control(connection)
        stack.push_async_callback(control.close)
        stack.push_async_exit(connection)
        used = connection.qp.device
        outcome.device, outcome.emulated = used.name, used.is_emulated
        outcome.peer = f"{connection.remote_address.host}:{connection.remote_address.port}"
        hello = await control.receive("hello")
        server = await _welcome(control, hello, test)
        stack.callback(server.close)
        server.memory = await stack.enter_async_context(used.reg_mr(mmap.mmap(-1, server.memory_size)))
        buffers = []
        if test.verb != "send":
            for index in range(server.qps):
                buffers.append(server.memory.remote()[server.stride * index :][: max(server.sizes)].to_json())
        unconnected = [
            await stack.enter_async_context(used.create_qp(server.config))
            for _ in range(server.qps if server.qp_type is QpType.UC else 0)
        ]
        await connect_all(unconnected, hello)
        for qp in unconnected:
            server.add(qp)
        await control.send("welcome", buffers=buffers, infos=[qp.info.to_json() for qp in unconnected])
        with anyio.fail_after(_PATIENCE):
            while (index := len(server.queue_pairs)) < server.qps:
                more = await _next(listener, MAGIC + bytes([1]) + token + index.to_bytes(4, "big"))
                made = await stack.enter_async_context(more.accept(used, config=server.config))
                server.add(made.qp)
        while True:
            message = await control.receive("begin", "bye")
            if message["kind"] == "bye":
                break
            result = Result(int(message["size"]))
            outcome.results.append(result)
            if result.size not in server.sizes:
                raise PeerError(f"the client begins a size that it hadn't announced: {result.size}")
            await server.run(result.size, result)


async def _next(listener: Listener, wanted: bytes) -> Request:
    """The request with that private data; any other one is rejected."""
    while True:
        request = await listener.accept()
        if request.private_data.startswith(wanted):
            return request
        await request.reject(2, b"a test is going on: try again later")


async def _welcome(control: Control, hello: dict[str, Any], test: Kind) -> _Server:
    try:
        if hello["version"] != VERSION:
            raise ValueError(f"this side speaks version {VERSION} of perf, the client {hello['version']}")
        if hello["test"] != test.value:
            raise ValueError(f"the server runs {test.value}, the client {hello['test']}: start both with the same test")
        return _Server(control, hello)
    except (ValueError, KeyError, TypeError) as e:
        await control.send("error", text=str(e))
        raise PeerError(str(e)) from e

"""Connections over TCP to and from what doesn't speak the protocol, or speaks it badly: it's that peer's loss alone."""

import contextlib
import json
import resource
import socket
import struct
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from emulated.cm import DEVICE, World, hold, world
from emulated.core import eventually

import aiordma
from aiordma import ConnectError, DisconnectedError
from aiordma.cm._tcp_source import TcpSource

pytestmark = [pytest.mark.anyio, pytest.mark.librdmacm]


def _frame(message: Any) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def _rejection(**fields: Any) -> bytes:
    return _frame({"reject": {"status": 28, "reason": 0, "private_data": ""} | fields})


NO_NUMBERS: list[Any] = [
    float("inf"),
    float("-inf"),
    float("nan"),
    10**30,
    -(10**30),
    -1,
    1 << 16,
    1.5,
    True,
    "1",
    None,
    [],
]

# What makes no sense whoever says it and whenever.
NONSENSE = {
    "huge length": b"\xff\xff\xff\xff",
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "no json": _frame(b"hello"),
    "empty": _frame(b""),
    "no utf-8": _frame(b"\xff\xfe{}"),
    "deep": _frame(b"[" * 16000),
    "long number": _frame(b'{"accept":' + b"9" * 9000 + b"}"),
    "no object": _frame([1]),
    "empty object": _frame({}),
    "unknown": _frame({"hello": 1}),
    "accept null": _frame({"accept": None}),
    "accept no qp": _frame({"accept": {"qp": {}, "private_data": ""}}),
    "accept long": _frame({"accept": {"qp": 5, "private_data": "00" * 300}}),
    "reject number": _frame({"reject": 1}),
    "reject hex": _rejection(private_data="zz"),
    **{f"status {value!r}": _rejection(status=value) for value in NO_NUMBERS},
    **{f"reason {value!r}": _rejection(reason=value) for value in NO_NUMBERS},
}


def _qp(message: dict[str, Any], **fields: Any) -> bytes:
    return _frame({"accept": {"qp": message["request"]["qp"] | fields, "private_data": ""}})


# Answers whose QP isn't one; what they're made of is the client's request.
NO_QPS: dict[str, dict[str, Any]] = {
    f"{name} {value!r}": {name: value}
    for name in ("qp_num", "psn", "mtu", "lid", "gid_type", "max_rd_atomic", "max_dest_rd_atomic", "qp_type", "gid")
    for value in (float("inf"), -1, 10**30, None, [], "x")
}


async def _request(stream: SocketStream) -> dict[str, Any]:
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack_from("!I", data)[0]:
        data += await stream.receive()
    found: dict[str, Any] = json.loads(data[4:])
    return found


async def _connecting(answers: dict[str, Callable[[dict[str, Any]], bytes]]) -> dict[str, BaseException | None]:
    """How connecting to a listener ends that gives these answers, one after the other, and then waits."""
    ends: dict[str, BaseException | None] = {}
    due = iter(answers.values())

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.send(next(due)(await _request(stream)))
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()

    async with (
        aiordma.open_device(DEVICE) as device,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, serve)
        port = listener.extra(SocketAttribute.local_port)
        for name in answers:
            ends[name] = None
            try:
                async with aiordma.connect("127.0.0.1", port, device=device, via="tcp", timeout=30):
                    pass
            except Exception as e:
                ends[name] = e
        group.cancel_scope.cancel()
    return ends


async def test_an_answer_that_makes_no_sense_ends_connect_with_a_connection_error_at_once() -> None:
    answers = {name: (lambda _, data=data: data) for name, data in NONSENSE.items()}
    answers["established"] = lambda _: _frame({"established": True})
    answers |= {name: (lambda request, fields=fields: _qp(request, **fields)) for name, fields in NO_QPS.items()}
    for name, end in (await _connecting(answers)).items():
        assert isinstance(end, ConnectError | DisconnectedError), f"{name}: {end!r}"
        assert not isinstance(end, TimeoutError | ConnectionRefusedError), f"{name}: {end!r}"


async def _serves(w: World) -> None:
    async with anyio.create_task_group() as group:

        async def serve() -> None:
            await hold(await w.listener.accept())

        group.start_soon(serve)
        async with w.connect():
            pass


async def test_a_listener_outlives_whatever_connects_to_it_and_says_whatever() -> None:
    hello: dict[str, Any] = {"aiordma-cm": 1, "request": {"qp": {}, "private_data": ""}}
    greetings = NONSENSE | {
        "request null": _frame(hello | {"request": None}),
        "request no qp": _frame(hello),
        "version": _frame(hello | {"aiordma-cm": float("inf")}),
        "half": _frame(hello)[:20],
        "nothing": b"",
    }
    async with world("tcp") as w, contextlib.AsyncExitStack() as left:
        for number, data in enumerate(greetings.values()):
            stream = await anyio.connect_tcp("127.0.0.1", w.listener.port)
            await stream.send(data)
            if number % 3 == 0:
                # It ends with a reset.
                raw = stream.extra(SocketAttribute.raw_socket)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await stream.aclose()
            else:
                left.push_async_callback(stream.aclose)
        await _serves(w)


async def test_what_makes_no_sense_on_an_open_connection_ends_that_connection() -> None:
    async with world("tcp") as w:
        for name, data in NONSENSE.items():
            for sender in (0, 1):
                pair = await w.both()
                wire = pair[sender]._end.link._wire  # type: ignore[attr-defined]
                wire.sock.send(data)
                with anyio.fail_after(30):
                    await pair[1 - sender].wait_disconnected()
                    for connection in pair:
                        await connection.aclose()
                assert all(connection.closed for connection in pair), name


async def test_a_listener_without_descriptors_left_pauses_and_goes_on_when_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    on_client = TcpSource._on_client

    def counted(self: TcpSource, listening: socket.socket) -> None:
        calls.append(1)
        on_client(self, listening)

    monkeypatch.setattr(TcpSource, "_on_client", counted)
    async with world("tcp") as w:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with await anyio.connect_tcp("127.0.0.1", w.listener.port):
            await anyio.sleep(0.05)
            calls.clear()
            with socket.socket() as client:
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
                try:
                    client.connect(("127.0.0.1", w.listener.port))
                    began = anyio.current_time()
                    await eventually(lambda: calls)
                    # A loop that is called again at once calls thousands of times.
                    await anyio.sleep(0.5)
                    seconds = anyio.current_time() - began
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                assert len(calls) < 20 + 10 * seconds
                await _serves(w)


async def test_a_listener_can_be_closed_while_it_pauses() -> None:
    async with world("tcp") as w:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as client:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                client.connect(("127.0.0.1", w.listener.port))
                await anyio.sleep(0.05)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await w.listener.aclose()
            await anyio.sleep(0.4)

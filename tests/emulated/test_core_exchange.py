"""The TCP exchange: two sides that find each other, peers that vanish, dawdle or speak something else."""

# ruff: noqa: SIM117

import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from emulated.core import DEVICE, settle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiordma
from aiordma import ClosedError, Device, ExchangeError, QueuePair, UsageError, exchange

# Most of it is about TCP.
pytestmark = [pytest.mark.anyio, pytest.mark.any_device, pytest.mark.slow_in_vm]

HOST = "127.0.0.1"


@asynccontextmanager
async def _device() -> AsyncIterator[Device]:
    async with aiordma.open_device(DEVICE) as device:
        yield device


@asynccontextmanager
async def _world() -> AsyncIterator[tuple[Device, exchange.Listener, QueuePair, QueuePair]]:
    async with _device() as device, device.create_qp() as a, device.create_qp() as b:
        async with await exchange.serve(HOST) as listener:
            yield device, listener, a, b


def _frame(message: Any) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def _hello(peer: QueuePair, **changes: Any) -> dict[str, Any]:
    return {"aiordma": 1, "qp": json.loads(peer.info.to_json()), "buffers": {}, "data": None, **changes}


# ---------------------------------------------------------------- it works


async def test_both_sides_get_the_others_buffers_and_data_and_can_send_at_once() -> None:
    async with _world() as (device, listener, a, b), device.reg_mr(bytearray(64)) as mr:
        peers: dict[str, exchange.Peer] = {}

        async def serve() -> None:
            peers["b"] = await listener.accept(b, buffers={"inbox": mr.remote()[8:40], "": mr.remote()}, data=[1, "x"])
            # The peer may have written already, and this side may write at once.
            await b.rdma_write(b"back", peers["b"].buffers["theirs"])

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            peers["a"] = await exchange.connect(HOST, listener.port, a, buffers={"theirs": mr.remote()[50:]}, data=None)
            await a.rdma_write(b"hello", peers["a"].buffers["inbox"])
        with mr.view() as view:
            assert bytes(view[8:13]) == b"hello"
            assert bytes(view[50:54]) == b"back"
        assert peers["a"].info == b.info
        assert peers["b"].info == a.info
        assert peers["a"].data == [1, "x"]
        assert peers["b"].data is None
        assert peers["a"].buffers == {"inbox": mr.remote()[8:40], "": mr.remote()}
        assert (a.state, b.state) == ("RTS", "RTS")


async def test_several_clients_are_served_in_turn() -> None:
    async with _device() as device, await exchange.serve(HOST) as listener:
        done = []

        async def client(number: int) -> None:
            async with device.create_qp() as qp:
                peer = await exchange.connect(HOST, listener.port, qp, data=number)
                assert peer.data == f"hello {number}" or peer.data == "hello"
                await qp.rdma_write(None, aiordma.RemoteBuffer(0, 0, 0))
                done.append(number)

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(client, number)
            qps = []
            for _ in range(5):
                qps.append(await device.create_qp())
                await listener.accept(qps[-1], data="hello")
        assert sorted(done) == list(range(5))
        for qp in qps:
            await qp.close()


async def test_an_exchange_works_on_every_address_and_on_ipv6_too() -> None:
    async with _device() as device, await exchange.serve() as listener:
        hosts = ["127.0.0.1"]
        if socket.has_ipv6:
            try:
                with socket.create_server(("::1", 0), family=socket.AF_INET6):
                    hosts.append("::1")
            except OSError:
                pass
        for host in hosts:
            async with device.create_qp() as a, device.create_qp() as b, anyio.create_task_group() as group:
                group.start_soon(_accept, listener, b)
                await exchange.connect(host, listener.port, a)


async def _accept(listener: exchange.Listener, qp: QueuePair) -> None:
    await listener.accept(qp)


async def test_a_large_description_arrives_whole_and_too_large_a_one_is_refused_here() -> None:
    async with _world() as (_, listener, a, b):
        data = "x" * 900_000
        async with anyio.create_task_group() as group:
            group.start_soon(_accept, listener, b)
            with pytest.raises(UsageError, match="at most"):
                await exchange.connect(HOST, listener.port, a, data="x" * (1 << 20))
            peer: exchange.Peer | None = None

            async def connect() -> None:
                nonlocal peer
                peer = await exchange.connect(HOST, listener.port, a)

            group.cancel_scope.cancel()
        async with anyio.create_task_group() as group:
            group.start_soon(connect)
            await listener.accept(b, data=data)
        assert peer is not None
        assert peer.data == data


# ---------------------------------------------------------------- it doesn't


async def test_nobody_listening_is_an_os_error() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    async with _device() as device, device.create_qp() as qp:
        with pytest.raises(OSError):
            await exchange.connect(HOST, port, qp, timeout=5)
        assert qp.state == "INIT"


async def _garbage_peer(
    talk: Callable[[SocketStream], Awaitable[None]], run: Callable[[int], Awaitable[object]], error: type[Exception]
) -> Exception:
    """Runs a connecting side against a server that talks as ``talk`` does."""
    multi = await anyio.create_tcp_listener(local_host=HOST, local_port=0)
    async with multi, anyio.create_task_group() as group:
        port = multi.extra(anyio.abc.SocketAttribute.local_port)

        async def handle(stream: SocketStream) -> None:
            try:
                async with stream:
                    await talk(stream)
            except (anyio.BrokenResourceError, anyio.EndOfStream):
                pass

        group.start_soon(multi.serve, handle)
        with pytest.raises(error) as caught:
            await run(port)
        group.cancel_scope.cancel()
    return caught.value


GARBAGE: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("half a length", b"\x00\x00"),
    ("half a message", struct.pack("!I", 100) + b"{"),
    ("http", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    ("ssh", b"SSH-2.0-OpenSSH_9.6\r\n" * 10),
    ("huge length", b"\xff\xff\xff\xff"),
    ("no json", _frame(b"\x00\x01\x02\x03")),
    ("no utf-8", _frame(b'{"aiordma": "\xff\xfe"}')),
    ("empty body", _frame(b"")),
    ("a list", _frame([1, 2, 3])),
    ("a number", _frame(5)),
    ("a string", _frame("hello")),
    ("null", _frame(None)),
    ("nested deep", _frame(b"[" * 200_000)),
    ("nested deep objects", _frame(b'{"a":' * 200_000)),
    ("empty object", _frame({})),
    ("another version", _frame({"aiordma": 2})),
    ("no qp", _frame({"aiordma": 1})),
    ("qp of no kind", _frame({"aiordma": 1, "qp": 5, "buffers": {}})),
    ("qp with a hole", _frame({"aiordma": 1, "qp": {"qp_num": 5}, "buffers": {}})),
    ("an error", _frame({"error": "I have no idea"})),
]


@pytest.mark.parametrize(("name", "data"), GARBAGE, ids=[name for name, _ in GARBAGE])
async def test_a_peer_that_speaks_something_else_is_an_exchange_error(name: str, data: bytes) -> None:
    async def talk(stream: SocketStream) -> None:
        if data:
            await stream.send(data)

    async with _device() as device, device.create_qp() as qp:
        error = await _garbage_peer(talk, lambda port: exchange.connect(HOST, port, qp, timeout=20), ExchangeError)
        assert str(error)
        assert isinstance(error, ConnectionError)
        assert qp.state == "INIT"
        if name == "an error":
            assert "I have no idea" in str(error)


@pytest.mark.parametrize(("name", "data"), GARBAGE, ids=[name for name, _ in GARBAGE])
async def test_a_client_that_speaks_something_else_is_an_exchange_error_and_the_next_is_served(
    name: str, data: bytes
) -> None:
    async with _world() as (_, listener, a, b):
        async with anyio.create_task_group() as group:

            async def client() -> None:
                async with await anyio.connect_tcp(HOST, listener.port) as stream:
                    with suppress(anyio.BrokenResourceError):
                        await stream.send(data)

            group.start_soon(client)
            with pytest.raises(ExchangeError):
                await listener.accept(b, timeout=20)
        async with anyio.create_task_group() as group:
            group.start_soon(_accept, listener, b)
            await exchange.connect(HOST, listener.port, a)


@pytest.mark.parametrize(
    "changes",
    [
        {"buffers": [1]},
        {"buffers": {"a": 5}},
        {"buffers": {"a": {"addr": "0x10", "length": -1, "rkey": 1}}},
        {"buffers": {"a": {"addr": "zz", "length": 1, "rkey": 1}}},
        {"buffers": None},
        {"qp": None},
        {"aiordma": True},
        {"aiordma": "1"},
    ],
    ids=str,
)
async def test_a_hello_with_something_wrong_in_it_is_an_exchange_error(changes: dict[str, Any]) -> None:
    async with _device() as device, device.create_qp() as qp, device.create_qp() as other:

        async def talk(stream: SocketStream) -> None:
            await stream.send(_frame(_hello(other, **changes)))
            await stream.receive()

        await _garbage_peer(talk, lambda port: exchange.connect(HOST, port, qp, timeout=20), ExchangeError)
        assert qp.state == "INIT"


async def test_random_bytes_never_are_anything_but_an_exchange_error() -> None:
    examples: list[bytes] = []

    @given(st.binary(max_size=60) | st.binary(max_size=50).map(_frame) | st.text(max_size=20).map(_frame))
    @settings(max_examples=40, suppress_health_check=list(HealthCheck), database=None)
    def collect(data: bytes) -> None:
        examples.append(data)

    collect()
    async with _device() as device, device.create_qp() as qp:
        for data in examples:

            async def talk(stream: SocketStream, data: bytes = data) -> None:
                if data:
                    await stream.send(data)

            await _garbage_peer(talk, lambda port: exchange.connect(HOST, port, qp, timeout=20), ExchangeError)
        assert qp.state == "INIT"


@pytest.mark.parametrize("ready", [{}, {"ready": False}, {"aiordma": 1}, None])
async def test_a_peer_that_never_gets_ready_is_an_exchange_error(ready: Any) -> None:
    async with _device() as device, device.create_qp() as qp, device.create_qp() as other:

        async def talk(stream: SocketStream) -> None:
            await stream.send(_frame(_hello(other)))
            if ready is not None:
                await stream.send(_frame(ready))

        await _garbage_peer(talk, lambda port: exchange.connect(HOST, port, qp, timeout=20), ExchangeError)


@pytest.mark.parametrize("after", ["connection", "hello"])
async def test_a_peer_that_dawdles_is_a_timeout(after: str) -> None:
    async with _device() as device, device.create_qp() as qp, device.create_qp() as other:

        async def talk(stream: SocketStream) -> None:
            if after == "hello":
                await stream.send(_frame(_hello(other)))
            await anyio.sleep(60)

        await _garbage_peer(talk, lambda port: exchange.connect(HOST, port, qp, timeout=0.05), TimeoutError)


async def test_a_client_that_dawdles_is_a_timeout_and_the_listener_goes_on() -> None:
    async with _world() as (_, listener, a, b):
        async with await anyio.connect_tcp(HOST, listener.port):
            with pytest.raises(TimeoutError):
                await listener.accept(b, timeout=0.05)
        async with anyio.create_task_group() as group:
            group.start_soon(_accept, listener, b)
            await exchange.connect(HOST, listener.port, a)


async def test_waiting_for_a_client_has_no_limit_and_can_be_cancelled() -> None:
    async with _world() as (_, listener, a, b):
        with anyio.move_on_after(0.05) as scope:
            await listener.accept(b, timeout=0.001)
        assert scope.cancelled_caught
        async with anyio.create_task_group() as group:
            group.start_soon(_accept, listener, b)
            await exchange.connect(HOST, listener.port, a)


async def test_a_connect_that_fails_here_is_told_to_the_peer() -> None:
    async with _device() as device, await exchange.serve(HOST) as listener:
        async with device.create_qp() as rc, device.create_qp(qp_type="UC") as uc:
            errors: list[Exception] = []

            async def serve() -> None:
                try:
                    await listener.accept(uc)
                except aiordma.RdmaError as e:
                    errors.append(e)

            async with anyio.create_task_group() as group:
                group.start_soon(serve)
                with pytest.raises(aiordma.RdmaError, match="UC"):
                    await exchange.connect(HOST, listener.port, rc)
            assert len(errors) == 1
            assert "RC" in str(errors[0])


async def test_a_peer_that_gives_up_says_why() -> None:
    async with _world() as (_, listener, a, b):
        await b.close()
        errors: list[Exception] = []

        async def serve() -> None:
            try:
                await listener.accept(b)
            except ClosedError as e:
                errors.append(e)

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            with pytest.raises(ExchangeError, match=r"gave up.*closed"):
                await exchange.connect(HOST, listener.port, a)
        assert len(errors) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"buffers": {"a": 5}},
        {"buffers": {"a": b"bytes"}},
        {"buffers": [1]},
        {"buffers": {1: None}},
        {"data": object()},
        {"data": {1, 2}},
        {"data": b"bytes"},
    ],
    ids=str,
)
async def test_bad_arguments_are_refused_before_anything_is_sent(arguments: dict[str, Any]) -> None:
    async with _world() as (_, listener, a, b):
        with pytest.raises(UsageError):
            await exchange.connect(HOST, listener.port, a, **arguments)
        with anyio.fail_after(5), pytest.raises(UsageError):
            await listener.accept(b, **arguments)
        async with anyio.create_task_group() as group:
            group.start_soon(_accept, listener, b)
            await exchange.connect(HOST, listener.port, a)


@pytest.mark.parametrize("qp", [None, 5, "qp"])
async def test_what_is_no_qp_is_refused(qp: Any) -> None:
    async with await exchange.serve(HOST) as listener:
        with pytest.raises(UsageError, match="QueuePair"):
            await exchange.connect(HOST, listener.port, qp)
        with anyio.fail_after(5), pytest.raises(UsageError, match="QueuePair"):
            await listener.accept(qp)


async def test_closing_the_listener_ends_a_waiting_accept() -> None:
    async with _world() as (_, listener, _, b):
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:

                async def serve() -> None:
                    with pytest.raises(ClosedError):
                        await listener.accept(b)

                group.start_soon(serve)
                await anyio.sleep(0.01)
                await listener.aclose()
        await listener.aclose()
        with pytest.raises(ClosedError):
            await listener.accept(b)
    await settle()

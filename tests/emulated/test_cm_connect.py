"""Connecting: both sides get what they ask for, and every refusal says why."""

import math
import socket
import struct
from fractions import Fraction
from typing import Any

import anyio
import pytest
from emulated.cm import DEVICE, HOST, HOST6, World, both, hold, qps, world
from emulated.core import eventually

import aiordma
from aiordma import (
    Access,
    ConnectError,
    ConnectTimeoutError,
    QPConfig,
    QueuePair,
    RejectedError,
    Request,
    ResolutionError,
    UsageError,
    cm,
)

pytestmark = [pytest.mark.anyio, pytest.mark.librdmacm]


# ---------------------------------------------------------------- it works


@both
async def test_both_sides_get_a_connected_qp_and_can_use_it_at_once(via: str) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(128)) as memory:
        a, b = await w.both()
        async with a, b:
            assert (a.qp.state, b.qp.state) == ("RTS", "RTS")
            assert (a.via, b.via) == (via, via)
            assert a.device is b.device is w.device
            received = b.recv(memory[:16])
            await a.send(b"over the wire")
            assert (await received).byte_len == 13
            await b.rdma_write(b"and back", memory.remote()[64:])
            await a.rdma_read(memory[96:104], memory.remote()[64:72])
            with memory.view() as view:
                assert bytes(view[:13]) == b"over the wire"
                assert bytes(view[96:104]) == b"and back"


@both
async def test_addresses_are_those_of_the_connection_and_each_others(via: str) -> None:
    async with world(via) as w:
        assert w.listener.addresses == [(w.host, w.listener.port)]
        seen: list[Request] = []

        async def keep(request: Request) -> None:
            seen.append(request)
            await hold(request)

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, keep)
            async with w.connect() as connection:
                assert connection.remote_address == (w.host, w.listener.port)
                assert connection.local_address == seen[0].remote_address
                assert seen[0].local_address == connection.remote_address
            group.cancel_scope.cancel()


@both
async def test_an_ipv6_address_works(via: str) -> None:
    async with world(via, HOST6) as w:
        a, b = await w.both()
        async with a, b:
            assert a.remote_address == (HOST6, w.listener.port)
            assert b.remote_address == a.local_address


@both
@pytest.mark.parametrize("host", [HOST, HOST6])
async def test_a_wildcard_listener_takes_every_address_of_the_machine(via: str, host: str) -> None:
    async with aiordma.open_device(DEVICE) as device, aiordma.listen(via=via, device=device) as listener:
        w = World(device, listener, via, host)
        a, b = await w.both()
        async with a, b:
            assert b.local_address.host == host


@both
async def test_of_a_name_with_several_addresses_each_is_tried(via: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address has no listener, the second isn't reached, the third has one."""
    real = anyio.getaddrinfo

    async def two(host: Any, port: Any, **kwargs: Any) -> Any:
        if host != "storage-1.example":
            return await real(host, port, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    addresses = ["127.0.0.9", "203.0.113.1", HOST] if via == "rdma_cm" else ["127.0.0.9", HOST]

    async with world(via) as w:
        monkeypatch.setattr(anyio, "getaddrinfo", two)
        w.host = "storage-1.example"
        # Each gets its share of the time, which the second one uses up.
        a, b = await w.both(timeout=6 if via == "rdma_cm" else 20)
        async with a, b:
            assert a.remote_address == (HOST, w.listener.port)


@both
async def test_without_a_device_the_one_of_the_address_is_opened_shared_and_closed_with_the_last(via: str) -> None:
    async with aiordma.listen(HOST, via=via) as listener:
        port = listener.port
        async with anyio.create_task_group() as group:

            async def serve() -> None:
                async for request in listener:
                    group.start_soon(hold, request)

            group.start_soon(serve)
            a = await aiordma.connect(HOST, port, via=via)
            b = await aiordma.connect(HOST, port, via=via)
            device = a.device
            assert b.device is device
            async with device.reg_mr(bytearray(8)) as memory:
                await a.rdma_write(b"12345678", memory.remote())
            await a.aclose()
            assert not device.closed
            await b.aclose()
            with anyio.fail_after(20):
                while not device.closed:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            await listener.aclose()


@both
async def test_the_receive_window_is_posted_before_the_peer_can_send(via: str) -> None:
    """With rnr_retry=0 the first message that finds no receive would break the connection."""
    async with world(via, config=QPConfig(rnr_retry=0)) as w, w.device.reg_mr(bytearray(256)) as memory:

        def window(qp: QueuePair) -> list[aiordma.Completion]:
            return [qp.recv(memory[i * 16 : (i + 1) * 16]) for i in range(4)]

        async def window_later(qp: QueuePair) -> list[aiordma.Completion]:
            await anyio.sleep(0.01)
            return [qp.recv(memory[128 + i * 16 : 128 + (i + 1) * 16]) for i in range(4)]

        async def talk(request: Request) -> None:
            async with request.accept(prepare=window_later) as connection:
                for completion in [connection.send(b"server") for _ in range(4)]:
                    await completion
                for completion in connection.prepared:
                    assert (await completion).byte_len == 6
                await connection.wait_disconnected()

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, talk)
            async with w.connect(prepare=window, rnr_retry=0) as connection:
                for completion in [connection.send(b"client") for _ in range(4)]:
                    await completion
                for completion in connection.prepared:
                    assert (await completion).byte_len == 6
            group.cancel_scope.cancel()


@both
async def test_a_shared_receive_queue_serves_all_connections(via: str) -> None:
    async with world(via) as w, w.device.create_srq(16) as srq, w.device.reg_mr(bytearray(64)) as memory:
        first = await w.both(accept_srq=srq)
        second = await w.both(accept_srq=srq)
        receives = [srq.recv(memory[:8]), srq.recv(memory[8:16])]
        for a, _ in (first, second):
            await a.send(b"message")
        for receive in receives:
            assert (await receive).byte_len == 7
        for connection in (*first, *second):
            await connection.aclose()


@both
async def test_rdma_reads_in_flight_are_negotiated_in_each_direction(via: str) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(64)) as memory:
        a, b = await w.both(max_rd_atomic=3, accept_max_rd_atomic=9)
        async with a, b:
            assert (a.max_rd_atomic, a.max_dest_rd_atomic) == (3, 3)
            assert (b.max_rd_atomic, b.max_dest_rd_atomic) == (3, 3)
            for side in (a, b):
                for read in [side.rdma_read(memory[:8], memory.remote()[8:16]) for _ in range(32)]:
                    await read
        a, b = await w.both(max_rd_atomic=16, accept_max_rd_atomic=2)
        async with a, b:
            assert (a.max_rd_atomic, a.max_dest_rd_atomic) == (2, 2)
            assert (b.max_rd_atomic, b.max_dest_rd_atomic) == (2, 2)


@both
async def test_the_config_decides_what_the_qp_is(via: str) -> None:
    async with world(via, config=QPConfig(max_send_wr=7, access=Access.REMOTE_READ)) as w:
        a, b = await w.both(max_recv_wr=5, accept_max_recv_wr=6)
        async with a, b:
            assert a.qp.config.max_recv_wr == 5
            assert (b.qp.config.max_send_wr, b.qp.config.max_recv_wr) == (7, 6)
            async with w.device.reg_mr(bytearray(8)) as memory:
                with pytest.raises((aiordma.RemoteAccessError, aiordma.RemoteInvalidRequestError)):
                    await a.rdma_write(b"x", memory.remote())


# ---------------------------------------------------------------- private data


@both
async def test_private_data_comes_with_the_request_and_the_acceptance_in_its_fixed_size(via: str) -> None:
    record = struct.pack("!QI", 1 << 40, 0)  # ends with zero bytes
    async with world(via) as w:
        seen: list[bytes] = []

        async def answer(request: Request) -> None:
            seen.append(request.private_data)
            async with request.accept(private_data=b"welcome") as connection:
                assert connection.private_data == request.private_data
                await connection.wait_disconnected()

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, answer)
            async with w.connect(private_data=record) as connection:
                assert connection.private_data == b"welcome".ljust(cm.REPLY_DATA, b"\0")
            async with w.connect(private_data=bytes(range(cm.REQUEST_DATA))):
                pass
            group.cancel_scope.cancel()
        assert seen == [record.ljust(cm.REQUEST_DATA, b"\0"), bytes(range(cm.REQUEST_DATA))]


@both
async def test_private_data_that_is_too_long_is_refused_here_with_the_limit(via: str) -> None:
    async with world(via) as w:
        with pytest.raises(UsageError, match="at most 56"):
            w.connect(private_data=bytes(57))
        with pytest.raises(UsageError, match="private_data: bytes"):
            w.connect(private_data="text")

        async def refuse(request: Request) -> None:
            with pytest.raises(UsageError, match="at most 196"):
                request.accept(private_data=bytes(197))
            with pytest.raises(UsageError, match="at most 140"):
                await request.reject(private_data=bytes(141))
            with pytest.raises(UsageError, match="65535"):
                await request.reject(1 << 16)
            await request.reject(1, bytes(140))

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, refuse)
            with pytest.raises(RejectedError):
                await w.connect()
            group.cancel_scope.cancel()


# ---------------------------------------------------------------- it's refused


@both
async def test_a_rejection_brings_reason_and_private_data(via: str) -> None:
    async with world(via) as w:

        async def refuse(request: Request) -> None:
            await request.reject(77, b"full")
            with pytest.raises(UsageError, match="answered already"):
                request.accept()

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, refuse)
            with pytest.raises(RejectedError) as caught:
                await w.connect()
            group.cancel_scope.cancel()
        error = caught.value
        assert isinstance(error, ConnectionRefusedError)
        assert (error.status, error.reason) == (28, 77)
        assert error.private_data.rstrip(b"\0") == b"full"
        assert "77" in str(error)
        assert "full" in str(error)


@both
async def test_a_rejection_without_a_reason_is_the_plain_one_of_the_cm(via: str) -> None:
    async with world(via) as w:
        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, lambda request: request.reject())
            with pytest.raises(RejectedError) as caught:
                await w.connect()
            group.cancel_scope.cancel()
        assert (caught.value.status, caught.value.reason) == (28, 0)
        assert not any(caught.value.private_data)


@both
async def test_nobody_listening_is_a_connection_refused_error(via: str) -> None:
    async with world(via) as w:
        port = w.listener.port
        await w.listener.aclose()
        with pytest.raises(ConnectionRefusedError) as caught:
            await aiordma.connect(HOST, port, via=via, device=w.device)
        assert isinstance(caught.value, RejectedError)
        assert caught.value.status == 8
        assert "nothing listens" in str(caught.value)
        assert qps(w.device) == 0


@both
@pytest.mark.parametrize("host", ["no-such-name.invalid", "name with spaces", "a" * 300, "\u2603.invalid"])
async def test_a_name_that_nobody_knows_is_a_resolution_error(via: str, host: str) -> None:
    async with world(via) as w:
        with pytest.raises(ResolutionError) as caught:
            await aiordma.connect(host, 1, via=via, device=w.device)
        assert isinstance(caught.value, ConnectionError)
        assert host in str(caught.value)
        with pytest.raises(ResolutionError):
            await aiordma.listen(host, via=via)


@both
async def test_an_address_of_another_machine_cannot_be_listened_on(via: str) -> None:
    async with world(via) as w:
        with pytest.raises(OSError):
            await aiordma.listen("192.0.2.200", via=via, device=w.device)


@both
async def test_a_port_in_use_cannot_be_listened_on_a_second_time(via: str) -> None:
    async with world(via) as w:
        with pytest.raises(OSError):
            await aiordma.listen(HOST, w.listener.port, via=via, device=w.device)
        a, b = await w.both()
        await a.aclose()
        await b.aclose()


@both
async def test_a_prepare_that_fails_ends_the_connection_on_both_sides(via: str) -> None:
    def fail(qp: QueuePair) -> None:
        raise KeyError("window")

    async with world(via) as w:
        with pytest.raises(KeyError, match="window"):
            await w.connect(prepare=fail)
        failures: list[BaseException] = []

        async def accept(request: Request) -> None:
            try:
                await request.accept(prepare=fail)
            except KeyError as e:
                failures.append(e)

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, accept)
            with pytest.raises(RejectedError):
                await w.connect()
            await eventually(lambda: failures)
            group.cancel_scope.cancel()


@both
async def test_a_qp_that_cannot_be_made_rejects_the_request(via: str) -> None:
    async with world(via) as w:

        async def accept(request: Request) -> None:
            with pytest.raises(aiordma.RdmaError):
                await request.accept(max_send_wr=1 << 20)

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, accept)
            with pytest.raises(ConnectError):
                await w.connect()
            group.cancel_scope.cancel()


# ---------------------------------------------------------------- arguments


@both
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"host": ""}, "host"),
        ({"host": 5}, "host"),
        ({"host": "a\0b"}, "host"),
        ({"port": 0}, "port"),
        ({"port": 70000}, "port"),
        ({"port": "80"}, "port"),
        ({"port": True}, "port"),
        ({"via": "udp"}, "via"),
        ({"device": "mlx5_0"}, "device"),
        ({"config": 5}, "config"),
        ({"nonsense": 5}, "nonsense"),
        ({"qp_type": "UC"}, "RC"),
        ({"max_send_wr": 0}, "max_send_wr"),
        ({"prepare": 5}, "prepare"),
        ({"host": None}, "host"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"timeout": True}, "timeout"),
    ],
    ids=str,
)
async def test_bad_arguments_are_refused_before_anything_happens(
    via: str, arguments: dict[str, Any], match: str
) -> None:
    call: dict[str, Any] = {"host": HOST, "port": 1, "via": via} | arguments
    with pytest.raises(UsageError, match=match):
        await aiordma.connect(call.pop("host"), call.pop("port"), **call)


@pytest.mark.parametrize(
    "arguments",
    [
        {"port": -1},
        {"port": 1 << 16},
        {"backlog": 0},
        {"backlog": "5"},
        {"backlog": True},
        {"via": 1},
        {"config": {}},
        {"device": 1},
    ],
    ids=str,
)
async def test_bad_arguments_of_a_listener_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        await aiordma.listen(HOST, **arguments)


@both
@pytest.mark.parametrize("timeout", [math.inf, 10**400, 1e300, Fraction(61, 2), None], ids=lambda t: f"{t}"[:8])
async def test_every_number_of_seconds_is_a_timeout_and_the_endless_ones_are_none(via: str, timeout: Any) -> None:
    async with world(via) as w:
        mine, theirs = await w.both(timeout=timeout, accept_timeout=timeout)
        async with anyio.create_task_group() as group:
            group.start_soon(mine.aclose, timeout)
            group.start_soon(theirs.aclose, timeout)


@both
@pytest.mark.parametrize("timeout", [-1, 0, -(10**400), 1e-12], ids=lambda t: f"{t}"[:8])
async def test_a_time_that_is_over_already_is_a_timeout(via: str, timeout: Any) -> None:
    async with world(via) as w:
        with pytest.raises(ConnectTimeoutError):
            await w.connect(timeout=timeout)


@both
async def test_bad_arguments_of_an_answer_leave_the_request_unanswered(via: str) -> None:
    async with world(via) as w, anyio.create_task_group() as group:

        async def knock() -> None:
            async with w.connect() as connection:
                await connection.wait_disconnected()

        group.start_soon(knock)
        request = await w.listener.accept()
        bad: list[dict[str, Any]] = [
            {"timeout": "5"},
            {"timeout": math.nan},
            {"device": 7},
            {"config": 0},
            {"config": {}},
            {"private_data": bytes(197)},
            {"nonsense": 1},
        ]
        for arguments in bad:
            with pytest.raises(UsageError):
                await request.accept(**arguments)
        for reason in (-1, 1 << 16, "1", 1.0, True, None):
            with pytest.raises(UsageError, match="reason"):
                await request.reject(reason)  # type: ignore[arg-type]
        async with request.accept() as connection:
            for timeout in ("2", math.nan, True):
                with pytest.raises(UsageError, match="timeout"):
                    await connection.aclose(timeout)  # type: ignore[arg-type]
            assert not connection.closed

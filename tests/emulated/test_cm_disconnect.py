"""Connections that end: in order, by surprise, twice, and while somebody waits."""

import signal
import warnings

import anyio
import pytest
from emulated.cm import HOST, both, fds, let_go, peer, qps, world
from emulated.core import eventually

import aiordma
from aiordma import (
    ClosedError,
    Completion,
    Connection,
    DisconnectedError,
    DisconnectedFlushError,
    UsageError,
    WrFlushError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.librdmacm]


async def _ended_by_peer(operation: Completion) -> DisconnectedFlushError:
    with anyio.fail_after(20), pytest.raises(DisconnectedFlushError) as caught:
        await operation
    return caught.value


@both
@pytest.mark.parametrize("active", [True, False], ids=["active", "passive"])
async def test_a_close_on_either_side_is_seen_on_the_other_by_everybody_who_waits(via: str, active: bool) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(64)) as memory:
        closing, other = await w.both()
        if not active:
            closing, other = other, closing
        receives = [other.recv(memory[i * 8 : (i + 1) * 8]) for i in range(3)]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(other.wait_disconnected)
                group.start_soon(other.wait_disconnected)
                await closing.aclose()
        assert other.disconnected
        for receive in receives:
            error = await _ended_by_peer(receive)
            assert isinstance(error, ConnectionResetError)
            assert isinstance(error, WrFlushError)
            assert isinstance(error, DisconnectedError)
            assert "peer ended the connection" in str(error)
        assert other.qp.state == "ERR"
        await _ended_by_peer(other.send(b"too late"))
        await other.aclose()
        for connection in (closing, other):
            with pytest.raises(ClosedError):
                connection.send(b"much too late")
            with pytest.raises(ClosedError):
                connection.recv(memory[:8])


@both
async def test_what_was_received_before_the_close_is_still_there(via: str) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(64)) as memory:
        a, b = await w.both()
        receives = [b.recv(memory[i * 8 : (i + 1) * 8]) for i in range(4)]
        for _ in range(3):
            await a.send(b"message")
        await a.aclose()
        for receive in receives[:3]:
            assert (await receive).byte_len == 7
        await _ended_by_peer(receives[3])
        await b.aclose()


@both
async def test_what_a_peer_says_before_it_leaves_at_once_is_heard(via: str) -> None:
    """The client has its receives posted, and the server's message, whether or not it learns first that it's connected."""
    async with world(via) as w, w.device.reg_mr(bytearray(64)) as memory:

        async def say(request: aiordma.Request) -> None:
            async with request.accept() as connection:
                await connection.send(b"bye")

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, say)
            for _ in range(20):
                async with w.connect(prepare=lambda qp: qp.recv(memory[:8])) as connection:
                    assert (await connection.prepared).byte_len == 3
            group.cancel_scope.cancel()


@both
async def test_both_sides_may_close_at_the_same_time_and_twice(via: str) -> None:
    async with world(via) as w:
        for _ in range(5):
            a, b = await w.both()
            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    for connection in (a, b, a, b):
                        group.start_soon(connection.aclose)
            await a.aclose()
            assert a.close() is a.close()
            assert a.closed
            assert b.closed


@both
async def test_close_does_not_wait_for_the_peer(via: str) -> None:
    async with world(via) as w:
        a, b = await w.both()
        with anyio.fail_after(20):
            await a.close()
            await b.wait_disconnected()
        await b.close()


@both
async def test_this_sides_own_close_is_no_disconnect_of_the_peer(via: str) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(64)) as memory:
        a, b = await w.both()
        receive = a.recv(memory[:8])
        await a.close()
        with pytest.raises((WrFlushError, ClosedError)) as caught:
            await receive
        assert not isinstance(caught.value, DisconnectedError)
        await b.aclose()


@both
async def test_waiting_for_the_disconnect_ends_with_this_sides_close_too(via: str) -> None:
    async with world(via) as w:
        a, b = await w.both()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(a.wait_disconnected)
                await anyio.sleep(0.005)
                await a.close()
        await b.aclose()


@both
async def test_closing_the_device_disconnects_its_connections_first(via: str) -> None:
    async with world(via) as w, aiordma.open_device(w.device.name) as device:
        a, b = await w.both(device=device)
        assert device.statistics()["connections"] == 1
        await device.close()
        assert a.closed
        with anyio.fail_after(20):
            await b.wait_disconnected()
        await b.aclose()


@both
async def test_closing_the_qp_alone_does_no_harm(via: str) -> None:
    async with world(via) as w:
        a, b = await w.both()
        await a.qp.close()
        await a.aclose()
        with anyio.fail_after(20):
            await b.wait_disconnected()
        await b.aclose()


@both
async def test_a_forgotten_connection_warns_and_is_closed(via: str) -> None:
    async with world(via) as w:
        a, b = await w.both()
        number = a.qp.qp_num
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del a
            await let_go_warning()
        assert any(
            issubclass(warning.category, ResourceWarning) and "unclosed <Connection" in str(warning.message)
            for warning in caught
        ), number
        with anyio.fail_after(20):
            await b.wait_disconnected()
        await b.aclose()
        await eventually(lambda: qps(w.device) == 0)


async def let_go_warning() -> None:
    import gc

    gc.collect()
    await anyio.sleep(0.01)


@both
async def test_a_forgotten_listener_and_a_forgotten_request_warn_and_are_closed(via: str) -> None:
    async with world(via) as w:
        listener = await aiordma.listen(HOST, via=via, device=w.device)
        port = listener.port
        refused: list[BaseException] = []

        async def knock() -> None:
            try:
                await aiordma.connect(HOST, port, via=via, device=w.device)
            except ConnectionRefusedError as e:
                refused.append(e)

        async with anyio.create_task_group() as group:
            group.start_soon(knock)
            request = await listener.accept()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del request
                await let_go_warning()
                del listener
                await let_go_warning()
        messages = [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)]
        assert any("unanswered <Request" in message for message in messages)
        assert any("unclosed <Listener" in message for message in messages)
        assert len(refused) == 1
        await let_go()

        async def gone() -> None:
            with pytest.raises(ConnectionError):
                await aiordma.connect(HOST, port, via=via, device=w.device, timeout=5)

        await gone()


@both
async def test_an_acceptance_that_nobody_awaits_leaves_an_unanswered_request(via: str) -> None:
    async with world(via) as w:
        refused: list[BaseException] = []

        async def knock() -> None:
            try:
                await w.connect()
            except ConnectionRefusedError as e:
                refused.append(e)

        async with anyio.create_task_group() as group:
            group.start_soon(knock)
            request = await w.listener.accept()
            opening = request.accept()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                # Python's own, of the coroutine; a record of it would keep the coroutine.
                warnings.simplefilter("ignore", RuntimeWarning)
                del request, opening
                await let_go_warning()
        assert any("unanswered <Request" in str(warning.message) for warning in caught)
        assert len(refused) == 1

        # It's answered by what is awaited, whatever was called before.
        async with anyio.create_task_group() as group:
            group.start_soon(knock)
            request = await w.listener.accept()
            opening = request.accept()
            await request.reject(5)
            with pytest.raises(UsageError, match="answered already"):
                await opening
        assert len(refused) == 2


@both
async def test_an_event_that_comes_after_the_close_meets_nobody(via: str) -> None:
    async with world(via) as w:
        # The device has its completion queues, and worker threads their descriptors, from the first on.
        before = 0
        for i in range(20):
            if i == 1:
                before = fds()
            a, b = await w.both()
            # Neither waits for the other's answer, so each gets events of a connection that it has let go.
            first, second = a.close(), b.close()
            await first
            await second
        await eventually(lambda: fds() <= before)


# ---------------------------------------------------------------- peers that die

SERVER = """
async def main():
    async with aiordma.open_device(DEVICE) as device, aiordma.listen(HOST, via=VIA, device=device) as listener:
        say(listener.port)
        connections = []
        async for request in listener:
            connections.append(await request.accept())
            say("connected")
asyncio.run(main())
"""

CLIENT = """
async def main():
    async with aiordma.open_device(DEVICE) as device:
        async with aiordma.connect(HOST, PORT, via=VIA, device=device) as connection:
            say("connected")
            await connection.wait_disconnected()
            say("disconnected")
    say("closed")
asyncio.run(main())
"""


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_is_killed_disconnects_its_clients(via: str, number: int) -> None:
    async with aiordma.open_device("emulated:mlx5_0") as device, device.reg_mr(bytearray(64)) as memory:
        with peer(SERVER, via) as server:
            port = int(await server.heard())
            connections: list[Connection] = []
            for _ in range(3):
                connections.append(await aiordma.connect(HOST, port, via=via, device=device))
                assert await server.heard() == "connected"
            receives = [connection.recv(memory[:8]) for connection in connections]
            server.signal(number)
            for connection, receive in zip(connections, receives, strict=True):
                with anyio.fail_after(30):
                    await connection.wait_disconnected()
                await _ended_by_peer(receive)
                await connection.aclose()
        with pytest.raises(ConnectionError):
            await aiordma.connect(HOST, port, via=via, device=device, timeout=5)
        assert qps(device) == 0


@both
async def test_a_client_that_is_killed_disconnects_at_the_server(via: str) -> None:
    async with world(via) as w:
        with peer(CLIENT, via, HOST, w.listener.port) as client:
            connection = await (await w.listener.accept()).accept()
            assert await client.heard() == "connected"
            client.kill()
            with anyio.fail_after(30):
                await connection.wait_disconnected()
            await connection.aclose()


@both
async def test_a_client_in_another_process_sees_the_close_and_ends(via: str) -> None:
    async with world(via) as w:
        with peer(CLIENT, via, HOST, w.listener.port) as client:
            connection = await (await w.listener.accept()).accept()
            assert await client.heard() == "connected"
            await connection.aclose()
            assert await client.heard() == "disconnected"
            assert await client.heard() == "closed"
            assert await client.ended() == 0


@both
async def test_a_peer_that_stands_still_is_not_waited_for(via: str) -> None:
    async with world(via) as w:
        with peer(CLIENT, via, HOST, w.listener.port) as client:
            connection = await (await w.listener.accept()).accept()
            assert await client.heard() == "connected"
            client.signal(signal.SIGSTOP)
            with anyio.fail_after(30):
                await connection.aclose(timeout=0.05)
            client.signal(signal.SIGCONT)
            assert await client.heard() == "disconnected"

"""Timeouts and cancellations at each step: they say where it stood, and leave nothing behind."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
import sniffio
from emulated.cm import EMULATED, HOST, World, both, fds, hold, peer, qps, world
from emulated.core import eventually

import aiordma
from aiordma import (
    ClosedError,
    ConnectError,
    ConnectTimeoutError,
    DisconnectedError,
    QueuePair,
    RejectedError,
    Request,
)
from aiordma.cm._rdmacm import RdmaLink

pytestmark = [pytest.mark.anyio, pytest.mark.librdmacm]

SOON = 0.1


def _longer(seconds: float) -> float:
    """What to try when a timeout came before the step that it was to come at."""
    assert seconds < 20, "not even then"
    return 2 * seconds


async def _stall(_: Any) -> None:
    await anyio.sleep_forever()


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextlib.contextmanager
def _name_service_is_silent() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anyio, "getaddrinfo", lambda *_, **__: anyio.sleep_forever())
        yield


# What stops a connection at a step: a state of the world, options of connect(), what the server does with the request.
Handler = Callable[[Request], Awaitable[Any]]
STALLS: dict[str, tuple[Callable[[], Any], dict[str, Any], Handler]] = {
    "resolving the name": (_name_service_is_silent, {}, hold),
    "making the QP and preparing it": (_nothing, {"prepare": _stall}, hold),
    "waiting for the peer's answer": (_nothing, {}, _stall),
}


async def _accept_or_lose(request: Request) -> None:
    """A server that a client may leave at any moment."""
    try:
        await hold(request)
    except (DisconnectedError, ConnectError):
        pass


@contextlib.asynccontextmanager
async def _serving(w: World, handler: Handler) -> Any:
    async with anyio.create_task_group() as group:

        async def handle(request: Request) -> None:
            try:
                await handler(request)
            except (DisconnectedError, ConnectError):
                pass  # the client left while it was accepted
            finally:
                if handler is _stall:
                    with anyio.CancelScope(shield=True):
                        await request.reject()

        group.start_soon(w.serve, handle)
        yield
        group.cancel_scope.cancel()


@both
@pytest.mark.parametrize("step", STALLS)
async def test_a_timeout_of_connect_names_the_step_and_leaves_nothing(via: str, step: str) -> None:
    state, options, handler = STALLS[step]
    async with world(via) as w, _serving(w, handler):
        seconds = SOON
        while True:
            with state(), pytest.raises(ConnectTimeoutError) as caught:
                await w.connect(timeout=seconds, **options)
            await eventually(lambda: qps(w.device) == 0)
            if caught.value.step == step:
                break
            seconds = _longer(seconds)
        assert isinstance(caught.value, TimeoutError)
        assert step in str(caught.value)


@both
@pytest.mark.parametrize("step", STALLS)
async def test_a_cancellation_of_connect_at_each_step_leaves_nothing(via: str, step: str) -> None:
    state, options, handler = STALLS[step]
    async with world(via) as w, _serving(w, handler):
        with state(), anyio.move_on_after(SOON) as scope:
            await w.connect(timeout=None, **options)
        assert scope.cancelled_caught
        await eventually(lambda: qps(w.device) == 0)


SERVER = """
async def main():
    async with aiordma.open_device(DEVICE) as device, aiordma.listen(HOST, via=VIA, device=device) as listener:
        say(listener.port)
        held = []
        async for request in listener:
            try:
                held.append(await request.accept())
            except (aiordma.DisconnectedError, aiordma.ConnectError):
                pass
asyncio.run(main())
"""


@both
@pytest.mark.skipif(not EMULATED, reason="only the emulated NIC's commands can be slowed down")
@pytest.mark.parametrize("state", ["RTR", "RTS"])
@pytest.mark.parametrize("cancel", [False, True], ids=["timeout", "cancel"])
async def test_an_end_while_the_qp_is_brought_up_waits_for_the_verb_and_leaves_nothing(
    via: str, state: str, cancel: bool
) -> None:
    from aiordma.emulator import faults

    async with aiordma.open_device("emulated:mlx5_0") as device:
        with peer(SERVER, via) as server:
            port = int(await server.heard())
            async with aiordma.connect(HOST, port, via=via, device=device):
                pass
            seconds = SOON
            while True:
                scope = anyio.CancelScope()
                ended: list[str] = []

                async def attempt(
                    scope: anyio.CancelScope = scope, ended: list[str] = ended, seconds: float = seconds
                ) -> None:
                    try:
                        with scope:
                            await aiordma.connect(
                                HOST, port, via=via, device=device, timeout=None if cancel else seconds
                            )
                        ended.append("cancelled" if scope.cancelled_caught else "connected")
                    except ConnectTimeoutError as e:
                        ended.append(e.step)

                with faults.verb("modify_qp", delay=3600, state=state) as slow:
                    async with anyio.create_task_group() as group:
                        group.start_soon(attempt)
                        await eventually(lambda slow=slow, ended=ended: slow.hits or ended)
                        if cancel:
                            scope.cancel()
                        # The timeout, which began before, is over before this.
                        await anyio.sleep(seconds)
                        waited = not ended
                        slow.stop()
                assert qps(device) == 0
                if slow.hits:
                    break
                seconds = _longer(seconds)
            assert waited
            assert ended == ["cancelled" if cancel else "bringing the QP to RTS"]


@both
async def test_cancelling_a_task_of_asyncio_leaves_nothing(via: str) -> None:
    if sniffio.current_async_library() != "asyncio":
        return
    async with world(via) as w, _serving(w, _stall):
        task = asyncio.ensure_future(w.connect(timeout=None))
        await anyio.sleep(SOON)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert qps(w.device) == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(w.connect(timeout=None), SOON)
        assert qps(w.device) == 0


@both
async def test_a_timeout_of_accept_while_it_prepares_rejects_the_request(via: str) -> None:
    async with world(via) as w:
        errors: list[ConnectTimeoutError] = []

        async def accept(request: Request) -> None:
            with pytest.raises(ConnectTimeoutError) as caught:
                await request.accept(prepare=_stall, timeout=SOON)
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, accept)
            with pytest.raises(RejectedError):
                await w.connect()
            await eventually(lambda: errors)
            group.cancel_scope.cancel()
        assert errors[0].step == "making the QP and preparing it"
        assert "the request from" in str(errors[0])


SLOW_CLIENT = """
async def main():
    async with aiordma.open_device(DEVICE) as device:
        say("ready")
        hear()
        async with aiordma.connect(HOST, PORT, via=VIA, device=device) as connection:
            say("connected")
            await connection.wait_disconnected()
asyncio.run(main())
"""


@both
@pytest.mark.parametrize("cancel", [False, True], ids=["timeout", "cancel"])
async def test_an_accept_whose_client_does_not_confirm_ends(via: str, cancel: bool) -> None:
    async with world(via) as w:
        seconds = SOON
        while True:
            with peer(SLOW_CLIENT, via, HOST, w.listener.port) as client:
                assert await client.heard() == "ready"
                client.say("go")
                request = await w.listener.accept()
                client.stop()
                if cancel:
                    with anyio.move_on_after(seconds) as scope:
                        await request.accept(timeout=None)
                    assert scope.cancelled_caught
                else:
                    with pytest.raises(ConnectTimeoutError) as caught:
                        await request.accept(timeout=seconds)
                assert qps(w.device) == 0
            if cancel or caught.value.step == "waiting for the peer's confirmation":
                break
            seconds = _longer(seconds)


@both
async def test_a_client_that_gave_up_is_known_at_the_latest_when_it_is_accepted(via: str) -> None:
    async with world(via) as w:
        with pytest.raises(ConnectTimeoutError):
            await w.connect(timeout=SOON)
        with anyio.fail_after(20):
            while True:
                with anyio.move_on_after(SOON) as scope:
                    request = await w.listener.accept()
                if not scope.cancelled_caught:
                    with pytest.raises((DisconnectedError, ConnectError)):
                        await request.accept(timeout=5)
                    return
                # TCP tells at once that the client is gone, and the listener drops its request.
                if w.listener.waiting == 0:
                    return


@both
async def test_connecting_goes_on_working_after_cancellations_at_any_moment(via: str) -> None:
    """Seeded; the delays reach from before the first step to after the last."""
    dice = random.Random(20241)
    async with world(via) as w, _serving(w, _accept_or_lose):
        async with w.connect():
            pass
        before = 0
        came = cancelled = 0
        for i in range(60):
            if i == 10:
                await eventually(lambda: qps(w.device) == 0)
                before = fds()
            with anyio.move_on_after(dice.choice([0, dice.uniform(0, 0.004), dice.uniform(0, 0.02)])) as scope:
                connection = await w.connect()
                came += 1
                await connection.aclose()
            cancelled += scope.cancelled_caught
        assert cancelled > 5
        async with w.connect() as connection:
            assert connection.qp.state == "RTS"
        await eventually(lambda: qps(w.device) == 0)
        await eventually(lambda: fds() <= before)


@both
async def test_accepting_goes_on_working_after_cancellations_at_any_moment(via: str) -> None:
    dice = random.Random(20242)
    async with world(via) as w:

        async def accept_for_a_while(request: Request) -> None:
            try:
                with anyio.move_on_after(dice.choice([0, dice.uniform(0, 0.004), dice.uniform(0, 0.02)])):
                    await hold(request)
            except (DisconnectedError, ConnectError):
                pass

        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, accept_for_a_while)
            for _ in range(60):
                try:
                    async with w.connect(timeout=10) as connection:
                        with anyio.fail_after(20):
                            await connection.wait_disconnected()
                except (ConnectError, DisconnectedError):
                    pass
            group.cancel_scope.cancel()
        a, b = await w.both()
        await a.aclose()
        await b.aclose()


# ---------------------------------------------------------------- listeners


@both
async def test_closing_the_listener_ends_those_who_wait_for_requests(via: str) -> None:
    async with world(via) as w:
        ended = []

        async def iterate() -> None:
            async for _ in w.listener:
                raise AssertionError("a request from nobody")
            ended.append("iteration")

        async def accept() -> None:
            with pytest.raises(ClosedError):
                await w.listener.accept()
            ended.append("accept")

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(iterate)
                group.start_soon(accept)
                await anyio.sleep(0.01)
                await w.listener.aclose()
        assert sorted(ended) == ["accept", "iteration"]
        with pytest.raises(ClosedError):
            await w.listener.accept()
        await w.listener.aclose()


@both
async def test_requests_that_wait_when_the_listener_is_closed_are_rejected(via: str) -> None:
    async with world(via) as w:
        errors: list[RejectedError] = []

        async def knock() -> None:
            with pytest.raises(RejectedError) as caught:
                await w.connect()
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(knock)
            await eventually(lambda: w.listener.waiting == 3)
            await w.listener.aclose()
        assert len(errors) == 3


@both
async def test_connections_live_on_when_their_listener_is_closed(via: str) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(16)) as memory:
        a, b = await w.both()
        await w.listener.aclose()
        await a.rdma_write(b"still here", memory.remote())
        await a.aclose()
        with anyio.fail_after(20):
            await b.wait_disconnected()
        await b.aclose()


@both
async def test_requests_beyond_the_backlog_are_rejected_for_want_of_resources(via: str) -> None:
    async with world(via, backlog=3) as w:
        refused: list[RejectedError] = []
        connected: list[aiordma.Connection] = []

        async def knock() -> None:
            try:
                connected.append(await w.connect())
            except RejectedError as e:
                refused.append(e)

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(knock)
            await eventually(lambda: len(refused) == 5)
            assert w.listener.waiting == 3
            theirs = [await (await w.listener.accept()).accept() for _ in range(3)]
        assert {error.status for error in refused} == {3}
        assert len(connected) == 3
        for connection in (*connected, *theirs):
            await connection.aclose()


@both
async def test_a_waiting_accept_can_be_cancelled_and_the_request_is_not_lost(via: str) -> None:
    async with world(via) as w:
        with anyio.move_on_after(0.01):
            await w.listener.accept()
        a, b = await w.both()
        await a.aclose()
        await b.aclose()


@both
async def test_a_prepare_that_is_cancelled_with_receives_posted_leaves_nothing(via: str) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(64)) as memory:
        receives: list[aiordma.Completion] = []

        async def prepare(qp: QueuePair) -> None:
            receives.append(qp.recv(memory[:8]))
            await anyio.sleep_forever()

        with anyio.move_on_after(SOON):
            await w.connect(prepare=prepare)
        assert qps(w.device) == 0
        with pytest.raises((aiordma.WrFlushError, ClosedError)):
            await receives[0]


async def test_a_client_that_is_cancelled_when_the_answer_has_come_is_one_that_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = RdmaLink._call_ready

    async def stall(self: RdmaLink, end: Any, qp: QueuePair) -> None:
        if self._endpoint is None:
            await ready(self, end, qp)
        else:
            left.set()
            await anyio.sleep_forever()

    monkeypatch.setattr(RdmaLink, "_call_ready", stall)
    left = anyio.Event()
    async with world("rdma_cm") as w, anyio.create_task_group() as group:

        async def leave() -> None:
            await left.wait()
            client.cancel()

        async def knock() -> None:
            with client:
                await w.connect()

        client = anyio.CancelScope()
        group.start_soon(knock)
        group.start_soon(leave)
        with pytest.raises(DisconnectedError, match="gave up"):
            await (await w.listener.accept()).accept()

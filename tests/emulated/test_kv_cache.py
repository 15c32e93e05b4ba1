"""examples/kv_cache from end to end: server and clients in processes of their own, ended in good order and killed."""

# ruff: noqa: SIM117

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from emulated.cm import DEVICE, both

import aiordma
from aiordma import CompletionError, Connection, RejectedError, RemoteBuffer

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

from kv_cache.__main__ import is_whole, value_of  # noqa: E402
from kv_cache.client import CacheError, Client  # noqa: E402
from kv_cache.layout import MESSAGE, Greeting, Message, Op  # noqa: E402
from kv_cache.server import Server  # noqa: E402

pytestmark = [pytest.mark.anyio, pytest.mark.librdmacm]


class Program:
    """``python -m kv_cache ...``, with warnings as errors."""

    def __init__(self, *arguments: str, backend: str = "asyncio") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "kv_cache", "--backend", backend, *arguments, "--device", DEVICE],
            env=os.environ | {"PYTHONPATH": str(EXAMPLES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    async def line(self) -> str:
        assert self._process.stdout is not None
        found = await anyio.to_thread.run_sync(self._process.stdout.readline, abandon_on_cancel=True)
        if not found:
            pytest.fail(f"the program has ended: {self._process.communicate(timeout=60)}")
        return found.strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def ended(self) -> tuple[int, str, str]:
        """Its status, and what it printed."""
        out, err = await anyio.to_thread.run_sync(lambda: self._process.communicate(timeout=60))
        return self._process.returncode, out, err

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate(timeout=60)


@contextmanager
def program(*arguments: str, backend: str = "asyncio") -> Iterator[Program]:
    started = Program(*arguments, backend=backend)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def server(via: str, port: int = 0, slots: int = 64, backend: str = "asyncio") -> Iterator[Program]:
    with program("serve", "--via", via, "--port", str(port), "--slots", str(slots), backend=backend) as started:
        yield started


async def _port(started: Program) -> int:
    return int((await started.line()).rpartition(" ")[2])


@both
async def test_values_are_stored_fetched_replaced_and_deleted(via: str) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with server(via) as started:
            port = await _port(started)
            async with Client(device, "127.0.0.1", port, via=via) as a, Client(device, "127.0.0.1", port, via=via) as b:
                assert await a.get(b"key") is None
                await a.put(b"key", b"one")
                assert await b.get(b"key") == b"one"
                await b.put(b"key", b"two" * 100)
                # What a knew of the old place is of no use, and it notices.
                assert await a.get(b"key") == b"two" * 100
                await a.put(b"empty", b"")
                assert await b.get(b"empty") == b""
                assert await a.count() == 2
                assert await a.delete(b"key")
                assert not await b.delete(b"key")
                assert await b.get(b"key") is None
                with pytest.raises(CacheError, match="at most"):
                    await a.put(b"key", bytes(5000))
                with pytest.raises(ValueError, match="64"):
                    await a.get(bytes(65))
            started.signal(signal.SIGTERM)
            status, _, err = await started.ended()
            assert (status, err) == (0, "")


@both
async def test_when_it_is_full_what_was_used_longest_ago_goes(via: str) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with server(via, slots=8) as started:
            async with Client(device, "127.0.0.1", await _port(started), via=via) as cache:
                for i in range(20):
                    await cache.put(f"{i}".encode(), value_of(b"x", i, 100))
                assert await cache.count() == 8
                for i in range(20):
                    value = await cache.get(f"{i}".encode())
                    assert value == (value_of(b"x", i, 100) if i >= 12 else None)


@both
async def test_a_cancelled_request_does_not_confuse_the_next(via: str) -> None:
    dice = random.Random(5)
    async with aiordma.open_device(DEVICE) as device:
        with server(via) as started:
            async with Client(device, "127.0.0.1", await _port(started), via=via) as cache:
                for i in range(40):
                    key = f"{i % 5}".encode()
                    with anyio.move_on_after(dice.uniform(0, 0.003)):
                        await cache.put(key, value_of(key, i, 500))
                    value = await cache.get(key)
                    assert value is None or is_whole(key, value)
                assert cache.reconnects == 0


@both
async def test_requests_that_are_cancelled_leave_the_slots_to_others(via: str) -> None:
    dice = random.Random(6)
    async with aiordma.open_device(DEVICE) as device:
        with server(via, slots=3) as started:
            port = await _port(started)
            async with Client(device, "127.0.0.1", port, via=via) as a, Client(device, "127.0.0.1", port, via=via) as b:
                for i in range(60):
                    with anyio.move_on_after(dice.uniform(0, 0.003)):
                        await a.put(f"{i}".encode(), bytes(100))
                with anyio.fail_after(20):
                    for i in range(10):
                        await b.put(f"{i}".encode(), b"there is room")
                assert await b.get(b"9") == b"there is room"


@both
async def test_what_is_no_key_and_no_value_is_refused_and_takes_no_slot(via: str) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with server(via, slots=2) as started:
            async with Client(device, "127.0.0.1", await _port(started), via=via) as cache:
                value: Any
                for value in ("text", None, 5, [1]):
                    with pytest.raises(TypeError):
                        await cache.put(b"key", value)
                key: Any
                for key in ("text", None, 5, bytearray(b"key")):
                    for call in (cache.get(key), cache.put(key, b"value"), cache.delete(key)):
                        with pytest.raises(TypeError):
                            await call
                for value in (bytearray(b"12345678"), memoryview(b"12345678").cast("I")):
                    await cache.put(b"key", value)
                    assert await cache.get(b"key") == b"12345678"
                assert await cache.count() == 1


@both
async def test_no_client_can_end_the_server_or_disturb_the_others(via: str) -> None:
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(1000)) as memory:
        with server(via, slots=4) as started:
            port = await _port(started)
            async with Client(device, "127.0.0.1", port, via=via) as cache:
                await cache.put(b"key", b"value")

                async def sends(connection: Connection, length: int) -> None:
                    await connection.send(memory[:length])
                    await connection.wait_disconnected()

                async def writes(connection: Connection) -> None:
                    there = Greeting.unpack(connection.private_data).memory
                    await connection.rdma_write(b"x", RemoteBuffer(there.addr, there.rkey ^ 0x5500, 1))

                async def hears_nothing(connection: Connection) -> None:
                    sent = [connection.send(Message(Op.COUNT, number).pack()) for number in range(8)]
                    await anyio.sleep(0.1)
                    await connection.aclose()
                    for completion in sent:
                        with contextlib.suppress(CompletionError):
                            await completion

                for misdeed in (
                    *(partial(sends, length=length) for length in (0, 1, MESSAGE - 1, MESSAGE + 1, 1000)),
                    writes,
                    hears_nothing,
                ):
                    with contextlib.suppress(CompletionError), anyio.fail_after(20):
                        async with aiordma.connect("127.0.0.1", port, device=device, via=via) as connection:
                            await misdeed(connection)
                    assert await cache.get(b"key") == b"value"
                assert cache.reconnects == 0
            started.signal(signal.SIGTERM)
            status, _, err = await started.ended()
            assert (status, "Traceback" in err) == (0, False), err


@both
async def test_a_client_that_finds_no_server_says_which_and_why(via: str) -> None:
    async with aiordma.open_device(DEVICE) as device:
        patience, refused = 0.3, False
        while not refused:
            with pytest.raises(TimeoutError, match=rf"127\.0\.0\.1:1 within {patience} seconds") as caught:
                async with Client(device, "127.0.0.1", 1, via=via, patience=patience):
                    pass
            # Unless that was too short for a single try.
            refused = "refused" in str(caught.value)
            patience *= 2
            assert patience < 60
        assert device.statistics()["queue_pairs"] == 0
        assert device.statistics()["memory_regions"] == 0


@both
async def test_clients_live_through_a_restart_in_good_order(via: str) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with server(via, backend="trio") as first:
            port = await _port(first)
            cache = Client(device, "127.0.0.1", port, via=via)
            async with cache:
                await cache.put(b"key", b"value")
                first.signal(signal.SIGTERM)
                status, out, err = await first.ended()
                assert (status, err) == (0, "")
                assert "SIGTERM: stopping" in out
                with server(via, port, backend="uvloop") as second:
                    await _port(second)
                    assert await cache.get(b"key") is None
                    await cache.put(b"key", b"again")
                    assert await cache.get(b"key") == b"again"
                assert cache.reconnects == 1


@both
async def test_a_server_with_too_many_clients_rejects_the_next(via: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import kv_cache.server as module

    monkeypatch.setattr(module, "MAX_CLIENTS", 1)
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(4 * 4096)) as memory:
        one = Server(device, memory, 4)
        async with aiordma.listen("127.0.0.1", device=device, config=module.CONFIG, via=via) as listener:
            async with anyio.create_task_group() as tasks:

                async def serve() -> None:
                    async for request in listener:
                        tasks.start_soon(one.session, request)

                tasks.start_soon(serve)
                async with Client(device, "127.0.0.1", listener.port, via=via) as cache:
                    await cache.put(b"a", b"b")
                    with pytest.raises(RejectedError, match="too many clients"):
                        await aiordma.connect("127.0.0.1", listener.port, device=device, via=via)
                tasks.cancel_scope.cancel()
        one.close()


# ---------------------------------------------------------------- killed


async def _work(cache: Client, number: int, stop: anyio.Event, done: list[int]) -> None:
    dice = random.Random(number)
    count = 0
    while not stop.is_set():
        key = f"key {dice.randrange(60)}".encode()
        count += 1
        if dice.random() < 0.4:
            await cache.put(key, value_of(key, number << 32 | count, dice.randrange(50, 3000)))
        else:
            value = await cache.get(key)
            assert value is None or is_whole(key, value), "a value that nobody put"
    done.append(count)


@both
async def test_clients_live_through_servers_that_are_killed_at_any_moment(via: str) -> None:
    dice = random.Random(77)
    stop = anyio.Event()
    done: list[int] = []
    async with aiordma.open_device(DEVICE) as device:
        clients: list[Client] = []
        with server(via, slots=32) as started:
            port = await _port(started)
            async with anyio.create_task_group() as tasks:
                for number in range(3):
                    clients.append(Client(device, "127.0.0.1", port, via=via, patience=60))
                    await clients[-1].__aenter__()
                    tasks.start_soon(_work, clients[-1], number, stop, done)
                current = started
                for _ in range(2):
                    await anyio.sleep(dice.uniform(0.05, 0.4))
                    current.signal(signal.SIGKILL)
                    await current.ended()
                    current = Program("serve", "--via", via, "--port", str(port), "--slots", "32")
                    try:
                        await _port(current)
                        await anyio.sleep(dice.uniform(0.05, 0.2))
                    except BaseException:
                        current.close()
                        raise
                stop.set()
            for cache in clients:
                await cache.__aexit__(None, None, None)
                assert cache.reconnects >= 1
            current.signal(signal.SIGTERM)
            status, _, err = await current.ended()
            assert (status, err) == (0, "")
        assert len(done) == 3
        assert device.statistics()["queue_pairs"] == 0


@both
async def test_clients_that_are_killed_at_any_moment_leave_no_slot_behind(via: str) -> None:
    dice = random.Random(78)
    slots = 16

    def load(seed: int) -> Any:
        return program(
            "load", "--via", via, "--port", str(port), "--clients", "2", "--keys", "40", "--seconds", "60",
            "--seed", str(seed),
        )  # fmt: skip

    async with aiordma.open_device(DEVICE) as device:
        with server(via, slots=slots) as started:
            port = await _port(started)
            async with Client(device, "127.0.0.1", port, via=via) as cache:
                for seed in range(2):
                    with load(seed) as killed:
                        with anyio.fail_after(60):
                            before = await cache.count()
                            while await cache.count() <= min(before, slots - 3):  # noqa: ASYNC110
                                await anyio.sleep(0.01)
                        await anyio.sleep(dice.uniform(0, 0.1))
                        killed.signal(signal.SIGKILL)
                        await killed.ended()
                for i in range(60):
                    key = f"key {i % 40}".encode()
                    value = await cache.get(key)
                    assert value is None or is_whole(key, value)
                # A slot that a dead client had reserved for ever would be missing.
                with anyio.fail_after(60):
                    while await cache.count() < slots:
                        for i in range(slots):
                            await cache.put(f"new {i}".encode(), b"value")
            started.signal(signal.SIGTERM)
            status, _, err = await started.ended()
            assert (status, err) == (0, "")

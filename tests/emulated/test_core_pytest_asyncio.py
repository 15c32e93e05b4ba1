"""aiordma in a project that tests with pytest-asyncio: plain tests, fixtures, and its loop in debug mode."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from emulated.core import DEVICE, Pair, connected

import aiordma
from aiordma import Device

pytestmark = [pytest.mark.asyncio, pytest.mark.any_device]


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with aiordma.open_device(DEVICE) as device:
        yield device


@pytest_asyncio.fixture
async def pair(device: Device) -> AsyncIterator[Pair]:
    async with connected(device) as pair:
        yield pair


async def test_fixtures_and_test_share_the_loop(pair: Pair) -> None:
    await pair.check()


async def test_gather_and_task_groups(pair: Pair) -> None:
    ops = [pair.a.rdma_write(pair.local[:8], pair.remote[8 * i :]) for i in range(50)]
    assert await asyncio.gather(*ops) == ops
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(_write(pair))


async def _write(pair: Pair) -> None:
    async with asyncio.timeout(20):
        await pair.a.rdma_write(pair.local[:8], pair.remote)


async def test_debug_mode_finds_nothing_to_say(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        for _ in range(20):
            await pair.check()
            op = pair.block()
            task = asyncio.ensure_future(op)
            await asyncio.sleep(0)
            pair.unblock()
            assert await task is op
    finally:
        loop.set_debug(False)
    assert [record for record in caplog.records if record.name == "asyncio" and "Executing" not in record.msg] == []


@pytest.mark.parametrize("depth", [1, 16])
async def test_parametrized(device: Device, depth: int) -> None:
    async with connected(device, max_send_wr=depth) as pair:
        await pair.a.rdma_write_many([(pair.local[:8], pair.remote)] * 40)

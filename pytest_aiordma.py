"""aiordma's pytest plugin: the fixtures rdma_device, rdma_pair, rdma_faults and rdma_run.

It's a module outside of the package, and imports nothing of it until one of the fixtures is used: pytest loads it in every
run where aiordma is installed. docs/faults.md says how the fixtures are used.

An async fixture must run on the loop that runs the test, and each plugin that runs async tests has its own way to make
one. So there is one of each kind here, and the public fixture asks for the one that fits the test.
"""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from aiordma import Device
    from aiordma.testing import Ledger, RdmaPair

_LOOP_SCOPES: tuple[Literal["function", "class", "module", "package", "session"], ...] = (
    "function",
    "class",
    "module",
    "package",
    "session",
)


# ------------------------------------------------------------------ what the async fixtures do


async def _device(_rdma_ledger: Ledger) -> AsyncIterator[Device]:
    import aiordma
    from aiordma.testing import device_name

    async with aiordma.open_device(device_name()) as device:
        yield device


async def _pair(rdma_device: Device) -> AsyncIterator[RdmaPair]:
    from aiordma.testing import connected_pair

    async with connected_pair(rdma_device) as pair:
        yield pair


@pytest.fixture
async def _rdma_device_anyio(_rdma_ledger: Ledger) -> AsyncIterator[Device]:
    async for device in _device(_rdma_ledger):
        yield device


@pytest.fixture
async def _rdma_pair_anyio(rdma_device: Device) -> AsyncIterator[RdmaPair]:
    async for pair in _pair(rdma_device):
        yield pair


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Adds the fixtures of pytest-asyncio's kind, where it is."""
    if not config.pluginmanager.hasplugin("asyncio"):
        return
    import pytest_asyncio

    module = types.ModuleType("pytest_aiordma_asyncio")
    for scope in _LOOP_SCOPES:
        for name, function in (("device", _device), ("pair", _pair)):
            named = f"_rdma_{name}_asyncio_{scope}"
            decorate: Any = pytest_asyncio.fixture(name=named, loop_scope=scope)
            setattr(module, named, decorate(_copy(function)))
    config.pluginmanager.register(module, "aiordma-asyncio")


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another function of the same code: the decorator marks the function itself."""
    return types.FunctionType(function.__code__, function.__globals__, function.__name__)


# ------------------------------------------------------------------ which kind


def _kind(request: pytest.FixtureRequest) -> str:
    """Who runs the test: the suffix of the fixtures that fit it."""
    config, node = request.config, request.node
    is_async = inspect.iscoroutinefunction(getattr(node, "obj", None))
    marker = node.get_closest_marker("asyncio")
    if is_async and marker is not None and config.pluginmanager.hasplugin("asyncio"):
        scope = marker.kwargs.get("loop_scope") or config.getini("asyncio_default_test_loop_scope") or "function"
        return f"asyncio_{scope}"
    if is_async and "anyio_backend" in request.fixturenames:
        return "anyio"
    if is_async:
        pytest.fail(
            "rdma_device is for async tests that pytest-asyncio or anyio's plugin runs: mark the test asyncio or anyio "
            "(pytest-trio's tests become anyio's with @pytest.mark.anyio and the backend trio)",
            pytrace=False,
        )
    return "sync"


# ------------------------------------------------------------------ tests that aren't async


@pytest.fixture
def _rdma_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def _rdma_device_sync(_rdma_ledger: Ledger, _rdma_runner: asyncio.Runner) -> Iterator[Device]:
    yield from _driven(_rdma_runner, _device(_rdma_ledger))


@pytest.fixture
def _rdma_pair_sync(rdma_device: Device, _rdma_runner: asyncio.Runner) -> Iterator[RdmaPair]:
    yield from _driven(_rdma_runner, _pair(rdma_device))


def _driven(runner: asyncio.Runner, values: AsyncIterator[Any]) -> Iterator[Any]:
    async def step() -> Any:
        return await anext(values)

    async def end() -> None:
        async for _ in values:
            raise AssertionError("the fixture has a second value")

    yield runner.run(step())
    runner.run(end())


@pytest.fixture
def rdma_run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """For tests that aren't async: ``rdma_run(coroutine)`` runs it on the loop that rdma_device belongs to.

    The loop stands still in between: nothing that was posted completes, and no event arrives, but in ``rdma_run``.
    """
    if _kind(request) != "sync":
        pytest.fail("rdma_run is for tests that aren't async; await instead", pytrace=False)
    runner: asyncio.Runner = request.getfixturevalue("_rdma_runner")
    return runner.run


# ------------------------------------------------------------------ the public ones


@pytest.fixture
def _rdma_ledger() -> Iterator[Ledger]:
    """After everything is closed: nothing is left on the emulated devices."""
    from aiordma import emulator
    from aiordma.testing import Ledger, device_name

    if device_name().partition(":")[0] == "emulated" and not emulator.is_attached():
        emulator.attach()
    ledger = Ledger()
    yield ledger
    left = ledger.left_over()
    if left:
        pytest.fail(f"the test left verbs objects on the emulated NIC: {', '.join(left)}", pytrace=False)


@pytest.fixture
def rdma_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An open device on the test's event loop: the emulated NIC, or what AIORDMA_DEVICE names.

    What the test leaves open on it fails the test's teardown, by name, and is closed.
    """
    device: Device = request.getfixturevalue(f"_rdma_device_{_kind(request)}")
    ledger: Ledger = request.getfixturevalue("_rdma_ledger")
    yield device
    if device.closed:
        return
    from aiordma.testing import open_objects

    left = open_objects(device)
    # What pyverbs made would be closed with the context, and nobody would hear of it.
    if not device.objects():
        left += ledger.left_over(device.name)
    if left:
        pytest.fail(f"the test left open on {device!r}: {', '.join(left)}", pytrace=False)


@pytest.fixture
def rdma_pair(request: pytest.FixtureRequest) -> RdmaPair:
    """Two connected RC queue pairs of rdma_device: ``a, b = rdma_pair``."""
    pair: RdmaPair = request.getfixturevalue(f"_rdma_pair_{_kind(request)}")
    return pair


@pytest.fixture
def rdma_faults() -> Iterator[types.ModuleType]:
    """aiordma.emulator.faults, with all faults over at the end. Skips where the device is a real one."""
    from aiordma import emulator
    from aiordma.emulator import faults
    from aiordma.testing import device_name

    name = device_name()
    if not emulator.is_attached():
        if name.partition(":")[0] != "emulated":
            pytest.skip(f"AIORDMA_DEVICE={name} is no emulated device, and faults can't be made on a real one")
        emulator.attach()
    yield faults
    faults.reset()

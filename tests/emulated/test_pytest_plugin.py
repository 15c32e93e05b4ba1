"""The pytest plugin, in the test runs of other projects: each with its plugin for async tests, or with none."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: Errors, but for what an editable install makes pytest say, and pytest-asyncio of projects that leave an option to it.
FILTERS = """error
  ignore:Module already imported so cannot be rewritten; _aiordma_editable_loader
  ignore:The configuration option "asyncio_default_fixture_loop_scope" is unset"""

#: What a project's tests do with the fixtures; MARK is how its async tests are marked.
USE = """
import gc
import pytest
import aiordma
from aiordma import EventType, WrFlushError

MARK

async def test_device(rdma_device):
    assert rdma_device.is_emulated
    async with rdma_device.reg_mr(bytearray(64)) as mr:
        assert len(mr) == 64

async def test_pair(rdma_device, rdma_pair):
    a, b = rdma_pair
    assert a.device is b.device is rdma_device
    async with rdma_device.reg_mr(bytearray(b"hello, world")) as mr, rdma_device.reg_mr(bytearray(12)) as to:
        received = b.recv(to)
        await a.send(mr)
        await received
        assert bytes(to.view()) == b"hello, world"

async def test_faults(rdma_pair, rdma_faults):
    events = rdma_pair.device.events()
    with rdma_faults.qp_fatal(rdma_pair.a, nth=2) as fault:
        receives = [rdma_pair.b.recv(None) for _ in range(2)]
        await rdma_pair.a.send(None)
        with pytest.raises(WrFlushError):
            await rdma_pair.a.send(None)
    assert fault.hits == 1
    event = await anext(events)
    assert (event.type, event.element) == (EventType.QP_FATAL, rdma_pair.a)

async def test_no_fault_is_left(rdma_faults):
    rdma_faults.drop()
    rdma_faults.verb("reg_mr", "ENOMEM")

async def test_nor_here(rdma_device, rdma_faults):
    assert rdma_faults.active() == []
    async with rdma_device.reg_mr(bytearray(64)):
        pass
"""

ANYIO = """
pytestmark = pytest.mark.anyio
@pytest.fixture(params=PARAMS)
def anyio_backend(request):
    return request.param
"""
ALL_LOOPS = '[("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True}), ("trio", {})]'

SETUPS = {
    "pytest-asyncio strict": (USE.replace("MARK", "pytestmark = pytest.mark.asyncio"), "asyncio_mode = strict", 1),
    "pytest-asyncio auto": (USE.replace("MARK", ""), "asyncio_mode = auto", 1),
    "pytest-asyncio, one loop a module": (
        USE.replace("MARK", 'pytestmark = pytest.mark.asyncio(loop_scope="module")'),
        "asyncio_mode = strict",
        1,
    ),
    "pytest-asyncio, one loop for all": (
        USE.replace("MARK", ""),
        "asyncio_mode = auto\nasyncio_default_test_loop_scope = session",
        1,
    ),
    "anyio": (USE.replace("MARK", ANYIO.replace("PARAMS", ALL_LOOPS)), "asyncio_mode = strict", 3),
    "anyio without pytest-asyncio": (
        USE.replace("MARK", ANYIO.replace("PARAMS", ALL_LOOPS)),
        "addopts = -p no:asyncio",
        3,
    ),
    "anyio, one loop a module": (
        USE.replace("MARK", ANYIO.replace("PARAMS", ALL_LOOPS).replace("fixture(", 'fixture(scope="module", ')),
        "asyncio_mode = strict",
        3,
    ),
}


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Runs pytest in a folder of its own, in its own process, warnings being errors."""

    def run(ini: str, tests: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        pytester.makefile(".ini", pytest=f"[pytest]\nfilterwarnings =\n  {FILTERS}\n{ini}")
        pytester.makepyfile(test_it=tests)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            env={k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))} | env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            cwd=pytester.path,
        )

    return run


@pytest.mark.parametrize("setup", SETUPS)
def test_async_tests_get_device_pair_and_faults(run: Run, setup: str) -> None:
    tests, ini, loops = SETUPS[setup]
    done = run(ini, tests)
    assert f"{5 * loops} passed" in done.stdout, done.stdout + done.stderr


def test_tests_that_are_not_async_run_coroutines_on_the_devices_loop(run: Run) -> None:
    done = run(
        "",
        """
        import pytest
        from aiordma import RemoteOperationError

        def test_it(rdma_device, rdma_pair, rdma_run, rdma_faults):
            a, b = rdma_pair

            async def transfer():
                async with rdma_device.reg_mr(bytearray(b"hello")) as mr, rdma_device.reg_mr(bytearray(5)) as to:
                    await a.rdma_write(mr, to.remote())
                    assert bytes(to.view()) == b"hello"
                    with pytest.raises(RemoteOperationError), rdma_faults.fail("REM_OP_ERR", a):
                        await a.rdma_write(mr, to.remote())
                return 7

            assert rdma_run(transfer()) == 7

        def test_pyverbs(rdma_device):
            from pyverbs.cq import CQ
            with CQ(rdma_device.context, 10):
                pass
        """,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


LEAKY = """
import pytest
from pyverbs.mr import MR

kept = []
MARK

async def a_region(device):
    kept.append(await device.reg_mr(bytearray(64)))

async def a_queue_pair(device):
    kept.append(await device.create_qp())

async def by_pyverbs(device):
    kept.append(MR(device.pd, 4096, 1))
"""
#: What names it, for each leak.
NAMED = {"a_region": "MemoryRegion", "a_queue_pair": "QueuePair", "by_pyverbs": "mlx5_0: 1 mr"}
MODES = {
    "asyncio": "pytestmark = pytest.mark.asyncio",
    "anyio": "pytestmark = pytest.mark.anyio\n@pytest.fixture\ndef anyio_backend():\n    return 'trio'\n",
    "sync": "",
}


@pytest.mark.parametrize("mode", MODES)
def test_what_a_test_leaves_open_is_named_and_closed(run: Run, mode: str) -> None:
    tests = LEAKY.replace("MARK", MODES[mode])
    for leak in NAMED:
        if mode == "sync":
            tests += f"def test_{leak}(rdma_device, rdma_run):\n    rdma_run({leak}(rdma_device))\n"
        else:
            tests += f"async def test_{leak}(rdma_device):\n    await {leak}(rdma_device)\n"
    tests += ("" if mode == "sync" else "async ") + "def test_next(rdma_device):\n    pass\n"
    done = run("", tests)
    assert "4 passed, 3 errors" in done.stdout, done.stdout + done.stderr
    for leak, named in NAMED.items():
        report = done.stdout.partition(f"ERROR at teardown of test_{leak}")[2].partition("ERROR at")[0]
        assert "the test left open on" in report
        assert named in report


def test_on_a_real_device_faults_are_skipped_with_the_reason(run: Run) -> None:
    done = run("", "def test_it(rdma_faults):\n    assert False\n", "-rs", AIORDMA_DEVICE="mlx5_7")
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert "AIORDMA_DEVICE=mlx5_7 is no emulated device" in done.stdout


def test_the_device_that_the_environment_names_is_opened(run: Run) -> None:
    tests = """
    import pytest
    from aiordma import emulator
    emulator.attach(2)
    @pytest.mark.asyncio
    async def test_it(rdma_device):
        assert rdma_device.name == "mlx5_1"
    """
    done = run("", tests, AIORDMA_DEVICE="emulated:mlx5_1")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_an_async_test_that_nobody_runs_is_told_who_could(run: Run) -> None:
    tests = """
    import pytest
    async def test_it(rdma_device):
        pass
    """
    done = run("", tests, "-p", "no:asyncio")
    assert "pytest-asyncio or anyio's plugin" in done.stdout, done.stdout + done.stderr


def test_a_run_that_does_not_use_it_imports_nothing_of_the_package(run: Run) -> None:
    tests = """
    import sys
    def test_it():
        assert "pytest_aiordma" in sys.modules
        found = [name for name in sys.modules if name.split(".")[0] in ("aiordma", "pyverbs")]
        assert found == []
    """
    done = run("", tests)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_fixtures_say_what_they_are(run: Run) -> None:
    done = run("", "", "--fixtures")
    for name in ("rdma_device", "rdma_pair", "rdma_faults", "rdma_run"):
        assert name in done.stdout
    assert "_rdma_" not in done.stdout


def test_the_module_is_installed() -> None:
    import pytest_aiordma

    assert Path(pytest_aiordma.__file__).name == "pytest_aiordma.py"

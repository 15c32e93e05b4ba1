"""The emulated NIC for every test in this folder, and plain pyverbs objects on it.

Tests marked ``any_device`` also run on the device that the environment variable AIORDMA_DEVICE names; the emulated NIC
stays away then.

A process has one emulated NIC, and libibverbs looks for devices once it is there: so the whole session shares one
configuration. A test that needs another one runs a program of its own, with ``run_python``.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from emulated.core import DEVICE, ON_EMULATED, PEER_DEVICE, object_counts, why_uncounted

from aiordma import emulator
from aiordma.emulator import EmulatedDevice, EmulatedPort, EmulatorConfig, Limits

#: Two devices as they come, and one with small limits and two ports, the second of them down.
SMALL_LIMITS = Limits(
    max_qp=4,
    max_qp_wr=64,
    max_sge=4,
    max_inline=64,
    max_cq=4,
    max_cqe=127,
    max_mr=4,
    max_pd=3,
    max_mw=2,
    max_ah=3,
    max_srq=2,
    max_srq_wr=63,
    max_srq_sge=2,
    max_qp_rd_atom=4,
    max_qp_init_rd_atom=2,
    max_mr_size=1 << 20,
    comp_vectors=2,
)
CONFIG = EmulatorConfig(
    devices=(
        EmulatedDevice(name="mlx5_0"),
        EmulatedDevice(name="mlx5_1"),
        EmulatedDevice(
            name="mlx5_small", limits=SMALL_LIMITS, ports=(EmulatedPort(mtu=1024), EmulatedPort(state="down"))
        ),
    )
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device than the emulated NIC, only those tests run that say they can."""
    if ON_EMULATED:
        return
    here = Path(__file__).parent
    chosen, others = [], []
    for item in items:
        wanted = not item.path.is_relative_to(here) or (
            item.get_closest_marker("any_device") and not item.get_closest_marker("emulated_only")
        )
        (chosen if wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def pytest_report_header() -> list[str]:
    lines = [f"RDMA device: {DEVICE}" + (f", peer {PEER_DEVICE}" if PEER_DEVICE else "")]
    if why_uncounted():
        lines.append(
            f"objects that tests leave behind aren't looked for: `rdma resource show {DEVICE}`: {why_uncounted()}"
        )
    return lines


@pytest.fixture(scope="session", autouse=True)
def emulated_nic() -> EmulatorConfig:
    """Attach the emulated NIC, before anything looks for devices; unless another device is to be tested."""
    if ON_EMULATED:
        emulator.attach(CONFIG)
    for name in (DEVICE, PEER_DEVICE):
        if name:
            object_counts(name)
    return CONFIG


@pytest.fixture
def run_python() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run a Python program of its own, and check that it ends well."""

    def run(program: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            env=os.environ | {"AIORDMA_DEVICE": DEVICE} | env,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Check that a test leaves as many verbs objects as it found."""
    names = [d.name for d in CONFIG.devices] if ON_EMULATED else [name for name in (DEVICE, PEER_DEVICE) if name]
    before = {name: object_counts(name) for name in names}
    yield
    assert {name: object_counts(name) for name in names} == before

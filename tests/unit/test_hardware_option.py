"""`tox -e hardware` runs on the device that's named, and on nothing else in its place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        (["--hardware"], "", "AIORDMA_DEVICE names the device to run on, as mlx5_0"),
        (["--hardware"], "emulated:mlx5_0", "they say emulated:mlx5_0"),
        (["--hardware"], "nowhere_0", "no RDMA device nowhere_0 here"),
        # Without the option too: what is named must be there.
        ([], "nowhere_0", "no RDMA device nowhere_0 here"),
    ],
)
def test_without_the_device_no_test_runs_and_it_is_said_why(options: list[str], device: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, TESTS / "emulated" / "test_core_srq.py"],
        env=os.environ | {"AIORDMA_DEVICE": device, "AIORDMA_PEER_DEVICE": ""},
        cwd=TESTS.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert said in done.stderr
    assert "passed" not in done.stdout

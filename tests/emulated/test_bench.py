"""The benchmarks run. What they measure is nobody's business here: a test of speed fails on a busy machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The script's own folder has its modules, and this keeps it off the path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, str(BENCH), "--device", "emulated", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("only", "groups"), [("c loop", {"C"}), ("reused", {"pyverbs"}), ("trio, no spin", {"aiordma"})]
)
def test_bench_measures_each_kind_of_contender(only: str, groups: set[str], tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = run("--quick", "--only", only, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert {result["group"] for result in found["results"]} == groups
    assert found["emulated"] is True
    for result in found["results"]:
        assert result["best_ns"] > 0
        assert len(result["runs_ns"]) == 1
        assert len(result["runs_ns"][0]) == 3
    assert "emulated NIC" in done.stdout


def test_bench_refuses_impossible_options() -> None:
    done = run("--outstanding", "100000")
    assert done.returncode == 2
    assert "--outstanding" in done.stderr

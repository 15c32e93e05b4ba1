"""The benchmarks run. What they measure is nobody's business here: a test of speed fails on a busy machine."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench.py"
LIBRARIES = importlib.util.find_spec("ibverbs") is not None and importlib.util.find_spec("matplotlib") is not None

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler"),
    # Each starts dozens of programs.
    pytest.mark.timeout(400),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH), "--device", "emulated", *arguments],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


def measure(output: Path, *only: str) -> dict[str, Any]:
    """Ten operations of each workload by the contenders with one of ``only`` in their names."""
    selection = [word for text in only for word in ("--only", text)]
    short = ["--ops", "10", "--rounds", "1", "--rss-ops", "1000", "--budget", "300", "--no-page"]
    done = run(*short, "--output", str(output), *selection)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(output.read_text())
    assert found["emulated"] is True
    assert not found["out_of_time"]
    return found


def contenders(found: dict[str, Any]) -> set[str]:
    return {name for about in found["workloads"].values() for name in about["contenders"]}


def test_every_program_in_c_runs(tmp_path: Path) -> None:
    found = measure(tmp_path / "results.json", ".c_", "eventfd")
    assert {"c_verbs", "c_direct", "c_memcpy", "c_memmove", "c_strided", "c_packed", "c_dc"} <= contenders(found)
    assert {"eventfd_self_asyncio", "eventfd_thread_uvloop", "eventfd_thread_trio"} <= contenders(found)
    times = {key: value for key, value in found["results"].items() if key.endswith(".ns")}
    assert all(value > 0 for value in times.values())
    for about in found["workloads"].values():
        assert about["rounds"] == 1
    assert found["quantiles"].keys() == {"write_8B.c_verbs", "write_8B.c_direct"}


@pytest.mark.skipif(shutil.which("ib_write_bw") is None, reason="needs perftest")
def test_perftest_takes_part(tmp_path: Path) -> None:
    found = measure(tmp_path / "results.json", "processes_8B.ib_write")
    assert contenders(found) == {"ib_write_bw", "ib_write_lat"}
    assert found["results"]["processes_8B.ib_write_lat.ns"] > 0


def test_every_workload_runs_on_aiordma(tmp_path: Path) -> None:
    """Those of one loop; the loops are exchanged for each other in one place."""
    found = measure(tmp_path / "results.json", "aiordma_uvloop_spin", "heap.", "rss.")
    assert contenders(found) == {
        "aiordma_uvloop_spin",
        "aiordma_uvloop_spin_engine",
        "aiordma_uvloop_spin_packed",
        "aiordma_uvloop_spin_reposted",
    }
    # All but the one that is measured without spin.
    assert len(found["workloads"]) >= 29
    keys = found["results"]
    assert keys["heap.aiordma_asyncio_spin.bytes"] > 0
    assert keys["rss.aiordma_uvloop_spin.last_tenth_bytes"] > 0
    assert keys["cpu_waiting.aiordma_uvloop_spin.loop_cpu_percent"] >= 0


def test_other_contenders_run_and_the_page_is_written(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    only = ("pyverbs", "ibverbs", "import", "wake.aiordma", "8B.aiordma_trio_nospin", "8B.c_verbs")
    found = measure(output, *only)
    assert {"pyverbs", "pyverbs_new", "pyverbs_asyncio", "aiordma_trio_nospin"} <= contenders(found)
    if not LIBRARIES:
        assert "isn't installed" in found["workloads"]["write_8B"]["left_out"]["ibverbs"]
        pytest.skip(
            "ibverbs and matplotlib aren't installed here: make bench installs them, and tox's environment has them"
        )
    assert {"ibverbs", "ibverbs_new"} <= contenders(found)
    done = run("--page-from", str(output), "--docs", str(tmp_path / "docs"))
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "docs" / "performance.md").read_text()
    for about in found["workloads"].values():
        assert about["title"] in page
    assert "PyPI ibverbs, one request reused" in page
    for name in ("latency", "rate", "bandwidth"):
        assert (tmp_path / "docs" / "_static" / f"performance-{name}.svg").stat().st_size > 1000
    numbers = json.loads((tmp_path / "docs" / "_static" / "performance.json").read_text())
    assert numbers["results"] == found["results"]


def test_a_device_that_is_not_there_is_named() -> None:
    done = run("--device", "mlx5_77", "--quick")
    assert done.returncode == 1
    assert "mlx5_77" in done.stderr


def test_what_fails_is_said_and_ends_nothing_else(tmp_path: Path) -> None:
    """A contender that ends at once: the others are measured, and the status tells."""
    program = (
        "import cases, measure, devices\n"
        "from cases import Case, Contender\n"
        "cases.build_c()\n"
        "with devices.choose_device('emulated') as bench:\n"
        "    f = cases.Field(bench)\n"
        "    case = Case('x', 'x', [Contender('bad', ('/bin/false',)), f.c('c_verbs', 'verbs', 'write', 8)])\n"
        "    settings = measure.Settings(3, 1, 10, 0, 10, 10, 10, 1)\n"
        "    outcome, = measure.run_together([case], bench, settings, 10, lambda text: None)\n"
        "    assert list(outcome.failed) == ['bad'], outcome\n"
        "    assert [m.contender.name for m in outcome.measured] == ['c_verbs'], outcome\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCH.parent)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr

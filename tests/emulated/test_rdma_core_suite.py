"""rdma-core's own tests of mlx5's features, as the distribution installs them, on the emulated NIC."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSTALLED = Path("/usr/share/doc/rdma-core/tests")
MODULES = ("test_mlx5_dma_memcpy", "test_mlx5_raw_wqe", "test_mlx5_mkey", "test_mlx5_dc")

#: What is skipped, and why it must be: the emulated NIC doesn't advertise it.
SKIPPED = {
    "test_mkey_sig_crc": "signature offload isn't emulated",
    "test_mkey_sig_err": "signature offload isn't emulated",
    "test_mkey_sig_pipelining_bad": "signature offload isn't emulated",
    "test_mkey_sig_pipelining_good": "signature offload isn't emulated",
    "test_mkey_sig_t10dif": "signature offload isn't emulated",
    "test_odp_dc_traffic": "on-demand paging isn't emulated",
    "test_dc_ah_to_qp_mapping": "mapping an address handle to a QP isn't emulated",
}

RUNNER = """
import json, sys, unittest
folder, modules, sys.argv = sys.argv[1], sys.argv[2:], sys.argv[:1]
sys.path[:0] = [folder + "/tests", folder]
from args_parser import parser
import tests
parser.parse_args()
suite = unittest.defaultTestLoader.loadTestsFromNames(["tests." + module for module in modules])
result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(suite)
name = lambda test: test.id().rpartition(".")[2]
print("RESULT " + json.dumps({
    "run": result.testsRun,
    "failed": [[name(test), trace] for test, trace in result.failures + result.errors],
    "skipped": {name(test): reason for test, reason in result.skipped},
}))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A copy of the installed tests, unpacked."""
    if not (INSTALLED / "run_tests.py").exists():
        pytest.skip(
            f"{INSTALLED} isn't there: this system's rdma-core package, or its way of installing it, leaves it out"
        )
    folder = tmp_path / "tests"
    folder.mkdir()
    for file in INSTALLED.iterdir():
        if file.suffix == ".gz":
            (folder / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        elif file.suffix == ".py":
            shutil.copy(file, folder)
    missing = [module for module in MODULES if not (folder / f"{module}.py").exists()]
    if missing:
        pytest.skip(f"this version of rdma-core has no {', '.join(missing)}")
    return tmp_path


def test_what_is_advertised_passes(suite: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aiordma.cli", "emulate", "--", sys.executable, "-c", RUNNER, str(suite), *MODULES],
        env={**os.environ, "PYTHONWARNINGS": "default"},
        cwd=suite,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answers, done.stdout + done.stderr
    result = json.loads(answers[0].removeprefix("RESULT "))
    assert not result["failed"], "\n".join(f"{name}: {trace}" for name, trace in result["failed"])
    unexpected = {name: reason for name, reason in result["skipped"].items() if name not in SKIPPED}
    assert not unexpected
    # rdma-core 44 has 23 of them.
    assert result["run"] >= 23
    assert result["run"] - len(result["skipped"]) >= 16

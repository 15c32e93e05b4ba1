"""rdma-core's own Python tests, as the distribution installs them with pyverbs, on the emulated NIC.

The tests are copied to a temporary folder, since some of them lie compressed, and run module by module, each in a process
of its own with a time limit (``worker.py``). A process that dies or hangs costs the test that it was at: the rest of the
module goes on in another one.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiordma import _pyverbs

#: Where Debian's and Ubuntu's python3-pyverbs has them.
INSTALLED = Path("/usr/share/doc/rdma-core/tests")

#: Enough for the longest module on a busy machine with two CPUs.
MODULE_TIMEOUT = 300
MAX_RESTARTS = 8

#: Mistakes in the tests of older versions, corrected as rdma-core did later. Text and what takes its place, by file.
CORRECTIONS = {
    # "tests: Fix expected value after test_and_set atomic op", c4f1885b4, version 50
    "test_mlx5_dm_ops.py": {"assertEqual(val, 255)": "assertEqual(val, 1)", "num_threads - 1,": "num_threads + 1,"},
}

#: Tests that need what isn't emulated and fail on a device without it, where others skip themselves.
LEFT_OUT = {
    ("test_mlx5_flow", "Mlx5MatcherTest.test_flow_table_drop"): "left out: it takes flow tables for granted",
}

PASSED, FAILED, SKIPPED, CRASHED = "passed", "failed", "skipped", "crashed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test."""

    module: str
    #: Class and method.
    test: str
    result: str
    #: Why it was skipped, or the end of a traceback.
    reason: str = ""


def find_tests() -> Path | None:
    """Return the folder of the tests: what AIORDMA_RDMA_CORE_TESTS names, or what the distribution installed."""
    folder = Path(os.environ.get("AIORDMA_RDMA_CORE_TESTS", INSTALLED))
    return folder if (folder / "run_tests.py").exists() else None


def version() -> str:
    """Return the version of rdma-core in use."""
    return _pyverbs.version()


@contextlib.contextmanager
def unpacked(source: Path) -> Iterator[Path]:
    """Copy the tests to a temporary folder, uncompressed, as a package named ``tests`` in it."""
    with tempfile.TemporaryDirectory(prefix="aiordma-conformance-") as name:
        target = Path(name) / "tests"
        target.mkdir()
        for file in sorted(source.iterdir()):
            if file.suffixes[:1] == [".py"]:
                content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
                name_of_it = file.name.removesuffix(".gz")
                (target / name_of_it).write_text(_corrected(name_of_it, content.decode()))
        _write_tools(Path(name) / "bin")
        yield Path(name)


def _corrected(file: str, text: str) -> str:
    for wrong, right in CORRECTIONS.get(file, {}).items():
        text = text.replace(wrong, right)
    return text


def _write_tools(folder: Path) -> None:
    """Stand in for the programs that tests find a device's network interface and its address with.

    The kernel knows of no emulated device, and a listing of /sys/class/infiniband can't be led elsewhere.
    """
    link = [{"ifname": "mlx5_0", "port": 1, "netdev": "lo"}]
    address = [
        {"ifname": "lo", "address": "00:00:00:00:00:00", "addr_info": [{"family": "inet", "local": "127.0.0.1"}]}
    ]
    folder.mkdir()
    for name, script in {
        "rdma": f"echo '{json.dumps(link)}'",
        "ip": f"echo '{json.dumps(address)}'",
        "ls": 'case $1 in /sys/*) set -- "$SYSFS_PATH${1#/sys}" ;; esac; exec /bin/ls "$@"',
    }.items():
        tool = folder / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)


def modules(folder: Path) -> list[str]:
    """Return the names of the test modules."""
    return sorted(path.stem for path in (folder / "tests").glob("test_*.py"))


def run_module(folder: Path, module: str, *, timeout: float = MODULE_TIMEOUT) -> list[Outcome]:
    """Run one module and return what became of its tests, in order."""
    text = (folder / "tests" / f"{module}.py").read_text()
    outcomes = {
        test: Outcome(module, test, SKIPPED, reason)
        for (where, test), reason in LEFT_OUT.items()
        if where == module and test.partition(".")[2] in text
    }
    for _ in range(MAX_RESTARTS):
        log, done, why = _run_worker(folder, module, list(outcomes), timeout)
        current = None
        for line in log:
            if "error" in line:
                return [Outcome(module, "(import)", FAILED, line["error"])]
            current = line["test"] if "start" in line else None
            if "result" in line:
                outcomes[line["test"]] = Outcome(module, line["test"], line["result"], line["reason"])
        if done:
            return list(outcomes.values())
        # Between two tests, or before the first: there is nobody to blame, and no sense in another try.
        name = current or "(process)"
        outcomes[name] = Outcome(module, name, CRASHED, why)
        if current is None:
            break
    return list(outcomes.values())


def _run_worker(
    folder: Path, module: str, without: list[str], timeout: float
) -> tuple[list[dict[str, str]], bool, str]:
    log = folder / f"{module}.log"
    log.write_text("")
    # Preloaded, since some tests map pages of the device themselves, with Python's mmap.
    emulate = [sys.executable, "-P", "-m", "aiordma.cli", "emulate", "--"]
    worker = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(folder), module, str(log), *without]
    process = subprocess.Popen(
        emulate + worker,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ
        | {
            "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            # The tests of librdmacm take a certain port, which another run may have at the time.
            "AIORDMA_EMULATOR_RUNTIME_DIR": str(folder),
        },
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        why = f"exit status {process.returncode}"
        if process.returncode > 128:  # what a shell says of a program that a signal ended
            why = f"ended by {signal.Signals(process.returncode - 128).name}"
    except subprocess.TimeoutExpired:
        # SIGABRT first: the worker's faulthandler then shows where each thread is.
        os.killpg(process.pid, signal.SIGABRT)
        why = f"no end in {timeout:g} seconds"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        # Processes that tests left behind go with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdout and not process.stdout.closed:
        output = process.communicate()[0]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return lines, process.returncode == 0, f"{why}\n{output.decode(errors='replace')[-4000:]}".strip()


def run(folder: Path, names: Iterable[str]) -> list[Outcome]:
    """Run several modules."""
    return [outcome for name in names for outcome in run_module(folder, name)]

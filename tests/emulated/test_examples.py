"""Every example runs as a newcomer would run it, with warnings as errors, and says what it should."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from emulated.core import complaints

EXAMPLES = Path(__file__).parents[2] / "examples"

EXPECTED = {
    "write": ["written: 'hello, RDMA'", "written at 20: 'RDMA'", "pipelined: b'hello,hello\\x00hello'"],
    "read": ["row 12: 144.0", "rows [3, 500, 999]: [9.0, 250000.0, 998001.0]", "without REMOTE_WRITE"],
    "send_recv": ["server: 'hello', number 0", "server: 'bye', number 2", "client: all acknowledged"],
    "atomics": [
        "all different: True; the counter is at 106",
        "alice gets the lock: True",
        "bob gets the lock: False",
        "bob gets the lock now: True",
    ],
    "cancellation": [
        "timed out",
        "still posted: <Completion RECV",
        "received after all: b'late message'",
        "task cancelled: True; in memory: b'cancelled write'",
        "closed: WrFlushError, IBV_WC_WR_FLUSH_ERR",
    ],
    "devx_query": [
        "a new QP is in INIT",
        "connected: RTS, to QP 0x",
        "packets sent: 3",
        "send queue: 0 blocks",
        "refused: RST2INIT_QP, BAD_QP_STATE",
        "DMA memcpy: yes",
    ],
    "strided": [
        "block of 200 rows, 6400 bytes apart: 256,000 bytes",
        "arrived: True",
        "nothing else was touched: True",
        "row 7 again: True",
        "every tenth row, every other column: True",
    ],
    "dma_memcpy": [
        "100%",
        "copied: True",
        "gathered 262,144 bytes of 64 pages",
        "gathered right: True",
        "chained: True",
        "meanwhile the loop ran on: True",
    ],
    "dc_fanout": [
        "all 64 have it: True",
        "more news: 63 have it, target [13] failed: RetryExceededError",
        "the others have it: True",
        "of 32 streams, 1 failed",
    ],
    "exchange": ["server: a client connected", "found b'written by RDMA'", "client: written and acknowledged"],
}


def environment() -> dict[str, str]:
    return {**os.environ, "AIORDMA_DEVICE": "emulated", "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}


def run(name: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        **{"env": environment(), "capture_output": True, "text": True, "timeout": 60, "check": False, **options},
    )


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "demo", "fault_tests"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(name: str, tmp_path: Path) -> None:
    done = run(name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "aiordma's emulated NIC" in done.stdout
    for line in EXPECTED[name]:
        assert line in done.stdout
    assert complaints(done.stderr) == ""


def test_the_example_of_tests_passes(tmp_path: Path) -> None:
    # Of an option that the example leaves to pytest-asyncio, that one complains.
    settings = ("-o", "asyncio_default_fixture_loop_scope=function", "-p", "no:cacheprovider", "-c", os.devnull)
    quiet = ("-W", "error", "-W", "ignore:Module already imported so cannot be rewritten; _aiordma_editable_loader")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *quiet, str(EXAMPLES / "fault_tests.py")],
        env={**environment(), "PYTHONWARNINGS": "default"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


# ---------------------------------------------------------------- the demo

QUICK = ("--operations", "500")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_demo_transfers_a_file(loop: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(3 * 1024 * 1024 + 17))
    copy = tmp_path / "copy"
    done = run("demo", str(file), "--save", str(copy), "--loop", loop, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert complaints(done.stderr) == ""
    assert copy.read_bytes() == file.read_bytes()
    for text in ("64 pieces of 16 bytes", "copied 4,096 bytes: right", "64 writes over 16 streams"):
        assert text in done.stdout
    assert "WRONG" not in done.stdout
    for text in ("emulated NIC", "SHA-256", "the same on both sides", "p50", "p99", "100 outstanding", "batches", loop):
        assert text in done.stdout
    assert "\x1b" not in done.stdout  # no terminal, no escape sequences
    assert "\r" not in done.stdout


def test_demo_generates_a_file_by_default(tmp_path: Path) -> None:
    done = run("demo", "--size", "1", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generated" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_demo_streams_through_its_ring(tmp_path: Path) -> None:
    """A file much longer than the ring, in chunks that don't divide it."""
    file = tmp_path / "data"
    file.write_bytes(os.urandom(300_001))
    copy = tmp_path / "copy"
    done = run("demo", str(file), "--save", str(copy), "--chunk", "4096", "--slots", "3", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert copy.read_bytes() == file.read_bytes()


def test_demo_takes_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    done = run("demo", str(tmp_path / "empty"), *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "empty" in done.stdout
    assert "the same on both sides" in done.stdout


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nothing-here", "No such file or directory"),
        (".", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        # It can be opened, and then not be read at address 0.
        ("/proc/self/mem", "Input/output error"),
    ],
)
def test_demo_says_what_is_wrong_with_a_file(file: str, message: str, tmp_path: Path) -> None:
    done = run("demo", file, *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("demo: ")
    assert message in done.stderr
    assert file in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_demo_says_that_it_may_not_read_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0)
    done = run("demo", str(file), *QUICK)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


@pytest.mark.parametrize("arguments", [("--chunk", "0"), ("--slots", "0"), ("--slots", "99999"), ("--size", "-1")])
def test_demo_refuses_impossible_options(arguments: tuple[str, ...]) -> None:
    done = run("demo", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_names_a_device_that_is_not_there() -> None:
    done = run("demo", "--device", "mlx5_77")
    assert done.returncode == 1
    assert "no RDMA device 'mlx5_77'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_demo_ends_cleanly_when_interrupted(loop: str, tmp_path: Path) -> None:
    file = tmp_path / "long"
    with file.open("wb") as f:
        f.truncate(200 << 30)  # a hole: it takes no room, and longer to send than this test will wait
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo.py"), str(file), "--loop", loop],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("sent "):
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert complaints(errors) == "demo: interrupted\n"

"""Unchanged C programs over librdmacm, two processes of each: those of rdmacm-utils, and perftest with -R."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from emulated.cm_abi import Cm


class TryAgainError(Exception):
    """The client printed something that it may print."""


def late(errors: str) -> bool:
    """rping's main thread destroys the channel that its other one goes back to, which ends the program so if it's late."""
    return errors.endswith("rdma_get_cm_event: Bad file descriptor\n")


def run_two(
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Sequence[str],
    client: Sequence[str],
    port_option: str = "-p",
    again: Sequence[str] = (),
) -> tuple[str, str]:
    """Run a program as server and as client, and return what both printed."""
    if shutil.which(server[0]) is None:
        pytest.skip(f"{'perftest' if server[0].startswith('ib_') else 'rdmacm-utils'} isn't installed")
    monkeypatch.setenv("AIORDMA_EMULATOR_RUNTIME_DIR", str(runtime))
    with Cm() as cm:
        cm_id = cm.create()
        cm.bind(cm_id)
        port = cm.port(cm_id)
    emulate = [sys.executable, "-m", "aiordma.cli", "emulate", "--"]
    ports = [port_option, str(port)] if port_option else []
    with subprocess.Popen(
        [*emulate, *server, *ports],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as passive:
        try:
            wait_for_listener(runtime, passive)
            active = subprocess.run(
                [*emulate, *client, *ports],
                stdin=subprocess.DEVNULL,
                timeout=100,
                capture_output=True,
                text=True,
                check=False,
            )
            if active.returncode and any(sign in active.stdout + active.stderr for sign in again):
                raise TryAgainError
            assert active.returncode == 0 or late(active.stderr), active.stdout + active.stderr
            output, _ = passive.communicate(timeout=30)
            assert passive.returncode == 0, output
        finally:
            passive.terminate()
    return active.stdout, output


def wait_for_listener(runtime: Path, process: "subprocess.Popen[str]") -> None:
    """Until some entry of the table of ports (src/cm_ports.c) listens."""
    deadline = time.monotonic() + 60
    table = runtime / f"aiordma-{os.geteuid()}.4" / "ports"
    while process.poll() is None:
        assert time.monotonic() < deadline
        if table.exists():
            entries = table.read_bytes()[64 : 64 + 40 * 64]
            if any(entries[at] and entries[at + 22] & 4 for at in range(0, len(entries), 40)):
                return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[0])


@pytest.mark.parametrize(("bind", "to"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.1", "192.0.2.1")])
def test_rping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bind: str, to: str) -> None:
    options = ["-C", "20", "-S", "5000", "-V"]
    seen, _ = run_two(
        tmp_path, monkeypatch, ["rping", "-s", "-a", bind, *options], ["rping", "-c", "-a", to, "-d", "-v", *options]
    )
    assert "rdma-ping-19:" in seen
    assert "data mismatch" not in seen


def test_rping_by_persistent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread per connection, and blocking calls of one channel from several."""
    if shutil.which("rping") is None:
        pytest.skip("rdmacm-utils isn't installed")
    monkeypatch.setenv("AIORDMA_EMULATOR_RUNTIME_DIR", str(tmp_path))
    emulate = [sys.executable, "-m", "aiordma.cli", "emulate", "--"]
    with subprocess.Popen([*emulate, "rping", "-s", "-P"], stdout=subprocess.PIPE, text=True) as server:
        try:
            wait_for_listener(tmp_path, server)
            clients = [
                subprocess.Popen(
                    [*emulate, "rping", "-c", "-a", "127.0.0.1", "-C", "5", "-V"],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for _ in range(3)
            ]
            for client in clients:
                _, errors = client.communicate(timeout=100)
                assert client.returncode == 0 or late(errors), errors
        finally:
            server.kill()


def test_ucmatose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["-c", "5", "-C", "10", "-S", "3000"]
    out = run_two(tmp_path, monkeypatch, ["ucmatose", *options], ["ucmatose", "-s", "127.0.0.1", *options], "")
    assert all("return status 0" in text for text in out)


def test_udaddy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["-c", "5", "-C", "10", "-S", "1000"]
    out = run_two(tmp_path, monkeypatch, ["udaddy", *options], ["udaddy", "-s", "127.0.0.1", *options], "")
    assert all("return status 0" in text for text in out)


def test_rdma_client_and_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The synchronous form."""
    out = run_two(tmp_path, monkeypatch, ["rdma_server"], ["rdma_client", "-s", "127.0.0.1"])
    assert "rdma_client: end 0" in out[0]
    assert "rdma_server: end 0" in out[1]


def test_rdma_xclient_and_xserver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run_two(tmp_path, monkeypatch, ["rdma_xserver", "-c", "r"], ["rdma_xclient", "-s", "127.0.0.1", "-c", "r"])
    assert "end 0" in out[0] + out[1]


def test_rsockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets made of RDMA, in librdmacm."""
    options = ["-S", "4096", "-I", "20", "-C", "2"]
    seen, _ = run_two(tmp_path, monkeypatch, ["rstream", *options], ["rstream", "-s", "127.0.0.1", *options])
    assert "4k" in seen


@pytest.mark.parametrize(
    "command",
    [
        "ib_write_lat",
        "ib_send_lat",
        "ib_read_lat",
        "ib_write_bw -q 4",
        "ib_send_bw",
        "ib_read_bw",
        "ib_atomic_bw",
        "ib_send_lat -c UD",
    ],
)
def test_perftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """perftest connects twice, and its server listens anew in between: its client may be refused meanwhile."""
    options = [*command.split(), "-R", "-n", "100"]
    nobody = ("REJECTED; error: 8", "UNREACHABLE; error: 1")
    for attempt in range(8):
        with contextlib.suppress(TryAgainError):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            seen, _ = run_two(folder, monkeypatch, options, [*options, "127.0.0.1"], again=nobody)
            assert "rdma_cm" in seen
            return
    pytest.fail("the second listener never came in time")

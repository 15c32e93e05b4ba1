"""Unchanged C programs, two processes of each: those of ibverbs-utils, perftest, and UCX's own."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def listening(port: int) -> bool:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rsplit(":", 1)[1], 16) == port:
                return True
    return False


def run_two(runtime: Path, command: Sequence[str]) -> str:
    """Run a program as server and as client, and return what the client printed."""
    if shutil.which(command[0]) is None:
        package = {"ibv": "ibverbs-utils", "ucx": "ucx-utils"}.get(command[0].partition("_")[0], "perftest")
        pytest.skip(f"{package} isn't installed")
    env = os.environ | {"AIORDMA_EMULATOR_RUNTIME_DIR": str(runtime)}
    port = free_port()
    whole = [sys.executable, "-m", "aiordma.cli", "emulate", "--", *command, "-p", str(port)]
    with subprocess.Popen(whole, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            deadline = time.monotonic() + 60
            while not listening(port):
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            client = subprocess.run(
                [*whole, "127.0.0.1"], env=env, timeout=100, capture_output=True, text=True, check=False
            )
            assert client.returncode == 0, client.stdout + client.stderr
            output, _ = server.communicate(timeout=30)
            assert server.returncode == 0, output
        finally:
            server.terminate()
    return client.stdout


@pytest.mark.parametrize("options", [[], ["-e"], ["-s", "100000"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["rc", "uc", "ud", "srq", "xsrq"])
def test_pingpong(tmp_path: Path, kind: str, options: list[str]) -> None:
    if kind == "ud" and "-s" in options:
        options = ["-s", "4000"]
    output = run_two(tmp_path, [f"ibv_{kind}_pingpong", "-g", "3", "-n", "200", *options])
    assert ("success" if kind == "xsrq" else "200 iters") in output


# Not ib_send_lat -e: with perftest 4.5 it waits for an event of either CQ, looks once into one of them, and takes what it
# didn't find there for a completion.
PERFTEST = [
    *(f"{op}_{what} -c RC" for op in ("ib_write", "ib_read", "ib_send", "ib_atomic") for what in ("lat", "bw")),
    *(f"{op}_{what} -c UC" for op in ("ib_write", "ib_send") for what in ("lat", "bw")),
    "ib_send_lat -c UD",
    "ib_send_bw -c UD",
    "ib_read_bw -c RC -e",
    "ib_send_bw -c RC -e",
    "ib_atomic_bw -c RC -e",
    "ib_write_bw -c RC -q 4",
    "ib_read_bw -c RC -q 4",
    "ib_send_bw -c RC -q 4",
    "ib_write_bw -c RC -b",
    "ib_send_bw -c RC -b",
    "ib_write_bw -c RC -s 8388608",
    "ib_write_lat -c RC -s 65536",
    "ib_atomic_bw -c RC -A CMP_AND_SWAP",
]


@pytest.mark.parametrize("command", PERFTEST)
def test_perftest(tmp_path: Path, command: str) -> None:
    n = "20" if "8388608" in command else "200"
    # An answer may take longer than the half second that is perftest's own limit, on a machine that is busy.
    patience = [] if command.endswith(("UC", "UD")) else ["-u", "18"]
    output = run_two(tmp_path, [*command.split(), "-x", "3", "-F", "-n", n, *patience])
    assert "#iterations" in output


# Transports over verbs by themselves, and what UCX makes of them: eager and rendezvous messages, RDMA, atomics.
UCX = [
    "-x rc_verbs -t put_lat",
    "-x rc_verbs -t put_bw -D zcopy -s 65536",
    "-x rc_verbs -t get -D zcopy -s 4096",
    "-x rc_verbs -t am_bw -D bcopy -s 2000",
    "-x rc_verbs -t fadd",
    "-x ud_verbs -t am_lat",
    "-t tag_lat",
    "-t tag_bw -s 1048576",
    "-t ucp_get -s 100000",
    "-t ucp_cswap",
]


@pytest.mark.parametrize("options", UCX)
def test_ucx(tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing but the device: no shared memory, no sockets.
    monkeypatch.setenv("UCX_TLS", "rc_verbs,ud_verbs")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    more = ["-d", "mlx5_0:1"] if "-x" in options else []
    # Built with MPI, as Debian 13's, it would want to be started by that.
    if shutil.which("ucx_perftest"):
        usage = subprocess.run(["ucx_perftest", "-h"], capture_output=True, text=True, check=False).stdout
        more += ["-P", "0"] if "-P <0|1>" in usage else []
    output = run_two(tmp_path, ["ucx_perftest", *more, *options.split(), "-n", "100", "-w", "10"])
    assert "Final:" in output

"""`aiordma perf` as programs on the emulated NIC: each test between two processes, options, interrupts, and lost peers."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PERF = [sys.executable, "-P", "-m", "aiordma.cli", "perf"]
SECONDS = 100
TESTS = ["write-lat", "write-bw", "read-lat", "read-bw", "send-lat", "send-bw", "atomic-lat", "atomic-bw"]
LOOPS = ["asyncio", "uvloop", "trio"]

Process = subprocess.Popen[str]


@pytest.fixture(autouse=True)
def _runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The two processes meet each other, and nobody else."""
    monkeypatch.setenv("AIORDMA_EMULATOR_RUNTIME_DIR", str(tmp_path))


def run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PERF, *arguments], env=os.environ | env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def loopback(*arguments: str) -> dict[str, Any]:
    """The JSON of a run with both ends in one program, which must go well and be right."""
    done = run(*arguments, "--emulated", "--loopback", "--verify", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert all(result["verified"] and result["complete"] for result in answer["results"])
    return answer


@contextlib.contextmanager
def start(*arguments: str) -> Iterator[Process]:
    process = subprocess.Popen([*PERF, *arguments, "--emulated"], stdout=-1, stderr=-1, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def port_of(server: Process) -> str:
    assert server.stderr is not None
    line = server.stderr.readline()
    found = re.match(r"waiting for a client on port (\d+): aiordma perf \S+ HOST -p \1( -R)?$", line)
    assert found, line + server.stderr.read()
    return found[1]


def until_it_runs(client: Process) -> None:
    """Its header is there: it measures from now on."""
    assert client.stdout is not None
    for line in client.stdout:
        if line.startswith(" #bytes"):
            return
    pytest.fail(client.stderr.read() if client.stderr else "")


def end(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


# ---------------------------------------------------------------- each test


@pytest.mark.parametrize(("test", "loop"), [(test, LOOPS[i % 3]) for i, test in enumerate(TESTS)])
def test_between_two_processes(test: str, loop: str) -> None:
    with start(test, "-p", "0", "--loop", loop) as server:
        client = run(
            test, "127.0.0.1", "-p", port_of(server), "--emulated", "-n", "40", "--verify", "--json", "--loop", loop
        )
        assert (client.returncode, client.stderr) == (0, "")
        status, out, err = end(server)
    assert (status, err) == (0, "")
    # What warmed up isn't among them.
    assert re.search(r": 40 operations, verified$", out, re.MULTILINE), out
    answer = json.loads(client.stdout)
    assert (answer["schema"], answer["test"], answer["role"], answer["loop"]) == (1, test, "client", loop)
    assert (answer["device"], answer["emulated"], answer["via"], answer["error"]) == ("mlx5_0", True, "tcp", None)
    (result,) = answer["results"]
    assert (result["operations"], result["verified"], result["complete"], result["lost"]) == (40, True, True, 0)
    assert result["size"] == (8 if "atomic" in test else 2 if "lat" in test else 65536)
    assert result["operations_per_second"] > 0
    if test.endswith("lat"):
        latency = result["latency_us"]
        assert list(latency) == ["min", "avg", "p50", "p90", "p99", "p99.9", "max"]
        assert (
            latency["min"] <= latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]
        )
        assert sum(count for _, count in result["histogram_us"]) == 40


@pytest.mark.parametrize("test", ["write-bw", "send-bw"])
def test_over_uc_between_two_processes(test: str) -> None:
    with start(test, "-p", "0") as server:
        client = run(
            test, "127.0.0.1", "-p", port_of(server), "--emulated", "-n", "30", "-c", "UC", "-s", "64", "--json"
        )
        assert (client.returncode, client.stderr) == (0, "")
        assert end(server)[0] == 0
    answer = json.loads(client.stdout)
    assert (answer["qp_type"], answer["results"][0]["operations"]) == ("UC", 30)


@pytest.mark.parametrize("batch", [1, 5])
def test_messages_of_uc_that_are_lost_are_counted_and_are_no_bandwidth(batch: int) -> None:
    """Every third message is, and none of those that warm up."""
    program = """
        import sys
        from aiordma.cli import main
        from aiordma.cli.perf import client
        from aiordma.emulator import faults
        connect_all = client.connect_all
        def connect_lossy(queue_pairs, message):
            for qp in queue_pairs: faults.drop(qp, opcode="SEND", every=3)
            return connect_all(queue_pairs, message)
        client.connect_all = connect_lossy
        sys.argv = ["aiordma", "perf", "send-bw", "127.0.0.1", *sys.argv[1:], "--emulated", "--json"]
        main()
    """
    code = textwrap.dedent(program)
    options = ["-c", "UC", "-n", "30", "-q", "2", "-l", str(batch), "-s", "5000", "--verify"]
    with start("send-bw", "-p", "0") as server:
        arguments = [sys.executable, "-P", "-c", code, "-p", port_of(server), *options]
        client = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert (client.returncode, client.stderr) == (0, "")
        status, out, err = end(server)
    assert (status, err) == (0, "")
    assert re.search(r": 30 operations, 10 lost, verified$", out, re.MULTILINE), out
    (result,) = json.loads(client.stdout)["results"]
    assert (result["operations"], result["lost"], result["verified"]) == (30, 10, True)
    assert result["operations_per_second"] == pytest.approx(20 / result["seconds"])
    assert result["bytes_per_second"] == pytest.approx(20 * 5000 / result["seconds"])


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "operations"),
    [
        (["write-bw", "-q", "3", "-l", "8", "-n", "100", "-t", "16"], 104),  # whole batches
        (["read-bw", "-q", "2", "-l", "4", "-n", "64", "-t", "4", "-s", "100"], 64),
        (["send-bw", "-q", "2", "-l", "5", "-n", "100", "-s", "4097", "--loop", "trio"], 100),
        (["atomic-bw", "-q", "3", "-n", "100", "-t", "2"], 100),
        (["write-lat", "-I", "64", "-s", "64", "-n", "20", "--spin", "0"], 20),
        (["send-lat", "-I", "32", "-s", "33", "-n", "20"], 20),
        (["send-bw", "-I", "64", "-s", "1", "-n", "200", "-t", "1"], 200),
        (["write-bw", "-n", "1", "--warmup", "0"], 1),
        (["write-lat", "-n", "10", "-i", "1", "-x", "3", "-d", "mlx5_0", "-F"], 10),
    ],
)
def test_options(arguments: list[str], operations: int) -> None:
    (result,) = loopback(*arguments)["results"]
    assert result["operations"] == operations


def test_all_sizes() -> None:
    results = loopback("read-bw", "-a", "-n", "2", "-t", "2")["results"]
    assert [result["size"] for result in results] == [1 << power for power in range(1, 24)]


@pytest.mark.parametrize("test", ["write-bw", "send-lat"])
def test_duration(test: str) -> None:
    (result,) = loopback(test, "-D", "0.5", "-s", "64")["results"]
    assert result["seconds"] >= 0.5
    assert result["operations"] > 0


def test_over_rdma_cm() -> None:
    answer = loopback("write-bw", "--rdma-cm", "-n", "20", "-q", "2")
    assert (answer["via"], answer["results"][0]["operations"]) == ("rdma_cm", 20)


def test_text() -> None:
    done = run("write-lat", "--emulated", "--loopback", "-n", "20", "-H")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1].strip() == "RDMA_Write Latency Test"
    assert lines[5].split()[:5] == ["#bytes", "#iterations", "t_min", "t_avg", "t_p50"]
    assert lines[6].split()[:2] == ["2", "20"]
    assert all(" us " in line and line.endswith("#") for line in lines[7:])
    assert len(lines) > 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["write-lat", "-q", "2"], "-bw"),
        (["read-bw", "-c", "UC"], "-c RC"),
        (["write-bw", "-n", "5", "-D", "5"], "give one"),
        (["nonsense"], "write-lat"),
        (["write-lat", "-n", "0"], "-n"),
        (["write-lat", "--loop", "gevent"], "uvloop"),
        ([], "test"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_loop_that_is_not_installed(tmp_path: Any) -> None:
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(\"No module named 'uvloop'\", name='uvloop')\n")
    done = run("write-lat", "--emulated", "--loopback", "--loop", "uvloop", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install uvloop" in done.stderr


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("test", ["write-bw", "read-bw", "send-bw", "send-lat"])
def test_wrong_data_is_found(test: str) -> None:
    """One side of the program is made to expect, and to send, something else."""
    program = """
        import sys
        from aiordma.cli import main
        from aiordma.cli.perf import client
        right = client.pattern
        client.pattern = lambda size, index: right(size, index)[:-1] + bytes([right(size, index)[-1] ^ 1])
        sys.argv = ["aiordma", "perf", *sys.argv[1:], "--emulated", "--loopback", "--verify", "-n", "20"]
        main()
    """
    code = "\n".join(line.strip() for line in program.splitlines())
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, test], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 1
    assert "WRONG DATA" in done.stdout


def test_sides_with_different_tests() -> None:
    with start("write-lat", "-p", "0") as server:
        client = run("read-lat", "127.0.0.1", "-p", port_of(server), "--emulated")
        assert client.returncode == 1
        assert "the server runs write-lat, the client read-lat: start both with the same test" in client.stderr
        status, _, err = end(server)
    assert status == 1
    assert "read-lat" in err
    assert "Traceback" not in client.stderr + err


@pytest.mark.parametrize("flags", [[], ["-R"]], ids=str)
def test_nobody_listens(flags: list[str]) -> None:
    done = run("write-lat", "127.0.0.1", "-p", "1", "--emulated", *flags)
    assert done.returncode == 1
    command = " ".join(["aiordma perf write-lat", *flags])
    assert f"is `{command}` running on 127.0.0.1, port 1?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_that_is_not_there() -> None:
    done = run("write-lat", "--loopback", "--emulated", "-d", "mlx5_9")
    assert done.returncode == 1
    assert "mlx5_9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("test", ["write-bw", "send-bw"])
def test_an_interrupt_ends_with_a_partial_report(test: str) -> None:
    with start(test, "-p", "0") as server:
        with start(test, "127.0.0.1", "-p", port_of(server), "-D", "1000", "-s", "64") as client:
            until_it_runs(client)
            client.send_signal(signal.SIGINT)
            status, out, err = end(client)
        assert (status, "interrupted" in err) == (130, True)
        assert "Traceback" not in err
        assert "NOT COMPLETE" in out
        # The other side was told.
        assert end(server)[0] == 0


@pytest.mark.timeout(400)
def test_an_interrupt_ends_with_a_partial_report_in_json() -> None:
    """It prints nothing before its end, so when it measures is a guess: one that came too early is made again."""
    for seconds in (2, 4, 8, 16, 32):
        with start("send-lat", "-p", "0") as server:
            arguments = ["127.0.0.1", "-p", port_of(server), "-D", "1000", "-s", "64", "--json"]
            with start("send-lat", *arguments) as client:
                with pytest.raises(subprocess.TimeoutExpired):
                    client.wait(seconds)
                client.send_signal(signal.SIGINT)
                status, out, err = end(client)
            if not out or not json.loads(out)["results"]:
                continue
            assert (status, "interrupted" in err) == (130, True)
            assert "Traceback" not in err
            answer = json.loads(out)
            assert (answer["interrupted"], answer["exit_status"]) == (True, 130)
            assert [r["complete"] for r in answer["results"]] == [False]
            # The other side was told.
            assert end(server)[0] == 0
            return
    pytest.fail("it never got to measure")


def test_a_server_can_be_interrupted() -> None:
    with start("write-lat", "-p", "0") as server:
        port_of(server)
        server.send_signal(signal.SIGINT)
        status, _, err = end(server)
    assert status == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["write-bw"], ["send-lat"], ["write-bw", "-c", "UC"]], ids=" ".join)
def test_a_server_that_is_killed(arguments: list[str]) -> None:
    with (
        start(arguments[0], "-p", "0") as server,
        start(*arguments, "127.0.0.1", "-p", port_of(server), "-D", "1000", "-s", "64") as client,
    ):
        until_it_runs(client)
        server.kill()
        status, out, err = end(client)
    assert status == 1
    assert re.search(r"the peer 127\.0\.0\.1:\d+ is gone, after \d+ operations", err), err
    assert "NOT COMPLETE" in out
    assert "Traceback" not in err


@pytest.mark.parametrize("test", ["read-bw", "send-bw"])
def test_a_client_that_is_killed(test: str) -> None:
    with start(test, "-p", "0") as server:
        with start(test, "127.0.0.1", "-p", port_of(server), "-D", "1000") as client:
            until_it_runs(client)
            client.kill()
        status, _, err = end(server)
    assert status == 1
    assert "is gone" in err
    assert "Traceback" not in err

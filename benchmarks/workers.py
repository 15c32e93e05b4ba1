"""Programs that wait for orders: started once for a workload, then measured in turns."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Protocol

#: Seconds that a program has to get ready: a thousand connected queue pairs on a busy machine take some.
START = 60.0
ANSWER = 60.0
END = 10.0
#: Of perftest. With fewer CPUs than polling threads each takes turns of the scheduler.
LEAST_ITERATIONS = 10


class ContenderFailed(Exception):
    """A contender ended with an error, said nothing in time, or printed something else than an answer."""


class Contestant(Protocol):
    """A contender that is there to be measured."""

    def wait_ready(self) -> None: ...
    def ask(self, word: str, number: int) -> dict[str, Any]: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class Worker:
    """A program that speaks the protocol of benchmarks/c/harness.h. Whatever happens, :meth:`close` ends it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: the program may have started others, and all of them are to end with it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self._read = b""

    def _failed(self, what: str) -> ContenderFailed:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return ContenderFailed("\n".join([what, *lines[-5:]]))

    def _line(self, timeout: float) -> str:
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise self._failed(f"no answer in {timeout:.0f} s")
            found = os.read(self._process.stdout.fileno(), 1 << 16)
            if not found:
                raise self._failed(f"it ended, with status {self._process.wait(END)}")
            self._read += found
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def wait_ready(self) -> None:
        if (line := self._line(START)) != "ready":
            raise self._failed(f"not ready: {line!r}")

    def ask(self, word: str, number: int, timeout: float = ANSWER) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{word} {number}\n".encode())
        except BrokenPipeError as e:
            raise self._failed(f"it ended, with status {self._process.wait(END)}") from e
        line = self._line(timeout)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as e:
            raise self._failed(f"not an answer: {line!r}") from e
        return answer

    def finish(self) -> None:
        """Tells it to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Sees to it that it has ended."""
        assert self._process.stdout is not None
        self.finish()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            self._process.stdout.close()
            self._errors.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Perftest:
    """A program of perftest: two processes for each measurement, and its own words for the result."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._command = list(command)
        self._environment = environment

    def wait_ready(self) -> None:
        pass

    def ask(self, word: str, number: int) -> dict[str, Any]:
        latency = self._command[0].endswith("_lat")
        command = [*self._command, "-n", str(max(number, LEAST_ITERATIONS)), "-p", str(free_port())]
        with tempfile.TemporaryFile() as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, stdin=subprocess.DEVNULL)
            try:
                end = time.monotonic() + START
                while True:
                    client = subprocess.run(
                        [*command, "localhost"],
                        capture_output=True,
                        text=True,
                        env=self._environment,
                        timeout=START,
                        check=False,
                    )
                    if not client.returncode:
                        break
                    # It may not listen yet.
                    if server.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        said = f"{log.read().decode(errors='replace')}\n{client.stdout}{client.stderr}"
                        raise ContenderFailed(f"status {client.returncode}, the server's {server.poll()}\n{said}")
                    time.sleep(0.05)
                server.wait(END)
            except subprocess.TimeoutExpired as e:
                raise ContenderFailed(f"no end in {START:.0f} s") from e
            finally:
                if server.poll() is None:
                    server.kill()
                    server.wait()
        # Its table's only line of numbers: size and iterations, and then minimum, maximum, typical and average latency
        # in microseconds, or peak and average bandwidth and millions of messages a second.
        rows = [line.split() for line in client.stdout.splitlines() if re.fullmatch(r"\s*[\d.\s]+", line)]
        rows = [row for row in rows if len(row) >= 5]
        if not rows:
            raise ContenderFailed(f"no numbers in {client.stdout!r}"[:1000])
        ns = float(rows[-1][5]) * 1000 if latency else 1000 / float(rows[-1][4])
        return {"ns": ns * number, "ops": number, "cpu_ns": None}

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

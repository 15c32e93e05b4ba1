"""Processes of their own with the emulated NIC, that do what a test tells them, one step at a time.

Run as a program, this is such a process: it takes code as JSON lines from its standard input.
"""

import contextlib
import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RUNTIME = "AIORDMA_EMULATOR_RUNTIME_DIR"

#: Code after which nobody without CAP_SYS_PTRACE may read the process's memory: PR_SET_DUMPABLE, man 2 prctl and ptrace.
FORBID = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


def stop(pid: int) -> None:
    """Stop a process, and wait until all its threads stand."""
    os.kill(pid, signal.SIGSTOP)
    states = [t / "stat" for t in Path(f"/proc/{pid}/task").iterdir()]
    while any(s.read_text().rpartition(")")[2].split()[0] != "T" for s in states):
        time.sleep(0.001)


class Process:
    """A process that has imported :mod:`emulated.nic` as * and ``asyncio``, ``aiordma``, ``time``, ``os``.

    Without ``traces`` it gives up CAP_SYS_PTRACE, as root too, and may read no other's memory that forbids it
    (:data:`FORBID`). What it writes to standard error is added to ``log``.
    """

    def __init__(
        self, runtime: Path, *, devices: int = 1, traces: bool = True, log: Path | None = None, **config: Any
    ) -> None:
        env = os.environ | {RUNTIME: str(runtime), "PYTHONPATH": str(Path(__file__).parent.parent)}
        with open(log, "a") if log else contextlib.nullcontext() as stderr:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps({"devices": devices, "traces": traces} | config)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.pid = self._process.pid

    def start(self, code: str) -> None:
        """Have code run, without waiting for it: the last line is an expression, whose value :meth:`result` gives."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process has ended: {self._process.wait(60)}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def __call__(self, code: str) -> Any:
        self.start(code)
        return self.result()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it, and wait until all its threads stand."""
        stop(self.pid)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(60)

    def end(self) -> int:
        """End it as a program ends, and return its exit status."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        return self._process.wait(60)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def processes(runtime: Path, n: int = 2, **config: Any) -> Iterator[list[Process]]:
    """Some of them, each with an ``end`` that isn't connected."""
    started: list[Process] = []
    try:
        started.extend(Process(runtime, **config) for _ in range(n))
        yield started
    finally:
        for process in started:
            process.close()


def make_end(process: Process, name: str = "end", **options: int) -> dict[str, Any]:
    """Make an :class:`emulated.nic.End` in the process, and return what others must know of it."""
    numbers = {option: int(value) for option, value in options.items()}
    process(f"{name} = End(**{numbers!r})\nNone")
    info: dict[str, Any] = process(f"describe({name})")
    return info


def connect(a: Process, b: Process, *, name: str = "end", changes: str = "", **options: int) -> None:
    """Make an end in each and connect them; each has the other's description as ``far`` or, for another name, far_NAME."""
    far = "far" if name == "end" else f"far_{name}"
    infos = make_end(a, name, **options), make_end(b, name, **options)
    for process, info in ((a, infos[1]), (b, infos[0])):
        process(f"{far} = Far(**{info!r})\n{name}.connect({far}, {changes})\nNone")


# ------------------------------------------------------------------ in the process


class Far(SimpleNamespace):
    """Stands for an End in another process where one of this process is expected."""

    def __init__(self, qp_num: int, rkey: int, buf: int, gid: str) -> None:
        from pyverbs.addr import GID

        super().__init__(
            qp=SimpleNamespace(qp_num=qp_num),
            mr=SimpleNamespace(rkey=rkey, buf=buf),
            context=SimpleNamespace(query_gid=lambda port, index: GID(gid)),
        )


def describe(end: Any) -> dict[str, Any]:
    gid = end.context.query_gid(1, 3)
    return {"qp_num": end.qp.qp_num, "rkey": end.mr.rkey, "buf": end.mr.buf, "gid": str(gid.gid)}


def give_up_tracing() -> None:
    """Drop CAP_SYS_PTRACE, for this thread and those that it will start."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    data = ctypes.create_string_buffer(24)
    assert not libc.capget(header, data), ctypes.get_errno()
    words = list(struct.unpack("=6I", data.raw))
    for i in (0, 1):  # effective and permitted
        words[i] &= ~(1 << 19)
    assert not libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *words))), ctypes.get_errno()


def _serve(config: dict[str, Any]) -> None:
    import ast

    import aiordma.emulator

    if not config.pop("traces"):
        give_up_tracing()
    aiordma.emulator.attach(config.pop("devices"), **config)
    space: dict[str, Any] = {"Far": Far, "describe": describe}
    exec(
        "import asyncio, os, struct, time, aiordma\n"
        "from pyverbs import enums as e\n"
        "from emulated.nic import *\n"
        "from emulated.nic import End, ok, nothing, poll",
        space,
    )
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what code prints isn't an answer
    for line in sys.stdin:
        try:
            body = ast.parse(json.loads(line)).body
            last = body.pop()
            assert isinstance(last, ast.Expr), "the last line is an expression"
            exec(compile(ast.Module(body, []), "<test>", "exec"), space)
            value = eval(compile(ast.Expression(last.value), "<test>", "eval"), space)
            answer = {"value": value}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))

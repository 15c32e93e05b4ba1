"""Who takes part. Each contender is a program that prints one line of JSON: {"ns": [nanoseconds an operation, ...]}, one
number for each slice of operations. A new one needs a line in contenders()."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench"

#: What is measured, and how it's called in reports.
WORKLOADS = {
    "one": "one at a time",
    "many": "{n} outstanding, each awaited",
    "batch": "batches of {n}, one completion each",
}
LOOPS = ("asyncio", "uvloop", "trio")
#: pyverbs' synchronous loop; the first is what others are compared with.
PYVERBS = {"reuse": "one work request reused", "new": "a work request for each"}
SPIN_US = 20  # aiordma's default


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    device: str
    slices: int
    ops: int
    outstanding: int

    @property
    def words(self) -> list[str]:
        return [str(self.slices), str(self.ops), str(self.outstanding)]


@dataclass(frozen=True)
class Contender:
    """A program and one workload."""

    group: str
    name: str
    workload: str
    command: tuple[str, ...]


def build_c(name: str) -> Path:
    """Compile benchmarks/c/NAME.c against the installed libibverbs."""
    BUILD.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler for the reference loop (cc or gcc)")
    program = BUILD / name
    subprocess.run([compiler, "-O2", "-o", program, HERE / "c" / f"{name}.c", "-libverbs"], check=True)
    return program


def contenders(settings: Settings) -> Iterator[Contender]:
    write_loop = str(build_c("write_loop"))
    for workload in WORKLOADS:
        words = (settings.device, workload, *settings.words)
        yield Contender("C", "C loop", workload, (write_loop, *words))
        if workload != "batch":
            # SendWR.next isn't settable in all versions of pyverbs, so it has no batches here.
            loop = str(HERE / "loops" / "pyverbs_loop.py")
            for how, name in PYVERBS.items():
                command = (sys.executable, loop, *words, how)
                yield Contender("pyverbs", f"pyverbs, {name}", workload, command)
        for loop_name in LOOPS:
            if loop_name != "asyncio" and importlib.util.find_spec(loop_name) is None:
                continue
            for spin in (SPIN_US, 0):
                name = f"aiordma, {loop_name}, {f'spin {spin} us' if spin else 'no spin'}"
                loop = str(HERE / "loops" / "aiordma_loop.py")
                command = (sys.executable, loop, *words, loop_name, str(spin))
                yield Contender("aiordma", name, workload, command)

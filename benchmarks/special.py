"""What isn't a time an operation: CPU time of waiting, memory, imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cases import LOOPS, SPIN_US, Field, installed
from devices import Bench
from measure import Settings
from workers import ContenderFailed, Worker

Keys = dict[str, float]

#: Seconds. Ten million operations take some, on a busy machine.
LONGEST = 180.0
IMPORTS = {
    "nothing": "pass",
    "pyverbs": "import pyverbs.device, pyverbs.pd, pyverbs.mr, pyverbs.cq, pyverbs.qp, pyverbs.addr, pyverbs.wr",
    "both": "import pyverbs.device, pyverbs.pd, pyverbs.mr, pyverbs.cq, pyverbs.qp, pyverbs.addr, pyverbs.wr, aiordma",
}


def special(
    bench: Bench, settings: Settings, wanted: Callable[[str], bool], progress: Callable[[str], None]
) -> tuple[Keys, dict[str, str]]:
    """Numbers by their keys, and what failed."""
    keys: Keys = {}
    failed: dict[str, str] = {}
    for name, found in _measures(bench, settings):
        if not wanted(name):
            continue
        progress(name)
        try:
            keys.update({f"{name}.{metric}": value for metric, value in found().items()})
        except ContenderFailed as e:
            failed[name] = str(e)
    return keys, failed


def _ask(bench: Bench, command: tuple[str, ...], number: int) -> dict[str, Any]:
    worker = Worker(command, bench.environment)
    try:
        worker.wait_ready()
        return worker.ask("run", number, LONGEST)
    finally:
        worker.close()


def _measures(bench: Bench, settings: Settings) -> Iterator[tuple[str, Callable[[], Keys]]]:
    f = Field(bench)
    loops = [loop for loop in LOOPS if loop == "asyncio" or installed(loop)]
    for workload in ("idle", "waiting"):
        for contender in f.aiordma(workload, 8, loops=tuple(loops)):

            def cpu(command: tuple[str, ...] = contender.command) -> Keys:
                answer = _ask(bench, command, settings.wait_ms)
                return {
                    "loop_cpu_percent": 100 * answer["loop_cpu_ns"] / answer["ns"],
                    "process_cpu_percent": 100 * answer["process_cpu_ns"] / answer["ns"],
                }

            yield f"cpu_{workload}.{contender.name}", cpu
    # What an operation holds doesn't depend on the loop; a deep queue, so that all of them are in flight.
    heap = next(f.aiordma("heap", 8, 1000, loops=("asyncio",), spins=(SPIN_US,)))
    yield f"heap.{heap.name}", lambda: {"bytes": _ask(bench, heap.command, 1000)["bytes"]}
    for contender in f.aiordma(
        "rss", 8, 100, loops=("uvloop" if installed("uvloop") else "asyncio",), spins=(SPIN_US,)
    ):

        def rss(command: tuple[str, ...] = contender.command) -> Keys:
            answer = _ask(bench, command, max(10, settings.rss_ops))
            found = answer["rss"]
            return {
                "ops": answer["ops"],
                "first_tenth_bytes": found[0],
                "last_tenth_bytes": found[-1],
                "growth_bytes": found[-1] - found[0],
            }

        yield f"rss.{contender.name}", rss
    qps = next(f.aiordma("qp_memory", 8, 16, loops=("asyncio",), spins=(SPIN_US,)))
    yield f"qp_memory.{qps.name}", lambda: {"bytes": _ask(bench, qps.command, 400)["bytes"]}
    yield "import.aiordma", lambda: _imports(settings.imports)


def _imports(rounds: int) -> Keys:
    """Seconds of each import, in turns; the first round fills caches."""
    import numpy as np

    found: dict[str, list[float]] = {name: [] for name in IMPORTS}
    program = "import time; began = time.perf_counter()\n{}\nprint(time.perf_counter() - began)"
    for number in range(rounds + 1):
        for name, statement in IMPORTS.items():
            # -P: not from the working directory, which may be the sources'.
            command = [sys.executable, "-P", "-c", program.format(statement)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ContenderFailed(done.stderr.strip()[-500:])
            if number:
                found[name].append(float(done.stdout) * 1000)
    pyverbs, both = np.array(found["pyverbs"]), np.array(found["both"])
    return {
        "pyverbs_ms": float(np.median(pyverbs)),
        "with_aiordma_ms": float(np.median(both)),
        "more_ms": float(np.median(both - pyverbs)),
        "more_ms_best": float(np.min(both) - np.min(pyverbs)),
    }

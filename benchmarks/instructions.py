"""Counts the instructions of an operation with callgrind, and holds them against a ceiling.

Run it:  make bench-instructions                     (ARGS="--record" renews the ceilings of this Python version)

Time on a busy machine says nothing; instructions are the same every time, if what is waited for is left out: so the device's
work is done in the program's own thread, when the program says so, and no count depends on a spin or a scheduler
(programs/counted.py). Ceilings are in instructions.json, by Python version, which on the distributions that are known means
by version of libmlx5 too. A count more than the slack above its ceiling is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import callgrind

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench"
CEILINGS = HERE / "instructions.json"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: How much more than recorded is allowed: a part of it, and so many instructions an operation. Of our own code little; the
#: others' is another with each of their releases, and the interpreter's varies with the layout of its memory.
OURS = ("aiordma", "device")
SLACK_OURS = 0.03, 15
SLACK_OTHERS = 0.10, 60
#: The workloads of programs/counted.py and operations in each; and how many times the device is stepped, which costs a call
#: through ctypes that isn't the operation's.
OPERATIONS = {
    "C one": (1000, 0),
    "C many": (2000, 0),
    "C batch": (3200, 0),
    "one": (1000, 1000),
    "many": (2000, 20),
    "batch": (3200, 50),
    "repost": (3200, 50),
    "message": (1000, 1000),
    "memcpy": (1000, 1000),
    "copy": (1000, 1000),
    "fanout": (1920, 120),
    "parked, asyncio": (500, 500),
    "parked, uvloop": (500, 500),
    "parked, trio": (500, 500),
    "bare, asyncio": (500, 0),
    "bare, uvloop": (500, 0),
    "bare, trio": (500, 0),
}
Counts = dict[str, dict[str, int]]


class CannotCount(Exception):
    """Something that counting needs isn't there, or failed."""


def build() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotCount("there is no C compiler (cc or gcc)")
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / "libcounted.so"
    source = HERE / "c" / "counted.c"
    done = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-libverbs"], capture_output=True, text=True
    )
    if done.returncode:
        raise CannotCount(
            f"{source.name} doesn't compile (valgrind's headers, of its package, are needed):\n{done.stderr}"
        )
    return library


def profile(library: Path, folder: Path) -> dict[str, callgrind.Profile]:
    """One run of all workloads under callgrind."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise CannotCount(
            "valgrind isn't installed: scripts/bootstrap.sh tools does that on the distributions it knows"
        )
    command = [
        valgrind,
        "--tool=callgrind",
        "--instr-atstart=no",
        "--separate-threads=yes",
        "--dump-line=no",
        f"--callgrind-out-file={folder / 'out'}",
        sys.executable,
        str(HERE / "programs" / "counted.py"),
        str(library),
    ]
    # Hashes that differ from run to run would make dictionaries differ.
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=BUILD)
    if done.returncode:
        raise CannotCount(f"the counted program failed with status {done.returncode}\n{done.stderr[-4000:]}")
    found = {}
    for path in sorted(folder.glob("out.*-01"), key=lambda path: int(path.name[4:-3])):
        one = callgrind.read(path)
        if one is not None:
            found[one.name] = one  # the last of a name: those before it warmed up
    return found


def count(library: Path) -> Counts:
    """Instructions an operation, by workload and layer."""
    with tempfile.TemporaryDirectory() as folder:
        found = profile(library, Path(folder))
    missing = {*OPERATIONS, "steps"} - set(found)
    if missing:
        raise CannotCount(f"no profile of {', '.join(sorted(missing))}")
    steps = found["steps"].layers
    counts: Counts = {}
    for name, (operations, stepped) in OPERATIONS.items():
        layers = dict(found[name].layers)
        for layer in ("Python", "C library"):
            layers[layer] = layers.get(layer, 0) - steps[layer] * stepped // 1000
        counts[name] = {layer: round(layers.get(layer, 0) / operations) for layer in callgrind.LAYERS}
    return counts


# ---------------------------------------------------------------- what comes of it


def table(counts: Counts) -> str:
    layers = list(callgrind.LAYERS)
    lines = [f"{'instructions an operation':26}" + "".join(f"{layer:>11}" for layer in layers) + f"{'all':>11}"]
    for name, found in counts.items():
        row = "".join(f"{found[layer]:11,}" for layer in layers)
        lines.append(f"  {name:24}{row}{sum(found.values()):11,}")
    return "\n".join(lines)


def spread(runs: list[Counts]) -> str:
    """How far apart the same sum is in several runs."""
    lines = [f"{len(runs)} runs, lowest and highest of all layers together:"]
    for name in runs[0]:
        sums = [sum(run[name].values()) for run in runs]
        lines.append(f"  {name:24}{min(sums):11,}{max(sums):11,}{(max(sums) - min(sums)) / min(sums):9.3%}")
    return "\n".join(lines)


def exceeded(counts: Counts, ceilings: Counts) -> list[str]:
    found = []
    for name, layers in ceilings.items():
        for layer, ceiling in layers.items():
            part, more = SLACK_OURS if layer in OURS else SLACK_OTHERS
            allowed = round(ceiling * (1 + part) + more)
            if counts[name][layer] > allowed:
                found.append(
                    f"{name}: {layer} takes {counts[name][layer]:,} instructions an operation, {ceiling:,} were recorded "
                    f"and {allowed:,} are allowed"
                )
    return found


def load() -> dict[str, Counts]:
    known: dict[str, Counts] = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the instructions of an operation.")
    parser.add_argument("--record", action="store_true", help=f"write what is counted to {CEILINGS.name}")
    parser.add_argument("--runs", type=int, default=1, help="count so many times and show how far apart they are (1)")
    options = parser.parse_args()
    library = build()
    runs = [count(library) for _ in range(max(1, options.runs))]
    counts = runs[-1]
    print(table(counts))
    if len(runs) > 1:
        print(spread(runs))
    known = load()
    if options.record:
        # What bare loops take isn't ours.
        known[PYTHON] = {name: found for name, found in counts.items() if not name.startswith("bare")}
        CEILINGS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        print(f"recorded for Python {PYTHON} in {CEILINGS}")
        return 0
    if PYTHON not in known:
        print(
            f'nothing is recorded for Python {PYTHON}, so nothing is checked: make bench-instructions ARGS="--record"'
        )
        return 0
    failures = exceeded(counts, known[PYTHON])
    for failure in failures:
        print(f"MORE: {failure}", file=sys.stderr)
    if failures:
        print(
            'If it has to be so, record it, and say why in the commit: make bench-instructions ARGS="--record"',
            file=sys.stderr,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CannotCount as e:
        print(f"bench-instructions: {e}", file=sys.stderr)
        sys.exit(2)

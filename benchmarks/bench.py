"""Measures 8-byte RDMA writes: a C loop, pyverbs, and aiordma on each event loop.

Run it:  make bench                  (make bench ARGS="--quick")

Contenders run one after the other, each in a process of its own, and all of them again in the next round, so that what
disturbs the machine for a while disturbs them all. On the emulated NIC every one runs under `aiordma emulate`. Results go
to build/bench/results.json and, as a table, to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import report
from contenders import BUILD, Contender, Settings, contenders

import aiordma


class ContenderFailed(Exception):
    """A contender ended with an error, or printed something else than a result."""


def choose_device(wanted: str | None) -> tuple[str, list[str]]:
    """The verbs name, and what to put before a contender's command."""
    wanted = wanted or os.environ.get("AIORDMA_DEVICE") or None
    if wanted is None:
        found = aiordma.list_devices()
        wanted = found[0].name if found else "emulated"
    kind, _, name = wanted.partition(":")
    if kind != "emulated":
        return wanted, []
    name = name or "mlx5_0"
    return name, [str(Path(sysconfig.get_path("scripts")) / "aiordma"), "emulate", "--name", name, "--"]


def measure(contender: Contender, prefix: list[str], timeout: float) -> list[float]:
    try:
        done = subprocess.run(
            [*prefix, *contender.command], capture_output=True, text=True, timeout=timeout, check=True, cwd=BUILD
        )
        ns: list[float] = json.loads(done.stdout)["ns"]
    except subprocess.CalledProcessError as e:
        raise ContenderFailed(f"status {e.returncode}\n{e.stderr}") from e
    except subprocess.TimeoutExpired as e:
        raise ContenderFailed(f"not done after {timeout:.0f} s") from e
    except (ValueError, KeyError) as e:
        raise ContenderFailed(f"not a result: {done.stdout!r}") from e
    return ns


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure 8-byte RDMA writes.")
    parser.add_argument("--device", help='a verbs device, or "emulated" (default: hardware if there is any)')
    parser.add_argument("--rounds", type=int, default=5, help="times that every contender runs (5)")
    parser.add_argument("--slices", type=int, default=10, help="measurements in a run (10)")
    parser.add_argument("--ops", type=int, default=20_000, help="operations in a slice (20000)")
    parser.add_argument("--outstanding", type=int, default=100, help="operations in flight, and in a batch (100)")
    parser.add_argument("--quick", action="store_true", help="one round of short runs")
    parser.add_argument("--only", metavar="TEXT", help="only contenders with TEXT in their names")
    parser.add_argument("--output", type=Path, default=BUILD / "results.json", help="(build/bench/results.json)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one run (120)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.slices, options.ops = 1, 3, 2000
    if min(options.rounds, options.slices, options.ops, options.outstanding) < 1:
        parser.error("--rounds, --slices, --ops and --outstanding are numbers from 1")
    if options.outstanding > min(options.ops, 128):
        parser.error("--outstanding is at most 128, aiordma's default queue, and at most --ops")
    return options


def main() -> int:
    options = arguments()
    name, prefix = choose_device(options.device)
    settings = Settings(name, options.slices, options.ops, options.outstanding)
    about = report.machine()
    results = [
        report.Result(contender)
        for contender in contenders(settings)
        if not options.only or options.only.lower() in contender.name.lower()
    ]
    nature = "aiordma's emulated NIC: software and this machine, no hardware" if prefix else "hardware"
    print(f"{name} ({nature}); {about['cpu']}, {about['cpus']} CPUs, load {about['load_at_start']:.1f} at the start")
    if about["load_at_start"] > about["cpus"] - 1:
        # The loop that polls and the emulated device's thread want a CPU each.
        print("The machine is busy: medians say little, and their spread says how little. Best slices say more.")
    failed = False
    for number in range(1, options.rounds + 1):
        for result in results:
            if sys.stderr.isatty():
                print(f"\r\x1b[Kround {number}: {result.contender.name}", end="", file=sys.stderr, flush=True)
            try:
                result.runs.append(measure(result.contender, prefix, options.timeout))
            except ContenderFailed as e:
                failed = True
                print(f"{result.contender.name}, {result.contender.workload}: {e}", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    results = [result for result in results if result.runs]
    print(report.table(results, settings))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report.as_json(results, settings, about, bool(prefix)), indent=1) + "\n")
    print(f"\nwritten to {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        sys.exit(130)
    except (aiordma.RdmaError, OSError, subprocess.CalledProcessError) as e:
        print(f"bench: {e}", file=sys.stderr)
        sys.exit(1)

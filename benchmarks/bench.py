"""Measures aiordma beside C, pyverbs and others, in turns, on one device.

Run it:  make bench                  (make bench ARGS="--quick")

All programs of a workload are started and wait; then each round goes through them all, so that what disturbs the machine
for a while disturbs them all. Results go to build/bench/results.json, tables to standard output; a full run also writes
docs/performance.md and its plots.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

# By itself Python puts a script's folder there, but not where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).parent))

import goals
import machine
import results
import tables
import typer
from cases import BUILD, build_c, cases, groups
from devices import Bench, NoDevice, choose_device
from measure import Settings, run_together
from rich.console import Console
from special import special

import aiordma

SCHEMA = 1
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
out = Console(width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True)


def progress(text: str) -> None:
    if err.is_terminal:
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def measure(bench: Bench, settings: Settings, only: list[str]) -> dict[str, Any]:
    def wanted(name: str) -> bool:
        return not only or any(text in name for text in only)

    about = machine.machine()
    about["busy_at_start"] = machine.busy()
    out.print(
        f"{bench.device} ({bench.nature}); {about['cpu']}, {about['cpus']} CPUs, {about['busy_at_start']:.0%} in use"
    )
    if about["busy_at_start"] > machine.QUIET:
        # The loop that polls and the emulated device's thread want a CPU each.
        out.print("The machine is busy: what is measured says that the programs run, and hardly more.")
    keys: dict[str, float] = {}
    workloads: dict[str, Any] = {}
    quantiles: dict[str, list[float]] = {}
    raw: dict[str, list[float]] = {}
    chosen = []
    for case in cases(bench):
        case.contenders = [c for c in case.contenders if wanted(f"{case.name}.{c.name}")]
        if case.contenders:
            chosen.append(case)
    out_of_time: list[str] = []
    together = groups(chosen)
    began = time.monotonic()
    for number, group in enumerate(together):
        left = settings.budget - (time.monotonic() - began)
        if left < -settings.budget / 4:
            out_of_time += [case.name for case in group]
            continue
        # Two thirds of the time that is left for each is for starting programs and for finding out how fast they are.
        waiting = sum(len(case.contenders) for later in together[number:] for case in later)
        share = max(0.0, left) * sum(len(case.contenders) for case in group) / waiting / 3
        progress("starting " + ", ".join(case.name for case in group))
        outcomes = run_together(group, bench, settings, share, progress)
        progress("")
        keys.update(results.across(outcomes))
        for outcome in outcomes:
            name = outcome.case.name
            keys.update(results.numbers(outcome))
            workloads[name] = results.describe(outcome)
            quantiles.update(results.quantiles(outcome))
            raw.update(results.raw(outcome))
            if outcome.measured:
                out.print(tables.case_table(name, workloads[name], keys))
            for contender, why in outcome.left_out.items():
                out.print(f"  left out: {contender}: {why}", style="dim", highlight=False)
            for contender, why in outcome.failed.items():
                out.print(f"  failed: {contender}: {why}", style="red", markup=False)
    found, failed = special(bench, settings, wanted, progress)
    progress("")
    keys.update({key: round(value, 4) for key, value in found.items()})
    for key, value in found.items():
        out.print(f"{key} = {value:,.2f}", highlight=False)
    for name, why in failed.items():
        out.print(f"failed: {name}: {why}", style="red", markup=False)
    about["busy_at_end"] = machine.busy()
    return {
        "schema": SCHEMA,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": bench.device,
        "emulated": bench.emulated,
        "nature": bench.nature,
        "machine": about,
        "settings": vars(settings),
        "seconds": round(time.monotonic() - began, 1),
        "results": keys,
        "workloads": workloads,
        "quantiles": quantiles,
        "quantile_points": [round(float(q), 4) for q in results.QUANTILES],
        "rounds_ns": raw,
        "failed": failed,
        "out_of_time": out_of_time,
        "goals": [{**vars(goal), "verdict": goal.verdict} for goal in goals.goals(keys)],
    }


@app.command()
def main(
    device: Annotated[
        str | None, typer.Option(help='A verbs device, or "emulated" (default: AIORDMA_DEVICE, else hardware if any)')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short turns, a few rounds: about two minutes")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, max=1000, help="Turns of each contender (15; quick: 5)")] = None,
    slice_ms: Annotated[
        float | None, typer.Option(min=1, max=5000, help="Milliseconds of a turn (50; quick: 15)")
    ] = None,
    ops: Annotated[int, typer.Option(min=0, help="Operations of a turn, instead of a time")] = 0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Only what has TEXT in WORKLOAD.CONTENDER; repeatable")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the results go")] = BUILD / "results.json",
    page: Annotated[
        bool | None,
        typer.Option("--page/--no-page", help="Write docs/performance.md (default: after a whole full run)"),
    ] = None,
    page_from: Annotated[
        Path | None, typer.Option(metavar="RESULTS", help="Measure nothing: write the page from these results")
    ] = None,
    docs: Annotated[Path, typer.Option(help="Where the page goes")] = Path(__file__).parent.parent / "docs",
    budget: Annotated[float | None, typer.Option(min=1, help="Seconds for everything (540; quick: 100)")] = None,
    rss_ops: Annotated[
        int | None, typer.Option(min=10, help="Operations to watch memory over (10M; quick: 1M)")
    ] = None,
) -> None:
    """Measures aiordma beside C, pyverbs and others, in turns, on one device."""
    if page_from is not None:
        write_page(json.loads(page_from.read_text()), docs)
        return
    settings = Settings(
        rounds=rounds or (5 if quick else 15),
        slice_ms=slice_ms or (15 if quick else 50),
        ops=ops,
        samples=min(ops, 100) if ops else 2000 if quick else 20_000,
        budget=budget or (100 if quick else 540),
        rss_ops=rss_ops or (1_000_000 if quick else 10_000_000),
        wait_ms=50 if ops else 300 if quick else 1000,
        imports=1 if ops else 5 if quick else 15,
        processes=1 if ops or quick else 3,
    )
    try:
        build_c()
        with choose_device(device) as bench:
            found = measure(bench, settings, only or [])
    except (aiordma.RdmaError, NoDevice, OSError, subprocess.CalledProcessError) as e:
        err.print(f"bench: {e}", style="red", markup=False)
        raise typer.Exit(1) from e
    out.print(tables.goal_table(list(goals.goals(found["results"]))))
    for name in found["out_of_time"]:
        out.print(f"left out: {name}: out of time", highlight=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")
    out.print(f"written to {output}", highlight=False)
    if page or (page is None and not quick and not only and not ops):
        write_page(found, docs)
    if found["failed"] or any(about["failed"] for about in found["workloads"].values()):
        raise typer.Exit(1)


def write_page(found: dict[str, Any], docs: Path) -> None:
    from page import write  # matplotlib is slow to import, and not everybody has it

    for path in write(found, docs):
        out.print(f"written to {path}", highlight=False)


if __name__ == "__main__":
    try:
        app()
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        sys.exit(130)

"""From measurements to numbers, a table and JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
from dataclasses import dataclass, field
from typing import Any

from contenders import WORKLOADS, Contender, Settings


@dataclass
class Result:
    """All slices of one contender, over all rounds."""

    contender: Contender
    runs: list[list[float]] = field(default_factory=list)

    @property
    def slices(self) -> list[float]:
        return [ns for run in self.runs for ns in run]

    @property
    def median(self) -> float:
        return statistics.median(self.slices)

    @property
    def best(self) -> float:
        """The slice that was disturbed least."""
        return min(self.slices)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half of all slices."""
        if len(self.slices) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.slices, n=4, method="inclusive")
        return low, high

    def as_json(self) -> dict[str, Any]:
        low, high = self.spread
        return {
            "group": self.contender.group,
            "name": self.contender.name,
            "workload": self.contender.workload,
            "median_ns": self.median,
            "quartiles_ns": [low, high],
            "best_ns": self.best,
            "runs_ns": self.runs,
        }


def reference(results: list[Result], group: str, workload: str) -> Result | None:
    """The first of a group is what others are compared with."""
    for result in results:
        if result.contender.group == group and result.contender.workload == workload:
            return result
    return None


def ratio(result: Result, other: Result | None) -> float | None:
    return None if other is None else result.median / other.median


# ---------------------------------------------------------------- the goals

#: Workload, and how many times longer than pyverbs' synchronous loop an operation of aiordma may take.
GOALS = {"one": 1.0, "many": 0.5}


def goals(results: list[Result]) -> list[dict[str, Any]]:
    """How aiordma with its default settings compares with pyverbs' own synchronous loop."""
    found = []
    for workload, most in GOALS.items():
        pyverbs = reference(results, "pyverbs", workload)
        for result in results:
            if pyverbs is None or result.contender.group != "aiordma" or result.contender.workload != workload:
                continue
            if "no spin" in result.contender.name:
                continue
            value = result.median / pyverbs.median
            best = result.best / pyverbs.best
            found.append(
                {
                    "workload": workload,
                    "name": result.contender.name,
                    "ratio_to_pyverbs": value,
                    "ratio_of_bests": best,
                    "goal": most,
                    "met": value <= most,
                }
            )
    return found


# ---------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
    cpu = ""
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        pass
    versions = {}
    for package in ("aiordma", "uvloop", "trio"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        found = subprocess.run(["pkg-config", "--modversion", "libibverbs"], capture_output=True, text=True, check=True)
        versions["libibverbs"] = found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return {
        "cpu": cpu or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_at_start": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def as_json(results: list[Result], settings: Settings, about: dict[str, Any], emulated: bool) -> dict[str, Any]:
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": settings.device,
        "emulated": emulated,
        "machine": about,
        "settings": {"slices": settings.slices, "ops": settings.ops, "outstanding": settings.outstanding},
        "results": [result.as_json() for result in results],
        "goals": goals(results),
    }


# ---------------------------------------------------------------- the table


def table(results: list[Result], settings: Settings) -> str:
    lines = []
    for workload, title in WORKLOADS.items():
        chosen = [result for result in results if result.contender.workload == workload]
        if not chosen:
            continue
        c, pyverbs = (reference(results, group, workload) for group in ("C", "pyverbs"))
        lines += ["", title.format(n=settings.outstanding)]
        lines.append(f"  {'':32} {'us/op':>8} {'middle half':>15} {'best':>7} {'x C':>7} {'x pyverbs':>10}")
        for result in chosen:
            low, high = result.spread
            ratios = [f"{value:.2f}" if (value := ratio(result, other)) else "" for other in (c, pyverbs)]
            lines.append(
                f"  {result.contender.name:32} {result.median / 1000:8.3f} "
                f"{f'{low / 1000:.3f}..{high / 1000:.3f}':>15} {result.best / 1000:7.3f} "
                f"{ratios[0]:>7} {ratios[1]:>10}"
            )
    lines.append("")
    for goal in goals(results):
        lines.append(
            f"{'met' if goal['met'] else 'MISSED'}: {WORKLOADS[goal['workload']].format(n=settings.outstanding)}, "
            f"{goal['name']}: {goal['ratio_to_pyverbs']:.2f} of pyverbs' time ({goal['ratio_of_bests']:.2f} by the best "
            f"slices); the goal is at most {goal['goal']}"
        )
    return "\n".join(lines)

"""Results, as lines like perftest's and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiordma
from aiordma.cli._perf_settings import Settings
from aiordma.cli.perf.samples import PERCENTILES, Samples

__all__ = ["Outcome", "Result", "as_json", "header", "histogram", "line", "title"]

SCHEMA = 1
_WIDTH = 88


@dataclass(slots=True)
class Result:
    """What was measured at one size. ``seconds`` is all the time; ``samples`` are of latency tests.

    ``operations`` have completed on the side that posts them. ``lost`` of them never got to the other one: messages of UC.
    """

    size: int
    operations: int = 0
    seconds: float = 0.0
    samples: Samples = field(default_factory=Samples)
    lost: int = 0
    verified: bool | None = None
    complete: bool = False

    @property
    def rate(self) -> float:
        """Operations a second, without those that were lost."""
        return (self.operations - self.lost) / self.seconds if self.seconds else 0.0

    def facts(self, latency: bool) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {
            "size": self.size,
            "operations": self.operations,
            "seconds": self.seconds,
            "operations_per_second": self.rate,
            "bytes_per_second": self.rate * self.size,
            "lost": self.lost,
            "verified": self.verified,
            "complete": self.complete,
        }
        if latency:
            found["latency_us"] = None
            found["histogram_us"] = []
            if len(self.samples):
                percentiles = self.samples.percentiles()
                found["latency_us"] = {
                    "min": self.samples.minimum / 1000,
                    "avg": self.samples.mean / 1000,
                    **{f"p{p:g}": percentiles[p] / 1000 for p in PERCENTILES},
                    "max": self.samples.maximum / 1000,
                }
                found["histogram_us"] = [[upper / 1000, count] for upper, count in self.samples.histogram()]
        return found


@dataclass(slots=True)
class Outcome:
    """How a run ended: ``exit_status`` 0 well, 1 with ``error``, 130 interrupted."""

    results: list[Result] = field(default_factory=list)
    device: str = ""
    emulated: bool = False
    peer: str = ""
    error: str | None = None
    interrupted: bool = False

    @property
    def exit_status(self) -> int:
        """The command's."""
        if self.interrupted:
            return 130
        return 1 if self.error is not None or any(r.verified is False for r in self.results) else 0


def title(settings: Settings, outcome: Outcome) -> str:
    """What perftest prints first."""
    verb = {"write": "RDMA_Write", "read": "RDMA_Read", "send": "Send", "atomic": "Atomic FETCH_AND_ADD"}[
        settings.test.verb
    ]
    what = f"{verb} {'Latency' if settings.test.is_latency else 'BW'} Test"
    nature = " (emulated)" if outcome.emulated else ""
    both = ", both ends in this program" if settings.loopback else f", peer {outcome.peer}" if outcome.peer else ""
    lines = [
        "-" * _WIDTH,
        f"{what:^{_WIDTH}}".rstrip(),
        f" Device: {outcome.device}{nature}   Transport: {settings.qp_type}   QPs: {settings.qps}{both}",
        f" Loop: {settings.loop}   Spin: {settings.spin_us:g} us   Connected by: {settings.via}"
        + ("" if settings.test.is_latency else f"   TX depth: {settings.depth}   List: {settings.batch}"),
        "-" * _WIDTH,
    ]
    return "\n".join(lines)


def header(latency: bool) -> str:
    """The line above the results."""
    if latency:
        names = ("t_min", "t_avg", "t_p50", "t_p90", "t_p99", "t_p99.9", "t_max")
        return " #bytes  #iterations" + "".join(f"{name:>9}" for name in names) + "   [usec]"
    return " #bytes  #iterations   BW average[MiB/sec]   BW average[Gb/sec]   MsgRate[Mpps]"


def line(result: Result, latency: bool) -> str:
    """One line."""
    notes = [
        *(["NOT COMPLETE"] if not result.complete else []),
        *([f"{result.lost} lost"] if result.lost else []),
        *([] if result.verified is None else ["verified" if result.verified else "WRONG DATA"]),
    ]
    note = f"   {', '.join(notes)}" if notes else ""
    text = f" {result.size:<7} {result.operations:<11}"
    if latency:
        if not len(result.samples):
            return f"{text}{note}"
        found = result.samples.percentiles()
        times = (
            result.samples.minimum,
            result.samples.mean,
            *(found[p] for p in PERCENTILES),
            result.samples.maximum,
        )
        return text + "".join(f"{time / 1000:>9.2f}" for time in times) + note
    volume = result.rate * result.size
    return f"{text}   {volume / (1 << 20):>19.2f}   {volume * 8 / 1e9:>18.3f}   {result.rate / 1e6:>13.6f}{note}"


def histogram(samples: Samples) -> str:
    """A bar for each power of two."""
    rows = samples.histogram()
    most = max((count for _, count in rows), default=1)
    return "\n".join(
        f"   < {upper / 1000:>10.2f} us  {count:>9}  {'#' * max(1, round(40 * count / most))}" for upper, count in rows
    )


def as_json(settings: Settings, outcome: Outcome, role: str) -> str:
    """The whole for programs; docs/perf.md has the schema."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "aiordma": aiordma.__version__,
            "role": role,
            "test": settings.test.value,
            "device": outcome.device,
            "emulated": outcome.emulated,
            "peer": outcome.peer,
            "qp_type": settings.qp_type.value,
            "qps": settings.qps,
            "depth": settings.depth,
            "batch": settings.batch,
            "loop": settings.loop.value,
            "spin_us": settings.spin_us,
            "via": settings.via,
            "loopback": settings.loopback,
            "exit_status": outcome.exit_status,
            "interrupted": outcome.interrupted,
            "error": outcome.error,
            "results": _facts(settings, outcome.results),
        },
        indent=2,
    )


def _facts(settings: Settings, results: Sequence[Result]) -> list[dict[str, Any]]:
    return [result.facts(settings.test.is_latency) for result in results]

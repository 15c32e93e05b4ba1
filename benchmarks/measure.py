"""Measuring in turns: every contender of a workload is there at the same time, waiting, and each round goes through all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cases import Case, Contender
from devices import Bench
from workers import ContenderFailed, Contestant, Perftest, Worker

LEAST_ROUNDS = 3
#: perftest's programs take part in one round of so many.
PERFTEST_EVERY = 3
#: Single operations are timed in so many turns.
SAMPLE_TURNS = 4
#: Longer runs than this say no more.
MOST_OPS = 2_000_000


@dataclass(frozen=True)
class Settings:
    """``slice_ms``: how long a contender's turn takes, about. ``ops``: or how many operations, if it isn't 0. ``samples``:
    single operations that are timed where a workload has them. ``budget``: seconds for everything. ``processes``: at most
    so many of one contender, where a workload asks for several."""

    rounds: int
    slice_ms: float
    ops: int
    samples: int
    budget: float
    rss_ops: int
    wait_ms: int
    imports: int
    processes: int = 1


@dataclass
class Measured:
    """What one contender showed: nanoseconds an operation, in which round, and CPU time of its own thread."""

    contender: Contender
    ns: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    cpu_ns: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    """``left_out``: who didn't take part, and why. ``failed``: who should have, and what went wrong."""

    case: Case
    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class Entry:
    """A contender of a workload that has been started: a process, or several that take turns. ``ops``: operations of a
    turn."""

    outcome: Outcome
    measured: Measured
    contestants: list[Contestant]
    ops: int = 0

    def attempt(self, step: Callable[[Entry], object]) -> None:
        """Does the step if it's still taking part, and notes it as failed if that fails."""
        name = self.measured.contender.name
        if name not in self.outcome.failed:
            try:
                step(self)
            except ContenderFailed as e:
                self.outcome.failed[name] = str(e)

    def turn(self, number: int) -> None:
        contestant = self.contestants[number % len(self.contestants)]
        if not self.measured.contender.perftest:
            contestant.ask("run", max(1, self.ops // 20))  # the device was asleep
        answer = contestant.ask("run", self.ops)
        self.measured.ns.append(answer["ns"] / answer["ops"])
        self.measured.rounds.append(number)
        if answer["cpu_ns"] is not None:
            self.measured.cpu_ns.append(answer["cpu_ns"] / answer["ops"])

    def sample(self, number: int) -> None:
        self.measured.samples += self.contestants[0].ask("sample", number)["samples"]

    def wait_ready(self) -> None:
        for contestant in self.contestants:
            contestant.wait_ready()


def run_together(
    cases: list[Case], bench: Bench, settings: Settings, seconds: float, progress: Callable[[str], None]
) -> list[Outcome]:
    """Measures workloads that are compared with each other, in the same rounds.

    ``seconds``: what the rounds may take; a few there are in any case.
    """
    outcomes = [Outcome(case) for case in cases]
    entries: list[Entry] = []
    try:
        for outcome in outcomes:
            for contender in outcome.case.contenders:
                if contender.left_out is not None:
                    outcome.left_out[contender.name] = contender.left_out
                    continue
                kind = Perftest if contender.perftest else Worker
                entries.append(Entry(outcome, Measured(contender), []))
                for _ in range(min(outcome.case.processes, settings.processes)):
                    entries[-1].contestants.append(kind(contender.command, bench.environment))
        for entry in entries:
            entry.attempt(lambda e: e.wait_ready())
        for entry in entries:
            entry.attempt(lambda e: calibrate(e, settings))
        rounds(entries, settings, seconds, progress)
        for _ in range(SAMPLE_TURNS):
            for entry in entries:
                if entry.outcome.case.samples:
                    entry.attempt(lambda e: e.sample(max(1, settings.samples // SAMPLE_TURNS)))
    finally:
        # All of them are told first: a Python takes its time to end.
        contestants = [contestant for entry in entries for contestant in entry.contestants]
        for contestant in contestants:
            contestant.finish()
        for contestant in contestants:
            contestant.close()
    for entry in entries:
        if entry.measured.contender.name not in entry.outcome.failed:
            entry.outcome.measured.append(entry.measured)
    return outcomes


def rounds(entries: list[Entry], settings: Settings, seconds: float, progress: Callable[[str], None]) -> None:
    began = time.monotonic()
    for number in range(settings.rounds):
        # Who comes first changes, so that nobody is always behind the same one.
        first = number % max(len(entries), 1)
        for entry in entries[first:] + entries[:first]:
            progress(f"{entry.outcome.case.name}, round {number + 1}: {entry.measured.contender.title}")
            # Starting two processes each time takes much longer than what they measure.
            if not (entry.measured.contender.perftest and number % PERFTEST_EVERY):
                entry.attempt(lambda e, number=number: e.turn(number))  # type: ignore[misc]
        if number + 1 >= LEAST_ROUNDS and time.monotonic() - began > seconds:
            break


def calibrate(entry: Entry, settings: Settings) -> None:
    """Finds out how many operations make a turn."""
    if settings.ops:
        entry.ops = settings.ops
        return
    wanted = settings.slice_ms * 1e6
    ops = 64
    while True:
        answer = entry.contestants[0].ask("run", ops)
        if answer["ns"] >= wanted / 4:
            # The first time takes longer: a run of trio that starts its first tasks by far.
            answer = entry.contestants[0].ask("run", ops)
        if answer["ns"] >= wanted / 4 or ops >= MOST_OPS:
            break
        ops *= 4
    entry.ops = int(min(MOST_OPS, max(1, answer["ops"] * wanted / answer["ns"])))

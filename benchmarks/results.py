"""From measurements to numbers under stable keys: ``<workload>.<contender>.<metric>``."""

from __future__ import annotations

from typing import Any

import numpy as np
from measure import Measured, Outcome

QUANTILES = np.concatenate([np.linspace(0, 0.99, 100), [0.995, 0.999, 1.0]])


def numbers(outcome: Outcome) -> dict[str, float]:
    """Times in nanoseconds an operation: median, quartiles and the best of all rounds. ``ratio`` is the median of each
    round's own ratio to the reference, since what disturbed the one probably disturbed the other."""
    keys: dict[str, float] = {}
    reference = by_name(outcome, outcome.case.reference)
    for measured in outcome.measured:
        prefix = f"{outcome.case.name}.{measured.contender.name}"
        low, median, high = np.percentile(measured.ns, [25, 50, 75])
        keys[f"{prefix}.ns"] = median
        keys[f"{prefix}.ns_q1"] = low
        keys[f"{prefix}.ns_q3"] = high
        keys[f"{prefix}.ns_best"] = min(measured.ns)
        if measured.cpu_ns:
            keys[f"{prefix}.cpu_ns"] = float(np.median(measured.cpu_ns))
        if outcome.case.size:
            keys[f"{prefix}.gbytes_per_s"] = outcome.case.size / median
        if reference is not None and (found := ratios(measured, reference)):
            low, median, high = np.percentile(found, [25, 50, 75])
            keys[f"{prefix}.ratio"] = median
            keys[f"{prefix}.ratio_q1"] = low
            keys[f"{prefix}.ratio_q3"] = high
            keys[f"{prefix}.ratio_best"] = min(measured.ns) / min(reference.ns)
        if measured.samples:
            for percent in (50, 90, 99, 99.9):
                name = f"p{percent}".replace(".", "_")
                keys[f"{prefix}.{name}_ns"] = float(np.percentile(measured.samples, percent))
    return {key: round(float(value), 4) for key, value in keys.items()}


def across(outcomes: list[Outcome]) -> dict[str, float]:
    """Of workloads that were measured together: each contender's time, as a multiple of its own in the first of them.
    ``<workload>.<contender>.to_<first>`` is the median of the rounds' ratios, ``_best`` the ratio of the best rounds."""
    keys: dict[str, float] = {}
    first = outcomes[0]
    for outcome in outcomes[1:]:
        for measured in outcome.measured:
            before = by_name(first, measured.contender.name)
            if before is not None and (found := ratios(measured, before)):
                name = f"{outcome.case.name}.{measured.contender.name}.to_{first.case.name}"
                keys[name] = round(float(np.median(found)), 4)
                keys[f"{name}_best"] = round(min(measured.ns) / min(before.ns), 4)
    return keys


def ratios(one: Measured, other: Measured) -> list[float]:
    """Of each round that both took part in."""
    there = dict(zip(other.rounds, other.ns, strict=True))
    return [ns / there[number] for number, ns in zip(one.rounds, one.ns, strict=True) if number in there]


def by_name(outcome: Outcome, name: str) -> Measured | None:
    return next((measured for measured in outcome.measured if measured.contender.name == name), None)


def describe(outcome: Outcome) -> dict[str, Any]:
    """What the numbers alone don't say: who took part in which order, and why others didn't."""
    return {
        "title": outcome.case.title,
        "reference": outcome.case.reference,
        "size": outcome.case.size,
        "unit": outcome.case.unit,
        "notes": outcome.case.notes,
        "contenders": {measured.contender.name: measured.contender.title for measured in outcome.measured},
        "rounds": max((len(measured.ns) for measured in outcome.measured), default=0),
        "left_out": outcome.left_out,
        "failed": outcome.failed,
    }


def quantiles(outcome: Outcome) -> dict[str, list[float]]:
    """Latency distributions, for the plot."""
    return {
        f"{outcome.case.name}.{measured.contender.name}": [
            round(float(value), 1) for value in np.quantile(measured.samples, QUANTILES)
        ]
        for measured in outcome.measured
        if measured.samples
    }


def raw(outcome: Outcome) -> dict[str, list[float]]:
    """Each round's number."""
    return {
        f"{outcome.case.name}.{measured.contender.name}": [round(ns, 2) for ns in measured.ns]
        for measured in outcome.measured
    }

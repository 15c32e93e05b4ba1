"""Tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goals import Goal
from rich.table import Table

Keys = Mapping[str, float]


def rows(name: str, about: Mapping[str, Any], keys: Keys) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a workload's table."""
    bandwidth = bool(about["size"])
    heading = [
        "",
        f"us / {about['unit']}",
        "middle half",
        *(["GB/s"] if bandwidth else []),
        "times the first",
        "CPU us",
    ]
    found = []
    for contender, title in about["contenders"].items():
        p = f"{name}.{contender}"
        row = [
            title,
            f"{keys[p + '.ns'] / 1000:.3f}",
            f"{keys[p + '.ns_q1'] / 1000:.3f} to {keys[p + '.ns_q3'] / 1000:.3f}",
        ]
        if bandwidth:
            row.append(f"{keys[p + '.gbytes_per_s']:.2f}")
        row.append(f"{keys[p + '.ratio']:.2f}" if p + ".ratio" in keys else "")
        row.append(f"{keys[p + '.cpu_ns'] / 1000:.3f}" if p + ".cpu_ns" in keys else "")
        found.append(row)
    return heading, found


def case_table(name: str, about: Mapping[str, Any], keys: Keys) -> Table:
    heading, found = rows(name, about, keys)
    table = Table(title=f"{about['title']}  [dim]{name}[/dim]", title_justify="left")
    for number, text in enumerate(heading):
        table.add_column(text, justify="right" if number else "left")
    for row in found:
        table.add_row(*row)
    return table


def goal_table(found: list[Goal]) -> Table:
    table = Table(title="Goals", title_justify="left")
    for text in ("", "aim", "measured", "best rounds", ""):
        table.add_column(text)
    colours = {"reached": "green", "missed": "red", "not measured": "dim"}
    for goal in found:
        text = goal.text + (f" ({goal.detail})" if goal.detail else "")
        colour = colours[goal.verdict]
        table.add_row(
            text, goal.aim, goal.shown(goal.value), goal.shown(goal.best), f"[{colour}]{goal.verdict}[/{colour}]"
        )
    return table

"""What a check finds, and how a report of findings is written: as text, and as JSON."""

from __future__ import annotations

import enum
import json
import platform
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import aiordma

__all__ = ["Finding", "Report", "Status"]

SCHEMA = 1
PAGE = "docs/troubleshooting.md"
_WIDEST = 100


class Status(enum.Enum):
    """What a finding means. Only ``ERROR`` stops RDMA from working; ``UNKNOWN`` couldn't be found out."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    UNKNOWN = "unknown"


_COLOURS = {
    Status.OK: "\x1b[32m",
    Status.INFO: "\x1b[36m",
    Status.WARNING: "\x1b[33m",
    Status.ERROR: "\x1b[31m",
    Status.UNKNOWN: "\x1b[35m",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    ``check`` is the check's name, and a heading of the troubleshooting page. ``reason`` tells the findings of one check
    apart, for programs; ``subject`` is the device, port or library that it's about. ``cure`` is what to do, best first.
    """

    check: str
    status: Status
    summary: str
    reason: str = ""
    subject: str = ""
    detail: str = ""
    cure: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and facts about devices for programs."""

    findings: Sequence[Finding]
    emulated: bool
    strict: bool = False
    devices: Sequence[dict[str, Any]] = field(default=())

    def count(self, status: Status) -> int:
        """How many findings are of that status."""
        return sum(finding.status is status for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """1 if something stops RDMA from working, with ``strict`` also if there's a warning; else 0."""
        return 1 if self.count(Status.ERROR) or (self.strict and self.count(Status.WARNING)) else 0

    def as_json(self) -> str:
        """The report for programs; the schema is in the troubleshooting page."""
        worst = next((s for s in (Status.ERROR, Status.WARNING) if self.count(s)), Status.OK)
        return json.dumps(
            {
                "schema": SCHEMA,
                "aiordma": aiordma.__version__,
                "python": platform.python_version(),
                "kernel": platform.release(),
                "emulated": self.emulated,
                "status": worst.value,
                "exit_status": self.exit_status,
                "findings": [
                    {
                        "check": f.check,
                        "status": f.status.value,
                        "reason": f.reason,
                        "subject": f.subject,
                        "summary": f.summary,
                        "detail": f.detail,
                        "cure": list(f.cure),
                    }
                    for f in self.findings
                ],
                "devices": list(self.devices),
            },
            indent=2,
        )

    def write(self, out: TextIO, *, colour: bool, width: int | None = None) -> None:
        """Writes the report as text. No word is cut: what is longer than a line stands on one of its own."""
        columns = min(width or shutil.get_terminal_size((80, 24)).columns, _WIDEST)
        nature = "on the emulated NIC" if self.emulated else "on this machine's devices"
        out.write(f"aiordma {aiordma.__version__}, Python {platform.python_version()}, Linux {platform.release()}, ")
        out.write(f"{nature}\n\n")
        for finding in self.findings:
            label = f"{finding.status.value:8}"
            lines = _wrap(f"{finding.check}: {finding.summary}", columns, " " * 9, label + " ")
            if colour:
                lines = lines.replace(label, f"{_COLOURS[finding.status]}{label}\x1b[0m", 1)
            out.write(lines + "\n")
            if finding.detail:
                for paragraph in finding.detail.split("\n"):
                    out.write(_wrap(paragraph, columns, " " * 9) + "\n")
            for index, cure in enumerate(finding.cure):
                out.write(_wrap(cure, columns, " " * 15, " " * 9 + ("cure: " if index == 0 else "or:   ")) + "\n")
        out.write("\n" + _wrap(self._conclusion(), columns, "") + "\n")

    def _conclusion(self) -> str:
        errors, warnings, unknown = (self.count(s) for s in (Status.ERROR, Status.WARNING, Status.UNKNOWN))
        names = list(dict.fromkeys(f.check for f in self.findings if f.status in (Status.ERROR, Status.WARNING)))
        more = f" More on each is in {PAGE}, under its name: {', '.join(names)}." if names else ""
        left = f" {_number(unknown, 'thing')} couldn't be found out." if unknown else ""
        if errors:
            also = f", and {_number(warnings, 'warning')}" if warnings else ""
            return f"{_number(errors, 'problem')} to solve before RDMA works{also}.{left}{more}"
        if warnings:
            return f"RDMA should work; {_number(warnings, 'warning')}.{left}{more}"
        return f"RDMA should work.{left}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _wrap(text: str, width: int, indent: str, first: str | None = None) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )

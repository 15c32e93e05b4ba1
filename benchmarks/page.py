"""docs/performance.md: performance.md.in with the numbers of a run in it."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from goals import goals
from machine import rdma_core, was_busy
from plots import plots
from tables import rows

INSTRUCTIONS = Path(__file__).parent / "instructions.json"
LAYERS = ("device", "libmlx5", "aiordma", "C library", "loop", "Python", "C loop")
COUNTED = {
    "C one": "C, one at a time",
    "one": "aiordma, one at a time",
    "C many": "C, 100 outstanding",
    "many": "aiordma, 100 outstanding, each awaited",
    "C batch": "C, batches of 64",
    "batch": "aiordma, batches of 64",
    "repost": "aiordma, a batch of 64 posted again",
    "fanout": "aiordma, DCIPool, 64 targets in turn over 16 streams",
    "memcpy": "aiordma, a copy by the device",
    "copy": "the same, by a DmaEngine",
    "message": "aiordma, a message: send and receive, both awaited",
    "parked, uvloop": "aiordma, one at a time without spin, uvloop",
    "parked, asyncio": "the same, asyncio",
    "parked, trio": "the same, trio",
}
BUSY = """:::{warning}
Other programs used this machine during the run. A program that polls gets no CPU when it needs one then, and the times and
ratios below say that everything runs, and hardly more. They are to be replaced by those of a run on an idle machine.
:::"""
TEMPLATE = Path(__file__).parent / "performance.md.in"
ALTS = {
    "latency": "Distribution of the time of a single write, by contender",
    "rate": "Writes a second by operations outstanding, by contender",
    "bandwidth": "Bandwidth by size of a write, by contender",
}


def table(heading: list[str], found: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(heading) + " |", "| " + " | ".join(["---"] + ["---:"] * (len(heading) - 1)) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in found])


def _machine(found: dict[str, Any]) -> str:
    about = found["machine"]
    lines = [
        ["device", f"{found['device']}: {found['nature']}"],
        ["processor", f"{about['cpu']}, {about['cpus']} CPUs"],
        ["kernel", f"Linux {about['kernel']}"],
        ["rdma-core", rdma_core(about["libibverbs"])],
        ["Python", about["python"]],
        *([name, version] for name, version in about["versions"].items()),
        ["load average at the start", f"{about['load_at_start']:.2f}"],
        *(
            [["CPUs in use before and after", f"{about['busy_at_start']:.0%}, {about['busy_at_end']:.0%}"]]
            if "busy_at_end" in about
            else []
        ),
        ["measured", f"{found['when'][:10]}, in {found['seconds']:.0f} s"],
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in lines)])


def _goals(found: dict[str, Any]) -> str:
    busy = was_busy(found["machine"])
    lines = ["| | aim | measured | best rounds | |", "| --- | --- | ---: | ---: | --- |"]
    for goal in goals(found["results"]):
        text = goal.text + (f" ({goal.detail})" if goal.detail else "")
        verdict = goal.verdict if goal.verdict != "missed" else "**missed**"
        if busy and goal.value is not None and goal.unit in ("", " ms"):
            verdict = "busy machine"
        lines.append(f"| {text} | {goal.aim} | {goal.shown(goal.value)} | {goal.shown(goal.best)} | {verdict} |")
    return "\n".join(lines)


def _workloads(found: dict[str, Any]) -> Iterator[str]:
    for name, about in found["workloads"].items():
        if not about["contenders"]:
            continue
        yield f"### {about['title']}\n"
        yield f"`{name}`, {about['rounds']} rounds." + "".join(f" {note}" for note in about["notes"]) + "\n"
        yield table(*rows(name, about, found["results"])) + "\n"


def _left_out(found: dict[str, Any]) -> str:
    why: dict[tuple[str, str], list[str]] = {}
    for name, about in found["workloads"].items():
        for kind in ("left_out", "failed"):
            for contender, reason in about[kind].items():
                text = reason if kind == "left_out" else _failure(reason)
                why.setdefault((contender, text), []).append(name)
    lines = [f"- `{contender}`: {reason} ({', '.join(names)})." for (contender, reason), names in why.items()]
    lines += [f"- `{name}`: there was no time left for it." for name in found["out_of_time"]]
    lines += [f"- `{name}`: {_failure(reason)}." for name, reason in found["failed"].items()]
    return "\n".join(lines) or "Nobody was left out in this run."


def _failure(reason: str) -> str:
    """What happened, and the last thing that the program said."""
    lines = [line.strip().rstrip(".") for line in (reason.splitlines() or ["for no reason"])]
    return "it failed: " + ", ".join(dict.fromkeys((lines[0], lines[-1])))


def _cpu(found: dict[str, Any]) -> str:
    keys, lines = found["results"], []
    names = sorted({key.split(".")[1] for key in keys if key.startswith("cpu_")})
    for name in names:
        row = [name.replace("aiordma_", "").replace("_nospin", ", no spin").replace("_spin", ", spin")]
        for workload in ("cpu_idle", "cpu_waiting"):
            for metric in ("loop_cpu_percent", "process_cpu_percent"):
                value = keys.get(f"{workload}.{name}.{metric}")
                row.append("" if value is None else f"{value:.1f}%")
        lines.append(row)
    return table(["", "idle: loop's thread", "whole process", "waiting: loop's thread", "whole process"], lines)


def _instructions() -> str:
    """What `make bench-instructions` has recorded, of the newest Python there is."""
    recorded: dict[str, dict[str, dict[str, int]]] = json.loads(INSTRUCTIONS.read_text())
    python = max(recorded, key=lambda version: [int(part) for part in version.split(".")])
    heading = ["", *LAYERS, "posting thread"]
    found = []
    for name, title in COUNTED.items():
        if name in recorded[python]:
            layers = recorded[python][name]
            numbers = [layers.get(layer, 0) for layer in LAYERS]
            found.append([title, *(f"{n:,}" for n in numbers), f"{sum(numbers) - layers['device']:,}"])
    return f"With Python {python}:\n\n" + table(heading, found)


def _values(found: dict[str, Any]) -> dict[str, str]:
    keys = found["results"]

    def number(key: str, scale: float = 1, digits: int = 0) -> str:
        return f"{keys[key] * scale:,.{digits}f}" if key in keys else "(not measured)"

    rss = next((key.removesuffix(".ops") for key in keys if key.startswith("rss.") and key.endswith(".ops")), "rss")
    return {
        "heap": number("heap.aiordma_asyncio_spin.bytes"),
        "qp_memory": number("qp_memory.aiordma_asyncio_spin.bytes", 1 / 1024),
        "rss_ops": number(f"{rss}.ops"),
        "rss_growth": number(f"{rss}.growth_bytes", 1 / 1024),
        "rss_total": number(f"{rss}.last_tenth_bytes", 1 / (1 << 20), 1),
        "import_pyverbs": number("import.aiordma.pyverbs_ms"),
        "import_both": number("import.aiordma.with_aiordma_ms"),
        "import_more": number("import.aiordma.more_ms"),
    }


def write(found: dict[str, Any], docs: Path) -> list[Path]:
    """Writes the page, its plots and the numbers; returns the files."""
    static = docs / "_static"
    static.mkdir(parents=True, exist_ok=True)
    drawn = dict(plots(found, static))
    pictures = {
        f"plot_{name}": f"```{{image}} _static/{drawn[name].name}\n:alt: {alt}\n:align: center\n```"
        if name in drawn
        else ""
        for name, alt in ALTS.items()
    }
    numbers = static / "performance.json"
    kept = {key: value for key, value in found.items() if key not in ("quantiles", "quantile_points", "rounds_ns")}
    numbers.write_text(json.dumps(kept, indent=1) + "\n")
    page = docs / "performance.md"
    text = string.Template(TEMPLATE.read_text()).substitute(
        machine=_machine(found),
        warning=BUSY if was_busy(found["machine"]) else "",
        goals=_goals(found),
        workloads="\n".join(_workloads(found)),
        left_out=_left_out(found),
        cpu=_cpu(found),
        instructions=_instructions(),
        **pictures,
        **_values(found),
    )
    page.write_text(text.rstrip() + "\n")
    return [page, numbers, *drawn.values()]

"""The pictures of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# The same numbers give the same file.
matplotlib.rcParams.update(
    {"svg.hashsalt": "aiordma", "svg.fonttype": "none", "font.size": 10, "axes.grid": True, "grid.alpha": 0.3}
)

import matplotlib.pyplot as plt  # noqa: E402  # after the choice of the backend

SIZE = (7.2, 4.2)
COLOURS = {
    "c_verbs": "#222222",
    "c_direct": "#888888",
    "pyverbs": "#b2691f",
    "pyverbs_asyncio": "#e0b070",
    "ibverbs": "#2a7f3f",
    "aiordma_asyncio_spin": "#9ecae1",
    "aiordma_uvloop_spin": "#1f5fb2",
    "aiordma_uvloop_nospin": "#7b52ab",
    "aiordma_trio_spin": "#d6336c",
}


def save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # Lines that end in blanks are no help to anybody who looks at differences.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return path


def _titles(found: dict[str, Any]) -> dict[str, str]:
    return {name: title for about in found["workloads"].values() for name, title in about["contenders"].items()}


def latency(found: dict[str, Any], path: Path) -> Path | None:
    prefix = "write_8B."
    lines = {key[len(prefix) :]: values for key, values in found["quantiles"].items() if key.startswith(prefix)}
    shown = [name for name in COLOURS if name in lines]
    if not shown:
        return None
    figure, axes = plt.subplots(figsize=SIZE)
    titles = _titles(found)
    for name in shown:
        axes.plot([ns / 1000 for ns in lines[name]], found["quantile_points"], color=COLOURS[name], label=titles[name])
    axes.set_xscale("log")
    axes.set_xlim(0.1, 1000)  # the little beyond is the scheduler's
    axes.set_xlabel("microseconds, an 8 B write awaited")
    axes.set_ylabel("share of writes that took no longer")
    axes.legend(fontsize=8)
    return save(figure, path)


def rate(found: dict[str, Any], path: Path) -> Path | None:
    points = {1: "write_8B", 16: "outstanding_16", 100: "outstanding_100", 1000: "outstanding_1000"}
    return _lines(
        found, path, points, lambda ns, _n: 1000 / ns, "operations outstanding", "million 8 B writes a second"
    )


def bandwidth(found: dict[str, Any], path: Path) -> Path | None:
    points = {8: "outstanding_16", 4096: "bandwidth_4KiB", 65536: "bandwidth_64KiB", 1 << 20: "bandwidth_1MiB"}
    return _lines(
        found, path, points, lambda ns, size: size / ns, "bytes of a write, 16 outstanding", "GB/s", log_y=True
    )


def _lines(
    found: dict[str, Any], path: Path, points: dict[int, str], value: Any, x: str, y: str, log_y: bool = False
) -> Path | None:
    keys, titles = found["results"], _titles(found)
    figure, axes = plt.subplots(figsize=SIZE)
    drawn = False
    for name, colour in COLOURS.items():
        at = [n for n, workload in points.items() if f"{workload}.{name}.ns" in keys]
        if not at:
            continue
        drawn = True
        middle = [value(keys[f"{points[n]}.{name}.ns"], n) for n in at]
        # A longer time is a lower rate.
        low = [value(keys[f"{points[n]}.{name}.ns_q3"], n) for n in at]
        high = [value(keys[f"{points[n]}.{name}.ns_q1"], n) for n in at]
        axes.plot(at, middle, marker="o", color=colour, label=titles[name])
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xticks(list(points), [f"{n:,}" for n in points])
    axes.minorticks_off()
    if log_y:
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if not drawn:
        plt.close(figure)
        return None
    axes.legend(fontsize=8)
    return save(figure, path)


def plots(found: dict[str, Any], folder: Path) -> Iterator[tuple[str, Path]]:
    """Each plot's name and file, of those that the results have the numbers for."""
    for name, draw in (("latency", latency), ("rate", rate), ("bandwidth", bandwidth)):
        path = draw(found, folder / f"performance-{name}.svg")
        if path is not None:
            yield name, path

"""What the numbers were measured on. No names of hosts, and no paths."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from typing import Any

#: What others may use of the CPUs, in a part of all, before times mean nothing.
QUIET = 0.15
PACKAGES = ("aiordma", "uvloop", "trio", "ibverbs", "ucxx-cu12", "numpy")


def machine() -> dict[str, Any]:
    cpu = ""
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        pass
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_at_start": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libibverbs": _libibverbs(),
        "versions": versions,
    }


def busy(seconds: float = 1.0) -> float:
    """What part of the CPUs' time is used, while this program does nothing."""

    def used_and_all() -> tuple[int, int]:
        with open("/proc/stat") as f:
            times = [int(word) for word in f.readline().split()[1:9]]
        return sum(times) - times[3] - times[4], sum(times)  # idle, iowait: proc(5)

    used, total = used_and_all()
    time.sleep(seconds)
    used_later, total_later = used_and_all()
    return round((used_later - used) / max(1, total_later - total), 3)


def was_busy(about: Mapping[str, Any]) -> bool:
    """Whether others used the machine before or after the measurements."""
    parts = [about[name] for name in ("busy_at_start", "busy_at_end") if name in about]
    return max(parts) > QUIET if parts else bool(about["load_at_start"] > about["cpus"])


def _libibverbs() -> str:
    """libibverbs' version has rdma-core's in it: 1.14.44.0 is that of rdma-core 44.0."""
    try:
        done = subprocess.run(["pkg-config", "--modversion", "libibverbs"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def rdma_core(libibverbs: str) -> str:
    return ".".join(libibverbs.split(".")[2:]) if libibverbs.count(".") >= 2 else libibverbs

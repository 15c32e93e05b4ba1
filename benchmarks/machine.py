"""What the numbers were measured on. No names of hosts, and no paths."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from typing import Any

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


def _libibverbs() -> str:
    """libibverbs' version has rdma-core's in it: 1.14.44.0 is that of rdma-core 44.0."""
    try:
        done = subprocess.run(["pkg-config", "--modversion", "libibverbs"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def rdma_core(libibverbs: str) -> str:
    return ".".join(libibverbs.split(".")[2:]) if libibverbs.count(".") >= 2 else libibverbs

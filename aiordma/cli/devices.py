"""``aiordma devices``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import aiordma.emulator
from aiordma.emulator._native import visible_devices
from aiordma.errors import RdmaError

__all__ = ["show"]


def show(emulated: int) -> int:
    """Print a table of devices; return the exit status."""
    try:
        if emulated:
            aiordma.emulator.attach(emulated)
        names = visible_devices()
    except RdmaError as e:
        print(f"aiordma devices: {e}", file=sys.stderr)
        return 1
    if not names:
        print(
            "There is no RDMA device. The emulated NIC needs none: see `aiordma emulate --help`.",
            file=sys.stderr,
        )
        return 1
    table = Table("device", "port", "state", "link", "firmware", "node GUID", "")
    attached = aiordma.emulator.is_attached()
    for name in names:
        folder = _sysfs() / "class/infiniband" / name
        for port in sorted(p.name for p in (folder / "ports").iterdir()) if (folder / "ports").is_dir() else ["?"]:
            table.add_row(
                name,
                port,
                _read(folder / "ports" / port / "state").partition(": ")[2].lower(),
                _read(folder / "ports" / port / "link_layer"),
                _read(folder / "fw_ver"),
                _read(folder / "node_guid"),
                "emulated" if attached else "",
            )
    Console().print(table)
    return 0


def _sysfs() -> Path:
    folder = aiordma.emulator.sysfs_path()
    return folder if folder is not None else Path(os.environ.get("SYSFS_PATH", "/sys"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""

"""The device that is measured, and how programs come to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiordma
from aiordma.cli.emulate import environment
from aiordma.emulator import EmulatorConfig
from aiordma.emulator.config import EmulatedDevice
from aiordma.emulator.sysfs import PrivateFolder

PORT = 1


class NoDevice(Exception):
    """There's no such device."""


@dataclass(frozen=True)
class Bench:
    """``device``: its verbs name. ``environment``: of programs that are to use it. ``mlx5``: whether it's that driver's."""

    device: str
    emulated: bool
    mlx5: bool
    gid_index: int
    environment: dict[str, str]

    @property
    def nature(self) -> str:
        if self.emulated:
            return "aiordma's emulated NIC: software and this machine, no hardware"
        return "an mlx5 device" if self.mlx5 else "not an mlx5 device"


def _gid_index(root: Path, device: str) -> int:
    """The port's first RoCE v2 entry; 0 where there is none."""
    types = root / "class" / "infiniband" / device / "ports" / str(PORT) / "gid_attrs" / "types"
    for path in sorted(types.glob("*"), key=lambda path: int(path.name)):
        try:
            if path.read_text().strip() == "RoCE v2":
                return int(path.name)
        except OSError:  # an empty entry
            continue
    return 0


def _without_safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The programs' own folder has a module that they share."""
    return {name: value for name, value in environment.items() if name != "PYTHONSAFEPATH"}


@contextmanager
def choose_device(wanted: str | None) -> Iterator[Bench]:
    """A verbs name, "emulated", or, for None, what AIORDMA_DEVICE says, hardware if there is any, the emulated NIC."""
    wanted = wanted or os.environ.get("AIORDMA_DEVICE") or None
    if wanted is None:
        found = aiordma.list_devices()
        wanted = found[0].name if found else "emulated"
    kind, _, name = wanted.partition(":")
    if kind == "emulated":
        name = name or "mlx5_0"
        folder = PrivateFolder()
        try:
            # What `aiordma emulate` does, once for all programs.
            env = _without_safe_path(environment(folder, EmulatorConfig(devices=(EmulatedDevice(name=name),))))
            yield Bench(name, True, True, _gid_index(folder.path, name), env)
        finally:
            folder.remove()
        return
    sysfs = Path("/sys/class/infiniband") / wanted
    if not sysfs.exists():
        raise NoDevice(f"{wanted}: there's no such RDMA device; --device emulated takes the emulated NIC")
    mlx5 = (sysfs / "device" / "driver").resolve().name == "mlx5_core"
    yield Bench(wanted, False, mlx5, _gid_index(Path("/sys"), wanted), _without_safe_path(os.environ))

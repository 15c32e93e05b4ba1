"""``aiordma doctor``: what keeps RDMA from working here, and what to do about it.

A check is a function of a :class:`~aiordma.cli.doctor.system.System` and the
:class:`~aiordma.cli.doctor.facts.Facts` gathered before, and yields findings; what it can't find out it says. Everything
that may hang or crash, loading libraries and opening devices, is done by :mod:`aiordma.cli.doctor.probe` in other processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiordma.cli.doctor.devices import (
    check_device,
    check_gid,
    check_loopback,
    check_mlx5,
    check_node,
    check_open,
    check_permission,
    check_port,
)
from aiordma.cli.doctor.facts import Facts, gather
from aiordma.cli.doctor.libraries import (
    check_aiordma,
    check_libibverbs,
    check_providers,
    check_pyverbs,
    check_rdma_cm,
)
from aiordma.cli.doctor.machine import (
    check_container,
    check_fork,
    check_huge_pages,
    check_memlock,
    check_modules,
)
from aiordma.cli.doctor.network import check_firewall, check_link
from aiordma.cli.doctor.report import Finding, Report, Status
from aiordma.cli.doctor.system import System, Unreadable

__all__ = ["CHECKS", "examine", "run"]

#: In the order of the report: what others stand on comes first. The names are headings of docs/troubleshooting.md.
CHECKS: dict[str, Callable[[System, Facts], Iterator[Finding]]] = {
    "container": check_container,
    "libibverbs": check_libibverbs,
    "pyverbs": check_pyverbs,
    "aiordma": check_aiordma,
    "kernel-modules": check_modules,
    "device": check_device,
    "device-node": check_node,
    "permission": check_permission,
    "providers": check_providers,
    "open": check_open,
    "port": check_port,
    "link": check_link,
    "gid": check_gid,
    "firewall": check_firewall,
    "memlock": check_memlock,
    "loopback": check_loopback,
    "mlx5": check_mlx5,
    "rdma-cm": check_rdma_cm,
    "fork": check_fork,
    "huge-pages": check_huge_pages,
}


def examine(system: System, facts: Facts) -> list[Finding]:
    """Runs every check."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings.extend(check(system, facts))
        except Unreadable as e:
            findings.append(Finding(name, Status.UNKNOWN, f"couldn't be found out: {e}", reason="unreadable"))
    return findings


def run(*, emulated: int, as_json: bool, strict: bool, timeout: float) -> int:
    """Examines this machine, or the emulated NIC; prints the report and returns the exit status."""
    if emulated:
        # In programs of their own, as the probes are, the emulated NIC is what `aiordma emulate` makes it.
        from aiordma.cli.emulate import environment
        from aiordma.emulator.config import EmulatorConfig
        from aiordma.emulator.sysfs import PrivateFolder

        folder = PrivateFolder()
        try:
            env = environment(folder, EmulatorConfig.of(emulated))
            system = System(sysfs=folder.path, emulated=True, environ=env, timeout=timeout)
            return _report(system, as_json, strict)
        finally:
            folder.remove()
    sysfs = os.environ.get("SYSFS_PATH")
    preloaded = "aiordma_emulator" in os.environ.get("LD_PRELOAD", "")
    return _report(System(sysfs=Path(sysfs) if sysfs else None, emulated=preloaded, timeout=timeout), as_json, strict)


def _report(system: System, as_json: bool, strict: bool) -> int:
    facts = gather(system)
    report = Report(
        examine(system, facts), system.emulated, strict, [_about(facts, device.name) for device in facts.devices]
    )
    if as_json:
        print(report.as_json())
    else:
        report.write(sys.stdout, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    return report.exit_status


def _about(facts: Facts, name: str) -> dict[str, Any]:
    """A device's capabilities as the probe found them; those that it didn't find are None."""
    result = facts.opened.get(name)
    attributes = (result.step("attributes") if result else None) or {}
    mlx5 = (result.step("mlx5") if result else None) or {}
    return {
        "name": name,
        "opens": None if result is None else result.step("opened", error=None) is not None,
        "firmware": attributes.get("firmware"),
        "ports": attributes.get("ports"),
        "atomics": attributes.get("atomics"),
        "is_mlx5": mlx5.get("supported"),
        "devx": mlx5.get("devx"),
        "umr": mlx5.get("umr"),
        "memcpy_length": mlx5.get("memcpy_length"),
        "dc": mlx5.get("dc"),
        "dci_streams": mlx5.get("dci_streams"),
    }

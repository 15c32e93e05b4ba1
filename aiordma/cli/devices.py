"""``aiordma devices``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import aiordma.emulator
from aiordma.cli._sysfs import KernelDevice, KernelPort, read_devices
from aiordma.emulator._native import visible_devices
from aiordma.errors import RdmaError

__all__ = ["show"]

SCHEMA = 1


def show(emulated: int, as_json: bool = False) -> int:
    """Print the devices; return the exit status."""
    try:
        if emulated:
            aiordma.emulator.attach(emulated)
        names = visible_devices()
    except RdmaError as e:
        print(f"aiordma devices: {e}\n`aiordma doctor` examines what is wrong.", file=sys.stderr)
        return 1
    attached = aiordma.emulator.is_attached()
    there = {device.name: device for device in read_devices(_sysfs())}
    for name in there:
        if name not in names:
            print(f"The kernel has {name}, which libibverbs doesn't list: `aiordma doctor` says why.", file=sys.stderr)
    # libibverbs knows best what can be opened; a device without files in /sys would be a surprise, but has a name.
    found = [(name, there.get(name)) for name in names]
    if as_json:
        listed = [_facts(name, device, attached) for name, device in found]
        print(json.dumps({"schema": SCHEMA, "devices": listed}, indent=2))
    elif not names:
        print(
            "There is no RDMA device: `aiordma doctor` says more. The emulated NIC needs none: see `aiordma emulate --help`.",
            file=sys.stderr,
        )
    else:
        # Lines rather than a table: a GID must neither be cut nor wrapped, however narrow the terminal.
        print("\n\n".join(_text(name, device, attached) for name, device in found))
    return 0 if names else 1


def _text(name: str, device: KernelDevice | None, emulated: bool) -> str:
    lines = [f"{name}  emulated" if emulated else name]
    if device is None:
        return lines[0]
    for what, value in (
        ("type", device.node_type),
        ("driver", device.driver or ("software" if device.is_software else "")),
        ("firmware", device.firmware),
        ("board", device.board_id),
        ("node GUID", device.node_guid),
        ("node", f"/dev/infiniband/{device.uverbs}" if device.uverbs and not emulated else ""),
    ):
        if value:
            lines.append(f"  {what:10} {value}")
    for port in device.ports:
        lines += _port_text(port, iwarp=device.is_iwarp)
    return "\n".join(lines)


def _port_text(port: KernelPort, *, iwarp: bool) -> list[str]:
    facts = filter(None, (port.state, port.link_layer, port.rate, f"LID {port.lid}" if not port.is_ethernet else ""))
    lines = [f"  port {port.number:<5} {', '.join(facts)}"]
    for gid in port.gids:
        # One line each, for grep.
        address = f"  {gid.address}" if gid.address.version == 4 else ""
        # The kernel calls the one of iWARP, which stands for no address, as those of RoCE v1.
        kind = "iWARP" if iwarp else gid.type.removeprefix("IB/")
        lines.append(f"    GID {gid.index:<3} {gid.gid}  {kind}{address}  {gid.netdev}".rstrip())
    return lines


def _facts(name: str, device: KernelDevice | None, emulated: bool) -> dict[str, Any]:
    if device is None:
        return {"name": name, "emulated": emulated, "ports": []}
    return {
        "name": name,
        "emulated": emulated,
        "node_type": device.node_type,
        "node_guid": device.node_guid,
        "firmware": device.firmware,
        "board_id": device.board_id,
        "driver": device.driver,
        "node": f"/dev/infiniband/{device.uverbs}" if device.uverbs and not emulated else None,
        "ports": [
            {
                "port": port.number,
                "state": port.state,
                "phys_state": port.phys_state,
                "link_layer": port.link_layer,
                "rate": port.rate,
                "lid": port.lid,
                "gids": [
                    {"index": g.index, "gid": g.gid, "address": str(g.address), "type": g.type, "netdev": g.netdev}
                    for g in port.gids
                ],
            }
            for port in device.ports
        ],
    }


def _sysfs() -> Path:
    folder = aiordma.emulator.sysfs_path()
    return folder if folder is not None else Path(os.environ.get("SYSFS_PATH", "/sys"))

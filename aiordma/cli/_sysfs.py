"""RDMA devices as the kernel's files below /sys describe them: no library is needed to read them, and nothing is opened.

The files are documented in the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GidEntry", "KernelDevice", "KernelPort", "read_devices"]


@dataclass(frozen=True, slots=True)
class GidEntry:
    """An entry of a port's GID table: its index, the GID in full, "IB/RoCE v1" or "RoCE v2", and the network interface."""

    index: int
    gid: str
    type: str
    netdev: str

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The GID as an address; an IPv4 address where it stands for one."""
        address = ipaddress.IPv6Address(self.gid)
        return address.ipv4_mapped or address

    @property
    def is_v2(self) -> bool:
        """Whether it's of RoCE v2."""
        return self.type == "RoCE v2"


@dataclass(frozen=True, slots=True)
class KernelPort:
    """A port. ``state`` and ``phys_state`` are words such as "active" and "linkup"."""

    number: int
    state: str
    phys_state: str
    link_layer: str
    rate: str
    lid: int
    gids: tuple[GidEntry, ...]

    @property
    def is_ethernet(self) -> bool:
        """Whether it's RoCE or iWARP rather than InfiniBand."""
        return self.link_layer == "Ethernet"

    @property
    def netdevs(self) -> list[str]:
        """Names of the network interfaces that its GIDs belong to."""
        return sorted({gid.netdev for gid in self.gids if gid.netdev})


@dataclass(frozen=True, slots=True)
class KernelDevice:
    """A device. ``driver`` is the module of its PCI function; ``uverbs`` its node's name in /dev/infiniband, if any."""

    name: str
    node_type: str
    node_guid: str
    firmware: str
    board_id: str
    driver: str
    uverbs: str | None
    uverbs_dev: str
    is_software: bool
    ports: tuple[KernelPort, ...]

    @property
    def is_iwarp(self) -> bool:
        """Whether it speaks iWARP, RDMA over TCP (RDMA_NODE_RNIC in the kernel)."""
        return self.node_type == "RNIC"


def read_devices(sysfs: Path) -> list[KernelDevice]:
    """The devices below ``sysfs``, by name. What can't be read of one is an empty word."""
    nodes = {}
    for entry in _listing(sysfs / "class/infiniband_verbs"):
        name = _read(entry / "ibdev")
        if name:
            nodes[name] = (entry.name, _read(entry / "dev"))
    return [_device(entry, *nodes.get(entry.name, (None, ""))) for entry in _listing(sysfs / "class/infiniband")]


def _device(folder: Path, uverbs: str | None, dev: str) -> KernelDevice:
    driver = folder / "device/driver"
    return KernelDevice(
        name=folder.name,
        node_type=_after_colon(_read(folder / "node_type")),
        node_guid=_read(folder / "node_guid"),
        firmware=_read(folder / "fw_ver"),
        board_id=_read(folder / "board_id"),
        driver=driver.resolve().name if driver.is_symlink() else "",
        uverbs=uverbs,
        uverbs_dev=dev,
        # rxe and siw stand on a network interface and have no device of a bus behind them.
        is_software=not (folder / "device").exists(),
        ports=tuple(_port(entry) for entry in _listing(folder / "ports") if entry.name.isdecimal()),
    )


def _port(folder: Path) -> KernelPort:
    gids = []
    for entry in _listing(folder / "gids"):
        gid = _read(entry)
        # The kernel shows an empty entry as zeros, and its type and interface as an error.
        if gid.strip("0:"):
            kind = _read(folder / "gid_attrs/types" / entry.name)
            gids.append(GidEntry(int(entry.name), gid, kind, _read(folder / "gid_attrs/ndevs" / entry.name)))
    lid = _read(folder / "lid")
    return KernelPort(
        number=int(folder.name),
        state=_after_colon(_read(folder / "state")).lower(),
        phys_state=_after_colon(_read(folder / "phys_state")).lower(),
        link_layer=_read(folder / "link_layer"),
        rate=_read(folder / "rate"),
        lid=int(lid, 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", lid) else 0,
        gids=tuple(gids),
    )


def _after_colon(text: str) -> str:
    return text.partition(":")[2].strip()


def _listing(folder: Path) -> list[Path]:
    def natural(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", path.name)]

    try:
        return sorted(folder.iterdir(), key=natural)
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

"""Checks of devices: there at all, with a node that may be used, opening, with a port and a GID, and writing."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from aiordma.cli._sysfs import KernelDevice, KernelPort
from aiordma.cli.doctor.facts import Facts, ProbeResult
from aiordma.cli.doctor.machine import container
from aiordma.cli.doctor.report import Finding, Status
from aiordma.cli.doctor.system import System, Unreadable

__all__ = [
    "check_device",
    "check_gid",
    "check_loopback",
    "check_mlx5",
    "check_node",
    "check_open",
    "check_permission",
    "check_port",
]

_NODES = "/dev/infiniband"
_MELLANOX, _NETWORK = "0x15b3", "0x02"  # PCI vendor, class of network controllers


# ---------------------------------------------------------------- is there one


def check_device(system: System, facts: Facts) -> Iterator[Finding]:
    """The kernel has an RDMA device."""
    for device in facts.devices:
        about = ", ".join(filter(None, (device.driver or ("software" if device.is_software else ""), device.board_id)))
        version = f"firmware {device.firmware}" if device.firmware else ""
        facts_of_it = ", ".join(filter(None, (about, version)))
        yield Finding(
            "device", Status.OK, f"{device.name}{f': {facts_of_it}' if facts_of_it else ''}", subject=device.name
        )
    if facts.devices:
        return
    if not system.rdma_sysfs.is_dir():
        yield Finding("device", Status.UNKNOWN, f"there is no {system.rdma_sysfs} to look in", reason="no-sysfs")
        return
    cards = list(_cards(system))
    cure = [
        *(_card_cure(driver) for _, driver in cards),
        "without hardware: `aiordma doctor --emulated` and `aiordma emulate -- PROGRAM` use the emulated NIC",
        "Soft-RoCE, over any network interface: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0",
    ]
    if container(system) is not None:
        cure.append(
            "a container sees its host's devices in /sys, unless `rdma system show` says netns exclusive on the host: then "
            "move the device, rdma dev set mlx5_0 netns NAME, or set it to shared"
        )
    seen = "; ".join(f"PCI {place}: {driver or 'no driver'}" for place, driver in cards)
    yield Finding(
        "device",
        Status.ERROR,
        "the kernel has no RDMA device" + (", though there is hardware for one" if cards else ""),
        reason="no-device",
        detail=f"{seen}." if seen else "",
        cure=tuple(dict.fromkeys(cure)),
    )


def _cards(system: System) -> Iterator[tuple[str, str]]:
    """Network functions of NVIDIA's: PCI address and driver."""
    base = "/sys/bus/pci/devices"
    for place in system.listing(base) or ():
        vendor, kind = (system.read(f"{base}/{place}/{name}") or "" for name in ("vendor", "class"))
        if vendor.strip() == _MELLANOX and kind.startswith(_NETWORK):
            link = system.path(f"{base}/{place}/driver")
            yield place, os.path.basename(os.readlink(link)) if link.is_symlink() else ""


def _card_cure(driver: str) -> str:
    if driver == "mlx5_core":
        return "modprobe mlx5_ib"
    if driver in ("vfio-pci", "pci-stub"):
        return f"{driver} holds it for a virtual machine or for user space: give it back to mlx5_core"
    return "modprobe mlx5_core mlx5_ib" if not driver else f"{driver} drives it, which isn't mlx5_core"


# ---------------------------------------------------------------- its node


def check_node(system: System, facts: Facts) -> Iterator[Finding]:
    """Each device has its node in /dev/infiniband."""
    if system.emulated:
        return
    for device in facts.devices:
        if device.uverbs is None:
            yield Finding(
                "device-node",
                Status.ERROR,
                f"{device.name} has no uverbs interface",
                reason="no-uverbs",
                subject=device.name,
                cure=("modprobe ib_uverbs",),
            )
            continue
        node = f"{_NODES}/{device.uverbs}"
        try:
            found = os.stat(system.path(node))
        except (FileNotFoundError, NotADirectoryError):
            yield _no_node(system, device, node)
            continue
        except OSError as e:
            yield Finding(
                "device-node", Status.UNKNOWN, f"{node}: {e.strerror}", reason="unreadable", subject=device.name
            )
            continue
        wrong = _wrong_node(found, device.uverbs_dev)
        if wrong:
            yield Finding(
                "device-node",
                Status.ERROR,
                f"{node} {wrong}",
                reason="wrong-node",
                subject=device.name,
                cure=(f"remove it, then: udevadm trigger --action=add /sys/class/infiniband_verbs/{device.uverbs}",),
            )
        else:
            yield Finding("device-node", Status.OK, f"{device.name} is {node}", subject=device.name)


def _no_node(system: System, device: KernelDevice, node: str) -> Finding:
    cure = [f"udevadm trigger --action=add /sys/class/infiniband_verbs/{device.uverbs}"]
    major, _, minor = device.uverbs_dev.partition(":")
    if minor:
        cure.append(f"where there is no udev: mkdir -p {_NODES}; mknod -m 666 {node} c {major} {minor}")
    if container(system) is not None:
        cure.insert(
            0,
            f"docker run --device={node} --device={_NODES}/rdma_cm --cap-add=IPC_LOCK --ulimit memlock=-1 ... "
            "(podman alike; kubernetes: a device plugin)",
        )
    names = system.listing(_NODES)
    there = "there is no /dev/infiniband" if names is None else f"in {_NODES}: {', '.join(names) or 'nothing'}"
    return Finding(
        "device-node",
        Status.ERROR,
        f"the kernel has {device.name}, but there is no {node}",
        reason="no-node",
        subject=device.name,
        detail=f"{there[0].upper()}{there[1:]}.",
        cure=tuple(cure),
    )


def _wrong_node(found: os.stat_result, wanted: str) -> str:
    if not stat.S_ISCHR(found.st_mode):
        return "is no character device"
    dev = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return f"is device {dev}, and the kernel's is {wanted}" if wanted and dev != wanted else ""


def check_permission(system: System, facts: Facts) -> Iterator[Finding]:
    """This process may read and write each device's node."""
    if system.emulated:
        return
    for device in facts.devices:
        if device.uverbs is None:
            continue
        node = f"{_NODES}/{device.uverbs}"
        try:
            if not system.exists(node):
                continue
        except Unreadable as e:
            yield Finding(
                "permission",
                Status.ERROR,
                f"user {system.uid} can't look into {_NODES}: {e}",
                reason="no-permission",
                subject=device.name,
                cure=(f"chmod 755 {_NODES}",),
            )
            continue
        if system.may_use(node):
            yield Finding("permission", Status.OK, f"{node} may be read and written", subject=device.name)
        else:
            yield _no_permission(system, device, node)


def _no_permission(system: System, device: KernelDevice, node: str) -> Finding:
    found = os.stat(system.path(node))
    detail = f"It belongs to user {found.st_uid}, group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}."
    kind = container(system)
    if system.uid == 0 or _mode_allows_all(found):
        # Its mode isn't what forbids it.
        cure = [f"docker run --device={node} ... rather than a bind mount of {_NODES}: that also allows its use"]
        detail += " That isn't what forbids it: a container's device rules (cgroups) or a security module are."
        reason = "cgroup"
    else:
        reason = "no-permission"
        cure = [f'chmod 666 {node}: that is the usual mode (udev\'s rule: KERNEL=="uverbs*", MODE="0666")']
        if found.st_gid != 0 and found.st_mode & stat.S_IRGRP and found.st_mode & stat.S_IWGRP:
            cure.insert(0, f"join its group: usermod -aG {found.st_gid} USER, then log in again")
        if kind is not None:
            cure.append("in a container the mode is that of the host's node")
    return Finding(
        "permission",
        Status.ERROR,
        f"user {system.uid} may not read and write {node}",
        reason=reason,
        subject=device.name,
        detail=detail,
        cure=tuple(cure),
    )


def _mode_allows_all(found: os.stat_result) -> bool:
    return stat.S_IMODE(found.st_mode) & 0o006 == 0o006


# ---------------------------------------------------------------- does it open


def check_open(system: System, facts: Facts) -> Iterator[Finding]:
    """Each device opens and answers, in a process that may be given up."""
    for name, result in facts.opened.items():
        opened = result.step("opened")
        queried = result.step("queried")
        if result.step("opening") is None:
            yield Finding(
                "open",
                Status.UNKNOWN,
                f"{name}: the program that was to open it didn't come so far: {result.ended or 'no reason given'}",
                reason="probe-failed",
                subject=name,
                detail=result.stderr.strip()[-1000:],
            )
        elif opened is None or (result.ended and result.step("mlx5") is None):
            yield _stuck("open", name, result)
        elif opened["error"] is not None:
            yield Finding(
                "open",
                Status.ERROR,
                f"{name} can't be opened: {opened['error']}",
                reason=errno.errorcode.get(opened["errno"] or 0, "failed"),
                subject=name,
                detail=result.stderr.strip(),
                cure=_open_cures(opened["errno"]),
            )
        elif queried is not None:
            yield Finding(
                "open",
                Status.ERROR,
                f"{name} opens, but can't be asked: {queried['error']}",
                reason=errno.errorcode.get(queried["errno"] or 0, "failed"),
                subject=name,
                detail=result.stderr.strip(),
                cure=_open_cures(queried["errno"]),
            )
        else:
            yield Finding("open", Status.OK, f"{name} opens and answers", subject=name)


def _open_cures(code: int | None) -> tuple[str, ...]:
    if code in (errno.EACCES, errno.EPERM):
        return ("see permission above", "in a container: --cap-add=IPC_LOCK, and the device with --device")
    if code == errno.ENOMEM:
        return ("see memlock below",)
    if code in (errno.ENODEV, errno.EIO, errno.ENXIO):
        return ("the device went away or is being reset: look at dmesg, then reload its driver",)
    return ("look at dmesg",)


def _stuck(check: str, name: str, result: ProbeResult) -> Finding:
    """A probe that didn't come to its end."""
    hung = "said nothing" in result.ended
    return Finding(
        check,
        Status.ERROR,
        f"{name}: the attempt got no further than {result.last!r}: {result.ended or 'no reason given'}",
        reason="no-answer" if hung else "crash",
        subject=name,
        detail=result.stderr.strip()[-1000:],
        cure=("look at dmesg; a device that doesn't answer wants its driver reloaded, or a reboot",)
        if hung
        else ("a provider that crashes is of the wrong version or at fault: see providers and pyverbs",),
    )


# ---------------------------------------------------------------- ports


def _usable_ports(facts: Facts) -> list[tuple[KernelDevice, KernelPort]]:
    return [(device, port) for device, port in facts.ports() if port.state == "active"]


def check_port(system: System, facts: Facts) -> Iterator[Finding]:
    """A port is active. Others that aren't only deserve a warning."""
    usable = _usable_ports(facts)
    for device, port in facts.ports():
        where = f"{device.name} port {port.number}"
        if port.state == "active":
            probe = facts.opened.get(device.name)
            step = probe.step("port", port=port.number) if probe is not None else None
            mtu = f", MTU {step['active_mtu']}" if step is not None else ""
            summary = f"{where} is active, {port.link_layer}{f', {port.rate}' if port.rate else ''}{mtu}"
            yield Finding("port", Status.OK, summary, subject=where)
            continue
        if not port.state:
            yield Finding(
                "port", Status.UNKNOWN, f"{where}: its state can't be read", reason="unreadable", subject=where
            )
            continue
        physical = f", physically {port.phys_state}" if port.phys_state else ""
        yield Finding(
            "port",
            Status.WARNING if usable else Status.ERROR,
            f"{where} is {port.state}{physical}",
            reason="not-active",
            subject=where,
            cure=_port_cures(port),
        )


def _port_cures(port: KernelPort) -> tuple[str, ...]:
    if not port.is_ethernet:
        if port.state in ("init", "armed"):
            return ("InfiniBand needs a subnet manager: on a switch, or `opensm` on a host of the fabric",)
        return ("look at the cable and at the switch's port; ibstat shows what the port negotiates",)
    interface = port.netdevs[0] if port.netdevs else "INTERFACE"
    return (f"ip link set {interface} up", "look at the cable and at the switch's port")


def check_gid(system: System, facts: Facts) -> Iterator[Finding]:
    """Each active RoCE port has a GID of RoCE v2 that is routed: without it, peers are limited or unreachable."""
    for device, port in _usable_ports(facts):
        if device.is_iwarp:
            yield Finding(
                "gid",
                Status.INFO,
                f"{device.name} port {port.number} is iWARP's: its GID is no address, and connections are made by rdma_cm",
                reason="iwarp",
                subject=f"{device.name} port {port.number}",
            )
    active = [(d, p) for d, p in _usable_ports(facts) if p.is_ethernet and not d.is_iwarp]
    any_v2 = any(gid.is_v2 for _, port in active for gid in port.gids)
    for device, port in active:
        where = f"{device.name} port {port.number}"
        interface = port.netdevs[0] if port.netdevs else "INTERFACE"
        v2 = [gid for gid in port.gids if gid.is_v2]
        routed = [gid for gid in v2 if not gid.address.is_link_local]
        bad = Status.WARNING if any_v2 else Status.ERROR
        if routed:
            first = next((gid for gid in routed if gid.address.version == 4), routed[0])
            text = f"{where}: {first.address} (RoCE v2, index {first.index})"
            yield Finding("gid", Status.OK, text, subject=where)
        elif v2:
            yield Finding(
                "gid",
                Status.WARNING,
                f"{where} has only link-local GIDs of RoCE v2: they reach one link, not through routers",
                reason="link-local",
                subject=where,
                cure=(f"give the interface an address: ip address add 192.0.2.1/24 dev {interface}",),
            )
        elif port.gids:
            yield Finding(
                "gid",
                bad,
                f"{where} has GIDs of RoCE v1 only: no routers, and peers with RoCE v2 aren't reached",
                reason="no-v2",
                subject=where,
                detail="; ".join(f"{gid.index}: {gid.address} ({gid.type})" for gid in port.gids),
                cure=("use a device, driver and firmware with RoCE v2: ConnectX-4 and later have it",),
            )
        else:
            yield Finding(
                "gid",
                bad,
                f"{where} has no GID",
                reason="no-gid",
                subject=where,
                cure=(
                    f"set its interface up and give it an address: ip link set {interface} up; "
                    f"ip address add 192.0.2.1/24 dev {interface}",
                ),
            )


# ---------------------------------------------------------------- does it work


def check_loopback(system: System, facts: Facts) -> Iterator[Finding]:
    """A write from a QP of the port to another QP of it arrives."""
    for name, result in facts.opened.items():
        for begun in result.all("loopback"):
            yield _loopback(name, begun["port"], result)


def _loopback(name: str, port: int, result: ProbeResult) -> Finding:
    where = f"{name} port {port}"
    written = result.step("written", port=port)
    if written is None:
        return _stuck("loopback", where, result)
    if written["error"] is None:
        return Finding("loopback", Status.OK, f"{where}: an RDMA write to itself arrives", subject=where)
    code = written.get("errno")
    cures = ["see port, gid and link"]
    if code == errno.ENOMEM:
        cures = ["see memlock"]
    elif written.get("kind") == "RetryExceededError":
        cures.append("look at the firewall for UDP port 4791; Soft-RoCE passes through it")
    return Finding(
        "loopback",
        Status.ERROR,
        f"{where}: an RDMA write to itself failed: {written['error']}",
        reason=errno.errorcode.get(code or 0, str(written.get("kind", "failed"))),
        subject=where,
        cure=tuple(cures),
    )


def check_mlx5(system: System, facts: Facts) -> Iterator[Finding]:
    """Which of mlx5's own features each device has."""
    for name, result in facts.opened.items():
        step = result.step("mlx5")
        if step is None:
            if result.step("opened", error=None) is not None:
                yield Finding(
                    "mlx5", Status.UNKNOWN, f"{name}: {result.ended or 'no answer'}", reason="no-answer", subject=name
                )
        elif not step["supported"]:
            yield Finding(
                "mlx5", Status.INFO, f"{name} isn't an mlx5 device: aiordma.mlx5 doesn't work on it", "not-mlx5", name
            )
        elif step.get("error"):
            yield Finding("mlx5", Status.UNKNOWN, f"{name}: {step['error']}", reason="failed", subject=name)
        elif not step["devx"]:
            yield Finding(
                "mlx5",
                Status.WARNING,
                f"{name} opens without DEVX, so nothing of aiordma.mlx5 works",
                reason="no-devx",
                subject=name,
                detail="The kernel gives DEVX to mlx5 devices since 4.19, to processes with CAP_NET_RAW; the firmware must "
                "have it (UCTX_EN).",
                cure=("in a container: --cap-add=NET_RAW", "mlxconfig -d DEVICE set UCTX_EN=1, then reset the device"),
            )
        else:
            yield Finding("mlx5", Status.INFO, f"{name} has {_features(step)}", subject=name)


def _features(step: Mapping[str, Any]) -> str:
    has: list[str] = ["DEVX"]
    lacks: list[str] = []
    (has if step["umr"] else lacks).append("UMR")
    if step["memcpy_length"]:
        has.append(f"DMA memcpy up to {step['memcpy_length']} bytes")
    else:
        lacks.append("DMA memcpy")
    (has if step["dc"] else lacks).append("DC")
    if step["dci_streams"]:
        has.append(f"up to {step['dci_streams']} streams a DCI")
    else:
        lacks.append("DCI streams")
    return ", ".join(has) + (f"; it lacks {', '.join(lacks)}" if lacks else "")

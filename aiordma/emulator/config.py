"""What the emulated NIC is like: devices, ports, GIDs, limits.

Everything here is a frozen dataclass with sensible defaults; :meth:`EmulatorConfig.text` is the text that the emulator's
library reads (see ``src/config.c``, which is also what checks it).
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aiordma.emulator._fault_text import rule_of_words

__all__ = ["DeviceSpec", "EmulatedDevice", "EmulatedPort", "EmulatorConfig", "Gid", "Limits"]

MAX_DEVICES = 16
MAX_PORTS = 2

PortState: TypeAlias = Literal["active", "armed", "init", "down"]
Mtu: TypeAlias = Literal[256, 512, 1024, 2048, 4096]


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table. An IPv4 address stands for its IPv4-mapped IPv6 address."""

    address: str
    #: RoCE version: ``"v1"`` (Ethernet) or ``"v2"`` (UDP).
    type: Literal["v1", "v2"] = "v2"
    #: The network device that the entry belongs to, by name.
    netdev: str = "lo"

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", _ipv6(self.address).compressed)
        if self.type not in ("v1", "v2"):
            raise ValueError(f'a GID\'s type is "v1" or "v2", not {self.type!r}')

    @property
    def sysfs(self) -> str:
        """The address as the kernel prints it: all eight groups, with their leading zeros."""
        # Not `exploded`: from Python 3.13 on an IPv4-mapped address has its last two groups as four decimals there.
        return ipaddress.IPv6Address(self.address).packed.hex(":", 2)


def _ipv6(text: str) -> ipaddress.IPv6Address:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return ipaddress.IPv6Address(f"::ffff:{address}")
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a device; ``None`` leaves the emulator's own, which is that of a ConnectX-6 Dx.

    What exceeds one fails with the errno that the kernel gives for it.
    """

    max_qp: int | None = None
    max_qp_wr: int | None = None
    max_sge: int | None = None
    max_sge_rd: int | None = None
    max_inline: int | None = None
    max_cq: int | None = None
    max_cqe: int | None = None
    max_mr: int | None = None
    max_pd: int | None = None
    max_mw: int | None = None
    max_ah: int | None = None
    max_srq: int | None = None
    max_srq_wr: int | None = None
    max_srq_sge: int | None = None
    #: Most RDMA READs and atomics that a QP serves at a time.
    max_qp_rd_atom: int | None = None
    #: Most that it has outstanding itself.
    max_qp_init_rd_atom: int | None = None
    max_msg_sz: int | None = None
    max_mr_size: int | None = None
    comp_vectors: int | None = None
    #: Longest DMA memcpy in bytes; 0: the device has none.
    max_wr_memcpy_length: int | None = None
    #: Most device memory in one piece, in bytes; 0: the device has none.
    max_dm_size: int | None = None
    atomics: bool | None = None
    #: False: no DEVX, as on a device or kernel without it. libmlx5 then doesn't learn of what it asks by DEVX either.
    devx: bool | None = None
    #: False: no memory keys that work requests change (UMR).
    umr: bool | None = None
    #: Dynamically connected transport.
    dc: bool | None = None
    #: Streams of a DCI, as a power of two; 0: DCIs have no streams.
    log_max_dci_streams: int | None = None
    #: Extended reliable connections.
    xrc: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPort:
    """A RoCE port."""

    state: PortState = "active"
    mtu: Mtu = 4096
    max_mtu: Mtu = 4096
    #: ``None`` is an empty entry. The default table has the link-local address as RoCE v1 and v2, then an IPv4 address
    #: as v1 and v2.
    gids: tuple[Gid | None, ...] | None = None
    #: Entries of the GID table; those beyond ``gids`` are empty.
    gid_table_size: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """A device."""

    name: str
    #: Node GUID; by default made of the device's place in the configuration.
    guid: int | None = None
    ports: tuple[EmulatedPort, ...] = (EmulatedPort(),)
    limits: Limits = field(default_factory=Limits)


#: A count of devices, or each one, by name alone or whole.
DeviceSpec: TypeAlias = int | Iterable[str | EmulatedDevice]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorConfig:
    """All that the emulator can be told.

    GUIDs and GID tables that were left out are filled in, so that two equal configurations compare equal.
    """

    devices: tuple[EmulatedDevice, ...]
    #: How long the device thread goes on polling after the last work, before it sleeps.
    spin_us: int = 50
    #: Behave as a kernel before 4.20: commands by write() only. For tests of that path.
    legacy_write: bool = False
    #: Let a doorbell wake the sleeping device thread by page protection, where the kernel allows it.
    use_uffd: bool = True
    #: The devices of this user's other processes on this machine are on the same network.
    reach: Literal["host", "process"] = "host"
    #: How long the connection manager (librdmacm) waits for an answer, 4.096 us times two to this, before it asks again;
    #: the default is the kernel's: 4.3 s.
    cm_response_timeout: int = 20
    #: How often it asks again, before it says that the other side is unreachable; the default is the kernel's.
    cm_retries: int = 15
    #: Long payload between processes is read where it lies, in the other process's memory, if the system allows it.
    one_copy: bool = True
    #: Faults on purpose, in force from the start, as text: what ``aiordma emulate --fault`` takes.
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        devices = tuple(_complete(device, index) for index, device in enumerate(self.devices))
        object.__setattr__(self, "devices", devices)
        for fault in self.faults:
            rule_of_words(fault)  # says what is wrong with it
        if self.reach not in ("host", "process"):
            raise ValueError(f'the network reaches the "host" or the "process", not {self.reach!r}')
        if not 1 <= len(devices) <= MAX_DEVICES:
            raise ValueError(f"there can be 1 to {MAX_DEVICES} devices, not {len(devices)}")
        for device in devices:
            if not 1 <= len(device.ports) <= MAX_PORTS:
                raise ValueError(f"{device.name}: a device has 1 to {MAX_PORTS} ports, not {len(device.ports)}")

    @classmethod
    def of(
        cls,
        devices: DeviceSpec = 1,
        *,
        spin_us: int = 50,
        legacy_write: bool = False,
        use_uffd: bool = True,
        reach: Literal["host", "process"] = "host",
        one_copy: bool = True,
        cm_response_timeout: int = 20,
        cm_retries: int = 15,
    ) -> EmulatorConfig:
        """Build a configuration from what :func:`aiordma.emulator.attach` takes.

        A count gives devices named mlx5_0, mlx5_1 and so on; a name gives one with every default.
        """
        if isinstance(devices, int):
            devices = [f"mlx5_{i}" for i in range(devices)]
        elif isinstance(devices, str):
            devices = [devices]
        whole = tuple(EmulatedDevice(name=d) if isinstance(d, str) else d for d in devices)
        return cls(
            devices=whole,
            spin_us=spin_us,
            legacy_write=legacy_write,
            use_uffd=use_uffd,
            reach=reach,
            one_copy=one_copy,
            cm_response_timeout=cm_response_timeout,
            cm_retries=cm_retries,
        )

    def text(self) -> str:
        """Return the configuration in the emulator's own language, one directive a line."""
        lines = [
            f"spin_us {self.spin_us}",
            f"legacy_write {self.legacy_write:d}",
            f"use_uffd {self.use_uffd:d}",
            f"reach_host {self.reach == 'host':d}",
            f"one_copy {self.one_copy:d}",
            f"cm_response_timeout {self.cm_response_timeout}",
            f"cm_retries {self.cm_retries}",
        ]
        for device in self.devices:
            lines.append(f"device {device.name} {device.guid:016x}")
            for limit in dataclasses.fields(device.limits):
                value = getattr(device.limits, limit.name)
                if value is not None:
                    lines.append(f"limit {limit.name} {int(value)}")
            for number, port in enumerate(device.ports, 1):
                lines.append(
                    f"port {number} state {port.state} mtu {port.mtu} max_mtu {port.max_mtu} gids {port.gid_table_size}"
                )
                for index, gid in enumerate(port.gids or ()):
                    if gid is not None:
                        lines.append(f"gid {number} {index} {gid.address} {gid.type} {gid.netdev}")
        lines += [f"fault {rule_of_words(fault)}" for fault in self.faults]
        return "\n".join(lines) + "\n"


def _complete(device: EmulatedDevice, index: int) -> EmulatedDevice:
    """Fill in what is left out."""
    # A modified EUI-64 of the locally administered MAC 02:00:5c:00:00:NN (RFC 4291, appendix A).
    guid = device.guid if device.guid is not None else 0x0000_5CFF_FE00_0001 + index * MAX_PORTS
    ports = tuple(
        port
        if port.gids is not None
        else dataclasses.replace(port, gids=_default_gids(guid + number, index * MAX_PORTS + number + 1))
        for number, port in enumerate(device.ports)
    )
    return dataclasses.replace(device, guid=guid, ports=ports)


def _default_gids(interface_id: int, host: int) -> tuple[Gid, ...]:
    link_local = str(ipaddress.IPv6Address((0xFE80 << 112) | interface_id))
    address = f"192.0.2.{host}"  # a range that is nobody's: RFC 5737
    return (Gid(link_local, "v1"), Gid(link_local, "v2"), Gid(address, "v1"), Gid(address, "v2"))

"""The part of /sys that libibverbs finds devices by, in a folder of its own.

libibverbs takes the place of /sys from the environment variable SYSFS_PATH. What it and its providers read there is in
rdma-core's libibverbs/init.c, sysfs.c and cmd_device.c.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from aiordma.emulator.config import EmulatedDevice, EmulatedPort, EmulatorConfig

__all__ = ["PrivateFolder", "clear_tree", "write_tree"]

_PREFIX = "aiordma-sysfs-"
_LOCK = ".lock"
#: A folder of that age with no lock file was left by a process that died within the two calls that make both.
_ABANDONED_SECONDS = 3600

#: IB_UVERBS_MAJOR and IB_UVERBS_BASE_MINOR of the kernel; src/hooks.c gives the node's descriptor the same numbers.
_MAJOR, _BASE_MINOR = 231, 192
#: Of the connection manager's node, which librdmacm looks for: src/control.h has the same.
_CM_MAJOR, _CM_MINOR = 10, 58

_STATES = {"down": "1: DOWN", "init": "2: INIT", "armed": "3: ARMED", "active": "4: ACTIVE"}
_GID_TYPES = {"v1": "IB/RoCE v1", "v2": "RoCE v2"}


class PrivateFolder:
    """A temporary folder of this process, removed when it ends.

    A process that is killed leaves its folder behind; the next one removes it. Whether the owner lives is told by a lock
    on a file in it, which works across containers and re-used process ids too.
    """

    def __init__(self) -> None:
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._owner = os.getpid()
        atexit.register(self.remove)

    def remove(self) -> None:
        """Remove it. In a forked child this does nothing: the folder is the parent's."""
        if os.getpid() != self._owner or self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        atexit.unregister(self.remove)


def remove_stale() -> None:
    """Remove the folders of processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if _is_stale(folder):
                shutil.rmtree(folder)


def _is_stale(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def write_tree(root: Path, config: EmulatorConfig) -> None:
    """Write the tree for a configuration, in place of one that was there before."""
    clear_tree(root)
    _put(root / "class/infiniband_verbs/abi_version", "6")
    _put(root / "class/misc/rdma_cm/abi_version", "4")
    _put(root / "class/misc/rdma_cm/dev", f"{_CM_MAJOR}:{_CM_MINOR}")
    for index, device in enumerate(config.devices):
        uverbs = root / "class/infiniband_verbs" / f"uverbs{index}"
        _put(uverbs / "ibdev", device.name)
        _put(uverbs / "dev", f"{_MAJOR}:{_BASE_MINOR + index}")
        _put(uverbs / "abi_version", "1")
        _write_device(root / "class/infiniband" / device.name, device, index)


def clear_tree(root: Path) -> None:
    """Leave a tree with no device in it."""
    shutil.rmtree(root / "class", ignore_errors=True)
    (root / "class/infiniband_verbs").mkdir(parents=True)


def _write_device(folder: Path, device: EmulatedDevice, index: int) -> None:
    assert device.guid is not None  # EmulatorConfig has filled it in
    guid = f"{device.guid:016x}"
    guid = ":".join(guid[i : i + 4] for i in range(0, 16, 4))
    for name, value in {
        "node_type": "1: CA",
        "node_desc": f"aiordma emulated {device.name}",
        "node_guid": guid,
        "sys_image_guid": guid,
        "fw_ver": "22.39.1002",
        "hca_type": "MT4125",
        "hw_rev": "0",
        "board_id": "AIORDMA_EMULATED",
        # libibverbs chooses libmlx5 by this: PCI vendor and device of a ConnectX-6 Dx.
        "device/modalias": "pci:v000015B3d0000101Dsv000015B3sd00000016bc02sc00i00",
        "device/vendor": "0x15b3",
        "device/device": "0x101d",
        "device/subsystem_vendor": "0x15b3",
        "device/subsystem_device": "0x0016",
        "device/numa_node": "-1",
    }.items():
        _put(folder / name, value)
    _put(folder / "device/infiniband_verbs" / f"uverbs{index}" / "abi_version", "1")
    for netdev in {gid.netdev for port in device.ports for gid in port.gids or () if gid is not None}:
        (folder / "device/net" / netdev).mkdir(parents=True)
    for number, port in enumerate(device.ports, 1):
        _write_port(folder / "ports" / str(number), port)


def _write_port(folder: Path, port: EmulatedPort) -> None:
    for name, value in {
        "state": _STATES[port.state],
        "phys_state": "5: LinkUp" if port.state == "active" else "3: Disabled",
        "link_layer": "Ethernet",
        "rate": "100 Gb/sec (4X EDR)",
        "lid": "0x0",
        "lid_mask_count": "0",
        "sm_lid": "0x0",
        "sm_sl": "0",
        "cap_mask": "0x04010000",
        "pkeys/0": "0xffff",
    }.items():
        _put(folder / name, value)
    for directory in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / directory).mkdir(parents=True, exist_ok=True)
    gids = port.gids or ()
    for index in range(port.gid_table_size):
        gid = gids[index] if index < len(gids) else None
        if gid is None:
            # The kernel shows zeros, and reading the entry's type gives EINVAL there, which libibverbs takes for v1. A
            # plain file can't do that, but it can say v1.
            _put(folder / f"gids/{index}", "0000:0000:0000:0000:0000:0000:0000:0000")
            _put(folder / f"gid_attrs/types/{index}", _GID_TYPES["v1"])
            continue
        _put(folder / f"gids/{index}", gid.sysfs)
        _put(folder / f"gid_attrs/types/{index}", _GID_TYPES[gid.type])
        _put(folder / f"gid_attrs/ndevs/{index}", gid.netdev)


def _put(path: Path, value: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value + "\n", encoding="ascii")

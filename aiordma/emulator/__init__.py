"""The emulated ConnectX NIC.

:func:`attach` puts it under the libibverbs of this process: from then on every verbs user in it, aiordma, pyverbs or C
code, finds the emulated devices and no others. ``aiordma emulate -- program`` does the same for any dynamically linked
program.

    >>> import aiordma.emulator
    >>> aiordma.emulator.attach(devices=2)
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Literal

from aiordma.emulator import _native
from aiordma.emulator._native import EmulatorError
from aiordma.emulator.config import DeviceSpec, EmulatedDevice, EmulatedPort, EmulatorConfig, Gid, Limits
from aiordma.emulator.sysfs import PrivateFolder, clear_tree, write_tree

__all__ = [
    "EmulatedDevice",
    "EmulatedPort",
    "EmulatorConfig",
    "EmulatorError",
    "Gid",
    "Limits",
    "attach",
    "connection_counts",
    "current_config",
    "detach",
    "is_attached",
    "object_counts",
    "sysfs_path",
]

_CONFIG_VARIABLE = "AIORDMA_EMULATOR_CONFIG"
_SYSFS_VARIABLE = "SYSFS_PATH"

_lock = threading.RLock()
_config: EmulatorConfig | None = None
_folder: PrivateFolder | None = None


def attach(
    devices: DeviceSpec | EmulatorConfig | None = None,
    *,
    spin_us: int = 50,
    legacy_write: bool = False,
    use_uffd: bool = True,
    reach: Literal["host", "process"] = "host",
    one_copy: bool = True,
    cm_response_timeout: int = 20,
    cm_retries: int = 15,
) -> None:
    """Put the emulated NIC under this process's libibverbs.

    :param devices: how many devices, or their names, or :class:`EmulatedDevice` objects; or a whole
        :class:`EmulatorConfig`, which the other parameters then don't add to. By default whatever is attached already,
        or else one device, mlx5_0.
    :param spin_us: how long the device thread goes on polling after the last work, before it sleeps
    :param legacy_write: behave as a kernel older than 4.20
    :param use_uffd: let doorbells wake the device thread by page protection
    :param reach: with which devices those of this process share a network: those of all this user's processes on the
        machine (``"host"``), or only its own (``"process"``)
    :param one_copy: read long payload from other processes' memory directly, where the system allows it

    :param cm_response_timeout: how long librdmacm's connection manager waits for an answer: 4.096 microseconds times two
        to this, 8 to 31; the default is the kernel's, 4.3 seconds
    :param cm_retries: how often it asks again, up to 15, before it gives up

    Attaching again with the same configuration does nothing; with another one it replaces the devices, unless one is
    open. In a program started by ``aiordma emulate`` the NIC is there already.

    :raises EmulatorError: another configuration is in use; the configuration is wrong; or libibverbs was used before and
        has settled on the real /sys. The message names the cure.
    :raises ProviderError: libibverbs or libmlx5 isn't installed
    """
    global _config
    with _lock:
        if _native.native().preloaded():
            _join_preloaded(devices)
            return
        if devices is None:
            if _config is not None:
                return
            devices = 1
        if not isinstance(devices, EmulatorConfig):
            devices = EmulatorConfig.of(
                devices,
                spin_us=spin_us,
                legacy_write=legacy_write,
                use_uffd=use_uffd,
                reach=reach,
                one_copy=one_copy,
                cm_response_timeout=cm_response_timeout,
                cm_retries=cm_retries,
            )
        if devices == _config:
            return
        _attach(devices)
        _config = devices


def _attach(config: EmulatorConfig) -> None:
    global _folder
    native = _native.native()
    if native.open_contexts():
        raise EmulatorError(
            "the emulated NIC is attached with another configuration, and a device is open: close every context first, or "
            "attach with the same configuration"
        )
    _native.libibverbs()
    native.configure(config.text())
    if _folder is None:
        _folder = PrivateFolder()
    write_tree(_folder.path, config)
    # Through os.environ, which also calls setenv() for the C library. libibverbs reads the variable once, when it's first
    # used, which is in _check_visible() at the latest; a program started from here must not inherit it.
    previous = os.environ.get(_SYSFS_VARIABLE)
    os.environ[_SYSFS_VARIABLE] = os.fspath(_folder.path)
    try:
        native.attach()
        _check_visible(config)
    except BaseException:
        native.detach()
        raise
    finally:
        if previous is None:
            del os.environ[_SYSFS_VARIABLE]
        else:
            os.environ[_SYSFS_VARIABLE] = previous


def _check_visible(config: EmulatorConfig) -> None:
    wanted = {device.name for device in config.devices}
    visible = set(_native.visible_devices())
    if visible == wanted:
        return
    raise EmulatorError(
        f"libibverbs sees {', '.join(sorted(visible)) or 'no device'} instead of {', '.join(sorted(wanted))}: it was used "
        "in this process before the emulated NIC was attached, and looks for devices where it did then. Call "
        "aiordma.emulator.attach() before anything lists or opens RDMA devices (importing pyverbs or torch is fine), or "
        "start the program with: aiordma emulate -- python ..."
    )


def _join_preloaded(devices: DeviceSpec | EmulatorConfig | None) -> None:
    """In a program that `aiordma emulate` started: nothing to do, if nothing else was asked for."""
    if not _native.native().configured():
        raise EmulatorError(
            f"the emulator is preloaded, but {_CONFIG_VARIABLE} names no usable configuration: `aiordma emulate` sets both"
        )
    if devices is None:
        return
    if not isinstance(devices, EmulatorConfig):
        devices = EmulatorConfig.of(devices)
    wanted = sorted(device.name for device in devices.devices)
    visible = sorted(_native.visible_devices())
    if wanted != visible:
        raise EmulatorError(
            f"this program runs under `aiordma emulate` with {', '.join(visible)}, and asks for {', '.join(wanted)}: give "
            "`aiordma emulate` the same devices, or start the program without it"
        )


def detach() -> None:
    """Take the emulated NIC away again: this process's libraries call the kernel as before.

    Does nothing if it isn't attached. libibverbs goes on looking for devices in an empty folder instead of /sys.

    :raises EmulatorError: a device is open
    """
    global _config
    with _lock:
        if _config is None:
            return
        if not _native.native().detach():
            raise EmulatorError("a device of the emulated NIC is open: close every context first")
        assert _folder is not None
        clear_tree(_folder.path)
        _config = None


def is_attached() -> bool:
    """Tell whether this process's libibverbs runs on the emulated NIC, by :func:`attach` or by ``aiordma emulate``."""
    with _lock:
        if _config is not None:
            return True
        return _native.native().preloaded() and _native.native().configured()


def current_config() -> EmulatorConfig | None:
    """Return the configuration that :func:`attach` put in force; ``None`` if there is none, or under ``aiordma emulate``."""
    with _lock:
        return _config


def sysfs_path() -> Path | None:
    """Return the folder that stands for /sys, if :func:`attach` made one."""
    with _lock:
        return _folder.path if _folder is not None and _config is not None else None


def connection_counts() -> dict[str, int]:
    """Return what librdmacm's connection manager has at the moment in this process: for leak checks.

    ``channels`` are open event channels, ``ids`` identifiers, those of requests that wait included, and ``links`` are
    connections to other processes.
    """
    return _native.native().cm_counts()


def object_counts(device: str) -> dict[str, int]:
    """Return how many verbs objects of each type a device has at the moment, over all its contexts: for leak checks."""
    return _native.native().counts(device)

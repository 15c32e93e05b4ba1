"""The emulator's shared library, through ctypes. ``src/control.c`` has the other side."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from typing import Any

from aiordma._linking import explain
from aiordma.emulator._library import library_path
from aiordma.errors import ProviderError, RdmaError

__all__ = ["OBJECT_TYPES", "EmulatorError", "Native", "native", "visible_devices"]

_VERSION = 2
_ERROR_SIZE = 512

#: enum emu_type of src/emu.h, in order.
OBJECT_TYPES = (
    "none",
    "pd",
    "mr",
    "mw",
    "mkey",
    "ah",
    "channel",
    "cq",
    "qp",
    "srq",
    "xrcd",
    "uar",
    "devx",
    "umem",
    "wq",
    "rwq_ind_tbl",
    "dm",
    "var",
    "pp",
)

#: What aiordma_emu_cm_counts() counts, in order.
CM_COUNTS = ("channels", "ids", "links")


class EmulatorError(RdmaError, RuntimeError):
    """The emulated NIC can't be configured or attached as asked; the message says why, and what would help."""


class Native:
    """The exported functions, with exceptions for errors."""

    def __init__(self) -> None:
        path = library_path()
        try:
            self._lib = ctypes.CDLL(os.fspath(path))
        except OSError as e:
            raise EmulatorError(f"the emulator's library {path} can't be loaded: {e}") from e
        for name, arguments in {
            "configure": [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
            "attach": [ctypes.c_char_p, ctypes.c_size_t],
            "detach": [],
            "configured": [],
            "preloaded": [],
            "open_contexts": [],
            "cm_counts": [ctypes.POINTER(ctypes.c_uint32)],
            "counts": [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32],
            "version": [],
        }.items():
            function = self._function(name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        version = self._function("version")()
        if version != _VERSION:
            raise EmulatorError(
                f"the emulator's library {path} has interface {version}, this package needs {_VERSION}: they come from "
                "different builds of aiordma"
            )

    def _function(self, name: str) -> Any:
        return getattr(self._lib, f"aiordma_emu_{name}")

    def _call(self, name: str, *arguments: bytes) -> int:
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        result: int = self._function(name)(*arguments, error, _ERROR_SIZE)
        if result < 0:
            raise EmulatorError(f"{name}: {error.value.decode(errors='replace')}")
        return result

    def configure(self, text: str) -> None:
        """Take a configuration; the old one is gone. An error leaves the old one."""
        self._call("configure", text.encode())

    def attach(self) -> int:
        """Patch the RDMA libraries that are loaded; return how many of their import slots are ours."""
        return self._call("attach")

    def detach(self) -> bool:
        """Undo :meth:`attach`; false while a device is open."""
        return bool(self._function("detach")() == 0)

    def configured(self) -> bool:
        """Tell whether there are emulated devices, by :meth:`configure` or by the environment of a preloaded program."""
        return bool(self._function("configured")())

    def preloaded(self) -> bool:
        """Tell whether this program was started with the library in LD_PRELOAD."""
        return bool(self._function("preloaded")())

    def open_contexts(self) -> int:
        """Return the number of open device contexts in this process."""
        result: int = self._function("open_contexts")()
        return result

    def counts(self, device: str) -> dict[str, int]:
        """Return how many objects of each type a device has."""
        numbers = (ctypes.c_uint32 * len(OBJECT_TYPES))()
        if self._function("counts")(device.encode(), numbers, len(OBJECT_TYPES)):
            raise EmulatorError(f"there is no emulated device {device}")
        return dict(zip(OBJECT_TYPES[1:], numbers[1:], strict=True))

    def cm_counts(self) -> dict[str, int]:
        """Return how many descriptors, identifiers and links to other processes the connection manager has."""
        numbers = (ctypes.c_uint32 * len(CM_COUNTS))()
        self._function("cm_counts")(numbers)
        return dict(zip(CM_COUNTS, numbers, strict=True))


@functools.cache
def native() -> Native:
    """Return the library, loaded once."""
    return Native()


# ------------------------------------------------------------------ libibverbs


@functools.cache
def libibverbs() -> ctypes.CDLL:
    """Load libibverbs and libmlx5, and librdmacm if it is installed, so that there is something to patch.

    What loads them later gets these, patched.
    """
    try:
        ctypes.CDLL("libmlx5.so.1")
    except OSError as e:
        raise ProviderError(
            f"the emulated NIC stands in for the kernel, and needs the distribution's RDMA libraries above it: {explain(e)}"
        ) from e
    loaded = _device_list()
    with contextlib.suppress(OSError):
        ctypes.CDLL("librdmacm.so.1", use_errno=True)
    return loaded


@functools.cache
def _device_list() -> ctypes.CDLL:
    """Load libibverbs for what lists devices."""
    try:
        loaded = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as e:
        raise ProviderError(explain(e)) from e
    try:
        loaded.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
        loaded.ibv_get_device_list.argtypes = [ctypes.POINTER(ctypes.c_int)]
        loaded.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        loaded.ibv_free_device_list.restype = None
        loaded.ibv_get_device_name.argtypes = [ctypes.c_void_p]
        loaded.ibv_get_device_name.restype = ctypes.c_char_p
    except AttributeError as e:
        raise ProviderError(explain(e)) from e
    return loaded


def visible_devices() -> list[str]:
    """Return the names of the devices that libibverbs sees."""
    lib = _device_list()
    count = ctypes.c_int()
    devices: Any = lib.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.ENOENT):
            return []
        raise EmulatorError(f"ibv_get_device_list: {os.strerror(code)}")
    try:
        return [lib.ibv_get_device_name(devices[i]).decode() for i in range(count.value)]
    finally:
        lib.ibv_free_device_list(devices)

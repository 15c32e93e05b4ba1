"""Liberties that verbs allow a device or a library, for aiordma's own tests, and stepping the device by hand.

:mod:`aiordma.emulator.faults` has the faults. ``src/inject_cq.c`` and ``src/engine.c`` are the other side. Process-wide; what
is set by a ``with`` statement ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from aiordma.emulator._library import library_path

__all__ = ["before_arm", "garbage", "stepping", "strict_arming"]

_STRICT_ARM, _GARBAGE = 1, 2  # enum inject_option
_BeforeArm = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_options = 0


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(library_path()))
    library.aiordma_emu_inject_options.argtypes = [ctypes.c_uint32]
    library.aiordma_emu_inject_verbs.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.aiordma_emu_stepping.argtypes = [ctypes.c_int]
    library.aiordma_emu_step.argtypes = []
    return library


def _verbs(context_address: int | None, callback: Any, garbage: bool) -> None:
    _library().aiordma_emu_inject_verbs(context_address, callback, garbage)


@contextlib.contextmanager
def _option(option: int) -> Iterator[None]:
    global _options
    _options |= option
    _library().aiordma_emu_inject_options(_options)
    try:
        yield
    finally:
        _options &= ~option
        _library().aiordma_emu_inject_options(_options)


def strict_arming() -> contextlib.AbstractContextManager[None]:
    """A completion that came before its CQ was armed raises no event, which verbs allow and ConnectX doesn't make use of."""
    return _option(_STRICT_ARM)


@contextlib.contextmanager
def garbage(context_address: int) -> Iterator[None]:
    """What is undefined in a failed completion isn't zero: in the CQE, and in struct ibv_wc of that ibv_context."""
    with _option(_GARBAGE):
        _verbs(context_address, None, True)
        try:
            yield
        finally:
            _verbs(None, None, False)


@contextlib.contextmanager
def before_arm(context_address: int, fn: Callable[[], object]) -> Iterator[None]:
    """Calls ``fn()`` whenever a CQ of that ibv_context is armed, before it is."""
    callback = _BeforeArm(lambda _: fn() and None)
    _verbs(context_address, ctypes.cast(callback, ctypes.c_void_p), False)
    try:
        yield
    finally:
        _verbs(None, None, False)


@contextlib.contextmanager
def stepping() -> Iterator[Callable[[], int]]:
    """The device does nothing by itself: the function that this gives has it do, in this thread, all that there is to do.

    So what happens when doesn't depend on how threads are scheduled. The function says whether there was anything; only when
    there wasn't has every queue pair been looked at, since the doorbells of many overwrite each other. What waits for the
    device without calling it, as closing a QP does, waits for the end of this.
    """
    step: Callable[[], int] = _library().aiordma_emu_step
    _library().aiordma_emu_stepping(1)
    try:
        yield step
    finally:
        _library().aiordma_emu_stepping(0)

"""Faults on purpose, for aiordma's own tests: slow and failing commands, queues that stand still, lost packets, events.

Process-wide, like the emulated NIC itself. What is set by a ``with`` statement ends with it; :func:`reset` ends all.
``src/inject.c`` has the other side.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from aiordma.emulator._library import library_path

__all__ = ["before_arm", "drop", "event", "fail", "garbage", "hang", "hold", "reset", "slow", "strict_arming"]

_HOLD, _HANG, _LOSE = 1, 2, 4  # enum inject_qp
_STRICT_ARM, _GARBAGE = 1, 2  # enum inject_option
_BeforeArm = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")

_options = 0


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(library_path()))
    for name, arguments in {
        "qp": [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32],
        "command": [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_int, ctypes.c_int],
        "event": [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint64],
        "options": [ctypes.c_uint32],
        "verbs": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int],
    }.items():
        function = getattr(library, f"aiordma_emu_inject_{name}")
        function.argtypes = arguments
        function.restype = ctypes.c_int
    library.aiordma_emu_inject_reset.restype = None
    return library


def _call(name: str, *arguments: Any) -> None:
    if getattr(_library(), f"aiordma_emu_inject_{name}")(*arguments):
        raise LookupError(f"{name}{arguments}: the emulated NIC has no such device, object or command")


@contextlib.contextmanager
def _on_qp(what: int, qp_num: int, device: str) -> Iterator[Callable[[], None]]:
    def end() -> None:
        _call("qp", device.encode(), qp_num, 0)

    _call("qp", device.encode(), qp_num, what)
    try:
        yield end
    finally:
        end()


def hold(qp_num: int = 0, device: str = "") -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Work requests of a QP's send queue (0: of all QPs) stay in flight; flushing goes on. Gives a function that ends it."""
    return _on_qp(_HOLD, qp_num, device)


def hang(qp_num: int = 0, device: str = "") -> contextlib.AbstractContextManager[Callable[[], None]]:
    """The same, and nothing is flushed either."""
    return _on_qp(_HANG, qp_num, device)


def drop(qp_num: int = 0, device: str = "") -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Requests that a QP (0: all) sends get no answer, as with a broken link."""
    return _on_qp(_LOSE, qp_num, device)


@contextlib.contextmanager
def _on_command(verb: str, state: str | None, delay_ms: int, error: int, count: int) -> Iterator[None]:
    number = -1 if state is None else STATES.index(state)
    _call("command", verb.encode(), number, delay_ms, error, count)
    try:
        yield
    finally:
        _call("command", verb.encode(), number, 0, 0, 0)


def slow(
    verb: str, seconds: float, *, state: str | None = None, count: int = -1
) -> contextlib.AbstractContextManager[None]:
    """Commands of a verb, by its name without ``ibv_``, take so much longer. ``state``: only modify_qp to that one."""
    return _on_command(verb, state, int(seconds * 1000), 0, count)


def fail(
    verb: str, error: int, *, state: str | None = None, count: int = -1
) -> contextlib.AbstractContextManager[None]:
    """The next ``count`` commands of a verb (-1: all) fail with an errno, and change nothing."""
    return _on_command(verb, state, 0, error, count)


def event(device: str, event_type: int, element: int = 0) -> None:
    """Raises an asynchronous event (enum ibv_event_type) and what leads to it.

    ``element``: a port's number, or the address of the struct ibv_cq, ibv_qp or ibv_srq. Ports go up or down, QPs to ERR,
    a CQ writes no completion any more; after IBV_EVENT_DEVICE_FATAL nothing on the device goes on until :func:`reset`.
    """
    _call("event", device.encode(), event_type, element)


@contextlib.contextmanager
def _option(option: int) -> Iterator[None]:
    global _options
    _options |= option
    _call("options", _options)
    try:
        yield
    finally:
        _options &= ~option
        _call("options", _options)


def strict_arming() -> contextlib.AbstractContextManager[None]:
    """A completion that came before its CQ was armed raises no event, which verbs allow and ConnectX doesn't make use of."""
    return _option(_STRICT_ARM)


@contextlib.contextmanager
def garbage(context_address: int) -> Iterator[None]:
    """What is undefined in a failed completion isn't zero: in the CQE, and in struct ibv_wc of that ibv_context."""
    with _option(_GARBAGE):
        _call("verbs", context_address, None, 1)
        try:
            yield
        finally:
            _call("verbs", None, None, 0)


@contextlib.contextmanager
def before_arm(context_address: int, fn: Callable[[], object]) -> Iterator[None]:
    """Calls ``fn()`` whenever a CQ of that ibv_context is armed, before it is."""
    callback = _BeforeArm(lambda _: fn() and None)
    _call("verbs", context_address, ctypes.cast(callback, ctypes.c_void_p), 0)
    try:
        yield
    finally:
        _call("verbs", None, None, 0)


def reset() -> None:
    """As if nothing had been injected. Ports stay up or down as they are."""
    global _options
    _options = 0
    _library().aiordma_emu_inject_reset()

"""Faults as text, the language of ``src/inject_text.c``: for :mod:`aiordma.emulator.faults` and ``aiordma emulate --fault``.

Values may be what Python has or what a command line has: ``errno.ENOMEM`` and ``"ENOMEM"``, ``0.05`` and ``"0.05"``.
"""

from __future__ import annotations

import errno as errno_numbers
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["KINDS", "OPCODES", "STATES", "STATUSES", "rule", "rule_of_words"]

#: enum ibv_wr_opcode without IBV_WR_, and mlx5's own.
OPCODES = (
    "RDMA_WRITE",
    "RDMA_WRITE_WITH_IMM",
    "SEND",
    "SEND_WITH_IMM",
    "SEND_WITH_INV",
    "RDMA_READ",
    "ATOMIC_CMP_AND_SWP",
    "ATOMIC_FETCH_AND_ADD",
    "LOCAL_INV",
    "BIND_MW",
    "UMR",
    "MEMCPY",
    "NOP",
)
#: enum ibv_wc_status without IBV_WC_, as far as a work request can fail with it for a reason of its own.
STATUSES = (
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_PROT_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "REM_ABORT_ERR",
)
#: enum ibv_qp_state without IBV_QPS_.
STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")

_NEVER_A_COMMAND = frozenset(
    {"post_send", "post_recv", "post_srq_recv", "poll_cq", "req_notify_cq", "get_cq_event", "ack_cq_events", "bind_mw"}
)


def _whole(name: str, value: Any, least: int = 0) -> int:
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is a number, not {value!r}") from None
    if number < least or (not isinstance(value, str) and number != value):
        raise ValueError(f"{name} is a whole number from {least}, not {value!r}")
    return number


def _nanoseconds(name: str, value: Any) -> int:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is a time in seconds, not {value!r}") from None
    if not 0 <= seconds * 1e9 < math.inf:
        raise ValueError(f"{name} is a time in seconds, not {value!r}")
    # Rounded up: a fault lasts at least as long as was said.
    return math.ceil(seconds * 1e9)


def _word(name: str, value: Any) -> str:
    # The device takes words apart at spaces, and the text ends at a NUL.
    if not isinstance(value, str) or not value.isprintable() or " " in value:
        raise ValueError(f"{name} is a name, not {value!r}")
    return value


def _one_of(name: str, value: Any, known: Iterable[str], prefix: str) -> str:
    word = str(getattr(value, "name", value)).upper().removeprefix(prefix)
    if word not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
    return word


def _opcodes(value: Any) -> str:
    words = value.split("+") if isinstance(value, str) else value
    if hasattr(words, "name"):
        words = [words]
    if not isinstance(words, Iterable):
        raise ValueError(f"opcode is a name or several, not {value!r}")
    words = list(words)
    if not words:
        raise ValueError("opcode names at least one")
    return "+".join(_one_of("opcode", word, OPCODES, "IBV_WR_") for word in words)


def _errno(value: Any) -> int:
    number = getattr(errno_numbers, value, None) if isinstance(value, str) else value
    if number is None:
        return _whole("error", value, 1)
    return _whole("error", number, 1)


def _verb(value: Any) -> str:
    name = _word("name", value).removeprefix("ibv_").removeprefix("mlx5dv_")
    if name in _NEVER_A_COMMAND:
        raise ValueError(
            f"{value} never leaves the library, so the device can't refuse it: for what it posts there are drop, fail, ..."
        )
    return name


Words = Mapping[str, tuple[str, Callable[[Any], object]]]


def _time(key: str, name: str) -> tuple[str, Callable[[Any], object]]:
    return key, lambda value: _nanoseconds(name, value)


_JITTER = {"jitter": _time("jitter_ns", "jitter")}

#: The kinds by their public names: the device's words for it, and what each takes beside what they all do.
KINDS: Mapping[str, tuple[str, Words]] = {
    "drop": ("drop", {}),
    "drop_answer": ("drop_answer", {}),
    "hold": ("hold", {}),
    "hang": ("hang", {}),
    "delay": ("delay", {"seconds": _time("delay_ns", "seconds"), **_JITTER}),
    "shape": (
        "delay",
        {
            "latency": _time("delay_ns", "latency"),
            "bandwidth": ("bandwidth", lambda value: _whole("bandwidth", value, 1)),
            **_JITTER,
        },
    ),
    "reorder": (
        "reorder",
        {"by": ("by", lambda value: _whole("by", value, 1)), "limit": _time("limit_ns", "limit")},
    ),
    "rnr": ("rnr", {"timer": ("timer", lambda value: _whole("timer", value))}),
    "fail": ("fail", {"status": ("wc", lambda value: _one_of("status", value, STATUSES, "IBV_WC_"))}),
    "remote_access_error": ("fail wc=REM_ACCESS_ERR", {}),
    "retry_exceeded": ("fail wc=RETRY_EXC_ERR", {}),
    "qp_fatal": ("qp_fatal", {}),
    "cq_overrun": ("cq_overrun", {}),
    "verb": (
        "verb",
        {
            "name": ("verb", _verb),
            "error": ("error", _errno),
            "delay": _time("delay_ns", "delay"),
            "state": ("state", lambda value: _one_of("state", value, STATES, "IBV_QPS_")),
        },
    ),
    "devx": (
        "devx",
        {
            "command": ("devx", lambda value: _whole("command", value)),
            "status": ("status", lambda value: _whole("status", value, 1)),
            "syndrome": ("devx_syndrome", lambda value: _whole("syndrome", value)),
        },
    ),
    "device_fatal": ("device_fatal", {}),
    "port_down": ("port_down", {"port": ("port", lambda value: _whole("port", value, 1))}),
}

_OF_QUEUES = frozenset(KINDS) - {"verb", "devx", "device_fatal", "port_down"}


def _conditions(kind: str, options: dict[str, Any]) -> list[str]:
    words = []
    for name in ("nth", "every", "count"):
        value = options.pop(name, None)
        if value is not None:
            words.append(f"{name}={_whole(name, value, 1)}")
    probability, seed = options.pop("probability", None), options.pop("seed", None)
    if probability is not None:
        try:
            chance = float(probability)
        except (TypeError, ValueError, OverflowError):
            chance = -1
        if not 0 <= chance <= 1:
            raise ValueError(f"probability is a number from 0 to 1, not {probability!r}")
        words.append(f"chance={round(chance * (1 << 32))}")
    if seed is not None:
        words.append(f"seed={_whole('seed', seed) & (1 << 64) - 1}")
    if words and kind in ("hang", "device_fatal", "port_down"):
        raise ValueError(f"{kind} takes no conditions: it lasts from now on")
    return words


def rule(kind: str, **options: Any) -> str:
    """Return the text of a rule; options that are None are left out. :raises ValueError: what is wrong with it."""
    if kind not in KINDS:
        raise ValueError(f"there is no fault {kind!r}: there are {', '.join(KINDS)}")
    name, known = KINDS[kind]
    options = {key: value for key, value in options.items() if value is not None}
    words = [name]
    device = options.pop("device", "")
    if device:
        words.append(f"device={_word('device', device)}")
    if kind in _OF_QUEUES:
        if "qp" in options:
            words.append(f"qp={_whole('qp', options.pop('qp'), 1)}")
        if "opcode" in options:
            words.append(f"opcode={_opcodes(options.pop('opcode'))}")
    words += _conditions(kind, options)
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"the fault {kind} takes no {key!r}")
        to, convert = known[key]
        words.append(f"{to}={convert(value)}")
    _check_whole(kind, options)
    return " ".join(words)


def _check_whole(kind: str, options: Mapping[str, Any]) -> None:
    needed: dict[str, list[tuple[str, ...]]] = {
        "delay": [("seconds", "jitter")],
        "shape": [("latency", "bandwidth", "jitter")],
        "fail": [("status",)],
        "verb": [("name",), ("error", "delay")],
        "devx": [("command",), ("status",)],
    }
    for names in needed.get(kind, []):
        if not any(name in options for name in names):
            raise ValueError(f"the fault {kind} needs {' or '.join(names)}")


def rule_of_words(text: str) -> str:
    """Return the text of a rule written as on a command line: ``drop:opcode=SEND+RDMA_WRITE,nth=3``."""
    if not isinstance(text, str):
        raise ValueError(f"a fault is text, as drop:nth=3, not {text!r}")
    kind, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for word in filter(None, rest.split(",")):
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"{text}: {word!r} is not NAME=VALUE")
        if name.strip() in options:
            raise ValueError(f"{text}: {name.strip()} is given twice")
        options[name.strip()] = value.strip()
    try:
        return rule(kind.strip(), **options)
    except ValueError as e:
        raise ValueError(f"{text}: {e}") from None

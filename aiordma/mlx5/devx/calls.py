"""Firmware commands as awaitables: where they go, what comes back, what their errors are."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from aiordma import _control, _devx
from aiordma._cq import CompletionQueue
from aiordma._offload import Control, Pending, in_use
from aiordma.errors import ClosedError, DevxError, UnsupportedError, UsageError, VerbsError
from aiordma.mlx5.devx.commands import Command, Output, output_size
from aiordma.mlx5.devx.enums import Status, opcode_name
from aiordma.qp import VerbsQueuePair
from aiordma.srq import SharedReceiveQueue

if TYPE_CHECKING:
    from aiordma.device import Device
    from aiordma.mlx5.dc import DCTarget

__all__ = [
    "CommandLike",
    "Target",
    "check_output",
    "command_bytes",
    "failure",
    "find",
    "general",
    "general_command",
    "require",
    "run",
    "typed",
]

CommandLike: TypeAlias = "Command | bytes | bytearray | memoryview"
_Ours: TypeAlias = "VerbsQueuePair | DCTarget | SharedReceiveQueue"

MAX_OUTPUT = 0xFFFF  # lengths have 16 bits in the kernel's interface
HEADER = 16
_NEVER_SUPPORTED = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)


def require(device: Device, capability: str = "DEVX") -> None:
    """:class:`UnsupportedError` unless the device is mlx5's and was opened with DEVX: without, nothing is called."""
    device._check_open()
    if device.mlx5 is None:
        raise UnsupportedError(device.name, capability, "it isn't an mlx5 device, or DEVX isn't permitted")


def command_bytes(command: CommandLike) -> bytes:
    """The command as bytes; :class:`UsageError` if it's shorter than any command is."""
    data = bytes(command)
    if len(data) < HEADER:
        raise UsageError(f"a firmware command has at least {HEADER} bytes, not {len(data)}")
    if len(data) > MAX_OUTPUT:
        raise UsageError(f"a firmware command has at most {MAX_OUTPUT} bytes, not {len(data)}")
    return data


def check_output(command: bytes, size: int) -> None:
    """:class:`UsageError` if the answer of a command that is known here doesn't fit."""
    least = output_size(command)
    if not least <= size <= MAX_OUTPUT:
        name = opcode_name(int.from_bytes(command[:2], "big"))
        raise UsageError(f"{name} needs an output of {least} to {MAX_OUTPUT} bytes, not {size}")


def failure(verb: str, command: bytes, code: int, out: bytes) -> VerbsError:
    """The exception for a call that failed: with EREMOTEIO the reason is in the output."""
    opcode = int.from_bytes(command[:2], "big")
    if code == errno.EREMOTEIO:
        head = Output(out[:HEADER])
        return DevxError(verb, opcode, opcode_name(opcode), int(head.status), _status_text(head.status), head.syndrome)
    return VerbsError(verb, code, opcode_name(opcode))


def _status_text(status: int) -> str:
    return f"{status.name}: {status.text}" if isinstance(status, Status) else "unknown status"


# ------------------------------------------------------------------ verbs objects


class Target:
    """A verbs object that a command is about: its kind, address, number and device."""

    __slots__ = ("address", "device", "keep", "kind", "number")

    def __init__(self, device: Device, kind: int, address: int, number: int, keep: object) -> None:
        self.device = device
        self.kind = kind
        self.address = address
        self.number = number
        self.keep = keep


def _device_of(obj: Any, device: Device | None) -> Device:
    found = obj.device if _is_ours(obj) else device
    if found is None:
        raise UsageError(f"{type(obj).__name__} doesn't tell which device it's on: say device=...")
    return found


def _check_kind(obj: Any, kind: int, wanted: int) -> None:
    if kind != wanted:
        raise UsageError(f"{_WHAT[wanted]}, not a {type(obj).__name__}")


_WHAT = {
    _devx.QP: "a QP is needed",
    _devx.CQ: "a CQ is needed",
    _devx.SRQ: "an SRQ is needed",
    _devx.WQ: "a WQ is needed",
    _devx.IND_TBL: "a receive work queue indirection table is needed",
}


def _is_ours(obj: Any) -> TypeGuard[_Ours]:
    # That module's own imports end here.
    from aiordma.mlx5.dc import DCTarget

    return isinstance(obj, VerbsQueuePair | DCTarget | SharedReceiveQueue)


def _number(obj: _Ours) -> int:
    if isinstance(obj, SharedReceiveQueue):
        return _devx.srq_number(obj.address)
    return obj.qp_num if isinstance(obj, VerbsQueuePair) else obj.dctn


def find(obj: Any, wanted: int, device: Device | None) -> Target:
    """The verbs object in one of aiordma's or of pyverbs'. On the loop's thread."""
    owner = _device_of(obj, device)
    require(owner)
    context = owner.context_address
    if _is_ours(obj):
        if obj.closed:
            raise ClosedError(f"{obj!r} is closed")
        kind = _devx.SRQ if isinstance(obj, SharedReceiveQueue) else _devx.QP
        _check_kind(obj, kind, wanted)
        return Target(owner, kind, obj.address, _number(obj), obj)
    if isinstance(obj, CompletionQueue):
        _check_kind(obj, _devx.CQ, wanted)
        obj = obj.pyverbs
    kind = _pyverbs_kind(obj)
    _check_kind(obj, kind, wanted)
    if kind == _devx.QP:
        return Target(owner, kind, _control.qp_address(obj, context), obj.qp_num, obj)
    if kind == _devx.CQ:
        address = _control.cq_address(obj, context)
        return Target(owner, kind, address, _devx.cq_number(address), obj)
    if kind == _devx.SRQ:
        address = _control.srq_address(obj, context, 0)
        return Target(owner, kind, address, _devx.srq_number(address), obj)
    if kind == _devx.WQ:
        return Target(owner, kind, _control.wq_address(obj, context), obj.wqn, obj)
    address = _control.ind_table_address(obj, context)
    return Target(owner, kind, address, _devx.ind_table_number(address), obj)


def _pyverbs_kind(obj: Any) -> int:
    """By the class's module, so that nothing of pyverbs has to be imported for it."""
    names = {f"{base.__module__}.{base.__name__}" for base in type(obj).__mro__}
    for name, kind in (
        ("pyverbs.qp.QP", _devx.QP),
        ("pyverbs.cq.CQ", _devx.CQ),
        ("pyverbs.cq.CQEX", _devx.CQ),
        ("pyverbs.srq.SRQ", _devx.SRQ),
        ("pyverbs.wq.WQ", _devx.WQ),
        ("pyverbs.wq.RwqIndTable", _devx.IND_TBL),
    ):
        if name in names:
            return kind
    raise UsageError(f"no verbs object that DEVX commands go to: {type(obj).__name__}")


_NAMES = {_devx.QP: "qp", _devx.CQ: "cq", _devx.SRQ: "srq", _devx.WQ: "wq", _devx.IND_TBL: "ind_tbl"}


async def run(target: Target, modify: bool, command: CommandLike, out_size: int) -> bytes:
    """Inside a control operation: one of the ten calls; its output, if all is well."""
    data = command_bytes(command)
    check_output(data, out_size)
    control: Control = target.device.control
    code, out = await in_use(
        control, target.address, _devx.on_object, target.kind, modify, target.address, data, out_size
    )
    if code:
        verb = f"mlx5dv_devx_{_NAMES[target.kind]}_{'modify' if modify else 'query'}"
        raise _unsupported(target.device, verb, failure(verb, data, code, out))
    return out


def _unsupported(device: Device, verb: str, error: VerbsError) -> Exception:
    return UnsupportedError(device.name, verb, str(error)) if error.errno in _NEVER_SUPPORTED else error


async def typed(target: Target, modify: bool, command: Command, size: int | None = None) -> Any:
    """Inside a control operation: the same with structures."""
    kind = command.OUT
    return kind(await run(target, modify, command, kind.SIZE if size is None else size))


# ------------------------------------------------------------------ general commands


def general_command(device: Device, command: CommandLike, out_size: int | None = None) -> Pending[Any]:
    """A command about the device (mlx5dv_devx_general_cmd(3)), off the loop.

    A :class:`Command` gives its own kind of :class:`Output`, bytes give bytes, of ``out_size``. Which commands the kernel
    lets through is its choice (devx_is_general_cmd() in mlx5/devx.c); the others are :class:`VerbsError` EINVAL.

    Raises :class:`UnsupportedError`, :class:`UsageError` at once; awaiting raises :class:`DevxError`, :class:`VerbsError`.
    """
    require(device)
    data = command_bytes(command)
    kind = command.OUT if isinstance(command, Command) else None
    size = out_size if out_size is not None else kind.SIZE if kind is not None else output_size(data)
    check_output(data, size)
    return device._made(Pending(device.control, general(device, data, size, kind)))


async def general(device: Device, data: bytes, size: int, kind: type[Output] | None) -> Any:
    """Inside a control operation: see :func:`general_command`."""
    context = device.context_address
    code, out = await in_use(device.control, context, _devx.general, context, data, size)
    if code:
        raise failure("mlx5dv_devx_general_cmd", data, code, out)
    return out if kind is None else kind(out)

"""The ten calls of mlx5dv_devx_qp_modify(3) with bytes: a firmware command in, its output back.

Each takes aiordma's object or pyverbs' (then with ``device=``), the command, and the output's length in bytes. It is
started by the call and runs in a worker thread without the GIL. A command that is known here and whose answer wouldn't fit
into ``out_size`` is a :class:`UsageError` before anything is called. Awaiting raises :class:`DevxError` where the
firmware refuses, :class:`VerbsError` with the errno where the kernel does: EINVAL for a command that isn't one for
that object, or for another one's number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiordma import _devx
from aiordma._offload import Pending
from aiordma.mlx5.devx.calls import CommandLike, check_output, command_bytes, find, run

if TYPE_CHECKING:
    from aiordma.device import Device

__all__ = [
    "cq_modify",
    "cq_query",
    "ind_tbl_modify",
    "ind_tbl_query",
    "qp_modify",
    "qp_query",
    "srq_modify",
    "srq_query",
    "wq_modify",
    "wq_query",
]


def _start(
    obj: Any, kind: int, modify: bool, command: CommandLike, out_size: int, device: Device | None
) -> Pending[bytes]:
    target = find(obj, kind, device)
    data = command_bytes(command)
    check_output(data, out_size)
    return target.device._made(Pending(target.device.control, run(target, modify, data, out_size)))


def qp_query(qp: Any, command: CommandLike, out_size: int, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_qp_query(3)."""
    return _start(qp, _devx.QP, False, command, out_size, device)


def qp_modify(qp: Any, command: CommandLike, out_size: int = 16, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_qp_modify(3).

    Neither the kernel nor libibverbs learns of a change of state made this way.
    """
    return _start(qp, _devx.QP, True, command, out_size, device)


def cq_query(cq: Any, command: CommandLike, out_size: int, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_cq_query(3)."""
    return _start(cq, _devx.CQ, False, command, out_size, device)


def cq_modify(cq: Any, command: CommandLike, out_size: int = 16, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_cq_modify(3)."""
    return _start(cq, _devx.CQ, True, command, out_size, device)


def srq_query(srq: Any, command: CommandLike, out_size: int, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_srq_query(3): a basic SRQ is an RMP on the device, so the command is QUERY_RMP."""
    return _start(srq, _devx.SRQ, False, command, out_size, device)


def srq_modify(srq: Any, command: CommandLike, out_size: int = 16, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_srq_modify(3): MODIFY_RMP for a basic SRQ, ARM_XRC_SRQ for an XRC one."""
    return _start(srq, _devx.SRQ, True, command, out_size, device)


def wq_query(wq: Any, command: CommandLike, out_size: int, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_wq_query(3)."""
    return _start(wq, _devx.WQ, False, command, out_size, device)


def wq_modify(wq: Any, command: CommandLike, out_size: int = 16, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_wq_modify(3)."""
    return _start(wq, _devx.WQ, True, command, out_size, device)


def ind_tbl_query(table: Any, command: CommandLike, out_size: int, *, device: Device | None = None) -> Pending[bytes]:
    """mlx5dv_devx_ind_tbl_query(3)."""
    return _start(table, _devx.IND_TBL, False, command, out_size, device)


def ind_tbl_modify(
    table: Any, command: CommandLike, out_size: int = 16, *, device: Device | None = None
) -> Pending[bytes]:
    """mlx5dv_devx_ind_tbl_modify(3)."""
    return _start(table, _devx.IND_TBL, True, command, out_size, device)

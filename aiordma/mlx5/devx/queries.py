"""The same as :mod:`raw` with structures: ask for a verbs object's context, change it.

    state = await devx.query_qp(qp)
    state.state, state.remote_qpn, state.sw_sq_wqebb_counter - state.hw_sq_wqebb_counter

Objects are aiordma's, or pyverbs' with ``device=``. Errors are those of :mod:`raw`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from aiordma import _devx
from aiordma._offload import Pending
from aiordma.errors import UsageError, VerbsError
from aiordma.mlx5.devx import calls
from aiordma.mlx5.devx.caps import HcaCap
from aiordma.mlx5.devx.commands import (
    ArmXrcSrqIn,
    Command,
    ModifyCqIn,
    ModifyQpIn,
    ModifyRmpIn,
    ModifyRqIn,
    ModifyRqtIn,
    Output,
    QueryCqIn,
    QueryDctIn,
    QueryHcaCapIn,
    QueryHcaCapOut,
    QueryQpExtOut,
    QueryQpIn,
    QueryRmpIn,
    QueryRqIn,
    QueryRqtIn,
    QueryXrcSrqIn,
    ToErrQpIn,
    ToRstQpIn,
)
from aiordma.mlx5.devx.contexts import Cqc, Dctc, Qpc, QpcExt, Rmpc, Rqc, Rqtc, XrcSrqc
from aiordma.mlx5.devx.enums import CapKind, RqState
from aiordma.mlx5.devx.prm import Struct

if TYPE_CHECKING:
    from aiordma.device import Device

__all__ = [
    "modify_cq",
    "modify_ind_table",
    "modify_qp",
    "modify_srq",
    "modify_wq",
    "query_cq",
    "query_dct",
    "query_hca_cap",
    "query_ind_table",
    "query_qp",
    "query_qp_ext",
    "query_srq",
    "query_wq",
]

S = TypeVar("S", bound=Struct)

_EINVAL = 22
# log_max_rqt_size has 5 bits, but the kernel makes no table of more than 2^13 entries (IB_USER_VERBS_MAX_LOG_IND_TBL_SIZE).
_MAX_TABLE = 1 << 13
_PERIOD, _MAX_COUNT = 1, 2
_LIST = 1
_LWM = 1


def _start(target: calls.Target, operation: Any) -> Pending[Any]:
    return target.device._made(Pending(target.device.control, operation))


# ------------------------------------------------------------------ queue pairs


def query_qp(qp: Any, *, device: Device | None = None) -> Pending[Qpc]:
    """A QP's context as the device has it at this moment (QUERY_QP)."""
    target = calls.find(qp, _devx.QP, device)

    async def run() -> Qpc:
        out = await calls.typed(target, False, QueryQpIn(qpn=target.number))
        return Qpc(bytes(out.qpc))

    return _start(target, run())


def query_qp_ext(qp: Any, *, device: Device | None = None) -> Pending[QpcExt]:
    """What lies beyond the context (QUERY_QP with qpc_ext): whether DMA memcpy is on. Not every firmware answers it."""
    target = calls.find(qp, _devx.QP, device)

    async def run() -> QpcExt:
        command = QueryQpIn(qpn=target.number, qpc_ext=1)
        out = QueryQpExtOut(await calls.run(target, False, command, QueryQpExtOut.SIZE))
        return QpcExt(bytes(out.qpc_data_ext))

    return _start(target, run())


def query_dct(dct: Any, *, device: Device | None = None) -> Pending[Dctc]:
    """A DC target's context (QUERY_DCT)."""
    target = calls.find(dct, _devx.QP, device)

    async def run() -> Dctc:
        out = await calls.typed(target, False, QueryDctIn(dctn=target.number))
        return Dctc(bytes(out.dct_context_entry))

    return _start(target, run())


def modify_qp(qp: Any, command: ModifyQpIn | ToErrQpIn | ToRstQpIn, *, device: Device | None = None) -> Pending[Output]:
    """Changes a QP; the command's ``qpn`` is filled in.

    Neither the kernel nor libibverbs, nor aiordma's QueuePair, learns of a change of state: query it.
    """
    target = calls.find(qp, _devx.QP, device)
    if not isinstance(command, ModifyQpIn | ToErrQpIn | ToRstQpIn):
        raise UsageError(f"modify_qp: a change of a QP, not {type(command).__name__}")
    command = type(command)(bytes(command))
    command.qpn = target.number
    return _start(target, calls.typed(target, True, _trimmed(command)))


def _trimmed(command: Command) -> Command:
    """Without the extension where there is none: devices without qpc_extension know only the shorter form."""
    if isinstance(command, ModifyQpIn) and not command.qpc_ext:
        return _Short(bytes(command)[:272])
    return command


class _Short(Command, size=272):
    pass


# ------------------------------------------------------------------ completion queues


def query_cq(cq: Any, *, device: Device | None = None) -> Pending[Cqc]:
    """A CQ's context (QUERY_CQ); ``cq`` is one of ``device.engine.completion_queues``, or pyverbs'."""
    target = calls.find(cq, _devx.CQ, device)

    async def run() -> Cqc:
        out = await calls.typed(target, False, QueryCqIn(cqn=target.number))
        return Cqc(bytes(out.cq_context))

    return _start(target, run())


def modify_cq(
    cq: Any, *, period: int | None = None, max_count: int | None = None, device: Device | None = None
) -> Pending[Output]:
    """A CQ's event moderation (MODIFY_CQ): an event after ``max_count`` completions or ``period`` microseconds."""
    target = calls.find(cq, _devx.CQ, device)
    command = ModifyCqIn(cqn=target.number)
    if period is not None:
        command.cq_context.cq_period = period
        command.modify_field_select |= _PERIOD
    if max_count is not None:
        command.cq_context.cq_max_count = max_count
        command.modify_field_select |= _MAX_COUNT
    if not command.modify_field_select:
        raise UsageError("modify_cq: period, max_count, or both")
    return _start(target, calls.typed(target, True, command))


# ------------------------------------------------------------------ shared receive queues


def query_srq(srq: Any, *, device: Device | None = None) -> Pending[Rmpc | XrcSrqc]:
    """An SRQ's context: :class:`Rmpc` of a basic one, :class:`XrcSrqc` of an XRC one."""
    target = calls.find(srq, _devx.SRQ, device)

    async def run() -> Rmpc | XrcSrqc:
        try:
            out = await calls.typed(target, False, QueryRmpIn(rmpn=target.number))
        except VerbsError as e:
            # The kernel's answer to a command that isn't for this kind of object.
            if e.errno != _EINVAL:
                raise
        else:
            return Rmpc(bytes(out.rmp_context))
        out = await calls.typed(target, False, QueryXrcSrqIn(xrc_srqn=target.number))
        return XrcSrqc(bytes(out.xrc_srq_context_entry))

    return _start(target, run())


def modify_srq(srq: Any, *, limit: int, device: Device | None = None) -> Pending[Output]:
    """An SRQ's limit: fewer receives than that raise IBV_EVENT_SRQ_LIMIT_REACHED once."""
    target = calls.find(srq, _devx.SRQ, device)
    pool = ModifyRmpIn(rmpn=target.number, rmp_state=RqState.RDY, bitmask=_LWM)
    pool["ctx.wq.lwm"] = limit
    pool["ctx.state"] = RqState.RDY
    xrc = ArmXrcSrqIn(xrc_srqn=target.number, lwm=limit)

    async def run() -> Any:
        try:
            return await calls.typed(target, True, pool)
        except VerbsError as e:
            if e.errno != _EINVAL:
                raise
        return await calls.typed(target, True, xrc)

    return _start(target, run())


# ------------------------------------------------------------------ receive work queues and their tables


def query_wq(wq: Any, *, device: Device | None = None) -> Pending[Rqc]:
    """A receive work queue's context (QUERY_RQ)."""
    target = calls.find(wq, _devx.WQ, device)

    async def run() -> Rqc:
        out = await calls.typed(target, False, QueryRqIn(rqn=target.number))
        return Rqc(bytes(out.rq_context))

    return _start(target, run())


def modify_wq(wq: Any, *, state: RqState, current: RqState, device: Device | None = None) -> Pending[Output]:
    """A receive work queue's state (MODIFY_RQ); it must be in ``current``."""
    target = calls.find(wq, _devx.WQ, device)
    command = ModifyRqIn(rqn=target.number, rq_state=current)
    command.ctx.state = state
    return _start(target, calls.typed(target, True, command))


def query_ind_table(table: Any, *, device: Device | None = None) -> Pending[Rqtc]:
    """An indirection table's context (QUERY_RQT); ``rq_num`` are the numbers of its queues."""
    target = calls.find(table, _devx.IND_TBL, device)

    async def run() -> Rqtc:
        command = QueryRqtIn(rqtn=target.number)
        out = command.OUT(await calls.run(target, False, command, command.OUT.SIZE + 4 * _MAX_TABLE))
        context = Rqtc(bytes(out["rqt_context"]))
        context.rq_num = out["rq_num"][: context.rqt_actual_size]
        return context

    return _start(target, run())


def modify_ind_table(table: Any, queues: list[int], *, device: Device | None = None) -> Pending[Output]:
    """An indirection table's list: numbers of receive work queues, a power of two of them (MODIFY_RQT)."""
    target = calls.find(table, _devx.IND_TBL, device)
    command = ModifyRqtIn(rqtn=target.number, bitmask=_LIST)
    command.ctx.rqt_actual_size = len(queues)
    command.rq_num = list(queues)
    return _start(target, calls.typed(target, True, command))


# ------------------------------------------------------------------ the device


@overload
def query_hca_cap(device: Device, *, maximum: bool = False) -> Pending[HcaCap]: ...
@overload
def query_hca_cap(device: Device, kind: type[S], group: int, *, maximum: bool = False) -> Pending[S]: ...
def query_hca_cap(
    device: Device, kind: type[Struct] = HcaCap, group: int = CapKind.GENERAL, *, maximum: bool = False
) -> Pending[Any]:
    """What the device can do (QUERY_HCA_CAP): a ``group`` of capabilities, as the structure ``kind``.

    :class:`HcaCap` for GENERAL, :class:`AtomicCap` for ATOMIC, :class:`RoceCap` for ROCE. ``maximum``: what is possible
    rather than what is in force.
    """
    calls.require(device)
    command = QueryHcaCapIn(op_mod=group << 1 | (not maximum))

    async def run() -> Struct:
        out = await calls.general(device, bytes(command), QueryHcaCapOut.SIZE, None)
        return kind(out[Output.SIZE : Output.SIZE + kind.SIZE])

    return device._made(Pending(device.control, run()))

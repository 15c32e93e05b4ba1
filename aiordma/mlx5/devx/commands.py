"""Inputs and outputs of firmware commands.

Each input class knows its opcode, and its output class as ``OUT``. Where the layouts of commands are the same, so are
the classes' fields: all changes of a queue pair but 2ERR and 2RST derive from :class:`ModifyQpIn`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from aiordma.mlx5.devx.caps import HcaCap
from aiordma.mlx5.devx.contexts import Cqc, Dctc, Mkc, Qpc, QpcExt, Rmpc, Rqc, Rqtc, XrcSrqc
from aiordma.mlx5.devx.enums import ObjectType, Opcode, Status
from aiordma.mlx5.devx.prm import Array, Field, Nested, Struct

__all__ = [
    "AllocPdIn",
    "AllocPdOut",
    "ArmXrcSrqIn",
    "Command",
    "CreateGeneralObjectIn",
    "CreateGeneralObjectOut",
    "CreateMkeyIn",
    "CreateMkeyOut",
    "CreateQpIn",
    "CreateQpOut",
    "Init2InitQpIn",
    "Init2RtrQpIn",
    "ModifyCqIn",
    "ModifyGeneralObjectIn",
    "ModifyQpIn",
    "ModifyRmpIn",
    "ModifyRqIn",
    "ModifyRqtIn",
    "Output",
    "QueryCqIn",
    "QueryCqOut",
    "QueryDctIn",
    "QueryDctOut",
    "QueryGeneralObjectIn",
    "QueryHcaCapIn",
    "QueryHcaCapOut",
    "QueryIssiIn",
    "QueryIssiOut",
    "QueryMkeyIn",
    "QueryMkeyOut",
    "QueryQpIn",
    "QueryQpOut",
    "QueryRmpIn",
    "QueryRmpOut",
    "QueryRqIn",
    "QueryRqOut",
    "QueryRqtIn",
    "QueryRqtOut",
    "QueryXrcSrqIn",
    "QueryXrcSrqOut",
    "Rst2InitQpIn",
    "Rtr2RtsQpIn",
    "Rts2RtsQpIn",
    "SqErr2RtsQpIn",
    "ToErrQpIn",
    "ToRstQpIn",
    "output_size",
]


class Output(Struct, size=16):
    """Any output: ``status`` 0 is success, ``syndrome`` is the firmware's own number for what went wrong."""

    status = Field(0x00, 8, Status)
    syndrome = Field(0x20, 32)


_by_opcode: dict[int, type[Command]] = {}


class Command(Struct, size=16):
    """Any input. A class that has an ``OPCODE`` fills it in."""

    OPCODE: ClassVar[Opcode | None] = None
    OUT: ClassVar[type[Output]] = Output

    opcode = Field(0x00, 16, Opcode)
    uid = Field(0x10, 16)
    op_mod = Field(0x30, 16, union=True)

    def __init_subclass__(
        cls, *, size: int | None = None, code: Opcode | None = None, out: type[Output] | None = None
    ) -> None:
        super().__init_subclass__(size=size)
        if out is not None:
            cls.OUT = out
        if code is not None:
            cls.OPCODE = code
            _by_opcode[code] = cls

    def __init__(self, data: bytes | bytearray | memoryview | None = None, /, **values: Any) -> None:
        super().__init__(data)
        if self.OPCODE is not None and data is None:
            self.opcode = self.OPCODE
        for name, value in values.items():
            self[name] = value


def output_size(command: bytes) -> int:
    """The least output of a command that is known here, by its opcode; 16 bytes, an output's head, for others."""
    known = _by_opcode.get(int.from_bytes(command[:2], "big"))
    return known.OUT.SIZE if known is not None else Output.SIZE


# ------------------------------------------------------------------ the device


class QueryHcaCapOut(Output, size=16 + 4096):
    """As long as the longest kind of capabilities."""

    capability = Nested(0x80, HcaCap)


class QueryHcaCapIn(Command, size=16, code=Opcode.QUERY_HCA_CAP, out=QueryHcaCapOut):
    """``op_mod`` is the kind (:class:`CapKind`) times 2, plus 1 for what is in force rather than possible."""

    other_function = Field(0x40, 1)
    function_id = Field(0x50, 16)


class QueryIssiOut(Output, size=112):
    """Interface step sequence identifiers."""

    current_issi = Field(0x50, 16)
    supported_issi_dw0 = Field(0x360, 32)


class QueryIssiIn(Command, size=16, code=Opcode.QUERY_ISSI, out=QueryIssiOut):
    """The version of the interface in use."""


# ------------------------------------------------------------------ queue pairs


class QueryQpOut(Output, size=272):
    """``qpc_data_ext`` is there with ``qpc_ext`` in the input: :class:`QueryQpExtOut`."""

    opt_param_mask = Field(0x80, 32)
    qpc = Nested(0xC0, Qpc)


class QueryQpExtOut(QueryQpOut, size=464):
    """The same with the extension."""

    opt_param_mask_95_32 = Field(0x840, 64)
    qpc_data_ext = Nested(0x880, QpcExt)


class QueryQpIn(Command, size=16, code=Opcode.QUERY_QP, out=QueryQpOut):
    """All of a queue pair's context."""

    qpc_ext = Field(0x40, 1)
    qpn = Field(0x48, 24)


class ModifyQpIn(Command, size=464):
    """What changes of a queue pair's state have in common. ``opt_param_mask`` (:class:`OptParam`) says which optional
    fields count, ``qpc_ext`` that there is an extension, of which ``opt_param_mask_95_32`` says the same.
    """

    qpc_ext = Field(0x40, 1)
    qpn = Field(0x48, 24)
    opt_param_mask = Field(0x80, 32)
    ece = Field(0xA0, 32)
    qpc = Nested(0xC0, Qpc)
    opt_param_mask_95_32 = Field(0x840, 64)
    qpc_data_ext = Nested(0x880, QpcExt)


class Rst2InitQpIn(ModifyQpIn, code=Opcode.RST2INIT_QP):
    """RESET to INIT: port, pkey_index, access rights (or q_key)."""


class Init2InitQpIn(ModifyQpIn, code=Opcode.INIT2INIT_QP):
    """INIT stays; with ``qpc_data_ext.mmo`` the QP gets DMA memcpy."""


class Init2RtrQpIn(ModifyQpIn, code=Opcode.INIT2RTR_QP):
    """INIT to RTR: path, mtu, remote_qpn, next_rcv_psn, min_rnr_nak, log_rra_max, log_msg_max."""


class Rtr2RtsQpIn(ModifyQpIn, code=Opcode.RTR2RTS_QP):
    """RTR to RTS: next_send_psn, log_sra_max, retry_count, rnr_retry, ack_timeout."""


class Rts2RtsQpIn(ModifyQpIn, code=Opcode.RTS2RTS_QP):
    """RTS stays."""


class SqErr2RtsQpIn(ModifyQpIn, code=Opcode.SQERR2RTS_QP):
    """The send queue's error is over."""


class ToErrQpIn(Command, size=16, code=Opcode.TO_ERR_QP):
    """Any state to ERR (2ERR_QP)."""

    qpn = Field(0x48, 24)


class ToRstQpIn(Command, size=16, code=Opcode.TO_RST_QP):
    """Any state to RESET (2RST_QP)."""

    qpn = Field(0x48, 24)


class CreateQpOut(Output, size=16):
    """The number of the new queue pair."""

    qpn = Field(0x48, 24)


class CreateQpIn(Command, size=272, code=Opcode.CREATE_QP, out=CreateQpOut):
    """A queue pair whose queues lie in a registered UMEM."""

    opt_param_mask = Field(0x80, 32)
    qpc = Nested(0xC0, Qpc)
    wq_umem_offset = Field(0x800, 64)
    wq_umem_id = Field(0x840, 32)
    wq_umem_valid = Field(0x860, 1)


class QueryDctOut(Output, size=128):
    """A DC target's context."""

    dct_context_entry = Nested(0x80, Dctc)


class QueryDctIn(Command, size=16, code=Opcode.QUERY_DCT, out=QueryDctOut):
    """All of a DC target's context."""

    dctn = Field(0x48, 24)


# ------------------------------------------------------------------ completion queues


class QueryCqOut(Output, size=272):
    """A completion queue's context."""

    cq_context = Nested(0x80, Cqc)


class QueryCqIn(Command, size=16, code=Opcode.QUERY_CQ, out=QueryCqOut):
    """All of a completion queue's context."""

    cqn = Field(0x48, 24)


class ModifyCqIn(Command, size=272, code=Opcode.MODIFY_CQ):
    """``modify_field_select``: 1 cq_period, 2 cq_max_count, 4 oi, 8 c_eqn; with ``op_mod`` 1 it selects a resize."""

    cqn = Field(0x48, 24)
    modify_field_select = Field(0x60, 32)
    cq_context = Nested(0x80, Cqc)
    cq_umem_valid = Field(0x2E0, 1)


# ------------------------------------------------------------------ receive queues


class QueryRmpOut(Output, size=272):
    """A pool's context."""

    rmp_context = Nested(0x100, Rmpc)


class QueryRmpIn(Command, size=16, code=Opcode.QUERY_RMP, out=QueryRmpOut):
    """What a basic SRQ is on the device."""

    rmpn = Field(0x48, 24)


class ModifyRmpIn(Command, size=272, code=Opcode.MODIFY_RMP):
    """``bitmask`` 1: ``ctx.wq.lwm``, the SRQ's limit. ``rmp_state`` is the state that it must be in."""

    rmp_state = Field(0x40, 4)
    rmpn = Field(0x48, 24)
    bitmask = Field(0x80, 64)
    ctx = Nested(0x100, Rmpc)


class QueryXrcSrqOut(Output, size=272):
    """An XRC SRQ's context."""

    xrc_srq_context_entry = Nested(0x80, XrcSrqc)


class QueryXrcSrqIn(Command, size=16, code=Opcode.QUERY_XRC_SRQ, out=QueryXrcSrqOut):
    """All of an XRC SRQ's context."""

    xrc_srqn = Field(0x48, 24)


class ArmXrcSrqIn(Command, size=16, code=Opcode.ARM_XRC_SRQ):
    """Sets an XRC SRQ's limit."""

    xrc_srqn = Field(0x48, 24)
    lwm = Field(0x70, 16)


class ArmRqIn(Command, size=16, code=Opcode.ARM_RQ):
    """Sets a receive queue's limit."""

    srq_number = Field(0x48, 24)
    lwm = Field(0x70, 16)


class QueryRqOut(Output, size=272):
    """A receive queue's context."""

    rq_context = Nested(0x100, Rqc)


class QueryRqIn(Command, size=16, code=Opcode.QUERY_RQ, out=QueryRqOut):
    """All of a receive queue's context."""

    rqn = Field(0x48, 24)


class ModifyRqIn(Command, size=272, code=Opcode.MODIFY_RQ):
    """``rq_state`` is the state that it must be in, ``ctx.state`` the new one."""

    rq_state = Field(0x40, 4)
    rqn = Field(0x48, 24)
    modify_bitmask = Field(0x80, 64)
    ctx = Nested(0x100, Rqc)


class QueryRqtOut(Output, size=272):
    """A table's context; the list follows it, so the output must be as long as the table needs."""

    rqt_context = Nested(0x100, Rqtc)
    rq_num = Array(0x880, 24)


class QueryRqtIn(Command, size=16, code=Opcode.QUERY_RQT, out=QueryRqtOut):
    """All of a table."""

    rqtn = Field(0x48, 24)


class ModifyRqtIn(Command, size=272, code=Opcode.MODIFY_RQT):
    """``bitmask`` 1: the list ``rq_num``, of ``ctx.rqt_actual_size`` entries."""

    rqtn = Field(0x48, 24)
    bitmask = Field(0x80, 64)
    ctx = Nested(0x100, Rqtc)
    rq_num = Array(0x880, 24)


# ------------------------------------------------------------------ memory keys, protection domains


class CreateMkeyOut(Output, size=16):
    """``mkey_index`` is the upper 24 bits of the key, ``mkc.mkey_7_0`` the lower 8."""

    mkey_index = Field(0x48, 24)


class CreateMkeyIn(Command, size=272, code=Opcode.CREATE_MKEY, out=CreateMkeyOut):
    """A memory key."""

    pg_access = Field(0x60, 1)
    mkey_umem_valid = Field(0x61, 1)
    memory_key_mkey_entry = Nested(0x80, Mkc)
    translations_octword_actual_size = Field(0x300, 32)
    mkey_umem_id = Field(0x320, 32)
    mkey_umem_offset = Field(0x340, 64)


class QueryMkeyOut(Output, size=304):
    """A memory key's context."""

    memory_key_mkey_entry = Nested(0x80, Mkc)


class QueryMkeyIn(Command, size=16, code=Opcode.QUERY_MKEY, out=QueryMkeyOut):
    """All of a memory key's context."""

    mkey_index = Field(0x48, 24)
    pg_access = Field(0x60, 1)


class AllocPdOut(Output, size=16):
    """The number of the new protection domain."""

    pd = Field(0x48, 24)


class AllocPdIn(Command, size=16, code=Opcode.ALLOC_PD, out=AllocPdOut):
    """A protection domain."""


# ------------------------------------------------------------------ general objects


class CreateGeneralObjectOut(Output, size=16):
    """The number of the new object, among those of its type."""

    obj_id = Field(0x40, 32)


class _GeneralObjectIn(Command, size=16):
    vhca_tunnel_id = Field(0x20, 16)
    obj_type = Field(0x30, 16, ObjectType, union=True)
    obj_id = Field(0x40, 32)
    log_obj_range = Field(0x63, 5)


class CreateGeneralObjectIn(_GeneralObjectIn, code=Opcode.CREATE_GENERAL_OBJECT, out=CreateGeneralObjectOut):
    """The object's own description follows the 16 bytes: ``bytes(head) + bytes(description)``."""


class ModifyGeneralObjectIn(_GeneralObjectIn, code=Opcode.MODIFY_GENERAL_OBJECT):
    """The head of a change."""


class QueryGeneralObjectIn(_GeneralObjectIn, code=Opcode.QUERY_GENERAL_OBJECT):
    """The head of a query; the description follows the output's head."""

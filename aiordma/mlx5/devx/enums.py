"""Numbers of the Programmer's Reference Manual that have names: opcodes, statuses, states (mlx5_ifc.h, linux/mlx5/qp.h)."""

from __future__ import annotations

import enum

__all__ = [
    "AccessMode",
    "CapKind",
    "CqArm",
    "CqStatus",
    "CqeSize",
    "ObjectType",
    "Opcode",
    "OptParam",
    "OptParam32",
    "PmState",
    "QpState",
    "RqState",
    "RqType",
    "ServiceType",
    "Status",
    "WqType",
    "opcode_name",
]


class Opcode(enum.IntEnum):
    """Firmware commands, without their MLX5_CMD_OP_."""

    QUERY_HCA_CAP = 0x100
    QUERY_ADAPTER = 0x101
    QUERY_ISSI = 0x10A
    CREATE_MKEY = 0x200
    QUERY_MKEY = 0x201
    DESTROY_MKEY = 0x202
    CREATE_EQ = 0x301
    CREATE_CQ = 0x400
    DESTROY_CQ = 0x401
    QUERY_CQ = 0x402
    MODIFY_CQ = 0x403
    CREATE_QP = 0x500
    DESTROY_QP = 0x501
    RST2INIT_QP = 0x502
    INIT2RTR_QP = 0x503
    RTR2RTS_QP = 0x504
    RTS2RTS_QP = 0x505
    SQERR2RTS_QP = 0x506
    TO_ERR_QP = 0x507  # 2ERR_QP
    TO_RST_QP = 0x50A  # 2RST_QP
    QUERY_QP = 0x50B
    SQD_RTS_QP = 0x50C
    INIT2INIT_QP = 0x50E
    CREATE_PSV = 0x600
    CREATE_SRQ = 0x700
    QUERY_SRQ = 0x702
    ARM_RQ = 0x703
    CREATE_XRC_SRQ = 0x705
    QUERY_XRC_SRQ = 0x707
    ARM_XRC_SRQ = 0x708
    CREATE_DCT = 0x710
    QUERY_DCT = 0x713
    QUERY_VPORT_STATE = 0x750
    QUERY_HCA_VPORT_CONTEXT = 0x762
    QUERY_VPORT_COUNTER = 0x770
    QUERY_Q_COUNTER = 0x773
    ALLOC_PD = 0x800
    DEALLOC_PD = 0x801
    NOP = 0x80D
    ALLOC_XRCD = 0x80E
    QUERY_LAG = 0x842
    CREATE_TIR = 0x900
    CREATE_SQ = 0x904
    CREATE_RQ = 0x908
    MODIFY_RQ = 0x909
    QUERY_RQ = 0x90B
    CREATE_RMP = 0x90C
    MODIFY_RMP = 0x90D
    QUERY_RMP = 0x90F
    CREATE_RQT = 0x916
    MODIFY_RQT = 0x917
    QUERY_RQT = 0x919
    ALLOC_FLOW_COUNTER = 0x939
    QUERY_FLOW_COUNTER = 0x93B
    CREATE_GENERAL_OBJECT = 0xA00
    MODIFY_GENERAL_OBJECT = 0xA01
    QUERY_GENERAL_OBJECT = 0xA02
    DESTROY_GENERAL_OBJECT = 0xA03


def opcode_name(opcode: int) -> str:
    """``"QUERY_QP"``; the number where it has no name here."""
    return Opcode(opcode).name if opcode in Opcode._value2member_map_ else f"command {opcode:#x}"


class Status(enum.IntEnum):
    """How the firmware ends a command, MLX5_CMD_STAT_*; ``text`` says it in words."""

    text: str

    def __new__(cls, value: int, text: str) -> Status:
        status = int.__new__(cls, value)
        status._value_ = value
        status.text = text
        return status

    OK = 0x00, "done"
    INT_ERR = 0x01, "internal error of the device"
    BAD_OP = 0x02, "the command or its modifier is unknown, or not for this object"
    BAD_PARAM = 0x03, "a parameter isn't supported, or out of range"
    BAD_SYS_STATE = 0x04, "the device isn't in a state in which it takes this command"
    BAD_RES = 0x05, "a resource that the command names doesn't exist"
    RES_BUSY = 0x06, "the resource is in use"
    LIM = 0x08, "a limit of the device is exceeded"
    BAD_RES_STATE = 0x09, "a resource is in the wrong state"
    IX = 0x0A, "an index is out of range or in use"
    NO_RES = 0x0F, "out of resources"
    BAD_QP_STATE = 0x10, "the QP is in the wrong state for this command"
    BAD_PKT = 0x30, "a malformed packet"
    BAD_SIZE_OUTS_CQES = 0x40, "more unread completions than the new CQ would hold"
    BAD_INP_LEN = 0x50, "the input is too short for the command"
    BAD_OUTP_LEN = 0x51, "the output is too short for the command's answer"


class QpState(enum.IntEnum):
    """qpc.state; not the numbers of enum ibv_qp_state."""

    RST = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQER = 4
    SQD = 5
    ERR = 6
    SQ_DRAINING = 7
    SUSPENDED = 9


class ServiceType(enum.IntEnum):
    """qpc.st"""

    RC = 0x0
    UC = 0x1
    UD = 0x2
    XRC = 0x3
    DCI = 0x5
    QP0 = 0x7
    QP1 = 0x8
    RAW_ETHERTYPE = 0x9
    REG_UMR = 0xC


class PmState(enum.IntEnum):
    """qpc.pm_state: path migration"""

    ARMED = 0
    REARM = 1
    MIGRATED = 3


class RqType(enum.IntEnum):
    """qpc.rq_type: where a QP's receives come from"""

    OWN = 0
    SRQ = 1
    CRQ = 2
    NONE = 3


class OptParam(enum.IntFlag):
    """opt_param_mask of commands that change a QP, MLX5_QP_OPTPAR_*: which optional fields of the qpc count."""

    ALT_ADDR_PATH = 1 << 0
    RRE = 1 << 1
    RAE = 1 << 2
    RWE = 1 << 3
    PKEY_INDEX = 1 << 4
    Q_KEY = 1 << 5
    RNR_TIMEOUT = 1 << 6
    PRIMARY_ADDR_PATH = 1 << 7
    SRA_MAX = 1 << 8
    RRA_MAX = 1 << 9
    PM_STATE = 1 << 10
    RETRY_COUNT = 1 << 12
    RNR_RETRY = 1 << 13
    ACK_TIMEOUT = 1 << 14
    LAG_TX_PORT_AFFINITY = 1 << 15
    PRI_PORT = 1 << 16
    SRQN = 1 << 18
    CQN_RCV = 1 << 19
    COUNTER_SET_ID = 1 << 25


class OptParam32(enum.IntFlag):
    """opt_param_mask_95_32, MLX5_QPC_OPT_MASK_32_*: the same for the extension of the qpc."""

    DCI_STREAM_CHANNEL_ID = 1 << 0
    QOS_QUEUE_GROUP_ID = 1 << 1
    UDP_SPORT = 1 << 2
    INIT2INIT_MMO = 1 << 3


class CqStatus(enum.IntEnum):
    """cqc.status"""

    OK = 0x0
    OVERFLOW = 0x9
    WRITE_FAIL = 0xA


class CqArm(enum.IntEnum):
    """cqc.st: which completion raises an event"""

    NONE = 0x0
    SOLICITED = 0x6
    ANY = 0x9
    FIRED = 0xA


class CqeSize(enum.IntEnum):
    """cqc.cqe_sz"""

    BYTES_64 = 0
    BYTES_128 = 1


class RqState(enum.IntEnum):
    """rqc.state, rmpc.state"""

    RST = 0
    RDY = 1
    ERR = 3


class WqType(enum.IntEnum):
    """wq.wq_type"""

    LINKED_LIST = 0
    CYCLIC = 1
    LINKED_LIST_STRIDING = 2
    CYCLIC_STRIDING = 3


class AccessMode(enum.IntEnum):
    """mkc.access_mode_1_0: what a memory key maps"""

    PA = 0
    MTT = 1
    KLMS = 2
    KSM = 3


class CapKind(enum.IntEnum):
    """What QUERY_HCA_CAP can be asked for, MLX5_CAP_*."""

    GENERAL = 0x00
    ETHERNET_OFFLOADS = 0x01
    ODP = 0x02
    ATOMIC = 0x03
    ROCE = 0x04
    NIC_FLOW_TABLE = 0x07
    ESWITCH_FLOW_TABLE = 0x08
    ESWITCH = 0x09
    QOS = 0x0C
    DEBUG = 0x0D
    DEVICE_MEM = 0x0F
    CRYPTO = 0x1A
    GENERAL_2 = 0x20


class ObjectType(enum.IntEnum):
    """general_obj_in_cmd_hdr.obj_type"""

    GENEVE_TLV_OPT = 0x000B
    DEK = 0x000C
    VIRTIO_NET_Q = 0x000D
    MATCH_DEFINER = 0x0018
    FLOW_METER = 0x000A
    AV_QP_MAPPING = 0x003A
    SCHEDULING_ELEMENT = 0x0040
    RESERVED_QPN = 0x002C

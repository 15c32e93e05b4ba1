"""Short forms of what the tests of the verbs ABI do with pyverbs again and again."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from pyverbs import enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

LOCAL = e.IBV_ACCESS_LOCAL_WRITE
REMOTE = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    """Check that a verb fails, and with this errno."""
    with pytest.raises(PyverbsRDMAError) as caught:
        yield
    got = caught.value.error_code
    assert got == code, f"{os.strerror(got)}, not {os.strerror(code)}"


def modify(qp: QP, attr: QPAttr, mask: int) -> int:
    """Modify a QP; return the errno, or 0."""
    try:
        qp.modify(attr, mask)
    except PyverbsRDMAError as x:
        return int(x.error_code)
    return 0


def init_attr(cq: CQ, qp_type: int = e.IBV_QPT_RC, recv_cq: CQ | None = None, **cap: Any) -> QPInitAttr:
    caps = {"max_send_wr": 8, "max_recv_wr": 8, "max_send_sge": 1, "max_recv_sge": 1} | cap
    return QPInitAttr(qp_type=qp_type, scq=cq, rcq=recv_cq or cq, cap=QPCap(**caps))


def address(context: Context, gid_index: int = 3, port: int = 1) -> AHAttr:
    """The address of a port itself."""
    route = GlobalRoute(dgid=context.query_gid(port, gid_index), sgid_index=gid_index)
    return AHAttr(port_num=port, is_global=1, gr=route)


def gid_text(gid: GID) -> str:
    return str(gid.gid)


INIT_MASK = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT
RTR_MASK = (
    e.IBV_QP_STATE
    | e.IBV_QP_AV
    | e.IBV_QP_PATH_MTU
    | e.IBV_QP_DEST_QPN
    | e.IBV_QP_RQ_PSN
    | e.IBV_QP_MAX_DEST_RD_ATOMIC
    | e.IBV_QP_MIN_RNR_TIMER
)
RTS_MASK = (
    e.IBV_QP_STATE
    | e.IBV_QP_TIMEOUT
    | e.IBV_QP_RETRY_CNT
    | e.IBV_QP_RNR_RETRY
    | e.IBV_QP_SQ_PSN
    | e.IBV_QP_MAX_QP_RD_ATOMIC
)


def full_attr(context: Context, dest_qpn: int = 1, gid_index: int = 3) -> QPAttr:
    """Every attribute with a value that is valid for it."""
    attr = QPAttr(port_num=1)
    attr.pkey_index = 0
    attr.qp_access_flags = REMOTE
    attr.qkey = 0x1234
    attr.path_mtu = e.IBV_MTU_1024
    attr.dest_qp_num = dest_qpn
    attr.rq_psn = 1
    attr.sq_psn = 1
    attr.max_rd_atomic = 1
    attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer = 12
    attr.timeout = 14
    attr.retry_cnt = 7
    attr.rnr_retry = 7
    attr.path_mig_state = e.IBV_MIG_MIGRATED
    attr.ah_attr = address(context, gid_index)
    return attr


__all__ = [
    "CQ",
    "LOCAL",
    "MR",
    "PD",
    "QP",
    "REMOTE",
    "Context",
    "address",
    "full_attr",
    "gid_text",
    "init_attr",
    "modify",
    "refused",
]

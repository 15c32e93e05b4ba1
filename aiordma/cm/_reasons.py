"""The reasons with which connection requests are rejected."""

from __future__ import annotations

import os

__all__ = ["CONSUMER", "NOBODY", "NO_RESOURCES", "TIMEOUT", "reason_text"]

NO_RESOURCES = 3
TIMEOUT = 4
NOBODY = 8
CONSUMER = 28

# enum ib_cm_rej_reason (kernel: include/rdma/ib_cm.h; InfiniBand Architecture Specification vol. 1, 12.6.7.2)
_REASONS = {
    1: "no QP available",
    2: "no EE context available",
    NO_RESOURCES: "no resources available",
    TIMEOUT: "the peer's connection manager gave up waiting",
    5: "an unsupported request",
    6: "an invalid communication id",
    7: "an invalid communication instance",
    NOBODY: "nothing listens on that port",
    9: "an invalid transport service type",
    10: "a stale connection",
    11: "no such RDC",
    12: "an invalid GID",
    13: "an invalid LID",
    14: "an invalid service level",
    15: "an invalid traffic class",
    16: "an invalid hop limit",
    17: "an invalid packet rate",
    18: "an invalid alternate GID",
    19: "an invalid alternate LID",
    20: "an invalid alternate service level",
    21: "an invalid alternate traffic class",
    22: "an invalid alternate hop limit",
    23: "an invalid alternate packet rate",
    24: "redirected to another port and connection manager",
    25: "redirected to another port",
    26: "an invalid path MTU",
    27: "too many RDMA reads asked for",
    CONSUMER: "the program at the other side said no",
    29: "an invalid RNR retry count",
    30: "a duplicate communication id",
    31: "an unknown version of the connection manager's messages",
    32: "an invalid flow label",
    33: "an invalid alternate flow label",
    35: "vendor options that aren't supported",
}


def reason_text(status: int) -> str:
    """What a status of RDMA_CM_EVENT_REJECTED says. iWARP's are negative errnos."""
    if status < 0:
        return os.strerror(-status)
    return _REASONS.get(status, "a reason that this version of aiordma doesn't know")

"""What a completion says was done."""

from __future__ import annotations

import enum

__all__ = ["WcOpcode"]


class WcOpcode(enum.IntEnum):
    """enum ibv_wc_opcode (ibv_poll_cq(3)); ``completion.opcode`` is one of these numbers.

    The DRIVER ones are the provider's; mlx5's names for them are UMR, RAW_WQE and MEMCPY (mlx5dv.h).
    """

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    TSO = 7
    FLUSH = 8
    ATOMIC_WRITE = 9
    RECV = 128
    RECV_RDMA_WITH_IMM = 129
    TM_ADD = 130
    TM_DEL = 131
    TM_SYNC = 132
    TM_RECV = 133
    TM_NO_TAG = 134
    DRIVER1 = 135
    DRIVER2 = 136
    DRIVER3 = 137

    UMR = DRIVER1
    RAW_WQE = DRIVER2
    MEMCPY = DRIVER3

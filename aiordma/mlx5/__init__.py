"""What only mlx5 (ConnectX) devices have: UMR, DMA memcpy, raw WQEs, DC transport, DEVX."""

from aiordma.mlx5.dc import DCInitiator, DcPeer, DCTarget, DCTInfo, create_dc_initiator, create_dc_target
from aiordma.mlx5.dci_pool import DCIPool, Lane, LaneStatistics, PoolOperation, create_dci_pool, least_loaded, sticky
from aiordma.mlx5.memcpy import DmaEngine, create_dma_engine
from aiordma.mlx5.qp import Mlx5Options, Mlx5QueuePair, create_qp
from aiordma.mlx5.raw_wqe import Wqe
from aiordma.mlx5.umr import Mkey, create_mkey

__all__ = [
    "DCIPool",
    "Lane",
    "LaneStatistics",
    "PoolOperation",
    "create_dci_pool",
    "least_loaded",
    "sticky",
    "DCInitiator",
    "DCTInfo",
    "DCTarget",
    "DcPeer",
    "create_dc_initiator",
    "create_dc_target",
    "DmaEngine",
    "Mkey",
    "Mlx5Options",
    "Mlx5QueuePair",
    "Wqe",
    "create_dma_engine",
    "create_mkey",
    "create_qp",
]

"""RDMA for asyncio, uvloop and trio: ``await qp.rdma_write(local, remote)``.

See :func:`open_device` for where to begin.
"""

from aiordma import cm, exchange
from aiordma._offload import Pending
from aiordma.access import Access
from aiordma.cm import Connection, Listener, Request, connect, listen
from aiordma.completion import Completion, CompletionEngine
from aiordma.device import Device, DeviceInfo, list_devices, open_device
from aiordma.errors import *  # noqa: F403
from aiordma.errors import __all__ as _errors
from aiordma.events import AsyncEvent, Events, EventType
from aiordma.gid import Gid, GidType
from aiordma.info import QPInfo
from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer
from aiordma.opcodes import WcOpcode
from aiordma.qp import Batch, QPConfig, QueuePair
from aiordma.srq import SharedReceiveQueue

__version__ = "0.1.0"

__all__ = [
    "Access",
    "AsyncEvent",
    "Batch",
    "Completion",
    "CompletionEngine",
    "Connection",
    "Device",
    "DeviceInfo",
    "EventType",
    "Events",
    "Gid",
    "GidType",
    "Listener",
    "MemoryRegion",
    "MemorySlice",
    "Pending",
    "QPConfig",
    "QPInfo",
    "QueuePair",
    "RemoteBuffer",
    "Request",
    "SharedReceiveQueue",
    "WcOpcode",
    "cm",
    "connect",
    "exchange",
    "listen",
    "list_devices",
    "open_device",
    *_errors,
]

"""RDMA for asyncio, uvloop and trio: ``await qp.rdma_write(local, remote)``.

See :func:`open_device` for where to begin.
"""

from aiordma import _linking
from aiordma.access import Access
from aiordma.errors import *  # noqa: F403
from aiordma.errors import __all__ as _errors
from aiordma.gid import Gid, GidType

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

try:
    from aiordma import cm, exchange
    from aiordma._offload import Pending
    from aiordma.cm import Connection, Listener, Request, connect, listen
    from aiordma.completion import Completion, CompletionEngine
    from aiordma.device import Device, DeviceInfo, list_devices, open_device
    from aiordma.events import AsyncEvent, Events, EventType
    from aiordma.info import QPInfo
    from aiordma.memory import MemoryRegion, MemorySlice, RemoteBuffer
    from aiordma.opcodes import WcOpcode
    from aiordma.qp import Batch, QPConfig, QueuePair
    from aiordma.srq import SharedReceiveQueue
except ImportError as _e:
    if _linking.is_of_sources(_e):
        raise ModuleNotFoundError(f"{_e}: {_linking.OF_SOURCES}", name=_e.name, path=__file__) from None
    if not _linking.is_about_rdma_core(_e):
        raise
    # A program that can do without RDMA, and `aiordma doctor`, must be able to import the package where libibverbs is
    # missing or the wrong one. The first use of what needs it says what is wrong. Not a plain `def __getattr__`, which
    # would make every attribute a valid one to type checkers.
    globals()["__getattr__"] = _linking.refusal(
        _e, {*__all__, "_cm", "_control", "_cq", "_devx", "_mlx5", "_operation", "_post", "_workqueue"}
    )

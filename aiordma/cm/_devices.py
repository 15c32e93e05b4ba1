"""Devices that connections open for themselves: one for all connections of a loop, closed with the last of them."""

from __future__ import annotations

from aiordma.cm._shared import Lease, share
from aiordma.device import Device, open_device
from aiordma.errors import UsageError

__all__ = ["given", "lease"]


async def lease(name: str | None, port: int = 1) -> Lease[Device]:
    """The device of that name, opened, or shared with this loop's other connections."""
    return await share(("device", name, port), lambda: open_device(name, port=port))


def given(device: Device | None) -> Lease[Device] | None:
    """The lease of a device that the user opened."""
    if device is None:
        return None
    if not isinstance(device, Device):
        raise UsageError(f"device: a Device, not {type(device).__name__} (await aiordma.open_device(...))")
    device.control.hooks.verify()
    return Lease(device)

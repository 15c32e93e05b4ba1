"""The event channel of a loop's ids: its descriptor on the loop, its events taken in a worker thread."""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable
from typing import Any

from aiordma import _backends, _cm
from aiordma._backends import Watch
from aiordma._offload import Control, Pending, in_thread, in_use, unused, using
from aiordma._opening import find_devices
from aiordma.cm._shared import Lease, share
from aiordma.errors import DeviceNotFoundError, UnsupportedError, VerbsError

__all__ = ["Channel", "CmEvent", "channel"]


class CmEvent(enum.IntEnum):
    """enum rdma_cm_event_type (rdma_get_cm_event(3))."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


# (event, status, (responder_resources, initiator_depth, qp_num), private_data, the new id of a request)
Handler = Callable[[int, int, tuple[int, int, int], bytes, "_cm.Id | None"], object]


class Channel:
    """Events are copied and acknowledged where they are taken, and then given to the handler of their id's token."""

    def __init__(self, control: Control, native: _cm.EventChannel) -> None:
        self.native = native
        self._control = control
        self._handlers: dict[int, Handler] = {}
        self._watch: Watch | None = control.backend.watch(native.fd, self._on_readable)
        self._closing: Pending[None] | None = None

    def register(self, token: int, handler: Handler) -> None:
        self._handlers[token] = handler

    def unregister(self, token: int) -> None:
        self._handlers.pop(token, None)

    @property
    def ids(self) -> int:
        """Ids that have a handler."""
        return len(self._handlers)

    # ---------------------------------------------------------------- events

    def _on_readable(self) -> None:
        # Taking an event asks the kernel more, and may open a device, so it isn't done on the loop. Meanwhile the
        # descriptor stays readable.
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
            Pending(self._control, self._take())

    async def _take(self) -> None:
        with using(self._control, id(self)):
            try:
                events = await in_thread(self._control, self.native.drain)
            except VerbsError as e:
                self._control.backend.report("events of the connection manager can't be taken", e)
                return
            if self._closing is None:
                self._watch = self._control.backend.watch(self.native.fd, self._on_readable)
            for token, *event in events:
                try:
                    self._dispatch(token, event)
                except Exception as e:
                    # The other events have nothing to do with it.
                    self._control.backend.report("an event of the connection manager can't be handled", e)

    def _dispatch(self, token: int, event: list[Any]) -> None:
        handler = self._handlers.get(token)
        if handler is not None:
            handler(*event)
        elif event[-1] is not None:
            # A request to a listener that was closed since: destroying the id rejects it.
            Pending(self._control, in_use(self._control, id(self), event[-1].destroy))

    # ---------------------------------------------------------------- its end

    @property
    def closed(self) -> bool:
        return self._closing is not None

    def close(self) -> Pending[None]:
        """Once no id is left."""
        if self._closing is None:
            watch, self._watch = self._watch, None
            if watch is not None:
                watch.close()
            self._closing = Pending(self._control, self._close())
        return self._closing

    async def _close(self) -> None:
        await unused(self._control, id(self))
        await in_thread(self._control, self.native.destroy)

    def close_now(self) -> None:
        """Without a loop, whose watches are its own business."""
        self._watch = None
        self.native.destroy()


def _open(control: Control) -> Pending[Channel]:
    return Pending(control, _open_channel(control), dispose=True)


async def _open_channel(control: Control) -> Channel:
    return Channel(control, await in_thread(control, _open_native))


def _open_native() -> _cm.EventChannel:
    try:
        # librdmacm finds no channel where there are no devices, and the emulated NIC may have to be attached first.
        find_devices()
        return _cm.EventChannel()
    except DeviceNotFoundError as e:
        raise UnsupportedError("this system", "rdma_cm", str(e)) from e
    except VerbsError as e:
        hint = {
            errno.ENODEV: "it has no RDMA device that the connection manager knows (is the module rdma_ucm loaded?)",
            errno.ENOENT: "there is no /dev/infiniband/rdma_cm (is the module rdma_ucm loaded?)",
            errno.ENXIO: "there is nothing behind /dev/infiniband/rdma_cm (is the module rdma_ucm loaded?)",
            errno.EACCES: "/dev/infiniband/rdma_cm may not be opened by this user",
            errno.EPERM: "/dev/infiniband/rdma_cm may not be opened by this user, or is of another version",
        }.get(e.errno or 0)
        if hint is None:
            raise
        raise UnsupportedError("this system", "rdma_cm", f"{hint} ({e})") from e


async def channel() -> Lease[Channel]:
    """This loop's channel; :class:`UnsupportedError` where the system has no rdma_cm."""
    return await share("channel", lambda: _open(Control(_backends.current())))

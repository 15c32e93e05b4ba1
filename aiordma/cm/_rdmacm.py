"""Connections over rdma_cm, with QPs that are aiordma's own: the ids know only their numbers (rdma_establish(3))."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from aiordma import _cm
from aiordma._offload import Control, Pending, in_thread, in_use, outcome, unused, using
from aiordma.cm._address import Address, Endpoint, Via, as_address
from aiordma.cm._channel import Channel, CmEvent
from aiordma.cm._core import Action, Event
from aiordma.cm._devices import lease
from aiordma.cm._endpoint import REPLY_DATA, End, Offer, padded
from aiordma.cm._reasons import CONSUMER, reason_text
from aiordma.cm._shared import Lease
from aiordma.device import Device
from aiordma.errors import (
    ConnectError,
    DeviceFatalError,
    DisconnectedError,
    RejectedError,
    ResolutionError,
    UnreachableError,
    UsageError,
    VerbsError,
)
from aiordma.qp import INIT, RTR, RTS, QueuePair

__all__ = ["RdmaLink"]

P = ParamSpec("P")
T = TypeVar("T")

# What precedes the private data of a rejection that says more than the CM's reason can: rdma_reject(3) sends always 28.
_REFUSAL = struct.Struct("!4sHBx")
_MAGIC = b"aior"
# The time that the kernel gets for resolving, where the user sets none.
_RESOLVE_SECONDS = 30.0
_ADDRESS_ERRORS = {errno.ENODEV, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}
_REACH_ERRORS = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNREFUSED}


def _no_address(where: str, what: str, code: int) -> ConnectError:
    said = os.strerror(code)
    if code in _REACH_ERRORS:
        return UnreachableError(f"{where} isn't reached: {what}: {said}")
    return ResolutionError(f"no RDMA device of this system leads to {where}: {what}: {said}")


def refusal_data(status: int, reason: int, data: bytes) -> bytes:
    """The private data of a rejection."""
    return data if status == CONSUMER and not reason else _REFUSAL.pack(_MAGIC, reason, status) + data


def read_refusal(status: int, data: bytes) -> tuple[int, int, bytes]:
    """The status, reason and private data that refusal_data() took."""
    if status == CONSUMER and data.startswith(_MAGIC) and len(data) >= _REFUSAL.size:
        _, reason, said = _REFUSAL.unpack_from(data)
        return said, reason, data[_REFUSAL.size :]
    return status, 0, data


class RdmaLink:
    """See :class:`aiordma.cm._endpoint.Link`."""

    via: Via = "rdma_cm"

    def __init__(
        self, control: Control, channel: Lease[Channel], endpoint: Endpoint | None = None, id_: _cm.Id | None = None
    ) -> None:
        self._control = control
        self._channel = channel
        self._endpoint = endpoint
        self._id = id_
        self._end: End | None = None
        self._local = self._remote = Address("", 0)
        self.refusal: tuple[int, int, bytes] = (CONSUMER, 0, b"")

    @property
    def _there(self) -> _cm.Id:
        assert self._id is not None
        return self._id

    def _learn_addresses(self) -> None:
        local, peer = self._there.local, self._there.peer
        if local is not None:
            self._local = as_address(local)
        if peer is not None:
            self._remote = as_address(peer)

    @property
    def local_address(self) -> Address:
        return self._local

    @property
    def remote_address(self) -> Address:
        return self._remote

    def attach(self, end: End) -> None:
        """Events are for ``end`` from now on."""
        self._end = end
        self._learn_addresses()
        self._channel.thing.register(self._there.token, self._on_event)

    # ---------------------------------------------------------------- the device

    async def device(self) -> Lease[Device]:
        name = self._there.device_name
        if name is None:
            raise ResolutionError("the connection's address belongs to no RDMA device")
        return await lease(name, self._there.port_num)

    def check_device(self, device: Device) -> None:
        name, port = self._there.device_name, self._there.port_num
        if (name, port) != (device.name, device.port):
            raise UsageError(
                f"the connection runs over port {port} of {name}, and device is port {device.port} of {device.name}: open "
                "that one, or give no device"
            )

    # ---------------------------------------------------------------- steps, in the user's task

    async def _call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a worker thread. When this is cancelled the call goes on; destroy() waits for its end."""
        return await Pending(self._control, in_use(self._control, id(self), fn, *args, **kwargs))

    async def step(self, action: Action, end: End) -> None:
        qp, plan = end.qp, end.plan
        milliseconds = int((_RESOLVE_SECONDS if end.timeout is None else max(end.timeout, 0.001)) * 1000)
        if action is Action.RESOLVE:
            await self._call(self._make)
            self.attach(end)
            assert self._endpoint is not None
            try:
                await self._call(self._there.resolve_addr, self._endpoint, min(milliseconds, 1 << 30))
            except VerbsError as e:
                if e.errno in _ADDRESS_ERRORS | _REACH_ERRORS:
                    raise _no_address(end.where, "rdma_resolve_addr", e.errno or 0) from e
                raise
        elif action is Action.ROUTE:
            await self._call(self._there.resolve_route, min(milliseconds, 1 << 30))
        else:
            assert qp is not None
            assert plan is not None
            offer, config = end.negotiated, plan.config
            if action is Action.REQUEST:
                self._learn_addresses()
                await self._call(
                    self._there.connect,
                    plan.private_data,
                    offer.served,
                    offer.initiated,
                    config.retry_cnt,
                    config.rnr_retry,
                    plan.srq is not None,
                    qp.qp_num,
                )
            elif action is Action.READY:
                if not qp.device.is_iwarp:
                    await self._call_ready(end, qp)
            elif action is Action.CONFIRM:
                if qp.device.is_iwarp:
                    qp.note_ready()
                else:
                    await self._met(end, self._there.establish)
            else:
                await self._met(
                    end,
                    self._there.accept,
                    plan.private_data,
                    offer.served,
                    offer.initiated,
                    config.rnr_retry,
                    plan.srq is not None,
                    qp.qp_num,
                )
                if qp.device.is_iwarp:
                    qp.note_ready()

    async def _met(self, end: End, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """A call that the CM refuses when the peer has gone meanwhile."""
        try:
            await self._call(fn, *args, **kwargs)
        except VerbsError as e:
            raise self._gave_up(end, e) from e

    def _gave_up(self, end: End, error: VerbsError) -> Exception:
        """What to raise for an error of the CM: that the id is in no state for the call says that the peer has gone."""
        if error.errno in (errno.EINVAL, errno.ENOTCONN, errno.ECONNRESET):
            return DisconnectedError(f"{end.where}: the peer gave up while the connection was made ({error})")
        return error

    def _make(self) -> None:
        self._id = _cm.Id(self._channel.thing.native)

    async def _call_ready(self, end: End, qp: QueuePair) -> None:
        async def ready() -> None:
            with using(self._control, id(self)):  # the id is asked in the QP's worker thread
                await outcome(qp.transition(lambda: self._transitions(end, qp)))

        try:
            await Pending(self._control, ready())
        except VerbsError as e:
            if e.verb == "rdma_init_qp_attr":
                raise self._gave_up(end, e) from e
            raise

    def _transitions(self, end: End, qp: QueuePair) -> Iterator[tuple[int, dict[str, Any]]]:
        """In a worker thread: what the CM knows of the path and the peer, and of the rest what the config says."""
        assert end.plan is not None
        config, offer = end.plan.config, end.negotiated
        mask, values = self._there.qp_attributes(INIT)
        if values["pkey_index"]:
            # create_qp() chose the first partition.
            values["qp_access_flags"] = int(config.access & qp.device.remote_access)
            yield mask, values
        mask, values = self._there.qp_attributes(RTR)
        values["min_rnr_timer"] = config.min_rnr_timer
        values["max_dest_rd_atomic"] = offer.served
        for field, name in (("traffic_class", "traffic_class"), ("flow_label", "flow_label"), ("sl", "service_level")):
            values[field] = getattr(config, name) or values[field]
        values["_detail"] = f"QP {qp.qp_num:#x} to RTR, {end.where}"
        yield mask, values
        mask, values = self._there.qp_attributes(RTS)
        values["timeout"] = config.timeout
        values["max_rd_atomic"] = offer.initiated
        values["_detail"] = f"QP {qp.qp_num:#x} to RTS, {end.where}"
        yield mask, values

    # ---------------------------------------------------------------- events, on the loop's thread

    def _on_event(
        self, event: int, status: int, parameters: tuple[int, int, int], data: bytes, _: _cm.Id | None
    ) -> None:
        end = self._end
        assert end is not None
        if event == CmEvent.ADDR_RESOLVED:
            end.event(Event.RESOLVED)
        elif event == CmEvent.ROUTE_RESOLVED:
            end.event(Event.ROUTED)
        elif event == CmEvent.CONNECT_RESPONSE or (event == CmEvent.ESTABLISHED and self._answers_whole(end)):
            served, initiated, _number = parameters
            end.peer_offer = Offer(initiated, served)
            end.private_data = padded(data, REPLY_DATA)
            end.event(Event.RESPONSE)
        elif event == CmEvent.ESTABLISHED:
            end.event(Event.ESTABLISHED)
        elif event == CmEvent.DISCONNECTED:
            end.event(Event.DISCONNECTED, DisconnectedError(f"{end.where}: the peer disconnected"))
        elif event in (CmEvent.ADDR_ERROR, CmEvent.ROUTE_ERROR):
            end.event(Event.FAILED, _no_address(end.where, CmEvent(event).name, abs(status)))
        elif event == CmEvent.REJECTED:
            if self._endpoint is None:
                # The side that asks rejects, too, what it doesn't want any more when the answer comes.
                end.event(Event.FAILED, DisconnectedError(f"{end.where}: the peer gave up while it was accepted"))
                return
            found, reason, said = read_refusal(status, data)
            end.event(Event.FAILED, RejectedError(end.where, found, reason_text(found), reason, said))
        elif event in (CmEvent.UNREACHABLE, CmEvent.CONNECT_ERROR):
            why = os.strerror(abs(status)) if status else "no reason is known"
            end.event(Event.FAILED, UnreachableError(f"{end.where} made no connection: {CmEvent(event).name}: {why}"))
        elif event == CmEvent.DEVICE_REMOVAL:
            end.event(Event.FAILED, DeviceFatalError(f"{end.where}: the device was removed"))
        # ADDR_CHANGE tells of bonding, TIMEWAIT_EXIT that the QP's number is free again: there is nothing to do.

    def _answers_whole(self, end: End) -> bool:
        """Whether the answer to this side's request is the connection: iWARP's has no third message, and the kernel's iw_cm
        has taken the QP to RTS by then (cma_iw_handler() in drivers/infiniband/core/cma.c)."""
        return self._endpoint is not None and end.qp is not None and end.qp.device.is_iwarp

    # ---------------------------------------------------------------- control operations

    async def reject(self) -> None:
        await in_use(self._control, id(self), self._there.reject, refusal_data(*self.refusal))

    async def disconnect(self) -> None:
        await in_use(self._control, id(self), self._there.disconnect)

    async def destroy(self) -> None:
        await unused(self._control, id(self))
        if self._id is not None:
            self._channel.thing.unregister(self._id.token)
            await in_thread(self._control, self._id.destroy)
        closing = self._channel.release()
        if closing is not None:
            await outcome(closing)

    def destroy_now(self) -> None:
        if self._id is not None:
            self._id.destroy()
        self._channel.release_now()

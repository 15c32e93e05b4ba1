"""The listening side of connections over rdma_cm."""

from __future__ import annotations

import errno
import weakref

from aiordma import _cm
from aiordma._offload import Control, Pending, in_thread, outcome
from aiordma.cm._address import Address, Endpoint, Via, as_address, text
from aiordma.cm._channel import Channel, CmEvent
from aiordma.cm._endpoint import REQUEST_DATA, End, Offer, padded
from aiordma.cm._rdmacm import RdmaLink
from aiordma.cm._reasons import CONSUMER
from aiordma.cm._shared import Lease
from aiordma.cm.listener import Listener, Request
from aiordma.errors import VerbsError

__all__ = ["RdmaSource", "bind_ids"]


def bind_ids(channel: _cm.EventChannel, endpoints: list[Endpoint], wildcard: bool) -> list[_cm.Id]:
    """In a worker thread: ids that are bound to all of ``endpoints``, on one port; of a wildcard's only to the first that
    this system has. They don't listen yet.
    """
    found: list[_cm.Id] = []
    problem: VerbsError | None = None
    try:
        for endpoint in endpoints:
            if found and endpoint.sockaddr[1] == 0:
                local = found[0].local
                assert local is not None
                endpoint = Endpoint(endpoint.family, (endpoint.sockaddr[0], local[1], *endpoint.sockaddr[2:]))
            made = _cm.Id(channel)
            try:
                made.bind(endpoint)
            except BaseException as e:
                made.destroy()
                if not isinstance(e, VerbsError) or e.errno not in (
                    errno.EAFNOSUPPORT,
                    errno.EADDRNOTAVAIL,
                    errno.ENODEV,
                ):
                    raise
                problem = e
            else:
                found.append(made)
                if wildcard:
                    break
    except BaseException:
        for made in found:
            made.destroy()
        raise
    if not found:
        assert problem is not None
        raise problem
    return found


# The longest that the kernel makes it, unless an administrator says otherwise (core/ucma.c: max_backlog).
_BACKLOG = 1024


class RdmaSource:
    """See :class:`aiordma.cm.listener.Source`."""

    via: Via = "rdma_cm"

    def __init__(self, control: Control, channel: Lease[Channel], ids: list[_cm.Id], listener: Listener) -> None:
        self._control = control
        self._channel = channel
        self._ids = ids
        self._listener = weakref.ref(listener)
        self._addresses = [as_address(made.local) for made in ids if made.local is not None]
        for made in ids:
            channel.thing.register(made.token, self._on_event)

    async def listen(self) -> None:
        """rdma_listen(3), off the loop."""

        def run() -> None:
            # The kernel's own backlog, of events that nobody has taken yet, as long as it may be: what doesn't fit in it is
            # dropped without a word, and the peer tries again after seconds. The Listener's rejects.
            for made in self._ids:
                made.listen(_BACKLOG)

        await Pending(self._control, in_thread(self._control, run))

    @property
    def addresses(self) -> list[Address]:
        return self._addresses

    def _on_event(
        self, event: int, status: int, parameters: tuple[int, int, int], data: bytes, new: _cm.Id | None
    ) -> None:
        listener = self._listener()
        if event != CmEvent.CONNECT_REQUEST or new is None:
            return
        link = RdmaLink(self._control, self._channel.another(), id_=new)
        end = End(link, None, active=False, where="a request")
        link.attach(end)
        end.where = f"the request from {text(link.remote_address)}"
        served, initiated, _ = parameters
        end.peer_offer = Offer(initiated, served)
        end.private_data = padded(data, REQUEST_DATA)
        request = Request(end)
        if listener is None:
            request.refuse_now(CONSUMER, "the listener was dropped")
        else:
            listener.put(request)

    def stop(self) -> None:
        for made in self._ids:
            self._channel.thing.unregister(made.token)

    async def destroy(self) -> None:
        ids, self._ids = self._ids, []
        for made in ids:
            await in_thread(self._control, made.destroy)
        closing = self._channel.release()
        if closing is not None:
            await outcome(closing)

    def destroy_now(self) -> None:
        ids, self._ids = self._ids, []
        for made in ids:
            made.destroy()
        self._channel.release_now()

"""pyverbs connection identifiers on the emulated NIC, in event channel form: nothing in here waits for ever."""

import contextlib
import os
import select
from dataclasses import dataclass, field
from typing import Any

import pyverbs.cm_enums as ce
import pyverbs.enums as en
from emulated.cm_abi import Cm
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.qp import QPCap, QPInitAttr

TIMEOUT_MS = 20_000


def _sockets() -> set[int]:
    """The connection manager's descriptors are ends of socket pairs."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                found.add(int(fd))
    return found


def free_port() -> int:
    """A port that nobody has, in all likelihood a moment later too."""
    with Cm() as cm:
        cm_id = cm.create()
        cm.bind(cm_id)
        return cm.port(cm_id)


class Channel:
    """An event channel with its descriptor."""

    def __init__(self) -> None:
        before = _sockets()
        self.channel = CMEventChannel()  # pyverbs doesn't show its descriptor
        self.fd = min(_sockets() - before)

    def readable(self, timeout_ms: int = 0) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def event(self) -> CMEvent:
        """The next event, which the caller acknowledges."""
        assert self.readable(TIMEOUT_MS), "no event"
        return CMEvent(self.channel)

    def expect(self, *types: int) -> list[CMEvent]:
        """The next events, acknowledged; they must be of these types, in order."""
        events = []
        for kind in types:
            event = self.event()
            assert event.event_type == kind, event.event_str()
            event.ack_cm_event()
            events.append(event)
        return events

    def close(self) -> None:
        self.channel.close()


def qp_init(qp_type: int = en.IBV_QPT_RC) -> QPInitAttr:
    return QPInitAttr(qp_type=qp_type, cap=QPCap(max_recv_wr=8, max_send_wr=8))


def listen(channel: Channel, address: str = "127.0.0.1", port: int = 0, *, backlog: int = 8) -> CMID:
    listener = CMID(creator=channel.channel, port_space=ce.RDMA_PS_TCP)
    listener.bind_addr(AddrInfo(src=address, src_service=str(port), port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE))
    listener.listen(backlog)
    return listener


def resolve(channel: Channel, port: int, address: str = "127.0.0.1") -> CMID:
    """An identifier that may connect."""
    cm_id = CMID(creator=channel.channel, port_space=ce.RDMA_PS_TCP)
    cm_id.resolve_addr(AddrInfo(dst=address, dst_service=str(port), port_space=ce.RDMA_PS_TCP), 2000)
    channel.expect(ce.RDMA_CM_EVENT_ADDR_RESOLVED)
    cm_id.resolve_route(2000)
    channel.expect(ce.RDMA_CM_EVENT_ROUTE_RESOLVED)
    return cm_id


@dataclass
class Pair:
    """Two connected ends in this process, and who listens."""

    listener: CMID
    client: CMID
    server: CMID
    client_channel: Channel
    server_channel: Channel
    others: list[Any] = field(default_factory=list)

    def close(self) -> None:
        for thing in (*self.others, self.client, self.server, self.listener, self.client_channel, self.server_channel):
            thing.close()


def connect(port: int, address: str = "127.0.0.1") -> Pair:
    server_channel, client_channel = Channel(), Channel()
    listener = listen(server_channel, address, port)
    client = resolve(client_channel, port, address)
    client.create_qp(qp_init())
    client.connect(ConnParam())
    request = server_channel.event()
    assert request.event_type == ce.RDMA_CM_EVENT_CONNECT_REQUEST, request.event_str()
    server = CMID(creator=request, listen_id=listener)
    request.ack_cm_event()
    server.create_qp(qp_init())
    server.accept(ConnParam())
    client_channel.expect(ce.RDMA_CM_EVENT_ESTABLISHED)
    server_channel.expect(ce.RDMA_CM_EVENT_ESTABLISHED)
    return Pair(listener, client, server, client_channel, server_channel)

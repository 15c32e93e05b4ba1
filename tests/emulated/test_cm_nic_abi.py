"""The connection manager at its ABI: each state, event, value and errno as Linux's ucma, cma and cm have them."""

import errno
import os
import select
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import cm_abi as abi
from emulated.cm_abi import Cm, Event, establish, params, sockaddr

from aiordma import emulator

ALL = ("127.0.0.1", "::1")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that descriptors, identifiers and threads go with the test."""
    before = emulator.connection_counts()
    yield
    assert emulator.connection_counts() == before


@pytest.fixture
def server() -> Iterator[Cm]:
    with Cm() as cm:
        yield cm


@pytest.fixture
def client() -> Iterator[Cm]:
    with Cm() as cm:
        yield cm


# ---------------------------------------------------------------- connections


@pytest.mark.parametrize("address", ALL)
def test_the_whole_life_of_a_connection(server: Cm, client: Cm, address: str) -> None:
    listener = server.listener(address)
    mine = client.ready(server.port(listener), address)
    client.connect(mine, params(0x111, b"hello", responder_resources=7, initiator_depth=5), ece=(1, 2))

    request = server.expect(abi.CONNECT_REQUEST)
    assert request.uid == 0x77, "of the listener"
    assert request.qp_num == 0x111
    assert request.private_data == b"hello" + bytes(51), "always all that a REQ has room for"
    assert request.parameters == {
        "srq": 0,
        "responder_resources": 5,  # what the peer asks for at a time, we answer
        "initiator_depth": 7,
        "flow_control": 1,
        "retry": 6,
        "rnr_retry": 5,
    }
    assert request.ece == (1, 2)
    theirs = request.id
    server.accept(theirs, params(0x222, b"welcome", responder_resources=4, initiator_depth=2, rnr_retry=3), ece=(1, 3))

    response = client.expect(abi.CONNECT_RESPONSE)
    assert response.qp_num == 0x222
    assert response.private_data == b"welcome" + bytes(189)
    assert response.parameters["responder_resources"] == 2
    assert response.parameters["initiator_depth"] == 4
    assert response.ece == (1, 3)
    assert not server.readable(), "established only with the RTU"
    client.establish(mine)
    assert server.expect(abi.ESTABLISHED).uid == 0x88

    here, there = client.qp_attr(mine, abi.RTR), server.qp_attr(theirs, abi.RTR)
    assert (here["dest_qp_num"], there["dest_qp_num"]) == (0x222, 0x111)
    assert (here["max_dest_rd_atomic"], there["max_dest_rd_atomic"]) == (2, 4)
    sends, receives = client.qp_attr(mine, abi.RTS), server.qp_attr(theirs, abi.RTS)
    assert (sends["max_rd_atomic"], receives["max_rd_atomic"]) == (4, 2)
    assert (sends["sq_psn"], receives["sq_psn"]) == (there["rq_psn"], here["rq_psn"])
    assert (sends["retry"], receives["retry"]) == (6, 6)
    assert (sends["rnr_retry"], receives["rnr_retry"]) == (3, 5)
    assert sends["timeout"] == receives["timeout"] == 18

    client.disconnect(mine)
    assert server.expect(abi.DISCONNECTED).id == theirs
    assert not client.readable()
    server.disconnect(theirs)
    client.expect(abi.DISCONNECTED)
    # net of the ack timeout, 4.096 us << 18
    client.expect(abi.TIMEWAIT_EXIT)
    server.expect(abi.TIMEWAIT_EXIT)
    assert client.destroy(mine) == 5
    assert server.destroy(theirs) == 3, "the request was its listener's event"
    assert server.destroy(listener) == 1


def test_a_connection_within_the_device_of_an_address(server: Cm, client: Cm) -> None:
    listener = server.listener("192.0.2.3")
    mine = client.ready(server.port(listener), "192.0.2.3")
    guid, source, _ = client.query_addr(mine)
    assert guid == 0x5CFF_FE00_0003, "mlx5_1 has it"
    assert source[4:8] == bytes([192, 0, 2, 3])
    other = client.create()
    client.resolve_addr(other, "192.0.2.3", server.port(listener), "192.0.2.1")
    client.expect(abi.ADDR_RESOLVED)
    assert client.query_addr(other)[0] == 0x5CFF_FE00_0001, "a source chooses the device"


def test_a_reject_carries_its_reason_and_data(server: Cm, client: Cm) -> None:
    listener = server.listener()
    mine = client.ready(server.port(listener))
    client.connect(mine)
    theirs = server.expect(abi.CONNECT_REQUEST).id
    assert server.error("reject", theirs, reason=8) == errno.EINVAL, "not one that an application may give"
    server.reject(theirs, b"no room")
    event = client.expect(abi.REJECTED, abi.CONSUMER_DEFINED)
    assert event.private_data == b"no room" + bytes(141)
    assert server.error("reject", theirs) == errno.EINVAL, "it's over"
    again = client.ready(server.port(listener))
    client.connect(again)
    server.reject(server.expect(abi.CONNECT_REQUEST).id, reason=35)
    client.expect(abi.REJECTED, 35)


def test_nobody_listens(server: Cm, client: Cm) -> None:
    bound = server.create()
    server.bind(bound)
    for port in (server.port(bound), 9):
        mine = client.ready(port)
        client.connect(mine)
        event = client.expect(abi.REJECTED, abi.INVALID_SERVICE_ID)
        assert event.private_data == bytes(148)


def test_a_listener_of_another_address_refuses(server: Cm, client: Cm) -> None:
    listener = server.listener("127.0.0.1")
    for address in ("127.0.0.2", "::1"):
        mine = client.ready(server.port(listener), address)
        client.connect(mine)
        client.expect(abi.REJECTED, abi.CONSUMER_DEFINED)


@pytest.mark.parametrize(("wildcard", "only", "takes"), [("0.0.0.0", None, [4]), ("::", 0, [4, 6]), ("::", 1, [6])])
def test_wildcards(server: Cm, client: Cm, wildcard: str, only: int | None, takes: list[int]) -> None:
    listener = server.create()
    if only is not None:
        server.option(listener, abi.AFONLY, struct.pack("=i", only))
    server.bind(listener, wildcard)
    server.listen(listener)
    assert server.query_addr(listener)[0] == 0, "bound to no device"
    for version, address in ((4, "127.0.0.1"), (6, "::1")):
        mine = client.ready(server.port(listener), address)
        client.connect(mine)
        if version not in takes:
            client.expect(abi.REJECTED, abi.CONSUMER_DEFINED)
            continue
        theirs = server.expect(abi.CONNECT_REQUEST).id
        guid, source, destination = server.query_addr(theirs)
        assert guid == 0x5CFF_FE00_0001
        assert source == sockaddr(address, server.port(listener)), "of the request, not of the listener"
        assert destination == sockaddr(address, client.port(mine))


def test_a_full_backlog_keeps_a_request_until_there_is_room(server: Cm, client: Cm) -> None:
    listener = server.listener(backlog=2)
    port = server.port(listener)
    ids = [client.ready(port) for _ in range(3)]
    for id in ids:
        client.connect(id)
    first = server.expect(abi.CONNECT_REQUEST)
    second = server.expect(abi.CONNECT_REQUEST)
    assert not server.readable()
    assert not client.readable(), "neither delivered nor refused: it's asked again later"
    for event in (first, second):
        server.accept(event.id)
        client.expect(abi.CONNECT_RESPONSE)


def test_requests_outlive_their_listener_once_fetched(server: Cm, client: Cm) -> None:
    listener = server.listener()
    port = server.port(listener)
    fetched, waiting = client.ready(port, uid=1), client.ready(port, uid=2)
    client.connect(fetched)
    theirs = server.expect(abi.CONNECT_REQUEST).id
    client.connect(waiting)
    assert server.readable()
    assert server.destroy(listener) == 1
    assert not server.readable()
    assert client.expect(abi.REJECTED, abi.CONSUMER_DEFINED).uid == 2
    server.accept(theirs)
    assert client.expect(abi.CONNECT_RESPONSE).uid == 1
    client.establish(fetched)
    server.expect(abi.ESTABLISHED)


@pytest.mark.parametrize("stage", ["requested", "answered", "connected", "disconnecting"])
@pytest.mark.parametrize("who", ["client", "server"])
def test_destroying_an_end_tells_the_other(server: Cm, client: Cm, stage: str, who: str) -> None:
    listener = server.listener()
    mine = client.ready(server.port(listener))
    client.connect(mine)
    theirs = server.expect(abi.CONNECT_REQUEST).id
    if stage != "requested":
        server.accept(theirs)
        client.expect(abi.CONNECT_RESPONSE)
    if stage in ("connected", "disconnecting"):
        client.establish(mine)
        server.expect(abi.ESTABLISHED)
    if stage == "disconnecting":
        server.disconnect(theirs)
        client.expect(abi.DISCONNECTED)
        client.disconnect(mine)
        server.expect(abi.DISCONNECTED)

    if who == "client":
        client.destroy(mine)
    else:
        server.destroy(theirs)
    other = server if who == "client" else client
    if stage == "requested" and who == "client":
        assert not other.readable(), "of a request that isn't accepted nothing is told"
        assert server.error("accept", theirs) == errno.EINVAL
    elif stage in ("requested", "answered"):
        other.expect(abi.REJECTED, abi.CONSUMER_DEFINED)
    elif stage == "connected":
        other.expect(abi.DISCONNECTED)
    else:
        while other.readable():
            other.expect(abi.TIMEWAIT_EXIT)  # a second after the disconnect, which may have gone by


def test_closing_the_descriptor_destroys_all(server: Cm, client: Cm) -> None:
    listener = server.listener()
    establish(server, client, listener)
    pending = client.ready(server.port(listener))
    client.connect(pending)
    server.close()
    client.expect(abi.REJECTED, abi.CONSUMER_DEFINED)
    client.expect(abi.DISCONNECTED)


def test_disconnecting_at_once_from_both_ends(server: Cm, client: Cm) -> None:
    mine, theirs = establish(server, client, server.listener())
    client.disconnect(mine)
    server.disconnect(theirs)
    server.expect(abi.DISCONNECTED)
    client.expect(abi.DISCONNECTED)


def test_establishing_by_notification(server: Cm, client: Cm) -> None:
    listener = server.listener()
    mine = client.ready(server.port(listener))
    client.connect(mine)
    theirs = server.expect(abi.CONNECT_REQUEST).id
    assert server.error("notify", theirs) == errno.EINVAL
    server.accept(theirs)
    assert server.error("notify", theirs, 7) == errno.EINVAL
    server.notify(theirs)
    server.expect(abi.ESTABLISHED)
    assert server.error("notify", theirs) == errno.EISCONN
    client.expect(abi.CONNECT_RESPONSE)
    client.establish(mine)
    assert not server.readable(), "it was told already"


# ---------------------------------------------------------------- datagrams


def test_a_datagram_service_is_found(server: Cm, client: Cm) -> None:
    listener = server.listener(ps=abi.UDP)
    mine = client.ready(server.port(listener), ps=abi.UDP)
    client.connect(mine, params(0x111, b"who", length=3))
    request = server.expect(abi.CONNECT_REQUEST)
    assert request.ud[3] == b"who" + bytes(177)
    server.accept(request.id, params(0x222, b"me"))
    qpn, qkey, ah, data = client.expect(abi.ESTABLISHED).ud
    assert (qpn, qkey, data) == (0x222, 0x01234567, b"me" + bytes(134))
    assert ah[:16] == bytes(10) + b"\xff\xff\xc0\x00\x02\x01", "the GID that stands for 127.0.0.1"
    assert client.qp_attr(mine, abi.INIT)["qkey"] == 0x01234567
    assert not server.readable(), "there is no connection"

    refused = client.ready(server.port(listener), ps=abi.UDP)
    client.connect(refused)
    server.reject(server.expect(abi.CONNECT_REQUEST).id, b"no")
    assert client.expect(abi.UNREACHABLE, 2).ud[3] == b"no" + bytes(134)
    nobody = client.ready(9, ps=abi.UDP)
    client.connect(nobody)
    client.expect(abi.UNREACHABLE, 1)


def test_a_full_backlog_refuses_datagrams(server: Cm, client: Cm) -> None:
    listener = server.listener(ps=abi.UDP, backlog=1)
    for _ in range(2):
        client.connect(client.ready(server.port(listener), ps=abi.UDP))
    client.expect(abi.UNREACHABLE, 2)


def test_port_spaces_are_apart(server: Cm, client: Cm) -> None:
    tcp = server.listener()
    port = server.port(tcp)
    server.listener(port=port, ps=abi.UDP)
    client.connect(client.ready(port, ps=abi.UDP))
    client.connect(client.ready(port))
    assert {server.event().event, server.event().event} == {abi.CONNECT_REQUEST}


# ---------------------------------------------------------------- addresses and ports


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("127.0.0.1", "127.0.0.1", errno.EADDRINUSE),
        ("0.0.0.0", "127.0.0.1", errno.EADDRNOTAVAIL),
        ("127.0.0.1", "0.0.0.0", errno.EADDRNOTAVAIL),
        ("::", "127.0.0.1", errno.EADDRNOTAVAIL),
        ("127.0.0.1", "127.0.0.2", 0),
        ("127.0.0.1", "::1", 0),
    ],
)
def test_a_port_is_taken(server: Cm, client: Cm, first: str, second: str, code: int) -> None:
    listener = server.listener(first)
    other = client.create()
    if code:
        assert client.error("bind", other, second, server.port(listener)) == code
        server.destroy(listener)
    client.bind(other, second, server.port(listener) if not code else 0)


def test_a_port_is_free_again_when_its_identifier_is_gone(server: Cm, client: Cm) -> None:
    listener = server.listener()
    port = server.port(listener)
    other = client.create()
    assert client.error("bind", other, "127.0.0.1", port) == errno.EADDRINUSE
    server.destroy(listener)
    client.bind(other, "127.0.0.1", port)


def test_reuse_holds_until_one_listens(server: Cm) -> None:
    ids = [server.create() for _ in range(3)]
    for id in ids:
        server.option(id, abi.REUSEADDR, struct.pack("=i", 1))
    server.bind(ids[0])
    for id in ids[1:]:
        server.bind(id, "127.0.0.1", server.port(ids[0]))
    assert server.error("listen", ids[0]) == errno.EADDRINUSE
    server.destroy(ids[1])
    server.destroy(ids[2])
    server.listen(ids[0])
    late = server.create()
    server.option(late, abi.REUSEADDR, struct.pack("=i", 1))
    assert server.error("bind", late, "127.0.0.1", server.port(ids[0])) == errno.EADDRINUSE


def test_ephemeral_ports_are_of_the_range_and_different(server: Cm) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = set()
    for _ in range(50):
        id = server.create()
        server.bind(id)
        ports.add(server.port(id))
    assert len(ports) == 50
    assert all(low <= port <= high for port in ports)


def test_listening_unbound_takes_any_address(server: Cm, client: Cm) -> None:
    id = server.create()
    server.listen(id)
    client.connect(client.ready(server.port(id)))
    server.expect(abi.CONNECT_REQUEST)


def test_addresses_elsewhere(server: Cm, client: Cm) -> None:
    assert server.error("bind", server.create(), "198.51.100.7") == errno.EADDRNOTAVAIL
    assert server.error("bind", server.create(), "2001:db8::7") == errno.EADDRNOTAVAIL
    id = client.create()
    client.resolve_addr(id, "198.51.100.7", 7471, timeout_ms=50)
    event = client.event()
    assert event.event == abi.ADDR_ERROR
    assert -event.status in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT)
    client.resolve_addr(id, "127.0.0.1", 7471)
    client.expect(abi.ADDR_RESOLVED)


def test_any_address_as_destination_is_this_host(server: Cm, client: Cm) -> None:
    listener = server.listener("127.0.0.1")
    client.connect(client.ready(server.port(listener), "0.0.0.0"))
    server.expect(abi.CONNECT_REQUEST)


# ---------------------------------------------------------------- refusals


def test_each_call_in_a_wrong_state(server: Cm, client: Cm) -> None:
    listener = server.listener()
    port = server.port(listener)
    fresh = client.create()
    unbound = ("resolve_route", "connect", "accept", "reject", "disconnect", "notify")
    assert {name: client.error(name, fresh) for name in unbound} == dict.fromkeys(unbound, errno.EINVAL)
    assert client.error("qp_attr", fresh, abi.INIT) == errno.EINVAL
    assert client.error("bind", fresh, "127.0.0.1", port) == errno.EADDRINUSE
    client.bind(fresh)
    assert client.error("bind", fresh) == errno.EINVAL, "it's bound"
    assert client.error("resolve_addr", fresh, "::1", port) == errno.EINVAL, "another family"
    assert client.error("disconnect", fresh) == errno.EINVAL
    client.resolve_addr(fresh, "127.0.0.1", port)
    client.expect(abi.ADDR_RESOLVED)
    assert client.error("resolve_addr", fresh, "127.0.0.1", port) == errno.EINVAL
    assert client.error("connect", fresh) == errno.EINVAL
    assert client.error("listen", fresh) == errno.EINVAL
    assert client.error("resolve_route", fresh, 0) == errno.EINVAL
    client.resolve_route(fresh)
    client.expect(abi.ROUTE_RESOLVED)
    assert client.error("resolve_route", fresh) == errno.EINVAL
    assert client.qp_attr(fresh, abi.INIT)["access"] == 0
    assert client.error("connect", fresh, params(data=bytes(57))) == errno.EINVAL, "56 is what a REQ has room for"
    assert client.error("connect", fresh, params(valid=0)) == errno.EINVAL
    client.connect(fresh, params(data=bytes(56)))
    assert client.error("connect", fresh) == errno.EINVAL
    theirs = server.expect(abi.CONNECT_REQUEST).id
    assert server.error("listen", listener) == errno.EINVAL
    server.disconnect(listener)  # rdma_disconnect() doesn't look at what comes of its messages
    assert server.error("reject", theirs, length=149) == errno.EINVAL, "148 is what a REJ has room for"
    assert server.error("qp_attr", theirs, 7) == errno.EINVAL, "no state"
    assert server.error("qp_attr", theirs, 3 + 1) == errno.EINVAL, "the manager has no attributes for SQD"
    assert server.error("accept", theirs, params(length=197)) == errno.EINVAL, "196 is what a REP has room for"
    client.expect(abi.REJECTED, abi.CONSUMER_DEFINED)  # a failed accept rejects
    early = client.ready(port)
    client.connect(early)
    assert client.error("establish", early) == errno.EINVAL, "there is no answer yet; and it gives up"
    server.expect(abi.CONNECT_REQUEST)
    assert client.error("disconnect", client.create()) == errno.EINVAL
    assert client.error("qp_attr", fresh, abi.RTR) == errno.EINVAL, "with no connection"


def test_identifiers_are_the_descriptors_own(server: Cm, client: Cm) -> None:
    id = server.create()
    assert client.error("bind", id) == errno.EINVAL
    assert client.error("destroy", 123456) == errno.ENOENT
    assert server.destroy(id) == 0
    assert server.error("destroy", id) == errno.ENOENT


def test_options(server: Cm, client: Cm) -> None:
    id = server.create()
    for name, value, code in [
        (abi.TOS, b"\x20\x00", errno.EINVAL),
        (abi.REUSEADDR, b"\1", errno.EINVAL),
        (abi.AFONLY, b"\1", errno.EINVAL),
        (abi.ACK_TIMEOUT, b"\1\2", errno.EINVAL),
        (17, b"\1", errno.ENOSYS),
    ]:
        assert server.error("option", id, name, value) == code
    assert server.error("option", id, 1, b"", level=1) == errno.EINVAL, "no path"
    assert server.error("option", id, 5, b"", level=1) == errno.ENOSYS
    assert server.error("option", id, 0, b"", level=2) == errno.ENOSYS
    assert server.error("option", server.create(abi.UDP), abi.ACK_TIMEOUT, b"\x10") == errno.EINVAL
    server.bind(id)
    server.listen(id)
    assert server.error("option", id, abi.AFONLY, bytes(4)) == errno.EINVAL
    assert server.error("option", id, abi.REUSEADDR, b"\1\0\0\0") == errno.EINVAL

    mine = client.create()
    client.option(mine, abi.TOS, b"\x60")
    client.option(mine, abi.ACK_TIMEOUT, b"\x0a")
    client.resolve_addr(mine, "127.0.0.1", server.port(id))
    client.expect(abi.ADDR_RESOLVED)
    client.resolve_route(mine)
    client.expect(abi.ROUTE_RESOLVED)
    client.connect(mine)
    theirs = server.expect(abi.CONNECT_REQUEST).id
    server.accept(theirs)
    client.expect(abi.CONNECT_RESPONSE)
    assert client.qp_attr(mine, abi.RTS)["timeout"] == 10, "as it was set"
    assert server.qp_attr(theirs, abi.RTS)["timeout"] == 16, "that of the device is longer than the path's"


def test_multicast_is_refused(client: Cm) -> None:
    id = client.create(abi.UDP)
    client.bind(id)
    group = sockaddr("239.1.2.3", 0)
    join = struct.pack("=QQIHH128s", 0, 1, id, len(group), 0, group)
    assert client.error("command", abi.JOIN_MCAST, join, out=4, response_at=0) == errno.ENOSYS
    join_ip = struct.pack("=QQ28sI", 0, 1, group.ljust(28, b"\0"), id)
    assert client.error("command", abi.JOIN_IP_MCAST, join_ip, out=4, response_at=0) == errno.ENOSYS
    leave = struct.pack("=QII", 0, 0, 0)
    assert client.error("command", abi.LEAVE_MCAST, leave, out=4, response_at=0) == errno.ENOENT


def test_events_of_the_application_s_own(client: Cm) -> None:
    """RDMA_USER_CM_CMD_WRITE_CM_EVENT, of Linux 6.17."""
    id = client.create()
    client.command(24, struct.pack("=IIIiQ296x", id, 0, 18, -7, 0x1234567890))
    event = client.expect(18, -7)
    assert event.raw[:8] == struct.pack("=Q", 0x1234567890)
    assert client.error("command", 24, struct.pack("=IIIiQ296x", id, 0, 9, 0, 0)) == errno.EINVAL
    client.bind(id)
    assert client.error("command", 23, struct.pack("=II88x", id, 0)) == errno.EOPNOTSUPP


def test_malformed_commands(client: Cm) -> None:
    for data, code in [
        (b"", errno.EINVAL),
        (bytes(7), errno.EINVAL),
        (struct.pack("=IHH", 25, 0, 0), errno.EINVAL),
        (struct.pack("=IHH", 0xFFFFFFFF, 0, 0), errno.EINVAL),
        (struct.pack("=IHH", abi.CREATE_ID, 24, 4) + bytes(23), errno.EINVAL),
        (struct.pack("=IHH", abi.GET_OPTION, 0, 0), errno.ENOSYS),
        (struct.pack("=IHHQQHB5x", abi.CREATE_ID, 24, 3, 1, 0, abi.TCP, 2), errno.ENOSPC),
        (struct.pack("=IHHQQHB5x", abi.CREATE_ID, 24, 4, 1, 8, abi.TCP, 2), errno.EFAULT),
        (struct.pack("=IHHQQHB5x", abi.CREATE_ID, 24, 4, 1, 8, 0x1234, 2), errno.EINVAL),
        (struct.pack("=IHHQ", abi.GET_EVENT, 8, 100, 0), errno.ENOSPC),
        (struct.pack("=IHHQII", abi.QUERY, 16, 15, 0, 0, 0), errno.ENOENT),
        (struct.pack("=IHH", abi.CONNECT, 279, 0) + bytes(288), errno.EINVAL),
        (struct.pack("=IHH", abi.ACCEPT, 287, 0) + bytes(296), errno.EINVAL),
    ]:
        assert client.error("write", data) == code, data
    id = client.create()
    for size, reserved in ((0, 0), (28, 0), (16, 1)):
        bind = struct.pack("=IHH128s", id, size, reserved, sockaddr("127.0.0.1", 0))
        assert client.error("command", abi.BIND, bind) == errno.EINVAL
    unknown = struct.pack("=IHH128s", id, 16, 0, struct.pack("=H", 99))
    assert client.error("command", abi.BIND, unknown) == errno.EINVAL
    assert client.error("command", abi.QUERY, struct.pack("=QII", 0, id, 9), out=16, response_at=0) == errno.ENOSYS
    for option, room in ((0, 271), (1, 7), (2, 271)):
        query = struct.pack("=QII", 0, id, option)
        assert client.error("command", abi.QUERY, query, out=room, response_at=0) == errno.ENOSPC


# ---------------------------------------------------------------- events


def test_the_descriptor_is_readable_while_events_wait(server: Cm) -> None:
    watcher = select.epoll()
    watcher.register(server.fd, select.EPOLLIN)
    assert not watcher.poll(0)
    id = server.create()
    server.resolve_addr(id, "127.0.0.1", 9)
    assert watcher.poll(30) == [(server.fd, select.EPOLLIN)]
    assert select.select([server.fd], [], [], 0)[0] == [server.fd]
    server.resolve_route(id)
    server.expect(abi.ADDR_RESOLVED)
    assert server.readable(), "another one"
    server.expect(abi.ROUTE_RESOLVED)
    assert not server.readable()
    assert not watcher.poll(0)
    watcher.close()


def test_many_events_wait(server: Cm) -> None:
    ids = [server.create(uid=n + 1) for n in range(600)]
    for id in ids:
        server.resolve_addr(id, "127.0.0.1", 9)
    assert [server.expect(abi.ADDR_RESOLVED).uid for _ in ids] == [n + 1 for n in range(600)]
    assert not server.readable()


def test_events_of_an_identifier_go_with_it(server: Cm) -> None:
    gone, stays = server.create(uid=1), server.create(uid=2)
    for id in (gone, stays):
        server.resolve_addr(id, "127.0.0.1", 9)
    assert server.destroy(gone) == 0, "none was reported"
    assert server.expect(abi.ADDR_RESOLVED).uid == 2
    assert not server.readable()


def test_without_blocking() -> None:
    with Cm(os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK) as cm:
        assert cm.error("get_event") == errno.EAGAIN
    with Cm() as cm:
        os.set_blocking(cm.fd, False)
        assert cm.error("get_event") == errno.EAGAIN


def test_an_event_wakes_who_waits_for_it(server: Cm) -> None:
    found: list[Event] = []
    waiter = threading.Thread(target=lambda: found.append(server.get_event()))
    waiter.start()
    id = server.create()
    server.resolve_addr(id, "127.0.0.1", 9)
    waiter.join(30)
    assert [e.event for e in found] == [abi.ADDR_RESOLVED]


def test_a_signal_ends_the_wait(server: Cm) -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        assert server.error("get_event") == errno.EINTR
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_bad_place_for_an_event_loses_none(server: Cm) -> None:
    server.resolve_addr(server.create(), "127.0.0.1", 9)
    data = struct.pack("=IHHQ", abi.GET_EVENT, 8, abi.EVENT_SIZE, 8)
    assert server.error("write", data) == errno.EFAULT
    server.expect(abi.ADDR_RESOLVED)


def test_moving_to_another_channel(server: Cm, client: Cm) -> None:
    listener = server.listener()
    mine = client.ready(server.port(listener))
    client.connect(mine)
    theirs = server.expect(abi.CONNECT_REQUEST).id
    with Cm() as other:
        assert other.error("migrate", mine, other) == errno.EINVAL, "it isn't there"
        server.accept(theirs)
        assert client.readable()
        assert other.migrate(mine, client) == 2, "events reported before"
        assert not client.readable()
        other.expect(abi.CONNECT_RESPONSE)
        assert client.error("establish", mine) == errno.EINVAL
        other.establish(mine)
        server.expect(abi.ESTABLISHED)
        assert server.migrate(listener, server) == 1, "to where it is"
        assert other.migrate(listener, server) == 1
        client.connect(client.ready(other.port(listener)))
        other.expect(abi.CONNECT_REQUEST)
        bad = struct.pack("=QII", 0, mine, 9999)
        assert server.error("command", abi.MIGRATE_ID, bad, out=4, response_at=0) == errno.ENOENT
    server.expect(abi.DISCONNECTED)

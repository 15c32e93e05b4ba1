"""/dev/infiniband/rdma_cm with no librdmacm above it: commands as bytes, straight to the emulator's hooks.

Structures are those of rdma/rdma_user_cm.h, as format strings of the struct module. Nothing in here waits for ever.
"""

import ctypes
import errno
import os
import select
import socket
import struct
from dataclasses import dataclass
from types import TracebackType

import pytest
from emulated.uverbs import lib

CREATE_ID, DESTROY_ID, BIND_IP, RESOLVE_IP, RESOLVE_ROUTE, QUERY_ROUTE, CONNECT, LISTEN = range(8)
ACCEPT, REJECT, DISCONNECT, INIT_QP_ATTR, GET_EVENT, GET_OPTION, SET_OPTION, NOTIFY = range(8, 16)
JOIN_IP_MCAST, LEAVE_MCAST, MIGRATE_ID, QUERY, BIND, RESOLVE_ADDR, JOIN_MCAST = range(16, 23)

TCP, UDP, IB, IPOIB = 0x0106, 0x0111, 0x013F, 0x0002
(
    ADDR_RESOLVED,
    ADDR_ERROR,
    ROUTE_RESOLVED,
    ROUTE_ERROR,
    CONNECT_REQUEST,
    CONNECT_RESPONSE,
    CONNECT_ERROR,
    UNREACHABLE,
    REJECTED,
    ESTABLISHED,
    DISCONNECTED,
) = range(11)
TIMEWAIT_EXIT = 15
TOS, REUSEADDR, AFONLY, ACK_TIMEOUT = range(4)
INIT, RTR, RTS = 1, 2, 3
INVALID_SERVICE_ID, CONSUMER_DEFINED = 8, 28

EVENT_SIZE = 336
QP_ATTR_SIZE = 144
TIMEOUT_MS = 30_000


def sockaddr(address: str, port: int) -> bytes:
    """An address as the kernel has it; the IPv6 ones are those with a colon, with a scope behind a per cent sign."""
    if ":" not in address:
        return struct.pack("=HH", socket.AF_INET, socket.htons(port)) + socket.inet_aton(address) + bytes(8)
    name, _, scope = address.partition("%")
    return (
        struct.pack("=HHI", socket.AF_INET6, socket.htons(port), 0)
        + socket.inet_pton(socket.AF_INET6, name)
        + struct.pack("=I", int(scope or 0))
    )


def params(
    qp_num: int = 0x1234,
    data: bytes = b"",
    *,
    length: int | None = None,
    responder_resources: int = 4,
    initiator_depth: int = 3,
    retry: int = 6,
    rnr_retry: int = 5,
    srq: int = 0,
    valid: int = 1,
) -> bytes:
    """A struct rdma_ucm_conn_param."""
    return struct.pack(
        "=II256s8B",
        qp_num,
        0,
        data,
        len(data) if length is None else length,
        srq,
        responder_resources,
        initiator_depth,
        1,
        retry,
        rnr_retry,
        valid,
    )


@dataclass(frozen=True)
class Event:
    """A struct rdma_ucm_event_resp."""

    uid: int
    id: int
    event: int
    status: int
    raw: bytes
    ece: tuple[int, int]

    @classmethod
    def unpack(cls, data: bytes) -> "Event":
        uid, id, event, status = struct.unpack_from("=QIIi", data)
        return cls(uid, id, event, status, data[20:324], struct.unpack_from("=II", data, 328))

    @property
    def qp_num(self) -> int:
        return int(struct.unpack_from("=I", self.raw)[0])

    @property
    def private_data(self) -> bytes:
        """Of a connection's event, as long as the event says."""
        return self.raw[8 : 8 + self.raw[264]]

    @property
    def ud(self) -> tuple[int, int, bytes, bytes]:
        """Of a datagram service's: qpn, qkey, address handle attributes, private data."""
        qpn, qkey = struct.unpack_from("=II", self.raw)
        return qpn, qkey, self.raw[8:40], self.raw[40 : 40 + self.raw[296]]

    @property
    def parameters(self) -> dict[str, int]:
        names = ("srq", "responder_resources", "initiator_depth", "flow_control", "retry", "rnr_retry")
        return dict(zip(names, self.raw[265:271], strict=True))


class Cm:
    """An open event channel. Methods raise OSError; :meth:`error` gives its errno."""

    def __init__(self, flags: int = os.O_RDWR | os.O_CLOEXEC) -> None:
        self.fd = lib.open(b"/dev/infiniband/rdma_cm", flags)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "open")

    def __enter__(self) -> "Cm":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            lib.close(self.fd)
        self.fd = -1

    def write(self, data: bytes) -> int:
        n: int = lib.write(self.fd, data, len(data))
        if n < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return n

    def command(self, number: int, data: bytes, *, out: int = 0, response_at: int | None = None) -> bytes:
        """Send a command; `response_at` is where in it the address of the response goes."""
        buffer = ctypes.create_string_buffer(max(out, 1))
        if response_at is not None:
            data = data[:response_at] + struct.pack("=Q", ctypes.addressof(buffer)) + data[response_at + 8 :]
        whole = struct.pack("=IHH", number, len(data), out) + data
        assert self.write(whole) == len(whole)
        return buffer.raw[:out]

    def create(self, ps: int = TCP, *, uid: int = 0x77, qp_type: int = 2) -> int:
        answer = self.command(CREATE_ID, struct.pack("=QQHB5x", uid, 0, ps, qp_type), out=4, response_at=8)
        return int(struct.unpack("=I", answer)[0])

    def destroy(self, id: int) -> int:
        answer = self.command(DESTROY_ID, struct.pack("=QII", 0, id, 0), out=4, response_at=0)
        return int(struct.unpack("=I", answer)[0])

    def bind(self, id: int, address: str = "127.0.0.1", port: int = 0) -> None:
        addr = sockaddr(address, port)
        self.command(BIND, struct.pack("=IHH128s", id, len(addr), 0, addr))

    def listen(self, id: int, backlog: int = 16) -> None:
        self.command(LISTEN, struct.pack("=II", id, backlog))

    def listener(self, address: str = "127.0.0.1", port: int = 0, *, ps: int = TCP, backlog: int = 16) -> int:
        id = self.create(ps)
        self.bind(id, address, port)
        self.listen(id, backlog)
        return id

    def resolve_addr(self, id: int, address: str, port: int, source: str | None = None, timeout_ms: int = 2000) -> None:
        dst, src = sockaddr(address, port), sockaddr(source, 0) if source else b""
        self.command(RESOLVE_ADDR, struct.pack("=IIHHI128s128s", id, timeout_ms, len(src), len(dst), 0, src, dst))

    def resolve_route(self, id: int, timeout_ms: int = 2000) -> None:
        self.command(RESOLVE_ROUTE, struct.pack("=II", id, timeout_ms))

    def ready(
        self, port: int, address: str = "127.0.0.1", *, ps: int = TCP, source: str | None = None, uid: int = 0x77
    ) -> int:
        """An identifier that may connect."""
        id = self.create(ps, uid=uid)
        self.resolve_addr(id, address, port, source)
        self.expect(ADDR_RESOLVED)
        self.resolve_route(id)
        self.expect(ROUTE_RESOLVED)
        return id

    def connect(self, id: int, param: bytes | None = None, ece: tuple[int, int] = (0, 0)) -> None:
        self.command(CONNECT, (params() if param is None else param) + struct.pack("=IIII", id, 0, *ece))

    def accept(self, id: int, param: bytes | None = None, *, uid: int = 0x88, ece: tuple[int, int] = (0, 0)) -> None:
        self.command(
            ACCEPT, struct.pack("=Q", uid) + (params() if param is None else param) + struct.pack("=IIII", id, 0, *ece)
        )

    def establish(self, id: int) -> None:
        """The active side's answer to CONNECT_RESPONSE."""
        self.accept(id, params(valid=0))

    def reject(self, id: int, data: bytes = b"", *, reason: int = 0, length: int | None = None) -> None:
        self.command(REJECT, struct.pack("=IBB2x256s", id, len(data) if length is None else length, reason, data))

    def disconnect(self, id: int) -> None:
        self.command(DISCONNECT, struct.pack("=I", id))

    def notify(self, id: int, event: int = 4) -> None:
        self.command(NOTIFY, struct.pack("=II", id, event))

    def option(self, id: int, name: int, value: bytes, *, level: int = 0) -> None:
        buffer = ctypes.create_string_buffer(value, max(len(value), 1))
        self.command(SET_OPTION, struct.pack("=QIIII", ctypes.addressof(buffer), id, level, name, len(value)))

    def migrate(self, id: int, source: "Cm") -> int:
        answer = self.command(MIGRATE_ID, struct.pack("=QII", 0, id, source.fd), out=4, response_at=0)
        return int(struct.unpack("=I", answer)[0])

    def qp_attr(self, id: int, state: int) -> dict[str, int]:
        answer = self.command(INIT_QP_ATTR, struct.pack("=QII", 0, id, state), out=QP_ATTR_SIZE, response_at=0)
        names = ("mask", "state", "cur", "path_mtu", "mig", "qkey", "rq_psn", "sq_psn", "dest_qp_num", "access")
        found = dict(zip(names, struct.unpack_from("=10I", answer), strict=True))
        (found["pkey_index"],) = struct.unpack_from("=H", answer, 124)
        tail = ("max_rd_atomic", "max_dest_rd_atomic", "min_rnr_timer", "port", "timeout", "retry", "rnr_retry")
        return found | dict(zip(tail, answer[130:137], strict=True))

    def query_addr(self, id: int) -> tuple[int, bytes, bytes]:
        """The device's GUID in host order, source and destination."""
        answer = self.command(QUERY, struct.pack("=QII", 0, id, 0), out=280, response_at=0)
        guid, _, _, _, src, dst = struct.unpack_from("=8sBBHHH", answer)
        return int.from_bytes(guid, "big"), answer[16 : 16 + src], answer[144 : 144 + dst]

    def port(self, id: int) -> int:
        return int(socket.ntohs(struct.unpack_from("=H", self.query_addr(id)[1], 2)[0]))

    def readable(self, timeout_ms: int = 0) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def get_event(self) -> Event:
        """Waits, if the descriptor does."""
        return Event.unpack(self.command(GET_EVENT, bytes(8), out=EVENT_SIZE, response_at=0))

    def event(self) -> Event:
        assert self.readable(TIMEOUT_MS), "no event"
        return self.get_event()

    def expect(self, kind: int, status: int = 0) -> Event:
        event = self.event()
        assert (event.event, event.status) == (kind, status)
        return event

    def error(self, method: str, *arguments: object, **named: object) -> int:
        """The errno of a call that must fail."""
        with pytest.raises(OSError, match=r"\[Errno \d+\]") as raised:
            getattr(self, method)(*arguments, **named)
        return int(raised.value.errno or 0)


def establish(server: Cm, client: Cm, listener: int, address: str = "127.0.0.1") -> tuple[int, int]:
    """Connect two identifiers: client's and server's."""
    mine = client.ready(server.port(listener), address)
    client.connect(mine)
    theirs = server.expect(CONNECT_REQUEST).id
    server.accept(theirs)
    client.expect(CONNECT_RESPONSE)
    client.establish(mine)
    server.expect(ESTABLISHED)
    return mine, theirs


__all__ = [name for name in dir() if not name.startswith("_")] + ["errno"]

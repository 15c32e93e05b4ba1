"""Writes seeds for fuzz_cm.c: connections of every kind and end, within the process and with another one.

seeds_cm.py FOLDER
"""

import struct

from seed_files import write

# As in fuzz_cm.c.
OP_COMMAND, OP_RAW, OP_EVENT, OP_MESSAGE, OP_TIMEOUT, OP_DIED, OP_REACH, OP_CLOSE, OP_UNMAP = range(9)
AS_IT_IS, PEER_PORT = 0xFF, 7777
# rdma/rdma_user_cm.h
(
    CREATE,
    DESTROY,
    BIND_IP,
    RESOLVE_IP,
    RESOLVE_ROUTE,
    QUERY_ROUTE,
    CONNECT,
    LISTEN,
    ACCEPT,
    REJECT,
    DISCONNECT,
    QP_ATTR,
) = range(12)
GET_OPTION, SET_OPTION, NOTIFY, JOIN_IP, LEAVE, MIGRATE, QUERY, BIND, RESOLVE, JOIN, IB_SERVICE, WRITE_EVENT = range(
    13, 25
)
TCP, UDP = 0x0106, 0x0111
RC, UD, XRC_SEND, XRC_RECV = 2, 4, 9, 10
# cm.h: enum cm_message_type, and where fields of struct cm_message are.
REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP = range(1, 10)
TO, PS, STATUS, FAMILY, QP_TYPE, REPEATED, DATA_LEN = 16, 40, 46, 48, 49, 61, 110
ARENA = 0x200000000000


def command(number: int, who: int, body: bytes = b"", file: int = 0) -> bytes:
    return struct.pack("<BBBBH", OP_COMMAND, number, file, who, len(body)) + body


def in4(address: str, port: int = 0) -> bytes:
    return struct.pack("<H", 2) + struct.pack(">H4B", port, *map(int, address.split("."))) + bytes(8)


def in6(last: int, port: int = 0) -> bytes:
    return struct.pack("<H", 10) + struct.pack(">HI", port, 0) + bytes(15) + bytes([last]) + bytes(4)


def create(ps: int = TCP, qp_type: int = RC, file: int = 0, uid: int = 1) -> bytes:
    return command(CREATE, 0, struct.pack("<QQHB", uid, 0, ps, qp_type), file)


def bind_ip(who: int, address: bytes) -> bytes:
    return command(BIND_IP, who, bytes(8) + address)


def resolve_ip(who: int, dst: bytes, src: bytes = b"", file: int = 0) -> bytes:
    return command(RESOLVE_IP, who, src.ljust(28, b"\0") + dst.ljust(28, b"\0") + struct.pack("<II", 0, 100), file)


def params(data: int = 0, qp_num: int = 0x123, valid: int = 1) -> bytes:
    return struct.pack("<II256s8B", qp_num, 0, bytes(range(256)), data, 0, 4, 4, 1, 7, 7, valid)


def connect(who: int, data: int = 0, file: int = 0) -> bytes:
    return command(RESOLVE_ROUTE, who, struct.pack("<II", 0, 100), file) + command(CONNECT, who, params(data), file)


def accept(who: int, data: int = 0, valid: int = 1) -> bytes:
    return command(ACCEPT, who, struct.pack("<Q", 2) + params(data, valid=valid))


def message(kind: int, who: int, *changes: tuple[int, int]) -> bytes:
    return struct.pack("<BBBB", OP_MESSAGE, kind, who, len(changes)) + b"".join(struct.pack("<HB", *c) for c in changes)


def event(file: int = 0) -> bytes:
    return bytes([OP_EVENT, file])


def timeout(which: int = 0) -> bytes:
    return bytes([OP_TIMEOUT, which])


def seeds() -> dict[str, bytes]:
    # 0 listens, 1 connects, 2 is the request.
    listen = create() + bind_ip(0, in4("127.0.0.1", 4000)) + command(LISTEN, 0, struct.pack("<II", 0, 8))
    client = create() + resolve_ip(1, in4("127.0.0.1", 4000)) + event() + connect(1, 20) + event() * 2
    states = b"".join(command(QP_ATTR, w, struct.pack("<QII", 0, 0, s)) for w in (1, 2) for s in (1, 2, 3, 9))
    connected = listen + client + accept(2, 30) + event() + accept(1, valid=0) + states + event() * 2
    # 0 connects to the other process.
    asks = create() + resolve_ip(0, in4("127.0.0.1", PEER_PORT)) + event() + connect(0, 9)
    established = asks + message(REP, 0) + event() + accept(0, valid=0)
    asked = listen + message(REQ, 0) + event()
    udp = create(UDP, UD) + bind_ip(0, in4("127.0.0.1", 4001)) + command(LISTEN, 0, struct.pack("<II", 0, 1))
    queries = b"".join(command(QUERY, 0, struct.pack("<QII", 0, 0, option)) for option in range(4))
    storage = in4("127.0.0.1", PEER_PORT).ljust(128, b"\0")
    return {
        "connected": connected
        + command(DISCONNECT, 1)
        + event() * 3
        + command(DISCONNECT, 2)
        + timeout() * 2
        + event() * 3,
        "destroyed": connected + command(DESTROY, 1) + event() + command(DESTROY, 0) + command(DESTROY, 2),
        "closed": connected + bytes([OP_CLOSE, 0]),
        "crossing": connected + command(DISCONNECT, 1) + command(DISCONNECT, 2) + event() * 4,
        "rejected": listen + client + command(REJECT, 2, struct.pack("<IBB", 0, 20, 28)) + event() * 2,
        "request-dropped": listen + client[:-2] + command(DESTROY, 0) + event() * 2,
        # Handles are known beforehand: they are the lowest that are free.
        "destroyed-untold": listen
        + message(REQ, 0)
        + command(DESTROY, AS_IT_IS, struct.pack("<QI", 0, 1))
        + event() * 2,
        "destroyed-untold-away": listen
        + message(REQ, 0)
        + create(file=1)
        + command(MIGRATE, AS_IT_IS, struct.pack("<QII", 0, 1, 0), 1)
        + bytes([OP_CLOSE, 1])
        + event()
        + bytes([OP_CLOSE, 0]),
        "accepted-untold": listen
        + message(REQ, 0)
        + command(ACCEPT, AS_IT_IS, struct.pack("<Q", 2) + params() + struct.pack("<I", 1))
        + message(REQ, 0, (12, 7))
        + struct.pack("<BBBB", OP_MESSAGE, RTU, 0, 2)
        + struct.pack("<HBHB", TO, 2, 12, 99)
        + command(DESTROY, 0),
        "backlog": create()
        + bind_ip(0, in4("127.0.0.1", 4000))
        + command(LISTEN, 0, struct.pack("<II", 0, 1))
        + message(REQ, 0) * 3
        + event()
        + message(REQ, 0, (12, 7))
        + event(),
        "notified": listen + client + accept(2) + command(NOTIFY, 2, struct.pack("<II", 0, 8)) + event() * 3,
        "migrated": listen
        + client
        + create(file=1)
        + command(MIGRATE, 2, struct.pack("<QII", 0, 0, 0), 1)
        + command(MIGRATE, 0, struct.pack("<QII", 0, 0, 0), 1)
        + command(CREATE, 0, file=2)
        + bytes([OP_CLOSE, 0])
        + event(1) * 3,
        "away": asks + timeout() * 20 + event(),
        "away-mra": asks + message(MRA, 0) + timeout() * 3 + message(REJ, 0, (STATUS, 28)) + event() * 2,
        "away-established": established + command(DISCONNECT, 0) + message(DREP, 0) + timeout() + event() * 3,
        "away-disconnects": established
        + message(DREQ, 0)
        + event()
        + command(DISCONNECT, 0)
        + message(DREQ, 0)
        + timeout(),
        "away-dies": established + bytes([OP_DIED]) + event() * 2 + message(DREQ, 0),
        "away-dies-early": asks + bytes([OP_DIED]) + event() + asked + bytes([OP_DIED]) + event(),
        "away-unreachable": bytes([OP_REACH, 0]) + asks + timeout() * 2 + event(),
        "away-asks": asked + accept(1) + message(RTU, 1) + event() + message(DREQ, 1) + event(),
        "away-asks-again": asked
        + message(REQ, 0, (REPEATED, 1))
        + accept(1)
        + message(REQ, 0, (REPEATED, 1))
        + timeout() * 3,
        "away-gives-up": asked + message(REJ, 1, (TO, 0), (TO + 1, 0), (TO + 2, 0), (TO + 3, 0)) + event(),
        "nobody": message(DREQ, 9) + message(REQ, 0) + message(SIDR_REQ, 0) + message(77, 0),
        "too-long": asked + message(REQ, 0, (DATA_LEN, 99)) + message(REQ, 0, (DATA_LEN, 255)) + event(),
        "strange-request": listen + message(REQ, 0, (FAMILY, 27)) + message(REQ, 0, (QP_TYPE, 200)) + event() * 2,
        "xrc": create(0x0106, XRC_RECV)
        + bind_ip(0, in4("192.0.2.1", 4002))
        + command(LISTEN, 0, struct.pack("<II", 0, 8))
        + message(REQ, 0, (QP_TYPE, XRC_SEND))
        + event()
        + accept(1),
        "udp": udp
        + create(UDP, UD)
        + resolve_ip(1, in4("127.0.0.1", 4001))
        + event()
        + connect(1, 8)
        + event() * 2
        + accept(2),
        "udp-events": udp
        + create(UDP, UD)
        + resolve_ip(1, in4("192.0.2.3", 4001), in4("192.0.2.1"))
        + event()
        + connect(1)
        + event() * 2
        + command(REJECT, 2, struct.pack("<IBB", 0, 9, 0))
        + event(),
        "udp-away": create(UDP, UD)
        + resolve_ip(0, in4("127.0.0.1", PEER_PORT))
        + event()
        + connect(0)
        + message(SIDR_REP, 0)
        + event()
        + udp
        + message(SIDR_REQ, 1)
        + event()
        + bytes([OP_DIED])
        + message(SIDR_REQ, 1, (DATA_LEN, 190)),
        "queries": asks + queries + command(QUERY_ROUTE, 0, bytes(16)),
        "queries-unbound": create()
        + queries
        + command(QUERY_ROUTE, 0, bytes(16))
        + command(RESOLVE_ROUTE, 0, bytes(8)),
        "options": create()
        + b"".join(
            command(SET_OPTION, 0, struct.pack("<QIIII", ARENA, 0, level, name, length))
            for level in range(2)
            for name in range(5)
            for length in (1, 4, 64)
        )
        + bind_ip(0, in6(1, 4003)),
        "addresses": create()
        + command(BIND, 0, struct.pack("<IHH", 0, 16, 0) + storage)
        + command(RESOLVE, 0, struct.pack("<IIHHI", 0, 9, 0, 16, 0) + bytes(128) + storage)
        + event()
        + create()
        + resolve_ip(1, in4("203.0.113.9", 1))
        + timeout()
        + event()
        + create()
        + resolve_ip(2, in6(1, 5))
        + event(),
        "ports": b"".join(create() + bind_ip(i, in4("0.0.0.0", 4000 + i % 2)) for i in range(4))
        + create()
        + bind_ip(4, in4("0.0.0.0"))
        + bind_ip(0, in6(0, 4000))
        + b"".join(command(LISTEN, i, struct.pack("<II", 0, 0)) for i in range(5)),
        "multicast": create(UDP, UD)
        + bind_ip(0, in4("192.0.2.1", 9))
        + command(JOIN_IP, 0, struct.pack("<QQ", 0, 1) + in4("224.0.0.1"))
        + command(JOIN, 0, struct.pack("<QQIHH", 0, 1, 0, 16, 0) + in4("224.0.0.1"))
        + command(LEAVE, 0),
        "own-events": create()
        + command(WRITE_EVENT, 0, struct.pack("<IIIIQ", 0, 0, 18, 7, 99))
        + event()
        + command(IB_SERVICE, 0),
        "no-option": bytes([OP_RAW, 0]) + struct.pack("<HIHH", 8, GET_OPTION, 0, 0),
        "raw": bytes([OP_RAW, 0]) + struct.pack("<HIHHQQHB", 27, CREATE, 24, 4, 1, ARENA, TCP, RC) + event(),
        "raw-short": bytes([OP_RAW, 0]) + struct.pack("<HIHHI", 12, CONNECT, 4, 0, 0),
        "unmapped": create() + bytes([OP_UNMAP]) + struct.pack("<II", 0, 1 << 22) + create() + event(),
        "no-such": command(DESTROY, AS_IT_IS, struct.pack("<QI", 0, 1 << 31)) + command(LISTEN, AS_IT_IS, b"\xff" * 8),
    }


if __name__ == "__main__":
    write(seeds())

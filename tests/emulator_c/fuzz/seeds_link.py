"""Writes seeds for fuzz_link.c: what a peer asks and answers, in order and out of it.

seeds_link.py FOLDER
"""

import struct

from seed_files import write

# As in fuzz_link.c.
RC, RC_SMALL, UC, UD, XRC_INI, XRC_TGT, DCI, DCT = range(8)
OP_RUN, OP_ASK, OP_ANSWER, OP_RAW, OP_REGISTRY, OP_POST, OP_RECV, OP_CUT, OP_STATE, OP_POLL, OP_ALIVE = range(11)
P_WRITE, P_READ, P_SEND, P_FA, P_WRITE_IMM, P_SEND_INVAL = range(6)
ARENA = 0x200000000000
REGISTRY_ENTRIES = 8320  # struct registry: the entries come after the owners of blocks
SLOTS, SLOT, TAKEN = 896, 16576, 2  # struct wire_shared: our slots, each of which begins with its state

# struct wire_request: opcode, flags at 0 and 1; rkey, npieces, lengths and the address behind.
OPCODE, FLAGS, PSN, RKEY, SRQN, NPIECES = 0, 1, 20, 28, 36, 40
MSG_LEN, OFF, LEN, RADDR = 48, 56, 64, 72
WRITE, WRITE_IMM, SEND, SEND_IMM, SEND_INVAL, READ, CS, FA = 0x08, 0x09, 0x0A, 0x0B, 0x01, 0x10, 0x11, 0x12
FIRST, LAST, SOLICITED, PIECES, WANT_PIECES = 1, 2, 4, 8, 16

RUN, POLL = bytes([OP_RUN]), bytes([OP_POLL])


def u64(at: int, value: int) -> list[tuple[int, int]]:
    return [(at + i, value >> 8 * i & 0xFF) for i in range(8)]


def ask(qp: int, slot: int, *changes: tuple[int, int], payload: bytes = b"") -> bytes:
    body = b"".join(bytes(c) for c in changes)
    return bytes([OP_ASK, qp, slot, len(changes)]) + body + bytes([len(payload)]) + payload


def answer(slot: int, reply: int = 0, rnr: int = 1, npieces: int = 0, result: int = 0, payload: bytes = b"") -> bytes:
    return (
        bytes([OP_ANSWER, slot]) + struct.pack("<BBxxIQ", reply, rnr, npieces, result) + bytes([len(payload)]) + payload
    )


def post(qp: int, opcode: int, length: int, address: int = ARENA) -> bytes:
    return struct.pack("<BBBIQ", OP_POST, qp, opcode, length, address)


def piece(address: int, length: int) -> bytes:
    return struct.pack("<QQ", address, length)


def seeds() -> dict[str, bytes]:
    # Opens the link, so that the file is there for the peer to write to.
    begin = post(RC, P_WRITE, 8) + RUN
    recv = bytes([OP_RECV, RC])
    return {
        "opened": begin,
        "write": begin + ask(RC, 0, payload=bytes(64)) + RUN,
        "write-imm": begin + recv + ask(RC, 0, (OPCODE, WRITE_IMM), payload=bytes(64)) + RUN + POLL,
        "send": begin + recv + ask(RC, 1, (OPCODE, SEND), payload=bytes(64)) + RUN + POLL,
        "send-inval": begin + recv + ask(RC, 1, (OPCODE, SEND_INVAL), payload=bytes(64)) + RUN + POLL,
        "no-receive": begin + ask(RC, 1, (OPCODE, SEND), payload=bytes(64)) + RUN,
        "srq": begin + bytes([OP_RECV, RC_SMALL]) + ask(RC_SMALL, 1, (OPCODE, SEND), payload=bytes(64)) + RUN,
        "xrc": begin + bytes([OP_RECV, XRC_TGT]) + ask(XRC_TGT, 1, (OPCODE, SEND), payload=bytes(64)) + RUN,
        "dct": begin + bytes([OP_RECV, DCT]) + ask(DCT, 1, (OPCODE, SEND), payload=bytes(64)) + RUN,
        "ud": begin + bytes([OP_RECV, UD]) + ask(UD, 1, (OPCODE, SEND), payload=bytes(64)) + RUN,
        "uc": begin + ask(UC, 1, payload=bytes(64)) + RUN,
        "read": begin + ask(RC, 2, (OPCODE, READ)) + RUN,
        "read-pieces": begin + ask(RC, 2, (OPCODE, READ), (FLAGS, 19), (LEN + 1, 64), (MSG_LEN + 1, 64)) + RUN,
        "atomic": begin + ask(RC, 3, (OPCODE, FA), (LEN, 8), (MSG_LEN, 8)) + ask(RC, 4, (OPCODE, CS), (PSN, 1)) + RUN,
        "pieces": begin + ask(RC, 0, (FLAGS, 11), (NPIECES, 2), payload=piece(ARENA, 32) + piece(ARENA + 99, 32)) + RUN,
        "wild-pieces": begin + ask(RC, 0, (FLAGS, 11), (NPIECES, 2), payload=piece(1, 32) + piece(1 << 63, 99)) + RUN,
        "slices": begin
        + ask(RC, 0, (FLAGS, 1), (MSG_LEN, 128), payload=bytes(64))
        + ask(RC, 1, (FLAGS, 2), (MSG_LEN, 128), (OFF, 64), payload=bytes(64))
        + RUN,
        "too-long": begin + ask(RC, 0, (LEN + 2, 255), (MSG_LEN + 2, 255)) + RUN,
        "acked": begin + answer(0) + RUN + POLL,
        "answers": begin
        + post(RC, P_READ, 8)
        + post(RC, P_FA, 8)
        + RUN
        + answer(0)
        + RUN
        + answer(1)
        + RUN
        + answer(2)
        + answer(127)
        + RUN,
        "nak": begin + answer(0, 3) + RUN,
        "rnr": begin + answer(0, 2) + RUN * 3,
        "lost": begin + answer(0, 99) + RUN * 3,
        "unasked": begin + answer(77) + answer(200) + answer(0) * 3 + RUN,
        "read-answer": post(RC, P_READ, 64) + RUN + answer(0, payload=bytes(64)) + RUN * 2,
        "read-answer-pieces": post(RC, P_READ, 1 << 20)
        + RUN
        + answer(0, npieces=1, payload=piece(ARENA, 1 << 20))
        + RUN,
        "read-answer-wild": post(RC, P_READ, 1 << 20) + RUN + answer(0, npieces=9, payload=piece(64, 1 << 62)) + RUN,
        "long": post(RC, P_WRITE, 2_000_000) + RUN * 3,
        "kinds": b"".join(post(q, op, 64) for q in (RC, RC_SMALL, UC, UD, XRC_INI, DCI) for op in range(6)) + RUN * 3,
        "cut": begin + bytes([OP_CUT, 0, 0, 0, 0, 0]) + post(RC, P_WRITE, 8) + RUN * 2 + ask(RC, 0) + RUN,
        "cut-half": begin + bytes([OP_CUT, 0, 0, 64, 0, 0]) + post(RC, P_WRITE, 8) * 9 + RUN * 2,
        "cut-registry": begin + bytes([OP_CUT, 1, 0, 0, 0, 0]) + post(UD, P_SEND, 8) + RUN * 2,
        "ring-jumps": begin + bytes([OP_RAW]) + struct.pack("<IB", 4 * 32, 4) + b"\xff\xff\xff\x7f" + RUN * 2,
        "ring-full": b"".join(post(RC, P_WRITE, 8) + RUN for _ in range(40)) + bytes([OP_STATE, RC, 6]) + RUN,
        "registry": begin
        + bytes([OP_REGISTRY])
        + struct.pack("<IB", 4, 64)
        + bytes(range(64))
        + bytes([OP_ALIVE])
        + RUN,
        # No process has the id 0 or -1.
        "no-pid": bytes([OP_REGISTRY])
        + struct.pack("<IBi", REGISTRY_ENTRIES + 5 * 128 + 4, 4, 0)
        + post(RC, P_READ, 1 << 20)
        + RUN
        + answer(0, npieces=1, payload=piece(64, 1 << 20))
        + RUN,
        "any-pid": bytes([OP_REGISTRY]) + struct.pack("<IBi", REGISTRY_ENTRIES + 5 * 128 + 4, 4, -1) + begin,
        "gone": begin
        + bytes([OP_REGISTRY])
        + struct.pack("<IB", REGISTRY_ENTRIES + 5 * 128, 4)
        + b"\2\0\0\0"
        + RUN
        + post(DCI, P_WRITE, 8)
        + RUN
        + bytes([OP_ALIVE])
        + RUN,
        # More at a time than the peer can have begun.
        "taken": post(RC, P_WRITE, 8) * 20
        + RUN
        + b"".join(bytes([OP_RAW]) + struct.pack("<IBI", SLOTS + i * SLOT, 4, TAKEN) for i in range(20))
        + bytes([OP_STATE, RC, 6])
        + RUN
        + POLL,
        "cancelled": begin + post(RC, P_READ, 99) + bytes([OP_STATE, RC, 6]) + RUN + answer(1) + answer(0) + RUN + POLL,
    }


if __name__ == "__main__":
    write(seeds())

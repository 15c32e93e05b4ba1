"""Writes seeds for fuzz_wqe.c: one work request of each kind on each kind of queue pair, as libmlx5 would lay it out.

seeds_wqe.py FOLDER
"""

import struct

from seed_files import write

# As in fuzz_wqe.c.
RC_A, RC_B, UC_A, UC_B, UD, XRC_INI, XRC_TGT, DCI, DCT, SRQ_A, SRQ_B = range(11)
OP_RUN, OP_SEND, OP_RECV, OP_SRQ, OP_RECORD, OP_STATE, OP_POLL, OP_KEY, OP_DROP, OP_DATA, OP_STREAM = range(11)
OP_RESIZE, OP_UNMAP, OP_LIMIT = range(11, 14)
ARENA = 0x200000000000
READ_ONLY, GONE, QUEUES = ARENA + (1 << 20), ARENA + (2 << 20), 3 << 20
ALL_KEY, READ_ONLY_KEY, GONE_KEY, WINDOW_1, WINDOW_2, LIST_KEY, OTHER_LIST_KEY, PLAIN_LIST_KEY = (
    0x10 + i << 8 | (0x10 + i if i else 0) for i in range(8)
)
FIRST_QPN, XRC_SRQN = 0x100, 0x401
GID = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])

# mlx5dv.h
NOP, SEND_INVAL, WRITE, WRITE_IMM, SEND, SEND_IMM, READ, CS, FA, UMR, MMO = (
    *(0x00, 0x01, 0x08, 0x09, 0x0A, 0x0B, 0x10, 0x11, 0x12, 0x25, 0x2F),
)


def data(addr: int = ARENA, length: int = 64, key: int = ALL_KEY) -> bytes:
    return struct.pack(">IIQ", length, key, addr)


def inline(payload: bytes) -> bytes:
    whole = struct.pack(">I", len(payload) | 0x80000000) + payload
    return whole + bytes(-len(whole) % 16)


def remote(addr: int = ARENA + 4096, key: int = ALL_KEY) -> bytes:
    return struct.pack(">QII", addr, key, 0)


def atomic(add: int = 1, compare: int = 0) -> bytes:
    return struct.pack(">QQ", add, compare)


def address(qp: int, key: int = 1) -> bytes:
    """struct mlx5_wqe_av"""
    dc = struct.pack(">Q", key) if qp == DCT else struct.pack(">II", key, 0)
    return dc + struct.pack(">IBBH", FIRST_QPN + qp | 0x80000000, 0, 0, 0) + bytes(4 + 6 + 1 + 1 + 4) + GID


def wqe(opcode: int, *segments: bytes, imm: int = 0, opmod: int = 0, flags: int = 0x08, stream: int = 0) -> bytes:
    body = b"".join(segments)
    ds = 1 + (len(body) + 15) // 16
    control = struct.pack(">IIBHBI", opmod << 24 | opcode, ds & 0x3F, 0, stream, flags, imm)
    whole = control + body
    return whole + bytes(-len(whole) % 64)


def send(qp: int, entry: bytes) -> bytes:
    return struct.pack("<BBBB", OP_SEND, qp, 1, len(entry) // 64 - 1) + entry


def recv(qp: int, *segments: bytes) -> bytes:
    return struct.pack("<BBB", OP_RECV, qp, len(segments)) + b"".join(segments)


def srq(which: int, index: int, *segments: bytes) -> bytes:
    entry = struct.pack(">HHIII", 0, index + 1, 0, 0, 0)[:16] + b"".join(segments)
    return struct.pack("<BBB", OP_SRQ, which, len(entry)) + entry


RUN = bytes([OP_RUN])
POLL = bytes([OP_POLL])


def umr(
    flags: int,
    octowords: int,
    mask: int,
    *,
    free: bool = False,
    access: int = 0xF,
    qpn_key: int,
    start: int,
    length: int,
    entries: bytes = b"",
    key: int,
) -> bytes:
    control = struct.pack(">B3xHHQ32x", flags, octowords, 0, mask)
    context = struct.pack(">BBBBIIIQQ32x", 0x40 if free else 0, 0, access << 3, 0, qpn_key, 0, 0, start, length)
    return wqe(UMR, control, context, entries, imm=key)


def klm(length: int, key: int, addr: int) -> bytes:
    return struct.pack(">IIQ", length, key, addr)


INLINE, CHECK_FREE, CHECK_QPN = 1 << 7, 1 << 5, 1 << 3
LEN, START, QPN, KEY, FREE, ACCESS = 1 << 0, 1 << 6, 1 << 14, 1 << 13, 1 << 29, 0xF << 18


def seeds() -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    two_sided = {
        "rc": (RC_A, RC_B, b""),
        "uc": (UC_A, UC_B, b""),
        "ud": (UD, UD, address(UD)),
    }
    for name, (a, b, av) in two_sided.items():
        for opcode in (SEND, SEND_IMM):
            made[f"{name}-send-{opcode:x}"] = (
                recv(b, data(length=512), data(ARENA + 1024))
                + send(a, wqe(opcode, av, data(), inline(b"1234"), imm=7))
                + RUN
                + POLL
            )
    for name, a in {"rc": RC_A, "uc": UC_A}.items():
        made[f"{name}-write"] = send(a, wqe(WRITE, remote(), data(), data(ARENA + 128))) + RUN
        made[f"{name}-write-imm"] = recv(a + 1) + send(a, wqe(WRITE_IMM, remote(), data(), imm=3)) + RUN
    made["rc-inval"] = recv(RC_B, data()) + send(RC_A, wqe(SEND_INVAL, data(), imm=OTHER_LIST_KEY)) + RUN
    made["rc-read"] = send(RC_A, wqe(READ, remote(), data(length=4096))) + RUN
    made["rc-cs"] = send(RC_A, wqe(CS, remote(), atomic(), data(length=8))) + RUN
    made["rc-fa"] = send(RC_A, wqe(FA, remote(), atomic(), data(length=8))) + RUN
    made["rc-nop"] = send(RC_A, wqe(NOP)) * 3 + RUN
    made["rc-bad-key"] = send(RC_A, wqe(WRITE, remote(key=1), data())) + RUN + recv(RC_A, data()) + RUN
    made["rc-read-only"] = send(RC_A, wqe(READ, remote(), data(READ_ONLY, key=READ_ONLY_KEY))) + RUN
    made["rc-gone"] = send(RC_A, wqe(WRITE, remote(), data(GONE, key=GONE_KEY))) + RUN
    made["rc-gone-target"] = send(RC_A, wqe(WRITE, remote(GONE, GONE_KEY), data())) + RUN
    made["rc-gone-atomic"] = send(RC_A, wqe(FA, remote(GONE, GONE_KEY), atomic(), data(length=8))) + RUN
    made["rc-rnr"] = send(RC_A, wqe(SEND, data())) + RUN * 3
    made["rc-error-reset"] = (
        send(RC_A, wqe(WRITE, remote(), data())) + bytes([OP_STATE, RC_A, 6]) + RUN + bytes([OP_STATE, RC_A, 0]) + RUN
    )
    made["rc-drain"] = send(RC_A, wqe(WRITE, remote(), data())) + bytes([OP_STATE, RC_A, 4]) + RUN
    made["rc-drop"] = send(RC_A, wqe(WRITE, remote(), data())) + bytes([OP_DROP, RC_B]) + RUN + bytes([OP_DROP, RC_A])
    made["mmo"] = send(RC_A, wqe(MMO, bytes(16), data(length=256), data(ARENA + 8192, 256), opmod=1)) + RUN
    xrc = struct.pack(">IIII", XRC_SRQN, 0, 0, 0)
    made["xrc"] = srq(1, 0, data(), data(ARENA + 64)) + send(XRC_INI, wqe(SEND, xrc, data())) + RUN
    made["xrc-write"] = send(XRC_INI, wqe(WRITE, xrc, remote(), data())) + RUN
    made["xrc-no-srq"] = send(XRC_INI, wqe(SEND, bytes(16), data())) + RUN
    made["dc"] = srq(0, 0, data()) + send(DCI, wqe(SEND, address(DCT), data(), stream=1)) + RUN
    made["dc-write"] = send(DCI, wqe(WRITE, address(DCT), remote(), data(), stream=2)) + RUN
    made["dc-key"] = send(DCI, wqe(WRITE, address(DCT, 2), remote(), data(), stream=2)) + RUN
    made["dc-stream-error"] = (
        send(DCI, wqe(WRITE, address(DCT), remote(key=1), data(), stream=3)) + RUN + bytes([OP_STREAM, 3, 0]) + RUN
    )
    made["srq"] = srq(0, 0, data()) + srq(0, 1, data()) + send(SRQ_A, wqe(SEND, data())) * 2 + RUN
    made["srq-limit"] = bytes([OP_LIMIT, 0, 2]) + made["srq"]
    made["srq-broken"] = srq(0, 999, data()) * 2 + send(SRQ_A, wqe(SEND, data())) * 3 + RUN
    made["list"] = umr(
        INLINE,
        4,
        LEN | START | ACCESS | FREE,
        qpn_key=0,
        start=0,
        length=128,
        key=LIST_KEY,
        entries=klm(64, ALL_KEY, ARENA) + klm(64, ALL_KEY, ARENA + 256) + bytes(32),
    )
    made["list"] = send(RC_A, made["list"]) + send(RC_A, wqe(WRITE, remote(), data(0, 100, LIST_KEY))) + RUN
    repeat = struct.pack(">IIIHH", 96, 0x400, 4, 0, 2)
    strided = (
        repeat + struct.pack(">HHIQ", 64, 48, ALL_KEY, ARENA) + struct.pack(">HHIQ", 64, 48, ALL_KEY, ARENA + 4096)
    )
    made["strided"] = (
        send(RC_A, umr(INLINE, 3, LEN | START | ACCESS, qpn_key=0, start=0, length=384, key=LIST_KEY, entries=strided))
        + send(RC_A, wqe(READ, remote(), data(0, 300, LIST_KEY)))
        + RUN
    )
    made["nested"] = send(
        RC_A,
        umr(
            INLINE,
            1,
            LEN | START | ACCESS,
            qpn_key=0,
            start=0,
            length=64,
            key=LIST_KEY,
            entries=klm(64, OTHER_LIST_KEY, 0),
        ),
    )
    made["nested"] += send(
        RC_A,
        umr(
            INLINE,
            1,
            LEN | START | ACCESS,
            qpn_key=0,
            start=0,
            length=64,
            key=OTHER_LIST_KEY,
            entries=klm(64, LIST_KEY, 0),
        ),
    ) + send(RC_A, wqe(WRITE, remote(), data(0, 64, LIST_KEY)))
    made["nested"] += RUN
    made["plain"] = send(RC_A, wqe(WRITE, remote(), data(0, 64, PLAIN_LIST_KEY))) + RUN
    for name, key in {"window-1": WINDOW_1, "window-2": WINDOW_2}.items():
        bind = umr(
            INLINE | CHECK_FREE,
            1,
            LEN | START | ACCESS | QPN | KEY | FREE,
            start=ARENA + 64,
            length=256,
            qpn_key=FIRST_QPN + RC_B << 8 | 0x77,
            key=key,
            entries=klm(256, ALL_KEY, ARENA + 64),
        )
        made[name] = send(RC_B, bind) + RUN + send(RC_A, wqe(WRITE, remote(ARENA + 64, key & ~0xFF | 0x77), data()))
        invalidate = umr(INLINE | CHECK_QPN, 0, FREE, free=True, start=0, length=0, qpn_key=0, key=key & ~0xFF | 0x77)
        made[name] += RUN + send(RC_B, invalidate) + RUN
    made["overrun"] = (
        send(RC_A, wqe(NOP)) * 30 + RUN + send(RC_A, wqe(NOP)) * 30 + RUN + send(UC_A, wqe(NOP)) * 10 + RUN
    )
    made["wrap"] = (send(RC_A, wqe(WRITE, remote(), *[data(ARENA + i * 64) for i in range(9)])) + RUN + POLL) * 12
    made["resize"] = send(RC_A, wqe(NOP)) * 3 + RUN + bytes([OP_RESIZE, 0, 5]) + send(RC_A, wqe(NOP)) * 3 + RUN
    made["records"] = (
        struct.pack("<BBBI", OP_RECORD, RC_A, 1, 77) + RUN + struct.pack("<BBBI", OP_RECORD, RC_A, 0, 9) + RUN
    )
    made["unmapped"] = send(RC_A, wqe(NOP)) + struct.pack("<BII", OP_UNMAP, QUEUES, 1 << 20) + RUN * 2 + POLL
    made["key-goes"] = send(RC_A, wqe(WRITE, remote(), data())) + bytes([OP_KEY, 0]) + RUN + bytes([OP_KEY, 0])
    made["data"] = bytes([OP_DATA, 0, 0, 4]) + b"abcd" + made["rc-write"]
    return made


if __name__ == "__main__":
    write(seeds())

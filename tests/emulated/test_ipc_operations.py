"""QPs of two processes, every operation, with payload read in place and with payload through shared memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated.ipc import Process, connect, make_end, processes
from emulated.nic import ALL_ACCESS
from pyverbs import enums as e

LENGTHS = (0, 1, 7, 8, 64, 4096, 8191, 8192, 8193, 16384, 16385, 65536, 262144, 262145, 1 << 20)
SIZE = 1 << 20


@pytest.fixture(params=[True, False], ids=["one_copy", "two_copies"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    with processes(tmp_path, one_copy=request.param) as (a, b):
        yield a, b
        assert a.end() == 0
        assert b.end() == 0


def test_numbers_differ_and_addresses_are_the_same(two: tuple[Process, Process]) -> None:
    a, b = (make_end(p) for p in two)
    assert a["qp_num"] != b["qp_num"]
    assert a["gid"] == b["gid"]


def test_write_and_read_of_all_lengths(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, size=SIZE)
    for length in LENGTHS:
        a(
            f"sent = end.fill({length}) if {length} else b''\n"
            f"end.post(e.IBV_WR_RDMA_WRITE, end.sge({length}), peer=far)\nok(end.sent()).opcode"
        )
        assert b(f"end.read({length}).hex() if {length} else ''") == a("sent.hex()")
        expected = b(f"end.fill({length}, 5).hex() if {length} else ''" if length < SIZE - 8 else "end.fill(8).hex()")
        n = length if length < SIZE - 8 else 8
        offset = 5 if length < SIZE - 8 else 0
        a(f"end.post(e.IBV_WR_RDMA_READ, end.sge({n}), peer=far, offset={offset})\nok(end.sent()).opcode")
        assert a(f"end.read({n}).hex() if {n} else ''") == expected


def test_64_mebibytes_each_way(two: tuple[Process, Process]) -> None:
    a, b = two
    n = 64 << 20
    connect(a, b, size=n)
    digest = f"__import__('hashlib').sha256(end.mr.read({n}, 0)).hexdigest()"
    a(f"import random\nend.mr.write(random.Random(1).randbytes({n}), {n})\nNone")
    a(f"end.post(e.IBV_WR_RDMA_WRITE, end.sge({n}), peer=far)\nok(end.sent(60)).opcode")
    assert b(digest) == a(digest)
    b(f"import random\nend.mr.write(random.Random(2).randbytes({n}), {n})\nNone")
    a(f"end.post(e.IBV_WR_RDMA_READ, end.sge({n}), peer=far)\nok(end.sent(60)).opcode")
    assert b(digest) == a(digest)
    b(f"end.recv(end.sge({n}), wr_id=3)\nNone")
    a(f"import random\nend.mr.write(random.Random(3).randbytes({n}), {n})\nNone")
    a(f"end.post(e.IBV_WR_SEND, end.sge({n}))\nok(end.sent(60)).opcode")
    assert b("ok(end.received(), 3).byte_len") == n
    assert b(digest) == a(digest)


def test_send_with_and_without_immediate_data(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, size=SIZE)
    for length in LENGTHS:
        b(f"end.recv(end.sge({SIZE}), wr_id={length})\nNone")
        a(
            f"sent = end.fill({length}) if {length} else b''\n"
            f"end.post(e.IBV_WR_SEND_WITH_IMM, end.sge({length}), imm={length} + 1)\nok(end.sent()).opcode"
        )
        got = b(f"w = ok(end.received(), {length})\n[w.byte_len, w.imm_data, w.wc_flags & e.IBV_WC_WITH_IMM]")
        assert got == [length, length + 1, e.IBV_WC_WITH_IMM]
        assert b(f"end.read({length}).hex() if {length} else ''") == a("sent.hex()")
    b("end.recv(end.sge(64))\nNone")
    a("end.post(e.IBV_WR_SEND, end.sge(64))\nok(end.sent()).opcode")
    assert b("ok(end.received()).wc_flags & e.IBV_WC_WITH_IMM") == 0


def test_write_with_immediate_data(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, size=SIZE)
    for length in (0, 8, 300_000):
        b("end.recv(end.sge(0))\nNone")
        a(
            f"sent = end.fill({length}) if {length} else b''\n"
            f"end.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, end.sge({length}), peer=far, imm=77)\nok(end.sent()).opcode"
        )
        got = b("w = ok(end.received())\n[w.byte_len, w.imm_data, w.opcode]")
        assert got == [length, 77, e.IBV_WC_RECV_RDMA_WITH_IMM]
        assert b(f"end.read({length}).hex() if {length} else ''") == a("sent.hex()")


def test_messages_of_several_slices_follow_each_other(two: tuple[Process, Process]) -> None:
    """With receives that come late, for the first packet of a SEND and the last of a WRITE with immediate data."""
    a, b = two
    n, size, quarter = 3, (1 << 20) + 4099, 1 << 23
    connect(a, b, size=4 * quarter)
    a(
        "import random, zlib\n"
        f"end.mr.write(random.Random(1).randbytes({quarter}), {quarter})\n"
        f"for i in range({n}):\n"
        f"    end.post(e.IBV_WR_SEND_WITH_IMM, end.sge({size}, i), imm=i)\n"
        f"    at = {quarter} + {size} * i\n"
        f"    end.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, end.sge({size}, 100 + i), peer=far, offset=at, imm=i)\n"
        f"    end.post(e.IBV_WR_RDMA_READ, end.sge({size}, at), peer=far, offset=at)\n"
        f"    end.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, end.sge(8, {3 * quarter} + 8 * i), peer=far, offset={3 * quarter}, "
        "atomic=(1, 0))\n"
        "None"
    )
    b(f"import zlib\nend.mr.write(struct.pack('Q', 5), 8, {3 * quarter})\nNone")
    for i in range(n):
        a("nothing(end.scq, 0.02)")
        b(f"end.recv(end.sge({size}, {size} * {i}), wr_id={i})\nNone")
        a("ok(end.sent())\nnothing(end.scq, 0.02)")
        assert b(f"w = ok(end.received(), {i})\n[w.byte_len, w.imm_data]") == [size, i]
        assert b(f"zlib.crc32(end.read({size}, {size} * {i}))") == a(f"zlib.crc32(end.read({size}, {i}))")
        b("end.recv(end.sge(0))\nNone")
        assert b("w = ok(end.received())\n[w.byte_len, w.imm_data]") == [size, i]
        sent = a(f"zlib.crc32(end.read({size}, 100 + {i}))")
        assert b(f"zlib.crc32(end.read({size}, {quarter} + {size} * {i}))") == sent
        a("for k in range(3): ok(end.sent())\nNone")
        assert a(f"zlib.crc32(end.read({size}, {quarter} + {size} * {i}))") == sent
        assert a(f"struct.unpack('Q', end.read(8, {3 * quarter} + 8 * {i}))[0]") == 5 + i


def test_a_window_is_gone_once_the_peer_has_invalidated_it(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, access=ALL_ACCESS | e.IBV_ACCESS_MW_BIND)
    rkey = b(
        "from pyverbs.mr import MW, MWBindInfo\nfrom pyverbs.wr import SendWR\n"
        "mw = MW(end.pd, e.IBV_MW_TYPE_2)\n"
        "wr = SendWR(opcode=e.IBV_WR_BIND_MW, send_flags=e.IBV_SEND_SIGNALED)\n"
        "wr.set_bind_wr(mw, MWBindInfo(end.mr, end.mr.buf, 4096, e.IBV_ACCESS_REMOTE_READ))\n"
        "end.qp.post_send(wr)\nok(end.sent())\nend.recv(end.sge(8, 8192))\nwr.rkey"
    )
    read = f"end.post(e.IBV_WR_RDMA_READ, end.sge(8), peer=far, rkey={rkey})\nend.sent().status"
    assert a(read) == e.IBV_WC_SUCCESS
    sent = a(
        f"sent = end.fill(8)\nend.post(e.IBV_WR_SEND_WITH_INV, end.sge(8), imm={rkey})\nok(end.sent())\nsent.hex()"
    )
    assert b("got = ok(end.received())\ngot.wc_flags") & e.IBV_WC_WITH_INV
    assert b("got.imm_data") == rkey
    assert b("end.read(8, 8192).hex()") == sent
    assert a(read) == e.IBV_WC_REM_ACCESS_ERR
    b("mw.close()\nNone")


def test_scatter_and_gather(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, size=SIZE)
    b("end.recv(end.sge(10), end.sge(100_000, 20), end.sge(200_000, 200_000))\nNone")
    a(
        "sent = end.fill(250_000)\nend.post(e.IBV_WR_SEND, end.sge(1), end.sge(149_999, 1), end.sge(100_000, 150_000))\n"
        "ok(end.sent()).opcode"
    )
    assert b("ok(end.received()).byte_len") == 250_000
    got = b("(end.read(10) + end.read(100_000, 20) + end.read(149_990, 200_000)).hex()")
    assert got == a("sent.hex()")


def test_atomics(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b)
    b("end.mr.write(struct.pack('Q', 40), 8)\nNone")
    a("end.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, end.sge(8), peer=far, atomic=(2, 0))\nok(end.sent()).opcode")
    assert a("struct.unpack('Q', end.read(8))[0]") == 40
    a("end.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, end.sge(8), peer=far, atomic=(42, 7))\nok(end.sent()).opcode")
    assert a("struct.unpack('Q', end.read(8))[0]") == 42
    a("end.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, end.sge(8), peer=far, atomic=(42, 9))\nok(end.sent()).opcode")
    assert a("struct.unpack('Q', end.read(8))[0]") == 7
    assert b("struct.unpack('Q', end.read(8))[0]") == 7


def test_many_in_order_on_many_queues(two: tuple[Process, Process]) -> None:
    a, b = two
    names = [f"q{i}" for i in range(6)]
    for name in names:
        connect(a, b, name=name, size=4096 * 2)
        b(f"for i in range(100): {name}.recv({name}.sge(8, 8 * i), wr_id=i)\nNone")
    for name in names:
        a(
            f"for i in range(100):\n"
            f"    {name}.mr.write(struct.pack('Q', i), 8, 8 * i)\n"
            f"    {name}.post(e.IBV_WR_SEND, {name}.sge(8, 8 * i), wr_id=i)\nNone"
        )
    for name in names:
        assert a(f"[ok({name}.sent()).wr_id for i in range(100)]") == list(range(100))
        assert b(f"[ok({name}.received()).wr_id for i in range(100)]") == list(range(100))
        assert b(f"list(struct.unpack('100Q', {name}.read(800)))") == list(range(100))


def get_across(a: Process, b: Process, post: str) -> None:
    """Post until the receiver has it, whose completion is ``w`` then: it may be lost if the peer waits for a CPU for long."""
    received = "try:\n    w = poll(end.rcq, 2)\nexcept AssertionError:\n    w = None\nw is not None"
    for _ in range(20):
        a(f"{post}\nok(end.sent()).opcode")
        if b(received):
            return
    pytest.fail("nothing ever arrives")


def test_unreliable_connection(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, qp_type=e.IBV_QPT_UC, size=SIZE)
    for length in (1, 8192, 500_000):
        b(f"end.recv(end.sge({SIZE}))\nNone")
        get_across(a, b, f"sent = end.fill({length})\nend.post(e.IBV_WR_SEND, end.sge({length}))")
        assert b("ok(w).byte_len") == length
        assert b(f"end.read({length}).hex()") == a("sent.hex()")
    a("end.post(e.IBV_WR_SEND, end.sge(8))\nok(end.sent()).opcode")  # nobody receives: lost
    b("nothing(end.rcq)")
    b("end.recv(end.sge(0))\nNone")
    write = "end.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, end.sge(500_000), peer=far, imm=1)"
    get_across(a, b, f"sent = end.fill(500_000)\n{write}")
    assert b("ok(w).byte_len") == 500_000
    assert b("end.read(500_000).hex()") == a("sent.hex()")


def test_datagrams(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, qp_type=e.IBV_QPT_UD)
    for p in two:
        p("from pyverbs.addr import AH\nah = AH(end.pd, attr=end.address(far))\nNone")
    for n in (0, 1, 1000, 4096):
        b("end.recv(end.sge(8000))\nNone")
        send = f"end.post(e.IBV_WR_SEND_WITH_IMM, end.sge({n}), peer=far, ah=ah, imm=5)"
        get_across(a, b, f"sent = end.fill({n}) if {n} else b''\n{send}")
        got = b("ok(w)\n[w.byte_len, w.src_qp, w.imm_data, w.wc_flags & e.IBV_WC_GRH]")
        assert got == [n + 40, a("end.qp.qp_num"), 5, e.IBV_WC_GRH]
        assert b(f"end.read({n}, 40).hex() if {n} else ''") == a("sent.hex()")
        assert b("end.read(4, 32).hex()") == "c0000201"  # from 192.0.2.1
    b("end.recv(end.sge(8000))\nNone")
    a("end.post(e.IBV_WR_SEND, end.sge(8), peer=far, ah=ah, qkey=1)\nok(end.sent()).opcode")  # a wrong key: dropped
    b("nothing(end.rcq)")

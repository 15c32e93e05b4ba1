"""A process that lives, and from some moment on forbids others to read its memory: nothing is lost, and nothing done twice.

Payload is then copied twice over the links that there are. Who reads has no CAP_SYS_PTRACE here, so that it can be forbidden.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated.ipc import FORBID, Process, connect, give_up_tracing, processes
from pyverbs import enums as e

SIZE = 4 << 20


@pytest.fixture(scope="module")
def readable() -> None:
    """Skips where no process may read another's memory to begin with: nothing can be forbidden there."""
    memory = ctypes.create_string_buffer(b"mine.")
    r, w = os.pipe()
    there = os.fork()
    if not there:
        give_up_tracing()  # who has less may not read it
        ctypes.CDLL(None).prctl(
            0x59616D61, ctypes.c_ulong(-1), 0, 0, 0
        )  # PR_SET_PTRACER: anybody, as far as Yama minds
        memory.value = b"there"
        os.write(w, b" ")
        time.sleep(60)
        os._exit(0)
    os.read(r, 1)
    here = os.fork()
    if not here:
        give_up_tracing()
        got = ctypes.create_string_buffer(5)
        local, remote = ((ctypes.c_void_p * 2)(ctypes.addressof(at), 5) for at in (got, memory))
        os._exit(ctypes.CDLL(None).process_vm_readv(there, local, 1, remote, 1, 0) != 5 or got.raw != b"there")
    _, status = os.waitpid(here, 0)
    os.kill(there, signal.SIGKILL)
    os.waitpid(there, 0)
    os.close(r)
    os.close(w)
    if status:
        pytest.skip("no process may read another's memory here: payload is copied twice from the beginning")


@pytest.fixture
def two(readable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Process, Process]]:
    monkeypatch.setenv("AIORDMA_EMULATOR_LOG", "info")
    with processes(tmp_path, traces=False, log=tmp_path / "log") as (a, b):
        for p in (a, b):
            p(
                "import random, zlib\n"
                "def put(n, seed, at=0): end.mr.write(random.Random(seed).randbytes(n), n, at)\n"
                "def crc(n, at=0): return zlib.crc32(end.read(n, at))\n"
                "def expected(n, seed): return zlib.crc32(random.Random(seed).randbytes(n))\n"
                "def word(at): return struct.unpack('Q', end.read(8, at))[0]\nNone"
            )
        yield a, b


def found_out(tmp_path: Path) -> bool:
    """Whether anybody was refused what it could read before."""
    return "payload is copied twice from now on" in (tmp_path / "log").read_text()


def exchange(a: Process, b: Process, length: int, seed: int) -> None:
    """Every operation from one to the other, one after the other."""
    expected = a(f"expected({length}, {seed})")
    a(f"put({length}, {seed})\nend.post(e.IBV_WR_RDMA_WRITE, end.sge({length}), peer=far)\nok(end.sent()).opcode")
    assert b(f"crc({length})") == expected
    b(f"put({length}, {seed} + 1)\nNone")
    a(f"end.post(e.IBV_WR_RDMA_READ, end.sge({length}), peer=far)\nok(end.sent()).opcode")
    assert a(f"crc({length})") == a(f"expected({length}, {seed} + 1)")
    b(f"end.recv(end.sge({length}), wr_id={seed})\nend.recv(end.sge(0), wr_id={seed} + 1)\nNone")
    a(f"put({length}, {seed} + 2)\nend.post(e.IBV_WR_SEND, end.sge({length}))\nok(end.sent()).opcode")
    assert b(f"ok(end.received(), {seed}).byte_len") == length
    assert b(f"crc({length})") == a(f"expected({length}, {seed} + 2)")
    a(
        f"put({length}, {seed})\n"
        f"end.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, end.sge({length}), peer=far, imm={seed})\nok(end.sent()).opcode"
    )
    assert b(f"ok(end.received(), {seed} + 1).imm_data") == seed
    assert b(f"crc({length})") == expected
    b(f"end.mr.write(struct.pack('Q', {seed}), 8)\nNone")
    a("end.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, end.sge(8), peer=far, atomic=(5, 0))\nok(end.sent()).opcode")
    assert a("word(0)") == seed
    assert b("word(0)") == seed + 5
    b("nothing(end.rcq)")


@pytest.mark.parametrize("forbids", ["a", "b"])
def test_every_operation_before_and_after(two: tuple[Process, Process], forbids: str, tmp_path: Path) -> None:
    a, b = two
    connect(a, b, size=SIZE)
    exchange(a, b, 100_000, 10)
    exchange(b, a, SIZE, 20)
    assert not found_out(tmp_path)
    assert {"a": a, "b": b}[forbids](FORBID) == 0
    exchange(a, b, 100_000, 30)
    exchange(b, a, SIZE, 40)
    exchange(a, b, 9000, 50)
    assert found_out(tmp_path)


def test_what_is_on_its_way_is_done_once_and_in_order(two: tuple[Process, Process], tmp_path: Path) -> None:
    """Writes, sends and atomics that the peer only finds when it may not read their payload any more."""
    a, b = two
    n = 5
    connect(a, b, size=SIZE)
    exchange(a, b, 100_000, 10)
    b(f"for i in range(3 * {n}): end.recv(end.sge(50_000, (1 << 20) + 50_000 * i), wr_id=i)\nNone")
    a(f"put({SIZE}, 1)\nNone")
    b(f"end.mr.write(bytes({SIZE}), {SIZE})\nNone")
    b.stop()
    a(
        f"at = 3 << 20\nfor i in range({n}):\n"
        "    end.post(e.IBV_WR_RDMA_WRITE, end.sge(100_000, 100_000 * i), peer=far, offset=100_000 * i)\n"
        "    end.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, end.sge(8, at + 8 * i), peer=far, offset=at, atomic=(1 + i, 0))\n"
        "    end.post(e.IBV_WR_SEND_WITH_IMM, end.sge(50_000, 7 * i), imm=i)\n"
        "    end.post(e.IBV_WR_SEND_WITH_IMM, end.sge(40, i), imm=i)\n"
        "    end.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, end.sge(9000, 9 * i), peer=far, offset=(2 << 20) + 9000 * i, imm=i)\n"
        "None"
    )
    a("nothing(end.scq, 0.05)")
    assert a(FORBID) == 0
    b.go_on()
    a(f"for i in range(5 * {n}): ok(end.sent())\nnothing(end.scq)")
    assert a(f"[word(at + 8 * i) for i in range({n})]") == [i * (i + 1) // 2 for i in range(n)]
    assert b("word(3 << 20)") == n * (n + 1) // 2
    got = b(f"w = [ok(end.received()) for i in range(3 * {n})]\n[(x.wr_id, x.byte_len, x.imm_data) for x in w]")
    assert got == [[3 * i + k, size, i] for i in range(n) for k, size in enumerate((50_000, 40, 9000))]
    b("nothing(end.rcq)")
    assert b(f"crc({n} * 100_000)") == a(f"crc({n} * 100_000)")
    for i in range(n):
        for size, there, here in (
            (50_000, (1 << 20) + 50_000 * 3 * i, 7 * i),
            (40, (1 << 20) + 50_000 * (3 * i + 1), i),
            (9000, (2 << 20) + 9000 * i, 9 * i),
        ):
            assert b(f"crc({size}, {there})") == a(f"crc({size}, {here})")
    assert found_out(tmp_path)


def test_answered_reads_are_asked_for_again(two: tuple[Process, Process], tmp_path: Path) -> None:
    """The bytes that several answers point at can't be had any more. What follows comes after them."""
    a, b = two
    n = 8
    connect(a, b, size=SIZE)
    exchange(a, b, 100_000, 10)
    b(f"put({SIZE}, 2)\nend.mr.write(struct.pack('Q', 40), 8, 2 << 20)\nNone")
    expected = b(f"[crc(100_000, 1000 * i) for i in range({n})]")
    b.stop()
    a(
        f"for i in range({n}):\n"
        "    end.post(e.IBV_WR_RDMA_READ, end.sge(100_000, 100_000 * i), peer=far, offset=1000 * i)\n"
        "end.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, end.sge(8, 2 << 20), peer=far, offset=2 << 20, atomic=(2, 0))\n"
        "end.post(e.IBV_WR_RDMA_WRITE, end.sge(200_000, 1 << 20), peer=far)\n"
        "nothing(end.scq, 0.05)"
    )
    a.stop()
    b.go_on()
    assert b(f"time.sleep(0.1)\n{FORBID}") == 0
    a.go_on()
    a(f"for i in range({n} + 2): ok(end.sent())\nnothing(end.scq)")
    assert a(f"[crc(100_000, 100_000 * i) for i in range({n})]") == expected
    assert (a("word(2 << 20)"), b("word(2 << 20)")) == (40, 42)
    assert b("crc(200_000)") == a("crc(200_000, 1 << 20)")
    assert found_out(tmp_path)


@pytest.mark.parametrize("opcode", ["RDMA_WRITE", "RDMA_READ", "SEND"])
def test_in_the_middle_of_long_messages(two: tuple[Process, Process], opcode: str, tmp_path: Path) -> None:
    a, b = two
    n, size = 6, 16 << 20
    connect(a, b, size=size)
    exchange(a, b, 100_000, 10)
    target, source = (a, b) if opcode == "RDMA_READ" else (b, a)
    source(f"put({size}, 3)\nNone")
    if opcode == "SEND":
        b(f"for i in range({n}): end.recv(end.sge({size}), wr_id=i)\nNone")
    post = f"end.post(e.IBV_WR_{opcode}, end.sge({size}){'' if opcode == 'SEND' else ', peer=far'}, wr_id=i)"
    a.start(f"for i in range({n}): {post}\nok(end.sent(60), 0)\n" + (FORBID if source is a else "None"))
    if source is b:
        b(FORBID)
    a.result()
    a(f"for i in range(1, {n}): ok(end.sent(60), i)\nnothing(end.scq)")
    if opcode == "SEND":
        b(f"for i in range({n}): assert ok(end.received(), i).byte_len == {size}\nnothing(end.rcq)")
    assert target(f"crc({size})") == source(f"crc({size})")
    # However far it had come: that it's barred is found out at the latest with this.
    exchange(a, b, 100_000, 60)
    assert found_out(tmp_path)


def test_unreliable_messages_arrive_too(two: tuple[Process, Process], tmp_path: Path) -> None:
    a, b = two
    connect(a, b, size=SIZE, qp_type=e.IBV_QPT_UC)
    for round in range(2):
        b(f"end.recv(end.sge({SIZE}), wr_id={round})\nNone")
        a(f"put(3_000_000, {round})\nNone")
        for _ in range(20):  # one is lost if the peer waits for a CPU for too long
            a("end.post(e.IBV_WR_SEND, end.sge(3_000_000))\nok(end.sent()).opcode")
            if b("try:\n    w = poll(end.rcq, 2)\nexcept AssertionError:\n    w = None\nw is not None"):
                break
        assert b(f"ok(w, {round}).byte_len") == 3_000_000
        assert b("crc(3_000_000)") == a("crc(3_000_000)")
        a(FORBID)
    assert found_out(tmp_path)


@pytest.mark.parametrize(("opcode", "known"), [("RDMA_WRITE", True), ("RDMA_READ", False), ("SEND", False)])
def test_one_that_forbids_and_is_killed_is_a_timeout(two: tuple[Process, Process], opcode: str, known: bool) -> None:
    a, b = two
    connect(a, b, name="linked", size=SIZE)
    assert (
        a("linked.post(e.IBV_WR_RDMA_WRITE, linked.sge(8), peer=far_linked)\nlinked.sent().status") == e.IBV_WC_SUCCESS
    )
    connect(a, b, size=SIZE, changes="timeout=14, retry_cnt=3")  # 67 ms, four times
    if known:
        a(FORBID)
        assert b(FORBID) == 0
        exchange(a, b, 100_000, 10)
    b.stop()
    peer = "" if opcode == "SEND" else ", peer=far"
    a(f"for i in range(4): end.post(e.IBV_WR_{opcode}, end.sge(100_000){peer})\nNone")
    a(FORBID)
    began = time.monotonic()
    b.signal(signal.SIGKILL)
    found = a("[end.sent(30).status for i in range(4)]")
    assert found == [e.IBV_WC_RETRY_EXC_ERR] + [e.IBV_WC_WR_FLUSH_ERR] * 3
    assert time.monotonic() - began < 30

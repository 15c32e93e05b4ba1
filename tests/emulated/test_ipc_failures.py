"""Two processes, and what goes wrong: refusals, missing receives, peers that stop or die."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated.ipc import Process, connect, make_end, processes
from pyverbs import enums as e

READ, WRITE, SEND = "e.IBV_WR_RDMA_READ", "e.IBV_WR_RDMA_WRITE", "e.IBV_WR_SEND"
FETCH_ADD = "e.IBV_WR_ATOMIC_FETCH_AND_ADD"

#: For QPs whose requests nobody answers: 34 ms, four times. An answer may take longer on a machine that is busy.
QUICK = "timeout=13, retry_cnt=3"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    with processes(tmp_path) as (a, b):
        yield a, b


def connect_doomed(a: Process, b: Process, **options: int) -> None:
    """Connect two processes that have a link, and an end that gives up soon: nothing is to be answered on it."""
    connect(a, b, name="linked")
    assert (
        a("linked.post(e.IBV_WR_RDMA_WRITE, linked.sge(8), peer=far_linked)\nlinked.sent().status") == e.IBV_WC_SUCCESS
    )
    connect(a, b, changes=QUICK, **options)


def status(process: Process, opcode: str, length: int = 8, more: str = "peer=far") -> int:
    """What a work request ends with."""
    code = f"end.post({opcode}, end.sge({length}), {more})\nend.sent().status"
    return int(process(code))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("opcode", [READ, WRITE, FETCH_ADD])
@pytest.mark.parametrize("length", [8, 100_000])
def test_a_wrong_key_is_an_access_error_on_both_sides(two: tuple[Process, Process], opcode: str, length: int) -> None:
    a, b = two
    connect(a, b, size=1 << 17)
    if opcode == FETCH_ADD:
        length = 8
    more = "peer=far, rkey=0x1234567" + (", atomic=(1, 1)" if opcode == FETCH_ADD else "")
    assert status(a, opcode, length, more) == e.IBV_WC_REM_ACCESS_ERR
    assert a("end.query_state()") == e.IBV_QPS_ERR
    assert b("end.query_state()") == e.IBV_QPS_ERR
    assert b("end.async_event()") == e.IBV_EVENT_QP_ACCESS_ERR


def test_what_lies_beyond_the_memory_is_an_access_error(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, size=1 << 16)
    assert status(a, WRITE, 8, "peer=far, offset=(1 << 16) - 7") == e.IBV_WC_REM_ACCESS_ERR
    assert b("end.query_state()") == e.IBV_QPS_ERR


def test_a_key_of_another_domain_is_an_access_error(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b)
    other = make_end(b, "other")
    assert status(a, WRITE, 8, f"peer=far, rkey={other['rkey']}") == e.IBV_WC_REM_ACCESS_ERR


def test_what_the_queue_pair_does_not_allow_is_an_invalid_request(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, changes="qp_access_flags=e.IBV_ACCESS_LOCAL_WRITE")
    assert status(a, WRITE) == e.IBV_WC_REM_INV_REQ_ERR
    assert b("end.query_state()") == e.IBV_QPS_ERR


def test_an_unaligned_atomic_is_an_invalid_request(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b)
    assert status(a, FETCH_ADD, 8, "peer=far, offset=4, atomic=(1, 1)") == e.IBV_WC_REM_INV_REQ_ERR


@pytest.mark.parametrize("length", [100, 100_000, 3 << 20])
def test_a_message_longer_than_the_receive_fails_on_both_sides(two: tuple[Process, Process], length: int) -> None:
    a, b = two
    connect(a, b, size=length)
    b(f"end.recv(end.sge({length} - 1))\nNone")
    assert status(a, SEND, length, "") == e.IBV_WC_REM_INV_REQ_ERR
    assert b("end.received().status") == e.IBV_WC_LOC_LEN_ERR


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_memory_that_goes_in_the_middle_of_a_message_is_an_access_error(
    two: tuple[Process, Process], opcode: str
) -> None:
    """All that comes before it is done, the message and what is behind it isn't."""
    a, b = two
    n, size = 8, 16 << 20
    connect(a, b, size=size)
    b(f"from pyverbs.mr import MR\nmr = MR(end.pd, {size}, ALL_ACCESS)\nNone")
    rkey, buf = b("[mr.rkey, mr.buf]")
    a.start(
        f"far.mr.rkey, far.mr.buf = {rkey}, {buf}\n"
        f"for i in range({n}): end.post({opcode}, end.sge({size}), peer=far)\n"
        f"[end.sent(60).status for i in range({n})]"
    )
    b("mr.close()\nNone")
    found = a.result()
    done = found.count(e.IBV_WC_SUCCESS)
    refused = [e.IBV_WC_REM_ACCESS_ERR] if done < n else []
    assert found == [e.IBV_WC_SUCCESS] * done + refused + [e.IBV_WC_WR_FLUSH_ERR] * (n - done - len(refused))


def test_a_receive_without_memory_is_the_receivers_fault(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b)
    b("end.recv(end.sge(64, key=end.mr.lkey ^ 0x100))\nNone")
    assert status(a, SEND, 8, "") == e.IBV_WC_REM_OP_ERR
    assert b("end.received().status") == e.IBV_WC_LOC_PROT_ERR


@pytest.mark.parametrize("one_copy", [True, False])
def test_memory_that_is_gone_on_the_senders_side(tmp_path: Path, one_copy: bool) -> None:
    with processes(tmp_path, one_copy=one_copy) as (a, b):
        connect(a, b, size=1 << 17)
        assert status(a, WRITE, 4096) == e.IBV_WC_SUCCESS
        a(
            "import mmap, ctypes\n"
            "from pyverbs.mr import MR\n"
            "m = mmap.mmap(-1, 1 << 17)\n"
            "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
            "mr = MR(end.pd, 1 << 17, ALL_ACCESS, at)\n"
            "libc = ctypes.CDLL(None)\nlibc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
            "libc.munmap(at, 1 << 17)\n"
            "from pyverbs.wr import SGE\nNone"
        )
        a("end.post(e.IBV_WR_RDMA_WRITE, SGE(at, 1 << 17, mr.lkey), peer=far)\nNone")
        assert a("end.sent().status") == e.IBV_WC_LOC_PROT_ERR


# ------------------------------------------------------------------ receives that aren't there


def test_rnr_retries_run_out(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, changes="rnr_retry=2")
    assert status(a, SEND, 8, "") == e.IBV_WC_RNR_RETRY_EXC_ERR
    assert b("end.query_state()") == e.IBV_QPS_RTS


@pytest.mark.parametrize("length", [8, 100_000, 3 << 20])
def test_a_send_waits_for_its_receive(two: tuple[Process, Process], length: int) -> None:
    a, b = two
    connect(a, b, size=length)
    a(f"sent = end.fill({length})\nend.post(e.IBV_WR_SEND, end.sge({length}))\nNone")
    a("nothing(end.scq, 0.2)")
    b(f"end.recv(end.sge({length}))\nNone")
    assert a("end.sent().status") == e.IBV_WC_SUCCESS
    assert b("ok(end.received()).byte_len") == length
    assert b(f"end.read({length}).hex()") == a("sent.hex()")


def test_one_that_waits_holds_up_no_other(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, name="waits")
    connect(a, b, size=1 << 20)
    a("waits.post(e.IBV_WR_SEND, waits.sge(8))\nNone")
    for _ in range(10):
        assert status(a, WRITE, 1 << 20) == e.IBV_WC_SUCCESS
        assert status(a, READ, 64) == e.IBV_WC_SUCCESS
    a("nothing(waits.scq)")
    b("waits.recv(waits.sge(8))\nNone")
    assert a("waits.sent().status") == e.IBV_WC_SUCCESS


def test_more_queues_than_the_link_has_room_for(two: tuple[Process, Process]) -> None:
    """The peer stands still; what doesn't fit waits, and all of it arrives."""
    a, b = two
    n = 150
    a(f"ends = [End(size=4096, cqe=8) for _ in range({n})]\nNone")
    b(f"ends = [End(size=4096, cqe=8) for _ in range({n})]\nNone")
    fars = b("[describe(x) for x in ends]"), a("[describe(x) for x in ends]")
    for process, infos in zip(two, fars, strict=True):
        process(f"fars = [Far(**i) for i in {infos!r}]\nfor x, f in zip(ends, fars): x.connect(f, timeout=18)\nNone")
    b.stop()
    a("for x, f in zip(ends, fars): x.post(e.IBV_WR_RDMA_WRITE, x.sge(8), peer=f)\nNone")
    time.sleep(0.1)
    b.go_on()
    assert a("{x.sent().status for x in ends} == {e.IBV_WC_SUCCESS}")


# ------------------------------------------------------------------ peers that stop, end and come back


@pytest.mark.parametrize("length", [8, 1 << 20])
@pytest.mark.parametrize("opcode", [READ, WRITE, SEND, FETCH_ADD])
def test_a_killed_peer_is_a_timeout(two: tuple[Process, Process], opcode: str, length: int) -> None:
    a, b = two
    connect_doomed(a, b, size=1 << 20)
    b.kill()
    began = time.monotonic()
    more = "" if opcode == SEND else "peer=far, atomic=(1, 1)" if opcode == FETCH_ADD else "peer=far"
    assert status(a, opcode, 8 if opcode == FETCH_ADD else length, more) == e.IBV_WC_RETRY_EXC_ERR
    assert time.monotonic() - began >= 0.134
    assert a("end.query_state()") == e.IBV_QPS_ERR


@pytest.mark.parametrize("length", [1 << 20, 5 << 20])
def test_a_peer_killed_in_the_middle(two: tuple[Process, Process], length: int) -> None:
    a, b = two
    connect(a, b, size=length, changes="timeout=16, retry_cnt=3")  # 0.3 s, four times
    a.start(
        "while True:\n"
        f"    for i in range(8): end.post(e.IBV_WR_RDMA_WRITE, end.sge({length}), peer=far)\n"
        "    found = {end.sent().status for i in range(8)}\n"
        "    if found != {e.IBV_WC_SUCCESS}: break\n"
        "sorted(found)"
    )
    time.sleep(0.3)
    b.kill()
    assert set(a.result()) <= {e.IBV_WC_SUCCESS, e.IBV_WC_RETRY_EXC_ERR, e.IBV_WC_WR_FLUSH_ERR}


def test_a_stopped_peer_is_waited_for(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b, changes="timeout=17, retry_cnt=7")  # 0.5 s, eight times
    assert status(a, WRITE) == e.IBV_WC_SUCCESS
    b.stop()
    a("sent = end.fill(64)\nend.post(e.IBV_WR_RDMA_WRITE, end.sge(64), peer=far)\nNone")
    a("nothing(end.scq, 1.0)")
    b.go_on()
    assert a("end.sent().status") == e.IBV_WC_SUCCESS
    assert b("end.read(64).hex()") == a("sent.hex()")


def test_a_peer_stopped_for_too_long_is_a_timeout_and_gets_nothing_later(two: tuple[Process, Process]) -> None:
    a, b = two
    connect_doomed(a, b)
    b("end.mr.write(bytes(64), 64)\nNone")
    b.stop()
    a("end.fill(64)\nNone")
    assert status(a, WRITE, 64) == e.IBV_WC_RETRY_EXC_ERR
    b.go_on()
    b("time.sleep(0.1)\nNone")
    assert b("end.read(64) == bytes(64)")


def test_a_restarted_peer_can_be_connected_to(tmp_path: Path) -> None:
    with processes(tmp_path) as (a, b):
        connect(a, b)
        assert status(a, WRITE) == e.IBV_WC_SUCCESS
        b.kill()
        for _ in range(3):
            again = Process(tmp_path)
            try:
                connect(a, again)
                assert status(a, WRITE) == e.IBV_WC_SUCCESS
                assert status(again, READ, 65536) == e.IBV_WC_SUCCESS
                again.kill()
            finally:
                again.close()


def test_a_peer_that_ends_well_is_a_timeout_too(two: tuple[Process, Process]) -> None:
    a, b = two
    connect_doomed(a, b)
    assert b.end() == 0
    assert status(a, WRITE) == e.IBV_WC_RETRY_EXC_ERR


def test_nobody_answers_for_a_number_that_is_nobodys(two: tuple[Process, Process]) -> None:
    a, _ = two
    info = make_end(a)
    a(f"far = Far(**{info | {'qp_num': 0xFFFFFE}!r})\nend.connect(far, {QUICK})\nNone")
    assert status(a, WRITE) == e.IBV_WC_RETRY_EXC_ERR


@pytest.mark.parametrize("length", [1 << 20, 5 << 20])
def test_closing_with_requests_under_way(two: tuple[Process, Process], length: int) -> None:
    a, b = two
    connect(a, b, size=length)
    assert status(a, WRITE) == e.IBV_WC_SUCCESS
    b.stop()
    a(f"for i in range(8): end.post(e.IBV_WR_RDMA_WRITE, end.sge({length}), peer=far)\nNone")
    a("end.state(e.IBV_QPS_ERR)\nNone")
    assert a("[end.sent().status for i in range(8)]") == [e.IBV_WC_WR_FLUSH_ERR] * 8
    a("end.close()\nNone")
    b.go_on()
    connect(a, b, size=1 << 20)
    assert status(a, WRITE, 1 << 20) == e.IBV_WC_SUCCESS


def test_a_fork_leaves_the_parents_connections_alone(two: tuple[Process, Process]) -> None:
    a, b = two
    connect(a, b)
    assert status(a, WRITE) == e.IBV_WC_SUCCESS
    a("pid = os.fork()\nos._exit(0) if not pid else os.waitpid(pid, 0)[1]")
    assert status(a, WRITE) == e.IBV_WC_SUCCESS
    # The child may have a device of its own, and talk to its parent.
    code = (
        "r, w = os.pipe()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try:\n"
        "        child = End()\n"
        "        os.write(w, str(child.qp.qp_num).encode())\n"
        "    finally:\n"
        "        os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "int(os.read(r, 100))"
    )
    numbers = [a(code), a("end.qp.qp_num"), b("end.qp.qp_num")]
    assert len({n >> 12 for n in numbers}) == 3
    assert status(a, WRITE) == e.IBV_WC_SUCCESS

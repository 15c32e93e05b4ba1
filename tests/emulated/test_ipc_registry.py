"""Where processes of one user find each other: files, who may use them, what is left over."""

import os
import random
import stat
import time
from pathlib import Path

import pytest
from emulated.core import goes_quiet
from emulated.ipc import Process, connect, make_end, processes
from pyverbs import enums as e


def folder(runtime: Path) -> Path:
    return runtime / f"aiordma-{os.geteuid()}.4"


def files(runtime: Path) -> list[str]:
    return sorted(p.name for p in folder(runtime).iterdir())


def write(process: Process) -> int:
    return int(process("end.post(e.IBV_WR_RDMA_WRITE, end.sge(8), peer=far)\nend.sent().status"))


def test_files_are_for_the_user_alone_and_go_with_the_processes(tmp_path: Path) -> None:
    with processes(tmp_path) as (a, b):
        connect(a, b)
        assert write(a) == e.IBV_WC_SUCCESS
        assert stat.S_IMODE(folder(tmp_path).stat().st_mode) == 0o700
        for path in folder(tmp_path).iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert [name.split("-")[0] for name in files(tmp_path)] == ["link", "registry", "wake", "wake"]
        a("end.close()\nNone")  # the last of its objects, but the device is open no more either
        assert [name.split("-")[0] for name in files(tmp_path)] == ["registry", "wake"]
        assert a.end() == 0
        assert b.end() == 0  # without closing anything
    assert files(tmp_path) == ["registry"]


def test_what_killed_processes_leave_is_removed(tmp_path: Path) -> None:
    with processes(tmp_path) as (a, b):
        connect(a, b)
        assert write(a) == e.IBV_WC_SUCCESS
        a.kill()
        b.kill()
    assert len(files(tmp_path)) == 4
    with processes(tmp_path, 1) as (c,):
        make_end(c)
        assert [name.split("-")[0] for name in files(tmp_path)] == ["registry", "wake"]
        c.end()


def test_a_survivor_lets_go_of_the_dead(tmp_path: Path) -> None:
    with processes(tmp_path) as (a, b):
        connect(a, b)
        assert write(a) == e.IBV_WC_SUCCESS
        b.kill()
        deadline = time.monotonic() + 60
        mapped = Path(f"/proc/{a.pid}/maps")
        while "link-" in mapped.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not [name for name in files(tmp_path) if name.startswith("link")]


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder(tmp_path).mkdir(mode=0o755)
    folder(tmp_path).chmod(0o755)
    with processes(tmp_path) as (a, b):
        make_end(b, "other")  # so that the numbers differ
        connect(a, b, changes="timeout=8, retry_cnt=1")
        assert not list(folder(tmp_path).iterdir())
        assert write(a) == e.IBV_WC_RETRY_EXC_ERR


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with processes(tmp_path, 1) as (a,):
        make_end(a)
        assert not list((tmp_path / "elsewhere").iterdir())


def test_processes_in_different_folders_do_not_meet(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with processes(here, 1) as (a,), processes(there, 1) as (b,):
        make_end(b, "other")  # so that the numbers differ
        connect(a, b, changes="timeout=8, retry_cnt=1")
        assert write(a) == e.IBV_WC_RETRY_EXC_ERR


def test_reach_can_end_at_the_process(tmp_path: Path) -> None:
    with processes(tmp_path, 1, reach="process") as (a,), processes(tmp_path, 1) as (b,):
        connect(a, b, changes="timeout=8, retry_cnt=1")
        assert write(a) == e.IBV_WC_RETRY_EXC_ERR
        assert write(b) == e.IBV_WC_RETRY_EXC_ERR
        assert a("end.qp.qp_num") == 0x100  # with numbers of its own


def test_many_processes_at_a_time(tmp_path: Path) -> None:
    with processes(tmp_path, 6) as all_of_them:
        numbers = {make_end(p)["qp_num"] for p in all_of_them}
        assert len({n >> 12 for n in numbers}) == 6


def test_more_queue_pairs_than_a_block_has_numbers(tmp_path: Path) -> None:
    with processes(tmp_path) as (a, b):
        a(
            "ends = []\n"
            "from pyverbs.qp import QP, QPInitAttr, QPCap\n"
            "first = End()\n"
            "attr = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=first.scq, rcq=first.rcq, cap=QPCap(max_send_wr=1))\n"
            "some = [QP(first.pd, attr) for _ in range(4096)]\nNone"
        )
        assert len(set(a("[q.qp_num for q in some]"))) == 4096
        connect(a, b)
        assert write(a) == e.IBV_WC_SUCCESS
        assert write(b) == e.IBV_WC_SUCCESS


def test_an_idle_process_uses_no_cpu(tmp_path: Path) -> None:
    with processes(tmp_path) as (a, b):
        connect(a, b)
        assert write(a) == e.IBV_WC_SUCCESS
        for process in (a, b):
            assert goes_quiet(process.pid, lambda process=process: process("time.process_time()"), 1, 0.1)
        assert write(a) == e.IBV_WC_SUCCESS


@pytest.mark.parametrize("seed", range(4))
def test_rubbish_from_a_peer_does_no_harm(tmp_path: Path, seed: int) -> None:
    """Whatever stands in the shared memory: nobody crashes, and a device that isn't part of it goes on."""
    rng = random.Random(seed)
    with processes(tmp_path, 3) as (a, b, c):
        connect(a, b, size=1 << 20, changes="timeout=10, retry_cnt=1")
        assert write(a) == e.IBV_WC_SUCCESS
        (link,) = folder(tmp_path).glob("link-*")
        traffic = (
            "import random\n"
            "for i in range(300):\n"
            "    end.state(e.IBV_QPS_RESET)\n"
            "    end.connect(far, timeout=8, retry_cnt=0, rnr_retry=0)\n"
            "    end.post(random.choice([e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ]), "
            "end.sge(random.choice([8, 9000, 1 << 20])), peer=far)\n"
            "    end.sent(30)\nNone"
        )
        a.start(traffic)
        b.start(traffic)
        size = link.stat().st_size
        with link.open("r+b", buffering=0) as f:
            until = time.monotonic() + 2
            while time.monotonic() < until:
                # Mostly where the rings and the first slots' headers are.
                half = rng.choice([16, 16 + size // 2])
                f.seek(half + rng.choice([rng.randrange(2048), rng.randrange(1 << 16), rng.randrange(size // 2 - 64)]))
                f.write(rng.choice([rng.randbytes(rng.choice([1, 2, 4, 8, 64])), b"\0" * 64, b"\1\0\0\0", b"\xff" * 8]))
        for p in (a, b):
            p.result()
        c("x, y = End(), End()\nx.connect(y)\ny.connect(x)\nx.post(e.IBV_WR_RDMA_WRITE, x.sge(8), peer=y)\nNone")
        assert c("x.sent().status") == e.IBV_WC_SUCCESS
        for p in (a, b):
            connect(p, c, name="fresh")
            code = "fresh.post(e.IBV_WR_RDMA_WRITE, fresh.sge(8), peer=far_fresh)\nfresh.sent().status"
            assert p(code) == e.IBV_WC_SUCCESS


def test_rubbish_in_the_registry_does_no_harm(tmp_path: Path) -> None:
    rng = random.Random(5)
    with processes(tmp_path) as (a, b):
        connect(a, b)
        with (folder(tmp_path) / "registry").open("r+b", buffering=0) as f:
            size = (folder(tmp_path) / "registry").stat().st_size
            for _ in range(200):
                f.seek(rng.randrange(size - 4096))
                f.write(rng.randbytes(rng.choice([4, 512, 4096])))
                a(
                    "x = End(size=4096)\nx.connect(far, timeout=1, retry_cnt=0)\n"
                    "x.post(e.IBV_WR_RDMA_WRITE, x.sge(8), peer=far)\nx.sent().status\nx.close()\nNone"
                )
        for p in (a, b):
            assert p("1") == 1

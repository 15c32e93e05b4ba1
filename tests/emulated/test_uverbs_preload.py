"""`aiordma emulate`: any program on the emulated NIC."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aiordma.cli.emulate import parse_limits

AIORDMA = [sys.executable, "-m", "aiordma.cli"]


def emulate(*words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if k not in ("SYSFS_PATH", "AIORDMA_EMULATOR_CONFIG")}
    env |= {"COLUMNS": "200"} | more
    return subprocess.run(
        [*AIORDMA, "emulate", *words], env=env, capture_output=True, text=True, timeout=60, check=False
    )


needs_devinfo = pytest.mark.skipif(shutil.which("ibv_devinfo") is None, reason="ibverbs-utils isn't installed")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@needs_devinfo
def test_ibv_devinfo_finds_the_devices() -> None:
    done = emulate("--devices", "3", "--", "ibv_devinfo", "-v")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if "hca_id" in line] == [
        "mlx5_0",
        "mlx5_1",
        "mlx5_2",
    ]
    assert "PORT_ACTIVE" in done.stdout
    assert "::ffff:192.0.2.1, RoCE v2" in done.stdout
    assert not done.stderr


@needs_devinfo
def test_names_limits_and_mtu_can_be_chosen() -> None:
    done = emulate("--name", "left", "--name", "right", "--limit", "max_qp=17", "--mtu", "1024", "ibv_devinfo", "-v")
    assert done.returncode == 0, done.stderr
    assert "left" in done.stdout
    assert "right" in done.stdout
    assert done.stdout.count("max_qp:\t\t\t\t17") == 2
    assert done.stdout.count("active_mtu:\t\t1024 (3)") == 2


@needs_devinfo
def test_ports_their_state_and_addresses_can_be_chosen() -> None:
    done = emulate("--ports", "2", "--port-state", "down", "--", "ibv_devinfo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PORT_DOWN") == 2
    done = emulate("--gid", "10.1.2.3", "--gid", "fe80::7,v1,lo", "--", "ibv_devinfo", "-v")
    assert done.returncode == 0, done.stderr
    gids = [line.strip() for line in done.stdout.splitlines() if "GID[" in line]
    # Versions write the second one in full or in short.
    assert [g.rpartition("]:")[2].split(",")[1].strip() for g in gids] == ["RoCE v2", "RoCE v1"]
    assert "::ffff:10.1.2.3" in gids[0]
    assert "fe80:" in gids[1]


@pytest.mark.parametrize(
    ("words", "directive"),
    [
        ([], "reach_host 1"),
        (["--reach", "process"], "reach_host 0"),
        ([], "one_copy 1"),
        (["--two-copies"], "one_copy 0"),
        ([], "use_uffd 1"),
        (["--naps"], "use_uffd 0"),
    ],
)
def test_what_the_program_is_told_of_the_network_and_of_sleep(words: list[str], directive: str) -> None:
    done = emulate(*words, "--", "sh", "-c", "cat $AIORDMA_EMULATOR_CONFIG")
    assert done.returncode == 0, done.stderr
    assert directive in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--reach", "moon"], "the network reaches"),
        (["--gid", "nowhere"], "nowhere"),
        (["--gid", "10.0.0.1,v3"], "v3"),
        (["--gid", "10.0.0.1,v2,lo,more"], "a GID is ADDRESS"),
        (["--gid", "10.0.0.1", "--devices", "2"], "one device with one port"),
        (["--port-state", "odd"], "odd"),
    ],
)
def test_bad_addresses_and_names_are_named(words: list[str], complaint: str) -> None:
    done = emulate(*words, "--", "true")
    assert done.returncode == 2
    assert complaint in done.stderr


@needs_devinfo
def test_the_legacy_write_form_serves_as_well() -> None:
    done = emulate("--legacy-write", "--", "ibv_devinfo", AIORDMA_EMULATOR_LOG="debug")
    assert done.returncode == 0, done.stderr
    assert "mlx5_0" in done.stdout
    assert "write GET_CONTEXT: ok" in done.stderr
    assert "ioctl" not in done.stderr


def test_the_exit_status_is_the_programs() -> None:
    assert emulate("--", "sh", "-c", "exit 7").returncode == 7
    assert emulate("true").returncode == 0
    assert emulate("--", "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM


def test_the_program_ends_where_emulate_is_killed() -> None:
    whole = [sys.executable, "-m", "aiordma.cli", "emulate", "--", "sh", "-c", "echo started; exec sleep 1000"]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, text=True) as wrapper:
        assert wrapper.stdout is not None
        assert wrapper.stdout.readline() == "started\n"
        wrapper.kill()
        # The program holds the other end of the pipe too, so this waits for its end.
        assert wrapper.stdout.read() == ""


def test_a_program_that_is_not_there() -> None:
    done = emulate("--", "no-such-program-at-all")
    assert done.returncode == 127
    assert "command not found" in done.stderr
    assert emulate("--", "/").returncode == 126


def test_options_after_the_program_are_the_programs() -> None:
    done = emulate("echo", "--devices", "--help", "-x")
    assert done.stdout == "--devices --help -x\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "max_cake=1"], "max_cake=1: a limit is"),
        (["--limit", "max_qp"], "max_qp: a limit is"),
        (["--limit", "max_qp=x"], "is not a number"),
        (["--limit", "max_qp_wr=99999"], "99999 is more than 32768"),
        (["--devices", "17"], "--devices"),
        (["--mtu", "1500"], "1500"),
        (["--name", "a/b"], "letters, digits"),
    ],
)
def test_wrong_options_are_explained(words: list[str], message: str) -> None:
    done = emulate(*words, "--", "true")
    assert done.returncode == 2
    assert message in done.stderr


def test_limits_are_read_in_any_base() -> None:
    assert parse_limits(["max_qp=0x10", "max_cq=3"]).max_qp == 16


def test_the_program_gets_an_environment_and_nothing_is_left(tmp_path: Path) -> None:
    preloaded = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), "libm.so.6"]))
    done = emulate(
        "--",
        "sh",
        "-c",
        'echo "$LD_PRELOAD"; cat "$AIORDMA_EMULATOR_CONFIG"; ls "$SYSFS_PATH/class/infiniband"',
        TMPDIR=str(tmp_path),
        LD_PRELOAD=preloaded,
    )
    assert done.returncode == 0, done.stderr
    first, *config, device = done.stdout.splitlines()
    assert first.startswith(preloaded + ":/")
    assert any(line.startswith("device mlx5_0 ") for line in config)
    assert device == "mlx5_0"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_program(number: int, tmp_path: Path) -> None:
    program = f"trap 'echo got; exit 3' {number}; echo ready; while :; do sleep 0.05; done"
    child = subprocess.Popen(
        [*AIORDMA, "emulate", "--", "sh", "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        # What is ignored here, as SIGHUP is under nohup, a shell can't trap.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    assert child.stdout.readline() == "got\n"
    assert child.wait(60) == 3
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_bad_configuration_file_leaves_no_device_and_says_why(tmp_path: Path) -> None:
    from aiordma.emulator._library import library_path

    config = tmp_path / "config"
    config.write_text("device mlx5_0 nonsense\n")
    for path, message in ((config, "line 1"), (tmp_path / "missing", "No such file")):
        done = subprocess.run(
            [sys.executable, "-c", "open('/dev/infiniband/uverbs0')"],
            env=os.environ | {"LD_PRELOAD": str(library_path()), "AIORDMA_EMULATOR_CONFIG": str(path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert message in done.stderr
        assert "FileNotFoundError" in done.stderr


# ------------------------------------------------------------------ Python programs


def test_attaching_in_an_emulated_program_does_nothing_more() -> None:
    program = """
        import aiordma.emulator as emulator
        assert emulator.is_attached()
        emulator.attach()
        emulator.attach(devices=2)
        try:
            emulator.attach(devices=3)
        except emulator.EmulatorError as e:
            assert "aiordma emulate" in str(e)
        else:
            raise SystemExit("attached")
        from pyverbs.device import Context
        Context(name="mlx5_1").close()
    """
    done = emulate("--devices", "2", "--", sys.executable, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr


def test_programs_that_the_program_starts_are_emulated_too() -> None:
    program = """
        import subprocess, sys
        from pyverbs.device import Context
        context = Context(name="mlx5_0")
        for close_fds in (True, False):
            subprocess.run([sys.executable, "-c",
                "from pyverbs.device import Context; Context(name='mlx5_0').close()"], check=True, close_fds=close_fds)
        context.query_port(1)
        context.close()
    """
    done = emulate("--", sys.executable, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr


def test_ordinary_programs_do_not_notice() -> None:
    """Files, pipes, sockets and mappings of a preloaded program are its own."""
    program = """
        import mmap, os, socket, subprocess, tempfile
        with tempfile.TemporaryFile() as f:
            f.write(b"x" * 8192)
            f.flush()
            with mmap.mmap(f.fileno(), 8192) as m:
                assert m[:4] == b"xxxx"
        a, b = socket.socketpair()
        a.sendall(b"hi")
        assert b.recv(2) == b"hi"
        assert os.fstat(0).st_mode
        r, w = os.pipe()
        os.write(w, b"1")
        assert os.read(r, 1) == b"1"
        fd = os.open("/dev/null", os.O_RDWR)
        for n in range(200, 210):
            os.dup2(fd, n)
        os.closerange(200, 210)
        assert subprocess.run(["cat"], input=b"abc", capture_output=True).stdout == b"abc"
    """
    done = emulate("--", sys.executable, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ C programs

_C_PROGRAM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <infiniband/verbs.h>

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "line %d: %s\n", __LINE__, #x); return 1; } } while (0)

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *c, *d;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct stat st;
    static char buf[4096];
    int status, flags = O_RDWR;

    CHECK(list && list[0]);
    c = ibv_open_device(list[0]);
    CHECK(c);
    pd = ibv_alloc_pd(c);
    mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE);
    CHECK(pd && mr);

    /* A child that closes everything, in its own memory and in ours. */
    if (!fork()) {
        for (int i = 3; i < 100; i++)
            close(i);
        _exit(0);
    }
    CHECK(wait(&status) > 0 && !status);
    if (!vfork()) {
        for (int i = 3; i < 100; i++)
            close(i);
        _exit(0);
    }
    CHECK(wait(&status) > 0 && !status);
    CHECK(!ibv_dereg_mr(mr));
    mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);

    /* The node by its name, in every way to ask. */
    CHECK(!stat("/dev/infiniband/uverbs0", &st) && S_ISCHR(st.st_mode));
    CHECK(!access("/dev/infiniband/uverbs0", R_OK | W_OK));
    CHECK(!faccessat(AT_FDCWD, "/dev/infiniband/uverbs0", F_OK, 0));
    CHECK(access("/dev/infiniband/uverbs0", X_OK) == -1 && errno == EACCES);
    CHECK(access("/dev/infiniband/uverbs15", R_OK) == -1 && errno == ENOENT);
    status = openat(AT_FDCWD, "/dev/infiniband/uverbs0", flags);
    CHECK(status >= 0 && !fstat(status, &st) && S_ISCHR(st.st_mode));
    CHECK(!close(status));
    CHECK(socket(AF_NETLINK, SOCK_RAW, 20 /* NETLINK_RDMA */) < 0);

    /* A second context, and another user of the first one's descriptor. */
    d = ibv_import_device(dup(c->cmd_fd));
    CHECK(d);
    CHECK(!ibv_close_device(d));
    CHECK(!ibv_dereg_mr(mr));
    CHECK(!ibv_dealloc_pd(pd));
    CHECK(!ibv_close_device(c));
    ibv_free_device_list(list);
    puts("fine");
    return 0;
}
"""


@needs_compiler
def test_a_c_program_with_children(tmp_path: Path) -> None:
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(_C_PROGRAM)
    built = subprocess.run(
        ["cc", "-O2", "-D_FORTIFY_SOURCE=2", "-o", program, source, "-libverbs"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "infiniband/verbs.h" in built.stderr:
        pytest.skip("libibverbs-dev isn't installed")
    assert built.returncode == 0, built.stderr
    done = emulate("--", str(program))
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# ------------------------------------------------------------------ aiordma devices


def test_devices_lists_the_emulated_ones() -> None:
    done = subprocess.run(
        [*AIORDMA, "devices", "--emulated", "2"],
        env=os.environ | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("emulated") == 2
    assert "mlx5_1" in done.stdout


def test_devices_says_when_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "class/infiniband_verbs").mkdir(parents=True)
    done = subprocess.run(
        [*AIORDMA, "devices"],
        env=os.environ | {"SYSFS_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no RDMA device" in done.stderr


def test_starting_a_program_takes_little_time() -> None:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    assert emulate("--", "true").returncode == 0
    assert spent() - before < 10  # of a CPU: how long it was kept off one is the machine's

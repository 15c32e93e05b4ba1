"""`aiordma doctor` and `aiordma devices` as programs: on the emulated NIC, without libraries or with wrong ones, as nobody,
on devices that crash or hang. And what the library itself says where they find something (F70 to F73)."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

AIORDMA = [sys.executable, "-P", "-m", "aiordma.cli"]
NOBODY = 65534


def program(
    *arguments: str, seconds: float = 90, user: int | None = None, **env: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        list(arguments),
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        **({"user": user, "group": user, "extra_groups": []} if user is not None else {}),
    )


def report(*arguments: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """The exit status of `aiordma doctor --json`, and what it printed."""
    done = program(*AIORDMA, "doctor", "--json", *arguments, **options)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def found(answer: dict[str, Any], check: str, status: str | None = None) -> list[dict[str, Any]]:
    return [f for f in answer["findings"] if f["check"] == check and status in (None, f["status"])]


def build(folder: Path, name: str, source: str, *options: str) -> Path:
    path = folder / name
    (folder / f"{name}.c").write_text(source)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(path), str(folder / f"{name}.c"), *options],
        check=True,
        capture_output=True,
    )
    return path


@pytest.fixture(scope="session")
def mismatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libibverbs of another version: all the public symbol versions, and another private one."""
    folder = tmp_path_factory.mktemp("mismatched")
    versions = ["IBVERBS_1.0 { global: ibv_stub; local: *; };"]
    versions += [f"IBVERBS_1.{i} {{ }} IBVERBS_1.{i - 1};" for i in range(1, 20)]
    versions += ["IBVERBS_PRIVATE_99 { } IBVERBS_1.19;"]
    (folder / "map").write_text("\n".join(versions))
    script = f"-Wl,--version-script={folder / 'map'}"
    build(folder, "libibverbs.so.1", "int ibv_stub(void) { return 0; }", "-Wl,-soname,libibverbs.so.1", script)
    return folder


@pytest.fixture(scope="session")
def hiding(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the loader doesn't find what AIORDMA_TEST_HIDE names (rtld-audit(7))."""
    source = """
        #include <stdint.h>
        #include <stdlib.h>
        #include <string.h>
        unsigned int la_version(unsigned int version) { return version; }
        char *la_objsearch(const char *name, uintptr_t *cookie, unsigned int flag)
        {
            const char *hidden = getenv("AIORDMA_TEST_HIDE");
            return hidden && flag != 1 && strstr(name, hidden) ? NULL : (char *)name; /* 1: LA_SER_ORIG */
        }
    """
    return {"LD_AUDIT": str(build(tmp_path_factory.mktemp("hiding"), "hide.so", source))}


# ---------------------------------------------------------------- all well


def test_the_emulated_nic_is_well() -> None:
    status, answer = report("--emulated")
    assert status == 0
    assert (answer["schema"], answer["status"], answer["emulated"]) == (1, "ok", True)
    assert not found(answer, "open", "error")
    for check in (
        "libibverbs",
        "pyverbs",
        "aiordma",
        "device",
        "providers",
        "open",
        "port",
        "gid",
        "memlock",
        "loopback",
    ):
        assert [f["status"] for f in found(answer, check)] == ["ok"], check
    assert answer["devices"] == [
        {
            "name": "mlx5_0",
            "opens": True,
            "firmware": "22.39.1002",
            "ports": 1,
            "atomics": True,
            "is_mlx5": True,
            "devx": True,
            "umr": True,
            "memcpy_length": 1 << 31,
            "dc": True,
            "dci_streams": 1 << 16,
        }
    ]


def test_under_emulate_it_examines_what_emulate_gives() -> None:
    emulate = [*AIORDMA, "emulate", "-n", "2", "--limit", "devx=0", "--limit", "atomics=0", "--"]
    done = program(*emulate, *AIORDMA, "doctor", "--json", "--strict")
    answer = json.loads(done.stdout)
    assert [d["name"] for d in answer["devices"]] == ["mlx5_0", "mlx5_1"]
    assert [d["devx"] for d in answer["devices"]] == [False, False]
    assert [d["atomics"] for d in answer["devices"]] == [False, False]
    assert [f["reason"] for f in found(answer, "mlx5", "warning")] == ["no-devx"] * 2
    assert (answer["status"], done.returncode) == ("warning", 1)


def test_text_fits_80_columns_when_piped() -> None:
    done = program(*AIORDMA, "doctor", "--emulated", COLUMNS="80")
    assert done.returncode == 0, done.stdout
    assert "RDMA should work." in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout


def test_wrong_usage() -> None:
    for arguments in (["--nonsense"], ["--timeout", "soon"], ["too much"]):
        assert program(*AIORDMA, "doctor", *arguments).returncode == 2


def test_no_device(tmp_path: Path) -> None:
    (tmp_path / "class/infiniband_verbs").mkdir(parents=True)
    status, answer = report(SYSFS_PATH=str(tmp_path))
    assert (status, answer["status"], answer["devices"]) == (1, "error", [])
    (finding,) = found(answer, "device")
    assert (finding["status"], finding["reason"]) == ("error", "no-device")
    assert not found(answer, "libibverbs", "error")


# ---------------------------------------------------------------- F70: another version


def names_both(text: str, folder: Path) -> bool:
    """Whether a message names the foreign library and its version, who needs which, and the one that would do."""
    words = (
        str(folder / "libibverbs.so.1"),
        "IBVERBS_PRIVATE_99",
        "IBVERBS_PRIVATE_",
        "rdma-core ",
        "LD_LIBRARY_PATH has",
    )
    return all(word in text for word in words) and text.count("IBVERBS_PRIVATE_") >= 2


def test_the_library_names_both_versions(mismatched: Path) -> None:
    source = """
import aiordma, sys
try:
    aiordma.open_device
except aiordma.ProviderError as e:
    print(e)
else:
    sys.exit("open_device is there")
"""
    done = program(sys.executable, "-P", "-c", source, LD_LIBRARY_PATH=str(mismatched))
    assert done.returncode == 0, done.stderr
    assert names_both(done.stdout, mismatched), done.stdout


def test_pyverbs_of_another_version_is_named(mismatched: Path) -> None:
    """The error that pyverbs itself gives, through what aiordma imports it by."""
    source = """
from aiordma import _pyverbs
from aiordma.errors import ProviderError
try:
    _pyverbs.module("device")
except ProviderError as e:
    print(e)
"""
    done = program(sys.executable, "-P", "-c", source, LD_LIBRARY_PATH=str(mismatched))
    assert done.returncode == 0, done.stderr
    assert names_both(done.stdout, mismatched), done.stdout
    assert "pyverbs/" in done.stdout or "librdmacm" in done.stdout


def test_doctor_names_both_versions(mismatched: Path) -> None:
    status, answer = report(LD_LIBRARY_PATH=str(mismatched))
    assert status == 1
    (finding,) = found(answer, "pyverbs")
    assert (finding["status"], finding["reason"]) == ("error", "mismatch")
    assert names_both(finding["detail"], mismatched)
    assert [f["status"] for f in found(answer, "aiordma")] == ["error"]
    assert str(mismatched) in found(answer, "libibverbs")[0]["summary"]


def test_a_library_that_is_none_of_rdma_core(tmp_path: Path) -> None:
    build(tmp_path, "libibverbs.so.1", "int x;", "-Wl,-soname,libibverbs.so.1")
    status, answer = report(LD_LIBRARY_PATH=str(tmp_path))
    assert status == 1
    assert [f["reason"] for f in found(answer, "libibverbs", "error")] == ["foreign"]
    # What can't be asked then is said, not guessed.
    assert found(answer, "providers", "unknown")
    done = program(*AIORDMA, "devices", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "ibv_get_device_list" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- F71: nothing there


@pytest.mark.parametrize("library", ["libibverbs.so", "libmlx5.so"])
def test_import_works_without_the_library_and_using_it_says_why(hiding: dict[str, str], library: str) -> None:
    source = """
import sys
import aiordma
from aiordma import Access, Gid, ProviderError, UsageError  # what needs no library
assert not hasattr(aiordma, "nonsense")

def refused(what):
    try:
        what()
    except ProviderError as e:
        assert sys.argv[1] in str(e) and "apt install" in str(e), e
    else:
        raise SystemExit(f"{what} works")

def star():
    exec("from aiordma import *", {})

def named():
    from aiordma import open_device

def mlx5():
    import aiordma.mlx5

def exchange():
    import aiordma.exchange

def emulated():
    import aiordma.emulator
    aiordma.emulator.attach()

for what in (lambda: aiordma.open_device, lambda: aiordma.list_devices(), star, named, mlx5, exchange, emulated):
    refused(what)
"""
    done = program(sys.executable, "-P", "-c", source, library, **hiding, AIORDMA_TEST_HIDE=library)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("library", "check"), [("libibverbs.so", "libibverbs"), ("libmlx5.so", "providers")])
def test_doctor_runs_without_the_library(hiding: dict[str, str], library: str, check: str) -> None:
    status, answer = report(**hiding, AIORDMA_TEST_HIDE=library)
    assert status == 1
    (finding,) = found(answer, check, "error")
    assert library in finding["subject"]
    assert "apt install" in finding["cure"][0]
    assert found(answer, "aiordma", "error")


def test_devices_without_the_library(hiding: dict[str, str]) -> None:
    done = program(*AIORDMA, "devices", **hiding, AIORDMA_TEST_HIDE="libibverbs.so")
    assert done.returncode == 1
    assert "apt install libibverbs1" in done.stderr
    assert "aiordma doctor" in done.stderr


def test_doctor_runs_without_pyverbs(tmp_path: Path) -> None:
    """A Python that has no pyverbs: a package of that name that raises what is raised then."""
    (tmp_path / "pyverbs.py").write_text("raise ModuleNotFoundError(\"No module named 'pyverbs'\", name='pyverbs')\n")
    status, answer = report("--emulated", PYTHONPATH=str(tmp_path))
    assert status == 1
    (finding,) = found(answer, "pyverbs")
    assert (finding["status"], finding["reason"]) == ("error", "missing")
    assert "python3-pyverbs" in finding["cure"][0]
    assert found(answer, "libibverbs", "ok")
    assert found(answer, "providers", "ok")


# ---------------------------------------------------------------- F72: rights


def _nobody_gets_here() -> bool:
    try:
        return program(sys.executable, "-P", "-c", "import aiordma", user=NOBODY).returncode == 0
    except PermissionError:  # not even the interpreter
        return False


@pytest.fixture(scope="session")
def nobody() -> int:
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    if not _nobody_gets_here():
        pytest.skip("other users can't import this installation: it's editable, or in a folder that they can't read")
    return NOBODY


def test_nobody_on_the_emulated_nic(nobody: int) -> None:
    status, answer = report("--emulated", user=nobody)
    assert status == 0, answer
    assert [f["status"] for f in found(answer, "loopback")] == ["ok"]


def test_nobody_with_little_locked_memory(nobody: int) -> None:
    done = program("prlimit", "--memlock=65536:65536", *AIORDMA, "doctor", "--emulated", "--json", user=nobody)
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    (finding,) = found(answer, "memlock")
    assert (finding["status"], finding["reason"]) == ("error", "too-small")
    assert "64 KiB" in finding["summary"]
    assert found(answer, "loopback") == [] or found(answer, "loopback")[0]["reason"] in ("ENOMEM", "VerbsError")


NODES = """
import json, sys
from pathlib import Path
from aiordma.cli.doctor.system import System
from aiordma.cli.doctor.facts import Facts
from aiordma.cli.doctor import devices
from aiordma.cli._sysfs import read_devices
root = Path(sys.argv[1])
system, facts = System(root=root, environ={}), Facts(read_devices(root / "sys"))
checks = (devices.check_device, devices.check_node, devices.check_permission)
print(json.dumps([[f.check, f.reason] for check in checks for f in check(system, facts)]))
"""


@pytest.mark.parametrize("mode", [0o000, 0o600])
def test_nobody_and_a_node_of_root(nobody: int, mode: int) -> None:
    """What the kernel says of a mode, as against what a test says of it. Nobody must reach the tree."""
    from aiordma.emulator.config import EmulatorConfig
    from aiordma.emulator.sysfs import write_tree

    # pytest's own folders are closed to others.
    root = Path(tempfile.mkdtemp(prefix="aiordma-doctor-"))
    root.chmod(0o755)
    try:
        write_tree(root / "sys", EmulatorConfig.of(1))
        (root / "dev/infiniband").mkdir(parents=True)
        node = root / "dev/infiniband/uverbs0"
        node.touch()
        node.chmod(mode)
        done = program(sys.executable, "-P", "-c", NODES, str(root), user=nobody)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[-1] == ["permission", "no-permission"]
        (root / "dev/infiniband").chmod(0o700)
        done = program(sys.executable, "-P", "-c", NODES, str(root), user=nobody)
        assert json.loads(done.stdout)[-1] == ["permission", "no-permission"]
        (root / "dev/infiniband").chmod(0o755)
        node.chmod(0o666)
        done = program(sys.executable, "-P", "-c", NODES, str(root), user=nobody)
        assert json.loads(done.stdout)[-1] == ["permission", ""]
    finally:
        shutil.rmtree(root, ignore_errors=True)


# ---------------------------------------------------------------- F73: other devices, and those that misbehave


def test_a_device_of_another_vendor_ends_nothing(tmp_path: Path) -> None:
    """No provider takes it: mlx5's own calls must not be tried on it, nor anything else."""
    from aiordma.emulator.config import EmulatorConfig
    from aiordma.emulator.sysfs import write_tree

    write_tree(tmp_path, EmulatorConfig.of(1))
    modalias = tmp_path / "class/infiniband/mlx5_0/device/modalias"
    modalias.write_text("pci:v00001D0Fd0000EFA0sv00001D0Fsd0000EFA0bc02sc00i00\n")
    status, answer = report(SYSFS_PATH=str(tmp_path))
    assert status == 1
    assert answer["devices"][0]["is_mlx5"] is None
    assert [f["check"] for f in answer["findings"] if f["reason"] == "crash"] == []


def hook(folder: Path, body: str) -> str:
    """A library that stands before the emulator's: its ioctl() does something else once the device is open."""
    source = f"""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <signal.h>
        #include <stdarg.h>
        #include <stdlib.h>
        #include <unistd.h>
        int ioctl(int fd, unsigned long request, ...)
        {{
            va_list arguments;
            va_start(arguments, request);
            void *pointer = va_arg(arguments, void *);
            va_end(arguments);
            int (*next)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
            if ((request >> 8 & 0xff) == 0x1b) {{ {body} }}
            return next(fd, request, pointer);
        }}
    """
    return str(build(folder, "hook.so", source))


@pytest.mark.parametrize(
    ("body", "reason"), [("for (;;) pause();", "no-answer"), ("raise(SIGSEGV);", "crash")], ids=["hangs", "crashes"]
)
def test_a_device_that_hangs_or_crashes_is_reported(tmp_path: Path, body: str, reason: str) -> None:
    # `emulate` puts the emulator's library last, so that the hook's ioctl() comes first.
    emulate = [*AIORDMA, "emulate", "--"]
    done = program(*emulate, *AIORDMA, "doctor", "--json", "--timeout", "15", LD_PRELOAD=hook(tmp_path, body))
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    (finding,) = found(answer, "open")
    assert (finding["status"], finding["reason"], finding["subject"]) == ("error", reason, "mlx5_0")
    # What needs no open device is reported all the same.
    assert found(answer, "port", "ok")


# ---------------------------------------------------------------- aiordma devices


def test_devices_as_json() -> None:
    done = program(*AIORDMA, "devices", "--emulated", "2", "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["schema"] == 1
    assert [d["name"] for d in answer["devices"]] == ["mlx5_0", "mlx5_1"]
    (port,) = answer["devices"][1]["ports"]
    assert port["state"] == "active"
    assert [gid["address"] for gid in port["gids"] if gid["type"] == "RoCE v2"] == ["fe80::5cff:fe00:3", "192.0.2.3"]


def test_devices_without_devices_as_json(tmp_path: Path) -> None:
    (tmp_path / "class/infiniband_verbs").mkdir(parents=True)
    done = program(*AIORDMA, "devices", "--json", SYSFS_PATH=str(tmp_path))
    assert (done.returncode, json.loads(done.stdout)) == (1, {"schema": 1, "devices": []})


def test_devices_shows_gids_in_full_on_one_line_in_any_terminal() -> None:
    done = program(*AIORDMA, "devices", "--emulated", "1", COLUMNS="40")
    lines = [line for line in done.stdout.splitlines() if "0000:0000:0000:0000:0000:ffff:c000:0201" in line]
    assert len(lines) == 2
    assert ["RoCE v2" in line and "192.0.2.1" in line for line in lines] == [False, True]


def test_devices_of_the_kernel_that_libibverbs_has_no_provider_for(tmp_path: Path) -> None:
    from aiordma.emulator.config import EmulatorConfig
    from aiordma.emulator.sysfs import write_tree

    write_tree(tmp_path, EmulatorConfig.of(1))
    (tmp_path / "class/infiniband/mlx5_0/device/modalias").write_text("pci:v00001D0Fd0000FFFFsv0sd0bc02sc00i00\n")
    done = program(*AIORDMA, "devices", SYSFS_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "The kernel has mlx5_0, which libibverbs doesn't list" in done.stderr

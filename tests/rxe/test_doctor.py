"""`aiordma doctor` on the kernel's RDMA. suite.py runs it in several machines: with two rxe devices as root and as nobody,
with the modules and no device, and with no RDMA in the kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

VM = os.environ.get("AIORDMA_IN_VM", "")
ROOT = os.geteuid() == 0
LINK = Path(__file__).parent / "vm" / "link.sh"
DOCTOR = [sys.executable, "-P", "-m", "aiordma.cli", "doctor", "--json"]
#: The checks that look at files alone: they take no second program, which is slow to start in a VM.
FILES = """
import json
from aiordma.cli._sysfs import read_devices
from aiordma.cli.doctor import CHECKS
from aiordma.cli.doctor.facts import Facts
from aiordma.cli.doctor.system import System
system = System()
facts = Facts(read_devices(system.rdma_sysfs))
names = ("device", "device-node", "permission", "port", "link", "gid", "memlock")
print(json.dumps([[f.check, f.status.value, f.reason] for name in names for f in CHECKS[name](system, facts)]))
"""

pytestmark = [
    pytest.mark.skipif(not VM, reason="is about the VMs of tests/rxe/vm/run.py"),
    # Starting Python takes many seconds there, on a busy machine.
    pytest.mark.timeout(300),
]
with_rxe = pytest.mark.skipif(VM != "rxe", reason="is about the VM with rxe devices")
with_rxe_as_root = pytest.mark.skipif(VM != "rxe" or not ROOT, reason="is about root of the VM with rxe devices")


def report(*prefix: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([*prefix, *DOCTOR], capture_output=True, text=True, timeout=250, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def files(*prefix: str) -> list[list[str]]:
    done = subprocess.run(
        [*prefix, sys.executable, "-P", "-c", FILES], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


def found(answer: dict[str, Any], check: str) -> list[tuple[str, str]]:
    return [(f["status"], f["reason"]) for f in answer["findings"] if f["check"] == check]


@with_rxe
def test_two_soft_roce_devices_are_well() -> None:
    """As root and as anybody else: everything works, and mlx5's own calls aren't tried on them (F73)."""
    status, answer = report()
    assert status == 0, answer
    for check in ("device", "device-node", "permission", "providers", "open", "port", "link", "gid", "loopback"):
        assert found(answer, check) == [("ok", "")] * 2, check
    assert found(answer, "mlx5") == [("info", "not-mlx5")] * 2
    assert found(answer, "rdma-cm") == [("ok", "")]
    # 6.1 says over netlink that it copies on fork.
    assert found(answer, "fork") == [("ok", "")]
    assert [(d["name"], d["is_mlx5"], d["opens"]) for d in answer["devices"]] == [
        ("rxe0", False, True),
        ("rxe1", False, True),
    ]
    # The VM has no nf_tables; and nobody may not look. Either is said.
    ((firewall, _),) = found(answer, "firewall")
    assert firewall in ("unknown", "ok")


@with_rxe_as_root
@pytest.mark.slow_in_vm
def test_nodes_that_are_missing_wrong_or_forbidden() -> None:
    empty = files("unshare", "-m", "sh", "-ec", 'mount -t tmpfs none /dev/infiniband; exec "$0" "$@"')
    assert [f for f in empty if f[0] == "device-node"] == [["device-node", "error", "no-node"]] * 2
    wrong = "mount -t tmpfs none /dev/infiniband; mknod /dev/infiniband/uverbs0 c 1 3; touch /dev/infiniband/uverbs1;"
    found = files("unshare", "-m", "sh", "-ec", f'{wrong} exec "$0" "$@"')
    assert [f for f in found if f[0] == "device-node"] == [["device-node", "error", "wrong-node"]] * 2
    nodes = ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]
    subprocess.run(["chmod", "000", *nodes], check=True)
    try:
        found = files("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    finally:
        subprocess.run(["chmod", "666", *nodes], check=True)
    assert [f for f in found if f[0] == "permission"] == [["permission", "error", "no-permission"]] * 2


@with_rxe_as_root
@pytest.mark.slow_in_vm
def test_links_that_are_down_and_in_another_namespace() -> None:
    subprocess.run(["ip", "link", "set", "veth0", "down"], check=True, timeout=60)
    try:
        found = files()
    finally:
        subprocess.run([LINK, "restore"], check=True, timeout=120)
    # A veth without its peer has no carrier, so that both are down.
    assert [f for f in found if f[0] == "port"] == [["port", "error", "not-active"]] * 2
    assert [f for f in found if f[0] == "link"] == [["link", "error", "down"], ["link", "error", "no-link"]]
    found = files("unshare", "-m", "-n", "sh", "-ec", 'mount -t sysfs none /sys; exec "$0" "$@"')
    assert [f for f in found if f[0] == "link"] == [["link", "warning", "other-namespace"]] * 2


@with_rxe_as_root
@pytest.mark.slow_in_vm
def test_little_locked_memory_of_nobody_is_what_stops_it() -> None:
    status, answer = report(
        "prlimit", "--memlock=65536:65536", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"
    )
    assert status == 1
    assert found(answer, "memlock") == [("error", "too-small")]


@pytest.mark.skipif(VM not in ("modules", "none"), reason="is about the VMs without devices")
def test_no_device() -> None:
    status, answer = report()
    assert status == 1
    assert found(answer, "device") == [("error", "no-device")]
    assert answer["devices"] == []
    (modules,) = [f for f in answer["findings"] if f["check"] == "kernel-modules"]
    assert (modules["status"], "rdma_rxe" in modules["summary"]) == (
        ("ok", True) if VM == "modules" else ("info", False)
    )
    for check in ("libibverbs", "pyverbs", "aiordma", "providers"):
        assert found(answer, check) == [("ok", "")], check

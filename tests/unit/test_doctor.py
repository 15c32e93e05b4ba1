"""Each check of `aiordma doctor` finds what it's for, on made-up machines: trees of files, rights, limits."""

import ast
import errno
import importlib
import io
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiordma.cli._sysfs import read_devices
from aiordma.cli.doctor import devices, libraries, machine, network
from aiordma.cli.doctor.facts import Facts, ProbeResult, parse
from aiordma.cli.doctor.report import Finding, Report, Status
from aiordma.cli.doctor.system import Output, System, Unreadable, run
from aiordma.emulator.config import EmulatedDevice, EmulatedPort, EmulatorConfig, Gid
from aiordma.emulator.sysfs import write_tree

# The package aiordma.cli has a function of that name too.
doctor = importlib.import_module("aiordma.cli.doctor")

UNLIMITED = resource.RLIM_INFINITY
SOME = (1 << 26, 1 << 30)


def put(root: Path, name: str, text: str = "") -> Path:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Machine:
    """A tree of files with an RDMA device in it, as the kernel shows one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        put(root, "/proc/self/status", "CapEff:\t0000000000000000\n")
        put(root, "/proc/self/uid_map", "         0          0 4294967295\n")
        (root / "sys/class").mkdir(parents=True)

    def device(self, *ports: EmulatedPort, driver: str = "mlx5_core") -> None:
        ports = ports or (EmulatedPort(gids=(Gid("10.0.0.1", "v2", "eth0"),)),)
        write_tree(self.root / "sys", EmulatorConfig(devices=(EmulatedDevice(name="mlx5_0", ports=ports),)))
        self.interface("eth0")
        for name in ("ib_core", "ib_uverbs"):
            (self.root / "sys/module" / name).mkdir(parents=True)
        if driver:
            (self.root / "sys/bus" / driver).mkdir(parents=True)
            (self.root / "sys/class/infiniband/mlx5_0/device/driver").symlink_to(self.root / "sys/bus" / driver)

    def interface(self, name: str, *, flags: int = 0x1003, operstate: str = "up") -> None:
        for key, value in {"flags": hex(flags), "operstate": operstate, "mtu": "1500"}.items():
            put(self.root, f"/sys/class/net/{name}/{key}", value + "\n")

    def system(self, **values: Any) -> System:
        return System(**({"root": self.root, "environ": {}, "uid": 1000, "memlock": SOME} | values))

    def facts(self, **values: Any) -> Facts:
        return Facts(read_devices(self.root / "sys"), **values)


@pytest.fixture
def machine_(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def the_one(findings: Any) -> Finding:
    (finding,) = list(findings)
    return finding


def libraries_probe(*steps: dict[str, Any], stderr: str = "", ended: str = "") -> ProbeResult:
    return ProbeResult(steps, ended, stderr)


def listed(*names: str) -> dict[str, Any]:
    return {"step": "devices", "names": list(names), "error": None}


# ---------------------------------------------------------------- F72: device, node, permission, told apart


def test_no_device(machine_: Machine) -> None:
    finding = the_one(devices.check_device(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (Status.ERROR, "no-device")
    assert any("emulated NIC" in cure for cure in finding.cure)
    assert list(devices.check_node(machine_.system(), machine_.facts())) == []
    assert list(devices.check_permission(machine_.system(), machine_.facts())) == []


@pytest.mark.parametrize(
    ("driver", "cure"),
    [("mlx5_core", "modprobe mlx5_ib"), (None, "modprobe mlx5_core mlx5_ib"), ("vfio-pci", "virtual machine")],
)
def test_no_device_but_the_hardware_for_one(machine_: Machine, driver: str | None, cure: str) -> None:
    place = machine_.root / "sys/bus/pci/devices/0000:65:00.0"
    put(place, "vendor", "0x15b3\n")
    put(place, "class", "0x020000\n")
    if driver is not None:
        (machine_.root / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
        (place / "driver").symlink_to(machine_.root / "sys/bus/pci/drivers" / driver)
    finding = the_one(devices.check_device(machine_.system(), machine_.facts()))
    assert "there is hardware" in finding.summary
    assert "0000:65:00.0" in finding.detail
    assert cure in finding.cure[0]


def test_no_sysfs_is_not_no_device(machine_: Machine) -> None:
    (machine_.root / "sys/class").rmdir()
    (machine_.root / "sys").rmdir()
    finding = the_one(devices.check_device(machine_.system(), machine_.facts()))
    assert finding.status is Status.UNKNOWN


@pytest.mark.parametrize("folder", [True, False], ids=["empty /dev/infiniband", "no /dev/infiniband"])
@pytest.mark.parametrize("in_container", [True, False], ids=["container", "host"])
def test_no_node(machine_: Machine, folder: bool, in_container: bool) -> None:
    machine_.device()
    if folder:
        (machine_.root / "dev/infiniband").mkdir(parents=True)
    if in_container:
        put(machine_.root, "/.dockerenv")
    system, facts = machine_.system(), machine_.facts()
    assert the_one(devices.check_device(system, facts)).status is Status.OK
    finding = the_one(devices.check_node(system, facts))
    assert (finding.status, finding.reason, finding.subject) == (Status.ERROR, "no-node", "mlx5_0")
    assert ("In /dev/infiniband: nothing" in finding.detail) == folder
    assert ("--device=/dev/infiniband/uverbs0" in finding.cure[0]) == in_container
    assert ("--cap-add=IPC_LOCK" in finding.cure[0]) == in_container
    assert any("mknod -m 666 /dev/infiniband/uverbs0 c 231 192" in cure for cure in finding.cure)
    assert list(devices.check_permission(system, facts)) == []


def test_a_node_that_is_a_plain_file(machine_: Machine) -> None:
    machine_.device()
    put(machine_.root, "/dev/infiniband/uverbs0")
    finding = the_one(devices.check_node(machine_.system(), machine_.facts()))
    assert (finding.reason, finding.status) == ("wrong-node", Status.ERROR)


def test_a_node_of_another_device(machine_: Machine) -> None:
    found = os.stat("/dev/null")
    assert devices._wrong_node(found, "231:192") == "is device 1:3, and the kernel's is 231:192"
    assert devices._wrong_node(found, "1:3") == ""


def test_a_device_without_uverbs(machine_: Machine) -> None:
    machine_.device()
    for path in (machine_.root / "sys/class/infiniband_verbs/uverbs0").iterdir():
        path.unlink()
    (machine_.root / "sys/class/infiniband_verbs/uverbs0").rmdir()
    finding = the_one(devices.check_node(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason, finding.cure) == (Status.ERROR, "no-uverbs", ("modprobe ib_uverbs",))


def test_nodes_that_cannot_be_looked_at(machine_: Machine) -> None:
    machine_.device()
    node = put(machine_.root, "/dev/infiniband/uverbs0")
    node.unlink()
    node.symlink_to(node)
    finding = the_one(devices.check_node(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "unreadable")
    # As a folder that's closed to this user, which root can't be shown.
    finding = the_one(devices.check_permission(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (Status.ERROR, "no-permission")
    assert finding.cure == ("chmod 755 /dev/infiniband",)


class Refusing(System):
    """A machine that doesn't let us use anything: as root, whom modes don't hold back, there's no other way."""

    def may_use(self, name: str) -> bool:
        return False


def test_no_permission_by_mode(machine_: Machine) -> None:
    machine_.device()
    put(machine_.root, "/dev/infiniband/uverbs0").chmod(0o000)
    system = Refusing(root=machine_.root, environ={}, uid=1000, memlock=SOME)
    finding = the_one(devices.check_permission(system, machine_.facts()))
    assert (finding.status, finding.reason) == (Status.ERROR, "no-permission")
    assert "mode 0000" in finding.detail
    assert "chmod 666 /dev/infiniband/uverbs0" in finding.cure[0]


@pytest.mark.parametrize(("uid", "mode"), [(0, 0o600), (1000, 0o666)])
def test_no_permission_by_device_rules(machine_: Machine, uid: int, mode: int) -> None:
    """What isn't forbidden by the mode is by a container's rules."""
    machine_.device()
    put(machine_.root, "/dev/infiniband/uverbs0").chmod(mode)
    system = Refusing(root=machine_.root, environ={}, uid=uid, memlock=SOME)
    finding = the_one(devices.check_permission(system, machine_.facts()))
    assert finding.reason == "cgroup"
    assert "--device=/dev/infiniband/uverbs0" in finding.cure[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="root's may_use() is what is looked at")
def test_root_may_use_a_node_of_any_mode(machine_: Machine) -> None:
    machine_.device()
    put(machine_.root, "/dev/infiniband/uverbs0").chmod(0o000)
    assert the_one(devices.check_permission(machine_.system(), machine_.facts())).status is Status.OK


def test_nothing_of_it_concerns_the_emulated_nic(machine_: Machine) -> None:
    machine_.device()
    system = machine_.system(emulated=True)
    for check in (devices.check_node, devices.check_permission, network.check_link, network.check_firewall):
        assert list(check(system, machine_.facts())) == []


# ---------------------------------------------------------------- ports, GIDs, links


@pytest.mark.parametrize(("states", "worst"), [(["down"], Status.ERROR), (["active", "down"], Status.WARNING)])
def test_ports_that_are_not_active(machine_: Machine, states: list[Any], worst: Status) -> None:
    machine_.device(*(EmulatedPort(state=state) for state in states))
    findings = list(devices.check_port(machine_.system(), machine_.facts()))
    assert [f.status for f in findings] == [Status.OK] * (len(states) - 1) + [worst]
    assert findings[-1].reason == "not-active"
    assert "ip link set lo up" in findings[-1].cure[0]


def test_a_port_whose_state_is_not_to_be_had(machine_: Machine) -> None:
    machine_.device()
    (machine_.root / "sys/class/infiniband/mlx5_0/ports/1/state").unlink()
    finding = the_one(devices.check_port(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "unreadable")


def test_an_infiniband_port_without_subnet_manager(machine_: Machine) -> None:
    machine_.device(EmulatedPort(state="init"))
    put(machine_.root, "/sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n")
    assert "subnet manager" in the_one(devices.check_port(machine_.system(), machine_.facts())).cure[0]


@pytest.mark.parametrize(
    ("gids", "status", "reason"),
    [
        ((Gid("10.0.0.1", "v2"),), Status.OK, ""),
        ((Gid("fe80::1", "v1"), Gid("2001:db8::1", "v2")), Status.OK, ""),
        ((Gid("fe80::1", "v2"),), Status.WARNING, "link-local"),
        ((Gid("fe80::1", "v1"), Gid("10.0.0.1", "v1")), Status.ERROR, "no-v2"),
        ((), Status.ERROR, "no-gid"),
    ],
)
def test_gids(machine_: Machine, gids: tuple[Gid, ...], status: Status, reason: str) -> None:
    machine_.device(EmulatedPort(gids=gids))
    finding = the_one(devices.check_gid(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (status, reason)
    for gid in gids if reason == "no-v2" else ():
        assert str(read_devices(machine_.root / "sys")[0].ports[0].gids[0].address) in finding.detail, gid


def test_a_second_port_without_gid_is_a_warning(machine_: Machine) -> None:
    machine_.device(EmulatedPort(), EmulatedPort(gids=()))
    assert [f.status for f in devices.check_gid(machine_.system(), machine_.facts())] == [Status.OK, Status.WARNING]


@pytest.mark.parametrize(
    ("flags", "operstate", "status", "reason"),
    [
        (0x1003, "up", Status.OK, ""),
        (0x1003, "unknown", Status.OK, ""),
        (0x1002, "down", Status.ERROR, "down"),
        (0x1003, "lowerlayerdown", Status.ERROR, "no-link"),
        (0x1003, "down", Status.ERROR, "no-link"),
    ],
)
def test_links(machine_: Machine, flags: int, operstate: str, status: Status, reason: str) -> None:
    state: Any = "active" if status is Status.OK else "down"
    machine_.device(EmulatedPort(state=state, gids=(Gid("10.0.0.1", "v2", "eth0"),)))
    machine_.interface("eth0", flags=flags, operstate=operstate)
    finding = the_one(network.check_link(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (status, reason)


def test_a_link_that_is_down_beside_one_that_works_is_a_warning(machine_: Machine) -> None:
    machine_.device(
        EmulatedPort(gids=(Gid("10.0.0.1", "v2", "eth0"),)), EmulatedPort(gids=(Gid("10.0.0.2", "v2", "eth1"),))
    )
    machine_.interface("eth1", flags=0x1002, operstate="down")
    assert [f.status for f in network.check_link(machine_.system(), machine_.facts())] == [Status.OK, Status.WARNING]


def test_an_interface_in_another_network_namespace(machine_: Machine) -> None:
    machine_.device(EmulatedPort(gids=(Gid("10.0.0.1", "v2", "eth7"),)))
    put(machine_.root, "/run/.containerenv")
    finding = the_one(network.check_link(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason, finding.subject) == (Status.WARNING, "other-namespace", "eth7")
    assert "--network=host" in finding.cure[0]


_SOCKETS = "  sl  local_address rem_address   st tx_queue rx_queue\n"


@pytest.mark.parametrize(
    ("sockets", "reasons"),
    [
        pytest.param({"udp": "", "udp6": ""}, ["", "not-listening"], id="none"),
        pytest.param({"udp": "  9: 00000000:12B7 00000000:0000 07\n"}, [""], id="IPv4"),
        pytest.param({"udp": "", "udp6": f"  9: {32 * '0'}:12B7 {32 * '0'}:0000 07\n"}, [""], id="IPv6"),
        # Whose 4791 is another number, or the peer's.
        pytest.param({"udp": "  9: 00000000:4791 00000000:12B7 01\n"}, ["", "not-listening"], id="others"),
        pytest.param({}, [""], id="unknown"),
    ],
)
def test_soft_roce_that_does_not_listen_in_this_network_namespace(
    machine_: Machine, sockets: dict[str, str], reasons: list[str]
) -> None:
    machine_.device()
    for name, lines in sockets.items():
        put(machine_.root, f"/proc/net/{name}", _SOCKETS + lines)
    system = machine_.system()
    assert [f.reason for f in network.check_link(system, machine_.facts())] == [""], "hardware needs no socket"
    shutil.rmtree(machine_.root / "sys/class/infiniband/mlx5_0/device")
    findings = list(network.check_link(system, machine_.facts()))
    assert [f.reason for f in findings] == reasons
    assert all(f.status is Status.ERROR and f.cure for f in findings if f.reason)
    # In the namespace of nobody's interface, that is what there is to say.
    shutil.rmtree(machine_.root / "sys/class/net/eth0")
    assert [f.reason for f in network.check_link(system, machine_.facts())] == ["other-namespace"]


def test_iwarp_is_judged_by_what_it_needs(machine_: Machine) -> None:
    """Neither a GID of RoCE v2, nor UDP port 4791, nor a QP that is connected without rdma_cm."""
    machine_.device(EmulatedPort(gids=(Gid("fe80::1", "v1", "eth0"),)))
    put(machine_.root, "/proc/net/udp", _SOCKETS)
    roce = machine_.facts()
    assert the_one(devices.check_gid(machine_.system(), roce)).status is Status.ERROR
    put(machine_.root, "/sys/class/infiniband/mlx5_0/node_type", "4: RNIC\n")
    shutil.rmtree(machine_.root / "sys/class/infiniband/mlx5_0/device")
    facts = machine_.facts()
    for check in (devices.check_gid, network.check_firewall):
        finding = the_one(check(machine_.system(), facts))
        assert (finding.status, finding.reason) == (Status.INFO, "iwarp")
    assert [f.status for f in network.check_link(machine_.system(), facts)] == [Status.OK]


# ---------------------------------------------------------------- firewall


def rule(*expressions: dict[str, Any], chain: str = "input") -> dict[str, Any]:
    return {"rule": {"family": "inet", "table": "filter", "chain": chain, "expr": list(expressions)}}


def dport(right: Any, protocol: str = "udp") -> dict[str, Any]:
    return {"match": {"op": "==", "left": {"payload": {"protocol": protocol, "field": "dport"}}, "right": right}}


def chain(policy: str = "accept", hook: str = "input") -> dict[str, Any]:
    return {"chain": {"family": "inet", "table": "filter", "name": "input", "hook": hook, "policy": policy}}


@pytest.mark.parametrize(
    ("ruleset", "objections"),
    [
        ([], 0),
        ([chain()], 0),
        ([chain("drop")], 1),
        ([chain("drop", hook="output")], 0),
        ([chain("drop"), rule(dport(4791), {"accept": None})], 0),
        ([chain("drop"), rule(dport({"set": [53, {"range": [4000, 5000]}]}), {"accept": None}, chain="roce")], 0),
        ([chain("drop"), rule(dport(4791, "tcp"), {"accept": None})], 1),
        ([chain("drop"), rule(dport({"range": [1, 4790]}), {"accept": None})], 1),
        ([chain(), rule(dport(4791), {"drop": None})], 1),
        ([chain(), rule(dport(4791, "th"), {"reject": {}})], 1),
        ([chain(), rule({"reject": None})], 1),
        ([chain(), rule(dport(22), {"drop": None})], 0),
        ([chain(), rule({"counter": {}})], 0),
        ([{"set": {"name": "roce", "elem": [4791]}}, chain("drop"), rule(dport("@roce"), {"accept": None})], 0),
        ([{"set": {"name": "roce", "elem": [80]}}, chain("drop"), rule(dport("@roce"), {"accept": None})], 1),
        ([chain(), rule(dport({"set": [{"elem": {"val": 4791, "comment": "x"}}]}), {"drop": None})], 1),
    ],
)
def test_nft(ruleset: list[dict[str, Any]], objections: int) -> None:
    assert len(network.nft_objections(ruleset)) == objections


@pytest.mark.parametrize(
    ("lines", "objections"),
    [
        ("*filter\n:INPUT ACCEPT [0:0]\nCOMMIT", 0),
        ("*filter\n:INPUT DROP [0:0]\nCOMMIT", 1),
        ("*nat\n:INPUT DROP [0:0]\nCOMMIT", 0),
        ("*filter\n:INPUT DROP [0:0]\n-A INPUT -p udp -m udp --dport 4791 -j ACCEPT\nCOMMIT", 0),
        ("*filter\n:INPUT DROP [0:0]\n-A INPUT -p udp -m multiport --dports 53,4000:5000 -j ACCEPT\nCOMMIT", 0),
        ("*filter\n:INPUT DROP [0:0]\n-A INPUT -p tcp -m tcp --dport 4791 -j ACCEPT\nCOMMIT", 1),
        ("*filter\n:INPUT DROP [0:0]\n-A INPUT -p udp -m udp ! --dport 4791 -j ACCEPT\nCOMMIT", 1),
        ("*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p udp -m udp --dport 4791 -j DROP\nCOMMIT", 1),
        ("*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j REJECT --reject-with icmp-host-prohibited\nCOMMIT", 1),
        ("*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -s 10.0.0.0/8 -j DROP\nCOMMIT", 0),
        ("", 0),
    ],
)
def test_iptables(lines: str, objections: int) -> None:
    assert len(network.iptables_objections(lines)) == objections


def soft_roce(machine_: Machine, tools: dict[str, str]) -> tuple[System, Facts]:
    """A machine with a software device, whose programs are shell scripts."""
    machine_.device(driver="")
    import shutil

    shutil.rmtree(machine_.root / "sys/class/infiniband/mlx5_0/device")
    for name, script in tools.items():
        put(machine_.root, f"/tools/{name}", f"#!/bin/sh\n{script}\n").chmod(0o755)
    environ = {"PATH": str(machine_.root / "tools")}
    return machine_.system(environ=environ, timeout=5.0), machine_.facts()


def test_firewall_that_drops(machine_: Machine) -> None:
    answer = json.dumps({"nftables": [chain("drop")]})
    system, facts = soft_roce(machine_, {"nft": f"echo '{answer}'"})
    finding = the_one(network.check_firewall(system, facts))
    assert (finding.status, finding.reason) == (Status.WARNING, "may-drop")
    assert "iptables-save isn't installed" in finding.detail


def test_firewall_that_lets_through(machine_: Machine) -> None:
    system, facts = soft_roce(machine_, {"nft": "echo '{\"nftables\": []}'", "iptables-save": "exit 0"})
    finding = the_one(network.check_firewall(system, facts))
    assert finding.status is Status.OK
    assert finding.summary.startswith("nft and iptables")


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ({}, "nft isn't installed"),
        ({"nft": "echo 'Operation not permitted (you must be root)' >&2; exit 1"}, "you must be root"),
        ({"nft": "echo this is no JSON"}, "can't be understood"),
    ],
)
def test_firewall_that_cannot_be_looked_at(machine_: Machine, tools: dict[str, str], said: str) -> None:
    system, facts = soft_roce(machine_, tools)
    (finding,) = [f for f in doctor.examine(system, facts) if f.check == "firewall"]
    assert finding.status is Status.UNKNOWN
    assert said in finding.summary + finding.detail


def test_hardware_is_behind_no_packet_filter_of_the_host(machine_: Machine) -> None:
    machine_.device()
    assert the_one(network.check_firewall(machine_.system(), machine_.facts())).reason == "hardware"


# ---------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("limit", "capabilities", "status", "reason"),
    [
        ((UNLIMITED, UNLIMITED), "0", Status.OK, ""),
        (SOME, "0000000000004000", Status.OK, ""),
        (SOME, "0", Status.WARNING, "limited"),
        ((1 << 16, 1 << 16), "0", Status.ERROR, "too-small"),
        ((1 << 16, UNLIMITED), "ffffffffffffbfff", Status.ERROR, "too-small"),
    ],
)
def test_memlock(machine_: Machine, limit: tuple[int, int], capabilities: str, status: Status, reason: str) -> None:
    put(machine_.root, "/proc/self/status", f"Name:\tx\nCapEff:\t{capabilities}\n")
    finding = the_one(machine.check_memlock(machine_.system(memlock=limit), machine_.facts()))
    assert (finding.status, finding.reason) == (status, reason)
    if status is not Status.OK:
        assert any("LimitMEMLOCK" in cure for cure in finding.cure)


def test_ipc_lock_of_a_user_namespace_does_not_count(machine_: Machine) -> None:
    put(machine_.root, "/proc/self/status", "CapEff:\tffffffffffffffff\n")
    put(machine_.root, "/proc/self/uid_map", "         0       1000          1\n")
    assert the_one(machine.check_memlock(machine_.system(), machine_.facts())).reason == "limited"


def test_a_limit_whose_lifting_cannot_be_told(machine_: Machine) -> None:
    put(machine_.root, "/proc/self/status", "Name:\tx\n")
    (finding,) = [f for f in doctor.examine(machine_.system(), machine_.facts()) if f.check == "memlock"]
    assert finding.status is Status.UNKNOWN


@pytest.mark.parametrize(
    ("name", "text", "environ", "kind"),
    [
        ("/.dockerenv", "", {}, "docker"),
        ("/run/.containerenv", "", {}, "podman"),
        ("/run/systemd/container", "systemd-nspawn\n", {}, "systemd-nspawn"),
        ("/proc/1/cgroup", "0::/kubepods/besteffort/pod1\n", {}, "kubernetes"),
        ("/proc/1/cgroup", "0::/init.scope\n", {}, None),
        ("/x", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ],
)
def test_containers(machine_: Machine, name: str, text: str, environ: dict[str, str], kind: str | None) -> None:
    put(machine_.root, name, text)
    assert machine.container(machine_.system(environ=environ)) == kind


def test_modules(machine_: Machine) -> None:
    machine_.device()
    assert the_one(machine.check_modules(machine_.system(), machine_.facts())).status is Status.OK
    (machine_.root / "sys/module/ib_uverbs").rmdir()
    finding = the_one(machine.check_modules(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (Status.ERROR, "no-uverbs")
    shutil.rmtree(machine_.root / "sys/module")
    finding = the_one(machine.check_modules(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "no-sysfs")


@pytest.mark.parametrize(
    ("status", "wanted"), [(0, Status.WARNING), (1, Status.OK), (2, Status.OK), (None, Status.WARNING)]
)
def test_fork(machine_: Machine, status: int | None, wanted: Status) -> None:
    machine_.device()
    facts = machine_.facts(libraries=libraries_probe({"step": "fork", "status": status}))
    finding = the_one(machine.check_fork(machine_.system(), facts))
    assert finding.status is wanted
    assert (wanted is Status.OK) == (not finding.cure)
    shutil.rmtree(machine_.root / "sys/class/infiniband")
    without = machine_.facts(libraries=facts.libraries)
    finding = the_one(machine.check_fork(machine_.system(), without))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "no-device")
    # And where nothing can be asked it isn't guessed.
    assert the_one(machine.check_fork(machine_.system(), machine_.facts())).status is Status.UNKNOWN


def test_huge_pages(machine_: Machine) -> None:
    finding = the_one(machine.check_huge_pages(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "no-meminfo")
    put(
        machine_.root,
        "/proc/meminfo",
        "HugePages_Total:       8\nHugePages_Free:        3\nHugepagesize:       2048 kB\n",
    )
    put(machine_.root, "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    finding = the_one(machine.check_huge_pages(machine_.system(), machine_.facts()))
    assert finding.summary == "3 of 8 reserved ones of 2048 KiB are free; transparent ones: madvise"
    system = machine_.system(environ={"RDMAV_FORK_SAFE": "1"})
    assert [f.status for f in machine.check_huge_pages(system, machine_.facts())] == [Status.INFO, Status.WARNING]


# ---------------------------------------------------------------- libraries


def test_pyverbs_without_its_mlx5_part(machine_: Machine) -> None:
    loads = {"path": "/usr/lib/python3/dist-packages/pyverbs/device.so", "private": [34]}
    broken = {"path": None, "explained": "no such symbol"}
    steps = [{"step": "module", "name": name, **loads} for name in ("pyverbs", "pyverbs.device")]
    steps.append({"step": "module", "name": "pyverbs.providers.mlx5.mlx5dv", **broken})
    found = list(libraries.check_pyverbs(machine_.system(), machine_.facts(libraries=libraries_probe(*steps))))
    assert [(f.status, f.reason) for f in found] == [(Status.OK, ""), (Status.WARNING, "no-mlx5")]
    assert "no such symbol" in found[1].summary


def test_a_device_that_libibverbs_does_not_list(machine_: Machine) -> None:
    machine_.device()
    warning = (
        "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': libmlx5-rdmav34.so: cannot open shared object"
    )
    probe = libraries_probe(listed(), stderr=warning)
    none = the_one(libraries.check_providers(machine_.system(), machine_.facts(libraries=probe)))
    assert (none.status, none.reason) == (Status.ERROR, "no-driver-files")
    put(machine_.root, "/etc/libibverbs.d/rxe.driver", "driver rxe\n")
    other = the_one(libraries.check_providers(machine_.system(), machine_.facts(libraries=probe)))
    assert (other.reason, "mlx5.driver" in other.summary) == ("no-driver-file", True)
    put(machine_.root, "/etc/libibverbs.d/mlx5.driver", "driver mlx5\n")
    broken = the_one(libraries.check_providers(machine_.system(), machine_.facts(libraries=probe)))
    assert (broken.reason, broken.detail) == ("driver-broken", warning)
    silent = libraries_probe(listed())
    assert (
        the_one(libraries.check_providers(machine_.system(), machine_.facts(libraries=silent))).reason == "not-listed"
    )
    good = libraries_probe(listed("mlx5_0"))
    assert the_one(libraries.check_providers(machine_.system(), machine_.facts(libraries=good))).status is Status.OK


def test_what_a_probe_that_died_leaves_open_is_said(machine_: Machine) -> None:
    machine_.device()
    facts = machine_.facts(libraries=libraries_probe({"step": "listing"}, ended="it was ended by SIGSEGV"))
    found = {f.check: f for f in doctor.examine(machine_.system(), facts)}
    for check in ("libibverbs", "pyverbs", "aiordma", "providers"):
        assert found[check].status is Status.UNKNOWN
        assert "SIGSEGV" in found[check].summary


def test_rdma_cm(machine_: Machine) -> None:
    machine_.device()
    finding = the_one(libraries.check_rdma_cm(machine_.system(), machine_.facts()))
    assert (finding.status, finding.reason, finding.cure[0]) == (Status.WARNING, "no-node", "modprobe rdma_ucm")
    put(machine_.root, "/dev/infiniband/rdma_cm")
    assert the_one(libraries.check_rdma_cm(machine_.system(), machine_.facts())).status is Status.OK
    system = Refusing(root=machine_.root, environ={}, uid=1000, memlock=SOME)
    finding = the_one(libraries.check_rdma_cm(system, machine_.facts()))
    assert (finding.status, finding.reason) == (Status.WARNING, "no-permission")
    assert "chmod 666 /dev/infiniband/rdma_cm" in finding.cure[0]


def test_librdmacm_that_does_not_load(machine_: Machine) -> None:
    step = {"step": "library", "name": "librdmacm.so.1", "path": None, "error": "no such file"}
    for emulated in (True, False):
        finding = the_one(
            libraries.check_rdma_cm(machine_.system(emulated=emulated), machine_.facts(libraries=libraries_probe(step)))
        )
        assert (finding.status, finding.reason, finding.detail) == (Status.WARNING, "library", "no such file")
        assert "librdmacm1" in finding.cure[0]


# ---------------------------------------------------------------- opening


def opened(*steps: dict[str, Any], ended: str = "") -> dict[str, ProbeResult]:
    return {"mlx5_0": ProbeResult(steps, ended)}


@pytest.mark.parametrize(
    ("steps", "ended", "reason"),
    [
        ([{"step": "opening"}], "it said nothing for 5 s", "no-answer"),
        ([{"step": "opening"}], "it was ended by SIGSEGV", "crash"),
        ([{"step": "opening"}, {"step": "opened", "error": "no", "errno": 13}], "", "EACCES"),
        ([{"step": "opening"}, {"step": "opened", "error": "no", "errno": None}], "", "failed"),
        (
            [{"step": "opening"}, {"step": "opened", "error": None}, {"step": "queried", "error": "no", "errno": 5}],
            "",
            "EIO",
        ),
    ],
)
def test_devices_that_do_not_open(machine_: Machine, steps: list[dict[str, Any]], ended: str, reason: str) -> None:
    finding = the_one(devices.check_open(machine_.system(), machine_.facts(opened=opened(*steps, ended=ended))))
    assert (finding.status, finding.reason) == (Status.ERROR, reason)


def test_a_probe_that_did_not_start_says_nothing_of_the_device(machine_: Machine) -> None:
    finding = the_one(
        devices.check_open(machine_.system(), machine_.facts(opened=opened(ended="it said nothing for 5 s")))
    )
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "probe-failed")


@pytest.mark.parametrize(
    ("written", "ended", "status", "reason", "cure"),
    [
        ({"error": None}, "", Status.OK, "", ""),
        ({"error": "no", "errno": None, "kind": "RetryExceededError"}, "", Status.ERROR, "RetryExceededError", "4791"),
        ({"error": "no", "errno": 12, "kind": "VerbsError"}, "", Status.ERROR, "ENOMEM", "memlock"),
        (None, "it said nothing for 5 s", Status.ERROR, "no-answer", "dmesg"),
    ],
)
def test_loopback(
    machine_: Machine, written: dict[str, Any] | None, ended: str, status: Status, reason: str, cure: str
) -> None:
    steps: list[dict[str, Any]] = [{"step": "loopback", "port": 1}]
    if written is not None:
        steps.append({"step": "written", "port": 1, **written})
    finding = the_one(devices.check_loopback(machine_.system(), machine_.facts(opened=opened(*steps, ended=ended))))
    assert (finding.status, finding.reason, finding.subject) == (status, reason, "mlx5_0 port 1")
    assert any(cure in text for text in finding.cure) or not cure


@pytest.mark.parametrize(
    ("step", "status", "said"),
    [
        ({"supported": False}, Status.INFO, "isn't an mlx5 device"),
        ({"supported": True, "error": "ENOTSUP"}, Status.UNKNOWN, "ENOTSUP"),
        ({"supported": True, "devx": False}, Status.WARNING, "without DEVX"),
        (
            {"supported": True, "devx": True, "umr": False, "memcpy_length": 0, "dc": True, "dci_streams": 0},
            Status.INFO,
            "mlx5_0 has DEVX, DC; it lacks UMR, DMA memcpy, DCI streams",
        ),
        (
            {"supported": True, "devx": True, "umr": True, "memcpy_length": 64, "dc": True, "dci_streams": 4},
            Status.INFO,
            "mlx5_0 has DEVX, UMR, DMA memcpy up to 64 bytes, DC, up to 4 streams a DCI",
        ),
    ],
)
def test_mlx5_features(machine_: Machine, step: dict[str, Any], status: Status, said: str) -> None:
    facts = machine_.facts(opened=opened({"step": "opened", "error": None}, {"step": "mlx5", **step}))
    finding = the_one(devices.check_mlx5(machine_.system(), facts))
    assert finding.status is status
    assert said in finding.summary


# ---------------------------------------------------------------- probes and reports


def test_a_probe_that_says_nothing_of_mlx5(machine_: Machine) -> None:
    facts = machine_.facts(opened=opened({"step": "opened", "error": None}, ended="it was ended by SIGSEGV"))
    finding = the_one(devices.check_mlx5(machine_.system(), facts))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "no-answer")


def test_what_probes_print() -> None:
    good = parse(Output(0, 'noise\n{"step": "a", "x": 1}\n[]\n{"step": "a", "x": 2}\n{"cut', ""), 5)
    assert (good.ended, good.last, len(good.all("a"))) == ("", "a", 2)
    assert good.step("a", x=2) == {"step": "a", "x": 2}
    assert good.step("a", x=3) is None
    assert parse(Output(-11, "", ""), 5).ended == "it was ended by SIGSEGV"
    assert parse(Output(None, "", ""), 5).ended == "it said nothing for 5 s"
    assert parse(Output(3, "", ""), 5).ended == "it ended with exit status 3"


def test_a_program_that_hangs_is_given_up() -> None:
    # The grandchild keeps the pipe open. What waited for it would come back when that ends, in a quarter of an hour.
    output = run(["/bin/sh", "-c", "echo begun; sleep 1000 & wait"], 0.5, start=20)
    assert output.status is None
    assert output.stdout == "begun\n"


def test_a_program_has_time_while_it_says_something() -> None:
    output = run(
        ["/bin/sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done; echo end >&2; exit 3"], 2.5, start=20
    )
    assert output == Output(3, "1\n2\n3\n4\n5\n6\n", "end\n")


def test_a_program_that_talks_without_end_is_stopped() -> None:
    output = run(["/bin/sh", "-c", "while echo talk; do sleep 0.1; done"], 0.3, start=2)
    assert output.status is None
    assert output.stdout.startswith("talk\n")


def test_a_program_that_closes_its_output_and_goes_on_is_given_up() -> None:
    assert run(["/bin/sh", "-c", "exec >&- 2>&-; sleep 1000"], 0.5).status is None


def test_a_program_that_is_not_there_is_no_hang() -> None:
    with pytest.raises(FileNotFoundError):
        run(["aiordma-test-no-such-program"], 5.0)


def test_text_is_not_cut(machine_: Machine) -> None:
    long = "/a/very/long/path/that/no/terminal/would/have/the/room/for/and/that/must/stay/in/one/piece/libibverbs.so.1"
    findings = [
        Finding(
            "libibverbs", Status.ERROR, f"something is wrong with {long} " + "word " * 40, cure=(f"remove {long}",)
        ),
        Finding("fork", Status.UNKNOWN, "can't say"),
    ]
    out = io.StringIO()
    Report(findings, emulated=False).write(out, colour=False, width=80)
    text = out.getvalue()
    assert text.count(long) == 2
    assert all(len(line) <= 80 for line in text.splitlines() if long not in line)
    assert "\x1b" not in text
    assert "1 problem" in text
    assert "libibverbs" in text.rpartition("under its name:")[2]
    colourful = io.StringIO()
    Report(findings, emulated=False).write(colourful, colour=True, width=80)
    assert "\x1b[31merror" in colourful.getvalue()


@pytest.mark.parametrize(
    ("statuses", "strict", "exit_status", "overall"),
    [
        ([Status.OK, Status.INFO, Status.UNKNOWN], True, 0, "ok"),
        ([Status.OK, Status.WARNING], False, 0, "warning"),
        ([Status.OK, Status.WARNING], True, 1, "warning"),
        ([Status.WARNING, Status.ERROR], False, 1, "error"),
    ],
)
def test_exit_status(statuses: list[Status], strict: bool, exit_status: int, overall: str) -> None:
    report = Report([Finding("fork", status, "x") for status in statuses], emulated=False, strict=strict)
    assert report.exit_status == exit_status
    assert json.loads(report.as_json())["status"] == overall


def test_every_check_is_a_heading_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs/troubleshooting.md"
    headings = {line.removeprefix("## ").strip() for line in page.read_text().splitlines() if line.startswith("## ")}
    assert set(doctor.CHECKS) <= headings


def _written_findings() -> Iterator[tuple[str, ast.Call]]:
    """Every place in the checks' sources where a finding is made."""
    for module in (devices, libraries, machine, network):
        assert module.__file__ is not None
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                yield f"{Path(module.__file__).name}:{node.lineno}", node


def test_every_problem_has_a_cure() -> None:
    problems = 0
    for where, call in _written_findings():
        status = ast.unparse(call.args[1])
        # "bad" is one or the other, by what else there is.
        if "ERROR" in status or "WARNING" in status or status == "bad":
            problems += 1
            assert any(keyword.arg == "cure" for keyword in call.keywords), f"{where}: {status} without a cure"
    assert problems > 25
    for code in (None, errno.EACCES, errno.ENOMEM, errno.ENODEV, errno.EIO, errno.E2BIG):
        assert devices._open_cures(code)


def test_findings_bear_their_checks_name(machine_: Machine) -> None:
    machine_.device()
    for facts in (Facts(), machine_.facts()):
        for system in (machine_.system(), machine_.system(emulated=True)):
            for finding in doctor.examine(system, facts):
                assert finding.check in doctor.CHECKS


def test_unreadable_files_are_no_missing_files(machine_: Machine) -> None:
    system = machine_.system()
    assert system.read("/nothing") is None
    (machine_.root / "folder").mkdir()
    with pytest.raises(Unreadable, match="/folder"):
        system.read("/folder")
    assert stat.S_ISDIR(os.stat(machine_.root / "folder").st_mode)


def test_the_probe_says_how_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "aiordma.cli.doctor.probe", "nonsense"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "usage" in done.stderr

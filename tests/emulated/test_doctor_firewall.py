"""What `aiordma doctor` makes of rules that nft and iptables themselves set, in a network namespace of the test's own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiordma.emulator.config import EmulatorConfig
from aiordma.emulator.sysfs import write_tree

PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
from aiordma.cli._sysfs import read_devices
from aiordma.cli.doctor import examine
from aiordma.cli.doctor.facts import Facts
from aiordma.cli.doctor.system import System
system = System(sysfs=Path(sys.argv[1]))
found = [f for f in examine(system, Facts(read_devices(system.rdma_sysfs))) if f.check == "firewall"]
print(json.dumps([[f.status.value, f.reason, f.summary, f.detail] for f in found]))
"""
CHAIN = (
    "nft add table inet filter; nft add chain inet filter input '{ type filter hook input priority 0; policy %s; }'; "
)


def _filters(tool: str) -> bool:
    """Whether rules can be set in a network namespace of one's own."""
    rule = {"nft": CHAIN % "accept", "iptables": "iptables -A INPUT -p udp --dport 1 -j ACCEPT"}[tool]
    done = subprocess.run(["unshare", "-n", "sh", "-ec", rule], capture_output=True, check=False, timeout=60)
    return done.returncode == 0


@pytest.fixture(scope="module")
def soft_roce(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A /sys with a software device: one with no bus device behind it."""
    folder = tmp_path_factory.mktemp("sys")
    write_tree(folder, EmulatorConfig.of(1))
    shutil.rmtree(folder / "class/infiniband/mlx5_0/device")
    return folder


def firewall(sysfs: Path, rules: str, *prefix: str) -> list[Any]:
    command = f'{rules} exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", "-n", "sh", "-ec", command, *prefix, sys.executable, "-P", "-c", PROGRAM, str(sysfs)],
        env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (finding,) = json.loads(done.stdout)
    return list(finding)


@pytest.mark.parametrize(
    ("rules", "status"),
    [
        ("", "ok"),
        (CHAIN % "accept", "ok"),
        (CHAIN % "drop", "warning"),
        (CHAIN % "drop" + "nft add rule inet filter input udp dport 4791 accept;", "ok"),
        (CHAIN % "drop" + "nft add rule inet filter input udp dport '{ 53, 4000-5000 }' accept;", "ok"),
        (CHAIN % "drop" + "nft add rule inet filter input tcp dport 4791 accept;", "warning"),
        (
            CHAIN % "drop" + "nft add set inet filter roce '{ type inet_service; elements = { 4791 }; }';"
            "nft add rule inet filter input udp dport @roce accept;",
            "ok",
        ),
        (CHAIN % "accept" + "nft add rule inet filter input udp dport 4791 counter drop;", "warning"),
        (CHAIN % "accept" + "nft add rule inet filter input udp dport 53 drop;", "ok"),
    ],
)
def test_rules_of_nft(soft_roce: Path, rules: str, status: str) -> None:
    if not _filters("nft"):
        pytest.skip("nft can't set rules here: no root, no nf_tables in this kernel, or no nft")
    found = firewall(soft_roce, rules)
    assert found[0] == status, found


@pytest.mark.parametrize(
    ("rules", "status"),
    [
        ("iptables -P INPUT DROP;", "warning"),
        ("iptables -A INPUT -p udp --dport 4791 -j DROP;", "warning"),
        ("iptables -P INPUT DROP; iptables -A INPUT -p udp --dport 4791 -j ACCEPT;", "ok"),
        ("ip6tables -A INPUT -j REJECT;", "warning"),
    ],
)
def test_rules_of_iptables(soft_roce: Path, rules: str, status: str) -> None:
    if not _filters("iptables"):
        pytest.skip("iptables can't set rules here: no root, no netfilter in this kernel, or no iptables")
    found = firewall(soft_roce, rules)
    assert found[0] == status, found


def test_rules_that_may_not_be_read(soft_roce: Path) -> None:
    if not _filters("nft"):
        pytest.skip("nft can't set rules here: no root, no nf_tables in this kernel, or no nft")
    # Without the capability nft refuses, whatever the rules are.
    found = firewall(soft_roce, "", "setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
    assert found[0] == "unknown", found
    assert "nft" in found[3]

"""Two network namespaces with a Soft-RoCE device each: connections between them where the kernel's rxe knows of namespaces,
and otherwise what docs/soft-roce.md says of it, and `aiordma doctor` finds."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rxe.test_doctor import FILES

pytestmark = [
    pytest.mark.skipif(os.environ.get("AIORDMA_IN_VM") != "rxe", reason="is about the VM of tests/rxe/vm/run.py"),
    pytest.mark.timeout(300),
]

PEER = Path(__file__).parent / "namespace_peer.py"
#: By namespace: its device, its netdev, its addresses.
ENDS = {
    "left": ("rxe_left", "vleft", ("198.51.100.1", "2001:db8:1::1")),
    "right": ("rxe_right", "vright", ("198.51.100.2", "2001:db8:1::2")),
}
VIAS = ("tcp", "rdma_cm")


def run(*command: str, timeout: float = 60) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def inside(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    run("ip", "link", "add", "vleft", "type", "veth", "peer", "name", "vright")
    try:
        for namespace, (device, netdev, (ipv4, ipv6)) in ENDS.items():
            run("ip", "netns", "add", namespace)
            run("ip", "link", "set", netdev, "netns", namespace)
            run(*inside(namespace, "ip", "link", "set", "lo", "up"))
            run(*inside(namespace, "ip", "address", "add", f"{ipv4}/24", "dev", netdev))
            run(*inside(namespace, "ip", "address", "add", f"{ipv6}/64", "dev", netdev, "nodad"))
            run(*inside(namespace, "ip", "link", "set", netdev, "up"))
            run(*inside(namespace, "rdma", "link", "add", device, "type", "rxe", "netdev", netdev))
        # No udev here.
        for node in Path("/dev/infiniband").glob("uverbs*"):
            node.chmod(0o666)
        yield
    finally:
        for namespace, (device, _, _) in ENDS.items():
            subprocess.run(["rdma", "link", "delete", device], check=False, timeout=60)
            subprocess.run(["ip", "netns", "delete", namespace], check=False, timeout=60)


@pytest.fixture(scope="module")
def aware(namespaces: None) -> bool:
    """Whether rxe listens in these namespaces, to UDP port 4791, 12B7 in hexadecimal digits (proc_pid_net(5))."""
    return ":12B7 " in run(*inside("left", "cat", "/proc/net/udp"))


@pytest.fixture
def server(namespaces: None) -> Iterator[None]:
    device, _, addresses = ENDS["right"]
    with subprocess.Popen(
        inside("right", sys.executable, "-P", str(PEER), "serve", device, *addresses), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()


def test_connections_between_two_namespaces_work_where_rxe_listens_there_and_fail_where_not(
    aware: bool, server: None
) -> None:
    addresses = ENDS["right"][2]
    printed = run(*inside("left", sys.executable, "-P", str(PEER), "call", ENDS["left"][0], *addresses), timeout=250)
    outcomes = json.loads(printed)
    assert list(outcomes) == [f"{address} {via}" for address in addresses for via in VIAS]
    if aware:
        assert set(outcomes.values()) == {"here"}
        return
    # What goes out looks for a route in the first namespace, which has none there. 6.12's rxe only flushes what it fails at.
    assert {outcomes[f"{address} tcp"] for address in addresses} <= {"LocalQpOperationError", "WrFlushError"}
    assert {outcomes[f"{address} rdma_cm"] for address in addresses} <= {"UnreachableError", "ConnectTimeoutError"}


def test_doctor_says_where_rxe_does_not_listen(aware: bool) -> None:
    found = json.loads(run(*inside("left", sys.executable, "-P", "-c", FILES), timeout=120))
    links = [[status, reason] for check, status, reason in found if check == "link"]
    # The devices of the other two namespaces are seen from here, but not their interfaces.
    elsewhere = [["warning", "other-namespace"]] * 3
    assert sorted(links) == sorted([*elsewhere, ["ok", ""], *([] if aware else [["error", "not-listening"]])])

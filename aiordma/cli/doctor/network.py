"""Checks of the network below RoCE: the port's interface, and what a firewall does to UDP port 4791."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiordma.cli.doctor.facts import Facts
from aiordma.cli.doctor.machine import container
from aiordma.cli.doctor.report import Finding, Status
from aiordma.cli.doctor.system import Output, System, Unreadable

__all__ = ["check_firewall", "check_link", "iptables_objections", "nft_objections"]

ROCE_V2_PORT = 4791  # IANA's roce; ROCE_V2_UDP_DPORT in the kernel
_IFF_UP = 1  # linux/if.h


def check_link(system: System, facts: Facts) -> Iterator[Finding]:
    """The network interface of each RoCE port is there, and up."""
    if system.emulated:
        return
    # As long as another port works it's a warning.
    bad = Status.WARNING if any(port.state == "active" for _, port in facts.ports()) else Status.ERROR
    for device, port in facts.ports():
        if not port.is_ethernet:
            continue
        where = f"{device.name} port {port.number}"
        for interface in port.netdevs:
            yield _interface(system, where, interface, bad)
        if device.is_software and any(gid.is_v2 for gid in port.gids):
            yield from _deaf(system, where, port.netdevs)


def _interface(system: System, where: str, interface: str, bad: Status) -> Finding:
    folder = f"/sys/class/net/{interface}"
    if not system.exists(folder):
        cure = ["run in the network namespace that has it"]
        if container(system) is not None:
            cure.insert(0, "docker run --network=host")
        return Finding(
            "link",
            Status.WARNING,
            f"{where}: its interface {interface} isn't in this network namespace, so its GIDs can't be used to connect",
            reason="other-namespace",
            subject=interface,
            cure=tuple(cure),
        )
    state = (system.read(f"{folder}/operstate") or "").strip()
    flags = int((system.read(f"{folder}/flags") or "0x0").strip(), 16)
    mtu = (system.read(f"{folder}/mtu") or "?").strip()
    if not flags & _IFF_UP:
        return Finding(
            "link",
            bad,
            f"{where}: its interface {interface} is set down",
            reason="down",
            subject=interface,
            cure=(f"ip link set {interface} up",),
        )
    # Interfaces without a carrier of their own, as dummy and lo, are "unknown" (kernel's operstates.rst).
    if state not in ("up", "unknown"):
        return Finding(
            "link",
            bad,
            f"{where}: its interface {interface} has no link ({state or 'no state'})",
            reason="no-link",
            subject=interface,
            cure=("look at the cable and at the switch's port",),
        )
    return Finding("link", Status.OK, f"{where}: {interface} is up, MTU {mtu}{_mtu_note(mtu)}", subject=interface)


def _deaf(system: System, where: str, interfaces: Sequence[str]) -> Iterator[Finding]:
    """Soft-RoCE receives by a UDP socket of its own, which older kernels have in the first network namespace alone."""
    here = [interface for interface in interfaces if system.exists(f"/sys/class/net/{interface}")]
    sockets = [table for name in ("udp", "udp6") if (table := system.read(f"/proc/net/{name}")) is not None]
    # A socket a line: its number, then its own address and port, in hexadecimal digits (proc_pid_net(5)).
    own = rf"^\s*\d+: [0-9A-F]+:{ROCE_V2_PORT:04X}\s"
    if not here or not sockets or any(re.search(own, table, re.MULTILINE) for table in sockets):
        return
    yield Finding(
        "link",
        Status.ERROR,
        f"{where}: nothing that is sent to {', '.join(here)} arrives: Soft-RoCE doesn't listen to UDP port {ROCE_V2_PORT} in "
        "this network namespace",
        reason="not-listening",
        subject=", ".join(here),
        detail="This kernel's rdma_rxe listens in the first network namespace alone. Newer ones, with "
        "drivers/infiniband/sw/rxe/rxe_ns.c, listen in each that has one of its devices.",
        cure=(
            "have the interface and the program in the first network namespace"
            + (" (docker run --network=host)" if container(system) is not None else ""),
            "use a newer kernel: Debian's 7.3 listens in each namespace, its 6.12 doesn't",
        ),
    )


def _mtu_note(mtu: str) -> str:
    # iboe_get_mtu() in the kernel: the largest RoCE MTU that fits with its headers.
    small = mtu.isdecimal() and int(mtu) < 4200
    return ": RoCE uses the largest of 256, 512, 1024, 2048 and 4096 that fits with its headers" if small else ""


# ---------------------------------------------------------------- firewall


def check_firewall(system: System, facts: Facts) -> Iterator[Finding]:
    """What the host's packet filter does with RoCE v2, as far as its rules can be read."""
    if system.emulated:
        return
    roce = [device for device in facts.devices if not device.is_iwarp]
    software = [device.name for device in roce if device.is_software]
    if len(roce) < len(facts.devices):
        yield Finding(
            "firewall",
            Status.INFO,
            f"iWARP of {', '.join(d.name for d in facts.devices if d.is_iwarp)} is TCP, to the port that programs listen at: "
            "every packet filter on the way must let that through",
            reason="iwarp",
        )
    if roce and not software:
        yield Finding(
            "firewall",
            Status.INFO,
            f"RoCE of {', '.join(d.name for d in roce)} doesn't pass through this host's packet filter; the "
            f"network's must let UDP port {ROCE_V2_PORT} through, and this host's the TCP port that programs connect by",
            reason="hardware",
        )
        return
    if not roce:
        return
    objections: list[str] = []
    looked: list[str] = []
    failed: list[str] = []
    for name, command, read in (
        ("nft", ("nft", "-j", "list", "ruleset"), _read_nft),
        ("iptables", ("iptables-save",), _read_iptables),
        ("ip6tables", ("ip6tables-save",), _read_iptables),
    ):
        try:
            output = system.run(*command)
        except Unreadable as e:
            failed.append(str(e))
            continue
        if output is None:
            failed.append(f"{command[0]} isn't installed")
        elif output.status is None:
            failed.append(f"{command[0]} didn't answer")
        elif output.status:
            first = output.stderr.strip().splitlines() or [f"exit status {output.status}"]
            failed.append(f"{command[0]}: {first[0]}")
        else:
            looked.append(name)
            objections += read(output)
    not_seen = f"Not looked at: {'; '.join(failed)}." if failed else ""
    if objections:
        yield Finding(
            "firewall",
            Status.WARNING,
            f"rules of this host may drop UDP port {ROCE_V2_PORT}, which {', '.join(software)} receives by",
            reason="may-drop",
            detail="\n".join([*dict.fromkeys(objections), not_seen]).strip(),
            cure=(
                f"nft insert rule inet filter input udp dport {ROCE_V2_PORT} accept (your table's and chain's names)",
                f"iptables -I INPUT -p udp --dport {ROCE_V2_PORT} -j ACCEPT; firewall-cmd --add-port={ROCE_V2_PORT}/udp",
            ),
        )
    elif looked:
        text = f"{' and '.join(looked)}: no rule drops UDP port {ROCE_V2_PORT}"
        yield Finding("firewall", Status.OK, text, detail=not_seen)
    else:
        yield Finding(
            "firewall",
            Status.UNKNOWN,
            "the packet filter's rules couldn't be looked at",
            reason="unreadable",
            detail=not_seen,
            cure=(f"as root: nft list ruleset; look for what drops UDP port {ROCE_V2_PORT}",) if system.uid else (),
        )


def _read_nft(output: Output) -> list[str]:
    try:
        return nft_objections(json.loads(output.stdout)["nftables"])
    except (ValueError, KeyError, TypeError) as e:
        raise Unreadable(f"nft: what it printed can't be understood ({e})") from e


def _read_iptables(output: Output) -> list[str]:
    return iptables_objections(output.stdout)


def nft_objections(ruleset: Sequence[dict[str, Any]]) -> list[str]:
    """What in a ruleset (libnftables-json(5)) may drop UDP port 4791 on its way in.

    Rules aren't executed: a rule that names the port and drops, a chain that drops by default with no rule anywhere that
    accepts the port, or with an unconditional drop at its end.
    """
    chains = [item["chain"] for item in ruleset if "chain" in item]
    rules = [item["rule"] for item in ruleset if "rule" in item]
    sets = {f"@{item['set']['name']}": item["set"].get("elem", []) for item in ruleset if "set" in item}
    accepted = any(_verdict(rule) == "accept" and _names_port(rule.get("expr"), sets) for rule in rules)
    objections = []
    for rule in rules:
        if _verdict(rule) in ("drop", "reject") and _names_port(rule.get("expr"), sets):
            objections.append(f"nft: a rule in {_place(rule)} drops UDP port {ROCE_V2_PORT}")
    for chain in chains:
        if chain.get("hook") not in ("input", "prerouting", "ingress") or accepted:
            continue
        own = [rule for rule in rules if all(rule.get(k) == chain.get(v) for k, v in _KEYS)]
        at_end = [rule for rule in own if len(rule.get("expr", ())) == 1 and _verdict(rule) in ("drop", "reject")]
        if chain.get("policy") == "drop" or at_end:
            place = _place(chain)
            objections.append(f"nft: chain {place} drops what no rule accepts, and none names UDP port {ROCE_V2_PORT}")
    return objections


_KEYS = (("family", "family"), ("table", "table"), ("chain", "name"))


def _place(item: dict[str, Any]) -> str:
    return f"{item.get('family')} {item.get('table')} {item.get('chain', item.get('name'))}"


def _verdict(rule: dict[str, Any]) -> str:
    for expression in rule.get("expr", ()):
        for verdict in ("accept", "drop", "reject"):
            if verdict in expression:
                return verdict
    return ""


def _names_port(expressions: Any, sets: Mapping[str, Any]) -> bool:
    """Whether a match of these is on UDP's destination port, and on 4791 among others."""
    for expression in expressions or ():
        match = expression.get("match") if isinstance(expression, dict) else None
        if not match or match.get("op") not in ("==", "in"):
            continue
        payload = match.get("left", {}).get("payload", {}) if isinstance(match.get("left"), dict) else {}
        if payload.get("protocol") in ("udp", "th") and payload.get("field") == "dport":
            right = match.get("right")
            if _has_port({"set": sets[right]} if isinstance(right, str) and right in sets else right):
                return True
    return False


def _has_port(right: Any) -> bool:
    if isinstance(right, dict):
        if "range" in right:
            low, high = right["range"]
            return isinstance(low, int) and isinstance(high, int) and low <= ROCE_V2_PORT <= high
        # An element of a set with a timeout, a comment or a counter is wrapped.
        inner = right["elem"].get("val") if isinstance(right.get("elem"), dict) else None
        return any(_has_port(item) for item in ((inner,) if inner is not None else right.get("set", ())))
    return bool(right == ROCE_V2_PORT)


def iptables_objections(text: str) -> list[str]:
    """The same for the output of iptables-save(8): table filter, chain INPUT and what it jumps to."""
    table, policy, rules = "", "ACCEPT", []
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif table == "filter" and line.startswith(":INPUT "):
            policy = line.split()[1]
        elif table == "filter" and line.startswith("-A "):
            rules.append(line)
    objections = []
    accepted = False
    for rule in rules:
        target = re.search(r" -j (\S+)", rule)
        if target is None:
            continue
        if " -p udp" in rule and _rule_has_port(rule):
            if target[1] in ("DROP", "REJECT"):
                objections.append(f"iptables: {rule}")
            accepted = accepted or target[1] == "ACCEPT"
    if not accepted:
        if policy == "DROP":
            objections.append(f"iptables: INPUT's policy is DROP, and no rule names UDP port {ROCE_V2_PORT}")
        elif last := [rule for rule in rules if re.fullmatch(r"-A INPUT -j (DROP|REJECT)( .*)?", rule)]:
            objections.append(f"iptables: {last[0]}, and no rule names UDP port {ROCE_V2_PORT}")
    return objections


def _rule_has_port(rule: str) -> bool:
    found = re.search(r"(?<!! )--(?:dport|dports|destination-port) (\S+)", rule)
    if found is None:
        return False
    for part in found[1].split(","):
        low, _, high = part.partition(":")
        if low.isdecimal() and int(low) <= ROCE_V2_PORT <= int(high if high.isdecimal() else low):
            return True
    return False

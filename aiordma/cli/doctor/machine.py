"""Checks of the machine and of this process's rights: container, kernel modules, locked memory, fork, huge pages."""

from __future__ import annotations

import platform
import re
import resource
from collections.abc import Iterator

from aiordma.cli.doctor.facts import Facts
from aiordma.cli.doctor.report import Finding, Status
from aiordma.cli.doctor.system import System, Unreadable

__all__ = ["check_container", "check_fork", "check_huge_pages", "check_memlock", "check_modules", "container"]

#: Less than that doesn't even hold the queues of a few QPs.
SMALLEST_MEMLOCK = 1 << 20
MODULES = ("ib_core", "ib_uverbs", "rdma_ucm", "mlx5_core", "mlx5_ib", "rdma_rxe", "siw")


def container(system: System) -> str | None:
    """What container this process runs in, as "docker"; None if nothing says that it's in one."""
    for name, kind in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if system.exists(name):
            return kind
    if "KUBERNETES_SERVICE_HOST" in system.environ:
        return "kubernetes"
    named = system.read("/run/systemd/container")
    if named and named.strip():
        return named.strip()
    try:
        groups = system.read("/proc/1/cgroup") or ""
    except Unreadable:
        return None
    found = re.search(r"docker|kubepods|containerd|libpod|lxc", groups)
    return {"kubepods": "kubernetes", "libpod": "podman"}.get(found[0], found[0]) if found else None


def check_container(system: System, facts: Facts) -> Iterator[Finding]:
    """Whether this is a container: devices, limits and interfaces then are what it was given."""
    kind = container(system)
    if kind is None:
        return
    detail = (
        ""
        if system.emulated
        else "It has only the devices, the locked memory and the network that it was started with."
    )
    yield Finding("container", Status.INFO, f"this is a container ({kind})", reason=kind, detail=detail)
    if not system.emulated and system.in_user_namespace():
        yield Finding(
            "container",
            Status.INFO,
            "it's in a user namespace: root here has no CAP_IPC_LOCK nor CAP_NET_RAW towards RDMA devices",
            reason="user-namespace",
        )


def check_modules(system: System, facts: Facts) -> Iterator[Finding]:
    """Which of the kernel's RDMA modules are there."""
    if system.emulated:
        return
    loaded = [name for name in MODULES if system.exists(f"/sys/module/{name}")]
    if system.listing("/sys/module") is None:
        yield Finding("kernel-modules", Status.UNKNOWN, "there is no /sys/module", reason="no-sysfs")
        return
    if facts.devices and "ib_uverbs" not in loaded:
        yield Finding(
            "kernel-modules",
            Status.ERROR,
            "ib_uverbs isn't loaded: without it no program reaches an RDMA device",
            reason="no-uverbs",
            cure=("modprobe ib_uverbs",),
        )
        return
    text = f"loaded: {', '.join(loaded)}" if loaded else "none of the kernel's RDMA modules is loaded"
    yield Finding("kernel-modules", Status.OK if "ib_uverbs" in loaded else Status.INFO, text)


def check_memlock(system: System, facts: Facts) -> Iterator[Finding]:
    """How much memory may be locked: registered memory and queues count (getrlimit(2), RLIMIT_MEMLOCK)."""
    soft, hard = system.memlock
    if soft == resource.RLIM_INFINITY:
        yield Finding("memlock", Status.OK, "no limit")
        return
    # The emulated NIC asks for the same capability as the kernel.
    if system.has_ipc_lock():
        yield Finding("memlock", Status.OK, f"{_size(soft)}, but CAP_IPC_LOCK lifts the limit")
        return
    kind = container(system)
    cure = [
        "in a shell: ulimit -l unlimited"
        if hard == resource.RLIM_INFINITY
        else f"in /etc/security/limits.conf, then log in again: * - memlock unlimited (the hard limit is {_size(hard)})",
        "for a service: LimitMEMLOCK=infinity in its unit",
    ]
    if kind is not None:
        cure.insert(0, "docker run --ulimit memlock=-1 (podman alike); kubernetes: in the container runtime's unit")
    small = soft < SMALLEST_MEMLOCK
    yield Finding(
        "memlock",
        Status.ERROR if small else Status.WARNING,
        f"at most {_size(soft)} may be registered, queues included"
        + (", which is too little for anything" if small else ": a longer buffer fails with ENOMEM"),
        reason="too-small" if small else "limited",
        cure=tuple(cure),
    )


def _size(size: int) -> str:
    if size == resource.RLIM_INFINITY:
        return "unlimited"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size} bytes"


def check_fork(system: System, facts: Facts) -> Iterator[Finding]:
    """Whether a fork() takes registered pages away from the parent (ibv_fork_init(3), ibv_is_fork_initialized(3))."""
    if system.emulated:
        yield Finding(
            "fork",
            Status.INFO,
            "the emulated NIC isn't harmed; in a child the parent's objects answer EIO",
            reason="emulated",
        )
        return
    step = facts.libraries.step("fork")
    asked = [name for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE") if name in system.environ]
    if step is None:
        yield Finding("fork", Status.UNKNOWN, "libibverbs couldn't be asked", reason="probe-failed")
    elif not facts.devices:
        # The kernel's answer comes over the RDMA netlink, which isn't there without its modules.
        yield Finding(
            "fork", Status.UNKNOWN, "the kernel can't be asked where it has no RDMA device", reason="no-device"
        )
    elif step["status"] == 2:
        yield Finding("fork", Status.OK, "the kernel copies registered pages for the child: nothing to set")
    elif step["status"] == 1:
        yield Finding("fork", Status.OK, f"{' and '.join(asked) or 'ibv_fork_init()'} protects registered memory")
    else:
        old = _release(platform.release()) < (5, 12)
        known = (
            "the kernel is older than 5.12" if old else "the kernel doesn't say that it copies registered pages on fork"
        )
        yield Finding(
            "fork",
            Status.WARNING,
            f"{known}: after a fork() the device may go on with pages that aren't the parent's any more",
            reason="unsafe",
            cure=(
                "start the program with RDMAV_FORK_SAFE=1, with huge pages also RDMAV_HUGEPAGES_SAFE=1 (registering then is "
                "slower)",
                "don't fork: start children by exec (subprocess does) and multiprocessing's spawn",
            ),
        )


def _release(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_huge_pages(system: System, facts: Facts) -> Iterator[Finding]:
    """Huge pages: registering large buffers is faster with them, and they need care with fork."""
    info = dict(re.findall(r"^(\w+):\s+(\d+)", system.read("/proc/meminfo") or "", re.MULTILINE))
    if "HugePages_Total" not in info:
        yield Finding("huge-pages", Status.UNKNOWN, "/proc/meminfo says nothing of them", reason="no-meminfo")
        return
    transparent = system.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", transparent)
    free, total = info.get("HugePages_Free", "?"), info["HugePages_Total"]
    text = f"{free} of {total} reserved ones of {info.get('Hugepagesize', '?')} KiB are free"
    if total == "0":
        text = "none reserved"
    if chosen:
        text += f"; transparent ones: {chosen[1]}"
    yield Finding("huge-pages", Status.INFO, text)
    asked = any(name in system.environ for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE"))
    if not system.emulated and asked and total != "0" and "RDMAV_HUGEPAGES_SAFE" not in system.environ:
        yield Finding(
            "huge-pages",
            Status.WARNING,
            "RDMAV_FORK_SAFE is set without RDMAV_HUGEPAGES_SAFE: registering memory in huge pages fails or isn't protected",
            reason="fork-safe",
            cure=("set RDMAV_HUGEPAGES_SAFE=1 too",),
        )

"""Checks of what is installed: aiordma itself, libibverbs, the providers, pyverbs, librdmacm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from aiordma.cli.doctor.facts import Facts
from aiordma.cli.doctor.report import Finding, Status
from aiordma.cli.doctor.system import System

__all__ = ["check_aiordma", "check_libibverbs", "check_providers", "check_pyverbs", "check_rdma_cm"]

APT_LIBRARIES = "apt install libibverbs1 ibverbs-providers (dnf install libibverbs; pacman -S rdma-core)"
APT_PYVERBS = "apt install python3-pyverbs (dnf install python3-pyverbs), and run the distribution's Python with it"
#: Kernel drivers and the provider libraries of rdma-core that serve them, where the two are called differently.
PROVIDERS = {"mlx5_core": "mlx5", "mlx4_core": "mlx4", "bnxt_en": "bnxt_re", "ice": "irdma", "i40e": "irdma"}


def check_aiordma(system: System, facts: Facts) -> Iterator[Finding]:
    """The package's compiled parts load."""
    step = facts.libraries.step("aiordma")
    if step is None:
        yield Finding(
            "aiordma",
            Status.UNKNOWN,
            f"whether the compiled parts load couldn't be found out: the probe of libraries stopped after "
            f"{facts.libraries.last!r}: {facts.libraries.ended or 'no reason given'}",
            reason="probe-failed",
            detail=facts.libraries.stderr.strip(),
        )
    elif step["error"] is not None:
        others = [s["name"] for s in facts.libraries.all("library") if s.get("error")]
        cure = "install aiordma anew, built on this machine"
        yield Finding(
            "aiordma",
            Status.ERROR,
            "the compiled parts can't be loaded",
            reason="extension-broken",
            detail=step["error"],
            cure=("first what is wrong with libibverbs, pyverbs or the providers",) if others else (cure,),
        )
    else:
        yield Finding("aiordma", Status.OK, "the compiled parts load")


def check_libibverbs(system: System, facts: Facts) -> Iterator[Finding]:
    """libibverbs is there and loads."""
    step = facts.libraries.step("library", name="libibverbs.so.1")
    if step is None:
        yield _no_probe("libibverbs", facts)
    elif step["path"] is None:
        there = ", ".join(step.get("found") or ())
        yield Finding(
            "libibverbs",
            Status.ERROR,
            step["error"],
            reason="broken" if there else "missing",
            subject="libibverbs.so.1",
            detail=f"Files of that name where the loader looks: {there}." if there else "",
            cure=(APT_LIBRARIES,),
        )
    elif not step["private"]:
        yield Finding(
            "libibverbs",
            Status.ERROR,
            f"{step['path']} isn't rdma-core's: it has no IBVERBS_PRIVATE version, which pyverbs and the providers need",
            reason="foreign",
            subject="libibverbs.so.1",
            cure=(
                f"take its folder out of LD_LIBRARY_PATH or /etc/ld.so.conf.d; if there is no other: {APT_LIBRARIES}",
            ),
        )
    else:
        private = ", ".join(f"IBVERBS_PRIVATE_{number}" for number in step["private"])
        version = f"rdma-core {step['version']}" if step["version"] else "version unknown"
        yield Finding(
            "libibverbs",
            Status.OK,
            f"{version}{f', {private}' if private else ''}: {step['path']}",
            subject="libibverbs.so.1",
        )


def check_providers(system: System, facts: Facts) -> Iterator[Finding]:
    """libibverbs finds a provider, the user-space half of a driver, for each device."""
    mlx5 = facts.libraries.step("library", name="libmlx5.so.1")
    if mlx5 is not None and mlx5["path"] is None:
        yield Finding(
            "providers",
            Status.ERROR,
            "the mlx5 provider can't be loaded, which aiordma is linked with",
            reason="libmlx5",
            subject="libmlx5.so.1",
            detail=mlx5["error"],
            cure=(APT_LIBRARIES,),
        )
    usable = facts.usable
    if usable is None:
        reason = facts.libraries.ended or "libibverbs can't be loaded"
        yield Finding("providers", Status.UNKNOWN, f"which devices libibverbs lists: {reason}", reason="probe-failed")
        return
    warnings = [line.strip() for line in facts.libraries.stderr.splitlines() if line.startswith("libibverbs:")]
    for device in facts.devices:
        if device.name in usable:
            yield Finding("providers", Status.OK, f"libibverbs has a provider for {device.name}", subject=device.name)
        elif device.uverbs is not None:
            yield _no_provider(system, device.name, PROVIDERS.get(device.driver, device.driver), warnings)
    if not facts.devices and mlx5 is not None and mlx5["path"] is not None:
        yield Finding("providers", Status.OK, f"libmlx5 loads: {mlx5['path']}", subject="libmlx5.so.1")


def _no_provider(system: System, device: str, driver: str, warnings: list[str]) -> Finding:
    known = [name for name in ("/etc/libibverbs.d", "/usr/etc/libibverbs.d") if system.listing(name)]
    files = sorted({f for name in known for f in system.listing(name) or () if f.endswith(".driver")})
    what = f"libibverbs doesn't list {device}, which the kernel has"
    mine = f"{driver}.driver"
    related = [
        line for line in warnings if device in line or (driver and re.search(rf"lib{re.escape(driver)}\b", line))
    ]
    detail = "\n".join(related)
    if not files:
        reason, what = "no-driver-files", f"{what}: there are no provider files in /etc/libibverbs.d"
    elif driver and mine not in files:
        reason, what = "no-driver-file", f"{what}: there is no /etc/libibverbs.d/{mine}"
    elif any("couldn't load driver" in line for line in related):
        reason, what = "driver-broken", f"{what}: its provider can't be loaded"
    else:
        reason = "not-listed"
    return Finding(
        "providers",
        Status.ERROR,
        what,
        reason=reason,
        subject=device,
        detail=detail,
        cure=(
            APT_LIBRARIES,
            "where libibverbs was built by hand or came with another package: install its providers to the folder that it "
            "was built for, of the same version",
        ),
    )


def check_pyverbs(system: System, facts: Facts) -> Iterator[Finding]:
    """pyverbs is there for this Python, and fits libibverbs."""
    package = facts.libraries.step("module", name="pyverbs")
    module = facts.libraries.step("module", name="pyverbs.device")
    if package is None or module is None:
        yield _no_probe("pyverbs", facts)
        return
    if package["path"] is None and package["missing"]:
        yield Finding(
            "pyverbs",
            Status.ERROR,
            "this Python has no pyverbs",
            reason="missing",
            detail=_other_pythons(system),
            cure=(
                APT_PYVERBS,
                "in a virtual environment: make it with --system-site-packages on the distribution's Python",
            ),
        )
        return
    if module["path"] is None:
        mismatch = "different versions" in module["explained"]
        yield Finding(
            "pyverbs",
            Status.ERROR,
            "pyverbs can't be loaded" + (": it and libibverbs are of different versions" if mismatch else ""),
            reason="mismatch" if mismatch else "broken",
            detail=f"{module['explained']}\nThe loader said: {module['error']}",
            cure=("have pyverbs, libibverbs and the providers from one source: " + APT_PYVERBS,),
        )
        return
    yield Finding("pyverbs", Status.OK, _fits(facts, module))
    mlx5 = facts.libraries.step("module", name="pyverbs.providers.mlx5.mlx5dv")
    if mlx5 is not None and mlx5["path"] is None:
        yield Finding(
            "pyverbs",
            Status.WARNING,
            f"pyverbs has no usable mlx5 part, so aiordma.mlx5 can't work: {mlx5['explained']}",
            reason="no-mlx5",
            cure=(APT_PYVERBS,),
        )


def _fits(facts: Facts, module: Any) -> str:
    private = ", ".join(f"IBVERBS_PRIVATE_{number}" for number in module["private"])
    return f"loads{f', built for {private}' if private else ''}: {PurePosixPath(module['path']).parent}"


def _other_pythons(system: System) -> str:
    places = []
    for base in ("/usr/lib/python3/dist-packages", "/usr/lib64", "/usr/lib"):
        try:
            names = system.listing(base) or []
        except OSError:
            continue
        if base.endswith("dist-packages"):
            if "pyverbs" in names:
                places.append(f"{base}/pyverbs")
            continue
        for name in names:
            folder = f"{base}/{name}/site-packages/pyverbs"
            if re.fullmatch(r"python3\.\d+", name) and system.exists(folder):
                places.append(folder)
    return f"There is one at {', '.join(places)}, which this Python doesn't see." if places else ""


def check_rdma_cm(system: System, facts: Facts) -> Iterator[Finding]:
    """What connecting by rdma_cm needs. Connecting over TCP (aiordma.exchange) doesn't need it."""
    step = facts.libraries.step("library", name="librdmacm.so.1")
    if step is not None and step["path"] is None:
        yield Finding(
            "rdma-cm",
            Status.WARNING,
            "librdmacm can't be loaded",
            reason="library",
            subject="librdmacm.so.1",
            detail=step["error"],
            cure=("apt install librdmacm1 (dnf install librdmacm)",),
        )
    if system.emulated:
        if step is not None and step["path"] is not None:
            yield Finding("rdma-cm", Status.OK, f"librdmacm loads: {step['path']}", subject="librdmacm.so.1")
        return
    name = "/dev/infiniband/rdma_cm"
    if not facts.devices:
        return
    if not system.exists(name):
        yield Finding(
            "rdma-cm",
            Status.WARNING,
            f"there is no {name}: programs that connect by rdma_cm can't",
            reason="no-node",
            cure=("modprobe rdma_ucm", f"in a container: --device={name}"),
        )
    elif not system.may_use(name):
        yield Finding(
            "rdma-cm",
            Status.WARNING,
            f"this user may not read and write {name}",
            reason="no-permission",
            cure=(f"chmod 666 {name}, which is what udev's rules of rdma-core and systemd set",),
        )
    else:
        yield Finding("rdma-cm", Status.OK, f"{name} is there and may be used")


def _no_probe(check: str, facts: Facts) -> Finding:
    return Finding(
        check,
        Status.UNKNOWN,
        f"the probe of libraries stopped after {facts.libraries.last!r}: {facts.libraries.ended or 'no reason given'}",
        reason="probe-failed",
    )

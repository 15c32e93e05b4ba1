"""What is gathered before the checks run: devices from /sys, and what the probes printed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiordma.cli._sysfs import KernelDevice, KernelPort, read_devices
from aiordma.cli.doctor.system import Output, System, run

#: For starting Python and importing everything, on top of the timeout: on a machine that is busy, from a slow disk.
_START_SECONDS = 60.0

__all__ = ["Facts", "ProbeResult", "gather", "probe"]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe said, a dictionary a step, and how it ended: "" if well."""

    steps: Sequence[Mapping[str, Any]] = ()
    ended: str = ""
    stderr: str = ""

    def step(self, step_name: str, /, **values: object) -> Mapping[str, Any] | None:
        """The first step of that name with those values; None if the probe didn't come so far."""
        for step in self.steps:
            if step["step"] == step_name and all(step.get(key) == value for key, value in values.items()):
                return step
        return None

    def all(self, name: str) -> list[Mapping[str, Any]]:
        """Every step of that name."""
        return [step for step in self.steps if step["step"] == name]

    @property
    def last(self) -> str:
        """How far it came, in a word."""
        return str(self.steps[-1]["step"]) if self.steps else "starting"


@dataclass(frozen=True, slots=True)
class Facts:
    """What checks know beside the System."""

    devices: Sequence[KernelDevice] = ()
    libraries: ProbeResult = field(default_factory=ProbeResult)
    opened: Mapping[str, ProbeResult] = field(default_factory=dict)

    def ports(self) -> list[tuple[KernelDevice, KernelPort]]:
        """Every port, with its device."""
        return [(device, port) for device in self.devices for port in device.ports]

    @property
    def usable(self) -> list[str] | None:
        """The devices that libibverbs lists; None if that couldn't be found out."""
        step = self.libraries.step("devices")
        return None if step is None or step["names"] is None else list(step["names"])


def parse(output: Output, timeout: float) -> ProbeResult:
    """A probe's output."""
    steps = []
    for line in output.stdout.splitlines():
        # Other lines are from libraries that talk too much, or cut short by a violent end.
        try:
            step = json.loads(line)
        except ValueError:
            continue
        if isinstance(step, dict) and "step" in step:
            steps.append(step)
    if output.status is None:
        ended = f"it said nothing for {timeout:g} s"
    elif output.status < 0:
        try:
            ended = f"it was ended by {signal.Signals(-output.status).name}"
        except ValueError:
            ended = f"it was ended by signal {-output.status}"
    else:
        ended = f"it ended with exit status {output.status}" if output.status else ""
    return ProbeResult(steps, ended, output.stderr)


def probe(system: System, *arguments: str) -> ProbeResult:
    """Runs a probe."""
    # -P: a folder that happens to be the working directory has no say in what is imported.
    command = [sys.executable, "-P", "-m", "aiordma.cli.doctor.probe", *arguments]
    # libibverbs then says which devices it has no driver for (rdma-core's libibverbs/init.c).
    env = {**system.environ, "IBV_SHOW_WARNINGS": "1"}
    return parse(run(command, system.timeout, env, start=_START_SECONDS), system.timeout)


def gather(system: System) -> Facts:
    """Runs all probes: of the libraries, and of each device, with a write of each active port to itself."""
    devices = read_devices(system.rdma_sysfs)
    libraries = probe(system, "libraries")
    facts = Facts(devices, libraries)
    opened: dict[str, ProbeResult] = {}
    module = libraries.step("module", name="pyverbs.device")
    ready = libraries.step("aiordma", error=None) is not None and module is not None and module["path"] is not None
    for device in devices:
        if not ready or device.name not in (facts.usable or ()):
            continue
        ports = [str(port.number) for port in device.ports if port.state == "active" and port.gids]
        if device.is_iwarp:
            # Two of its QPs are connected by rdma_cm alone, between two addresses.
            ports = []
        opened[device.name] = probe(system, "device", device.name, *ports)
    return Facts(devices, libraries, opened)

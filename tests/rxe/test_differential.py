"""Random programs of verbs operations have the same outcome on the emulated NIC and on the kernel's device.

AIORDMA_DIFFERENTIAL is the number of programs, or a range of seeds: a failure names its seed, and
``AIORDMA_DIFFERENTIAL=1234-1234 tox -e rxe -- tests/rxe/test_differential.py`` executes that program alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated.core import DEVICE, ON_EMULATED, PEER_DEVICE
from rxe.differential.compare import differences
from rxe.differential.program import program

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.skipif(ON_EMULATED, reason="compares another device, that of AIORDMA_DEVICE, to the emulated NIC"),
]

EXECUTE = Path(__file__).parent / "differential" / "execute.py"
#: Seconds for a program, at most.
A_PROGRAM = 20
#: Programs a test: what was found shows as it goes on, rather than after the last of a thousand.
A_TEST = 50


def seeds() -> list[range]:
    text = os.environ.get("AIORDMA_DIFFERENTIAL", "50")
    first, _, last = text.partition("-")
    begin, end = (int(first), int(last) + 1) if last else (1, int(first) + 1)
    return [range(n, min(n + A_TEST, end)) for n in range(begin, end, A_TEST)]


def outcomes(devices: list[str], chosen: range) -> "subprocess.Popen[str]":
    """A process that executes the programs on these devices."""
    process = subprocess.Popen(
        [sys.executable, EXECUTE, *devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("".join(f"{seed}\n" for seed in chosen))
    process.stdin.close()
    process.stdin = None
    return process


def read(process: "subprocess.Popen[str]", chosen: range) -> dict[int, Any]:
    output, _ = process.communicate(timeout=60 + A_PROGRAM * len(chosen))
    assert process.returncode == 0, output
    return {line["seed"]: line["outcome"] for line in map(json.loads, output.splitlines())}


@pytest.mark.timeout(90 + A_PROGRAM * A_TEST)
@pytest.mark.parametrize("chosen", seeds(), ids=lambda chosen: f"{chosen[0]}-{chosen[-1]}")
def test_random_programs_have_the_same_outcome_on_both_devices(chosen: range) -> None:
    real = outcomes([DEVICE, PEER_DEVICE or DEVICE], chosen)
    emulated = outcomes(["emulated:mlx5_0", "emulated:mlx5_1"], chosen)
    try:
        of_emulated, of_real = read(emulated, chosen), read(real, chosen)
    finally:
        for process in (real, emulated):
            process.kill()
            process.wait()
    complaints = []
    for seed in chosen:
        plan = program(seed)
        found = differences(plan, of_emulated[seed], of_real[seed], rxe=DEVICE.startswith("rxe"))
        if found:
            complaints.append("\n".join([plan.describe(), "emulated NIC / device:", *(f"  {line}" for line in found)]))
    assert not complaints, "\n\n".join([f"{len(complaints)} of {len(chosen)} programs differ", *complaints[:5]])

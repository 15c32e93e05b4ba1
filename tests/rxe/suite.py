#!/usr/bin/env python3
"""Runs the tests that want RDMA in the kernel, in VMs (tests/rxe/vm/run.py): `tox -e rxe`.

    tests/rxe/suite.py              what fits into some minutes on two processors: each test under one event loop
    tests/rxe/suite.py --all        everything, under each loop
    tests/rxe/suite.py PYTEST-ARGUMENT...     those tests alone, with the two rxe devices

Tests in tests/rxe/test_doctor*.py run in several machines; which one, they find in the environment: AIORDMA_IN_VM is the
--rdma option of run.py, and the user is root or not.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
DEVICES = ("--env", "AIORDMA_DEVICE=rxe0", "--env", "AIORDMA_PEER_DEVICE=rxe1")
#: Seconds for all of it; for one machine with few tests. They're for a VM that hangs: where nothing else runs it takes a
#: tenth of that. A test has pytest's own.
LIMIT, LIMIT_ALL, LIMIT_SMALL = 2700, 14400, 900
#: What is about the operations themselves, and so about the device: modules test_core_NAME.
QUICK = ("operations", "srq", "memory", "arguments", "batches", "random")
NOTHING_COLLECTED = 5


def in_vm(limit: int, options: tuple[str, ...], *pytest_arguments: str) -> int:
    """pytest's exit status in a VM."""
    command = [sys.executable, str(HERE / "vm" / "run.py"), "--optional", "--limit", str(limit), *options, "--"]
    command += ["pytest", "-p", "no:cacheprovider", *pytest_arguments]
    print(f"rxe: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def main() -> int:
    arguments = sys.argv[1:]
    everything = "--all" in arguments
    if everything:
        arguments.remove("--all")
    if arguments:
        return in_vm(LIMIT_ALL, DEVICES, *arguments)
    emulated = REPOSITORY / "tests" / "emulated"
    if everything:
        programs = ("--env", f"AIORDMA_DIFFERENTIAL={os.environ.get('AIORDMA_DIFFERENTIAL', '1000')}")
        status = [in_vm(LIMIT_ALL, (*DEVICES, *programs), str(HERE), str(emulated))]
    else:
        quick = [str(emulated / f"test_core_{name}.py") for name in QUICK]
        status = [in_vm(LIMIT, DEVICES, "--one-loop", "-m", "not slow_in_vm", str(HERE), *quick)]
    doctor = sorted(str(p.relative_to(REPOSITORY)) for p in HERE.glob("test_doctor*.py"))
    if doctor:
        for options in (("--user", "nobody"), ("--rdma", "modules"), ("--rdma", "none")):
            status.append(in_vm(LIMIT_SMALL, options, *doctor))
    # Where the kernel has it, which run.py looks for.
    status.append(in_vm(LIMIT_SMALL, ("--rdma", "siw"), "--one-loop", str(HERE / "test_siw.py")))
    return next((s for s in status if s not in (0, NOTHING_COLLECTED)), 0)


if __name__ == "__main__":
    sys.exit(main())

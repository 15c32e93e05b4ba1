#!/usr/bin/env python3
"""Runs a command in a VM with RDMA in its kernel: Soft-RoCE (rxe), or siw where the kernel has it.

    tests/rxe/vm/run.py [options] [--] COMMAND [ARGUMENT...]

The VM boots the distribution's kernel of the day, which is downloaded but not installed, in QEMU on this machine's own
root, read-only; what is written in it is gone with it. There are two devices, rxe0 and rxe1, whose netdevs are the ends of a
veth pair: what one sends to the other crosses that link. COMMAND runs in the present folder, as root, with this
program's Python first on the path; what it prints comes as it's printed, and its exit status is this program's.

    --rdma rxe      two rxe devices (the default); siw: two siw devices; modules: the kernel modules, but no device;
                    none: a kernel with no RDMA
    --user NAME     run COMMAND as this user, with none of root's rights
    --env K=V       put this into COMMAND's environment (AIORDMA_*, CI, PYTEST_* and HYPOTHESIS_* go there anyway)
    --limit SECONDS the whole run ends by then, whatever happens (default 600)
    --kernel DEB    boot the kernel of this Debian package, rather than the distribution's of the day; once for each
                    package where it comes in several. AIORDMA_VM_KERNEL sets it too, with spaces between several.
    --cpus N, --memory MIB
    --accel kvm     use KVM. The default is tcg, QEMU's own processor: slower, but it works everywhere, and there are
                    machines whose /dev/kvm accepts a VM and then never runs it. AIORDMA_VM_ACCEL sets it too.
    --optional      where no VM can be started (no QEMU, no kernel to be had), say so and end with status 0,
                    unless AIORDMA_VM=required; where the kernel has no siw, with --rdma siw, also then
    --prepare       download and build what is needed, and run nothing

Exit status: COMMAND's, which is 137 when the kernel killed it; 124 when it ran into its time limit; 125 when there was no
VM or it came to no proper end, with the end of its console on standard error.

For example, what a test of `aiordma doctor` wants:

    tests/rxe/vm/run.py -- pytest tests/rxe/test_doctor.py                       with two devices
    tests/rxe/vm/run.py --rdma none -- pytest tests/rxe/test_doctor_none.py      with no RDMA in the kernel
    tests/rxe/vm/run.py --user nobody -- pytest tests/rxe/test_doctor.py         not as root
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rxe.vm import initramfs, kernel, machine

REPOSITORY = Path(__file__).resolve().parents[3]
CACHE = REPOSITORY / "build" / "rxe-vm"
_PASSED_ON = ("AIORDMA_", "PYTEST_", "HYPOTHESIS_")
#: Seconds of the limit that are for booting, and for turning off.
_BOOT, _END = 60, 20
_NO_VM, _TIMEOUT = 125, 124


def _say(text: str) -> None:
    print(f"rxe-vm: {text}", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--rdma", choices=["rxe", "siw", "modules", "none"], default="rxe", help=argparse.SUPPRESS)
    parser.add_argument("--user", default="", help=argparse.SUPPRESS)
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=600, help=argparse.SUPPRESS)
    parser.add_argument("--kernel", action="append", type=Path, metavar="DEB", help=argparse.SUPPRESS)
    parser.add_argument("--cpus", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=2048, help=argparse.SUPPRESS)
    parser.add_argument(
        "--accel", choices=["tcg", "kvm"], default=os.environ.get("AIORDMA_VM_ACCEL", "tcg"), help=argparse.SUPPRESS
    )
    parser.add_argument("--optional", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.kernel = options.kernel or [Path(name) for name in os.environ.get("AIORDMA_VM_KERNEL", "").split()]
    for archive in options.kernel:
        if not archive.is_file():
            parser.error(f"no kernel package {archive}")
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command and not options.prepare:
        parser.error("which command?")
    return options


def _job(options: argparse.Namespace) -> str:
    """The guest's orders, as a shell script."""
    environment = {
        "LANG": "C.UTF-8",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "AIORDMA_IN_VM": options.rdma,
    }
    for name, value in os.environ.items():
        if name.startswith(_PASSED_ON) or name == "CI":
            environment[name] = value
    for pair in options.env:
        name, _, value = pair.partition("=")
        environment[name] = value
    lines = [
        f"GUEST={Path(__file__).resolve().parent / 'guest.sh'}",
        f"RDMA={options.rdma}",
        f"VM_USER={shlex.quote(options.user)}",
        f"LIMIT={max(options.limit - _BOOT - _END, 10):.0f}",
        f"FOLDER={shlex.quote(os.getcwd())}",
        f"COMMAND=({shlex.join(options.command)})",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
    ]
    return "\n".join(lines) + "\n"


def _missing_programs() -> list[str]:
    needed = {"modprobe": "kmod", "depmod": "kmod", "busybox": "busybox-static", "ip": "iproute2", "rdma": "iproute2"}
    # Programs of the administrator aren't on everybody's path.
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    return sorted({package for program, package in needed.items() if shutil.which(program) is None})


def _prepare(archives: list[Path]) -> kernel.Kernel:
    machine.qemu()
    missing = _missing_programs()
    if missing:
        raise kernel.Unavailable(f"these packages are missing: {', '.join(missing)} (scripts/bootstrap.sh vm)")
    return kernel.kernel_of_packages(archives, CACHE) if archives else kernel.kernel_of_the_day(CACHE)


def _refuse(options: argparse.Namespace, why: str) -> int:
    # No machine can be asked to have siw: Debian's kernels don't.
    if options.optional and (options.rdma == "siw" or os.environ.get("AIORDMA_VM") != "required"):
        line = f"SKIPPED, not run: no VM for kernel RDMA. {why}"
        rule = "!" * min(len(line) + 8, 120)
        _say(rule)
        _say(line)
        _say(rule)
        return 0
    _say(f"no VM: {why}")
    return _NO_VM


def _show(data: bytes) -> None:
    # Terminals' line ends aren't wanted in files.
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _tail(console: str, lines: int = 60) -> None:
    _say("the end of the VM's console:")
    for line in console.splitlines()[-lines:]:
        print(f"  | {line}", file=sys.stderr)
    sys.stderr.flush()


def _on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    options = _options()
    # So that the VM is killed and its folder removed.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _on_signal)
    try:
        taken = _prepare(options.kernel)
        with tempfile.TemporaryDirectory(prefix="run-", dir=CACHE) as folder:
            work = Path(folder)
            image = initramfs.build(taken, _job(options), work / "initramfs")
            if options.prepare:
                return 0
            if options.rdma == "siw" and not initramfs.has(taken, "siw"):
                raise kernel.Unavailable(f"kernel {taken.release} has no siw")
            _say(f"kernel {taken.release}, {options.accel}, {options.cpus} CPUs, {options.memory} MiB, {options.rdma}")
            arguments = machine.command(
                taken.image, image, work, accel=options.accel, cpus=options.cpus, memory=options.memory
            )
            result = machine.run(arguments, work, options.limit, _show)
    except kernel.Unavailable as e:
        return _refuse(options, str(e))
    if result.status is None:
        _say(result.why)
        _tail(result.console)
        return _NO_VM
    if result.status == 128 + signal.SIGKILL:
        _say("the command was killed, before its time limit: see whether the VM ran out of memory (--memory)")
        _tail(result.console)
    if result.status == _TIMEOUT:
        _say(f"the command ran into its time limit ({options.limit:.0f} s for everything)")
        _tail(result.console)
        return _TIMEOUT
    if result.status == _NO_VM or os.environ.get("AIORDMA_VM_CONSOLE"):
        _tail(result.console)
    return result.status


if __name__ == "__main__":
    sys.exit(main())

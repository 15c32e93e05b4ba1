"""One run of the VM: a QEMU process, its ports, its time limit."""

import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rxe.vm.kernel import Unavailable

#: By machine: the program, the machine type with its console, and what else it needs.
_MACHINES = {
    "x86_64": ("qemu-system-x86_64", ["-machine", "q35"], "ttyS0"),
    "aarch64": ("qemu-system-aarch64", ["-machine", "virt", "-cpu", "max"], "ttyAMA0"),
}
#: Seconds for the machine to turn itself off, when its status is there.
_PARTING = 20


@dataclass(frozen=True)
class Result:
    """How a run ended: the command's exit status, None if none came; ``why`` then says so."""

    status: int | None
    why: str
    console: str


def qemu() -> str:
    """The QEMU for this machine."""
    name = _MACHINES.get(platform.machine(), ("",))[0]
    if not name:
        raise Unavailable(f"no VM is known for {platform.machine()}")
    if shutil.which(name) is None:
        raise Unavailable(f"there is no {name} (scripts/bootstrap.sh vm installs it)")
    return name


def command(image: Path, initramfs: Path, work: Path, *, accel: str, cpus: int, memory: int) -> list[str]:
    """QEMU's command line; the command's output is on its standard output."""
    program, machine, console = _MACHINES[platform.machine()][0:3]
    return [
        # However this process ends, the VM does with it.
        "setpriv", "--pdeathsig", "KILL", "--",
        program, *machine, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-accel", accel if accel != "tcg" else "tcg,thread=multi",
        *(["-cpu", "max"] if accel == "tcg" and program.endswith("x86_64") else []),
        "-smp", str(cpus), "-m", str(memory),
        "-kernel", str(image), "-initrd", str(initramfs),
        # A panic, an oops too, ends QEMU, because of -no-reboot.
        "-append", f"console={console} panic=-1 oops=panic quiet loglevel=5 mitigations=off",
        "-serial", f"file:{work / 'console.log'}",
        "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=root,mount_tag=hostroot",
        "-device", "virtio-serial-pci",
        "-chardev", "stdio,id=output,signal=off", "-device", "virtserialport,chardev=output,name=output",
        "-chardev", f"file,id=status,path={work / 'status'}", "-device", "virtserialport,chardev=status,name=status",
    ]  # fmt: skip


def run(arguments: list[str], work: Path, limit: float, show: Callable[[bytes], None]) -> Result:
    """Runs QEMU until it ends or ``limit`` seconds have passed, and never longer; ``show`` gets the output as it comes."""
    status_file, console_file = work / "status", work / "console.log"
    for file in (status_file, console_file):
        file.unlink(missing_ok=True)
    deadline = time.monotonic() + limit
    # An end of file on standard input would disconnect the port whose output is standard output.
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    output: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 65536):
            output.put(data)
        output.put(b"")

    # A thread, so that a QEMU which the kernel doesn't let go of (it happens with KVM) holds up nobody.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    why = "the VM ended without saying how the command ended: a kernel panic, or a fault before it ran"
    try:
        while True:
            try:
                data = output.get(timeout=1)
            except queue.Empty:
                data = None
            if data:
                show(data)
            elif data == b"" or process.poll() is not None:
                break
            if _read_status(status_file) is not None:
                deadline = min(deadline, time.monotonic() + _PARTING)
            if time.monotonic() > deadline:
                why = f"nothing came to an end in {limit:.0f} s: the VM, or the kernel in it, hangs"
                break
    finally:
        process.kill()
        try:
            process.wait(timeout=10)
            reader.join(timeout=10)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            if not reader.is_alive():
                process.stdout.close()
        except subprocess.TimeoutExpired:
            print(f"rxe-vm: QEMU (process {process.pid}) can't be killed", file=sys.stderr, flush=True)
        while not output.empty():
            show(output.get())
    return Result(_read_status(status_file), why, _read(console_file))


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _read_status(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text.endswith("\n") and text.strip().isdigit() else None

"""What checks look at: files below a root, this process's rights, and other programs' output.

Everything that a check learns of the machine it learns from here, so that a test can show it another machine: a tree of
files in a temporary folder, other rights, other limits.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Output", "System", "Unreadable", "run"]

_CAP_IPC_LOCK = 14  # linux/capability.h
_WHOLE = "4294967295"
_REAPING_SECONDS = 2.0
_LONGEST = 10  # times the timeout


class Unreadable(Exception):
    """A check can't find out what it needs; the message says what it couldn't read or run, and why."""


@dataclass(frozen=True, slots=True)
class Output:
    """How a program ended. ``status`` is negative for a signal and None where it didn't end in time."""

    status: int | None
    stdout: str
    stderr: str


def run(command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None, *, start: float = 0.0) -> Output:
    """Runs a program until it says nothing for ``timeout`` seconds, or ``start`` seconds longer at its beginning.

    One that is stuck in the kernel is left behind. Raises FileNotFoundError where there is no such program.
    """
    child = subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    output = {child.stdout: bytearray(), child.stderr: bytearray()}
    in_time = False
    try:
        with selectors.DefaultSelector() as selector:
            for pipe in output:
                selector.register(pipe, selectors.EVENT_READ)
            now = time.monotonic()
            # A program that talks without end is stopped too.
            deadline, last = now + timeout + start, now + start + _LONGEST * timeout
            while selector.get_map():
                ready = selector.select(max(0.0, min(deadline, last) - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        output[key.fileobj] += data  # type: ignore[index]
                        deadline = time.monotonic() + timeout
                    else:
                        selector.unregister(key.fileobj)
            else:
                in_time = _wait(child, timeout)
    finally:
        if not in_time:
            _kill(child)
            # A process in the kernel's uninterruptible sleep doesn't die of it.
            if not _wait(child, _REAPING_SECONDS):
                # Otherwise Popen's finalizer complains of a child that still runs.
                child.returncode = -signal.SIGKILL
        for pipe in output:
            pipe.close()
    out, err = (bytes(data).decode(errors="replace") for data in output.values())
    return Output(child.returncode if in_time else None, out, err)


def _wait(child: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        child.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


@dataclass(frozen=True)
class System:
    """A machine, or what stands for one.

    ``root`` is where its files begin. ``sysfs`` is where those of RDMA devices do, if not below ``root``/sys: the emulated
    NIC has a folder for that. ``environ`` is the environment that programs get.
    """

    root: Path = Path("/")
    sysfs: Path | None = None
    emulated: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    uid: int = field(default_factory=os.geteuid)
    memlock: tuple[int, int] = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK))
    timeout: float = 20.0

    @property
    def rdma_sysfs(self) -> Path:
        """What stands for /sys where RDMA devices are looked for."""
        return self.sysfs if self.sysfs is not None else self.root / "sys"

    def path(self, name: str) -> Path:
        """The place of an absolute path of that machine."""
        return self.root / name.lstrip("/")

    def exists(self, name: str) -> bool:
        """Whether there is something of that name; a folder that may not be looked into raises :class:`Unreadable`."""
        try:
            os.stat(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as e:
            raise Unreadable(f"{name}: {e.strerror}") from e
        return True

    def read(self, name: str) -> str | None:
        """A file's text; None where there is no such file. Raises :class:`Unreadable`."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise Unreadable(f"{name}: {e.strerror}") from e

    def listing(self, name: str) -> list[str] | None:
        """The names in a folder; None where there is no such folder. Raises :class:`Unreadable`."""
        try:
            return sorted(os.listdir(self.path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise Unreadable(f"{name}: {e.strerror}") from e

    def may_use(self, name: str) -> bool:
        """Whether this process may open the file for reading and writing.

        faccessat(2) asks the kernel without opening the file: for a device node its driver isn't called, and a container's
        device rules (cgroups) count too.
        """
        return os.access(self.path(name), os.R_OK | os.W_OK, effective_ids=True)

    def has_ipc_lock(self) -> bool:
        """Whether the kernel lets this process lock memory beyond its limit.

        ib_umem_get() in the kernel asks for CAP_IPC_LOCK in the first user namespace; root of another one doesn't have it.
        """
        status = self.read("/proc/self/status") or ""
        for line in status.splitlines():
            if line.startswith("CapEff:"):
                has = bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
                return has and not self.in_user_namespace()
        raise Unreadable("/proc/self/status: no CapEff")

    def in_user_namespace(self) -> bool:
        """Whether this process is in a user namespace other than the first one."""
        mapping = self.read("/proc/self/uid_map")
        return mapping is not None and mapping.split() != ["0", "0", _WHOLE]

    def run(self, *command: str) -> Output | None:
        """Runs a program of that machine; None where it isn't installed."""
        try:
            return run(command, self.timeout, self.environ)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise Unreadable(f"{command[0]}: {e.strerror}") from e

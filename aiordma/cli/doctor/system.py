"""What checks look at: files below a root, this process's rights, and other programs' output.

Everything that a check learns of the machine it learns from here, so that a test can show it another machine: a tree of
files in a temporary folder, other rights, other limits.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Output", "System", "Unreadable", "run"]

_CAP_IPC_LOCK = 14  # linux/capability.h
_WHOLE = "4294967295"
_REAPING_SECONDS = 2.0


class Unreadable(Exception):
    """A check can't find out what it needs; the message says what it couldn't read or run, and why."""


@dataclass(frozen=True, slots=True)
class Output:
    """How a program ended. ``status`` is negative for a signal and None where it didn't end in time."""

    status: int | None
    stdout: str
    stderr: str


def run(command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> Output:
    """Runs a program for at most ``timeout`` seconds; one that is stuck in the kernel is left behind.

    Raises FileNotFoundError where there is no such program.
    """
    child = subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as e:
        _kill(child)
        # A process in the kernel's uninterruptible sleep doesn't die of it, and keeps its ends of the pipes.
        try:
            out, err = child.communicate(timeout=_REAPING_SECONDS)
        except subprocess.TimeoutExpired as again:
            out, err = again.stdout or e.stdout or b"", again.stderr or e.stderr or b""
            for pipe in (child.stdout, child.stderr):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            # Otherwise Popen's finalizer complains of a child that still runs.
            child.returncode = -9
        return Output(None, out.decode(errors="replace"), err.decode(errors="replace"))
    except BaseException:
        _kill(child)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAPING_SECONDS)
        raise
    return Output(child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


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

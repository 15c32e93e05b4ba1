"""``aiordma emulate``: another program on the emulated NIC, by LD_PRELOAD."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys

from aiordma.emulator._library import library_path
from aiordma.emulator._native import EmulatorError, native
from aiordma.emulator.config import EmulatorConfig, Gid, Limits
from aiordma.emulator.sysfs import PrivateFolder, write_tree

__all__ = ["environment", "parse_gids", "parse_limits", "run"]

#: What a shell answers for a program that it can't find or can't run.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126
_SIGNALLED = 128

_FORWARDED = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM}
)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SI_KERNEL = 0x80  # siginfo.h: sent by the kernel, as for a key on the terminal


def parse_limits(words: list[str]) -> Limits:
    """Read NAME=VALUE words."""
    known = {f.name for f in dataclasses.fields(Limits)}
    values: dict[str, int] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{word}: a limit is NAME=VALUE, where NAME is one of {', '.join(sorted(known))}")
        try:
            values[name] = int(value, 0)
        except ValueError:
            raise ValueError(f"{word}: {value!r} is not a number") from None
    return Limits(**values)  # type: ignore[arg-type]  # atomics is a bool, for which 0 and 1 are as good


def parse_gids(words: list[str]) -> tuple[Gid, ...]:
    """Read ADDRESS, ADDRESS,TYPE or ADDRESS,TYPE,NETDEV words."""
    gids = []
    for word in words:
        parts = word.split(",")
        if len(parts) > 3:
            raise ValueError(f"{word}: a GID is ADDRESS, ADDRESS,TYPE or ADDRESS,TYPE,NETDEV")
        gids.append(Gid(*parts))  # type: ignore[arg-type]  # what the type is, it checks itself
    return tuple(gids)


def environment(folder: PrivateFolder, config: EmulatorConfig) -> dict[str, str]:
    """Write what the library reads into the folder, and return a program's environment that leads there."""
    text = config.text()
    # The library says what is wrong with it better here than in the program, which may have no place to show it.
    native().configure(text)
    write_tree(folder.path, config)
    path = folder.path / "config"
    path.write_text(text, encoding="ascii")
    env = dict(os.environ)
    env["AIORDMA_EMULATOR_CONFIG"] = os.fspath(path)
    env["SYSFS_PATH"] = os.fspath(folder.path)
    env["LD_PRELOAD"] = ":".join(filter(None, [env.get("LD_PRELOAD"), os.fspath(library_path())]))
    return env


def run(config: EmulatorConfig, command: list[str]) -> int:
    """Run a program to its end and return its exit status; 128 and the signal's number if one ended it."""
    folder = PrivateFolder()
    try:
        env = environment(folder, config)
        return _run(command, env)
    except (EmulatorError, FileNotFoundError) as e:
        print(f"aiordma emulate: {e}", file=sys.stderr)
        return 2
    finally:
        folder.remove()


def _run(command: list[str], env: dict[str, str]) -> int:
    c_library = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        # Should this process be killed, nobody would be left to end the program.
        c_library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before that
            os._exit(_SIGNALLED + signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Signals are blocked and taken one by one, so that none is lost between the start of the program and its end.
    waited = _FORWARDED | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        try:
            # This process has one thread, so that a preexec_fn is safe: the program must not start with our mask.
            child = subprocess.Popen(command, env=env, preexec_fn=prepare)
        except FileNotFoundError:
            print(f"aiordma emulate: {command[0]}: command not found", file=sys.stderr)
            return _NOT_FOUND
        except OSError as e:
            print(f"aiordma emulate: {command[0]}: {e.strerror}", file=sys.stderr)
            return _NOT_RUNNABLE
        while child.poll() is None:
            info = signal.sigwaitinfo(waited)
            # A key on the terminal signals the whole process group: the program has had it already.
            if info.si_signo != signal.SIGCHLD and info.si_code != _SI_KERNEL:
                child.send_signal(info.si_signo)
        status = child.returncode
        return status if status >= 0 else _SIGNALLED - status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

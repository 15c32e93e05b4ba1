"""The kernel that the VM boots: the distribution's of the day, downloaded but not installed.

Debian's linux-image-ARCH and Ubuntu's linux-image-generic depend on the package of the present version. That one is
downloaded with `apt-get download`, unpacked below build/, and kept there until there is a newer one.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The cloud flavours are smaller, but Debian's has no rdma_rxe.
_META_PACKAGES = {"debian": "linux-image-{arch}", "ubuntu": "linux-image-generic"}
_DONE = ".complete"


class Unavailable(Exception):
    """No VM can be started here, for a reason that isn't the project's fault; its text says what is missing."""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: ``root`` has boot/ and lib/modules/, ``release`` is what `uname -r` will say."""

    root: Path
    release: str

    @property
    def image(self) -> Path:
        return self.root / "boot" / f"vmlinuz-{self.release}"


def _say(text: str) -> None:
    print(f"rxe-vm: {text}", file=sys.stderr, flush=True)


def _run(*command: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    # In English, since the answers are read.
    return subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=300, env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("ID", "")
    except OSError:
        return ""


def _depends(package: str) -> list[str]:
    answer = _run("apt-cache", "depends", "--important", package)
    return re.findall(r"^\s+Depends: ([^<\s]+)$", answer.stdout, re.MULTILINE) if answer.returncode == 0 else []


def _version(package: str) -> str:
    found = re.search(r"^\s+Candidate: (\S+)$", _run("apt-cache", "policy", package).stdout, re.MULTILINE)
    return found[1] if found and found[1] != "(none)" else ""


def _packages() -> list[str]:
    """The packages to unpack: the kernel, and on Ubuntu its modules, which are packages of their own there."""
    meta = _META_PACKAGES.get(_distribution())
    if meta is None or shutil.which("apt-get") is None:
        raise Unavailable(f"this is no Debian or Ubuntu: no kernel package is known for {_distribution() or 'it'}")
    arch = _run("dpkg", "--print-architecture").stdout.strip()
    images = [p for p in _depends(meta.format(arch=arch)) if re.match(r"linux-image-(unsigned-)?\d", p)]
    if not images:
        return []
    if _distribution() == "ubuntu":
        release = re.sub(r"^linux-image-(unsigned-)?", "", images[0])
        return [images[0], f"linux-modules-{release}", f"linux-modules-extra-{release}"]
    return images[:1]


def _update_lists() -> None:
    """Fresh package lists, where that's allowed: old ones name files that the mirrors no longer have."""
    if os.geteuid() == 0:
        _say("apt-get update")
        _run("apt-get", "update", "-q")


def _unpack(package: str, into: Path, work: Path) -> bool:
    """Downloads a package and unpacks it."""
    answer = _run("apt-get", "download", "-q", package, cwd=work)
    if answer.returncode != 0:
        _say(f"apt-get download {package}: {answer.stderr.strip()}")
        return False
    for archive in work.glob("*.deb"):
        # Documentation and the like stay packed. Debian's modules are in /lib or, since trixie, in /usr/lib.
        unpacked = subprocess.run(["dpkg-deb", "-x", archive, into], stdin=subprocess.DEVNULL, check=False)
        archive.unlink()
        if unpacked.returncode != 0:
            return False
    return True


def _found(root: Path) -> Kernel | None:
    images = sorted((root / "boot").glob("vmlinuz-*"))
    return Kernel(root, images[0].name.removeprefix("vmlinuz-")) if images and (root / _DONE).exists() else None


def _cached(cache: Path) -> Kernel | None:
    """The newest kernel of an earlier run."""
    folders = sorted((p for p in cache.glob("linux-*") if (p / _DONE).exists()), key=lambda p: p.stat().st_mtime)
    return next((found for p in reversed(folders) if (found := _found(p))), None)


def _download(packages: list[str], into: Path, cache: Path) -> Kernel | None:
    _say(f"downloading {' '.join(packages)}, which is unpacked below build/, not installed")
    partial = cache / f"partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "work").mkdir(parents=True)
    try:
        if not all(_unpack(p, partial / "root", partial / "work") for p in packages):
            return None
        root = partial / "root"
        if not (root / "lib").exists():
            (root / "lib").symlink_to("usr/lib")
        shutil.rmtree(root / "usr" / "share", ignore_errors=True)
        release = next((root / "boot").glob("vmlinuz-*")).name.removeprefix("vmlinuz-")
        # The packages leave this to their installation.
        subprocess.run(["depmod", "-b", root, release], stdin=subprocess.DEVNULL, check=True)
        (root / _DONE).touch()
        shutil.rmtree(into, ignore_errors=True)
        root.rename(into)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in cache.glob("linux-*"):
        if old != into:
            shutil.rmtree(old, ignore_errors=True)
    return _found(into)


def kernel_of_the_day(cache: Path) -> Kernel:
    """The distribution's present kernel, from ``cache`` or downloaded into it.

    Raises :class:`Unavailable` where there is none to be had.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for attempt in range(2):
        packages = _packages()
        if packages:
            folder = cache / f"linux-{packages[0]}_{_version(packages[0]).replace(':', '.')}"
            kernel = _found(folder) or _download(packages, folder, cache)
            if kernel is not None:
                return kernel
        if attempt == 0:
            _update_lists()
    kernel = _cached(cache)
    if kernel is None:
        raise Unavailable("the distribution's kernel package can't be downloaded (is there a network, and apt lists?)")
    _say(f"no newer kernel to be had: taking {kernel.release} from an earlier run")
    return kernel

"""The kernel that the VM boots: the distribution's of the day, downloaded but not installed, or packages that are given.

Debian's linux-image-ARCH and Ubuntu's linux-image-generic depend on the package of the present version. That one is
downloaded with `apt-get download`, unpacked below build/, and kept there until there is a newer one.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The cloud flavours are smaller, but Debian's has no rdma_rxe.
_META_PACKAGES = {"debian": "linux-image-{arch}", "ubuntu": "linux-image-generic"}
_DONE = ".complete"


class Unavailable(Exception):
    """No VM can be started here, for a reason that isn't the project's fault; its text says what is missing."""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: ``root`` has lib/modules/, ``image`` is to boot, ``release`` is what `uname -r` will say."""

    root: Path
    image: Path
    release: str


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
    """The packages to unpack: the kernel's, and those that have parts of it, which differs by distribution and version."""
    meta = _META_PACKAGES.get(_distribution())
    if meta is None or shutil.which("apt-get") is None:
        raise Unavailable(f"this is no Debian or Ubuntu: no kernel package is known for {_distribution() or 'it'}")
    meta = meta.format(arch=_run("dpkg", "--print-architecture").stdout.strip())
    image = next((p for p in _depends(meta) if re.match(r"linux-image-(unsigned-)?\d", p)), None)
    if image is None:
        return []
    release = re.sub(r"^linux-image-(unsigned-)?", "", image)
    # Ubuntu's modules are packages of their own, and in Debian everything is, since 7.2.
    parts = [f"linux-{part}-{release}" for part in ("base", "binary", "modules", "modules-extra")]
    wanted = {*_depends(meta), *_depends(image)}
    return [image, *(part for part in parts if part in wanted)]


def _update_lists() -> None:
    """Fresh package lists, where that's allowed: old ones name files that the mirrors no longer have."""
    if os.geteuid() == 0:
        _say("apt-get update")
        _run("apt-get", "update", "-q")


def _fetch(package: str, into: Path) -> bool:
    """Downloads a package."""
    answer = _run("apt-get", "download", "-q", package, cwd=into)
    if answer.returncode != 0:
        _say(f"apt-get download {package}: {answer.stderr.strip()}")
    return answer.returncode == 0


def _image(root: Path) -> tuple[Path, str] | None:
    """The image below an unpacked kernel's root, and its release."""
    for image in sorted((root / "boot").glob("vmlinuz-*")):
        return image, image.name.removeprefix("vmlinuz-")
    for image in sorted((root / "lib" / "modules").glob("*/vmlinuz")):
        return image, image.parent.name
    return None


def _found(root: Path) -> Kernel | None:
    image = _image(root) if (root / _DONE).exists() else None
    return Kernel(root, *image) if image is not None else None


def _cached(cache: Path) -> Kernel | None:
    """The newest kernel of an earlier run."""
    folders = sorted((p for p in cache.glob("linux-*") if (p / _DONE).exists()), key=lambda p: p.stat().st_mtime)
    return next((found for p in reversed(folders) if (found := _found(p))), None)


def _unpack(archives: Collection[Path], root: Path) -> None:
    """Unpacks packages, and makes what their installation would."""
    for archive in archives:
        subprocess.run(["dpkg-deb", "-x", archive, root], stdin=subprocess.DEVNULL, check=True)
    # Debian's modules are in /lib or, since trixie, in /usr/lib.
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
    shutil.rmtree(root / "usr" / "share", ignore_errors=True)
    image = _image(root)
    if image is None:
        raise Unavailable(f"there is no kernel in {', '.join(a.name for a in archives)}")
    subprocess.run(["depmod", "-b", root, image[1]], stdin=subprocess.DEVNULL, check=True)
    (root / _DONE).touch()


@contextlib.contextmanager
def _partial(cache: Path) -> Iterator[Path]:
    """A folder to work in, from which what is done is moved to its place."""
    folder = cache / f"partial-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "work").mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(packages: list[str], into: Path, cache: Path) -> Kernel | None:
    _say(f"downloading {' '.join(packages)}, which is unpacked below build/, not installed")
    with _partial(cache) as folder:
        if not all(_fetch(p, folder / "work") for p in packages):
            return None
        _unpack(sorted((folder / "work").glob("*.deb")), folder / "root")
        shutil.rmtree(into, ignore_errors=True)
        (folder / "root").rename(into)
    for old in cache.glob("linux-*"):
        if old != into:
            shutil.rmtree(old, ignore_errors=True)
    return _found(into)


def kernel_of_packages(archives: Sequence[Path], cache: Path) -> Kernel:
    """The kernel in these Debian packages, unpacked into ``cache``. Raises :class:`Unavailable`."""
    stamps = [f"{archive.resolve()} {archive.stat().st_mtime_ns}" for archive in archives]
    into = cache / f"given-{hashlib.sha256(' '.join(stamps).encode()).hexdigest()[:16]}"
    if _found(into) is None:
        cache.mkdir(parents=True, exist_ok=True)
        with _partial(cache) as folder:
            _unpack(archives, folder / "root")
            shutil.rmtree(into, ignore_errors=True)
            (folder / "root").rename(into)
    kernel = _found(into)
    assert kernel is not None
    return kernel


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

"""The VM's initramfs: busybox, the kernel modules that are needed, and two scripts.

It's two archives one after the other, which the kernel unpacks into one tree: the first depends on the kernel only and is
kept; the second has what this run is to do.
"""

import gzip
import lzma
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from rxe.vm.kernel import Kernel, Unavailable

HERE = Path(__file__).parent

# What must be there, in the order of loading. Of a name with alternatives one is enough; what is built into the kernel
# counts as there. rxe's checksum is looked up by name when a device is made: it needs crc32 before.
_MODULES = (
    ("virtio_pci",),
    ("virtio_console",),
    ("9pnet_virtio",),
    ("9p",),
    ("overlay",),
    ("veth",),
)
# Loaded by the guest when it's asked for RDMA, or tried.
_LATER = ("crc32_generic", "crc32_pclmul", "crc32_cryptoapi", "ib_uverbs", "rdma_ucm", "rdma_rxe", "siw", "sch_netem")


def _depends(kernel: Kernel, module: str) -> list[Path] | None:
    """The files to load for a module, in order, as the modules' index has them; None if the kernel hasn't got it."""
    answer = subprocess.run(
        ["modprobe", "-d", kernel.root, "-S", kernel.release, "--show-depends", module],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if answer.returncode != 0:
        return None
    return [Path(line.split()[1]) for line in answer.stdout.splitlines() if line.startswith("insmod ")]


def has(kernel: Kernel, module: str) -> bool:
    """Whether the kernel has a module, or has it built in."""
    return _depends(kernel, module) is not None


def _plain(file: Path) -> tuple[str, bytes]:
    """A module's name and its content, not compressed: busybox's insmod doesn't know all formats."""
    data = file.read_bytes()
    match file.suffix:
        case ".xz":
            return file.stem, lzma.decompress(data)
        case ".gz":
            return file.stem, gzip.decompress(data)
        case ".zst":
            unpacked = subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True)
            return file.stem, unpacked.stdout
    return file.name, data


Entry = tuple[str, int, bytes]
_FOLDER, _FILE = 0o040755, 0o100755


def archive(entries: Iterable[Entry]) -> bytes:
    """A cpio archive in the kernel's format (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    parts: list[bytes] = []

    def add(number: int, name: str, mode: int, data: bytes) -> None:
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        for part in (header, data):
            parts.append(part + b"\0" * (-len(part) % 4))

    number = 0
    for number, (name, mode, data) in enumerate(entries, 1):
        add(number, name, mode, data)
    add(number + 1, "TRAILER!!!", 0, b"")
    return b"".join(parts)


def _base(kernel: Kernel) -> bytes:
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Unavailable("there is no busybox (package busybox-static)")
    first: list[Path] = []
    for names in _MODULES:
        found = next((files for name in names if (files := _depends(kernel, name)) is not None), None)
        if found is None:
            raise Unavailable(f"kernel {kernel.release} has no module {' or '.join(names)}")
        first += found
    order = {"boot": list(dict.fromkeys(first))}
    for module in _LATER:
        found = _depends(kernel, module)
        if found is not None:
            order[module] = found
    files = {file for files in order.values() for file in files}
    plain = {file: _plain(file) for file in sorted(files)}
    entries: list[Entry] = [
        (name, _FOLDER, b"") for name in ("bin", "dev", "proc", "sys", "mods", "order", "lower", "upper", "root")
    ]
    entries.append(("bin/busybox", _FILE, Path(busybox).read_bytes()))
    entries.append(("init", _FILE, (HERE / "init.sh").read_bytes()))
    entries += [(f"mods/{name}", _FILE, data) for name, data in plain.values()]
    entries += [
        (f"order/{name}", _FILE, "".join(f"{plain[f][0]}\n" for f in files).encode()) for name, files in order.items()
    ]
    return gzip.compress(archive(entries), 1)


def build(kernel: Kernel, job: str, into: Path) -> Path:
    """Writes the initramfs for one run; ``job`` is the shell script that the guest reads its orders from."""
    base = kernel.root / "initramfs-base.gz"
    newest = max(p.stat().st_mtime for p in (HERE / "init.sh", Path(__file__), kernel.image))
    if not base.exists() or base.stat().st_mtime < newest:
        base.write_bytes(_base(kernel))
    padding = b"\0" * (-base.stat().st_size % 4)
    into.write_bytes(base.read_bytes() + padding + archive([("job", _FILE, job.encode())]))
    return into

"""Why a compiled part couldn't be loaded: which file needs what of which library, and what to do about it.

libibverbs has a symbol version for its own family, IBVERBS_PRIVATE_NN, which changes with each release that changes its
inner structures (rdma-core's libibverbs/libibverbs.map.in). The providers and pyverbs are bound to it: they load only with
the libibverbs that they were built with, or one of the same NN.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from aiordma.errors import ProviderError

__all__ = [
    "copies",
    "describe",
    "explain",
    "is_about_rdma_core",
    "is_of_sources",
    "private_versions",
    "rdma_core_version",
    "refusal",
]

OF_SOURCES = (
    "this is aiordma's source tree, which has no compiled parts. Python looks first in the folder of the program, or in the "
    "current one: run `make build` and keep your program in another folder, or `make develop`"
)
INSTALL = "apt install libibverbs1 ibverbs-providers python3-pyverbs (or your distribution's names for them)"

# ld.so(8) looks in LD_LIBRARY_PATH, then in its cache, which holds these and what ld.so.conf adds.
_FOLDERS = ("/usr/local/lib", "/lib/*-linux-gnu", "/usr/lib/*-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_PRIVATE = re.compile(rb"\0IBVERBS_PRIVATE_(\d+)(?=\0)")
# glibc's elf/dl-version.c and elf/dl-lookup.c
_NO_VERSION = re.compile(r"(?P<library>\S+): version [`'](?P<version>[^']+)' not found \(required by (?P<user>[^)]+)\)")
_NO_SYMBOL = re.compile(r"(?P<user>\S+): undefined symbol: (?P<symbol>\w+)(?:, version (?P<version>[\w.]+))?")
_NO_FILE = re.compile(r"(?P<library>lib(?:ibverbs|mlx5|rdmacm)\.so\.\d+): cannot open shared object file")


def private_versions(path: str | os.PathLike[str]) -> list[int]:
    """The NN of each IBVERBS_PRIVATE_NN in a file: the one that a libibverbs has, or that a user of it needs.

    Empty where there is none or the file can't be read.
    """
    try:
        data = Path(path).read_bytes()
    except OSError:
        return []
    # Names of versions stand in the file's string table whoever uses them; a libibverbs needs none of another one.
    return sorted({int(number) for number in _PRIVATE.findall(data)})


def rdma_core_version(path: str | os.PathLike[str]) -> str | None:
    """rdma-core's version, as the name of a library's file tells it: libibverbs.so.1.14.44.0 is of 44.0."""
    found = re.search(r"\.so\.\d+\.\d+\.(\d+\.\d+)$", os.path.realpath(path))
    return found[1] if found else None


def describe(path: str | os.PathLike[str]) -> str:
    """A library's path, with what can be told of its version."""
    facts = []
    real = os.path.realpath(path)
    if os.path.basename(real) != os.path.basename(path):
        facts.append(os.path.basename(real))
    version = rdma_core_version(path)
    if version is not None:
        facts.append(f"rdma-core {version}")
    if os.path.basename(path).startswith("libibverbs."):
        private = private_versions(path)
        facts.append(", ".join(f"IBVERBS_PRIVATE_{n}" for n in private) if private else "no IBVERBS_PRIVATE version")
    return f"{os.fspath(path)} ({'; '.join(facts)})" if facts else os.fspath(path)


def copies(library: str) -> list[Path]:
    """The files of that name where the loader looks, the one that it takes first; the same file once."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":") if folder]
    for pattern in _FOLDERS:
        folders.extend(sorted(Path("/").glob(pattern[1:])))
    found: dict[str, Path] = {}
    for folder in folders:
        path = folder / library
        if path.is_file():
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def is_about_rdma_core(error: BaseException) -> bool:
    """Whether the loader's message is about libibverbs or libmlx5."""
    return (
        re.search(r"lib(ibverbs|mlx5)\.so|IBVERBS_|MLX5_|undefined symbol: (ibv_|mlx5dv_|verbs_)", str(error))
        is not None
    )


def is_of_sources(error: ImportError) -> bool:
    """Whether a compiled part is missing because the package is imported from its source tree."""
    package = Path(__file__).parent
    return (
        isinstance(error, ModuleNotFoundError)
        and (error.name or "").startswith(f"{__package__}.")
        and package.with_name("meson.build").is_file()
    )


def explain(error: BaseException) -> str:
    """The loader's message as a sentence that names both files and versions, and the cure."""
    text = str(error)
    if found := _NO_FILE.search(text):
        return f"{found['library']} isn't there, or isn't where the loader looks: {INSTALL}"
    if found := _NO_VERSION.search(text):
        return _mismatch(found["user"], found["version"], found["library"])
    if found := _NO_SYMBOL.search(text):
        library = "libmlx5.so.1" if found["symbol"].startswith("mlx5dv_") else "libibverbs.so.1"
        there = copies(library)
        wanted = f"{found['symbol']} ({found['version']})" if found["version"] else found["symbol"]
        return _mismatch(found["user"], wanted, os.fspath(there[0]) if there else library)
    return f"a library can't be loaded: {text}"


def _mismatch(user: str, wanted: str, library: str) -> str:
    own = rdma_core_version(user)
    name = os.path.basename(library)
    lines = [
        f"{user}{f' (rdma-core {own})' if own else ''} needs {wanted} of {name}, and the loader found {describe(library)}, "
        "which hasn't got it: the two are of different versions of rdma-core."
    ]
    others = [path for path in copies(name) if os.path.realpath(path) != os.path.realpath(library)]
    if others:
        lines.append(f"Also there: {', '.join(describe(path) for path in others)}.")
    folder = os.path.dirname(library)
    in_path = [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p and _same(p, folder)]
    if in_path:
        lines.append(f"LD_LIBRARY_PATH has {in_path[0]}: take it out.")
    elif library in os.environ.get("LD_PRELOAD", ""):
        lines.append("LD_PRELOAD names it: take it out.")
    else:
        lines.append(
            "Install libibverbs, its providers and pyverbs from one source, as a rule all from the distribution, and see "
            "that no other libibverbs comes first on LD_LIBRARY_PATH or in /etc/ld.so.conf.d."
        )
    return " ".join(lines)


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def refusal(error: ImportError, names: Collection[str]) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__`` for a package whose compiled parts can't be loaded: using one of ``names`` says why."""
    text = explain(error)
    cause = error.with_traceback(None)

    def refuse(name: str) -> NoReturn:
        if name in names:
            raise ProviderError(text) from cause
        raise AttributeError(f"module 'aiordma' has no attribute {name!r}")

    return refuse

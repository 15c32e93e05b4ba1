"""pyverbs, imported when it's first needed, with its side effects undone and its absence explained."""

from __future__ import annotations

import ctypes
import errno
import importlib
import logging
import re
import resource
import threading
from pathlib import Path
from typing import Any

from aiordma import _linking
from aiordma.errors import ProviderError, VerbsError

__all__ = ["keep", "memlock_hint", "module", "translate", "version"]

_lock = threading.Lock()
_loaded = False
# Objects that must never be let go of.
_kept: list[object] = []
# Not even when the interpreter ends and clears this module.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def module(name: str) -> Any:
    """The module ``pyverbs.<name>``; :class:`ProviderError` says why there is none and what to do."""
    global _loaded
    with _lock:
        if not _loaded:
            _first_import()
            _loaded = True
    return importlib.import_module(f"pyverbs.{name}")


def keep(*objects: object) -> None:
    """Never lets go of them: of verbs objects that couldn't be destroyed, and of a parent's in a child of fork().

    pyverbs destroys what it lets go of. Garbage collection may let a context go first, and what is left on it would then be
    destroyed on memory that libibverbs has freed.
    """
    _kept.extend(objects)


def _first_import() -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        importlib.import_module("pyverbs.device")
    except ImportError as e:
        raise ProviderError(_explain(e)) from e
    finally:
        # pyverbs.base calls logging.basicConfig(level=INFO) when it's imported: a library must leave that to the
        # application.
        for handler in list(root.handlers):
            if handler not in handlers:
                root.removeHandler(handler)
        root.setLevel(level)


def _explain(e: ImportError) -> str:
    text = str(e)
    if isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] == "pyverbs":
        return (
            "pyverbs isn't there for this Python. It comes from the distribution (apt install python3-pyverbs), for the "
            "distribution's own Python; a virtual environment needs --system-site-packages to see it"
        )
    if _linking.is_about_rdma_core(e):
        return f"pyverbs can't be loaded: {_linking.explain(e)}"
    return f"pyverbs can't be loaded: {text}"


def version() -> str:
    """rdma-core's version as far as it can be told, for error messages: that of the libibverbs in use."""
    try:
        ctypes.CDLL("libibverbs.so.1")
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "of unknown version"
    # The file is libibverbs.so.1.MINOR.RELEASE.0.
    found = re.search(r"/libibverbs\.so\.1\.\d+\.(\d+\.\d+)$", maps, re.MULTILINE)
    return found[1] if found else "of unknown version"


def memlock_hint(detail: str) -> str:
    """``detail`` with what is behind an ENOMEM more often than memory, and what to do: queues are locked memory too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return detail
    return (
        f"{detail}; the limit of locked memory (ulimit -l, RLIMIT_MEMLOCK) is {soft} bytes: raise it in "
        "/etc/security/limits.conf (memlock unlimited), or in the service unit (LimitMEMLOCK=infinity), or for a "
        "container (--ulimit memlock=-1)"
    )


def translate(e: BaseException, verb: str, detail: str = "") -> BaseException:
    """pyverbs' exception as a :class:`VerbsError` with the verb's name, if it carries an errno."""
    code = getattr(e, "error_code", None)
    if isinstance(code, int):
        if code == errno.ENOMEM:
            detail = memlock_hint(detail or "no memory")
        if code > 0:
            return VerbsError(verb, code, detail)
        # Raised without a code: the message is all there is.
        return VerbsError(verb, errno.EIO, detail or str(e))
    return e

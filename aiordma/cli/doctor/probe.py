"""The part of `aiordma doctor` that loads libraries and opens devices, in a process of its own.

A library may end its process, and a device may never answer: neither may happen to the doctor. Each step prints one line of
JSON with its name in "step"; the last line before an early end says how far it came.

    python -m aiordma.cli.doctor.probe libraries
    python -m aiordma.cli.doctor.probe device mlx5_0 1 2

The numbers are ports that are to write to themselves.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib
import json
import os
import sys
from typing import Any

from aiordma import _linking

__all__: list[str] = []

LIBRARIES = ("libibverbs.so.1", "libmlx5.so.1", "librdmacm.so.1")
_LOOPBACK_SECONDS = 10


def _say(step: str, **facts: object) -> None:
    print(json.dumps({"step": step, **facts}), flush=True)


def _loaded_from(name: str) -> str | None:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if path[1] and os.path.basename("/" + path[2]).startswith(name):
                return "/" + path[2]
    return None


def _libraries() -> None:
    _say("started")
    for name in LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as e:
            _say(
                "library",
                name=name,
                path=None,
                error=_linking.explain(e),
                found=[str(p) for p in _linking.copies(name)],
            )
        else:
            path = _loaded_from(name)
            _say(
                "library",
                name=name,
                path=path,
                version=None if path is None else _linking.rdma_core_version(path),
                private=[] if path is None else _linking.private_versions(path),
            )
    for name in ("pyverbs", "pyverbs.device", "pyverbs.providers.mlx5.mlx5dv", "pyverbs.cmid"):
        try:
            module = importlib.import_module(name)
        except ImportError as e:
            missing = isinstance(e, ModuleNotFoundError)
            _say("module", name=name, path=None, missing=missing, error=str(e), explained=_linking.explain(e))
        else:
            path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
            _say("module", name=name, path=path, private=[] if path is None else _linking.private_versions(path))
    try:
        import aiordma

        aiordma.open_device  # noqa: B018
    except ImportError as e:
        _say("aiordma", error=str(e))
    else:
        _say("aiordma", error=None)
    _list()


def _list() -> None:
    try:
        verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        get, free = verbs.ibv_get_device_list, verbs.ibv_free_device_list
        name_of = verbs.ibv_get_device_name
    except (OSError, AttributeError) as e:
        _say("devices", names=None, error=str(e))
        return
    get.restype, free.restype, name_of.restype = ctypes.POINTER(ctypes.c_void_p), None, ctypes.c_char_p
    free.argtypes, name_of.argtypes = [ctypes.POINTER(ctypes.c_void_p)], [ctypes.c_void_p]
    count = ctypes.c_int()
    _say("listing")
    found: Any = get(ctypes.byref(count))
    if found:
        _say("devices", names=[name_of(found[i]).decode() for i in range(count.value)], error=None)
        free(found)
    else:
        # ENOSYS: the kernel has no RDMA (ibv_get_device_list(3)).
        code = ctypes.get_errno()
        absent = code in (errno.ENOSYS, errno.ENOENT)
        _say("devices", names=[] if absent else None, error=None if absent else os.strerror(code))
    try:
        _say("fork", status=int(verbs.ibv_is_fork_initialized()))
    except AttributeError:  # before rdma-core 35
        _say("fork", status=None)


def _failure(e: BaseException) -> dict[str, Any]:
    cause = e.__cause__
    code = getattr(e, "errno", None) or getattr(e, "error_code", None) or getattr(cause, "errno", None)
    return {"error": str(e), "errno": code if isinstance(code, int) else None, "kind": type(e).__name__}


def _device(name: str, ports: list[int]) -> None:
    from aiordma import mlx5  # noqa: F401  # whatever takes time to import is imported before the clock starts
    from aiordma._opening import open_context

    importlib.import_module("pyverbs.providers.mlx5.mlx5dv")
    _say("started")
    _say("opening")
    try:
        context = open_context(name)
    except Exception as e:
        _say("opened", **_failure(e))
        return
    _say("opened", error=None)
    try:
        attributes = context.query_device()
        _say(
            "attributes",
            firmware=str(attributes.fw_version).strip("\0"),
            ports=int(attributes.phys_port_cnt),
            max_qp=int(attributes.max_qp),
            max_mr_size=int(attributes.max_mr_size),
            atomics=bool(attributes.atomic_caps),
        )
        for port in range(1, attributes.phys_port_cnt + 1):
            found = context.query_port(port)
            _say("port", port=port, state=int(found.state), active_mtu=128 << int(found.active_mtu))
    except Exception as e:
        _say("queried", **_failure(e))
    finally:
        context.close()
    asyncio.run(_features(name))
    for port in ports:
        asyncio.run(_write_to_itself(name, port))


async def _features(name: str) -> None:
    """What mlx5dv_query_device(3) and the device's capabilities say; only of an mlx5 device."""
    from aiordma import _control

    if not _control.mlx5_supported(name.encode()):
        _say("mlx5", supported=False)
        return
    import aiordma
    from aiordma.mlx5 import devx

    try:
        async with aiordma.open_device(name) as device:
            facts = device.mlx5
            if facts is None:
                _say("mlx5", supported=True, devx=False, umr=None, memcpy_length=None, dci_streams=None, dc=None)
                return
            capabilities = await devx.query_hca_cap(device)
            streams = getattr(facts, "dci_streams_caps", None)
            _say(
                "mlx5",
                supported=True,
                devx=True,
                umr=not capabilities.umr_indirect_mkey_disabled,
                memcpy_length=int(getattr(facts, "max_wr_memcpy_length", 0)),
                dci_streams=1 << streams["max_log_num_concurent"]
                if streams and streams["max_log_num_concurent"]
                else 0,
                dc=bool(capabilities.dct),
            )
    except Exception as e:
        _say("mlx5", supported=True, **_failure(e))


async def _write_to_itself(name: str, port: int) -> None:
    import aiordma

    sink = bytearray(64)
    _say("loopback", port=port)
    try:
        async with (
            asyncio.timeout(_LOOPBACK_SECONDS),
            aiordma.open_device(name, port=port) as device,
            device.reg_mr(sink) as memory,
            device.create_qp() as here,
            device.create_qp() as there,
        ):
            await here.connect(there.info)
            await there.connect(here.info)
            await here.rdma_write(b"aiordma!" * 8, memory.remote())
            right = sink == b"aiordma!" * 8
            _say("written", port=port, error=None if right else "the data that arrived isn't what was written")
    except TimeoutError:
        _say(
            "written",
            port=port,
            error=f"it took longer than {_LOOPBACK_SECONDS} s",
            errno=errno.ETIMEDOUT,
            kind="TimeoutError",
        )
    except Exception as e:
        _say("written", port=port, **_failure(e))


def main(arguments: list[str]) -> None:
    """Does what the arguments say."""
    match arguments:
        case ["libraries"]:
            _libraries()
        case ["device", name, *ports]:
            _device(name, [int(port) for port in ports])
        case _:
            sys.exit("usage: probe libraries | device NAME [PORT...]")


if __name__ == "__main__":
    main(sys.argv[1:])

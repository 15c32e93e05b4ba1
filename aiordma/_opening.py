"""Finding the verbs devices that there are, and opening one: a context, a protection domain, and what they tell."""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiordma import _control, _pyverbs
from aiordma.completion import depth_of_cqs
from aiordma.errors import DeviceNotFoundError, UsageError
from aiordma.gid import Gid, GidType, choose

__all__ = ["DEVICE_VARIABLE", "EMULATED", "DeviceInfo", "find_devices", "list_devices", "open_context", "open_verbs"]

EMULATED = "emulated"
DEVICE_VARIABLE = "AIORDMA_DEVICE"

_log = logging.getLogger("aiordma")
_attaching = threading.Lock()
_PORT_ACTIVE = 4  # enum ibv_port_state
_MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
_LINK_ETHERNET = 2


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One RDMA device: its verbs ``name``, its node GUID in hexadecimal, and whether it's an emulated one."""

    name: str
    guid: str
    is_emulated: bool


def _kernel_devices() -> list[str]:
    """Names of the kernel's verbs devices. libibverbs isn't asked: it would remember the answer."""
    names = []
    for entry in sorted(Path("/sys/class/infiniband_verbs").glob("uverbs*")):
        try:
            names.append((entry / "ibdev").read_text().strip())
        except OSError:  # unplugged between the two system calls
            continue
    return names


def _emulator() -> Any:
    from aiordma import emulator

    return emulator


def _preloaded() -> bool:
    return "aiordma_emulator" in os.environ.get("LD_PRELOAD", "")


def _is_emulated() -> bool:
    return _preloaded() or bool(_emulator().is_attached())


def list_devices() -> list[DeviceInfo]:
    """The devices that :func:`open_device` can open by name.

    Those of the kernel; once the emulated NIC is attached (or the program runs under ``aiordma emulate``), the emulated
    ones instead. Empty where there are none: the emulated NIC isn't attached by asking. Takes a millisecond or so.
    """
    if not _is_emulated() and not _kernel_devices():
        return []
    emulated = _is_emulated()
    found = _pyverbs.module("device").get_device_list()
    return [
        DeviceInfo(
            device.name.decode(),
            f"{int(device.guid):016x}" if not isinstance(device.guid, str) else device.guid,
            emulated,
        )
        for device in found or []
    ]


def _choose_device(name: str | None) -> str:
    """The name of the device to open, the emulated NIC attached where that's what it is. In a worker thread."""
    wanted = name if name is not None else os.environ.get(DEVICE_VARIABLE) or None
    if wanted is not None and wanted.partition(":")[0] == EMULATED:
        if not _is_emulated():
            _emulator().attach()
        wanted = wanted.partition(":")[2] or None
    elif wanted is None and not _is_emulated() and not _kernel_devices():
        with _attaching:  # devices that are opened at the same time say it once
            if not _is_emulated():
                _log.warning(
                    "no RDMA device on this machine: running on aiordma's emulated NIC (name a device, or set %s, to choose)",
                    DEVICE_VARIABLE,
                )
                _emulator().attach()
    names = [info.name for info in list_devices()]
    if wanted is None:
        if not names:
            raise DeviceNotFoundError(
                "no RDMA device: libibverbs lists none (is the provider installed and permitted?)"
            )
        return names[0]
    if wanted not in names:
        there = ", ".join(names) if names else "none"
        hint = "" if _is_emulated() else f' For the emulated NIC ask for "{EMULATED}".'
        raise DeviceNotFoundError(f"no RDMA device {wanted!r}; there are: {there}.{hint}")
    return wanted


def find_devices() -> str:
    """In a worker thread: the name of the device that :func:`open_device` opens by itself, the emulated NIC attached where
    it's that. After it other libraries find devices too.
    """
    return _choose_device(None)


def open_verbs(name: str | None, port: int, gid_index: int | None, cq_depth: int | None) -> tuple[str, dict[str, Any]]:
    """In a worker thread: the name of the device, and what :class:`aiordma.Device` is made of."""
    chosen = _choose_device(name)
    context = open_context(chosen)
    try:
        facts = _facts(context, chosen, port, gid_index, cq_depth)
    except BaseException:
        try:
            context.close()
        except Exception:
            _pyverbs.keep(context)
        raise
    return chosen, facts


def open_context(name: str) -> Any:
    """The pyverbs Context; an Mlx5Context with DEVX where the device has it and the kernel allows it."""
    if _control.mlx5_supported(name.encode()):
        module = _pyverbs.module("providers.mlx5.mlx5dv")
        flags = _pyverbs.module("providers.mlx5.mlx5_enums").MLX5DV_CONTEXT_FLAGS_DEVX
        try:
            return module.Mlx5Context(module.Mlx5DVContextAttr(flags=flags), name)
        except Exception as e:
            # DEVX needs a capability of the process or of the device; everything else works without it.
            _log.debug("%s: opening without DEVX (%s)", name, e)
    try:
        return _pyverbs.module("device").Context(name=name)
    except Exception as e:
        raise _pyverbs.translate(e, "ibv_open_device", name) from e


def _mlx5_facts(context: Any) -> Any:
    """The pyverbs Mlx5DVContext (mlx5dv_query_device(3)), or None for another provider's device or without DEVX."""
    query = getattr(context, "query_mlx5_device", None)
    return None if query is None else query()


def _facts(context: Any, name: str, port: int, gid_index: int | None, cq_depth: int | None) -> dict[str, Any]:
    try:
        attributes = context.query_device()
        if not 1 <= port <= attributes.phys_port_cnt:
            raise UsageError(f"port {port}: {name} has ports 1 to {attributes.phys_port_cnt}")
        depth = depth_of_cqs(cq_depth, attributes.max_cqe, name)
        port_attributes = context.query_port(port)
    except UsageError:
        raise
    except Exception as e:
        raise _pyverbs.translate(e, "ibv_query_port", f"{name} port {port}") from e
    gids = _query_gids(context, port, port_attributes.gid_tbl_len)
    ethernet = port_attributes.link_layer == _LINK_ETHERNET
    gid = choose(gids, gid_index) if ethernet or gids or gid_index is not None else None
    if port_attributes.state != _PORT_ACTIVE:
        _log.warning(
            "%s port %d is not active (state %d): connections will time out", name, port, port_attributes.state
        )
    try:
        pd = _pyverbs.module("pd").PD(context)
    except Exception as e:
        raise _pyverbs.translate(e, "ibv_alloc_pd", name) from e
    context_address = _control.context_address(context)
    pd_address = _control.pd_address(pd, context_address)
    mlx5, iwarp = _mlx5_facts(context), _control.is_iwarp(context_address)
    # The last that can fail: what ends the context would leave a thread domain behind.
    qp_pd, qp_pd_address, thread_domain = _domain_of_qps(context, name, context_address, pd, pd_address)
    return {
        "end": _control.AtLast(_end_verbs, os.getpid(), context, context_address, pd, qp_pd, thread_domain),
        "context": context,
        "pd": pd,
        "qp_pd": qp_pd,
        "qp_pd_address": qp_pd_address,
        "thread_domain": thread_domain,
        "context_address": context_address,
        "pd_address": pd_address,
        "attributes": attributes,
        "port": port,
        "lid": port_attributes.lid,
        "gids": gids,
        "gid": gid,
        "active_mtu": _MTU_BYTES.get(port_attributes.active_mtu, 1024),
        "max_message": port_attributes.max_msg_sz,
        "max_cqe": attributes.max_cqe,
        "cq_depth": depth,
        "emulated": _is_emulated(),
        "mlx5": mlx5,
        "iwarp": iwarp,
    }


def _domain_of_qps(
    context: Any, name: str, context_address: int, pd: Any, pd_address: int
) -> tuple[Any, int, _control.ThreadDomain | None]:
    """The PD that QPs are made in, a parent domain with a thread domain (ibv_alloc_parent_domain(3)), its address, and that
    one.

    All posting is the loop's thread's, so the provider need not take a lock for each. The PD itself where it has none, and
    on other devices than mlx5's: there are providers whose ibv_modify_qp(3) to the error state, which worker threads call,
    excludes posting by these locks (hns). libmlx5's takes them for raw packet QPs only.
    """
    if not _control.is_mlx5(context_address):
        return pd, pd_address, None
    domain = parent = None
    try:
        domain = _control.alloc_td(context_address)
        module = _pyverbs.module("pd")
        attributes = module.ParentDomainInitAttr(pd)
        _control.set_td(attributes, pd_address, domain)
        parent = module.ParentDomain(context, attributes)
        return parent, _control.pd_address(parent, context_address), domain
    except Exception as e:
        _log.debug("%s: queue pairs without a thread domain (%s)", name, e)
        if parent is not None:
            parent.close()
        if domain is not None:
            _control.dealloc_td(domain)
        return pd, pd_address, None


def _end_verbs(
    pid: int, context: Any, context_address: int, pd: Any, qp_pd: Any, thread_domain: _control.ThreadDomain | None
) -> list[BaseException]:
    """In any thread: the end of what :func:`open_verbs` made. What couldn't be destroyed is kept."""
    if pid != os.getpid():  # a child of fork() would end its parent's
        _pyverbs.keep(context, pd, qp_pd)
        return []

    def dealloc_td() -> None:
        # Without its context, which somebody closed through pyverbs, there's nothing left of it.
        if thread_domain is not None and _control.holds(context, context_address):
            _control.dealloc_td(thread_domain)

    errors = []
    # pyverbs' closing of the context tries once more to destroy what is left, and leaves it open where that fails.
    for verbs_object, verb, close in (
        (qp_pd, "ibv_dealloc_pd", qp_pd.close),
        (thread_domain, "ibv_dealloc_td", dealloc_td),
        (pd, "ibv_dealloc_pd", pd.close),
        (context, "ibv_close_device", context.close),
    ):
        try:
            close()
        except Exception as e:
            _pyverbs.keep(verbs_object)
            error = _pyverbs.translate(e, verb)
            if error is not e:
                error.__cause__ = e
            errors.append(error)
    return errors


def _query_gids(context: Any, port: int, entries: int) -> list[Gid]:
    gids = []
    for index in range(entries):
        try:
            entry = context.query_gid_ex(port, index)
            gid = context.query_gid(port, index)
        except Exception:
            continue  # an empty entry: ibv_query_gid_ex(3) answers ENODATA
        raw = ipaddress.IPv6Address(gid.gid).packed
        if any(raw):
            gids.append(Gid(index, raw, GidType(entry.gid_type)))
    return gids

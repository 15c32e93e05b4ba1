"""Devices: finding them, opening one, and what an open one owns."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, Self, TypeVar

from aiordma import _backends, _control, _pyverbs, memory, qp, srq
from aiordma._offload import Control, Pending, in_thread, until
from aiordma._opening import DeviceInfo, list_devices, open_verbs
from aiordma._owned import Owned
from aiordma._values import whole
from aiordma._waitable import Signal, after_fork_in_child, no_copy
from aiordma.access import Access
from aiordma.completion import CompletionEngine, check_spin, device_fatal
from aiordma.errors import (
    ClosedError,
    CompletionQueueError,
    UsageError,
    WrongLoopError,
)
from aiordma.events import AsyncEvent, Events, EventType
from aiordma.gid import Gid

__all__ = ["Device", "DeviceInfo", "list_devices", "open_device"]

_log = logging.getLogger("aiordma")

# A QP that got one of them is in the error state (ibv_get_async_event(3)).
_QP_ERRORS = (EventType.QP_FATAL, EventType.QP_REQ_ERR, EventType.QP_ACCESS_ERR)
DEFAULT_SPIN_US = 20.0

Made = TypeVar("Made")
_SRQ = srq.SharedReceiveQueue


def _nothing() -> None:
    pass


def _weak_call(method: Callable[[], object]) -> Callable[[], object]:
    """Calls the method while its object lives, without keeping it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


class Device:
    """An open device on one event loop: context, protection domain, completion engine, and everything made from them.

    Made by :func:`open_device`. It belongs to the thread and loop that opened it. ``close()`` closes what it owns, in
    dependency order: QPs (flushing what is in flight), SRQs, memory regions, CQs, PD, context. Use it as ``async
    with``, or close it; a forgotten one warns (ResourceWarning) and is closed at interpreter exit.
    """

    def __init__(self, control: Control, name: str, facts: Mapping[str, Any]) -> None:
        self.control = control
        self._name = name
        self._facts = facts
        self._context = facts["context"]
        self._pd = facts["pd"]
        self._qp_pd = facts["qp_pd"]
        self._qp_pd_address: int = facts["qp_pd_address"]
        self.context_address: int = facts["context_address"]
        self.pd_address: int = facts["pd_address"]
        self._children: weakref.WeakSet[Any] = weakref.WeakSet()
        # Children that nobody else holds, because they were dropped without being closed.
        self._dropped: set[Any] = set()
        self._making: set[Pending[Any]] = set()
        # Where garbage collection takes the device together with its children, it can't find them in the weak set.
        self._teardowns: dict[int, tuple[int, Callable[[], object]]] = {}
        self._events: weakref.WeakSet[Events] = weakref.WeakSet()
        self._closing: Pending[None] | None = None
        self._closed = False
        self._ending = False
        self._lost = False
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._async_fd = _control.async_fd(self.context_address)
        os.set_blocking(self._async_fd, False)
        self.engine = CompletionEngine(
            control, self._context, self.context_address, facts["max_cqe"], facts["spin_us"], facts["cq_depth"]
        )
        self._watch = control.backend.watch(self._async_fd, _weak_call(self._on_async_event))
        _open_devices.add(self)

    def __reduce__(self) -> NoReturn:
        no_copy(self)

    # ---------------------------------------------------------------- what it is

    @property
    def name(self) -> str:
        """The verbs name, for example ``"mlx5_0"``."""
        return self._name

    @property
    def is_emulated(self) -> bool:
        """Whether this is aiordma's emulated NIC rather than the kernel's device."""
        emulated: bool = self._facts["emulated"]
        return emulated

    @property
    def context(self) -> Any:
        """The pyverbs Context."""
        return self._context

    @property
    def pd(self) -> Any:
        """The pyverbs PD."""
        return self._pd

    @property
    def qp_pd(self) -> Any:
        """The pyverbs PD that QPs are made in: a ParentDomain of :attr:`pd` with a thread domain of this loop's thread, which
        saves libmlx5 a lock with each post (ibv_alloc_td(3)); :attr:`pd` itself with other providers.

        So nothing but this loop's thread may post on these QPs, through their pyverbs objects neither.
        """
        # pyverbs' closing of a PD closes its parent domains first, also where the PD itself is busy then and stays.
        if self._qp_pd is not self._pd and not _control.holds(self._qp_pd, self._qp_pd_address):
            self._qp_pd = self._pd
        return self._qp_pd

    @property
    def attributes(self) -> Any:
        """The pyverbs DeviceAttr (ibv_query_device(3)), as of opening."""
        return self._facts["attributes"]

    @property
    def mlx5(self) -> Any:
        """What mlx5dv_query_device(3) says, as pyverbs' Mlx5DVContext; None where it isn't an mlx5 device with DEVX."""
        return self._facts["mlx5"]

    @property
    def is_iwarp(self) -> bool:
        """Whether it speaks iWARP (RDMA over TCP) rather than InfiniBand or RoCE: QPs are then connected by rdma_cm alone."""
        iwarp: bool = self._facts["iwarp"]
        return iwarp

    @property
    def port(self) -> int:
        """The port number in use."""
        port: int = self._facts["port"]
        return port

    @property
    def lid(self) -> int:
        """The port's LID; 0 on Ethernet."""
        lid: int = self._facts["lid"]
        return lid

    @property
    def gids(self) -> list[Gid]:
        """The port's GID table, without empty entries, as of opening."""
        gids: list[Gid] = self._facts["gids"]
        return gids

    @property
    def gid(self) -> Gid | None:
        """The GID in use; None on an InfiniBand port that has none."""
        gid: Gid | None = self._facts["gid"]
        return gid

    @property
    def active_mtu(self) -> int:
        """The port's active MTU in bytes."""
        mtu: int = self._facts["active_mtu"]
        return mtu

    @property
    def max_message(self) -> int:
        """The longest message of the port in bytes."""
        size: int = self._facts["max_message"]
        return size

    @property
    def max_qp_rd_atom(self) -> int:
        """RDMA reads and atomics that a QP can serve at a time."""
        return int(self.attributes.max_qp_rd_atom)

    @property
    def max_qp_init_rd_atom(self) -> int:
        """RDMA reads and atomics that a QP can have in flight as initiator."""
        return int(self.attributes.max_qp_init_rd_atom)

    @property
    def remote_access(self) -> Access:
        """What peers may be allowed here: all, less atomics where the device has none."""
        return Access.REMOTE if self.attributes.atomic_caps else Access.REMOTE & ~Access.REMOTE_ATOMIC

    @property
    def lost(self) -> bool:
        """Whether the device reported IBV_EVENT_DEVICE_FATAL."""
        return self._lost

    @property
    def closed(self) -> bool:
        """Whether it's closed, or closing."""
        return self._closed or self._closing is not None

    @property
    def spin_us(self) -> float:
        """Microseconds that an await polls before it parks; settable at any time, 0 turns it off."""
        return self.engine.spin_us

    @spin_us.setter
    def spin_us(self, value: float) -> None:
        self.engine.spin_us = value

    def describe(self) -> str:
        """One line for logs: name, nature, firmware, GID."""
        nature = "aiordma's emulated NIC" if self.is_emulated else "kernel device"
        return f"{self._name} ({nature}), firmware {self.attributes.fw_version}, port {self.port}, GID {self.gid}"

    # ---------------------------------------------------------------- making things

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        self.control.hooks.verify()
        for what, obj, address in (
            ("PD", self._pd, self.pd_address),
            ("context", self._context, self.context_address),
        ):
            if not _control.holds(obj, address):
                raise ClosedError(
                    f"the {what} of {self!r} was closed through its pyverbs object: close the device, and open it again"
                )

    def reg_mr(self, buffer: object, access: int = Access.ALL) -> Pending[memory.MemoryRegion]:
        """Registers a buffer (ibv_reg_mr(3)), off the loop: ``mr = await device.reg_mr(buf)``, or ``async with``.

        ``buffer``: bytearray, memoryview, mmap, numpy array, torch CPU tensor, or anything else with the buffer protocol;
        C-contiguous, at least one byte. It stays exported (not resizable, not freed) while the region is open.
        ``access``: :class:`Access`, by default everything; read-only buffers take ``Access.NONE`` or
        ``Access.REMOTE_READ``.

        Raises :class:`BufferAccessError`, :class:`AccessFlagsError` at once; awaiting raises :class:`VerbsError`, which for
        ENOMEM names the limit of locked memory and how to raise it.
        """
        self._check_open()
        return self._made(memory.register(self, buffer, access))

    def wrap_mr(self, mr: Any, access: int) -> memory.MemoryRegion:
        """A MemoryRegion around a pyverbs MR of this device's PD, which keeps being its owner's to close.

        ``access``: the flags it was registered with; pyverbs doesn't tell them.
        """
        self._check_open()
        return memory.wrap(self, mr, access)

    def create_qp(
        self, config: qp.QPConfig | None = None, *, srq: srq.SharedReceiveQueue | None = None, **options: Any
    ) -> Pending[qp.QueuePair]:
        """Makes a QP (ibv_create_qp(3)), off the loop: ``qp = await device.create_qp(max_send_wr=64)``, or ``async with``.

        ``options`` are fields of :class:`QPConfig`; given with ``config`` they replace its. ``srq``: take receives from it.
        """
        self._check_open()
        if config is not None and not isinstance(config, qp.QPConfig):
            raise UsageError(f"create_qp: config is a QPConfig, not {type(config).__name__}")
        if srq is not None and not isinstance(srq, _SRQ):
            raise UsageError(f"create_qp: srq is a SharedReceiveQueue, not {type(srq).__name__}")
        try:
            config = replace(config if config is not None else qp.QPConfig(), **options)
        except TypeError as e:
            raise UsageError(f"create_qp: {e}; the options are the fields of aiordma.QPConfig") from e
        return self._made(qp.create(self, config, srq))

    def create_srq(self, max_wr: int = 128, max_sge: int = 4) -> Pending[srq.SharedReceiveQueue]:
        """Makes an SRQ (ibv_create_srq(3)) of ``max_wr`` receives with ``max_sge`` buffers each, off the loop."""
        self._check_open()
        return self._made(srq.create(self, max_wr, max_sge))

    def _made(self, making: Pending[Made]) -> Pending[Made]:
        """Something is being made: closing waits for it, so that it finds it."""
        if not making.done:
            self._making.add(making)
            making.on_done(lambda: self._making.discard(making))
        return making

    # ---------------------------------------------------------------- events

    def events(self, limit: int = 1024) -> Events:
        """The device's asynchronous events from now on: ``async for event in device.events()``."""
        self._check_open()
        events = Events(self.control, limit)
        self._events.add(events)
        return events

    def _on_async_event(self) -> None:
        while not self._closed:
            found = _control.next_async_event(self.context_address)
            if found is None:
                return
            number, kind, element = found
            self._handle_event(EventType(number) if number in set(EventType) else number, kind, element)

    def _handle_event(self, event_type: EventType | int, kind: int, element: int) -> None:
        owner = None
        if kind in (2, 3):
            for child in self._children:
                if getattr(child, "address", None) == element and isinstance(
                    child, qp.VerbsQueuePair if kind == 2 else srq.SharedReceiveQueue
                ):
                    owner = child
        if event_type is EventType.CQ_ERR:
            self.engine.on_cq_error(element, CompletionQueueError(f"{self._name} reported IBV_EVENT_CQ_ERR"))
        elif event_type is EventType.SRQ_LIMIT_REACHED and isinstance(owner, srq.SharedReceiveQueue):
            owner.on_limit()
        elif event_type in _QP_ERRORS and isinstance(owner, qp.VerbsQueuePair):
            owner.on_error_event()
        elif event_type is EventType.DEVICE_FATAL:
            self._lost = True
            self.engine.fail(device_fatal(self._name))
        _log.debug("%s: asynchronous event %r", self._name, event_type)
        port = element if kind == 0 and event_type is not EventType.DEVICE_FATAL else None
        event = AsyncEvent(event_type, port, owner)
        for events in list(self._events):
            events.put(event)

    # ---------------------------------------------------------------- ownership

    def resolve_unsignaled(self) -> None:
        """Sees to it that unsignalled work requests in flight are resolved: somebody waits for memory that they use."""
        for child in list(self._children):
            if isinstance(child, qp.VerbsQueuePair):
                child.resolve_unsignaled()

    def memory_regions(self) -> list[memory.MemoryRegion]:
        """The open memory regions."""
        return [child for child in list(self._children) if isinstance(child, memory.MemoryRegion) and not child.closed]

    def objects(self) -> list[Any]:
        """What was made on it and isn't closed: queue pairs, SRQs, memory regions and so on."""
        return list(self._children)

    def adopt(self, child: Owned) -> None:
        """A new MR, QP or SRQ: closed with the device."""
        self._children.add(child)
        if child.teardown is not None:
            self._teardowns[id(child)] = (child.close_order, child.teardown)
        if self.closed:
            child.close()

    def forget(self, child: Owned) -> None:
        """One of them is closed."""
        self._children.discard(child)
        self._dropped.discard(child)
        self._teardowns.pop(id(child), None)

    def dispose(self, child: Owned) -> None:
        """One of them was dropped without being closed: closes it, on the loop where it still runs."""
        # The garbage collector may have taken it out of the weak set, and nobody else holds it any more.
        self._children.add(child)
        self._dropped.add(child)
        try:
            # Later, also on the loop's thread: a garbage collection comes anywhere, in the middle of handing something to a
            # worker thread too, and closing would wait there for a lock that this thread has.
            self.control.backend.call_soon_threadsafe(child.close)
        except RuntimeError:
            pass  # the loop is gone: the device's own closing does it

    def statistics(self) -> dict[str, Any]:
        """Live objects by kind, and the completion engine's counters."""
        kinds = {"memory_regions": 0, "queue_pairs": 0, "shared_receive_queues": 0}
        for child in self._children:
            kinds[child.kind] = kinds.get(child.kind, 0) + 1
        return {**kinds, "completion_queues": self.engine.statistics()}

    def _in_closing_order(self) -> list[list[Any]]:
        """What it owns, in groups of which each may be closed at once, what depends on others first."""
        groups: dict[int, list[Any]] = {}
        for child in list(self._children):
            groups.setdefault(child.close_order, []).append(child)
        return [groups[order] for order in sorted(groups)]

    # ---------------------------------------------------------------- closing

    def close(self) -> Pending[None]:
        """Closes it and everything it owns; started by the call, awaited or not; a second call gives the same operation.

        Tasks that wait for an operation get its result or its error first.
        """
        if self._closing is None:
            self.control.hooks.verify()
            self._closing = Pending(self.control, self._close())
        return self._closing

    async def _close(self) -> None:
        errors: list[BaseException] = []
        for making in list(self._making):
            ended = Signal(self.control.hooks)
            making.on_done(ended.finish)
            await until(ended)
        for group in self._in_closing_order():
            for closing in [child.close() for child in group]:
                ended = Signal(self.control.hooks)
                closing.on_done(ended.finish)
                await until(ended)
                try:
                    closing.result()
                except Exception as e:
                    errors.append(e)
        left = self._detach()
        try:
            await in_thread(self.control, self._destroy, left)
        except Exception as e:
            errors.append(e)
        if errors:
            raise errors[0]

    def _detach(self) -> list[tuple[Any, Any]]:
        """On the loop's thread: nothing is watched or polled any more."""
        self._closed = True
        _open_devices.discard(self)
        try:
            self._watch.close()
        except RuntimeError:  # the loop is closed, and its watches with it
            pass
        left = self.engine.detach()
        for events in list(self._events):
            events.close()
        return left

    def _destroy(self, cqs: list[tuple[Any, Any]]) -> None:
        errors: list[BaseException] = []
        # Memory that couldn't be deregistered, once more: it keeps everything open.
        for _, teardown in list(self._teardowns.values()):
            try:
                teardown()
            except Exception as e:
                errors.append(e)
        try:
            self.engine.destroy(cqs)
        except Exception as e:
            errors.append(e)
        errors += self._facts["end"]() or []
        if errors:
            raise errors[0]

    def _end_all(self, ends: Iterable[Callable[[], object]]) -> None:
        for end in list(ends):
            try:
                end()
            except Exception:
                _log.exception("closing what is left of %r", self)

    def close_now(self) -> None:
        """Closes everything in this thread, without a loop: for interpreter exit and for a device that was forgotten.

        What is in flight ends with :class:`ClosedError`; nobody is left to see it.
        """
        if self._closed or self._ending:
            return
        self._ending = True
        self._end_all(self.control.undelivered.values())
        self.control.undelivered.clear()
        # An order at a time: what no child stands for any more must be gone before what it depends on.
        children = {group[0].close_order: group for group in self._in_closing_order()}
        for order in sorted({*children, *(order for order, _ in self._teardowns.values())}):
            ends = [child.close_now for child in children.get(order, ())]
            self._end_all([*ends, *(end for o, end in list(self._teardowns.values()) if o == order)])
        self._teardowns.clear()
        left = self._detach()
        self._destroy(left)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.control.backend.shielded(self.close())

    def __del__(self) -> None:
        if getattr(self, "_pid", None) != os.getpid() or self._closed or not hasattr(self, "_watch"):
            return
        try:
            if self._closing is None:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
        finally:
            self._close_forgotten()

    def _in_use_elsewhere(self) -> bool:
        """Whether its loop may be running in another thread."""
        if self._thread == threading.get_ident() or self._thread not in sys._current_frames():
            return False
        try:
            self.control.backend.call_soon_threadsafe(_nothing)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _close_forgotten(self) -> None:
        try:
            self.control.hooks.verify()
        except WrongLoopError:
            # Another thread's garbage collection: the loop may be running, and its watches are its thread's business.
            try:
                self.control.backend.call_soon_threadsafe(self.close_now)
            except RuntimeError:  # it's closed
                pass
            else:
                _open_devices.add(self)
                return
        self.close_now()

    def __repr__(self) -> str:
        nature = "emulated " if self.is_emulated else ""
        return f"<Device {nature}{self._name}{' closed' if self.closed else ''}>"


def open_device(
    name: str | None = None,
    *,
    port: int = 1,
    gid_index: int | None = None,
    spin_us: float = DEFAULT_SPIN_US,
    cq_depth: int | None = None,
) -> Pending[Device]:
    """Opens a device, off the loop: ``device = await aiordma.open_device()``, or ``async with``.

    ``name``: a verbs name (``"mlx5_0"``), ``"emulated"`` or ``"emulated:mlx5_1"`` for aiordma's emulated NIC. None: what
    the environment variable AIORDMA_DEVICE names, else the first device of the machine, else, where the machine has
    none, the emulated NIC, which is then said in a log warning. A name that isn't there is an error: nothing is
    emulated in its place. ``port`` from 1. ``gid_index``: the entry of the GID table to use, else the best is chosen
    (routable RoCE v2 first). ``spin_us``: see :attr:`Device.spin_us`.

    ``cq_depth``: entries of the completion queue that QPs' sends have in common, and of the one for their receives; None:
    4096, or what the device can have. A QP takes as many as its queue has work requests. When none are left, the next
    QP brings another CQ, of twice the depth; one that's large enough for all QPs is the only one.

    Raises :class:`DeviceNotFoundError`, :class:`ProviderError`, :class:`GidError`, :class:`UsageError`,
    :class:`VerbsError`.
    """
    control = Control(_backends.current())
    return Pending(control, _open(control, name, port, gid_index, spin_us, cq_depth), dispose=True)


async def _open(
    control: Control, name: str | None, port: int, gid_index: int | None, spin_us: float, cq_depth: int | None
) -> Device:
    check_spin(spin_us)
    if name is not None and not isinstance(name, str):
        raise UsageError(f"open_device: name is text, not {name!r}")
    port, gid_index = whole(port), whole(gid_index)
    if not isinstance(port, int):
        raise UsageError(f"open_device: port is a number from 1, not {port!r}")
    if gid_index is not None and not isinstance(gid_index, int):
        raise UsageError(f"open_device: gid_index is a number, not {gid_index!r}")
    cq_depth = whole(cq_depth)
    if cq_depth is not None and not isinstance(cq_depth, int):
        raise UsageError(f"open_device: cq_depth is a number of entries, not {cq_depth!r}")
    chosen, facts = await in_thread(control, open_verbs, name, port, gid_index, cq_depth)
    try:
        return Device(control, chosen, {**facts, "spin_us": spin_us})
    except BaseException:
        await in_thread(control, facts["end"])
        raise


# ---------------------------------------------------------------- exit and fork

_open_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def _at_exit() -> None:
    errors: list[Exception] = []
    for device in list(_open_devices):
        if device._pid != os.getpid() or device._closed:
            continue
        try:
            if device._closing is None:
                warnings.warn(f"unclosed {device!r} at exit", ResourceWarning, stacklevel=1, source=device)
        except ResourceWarning as e:  # under -W error
            errors.append(e)
        # A daemon thread may be polling it at this moment; the kernel closes it with the process.
        if not device._in_use_elsewhere():
            device.close_now()
    if errors:
        raise errors[0]


def _after_fork_in_child() -> None:
    after_fork_in_child()
    for device in list(_open_devices):
        # Closing a verbs object here would close the parent's.
        _pyverbs.keep(device, device._context, device._pd, device._qp_pd, *device._children)
        _pyverbs.keep(*(child._pyverbs for child in device._children))
        for queue in device.engine.completion_queues:
            _pyverbs.keep(queue, queue.pyverbs, queue.pyverbs_channel)
    _open_devices.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)

"""Faults on demand: what goes wrong on a network, made to happen on the emulated NIC, to test what a program does then.

    >>> from aiordma.emulator import faults
    >>> with faults.drop(qp, nth=3) as lost:  # the third request of this QP gets lost
    ...     await service.run()
    ... assert lost.hits == 1

Each function makes a rule, which is in force from the call on, until its ``with`` block ends, :meth:`Fault.stop` is
called, or :func:`reset`, whichever comes first. Rules belong to the process and to its emulated devices; they concern what
these devices send, to QPs of this process or of another one.

Which operations a rule is about:

* ``qp``: a :class:`aiordma.QueuePair`, a pyverbs QP, or a QP number; all if left out. ``device``: a
  :class:`aiordma.Device`, a pyverbs Context, or a name.
* ``opcode``: ``"SEND"``, ``"RDMA_WRITE"``, ... (enum ibv_wr_opcode without IBV_WR\\_), ``"UMR"`` (which LOCAL_INV and BIND_MW
  are as well) or ``"MEMCPY"``, or several. A kind that makes no sense for an operation never applies to it: a local
  operation can't get lost.

And when it fires, counted over the operations that it's about:

* ``nth=3``: at the third. ``every=10``: at each tenth; with ``nth``, from that one on. ``count=2``: at most twice. With none
  of these, always.
* ``probability=0.1, seed=7``: with this probability, decided by the seed and by how many operations of the rule the *QP* has
  had. So the same operations of a QP meet the same faults in each run, whatever other QPs do.

An operation counts when it has come to the head of its queue, once; and once more each time that it's sent again because a
rule lost or refused it. Waiting for a receive of the peer's isn't sending again.

Where several fire: delays add up. Of the others (drop, drop_answer, rnr, fail, qp_fatal, cq_overrun) one applies: the one
for a QP before one for a device before one for all; of those the one for certain opcodes; then the one that was made
first. The others count the operation and don't hit.

Unless it's said, errors are those of the arguments: :class:`ValueError`, and :class:`EmulatorError` where there is no
emulated NIC or no such device.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, Unpack

from aiordma.emulator import _fault_text, is_attached
from aiordma.emulator._library import library_path
from aiordma.emulator._native import EmulatorError, native

__all__ = [
    "Fault",
    "active",
    "cq_error",
    "cq_overrun",
    "delay",
    "device_fatal",
    "devx",
    "drop",
    "drop_answer",
    "fail",
    "from_text",
    "hang",
    "hold",
    "port_down",
    "qp_fatal",
    "raise_event",
    "remote_access_error",
    "reorder",
    "reset",
    "retry_exceeded",
    "rnr",
    "shape",
    "verb",
]

_CQ_ERR, _DEVICE_FATAL = 0, 8  # enum ibv_event_type
_SRQ_EVENTS = (14, 15)
_QP_EVENTS = (1, 2, 3, 4, 5, 6, 7, 16)
_PORT_EVENTS = (9, 10, 11, 12, 13, 17, 18)
_EVENTS = frozenset({_CQ_ERR, _DEVICE_FATAL, *_SRQ_EVENTS, *_QP_EVENTS, *_PORT_EVENTS})
_BY_PORT, _BY_QP, _BY_SEND_CQ, _BY_RECV_CQ, _BY_SRQ = range(5)  # enum inject_element


class _Numbered(Protocol):
    @property
    def qp_num(self) -> int: ...


class _Named(Protocol):
    @property
    def name(self) -> Any: ...


#: A QueuePair, a pyverbs QP, or a QP number.
QP: TypeAlias = _Numbered | int
#: A Device, a pyverbs Context, or a name.
AnyDevice: TypeAlias = _Named | str


class When(TypedDict, total=False):
    """When a rule fires: see the module."""

    nth: int | None
    every: int | None
    count: int | None
    probability: float | None
    seed: int | None


# ------------------------------------------------------------------ the emulator's side

_lock = threading.RLock()
# A child of fork() would wait for ever for a thread that it doesn't have.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_active: list[Fault] = []


def _library() -> Any:
    native()  # says what is wrong with the library, if anything is
    library = ctypes.CDLL(os.fspath(library_path()))
    for name, arguments in {
        "fault_add": [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
        "fault_counts": [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)],
        "fault_stop": [ctypes.c_int],
        "raise_event": [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64],
    }.items():
        function = getattr(library, f"aiordma_emu_{name}")
        function.argtypes = arguments
        function.restype = ctypes.c_int
    library.aiordma_emu_fault_reset.restype = None
    return library


_loaded: Any = None


def _emulator() -> Any:
    """The library, if this process has emulated devices."""
    global _loaded
    if _loaded is None:
        _loaded = _library()
    if not is_attached():
        raise EmulatorError(
            "there is no emulated NIC in this process to make faults on: open a device with "
            'aiordma.open_device("emulated"), call aiordma.emulator.attach(), or start the program with `aiordma emulate`'
        )
    return _loaded


class Fault:
    """A rule in force. A context manager; leaving the block stops it."""

    def __init__(self, description: str, number: int) -> None:
        self._description = description
        self._number = number
        self._hits = 0
        self._seen = 0
        self._stopped = False
        _active.append(self)

    def _refresh(self) -> None:
        hits, seen = ctypes.c_uint64(), ctypes.c_uint64()
        if not _loaded.aiordma_emu_fault_counts(self._number, ctypes.byref(hits), ctypes.byref(seen)):
            self._hits, self._seen = hits.value, seen.value

    @property
    def hits(self) -> int:
        """How often it fired, up to now or until it was stopped."""
        with _lock:
            if not self._stopped:
                self._refresh()
            return self._hits

    @property
    def seen(self) -> int:
        """How many operations (or commands) it was about, whether it fired or not."""
        with _lock:
            if not self._stopped:
                self._refresh()
            return self._seen

    @property
    def stopped(self) -> bool:
        """Whether it's over."""
        return self._stopped

    def stop(self) -> None:
        """End it; what it holds back goes on. Again: does nothing. From any thread."""
        with _lock:
            if self._stopped:
                return
            self._refresh()
            self._stopped = True
            _active.remove(self)
            _loaded.aiordma_emu_fault_stop(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Fault {self._description}{' stopped' if self._stopped else ''}, {self.hits} of {self.seen}>"


def _device_name(device: AnyDevice | None) -> str | None:
    if device is None or isinstance(device, str):
        return device
    name = getattr(device, "name", None)
    if isinstance(name, bytes):
        name = name.decode()
    if not isinstance(name, str):
        raise ValueError(f"device is a Device, a pyverbs Context or a name, not {device!r}")
    return name


def _qp(qp: QP | None, device: AnyDevice | None) -> tuple[int | None, str | None]:
    """Number and device's name. Numbers are unique on a device only, so a QP object brings its device."""
    name = _device_name(device)
    if qp is None or isinstance(qp, int):
        return qp, name
    number = getattr(qp, "qp_num", None)
    if not isinstance(number, int):
        raise ValueError(f"qp is a QueuePair, a pyverbs QP or a QP number, not {qp!r}")
    own = getattr(qp, "device", None) or getattr(qp, "context", None)
    if name is None and own is not None and isinstance(getattr(own, "name", None), str | bytes):
        name = _device_name(own)
    return number, name


def _unless_zero(value: Any) -> Any:
    """What is left out if it's nothing, and refused if it's nonsense."""
    return None if value == 0 else value


def _install(kind: str, **options: Any) -> Fault:
    return _add(_fault_text.rule(kind, **options))


def _add(text: str) -> Fault:
    with _lock:
        library = _emulator()
        error = ctypes.create_string_buffer(256)
        number = library.aiordma_emu_fault_add(text.encode(), error, len(error))
        if number < 0:
            why = error.value.decode(errors="replace")
            raise (EmulatorError if "there is no emulated device" in why else ValueError)(f"{text}: {why}")
        return Fault(text, number)


def _on_queue(
    kind: str, qp: QP | None, device: AnyDevice | None, opcode: str | Iterable[str] | None, when: When, **how: Any
) -> Fault:
    number, name = _qp(qp, device)
    return _install(kind, qp=number, device=name, opcode=opcode, **when, **how)


# ------------------------------------------------------------------ on the way


def drop(
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """Requests get lost on the way.

    A reliable QP sends again when its ack timeout has run out, ``retry_cnt`` times, and then the operation ends in
    IBV_WC_RETRY_EXC_ERR; with ``timeout`` 0 it waits for ever (ibv_modify_qp(3)). What is sent on UC or UD succeeds, and
    never arrives.
    """
    return _on_queue("drop", qp, device, opcode, when)


def drop_answer(
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """Requests arrive and are done; the acknowledgement gets lost. On RC and XRC.

    The requester sends again, and the responder, which recognises it, acknowledges again without doing it again. If that gets
    lost too until the retries are exhausted, the operation fails though it took effect.
    """
    return _on_queue("drop_answer", qp, device, opcode, when)


def delay(
    seconds: float,
    qp: QP | None = None,
    *,
    jitter: float = 0.0,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """Operations are executed ``seconds`` after they were posted at the earliest, and up to ``jitter`` seconds later.

    Posts that the device notices at the same time are delayed at the same time: a hundred of them don't take a hundred
    times as long. Those behind a delayed one in the same queue wait for it.
    """
    return _on_queue("delay", qp, device, opcode, when, seconds=seconds, jitter=_unless_zero(jitter))


def shape(
    qp: QP | None = None,
    *,
    latency: float = 0.0,
    bandwidth: int | None = None,
    jitter: float = 0.0,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """A slower link: ``latency`` and up to ``jitter`` seconds for each operation, and ``bandwidth`` bytes a second for all.

    What the rule is about shares the bandwidth: with ``device`` that of the device, with ``qp`` that of a QP. Payload counts,
    in both directions (a READ's too), headers don't. Latency is added to the request; the answer takes no time.
    """
    return _on_queue(
        "shape",
        qp,
        device,
        opcode,
        when,
        latency=_unless_zero(latency),
        bandwidth=bandwidth,
        jitter=_unless_zero(jitter),
    )


def reorder(
    qp: QP | None = None,
    *,
    by: int = 1,
    limit: float = 0.1,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """Operations are overtaken by the next ``by`` operations of other QPs of the device.

    One that is overtaken by nobody goes on after ``limit`` seconds, and one at a time is overtaken on each device. Nothing is
    duplicated, and the order within a QP is kept: of a reliable connection that's all that can be seen, since the
    responder does nothing with a request that is out of sequence but asking for the missing one.
    """
    return _on_queue("reorder", qp, device, opcode, when, by=by, limit=limit)


def hold(
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """Operations stay in flight until the rule is stopped; a QP that goes to ERR flushes them.

    Without conditions it holds what has begun already, too.
    """
    return _on_queue("hold", qp, device, opcode, when)


def hang(qp: QP | None = None, *, device: AnyDevice | None = None) -> Fault:
    """The QP sends nothing and flushes nothing: as with firmware that is stuck. What peers send to it still arrives."""
    return _on_queue("hang", qp, device, None, {})


# ------------------------------------------------------------------ what comes back


def rnr(
    qp: QP | None = None,
    *,
    timer: int = 1,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """The peer answers that it has no receive posted ("receiver not ready"), to what needs one: sends, writes with immediate.

    The QP tries again after ``timer`` (the code of ``min_rnr_timer``, 1: 0.01 ms), ``rnr_retry`` times, 7 meaning for ever,
    and then the operation ends in IBV_WC_RNR_RETRY_EXC_ERR.
    """
    return _on_queue("rnr", qp, device, opcode, when, timer=timer)


def fail(
    status: str,
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """Operations complete with a status: ``"REM_OP_ERR"``, ``"LOC_PROT_ERR"``, ... (enum ibv_wc_status without IBV_WC\\_).

    Nothing of the operation is done. The QP is in ERR then (UC and UD: SQE). REM_ACCESS_ERR, REM_INV_REQ_ERR and REM_OP_ERR
    are the peer's refusal: its QP goes to ERR as well, with the event that goes with it.
    """
    return _on_queue("fail", qp, device, opcode, when, status=status)


def remote_access_error(
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """The peer refuses access to its memory: RDMA and atomics end in IBV_WC_REM_ACCESS_ERR, and both QPs in ERR."""
    return _on_queue("remote_access_error", qp, device, opcode, when)


def retry_exceeded(
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """Operations end in IBV_WC_RETRY_EXC_ERR at once: what :func:`drop` leads to when all retries are used up."""
    return _on_queue("retry_exceeded", qp, device, opcode, when)


def qp_fatal(
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """The QP itself breaks (IBV_EVENT_QP_FATAL): it goes to ERR, and all that is posted is flushed."""
    return _on_queue("qp_fatal", qp, device, opcode, when)


def cq_overrun(
    qp: QP | None = None,
    *,
    device: AnyDevice | None = None,
    opcode: str | Iterable[str] | None = None,
    **when: Unpack[When],
) -> Fault:
    """The send CQ has no room for the operation's completion.

    As after a real overrun: that completion is lost, the CQ gets no other any more (IBV_EVENT_CQ_ERR), and each QP that
    would complete on it goes to ERR (IBV_EVENT_QP_FATAL).
    """
    return _on_queue("cq_overrun", qp, device, opcode, when)


# ------------------------------------------------------------------ commands


def verb(
    name: str,
    error: int | str | None = None,
    *,
    delay: float | None = None,
    state: str | None = None,
    device: AnyDevice | None = None,
    **when: Unpack[When],
) -> Fault:
    """A verb fails with an errno (``errno.ENOMEM`` or ``"ENOMEM"``), or takes ``delay`` seconds longer, or both.

    ``name`` is rdma-core's, with or without its prefix: ``"reg_mr"``, ``"ibv_create_qp"``, ``"mlx5dv_devx_obj_create"``. It's
    the command to the kernel that fails, before it does anything; so verbs that never leave the library (ibv_post_send(),
    ibv_poll_cq()) can't. ``state``: only ``modify_qp`` to that state. Objects that are made of others (a QP by DEVX) take the
    verbs that they are made with.
    """
    return _install("verb", name=name, error=error, delay=delay, state=state, device=_device_name(device), **when)


def devx(
    command: int, status: int = 0x8, syndrome: int = 0, *, device: AnyDevice | None = None, **when: Unpack[When]
) -> Fault:
    """The firmware refuses a DEVX command, by its opcode, with a status (0x8: no resources) and a syndrome.

    The command's call fails with EREMOTEIO, and the output has both. libmlx5 sends such commands of its own accord when a
    device is opened and when it makes mkeys.
    """
    return _install(
        "devx", command=command, status=status, syndrome=_unless_zero(syndrome), device=_device_name(device), **when
    )


# ------------------------------------------------------------------ events


def _raise(device: str, event: int, by: int, element: int, what: str) -> None:
    if _emulator().aiordma_emu_raise_event(device.encode(), event, by, element):
        raise EmulatorError(f"{what}: the emulated NIC has no such device, port or object")


def _needed_name(device: AnyDevice) -> str:
    name = _device_name(device)
    if not name:
        raise ValueError("a device is needed")
    return name


def port_down(device: AnyDevice, port: int = 1) -> Fault:
    """The port goes down (IBV_EVENT_PORT_ERR), and up again when the fault ends (IBV_EVENT_PORT_ACTIVE).

    While it's down nothing comes through, in either direction: as with :func:`drop`. Of several faults of one port the last
    that ends brings it up; a port that was down before stays so.
    """
    return _install("port_down", device=_needed_name(device), port=port)


def device_fatal(device: AnyDevice) -> Fault:
    """The device is gone (IBV_EVENT_DEVICE_FATAL): nothing on it goes on or is flushed, and commands fail with EIO.

    Those that take something away succeed, as mlx5's do then; opening it fails with EAGAIN; nobody reaches it. It comes back
    when the fault ends. On hardware, what was open before would have to be opened anew: aiordma insists on that
    (:attr:`aiordma.Device.lost`), other programs had better.
    """
    return _install("device_fatal", device=_needed_name(device))


def cq_error(qp: QP, queue: Literal["send", "recv"] = "send", *, device: AnyDevice | None = None) -> None:
    """The CQ of a QP's send or receive queue breaks now (IBV_EVENT_CQ_ERR): it gets no completion any more.

    QPs that would complete on it then go to ERR, with IBV_EVENT_QP_FATAL. For good.
    """
    if queue not in ("send", "recv"):
        raise ValueError(f'queue is "send" or "recv", not {queue!r}')
    _raise_on_qp(_CQ_ERR, qp, device, _BY_SEND_CQ if queue == "send" else _BY_RECV_CQ)


def _raise_on_qp(event: int, qp: QP, device: AnyDevice | None, by: int) -> None:
    number, name = _qp(qp, device)
    if number is None:
        raise ValueError("a QP is needed")
    if not 0 < number < 1 << 24:
        raise ValueError(f"qp is the number of a QP, of 24 bits, not {number}")
    _raise(name or "", event, by, number, f"QP {number:#x}")


def raise_event(event: int, qp: QP | None = None, *, device: AnyDevice | None = None, port: int | None = None) -> None:
    """Raises an asynchronous event now, with what leads to it: an :class:`aiordma.EventType`.

    IBV_EVENT_QP_FATAL, QP_REQ_ERR and QP_ACCESS_ERR take the QP to ERR, SRQ_ERR breaks the QP's SRQ, PORT_ERR and PORT_ACTIVE
    change the port's state. Events of ports need ``device`` and ``port``, those of queues a QP. DEVICE_FATAL lasts:
    :func:`device_fatal`.
    """
    try:
        number = int(event)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number not in _EVENTS:
        raise ValueError(f"event is an EventType, and none of a work queue (WQ_FATAL), not {event!r}")
    if number == _DEVICE_FATAL:
        raise ValueError("a device that is gone stays so for a while: use faults.device_fatal()")
    if number in _QP_EVENTS or number in _SRQ_EVENTS or number == _CQ_ERR:
        if qp is None:
            raise ValueError(f"the event {event!r} is one of a QP: give it")
        by = _BY_SRQ if number in _SRQ_EVENTS else _BY_SEND_CQ if number == _CQ_ERR else _BY_QP
        _raise_on_qp(number, qp, device, by)
        return
    if device is None or port is None:
        raise ValueError(f"the event {event!r} is one of a port: give device and port")
    name = _needed_name(device)
    if not isinstance(port, int) or not 0 < port < 256:
        raise ValueError(f"port is the number of a port, not {port!r}")
    _raise(name, number, _BY_PORT, port, f"{name} port {port}")


# ------------------------------------------------------------------ all of them


def from_text(text: str) -> Fault:
    """A rule written as for ``aiordma emulate --fault``: ``"drop:opcode=SEND+RDMA_WRITE,nth=3"``."""
    return _add(_fault_text.rule_of_words(text))


def active() -> list[Fault]:
    """The faults in force, in the order in which they were made."""
    with _lock:
        return list(_active)


def reset() -> None:
    """Ends all faults, those of ``aiordma emulate --fault`` too; ports that were taken down come up again.

    What can't be undone stays: QPs in ERR, CQs and SRQs that broke. Does nothing where there is no emulated NIC.
    """
    with _lock:
        for fault in reversed(_active[:]):
            fault.stop()
        if _loaded is not None or is_attached():
            _emulator_if_any().aiordma_emu_fault_reset()


def _emulator_if_any() -> Any:
    global _loaded
    if _loaded is None:
        _loaded = _library()
    return _loaded

"""The exceptions that aiordma raises.

Everything derives from :class:`RdmaError`. The families under it:

* :class:`VerbsError` (also an :class:`OSError`): a verb returned an errno; it carries ``errno`` and the verb's name.
* :class:`CompletionError`: a work request was posted and completed with a status other than success. Each status of
  ``enum ibv_wc_status`` has its own class; those that mean "the other side is gone" are also
  :class:`ConnectionError`.
* :class:`ConnectError` (also a :class:`ConnectionError`): a connection couldn't be made;
  :class:`DisconnectedError` (also a :class:`ConnectionResetError`): the peer ended one.
* :class:`UsageError` and its kin: found before anything was posted, nothing was lost.
* :class:`UnsupportedError`: the device lacks a capability; names both.
"""

from __future__ import annotations

import os
from errno import EREMOTEIO
from typing import ClassVar, NamedTuple

__all__ = [
    "AccessFlagsError",
    "BadResponseError",
    "BufferAccessError",
    "ClosedError",
    "CompletionError",
    "CompletionQueueError",
    "ConnectError",
    "ConnectTimeoutError",
    "DeviceFatalError",
    "DeviceNotFoundError",
    "DevxError",
    "DisconnectedError",
    "DisconnectedFlushError",
    "ExchangeError",
    "FatalError",
    "ForkError",
    "GeneralError",
    "GidError",
    "InvalidEecNumberError",
    "InvalidEecStateError",
    "LocalAccessError",
    "LocalEecOperationError",
    "LocalLengthError",
    "LocalProtectionError",
    "LocalQpOperationError",
    "LocalRddViolationError",
    "MemoryWindowBindError",
    "ProviderError",
    "QPStateError",
    "QueueFullError",
    "RdmaError",
    "RejectedError",
    "RemoteAbortError",
    "RemoteAccessError",
    "RemoteInvalidRddRequestError",
    "RemoteInvalidRequestError",
    "RemoteOperationError",
    "ResolutionError",
    "ResponseTimeoutError",
    "RetryExceededError",
    "RnrRetryExceededError",
    "TagMatchingError",
    "TagRendezvousIncompleteError",
    "UnknownCompletionError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "VerbsError",
    "WrFlushError",
    "WrongLoopError",
    "completion_error",
]


class RdmaError(Exception):
    """Base of everything aiordma raises on purpose."""


# ------------------------------------------------------------------ before anything is posted


class UsageError(RdmaError, ValueError):
    """An argument or the moment of a call is wrong; nothing was posted and nothing is lost."""


class BufferAccessError(UsageError, TypeError):
    """A buffer can't be used as asked: read-only as a target, not contiguous, not of 8 bytes, not registered."""


class AccessFlagsError(UsageError):
    """Access flags that no device accepts together, or a region used beyond the flags that it was registered with."""


class QPStateError(UsageError):
    """The QP's state doesn't allow the call (for example a send before ``connect``)."""


class QueueFullError(RdmaError):
    """As many work requests as :attr:`QPConfig.max_queued` allows wait already for a free slot of the QP's queue."""


class WrongLoopError(RdmaError, RuntimeError):
    """An object was used from another thread or another event loop than the one its device was opened on."""


class ForkError(RdmaError, RuntimeError):
    """An object that was made before ``fork()`` was used in the child: verbs objects belong to the parent."""


class ClosedError(RdmaError):
    """The object was closed, here, before or while the call waited."""


class DeviceNotFoundError(RdmaError, LookupError):
    """No device of that name, or no device at all."""


class ProviderError(RdmaError, ImportError):
    """pyverbs or libibverbs is missing, or is laid out in a way that this version of aiordma doesn't know."""


class GidError(RdmaError, LookupError):
    """No usable GID: the message has the port's GID table."""


class ExchangeError(RdmaError, ConnectionError):
    """The TCP exchange of connection details failed: peer gone, not an aiordma peer, or one of another version."""


class UnsupportedError(RdmaError):
    """The device lacks a capability.

    ``device`` and ``capability`` name them.
    """

    def __init__(self, device: str, capability: str, hint: str = "") -> None:
        self.device = device
        self.capability = capability
        self.hint = hint
        super().__init__(f"{device} does not support {capability}" + (f": {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[str, str, str]]:
        return type(self), (self.device, self.capability, self.hint)


class UnknownCompletionError(RdmaError):
    """A completion arrived whose wr_id belongs to no operation in flight; ``wr_id`` and ``qp_num`` name it."""

    def __init__(self, wr_id: int, qp_num: int, status: int) -> None:
        self.wr_id = wr_id
        self.qp_num = qp_num
        self.status = status
        super().__init__(
            f"completion with unknown wr_id {wr_id:#x} on QP {qp_num:#x} (status {status}): "
            "something else posts work on this QP, or the CQ is shared with another program part"
        )

    def __reduce__(self) -> tuple[type[UnknownCompletionError], tuple[int, int, int]]:
        return type(self), (self.wr_id, self.qp_num, self.status)


# ------------------------------------------------------------------ a verb failed


class VerbsError(RdmaError, OSError):
    """A verb failed with an errno.

    ``errno`` is the number, ``verb`` the name of the function (``"ibv_reg_mr"``).
    """

    def __init__(self, verb: str, errno: int, detail: str = "") -> None:
        # Some providers' posting calls, siw's for one, return it negative.
        errno = abs(errno)
        self.verb = verb
        self.detail = detail
        text = f"{verb}: {os.strerror(errno)}" + (f" ({detail})" if detail else "")
        super().__init__(errno, text)

    def __str__(self) -> str:
        return f"[Errno {self.errno}] {self.strerror}"

    def __reduce__(self) -> tuple[type[VerbsError], tuple[str, int, str]]:
        return type(self), (self.verb, self.errno or 0, self.detail)


class DevxError(VerbsError):
    """The device's firmware refused a DEVX command (EREMOTEIO).

    ``opcode`` and ``opcode_name``: the command; ``status`` and ``status_text``: the firmware's reason, one of the PRM's
    status codes; ``syndrome``: its own number for the exact cause, which NVIDIA's support can look up.
    """

    def __init__(self, verb: str, opcode: int, opcode_name: str, status: int, status_text: str, syndrome: int) -> None:
        self.opcode = opcode
        self.opcode_name = opcode_name
        self.status = status
        self.status_text = status_text
        self.syndrome = syndrome
        detail = f"{opcode_name} (opcode {opcode:#x}) refused: status {status:#x} {status_text}; syndrome {syndrome:#x}"
        super().__init__(verb, EREMOTEIO, detail)

    def __reduce__(self) -> tuple[type[DevxError], tuple[str, int, str, int, str, int]]:  # type: ignore[override]
        arguments = (self.verb, self.opcode, self.opcode_name, self.status, self.status_text, self.syndrome)
        return type(self), arguments


class DeviceFatalError(RdmaError, ConnectionError):
    """The device reported IBV_EVENT_DEVICE_FATAL: nothing on it will complete any more."""


class CompletionQueueError(RdmaError, ConnectionError):
    """The CQ reported IBV_EVENT_CQ_ERR (it overflowed, or the device failed): its completions are lost."""


# ------------------------------------------------------------------ connections


class ConnectError(RdmaError, ConnectionError):
    """A connection couldn't be made (:func:`aiordma.connect`, :meth:`aiordma.cm.Request.accept`)."""


class ResolutionError(ConnectError):
    """The host's name isn't known, or no RDMA device of this machine leads to its address."""


class UnreachableError(ConnectError):
    """The peer's machine doesn't answer, or its answer made no connection (RDMA_CM_EVENT_UNREACHABLE, CONNECT_ERROR)."""


class ConnectTimeoutError(ConnectError, TimeoutError):
    """The time for connecting was over; ``step`` says what was waited for."""

    def __init__(self, text: str, step: str) -> None:
        self.step = step
        super().__init__(f"{text}: no end of {step} within the time given")
        self._text = text

    def __reduce__(self) -> tuple[type[ConnectTimeoutError], tuple[str, str]]:
        return type(self), (self._text, self.step)


class RejectedError(ConnectError, ConnectionRefusedError):
    """The peer refused the connection, or nothing listens there.

    ``status``: the CM's reason (IBTA table "REJ message reason codes"; 28 is the program's own no, 8 that nothing
    listens), ``status_text``: it in words; ``reason``: the number that an aiordma peer gave :meth:`Request.reject`, else
    0; ``private_data``: what the peer sent with its refusal, zero bytes behind it up to the size that the CM always sends.
    """

    def __init__(self, where: str, status: int, status_text: str, reason: int = 0, private_data: bytes = b"") -> None:
        self.where = where
        self.status = status
        self.status_text = status_text
        self.reason = reason
        self.private_data = private_data
        said = private_data.rstrip(b"\0")
        super().__init__(
            f"{where} refused the connection: {status_text} (CM reason {status})"
            + (f", reason {reason}" if reason else "")
            + (f", private data {said!r}" if said else "")
        )

    def __reduce__(self) -> tuple[type[RejectedError], tuple[str, int, str, int, bytes]]:
        return type(self), (self.where, self.status, self.status_text, self.reason, self.private_data)


class DisconnectedError(RdmaError, ConnectionResetError):
    """The peer ended the connection, or was ended."""


# ------------------------------------------------------------------ a work request failed


class _Details(NamedTuple):
    """What the data plane knows of a failed work request."""

    status: int
    vendor_err: int
    opcode: str
    qp_num: int
    wr_id: int
    local: str
    remote: str
    note: str


class CompletionError(RdmaError):
    """A work request completed with an error.

    ``status``: enum ibv_wc_status as int; ``status_name``: its name; ``vendor_err``: the provider's syndrome;
    ``opcode``: what was asked, as text; ``qp_num``; ``wr_id``. ``meaning`` is a sentence on what the status says
    and what usually causes it. Meanings: ibv_poll_cq(3), InfiniBand Architecture Specification vol. 1, 11.6.2.
    """

    status: int = -1
    status_name: ClassVar[str] = "IBV_WC_?"
    meaning: ClassVar[str] = "A status that this version of aiordma doesn't know."

    def __init__(self, details: _Details) -> None:
        self.status = details.status
        self.vendor_err = details.vendor_err
        self.opcode = details.opcode
        self.qp_num = details.qp_num
        self.wr_id = details.wr_id
        self.details = details
        where = "".join(f", {part}" for part in (details.local, details.remote) if part)
        note = f" {details.note}" if details.note else ""
        text = (
            f"{details.opcode} on QP {details.qp_num:#x} failed: {self.status_name} ({details.status}, "
            f"vendor syndrome {details.vendor_err:#x}{where}). {self.meaning}{note}"
        )
        super().__init__(text)

    def __reduce__(self) -> tuple[type[CompletionError], tuple[_Details]]:
        return type(self), (self.details,)


_BY_STATUS: dict[int, type[CompletionError]] = {}


class LocalLengthError(CompletionError):
    """IBV_WC_LOC_LEN_ERR."""

    status = 1
    status_name = "IBV_WC_LOC_LEN_ERR"
    meaning = (
        "The message didn't fit: a receive buffer shorter than what was sent, or a message longer than the port allows."
    )


class LocalQpOperationError(CompletionError):
    """IBV_WC_LOC_QP_OP_ERR."""

    status = 2
    status_name = "IBV_WC_LOC_QP_OP_ERR"
    meaning = "The device couldn't process the work request: a malformed WQE, or an opcode this QP doesn't support."


class LocalEecOperationError(CompletionError):
    """IBV_WC_LOC_EEC_OP_ERR."""

    status = 3
    status_name = "IBV_WC_LOC_EEC_OP_ERR"
    meaning = "An internal end-to-end context error (reliable datagram only)."


class LocalProtectionError(CompletionError):
    """IBV_WC_LOC_PROT_ERR."""

    status = 4
    status_name = "IBV_WC_LOC_PROT_ERR"
    meaning = (
        "A local buffer isn't covered by its lkey: the MR was deregistered, belongs to another PD, is too short, or "
        "lacks LOCAL_WRITE for an operation that writes to it."
    )


class WrFlushError(CompletionError, ConnectionError):
    """IBV_WC_WR_FLUSH_ERR."""

    status = 5
    status_name = "IBV_WC_WR_FLUSH_ERR"
    meaning = (
        "The QP was or went to the error state before this work request was done: an earlier one failed, or the QP was "
        "closed. Whether it took effect at the peer isn't known."
    )


class DisconnectedFlushError(WrFlushError, DisconnectedError):
    """IBV_WC_WR_FLUSH_ERR, because the peer disconnected: both a :class:`WrFlushError` and a :class:`DisconnectedError`."""

    meaning = (
        "The peer ended the connection before this work request was done. Whether it took effect there isn't known."
    )


class MemoryWindowBindError(CompletionError):
    """IBV_WC_MW_BIND_ERR."""

    status = 6
    status_name = "IBV_WC_MW_BIND_ERR"
    meaning = "A memory window or UMR mkey couldn't be bound: access rights or range beyond the underlying MR."


class BadResponseError(CompletionError):
    """IBV_WC_BAD_RESP_ERR."""

    status = 7
    status_name = "IBV_WC_BAD_RESP_ERR"
    meaning = "The responder answered with an unexpected opcode: the two sides disagree on the protocol."


class LocalAccessError(CompletionError):
    """IBV_WC_LOC_ACCESS_ERR."""

    status = 8
    status_name = "IBV_WC_LOC_ACCESS_ERR"
    meaning = "A protection error on a local buffer while an incoming RDMA write with immediate was processed."


class RemoteInvalidRequestError(CompletionError):
    """IBV_WC_REM_INV_REQ_ERR."""

    status = 9
    status_name = "IBV_WC_REM_INV_REQ_ERR"
    meaning = (
        "The responder found the request invalid: a receive buffer too small for the message, an atomic on an address "
        "that isn't a multiple of 8, more RDMA reads in flight than it allows, or an operation that its QP doesn't do."
    )


class RemoteAccessError(CompletionError):
    """IBV_WC_REM_ACCESS_ERR."""

    status = 10
    status_name = "IBV_WC_REM_ACCESS_ERR"
    meaning = (
        "The responder refused the access: a wrong or stale rkey, an address range outside its MR, or an MR or QP "
        "without the right (REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC). Both QPs are now in the error state."
    )


class RemoteOperationError(CompletionError):
    """IBV_WC_REM_OP_ERR."""

    status = 11
    status_name = "IBV_WC_REM_OP_ERR"
    meaning = "The responder couldn't complete the operation: usually its receive buffer's own lkey is bad."


class RetryExceededError(CompletionError, ConnectionError):
    """IBV_WC_RETRY_EXC_ERR."""

    status = 12
    status_name = "IBV_WC_RETRY_EXC_ERR"
    meaning = (
        "The peer never acknowledged: it's gone, its QP isn't connected to this one (or isn't in RTR yet), a wrong "
        "QP number or GID, or a link, VLAN or firewall (UDP port 4791) in between."
    )


class RnrRetryExceededError(CompletionError, ConnectionError):
    """IBV_WC_RNR_RETRY_EXC_ERR."""

    status = 13
    status_name = "IBV_WC_RNR_RETRY_EXC_ERR"
    meaning = "The peer had no receive posted, longer than rnr_retry allowed: post receives before the peer sends."


class LocalRddViolationError(CompletionError):
    """IBV_WC_LOC_RDD_VIOL_ERR."""

    status = 14
    status_name = "IBV_WC_LOC_RDD_VIOL_ERR"
    meaning = "The reliable datagram domains don't match (reliable datagram only)."


class RemoteInvalidRddRequestError(CompletionError):
    """IBV_WC_REM_INV_RD_REQ_ERR."""

    status = 15
    status_name = "IBV_WC_REM_INV_RD_REQ_ERR"
    meaning = "The responder found an invalid reliable-datagram message (reliable datagram only)."


class RemoteAbortError(CompletionError, ConnectionError):
    """IBV_WC_REM_ABORT_ERR."""

    status = 16
    status_name = "IBV_WC_REM_ABORT_ERR"
    meaning = "The responder aborted the operation."


class InvalidEecNumberError(CompletionError):
    """IBV_WC_INV_EECN_ERR."""

    status = 17
    status_name = "IBV_WC_INV_EECN_ERR"
    meaning = "An invalid end-to-end context number (reliable datagram only)."


class InvalidEecStateError(CompletionError):
    """IBV_WC_INV_EEC_STATE_ERR."""

    status = 18
    status_name = "IBV_WC_INV_EEC_STATE_ERR"
    meaning = "An end-to-end context in the wrong state (reliable datagram only)."


class FatalError(CompletionError):
    """IBV_WC_FATAL_ERR."""

    status = 19
    status_name = "IBV_WC_FATAL_ERR"
    meaning = "A fatal transport error; the QP is of no more use."


class ResponseTimeoutError(CompletionError, ConnectionError):
    """IBV_WC_RESP_TIMEOUT_ERR."""

    status = 20
    status_name = "IBV_WC_RESP_TIMEOUT_ERR"
    meaning = "The responder didn't answer in time."


class GeneralError(CompletionError):
    """IBV_WC_GENERAL_ERR."""

    status = 21
    status_name = "IBV_WC_GENERAL_ERR"
    meaning = "A transport error of no other kind."


class TagMatchingError(CompletionError):
    """IBV_WC_TM_ERR."""

    status = 22
    status_name = "IBV_WC_TM_ERR"
    meaning = "A tag-matching operation failed."


class TagRendezvousIncompleteError(CompletionError):
    """IBV_WC_TM_RNDV_INCOMPLETE."""

    status = 23
    status_name = "IBV_WC_TM_RNDV_INCOMPLETE"
    meaning = "A tag-matching rendezvous must be finished by software."


_BY_STATUS.update({cls.status: cls for cls in CompletionError.__subclasses__()})


def status_name(status: int) -> str:
    """The name of an enum ibv_wc_status, as in ``"IBV_WC_REM_ACCESS_ERR"``."""
    return _BY_STATUS[status].status_name if status in _BY_STATUS else f"status {status}"


def completion_error(
    *,
    status: int,
    vendor_err: int = 0,
    opcode: str = "work request",
    qp_num: int = 0,
    wr_id: int = 0,
    local: str = "",
    remote: str = "",
    note: str = "",
    disconnected: bool = False,
) -> CompletionError:
    """The exception for a work completion whose ``status`` (enum ibv_wc_status) is not IBV_WC_SUCCESS.

    ``disconnected``: the QP was sent to the error state because its peer disconnected.
    """
    cls = _BY_STATUS.get(status, CompletionError)
    if disconnected and cls is WrFlushError:
        cls = DisconnectedFlushError
    return cls(_Details(status, vendor_err, opcode, qp_num, wr_id, local, remote, note))

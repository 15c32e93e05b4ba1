"""Shared receive queues: one pool of receives for many QPs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from aiordma import _control, _pyverbs
from aiordma._cq import CompletionQueue
from aiordma._offload import Pending, in_thread, in_use, make_verbs_object, until, unused
from aiordma._operation import Completion
from aiordma._owned import Owned
from aiordma._post import Receiver
from aiordma._values import whole
from aiordma._waitable import Signal
from aiordma._workqueue import WorkQueue
from aiordma.errors import ClosedError, UsageError

if TYPE_CHECKING:
    from aiordma._memory import MemorySlice
    from aiordma.device import Device
    from aiordma.mlx5.dc import DCTarget
    from aiordma.qp import VerbsQueuePair

__all__ = ["SharedReceiveQueue"]

_SRQ_LIMIT = 1 << 1  # enum ibv_srq_attr_mask


class SharedReceiveQueue(Owned, Receiver):
    """An SRQ: QPs made with ``srq=`` take their receives from it.

    Made by :meth:`Device.create_srq`. Completions come in any order. :meth:`limit_reached` tells when it runs low.
    Close its QPs first.
    """

    kind: ClassVar[str] = "shared_receive_queues"
    close_order: ClassVar[int] = 1

    def __init__(self, device: Device, pyverbs: Any, cq: CompletionQueue, max_wr: int, max_sge: int) -> None:
        self._pyverbs = pyverbs
        self._cq = cq
        self._max_wr = max_wr
        self._address = _control.srq_address(pyverbs, device.context_address, device.pd_address)
        self._queue = WorkQueue(cq, "srq", max_wr, 0, self._address, 0, False, pyverbs)
        self._attach_queue(self._queue, device.pd, max_sge)
        self._qps: weakref.WeakSet[VerbsQueuePair | DCTarget] = weakref.WeakSet()
        self._limit: Signal | None = None
        self._belong(device)

    @property
    def pyverbs(self) -> Any:
        """The pyverbs SRQ. Don't post on it or close it: that goes through this object."""
        return self._pyverbs

    @property
    def address(self) -> int:
        """Address of the ``struct ibv_srq``."""
        return self._address

    @property
    def cq(self) -> CompletionQueue:
        """The CQ that its QPs' receives complete on."""
        return self._cq

    def check_usable(self, device: Device) -> None:
        """Raises where nothing of ``device`` can be made for it."""
        if self._device is not device:
            raise UsageError("the SRQ belongs to another device")
        if self.closed:
            raise ClosedError(f"{self!r} is closed")

    def attach(self, qp: VerbsQueuePair | DCTarget) -> None:
        self._qps.add(qp)

    def detach(self, qp: VerbsQueuePair | DCTarget) -> None:
        self._qps.discard(qp)

    def recv(self, local: MemorySlice | list[MemorySlice] | None) -> Completion:
        """Posts a receive into ``local``; completes when a message to any of its QPs has used it.

        ``completion.qp_num`` is 0: it was posted on no QP; ``completion.receiver_qp_num`` tells whose message it was.
        """
        return self._post_receive(local)

    async def limit_reached(self, limit: int) -> None:
        """Arms the limit and waits until fewer than ``limit`` receives are left (IBV_EVENT_SRQ_LIMIT_REACHED).

        The device's limit is one-shot: call it again after having posted more (ibv_modify_srq(3)). Where fewer are left
        already it returns at once, armed or not. One waiter at a time. :class:`ClosedError` when the SRQ is closed.
        """
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        limit = whole(limit)
        if not isinstance(limit, int) or not 1 <= limit <= self._max_wr:
            raise UsageError(f"limit: 1 to {self._max_wr}, not {limit!r}")
        self._device.control.hooks.verify()
        if self._limit is not None:
            raise UsageError("another task waits for this SRQ's limit")
        self._limit = signal = Signal(self._device.control.hooks)
        try:
            await Pending(self._device.control, self._arm_limit(limit))
            if self.closed:  # its receives are gone, and that isn't what was asked
                raise ClosedError(f"{self!r} is closed")
            if self._queue.in_flight < limit:
                return
            await signal
        finally:
            if self._limit is signal:
                self._limit = None

    async def _arm_limit(self, limit: int) -> None:
        def modify() -> None:
            if not _control.holds(self._pyverbs, self._address):
                raise ClosedError("the SRQ was destroyed by closing a pyverbs object")
            attr = _pyverbs.module("srq").SrqAttr(srq_limit=limit)
            try:
                self._pyverbs.modify(attr, _SRQ_LIMIT)
            except Exception as e:
                raise _pyverbs.translate(e, "ibv_modify_srq", f"limit {limit}") from e

        await in_use(self._device.control, self._address, modify)

    def on_limit(self) -> None:
        """The device's event loop saw IBV_EVENT_SRQ_LIMIT_REACHED."""
        signal, self._limit = self._limit, None
        if signal is not None:
            signal.finish()

    def statistics(self) -> dict[str, int]:
        """Counters of its receives."""
        return self._queue.statistics()

    def close(self) -> Pending[None]:
        """Destroys it; receives that no message used end with :class:`ClosedError`.

        Its QPs and DC targets must be closed before; what is being made for it meanwhile is closed with it.
        """
        return super().close()

    def _used_at(self) -> int:
        return self._address

    def _check_closable(self) -> None:
        using = [qp for qp in self._qps if not qp.closed]
        if using:
            raise UsageError(f"{len(using)} QPs still use this SRQ: close them first ({using[0]!r})")

    def _stop(self) -> None:
        self._queue.close()

    async def _quiesce(self) -> None:
        control = self._device.control
        await unused(control, self._address)
        # What was being made for it when it was closed is there now.
        for qp in list(self._qps):
            ended = Signal(control.hooks)
            qp.close().on_done(ended.finish)
            await until(ended)

    def _destroy(self) -> None:
        try:
            self._pyverbs.close()
        except Exception as e:
            raise _pyverbs.translate(e, "ibv_destroy_srq") from e

    def _release(self) -> None:
        signal, self._limit = self._limit, None
        if signal is not None:
            signal.fail(ClosedError("the SRQ was closed"))
        self._queue.abandon(ClosedError("the SRQ was closed before a message used this receive"))
        self._queue.release()
        self._cq.unreserve(self._max_wr)

    def __repr__(self) -> str:
        return f"<SharedReceiveQueue of {self._max_wr} on {self._device.name}{' closed' if self.closed else ''}>"


def create(device: Device, max_wr: int, max_sge: int) -> Pending[SharedReceiveQueue]:
    """See :meth:`Device.create_srq`."""
    max_wr, max_sge = whole(max_wr), whole(max_sge)
    if not (isinstance(max_wr, int) and isinstance(max_sge, int) and 1 <= max_wr <= 1 << 20 and 1 <= max_sge <= 32):
        raise UsageError(f"an SRQ of max_wr={max_wr!r}, max_sge={max_sge!r}: they are numbers from 1 (max_sge to 32)")
    return Pending(device.control, _create(device, max_wr, max_sge), dispose=True)


async def _create(device: Device, max_wr: int, max_sge: int) -> SharedReceiveQueue:
    cq = await device.engine.acquire("recv", max_wr)

    def make() -> Any:
        module = _pyverbs.module("srq")
        try:
            return module.SRQ(device.pd, module.SrqInitAttr(module.SrqAttr(max_wr=max_wr, max_sge=max_sge)))
        except Exception as e:
            raise _pyverbs.translate(e, "ibv_create_srq", f"max_wr {max_wr}, max_sge {max_sge}") from e

    try:
        pyverbs = await make_verbs_object(device.control, make)
        try:
            srq = SharedReceiveQueue(device, pyverbs, cq, max_wr, max_sge)
        except BaseException:
            await in_thread(device.control, pyverbs.close)
            raise
    except BaseException:
        cq.unreserve(max_wr)
        raise
    device.adopt(srq)
    return srq

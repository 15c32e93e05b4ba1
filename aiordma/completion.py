"""The completion engine: completion queues, their channels' descriptors on the event loop, asynchronous events.

Each CQ has a completion channel of its own, so that an event is never taken for another CQ's, and send and receive
completions come on different CQs, so that receives that wait for long don't keep sends from being polled without events.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from aiordma import _control, _pyverbs
from aiordma._backends import Watch
from aiordma._cq import CompletionQueue, QueueTable
from aiordma._offload import Control, make_verbs_object, until
from aiordma._operation import Completion
from aiordma._values import whole
from aiordma._waitable import Signal
from aiordma.errors import ClosedError, DeviceFatalError, UsageError

__all__ = ["Completion", "CompletionEngine"]

DEFAULT_CQ_DEPTH = 4096


class _Watched:
    """A CQ and the watch on its channel."""

    def __init__(self, queue: CompletionQueue, watch: Watch) -> None:
        self.queue = queue
        self.watch = watch


class CompletionEngine:
    """The CQs of one device on one event loop.

    It makes CQs as QPs need them, each large enough for every work request of its QPs. ``statistics()`` has the
    counters of each. ``spin_us``: before a task parks, its CQ is polled for up to so many microseconds (seldom,
    while spinning doesn't help); 0 turns that off. ``cq_depth``: entries of the first CQ of each role.
    """

    def __init__(
        self, control: Control, context: Any, context_address: int, max_cqe: int, spin_us: float, cq_depth: int
    ) -> None:
        self._control = control
        self._context = context
        self._context_address = context_address
        self._max_cqe = max_cqe
        self._spin_us = spin_us
        self._cq_depth = cq_depth
        self._table = QueueTable()
        self._cqs: dict[str, list[_Watched]] = {"send": [], "recv": []}
        self._growing: dict[str, Signal] = {}
        self._vector = 0
        self._closed = False

    async def acquire(self, role: str, entries: int) -> CompletionQueue:
        """Inside a control operation: a CQ for ``role`` with ``entries`` entries set aside; undone by unreserve()."""
        while True:
            if self._closed:  # pyverbs doesn't survive that a context that is closed is asked for anything
                raise ClosedError("the device was closed")
            for watched in self._cqs[role]:
                if watched.queue.reserve(entries):
                    return watched.queue
            if role not in self._growing:
                break
            # Many QPs that are made at the same time shall have the next CQ in common, and not one each.
            await until(self._growing[role])
        if entries > self._max_cqe:
            raise UsageError(
                f"{'max_send_wr' if role == 'send' else 'max_recv_wr or max_wr'} of {entries}: the device's CQs have at most "
                f"{self._max_cqe} entries"
            )
        # Doubled each time, so that a thousand QPs have a few CQs and not a hundred.
        depth = min(self._max_cqe, max(self._cq_depth << min(len(self._cqs[role]), 8), entries))
        grown = self._growing[role] = Signal(self._control.hooks)
        try:
            queue = await self.create(role, depth)
            # Before those who wait take what they want.
            if not queue.reserve(entries):
                raise queue.error or ClosedError("the device was closed")
            return queue
        finally:
            del self._growing[role]
            grown.finish()

    async def create(self, role: str, depth: int) -> CompletionQueue:
        """Inside a control operation: another CQ of at least ``depth`` entries, watched by the loop."""
        vector = self._vector = (self._vector + 1) % max(1, self._context.num_comp_vectors)
        channel, cq, addresses = await make_verbs_object(self._control, self._make, depth, vector)
        queue = CompletionQueue(self._control.hooks, self._table, *addresses, cq, channel, self._spin_us)
        fd = _control.channel_fd(addresses[1])
        if self._closed:
            raise ClosedError("the device was closed")
        self._cqs[role].append(_Watched(queue, self._control.backend.watch(fd, queue.on_readable)))
        return queue

    def _make(self, depth: int, vector: int) -> tuple[Any, Any, tuple[int, int]]:
        cq_module = _pyverbs.module("cq")
        try:
            channel = cq_module.CompChannel(self._context)
        except Exception as e:
            raise _pyverbs.translate(e, "ibv_create_comp_channel") from e
        try:
            cq = cq_module.CQ(self._context, depth, None, channel, vector)
        except Exception as e:
            channel.close()
            raise _pyverbs.translate(e, "ibv_create_cq", f"{depth} entries") from e
        channel_address = _control.channel_address(channel, self._context_address)
        # Loops differ in what they do to a descriptor that they watch, and reading events must never block.
        os.set_blocking(_control.channel_fd(channel_address), False)
        return channel, cq, (_control.cq_address(cq, self._context_address), channel_address)

    def fail(self, error: BaseException) -> None:
        """The device is lost: everything in flight ends with ``error``."""
        for watched in self._all():
            watched.queue.fail(error)

    def on_cq_error(self, address: int, error: BaseException) -> None:
        """IBV_EVENT_CQ_ERR: the operations on that CQ end with ``error``."""
        for watched in self._all():
            if _control.cq_address(watched.queue.pyverbs, self._context_address) == address:
                watched.queue.fail(error)

    def _all(self) -> list[_Watched]:
        return [watched for role in self._cqs.values() for watched in role]

    @property
    def completion_queues(self) -> list[CompletionQueue]:
        """The CQs; each has the pyverbs objects as ``pyverbs`` and ``pyverbs_channel``."""
        return [watched.queue for watched in self._all()]

    @property
    def spin_us(self) -> float:
        """The spin budget in microseconds."""
        return self._spin_us

    @spin_us.setter
    def spin_us(self, value: float) -> None:
        check_spin(value)
        for watched in self._all():
            watched.queue.spin_us = value
        self._spin_us = value

    def statistics(self) -> dict[str, list[dict[str, int]]]:
        """Counters of each CQ, by role."""
        return {role: [watched.queue.statistics() for watched in cqs] for role, cqs in self._cqs.items()}

    def detach(self) -> list[tuple[Any, Any]]:
        """On the loop's thread, first step of closing: no descriptor is watched any more, nothing is polled.

        Returns the pyverbs objects (CQ, channel) for :meth:`destroy`.
        """
        self._closed = True
        left = []
        for watched in self._all():
            with contextlib.suppress(RuntimeError):  # the loop is closed already, and its watches with it
                watched.watch.close()
            watched.queue.close()
            left.append((watched.queue.pyverbs, watched.queue.pyverbs_channel))
        self._cqs = {"send": [], "recv": []}
        return left

    @staticmethod
    def destroy(objects: list[tuple[Any, Any]]) -> None:
        """Any thread, second step of closing: the verbs objects, CQ before channel; all of them, whatever fails."""
        failed: Exception | None = None
        for cq, channel in objects:
            try:
                cq.close()
                channel.close()
            except Exception as e:
                _pyverbs.keep(cq, channel)
                failed = failed or e
        if failed is not None:
            raise _pyverbs.translate(failed, "ibv_destroy_cq") from failed


def check_spin(spin_us: float) -> None:
    """:class:`UsageError` for a spin budget out of range."""
    spin_us = whole(spin_us)
    if not isinstance(spin_us, int | float) or not 0 <= spin_us <= 10_000:
        raise UsageError(f"spin_us: 0 to 10000 microseconds, not {spin_us!r}")


def depth_of_cqs(asked: int | None, max_cqe: int, name: str) -> int:
    """Entries of the first CQs; :class:`UsageError` where the device can't have what was asked for."""
    if asked is None:
        return min(DEFAULT_CQ_DEPTH, max_cqe)
    if not 1 <= asked <= max_cqe:
        raise UsageError(f"cq_depth: 1 to {max_cqe} entries, which is what {name} can have, not {asked!r}")
    return asked


def device_fatal(name: str) -> DeviceFatalError:
    """What everything on a device ends with after IBV_EVENT_DEVICE_FATAL."""
    return DeviceFatalError(f"{name} reported a fatal error (IBV_EVENT_DEVICE_FATAL): close it and open it again")

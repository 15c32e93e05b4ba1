"""Connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from aiordma._offload import Pending
from aiordma._owned import Owned
from aiordma._waitable import Signal
from aiordma.cm._address import text
from aiordma.cm._endpoint import End, check_timeout
from aiordma.cm._ends import HasEnds
from aiordma.completion import Completion
from aiordma.memory import RemoteBuffer
from aiordma.qp import QueuePair

if TYPE_CHECKING:
    from aiordma._post import Source, Target

__all__ = ["Connection"]

# How long aclose() waits for the peer to answer.
GOODBYE_SECONDS = 2.0


class Connection(HasEnds, Owned):
    """A connected QP, and the connection manager's knowledge of its peer.

    Made by :func:`aiordma.connect` and :meth:`Request.accept`. Operations are those of :attr:`qp`; the most used are here
    too. When the peer disconnects, or its process ends, everything in flight and everything posted later ends with
    :class:`DisconnectedFlushError`, a ConnectionResetError (what had failed before ends with its own error).

    Use it as ``async with``, or ``await aclose()``; a forgotten one warns (ResourceWarning) and is closed. It's closed
    with its device too.
    """

    kind: ClassVar[str] = "connections"
    close_order: ClassVar[int] = -1

    def __init__(self, end: End) -> None:
        assert end.qp is not None
        end.owned = True
        self._end = end
        self._qp = end.qp
        self._device_closing: Pending[None] | None = None
        self._gone = Signal(end.control.hooks)
        self._belong(end.qp.device)
        end.on_lost = self._gone.finish
        if end.core.lost:
            # It was lost before anybody knew that it was there.
            self._gone.finish()
            end.work()
        end.qp.device.adopt(self)

    # ---------------------------------------------------------------- what it is

    @property
    def qp(self) -> QueuePair:
        """The QP, in RTS. It's closed by closing the connection."""
        return self._qp

    @property
    def prepared(self) -> Any:
        """What the ``prepare`` callback returned."""
        return self._end.prepared

    @property
    def max_rd_atomic(self) -> int:
        """RDMA reads and atomics that this side can have in flight, as negotiated."""
        return self._end.negotiated.initiated

    @property
    def max_dest_rd_atomic(self) -> int:
        """RDMA reads and atomics that the peer can have in flight, as negotiated."""
        return self._end.negotiated.served

    @property
    def disconnected(self) -> bool:
        """Whether the peer has disconnected."""
        return self._end.core.lost

    # ---------------------------------------------------------------- operations

    def send(self, local: Source, *, imm: int | None = None) -> Completion:
        """See :meth:`QueuePairBase.send`."""
        return self._qp.send(local, imm=imm)

    def recv(self, local: Target) -> Completion:
        """See :meth:`QueuePairBase.recv`."""
        return self._qp.recv(local)

    def rdma_write(self, local: Source, remote: RemoteBuffer, *, imm: int | None = None) -> Completion:
        """See :meth:`QueuePairBase.rdma_write`."""
        return self._qp.rdma_write(local, remote, imm=imm)

    def rdma_read(self, local: Target, remote: RemoteBuffer) -> Completion:
        """See :meth:`QueuePairBase.rdma_read`."""
        return self._qp.rdma_read(local, remote)

    # ---------------------------------------------------------------- its end

    async def wait_disconnected(self) -> None:
        """Until the peer disconnects, or this side has closed it."""
        await self._gone

    def close(self) -> Pending[None]:
        """Ends it without waiting for the peer's answer: tells it, flushes and destroys the QP, and lets go of the rest.

        Started by the call, awaited or not; a second call gives the same operation.
        """
        return super().close()

    async def aclose(self, timeout: float | None = GOODBYE_SECONDS) -> None:
        """Disconnects, waits until the peer has done the same, and closes everything that belongs to it.

        The peer's side goes to the error state by itself when it hears of this; one that doesn't answer within
        ``timeout`` seconds isn't waited for. What is in flight on this side is flushed: await what matters before.
        """
        timeout = check_timeout(timeout)
        if not self.closed:
            self.device.control.hooks.verify()
            self._end.core.close(patient=True)
            self._end.work()
            try:
                with anyio.move_on_after(timeout):
                    await self._gone
            except BaseException:
                await self.device.control.backend.shielded(self.close())
                raise
        await self.device.control.backend.shielded(self.close())
        if self._device_closing is not None:
            await self._device_closing

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        await self.aclose()

    def _stop(self) -> None:
        self._end.core.close(patient=False)

    async def _quiesce(self) -> None:
        self._end.work()
        await self._end.until_ended()

    def _destroy(self) -> None:
        self._end.link.destroy_now()

    def _release(self) -> None:
        self._gone.finish()

    def _finish(self) -> None:
        super()._finish()
        # Not before: closing the device closes what belongs to it.
        if self._end.lease is not None:
            self._device_closing = self._end.lease.release() or self._device_closing

    def close_now(self) -> None:
        """Without a loop, and so is what becomes of the device."""
        lease, self._end.lease = self._end.lease, None
        super().close_now()
        if lease is not None:
            lease.release_now()

    @property
    def teardown(self) -> Any:
        return self._end.link.destroy_now

    def __repr__(self) -> str:
        state = "closed" if self.closed else "disconnected" if self.disconnected else "open"
        return f"<Connection to {text(self.remote_address)} over {self.via} {state}>"

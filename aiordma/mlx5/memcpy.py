"""Copies done by the device: the CPU goes on meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from aiordma._memory import MemorySlice
from aiordma._offload import Pending, outcome
from aiordma._operation import Completion
from aiordma._owned import Owned
from aiordma._values import whole
from aiordma.errors import BufferAccessError, RdmaError, UnsupportedError, UsageError
from aiordma.mlx5.qp import Mlx5QueuePair, create_qp

if TYPE_CHECKING:
    from aiordma.device import Device

__all__ = ["DmaEngine", "create_dma_engine"]


class DmaEngine(Owned):
    """Copies between registered buffers of this process by the device's DMA engine (mlx5dv_wr_memcpy).

    Made by :func:`create_dma_engine`, with a pair of QPs of its own that are connected to each other. Any number of
    tasks may copy at the same time. Use it as ``async with``, or close it.
    """

    kind: ClassVar[str] = "dma_engines"
    close_order: ClassVar[int] = -1  # before its QPs
    teardown: ClassVar[None] = None

    def __init__(self, device: Device, qps: tuple[Mlx5QueuePair, Mlx5QueuePair], chunk: int, depth: int) -> None:
        self._qps = qps
        self._memcpy = qps[0].memcpy
        self._chunk = chunk
        self._depth = depth
        self._belong(device)

    @property
    def qp(self) -> Mlx5QueuePair:
        """The QP that the copies are posted on."""
        return self._qps[0]

    @property
    def max_length(self) -> int:
        """Bytes of one work request; longer copies are split."""
        return self._chunk

    async def copy(
        self,
        dst: MemorySlice,
        src: MemorySlice,
        *,
        after: Completion | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Copies ``src`` to ``dst``; completes when all bytes are there, and gives their number.

        ``dst`` is at least as long as ``src``; the two don't overlap (:class:`UsageError`: pieces are copied in parallel, so
        the result would be undefined). Longer copies than ``max_length`` are split, with several pieces in flight.
        ``after``: an operation that must have happened before: on this engine's QP it's ordered by FENCE, any other is
        awaited first (its error ends the copy). ``progress(done, total)`` is called on the loop as pieces complete.

        Cancelled, no more pieces are posted; those in flight go on, and keep their buffers until they have completed.

        An error of the device ends the engine too: its QP is in the error state, and later copies are flushed.
        """
        try:
            total = src.length
        except AttributeError:
            raise _no_memory(src) from None
        if after is None and 0 < total <= self._chunk:
            # Nearly every copy: memcpy() checks all that has to be.
            await self._memcpy(dst, src)
            if progress is not None:
                progress(total, total)
            return total
        _check_pair(dst, src)
        fence = False
        if after is not None:
            if self.qp._posted_here(after) and not after.done:
                fence = True
            else:
                await after
        if total == 0:
            return 0
        if total <= self._chunk:
            await self.qp.memcpy(dst, src, fence=fence)
            if progress is not None:
                progress(total, total)
            return total
        return await self._copy_in_pieces(dst, src, fence, progress)

    async def _copy_in_pieces(
        self, dst: MemorySlice, src: MemorySlice, fence: bool, progress: Callable[[int, int], object] | None
    ) -> int:
        total, posted, done = src.length, 0, 0
        with _Flying() as flying:
            while done < total:
                while posted < total and len(flying) < self._depth:
                    size = min(self._chunk, total - posted)
                    piece = slice(posted, posted + size)
                    # The fence of the first holds the others back too: a send queue starts its requests in order.
                    flying.append((self.qp.memcpy(dst[piece], src[piece], fence=fence and posted == 0), size))
                    posted += size
                done = await _take(flying, done, total, progress)
        return total

    async def copy_many(
        self,
        pairs: Iterable[tuple[MemorySlice, MemorySlice]],
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Copies each ``(dst, src)``, many in flight at a time, in no particular order; gives the bytes copied.

        All pairs are checked before the first is posted. ``progress(done, total)`` counts bytes.
        """
        work = list(pairs)
        total = sum(_check_pair(dst, src) for dst, src in work)
        done = 0
        with _Flying() as flying:
            for dst, src in work:
                for start in range(0, src.length, self._chunk):
                    if len(flying) >= self._depth:
                        done = await _take(flying, done, total, progress)
                    part = src[start : min(start + self._chunk, src.length)]
                    flying.append((self.qp.memcpy(dst[start : start + part.length], part), part.length))
            while flying:
                done = await _take(flying, done, total, progress)
        return total

    def close(self) -> Pending[None]:
        """Closes its QPs; started by the call. Copies in flight end with :class:`WrFlushError`."""
        return super().close()

    async def _quiesce(self) -> None:
        for closing in [qp.close() for qp in self._qps]:
            await outcome(closing)

    def _destroy(self) -> None:
        """Its QPs are the device's too: in a teardown without a loop that is who closes them."""

    def __repr__(self) -> str:
        return f"<DmaEngine on {self._device.name}{' closed' if self.closed else ''}>"


def _check_pair(dst: MemorySlice, src: MemorySlice) -> int:
    """How many bytes are to be copied."""
    for part in (dst, src):
        if not isinstance(part, MemorySlice):
            raise _no_memory(part)
    total = src.length
    if total > dst.length:
        raise UsageError(f"{total} bytes don't fit into {dst!r}")
    if src.region is dst.region and src.addr < dst.addr + total and dst.addr < src.addr + total:
        raise UsageError("source and target of a copy overlap: its pieces are copied in any order")
    return total


def _no_memory(part: object) -> BufferAccessError:
    return BufferAccessError(f"a copy is between slices of registered memory, not with {type(part).__name__}")


class _Flying(deque[tuple[Completion, int]]):
    """Pieces in flight. When one fails the others do too, and their errors are told by its."""

    def __enter__(self) -> _Flying:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RdmaError):
            for operation, _size in self:
                operation.on_finish(operation.exception)


async def _take(
    flying: deque[tuple[Completion, int]], done: int, total: int, progress: Callable[[int, int], object] | None
) -> int:
    """Waits for the oldest piece; gives how many bytes are done."""
    operation, size = flying.popleft()
    await operation
    if progress is not None:
        progress(done + size, total)
    return done + size


def create_dma_engine(device: Device, *, depth: int = 32, chunk: int | None = None) -> Pending[DmaEngine]:
    """Makes a :class:`DmaEngine`, off the loop; or ``async with``.

    ``depth``: work requests in flight. ``chunk``: bytes of one, at most (and by default) the device's
    max_wr_memcpy_length, or 64 MiB if that's less. Raises :class:`UnsupportedError`, naming the device, where it has no DMA
    memcpy (mlx5dv_query_device(3): max_wr_memcpy_length 0).
    """
    device._check_open()
    if device.mlx5 is None:
        raise UnsupportedError(device.name, "DMA memcpy", "it isn't an mlx5 device, or DEVX isn't permitted")
    limit = int(device.mlx5.max_wr_memcpy_length)
    if limit == 0:
        raise UnsupportedError(device.name, "DMA memcpy", "max_wr_memcpy_length is 0 (mlx5dv_query_device(3))")
    depth = whole(depth)
    if not isinstance(depth, int) or not 1 <= depth <= 4096:
        raise UsageError(f"depth: 1 to 4096 work requests, not {depth!r}")
    size = min(limit, 64 << 20) if chunk is None else whole(chunk)
    if not isinstance(size, int) or not 1 <= size <= limit:
        raise UsageError(f"chunk: 1 to {limit} bytes, which is {device.name}'s max_wr_memcpy_length, not {chunk}")
    return device._made(Pending(device.control, _create(device, depth, size), dispose=True))


async def _create(device: Device, depth: int, chunk: int) -> DmaEngine:
    made: list[Mlx5QueuePair] = []
    try:
        made.append(await outcome(create_qp(device, memcpy=True, max_send_wr=depth, max_recv_wr=1)))
        made.append(await outcome(create_qp(device, max_send_wr=1, max_recv_wr=1)))
        first, second = made
        await outcome(first.connect(second.info))
        await outcome(second.connect(first.info))
    except BaseException:
        for qp in made:
            qp.close()
        raise
    engine = DmaEngine(device, (first, second), chunk, depth)
    device.adopt(engine)
    return engine

"""What a device owns, and how it ends: once, by whoever comes first, and never unnoticed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from aiordma import _pyverbs
from aiordma._offload import Pending, in_thread, unused
from aiordma._waitable import no_copy

if TYPE_CHECKING:
    from aiordma.device import Device

__all__ = ["Owned"]


#: A class on a base in C that has fields for what is kept in Owned needs no dict.
_NO_DICT: tuple[str, ...] = ()


class Owned:
    """Base of memory regions, QPs, SRQs, mkeys and whatever else is made on a device and closed before it.

    A subclass calls :meth:`_belong` when it's complete, and says what its end consists of, in this order:
    :meth:`_stop`, :meth:`_quiesce`, :meth:`_destroy`, :meth:`_release`.
    """

    __slots__ = _NO_DICT

    kind: ClassVar[str]
    """Names it in the device's statistics."""
    close_order: ClassVar[int]
    """What has the smaller one is closed first."""

    _device: Device
    _pyverbs: Any = None
    _pid: int | None = None  # None until it's complete; afterwards the process that it belongs to
    _closed = False
    _closing: Pending[None] | None = None
    _released = False

    def _belong(self, device: Device) -> None:
        self._device = device
        self._pid = os.getpid()

    @property
    def device(self) -> Device:
        """The device it belongs to."""
        return self._device

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._closed

    @property
    def teardown(self) -> Callable[[], object] | None:
        """Destroys the verbs object, any number of times, and keeps nothing else alive."""
        close: Callable[[], object] = self._pyverbs.close
        return close

    # ---------------------------------------------------------------- what its end consists of

    def _used_at(self) -> int:
        """What calls under way are known by, see :func:`aiordma._offload.using`: the end waits for them."""
        return id(self)

    def _check_closable(self) -> None:
        """Raises where closing it now would be a mistake; nothing has happened then."""

    def _stop(self) -> None:
        """On the loop's thread, at once: no new use from here on."""

    async def _quiesce(self) -> None:
        """Waits for the end of what uses it."""

    def _destroy(self) -> None:
        """In any thread: destroys the verbs object."""
        raise NotImplementedError

    def _release(self) -> None:
        """On the loop's thread, once, whether or not destroying it succeeded: gives back what it held."""

    # ---------------------------------------------------------------- ending it

    def close(self) -> Pending[None]:
        """Destroys it, off the loop; started by the call, awaited or not; a second call gives the same operation."""
        if self._closing is None:
            self._device.control.hooks.verify()
            self._check_closable()
            self._closed = True
            self._stop()
            if self._closing is None:  # else a callback of something that ended there has closed it too
                self._closing = Pending(self._device.control, self._close())
        return self._closing

    async def _close(self) -> None:
        await self._quiesce()
        await unused(self._device.control, self._used_at())
        try:
            await in_thread(self._device.control, self._destroy)
        except Exception:
            _pyverbs.keep(self)
            raise
        finally:
            self._finish()

    def _finish(self) -> None:
        if not self._released:
            self._released = True
            self._release()
            self._device.forget(self)

    def close_now(self) -> None:
        """Destroys it in this thread, waiting for nothing; for teardown, when no loop runs."""
        if self._closing is None:
            self._closed = True
            self._stop()
            self._closing = Pending(self._device.control, _nothing())
        # Also what began to close on a loop that has ended since.
        if not self._released:
            try:
                self._destroy()
            except Exception:
                _pyverbs.keep(self)
                raise
            finally:
                self._finish()

    def __reduce__(self) -> NoReturn:
        no_copy(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        await self._device.control.backend.shielded(self.close())

    def __del__(self) -> None:
        # A child of fork() has its parent's objects, which aren't its to close.
        if self._pid != os.getpid() or self._closed or self._device.closed:
            return
        try:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
        finally:
            self._forgotten()

    def _forgotten(self) -> None:
        self._device.dispose(self)


async def _nothing() -> None:
    return None

"""Memory regions: Python buffers registered with a device."""

from __future__ import annotations

import logging
import mmap
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from aiordma import _control, _pyverbs
from aiordma._memory import BufferPin, MemorySlice, Region, RemoteBuffer
from aiordma._offload import Pending, delay, make_in_thread, until
from aiordma._owned import Owned
from aiordma._waitable import Signal
from aiordma.access import Access, check_access
from aiordma.errors import BufferAccessError, UnsupportedError, UsageError, VerbsError

if TYPE_CHECKING:
    from aiordma.device import Device

__all__ = ["MemoryRegion", "MemorySlice", "RemoteBuffer"]

_log = logging.getLogger("aiordma")

# After so long a log line tells what closing a region waits for.
SLOW_CLOSE_SECONDS = 1.0


def pin(buffer: object, access: Access) -> BufferPin:
    """The buffer's memory, held; :class:`BufferAccessError` says what is wrong with it."""
    source = buffer
    if type(buffer).__module__.partition(".")[0] == "torch":
        source = _torch_array(buffer)
    writable = bool(access & Access.LOCAL_WRITE)
    try:
        held = BufferPin(source, writable)
    except TypeError as e:
        raise BufferAccessError(
            f"{type(buffer).__name__} has no buffer to register: pass a bytearray, memoryview, mmap, numpy array, CPU "
            "tensor or anything else with the buffer protocol"
        ) from e
    except (BufferError, ValueError) as e:
        if isinstance(e, ValueError) and isinstance(source, memoryview | mmap.mmap):
            raise BufferAccessError(f"the {type(buffer).__name__} has no memory any more: {e}") from e
        if writable and _is_readonly(source):
            raise BufferAccessError(
                f"{type(buffer).__name__} is read-only, but {access!r} lets the device write to it: pass "
                "access=Access.NONE (a source of sends and writes) or Access.REMOTE_READ, or a writable buffer"
            ) from e
        raise BufferAccessError(
            f"the {type(buffer).__name__} isn't C-contiguous, so it can't be one region: copy it "
            "(numpy.ascontiguousarray), or register its base array and describe the layout"
        ) from e
    if _holds_pointers(source):
        held.release()
        raise BufferAccessError(
            f"the {type(buffer).__name__} holds Python objects: its memory is pointers of this process, which nobody else "
            "can use and the device must not write"
        )
    if held.nbytes == 0:
        held.release()
        raise UsageError(f"the {type(buffer).__name__} is empty: a memory region has at least one byte")
    return held


def _torch_array(tensor: Any) -> Any:
    """A numpy view of a CPU tensor, which shares its memory and keeps it alive."""
    if not hasattr(tensor, "numpy"):
        return tensor
    if tensor.device.type != "cpu":
        raise BufferAccessError(f"the tensor is on {tensor.device}: only CPU tensors can be registered")
    if not tensor.is_contiguous():
        raise BufferAccessError("the tensor isn't contiguous: call .contiguous() first, which copies it")
    # dtypes that numpy lacks (bfloat16) are memory all the same.
    torch = sys.modules["torch"]
    return tensor.detach().view(-1).view(torch.uint8).numpy() if tensor.numel() else tensor.detach().numpy()


def _holds_pointers(source: Any) -> bool:
    if getattr(getattr(source, "dtype", None), "hasobject", False):
        return True
    try:
        with memoryview(source) as view:
            # A struct's format has the names of its fields in it, between colons (PEP 3118).
            return "O" in re.sub(":[^:]*:", "", view.format)
    except (BufferError, ValueError, TypeError):  # a format that a memoryview can't tell
        return False


def _is_readonly(source: Any) -> bool:
    try:
        with memoryview(source) as view:
            return view.readonly
    except (BufferError, ValueError, TypeError):
        return False


class MemoryRegion(Owned, MemorySlice):
    """A buffer registered with a device; itself the slice of all its bytes.

    Made by :meth:`Device.reg_mr`. While it's open the buffer is exported: it can be neither freed nor resized (a
    ``bytearray`` refuses to grow, an ``mmap`` to close). ``mr[a:b]`` are local slices, ``mr.remote()`` describes it to a
    peer. ``close()`` waits until no work request uses it. Use it as ``async with``, or close it; a forgotten one warns
    (ResourceWarning).
    """

    kind: ClassVar[str] = "memory_regions"
    close_order: ClassVar[int] = 4

    def __init__(
        self, device: Device, region: Region, registration: _control.Registration | None, pyverbs: Any
    ) -> None:
        MemorySlice.__init__(self, region)
        self._registration = registration
        self._pyverbs = pyverbs
        self._belong(device)

    @property
    def teardown(self) -> Callable[[], object] | None:
        # One that wraps somebody else's MR is theirs to deregister.
        return None if self._registration is None else partial(_control.dereg_mr, self._registration)

    @property
    def handle(self) -> int:
        """The kernel's handle of the registration."""
        if self._registration is not None:
            return self._registration.handle
        handle: int = self._pyverbs.handle
        return handle

    @property
    def pyverbs(self) -> Any:
        """A pyverbs MR of the same registration (imported by its handle; ibv_import_mr(3)).

        It's valid until this region is closed. :class:`UnsupportedError` where the provider can't import.
        """
        if self._pyverbs is None:
            module = _pyverbs.module("mr")
            try:
                self._pyverbs = module.MR(self._device.pd, handle=self.handle)
            except Exception as e:
                raise UnsupportedError(self._device.name, "importing an MR by its handle", str(e)) from e
        return self._pyverbs

    def close(self) -> Pending[None]:
        """Deregisters it (ibv_dereg_mr(3)), off the loop, as soon as no work request uses it.

        Started by the call, awaited or not; a second call gives the same operation. New work requests are refused at
        once. A receive that no message comes for uses it until its QP or SRQ is closed: close those first. Leaving
        ``async with`` by an error doesn't wait for work requests, and otherwise the wait can be cancelled; the closing
        goes on.
        """
        return super().close()

    def _stop(self) -> None:
        self.region.shut()

    async def _quiesce(self) -> None:
        control = self._device.control
        idle = Signal(control.hooks)
        self.region.notify_idle(idle)
        if not idle.done:
            self._device.resolve_unsignaled()
        await until(idle)

    def _destroy(self) -> None:
        if self._registration is not None:
            _control.dereg_mr(self._registration)

    def _finish(self) -> None:
        # Memory that couldn't be deregistered stays held: the device may still use it.
        if self._registration is None or not self._registration.alive:
            super()._finish()

    def _release(self) -> None:
        self.region.release()

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        control = self._device.control
        closing = self.close()
        if not self.region.inflight:
            await control.backend.shielded(closing)
        elif error is None:
            await self._wait_for_requests(closing)
        # Else it goes on by itself when they are over. A receive that no message comes for is over when its QP is closed,
        # perhaps by an outer `async with`, which the error must get to.

    async def _wait_for_requests(self, closing: Pending[None]) -> None:
        """Waits for the end of work requests, which may never come; so this can be cancelled, and says what it does."""
        timer = await delay(self._device.control, SLOW_CLOSE_SECONDS)
        waiting = True

        def late() -> None:
            if waiting and not closing.done:
                _log.warning(
                    "closing %r waits for %d work requests that use it; is one a receive that no message comes for? Then "
                    "close its QP first",
                    self,
                    self.region.inflight,
                )

        timer.on_finish(late)
        try:
            await closing
        finally:
            waiting = False
            timer.finish()

    def _forgotten(self) -> None:
        # No work request holds it (it would be alive), so it can go now.
        self.close_now()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return (
            f"<MemoryRegion {self.addr:#x}+{self.length} lkey={self.lkey:#x} rkey={self.rkey:#x} "
            f"{Access(self.access)!r}{state}>"
        )


def register(device: Device, buffer: object, access: int) -> Pending[MemoryRegion]:
    """See :meth:`Device.reg_mr`."""
    flags = check_access(access)
    held = pin(buffer, flags)
    return Pending(device.control, _register(device, held, flags), dispose=True)


async def _register(device: Device, held: BufferPin, access: Access) -> MemoryRegion:
    try:
        registration = await make_in_thread(
            device.control,
            _control.dereg_mr,
            _control.reg_mr,
            device.pd_address,
            held.address,
            held.nbytes,
            int(access),
        )
    except VerbsError as e:
        held.release()
        raise VerbsError(
            e.verb,
            e.errno or 0,
            _pyverbs.memlock_hint(f"registering {held.nbytes} bytes") if e.errno == 12 else f"{access!r}",
        ) from None
    region = Region(held.address, held.nbytes, registration.lkey, registration.rkey, int(access), device.pd, held)
    mr = MemoryRegion(device, region, registration, None)
    device.adopt(mr)
    return mr


def wrap(device: Device, pyverbs_mr: Any, access: int) -> MemoryRegion:
    """See :meth:`Device.wrap_mr`."""
    if not isinstance(pyverbs_mr, _pyverbs.module("mr").MR):
        raise UsageError(f"wrap_mr() takes a pyverbs MR, not {type(pyverbs_mr).__name__}")
    if not _control.mr_address(pyverbs_mr, device.context_address, device.pd_address):
        raise UsageError(f"the pyverbs MR is closed, or not of this device's PD ({device.name})")
    address = int(pyverbs_mr.buf or 0)
    # Device memory has no address in this process: nothing of it can be copied here.
    region = Region(
        address,
        pyverbs_mr.length,
        pyverbs_mr.lkey,
        pyverbs_mr.rkey,
        int(check_access(access)),
        device.pd,
        None,
        direct=address != 0,
    )
    return MemoryRegion(device, region, None, pyverbs_mr)

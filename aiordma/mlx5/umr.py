"""UMR: memory keys whose layout is registered by a work request, so that one RDMA operation moves scattered data.

An :class:`Mkey` is made once and bound, again and again, to lists of buffers or to interleaved (strided) patterns by the
posting calls of :class:`Mlx5QueuePair`; :func:`map_strided` finds the layout for a numpy view.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from aiordma import _control, _pyverbs
from aiordma._mlx5 import MkeyBase
from aiordma._offload import Pending, in_thread, outcome, until
from aiordma._owned import Owned
from aiordma._values import whole
from aiordma._waitable import Signal
from aiordma.errors import UnsupportedError, UsageError, VerbsError
from aiordma.mlx5.devx import HcaCap, query_hca_cap

if TYPE_CHECKING:
    from aiordma.device import Device

__all__ = ["Mkey", "create_mkey"]

_caps: weakref.WeakKeyDictionary[Device, HcaCap] = weakref.WeakKeyDictionary()
_INDIRECT = 1  # MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT (mlx5dv.h)


class Mkey(Owned, MkeyBase):
    """An indirect memory key (mlx5dv_create_mkey(3)).

    Made by :func:`create_mkey`. Bound to a layout by ``qp.register_list``, ``qp.register_interleaved`` or
    ``qp.map_strided``, it's used like a memory region that starts at 0: ``mkey[0:64]`` is a local slice (offsets into
    the data that the layout describes, range-checked), ``mkey.remote()`` describes it to a peer. ``qp.invalidate``
    unbinds it. ``close()`` waits until no work request of this process uses it.
    """

    kind: ClassVar[str] = "mkeys"
    close_order: ClassVar[int] = 3

    def __init__(self, device: Device, pyverbs: Any, max_entries: int) -> None:
        self._pyverbs = pyverbs
        self._setup_mkey(_control.mkey_address(pyverbs), max_entries, device.pd)
        self.children: list[Mkey] = []
        """Mkeys that this one's layout is made of, where it's nested; they're its own to close."""
        self.mapping = False
        """Whether a layout is being made by ``map_strided``."""
        self.invalidating: Pending[None] | None = None
        """The invalidation under way."""
        self._belong(device)

    @property
    def pyverbs(self) -> Any:
        """The pyverbs Mlx5Mkey."""
        return self._pyverbs

    def close(self) -> Pending[None]:
        """Destroys it (mlx5dv_destroy_mkey(3)), off the loop, as soon as no work request of this process uses it.

        Started by the call; a second call gives the same operation. The regions of its layout may be deregistered
        afterwards.
        """
        return super().close()

    def _stop(self) -> None:
        if self.region is not None:
            self.region.shut()

    async def _quiesce(self) -> None:
        control = self._device.control
        if self.region is not None:
            idle = Signal(control.hooks)
            self.region.notify_idle(idle)
            if not idle.done:
                self._device.resolve_unsignaled()
            await until(idle)

    async def _close(self) -> None:
        await super()._close()
        for child in self.children:
            await outcome(child.close())

    def _destroy(self) -> None:
        try:
            self._pyverbs.close()
        except Exception as e:
            raise _pyverbs.translate(e, "mlx5dv_destroy_mkey") from e

    def _release(self) -> None:
        self._drop_mkey()

    def unbind_children(self) -> None:
        """The layout that was made of them is gone, or was never finished."""
        for child in self.children:
            if not child.closed:
                child._unbound()

    def __repr__(self) -> str:
        if self.closed:
            return "<Mkey closed>"
        state = f"bound to {len(self)} bytes" if self.bound else "unbound"
        return f"<Mkey lkey={self.lkey:#x} of {self.max_entries} entries, {state}>"


def create_mkey(device: Device, max_entries: int) -> Pending[Mkey]:
    """Makes an indirect mkey for layouts of up to ``max_entries`` entries, off the loop; or ``async with``.

    An interleaved layout needs one entry more than it has blocks. Raises :class:`UnsupportedError` where the device has no
    DEVX, which mkeys are made through.
    """
    device._check_open()
    max_entries = whole(max_entries)
    if not isinstance(max_entries, int) or not 1 <= max_entries <= 0xFFFF:
        raise UsageError(f"max_entries: 1 to 65535, not {max_entries!r}")
    if device.mlx5 is None:
        raise UnsupportedError(device.name, "indirect mkeys", "it isn't an mlx5 device, or DEVX isn't permitted")
    return device._made(Pending(device.control, _create(device, max_entries), dispose=True))


async def umr_caps(device: Device) -> HcaCap:
    """Inside a control operation: the device's capabilities; :class:`UnsupportedError` where it has no UMR."""
    caps = _caps.get(device)
    if caps is None:
        caps = _caps[device] = await outcome(query_hca_cap(device))
    if caps.umr_indirect_mkey_disabled:
        raise UnsupportedError(
            device.name, "UMR", "umr_indirect_mkey_disabled is set in its capabilities (QUERY_HCA_CAP)"
        )
    return caps


async def _create(device: Device, max_entries: int) -> Mkey:
    await umr_caps(device)
    return await create(device, max_entries)


async def create(device: Device, max_entries: int) -> Mkey:
    """Inside a control operation: see :func:`create_mkey`."""

    def make() -> Any:
        try:
            return _pyverbs.module("providers.mlx5.mlx5dv_mkey").Mlx5Mkey(device.pd, _INDIRECT, max_entries)
        except Exception as e:
            error = _pyverbs.translate(e, "mlx5dv_create_mkey", f"{max_entries} entries")
            if isinstance(error, VerbsError) and error.errno in (93, 95):  # EPROTONOSUPPORT, EOPNOTSUPP
                raise UnsupportedError(device.name, "indirect mkeys", str(error)) from e
            raise error from e

    mkey = Mkey(device, await in_thread(device.control, make), max_entries)
    device.adopt(mkey)
    return mkey

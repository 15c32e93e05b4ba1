"""QPs of mlx5 devices, with what only they can post."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aiordma import _pyverbs
from aiordma._memory import MemorySlice
from aiordma._mlx5 import Mlx5QueuePairBase
from aiordma._offload import Pending, until
from aiordma._operation import Completion
from aiordma._values import whole_fields
from aiordma._waitable import Signal
from aiordma.access import Access
from aiordma.errors import ClosedError, UnsupportedError, UsageError
from aiordma.mlx5.raw_wqe import Wqe
from aiordma.mlx5.strided import map_strided
from aiordma.mlx5.umr import Mkey, umr_caps
from aiordma.qp import QP_TYPES, QPConfig, QueuePair, cap, check_limits, make

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma.device import Device
    from aiordma.mlx5.devx import HcaCap
    from aiordma.srq import SharedReceiveQueue

__all__ = ["Mlx5Options", "Mlx5QueuePair", "create_qp"]

# enum mlx5dv_qp_create_send_ops_flags, mlx5dv_qp_init_attr_mask (mlx5dv.h)
OPS_INTERLEAVED, OPS_LIST, OPS_CONFIGURE, OPS_RAW_WQE, OPS_MEMCPY = (1 << n for n in range(5))
MASK_DC, MASK_SEND_OPS, MASK_DCI_STREAMS = 1 << 1, 1 << 2, 1 << 3
# enum ibv_qp_init_attr_mask, ibv_qp_create_send_ops_flags (verbs.h)
INIT_PD, INIT_SEND_OPS = 1 << 0, 1 << 6
VERBS_OPS_RC = 0x2FF  # writes, sends, with immediate or invalidate, read, atomics, LOCAL_INV
VERBS_OPS_DCI = 0x27F  # the same without LOCAL_INV
# A WQE has at most 1008 bytes (63 units of 16): UMR's own segments take 128, and libmlx5 pads a list of entries of 16 bytes
# to a multiple of 64 (umr_sg_list_create() in its qp.c). It doesn't check.
MAX_LIST = 52


@dataclass(frozen=True, slots=True)
class Mlx5Options:
    """What an mlx5 QP can do beyond verbs.

    ``max_umr_entries``: entries of the longest layout that is registered on it in one work request (UMR), at most 51; 0
    for none.
    ``mkey_configure``: the same through mlx5dv_wr_mkey_configure too. ``memcpy``: DMA memcpy. ``raw_wqe``: raw WQEs.
    """

    max_umr_entries: int = 0
    mkey_configure: bool = False
    memcpy: bool = False
    raw_wqe: bool = False

    def __post_init__(self) -> None:
        whole_fields(self)

    def check(self, device: Device) -> None:
        """:class:`UnsupportedError` names what the device lacks."""
        device._check_open()
        if device.mlx5 is None:
            raise UnsupportedError(
                device.name, "mlx5 QPs", "it isn't an mlx5 device, or DEVX isn't permitted to this process"
            )
        if not isinstance(self.max_umr_entries, int) or not 0 <= self.max_umr_entries < MAX_LIST:
            raise UsageError(f"max_umr_entries: 0 to {MAX_LIST - 1}, which fill a WQE, not {self.max_umr_entries!r}")
        if self.memcpy and not device.mlx5.max_wr_memcpy_length:
            raise UnsupportedError(device.name, "DMA memcpy", "max_wr_memcpy_length is 0 (mlx5dv_query_device(3))")

    @property
    def send_ops(self) -> int:
        """MLX5DV_QP_EX_WITH_* flags."""
        flags = 0
        if self.max_umr_entries:
            flags |= OPS_INTERLEAVED | OPS_LIST
            if self.mkey_configure:
                flags |= OPS_CONFIGURE
        return flags | (OPS_MEMCPY if self.memcpy else 0) | (OPS_RAW_WQE if self.raw_wqe else 0)

    @property
    def inline_needed(self) -> int:
        """Bytes of inline data that make room for the longest layout: libmlx5 sizes its WQEs by them.

        An entry takes 16 bytes; an interleaved layout has a header of the size of one more (mlx5dv_wr_post(3)).
        """
        return 16 * (self.max_umr_entries + 1) - 4 if self.max_umr_entries else 0


class Mlx5QueuePair(QueuePair, Mlx5QueuePairBase):
    """A QP of an mlx5 device: everything of :class:`QueuePair`, and UMR, DMA memcpy and raw WQEs.

    Made by :func:`create_qp`.
    """

    __slots__ = ()

    def set_up_mlx5(self, options: Mlx5Options, max_inline_data: int, caps: HcaCap | None) -> None:
        # libmlx5 accepts a layout of so many entries (mlx5_send_wr_set_mkey_layout): what fits in place of inline data.
        entries = min((max_inline_data + 4) // 16, MAX_LIST) if caps is not None else 0
        self._setup_mlx5(
            self.device.name,
            entries,
            0 if caps is None or caps.repeated_block_disabled else entries - 1,
            self.device.mlx5.max_wr_memcpy_length if options.memcpy else 0,
            options.raw_wqe,
        )
        self._options = options
        self._layout_depth: int = 0 if caps is None else caps.max_indirection

    @property
    def options(self) -> Mlx5Options:
        """What it was made with."""
        return self._options

    @property
    def layout_depth(self) -> int:
        """How many mkeys may be made of one another, as the device says (max_indirection); 0 where it doesn't."""
        return self._layout_depth

    def register_list(
        self,
        mkey: Mkey,
        slices: Iterable[MemorySlice],
        *,
        access: int = Access.ALL,
        signaled: bool = True,
        configure: bool = False,
        rebind: bool = False,
    ) -> Completion:
        """Gives ``mkey`` the layout of ``slices`` one after the other (mlx5dv_wr_mr_list, MLX5DV_WC_UMR).

        ``slices``: of memory regions, or of other bound mkeys; each 1 byte to 2 GiB - 1. ``access``: what the mkey allows,
        LOCAL_WRITE and REMOTE_*; the regions must have LOCAL_WRITE where it's asked. Once posted, slices of ``mkey`` can
        be used in later work requests of this QP; elsewhere after it has completed. The regions stay registered
        while the mkey is bound. ``configure``: through mlx5dv_wr_mkey_configure. ``rebind``: replace a layout without
        LOCAL_INV, which the device may refuse.

        Raises :class:`UsageError` when the mkey is bound, or the layout is too long for it or for this QP.
        """
        return self._register_list(mkey, slices, access, signaled, self._configure(configure), rebind)

    def register_interleaved(
        self,
        mkey: Mkey,
        blocks: Sequence[tuple[MemorySlice, int, int]],
        *,
        repeat_count: int,
        access: int = Access.ALL,
        signaled: bool = True,
        configure: bool = False,
        rebind: bool = False,
    ) -> Completion:
        """Gives ``mkey`` an interleaved layout (mlx5dv_wr_mr_interleaved, MLX5DV_WC_UMR).

        ``blocks``: ``(slice, bytes_count, bytes_skip)``: bytes_count bytes from the slice's start, then bytes_skip left
        out. One round takes a piece of each block in order; ``repeat_count`` rounds follow each other, each block going
        on where its skip ended. Both numbers together are at most 65,535 bytes. The mkey needs one entry more than there
        are blocks. Otherwise as :meth:`register_list`.
        """
        return self._register_interleaved(
            mkey, list(blocks), repeat_count, access, signaled, self._configure(configure), rebind
        )

    def _configure(self, configure: bool) -> bool:
        if configure and not self._options.mkey_configure:
            raise UnsupportedError(self.device.name, "mkey_configure on this QP", "create it with mkey_configure=True")
        return configure

    def invalidate(self, mkey: Mkey) -> Pending[None]:
        """Takes ``mkey``'s layout away (LOCAL_INV), so that another can be registered; started by the call.

        New work requests on the mkey are refused at once; LOCAL_INV is posted when none of this process uses it any more,
        and no other mkey's layout is made of it. A peer that still holds its rkey gets a remote access error from then on.
        A second call gives the same operation. Where it fails (the QP is in error), another QP's may follow.
        """
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        self.device.control.hooks.verify()
        if not isinstance(mkey, Mkey):
            raise UsageError(f"invalidate() takes an Mkey, not {type(mkey).__name__}")
        if mkey.device is not self.device:
            raise UsageError(f"{mkey!r} belongs to another device")
        if mkey.closed:
            raise ClosedError(f"{mkey!r} is closed")
        if mkey.invalidating is not None:
            return mkey.invalidating
        region = mkey.region
        if region is None or mkey.mapping:
            raise UsageError(f"{mkey!r} has no layout to invalidate")
        region.shut()
        invalidating = Pending(self.device.control, self._invalidate(mkey))
        if not invalidating.done:
            mkey.invalidating = invalidating
        return invalidating

    async def _invalidate(self, mkey: Mkey) -> None:
        try:
            await self._invalidate_one(mkey)
            for child in mkey.children:
                if child.bound and not child.closed:
                    await self._invalidate_one(child)
        finally:
            mkey.invalidating = None

    async def _invalidate_one(self, mkey: Mkey) -> None:
        region = mkey.region
        if region is not None:
            idle = Signal(self.device.control.hooks)
            region.notify_idle(idle)
            if not idle.done:
                self._finish_unsignaled()
            await until(idle)
        if mkey.closed:
            raise ClosedError(f"{mkey!r} is closed")
        if not mkey.bound:
            return  # what registered its layout has failed meanwhile
        done = self.local_inv(mkey.rkey)
        finished = Signal(self.device.control.hooks)
        done.on_finish(finished.finish)
        await until(finished)
        done.result()
        mkey._unbound()

    def map_strided(
        self, mkey: Mkey, array: Any, *, mr: MemorySlice | None = None, access: int = Access.ALL
    ) -> Pending[MemorySlice]:
        """Gives ``mkey`` the layout of a numpy array or view, however strided; started by the call.

        ``array``: rows or columns of a matrix, every other element, a block of three dimensions, reversed axes, ...: all
        of its elements in C order become the mkey's bytes. ``mr``: the region that holds it; None: the open one of this
        device that does. What one layout can't say is nested; the mkeys that this takes are made as needed, kept with
        ``mkey``, and closed with it. The result is the slice of all the data: ``view = await qp.map_strided(mkey,
        a[:, 3:7])``, then ``await qp.rdma_write(view, remote)``. ``await qp.invalidate(mkey)`` before the next.

        Elements that appear more than once (stride 0) are fine to read; written to, the last one wins. Nothing but
        addresses is taken from ``array``: an array made from it, and not a view of it, isn't in the region.

        Raises :class:`UsageError` when the mkey is bound, and what :meth:`register_list` raises.
        """
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        self.device.control.hooks.verify()
        if not isinstance(mkey, Mkey):
            raise UsageError(f"map_strided() takes an Mkey, not {type(mkey).__name__}")
        if mkey.closed:
            raise ClosedError(f"{mkey!r} is closed")
        if mkey.bound or mkey.mapping:
            raise UsageError(f"{mkey!r} is bound: await qp.invalidate(mkey) before another layout")
        return Pending(self.device.control, map_strided(self, mkey, array, mr, access))

    def post_raw_wqe(self, wqe: Wqe | Buffer, *, keep: Iterable[MemorySlice] = ()) -> Completion:
        """Posts a WQE as it is (mlx5dv_wr_raw_wqe); its completion's opcode is IBV_WC_DRIVER2 whatever it does.

        ``wqe``: a :class:`Wqe`, or bytes that begin with the control segment, whose ds field (in units of 16 bytes) says how
        many are used. The driver sets the WQE index and the signature; everything else, flags too, is the caller's. A
        WQE that asks for no completion is resolved by the next signalled one on this QP. ``keep``: the memory that the WQE
        names, kept until it has completed; a :class:`Wqe` knows its own.
        """
        if isinstance(wqe, Wqe):
            return self._post_raw(wqe.to_bytes(self.qp_num), (*wqe.slices, *keep))
        return self._post_raw(wqe, tuple(keep))


def create_qp(
    device: Device,
    config: QPConfig | None = None,
    *,
    srq: SharedReceiveQueue | None = None,
    max_umr_entries: int = 0,
    mkey_configure: bool = False,
    memcpy: bool = False,
    raw_wqe: bool = False,
    **options: Any,
) -> Pending[Mlx5QueuePair]:
    """Makes an RC QP with mlx5's own work requests (mlx5dv_create_qp(3)), off the loop; or ``async with``.

    The keyword arguments are fields of :class:`Mlx5Options` and :class:`QPConfig`. Raises :class:`UnsupportedError`, naming
    the device, when it lacks one of them.
    """
    wanted = Mlx5Options(max_umr_entries, mkey_configure, memcpy, raw_wqe)
    wanted.check(device)
    try:
        config = replace(config if config is not None else QPConfig(), **options)
    except TypeError as e:
        raise UsageError(f"create_qp: {e}; the options are the fields of QPConfig and Mlx5Options") from e
    config.check()
    check_limits(device, config)
    if config.qp_type != "RC":
        raise UsageError("mlx5 QPs are RC; for DC see DCInitiator and DCTarget")
    if srq is not None:
        srq.check_usable(device)
    config = replace(config, max_inline_data=max(config.max_inline_data, wanted.inline_needed))
    return device._made(Pending(device.control, _create(device, config, wanted, srq), dispose=True))


async def _create(
    device: Device, config: QPConfig, options: Mlx5Options, srq: SharedReceiveQueue | None
) -> Mlx5QueuePair:
    def maker(device: Device, config: QPConfig, cqs: tuple[Any, Any], srq: SharedReceiveQueue | None, /) -> Any:
        init = init_attr(device, config, cqs, srq, QP_TYPES[config.qp_type], VERBS_OPS_RC)
        dv = _pyverbs.module("providers.mlx5.mlx5dv")
        attr = dv.Mlx5DVQPInitAttr(comp_mask=MASK_SEND_OPS, send_ops_flags=options.send_ops)
        return dv.Mlx5QP(device.context, init, attr), init

    caps = await umr_caps(device) if options.max_umr_entries else None
    qp = await make(device, config, srq, Mlx5QueuePair, maker)
    qp.set_up_mlx5(options, qp.max_inline_data, caps)
    return qp


def init_attr(
    device: Device,
    config: QPConfig,
    cqs: tuple[Any, Any],
    srq: SharedReceiveQueue | None,
    qp_type: int,
    verbs_ops: int,
) -> Any:
    """pyverbs' QPInitAttrEx with the PD and the verbs that are to be posted."""
    return _pyverbs.module("qp").QPInitAttrEx(
        qp_type=qp_type,
        scq=cqs[0],
        rcq=cqs[1],
        srq=srq.pyverbs if srq is not None else None,
        cap=cap(config, srq is None),
        pd=device.qp_pd,
        comp_mask=INIT_PD | INIT_SEND_OPS,
        send_ops_flags=verbs_ops,
        sq_sig_all=0,
    )

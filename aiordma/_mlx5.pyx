# cython: language_level=3, nonecheck=True
"""Posting mlx5 work requests: UMR, DMA memcpy, raw WQEs, and everything over DC.

Each kind has a payload struct and a function that turns it into a WQE between ibv_wr_start() and ibv_wr_complete(). What
can be wrong is checked before: an exception between the two would leave libmlx5's SQ lock held, and nothing is awaited
there. The pages: mlx5dv_wr_post(3), ibv_wr_post(3).
"""

from libc.errno cimport EINVAL
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from aiordma cimport _ibv as v
from aiordma cimport _mlx5dv as dv
from aiordma._operation cimport QUEUED, REQUEST_MEMCPY, REQUEST_RAW_WQE, REQUEST_UMR, Completion
from aiordma._workqueue cimport PostFunction
from aiordma._memory cimport MemorySlice, Region, RemoteBuffer, enter_all, leave_all
from aiordma._post cimport QueuePairBase
from aiordma._waitable cimport Waitable

from functools import partial
from operator import index

from aiordma._values import whole
from aiordma._waitable import no_copy
from aiordma.errors import AccessFlagsError, BufferAccessError, ClosedError, UnsupportedError, UsageError

cdef enum:
    MAX_SGE = 32
    MAX_LAYOUT = 64
    PAYLOAD_WORDS = 256  # 2 KiB: a payload with 64 layout entries, 32 buffers or 1 KiB of inline data
    MAX_WQE = 1024  # the largest WQE is 63 segments of 16 bytes (the 6-bit ds field of its control segment)
    LOCAL_WRITE = 1
    UMR_LIST = 0
    UMR_INTERLEAVED = 1
    UMR_CONFIGURE = 2
    CE_CQ_UPDATE = 2 << 2  # control segment, fm_ce_se: completion always (mlx5dv.h MLX5_WQE_CTRL_CQ_UPDATE)

cdef int UMR = REQUEST_UMR
cdef int MEMCPY = REQUEST_MEMCPY
cdef int RAW_WQE = REQUEST_RAW_WQE

# ---------------------------------------------------------------- payloads and their posting


cdef struct MemcpyPayload:
    uint64_t to, source, length
    uint32_t to_key, source_key


cdef int _post_memcpy(v.ibv_qp *qp, uint64_t wr_id, unsigned int flags, const void *payload) noexcept nogil:
    cdef const MemcpyPayload *p = <const MemcpyPayload *>payload
    cdef dv.ibv_qp_ex *ex = dv.ibv_qp_to_qp_ex(qp)
    dv.ibv_wr_start(ex)
    ex.wr_id = wr_id
    ex.wr_flags = flags
    dv.mlx5dv_wr_memcpy(dv.mlx5dv_qp_ex_from_ibv_qp_ex(ex), p.to_key, p.to, p.source_key, p.source, p.length)
    return dv.ibv_wr_complete(ex)


cdef int _post_umr(v.ibv_qp *qp, uint64_t wr_id, unsigned int flags, const void *payload) noexcept nogil:
    cdef UmrPayload *p = <UmrPayload *>payload
    cdef void *entries = <void *>(p + 1)
    cdef dv.ibv_qp_ex *ex = dv.ibv_qp_to_qp_ex(qp)
    cdef dv.mlx5dv_qp_ex *mex = dv.mlx5dv_qp_ex_from_ibv_qp_ex(ex)
    cdef dv.mlx5dv_mkey_conf_attr conf
    dv.ibv_wr_start(ex)
    ex.wr_id = wr_id
    # The layout goes into the WQE itself, and libmlx5 wants to be told so: mlx5dv_wr_post(3).
    ex.wr_flags = flags | v.IBV_SEND_INLINE
    if p.configure:
        memset(&conf, 0, sizeof(conf))
        dv.mlx5dv_wr_mkey_configure(mex, p.mkey, 2, &conf)
        dv.mlx5dv_wr_set_mkey_access_flags(mex, p.access)
        if p.kind == UMR_INTERLEAVED:
            dv.mlx5dv_wr_set_mkey_layout_interleaved(mex, p.repeat, p.n, <dv.mlx5dv_mr_interleaved *>entries)
        else:
            dv.mlx5dv_wr_set_mkey_layout_list(mex, p.n, <v.ibv_sge *>entries)
    elif p.kind == UMR_INTERLEAVED:
        dv.mlx5dv_wr_mr_interleaved(mex, p.mkey, p.access, p.repeat, p.n, <dv.mlx5dv_mr_interleaved *>entries)
    else:
        dv.mlx5dv_wr_mr_list(mex, p.mkey, p.access, p.n, <v.ibv_sge *>entries)
    return dv.ibv_wr_complete(ex)


cdef int _post_raw(v.ibv_qp *qp, uint64_t wr_id, unsigned int flags, const void *payload) noexcept nogil:
    cdef uint8_t wqe[MAX_WQE]
    cdef const uint8_t *given = <const uint8_t *>payload
    cdef size_t size = <size_t>(given[7] & 63) * 16
    cdef dv.ibv_qp_ex *ex = dv.ibv_qp_to_qp_ex(qp)
    memcpy(wqe, given, size)
    if flags & v.IBV_SEND_SIGNALED:
        # wr_flags are ignored for raw WQEs: what asks for a completion is in the WQE (mlx5dv_wr_raw_wqe).
        wqe[11] |= CE_CQ_UPDATE
    dv.ibv_wr_start(ex)
    ex.wr_id = wr_id
    ex.wr_flags = 0
    dv.mlx5dv_wr_raw_wqe(dv.mlx5dv_qp_ex_from_ibv_qp_ex(ex), wqe)
    return dv.ibv_wr_complete(ex)


cdef struct DcPayload:
    dv.ibv_ah *ah
    uint64_t key
    uint32_t dctn
    uint16_t stream
    uint8_t use_stream
    uint8_t n
    uint32_t inline_size
    int opcode
    uint64_t remote_addr
    uint32_t rkey
    uint32_t imm
    uint64_t compare_add, swap
    # then n ibv_sge, or inline_size bytes of data


cdef int _post_dc(v.ibv_qp *qp, uint64_t wr_id, unsigned int flags, const void *payload) noexcept nogil:
    cdef DcPayload *p = <DcPayload *>payload
    cdef v.ibv_sge *sges = <v.ibv_sge *>(p + 1)
    cdef dv.ibv_qp_ex *ex = dv.ibv_qp_to_qp_ex(qp)
    cdef dv.mlx5dv_qp_ex *mex = dv.mlx5dv_qp_ex_from_ibv_qp_ex(ex)
    dv.ibv_wr_start(ex)
    ex.wr_id = wr_id
    ex.wr_flags = flags
    if p.opcode == v.IBV_WR_RDMA_WRITE:
        dv.ibv_wr_rdma_write(ex, p.rkey, p.remote_addr)
    elif p.opcode == v.IBV_WR_RDMA_WRITE_WITH_IMM:
        dv.ibv_wr_rdma_write_imm(ex, p.rkey, p.remote_addr, p.imm)
    elif p.opcode == v.IBV_WR_RDMA_READ:
        dv.ibv_wr_rdma_read(ex, p.rkey, p.remote_addr)
    elif p.opcode == v.IBV_WR_SEND:
        dv.ibv_wr_send(ex)
    elif p.opcode == v.IBV_WR_SEND_WITH_IMM:
        dv.ibv_wr_send_imm(ex, p.imm)
    elif p.opcode == v.IBV_WR_SEND_WITH_INV:
        dv.ibv_wr_send_inv(ex, p.imm)
    elif p.opcode == v.IBV_WR_ATOMIC_FETCH_AND_ADD:
        dv.ibv_wr_atomic_fetch_add(ex, p.rkey, p.remote_addr, p.compare_add)
    elif p.opcode == v.IBV_WR_ATOMIC_CMP_AND_SWP:
        dv.ibv_wr_atomic_cmp_swp(ex, p.rkey, p.remote_addr, p.compare_add, p.swap)
    else:
        dv.ibv_wr_abort(ex)
        return EINVAL
    if p.use_stream:
        dv.mlx5dv_wr_set_dc_addr_stream(mex, p.ah, p.dctn, p.key, p.stream)
    else:
        dv.mlx5dv_wr_set_dc_addr(mex, p.ah, p.dctn, p.key)
    if flags & v.IBV_SEND_INLINE:
        dv.ibv_wr_set_inline_data(ex, <void *>(p + 1), p.inline_size)
    else:
        dv.ibv_wr_set_sge_list(ex, p.n, sges)
    return dv.ibv_wr_complete(ex)


# ---------------------------------------------------------------- indirect memory keys


cdef class MkeyBase:
    """An indirect memory key: a ``struct mlx5dv_mkey``, and what it's bound to now.

    Bound, it's a region of its own that starts at address 0 (zero-based): slices of it are offsets into the data that
    the layout describes. It holds the regions beneath it, so that none of them is deregistered while it's bound.
    """

    def __reduce__(self):
        no_copy(self)

    def _setup_mkey(self, uintptr_t address, uint32_t max_entries, domain):
        self.mkey = <dv.mlx5dv_mkey *>address
        self.max_entries = max_entries
        self.domain = domain

    def _drop_mkey(self) -> None:
        """The verbs object is destroyed."""
        self.mkey = NULL
        self._unbind()

    cdef int _bind(self, uint64_t length, int access, tuple sources) except -1:
        self._unbind()
        enter_all(sources)
        self.sources = sources
        self.region = Region(0, length, self.mkey.lkey, self.mkey.rkey, access, self.domain, None, False)
        return 0

    cdef int _unbind(self) except -1:
        cdef tuple sources = self.sources
        if self.region is not None:
            self.region.shut()
            self.region = None
        self.sources = None
        leave_all(sources)
        return 0

    def _unbound(self) -> None:
        """LOCAL_INV has completed: the layout is gone."""
        self._unbind()

    def _layout_done(self, Completion registration, Region region) -> None:
        """The work request that registers ``region``'s layout is over: where it failed there is none."""
        if self.region is region and (registration._status != 0 or registration.error is not None):
            self._unbind()

    @property
    def lkey(self) -> int:
        """The key for local use."""
        if self.mkey == NULL:
            raise ClosedError("the mkey is closed")
        return self.mkey.lkey

    @property
    def rkey(self) -> int:
        """The key for remote use."""
        if self.mkey == NULL:
            raise ClosedError("the mkey is closed")
        return self.mkey.rkey

    @property
    def bound(self) -> bool:
        """Whether a layout is registered (or is being)."""
        return self.region is not None

    cdef MemorySlice _whole(self):
        cdef MemorySlice part
        if self.region is None:
            raise UsageError(f"{self!r} has no layout: register one first (qp.register_list, qp.map_strided, ...)")
        part = MemorySlice.__new__(MemorySlice)
        part.region = self.region
        part.owner = self
        part.addr = 0
        part.length = self.region.length
        return part

    def whole(self) -> MemorySlice:
        """All of the data that the layout describes, as a local source or target."""
        return self._whole()

    def __getitem__(self, key) -> MemorySlice:
        return self._whole()[key]

    def __len__(self) -> int:
        return 0 if self.region is None else self.region.length

    def remote(self) -> RemoteBuffer:
        """What a peer needs to use the layout: zero-based, so its address is 0."""
        return self._whole().remote()


# ---------------------------------------------------------------- queue pairs


cdef class Mlx5QueuePairBase(QueuePairBase):
    """Posting calls that only mlx5 QPs have. All of them post at once and return a :class:`Completion`."""

    def _setup_mlx5(self, str device_name, uint32_t umr_list, uint32_t umr_interleaved, uint64_t memcpy_limit, bint raw):
        self.device_name = device_name
        self.umr_list = umr_list
        self.umr_interleaved = umr_interleaved
        self.memcpy_limit = memcpy_limit
        self.raw = raw
        # What one work request may take of the queue, so that max_send_wr of them always fit.
        self.wqe_limit = min(<uint32_t>(dv.aior_sq_blocks(self.qp) // self._send.capacity) * 64, <uint32_t>1008)

    cdef Completion _custom(self, int request, object keepalive, unsigned int flags, PostFunction post, const void *payload,
                            size_t size):
        cdef Completion c
        if self.always_signal:
            flags |= v.IBV_SEND_SIGNALED
        c = self._new(request, flags)
        c.keepalive = keepalive
        enter_all(keepalive)
        try:
            self._send._submit_custom(post, payload, size, flags, c)
        except BaseException as e:
            c.internal = True  # raised here, nobody else to tell
            c._fail(e)
            raise
        return c

    def memcpy(self, MemorySlice dst not None, MemorySlice src not None, *, bint signaled=True,
               bint fence=False) -> Completion:
        """Copies ``src`` to ``dst`` by the device's DMA engine (mlx5dv_wr_memcpy, MLX5DV_WC_MEMCPY).

        ``dst`` is at least as long as ``src``; at most ``max_wr_memcpy_length`` bytes (:class:`DmaEngine` splits longer
        ones). Completes when the bytes are in ``dst``. The two may not overlap. A later send or write of ``dst`` on
        this QP that doesn't await this one must be posted with ``fence=True`` (mlx5dv_wr_post(3)).
        """
        cdef MemcpyPayload p
        self._check_send()
        if self.memcpy_limit == 0:
            raise UnsupportedError(
                self.device_name, "DMA memcpy on this QP", "create it with memcpy=True on a device that has it"
            )
        _usable(dst, LOCAL_WRITE, self.domain)
        _usable(src, 0, self.domain)
        if src.length > dst.length:
            raise UsageError(f"{src.length} bytes don't fit into {dst!r}")
        if not 0 < src.length <= self.memcpy_limit:
            raise UsageError(
                f"one DMA memcpy copies 1 to {self.memcpy_limit} bytes on {self.device_name}, not {src.length}: "
                "use DmaEngine.copy, which splits"
            )
        if src.region is dst.region and src.addr < dst.addr + src.length and dst.addr < src.addr + src.length:
            raise UsageError("source and target of a DMA memcpy overlap: the result would be undefined")
        p.to = dst.addr
        p.source = src.addr
        p.length = src.length
        p.to_key = dst.region.lkey
        p.source_key = src.region.lkey
        return self._custom(
            MEMCPY, (dst, src), _flags(signaled, fence), _post_memcpy, &p, sizeof(p)
        )

    # -------------------------------------------------------------- UMR

    cdef int _check_umr(self, MkeyBase mkey, int access, size_t n, uint32_t limit, str option, size_t extra) except -1:
        self._check_send()
        if limit == 0:
            raise UnsupportedError(self.device_name, "UMR on this QP", "create the QP with max_umr_entries=")
        # Closing, it's destroyed in a worker thread before it's NULL here.
        if mkey.mkey == NULL or (<object>mkey).closed:
            raise ClosedError(f"{mkey!r} is closed")
        if mkey.domain is not self.domain:
            raise UsageError(f"{mkey!r} belongs to another device")
        if access & ~0xF:
            raise AccessFlagsError(f"an mkey layout has LOCAL_WRITE and REMOTE_* access only, not {access:#x}")
        if access & 0xA and not access & LOCAL_WRITE:
            raise AccessFlagsError("REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE too")
        if n == 0:
            raise UsageError("a layout has at least one entry")
        if n > limit:
            raise UsageError(
                f"{n} entries, but this QP was made for {limit} ({option}): create it with a larger max_umr_entries"
            )
        if n + extra > mkey.max_entries:
            raise UsageError(
                f"{n} entries{' and one for the strided header' if extra else ''}, but the mkey was made for "
                f"{mkey.max_entries}: create it with a larger max_entries"
            )
        return 0

    def _register_list(self, MkeyBase mkey not None, slices, int access, bint signaled, bint configure, bint rebind):
        cdef uint64_t buffer[PAYLOAD_WORDS]
        cdef UmrPayload *p = <UmrPayload *>buffer
        cdef v.ibv_sge *entries = <v.ibv_sge *>(p + 1)
        cdef tuple parts = tuple(slices)
        cdef uint64_t total = 0
        cdef size_t i
        self._check_umr(mkey, access, len(parts), min(self.umr_list, <uint32_t>MAX_LAYOUT), "list entries", 0)
        if mkey.region is not None and not rebind:
            raise UsageError(f"{mkey!r} is bound: await qp.invalidate(mkey) before another layout")
        for i, item in enumerate(parts):
            if not isinstance(item, MemorySlice):
                raise BufferAccessError(f"a layout is made of slices of registered memory, not {type(item).__name__}")
            part = <MemorySlice>item
            _usable(part, access & LOCAL_WRITE, self.domain)
            if part.region is mkey.region:
                raise UsageError("an mkey can't be part of its own layout")
            if not 0 < part.length <= 0x7FFFFFFF:
                # libmlx5 keeps 31 bits of a length, and takes 0 for 2 GiB.
                raise UsageError(f"an entry of a layout has 1 to {0x7FFFFFFF} bytes, not {part.length}: split it")
            entries[i].addr = (<MemorySlice>part).addr
            entries[i].length = <uint32_t>(<MemorySlice>part).length
            entries[i].lkey = (<MemorySlice>part).region.lkey
            total += (<MemorySlice>part).length
        memset(p, 0, sizeof(UmrPayload))
        p.mkey = mkey.mkey
        p.access = access
        p.n = <uint16_t>len(parts)
        p.kind = UMR_LIST
        p.configure = configure
        return self._post_layout(mkey, total, access, parts, p, sizeof(UmrPayload) + len(parts) * sizeof(v.ibv_sge), signaled)

    def _register_interleaved(self, MkeyBase mkey not None, blocks, repeat_count, int access, bint signaled,
                              bint configure, bint rebind):
        cdef uint64_t buffer[PAYLOAD_WORDS]
        cdef UmrPayload *p = <UmrPayload *>buffer
        cdef dv.mlx5dv_mr_interleaved *entries = <dv.mlx5dv_mr_interleaved *>(p + 1)
        cdef list sources = []
        cdef uint64_t total = 0, count, skip
        cdef size_t i, n = len(blocks)
        cdef MemorySlice part
        self._check_umr(mkey, access, n, min(self.umr_interleaved, <uint32_t>MAX_LAYOUT), "interleaved entries", 1)
        if mkey.region is not None and not rebind:
            raise UsageError(f"{mkey!r} is bound: await qp.invalidate(mkey) before another layout")
        repeat_count = whole(repeat_count)
        if not isinstance(repeat_count, int) or not 1 <= repeat_count <= 0xFFFFFFFF:
            raise UsageError(f"repeat_count: 1 to {0xFFFFFFFF}, not {repeat_count!r}")
        for i, (item, bytes_count, bytes_skip) in enumerate(blocks):
            if not isinstance(item, MemorySlice):
                raise BufferAccessError(f"a layout is made of slices of registered memory, not {type(item).__name__}")
            part = <MemorySlice>item
            _usable(part, access & LOCAL_WRITE, self.domain)
            if part.region is mkey.region:
                raise UsageError("an mkey can't be part of its own layout")
            if not 0 < bytes_count <= 0xFFFF or bytes_skip < 0 or bytes_count + bytes_skip > 0xFFFF:
                # The strided UMR entry has 16 bits for the byte count and for the stride (mlx5dv.h
                # struct mlx5_wqe_umr_repeat_ent_seg).
                raise UsageError(
                    f"block {i}: bytes_count is 1 to 65535, and bytes_count + bytes_skip at most 65535, not "
                    f"{bytes_count} + {bytes_skip}: use a list, or map_strided"
                )
            count = bytes_count
            skip = bytes_skip
            if (repeat_count - 1) * (count + skip) + count > part.length:
                raise UsageError(
                    f"block {i}: {repeat_count} times {bytes_count} bytes at a distance of {bytes_count + bytes_skip} "
                    f"reach beyond {part!r}"
                )
            entries[i].addr = part.addr
            entries[i].bytes_count = <uint32_t>count
            entries[i].bytes_skip = <uint32_t>skip
            entries[i].lkey = part.region.lkey
            total += count
            sources.append(part)
        memset(p, 0, sizeof(UmrPayload))
        p.mkey = mkey.mkey
        p.access = access
        p.repeat = repeat_count
        p.n = <uint16_t>n
        p.kind = UMR_INTERLEAVED
        p.configure = configure
        return self._post_layout(mkey, total * repeat_count, access, tuple(sources), p,
                                 sizeof(UmrPayload) + n * sizeof(dv.mlx5dv_mr_interleaved), signaled)

    cdef Completion _post_layout(self, MkeyBase mkey, uint64_t total, int access, tuple sources, UmrPayload *p, size_t size,
                                 bint signaled):
        cdef Completion c
        mkey._bind(total, access, sources)
        try:
            c = self._custom(UMR, mkey._whole(), _flags(signaled, False), _post_umr, p, size)
        except BaseException:
            mkey._unbind()
            raise
        c.on_finish(partial(mkey._layout_done, c, mkey.region))
        return c

    def _finish_unsignaled(self) -> None:
        """What was posted unsignalled gets a completion behind it, for those who wait until a region is idle."""
        self._send._mark_idle()

    def _posted_here(self, Completion operation not None) -> bool:
        """Whether it's an operation of this QP's send queue."""
        return operation.queue is self._send

    # -------------------------------------------------------------- raw WQEs

    def _post_raw(self, wqe, tuple keep) -> Completion:
        cdef const uint8_t[::1] view
        cdef uint8_t buffer[MAX_WQE]
        cdef size_t size, given
        cdef uint32_t qpn
        cdef unsigned int flags = 0
        self._check_send()
        try:
            view = memoryview(wqe).cast("B")
        except (TypeError, ValueError, BufferError) as e:
            raise BufferAccessError(f"a WQE is a Wqe or contiguous bytes, not {type(wqe).__name__}: {e}") from e
        given = view.shape[0]
        if not self.raw:
            raise UnsupportedError(self.device_name, "raw WQEs on this QP", "create it with raw_wqe=True")
        if given < 16:
            raise UsageError(f"a WQE begins with a control segment of 16 bytes, this one has {given} bytes")
        size = <size_t>(view[7] & 63) * 16
        # The ds field alone sets how much libmlx5 copies.
        if size < 16:
            raise UsageError("the WQE's ds field is 0: it counts segments of 16 bytes, the control segment included")
        if size > given:
            raise UsageError(f"the WQE's ds field says {size} bytes, but only {given} are given")
        if size > self.wqe_limit:
            raise UsageError(
                f"a WQE of {size} bytes, but this QP has room for {self.wqe_limit} in one work request: create it with more "
                "max_send_sge or max_inline_data"
            )
        qpn = <uint32_t>view[4] << 16 | <uint32_t>view[5] << 8 | view[6]
        if qpn != self._send.qp_num:
            raise UsageError(f"the WQE's control segment names QP {qpn:#x}, but this one is {self._send.qp_num:#x}")
        for part in keep:
            if not isinstance(part, MemorySlice):
                raise BufferAccessError(f"keep: slices of registered memory, not {type(part).__name__}")
            _usable(<MemorySlice>part, 0, self.domain)
        memcpy(buffer, &view[0], size)
        if buffer[11] & CE_CQ_UPDATE == CE_CQ_UPDATE:
            flags = v.IBV_SEND_SIGNALED
        return self._custom(RAW_WQE, keep if keep else None, flags, _post_raw, buffer, size)


cdef inline unsigned int _flags(bint signaled, bint fence):
    return (v.IBV_SEND_SIGNALED if signaled else 0) | (v.IBV_SEND_FENCE if fence else 0)


cdef int _usable(MemorySlice part, int need, object domain) except -1:
    if not part.region.open:
        raise ClosedError(f"{part!r}: its memory region is closed")
    if part.region.domain is not domain:
        raise UsageError(f"{part!r} belongs to another device")
    if need & ~part.region.access:
        raise AccessFlagsError(f"{part!r} is registered without LOCAL_WRITE, but the device would write to it")
    return 0


# ---------------------------------------------------------------- dynamically connected transport


cdef class DcAddress:
    """A DC target as this device reaches it: address handle, DCT number, DC access key."""

    def __reduce__(self):
        no_copy(self)

    def __init__(self, uintptr_t ah, uint32_t dctn, uint64_t key, owner, domain):
        self.ah = <dv.ibv_ah *>ah
        self.dctn = dctn
        self.key = key
        self.owner = owner
        self.domain = domain

    def _shut(self) -> None:
        """No new work request may name it."""
        self.domain = None

    def _notify_idle(self, Waitable signal not None) -> None:
        """``signal`` finishes when no work request that waits for a slot names the address handle. A posted one has a copy
        of what is in it."""
        if self.waiting:
            self.idle = signal
        else:
            signal._finish()

    def _left(self) -> None:
        cdef Waitable idle = self.idle
        self.waiting -= 1
        if self.waiting == 0 and idle is not None:
            self.idle = None
            idle._finish()


cdef class DcInitiatorBase(Mlx5QueuePairBase):
    """Posting calls of a DCI: those of a QP, each with the target that it goes to."""

    def _set_streams(self, bint streams):
        self.streams = streams

    def _post_to(self, DcAddress target, int opcode, local, there, imm, inline, unsigned int flags, stream, compare_add,
                 swap) -> Completion:
        number = whole(stream)
        if not isinstance(number, int) or not 0 <= number <= 0xFFFF:
            raise UsageError(f"stream_id: 0 to 65535, not {stream!r}")
        return self._post_request(target, opcode, local, there, imm, inline, flags, number, compare_add, swap)

    cdef Completion _post_request(self, DcAddress target, int opcode, object local, object there, object imm, object inline,
                                  unsigned int flags, uint16_t stream, object compare_add, object swap):
        cdef uint64_t buffer[PAYLOAD_WORDS]
        cdef DcPayload *p = <DcPayload *>buffer
        cdef v.ibv_send_wr wr
        cdef v.ibv_sge sges[MAX_SGE]
        cdef Completion c
        cdef RemoteBuffer remote = None
        cdef uint8_t *data
        cdef size_t size = sizeof(DcPayload)
        cdef object pins = None
        cdef int i
        self._check_send()
        if target is None:
            raise UsageError("the target is a DcPeer, made by reach(info), not None")
        if target.domain is not self.domain:
            if target.domain is None:
                raise ClosedError(f"{target!r} is closed")
            raise UsageError(f"{target!r} was made for another device")
        if isinstance(there, RemoteBuffer):
            remote = <RemoteBuffer>there
        elif opcode != v.IBV_WR_SEND and opcode != v.IBV_WR_SEND_WITH_IMM and opcode != v.IBV_WR_SEND_WITH_INV:
            raise BufferAccessError(f"remote is a RemoteBuffer (from the peer's mr.remote()), not {type(there).__name__}")
        if stream and not self.streams:
            raise UsageError("this DCI was made without streams: stream_id must be 0")
        # Everything is signalled: nothing that marks the end of unsignalled requests can be posted without a target.
        c = self._new(opcode, flags | v.IBV_SEND_SIGNALED)
        if opcode == v.IBV_WR_ATOMIC_CMP_AND_SWP or opcode == v.IBV_WR_ATOMIC_FETCH_AND_ADD:
            self._build_atomic(&wr, sges, c, opcode, local, remote, compare_add, swap, flags)
        else:
            if not isinstance(local, MemorySlice) and local is not None:
                pins = self._pins()
            self._build(&wr, sges, c, opcode, local, remote, imm, inline, flags, <void *>pins)
        memset(p, 0, sizeof(DcPayload))
        p.ah = target.ah
        p.key = target.key
        p.dctn = target.dctn
        p.use_stream = self.streams
        p.stream = stream
        p.opcode = opcode
        p.imm = wr.imm_data
        if remote is not None:
            p.remote_addr = remote.addr
            p.rkey = remote.rkey
        if compare_add is not None:
            p.compare_add = <uint64_t>(index(compare_add) & 0xFFFFFFFFFFFFFFFF)
            p.swap = <uint64_t>(index(swap) & 0xFFFFFFFFFFFFFFFF)
        if wr.send_flags & v.IBV_SEND_INLINE and c.local_len > MAX_WQE:
            raise UsageError(f"{c.local_len} bytes don't fit inline into a WQE")
        if wr.send_flags & v.IBV_SEND_INLINE:
            data = <uint8_t *>(p + 1)
            for i in range(wr.num_sge):
                memcpy(data, <void *><uintptr_t>sges[i].addr, sges[i].length)
                data += sges[i].length
            p.inline_size = <uint32_t>c.local_len
            size += p.inline_size
        else:
            p.n = <uint8_t>wr.num_sge
            memcpy(p + 1, sges, <size_t>wr.num_sge * sizeof(v.ibv_sge))
            size += <size_t>wr.num_sge * sizeof(v.ibv_sge)
        if pins is not None:
            pins.release()
        if target.domain is None:
            # By code of the caller's that ran since: __index__() of a number.
            raise ClosedError(f"{target!r} is closed")
        enter_all(c.keepalive)
        c.companion = target
        try:
            self._send._submit_custom(_post_dc, p, size, wr.send_flags, c)
        except BaseException as e:
            c.internal = True  # raised here, nobody else to tell
            c._fail(e)
            raise
        if c.state == QUEUED:
            target.waiting += 1
            c.on_finish(target._left)
        return c

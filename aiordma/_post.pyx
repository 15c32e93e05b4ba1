# cython: language_level=3, nonecheck=True
"""Building and posting work requests: everything is checked here, before the device sees it.

The calls of QueuePairBase are QueuePair's posting calls; qp.py adds what isn't on the hot path.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from libc.errno cimport EOPNOTSUPP
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from aiordma cimport _ibv as v
from aiordma._operation cimport REQUEST_RECV, Completion
from aiordma._workqueue cimport WorkQueue
from aiordma._memory cimport MemorySlice, Region, RemoteBuffer, enter_all

from mmap import mmap
from operator import index

from aiordma._waitable import no_copy
from aiordma.errors import (
    AccessFlagsError,
    BufferAccessError,
    ClosedError,
    QPStateError,
    UnsupportedError,
    UsageError,
    VerbsError,
)

cdef int RECV = REQUEST_RECV

_STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")


cdef class _Pinned:
    """The buffer exports of inline data, until it's copied into the queue."""

    cdef Py_buffer views[MAX_SGE]
    cdef int n

    cdef int add(self, object source) except -1:
        try:
            PyObject_GetBuffer(source, &self.views[self.n], PyBUF_SIMPLE)
        except (BufferError, ValueError) as e:
            if isinstance(e, ValueError) and isinstance(source, (memoryview, mmap)):
                raise BufferAccessError(f"the {type(source).__name__} has no memory any more: {e}") from e
            raise BufferAccessError(
                f"the {type(source).__name__} isn't C-contiguous ({e}), and its bytes between would be sent too: copy it "
                "(numpy.ascontiguousarray)"
            ) from e
        self.n += 1
        return 0

    cpdef int release(self) except -1:
        while self.n:
            self.n -= 1
            PyBuffer_Release(&self.views[self.n])
        return 0

    def __dealloc__(self):
        self.release()


cdef tuple _parts(object local, uint32_t limit, str what):
    """``local`` as a tuple of parts, no longer than the queue's scatter/gather lists."""
    cdef tuple parts = tuple(local)
    if <uint32_t>len(parts) > limit:
        raise UsageError(
            f"{len(parts)} buffers in one work request, but this queue was made for {what}={limit}: create the QP with "
            f"a larger {what}, or post several"
        )
    return parts


cdef int _add(v.ibv_sge *sge, MemorySlice part, int need, object domain) except -1:
    """One scatter/gather entry; 0 where it would be empty."""
    cdef Region region = part.region
    if not region.open:
        raise ClosedError(f"{part!r}: its memory region is closed")
    if region.domain is not domain:
        raise UsageError(f"{part!r} belongs to another device: a memory region works only with QPs of its own device")
    if need & ~region.access:
        raise AccessFlagsError(
            f"{part!r} is registered without LOCAL_WRITE (read-only), but the device would write to it: register a "
            "writable buffer with Access.LOCAL_WRITE"
        )
    if part.length == 0:
        return 0
    if part.length > MAX_SGE_BYTES:
        raise UsageError(f"{part!r}: one buffer of a work request holds at most {MAX_SGE_BYTES} bytes: slice it")
    sge.addr = part.addr
    sge.length = <uint32_t>part.length
    sge.lkey = region.lkey
    return 1


cdef object _number(object value):
    """An int as it is, numpy's and others' as ints; None for what is none."""
    if type(value) is int:
        return value
    try:
        return index(value)
    except TypeError:
        return None


cdef uint32_t unsigned32(object value, str what) except? 0xFFFFFFFF:
    cdef object number = _number(value)
    if number is None or not 0 <= number <= 0xFFFFFFFF:
        raise UsageError(f"{what} is an unsigned 32-bit number, not {value!r}")
    return number


cdef uint64_t _unsigned64(object value, str what) except? 0xFFFFFFFFFFFFFFFF:
    cdef object number = _number(value)
    if number is None or not -(1 << 63) <= number < 1 << 64:
        raise UsageError(f"{what} is a 64-bit number, not {value!r}")
    return <uint64_t>(number & 0xFFFFFFFFFFFFFFFF)


cdef int _lost(WorkQueue queue) except -1:
    """Raises what ended a queue that nobody closed: the error of its CQ, or of the device."""
    if queue.cq.error is not None:
        raise queue.cq.error
    return 0


cdef class Receiver:
    """What receives are posted to."""

    def __reduce__(self):
        no_copy(self)

    def _attach_queue(self, WorkQueue queue not None, domain, uint32_t max_sge):
        self._recv = queue
        self.domain = domain
        self._max_recv_sge = min(max_sge, <uint32_t>MAX_SGE)

    cpdef Completion _post_receive(self, object local):
        cdef WorkQueue queue = self._recv
        cdef v.ibv_sge sges[MAX_SGE]
        cdef Completion c
        cdef int n = 0
        cdef tuple parts
        if queue is None:
            raise UsageError("this QP takes its receives from an SRQ: post them there")
        queue.cq.hooks.check()
        if queue.closed:
            _lost(queue)
            raise ClosedError("closed: no more receives can be posted")
        queue._check_alive()
        c = Completion.__new__(Completion)
        c.hooks = queue.cq.hooks
        c.queue = queue
        c.asked = RECV
        c._status = -1
        c._opcode = -1
        c.signaled = True
        c.remaining = 1
        if isinstance(local, MemorySlice):
            n = _add(&sges[0], <MemorySlice>local, LOCAL_WRITE, self.domain)
            c.keepalive = local
        elif local is not None:
            if isinstance(local, (bytes, bytearray, memoryview)) or not isinstance(local, (list, tuple)):
                raise BufferAccessError(
                    f"a receive needs registered memory, not {type(local).__name__}: mr = await device.reg_mr(buffer)"
                )
            parts = _parts(local, self._max_recv_sge, "max_recv_sge")
            for part in parts:
                if not isinstance(part, MemorySlice):
                    raise BufferAccessError(f"a receive needs slices of registered memory, not {type(part).__name__}")
                n += _add(&sges[n], <MemorySlice>part, LOCAL_WRITE, self.domain)
            c.keepalive = parts
        if n:
            c.local_addr = sges[0].addr
            c.local_key = sges[0].lkey
        for i in range(n):
            c.local_len += sges[i].length
        enter_all(c.keepalive)
        try:
            queue._submit_recv(sges, n, c)
        except BaseException as e:
            c.internal = True  # raised here, nobody else to tell
            c._fail(e)
            raise
        return c


cdef class QueuePairBase(Receiver):
    """The posting calls of a QP. All of them post at once and return a :class:`Completion` to await.

    ``local`` is a slice of registered memory (``mr``, ``mr[0:64]``), a list of them (gathered or scattered in order),
    None for no data, or, where the device only reads it and it's no longer than ``max_inline_data``, any
    bytes-like object (copied into the work request). ``remote`` is the peer's :class:`RemoteBuffer`; the transfer has
    the length of ``local``, which may be shorter than ``remote``.

    Keyword arguments, from ibv_post_send(3): ``signaled`` False: no completion of its own; the Completion is resolved
    by the next signalled one on this QP (one is sent when you await it). ``fence``: starts after the RDMA reads and
    atomics before it. ``solicited``: raises an event at a peer that armed for solicited ones. ``inline``: None lets
    aiordma copy data of up to ``max_inline_data`` bytes into the work request; True insists, False forbids.

    Errors before anything is posted: :class:`UsageError`, :class:`BufferAccessError`, :class:`AccessFlagsError`,
    :class:`QPStateError`, :class:`ClosedError`, :class:`WrongLoopError`.
    """

    def _setup(self, uintptr_t qp, WorkQueue send not None, WorkQueue recv, domain, uint32_t max_send_sge,
               uint32_t max_recv_sge, uint32_t max_inline_data, uint64_t max_message, bint always_signal):
        self.qp = <v.ibv_qp *>qp
        self._send = send
        self._held = send.held
        self._recv = recv
        self.domain = domain
        self._max_send_sge = min(max_send_sge, <uint32_t>MAX_SGE)
        self._max_recv_sge = min(max_recv_sge, <uint32_t>MAX_SGE)
        self._max_inline_data = max_inline_data
        self._max_message = max_message
        self.always_signal = always_signal

    def _detach(self) -> None:
        """The verbs QP is gone."""
        self.qp = NULL

    # -------------------------------------------------------------- building

    cdef Completion _new(self, int request, unsigned int flags):
        cdef Completion c = Completion.__new__(Completion)
        c.hooks = self._send.cq.hooks
        c.queue = self._send
        c.asked = request
        c._status = -1
        c._opcode = -1
        c.signaled = flags & v.IBV_SEND_SIGNALED != 0
        c.remaining = 1
        return c

    cdef object _pins(self):
        """A place for the buffer exports of inline data."""
        return _Pinned.__new__(_Pinned)

    cdef int _check_send(self) except -1:
        self._send.cq.hooks.check()
        if self._send.closed or self.qp == NULL:
            _lost(self._send)
            raise ClosedError(f"QP {self._send.qp_num:#x} is closed")
        if self._held != NULL and self._held[0] == NULL:
            self._send._check_alive()
        # RTS and SQD take sends; in SQE and ERR they are flushed, which is the answer that the caller should see
        # (InfiniBand Architecture Specification vol. 1, 10.3.1).
        if <int>self.qp.state < <int>v.IBV_QPS_RTS:
            raise QPStateError(
                f"QP {self._send.qp_num:#x} is in {_STATES[<int>self.qp.state]}: connect it before posting sends "
                "(await qp.connect(peer_info))"
            )
        return 0

    cdef int _gather_source(self, v.ibv_send_wr *wr, v.ibv_sge *sges, Completion c, object local, int need,
                            object inline, void *pinned) except -1:
        """Fills the scatter/gather list of ``local``."""
        cdef uint64_t total = 0
        cdef int n = 0, i
        cdef bint foreign = False
        cdef bint direct = True  # every part's addresses are this process's own: it can be copied inline
        cdef tuple parts
        cdef _Pinned pins
        wr.sg_list = sges
        if isinstance(local, MemorySlice):
            n = _add(sges, <MemorySlice>local, need, self.domain)
            c.keepalive = local
            total = (<MemorySlice>local).length
            direct = (<MemorySlice>local).region.direct
        elif local is None:
            pass
        else:
            if isinstance(local, (list, tuple)):
                parts = _parts(local, self._max_send_sge, "max_send_sge")
            else:
                parts = (local,)
            for part in parts:
                if isinstance(part, MemorySlice):
                    i = _add(&sges[n], <MemorySlice>part, need, self.domain)
                    total += (<MemorySlice>part).length
                    direct &= (<MemorySlice>part).region.direct
                elif PyObject_CheckBuffer(part):
                    if need:
                        raise BufferAccessError(
                            f"the device would write to it, so it must be registered memory, not {type(part).__name__}: "
                            "mr = await device.reg_mr(buffer)"
                        )
                    pins = <_Pinned>pinned
                    pins.add(part)
                    foreign = True
                    i = pins.views[pins.n - 1].len > 0
                    if pins.views[pins.n - 1].len > MAX_SGE_BYTES:
                        raise UsageError(f"{pins.views[pins.n - 1].len} bytes are too many for inline data")
                    sges[n].addr = <uint64_t><uintptr_t>pins.views[pins.n - 1].buf
                    sges[n].length = <uint32_t>pins.views[pins.n - 1].len
                    sges[n].lkey = 0
                    total += sges[n].length
                else:
                    raise BufferAccessError(
                        f"{type(part).__name__} is no memory: pass a slice of a MemoryRegion, or bytes to send inline"
                    )
                n += i
            if not foreign:
                c.keepalive = parts
        wr.num_sge = n
        if total > self._max_message:
            raise UsageError(f"a message of {total} bytes is longer than the port's {self._max_message}: split it")
        if foreign:
            if not direct:
                raise UsageError("bytes and slices of an mkey can't be mixed: the one can only go inline, the other can't")
            if total > self._max_inline_data:
                raise BufferAccessError(
                    f"{total} bytes of unregistered memory don't fit inline (max_inline_data={self._max_inline_data}): "
                    "register the buffer (mr = await device.reg_mr(buffer)), or create the QP with more inline data"
                )
            if inline is False:
                raise BufferAccessError("unregistered memory can only be sent inline, but inline is False")
            wr.send_flags |= v.IBV_SEND_INLINE
        elif need == 0 and (inline is None or inline):
            if direct and total <= self._max_inline_data and (total or inline):
                wr.send_flags |= v.IBV_SEND_INLINE
            elif inline and not direct:
                raise UsageError("inline: data behind an mkey or in device memory can't be copied into a work request")
            elif inline:
                raise UsageError(
                    f"inline: {total} bytes, but this QP was made for max_inline_data={self._max_inline_data}"
                )
        c.local_len = total
        if n:
            c.local_addr = sges[0].addr
            c.local_key = sges[0].lkey
        return 0

    cdef int _build(self, v.ibv_send_wr *wr, v.ibv_sge *sges, Completion c, int opcode, object local,
                    RemoteBuffer remote, object imm, object inline, unsigned int flags, void *pinned) except -1:
        """One send, write or read."""
        cdef int need = LOCAL_WRITE if opcode == v.IBV_WR_RDMA_READ else 0
        memset(wr, 0, sizeof(v.ibv_send_wr))
        wr.opcode = <v.ibv_wr_opcode>opcode
        wr.send_flags = flags | (v.IBV_SEND_SIGNALED if self.always_signal else 0)
        if need and inline:
            raise UsageError("an RDMA read has no data to send inline")
        self._gather_source(wr, sges, c, local, need, inline, pinned)
        if imm is not None:
            if opcode == v.IBV_WR_SEND_WITH_INV or opcode == v.IBV_WR_LOCAL_INV:
                wr.invalidate_rkey = unsigned32(imm, "an rkey")
            else:
                wr.imm_data = v.htobe32(unsigned32(imm, "imm"))
        if remote is not None:
            if c.local_len > remote.length:
                raise UsageError(f"{c.local_len} bytes don't fit into {remote!r}")
            if remote.access >= 0:
                if need == 0 and not remote.access & REMOTE_WRITE:
                    raise AccessFlagsError(f"{remote!r} was registered without REMOTE_WRITE")
                if need and not remote.access & REMOTE_READ:
                    raise AccessFlagsError(f"{remote!r} was registered without REMOTE_READ")
            v.aior_set_rdma(wr, remote.addr, remote.rkey)
            c.remote_addr = remote.addr
            c.remote_key = remote.rkey
        return 0

    cdef int _build_atomic(self, v.ibv_send_wr *wr, v.ibv_sge *sges, Completion c, int opcode, object local,
                           RemoteBuffer remote, object compare_add, object swap, unsigned int flags) except -1:
        memset(wr, 0, sizeof(v.ibv_send_wr))
        wr.opcode = <v.ibv_wr_opcode>opcode
        wr.send_flags = flags | (v.IBV_SEND_SIGNALED if self.always_signal else 0)
        if not isinstance(local, MemorySlice) or (<MemorySlice>local).length != 8:
            raise BufferAccessError(
                "an atomic returns the old value into 8 bytes of registered memory: pass a slice of 8 bytes as local"
            )
        if not (<MemorySlice>local).region.direct:
            raise BufferAccessError(
                "an atomic's old value goes into memory of this process, not through an mkey or into device memory"
            )
        if remote.length < 8:
            raise UsageError(f"an atomic works on 8 bytes, {remote!r} has fewer")
        if remote.addr & 7:
            raise UsageError(f"an atomic needs an address that is a multiple of 8: {remote!r}")
        if remote.access >= 0 and not remote.access & REMOTE_ATOMIC:
            raise AccessFlagsError(f"{remote!r} was registered without REMOTE_ATOMIC")
        self._gather_source(wr, sges, c, local, LOCAL_WRITE, False, NULL)
        v.aior_set_atomic(
            wr, remote.addr, remote.rkey, _unsigned64(compare_add, "the operand"), _unsigned64(swap, "the operand")
        )
        c.remote_addr = remote.addr
        c.remote_key = remote.rkey
        return 0

    cdef Completion _post(self, int opcode, object local, RemoteBuffer remote, object imm, object inline,
                          unsigned int flags):
        cdef v.ibv_send_wr wr
        cdef v.ibv_sge sges[MAX_SGE]
        cdef Completion c
        cdef _Pinned pins = None
        self._check_send()
        c = self._new(opcode, flags)
        if self.always_signal:
            c.signaled = True
        if not isinstance(local, MemorySlice) and local is not None:
            pins = _Pinned.__new__(_Pinned)
        self._build(&wr, sges, c, opcode, local, remote, imm, inline, flags, <void *>pins)
        enter_all(c.keepalive)
        try:
            self._send._submit(&wr, c)
        except BaseException as e:
            c.internal = True  # raised here, nobody else to tell
            c._fail(e)
            raise
        finally:
            if pins is not None:
                pins.release()
        return c

    # -------------------------------------------------------------- the calls

    def send(self, local, *, imm=None, invalidate_rkey=None, bint signaled=True, bint fence=False,
             bint solicited=False, inline=None) -> Completion:
        """SEND, SEND_WITH_IMM or SEND_WITH_INV: ``local`` goes to the peer's next posted receive.

        Completes when the peer's device has acknowledged it (RC). ``imm``: an unsigned 32-bit number for the peer's
        completion. ``invalidate_rkey``: an rkey of the peer's to invalidate there; not together with ``imm``.
        """
        cdef int opcode = v.IBV_WR_SEND
        cdef object extra = None
        if imm is not None:
            if invalidate_rkey is not None:
                raise UsageError("a send carries an imm or an rkey to invalidate, not both")
            opcode = v.IBV_WR_SEND_WITH_IMM
            extra = imm
        elif invalidate_rkey is not None:
            opcode = v.IBV_WR_SEND_WITH_INV
            extra = invalidate_rkey
        return self._post(opcode, local, None, extra, inline, send_flags(signaled, fence, solicited))

    def recv(self, local) -> Completion:
        """Posts a receive into ``local``; completes when a SEND or a write with immediate has used it.

        The Completion has ``byte_len``, ``imm_data`` and, for UD QPs, ``src_qp``; a UD receive begins with 40 bytes of
        GRH. ``local`` None: no buffer, for writes with immediate. Receives may be posted before the QP is connected.
        """
        return self._post_receive(local)

    def rdma_write(self, local, remote, *, imm=None, bint signaled=True, bint fence=False,
                   bint solicited=False, inline=None) -> Completion:
        """RDMA WRITE of ``local`` to ``remote``; with ``imm`` RDMA_WRITE_WITH_IMM, which uses a receive of the peer's.

        Completes when the peer's device has acknowledged it (RC): the data is then in the peer's memory.
        """
        return self._post(
            v.IBV_WR_RDMA_WRITE if imm is None else v.IBV_WR_RDMA_WRITE_WITH_IMM,
            local, _remote(remote), imm, inline, send_flags(signaled, fence, solicited),
        )

    def rdma_read(self, local, remote, *, bint signaled=True, bint fence=False) -> Completion:
        """RDMA READ of ``remote`` into ``local``; completes when the data is there."""
        return self._post(v.IBV_WR_RDMA_READ, local, _remote(remote), None, None, send_flags(signaled, fence, False))

    def atomic_fetch_add(self, local, remote, add, *, bint signaled=True,
                         bint fence=False) -> Completion:
        """Adds ``add`` (64 bits, wraps) to the 8 bytes at ``remote``; ``completion.value`` is what was there before.

        ``local``: 8 bytes that receive the old value, in host byte order. ``remote``: its address a multiple of 8.
        """
        return self._post_atomic(v.IBV_WR_ATOMIC_FETCH_AND_ADD, local, _remote(remote), add, 0, signaled, fence)

    def atomic_cmp_swp(self, local, remote, compare, swap, *, bint signaled=True,
                       bint fence=False) -> Completion:
        """Stores ``swap`` into the 8 bytes at ``remote`` if they equal ``compare``; ``completion.value`` is the old value.

        It took effect if ``completion.value == compare``. ``local`` and ``remote`` as in :meth:`atomic_fetch_add`.
        """
        return self._post_atomic(v.IBV_WR_ATOMIC_CMP_AND_SWP, local, _remote(remote), compare, swap, signaled, fence)

    def local_inv(self, rkey, *, bint signaled=True, bint fence=False) -> Completion:
        """LOCAL_INV: invalidates a memory window or mkey of this device by its ``rkey``."""
        return self._post(v.IBV_WR_LOCAL_INV, None, None, rkey, False, send_flags(signaled, fence, False))

    def _post_atomic(self, int opcode, local, RemoteBuffer remote, compare_add, swap, bint signaled, bint fence):
        cdef v.ibv_send_wr wr
        cdef v.ibv_sge sges[MAX_SGE]
        cdef unsigned int flags = send_flags(signaled, fence, False)
        cdef Completion c
        self._check_send()
        c = self._new(opcode, flags)
        if self.always_signal:
            c.signaled = True
        self._build_atomic(&wr, sges, c, opcode, local, remote, compare_add, swap, flags)
        enter_all(c.keepalive)
        try:
            self._send._submit(&wr, c)
        except BaseException as e:
            c.internal = True
            c._fail(e)
            if isinstance(e, VerbsError) and e.errno == EOPNOTSUPP:
                raise UnsupportedError(self.device.name, "atomic operations") from e
            raise
        return c


cdef inline RemoteBuffer _remote(object remote):
    """``remote``, or an error that says what to pass."""
    if isinstance(remote, RemoteBuffer):
        return <RemoteBuffer>remote
    if isinstance(remote, MemorySlice):
        raise BufferAccessError("remote is a RemoteBuffer: pass mr.remote(), as the peer that owns the memory gave it")
    raise BufferAccessError(f"remote is a RemoteBuffer (from the peer's mr.remote()), not {type(remote).__name__}")


cdef RemoteBuffer remote_of(object remote):
    """The same, for other modules."""
    return _remote(remote)

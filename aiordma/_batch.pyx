# cython: language_level=3, nonecheck=True
"""Many work requests posted together: one doorbell, one completion entry, one Completion."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc

from aiordma cimport _ibv as v
from aiordma._memory cimport MemorySlice, RemoteBuffer, Use, Uses, enter_all
from aiordma._operation cimport Completion
from aiordma._post cimport (
    LOCAL_WRITE,
    MAX_SGE,
    MAX_SGE_BYTES,
    REMOTE_READ,
    REMOTE_WRITE,
    QueuePairBase,
    remote_of,
    send_flags,
    unsigned32,
)
from aiordma._workqueue cimport WorkQueue

from aiordma._waitable import no_copy
from aiordma.errors import BufferAccessError, UsageError, VerbsError


cdef class BatchingQueuePair(QueuePairBase):
    """A QP whose requests can be posted many at a time."""

    def batch(self) -> Batch:
        """An empty :class:`Batch` of this QP."""
        cdef Batch batch = Batch.__new__(Batch)
        batch.qp = self
        batch.uses = Uses.__new__(Uses)
        return batch

    def rdma_write_many(self, pairs) -> Completion:
        """RDMA WRITEs of many ``(local, remote)`` pairs with one doorbell; one Completion for all of them.

        Of none it has completed at once.
        """
        return _batch_of(self, v.IBV_WR_RDMA_WRITE, pairs).post()

    def rdma_read_many(self, pairs) -> Completion:
        """RDMA READs of many ``(local, remote)`` pairs with one doorbell; one Completion for all of them.

        Of none it has completed at once.
        """
        return _batch_of(self, v.IBV_WR_RDMA_READ, pairs).post()


cdef Batch _batch_of(QueuePairBase qp, int opcode, object pairs):
    cdef Batch batch = qp.batch()
    cdef int right = REMOTE_READ if opcode == v.IBV_WR_RDMA_READ else REMOTE_WRITE
    cdef object local, remote
    # A list of the caller's could change while its pairs are unpacked, by code of theirs.
    cdef tuple all_pairs = tuple(pairs)
    batch._reserve(<uint32_t>min(len(all_pairs), 1 << 20), <uint32_t>min(len(all_pairs), 1 << 20))
    for pair in all_pairs:
        if type(pair) is tuple and len(<tuple>pair) == 2:
            local = (<tuple>pair)[0]
            remote = (<tuple>pair)[1]
        else:
            local, remote = pair
        if isinstance(local, MemorySlice) and isinstance(remote, RemoteBuffer):
            batch._add_slice(opcode, right, <MemorySlice>local, <RemoteBuffer>remote, 0)
        else:
            batch._add_request(opcode, _registered(local), remote_of(remote), None, 0)
    return batch


cdef class Batch:
    """Work requests gathered to be posted together: one doorbell, one completion entry, one Completion.

    Add with :meth:`send`, :meth:`rdma_write`, :meth:`rdma_read`, then :meth:`post` (or ``await batch``, which posts).
    Nothing reaches the device before. The Completion finishes when all have; if one fails it carries that one's error
    and the rest is flushed. More requests than the QP has slots are posted in parts as slots free up. An empty one has
    completed at once. :meth:`repost` posts the same again, for little more than C needs.
    """

    cdef QueuePairBase qp
    cdef v.ibv_send_wr *wrs
    cdef v.ibv_sge *sges
    cdef uint32_t n, size
    cdef uint32_t nsge, sge_size
    cdef uint64_t longest  # of one buffer, and of a message
    cdef Uses uses
    cdef Use *use  # of the slice added last; what follows is whose it is
    cdef void *use_region
    cdef void *use_owner
    cdef Completion scratch
    cdef Completion completion

    def __init__(self):
        raise TypeError("made by qp.batch()")

    def __dealloc__(self):
        free(self.wrs)
        free(self.sges)

    def __reduce__(self):
        no_copy(self)

    def __len__(self) -> int:
        return self.n

    # -------------------------------------------------------------- adding

    cdef int _reserve(self, uint32_t wrs, uint32_t sges) except -1:
        """Room for so many more; their pointers to each other are always right."""
        cdef void *more
        cdef uint32_t size, i, sge = 0
        if self.completion is not None:
            raise UsageError("the batch has been posted: begin a new one")
        if self.n + wrs <= self.size and self.nsge + sges <= self.sge_size:
            return 0
        if self.n + wrs > self.size:
            size = max(self.n + wrs, self.size * 2, <uint32_t>16)
            more = realloc(self.wrs, size * sizeof(v.ibv_send_wr))
            if more == NULL:
                raise MemoryError()
            self.wrs = <v.ibv_send_wr *>more
            self.size = size
        if self.nsge + sges > self.sge_size:
            size = max(self.nsge + sges, self.sge_size * 2)
            more = realloc(self.sges, size * sizeof(v.ibv_sge))
            if more == NULL:
                raise MemoryError()
            self.sges = <v.ibv_sge *>more
            self.sge_size = size
        for i in range(self.n):
            self.wrs[i].sg_list = &self.sges[sge]
            sge += self.wrs[i].num_sge
        self._link()
        return 0

    cdef int _link(self) except -1:
        cdef uint32_t i
        for i in range(self.n):
            self.wrs[i].next = &self.wrs[i + 1]
        return 0

    cdef int _begin(self) except -1:
        """Before the first is added."""
        self.qp._check_send()
        self.longest = min(self.qp._max_message, <uint64_t>MAX_SGE_BYTES)
        return 0

    cdef int _use(self, MemorySlice part) except -1:
        cdef void *owner = <void *>(part if part.owner is None else part.owner)
        if self.use_region == <void *>part.region and self.use_owner == owner:
            self.use.n += 1
            return 0
        self.use = &self.uses.found[self.uses.add(part, 1)]
        self.use_region = <void *>part.region
        self.use_owner = owner
        return 0

    cdef int _add_slice(self, int opcode, int right, MemorySlice local, RemoteBuffer remote, unsigned int flags) except -1:
        """A write or read of one slice: as _add_request(), without what such a one can't have. Whatever is wrong with it is
        left to that to say."""
        cdef v.ibv_send_wr *wr
        cdef v.ibv_sge *sge
        cdef int need = LOCAL_WRITE if right == REMOTE_READ else 0
        if self.n == self.size or self.nsge == self.sge_size or self.completion is not None:
            self._reserve(1, 1)
        if self.n == 0:
            self._begin()
        if (
            not local.region.open or local.region.domain is not self.qp.domain or need & ~local.region.access
            or not 0 < local.length <= self.longest or local.length > remote.length
            or remote.access >= 0 and not remote.access & right
        ):
            return self._add_request(opcode, local, remote, None, flags)
        self._use(local)
        wr = &self.wrs[self.n]
        sge = &self.sges[self.nsge]
        wr.next = wr + 1
        wr.sg_list = sge
        wr.num_sge = 1
        wr.opcode = <v.ibv_wr_opcode>opcode
        wr.send_flags = flags | (v.IBV_SEND_SIGNALED if self.qp.always_signal else 0)
        v.aior_set_rdma(wr, remote.addr, remote.rkey)
        sge.addr = local.addr
        sge.length = <uint32_t>local.length
        sge.lkey = local.region.lkey
        self.nsge += 1
        self.n += 1
        return 0

    cdef int _add_request(self, int opcode, object local, RemoteBuffer remote, object imm, unsigned int flags) except -1:
        cdef v.ibv_send_wr *wr
        cdef Completion c
        if imm is not None:
            imm = unsigned32(imm, "imm")
        # Nothing from here on runs code of the caller's, which could add to this batch and move its arrays.
        self._reserve(1, MAX_SGE)
        if self.n == 0:
            self._begin()
        if self.scratch is None:
            self.scratch = Completion.__new__(Completion)
            self.scratch.queue = self.qp._send
        c = self.scratch
        wr = &self.wrs[self.n]
        # Inline data would have to be copied before post(); registered memory needs no copy, so batches don't inline.
        self.qp._build(wr, &self.sges[self.nsge], c, opcode, local, remote, imm, False, flags, NULL)
        wr.send_flags &= ~<unsigned int>v.IBV_SEND_INLINE
        wr.next = wr + 1
        if type(c.keepalive) is tuple:
            for part in <tuple>c.keepalive:
                self._use(<MemorySlice>part)
        elif c.keepalive is not None:
            self._use(<MemorySlice>c.keepalive)
        c.keepalive = None
        self.nsge += wr.num_sge
        self.n += 1
        return 0

    def send(self, local, *, imm=None, bint fence=False, bint solicited=False) -> None:
        """Adds a SEND."""
        self._add_request(v.IBV_WR_SEND if imm is None else v.IBV_WR_SEND_WITH_IMM, _registered(local), None, imm,
                          send_flags(False, fence, solicited))

    def rdma_write(self, local, remote, *, imm=None, bint fence=False,
                   bint solicited=False) -> None:
        """Adds an RDMA WRITE."""
        cdef unsigned int flags = send_flags(False, fence, solicited)
        if imm is None and isinstance(local, MemorySlice) and isinstance(remote, RemoteBuffer):
            self._add_slice(v.IBV_WR_RDMA_WRITE, REMOTE_WRITE, <MemorySlice>local, <RemoteBuffer>remote, flags)
            return
        self._add_request(v.IBV_WR_RDMA_WRITE if imm is None else v.IBV_WR_RDMA_WRITE_WITH_IMM, _registered(local),
                          remote_of(remote), imm, flags)

    def rdma_read(self, local, remote, *, bint fence=False) -> None:
        """Adds an RDMA READ."""
        cdef unsigned int flags = send_flags(False, fence, False)
        if isinstance(local, MemorySlice) and isinstance(remote, RemoteBuffer):
            self._add_slice(v.IBV_WR_RDMA_READ, REMOTE_READ, <MemorySlice>local, <RemoteBuffer>remote, flags)
            return
        self._add_request(v.IBV_WR_RDMA_READ, _registered(local), remote_of(remote), None, flags)

    # -------------------------------------------------------------- posting

    def post(self) -> Completion:
        """Posts the batch and returns its Completion; again: the same Completion."""
        if self.completion is None:
            self.completion = self._post()
        return self.completion

    def repost(self) -> Completion:
        """Posts the same work requests once more and returns a Completion of their own.

        The batch was built and checked once and isn't built again, so this is what to use for transfers that recur. The
        ones before may still be in flight. Errors as with :meth:`post`: a region was closed meanwhile, the QP is closed.
        """
        cdef uint32_t i
        if self.completion is None:
            return self.post()
        if not self.qp.always_signal:
            for i in range(self.n):
                self.wrs[i].send_flags &= ~<unsigned int>v.IBV_SEND_SIGNALED
        return self._post()

    cdef Completion _post(self):
        cdef WorkQueue queue = self.qp._send
        cdef Completion c
        cdef uint32_t i = 0, room, k
        self.qp._check_send()
        if queue.cq.error is not None:
            raise queue.cq.error
        if self.n == 0:
            c = self.qp._new(v.IBV_WR_RDMA_WRITE, v.IBV_SEND_SIGNALED)
            c.remaining = 0
            c._settle()
            return c
        self.uses.check_open()
        room = queue._room()
        if room < self.n:
            queue._check_waiting(self.n - room)
        queue.cq._before_post()
        self.wrs[self.n - 1].next = NULL
        self.wrs[self.n - 1].send_flags |= v.IBV_SEND_SIGNALED
        c = self.qp._new(<int>self.wrs[0].opcode, v.IBV_SEND_SIGNALED)
        c.remaining = c.total = self.n
        c.keepalive = self.uses
        if self.nsge:
            c.local_addr = self.sges[0].addr
            c.local_key = self.sges[0].lkey
        enter_all(self.uses)
        c.batch = self
        queue.posted_before_error = 0
        try:
            while i < self.n:
                room = queue._room()
                if room == 0:
                    break
                k = min(room, self.n - i)
                # The last of each part is signalled, or a queue full of unsignalled requests would never drain.
                self.wrs[i + k - 1].next = NULL
                self.wrs[i + k - 1].send_flags |= v.IBV_SEND_SIGNALED
                queue._post_chain(&self.wrs[i], k, c)
                i += k
                if i < self.n:
                    self.wrs[i - 1].next = &self.wrs[i]
            while i < self.n:
                queue._defer(&self.wrs[i], c)
                i += 1
        except (VerbsError, MemoryError) as e:
            # Part of it may be with the device already; the rest never will be.
            i += queue.posted_before_error
            self._link()
            c.error = e
            c.remaining -= self.n - i
            c.total = i
            # The one that was to report the end of them is among the rest: whoever awaits them asks for another.
            c.signaled = False
            if i == 0:
                c.internal = True  # raised here, nobody else to tell
                c._fail(e)
                raise
        queue.cq._after_post()
        return c

    def _blame(self, Completion c not None, uint32_t failed) -> None:
        """The request number ``failed`` is what the Completion tells of."""
        cdef v.ibv_send_wr *wr = &self.wrs[min(failed, self.n - 1)]
        cdef int i
        c.asked = wr.opcode
        c.local_addr = c.local_key = c.local_len = 0
        if wr.num_sge:
            c.local_addr = wr.sg_list[0].addr
            c.local_key = wr.sg_list[0].lkey
        for i in range(wr.num_sge):
            c.local_len += wr.sg_list[i].length
        v.aior_get_rdma(wr, &c.remote_addr, &c.remote_key)

    def __await__(self):
        return self.post().__await__()


cdef object _registered(object local):
    """``local``, a list of it as a plain tuple. Batches take registered memory only."""
    cdef tuple parts
    if local is None or isinstance(local, MemorySlice):
        return local
    if isinstance(local, (list, tuple)):
        parts = tuple(local)
        for part in parts:
            if not isinstance(part, MemorySlice):
                raise BufferAccessError(f"a batch takes slices of registered memory, not {type(part).__name__}")
        return parts
    raise BufferAccessError(f"a batch takes slices of registered memory, not {type(local).__name__}")

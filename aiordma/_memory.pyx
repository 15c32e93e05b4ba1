# cython: language_level=3, nonecheck=True
"""Registered memory as the data plane sees it: a registration, slices of it, and its description for a peer."""

import struct
from operator import index

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc

from aiordma.errors import ClosedError, UsageError

_REMOTE = struct.Struct("!4sBxxxQQIi")
_MAGIC = b"aiRB"
_VERSION = 1


cdef tuple _bounds(object key, uint64_t length, str what):
    """(offset, size) of a slice; like a sequence's, but what lies outside is an error, not clipped."""
    if not isinstance(key, slice):
        raise TypeError(f"this {what} takes a slice of bytes, as in [0:8], not {key!r}")
    if key.step is not None and key.step != 1:
        raise UsageError(f"this {what} can only be sliced with step 1: for a strided layout see aiordma.mlx5's map_strided")
    start = 0 if key.start is None else index(key.start)
    stop = length if key.stop is None else index(key.stop)
    if start < 0:
        start += length
    if stop < 0:
        stop += length
    if not 0 <= start <= stop <= length:
        raise UsageError(f"[{key.start}:{key.stop}] is outside the {length} bytes of this {what}")
    return start, stop - start


cdef class BufferPin:
    """Holds a buffer export: while it does, the memory can be neither freed nor resized (PEP 3118).

    ``address`` and ``nbytes`` of the C-contiguous bytes; a memoryview of the pin shows them.
    """

    cdef Py_buffer exported
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes
    cdef readonly bint readonly
    cdef bint held
    cdef int views

    def __init__(self, source, bint writable):
        PyObject_GetBuffer(source, &self.exported, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True
        self.address = <uint64_t><uintptr_t>self.exported.buf
        self.nbytes = self.exported.len
        self.readonly = self.exported.readonly

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.held:
            raise BufferError("the memory region is closed")
        PyBuffer_FillInfo(view, self, self.exported.buf, self.exported.len, self.exported.readonly, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.views -= 1

    def release(self) -> None:
        """Gives the export back, or leaves that to the garbage collector while views of it exist."""
        if self.held and self.views == 0:
            self.held = False
            PyBuffer_Release(&self.exported)

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.exported)


cdef class Region:
    """One registration: where it is, its keys, and how many work requests use it now.

    ``inflight`` counts; while it isn't zero the registration must stay (verbs.h: an MR may be deregistered only when
    nothing uses it). ``domain`` is the protection domain it belongs to; ``direct`` tells whether addresses in it are this
    process's own (an mkey's are offsets); ``buffer`` is the buffer export that keeps the memory from being freed or resized.
    """

    def __init__(self, uint64_t addr, uint64_t length, uint32_t lkey, uint32_t rkey, int access, domain=None,
                 buffer=None, bint direct=True):
        self.addr = addr
        self.length = length
        self.lkey = lkey
        self.rkey = rkey
        self.access = access
        self.domain = domain
        self.buffer = buffer
        self.open = True
        self.direct = direct
        self.inflight = 0

    def shut(self) -> None:
        """No new work request may name it."""
        self.open = False

    def release(self) -> None:
        """Drops the buffer export. Only when deregistered."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            (<BufferPin>buffer).release()

    cdef int announce_idle(self) except -1:
        """No work request uses it any more."""
        cdef Waitable idle = self.idle
        if idle is not None:
            self.idle = None
            idle._finish()
        return 0

    def notify_idle(self, Waitable signal) -> None:
        """``signal`` finishes when no work request uses the region."""
        if self.inflight == 0:
            signal._finish()
        else:
            self.idle = signal


cdef class MemorySlice:
    """Part of a registered region: a local source or target.

    ``addr`` and ``length`` in bytes. Slicing gives smaller ones (``mr[0:8]``); bounds are checked. It keeps the
    MemoryRegion and its buffer alive; after ``mr.close()`` it can't be posted any more.
    """

    def __init__(self, Region region not None, uint64_t offset=0, length=None):
        cdef uint64_t size = region.length - offset if length is None else length
        if offset > region.length or size > region.length - offset:
            raise UsageError(f"{size} bytes at offset {offset} are outside the region's {region.length} bytes")
        self.region = region
        self.addr = region.addr + offset
        self.length = size

    def __getitem__(self, key) -> MemorySlice:
        cdef uint64_t offset, size
        offset, size = _bounds(key, self.length, "memory")
        cdef MemorySlice part = MemorySlice.__new__(MemorySlice)
        part.region = self.region
        part.owner = self if self.owner is None else self.owner
        part.addr = self.addr + offset
        part.length = size
        return part

    def __len__(self) -> int:
        return self.length

    def __reduce__(self):
        raise TypeError(
            f"a {type(self).__name__} can't be copied or pickled, it's memory of this process: send a peer its remote()"
        )

    @property
    def lkey(self) -> int:
        """The region's key for local use; aiordma puts it into work requests by itself."""
        return self.region.lkey

    @property
    def rkey(self) -> int:
        """The region's key for peers; :meth:`remote` has it."""
        return self.region.rkey

    @property
    def access(self) -> int:
        """Access flags (enum ibv_access_flags) of the registration."""
        return self.region.access

    @property
    def offset(self) -> int:
        """Bytes from the start of the region."""
        return self.addr - self.region.addr

    def view(self) -> memoryview:
        """The bytes, as a memoryview on the registered buffer (no copy). Release it before closing the MR."""
        if self.region.buffer is None:
            raise ClosedError("the memory region is closed, or was not made from a Python buffer")
        cdef uint64_t start = self.addr - self.region.addr
        return memoryview(self.region.buffer)[start:start + self.length]

    def remote(self) -> RemoteBuffer:
        """What a peer needs to read or write these bytes."""
        if not self.region.open:
            raise ClosedError("the memory region is closed: its rkey is of no more use")
        return RemoteBuffer(self.addr, self.length, self.region.rkey, self.region.access)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.addr:#x}+{self.length} lkey={self.region.lkey:#x}>"


# ---------------------------------------------------------------- what work requests use


cdef class Uses:
    """The regions that many work requests use, each counted once and kept alive with whom it belongs to.

    Slices of one region that follow each other are one entry, whatever their number.
    """

    def __cinit__(self):
        self.parts = []

    def __dealloc__(self):
        free(self.found)

    cdef uint32_t add(self, MemorySlice part, uint32_t n) except? 0xFFFFFFFF:
        """``n`` more work requests use the region of ``part``; the index of its entry."""
        cdef void *owner = <void *>(part if part.owner is None else part.owner)
        cdef void *region = <void *>part.region
        cdef void *more
        cdef uint32_t i, size
        # A batch alternates between a few regions at most.
        for i in range(min(self.n, <uint32_t>4)):
            if self.found[self.n - 1 - i].region == region and self.found[self.n - 1 - i].owner == owner:
                self.found[self.n - 1 - i].n += n
                return self.n - 1 - i
        if self.n == self.size:
            size = self.size * 2 if self.size else 4
            more = realloc(self.found, size * sizeof(Use))
            if more == NULL:
                raise MemoryError()
            self.found = <Use *>more
            self.size = size
        self.parts.append(part)
        self.found[self.n].region = region
        self.found[self.n].owner = owner
        self.found[self.n].n = n
        self.n += 1
        return self.n - 1

    cdef int check_open(self) except -1:
        for part in self.parts:
            if not (<MemorySlice>part).region.open:
                raise ClosedError(f"{part!r}: its memory region is closed")
        return 0


cdef int enter_all(object used) except -1:
    """Counts a work request on its regions: ``used`` is None, a MemorySlice, a tuple of them, or Uses."""
    cdef Uses many
    cdef uint32_t i
    if used is None:
        return 0
    if isinstance(used, MemorySlice):
        (<MemorySlice>used).region.inflight += 1
    elif isinstance(used, Uses):
        many = <Uses>used
        for i in range(many.n):
            (<Region>many.found[i].region).inflight += many.found[i].n
    else:
        for part in <tuple>used:
            (<MemorySlice>part).region.inflight += 1
    return 0


cdef int leave_all(object used) except -1:
    """The work request no longer uses them."""
    cdef Uses many
    cdef uint32_t i
    if used is None:
        return 0
    if isinstance(used, MemorySlice):
        return leave_region((<MemorySlice>used).region, 1)
    if isinstance(used, Uses):
        many = <Uses>used
        for i in range(many.n):
            leave_region(<Region>many.found[i].region, many.found[i].n)
    else:
        for part in <tuple>used:
            leave_region((<MemorySlice>part).region, 1)
    return 0


# ---------------------------------------------------------------- a peer's memory


cdef object _number(str name, object value):
    """An int as it is, numpy's and others' as ints."""
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise UsageError(f"RemoteBuffer: {name} is a number, not {value!r}")


cdef class RemoteBuffer:
    """A peer's memory: address, length in bytes, rkey, and its access flags where they are known.

    Made by ``mr.remote()`` on the side that owns the memory, sent as :meth:`to_bytes` or :meth:`to_json`, sliced with
    bounds checks on the side that uses it. ``access`` None: unknown, the peer's device decides.
    """

    def __init__(self, addr, length, rkey, access=None):
        addr, length, rkey = _number("addr", addr), _number("length", length), _number("rkey", rkey)
        access = None if access is None else _number("access", access)
        if not 0 <= addr < 1 << 64 or not 0 <= length < 1 << 64 or addr + length > 1 << 64:
            raise UsageError(f"remote range {addr:#x}+{length} isn't within 64-bit addresses")
        if not 0 <= rkey < 1 << 32:
            raise UsageError(f"rkey {rkey} isn't an unsigned 32-bit number")
        if access is not None and not 0 <= access < 1 << 31:
            raise UsageError(f"access {access} isn't flags of enum ibv_access_flags")
        self.addr = addr
        self.length = length
        self.rkey = rkey
        self.access = -1 if access is None else access

    @property
    def access_flags(self):
        """enum ibv_access_flags as int, or None where it isn't known."""
        return None if self.access < 0 else self.access

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key) -> RemoteBuffer:
        cdef uint64_t offset, size
        offset, size = _bounds(key, self.length, "remote memory")
        cdef RemoteBuffer part = RemoteBuffer.__new__(RemoteBuffer)
        part.addr = self.addr + offset
        part.length = size
        part.rkey = self.rkey
        part.access = self.access
        return part

    def to_bytes(self) -> bytes:
        """32 bytes, network byte order; :meth:`from_bytes` reads them."""
        return _REMOTE.pack(_MAGIC, _VERSION, self.addr, self.length, self.rkey, self.access)

    @classmethod
    def from_bytes(cls, data) -> RemoteBuffer:
        """The inverse of :meth:`to_bytes`; :class:`UsageError` for anything else."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UsageError(f"a RemoteBuffer is made from {_REMOTE.size} bytes, not from {type(data).__name__}")
        data = bytes(data)
        if len(data) != _REMOTE.size:
            raise UsageError(f"a RemoteBuffer is {_REMOTE.size} bytes, not {len(data)}")
        magic, version, addr, length, rkey, access = _REMOTE.unpack(data)
        if magic != _MAGIC or version != _VERSION:
            raise UsageError(f"not a RemoteBuffer of version {_VERSION}: starts with {data[:5]!r}")
        if data[5:8] != bytes(3):
            raise UsageError("not a RemoteBuffer: reserved bytes aren't zero")
        return cls(addr, length, rkey, None if access == -1 else access)

    def to_json(self) -> dict:
        """A dict of numbers for ``json.dumps``; addresses are hex strings, since JSON numbers lose 64-bit ones."""
        data = {"addr": f"{self.addr:#x}", "length": self.length, "rkey": self.rkey}
        if self.access >= 0:
            data["access"] = self.access
        return data

    @classmethod
    def from_json(cls, data) -> RemoteBuffer:
        """The inverse of :meth:`to_json`; :class:`UsageError` names what is missing or wrong."""
        try:
            addr = data["addr"]
            return cls(int(addr, 16) if isinstance(addr, str) else addr, data["length"], data["rkey"], data.get("access"))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            if isinstance(e, UsageError):
                raise
            raise UsageError(f"not a RemoteBuffer: {data!r} ({type(e).__name__}: {e})") from e

    def __reduce__(self):
        return RemoteBuffer, (self.addr, self.length, self.rkey, None if self.access < 0 else self.access)

    def __eq__(self, other) -> bool:
        if not isinstance(other, RemoteBuffer):
            return NotImplemented
        cdef RemoteBuffer o = other
        return self.addr == o.addr and self.length == o.length and self.rkey == o.rkey and self.access == o.access

    def __hash__(self) -> int:
        return hash((self.addr, self.length, self.rkey))

    def __repr__(self) -> str:
        return f"<RemoteBuffer {self.addr:#x}+{self.length} rkey={self.rkey:#x}>"

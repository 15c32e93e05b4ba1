# Registered memory as the data plane sees it, and what of it is in use.

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from aiordma._waitable cimport Waitable


cdef class Region:
    # What every operation touches comes first, and with the object's head is 60 bytes. What is behind it makes 128 of the
    # whole, with the garbage collector's 16: Python's allocator puts objects of that size at the beginning of a cache line.
    cdef readonly object domain
    cdef Waitable idle
    cdef readonly uint32_t lkey
    cdef readonly int access
    cdef readonly uint32_t inflight
    cdef readonly bint open
    cdef readonly bint direct
    cdef readonly uint32_t rkey
    cdef readonly uint64_t addr
    cdef readonly uint64_t length
    cdef object buffer
    cdef uint64_t[3] unused
    cdef int announce_idle(self) except -1


cdef class MemorySlice:
    cdef readonly Region region
    cdef readonly object owner
    cdef readonly uint64_t addr
    cdef readonly uint64_t length


cdef class RemoteBuffer:
    cdef readonly uint64_t addr
    cdef readonly uint64_t length
    cdef readonly uint32_t rkey
    cdef readonly int64_t access


cdef inline int leave_region(Region region, uint32_t n) except -1:
    """n work requests no longer use the region."""
    region.inflight -= n
    if region.inflight == 0:
        region.announce_idle()
    return 0


cdef struct Use:
    # Borrowed from the list of parts.
    void *region
    void *owner
    uint32_t n


cdef class Uses:
    cdef list parts
    cdef Use *found
    cdef uint32_t n
    cdef uint32_t size
    cdef uint32_t add(self, MemorySlice part, uint32_t n) except? 0xFFFFFFFF
    cdef int check_open(self) except -1


cdef int enter_all(object used) except -1
cdef int leave_all(object used) except -1

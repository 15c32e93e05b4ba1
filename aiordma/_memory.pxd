# Registered memory as the data plane sees it.

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from aiordma._waitable cimport Waitable


cdef class Region:
    cdef readonly uint64_t addr
    cdef readonly uint64_t length
    cdef readonly uint32_t lkey
    cdef readonly uint32_t rkey
    cdef readonly int access
    cdef readonly bint open
    cdef readonly bint direct
    cdef readonly uint32_t inflight
    cdef object buffer
    cdef readonly object domain
    cdef Waitable idle
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

# Operations of a pool of DCIs.

cimport cython
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from aiordma._memory cimport RemoteBuffer
from aiordma._mlx5 cimport DcAddress, DcInitiatorBase
from aiordma._operation cimport Completion
from aiordma._waitable cimport Alarm, Hooks, Waitable


@cython.final
cdef class Fifo:
    cdef list items
    cdef Py_ssize_t head
    cdef Py_ssize_t n
    cdef int push(self, PoolOperation operation) except -1
    cdef PoolOperation pop(self)


cdef class Slot:
    cdef readonly uint32_t index
    cdef public DcInitiatorBase dci
    cdef readonly uint32_t depth
    cdef readonly uint32_t in_flight
    cdef readonly list lanes
    cdef uint32_t waiting
    cdef uint32_t turn
    cdef public object recovering
    cdef public object error
    cdef readonly list idle
    cdef public uint32_t rebuilds


cdef class Lane:
    cdef readonly Slot slot
    cdef readonly uint16_t stream_id
    cdef public bint ready
    cdef readonly uint32_t in_flight
    cdef readonly DcAddress target
    cdef public object culprit
    cdef Fifo waiting
    cdef list returned
    cdef readonly uint64_t posted
    cdef readonly uint64_t bytes
    cdef public uint64_t errors
    cdef public uint64_t resets


cdef class PoolOperation(Waitable):
    cdef PoolBase pool
    cdef readonly DcAddress target
    cdef readonly bint repeatable
    cdef readonly uint32_t attempts
    cdef readonly Lane lane
    cdef readonly Completion completion
    cdef int opcode
    cdef object local
    cdef object remote
    cdef object imm
    cdef object compare_add
    cdef object swap
    cdef object held
    cdef uint64_t nbytes
    cdef object error
    cdef Alarm alarm
    cdef int _end(self, object error, bint report) except -1


cdef class PoolBase:
    cdef Hooks hooks
    cdef tuple all_lanes
    cdef list slots
    cdef object policy
    cdef bint by_load
    cdef bint shut
    cdef uint64_t inline_limit
    cdef Fifo waiting
    cdef public uint32_t _dead
    cdef PoolOperation _start(self, int opcode, object target, object local, object remote, object imm, object compare_add,
                              object swap, bint repeatable)
    cdef int _place(self, PoolOperation operation, bint again) except -1
    cdef Lane _ask(self, PoolOperation operation)
    cdef int _post(self, Lane lane, PoolOperation operation) except -1
    cdef int _over(self, PoolOperation operation) except -1
    cdef int _serve(self, Slot slot) except -1

# Operations in flight.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from aiordma cimport _ibv as v
from aiordma._cq cimport Queue
from aiordma._waitable cimport Alarm, Waitable

# States of an operation.
cdef enum:
    QUEUED = 0  # waits in its queue for a slot
    POSTED = 1  # the device has it
    DONE = 2

# What was asked, where enum ibv_wr_opcode has no name for it.
cdef enum:
    REQUEST_RECV = -1
    REQUEST_MARKER = -2
    REQUEST_UMR = -3
    REQUEST_MEMCPY = -4
    REQUEST_RAW_WQE = -5


cdef class Completion(Waitable):
    cdef Queue queue
    cdef object keepalive
    cdef object companion
    cdef str target
    cdef object batch
    cdef uint64_t seq
    cdef uint8_t state
    cdef bint signaled
    cdef bint internal
    cdef uint32_t remaining
    cdef uint32_t total
    cdef int asked
    cdef int _status
    cdef int _opcode
    cdef uint32_t _vendor_err
    cdef uint32_t _byte_len
    cdef uint32_t _imm
    cdef uint32_t _wc_flags
    cdef uint32_t _src_qp
    cdef uint32_t _qp_num
    cdef uint64_t _wr_id
    cdef uint64_t local_addr
    cdef uint64_t local_len
    cdef uint32_t local_key
    cdef uint64_t remote_addr
    cdef uint32_t remote_key
    cdef object error
    cdef Alarm alarm
    cdef uint64_t atomic_value
    cdef int _done_part(self, v.ibv_wc *wc, int status) except -1
    cdef int _done_quietly(self, uint32_t n) except -1
    cdef int _settle(self) except -1
    cdef int _part_failed(self, object error) except -1
    cdef str _describe_request(self)
    cdef int _fail(self, object error) except -1

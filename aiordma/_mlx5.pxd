# Queue pairs with mlx5's own work requests.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from aiordma cimport _mlx5dv as dv
from aiordma._memory cimport MemorySlice, Region
from aiordma._operation cimport Completion
from aiordma._post cimport QueuePairBase
from aiordma._waitable cimport Waitable
from aiordma._workqueue cimport PostFunction


cdef class MkeyBase:
    cdef dv.mlx5dv_mkey *mkey
    cdef readonly Region region
    cdef readonly uint32_t max_entries
    cdef readonly object domain
    cdef tuple sources
    cdef int _bind(self, uint64_t length, int access, tuple sources) except -1
    cdef int _unbind(self) except -1
    cdef MemorySlice _whole(self)


cdef struct UmrPayload:
    dv.mlx5dv_mkey *mkey
    uint32_t access, repeat
    uint16_t n
    uint8_t kind
    uint8_t configure
    # n entries follow


cdef class Mlx5QueuePairBase(QueuePairBase):
    cdef str device_name
    cdef readonly uint32_t umr_list
    cdef readonly uint32_t umr_interleaved
    cdef readonly uint64_t memcpy_limit
    cdef readonly uint32_t wqe_limit
    cdef readonly bint raw
    # See QueuePairBase's.
    cdef public object _options
    cdef public object _layout_depth
    cdef Completion _custom(self, int request, object keepalive, unsigned int flags, PostFunction post, const void *payload,
                            size_t size)
    cdef int _check_umr(self, MkeyBase mkey, int access, size_t n, uint32_t limit, str option, size_t extra) except -1
    cdef Completion _post_layout(self, MkeyBase mkey, uint64_t total, int access, tuple sources, UmrPayload *p, size_t size,
                                 bint signaled)


cdef class DcAddress:
    cdef dv.ibv_ah *ah
    cdef readonly uint32_t dctn
    cdef readonly uint64_t key
    cdef readonly object owner
    cdef object domain
    cdef uint32_t waiting
    cdef Waitable idle


cdef class DcInitiatorBase(Mlx5QueuePairBase):
    cdef bint streams
    cdef Completion _post_request(self, DcAddress target, int opcode, object local, object there, object imm, object inline,
                                  unsigned int flags, uint16_t stream, object compare_add, object swap)

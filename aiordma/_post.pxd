# Building and posting work requests.

from libc.stdint cimport uint32_t, uint64_t

from aiordma cimport _ibv as v
from aiordma._operation cimport Completion
from aiordma._workqueue cimport WorkQueue
from aiordma._memory cimport RemoteBuffer


cdef enum:
    MAX_SGE = 32
    # enum ibv_access_flags (verbs.h)
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    # A scatter/gather entry's byte count has 31 bits on the wire of every provider (mlx5: bit 31 marks inline data).
    MAX_SGE_BYTES = 0x7FFFFFFF


cdef RemoteBuffer remote_of(object remote)
cdef uint32_t unsigned32(object value, str what) except? 0xFFFFFFFF


cdef inline unsigned int send_flags(bint signaled, bint fence, bint solicited):
    """enum ibv_send_flags."""
    return (
        (v.IBV_SEND_SIGNALED if signaled else 0)
        | (v.IBV_SEND_FENCE if fence else 0)
        | (v.IBV_SEND_SOLICITED if solicited else 0)
    )


cdef class Receiver:
    """What receives are posted to: a QP's receive queue, or an SRQ."""
    cdef WorkQueue _recv
    cdef object domain
    cdef uint32_t _max_recv_sge
    cpdef Completion _post_receive(self, object local)


cdef class QueuePairBase(Receiver):
    cdef v.ibv_qp *qp
    cdef WorkQueue _send
    cdef void **_held  # the send queue's: looked at while the queue itself is still being fetched
    cdef bint always_signal
    cdef uint32_t _max_inline_data
    cdef uint32_t _max_send_sge
    cdef uint64_t _max_message
    # What the Python classes that are built on it keep (_owned.py, qp.py). In a dict it would be: one more place in memory
    # that each call of a method has to fetch, which is most of what a call costs where many QPs take turns.
    cdef object __weakref__
    cdef public object _device
    cdef public object _pyverbs
    cdef public object _pid
    cdef public bint _closed
    cdef public object _closing
    cdef public bint _released
    cdef public object _config
    cdef public object _cqs
    cdef public object _caps
    cdef public object _reserved
    cdef public object _srq
    cdef public object _address
    cdef public object _number
    cdef public object _connecting
    cdef public bint _fatal
    cdef public object _send_queue
    cdef public object _recv_queue
    cdef public object _psn
    cdef public object _peer
    cdef int _check_send(self) except -1
    cdef object _pins(self)
    cdef int _gather_source(self, v.ibv_send_wr *wr, v.ibv_sge *sges, Completion c, object local, int need,
                            object inline, void *pinned) except -1
    cdef int _build(self, v.ibv_send_wr *wr, v.ibv_sge *sges, Completion c, int opcode, object local,
                    RemoteBuffer remote, object imm, object inline, unsigned int flags, void *pinned) except -1
    cdef int _build_atomic(self, v.ibv_send_wr *wr, v.ibv_sge *sges, Completion c, int opcode, object local,
                           RemoteBuffer remote, object compare_add, object swap, unsigned int flags) except -1
    cdef Completion _new(self, int request, unsigned int flags)
    cdef Completion _post(self, int opcode, object local, RemoteBuffer remote, object imm, object inline,
                          unsigned int flags)

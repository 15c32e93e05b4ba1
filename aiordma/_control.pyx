# cython: language_level=3
"""Pointers inside pyverbs objects, and the control verbs that must not hold the GIL.

pyverbs holds the GIL in every verb, so a slow one (registering a gigabyte, a QP transition that asks the firmware) stops
the event loop even from a worker thread. The ones that can be slow are called here without it, on the pointers that
the pyverbs objects hold.
"""

cimport cython
from cpython.object cimport PyObject
from libc.errno cimport errno
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset
from posix.unistd cimport close as c_close
from posix.unistd cimport read as c_read
from posix.unistd cimport write as c_write

from aiordma cimport _ibv as v
from aiordma cimport _mlx5dv as dv

from aiordma.errors import ProviderError, VerbsError

cdef extern from "<unistd.h>" nogil:
    int pipe(int *)


# ---------------------------------------------------------------- pointers

cdef class _SafeReader:
    """Reads memory that may not be mapped: write() answers EFAULT where a load would end the process."""

    cdef int fds[2]

    def __cinit__(self):
        self.fds[0] = self.fds[1] = -1
        if pipe(self.fds):
            raise OSError(errno, "pipe")

    def __dealloc__(self):
        if self.fds[0] >= 0:
            c_close(self.fds[0])
            c_close(self.fds[1])

    cdef bint read(self, uintptr_t address, void *to, size_t size):
        cdef ssize_t n
        if address < 4096 or address & 7:
            return False
        n = c_write(self.fds[1], <void *>address, size)
        if n <= 0:
            return False
        # A short write (the range ends in an unmapped page) still has to be taken out of the pipe.
        return c_read(self.fds[0], to, <size_t>n) == n and <size_t>n == size


cdef list _candidates(object obj):
    """The words of a pyverbs object's C struct, from the first that its base class doesn't own."""
    cdef uintptr_t *words = <uintptr_t *><PyObject *>obj
    cdef Py_ssize_t n = type(obj).__basicsize__ // sizeof(uintptr_t)
    return [words[i] for i in range(2, n)]


def _unknown(str what, object obj):
    import pyverbs

    version = getattr(pyverbs, "__version__", None)
    if version is None:
        from aiordma._pyverbs import version as installed

        version = installed()
    return ProviderError(
        f"can't find the {what} inside pyverbs' {type(obj).__name__}: pyverbs {version} is laid out in a way that this "
        "aiordma doesn't know. Use the pyverbs of your distribution (44 to 65 are known), or report this version"
    )


def context_address(object context) -> int:
    """Address of the ``struct ibv_context`` in a pyverbs Context."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_context seen
    cdef int cmd_fd = context.cmd_fd if hasattr(context, "cmd_fd") else -1
    cdef int vectors = context.num_comp_vectors
    for word in _candidates(context):
        if not reader.read(word, &seen, sizeof(seen)):
            continue
        if seen.num_comp_vectors == vectors and seen.cmd_fd > 2 and (cmd_fd < 0 or seen.cmd_fd == cmd_fd):
            return word
    raise _unknown("struct ibv_context", context)


def pd_address(object pd, uintptr_t context) -> int:
    """Address of the ``struct ibv_pd`` in a pyverbs PD."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_pd seen
    cdef uint32_t handle = pd.handle
    for word in _candidates(pd):
        if reader.read(word, &seen, sizeof(seen)) and <uintptr_t>seen.context == context and seen.handle == handle:
            return word
    raise _unknown("struct ibv_pd", pd)


def channel_address(object channel, uintptr_t context) -> int:
    """Address of the ``struct ibv_comp_channel`` in a pyverbs CompChannel."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_comp_channel seen
    cdef object fd = getattr(channel, "fd", None)
    for word in _candidates(channel):
        if not reader.read(word, &seen, sizeof(seen)) or <uintptr_t>seen.context != context or seen.fd < 0:
            continue
        if fd is None or fd == seen.fd:
            return word
    raise _unknown("struct ibv_comp_channel", channel)


def cq_address(object cq, uintptr_t context) -> int:
    """Address of the ``struct ibv_cq`` in a pyverbs CQ or CQEX (str() shows the handle, and is the only thing to)."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_cq seen
    cdef uint32_t handle = 0
    # Not by its attribute `cq`, which is the address from rdma-core 61 on: older ones give the pointer as if it were a
    # Python object. A count of references to it is a count on the struct's first word, its context, and from Python 3.12 on
    # not every count goes back to what it was.
    for line in str(cq).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Handle":
            handle = int(value)
            break
    else:
        raise _unknown("handle of the CQ", cq)
    cdef uintptr_t found = 0
    for word in _candidates(cq):
        # A CQEX holds the same CQ twice, as ibv_cq_ex and as ibv_cq; both begin alike and are one object.
        if reader.read(word, &seen, sizeof(seen)) and <uintptr_t>seen.context == context and seen.handle == handle:
            found = word
    if found:
        return found
    raise _unknown("struct ibv_cq", cq)


def qp_address(object qp, uintptr_t context) -> int:
    """Address of the ``struct ibv_qp`` in a pyverbs QP or QPEx."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_qp seen
    cdef uint32_t number = qp.qp_num
    cdef int state = qp.qp_state, type_ = qp.qp_type
    for word in _candidates(qp):
        if not reader.read(word, &seen, sizeof(seen)) or <uintptr_t>seen.context != context:
            continue
        if seen.qp_num == number and <int>seen.state == state and <int>seen.qp_type == type_:
            return word
    raise _unknown("struct ibv_qp", qp)


def srq_address(object srq, uintptr_t context, uintptr_t pd) -> int:
    """Address of the ``struct ibv_srq`` in a pyverbs SRQ. ``pd`` 0: of any of the context's PDs."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_srq seen
    cdef v.ibv_pd parent
    for word in _candidates(srq):
        if not reader.read(word, &seen, sizeof(seen)) or <uintptr_t>seen.context != context:
            continue
        if <uintptr_t>seen.pd == pd:
            return word
        if pd == 0 and reader.read(<uintptr_t>seen.pd, &parent, sizeof(parent)):
            if <uintptr_t>parent.context == context:
                return word
    raise _unknown("struct ibv_srq", srq)


def wq_address(object wq, uintptr_t context) -> int:
    """Address of the ``struct ibv_wq`` in a pyverbs WQ."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_wq seen
    cdef uint32_t number = wq.wqn
    for word in _candidates(wq):
        if reader.read(word, &seen, sizeof(seen)) and <uintptr_t>seen.context == context and seen.wq_num == number:
            return word
    raise _unknown("struct ibv_wq", wq)


def ind_table_address(object table, uintptr_t context) -> int:
    """Address of the ``struct ibv_rwq_ind_table`` in a pyverbs RwqIndTable, which shows nothing more to compare."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_rwq_ind_table seen
    for word in _candidates(table):
        if not reader.read(word, &seen, sizeof(seen)) or <uintptr_t>seen.context != context:
            continue
        if seen.ind_tbl_handle >= 0 and seen.ind_tbl_num >= 0 and seen.comp_mask == 0:
            return word
    raise _unknown("struct ibv_rwq_ind_table", table)


def mr_address(object mr, uintptr_t context, uintptr_t pd) -> int:
    """Address of the ``struct ibv_mr`` in a pyverbs MR; 0 where it's closed, or of another PD (asking it would crash)."""
    cdef _SafeReader reader = _SafeReader()
    cdef v.ibv_mr seen
    for word in _candidates(mr):
        if reader.read(word, &seen, sizeof(seen)) and <uintptr_t>seen.context == context and <uintptr_t>seen.pd == pd:
            return word
    return 0


def holds(object obj, uintptr_t address) -> bool:
    """Whether a pyverbs object still has the verbs object at ``address``: it has not been closed behind our back."""
    # A QPEx has its QP a second time, as struct ibv_qp_ex, and keeps that pointer when it's closed: the QP's own part counts.
    cdef Py_ssize_t n = type(obj).__basicsize__
    for base in type(obj).__mro__:
        if base.__name__ == "QP":
            n = base.__basicsize__
    return address in _candidates(obj)[:n // <Py_ssize_t>sizeof(void *) - 2]


def async_fd(uintptr_t context) -> int:
    """File descriptor of the context's asynchronous events."""
    return (<v.ibv_context *>context).async_fd


def channel_fd(uintptr_t channel) -> int:
    """File descriptor of a completion channel."""
    return (<v.ibv_comp_channel *>channel).fd


def next_async_event(uintptr_t context):
    """Takes and acknowledges one asynchronous event; the descriptor must be non-blocking.

    Returns ``(event_type, kind, element)``, or None when there is none. ``kind`` is 0 for a port (``element`` is its
    number), 1 CQ, 2 QP, 3 SRQ, 4 WQ (``element`` is the object's address).
    """
    cdef int event_type = 0, kind = 0, rc
    cdef uint64_t element = 0
    rc = v.aior_next_async_event(<v.ibv_context *>context, &event_type, &element, &kind)
    return (event_type, kind, element) if rc == 0 else None


def mlx5_supported(bytes name) -> bool:
    """Whether a device is one of mlx5's: asked before anything of mlx5dv is called on it, which could end the process."""
    cdef int n = 0, i
    cdef bint found = False
    cdef v.ibv_device **devices
    with nogil:
        devices = v.ibv_get_device_list(&n)
    if devices == NULL:
        raise VerbsError("ibv_get_device_list", errno)
    for i in range(n):
        if <bytes>devices[i].name == name:
            found = dv.mlx5dv_is_supported(devices[i])
    v.ibv_free_device_list(devices)
    return found


def ah_address(object ah, uintptr_t context, uintptr_t pd) -> int:
    """Address of the ``struct ibv_ah`` in a pyverbs AH."""
    cdef _SafeReader reader = _SafeReader()
    cdef dv.ibv_ah seen
    for word in _candidates(ah):
        if not reader.read(word, &seen, sizeof(seen)):
            continue
        if <uintptr_t>seen.context == context and <uintptr_t>seen.pd == pd:
            return word
    raise _unknown("struct ibv_ah", ah)


def mkey_address(object mkey) -> int:
    """Address of the ``struct mlx5dv_mkey`` in a pyverbs Mlx5Mkey."""
    cdef _SafeReader reader = _SafeReader()
    cdef dv.mlx5dv_mkey seen
    cdef uint32_t lkey = mkey.lkey, rkey = mkey.rkey
    for word in _candidates(mkey):
        if reader.read(word, &seen, sizeof(seen)) and seen.lkey == lkey and seen.rkey == rkey and lkey:
            return word
    raise _unknown("struct mlx5dv_mkey", mkey)


# ---------------------------------------------------------------- thread domains

cdef class ThreadDomain:
    """A ``struct ibv_td``: what is made in it is used by one thread at a time, so its provider need not lock
    (ibv_alloc_td(3)). Its owner deallocates it once, after the parent domains that have it.
    """

    cdef v.ibv_td *td

    def __init__(self):
        raise TypeError("made by alloc_td()")

    @property
    def alive(self) -> bool:
        return self.td != NULL


def alloc_td(uintptr_t context) -> ThreadDomain:
    """ibv_alloc_td(3) without the GIL. VerbsError with EOPNOTSUPP where the provider has none."""
    cdef v.ibv_td_init_attr a
    cdef v.ibv_td *td
    cdef int err
    memset(&a, 0, sizeof(a))
    with nogil:
        td = v.ibv_alloc_td(<v.ibv_context *>context, &a)
        err = errno
    if td == NULL:
        raise VerbsError("ibv_alloc_td", err)
    cdef ThreadDomain made = ThreadDomain.__new__(ThreadDomain)
    made.td = td
    return made


def dealloc_td(ThreadDomain domain not None) -> None:
    """ibv_dealloc_td(3) without the GIL; a second call does nothing. EBUSY while a parent domain has it."""
    cdef v.ibv_td *td = domain.td
    cdef int rc
    if td == NULL:
        return
    domain.td = NULL
    with nogil:
        rc = v.ibv_dealloc_td(td)
    if rc:
        domain.td = td
        raise VerbsError("ibv_dealloc_td", rc)


def set_td(object attributes, uintptr_t pd, ThreadDomain domain not None) -> None:
    """Puts a thread domain into a pyverbs ParentDomainInitAttr, which has no word for it. ``pd``: the address that it was
    made with, by which its ``struct ibv_parent_domain_init_attr`` is found."""
    cdef uintptr_t *words = <uintptr_t *><PyObject *>attributes
    cdef Py_ssize_t i, n = (type(attributes).__basicsize__ - sizeof(v.ibv_parent_domain_init_attr)) // sizeof(uintptr_t)
    cdef v.ibv_parent_domain_init_attr *a
    for i in range(2, n + 1):
        a = <v.ibv_parent_domain_init_attr *>&words[i]
        if <uintptr_t>a.pd == pd and a.td == NULL and a.comp_mask == 0:
            a.td = domain.td
            return
    raise _unknown("struct ibv_parent_domain_init_attr", attributes)


# ---------------------------------------------------------------- ending what was opened

@cython.no_gc
@cython.final
cdef class AtLast:
    """Calls ``fn(*arguments)`` when it's called, or else when it goes; once, in whatever thread that is.

    For verbs objects of which one needs the other. The garbage collector clears what's in a cycle in any order, a context
    before its PD too, which is then deallocated on memory that libibverbs has freed. It doesn't look into this, so what is
    held here lives until ``fn`` has ended it in the right order. None of it may refer to this.
    """

    cdef object fn
    cdef tuple arguments

    def __init__(self, fn, *arguments):
        self.fn = fn
        self.arguments = arguments

    def __call__(self):
        """What ``fn`` gives; None where it was called before."""
        cdef object fn = self.fn
        cdef tuple arguments = self.arguments
        if fn is None:
            return None
        self.fn = self.arguments = None
        return fn(*arguments)

    def __dealloc__(self):
        if self.fn is not None:
            self.fn(*self.arguments)


# ---------------------------------------------------------------- memory regions

cdef class Registration:
    """A ``struct ibv_mr`` that this module registered: lkey, rkey, handle. Its owner deregisters it once."""

    cdef v.ibv_mr *mr
    cdef readonly uint32_t lkey
    cdef readonly uint32_t rkey
    cdef readonly uint32_t handle

    def __init__(self):
        raise TypeError("made by reg_mr()")

    @property
    def alive(self) -> bool:
        return self.mr != NULL


def reg_mr(uintptr_t pd, uintptr_t address, size_t length, int access) -> Registration:
    """ibv_reg_mr(3) without the GIL. ``address`` and ``length`` in bytes; VerbsError with its errno."""
    cdef v.ibv_mr *mr
    cdef int err
    with nogil:
        mr = v.ibv_reg_mr(<v.ibv_pd *>pd, <void *>address, length, access)
        err = errno
    if mr == NULL:
        raise VerbsError("ibv_reg_mr", err)
    cdef Registration r = Registration.__new__(Registration)
    r.mr = mr
    r.lkey = mr.lkey
    r.rkey = mr.rkey
    r.handle = mr.handle
    return r


def dereg_mr(Registration registration not None) -> None:
    """ibv_dereg_mr(3) without the GIL; a second call does nothing."""
    cdef v.ibv_mr *mr = registration.mr
    cdef int rc
    if mr == NULL:
        return
    registration.mr = NULL
    with nogil:
        rc = v.ibv_dereg_mr(mr)
    if rc:
        registration.mr = mr
        raise VerbsError("ibv_dereg_mr", rc)


# ---------------------------------------------------------------- queue pairs

def modify_qp(uintptr_t qp, int mask, dict values) -> None:
    """ibv_modify_qp(3) without the GIL.

    ``mask`` is of enum ibv_qp_attr_mask; ``values`` names fields of struct ibv_qp_attr, and for the address vector
    ``dgid`` (16 bytes), ``sgid_index``, ``hop_limit``, ``traffic_class``, ``flow_label``, ``dlid``, ``sl``,
    ``src_path_bits``, ``static_rate``, ``is_global``, ``ah_port``.
    """
    cdef v.ibv_qp_attr a
    cdef int rc
    cdef bytes dgid
    memset(&a, 0, sizeof(a))
    get = values.get
    a.qp_state = <v.ibv_qp_state><int>get("qp_state", 0)
    a.cur_qp_state = <v.ibv_qp_state><int>get("cur_qp_state", 0)
    a.path_mtu = <v.ibv_mtu><int>get("path_mtu", 0)
    a.qkey = get("qkey", 0)
    a.rq_psn = get("rq_psn", 0)
    a.sq_psn = get("sq_psn", 0)
    a.dest_qp_num = get("dest_qp_num", 0)
    a.qp_access_flags = get("qp_access_flags", 0)
    a.pkey_index = get("pkey_index", 0)
    a.max_rd_atomic = get("max_rd_atomic", 0)
    a.max_dest_rd_atomic = get("max_dest_rd_atomic", 0)
    a.min_rnr_timer = get("min_rnr_timer", 0)
    a.port_num = get("port_num", 0)
    a.timeout = get("timeout", 0)
    a.retry_cnt = get("retry_cnt", 0)
    a.rnr_retry = get("rnr_retry", 0)
    a.ah_attr.dlid = get("dlid", 0)
    a.ah_attr.sl = get("sl", 0)
    a.ah_attr.src_path_bits = get("src_path_bits", 0)
    a.ah_attr.static_rate = get("static_rate", 0)
    a.ah_attr.is_global = get("is_global", 0)
    a.ah_attr.port_num = get("ah_port", 0)
    a.ah_attr.grh.sgid_index = get("sgid_index", 0)
    a.ah_attr.grh.hop_limit = get("hop_limit", 0)
    a.ah_attr.grh.traffic_class = get("traffic_class", 0)
    a.ah_attr.grh.flow_label = get("flow_label", 0)
    dgid = get("dgid", b"")
    if dgid:
        if len(dgid) != 16:
            raise ValueError("dgid: 16 bytes")
        memcpy(&a.ah_attr.grh.dgid, <const char *>dgid, 16)
    with nogil:
        rc = v.ibv_modify_qp(<v.ibv_qp *>qp, &a, mask)
    if rc:
        raise VerbsError("ibv_modify_qp", rc, get("_detail", ""))


def is_iwarp(uintptr_t context) -> bool:
    """Whether a context is of an iWARP device (IBV_TRANSPORT_IWARP, verbs.h)."""
    return (<v.ibv_context *>context).device.transport_type == 1


def is_mlx5(uintptr_t context) -> bool:
    """Whether a context is of a device of mlx5's; the same as :func:`mlx5_supported`, of one that is open."""
    return dv.mlx5dv_is_supported((<v.ibv_context *>context).device)


def note_qp_state(uintptr_t qp, int state) -> None:
    """Has the library believe that the QP is in a state, which somebody else than ibv_modify_qp(3) took it to."""
    (<v.ibv_qp *>qp).state = <v.ibv_qp_state>state


def query_qp_state(uintptr_t qp) -> int:
    """The QP's state as the device has it (ibv_query_qp(3)), without the GIL."""
    cdef v.ibv_qp_attr a
    cdef v.ibv_qp_init_attr i
    cdef int rc
    with nogil:
        rc = v.ibv_query_qp(<v.ibv_qp *>qp, &a, v.IBV_QP_STATE, &i)
    if rc:
        raise VerbsError("ibv_query_qp", rc)
    return a.qp_state


def dci_stream_id_reset(uintptr_t qp, uint16_t stream_id) -> None:
    """mlx5dv_dci_stream_id_reset(3) without the GIL."""
    cdef int rc
    with nogil:
        rc = dv.mlx5dv_dci_stream_id_reset(<v.ibv_qp *>qp, stream_id)
    if rc:
        raise VerbsError("mlx5dv_dci_stream_id_reset", rc, f"stream {stream_id}")


def qp_caps(uintptr_t qp) -> dict:
    """What the device granted at creation: struct ibv_qp_cap by field name."""
    cdef v.ibv_qp_attr a
    cdef v.ibv_qp_init_attr i
    cdef int rc
    with nogil:
        rc = v.ibv_query_qp(<v.ibv_qp *>qp, &a, v.IBV_QP_CAP, &i)
    if rc:
        raise VerbsError("ibv_query_qp", rc)
    return {
        "max_send_wr": i.cap.max_send_wr,
        "max_recv_wr": i.cap.max_recv_wr,
        "max_send_sge": i.cap.max_send_sge,
        "max_recv_sge": i.cap.max_recv_sge,
        "max_inline_data": i.cap.max_inline_data,
    }

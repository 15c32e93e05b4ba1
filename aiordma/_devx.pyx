# cython: language_level=3
"""libmlx5's DEVX calls, without the GIL: firmware commands on verbs objects, on objects of DEVX's own, and in general.

Each returns an errno and the output as it came: with EREMOTEIO the firmware's status and syndrome are in there
(mlx5dv_devx_qp_query(3), mlx5dv_devx_obj_create(3)). Addresses are those that _control.pyx finds in pyverbs objects.
"""

from libc.errno cimport EINVAL, ENOMEM, EREMOTEIO, errno
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free

from aiordma cimport _ibv as v

cdef extern from "<infiniband/mlx5dv.h>" nogil:
    struct mlx5dv_devx_obj:
        pass

    struct mlx5dv_devx_cmd_comp:
        int fd

    struct mlx5dv_devx_async_cmd_hdr:
        uint64_t wr_id
        uint8_t *out_data

    mlx5dv_devx_obj *mlx5dv_devx_obj_create(v.ibv_context *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_obj_query(mlx5dv_devx_obj *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_obj_modify(mlx5dv_devx_obj *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_obj_destroy(mlx5dv_devx_obj *)
    int mlx5dv_devx_general_cmd(v.ibv_context *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_qp_query(v.ibv_qp *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_qp_modify(v.ibv_qp *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_cq_query(v.ibv_cq *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_cq_modify(v.ibv_cq *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_srq_query(v.ibv_srq *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_srq_modify(v.ibv_srq *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_wq_query(v.ibv_wq *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_wq_modify(v.ibv_wq *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_ind_tbl_query(v.ibv_rwq_ind_table *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_ind_tbl_modify(v.ibv_rwq_ind_table *, const void *, size_t, void *, size_t)
    int mlx5dv_devx_query_eqn(v.ibv_context *, uint32_t, uint32_t *)
    mlx5dv_devx_cmd_comp *mlx5dv_devx_create_cmd_comp(v.ibv_context *)
    void mlx5dv_devx_destroy_cmd_comp(mlx5dv_devx_cmd_comp *)
    int mlx5dv_devx_obj_query_async(mlx5dv_devx_obj *, const void *, size_t, size_t, uint64_t, mlx5dv_devx_cmd_comp *)
    int mlx5dv_devx_get_async_cmd_comp(mlx5dv_devx_cmd_comp *, mlx5dv_devx_async_cmd_hdr *, size_t)

cdef extern from *:
    """
    #include <errno.h>
    #include <malloc.h>
    #include <stdlib.h>
    #include <string.h>
    #include <infiniband/mlx5dv.h>

    /* The CQ's number. mlx5dv_init_obj() also marks the CQ as driven by somebody else, after which libmlx5 no longer
     * removes a destroyed QP's completions from it: so it gets a copy of the structure to mark. */
    static int aior_cq_number(struct ibv_cq *cq, uint32_t *number)
    {
        struct mlx5dv_cq dv = {0};
        struct mlx5dv_obj obj = {0};
        size_t size = malloc_usable_size(cq);
        void *copy = malloc(size);
        int rc;

        if (!copy)
            return ENOMEM;
        memcpy(copy, cq, size);
        obj.cq.in = copy;
        obj.cq.out = &dv;
        rc = mlx5dv_init_obj(&obj, MLX5DV_OBJ_CQ);
        free(copy);
        *number = dv.cqn;
        return rc < 0 ? -rc : rc;
    }

    static int aior_srq_number(struct ibv_srq *srq, uint32_t *number)
    {
        struct mlx5dv_srq dv = { .comp_mask = MLX5DV_SRQ_MASK_SRQN };
        struct mlx5dv_obj obj = {0};
        int rc;

        obj.srq.in = srq;
        obj.srq.out = &dv;
        rc = mlx5dv_init_obj(&obj, MLX5DV_OBJ_SRQ);
        if (!rc && !(dv.comp_mask & MLX5DV_SRQ_MASK_SRQN))
            rc = EOPNOTSUPP;
        *number = dv.srqn;
        return rc < 0 ? -rc : rc;
    }
    """
    int aior_cq_number(v.ibv_cq *, uint32_t *) nogil
    int aior_srq_number(v.ibv_srq *, uint32_t *) nogil

cdef enum Kind:
    KIND_QP
    KIND_CQ
    KIND_SRQ
    KIND_WQ
    KIND_IND_TBL

QP = KIND_QP
CQ = KIND_CQ
SRQ = KIND_SRQ
WQ = KIND_WQ
IND_TBL = KIND_IND_TBL


# ---------------------------------------------------------------- verbs objects

cdef int _query(int kind, void *at, const void *command, size_t size, void *out, size_t out_size) noexcept nogil:
    if kind == KIND_QP:
        return mlx5dv_devx_qp_query(<v.ibv_qp *>at, command, size, out, out_size)
    if kind == KIND_CQ:
        return mlx5dv_devx_cq_query(<v.ibv_cq *>at, command, size, out, out_size)
    if kind == KIND_SRQ:
        return mlx5dv_devx_srq_query(<v.ibv_srq *>at, command, size, out, out_size)
    if kind == KIND_WQ:
        return mlx5dv_devx_wq_query(<v.ibv_wq *>at, command, size, out, out_size)
    if kind == KIND_IND_TBL:
        return mlx5dv_devx_ind_tbl_query(<v.ibv_rwq_ind_table *>at, command, size, out, out_size)
    return EINVAL


cdef int _modify(int kind, void *at, const void *command, size_t size, void *out, size_t out_size) noexcept nogil:
    if kind == KIND_QP:
        return mlx5dv_devx_qp_modify(<v.ibv_qp *>at, command, size, out, out_size)
    if kind == KIND_CQ:
        return mlx5dv_devx_cq_modify(<v.ibv_cq *>at, command, size, out, out_size)
    if kind == KIND_SRQ:
        return mlx5dv_devx_srq_modify(<v.ibv_srq *>at, command, size, out, out_size)
    if kind == KIND_WQ:
        return mlx5dv_devx_wq_modify(<v.ibv_wq *>at, command, size, out, out_size)
    if kind == KIND_IND_TBL:
        return mlx5dv_devx_ind_tbl_modify(<v.ibv_rwq_ind_table *>at, command, size, out, out_size)
    return EINVAL


cdef class _Buffers:
    """The output, zeroed: what a command doesn't fill must not be what was in memory before."""

    cdef uint8_t *out
    cdef size_t size

    def __cinit__(self, size_t size):
        self.out = <uint8_t *>calloc(1, size if size else 1)
        self.size = size
        if self.out == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.out)

    cdef bytes take(self):
        return (<char *>self.out)[:self.size]


def on_object(int kind, bint modify, uintptr_t address, bytes command not None, size_t out_size) -> tuple:
    """One of the ten mlx5dv_devx_*_{query,modify}(): (errno, output)."""
    cdef _Buffers b = _Buffers(out_size)
    cdef const char *data = command
    cdef size_t size = len(command)
    cdef int rc
    with nogil:
        if modify:
            rc = _modify(kind, <void *>address, data, size, b.out, out_size)
        else:
            rc = _query(kind, <void *>address, data, size, b.out, out_size)
    return rc, b.take()


def cq_number(uintptr_t cq) -> int:
    """The number of a CQ; OSError where libmlx5 doesn't tell."""
    cdef uint32_t number = 0
    cdef int rc = aior_cq_number(<v.ibv_cq *>cq, &number)
    if rc:
        raise OSError(rc, "mlx5dv_init_obj")
    return number


def srq_number(uintptr_t srq) -> int:
    """The number of an SRQ; OSError where libmlx5 doesn't tell."""
    cdef uint32_t number = 0
    cdef int rc = aior_srq_number(<v.ibv_srq *>srq, &number)
    if rc:
        raise OSError(rc, "mlx5dv_init_obj")
    return number


def ind_table_number(uintptr_t table) -> int:
    """The number of a receive work queue indirection table."""
    return (<v.ibv_rwq_ind_table *>table).ind_tbl_num


# ---------------------------------------------------------------- the device

def general(uintptr_t context, bytes command not None, size_t out_size) -> tuple:
    """mlx5dv_devx_general_cmd(3): (errno, output)."""
    cdef _Buffers b = _Buffers(out_size)
    cdef const char *data = command
    cdef size_t size = len(command)
    cdef int rc
    with nogil:
        rc = mlx5dv_devx_general_cmd(<v.ibv_context *>context, data, size, b.out, out_size)
    return rc, b.take()


def query_eqn(uintptr_t context, uint32_t vector) -> tuple:
    """mlx5dv_devx_query_eqn(3): (errno, number of the completion vector's event queue)."""
    cdef uint32_t eqn = 0
    cdef int rc
    with nogil:
        rc = mlx5dv_devx_query_eqn(<v.ibv_context *>context, vector, &eqn)
    return rc, eqn


# ---------------------------------------------------------------- objects of DEVX's own

cdef class Object:
    """A ``struct mlx5dv_devx_obj``. Its owner destroys it once."""

    cdef mlx5dv_devx_obj *obj

    def __init__(self):
        raise TypeError("made by create()")

    @property
    def alive(self) -> bool:
        """Whether it has not been destroyed."""
        return self.obj != NULL

    cdef mlx5dv_devx_obj *get(self) except NULL:
        if self.obj == NULL:
            raise ValueError("the DEVX object was destroyed")
        return self.obj

    def query(self, bytes command not None, size_t out_size) -> tuple:
        """mlx5dv_devx_obj_query(3): (errno, output)."""
        cdef mlx5dv_devx_obj *obj = self.get()
        cdef _Buffers b = _Buffers(out_size)
        cdef const char *data = command
        cdef size_t size = len(command)
        cdef int rc
        with nogil:
            rc = mlx5dv_devx_obj_query(obj, data, size, b.out, out_size)
        return rc, b.take()

    def modify(self, bytes command not None, size_t out_size) -> tuple:
        """mlx5dv_devx_obj_modify(3): (errno, output)."""
        cdef mlx5dv_devx_obj *obj = self.get()
        cdef _Buffers b = _Buffers(out_size)
        cdef const char *data = command
        cdef size_t size = len(command)
        cdef int rc
        with nogil:
            rc = mlx5dv_devx_obj_modify(obj, data, size, b.out, out_size)
        return rc, b.take()

    def query_async(self, bytes command not None, size_t out_size, uint64_t wr_id, Commands channel not None) -> int:
        """mlx5dv_devx_obj_query_async(3): the errno."""
        cdef mlx5dv_devx_obj *obj = self.get()
        cdef mlx5dv_devx_cmd_comp *comp = channel.get()
        cdef const char *data = command
        cdef size_t size = len(command)
        cdef int rc
        with nogil:
            rc = mlx5dv_devx_obj_query_async(obj, data, size, out_size, wr_id, comp)
        return rc

    def destroy(self) -> int:
        """mlx5dv_devx_obj_destroy(3): the errno; it's gone if that is 0. A second call does nothing."""
        cdef mlx5dv_devx_obj *obj = self.obj
        cdef int rc
        if obj == NULL:
            return 0
        self.obj = NULL
        with nogil:
            rc = mlx5dv_devx_obj_destroy(obj)
        if rc:
            self.obj = obj
        return rc


def create(uintptr_t context, bytes command not None, size_t out_size) -> tuple:
    """mlx5dv_devx_obj_create(3): (errno, output, Object or None)."""
    cdef _Buffers b = _Buffers(out_size)
    cdef const char *data = command
    cdef size_t size = len(command)
    cdef mlx5dv_devx_obj *obj
    cdef Object made
    cdef int rc = 0
    with nogil:
        obj = mlx5dv_devx_obj_create(<v.ibv_context *>context, data, size, b.out, out_size)
        if obj == NULL:
            rc = errno if errno else EREMOTEIO
    if obj == NULL:
        return rc, b.take(), None
    made = Object.__new__(Object)
    made.obj = obj
    return 0, b.take(), made


cdef class Commands:
    """A ``struct mlx5dv_devx_cmd_comp``: where the answers to asynchronous queries arrive."""

    cdef mlx5dv_devx_cmd_comp *comp

    def __init__(self):
        raise TypeError("made by create_commands()")

    cdef mlx5dv_devx_cmd_comp *get(self) except NULL:
        if self.comp == NULL:
            raise ValueError("the DEVX command channel was destroyed")
        return self.comp

    @property
    def fd(self) -> int:
        """Its file descriptor, readable when there is an answer."""
        return self.get().fd

    def read(self, size_t out_size) -> tuple:
        """Takes one answer: (errno, wr_id, output). ``out_size`` must be as large as any that may come."""
        cdef mlx5dv_devx_cmd_comp *comp = self.get()
        cdef size_t size = sizeof(uint64_t) + out_size
        cdef mlx5dv_devx_async_cmd_hdr *header = <mlx5dv_devx_async_cmd_hdr *>calloc(1, size)
        cdef uint64_t wr_id
        cdef bytes out
        cdef int rc
        if header == NULL:
            raise MemoryError()
        with nogil:
            rc = mlx5dv_devx_get_async_cmd_comp(comp, header, size)
        wr_id = header.wr_id
        out = (<char *>header + sizeof(uint64_t))[:out_size]
        free(header)
        return rc, wr_id, out

    def destroy(self) -> None:
        """mlx5dv_devx_destroy_cmd_comp(3): waits for commands under way. A second call does nothing."""
        cdef mlx5dv_devx_cmd_comp *comp = self.comp
        self.comp = NULL
        if comp != NULL:
            with nogil:
                mlx5dv_devx_destroy_cmd_comp(comp)


def create_commands(uintptr_t context) -> tuple:
    """mlx5dv_devx_create_cmd_comp(3): (errno, Commands or None)."""
    cdef mlx5dv_devx_cmd_comp *comp
    cdef Commands made
    cdef int rc = 0
    with nogil:
        comp = mlx5dv_devx_create_cmd_comp(<v.ibv_context *>context)
        if comp == NULL:
            rc = errno if errno else ENOMEM
    if comp == NULL:
        return rc, None
    made = Commands.__new__(Commands)
    made.comp = comp
    return 0, made

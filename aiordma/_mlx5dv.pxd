# The part of infiniband/mlx5dv.h and of verbs.h's ibv_wr_* that the mlx5 data plane uses.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from aiordma._ibv cimport ibv_context, ibv_device, ibv_pd, ibv_qp, ibv_sge


cdef extern from "<infiniband/verbs.h>" nogil:
    struct ibv_ah:
        ibv_context *context
        ibv_pd *pd
        uint32_t handle

    struct ibv_data_buf:
        void *addr
        size_t length

    struct ibv_qp_ex:
        uint64_t wr_id
        unsigned int wr_flags

    ibv_qp_ex *ibv_qp_to_qp_ex(ibv_qp *)
    void ibv_wr_start(ibv_qp_ex *)
    int ibv_wr_complete(ibv_qp_ex *)
    void ibv_wr_abort(ibv_qp_ex *)
    void ibv_wr_send(ibv_qp_ex *)
    void ibv_wr_send_imm(ibv_qp_ex *, uint32_t)
    void ibv_wr_send_inv(ibv_qp_ex *, uint32_t)
    void ibv_wr_rdma_write(ibv_qp_ex *, uint32_t, uint64_t)
    void ibv_wr_rdma_write_imm(ibv_qp_ex *, uint32_t, uint64_t, uint32_t)
    void ibv_wr_rdma_read(ibv_qp_ex *, uint32_t, uint64_t)
    void ibv_wr_atomic_cmp_swp(ibv_qp_ex *, uint32_t, uint64_t, uint64_t, uint64_t)
    void ibv_wr_atomic_fetch_add(ibv_qp_ex *, uint32_t, uint64_t, uint64_t)
    void ibv_wr_set_sge(ibv_qp_ex *, uint32_t, uint64_t, uint32_t)
    void ibv_wr_set_sge_list(ibv_qp_ex *, size_t, const ibv_sge *)
    void ibv_wr_set_inline_data(ibv_qp_ex *, void *, size_t)
    void ibv_wr_set_inline_data_list(ibv_qp_ex *, size_t, const ibv_data_buf *)


cdef extern from "<infiniband/mlx5dv.h>" nogil:
    bint mlx5dv_is_supported(ibv_device *)

    struct mlx5dv_mkey:
        uint32_t lkey
        uint32_t rkey

    struct mlx5dv_mr_interleaved:
        uint64_t addr
        uint32_t bytes_count
        uint32_t bytes_skip
        uint32_t lkey

    struct mlx5dv_mkey_conf_attr:
        uint32_t conf_flags
        uint64_t comp_mask

    struct mlx5dv_qp_ex:
        uint64_t comp_mask

    mlx5dv_qp_ex *mlx5dv_qp_ex_from_ibv_qp_ex(ibv_qp_ex *)
    void mlx5dv_wr_set_dc_addr(mlx5dv_qp_ex *, ibv_ah *, uint32_t, uint64_t)
    void mlx5dv_wr_set_dc_addr_stream(mlx5dv_qp_ex *, ibv_ah *, uint32_t, uint64_t, uint16_t)
    void mlx5dv_wr_mr_interleaved(mlx5dv_qp_ex *, mlx5dv_mkey *, uint32_t, uint32_t, uint16_t, mlx5dv_mr_interleaved *)
    void mlx5dv_wr_mr_list(mlx5dv_qp_ex *, mlx5dv_mkey *, uint32_t, uint16_t, ibv_sge *)
    void mlx5dv_wr_mkey_configure(mlx5dv_qp_ex *, mlx5dv_mkey *, uint8_t, mlx5dv_mkey_conf_attr *)
    void mlx5dv_wr_set_mkey_access_flags(mlx5dv_qp_ex *, uint32_t)
    void mlx5dv_wr_set_mkey_layout_list(mlx5dv_qp_ex *, uint16_t, const ibv_sge *)
    void mlx5dv_wr_set_mkey_layout_interleaved(mlx5dv_qp_ex *, uint32_t, uint16_t, const mlx5dv_mr_interleaved *)
    void mlx5dv_wr_memcpy(mlx5dv_qp_ex *, uint32_t, uint64_t, uint32_t, uint64_t, size_t)
    void mlx5dv_wr_raw_wqe(mlx5dv_qp_ex *, const void *)
    int mlx5dv_dci_stream_id_reset(ibv_qp *, uint16_t)


cdef extern from *:
    """
    #include <infiniband/mlx5dv.h>
    /* Basic blocks of 64 bytes in the QP's send queue; 0 where it isn't an mlx5 QP. */
    static inline uint32_t aior_sq_blocks(struct ibv_qp *qp)
    {
        struct mlx5dv_qp dv = {0};
        struct mlx5dv_obj obj = {0};
        obj.qp.in = qp;
        obj.qp.out = &dv;
        return mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP) ? 0 : dv.sq.wqe_cnt;
    }
    """
    uint32_t aior_sq_blocks(ibv_qp *) nogil

# The part of infiniband/verbs.h that the data plane uses. Names and meanings are verbs(7)'s.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "<infiniband/verbs.h>" nogil:
    ctypedef uint32_t __be32

    union ibv_gid:
        uint8_t raw[16]

    struct ibv_device:
        int transport_type
        char name[64]

    struct ibv_context:
        ibv_device *device
        int cmd_fd
        int async_fd
        int num_comp_vectors

    struct ibv_pd:
        ibv_context *context
        uint32_t handle

    struct ibv_td:
        ibv_context *context

    struct ibv_td_init_attr:
        uint32_t comp_mask

    struct ibv_parent_domain_init_attr:
        ibv_pd *pd
        ibv_td *td
        uint32_t comp_mask

    struct ibv_comp_channel:
        ibv_context *context
        int fd

    struct ibv_cq:
        ibv_context *context
        ibv_comp_channel *channel
        uint32_t handle
        int cqe

    struct ibv_srq:
        ibv_context *context
        ibv_pd *pd
        uint32_t handle

    struct ibv_wq:
        ibv_context *context
        ibv_pd *pd
        uint32_t wq_num
        uint32_t handle

    struct ibv_rwq_ind_table:
        ibv_context *context
        int ind_tbl_handle
        int ind_tbl_num
        uint32_t comp_mask

    enum ibv_qp_state:
        IBV_QPS_RESET
        IBV_QPS_INIT
        IBV_QPS_RTR
        IBV_QPS_RTS
        IBV_QPS_SQD
        IBV_QPS_SQE
        IBV_QPS_ERR

    enum ibv_qp_type:
        IBV_QPT_RC
        IBV_QPT_UC
        IBV_QPT_UD

    struct ibv_qp:
        ibv_context *context
        ibv_pd *pd
        ibv_cq *send_cq
        ibv_cq *recv_cq
        ibv_srq *srq
        uint32_t handle
        uint32_t qp_num
        ibv_qp_state state
        ibv_qp_type qp_type

    struct ibv_mr:
        ibv_context *context
        ibv_pd *pd
        void *addr
        size_t length
        uint32_t handle
        uint32_t lkey
        uint32_t rkey

    enum ibv_wc_status:
        IBV_WC_SUCCESS
        IBV_WC_WR_FLUSH_ERR

    enum ibv_wc_opcode:
        IBV_WC_RECV
        IBV_WC_RECV_RDMA_WITH_IMM

    enum:
        IBV_WC_GRH
        IBV_WC_WITH_IMM
        IBV_WC_WITH_INV

    struct ibv_wc:
        uint64_t wr_id
        ibv_wc_status status
        ibv_wc_opcode opcode
        uint32_t vendor_err
        uint32_t byte_len
        __be32 imm_data
        uint32_t invalidated_rkey
        uint32_t qp_num
        uint32_t src_qp
        unsigned int wc_flags

    enum ibv_wr_opcode:
        IBV_WR_RDMA_WRITE
        IBV_WR_RDMA_WRITE_WITH_IMM
        IBV_WR_SEND
        IBV_WR_SEND_WITH_IMM
        IBV_WR_RDMA_READ
        IBV_WR_ATOMIC_CMP_AND_SWP
        IBV_WR_ATOMIC_FETCH_AND_ADD
        IBV_WR_LOCAL_INV
        IBV_WR_SEND_WITH_INV

    enum:
        IBV_SEND_FENCE
        IBV_SEND_SIGNALED
        IBV_SEND_SOLICITED
        IBV_SEND_INLINE

    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey

    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        ibv_wr_opcode opcode
        unsigned int send_flags
        __be32 imm_data
        uint32_t invalidate_rkey

    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr *next
        ibv_sge *sg_list
        int num_sge

    struct ibv_global_route:
        ibv_gid dgid
        uint32_t flow_label
        uint8_t sgid_index
        uint8_t hop_limit
        uint8_t traffic_class

    struct ibv_ah_attr:
        ibv_global_route grh
        uint16_t dlid
        uint8_t sl
        uint8_t src_path_bits
        uint8_t static_rate
        uint8_t is_global
        uint8_t port_num

    struct ibv_qp_cap:
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data

    enum ibv_mtu:
        IBV_MTU_256

    struct ibv_qp_attr:
        ibv_qp_state qp_state
        ibv_qp_state cur_qp_state
        ibv_mtu path_mtu
        uint32_t qkey
        uint32_t rq_psn
        uint32_t sq_psn
        uint32_t dest_qp_num
        unsigned int qp_access_flags
        ibv_qp_cap cap
        ibv_ah_attr ah_attr
        uint16_t pkey_index
        uint8_t max_rd_atomic
        uint8_t max_dest_rd_atomic
        uint8_t min_rnr_timer
        uint8_t port_num
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry

    struct ibv_qp_init_attr:
        ibv_qp_cap cap

    enum:
        IBV_QP_STATE
        IBV_QP_ACCESS_FLAGS
        IBV_QP_PKEY_INDEX
        IBV_QP_PORT
        IBV_QP_QKEY
        IBV_QP_AV
        IBV_QP_PATH_MTU
        IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT
        IBV_QP_RNR_RETRY
        IBV_QP_RQ_PSN
        IBV_QP_MAX_QP_RD_ATOMIC
        IBV_QP_MIN_RNR_TIMER
        IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC
        IBV_QP_CAP
        IBV_QP_DEST_QPN

    enum ibv_event_type:
        IBV_EVENT_CQ_ERR
        IBV_EVENT_QP_FATAL
        IBV_EVENT_QP_REQ_ERR
        IBV_EVENT_QP_ACCESS_ERR
        IBV_EVENT_COMM_EST
        IBV_EVENT_SQ_DRAINED
        IBV_EVENT_PATH_MIG
        IBV_EVENT_PATH_MIG_ERR
        IBV_EVENT_SRQ_ERR
        IBV_EVENT_SRQ_LIMIT_REACHED
        IBV_EVENT_QP_LAST_WQE_REACHED
        IBV_EVENT_WQ_FATAL

    ibv_device **ibv_get_device_list(int *)
    void ibv_free_device_list(ibv_device **)
    ibv_td *ibv_alloc_td(ibv_context *, ibv_td_init_attr *)
    int ibv_dealloc_td(ibv_td *)
    int ibv_post_send(ibv_qp *, ibv_send_wr *, ibv_send_wr **)
    int ibv_post_recv(ibv_qp *, ibv_recv_wr *, ibv_recv_wr **)
    int ibv_post_srq_recv(ibv_srq *, ibv_recv_wr *, ibv_recv_wr **)
    int ibv_poll_cq(ibv_cq *, int, ibv_wc *)
    int ibv_req_notify_cq(ibv_cq *, int)
    int ibv_get_cq_event(ibv_comp_channel *, ibv_cq **, void **)
    void ibv_ack_cq_events(ibv_cq *, unsigned int)
    ibv_mr *ibv_reg_mr(ibv_pd *, void *, size_t, int)
    int ibv_dereg_mr(ibv_mr *)
    int ibv_modify_qp(ibv_qp *, ibv_qp_attr *, int)
    int ibv_query_qp(ibv_qp *, ibv_qp_attr *, int, ibv_qp_init_attr *)


# The anonymous unions of struct ibv_send_wr and ibv_async_event cannot be named from Cython; these accessors can.
cdef extern from *:
    """
    #include <infiniband/verbs.h>
    #include <endian.h>
    static inline void aior_set_rdma(struct ibv_send_wr *wr, uint64_t addr, uint32_t rkey)
    { wr->wr.rdma.remote_addr = addr; wr->wr.rdma.rkey = rkey; }
    static inline void aior_get_rdma(const struct ibv_send_wr *wr, uint64_t *addr, uint32_t *rkey)
    { *addr = wr->wr.rdma.remote_addr; *rkey = wr->wr.rdma.rkey; }
    static inline void aior_set_atomic(struct ibv_send_wr *wr, uint64_t addr, uint32_t rkey, uint64_t compare_add,
                                       uint64_t swap)
    { wr->wr.atomic.remote_addr = addr; wr->wr.atomic.rkey = rkey; wr->wr.atomic.compare_add = compare_add;
      wr->wr.atomic.swap = swap; }
    static inline int aior_next_async_event(struct ibv_context *ctx, int *type, uint64_t *element, int *kind)
    {
        struct ibv_async_event e;
        if (ibv_get_async_event(ctx, &e))
            return -1;
        *type = e.event_type;
        *kind = 0;
        switch (e.event_type) {
        case IBV_EVENT_CQ_ERR: *kind = 1; *element = (uintptr_t)e.element.cq; break;
        case IBV_EVENT_QP_FATAL: case IBV_EVENT_QP_REQ_ERR: case IBV_EVENT_QP_ACCESS_ERR: case IBV_EVENT_COMM_EST:
        case IBV_EVENT_SQ_DRAINED: case IBV_EVENT_PATH_MIG: case IBV_EVENT_PATH_MIG_ERR:
        case IBV_EVENT_QP_LAST_WQE_REACHED: *kind = 2; *element = (uintptr_t)e.element.qp; break;
        case IBV_EVENT_SRQ_ERR: case IBV_EVENT_SRQ_LIMIT_REACHED: *kind = 3; *element = (uintptr_t)e.element.srq; break;
        case IBV_EVENT_WQ_FATAL: *kind = 4; *element = (uintptr_t)e.element.wq; break;
        default: *element = (uint64_t)e.element.port_num;
        }
        /* Acknowledged at once: what the event names is only compared with what we own, never followed. */
        ibv_ack_async_event(&e);
        return 0;
    }
    """
    void aior_set_rdma(ibv_send_wr *, uint64_t, uint32_t) nogil
    void aior_get_rdma(const ibv_send_wr *, uint64_t *, uint32_t *) nogil
    void aior_set_atomic(ibv_send_wr *, uint64_t, uint32_t, uint64_t, uint64_t) nogil
    int aior_next_async_event(ibv_context *, int *, uint64_t *, int *) nogil
    uint32_t htobe32(uint32_t) nogil
    uint32_t be32toh(uint32_t) nogil

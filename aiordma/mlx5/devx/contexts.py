"""The structures that the device keeps for its objects: queue pair, completion queue, receive queue, memory key.

Positions are those of mlx5_ifc.h (the kernel's, rdma-core's) and, for the fields that those leave out, of rdma-core's
tests/mlx5_prm_structs.py. Reserved bits have no name here.
"""

from __future__ import annotations

from aiordma.mlx5.devx.enums import (
    AccessMode,
    CqArm,
    CqeSize,
    CqStatus,
    PmState,
    QpState,
    RqState,
    RqType,
    ServiceType,
    WqType,
)
from aiordma.mlx5.devx.prm import Array, Field, Nested, Raw, Struct

__all__ = ["Ads", "Cqc", "Dctc", "Klm", "Mkc", "Qpc", "QpcExt", "Rmpc", "Rqc", "Rqtc", "Wq", "XrcSrqc"]


class Ads(Struct, size=44):
    """The path to the peer (ads)."""

    fl = Field(0x00, 1)
    free_ar = Field(0x01, 1)
    pkey_index = Field(0x10, 16)
    grh = Field(0x28, 1)
    mlid = Field(0x29, 7)
    rlid = Field(0x30, 16)
    ack_timeout = Field(0x40, 5)
    src_addr_index = Field(0x48, 8)
    stat_rate = Field(0x54, 4)
    hop_limit = Field(0x58, 8)
    tclass = Field(0x64, 8)
    flow_label = Field(0x6C, 20)
    rgid_rip = Raw(0x80, 16)
    f_dscp = Field(0x104, 1)
    f_ecn = Field(0x105, 1)
    f_eth_prio = Field(0x107, 1)
    ecn = Field(0x108, 2)
    dscp = Field(0x10A, 6)
    udp_sport = Field(0x110, 16)
    dei_cfi = Field(0x120, 1)
    eth_prio = Field(0x121, 3)
    sl = Field(0x124, 4)
    vhca_port_num = Field(0x128, 8)
    rmac = Raw(0x130, 6)


class Qpc(Struct, size=232):
    """A queue pair's context (qpc).

    Counters: ``sw_*`` are the producers that the application wrote, ``hw_*`` how far the device is, the send queue in
    basic blocks of 64 bytes.
    """

    state = Field(0x00, 4, QpState)
    lag_tx_port_affinity = Field(0x04, 4)
    st = Field(0x08, 8, ServiceType)
    isolate_vl_tc = Field(0x12, 1)
    pm_state = Field(0x13, 2, PmState)
    req_e2e_credit_mode = Field(0x16, 2)
    offload_type = Field(0x18, 4)
    end_padding_mode = Field(0x1C, 2)
    wq_signature = Field(0x20, 1)
    block_lb_mc = Field(0x21, 1)
    atomic_like_write_en = Field(0x22, 1)
    latency_sensitive = Field(0x23, 1)
    drain_sigerr = Field(0x25, 1)
    pd = Field(0x28, 24)
    mtu = Field(0x40, 3)
    log_msg_max = Field(0x43, 5)
    log_rq_size = Field(0x49, 4)
    log_rq_stride = Field(0x4D, 3)
    no_sq = Field(0x50, 1)
    log_sq_size = Field(0x51, 4)
    retry_mode = Field(0x56, 2)
    ts_format = Field(0x58, 2)
    data_in_order = Field(0x5A, 1)
    rlky = Field(0x5B, 1)
    ulp_stateless_offload_mode = Field(0x5C, 4)
    counter_set_id = Field(0x60, 8)
    uar_page = Field(0x68, 24)
    send_dbr_mode = Field(0x80, 2)
    user_index = Field(0x88, 24)
    log_page_size = Field(0xA3, 5)
    remote_qpn = Field(0xA8, 24)
    primary_address_path = Nested(0xC0, Ads)
    secondary_address_path = Nested(0x220, Ads)
    log_ack_req_freq = Field(0x380, 4)
    log_sra_max = Field(0x388, 3)
    retry_count = Field(0x38D, 3)
    rnr_retry = Field(0x390, 3)
    fre = Field(0x394, 1)
    cur_rnr_retry = Field(0x395, 3)
    cur_retry_count = Field(0x398, 3)
    packet_pacing_rate_limit_index = Field(0x3B0, 16)
    next_send_psn = Field(0x3C8, 24)
    log_num_dci_stream_channels = Field(0x3E3, 5)
    cqn_snd = Field(0x3E8, 24)
    log_num_dci_errored_streams = Field(0x403, 5)
    deth_sqpn = Field(0x408, 24)
    last_acked_psn = Field(0x448, 24)
    ssn = Field(0x468, 24)
    log_rra_max = Field(0x488, 3)
    atomic_mode = Field(0x48C, 4)
    rre = Field(0x490, 1)
    rwe = Field(0x491, 1)
    rae = Field(0x492, 1)
    page_offset = Field(0x494, 6)
    cd_slave_receive = Field(0x49D, 1)
    cd_slave_send = Field(0x49E, 1)
    cd_master = Field(0x49F, 1)
    min_rnr_nak = Field(0x4A3, 5)
    next_rcv_psn = Field(0x4A8, 24)
    xrcd = Field(0x4C8, 24)
    cqn_rcv = Field(0x4E8, 24)
    dbr_addr = Field(0x500, 64)
    q_key = Field(0x540, 32)
    rq_type = Field(0x565, 3, RqType)
    srqn_rmpn_xrqn = Field(0x568, 24)
    rmsn = Field(0x588, 24)
    hw_sq_wqebb_counter = Field(0x5A0, 16)
    sw_sq_wqebb_counter = Field(0x5B0, 16)
    hw_rq_counter = Field(0x5C0, 32)
    sw_rq_counter = Field(0x5E0, 32)
    cgs = Field(0x62F, 1)
    cs_req = Field(0x630, 8)
    cs_res = Field(0x638, 8)
    dc_access_key = Field(0x640, 64)
    dbr_umem_valid = Field(0x683, 1)
    dbr_umem_id = Field(0x720, 32)


class QpcExt(Struct, size=192):
    """What lies beyond a queue pair's context (qpc_ext)."""

    mmo = Field(0x02, 1)
    dci_stream_channel_id = Field(0x10, 16)
    qos_queue_group_id_requester = Field(0x20, 32)
    qos_queue_group_id_responder = Field(0x40, 32)


class Dctc(Struct, size=64):
    """A DC target's context (dctc)."""

    state = Field(0x04, 4)
    user_index = Field(0x28, 24)
    cqn = Field(0x48, 24)
    counter_set_id = Field(0x60, 8)
    atomic_mode = Field(0x68, 4)
    rre = Field(0x6C, 1)
    rwe = Field(0x6D, 1)
    rae = Field(0x6E, 1)
    min_rnr_nak = Field(0x93, 5)
    srqn_xrqn = Field(0xA8, 24)
    pd = Field(0xC8, 24)
    tclass = Field(0xE0, 8)
    flow_label = Field(0xEC, 20)
    dc_access_key = Field(0x100, 64)
    mtu = Field(0x145, 3)
    port = Field(0x148, 8)
    pkey_index = Field(0x150, 16)
    my_addr_index = Field(0x168, 8)
    hop_limit = Field(0x178, 8)
    dc_access_key_violation_count = Field(0x180, 32)


class Cqc(Struct, size=64):
    """A completion queue's context (cqc). Counters have 24 bits and run on past the queue's size."""

    status = Field(0x00, 4, CqStatus)
    dbr_umem_valid = Field(0x06, 1)
    apu_cq = Field(0x07, 1)
    cqe_sz = Field(0x08, 3, CqeSize)
    cc = Field(0x0B, 1)
    scqe_break_moderation_en = Field(0x0D, 1)
    oi = Field(0x0E, 1)
    cq_period_mode = Field(0x0F, 2)
    cqe_comp_en = Field(0x11, 1)
    mini_cqe_res_format = Field(0x12, 2)
    st = Field(0x14, 4, CqArm)
    dbr_umem_id = Field(0x20, 32)
    page_offset = Field(0x54, 6)
    log_cq_size = Field(0x63, 5)
    uar_page = Field(0x68, 24)
    cq_period = Field(0x84, 12)
    cq_max_count = Field(0x90, 16)
    c_eqn_or_apu_element = Field(0xA0, 32)
    log_page_size = Field(0xC3, 5)
    last_notified_index = Field(0x108, 24)
    last_solicit_index = Field(0x128, 24)
    consumer_counter = Field(0x148, 24)
    producer_counter = Field(0x168, 24)
    dbr_addr = Field(0x1C0, 64)


class Wq(Struct, size=192):
    """The work queue inside a receive queue's or pool's context (wq)."""

    wq_type = Field(0x00, 4, WqType)
    wq_signature = Field(0x04, 1)
    end_padding_mode = Field(0x05, 2)
    cd_slave = Field(0x07, 1)
    page_offset = Field(0x2B, 5)
    lwm = Field(0x30, 16)
    pd = Field(0x48, 24)
    uar_page = Field(0x68, 24)
    dbr_addr = Field(0x80, 64)
    hw_counter = Field(0xC0, 32)
    sw_counter = Field(0xE0, 32)
    log_wq_stride = Field(0x10C, 4)
    log_wq_pg_sz = Field(0x113, 5)
    log_wq_sz = Field(0x11B, 5)
    dbr_umem_valid = Field(0x120, 1)
    wq_umem_valid = Field(0x121, 1)
    log_wqe_num_of_strides = Field(0x134, 4)
    two_byte_shift_en = Field(0x138, 1)
    log_wqe_stride_size = Field(0x13D, 3)


class Rqc(Struct, size=240):
    """A receive queue's context (rqc)."""

    rlky = Field(0x00, 1)
    delay_drop_en = Field(0x01, 1)
    scatter_fcs = Field(0x02, 1)
    vsd = Field(0x03, 1)
    mem_rq_type = Field(0x04, 4)
    state = Field(0x08, 4, RqState)
    flush_in_error_en = Field(0x0D, 1)
    hairpin = Field(0x0E, 1)
    ts_format = Field(0x1A, 2)
    user_index = Field(0x28, 24)
    cqn = Field(0x48, 24)
    counter_set_id = Field(0x60, 8)
    rmpn = Field(0x88, 24)
    wq = Nested(0x180, Wq)


class Rmpc(Struct, size=240):
    """A receive memory pool's context (rmpc): what a basic SRQ is on the device."""

    state = Field(0x08, 4, RqState)
    basic_cyclic_rcv_wqe = Field(0x20, 1)
    wq = Nested(0x180, Wq)


class XrcSrqc(Struct, size=64):
    """An XRC SRQ's context (xrc_srqc)."""

    state = Field(0x00, 4)
    log_xrc_srq_size = Field(0x04, 4)
    wq_signature = Field(0x20, 1)
    cont_srq = Field(0x21, 1)
    rlky = Field(0x23, 1)
    basic_cyclic_rcv_wqe = Field(0x24, 1)
    log_rq_stride = Field(0x25, 3)
    xrcd = Field(0x28, 24)
    page_offset = Field(0x40, 6)
    dbr_umem_valid = Field(0x47, 1)
    cqn = Field(0x48, 24)
    user_index_equal_xrc_srqn = Field(0x80, 1)
    log_page_size = Field(0x82, 6)
    user_index = Field(0x88, 24)
    pd = Field(0xC8, 24)
    lwm = Field(0xE0, 16)
    wqe_cnt = Field(0xF0, 16)
    db_record_addr = Field(0x140, 64)


class Rqtc(Struct, size=240):
    """A receive queue table's context (rqtc); ``rq_num`` follows it, one entry for each queue."""

    list_q_type = Field(0xA5, 3)
    rqt_max_size = Field(0xB0, 16)
    rqt_actual_size = Field(0xD0, 16)
    rq_num = Array(0x780, 24)


class Mkc(Struct, size=64):
    """A memory key's context (mkc)."""

    free = Field(0x01, 1)
    access_mode_4_2 = Field(0x03, 3)
    relaxed_ordering_write = Field(0x0D, 1)
    small_fence_on_rdma_read_response = Field(0x0F, 1)
    umr_en = Field(0x10, 1)
    a = Field(0x11, 1)
    rw = Field(0x12, 1)
    rr = Field(0x13, 1)
    lw = Field(0x14, 1)
    lr = Field(0x15, 1)
    access_mode_1_0 = Field(0x16, 2, AccessMode)
    ma_translation_mode = Field(0x1A, 2)
    qpn = Field(0x20, 24)
    mkey_7_0 = Field(0x38, 8)
    length64 = Field(0x60, 1)
    bsf_en = Field(0x61, 1)
    sync_umr = Field(0x62, 1)
    expected_sigerr_count = Field(0x65, 1)
    en_rinval = Field(0x67, 1)
    pd = Field(0x68, 24)
    start_addr = Field(0x80, 64)
    len = Field(0xC0, 64)
    bsf_octword_size = Field(0x100, 32)
    translations_octword_size = Field(0x1A0, 32)
    relaxed_ordering_read = Field(0x1D9, 1)
    log_page_size = Field(0x1DB, 5)
    crypto_en = Field(0x1E3, 2)


class Klm(Struct, size=16):
    """An entry of an indirect key's list."""

    byte_count = Field(0x00, 32)
    mkey = Field(0x20, 32)
    address = Field(0x40, 64)

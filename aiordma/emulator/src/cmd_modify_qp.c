/* SPDX-License-Identifier: MIT
 * Changes of a queue pair's state and attributes. Three layers of the kernel check one after the other, and so do we:
 * modify_qp() in core/uverbs_cmd.c, _ib_modify_qp() in core/verbs.c, mlx5_ib_modify_qp() in mlx5/qp.c.
 */
#define _GNU_SOURCE
#include "capability.h"
#include "control.h"

#define PRIVILEGED_QKEY 0x80000000u /* IB_QP_SET_QKEY, include/rdma/ib_verbs.h */
#define PSN_MASK 0xffffffu
/* As wide as the fields of the queue pair context (PRM): what is beyond them is lost, as on hardware. */
#define TIMEOUT_MASK 0x1f
#define RETRY_MASK 7
#define RNR_TIMER_MASK 0x1f
/* to_ib_qp_access_flags() in mlx5/qp.c: a queue pair knows no other access rights */
#define QP_ACCESS (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

static bool port_ok(const struct emu_qp *qp, uint8_t port)
{
	return emu_port(qp->dev, port) != NULL;
}

/* modify_qp() in core/uverbs_cmd.c */
static int check_request(const struct emu_qp *qp, struct ib_uverbs_modify_qp *m)
{
	if (m->attr_mask & IBV_QP_PORT && !port_ok(qp, m->port_num))
		return EINVAL;
	if (m->attr_mask & IBV_QP_AV) {
		if (!port_ok(qp, m->dest.port_num))
			return EINVAL;
		if (m->attr_mask & IBV_QP_STATE && m->qp_state == IBV_QPS_RTR) {
			if (m->dest.port_num != qp->port)
				return EINVAL;
		} else if (m->attr_mask & IBV_QP_PORT) {
			if (m->port_num != m->dest.port_num)
				return EINVAL;
		} else {
			m->attr_mask |= IBV_QP_PORT;
			m->port_num = m->dest.port_num;
		}
	}
	if (m->attr_mask & IBV_QP_ALT_PATH && (!port_ok(qp, m->alt_port_num) || !port_ok(qp, m->alt_dest.port_num) ||
					       m->alt_port_num != m->alt_dest.port_num))
		return EINVAL;
	if (m->attr_mask & IBV_QP_CUR_STATE && m->cur_qp_state > IBV_QPS_ERR)
		return EINVAL;
	if (m->attr_mask & IBV_QP_STATE && m->qp_state > IBV_QPS_ERR)
		return EINVAL;
	if (m->attr_mask & IBV_QP_QKEY && m->qkey & PRIVILEGED_QKEY && !has_capability(CAP_NET_RAW))
		return EPERM;
	return 0;
}

/* _ib_modify_qp() in core/verbs.c: alternate paths are InfiniBand's only. */
static int check_core(const struct emu_qp *qp, const struct ib_uverbs_modify_qp *m, struct emu_path *path)
{
	int err = 0;

	if (m->attr_mask & IBV_QP_AV)
		err = emu_path_check(qp->dev, &m->dest, path);
	if (!err && m->attr_mask & IBV_QP_ALT_PATH)
		err = EINVAL;
	return err;
}

/* mlx5_ib_modify_qp() */
static int check_driver(const struct emu_qp *qp, const struct ib_uverbs_modify_qp *m, uint8_t cur, uint8_t next)
{
	const struct emu_limits *l = &qp->dev->limits;

	if (!emu_qp_modify_is_ok(qp, cur, next, m->attr_mask))
		return EINVAL;
	if (m->attr_mask & IBV_QP_PKEY_INDEX && m->pkey_index >= EMU_PORT_PKEYS)
		return EINVAL;
	if (m->attr_mask & IBV_QP_MAX_QP_RD_ATOMIC && m->max_rd_atomic > l->max_qp_init_rd_atom)
		return EINVAL;
	if (m->attr_mask & IBV_QP_MAX_DEST_RD_ATOMIC && m->max_dest_rd_atomic > l->max_qp_rd_atom)
		return EINVAL;
	if (cur == IBV_QPS_RESET && next == IBV_QPS_RESET)
		return 0;
	if (m->attr_mask & IBV_QP_PATH_MTU && (m->path_mtu < IBV_MTU_256 || m->path_mtu > IBV_MTU_4096))
		return EINVAL;
	if (!emu_qp_hardware_can(cur, next))
		return EINVAL;
	/* IBV_QP_CUR_STATE overrides what the driver believes; the firmware knows better and refuses its command. */
	return cur == qp->state ? 0 : EINVAL;
}

/* struct mlx5_ib_modify_qp: packet pacing and error correction offload, neither of which the device has. */
static int check_provider_part(struct emu_cmd *c)
{
	struct mlx5_ib_modify_qp u;
	int err = cmd_uhw_request(c, &u, 0, sizeof(u));

	if (err)
		return err;
	if (u.comp_mask || u.burst_info.max_burst_sz || u.burst_info.typical_pkt_sz || u.burst_info.reserved)
		return EOPNOTSUPP;
	return 0;
}

/* modify_qp_mask() in core/uverbs_cmd.c: the other half of an XRC connection has these. */
static uint32_t ignored(const struct emu_qp *qp)
{
	switch (qp->type) {
	case IBV_QPT_XRC_SEND:
		return IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	case IBV_QPT_XRC_RECV:
		return IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
	default:
		return 0;
	}
}

/* A DCT's number comes with the change that makes it ready to receive, and there must be room for it. */
static int check_dct_response(const struct emu_cmd *c, const struct emu_qp *qp, uint8_t next)
{
	const size_t min = offsetof(struct mlx5_ib_modify_qp_resp, dctn) + sizeof(uint32_t);

	return qp->dct && next == IBV_QPS_RTR && c->uhw_out.len < min ? EINVAL : 0;
}

void emu_qp_forget_attributes(struct emu_qp *qp)
{
	memset(&qp->av, 0, sizeof(qp->av));
	memset(&qp->alt, 0, sizeof(qp->alt));
	qp->attr_mask_seen = 0;
	qp->qkey = qp->rq_psn = qp->sq_psn = qp->dest_qpn = qp->access = 0;
	qp->pkey_index = qp->alt_pkey_index = 0;
	qp->mtu = qp->mig_state = qp->rd_atomic = qp->dest_rd_atomic = qp->min_rnr_timer = 0;
	qp->timeout = qp->retry_cnt = qp->rnr_retry = qp->alt_port = qp->alt_timeout = qp->sq_draining = 0;
	qp->port = 0;
}

static void apply(struct emu_qp *qp, const struct ib_uverbs_modify_qp *m, const struct emu_path *path)
{
	uint32_t mask = m->attr_mask;

	qp->attr_mask_seen |= mask;
	if (mask & IBV_QP_PORT)
		qp->port = m->port_num;
	if (mask & IBV_QP_AV)
		qp->av = *path;
	if (mask & IBV_QP_QKEY)
		qp->qkey = m->qkey;
	if (mask & IBV_QP_RQ_PSN)
		qp->rq_psn = m->rq_psn & PSN_MASK;
	if (mask & IBV_QP_SQ_PSN)
		qp->sq_psn = m->sq_psn & PSN_MASK;
	if (mask & IBV_QP_DEST_QPN)
		qp->dest_qpn = m->dest_qp_num & 0xffffff;
	if (mask & IBV_QP_ACCESS_FLAGS)
		qp->access = m->qp_access_flags & QP_ACCESS;
	if (mask & IBV_QP_PKEY_INDEX)
		qp->pkey_index = m->pkey_index;
	if (mask & IBV_QP_PATH_MTU)
		qp->mtu = m->path_mtu;
	if (mask & IBV_QP_PATH_MIG_STATE)
		qp->mig_state = m->path_mig_state;
	if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
		qp->rd_atomic = m->max_rd_atomic;
	if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
		qp->dest_rd_atomic = m->max_dest_rd_atomic;
	if (mask & IBV_QP_MIN_RNR_TIMER)
		qp->min_rnr_timer = m->min_rnr_timer & RNR_TIMER_MASK;
	if (mask & IBV_QP_TIMEOUT)
		qp->timeout = m->timeout & TIMEOUT_MASK;
	if (mask & IBV_QP_RETRY_CNT)
		qp->retry_cnt = m->retry_cnt & RETRY_MASK;
	if (mask & IBV_QP_RNR_RETRY)
		qp->rnr_retry = m->rnr_retry & RETRY_MASK;
}

int emu_modify_qp(struct emu_cmd *c, struct ib_uverbs_ex_modify_qp *req)
{
	struct ib_uverbs_modify_qp *m = &req->base;
	struct mlx5_ib_modify_qp_resp resp = { 0 };
	struct emu_path path = { 0 };
	struct emu_qp *qp = emu_object_get(c->ctx, EMU_QP, m->qp_handle);
	uint8_t cur, next, old;
	int err;

	if (!qp)
		return EINVAL;
	err = check_request(qp, m);
	if (!err)
		err = check_core(qp, m, &path);
	if (!err)
		err = check_provider_part(c);
	if (err)
		return err;
	m->attr_mask &= ~ignored(qp);
	cur = m->attr_mask & IBV_QP_CUR_STATE ? m->cur_qp_state : qp->state;
	next = m->attr_mask & IBV_QP_STATE ? m->qp_state : cur;
	err = check_driver(qp, m, cur, next);
	if (!err)
		err = check_dct_response(c, qp, next);
	if (err)
		return err;
	old = qp->state;
	if (next == IBV_QPS_RESET)
		emu_qp_forget_attributes(qp);
	else
		apply(qp, m, &path);
	qp->state = next;
	emu_qp_state_changed(qp, old);
	resp.dctn = qp->dct ? emu_qp_visible_number(qp) : 0;
	resp.response_length = (uint32_t)MIN(sizeof(resp), c->uhw_out.len);
	return cmd_uhw_response(c, &resp, sizeof(resp));
}

/* SPDX-License-Identifier: MIT
 * Queue pairs: the commands. What they come to is in qp_create.c and cmd_modify_qp.c.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "control.h"

/* ---------------------------------------------------------------- creation */

static int request_from_ex(struct emu_cmd *c, const struct ib_uverbs_ex_create_qp *req, struct emu_qp_request *r)
{
	*r = (struct emu_qp_request){
		.user_handle = req->user_handle,
		.pd = emu_object_get(c->ctx, EMU_PD, req->pd_handle),
		.scq = emu_object_get(c->ctx, EMU_CQ, req->send_cq_handle),
		.rcq = emu_object_get(c->ctx, EMU_CQ, req->recv_cq_handle),
		.srq = req->is_srq ? emu_object_get(c->ctx, EMU_SRQ, req->srq_handle) : NULL,
		/* The handle's field does for both. */
		.xrcd = req->qp_type == IBV_QPT_XRC_RECV ? emu_object_get(c->ctx, EMU_XRCD, req->pd_handle) : NULL,
		.type = req->qp_type,
		.create_flags = req->create_flags,
		.sig_all = req->sq_sig_all,
		.cap = { req->max_send_wr, req->max_recv_wr, req->max_send_sge, req->max_recv_sge, req->max_inline_data },
	};
	if (req->comp_mask)
		return req->comp_mask & ~(uint32_t)IB_UVERBS_CREATE_QP_SUP_COMP_MASK ? EINVAL : EOPNOTSUPP;
	return req->reserved || (req->is_srq && !r->srq) ? EINVAL : 0;
}

static int create_qp_respond(struct emu_cmd *c, const struct ib_uverbs_ex_create_qp *req, bool extended)
{
	struct ib_uverbs_ex_create_qp_resp resp = { 0 };
	struct emu_qp_request r;
	struct emu_qp *qp;
	int err = request_from_ex(c, req, &r);

	if (!err)
		err = emu_qp_create(c, &r, &qp);
	if (err)
		return err;
	resp.base.qp_handle = qp->o.handle;
	resp.base.qpn = emu_qp_visible_number(qp);
	resp.base.max_send_wr = qp->max_send_wr;
	resp.base.max_recv_wr = qp->max_recv_wr;
	resp.base.max_send_sge = qp->max_send_sge;
	resp.base.max_recv_sge = qp->max_recv_sge;
	resp.base.max_inline_data = qp->max_inline;
	resp.response_length = cmd_response_length(c, sizeof(resp));
	err = cmd_response(c, &resp, extended ? sizeof(resp) : sizeof(resp.base));
	if (err)
		emu_object_destroy(&qp->o);
	return err;
}

static int create_qp_write(struct emu_cmd *c)
{
	struct ib_uverbs_create_qp req;
	struct ib_uverbs_ex_create_qp ex = { 0 };
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	ex.user_handle = req.user_handle;
	ex.pd_handle = req.pd_handle;
	ex.send_cq_handle = req.send_cq_handle;
	ex.recv_cq_handle = req.recv_cq_handle;
	ex.srq_handle = req.srq_handle;
	ex.max_send_wr = req.max_send_wr;
	ex.max_recv_wr = req.max_recv_wr;
	ex.max_send_sge = req.max_send_sge;
	ex.max_recv_sge = req.max_recv_sge;
	ex.max_inline_data = req.max_inline_data;
	ex.sq_sig_all = req.sq_sig_all;
	ex.qp_type = req.qp_type;
	ex.is_srq = req.is_srq;
	return create_qp_respond(c, &ex, false);
}

static int create_qp_ex(struct emu_cmd *c)
{
	struct ib_uverbs_ex_create_qp req;
	int err = cmd_request(c, &req, sizeof(req));

	return err ? err : create_qp_respond(c, &req, true);
}

static int create_qp(struct emu_ioctl_call *call)
{
	uint64_t flags = attr_in_value(call, UVERBS_ATTR_CREATE_QP_FLAGS);
	struct emu_qp_request r = {
		.user_handle = attr_in_value(call, UVERBS_ATTR_CREATE_QP_USER_HANDLE),
		.pd = attr_object(call, UVERBS_ATTR_CREATE_QP_PD_HANDLE),
		.scq = attr_object(call, UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE),
		.rcq = attr_object(call, UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE),
		.srq = attr_object(call, UVERBS_ATTR_CREATE_QP_SRQ_HANDLE),
		.xrcd = attr_object(call, UVERBS_ATTR_CREATE_QP_XRCD_HANDLE),
		.type = (uint32_t)attr_in_value(call, UVERBS_ATTR_CREATE_QP_TYPE),
		.create_flags = (uint32_t)flags & ~(uint32_t)IB_UVERBS_QP_CREATE_SQ_SIG_ALL,
		.sig_all = flags & IB_UVERBS_QP_CREATE_SQ_SIG_ALL,
	};
	struct emu_qp *qp;
	uint32_t qpn;
	int err = attr_in(call, UVERBS_ATTR_CREATE_QP_CAP, &r.cap, sizeof(r.cap));

	if (!err && flags >> 32)
		err = EINVAL;
	if (!err)
		err = emu_qp_create(&call->cmd, &r, &qp);
	if (err)
		return err;
	qpn = emu_qp_visible_number(qp);
	err = attr_out(call, UVERBS_ATTR_CREATE_QP_RESP_CAP, &r.cap, sizeof(r.cap));
	if (!err)
		err = attr_out(call, UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &qpn, sizeof(qpn));
	if (!err)
		err = attr_out_id(call, UVERBS_ATTR_CREATE_QP_HANDLE, qp->o.handle);
	if (err)
		emu_object_destroy(&qp->o);
	return err;
}

/* ---------------------------------------------------------------- query */

/* mlx5_ib_dct_query_qp() */
static bool can_query_dct(const struct emu_qp *qp, uint32_t mask)
{
	const uint32_t supported = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_AV | IBV_QP_PATH_MTU |
				   IBV_QP_PKEY_INDEX;

	return qp->state == IBV_QPS_RTR && !(mask & ~supported);
}

/* mlx5_ib_query_qp(): the send queue's capacity is the library's own knowledge and stays 0. */
static int query_qp(struct emu_cmd *c)
{
	struct ib_uverbs_query_qp req;
	struct ib_uverbs_query_qp_resp r = { 0 };
	const struct emu_qp *qp;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	qp = emu_object_get(c->ctx, EMU_QP, req.qp_handle);
	if (!qp || (qp->dct && !can_query_dct(qp, req.attr_mask)))
		return EINVAL;
	emu_path_to_dest(&qp->av, &r.dest);
	r.max_recv_wr = qp->rq_nwqe;
	r.max_recv_sge = qp->rq_nwqe ? (1u << qp->rq_shift) / 16 : 0;
	r.max_inline_data = qp->max_inline;
	r.qkey = qp->qkey;
	r.rq_psn = qp->rq_psn;
	r.sq_psn = qp->sq_psn;
	r.dest_qp_num = qp->dest_qpn;
	r.qp_access_flags = qp->access;
	r.pkey_index = qp->pkey_index;
	r.alt_pkey_index = qp->alt_pkey_index;
	r.qp_state = qp->state;
	r.cur_qp_state = qp->state;
	r.path_mtu = qp->mtu;
	r.path_mig_state = qp->mig_state;
	r.sq_draining = qp->sq_draining;
	r.max_rd_atomic = qp->rd_atomic;
	r.max_dest_rd_atomic = qp->dest_rd_atomic;
	r.min_rnr_timer = qp->min_rnr_timer;
	r.port_num = qp->port;
	r.timeout = qp->timeout;
	r.retry_cnt = qp->retry_cnt;
	r.rnr_retry = qp->rnr_retry;
	r.alt_port_num = qp->alt_port;
	r.alt_timeout = qp->alt_timeout;
	r.sq_sig_all = qp->sq_sig_all;
	return cmd_response(c, &r, sizeof(r));
}

/* ---------------------------------------------------------------- destruction */

static void destroy(struct emu_qp *qp, struct ib_uverbs_destroy_qp_resp *resp)
{
	emu_object_retire(&qp->o);
	resp->events_reported = qp->async_events;
	emu_object_free(&qp->o);
}

static int destroy_qp_write(struct emu_cmd *c)
{
	struct ib_uverbs_destroy_qp req;
	struct ib_uverbs_destroy_qp_resp resp;
	struct emu_qp *qp;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_QP, req.qp_handle, &qp);
	if (err)
		return err;
	destroy(qp, &resp);
	return cmd_response(c, &resp, sizeof(resp));
}

static int destroy_qp(struct emu_ioctl_call *call)
{
	struct ib_uverbs_destroy_qp_resp resp;

	destroy(attr_object(call, UVERBS_ATTR_DESTROY_QP_HANDLE), &resp);
	return attr_out(call, UVERBS_ATTR_DESTROY_QP_RESP, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- the write forms of modify */

static int modify_qp_write(struct emu_cmd *c)
{
	struct ib_uverbs_ex_modify_qp ex = { 0 };
	int err = cmd_request(c, &ex.base, sizeof(ex.base));

	if (err)
		return err;
	if (ex.base.attr_mask & ~(uint32_t)((IBV_QP_RATE_LIMIT << 1) - 1) || ex.base.attr_mask & IBV_QP_RATE_LIMIT)
		return EOPNOTSUPP;
	return emu_modify_qp(c, &ex);
}

static int modify_qp_ex(struct emu_cmd *c)
{
	struct ib_uverbs_ex_modify_qp req;
	struct ib_uverbs_ex_modify_qp_resp resp = { .response_length = cmd_response_length(c, sizeof(resp)) };
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (req.base.attr_mask & ~(uint32_t)((IBV_QP_RATE_LIMIT << 1) - 1))
		return EOPNOTSUPP;
	err = emu_modify_qp(c, &req);
	return err ? err : cmd_response(c, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- tables */

static const struct emu_attr_spec create_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_CREATE_QP_HANDLE, ATTR_IDR_NEW, EMU_QP, true),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_QP_XRCD_HANDLE, ATTR_IDR, EMU_XRCD, false),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_QP_PD_HANDLE, ATTR_IDR, EMU_PD, false),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_QP_SRQ_HANDLE, ATTR_IDR, EMU_SRQ, false),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, ATTR_IDR, EMU_CQ, false),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, ATTR_IDR, EMU_CQ, false),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_QP_USER_HANDLE, uint64_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_QP_CAP, struct ib_uverbs_qp_cap, true),
	ATTR_CONST_IN(UVERBS_ATTR_CREATE_QP_TYPE),
	ATTR_FLAGS_IN(UVERBS_ATTR_CREATE_QP_FLAGS, false),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_QP_EVENT_FD, ATTR_FD, EMU_CHANNEL, false),
	ATTR_OUT_TYPE(UVERBS_ATTR_CREATE_QP_RESP_CAP, struct ib_uverbs_qp_cap, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, uint32_t, true),
	ATTR_UHW,
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_QP_HANDLE, ATTR_IDR_DESTROY, EMU_QP, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_DESTROY_QP_RESP, struct ib_uverbs_destroy_qp_resp, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE, create_attrs, create_qp, .udata = true),
	IOCTL_METHOD(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY, destroy_attrs, destroy_qp),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_CREATE_QP, false, true, true, sizeof(struct ib_uverbs_create_qp),
	  sizeof(struct ib_uverbs_create_qp_resp), create_qp_write, "CREATE_QP" },
	{ IB_USER_VERBS_EX_CMD_CREATE_QP, true, true, true,
	  offsetof(struct ib_uverbs_ex_create_qp, comp_mask) + sizeof(uint32_t), sizeof(struct ib_uverbs_ex_create_qp_resp),
	  create_qp_ex, "EX_CREATE_QP" },
	{ IB_USER_VERBS_CMD_MODIFY_QP, false, false, true, sizeof(struct ib_uverbs_modify_qp), 0, modify_qp_write,
	  "MODIFY_QP" },
	{ IB_USER_VERBS_EX_CMD_MODIFY_QP, true, true, true,
	  offsetof(struct ib_uverbs_ex_modify_qp, base) + sizeof(struct ib_uverbs_modify_qp),
	  sizeof(struct ib_uverbs_ex_modify_qp_resp), modify_qp_ex, "EX_MODIFY_QP" },
	{ IB_USER_VERBS_CMD_QUERY_QP, false, true, false, sizeof(struct ib_uverbs_query_qp),
	  sizeof(struct ib_uverbs_query_qp_resp), query_qp, "QUERY_QP" },
	{ IB_USER_VERBS_CMD_DESTROY_QP, false, true, false, sizeof(struct ib_uverbs_destroy_qp),
	  sizeof(struct ib_uverbs_destroy_qp_resp), destroy_qp_write, "DESTROY_QP" },
};

const struct emu_methods emu_qp_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

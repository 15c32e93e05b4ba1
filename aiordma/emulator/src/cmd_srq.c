/* SPDX-License-Identifier: MIT
 * Shared receive queues, also those of XRC. The device has no tag matching.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "control.h"

struct srq_request {
	uint64_t user_handle;
	struct emu_pd *pd;
	struct emu_xrcd *xrcd;
	struct emu_cq *cq;
	uint32_t max_wr, max_sge, type; /* a limit is irrelevant at creation: ibv_create_srq(3) */
};

/* mlx5_ib_create_srq() and create_srq_user() in mlx5/srq.c: the WQE's size isn't passed, both sides compute it. */
static void set_geometry(struct emu_srq *srq, const struct srq_request *r)
{
	uint32_t size = 16 + 16 * r->max_sge; /* the link to the next one, and the scatter list */

	srq->wqe_shift = 5;
	while (1u << srq->wqe_shift < size)
		srq->wqe_shift++;
	srq->nwqe = 1;
	while (srq->nwqe < r->max_wr + 1)
		srq->nwqe <<= 1;
	srq->max_wr = srq->nwqe - 1;
	srq->max_sge = r->max_sge;
}

static int check_kind(const struct emu_limits *l, const struct srq_request *r)
{
	if (!r->pd)
		return EINVAL;
	switch (r->type) {
	case IB_UVERBS_SRQT_BASIC:
		return 0;
	case IB_UVERBS_SRQT_XRC:
		if (!l->xrc)
			return EOPNOTSUPP;
		return r->xrcd && r->cq ? 0 : EINVAL;
	case IB_UVERBS_SRQT_TM:
		return EOPNOTSUPP;
	default:
		return EINVAL;
	}
}

static int new_srq(struct emu_cmd *c, const struct srq_request *r, struct emu_srq **out)
{
	struct emu_device *d = c->ctx->dev;
	struct mlx5_ib_create_srq u;
	struct mlx5_ib_create_srq_resp resp = { 0 };
	struct emu_srq *srq;
	uint64_t db_pages;
	int err;

	err = check_kind(&d->limits, r);
	if (err)
		return err;
	if (r->max_wr > d->limits.max_srq_wr || r->max_sge > d->limits.max_srq_sge)
		return EINVAL;
	err = cmd_uhw_request(c, &u, offsetof(struct mlx5_ib_create_srq, uidx), sizeof(u));
	if (!err && (u.reserved0 || u.reserved1 || u.db_addr & 7 || queue_misaligned(u.buf_addr)))
		err = EINVAL;
	if (!err && u.flags)
		err = EOPNOTSUPP; /* WQE signatures */
	if (!err)
		err = emu_limit(c->ctx, EMU_SRQ, d->limits.max_srq);
	if (err)
		return err;
	srq = emu_object_alloc(c->ctx, EMU_SRQ, sizeof(*srq));
	if (!srq)
		return ENOMEM;
	srq->dev = d;
	srq->pd = r->pd;
	srq->xrc = r->type == IB_UVERBS_SRQT_XRC;
	if (srq->xrc) {
		srq->xrcd = r->xrcd;
		srq->cq = r->cq;
	}
	srq->uidx = u.uidx;
	srq->user_handle = r->user_handle;
	srq->buf = (uint8_t *)(uintptr_t)u.buf_addr;
	srq->db = (uint32_t *)(uintptr_t)u.db_addr;
	set_geometry(srq, r);
	err = umem_get(u.buf_addr, (uint64_t)srq->nwqe << srq->wqe_shift, true, &srq->pinned);
	if (!err)
		err = umem_get(u.db_addr, 8, true, &db_pages);
	if (!err) {
		umem_release(db_pages);
		err = emu_srq_insert(d, srq);
	}
	if (err) {
		umem_release(srq->pinned);
		emu_object_free(&srq->o);
		return err;
	}
	r->pd->o.usecnt++;
	if (srq->xrc) {
		srq->xrcd->o.usecnt++;
		srq->cq->o.usecnt++;
	}
	resp.srqn = srq->srqn;
	err = emu_object_publish(&srq->o);
	if (!err)
		err = cmd_uhw_response(c, &resp, sizeof(resp));
	if (err)
		emu_object_destroy(&srq->o);
	else
		*out = srq;
	return err;
}

static int create_srq_respond(struct emu_cmd *c, const struct srq_request *r)
{
	struct ib_uverbs_create_srq_resp resp = { 0 };
	struct emu_srq *srq;
	int err = new_srq(c, r, &srq);

	if (err)
		return err;
	resp.srq_handle = srq->o.handle;
	resp.max_wr = srq->max_wr;
	resp.max_sge = srq->max_sge;
	resp.srqn = srq->xrc ? srq->srqn : 0;
	err = cmd_response(c, &resp, sizeof(resp));
	if (err)
		emu_object_destroy(&srq->o);
	return err;
}

static int create_srq_write(struct emu_cmd *c)
{
	struct ib_uverbs_create_srq req;
	struct srq_request r = { .type = IB_UVERBS_SRQT_BASIC };
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	r.user_handle = req.user_handle;
	r.pd = emu_object_get(c->ctx, EMU_PD, req.pd_handle);
	r.max_wr = req.max_wr;
	r.max_sge = req.max_sge;
	return create_srq_respond(c, &r);
}

static int create_xsrq_write(struct emu_cmd *c)
{
	struct ib_uverbs_create_xsrq req;
	struct srq_request r = { 0 };
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	r.user_handle = req.user_handle;
	r.pd = emu_object_get(c->ctx, EMU_PD, req.pd_handle);
	r.max_wr = req.max_wr;
	r.max_sge = req.max_sge;
	r.type = req.srq_type;
	r.xrcd = emu_object_get(c->ctx, EMU_XRCD, req.xrcd_handle);
	r.cq = emu_object_get(c->ctx, EMU_CQ, req.cq_handle);
	return create_srq_respond(c, &r);
}

static int create_srq(struct emu_ioctl_call *call)
{
	struct srq_request r = {
		.user_handle = attr_in_value(call, UVERBS_ATTR_CREATE_SRQ_USER_HANDLE),
		.pd = attr_object(call, UVERBS_ATTR_CREATE_SRQ_PD_HANDLE),
		.xrcd = attr_object(call, UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE),
		.cq = attr_object(call, UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE),
		.max_wr = (uint32_t)attr_in_value(call, UVERBS_ATTR_CREATE_SRQ_MAX_WR),
		.max_sge = (uint32_t)attr_in_value(call, UVERBS_ATTR_CREATE_SRQ_MAX_SGE),
		.type = (uint32_t)attr_in_value(call, UVERBS_ATTR_CREATE_SRQ_TYPE),
	};
	struct emu_srq *srq;
	int err = new_srq(&call->cmd, &r, &srq);

	if (err)
		return err;
	err = attr_out(call, UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, &srq->max_wr, sizeof(srq->max_wr));
	if (!err)
		err = attr_out(call, UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, &srq->max_sge, sizeof(srq->max_sge));
	if (!err)
		err = attr_out(call, UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, &srq->srqn, sizeof(srq->srqn));
	if (!err)
		err = attr_out_id(call, UVERBS_ATTR_CREATE_SRQ_HANDLE, srq->o.handle);
	if (err)
		emu_object_destroy(&srq->o);
	return err;
}

/* ---------------------------------------------------------------- change, query, destruction */

/* mlx5_ib_modify_srq(): the size is fixed. */
static int modify_srq(struct emu_cmd *c)
{
	struct ib_uverbs_modify_srq req;
	struct emu_srq *srq;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	srq = emu_object_get(c->ctx, EMU_SRQ, req.srq_handle);
	if (!srq || req.attr_mask & IBV_SRQ_MAX_WR)
		return EINVAL;
	if (!(req.attr_mask & IBV_SRQ_LIMIT))
		return 0;
	if (req.srq_limit >= srq->nwqe)
		return EINVAL;
	emu_srq_set_limit(srq, req.srq_limit);
	return 0;
}

static int query_srq(struct emu_cmd *c)
{
	struct ib_uverbs_query_srq req;
	struct ib_uverbs_query_srq_resp resp = { 0 };
	struct emu_srq *srq;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	srq = emu_object_get(c->ctx, EMU_SRQ, req.srq_handle);
	if (!srq)
		return EINVAL;
	resp.max_wr = srq->max_wr;
	resp.max_sge = srq->max_sge;
	resp.srq_limit = srq->limit;
	return cmd_response(c, &resp, sizeof(resp));
}

static void destroy(struct emu_srq *srq, struct ib_uverbs_destroy_srq_resp *resp)
{
	emu_object_retire(&srq->o);
	resp->events_reported = srq->async_events;
	emu_object_free(&srq->o);
}

static int destroy_srq_write(struct emu_cmd *c)
{
	struct ib_uverbs_destroy_srq req;
	struct ib_uverbs_destroy_srq_resp resp;
	struct emu_srq *srq;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_SRQ, req.srq_handle, &srq);
	if (err)
		return err;
	destroy(srq, &resp);
	return cmd_response(c, &resp, sizeof(resp));
}

static int destroy_srq(struct emu_ioctl_call *call)
{
	struct ib_uverbs_destroy_srq_resp resp;

	destroy(attr_object(call, UVERBS_ATTR_DESTROY_SRQ_HANDLE), &resp);
	return attr_out(call, UVERBS_ATTR_DESTROY_SRQ_RESP, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- tables */

static const struct emu_attr_spec create_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_CREATE_SRQ_HANDLE, ATTR_IDR_NEW, EMU_SRQ, true),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_SRQ_PD_HANDLE, ATTR_IDR, EMU_PD, true),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE, ATTR_IDR, EMU_XRCD, false),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE, ATTR_IDR, EMU_CQ, false),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_SRQ_USER_HANDLE, uint64_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_SRQ_MAX_WR, uint32_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_SRQ_MAX_SGE, uint32_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_SRQ_LIMIT, uint32_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_SRQ_MAX_NUM_TAGS, uint32_t, false),
	ATTR_CONST_IN(UVERBS_ATTR_CREATE_SRQ_TYPE),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_SRQ_EVENT_FD, ATTR_FD, EMU_CHANNEL, false),
	ATTR_OUT_TYPE(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, uint32_t, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, uint32_t, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, uint32_t, false),
	ATTR_UHW,
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_SRQ_HANDLE, ATTR_IDR_DESTROY, EMU_SRQ, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_DESTROY_SRQ_RESP, struct ib_uverbs_destroy_srq_resp, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE, create_attrs, create_srq, .udata = true),
	IOCTL_METHOD(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY, destroy_attrs, destroy_srq),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_CREATE_SRQ, false, true, true, sizeof(struct ib_uverbs_create_srq),
	  sizeof(struct ib_uverbs_create_srq_resp), create_srq_write, "CREATE_SRQ" },
	{ IB_USER_VERBS_CMD_CREATE_XSRQ, false, true, true, sizeof(struct ib_uverbs_create_xsrq),
	  sizeof(struct ib_uverbs_create_srq_resp), create_xsrq_write, "CREATE_XSRQ" },
	{ IB_USER_VERBS_CMD_MODIFY_SRQ, false, false, true, sizeof(struct ib_uverbs_modify_srq), 0, modify_srq, "MODIFY_SRQ" },
	{ IB_USER_VERBS_CMD_QUERY_SRQ, false, true, false, sizeof(struct ib_uverbs_query_srq),
	  sizeof(struct ib_uverbs_query_srq_resp), query_srq, "QUERY_SRQ" },
	{ IB_USER_VERBS_CMD_DESTROY_SRQ, false, true, false, sizeof(struct ib_uverbs_destroy_srq),
	  sizeof(struct ib_uverbs_destroy_srq_resp), destroy_srq_write, "DESTROY_SRQ" },
};

const struct emu_methods emu_srq_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

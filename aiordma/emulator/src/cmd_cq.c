/* SPDX-License-Identifier: MIT
 * Completion channels and completion queues.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "control.h"

#define CQ_FLAGS (IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION | IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN)

static uint32_t power_of_two_above(uint32_t n)
{
	uint32_t p = 1;

	while (p <= n)
		p <<= 1;
	return p;
}

/* ---------------------------------------------------------------- channels */

static int create_comp_channel(struct emu_cmd *c)
{
	struct ib_uverbs_create_comp_channel req;
	struct ib_uverbs_create_comp_channel_resp resp;
	struct emu_channel *channel;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_channel_create(c->ctx, sizeof(struct ib_uverbs_comp_event_desc), &channel);
	if (err)
		return err;
	resp.fd = (uint32_t)channel->rfd;
	err = cmd_response(c, &resp, sizeof(resp));
	if (err) {
		int fd = channel->rfd;

		emu_fd_clear(fd);
		emu_real.close(fd);
	}
	return err;
}

/* ---------------------------------------------------------------- creation */

/* What both forms ask for. */
struct cq_request {
	uint64_t user_handle;
	uint32_t cqe, comp_vector, flags;
	struct emu_channel *channel;
};

/* create_cq_user() in mlx5/cq.c */
static int check_provider_part(struct emu_ucontext *ctx, const struct mlx5_ib_create_cq *u)
{
	const uint16_t known = MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD | MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX |
			       MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS;

	if (u->flags & ~known)
		return EINVAL;
	if ((u->cqe_size != 64 && u->cqe_size != 128) || u->reserved0 || u->reserved1)
		return EINVAL;
	if (!(u->flags & MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX) && !ctx->static_uars)
		return EINVAL;
	/* Neither compression nor the port's clock is advertised. */
	if (u->cqe_comp_en || u->flags & MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS)
		return EOPNOTSUPP;
	if (u->flags & MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD && u->cqe_size != 128)
		return EOPNOTSUPP;
	if (u->db_addr & 7 || queue_misaligned(u->buf_addr)) /* the fields have no lower bits */
		return EINVAL;
	return 0;
}

static int new_cq(struct emu_cmd *c, const struct cq_request *r, struct emu_cq **out)
{
	struct emu_device *d = c->ctx->dev;
	struct mlx5_ib_create_cq u;
	struct mlx5_ib_create_cq_resp resp = { 0 };
	struct emu_cq *cq;
	uint64_t db_pages;
	int err;

	if (r->comp_vector >= d->limits.comp_vectors)
		return EINVAL;
	/* mlx5_ib_create_cq(); the limit is one less than the entries of the largest queue */
	if (r->cqe > d->limits.max_cqe)
		return EINVAL;
	if (r->flags & ~(uint32_t)CQ_FLAGS)
		return EOPNOTSUPP;
	err = cmd_uhw_request(c, &u, offsetof(struct mlx5_ib_create_cq, flags), sizeof(u));
	if (!err)
		err = check_provider_part(c->ctx, &u);
	if (!err)
		err = emu_limit(c->ctx, EMU_CQ, d->limits.max_cq);
	if (err)
		return err;
	emu_uar_adopt(c->ctx);
	cq = emu_object_alloc(c->ctx, EMU_CQ, sizeof(*cq));
	if (!cq)
		return ENOMEM;
	cq->dev = d;
	cq->buf = (uint8_t *)(uintptr_t)u.buf_addr;
	cq->db = (uint32_t *)(uintptr_t)u.db_addr;
	cq->ncqe = power_of_two_above(r->cqe);
	cq->cqe_size = u.cqe_size;
	cq->user_handle = r->user_handle;
	cq->comp_vector = r->comp_vector;
	cq->uar_page = u.flags & MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX ? u.uar_page_index : 0;
	cq->channel = r->channel;
	err = umem_get(u.buf_addr, (uint64_t)cq->ncqe * cq->cqe_size, true, &cq->pinned);
	/* The doorbell record's page is checked, not charged: libmlx5 packs the records of all its queues on few pages. */
	if (!err)
		err = umem_get(u.db_addr, 8, true, &db_pages);
	if (!err) {
		umem_release(db_pages);
		err = emu_cq_insert(d, cq);
	}
	if (err) {
		umem_release(cq->pinned);
		emu_object_free(&cq->o);
		return err;
	}
	if (cq->channel)
		cq->channel->o.usecnt++;
	resp.cqn = cq->cqn;
	err = emu_object_publish(&cq->o);
	if (!err)
		err = cmd_uhw_response(c, &resp, sizeof(resp));
	if (err)
		emu_object_destroy(&cq->o);
	else
		*out = cq;
	return err;
}

static int create_cq_fill(struct emu_cmd *c, const struct ib_uverbs_ex_create_cq *req,
			  struct ib_uverbs_ex_create_cq_resp *resp)
{
	struct cq_request r = { req->user_handle, req->cqe, req->comp_vector, req->flags, NULL };
	struct emu_cq *cq;
	int err;

	if (req->comp_channel >= 0) {
		r.channel = emu_channel_by_fd(c->ctx, EMU_CHANNEL, req->comp_channel);
		if (!r.channel)
			return EBADF;
	}
	err = new_cq(c, &r, &cq);
	if (err)
		return err;
	memset(resp, 0, sizeof(*resp));
	resp->base.cq_handle = cq->o.handle;
	resp->base.cqe = cq->ncqe - 1;
	return 0;
}

static int respond_or_destroy(struct emu_cmd *c, struct ib_uverbs_ex_create_cq_resp *resp, size_t size)
{
	int err = cmd_response(c, resp, size);

	if (err)
		emu_object_destroy(emu_object_get(c->ctx, EMU_CQ, resp->base.cq_handle));
	return err;
}

static int create_cq_write(struct emu_cmd *c)
{
	struct ib_uverbs_create_cq req;
	struct ib_uverbs_ex_create_cq ex = { 0 };
	struct ib_uverbs_ex_create_cq_resp resp;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	ex.user_handle = req.user_handle;
	ex.cqe = req.cqe;
	ex.comp_vector = req.comp_vector;
	ex.comp_channel = req.comp_channel;
	err = create_cq_fill(c, &ex, &resp);
	return err ? err : respond_or_destroy(c, &resp, sizeof(resp.base));
}

static int create_cq_ex(struct emu_cmd *c)
{
	struct ib_uverbs_ex_create_cq req;
	struct ib_uverbs_ex_create_cq_resp resp;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (req.comp_mask || req.reserved)
		return EINVAL;
	err = create_cq_fill(c, &req, &resp);
	if (err)
		return err;
	resp.response_length = cmd_response_length(c, sizeof(resp));
	return respond_or_destroy(c, &resp, sizeof(resp));
}

static int create_cq(struct emu_ioctl_call *call)
{
	struct cq_request r = {
		.user_handle = attr_in_value(call, UVERBS_ATTR_CREATE_CQ_USER_HANDLE),
		.cqe = (uint32_t)attr_in_value(call, UVERBS_ATTR_CREATE_CQ_CQE),
		.comp_vector = (uint32_t)attr_in_value(call, UVERBS_ATTR_CREATE_CQ_COMP_VECTOR),
		.flags = (uint32_t)attr_in_value(call, UVERBS_ATTR_CREATE_CQ_FLAGS),
		.channel = attr_object(call, UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL),
	};
	struct emu_cq *cq;
	uint32_t cqe;
	int err = new_cq(&call->cmd, &r, &cq);

	if (err)
		return err;
	cqe = cq->ncqe - 1;
	err = attr_out(call, UVERBS_ATTR_CREATE_CQ_RESP_CQE, &cqe, sizeof(cqe));
	if (!err)
		err = attr_out_id(call, UVERBS_ATTR_CREATE_CQ_HANDLE, cq->o.handle);
	if (err)
		emu_object_destroy(&cq->o);
	return err;
}

/* ---------------------------------------------------------------- change */

/* Sends that were posted and will complete on this queue; not those that wait for a timer. */
static bool has_work_ahead(const struct emu_cq *cq)
{
	const struct emu_ucontext *ctx = cq->o.ctx;

	for (uint32_t h = 0; h < ctx->nhandles; h++) {
		const struct emu_qp *qp = (const struct emu_qp *)ctx->handles[h];

		if (qp && qp->o.type == EMU_QP && qp->scq == cq && qp->state == IBV_QPS_RTS && qp->sq_nbb &&
		    ((!qp->stall && (uint16_t)load_be32(&qp->db[1]) != qp->sq_ci) || emu_qp_streams_run(qp)))
			return true;
	}
	return false;
}

/* mlx5_ib_resize_cq() */
static int resize_cq(struct emu_cmd *c)
{
	struct ib_uverbs_resize_cq req;
	struct ib_uverbs_resize_cq_resp resp = { 0 };
	struct mlx5_ib_resize_cq u;
	struct emu_cq *cq;
	uint32_t entries;
	uint64_t pages;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	cq = emu_object_get(c->ctx, EMU_CQ, req.cq_handle);
	if (!cq || req.cqe < 1 || req.cqe > c->ctx->dev->limits.max_cqe)
		return EINVAL;
	entries = power_of_two_above(req.cqe);
	/* Whether the unread ones fit must not depend on how fast the device thread is. */
	if (entries < cq->ncqe && !c->settled && has_work_ahead(cq))
		return EMU_SETTLE;
	if (entries != cq->ncqe) {
		err = cmd_uhw_request(c, &u, sizeof(u), sizeof(u));
		if (err)
			return err;
		if (u.reserved0 || u.reserved1 || (u.cqe_size != 64 && u.cqe_size != 128) || queue_misaligned(u.buf_addr))
			return EINVAL;
		err = umem_get(u.buf_addr, (uint64_t)u.cqe_size * entries, true, &pages);
		if (err)
			return err;
		err = emu_cq_resize(cq, (uint8_t *)(uintptr_t)u.buf_addr, entries, u.cqe_size);
		if (err) {
			umem_release(pages);
			return err;
		}
		umem_release(cq->pinned);
		cq->pinned = pages;
	}
	resp.cqe = entries - 1;
	return cmd_response(c, &resp, sizeof(resp));
}

static int modify_cq(struct emu_cmd *c)
{
	struct ib_uverbs_ex_modify_cq req;
	struct emu_cq *cq;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (!req.attr_mask || req.reserved)
		return EINVAL;
	if (req.attr_mask > IBV_CQ_ATTR_MODERATE)
		return EOPNOTSUPP;
	cq = emu_object_get(c->ctx, EMU_CQ, req.cq_handle);
	if (!cq)
		return EINVAL;
	cq->moderate_count = req.attr.cq_count;
	cq->moderate_period = req.attr.cq_period;
	return 0;
}

/* ---------------------------------------------------------------- destruction */

/* The library waits until it has acknowledged as many events as this reports. */
static void destroy(struct emu_cq *cq, struct ib_uverbs_destroy_cq_resp *resp)
{
	memset(resp, 0, sizeof(*resp));
	emu_object_retire(&cq->o);
	resp->comp_events_reported = cq->comp_events;
	resp->async_events_reported = cq->async_events;
	emu_object_free(&cq->o);
}

static int destroy_cq_write(struct emu_cmd *c)
{
	struct ib_uverbs_destroy_cq req;
	struct ib_uverbs_destroy_cq_resp resp;
	struct emu_cq *cq;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_CQ, req.cq_handle, &cq);
	if (err)
		return err;
	destroy(cq, &resp);
	return cmd_response(c, &resp, sizeof(resp));
}

static int destroy_cq(struct emu_ioctl_call *call)
{
	struct ib_uverbs_destroy_cq_resp resp;

	destroy(attr_object(call, UVERBS_ATTR_DESTROY_CQ_HANDLE), &resp);
	return attr_out(call, UVERBS_ATTR_DESTROY_CQ_RESP, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- tables */

static const struct emu_attr_spec create_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_CREATE_CQ_HANDLE, ATTR_IDR_NEW, EMU_CQ, true),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_CQ_CQE, uint32_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_CQ_USER_HANDLE, uint64_t, true),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL, ATTR_FD, EMU_CHANNEL, false),
	ATTR_IN_TYPE(UVERBS_ATTR_CREATE_CQ_COMP_VECTOR, uint32_t, true),
	ATTR_FLAGS_IN(UVERBS_ATTR_CREATE_CQ_FLAGS, false),
	ATTR_OUT_TYPE(UVERBS_ATTR_CREATE_CQ_RESP_CQE, uint32_t, true),
	ATTR_HANDLE(UVERBS_ATTR_CREATE_CQ_EVENT_FD, ATTR_FD, EMU_CHANNEL, false),
	ATTR_UHW,
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_CQ_HANDLE, ATTR_IDR_DESTROY, EMU_CQ, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_DESTROY_CQ_RESP, struct ib_uverbs_destroy_cq_resp, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE, create_attrs, create_cq, .udata = true),
	IOCTL_METHOD(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY, destroy_attrs, destroy_cq),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, false, true, false, sizeof(struct ib_uverbs_create_comp_channel),
	  sizeof(struct ib_uverbs_create_comp_channel_resp), create_comp_channel, "CREATE_COMP_CHANNEL" },
	{ IB_USER_VERBS_CMD_CREATE_CQ, false, true, true, sizeof(struct ib_uverbs_create_cq),
	  sizeof(struct ib_uverbs_create_cq_resp), create_cq_write, "CREATE_CQ" },
	{ IB_USER_VERBS_EX_CMD_CREATE_CQ, true, true, true, sizeof(struct ib_uverbs_ex_create_cq),
	  sizeof(struct ib_uverbs_ex_create_cq_resp), create_cq_ex, "EX_CREATE_CQ" },
	{ IB_USER_VERBS_CMD_RESIZE_CQ, false, true, true, sizeof(struct ib_uverbs_resize_cq),
	  sizeof(struct ib_uverbs_resize_cq_resp), resize_cq, "RESIZE_CQ" },
	{ IB_USER_VERBS_EX_CMD_MODIFY_CQ, true, false, false, sizeof(struct ib_uverbs_ex_modify_cq), 0, modify_cq,
	  "EX_MODIFY_CQ" },
	{ IB_USER_VERBS_CMD_DESTROY_CQ, false, true, false, sizeof(struct ib_uverbs_destroy_cq),
	  sizeof(struct ib_uverbs_destroy_cq_resp), destroy_cq_write, "DESTROY_CQ" },
};

const struct emu_methods emu_cq_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

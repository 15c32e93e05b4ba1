/* SPDX-License-Identifier: MIT
 * Receive work queues and indirection tables, in the extended write form: libibverbs falls back to it where the ioctl form
 * isn't there, as in kernels before 5.8.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "wq.h"

#define UIDX_MASK 0xffffffu /* MLX5_USER_ASSIGNED_UIDX_MASK */
/* Numbers of these queues start where no queue pair's is: on hardware both are of one kind. */
#define FIRST_RQN 0x800000u
#define FIRST_RQTN 0x10u

static uint32_t log2_of(uint32_t n)
{
	return n ? 31 - (uint32_t)__builtin_clz(n) : 0;
}

struct emu_wq *emu_wq_find(struct emu_ucontext *ctx, uint32_t rqn)
{
	for (uint32_t h = 0; h < ctx->nhandles; h++) {
		struct emu_wq *wq = (struct emu_wq *)ctx->handles[h];

		if (wq && wq->o.type == EMU_WQ && wq->rqn == rqn)
			return wq;
	}
	return NULL;
}

/* ---------------------------------------------------------------- creation */

/* mlx5_ib_create_wq(), prepare_user_rq() and set_user_rq_size() in mlx5/qp.c */
static int read_provider_part(struct emu_cmd *c, struct mlx5_ib_create_wq *u)
{
	const uint32_t max = c->ctx->dev->limits.max_qp_wr;
	int err = cmd_uhw_request(c, u, offsetof(struct mlx5_ib_create_wq, single_stride_log_num_of_bytes), sizeof(*u));

	if (err)
		return err;
	if (u->comp_mask || u->flags)
		return EOPNOTSUPP; /* neither striding queues nor WQE signatures */
	if (!u->rq_wqe_count || u->rq_wqe_count > max || u->rq_wqe_count & (u->rq_wqe_count - 1))
		return EINVAL;
	if (u->rq_wqe_shift < 4 || u->rq_wqe_shift > 9 || u->user_index & ~UIDX_MASK || u->db_addr & 7 ||
	    queue_misaligned(u->buf_addr))
		return EINVAL;
	return 0;
}

static int check_request(struct emu_cmd *c, const struct ib_uverbs_ex_create_wq *req)
{
	if (req->comp_mask || req->reserved)
		return EOPNOTSUPP;
	if (req->wq_type != IBV_WQT_RQ)
		return EOPNOTSUPP;
	if (req->create_flags)
		return EOPNOTSUPP; /* all are about Ethernet frames */
	return req->max_wr > c->ctx->dev->limits.max_qp_wr ? EINVAL : 0;
}

static int new_wq(struct emu_cmd *c, const struct ib_uverbs_ex_create_wq *req, struct emu_wq **out)
{
	struct emu_pd *pd = emu_object_get(c->ctx, EMU_PD, req->pd_handle);
	struct emu_cq *cq = emu_object_get(c->ctx, EMU_CQ, req->cq_handle);
	struct mlx5_ib_create_wq u;
	struct emu_wq *wq;
	uint64_t db_pages;
	int err = check_request(c, req);

	if (!err && (!pd || !cq))
		err = EINVAL;
	if (!err)
		err = read_provider_part(c, &u);
	if (err)
		return err;
	wq = emu_object_alloc(c->ctx, EMU_WQ, sizeof(*wq));
	if (!wq)
		return ENOMEM;
	wq->uidx = u.user_index;
	wq->state = IBV_WQS_RESET;
	wq->db = (uint32_t *)(uintptr_t)u.db_addr;
	wq->log_size = log2_of(u.rq_wqe_count);
	wq->log_stride = u.rq_wqe_shift;
	wq->user_handle = req->user_handle;
	err = umem_get(u.buf_addr, (uint64_t)u.rq_wqe_count << u.rq_wqe_shift, true, &wq->pinned);
	if (!err)
		err = umem_get(u.db_addr, 8, true, &db_pages);
	if (err) {
		umem_release(wq->pinned);
		emu_object_free(&wq->o);
		return err;
	}
	umem_release(db_pages);
	wq->rqn = FIRST_RQN + ++c->ctx->dev->next_rqn;
	wq->pd = pd;
	wq->cq = cq;
	pd->o.usecnt++;
	cq->o.usecnt++;
	*out = wq;
	return 0;
}

static int create_wq(struct emu_cmd *c)
{
	struct ib_uverbs_ex_create_wq_resp resp = { .response_length = cmd_response_length(c, sizeof(resp)) };
	struct mlx5_ib_create_wq_resp uhw = { .response_length = sizeof(uhw) };
	struct ib_uverbs_ex_create_wq req;
	struct emu_wq *wq;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = new_wq(c, &req, &wq);
	if (err)
		return err;
	err = emu_object_publish(&wq->o);
	if (!err)
		err = cmd_uhw_response(c, &uhw, sizeof(uhw));
	if (!err) {
		resp.wq_handle = wq->o.handle;
		resp.max_wr = req.max_wr;
		resp.max_sge = req.max_sge;
		resp.wqn = wq->rqn;
		err = cmd_response(c, &resp, sizeof(resp));
	}
	if (err)
		emu_object_destroy(&wq->o);
	return err;
}

/* ---------------------------------------------------------------- change, destruction */

/* ib_uverbs_ex_modify_wq() in core/uverbs_cmd.c, then mlx5_ib_modify_wq() */
static int modify_wq(struct emu_cmd *c)
{
	const uint32_t known = IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE | IBV_WQ_ATTR_FLAGS;
	struct ib_uverbs_ex_modify_wq req;
	struct mlx5_ib_modify_wq u;
	uint32_t cur, next;
	struct emu_wq *wq;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (!req.attr_mask || req.attr_mask & ~known)
		return EINVAL;
	wq = emu_object_get(c->ctx, EMU_WQ, req.wq_handle);
	if (!wq)
		return EINVAL;
	err = cmd_uhw_request(c, &u, sizeof(u), sizeof(u));
	if (err)
		return err;
	if (u.comp_mask || u.reserved || req.attr_mask & IBV_WQ_ATTR_FLAGS)
		return EOPNOTSUPP;
	cur = req.attr_mask & IBV_WQ_ATTR_CURR_STATE ? req.curr_wq_state : wq->state;
	next = req.attr_mask & IBV_WQ_ATTR_STATE ? req.wq_state : cur;
	if (cur > IBV_WQS_ERR || next > IBV_WQS_ERR || cur != wq->state)
		return EINVAL;
	if (cur == IBV_WQS_ERR && next == IBV_WQS_RDY)
		return EINVAL;
	wq->state = (uint8_t)next;
	return 0;
}

void emu_wq_retire(struct emu_wq *wq)
{
	umem_release(wq->pinned);
	if (wq->pd)
		wq->pd->o.usecnt--;
	if (wq->cq)
		wq->cq->o.usecnt--;
}

static int destroy_wq(struct emu_cmd *c)
{
	struct ib_uverbs_ex_destroy_wq_resp resp = { .response_length = cmd_response_length(c, sizeof(resp)) };
	struct ib_uverbs_ex_destroy_wq req;
	struct emu_object *wq;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (req.comp_mask)
		return EOPNOTSUPP;
	err = emu_object_get_destroy(c->ctx, EMU_WQ, req.wq_handle, &wq);
	if (err)
		return err;
	emu_object_destroy(wq);
	return cmd_response(c, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- indirection tables */

/* ib_uverbs_ex_create_rwq_ind_table(): the handles follow the request, as many as the table has entries. */
static int read_table(struct emu_cmd *c, struct emu_rwq_ind_tbl *t)
{
	uint64_t at = c->in.addr + sizeof(struct ib_uverbs_ex_create_rwq_ind_table);

	if (c->in.len < sizeof(struct ib_uverbs_ex_create_rwq_ind_table) + (uint64_t)t->max * sizeof(uint32_t))
		return EINVAL;
	for (; t->n < t->max; t->n++, at += sizeof(uint32_t)) {
		uint32_t handle;
		struct emu_wq *wq;
		int err = user_read(&handle, at, sizeof(handle));

		if (err)
			return err;
		wq = emu_object_get(c->ctx, EMU_WQ, handle);
		if (!wq)
			return EINVAL;
		t->wqs[t->n] = wq;
		wq->o.usecnt++;
	}
	return 0;
}

static int create_table(struct emu_cmd *c)
{
	struct ib_uverbs_ex_create_rwq_ind_table_resp resp = { .response_length = cmd_response_length(c, sizeof(resp)) };
	struct mlx5_ib_create_rwq_ind_tbl_resp uhw = { .response_length = sizeof(uhw) };
	struct ib_uverbs_ex_create_rwq_ind_table req;
	struct emu_rwq_ind_tbl *t;
	int err = c->in.len < sizeof(req) ? EINVAL : user_read(&req, c->in.addr, sizeof(req));

	if (err)
		return err;
	if (req.comp_mask)
		return EOPNOTSUPP;
	if (req.log_ind_tbl_size > IB_USER_VERBS_MAX_LOG_IND_TBL_SIZE || req.log_ind_tbl_size > EMU_LOG_MAX_RQT_SIZE)
		return EINVAL;
	t = emu_object_alloc(c->ctx, EMU_RWQ_IND_TBL, sizeof(*t));
	if (!t)
		return ENOMEM;
	t->max = 1u << req.log_ind_tbl_size;
	t->rqtn = FIRST_RQTN + ++c->ctx->dev->next_rqtn;
	t->wqs = calloc(t->max, sizeof(*t->wqs));
	err = t->wqs ? read_table(c, t) : ENOMEM;
	if (!err)
		err = emu_object_publish(&t->o);
	if (!err)
		err = cmd_uhw_response(c, &uhw, sizeof(uhw));
	if (!err) {
		resp.ind_tbl_handle = t->o.handle;
		resp.ind_tbl_num = t->rqtn;
		err = cmd_response(c, &resp, sizeof(resp));
	}
	if (err)
		emu_object_destroy(&t->o);
	return err;
}

void emu_rwq_ind_tbl_retire(struct emu_rwq_ind_tbl *t)
{
	for (uint32_t i = 0; i < t->n; i++)
		t->wqs[i]->o.usecnt--;
	free(t->wqs);
}

static int destroy_table(struct emu_cmd *c)
{
	struct ib_uverbs_ex_destroy_rwq_ind_table req;
	struct emu_object *t;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (req.comp_mask)
		return EOPNOTSUPP;
	err = emu_object_get_destroy(c->ctx, EMU_RWQ_IND_TBL, req.ind_tbl_handle, &t);
	if (!err)
		emu_object_destroy(t);
	return err;
}

/* ---------------------------------------------------------------- tables */

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_EX_CMD_CREATE_WQ, true, true, true, offsetof(struct ib_uverbs_ex_create_wq, max_sge) + 4,
	  offsetof(struct ib_uverbs_ex_create_wq_resp, wqn) + 4, create_wq, "EX_CREATE_WQ" },
	{ IB_USER_VERBS_EX_CMD_MODIFY_WQ, true, false, true, offsetof(struct ib_uverbs_ex_modify_wq, curr_wq_state) + 4, 0,
	  modify_wq, "EX_MODIFY_WQ" },
	{ IB_USER_VERBS_EX_CMD_DESTROY_WQ, true, true, false, sizeof(struct ib_uverbs_ex_destroy_wq),
	  offsetof(struct ib_uverbs_ex_destroy_wq_resp, reserved), destroy_wq, "EX_DESTROY_WQ" },
	{ IB_USER_VERBS_EX_CMD_CREATE_RWQ_IND_TBL, true, true, true, sizeof(struct ib_uverbs_ex_create_rwq_ind_table),
	  sizeof(struct ib_uverbs_ex_create_rwq_ind_table_resp), create_table, "EX_CREATE_RWQ_IND_TBL" },
	{ IB_USER_VERBS_EX_CMD_DESTROY_RWQ_IND_TBL, true, false, false, sizeof(struct ib_uverbs_ex_destroy_rwq_ind_table), 0,
	  destroy_table, "EX_DESTROY_RWQ_IND_TBL" },
};

const struct emu_methods emu_wq_methods = { write_methods, ARRAY_LEN(write_methods), NULL, 0 };

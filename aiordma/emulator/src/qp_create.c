/* SPDX-License-Identifier: MIT
 * Making queue pairs: of the usual kinds, of dynamically connected transport, and of extended reliable connections.
 *
 * create_qp() in core/uverbs_cmd.c checks what each kind is made of, mlx5_ib_create_qp() in mlx5/qp.c the rest.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "control.h"

#define SEND_BASIC_BLOCK_SHIFT 6 /* a send queue is counted in blocks of 64 bytes */
#define UIDX_MASK 0xffffffu	  /* MLX5_USER_ASSIGNED_UIDX_MASK, mlx5/mlx5_ib.h */
#define UIDX_DEFAULT 0xffffffu	  /* MLX5_IB_DEFAULT_UIDX */

#define FLAGS_DC (MLX5_QP_FLAG_TYPE_DCT | MLX5_QP_FLAG_TYPE_DCI)

/* ---------------------------------------------------------------- checks */

static int check_type(const struct emu_limits *l, uint32_t type)
{
	bool has;

	switch (type) {
	case IBV_QPT_RC:
	case IBV_QPT_UC:
	case IBV_QPT_UD:
		return 0;
	case IBV_QPT_DRIVER:
		has = l->dc;
		break;
	case IBV_QPT_XRC_SEND:
	case IBV_QPT_XRC_RECV:
		has = l->xrc;
		break;
	case IBV_QPT_RAW_PACKET:
		has = false;
		break;
	default:
		return EINVAL;
	}
	if (!has)
		emu_log(EMU_INFO, "the device has no queue pairs of type %u", type);
	return has ? 0 : EOPNOTSUPP;
}

/* What a queue pair of each kind belongs to. */
static bool has_parents(const struct emu_qp_request *r)
{
	switch (r->type) {
	case IBV_QPT_XRC_RECV:
		return r->xrcd;
	case IBV_QPT_XRC_SEND:
		return r->pd && r->scq;
	default:
		return r->pd && r->scq && r->rcq && !(r->srq && r->srq->xrc);
	}
}

/* create_qp() in core/uverbs_cmd.c knows these; of those the device has only the first, and no multicast that it would
 * have to keep from looping back. */
static int check_create_flags(const struct emu_qp_request *r)
{
	const uint32_t has = r->type == IBV_QPT_UD ? IBV_QP_CREATE_BLOCK_SELF_MCAST_LB : 0;
	const uint32_t known = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB | IBV_QP_CREATE_SCATTER_FCS |
			       IBV_QP_CREATE_CVLAN_STRIPPING | IBV_QP_CREATE_SOURCE_QPN |
			       IBV_QP_CREATE_PCI_WRITE_END_PADDING;

	if (r->create_flags & ~known)
		return EINVAL;
	return r->create_flags & ~has ? EOPNOTSUPP : 0;
}

static int check_limits(const struct emu_limits *l, const struct ib_uverbs_qp_cap *cap)
{
	uint32_t wqe;

	if (cap->max_send_wr > l->max_qp_wr || cap->max_recv_wr > l->max_qp_wr)
		return EINVAL;
	/* A receive descriptor of 512 bytes holds two entries more than max_sge, which is the lesser of both queues'. */
	if (cap->max_send_sge > l->max_sge || cap->max_recv_sge > l->max_sge + 2)
		return EINVAL;
	/* The library doesn't say what was asked for, but what fits into the WQEs it will use: their size is rounded up to
	 * 64 bytes, and may be that of the scatter/gather list: mlx5_calc_sq_size() in providers/mlx5/verbs.c. */
	wqe = (l->max_inline + 4 + 15) / 16 * 16;
	wqe = wqe > cap->max_send_sge * 16 ? wqe : cap->max_send_sge * 16;
	return cap->max_inline_data > wqe + 63 ? EINVAL : 0;
}

/* process_vendor_flags() in mlx5/qp.c refuses what the device can't do. */
static int check_provider_part(const struct emu_limits *l, const struct emu_qp_request *r,
			       const struct mlx5_ib_create_qp *u)
{
	/* Scattering to the CQE is the device's choice and it never takes it; packet credits change nothing visible. */
	uint32_t known = MLX5_QP_FLAG_BFREG_INDEX | MLX5_QP_FLAG_UAR_PAGE_INDEX | MLX5_QP_FLAG_SCATTER_CQE |
			 MLX5_QP_FLAG_ALLOW_SCATTER_CQE;

	if (r->type == IBV_QPT_DRIVER)
		known |= FLAGS_DC;
	if (u->flags & MLX5_QP_FLAG_TYPE_DCI && l->log_max_dci_streams)
		known |= MLX5_QP_FLAG_DCI_STREAM;
	if (u->flags & ~known) {
		emu_log(EMU_INFO, "queue pair flags 0x%x are not implemented", u->flags & ~known);
		return u->flags & ~(MLX5_QP_FLAG_DCI_STREAM * 2u - 1) ? EINVAL : EOPNOTSUPP;
	}
	if (u->uidx & ~UIDX_MASK || u->db_addr & 7)
		return EINVAL;
	if (r->type != IBV_QPT_DRIVER)
		return 0;
	/* check_qp_type(): one of both. A target receives from an SRQ: create_dct(). */
	if ((u->flags & FLAGS_DC) == FLAGS_DC || !(u->flags & FLAGS_DC))
		return EINVAL;
	if (u->flags & MLX5_QP_FLAG_TYPE_DCT)
		return r->srq ? 0 : EINVAL;
	if (u->flags & MLX5_QP_FLAG_DCI_STREAM && (u->dci_streams.log_num_concurent > l->log_max_dci_streams ||
						   u->dci_streams.log_num_errored > l->log_max_dci_streams))
		return EINVAL;
	return 0;
}

/* ---------------------------------------------------------------- queues */

static bool has_receive_queue(const struct emu_qp *qp)
{
	return !qp->srq && qp->max_recv_wr && qp->type != IBV_QPT_DRIVER && qp->type != IBV_QPT_XRC_SEND;
}

/* set_rq_size() and set_user_buf_size() in mlx5/qp.c: the receive queue comes first in the buffer. */
static int set_geometry(struct emu_qp *qp, const struct mlx5_ib_create_qp *u, uint64_t *bytes)
{
	uint32_t max_wr = qp->dev->limits.max_qp_wr;
	uint64_t rq_bytes;

	if (has_receive_queue(qp)) {
		if (u->rq_wqe_shift < 4 || u->rq_wqe_shift > 9 || u->rq_wqe_count > max_wr)
			return EINVAL;
		if (u->rq_wqe_count & (u->rq_wqe_count - 1))
			return EINVAL;
		qp->rq_nwqe = u->rq_wqe_count;
		qp->rq_shift = u->rq_wqe_shift;
	}
	if (u->sq_wqe_count & (u->sq_wqe_count - 1))
		return EINVAL;
	if (u->sq_wqe_count > max_wr)
		return EINVAL;
	qp->sq_nbb = u->sq_wqe_count;
	rq_bytes = (uint64_t)qp->rq_nwqe << qp->rq_shift;
	*bytes = rq_bytes + ((uint64_t)qp->sq_nbb << SEND_BASIC_BLOCK_SHIFT);
	if (*bytes && queue_misaligned(u->buf_addr))
		return EINVAL;
	/* Any number, until umem_get() has looked. */
	qp->buf = (uint8_t *)(uintptr_t)u->buf_addr;
	qp->rq = qp->buf;
	qp->sq = (uint8_t *)(uintptr_t)(u->buf_addr + rq_bytes);
	qp->db = (uint32_t *)(uintptr_t)u->db_addr;
	return 0;
}

static int set_queues(struct emu_qp *qp, const struct mlx5_ib_create_qp *u)
{
	uint64_t bytes, db_pages;
	int err;

	if (qp->dct || qp->type == IBV_QPT_XRC_RECV)
		return 0; /* they only receive, and from SRQs */
	err = set_geometry(qp, u, &bytes);
	if (!err && bytes)
		err = umem_get((uintptr_t)qp->buf, bytes, true, &qp->pinned);
	if (!err)
		err = umem_get((uintptr_t)qp->db, 8, true, &db_pages);
	if (!err)
		umem_release(db_pages);
	return err;
}

/* ---------------------------------------------------------------- creation */

static void hold(struct emu_object *o)
{
	if (o)
		o->usecnt++;
}

static void hold_parents(struct emu_qp *qp)
{
	hold(qp->pd ? &qp->pd->o : NULL);
	hold(qp->scq ? &qp->scq->o : NULL);
	hold(qp->rcq ? &qp->rcq->o : NULL);
	hold(qp->srq ? &qp->srq->o : NULL);
	hold(qp->xrcd ? &qp->xrcd->o : NULL);
}

static void fill(struct emu_qp *qp, const struct emu_qp_request *r, const struct mlx5_ib_create_qp *u)
{
	bool target = r->type == IBV_QPT_XRC_RECV, sends_only = r->type == IBV_QPT_XRC_SEND;

	qp->xrcd = target ? r->xrcd : NULL;
	qp->pd = target ? NULL : r->pd;
	qp->scq = target ? NULL : r->scq;
	qp->rcq = target || sends_only ? NULL : r->rcq;
	qp->srq = target || sends_only ? NULL : r->srq;
	qp->type = (uint8_t)r->type;
	qp->state = IBV_QPS_RESET;
	qp->uidx = u->uidx;
	qp->uar_page = u->flags & MLX5_QP_FLAG_UAR_PAGE_INDEX ? u->bfreg_index : 0;
	qp->dct = u->flags & MLX5_QP_FLAG_TYPE_DCT;
	qp->dci = u->flags & MLX5_QP_FLAG_TYPE_DCI;
	if (qp->dct)
		qp->dc_key = u->access_key;
	if (u->flags & MLX5_QP_FLAG_DCI_STREAM) {
		qp->log_num_concurrent = u->dci_streams.log_num_concurent;
		qp->log_num_errored = u->dci_streams.log_num_errored;
	}
	qp->sq_sig_all = r->sig_all;
	qp->user_handle = r->user_handle;
	qp->max_send_wr = r->cap.max_send_wr;
	qp->max_recv_wr = sends_only ? 0 : r->cap.max_recv_wr;
	qp->max_send_sge = r->cap.max_send_sge;
	qp->max_recv_sge = sends_only ? 0 : r->cap.max_recv_sge;
	qp->max_inline = r->cap.max_inline_data;
}

static int read_provider_part(struct emu_cmd *c, const struct emu_qp_request *r, struct mlx5_ib_create_qp *u)
{
	int err;

	/* The kernel makes an XRC target itself, without a look at the provider's part. */
	if (r->type == IBV_QPT_XRC_RECV) {
		*u = (struct mlx5_ib_create_qp){ .uidx = UIDX_DEFAULT };
		return 0;
	}
	err = cmd_uhw_request(c, u, offsetof(struct mlx5_ib_create_qp, uidx) + sizeof(u->uidx), sizeof(*u));
	return err ? err : check_provider_part(&c->ctx->dev->limits, r, u);
}

int emu_qp_create(struct emu_cmd *c, const struct emu_qp_request *r, struct emu_qp **out)
{
	struct emu_device *d = c->ctx->dev;
	struct mlx5_ib_create_qp_resp resp = { 0 };
	struct mlx5_ib_create_qp u;
	struct emu_qp *qp;
	int err = check_type(&d->limits, r->type);

	if (!err && !has_parents(r))
		err = EINVAL;
	if (!err)
		err = check_create_flags(r);
	if (!err)
		err = check_limits(&d->limits, &r->cap);
	if (!err)
		err = read_provider_part(c, r, &u);
	if (!err)
		err = emu_limit(c->ctx, EMU_QP, d->limits.max_qp);
	if (err)
		return err;
	emu_uar_adopt(c->ctx);
	qp = emu_object_alloc(c->ctx, EMU_QP, sizeof(*qp));
	if (!qp)
		return ENOMEM;
	qp->dev = d;
	fill(qp, r, &u);
	err = set_queues(qp, &u);
	if (!err)
		err = emu_qp_insert(d, qp);
	if (err) {
		umem_release(qp->pinned);
		emu_object_free(&qp->o);
		return err;
	}
	hold_parents(qp);
	/* With pages by index the library takes the doorbell register from here. The first is the one that any number of
	 * queue pairs may share without a lock, because it's used for plain 8-byte doorbells only. */
	resp.bfreg_index = 0;
	err = emu_object_publish(&qp->o);
	if (!err)
		err = cmd_uhw_response(c, &resp, sizeof(resp));
	if (err)
		emu_object_destroy(&qp->o);
	else
		*out = qp;
	return err;
}

/* The firmware makes a DCT only when it becomes ready to receive, and then tells its number: mlx5_ib_modify_dct(). */
uint32_t emu_qp_visible_number(const struct emu_qp *qp)
{
	return qp->dct && qp->state != IBV_QPS_RTR ? 0 : qp->qpn;
}

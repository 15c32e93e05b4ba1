/* SPDX-License-Identifier: MIT
 * Receive queues: taking WQEs from a QP's own and from shared ones.
 *
 * A receive WQE is a list of data segments that ends with the queue's stride or with one whose key is
 * MLX5_INVALID_LKEY: mlx5_post_recv() in qp.c. In a shared queue a "next" segment comes before them, and WQEs form a
 * list in which each names the next one: mlx5_post_srq_recv() in srq.c. */
#include <errno.h>
#include <string.h>

#include "nic.h"

#define RECV_WQE_MAX (NIC_RECV_SEGS * sizeof(struct mlx5_wqe_data_seg))

#define SRQN_FIRST 0x400u
#define SRQN_RANGE (1u << 20)

void recv_parse(struct nic_recv *r, const uint8_t *wqe, uint32_t size)
{
	struct mlx5_wqe_data_seg d;

	r->nseg = 0;
	r->capacity = 0;
	for (uint32_t at = 0; at + sizeof(d) <= size && r->nseg < NIC_RECV_SEGS; at += sizeof(d)) {
		struct nic_seg *s = &r->seg[r->nseg];

		memcpy(&d, wqe + at, sizeof(d));
		if (d.lkey == htobe32(MLX5_INVALID_LKEY))
			break;
		s->len = be32toh(d.byte_count);
		s->key = be32toh(d.lkey);
		s->addr = be64toh(d.addr);
		s->inl = false;
		r->capacity += s->len;
		r->nseg += s->len != 0;
	}
}

bool rq_pending(const struct emu_qp *qp)
{
	return !qp->srq && qp->rq_nwqe && qp->db && qp->rq_ci != (uint16_t)load_be32(&qp->db[0]);
}

bool rq_take(struct emu_qp *qp, struct emu_srq *srq, struct nic_recv *r)
{
	uint32_t stride;

	if (srq)
		return srq_take(srq, r);
	if (!rq_pending(qp))
		return false;
	stride = 1u << qp->rq_shift;
	r->srq = NULL;
	r->pdn = qp->pd->pdn;
	r->counter = qp->rq_ci;
	recv_parse(r, qp->rq + ((size_t)(qp->rq_ci & (qp->rq_nwqe - 1)) << qp->rq_shift),
		   stride < RECV_WQE_MAX ? stride : RECV_WQE_MAX);
	qp->rq_ci++;
	return true;
}

/* In ERR every posted receive completes as flushed, in order; so do those posted later: IBTA 10.3.1.5. */
uint32_t rq_flush(struct emu_qp *qp, uint32_t budget)
{
	struct nic_cqe c = {
		.op = MLX5_CQE_RESP_ERR,
		.syndrome = MLX5_CQE_SYNDROME_WR_FLUSH_ERR,
		.uidx = qp->uidx,
		.qpn = qp->qpn,
	};
	uint32_t done = 0;

	/* First those whose message will never be whole. */
	for (struct nic_rx *rx = nic(qp)->rx; rx; rx = rx->next) {
		rx->busy = false;
		if (!rx->recv.taken)
			continue;
		rx->recv.taken = false;
		c.counter = rx->recv.counter;
		cq_write(qp->rcq, &c);
		done++;
	}
	while (done < budget && rq_pending(qp)) {
		c.counter = qp->rq_ci++;
		cq_write(qp->rcq, &c);
		done++;
	}
	return done;
}

/* ---------------------------------------------------------------- shared */

static uint16_t srq_left(const struct emu_srq *srq)
{
	return (uint16_t)(load_be32(&srq->db[0]) - srq->taken);
}

/* One event each time a limit is set: IBTA 10.2.9.1, man ibv_modify_srq. */
static void check_limit(struct emu_srq *srq)
{
	if (!srq->limit || srq_left(srq) >= srq->limit)
		return;
	srq->limit = 0;
	emu_async_event(srq->o.ctx, IBV_EVENT_SRQ_LIMIT_REACHED, srq->user_handle, &srq->async_events);
}

static void srq_broken(struct emu_srq *srq)
{
	if (!srq->failed)
		emu_async_event(srq->o.ctx, IBV_EVENT_SRQ_ERR, srq->user_handle, &srq->async_events);
	srq->failed = true;
}

bool srq_take(struct emu_srq *srq, struct nic_recv *r)
{
	struct mlx5_wqe_srq_next_seg next;
	const uint8_t *wqe;
	uint32_t size;

	if (!srq_left(srq) || srq->failed)
		return false;
	if (srq->head >= srq->nwqe) {
		srq_broken(srq); /* the list leads out of the buffer */
		return false;
	}
	wqe = srq->buf + ((size_t)srq->head << srq->wqe_shift);
	size = (1u << srq->wqe_shift) - sizeof(next);
	memcpy(&next, wqe, sizeof(next));
	r->srq = srq;
	r->pdn = srq->pd->pdn;
	r->counter = (uint16_t)srq->head;
	recv_parse(r, wqe + sizeof(next), size < RECV_WQE_MAX ? size : RECV_WQE_MAX);
	srq->head = be16toh(next.next_wqe_index);
	srq->taken++;
	check_limit(srq);
	return true;
}

int emu_srq_insert(struct emu_device *dev, struct emu_srq *srq)
{
	uint32_t srqn = table_insert(&dev->srqs, &dev->srqs_size, &dev->next_srqn, SRQN_FIRST, SRQN_RANGE, srq);

	if (!srqn)
		return ENOMEM;
	srq->dev = dev;
	srq->srqn = srqn;
	srq->head = 0; /* srq.c starts its list at index 0 */
	srq->taken = 0;
	return 0;
}

void emu_srq_remove(struct emu_srq *srq)
{
	if (!srq->dev)
		return;
	table_remove(&srq->dev->srqs, srq->dev->srqs_size, srq->srqn, srq);
	if (srq->o.ctx->async)
		srq->async_events -= channel_purge(srq->o.ctx->async, srq->user_handle);
}

void emu_srq_set_limit(struct emu_srq *srq, uint32_t limit)
{
	srq->limit = limit;
	/* IBTA 10.2.9.1: at once, if there are fewer already. */
	check_limit(srq);
}

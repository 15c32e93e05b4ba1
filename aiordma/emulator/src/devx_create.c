/* SPDX-License-Identifier: MIT
 * DEVX: objects made by firmware commands whose queues lie in UMEMs: protection domains, completion queues, queue pairs.
 * They work as those that verbs make do, and differ in who may name them: a DEVX object stands before each.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "devx.h"

#define BASIC_BLOCK_SHIFT 6
#define DOORBELL_RECORD 8 /* bytes */

static struct devx_object *object_alloc(struct devx_call *c, struct emu_object *inner, uint32_t number)
{
	struct devx_object *d = emu_object_alloc(c->ctx, EMU_DEVX_OBJ, sizeof(*d));

	if (!d)
		return NULL;
	d->opcode = c->command->opcode;
	d->id = number;
	d->inner = inner;
	c->created = &d->o;
	prm_set(c->out, CMD_NUMBER, number);
	return d;
}

/* Where [offset, offset + len) of a UMEM is, aligned as the device needs it; NULL: refused, *status says how. */
static uint8_t *umem_range(struct devx_call *c, uint64_t id, uint64_t offset, uint64_t len, unsigned align, uint8_t *status,
			   struct emu_object **held)
{
	struct emu_umem *u = devx_umem(c->ctx, (uint32_t)id);

	if (!u) {
		*status = devx_refuse(c, STAT_BAD_RES, SYN_NO_SUCH_UMEM, "no such UMEM");
		return NULL;
	}
	if (!u->writable || offset > u->len || len > u->len - offset || (u->addr + offset) % align) {
		*status = devx_refuse(c, STAT_BAD_PARAM, SYN_UMEM_TOO_SMALL, "the UMEM is too small, not aligned or read-only");
		return NULL;
	}
	*held = &u->o;
	return (uint8_t *)(uintptr_t)(u->addr + offset);
}

static void hold_umems(struct devx_object *d, struct emu_object *a, struct emu_object *b)
{
	d->umems[0] = a;
	d->umems[1] = b;
	a->usecnt++;
	b->usecnt++;
}

/* ---------------------------------------------------------------- protection domains */

static uint8_t alloc_pd(struct devx_call *c)
{
	struct emu_pd *pd = emu_object_alloc(c->ctx, EMU_PD, sizeof(*pd));

	if (!pd)
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	pd->pdn = ++c->ctx->dev->next_pdn;
	if (!object_alloc(c, &pd->o, pd->pdn)) {
		emu_object_free(&pd->o);
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	}
	return STAT_OK;
}

/* ---------------------------------------------------------------- completion queues */

static uint8_t fill_cq(struct devx_call *c, struct emu_cq *cq, struct emu_object **buf, struct emu_object **dbr)
{
	const uint8_t *cqc = c->in + CQ_CQC_AT;
	uint32_t eqn = (uint32_t)prm_get(cqc, CQC_C_EQN);
	uint8_t status = STAT_OK;

	if (prm_get(cqc, CQC_CQE_SZ) > 1 || prm_get(cqc, CQC_CC) || prm_get(cqc, CQC_OI) || prm_get(cqc, CQC_CQE_COMP_EN))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, "a kind of CQ that isn't implemented");
	if (eqn < DEVX_FIRST_EQN || eqn - DEVX_FIRST_EQN >= c->ctx->dev->limits.comp_vectors)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, "no such event queue");
	cq->ncqe = 1u << prm_get(cqc, CQC_LOG_CQ_SIZE);
	if (cq->ncqe - 1 > c->ctx->dev->limits.max_cqe)
		return devx_refuse(c, STAT_LIM, SYN_LIMIT, "larger than any CQ of the device");
	cq->cqe_size = prm_get(cqc, CQC_CQE_SZ) ? 128 : 64;
	cq->comp_vector = eqn - DEVX_FIRST_EQN;
	cq->uar_page = (uint32_t)prm_get(cqc, CQC_UAR_PAGE);
	cq->moderate_period = (uint16_t)prm_get(cqc, CQC_CQ_PERIOD);
	cq->moderate_count = (uint16_t)prm_get(cqc, CQC_CQ_MAX_COUNT);
	cq->buf = umem_range(c, prm_get(c->in, CREATE_CQ_IN_UMEM_ID), prm_get(c->in, CREATE_CQ_IN_UMEM_OFFSET),
			     (uint64_t)cq->ncqe * cq->cqe_size, 64, &status, buf);
	if (!status)
		cq->db = (uint32_t *)umem_range(c, prm_get(cqc, CQC_DBR_UMEM_ID), prm_get(cqc, CQC_DBR_ADDR),
						DOORBELL_RECORD, DOORBELL_RECORD, &status, dbr);
	return status;
}

static uint8_t create_cq(struct devx_call *c)
{
	struct emu_cq *cq = emu_object_alloc(c->ctx, EMU_CQ, sizeof(*cq));
	struct emu_object *buf, *dbr;
	struct devx_object *d;
	uint8_t status;

	if (!cq)
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	emu_uar_adopt(c->ctx);
	cq->dev = c->ctx->dev;
	status = fill_cq(c, cq, &buf, &dbr);
	if (!status && emu_cq_insert(c->ctx->dev, cq))
		status = devx_refuse(c, STAT_NO_RES, SYN_LIMIT, "no more CQs");
	if (status) {
		emu_object_free(&cq->o);
		return status;
	}
	d = object_alloc(c, &cq->o, cq->cqn);
	if (!d) {
		emu_object_destroy(&cq->o);
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	}
	hold_umems(d, buf, dbr);
	return STAT_OK;
}

/* ---------------------------------------------------------------- queue pairs */

static struct emu_cq *cq_of(struct devx_call *c, struct prm_field f)
{
	uint32_t cqn = (uint32_t)prm_get(c->in + QP_IN_QPC_AT, f);
	const struct emu_device *d = c->ctx->dev;
	struct emu_cq *cq = cqn < d->cqs_size ? d->cqs[cqn] : NULL;

	return cq && cq->o.ctx == c->ctx ? cq : NULL;
}

static struct emu_srq *srq_of(struct devx_call *c)
{
	uint32_t srqn = (uint32_t)prm_get(c->in + QP_IN_QPC_AT, QPC_SRQN);
	const struct emu_device *d = c->ctx->dev;
	struct emu_srq *srq = srqn < d->srqs_size ? d->srqs[srqn] : NULL;

	return srq && srq->o.ctx == c->ctx ? srq : NULL;
}

static uint8_t fill_parents(struct devx_call *c, struct emu_qp *qp)
{
	const uint8_t *qpc = c->in + QP_IN_QPC_AT;

	qp->pd = devx_pd(c->ctx, (uint32_t)prm_get(qpc, QPC_PD));
	qp->scq = cq_of(c, QPC_CQN_SND);
	qp->rcq = cq_of(c, QPC_CQN_RCV);
	if (!qp->pd)
		return devx_refuse(c, STAT_BAD_RES, SYN_NO_SUCH_PD, "no such protection domain");
	if (!qp->scq || !qp->rcq)
		return devx_refuse(c, STAT_BAD_RES, SYN_NO_SUCH_CQ, "no such CQ");
	if (prm_get(qpc, QPC_RQ_TYPE) != QPC_RQ_SRQ)
		return STAT_OK;
	qp->srq = srq_of(c);
	return qp->srq ? STAT_OK : devx_refuse(c, STAT_BAD_RES, SYN_NO_SUCH_RQ, "no such SRQ");
}

static uint8_t fill_type(struct devx_call *c, struct emu_qp *qp)
{
	const uint8_t *qpc = c->in + QP_IN_QPC_AT;

	switch (prm_get(qpc, QPC_ST)) {
	case QPC_ST_RC:
		qp->type = IBV_QPT_RC;
		break;
	case QPC_ST_UC:
		qp->type = IBV_QPT_UC;
		break;
	case QPC_ST_UD:
		qp->type = IBV_QPT_UD;
		break;
	default:
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, "only RC, UC and UD queue pairs");
	}
	if (prm_get(qpc, QPC_SEND_DBR_MODE))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, "send queues have doorbell records here");
	return STAT_OK;
}

/* The receive queue comes first, as in the queue pairs of libmlx5. */
static uint8_t fill_queues(struct devx_call *c, struct emu_qp *qp, struct emu_object **buf, struct emu_object **dbr)
{
	const uint8_t *qpc = c->in + QP_IN_QPC_AT;
	uint8_t status = STAT_OK;
	uint64_t rq_bytes;

	if (prm_get(qpc, QPC_RQ_TYPE) == QPC_RQ_OWN) {
		qp->rq_nwqe = 1u << prm_get(qpc, QPC_LOG_RQ_SIZE);
		qp->rq_shift = 4 + (uint32_t)prm_get(qpc, QPC_LOG_RQ_STRIDE);
	}
	if (!prm_get(qpc, QPC_NO_SQ))
		qp->sq_nbb = 1u << prm_get(qpc, QPC_LOG_SQ_SIZE);
	if (qp->rq_nwqe > qp->dev->limits.max_qp_wr || qp->sq_nbb > qp->dev->limits.max_qp_wr)
		return devx_refuse(c, STAT_LIM, SYN_LIMIT, "larger than any queue of the device");
	rq_bytes = (uint64_t)qp->rq_nwqe << qp->rq_shift;
	qp->buf = umem_range(c, prm_get(c->in, CREATE_QP_IN_UMEM_ID), prm_get(c->in, CREATE_QP_IN_UMEM_OFFSET),
			     rq_bytes + ((uint64_t)qp->sq_nbb << BASIC_BLOCK_SHIFT), 64, &status, buf);
	if (status)
		return status;
	qp->rq = qp->buf;
	qp->sq = qp->buf + rq_bytes;
	qp->db = (uint32_t *)umem_range(c, prm_get(qpc, QPC_DBR_UMEM_ID), prm_get(qpc, QPC_DBR_ADDR), DOORBELL_RECORD,
					DOORBELL_RECORD, &status, dbr);
	return status;
}

static void hold_parents(struct emu_qp *qp)
{
	qp->pd->o.usecnt++;
	qp->scq->o.usecnt++;
	qp->rcq->o.usecnt++;
	if (qp->srq)
		qp->srq->o.usecnt++;
}

static uint8_t create_qp(struct devx_call *c)
{
	struct emu_qp *qp = emu_object_alloc(c->ctx, EMU_QP, sizeof(*qp));
	const uint8_t *qpc = c->in + QP_IN_QPC_AT;
	struct emu_object *buf, *dbr;
	struct devx_object *d;
	uint8_t status;

	if (!qp)
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	emu_uar_adopt(c->ctx);
	qp->dev = c->ctx->dev;
	qp->state = IBV_QPS_RESET;
	qp->uidx = (uint32_t)prm_get(qpc, QPC_USER_INDEX);
	qp->uar_page = (uint32_t)prm_get(qpc, QPC_UAR_PAGE);
	status = fill_type(c, qp);
	if (!status)
		status = fill_parents(c, qp);
	if (!status)
		status = fill_queues(c, qp, &buf, &dbr);
	if (!status && emu_qp_insert(c->ctx->dev, qp))
		status = devx_refuse(c, STAT_NO_RES, SYN_LIMIT, "no more queue pairs");
	if (status) {
		emu_object_free(&qp->o);
		return status;
	}
	hold_parents(qp);
	d = object_alloc(c, &qp->o, qp->qpn);
	if (!d) {
		emu_object_destroy(&qp->o);
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	}
	hold_umems(d, buf, dbr);
	return STAT_OK;
}

static const struct devx_command commands[] = {
	{ OP_ALLOC_PD, DEVX_CREATE, CMD_HEADER, CMD_HEADER, 0, alloc_pd, "ALLOC_PD" },
	{ OP_CREATE_CQ, DEVX_CREATE, 272, CMD_HEADER, 0, create_cq, "CREATE_CQ" },
	{ OP_CREATE_QP, DEVX_CREATE, 272, CMD_HEADER, 0, create_qp, "CREATE_QP" },
};

const struct devx_commands devx_create_commands = { commands, ARRAY_LEN(commands) };

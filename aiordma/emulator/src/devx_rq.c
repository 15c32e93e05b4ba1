/* SPDX-License-Identifier: MIT
 * DEVX: receive queues. What is behind a verbs object is the driver's choice (mlx5/srq_cmd.c, mlx5/qp.c): a basic SRQ is a
 * receive memory pool (RMP), an XRC one an XRC SRQ, a WQ an RQ, an indirection table of them an RQT.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "devx.h"
#include "wq.h"

/* ---------------------------------------------------------------- shared receive queues */

static uint8_t set_limit(struct devx_call *c, uint32_t limit)
{
	struct emu_srq *srq = devx_target(c);

	if (limit >= srq->nwqe)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, "the limit is beyond the queue");
	emu_srq_set_limit(srq, limit);
	return STAT_OK;
}

static uint8_t query_rmp(struct devx_call *c)
{
	const struct emu_srq *srq = devx_target(c);
	uint8_t *rmpc = c->out + CTX_AT, *wq = rmpc + RQC_WQ_AT;

	prm_set(rmpc, RQC_STATE, srq->failed ? RQC_ERR : RQC_RDY);
	prm_set(wq, WQ_TYPE, WQ_LINKED_LIST);
	prm_set(wq, WQ_LWM, srq->limit);
	prm_set(wq, WQ_PD, srq->pd->pdn);
	prm_set(wq, WQ_DBR_ADDR, (uintptr_t)srq->db);
	prm_set(wq, WQ_HW_COUNTER, srq->taken);
	prm_set(wq, WQ_SW_COUNTER, load_be32(&srq->db[0]) & 0xffff);
	prm_set(wq, WQ_LOG_STRIDE, srq->wqe_shift);
	prm_set(wq, WQ_LOG_SIZE, devx_log2(srq->nwqe));
	return STAT_OK;
}

/* arm_rmp_cmd() */
static uint8_t modify_rmp(struct devx_call *c)
{
	const struct emu_srq *srq = devx_target(c);

	if (prm_get(c->in, MODIFY_STATE) != (srq->failed ? RQC_ERR : RQC_RDY))
		return devx_refuse(c, STAT_BAD_RES_STATE, SYN_RQ_STATE, "the pool is in another state");
	if (prm_get(c->in, MODIFY_BITMASK) != RMP_BITMASK_LWM)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_OPT_PARAM, "only the limit of a pool can be changed");
	return set_limit(c, (uint32_t)prm_get(c->in + CTX_AT + RQC_WQ_AT, WQ_LWM));
}

static uint8_t query_xrc_srq(struct devx_call *c)
{
	const struct emu_srq *srq = devx_target(c);
	uint8_t *x = c->out + XRC_SRQC_AT;

	prm_set(x, XRC_SRQC_STATE, srq->failed);
	prm_set(x, XRC_SRQC_LOG_SIZE, devx_log2(srq->nwqe));
	prm_set(x, XRC_SRQC_LOG_RQ_STRIDE, srq->wqe_shift - 4);
	prm_set(x, XRC_SRQC_CQN, srq->cq ? srq->cq->cqn : 0);
	prm_set(x, XRC_SRQC_USER_INDEX, srq->uidx);
	prm_set(x, XRC_SRQC_PD, srq->pd->pdn);
	prm_set(x, XRC_SRQC_LWM, srq->limit);
	prm_set(x, XRC_SRQC_WQE_CNT, (uint16_t)(load_be32(&srq->db[0]) - srq->taken));
	return STAT_OK;
}

static uint8_t arm_xrc_srq(struct devx_call *c)
{
	return set_limit(c, (uint32_t)prm_get(c->in, ARM_LWM));
}

/* ---------------------------------------------------------------- receive queues */

static uint8_t rqc_state(const struct emu_wq *wq)
{
	return wq->state == IBV_WQS_RESET ? RQC_RST : wq->state == IBV_WQS_RDY ? RQC_RDY : RQC_ERR;
}

static uint8_t query_rq(struct devx_call *c)
{
	const struct emu_wq *q = devx_target(c);
	uint8_t *rqc = c->out + CTX_AT, *wq = rqc + RQC_WQ_AT;

	prm_set(rqc, RQC_STATE, rqc_state(q));
	prm_set(rqc, RQC_VSD, 1);
	prm_set(rqc, RQC_FLUSH_IN_ERROR_EN, 1);
	prm_set(rqc, RQC_USER_INDEX, q->uidx);
	prm_set(rqc, RQC_CQN, q->cq->cqn);
	prm_set(wq, WQ_TYPE, WQ_CYCLIC);
	prm_set(wq, WQ_PD, q->pd->pdn);
	prm_set(wq, WQ_DBR_ADDR, (uintptr_t)q->db);
	prm_set(wq, WQ_SW_COUNTER, load_be32(&q->db[0]) & 0xffff);
	prm_set(wq, WQ_LOG_STRIDE, q->log_stride);
	prm_set(wq, WQ_LOG_SIZE, q->log_size);
	return STAT_OK;
}

static uint8_t modify_rq(struct devx_call *c)
{
	uint8_t next = (uint8_t)prm_get(c->in + CTX_AT, RQC_STATE);
	struct emu_wq *q = devx_target(c);

	if (prm_get(c->in, MODIFY_STATE) != rqc_state(q))
		return devx_refuse(c, STAT_BAD_RES_STATE, SYN_RQ_STATE, "the queue is in another state");
	if (prm_get(c->in, MODIFY_BITMASK))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_OPT_PARAM, "only the state of a queue can be changed");
	if (q->state == IBV_WQS_ERR && next == RQC_RDY)
		return devx_refuse(c, STAT_BAD_RES_STATE, SYN_RQ_STATE, "from the error state a queue goes to reset only");
	switch (next) {
	case RQC_RST:
		q->state = IBV_WQS_RESET;
		return STAT_OK;
	case RQC_RDY:
		q->state = IBV_WQS_RDY;
		return STAT_OK;
	case RQC_ERR:
		q->state = IBV_WQS_ERR;
		return STAT_OK;
	default:
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, "no such state");
	}
}

/* A limit's event is for queues that many take from; this one's has no place to go to. */
static uint8_t arm_rq(struct devx_call *c)
{
	return devx_refuse(c, STAT_BAD_PARAM, SYN_NOT_IMPLEMENTED, "the limit of an SRQ is set by MODIFY_RMP or ARM_XRC_SRQ");
}

/* ---------------------------------------------------------------- indirection tables */

static uint8_t query_rqt(struct devx_call *c)
{
	const struct emu_rwq_ind_tbl *t = devx_target(c);
	uint8_t *rqtc = c->out + CTX_AT, *entry = rqtc + RQTC_LIST_AT;

	if (c->outlen < CTX_AT + RQTC_LIST_AT + (uint64_t)t->n * 4)
		return devx_refuse(c, STAT_BAD_OUTP_LEN, SYN_OUTPUT_LENGTH, "no room for the table");
	prm_set(rqtc, RQTC_MAX_SIZE, t->max);
	prm_set(rqtc, RQTC_ACTUAL_SIZE, t->n);
	for (uint32_t i = 0; i < t->n; i++, entry += 4)
		prm_set(entry, RQ_NUM, t->wqs[i]->rqn);
	return STAT_OK;
}

static uint8_t modify_rqt(struct devx_call *c)
{
	const uint8_t *rqtc = c->in + CTX_AT, *entry = rqtc + RQTC_LIST_AT;
	struct emu_rwq_ind_tbl *t = devx_target(c);
	uint32_t n = (uint32_t)prm_get(rqtc, RQTC_ACTUAL_SIZE);

	if (prm_get(c->in, MODIFY_BITMASK) != RQT_BITMASK_LIST)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_OPT_PARAM, "only the list of a table can be changed");
	if (!n || n > t->max || n & (n - 1))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_RQT_SIZE, "a power of two, up to the size at creation");
	if (c->inlen < CTX_AT + RQTC_LIST_AT + (uint64_t)n * 4)
		return devx_refuse(c, STAT_BAD_INP_LEN, SYN_INPUT_LENGTH, "the table is missing");
	for (uint32_t i = 0; i < n; i++)
		if (!emu_wq_find(c->ctx, (uint32_t)prm_get(entry + 4 * i, RQ_NUM)))
			return devx_refuse(c, STAT_BAD_RES, SYN_NO_SUCH_RQ, "no such queue");
	for (uint32_t i = 0; i < t->n; i++)
		t->wqs[i]->o.usecnt--;
	t->n = n;
	for (uint32_t i = 0; i < n; i++) {
		t->wqs[i] = emu_wq_find(c->ctx, (uint32_t)prm_get(entry + 4 * i, RQ_NUM));
		t->wqs[i]->o.usecnt++;
	}
	return STAT_OK;
}

static const struct devx_command commands[] = {
	{ OP_QUERY_RMP, DEVX_QUERY, CMD_HEADER, SRQ_OUT_BYTES, OP_CREATE_RMP, query_rmp, "QUERY_RMP" },
	{ OP_MODIFY_RMP, DEVX_MODIFY, 272, CMD_HEADER, OP_CREATE_RMP, modify_rmp, "MODIFY_RMP" },
	{ OP_QUERY_XRC_SRQ, DEVX_QUERY, CMD_HEADER, SRQ_OUT_BYTES, OP_CREATE_XRC_SRQ, query_xrc_srq, "QUERY_XRC_SRQ" },
	{ OP_ARM_XRC_SRQ, DEVX_MODIFY, CMD_HEADER, CMD_HEADER, OP_CREATE_XRC_SRQ, arm_xrc_srq, "ARM_XRC_SRQ" },
	{ OP_ARM_RQ, DEVX_MODIFY, CMD_HEADER, CMD_HEADER, OP_CREATE_RQ, arm_rq, "ARM_RQ" },
	{ OP_QUERY_RQ, DEVX_QUERY, CMD_HEADER, SRQ_OUT_BYTES, OP_CREATE_RQ, query_rq, "QUERY_RQ" },
	{ OP_MODIFY_RQ, DEVX_MODIFY, 272, CMD_HEADER, OP_CREATE_RQ, modify_rq, "MODIFY_RQ" },
	{ OP_QUERY_RQT, DEVX_QUERY, CMD_HEADER, CTX_AT + RQTC_LIST_AT, OP_CREATE_RQT, query_rqt, "QUERY_RQT" },
	{ OP_MODIFY_RQT, DEVX_MODIFY, CTX_AT + RQTC_LIST_AT, CMD_HEADER, OP_CREATE_RQT, modify_rqt, "MODIFY_RQT" },
};

const struct devx_commands devx_rq_commands = { commands, ARRAY_LEN(commands) };

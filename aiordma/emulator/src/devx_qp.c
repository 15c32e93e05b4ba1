/* SPDX-License-Identifier: MIT
 * DEVX: queries of queue pairs, DCTs and completion queues. Everything in the answers is what the device goes by at that
 * moment, counters included.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include <infiniband/mlx5dv.h>

#include "devx.h"

#define LOG_MSG_MAX 30 /* what mlx5/qp.c sets: log_max_msg */
#define INDEX_MASK 0xffffffu

uint8_t devx_qp_state(const struct emu_qp *qp)
{
	switch (qp->state) {
	case IBV_QPS_SQE:
		return QPC_SQER;
	case IBV_QPS_SQD:
		return qp->sq_draining ? QPC_SQ_DRAINING : QPC_SQD;
	case IBV_QPS_ERR:
		return QPC_ERR;
	default:
		return qp->state; /* RESET to RTS have the same numbers */
	}
}

static uint8_t service_type(const struct emu_qp *qp)
{
	if (qp->dci)
		return QPC_ST_DCI;
	switch (qp->type) {
	case IBV_QPT_UC:
		return QPC_ST_UC;
	case IBV_QPT_UD:
		return QPC_ST_UD;
	case IBV_QPT_XRC_SEND:
	case IBV_QPT_XRC_RECV:
		return QPC_ST_XRC;
	default:
		return QPC_ST_RC;
	}
}

uint8_t devx_log2(uint64_t n)
{
	return (uint8_t)(n ? 63 - __builtin_clzll(n) : 0);
}

/* mlx5_set_path() in mlx5/qp.c */
static void put_path(uint8_t *ads, const struct emu_qp *qp)
{
	const struct emu_path *av = &qp->av;
	uint64_t mac = 0;

	prm_set(ads, ADS_PKEY_INDEX, qp->pkey_index);
	prm_set(ads, ADS_PORT, qp->port);
	prm_set(ads, ADS_ACK_TIMEOUT, qp->timeout);
	if (!av->port)
		return;
	for (unsigned i = 0; i < sizeof(av->dmac); i++)
		mac = mac << 8 | av->dmac[i];
	prm_set(ads, ADS_RMAC, mac);
	prm_set(ads, ADS_RLID, av->dlid);
	prm_set(ads, ADS_SRC_ADDR_INDEX, av->sgid_index);
	prm_set(ads, ADS_HOP_LIMIT, av->hop_limit);
	prm_set(ads, ADS_TCLASS, av->traffic_class);
	prm_set(ads, ADS_FLOW_LABEL, av->flow_label);
	prm_set(ads, ADS_DSCP, av->traffic_class >> 2);
	prm_set(ads, ADS_ETH_PRIO, av->sl & 7);
	memcpy(ads + ADS_RGID_AT, av->dgid.raw, sizeof(av->dgid.raw));
}

static void put_queues(uint8_t *qpc, const struct emu_qp *qp)
{
	prm_set(qpc, QPC_NO_SQ, !qp->sq_nbb);
	prm_set(qpc, QPC_LOG_SQ_SIZE, devx_log2(qp->sq_nbb));
	prm_set(qpc, QPC_LOG_RQ_SIZE, devx_log2(qp->rq_nwqe));
	prm_set(qpc, QPC_LOG_RQ_STRIDE, qp->rq_nwqe ? qp->rq_shift - 4 : 0);
	prm_set(qpc, QPC_RQ_TYPE, qp->srq ? QPC_RQ_SRQ : qp->rq_nwqe ? QPC_RQ_OWN : QPC_RQ_NONE);
	prm_set(qpc, QPC_SRQN, qp->srq ? qp->srq->srqn : 0);
	prm_set(qpc, QPC_CQN_SND, qp->scq ? qp->scq->cqn : 0);
	prm_set(qpc, QPC_CQN_RCV, qp->rcq ? qp->rcq->cqn : 0);
	prm_set(qpc, QPC_DBR_ADDR, (uintptr_t)qp->db);
	prm_set(qpc, QPC_HW_SQ_COUNTER, qp->sq_ci);
	prm_set(qpc, QPC_HW_RQ_COUNTER, qp->rq_ci);
	if (!qp->db)
		return;
	prm_set(qpc, QPC_SW_SQ_COUNTER, load_be32(&qp->db[1]));
	prm_set(qpc, QPC_SW_RQ_COUNTER, load_be32(&qp->db[0]) & 0xffff);
}

static void put_progress(uint8_t *qpc, const struct emu_qp *qp)
{
	struct emu_qp_progress p;

	emu_qp_progress(qp, &p);
	/* What a change of state has set and the connection hasn't begun to use yet. */
	if (qp->state == IBV_QPS_INIT || qp->state == IBV_QPS_RTR)
		p.next_send_psn = qp->sq_psn;
	prm_set(qpc, QPC_NEXT_SEND_PSN, p.next_send_psn);
	prm_set(qpc, QPC_LAST_ACKED_PSN, p.next_send_psn - 1);
	prm_set(qpc, QPC_NEXT_RCV_PSN, p.next_rcv_psn);
	prm_set(qpc, QPC_SSN, p.messages_sent);
	prm_set(qpc, QPC_RMSN, p.messages_received);
}

static const uint8_t pm_states[] = {
	[IBV_MIG_MIGRATED] = QPC_PM_MIGRATED,
	[IBV_MIG_REARM] = QPC_PM_REARM,
	[IBV_MIG_ARMED] = QPC_PM_ARMED,
};

static void put_qpc(uint8_t *qpc, const struct emu_qp *qp)
{
	prm_set(qpc, QPC_STATE, devx_qp_state(qp));
	prm_set(qpc, QPC_ST, service_type(qp));
	prm_set(qpc, QPC_PM_STATE, pm_states[qp->mig_state < ARRAY_LEN(pm_states) ? qp->mig_state : 0]);
	prm_set(qpc, QPC_PD, qp->pd ? qp->pd->pdn : 0);
	prm_set(qpc, QPC_MTU, qp->mtu);
	prm_set(qpc, QPC_LOG_MSG_MAX, LOG_MSG_MAX);
	prm_set(qpc, QPC_UAR_PAGE, qp->uar_page);
	prm_set(qpc, QPC_USER_INDEX, qp->uidx);
	prm_set(qpc, QPC_REMOTE_QPN, qp->dest_qpn);
	put_path(qpc + QPC_PRIMARY_PATH_AT, qp);
	prm_set(qpc, QPC_LOG_SRA_MAX, devx_log2(qp->rd_atomic));
	prm_set(qpc, QPC_RETRY_COUNT, qp->retry_cnt);
	prm_set(qpc, QPC_RNR_RETRY, qp->rnr_retry);
	prm_set(qpc, QPC_CUR_RETRY_COUNT, qp->retry_cnt);
	prm_set(qpc, QPC_CUR_RNR_RETRY, qp->rnr_retry);
	prm_set(qpc, QPC_LOG_RRA_MAX, devx_log2(qp->dest_rd_atomic));
	prm_set(qpc, QPC_RRE, !!(qp->access & IBV_ACCESS_REMOTE_READ));
	prm_set(qpc, QPC_RWE, !!(qp->access & IBV_ACCESS_REMOTE_WRITE));
	prm_set(qpc, QPC_RAE, !!(qp->access & IBV_ACCESS_REMOTE_ATOMIC));
	/* MLX5_ATOMIC_MODE_IB_COMP: as the transport's specification has them, 8 bytes */
	prm_set(qpc, QPC_ATOMIC_MODE, qp->access & IBV_ACCESS_REMOTE_ATOMIC ? 1 : 0);
	prm_set(qpc, QPC_MIN_RNR_NAK, qp->min_rnr_timer);
	prm_set(qpc, QPC_Q_KEY, qp->qkey);
	prm_set(qpc, QPC_DC_ACCESS_KEY, qp->dc_key);
	prm_set(qpc, QPC_LOG_NUM_DCI_STREAM_CHANNELS, qp->log_num_concurrent);
	prm_set(qpc, QPC_LOG_NUM_DCI_ERRORED_STREAMS, qp->log_num_errored);
	put_queues(qpc, qp);
	put_progress(qpc, qp);
}

/* With query_qp_in.qpc_ext, what lies beyond the context: qpc_ext, where it is in the inputs of changes too. */
static uint8_t query_qp(struct devx_call *c)
{
	const struct emu_qp *qp = devx_target(c);

	put_qpc(c->out + QP_IN_QPC_AT, qp);
	if (prm_get(c->in, QP_IN_QPC_EXT)) {
		if (c->outlen < QP_IN_EXT_BYTES)
			return devx_refuse(c, STAT_BAD_OUTP_LEN, SYN_OUTPUT_LENGTH, "no room for the extension");
		prm_set(c->out + QP_IN_QPC_DATA_EXT_AT, QPC_EXT_MMO, qp->mmo);
	}
	return STAT_OK;
}

static uint8_t query_dct(struct devx_call *c)
{
	const struct emu_qp *qp = devx_target(c);
	uint8_t *dctc = c->out + QUERY_DCT_OUT_DCTC_AT;

	prm_set(dctc, DCTC_STATE, 0); /* MLX5_DCTC_STATE_ACTIVE */
	prm_set(dctc, DCTC_USER_INDEX, qp->uidx);
	prm_set(dctc, DCTC_CQN, qp->rcq ? qp->rcq->cqn : 0);
	prm_set(dctc, DCTC_RRE, !!(qp->access & IBV_ACCESS_REMOTE_READ));
	prm_set(dctc, DCTC_RWE, !!(qp->access & IBV_ACCESS_REMOTE_WRITE));
	prm_set(dctc, DCTC_RAE, !!(qp->access & IBV_ACCESS_REMOTE_ATOMIC));
	prm_set(dctc, DCTC_MIN_RNR_NAK, qp->min_rnr_timer);
	prm_set(dctc, DCTC_SRQN, qp->srq ? qp->srq->srqn : 0);
	prm_set(dctc, DCTC_PD, qp->pd ? qp->pd->pdn : 0);
	prm_set(dctc, DCTC_TCLASS, qp->av.traffic_class);
	prm_set(dctc, DCTC_FLOW_LABEL, qp->av.flow_label);
	prm_set(dctc, DCTC_DC_ACCESS_KEY, qp->dc_key);
	prm_set(dctc, DCTC_MTU, qp->mtu);
	prm_set(dctc, DCTC_PORT, qp->port);
	prm_set(dctc, DCTC_PKEY_INDEX, qp->pkey_index);
	prm_set(dctc, DCTC_MY_ADDR_INDEX, qp->av.sgid_index);
	prm_set(dctc, DCTC_HOP_LIMIT, qp->av.hop_limit);
	return STAT_OK;
}

/* ---------------------------------------------------------------- completion queues */

/* An arm word that the device hasn't come to act upon yet counts: it does so with the next completion. */
static uint8_t arm_state(const struct emu_cq *cq)
{
	uint32_t word = __atomic_load_n(&cq->db[1], __ATOMIC_ACQUIRE);

	if (word != cq->last_arm)
		return be32toh(word) & MLX5_CQ_DB_REQ_NOT_SOL ? CQC_ST_SOLICITED_ARMED : CQC_ST_ARMED;
	return cq->armed == 2 ? CQC_ST_SOLICITED_ARMED : cq->armed ? CQC_ST_ARMED : CQC_ST_FIRED;
}

static uint8_t query_cq(struct devx_call *c)
{
	const struct emu_cq *cq = devx_target(c);
	uint8_t *cqc = c->out + CQ_CQC_AT;

	prm_set(cqc, CQC_STATUS, cq->overrun ? CQC_STATUS_OVERFLOW : CQC_STATUS_OK);
	prm_set(cqc, CQC_CQE_SZ, cq->cqe_size == 128);
	prm_set(cqc, CQC_ST, arm_state(cq));
	prm_set(cqc, CQC_LOG_CQ_SIZE, devx_log2(cq->ncqe));
	prm_set(cqc, CQC_UAR_PAGE, cq->uar_page);
	prm_set(cqc, CQC_CQ_PERIOD, cq->moderate_period);
	prm_set(cqc, CQC_CQ_MAX_COUNT, cq->moderate_count);
	prm_set(cqc, CQC_C_EQN, DEVX_FIRST_EQN + cq->comp_vector);
	prm_set(cqc, CQC_LAST_SOLICIT_INDEX, cq->solicited_pi & INDEX_MASK);
	prm_set(cqc, CQC_CONSUMER_COUNTER, load_be32(&cq->db[0]) & INDEX_MASK);
	prm_set(cqc, CQC_PRODUCER_COUNTER, cq->pi & INDEX_MASK);
	prm_set(cqc, CQC_DBR_ADDR, (uintptr_t)cq->db);
	return STAT_OK;
}

/* What mlx5_core_modify_cq_moderation() sends. The ring can't be exchanged this way: who resizes a CQ must write the
 * RESIZE mark and keep the reader's index right, which ibv_resize_cq() does. */
static uint8_t modify_cq(struct devx_call *c)
{
	uint32_t select = (uint32_t)prm_get(c->in, MODIFY_CQ_IN_FIELD_SELECT);
	const uint8_t *cqc = c->in + CQ_CQC_AT;
	struct emu_cq *cq = devx_target(c);

	if (prm_get(c->in, CMD_OP_MOD))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_NOT_IMPLEMENTED, "a CQ is resized by ibv_resize_cq() only");
	if (!select || select & ~(uint32_t)(MODIFY_CQ_PERIOD | MODIFY_CQ_MAX_COUNT))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_OPT_PARAM, "only the moderation of a CQ's events can be changed");
	if (select & MODIFY_CQ_PERIOD)
		cq->moderate_period = (uint16_t)prm_get(cqc, CQC_CQ_PERIOD);
	if (select & MODIFY_CQ_MAX_COUNT)
		cq->moderate_count = (uint16_t)prm_get(cqc, CQC_CQ_MAX_COUNT);
	return STAT_OK;
}

static const struct devx_command commands[] = {
	{ OP_QUERY_QP, DEVX_QUERY, CMD_HEADER, 272, OP_CREATE_QP, query_qp, "QUERY_QP" },
	{ OP_QUERY_DCT, DEVX_QUERY, CMD_HEADER, 128, OP_CREATE_DCT, query_dct, "QUERY_DCT" },
	{ OP_QUERY_CQ, DEVX_QUERY, CMD_HEADER, 272, OP_CREATE_CQ, query_cq, "QUERY_CQ" },
	{ OP_MODIFY_CQ, DEVX_MODIFY, 272, CMD_HEADER, OP_CREATE_CQ, modify_cq, "MODIFY_CQ" },
};

const struct devx_commands devx_qp_commands = { commands, ARRAY_LEN(commands) };

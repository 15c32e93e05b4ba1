/* SPDX-License-Identifier: MIT
 * DEVX: changes of a queue pair's state. The kernel looks only at the command's opcode and the queue pair's number; which
 * state it must be in, and which attributes go with the change, is the firmware's business: the tables below. They say
 * what the kernel's own driver sends (__mlx5_ib_modify_qp() and opt_mask in mlx5/qp.c) and may leave out.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "devx.h"

#define FROM(state) (1u << IBV_QPS_##state)
#define ANY_STATE 0x7fu

#define ACCESS_BITS (OPT_RRE | OPT_RAE | OPT_RWE)

/* Groups of attributes. */
enum {
	SET_ACCESS = 1 << 0,
	SET_PORT_PKEY = 1 << 1,
	SET_QKEY = 1 << 2,
	SET_REMOTE = 1 << 3, /* path, remote QPN, MTU, next_rcv_psn */
	SET_RESPONDER = 1 << 4, /* min_rnr_nak, log_rra_max */
	SET_REQUESTER = 1 << 5, /* retries, timeout, log_sra_max */
	SET_SEND_PSN = 1 << 6,
};

enum { RC, UC, UD, TYPES };

struct change {
	uint16_t opcode;
	uint8_t from, to; /* states as a set; 0: stays */
	uint8_t required[TYPES];
	uint32_t optional[TYPES];
	uint64_t optional_95_32;
};

static const struct change changes[] = {
	{ OP_RST2INIT_QP, FROM(RESET), IBV_QPS_INIT,
	  { SET_ACCESS | SET_PORT_PKEY, SET_ACCESS | SET_PORT_PKEY, SET_PORT_PKEY | SET_QKEY }, { 0, 0, 0 }, 0 },
	{ OP_INIT2INIT_QP, FROM(INIT), IBV_QPS_INIT,
	  { 0, 0, 0 },
	  { ACCESS_BITS | OPT_PKEY_INDEX | OPT_PRI_PORT, OPT_RWE | OPT_PKEY_INDEX | OPT_PRI_PORT,
	    OPT_PKEY_INDEX | OPT_Q_KEY | OPT_PRI_PORT },
	  OPT32_MMO },
	{ OP_INIT2RTR_QP, FROM(INIT), IBV_QPS_RTR,
	  { SET_REMOTE | SET_RESPONDER, SET_REMOTE, 0 },
	  { ACCESS_BITS | OPT_PKEY_INDEX, OPT_RWE | OPT_PKEY_INDEX, OPT_PKEY_INDEX | OPT_Q_KEY }, 0 },
	{ OP_RTR2RTS_QP, FROM(RTR), IBV_QPS_RTS,
	  { SET_REQUESTER | SET_SEND_PSN, SET_SEND_PSN, SET_SEND_PSN },
	  { ACCESS_BITS | OPT_PM_STATE | OPT_RNR_TIMEOUT, OPT_RWE | OPT_PM_STATE, OPT_Q_KEY }, 0 },
	{ OP_RTS2RTS_QP, FROM(RTS), IBV_QPS_RTS,
	  { 0, 0, 0 },
	  { ACCESS_BITS | OPT_RNR_TIMEOUT | OPT_PM_STATE, OPT_RWE | OPT_PM_STATE, OPT_Q_KEY },
	  OPT32_DCI_STREAM_CHANNEL_ID },
	{ OP_SQERR2RTS_QP, FROM(SQE), IBV_QPS_RTS,
	  { 0, 0, 0 },
	  { ACCESS_BITS | OPT_RNR_TIMEOUT, OPT_RWE, OPT_Q_KEY }, 0 },
	{ OP_2ERR_QP, ANY_STATE & ~FROM(RESET), IBV_QPS_ERR, { 0, 0, 0 }, { 0, 0, 0 }, 0 },
	{ OP_2RST_QP, ANY_STATE, IBV_QPS_RESET, { 0, 0, 0 }, { 0, 0, 0 }, 0 },
};

static unsigned type_index(const struct emu_qp *qp)
{
	return qp->type == IBV_QPT_UC ? UC : qp->type == IBV_QPT_UD ? UD : RC;
}

/* ---------------------------------------------------------------- attributes */

static uint32_t access_of(const uint8_t *qpc)
{
	return (uint32_t)((prm_get(qpc, QPC_RRE) ? IBV_ACCESS_REMOTE_READ : 0) |
			  (prm_get(qpc, QPC_RWE) ? IBV_ACCESS_REMOTE_WRITE : 0) |
			  (prm_get(qpc, QPC_RAE) ? IBV_ACCESS_REMOTE_ATOMIC : 0));
}

static const char *take_port(struct emu_qp *qp, const uint8_t *ads)
{
	uint8_t port = (uint8_t)prm_get(ads, ADS_PORT);

	if (!emu_port(qp->dev, port))
		return "no such port";
	qp->port = port;
	return NULL;
}

static const char *take_pkey(struct emu_qp *qp, const uint8_t *ads)
{
	uint16_t index = (uint16_t)prm_get(ads, ADS_PKEY_INDEX);

	if (index >= EMU_PORT_PKEYS)
		return "no such partition key";
	qp->pkey_index = index;
	return NULL;
}

/* The firmware is given the MAC address; it resolves none. */
static const char *take_path(struct emu_qp *qp, const uint8_t *ads)
{
	const struct emu_port_config *port = emu_port(qp->dev, qp->port);
	uint64_t mac = prm_get(ads, ADS_RMAC);
	struct emu_path path = {
		.sgid_index = (uint8_t)prm_get(ads, ADS_SRC_ADDR_INDEX),
		.port = qp->port,
		.hop_limit = (uint8_t)prm_get(ads, ADS_HOP_LIMIT),
		.traffic_class = (uint8_t)prm_get(ads, ADS_TCLASS),
		.sl = (uint8_t)prm_get(ads, ADS_ETH_PRIO),
		.flow_label = (uint32_t)prm_get(ads, ADS_FLOW_LABEL),
		.dlid = (uint16_t)prm_get(ads, ADS_RLID),
		.is_global = true,
	};

	if (!port || path.sgid_index >= port->ngids || !port->gids[path.sgid_index].valid)
		return "no such source address";
	memcpy(path.dgid.raw, ads + ADS_RGID_AT, sizeof(path.dgid.raw));
	for (unsigned i = 0; i < sizeof(path.dmac); i++)
		path.dmac[i] = (uint8_t)(mac >> 8 * (5 - i));
	qp->av = path;
	return NULL;
}

static const char *take_remote(struct emu_qp *qp, const uint8_t *qpc)
{
	uint8_t mtu = (uint8_t)prm_get(qpc, QPC_MTU);

	if (mtu < IBV_MTU_256 || mtu > IBV_MTU_4096)
		return "no such MTU";
	qp->mtu = mtu;
	qp->dest_qpn = (uint32_t)prm_get(qpc, QPC_REMOTE_QPN);
	qp->rq_psn = (uint32_t)prm_get(qpc, QPC_NEXT_RCV_PSN);
	return take_path(qp, qpc + QPC_PRIMARY_PATH_AT);
}

static const char *take_responder(struct emu_qp *qp, const uint8_t *qpc)
{
	uint32_t reads = 1u << prm_get(qpc, QPC_LOG_RRA_MAX);

	if (reads > qp->dev->limits.max_qp_rd_atom)
		return "more RDMA reads than the device serves";
	qp->dest_rd_atomic = (uint8_t)reads;
	qp->min_rnr_timer = (uint8_t)prm_get(qpc, QPC_MIN_RNR_NAK);
	return NULL;
}

static const char *take_requester(struct emu_qp *qp, const uint8_t *qpc)
{
	uint32_t reads = 1u << prm_get(qpc, QPC_LOG_SRA_MAX);

	if (reads > qp->dev->limits.max_qp_init_rd_atom)
		return "more RDMA reads than the device has in flight";
	qp->rd_atomic = (uint8_t)reads;
	qp->retry_cnt = (uint8_t)prm_get(qpc, QPC_RETRY_COUNT);
	qp->rnr_retry = (uint8_t)prm_get(qpc, QPC_RNR_RETRY);
	qp->timeout = (uint8_t)prm_get(qpc + QPC_PRIMARY_PATH_AT, ADS_ACK_TIMEOUT);
	return NULL;
}

static const char *take_required(struct emu_qp *qp, const uint8_t *qpc, uint8_t groups)
{
	const uint8_t *ads = qpc + QPC_PRIMARY_PATH_AT;
	const char *wrong = NULL;

	if (groups & SET_ACCESS)
		qp->access = access_of(qpc);
	if (groups & SET_QKEY)
		qp->qkey = (uint32_t)prm_get(qpc, QPC_Q_KEY);
	if (groups & SET_SEND_PSN)
		qp->sq_psn = (uint32_t)prm_get(qpc, QPC_NEXT_SEND_PSN);
	if (groups & SET_PORT_PKEY) {
		wrong = take_port(qp, ads);
		if (!wrong)
			wrong = take_pkey(qp, ads);
	}
	if (!wrong && groups & SET_REMOTE)
		wrong = take_remote(qp, qpc);
	if (!wrong && groups & SET_RESPONDER)
		wrong = take_responder(qp, qpc);
	if (!wrong && groups & SET_REQUESTER)
		wrong = take_requester(qp, qpc);
	return wrong;
}

static const char *take_optional(struct emu_qp *qp, const uint8_t *qpc, uint32_t mask)
{
	static const uint8_t mig_states[4] = {
		[QPC_PM_ARMED] = IBV_MIG_ARMED,
		[QPC_PM_REARM] = IBV_MIG_REARM,
		[QPC_PM_MIGRATED] = IBV_MIG_MIGRATED,
	};
	uint32_t changed = (mask & OPT_RRE ? IBV_ACCESS_REMOTE_READ : 0) | (mask & OPT_RWE ? IBV_ACCESS_REMOTE_WRITE : 0) |
			   (mask & OPT_RAE ? IBV_ACCESS_REMOTE_ATOMIC : 0);
	const uint8_t *ads = qpc + QPC_PRIMARY_PATH_AT;
	const char *wrong = NULL;

	qp->access = (qp->access & ~changed) | (access_of(qpc) & changed);
	if (mask & OPT_Q_KEY)
		qp->qkey = (uint32_t)prm_get(qpc, QPC_Q_KEY);
	if (mask & OPT_RNR_TIMEOUT)
		qp->min_rnr_timer = (uint8_t)prm_get(qpc, QPC_MIN_RNR_NAK);
	if (mask & OPT_PM_STATE)
		qp->mig_state = mig_states[prm_get(qpc, QPC_PM_STATE)];
	if (mask & OPT_PKEY_INDEX)
		wrong = take_pkey(qp, ads);
	if (!wrong && mask & OPT_PRI_PORT)
		wrong = take_port(qp, ads);
	return wrong;
}

/* Only with in.qpc_ext is there anything beyond the context. */
static uint8_t take_extension(struct devx_call *c, struct emu_qp *qp, const struct change *k)
{
	const uint8_t *ext = c->in + QP_IN_QPC_DATA_EXT_AT;
	uint64_t mask;

	if (!prm_get(c->in, QP_IN_QPC_EXT))
		return STAT_OK;
	if (c->inlen < QP_IN_EXT_BYTES)
		return devx_refuse(c, STAT_BAD_INP_LEN, SYN_INPUT_LENGTH, "the extension is missing");
	mask = prm_get(c->in, QP_IN_OPT_PARAM_MASK_95_32);
	if (mask & ~k->optional_95_32)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_OPT_PARAM, "an extended attribute that this change doesn't have");
	if (mask & OPT32_MMO) {
		if (!qp->dev->limits.max_wr_memcpy_length)
			return devx_refuse(c, STAT_BAD_PARAM, SYN_NO_MMO, "the device has no DMA memcpy");
		qp->mmo = prm_get(ext, QPC_EXT_MMO);
	}
	/* mlx5dv_dci_stream_id_reset() */
	if (mask & OPT32_DCI_STREAM_CHANNEL_ID &&
	    (!qp->dci || emu_dci_stream_reset(qp, (uint16_t)prm_get(ext, QPC_EXT_DCI_STREAM))))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_DCI_STREAM, "no DCI, or no such stream of it is in error");
	return STAT_OK;
}

/* ---------------------------------------------------------------- the commands */

static uint8_t take_attributes(struct devx_call *c, struct emu_qp *qp, const struct change *k)
{
	uint32_t mask = (uint32_t)prm_get(c->in, QP_IN_OPT_PARAM_MASK);
	const uint8_t *qpc = c->in + QP_IN_QPC_AT;
	unsigned type = type_index(qp);
	const char *wrong;
	uint8_t status;

	if (mask & ~k->optional[type]) {
		char why[80];

		snprintf(why, sizeof(why), "attributes 0x%x aren't of this change", mask & ~k->optional[type]);
		return devx_refuse(c, STAT_BAD_PARAM, SYN_OPT_PARAM, why);
	}
	wrong = take_required(qp, qpc, k->required[type]);
	if (!wrong)
		wrong = take_optional(qp, qpc, mask);
	if (wrong)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, wrong);
	status = take_extension(c, qp, k);
	return status;
}

static uint8_t modify_qp(struct devx_call *c)
{
	struct emu_qp *qp = devx_target(c), before = *qp;
	const struct change *k = changes;
	uint8_t status = STAT_OK;

	while (k->opcode != c->command->opcode)
		k++;
	if (!(k->from >> qp->state & 1)) {
		char why[80];

		snprintf(why, sizeof(why), "QP 0x%x is in state %u", qp->qpn, qp->state);
		return devx_refuse(c, STAT_BAD_QP_STATE, SYN_QP_STATE, why);
	}
	if (k->to == IBV_QPS_RESET) {
		emu_qp_forget_attributes(qp);
		qp->mmo = false;
	} else if (k->to != IBV_QPS_ERR) {
		status = take_attributes(c, qp, k);
	}
	if (status) {
		/* Nothing of a refused change stays. No other field of it can have changed: the lock is held. */
		*qp = before;
		return status;
	}
	qp->state = k->to;
	emu_qp_state_changed(qp, before.state);
	return STAT_OK;
}

#define CHANGE(op, in) { OP_##op##_QP, DEVX_MODIFY, (in), CMD_HEADER, OP_CREATE_QP, modify_qp, #op "_QP" }

static const struct devx_command commands[] = {
	CHANGE(RST2INIT, QP_IN_BYTES), CHANGE(INIT2INIT, QP_IN_BYTES), CHANGE(INIT2RTR, QP_IN_BYTES),
	CHANGE(RTR2RTS, QP_IN_BYTES),  CHANGE(RTS2RTS, QP_IN_BYTES),   CHANGE(SQERR2RTS, QP_IN_BYTES),
	CHANGE(2ERR, CMD_HEADER),      CHANGE(2RST, CMD_HEADER),
};

const struct devx_commands devx_qp_modify_commands = { commands, ARRAY_LEN(commands) };

/* SPDX-License-Identifier: MIT
 * Which attributes a queue pair's change of state needs and allows: ib_modify_qp_is_ok() and its qp_state_table in
 * core/verbs.c, as one row a transition, and the driver's own table of what the firmware can do.
 */
#include "control.h"

enum { TYPE_RC, TYPE_UC, TYPE_UD, TYPE_XRC_INI, TYPE_XRC_TGT, TYPES };

#define PKEY IBV_QP_PKEY_INDEX
#define PORT IBV_QP_PORT
#define QKEY IBV_QP_QKEY
#define ACCESS IBV_QP_ACCESS_FLAGS
#define AV IBV_QP_AV
#define MTU IBV_QP_PATH_MTU
#define DEST IBV_QP_DEST_QPN
#define RQ_PSN IBV_QP_RQ_PSN
#define SQ_PSN IBV_QP_SQ_PSN
#define RD_DEST IBV_QP_MAX_DEST_RD_ATOMIC
#define RD_INIT IBV_QP_MAX_QP_RD_ATOMIC
#define RNR_TIMER IBV_QP_MIN_RNR_TIMER
#define TIMEOUT IBV_QP_TIMEOUT
#define RETRY IBV_QP_RETRY_CNT
#define RNR_RETRY IBV_QP_RNR_RETRY
#define CUR IBV_QP_CUR_STATE
#define ALT IBV_QP_ALT_PATH
#define MIG IBV_QP_PATH_MIG_STATE
#define SQD_EVENT IBV_QP_EN_SQD_ASYNC_NOTIFY

struct transition {
	uint8_t from, to;
	uint32_t required[TYPES], optional[TYPES];
};

/* To RESET and to ERR every state may go, with no attribute, except that RESET doesn't go to ERR. */
static const struct transition transitions[] = {
	{ IBV_QPS_RESET, IBV_QPS_INIT,
	  { PKEY | PORT | ACCESS, PKEY | PORT | ACCESS, PKEY | PORT | QKEY, PKEY | PORT | ACCESS, PKEY | PORT | ACCESS },
	  { 0 } },
	{ IBV_QPS_INIT, IBV_QPS_INIT,
	  { 0 },
	  { PKEY | PORT | ACCESS, PKEY | PORT | ACCESS, PKEY | PORT | QKEY, PKEY | PORT | ACCESS, PKEY | PORT | ACCESS } },
	{ IBV_QPS_INIT, IBV_QPS_RTR,
	  { AV | MTU | DEST | RQ_PSN | RD_DEST | RNR_TIMER, AV | MTU | DEST | RQ_PSN, 0, AV | MTU | DEST | RQ_PSN,
	    AV | MTU | DEST | RQ_PSN | RD_DEST | RNR_TIMER },
	  { ALT | ACCESS | PKEY, ALT | ACCESS | PKEY, PKEY | QKEY, ALT | ACCESS | PKEY, ALT | ACCESS | PKEY } },
	{ IBV_QPS_RTR, IBV_QPS_RTS,
	  { TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD_INIT, SQ_PSN, SQ_PSN,
	    TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD_INIT, TIMEOUT | SQ_PSN },
	  { CUR | ALT | ACCESS | RNR_TIMER | MIG, CUR | ALT | ACCESS | MIG, CUR | QKEY, CUR | ALT | ACCESS | MIG,
	    CUR | ALT | ACCESS | RNR_TIMER | MIG } },
	{ IBV_QPS_RTS, IBV_QPS_RTS,
	  { 0 },
	  { CUR | ACCESS | ALT | MIG | RNR_TIMER, CUR | ACCESS | ALT | MIG, CUR | QKEY, CUR | ACCESS | ALT | MIG,
	    CUR | ACCESS | ALT | MIG | RNR_TIMER } },
	{ IBV_QPS_RTS, IBV_QPS_SQD,
	  { 0 },
	  { SQD_EVENT, SQD_EVENT, SQD_EVENT, SQD_EVENT, SQD_EVENT } },
	{ IBV_QPS_SQD, IBV_QPS_RTS,
	  { 0 },
	  { CUR | ALT | ACCESS | RNR_TIMER | MIG, CUR | ALT | ACCESS | MIG, CUR | QKEY, CUR | ALT | ACCESS | MIG,
	    CUR | ALT | ACCESS | RNR_TIMER | MIG } },
	{ IBV_QPS_SQD, IBV_QPS_SQD,
	  { 0 },
	  { PORT | AV | TIMEOUT | RETRY | RNR_RETRY | RD_INIT | RD_DEST | ALT | ACCESS | PKEY | RNR_TIMER | MIG,
	    AV | ALT | ACCESS | PKEY | MIG, PKEY | QKEY,
	    PORT | AV | TIMEOUT | RETRY | RNR_RETRY | RD_INIT | ALT | ACCESS | PKEY | MIG,
	    PORT | AV | TIMEOUT | RD_DEST | ALT | ACCESS | PKEY | RNR_TIMER | MIG } },
	{ IBV_QPS_SQE, IBV_QPS_RTS,
	  { 0 },
	  { 0, CUR | ACCESS, CUR | QKEY, 0, 0 } },
};

/* modify_dci_qp_is_ok() in mlx5/qp.c */
static const struct transition dci_transitions[] = {
	{ IBV_QPS_RESET, IBV_QPS_INIT, { PKEY | PORT }, { 0 } },
	{ IBV_QPS_INIT, IBV_QPS_INIT, { 0 }, { PKEY | PORT } },
	{ IBV_QPS_INIT, IBV_QPS_RTR, { MTU }, { PKEY | AV } },
	{ IBV_QPS_RTR, IBV_QPS_RTS, { TIMEOUT | RETRY | RNR_RETRY | RD_INIT | SQ_PSN }, { RNR_TIMER } },
	{ IBV_QPS_RTS, IBV_QPS_RTS, { 0 }, { RNR_TIMER } },
};

/* mlx5_ib_modify_dct(): two steps and no way back. */
static const struct transition dct_transitions[] = {
	{ IBV_QPS_RESET, IBV_QPS_INIT, { PKEY | PORT | ACCESS }, { 0 } },
	{ IBV_QPS_INIT, IBV_QPS_RTR, { RNR_TIMER | AV | MTU }, { 0 } },
};

static int type_index(uint8_t type)
{
	switch (type) {
	case IBV_QPT_RC:
		return TYPE_RC;
	case IBV_QPT_UC:
		return TYPE_UC;
	case IBV_QPT_UD:
		return TYPE_UD;
	case IBV_QPT_XRC_SEND:
		return TYPE_XRC_INI;
	case IBV_QPT_XRC_RECV:
		return TYPE_XRC_TGT;
	default:
		return 0; /* the tables of DC have one column */
	}
}

static bool allowed(const struct transition *t, uint8_t type, uint32_t mask)
{
	uint32_t required = t->required[type_index(type)], optional = t->optional[type_index(type)];

	return (mask & required) == required && !(mask & ~(required | optional | IBV_QP_STATE));
}

static bool in_table(const struct transition *table, size_t n, uint8_t type, uint8_t cur, uint8_t next, uint32_t mask)
{
	for (size_t i = 0; i < n; i++)
		if (table[i].from == cur && table[i].to == next)
			return allowed(&table[i], type, mask);
	return false;
}

bool emu_qp_modify_is_ok(const struct emu_qp *qp, uint8_t cur, uint8_t next, uint32_t mask)
{
	bool anywhere = next == IBV_QPS_RESET || (next == IBV_QPS_ERR && cur != IBV_QPS_RESET);

	if (cur > IBV_QPS_ERR || next > IBV_QPS_ERR)
		return false;
	if (qp->dct)
		return mask & IBV_QP_STATE &&
		       in_table(dct_transitions, ARRAY_LEN(dct_transitions), qp->type, cur, next, mask);
	if (anywhere)
		return !(mask & ~(uint32_t)IBV_QP_STATE);
	if (qp->dci)
		return mask & IBV_QP_STATE &&
		       in_table(dci_transitions, ARRAY_LEN(dci_transitions), qp->type, cur, next, mask);
	if (mask & CUR && cur != IBV_QPS_RTR && cur != IBV_QPS_RTS && cur != IBV_QPS_SQD && cur != IBV_QPS_SQE)
		return false;
	return in_table(transitions, ARRAY_LEN(transitions), qp->type, cur, next, mask);
}

/* optab of __mlx5_ib_modify_qp() in mlx5/qp.c: there is no command that drains the send queue, and none that changes a
 * drained one. */
bool emu_qp_hardware_can(uint8_t cur, uint8_t next)
{
	(void)cur;
	return next != IBV_QPS_SQD;
}

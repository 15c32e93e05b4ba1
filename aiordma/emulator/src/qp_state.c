/* SPDX-License-Identifier: MIT
 * Which attributes a queue pair's change of state needs and allows: ib_modify_qp_is_ok() and its qp_state_table in
 * core/verbs.c, as one row a transition, and the driver's own table of what the firmware can do.
 */
#include "control.h"

enum { TYPE_RC, TYPE_UC, TYPE_UD, TYPES };

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
	  { PKEY | PORT | ACCESS, PKEY | PORT | ACCESS, PKEY | PORT | QKEY },
	  { 0, 0, 0 } },
	{ IBV_QPS_INIT, IBV_QPS_INIT,
	  { 0, 0, 0 },
	  { PKEY | PORT | ACCESS, PKEY | PORT | ACCESS, PKEY | PORT | QKEY } },
	{ IBV_QPS_INIT, IBV_QPS_RTR,
	  { AV | MTU | DEST | RQ_PSN | RD_DEST | RNR_TIMER, AV | MTU | DEST | RQ_PSN, 0 },
	  { ALT | ACCESS | PKEY, ALT | ACCESS | PKEY, PKEY | QKEY } },
	{ IBV_QPS_RTR, IBV_QPS_RTS,
	  { TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD_INIT, SQ_PSN, SQ_PSN },
	  { CUR | ALT | ACCESS | RNR_TIMER | MIG, CUR | ALT | ACCESS | MIG, CUR | QKEY } },
	{ IBV_QPS_RTS, IBV_QPS_RTS,
	  { 0, 0, 0 },
	  { CUR | ACCESS | ALT | MIG | RNR_TIMER, CUR | ACCESS | ALT | MIG, CUR | QKEY } },
	{ IBV_QPS_RTS, IBV_QPS_SQD,
	  { 0, 0, 0 },
	  { SQD_EVENT, SQD_EVENT, SQD_EVENT } },
	{ IBV_QPS_SQD, IBV_QPS_RTS,
	  { 0, 0, 0 },
	  { CUR | ALT | ACCESS | RNR_TIMER | MIG, CUR | ALT | ACCESS | MIG, CUR | QKEY } },
	{ IBV_QPS_SQD, IBV_QPS_SQD,
	  { 0, 0, 0 },
	  { PORT | AV | TIMEOUT | RETRY | RNR_RETRY | RD_INIT | RD_DEST | ALT | ACCESS | PKEY | RNR_TIMER | MIG,
	    AV | ALT | ACCESS | PKEY | MIG, PKEY | QKEY } },
	{ IBV_QPS_SQE, IBV_QPS_RTS,
	  { 0, 0, 0 },
	  { 0, CUR | ACCESS, CUR | QKEY } },
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
	default:
		return -1;
	}
}

bool emu_qp_modify_is_ok(uint8_t cur, uint8_t next, uint8_t type, uint32_t mask)
{
	uint32_t required = 0, optional = 0;
	int t = type_index(type);
	bool found = next == IBV_QPS_RESET || (next == IBV_QPS_ERR && cur != IBV_QPS_RESET);

	if (t < 0 || cur > IBV_QPS_ERR || next > IBV_QPS_ERR)
		return false;
	if (mask & CUR && cur != IBV_QPS_RTR && cur != IBV_QPS_RTS && cur != IBV_QPS_SQD && cur != IBV_QPS_SQE)
		return false;
	for (size_t i = 0; i < ARRAY_LEN(transitions); i++)
		if (transitions[i].from == cur && transitions[i].to == next) {
			required = transitions[i].required[t];
			optional = transitions[i].optional[t];
			found = true;
		}
	return found && (mask & required) == required && !(mask & ~(required | optional | IBV_QP_STATE));
}

/* optab of __mlx5_ib_modify_qp() in mlx5/qp.c: there is no command that drains the send queue, and none that changes a
 * drained one. */
bool emu_qp_hardware_can(uint8_t cur, uint8_t next)
{
	(void)cur;
	return next != IBV_QPS_SQD;
}

/* SPDX-License-Identifier: MIT
 * What a QP has to be set to, state by state: rdma_init_qp_attr() of core/cma.c and ib_cm_init_qp_attr() of core/cm.c. */
#define _GNU_SOURCE
#include "cm.h"

void cm_ah_attr(const struct cm_id *id, struct ib_uverbs_ah_attr *ah)
{
	memset(ah, 0, sizeof(*ah));
	memcpy(ah->grh.dgid, id->dgid.raw, sizeof(ah->grh.dgid));
	ah->grh.sgid_index = id->gid_index;
	ah->grh.hop_limit = id->hop_limit;
	ah->grh.traffic_class = id->traffic_class;
	ah->sl = id->sl;
	ah->is_global = 1;
	ah->port_num = id->port;
}

/* cma_set_qkey(), and cma_set_default_qkey() with none */
int cm_set_qkey(struct cm_id *id, uint32_t qkey)
{
	if (id->qkey)
		return qkey && qkey != id->qkey ? EINVAL : 0;
	if (qkey)
		id->qkey = qkey;
	else if (id->ps == RDMA_PS_UDP || id->ps == RDMA_PS_IB)
		id->qkey = CM_UDP_QKEY;
	return 0;
}

/* cma_ib_init_qp_attr(): before there is a connection, and for datagrams. */
static int unconnected(struct cm_id *id, struct ib_uverbs_qp_attr *a)
{
	int err;

	a->port_num = id->port;
	a->qp_attr_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	if (id->qp_type != IBV_QPT_UD) {
		a->qp_attr_mask |= IBV_QP_ACCESS_FLAGS;
		return 0;
	}
	err = cm_set_qkey(id, 0);
	a->qkey = id->qkey;
	a->qp_attr_mask |= IBV_QP_QKEY;
	return err;
}

static int to_init(const struct cm_id *id, struct ib_uverbs_qp_attr *a)
{
	switch (id->conn) {
	case CONN_REQ_SENT:
	case CONN_REQ_RCVD:
	case CONN_REP_SENT:
	case CONN_REP_RCVD:
	case CONN_ESTABLISHED:
		break;
	default:
		return EINVAL;
	}
	a->qp_attr_mask = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	a->qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	if (id->responder_resources)
		a->qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	a->port_num = id->port;
	return 0;
}

static bool peer_is_known(const struct cm_id *id)
{
	return id->conn == CONN_REQ_RCVD || id->conn == CONN_REP_SENT || id->conn == CONN_REP_RCVD ||
	       id->conn == CONN_ESTABLISHED;
}

static int to_rtr(const struct cm_id *id, struct ib_uverbs_qp_attr *a)
{
	if (!peer_is_known(id))
		return EINVAL;
	a->qp_attr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	cm_ah_attr(id, &a->ah_attr);
	a->path_mtu = id->path_mtu;
	a->dest_qp_num = id->remote_qpn;
	a->rq_psn = id->seq_num; /* the number that we asked the peer to start with */
	if (id->qp_type == IBV_QPT_RC || id->qp_type == IBV_QPT_XRC_RECV) {
		a->qp_attr_mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		a->max_dest_rd_atomic = id->responder_resources;
	}
	return 0;
}

static int to_rts(const struct cm_id *id, struct ib_uverbs_qp_attr *a)
{
	if (!peer_is_known(id))
		return EINVAL;
	a->qp_attr_mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	a->sq_psn = id->sq_psn;
	switch (id->qp_type) {
	case IBV_QPT_RC:
	case IBV_QPT_XRC_SEND:
		a->qp_attr_mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT;
		a->retry_cnt = id->retry_count;
		a->rnr_retry = id->rnr_retry_count;
		a->max_rd_atomic = id->initiator_depth;
		a->timeout = id->timeout_set ? id->timeout : id->ack_timeout;
		break;
	case IBV_QPT_XRC_RECV:
		a->qp_attr_mask |= IBV_QP_TIMEOUT;
		a->timeout = id->timeout_set ? id->timeout : id->ack_timeout;
		break;
	default:
		break;
	}
	return 0;
}

int cm_init_qp_attr(struct cm_id *id, uint32_t state, struct ib_uverbs_qp_attr *a)
{
	memset(a, 0, sizeof(*a));
	a->qp_state = state;
	if (id->conn == CONN_NONE || id->qp_type == IBV_QPT_UD)
		return unconnected(id, a);
	switch (state) {
	case IBV_QPS_INIT:
		return to_init(id, a);
	case IBV_QPS_RTR:
		return to_rtr(id, a);
	case IBV_QPS_RTS:
		return to_rts(id, a);
	default:
		return EINVAL;
	}
}

/* SPDX-License-Identifier: MIT
 * What a program does to a connection: connect, accept, reject, disconnect, destroy (rdma_connect(3) and so on), as core/cma.c
 * and core/cm.c do it. cm_message.c has what they send with, cm_receive.c what comes of it at the other end. */
#include "cm_message.h"

/* cma_connect_ib(), ib_send_cm_req() */
static int connect_qp(struct cm_id *id, const struct cm_params *p)
{
	struct cm_message *m;

	if (id->qp_type != IBV_QPT_RC && id->qp_type != IBV_QPT_UC && id->qp_type != IBV_QPT_XRC_SEND)
		return EINVAL;
	if (p->conn.private_data_len > CM_REQ_DATA)
		return EINVAL;
	m = cm_request_new(id, CM_REQ);
	if (!m)
		return ENOMEM;
	m->qpn = id->qp_num;
	m->psn = id->seq_num;
	m->srq = id->srq;
	m->responder_resources = id->responder_resources = p->conn.responder_resources;
	m->initiator_depth = id->initiator_depth = p->conn.initiator_depth;
	m->flow_control = p->conn.flow_control;
	m->retry_count = id->retry_count = MIN(7, p->conn.retry_count);
	m->rnr_retry_count = id->rnr_retry_count = MIN(7, p->conn.rnr_retry_count);
	m->ece_vendor = p->ece.vendor_id;
	m->ece_options = p->ece.attr_mod;
	m->data_len = p->conn.private_data_len;
	memcpy(m->data, p->conn.private_data, m->data_len);
	id->path_mtu = id->mtu;
	id->ack_timeout = cm_ack_timeout(id->packet_life_time);
	id->timeout_ms = cm_exponent_ms(id->packet_life_time) * 2 + cm_exponent_ms(emu.cm_response_timeout);
	id->retries = emu.cm_retries;
	id->conn = CONN_REQ_SENT;
	cm_request_send(id);
	return 0;
}

static void take_qp(struct cm_id *id, const struct cm_params *p)
{
	id->qp_num = p->conn.qp_num & 0xffffff;
	id->srq = p->conn.srq;
}

/* rdma_connect_locked() of core/cma.c */
int cm_connect(struct cm_id *id, const struct cm_params *p)
{
	int err;

	if (id->state != CM_ROUTE_RESOLVED)
		return EINVAL;
	take_qp(id, p);
	id->state = CM_CONNECT;
	err = id->qp_type == IBV_QPT_UD ? cm_sidr_connect(id, p) : connect_qp(id, p);
	if (err)
		id->state = CM_ROUTE_RESOLVED;
	return err;
}

/* cma_accept_ib(), ib_send_cm_rep() */
static int accept_request(struct cm_id *id, const struct cm_params *p)
{
	struct cm_message m;
	int err;

	if (p->conn.private_data_len > CM_REP_DATA || id->conn != CONN_REQ_RCVD)
		return EINVAL;
	cm_message_begin(id, &m, CM_REP);
	m.qpn = id->qp_num;
	m.psn = id->seq_num;
	m.srq = id->srq;
	m.mtu = id->path_mtu;
	m.responder_resources = p->conn.responder_resources;
	m.initiator_depth = p->conn.initiator_depth;
	m.flow_control = p->conn.flow_control;
	m.rnr_retry_count = MIN(7, p->conn.rnr_retry_count);
	m.ece_vendor = p->ece.vendor_id;
	m.ece_options = p->ece.attr_mod;
	m.data_len = p->conn.private_data_len;
	memcpy(m.data, p->conn.private_data, m.data_len);
	err = cm_keep(id, &m);
	if (err)
		return err;
	id->responder_resources = m.responder_resources;
	id->initiator_depth = m.initiator_depth;
	id->conn = CONN_REP_SENT;
	cm_send_kept(id);
	return 0;
}

static int accept_reply(struct cm_id *id) /* cma_rep_recv(), ib_send_cm_rtu() */
{
	if (id->conn != CONN_REP_RCVD)
		return EINVAL;
	id->conn = CONN_ESTABLISHED;
	cm_send_plain(id, CM_RTU);
	return 0;
}

/* rdma_accept() of core/cma.c */
int cm_accept(struct cm_id *id, const struct cm_params *p)
{
	int err;

	if (id->state != CM_CONNECT)
		return EINVAL;
	if (p)
		take_qp(id, p);
	if (id->qp_type == IBV_QPT_UD)
		err = p ? cm_sidr_reply(id, CM_SIDR_SUCCESS, p->conn.qkey, p->conn.private_data, p->conn.private_data_len) :
			  cm_sidr_reply(id, CM_SIDR_SUCCESS, 0, NULL, 0);
	else
		err = p ? accept_request(id, p) : accept_reply(id);
	if (err)
		cm_reject(id, CM_REJ_CONSUMER_DEFINED, NULL, 0);
	return err;
}

/* rdma_reject() of core/cma.c, ib_send_cm_rej() */
int cm_reject(struct cm_id *id, uint8_t reason, const void *data, uint8_t len)
{
	if (id->conn == CONN_NONE)
		return EINVAL;
	if (id->qp_type == IBV_QPT_UD)
		return cm_sidr_reply(id, CM_SIDR_REJECT, 0, data, len);
	if (len > CM_REJ_DATA)
		return EINVAL;
	switch (id->conn) {
	case CONN_REQ_SENT:
	case CONN_REQ_RCVD:
	case CONN_REP_RCVD:
		cm_send_reject(id, reason, data, len);
		cm_reset_to_idle(id);
		return 0;
	case CONN_REP_SENT:
		cm_send_reject(id, reason, data, len);
		cm_enter_timewait(id);
		return 0;
	default:
		return EINVAL;
	}
}

/* rdma_disconnect() of core/cma.c: starts it, or answers the peer's start, or nothing. */
int cm_disconnect(struct cm_id *id)
{
	struct cm_message m;

	if (id->conn == CONN_NONE)
		return EINVAL;
	if (id->conn == CONN_DREQ_RCVD) {
		cm_send_plain(id, CM_DREP);
		cm_enter_timewait(id);
	} else if (id->conn == CONN_ESTABLISHED) {
		cm_message_begin(id, &m, CM_DREQ);
		if (cm_keep(id, &m))
			return ENOMEM;
		id->retries = emu.cm_retries;
		id->conn = CONN_DREQ_SENT;
		cm_send_kept(id);
	}
	return 0;
}

/* rdma_notify() of core/cma.c, cm_establish() and cm_migrate() of core/cm.c */
int cm_notify(struct cm_id *id, uint32_t event)
{
	if (!id->dev || id->conn == CONN_NONE || event != IBV_EVENT_COMM_EST)
		return EINVAL; /* IBV_EVENT_PATH_MIG too: there is no alternate path */
	if (id->conn == CONN_ESTABLISHED)
		return EISCONN;
	if (id->conn != CONN_REP_SENT)
		return EINVAL;
	cm_forget_sent(id);
	cm_timer_stop(id);
	id->conn = CONN_ESTABLISHED;
	if (id->state == CM_CONNECT)
		cm_event_plain(id, CM_EV_ESTABLISHED, 0);
	return 0;
}

/* cm_destroy_id() of core/cm.c */
void cm_conn_destroy(struct cm_id *id)
{
	switch (id->conn) {
	case CONN_REQ_SENT:
		cm_send_reject(id, CM_REJ_TIMEOUT, NULL, 0);
		break;
	case CONN_REQ_RCVD:
	case CONN_REP_SENT:
	case CONN_REP_RCVD:
		cm_send_reject(id, CM_REJ_CONSUMER_DEFINED, NULL, 0);
		break;
	case CONN_ESTABLISHED:
		cm_send_plain(id, CM_DREQ);
		break;
	case CONN_DREQ_RCVD:
		cm_send_plain(id, CM_DREP);
		break;
	case CONN_SIDR_REQ_RCVD:
		cm_sidr_reply(id, CM_SIDR_REJECT, 0, NULL, 0);
		break;
	default:
		break;
	}
	id->conn = CONN_IDLE;
}

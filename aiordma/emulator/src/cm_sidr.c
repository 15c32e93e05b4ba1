/* SPDX-License-Identifier: MIT
 * Where a datagram service is: SIDR_REQ and SIDR_REP of core/cm.c, cma_resolve_ib_udp() and cma_sidr_rep_handler() of
 * core/cma.c. */
#define _GNU_SOURCE
#include "cm_message.h"

int cm_sidr_connect(struct cm_id *id, const struct cm_params *p)
{
	struct cm_message *m;

	if (p->conn.private_data_len > CM_SIDR_REQ_DATA)
		return EINVAL;
	m = cm_request_new(id, CM_SIDR_REQ);
	if (!m)
		return ENOMEM;
	m->data_len = p->conn.private_data_len;
	memcpy(m->data, p->conn.private_data, m->data_len);
	id->conn = CONN_SIDR_REQ_SENT;
	/* 1 << (CMA_CM_RESPONSE_TIMEOUT - 8) */
	id->timeout_ms = 1u << (emu.cm_response_timeout - 8);
	id->retries = emu.cm_retries;
	cm_request_send(id);
	return 0;
}

/* cma_send_sidr_rep(), ib_send_cm_sidr_rep() */
int cm_sidr_reply(struct cm_id *id, uint16_t status, uint32_t qkey, const void *data, uint8_t len)
{
	struct cm_message m = { .status = status };
	int err;

	if (status == CM_SIDR_SUCCESS) {
		err = cm_set_qkey(id, qkey);
		if (err)
			return err;
		m.qpn = id->qp_num;
		m.qkey = id->qkey;
	}
	if (len > CM_SIDR_REP_DATA || id->conn != CONN_SIDR_REQ_RCVD)
		return EINVAL;
	m.type = CM_SIDR_REP;
	m.from = id->comm;
	m.to = id->peer_comm;
	memcpy(m.gid, id->sgid.raw, sizeof(m.gid));
	m.data_len = len;
	if (len)
		memcpy(m.data, data, len);
	id->conn = CONN_IDLE;
	cm_send(&id->peer, &m);
	return 0;
}

static void refuse(const struct cm_message *m, uint16_t status)
{
	struct cm_message r = { .status = status };

	cm_reply(m, &r, CM_SIDR_REP);
}

static void request(const struct cm_message *m)
{
	struct rdma_ucm_event_resp resp = { .event = CM_EV_CONNECT_REQUEST };
	struct cm_id *listener = cm_listener_of(m), *id;
	int err;

	if (!listener || m->data_len > CM_SIDR_REQ_DATA) {
		refuse(m, CM_SIDR_UNSUPPORTED);
		return;
	}
	if (cm_sent_again(m, CONN_SIDR_REQ_RCVD))
		return;
	id = cm_request_receive(m, listener, &err);
	if (!id) {
		refuse(m, CM_SIDR_REJECT); /* also with a full backlog: cm_destroy_id() */
		return;
	}
	id->conn = CONN_SIDR_REQ_RCVD;
	resp.param.ud.private_data_len = CM_SIDR_REQ_DATA;
	memcpy(resp.param.ud.private_data, m->data, m->data_len);
	cm_event_push(listener, &resp, id);
}

static void reply(const struct cm_message *m)
{
	struct rdma_ucm_event_resp resp = { .event = CM_EV_ESTABLISHED };
	struct cm_id *id = cm_id_by_comm(m->to);
	int err;

	if (!id || id->conn != CONN_SIDR_REQ_SENT || m->data_len > CM_SIDR_REP_DATA)
		return;
	cm_timer_stop(id);
	cm_forget_sent(id);
	id->conn = CONN_IDLE;
	if (id->state != CM_CONNECT)
		return;
	memcpy(resp.param.ud.private_data, m->data, m->data_len);
	resp.param.ud.private_data_len = CM_SIDR_REP_DATA;
	if (m->status != CM_SIDR_SUCCESS) {
		resp.event = CM_EV_UNREACHABLE;
		resp.status = m->status;
	} else if ((err = cm_set_qkey(id, m->qkey))) {
		resp.event = CM_EV_ADDR_ERROR;
		resp.status = (uint32_t)-err;
	} else {
		memcpy(id->dgid.raw, m->gid, sizeof(m->gid));
		cm_ah_attr(id, &resp.param.ud.ah_attr);
		resp.param.ud.qp_num = m->qpn;
		resp.param.ud.qkey = m->qkey;
	}
	cm_event_push(id, &resp, NULL);
}

void cm_sidr_receive(const struct cm_message *m)
{
	if (m->type == CM_SIDR_REQ)
		request(m);
	else
		reply(m);
}

/* SPDX-License-Identifier: MIT
 * What messages, and their absence, do to a connection, and what core/cma.c makes of it for the program: its events. */
#include "cm_message.h"

#define MRA_MS (1u << (24 - 8)) /* CMA_CM_MRA_SETTING: how long a peer may take that said it needs time */

/* cma_ib_handler() hears of what happens to a connection only as long as it takes it for one. */
static void tell(struct cm_id *id, enum cm_event_type type, int32_t status)
{
	if (id->state == CM_CONNECT)
		cm_event_plain(id, type, status);
}

static void tell_disconnected(struct cm_id *id, int32_t status)
{
	if (id->state != CM_CONNECT)
		return;
	id->state = CM_DISCONNECT;
	cm_event_plain(id, CM_EV_DISCONNECTED, status);
}

/* What a request or a reply said, as rdma_get_cm_event(3) tells it: `room` bytes of private data, zeros behind the peer's. */
static void tell_parameters(struct rdma_ucm_event_resp *resp, const struct cm_id *id, const struct cm_message *m, uint8_t room)
{
	struct rdma_ucm_conn_param *param = &resp->param.conn;

	param->private_data_len = room;
	memcpy(param->private_data, m->data, m->data_len);
	param->responder_resources = id->responder_resources;
	param->initiator_depth = id->initiator_depth;
	param->flow_control = m->flow_control;
	param->rnr_retry_count = id->rnr_retry_count;
	param->srq = m->srq;
	param->qp_num = id->remote_qpn;
	resp->ece.vendor_id = m->ece_vendor;
	resp->ece.attr_mod = m->ece_options;
}

static void refuse(const struct cm_message *m, uint16_t reason)
{
	struct cm_message r = { .status = reason };

	cm_reply(m, &r, CM_REJ);
}

static void got_request(const struct cm_message *m)
{
	struct rdma_ucm_event_resp resp = { .event = CM_EV_CONNECT_REQUEST };
	struct cm_id *listener = cm_listener_of(m), *id;
	int err;

	if (cm_sent_again(m, CONN_REQ_RCVD))
		return;
	if (!listener) {
		refuse(m, CM_REJ_INVALID_SERVICE_ID);
		return;
	}
	id = m->data_len > CM_REQ_DATA ? NULL : cm_request_receive(m, listener, &err);
	if (!id) {
		/* With a full backlog there is no answer, so that it's tried again: cm_destroy_id(). */
		if (m->data_len > CM_REQ_DATA || err != ENOMEM)
			refuse(m, CM_REJ_CONSUMER_DEFINED);
		return;
	}
	id->conn = CONN_REQ_RCVD;
	id->remote_qpn = m->qpn & 0xffffff;
	id->sq_psn = m->psn & 0xffffff;
	/* What the peer answers at a time, we may ask. */
	id->initiator_depth = m->responder_resources;
	id->responder_resources = m->initiator_depth;
	id->retry_count = m->retry_count & 7;
	id->rnr_retry_count = m->rnr_retry_count & 7;
	id->path_mtu = id->mtu;
	id->ack_timeout = cm_ack_timeout(id->packet_life_time);
	id->timeout_ms = cm_exponent_ms(emu.cm_response_timeout);
	id->retries = emu.cm_retries;

	tell_parameters(&resp, id, m, CM_REQ_DATA);
	resp.param.conn.retry_count = id->retry_count;
	cm_event_push(listener, &resp, id);
}

static void got_reply(struct cm_id *id, const struct cm_message *m)
{
	struct rdma_ucm_event_resp resp = { .event = CM_EV_CONNECT_RESPONSE };

	if (id->conn == CONN_ESTABLISHED && m->from == id->peer_comm)
		cm_send_plain(id, CM_RTU);
	else if (id->conn == CONN_REP_RCVD && m->from == id->peer_comm)
		cm_send_plain(id, CM_MRA);
	if (id->conn != CONN_REQ_SENT)
		return;
	cm_forget_sent(id);
	cm_timer_stop(id);
	id->conn = CONN_REP_RCVD;
	id->peer_comm = m->from;
	id->remote_qpn = m->qpn & 0xffffff;
	id->sq_psn = m->psn & 0xffffff;
	id->initiator_depth = m->responder_resources;
	id->responder_resources = m->initiator_depth;
	id->rnr_retry_count = m->rnr_retry_count & 7;
	if (m->mtu)
		id->path_mtu = MIN(id->path_mtu, m->mtu);
	/* A process with other GIDs answers from its own. */
	memcpy(id->dgid.raw, m->gid, sizeof(m->gid));
	if (id->state != CM_CONNECT)
		return;
	tell_parameters(&resp, id, m, CM_REP_DATA);
	cm_event_push(id, &resp, NULL);
}

static void got_reject(struct cm_id *id, const struct cm_message *m)
{
	struct rdma_ucm_event_resp resp = { .event = CM_EV_REJECTED, .status = m->status };

	switch (id->conn) {
	case CONN_REQ_SENT:
	case CONN_REP_SENT:
	case CONN_REQ_RCVD:
		cm_reset_to_idle(id);
		break;
	case CONN_DREQ_SENT:
	case CONN_REP_RCVD:
	case CONN_ESTABLISHED:
		cm_enter_timewait(id);
		break;
	default:
		return;
	}
	if (id->state != CM_CONNECT)
		return;
	resp.param.conn.private_data_len = CM_REJ_DATA;
	memcpy(resp.param.conn.private_data, m->data, MIN(m->data_len, CM_REJ_DATA));
	cm_event_push(id, &resp, NULL);
}

static void got_ready(struct cm_id *id) /* RTU */
{
	if (id->conn != CONN_REP_SENT)
		return;
	cm_forget_sent(id);
	cm_timer_stop(id);
	id->conn = CONN_ESTABLISHED;
	tell(id, CM_EV_ESTABLISHED, 0);
}

static void got_disconnect(struct cm_id *id)
{
	switch (id->conn) {
	case CONN_REP_SENT:
	case CONN_DREQ_SENT:
	case CONN_ESTABLISHED:
		cm_forget_sent(id);
		cm_timer_stop(id);
		id->conn = CONN_DREQ_RCVD;
		tell_disconnected(id, 0);
		break;
	case CONN_TIMEWAIT:
		cm_send_plain(id, CM_DREP);
		break;
	default:
		break;
	}
}

static void got_disconnected(struct cm_id *id) /* DREP */
{
	if (id->conn != CONN_DREQ_SENT && id->conn != CONN_DREQ_RCVD)
		return;
	cm_enter_timewait(id);
	tell_disconnected(id, 0);
}

/* Whom a message comes from must be who the identifier talks to. Before the first reply that is a process only. */
static bool from_its_peer(const struct cm_id *id, const struct cm_message *m)
{
	if (id->peer.slot != m->from_slot || id->peer.generation != m->from_generation)
		return false;
	return id->conn == CONN_REQ_SENT || id->conn == CONN_SIDR_REQ_SENT || id->peer_comm == m->from;
}

void cm_message_receive(const struct cm_message *m)
{
	struct cm_id *id;

	if (m->data_len > CM_MAX_DATA)
		return;
	if (m->type == CM_REQ) {
		got_request(m);
		return;
	}
	id = cm_id_by_comm(m->to);
	/* Who gives up before it has an answer doesn't know whom it asked: cm_acquire_rejected_id(). */
	if (m->type == CM_REJ && !m->to)
		id = cm_id_of_sender(m);
	if (m->type == CM_SIDR_REQ || (m->type == CM_SIDR_REP && id && from_its_peer(id, m))) {
		cm_sidr_receive(m);
		return;
	}
	if (!id || !from_its_peer(id, m)) {
		struct cm_message none = { 0 };

		if (m->type == CM_DREQ) /* cm_issue_drep() */ {
			none.from = m->to;
			cm_reply(m, &none, CM_DREP);
		}
		return;
	}
	id->via = cm_via();
	switch (m->type) {
	case CM_MRA:
		if (id->conn == CONN_REQ_SENT || id->conn == CONN_REP_SENT)
			cm_timer(id, id->timeout_ms + MRA_MS);
		break;
	case CM_REP:
		got_reply(id, m);
		break;
	case CM_REJ:
		got_reject(id, m);
		break;
	case CM_RTU:
		got_ready(id);
		break;
	case CM_DREQ:
		got_disconnect(id);
		break;
	case CM_DREP:
		got_disconnected(id);
		break;
	default:
		break;
	}
}

/* ---------------------------------------------------------------- time, and death */

static bool repeat(struct cm_id *id)
{
	if (!id->retries || !id->sent)
		return false;
	id->retries--;
	if (id->conn == CONN_REQ_SENT || id->conn == CONN_SIDR_REQ_SENT)
		cm_request_send(id);
	else
		cm_send_kept(id);
	return true;
}

/* cm_process_send_error(), cm_timewait_handler(); of an address, process_one_req() in core/addr.c */
void cm_conn_timeout(struct cm_id *id)
{
	switch (id->conn) {
	case CONN_REQ_SENT:
	case CONN_REP_SENT:
	case CONN_SIDR_REQ_SENT:
		if (repeat(id))
			return;
		cm_reset_to_idle(id);
		tell(id, CM_EV_UNREACHABLE, -ETIMEDOUT);
		return;
	case CONN_DREQ_SENT:
		if (repeat(id))
			return;
		cm_enter_timewait(id);
		tell_disconnected(id, -ETIMEDOUT);
		return;
	case CONN_TIMEWAIT:
		id->conn = CONN_IDLE;
		if (id->state == CM_DISCONNECT)
			cm_event_plain(id, CM_EV_TIMEWAIT_EXIT, 0);
		return;
	default:
		break;
	}
	if (id->state == CM_ADDR_QUERY) {
		id->state = CM_ADDR_BOUND;
		cm_event_plain(id, CM_EV_ADDR_ERROR, -ETIMEDOUT);
	}
}

/* On hardware the kernel outlives the process, and closes its identifiers (ucma_close()): the peers hear of it by the
 * messages of cm_conn_destroy(). */
static void peer_closed(struct cm_id *id, void *data)
{
	const uint32_t *via = data;
	struct cm_message rejected = { .type = CM_REJ, .status = CM_REJ_CONSUMER_DEFINED };

	if (id->via != *via)
		return;
	switch (id->conn) {
	case CONN_REQ_RCVD:
		rejected.status = CM_REJ_TIMEOUT;
		__attribute__((fallthrough));
	case CONN_REQ_SENT:
	case CONN_REP_SENT:
	case CONN_REP_RCVD:
		got_reject(id, &rejected);
		break;
	case CONN_ESTABLISHED:
		got_disconnect(id);
		break;
	case CONN_DREQ_SENT:
		got_disconnected(id);
		break;
	case CONN_SIDR_REQ_SENT: {
		struct cm_message no = { .type = CM_SIDR_REP, .status = CM_SIDR_REJECT, .to = id->comm };

		cm_sidr_receive(&no);
		break;
	}
	default:
		break;
	}
}

void cm_link_died(uint32_t via)
{
	cm_ids_each(peer_closed, &via);
}

/* SPDX-License-Identifier: MIT
 * Connections: the communication manager of InfiniBand (core/cm.c; IBTA volume 1, chapter 12), and what core/cma.c makes of
 * its events. A message is repeated when its answer is late; between processes nothing is lost, so that is what happens
 * to a listener with a full backlog, or in a process that is stopped. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "cm.h"

#define MRA_MS (1u << (24 - 8)) /* CMA_CM_MRA_SETTING: how long a peer may take that said it needs time */

static uint32_t exponent_ms(uint32_t e) /* cm_convert_to_ms(): 4.096 us << e */
{
	return e > 8 ? 1u << (MIN(e, 31u) - 8) : 1;
}

/* cm_ack_timeout(): the delay of a ConnectX is 16, see cmd_device.c. */
static uint8_t ack_timeout(uint8_t life_time)
{
	uint32_t delay = 16, t = life_time + 1u;

	if (t >= delay)
		t += delay >= t - 1;
	else
		t = delay + (t >= delay - 1);
	return (uint8_t)MIN(t, 31u);
}

/* ---------------------------------------------------------------- sending */

static void message_begin(const struct cm_id *id, struct cm_message *m, uint32_t type)
{
	memset(m, 0, sizeof(*m));
	m->type = type;
	m->from = id->comm;
	m->to = id->peer_comm;
	memcpy(m->gid, id->sgid.raw, sizeof(m->gid));
}

static bool send_to_peer(struct cm_id *id, const struct cm_message *m)
{
	uint32_t via = cm_send(&id->peer, m);

	if (via)
		id->via = via;
	return via;
}

static void send_plain(struct cm_id *id, uint32_t type)
{
	struct cm_message m;

	message_begin(id, &m, type);
	send_to_peer(id, &m);
}

static void send_reject(struct cm_id *id, uint8_t reason, const void *data, uint8_t len)
{
	struct cm_message m;

	message_begin(id, &m, CM_REJ);
	m.status = reason;
	m.data_len = len;
	if (len)
		memcpy(m.data, data, len);
	send_to_peer(id, &m);
}

void cm_reply(const struct cm_message *to, struct cm_message *m, uint32_t type)
{
	struct registry_peer peer = { .slot = to->from_slot, .generation = to->from_generation };

	m->type = type;
	m->to = to->from;
	cm_send(&peer, m);
}

static void refuse(const struct cm_message *m, uint16_t reason)
{
	struct cm_message r = { .status = reason };

	cm_reply(m, &r, CM_REJ);
}

void cm_forget_sent(struct cm_id *id)
{
	free(id->sent);
	id->sent = NULL;
}

/* Kept, to be sent again. */
static int keep(struct cm_id *id, const struct cm_message *m)
{
	struct cm_message *copy = malloc(sizeof(*copy));

	if (!copy)
		return ENOMEM;
	*copy = *m;
	cm_forget_sent(id);
	id->sent = copy;
	return 0;
}

static void send_kept(struct cm_id *id)
{
	send_to_peer(id, id->sent);
	id->sent->repeated = 1;
	cm_timer(id, id->timeout_ms);
}

static void enter_timewait(struct cm_id *id)
{
	cm_forget_sent(id);
	id->conn = CONN_TIMEWAIT;
	cm_timer(id, exponent_ms(id->ack_timeout));
}

static void reset_to_idle(struct cm_id *id)
{
	cm_forget_sent(id);
	cm_timer_stop(id);
	id->conn = CONN_IDLE;
}

/* ---------------------------------------------------------------- requests, of connections and datagrams */

struct cm_message *cm_request_new(struct cm_id *id, uint32_t type)
{
	struct cm_message m;

	message_begin(id, &m, type);
	m.ps = id->bound_ps;
	m.port = cm_addr_port(&id->dst);
	m.source_port = cm_addr_port(&id->src);
	m.family = (uint8_t)id->src.sa.sa_family;
	cm_addr_bytes(&id->src, m.source);
	cm_addr_bytes(&id->dst, m.destination);
	m.qp_type = id->qp_type;
	m.mtu = id->mtu;
	m.packet_life_time = id->packet_life_time;
	m.traffic_class = id->traffic_class;
	m.sl = id->sl;
	m.hop_limit = id->hop_limit;
	return keep(id, &m) ? NULL : id->sent;
}

/* Each time to who listens then. The refusals are those of cm_req_handler() and cm_sidr_req_handler(); where somebody
 * listens at that port of another address, of cma_ib_id_from_event(). */
void cm_request_send(struct cm_id *id)
{
	struct cm_message *m = id->sent, none = { 0 };
	bool sidr = m->type == CM_SIDR_REQ;
	enum cm_found found;

	cm_timer(id, id->timeout_ms);
	found = cm_port_find(m->ps, m->port, m->family, m->destination, &id->peer, &m->to);
	if (found == CM_FOUND && send_to_peer(id, m)) {
		m->repeated = 1;
		return;
	}
	none.type = sidr ? CM_SIDR_REP : CM_REJ;
	none.to = id->comm;
	if (found == CM_FOUND_OTHER_ADDRESS)
		none.status = sidr ? CM_SIDR_REJECT : CM_REJ_CONSUMER_DEFINED;
	else
		none.status = sidr ? CM_SIDR_UNSUPPORTED : CM_REJ_INVALID_SERVICE_ID;
	id->peer = *cm_self();
	send_to_peer(id, &none);
}

struct cm_id *cm_listener_of(const struct cm_message *m)
{
	struct cm_id *id = cm_id_by_comm(m->to);

	if (!id || id->state != CM_LISTEN || id->bound_ps != m->ps || cm_addr_port(&id->src) != m->port)
		return NULL;
	return id;
}

struct again {
	const struct cm_message *m;
	struct cm_id *found;
};

static void look_for(struct cm_id *id, void *data)
{
	struct again *a = data;

	if (id->conn > CONN_LISTEN && id->peer_comm == a->m->from && id->peer.slot == a->m->from_slot &&
	    id->peer.generation == a->m->from_generation)
		a->found = id;
}

/* A duplicate: cm_dup_req_handler(). */
bool cm_sent_again(const struct cm_message *m, enum cm_conn_state waiting)
{
	struct again a = { .m = m };

	if (!m->repeated)
		return false;
	cm_ids_each(look_for, &a);
	if (!a.found)
		return false;
	if (a.found->conn == waiting && m->type == CM_REQ)
		send_plain(a.found, CM_MRA);
	else if (a.found->conn == CONN_REP_SENT && a.found->sent)
		send_to_peer(a.found, a.found->sent);
	return true;
}

/* cma_ib_req_handler() up to where the kinds differ: the new identifier. ENOMEM: the backlog is full. */
struct cm_id *cm_request_receive(const struct cm_message *m, struct cm_id *listener, int *error)
{
	/* cma_ib_check_req_qp_type() */
	uint8_t type = m->qp_type == IBV_QPT_XRC_SEND ? IBV_QPT_XRC_RECV : m->qp_type;
	struct cm_id *id;

	*error = listener->qp_type && listener->qp_type != type ? EINVAL : 0;
	if (m->family != AF_INET && m->family != AF_INET6)
		*error = EINVAL;
	if (!*error && listener->backlog <= 0)
		*error = ENOMEM;
	if (!*error)
		*error = cm_id_create(listener->file, listener->ps, type, &id);
	if (*error)
		return NULL;
	id->qp_type = type;
	cm_addr_make(&id->src, m->family, m->destination, m->port);
	cm_addr_make(&id->dst, m->family, m->source, m->source_port);
	*error = cm_addr_acquire(id, &id->src);
	if (*error) {
		cm_id_destroy(id);
		return NULL;
	}
	cm_id_path(id);
	/* The two ends may be configured with different MTUs, which on a network one path can't have. */
	id->mtu = MIN(id->mtu, m->mtu);
	id->packet_life_time = MIN(m->packet_life_time, 31);
	id->traffic_class = m->traffic_class;
	id->sl = m->sl & 0xf;
	id->hop_limit = m->hop_limit;
	memcpy(id->dgid.raw, m->gid, sizeof(m->gid));
	id->bound_ps = m->ps;
	id->state = CM_CONNECT;
	id->peer.slot = m->from_slot;
	id->peer.generation = m->from_generation;
	id->peer_comm = m->from;
	id->via = cm_via();
	listener->backlog--;
	return id;
}

/* ---------------------------------------------------------------- what the application does */

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
	id->ack_timeout = ack_timeout(id->packet_life_time);
	id->timeout_ms = exponent_ms(id->packet_life_time) * 2 + exponent_ms(emu.cm_response_timeout);
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
	message_begin(id, &m, CM_REP);
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
	err = keep(id, &m);
	if (err)
		return err;
	id->responder_resources = m.responder_resources;
	id->initiator_depth = m.initiator_depth;
	id->conn = CONN_REP_SENT;
	send_kept(id);
	return 0;
}

static int accept_reply(struct cm_id *id) /* cma_rep_recv(), ib_send_cm_rtu() */
{
	if (id->conn != CONN_REP_RCVD)
		return EINVAL;
	id->conn = CONN_ESTABLISHED;
	send_plain(id, CM_RTU);
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
		send_reject(id, reason, data, len);
		reset_to_idle(id);
		return 0;
	case CONN_REP_SENT:
		send_reject(id, reason, data, len);
		enter_timewait(id);
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
		send_plain(id, CM_DREP);
		enter_timewait(id);
	} else if (id->conn == CONN_ESTABLISHED) {
		message_begin(id, &m, CM_DREQ);
		if (keep(id, &m))
			return ENOMEM;
		id->retries = emu.cm_retries;
		id->conn = CONN_DREQ_SENT;
		send_kept(id);
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
		send_reject(id, CM_REJ_TIMEOUT, NULL, 0);
		break;
	case CONN_REQ_RCVD:
	case CONN_REP_SENT:
	case CONN_REP_RCVD:
		send_reject(id, CM_REJ_CONSUMER_DEFINED, NULL, 0);
		break;
	case CONN_ESTABLISHED:
		send_plain(id, CM_DREQ);
		break;
	case CONN_DREQ_RCVD:
		send_plain(id, CM_DREP);
		break;
	case CONN_SIDR_REQ_RCVD:
		cm_sidr_reply(id, CM_SIDR_REJECT, 0, NULL, 0);
		break;
	default:
		break;
	}
	id->conn = CONN_IDLE;
}

/* ---------------------------------------------------------------- what messages do */

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
	id->ack_timeout = ack_timeout(id->packet_life_time);
	id->timeout_ms = exponent_ms(emu.cm_response_timeout);
	id->retries = emu.cm_retries;

	resp.param.conn.private_data_len = CM_REQ_DATA;
	memcpy(resp.param.conn.private_data, m->data, m->data_len);
	resp.param.conn.responder_resources = id->responder_resources;
	resp.param.conn.initiator_depth = id->initiator_depth;
	resp.param.conn.flow_control = m->flow_control;
	resp.param.conn.retry_count = id->retry_count;
	resp.param.conn.rnr_retry_count = id->rnr_retry_count;
	resp.param.conn.srq = m->srq;
	resp.param.conn.qp_num = id->remote_qpn;
	resp.ece.vendor_id = m->ece_vendor;
	resp.ece.attr_mod = m->ece_options;
	cm_event_push(listener, &resp, id);
}

static void got_reply(struct cm_id *id, const struct cm_message *m)
{
	struct rdma_ucm_event_resp resp = { .event = CM_EV_CONNECT_RESPONSE };

	if (id->conn == CONN_ESTABLISHED && m->from == id->peer_comm)
		send_plain(id, CM_RTU);
	else if (id->conn == CONN_REP_RCVD && m->from == id->peer_comm)
		send_plain(id, CM_MRA);
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
	resp.param.conn.private_data_len = CM_REP_DATA;
	memcpy(resp.param.conn.private_data, m->data, m->data_len);
	resp.param.conn.responder_resources = id->responder_resources;
	resp.param.conn.initiator_depth = id->initiator_depth;
	resp.param.conn.flow_control = m->flow_control;
	resp.param.conn.rnr_retry_count = id->rnr_retry_count;
	resp.param.conn.srq = m->srq;
	resp.param.conn.qp_num = id->remote_qpn;
	resp.ece.vendor_id = m->ece_vendor;
	resp.ece.attr_mod = m->ece_options;
	cm_event_push(id, &resp, NULL);
}

static void got_reject(struct cm_id *id, const struct cm_message *m)
{
	struct rdma_ucm_event_resp resp = { .event = CM_EV_REJECTED, .status = m->status };

	switch (id->conn) {
	case CONN_REQ_SENT:
	case CONN_REP_SENT:
	case CONN_REQ_RCVD:
		reset_to_idle(id);
		break;
	case CONN_DREQ_SENT:
	case CONN_REP_RCVD:
	case CONN_ESTABLISHED:
		enter_timewait(id);
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
		send_plain(id, CM_DREP);
		break;
	default:
		break;
	}
}

static void got_disconnected(struct cm_id *id) /* DREP */
{
	if (id->conn != CONN_DREQ_SENT && id->conn != CONN_DREQ_RCVD)
		return;
	enter_timewait(id);
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
	if (m->type == CM_REJ && !m->to) {
		struct again a = { .m = m };

		cm_ids_each(look_for, &a);
		id = a.found;
	}
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
		send_kept(id);
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
		reset_to_idle(id);
		tell(id, CM_EV_UNREACHABLE, -ETIMEDOUT);
		return;
	case CONN_DREQ_SENT:
		if (repeat(id))
			return;
		enter_timewait(id);
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

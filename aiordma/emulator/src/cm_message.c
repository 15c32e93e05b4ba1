/* SPDX-License-Identifier: MIT
 * The messages of the communication manager of InfiniBand (core/cm.c; IBTA volume 1, chapter 12): sending them, keeping them
 * for another time, requests and what they make. A message is repeated when its answer is late; between processes nothing is
 * lost, so that is what happens to a listener with a full backlog, or in a process that is stopped. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "cm_message.h"

uint32_t cm_exponent_ms(uint32_t e) /* cm_convert_to_ms(): 4.096 us << e */
{
	return e > 8 ? 1u << (MIN(e, 31u) - 8) : 1;
}

/* cm_ack_timeout(): the delay of a ConnectX is 16, see cmd_device.c. */
uint8_t cm_ack_timeout(uint8_t life_time)
{
	uint32_t delay = 16, t = life_time + 1u;

	if (t >= delay)
		t += delay >= t - 1;
	else
		t = delay + (t >= delay - 1);
	return (uint8_t)MIN(t, 31u);
}

/* ---------------------------------------------------------------- sending */

void cm_message_begin(const struct cm_id *id, struct cm_message *m, uint32_t type)
{
	memset(m, 0, sizeof(*m));
	m->type = type;
	m->from = id->comm;
	m->to = id->peer_comm;
	memcpy(m->gid, id->sgid.raw, sizeof(m->gid));
}

bool cm_send_to_peer(struct cm_id *id, const struct cm_message *m)
{
	uint32_t via = cm_send(&id->peer, m);

	if (via)
		id->via = via;
	return via;
}

void cm_send_plain(struct cm_id *id, uint32_t type)
{
	struct cm_message m;

	cm_message_begin(id, &m, type);
	cm_send_to_peer(id, &m);
}

void cm_send_reject(struct cm_id *id, uint8_t reason, const void *data, uint8_t len)
{
	struct cm_message m;

	cm_message_begin(id, &m, CM_REJ);
	m.status = reason;
	m.data_len = len;
	if (len)
		memcpy(m.data, data, len);
	cm_send_to_peer(id, &m);
}

void cm_reply(const struct cm_message *to, struct cm_message *m, uint32_t type)
{
	struct registry_peer peer = { .slot = to->from_slot, .generation = to->from_generation };

	m->type = type;
	m->to = to->from;
	cm_send(&peer, m);
}

void cm_forget_sent(struct cm_id *id)
{
	free(id->sent);
	id->sent = NULL;
}

/* Kept, to be sent again. */
int cm_keep(struct cm_id *id, const struct cm_message *m)
{
	struct cm_message *copy = malloc(sizeof(*copy));

	if (!copy)
		return ENOMEM;
	*copy = *m;
	cm_forget_sent(id);
	id->sent = copy;
	return 0;
}

void cm_send_kept(struct cm_id *id)
{
	cm_send_to_peer(id, id->sent);
	id->sent->repeated = 1;
	cm_timer(id, id->timeout_ms);
}

void cm_enter_timewait(struct cm_id *id)
{
	cm_forget_sent(id);
	id->conn = CONN_TIMEWAIT;
	cm_timer(id, cm_exponent_ms(id->ack_timeout));
}

void cm_reset_to_idle(struct cm_id *id)
{
	cm_forget_sent(id);
	cm_timer_stop(id);
	id->conn = CONN_IDLE;
}

/* ---------------------------------------------------------------- requests, of connections and datagrams */

struct cm_message *cm_request_new(struct cm_id *id, uint32_t type)
{
	struct cm_message m;

	cm_message_begin(id, &m, type);
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
	return cm_keep(id, &m) ? NULL : id->sent;
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
	if (found == CM_FOUND && cm_send_to_peer(id, m)) {
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
	cm_send_to_peer(id, &none);
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

struct cm_id *cm_id_of_sender(const struct cm_message *m)
{
	struct again a = { .m = m };

	cm_ids_each(look_for, &a);
	return a.found;
}

/* A duplicate: cm_dup_req_handler(). */
bool cm_sent_again(const struct cm_message *m, enum cm_conn_state waiting)
{
	struct cm_id *id = m->repeated ? cm_id_of_sender(m) : NULL;

	if (!id)
		return false;
	if (id->conn == waiting && m->type == CM_REQ)
		cm_send_plain(id, CM_MRA);
	else if (id->conn == CONN_REP_SENT && id->sent)
		cm_send_to_peer(id, id->sent);
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

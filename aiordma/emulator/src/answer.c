/* SPDX-License-Identifier: MIT
 * The answering side of a link: requests of another process to our QPs. See wire.h. */
#include <stdlib.h>
#include <string.h>

#include "wire.h"

bool wire_serving;

static struct nic_sgl payload;

/* Nothing in it but what the receiving end can live with, whatever its value. */
static bool sensible(const struct wire_request *w)
{
	if (w->len > WIRE_SLICE || w->msg_len > 1u << 31 || w->off > w->msg_len || w->len > w->msg_len - w->off)
		return false;
	if (w->flags & WIRE_PIECES_FOLLOW)
		return w->npieces && w->npieces <= WIRE_PIECES;
	return w->len <= WIRE_PAYLOAD || w->opcode == MLX5_OPCODE_RDMA_READ;
}

static bool take_payload(struct wire_link *l, const struct wire_request *w, struct wire_slot *s)
{
	const struct wire_piece *p = (const void *)s->payload;
	uint64_t len = 0;

	sgl_reset(&payload);
	if (w->opcode == MLX5_OPCODE_RDMA_READ)
		return true;
	if (!(w->flags & WIRE_PIECES_FOLLOW))
		return sgl_add(&payload, s->payload, w->len);
	payload.owner = &l->memory;
	for (uint32_t i = 0; i < w->npieces; i++) {
		struct wire_piece one = p[i];

		if (one.len > WIRE_SLICE || !sgl_add(&payload, (uint8_t *)(uintptr_t)one.address, one.len))
			return false;
		len += one.len;
	}
	return len >= w->len;
}

/* A READ's answer: where its bytes are, or themselves. */
static enum nic_reply give_data(struct wire_link *l, const struct wire_request *w, uint32_t slot, struct wire_answer *a)
{
	struct wire_slot *s = &l->theirs->slots[slot];
	struct wire_piece *p = (void *)s->payload;
	static struct nic_sgl to;
	enum nic_copied copied;

	if (w->flags & WIRE_WANT_PIECES && payload.n <= WIRE_PIECES) {
		a->npieces = payload.n;
		for (uint32_t i = 0; i < payload.n; i++)
			p[i] = (struct wire_piece){ (uintptr_t)payload.v[i].p, payload.v[i].len };
		return REPLY_ACK;
	}
	if (w->flags & WIRE_WANT_PIECES) {
		/* It's there until the slot is used again. */
		l->bounce[slot] = foreign_gather(&payload, w->len, &copied);
		if (!l->bounce[slot])
			return REPLY_NAK_OPERATION;
		a->npieces = 1;
		p[0] = (struct wire_piece){ (uintptr_t)l->bounce[slot], w->len };
		return REPLY_ACK;
	}
	sgl_reset(&to);
	if (w->len > WIRE_PAYLOAD || !sgl_add(&to, s->payload, WIRE_PAYLOAD))
		return REPLY_NAK_INVALID;
	return fault_guard_copy(&to, &payload, w->len) == COPY_DONE ? REPLY_ACK : REPLY_NAK_OPERATION;
}

static void serve(struct wire_link *l, uint32_t slot)
{
	struct wire_slot *s = &l->theirs->slots[slot];
	struct wire_answer a = { .reply = REPLY_NONE };
	struct wire_request w;
	union ibv_gid sgid, dgid;
	struct nic_route to;

	memcpy(&w, &s->request, sizeof(w));
	free(l->bounce[slot]);
	l->bounce[slot] = NULL;
	memcpy(sgid.raw, w.sgid, sizeof(sgid.raw));
	memcpy(dgid.raw, w.dgid, sizeof(dgid.raw));

	struct nic_req req = {
		.opcode = w.opcode,
		.first = w.flags & WIRE_FIRST,
		.last = w.flags & WIRE_LAST,
		.solicited = w.flags & WIRE_SOLICITED,
		.imm = w.imm,
		.src_qpn = w.src_qpn & 0xffffff,
		.src_stream = w.src_stream,
		.dst_qpn = w.dst_qpn & 0xffffff,
		.psn = w.psn,
		.packets = w.packets,
		.src_type = w.src_type,
		.src_mtu = w.src_mtu,
		.msg_len = w.msg_len,
		.off = w.off,
		.len = w.len,
		.raddr = w.raddr,
		.rkey = w.rkey,
		.swap_add = w.swap_add,
		.compare = w.compare,
		.result = &a.result,
		.qkey = w.qkey,
		.srqn = w.srqn & 0xffffff,
		.dc_key = w.dc_key,
		.sgid = &sgid,
		.dgid = &dgid,
		.traffic_class = w.traffic_class,
		.hop_limit = w.hop_limit,
		.gid_type = w.gid_type,
		.sl = w.sl,
	};

	to = fabric_destination(&dgid, w.gid_type);
	if (to.port_num && sensible(&w) && take_payload(l, &w, s)) {
		a.reply = (uint8_t)fabric_deliver(to.dev, to.port_num, &req, &payload, &a.rnr_timer);
		if (a.reply == REPLY_ACK && w.opcode == MLX5_OPCODE_RDMA_READ && w.len)
			a.reply = (uint8_t)give_data(l, &w, slot, &a);
		if (a.reply == REPLY_OUT_OF_REACH)
			wire_bar(l, l->side);
	}
	memcpy(&s->answer, &a, sizeof(a));
}

bool wire_take_requests(struct wire_link *l, uint32_t head)
{
	bool found = false;
	uint32_t slot;

	for (uint32_t i = 0; i < WIRE_SLOTS && wire_next(&l->theirs->asked, head, &l->requests_seen, &slot); i++) {
		uint32_t state = SLOT_ASKED;

		if (!found)
			engine_read_clock();
		found = true;
		if (slot >= WIRE_SLOTS)
			continue;
		if (__atomic_compare_exchange_n(&l->theirs->slots[slot].state, &state, SLOT_TAKEN, false,
						__ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
			wire_serving = true;
			serve(l, slot);
			wire_serving = false;
			__atomic_store_n(&l->theirs->slots[slot].state, SLOT_ANSWERED, __ATOMIC_RELEASE);
		}
		wire_put(&l->theirs->answered, slot);
	}
	if (found)
		wire_call(l);
	return found;
}

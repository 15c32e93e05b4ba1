/* SPDX-License-Identifier: MIT
 * The asking side of a link: requests of our QPs to those of another process. See wire.h. */
#include <stdlib.h>
#include <string.h>

#include "wire.h"

/* How long the other side may take for a request that it has begun, while we want to cancel it: a slice is copied in
 * well under a millisecond, but its thread can be off the CPU in the middle for as long as a busy machine likes. All of this
 * device stands still meanwhile, so a process that was stopped there isn't waited for until it goes on. */
#define CANCEL_NS 200000000u
#define SPIN_NS 50000u

static bool has_payload(const struct nic_req *req)
{
	return req->opcode != MLX5_OPCODE_RDMA_READ && req->opcode != MLX5_OPCODE_ATOMIC_CS &&
	       req->opcode != MLX5_OPCODE_ATOMIC_FA;
}

static bool can_read(const struct wire_link *l, uint32_t side)
{
	return !l->barred[side] && __atomic_load_n(&l->shared->reach[side], __ATOMIC_ACQUIRE) == REACH_YES;
}

void wire_bar(struct wire_link *l, uint32_t side)
{
	if (!l->barred[side])
		emu_log(EMU_INFO, "payload is copied twice from now on: process %d %s", l->peer.pid,
			side == l->side ? "doesn't let its memory be read any more" : "may not read our memory any more");
	l->barred[side] = true;
	__atomic_store_n(&l->shared->reach[side], REACH_NO, __ATOMIC_RELEASE);
}

/* Payload can be read where it lies by the side that it goes to. */
static bool by_pieces(const struct wire_link *l, const struct nic_req *req)
{
	return can_read(l, has_payload(req) ? !l->side : l->side);
}

uint64_t wire_slice(struct wire_link *l, const struct nic_req *req)
{
	return by_pieces(l, req) ? WIRE_SLICE : WIRE_PAYLOAD;
}

/* ---------------------------------------------------------------- slots */

void wire_release(struct wire_link *l, uint32_t slot)
{
	struct emu_list *first = l->full.next;

	free(l->sent[slot]);
	l->sent[slot] = NULL;
	l->asking[slot] = NULL;
	if (l->stuck == slot)
		l->stuck = WIRE_SLOTS;
	l->busy[slot] = false;
	l->unused[l->nunused++] = (uint16_t)slot;
	if (list_empty(&l->full))
		return;
	list_del(first);
	container_of(first, struct nic_qp, wire_wait)->wire = WIRE_IDLE;
	engine_answer(container_of(first, struct nic_qp, wire_wait)->qp);
}

static enum nic_reply wait_for_room(struct emu_qp *qp, struct wire_link *l)
{
	nic(qp)->wire = WIRE_FULL;
	nic(qp)->wire_link = l;
	list_add_tail(&l->full, &nic(qp)->wire_wait);
	return REPLY_PENDING;
}

/* ---------------------------------------------------------------- asking */

static enum nic_copied put_bytes(struct wire_slot *s, const struct nic_sgl *data, uint64_t len)
{
	static struct nic_sgl to;

	sgl_reset(&to);
	if (!sgl_add(&to, s->payload, WIRE_PAYLOAD))
		return COPY_BAD_TARGET;
	return fault_guard_copy(&to, data, len);
}

static enum nic_copied put_pieces(struct wire_link *l, uint32_t slot, struct wire_request *w, const struct nic_sgl *data,
				  uint64_t len)
{
	struct wire_piece *p = (void *)l->mine->slots[slot].payload;
	enum nic_copied copied;

	w->flags |= WIRE_PIECES_FOLLOW;
	if (data->n <= WIRE_PIECES) {
		w->npieces = data->n;
		for (uint32_t i = 0; i < data->n; i++)
			p[i] = (struct wire_piece){ (uintptr_t)data->v[i].p, data->v[i].len };
		return COPY_DONE;
	}
	l->sent[slot] = foreign_gather(data, len, &copied);
	if (!l->sent[slot])
		return copied;
	w->npieces = 1;
	p[0] = (struct wire_piece){ (uintptr_t)l->sent[slot], len };
	return COPY_DONE;
}

static void fill(struct wire_request *w, const struct nic_req *req)
{
	*w = (struct wire_request){
		.opcode = req->opcode,
		.flags = (uint8_t)((req->first ? WIRE_FIRST : 0) | (req->last ? WIRE_LAST : 0) |
				   (req->solicited ? WIRE_SOLICITED : 0)),
		.src_type = req->src_type,
		.src_mtu = req->src_mtu,
		.traffic_class = req->traffic_class,
		.hop_limit = req->hop_limit,
		.gid_type = req->gid_type,
		.sl = req->sl,
		.imm = req->imm,
		.src_qpn = req->src_qpn,
		.src_stream = req->src_stream,
		.dst_qpn = req->dst_qpn,
		.psn = req->psn,
		.packets = req->packets,
		.rkey = req->rkey,
		.qkey = req->qkey,
		.srqn = req->srqn,
		.msg_len = req->msg_len,
		.off = req->off,
		.len = req->len,
		.raddr = req->raddr,
		.swap_add = req->swap_add,
		.compare = req->compare,
		.dc_key = req->dc_key,
	};
	memcpy(w->sgid, req->sgid->raw, sizeof(w->sgid));
	memcpy(w->dgid, req->dgid->raw, sizeof(w->dgid));
}

static enum nic_copied post(struct wire_link *l, uint32_t slot, const struct nic_req *req, const struct nic_sgl *data)
{
	struct wire_slot *s = &l->mine->slots[slot];
	bool far = req->len > WIRE_INLINE && by_pieces(l, req);
	enum nic_copied copied = COPY_DONE;

	fill(&s->request, req);
	l->pieces[slot] = far;
	if (has_payload(req) && far)
		copied = put_pieces(l, slot, &s->request, data, req->len);
	else if (has_payload(req) && req->len)
		copied = put_bytes(s, data, req->len);
	else if (far)
		s->request.flags |= WIRE_WANT_PIECES;
	if (copied != COPY_DONE) {
		wire_release(l, slot);
		return copied;
	}
	__atomic_store_n(&s->state, SLOT_ASKED, __ATOMIC_RELEASE);
	wire_put(&l->mine->asked, slot);
	return COPY_DONE;
}

static uint32_t take_slot(struct wire_link *l)
{
	uint32_t slot = l->unused[--l->nunused];

	l->busy[slot] = true;
	return slot;
}

enum nic_reply wire_ask(struct emu_qp *qp, struct wire_link *l, struct nic_req *req, struct nic_sgl *data)
{
	struct nic_qp *n = nic(qp);
	uint32_t slot;

	n->wire_len = (uint32_t)req->len;
	if (!l->nunused)
		return wait_for_room(qp, l);
	slot = take_slot(l);
	if (post(l, slot, req, data) != COPY_DONE)
		return REPLY_BAD_SOURCE;
	wire_call(l);
	/* To the unreliable it makes no difference what the answer is, once their payload is in safety. */
	if ((qp->type == IBV_QPT_UC || qp->type == IBV_QPT_UD) &&
	    !(l->mine->slots[slot].request.flags & WIRE_PIECES_FOLLOW))
		return REPLY_ACK;
	l->asking[slot] = qp;
	n->wire = WIRE_ASKED;
	n->wire_link = l;
	n->wire_slot = (uint16_t)slot;
	return REPLY_PENDING;
}

bool wire_post(struct emu_qp *qp, struct wire_link *l, struct nic_req *req, struct nic_sgl *data, uint16_t *slot)
{
	if (!l->nunused)
		return false;
	*slot = (uint16_t)take_slot(l);
	if (post(l, *slot, req, data) != COPY_DONE)
		return false;
	wire_call(l);
	l->asking[*slot] = qp;
	return true;
}

/* ---------------------------------------------------------------- answers */

/* Where a READ's bytes are. */
static bool take_data(struct wire_link *l, uint32_t slot, uint32_t npieces, uint64_t len, struct nic_sgl *data)
{
	struct wire_slot *s = &l->mine->slots[slot];
	const struct wire_piece *p = (const void *)s->payload;

	sgl_reset(data);
	if (!npieces)
		return len <= WIRE_PAYLOAD && sgl_add(data, s->payload, len);
	if (npieces > WIRE_PIECES || !l->pieces[slot])
		return false;
	data->owner = &l->memory;
	for (uint32_t i = 0; i < npieces; i++) {
		struct wire_piece one = p[i];

		if (!sgl_add(data, (uint8_t *)(uintptr_t)one.address, one.len))
			return false;
		len -= one.len < len ? one.len : len;
	}
	return !len;
}

enum nic_reply wire_reply(const struct wire_link *l, uint32_t slot)
{
	uint8_t reply = __atomic_load_n(&l->mine->slots[slot].answer.reply, __ATOMIC_RELAXED);

	if (reply == REPLY_OUT_OF_REACH && !l->pieces[slot])
		return REPLY_NONE; /* it has the payload */
	return reply <= REPLY_OUT_OF_REACH ? (enum nic_reply)reply : REPLY_NONE;
}

bool wire_data(struct wire_link *l, const struct wire_flight *f, struct nic_sgl *data, uint64_t *result)
{
	struct wire_answer a;

	memcpy(&a, &l->mine->slots[f->slot].answer, sizeof(a));
	*result = a.result;
	return f->opcode != MLX5_OPCODE_RDMA_READ || !f->len || take_data(l, f->slot, a.npieces, f->len, data);
}

enum nic_reply wire_answered(struct emu_qp *qp, struct nic_req *req, struct nic_sgl *data, uint8_t *rnr_timer)
{
	struct nic_qp *n = nic(qp);
	struct wire_answer a;

	if (n->wire != WIRE_ANSWERED)
		return REPLY_PENDING;
	memcpy(&a, &n->wire_link->mine->slots[n->wire_slot].answer, sizeof(a));
	a.reply = (uint8_t)wire_reply(n->wire_link, n->wire_slot);
	n->wire_waits = false;
	*rnr_timer = a.rnr_timer;
	if (req->result)
		*req->result = a.result;
	/* What the slot has is good until somebody asks for something in it, which isn't before this turn has ended. */
	if (a.reply == REPLY_ACK && req->opcode == MLX5_OPCODE_RDMA_READ && req->len &&
	    !take_data(n->wire_link, n->wire_slot, a.npieces, req->len, data))
		a.reply = REPLY_NAK_OPERATION;
	if (a.reply == REPLY_OUT_OF_REACH)
		wire_bar(n->wire_link, !n->wire_link->side);
	n->wire = WIRE_IDLE;
	wire_release(n->wire_link, n->wire_slot);
	return a.reply;
}

bool wire_take_answers(struct wire_link *l)
{
	uint32_t slot, head = __atomic_load_n(&l->mine->answered.head, __ATOMIC_ACQUIRE);
	bool found = false;

	/* `busy` and `asking` are ours alone: an answer to what nobody asked is none. */
	for (uint32_t i = 0; i < WIRE_SLOTS && wire_next(&l->mine->answered, head, &l->answers_seen, &slot); i++) {
		struct emu_qp *qp;

		found = true;
		if (slot >= WIRE_SLOTS || !l->busy[slot])
			continue;
		qp = l->asking[slot];
		if (!qp) {
			wire_release(l, slot);
		} else if (nic(qp)->nflights) {
			flight_answered(qp, slot);
		} else if (nic(qp)->wire == WIRE_ASKED && nic(qp)->wire_slot == slot) {
			nic(qp)->wire = WIRE_ANSWERED;
			engine_answer(qp);
		}
	}
	return found;
}

/* ---------------------------------------------------------------- giving up */

static bool is_taken(const struct wire_link *l, uint32_t slot)
{
	return __atomic_load_n(&l->mine->slots[slot].state, __ATOMIC_ACQUIRE) == SLOT_TAKEN;
}

/* The other side has begun: let it end. It does one request at a time: while it stands in the middle of one that was waited
 * for in vain, it's in the middle of no other, whatever their slots say. */
static void wait_until_done(struct wire_link *l, uint32_t slot)
{
	const struct timespec a_moment = { .tv_nsec = SPIN_NS };
	uint64_t begin = now_ns(), passed;

	if (l->stuck < WIRE_SLOTS && is_taken(l, l->stuck))
		return;
	while (is_taken(l, slot)) {
		passed = now_ns() - begin;
		if (passed >= CANCEL_NS) {
			l->stuck = slot;
			return;
		}
		if (passed < SPIN_NS)
			cpu_relax();
		else
			clock_nanosleep(CLOCK_MONOTONIC, 0, &a_moment, NULL);
	}
}

bool wire_take_back(struct wire_link *l, uint32_t slot)
{
	uint32_t state = SLOT_ASKED;

	if (!__atomic_compare_exchange_n(&l->mine->slots[slot].state, &state, SLOT_CANCELLED, false, __ATOMIC_SEQ_CST,
					 __ATOMIC_SEQ_CST))
		return false;
	l->asking[slot] = NULL; /* it's free again when the other side has passed over it */
	return true;
}

void wire_abandon(struct wire_link *l, uint32_t slot)
{
	if (wire_take_back(l, slot))
		return;
	wait_until_done(l, slot);
	l->asking[slot] = NULL;
}

void wire_cancel(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);

	list_del(&n->wire_wait);
	n->wire_waits = false;
	if (n->nflights)
		flights_cancel(qp);
	if (n->wire == WIRE_ANSWERED)
		wire_release(n->wire_link, n->wire_slot);
	else if (n->wire == WIRE_ASKED)
		wire_abandon(n->wire_link, n->wire_slot);
	n->wire = WIRE_IDLE;
}

void wire_lose(struct wire_link *l)
{
	for (uint32_t i = 0; i < WIRE_SLOTS; i++) {
		if (l->asking[i] && nic(l->asking[i])->nflights)
			flights_lose(l->asking[i]);
		else if (l->asking[i])
			nic(l->asking[i])->wire = WIRE_LOST;
		free(l->sent[i]);
		free(l->bounce[i]);
	}
	while (!list_empty(&l->full)) {
		struct nic_qp *n = container_of(l->full.next, struct nic_qp, wire_wait);

		list_del(&n->wire_wait);
		n->wire = WIRE_LOST;
	}
}

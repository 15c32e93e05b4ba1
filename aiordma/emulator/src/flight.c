/* SPDX-License-Identifier: MIT
 * Several requests of a QP under way to another process at a time.
 *
 * Asking and waiting for the answer costs the time of a message to the other process and back, and on a busy machine both
 * sides' turns on a CPU. So on a reliable connection requests, the slices of long messages among them, are sent on their way
 * one behind the other, as a NIC does, and completed in order when their answers are there. Their packet sequence numbers, and
 * within a message the offsets, see to it that after one that wasn't done nothing behind it is done either (responder.c). That
 * one, with all behind it, then goes back to the send queue, and is dealt with as if it had been sent alone. */
#include <stdlib.h>
#include <string.h>

#include "wire.h"

static bool is_atomic(uint8_t opcode)
{
	return opcode == MLX5_OPCODE_ATOMIC_CS || opcode == MLX5_OPCODE_ATOMIC_FA;
}

static struct wire_flight *nth(struct nic_qp *n, uint32_t i)
{
	return &n->flights[(n->flight_first + i) % WIRE_FLIGHTS];
}

bool flight_room(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);

	if (!n->flights)
		n->flights = calloc(WIRE_FLIGHTS, sizeof(*n->flights));
	return n->flights && n->nflights < WIRE_FLIGHTS;
}

enum nic_step flight_launch(struct emu_qp *qp, const struct nic_wqe *w, struct wire_link *l, struct nic_req *req,
			    struct nic_sgl *data)
{
	struct nic_qp *n = nic(qp);
	struct wire_flight *f = nth(n, n->nflights);

	*f = (struct wire_flight){
		.ci = qp->sq_ci,
		.nbb = w->nbb,
		.psn = n->tx_psn,
		.len = (uint32_t)req->len,
		.msg_len = (uint32_t)req->msg_len,
		.off = req->off,
		.last = req->last,
		.counter = w->counter,
		.opcode = w->opcode,
		.flags = w->flags,
		.lands = w->opcode == MLX5_OPCODE_RDMA_READ || is_atomic(w->opcode),
	};
	f->reads = f->lands && f->last;
	f->far = f->reads && w->opcode == MLX5_OPCODE_RDMA_READ && req->msg_len > WIRE_INLINE;
	if (!wire_post(qp, l, req, data, &f->slot))
		return STEP_LANDING;
	if (!n->nflights++) {
		n->flight_tries = 0;
		n->flight_deadline = requester_ack_deadline(qp);
	}
	n->flight_reads = (uint8_t)(n->flight_reads + f->reads);
	n->flight_far = (uint8_t)(n->flight_far + f->far);
	n->wire_link = l;
	if (!f->last) {
		qp->progress += req->len;
		return STEP_LAUNCHED_SLICE;
	}
	n->tx_psn = (n->tx_psn + req->packets) & 0xffffff;
	n->tx_messages++;
	return STEP_LAUNCHED;
}

static void uncount(struct nic_qp *n, const struct wire_flight *f)
{
	n->flight_reads = (uint8_t)(n->flight_reads - f->reads);
	n->flight_far = (uint8_t)(n->flight_far - f->far);
}

/* The first, which was done: what it brought is where it's wanted. */
static void finish_first(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);
	struct wire_flight f = *nth(n, 0);

	wire_release(n->wire_link, f.slot);
	n->flight_first++;
	n->nflights--;
	uncount(n, &f);
	if (f.last)
		sq_complete_flight(qp, &f);
}

static bool first_is_done(struct emu_qp *qp)
{
	const struct wire_flight *f = nth(nic(qp), 0);

	return wire_reply(nic(qp)->wire_link, f->slot) == REPLY_ACK && (!f->lands || requester_land(qp, f));
}

/* The last `count` go back to the send queue. Their slots are somebody else's concern. */
static void take_back(struct emu_qp *qp, uint32_t count)
{
	struct nic_qp *n = nic(qp);

	if (!count)
		return;
	for (uint32_t i = 1; i <= count; i++) {
		uncount(n, nth(n, n->nflights - i));
		n->tx_messages -= nth(n, n->nflights - i)->last;
	}
	n->nflights = (uint8_t)(n->nflights - count);
	qp->sq_ci = nth(n, n->nflights)->ci;
	qp->progress = nth(n, n->nflights)->off;
	n->tx_psn = nth(n, n->nflights)->psn;
	n->decoded = 0;
}

/* The first is from now on the one request that is under way. */
static void go_on_alone(struct emu_qp *qp, enum nic_wire_state state)
{
	struct nic_qp *n = nic(qp);

	n->wire = (uint8_t)state;
	n->wire_slot = nth(n, 0)->slot;
	n->wire_len = nth(n, 0)->len;
	n->wire_waits = false;
	take_back(qp, n->nflights);
	if (qp->stall == STALL_WIRE)
		qp->stall = STALL_NONE;
}

/* No answer in time. What the other side hasn't begun is taken back; if that leaves the first, it's waited for as one
 * that was sent alone. If it leaves more, those have been done, or will be in an instant; or the link is full of rubbish,
 * and the first fails. */
static void overdue(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);
	bool hopeless = n->flight_tries++ >= qp->retry_cnt;

	while (n->nflights > 1 && wire_take_back(n->wire_link, nth(n, n->nflights - 1)->slot))
		take_back(qp, 1);
	n->flight_deadline = requester_ack_deadline(qp);
	if (n->nflights > 1 && !hopeless)
		return;
	for (uint32_t i = n->nflights - 1u; i; i--)
		wire_abandon(n->wire_link, nth(n, i)->slot);
	go_on_alone(qp, WIRE_ASKED);
	qp->stall = STALL_WIRE;
	n->wire_waits = true;
	n->wire_tries = (uint8_t)(qp->retry_cnt - (n->flight_tries - 1u));
	n->wire_deadline = engine_now();
	n->flight_tries = 0;
}

bool flights_can_land(const struct emu_qp *qp)
{
	return nth(nic(qp), 0)->answered;
}

void flights_land(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);
	bool any = false, slice = false;

	/* Of a long READ one slice a turn: the next is asked for before the one that is there already is copied. */
	while (n->nflights && nth(n, 0)->answered && !slice) {
		slice = nth(n, 0)->lands && !nth(n, 0)->last && nth(n, 0)->len > WIRE_PAYLOAD;
		if (!first_is_done(qp)) {
			for (uint32_t i = n->nflights - 1; i; i--)
				wire_abandon(n->wire_link, nth(n, i)->slot);
			go_on_alone(qp, WIRE_ANSWERED);
			return;
		}
		finish_first(qp);
		any = true;
	}
	if (any) {
		n->flight_tries = 0;
		n->flight_deadline = requester_ack_deadline(qp);
		if (qp->stall == STALL_WIRE)
			qp->stall = STALL_NONE;
	}
	if (n->nflights && engine_now() >= n->flight_deadline)
		overdue(qp);
}

void flight_answered(struct emu_qp *qp, uint32_t slot)
{
	struct nic_qp *n = nic(qp);

	/* Answers come in the order of requests, so it's among the first that have none. */
	for (uint32_t i = 0; i < n->nflights; i++) {
		if (nth(n, i)->slot != slot)
			continue;
		nth(n, i)->answered = true;
		if (!i)
			engine_answer(qp);
		return;
	}
}

void flights_cancel(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);

	while (n->nflights && nth(n, 0)->answered && first_is_done(qp))
		finish_first(qp);
	for (uint32_t i = n->nflights; i--;)
		wire_abandon(n->wire_link, nth(n, i)->slot);
	take_back(qp, n->nflights);
}

void flights_lose(struct emu_qp *qp)
{
	go_on_alone(qp, WIRE_LOST);
}

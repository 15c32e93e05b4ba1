/* SPDX-License-Identifier: MIT
 * Faults of work requests.
 *
 * Rules are asked when a work request has come to the head of its queue, once, and again for each time that a rule has
 * made its request get lost or be refused: that is a new request on the wire. A request that the peer itself puts off
 * (it has no receive) isn't.
 *
 * The order within a queue is kept, whatever is put off: on a reliable connection nothing else can be seen, as the
 * responder answers a request that is out of sequence with a NAK and does nothing else with it (Shanley, "InfiniBand
 * Network Architecture", table 17-7; rxe, check_psn()), and the requester begins again with the missing one. What is
 * reordered are work requests of different queues. */
#include <stdlib.h>

#include "inject.h"
#include "nic.h"

#define MARKS 32u

/* What rules have to do with a QP. Made when a rule is in force and the QP runs. */
struct inject_qp {
	uint32_t epoch;
	/* the WQE at the head of the queue */
	enum inject_kind action;
	uint8_t syndrome, timer;
	bool started;
	uint32_t held_by, timed_by, reordered_by; /* rules; 0: none */
	uint64_t due;				  /* it isn't executed before */
	uint64_t overtaken, overtaken_until;
	uint64_t retry; /* a rule had its request lost or refused: it goes out again then; 0: no */
	bool parked;	/* it was on its way when it was held: this is where its wait goes on */
	uint64_t parked_deadline;
	/* of each rule with a chance: how many matches it had here */
	struct {
		uint32_t id;
		uint64_t n;
	} *counts;
	uint32_t ncounts;
	/* When the device saw the doorbell record change, and to what. */
	struct {
		uint16_t producer;
		uint64_t at;
	} marks[MARKS];
	uint32_t first_mark, nmarks;
};

static uint64_t started[EMU_MAX_DEVICES];

/* Who is being overtaken because of a rule; and never two at once, which would wait for each other. */
static struct {
	uint32_t id;
	struct emu_qp *qp;
} waiting[8];

static struct inject_qp *state_of(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);

	if (!n->inject)
		n->inject = calloc(1, sizeof(*n->inject));
	if (n->inject && n->inject->epoch != inject_epoch) {
		n->inject->epoch = inject_epoch;
		n->inject->nmarks = 0;
		n->decoded &= (uint8_t)~(WQE_HOLD_DECIDED | WQE_DECIDED);
	}
	return n->inject;
}

void inject_forget(struct emu_qp *qp)
{
	struct inject_qp *i = nic(qp)->inject;

	for (unsigned k = 0; k < sizeof(waiting) / sizeof(waiting[0]); k++)
		if (waiting[k].qp == qp)
			waiting[k].qp = NULL;
	if (i)
		free(i->counts);
	free(i);
	nic(qp)->inject = NULL;
}

void inject_reset(struct emu_qp *qp)
{
	struct inject_qp *i = nic(qp)->inject;

	if (!i)
		return;
	i->nmarks = 0;
	i->parked = false;
}

/* ---------------------------------------------------------------- since when it has been there */

static void note_posts(struct emu_qp *qp, struct inject_qp *i)
{
	uint16_t producer;
	uint32_t last = (i->first_mark + i->nmarks - 1) % MARKS;

	/* Before RTS the record is the application's: libmlx5 clears it some time after the command that reset the QP. */
	if (!qp->sq_nbb || !qp->db || qp->state < IBV_QPS_RTS)
		return;
	producer = (uint16_t)load_be32(&qp->db[1]);
	if (producer == (i->nmarks ? i->marks[last].producer : qp->sq_ci))
		return;
	/* Without room for one more those of the last are taken for later than they are. */
	if (i->nmarks < MARKS) {
		last = (i->first_mark + i->nmarks) % MARKS;
		i->nmarks++;
	}
	i->marks[last].producer = producer;
	/* Read after the record, so never before the post. */
	i->marks[last].at = now_ns();
}

static uint64_t posted_at(const struct emu_qp *qp, struct inject_qp *i)
{
	while (i->nmarks) {
		uint16_t ahead = (uint16_t)(i->marks[i->first_mark].producer - qp->sq_ci);

		if (ahead && ahead <= UINT16_MAX / 2 + 1u)
			return i->marks[i->first_mark].at;
		i->first_mark = (i->first_mark + 1) % MARKS;
		i->nmarks--;
	}
	return now_ns();
}

bool inject_look_(struct emu_qp *qp)
{
	struct inject_qp *i = state_of(qp);

	if (i)
		note_posts(qp, i);
	return !inject_hung_(qp);
}

/* ---------------------------------------------------------------- which rules */

#define BIT(name) (1ull << MLX5_OPCODE_##name)
#define RECEIVED (BIT(SEND) | BIT(SEND_IMM) | BIT(SEND_INVAL) | BIT(RDMA_WRITE_IMM)) /* they need a receive */
#define KEYED (BIT(RDMA_WRITE) | BIT(RDMA_WRITE_IMM) | BIT(RDMA_READ) | BIT(ATOMIC_CS) | BIT(ATOMIC_FA))
#define SENT (RECEIVED | KEYED)

static bool reliable(const struct emu_qp *qp)
{
	return qp->type != IBV_QPT_UC && qp->type != IBV_QPT_UD;
}

static uint64_t may_fail(const struct emu_qp *qp, uint8_t syndrome)
{
	switch (syndrome) {
	case MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR:
		return reliable(qp) ? KEYED : 0;
	case MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR:
		return reliable(qp) ? RECEIVED : 0;
	case MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR:
	case MLX5_CQE_SYNDROME_REMOTE_OP_ERR:
	case MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR:
	case MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR:
	case MLX5_CQE_SYNDROME_BAD_RESP_ERR:
		return reliable(qp) ? SENT : 0;
	case MLX5_CQE_SYNDROME_MW_BIND_ERR:
		return BIT(UMR);
	default:
		return ~0ull;
	}
}

/* What can come to such a fault at all. */
static uint64_t possible(const struct emu_qp *qp, const struct inject_rule *r)
{
	switch (r->kind) {
	case INJECT_DROP:
		return SENT;
	case INJECT_DROP_ANSWER:
		return qp->type == IBV_QPT_RC || qp->type == IBV_QPT_XRC_SEND ? SENT : 0;
	case INJECT_RNR:
		return reliable(qp) ? RECEIVED : 0;
	case INJECT_FAIL:
		return may_fail(qp, r->syndrome);
	default:
		return ~0ull;
	}
}

static bool matches(const struct inject_rule *r, const struct emu_qp *qp, const struct nic_wqe *w)
{
	uint64_t opcodes = possible(qp, r) & (r->opcodes ? r->opcodes : ~0ull);

	return inject_is(r, qp->dev, qp->qpn) && w->opcode < 64 && opcodes >> w->opcode & 1;
}

static uint64_t own_count(struct inject_qp *i, const struct inject_rule *r)
{
	void *more;

	if (!r->random && !r->jitter_ns)
		return 0;
	for (uint32_t k = 0; k < i->ncounts; k++)
		if (i->counts[k].id == r->id)
			return i->counts[k].n++;
	/* Places of rules that are gone are used again. */
	for (uint32_t k = 0; k < i->ncounts; k++)
		if (!inject_in_force(i->counts[k].id)) {
			i->counts[k].id = r->id;
			i->counts[k].n = 1;
			return 0;
		}
	more = realloc(i->counts, (i->ncounts + 1) * sizeof(*i->counts));
	if (!more)
		return 0;
	i->counts = more;
	i->counts[i->ncounts].id = r->id;
	i->counts[i->ncounts++].n = 1;
	return 0;
}

static bool always(const struct inject_rule *r)
{
	return !r->nth && !r->every && !r->count && !r->random;
}

/* ---------------------------------------------------------------- holding */

static void decide_hold(const struct emu_qp *qp, const struct nic_wqe *w, struct inject_qp *i)
{
	i->held_by = 0;
	for (uint32_t k = 0; k < inject_nrules; k++) {
		struct inject_rule *r = inject_rules[k];

		if (r->kind != INJECT_HOLD || always(r) || !matches(r, qp, w) || !inject_fires(r, own_count(i, r)))
			continue;
		inject_hit(r, qp->dev, qp->qpn);
		i->held_by = r->id;
	}
}

/* A rule without conditions holds whatever there is, begun or not. */
static bool held(const struct emu_qp *qp, const struct nic_wqe *w, struct inject_qp *i)
{
	for (uint32_t k = 0; k < inject_nrules; k++) {
		struct inject_rule *r = inject_rules[k];

		if (r->kind == INJECT_DEVICE_FATAL && r->dev == qp->dev)
			return true;
		if (r->kind != INJECT_HANG && !(r->kind == INJECT_HOLD && always(r)))
			continue;
		if (!matches(r, qp, w))
			continue;
		if (i->held_by != r->id) {
			inject_hit(r, qp->dev, qp->qpn);
			r->seen++;
			i->held_by = r->id;
		}
		return true;
	}
	return i->held_by && inject_in_force(i->held_by);
}

bool inject_hung_(const struct emu_qp *qp)
{
	for (uint32_t k = 0; k < inject_nrules; k++) {
		const struct inject_rule *r = inject_rules[k];

		if ((r->kind == INJECT_HANG || r->kind == INJECT_DEVICE_FATAL) && inject_is(r, qp->dev, qp->qpn))
			return true;
	}
	return false;
}

static enum nic_step wait_until(struct emu_qp *qp, uint64_t at)
{
	if (qp->stall == STALL_NONE)
		qp->stall = STALL_FAULT;
	qp->deadline_ns = at;
	return STEP_WAIT;
}

static enum nic_step park(struct emu_qp *qp, struct inject_qp *i)
{
	if (qp->stall != STALL_NONE && qp->stall != STALL_FAULT && !i->parked) {
		i->parked = true;
		i->parked_deadline = qp->deadline_ns;
	}
	return wait_until(qp, UINT64_MAX);
}

static void let_go(struct emu_qp *qp)
{
	struct inject_qp *i = nic(qp)->inject;

	if (qp->stall == STALL_FAULT) {
		qp->stall = STALL_NONE;
		engine_unstall(qp);
	} else if (i && i->parked) {
		qp->deadline_ns = i->parked_deadline;
		if (nic(qp)->wire != WIRE_IDLE)
			engine_answer(qp);
		else
			engine_stall(qp);
	}
	if (i)
		i->parked = false;
	/* Nobody's timer is to run out by this. */
	if (qp->stall == STALL_NONE)
		engine_activate(qp);
}

void inject_let_go(void)
{
	for (uint32_t d = 0; d < emu.ndevices; d++)
		inject_for_each_qp(&emu.devices[d], let_go);
	emu_engine_wake();
}

/* ---------------------------------------------------------------- later */

static bool still_waits(const struct emu_qp *qp, uint32_t id)
{
	const struct nic_qp *n = nic(qp);

	return n->inject && n->inject->reordered_by == id && n->decoded & WQE_DECIDED && !n->inject->started;
}

static bool begin_to_wait(struct emu_qp *qp, const struct inject_rule *r)
{
	unsigned n = sizeof(waiting) / sizeof(waiting[0]), unused = n;

	for (unsigned k = 0; k < n; k++) {
		if (waiting[k].qp && (!inject_in_force(waiting[k].id) || !still_waits(waiting[k].qp, waiting[k].id)))
			waiting[k].qp = NULL;
		if (!waiting[k].qp)
			unused = k;
		else if (waiting[k].qp->dev == qp->dev)
			return false;
	}
	if (unused == n)
		return false;
	waiting[unused].id = r->id;
	waiting[unused].qp = qp;
	return true;
}

static void reorder(struct emu_qp *qp, struct inject_qp *i, struct inject_rule *r)
{
	if (!inject_fires(r, own_count(i, r)) || i->reordered_by || !begin_to_wait(qp, r))
		return;
	inject_hit(r, qp->dev, qp->qpn);
	i->reordered_by = r->id;
	i->overtaken = started[qp->dev->index] + (r->by ? r->by : 1);
	i->overtaken_until = now_ns() + r->limit_ns;
}

static uint64_t later(const struct nic_wqe *w, struct inject_rule *r, uint64_t own, uint64_t t)
{
	if (r->bandwidth) {
		t = t > r->free_at ? t : r->free_at;
		t += (uint64_t)((double)w->len * 1e9 / (double)r->bandwidth) + 1;
		r->free_at = t;
	}
	t += r->delay_ns;
	return r->jitter_ns ? t + inject_random(r, ~own) % (r->jitter_ns + 1) : t;
}

static void decide_when(struct emu_qp *qp, const struct nic_wqe *w, struct inject_qp *i)
{
	uint64_t t = 0;

	i->timed_by = i->reordered_by = 0;
	for (uint32_t k = 0; k < inject_nrules; k++) {
		struct inject_rule *r = inject_rules[k];
		uint64_t own;

		if ((r->kind != INJECT_DELAY && r->kind != INJECT_REORDER) || !matches(r, qp, w))
			continue;
		if (r->kind == INJECT_REORDER) {
			reorder(qp, i, r);
			continue;
		}
		own = own_count(i, r);
		if (!inject_fires(r, own))
			continue;
		inject_hit(r, qp->dev, qp->qpn);
		i->timed_by = r->id;
		t = later(w, r, own, t ? t : posted_at(qp, i));
	}
	i->due = t;
}

/* It may wait for time to pass, or for others. A rule that is gone holds nothing back. */
static uint64_t not_before(const struct emu_qp *qp, const struct inject_qp *i)
{
	uint64_t at = i->timed_by && inject_in_force(i->timed_by) ? i->due : 0;

	if (i->reordered_by && inject_in_force(i->reordered_by) && started[qp->dev->index] < i->overtaken &&
	    i->overtaken_until > at)
		at = i->overtaken_until;
	return at;
}

static void start(const struct emu_qp *qp, struct inject_qp *i)
{
	if (i->started)
		return;
	i->started = true;
	started[qp->dev->index]++;
	for (unsigned k = 0; k < sizeof(waiting) / sizeof(waiting[0]); k++) {
		struct emu_qp *other = waiting[k].qp;

		if (!other || other == qp || other->dev != qp->dev || !still_waits(other, waiting[k].id) ||
		    started[qp->dev->index] < nic(other)->inject->overtaken)
			continue;
		waiting[k].qp = NULL;
		engine_answer(other);
	}
}

/* ---------------------------------------------------------------- otherwise than it should */

static void decide_what(const struct emu_qp *qp, const struct nic_wqe *w, struct inject_qp *i)
{
	struct inject_rule *best = NULL;

	for (uint32_t k = 0; k < inject_nrules; k++) {
		struct inject_rule *r = inject_rules[k];

		if (r->kind >= INJECT_DROP && r->kind <= INJECT_CQ_OVERRUN && matches(r, qp, w) &&
		    inject_fires(r, own_count(i, r)))
			best = inject_choose(best, r);
	}
	i->retry = 0;
	i->action = best ? best->kind : INJECT_NONE;
	if (!best)
		return;
	inject_hit(best, qp->dev, qp->qpn);
	i->syndrome = best->syndrome;
	i->timer = (uint8_t)best->timer;
}

static enum nic_step again_later(const struct emu_qp *qp, struct inject_qp *i, enum nic_step step)
{
	if (step == STEP_WAIT)
		i->retry = qp->deadline_ns;
	return step;
}

/* It was done at the other side, and the acknowledgement is lost: the same goes out again, and is recognised there. */
static enum nic_step lose_answer(struct emu_qp *qp, struct nic_wqe *w, struct inject_qp *i, uint8_t *syndrome)
{
	struct nic_qp *n = nic(qp);
	uint32_t psn = n->tx_psn, messages = n->tx_messages;
	uint8_t stall = qp->stall, tries = qp->tries;
	enum nic_step step;

	/* Of a READ the answer is all there is. */
	if (w->opcode == MLX5_OPCODE_RDMA_READ)
		return again_later(qp, i, requester_lost(qp, syndrome));
	step = requester_step(qp, w, syndrome);
	if (step != STEP_DONE)
		return step;
	n->tx_psn = psn;
	n->tx_messages = messages;
	qp->progress = 0;
	/* The answer that it got nobody knows of: the count of retries goes on. */
	qp->stall = stall == STALL_ACK ? STALL_ACK : STALL_NONE;
	qp->tries = tries;
	return again_later(qp, i, requester_lost(qp, syndrome));
}

/* The other side refuses a request that says no more than that. */
static enum nic_step be_refused(struct emu_qp *qp, struct nic_wqe *w, enum nic_refuse how, uint8_t *syndrome)
{
	uint8_t opcode = w->opcode, mtu = qp->mtu;
	enum nic_step step;

	w->opcode = MLX5_OPCODE_SEND;
	w->nseg = 0;
	w->len = 0;
	qp->mtu = (uint8_t)how;
	step = requester_step(qp, w, syndrome);
	qp->mtu = mtu;
	w->opcode = opcode;
	return step;
}

static enum nic_step fail(struct emu_qp *qp, struct nic_wqe *w, uint8_t value, uint8_t *syndrome)
{
	switch (value) {
	case MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR:
		return be_refused(qp, w, NIC_REFUSE_ACCESS, syndrome);
	case MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR:
		return be_refused(qp, w, NIC_REFUSE_INVALID, syndrome);
	case MLX5_CQE_SYNDROME_REMOTE_OP_ERR:
		return be_refused(qp, w, NIC_REFUSE_OPERATION, syndrome);
	default:
		*syndrome = value;
		return STEP_FAIL;
	}
}

static enum nic_step act(struct emu_qp *qp, struct nic_wqe *w, struct inject_qp *i, uint8_t *syndrome)
{
	switch (i->action) {
	case INJECT_DROP:
		return again_later(qp, i, requester_lost(qp, syndrome));
	case INJECT_DROP_ANSWER:
		return lose_answer(qp, w, i, syndrome);
	case INJECT_RNR:
		return again_later(qp, i, requester_not_ready(qp, i->timer, syndrome));
	case INJECT_FAIL:
		return fail(qp, w, i->syndrome, syndrome);
	case INJECT_QP_FATAL:
		qp_to_error(qp, IBV_EVENT_QP_FATAL);
		return STEP_MORE;
	case INJECT_CQ_OVERRUN:
		i->action = INJECT_NONE;
		cq_overrun(qp->scq);
		return requester_step(qp, w, syndrome);
	default:
		return requester_step(qp, w, syndrome);
	}
}

enum nic_step inject_step(struct emu_qp *qp, struct nic_wqe *w, uint8_t *syndrome)
{
	struct inject_qp *i = state_of(qp);
	struct nic_qp *n = nic(qp);
	uint64_t at;

	if (!i)
		return requester_step(qp, w, syndrome);
	note_posts(qp, i);
	if (!(n->decoded & WQE_HOLD_DECIDED)) {
		n->decoded |= WQE_HOLD_DECIDED;
		decide_hold(qp, w, i);
	}
	if (held(qp, w, i))
		return park(qp, i);
	if (!(n->decoded & WQE_DECIDED)) {
		n->decoded |= WQE_DECIDED;
		i->started = false;
		i->retry = 0;
		i->action = INJECT_NONE;
		/* One that had begun before there were rules goes on without. */
		i->timed_by = i->reordered_by = 0;
		if (!qp->progress && (qp->stall == STALL_NONE || qp->stall == STALL_FAULT)) {
			decide_when(qp, w, i);
			decide_what(qp, w, i);
		}
	} else if (i->retry && engine_now() < i->retry) {
		return wait_until(qp, i->retry);
	} else if (i->retry) {
		if (qp->stall == STALL_ACK && !qp->tries) {
			*syndrome = MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR;
			return STEP_FAIL;
		}
		decide_what(qp, w, i);
	}
	at = not_before(qp, i);
	if (engine_now() < at)
		return wait_until(qp, at);
	if (qp->stall == STALL_FAULT)
		qp->stall = STALL_NONE;
	start(qp, i);
	return act(qp, w, i, syndrome);
}

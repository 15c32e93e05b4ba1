/* SPDX-License-Identifier: MIT
 * The streams of a DC initiator.
 *
 * man mlx5dv_create_qp: log_num_concurent "defines the number of parallel different streams that could be handled by HW. All
 * work request of a specific stream_id are handled in order." So work requests of different streams overtake each other:
 * one that waits for its target, or for a receive there, holds up its own stream alone.
 *
 * Their completions don't overtake each other. That is nowhere said in so many words; but libmlx5 takes a send completion
 * for one of everything that was posted before it (cq.c: wq->tail becomes the WQE's head + 1, which gives those slots to
 * new work requests), and so does UCX where it puts many streams on a DCI (dc_mlx5.c: uct_dc_mlx5_poll_tx(), policy
 * hw_dcs). On a queue that completed in another order both would write over WQEs that aren't done.
 *
 * Hence three steps. The DCI's own turn takes WQEs off the queue, in order, and gives each to the lane of its stream. A
 * lane is a send queue of its own, with a QP's state as far as one that sends needs it, and executes one WQE after the
 * other. What is done is reported when all before it is. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "nic.h"

#define STREAMS 65536u /* the WQE's field has 16 bits */
/* At a time, whatever was asked for: UCX has no more either (uint8_t dci_channel_index). */
#define LANES_MAX 256u
#define NONE UINT32_MAX

/* A WQE that was taken off the queue and isn't reported yet. */
struct entry {
	uint32_t next; /* of the same stream */
	uint32_t len;
	uint16_t ci, nbb;
	uint8_t opcode, flags, syndrome;
	bool done;
};

struct lane {
	struct emu_qp qp;
	uint32_t first, last; /* entries; NONE: it's free for another stream */
	uint16_t stream;
	bool begun; /* the first of them */
	bool handed; /* it came taken apart */
};

struct nic_streams {
	struct entry *entries; /* a ring with a place for each basic block, in the order of the queue */
	uint32_t first, n;
	struct lane *lanes[LANES_MAX];
	uint32_t nlanes, max;
	uint8_t last_lane[256]; /* that had a stream with such a last byte: most often it's the one, or free */
	bool fenced; /* somebody waits for others */
	uint64_t *errors; /* a bit for each stream that is in error */
	uint32_t nerrors;
};

/* ---------------------------------------------------------------- lanes */

static struct lane *make_lane(struct emu_qp *dci)
{
	struct lane *l = calloc(1, sizeof(*l));
	struct nic_qp *n = calloc(1, sizeof(*n));
	struct nic_wqe *w = aligned_alloc(64, sizeof(*w));

	if (!l || !n || !w) {
		free(l);
		free(n);
		free(w);
		return NULL;
	}
	l->first = l->last = NONE;
	l->qp.priv = n;
	l->qp.state = IBV_QPS_RTS; /* always: what its DCI's is counts */
	n->qp = &l->qp;
	n->owner = dci;
	n->streams = nic(dci)->streams;
	n->wqe = w;
	list_init(&l->qp.active_link);
	list_init(&n->stall_link);
	list_init(&n->error_link);
	list_init(&n->wire_wait);
	n->scan_index = UINT32_MAX; /* no doorbell is a lane's */
	return l;
}

static void free_lane(struct lane *l)
{
	fabric_cancel(&l->qp);
	engine_unstall(&l->qp);
	engine_forget_qp(&l->qp);
	inject_forget(&l->qp);
	free(nic(&l->qp)->wqe);
	free(nic(&l->qp));
	free(l);
}

/* All that can change between two WQEs. */
static void be_as(struct emu_qp *lane, const struct emu_qp *dci)
{
	lane->o.ctx = dci->o.ctx;
	lane->dev = dci->dev;
	lane->pd = dci->pd;
	lane->scq = dci->scq;
	lane->rcq = dci->rcq;
	lane->qpn = dci->qpn;
	lane->uidx = dci->uidx;
	lane->type = dci->type;
	lane->dci = true;
	lane->mmo = dci->mmo;
	lane->sq = dci->sq;
	lane->db = dci->db;
	lane->sq_nbb = dci->sq_nbb;
	lane->av = dci->av;
	lane->access = dci->access;
	lane->mtu = dci->mtu;
	lane->rd_atomic = dci->rd_atomic;
	lane->timeout = dci->timeout;
	lane->retry_cnt = dci->retry_cnt;
	lane->rnr_retry = dci->rnr_retry;
}

/* The one that has the stream, or one that is free. NULL: as many streams as there may be have something to do. */
static struct lane *lane_for(struct emu_qp *dci, uint16_t stream)
{
	struct nic_streams *s = nic(dci)->streams;
	uint32_t unused = NONE;
	struct lane *l = s->lanes[s->last_lane[stream % 256]];

	/* No other has it, then: a lane keeps its stream's name until it's another's. */
	if (l->stream == stream)
		return l;
	for (uint32_t i = 0; i < s->nlanes; i++) {
		if (s->lanes[i]->first == NONE)
			unused = i;
		else if (s->lanes[i]->stream == stream)
			return s->lanes[i];
	}
	if (unused == NONE && s->nlanes < s->max) {
		l = make_lane(dci);
		if (!l)
			return NULL;
		unused = s->nlanes++;
		s->lanes[unused] = l;
	}
	if (unused == NONE)
		return NULL;
	s->lanes[unused]->stream = stream;
	s->last_lane[stream % 256] = (uint8_t)unused;
	return s->lanes[unused];
}

/* ---------------------------------------------------------------- in the queue's order */

static struct entry take_first(struct emu_qp *dci)
{
	struct nic_streams *s = nic(dci)->streams;
	struct entry e = s->entries[s->first];

	s->first = (s->first + 1) % dci->sq_nbb;
	s->n--;
	return e;
}

static void report(struct emu_qp *dci, const struct entry *e, uint8_t syndrome)
{
	sq_report(dci, &(struct sq_outcome){ e->opcode, e->flags, syndrome, e->ci, e->len });
}

static void report_done(struct emu_qp *dci)
{
	struct nic_streams *s = nic(dci)->streams;

	while (s->n && s->entries[s->first].done) {
		struct entry e = take_first(dci);

		report(dci, &e, e.syndrome);
	}
}

/* The DCI waits in no list for it. */
static void go_on(struct emu_qp *dci)
{
	if (dci->stall == STALL_NONE)
		return;
	dci->stall = STALL_NONE;
	engine_activate(dci);
}

static void let_fenced_go(struct nic_streams *s)
{
	if (!s->fenced)
		return;
	s->fenced = false;
	for (uint32_t i = 0; i < s->nlanes; i++)
		if (s->lanes[i]->first != NONE && !s->lanes[i]->begun)
			engine_activate(&s->lanes[i]->qp);
}

void stream_finish(struct emu_qp *lane, const struct nic_wqe *w, uint8_t syndrome)
{
	struct lane *l = container_of(lane, struct lane, qp);
	struct emu_qp *dci = nic(lane)->owner;
	struct nic_streams *s = nic(dci)->streams;
	struct entry *e = &s->entries[l->first];

	e->done = true;
	e->syndrome = syndrome;
	e->opcode = w->opcode;
	e->flags = w->flags;
	e->len = (uint32_t)w->len;
	l->first = e->next;
	l->begun = false;
	nic(dci)->tx_psn = (nic(dci)->tx_psn + nic(lane)->tx_psn) & 0xffffff;
	nic(dci)->tx_messages += nic(lane)->tx_messages;
	nic(lane)->tx_psn = nic(lane)->tx_messages = 0;
	report_done(dci);
	let_fenced_go(s);
	go_on(dci);
}

static bool reads_or_binds(const struct entry *e)
{
	return e->opcode == MLX5_OPCODE_RDMA_READ || e->opcode == MLX5_OPCODE_ATOMIC_CS ||
	       e->opcode == MLX5_OPCODE_ATOMIC_FA || e->opcode == MLX5_OPCODE_UMR;
}

/* A fence is the queue's (man ibv_post_send), whatever the streams are. */
static bool must_wait(const struct emu_qp *dci, uint32_t at)
{
	const struct nic_streams *s = nic(dci)->streams;

	if (!(s->entries[at].flags & NIC_FENCES))
		return false;
	for (uint32_t i = s->first; i != at; i = (i + 1) % dci->sq_nbb)
		if (!s->entries[i].done && reads_or_binds(&s->entries[i]))
			return true;
	return false;
}

static bool begin(struct emu_qp *dci, struct lane *l)
{
	if (must_wait(dci, l->first)) {
		nic(dci)->streams->fenced = true;
		return false;
	}
	be_as(&l->qp, dci);
	l->qp.sq_ci = nic(dci)->streams->entries[l->first].ci;
	l->qp.progress = 0;
	l->qp.stall = STALL_NONE;
	if (!l->handed)
		nic(&l->qp)->decoded = 0;
	l->handed = false;
	l->begun = true;
	return true;
}

static enum nic_left lane_turn(struct emu_qp *lane, bool *worked)
{
	struct lane *l = container_of(lane, struct lane, qp);
	struct emu_qp *dci = nic(lane)->owner;

	for (uint32_t i = 0; i < SQ_TURN_WQES; i++) {
		if (l->first == NONE || (dci->state != IBV_QPS_RTS && dci->state != IBV_QPS_SQD))
			return LEFT_WAITING;
		if (!l->begun && !begin(dci, l))
			return LEFT_WAITING;
		*worked = true;
		switch (sq_run_one(lane)) {
		case STEP_MORE:
			return LEFT_WORK;
		case STEP_WAIT:
			engine_stall(lane);
			return LEFT_WAITING;
		default:
			break;
		}
	}
	return LEFT_WORK;
}

static bool hand_out(struct emu_qp *dci)
{
	struct nic_streams *s = nic(dci)->streams;
	struct nic_wqe *w = nic(dci)->wqe;
	uint32_t at = (s->first + s->n) % dci->sq_nbb;
	struct lane *l;
	uint8_t error;

	if (s->n == dci->sq_nbb)
		return false; /* more was posted than there's room for: what is done comes first */
	error = wqe_decode(dci, w);
	l = lane_for(dci, w->stream);
	if (!l)
		return false;
	s->entries[at] = (struct entry){ .next = NONE, .ci = w->counter, .nbb = w->nbb, .opcode = w->opcode, .flags = w->flags };
	if (l->first == NONE) {
		struct nic_qp *n = nic(&l->qp);

		l->first = at;
		nic(dci)->wqe = n->wqe;
		n->wqe = w;
		n->decoded = WQE_DECODED;
		n->decode_error = error;
		l->handed = true;
		engine_activate(&l->qp);
	} else {
		/* It has its turn, or waits: a turn before the time would count as a retry. */
		s->entries[l->last].next = at;
	}
	l->last = at;
	s->n++;
	dci->sq_ci += w->nbb;
	return true;
}

enum nic_left streams_turn(struct emu_qp *qp, bool *worked)
{
	if (nic(qp)->owner)
		return lane_turn(qp, worked);
	qp->stall = STALL_NONE;
	for (uint32_t i = 0; i < SQ_TURN_WQES; i++) {
		if (qp->state == IBV_QPS_RTS && !sq_pending(qp))
			return LEFT_NOTHING;
		/* In SQD those that were handed out have begun. */
		if (qp->state != IBV_QPS_RTS || !hand_out(qp)) {
			qp->stall = STALL_WIRE;
			return LEFT_WAITING;
		}
		*worked = true;
	}
	return LEFT_WORK;
}

/* ---------------------------------------------------------------- errors */

bool streams_fail(struct emu_qp *qp, uint16_t stream)
{
	struct nic_streams *s = nic(qp)->streams;

	if (!s)
		return false;
	s->nerrors += !stream_failed_(qp, stream);
	s->errors[stream / 64] |= 1ull << stream % 64;
	return s->nerrors < 1u << ((nic(qp)->owner ? nic(qp)->owner : qp)->log_num_errored & 31);
}

bool stream_failed_(const struct emu_qp *qp, uint16_t stream)
{
	return nic(qp)->streams->errors[stream / 64] >> stream % 64 & 1;
}

int emu_dci_stream_reset(struct emu_qp *qp, uint16_t stream)
{
	struct nic_streams *s = nic(qp)->streams;

	if (!s || !stream_failed_(qp, stream))
		return EINVAL;
	s->errors[stream / 64] &= ~(1ull << stream % 64);
	s->nerrors--;
	return 0;
}

void streams_stop(struct emu_qp *dci)
{
	struct nic_streams *s = nic(dci)->streams;

	for (uint32_t i = 0; s && i < s->nlanes; i++) {
		struct lane *l = s->lanes[i];

		fabric_cancel(&l->qp);
		engine_unstall(&l->qp);
		l->qp.stall = STALL_NONE;
		l->first = NONE;
		l->begun = l->handed = false;
		/* One that is ready finds nothing to do when its turn comes. */
	}
}

uint32_t streams_flush(struct emu_qp *dci, uint32_t budget)
{
	struct nic_streams *s = nic(dci)->streams;
	uint32_t done = 0;

	for (; s && s->n && done < budget; done++) {
		struct entry e = take_first(dci);

		report(dci, &e, e.done ? e.syndrome : MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	}
	return done;
}

bool streams_busy(const struct emu_qp *dci)
{
	return nic(dci)->streams && nic(dci)->streams->n;
}

bool emu_qp_streams_run(const struct emu_qp *dci)
{
	const struct nic_streams *s = nic(dci)->streams;

	for (uint32_t i = 0; s && i < s->nlanes; i++) {
		const struct lane *l = s->lanes[i];

		if (l->first != NONE && (l->begun ? l->qp.stall == STALL_NONE : !must_wait(dci, l->first)))
			return true;
	}
	return false;
}

void emu_qp_for_each_lane(struct emu_qp *dci, void (*fn)(struct emu_qp *))
{
	struct nic_streams *s = nic(dci)->streams;

	for (uint32_t i = 0; s && i < s->nlanes; i++)
		fn(&s->lanes[i]->qp);
}

/* ---------------------------------------------------------------- from RESET to RESET */

int streams_make(struct emu_qp *dci)
{
	struct nic_streams *s;

	if (!dci->dci || !dci->log_num_concurrent || !dci->sq_nbb)
		return 0;
	s = nic(dci)->streams = calloc(1, sizeof(*s));
	if (!s)
		return ENOMEM;
	s->max = dci->log_num_concurrent < 8 ? 1u << dci->log_num_concurrent : LANES_MAX;
	s->entries = calloc(dci->sq_nbb, sizeof(*s->entries));
	s->errors = calloc(STREAMS / 64, sizeof(*s->errors));
	s->lanes[0] = make_lane(dci);
	s->nlanes = s->lanes[0] != NULL;
	return s->entries && s->errors && s->nlanes ? 0 : ENOMEM;
}

void streams_reset(struct emu_qp *dci)
{
	struct nic_streams *s = nic(dci)->streams;

	if (!s)
		return;
	streams_stop(dci);
	emu_qp_for_each_lane(dci, inject_reset);
	s->first = s->n = s->nerrors = 0;
	memset(s->errors, 0, STREAMS / 8);
}

void streams_free(struct emu_qp *dci)
{
	struct nic_streams *s = nic(dci)->streams;

	for (uint32_t i = 0; s && i < s->nlanes; i++)
		free_lane(s->lanes[i]);
	if (s) {
		free(s->entries);
		free(s->errors);
	}
	free(s);
	nic(dci)->streams = NULL;
}

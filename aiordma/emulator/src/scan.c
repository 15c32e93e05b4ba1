/* SPDX-License-Identifier: MIT
 * Finding work that no doorbell told of.
 *
 * Doorbells are hints: several QPs share a register, and a value can be overwritten before the device thread looks. The
 * truth is in the doorbell records, one a QP and one a CQ, and they are too many to read every time around. So a few
 * QPs that were busy last are looked at every turn, the rest a few at a time, and all of them before the thread sleeps.
 *
 * Where there are many QPs the registers that they share lose many doorbells, and looking at a QP costs cache misses. So
 * their records alone are compared too, many a turn, with what they were: a QP whose record is another is looked at. That
 * finds them sooner; nothing rests on it. */
#include <stdlib.h>

#include "nic.h"

#define HOT 4u

struct table {
	void **v;
	uint32_t n, cap, next;
};

/* A send queue's record, in place and as it was last seen; as many as there are QPs in the table. */
struct record {
	const uint32_t *at;
	uint32_t seen;
};

static struct table qps, cqs;
static struct record *records;
static uint32_t records_cap, records_next;
static struct emu_qp *hot[HOT];
static uint32_t hot_next;
static struct emu_list errors = { &errors, &errors };

static bool table_add(struct table *t, void *what, uint32_t *index)
{
	if (t->n == t->cap) {
		uint32_t cap = t->cap ? t->cap * 2 : 64;
		void **v = realloc(t->v, cap * sizeof(*v));

		if (!v)
			return false;
		t->v = v;
		t->cap = cap;
	}
	*index = t->n;
	t->v[t->n++] = what;
	return true;
}

/* The last one takes its place; returns it, to be told its new index. */
static void *table_take(struct table *t, uint32_t index)
{
	void *last = t->v[--t->n];

	t->v[index] = last;
	return last;
}

/* Without memory for the tables doorbells alone must do. */
#define NOT_SCANNED UINT32_MAX

static bool records_grow(void)
{
	struct record *r;

	if (records_cap > qps.n)
		return true;
	r = realloc(records, (records_cap ? records_cap * 2 : 64) * sizeof(*r));
	if (!r)
		return false;
	records = r;
	records_cap = records_cap ? records_cap * 2 : 64;
	return true;
}

void scan_add_qp(struct emu_qp *qp)
{
	uint32_t *index = &nic(qp)->scan_index;

	if (!records_grow() || !table_add(&qps, qp, index))
		*index = NOT_SCANNED;
	else
		records[*index] = (struct record){ .at = NULL };
}

/* Of a QP that takes no sends the record is the application's to write, when it resets the QP for example. */
void scan_watch_record(struct emu_qp *qp, bool watch)
{
	uint32_t index = nic(qp)->scan_index;

	if (index != NOT_SCANNED)
		records[index].at = watch && qp->sq_nbb && qp->db ? &qp->db[1] : NULL;
}

void scan_remove_qp(struct emu_qp *qp)
{
	uint32_t index = nic(qp)->scan_index;

	for (uint32_t i = 0; i < HOT; i++)
		if (hot[i] == qp)
			hot[i] = NULL;
	if (index == NOT_SCANNED || index >= qps.n || qps.v[index] != qp)
		return;
	nic(table_take(&qps, index))->scan_index = index;
	records[index] = records[qps.n];
}

void scan_seen(const struct emu_qp *qp)
{
	uint32_t index = nic(qp)->scan_index;

	if (index != NOT_SCANNED)
		records[index].seen = htobe32(qp->sq_ci);
}

void scan_add_cq(struct emu_cq *cq)
{
	cq->scan_index = NOT_SCANNED;
	if (cq->channel)
		table_add(&cqs, cq, &cq->scan_index);
}

void scan_remove_cq(struct emu_cq *cq)
{
	uint32_t index = cq->scan_index;

	if (index == NOT_SCANNED || index >= cqs.n || cqs.v[index] != cq)
		return;
	((struct emu_cq *)table_take(&cqs, index))->scan_index = index;
}

void scan_make_hot(struct emu_qp *qp)
{
	struct emu_qp **slot = &hot[hot_next % HOT];

	if (nic(qp)->hot)
		return;
	if (*slot)
		nic(*slot)->hot = false;
	*slot = qp;
	nic(qp)->hot = true;
	hot_next++;
}

static bool look_at(struct emu_qp *qp)
{
	if (qp->active || !engine_runnable(qp))
		return false;
	engine_activate(qp);
	return true;
}

bool scan_hot(void)
{
	bool found = false;

	for (uint32_t i = 0; i < HOT; i++)
		if (hot[i])
			found |= look_at(hot[i]);
	return found;
}

bool scan_some(uint32_t n)
{
	bool found = false;

	for (uint32_t i = 0; i < n && i < qps.n; i++) {
		if (++qps.next >= qps.n)
			qps.next = 0;
		found |= look_at(qps.v[qps.next]);
	}
	n = (n + 3) / 4;
	for (uint32_t i = 0; i < n && i < cqs.n; i++) {
		if (++cqs.next >= cqs.n)
			cqs.next = 0;
		found |= cq_check_armed(cqs.v[cqs.next]);
	}
	return found;
}

bool scan_records(uint32_t n)
{
	bool found = false;

	/* So few are all hot, or looked at anyway. */
	if (qps.n <= 2 * HOT)
		return false;
	for (uint32_t i = 0; i < n && i < qps.n; i++) {
		struct record *r;
		uint32_t value;

		if (++records_next >= qps.n)
			records_next = 0;
		r = &records[records_next];
		if (!r->at)
			continue;
		value = __atomic_load_n(r->at, __ATOMIC_ACQUIRE);
		if (value == r->seen)
			continue;
		r->seen = value;
		found |= look_at(qps.v[records_next]);
	}
	return found;
}

bool scan_all(void)
{
	bool found = false;

	for (uint32_t i = 0; i < qps.n; i++)
		found |= look_at(qps.v[i]);
	for (uint32_t i = 0; i < cqs.n; i++)
		found |= cq_check_armed(cqs.v[i]);
	return found;
}

/* ---------------------------------------------------------------- QPs in ERR */

void scan_watch_error(struct emu_qp *qp, bool watch)
{
	struct nic_qp *n = nic(qp);

	list_del(&n->error_link);
	if (watch && qp->rq_nwqe && !qp->srq)
		list_add_tail(&errors, &n->error_link);
}

bool scan_errors_watched(void)
{
	return !list_empty(&errors);
}

bool scan_errors(void)
{
	bool found = false;

	for (struct emu_list *l = errors.next; l != &errors; l = l->next)
		found |= look_at(container_of(l, struct nic_qp, error_link)->qp);
	return found;
}

void scan_forget(void)
{
	qps = cqs = (struct table){ 0 };
	records = NULL;
	records_cap = 0;
	for (uint32_t i = 0; i < HOT; i++)
		hot[i] = NULL;
	list_init(&errors);
}

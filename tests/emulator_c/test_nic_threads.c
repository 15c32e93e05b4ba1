/* SPDX-License-Identifier: MIT
 * Threads of an application, each with queue pairs and a CQ of its own and all with doorbells on one page, that post,
 * poll, wait for events and change keys and states at the same time. Also built with -fsanitize=thread (tox -e tsan). */
#define _GNU_SOURCE
#include "nic_world.h"

#include <pthread.h>

enum { THREADS = 5, PAIRS = 3, ROUNDS = 150, DEPTH = 8, PART = 4096 };

static struct app app;
static uint8_t *memory;
static struct tmr everything;
static uint64_t counter __attribute__((aligned(64))); /* atomics of all threads add to it */
static struct tmr counter_mr;

struct worker {
	pthread_t thread;
	unsigned index, atomics;
	struct tcq cq;
	struct emu_channel channel;
	struct tqp qp[PAIRS][2];
};

static struct worker *worker(unsigned i)
{
	static struct worker *all;

	if (!all)
		all = aligned_alloc(64, THREADS * sizeof(*all));
	CHECK(all);
	return &all[i];
}

static void set_up(struct worker *w)
{
	CHECK_EQ(emu_channel_init(&w->channel, 8), 0);
	cq_new(&w->cq, &app, 64, &w->channel);
	for (unsigned p = 0; p < PAIRS; p++) {
		for (unsigned k = 0; k < 2; k++)
			qp_new(&w->qp[p][k], &app, &w->cq, &w->cq, (struct qp_opts){ .sq_nbb = 32, .rq_nwqe = 16 });
		qp_connect(&w->qp[p][0], &w->qp[p][1]);
	}
}

static void tear_down(struct worker *w)
{
	for (unsigned p = 0; p < PAIRS; p++)
		for (unsigned k = 0; k < 2; k++)
			qp_free(&w->qp[p][k]);
	cq_free(&w->cq);
	emu_lock();
	emu_channel_close(&w->channel, true);
	emu_unlock();
}

/* Half of the time by an event. */
static void wait_one(struct worker *w, struct wc *wc)
{
	if (rand() % 2) {
		cq_wait(&w->cq, wc);
		return;
	}
	while (!cq_poll(&w->cq, wc)) {
		cq_arm(&w->cq, false);
		if (cq_poll(&w->cq, wc))
			return;
		/* One that came before the poll above may have raised the event, and one more is then taken as well. */
		CHECK(channel_readable(&w->channel, PATIENCE_MS));
		channel_read(&w->channel);
		w->cq.sn++;
	}
}

static uint8_t *part(const struct worker *w, unsigned n)
{
	return memory + ((size_t)w->index * 8 + n) * PART;
}

static void one_sided(struct worker *w, struct tqp *q, unsigned round)
{
	static const uint8_t opcodes[] = { MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_RDMA_READ, MLX5_OPCODE_ATOMIC_FA };
	uint8_t opcode = opcodes[round % 3];
	bool atomic = opcode == MLX5_OPCODE_ATOMIC_FA;
	struct sge s = { part(w, 0), atomic ? 8 : PART, everything.m.key };
	struct wr wr = { .opcode = opcode, .sg = &s, .nsg = 1, .rkey = atomic ? counter_mr.m.key : everything.m.key,
			 .raddr = (uintptr_t)(atomic ? (uint8_t *)&counter : part(w, 1)), .swap_add = 1 };
	struct wc wc;

	memset(part(w, opcode == MLX5_OPCODE_RDMA_READ), (int)round, PART);
	for (unsigned i = 0; i < DEPTH; i++)
		qp_post(q, &wr);
	for (unsigned i = 0; i < DEPTH; i++) {
		wait_one(w, &wc);
		CHECK_EQ(wc.syndrome, 0);
	}
	if (atomic)
		w->atomics += DEPTH;
	else
		CHECK(!memcmp(part(w, 0), part(w, 1), PART));
}

static void two_sided(struct worker *w, struct tqp q[2], unsigned round)
{
	struct sge to = { part(w, 2), PART, everything.m.key }, from = { part(w, 3), 64, everything.m.key };
	struct wr wr = { .opcode = MLX5_OPCODE_SEND, .sg = &from, .nsg = 1 };
	struct wc wc;

	memset(part(w, 3), (int)round, 64);
	for (unsigned i = 0; i < DEPTH; i++)
		qp_recv(&q[1], &to, 1);
	for (unsigned i = 0; i < DEPTH; i++)
		qp_post(&q[0], &wr);
	for (unsigned i = 0; i < 2 * DEPTH; i++) {
		wait_one(w, &wc);
		CHECK_EQ(wc.syndrome, 0);
	}
	CHECK(!memcmp(part(w, 2), part(w, 3), 64));
}

/* A region of its own goes, and so do the queue pairs to ERR and back. */
static void change(struct worker *w, struct tqp q[2])
{
	struct sge s = { part(w, 4), 8, 0 };
	struct wr wr = { .opcode = MLX5_OPCODE_RDMA_WRITE, .sg = &s, .nsg = 1, .raddr = (uintptr_t)part(w, 5),
			 .rkey = everything.m.key };
	struct tmr own;
	struct wc wc;

	mr_new(&own, &app, part(w, 4), PART, ALL_ACCESS);
	s.key = own.m.key;
	qp_post(&q[0], &wr);
	wait_one(w, &wc);
	CHECK_EQ(wc.syndrome, 0);
	mr_free(&own);
	qp_post(&q[0], &wr);
	wait_one(w, &wc);
	CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	qp_state(&q[0], IBV_QPS_RESET);
	qp_state(&q[1], IBV_QPS_RESET);
	qp_connect(&q[0], &q[1]);
}

static void *work(void *arg)
{
	struct worker *w = arg;

	for (unsigned round = 0; round < ROUNDS; round++) {
		struct tqp *q = w->qp[round % PAIRS];

		one_sided(w, &q[0], round);
		two_sided(w, q, round);
		if (round % 7 == 0)
			change(w, q);
	}
	return NULL;
}

int main(void)
{
	unsigned atomics = 0;

	world_open(1);
	app_open(&app, 0);
	memory = aligned_alloc(4096, (size_t)THREADS * 8 * PART);
	CHECK(memory);
	mr_new(&everything, &app, memory, (size_t)THREADS * 8 * PART, ALL_ACCESS);
	mr_new(&counter_mr, &app, &counter, sizeof(counter), ALL_ACCESS);
	for (unsigned i = 0; i < THREADS; i++) {
		memset(worker(i), 0, sizeof(struct worker));
		worker(i)->index = i;
		set_up(worker(i));
	}
	for (unsigned i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&worker(i)->thread, NULL, work, worker(i)));
	for (unsigned i = 0; i < THREADS; i++) {
		CHECK(!pthread_join(worker(i)->thread, NULL));
		atomics += worker(i)->atomics;
		tear_down(worker(i));
	}
	CHECK_EQ(counter, atomics);
	mr_free(&counter_mr);
	mr_free(&everything);
	free(memory);
	free(worker(0));
	app_close(&app);
	world_close();
	return 0;
}

/* SPDX-License-Identifier: MIT
 * The device thread: lost doorbells, sleep, fairness, commands while it's busy, fork. */
#define _GNU_SOURCE
#include "nic_world.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static struct app app;
static struct tcq cq;
static struct tmr mr;
static uint8_t *mem;

#define BIG (128u << 20)

static void open_all(void)
{
	app_open(&app, 0);
	cq_new(&cq, &app, 4096, NULL);
	mem = aligned_alloc(4096, 2 * BIG);
	mr_new(&mr, &app, mem, 2 * BIG, ALL_ACCESS);
}

static void close_all(void)
{
	mr_free(&mr);
	free(mem);
	cq_free(&cq);
	app_close(&app);
}

static void pair_new(struct tqp q[2])
{
	for (unsigned i = 0; i < 2; i++)
		qp_new(&q[i], &app, &cq, &cq, (struct qp_opts){ 0 });
	qp_connect(&q[0], &q[1]);
}

static struct wr write_of(struct sge *s, uint32_t len)
{
	*s = (struct sge){ mem, len, mr.m.key };
	return (struct wr){ .opcode = MLX5_OPCODE_RDMA_WRITE, .sg = s, .nsg = 1, .raddr = (uintptr_t)mem + BIG,
			    .rkey = mr.m.key };
}

static double cpu_seconds(void)
{
	struct rusage r;

	getrusage(RUSAGE_SELF, &r);
	return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) + 1e-6 * (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec);
}

static void ok(struct tqp *q)
{
	struct wc wc;

	cq_wait(&cq, &wc);
	CHECK_EQ(wc.syndrome, 0);
	if (q)
		CHECK_EQ(wc.qpn, q->qp.qpn);
}

/* No QP is forgotten, however its doorbell got lost; and order within each is kept. */
static void lost_doorbells(void)
{
	enum { PAIRS = 300 };
	struct tqp(*q)[2] = aligned_alloc(64, PAIRS * sizeof(*q));
	uint16_t seen[PAIRS] = { 0 };
	struct sge s;
	struct wr w;
	struct wc wc;

	open_all();
	w = write_of(&s, 8);
	for (unsigned i = 0; i < PAIRS; i++)
		pair_new(q[i]);
	/* They share registers, so most are overwritten at once; some don't ring at all. */
	for (unsigned k = 0; k < 5; k++)
		for (unsigned i = 0; i < PAIRS; i++) {
			if (i % 3)
				qp_post(&q[i][0], &w);
			else
				qp_post_quietly(&q[i][0], &w);
		}
	for (unsigned n = 0; n < 5 * PAIRS; n++) {
		unsigned i;

		cq_wait(&cq, &wc);
		for (i = 0; q[i][0].qp.qpn != wc.qpn; i++)
			;
		CHECK_EQ(wc.counter, seen[i]);
		seen[i]++;
	}
	for (unsigned i = 0; i < PAIRS; i++) {
		qp_free(&q[i][0]);
		qp_free(&q[i][1]);
	}
	close_all();
	free(q);
}

static void sleeps_and_wakes(void)
{
	struct tqp q[2];
	struct sge s;
	struct wr w;
	double cpu;
	uint64_t t;

	open_all();
	w = write_of(&s, 8);
	pair_new(q);
	for (unsigned i = 0; i < 50; i++) {
		sleep_ms(i < 40 ? 1 : 10);
		qp_post(&q[0], &w);
		ok(&q[0]);
	}
	sleep_ms(20);
	cpu = cpu_seconds();
	t = monotonic_us();
	sleep_ms(500);
	t = monotonic_us() - t;
	cpu = (cpu_seconds() - cpu) / (1e-6 * (double)t);
	fprintf(stderr, "idle: %.2f%% of a CPU\n", cpu * 100);
	CHECK(cpu < 0.1); /* a spinning thread takes all that it gets of one */
	qp_free(&q[0]);
	qp_free(&q[1]);
	close_all();
}

/* There a thread that polls keeps the device thread from running for as long as the scheduler lets it. */
static bool single_cpu(void)
{
	cpu_set_t cpus;

	return !sched_getaffinity(0, sizeof(cpus), &cpus) && CPU_COUNT(&cpus) == 1;
}

/* Small messages overtake large ones of other QPs. Returns how many commands were done while the large ones were. */
static unsigned commands_between_large(void)
{
	enum { LARGE = 4, SMALL = 60 };
	struct tqp a[2], b[2];
	struct sge s, s8;
	struct wr w, w8;
	struct wc wc;
	unsigned commands = 0, large = 0, small = 0;
	uint64_t end;

	open_all();
	memset(mem, 1, 2 * BIG);
	pair_new(a);
	pair_new(b);
	w = write_of(&s, BIG);
	w8 = write_of(&s8, 8);
	/* The device sees all of them at once, the large ones first, whenever this thread is let on a CPU. */
	emu_lock();
	for (unsigned k = 0; k < LARGE; k++)
		qp_post_quietly(&a[0], &w);
	for (unsigned k = 0; k < SMALL; k++)
		qp_post_quietly(&b[0], &w8);
	emu_qp_kick(&a[0].qp);
	emu_qp_kick(&b[0].qp);
	emu_unlock();
	end = monotonic_us() + PATIENCE_US;
	while (large < LARGE) {
		struct tmr other;

		CHECK(monotonic_us() < end);
		/* The small ones are done, so it's at the large ones. */
		if (small == SMALL && commands < 100) {
			mr_new(&other, &app, mem, 8, 0);
			mr_free(&other);
			commands += 2;
		}
		while (cq_poll(&cq, &wc)) {
			CHECK_EQ(wc.syndrome, 0);
			if (wc.qpn == a[0].qp.qpn)
				large++;
			else
				small++;
			CHECK(!large || small == SMALL);
		}
	}
	CHECK_EQ(memcmp(mem, mem + BIG, BIG), 0);
	for (unsigned i = 0; i < 2; i++) {
		qp_free(&a[i]);
		qp_free(&b[i]);
	}
	close_all();
	return commands;
}

/* Nor do commands wait for large messages. If they did it would be one for each at the most, however often this is tried; a
 * thread that isn't let on a CPU may get few of them done once. */
static void fair(void)
{
	unsigned tries = single_cpu() ? 1 : 20;

	while (commands_between_large() <= 10 && --tries)
		;
	CHECK(tries || single_cpu());
}

/* A key (0), or a QP at either end (1 and 2), that goes in the middle of long messages. False: too late, all were done. */
static bool goes_meanwhile(unsigned what)
{
	enum { N = 16 };
	uint8_t syndrome = what ? MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR : MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR;
	struct tqp q[2];
	struct sge s;
	struct wr w;
	struct wc wc = { 0 };
	struct tmr target;
	unsigned done = 0;

	open_all();
	pair_new(q);
	q[0].qp.timeout = 8;
	q[0].qp.retry_cnt = 1;
	mr_new(&target, &app, mem + BIG, BIG, ALL_ACCESS);
	w = write_of(&s, BIG);
	w.rkey = target.m.key;
	for (unsigned i = 0; i < N; i++)
		qp_post(&q[0], &w);
	usleep(2000);
	if (what == 0)
		mr_free(&target);
	else
		qp_free(&q[what - 1]);
	if (what == 1) {
		while (cq_poll(&cq, &wc))
			done++;
	} else {
		do
			cq_wait(&cq, &wc);
		while (!wc.syndrome && ++done < N);
		if (wc.syndrome)
			CHECK_EQ(wc.syndrome, syndrome);
	}
	if (what != 0)
		mr_free(&target);
	for (unsigned i = 0; i < 2; i++)
		if (what != i + 1)
			qp_free(&q[i]);
	close_all();
	return done < N;
}

static void gone_meanwhile(void)
{
	for (unsigned what = 0; what < 3; what++)
		while (!goes_meanwhile(what))
			;
}

/* Objects come and go on one thread while another has traffic. */
static bool stop;

static void *churn(void *unused)
{
	static uint8_t bytes[64];

	(void)unused;
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		struct emu_channel ch;
		struct app own;
		struct tqp q[2];
		struct tcq c;
		struct tmr m;
		struct sge s;
		struct wr w;

		app_open(&own, 0);
		CHECK_EQ(emu_channel_init(&ch, 8), 0);
		cq_new(&c, &own, 16, &ch);
		mr_new(&m, &own, bytes, sizeof(bytes), ALL_ACCESS);
		for (unsigned i = 0; i < 2; i++)
			qp_new(&q[i], &own, &c, &c, (struct qp_opts){ 0 });
		qp_connect(&q[0], &q[1]);
		s = (struct sge){ bytes, 8, m.m.key };
		w = (struct wr){ .opcode = MLX5_OPCODE_RDMA_WRITE, .sg = &s, .nsg = 1, .raddr = (uintptr_t)bytes + 32,
				 .rkey = m.m.key };
		cq_arm(&c, false);
		for (unsigned i = 0; i < 10; i++)
			qp_post(&q[0], &w);
		/* All at once, whatever it is at. */
		qp_free(&q[1]);
		qp_free(&q[0]);
		cq_free(&c);
		mr_free(&m);
		emu_lock();
		emu_channel_close(&ch, true);
		emu_unlock();
		app_close(&own);
	}
	return NULL;
}

static void busy_with_churn(void)
{
	struct tqp q[2];
	pthread_t t[2];
	struct sge s;
	struct wr w;
	uint64_t end = monotonic_us() + 1000000;

	open_all();
	pair_new(q);
	w = write_of(&s, 100);
	for (unsigned i = 0; i < 2; i++)
		CHECK_EQ(pthread_create(&t[i], NULL, churn, NULL), 0);
	while (monotonic_us() < end) {
		for (unsigned i = 0; i < 16; i++)
			qp_post(&q[0], &w);
		for (unsigned i = 0; i < 16; i++)
			ok(&q[0]);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (unsigned i = 0; i < 2; i++)
		pthread_join(t[i], NULL);
	qp_free(&q[0]);
	qp_free(&q[1]);
	close_all();
}

/* Any bytes in a WQE: something comes of it, and the process lives. */
static void garbage(void)
{
	struct tqp q[2];
	uint8_t raw[240];
	struct wr w = { .raw = raw, .unsignalled = false };
	struct wc wc;

	srand(7);
	open_all();
	for (unsigned round = 0; round < 3000; round++) {
		pair_new(q);
		if (round & 1)
			q[0].qp.type = IBV_QPT_UD;
		for (unsigned i = 0; i < sizeof(raw); i++)
			raw[i] = (uint8_t)rand();
		if (round % 3 == 0)
			memset(raw + 16, 0xff, 64);
		w.nraw = (uint32_t)(rand() % 15) * 16;
		w.opcode = (uint8_t)(round % 5 ? rand() % 0x30 : rand());
		w.opmod = (uint8_t)rand();
		w.ds = rand() % 4 ? 0 : rand() % 64 + 1;
		w.imm = mr.m.key;
		q[0].qp.retry_cnt = q[0].qp.rnr_retry = 0;
		q[0].qp.timeout = 1;
		qp_post(&q[0], &w);
		cq_wait(&cq, &wc);
		qp_free(&q[0]);
		qp_free(&q[1]);
		while (cq_poll(&cq, &wc))
			;
	}
	/* And a producer index out of the blue: every block is looked at, none outside the ring. */
	pair_new(q);
	__atomic_store_n(&q[0].db[1], htobe32(0x7fff), __ATOMIC_RELEASE);
	__atomic_store_n(&q[1].db[0], htobe32(0x7fff), __ATOMIC_RELEASE);
	qp_state(&q[1], IBV_QPS_ERR);
	sleep_ms(50);
	qp_free(&q[0]);
	qp_free(&q[1]);
	close_all();
}

/* Registered memory that is unmapped: errors, and everything else goes on. */
static void __attribute__((unused)) unmapped(void)
{
	static const struct {
		uint8_t opcode;
		bool far;
		uint8_t syndrome;
	} cases[] = {
		{ MLX5_OPCODE_RDMA_WRITE, false, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR },
		{ MLX5_OPCODE_RDMA_WRITE, true, MLX5_CQE_SYNDROME_REMOTE_OP_ERR },
		{ MLX5_OPCODE_RDMA_READ, false, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR },
		{ MLX5_OPCODE_RDMA_READ, true, MLX5_CQE_SYNDROME_REMOTE_OP_ERR },
		{ MLX5_OPCODE_ATOMIC_FA, true, MLX5_CQE_SYNDROME_REMOTE_OP_ERR },
		{ MLX5_OPCODE_SEND, true, MLX5_CQE_SYNDROME_REMOTE_OP_ERR },
	};

	for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		uint8_t *gone = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct tqp q[2], other[2];
		struct tmr hole;
		struct sge s;
		struct wr w;
		struct wc wc;

		CHECK(gone != MAP_FAILED);
		open_all();
		pair_new(q);
		pair_new(other);
		mr_new(&hole, &app, gone, 4096, ALL_ACCESS);
		munmap(gone, 4096);
		w = write_of(&s, 8);
		w.opcode = cases[i].opcode;
		if (cases[i].far) {
			struct sge r = { gone, 4096, hole.m.key };

			w.raddr = (uintptr_t)gone;
			w.rkey = hole.m.key;
			qp_recv(&q[1], &r, 1);
		} else {
			s = (struct sge){ gone + 100, 1000, hole.m.key };
		}
		qp_post(&q[0], &w);
		cq_wait(&cq, &wc);
		while (wc.qpn != q[0].qp.qpn)
			cq_wait(&cq, &wc);
		CHECK_EQ(wc.syndrome, cases[i].syndrome);
		w = write_of(&s, 8);
		qp_post(&other[0], &w);
		do
			cq_wait(&cq, &wc);
		while (wc.qpn != other[0].qp.qpn);
		CHECK_EQ(wc.syndrome, 0);
		for (unsigned k = 0; k < 2; k++) {
			qp_free(&q[k]);
			qp_free(&other[k]);
		}
		mr_free(&hole);
		close_all();
	}
}

extern void emu_engine_forked(void);

static void forks(void)
{
	struct tqp q[2];
	struct sge s;
	struct wr w;
	int status;
	pid_t pid;

	open_all();
	pair_new(q);
	w = write_of(&s, 8);
	qp_post(&q[0], &w);
	ok(&q[0]);
	emu_lock();
	pid = fork();
	if (!pid) {
		pthread_mutex_init(&emu.lock, NULL);
		emu_engine_forked();
		emu_engine_wake();
		emu_engine_stop();
		_exit(0);
	}
	emu_unlock();
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
	sleep_ms(5);
	qp_post(&q[0], &w);
	ok(&q[0]);
	qp_free(&q[0]);
	qp_free(&q[1]);
	close_all();
}

#ifndef __SANITIZE_THREAD__ /* see main() */
/* Hardware has the pages of its queues pinned: a program that unmaps some, or closes them to accesses, isn't ended by it,
 * and other queues go on. */
static void queues_taken_away(void)
{
	for (unsigned what = 0; what < 4; what++) {
		size_t size = 64 * 64 + 64 * 16;
		struct tqp q[2], other[2];
		struct emu_qp *p = &q[0].qp;
		struct tcq own;
		uint8_t *buf, *page;
		struct sge s;
		struct wr w;
		struct wc wc;

		open_all();
		w = write_of(&s, 8);
		/* A CQ of their own: it may run over, with as many requests as a record of zero seems to say. */
		cq_new(&own, &app, 16, NULL);
		for (unsigned i = 0; i < 2; i++)
			qp_new(&q[i], &app, &own, &own, (struct qp_opts){ 0 });
		qp_connect(&q[0], &q[1]);
		pair_new(other);
		qp_post(&q[0], &w);
		cq_wait(&own, &wc);
		page = mmap(NULL, 4096 + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(page != MAP_FAILED);
		buf = page + 4096;
		emu_lock();
		memcpy(buf, p->buf, size);
		memcpy(page, p->db, 8);
		p->sq = buf + (p->sq - p->buf);
		p->rq = buf + (p->rq - p->buf);
		if (what < 2)
			p->db = (uint32_t *)(void *)page;
		emu_unlock();
		/* The record, or the ring with a request in it that the device hasn't seen. */
		if (what % 2)
			CHECK(!mprotect(what < 2 ? page : buf, what < 2 ? 4096 : 8192, PROT_NONE));
		else
			CHECK(!munmap(what < 2 ? page : buf, what < 2 ? 4096 : 8192));
		if (what >= 2)
			__atomic_store_n(&q[0].db[1], htobe32(2), __ATOMIC_RELEASE);
		emu_lock();
		emu_qp_kick(p);
		emu_unlock();
		for (unsigned i = 0; i < 100; i++) {
			qp_post(&other[0], &w);
			ok(&other[0]);
		}
		for (unsigned i = 0; i < 2; i++) {
			qp_free(&other[i]);
			qp_free(&q[i]);
		}
		cq_free(&own);
		munmap(page, 4096 + 8192);
		close_all();
	}
}
#endif

int main(void)
{
	world_open(1);
	lost_doorbells();
	sleeps_and_wakes();
	fair();
	gone_meanwhile();
	busy_with_churn();
	garbage();
#ifndef __SANITIZE_THREAD__ /* its atomic stores hold a lock of its own, which a fault leaves locked */
	unmapped();
	queues_taken_away();
#endif
	forks();
	world_close();
	return 0;
}

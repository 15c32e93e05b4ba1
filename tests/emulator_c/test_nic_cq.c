/* SPDX-License-Identifier: MIT
 * Completion queues and events: wrapping, overrun, arming, solicited events, moderation, resizing, event lists longer
 * than a pipe, taking events back. */
#include <errno.h>

#include "nic_world.h"

static struct app app;
static struct emu_channel channel;
static struct tcq scq, rcq;
static struct tqp qp[2];
static struct tmr mr;
static uint8_t mem[4096] __attribute__((aligned(64)));

static void open_all(uint32_t ncqe, bool with_channel)
{
	app_open(&app, 0);
	CHECK_EQ(emu_channel_init(&channel, 8), 0);
	cq_new(&scq, &app, 256, NULL);
	cq_new(&rcq, &app, ncqe, with_channel ? &channel : NULL);
	mr_new(&mr, &app, mem, sizeof(mem), ALL_ACCESS);
	for (unsigned i = 0; i < 2; i++)
		qp_new(&qp[i], &app, &scq, &rcq, (struct qp_opts){ 0 });
	qp_connect(&qp[0], &qp[1]);
}

static void close_all(void)
{
	for (unsigned i = 0; i < 2; i++)
		qp_free(&qp[i]);
	cq_free(&scq);
	cq_free(&rcq);
	mr_free(&mr);
	emu_lock();
	emu_channel_close(&channel, true);
	emu_unlock();
	app_close(&app);
}

/* A message from 0 to 1, that is, a CQE on rcq. */
static void message(bool solicited)
{
	struct wr w = { .opcode = MLX5_OPCODE_SEND, .solicited = solicited };
	struct wc wc;

	qp_recv(&qp[1], NULL, 0);
	qp_post(&qp[0], &w);
	cq_wait(&scq, &wc);
	CHECK_EQ(wc.syndrome, 0);
}

static void poll_all(unsigned n)
{
	struct wc wc;

	for (unsigned i = 0; i < n; i++)
		CHECK(cq_poll(&rcq, &wc));
	CHECK(!cq_poll(&rcq, &wc));
}

static void take_event(void)
{
	CHECK(channel_readable(&channel, PATIENCE_MS));
	CHECK_EQ(channel_read(&channel), (uintptr_t)&rcq);
	rcq.sn++;
}

static void wraps_and_overruns(void)
{
	uint64_t element;
	struct wc wc;

	open_all(4, false);
	for (unsigned i = 0; i < 50; i++) {
		for (unsigned k = 0; k < 4; k++)
			message(false);
		poll_all(4);
	}
	for (unsigned k = 0; k < 4; k++)
		message(false);
	CHECK_EQ(async_event(&app, NULL, 1), -1);
	message(false); /* delivered, but there's no place to say so */
	CHECK_EQ(async_event(&app, &element, PATIENCE_MS), IBV_EVENT_CQ_ERR);
	CHECK_EQ(element, (uintptr_t)&rcq);
	CHECK_EQ(async_event(&app, &element, PATIENCE_MS), IBV_EVENT_QP_FATAL);
	CHECK_EQ(element, (uintptr_t)&qp[1]);
	CHECK_EQ(qp_state_now(&qp[1]), IBV_QPS_ERR);
	/* What was there is still there; nothing comes any more. */
	poll_all(4);
	qp_recv(&qp[1], NULL, 0);
	sleep_ms(5);
	CHECK(!cq_poll(&rcq, &wc));
	CHECK_EQ(async_event(&app, NULL, 1), -1);
	close_all();
}

/* As if so many completions had come and been taken, of which the device hasn't looked at the reader's index since. */
static void pass(struct tcq *t, uint32_t completions)
{
	emu_lock();
	t->cq.pi += completions;
	t->ci += completions;
	__atomic_store_n(&t->db[0], htobe32(t->ci & 0xffffff), __ATOMIC_RELEASE);
	emu_unlock();
}

/* Readers' indices have 24 bits. Over three laps: no overrun where there is none, one where there is; an event for what
 * comes after arming and for nothing else. */
static void laps_of_the_index(void)
{
	uint64_t element;

	open_all(8, true);
	for (unsigned i = 0; i < 12; i++) {
		pass(&rcq, 1u << 22);
		for (unsigned k = 0; k < 8; k++)
			message(false);
		poll_all(8);
		cq_arm(&rcq, true);
		message(false);
		CHECK(!channel_readable(&channel, 2));
		message(true);
		take_event();
		poll_all(2);
		/* A solicited one that's long ago, and a request that is older than half a lap. */
		cq_arm(&rcq, true);
		pass(&rcq, 1u << 22);
		message(false);
		pass(&rcq, 1u << 22);
		message(false);
		pass(&rcq, 1u << 22);
		message(false);
		CHECK(!channel_readable(&channel, 2));
		poll_all(3);
		message(true);
		take_event();
		poll_all(1);
	}
	CHECK_EQ(async_event(&app, NULL, 1), -1);
	for (unsigned k = 0; k < 9; k++)
		message(false);
	CHECK_EQ(async_event(&app, &element, PATIENCE_MS), IBV_EVENT_CQ_ERR);
	CHECK_EQ(element, (uintptr_t)&rcq);
	poll_all(8);
	close_all();
}

static void events(void)
{
	open_all(64, true);
	/* Nothing asked for, nothing told. */
	message(false);
	CHECK(!channel_readable(&channel, 2));
	poll_all(1);
	/* The first arm word of all is zero but for the index, at index 0 all zero; then one for each event taken. */
	for (unsigned i = 0; i < 10; i++) {
		cq_arm(&rcq, false);
		CHECK(!channel_readable(&channel, 2));
		message(false);
		message(false);
		take_event();
		CHECK(!channel_readable(&channel, 2)); /* one for both */
		poll_all(2);
	}
	/* Armed too late: what is there already counts. */
	message(false);
	cq_arm(&rcq, false);
	take_event();
	/* The same, while the device sleeps and the doorbell is lost: another CQ's came over it. */
	sleep_ms(5);
	cq_arm(&rcq, false);
	take_event();
	poll_all(1);
	close_all();

	open_all(64, true);
	cq_arm(&rcq, false); /* the word 0 on a fresh CQ */
	message(false);
	take_event();
	close_all();
}

static void solicited(void)
{
	open_all(64, true);
	cq_arm(&rcq, true);
	message(false);
	CHECK(!channel_readable(&channel, 3));
	message(true);
	take_event();
	poll_all(2);
	/* An error counts as solicited. */
	cq_arm(&rcq, true);
	qp_recv(&qp[1], NULL, 0);
	qp_state(&qp[1], IBV_QPS_ERR);
	take_event();
	close_all();
}

/* Takes all completions, and asks for an event of those to come when none can come any more that was asked for before. */
static void arm_anew(void)
{
	struct wc wc;

	while (cq_poll(&rcq, &wc))
		;
	for (;;) {
		cq_arm(&rcq, false);
		emu_lock(); /* the device isn't just about to tell of something */
		emu_unlock();
		if (!channel_readable(&channel, 0))
			return;
		take_event();
	}
}

static void moderation(void)
{
	uint64_t t;
	bool early;

	open_all(64, true);
	rcq.cq.moderate_count = 4;
	rcq.cq.moderate_period = 60000;
	/* Three of four: no event before the period is over, which is looked at again if this thread was off the CPU that long. */
	do {
		arm_anew();
		t = monotonic_us();
		for (unsigned i = 0; i < 3; i++)
			message(false);
		early = channel_readable(&channel, 2);
	} while (monotonic_us() - t >= 60000);
	CHECK(!early);
	message(false);
	take_event();
	poll_all(4);
	cq_arm(&rcq, false);
	t = monotonic_us();
	message(false);
	take_event();
	t = monotonic_us() - t;
	CHECK_TIME(t, 60000);
	/* The period is that of what is asked for last: one of which the completions were taken, without an event, leaves nothing. */
	arm_anew();
	message(false);
	arm_anew();
	sleep_ms(70);
	t = monotonic_us();
	message(false);
	take_event();
	t = monotonic_us() - t;
	CHECK_TIME(t, 60000);
	close_all();
}

/* libmlx5's mlx5_cq_resize_copy_cqes(). */
static void copy_after_resize(struct tcq *t, uint8_t *old, uint32_t nold)
{
	uint32_t i = t->ci;

	for (;; i++) {
		struct mlx5_cqe64 *s = (void *)(old + (size_t)(i & (nold - 1)) * 64), *d;

		CHECK_EQ(s->op_own & 1, !!(i & nold));
		if (s->op_own >> 4 == MLX5_CQE_RESIZE_CQ)
			break;
		d = (void *)(t->cq.buf + (size_t)((i + 1) & (t->cq.ncqe - 1)) * 64);
		memcpy(d, s, 64);
		d->op_own = (uint8_t)((d->op_own & ~1) | !!((i + 1) & t->cq.ncqe));
	}
	t->ci++;
}

static void resize(void)
{
	static const uint32_t sizes[] = { 16, 4, 64, 8 };
	uint8_t *old, *new;
	uint32_t nold;

	open_all(8, true);
	for (unsigned round = 0; round < 4; round++) {
		for (unsigned k = 0; k < 3; k++)
			message(false);
		old = rcq.cq.buf;
		nold = rcq.cq.ncqe;
		new = aligned_alloc(4096, 4096);
		emu_lock();
		CHECK_EQ(emu_cq_resize(&rcq.cq, new, 2, 64), EINVAL);
		CHECK_EQ(emu_cq_resize(&rcq.cq, new, sizes[round], 64), 0);
		copy_after_resize(&rcq, old, nold);
		emu_unlock();
		free(old);
		message(false);
		poll_all(4);
	}
	/* The whole of the new ring can be used. */
	for (unsigned k = 0; k < 8; k++)
		message(false);
	CHECK_EQ(async_event(&app, NULL, 1), -1);
	poll_all(8);
	close_all();
}

static void big_cqes(void)
{
	app_open(&app, 0);
	cq_new(&scq, &app, 8, NULL);
	cq_free(&scq);
	scq.cq.cqe_size = 128;
	scq.ci = 0;
	scq.db[0] = 0;
	scq.cq = (struct emu_cq){ .o.ctx = &app.ctx, .ncqe = 8, .cqe_size = 128, .db = scq.db,
				  .buf = aligned_alloc(4096, 4096) };
	emu_lock();
	CHECK_EQ(emu_cq_insert(app.dev, &scq.cq), 0);
	emu_unlock();
	cq_new(&rcq, &app, 8, NULL);
	for (unsigned i = 0; i < 2; i++)
		qp_new(&qp[i], &app, &scq, &rcq, (struct qp_opts){ 0 });
	qp_connect(&qp[0], &qp[1]);
	for (unsigned i = 0; i < 20; i++) {
		struct wr w = { .opcode = MLX5_OPCODE_NOP };
		struct wc wc;

		qp_post(&qp[0], &w);
		cq_wait(&scq, &wc);
		CHECK_EQ(wc.counter, i);
	}
	for (unsigned i = 0; i < 2; i++)
		qp_free(&qp[i]);
	cq_free(&scq);
	cq_free(&rcq);
	app_close(&app);
}

/* More events than a pipe holds: none is lost, and those of a CQ that goes are taken back. */
static void many_events(void)
{
	enum { N = 20000 };
	struct tcq other;
	unsigned got = 0;

	open_all(64, true);
	cq_new(&other, &app, 8, &channel);
	emu_lock();
	for (unsigned i = 0; i < N; i++) {
		uint64_t record = i % 4 ? (uintptr_t)&rcq : (uintptr_t)&other;

		channel_send(&channel, &record);
		other.cq.comp_events += !(i % 4);
	}
	emu_unlock();
	for (; got < 100; got++)
		channel_read(&channel);
	cq_free(&other);
	CHECK_EQ(other.cq.comp_events, 25); /* those that were read */
	/* The device thread brings what the pipe had no room for. */
	for (; got < 25 + N / 4 * 3; got++) {
		CHECK(channel_readable(&channel, PATIENCE_MS));
		CHECK_EQ(channel_read(&channel), (uintptr_t)&rcq);
	}
	CHECK(!channel_readable(&channel, 100));
	close_all();
}

int main(void)
{
	world_open(1);
	wraps_and_overruns();
	laps_of_the_index();
	events();
	solicited();
	moderation();
	resize();
	big_cqes();
	many_events();
	world_close();
	return 0;
}

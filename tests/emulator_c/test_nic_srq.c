/* SPDX-License-Identifier: MIT
 * Shared receive queues: order, limit, exhaustion, broken lists, what becomes of a QP on one. */
#include "nic_world.h"

static struct app app;
static struct tcq scq, rcq;
static struct tsrq srq;
static struct tqp tx[2], rx[2];
static struct tmr mr;
static uint8_t mem[1 << 16];

static void open_all(uint32_t n)
{
	app_open(&app, 0);
	cq_new(&scq, &app, 256, NULL);
	cq_new(&rcq, &app, 256, NULL);
	mr_new(&mr, &app, mem, sizeof(mem), ALL_ACCESS);
	srq_new(&srq, &app, n, 3);
	for (unsigned i = 0; i < 2; i++) {
		qp_new(&tx[i], &app, &scq, &scq, (struct qp_opts){ 0 });
		qp_new(&rx[i], &app, &rcq, &rcq, (struct qp_opts){ .srq = &srq });
		qp_connect(&tx[i], &rx[i]);
	}
}

static void close_all(void)
{
	for (unsigned i = 0; i < 2; i++) {
		qp_free(&tx[i]);
		qp_free(&rx[i]);
	}
	srq_free(&srq);
	mr_free(&mr);
	cq_free(&scq);
	cq_free(&rcq);
	app_close(&app);
}

static void post(uint32_t off, uint32_t len)
{
	struct sge s[2] = { { mem + off, len, mr.m.key }, { mem + off + 512, 512, mr.m.key } };

	srq_post(&srq, s, 2);
}

static void send(unsigned from, uint32_t len)
{
	struct sge s = { mem, len, mr.m.key };
	struct wr w = { .opcode = MLX5_OPCODE_SEND, .sg = &s, .nsg = 1, .unsignalled = true };

	qp_post(&tx[from], &w);
}

static void in_order_for_all(void)
{
	struct wc wc;

	open_all(16);
	memset(mem, 0x5a, 64);
	for (unsigned round = 0; round < 100; round++) {
		for (unsigned i = 0; i < 8; i++)
			post(4096 + 1024 * i, 8);
		for (unsigned i = 0; i < 8; i++) {
			send(i & 1, 20);
			cq_wait(&rcq, &wc);
			CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND);
			CHECK_EQ(wc.counter, (round * 8 + i) % 16);
			CHECK_EQ(wc.uidx, rx[i & 1].qp.uidx);
			CHECK_EQ(wc.bytes, 20);
		}
	}
	CHECK_EQ(mem[4096 + 7], 0x5a);
	CHECK_EQ(mem[4096 + 8], 0);
	CHECK_EQ(mem[4096 + 512 + 11], 0x5a);
	CHECK_EQ(mem[4096 + 512 + 12], 0);
	close_all();
}

static void limit(void)
{
	uint64_t element;
	struct wc wc;

	open_all(16);
	for (unsigned i = 0; i < 6; i++)
		post(4096, 8);
	emu_lock();
	emu_srq_set_limit(&srq.srq, 4);
	emu_unlock();
	for (unsigned i = 0; i < 2; i++) {
		send(0, 1);
		cq_wait(&rcq, &wc);
	}
	CHECK_EQ(async_event(&app, NULL, 2), -1); /* four are left, not fewer */
	send(0, 1);
	CHECK_EQ(async_event(&app, &element, PATIENCE_MS), IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK_EQ(element, (uintptr_t)&srq);
	send(0, 1);
	cq_wait(&rcq, &wc);
	cq_wait(&rcq, &wc);
	CHECK_EQ(async_event(&app, NULL, 2), -1); /* told once */
	emu_lock();
	emu_srq_set_limit(&srq.srq, 4);
	emu_unlock();
	CHECK_EQ(async_event(&app, &element, PATIENCE_MS), IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK_EQ(srq.srq.async_events, 2);
	close_all();
}

static void runs_dry(void)
{
	struct wc wc;

	open_all(4);
	for (unsigned i = 0; i < 3; i++)
		post(4096, 8);
	for (unsigned i = 0; i < 5; i++)
		send(i & 1, 1);
	for (unsigned i = 0; i < 3; i++)
		cq_wait(&rcq, &wc);
	cq_expect_nothing(&rcq, 3);
	for (unsigned i = 0; i < 2; i++) {
		post(4096, 8);
		cq_wait(&rcq, &wc);
		CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND);
	}
	close_all();
}

static void errors(void)
{
	struct sge bad = { mem, 8, 0xbad00 };
	uint64_t element;
	struct wc wc;

	open_all(8);
	srq_post(&srq, &bad, 1);
	post(4096, 8);
	send(0, 4);
	cq_wait(&scq, &wc);
	CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
	cq_wait(&rcq, &wc);
	CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	CHECK_EQ(wc.counter, 0);
	CHECK_EQ(async_event(&app, &element, PATIENCE_MS), IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK_EQ(element, (uintptr_t)&rx[0]);
	/* The others' WQEs stay theirs. */
	cq_expect_nothing(&rcq, 3);
	send(1, 4);
	cq_wait(&rcq, &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND);
	CHECK_EQ(wc.counter, 1);

	/* A list that leads out of the buffer. */
	((struct mlx5_wqe_srq_next_seg *)(srq.srq.buf + (2ul << srq.srq.wqe_shift)))->next_wqe_index = htobe16(9000);
	post(4096, 8);
	srq.head = 0;
	send(1, 4);
	cq_wait(&rcq, &wc);
	CHECK_EQ(wc.counter, 2);
	post(4096, 8);
	send(1, 4);
	CHECK_EQ(async_event(&app, &element, PATIENCE_MS), IBV_EVENT_SRQ_ERR);
	CHECK_EQ(element, (uintptr_t)&srq);
	CHECK_EQ(async_event(&app, NULL, 3), -1);
	close_all();
}

int main(void)
{
	world_open(1);
	in_order_for_all();
	limit();
	runs_dry();
	errors();
	world_close();
	return 0;
}

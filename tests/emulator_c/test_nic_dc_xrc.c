/* SPDX-License-Identifier: MIT
 * Dynamically connected transport, with streams, and extended reliable connections. */
#include <errno.h>

#include "nic_world.h"

static struct app app[2];
static struct tcq scq, rcq, xcq;
static struct tsrq srq, other;
static struct tqp tx, rx;
static struct tmr mr[2];
static uint8_t mem[2][1 << 20];
static union ibv_gid gid;

#define KEY 0x1122334455667788ull

static void open_all(struct qp_opts tx_opts, struct qp_opts rx_opts)
{
	gid = device_gid(1);
	for (unsigned i = 0; i < 2; i++) {
		app_open(&app[i], i);
		mr_new(&mr[i], &app[i], mem[i], sizeof(mem[i]), ALL_ACCESS);
	}
	for (unsigned k = 0; k < sizeof(mem[0]); k++)
		mem[0][k] = (uint8_t)(k * 11 + (k >> 9));
	memset(mem[1], 0, sizeof(mem[1]));
	cq_new(&scq, &app[0], 64, NULL);
	cq_new(&rcq, &app[1], 64, NULL);
	cq_new(&xcq, &app[1], 64, NULL);
	srq_new(&srq, &app[1], 16, 1);
	srq_new(&other, &app[1], 16, 1);
	rx_opts.srq = rx_opts.dct ? &srq : NULL;
	qp_new(&tx, &app[0], &scq, &scq, tx_opts);
	qp_new(&rx, &app[1], &rcq, &rcq, rx_opts);
}

static void close_all(void)
{
	qp_free(&tx);
	qp_free(&rx);
	srq_free(&srq);
	srq_free(&other);
	cq_free(&scq);
	cq_free(&rcq);
	cq_free(&xcq);
	for (unsigned i = 0; i < 2; i++) {
		mr_free(&mr[i]);
		app_close(&app[i]);
	}
}

static uint8_t sent(void)
{
	struct wc wc;

	cq_wait(&scq, &wc);
	return wc.syndrome;
}

static void recv_on(struct tsrq *q, uint32_t off, uint32_t len)
{
	struct sge s = { mem[1] + off, len, mr[1].m.key };

	srq_post(q, &s, 1);
}

/* ---------------------------------------------------------------- DC */

static struct sge sg;

static struct wr dc(uint8_t op, uint32_t len, uint16_t stream)
{
	sg = (struct sge){ mem[0], len, mr[0].m.key };
	return (struct wr){ .opcode = op, .sg = &sg, .nsg = 1, .raddr = (uintptr_t)mem[1] + 500000, .rkey = mr[1].m.key,
			    .dqpn = rx.qp.qpn, .dc_key = KEY, .dgid = &gid, .stream = stream };
}

static void dc_open(uint8_t log_concurrent, uint8_t log_errored)
{
	open_all((struct qp_opts){ .type = IBV_QPT_DRIVER, .dci = true, .log_num_concurrent = log_concurrent,
				   .log_num_errored = log_errored },
		 (struct qp_opts){ .type = IBV_QPT_DRIVER, .dct = true });
	rx.qp.dc_key = KEY;
	rx.qp.dest_rd_atomic = 0; /* a DCT has no such attribute */
	tx.qp.timeout = 8;
	tx.qp.retry_cnt = 1;
	qp_state(&rx, IBV_QPS_INIT);
	qp_state(&rx, IBV_QPS_RTR);
	qp_to_rts(&tx);
}

static void dc_traffic(void)
{
	struct wr w;
	struct wc wc;

	dc_open(0, 0);
	recv_on(&srq, 0, 400000);
	w = dc(MLX5_OPCODE_SEND_IMM, 300000, 0);
	w.imm = 3;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	cq_wait(&rcq, &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND_IMM);
	CHECK_EQ(wc.uidx, rx.qp.uidx);
	CHECK_EQ(wc.bytes, 300000);
	CHECK(!memcmp(mem[0], mem[1], 300000));
	w = dc(MLX5_OPCODE_RDMA_WRITE, 1000, 0);
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	CHECK(!memcmp(mem[0], mem[1] + 500000, 1000));
	w = dc(MLX5_OPCODE_RDMA_READ, 1000, 0);
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	w = dc(MLX5_OPCODE_ATOMIC_FA, 8, 0);
	w.swap_add = 1;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	/* The target outlives what an initiator does wrong. */
	w = dc(MLX5_OPCODE_RDMA_WRITE, 8, 0);
	w.rkey ^= 0x1000;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	CHECK_EQ(qp_state_now(&rx), IBV_QPS_RTR);
	CHECK_EQ(qp_state_now(&tx), IBV_QPS_ERR);
	close_all();

	dc_open(0, 0);
	w = dc(MLX5_OPCODE_RDMA_WRITE, 8, 0);
	w.dc_key ^= 1;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	close_all();
}

/* Long messages of several initiators to one target come mixed, and are told apart. */
static void dc_many(void)
{
	enum { N = 4, LEN = 800000 };
	struct tqp more[N];
	struct sge s[N];
	uint8_t *from, *to;
	struct tmr src, dst;
	struct wc wc;

	dc_open(0, 0);
	from = malloc(N * LEN);
	to = malloc(N * LEN);
	for (unsigned i = 0; i < N; i++)
		memset(from + i * LEN, (int)i + 1, LEN);
	mr_new(&src, &app[0], from, N * LEN, ALL_ACCESS);
	mr_new(&dst, &app[1], to, N * LEN, ALL_ACCESS);
	for (unsigned i = 0; i < N; i++) {
		struct sge r = { to + i * LEN, LEN, dst.m.key };

		srq_post(&srq, &r, 1);
		qp_new(&more[i], &app[0], &scq, &scq, (struct qp_opts){ .type = IBV_QPT_DRIVER, .dci = true });
		qp_to_rts(&more[i]);
	}
	for (unsigned round = 0; round < 3; round++) {
		for (unsigned i = 0; i < N; i++) {
			struct wr w = dc(MLX5_OPCODE_SEND_IMM, LEN, 0);

			s[i] = (struct sge){ from + i * LEN, LEN, src.m.key };
			w.sg = &s[i];
			w.imm = i + 1;
			qp_post(&more[i], &w);
		}
		for (unsigned i = 0; i < N; i++) {
			const uint8_t *got;

			cq_wait(&rcq, &wc);
			CHECK_EQ(wc.bytes, LEN);
			CHECK_EQ(sent(), 0);
			got = to + wc.counter % N * LEN;
			CHECK_EQ(got[0], wc.imm);
			CHECK(!memcmp(got, got + 1, LEN - 1));
		}
		for (unsigned i = 0; i < N && round < 2; i++) {
			struct sge r = { to + srq.head % N * LEN, LEN, dst.m.key };

			srq_post(&srq, &r, 1);
		}
	}
	for (unsigned i = 0; i < N; i++)
		qp_free(&more[i]);
	mr_free(&src);
	mr_free(&dst);
	free(from);
	free(to);
	close_all();
}

static void dc_streams(void)
{
	struct wr good, bad;

	dc_open(2, 1);
	for (unsigned round = 0; round < 2; round++) {
		good = dc(MLX5_OPCODE_RDMA_WRITE, 8, 2);
		bad = dc(MLX5_OPCODE_RDMA_WRITE, 8, 1);
		bad.rkey ^= 0x1000;
		qp_post(&tx, &bad);
		CHECK_EQ(sent(), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
		bad.rkey ^= 0x1000;
		qp_post(&tx, &bad);
		CHECK_EQ(sent(), MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		qp_post(&tx, &good);
		CHECK_EQ(sent(), 0);
		emu_lock();
		CHECK_EQ(emu_dci_stream_reset(&tx.qp, 2), EINVAL);
		CHECK_EQ(emu_dci_stream_reset(&tx.qp, 1), 0);
		emu_unlock();
		qp_post(&tx, &bad);
		CHECK_EQ(sent(), 0);
	}
	/* Two at once are too many. */
	for (uint16_t stream = 1; stream <= 2; stream++) {
		bad = dc(MLX5_OPCODE_RDMA_WRITE, 8, stream);
		bad.rkey ^= 0x1000;
		qp_post(&tx, &bad);
		CHECK_EQ(sent(), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	}
	CHECK_EQ(qp_state_now(&tx), IBV_QPS_ERR);
	close_all();
}

/* ---------------------------------------------------------------- streams beside each other */

#define AT 500000u /* where dc() writes to */

static bool arrived(uint8_t value)
{
	return __atomic_load_n(&mem[1][AT], __ATOMIC_ACQUIRE) == value;
}

static void wait_arrived(uint8_t value)
{
	uint64_t end = monotonic_us() + PATIENCE_US;

	while (!arrived(value))
		CHECK(monotonic_us() < end);
}

static struct wr byte(const uint8_t *value, uint16_t stream)
{
	struct wr w = dc(MLX5_OPCODE_RDMA_WRITE, 1, stream);

	w.sg = NULL;
	w.nsg = 0;
	w.inl = value;
	w.ninl = 1;
	return w;
}

static void post_write(uint8_t value, uint16_t stream)
{
	struct wr w = byte(&value, stream);

	qp_post(&tx, &w);
}

/* For which there is no receive. */
static void post_waiting(uint16_t stream)
{
	struct wr w = dc(MLX5_OPCODE_SEND, 8, stream);

	qp_post(&tx, &w);
}

/* To where nobody is. */
static void post_lost(uint8_t opcode, uint16_t stream)
{
	struct wr w = dc(opcode, 8, stream);

	w.dqpn = 0xfffff;
	qp_post(&tx, &w);
}

static void expect(uint16_t counter, uint8_t syndrome)
{
	struct wc wc;

	cq_wait(&scq, &wc);
	CHECK_EQ(wc.counter, counter);
	CHECK_EQ(wc.syndrome, syndrome);
}

/* One that waits holds up what is on its own stream, and the completions of what was posted behind it. */
static void stream_that_waits(void)
{
	uint16_t at[3];

	dc_open(2, 1);
	at[0] = (uint16_t)tx.sq_pi;
	post_waiting(1);
	at[1] = (uint16_t)tx.sq_pi;
	post_write(7, 2);
	wait_arrived(7);
	at[2] = (uint16_t)tx.sq_pi;
	post_write(8, 1);
	cq_expect_nothing(&scq, 20);
	CHECK(arrived(7));
	recv_on(&srq, 0, 64);
	for (unsigned i = 0; i < 3; i++)
		expect(at[i], 0);
	CHECK(arrived(8));
	close_all();
}

/* As many at a time as were asked for. */
static void streams_at_a_time(void)
{
	dc_open(1, 1);
	post_waiting(1);
	post_waiting(2);
	post_write(9, 3);
	cq_expect_nothing(&scq, 20);
	CHECK(!arrived(9));
	recv_on(&srq, 0, 64);
	wait_arrived(9);
	recv_on(&srq, 0, 64);
	for (unsigned i = 0; i < 3; i++)
		CHECK_EQ(sent(), 0);
	close_all();
}

/* What is behind a fence comes after the READ, and so after what isn't. */
static void fence_over_streams(void)
{
	const uint8_t value = 3, other = 4;
	struct wr read, behind, beside;

	dc_open(2, 2);
	tx.qp.timeout = 13;
	read = dc(MLX5_OPCODE_RDMA_READ, 8, 1);
	read.dqpn = 0xfffff;
	behind = byte(&value, 2);
	behind.fence = true;
	beside = byte(&other, 3);
	/* All at once: with the last of them later than the READ's end there would be nothing to see. */
	emu_lock();
	qp_post_quietly(&tx, &read);
	qp_post_quietly(&tx, &behind);
	qp_post_quietly(&tx, &beside);
	emu_qp_kick(&tx.qp);
	emu_unlock();
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	CHECK_EQ(sent(), 0);
	CHECK_EQ(sent(), 0);
	CHECK(arrived(3));
	close_all();
}

/* What a shrinking CQ waits for: work that goes on, not a READ without an answer, nor what is fenced by it. */
static void fenced_is_waiting(void)
{
	uint64_t end = monotonic_us() + PATIENCE_US;
	const uint8_t value = 3;
	struct wr behind;
	bool runs = true;

	dc_open(2, 2);
	tx.qp.timeout = 0; /* for ever */
	post_lost(MLX5_OPCODE_RDMA_READ, 1);
	behind = byte(&value, 2);
	behind.fence = true;
	qp_post(&tx, &behind);
	post_write(4, 3);
	wait_arrived(4);
	while (runs) {
		CHECK(monotonic_us() < end);
		emu_lock();
		runs = emu_qp_streams_run(&tx.qp);
		emu_unlock();
	}
	close_all();
}

/* Errors are counted when they happen, and told in their turn. */
static void streams_that_fail(void)
{
	struct wr bad;

	dc_open(2, 1);
	tx.qp.timeout = 1;
	tx.qp.retry_cnt = 0;
	post_waiting(0);
	post_lost(MLX5_OPCODE_RDMA_WRITE, 1);
	post_write(1, 1);
	sleep_ms(10);
	CHECK(!arrived(1));
	post_write(2, 2);
	wait_arrived(2);
	cq_expect_nothing(&scq, 1);
	CHECK_EQ(qp_state_now(&tx), IBV_QPS_RTS);
	recv_on(&srq, 0, 64);
	CHECK_EQ(sent(), 0);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	CHECK_EQ(sent(), 0);
	emu_lock();
	CHECK_EQ(emu_dci_stream_reset(&tx.qp, 1), 0);
	emu_unlock();
	post_write(3, 1);
	CHECK_EQ(sent(), 0);
	CHECK(arrived(3));
	/* With the second the DCI is in error, and what waited isn't done any more. */
	post_waiting(0);
	for (uint16_t stream = 1; stream <= 2; stream++) {
		bad = dc(MLX5_OPCODE_RDMA_WRITE, 8, stream);
		bad.rkey ^= 0x1000;
		qp_post(&tx, &bad);
	}
	post_write(4, 3);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	sent(); /* as it happens */
	CHECK_EQ(qp_state_now(&tx), IBV_QPS_ERR);
	/* And from the beginning. */
	qp_state(&tx, IBV_QPS_RESET);
	qp_to_rts(&tx);
	post_write(5, 1);
	CHECK_EQ(sent(), 0);
	CHECK(arrived(5));
	/* Closed with work on its way. */
	post_waiting(1);
	post_lost(MLX5_OPCODE_RDMA_READ, 2);
	close_all();
}

/* False: it took so long that the retries may have run out as they should. */
static bool posted_behind_one_without_receive(void)
{
	uint64_t begin;
	bool in_time;

	dc_open(2, 1);
	tx.qp.rnr_retry = 6;
	rx.qp.min_rnr_timer = 28; /* 164 ms, seven times */
	begin = monotonic_us();
	post_waiting(1);
	for (uint8_t i = 0; i < 20; i++) {
		post_write(i, 1);
		sleep_ms(1);
	}
	recv_on(&srq, 0, 64);
	in_time = monotonic_us() - begin < 7 * 163840;
	for (unsigned i = 0; i < 21 && in_time; i++)
		CHECK_EQ(sent(), 0);
	close_all();
	return in_time;
}

/* What is posted to a stream that waits for a timer makes it wait no shorter, and uses up none of its retries. */
static void posting_behind_one_that_waits(void)
{
	while (!posted_behind_one_without_receive())
		;
	/* And for an answer. */
	dc_open(2, 1);
	tx.qp.timeout = 20; /* 4 s, seven times */
	tx.qp.retry_cnt = 6;
	post_lost(MLX5_OPCODE_RDMA_WRITE, 1);
	for (uint8_t i = 0; i < 20; i++) {
		post_write(i, 1);
		cq_expect_nothing(&scq, 1);
	}
	close_all();
}

/* A stream is in error once, whatever is posted to it meanwhile. */
static void streams_that_fail_again(void)
{
	struct wr bad, nonsense;

	dc_open(2, 1);
	for (unsigned round = 0; round < 3; round++) {
		bad = dc(MLX5_OPCODE_RDMA_WRITE, 8, 1);
		bad.rkey ^= 0x1000;
		nonsense = dc(0x3f, 8, 1);
		qp_post(&tx, &bad);
		CHECK_EQ(sent(), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
		qp_post(&tx, &nonsense);
		CHECK_EQ(sent(), MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		CHECK_EQ(qp_state_now(&tx), IBV_QPS_RTS);
		emu_lock();
		CHECK_EQ(emu_dci_stream_reset(&tx.qp, 1), 0);
		emu_unlock();
		post_write((uint8_t)(round + 1), 1);
		CHECK_EQ(sent(), 0);
		CHECK(arrived((uint8_t)(round + 1)));
	}
	close_all();
}

/* SQD ends what was taken off the queue, and begins nothing new. */
static void streams_drain(void)
{
	dc_open(2, 1);
	post_waiting(1);
	post_write(6, 2);
	wait_arrived(6);
	qp_state(&tx, IBV_QPS_SQD);
	post_write(7, 2);
	CHECK_EQ(async_event(&app[0], NULL, 20), -1);
	recv_on(&srq, 0, 64);
	CHECK_EQ(async_event(&app[0], NULL, PATIENCE_MS), IBV_EVENT_SQ_DRAINED);
	CHECK_EQ(sent(), 0);
	CHECK_EQ(sent(), 0);
	CHECK(arrived(6));
	qp_state(&tx, IBV_QPS_RTS);
	CHECK_EQ(sent(), 0);
	CHECK(arrived(7));
	close_all();
}

/* Long messages of several streams to one target come whole, as from several senders; short ones of a stream in order. */
static void streams_at_random(void)
{
	enum { STREAMS = 6, N = 60 };
	uint32_t next[STREAMS] = { 0 }, seen[STREAMS] = { 0 };
	unsigned posted = 0, done = 0, received = 0;
	struct wc wc;

	dc_open(2, 1);
	while (done < N || received < N) {
		if (posted < N && posted - done < 12) {
			uint16_t stream = (uint16_t)(rand() % STREAMS);
			uint32_t len = rand() % 3 ? (uint32_t)rand() % 2000 : 300000 + (uint32_t)rand() % 300000;
			struct wr w = dc(MLX5_OPCODE_SEND_IMM, len, stream);

			sg.p = mem[0] + posted;
			w.imm = (uint32_t)stream << 16 | next[stream]++;
			qp_post(&tx, &w);
			posted++;
		}
		if (rand() % 2 && srq.posted < N && srq.posted - received < 16)
			recv_on(&srq, 0, 700000);
		while (cq_poll(&scq, &wc)) {
			CHECK_EQ(wc.syndrome, 0);
			done++;
		}
		while (cq_poll(&rcq, &wc)) {
			CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND_IMM);
			CHECK_EQ(wc.imm & 0xffff, seen[wc.imm >> 16]);
			seen[wc.imm >> 16]++;
			received++;
		}
	}
	close_all();
}

/* ---------------------------------------------------------------- XRC */

/* What another process sends may say anything: of a message that has begun the rest is for the same SRQ. */
static void other_srq_in_a_message(void)
{
	static uint8_t payload[64];
	union ibv_gid from = device_gid(0);
	struct nic_req req = {
		.opcode = MLX5_OPCODE_SEND, .first = true, .src_qpn = tx.qp.qpn, .dst_qpn = rx.qp.qpn, .psn = nic(&rx.qp)->rx_psn,
		.packets = 1, .src_type = IBV_QPT_XRC_SEND, .src_mtu = IBV_MTU_4096, .msg_len = 128, .len = 64,
		.srqn = srq.srq.srqn, .sgid = &from, .dgid = &gid, .gid_type = app[0].dev->ports[0].gids[0].type,
	};
	static struct nic_sgl data;
	uint8_t timer;

	recv_on(&srq, 0, 128);
	emu_lock();
	sgl_reset(&data);
	CHECK(sgl_add(&data, payload, sizeof(payload)));
	CHECK_EQ(fabric_deliver(app[1].dev, 1, &req, &data, &timer), REPLY_ACK);
	req.first = false;
	req.last = true;
	req.off = 64;
	req.srqn = other.srq.srqn;
	CHECK_EQ(fabric_deliver(app[1].dev, 1, &req, &data, &timer), REPLY_NAK_INVALID);
	emu_unlock();
	CHECK_EQ(qp_state_now(&rx), IBV_QPS_ERR);
}

static void xrc(void)
{
	struct sge s = { mem[0], 100, 0 };
	struct wr w = { .opcode = MLX5_OPCODE_SEND, .sg = &s, .nsg = 1 };
	struct wc wc;

	open_all((struct qp_opts){ .type = IBV_QPT_XRC_SEND }, (struct qp_opts){ .type = IBV_QPT_XRC_RECV });
	s.key = mr[0].m.key;
	srq.srq.xrc = other.srq.xrc = true;
	srq.srq.cq = &rcq.cq;
	other.srq.cq = &xcq.cq;
	srq.srq.uidx = 0x501;
	other.srq.uidx = 0x502;
	rx.qp.pd = NULL; /* of the target QP only the domain matters */
	rx.qp.rcq = rx.qp.scq = NULL;
	qp_connect(&tx, &rx);
	recv_on(&srq, 0, 100);
	recv_on(&other, 200, 100);
	w.srqn = other.srq.srqn;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	cq_wait(&xcq, &wc);
	CHECK_EQ(wc.uidx, 0x502);
	CHECK(!memcmp(mem[0], mem[1] + 200, 100));
	w.srqn = srq.srq.srqn;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	cq_wait(&rcq, &wc);
	CHECK_EQ(wc.uidx, 0x501);
	CHECK(!memcmp(mem[0], mem[1], 100));
	w.opcode = MLX5_OPCODE_RDMA_WRITE;
	w.raddr = (uintptr_t)mem[1] + 1000;
	w.rkey = mr[1].m.key;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	CHECK(!memcmp(mem[0], mem[1] + 1000, 100));
	w.opcode = MLX5_OPCODE_ATOMIC_CS;
	s.len = 8;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), 0);
	w.srqn = 0x7777;
	qp_post(&tx, &w);
	CHECK_EQ(sent(), MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
	CHECK_EQ(qp_state_now(&rx), IBV_QPS_ERR);
	qp_state(&tx, IBV_QPS_RESET);
	qp_state(&rx, IBV_QPS_RESET);
	qp_connect(&tx, &rx);
	other_srq_in_a_message();
	close_all();
}

int main(void)
{
	world_open(2);
	dc_traffic();
	dc_many();
	dc_streams();
	stream_that_waits();
	streams_at_a_time();
	fence_over_streams();
	fenced_is_waiting();
	streams_that_fail();
	posting_behind_one_that_waits();
	streams_that_fail_again();
	streams_drain();
	streams_at_random();
	xrc();
	world_close();
	return 0;
}

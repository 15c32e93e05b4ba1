/* SPDX-License-Identifier: MIT
 * Reliable connections: every opcode, lengths, scatter lists, inline data, wrapping rings, retries, errors. */
#include "nic_world.h"

static struct app app[2];
static struct tcq scq[2], rcq[2];
static struct tqp qp[2];
static struct tmr mr[2];
static uint8_t mem[2][1 << 16] __attribute__((aligned(4096)));

static void pair_open(struct qp_opts o)
{
	for (unsigned i = 0; i < 2; i++) {
		app_open(&app[i], i);
		cq_new(&scq[i], &app[i], 256, NULL);
		cq_new(&rcq[i], &app[i], 256, NULL);
		mr_new(&mr[i], &app[i], mem[i], sizeof(mem[i]), ALL_ACCESS);
		for (unsigned k = 0; k < sizeof(mem[i]); k++)
			mem[i][k] = (uint8_t)(k * 7 + i);
		qp_new(&qp[i], &app[i], &scq[i], &rcq[i], o);
	}
}

static void pair_close(void)
{
	for (unsigned i = 0; i < 2; i++) {
		qp_free(&qp[i]);
		cq_free(&scq[i]);
		cq_free(&rcq[i]);
		mr_free(&mr[i]);
		app_close(&app[i]);
	}
}

static struct sge at(unsigned side, uint32_t off, uint32_t len)
{
	return (struct sge){ mem[side] + off, len, mr[side].m.key };
}

static struct wr rdma(uint8_t op, const struct sge *sg, uint32_t n, uint32_t remote_off)
{
	return (struct wr){
		.opcode = op, .sg = sg, .nsg = n, .raddr = (uintptr_t)mem[1] + remote_off, .rkey = mr[1].m.key,
	};
}

static void expect(struct tcq *cq, struct tqp *q, uint8_t op, uint8_t syndrome)
{
	struct wc wc;

	cq_wait(cq, &wc);
	CHECK_EQ(wc.op, op);
	CHECK_EQ(wc.syndrome, syndrome);
	CHECK_EQ(wc.qpn, q->qp.qpn);
	CHECK_EQ(wc.uidx, q->qp.uidx);
}

static void expect_ok(void)
{
	expect(&scq[0], &qp[0], MLX5_CQE_REQ, 0);
}

static void write_and_read(void)
{
	static const uint32_t lens[] = { 0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 30000 };

	pair_open((struct qp_opts){ 0 });
	qp_connect(&qp[0], &qp[1]);
	for (unsigned i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
		struct sge s = at(0, 100 + i, lens[i]);
		struct wr w = rdma(MLX5_OPCODE_RDMA_WRITE, &s, lens[i] != 0, 1000 + 3 * i);
		uint8_t before = mem[1][1000 + 3 * i + lens[i]];

		qp_post(&qp[0], &w);
		expect_ok();
		CHECK(!memcmp(mem[1] + 1000 + 3 * i, mem[0] + 100 + i, lens[i]));
		CHECK_EQ(mem[1][1000 + 3 * i + lens[i]], before);
		s = at(0, 33000, lens[i]);
		w = rdma(MLX5_OPCODE_RDMA_READ, &s, lens[i] != 0, 5 + i);
		qp_post(&qp[0], &w);
		expect_ok();
		CHECK(!memcmp(mem[0] + 33000, mem[1] + 5 + i, lens[i]));
	}
	pair_close();
}

static void send_with_everything(void)
{
	struct sge r[3], s[4];
	struct wr w;
	struct wc wc;

	pair_open((struct qp_opts){ .rq_sge = 4 });
	qp_connect(&qp[0], &qp[1]);
	r[0] = at(1, 0, 10);
	r[1] = at(1, 1000, 100);
	r[2] = at(1, 2000, 5000);
	for (unsigned i = 0; i < 4; i++)
		s[i] = at(0, 4000 * i, 1000 + i);
	qp_recv(&qp[1], r, 3);
	w = (struct wr){ .opcode = MLX5_OPCODE_SEND_IMM, .sg = s, .nsg = 4, .imm = 0x89abcdef, .solicited = true };
	qp_post(&qp[0], &w);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND_IMM);
	CHECK_EQ(wc.bytes, 4006);
	CHECK_EQ(wc.imm, 0x89abcdef);
	CHECK_EQ(wc.src_qpn, qp[0].qp.qpn);
	CHECK(wc.solicited);
	expect_ok();
	CHECK(!memcmp(mem[1], mem[0], 10));
	CHECK(!memcmp(mem[1] + 1000, mem[0] + 10, 100));
	CHECK(!memcmp(mem[1] + 2000, mem[0] + 110, 890));
	CHECK(!memcmp(mem[1] + 2890, mem[0] + 4000, 1001));

	/* WRITE with immediate data takes a receive, whose buffers it leaves alone. */
	qp_recv(&qp[1], r, 1);
	w = rdma(MLX5_OPCODE_RDMA_WRITE_IMM, s, 2, 20000);
	w.imm = 7;
	qp_post(&qp[0], &w);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_WR_IMM);
	CHECK_EQ(wc.counter, 1);
	CHECK_EQ(wc.bytes, 2001);
	CHECK_EQ(wc.imm, 7);
	expect_ok();
	CHECK(!memcmp(mem[1] + 20000, mem[0], 1000));

	/* Nothing at all is a message too. */
	qp_recv(&qp[1], NULL, 0);
	w = (struct wr){ .opcode = MLX5_OPCODE_SEND };
	qp_post(&qp[0], &w);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND);
	CHECK_EQ(wc.bytes, 0);
	expect_ok();
	pair_close();
}

static void atomics(void)
{
	struct sge s;
	struct wr w;
	uint64_t v = 100;

	pair_open((struct qp_opts){ 0 });
	qp_connect(&qp[0], &qp[1]);
	memcpy(mem[1] + 64, &v, 8);
	s = at(0, 8, 8);
	w = rdma(MLX5_OPCODE_ATOMIC_FA, &s, 1, 64);
	w.swap_add = 5;
	qp_post(&qp[0], &w);
	expect_ok();
	memcpy(&v, mem[0] + 8, 8);
	CHECK_EQ(v, 100);
	memcpy(&v, mem[1] + 64, 8);
	CHECK_EQ(v, 105);
	w.opcode = MLX5_OPCODE_ATOMIC_CS;
	w.compare = 105;
	w.swap_add = 1;
	qp_post(&qp[0], &w);
	expect_ok();
	memcpy(&v, mem[1] + 64, 8);
	CHECK_EQ(v, 1);
	qp_post(&qp[0], &w); /* compares unequal now */
	expect_ok();
	memcpy(&v, mem[1] + 64, 8);
	CHECK_EQ(v, 1);
	memcpy(&v, mem[0] + 8, 8);
	CHECK_EQ(v, 1);
	w.raddr += 4;
	qp_post(&qp[0], &w);
	expect(&scq[0], &qp[0], MLX5_CQE_REQ_ERR, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
	CHECK_EQ(async_event(&app[1], NULL, PATIENCE_MS), IBV_EVENT_QP_REQ_ERR);
	pair_close();
}

/* Inline data of every length, long lists and unsignalled WQEs, until the ring has wrapped many times. */
static void ring_wraps(void)
{
	uint8_t data[900];
	struct sge s[20];
	struct wr w;
	struct wc wc;

	pair_open((struct qp_opts){ .sq_nbb = 32 });
	qp_connect(&qp[0], &qp[1]);
	for (unsigned i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 3);
	for (unsigned len = 1; len <= sizeof(data); len += 7) {
		w = rdma(MLX5_OPCODE_RDMA_WRITE, NULL, 0, 64);
		w.inl = data;
		w.ninl = len;
		w.unsignalled = len & 1;
		memset(mem[1] + 64, 0, len + 1);
		qp_post(&qp[0], &w);
		w = (struct wr){ .opcode = MLX5_OPCODE_NOP };
		qp_post(&qp[0], &w);
		do
			cq_wait(&scq[0], &wc);
		while (wc.wqe_op != MLX5_OPCODE_NOP);
		CHECK(!memcmp(mem[1] + 64, data, len));
		CHECK_EQ(mem[1][64 + len], 0);
	}
	for (unsigned k = 0; k < 200; k++) {
		for (unsigned i = 0; i < 20; i++)
			s[i] = at(0, 100 * i + k, 1 + i);
		w = rdma(MLX5_OPCODE_RDMA_WRITE, s, 1 + k % 20, 4096);
		qp_post(&qp[0], &w);
		expect_ok();
		CHECK_EQ(mem[1][4096], mem[0][k]);
		if (k % 20)
			CHECK_EQ(mem[1][4097], mem[0][100 + k]);
	}
	pair_close();
}

static void rnr(void)
{
	struct sge s, r;
	struct wr w = { .opcode = MLX5_OPCODE_SEND, .sg = &s, .nsg = 1 };
	uint64_t t;

	/* Exhausted: three retries of 10 ms each. */
	pair_open((struct qp_opts){ 0 });
	qp[0].qp.rnr_retry = 3;
	qp[1].qp.min_rnr_timer = 20;
	qp_connect(&qp[0], &qp[1]);
	s = at(0, 0, 8);
	r = at(1, 0, 8);
	t = monotonic_us();
	qp_post(&qp[0], &w);
	qp_post(&qp[0], &w);
	expect(&scq[0], &qp[0], MLX5_CQE_REQ_ERR, MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);
	t = monotonic_us() - t;
	CHECK_TIME(t, 30000);
	expect(&scq[0], &qp[0], MLX5_CQE_REQ_ERR, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	CHECK_EQ(qp_state_now(&qp[1]), IBV_QPS_RTS);
	pair_close();

	/* Recovers, in order, with all that was posted meanwhile. */
	pair_open((struct qp_opts){ 0 });
	qp_connect(&qp[0], &qp[1]);
	for (unsigned i = 0; i < 3; i++) {
		s = at(0, 100 * i, 8);
		qp_post(&qp[0], &w);
	}
	cq_expect_nothing(&scq[0], 5);
	for (unsigned i = 0; i < 3; i++) {
		r = at(1, 1000 * i, 8);
		qp_recv(&qp[1], &r, 1);
		expect_ok();
		expect(&rcq[1], &qp[1], MLX5_CQE_RESP_SEND, 0);
		CHECK(!memcmp(mem[1] + 1000 * i, mem[0] + 100 * i, 8));
	}
	pair_close();
}

static void no_peer(void)
{
	struct sge s;
	struct wr w;
	uint64_t t;

	pair_open((struct qp_opts){ 0 });
	qp[0].qp.timeout = 10; /* 4.2 ms */
	qp[0].qp.retry_cnt = 3;
	qp_set_peer(&qp[0], 1, qp[1].qp.qpn);
	qp_to_rts(&qp[0]);
	s = at(0, 0, 8);
	w = rdma(MLX5_OPCODE_RDMA_WRITE, &s, 1, 0);
	t = monotonic_us();
	qp_post(&qp[0], &w);
	expect(&scq[0], &qp[0], MLX5_CQE_REQ_ERR, MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	t = monotonic_us() - t;
	CHECK_TIME(t, 16777);
	CHECK_EQ(qp_state_now(&qp[0]), IBV_QPS_ERR);
	pair_close();

	/* One that comes up while the timer runs is reached. */
	pair_open((struct qp_opts){ 0 });
	qp[0].qp.timeout = 15; /* 134 ms, and again for more than half a minute */
	qp[0].qp.retry_cnt = 255;
	qp_set_peer(&qp[0], 1, qp[1].qp.qpn);
	qp_to_rts(&qp[0]);
	s = at(0, 0, 8);
	w = rdma(MLX5_OPCODE_RDMA_WRITE, &s, 1, 0);
	qp_post(&qp[0], &w);
	sleep_ms(5);
	qp_set_peer(&qp[1], 0, qp[0].qp.qpn);
	qp_to_rts(&qp[1]);
	expect_ok();
	pair_close();

	/* One that names somebody else, or counts from another number, is not. */
	for (unsigned fault = 0; fault < 3; fault++) {
		pair_open((struct qp_opts){ 0 });
		qp[0].qp.timeout = 8;
		qp[0].qp.retry_cnt = 0;
		qp_set_peer(&qp[0], 1, qp[1].qp.qpn);
		qp_set_peer(&qp[1], fault == 1, qp[0].qp.qpn + (fault == 0));
		qp[0].qp.sq_psn = 5;
		qp[1].qp.rq_psn = 5 + (fault == 2);
		qp_to_rts(&qp[0]);
		qp_to_rts(&qp[1]);
		s = at(0, 0, 8);
		w = rdma(MLX5_OPCODE_RDMA_WRITE, &s, 1, 0);
		qp_post(&qp[0], &w);
		expect(&scq[0], &qp[0], MLX5_CQE_REQ_ERR, MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
		pair_close();
	}
}

enum fault {
	BAD_RKEY, NO_RIGHT, PAST_END, OTHER_PD, QP_NO_WRITE, QP_NO_READ, NO_DEPTH, BAD_LKEY, LOCAL_PAST_END, READ_ONLY_SINK,
	RECV_SHORT, RECV_BAD_KEY, BAD_OPCODE, DS_ZERO, DS_BEYOND, LOCAL_DEAD_KEY, MTU,
};

static const struct expectation {
	enum fault fault;
	uint8_t syndrome, recv_syndrome;
	int event; /* on the peer's side */
} expectations[] = {
	{ BAD_RKEY, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR, 0, IBV_EVENT_QP_ACCESS_ERR },
	{ NO_RIGHT, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR, 0, IBV_EVENT_QP_ACCESS_ERR },
	{ PAST_END, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR, 0, IBV_EVENT_QP_ACCESS_ERR },
	{ OTHER_PD, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR, 0, IBV_EVENT_QP_ACCESS_ERR },
	{ QP_NO_WRITE, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR, 0, IBV_EVENT_QP_REQ_ERR },
	{ QP_NO_READ, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR, 0, IBV_EVENT_QP_REQ_ERR },
	{ NO_DEPTH, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR, 0, IBV_EVENT_QP_REQ_ERR },
	{ MTU, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR, 0, IBV_EVENT_QP_REQ_ERR },
	{ BAD_LKEY, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR, 0, -1 },
	{ LOCAL_DEAD_KEY, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR, 0, -1 },
	{ LOCAL_PAST_END, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR, 0, -1 },
	{ READ_ONLY_SINK, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR, 0, -1 },
	{ RECV_SHORT, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR, -1 },
	{ RECV_BAD_KEY, MLX5_CQE_SYNDROME_REMOTE_OP_ERR, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR, -1 },
	{ BAD_OPCODE, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR, 0, -1 },
	{ DS_ZERO, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR, 0, -1 },
	{ DS_BEYOND, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR, 0, -1 },
};

static void provoke(enum fault fault)
{
	struct sge s = at(0, 0, 64), r = at(1, 0, 64);
	struct wr w = rdma(MLX5_OPCODE_RDMA_WRITE, &s, 1, 0), nop = { .opcode = MLX5_OPCODE_NOP };
	uint8_t raw[16] = { 0x80, 0, 3, 0xff };

	switch (fault) {
	case BAD_RKEY:
		w.rkey ^= 1;
		break;
	case NO_RIGHT:
		mr[1].m.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
		break;
	case PAST_END:
		w.raddr = (uintptr_t)mem[1] + sizeof(mem[1]) - 63;
		break;
	case OTHER_PD:
		mr[1].m.pdn += 1000;
		break;
	case QP_NO_WRITE:
		qp[1].qp.access = IBV_ACCESS_REMOTE_READ;
		break;
	case QP_NO_READ:
		qp[1].qp.access = IBV_ACCESS_REMOTE_WRITE;
		w.opcode = MLX5_OPCODE_RDMA_READ;
		break;
	case NO_DEPTH:
		qp[1].qp.dest_rd_atomic = 0;
		w.opcode = MLX5_OPCODE_RDMA_READ;
		break;
	case MTU:
		qp[1].qp.mtu = IBV_MTU_1024;
		s.len = 1025;
		break;
	case BAD_LKEY:
		s.key = 0xdead00;
		break;
	case LOCAL_DEAD_KEY:
		emu_lock();
		emu_mkey_remove(&mr[0].m);
		emu_unlock();
		break;
	case LOCAL_PAST_END:
		s.p = mem[0] + sizeof(mem[0]) - 63;
		break;
	case READ_ONLY_SINK:
		w.opcode = MLX5_OPCODE_RDMA_READ;
		mr[0].m.access = IBV_ACCESS_REMOTE_READ;
		break;
	case RECV_SHORT:
		w.opcode = MLX5_OPCODE_SEND;
		r.len = 63;
		break;
	case RECV_BAD_KEY:
		w.opcode = MLX5_OPCODE_SEND;
		r.key ^= 0x80;
		break;
	case BAD_OPCODE:
		w.opcode = 0x77;
		break;
	case DS_ZERO:
		w.ds = 64; /* six bits: 0 */
		break;
	case DS_BEYOND: /* inline data that ends behind the WQE */
		w = (struct wr){ .opcode = MLX5_OPCODE_SEND, .raw = raw, .nraw = sizeof(raw) };
		break;
	}
	qp_recv(&qp[1], &r, 1);
	qp_recv(&qp[1], &r, 1);
	qp_post(&qp[0], &w);
	nop.unsignalled = true;
	qp_post(&qp[0], &nop);
}

static void errors(void)
{
	for (unsigned i = 0; i < sizeof(expectations) / sizeof(expectations[0]); i++) {
		const struct expectation *x = &expectations[i];
		bool peer_dies = x->event >= 0 || x->recv_syndrome;
		uint64_t element = 0;

		pair_open((struct qp_opts){ 0 });
		qp_connect(&qp[0], &qp[1]);
		provoke(x->fault);
		expect(&scq[0], &qp[0], MLX5_CQE_REQ_ERR, x->syndrome);
		/* Later ones flush, signalled or not. */
		expect(&scq[0], &qp[0], MLX5_CQE_REQ_ERR, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		CHECK_EQ(qp_state_now(&qp[0]), IBV_QPS_ERR);
		CHECK_EQ(async_event(&app[1], &element, x->event >= 0 ? PATIENCE_MS : 1), x->event);
		if (x->event >= 0)
			CHECK_EQ(element, (uintptr_t)&qp[1]);
		CHECK_EQ(async_event(&app[0], NULL, 1), -1);
		if (x->recv_syndrome)
			expect(&rcq[1], &qp[1], MLX5_CQE_RESP_ERR, x->recv_syndrome);
		else if (peer_dies)
			expect(&rcq[1], &qp[1], MLX5_CQE_RESP_ERR, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		if (peer_dies)
			expect(&rcq[1], &qp[1], MLX5_CQE_RESP_ERR, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		else
			cq_expect_nothing(&rcq[1], 1);
		CHECK_EQ(qp_state_now(&qp[1]), peer_dies ? IBV_QPS_ERR : IBV_QPS_RTS);
		pair_close();
	}
}

/* Posts before and after ERR all come back, in order; RESET forgets. */
static void flush_and_reset(void)
{
	struct sge s, r;
	struct wr w;
	struct wc wc;

	pair_open((struct qp_opts){ 0 });
	qp_connect(&qp[0], &qp[1]);
	s = at(0, 0, 8);
	r = at(0, 64, 8);
	w = rdma(MLX5_OPCODE_RDMA_WRITE, &s, 1, 0);
	for (unsigned i = 0; i < 5; i++)
		qp_recv(&qp[0], &r, 1);
	qp_state(&qp[0], IBV_QPS_ERR);
	for (unsigned i = 0; i < 5; i++) {
		cq_wait(&rcq[0], &wc);
		CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		CHECK_EQ(wc.counter, i);
	}
	sleep_ms(20); /* it sleeps now, and posts to an RQ ring no doorbell */
	for (unsigned i = 0; i < 3; i++) {
		qp_recv(&qp[0], &r, 1);
		qp_post(&qp[0], &w);
	}
	for (unsigned i = 0; i < 3; i++) {
		cq_wait(&rcq[0], &wc);
		CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		CHECK_EQ(wc.counter, 5 + i);
		cq_wait(&scq[0], &wc);
		CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		CHECK_EQ(wc.counter, i);
	}
	qp_state(&qp[0], IBV_QPS_RESET);
	qp_state(&qp[1], IBV_QPS_RESET);
	qp_recv(&qp[0], &r, 1);
	qp_state(&qp[0], IBV_QPS_RESET);
	qp_connect(&qp[0], &qp[1]);
	cq_expect_nothing(&rcq[0], 5);
	qp_post(&qp[0], &w);
	expect_ok();
	pair_close();
}

/* SQD lets nothing begin; what waits begins in RTS. */
static void drain(void)
{
	struct sge s;
	struct wr w;
	uint64_t element;

	pair_open((struct qp_opts){ 0 });
	qp_connect(&qp[0], &qp[1]);
	s = at(0, 0, 8);
	w = rdma(MLX5_OPCODE_RDMA_WRITE, &s, 1, 0);
	qp_state(&qp[0], IBV_QPS_SQD);
	CHECK_EQ(async_event(&app[0], &element, PATIENCE_MS), IBV_EVENT_SQ_DRAINED);
	CHECK_EQ(element, (uintptr_t)&qp[0]);
	qp_post(&qp[0], &w);
	cq_expect_nothing(&scq[0], 5);
	qp_state(&qp[0], IBV_QPS_RTS);
	expect_ok();
	pair_close();
}

int main(void)
{
	world_open(2);
	write_and_read();
	send_with_everything();
	atomics();
	ring_wraps();
	rnr();
	no_peer();
	errors();
	flush_and_reset();
	drain();
	world_close();
	return 0;
}

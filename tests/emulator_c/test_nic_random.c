/* SPDX-License-Identifier: MIT
 * Random operations over several connections at once, against a model: what the memory must be afterwards, and which
 * completions must have come, in which order. AIORDMA_TEST_SEED repeats a run. */
#include "nic_world.h"

enum { PAIRS = 5, SIZE = 1 << 17, OPS = 4000, WINDOW = 12 };

static struct app app[2];
static struct tcq cq[2];
static struct tmr mr[2][PAIRS];
static struct tqp qp[2][PAIRS];
static uint8_t *mem[2][PAIRS], *model[2][PAIRS];
static unsigned posted[PAIRS], settled[PAIRS], receives[PAIRS], received[PAIRS];

static uint32_t below(uint32_t n)
{
	return n ? (uint32_t)rand() % n : 0;
}

/* Mostly small, sometimes over several packets, seldom over several slices. */
static uint32_t some_length(uint32_t most)
{
	uint32_t n = below(100) < 70 ? below(200) : below(100) < 80 ? below(20000) : below(SIZE);

	return n < most ? n : most;
}

static uint32_t cut(struct sge *s, unsigned side, unsigned p, uint32_t total, uint32_t *off)
{
	uint32_t n = 1 + below(3), used = 0;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t len = i == n - 1 ? total - used : below(total - used + 1);

		off[i] = below(SIZE - len + 1);
		s[i] = (struct sge){ mem[side][p] + off[i], len, mr[side][p].m.key };
		used += len;
	}
	return n;
}

static void model_gather(uint8_t *to, unsigned side, unsigned p, const struct sge *s, const uint32_t *off, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		memcpy(to, model[side][p] + off[i], s[i].len);
		to += s[i].len;
	}
}

static void model_scatter(const uint8_t *from, unsigned side, unsigned p, const struct sge *s, const uint32_t *off,
			  uint32_t n, uint32_t total)
{
	for (uint32_t i = 0; i < n && total; i++) {
		uint32_t len = s[i].len < total ? s[i].len : total;

		memcpy(model[side][p] + off[i], from, len);
		from += len;
		total -= len;
	}
}

/* libmlx5 leaves empty pieces out. */
static uint32_t drop_empty(struct sge *s, uint32_t *off, uint32_t n)
{
	uint32_t k = 0;

	for (uint32_t i = 0; i < n; i++) {
		if (!s[i].len)
			continue;
		s[k] = s[i];
		off[k++] = off[i];
	}
	return k;
}

static void one_atomic(unsigned p, struct wr *w)
{
	uint32_t at = below(SIZE / 8) * 8, to = below(SIZE / 8 - 1) * 8 + below(8);
	struct sge s = { mem[0][p] + to, 8, mr[0][p].m.key };
	uint64_t old, value = ((uint64_t)rand() << 32) | (uint32_t)rand();

	memcpy(&old, model[1][p] + at, 8);
	w->raddr = (uintptr_t)mem[1][p] + at;
	w->sg = &s;
	w->nsg = 1;
	w->swap_add = value;
	w->compare = below(2) ? old : old ^ 1;
	if (w->opcode == MLX5_OPCODE_ATOMIC_FA)
		value += old;
	else if (w->compare != old)
		value = old;
	memcpy(model[1][p] + at, &value, 8);
	memcpy(model[0][p] + to, &old, 8);
	qp_post(&qp[0][p], w);
}

static void one(unsigned p)
{
	static const uint8_t opcodes[] = { MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_RDMA_WRITE_IMM, MLX5_OPCODE_RDMA_READ,
					   MLX5_OPCODE_SEND,	    MLX5_OPCODE_SEND_IMM,	MLX5_OPCODE_ATOMIC_FA,
					   MLX5_OPCODE_ATOMIC_CS };
	static uint8_t data[SIZE];
	uint32_t total = some_length(SIZE / 2), off[3], roff[3], n, rn, at = below(SIZE - total + 1);
	struct sge s[3], r[3];
	struct wr w = { .opcode = opcodes[below(sizeof(opcodes))], .raddr = (uintptr_t)mem[1][p] + at,
			.rkey = mr[1][p].m.key, .unsignalled = below(3) == 0 };

	w.unsignalled = w.unsignalled && posted[p] % 4;
	posted[p]++;
	if (w.opcode == MLX5_OPCODE_ATOMIC_FA || w.opcode == MLX5_OPCODE_ATOMIC_CS) {
		one_atomic(p, &w);
		return;
	}
	n = cut(s, 0, p, total, off);
	if (w.opcode == MLX5_OPCODE_RDMA_READ) {
		memcpy(data, model[1][p] + at, total);
		model_scatter(data, 0, p, s, off, n, total);
	} else {
		model_gather(data, 0, p, s, off, n);
		if (w.opcode == MLX5_OPCODE_RDMA_WRITE || w.opcode == MLX5_OPCODE_RDMA_WRITE_IMM)
			memcpy(model[1][p] + at, data, total);
	}
	if (w.opcode != MLX5_OPCODE_RDMA_WRITE && w.opcode != MLX5_OPCODE_RDMA_READ) {
		rn = cut(r, 1, p, total + below(100), roff);
		rn = drop_empty(r, roff, rn);
		if (w.opcode != MLX5_OPCODE_RDMA_WRITE_IMM)
			model_scatter(data, 1, p, r, roff, rn, total);
		qp_recv(&qp[1][p], r, rn);
		receives[p]++;
	}
	if (w.opcode != MLX5_OPCODE_RDMA_READ && total && total < 200 && below(3) == 0) {
		w.inl = data;
		w.ninl = total;
	} else {
		w.nsg = drop_empty(s, off, n);
		w.sg = s;
	}
	qp_post(&qp[0][p], &w);
}

static void reap(void)
{
	struct wc wc;
	unsigned p;

	while (cq_poll(&cq[0], &wc)) {
		CHECK_EQ(wc.syndrome, 0);
		p = (wc.uidx - qp[0][0].qp.uidx) / 2;
		CHECK(wc.op == MLX5_CQE_REQ && p < PAIRS);
		settled[p] += wc.wqe_op == MLX5_OPCODE_NOP;
	}
	while (cq_poll(&cq[1], &wc)) {
		CHECK_EQ(wc.syndrome, 0);
		p = (wc.uidx - qp[1][0].qp.uidx) / 2;
		CHECK(p < PAIRS);
		CHECK_EQ(wc.counter, received[p] & 0xffff); /* receives complete in order */
		received[p]++;
	}
}

/* All that was posted is done when a no-op behind it is. */
static void settle(unsigned p)
{
	struct wr nop = { .opcode = MLX5_OPCODE_NOP };
	unsigned before = settled[p];
	uint64_t end = monotonic_us() + PATIENCE_US;

	qp_post(&qp[0][p], &nop);
	while (settled[p] == before || received[p] != receives[p]) {
		reap();
		CHECK(monotonic_us() < end);
	}
	CHECK(!memcmp(mem[0][p], model[0][p], SIZE));
	CHECK(!memcmp(mem[1][p], model[1][p], SIZE));
}

int main(void)
{
	const char *seed = getenv("AIORDMA_TEST_SEED");
	unsigned n = seed ? (unsigned)strtoul(seed, NULL, 0) : (unsigned)now_ns();

	fprintf(stderr, "AIORDMA_TEST_SEED=%u\n", n);
	srand(n);
	world_open(2);
	for (unsigned i = 0; i < 2; i++) {
		app_open(&app[i], i);
		cq_new(&cq[i], &app[i], 1024, NULL);
	}
	for (unsigned p = 0; p < PAIRS; p++) {
		for (unsigned i = 0; i < 2; i++) {
			mem[i][p] = malloc(SIZE);
			model[i][p] = malloc(SIZE);
			for (unsigned k = 0; k < SIZE; k++)
				mem[i][p][k] = (uint8_t)rand();
			memcpy(model[i][p], mem[i][p], SIZE);
			mr_new(&mr[i][p], &app[i], mem[i][p], SIZE, ALL_ACCESS);
			qp_new(&qp[i][p], &app[i], &cq[i], &cq[i], (struct qp_opts){ .sq_nbb = 128, .rq_sge = 4 });
		}
		qp[0][p].qp.mtu = qp[1][p].qp.mtu = (uint8_t)(1 + p % 5);
		qp_connect(&qp[0][p], &qp[1][p]);
	}
	for (unsigned op = 0; op < OPS;) {
		unsigned p = below(PAIRS), burst = 1 + below(WINDOW);

		for (unsigned k = 0; k < burst; k++, op++)
			one(p);
		settle(p);
	}
	for (unsigned p = 0; p < PAIRS; p++)
		for (unsigned i = 0; i < 2; i++) {
			qp_free(&qp[i][p]);
			mr_free(&mr[i][p]);
			free(mem[i][p]);
			free(model[i][p]);
		}
	for (unsigned i = 0; i < 2; i++) {
		cq_free(&cq[i]);
		app_close(&app[i]);
	}
	world_close();
	return 0;
}

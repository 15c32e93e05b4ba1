/* SPDX-License-Identifier: MIT
 * What benchmarks/programs/counted.py needs of C: telling callgrind what to count, and the reference loops.
 *
 * The loops are those of a C program (verbs.c), with the device stepped by hand (aiordma_emu_step()) where that one polls
 * until something is there: so each runs the same instructions every time. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <infiniband/verbs.h>
#include <valgrind/callgrind.h>

#define MAX_WRS 128
#define POLL 32

struct loop {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	int (*step)(void);
	uint64_t local, remote;
	uint32_t lkey, rkey, bytes;
	uint32_t ops, n;
};

int counted_is_counting(void)
{
	return RUNNING_ON_VALGRIND;
}

void counted_begin(void)
{
	CALLGRIND_START_INSTRUMENTATION;
	CALLGRIND_ZERO_STATS;
}

/* Writes a profile that names the workload. */
void counted_end(const char *name)
{
	CALLGRIND_DUMP_STATS_AT(name);
	CALLGRIND_STOP_INSTRUMENTATION;
}

static struct ibv_sge sge;
static struct ibv_send_wr wrs[MAX_WRS];

static void prepare(const struct loop *l, unsigned int flags)
{
	sge = (struct ibv_sge){ .addr = l->local, .length = l->bytes, .lkey = l->lkey };
	for (unsigned i = 0; i < MAX_WRS; i++)
		wrs[i] = (struct ibv_send_wr){
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.send_flags = flags,
			.wr.rdma = { .remote_addr = l->remote, .rkey = l->rkey },
		};
}

static void post(const struct loop *l)
{
	struct ibv_send_wr *bad;

	if (ibv_post_send(l->qp, &wrs[0], &bad)) {
		fprintf(stderr, "counted: ibv_post_send failed\n");
		exit(1);
	}
}

static unsigned reap(const struct loop *l)
{
	struct ibv_wc wc[POLL];
	int n = ibv_poll_cq(l->cq, POLL, wc);

	for (int i = 0; i < n; i++)
		if (wc[i].status)
			n = -1;
	if (n <= 0) {
		fprintf(stderr, "counted: no good completion\n");
		exit(1);
	}
	return (unsigned)n;
}

void counted_one(const struct loop *l)
{
	prepare(l, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
	counted_begin();
	for (uint32_t i = 0; i < l->ops; i++) {
		post(l);
		l->step();
		reap(l);
	}
	counted_end("C one");
}

void counted_many(const struct loop *l)
{
	prepare(l, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
	counted_begin();
	for (uint32_t i = 0; i < l->ops; i += l->n) {
		for (uint32_t k = 0; k < l->n; k++)
			post(l);
		l->step();
		for (uint32_t k = 0; k < l->n;)
			k += reap(l);
	}
	counted_end("C many");
}

void counted_batch(const struct loop *l)
{
	prepare(l, 0);
	for (uint32_t i = 0; i + 1 < l->n; i++)
		wrs[i].next = &wrs[i + 1];
	wrs[l->n - 1].send_flags = IBV_SEND_SIGNALED;
	counted_begin();
	for (uint32_t i = 0; i < l->ops; i += l->n) {
		post(l);
		l->step();
		reap(l);
	}
	counted_end("C batch");
}

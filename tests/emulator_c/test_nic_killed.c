/* SPDX-License-Identifier: MIT
 * A peer that is killed (SIGKILL) in the middle of whatever is asked of it doesn't answer: work requests end with
 * RETRY_EXC when timeout and retry_cnt have run out, and with nothing else. Many times over, at any moment of its end. */
#define _GNU_SOURCE
#include "nic_world.h"

#include <limits.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MEM (4u << 20)
#define DEPTH 8u
#define STREAMS 4u
#define KEY 0x1122334455667788ull

enum { READ, FAR_READ, WRITE, SEND, ATOMIC, XRC_READ, XRC_SEND, DC_READ, DC_SEND, STREAMS_READ, STREAMS_SEND, WAYS };
#define ROUNDS (15u * WAYS)

/* What the test's processes share, apart from what is tested. */
static struct shared {
	uint32_t rc_peer, rc, xrc_peer, xrc, xsrq, dct, key, born, begun, over;
	uint8_t mem[2][MEM] __attribute__((aligned(4096)));
} *s;

static char folder[] = "/tmp/aiordma-test-XXXXXX";
static struct app app;
static struct tcq cq;
static struct tsrq srq, xsrq;
static struct tqp rc, xrc, dc, streams;
static struct tmr mr;

static uint32_t load(uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static void store(uint32_t *p, uint32_t value)
{
	__atomic_store_n(p, value, __ATOMIC_RELEASE);
}

static void wait_for(uint32_t *p, uint32_t value)
{
	uint64_t until = monotonic_us() + PATIENCE_US;

	while (load(p) < value) {
		CHECK(monotonic_us() < until);
		usleep(100);
	}
}

static void open_side(unsigned side)
{
	emu.reach_host = emu.one_copy = true;
	world_open(1);
	app_open(&app, 0);
	cq_new(&cq, &app, 256, NULL);
	srq_new(&srq, &app, 64, 1);
	mr_new(&mr, &app, s->mem[side], MEM, ALL_ACCESS);
	qp_new(&rc, &app, &cq, &cq, (struct qp_opts){ .sq_nbb = 64, .srq = side ? &srq : NULL });
	qp_new(&dc, &app, &cq, &cq,
	       (struct qp_opts){ .type = IBV_QPT_DRIVER, .dci = !side, .dct = side, .srq = side ? &srq : NULL, .sq_nbb = 64 });
	qp_new(&xrc, &app, &cq, &cq, (struct qp_opts){ .type = side ? IBV_QPT_XRC_RECV : IBV_QPT_XRC_SEND, .sq_nbb = 64 });
	qp_new(&streams, &app, &cq, &cq,
	       (struct qp_opts){ .type = IBV_QPT_DRIVER, .dci = true, .sq_nbb = 64, .log_num_concurrent = 2, .log_num_errored = 3 });
	srq_new(&xsrq, &app, 64, 1);
	xsrq.srq.xrc = true;
	xsrq.srq.cq = &cq.cq;
	dc.qp.dc_key = KEY;
	rc.qp.timeout = xrc.qp.timeout = dc.qp.timeout = streams.qp.timeout = 10; /* 4 ms, twice */
	rc.qp.retry_cnt = xrc.qp.retry_cnt = dc.qp.retry_cnt = streams.qp.retry_cnt = 1;
}

/* ---------------------------------------------------------------- who is killed */

static _Noreturn void victim(uint32_t round)
{
	struct sge e = { s->mem[1], MEM, 0 };

	open_side(1);
	e.key = mr.m.key;
	qp_set_peer(&rc, 0, s->rc_peer);
	qp_to_rts(&rc);
	qp_set_peer(&xrc, 0, s->xrc_peer);
	qp_to_rts(&xrc);
	qp_to_rts(&dc);
	for (unsigned i = 0; i < 48; i++) {
		srq_post(&srq, &e, 1);
		srq_post(&xsrq, &e, 1);
	}
	s->rc = rc.qp.qpn;
	s->xrc = xrc.qp.qpn;
	s->xsrq = xsrq.srq.srqn;
	s->dct = dc.qp.qpn;
	s->key = mr.m.key;
	store(&s->born, round);
	/* Only the main thread ends, and has no memory any more. The others go on. */
	if (round % 2)
		pthread_exit(NULL);
	for (;;)
		pause();
}

/* ---------------------------------------------------------------- who survives */

static struct tqp *queue(unsigned way)
{
	if (way >= STREAMS_READ)
		return &streams;
	if (way >= DC_READ)
		return &dc;
	return way >= XRC_READ ? &xrc : &rc;
}

static void again(struct tqp *q)
{
	qp_state(q, IBV_QPS_RESET);
	qp_set_peer(q, 0, q == &xrc ? s->xrc : s->rc);
	qp_to_rts(q);
}

static void ask(unsigned way, struct tqp *q, unsigned stream)
{
	static const uint8_t opcode[] = { MLX5_OPCODE_RDMA_READ,  MLX5_OPCODE_RDMA_READ, MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_SEND,
					  MLX5_OPCODE_ATOMIC_FA, MLX5_OPCODE_RDMA_READ, MLX5_OPCODE_SEND,      MLX5_OPCODE_RDMA_READ,
					  MLX5_OPCODE_SEND,	  MLX5_OPCODE_RDMA_READ, MLX5_OPCODE_SEND };
	static const uint32_t len[] = { 20000, MEM, MEM, 20000, 8, 20000, MEM, 20000, 20000, 300000, 20000 };
	union ibv_gid gid = device_gid(0);
	struct sge e = { s->mem[0], len[way], mr.m.key };
	struct wr w = { .opcode = opcode[way], .sg = &e, .nsg = 1, .raddr = (uintptr_t)s->mem[1], .rkey = s->key,
			.swap_add = 1, .dqpn = s->dct, .srqn = s->xsrq, .dc_key = KEY, .dgid = &gid,
			.stream = (uint16_t)stream };

	qp_post(q, &w);
}

static void survivor(void)
{
	open_side(0);
	s->rc_peer = rc.qp.qpn;
	s->xrc_peer = xrc.qp.qpn;
	store(&s->over, 1);
	for (uint32_t round = 1; round <= ROUNDS; round++) {
		unsigned way = round % WAYS, asked = 0, of[DEPTH], failed[STREAMS] = { 0 };
		unsigned nstreams, stream;
		struct tqp *q = queue(way);
		struct wc wc;

		nstreams = q == &streams ? STREAMS : 1;

		wait_for(&s->born, round);
		again(q);
		for (; asked < DEPTH; asked++)
			ask(way, q, of[asked] = asked % nstreams);
		store(&s->begun, round);
		for (unsigned told = 0; told < asked; told++) {
			cq_wait(&cq, &wc);
			stream = of[told % DEPTH];
			if (!wc.syndrome) {
				CHECK(!failed[stream]);
				ask(way, q, of[asked++ % DEPTH] = stream);
				continue;
			}
			/* The first, and those behind it. */
			CHECK_EQ(wc.syndrome, failed[stream]++ ? MLX5_CQE_SYNDROME_WR_FLUSH_ERR :
								 MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
		}
		CHECK_EQ(qp_state_now(q), nstreams > 1 ? IBV_QPS_RTS : IBV_QPS_ERR);
		store(&s->over, round + 1);
	}
	qp_free(&rc);
	qp_free(&xrc);
	qp_free(&dc);
	qp_free(&streams);
	srq_free(&srq);
	srq_free(&xsrq);
	cq_free(&cq);
	mr_free(&mr);
	app_close(&app);
	world_close();
	exit(0);
}

/* ---------------------------------------------------------------- */

int main(void)
{
	char path[PATH_MAX];
	pid_t first, second;
	int status;

	CHECK(mkdtemp(folder));
	setenv("AIORDMA_EMULATOR_RUNTIME_DIR", folder, 1);
	s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(s != MAP_FAILED);
	srand(4);
	first = start_process();
	if (!first)
		survivor();
	wait_for(&s->over, 1);
	for (uint32_t round = 1; round <= ROUNDS; round++) {
		second = start_process();
		if (!second)
			victim(round);
		wait_for(&s->begun, round);
		usleep((useconds_t)(rand() % 3000));
		CHECK(!kill(second, SIGKILL));
		wait_for(&s->over, round + 1);
		CHECK_EQ(waitpid(second, &status, 0), second);
	}
	CHECK_EQ(waitpid(first, &status, 0), first);
	CHECK_EQ(status, 0);
	snprintf(path, sizeof(path), "%s/aiordma-%u.4", folder, (unsigned)geteuid());
	remove_folder(path);
	remove_folder(folder);
	return 0;
}

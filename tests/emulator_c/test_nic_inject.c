/* SPDX-License-Identifier: MIT
 * Faults on purpose: rules that come, fire, are stopped and outlive nothing that they name. */
#include "nic_world.h"

#include <infiniband/mlx5dv.h>

static struct app app[2];
static struct tcq scq[2], rcq[2];
static struct tqp qp[2];
static struct tmr mr[2];
static uint8_t mem[2][1 << 14] __attribute__((aligned(4096)));

static void pair_open(void)
{
	for (unsigned i = 0; i < 2; i++) {
		app_open(&app[i], i);
		cq_new(&scq[i], &app[i], 256, NULL);
		cq_new(&rcq[i], &app[i], 256, NULL);
		mr_new(&mr[i], &app[i], mem[i], sizeof(mem[i]), ALL_ACCESS);
		qp_new(&qp[i], &app[i], &scq[i], &rcq[i], (struct qp_opts){ 0 });
	}
	qp[0].qp.timeout = 1;
	qp[0].qp.retry_cnt = 2;
	qp_connect(&qp[0], &qp[1]);
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

static int rule(const char *text)
{
	char error[128] = "";
	int id = aiordma_emu_fault_add(text, error, sizeof(error));

	if (id < 0)
		fprintf(stderr, "%s: %s\n", text, error);
	CHECK(id > 0);
	return id;
}

static void refused(const char *text, const char *why)
{
	char error[128] = "";

	CHECK_EQ(aiordma_emu_fault_add(text, error, sizeof(error)), -1);
	CHECK(strstr(error, why));
	/* As much of it as there is room for. */
	CHECK_EQ(aiordma_emu_fault_add(text, error, 4), -1);
	CHECK_EQ(strlen(error), 3);
}

static uint64_t hits(int id)
{
	uint64_t hits, seen;

	CHECK_EQ(aiordma_emu_fault_counts(id, &hits, &seen), 0);
	CHECK(seen >= hits);
	return hits;
}

static void post(uint8_t opcode)
{
	struct sge s = { mem[0], 8, mr[0].m.key };
	struct wr w = {
		.opcode = opcode, .sg = &s, .nsg = 1, .raddr = (uintptr_t)mem[1], .rkey = mr[1].m.key, .swap_add = 1,
	};

	qp_post(&qp[0], &w);
}

static void expect(uint8_t syndrome)
{
	struct wc wc;

	cq_wait(&scq[0], &wc);
	CHECK_EQ(wc.syndrome, syndrome);
}

static void texts(void)
{
	refused("", "there is no fault \"\"");
	refused("drip", "there is no fault");
	refused("drop nth", "not NAME=VALUE");
	refused("drop nth=x", "not a number");
	refused("drop nth=-1", "not a number");
	refused("drop nth=99999999999999999999", "not a number");
	refused("drop qp=16777216", "more than");
	refused("drop chance=4294967297", "more than");
	refused("drop device=mlx5_7", "there is no emulated device mlx5_7");
	refused("drop opcode=SEND+TELL", "there is no opcode \"TELL\"");
	refused("drop wine=1", "a fault has no \"wine\"");
	refused("rnr timer=32", "more than");
	refused("fail", "no status");
	refused("fail wc=SUCCESS", "there is no status");
	refused("verb error=12", "no verb");
	refused("verb verb=poll_cq", "there is no verb");
	refused("devx devx=256", "no status");
	refused("device_fatal", "no device");
	refused("verb verb=modify_qp state=UP", "there is no state");
	for (unsigned i = 0; i < 100; i++)
		rule("drop opcode=SEND+RDMA_WRITE+UMR nth=3 every=2 count=1 chance=5 seed=18446744073709551615 device=mlx5_1");
	aiordma_emu_fault_reset();
	CHECK_EQ(emu_injecting, 0);
}

static void lost_and_late(void)
{
	uint64_t begin, t;
	int id;

	pair_open();
	memset(mem[1], 0, 8);
	memcpy(mem[0], "8 bytes!", 8);
	id = rule("drop device=mlx5_0 count=2");
	post(MLX5_OPCODE_RDMA_WRITE);
	expect(0);
	CHECK_EQ(hits(id), 2);
	CHECK(!memcmp(mem[1], mem[0], 8));
	CHECK_EQ(aiordma_emu_fault_stop(id), 0);
	CHECK_EQ(aiordma_emu_fault_stop(id), -1);

	id = rule("drop_answer count=2");
	post(MLX5_OPCODE_RDMA_WRITE);
	expect(0);
	CHECK_EQ(hits(id), 2);
	aiordma_emu_fault_reset();

	rule("delay delay_ns=20000000 jitter_ns=1000 chance=4294967296");
	begin = monotonic_us();
	for (unsigned i = 0; i < 40; i++) /* more than there are marks of posts */
		post(MLX5_OPCODE_RDMA_WRITE);
	for (unsigned i = 0; i < 40; i++)
		expect(0);
	t = monotonic_us() - begin;
	CHECK_TIME(t, 20000);
	aiordma_emu_fault_reset();
	pair_close();
}

/* A queue that begins anew knows nothing of when its last life's work requests were posted. */
static void late_after_reset(void)
{
	uint64_t begin;

	pair_open();
	rule("delay delay_ns=30000000");
	for (unsigned i = 0; i < 3; i++)
		post(MLX5_OPCODE_RDMA_WRITE);
	for (unsigned i = 0; i < 3; i++)
		expect(0);
	emu_lock();
	qp[0].qp.state = IBV_QPS_RESET;
	emu_qp_state_changed(&qp[0].qp, IBV_QPS_RTS);
	emu_unlock();
	/* The device looks around before the library, slow as it may be, has cleared the record. */
	emu_engine_wake();
	sleep_ms(10);
	qp[0].sq_pi = qp[0].rq_pi = 0;
	qp[0].db[0] = qp[0].db[1] = 0;
	qp_state(&qp[1], IBV_QPS_RESET);
	qp_connect(&qp[0], &qp[1]);
	begin = monotonic_us();
	post(MLX5_OPCODE_RDMA_WRITE);
	expect(0);
	CHECK(monotonic_us() - begin >= 30000);
	aiordma_emu_fault_reset();
	pair_close();
}

static void refusals(void)
{
	static const struct {
		const char *text;
		uint8_t syndrome;
		int event; /* at the other side */
	} cases[] = {
		{ "drop", MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR, -1 },
		{ "drop_answer", MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR, -1 },
		{ "fail wc=REM_ACCESS_ERR", MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR },
		{ "fail wc=REM_INV_REQ_ERR", MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR, IBV_EVENT_QP_REQ_ERR },
		{ "fail wc=REM_OP_ERR", MLX5_CQE_SYNDROME_REMOTE_OP_ERR, IBV_EVENT_QP_FATAL },
		{ "fail wc=LOC_PROT_ERR", MLX5_CQE_SYNDROME_LOCAL_PROT_ERR, -1 },
		{ "qp_fatal", MLX5_CQE_SYNDROME_WR_FLUSH_ERR, -1 },
	};

	for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		int id, event;

		pair_open();
		while (async_event(&app[1], NULL, 0) >= 0)
			;
		id = rule(cases[i].text);
		post(MLX5_OPCODE_RDMA_WRITE);
		expect(cases[i].syndrome);
		CHECK(hits(id) >= 1);
		CHECK_EQ(qp_state_now(&qp[0]), IBV_QPS_ERR);
		event = async_event(&app[1], NULL, cases[i].event >= 0 ? PATIENCE_MS : 0);
		CHECK_EQ(event, cases[i].event);
		aiordma_emu_fault_reset();
		pair_close();
	}
}

/* QPs go while they wait because of a rule, and rules while QPs wait. */
static void ends(void)
{
	static const char *const texts[] = {
		"hold", "hang", "delay delay_ns=3600000000000", "reorder limit_ns=3600000000000", "drop", "rnr timer=0",
	};

	for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
		int id;

		pair_open();
		qp[0].qp.timeout = qp[0].qp.retry_cnt = 0;
		id = rule(texts[i]);
		post(MLX5_OPCODE_RDMA_WRITE);
		sleep_ms(2);
		pair_close();
		pair_open();
		post(MLX5_OPCODE_RDMA_WRITE);
		sleep_ms(2);
		CHECK_EQ(aiordma_emu_fault_stop(id), 0);
		if (strcmp(texts[i], "drop"))
			expect(0);
		pair_close();
	}
	CHECK_EQ(emu_injecting, 0);
}

/* All sorts of rules, coming and going at any moment, with work going on: nothing is lost, done twice or stuck. */
static void random_rules(unsigned seed)
{
	static const char *const texts[] = {
		"drop chance=400000000 seed=1",	      "drop_answer chance=400000000 seed=2", "delay delay_ns=100000 every=3",
		"delay bandwidth=10000000 nth=2 every=2", "reorder chance=1000000000 limit_ns=500000",
		"hold nth=3",			      "rnr chance=1000000000 timer=1",	     "hold",
		"delay jitter_ns=300000",	      "drop nth=5",
	};
	uint64_t counter = 0, before, end = monotonic_us() + PATIENCE_US;
	unsigned posted = 0, done = 0;
	int ids[4] = { 0 };

	pair_open();
	qp[0].qp.retry_cnt = 255; /* what is lost by chance, by several rules, isn't lost that often in a row */
	qp[0].qp.rnr_retry = 7;
	memcpy(mem[1], &counter, 8);
	srand(seed);
	while (done < 600) {
		struct wc wc;
		unsigned k = (unsigned)rand() % 4;

		CHECK(monotonic_us() < end);
		if (posted < 600 && posted - done < 16) {
			post(MLX5_OPCODE_ATOMIC_FA);
			posted++;
		}
		if (rand() % 8 == 0) {
			if (ids[k])
				CHECK_EQ(aiordma_emu_fault_stop(ids[k]), 0);
			ids[k] = ids[k] ? 0 : rule(texts[(unsigned)rand() % (sizeof(texts) / sizeof(texts[0]))]);
		}
		while (cq_poll(&scq[0], &wc)) {
			CHECK_EQ(wc.syndrome, 0);
			memcpy(&before, mem[0], 8);
			done++;
			end = monotonic_us() + PATIENCE_US;
		}
	}
	aiordma_emu_fault_reset();
	memcpy(&counter, mem[1], 8);
	CHECK_EQ(counter, 600);
	pair_close();
}

int main(void)
{
	world_open(2);
	texts();
	lost_and_late();
	late_after_reset();
	refusals();
	ends();
	for (unsigned seed = 1; seed <= 5; seed++)
		random_rules(seed);
	world_close();
	return 0;
}

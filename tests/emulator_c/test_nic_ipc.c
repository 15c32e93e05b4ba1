/* SPDX-License-Identifier: MIT
 * Two processes: random operations against a model, with receivers that come late, with memory that may not be read any more
 * from some moment on, with somebody who writes rubbish into what they share, with somebody who cuts it short, and with a
 * device that stands still in the middle of something. */
#define _GNU_SOURCE
#include "nic_world.h"
#include "wire.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MEM (1u << 20)
#define LONG_MEM (16u << 20) /* behind it, for messages of several slices */
#define QPS 3u
#define ROUNDS 600u

/* How far a side is. Beyond that they count the times that they met. */
enum { OPEN = 1, CONNECTED };

/* What the test's processes share, apart from what is tested. */
static struct shared {
	uint32_t qpn[2][QPS], key[2], xrc[2], srqn, ready[2], go_on, receives, xrc_receives, stop;
	uint8_t mem[2][MEM + LONG_MEM] __attribute__((aligned(4096)));
} *s;

static char folder[] = "/tmp/aiordma-test-XXXXXX";
static struct app app;
static struct tcq scq, rcq;
static struct tqp qp[QPS];
static struct tqp xrc; /* of side 0 its initiator, of side 1 its target */
static struct tsrq srq;
static struct tmr mr;
static unsigned side;

static uint32_t load(uint32_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static void wait_for(uint32_t *p, uint32_t value)
{
	uint64_t until = monotonic_us() + PATIENCE_US;

	while (load(p) < value) {
		CHECK(monotonic_us() < until);
		usleep(200);
	}
}

static void open_side(unsigned which, bool one_copy)
{
	side = which;
	emu.reach_host = true;
	emu.one_copy = one_copy;
	world_open(1);
	app_open(&app, 0);
	cq_new(&scq, &app, 256, NULL);
	cq_new(&rcq, &app, 256, NULL);
	mr_new(&mr, &app, s->mem[side], sizeof(s->mem[side]), ALL_ACCESS);
	for (unsigned i = 0; i < QPS; i++) {
		qp_new(&qp[i], &app, &scq, &rcq, (struct qp_opts){ .sq_nbb = 128, .rq_nwqe = 64, .rq_sge = 1 });
		s->qpn[side][i] = qp[i].qp.qpn;
	}
	srq_new(&srq, &app, 64, 1);
	srq.srq.xrc = true;
	srq.srq.cq = &rcq.cq;
	s->srqn = side ? srq.srq.srqn : s->srqn;
	qp_new(&xrc, &app, &scq, &rcq, (struct qp_opts){ .type = side ? IBV_QPT_XRC_RECV : IBV_QPT_XRC_SEND, .sq_nbb = 128 });
	if (side)
		xrc.qp.pd = NULL;
	s->xrc[side] = xrc.qp.qpn;
	s->key[side] = mr.m.key;
	__atomic_store_n(&s->ready[side], OPEN, __ATOMIC_RELEASE);
	wait_for(&s->ready[!side], OPEN);
}

static void connect_all(uint8_t timeout, uint8_t retries)
{
	for (unsigned i = 0; i < QPS; i++) {
		qp_set_peer(&qp[i], 0, s->qpn[!side][i]);
		qp[i].qp.timeout = timeout;
		qp[i].qp.retry_cnt = retries;
		qp[i].qp.rnr_retry = retries;
		qp_to_rts(&qp[i]);
	}
	qp_set_peer(&xrc, 0, s->xrc[!side]);
	xrc.qp.timeout = timeout;
	xrc.qp.retry_cnt = xrc.qp.rnr_retry = retries;
	qp_to_rts(&xrc);
	__atomic_store_n(&s->ready[side], CONNECTED, __ATOMIC_RELEASE);
	wait_for(&s->ready[!side], CONNECTED);
}

static void close_side(void)
{
	for (unsigned i = 0; i < QPS; i++)
		qp_free(&qp[i]);
	qp_free(&xrc);
	srq_free(&srq);
	cq_free(&scq);
	cq_free(&rcq);
	mr_free(&mr);
	app_close(&app);
	world_close();
}

static uint32_t random_length(void)
{
	switch (rand() % 4) {
	case 0:
		return (uint32_t)(rand() % 64);
	case 1:
		return (uint32_t)(rand() % 9000);
	case 2:
		return (uint32_t)(8190 + rand() % 5);
	default:
		return (uint32_t)(rand() % (MEM / 4));
	}
}

/* ---------------------------------------------------------------- against a model */

/* The peer's receives each have a place of their own at the end of its memory, and come late. */
#define RECV_SIZE 4096u
#define RECV_AT (MEM / 2)

/* Whether their memory may be read until some moment only, which is another one on each side. */
static bool forbidding;

static void forbid(bool now)
{
	if (forbidding && now)
		CHECK(!prctl(PR_SET_DUMPABLE, 0));
}

static void receiver(bool one_copy)
{
	uint32_t posted[QPS] = { 0 }, done[QPS] = { 0 }, xrc_done = 0;
	uint32_t moment = (uint32_t)rand() % 64 * 8 * QPS;

	open_side(1, one_copy);
	connect_all(18, 7);
	while (!load(&s->stop)) {
		forbid(load(&s->receives) >= moment);
		for (unsigned i = 0; i < QPS; i++) {
			struct sge e = { s->mem[1] + RECV_AT, RECV_SIZE, mr.m.key };
			struct wc wc;

			/* All queues have what one may need, as far as there is room. */
			if (posted[i] * QPS < load(&s->receives) && posted[i] - done[i] < 64 && rand() % 3) {
				qp_recv(&qp[i], &e, 1);
				posted[i]++;
			}
			while (cq_poll(&rcq, &wc)) {
				CHECK_EQ(wc.syndrome, 0);
				for (unsigned k = 0; k < QPS; k++)
					done[k] += qp[k].qp.qpn == wc.qpn;
				xrc_done += xrc.qp.qpn == wc.qpn;
			}
			if (srq.posted < load(&s->xrc_receives) && srq.posted - xrc_done < 64 && rand() % 3)
				srq_post(&srq, &e, 1);
		}
		usleep(50);
	}
	close_side();
}

static void await(unsigned *in_flight, unsigned leave)
{
	while (*in_flight > leave) {
		struct wc wc;

		cq_wait(&scq, &wc);
		CHECK_EQ(wc.syndrome, 0);
		CHECK_EQ(wc.op, MLX5_CQE_REQ);
		--*in_flight;
	}
}

/* Reads, atomics and writes one behind the other: each sees what those before it have done, and nothing of those behind. */
static void mixed(unsigned *in_flight, struct tqp *q, uint8_t *model, bool fence)
{
	enum { N = 24 };
	static uint64_t before, added[N];
	uint8_t *mine = s->mem[0], *there = s->mem[1];
	uint32_t len = rand() % 2 ? 8 + (uint32_t)rand() % 500 : 9000 + (uint32_t)rand() % 4000;
	uint32_t at = (uint32_t)rand() % (MEM / 4);
	uint8_t seen[N];
	uint64_t *results = (uint64_t *)(void *)(mine + MEM / 2);

	for (unsigned i = 0; i < N; i++) {
		struct sge e = { mine + MEM / 2 + 4096 + i * 16384, len, mr.m.key };
		struct wr w = { .sg = &e, .nsg = 1, .raddr = (uintptr_t)there + at, .rkey = s->key[1], .fence = fence,
				.srqn = s->srqn };

		await(in_flight, 30);
		switch (i % 4) {
		case 0:
			w.opcode = MLX5_OPCODE_RDMA_WRITE;
			memset(e.p, (int)i + 1, len);
			memset(model + at, (int)i + 1, len);
			break;
		case 1:
		case 2:
			w.opcode = MLX5_OPCODE_RDMA_READ;
			seen[i] = model[at];
			break;
		default:
			w.opcode = MLX5_OPCODE_ATOMIC_FA;
			w.raddr = (uintptr_t)there + MEM - 64;
			w.swap_add = 1 + i;
			added[i] = w.swap_add;
			e = (struct sge){ &results[i], 8, mr.m.key };
		}
		qp_post(q, &w);
		++*in_flight;
	}
	await(in_flight, 0);
	for (unsigned i = 0; i < N; i++) {
		const uint8_t *p = mine + MEM / 2 + 4096 + i * 16384;

		if (i % 4 == 1 || i % 4 == 2)
			for (uint32_t k = 0; k < len; k++)
				CHECK_EQ(p[k], seen[i]);
		if (i % 4 == 3) {
			CHECK_EQ(results[i], before);
			before += added[i];
		}
	}
	CHECK(!memcmp(model + at, there + at, len));
}

/* Messages of several slices with short ones between them, and nothing waited for. */
static void long_ones(unsigned *in_flight, struct tqp *q)
{
	enum { N = 3 };
	uint8_t *mine = s->mem[0] + MEM, *there = s->mem[1] + MEM;
	uint32_t len = WIRE_SLICE + (uint32_t)rand() % (LONG_MEM / 8 - WIRE_SLICE), at = (uint32_t)rand() % 65536;
	uint8_t *out = mine + 65536, *back = mine + LONG_MEM / 2, last = (uint8_t)rand();
	static uint64_t count;

	if (rand() % 2)
		len = WIRE_SLICE * (1 + (uint32_t)rand() % 2) + (uint32_t)rand() % 3 - 1;
	memset(mine, 0xee, 8);
	memset(back, 0, N * len);
	for (unsigned round = 0; round < N; round++) {
		uint64_t *result = (uint64_t *)(void *)(mine + 8 + 8 * round);
		struct sge whole = { out + round * len, len, mr.m.key }, parts[2] = { { back + round * len, len / 3, mr.m.key } };
		struct sge first = { mine, 8, mr.m.key }, old = { (uint8_t *)result, 8, mr.m.key };
		struct wr w = { .opcode = MLX5_OPCODE_RDMA_WRITE, .sg = &whole, .nsg = 1, .raddr = (uintptr_t)there + at,
				.rkey = s->key[1], .srqn = s->srqn };

		memset(whole.p, (int)round + 1, len);
		out[round * len + len - 1] = last;
		qp_post(q, &w);
		parts[1] = (struct sge){ back + round * len + len / 3, len - len / 3, mr.m.key };
		w.opcode = MLX5_OPCODE_RDMA_READ;
		w.sg = parts;
		w.nsg = 2;
		qp_post(q, &w);
		w.opcode = MLX5_OPCODE_ATOMIC_FA;
		w.sg = &old;
		w.nsg = 1;
		w.swap_add = 1;
		w.raddr = (uintptr_t)there + LONG_MEM - 8;
		qp_post(q, &w);
		w.opcode = MLX5_OPCODE_RDMA_WRITE; /* the READ before it doesn't see it */
		w.sg = &first;
		w.raddr = (uintptr_t)there + at;
		qp_post(q, &w);
		*in_flight += 4;
	}
	await(in_flight, 0);
	for (unsigned round = 0; round < N; round++) {
		CHECK(!memcmp(back + round * len, out + round * len, len));
		CHECK_EQ(((uint64_t *)(void *)(mine + 8))[round], count + round);
	}
	count += N;
	CHECK(!memcmp(there + at, mine, 8) && !memcmp(there + at + 8, out + (N - 1) * len + 8, len - 8));
}

static void sender(bool one_copy)
{
	static uint8_t model[MEM / 2];
	uint8_t *mine = s->mem[0];
	unsigned in_flight = 0, moment = (unsigned)rand() % ROUNDS;

	open_side(0, one_copy);
	connect_all(18, 7);
	memset(s->mem[1], 0, sizeof(s->mem[1]));
	memset(model, 0, sizeof(model));
	for (unsigned round = 0; round < ROUNDS; round++) {
		uint32_t len = random_length(), off = (uint32_t)rand() % (MEM / 4), which = (uint32_t)rand() % QPS;
		struct sge e = { mine + (uint32_t)rand() % (MEM / 4), len, mr.m.key };
		struct wr w = { .sg = &e, .nsg = len != 0, .raddr = (uintptr_t)s->mem[1] + off, .rkey = s->key[1] };

		forbid(round >= moment);
		switch (rand() % 5) {
		case 4:
			await(&in_flight, 0);
			if (rand() % 4)
				mixed(&in_flight, rand() % 3 ? &qp[which] : &xrc, model, rand() % 2);
			else
				long_ones(&in_flight, rand() % 3 ? &qp[which] : &xrc);
			break;
		case 0: /* a write, alone: several at one place would come in any order from several QPs */
			await(&in_flight, 0);
			for (uint32_t i = 0; i < len; i++)
				((uint8_t *)e.p)[i] = (uint8_t)(rand() >> 4);
			memcpy(model + off, e.p, len);
			w.opcode = MLX5_OPCODE_RDMA_WRITE;
			qp_post(&qp[which], &w);
			in_flight++;
			await(&in_flight, 0);
			CHECK(!memcmp(model, s->mem[1], sizeof(model)));
			break;
		case 1:
			await(&in_flight, 0);
			w.opcode = MLX5_OPCODE_RDMA_READ;
			qp_post(&qp[which], &w);
			in_flight++;
			await(&in_flight, 0);
			CHECK(!memcmp(e.p, model + off, len));
			break;
		case 2: /* many short writes one behind the other, the last of which counts */
			for (uint32_t i = 0; i < 40; i++) {
				e = (struct sge){ mine + i, 1, mr.m.key };
				mine[i] = (uint8_t)(round + i);
				w.opcode = MLX5_OPCODE_RDMA_WRITE;
				w.nsg = 1;
				await(&in_flight, 30);
				qp_post(&qp[which], &w);
				in_flight++;
			}
			await(&in_flight, 0);
			model[off] = (uint8_t)(round + 39);
			CHECK_EQ(s->mem[1][off], model[off]);
			break;
		default: { /* sends behind each other, some of which find no receive */
			bool to_xrc = rand() % 3 == 0;

			for (uint32_t i = 0; i < 8; i++) {
				e.len = len % RECV_SIZE;
				w.opcode = MLX5_OPCODE_SEND;
				w.nsg = e.len != 0;
				w.srqn = s->srqn;
				await(&in_flight, 30);
				qp_post(to_xrc ? &xrc : &qp[which], &w);
				in_flight++;
			}
			if (to_xrc)
				__atomic_add_fetch(&s->xrc_receives, 8, __ATOMIC_RELEASE);
			else
				__atomic_add_fetch(&s->receives, 8 * QPS, __ATOMIC_RELEASE);
		}
		}
	}
	await(&in_flight, 0);
	__atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
	close_side();
}

static void give_up_tracing(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];

	CHECK(!syscall(SYS_capget, &header, data));
	data[0].effective &= ~(1u << CAP_SYS_PTRACE);
	data[0].permitted &= ~(1u << CAP_SYS_PTRACE);
	CHECK(!syscall(SYS_capset, &header, data));
}

/* Without the capability, and with what the program may do to be read by nobody. LeakSanitizer reads it at the end. */
static void barred(void (*run)(bool))
{
	give_up_tracing();
	forbidding = true;
	run(true);
	CHECK(!prctl(PR_SET_DUMPABLE, 1));
}

static void barred_sender(bool unused)
{
	(void)unused;
	barred(sender);
}

static void barred_receiver(bool unused)
{
	(void)unused;
	barred(receiver);
}

/* ---------------------------------------------------------------- whose memory is read */

#define FAR_LEN 40000u

static uint8_t far_bytes[FAR_LEN];
static uint64_t far_nonce;

/* Whose memory has the nonce, and who then forbids to read it. */
static _Noreturn void other(void)
{
	memset(far_bytes, 7, FAR_LEN);
	far_nonce = 5;
	__atomic_store_n(&s->go_on, 1, __ATOMIC_RELEASE);
	wait_for(&s->go_on, 2);
	CHECK(!prctl(PR_SET_DUMPABLE, 0));
	__atomic_store_n(&s->go_on, 3, __ATOMIC_RELEASE);
	for (;;)
		pause();
}

/* From the thread whose memory has the nonce, or had it when it was looked at just before. */
static enum nic_copied read_far(pid_t thread, uint64_t nonce, bool just_seen)
{
	static uint8_t here[FAR_LEN];
	static struct nic_sgl from, to;
	struct nic_foreign owner = { thread, nonce, (uintptr_t)&far_nonce, just_seen ? engine_now() : 0 };
	enum nic_copied copied;

	memset(here, 1, FAR_LEN);
	sgl_reset(&from);
	sgl_reset(&to);
	CHECK(sgl_add(&from, far_bytes, FAR_LEN) && sgl_add(&to, here, FAR_LEN));
	from.owner = &owner;
	copied = foreign_copy(&to, &from, FAR_LEN);
	for (uint32_t i = 0; i < FAR_LEN; i++)
		CHECK_EQ(here[i], copied == COPY_DONE ? 7 : 1);
	return copied;
}

/* One with a dead peer's id is not read. One that lives and forbids it is told from it. */
static void strangers(bool unused)
{
	pid_t pid;

	(void)unused;
	give_up_tracing();
	CHECK_EQ(fault_handler_install(), 0);
	fault_guard_take(true);
	pid = start_process();
	if (!pid)
		other();
	wait_for(&s->go_on, 1);
	engine_read_clock();
	CHECK_EQ(read_far(pid, 5, false), COPY_DONE);
	CHECK_EQ(read_far(pid, 5, true), COPY_DONE);
	CHECK_EQ(read_far(pid, 6, false), COPY_GONE);
	__atomic_store_n(&s->go_on, 2, __ATOMIC_RELEASE);
	wait_for(&s->go_on, 3);
	CHECK_EQ(read_far(pid, 5, false), COPY_BARRED);
	CHECK_EQ(read_far(pid, 5, true), COPY_BARRED);
	CHECK(!kill(pid, SIGKILL));
	CHECK_EQ(waitpid(pid, NULL, 0), pid);
	CHECK_EQ(read_far(pid, 5, false), COPY_GONE);
	CHECK_EQ(read_far(pid, 5, true), COPY_GONE);
}

/* ---------------------------------------------------------------- rubbish */

static int open_link(void)
{
	char path[PATH_MAX];
	struct dirent *d;
	int fd = -1;
	DIR *dir;

	snprintf(path, sizeof(path), "%s/aiordma-%u.4", folder, (unsigned)geteuid());
	dir = opendir(path);
	while (dir && fd < 0 && (d = readdir(dir)))
		if (!strncmp(d->d_name, "link-", 5))
			fd = openat(dirfd(dir), d->d_name, O_RDWR);
	if (dir)
		closedir(dir);
	return fd;
}

/* Of what is done to two processes, nothing before they have all they need of each other. */
static void wait_for_both(void)
{
	wait_for(&s->ready[0], CONNECTED);
	wait_for(&s->ready[1], CONNECTED);
}

static void scribbler(bool unused)
{
	uint64_t until;
	struct stat st;
	uint8_t *p;
	int fd;

	(void)unused;
	wait_for_both();
	while ((fd = open_link()) < 0 || fstat(fd, &st) || !st.st_size) {
		close(fd);
		usleep(1000);
	}
	p = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(p != MAP_FAILED);
	until = monotonic_us() + 3000000;
	while (monotonic_us() < until) {
		size_t half = rand() % 2 ? (size_t)st.st_size / 2 : 0;
		size_t range = rand() % 2 ? 2048 : rand() % 2 ? 1 << 16 : (size_t)st.st_size / 2 - 64;
		size_t at = half + (size_t)rand() % range;

		for (unsigned i = 0; i < 8; i++)
			p[(at & ~7u) + i] = (uint8_t)(rand() % 3 ? rand() : rand() % 5);
		if (rand() % 8 == 0)
			usleep(10);
	}
	__atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
}

static void reconnect(struct tqp *q, unsigned i, uint8_t timeout)
{
	qp_state(q, IBV_QPS_RESET);
	q->sq_pi = q->rq_pi = 0;
	memset(q->db, 0, sizeof(q->db));
	qp_set_peer(q, 0, s->qpn[!side][i]);
	q->qp.timeout = timeout;
	qp_to_rts(q);
}

static void disturb(void)
{
	while (!load(&s->stop)) {
		for (unsigned i = 0; i < QPS; i++) {
			uint32_t len = rand() % 4 ? random_length() : (uint32_t)rand() % (LONG_MEM / 4);
			struct sge e = { s->mem[side] + MEM / 2, len, mr.m.key };
			struct wr w = {
				.opcode = rand() % 2 ? MLX5_OPCODE_RDMA_WRITE : MLX5_OPCODE_RDMA_READ,
				.sg = &e, .nsg = len != 0, .raddr = (uintptr_t)s->mem[!side], .rkey = s->key[!side],
			};
			struct wc wc;

			for (unsigned k = 0; k < 4; k++)
				qp_post(&qp[i], &w);
			for (unsigned k = 0; k < 4; k++)
				cq_wait(&scq, &wc);
			if (qp_state_now(&qp[i]) == IBV_QPS_ERR)
				reconnect(&qp[i], i, 8);
		}
	}
}

static void disturbed(bool one_copy)
{
	open_side(load(&s->go_on), one_copy);
	connect_all(8, 0);
	disturb();
	close_side();
}

/* ---------------------------------------------------------------- cut short */

static void meet(void)
{
	__atomic_store_n(&s->ready[side], load(&s->ready[side]) + 1, __ATOMIC_RELEASE);
	wait_for(&s->ready[!side], load(&s->ready[side]));
}

/* Over a link that was torn all is lost, and over the next one all is well. */
static void torn(bool one_copy)
{
	open_side(load(&s->go_on), one_copy);
	connect_all(8, 0);
	disturb();
	meet();
	for (unsigned i = 0; i < QPS; i++)
		reconnect(&qp[i], i, 23); /* half a minute: that's time enough for the other side to be let on a CPU */
	meet();
	for (unsigned i = 0; i < QPS; i++) {
		struct sge e = { s->mem[side], 64, mr.m.key };
		struct wr w = { .opcode = MLX5_OPCODE_RDMA_WRITE, .sg = &e, .nsg = 1, .raddr = (uintptr_t)s->mem[!side],
				.rkey = s->key[!side] };
		struct wc wc;

		qp_post(&qp[i], &w);
		cq_wait(&scq, &wc);
		CHECK_EQ(wc.syndrome, 0);
	}
	meet();
	close_side();
}

static void cutter(bool unused)
{
	unsigned cut = 0;
	uint64_t until;

	(void)unused;
	wait_for_both();
	until = monotonic_us() + 1500000;
	while (monotonic_us() < until || !cut) {
		int fd = open_link();

		if (fd >= 0 && !ftruncate(fd, rand() % 2 ? 0 : rand() % (1 << 21)))
			cut++;
		close(fd);
		usleep(rand() % 20000);
	}
	__atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
}

/* Nobody finds anybody after that, and nobody dies of it. */
static void registry_cutter(bool unused)
{
	char path[PATH_MAX];

	(void)unused;
	wait_for_both();
	usleep(200000);
	snprintf(path, sizeof(path), "%s/aiordma-%u.4/registry", folder, (unsigned)geteuid());
	CHECK(!truncate(path, 0));
	usleep(500000);
	__atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------- a device that stands still */

#define CANCEL_US 200000u  /* how long cancelling waits for what the other side has begun */
#define ASKED WIRE_FLIGHTS /* of each queue pair */
#define LONG 23		   /* a timeout of half a minute */

static void standing(bool one_copy)
{
	open_side(1, one_copy);
	connect_all(LONG, 7);
	aiordma_emu_stepping(1);
	__atomic_store_n(&s->go_on, 1, __ATOMIC_RELEASE);
	wait_for(&s->stop, 1);
	aiordma_emu_stepping(0);
	close_side();
}

static struct wire_link *the_link(void)
{
	return container_of(wire_links.next, struct wire_link, link);
}

static void ask(struct tqp *q)
{
	struct sge e = { s->mem[0], 64, mr.m.key };
	struct wr w = { .opcode = MLX5_OPCODE_RDMA_WRITE, .sg = &e, .nsg = 1, .raddr = (uintptr_t)s->mem[1], .rkey = s->key[1] };

	qp_post(q, &w);
}

/* As if the other side had begun what it was asked, or done it. */
static unsigned change(struct wire_half *h, uint32_t from, uint32_t to)
{
	unsigned n = 0;

	for (uint32_t i = 0; i < WIRE_SLOTS; i++) {
		if (__atomic_load_n(&h->slots[i].state, __ATOMIC_ACQUIRE) != from)
			continue;
		__atomic_store_n(&h->slots[i].state, to, __ATOMIC_RELEASE);
		if (to == SLOT_ANSWERED)
			wire_put(&h->answered, i);
		n++;
	}
	return n;
}

static void flushed(unsigned n)
{
	struct wc wc;

	aiordma_emu_step();
	while (n--) {
		CHECK(cq_poll(&scq, &wc));
		CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	}
}

/* It's in the middle of one request at most, so it's waited for once. */
static void waits_once(void)
{
	struct wire_link *l;
	uint64_t begin;

	for (unsigned i = 0; i < QPS; i++)
		for (unsigned k = 0; k < ASKED; k++)
			ask(&qp[i]);
	aiordma_emu_step();
	l = the_link();
	CHECK_EQ(change(l->mine, SLOT_ASKED, SLOT_TAKEN), QPS * ASKED);
	begin = monotonic_us();
	for (unsigned i = 0; i < QPS; i++)
		qp_state(&qp[i], IBV_QPS_ERR);
	CHECK(monotonic_us() - begin >= CANCEL_US);
	CHECK(monotonic_us() - begin < QPS * ASKED * CANCEL_US / 2);
	flushed(QPS * ASKED);
	change(l->mine, SLOT_TAKEN, SLOT_ANSWERED);
	aiordma_emu_step();
	CHECK_EQ(l->nunused, WIRE_SLOTS);
}

/* The other side, which cancels too: it's done with our request when we're done with its. */
static void *waiting_peer(void *link)
{
	struct wire_link *l = link;

	while (__atomic_load_n(&l->theirs->slots[0].state, __ATOMIC_ACQUIRE) != SLOT_ANSWERED)
		usleep(50);
	change(l->mine, SLOT_TAKEN, SLOT_ANSWERED);
	return NULL;
}

static uint64_t refuse_and_cancel(struct wire_link *l)
{
	union ibv_gid gid = device_gid(0);
	struct wire_slot *theirs = &l->theirs->slots[0];
	uint64_t begin;
	pthread_t peer;

	reconnect(&qp[0], 0, LONG);
	ask(&qp[0]);
	aiordma_emu_step();
	CHECK_EQ(change(l->mine, SLOT_ASKED, SLOT_TAKEN), 1);
	theirs->request = (struct wire_request){
		.opcode = MLX5_OPCODE_RDMA_WRITE, .flags = WIRE_FIRST | WIRE_LAST, .src_type = IBV_QPT_RC,
		.src_mtu = IBV_MTU_4096, .gid_type = IBV_GID_TYPE_ROCE_V2, .src_qpn = qp[0].qp.dest_qpn,
		.dst_qpn = qp[0].qp.qpn, .psn = nic(&qp[0].qp)->rx_psn, .packets = 1, .rkey = ~mr.m.key, .msg_len = 64,
		.len = 64, .raddr = (uintptr_t)s->mem[0],
	};
	memcpy(theirs->request.sgid, gid.raw, sizeof(gid.raw));
	memcpy(theirs->request.dgid, gid.raw, sizeof(gid.raw));
	__atomic_store_n(&theirs->state, SLOT_ASKED, __ATOMIC_RELEASE);
	wire_put(&l->theirs->asked, 0);
	CHECK(!pthread_create(&peer, NULL, waiting_peer, l));
	begin = monotonic_us();
	aiordma_emu_step();
	begin = monotonic_us() - begin;
	CHECK(!pthread_join(peer, NULL));
	CHECK_EQ(qp_state_now(&qp[0]), IBV_QPS_ERR);
	flushed(1);
	return begin;
}

/* Two that cancel in the middle of each other's requests don't wait for each other. */
static void waits_for_none(void)
{
	unsigned rounds = 0;

	/* On a busy machine the other thread may come late, but not each time. */
	while (refuse_and_cancel(the_link()) >= CANCEL_US / 2)
		CHECK(++rounds < 30);
}

static void cancelling(bool one_copy)
{
	open_side(0, one_copy);
	connect_all(LONG, 7);
	wait_for(&s->go_on, 1);
	aiordma_emu_stepping(1);
	waits_once();
	waits_for_none();
	aiordma_emu_stepping(0);
	__atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
	close_side();
}

/* ---------------------------------------------------------------- */

static void start(void (*run)(bool), bool one_copy)
{
	if (start_process())
		return;
	srand((unsigned)getpid());
	run(one_copy);
	exit(0);
}

static void finish(unsigned n)
{
	int status;

	while (n--) {
		CHECK(waitpid(-1, &status, 0) > 0);
		CHECK_EQ(status, 0);
	}
}

static void together(void (*pair)(bool), void (*third)(bool), bool one_copy)
{
	memset(s, 0, offsetof(struct shared, mem));
	start(pair, one_copy);
	wait_for(&s->ready[0], OPEN);
	s->go_on = 1;
	start(pair, one_copy);
	start(third, one_copy);
	finish(3);
}

int main(void)
{
	char path[PATH_MAX];

	CHECK(mkdtemp(folder));
	setenv("AIORDMA_EMULATOR_RUNTIME_DIR", folder, 1);
	for (unsigned one_copy = 0; one_copy < 2; one_copy++) {
		s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		CHECK(s != MAP_FAILED);
		start(sender, one_copy);
		start(receiver, one_copy);
		finish(2);
		if (one_copy) {
			memset(s, 0, offsetof(struct shared, mem));
			start(barred_sender, one_copy);
			start(barred_receiver, one_copy);
			finish(2);
			memset(s, 0, offsetof(struct shared, mem));
			start(strangers, one_copy);
			finish(1);
		}
		memset(s, 0, offsetof(struct shared, mem));
		start(cancelling, one_copy);
		start(standing, one_copy);
		finish(2);
		together(disturbed, scribbler, one_copy);
		together(torn, cutter, one_copy);
		together(disturbed, registry_cutter, one_copy);
		munmap(s, sizeof(*s));
	}
	snprintf(path, sizeof(path), "%s/aiordma-%u.4", folder, (unsigned)geteuid());
	remove_folder(path);
	remove_folder(folder);
	return 0;
}

/* SPDX-License-Identifier: MIT
 * What another process may write into what it shares with us: the link's file, and the registry. An input says what it
 * writes, what our own queue pairs post meanwhile, and when it cuts the files short.
 *
 * The other process is a child that holds the lock on a slot of the registry, so that it counts as living, and does nothing
 * else; this process writes into the files in its name. */
#define _GNU_SOURCE
#include "fuzz.h"
#include "nic_world.h"
#include "wire.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define PEER 5u
#define PEER_BLOCK 9u
#define PEER_QPN (PEER_BLOCK << QPN_BLOCK_BITS)

enum { RC, RC_SMALL, UC, UD, XRC_INI, XRC_TGT, DCI, DCT, QPS };

#define SQ_NBB 64u
#define AT_DATA 0u
#define DATA_SIZE (2u << 20)

static char folder[] = "/tmp/aiordma-fuzz-XXXXXX";
static char registry_path[400], link_path[400];
static struct registry *reg;
static pid_t peer_pid;
static struct app app;
static struct tcq cq[2];
static struct tsrq srq[2];
static struct tqp qp[QPS];
static struct tmr mr;

static void clean_up(void)
{
	char command[300];

	snprintf(command, sizeof(command), "rm -rf %s", folder);
	if (system(command))
		perror(folder);
}

static void open_registry(void)
{
	static void *old;
	int fd = open(registry_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	CHECK(fd >= 0 && !ftruncate(fd, sizeof(struct registry)));
	if (old)
		munmap(old, sizeof(struct registry));
	reg = old = mmap(NULL, sizeof(struct registry), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(reg != MAP_FAILED);
	close(fd);
}

static void make_peer(void)
{
	char path[300];
	pid_t pid;
	int ready[2];
	char byte = 0;

	CHECK(mkdtemp(folder));
	atexit(clean_up);
	setenv("AIORDMA_EMULATOR_RUNTIME_DIR", folder, 1);
	snprintf(path, sizeof(path), "%s/aiordma-%u.4", folder, (unsigned)geteuid());
	CHECK(!mkdir(path, 0700));
	snprintf(registry_path, sizeof(registry_path), "%s/registry", path);
	snprintf(link_path, sizeof(link_path), "%s/link-0.1-%u.1", path, PEER);
	strcat(path, "/wake-5.1");
	CHECK(!mkfifo(path, 0600));
	open_registry();
	CHECK(!pipe(ready));
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = PEER, .l_len = 1 };
		int fd = open(registry_path, O_RDWR);

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
		CHECK(!fcntl(fd, F_SETLK, &l));
		/* Not the fuzzer's output and locks. */
		for (int i = 3; i < 64; i++)
			if (i != fd && i != ready[1])
				close(i);
		CHECK(write(ready[1], &byte, 1) == 1);
		for (;;)
			pause();
	}
	CHECK(read(ready[0], &byte, 1) == 1);
	close(ready[0]);
	close(ready[1]);
	peer_pid = pid;
}

static void make_qp(unsigned i, struct qp_opts o, uint32_t peer)
{
	o.sq_nbb = SQ_NBB;
	o.rq_nwqe = 16;
	qp_new(&qp[i], &app, &cq[0], &cq[1], o);
	qp_set_peer(&qp[i], 0, peer);
	qp[i].qp.timeout = 1;
	qp[i].qp.retry_cnt = qp[i].qp.rnr_retry = 1;
	qp[i].qp.dc_key = 1;
	qp[i].qp.qkey = 1;
	qp_to_rts(&qp[i]);
}

static void build(void)
{
	static bool once;

	emu_level = getenv("FUZZ_LOG") ? EMU_DEBUG : EMU_ERROR;
	if (!once) {
		arena_map();
		make_peer();
	}
	once = true;
	open_registry();
	/* Slot 0 in its first generation each time; blocks from the first. */
	memset(&reg->entry[0], 0, sizeof(reg->entry[0]));
	reg->entry[PEER].generation = 1;
	reg->entry[PEER].pid = reg->entry[PEER].thread = peer_pid;
	reg->entry[PEER].asleep = 0;
	reg->next_block = 0;
	memset(reg->block_owner, 0, sizeof(reg->block_owner));
	reg->block_owner[PEER_BLOCK] = PEER + 1;
	unlink(link_path);
	emu.reach_host = emu.one_copy = true;
	world_open(1);
	CHECK_EQ(wire_start(), 0);
	app_open(&app, 0);
	for (unsigned i = 0; i < 2; i++) {
		cq_new(&cq[i], &app, 256, NULL);
		srq_new(&srq[i], &app, 16, 2);
	}
	srq[1].srq.xrc = true;
	srq[1].srq.cq = &cq[1].cq;
	mr_new(&mr, &app, arena(AT_DATA), DATA_SIZE, ALL_ACCESS);
	make_qp(RC, (struct qp_opts){ 0 }, PEER_QPN);
	make_qp(RC_SMALL, (struct qp_opts){ .srq = &srq[0] }, PEER_QPN + 1);
	make_qp(UC, (struct qp_opts){ .type = IBV_QPT_UC }, PEER_QPN + 2);
	make_qp(UD, (struct qp_opts){ .type = IBV_QPT_UD }, 0);
	make_qp(XRC_INI, (struct qp_opts){ .type = IBV_QPT_XRC_SEND }, PEER_QPN + 4);
	make_qp(XRC_TGT, (struct qp_opts){ .type = IBV_QPT_XRC_RECV }, PEER_QPN + 5);
	qp[XRC_TGT].qp.pd = NULL;
	qp[XRC_TGT].qp.scq = qp[XRC_TGT].qp.rcq = NULL;
	make_qp(DCI, (struct qp_opts){ .type = IBV_QPT_DRIVER, .dci = true }, 0);
	make_qp(DCT, (struct qp_opts){ .type = IBV_QPT_DRIVER, .dct = true, .srq = &srq[0] }, 0);
}

static void tear_down(void)
{
	for (unsigned i = 0; i < QPS; i++)
		qp_free(&qp[i]);
	mr_free(&mr);
	for (unsigned i = 0; i < 2; i++) {
		srq_free(&srq[i]);
		cq_free(&cq[i]);
	}
	app_close(&app);
	wire_stop();
	world_close();
}

/* ---------------------------------------------------------------- as the peer */

static struct wire_shared *shared;

static void map_link(void)
{
	struct stat st;
	int fd = open(link_path, O_RDWR | O_CLOEXEC);

	if (shared)
		munmap(shared, sizeof(*shared));
	shared = NULL;
	if (fd < 0)
		return;
	if (!fstat(fd, &st) && st.st_size == sizeof(*shared))
		shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (shared == MAP_FAILED)
		shared = NULL;
	close(fd);
}

static struct wire_half *theirs(void)
{
	return shared ? &shared->half[1] : NULL;
}

/* A sensible request of `qp`'s peer, which the input then changes. */
static void plain_request(struct wire_request *w, unsigned i)
{
	union ibv_gid gid = device_gid(0);
	uint8_t type = i == XRC_TGT ? IBV_QPT_XRC_SEND : i == DCT ? IBV_QPT_DRIVER : qp[i].qp.type;

	*w = (struct wire_request){
		.opcode = MLX5_OPCODE_RDMA_WRITE, .flags = WIRE_FIRST | WIRE_LAST, .src_type = type, .src_mtu = IBV_MTU_4096,
		.gid_type = IBV_GID_TYPE_ROCE_V2, .src_qpn = qp[i].qp.dest_qpn, .dst_qpn = qp[i].qp.qpn,
		.psn = nic(&qp[i].qp)->rx_psn, .packets = 1, .rkey = mr.m.key, .qkey = 1, .srqn = srq[1].srq.srqn,
		.msg_len = 64, .len = 64, .raddr = ARENA + AT_DATA, .dc_key = 1,
	};
	memcpy(w->sgid, gid.raw, 16);
	memcpy(w->dgid, gid.raw, 16);
}

enum op {
	OP_RUN,
	OP_ASK,	    /* u8 QP, u8 slot, u8 n, n times (u8 offset in the request, u8 value), u8 m, m bytes of payload */
	OP_ANSWER,  /* u8 slot, struct wire_answer, u8 n, n bytes of payload */
	OP_RAW,	    /* u32 offset in the file, u8 n, n bytes */
	OP_REGISTRY, /* u32 offset in the registry, u8 n, n bytes. Not the entry of the peer's pid */
	OP_POST,    /* u8 QP, u8 opcode, u32 length, u64 address at the other side */
	OP_RECV,    /* u8 QP */
	OP_CUT,	    /* u8 which file, u32 to how many bytes */
	OP_STATE,   /* u8 QP, u8 state */
	OP_POLL,
	OP_ALIVE,   /* the device looks who is */
	OPS
};

static void put_in_ring(struct wire_ring *r, unsigned slot)
{
	r->slot[r->head % WIRE_SLOTS] = (uint16_t)slot;
	r->head++;
}

static void do_ask(struct input *in)
{
	unsigned i = (unsigned)take(in, 1) % QPS, slot = (unsigned)take(in, 1) % WIRE_SLOTS;
	unsigned n = (unsigned)take(in, 1) % 32;
	struct wire_request w;
	size_t len;
	const uint8_t *bytes;

	plain_request(&w, i);
	for (; n; n--) {
		unsigned at = (unsigned)take(in, 1) % sizeof(w);

		((uint8_t *)&w)[at] = (uint8_t)take(in, 1);
	}
	len = take(in, 1);
	bytes = take_bytes(in, &len);
	if (!theirs())
		return;
	theirs()->slots[slot].request = w;
	memcpy(theirs()->slots[slot].payload, bytes, len);
	theirs()->slots[slot].state = SLOT_ASKED;
	put_in_ring(&theirs()->asked, slot);
}

static void do_answer(struct input *in)
{
	unsigned slot = (unsigned)take(in, 1);
	struct wire_answer a;
	size_t n = sizeof(a), len;
	const uint8_t *bytes = take_bytes(in, &n);

	memset(&a, 0, sizeof(a));
	memcpy(&a, bytes, n);
	len = take(in, 1);
	bytes = take_bytes(in, &len);
	if (!shared)
		return;
	if (slot < WIRE_SLOTS) {
		struct wire_slot *s = &shared->half[0].slots[slot];

		s->answer = a;
		memcpy(s->payload, bytes, len);
		s->state = SLOT_ANSWERED;
	}
	put_in_ring(&shared->half[0].answered, slot);
}

static void do_raw(struct input *in)
{
	size_t offset = take(in, 4) % sizeof(*shared), n = take(in, 1);
	const uint8_t *bytes = take_bytes(in, &n);

	n = MIN(n, sizeof(*shared) - offset);
	if (shared)
		memcpy((uint8_t *)shared + offset, bytes, n);
}

static void do_registry(struct input *in)
{
	size_t offset = take(in, 4) % sizeof(*reg), n = take(in, 1);
	const uint8_t *bytes = take_bytes(in, &n);

	n = MIN(n, sizeof(*reg) - offset);
	memcpy((uint8_t *)reg + offset, bytes, n);
	/* The memory of any other process is none of ours to look at. */
	if (reg->entry[PEER].pid > 0)
		reg->entry[PEER].pid = peer_pid;
	if (reg->entry[PEER].thread > 0)
		reg->entry[PEER].thread = peer_pid;
	for (uint32_t i = 0; i < REGISTRY_SLOTS; i++)
		if (i != PEER && i != registry_self()->slot)
			reg->entry[i].pid = reg->entry[i].thread = 0;
}

static void do_cut(struct input *in)
{
	bool registry = take(in, 1) & 1;
	off_t size = (off_t)(take(in, 4) % sizeof(*shared));

	if (registry)
		size %= (off_t)sizeof(*reg);
	if (!registry && !shared)
		return;
	if (truncate(registry ? registry_path : link_path, size))
		return;
	/* Ours would be torn too. */
	if (registry)
		open_registry();
	else
		map_link();
}

/* ---------------------------------------------------------------- as the application */

static void do_post(struct input *in)
{
	unsigned i = (unsigned)take(in, 1) % QPS;
	static const uint8_t opcodes[] = { MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_RDMA_READ, MLX5_OPCODE_SEND,
					   MLX5_OPCODE_ATOMIC_FA, MLX5_OPCODE_RDMA_WRITE_IMM, MLX5_OPCODE_SEND_INVAL };
	uint8_t opcode = opcodes[take(in, 1) % sizeof(opcodes)];
	struct sge s = { arena(AT_DATA), (uint32_t)take(in, 4) % DATA_SIZE, mr.m.key };
	union ibv_gid gid = device_gid(0);
	struct wr w = { .opcode = opcode, .sg = &s, .nsg = 1, .raddr = take(in, 8), .rkey = 1, .dqpn = PEER_QPN + i,
			.qkey = 1, .dgid = &gid };

	if (qp[i].qp.dci)
		w.dc_key = 1;
	if (opcode == MLX5_OPCODE_ATOMIC_FA)
		s.len = 8;
	if (qp[i].qp.sq_nbb && (uint16_t)(qp[i].sq_pi - qp[i].qp.sq_ci) < SQ_NBB - 8)
		qp_post(&qp[i], &w);
}

static void do_recv(unsigned i)
{
	struct sge s = { arena(AT_DATA), 4096, mr.m.key };

	if (qp[i].qp.srq == &srq[0].srq)
		srq_post(&srq[0], &s, 1);
	else if (i == XRC_TGT)
		srq_post(&srq[1], &s, 1);
	else if (qp[i].qp.rq_nwqe)
		qp_recv(&qp[i], &s, 1);
}

static void do_state(struct input *in)
{
	unsigned i = (unsigned)take(in, 1) % QPS;
	uint8_t state = (uint8_t)take(in, 1) % (IBV_QPS_ERR + 1);

	if (emu_qp_hardware_can(qp[i].qp.state, state))
		qp_state(&qp[i], state);
}

static void run(unsigned rounds)
{
	emu_lock();
	while (rounds--) {
		wire_poll();
		engine_pump(1);
	}
	for (struct emu_list *l = wire_links.next; l != &wire_links; l = l->next)
		CHECK(container_of(l, struct wire_link, link)->peer.pid > 0);
	emu_unlock();
	if (!shared)
		map_link();
}

static void step(struct input *in)
{
	struct wc wc;

	switch (take(in, 1) % OPS) {
	case OP_ASK:
		do_ask(in);
		break;
	case OP_ANSWER:
		do_answer(in);
		break;
	case OP_RAW:
		do_raw(in);
		break;
	case OP_REGISTRY:
		do_registry(in);
		break;
	case OP_POST:
		do_post(in);
		break;
	case OP_RECV:
		do_recv((unsigned)take(in, 1) % QPS);
		break;
	case OP_CUT:
		do_cut(in);
		break;
	case OP_STATE:
		do_state(in);
		break;
	case OP_POLL:
		while (cq_poll(&cq[0], &wc) || cq_poll(&cq[1], &wc))
			;
		break;
	case OP_ALIVE:
		emu_lock();
		wire_check_alive();
		emu_unlock();
		break;
	default:
		run(2);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input in = { data, size };

	build();
	/* The first request opens the link. */
	map_link();
	for (unsigned i = 0; i < 300 && in.n; i++)
		step(&in);
	run(6);
	tear_down();
	if (shared)
		munmap(shared, sizeof(*shared));
	shared = NULL;
	channels_restart();
	arena_reset();
	return 0;
}

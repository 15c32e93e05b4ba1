/* SPDX-License-Identifier: MIT
 * Work queue entries: any bytes in the send, receive and shared queues of each kind of QP, and in their records.
 *
 * The queues, their records and the memory of the keys are in the arena. Keys are numbered from 0x10 on; the variant of
 * the first is 0, of others their index: 0x1000, 0x1111, 0x1212, ... seeds_wqe.py knows what is where. */
#define _GNU_SOURCE
#include "fuzz.h"
#include "nic_world.h"

#include <sys/mman.h>

enum { RC_A, RC_B, UC_A, UC_B, UD, XRC_INI, XRC_TGT, DCI, DCT, SRQ_A, SRQ_B, QPS };
enum { MR_ALL, MR_READ_ONLY, MR_GONE, MRS };
enum { WINDOW_1, WINDOW_2, LIST_KEY, OTHER_LIST_KEY, PLAIN_LIST_KEY, INDIRECT };

#define SQ_NBB 32u
#define RQ_NWQE 16u
#define DATA_SIZE (64u << 10)
/* In the arena. */
#define AT_DATA 0u
#define AT_READ_ONLY (1u << 20)
#define AT_GONE (2u << 20)
#define AT_QUEUES (3u << 20) /* 16 KiB for each QP, then the records, the SRQs and the CQs */
#define QUEUE_SIZE (16u << 10)
#define AT_RECORDS (AT_QUEUES + QPS * QUEUE_SIZE)
#define AT_SRQ (AT_RECORDS + EMU_PAGE)
#define AT_CQ (AT_SRQ + 2 * QUEUE_SIZE)

static struct app app;
static struct tcq cq[2];
static struct tsrq srq[2]; /* a plain one and an XRC one */
static struct tqp qp[QPS];
static struct tmr mr[MRS];
static struct emu_mkey indirect[INDIRECT];
static bool qp_there[QPS], mr_there[MRS];

static uint32_t *record(unsigned i)
{
	return (uint32_t *)(void *)arena(AT_RECORDS + i * 64);
}

static void make_qp(unsigned i, struct qp_opts o)
{
	struct tqp *t = &qp[i];

	o.sq_nbb = SQ_NBB;
	o.rq_nwqe = RQ_NWQE;
	o.rq_sge = 4;
	qp_new(t, &app, &cq[0], &cq[1], o);
	free(t->qp.buf);
	t->qp.buf = arena(AT_QUEUES + i * QUEUE_SIZE);
	t->qp.rq = t->qp.buf;
	t->qp.sq = t->qp.buf + ((((size_t)t->qp.rq_nwqe << t->qp.rq_shift) + 63) & ~63ul);
	t->qp.db = record(i);
	t->qp.mmo = true;
	t->qp.timeout = 1;
	t->qp.retry_cnt = t->qp.rnr_retry = 1;
	qp_there[i] = true;
}

static void make_srq(unsigned i)
{
	uint8_t *buf = arena(AT_SRQ + i * QUEUE_SIZE);

	srq_new(&srq[i], &app, 16, 3);
	memcpy(buf, srq[i].srq.buf, 16ul << srq[i].srq.wqe_shift);
	free(srq[i].srq.buf);
	srq[i].srq.buf = buf;
	srq[i].srq.db = record(QPS + i);
}

static void make_cq(unsigned i)
{
	cq_new(&cq[i], &app, 64, NULL);
	memcpy(arena(AT_CQ + i * QUEUE_SIZE), cq[i].cq.buf, 64 * 64);
	free(cq[i].cq.buf);
	cq[i].cq.buf = arena(AT_CQ + i * QUEUE_SIZE);
	cq[i].cq.db = record(QPS + 2 + i);
	*(volatile uint32_t *)&cq[i].cq.db[1] = cq[i].cq.last_arm;
}

static void make_mr(unsigned i)
{
	static const struct {
		uint32_t at, access;
	} what[MRS] = { { AT_DATA, ALL_ACCESS | IBV_ACCESS_MW_BIND }, { AT_READ_ONLY, 0 }, { AT_GONE, ALL_ACCESS } };

	mr_new(&mr[i], &app, arena(what[i].at), DATA_SIZE, what[i].access);
	mr_there[i] = true;
}

static void make_indirect(unsigned i)
{
	struct emu_mkey *m = &indirect[i];

	*m = (struct emu_mkey){
		.o = { .type = i <= WINDOW_2 ? EMU_MW : EMU_DEVX_MKEY, .ctx = &app.ctx },
		.pdn = app.pd.pdn,
		.access = ALL_ACCESS,
		.free = i <= WINDOW_2,
		.mw_type = (uint8_t)(i == WINDOW_1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2),
		.umr_en = i == LIST_KEY || i == OTHER_LIST_KEY,
		.remote_invalidate = i == OTHER_LIST_KEY,
		.max_klm = i == PLAIN_LIST_KEY ? 2 : 16,
		.len = i == PLAIN_LIST_KEY ? 64 : 0,
		.key = i > WINDOW_2 ? 0x10 + MRS + i : 0,
	};
	CHECK_EQ(emu_mkey_insert(app.dev, m), 0);
}

static void peer(unsigned a, unsigned b)
{
	qp_set_peer(&qp[a], 0, qp[b].qp.qpn);
	qp_set_peer(&qp[b], 0, qp[a].qp.qpn);
}

static void build(void)
{
	static uint32_t pdn;
	static struct emu_klm plain[2];

	emu_level = getenv("FUZZ_LOG") ? EMU_DEBUG : EMU_ERROR;
	world_open(1);
	emu.devices[0].limits.max_wr_memcpy_length = 1u << 31;
	app_open(&app, 0);
	app.pd.pdn = ++pdn;
	for (unsigned i = 0; i < 2; i++) {
		make_cq(i);
		make_srq(i);
	}
	srq[1].srq.xrc = true;
	srq[1].srq.cq = &cq[1].cq;
	for (unsigned i = 0; i < MRS; i++)
		make_mr(i);
	emu_lock();
	for (unsigned i = 0; i < INDIRECT; i++)
		make_indirect(i);
	emu_unlock();
	plain[0] = (struct emu_klm){ .addr = ARENA + AT_DATA, .len = 32, .key = mr[MR_ALL].m.key };
	plain[1] = (struct emu_klm){ .addr = 0, .len = 32, .key = indirect[PLAIN_LIST_KEY].key };
	indirect[PLAIN_LIST_KEY].klm = malloc(sizeof(plain));
	CHECK(indirect[PLAIN_LIST_KEY].klm);
	memcpy(indirect[PLAIN_LIST_KEY].klm, plain, sizeof(plain));
	indirect[PLAIN_LIST_KEY].nklm = indirect[PLAIN_LIST_KEY].cap_klm = 2;
	make_qp(RC_A, (struct qp_opts){ 0 });
	make_qp(RC_B, (struct qp_opts){ 0 });
	make_qp(UC_A, (struct qp_opts){ .type = IBV_QPT_UC });
	make_qp(UC_B, (struct qp_opts){ .type = IBV_QPT_UC });
	make_qp(UD, (struct qp_opts){ .type = IBV_QPT_UD });
	make_qp(XRC_INI, (struct qp_opts){ .type = IBV_QPT_XRC_SEND });
	make_qp(XRC_TGT, (struct qp_opts){ .type = IBV_QPT_XRC_RECV });
	qp[XRC_TGT].qp.pd = NULL; /* as control makes them */
	qp[XRC_TGT].qp.scq = qp[XRC_TGT].qp.rcq = NULL;
	qp[XRC_TGT].qp.db = NULL;
	make_qp(DCI, (struct qp_opts){ .type = IBV_QPT_DRIVER, .dci = true, .log_num_concurrent = 2, .log_num_errored = 1 });
	make_qp(DCT, (struct qp_opts){ .type = IBV_QPT_DRIVER, .dct = true, .srq = &srq[0] });
	qp[DCT].qp.dc_key = 1;
	qp[UD].qp.qkey = 1;
	make_qp(SRQ_A, (struct qp_opts){ .srq = &srq[0] });
	make_qp(SRQ_B, (struct qp_opts){ .srq = &srq[0] });
	peer(RC_A, RC_B);
	peer(UC_A, UC_B);
	peer(XRC_INI, XRC_TGT);
	peer(SRQ_A, SRQ_B);
	for (unsigned i = 0; i < QPS; i++)
		qp_to_rts(&qp[i]);
}

static void drop_qp(unsigned i)
{
	if (!qp_there[i])
		return;
	emu_lock();
	emu_qp_remove(&qp[i].qp);
	emu_unlock();
	qp_there[i] = false;
}

static void drop_mr(unsigned i)
{
	if (mr_there[i])
		mr_free(&mr[i]);
	mr_there[i] = false;
}

static void tear_down(void)
{
	for (unsigned i = 0; i < QPS; i++)
		drop_qp(i);
	for (unsigned i = 0; i < MRS; i++)
		drop_mr(i);
	emu_lock();
	for (unsigned i = 0; i < INDIRECT; i++) {
		emu_mkey_remove(&indirect[i]);
		free(indirect[i].klm);
	}
	for (unsigned i = 0; i < 2; i++) {
		emu_srq_remove(&srq[i].srq);
		emu_cq_remove(&cq[i].cq);
	}
	emu_unlock();
	app_close(&app);
	world_close();
}

/* ---------------------------------------------------------------- operations */

enum op {
	OP_RUN,
	OP_SEND,   /* u8 QP, u8 flags, u8 blocks, bytes. Flags 1: ring's index and QPN as they should be. 2: not posted yet */
	OP_RECV,   /* u8 QP, u8 segments, bytes */
	OP_SRQ,	   /* u8 which, u8 bytes, bytes: a whole WQE, "next" included if not right already */
	OP_RECORD, /* u8 which, u8 word, u32 value */
	OP_STATE,  /* u8 QP, u8 state */
	OP_POLL,   /* both CQs are read to their ends */
	OP_KEY,	   /* u8 which MR: goes, or comes back */
	OP_DROP,   /* u8 QP */
	OP_DATA,   /* u16 offset, u8 n, bytes */
	OP_STREAM, /* u16: reset of a DCI's stream */
	OP_RESIZE, /* u8 which CQ, u8 log of entries */
	OP_UNMAP,  /* u32 offset, u32 length: of the arena */
	OP_LIMIT,  /* u8 which SRQ, u8 limit */
	OPS
};

static bool there(const void *p, size_t n)
{
	uintptr_t page = (uintptr_t)p & ~(uintptr_t)(EMU_PAGE - 1);

	return !madvise((void *)page, (uintptr_t)p + n - page, MADV_POPULATE_WRITE);
}

static void add_record(uint32_t *word, unsigned n)
{
	if (there(word, 4))
		__atomic_store_n(word, htobe32((be32toh(*word) + n) & 0xffff), __ATOMIC_RELEASE);
}

static void do_send(struct input *in)
{
	unsigned i = (unsigned)take(in, 1) % QPS, flags = (unsigned)take(in, 1);
	size_t n = (take(in, 1) % SQ_NBB + 1) * 64, have = n;
	const uint8_t *bytes = take_bytes(in, &have);
	struct emu_qp *q = &qp[i].qp;
	uint16_t pi;

	if (!qp_there[i] || !q->sq_nbb || !there(q->db, 8) || !there(q->sq, SQ_NBB * 64))
		return;
	pi = (uint16_t)be32toh(q->db[1]);
	for (size_t k = 0; k < n; k++)
		q->sq[(pi % SQ_NBB * 64 + k) % (SQ_NBB * 64)] = k < have ? bytes[k] : 0;
	if (flags & 1) {
		struct mlx5_wqe_ctrl_seg *c = (void *)(q->sq + pi % SQ_NBB * 64);

		c->opmod_idx_opcode = htobe32((be32toh(c->opmod_idx_opcode) & 0xff0000ff) | (uint32_t)pi << 8);
		c->qpn_ds = htobe32((be32toh(c->qpn_ds) & 0xff) | q->qpn << 8);
	}
	if (!(flags & 2))
		add_record(&q->db[1], (unsigned)(n / 64));
}

static void do_recv(struct input *in)
{
	unsigned i = (unsigned)take(in, 1) % QPS;
	size_t n = take(in, 1) % 5 * 16;
	const uint8_t *bytes = take_bytes(in, &n);
	struct emu_qp *q = &qp[i].qp;
	uint8_t *w;

	if (!qp_there[i] || !q->rq_nwqe || !there(q->db, 8) || !there(q->rq, RQ_NWQE * 64))
		return;
	w = q->rq + (size_t)(be32toh(q->db[0]) % RQ_NWQE << q->rq_shift);
	memset(w, 0, 64);
	memcpy(w, bytes, n);
	if (n + 16 <= 64)
		memcpy(w + n + 4, &(uint32_t){ htobe32(MLX5_INVALID_LKEY) }, 4);
	add_record(&q->db[0], 1);
}

static void do_srq(struct input *in)
{
	struct tsrq *s = &srq[take(in, 1) % 2];
	size_t n = take(in, 1) % 65;
	const uint8_t *bytes = take_bytes(in, &n);
	uint8_t *w = s->srq.buf + (size_t)(s->posted % 16 << s->srq.wqe_shift);

	if (!there(s->srq.buf, 16 * 64) || !there(s->srq.db, 8))
		return;
	memcpy(w, bytes, n);
	s->posted++;
	add_record(&s->srq.db[0], 1);
}

static void do_record(struct input *in)
{
	uint32_t *r = record((unsigned)take(in, 1) % (QPS + 4)) + take(in, 1) % 2;
	uint32_t value = (uint32_t)take(in, 4);

	if (there(r, 4))
		__atomic_store_n(r, htobe32(value), __ATOMIC_RELEASE);
}

static void do_state(struct input *in)
{
	unsigned i = (unsigned)take(in, 1) % QPS;
	uint8_t state = (uint8_t)take(in, 1) % (IBV_QPS_ERR + 1), old = qp[i].qp.state;

	/* Which change is allowed is control's to say (qp_state.c). */
	if (!qp_there[i] || !emu_qp_hardware_can(old, state))
		return;
	emu_lock();
	qp[i].qp.state = state;
	emu_qp_state_changed(&qp[i].qp, old);
	emu_unlock();
}

static void do_poll(void)
{
	struct wc wc;

	for (unsigned i = 0; i < 2; i++) {
		struct emu_cq *c = &cq[i].cq;

		if (!there(c->buf, (size_t)c->ncqe * c->cqe_size) || !there(c->db, 8))
			continue;
		while (cq_poll(&cq[i], &wc))
			;
		c->db[0] = cq[i].db[0];
	}
}

static void do_resize(struct input *in)
{
	unsigned i = (unsigned)take(in, 1) % 2;
	uint32_t n = 1u << take(in, 1) % 8;

	emu_lock();
	emu_cq_resize(&cq[i].cq, arena(AT_CQ + i * QUEUE_SIZE), n, 64);
	emu_unlock();
}

static void do_data(struct input *in)
{
	uint64_t offset = take(in, 2);
	size_t n = take(in, 1);
	const uint8_t *bytes = take_bytes(in, &n);

	if (n && there(arena(AT_DATA + offset), n))
		memcpy(arena(AT_DATA + offset), bytes, n);
}

static void do_unmap(struct input *in)
{
	uint64_t offset = take(in, 4);

	arena_unmap(offset, take(in, 4));
}

static void run(unsigned rounds)
{
	emu_lock();
	engine_pump(rounds);
	emu_unlock();
}

static void step(struct input *in)
{
	unsigned i;

	switch (take(in, 1) % OPS) {
	case OP_SEND:
		do_send(in);
		break;
	case OP_RECV:
		do_recv(in);
		break;
	case OP_SRQ:
		do_srq(in);
		break;
	case OP_RECORD:
		do_record(in);
		break;
	case OP_STATE:
		do_state(in);
		break;
	case OP_POLL:
		do_poll();
		break;
	case OP_KEY:
		i = (unsigned)take(in, 1) % MRS;
		if (mr_there[i])
			drop_mr(i);
		else
			make_mr(i);
		break;
	case OP_DROP:
		drop_qp((unsigned)take(in, 1) % QPS);
		break;
	case OP_DATA:
		do_data(in);
		break;
	case OP_STREAM:
		if (qp_there[DCI]) {
			emu_lock();
			emu_dci_stream_reset(&qp[DCI].qp, (uint16_t)take(in, 2));
			emu_unlock();
		}
		break;
	case OP_RESIZE:
		do_resize(in);
		break;
	case OP_UNMAP:
		do_unmap(in);
		break;
	case OP_LIMIT:
		i = (unsigned)take(in, 1) % 2;
		emu_lock();
		emu_srq_set_limit(&srq[i].srq, (uint32_t)take(in, 1));
		emu_unlock();
		break;
	default:
		run(4);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static bool mapped;
	struct input in = { data, size };

	if (!mapped)
		arena_map();
	mapped = true;
	build();
	arena_unmap(AT_GONE, DATA_SIZE);
	for (unsigned i = 0; i < 200 && in.n; i++)
		step(&in);
	run(16);
	tear_down();
	channels_restart();
	arena_reset();
	return 0;
}

/* SPDX-License-Identifier: MIT
 * Indirect keys, memory windows, DMA memcpy; keys that go while they are used. */
#include "nic_world.h"

static struct app app;
static struct tcq cq[2];
static struct tqp qp[2];
static struct tmr mr;
static uint8_t mem[1 << 20] __attribute__((aligned(4096)));

static void open_all(void)
{
	app_open(&app, 0);
	mr_new(&mr, &app, mem, sizeof(mem), ALL_ACCESS | IBV_ACCESS_MW_BIND);
	for (unsigned i = 0; i < 2; i++) {
		cq_new(&cq[i], &app, 64, NULL);
		qp_new(&qp[i], &app, &cq[i], &cq[i], (struct qp_opts){ 0 });
	}
	qp_connect(&qp[0], &qp[1]);
	for (unsigned i = 0; i < sizeof(mem); i++)
		mem[i] = (uint8_t)(i * 13 + (i >> 8));
}

static void close_all(void)
{
	for (unsigned i = 0; i < 2; i++) {
		qp_free(&qp[i]);
		cq_free(&cq[i]);
	}
	mr_free(&mr);
	app_close(&app);
}

static void reopen(void)
{
	close_all();
	open_all();
}

static void key_new(struct tmr *k, enum emu_type type, uint32_t max_klm)
{
	memset(k, 0, sizeof(*k));
	k->m.o.type = type;
	k->m.o.ctx = &app.ctx;
	k->m.pdn = app.pd.pdn;
	k->m.max_klm = max_klm;
	k->m.free = true;
	k->m.umr_en = true;
	emu_lock();
	CHECK_EQ(emu_mkey_insert(app.dev, &k->m), 0);
	emu_unlock();
}

static void key_free(struct tmr *k)
{
	mr_free(k);
	free(k->m.klm);
}

struct umr_wqe {
	struct mlx5_wqe_umr_ctrl_seg ctrl;
	struct mlx5_wqe_mkey_context_seg context;
	union {
		struct mlx5_wqe_umr_klm_seg klm[12];
		struct {
			struct mlx5_wqe_umr_repeat_block_seg block;
			struct mlx5_wqe_umr_repeat_ent_seg entries[11];
		} strided;
	};
};

static uint8_t post_umr(struct tqp *q, const struct umr_wqe *u, uint32_t key, uint32_t data)
{
	struct wr w = { .opcode = MLX5_OPCODE_UMR, .imm = key, .raw = u,
			.nraw = sizeof(u->ctrl) + sizeof(u->context) + data };
	struct wc wc;

	qp_post(q, &w);
	cq_wait(q->scq, &wc);
	CHECK_EQ(wc.wqe_op, MLX5_OPCODE_UMR);
	return wc.syndrome;
}

static struct umr_wqe umr(uint32_t key, uint64_t len, uint32_t octowords)
{
	struct umr_wqe u;

	memset(&u, 0, sizeof(u));
	u.ctrl.flags = MLX5_WQE_UMR_CTRL_FLAG_INLINE;
	u.ctrl.klm_octowords = htobe16((uint16_t)octowords);
	u.ctrl.mkey_mask = htobe64(
		MLX5_WQE_UMR_CTRL_MKEY_MASK_FREE | MLX5_WQE_UMR_CTRL_MKEY_MASK_MKEY | MLX5_WQE_UMR_CTRL_MKEY_MASK_LEN |
		MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_LOCAL_WRITE | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_READ |
		MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_WRITE | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_ATOMIC);
	u.context.qpn_mkey = htobe32(0xffffff00 | (key & 0xff));
	u.context.access_flags = MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_LOCAL_WRITE |
				 MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_READ |
				 MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_WRITE;
	u.context.len = htobe64(len);
	return u;
}

static struct mlx5_wqe_umr_klm_seg klm(uint32_t off, uint32_t len)
{
	return (struct mlx5_wqe_umr_klm_seg){ htobe32(len), htobe32(mr.m.key), htobe64((uintptr_t)mem + off) };
}

static uint8_t transfer(uint8_t op, uint32_t local_off, uint32_t lkey, uint64_t laddr, uint32_t len, uint64_t raddr,
			uint32_t rkey)
{
	struct sge s = { lkey == mr.m.key ? mem + local_off : (void *)(uintptr_t)laddr, len, lkey };
	struct wr w = { .opcode = op, .sg = &s, .nsg = 1, .raddr = raddr, .rkey = rkey };
	struct wc wc;

	qp_post(&qp[0], &w);
	cq_wait(&cq[0], &wc);
	return wc.syndrome;
}

static uint8_t write_to(uint32_t key, uint64_t raddr, uint32_t len)
{
	return transfer(MLX5_OPCODE_RDMA_WRITE, 0, mr.m.key, 0, len, raddr, key);
}

static uint8_t read_from(uint32_t key, uint64_t raddr, uint32_t len)
{
	return transfer(MLX5_OPCODE_RDMA_READ, 900000, mr.m.key, 0, len, raddr, key);
}

static void lists(void)
{
	struct umr_wqe u;
	struct tmr k, outer;

	open_all();
	key_new(&k, EMU_DEVX_MKEY, 4);
	key_new(&outer, EMU_DEVX_MKEY, 4);
	CHECK_EQ(k.m.key & 0xff, 0);
	u = umr(k.m.key, 300, 4);
	u.klm[0] = klm(100000, 100);
	u.klm[1] = klm(200000, 50);
	u.klm[2] = klm(300000, 150);
	CHECK_EQ(post_umr(&qp[0], &u, k.m.key, 64), 0);
	/* Gathered from, with its own zero-based addresses, at any place. */
	CHECK_EQ(read_from(k.m.key, 0, 300), 0);
	CHECK(!memcmp(mem + 900000, mem + 100000, 100));
	CHECK(!memcmp(mem + 900100, mem + 200000, 50));
	CHECK(!memcmp(mem + 900150, mem + 300000, 150));
	CHECK_EQ(read_from(k.m.key, 99, 52), 0);
	CHECK_EQ(mem[900000], mem[100099]);
	CHECK(!memcmp(mem + 900001, mem + 200000, 50));
	CHECK_EQ(mem[900051], mem[300000]);
	/* Scattered to. */
	CHECK_EQ(write_to(k.m.key, 40, 200), 0);
	CHECK(!memcmp(mem + 100040, mem, 60));
	CHECK(!memcmp(mem + 200000, mem + 60, 50));
	CHECK(!memcmp(mem + 300000, mem + 110, 90));
	/* As the local side. */
	CHECK_EQ(transfer(MLX5_OPCODE_RDMA_WRITE, 0, k.m.key, 100, 60, (uintptr_t)mem + 700000, mr.m.key), 0);
	CHECK(!memcmp(mem + 700000, mem + 200000, 50));
	/* Through another. */
	u = umr(outer.m.key, 250, 4);
	u.klm[0] = klm(500000, 20);
	u.klm[1] = (struct mlx5_wqe_umr_klm_seg){ htobe32(230), htobe32(k.m.key), htobe64(70) };
	CHECK_EQ(post_umr(&qp[0], &u, outer.m.key, 64), 0);
	CHECK_EQ(read_from(outer.m.key, 0, 250), 0);
	CHECK(!memcmp(mem + 900020, mem + 100070, 30));
	CHECK(!memcmp(mem + 900050, mem + 200000, 50));
	/* One byte too far, in each way. */
	CHECK_EQ(read_from(k.m.key, 1, 300), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	key_free(&outer);
	key_free(&k);
	reopen();

	/* A list that goes round in circles. */
	key_new(&k, EMU_DEVX_MKEY, 4);
	u = umr(k.m.key, 100, 4);
	u.klm[0] = (struct mlx5_wqe_umr_klm_seg){ htobe32(100), htobe32(k.m.key), 0 };
	CHECK_EQ(post_umr(&qp[0], &u, k.m.key, 64), 0);
	CHECK_EQ(read_from(k.m.key, 0, 8), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	key_free(&k);
	close_all();
}

static void strides(void)
{
	struct umr_wqe u;
	struct tmr k;

	open_all();
	key_new(&k, EMU_DEVX_MKEY, 4);
	/* 1000 rows, of each the first 8 bytes and 3 more from elsewhere. */
	u = umr(k.m.key, 11 * 1000, 4);
	u.strided.block = (struct mlx5_wqe_umr_repeat_block_seg){ htobe32(11), htobe32(0x400), htobe32(1000), 0,
								  htobe16(2) };
	u.strided.entries[0] = (struct mlx5_wqe_umr_repeat_ent_seg){ htobe16(100), htobe16(8), htobe32(mr.m.key),
								     htobe64((uintptr_t)mem) };
	u.strided.entries[1] = (struct mlx5_wqe_umr_repeat_ent_seg){ htobe16(7), htobe16(3), htobe32(mr.m.key),
								     htobe64((uintptr_t)mem + 200000) };
	CHECK_EQ(post_umr(&qp[0], &u, k.m.key, 64), 0);
	CHECK_EQ(read_from(k.m.key, 0, 11000), 0);
	for (unsigned r = 0; r < 1000; r++) {
		CHECK(!memcmp(mem + 900000 + 11 * r, mem + 100 * r, 8));
		CHECK(!memcmp(mem + 900008 + 11 * r, mem + 200000 + 7 * r, 3));
	}
	CHECK_EQ(read_from(k.m.key, 11 * 500 + 7, 3), 0);
	CHECK_EQ(mem[900000], mem[50007]);
	CHECK_EQ(mem[900001], mem[203500]);
	CHECK_EQ(read_from(k.m.key, 11000, 1), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	reopen();

	/* One entry too many for the key: the bind looks fine. */
	u = umr(k.m.key, 40 * 2, 8);
	u.strided.block = (struct mlx5_wqe_umr_repeat_block_seg){ htobe32(40), htobe32(0x400), htobe32(2), 0, htobe16(4) };
	for (unsigned i = 0; i < 4; i++)
		u.strided.entries[i] = (struct mlx5_wqe_umr_repeat_ent_seg){
			htobe16(10), htobe16(10), htobe32(mr.m.key), htobe64((uintptr_t)mem + 1000 * i) };
	k.m.pdn = app.pd.pdn;
	CHECK_EQ(post_umr(&qp[0], &u, k.m.key, 128), 0);
	CHECK_EQ(read_from(k.m.key, 0, 30), 0);
	CHECK_EQ(read_from(k.m.key, 0, 80), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	reopen();

	/* Entries of nothing, four billion times. */
	u = umr(k.m.key, ~0ull, 4);
	u.strided.block = (struct mlx5_wqe_umr_repeat_block_seg){ htobe32(1), htobe32(0x400), 0xffffffff, 0, htobe16(2) };
	u.strided.entries[0] = u.strided.entries[1] =
		(struct mlx5_wqe_umr_repeat_ent_seg){ 0, 0, htobe32(mr.m.key), htobe64((uintptr_t)mem) };
	k.m.pdn = app.pd.pdn;
	CHECK_EQ(post_umr(&qp[0], &u, k.m.key, 64), 0);
	CHECK_EQ(read_from(k.m.key, 0, 8), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	key_free(&k);
	close_all();
}

static uint8_t bind(struct tqp *q, struct tmr *w, uint32_t off, uint32_t len, uint8_t variant, bool type2)
{
	struct umr_wqe u = umr(variant, len, 4);

	u.ctrl.flags |= MLX5_WQE_UMR_CTRL_FLAG_TRNSLATION_OFFSET | (type2 ? MLX5_WQE_UMR_CTRL_FLAG_CHECK_FREE : 0);
	u.ctrl.mkey_mask |= htobe64(MLX5_WQE_UMR_CTRL_MKEY_MASK_START_ADDR |
				    (type2 ? (uint64_t)MLX5_WQE_UMR_CTRL_MKEY_MASK_QPN : 0));
	u.context.start_addr = htobe64((uintptr_t)mem + off);
	if (type2)
		u.context.qpn_mkey = htobe32(q->qp.qpn << 8 | variant);
	u.klm[0] = klm(off, len);
	return post_umr(q, &u, w->m.key, 64);
}

static uint8_t unbind(struct tqp *q, uint32_t key)
{
	struct umr_wqe u;

	memset(&u, 0, sizeof(u));
	u.ctrl.flags = MLX5_WQE_UMR_CTRL_FLAG_TRNSLATION_OFFSET | MLX5_WQE_UMR_CTRL_FLAG_INLINE |
		       MLX5_WQE_UMR_CTRL_FLAG_CHECK_QPN;
	u.ctrl.mkey_mask = htobe64(MLX5_WQE_UMR_CTRL_MKEY_MASK_FREE | MLX5_WQE_UMR_CTRL_MKEY_MASK_MKEY |
				   MLX5_WQE_UMR_CTRL_MKEY_MASK_QPN);
	u.context.free = MLX5_WQE_MKEY_CONTEXT_FREE;
	u.context.qpn_mkey = htobe32(0xffffff00);
	return post_umr(q, &u, key, 0);
}

static void windows(void)
{
	uint64_t base = (uintptr_t)mem;
	struct wr w;
	struct wc wc;
	struct tmr mw;
	uint32_t key;

	open_all();
	key_new(&mw, EMU_MW, 1);
	CHECK_EQ(bind(&qp[1], &mw, 1000, 100, 5, false), 0);
	CHECK_EQ(mw.m.key & 0xff, 5);
	CHECK_EQ(write_to(mw.m.key, base + 1000, 100), 0);
	CHECK_EQ(bind(&qp[1], &mw, 2000, 100, 6, false), 0); /* type 1 can be bound anew at once */
	CHECK_EQ(write_to(mw.m.key, base + 2000, 100), 0);
	CHECK_EQ(write_to(mw.m.key, base + 1099, 1), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	key_free(&mw);
	reopen();

	/* Type 2: for one QP, bound once, until it is invalidated from here or from there. */
	key_new(&mw, EMU_MW, 1);
	CHECK_EQ(bind(&qp[1], &mw, 1000, 100, 9, true), 0);
	key = mw.m.key;
	CHECK_EQ(write_to(key, base + 1050, 50), 0);
	w = (struct wr){ .opcode = MLX5_OPCODE_SEND_INVAL, .imm = key };
	qp_recv(&qp[1], NULL, 0);
	qp_post(&qp[0], &w);
	cq_wait(&cq[1], &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND_INV);
	CHECK_EQ(wc.imm, key);
	cq_wait(&cq[0], &wc);
	CHECK_EQ(bind(&qp[1], &mw, 1000, 100, 10, true), 0);
	key = mw.m.key;
	CHECK_EQ(unbind(&qp[1], key), 0);
	CHECK_EQ(write_to(key, base + 1000, 8), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	reopen();
	mw.m.pdn = app.pd.pdn;
	CHECK_EQ(bind(&qp[1], &mw, 1000, 100, 11, true), 0);
	CHECK_EQ(bind(&qp[1], &mw, 1000, 100, 12, true), MLX5_CQE_SYNDROME_MW_BIND_ERR);
	reopen();
	mw.m.pdn = app.pd.pdn;
	mw.m.free = true;
	CHECK_EQ(bind(&qp[0], &mw, 1000, 100, 13, true), 0); /* by the QP that isn't asked */
	CHECK_EQ(write_to(mw.m.key, base + 1000, 8), MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	reopen();
	mw.m.pdn = app.pd.pdn;
	mw.m.free = true;
	mr.m.access &= ~(uint32_t)IBV_ACCESS_MW_BIND;
	CHECK_EQ(bind(&qp[1], &mw, 1000, 100, 14, true), MLX5_CQE_SYNDROME_MW_BIND_ERR);
	reopen();
	mw.m.pdn = app.pd.pdn;
	CHECK_EQ(bind(&qp[1], &mw, sizeof(mem) - 99, 100, 15, true), MLX5_CQE_SYNDROME_MW_BIND_ERR);
	reopen();
	/* Not a key for the local side. */
	mw.m.pdn = app.pd.pdn;
	CHECK_EQ(bind(&qp[0], &mw, 1000, 100, 16, true), 0);
	CHECK_EQ(transfer(MLX5_OPCODE_RDMA_WRITE, 0, mw.m.key, (uintptr_t)mem + 1000, 8, base, mr.m.key),
		 MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	key_free(&mw);
	close_all();
}

static uint8_t copy_by_device(uint64_t to, uint64_t from, uint32_t n_to, uint32_t n_from)
{
	struct {
		uint8_t result[16];
		struct mlx5_wqe_data_seg src, dst;
	} s = { { 0 }, { htobe32(n_from), htobe32(mr.m.key), htobe64(from) }, { htobe32(n_to), htobe32(mr.m.key), htobe64(to) } };
	struct wr w = { .opcode = MLX5_OPCODE_MMO, .opmod = 1, .raw = &s, .nraw = sizeof(s) };
	struct wc wc;

	qp_post(&qp[0], &w);
	cq_wait(&cq[0], &wc);
	return wc.syndrome;
}

static void memcpy_by_device(void)
{
	uint64_t base = (uintptr_t)mem;

	open_all();
	emu.devices[0].limits.max_wr_memcpy_length = 1u << 31;
	qp[0].qp.mmo = true;
	CHECK_EQ(copy_by_device(base + 500001, base + 1, 400000, 400000), 0);
	CHECK(!memcmp(mem + 500001, mem + 1, 400000));
	CHECK_EQ(copy_by_device(base + 500000, base, 100, 101), MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	reopen();
	qp[0].qp.mmo = true;
	CHECK_EQ(copy_by_device(base + 500000, base, 0, 0), MLX5_CQE_SYNDROME_LOCAL_PROT_ERR); /* 2 GiB */
	reopen();
	CHECK_EQ(copy_by_device(base + 500000, base, 8, 8), MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR); /* not enabled */
	close_all();
}

int main(void)
{
	world_open(1);
	lists();
	strides();
	windows();
	memcpy_by_device();
	world_close();
	return 0;
}

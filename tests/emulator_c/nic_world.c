/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#include "nic_world.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <rdma/ib_user_verbs.h>

uint64_t monotonic_us(void)
{
	return now_ns() / 1000;
}

void sleep_ms(unsigned ms)
{
	usleep(ms * 1000);
}

union ibv_gid device_gid(unsigned device)
{
	union ibv_gid g = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 10, [15] = (uint8_t)(device + 1) } };

	return g;
}

void world_open(unsigned ndevices)
{
	emu.ndevices = ndevices;
	emu.spin_us = 200;
	emu.use_uffd = !getenv("NIC_TEST_NO_UFFD");
#ifdef __SANITIZE_THREAD__
	/* Its atomic stores hold a lock of its own, and a thread stopped in one would hold it against the device thread. */
	emu.use_uffd = false;
#endif
	for (unsigned i = 0; i < ndevices; i++) {
		struct emu_device *d = &emu.devices[i];

		memset(d, 0, sizeof(*d));
		d->index = i;
		snprintf(d->name, sizeof(d->name), "mlx5_%u", i);
		d->limits = (struct emu_limits){
			.max_mr = 1000, .max_mw = 1000, .max_msg_sz = 1u << 30, .atomics = true,
		};
		d->nports = 1;
		d->ports[0] = (struct emu_port_config){
			.ngids = 1,
			.state = IBV_PORT_ACTIVE,
			.active_mtu = IBV_MTU_4096,
			.max_mtu = IBV_MTU_4096,
			.link_layer = IBV_LINK_LAYER_ETHERNET,
		};
		d->ports[0].gids[0] = (struct emu_gid){
			.gid = device_gid(i), .type = IBV_GID_TYPE_ROCE_V2, .valid = true,
		};
	}
	CHECK_EQ(emu_engine_start(), 0);
}

void world_close(void)
{
	emu_engine_stop();
	for (unsigned i = 0; i < emu.ndevices; i++) {
		free(emu.devices[i].qps);
		free(emu.devices[i].cqs);
		free(emu.devices[i].srqs);
		free(emu.devices[i].mkeys);
		memset(&emu.devices[i], 0, sizeof(emu.devices[i]));
	}
}

void app_open(struct app *a, unsigned device)
{
	static uint32_t next_pdn;

	memset(a, 0, sizeof(*a));
	a->dev = &emu.devices[device];
	a->ctx.dev = a->dev;
	CHECK_EQ(emu_channel_init(&a->async, sizeof(struct ib_uverbs_async_event_desc)), 0);
	a->ctx.async = &a->async;
	a->pd.o.ctx = &a->ctx;
	a->pd.pdn = __atomic_add_fetch(&next_pdn, 1, __ATOMIC_RELAXED);
	a->uar.o.ctx = &a->ctx;
	a->uar.page = mmap(NULL, EMU_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(a->uar.page != MAP_FAILED);
	emu_lock();
	emu_uar_mapped(&a->uar);
	emu_unlock();
}

void app_close(struct app *a)
{
	emu_lock();
	emu_uar_unmapped(&a->uar);
	emu_channel_close(&a->async, true);
	emu_unlock();
	munmap((void *)(uintptr_t)a->uar.page, EMU_PAGE);
}

static void ring(struct app *a, uint32_t offset, uint32_t first, uint32_t second)
{
	uint64_t v = htole64((uint64_t)htobe32(second) << 32 | htobe32(first));

	__atomic_store_n((uint64_t *)(uintptr_t)(a->uar.page + offset), v, __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------- CQ */

void cq_new(struct tcq *t, struct app *a, uint32_t ncqe, struct emu_channel *channel)
{
	memset(t, 0, sizeof(*t));
	t->app = a;
	t->cq.o.ctx = &a->ctx;
	t->cq.ncqe = ncqe;
	t->cq.cqe_size = 64;
	t->cq.buf = aligned_alloc(4096, (ncqe * 64 + 4095) & ~4095ul);
	t->cq.db = t->db;
	t->cq.channel = channel;
	t->cq.user_handle = (uintptr_t)t;
	emu_lock();
	CHECK_EQ(emu_cq_insert(a->dev, &t->cq), 0);
	emu_unlock();
}

void cq_free(struct tcq *t)
{
	emu_lock();
	emu_cq_remove(&t->cq);
	emu_unlock();
	free(t->cq.buf);
}

bool cq_poll(struct tcq *t, struct wc *wc)
{
	uint8_t *p = t->cq.buf + (size_t)(t->ci & (t->cq.ncqe - 1)) * t->cq.cqe_size;
	struct mlx5_cqe64 *c = (struct mlx5_cqe64 *)(t->cq.cqe_size == 128 ? p + 64 : p);
	const struct mlx5_err_cqe *e = (const struct mlx5_err_cqe *)c;
	uint8_t own = __atomic_load_n(&c->op_own, __ATOMIC_ACQUIRE);

	if (own >> 4 == MLX5_CQE_INVALID || (own & 1) != !!(t->ci & t->cq.ncqe))
		return false;
	*wc = (struct wc){
		.op = own >> 4,
		.wqe_op = be32toh(c->sop_drop_qpn) >> 24,
		.qpn = be32toh(c->sop_drop_qpn) & 0xffffff,
		.solicited = own & 2,
		.uidx = be32toh(c->srqn_uidx),
		.counter = be16toh(c->wqe_counter),
	};
	if (wc->op == MLX5_CQE_REQ_ERR || wc->op == MLX5_CQE_RESP_ERR) {
		wc->syndrome = e->syndrome;
	} else {
		wc->bytes = be32toh(c->byte_cnt);
		wc->imm = be32toh(c->imm_inval_pkey);
		wc->src_qpn = be32toh(c->flags_rqpn) & 0xffffff;
	}
	t->ci++;
	__atomic_store_n(&t->db[0], htobe32(t->ci & 0xffffff), __ATOMIC_RELEASE);
	return true;
}

void cq_wait(struct tcq *t, struct wc *wc)
{
	uint64_t end = monotonic_us() + PATIENCE_US;

	while (!cq_poll(t, wc))
		CHECK(monotonic_us() < end);
}

void cq_expect_nothing(struct tcq *t, unsigned ms)
{
	struct wc wc;

	sleep_ms(ms);
	CHECK(!cq_poll(t, &wc));
}

void cq_arm(struct tcq *t, bool solicited)
{
	uint32_t word = (t->sn & 3) << 28 | (solicited ? MLX5_CQ_DB_REQ_NOT_SOL : 0) | (t->ci & 0xffffff);

	__atomic_store_n(&t->db[1], htobe32(word), __ATOMIC_RELEASE);
	ring(t->app, MLX5_CQ_DOORBELL, word, t->cq.cqn);
}

/* ---------------------------------------------------------------- keys */

void mr_new(struct tmr *t, struct app *a, void *p, size_t len, uint32_t access)
{
	memset(t, 0, sizeof(*t));
	t->p = p;
	t->m.o.type = EMU_MR;
	t->m.o.ctx = &a->ctx;
	t->m.pdn = a->pd.pdn;
	t->m.access = access;
	t->m.iova = t->m.host = (uintptr_t)p;
	t->m.len = len;
	t->m.direct = true;
	emu_lock();
	CHECK_EQ(emu_mkey_insert(a->dev, &t->m), 0);
	emu_unlock();
}

void mr_free(struct tmr *t)
{
	emu_lock();
	emu_mkey_remove(&t->m);
	emu_unlock();
}

/* ---------------------------------------------------------------- receiving */

static void write_segs(uint8_t *p, uint32_t room, const struct sge *sg, uint32_t n)
{
	struct mlx5_wqe_data_seg *d = (struct mlx5_wqe_data_seg *)p;

	CHECK(n <= room);
	for (uint32_t i = 0; i < n; i++)
		d[i] = (struct mlx5_wqe_data_seg){ htobe32(sg[i].len), htobe32(sg[i].key),
						   htobe64((uintptr_t)sg[i].p) };
	if (n < room)
		d[n] = (struct mlx5_wqe_data_seg){ 0, htobe32(MLX5_INVALID_LKEY), 0 };
}

void srq_new(struct tsrq *t, struct app *a, uint32_t n, uint32_t max_sge)
{
	uint32_t size = 16 + 16 * max_sge;

	memset(t, 0, sizeof(*t));
	t->srq.wqe_shift = 5;
	while (1u << t->srq.wqe_shift < size)
		t->srq.wqe_shift++;
	t->srq.o.ctx = &a->ctx;
	t->srq.pd = &a->pd;
	t->srq.nwqe = n;
	t->srq.max_sge = max_sge;
	t->srq.db = t->db;
	t->srq.user_handle = (uintptr_t)t;
	t->srq.buf = calloc(n, 1ul << t->srq.wqe_shift);
	for (uint32_t i = 0; i < n; i++) {
		struct mlx5_wqe_srq_next_seg *next = (void *)(t->srq.buf + ((size_t)i << t->srq.wqe_shift));

		next->next_wqe_index = htobe16((uint16_t)((i + 1) % n));
	}
	emu_lock();
	CHECK_EQ(emu_srq_insert(a->dev, &t->srq), 0);
	emu_unlock();
}

void srq_free(struct tsrq *t)
{
	emu_lock();
	emu_srq_remove(&t->srq);
	emu_unlock();
	free(t->srq.buf);
}

void srq_post(struct tsrq *t, const struct sge *sg, uint32_t n)
{
	uint8_t *w = t->srq.buf + ((size_t)t->head << t->srq.wqe_shift);
	struct mlx5_wqe_srq_next_seg *next = (void *)w;

	write_segs(w + sizeof(*next), t->srq.max_sge, sg, n);
	t->head = be16toh(next->next_wqe_index);
	t->posted++;
	__atomic_store_n(&t->db[0], htobe32(t->posted & 0xffff), __ATOMIC_RELEASE);
}

void qp_recv(struct tqp *t, const struct sge *sg, uint32_t n)
{
	uint8_t *w = t->qp.rq + ((size_t)(t->rq_pi & (t->qp.rq_nwqe - 1)) << t->qp.rq_shift);

	write_segs(w, (1u << t->qp.rq_shift) / 16, sg, n);
	t->rq_pi++;
	__atomic_store_n(&t->db[0], htobe32(t->rq_pi & 0xffff), __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------- QP */

void qp_new(struct tqp *t, struct app *a, struct tcq *scq, struct tcq *rcq, struct qp_opts o)
{
	static uint32_t next_uidx;
	size_t rq_bytes, bytes;

	memset(t, 0, sizeof(*t));
	t->app = a;
	t->scq = scq;
	t->rcq = rcq;
	t->qp.o.ctx = &a->ctx;
	t->qp.pd = &a->pd;
	t->qp.scq = &scq->cq;
	t->qp.rcq = &rcq->cq;
	t->qp.srq = o.srq ? &o.srq->srq : NULL;
	t->qp.type = o.type ? o.type : IBV_QPT_RC;
	t->qp.uidx = __atomic_add_fetch(&next_uidx, 1, __ATOMIC_RELAXED);
	t->qp.user_handle = (uintptr_t)t;
	t->qp.dci = o.dci;
	t->qp.dct = o.dct;
	t->qp.log_num_concurrent = o.log_num_concurrent;
	t->qp.log_num_errored = o.log_num_errored;
	t->qp.sq_nbb = o.dct || o.type == IBV_QPT_XRC_RECV ? 0 : o.sq_nbb ? o.sq_nbb : 64;
	t->qp.rq_nwqe = o.srq || o.dct || o.dci || o.type >= IBV_QPT_XRC_SEND ? 0 : o.rq_nwqe ? o.rq_nwqe : 64;
	t->qp.rq_shift = 4;
	while (1u << t->qp.rq_shift < 16 * (o.rq_sge ? o.rq_sge : 1))
		t->qp.rq_shift++;
	rq_bytes = (size_t)t->qp.rq_nwqe << t->qp.rq_shift;
	rq_bytes = (rq_bytes + 63) & ~63ul;
	bytes = rq_bytes + (size_t)t->qp.sq_nbb * 64;
	t->qp.buf = aligned_alloc(64, bytes);
	memset(t->qp.buf, 0, bytes);
	t->qp.rq = t->qp.buf;
	t->qp.sq = t->qp.buf + rq_bytes;
	t->qp.db = t->db;
	t->qp.access = ALL_ACCESS;
	t->qp.av = (struct emu_path){ .port = 1, .is_global = true, .dgid = device_gid(0), .hop_limit = 64 };
	t->qp.mtu = IBV_MTU_4096;
	t->qp.rd_atomic = t->qp.dest_rd_atomic = 16;
	t->qp.min_rnr_timer = 1;
	t->qp.timeout = 14;
	t->qp.retry_cnt = 7;
	t->qp.rnr_retry = 7;
	emu_lock();
	CHECK_EQ(emu_qp_insert(a->dev, &t->qp), 0);
	emu_unlock();
}

void qp_free(struct tqp *t)
{
	emu_lock();
	emu_qp_remove(&t->qp);
	emu_unlock();
	free(t->qp.buf);
}

void qp_state(struct tqp *t, uint8_t state)
{
	uint8_t old;

	emu_lock();
	old = t->qp.state;
	t->qp.state = state;
	emu_qp_state_changed(&t->qp, old);
	emu_unlock();
	if (state == IBV_QPS_RESET) {
		t->sq_pi = t->rq_pi = 0;
		t->db[0] = t->db[1] = 0;
	}
}

uint8_t qp_state_now(struct tqp *t)
{
	uint8_t state;

	emu_lock();
	state = t->qp.state;
	emu_unlock();
	return state;
}

void qp_set_peer(struct tqp *t, unsigned device, uint32_t qpn)
{
	t->qp.av.dgid = device_gid(device);
	t->qp.dest_qpn = qpn;
}

void qp_to_rts(struct tqp *t)
{
	qp_state(t, IBV_QPS_INIT);
	qp_state(t, IBV_QPS_RTR);
	qp_state(t, IBV_QPS_RTS);
}

void qp_connect(struct tqp *a, struct tqp *b)
{
	qp_set_peer(a, b->app->dev->index, b->qp.qpn);
	qp_set_peer(b, a->app->dev->index, a->qp.qpn);
	qp_to_rts(a);
	qp_to_rts(b);
}

static uint32_t put(uint8_t *w, uint32_t at, const void *p, uint32_t n)
{
	CHECK(at + n <= 1024);
	memcpy(w + at, p, n);
	return at + n;
}

static uint32_t put_address(uint8_t *w, uint32_t at, const struct wr *wr)
{
	struct mlx5_wqe_av av = { .dqp_dct = htobe32(wr->dqpn | MLX5_EXTENDED_UD_AV), .hop_limit = 64 };

	if (wr->dc_key)
		av.key.dc_key = htobe64(wr->dc_key);
	else
		av.key.qkey.qkey = htobe32(wr->qkey);
	memcpy(av.rgid, wr->dgid->raw, 16);
	return put(w, at, &av, sizeof(av));
}

static uint32_t put_body(uint8_t *w, uint32_t at, const struct tqp *t, const struct wr *wr)
{
	bool atomic = wr->opcode == MLX5_OPCODE_ATOMIC_CS || wr->opcode == MLX5_OPCODE_ATOMIC_FA;

	if (t->qp.type == IBV_QPT_UD || t->qp.dci)
		at = put_address(w, at, wr);
	if (t->qp.type == IBV_QPT_XRC_SEND) {
		uint32_t xrc[4] = { htobe32(wr->srqn) };

		at = put(w, at, xrc, sizeof(xrc));
	}
	if (wr->opcode == MLX5_OPCODE_RDMA_WRITE || wr->opcode == MLX5_OPCODE_RDMA_WRITE_IMM ||
	    wr->opcode == MLX5_OPCODE_RDMA_READ || atomic) {
		struct mlx5_wqe_raddr_seg r = { htobe64(wr->raddr), htobe32(wr->rkey), 0 };

		at = put(w, at, &r, sizeof(r));
	}
	if (atomic) {
		struct mlx5_wqe_atomic_seg s = { htobe64(wr->swap_add), htobe64(wr->compare) };

		at = put(w, at, &s, sizeof(s));
	}
	if (wr->ninl) {
		uint32_t head = htobe32(wr->ninl | MLX5_INLINE_SEG);

		put(w, at, &head, 4);
		put(w, at + 4, wr->inl, wr->ninl);
		at = (at + 4 + wr->ninl + 15) & ~15u;
	}
	for (uint32_t i = 0; i < wr->nsg; i++) {
		struct mlx5_wqe_data_seg d = { htobe32(wr->sg[i].len), htobe32(wr->sg[i].key),
					       htobe64((uintptr_t)wr->sg[i].p) };

		at = put(w, at, &d, sizeof(d));
	}
	return at;
}

void qp_post_quietly(struct tqp *t, const struct wr *wr)
{
	uint8_t w[1024] = { 0 };
	uint32_t at = sizeof(struct mlx5_wqe_ctrl_seg), ds;
	struct mlx5_wqe_ctrl_seg ctrl;

	at = wr->raw ? put(w, at, wr->raw, wr->nraw) : put_body(w, at, t, wr);
	ds = wr->ds ? (uint32_t)wr->ds : (at + 15) / 16;
	memset(&ctrl, 0, sizeof(ctrl));
	mlx5dv_set_ctrl_seg(&ctrl, (uint16_t)t->sq_pi, wr->opcode, wr->opmod, t->qp.qpn,
			    (uint8_t)((wr->unsignalled ? 0 : MLX5_WQE_CTRL_CQ_UPDATE) |
				      (wr->solicited ? MLX5_WQE_CTRL_SOLICITED : 0) |
				      (wr->fence ? MLX5_WQE_CTRL_FENCE : 0)),
			    (uint8_t)(ds & 0x3f), 0, htobe32(wr->imm));
	ctrl.dci_stream_channel_id = htobe16(wr->stream);
	memcpy(w, &ctrl, sizeof(ctrl));
	for (uint32_t i = 0; i < (at + 63) / 64; i++)
		memcpy(t->qp.sq + (size_t)((t->sq_pi + i) & (t->qp.sq_nbb - 1)) * 64, w + i * 64, 64);
	t->sq_pi += (at + 63) / 64;
	__atomic_store_n(&t->db[1], htobe32(t->sq_pi & 0xffff), __ATOMIC_RELEASE);
}

void qp_post(struct tqp *t, const struct wr *wr)
{
	uint32_t pi = t->sq_pi;
	uint32_t ctrl[2];

	qp_post_quietly(t, wr);
	memcpy(ctrl, t->qp.sq + (size_t)(pi & (t->qp.sq_nbb - 1)) * 64, sizeof(ctrl));
	ring(t->app, 0x800 + 0x100 * (__atomic_fetch_add(&t->app->bf, 1, __ATOMIC_RELAXED) & 1), be32toh(ctrl[0]), be32toh(ctrl[1]));
}

/* ---------------------------------------------------------------- events */

bool channel_readable(struct emu_channel *ch, unsigned ms)
{
	struct pollfd p = { .fd = ch->rfd, .events = POLLIN };

	return poll(&p, 1, (int)ms) == 1;
}

uint64_t channel_read(struct emu_channel *ch)
{
	uint64_t v = 0;

	CHECK_EQ(read(ch->rfd, &v, sizeof(v)), sizeof(v));
	return v;
}

int async_event(struct app *a, uint64_t *element, unsigned ms)
{
	struct ib_uverbs_async_event_desc e;

	if (!channel_readable(&a->async, ms))
		return -1;
	CHECK_EQ(read(a->async.rfd, &e, sizeof(e)), sizeof(e));
	if (element)
		*element = e.element;
	return (int)e.event_type;
}

/* ---------------------------------------------------------------- several processes */

pid_t start_process(void)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	return pid;
}

void remove_folder(const char *path)
{
	DIR *dir = opendir(path);
	struct dirent *d;

	while (dir && (d = readdir(dir)))
		unlinkat(dirfd(dir), d->d_name, 0);
	if (dir)
		closedir(dir);
	rmdir(path);
}

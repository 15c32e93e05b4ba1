/* SPDX-License-Identifier: MIT
 * WQEs that change memory keys: binding and invalidating windows, laying out indirect keys.
 *
 * A UMR WQE is a control segment that names the key, a UMR control segment that says what to change, a new mkey context,
 * and a list of what the key shall map: mlx5dv.h; the builders are set_bind_wr() and mlx5_send_wr_mkey_configure() in
 * qp.c. Memory windows and their invalidation are UMRs too. */
#include <stdlib.h>
#include <string.h>

#include "nic.h"

#define MASK(name) (u->mask & MLX5_WQE_UMR_CTRL_MKEY_MASK_##name)

#define OP_REPEAT_BLOCK 0x400 /* umr_strided_seg_create() in qp.c */
#define KLM_MAX (1ull << 31)  /* "up to 2GB", mlx5dv.h: a length of 0 */

struct umr {
	uint8_t flags;
	uint32_t octowords, bsf_octowords;
	uint64_t mask;
	struct mlx5_wqe_mkey_context_seg context;
	const uint8_t *data;
	uint32_t data_size;
};

static bool parse(const struct nic_wqe *w, struct umr *u)
{
	struct mlx5_wqe_umr_ctrl_seg c;
	uint32_t at = w->body;

	if (w->size < at + sizeof(c) + sizeof(u->context))
		return false;
	memcpy(&c, w->raw + at, sizeof(c));
	at += sizeof(c);
	memcpy(&u->context, w->raw + at, sizeof(u->context));
	at += sizeof(u->context);
	u->flags = c.flags;
	u->octowords = be16toh(c.klm_octowords);
	u->bsf_octowords = u->flags & MLX5_WQE_UMR_CTRL_FLAG_TRNSLATION_OFFSET ? 0 : be16toh(c.bsf_octowords);
	u->mask = be64toh(c.mkey_mask);
	u->data = w->raw + at;
	u->data_size = w->size - at;
	return true;
}

static uint32_t access_of(uint8_t flags)
{
	return (flags & MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_LOCAL_WRITE ? IBV_ACCESS_LOCAL_WRITE : 0) |
	       (flags & MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0) |
	       (flags & MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_READ ? IBV_ACCESS_REMOTE_READ : 0) |
	       (flags & MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_ATOMIC ? IBV_ACCESS_REMOTE_ATOMIC : 0);
}

static uint32_t access_mask(const struct umr *u)
{
	return (MASK(ACCESS_LOCAL_WRITE) ? IBV_ACCESS_LOCAL_WRITE : 0) |
	       (MASK(ACCESS_REMOTE_WRITE) ? IBV_ACCESS_REMOTE_WRITE : 0) |
	       (MASK(ACCESS_REMOTE_READ) ? IBV_ACCESS_REMOTE_READ : 0) |
	       (MASK(ACCESS_ATOMIC) ? IBV_ACCESS_REMOTE_ATOMIC : 0);
}

/* ---------------------------------------------------------------- what the key maps */

static bool klm_room(struct emu_mkey *m, uint32_t n)
{
	struct emu_klm *k;

	if (n <= m->cap_klm)
		return true;
	k = realloc(m->klm, n * sizeof(*k));
	if (!k)
		return false;
	m->klm = k;
	m->cap_klm = n;
	return true;
}

static bool set_list(struct emu_mkey *m, const struct umr *u, uint32_t n)
{
	struct mlx5_wqe_umr_klm_seg s;

	if (!klm_room(m, n))
		return false;
	m->strided = false;
	m->nklm = 0;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t len;

		memcpy(&s, u->data + i * sizeof(s), sizeof(s));
		len = be32toh(s.byte_count);
		if (!len && !s.mkey)
			break; /* lists are padded to four entries */
		m->klm[m->nklm++] = (struct emu_klm){
			.addr = be64toh(s.address),
			.len = len ? len : KLM_MAX,
			.key = be32toh(s.mkey),
		};
	}
	return true;
}

static bool set_strided(struct emu_mkey *m, const struct umr *u, const struct mlx5_wqe_umr_repeat_block_seg *b, uint32_t n)
{
	struct mlx5_wqe_umr_repeat_ent_seg s;

	if (!klm_room(m, n))
		return false;
	m->strided = true;
	m->repeat = be32toh(b->repeat_count);
	m->repeat_bytes = be32toh(b->byte_count);
	m->nklm = n;
	for (uint32_t i = 0; i < n; i++) {
		memcpy(&s, u->data + sizeof(*b) + i * sizeof(s), sizeof(s));
		m->klm[i] = (struct emu_klm){
			.addr = be64toh(s.va),
			.len = be16toh(s.byte_count),
			.key = be32toh(s.memkey),
			.stride = be16toh(s.stride),
		};
	}
	return true;
}

/* A list longer than the key has room for isn't refused: the rest of it is just not there, and an access to it fails
 * (users' reports of keys that were one entry too small for the repeat block: meta-pytorch/monarch pull request 4410). */
static bool set_layout(struct emu_mkey *m, const struct umr *u)
{
	uint32_t entry = sizeof(struct mlx5_wqe_umr_klm_seg), n = u->octowords;
	struct mlx5_wqe_umr_repeat_block_seg b;

	if (!(u->flags & MLX5_WQE_UMR_CTRL_FLAG_INLINE))
		return false; /* a list in memory: libmlx5 doesn't build that */
	if (u->data_size < sizeof(b))
		return false;
	n = n < u->data_size / entry ? n : u->data_size / entry;
	n = n < m->max_klm || m->o.type == EMU_MW ? n : m->max_klm;
	memcpy(&b, u->data, sizeof(b));
	if (be32toh(b.op) == OP_REPEAT_BLOCK && be16toh(b.num_ent)) {
		uint32_t entries = be16toh(b.num_ent);

		return n && set_strided(m, u, &b, entries < n - 1 ? entries : n - 1);
	}
	return set_list(m, u, n);
}

/* ---------------------------------------------------------------- memory windows */

/* IBTA 10.6.7.2.2 and man ibv_bind_mw: the window must lie in the region, of the same protection domain, which must
 * allow windows, and local writing if the window allows remote changes. */
static bool window_fits(const struct emu_qp *qp, const struct emu_mkey *m)
{
	const struct emu_mkey *mr = m->nklm ? emu_mkey_find(qp->dev, m->klm[0].key) : NULL;
	uint32_t changes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

	if (!mr || mr->o.type != EMU_MR || mr->pdn != m->pdn || !(mr->access & IBV_ACCESS_MW_BIND))
		return false;
	if ((m->access & changes) && !(mr->access & IBV_ACCESS_LOCAL_WRITE))
		return false;
	return m->klm[0].addr >= mr->iova && m->klm[0].len <= mr->len &&
	       m->klm[0].addr - mr->iova <= mr->len - m->klm[0].len && m->len <= m->klm[0].len;
}

static bool may_change(const struct emu_qp *qp, const struct emu_mkey *m, const struct umr *u, uint32_t key)
{
	if (!m || m->direct || m->pdn != qp->pd->pdn)
		return false;
	if (m->o.type == EMU_DEVX_MKEY && !m->umr_en)
		return false;
	if ((u->flags & MLX5_WQE_UMR_CTRL_FLAG_CHECK_FREE) && !m->free)
		return false; /* a window of type 2 is bound once: IBTA 10.6.7.2.1 */
	if (u->flags & MLX5_WQE_UMR_CTRL_FLAG_CHECK_QPN) {
		/* Invalidating: it must be bound, by this QP, and the key the one in force. */
		return m->key == key && !m->free && (!m->bound_qpn || m->bound_qpn == qp->qpn);
	}
	return true;
}

/* ---------------------------------------------------------------- both */

static void change_context(struct emu_mkey *m, const struct umr *u)
{
	uint32_t qpn_mkey = be32toh(u->context.qpn_mkey), mask = access_mask(u);

	if (MASK(MKEY))
		m->key = (m->key & ~0xffu) | (qpn_mkey & 0xff);
	if (MASK(QPN))
		m->bound_qpn = qpn_mkey >> 8 == 0xffffff ? 0 : qpn_mkey >> 8;
	if (MASK(FREE))
		m->free = u->context.free & MLX5_WQE_MKEY_CONTEXT_FREE;
	if (MASK(LEN))
		m->len = be64toh(u->context.len);
	if (MASK(START_ADDR))
		m->iova = be64toh(u->context.start_addr);
	m->access = (m->access & ~mask) | (access_of(u->context.access_flags) & mask);
}

enum nic_step umr_step(struct emu_qp *qp, struct nic_wqe *w, uint8_t *syndrome)
{
	uint32_t key = be32toh(w->imm);
	struct emu_mkey *m = key >> 8 < qp->dev->mkeys_size ? qp->dev->mkeys[key >> 8] : NULL;
	struct umr u;

	*syndrome = MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR;
	if (!parse(w, &u))
		return STEP_FAIL;
	if (u.bsf_octowords) {
		emu_log(EMU_WARN, "%s: a UMR with a BSF (signature or crypto offload) is not implemented", qp->dev->name);
		return STEP_FAIL;
	}
	*syndrome = MLX5_CQE_SYNDROME_MW_BIND_ERR;
	if (!may_change(qp, m, &u, key))
		return STEP_FAIL;
	if (u.octowords && !set_layout(m, &u))
		return STEP_FAIL;
	change_context(m, &u);
	if (m->o.type == EMU_MW && !m->free && !window_fits(qp, m)) {
		m->free = true;
		return STEP_FAIL;
	}
	emu_log(EMU_DEBUG, "mkey 0x%x: start 0x%llx length %llu, %u entries%s%s, access 0x%x", m->key,
		(unsigned long long)m->iova, (unsigned long long)m->len, m->nklm, m->strided ? " strided" : "",
		m->free ? " free" : "", m->access);
	*syndrome = 0;
	return STEP_DONE;
}

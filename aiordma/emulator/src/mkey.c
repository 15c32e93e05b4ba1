/* SPDX-License-Identifier: MIT
 * Memory keys: the table of them, and what they let whom do where.
 *
 * A key is direct (an MR: one range of host memory), or indirect: a list of KLM entries, each a range of another key,
 * or the same repeated with a stride (mlx5dv.h, struct mlx5_wqe_umr_klm_seg and mlx5_wqe_umr_repeat_block_seg). A memory
 * window is an indirect key with one entry. */
#include <errno.h>
#include <stdlib.h>

#include "nic.h"

/* Indices below this belong to the device: 0x100 (index 1) ends a receive WQE's list, mlx5dv.h MLX5_INVALID_LKEY. */
#define FIRST_INDEX 0x10u
#define INDEX_RANGE ((1u << 20) - FIRST_INDEX)

int emu_mkey_insert(struct emu_device *dev, struct emu_mkey *m)
{
	uint32_t limit = m->o.type == EMU_MW ? dev->limits.max_mw : dev->limits.max_mr;
	uint32_t variant, index;

	if (dev->count[m->o.type] >= limit)
		return ENOMEM;
	variant = dev->next_mkey & 0xff;
	index = table_insert(&dev->mkeys, &dev->mkeys_size, &dev->next_mkey, FIRST_INDEX, INDEX_RANGE, m);
	if (!index)
		return ENOMEM;
	/* The variant makes an old key useless when its index comes back: mlx5/mr.c, assign_mkey_variant(). DEVX mkeys
	 * choose theirs (mkc.mkey_7_0). */
	if (m->o.type == EMU_DEVX_MKEY)
		variant = m->key & 0xff;
	m->dev = dev;
	m->key = index << 8 | variant;
	return 0;
}

void emu_mkey_remove(struct emu_mkey *m)
{
	if (m->dev)
		table_remove(&m->dev->mkeys, m->dev->mkeys_size, m->key >> 8, m);
}

struct emu_mkey *emu_mkey_find(struct emu_device *dev, uint32_t key)
{
	struct emu_mkey *m = key >> 8 < dev->mkeys_size ? dev->mkeys[key >> 8] : NULL;

	return m && m->key == key ? m : NULL;
}

static bool translate(const struct nic_access *, uint32_t key, uint64_t addr, uint64_t len, struct nic_sgl *, int depth);

/* Below an indirect key its own rights have been checked; the keys it names must let their owner do the access. */
static struct nic_access inner_access(const struct nic_access *a)
{
	struct nic_access inner = *a;

	inner.remote = false;
	inner.rights = a->rights & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_LOCAL_WRITE)
			       ? IBV_ACCESS_LOCAL_WRITE
			       : 0;
	return inner;
}

static bool translate_list(const struct nic_access *a, const struct emu_mkey *m, uint64_t off, uint64_t len,
			   struct nic_sgl *sgl, int depth)
{
	for (uint32_t i = 0; i < m->nklm && len; i++) {
		const struct emu_klm *k = &m->klm[i];
		uint64_t n;

		if (off >= k->len) {
			off -= k->len;
			continue;
		}
		n = k->len - off < len ? k->len - off : len;
		if (!translate(a, k->key, k->addr + off, n, sgl, depth + 1))
			return false;
		len -= n;
		off = 0;
	}
	return !len;
}

static bool translate_strided(const struct nic_access *a, const struct emu_mkey *m, uint64_t off, uint64_t len,
			      struct nic_sgl *sgl, int depth)
{
	if (!m->repeat_bytes)
		return false;
	for (uint64_t round = off / m->repeat_bytes; len && round < m->repeat; round++) {
		uint64_t before = len;

		off %= m->repeat_bytes;
		for (uint32_t i = 0; i < m->nklm && len; i++) {
			const struct emu_klm *k = &m->klm[i];
			uint64_t n;

			if (off >= k->len) {
				off -= k->len;
				continue;
			}
			n = k->len - off < len ? k->len - off : len;
			if (!translate(a, k->key, k->addr + round * k->stride + off, n, sgl, depth + 1))
				return false;
			len -= n;
			off = 0;
		}
		/* Entries shorter than they are said to be in all, perhaps empty: four billion rounds lead nowhere. */
		if (len == before)
			return false;
	}
	return !len;
}

static bool translate(const struct nic_access *a, uint32_t key, uint64_t addr, uint64_t len, struct nic_sgl *sgl,
		      int depth)
{
	const struct emu_mkey *m = emu_mkey_find(a->dev, key);
	uint64_t off;

	if (!m || m->free || m->pdn != a->pdn || (a->rights & ~m->access))
		return false;
	off = addr - m->iova;
	if (addr < m->iova || off > m->len || len > m->len - off)
		return false;
	if (m->o.type == EMU_MW) {
		/* A window has no lkey; one of type 2 serves the QP that bound it: IBTA 10.6.7.2. */
		if (!a->remote || (m->bound_qpn && m->bound_qpn != a->qpn))
			return false;
	}
	if (likely(m->direct))
		return !sgl || sgl_add(sgl, (uint8_t *)(uintptr_t)(m->host + off), len);
	/* What it names is looked up for the slice that moves, as in the whole of a long message there may be millions of
	 * small pieces. */
	if (!sgl)
		return true;
	if (depth >= EMU_MAX_INDIRECTION)
		return false;

	struct nic_access inner = inner_access(a);

	return m->strided ? translate_strided(&inner, m, off, len, sgl, depth)
			  : translate_list(&inner, m, off, len, sgl, depth);
}

bool mkey_translate(const struct nic_access *a, uint32_t key, uint64_t addr, uint64_t len, struct nic_sgl *sgl)
{
	return translate(a, key, addr, len, sgl, 0);
}

bool segs_translate(const struct nic_access *a, const struct nic_seg *seg, uint32_t n, uint64_t off, uint64_t len,
		    struct nic_sgl *sgl)
{
	for (uint32_t i = 0; i < n && len; i++, seg++) {
		uint64_t part;

		if (off >= seg->len) {
			off -= seg->len;
			continue;
		}
		part = seg->len - off < len ? seg->len - off : len;
		if (seg->inl) {
			/* Inline data is the WQE's own: it can be sent, not written to. */
			if (a->rights || !sgl_add(sgl, (uint8_t *)(uintptr_t)(seg->addr + off), part))
				return false;
		} else if (!translate(a, seg->key, seg->addr + off, part, sgl, 0)) {
			return false;
		}
		len -= part;
		off = 0;
	}
	return !len;
}

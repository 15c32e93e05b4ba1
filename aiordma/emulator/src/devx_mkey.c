/* SPDX-License-Identifier: MIT
 * DEVX: memory keys. mlx5dv_create_mkey() is CREATE_MKEY of an indirect key: a list of KLM entries (address, length, key),
 * empty until a UMR work request fills it (umr.c). A key of the MTT kind maps one registered piece of memory, a UMEM.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "devx.h"

#define ANY_QPN 0xffffffu

static uint32_t access_of(const uint8_t *mkc)
{
	return (uint32_t)((prm_get(mkc, MKC_LW) ? IBV_ACCESS_LOCAL_WRITE : 0) |
			  (prm_get(mkc, MKC_RW) ? IBV_ACCESS_REMOTE_WRITE : 0) |
			  (prm_get(mkc, MKC_RR) ? IBV_ACCESS_REMOTE_READ : 0) |
			  (prm_get(mkc, MKC_A) ? IBV_ACCESS_REMOTE_ATOMIC : 0));
}

static uint8_t mode_of(const uint8_t *mkc)
{
	return (uint8_t)(prm_get(mkc, MKC_ACCESS_MODE_4_2) << 2 | prm_get(mkc, MKC_ACCESS_MODE_1_0));
}

/* A list that comes with the command, as many entries as it says. */
static uint8_t take_klms(struct devx_call *c, struct emu_mkey *m)
{
	uint32_t n = (uint32_t)prm_get(c->in, CREATE_MKEY_IN_TRANSLATIONS_ACTUAL);
	const uint8_t *klm = c->in + CREATE_MKEY_IN_KLM_AT;

	if (!n)
		return STAT_OK;
	if (n > m->max_klm || (uint64_t)n * KLM_BYTES > c->inlen - CREATE_MKEY_IN_KLM_AT)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_KEY_SIZE, "more entries than the key or the command has room for");
	m->klm = calloc(n, sizeof(*m->klm));
	if (!m->klm)
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	m->cap_klm = m->nklm = n;
	for (uint32_t i = 0; i < n; i++, klm += KLM_BYTES) {
		m->klm[i].addr = prm_get(klm, KLM_ADDRESS);
		m->klm[i].len = prm_get(klm, KLM_BYTE_COUNT);
		m->klm[i].key = (uint32_t)prm_get(klm, KLM_KEY);
		if (!m->klm[i].len)
			m->klm[i].len = 1ull << 31; /* as in a UMR's list: mlx5dv.h */
	}
	return STAT_OK;
}

static uint8_t indirect(struct devx_call *c, struct emu_mkey *m, const uint8_t *mkc)
{
	uint64_t entries = prm_get(mkc, MKC_TRANSLATIONS);

	m->umr_en = prm_get(mkc, MKC_UMR_EN);
	if (m->umr_en && !c->ctx->dev->limits.umr)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_NO_UMR, "the device has no UMR");
	if (!entries || entries > DEVX_MAX_KLM)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_KEY_SIZE, "a list of that many entries");
	m->max_klm = (uint32_t)entries;
	return take_klms(c, m);
}

static uint8_t direct(struct devx_call *c, struct emu_mkey *m)
{
	uint64_t offset = prm_get(c->in, CREATE_MKEY_IN_UMEM_OFFSET);
	struct emu_umem *u = devx_umem(c->ctx, (uint32_t)prm_get(c->in, CREATE_MKEY_IN_UMEM_ID));

	if (!u)
		return devx_refuse(c, STAT_BAD_RES, SYN_NO_SUCH_UMEM, "no such UMEM");
	if (offset > u->len || m->len > u->len - offset)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_UMEM_TOO_SMALL, "the UMEM is too small");
	if (m->access & ~(uint32_t)IBV_ACCESS_REMOTE_READ && !u->writable)
		return devx_refuse(c, STAT_BAD_PARAM, SYN_UMEM_TOO_SMALL, "the UMEM can't be written to");
	m->direct = true;
	m->host = u->addr + offset;
	m->umem = &u->o;
	u->o.usecnt++;
	return STAT_OK;
}

static uint8_t fill(struct devx_call *c, struct emu_mkey *m)
{
	const uint8_t *mkc = c->in + CREATE_MKEY_IN_MKC_AT;
	uint32_t qpn = (uint32_t)prm_get(mkc, MKC_QPN);

	m->pd = devx_pd(c->ctx, (uint32_t)prm_get(mkc, MKC_PD));
	if (!m->pd)
		return devx_refuse(c, STAT_BAD_RES, SYN_NO_SUCH_PD, "no such protection domain");
	m->pd->o.usecnt++;
	m->pdn = m->pd->pdn;
	if (prm_get(mkc, MKC_BSF_EN) || prm_get(mkc, MKC_CRYPTO_EN))
		return devx_refuse(c, STAT_BAD_PARAM, SYN_NO_SIGNATURE, "no signature or crypto offload");
	m->free = prm_get(mkc, MKC_FREE);
	m->access = access_of(mkc);
	m->bound_qpn = qpn == ANY_QPN ? 0 : qpn;
	m->key = (uint32_t)prm_get(mkc, MKC_MKEY_7_0);
	m->remote_invalidate = prm_get(mkc, MKC_EN_RINVAL);
	m->iova = prm_get(mkc, MKC_START_ADDR);
	m->len = prm_get(mkc, MKC_LENGTH64) ? UINT64_MAX : prm_get(mkc, MKC_LEN);
	switch (mode_of(mkc)) {
	case MKC_MODE_KLMS:
		return indirect(c, m, mkc);
	case MKC_MODE_MTT:
		return direct(c, m);
	default:
		return devx_refuse(c, STAT_BAD_PARAM, SYN_ACCESS_MODE, "only keys of lists (KLM) and of memory (MTT)");
	}
}

static uint8_t create_mkey(struct devx_call *c)
{
	struct emu_mkey *m = emu_object_alloc(c->ctx, EMU_DEVX_MKEY, sizeof(*m));
	uint8_t status;

	if (!m)
		return devx_refuse(c, STAT_NO_RES, SYN_NO_MEMORY, "no memory");
	status = fill(c, m);
	if (!status && emu_mkey_insert(c->ctx->dev, m))
		status = devx_refuse(c, STAT_LIM, SYN_LIMIT, "no more keys");
	if (status) {
		emu_object_destroy(&m->o);
		return status;
	}
	prm_set(c->out, CMD_NUMBER, m->key >> 8);
	c->created = &m->o;
	return STAT_OK;
}

static uint8_t query_mkey(struct devx_call *c)
{
	const struct emu_mkey *m = (const struct emu_mkey *)c->target;
	uint8_t *mkc = c->out + QUERY_MKEY_OUT_MKC_AT;

	prm_set(mkc, MKC_FREE, m->free);
	prm_set(mkc, MKC_UMR_EN, m->umr_en);
	prm_set(mkc, MKC_A, !!(m->access & IBV_ACCESS_REMOTE_ATOMIC));
	prm_set(mkc, MKC_RW, !!(m->access & IBV_ACCESS_REMOTE_WRITE));
	prm_set(mkc, MKC_RR, !!(m->access & IBV_ACCESS_REMOTE_READ));
	prm_set(mkc, MKC_LW, !!(m->access & IBV_ACCESS_LOCAL_WRITE));
	prm_set(mkc, MKC_LR, 1);
	prm_set(mkc, MKC_ACCESS_MODE_1_0, m->direct ? MKC_MODE_MTT : MKC_MODE_KLMS);
	prm_set(mkc, MKC_QPN, m->bound_qpn ? m->bound_qpn : ANY_QPN);
	prm_set(mkc, MKC_MKEY_7_0, m->key);
	prm_set(mkc, MKC_EN_RINVAL, m->remote_invalidate);
	prm_set(mkc, MKC_PD, m->pdn);
	prm_set(mkc, MKC_START_ADDR, m->iova);
	prm_set(mkc, MKC_LENGTH64, m->len == UINT64_MAX);
	prm_set(mkc, MKC_LEN, m->len == UINT64_MAX ? 0 : m->len);
	prm_set(mkc, MKC_TRANSLATIONS, m->max_klm);
	return STAT_OK;
}

static const struct devx_command commands[] = {
	{ OP_CREATE_MKEY, DEVX_CREATE, 272, CMD_HEADER, 0, create_mkey, "CREATE_MKEY" },
	{ OP_QUERY_MKEY, DEVX_QUERY, CMD_HEADER, 304, OP_CREATE_MKEY, query_mkey, "QUERY_MKEY" },
};

const struct devx_commands devx_mkey_commands = { commands, ARRAY_LEN(commands) };

/* SPDX-License-Identifier: MIT
 * Memory regions and memory windows.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <unistd.h>

#include "control.h"

/* IB_ACCESS_SUPPORTED in include/rdma/ib_verbs.h: everything up to HUGETLB, and the optional range. */
#define ACCESS_KNOWN (((uint32_t)IBV_ACCESS_HUGETLB << 1) - 1)
#define ACCESS_SUPPORTED (ACCESS_KNOWN | (uint32_t)IB_UVERBS_ACCESS_OPTIONAL_RANGE)
#define ACCESS_WRITABLE \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND)

/* ib_check_mr_access() */
static int check_access(uint32_t access)
{
	if (access & (IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_WRITE) && !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	if (access & ~ACCESS_SUPPORTED)
		return EINVAL;
	if (access & IBV_ACCESS_ON_DEMAND)
		return EOPNOTSUPP; /* no on-demand paging is advertised */
	return 0;
}

/* Page offsets of the memory and of the address the key goes by must agree: ib_uverbs_reg_mr() */
static bool offsets_agree(uint64_t start, uint64_t iova)
{
	return !((start ^ iova) & ((uint64_t)sysconf(_SC_PAGESIZE) - 1));
}

static void fill_mkey(struct emu_mkey *m, uint64_t start, uint64_t length, uint64_t iova)
{
	m->host = start;
	m->len = length;
	/* ibv_reg_mr(3): the first byte is at 0 then */
	m->iova = m->access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
}

static int reg_mr(struct emu_cmd *c)
{
	struct emu_device *d = c->ctx->dev;
	struct ib_uverbs_reg_mr req;
	struct ib_uverbs_reg_mr_resp resp = { 0 };
	struct emu_mkey *m;
	struct emu_pd *pd;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (!offsets_agree(req.start, req.hca_va))
		return EINVAL;
	err = check_access(req.access_flags);
	if (err)
		return err;
	pd = emu_object_get(c->ctx, EMU_PD, req.pd_handle);
	if (!pd || req.length > d->limits.max_mr_size)
		return EINVAL;
	m = emu_object_alloc(c->ctx, EMU_MR, sizeof(*m));
	if (!m)
		return ENOMEM;
	m->dev = d;
	m->direct = true;
	m->pd = pd;
	m->pdn = pd->pdn;
	m->access = req.access_flags & ACCESS_KNOWN;
	fill_mkey(m, req.start, req.length, req.hca_va);
	err = umem_get(req.start, req.length, req.access_flags & ACCESS_WRITABLE, &m->pinned);
	if (!err)
		err = emu_limit(c->ctx, EMU_MR, d->limits.max_mr);
	if (!err)
		err = emu_mkey_insert(d, m);
	if (err) {
		umem_release(m->pinned);
		emu_object_free(&m->o);
		return err;
	}
	c->ctx->pinned += m->pinned;
	pd->o.usecnt++;
	err = emu_object_publish(&m->o);
	if (!err) {
		resp.mr_handle = m->o.handle;
		resp.lkey = resp.rkey = m->key;
		err = cmd_response(c, &resp, sizeof(resp));
	}
	if (err)
		emu_object_destroy(&m->o);
	return err;
}

/* New memory first, so that a failure leaves the old registration whole. */
static int change_translation(struct emu_mkey *m, const struct ib_uverbs_rereg_mr *req, uint32_t access)
{
	uint64_t pages;
	int err;

	if (req->length > m->dev->limits.max_mr_size)
		return EINVAL;
	err = umem_get(req->start, req->length, access & ACCESS_WRITABLE, &pages);
	if (err)
		return err;
	umem_release(m->pinned);
	m->o.ctx->pinned += pages - m->pinned;
	m->pinned = pages;
	return 0;
}

/* Access that needs writable memory where the old one didn't: mlx5_ib_rereg_user_mr() pins the memory anew then. */
static int change_access(struct emu_mkey *m, uint32_t access)
{
	uint64_t pages;
	int err;

	if (!(access & ACCESS_WRITABLE) || m->access & ACCESS_WRITABLE)
		return 0;
	err = umem_get(m->host, m->len, true, &pages);
	if (!err)
		umem_release(pages);
	return err;
}

static int rereg_mr(struct emu_cmd *c)
{
	struct ib_uverbs_rereg_mr req;
	struct ib_uverbs_rereg_mr_resp resp = { 0 };
	struct emu_pd *pd = NULL;
	struct emu_mkey *m;
	uint32_t access;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (!req.flags)
		return EINVAL;
	if (req.flags & ~(uint32_t)IBV_REREG_MR_FLAGS_SUPPORTED)
		return EOPNOTSUPP;
	if (req.flags & IBV_REREG_MR_CHANGE_TRANSLATION && !offsets_agree(req.start, req.hca_va))
		return EINVAL;
	/* A handle that isn't there is ENOENT here: the kernel looks this one up as for a destruction. */
	if (req.mr_handle >= c->ctx->nhandles || !c->ctx->handles[req.mr_handle])
		return ENOENT;
	m = emu_object_get(c->ctx, EMU_MR, req.mr_handle);
	if (!m)
		return EINVAL;
	if (req.flags & IBV_REREG_MR_CHANGE_ACCESS) {
		err = check_access(req.access_flags);
		if (err)
			return err;
	}
	access = req.flags & IBV_REREG_MR_CHANGE_ACCESS ? req.access_flags & ACCESS_KNOWN : m->access;
	if (req.flags & IBV_REREG_MR_CHANGE_PD) {
		pd = emu_object_get(c->ctx, EMU_PD, req.pd_handle);
		if (!pd)
			return EINVAL;
	}
	err = req.flags & IBV_REREG_MR_CHANGE_TRANSLATION ? change_translation(m, &req, access) :
							     change_access(m, access);
	if (err)
		return err;
	m->access = access;
	if (req.flags & IBV_REREG_MR_CHANGE_TRANSLATION)
		fill_mkey(m, req.start, req.length, req.hca_va);
	if (pd) {
		m->pd->o.usecnt--;
		pd->o.usecnt++;
		m->pd = pd;
		m->pdn = pd->pdn;
	}
	resp.lkey = resp.rkey = m->key;
	return cmd_response(c, &resp, sizeof(resp));
}

static int dereg_mr_write(struct emu_cmd *c)
{
	struct ib_uverbs_dereg_mr req;
	struct emu_object *mr;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_MR, req.mr_handle, &mr);
	if (!err)
		emu_object_destroy(mr);
	return err;
}

static int dereg_mr(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, UVERBS_ATTR_DESTROY_MR_HANDLE));
	return 0;
}

/* For ibv_import_mr(). */
static int query_mr(struct emu_ioctl_call *call)
{
	const struct emu_mkey *m = attr_object(call, UVERBS_ATTR_QUERY_MR_HANDLE);
	int err = attr_out(call, UVERBS_ATTR_QUERY_MR_RESP_LKEY, &m->key, sizeof(m->key));

	if (!err)
		err = attr_out(call, UVERBS_ATTR_QUERY_MR_RESP_RKEY, &m->key, sizeof(m->key));
	if (!err)
		err = attr_out(call, UVERBS_ATTR_QUERY_MR_RESP_LENGTH, &m->len, sizeof(m->len));
	if (!err)
		err = attr_out(call, UVERBS_ATTR_QUERY_MR_RESP_IOVA, &m->iova, sizeof(m->iova));
	return err;
}

/* ---------------------------------------------------------------- memory windows */

static int alloc_mw(struct emu_cmd *c)
{
	struct emu_device *d = c->ctx->dev;
	struct ib_uverbs_alloc_mw req;
	struct ib_uverbs_alloc_mw_resp resp = { 0 };
	struct mlx5_ib_alloc_mw uhw;
	struct emu_mkey *m;
	struct emu_pd *pd;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	pd = emu_object_get(c->ctx, EMU_PD, req.pd_handle);
	if (!pd || (req.mw_type != IBV_MW_TYPE_1 && req.mw_type != IBV_MW_TYPE_2))
		return EINVAL;
	err = cmd_uhw_request(c, &uhw, 0, sizeof(uhw)); /* mlx5_ib_alloc_mw() */
	if (!err && (uhw.comp_mask || uhw.reserved1 || uhw.reserved2))
		err = EOPNOTSUPP;
	if (!err)
		err = emu_limit(c->ctx, EMU_MW, d->limits.max_mw);
	if (err)
		return err;
	m = emu_object_alloc(c->ctx, EMU_MW, sizeof(*m));
	if (!m)
		return ENOMEM;
	m->dev = d;
	m->free = true; /* nothing to reach through it until it is bound */
	m->pd = pd;
	m->pdn = pd->pdn;
	m->mw_type = req.mw_type;
	m->max_klm = MAX(uhw.num_klms, 1);
	err = emu_mkey_insert(d, m);
	if (err) {
		emu_object_free(&m->o);
		return err;
	}
	pd->o.usecnt++;
	err = emu_object_publish(&m->o);
	if (!err) {
		resp.mw_handle = m->o.handle;
		resp.rkey = m->key;
		err = cmd_response(c, &resp, sizeof(resp));
	}
	if (err)
		emu_object_destroy(&m->o);
	return err;
}

static int dealloc_mw_write(struct emu_cmd *c)
{
	struct ib_uverbs_dealloc_mw req;
	struct emu_object *mw;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_MW, req.mw_handle, &mw);
	if (!err)
		emu_object_destroy(mw);
	return err;
}

static int dealloc_mw(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, UVERBS_ATTR_DESTROY_MW_HANDLE));
	return 0;
}

/* ---------------------------------------------------------------- tables */

static const struct emu_attr_spec destroy_mr_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_MR_HANDLE, ATTR_IDR_DESTROY, EMU_MR, true),
};
static const struct emu_attr_spec query_mr_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_QUERY_MR_HANDLE, ATTR_IDR, EMU_MR, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_QUERY_MR_RESP_LKEY, uint32_t, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_QUERY_MR_RESP_RKEY, uint32_t, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_QUERY_MR_RESP_LENGTH, uint64_t, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_QUERY_MR_RESP_IOVA, uint64_t, false),
};
static const struct emu_attr_spec destroy_mw_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_MW_HANDLE, ATTR_IDR_DESTROY, EMU_MW, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY, destroy_mr_attrs, dereg_mr),
	IOCTL_METHOD(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR, query_mr_attrs, query_mr),
	IOCTL_METHOD(UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY, destroy_mw_attrs, dealloc_mw),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_REG_MR, false, true, true, sizeof(struct ib_uverbs_reg_mr), sizeof(struct ib_uverbs_reg_mr_resp),
	  reg_mr, "REG_MR" },
	{ IB_USER_VERBS_CMD_REREG_MR, false, true, true, sizeof(struct ib_uverbs_rereg_mr),
	  sizeof(struct ib_uverbs_rereg_mr_resp), rereg_mr, "REREG_MR" },
	{ IB_USER_VERBS_CMD_DEREG_MR, false, false, false, sizeof(struct ib_uverbs_dereg_mr), 0, dereg_mr_write, "DEREG_MR" },
	{ IB_USER_VERBS_CMD_ALLOC_MW, false, true, true, sizeof(struct ib_uverbs_alloc_mw),
	  sizeof(struct ib_uverbs_alloc_mw_resp), alloc_mw, "ALLOC_MW" },
	{ IB_USER_VERBS_CMD_DEALLOC_MW, false, false, false, sizeof(struct ib_uverbs_dealloc_mw), 0, dealloc_mw_write,
	  "DEALLOC_MW" },
};

const struct emu_methods emu_mr_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

/* SPDX-License-Identifier: MIT
 * Protection domains. Parent and thread domains are libmlx5's own and never come here.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "control.h"

static int alloc_pd(struct emu_cmd *c)
{
	struct ib_uverbs_alloc_pd req;
	struct ib_uverbs_alloc_pd_resp resp = { 0 };
	struct mlx5_ib_alloc_pd_resp uhw = { 0 };
	struct emu_pd *pd;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_limit(c->ctx, EMU_PD, c->ctx->dev->limits.max_pd);
	if (err)
		return err;
	pd = emu_object_alloc(c->ctx, EMU_PD, sizeof(*pd));
	if (!pd)
		return ENOMEM;
	/* 0 is never one: the data half may use it for "no protection domain". */
	pd->pdn = ++c->ctx->dev->next_pdn;
	err = emu_object_publish(&pd->o);
	if (!err) {
		uhw.pdn = pd->pdn;
		err = cmd_uhw_response(c, &uhw, sizeof(uhw));
	}
	if (!err) {
		resp.pd_handle = pd->o.handle;
		err = cmd_response(c, &resp, sizeof(resp));
	}
	if (err)
		emu_object_free(&pd->o);
	return err;
}

static int dealloc_pd_write(struct emu_cmd *c)
{
	struct ib_uverbs_dealloc_pd req;
	struct emu_object *pd;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_PD, req.pd_handle, &pd);
	if (!err)
		emu_object_destroy(pd);
	return err;
}

static int dealloc_pd(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, UVERBS_ATTR_DESTROY_PD_HANDLE));
	return 0;
}

/* For ibv_import_pd(). */
static int query_pd(struct emu_ioctl_call *call)
{
	const struct emu_pd *pd = attr_object(call, MLX5_IB_ATTR_QUERY_PD_HANDLE);

	return attr_out(call, MLX5_IB_ATTR_QUERY_PD_RESP_PDN, &pd->pdn, sizeof(pd->pdn));
}

static const struct emu_attr_spec query_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_QUERY_PD_HANDLE, ATTR_IDR, EMU_PD, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_QUERY_PD_RESP_PDN, uint32_t, true),
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_PD_HANDLE, ATTR_IDR_DESTROY, EMU_PD, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY, destroy_attrs, dealloc_pd),
	IOCTL_METHOD(UVERBS_OBJECT_PD, MLX5_IB_METHOD_PD_QUERY, query_attrs, query_pd),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_ALLOC_PD, false, true, true, sizeof(struct ib_uverbs_alloc_pd),
	  sizeof(struct ib_uverbs_alloc_pd_resp), alloc_pd, "ALLOC_PD" },
	{ IB_USER_VERBS_CMD_DEALLOC_PD, false, false, false, sizeof(struct ib_uverbs_dealloc_pd), 0, dealloc_pd_write,
	  "DEALLOC_PD" },
};

const struct emu_methods emu_pd_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

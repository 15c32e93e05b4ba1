/* SPDX-License-Identifier: MIT
 * Packet pacing: the device's table of rate limits, mlx5dv_pp_alloc(3). Entries are kept; no send queue uses them, since
 * the kind that would, for raw packets, isn't there.
 *
 * mlx5/qos.c of the kernel, and the table of mlx5/core/rl.c, whose first entry means no limit.
 */
#define _GNU_SOURCE

#include "pp.h"
#include "devx_prm.h"

#define CONTEXT_SIZE 48 /* set_pp_rate_limit_context of mlx5_ifc.h */
#define RATE_LIMIT F(0x00, 32)

struct emu_pp {
	struct emu_object o; /* EMU_PP */
	uint16_t index;
};

static struct entry {
	uint8_t context[CONTEXT_SIZE];
	uint32_t users;
	bool dedicated;
} tables[EMU_MAX_DEVICES][EMU_PP_TABLE_SIZE];

/* find_rl_entry() */
static struct entry *find(struct entry *table, const uint8_t *context, bool dedicated)
{
	struct entry *empty = NULL;

	for (uint32_t i = 1; i < EMU_PP_TABLE_SIZE; i++) {
		struct entry *e = &table[i];

		if (!e->users)
			empty = empty ? empty : e;
		else if (!dedicated && !e->dedicated && !memcmp(e->context, context, CONTEXT_SIZE))
			return e;
	}
	return empty;
}

/* mlx5_rl_add_rate_raw() */
static int add_rate(struct emu_device *d, const uint8_t *context, bool dedicated, uint16_t *index)
{
	uint64_t rate = prm_get(context, RATE_LIMIT);
	struct entry *e;

	if (rate < EMU_PP_MIN_RATE || rate > EMU_PP_MAX_RATE)
		return EINVAL;
	e = find(tables[d->index], context, dedicated);
	if (!e)
		return ENOSPC;
	memcpy(e->context, context, CONTEXT_SIZE);
	e->dedicated = dedicated;
	e->users++;
	*index = (uint16_t)(e - tables[d->index]);
	return 0;
}

void emu_pp_retire(struct emu_object *o)
{
	tables[o->ctx->dev->index][((struct emu_pp *)o)->index].users--;
}

void emu_pp_forked(void)
{
	memset(tables, 0, sizeof(tables));
}

static int pp_alloc(struct emu_ioctl_call *call)
{
	uint64_t flags = attr_in_value(call, MLX5_IB_ATTR_PP_OBJ_ALLOC_FLAGS);
	uint8_t context[CONTEXT_SIZE];
	struct emu_pp *pp;
	int err;

	if (!call->cmd.ctx->devx || flags & ~(uint64_t)MLX5_IB_UAPI_PP_ALLOC_FLAGS_DEDICATED_INDEX)
		return EINVAL;
	err = attr_in(call, MLX5_IB_ATTR_PP_OBJ_ALLOC_CTX, context, sizeof(context));
	if (err)
		return err;
	pp = emu_object_alloc(call->cmd.ctx, EMU_PP, sizeof(*pp));
	if (!pp)
		return ENOMEM;
	err = add_rate(call->cmd.ctx->dev, context, flags, &pp->index);
	if (err) {
		emu_object_free(&pp->o);
		return err;
	}
	err = emu_object_publish(&pp->o);
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_PP_OBJ_ALLOC_INDEX, &pp->index, sizeof(pp->index));
	if (!err)
		err = attr_out_id(call, MLX5_IB_ATTR_PP_OBJ_ALLOC_HANDLE, pp->o.handle);
	if (err)
		emu_object_destroy(&pp->o);
	return err;
}

static int pp_destroy(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, MLX5_IB_ATTR_PP_OBJ_DESTROY_HANDLE));
	return 0;
}

static const struct emu_attr_spec alloc_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_PP_OBJ_ALLOC_HANDLE, ATTR_IDR_NEW, EMU_PP, true),
	{ .id = MLX5_IB_ATTR_PP_OBJ_ALLOC_CTX, .kind = ATTR_IN, .mandatory = true, .min = 1, .max = CONTEXT_SIZE },
	ATTR_FLAGS_IN(MLX5_IB_ATTR_PP_OBJ_ALLOC_FLAGS, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_PP_OBJ_ALLOC_INDEX, uint16_t, true),
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_PP_OBJ_DESTROY_HANDLE, ATTR_IDR_DESTROY, EMU_PP, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(MLX5_IB_OBJECT_PP, MLX5_IB_METHOD_PP_OBJ_ALLOC, alloc_attrs, pp_alloc),
	IOCTL_METHOD(MLX5_IB_OBJECT_PP, MLX5_IB_METHOD_PP_OBJ_DESTROY, destroy_attrs, pp_destroy),
};

const struct emu_methods emu_pp_methods = { NULL, 0, ioctl_methods, ARRAY_LEN(ioctl_methods) };

/* SPDX-License-Identifier: MIT
 * Virtio access regions: pages of doorbells of virtio queues, mlx5dv_alloc_var(3). There are no such queues here, so that
 * nothing happens when one is written to.
 *
 * UVERBS_HANDLER(MLX5_IB_METHOD_VAR_OBJ_ALLOC) in mlx5/main.c
 */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "var.h"

struct emu_var {
	struct emu_object o; /* EMU_VAR */
	uint32_t page_id;
};

bool emu_var_known(const struct emu_ucontext *ctx, uint32_t page_id)
{
	for (uint32_t h = 0; h < ctx->nhandles; h++) {
		const struct emu_var *v = (const struct emu_var *)ctx->handles[h];

		if (v && v->o.type == EMU_VAR && v->page_id == page_id)
			return true;
	}
	return false;
}

void *emu_var_mmap(void *addr)
{
	return emu_real.mmap(addr, EMU_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static int var_alloc(struct emu_ioctl_call *call)
{
	struct emu_var *v = emu_object_alloc(call->cmd.ctx, EMU_VAR, sizeof(*v));
	uint32_t length = EMU_PAGE;
	uint64_t offset;
	int err;

	if (!v)
		return ENOMEM;
	v->page_id = ++call->cmd.ctx->dev->next_uar; /* one series of numbers for all pages of doorbells */
	offset = emu_page_offset(v->page_id);
	err = emu_object_publish(&v->o);
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET, &offset, sizeof(offset));
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH, &length, sizeof(length));
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID, &v->page_id, sizeof(v->page_id));
	if (!err)
		err = attr_out_id(call, MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE, v->o.handle);
	if (err)
		emu_object_destroy(&v->o);
	return err;
}

static int var_destroy(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE));
	return 0;
}

static const struct emu_attr_spec alloc_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE, ATTR_IDR_NEW, EMU_VAR, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET, uint64_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH, uint32_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID, uint32_t, true),
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE, ATTR_IDR_DESTROY, EMU_VAR, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(MLX5_IB_OBJECT_VAR, MLX5_IB_METHOD_VAR_OBJ_ALLOC, alloc_attrs, var_alloc),
	IOCTL_METHOD(MLX5_IB_OBJECT_VAR, MLX5_IB_METHOD_VAR_OBJ_DESTROY, destroy_attrs, var_destroy),
};

const struct emu_methods emu_var_methods = { NULL, 0, ioctl_methods, ARRAY_LEN(ioctl_methods) };

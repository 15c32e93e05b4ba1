/* SPDX-License-Identifier: MIT
 * Device memory (MEMIC): a little memory inside the device, which the application maps, registers and lets peers reach.
 *
 * What the kernel does is in mlx5/dm.c, where every piece takes whole pages of the device's memory. Behind it lies one
 * shared mapping for each device, of which the application gets further views.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "control.h"
#include "dm.h"

#define MEMIC_BASE_SIZE 64u /* MLX5_MEMIC_BASE_SIZE: sizes are multiples of it */
#define MEMIC_BASE_ALIGN 6  /* MLX5_MEMIC_BASE_ALIGN: log of the least alignment */
#define MAX_PAGES 256

/* The index that the library maps by: the first page, above it one more than the operation. */
#define OP_INDEX(op) (((op) + 1u) << 8)

struct emu_dm {
	struct emu_object o; /* EMU_DM */
	uint64_t length;     /* as asked for */
	uint32_t first, npages;
	uint32_t ops; /* a bit for each operation that has an address */
};

/* The pages, then who has each of them: struct emu_ucontext.tag, or 0. All of it is shared with fork() children, which may
 * use the contexts that they inherited. */
static struct memic {
	uint8_t *base;
	uint64_t *owners;
} memics[EMU_MAX_DEVICES];

static uint32_t pages_of(uint64_t length)
{
	return (uint32_t)((length + EMU_PAGE - 1) / EMU_PAGE);
}

uint64_t emu_dm_bar_size(const struct emu_device *d)
{
	return MIN(2ull * pages_of(d->limits.max_dm_size), MAX_PAGES) * EMU_PAGE;
}

uint32_t emu_dm_operations(void)
{
	return emu_mmio_supported() ? 1u << EMU_DM_INCREMENT | 1u << EMU_DM_TEST_AND_SET : 0;
}

/* ---------------------------------------------------------------- pages */

static int open_memic(const struct emu_device *d, struct memic **out)
{
	struct memic *m = &memics[d->index];
	void *base;

	*out = m;
	if (m->base)
		return 0;
	base = emu_real.mmap(NULL, MAX_PAGES * (EMU_PAGE + sizeof(uint64_t)), PROT_READ | PROT_WRITE,
			     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (base == MAP_FAILED)
		return ENOMEM;
	m->base = base;
	m->owners = (uint64_t *)(m->base + MAX_PAGES * EMU_PAGE);
	return 0;
}

/* An address of an operation keeps its memory, even if that was freed: mlx5_ib_dm_mmap_free(). */
static bool take_page(struct memic *m, uint32_t page, uint64_t tag)
{
	uint64_t nobody = 0;

	return !emu_mmio_in_use(m->base + page * EMU_PAGE, EMU_PAGE) &&
	       __atomic_compare_exchange_n(&m->owners[page], &nobody, tag, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static void give_pages(struct memic *m, uint32_t first, uint32_t n)
{
	for (uint32_t i = first; i < first + n; i++)
		__atomic_store_n(&m->owners[i], 0, __ATOMIC_RELEASE);
}

static int take_pages(const struct emu_ucontext *ctx, struct emu_dm *dm)
{
	uint32_t total = (uint32_t)(emu_dm_bar_size(ctx->dev) / EMU_PAGE), run = 0;
	struct memic *m;
	int err = open_memic(ctx->dev, &m);

	for (uint32_t i = 0; !err && i < total; i++) {
		if (!take_page(m, i, ctx->tag)) {
			give_pages(m, i - run, run);
			run = 0;
			continue;
		}
		if (++run < dm->npages)
			continue;
		dm->first = i + 1 - run;
		memset(m->base + dm->first * EMU_PAGE, 0, run * EMU_PAGE);
		return 0;
	}
	if (!err)
		give_pages(m, total - run, run);
	return ENOMEM;
}

static uint8_t *memory_of(const struct emu_dm *dm)
{
	return memics[dm->o.ctx->dev->index].base + dm->first * EMU_PAGE;
}

void emu_dm_retire(struct emu_object *o)
{
	struct emu_dm *dm = (struct emu_dm *)o;

	give_pages(&memics[o->ctx->dev->index], dm->first, dm->npages);
}

void emu_dm_release(const struct emu_ucontext *ctx)
{
	struct memic *m = &memics[ctx->dev->index];

	for (uint32_t i = 0; m->base && i < MAX_PAGES; i++)
		if (__atomic_load_n(&m->owners[i], __ATOMIC_ACQUIRE) == ctx->tag)
			give_pages(m, i, 1);
}

/* ---------------------------------------------------------------- mappings */

/* rdma_user_mmap_entry_get(): the whole of it or nothing. */
static const struct emu_dm *find_by_index(const struct emu_ucontext *ctx, uint32_t index, size_t len)
{
	for (uint32_t h = 0; h < ctx->nhandles; h++) {
		const struct emu_dm *dm = (const struct emu_dm *)ctx->handles[h];

		if (dm && dm->o.type == EMU_DM && dm->first == (index & 0xff))
			return len == (size_t)dm->npages * EMU_PAGE ? dm : NULL;
	}
	return NULL;
}

void *emu_dm_mmap(struct emu_ucontext *ctx, uint32_t index, size_t len)
{
	const struct emu_dm *dm = find_by_index(ctx, index, len);
	uint32_t op = (index >> 8) - 1;

	if (!dm || (index >> 8 && (op >= 32 || !(dm->ops >> op & 1)))) {
		errno = EINVAL;
		return MAP_FAILED;
	}
	if (index >> 8)
		return emu_mmio_map(ctx, NULL, len, 0, op == EMU_DM_INCREMENT ? EMU_MMIO_INCREMENT : EMU_MMIO_TEST_AND_SET,
				    memory_of(dm));
	/* Of a shared mapping, an old size of 0 asks for one more view: mremap(2). */
	return mremap(memory_of(dm), 0, len, MREMAP_MAYMOVE);
}

/* ---------------------------------------------------------------- commands */

static int alloc_memic(struct emu_ioctl_call *call, struct emu_dm *dm)
{
	const struct emu_device *d = call->cmd.ctx->dev;
	uint64_t length = attr_in_value(call, UVERBS_ATTR_ALLOC_DM_LENGTH);
	uint32_t alignment = (uint32_t)attr_in_value(call, UVERBS_ATTR_ALLOC_DM_ALIGNMENT);

	if (!d->limits.max_dm_size)
		return EOPNOTSUPP;
	if (!length || length > UINT64_MAX - MEMIC_BASE_SIZE)
		return EINVAL; /* mlx5_cmd_alloc_memic() */
	if (alignment > MEMIC_BASE_ALIGN + EMU_DM_LOG_MAX_ALIGNMENT)
		return EINVAL;
	if (length > d->limits.max_dm_size)
		return ENOMEM;
	dm->length = length;
	dm->npages = pages_of(length);
	return take_pages(call->cmd.ctx, dm);
}

/* UVERBS_HANDLER(UVERBS_METHOD_DM_ALLOC) in core/uverbs_std_types_dm.c, handle_alloc_dm_memic() */
static int dm_alloc(struct emu_ioctl_call *call)
{
	uint64_t type = attr_in_value(call, MLX5_IB_ATTR_ALLOC_DM_REQ_TYPE), offset = 0;
	struct emu_dm *dm;
	uint16_t index;
	int err;

	if (type != MLX5_IB_UAPI_DM_TYPE_MEMIC) {
		emu_log(EMU_INFO, "%s: device memory of type %u, for flow steering, is not implemented",
			call->cmd.ctx->dev->name, (unsigned)type);
		return EOPNOTSUPP;
	}
	dm = emu_object_alloc(call->cmd.ctx, EMU_DM, sizeof(*dm));
	if (!dm)
		return ENOMEM;
	err = alloc_memic(call, dm);
	if (err) {
		emu_object_free(&dm->o);
		return err;
	}
	index = (uint16_t)dm->first;
	err = emu_object_publish(&dm->o);
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX, &index, sizeof(index));
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET, &offset, sizeof(offset));
	if (!err)
		err = attr_out_id(call, UVERBS_ATTR_ALLOC_DM_HANDLE, dm->o.handle);
	if (err)
		emu_object_destroy(&dm->o);
	return err;
}

static int dm_free(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, UVERBS_ATTR_FREE_DM_HANDLE));
	return 0;
}

/* For ibv_import_dm(): UVERBS_HANDLER(MLX5_IB_METHOD_DM_QUERY) */
static int dm_query(struct emu_ioctl_call *call)
{
	const struct emu_dm *dm = attr_object(call, MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE);
	uint16_t index = (uint16_t)dm->first;
	uint64_t offset = 0;
	int err = attr_out(call, MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX, &index, sizeof(index));

	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET, &offset, sizeof(offset));
	return err ? err : attr_out(call, MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH, &dm->length, sizeof(dm->length));
}

/* UVERBS_HANDLER(MLX5_IB_METHOD_DM_MAP_OP_ADDR): each operation has one address, however often it's asked for. */
static int dm_map_op(struct emu_ioctl_call *call)
{
	struct emu_dm *dm = attr_object(call, MLX5_IB_ATTR_DM_MAP_OP_ADDR_REQ_HANDLE);
	uint32_t op = (uint8_t)attr_in_value(call, MLX5_IB_ATTR_DM_MAP_OP_ADDR_REQ_OP);
	uint64_t offset = 0;
	uint16_t index;
	int err;

	if (op >= 32 || !(emu_dm_operations() >> op & 1))
		return EOPNOTSUPP;
	dm->ops |= 1u << op;
	index = (uint16_t)(OP_INDEX(op) | dm->first);
	err = attr_out(call, MLX5_IB_ATTR_DM_MAP_OP_ADDR_RESP_PAGE_INDEX, &index, sizeof(index));
	return err ? err : attr_out(call, MLX5_IB_ATTR_DM_MAP_OP_ADDR_RESP_START_OFFSET, &offset, sizeof(offset));
}

/* Checks of UVERBS_HANDLER(UVERBS_METHOD_DM_MR_REG) in core/uverbs_std_types_mr.c, then mlx5_ib_reg_dm_mr(). */
static int check_mr(const struct emu_dm *dm, uint64_t offset, uint64_t length, uint32_t access)
{
	const uint32_t allowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				 IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED | IB_UVERBS_ACCESS_OPTIONAL_RANGE;

	if (!(access & IBV_ACCESS_ZERO_BASED))
		return EINVAL;
	if (access & (IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_WRITE) && !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	if (offset > dm->length || length > dm->length - offset)
		return EINVAL;
	return access & ~allowed ? EINVAL : 0;
}

static int dm_mr_reg(struct emu_ioctl_call *call)
{
	struct emu_dm *dm = attr_object(call, UVERBS_ATTR_REG_DM_MR_DM_HANDLE);
	struct emu_pd *pd = attr_object(call, UVERBS_ATTR_REG_DM_MR_PD_HANDLE);
	uint64_t offset = attr_in_value(call, UVERBS_ATTR_REG_DM_MR_OFFSET);
	uint64_t length = attr_in_value(call, UVERBS_ATTR_REG_DM_MR_LENGTH);
	uint32_t access = (uint32_t)attr_in_value(call, UVERBS_ATTR_REG_DM_MR_ACCESS_FLAGS);
	struct emu_mkey *m;
	int err = check_mr(dm, offset, length, access);

	if (err)
		return err;
	m = emu_object_alloc(call->cmd.ctx, EMU_MR, sizeof(*m));
	if (!m)
		return ENOMEM;
	m->direct = true;
	m->pdn = pd->pdn;
	m->access = access & ~(uint32_t)IB_UVERBS_ACCESS_OPTIONAL_RANGE;
	m->host = (uintptr_t)memory_of(dm) + offset;
	m->len = length;
	err = emu_mkey_insert(call->cmd.ctx->dev, m);
	if (err) {
		emu_object_free(&m->o);
		return err;
	}
	m->pd = pd;
	m->umem = &dm->o;
	pd->o.usecnt++;
	dm->o.usecnt++;
	err = emu_object_publish(&m->o);
	if (!err)
		err = attr_out(call, UVERBS_ATTR_REG_DM_MR_RESP_LKEY, &m->key, sizeof(m->key));
	if (!err)
		err = attr_out(call, UVERBS_ATTR_REG_DM_MR_RESP_RKEY, &m->key, sizeof(m->key));
	if (!err)
		err = attr_out_id(call, UVERBS_ATTR_REG_DM_MR_HANDLE, m->o.handle);
	if (err)
		emu_object_destroy(&m->o);
	return err;
}

/* ---------------------------------------------------------------- tables */

static const struct emu_attr_spec alloc_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_ALLOC_DM_HANDLE, ATTR_IDR_NEW, EMU_DM, true),
	ATTR_IN_TYPE(UVERBS_ATTR_ALLOC_DM_LENGTH, uint64_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_ALLOC_DM_ALIGNMENT, uint32_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET, uint64_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX, uint16_t, false),
	ATTR_FLAGS_IN(MLX5_IB_ATTR_ALLOC_DM_REQ_TYPE, false),
};
static const struct emu_attr_spec free_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_FREE_DM_HANDLE, ATTR_IDR_DESTROY, EMU_DM, true),
};
static const struct emu_attr_spec query_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE, ATTR_IDR, EMU_DM, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET, uint64_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX, uint16_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH, uint64_t, true),
};
static const struct emu_attr_spec map_op_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DM_MAP_OP_ADDR_REQ_HANDLE, ATTR_IDR, EMU_DM, true),
	ATTR_IN_TYPE(MLX5_IB_ATTR_DM_MAP_OP_ADDR_REQ_OP, uint8_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_DM_MAP_OP_ADDR_RESP_START_OFFSET, uint64_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_DM_MAP_OP_ADDR_RESP_PAGE_INDEX, uint16_t, true),
};
static const struct emu_attr_spec mr_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_REG_DM_MR_HANDLE, ATTR_IDR_NEW, EMU_MR, true),
	ATTR_IN_TYPE(UVERBS_ATTR_REG_DM_MR_OFFSET, uint64_t, true),
	ATTR_IN_TYPE(UVERBS_ATTR_REG_DM_MR_LENGTH, uint64_t, true),
	ATTR_HANDLE(UVERBS_ATTR_REG_DM_MR_PD_HANDLE, ATTR_IDR, EMU_PD, true),
	ATTR_FLAGS_IN(UVERBS_ATTR_REG_DM_MR_ACCESS_FLAGS, true),
	ATTR_HANDLE(UVERBS_ATTR_REG_DM_MR_DM_HANDLE, ATTR_IDR, EMU_DM, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_REG_DM_MR_RESP_LKEY, uint32_t, true),
	ATTR_OUT_TYPE(UVERBS_ATTR_REG_DM_MR_RESP_RKEY, uint32_t, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_DM, UVERBS_METHOD_DM_ALLOC, alloc_attrs, dm_alloc, .inherited = true),
	IOCTL_METHOD(UVERBS_OBJECT_DM, UVERBS_METHOD_DM_FREE, free_attrs, dm_free, .inherited = true),
	IOCTL_METHOD(UVERBS_OBJECT_DM, MLX5_IB_METHOD_DM_QUERY, query_attrs, dm_query, .inherited = true),
	IOCTL_METHOD(UVERBS_OBJECT_DM, MLX5_IB_METHOD_DM_MAP_OP_ADDR, map_op_attrs, dm_map_op),
	IOCTL_METHOD(UVERBS_OBJECT_MR, UVERBS_METHOD_DM_MR_REG, mr_attrs, dm_mr_reg),
};

const struct emu_methods emu_dm_methods = { NULL, 0, ioctl_methods, ARRAY_LEN(ioctl_methods) };

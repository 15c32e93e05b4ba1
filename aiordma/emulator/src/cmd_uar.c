/* SPDX-License-Identifier: MIT
 * User access regions: pages of doorbell registers that the library maps. New libraries allocate each as an object and
 * get its mmap() offset; for older kernels they map by index, with a command in the offset (mlx5_ib_mmap() in
 * mlx5/main.c).
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "dm.h"
#include "var.h"

#define PAGE_SHIFT 12
/* mlx5/main.c: offsets of objects start where no command of the older scheme is. */
#define MMAP_OBJECT_FIRST ((uint64_t)9 << 16) /* MLX5_IB_MMAP_OFFSET_START */
#define MMAP_CMD(pgoff) ((pgoff) >> 8 & 0xff)
#define MMAP_EXTENDED_INDEX(pgoff) ((uint32_t)((pgoff) >> 16 << 8 | ((pgoff)&0xff))) /* get_extended_index() */

/* Addresses of mapped pages, 0 in a free place; written with the lock held. munmap() asks here without it: a preloaded
 * program's allocator unmaps memory from anywhere, also from under our own calls of free(). */
static uintptr_t mapped[4096];
static uint32_t mapped_used; /* places before this one have been in use */

static struct emu_uar *new_uar(struct emu_ucontext *ctx)
{
	struct emu_uar *u = emu_object_alloc(ctx, EMU_UAR, sizeof(*u));

	if (!u)
		return NULL;
	u->page_id = ++ctx->dev->next_uar;
	list_init(&u->link);
	list_add_tail(&ctx->uars, &u->ctx_link);
	return u;
}

struct emu_uar *emu_uar_find(struct emu_ucontext *ctx, uint32_t page_id)
{
	for (struct emu_list *l = ctx->uars.next; l != &ctx->uars; l = l->next) {
		struct emu_uar *u = container_of(l, struct emu_uar, ctx_link);

		if (u->page_id == page_id)
			return u;
	}
	return NULL;
}

static bool remember(uintptr_t page)
{
	for (uint32_t i = 0; i < ARRAY_LEN(mapped); i++) {
		if (mapped[i])
			continue;
		__atomic_store_n(&mapped[i], page, __ATOMIC_RELAXED);
		if (i >= mapped_used)
			__atomic_store_n(&mapped_used, i + 1, __ATOMIC_RELEASE);
		return true;
	}
	return false;
}

static bool any_mapped(uintptr_t from, uintptr_t to)
{
	uint32_t n = __atomic_load_n(&mapped_used, __ATOMIC_ACQUIRE);

	for (uint32_t i = 0; i < n; i++) {
		uintptr_t page = __atomic_load_n(&mapped[i], __ATOMIC_RELAXED);

		if (page >= from && page < to && page)
			return true;
	}
	return false;
}

static void forget_page(struct emu_uar *u)
{
	if (!u->page)
		return;
	emu_uar_unmapped(u);
	for (uint32_t i = 0; i < mapped_used; i++)
		if (mapped[i] == (uintptr_t)u->page)
			__atomic_store_n(&mapped[i], 0, __ATOMIC_RELAXED);
	u->page = NULL;
}

void emu_uar_retire(struct emu_uar *u)
{
	forget_page(u);
	list_del(&u->ctx_link);
}

/* ---------------------------------------------------------------- mmap, munmap */

/* Where the device's registers would be, ordinary memory. The library asks for it write-only; the device thread and the
 * page protection that wakes it need to read as well. Private, so that a fork() child rings nobody. */
static void *map_page(struct emu_uar *u, void *addr, int fixed)
{
	void *page = emu_real.mmap(addr, EMU_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);

	if (page == MAP_FAILED)
		return page;
	forget_page(u); /* mapped twice: the newer one is the one in use */
	if (!remember((uintptr_t)page)) {
		emu_real.munmap(page, EMU_PAGE);
		errno = ENOMEM;
		return MAP_FAILED;
	}
	u->page = page;
	emu_uar_mapped(u);
	return page;
}

/* How to make times of CQE timestamps (mlx5dv_get_clock_info(3)). These count the nanoseconds of the monotonic clock, so
 * that one snapshot does: the kernel's page is refreshed because hardware drifts. */
static void *map_clock_info(void *addr, int fixed)
{
	struct mlx5_ib_clock_info *info =
		emu_real.mmap(addr, EMU_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
	struct timespec real;

	if (info == MAP_FAILED)
		return info;
	clock_gettime(CLOCK_REALTIME, &real);
	info->cycles = now_ns();
	info->nsec = (uint64_t)real.tv_sec * 1000000000u + (uint64_t)real.tv_nsec;
	info->mult = 1;
	info->mask = EMU_TIMESTAMP_MASK;
	info->overflow_period = EMU_TIMESTAMP_MASK / 2;
	return info;
}

uint64_t emu_page_offset(uint32_t page_id)
{
	return (MMAP_OBJECT_FIRST + page_id) << PAGE_SHIFT;
}

/* MAP_FAILED with errno. `fixed`: MAP_FIXED, or 0. */
static void *map(struct emu_ucontext *ctx, void *addr, size_t len, int prot, off_t offset, int fixed)
{
	uint64_t pgoff = (uint64_t)offset >> PAGE_SHIFT;
	struct emu_uar *u = NULL;
	void *page;

	if (!ctx->established) {
		errno = ENODEV;
		return MAP_FAILED;
	}
	errno = EINVAL;
	if (pgoff < MMAP_OBJECT_FIRST && MMAP_CMD(pgoff) == MLX5_IB_MMAP_DEVICE_MEM)
		return emu_dm_mmap(ctx, MMAP_EXTENDED_INDEX(pgoff), len);
	if (ctx->inherited) {
		errno = EIO;
		return MAP_FAILED;
	}
	if (len != EMU_PAGE || (prot & PROT_EXEC))
		return MAP_FAILED;
	if (pgoff >= MMAP_OBJECT_FIRST) {
		if (emu_var_known(ctx, (uint32_t)(pgoff - MMAP_OBJECT_FIRST)))
			return fixed ? MAP_FAILED : emu_var_mmap(addr);
		u = emu_uar_find(ctx, (uint32_t)(pgoff - MMAP_OBJECT_FIRST));
		return u ? map_page(u, addr, fixed) : MAP_FAILED;
	}
	switch (MMAP_CMD(pgoff)) {
	case MLX5_IB_MMAP_REGULAR_PAGE:
	case MLX5_IB_MMAP_WC_PAGE:
	case MLX5_IB_MMAP_NC_PAGE:
	case MLX5_IB_MMAP_ALLOC_WC:
		if (!ctx->static_uars)
			return MAP_FAILED;
		u = new_uar(ctx);
		if (!u) {
			errno = ENOMEM;
			return MAP_FAILED;
		}
		page = map_page(u, addr, fixed);
		if (page == MAP_FAILED)
			emu_object_destroy(&u->o);
		return page;
	case MLX5_IB_MMAP_CLOCK_INFO:
		return map_clock_info(addr, fixed);
	case MLX5_IB_MMAP_CORE_CLOCK:
		if (!emu_mmio_supported()) { /* and not advertised */
			errno = EOPNOTSUPP;
			return MAP_FAILED;
		}
		if (prot & PROT_WRITE) {
			errno = EPERM; /* mlx5_ib_mmap_clock_info_page() and the like */
			return MAP_FAILED;
		}
		return emu_mmio_map(ctx, addr, len, fixed, EMU_MMIO_CLOCK, NULL);
	default:
		return MAP_FAILED;
	}
}

void *emu_uar_mmap(struct emu_ucontext *ctx, void *addr, size_t len, int prot, off_t offset)
{
	return map(ctx, addr, len, prot, offset, 0);
}

/* ---------------------------------------------------------------- mappings that no hook saw */

/* What can be put in place where it was mapped: not the device's memory, which is in one place already (nor VARs). */
static bool adoptable(uint64_t pgoff)
{
	return pgoff >= MMAP_OBJECT_FIRST || MMAP_CMD(pgoff) != MLX5_IB_MMAP_DEVICE_MEM;
}

static void adopt(struct emu_ucontext *ctx, uintptr_t from, uintptr_t to, uint64_t pgoff)
{
	for (; from < to; from += EMU_PAGE, pgoff++) {
		if (adoptable(pgoff) && map(ctx, (void *)from, EMU_PAGE, PROT_READ, (off_t)(pgoff << PAGE_SHIFT),
					    MAP_FIXED) != MAP_FAILED)
			emu_log(EMU_DEBUG, "a page that was mapped past the hooks");
		else
			emu_log(EMU_WARN, "a page at offset 0x%" PRIx64 " was mapped past the emulated NIC, by a library that "
				"replaces mmap(), and can't be used", pgoff << PAGE_SHIFT);
	}
}

/* UCX and Open MPI put their own mmap() into a process, in the code of whatever function has that name, to know what a
 * program unmaps. Then the library has mapped our descriptor, where there is nothing. No doorbell has been rung there as
 * long as there is no queue: when one is made the pages are put in their places. */
void emu_uar_adopt(struct emu_ucontext *ctx)
{
	unsigned long from, to, offset, inode;
	bool unmapped = false;
	char line[512];
	FILE *maps;

	for (struct emu_list *l = ctx->uars.next; l != &ctx->uars && !unmapped; l = l->next)
		unmapped = !container_of(l, struct emu_uar, ctx_link)->page;
	if (!unmapped || ctx->inherited)
		return;
	maps = fopen("/proc/self/maps", "re");
	if (!maps)
		return;
	while (fgets(line, sizeof(line), maps))
		if (sscanf(line, "%lx-%lx %*4s %lx %*x:%*x %lu", &from, &to, &offset, &inode) == 4 &&
		    inode == ctx->node_ino && strstr(line, "/memfd:aiordma-"))
			adopt(ctx, from, to, offset >> PAGE_SHIFT);
	fclose(maps);
}

static void unmap_in_context(struct emu_ucontext *ctx, uintptr_t from, uintptr_t to)
{
	struct emu_list *next;

	for (struct emu_list *l = ctx->uars.next; l != &ctx->uars; l = next) {
		struct emu_uar *u = container_of(l, struct emu_uar, ctx_link);
		uintptr_t at = (uintptr_t)u->page;

		next = l->next;
		if (!at || at < from || at >= to)
			continue;
		forget_page(u);
		if (u->o.handle == UINT32_MAX) /* mapped by index: the mapping was all there was of it */
			emu_object_destroy(&u->o);
	}
}

void emu_uar_unmap_range(void *addr, size_t len)
{
	uintptr_t from = (uintptr_t)addr, to = from + len;

	emu_mmio_unmapped(addr, len);
	if (!any_mapped(from, to) || emu_foreign())
		return;
	emu_lock();
	for (struct emu_list *l = emu.contexts.next; l != &emu.contexts; l = l->next)
		unmap_in_context(container_of(l, struct emu_ucontext, link), from, to);
	emu_unlock();
}

/* ---------------------------------------------------------------- commands */

/* UVERBS_HANDLER(MLX5_IB_METHOD_UAR_OBJ_ALLOC) in mlx5/main.c */
static int uar_alloc(struct emu_ioctl_call *call)
{
	uint64_t type = attr_in_value(call, MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE), offset;
	uint32_t length = EMU_PAGE;
	struct emu_uar *u;
	int err;

	if (type != MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF && type != MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC)
		return EOPNOTSUPP;
	u = new_uar(call->cmd.ctx);
	if (!u)
		return ENOMEM;
	offset = emu_page_offset(u->page_id);
	err = emu_object_publish(&u->o);
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, &offset, sizeof(offset));
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, &length, sizeof(length));
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, &u->page_id, sizeof(u->page_id));
	if (!err)
		err = attr_out_id(call, MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, u->o.handle);
	if (err)
		emu_object_destroy(&u->o);
	return err;
}

static int uar_destroy(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE));
	return 0;
}

static const struct emu_attr_spec alloc_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, ATTR_IDR_NEW, EMU_UAR, true),
	ATTR_CONST_IN(MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, uint64_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, uint32_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, uint32_t, true),
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE, ATTR_IDR_DESTROY, EMU_UAR, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(MLX5_IB_OBJECT_UAR, MLX5_IB_METHOD_UAR_OBJ_ALLOC, alloc_attrs, uar_alloc),
	IOCTL_METHOD(MLX5_IB_OBJECT_UAR, MLX5_IB_METHOD_UAR_OBJ_DESTROY, destroy_attrs, uar_destroy),
};

const struct emu_methods emu_uar_methods = { NULL, 0, ioctl_methods, ARRAY_LEN(ioctl_methods) };

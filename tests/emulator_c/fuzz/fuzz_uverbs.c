/* SPDX-License-Identifier: MIT
 * Commands, as any program may send them to the device node: both forms, any bytes.
 *
 * An input is a list of operations, each a byte and its operands. record.c writes the same format from what a real library
 * does. */
#define _GNU_SOURCE
#include "program.h"

#include <sys/mman.h>

#define CONTEXTS 3u
#define PAGES 64u

static int fds[CONTEXTS];
static unsigned current;
static struct {
	void *p;
	size_t len;
} pages[PAGES];
static unsigned npages;

/* Addresses as those that attach() gives by default. */
static const char config[] = "spin_us 0\nreach_host 0\nuse_uffd 0\n"
			     "device mlx5_0 00005cfffe000001\n"
			     "port 1 gids 16\n"
			     "gid 1 0 fe80::5cff:fe00:1 v1 lo\ngid 1 1 fe80::5cff:fe00:1 v2 lo\n"
			     "gid 1 2 ::ffff:c000:201 v1 lo\ngid 1 3 ::ffff:c000:201 v2 lo\n"
			     "device mlx5_1 00005cfffe000003\n"
			     "port 1 gids 16\ngid 1 0 fe80::5cff:fe00:3 v2 lo\n";

static int context(void)
{
	/* The third is of another device. */
	if (fds[current] < 0)
		fds[current] = emu_hook_open(current == 2 ? "/dev/infiniband/uverbs1" : "/dev/infiniband/uverbs0", 0, 0);
	return fds[current];
}

static void close_context(unsigned i)
{
	if (fds[i] >= 0)
		emu_hook_close(fds[i]);
	fds[i] = -1;
}

/* At the arena's end, so that what reads too far is told EFAULT. */
static uint8_t *at_end(const uint8_t *bytes, size_t n)
{
	uint8_t *p = arena(ARENA_SIZE - ((n + 7) & ~7ul));

	if (madvise(arena(ARENA_SIZE - 65536), 65536, MADV_POPULATE_WRITE))
		return NULL; /* unmapped before */
	memcpy(p, bytes, n);
	return p;
}

static void do_ioctl(struct input *in, bool raw)
{
	size_t n = take(in, 2);
	const uint8_t *bytes = take_bytes(in, &n);
	uint8_t *p = n >= sizeof(struct ib_uverbs_ioctl_hdr) ? at_end(bytes, n) : NULL;

	if (!p)
		return;
	if (!raw) {
		struct ib_uverbs_ioctl_hdr *h = (void *)p;

		h->num_attrs = (uint16_t)((n - sizeof(*h)) / sizeof(struct ib_uverbs_attr));
		h->length = (uint16_t)(sizeof(*h) + h->num_attrs * sizeof(struct ib_uverbs_attr));
		h->driver_id = RDMA_DRIVER_MLX5;
		h->reserved1 = h->reserved2 = 0;
	}
	emu_hook_ioctl(context(), RDMA_VERBS_IOCTL, p);
}

static void do_write(struct input *in, bool raw)
{
	size_t n = take(in, 2);
	const uint8_t *bytes = take_bytes(in, &n);
	uint8_t *p = n >= sizeof(struct ib_uverbs_cmd_hdr) ? at_end(bytes, n) : NULL;

	if (!p)
		return;
	if (!raw) {
		struct ib_uverbs_cmd_hdr *h = (void *)p;

		if (!(h->command & IB_USER_VERBS_CMD_FLAG_EXTENDED))
			h->in_words = (uint16_t)(n / 4);
	}
	emu_hook_write(context(), p, n);
}

static void do_memory(struct input *in)
{
	uint64_t offset = take(in, 4) % ARENA_SIZE;
	size_t n = take(in, 2);
	const uint8_t *bytes = take_bytes(in, &n);

	n = MIN(n, ARENA_SIZE - offset);
	if (n && !madvise(arena(offset & ~(uint64_t)(EMU_PAGE - 1)), (offset % EMU_PAGE + n + EMU_PAGE - 1) & ~(size_t)(EMU_PAGE - 1),
			  MADV_POPULATE_WRITE))
		memcpy(arena(offset), bytes, n);
}

static void do_mmap(struct input *in)
{
	uint64_t offset = take(in, 8);
	size_t len = take(in, 4);
	int prot = (int)take(in, 1) & (PROT_READ | PROT_WRITE | PROT_EXEC);
	void *p;

	if (npages == PAGES)
		return;
	p = emu_hook_mmap(NULL, len, prot, MAP_SHARED, context(), (off_t)offset);
	if (p == MAP_FAILED)
		return;
	pages[npages].p = p;
	pages[npages++].len = len;
}

static void do_munmap(unsigned i)
{
	if (i >= npages)
		return;
	emu_hook_munmap(pages[i].p, pages[i].len);
	pages[i] = pages[--npages];
}

static void do_close(int fd)
{
	/* Channels only: what else is open is the fuzzer's. */
	if (fd >= FIRST_FD && fd < FIRST_FD + 200)
		emu_hook_close(fd);
}

static void do_ring(struct input *in)
{
	unsigned i = (unsigned)take(in, 1), offset = (unsigned)take(in, 2) & 0xff8;
	uint64_t value = take(in, 8);

	if (i < npages && pages[i].len >= EMU_PAGE && !madvise(pages[i].p, EMU_PAGE, MADV_POPULATE_WRITE))
		__atomic_store_n((uint64_t *)(void *)((uint8_t *)pages[i].p + offset), value, __ATOMIC_RELEASE);
}

static void step(struct input *in)
{
	switch (take(in, 1)) {
	case OP_MEMORY:
		do_memory(in);
		break;
	case OP_IOCTL:
		do_ioctl(in, false);
		break;
	case OP_IOCTL_RAW:
		do_ioctl(in, true);
		break;
	case OP_WRITE:
		do_write(in, false);
		break;
	case OP_WRITE_RAW:
		do_write(in, true);
		break;
	case OP_MMAP:
		do_mmap(in);
		break;
	case OP_MUNMAP:
		do_munmap((unsigned)take(in, 1));
		break;
	case OP_CLOSE:
		do_close((int)take(in, 2));
		break;
	case OP_CONTEXT:
		current = (unsigned)take(in, 1) % CONTEXTS;
		break;
	case OP_CLOSE_CONTEXT:
		close_context(current);
		break;
	case OP_RING:
		do_ring(in);
		break;
	case OP_UNMAP_MEMORY: {
		uint64_t offset = take(in, 4);

		arena_unmap(offset, take(in, 4));
		break;
	}
	default:
		emu_lock();
		engine_pump(2);
		emu_unlock();
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input in = { data, size };

	configure_once(config, fds, CONTEXTS);
	current = 0;
	numbers_restart();
	for (unsigned i = 0; i < 400 && in.n; i++)
		step(&in);
	emu_lock();
	engine_pump(8);
	emu_unlock();
	while (npages)
		do_munmap(0);
	for (unsigned i = 0; i < CONTEXTS; i++)
		close_context(i);
	channels_restart();
	arena_reset();
	return 0;
}

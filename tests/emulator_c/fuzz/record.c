/* SPDX-License-Identifier: MIT
 * Writes what a program does with the device node as inputs for fuzz_uverbs.c: a build of the emulator's library in which
 * the hooks come here first (the linker's --wrap). AIORDMA_FUZZ_RECORD names a folder for the files. Not for programs
 * with several threads.
 *
 * Addresses of the program become addresses of the arena: what a word is known to point at, or looks as if it did. */
#define _GNU_SOURCE
#include "program.h"

#include <fcntl.h>
#include <unistd.h>

int __real_emu_hook_open(const char *, int, mode_t);
int __wrap_emu_hook_open(const char *, int, mode_t);
int __real_emu_hook_ioctl(int, unsigned long, void *);
int __wrap_emu_hook_ioctl(int, unsigned long, void *);
ssize_t __real_emu_hook_write(int, const void *, size_t);
ssize_t __wrap_emu_hook_write(int, const void *, size_t);
void *__real_emu_hook_mmap(void *, size_t, int, int, int, off_t);
void *__wrap_emu_hook_mmap(void *, size_t, int, int, int, off_t);
int __real_emu_hook_close(int);
int __wrap_emu_hook_close(int);
int __real_emu_fd_set(int, enum emu_file_kind, struct emu_ucontext *, struct emu_channel *);
int __wrap_emu_fd_set(int, enum emu_file_kind, struct emu_ucontext *, struct emu_channel *);

#define SCRATCH_END (ARENA_SIZE / 2) /* below: attributes' bytes; above: what the program has registered */
#define REGION (4 * EMU_PAGE)

static int out = -1;
static uint32_t scratch;
static uint64_t known[128];
static uint32_t nknown;

static void put(uint64_t v, unsigned bytes)
{
	uint8_t b[8];

	for (unsigned i = 0; i < bytes; i++)
		b[i] = (uint8_t)(v >> 8 * i);
	if (emu_real.write(out, b, bytes) != (ssize_t)bytes)
		abort();
}

static void put_bytes(const void *p, size_t n)
{
	if (emu_real.write(out, p, n) != (ssize_t)n)
		abort();
}

/* ---------------------------------------------------------------- addresses */

static bool looks_like_address(uint64_t v)
{
	uint8_t byte;

	/* Of a program that isn't relocated the heap is low; below are numbers that mean something else. */
	return v >= 1u << 24 && v >> 47 == 0 && !user_read(&byte, v, 1);
}

/* Where it lies in its page is kept. */
static uint64_t in_arena(uint64_t address)
{
	uint64_t page = address & ~(uint64_t)(EMU_PAGE - 1);
	uint32_t i;

	for (i = 0; i < nknown && !(page >= known[i] && page < known[i] + REGION); i++)
		;
	if (i == nknown) {
		if (nknown < ARRAY_LEN(known))
			nknown++;
		else
			i = (uint32_t)(page / EMU_PAGE % ARRAY_LEN(known));
		known[i] = page;
	}
	return ARENA + SCRATCH_END + i * REGION + (address - known[i]);
}

static void translate(uint8_t *bytes, size_t n)
{
	for (size_t i = 0; i + 8 <= n; i += 8) {
		uint64_t v;

		memcpy(&v, bytes + i, 8);
		if (!looks_like_address(v))
			continue;
		v = in_arena(v);
		memcpy(bytes + i, &v, 8);
	}
}

/* The bytes go into the arena; says where. */
static uint64_t place(uint64_t address, size_t n)
{
	static uint8_t bytes[65536];
	uint32_t at = scratch;

	if (n > sizeof(bytes) || user_read(bytes, address, n))
		return address;
	translate(bytes, n);
	scratch = (uint32_t)((scratch + n + 15) & ~15ul) % (SCRATCH_END - 65536);
	while (n && !bytes[n - 1])
		n--; /* it's zero to begin with */
	if (!n)
		return ARENA + at;
	put(OP_MEMORY, 1);
	put(at, 4);
	put(n, 2);
	put_bytes(bytes, n);
	return ARENA + at;
}

/* ---------------------------------------------------------------- calls */

static uint32_t contexts(void)
{
	return emu_open_contexts();
}

int __wrap_emu_hook_open(const char *path, int flags, mode_t mode)
{
	static unsigned count;
	const char *folder = getenv("AIORDMA_FUZZ_RECORD");
	char name[4096];

	if (!path || strncmp(path, "/dev/infiniband/uverbs", 22))
		return __real_emu_hook_open(path, flags, mode);
	if (!contexts()) {
		emu_real_init();
		numbers_restart();
		if (out >= 0)
			emu_real.close(out);
		out = -1;
		scratch = nknown = 0;
		/* What tests have left open: numbers must begin at the same place in each file. */
		for (int fd = FIRST_FD; fd < FIRST_FD + 200; fd++)
			emu_real.close(fd);
		snprintf(name, sizeof(name), "%s/%d-%u", folder ? folder : "/tmp", (int)getpid(), count++);
		if (folder)
			out = emu_real.open(name, O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
	}
	return __real_emu_hook_open(path, flags, mode);
}

static void record_ioctl(const void *arg)
{
	struct ib_uverbs_ioctl_hdr h;
	struct ib_uverbs_attr u[64];

	/* Tests send what isn't there, too. */
	if (user_read(&h, (uintptr_t)arg, sizeof(h)) || h.num_attrs > ARRAY_LEN(u) ||
	    user_read(u, (uintptr_t)arg + sizeof(h), h.num_attrs * sizeof(u[0])))
		return;
	for (uint32_t i = 0; i < h.num_attrs; i++)
		if (u[i].len > 8 || (u[i].len && looks_like_address(u[i].data)))
			u[i].data = place(u[i].data, u[i].len);
		else if (looks_like_address(u[i].data))
			u[i].data = in_arena(u[i].data);
	put(OP_IOCTL, 1);
	put(sizeof(h) + h.num_attrs * sizeof(u[0]), 2);
	put_bytes(&h, sizeof(h));
	put_bytes(u, h.num_attrs * sizeof(u[0]));
}

int __wrap_emu_hook_ioctl(int fd, unsigned long request, void *arg)
{
	if (out >= 0 && request == RDMA_VERBS_IOCTL && emu_fd_known(fd))
		record_ioctl(arg);
	return __real_emu_hook_ioctl(fd, request, arg);
}

ssize_t __wrap_emu_hook_write(int fd, const void *buf, size_t len)
{
	static uint8_t bytes[65536];

	if (out >= 0 && emu_fd_known(fd) && len <= sizeof(bytes) && !user_read(bytes, (uintptr_t)buf, len)) {
		translate(bytes, len);
		put(OP_WRITE, 1);
		put(len, 2);
		put_bytes(bytes, len);
	}
	return __real_emu_hook_write(fd, buf, len);
}

void *__wrap_emu_hook_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	if (out >= 0 && fd >= 0 && emu_fd_known(fd)) {
		put(OP_MMAP, 1);
		put((uint64_t)offset, 8);
		put(len, 4);
		put((uint64_t)prot, 1);
	}
	return __real_emu_hook_mmap(addr, len, prot, flags, fd, offset);
}

int __wrap_emu_hook_close(int fd)
{
	if (out >= 0 && fd >= FIRST_FD && emu_fd_known(fd)) {
		put(OP_CLOSE, 1);
		put((uint64_t)fd, 2);
	}
	return __real_emu_hook_close(fd);
}

int __wrap_emu_fd_set(int fd, enum emu_file_kind kind, struct emu_ucontext *ctx, struct emu_channel *ch)
{
	int high = kind == EMU_FILE_CHANNEL ? fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FD) : -1;

	if (high >= 0) {
		emu_real.close(fd);
		ch->rfd = fd = high;
	}
	return __real_emu_fd_set(fd, kind, ctx, ch);
}

void numbers_restart(void)
{
	for (uint32_t i = 0; i < emu.ndevices; i++) {
		struct emu_device *d = &emu.devices[i];

		d->next_qpn = d->next_cqn = d->next_srqn = d->next_mkey = d->next_pdn = d->next_uar = d->next_umem = 0;
		d->next_rqn = d->next_rqtn = d->next_xrcdn = 0;
	}
}

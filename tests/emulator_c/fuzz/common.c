/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#include "fuzz.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---------------------------------------------------------------- memory */

static bool holes;

static void map_arena(void)
{
	void *p = mmap((void *)(uintptr_t)ARENA, ARENA_SIZE, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);

	if (p == MAP_FAILED)
		abort();
}

void arena_map(void)
{
	map_arena();
}

void arena_unmap(uint64_t offset, uint64_t len)
{
	uint64_t page = offset % ARENA_SIZE & ~(uint64_t)(EMU_PAGE - 1);

	len = (len + EMU_PAGE - 1) & ~(uint64_t)(EMU_PAGE - 1);
	if (len > ARENA_SIZE - page)
		len = ARENA_SIZE - page;
	if (len)
		munmap(arena(page), len);
	holes = true;
}

void arena_reset(void)
{
	if (holes)
		map_arena();
	else
		madvise((void *)(uintptr_t)ARENA, ARENA_SIZE, MADV_DONTNEED);
	holes = false;
}

/* ---------------------------------------------------------------- the devices */

void configure_once(const char *config, int *fds, unsigned n)
{
	static bool done;
	char error[200];

	if (done)
		return;
	done = true;
	emu_level = getenv("FUZZ_LOG") ? EMU_DEBUG : EMU_ERROR;
	if (aiordma_emu_configure(config, error, sizeof(error))) {
		fprintf(stderr, "%s\n", error);
		abort();
	}
	arena_map();
	while (n)
		fds[--n] = -1;
}

/* ---------------------------------------------------------------- the device without its thread */

int __wrap_emu_engine_start(void);
void __wrap_emu_engine_stop(void);
int __wrap_nanosleep(const struct timespec *, struct timespec *);
int __real_emu_fd_set(int, enum emu_file_kind, struct emu_ucontext *, struct emu_channel *);
int __wrap_emu_fd_set(int, enum emu_file_kind, struct emu_ucontext *, struct emu_channel *);

int __wrap_emu_engine_start(void)
{
	fault_guard_start();
	return 0;
}

void __wrap_emu_engine_stop(void)
{
	fault_guard_stop();
}

/* A command that waits for the device to go on, without the lock: hooks.c, settle(). */
int __wrap_nanosleep(const struct timespec *t, struct timespec *left)
{
	(void)t;
	(void)left;
	emu_lock();
	engine_pump(1);
	emu_unlock();
	return 0;
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

/* After a test with many of them the numbers must begin at the same place again. */
void channels_restart(void)
{
	for (int fd = FIRST_FD; fd < FIRST_FD + 200; fd++)
		close(fd);
}

void engine_pump(unsigned rounds)
{
	while (rounds--) {
		doorbell_poll();
		scan_all();
		scan_errors();
		engine_run_ready();
	}
}

void numbers_restart(void)
{
	for (uint32_t i = 0; i < emu.ndevices; i++) {
		struct emu_device *d = &emu.devices[i];

		d->next_qpn = d->next_cqn = d->next_srqn = d->next_mkey = d->next_pdn = d->next_uar = d->next_umem = 0;
		d->next_rqn = d->next_rqtn = d->next_xrcdn = 0;
	}
}

/* ---------------------------------------------------------------- input */

uint64_t take(struct input *in, unsigned bytes)
{
	uint64_t v = 0;

	for (unsigned i = 0; i < bytes && in->n; i++, in->n--)
		v |= (uint64_t)*in->p++ << 8 * i;
	return v;
}

const uint8_t *take_bytes(struct input *in, size_t *n)
{
	const uint8_t *p = in->p;

	*n = MIN(*n, in->n);
	in->p += *n;
	in->n -= *n;
	return p;
}

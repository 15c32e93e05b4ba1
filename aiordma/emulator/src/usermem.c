/* SPDX-License-Identifier: MIT
 * The application's memory, as the kernel sees it: copies that fail with EFAULT, and pinning with its accounting.
 *
 * Emulator and application share an address space, so a plain memcpy() would do, but then a bad pointer ends the
 * process where a kernel answers EFAULT. process_vm_readv() on ourselves is the same copy with that answer. Some
 * sandboxes refuse the call; reading and writing through a memfd has the same property.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include "capability.h"
#include "control.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* ---------------------------------------------------------------- copies */

static int bounce_fd = -1;
static bool use_bounce;

static int bounce_open(void)
{
	if (bounce_fd < 0)
		bounce_fd = memfd_create("aiordma-bounce", MFD_CLOEXEC);
	return bounce_fd;
}

/* Commands of the device come with emu.lock, those of the connection manager with another. */
static pthread_mutex_t bounce_lock = PTHREAD_MUTEX_INITIALIZER;

/* One direction through the memfd. */
static int bounce(uint64_t addr, void *local, size_t len, bool to_user)
{
	void *user = (void *)(uintptr_t)addr;
	int err = 0;

	pthread_mutex_lock(&bounce_lock);
	if (bounce_open() < 0)
		err = ENOMEM;
	else if (pwrite(bounce_fd, to_user ? local : user, len, 0) != (ssize_t)len ||
		 pread(bounce_fd, to_user ? user : local, len, 0) != (ssize_t)len)
		err = EFAULT;
	pthread_mutex_unlock(&bounce_lock);
	return err;
}

static int copy(uint64_t addr, void *local, size_t len, bool to_user)
{
	struct iovec mine = { local, len }, theirs = { (void *)(uintptr_t)addr, len };

	if (!len)
		return 0;
	if (!use_bounce) {
		ssize_t n = to_user ? process_vm_writev(getpid(), &mine, 1, &theirs, 1, 0) :
				      process_vm_readv(getpid(), &mine, 1, &theirs, 1, 0);

		if (n == (ssize_t)len)
			return 0;
		if (n >= 0 || errno == EFAULT)
			return EFAULT;
		use_bounce = true; /* EPERM or ENOSYS: a sandbox */
	}
	return bounce(addr, local, len, to_user);
}

int user_read(void *dst, uint64_t addr, size_t len)
{
	return copy(addr, dst, len, false);
}

int user_write(uint64_t addr, const void *src, size_t len)
{
	return copy(addr, (void *)(uintptr_t)src, len, true);
}

int user_zero(uint64_t addr, size_t len)
{
	static const uint8_t zeros[256];

	while (len) {
		size_t n = MIN(len, sizeof(zeros));
		int err = user_write(addr, zeros, n);

		if (err)
			return err;
		addr += n;
		len -= n;
	}
	return 0;
}

int user_check_zero(uint64_t addr, size_t len)
{
	uint8_t chunk[256];

	while (len) {
		size_t n = MIN(len, sizeof(chunk));
		int err = user_read(chunk, addr, n);

		if (err)
			return err;
		for (size_t i = 0; i < n; i++)
			if (chunk[i])
				return EOPNOTSUPP;
		addr += n;
		len -= n;
	}
	return 0;
}

/* ---------------------------------------------------------------- pinning */

/* Pages pinned by this process: mm->pinned_vm in the kernel. Guarded by emu.lock. */
static uint64_t pinned_vm;

/* What /proc says of a range, for kernels before 5.14 that can't populate it. */
static int check_maps(uint64_t start, uint64_t end, bool writable)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	uint64_t from, to, covered = start;
	char perms[5], rest[4096];

	if (!maps)
		return EFAULT;
	while (covered < end && fgets(rest, sizeof(rest), maps)) {
		if (sscanf(rest, "%" SCNx64 "-%" SCNx64 " %4s", &from, &to, perms) != 3 || to <= covered)
			continue;
		if (from > covered || (writable ? perms[1] != 'w' : perms[0] != 'r'))
			break;
		covered = to;
	}
	fclose(maps);
	return covered >= end ? 0 : EFAULT;
}

static bool can_populate(void)
{
	static int answer; /* 1 yes, 2 no */
	static _Alignas(EMU_PAGE) uint8_t probe[EMU_PAGE];

	if (!answer)
		answer = madvise(probe, sizeof(probe), MADV_POPULATE_WRITE) ? 2 : 1;
	return answer == 1;
}

/* Faults every page in, as pinning does, and finds out whether it's there. */
static int populate(uint64_t start, uint64_t end, bool writable)
{
	int advice = writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;

	if (!can_populate())
		return check_maps(start, end, writable);
	while (madvise((void *)(uintptr_t)start, end - start, advice)) {
		if (errno != EINTR && errno != EAGAIN)
			return EFAULT; /* not mapped, not permitted, or a mapping of a device: EFAULT to the kernel too */
	}
	return 0;
}

int umem_get(uint64_t addr, uint64_t len, bool writable, uint64_t *pages)
{
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t start = addr & ~(page - 1), end = (addr + len + page - 1) & ~(page - 1), n;
	struct rlimit limit;
	int err;

	*pages = 0;
	/* The order of these is ib_umem_get()'s. */
	if (addr + len < addr || end < addr + len)
		return EINVAL;
	if (getrlimit(RLIMIT_MEMLOCK, &limit))
		return errno;
	if (!limit.rlim_cur && !has_capability(CAP_IPC_LOCK))
		return EPERM;
	n = (end - start) / page;
	if (!n || n > UINT32_MAX)
		return EINVAL;
	if (limit.rlim_cur != RLIM_INFINITY && pinned_vm + n > limit.rlim_cur / page && !has_capability(CAP_IPC_LOCK)) {
		emu_log(EMU_INFO, "pinning %" PRIu64 " bytes: %" PRIu64 " pinned already, RLIMIT_MEMLOCK is %" PRIu64,
			n * page, pinned_vm * page, (uint64_t)limit.rlim_cur);
		return ENOMEM;
	}
	err = populate(start, end, writable);
	if (err)
		return err;
	pinned_vm += n;
	*pages = n;
	return 0;
}

void umem_release(uint64_t pages)
{
	pinned_vm -= MIN(pages, pinned_vm);
}

void umem_reset(void)
{
	pinned_vm = 0;
	pthread_mutex_init(&bounce_lock, NULL);
	if (bounce_fd >= 0)
		emu_real.close(bounce_fd); /* the parent writes into it */
	bounce_fd = -1;
}

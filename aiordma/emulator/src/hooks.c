/* SPDX-License-Identifier: MIT
 * What becomes of the calls that libibverbs, libmlx5 and libnl make to the C library. Both ways in come here: the
 * names of interpose.c when preloaded, the patched slots of attach.c otherwise.
 *
 * A hook must leave alone what isn't ours, errno included, and cost next to nothing then: preloaded, it sees every
 * write() and close() of the program.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <stdio.h>
#include <limits.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <linux/netlink.h>

#include "cm.h"
#include "inject.h"

struct emu_real emu_real;
static void *(*real_dlopen)(const char *, int);
static int (*real_openat)(int, const char *, int, ...);
static int (*real_socket)(int, int, int);

/* The next definition after ours; and when we aren't preloaded, and were loaded after the C library, simply the
 * first one that there is. */
static void *next_symbol(const char *name)
{
	void *symbol = dlsym(RTLD_NEXT, name);

	return symbol ? symbol : dlsym(RTLD_DEFAULT, name);
}

#define REAL(member, name) (member) = (__typeof__(member))next_symbol(name)

/* A constructor is too late for a program whose other libraries have constructors that open files. */
void emu_real_init(void)
{
	if (__atomic_load_n(&emu_real.munmap, __ATOMIC_ACQUIRE))
		return;
	REAL(emu_real.open, "open");
	REAL(emu_real.close, "close");
	REAL(emu_real.ioctl, "ioctl");
	REAL(emu_real.read, "read");
	REAL(emu_real.write, "write");
	REAL(emu_real.mmap, "mmap");
	REAL(real_openat, "openat");
	REAL(real_socket, "socket");
	REAL(real_dlopen, "dlopen");
	__atomic_store_n(&emu_real.munmap, (__typeof__(emu_real.munmap))next_symbol("munmap"), __ATOMIC_RELEASE);
}

static void __attribute__((constructor)) init_early(void)
{
	emu_real_init();
}

/* ---------------------------------------------------------------- the device node by its name */

#define NODE_PREFIX "/dev/infiniband/uverbs"

static struct emu_device *node_of(const char *path)
{
	if (!path || strncmp(path, NODE_PREFIX, sizeof(NODE_PREFIX) - 1) || !emu_configured())
		return NULL;
	return emu_device_by_node(path);
}

/* A device, or with none the connection manager's. */
static int open_node(struct emu_device *d, int flags)
{
	int fd = emu_foreign() ? -EIO : d ? emu_node_open(d, flags) : emu_cm_open(flags);

	if (fd >= 0)
		return fd;
	errno = -fd;
	return -1;
}

/* libibverbs looks below SYSFS_PATH by itself; programs that read files of /sys/class/infiniband know nothing of that. Under
 * `aiordma emulate`, where the variable is set, they are led there: `buf` or the path itself. Listing folders isn't. */
static const char *sysfs_path(const char *path, char *buf, size_t size)
{
	static const char real[] = "/sys", part[] = "/sys/class/infiniband";
	const char *root;
	int n;

	if (!path || strncmp(path, part, sizeof(part) - 1) || !emu_configured())
		return path;
	root = getenv("SYSFS_PATH");
	if (!root)
		return path;
	n = snprintf(buf, size, "%s%s", root, path + sizeof(real) - 1);
	return n > 0 && (size_t)n < size ? buf : path;
}

int emu_hook_open(const char *path, int flags, mode_t mode)
{
	struct emu_device *d = node_of(path);
	char buf[PATH_MAX];

	emu_real_init();
	if (d || emu_cm_is_node(path))
		return open_node(d, flags);
	return emu_real.open(sysfs_path(path, buf, sizeof(buf)), flags, mode);
}

int emu_hook_openat(int dirfd, const char *path, int flags, mode_t mode)
{
	struct emu_device *d = node_of(path);
	char buf[PATH_MAX];

	emu_real_init();
	if (d || emu_cm_is_node(path))
		return open_node(d, flags);
	return real_openat(dirfd, sysfs_path(path, buf, sizeof(buf)), flags, mode);
}

static void fill_node_stat(const struct emu_device *d, struct stat *st)
{
	st->st_mode = S_IFCHR | 0666; /* as uverbs_devnode() in core/uverbs_main.c and ucma_misc in core/ucma.c */
	st->st_rdev = d ? makedev(EMU_UVERBS_MAJOR, emu_node_rdev_minor(d)) : makedev(EMU_CM_MAJOR, EMU_CM_MINOR);
	st->st_size = 0;
	st->st_blocks = 0;
}

int emu_hook_stat_path(const char *path, struct stat *st)
{
	struct emu_device *d = node_of(path);
	char buf[PATH_MAX];

	if (!d && !emu_cm_is_node(path)) {
		const char *at = sysfs_path(path, buf, sizeof(buf));

		if (at == path)
			return 0;
		return fstatat(AT_FDCWD, at, st, 0) ? -1 : 1;
	}
	memset(st, 0, sizeof(*st));
	st->st_nlink = 1;
	st->st_blksize = EMU_PAGE;
	fill_node_stat(d, st);
	return 1;
}

void emu_hook_fstat_fix(int fd, struct stat *st)
{
	struct emu_file *f;

	/* A dup() that no hook saw is a regular file of the file system that our descriptors are on. */
	if (!emu_fd_known(fd) && !(S_ISREG(st->st_mode) && st->st_dev == emu_node_st_dev()))
		return;
	if (emu_foreign())
		return;
	emu_node_adopt(fd);
	emu_lock();
	f = emu_fd_get(fd);
	if (f && f->kind == EMU_FILE_NODE)
		fill_node_stat(f->ctx->dev, st);
	else if (f && f->kind == EMU_FILE_CM)
		fill_node_stat(NULL, st);
	emu_unlock();
}

/* ---------------------------------------------------------------- commands */

/* The context behind a descriptor, with the lock held; NULL and errno, or 0 in *error if it isn't a node at all. */
static struct emu_ucontext *lock_context(int fd, int *error)
{
	struct emu_file *f;

	*error = 0;
	if (!emu_fd_known(fd))
		return NULL;
	if (emu_foreign()) {
		*error = EIO;
		return NULL;
	}
	emu_lock();
	f = emu_fd_get(fd);
	/* In a fork() child a few commands work that need no device thread. */
	if (f && f->ctx && (f->kind == EMU_FILE_NODE || f->kind == EMU_FILE_DEAD))
		return f->ctx;
	if (f && f->kind == EMU_FILE_DEAD)
		*error = EIO;
	emu_unlock();
	return NULL;
}

/* Without the lock, for the device to go on. */
static void settle(void)
{
	struct timespec t = { 0, EMU_SETTLE_US * 1000l };

	emu_engine_wake();
	nanosleep(&t, NULL);
}

int emu_hook_ioctl(int fd, unsigned long request, void *arg)
{
	struct emu_ucontext *ctx;
	int error = 0;

	emu_real_init();
	if (request != RDMA_VERBS_IOCTL)
		return emu_real.ioctl(fd, request, arg);
	if (!emu_fd_known(fd) && !emu_foreign())
		emu_node_adopt(fd);
	if (emu_fd_known(fd) && (error = inject_ioctl(fd, arg)))
		goto out;
	for (int tries = 0;; tries++) {
		ctx = lock_context(fd, &error);
		if (!ctx)
			break;
		error = emu.legacy_write ? ENOTTY : emu_ioctl(ctx, arg, tries == EMU_SETTLE_TRIES);
		emu_unlock();
		if (error != EMU_SETTLE)
			break;
		settle();
	}
	if (!ctx && !error)
		return emu_real.ioctl(fd, request, arg);
out:
	if (!error)
		return 0;
	errno = error;
	return -1;
}

/* The connection manager's file behind a descriptor, which is the caller's to put; NULL if it's none. */
static struct cm_file *get_cm_file(int fd)
{
	struct cm_file *cm = NULL;
	struct emu_file *f;

	if (emu_foreign())
		return NULL;
	emu_lock();
	f = emu_fd_get(fd);
	if (f && f->kind == EMU_FILE_CM) {
		cm = f->cm;
		cm_file_get(cm);
	}
	emu_unlock();
	return cm;
}

static ssize_t write_cm(struct cm_file *cm, int fd, const void *buf, size_t len)
{
	ssize_t n = emu_cm_write(cm, fd, buf, len);

	cm_file_put(cm);
	if (n >= 0)
		return n;
	errno = (int)-n;
	return -1;
}

ssize_t emu_hook_write(int fd, const void *buf, size_t len)
{
	struct emu_ucontext *ctx;
	struct cm_file *cm;
	ssize_t n;
	int error;

	emu_real_init();
	if (!emu_fd_known(fd))
		return emu_real.write(fd, buf, len);
	cm = get_cm_file(fd);
	if (cm)
		return write_cm(cm, fd, buf, len);
	error = inject_write(fd, buf, len);
	if (error) {
		errno = error;
		return -1;
	}
	for (int tries = 0;; tries++) {
		ctx = lock_context(fd, &error);
		if (!ctx)
			break;
		n = ctx->inherited ? -EIO : emu_write(ctx, buf, len, tries == EMU_SETTLE_TRIES);
		emu_unlock();
		if (n >= 0)
			return n;
		error = (int)-n;
		if (error != EMU_SETTLE)
			break;
		settle();
	}
	if (!ctx && !error)
		return emu_real.write(fd, buf, len);
	errno = error;
	return -1;
}

/* ---------------------------------------------------------------- mappings */

void *emu_hook_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	struct emu_ucontext *ctx;
	void *map;
	int error;

	emu_real_init();
	if (fd < 0 || !emu_fd_known(fd))
		return emu_real.mmap(addr, len, prot, flags, fd, offset);
	ctx = lock_context(fd, &error);
	if (ctx) {
		map = emu_uar_mmap(ctx, addr, len, prot, offset);
		error = errno;
		emu_unlock();
		if (map != MAP_FAILED)
			return map;
	} else if (!error) {
		return emu_real.mmap(addr, len, prot, flags, fd, offset);
	}
	errno = error;
	return MAP_FAILED;
}

int emu_hook_munmap(void *addr, size_t len)
{
	emu_real_init();
	emu_uar_unmap_range(addr, len);
	return emu_real.munmap(addr, len);
}

/* ---------------------------------------------------------------- the rest */

int emu_hook_close(int fd)
{
	emu_real_init();
	if (!emu_fd_known(fd) || emu_foreign())
		return emu_real.close(fd);
	return emu_fd_close(fd);
}

/* libibverbs asks the kernel over netlink for its devices first, and reads sysfs only if it can't (libibverbs/init.c).
 * On a machine with RDMA of its own the answer would be that machine's devices. */
int emu_hook_socket(int domain, int type, int protocol)
{
	emu_real_init();
	if (domain == AF_NETLINK && protocol == NETLINK_RDMA && emu_configured()) {
		errno = EPROTONOSUPPORT;
		return -1;
	}
	return real_socket(domain, type, protocol);
}

/* libibverbs loads its providers when it first lists devices: they need the hooks as well. */
void *emu_hook_dlopen(const char *path, int flags)
{
	void *handle;

	emu_real_init();
	handle = real_dlopen(path, flags);
	if (handle)
		emu_attach_loaded();
	return handle;
}

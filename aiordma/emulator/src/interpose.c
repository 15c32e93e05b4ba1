/* SPDX-License-Identifier: MIT
 * The C library's names, for LD_PRELOAD. Each passes to hooks.c.
 *
 * The functions have names of their own and get the library's by an asm label: the headers declare some of the latter
 * as inline functions when the build fortifies, and glibc has several for one call, by the age of the program's build
 * (__xstat before 2.33) or by its options (open64, __open_2).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <unistd.h>

#include "control.h"

#define NAMED(name) __asm__(name) EMU_EXPORT

/* O_CREAT and O_TMPFILE are what makes open() have a third argument; the values are those of linux/fcntl.h. */
#define TAKES_MODE(flags) (((flags) & 0100) || ((flags) & 020000000))

int emu_name_open(const char *path, int flags, ...) NAMED("open");
int emu_name_open64(const char *path, int flags, ...) NAMED("open64");
int emu_name_open_2(const char *path, int flags) NAMED("__open_2");
int emu_name_open64_2(const char *path, int flags) NAMED("__open64_2");
int emu_name_openat(int dirfd, const char *path, int flags, ...) NAMED("openat");
int emu_name_openat64(int dirfd, const char *path, int flags, ...) NAMED("openat64");
int emu_name_openat_2(int dirfd, const char *path, int flags) NAMED("__openat_2");
int emu_name_openat64_2(int dirfd, const char *path, int flags) NAMED("__openat64_2");
int emu_name_stat(const char *path, struct stat *st) NAMED("stat");
int emu_name_stat64(const char *path, struct stat *st) NAMED("stat64");
int emu_name_xstat(int version, const char *path, struct stat *st) NAMED("__xstat");
int emu_name_xstat64(int version, const char *path, struct stat *st) NAMED("__xstat64");
int emu_name_fstat(int fd, struct stat *st) NAMED("fstat");
int emu_name_fstat64(int fd, struct stat *st) NAMED("fstat64");
int emu_name_fxstat(int version, int fd, struct stat *st) NAMED("__fxstat");
int emu_name_fxstat64(int version, int fd, struct stat *st) NAMED("__fxstat64");
int emu_name_access(const char *path, int mode) NAMED("access");
int emu_name_faccessat(int dirfd, const char *path, int mode, int flags) NAMED("faccessat");
int emu_name_ioctl(int fd, unsigned long request, ...) NAMED("ioctl");
ssize_t emu_name_write(int fd, const void *buf, size_t len) NAMED("write");
void *emu_name_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset) NAMED("mmap");
void *emu_name_mmap64(void *addr, size_t len, int prot, int flags, int fd, off_t offset) NAMED("mmap64");
int emu_name_munmap(void *addr, size_t len) NAMED("munmap");
int emu_name_close(int fd) NAMED("close");
int emu_name_socket(int domain, int type, int protocol) NAMED("socket");

static mode_t mode_argument(int flags, va_list *args)
{
	return TAKES_MODE(flags) ? (mode_t)va_arg(*args, int) : 0;
}

#define OPEN_BODY(call)                          \
	va_list args;                            \
	mode_t mode;                             \
	va_start(args, flags);                   \
	mode = mode_argument(flags, &args);      \
	va_end(args);                            \
	return call

int emu_name_open(const char *path, int flags, ...)
{
	OPEN_BODY(emu_hook_open(path, flags, mode));
}

int emu_name_open64(const char *path, int flags, ...)
{
	OPEN_BODY(emu_hook_open(path, flags, mode));
}

int emu_name_openat(int dirfd, const char *path, int flags, ...)
{
	OPEN_BODY(emu_hook_openat(dirfd, path, flags, mode));
}

int emu_name_openat64(int dirfd, const char *path, int flags, ...)
{
	OPEN_BODY(emu_hook_openat(dirfd, path, flags, mode));
}

int emu_name_open_2(const char *path, int flags)
{
	return emu_hook_open(path, flags, 0);
}

int emu_name_open64_2(const char *path, int flags)
{
	return emu_hook_open(path, flags, 0);
}

int emu_name_openat_2(int dirfd, const char *path, int flags)
{
	return emu_hook_openat(dirfd, path, flags, 0);
}

int emu_name_openat64_2(int dirfd, const char *path, int flags)
{
	return emu_hook_openat(dirfd, path, flags, 0);
}

/* The real ones by name: which exist depends on the C library. struct stat and struct stat64 are the same on the
 * 64-bit machines that this runs on. */
#define NEXT(type, name)                                            \
	static type found;                                          \
	type next = __atomic_load_n(&found, __ATOMIC_RELAXED);      \
	if (!next) {                                                \
		next = (type)dlsym(RTLD_NEXT, name);                \
		__atomic_store_n(&found, next, __ATOMIC_RELAXED);   \
	}                                                           \
	if (!next) {                                                \
		errno = ENOSYS;                                     \
		return -1;                                          \
	}

typedef int (*stat_fn)(const char *, struct stat *);
typedef int (*xstat_fn)(int, const char *, struct stat *);
typedef int (*fstat_fn)(int, struct stat *);
typedef int (*fxstat_fn)(int, int, struct stat *);

#define STAT_BODY(name)                                                        \
	int ours;                                                               \
	NEXT(stat_fn, name)                                                    \
	ours = emu_hook_stat_path(path, st);                                    \
	return ours ? ours - (ours > 0) : next(path, st)
#define XSTAT_BODY(name)                                                       \
	int ours;                                                               \
	NEXT(xstat_fn, name)                                                   \
	ours = emu_hook_stat_path(path, st);                                    \
	return ours ? ours - (ours > 0) : next(version, path, st)
#define FSTAT_BODY(type, name, ...)                                            \
	int ret;                                                               \
	NEXT(type, name)                                                       \
	ret = next(__VA_ARGS__, st);                                           \
	if (!ret)                                                              \
		emu_hook_fstat_fix(fd, st);                                    \
	return ret

int emu_name_stat(const char *path, struct stat *st)
{
	STAT_BODY("stat");
}

int emu_name_stat64(const char *path, struct stat *st)
{
	STAT_BODY("stat64");
}

int emu_name_xstat(int version, const char *path, struct stat *st)
{
	XSTAT_BODY("__xstat");
}

int emu_name_xstat64(int version, const char *path, struct stat *st)
{
	XSTAT_BODY("__xstat64");
}

int emu_name_fstat(int fd, struct stat *st)
{
	FSTAT_BODY(fstat_fn, "fstat", fd);
}

int emu_name_fstat64(int fd, struct stat *st)
{
	FSTAT_BODY(fstat_fn, "fstat64", fd);
}

int emu_name_fxstat(int version, int fd, struct stat *st)
{
	FSTAT_BODY(fxstat_fn, "__fxstat", version, fd);
}

int emu_name_fxstat64(int version, int fd, struct stat *st)
{
	FSTAT_BODY(fxstat_fn, "__fxstat64", version, fd);
}

/* Programs ask before they open, as UCX does. Everybody may read and write a node; nobody may execute it, not even root:
 * inode_permission() in fs/namei.c. */
static bool node_access(const char *path, int mode, int *answer)
{
	struct stat st;
	int ours = emu_hook_stat_path(path, &st);

	if (!ours)
		return false;
	*answer = ours < 0 || (S_ISCHR(st.st_mode) && mode & X_OK) ? -1 : 0;
	if (ours > 0 && *answer)
		errno = EACCES;
	return true;
}

typedef int (*access_fn)(const char *, int);
typedef int (*faccessat_fn)(int, const char *, int, int);

int emu_name_access(const char *path, int mode)
{
	int answer;
	NEXT(access_fn, "access")

	return node_access(path, mode, &answer) ? answer : next(path, mode);
}

int emu_name_faccessat(int dirfd, const char *path, int mode, int flags)
{
	int answer;
	NEXT(faccessat_fn, "faccessat")

	return node_access(path, mode, &answer) ? answer : next(dirfd, path, mode, flags);
}

int emu_name_ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	void *arg;

	va_start(args, request);
	arg = va_arg(args, void *);
	va_end(args);
	return emu_hook_ioctl(fd, request, arg);
}

ssize_t emu_name_write(int fd, const void *buf, size_t len)
{
	return emu_hook_write(fd, buf, len);
}

void *emu_name_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	return emu_hook_mmap(addr, len, prot, flags, fd, offset);
}

void *emu_name_mmap64(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	return emu_hook_mmap(addr, len, prot, flags, fd, offset);
}

int emu_name_munmap(void *addr, size_t len)
{
	return emu_hook_munmap(addr, len);
}

int emu_name_close(int fd)
{
	return emu_hook_close(fd);
}

int emu_name_socket(int domain, int type, int protocol)
{
	return emu_hook_socket(domain, type, protocol);
}

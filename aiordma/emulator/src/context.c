/* SPDX-License-Identifier: MIT
 * Open device nodes: descriptors, the context behind each, and fork.
 *
 * The descriptor an application gets is a memfd. It's made only so that the number is taken and the open file has an
 * inode of its own: by the inode a dup() is recognised, and so is a number that was closed where no hook saw it and has
 * become something else. The stat hooks dress it up as the character device that libibverbs insists on.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cm.h"
#include "dm.h"
#include "pp.h"

struct emu_world emu = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.contexts = { &emu.contexts, &emu.contexts },
};

/* The data half has the real ones. */
void __attribute__((weak)) emu_lock(void)
{
	pthread_mutex_lock(&emu.lock);
}

void __attribute__((weak)) emu_unlock(void)
{
	pthread_mutex_unlock(&emu.lock);
}

void __attribute__((weak)) emu_engine_forked(void)
{
}

/* ---------------------------------------------------------------- descriptors
 * Two levels, pages of it never freed, so that hooks may look without the lock. */

#define FD_PAGE 1024
#define FD_PAGES 1024 /* up to NR_OPEN's default of a million */

static struct emu_file *fd_pages[FD_PAGES];

static struct emu_file *fd_slot(int fd)
{
	struct emu_file *page;

	if (fd < 0 || fd >= FD_PAGE * FD_PAGES)
		return NULL;
	page = __atomic_load_n(&fd_pages[fd / FD_PAGE], __ATOMIC_ACQUIRE);
	return page ? page + fd % FD_PAGE : NULL;
}

bool emu_fd_known(int fd)
{
	const struct emu_file *f = fd_slot(fd);

	return f && __atomic_load_n(&f->kind, __ATOMIC_ACQUIRE) != EMU_FILE_NONE;
}

/* Not fstat(): when we are preloaded that is our own hook, which takes the lock. */
static int real_fstat(int fd, struct stat *st)
{
	return fstatat(fd, "", st, AT_EMPTY_PATH);
}

static bool same_inode(int fd, uint64_t dev, uint64_t ino)
{
	struct stat st;

	return !real_fstat(fd, &st) && st.st_dev == dev && st.st_ino == ino;
}

static void context_unref_fd(struct emu_ucontext *);

struct emu_file *emu_fd_get(int fd)
{
	struct emu_file *f = fd_slot(fd);

	if (!f || f->kind == EMU_FILE_NONE)
		return NULL;
	if (same_inode(fd, f->dev, f->ino))
		return f;
	emu_log(EMU_DEBUG, "descriptor %d was closed behind our back", fd);
	emu_fd_clear(fd);
	return NULL;
}

int emu_fd_set(int fd, enum emu_file_kind kind, struct emu_ucontext *ctx, struct emu_channel *channel)
{
	struct emu_file *f;
	struct stat st;

	if (fd < 0 || fd >= FD_PAGE * FD_PAGES)
		return EMFILE;
	if (!fd_pages[fd / FD_PAGE]) {
		struct emu_file *page = calloc(FD_PAGE, sizeof(*page));

		if (!page)
			return ENOMEM;
		__atomic_store_n(&fd_pages[fd / FD_PAGE], page, __ATOMIC_RELEASE);
	}
	if (real_fstat(fd, &st))
		return errno;
	f = fd_slot(fd);
	f->dev = st.st_dev;
	f->ino = st.st_ino;
	f->ctx = ctx;
	f->channel = channel;
	f->cm = NULL;
	__atomic_store_n(&f->kind, kind, __ATOMIC_RELEASE);
	return 0;
}

void emu_fd_forget(int fd)
{
	struct emu_file *f = fd_slot(fd);

	if (!f)
		return;
	f->ctx = NULL;
	f->channel = NULL;
	f->cm = NULL;
	__atomic_store_n(&f->kind, EMU_FILE_NONE, __ATOMIC_RELEASE);
}

void emu_fd_clear(int fd)
{
	struct emu_file *f = fd_slot(fd);
	struct emu_file was;

	if (!f || f->kind == EMU_FILE_NONE)
		return;
	was = *f;
	emu_fd_forget(fd);
	if (was.kind == EMU_FILE_NODE)
		context_unref_fd(was.ctx);
	else if (was.kind == EMU_FILE_CHANNEL)
		emu_channel_put(was.channel);
	else if (was.kind == EMU_FILE_CM)
		cm_file_orphan(was.cm);
}

/* ---------------------------------------------------------------- fork
 * A child shares descriptors, not memory: its copy of our objects stands for nothing. It may open the device anew;
 * what it inherited answers EIO, as a device that was unplugged does. */

static pid_t owner_pid;

bool emu_foreign(void)
{
	pid_t owner = __atomic_load_n(&owner_pid, __ATOMIC_RELAXED);

	return owner && getpid() != owner;
}

/* Held around the start and stop of the device thread, which must be called without emu.lock. */
static pthread_mutex_t lifecycle = PTHREAD_MUTEX_INITIALIZER;
static bool engine_running;

static void before_fork(void)
{
	pthread_mutex_lock(&lifecycle);
	emu_lock();
	cm_before_fork();
}

static void after_fork_in_parent(void)
{
	cm_after_fork(false);
	emu_unlock();
	pthread_mutex_unlock(&lifecycle);
}

static void after_fork_in_child(void)
{
	pthread_mutex_init(&emu.lock, NULL);
	pthread_mutex_init(&lifecycle, NULL);
	engine_running = false;
	__atomic_store_n(&owner_pid, getpid(), __ATOMIC_RELAXED);
	for (unsigned p = 0; p < FD_PAGES; p++)
		for (unsigned i = 0; fd_pages[p] && i < FD_PAGE; i++) {
			struct emu_file *f = &fd_pages[p][i];

			/* The pipes go on working as pipes. */
			f->kind = f->kind == EMU_FILE_NODE || f->kind == EMU_FILE_CM || f->kind == EMU_FILE_DEAD ?
					  EMU_FILE_DEAD :
					  EMU_FILE_NONE;
			if (f->kind == EMU_FILE_DEAD && f->ctx)
				f->ctx->inherited = true;
			else
				f->ctx = NULL;
			f->channel = NULL;
			f->cm = NULL;
		}
	/* The memory of the parent's objects is not freed: the device thread may have been using it. */
	list_init(&emu.contexts);
	for (uint32_t i = 0; i < emu.ndevices; i++) {
		struct emu_device *d = &emu.devices[i];

		d->qps = NULL;
		d->cqs = NULL;
		d->srqs = NULL;
		d->mkeys = NULL;
		d->qps_size = d->cqs_size = d->srqs_size = d->mkeys_size = 0;
		memset(d->count, 0, sizeof(d->count));
	}
	umem_reset();
	emu_pp_forked();
	emu_mmio_forked();
	emu_engine_forked();
	cm_after_fork(true);
}

/* ---------------------------------------------------------------- contexts */

static uint64_t node_st_dev;

uint64_t emu_node_st_dev(void)
{
	return __atomic_load_n(&node_st_dev, __ATOMIC_RELAXED);
}

uint32_t emu_open_contexts(void)
{
	uint32_t n = 0;

	emu_lock();
	for (struct emu_list *l = emu.contexts.next; l != &emu.contexts; l = l->next)
		n++;
	emu_unlock();
	return n;
}

/* Finds a dup() of a context's node that no hook saw. */
static int find_dup(const struct emu_ucontext *ctx)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *e;
	int found = -1;

	if (!dir)
		return -1;
	while (found < 0 && (e = readdir(dir))) {
		int fd = atoi(e->d_name);

		if (e->d_name[0] != '.' && fd != dirfd(dir) && same_inode(fd, ctx->node_dev, ctx->node_ino))
			found = fd;
	}
	closedir(dir);
	return found;
}

/* The last descriptor is gone: the kernel's ib_uverbs_close() (core/uverbs_main.c). */
static void context_free(struct emu_ucontext *ctx)
{
	emu_log(EMU_DEBUG, "%s: context closed", ctx->dev->name);
	emu_context_destroy_objects(ctx);
	list_del(&ctx->link);
	free(ctx->handles);
	free(ctx->channels);
	free(ctx);
}

static void context_unref_fd(struct emu_ucontext *ctx)
{
	int fd;

	if (--ctx->nfds)
		return;
	fd = find_dup(ctx);
	if (fd >= 0 && !emu_fd_set(fd, EMU_FILE_NODE, ctx, NULL)) {
		ctx->fd = fd;
		ctx->nfds = 1;
		return;
	}
	context_free(ctx);
}

/* Contexts whose descriptors were all closed by calls that no hook saw. */
static void sweep(void)
{
	for (int p = 0; p < FD_PAGES; p++)
		for (int i = 0; fd_pages[p] && i < FD_PAGE; i++)
			if (fd_pages[p][i].kind == EMU_FILE_NODE || fd_pages[p][i].kind == EMU_FILE_CM)
				emu_fd_get(p * FD_PAGE + i);
}

/* After closing: the thread may have nothing left to serve. */
static void engine_stop_if_idle(void)
{
	bool idle;

	emu_lock();
	idle = list_empty(&emu.contexts);
	emu_unlock();
	if (idle && engine_running) {
		emu_engine_stop();
		engine_running = false;
	}
}

static void register_fork_handlers(void)
{
	static bool done;

	if (!done)
		pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
	done = true;
	__atomic_store_n(&owner_pid, getpid(), __ATOMIC_RELAXED);
}

static int context_new(struct emu_device *d, int flags)
{
	static uint32_t serial;
	struct emu_ucontext *ctx = calloc(1, sizeof(*ctx));
	char name[EMU_NAME_MAX + 16];
	struct stat st;
	int fd, err;

	if (!ctx)
		return -ENOMEM;
	snprintf(name, sizeof(name), "aiordma-%s", d->name);
	fd = memfd_create(name, flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	if (fd < 0) {
		err = errno;
		goto fail;
	}
	/* Its own writes and reads are never used; a stray read() must not block, nor a stray mmap() see anything. */
	fcntl(fd, F_SETFL, flags & O_NONBLOCK);
	ctx->fd = fd;
	ctx->dev = d;
	ctx->owner = getpid();
	ctx->tag = (uint64_t)ctx->owner << 32 | ++serial;
	ctx->nfds = 1;
	list_init(&ctx->uars);
	err = real_fstat(fd, &st) ? errno : emu_fd_set(fd, EMU_FILE_NODE, ctx, NULL);
	if (err) {
		emu_real.close(fd);
		goto fail;
	}
	ctx->node_dev = st.st_dev;
	ctx->node_ino = st.st_ino;
	__atomic_store_n(&node_st_dev, st.st_dev, __ATOMIC_RELAXED);
	list_add_tail(&emu.contexts, &ctx->link);
	emu_log(EMU_DEBUG, "%s: context opened, descriptor %d", d->name, fd);
	return fd;
fail:
	free(ctx);
	return -err;
}

int emu_node_open(struct emu_device *d, int flags)
{
	int fd, err = 0;

	pthread_mutex_lock(&lifecycle);
	register_fork_handlers();
	emu_lock();
	sweep();
	fd = context_new(d, flags);
	emu_unlock();
	if (fd >= 0 && !engine_running) {
		err = emu_engine_start();
		engine_running = !err;
	}
	pthread_mutex_unlock(&lifecycle);
	if (err) {
		emu_log(EMU_ERROR, "%s: no device thread: %s", d->name, strerror(err));
		emu_fd_close(fd);
		return -err;
	}
	return fd;
}

int emu_cm_open(int flags)
{
	struct cm_file *f;
	int fd, err;

	pthread_mutex_lock(&lifecycle);
	register_fork_handlers();
	emu_lock();
	sweep();
	emu_unlock();
	cm_file_reap();
	fd = cm_file_open(flags, &f);
	if (fd >= 0) {
		emu_lock();
		err = emu_fd_set(fd, EMU_FILE_CM, NULL, NULL);
		if (!err)
			fd_slot(fd)->cm = f;
		emu_unlock();
		if (err) {
			emu_real.close(fd);
			cm_file_close(f);
			fd = -err;
		}
	}
	pthread_mutex_unlock(&lifecycle);
	return fd;
}

void emu_node_adopt(int fd)
{
	struct stat st;

	emu_lock();
	if (!emu_fd_get(fd) && !real_fstat(fd, &st))
		for (struct emu_list *l = emu.contexts.next; l != &emu.contexts; l = l->next) {
			struct emu_ucontext *ctx = container_of(l, struct emu_ucontext, link);

			if (ctx->node_dev != st.st_dev || ctx->node_ino != st.st_ino)
				continue;
			if (!emu_fd_set(fd, EMU_FILE_NODE, ctx, NULL))
				ctx->nfds++;
			break;
		}
	emu_unlock();
}

int emu_fd_close(int fd)
{
	struct emu_ucontext *ctx = NULL;
	struct cm_file *cm = NULL;
	struct emu_file *f;
	int ret;

	pthread_mutex_lock(&lifecycle);
	emu_lock();
	f = emu_fd_get(fd);
	if (f && f->kind == EMU_FILE_NODE) {
		ctx = f->ctx;
		emu_fd_forget(fd);
	} else if (f && f->kind == EMU_FILE_CM) {
		cm = f->cm;
		emu_fd_forget(fd);
	} else {
		emu_fd_clear(fd);
	}
	/* After the table: the number may be another thread's in an instant. Before the context: what is still open must
	 * not count this one. */
	ret = emu_real.close(fd);
	if (ctx)
		context_unref_fd(ctx);
	emu_unlock();
	if (ctx)
		engine_stop_if_idle();
	if (cm) {
		cm_file_close(cm);
		cm_file_reap();
	}
	pthread_mutex_unlock(&lifecycle);
	return ret;
}

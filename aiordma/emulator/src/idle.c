/* SPDX-License-Identifier: MIT
 * Sleeping until there is work.
 *
 * A doorbell is a store to memory, and nothing wakes a thread when memory changes - except a page fault. So before it
 * sleeps the device thread has the kernel write-protect the UAR pages (userfaultfd(2), in its user-mode-only form, which
 * needs no privilege): the first store to one stops the storing thread, the device thread reads the event, lifts the
 * protection, and both go on. Where the system refuses userfaultfd, the thread naps. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nic.h"
#include "wire.h"

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

static int uffd = -1, wake_fd = -1;
static bool asleep, kicked; /* atomic */
static bool released;
static cpu_set_t allowed;

/* ---------------------------------------------------------------- userfaultfd */

static int open_uffd(uint64_t features, uint64_t *have)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);

	if (fd < 0)
		return -1;
	if (emu_real.ioctl(fd, UFFDIO_API, &api)) {
		emu_real.close(fd);
		return -1;
	}
	*have = api.features;
	return fd;
}

/* Features are asked for when the descriptor is set up, which can be done once; so one descriptor finds out and another
 * is used. */
static int open_watcher(void)
{
	uint64_t have = 0;
	int fd = open_uffd(0, &have);

	if (fd < 0)
		return -1;
	emu_real.close(fd);
	have &= UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_THREAD_ID
#ifdef UFFD_FEATURE_WP_HUGETLBFS_SHMEM
		| UFFD_FEATURE_WP_HUGETLBFS_SHMEM
#endif
		;
	return have & UFFD_FEATURE_PAGEFAULT_FLAG_WP ? open_uffd(have, &have) : -1;
}

static struct uffdio_range page_range(const struct nic_uar *u)
{
	return (struct uffdio_range){ .start = (uintptr_t)u->uar->page & ~(uint64_t)(EMU_PAGE - 1), .len = EMU_PAGE };
}

static bool protect(struct uffdio_range range, bool on)
{
	struct uffdio_writeprotect wp = { .range = range, .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0 };
	int tries = 100;

	/* EAGAIN: the address space is changing under it, userfaultfd(2). */
	while (emu_real.ioctl(uffd, UFFDIO_WRITEPROTECT, &wp)) {
		if (errno != EAGAIN || !--tries)
			return false;
	}
	return true;
}

static bool register_page(struct nic_uar *u)
{
	struct uffdio_register r = { .range = page_range(u), .mode = UFFDIO_REGISTER_MODE_WP };

	if (u->registered)
		return true;
	if (emu_real.ioctl(uffd, UFFDIO_REGISTER, &r)) {
		emu_log(EMU_INFO, "cannot watch a UAR page: errno %d; naps instead", errno);
		return false;
	}
	/* Only a page that is there can be protected. Adding nothing puts it there, and loses no doorbell. */
	__atomic_fetch_add((uint32_t *)(volatile void *)u->uar->page, 0, __ATOMIC_RELAXED);
	u->registered = true;
	return true;
}

bool idle_arm(void)
{
	bool all = uffd >= 0;

	for (struct emu_list *l = nic_uars.next; l != &nic_uars && all; l = l->next) {
		struct nic_uar *u = container_of(l, struct nic_uar, link);

		if (!u->armed)
			u->armed = register_page(u) && protect(page_range(u), true);
		all = u->armed;
	}
	if (uffd >= 0 && !all) {
		idle_disarm();
		emu_real.close(uffd);
		uffd = -1;
	}
	return all;
}

void idle_disarm(void)
{
	for (struct emu_list *l = nic_uars.next; l != &nic_uars; l = l->next) {
		struct nic_uar *u = container_of(l, struct nic_uar, link);

		if (u->armed)
			protect(page_range(u), false);
		u->armed = false;
	}
}

void idle_page_removed(struct nic_uar *u)
{
	struct uffdio_range range = page_range(u);

	if (u->armed)
		protect(range, false);
	if (u->registered && uffd >= 0)
		emu_real.ioctl(uffd, UFFDIO_UNREGISTER, &range);
	u->armed = u->registered = false;
}

/* The CPU a thread of ours runs on, or ran on last; -1: unknown. proc(5), the 39th field of /proc/pid/stat. */
static int cpu_of(uint32_t tid)
{
	char path[48], text[1024], *field;
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "/proc/self/task/%u/stat", tid);
	fd = emu_real.open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	n = emu_real.read(fd, text, sizeof(text) - 1);
	emu_real.close(fd);
	text[n > 0 ? n : 0] = 0;
	field = strrchr(text, ')'); /* the end of the 2nd */
	for (int i = 2; field && i < 39; i++)
		field = strchr(field + 1, ' ');
	return field ? atoi(field) : -1;
}

/* A doorbell's thread is about to poll for its completion, and on few CPUs the scheduler is likely to have put us on the
 * very CPU it does that on, and to leave us there: Linux doesn't search for an idle one when the CPUs that share a cache
 * are busy (SIS_UTIL in kernel/sched/fair.c). It would be milliseconds before either made progress. So step aside, if
 * there is another CPU. */
static void leave_cpu_of(uint32_t tid)
{
	int cpu = sched_getcpu();
	cpu_set_t others = allowed;

	if (!tid || cpu < 0 || cpu >= CPU_SETSIZE || cpu_of(tid) != cpu)
		return;
	CPU_CLR(cpu, &others);
	if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof(others), &others))
		sched_setaffinity(0, sizeof(allowed), &allowed);
}

void idle_release_writers(void)
{
	struct uffd_msg m;

	while (uffd >= 0 && emu_real.read(uffd, &m, sizeof(m)) == (ssize_t)sizeof(m)) {
		struct uffdio_range range = { .len = EMU_PAGE };

		if (m.event != UFFD_EVENT_PAGEFAULT)
			continue;
		leave_cpu_of(m.arg.pagefault.feat.ptid);
		range.start = m.arg.pagefault.address & ~(uint64_t)(EMU_PAGE - 1);
		protect(range, false);
		released = true;
	}
}

bool idle_released_writer(void)
{
	bool was = released;

	released = false;
	return was;
}

/* ---------------------------------------------------------------- sleeping */

bool idle_sleep(uint64_t ns)
{
	/* A descriptor of -1 is passed over: poll(2). */
	struct pollfd fds[3] = {
		{ .fd = wake_fd, .events = POLLIN }, { .fd = uffd, .events = POLLIN }, { .fd = wire_fd(), .events = POLLIN },
	};
	struct timespec t = { .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
	uint64_t count;
	int n = 1;

	__atomic_store_n(&asleep, true, __ATOMIC_SEQ_CST);
	if (!__atomic_exchange_n(&kicked, false, __ATOMIC_SEQ_CST)) {
		n = ppoll(fds, 3, ns == UINT64_MAX ? NULL : &t, NULL);
		__atomic_store_n(&kicked, false, __ATOMIC_SEQ_CST);
	}
	__atomic_store_n(&asleep, false, __ATOMIC_SEQ_CST);
	while (emu_real.read(wake_fd, &count, sizeof(count)) > 0)
		;
	if (fds[2].revents)
		wire_woken();
	return n > 0;
}

void idle_wake(void)
{
	uint64_t one = 1;

	__atomic_store_n(&kicked, true, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&asleep, __ATOMIC_SEQ_CST) && emu_real.write(wake_fd, &one, sizeof(one)) < 0)
		return; /* the counter is full: it's awake already */
}

int idle_init(void)
{
	wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (wake_fd < 0)
		return errno;
	uffd = emu.use_uffd ? open_watcher() : -1;
	if (sched_getaffinity(0, sizeof(allowed), &allowed))
		CPU_ZERO(&allowed);
	emu_log(EMU_DEBUG, "idle device %s", uffd >= 0 ? "sleeps on userfaultfd" : "naps");
	return 0;
}

void idle_fini(bool forked)
{
	/* In a fork() child the descriptors are copies; the protection is the parent's. */
	if (!forked && uffd >= 0)
		for (struct emu_list *l = nic_uars.next; l != &nic_uars; l = l->next)
			idle_page_removed(container_of(l, struct nic_uar, link));
	if (uffd >= 0)
		emu_real.close(uffd);
	if (wake_fd >= 0)
		emu_real.close(wake_fd);
	uffd = wake_fd = -1;
	__atomic_store_n(&asleep, false, __ATOMIC_SEQ_CST);
	__atomic_store_n(&kicked, false, __ATOMIC_SEQ_CST);
}

/* SPDX-License-Identifier: MIT
 * Memory of the device's that somebody took away.
 *
 * A queue, its doorbell record and a page of registers are the application's memory, and what hardware has of them is
 * pinned: a program that unmaps a queue which is still in use gets away with it, the device goes on in pages that nobody
 * else sees. Here the access is a fault. A page of zeros then stands in for the one that's gone, at the same address,
 * and the access is tried again. What the device reads there is nonsense to it, and ends in errors of the queue.
 *
 * A link's file and the registry's are mapped by all processes that use them, and one may cut them short: SIGBUS, with
 * every access from then on. There too zeros stand in, for the whole of it, which is a valid state of both, and the user
 * of it is told. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>

#include "nic.h"
#include "registry.h"
#include "wire.h"
#include "wq.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* ---------------------------------------------------------------- who is at work */

/* Written by who has emu.lock; another thread may see any of it, but never its own id with `on` set. */
static struct {
	bool on;
	pthread_t thread;
	sigset_t mask;
} command;

/* A command, on a thread of the application, which may have any signal blocked; a fault would end the process then. */
void stand_in_begin(void)
{
	sigset_t faults;

	sigemptyset(&faults);
	sigaddset(&faults, SIGSEGV);
	sigaddset(&faults, SIGBUS);
	pthread_sigmask(SIG_UNBLOCK, &faults, &command.mask);
	command.thread = pthread_self();
	__atomic_store_n(&command.on, true, __ATOMIC_RELEASE);
}

/* The mask goes back when the lock has been let go, hence the copy. */
void stand_in_end(sigset_t *mask)
{
	*mask = command.mask;
	__atomic_store_n(&command.on, false, __ATOMIC_RELEASE);
}

static bool plays_device(void)
{
	return engine_is_this_thread() ||
	       (__atomic_load_n(&command.on, __ATOMIC_ACQUIRE) && pthread_equal(command.thread, pthread_self()));
}

/* ---------------------------------------------------------------- whose page it was */

static bool within(uintptr_t address, const volatile void *start, uint64_t len)
{
	return start && address - (uintptr_t)start < len;
}

static bool of_qp(const struct emu_qp *qp, uintptr_t a)
{
	return within(a, qp->sq, (uint64_t)qp->sq_nbb * MLX5_SEND_WQE_BB) ||
	       within(a, qp->rq, (uint64_t)qp->rq_nwqe << qp->rq_shift) || within(a, qp->db, 8);
}

static bool of_cq(const struct emu_cq *cq, uintptr_t a)
{
	return within(a, cq->buf, (uint64_t)cq->ncqe * cq->cqe_size) || within(a, cq->db, 8);
}

static bool of_srq(const struct emu_srq *srq, uintptr_t a)
{
	return within(a, srq->buf, (uint64_t)srq->nwqe << srq->wqe_shift) || within(a, srq->db, 8);
}

static bool of_device(const struct emu_device *d, uintptr_t a)
{
	for (uint32_t i = 0; i < d->qps_size; i++)
		if (d->qps[i] && of_qp(d->qps[i], a))
			return true;
	for (uint32_t i = 0; i < d->cqs_size; i++)
		if (d->cqs[i] && of_cq(d->cqs[i], a))
			return true;
	for (uint32_t i = 0; i < d->srqs_size; i++)
		if (d->srqs[i] && of_srq(d->srqs[i], a))
			return true;
	return false;
}

/* Receive work queues are in no table of the device's. */
static bool of_context(const struct emu_ucontext *ctx, uintptr_t a)
{
	for (uint32_t h = 0; h < ctx->nhandles; h++) {
		const struct emu_object *o = ctx->handles[h];

		if (o && o->type == EMU_WQ && within(a, ((const struct emu_wq *)o)->db, 8))
			return true;
	}
	return false;
}

static bool of_any(uintptr_t a)
{
	for (uint32_t i = 0; i < emu.ndevices; i++)
		if (of_device(&emu.devices[i], a))
			return true;
	for (struct emu_list *l = emu.contexts.next; l != &emu.contexts; l = l->next)
		if (of_context(container_of(l, struct emu_ucontext, link), a))
			return true;
	for (struct emu_list *l = nic_uars.next; l != &nic_uars; l = l->next)
		if (within(a, container_of(l, struct nic_uar, link)->uar->page, EMU_PAGE))
			return true;
	return false;
}

/* ---------------------------------------------------------------- the page that stands in */

static bool map(uintptr_t start, size_t len, int flags)
{
	void *p = emu_real.mmap((void *)start, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	if (p != (void *)start && p != MAP_FAILED)
		emu_real.munmap(p, len); /* before Linux 4.17, without MAP_FIXED_NOREPLACE, an address is but a wish */
	return p == (void *)start;
}

static bool replace_page(uintptr_t address, int sig, int code)
{
	uintptr_t page = address & ~(uintptr_t)(EMU_PAGE - 1);

	if (sig == SIGBUS)
		return map(page, EMU_PAGE, MAP_FIXED); /* a file that is shorter than its mapping */
	if (code == SEGV_ACCERR)
		return !mprotect((void *)page, EMU_PAGE, PROT_READ | PROT_WRITE);
	return map(page, EMU_PAGE, MAP_FIXED_NOREPLACE) || errno == EEXIST;
}

bool stand_in(int sig, const siginfo_t *info)
{
	uintptr_t address = (uintptr_t)info->si_addr, start;
	size_t len;

	if (info->si_code <= 0 || !plays_device())
		return false;
	if (sig == SIGBUS && (wire_torn(address, &start, &len) || registry_torn(address, &start, &len)))
		return map(start, len, MAP_FIXED);
	if (!of_any(address) || !replace_page(address, sig, info->si_code))
		return false;
	emu_log(EMU_WARN, "the memory of a queue at 0x%lx is not there any more", (unsigned long)address);
	return true;
}

/* Payload that comes from a link or goes there is copied under fault.c's guard. */
void stand_in_noted(uintptr_t address)
{
	uintptr_t start;
	size_t len;

	wire_torn(address, &start, &len);
}

void stand_in_forked(void)
{
	if (command.on)
		pthread_sigmask(SIG_SETMASK, &command.mask, NULL);
	command.on = false;
}

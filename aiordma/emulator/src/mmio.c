/* SPDX-License-Identifier: MIT
 * Registers that do something when they are read or written: the device's clock, and addresses of device memory at which
 * an access is an atomic operation.
 *
 * Other pages that an application maps are ordinary memory, which the device looks at when it comes by. These can't be:
 * the access itself must have the effect. So nobody may access the page; the fault that comes of trying tells the
 * direction and the address. The page then gets what a read must find, and is opened for the one instruction: the
 * processor's trap flag brings the thread back right after it, to have a look at what was written and to close the page.
 *
 * The page is open to all threads for that moment. One that accesses the same mapping just then sees a plain page; accesses
 * through different mappings are in order, whatever the thread.
 *
 * Only on x86-64, where a program may set the trap flag itself; elsewhere there are no such registers. A debugger that
 * single-steps across an access gets in the way of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "nic.h"

#define MAX_REGIONS 1024

struct region {
	uintptr_t base; /* 0: unused */
	size_t len;
	enum emu_mmio kind;
	uint8_t *target;
	struct emu_ucontext *ctx;
};

/* Written with `busy` held and in an order that lets a fault handler search without it. */
static struct region regions[MAX_REGIONS];
static uint32_t nregions; /* places before this one have been in use */
static uint32_t busy;	  /* a spinning lock: fault handlers take it */

static struct region *find(uintptr_t address)
{
	uint32_t n = __atomic_load_n(&nregions, __ATOMIC_ACQUIRE);

	for (uint32_t i = 0; i < n; i++) {
		uintptr_t base = __atomic_load_n(&regions[i].base, __ATOMIC_ACQUIRE);

		if (base && address >= base && address - base < regions[i].len)
			return &regions[i];
	}
	return NULL;
}

static void lock_regions(void)
{
	while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE))
		cpu_relax();
}

static void unlock_regions(void)
{
	__atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

/* Outside of handlers: a signal's handler that accesses a register must not find its own thread in the way. */
static void lock_masked(sigset_t *old)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, old);
	lock_regions();
}

static void unlock_masked(const sigset_t *old)
{
	unlock_regions();
	pthread_sigmask(SIG_SETMASK, old, NULL);
}

#if defined(__x86_64__)

#define TRAP_FLAG 0x100	 /* of EFLAGS */
#define FAULT_WRITE 0x2 /* of a page fault's error code */

/* The access under way. Set only with `busy` held, which is let go when it's over. */
static struct {
	bool on;
	pthread_t thread;
	struct region *region;
	uintptr_t page, offset; /* offset: in the region, of the access */
	bool write, traced;
	sigset_t mask;
} step;

static struct sigaction old_trap;

bool emu_mmio_supported(void)
{
	return true;
}

/* What a read of the page will find. */
static void fill(const struct region *r, uint8_t *page)
{
	switch (r->kind) {
	case EMU_MMIO_CLOCK: {
		uint64_t now = htobe64(now_ns()); /* two big-endian words, the upper one first: mlx5_read_clock() */

		memcpy(page + EMU_CLOCK_OFFSET, &now, sizeof(now));
		break;
	}
	case EMU_MMIO_INCREMENT: /* a read: what is there. A write: see finish() */
		page[step.offset % EMU_PAGE] = step.write ? 0 : __atomic_load_n(r->target + step.offset, __ATOMIC_ACQUIRE);
		break;
	case EMU_MMIO_TEST_AND_SET:
		page[step.offset % EMU_PAGE] = step.write ? 0
							  : __atomic_exchange_n(r->target + step.offset, 1, __ATOMIC_ACQ_REL);
		break;
	}
}

static bool start(uintptr_t address, ucontext_t *uc)
{
	struct region *r;
	uint8_t *page;

	lock_regions();
	r = find(address);
	if (!r) {
		/* Unmapped meanwhile, or never ours: trying again shows which. */
		unlock_regions();
		return false;
	}
	step.region = r;
	step.offset = address - r->base;
	step.page = address & ~(uintptr_t)(EMU_PAGE - 1);
	step.write = uc->uc_mcontext.gregs[REG_ERR] & FAULT_WRITE;
	step.traced = uc->uc_mcontext.gregs[REG_EFL] & TRAP_FLAG;
	step.thread = pthread_self();
	page = (uint8_t *)step.page;
	if (mprotect(page, EMU_PAGE, PROT_READ | PROT_WRITE)) {
		unlock_regions();
		return false;
	}
	fill(r, page);
	step.on = true;
	/* Nothing may come between: other handlers would run with the page open. */
	step.mask = uc->uc_sigmask;
	sigfillset(&uc->uc_sigmask);
	sigdelset(&uc->uc_sigmask, SIGTRAP);
	sigdelset(&uc->uc_sigmask, SIGSEGV);
	sigdelset(&uc->uc_sigmask, SIGBUS);
	uc->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
	return true;
}

static void finish(ucontext_t *uc, bool done)
{
	struct region *r = step.region;
	uint8_t value = ((uint8_t *)step.page)[step.offset % EMU_PAGE];

	/* A number that is written is added; of a test-and-set only the read does anything, and what it sets is 1. So says
	 * rdma-core's tests/test_mlx5_dm_ops.py, since its commit c4f1885b4. */
	if (done && step.write && r->kind == EMU_MMIO_INCREMENT)
		__atomic_fetch_add(r->target + step.offset, value, __ATOMIC_ACQ_REL);
	mprotect((void *)step.page, EMU_PAGE, PROT_NONE);
	uc->uc_sigmask = step.mask;
	if (!step.traced)
		uc->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
	step.on = false;
	unlock_regions();
}

static bool stepping(void)
{
	/* `on` of another thread may be read while it changes, but not that thread's name as ours. */
	return __atomic_load_n(&step.on, __ATOMIC_ACQUIRE) && pthread_equal(step.thread, pthread_self());
}

bool mmio_fault(const siginfo_t *info, void *context)
{
	uintptr_t address = (uintptr_t)info->si_addr;

	if (stepping()) {
		/* The instruction's other operand is bad: that is the program's own affair. */
		finish(context, false);
		return false;
	}
	/* A write elsewhere by the kernel on the program's behalf has no address of ours. */
	return info->si_code > 0 && find(address) && start(address, context);
}

static void on_trap(int sig, siginfo_t *info, void *context)
{
	if (stepping())
		finish(context, true);
	else
		signal_pass_on(&old_trap, sig, info, context);
}

static int install(void)
{
	struct sigaction ours = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_ONSTACK }, now;

	sigemptyset(&ours.sa_mask);
	if (sigaction(SIGTRAP, NULL, &now))
		return errno;
	if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_trap) {
		old_trap = now;
		if (sigaction(SIGTRAP, &ours, NULL))
			return errno;
	}
	return fault_handler_install();
}

static void forget_step(void)
{
	step.on = false;
}

#else

bool emu_mmio_supported(void)
{
	return false;
}

bool mmio_fault(const siginfo_t *info, void *context)
{
	(void)info;
	(void)context;
	return false;
}

static int install(void)
{
	return EOPNOTSUPP;
}

static void forget_step(void)
{
}

#endif

/* ---------------------------------------------------------------- control's calls */

static bool enter(const struct region *r)
{
	for (uint32_t i = 0; i < MAX_REGIONS; i++) {
		if (regions[i].base)
			continue;
		regions[i].len = r->len;
		regions[i].kind = r->kind;
		regions[i].target = r->target;
		regions[i].ctx = r->ctx;
		__atomic_store_n(&regions[i].base, r->base, __ATOMIC_RELEASE);
		if (i >= nregions)
			__atomic_store_n(&nregions, i + 1, __ATOMIC_RELEASE);
		return true;
	}
	return false;
}

void emu_mmio_unmapped(const void *address, size_t len)
{
	uintptr_t from = (uintptr_t)address, to = from + len;
	uint32_t n = __atomic_load_n(&nregions, __ATOMIC_ACQUIRE);
	sigset_t mask;

	for (uint32_t i = 0; i < n; i++) {
		uintptr_t base = __atomic_load_n(&regions[i].base, __ATOMIC_ACQUIRE);

		if (!base || base >= to || base + regions[i].len <= from)
			continue;
		lock_masked(&mask);
		if (regions[i].base == base)
			__atomic_store_n(&regions[i].base, 0, __ATOMIC_RELEASE);
		unlock_masked(&mask);
	}
}

void *emu_mmio_map(struct emu_ucontext *ctx, void *address, size_t len, int fixed, enum emu_mmio kind, uint8_t *target)
{
	struct region r = { .len = len, .kind = kind, .target = target, .ctx = ctx };
	sigset_t mask;
	void *map;
	bool ok;
	int err;

	err = install();
	if (err) {
		errno = err;
		return MAP_FAILED;
	}
	map = emu_real.mmap(address, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
	if (map == MAP_FAILED)
		return map;
	emu_mmio_unmapped(map, len); /* what was there before was unmapped where no hook saw it */
	r.base = (uintptr_t)map;
	lock_masked(&mask);
	ok = enter(&r);
	unlock_masked(&mask);
	if (!ok) {
		emu_real.munmap(map, len);
		errno = ENOMEM;
		return MAP_FAILED;
	}
	return map;
}

bool emu_mmio_in_use(const uint8_t *target, size_t len)
{
	for (uint32_t i = 0; i < nregions; i++)
		if (regions[i].base && regions[i].target && regions[i].target < target + len &&
		    target < regions[i].target + regions[i].len)
			return true;
	return false;
}

void emu_mmio_forget(const struct emu_ucontext *ctx)
{
	sigset_t mask;

	lock_masked(&mask);
	for (uint32_t i = 0; i < nregions; i++)
		if (regions[i].ctx == ctx)
			__atomic_store_n(&regions[i].base, 0, __ATOMIC_RELEASE);
	unlock_masked(&mask);
}

void emu_mmio_forked(void)
{
	forget_step();
	busy = 0;
	fault_forked();
}

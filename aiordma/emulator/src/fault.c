/* SPDX-License-Identifier: MIT
 * Payload whose memory is gone.
 *
 * Hardware pins the pages of a registration, so a program that unmaps registered memory gets away with it. The device
 * thread moves payload with plain loads and stores, and would bring the whole process down; so would an address that an
 * on-demand-paging key covers and nothing is mapped at. So while it copies, the thread catches SIGSEGV and SIGBUS, and
 * only its own: those of all other threads go to whoever had them before. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>

#include "nic.h"

static struct {
	pthread_t thread, device_thread;
	bool on;	/* `thread` is in a copy, and `back` leads out of it */
	jmp_buf back;
	uintptr_t address;
	struct sigaction old[2];
	bool installed;
} f;

static const int signals[2] = { SIGSEGV, SIGBUS };

void signal_pass_on(const struct sigaction *old, int sig, siginfo_t *info, void *context)
{
	if (old->sa_flags & SA_SIGINFO) {
		old->sa_sigaction(sig, info, context);
	} else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
		old->sa_handler(sig);
	} else {
		/* On return the access fails again, and ends the process as it would have. What somebody sent, or an
		 * instruction that traps once it's done, doesn't come again by itself. */
		signal(sig, old->sa_handler);
		if (info->si_code <= 0 || sig == SIGTRAP)
			raise(sig);
	}
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
	if (f.on && pthread_equal(pthread_self(), f.thread)) {
		f.on = false;
		f.address = (uintptr_t)info->si_addr;
		if (sig == SIGBUS)
			stand_in_noted(f.address);
		_longjmp(f.back, 1);
	}
	if (stand_in(sig, info) || (sig == SIGSEGV && mmio_fault(info, context)))
		return;
	signal_pass_on(&f.old[sig == SIGBUS], sig, info, context);
}

/* A fault while its signal is blocked ends the process; in this thread every other signal stays blocked. */
static void unblock(void)
{
	sigset_t set;

	sigemptyset(&set);
	for (int i = 0; i < 2; i++)
		sigaddset(&set, signals[i]);
	pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_ours(int sig)
{
	struct sigaction now;

	return !sigaction(sig, NULL, &now) && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault;
}

int fault_handler_install(void)
{
	struct sigaction ours = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER };
	int err = 0;

	sigemptyset(&ours.sa_mask);
	pthread_mutex_lock(&install_lock);
	for (int i = 0; i < 2 && !err; i++)
		if (!is_ours(signals[i]) && sigaction(signals[i], &ours, &f.old[i]))
			err = errno;
	f.installed = !err;
	pthread_mutex_unlock(&install_lock);
	return err;
}

void fault_forked(void)
{
	pthread_mutex_init(&install_lock, NULL);
	f.on = false;
	stand_in_forked();
}

void fault_guard_start(void)
{
	f.thread = f.device_thread = pthread_self();
	fault_handler_install();
	unblock();
}

void fault_guard_take(bool take)
{
	f.thread = take ? pthread_self() : f.device_thread;
}

void fault_guard_stop(void)
{
	/* Unless somebody else came after us, and would not expect to lose it. */
	pthread_mutex_lock(&install_lock);
	for (int i = 0; f.installed && i < 2; i++)
		if (is_ours(signals[i]))
			sigaction(signals[i], &f.old[i], NULL);
	f.installed = false;
	pthread_mutex_unlock(&install_lock);
}

static bool inside(const struct nic_sgl *s, uintptr_t address)
{
	for (uint32_t i = 0; i < s->n; i++)
		if (address - (uintptr_t)s->v[i].p < s->v[i].len)
			return true;
	return false;
}

enum nic_copied fault_guard_copy(const struct nic_sgl *dst, const struct nic_sgl *src, uint64_t len)
{
	if (_setjmp(f.back)) {
		unblock(); /* where the handler ran with more blocked than it asked for: under ThreadSanitizer */
		emu_log(EMU_WARN, "registered memory at 0x%lx is not there any more", (unsigned long)f.address);
		return inside(src, f.address) ? COPY_BAD_SOURCE : COPY_BAD_TARGET;
	}
	f.on = true;
	sgl_copy(dst, src, len);
	f.on = false;
	return COPY_DONE;
}

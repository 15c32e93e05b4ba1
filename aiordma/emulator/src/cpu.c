/* SPDX-License-Identifier: MIT
 * The device thread among others that want a CPU. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "wire.h"

#define CROWDED_NS 100000000u
#define SLICE_NS 100000u

/* Programs poll, and where they are as many as the CPUs, a thread of ours that has work waits until one of them has used
 * up its time: milliseconds. With a short slice of its own (Linux 6.12 and later, sched_setattr(2); before, ignored or
 * refused) the scheduler gives it its turn sooner, and no more time in all. */
void cpu_short_slices(void)
{
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime, deadline, period;
	} a = { .size = sizeof(a), .policy = SCHED_OTHER, .runtime = SLICE_NS };

	errno = 0;
	a.nice = getpriority(PRIO_PROCESS, 0);
	if (errno || syscall(SYS_sched_setattr, 0, &a, 0))
		emu_log(EMU_DEBUG, "no short slices: errno %d", errno);
}

/* With another process to talk to there are two programs and two threads of ours, and more than a small machine has CPUs
 * for. Who polls when others want the CPU is stopped in the middle of it, and waits for its next turn longer than one who
 * was asleep: so that is taken for a sign to sleep rather than to poll, for a while. */
bool cpu_crowded(uint64_t now)
{
	static long preempted;
	static uint64_t crowded_until;
	struct rusage u;

	if (list_empty(&wire_links))
		return false;
	if (!getrusage(RUSAGE_THREAD, &u) && u.ru_nivcsw != preempted) {
		preempted = u.ru_nivcsw;
		crowded_until = now + CROWDED_NS;
	}
	return now < crowded_until;
}

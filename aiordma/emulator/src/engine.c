/* SPDX-License-Identifier: MIT
 * The device thread.
 *
 * It holds emu.lock while it looks for work and does it, in turns of bounded length, and lets go between turns when a
 * command waits. Without work it goes on looking for emu.spin_us and then sleeps (idle.c). */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nic.h"
#include "wire.h"

/* QPs that get their turn before doorbells are looked at again. */
#define QPS_A_TURN 32u

/* Turns without work between two looks at the clock and at what is seldom. */
#define SELDOM 64u

/* QPs whose record is read in a turn: few while there is something to do, as each may be a cache miss; more and more
 * the longer there is nothing. */
#define SCAN_BUSY 2u
#define SCAN_MAX 256u
#define SCAN_RECORDS 32u

/* How long a thread whose doorbell woke us may take to come to its store, before the page is protected again. */
#define WRITER_NS 5000000u

/* Sleeps while something has to be looked at that rings no doorbell. */
#define NAP_FIRST_NS 50000u
#define NAP_MAX_NS 1000000u
#define NAPS_UNTIL_LONGER 64u
#define NAP_LINKS_NS 1000000000u

static struct {
	pthread_t thread;
	bool running;	    /* under emu.lock's callers' own serialisation: start and stop don't overlap */
	bool stop;	    /* atomic */
	uint32_t waiting;   /* atomic: commands that want emu.lock */
	uint32_t turns, idle_turns;
	uint64_t now, idle_since;
	uint64_t next_deadline, cq_timer;
	bool single_cpu;
	bool resting; /* atomic: aiordma_emu_step() does the thread's work */
	bool writer_expected; /* its doorbell's first store is still to come: it was stopped, and has been let go */
	uint32_t doorbells;
	struct emu_list ready, stalled, overflowed;
} e = {
	.next_deadline = UINT64_MAX,
	.cq_timer = UINT64_MAX,
	.ready = { &e.ready, &e.ready },
	.stalled = { &e.stalled, &e.stalled },
	.overflowed = { &e.overflowed, &e.overflowed },
};

static __thread bool this_is_it;

bool engine_is_this_thread(void)
{
	return this_is_it;
}

uint64_t engine_now(void)
{
	return this_is_it ? e.now : now_ns();
}

void engine_read_clock(void)
{
	e.now = now_ns();
}

/* Much may have happened since this turn's clock was read, or its thread may have been off the CPU, and what is waited for
 * may be younger than that: a timer that began back then would run out early. */
uint64_t engine_deadline(uint64_t ns)
{
	if (!this_is_it)
		return now_ns() + ns;
	engine_read_clock();
	return e.now + ns;
}

/* ---------------------------------------------------------------- the lock */

void emu_lock(void)
{
	/* The device thread lets go within a turn, usually in well under a microsecond: not worth a sleep in the kernel. */
	__atomic_add_fetch(&e.waiting, 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < 200; i++) {
		if (!pthread_mutex_trylock(&emu.lock))
			goto locked;
		cpu_relax();
	}
	pthread_mutex_lock(&emu.lock);
locked:
	__atomic_sub_fetch(&e.waiting, 1, __ATOMIC_SEQ_CST);
	stand_in_begin();
}

void emu_unlock(void)
{
	sigset_t mask;

	stand_in_end(&mask);
	pthread_mutex_unlock(&emu.lock);
	pthread_sigmask(SIG_SETMASK, &mask, NULL);
}

static bool commands_wait(void)
{
	return __atomic_load_n(&e.waiting, __ATOMIC_RELAXED) || __atomic_load_n(&e.stop, __ATOMIC_RELAXED);
}

/* Mutexes aren't fair: without this the thread would have it back before the waiter is awake. */
static void let_commands_in(void)
{
	while (__atomic_load_n(&e.waiting, __ATOMIC_RELAXED) && !__atomic_load_n(&e.stop, __ATOMIC_RELAXED))
		sched_yield();
}

/* ---------------------------------------------------------------- what there is to do */

void engine_activate(struct emu_qp *qp)
{
	if (qp->active)
		return;
	qp->active = true;
	list_add_tail(&e.ready, &qp->active_link);
}

void engine_forget_qp(struct emu_qp *qp)
{
	list_del(&qp->active_link);
	qp->active = false;
	scan_remove_qp(qp);
}

void engine_stall(struct emu_qp *qp)
{
	list_del(&nic(qp)->stall_link);
	list_add_tail(&e.stalled, &nic(qp)->stall_link);
	if (qp->deadline_ns < e.next_deadline)
		e.next_deadline = qp->deadline_ns;
}

void engine_unstall(struct emu_qp *qp)
{
	list_del(&nic(qp)->stall_link);
}

void engine_answer(struct emu_qp *qp)
{
	engine_unstall(qp);
	engine_activate(qp);
}

void engine_timer(uint64_t at)
{
	if (at < e.cq_timer)
		e.cq_timer = at;
	emu_engine_wake();
}

void engine_channel_overflow(struct emu_channel *ch, bool over)
{
	list_del(&ch->link);
	if (over)
		list_add_tail(&e.overflowed, &ch->link);
}

/* Each that is ready has one turn: those with work left wait for the next one, behind new arrivals. */
static bool run_ready(void)
{
	struct emu_list *again = NULL;
	bool worked = false;

	for (uint32_t i = 0; i < QPS_A_TURN && !list_empty(&e.ready) && e.ready.next != again; i++) {
		struct emu_qp *qp = container_of(e.ready.next, struct emu_qp, active_link);
		enum nic_left left;

		list_del(&qp->active_link);
		left = sq_turn(qp, &worked);
		if (left == LEFT_WORK) {
			list_add_tail(&e.ready, &qp->active_link);
			again = again ? again : &qp->active_link;
			continue;
		}
		qp->active = false;
		if (left == LEFT_NOTHING) {
			scan_make_hot(qp);
			scan_seen(qp);
		}
	}
	return worked;
}

void engine_run_ready(void)
{
	e.now = now_ns();
	run_ready();
}

static bool run_timers(void)
{
	struct emu_list *l, *next;
	bool found = false;

	if (e.now >= e.cq_timer) {
		e.cq_timer = UINT64_MAX;
		found |= scan_all();
	}
	if (e.now < e.next_deadline)
		return found;
	e.next_deadline = UINT64_MAX;
	for (l = e.stalled.next; l != &e.stalled; l = next) {
		struct emu_qp *qp = container_of(l, struct nic_qp, stall_link)->qp;

		next = l->next;
		if (qp->deadline_ns <= e.now) {
			list_del(l);
			engine_activate(qp);
			found = true;
		} else if (qp->deadline_ns < e.next_deadline) {
			e.next_deadline = qp->deadline_ns;
		}
	}
	return found;
}

static void flush_channels(void)
{
	struct emu_list *l, *next;

	for (l = e.overflowed.next; l != &e.overflowed; l = next) {
		struct emu_channel *ch = container_of(l, struct emu_channel, link);

		next = l->next;
		if (channel_flush(ch))
			list_del(l);
	}
}

static bool seldom(void)
{
	e.now = now_ns();
	flush_channels();
	wire_check_alive();
	return scan_errors() | run_timers();
}

/* True if there was anything to do. */
static bool turn(void)
{
	bool worked = scan_hot();
	uint32_t scan = SCAN_BUSY + e.idle_turns / 8;

	e.turns++;
	/* The hot ones' doorbells need no reading, but others must get their turn too. */
	if (!worked || e.turns % 4 == 0)
		worked |= doorbell_poll();
	worked |= wire_poll();
	if (!list_empty(&e.ready)) {
		e.now = now_ns();
		worked |= run_ready();
	}
	if (worked) {
		/* Work may go on for ever, and timers run out meanwhile. */
		if (e.now >= e.next_deadline || e.now >= e.cq_timer)
			run_timers();
		if (e.turns % SELDOM == 0)
			flush_channels();
		e.idle_turns = 0;
	} else if (++e.idle_turns % SELDOM == 0) {
		worked = seldom();
	}
	worked |= scan_records(SCAN_RECORDS);
	worked |= scan_some(scan < SCAN_MAX ? scan : SCAN_MAX);
	return worked;
}

/* ---------------------------------------------------------------- idle */

static uint64_t sleep_limit(bool doorbells_wake, uint32_t nth)
{
	uint64_t now = now_ns(), timer = e.next_deadline < e.cq_timer ? e.next_deadline : e.cq_timer;
	uint64_t limit = UINT64_MAX;

	if (!doorbells_wake || scan_errors_watched() || !list_empty(&e.overflowed)) {
		nth /= NAPS_UNTIL_LONGER;
		limit = (uint64_t)NAP_FIRST_NS << (nth < 8 ? nth : 8);
		limit = limit < NAP_MAX_NS ? limit : NAP_MAX_NS;
	}
	/* A process at the other end of a link may have died. */
	if (!list_empty(&wire_links) && limit > NAP_LINKS_NS)
		limit = NAP_LINKS_NS;
	if (timer != UINT64_MAX)
		limit = timer <= now ? 0 : timer - now < limit ? timer - now : limit;
	return limit;
}

/* With the lock held, also at the end; it's free meanwhile. */
static void idle(void)
{
	for (uint32_t nth = 0; !__atomic_load_n(&e.stop, __ATOMIC_RELAXED); nth++) {
		bool doorbells_wake = idle_arm();
		uint64_t limit;
		bool woken;

		wire_asleep(true);

		/* What was written before the pages were armed. */
		if (doorbell_poll() | wire_poll() | scan_all() | seldom() | !list_empty(&e.ready))
			break;
		limit = sleep_limit(doorbells_wake, nth);
		pthread_mutex_unlock(&emu.lock);
		woken = limit ? idle_sleep(limit) : false;
		let_commands_in();
		pthread_mutex_lock(&emu.lock);
		if (woken) {
			/* Doorbell records are written before doorbells, so the work can be done while the thread that rang
			 * still stands at its doorbell. */
			engine_read_clock();
			if (!__atomic_load_n(&e.resting, __ATOMIC_RELAXED) && (wire_poll() | scan_all()))
				engine_run_ready();
			idle_release_writers();
			break;
		}
	}
	wire_asleep(false);
	idle_disarm();
}

static bool idle_long_enough(void)
{
	if (!e.idle_turns)
		return false;
	if (e.idle_turns == 1) {
		e.idle_since = now_ns();
		return (!emu.spin_us || e.single_cpu || cpu_crowded(e.idle_since)) && !e.writer_expected;
	}
	if (e.idle_turns % SELDOM)
		return false;
	return e.now - e.idle_since >= (e.writer_expected ? WRITER_NS : emu.spin_us * 1000ull);
}

/* Out of the way, until another process or a command wants something. */
static void nap(void)
{
	wire_asleep(true);
	if (!wire_poll()) {
		pthread_mutex_unlock(&emu.lock);
		idle_sleep(NAP_FIRST_NS);
		let_commands_in();
		pthread_mutex_lock(&emu.lock);
	}
	wire_asleep(false);
}

/* Between turns without work. A thread that is stopped at a doorbell may need our CPU to get on: protecting the page again
 * before it did would stop it again, and so on. */
static void pause_a_little(void)
{
	if (e.writer_expected && doorbells_seen != e.doorbells)
		e.writer_expected = false;
	if (!e.writer_expected)
		cpu_relax();
	else if (list_empty(&wire_links))
		sched_yield();
	else
		nap();
}

/* ---------------------------------------------------------------- by hand */

int aiordma_emu_stepping(int on)
{
	emu_lock();
	__atomic_store_n(&e.resting, !!on, __ATOMIC_RELAXED);
	e.turns = e.idle_turns = 0; /* what is done in every so manyth turn is always done in the same ones */
	fault_guard_take(on);
	emu_unlock();
	emu_engine_wake();
	return 0;
}

/* Called by name in benchmarks/callgrind.py: a profile shows what is below it. */
static __attribute__((noinline)) bool device_step(void)
{
	bool worked = false, resting;

	emu_lock();
	resting = __atomic_load_n(&e.resting, __ATOMIC_RELAXED);
	if (resting) {
		this_is_it = true;
		/* A turn looks at some of the QPs whose doorbells were overwritten. That nothing was due is said of all. */
		while (turn() || (!worked && scan_records(UINT32_MAX)))
			worked = true;
		this_is_it = false;
	}
	emu_unlock();
	return resting && worked;
}

int aiordma_emu_step(void)
{
	return device_step();
}

/* With the lock held, also at the end. */
static void rest(void)
{
	while (__atomic_load_n(&e.resting, __ATOMIC_RELAXED) && !__atomic_load_n(&e.stop, __ATOMIC_RELAXED)) {
		pthread_mutex_unlock(&emu.lock);
		idle_sleep(UINT64_MAX);
		let_commands_in();
		pthread_mutex_lock(&emu.lock);
	}
}

static void *engine_main(void *unused)
{
	(void)unused;
	this_is_it = true;
	pthread_setname_np(pthread_self(), "aiordma-emu");
	/* The default of 50 us is coarser than the shortest RNR timers. */
	prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0);
	cpu_short_slices();
	fault_guard_start();
	pthread_mutex_lock(&emu.lock);
	registry_thread((pid_t)syscall(SYS_gettid));
	e.now = now_ns();
	while (!__atomic_load_n(&e.stop, __ATOMIC_RELAXED)) {
		if (unlikely(__atomic_load_n(&e.resting, __ATOMIC_RELAXED))) {
			rest();
		} else if (turn()) {
			e.idle_turns = 0;
		} else if (idle_long_enough()) {
			e.doorbells = doorbells_seen;
			idle();
			e.writer_expected = idle_released_writer();
			e.idle_turns = 0;
		} else {
			pause_a_little();
		}
		if (commands_wait()) {
			pthread_mutex_unlock(&emu.lock);
			let_commands_in();
			pthread_mutex_lock(&emu.lock);
		}
	}
	pthread_mutex_unlock(&emu.lock);
	fault_guard_stop();
	return NULL;
}

/* ---------------------------------------------------------------- control's calls */

int emu_engine_start(void)
{
	sigset_t all, old;
	cpu_set_t cpus;
	int err;

	if (e.running)
		return 0;
	err = wire_start();
	if (!err)
		err = idle_init();
	if (err)
		return err;
	/* Spinning on the only CPU keeps the application from running. */
	e.single_cpu = !sched_getaffinity(0, sizeof(cpus), &cpus) && CPU_COUNT(&cpus) == 1;
	__atomic_store_n(&e.stop, false, __ATOMIC_SEQ_CST);
	/* The application's signals are for its own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = pthread_create(&e.thread, NULL, engine_main, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (err)
		idle_fini(false);
	else
		e.running = true;
	return err;
}

void emu_engine_stop(void)
{
	if (!e.running)
		return;
	__atomic_store_n(&e.stop, true, __ATOMIC_SEQ_CST);
	idle_wake();
	pthread_join(e.thread, NULL);
	e.running = false;
	idle_fini(false);
	wire_stop();
}

void emu_engine_wake(void)
{
	if (!this_is_it)
		idle_wake();
}

/* The child has a copy of everything and owns none of it: whatever it did with a QP of the parent's would reach memory
 * and pipes that they share. */
void emu_engine_forked(void)
{
	e.running = false;
	e.waiting = 0;
	e.next_deadline = e.cq_timer = UINT64_MAX;
	list_init(&e.ready);
	list_init(&e.stalled);
	list_init(&e.overflowed);
	scan_forget();
	doorbell_forget();
	wire_forked();
	idle_fini(true);
}

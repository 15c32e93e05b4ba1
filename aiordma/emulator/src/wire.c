/* SPDX-License-Identifier: MIT
 * Links between processes: opening, watching and dropping them. See wire.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "wire.h"

/* How often the registry is asked whether those at the other ends still live. */
#define ALIVE_NS 250000000u

struct emu_list wire_links = { &wire_links, &wire_links };
bool wire_on;
uint32_t *wire_attention, wire_attention_seen;

static int own_fifo = -1;
static bool in_registry; /* as a user of it */
static uint64_t alive_next;
static pid_t owner;

/* ---------------------------------------------------------------- files */

static const char *file_path(char *path, const char *name)
{
	snprintf(path, PATH_MAX, "%s/%s", registry_folder(), name);
	return path;
}

static void fifo_name(char *name, size_t size, const struct registry_peer *p)
{
	snprintf(name, size, "wake-%u.%u", p->slot, p->generation);
}

/* For reading and writing, so that neither opening it nor writing to it depends on there being another. */
static int open_fifo(const char *name)
{
	char path[PATH_MAX];
	struct stat st;
	int fd = emu_real.open(file_path(path, name), O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);

	if (fd >= 0 && (fstatat(fd, "", &st, AT_EMPTY_PATH) || !S_ISFIFO(st.st_mode) || st.st_uid != geteuid())) {
		emu_real.close(fd);
		return -1;
	}
	return fd;
}

/* Of its full size before it has its name, so that one of another size is one that was cut short. */
static bool make_shared(const char *path)
{
	static uint32_t serial;
	char name[64], whole[PATH_MAX];
	uint32_t epoch = 0;
	bool made;
	int fd;

	while (!epoch)
		if (getrandom(&epoch, sizeof(epoch), GRND_NONBLOCK) != sizeof(epoch))
			epoch = (uint32_t)now_ns() | 1;
	snprintf(name, sizeof(name), "new%u-%u.%u", ++serial, registry_self()->slot, registry_self()->generation);
	fd = emu_real.open(file_path(whole, name), O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return false;
	made = !ftruncate(fd, sizeof(struct wire_shared)) &&
	       pwrite(fd, &epoch, sizeof(epoch), offsetof(struct wire_shared, epoch)) == sizeof(epoch) &&
	       (!link(whole, path) || errno == EEXIST); /* the other side was faster */
	unlink(whole);
	emu_real.close(fd);
	return made;
}

static bool take_shared(struct wire_link *l, int fd)
{
	struct stat st;
	void *p;

	if (fstatat(fd, "", &st, AT_EMPTY_PATH) || !S_ISREG(st.st_mode) || st.st_uid != geteuid() ||
	    st.st_size != sizeof(struct wire_shared) ||
	    pread(fd, &l->epoch, sizeof(l->epoch), offsetof(struct wire_shared, epoch)) != sizeof(l->epoch) || !l->epoch)
		return false;
	p = emu_real.mmap(NULL, sizeof(struct wire_shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		return false;
	l->shared = p;
	return true;
}

static bool map_shared(struct wire_link *l)
{
	char path[PATH_MAX];

	file_path(path, l->name);
	for (unsigned tries = 0; tries < 4 && !l->shared; tries++) {
		int fd = emu_real.open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);

		if (fd >= 0) {
			if (!take_shared(l, fd))
				unlink(path);
			emu_real.close(fd);
		} else if (errno != ENOENT || !make_shared(path)) {
			return false;
		}
	}
	return l->shared;
}

/* The epoch of the file that has the link's name now; 0: there is none, or it was cut short. */
static uint32_t epoch_of_file(const struct wire_link *l)
{
	char path[PATH_MAX];
	uint32_t epoch = 0;
	int fd = emu_real.open(file_path(path, l->name), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0 || pread(fd, &epoch, sizeof(epoch), offsetof(struct wire_shared, epoch)) != sizeof(epoch))
		epoch = 0;
	if (fd >= 0)
		emu_real.close(fd);
	return epoch;
}

/* Not what the other side has put in its place. */
static void unlink_shared(const struct wire_link *l)
{
	uint32_t epoch = epoch_of_file(l);
	char path[PATH_MAX];

	if (!epoch || epoch == l->epoch)
		unlink(file_path(path, l->name));
}

bool wire_torn(uintptr_t address, uintptr_t *start, size_t *len)
{
	for (struct emu_list *e = wire_links.next; e != &wire_links; e = e->next) {
		struct wire_link *l = container_of(e, struct wire_link, link);

		if (address - (uintptr_t)l->shared >= sizeof(*l->shared))
			continue;
		l->torn = true;
		*start = (uintptr_t)l->shared;
		*len = (sizeof(*l->shared) + EMU_PAGE - 1) & ~(size_t)(EMU_PAGE - 1);
		return true;
	}
	return false;
}

/* ---------------------------------------------------------------- waking */

void wire_call(struct wire_link *l)
{
	/* Both sides write first and look then: the sleeper at the rings, we whether it sleeps. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (__atomic_load_n(&registry_entry(l->peer.slot)->asleep, __ATOMIC_RELAXED) && emu_real.write(l->fifo, "", 1) < 0)
		return; /* it's full: it has been told */
}

void wire_asleep(bool on)
{
	if (!wire_on)
		return;
	__atomic_store_n(&registry_entry(registry_self()->slot)->asleep, on, __ATOMIC_SEQ_CST);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

int wire_fd(void)
{
	return own_fifo;
}

void wire_woken(void)
{
	uint8_t bytes[256];

	while (own_fifo >= 0 && emu_real.read(own_fifo, bytes, sizeof(bytes)) == sizeof(bytes))
		;
}

/* ---------------------------------------------------------------- links */

/* Dropped, and perhaps still in use further up the stack. */
static struct emu_list dropped = { &dropped, &dropped };

static void close_link(struct wire_link *l)
{
	if (l->fifo >= 0)
		emu_real.close(l->fifo);
	if (l->shared)
		emu_real.munmap(l->shared, sizeof(*l->shared));
	free(l);
}

static struct wire_link *open_link(const struct registry_peer *peer)
{
	const struct registry_peer *self = registry_self();
	struct wire_link *l = calloc(1, sizeof(*l));
	const struct registry_peer *side[2];
	char fifo[64];

	/* Others wrote the id. 0 would be taken for memory of our own, and prctl() takes -1 for everybody. */
	if (!l || peer->pid <= 0) {
		free(l);
		return NULL;
	}
	l->peer = *peer;
	l->side = self->slot > peer->slot;
	side[l->side] = self;
	side[!l->side] = peer;
	snprintf(l->name, sizeof(l->name), "link-%u.%u-%u.%u", side[0]->slot, side[0]->generation, side[1]->slot,
		 side[1]->generation);
	fifo_name(fifo, sizeof(fifo), peer);
	l->fifo = open_fifo(fifo);
	if (l->fifo < 0 || !map_shared(l)) {
		emu_log(EMU_WARN, "no link to process %d: %s", peer->pid, strerror(errno));
		close_link(l);
		return NULL;
	}
	l->mine = &l->shared->half[l->side];
	l->theirs = &l->shared->half[!l->side];
	list_init(&l->full);
	l->stuck = WIRE_SLOTS;
	for (uint32_t i = 0; i < WIRE_SLOTS; i++)
		l->unused[l->nunused++] = (uint16_t)(WIRE_SLOTS - 1 - i);
	list_add_tail(&wire_links, &l->link);
	foreign_allow(peer->pid);
	__atomic_store_n(&l->shared->here[l->side], 1, __ATOMIC_RELEASE);
	emu_log(EMU_DEBUG, "link to process %d", peer->pid);
	return l;
}

static void drop_link(struct wire_link *l)
{
	emu_log(EMU_DEBUG, "no more link to process %d", l->peer.pid);
	for (uint32_t d = 0; d < emu.ndevices; d++)
		for (uint32_t i = 0; i < emu.devices[d].qps_size; i++) {
			struct emu_qp *qp = emu.devices[d].qps[i];

			if (qp && qp->priv && nic(qp)->route.port_num == ROUTE_LINK &&
			    nic(qp)->route.link == l)
				nic(qp)->route = (struct nic_route){ .port_num = 0 };
		}
	wire_lose(l);
	list_del(&l->link);
	unlink_shared(l);
	list_add_tail(&dropped, &l->link);
}

static void close_dropped(void)
{
	while (!list_empty(&dropped)) {
		struct wire_link *l = container_of(dropped.next, struct wire_link, link);

		list_del(&l->link);
		close_link(l);
	}
}

/* Finds out whether it's whole. */
static bool is_torn(const struct wire_link *l)
{
	__atomic_load_n(&l->shared->half[1].slots[WIRE_SLOTS - 1].payload[WIRE_PAYLOAD - 1], __ATOMIC_RELAXED);
	return __atomic_load_n(&l->shared->epoch, __ATOMIC_RELAXED) != l->epoch ||
	       __atomic_load_n(&l->torn, __ATOMIC_RELAXED);
}

/* The link to a process that lives. One to who was in its slot before is no more use. `anew`: as long as both sides aren't
 * known to be there, it must be the one that the other side will find. */
static struct wire_link *link_to(const struct registry_peer *peer, bool anew)
{
	for (struct emu_list *e = wire_links.next, *next; e != &wire_links; e = next) {
		struct wire_link *l = container_of(e, struct wire_link, link);

		next = e->next;
		if (l->peer.slot != peer->slot)
			continue;
		if (l->peer.generation == peer->generation && !is_torn(l) && (!anew || epoch_of_file(l) == l->epoch))
			return l;
		drop_link(l);
	}
	return open_link(peer);
}

static bool both_there(const struct wire_link *l)
{
	return __atomic_load_n(&l->shared->here[!l->side], __ATOMIC_RELAXED);
}

struct wire_link *wire_find(uint32_t qpn)
{
	struct registry_entry *e;
	struct registry_peer peer;
	struct wire_link *l;
	uint32_t self;

	/* Most often it's a QP of a process that we talk to. */
	if (!wire_on || !registry_owner(qpn, &peer))
		return NULL;
	l = link_to(&peer, false);
	if (!l || both_there(l))
		return l;
	l = link_to(&peer, true);
	if (!l)
		return NULL;
	self = registry_self()->slot;
	e = registry_entry(peer.slot);
	__atomic_fetch_or(&e->calling[self / 64], 1ull << self % 64, __ATOMIC_SEQ_CST);
	__atomic_fetch_add(&e->attention, 1, __ATOMIC_SEQ_CST);
	wire_call(l);
	return l;
}

/* ---------------------------------------------------------------- the device thread's */

static bool called(void)
{
	struct registry_entry *self = registry_entry(registry_self()->slot);
	struct registry_peer peer;

	if (likely(!wire_called()))
		return false;
	wire_attention_seen = __atomic_load_n(wire_attention, __ATOMIC_ACQUIRE);
	for (uint32_t slot = 0; slot < REGISTRY_SLOTS; slot++) {
		uint64_t bit = 1ull << slot % 64;

		if (!(__atomic_fetch_and(&self->calling[slot / 64], ~bit, __ATOMIC_SEQ_CST) & bit) ||
		    slot == registry_self()->slot)
			continue;
		peer.slot = slot;
		peer.generation = __atomic_load_n(&registry_entry(slot)->generation, __ATOMIC_ACQUIRE);
		peer.pid = __atomic_load_n(&registry_entry(slot)->pid, __ATOMIC_RELAXED);
		if (registry_alive(slot, peer.generation))
			link_to(&peer, true);
	}
	return true;
}

/* Once both sides are there, and have allowed what they can. */
static void find_reach(struct wire_link *l)
{
	uint32_t *reach = &l->shared->reach[l->side];

	if (likely(__atomic_load_n(reach, __ATOMIC_RELAXED)) ||
	    !__atomic_load_n(&l->shared->here[!l->side], __ATOMIC_ACQUIRE))
		return;
	__atomic_store_n(reach, foreign_reachable(&l->peer, &l->memory) ? REACH_YES : REACH_NO, __ATOMIC_RELEASE);
	emu_log(EMU_DEBUG, "the memory of process %d is %s", l->peer.pid,
		__atomic_load_n(reach, __ATOMIC_RELAXED) == REACH_YES ? "readable" : "out of reach: payload is copied twice");
}

/* Without the registry nobody knows whose a QP number is. */
static void leave(void)
{
	if (wire_on)
		emu_log(EMU_WARN, "other processes can't be reached any more: their registry was cut short");
	while (!list_empty(&wire_links))
		drop_link(container_of(wire_links.next, struct wire_link, link));
	wire_on = false;
}

/* False: the link is gone. */
static bool poll_link(struct wire_link *l, bool *found)
{
	uint32_t head;

	find_reach(l);
	/* An answer is sent before what the other side's program does next, and programs expect that order: that a send is
	 * complete when the reply to its message is there. */
	head = __atomic_load_n(&l->theirs->asked.head, __ATOMIC_ACQUIRE);
	if (wire_take_answers(l)) {
		*found = true;
		engine_run_ready();
		/* One of those may have come upon a new process in this one's place. */
		if (unlikely(!list_empty(&dropped)))
			return false;
	}
	*found |= wire_take_requests(l, head);
	if (likely(__atomic_load_n(&l->shared->epoch, __ATOMIC_RELAXED) == l->epoch &&
		   !__atomic_load_n(&l->torn, __ATOMIC_RELAXED)))
		return true;
	emu_log(EMU_WARN, "the link to process %d was torn: its file was cut short", l->peer.pid);
	drop_link(l);
	return false;
}

bool wire_poll_(void)
{
	bool found = called();

	close_dropped();
	/* When one goes, the others have their turn the next time. */
	for (struct emu_list *e = wire_links.next; e != &wire_links; e = e->next)
		if (!poll_link(container_of(e, struct wire_link, link), &found))
			break;
	if (unlikely(registry_lost()))
		leave();
	return found;
}

void wire_check_alive(void)
{
	uint64_t now = engine_now();

	if (!wire_on || now < alive_next)
		return;
	alive_next = now + ALIVE_NS;
	for (struct emu_list *e = wire_links.next, *next; e != &wire_links; e = next) {
		struct wire_link *l = container_of(e, struct wire_link, link);

		next = e->next;
		if (!registry_alive(l->peer.slot, l->peer.generation))
			drop_link(l);
	}
	close_dropped();
}

/* ---------------------------------------------------------------- start and end */

static void unlink_all(void)
{
	char name[64], path[PATH_MAX];

	for (struct emu_list *e = wire_links.next; e != &wire_links; e = e->next)
		unlink_shared(container_of(e, struct wire_link, link));
	fifo_name(name, sizeof(name), registry_self());
	unlink(file_path(path, name));
}

/* A process may end without closing its devices. What comes later in its end may still use them, so only the files go;
 * the kernel sees to the rest. */
static void at_exit(void)
{
	if (!wire_on || getpid() != owner)
		return;
	emu_lock();
	unlink_all();
	emu_unlock();
}

int wire_start(void)
{
	static bool registered;
	char name[64], path[PATH_MAX];

	if (!emu.reach_host || !registry_start())
		return 0;
	in_registry = true;
	qpn_share();
	fifo_name(name, sizeof(name), registry_self());
	unlink(file_path(path, name));
	if (mkfifo(path, 0600) || (own_fifo = open_fifo(name)) < 0 || !qpn_reserve(1)) {
		emu_log(EMU_WARN, "other processes can't be reached: %s", strerror(errno));
		wire_stop();
		return 0;
	}
	wire_attention = &registry_entry(registry_self()->slot)->attention;
	wire_attention_seen = __atomic_load_n(wire_attention, __ATOMIC_ACQUIRE);
	owner = getpid();
	if (!registered)
		atexit(at_exit);
	registered = true;
	wire_on = true;
	return 0;
}

void wire_stop(void)
{
	if (!in_registry)
		return;
	in_registry = false;
	unlink_all();
	while (!list_empty(&wire_links))
		drop_link(container_of(wire_links.next, struct wire_link, link));
	close_dropped();
	if (own_fifo >= 0)
		emu_real.close(own_fifo);
	own_fifo = -1;
	wire_on = false;
	registry_stop();
}

void wire_forked(void)
{
	/* Descriptors and mappings are copies; the files are the parent's. */
	while (!list_empty(&wire_links)) {
		struct wire_link *l = container_of(wire_links.next, struct wire_link, link);

		list_del(&l->link);
		close_link(l);
	}
	close_dropped();
	if (own_fifo >= 0)
		emu_real.close(own_fifo);
	own_fifo = -1;
	wire_on = in_registry = false;
	registry_forked();
}

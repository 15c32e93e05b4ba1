/* SPDX-License-Identifier: MIT
 * Messages of the connection manager to other processes, the thread that waits for theirs, and timers.
 *
 * A process has a socket beside the registry's files, named by its slot and generation. Who has something to say to it connects
 * there, and the connection serves both ways until one of them closes its last descriptor of the device or ends. Then
 * the other end hears of it at once, as the peers of a process that ends hear from its kernel. What a process that is
 * stopped doesn't read waits, in the socket and then in the sender.
 *
 * The thread exists while a descriptor of the device is open. Messages within the process need none: cm_unlock(). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/un.h>
#include <unistd.h>

#include "cm.h"

#define LINKS_MAX 1024u
#define MESSAGES_A_TURN 64
#define FLUSH_MS 200 /* at the end, for a peer that is slow to read */

struct waiting {
	struct emu_list link;
	struct cm_message m;
};

struct link {
	struct emu_list link;
	uint32_t serial;
	int fd;
	bool known, dead; /* who it is; nothing can be sent */
	struct registry_peer peer;
	struct emu_list out; /* struct waiting */
};

static struct emu_list links = { &links, &links };
static struct emu_list local = { &local, &local }; /* struct waiting: to this process */
static struct emu_list timers = { &timers, &timers };
static uint32_t nlinks, serial, via;
static struct registry_peer self;
static bool in_registry, running, stop;
static pthread_t thread;
static int listener = -1, wake_fd = -1, folder_fd = -1;
static uint64_t sleeps_until; /* 0: the thread looks at the timers before it sleeps */

const struct registry_peer *cm_self(void)
{
	return &self;
}

uint32_t cm_via(void)
{
	return via;
}

uint32_t cm_links(void)
{
	return nlinks;
}

/* ---------------------------------------------------------------- timers */

static void wake(void)
{
	uint64_t one = 1;

	if (wake_fd >= 0 && emu_real.write(wake_fd, &one, sizeof(one)) != sizeof(one))
		return; /* it counts to 2^64 and is read at once */
}

void cm_timer(struct cm_id *id, uint32_t ms)
{
	id->deadline = now_ns() + ms * 1000000ull;
	list_del(&id->timer);
	list_add_tail(&timers, &id->timer);
	if (id->deadline < sleeps_until)
		wake();
}

void cm_timer_stop(struct cm_id *id)
{
	list_del(&id->timer);
}

static uint64_t next_deadline(void)
{
	uint64_t next = UINT64_MAX;

	for (struct emu_list *l = timers.next; l != &timers; l = l->next) {
		uint64_t at = container_of(l, struct cm_id, timer)->deadline;

		next = at < next ? at : next;
	}
	return next;
}

static void run_timers(void)
{
	uint64_t now = now_ns();

	for (struct emu_list *l = timers.next; l != &timers;) {
		struct cm_id *id = container_of(l, struct cm_id, timer);

		l = l->next;
		if (id->deadline > now)
			continue;
		list_del(&id->timer);
		cm_conn_timeout(id);
		cm_deliver_local();
		l = timers.next; /* anything may have changed */
	}
}

/* ---------------------------------------------------------------- sending */

static bool queue(struct emu_list *q, const struct cm_message *m)
{
	struct waiting *w = malloc(sizeof(*w));

	if (!w)
		return false;
	w->m = *m;
	list_add_tail(q, &w->link);
	return true;
}

static void drop_queue(struct emu_list *q)
{
	while (!list_empty(q)) {
		struct waiting *w = container_of(q->next, struct waiting, link);

		list_del(&w->link);
		free(w);
	}
}

void cm_deliver_local(void)
{
	while (!list_empty(&local)) {
		struct waiting *w = container_of(local.next, struct waiting, link);

		list_del(&w->link);
		via = CM_VIA_LOCAL;
		cm_message_receive(&w->m);
		free(w);
	}
}

/* The names are longer than a socket's may be in some folders. */
static socklen_t address_of(struct sockaddr_un *a, const struct registry_peer *p)
{
	int n;

	memset(a, 0, sizeof(*a));
	a->sun_family = AF_UNIX;
	n = snprintf(a->sun_path, sizeof(a->sun_path), "%s/cm-%u.%u", registry_folder(), p->slot, p->generation);
	if (n < 0 || (size_t)n >= sizeof(a->sun_path))
		snprintf(a->sun_path, sizeof(a->sun_path), "/proc/self/fd/%d/cm-%u.%u", folder_fd, p->slot, p->generation);
	return sizeof(*a);
}

static struct link *link_new(int fd)
{
	struct link *l = calloc(1, sizeof(*l));

	if (!l)
		return NULL;
	l->fd = fd;
	if (++serial <= CM_VIA_LOCAL)
		serial = CM_VIA_LOCAL + 1;
	l->serial = serial;
	list_init(&l->out);
	list_add_tail(&links, &l->link);
	nlinks++;
	return l;
}

static void link_free(struct link *l)
{
	drop_queue(&l->out);
	emu_real.close(l->fd);
	list_del(&l->link);
	free(l);
	nlinks--;
}

static struct link *link_to(const struct registry_peer *p)
{
	struct sockaddr_un a;
	struct link *l;
	int fd;

	for (struct emu_list *e = links.next; e != &links; e = e->next) {
		l = container_of(e, struct link, link);
		if (l->known && !l->dead && l->peer.slot == p->slot && l->peer.generation == p->generation)
			return l;
	}
	if (listener < 0 || nlinks >= LINKS_MAX)
		return NULL;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return NULL;
	l = connect(fd, (struct sockaddr *)&a, address_of(&a, p)) ? NULL : link_new(fd);
	if (!l) {
		emu_log(EMU_DEBUG, "rdma_cm: process %u.%u isn't there: %s", p->slot, p->generation, strerror(errno));
		emu_real.close(fd);
		return NULL;
	}
	l->known = true;
	l->peer = *p;
	wake();
	return l;
}

static bool send_now(struct link *l, const struct cm_message *m)
{
	if (send(l->fd, m, sizeof(*m), MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof(*m))
		return true;
	l->dead = errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS;
	return false;
}

uint32_t cm_send(const struct registry_peer *to, const struct cm_message *message)
{
	struct cm_message m = *message;
	struct link *l;

	m.from_slot = self.slot;
	m.from_generation = self.generation;
	if (to->slot == self.slot && to->generation == self.generation)
		return queue(&local, &m) ? CM_VIA_LOCAL : 0;
	/* Twice: the first may lead to what the process had before it closed its last descriptor and opened it again. */
	for (int i = 0; i < 2; i++) {
		l = link_to(to);
		if (!l)
			return 0;
		if (list_empty(&l->out) && send_now(l, &m))
			return l->serial;
		if (l->dead)
			continue;
		wake();
		return queue(&l->out, &m) ? l->serial : 0;
	}
	return 0;
}

static void flush(struct link *l)
{
	while (!list_empty(&l->out) && !l->dead) {
		struct waiting *w = container_of(l->out.next, struct waiting, link);

		if (!send_now(l, &w->m))
			return;
		list_del(&w->link);
		free(w);
	}
}

/* ---------------------------------------------------------------- receiving */

/* False at its end. */
static bool receive(struct link *l)
{
	struct cm_message m;

	for (int i = 0; i < MESSAGES_A_TURN; i++) {
		ssize_t n = recv(l->fd, &m, sizeof(m), MSG_DONTWAIT | MSG_TRUNC);

		if (n < 0 && errno == ECONNRESET)
			continue; /* what it had sent before can still be read */
		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		if (!n)
			return false;
		if (n != sizeof(m))
			continue;
		if (!l->known) {
			l->known = true;
			l->peer.slot = m.from_slot;
			l->peer.generation = m.from_generation;
		}
		m.from_slot = l->peer.slot;
		m.from_generation = l->peer.generation;
		via = l->serial;
		cm_message_receive(&m);
		cm_deliver_local();
	}
	return true;
}

static void take_links(void)
{
	int fd;

	while (nlinks < LINKS_MAX && (fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0)
		if (!link_new(fd))
			emu_real.close(fd);
}

static int sleep_ms(void)
{
	uint64_t at = next_deadline(), now = now_ns();

	sleeps_until = at;
	if (at == UINT64_MAX)
		return -1;
	return at <= now ? 0 : (int)MIN((at - now) / 1000000 + 1, 1u << 30);
}

static nfds_t collect(struct pollfd *p, struct link **at)
{
	nfds_t n = 2;

	p[0] = (struct pollfd){ .fd = wake_fd, .events = POLLIN };
	p[1] = (struct pollfd){ .fd = nlinks < LINKS_MAX ? listener : -1, .events = POLLIN };
	for (struct emu_list *e = links.next; e != &links; e = e->next) {
		struct link *l = container_of(e, struct link, link);

		at[n] = l;
		p[n++] = (struct pollfd){ .fd = l->fd, .events = (short)(POLLIN | (list_empty(&l->out) ? 0 : POLLOUT)) };
	}
	return n;
}

static void *thread_main(void *unused)
{
	static struct pollfd p[LINKS_MAX + 2];
	static struct link *at[LINKS_MAX + 2];

	(void)unused;
	pthread_setname_np(pthread_self(), "aiordma-cm");
	cm_lock();
	while (!stop) {
		nfds_t n = collect(p, at);
		int ms = sleep_ms(), ready;
		uint64_t count;

		cm_unlock();
		ready = poll(p, n, ms);
		cm_lock();
		sleeps_until = 0;
		if (ready > 0 && p[0].revents && emu_real.read(wake_fd, &count, sizeof(count)) < 0)
			emu_log(EMU_DEBUG, "rdma_cm: woken for nothing");
		/* Links are freed by this thread only. The old ones come first: a process may be gone and back. */
		for (nfds_t i = 2; ready > 0 && i < n; i++) {
			if (p[i].revents & POLLOUT)
				flush(at[i]);
			if (!(p[i].revents & (POLLIN | POLLHUP | POLLERR)) || receive(at[i]))
				continue;
			cm_link_died(at[i]->serial);
			link_free(at[i]);
		}
		if (ready > 0 && p[1].revents)
			take_links();
		run_timers();
	}
	cm_unlock();
	return NULL;
}

/* ---------------------------------------------------------------- start and end */

static int listen_here(void)
{
	struct sockaddr_un a;
	socklen_t len;

	folder_fd = emu_real.open(registry_folder(), O_PATH | O_DIRECTORY | O_CLOEXEC);
	listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (listener < 0)
		return errno;
	len = address_of(&a, &self);
	unlink(a.sun_path);
	return bind(listener, (struct sockaddr *)&a, len) || listen(listener, 1024) ? errno : 0;
}

static void close_all(void)
{
	while (!list_empty(&links))
		link_free(container_of(links.next, struct link, link));
	drop_queue(&local);
	if (listener >= 0)
		emu_real.close(listener);
	if (wake_fd >= 0)
		emu_real.close(wake_fd);
	if (folder_fd >= 0)
		emu_real.close(folder_fd);
	listener = wake_fd = folder_fd = -1;
}

static void unlink_own(void)
{
	struct sockaddr_un a;

	address_of(&a, &self);
	unlink(a.sun_path);
}

/* A process may end with descriptors open. The kernel sees to the rest. */
static void at_exit(void)
{
	if (running && in_registry && getpid() == self.pid)
		unlink_own();
}

/* With the lock held. */
int cm_links_start(void)
{
	static bool registered;
	sigset_t all, old;
	int err;

	memset(&self, 0, sizeof(self));
	self.pid = getpid();
	in_registry = emu.reach_host && registry_start();
	if (in_registry) {
		self = *registry_self();
		err = listen_here();
		if (err) {
			emu_log(EMU_WARN, "rdma_cm: other processes can't be reached: %s", strerror(err));
			if (listener >= 0)
				emu_real.close(listener);
			listener = -1;
		}
	}
	cm_ports_start();
	wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	stop = false;
	sleeps_until = 0;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = wake_fd < 0 ? errno : pthread_create(&thread, NULL, thread_main, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	running = !err;
	if (err) {
		if (in_registry)
			unlink_own();
		close_all();
		cm_ports_stop();
		if (in_registry)
			registry_stop();
		return err;
	}
	if (!registered)
		atexit(at_exit);
	registered = true;
	return 0;
}

/* What was said last, as that a connection ends, should reach those who are a little slow. */
static void flush_all(void)
{
	uint64_t end = now_ns() + FLUSH_MS * 1000000ull;
	bool left = true;

	while (left && now_ns() < end) {
		left = false;
		for (struct emu_list *e = links.next; e != &links; e = e->next) {
			struct link *l = container_of(e, struct link, link);

			flush(l);
			left |= !list_empty(&l->out) && !l->dead;
		}
		if (left)
			usleep(1000);
	}
}

void cm_links_stop(void)
{
	if (!running)
		return;
	cm_lock();
	stop = true;
	wake();
	cm_unlock();
	pthread_join(thread, NULL);
	running = false;
	if (in_registry)
		unlink_own();
	flush_all();
	close_all();
	cm_ports_stop();
	if (in_registry)
		registry_stop();
	in_registry = false;
}

void cm_links_forked(void)
{
	running = in_registry = false;
	close_all();
	list_init(&timers);
}

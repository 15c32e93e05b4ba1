/* SPDX-License-Identifier: MIT
 * Descriptors of /dev/infiniband/rdma_cm and the events that wait on them: struct ucma_file of core/ucma.c.
 *
 * The application's descriptor is one end of a pair of sockets, so that poll, epoll and a blocking wait work on it with no
 * help of ours. There is a byte in it for each event that came since it was last empty, or fewer, if the socket
 * is full; they are taken out with the last event. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "cm.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct emu_list files = { &files, &files };

void cm_lock(void)
{
	pthread_mutex_lock(&lock);
}

void cm_unlock(void)
{
	cm_deliver_local();
	pthread_mutex_unlock(&lock);
}

bool emu_cm_is_node(const char *path)
{
	return path && !strcmp(path, "/dev/infiniband/rdma_cm") && emu_configured();
}

uint32_t cm_files(void)
{
	uint32_t n = 0;

	cm_lock();
	for (struct emu_list *l = files.next; l != &files; l = l->next)
		n++;
	cm_unlock();
	return n;
}

/* ---------------------------------------------------------------- open and close */

int cm_file_open(int flags, struct cm_file **file)
{
	int type = SOCK_STREAM | (flags & O_CLOEXEC ? SOCK_CLOEXEC : 0) | (flags & O_NONBLOCK ? SOCK_NONBLOCK : 0);
	struct cm_file *f = calloc(1, sizeof(*f));
	int ends[2], err;

	if (!f)
		return -ENOMEM;
	if (socketpair(AF_UNIX, type, 0, ends)) {
		err = errno;
		free(f);
		return -err;
	}
	fcntl(ends[1], F_SETFD, FD_CLOEXEC);
	f->fd = ends[0];
	f->wfd = ends[1];
	f->refs = 1;
	list_init(&f->ids);
	list_init(&f->events);
	cm_lock();
	if (list_empty(&files) && (err = cm_links_start())) {
		cm_unlock();
		emu_real.close(ends[0]);
		emu_real.close(ends[1]);
		free(f);
		return -err;
	}
	list_add_tail(&files, &f->link);
	cm_unlock();
	emu_log(EMU_DEBUG, "rdma_cm: opened, descriptor %d", f->fd);
	*file = f;
	return f->fd;
}

static void put(struct cm_file *f)
{
	if (--f->refs)
		return;
	free(f);
}

/* ucma_close(): every identifier goes, as if destroyed one after the other. */
void cm_file_close(struct cm_file *f)
{
	bool last;

	cm_lock();
	f->fd = -1; /* the number may be another file's by now */
	while (!list_empty(&f->ids))
		cm_id_destroy(container_of(f->ids.next, struct cm_id, link));
	f->closed = true;
	list_del(&f->link);
	emu_real.close(f->wfd); /* who waits on it wakes up */
	put(f);
	last = list_empty(&files);
	cm_unlock();
	if (last)
		cm_links_stop();
}

void cm_file_orphan(struct cm_file *f)
{
	cm_lock();
	f->orphan = true;
	cm_unlock();
}

void cm_file_reap(void)
{
	struct cm_file *f;

	do {
		f = NULL;
		cm_lock();
		for (struct emu_list *l = files.next; l != &files && !f; l = l->next)
			if (container_of(l, struct cm_file, link)->orphan)
				f = container_of(l, struct cm_file, link);
		if (f)
			f->orphan = false;
		cm_unlock();
		if (f)
			cm_file_close(f);
	} while (f);
}

int cm_file_of(int fd, struct cm_file **file)
{
	if (fcntl(fd, F_GETFD) < 0)
		return ENOENT;
	for (struct emu_list *l = files.prev; l != &files; l = l->prev) {
		*file = container_of(l, struct cm_file, link);
		if ((*file)->fd == fd && !(*file)->orphan)
			return 0;
	}
	return EINVAL;
}

void cm_file_get(struct cm_file *f)
{
	cm_lock();
	f->refs++;
	cm_unlock();
}

void cm_file_put(struct cm_file *f)
{
	cm_lock();
	put(f);
	cm_unlock();
}

void cm_before_fork(void)
{
	cm_lock();
}

/* The child has copies of descriptors and owns none of what is behind them. */
void cm_after_fork(bool child)
{
	if (!child) {
		pthread_mutex_unlock(&lock);
		return;
	}
	pthread_mutex_init(&lock, NULL);
	for (struct emu_list *l = files.next; l != &files; l = l->next)
		emu_real.close(container_of(l, struct cm_file, link)->wfd);
	list_init(&files);
	cm_ids_forked();
	cm_links_forked();
	cm_ports_stop();
}

/* ---------------------------------------------------------------- events */

void cm_event_push(struct cm_id *id, const struct rdma_ucm_event_resp *resp, struct cm_id *request)
{
	struct cm_event *e;

	/* ucma_event_handler(): of a request that isn't accepted nobody would know what to do with an event. */
	if (!id->uid && !request)
		return;
	e = calloc(1, sizeof(*e));
	if (!e) {
		emu_log(EMU_ERROR, "rdma_cm: no memory for an event");
		return;
	}
	e->id = id;
	e->request = request;
	if (request)
		request->untold = true;
	e->resp = *resp;
	e->resp.uid = id->uid;
	e->resp.id = request ? request->handle : id->handle;
	list_add_tail(&id->file->events, &e->link);
	/* If the socket is full, there is enough in it to be readable. */
	send(id->file->wfd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void cm_event_plain(struct cm_id *id, enum cm_event_type type, int32_t status)
{
	struct rdma_ucm_event_resp resp = { .event = type, .status = (uint32_t)status };

	cm_event_push(id, &resp, NULL);
}

/* Only within a command, which has just found the descriptor to be ours. */
static void settle(struct cm_file *f)
{
	uint8_t bytes[256];

	if (!list_empty(&f->events))
		return;
	while (recv(f->fd, bytes, sizeof(bytes), MSG_DONTWAIT) == sizeof(bytes))
		;
}

static void event_free(struct cm_event *e)
{
	if (e->request)
		e->request->untold = false;
	list_del(&e->link);
	free(e);
}

/* The descriptor was closed by another thread. The kernel's write() goes on waiting then, for it holds the file, until a
 * signal comes; rping ends that way. */
static int wait_for_signal(void)
{
	poll(NULL, 0, -1);
	return -EINTR;
}

/* As ucma_get_event() does, but that the wait is a look into the socket, which like the kernel's wait respects O_NONBLOCK
 * and goes on after a signal whose handler says SA_RESTART. */
int cm_event_wait(struct cm_file *f, int fd)
{
	for (;;) {
		int copy, err = 0, flags;
		ssize_t n;
		uint8_t byte;

		cm_lock();
		f->fd = fd;
		if (f->closed)
			err = EBADF;
		else if (!list_empty(&f->events))
			return 0;
		flags = fcntl(fd, F_GETFL);
		if (!err && (flags < 0 || flags & O_NONBLOCK))
			err = flags < 0 ? errno : EAGAIN;
		/* The number may be another file's as soon as another thread closes it. */
		copy = err ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
		if (!err && copy < 0)
			err = errno;
		cm_unlock();
		if (err)
			return -err;
		n = recv(copy, &byte, 1, MSG_PEEK);
		err = n < 0 ? errno : 0;
		emu_real.close(copy);
		if (err)
			return -err;
		if (!n)
			return wait_for_signal();
	}
}

void cm_event_pop(struct cm_file *f)
{
	event_free(container_of(f->events.next, struct cm_event, link));
	settle(f);
}

/* A program may destroy a request of which it hasn't heard. It hears of it all the same. */
static void forget_request(struct cm_id *request)
{
	for (struct emu_list *f = files.next; f != &files; f = f->next) {
		struct emu_list *events = &container_of(f, struct cm_file, link)->events;

		for (struct emu_list *l = events->next; l != events; l = l->next) {
			struct cm_event *e = container_of(l, struct cm_event, link);

			e->request = e->request == request ? NULL : e->request;
		}
	}
	request->untold = false;
}

/* ucma_cleanup_ctx_events(): requests that nobody has fetched go with their listener. */
void cm_event_drop(struct cm_id *id)
{
	struct cm_file *f = id->file;
	bool any = false;

	if (id->untold)
		forget_request(id);
	for (struct emu_list *l = f->events.next, *next; l != &f->events; l = next) {
		struct cm_event *e = container_of(l, struct cm_event, link);
		struct cm_id *request = e->request;

		next = l->next;
		if (e->id != id)
			continue;
		event_free(e);
		any = true;
		if (!request)
			continue;
		cm_id_destroy(request);
		next = f->events.next; /* its own events may have gone with it */
	}
	if (any)
		settle(f);
}

void cm_event_move(struct cm_id *id, struct cm_file *to)
{
	struct cm_file *from = id->file;

	for (struct emu_list *l = from->events.next, *next; l != &from->events; l = next) {
		struct cm_event *e = container_of(l, struct cm_event, link);

		next = l->next;
		if (e->id != id)
			continue;
		list_del(l);
		list_add_tail(&to->events, l);
		send(to->wfd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (e->request) {
			list_del(&e->request->link);
			list_add_tail(&to->ids, &e->request->link);
			e->request->file = to;
		}
	}
	settle(from);
}

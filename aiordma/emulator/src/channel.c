/* SPDX-License-Identifier: MIT
 * Event queues: what the kernel's event file descriptors are to libibverbs.
 *
 * Each is a pipe, so that poll, epoll and blocking reads work on the library's end with no help of ours. The kernel's
 * list of events has no limit, a pipe has: what doesn't fit waits in `overflow`, and the device thread moves it when the
 * reader has made room. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nic.h"

#include <rdma/ib_user_verbs.h>

int emu_channel_init(struct emu_channel *ch, uint32_t record_size)
{
	int fds[2];

	list_init(&ch->link);
	ch->rfd = ch->wfd = -1;
	if (!record_size || PIPE_BUF % record_size)
		return EINVAL; /* a record must be written whole or not at all */
	if (pipe2(fds, O_CLOEXEC))
		return errno;
	if (fcntl(fds[1], F_SETFL, O_NONBLOCK) < 0) {
		int err = errno;

		emu_real.close(fds[0]);
		emu_real.close(fds[1]);
		return err;
	}
	ch->rfd = fds[0];
	ch->wfd = fds[1];
	ch->record = record_size;
	ch->overflow = NULL;
	ch->nover = ch->cover = 0;
	return 0;
}

void emu_channel_close(struct emu_channel *ch, bool close_reader)
{
	if (ch->nover)
		engine_channel_overflow(ch, false);
	if (ch->wfd >= 0)
		emu_real.close(ch->wfd);
	if (close_reader && ch->rfd >= 0)
		emu_real.close(ch->rfd);
	free(ch->overflow);
	ch->overflow = NULL;
	ch->nover = 0;
	ch->wfd = ch->rfd = -1;
}

/* True if it need not be kept: it is written, or nobody will ever read it. */
static bool write_record(struct emu_channel *ch, const void *record)
{
	struct pollfd p = { .fd = ch->wfd, .events = POLLOUT };

	/* SIGPIPE is blocked in the device thread. Commands run on a thread of the application, and it would get it:
	 * hence a look before. */
	if (!engine_is_this_thread() && poll(&p, 1, 0) == 1 && (p.revents & POLLERR))
		return true;
	return emu_real.write(ch->wfd, record, ch->record) == (ssize_t)ch->record || errno == EPIPE;
}

static void keep(struct emu_channel *ch, const void *record)
{
	if (ch->nover == ch->cover) {
		size_t n = ch->cover ? ch->cover * 2 : 64;
		uint8_t *grown = realloc(ch->overflow, n * ch->record);

		if (!grown) {
			emu_log(EMU_ERROR, "no memory for an event");
			return;
		}
		ch->overflow = grown;
		ch->cover = n;
	}
	memcpy(ch->overflow + ch->nover * ch->record, record, ch->record);
	if (!ch->nover++)
		engine_channel_overflow(ch, true);
}

void channel_send(struct emu_channel *ch, const void *record)
{
	if (ch->wfd < 0)
		return;
	if (ch->nover || !write_record(ch, record))
		keep(ch, record);
}

bool channel_flush(struct emu_channel *ch)
{
	size_t n = 0;

	while (n < ch->nover && write_record(ch, ch->overflow + n * ch->record))
		n++;
	ch->nover -= n;
	memmove(ch->overflow, ch->overflow + n * ch->record, ch->nover * ch->record);
	return !ch->nover;
}

/* The object an event is about is the first word of both kinds of record (rdma/ib_user_verbs.h). */
static bool is_about(const uint8_t *record, uint64_t element)
{
	uint64_t e;

	memcpy(&e, record, sizeof(e));
	return e == element;
}

static uint32_t purge_overflow(struct emu_channel *ch, uint64_t element)
{
	size_t kept = 0;
	uint32_t gone;

	for (size_t i = 0; i < ch->nover; i++) {
		const uint8_t *r = ch->overflow + i * ch->record;

		if (!is_about(r, element))
			memmove(ch->overflow + kept++ * ch->record, r, ch->record);
	}
	gone = (uint32_t)(ch->nover - kept);
	if (gone && !kept)
		engine_channel_overflow(ch, false);
	ch->nover = kept;
	return gone;
}

/* The library's descriptor may be blocking, and another of its threads may read the record that poll() promised: an open
 * file of our own on the same pipe can't be made to wait by either. */
static int open_reader(const struct emu_channel *ch)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", ch->rfd);
	return emu_real.open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

uint32_t channel_purge(struct emu_channel *ch, uint64_t element)
{
	uint32_t gone = 0;
	uint8_t *kept = NULL;
	size_t nkept = 0, cap = 0;
	uint8_t record[64];
	int fd;

	if (ch->wfd < 0 || ch->record > sizeof(record))
		return 0;
	fd = open_reader(ch);
	if (fd < 0) {
		emu_log(EMU_WARN, "cannot take back events: %s", strerror(errno));
		return purge_overflow(ch, element);
	}
	while (emu_real.read(fd, record, ch->record) == (ssize_t)ch->record) {
		if (is_about(record, element)) {
			gone++;
			continue;
		}
		if (nkept == cap) {
			uint8_t *grown = realloc(kept, (cap += 64) * ch->record);

			if (!grown)
				break;
			kept = grown;
		}
		memcpy(kept + nkept++ * ch->record, record, ch->record);
	}
	/* They fitted before, and nobody else writes: they are older than what is in `overflow`. */
	for (size_t i = 0; i < nkept; i++)
		write_record(ch, kept + i * ch->record);
	free(kept);
	emu_real.close(fd);
	return gone + purge_overflow(ch, element);
}

void emu_async_event(struct emu_ucontext *ctx, uint32_t event_type, uint64_t element, uint32_t *counter)
{
	struct ib_uverbs_async_event_desc e = { .element = element, .event_type = event_type };

	if (!ctx || !ctx->async)
		return;
	if (counter && !element)
		return; /* about an object that DEVX made: libibverbs has no structure for it */
	if (counter)
		++*counter;
	channel_send(ctx->async, &e);
}

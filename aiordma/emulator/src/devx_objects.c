/* SPDX-License-Identifier: MIT
 * DEVX: what stands behind objects, UMEMs and descriptors of asynchronous queries.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "devx.h"

/* ---------------------------------------------------------------- objects */

struct emu_umem *devx_umem(struct emu_ucontext *ctx, uint32_t id)
{
	for (uint32_t h = 0; h < ctx->nhandles; h++) {
		struct emu_umem *u = (struct emu_umem *)ctx->handles[h];

		if (u && u->o.type == EMU_UMEM && u->id == id)
			return u;
	}
	return NULL;
}

bool devx_object_busy(const struct emu_object *o)
{
	const struct devx_object *d = (const struct devx_object *)o;

	return o->type == EMU_DEVX_OBJ && d->inner && d->inner->usecnt;
}

void devx_object_retire(struct devx_object *d)
{
	if (d->inner)
		emu_object_destroy(d->inner);
	for (size_t i = 0; i < ARRAY_LEN(d->umems); i++)
		if (d->umems[i])
			d->umems[i]->usecnt--;
}

/* A context goes away: its DEVX objects in an order in which none is in use any more, as the kernel finds by trying
 * (core/rdma_core.c, uverbs_destroy_ufile_hw()). */
void devx_context_destroy(struct emu_ucontext *ctx)
{
	bool progress = true;

	while (progress) {
		progress = false;
		for (uint32_t h = 0; h < ctx->nhandles; h++) {
			struct emu_object *o = ctx->handles[h];

			if (!o || o->type != EMU_DEVX_OBJ || o->usecnt || devx_object_busy(o))
				continue;
			emu_object_destroy(o);
			progress = true;
		}
	}
}

/* ---------------------------------------------------------------- asynchronous queries
 * The kernel's file gives one answer a read(), each of its own length: so does this kind of socket. */

#define BYTES_IN_FLIGHT (1 << 20) /* MAX_ASYNC_BYTES_IN_USE in mlx5/devx.c; the system may allow less */

int devx_cmd_fd_create(struct emu_ucontext *ctx, struct emu_channel **out)
{
	struct emu_channel **table = realloc(ctx->channels, (ctx->nchannels + 1) * sizeof(*table));
	struct emu_channel *c = emu_object_alloc(ctx, EMU_CMD_FD, sizeof(*c));
	int fds[2], size = BYTES_IN_FLIGHT, err;

	if (table)
		ctx->channels = table;
	if (!table || !c) {
		free(c);
		return ENOMEM;
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds)) {
		err = errno;
		free(c);
		return err;
	}
	list_init(&c->link);
	c->rfd = fds[0];
	c->wfd = fds[1];
	setsockopt(c->wfd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	err = emu_fd_set(c->rfd, EMU_FILE_CHANNEL, ctx, c);
	if (err) {
		emu_channel_close(c, true);
		free(c);
		return err;
	}
	ctx->channels[ctx->nchannels++] = c;
	ctx->dev->count[EMU_CHANNEL]++;
	*out = c;
	return 0;
}

int devx_cmd_fd_send(struct emu_channel *c, uint64_t wr_id, const uint8_t *data, size_t len)
{
	struct mlx5_ib_uapi_devx_async_cmd_hdr header = { .wr_id = wr_id };
	struct iovec parts[] = { { &header, sizeof(header) }, { (void *)data, len } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = ARRAY_LEN(parts) };

	if (sendmsg(c->wfd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
		return 0;
	return errno == EWOULDBLOCK ? EAGAIN : errno == EPIPE ? EBADF : errno;
}

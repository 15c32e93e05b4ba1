/* SPDX-License-Identifier: MIT
 * XRC domains: ib_uverbs_open_xrcd() in core/uverbs_cmd.c. What is opened with the same file, by whomever, is one domain.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>

#include "control.h"

/* Of any context of the device. */
static struct emu_xrcd *find_named(struct emu_device *d, const struct stat *st)
{
	for (struct emu_list *l = emu.contexts.next; l != &emu.contexts; l = l->next) {
		struct emu_ucontext *ctx = container_of(l, struct emu_ucontext, link);

		for (uint32_t h = 0; ctx->dev == d && h < ctx->nhandles; h++) {
			struct emu_xrcd *x = (struct emu_xrcd *)ctx->handles[h];

			if (x && x->o.type == EMU_XRCD && x->named && x->dev == st->st_dev && x->ino == st->st_ino)
				return x;
		}
	}
	return NULL;
}

/* The file's identity, and the domain that it stands for already. */
static int look_up(struct emu_device *d, const struct ib_uverbs_open_xrcd *req, struct stat *st, struct emu_xrcd **known)
{
	*known = NULL;
	if (req->fd == UINT32_MAX)
		return 0;
	/* Not fstat(): when we are preloaded that is our own hook. */
	if (fstatat((int)req->fd, "", st, AT_EMPTY_PATH))
		return EBADF;
	*known = find_named(d, st);
	if (!*known && !(req->oflags & O_CREAT))
		return EAGAIN;
	return *known && req->oflags & O_EXCL ? EINVAL : 0;
}

static int open_xrcd(struct emu_cmd *c)
{
	struct emu_device *d = c->ctx->dev;
	struct ib_uverbs_open_xrcd req;
	struct ib_uverbs_open_xrcd_resp resp = { 0 };
	struct emu_xrcd *known, *x;
	struct stat st;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (!d->limits.xrc)
		return EOPNOTSUPP;
	err = look_up(d, &req, &st, &known);
	if (err)
		return err;
	x = emu_object_alloc(c->ctx, EMU_XRCD, sizeof(*x));
	if (!x)
		return ENOMEM;
	x->xrcdn = known ? known->xrcdn : ++d->next_xrcdn;
	if (req.fd != UINT32_MAX) {
		x->named = true;
		x->dev = st.st_dev;
		x->ino = st.st_ino;
	}
	err = emu_object_publish(&x->o);
	if (!err) {
		resp.xrcd_handle = x->o.handle;
		err = cmd_response(c, &resp, sizeof(resp));
	}
	if (err)
		emu_object_free(&x->o);
	return err;
}

static int close_xrcd_write(struct emu_cmd *c)
{
	struct ib_uverbs_close_xrcd req;
	struct emu_object *x;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_XRCD, req.xrcd_handle, &x);
	if (!err)
		emu_object_destroy(x);
	return err;
}

static int close_xrcd(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, UVERBS_ATTR_DESTROY_XRCD_HANDLE));
	return 0;
}

static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_XRCD_HANDLE, ATTR_IDR_DESTROY, EMU_XRCD, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_XRCD, UVERBS_METHOD_XRCD_DESTROY, destroy_attrs, close_xrcd),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_OPEN_XRCD, false, true, true, sizeof(struct ib_uverbs_open_xrcd),
	  sizeof(struct ib_uverbs_open_xrcd_resp), open_xrcd, "OPEN_XRCD" },
	{ IB_USER_VERBS_CMD_CLOSE_XRCD, false, false, false, sizeof(struct ib_uverbs_close_xrcd), 0, close_xrcd_write,
	  "CLOSE_XRCD" },
};

const struct emu_methods emu_xrcd_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

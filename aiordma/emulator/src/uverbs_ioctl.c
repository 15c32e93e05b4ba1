/* SPDX-License-Identifier: MIT
 * Commands in the ioctl form: a header that names object and method, and a list of attributes.
 *
 * The rules are those of ib_uverbs_ioctl(), uverbs_process_attr() and uverbs_set_attr() in core/uverbs_ioctl.c. A method
 * that isn't there is EPROTONOSUPPORT, on which libibverbs falls back to the write form (libibverbs/cmd_fallback.c).
 */
#define _GNU_SOURCE
#include <inttypes.h>

#include "control.h"

#define ATTR_INLINE 8 /* input of up to this many bytes is in the attribute itself */
#define MAX_ATTRS 64  /* the most that any libibverbs sends is a third of it; the kernel's limit is a page */

static const struct emu_ioctl_method *find_method(uint16_t object, uint16_t method)
{
	for (uint32_t i = 0; i < emu_all_methods_len; i++)
		for (uint32_t j = 0; j < emu_all_methods[i]->nioctl; j++) {
			const struct emu_ioctl_method *m = &emu_all_methods[i]->ioctl[j];

			if (m->object == object && m->method == method)
				return m;
		}
	return NULL;
}

/* ---------------------------------------------------------------- attributes for the methods */

struct emu_attr *attr_get(struct emu_ioctl_call *call, uint16_t id)
{
	for (uint32_t i = 0; i < call->method->nattrs; i++)
		if (call->method->attrs[i].id == id)
			return call->attrs[i].present ? &call->attrs[i] : NULL;
	return NULL;
}

/* Where the bytes of an input attribute are: short ones are in our own copy. */
static uint64_t attr_address(const struct emu_attr *a)
{
	return a->len <= ATTR_INLINE ? (uint64_t)(uintptr_t)&a->data : a->data;
}

int attr_in(struct emu_ioctl_call *call, uint16_t id, void *dst, size_t size)
{
	struct emu_attr *a = attr_get(call, id);
	size_t known = a ? MIN(a->len, size) : 0;

	memset(dst, 0, size);
	return known ? user_read(dst, attr_address(a), known) : 0;
}

uint64_t attr_in_value(struct emu_ioctl_call *call, uint16_t id)
{
	struct emu_attr *a = attr_get(call, id);
	uint64_t value = 0;

	if (a)
		memcpy(&value, &a->data, MIN(a->len, sizeof(value)));
	return value;
}

static int set_valid_output(const struct emu_attr *a)
{
	uint16_t flags = a->flags | UVERBS_ATTR_F_VALID_OUTPUT;

	return user_write(a->user + offsetof(struct ib_uverbs_attr, flags), &flags, sizeof(flags));
}

int attr_out(struct emu_ioctl_call *call, uint16_t id, const void *src, size_t size)
{
	struct emu_attr *a = attr_get(call, id);
	size_t known;
	int err;

	if (!a)
		return 0;
	known = MIN(a->len, size);
	err = user_write(a->data, src, known);
	if (!err)
		err = user_zero(a->data + known, a->len - known);
	return err ? err : set_valid_output(a);
}

int attr_out_id(struct emu_ioctl_call *call, uint16_t id, int64_t value)
{
	struct emu_attr *a = attr_get(call, id);

	return a ? user_write(a->user + offsetof(struct ib_uverbs_attr, data), &value, sizeof(value)) : 0;
}

void *attr_object(struct emu_ioctl_call *call, uint16_t id)
{
	struct emu_attr *a = attr_get(call, id);

	return a ? a->object : NULL;
}

/* ---------------------------------------------------------------- validation */

static int take_buffer(const struct emu_attr_spec *spec, const struct ib_uverbs_attr *u, struct emu_attr *a)
{
	if (spec->kind == ATTR_IN && spec->zero_trailing && u->len > spec->max) {
		uint64_t beyond = (u->len <= ATTR_INLINE ? (uint64_t)(uintptr_t)&u->data : u->data) + spec->max;
		int err = user_check_zero(beyond, u->len - spec->max);

		if (err)
			return err;
	}
	if (u->len < spec->min || (spec->max && !spec->zero_trailing && u->len > spec->max))
		return EINVAL;
	if (u->attr_data.reserved)
		return EINVAL;
	a->len = u->len;
	a->data = u->data;
	return 0;
}

static int take_object(struct emu_ioctl_call *call, const struct emu_attr_spec *spec, const struct ib_uverbs_attr *u,
		       struct emu_attr *a)
{
	struct emu_ucontext *ctx = call->cmd.ctx;

	if (u->attr_data.reserved || u->len)
		return EINVAL;
	a->data = u->data;
	switch (spec->kind) {
	case ATTR_IDR:
	case ATTR_IDR_DESTROY:
		if (u->data > UINT32_MAX)
			return u->data_s64 < 0 ? EINVAL : ENOENT;
		if (spec->kind == ATTR_IDR_DESTROY)
			return emu_object_get_destroy(ctx, spec->type, (uint32_t)u->data, &a->object);
		if (u->data >= ctx->nhandles || !ctx->handles[u->data])
			return ENOENT;
		a->object = spec->type == EMU_NONE ? ctx->handles[u->data] : /* any type */
						     emu_object_get(ctx, spec->type, (uint32_t)u->data);
		return a->object ? 0 : EINVAL;
	case ATTR_FD:
		if (u->data_s64 != (int)u->data_s64)
			return EINVAL;
		a->object = emu_channel_by_fd(ctx, spec->type, (int)u->data_s64);
		return a->object ? 0 : EBADF;
	default: /* a new one: the method makes it */
		return 0;
	}
}

static int take_attr(struct emu_ioctl_call *call, const struct ib_uverbs_attr *u, uint64_t user)
{
	const struct emu_ioctl_method *m = call->method;
	struct emu_attr *a;
	uint32_t i;
	int err;

	for (i = 0; i < m->nattrs && m->attrs[i].id != u->attr_id; i++)
		;
	if (i == m->nattrs) {
		if (!(u->flags & UVERBS_ATTR_F_MANDATORY))
			return 0;
		emu_log(EMU_INFO, "%s: mandatory attribute 0x%x is not known", m->name, u->attr_id);
		return EPROTONOSUPPORT;
	}
	a = &call->attrs[i];
	if (a->present)
		return EINVAL;
	a->user = user;
	a->flags = u->flags;
	err = m->attrs[i].kind == ATTR_IN || m->attrs[i].kind == ATTR_OUT ? take_buffer(&m->attrs[i], u, a) :
									     take_object(call, &m->attrs[i], u, a);
	if (!err)
		a->present = true;
	return err;
}

static void take_udata(struct emu_ioctl_call *call)
{
	struct emu_attr *in = attr_get(call, UVERBS_ATTR_UHW_IN), *out = attr_get(call, UVERBS_ATTR_UHW_OUT);

	if (in)
		call->cmd.uhw_in = (struct emu_ubuf){ attr_address(in), in->len };
	if (out)
		call->cmd.uhw_out = (struct emu_ubuf){ out->data, out->len };
}

static int run(struct emu_ioctl_call *call, const struct ib_uverbs_ioctl_hdr *h, uint64_t attrs)
{
	const struct emu_ioctl_method *m = call->method;
	struct ib_uverbs_attr u[MAX_ATTRS];
	struct emu_attr *out;
	int err;

	if (h->num_attrs > MAX_ATTRS)
		return EINVAL;
	err = user_read(u, attrs, h->num_attrs * sizeof(u[0]));
	for (uint32_t i = 0; !err && i < h->num_attrs; i++)
		err = take_attr(call, &u[i], attrs + i * sizeof(u[0]));
	if (err)
		return err;
	for (uint32_t i = 0; i < m->nattrs; i++)
		if (m->attrs[i].mandatory && !call->attrs[i].present)
			return EINVAL;
	if (!call->cmd.ctx->established && !m->no_context)
		return EINVAL;
	if (m->udata)
		take_udata(call);
	err = m->run(call);
	out = m->udata && !err ? attr_get(call, UVERBS_ATTR_UHW_OUT) : NULL;
	return out ? set_valid_output(out) : err;
}

int emu_ioctl(struct emu_ucontext *ctx, void *arg, bool settled)
{
	uint64_t user = (uintptr_t)arg;
	struct emu_ioctl_call call = { .cmd = { .ctx = ctx, .settled = settled } };
	struct ib_uverbs_ioctl_hdr h;
	int err;

	err = user_read(&h, user, sizeof(h));
	if (err)
		return err;
	if (h.length > EMU_PAGE || h.length != sizeof(h) + h.num_attrs * sizeof(struct ib_uverbs_attr))
		return EINVAL;
	if (h.reserved1 || h.reserved2)
		return EPROTONOSUPPORT;
	if (h.driver_id != RDMA_DRIVER_MLX5)
		return EINVAL;
	call.method = find_method(h.object_id, h.method_id);
	if (ctx->inherited && (!call.method || !call.method->inherited))
		return EIO;
	if (!call.method) {
		emu_log(EMU_INFO, "%s: ioctl object 0x%x method 0x%x is not implemented", ctx->dev->name, h.object_id,
			h.method_id);
		return EPROTONOSUPPORT;
	}
	err = run(&call, &h, user + sizeof(h));
	if (err != EMU_SETTLE)
		emu_log(EMU_DEBUG, "%s: ioctl %s: %s", ctx->dev->name, call.method->name, err ? strerror(err) : "ok");
	return err;
}

/* SPDX-License-Identifier: MIT
 * Commands in their older form: write() of a header and a request. The extended form of the header gives the
 * provider's part its own lengths. INVOKE_WRITE of the ioctl form comes to the same methods (see cmd_device.c).
 *
 * Order and errno of the checks are those of ib_uverbs_write() and verify_hdr() in core/uverbs_main.c.
 */
#define _GNU_SOURCE
#include <inttypes.h>

#include "control.h"

const struct emu_methods *const emu_all_methods[] = {
	&emu_device_methods, &emu_pd_methods,  &emu_mr_methods,	  &emu_ah_methods,  &emu_cq_methods,
	&emu_qp_methods,     &emu_xrcd_methods, &emu_srq_methods, &emu_devx_methods, &emu_uar_methods,
	&emu_wq_methods,     &emu_dm_methods,  &emu_pp_methods,	  &emu_var_methods,
};
const uint32_t emu_all_methods_len = ARRAY_LEN(emu_all_methods);

/* uapi_get_method() of core/uverbs.h */
const struct emu_write_method *emu_write_method_find(uint32_t command, int *error)
{
	bool extended = command & IB_USER_VERBS_CMD_FLAG_EXTENDED;
	uint32_t number = command & IB_USER_VERBS_CMD_COMMAND_MASK;

	if (command & ~(uint32_t)(IB_USER_VERBS_CMD_FLAG_EXTENDED | IB_USER_VERBS_CMD_COMMAND_MASK)) {
		*error = EINVAL;
		return NULL;
	}
	for (uint32_t i = 0; i < emu_all_methods_len; i++)
		for (uint32_t j = 0; j < emu_all_methods[i]->nwrite; j++) {
			const struct emu_write_method *m = &emu_all_methods[i]->write[j];

			if (m->command == number && m->extended == extended)
				return m;
		}
	emu_log(EMU_WARN, "%scommand %u is not implemented", extended ? "extended " : "", number);
	*error = EOPNOTSUPP;
	return NULL;
}

int cmd_request(struct emu_cmd *c, void *request, size_t size)
{
	size_t known = MIN(c->in.len, size);
	int err = user_read(request, c->in.addr, known);

	if (err)
		return err;
	memset((char *)request + known, 0, size - known);
	return user_check_zero(c->in.addr + known, c->in.len - known);
}

int cmd_response(struct emu_cmd *c, const void *response, size_t size)
{
	size_t known = MIN(c->out.len, size);
	int err = user_write(c->out.addr, response, known);

	return err ? err : user_zero(c->out.addr + known, c->out.len - known);
}

int cmd_uhw_request(struct emu_cmd *c, void *request, size_t min, size_t size)
{
	size_t known = MIN(c->uhw_in.len, size);
	int err;

	if (c->uhw_in.len < min)
		return EINVAL;
	err = user_read(request, c->uhw_in.addr, known);
	if (err)
		return err;
	memset((char *)request + known, 0, size - known);
	return user_check_zero(c->uhw_in.addr + known, c->uhw_in.len - known);
}

/* ib_copy_to_udata(): only what fits */
int cmd_uhw_response(struct emu_cmd *c, const void *response, size_t size)
{
	return user_write(c->uhw_out.addr, response, MIN(c->uhw_out.len, size));
}

/* ---------------------------------------------------------------- the two headers */

static int prepare_plain(struct emu_cmd *c, const struct emu_write_method *m, const struct ib_uverbs_cmd_hdr *h,
			 uint64_t buf, size_t len)
{
	size_t in = h->in_words * 4u, out = h->out_words * 4u;
	uint64_t response = 0;
	int err;

	if (in != len)
		return EINVAL;
	if (len < m->request + sizeof(*h))
		return ENOSPC;
	if (out < m->response)
		return ENOSPC;
	buf += sizeof(*h);
	in -= sizeof(*h);
	if (m->has_response) {
		/* Every request with a response starts with its address. */
		err = user_read(&response, buf, sizeof(response));
		if (err)
			return err;
	}
	c->in = (struct emu_ubuf){ buf, m->has_udata ? m->request : in };
	c->out = (struct emu_ubuf){ response, m->has_response ? (m->has_udata ? m->response : out) : 0 };
	if (!m->has_udata)
		return 0;
	c->uhw_in = (struct emu_ubuf){ buf + m->request, in - m->request };
	if (m->has_response)
		c->uhw_out = (struct emu_ubuf){ response + m->response, out - m->response };
	return 0;
}

static int prepare_extended(struct emu_cmd *c, const struct emu_write_method *m, const struct ib_uverbs_cmd_hdr *h,
			    uint64_t buf, size_t len)
{
	struct ib_uverbs_ex_cmd_hdr ex;
	size_t in = h->in_words * 8u, out = h->out_words * 8u, uhw_in, uhw_out;
	int err;

	if (len < sizeof(*h) + sizeof(ex))
		return EINVAL;
	err = user_read(&ex, buf + sizeof(*h), sizeof(ex));
	if (err)
		return err;
	uhw_in = ex.provider_in_words * 8u;
	uhw_out = ex.provider_out_words * 8u;
	if (in + uhw_in != len - sizeof(*h) - sizeof(ex))
		return EINVAL;
	if (in < m->request)
		return ENOSPC;
	if (ex.cmd_hdr_reserved)
		return EINVAL;
	if (ex.response) {
		if (!out && !uhw_out)
			return EINVAL;
		if (out < m->response)
			return ENOSPC;
	} else if (out || uhw_out) {
		return EINVAL;
	}
	buf += sizeof(*h) + sizeof(ex);
	c->in = (struct emu_ubuf){ buf, in };
	c->uhw_in = (struct emu_ubuf){ buf + in, uhw_in };
	c->out = (struct emu_ubuf){ ex.response, out };
	c->uhw_out = (struct emu_ubuf){ ex.response + out, uhw_out };
	return 0;
}

ssize_t emu_write(struct emu_ucontext *ctx, const void *user, size_t len, bool settled)
{
	uint64_t buf = (uintptr_t)user;
	struct emu_cmd c = { .ctx = ctx, .settled = settled };
	const struct emu_write_method *m;
	struct ib_uverbs_cmd_hdr h;
	int err;

	if (len < sizeof(h))
		return -EINVAL;
	err = user_read(&h, buf, sizeof(h));
	if (err)
		return -err;
	m = emu_write_method_find(h.command, &err);
	if (!m)
		return -err;
	err = m->extended ? prepare_extended(&c, m, &h, buf, len) : prepare_plain(&c, m, &h, buf, len);
	if (!err && !ctx->established && (m->extended || m->command != IB_USER_VERBS_CMD_GET_CONTEXT))
		err = EINVAL; /* ib_uverbs_get_ucontext() */
	if (!err)
		err = m->run(&c);
	if (err != EMU_SETTLE)
		emu_log(EMU_DEBUG, "%s: write %s: %s", ctx->dev->name, m->name, err ? strerror(err) : "ok");
	return err ? -err : (ssize_t)len;
}

/* SPDX-License-Identifier: MIT
 * Commands about the device: its context, attributes, ports and GIDs.
 *
 * The numbers stand for a ConnectX-6 Dx with RoCE ports. What isn't implemented isn't advertised.
 */
#define _GNU_SOURCE
#include <net/if.h>
#include <stdlib.h>

#include "control.h"

#define VENDOR_ID 0x2c9	     /* what mlx5 reports: the OUI, not the PCI vendor */
#define VENDOR_PART_ID 0x101d /* PCI device of the ConnectX-6 Dx */
#define FW_MAJOR 22ull
#define FW_MINOR 39ull
#define FW_SUBMINOR 1002ull

#define CQ_MODERATION_MAX 0xffffu /* mlx5/main.c, MLX5_MAX_CQ_COUNT and MLX5_MAX_CQ_PERIOD */
/* A CQE's timestamp counts nanoseconds. */
#define CORE_CLOCK_KHZ 1000000u

/* ---------------------------------------------------------------- the context */

/* What libmlx5 sizes its queues by: mlx5_set_context() in its mlx5.c reads every field. */
void emu_fill_ucontext(struct emu_ucontext *ctx, struct mlx5_ib_alloc_ucontext_resp *r)
{
	const struct emu_limits *l = &ctx->dev->limits;

	*r = (struct mlx5_ib_alloc_ucontext_resp){
		.qp_tab_size = 1u << 18, /* libmlx5's own table of QP numbers spans 24 bits; this field is unused by it */
		.bf_reg_size = 512,	 /* two BlueFlame buffers of 256 bytes */
		.tot_bfregs = ctx->static_uars ? 16 : 0,
		.cache_line_size = 64,
		.max_sq_desc_sz = 1024, /* 63 segments of 16 bytes fit, which is what a WQE's 6-bit size counts */
		.max_rq_desc_sz = 512,
		.max_send_wqebb = l->max_qp_wr,
		.max_recv_wr = l->max_qp_wr,
		.max_srq_recv_wr = l->max_srq_wr,
		.num_ports = (uint16_t)ctx->dev->nports,
		.response_length = sizeof(*r),
		.cqe_version = 1, /* CQEs carry the QP's user index */
		.cmds_supp_uhw = MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE | MLX5_USER_CMDS_SUPP_UHW_CREATE_AH,
		.eth_min_inline = MLX5_USER_INLINE_MODE_NONE,
		.log_uar_size = 12,
		.num_uars_per_page = 1,
		.num_dyn_bfregs = 1024,
		.clock_info_versions = 1u << MLX5_IB_CLOCK_INFO_V1,
		.comp_mask = emu_mmio_supported() ? MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET : 0,
		.hca_core_clock_offset = EMU_CLOCK_OFFSET,
	};
}

/* mlx5_ib_alloc_ucontext() in mlx5/main.c */
static int alloc_ucontext(struct emu_cmd *c)
{
	struct mlx5_ib_alloc_ucontext_req_v2 req;
	struct mlx5_ib_alloc_ucontext_resp resp;
	int err;

	if (c->uhw_in.len != sizeof(struct mlx5_ib_alloc_ucontext_req) &&
	    c->uhw_in.len < offsetof(struct mlx5_ib_alloc_ucontext_req_v2, max_cqe_version))
		return EINVAL;
	err = cmd_uhw_request(c, &req, 0, sizeof(req));
	if (err)
		return err;
	if (req.flags & ~(uint32_t)MLX5_IB_ALLOC_UCTX_DEVX)
		return EINVAL;
	if (req.flags & MLX5_IB_ALLOC_UCTX_DEVX && !c->ctx->dev->limits.devx)
		return EINVAL; /* mlx5_ib_devx_create(); libmlx5 then asks again without, unless the user insists */
	if (req.comp_mask || req.reserved0 || req.reserved1 || req.reserved2)
		return EOPNOTSUPP;
	if (!req.total_num_bfregs || req.num_low_latency_bfregs > req.total_num_bfregs - 1)
		return EINVAL;
	/* An old kernel doesn't know this bit and hands out pages by index. */
	c->ctx->static_uars = emu.legacy_write || !(req.lib_caps & MLX5_LIB_CAP_DYN_UAR);
	c->ctx->devx = req.flags & MLX5_IB_ALLOC_UCTX_DEVX;
	emu_fill_ucontext(c->ctx, &resp);
	resp.response_length = (uint32_t)MIN(sizeof(resp), c->uhw_out.len);
	if (c->ctx->static_uars)
		resp.tot_bfregs = (req.total_num_bfregs + 1) & ~1u; /* two usable registers a page */
	return cmd_uhw_response(c, &resp, sizeof(resp));
}

int emu_context_establish(struct emu_cmd *c)
{
	int err;

	if (c->ctx->established)
		return EINVAL;
	err = alloc_ucontext(c);
	if (!err)
		c->ctx->established = true;
	return err;
}

static int create_async(struct emu_ucontext *ctx, struct emu_channel **channel)
{
	int err = emu_channel_create(ctx, sizeof(struct ib_uverbs_async_event_desc), channel);

	/* The first is where events without a file of their own go: default_async_file in core/uverbs_std_types_async_fd.c */
	if (!err && !ctx->async)
		ctx->async = *channel;
	return err;
}

static int get_context_write(struct emu_cmd *c)
{
	struct ib_uverbs_get_context req;
	struct ib_uverbs_get_context_resp resp = { .num_comp_vectors = c->ctx->dev->limits.comp_vectors };
	struct emu_channel *channel;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err && c->ctx->established)
		err = EINVAL;
	if (!err)
		err = create_async(c->ctx, &channel);
	if (err)
		return err;
	resp.async_fd = (uint32_t)channel->rfd;
	err = cmd_response(c, &resp, sizeof(resp));
	if (!err)
		err = emu_context_establish(c);
	if (err) {
		int fd = channel->rfd;

		emu_fd_clear(fd);
		emu_real.close(fd);
	}
	return err;
}

static int get_context(struct emu_ioctl_call *call)
{
	struct emu_ucontext *ctx = call->cmd.ctx;
	uint64_t support = IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS;
	int err = attr_out(call, UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, &ctx->dev->limits.comp_vectors, 4);

	if (!err)
		err = attr_out(call, UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, &support, sizeof(support));
	return err ? err : emu_context_establish(&call->cmd);
}

/* For a second user of an open descriptor (ibv_import_device). */
static int query_context(struct emu_ioctl_call *call)
{
	struct emu_ucontext *ctx = call->cmd.ctx;
	uint64_t support = IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS;
	struct mlx5_ib_alloc_ucontext_resp resp;
	int err = attr_out(call, UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, &ctx->dev->limits.comp_vectors, 4);

	emu_fill_ucontext(ctx, &resp);
	if (!err)
		err = attr_out(call, UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, &support, sizeof(support));
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX, &resp, sizeof(resp));
	return err;
}

static int async_event_alloc(struct emu_ioctl_call *call)
{
	struct emu_channel *channel;
	int err = create_async(call->cmd.ctx, &channel);

	return err ? err : attr_out_id(call, UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, channel->rfd);
}

/* ---------------------------------------------------------------- attributes */

static void fill_device(const struct emu_device *d, struct ib_uverbs_query_device_resp *r)
{
	const struct emu_limits *l = &d->limits;

	*r = (struct ib_uverbs_query_device_resp){
		.fw_ver = FW_MAJOR << 32 | FW_MINOR << 16 | FW_SUBMINOR,
		.node_guid = htobe64(d->node_guid),
		.sys_image_guid = htobe64(d->node_guid),
		.max_mr_size = l->max_mr_size,
		.page_size_cap = ~(uint64_t)(EMU_PAGE - 1),
		.vendor_id = VENDOR_ID,
		.vendor_part_id = VENDOR_PART_ID,
		.max_qp = l->max_qp,
		.max_qp_wr = l->max_qp_wr,
		.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SYS_IMAGE_GUID |
				    IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_CHANGE_PHY_PORT |
				    IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B |
				    IBV_DEVICE_MEM_MGT_EXTENSIONS | (l->xrc ? IBV_DEVICE_XRC : 0),
		.max_sge = l->max_sge,
		.max_sge_rd = l->max_sge_rd,
		.max_cq = l->max_cq,
		.max_cqe = l->max_cqe,
		.max_mr = l->max_mr,
		.max_pd = l->max_pd,
		.max_qp_rd_atom = l->max_qp_rd_atom,
		.max_res_rd_atom = (uint32_t)MIN((uint64_t)l->max_qp_rd_atom * l->max_qp, INT32_MAX),
		.max_qp_init_rd_atom = l->max_qp_init_rd_atom,
		.atomic_cap = l->atomics ? IBV_ATOMIC_HCA : IBV_ATOMIC_NONE,
		.max_mw = l->max_mw,
		.max_ah = l->max_ah,
		.max_srq = l->max_srq,
		.max_srq_wr = l->max_srq_wr,
		.max_srq_sge = l->max_srq_sge,
		.max_pkeys = EMU_PORT_PKEYS,
		.local_ca_ack_delay = 16,
		.phys_port_cnt = (uint8_t)d->nports,
	};
}

static int query_device(struct emu_cmd *c)
{
	struct ib_uverbs_query_device req;
	struct ib_uverbs_query_device_resp resp;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	fill_device(c->ctx->dev, &resp);
	return cmd_response(c, &resp, sizeof(resp));
}

/* mlx5_ib_query_device(): each part goes in only as far as the caller has room for it. */
static int query_device_uhw(struct emu_cmd *c)
{
	struct mlx5_ib_query_device_resp r = { .flags = MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_PAD };

	if (c->ctx->dev->limits.dc) {
		uint8_t log = (uint8_t)c->ctx->dev->limits.log_max_dci_streams;

		r.dci_streams_caps = (struct mlx5_ib_dci_streams_caps){ log, log };
	}
	if (c->uhw_out.len && c->uhw_out.len < offsetof(struct mlx5_ib_query_device_resp, tso_caps))
		return EINVAL;
	r.response_length = (uint32_t)MIN(sizeof(r), c->uhw_out.len);
	return cmd_uhw_response(c, &r, sizeof(r));
}

static int query_device_ex(struct emu_cmd *c)
{
	struct ib_uverbs_ex_query_device req;
	struct ib_uverbs_ex_query_device_resp resp = {
		.timestamp_mask = EMU_TIMESTAMP_MASK,
		.hca_core_clock = CORE_CLOCK_KHZ,
		.cq_moderation_caps = { CQ_MODERATION_MAX, CQ_MODERATION_MAX, 0 },
		/* There is no write() form of the commands for it. */
		.max_dm_size = emu.legacy_write ? 0 : c->ctx->dev->limits.max_dm_size,
	};
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	if (req.comp_mask || req.reserved)
		return EINVAL;
	err = query_device_uhw(c);
	if (err)
		return err;
	fill_device(c->ctx->dev, &resp.base);
	resp.device_cap_flags_ex = resp.base.device_cap_flags;
	resp.response_length = cmd_response_length(c, sizeof(resp));
	return cmd_response(c, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- ports */

/* mlx5_query_port_roce() in mlx5/main.c, for a 100 Gb/s link: four lanes of EDR. */
static void fill_port(const struct emu_device *d, const struct emu_port_config *p, struct ib_uverbs_query_port_resp *r)
{
	bool up = p->state == IBV_PORT_ACTIVE;

	*r = (struct ib_uverbs_query_port_resp){
		.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
		.max_msg_sz = d->limits.max_msg_sz,
		.gid_tbl_len = p->ngids,
		.pkey_tbl_len = EMU_PORT_PKEYS,
		.state = p->state,
		.max_mtu = p->max_mtu,
		.active_mtu = p->active_mtu,
		.active_width = 2, /* 4X */
		.active_speed = 32, /* EDR */
		.phys_state = up ? 5 : 3, /* LinkUp, Disabled */
		.link_layer = p->link_layer,
	};
}

static int query_port_write(struct emu_cmd *c)
{
	struct ib_uverbs_query_port req;
	struct ib_uverbs_query_port_resp resp;
	struct emu_port_config *port;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	port = emu_port(c->ctx->dev, req.port_num);
	if (!port)
		return EINVAL;
	fill_port(c->ctx->dev, port, &resp);
	return cmd_response(c, &resp, sizeof(resp));
}

static int query_port(struct emu_ioctl_call *call)
{
	struct emu_device *d = call->cmd.ctx->dev;
	struct emu_port_config *port = emu_port(d, (uint32_t)attr_in_value(call, UVERBS_ATTR_QUERY_PORT_PORT_NUM));
	struct ib_uverbs_query_port_resp_ex resp = { 0 };

	if (!port)
		return EINVAL;
	fill_port(d, port, &resp.legacy_resp);
	return attr_out(call, UVERBS_ATTR_QUERY_PORT_RESP, &resp, sizeof(resp));
}

/* MLX5_IB_METHOD_QUERY_PORT in mlx5/std_types.c: there is something to tell only of an e-switch in switchdev mode, or of
 * ports that are PCI functions of their own. */
static int query_port_mlx5(struct emu_ioctl_call *call)
{
	struct mlx5_ib_uapi_query_port info = { 0 };

	if (!emu_port(call->cmd.ctx->dev, (uint32_t)attr_in_value(call, MLX5_IB_ATTR_QUERY_PORT_PORT_NUM)))
		return EINVAL;
	return attr_out(call, MLX5_IB_ATTR_QUERY_PORT, &info, sizeof(info));
}

/* ---------------------------------------------------------------- GIDs */

static void fill_gid(const struct emu_gid *g, uint32_t port, uint32_t index, struct ib_uverbs_gid_entry *e)
{
	memset(e, 0, sizeof(*e));
	memcpy(e->gid, g->gid.raw, sizeof(e->gid));
	e->gid_index = index;
	e->port_num = port;
	e->gid_type = g->type;
	e->netdev_ifindex = g->ndev[0] ? if_nametoindex(g->ndev) : 0;
}

/* rdma_query_gid_table() in core/cache.c */
static int query_gid_table(struct emu_ioctl_call *call)
{
	struct emu_device *d = call->cmd.ctx->dev;
	struct emu_attr *out = attr_get(call, UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES);
	uint64_t size = attr_in_value(call, UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE), found = 0, room;
	struct ib_uverbs_gid_entry e;
	int err = 0;

	if (attr_in_value(call, UVERBS_ATTR_QUERY_GID_TABLE_FLAGS) || size < sizeof(e) || out->len % size)
		return EINVAL;
	room = out->len / size;
	if (!room)
		return EINVAL;
	for (uint32_t p = 1; p <= d->nports; p++)
		for (uint32_t i = 0; !err && i < d->ports[p - 1].ngids; i++) {
			if (!d->ports[p - 1].gids[i].valid)
				continue;
			if (found == room)
				return EINVAL;
			fill_gid(&d->ports[p - 1].gids[i], p, i, &e);
			err = user_write(out->data + found * size, &e, sizeof(e));
			if (!err)
				err = user_zero(out->data + found * size + sizeof(e), size - sizeof(e));
			found++;
		}
	return err ? err : attr_out(call, UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &found, sizeof(found));
}

static int query_gid_entry(struct emu_ioctl_call *call)
{
	struct emu_device *d = call->cmd.ctx->dev;
	uint32_t n = (uint32_t)attr_in_value(call, UVERBS_ATTR_QUERY_GID_ENTRY_PORT);
	uint32_t index = (uint32_t)attr_in_value(call, UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX);
	struct emu_port_config *port = emu_port(d, n);
	struct ib_uverbs_gid_entry e;

	if (attr_in_value(call, UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS) || !port || index >= port->ngids)
		return EINVAL;
	if (!port->gids[index].valid)
		return ENODATA; /* rdma_get_gid_attr() */
	fill_gid(&port->gids[index], n, index, &e);
	return attr_out(call, UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &e, sizeof(e));
}

/* ---------------------------------------------------------------- a write command inside an ioctl
 * UVERBS_HANDLER(UVERBS_METHOD_INVOKE_WRITE) in core/uverbs_std_types_device.c. libibverbs probes for this with an empty
 * QUERY_DEVICE and takes ENOSPC for a yes. */
static int invoke_write(struct emu_ioctl_call *call)
{
	struct emu_attr *in = attr_get(call, UVERBS_ATTR_CORE_IN), *out = attr_get(call, UVERBS_ATTR_CORE_OUT);
	struct emu_cmd *c = &call->cmd;
	const struct emu_write_method *m;
	int err;

	m = emu_write_method_find((uint32_t)attr_in_value(call, UVERBS_ATTR_WRITE_CMD), &err);
	if (!m)
		return err;
	if (c->ctx->inherited && m->run != query_device && m->run != query_device_ex)
		return EIO;
	if (in)
		c->in = (struct emu_ubuf){ in->len <= 8 ? (uint64_t)(uintptr_t)&in->data : in->data, in->len };
	if (out)
		c->out = (struct emu_ubuf){ out->data, out->len };
	if (c->in.len < m->request || c->out.len < m->response)
		return ENOSPC;
	if (!c->ctx->established && (m->extended || m->command != IB_USER_VERBS_CMD_GET_CONTEXT))
		return EINVAL;
	err = m->run(c);
	if (err != EMU_SETTLE)
		emu_log(EMU_DEBUG, "%s: %s: %s", c->ctx->dev->name, m->name, err ? strerror(err) : "ok");
	if (!err && out) {
		uint16_t flags = out->flags | UVERBS_ATTR_F_VALID_OUTPUT;

		err = user_write(out->user + offsetof(struct ib_uverbs_attr, flags), &flags, sizeof(flags));
	}
	return err;
}

/* ---------------------------------------------------------------- tables */

static const struct emu_attr_spec invoke_write_attrs[] = {
	ATTR_CONST_IN(UVERBS_ATTR_WRITE_CMD),
	{ .id = UVERBS_ATTR_CORE_IN, .kind = ATTR_IN, .min = 4 },
	{ .id = UVERBS_ATTR_CORE_OUT, .kind = ATTR_OUT },
	ATTR_UHW,
};
static const struct emu_attr_spec get_context_attrs[] = {
	ATTR_OUT_TYPE(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, uint32_t, false),
	ATTR_OUT_TYPE(UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, uint64_t, false),
	ATTR_UHW,
};
static const struct emu_attr_spec query_context_attrs[] = {
	ATTR_OUT_TYPE(UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, uint32_t, false),
	ATTR_OUT_TYPE(UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, uint64_t, false),
	{ .id = MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX, .kind = ATTR_OUT, .mandatory = true,
	  .min = offsetof(struct mlx5_ib_alloc_ucontext_resp, dump_fill_mkey) + 4, .max = sizeof(struct mlx5_ib_alloc_ucontext_resp),
	  .zero_trailing = true },
};
static const struct emu_attr_spec async_event_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, ATTR_FD_NEW, EMU_CHANNEL, true),
};
static const struct emu_attr_spec query_port_attrs[] = {
	ATTR_CONST_IN(UVERBS_ATTR_QUERY_PORT_PORT_NUM),
	{ .id = UVERBS_ATTR_QUERY_PORT_RESP, .kind = ATTR_OUT, .mandatory = true,
	  .min = offsetof(struct ib_uverbs_query_port_resp_ex, reserved), .max = sizeof(struct ib_uverbs_query_port_resp_ex),
	  .zero_trailing = true },
};
static const struct emu_attr_spec query_port_mlx5_attrs[] = {
	ATTR_IN_TYPE(MLX5_IB_ATTR_QUERY_PORT_PORT_NUM, uint32_t, true),
	{ .id = MLX5_IB_ATTR_QUERY_PORT, .kind = ATTR_OUT, .mandatory = true,
	  .min = offsetof(struct mlx5_ib_uapi_query_port, reg_c0) + sizeof(struct mlx5_ib_uapi_reg),
	  .max = sizeof(struct mlx5_ib_uapi_query_port), .zero_trailing = true },
};
static const struct emu_attr_spec query_gid_table_attrs[] = {
	ATTR_CONST_IN(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE),
	ATTR_FLAGS_IN(UVERBS_ATTR_QUERY_GID_TABLE_FLAGS, false),
	{ .id = UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, .kind = ATTR_OUT, .mandatory = true },
	ATTR_OUT_TYPE(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, uint64_t, true),
};
static const struct emu_attr_spec query_gid_entry_attrs[] = {
	ATTR_CONST_IN(UVERBS_ATTR_QUERY_GID_ENTRY_PORT),
	ATTR_CONST_IN(UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX),
	ATTR_FLAGS_IN(UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS, false),
	{ .id = UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, .kind = ATTR_OUT, .mandatory = true,
	  .min = sizeof(struct ib_uverbs_gid_entry), .max = sizeof(struct ib_uverbs_gid_entry), .zero_trailing = true },
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, invoke_write_attrs, invoke_write, .udata = true,
		     .no_context = true, .inherited = true),
	IOCTL_METHOD(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT, get_context_attrs, get_context, .udata = true,
		     .no_context = true),
	IOCTL_METHOD(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT, query_context_attrs, query_context),
	IOCTL_METHOD(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT, query_port_attrs, query_port),
	IOCTL_METHOD(UVERBS_OBJECT_DEVICE, MLX5_IB_METHOD_QUERY_PORT, query_port_mlx5_attrs, query_port_mlx5),
	IOCTL_METHOD(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE, query_gid_table_attrs, query_gid_table),
	IOCTL_METHOD(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_ENTRY, query_gid_entry_attrs, query_gid_entry),
	IOCTL_METHOD(UVERBS_OBJECT_ASYNC_EVENT, UVERBS_METHOD_ASYNC_EVENT_ALLOC, async_event_attrs, async_event_alloc),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_GET_CONTEXT, false, true, true, sizeof(struct ib_uverbs_get_context),
	  sizeof(struct ib_uverbs_get_context_resp), get_context_write, "GET_CONTEXT" },
	{ IB_USER_VERBS_CMD_QUERY_DEVICE, false, true, false, sizeof(struct ib_uverbs_query_device),
	  sizeof(struct ib_uverbs_query_device_resp), query_device, "QUERY_DEVICE" },
	{ IB_USER_VERBS_CMD_QUERY_PORT, false, true, false, sizeof(struct ib_uverbs_query_port),
	  sizeof(struct ib_uverbs_query_port_resp), query_port_write, "QUERY_PORT" },
	{ IB_USER_VERBS_EX_CMD_QUERY_DEVICE, true, true, true, sizeof(struct ib_uverbs_ex_query_device),
	  offsetof(struct ib_uverbs_ex_query_device_resp, odp_caps), query_device_ex, "EX_QUERY_DEVICE" },
};

const struct emu_methods emu_device_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

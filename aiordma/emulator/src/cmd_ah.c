/* SPDX-License-Identifier: MIT
 * Address handles, and the checks of a path that QPs share with them.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "control.h"

/* ---------------------------------------------------------------- MAC addresses */

/* An EUI-64 back to the MAC it was made of (RFC 4291, appendix A): rdma_get_ll_mac(). */
static void mac_of_eui64(const uint8_t *eui, uint8_t *mac)
{
	mac[0] = eui[0] ^ 2;
	mac[1] = eui[1];
	mac[2] = eui[2];
	memcpy(mac + 3, eui + 5, 3);
}

static bool is_link_local(const union ibv_gid *g)
{
	return g->raw[0] == 0xfe && (g->raw[1] & 0xc0) == 0x80;
}

/* The emulated network's neighbour discovery: the device whose table has the address answers. Who isn't in this process
 * gets a locally administered address made of the IP address; no packet goes by it. */
static void resolve_dmac(const union ibv_gid *dgid, uint8_t *mac)
{
	if (dgid->raw[0] == 0xff) { /* RFC 2464, section 7 */
		mac[0] = mac[1] = 0x33;
		memcpy(mac + 2, dgid->raw + 12, 4);
		return;
	}
	if (is_link_local(dgid)) {
		mac_of_eui64(dgid->raw + 8, mac);
		return;
	}
	for (uint32_t i = 0; i < emu.ndevices; i++)
		for (uint32_t p = 0; p < emu.devices[i].nports; p++)
			for (uint32_t g = 0; g < emu.devices[i].ports[p].ngids; g++) {
				const struct emu_gid *e = &emu.devices[i].ports[p].gids[g];
				uint64_t guid = htobe64(emu.devices[i].node_guid);

				if (e->valid && !memcmp(e->gid.raw, dgid->raw, sizeof(dgid->raw))) {
					mac_of_eui64((const uint8_t *)&guid, mac);
					return;
				}
			}
	mac[0] = 2;
	mac[1] = 0;
	memcpy(mac + 2, dgid->raw + 12, 4);
}

/* ---------------------------------------------------------------- paths */

/* rdma_check_ah_attr() in core/verbs.c, then rdma_get_gid_attr() in core/cache.c. */
int emu_path_check(struct emu_device *d, const struct ib_uverbs_qp_dest *dest, struct emu_path *path)
{
	struct emu_port_config *port = emu_port(d, dest->port_num);

	if (!port)
		return EINVAL;
	if (!dest->is_global) /* RoCE has nothing else */
		return EINVAL;
	if (dest->sgid_index >= port->ngids)
		return EINVAL;
	if (!port->gids[dest->sgid_index].valid)
		return ENODATA;
	memset(path, 0, sizeof(*path));
	memcpy(path->dgid.raw, dest->dgid, sizeof(path->dgid.raw));
	path->sgid_index = dest->sgid_index;
	path->port = dest->port_num;
	path->hop_limit = dest->hop_limit;
	path->traffic_class = dest->traffic_class;
	path->sl = dest->sl & 0xf; /* as wide as the queue pair context's field */
	path->flow_label = dest->flow_label & 0xfffff;
	path->is_global = true;
	path->dlid = dest->dlid;
	resolve_dmac(&path->dgid, path->dmac);
	return 0;
}

void emu_path_from_ah(const struct ib_uverbs_ah_attr *ah, struct ib_uverbs_qp_dest *dest)
{
	memset(dest, 0, sizeof(*dest));
	memcpy(dest->dgid, ah->grh.dgid, sizeof(dest->dgid));
	dest->flow_label = ah->grh.flow_label;
	dest->sgid_index = ah->grh.sgid_index;
	dest->hop_limit = ah->grh.hop_limit;
	dest->traffic_class = ah->grh.traffic_class;
	dest->dlid = ah->dlid;
	dest->sl = ah->sl;
	dest->is_global = ah->is_global;
	dest->port_num = ah->port_num;
}

void emu_path_to_dest(const struct emu_path *path, struct ib_uverbs_qp_dest *dest)
{
	memset(dest, 0, sizeof(*dest));
	if (!path->port)
		return;
	dest->port_num = path->port;
	dest->dlid = path->dlid;
	dest->sl = path->sl;
	dest->is_global = path->is_global;
	if (!path->is_global)
		return;
	memcpy(dest->dgid, path->dgid.raw, sizeof(dest->dgid));
	dest->flow_label = path->flow_label;
	dest->sgid_index = path->sgid_index;
	dest->hop_limit = path->hop_limit;
	dest->traffic_class = path->traffic_class;
}

/* ---------------------------------------------------------------- commands */

/* mlx5_ib_create_ah(): the library can't resolve the MAC itself, it takes it from here. */
static int respond_dmac(struct emu_cmd *c, const struct emu_ah *ah)
{
	struct mlx5_ib_create_ah_resp resp = { 0 };
	const size_t min = offsetof(struct mlx5_ib_create_ah_resp, reserved);

	if (!c->uhw_out.len)
		return 0;
	if (c->uhw_out.len < min)
		return EINVAL;
	resp.response_length = (uint32_t)min;
	memcpy(resp.dmac, ah->av.dmac, sizeof(resp.dmac));
	return cmd_uhw_response(c, &resp, min);
}

static int create_ah(struct emu_cmd *c)
{
	struct ib_uverbs_create_ah req;
	struct ib_uverbs_create_ah_resp resp = { 0 };
	struct ib_uverbs_qp_dest dest;
	struct emu_path path;
	struct emu_pd *pd;
	struct emu_ah *ah;
	int err = cmd_request(c, &req, sizeof(req));

	if (err)
		return err;
	pd = emu_object_get(c->ctx, EMU_PD, req.pd_handle);
	if (!pd)
		return EINVAL;
	emu_path_from_ah(&req.attr, &dest);
	err = emu_path_check(c->ctx->dev, &dest, &path);
	if (!err)
		err = emu_limit(c->ctx, EMU_AH, c->ctx->dev->limits.max_ah);
	if (err)
		return err;
	ah = emu_object_alloc(c->ctx, EMU_AH, sizeof(*ah));
	if (!ah)
		return ENOMEM;
	ah->pd = pd;
	ah->av = path;
	err = respond_dmac(c, ah);
	if (!err)
		err = emu_object_publish(&ah->o);
	if (!err) {
		resp.ah_handle = ah->o.handle;
		err = cmd_response(c, &resp, sizeof(resp));
	}
	if (err)
		emu_object_free(&ah->o);
	else
		pd->o.usecnt++;
	return err;
}

static int destroy_ah_write(struct emu_cmd *c)
{
	struct ib_uverbs_destroy_ah req;
	struct emu_object *ah;
	int err = cmd_request(c, &req, sizeof(req));

	if (!err)
		err = emu_object_get_destroy(c->ctx, EMU_AH, req.ah_handle, &ah);
	if (!err)
		emu_object_destroy(ah);
	return err;
}

static int destroy_ah(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, UVERBS_ATTR_DESTROY_AH_HANDLE));
	return 0;
}

static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(UVERBS_ATTR_DESTROY_AH_HANDLE, ATTR_IDR_DESTROY, EMU_AH, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY, destroy_attrs, destroy_ah),
};

static const struct emu_write_method write_methods[] = {
	{ IB_USER_VERBS_CMD_CREATE_AH, false, true, true, sizeof(struct ib_uverbs_create_ah),
	  sizeof(struct ib_uverbs_create_ah_resp), create_ah, "CREATE_AH" },
	{ IB_USER_VERBS_CMD_DESTROY_AH, false, false, false, sizeof(struct ib_uverbs_destroy_ah), 0, destroy_ah_write,
	  "DESTROY_AH" },
};

const struct emu_methods emu_ah_methods = {
	write_methods, ARRAY_LEN(write_methods), ioctl_methods, ARRAY_LEN(ioctl_methods),
};

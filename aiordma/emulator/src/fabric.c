/* SPDX-License-Identifier: MIT
 * The network between the devices: from an address to a device and port, and from a QP number to a QP.
 *
 * All emulated devices of the process are on one subnet. This is the only file that knows that a peer is near: a wire to
 * other processes belongs behind fabric_route() and fabric_request(). */
#include <string.h>

#include "nic.h"

static bool port_up(const struct emu_device *dev, uint8_t port_num)
{
	return port_num >= 1 && port_num <= dev->nports && dev->ports[port_num - 1].state == IBV_PORT_ACTIVE;
}

/* The port of `dev` that answers to a GID. On Ethernet its entry must be of the sender's kind: RoCE v1 and v2 frames are
 * different protocols, and a port takes only what its GID table says (mlx5 man pages; ibv_query_gid_type()). */
static uint8_t port_by_gid(const struct emu_device *dev, const union ibv_gid *gid, int type)
{
	for (uint32_t p = 0; p < dev->nports; p++) {
		const struct emu_port_config *port = &dev->ports[p];

		for (uint32_t i = 0; i < port->ngids; i++) {
			if (!port->gids[i].valid || memcmp(port->gids[i].gid.raw, gid->raw, sizeof(gid->raw)))
				continue;
			if (type < 0 || port->gids[i].type == type)
				return (uint8_t)(p + 1);
		}
	}
	return 0;
}

static int sender_gid_type(const struct emu_device *dev, const struct emu_path *path)
{
	const struct emu_port_config *port = &dev->ports[path->port - 1];

	if (port->link_layer != IBV_LINK_LAYER_ETHERNET || path->sgid_index >= port->ngids)
		return -1;
	return port->gids[path->sgid_index].type;
}

struct nic_route fabric_route(const struct emu_device *from, const struct emu_path *path)
{
	struct nic_route nowhere = { 0 };
	uint8_t port;
	int type;

	if (!port_up(from, path->port))
		return nowhere;
	if (!path->is_global) {
		/* InfiniBand in one subnet: LIDs are not configured, only a loop to the port itself is possible. */
		return (struct nic_route){ (struct emu_device *)(uintptr_t)from, path->port };
	}
	type = sender_gid_type(from, path);
	port = port_by_gid(from, &path->dgid, type);
	if (port)
		return (struct nic_route){ (struct emu_device *)(uintptr_t)from, port };
	for (uint32_t i = 0; i < emu.ndevices; i++) {
		struct emu_device *dev = &emu.devices[i];

		if (dev == from)
			continue;
		port = port_by_gid(dev, &path->dgid, type);
		if (port)
			return (struct nic_route){ dev, port };
	}
	return nowhere;
}

/* A QP takes only what its own kind sends, and a connected one only what its peer sends. What it doesn't take it drops
 * without an answer: IBTA 9.6.1, "BTH checks". */
static bool from_peer(const struct emu_qp *qp, const struct nic_req *req)
{
	if (qp->dest_qpn != req->src_qpn)
		return false;
	return !qp->av.is_global || !req->sgid || !memcmp(qp->av.dgid.raw, req->sgid->raw, sizeof(req->sgid->raw));
}

static bool accepts(const struct emu_qp *qp, const struct nic_req *req, uint8_t port_num)
{
	if (!qp_can_receive(qp) || (qp->av.port && qp->av.port != port_num))
		return false;
	switch (req->src_type) {
	case IBV_QPT_RC:
	case IBV_QPT_UC:
		return qp->type == req->src_type && from_peer(qp, req);
	case IBV_QPT_UD:
		return qp->type == IBV_QPT_UD && qp->qkey == req->qkey;
	case IBV_QPT_XRC_SEND:
		return qp->type == IBV_QPT_XRC_RECV && from_peer(qp, req);
	case IBV_QPT_DRIVER:
		return qp->dct && qp->dc_key == req->dc_key;
	default:
		return false;
	}
}

enum nic_reply fabric_request(struct nic_route to, struct nic_req *req, struct nic_sgl *data, uint8_t *rnr_timer)
{
	struct emu_qp *qp;

	if (!to.dev || !port_up(to.dev, to.port_num))
		return REPLY_NONE;
	qp = qp_find(to.dev, req->dst_qpn);
	if (!qp || !accepts(qp, req, to.port_num))
		return REPLY_NONE;
	*rnr_timer = qp->min_rnr_timer;
	return responder_receive(qp, req, data);
}

/* SPDX-License-Identifier: MIT
 * The network between the devices: from an address to a device and port, and from a QP number to a QP.
 *
 * All emulated devices of this user on this machine are on one subnet, whatever process they are in. Processes with the same
 * configuration have devices with the same addresses, as processes on a machine share its devices; the QP number tells
 * whose a QP is (registry.h). */
#include <string.h>

#include "nic.h"
#include "registry.h"
#include "wire.h"

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

static struct nic_route over_link(struct wire_link *l)
{
	return (struct nic_route){ .link = l, .port_num = l ? ROUTE_LINK : 0 };
}

struct nic_route fabric_route(const struct emu_device *from, const struct emu_path *path, uint32_t dst_qpn)
{
	struct nic_route nowhere = { .port_num = 0 };
	uint8_t port;
	int type;

	if (!port_up(from, path->port))
		return nowhere;
	if (unlikely(qpn_to_index(dst_qpn) == UINT32_MAX))
		return path->is_global ? over_link(wire_find(dst_qpn)) : nowhere;
	if (!path->is_global) {
		/* InfiniBand in one subnet: LIDs are not configured, only a loop to the port itself is possible. */
		return (struct nic_route){ .dev = (struct emu_device *)(uintptr_t)from, .port_num = path->port };
	}
	type = sender_gid_type(from, path);
	port = port_by_gid(from, &path->dgid, type);
	if (port)
		return (struct nic_route){ .dev = (struct emu_device *)(uintptr_t)from, .port_num = port };
	for (uint32_t i = 0; i < emu.ndevices; i++) {
		struct emu_device *dev = &emu.devices[i];

		if (dev == from)
			continue;
		port = port_by_gid(dev, &path->dgid, type);
		if (port)
			return (struct nic_route){ .dev = dev, .port_num = port };
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

struct nic_route fabric_destination(const union ibv_gid *dgid, uint8_t gid_type)
{
	for (uint32_t i = 0; i < emu.ndevices; i++) {
		uint8_t port = port_by_gid(&emu.devices[i], dgid, gid_type);

		if (port)
			return (struct nic_route){ .dev = &emu.devices[i], .port_num = port };
	}
	return (struct nic_route){ .port_num = 0 };
}

static inline enum nic_reply deliver(struct emu_device *dev, uint8_t port_num, struct nic_req *req,
				     struct nic_sgl *data, uint8_t *rnr_timer)
{
	struct emu_qp *qp;

	if (!port_up(dev, port_num))
		return REPLY_NONE;
	qp = qp_find(dev, req->dst_qpn);
	if (!qp || !accepts(qp, req, port_num))
		return REPLY_NONE;
	*rnr_timer = qp->min_rnr_timer;
	return responder_receive(qp, req, data);
}

enum nic_reply fabric_deliver(struct emu_device *dev, uint8_t port_num, struct nic_req *req, struct nic_sgl *data,
			      uint8_t *rnr_timer)
{
	return deliver(dev, port_num, req, data, rnr_timer);
}

uint64_t fabric_slice(struct nic_route to, const struct nic_req *req)
{
	return wire_slice(to.link, req);
}

enum nic_reply fabric_request(struct emu_qp *from, struct nic_route to, struct nic_req *req, struct nic_sgl *data,
			      uint8_t *rnr_timer)
{
	if (likely(to.port_num != ROUTE_LINK))
		return deliver(to.dev, to.port_num, req, data, rnr_timer);
	return wire_ask(from, to.link, req, data);
}

enum nic_reply fabric_answer(struct emu_qp *from, struct nic_req *req, struct nic_sgl *data, uint8_t *rnr_timer)
{
	return wire_answered(from, req, data, rnr_timer);
}

void fabric_cancel(struct emu_qp *qp)
{
	if (unlikely(nic(qp)->wire != WIRE_IDLE || nic(qp)->nflights))
		wire_cancel(qp);
}

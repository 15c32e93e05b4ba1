/* SPDX-License-Identifier: MIT
 * The commands that ask for addresses, GIDs and paths: ucma_query() and ucma_query_route() of core/ucma.c. */
#define _GNU_SOURCE
#include <stdlib.h>

#include <infiniband/sa.h>

#include "cm.h"

#define RATE_100_GBPS 16 /* IBV_RATE_100_GBPS */
#define EXACTLY 2	 /* IB_SA_EQ */

int cm_query_route(const struct cm_id *id, uint64_t response, uint16_t out)
{
	struct rdma_ucm_query_route_resp resp = { 0 };
	struct ib_user_path_rec *path = resp.ib_route;

	memcpy(&resp.src_addr, &id->src, MIN(cm_addr_size(&id->src), sizeof(resp.src_addr)));
	memcpy(&resp.dst_addr, &id->dst, MIN(cm_addr_size(&id->dst), sizeof(resp.dst_addr)));
	if (!id->dev)
		return user_write(response, &resp, MIN(out, sizeof(resp)));
	resp.node_guid = htobe64(id->dev->node_guid);
	resp.port_num = id->port;
	resp.ibdev_index = id->dev->index;
	resp.num_paths = id->num_paths;
	memcpy(path->sgid, id->sgid.raw, sizeof(path->sgid));
	memcpy(path->dgid, id->dgid.raw, sizeof(path->dgid));
	path->pkey = htobe16(0xffff);
	if (id->num_paths) {
		path->hop_limit = id->hop_limit;
		path->traffic_class = id->traffic_class;
		path->sl = id->sl;
		path->reversible = path->numb_path = 1;
		path->mtu_selector = path->rate_selector = path->packet_life_time_selector = EXACTLY;
		path->mtu = id->mtu;
		path->rate = RATE_100_GBPS;
		path->packet_life_time = id->packet_life_time;
	}
	return user_write(response, &resp, MIN(out, sizeof(resp)));
}

static void fill_device(const struct cm_id *id, struct rdma_ucm_query_addr_resp *resp)
{
	if (!id->dev)
		return;
	resp->node_guid = htobe64(id->dev->node_guid);
	resp->port_num = id->port;
	resp->pkey = htobe16(0xffff);
	resp->ibdev_index = id->dev->index;
}

int cm_query_addr(const struct cm_id *id, uint64_t response, uint16_t out)
{
	struct rdma_ucm_query_addr_resp resp = { 0 };

	if (out < offsetof(struct rdma_ucm_query_addr_resp, ibdev_index))
		return ENOSPC;
	resp.src_size = (uint16_t)cm_addr_size(&id->src);
	resp.dst_size = (uint16_t)cm_addr_size(&id->dst);
	memcpy(&resp.src_addr, &id->src, resp.src_size);
	memcpy(&resp.dst_addr, &id->dst, resp.dst_size);
	fill_device(id, &resp);
	return user_write(response, &resp, MIN(out, sizeof(resp)));
}

/* A GID as an AF_IB address, with the service identifier of its port: rdma_get_service_id() of core/cma.c. */
static void ib_address(const struct cm_id *id, const union cm_addr *a, const union ibv_gid *gid, void *to)
{
	union cm_addr ib = { .ib = { .family = CM_FAMILY_IB } };

	if (a->sa.sa_family == CM_FAMILY_IB) {
		ib = *a;
	} else {
		ib.ib.pkey = htobe16(0xffff);
		if (id->dev)
			memcpy(ib.ib.gid, gid->raw, sizeof(ib.ib.gid));
		ib.ib.sid = htobe64((uint64_t)id->ps << 16 | cm_addr_port(a));
		ib.ib.sid_mask = UINT64_MAX;
	}
	memcpy(to, &ib.ib, sizeof(ib.ib));
}

int cm_query_gid(const struct cm_id *id, uint64_t response, uint16_t out)
{
	struct rdma_ucm_query_addr_resp resp = { 0 };

	if (out < offsetof(struct rdma_ucm_query_addr_resp, ibdev_index))
		return ENOSPC;
	fill_device(id, &resp);
	resp.src_size = resp.dst_size = sizeof(((union cm_addr *)0)->ib);
	ib_address(id, &id->src, &id->sgid, &resp.src_addr);
	ib_address(id, &id->dst, &id->dgid, &resp.dst_addr);
	return user_write(response, &resp, MIN(out, sizeof(resp)));
}

int cm_query_path(const struct cm_id *id, uint64_t response, uint16_t out)
{
	struct {
		struct rdma_ucm_query_path_resp head;
		struct ibv_path_data path;
	} resp = { .head = { .num_paths = id->num_paths } };
	struct ibv_path_record *p = &resp.path.path;
	size_t size = sizeof(resp.head);

	if (out < sizeof(resp.head))
		return ENOSPC;
	/* As many as there is room for, and a little more: ucma_query_path(). */
	if (id->num_paths && out - sizeof(resp.head) > sizeof(resp.path)) {
		size = sizeof(resp);
		resp.path.flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
		p->dgid = id->dgid;
		p->sgid = id->sgid;
		p->flowlabel_hoplimit = htobe32(id->hop_limit);
		p->tclass = id->traffic_class;
		p->reversible_numpath = 0x80 | 1;
		p->pkey = htobe16(0xffff);
		p->qosclass_sl = htobe16(id->sl);
		p->mtu = (uint8_t)(EXACTLY << 6 | id->mtu);
		p->rate = EXACTLY << 6 | RATE_100_GBPS;
		p->packetlifetime = (uint8_t)(EXACTLY << 6 | id->packet_life_time);
	}
	return user_write(response, &resp, size);
}

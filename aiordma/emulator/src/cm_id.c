/* SPDX-License-Identifier: MIT
 * Identifiers: what rdma_create_id(), rdma_bind_addr(), rdma_resolve_addr() and so on of core/cma.c do, and the handles of
 * core/ucma.c. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include <infiniband/sa.h>

#include "cm_message.h"

#define BUCKETS 1024u
#define ROCE_LIFETIME 16	    /* CMA_IBOE_PACKET_LIFETIME */
#define HOP_LIMIT 64		    /* net.ipv4.ip_default_ttl */
#define MAX_OPTION (4u << 20)	    /* KMALLOC_MAX_SIZE */

static struct cm_id **handles;
static uint32_t nhandles, nids;
static struct emu_list buckets[BUCKETS];
static uint32_t next_comm;

/* ---------------------------------------------------------------- handles */

static int publish(struct cm_id *id)
{
	uint32_t h = 0;

	while (h < nhandles && handles[h])
		h++;
	if (h == nhandles) {
		uint32_t n = nhandles ? nhandles * 2 : 64;
		struct cm_id **grown = realloc(handles, n * sizeof(*grown));

		if (!grown)
			return ENOMEM;
		memset(grown + nhandles, 0, (n - nhandles) * sizeof(*grown));
		handles = grown;
		nhandles = n;
	}
	handles[h] = id;
	id->handle = h;
	return 0;
}

int cm_id_find(struct cm_file *f, uint32_t handle, struct cm_id **id)
{
	if (handle >= nhandles || !handles[handle])
		return ENOENT;
	if (handles[handle]->file != f)
		return EINVAL;
	*id = handles[handle];
	return 0;
}

int cm_id_find_bound(struct cm_file *f, uint32_t handle, struct cm_id **id)
{
	int err = cm_id_find(f, handle, id);

	return !err && !(*id)->dev ? EINVAL : err;
}

static struct emu_list *bucket(uint32_t comm)
{
	struct emu_list *b = &buckets[comm % BUCKETS];

	if (!b->next)
		list_init(b);
	return b;
}

struct cm_id *cm_id_by_comm(uint32_t comm)
{
	struct emu_list *b = bucket(comm);

	for (struct emu_list *l = b->next; l != b; l = l->next)
		if (container_of(l, struct cm_id, hash)->comm == comm)
			return container_of(l, struct cm_id, hash);
	return NULL;
}

void cm_ids_each(void (*f)(struct cm_id *, void *), void *data)
{
	for (uint32_t h = 0; h < nhandles; h++)
		if (handles[h])
			f(handles[h], data);
}

uint32_t cm_ids(void)
{
	return nids;
}

void cm_ids_forked(void)
{
	handles = NULL;
	nhandles = nids = 0;
	memset(buckets, 0, sizeof(buckets));
}

/* ---------------------------------------------------------------- create and destroy */

/* ucma_get_qp_type() of core/ucma.c */
static int qp_type_of(uint16_t ps, uint8_t asked, uint8_t *type)
{
	switch (ps) {
	case RDMA_PS_TCP:
		*type = IBV_QPT_RC;
		return 0;
	case RDMA_PS_UDP:
	case RDMA_PS_IPOIB:
		*type = IBV_QPT_UD;
		return 0;
	case RDMA_PS_IB:
		*type = asked;
		return 0;
	default:
		return EINVAL;
	}
}

int cm_id_create(struct cm_file *f, uint16_t ps, uint8_t qp_type, struct cm_id **out)
{
	struct cm_id *id = calloc(1, sizeof(*id));
	int err;

	if (!id)
		return ENOMEM;
	err = qp_type_of(ps, qp_type, &id->qp_type);
	if (!err)
		err = publish(id);
	if (err) {
		free(id);
		return err;
	}
	id->ps = ps;
	id->file = f;
	id->port_slot = -1;
	list_init(&id->timer);
	if (!next_comm || getrandom(&id->seq_num, sizeof(id->seq_num), GRND_NONBLOCK) != sizeof(id->seq_num))
		id->seq_num = (uint32_t)now_ns();
	id->seq_num &= 0xffffff;
	id->comm = ++next_comm;
	list_add_tail(bucket(id->comm), &id->hash);
	list_add_tail(&f->ids, &id->link);
	nids++;
	*out = id;
	return 0;
}

uint32_t cm_id_destroy(struct cm_id *id)
{
	uint32_t reported = id->events_reported;

	handles[id->handle] = NULL;
	if (id->conn == CONN_LISTEN)
		cm_port_unlisten(id);
	cm_conn_destroy(id);
	cm_event_drop(id);
	cm_timer_stop(id);
	cm_forget_sent(id);
	cm_port_release(id);
	list_del(&id->hash);
	list_del(&id->link);
	free(id);
	nids--;
	return reported;
}

/* ---------------------------------------------------------------- addresses */

static bool bind_v6_only(void)
{
	static int only = -1;
	FILE *f;

	if (only >= 0)
		return only;
	f = fopen("/proc/sys/net/ipv6/bindv6only", "re");
	if (!f || fscanf(f, "%d", &only) != 1)
		only = 0;
	if (f)
		fclose(f);
	return only;
}

static void release_device(struct cm_id *id)
{
	id->dev = NULL;
	id->port = id->gid_index = 0;
	memset(&id->sgid, 0, sizeof(id->sgid));
}

/* rdma_bind_addr_dst() of core/cma.c */
int cm_id_bind(struct cm_id *id, const union cm_addr *a)
{
	int family = a->sa.sa_family, err = 0;

	if (family != AF_INET && family != AF_INET6 && family != CM_FAMILY_IB)
		return EAFNOSUPPORT;
	if (id->state != CM_IDLE)
		return EINVAL;
	memset(&id->src, 0, sizeof(id->src));
	memcpy(&id->src, a, cm_addr_size(a));
	if (!cm_addr_any(a)) {
		/* cma_check_linklocal(); the addresses of the emulated ports are on no interface that a scope could name */
		err = cm_addr_acquire(id, a);
		if (err == EADDRNOTAVAIL && cm_addr_link_local(a) && !a->in6.sin6_scope_id)
			err = EINVAL;
	}
	if (err)
		return err;
	if (!id->afonly_set) {
		if (family == AF_INET)
			id->afonly = true;
		else if (family == AF_INET6)
			id->afonly = bind_v6_only();
	}
	err = cm_port_take(id);
	if (err) {
		release_device(id);
		return err;
	}
	id->dst.sa.sa_family = (sa_family_t)family;
	id->state = CM_ADDR_BOUND;
	return 0;
}

/* cma_bind_addr() of core/cma.c: with no source, any of the destination's family. */
static int bind_any(struct cm_id *id, const union cm_addr *src, const union cm_addr *dst)
{
	union cm_addr any;

	if (src->sa.sa_family)
		return cm_id_bind(id, src);
	memset(&any, 0, sizeof(any));
	any.sa.sa_family = dst->sa.sa_family;
	return cm_id_bind(id, &any);
}

/* The source of a way to an address of this host is that address: as the routing table "local" has it. */
static void choose_source(struct cm_id *id, const union cm_addr *to)
{
	uint16_t port = cm_addr_port(&id->src);

	if (!cm_addr_any(&id->src))
		return;
	memcpy(&id->src, to, sizeof(id->src));
	cm_addr_set_port(&id->src, port);
}

/* cma_resolve_loopback(): "any" as destination is the host itself. */
static void name_loopback(struct cm_id *id)
{
	static const uint8_t v4[16] = { [12] = 127, [15] = 1 }, v6[16] = { [15] = 1 };
	uint16_t port = cm_addr_port(&id->dst);

	if (cm_addr_any(&id->src)) {
		uint16_t own = cm_addr_port(&id->src);

		cm_addr_make(&id->src, id->src.sa.sa_family, id->src.sa.sa_family == AF_INET ? v4 : v6, own);
	}
	id->dst = id->src;
	cm_addr_set_port(&id->dst, port);
}

/* addr_handler(): at once, where the kernel has a work queue. */
static void address_resolved(struct cm_id *id, int err)
{
	struct cm_id other = { 0 };

	if (!err && !id->dev)
		err = cm_addr_acquire(id, &id->src);
	if (!err) {
		err = cm_addr_acquire(&other, &id->dst);
		id->dgid = other.sgid;
	}
	if (err) {
		id->state = CM_ADDR_BOUND;
		cm_event_plain(id, CM_EV_ADDR_ERROR, -err);
		return;
	}
	id->state = CM_ADDR_RESOLVED;
	cm_event_plain(id, CM_EV_ADDR_RESOLVED, 0);
}

/* rdma_resolve_addr() of core/cma.c */
int cm_id_resolve_addr(struct cm_id *id, const union cm_addr *src, const union cm_addr *dst, uint32_t timeout_ms)
{
	int err;

	if (id->state != CM_ADDR_BOUND) {
		err = bind_any(id, src, dst);
		if (err)
			return err;
	}
	memset(&id->dst, 0, sizeof(id->dst));
	memcpy(&id->dst, dst, cm_addr_size(dst));
	if (id->src.sa.sa_family != dst->sa.sa_family)
		return EINVAL;
	/* cma_resolve_ib_dev(): there is no port with rdma_cap_af_ib(). */
	if (dst->sa.sa_family == CM_FAMILY_IB)
		return ENODEV;
	id->state = CM_ADDR_QUERY;
	if (cm_addr_any(dst)) {
		name_loopback(id);
		address_resolved(id, 0);
		return 0;
	}
	err = cm_addr_reach(dst);
	if (err == ETIMEDOUT) {
		cm_timer(id, timeout_ms);
		return 0;
	}
	if (!err)
		choose_source(id, dst);
	address_resolved(id, err);
	return 0;
}

/* ---------------------------------------------------------------- routes */

/* cma_resolve_iboe_route() of core/cma.c. The port's MTU stands for the interface's. */
void cm_id_path(struct cm_id *id)
{
	id->num_paths = 1;
	id->mtu = id->dev->ports[id->port - 1].active_mtu;
	/* "local ACK timeout = 2 * PacketLifeTime + local CA's ACK delay" (IBTA 12.7.34), as exponents of two */
	id->packet_life_time = id->timeout_set && id->timeout ? (uint8_t)(id->timeout - 1) : ROCE_LIFETIME;
	id->traffic_class = id->tos;
	id->sl = 0; /* iboe_tos_to_sl(): of an interface with no traffic classes */
	id->hop_limit = HOP_LIMIT;
}

int cm_id_resolve_route(struct cm_id *id, uint32_t timeout_ms)
{
	if (!timeout_ms || id->state != CM_ADDR_RESOLVED)
		return EINVAL;
	cm_id_path(id);
	id->state = CM_ROUTE_RESOLVED;
	cm_event_plain(id, CM_EV_ROUTE_RESOLVED, 0);
	return 0;
}

/* ---------------------------------------------------------------- listening */

/* rdma_listen() of core/cma.c */
int cm_id_listen(struct cm_id *id, int32_t backlog)
{
	union cm_addr any = { .in = { .sin_family = AF_INET } };
	int err;

	if (id->state != CM_ADDR_BOUND) {
		err = cm_id_bind(id, &any);
		if (err)
			return err;
	}
	err = cm_port_listen(id);
	if (err)
		return err;
	id->reuseaddr = false;
	id->backlog = backlog;
	id->state = CM_LISTEN;
	id->conn = CONN_LISTEN;
	return 0;
}

/* ---------------------------------------------------------------- options */

/* ucma_set_option_id() and the functions of core/cma.c that it calls */
static int set_id_option(struct cm_id *id, uint32_t name, const void *value, uint32_t len)
{
	int number = 0;

	if (name == RDMA_OPTION_ID_REUSEADDR || name == RDMA_OPTION_ID_AFONLY) {
		if (len != sizeof(number))
			return EINVAL;
		memcpy(&number, value, sizeof(number));
	} else if (name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT) {
		if (len != 1)
			return EINVAL;
	}
	switch (name) {
	case RDMA_OPTION_ID_TOS:
		id->tos = *(const uint8_t *)value;
		return 0;
	case RDMA_OPTION_ID_REUSEADDR:
		if (!(number && id->state != CM_LISTEN) && id->state != CM_IDLE)
			return EINVAL;
		id->reuseaddr = number;
		return 0;
	case RDMA_OPTION_ID_AFONLY:
		if (id->state != CM_IDLE && id->state != CM_ADDR_BOUND)
			return EINVAL;
		id->afonly_set = true;
		id->afonly = number;
		return 0;
	case RDMA_OPTION_ID_ACK_TIMEOUT:
		if (id->qp_type != IBV_QPT_RC && id->qp_type != IBV_QPT_XRC_SEND)
			return EINVAL;
		id->timeout = *(const uint8_t *)value;
		id->timeout_set = true;
		return 0;
	default:
		return ENOSYS;
	}
}

/* ucma_set_ib_path(): a path of the application's, instead of a resolved one. What it says of service level and
 * traffic class counts; it leads where the addresses do. */
static int set_path(struct cm_id *id, const struct ibv_path_data *path, uint32_t len)
{
	const uint32_t wanted = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;

	if (len % sizeof(*path))
		return EINVAL;
	for (; len && path->flags != wanted; path++)
		len -= (uint32_t)sizeof(*path);
	if (!len || !id->dev || id->state != CM_ADDR_RESOLVED)
		return EINVAL;
	cm_id_path(id);
	id->traffic_class = path->path.tclass;
	id->sl = (uint8_t)(be16toh(path->path.qosclass_sl) & 0xf);
	id->packet_life_time = path->path.packetlifetime & 0x3f;
	id->state = CM_ROUTE_RESOLVED;
	cm_event_plain(id, CM_EV_ROUTE_RESOLVED, 0);
	return 0;
}

int cm_id_set_option(struct cm_id *id, uint32_t level, uint32_t name, uint64_t value, uint32_t len)
{
	void *copy;
	int err;

	if (len > MAX_OPTION)
		return EINVAL;
	copy = malloc(len + 8); /* no option is longer than it says, but one of no length is read as zeros */
	if (!copy)
		return ENOMEM;
	memset(copy, 0, len + 8);
	err = user_read(copy, value, len);
	if (err)
		; /* EFAULT */
	else if (level == RDMA_OPTION_ID)
		err = set_id_option(id, name, copy, len);
	else if (level == RDMA_OPTION_IB)
		err = name == RDMA_OPTION_IB_PATH ? set_path(id, copy, len) : ENOSYS;
	else
		err = ENOSYS;
	free(copy);
	return err;
}

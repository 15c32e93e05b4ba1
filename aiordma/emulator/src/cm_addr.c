/* SPDX-License-Identifier: MIT
 * From an address to a device, port and GID: core/addr.c and the part of core/cma.c that acquires devices.
 *
 * On hardware an address belongs to a network interface, the interface to a RoCE port, and the port's GID table has the
 * address. The emulated ports have no interfaces. So an address that a GID table has is that port's, and any other address
 * of this host, 127.0.0.1 among them, is the first active port's, which stands for it with a GID of its own: for IPv4 the
 * first IPv4 entry of RoCE v2. Nothing leads out of the host: addresses elsewhere don't answer. */
#define _GNU_SOURCE
#include <unistd.h>

#include "cm.h"

size_t cm_addr_size(const union cm_addr *a)
{
	switch (a->sa.sa_family) {
	case AF_INET:
		return sizeof(a->in);
	case AF_INET6:
		return sizeof(a->in6);
	case CM_FAMILY_IB:
		return sizeof(a->ib);
	default:
		return 0;
	}
}

bool cm_addr_any(const union cm_addr *a)
{
	static const uint8_t zero[16];

	switch (a->sa.sa_family) {
	case AF_INET:
		return a->in.sin_addr.s_addr == INADDR_ANY;
	case AF_INET6:
		return !memcmp(&a->in6.sin6_addr, zero, sizeof(zero));
	case CM_FAMILY_IB:
		return !memcmp(a->ib.gid, zero, sizeof(zero));
	default:
		return false;
	}
}

bool cm_addr_link_local(const union cm_addr *a)
{
	return a->sa.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&a->in6.sin6_addr);
}

/* cma_port() of core/cma.c: an AF_IB address has it in the last 16 bits of the service identifier. */
uint16_t cm_addr_port(const union cm_addr *a)
{
	switch (a->sa.sa_family) {
	case AF_INET:
		return ntohs(a->in.sin_port);
	case AF_INET6:
		return ntohs(a->in6.sin6_port);
	case CM_FAMILY_IB:
		return (uint16_t)(be64toh(a->ib.sid) & be64toh(a->ib.sid_mask));
	default:
		return 0;
	}
}

void cm_addr_set_port(union cm_addr *a, uint16_t port)
{
	if (a->sa.sa_family == AF_INET)
		a->in.sin_port = htons(port);
	else if (a->sa.sa_family == AF_INET6)
		a->in6.sin6_port = htons(port);
	else
		a->ib.sid = htobe64((be64toh(a->ib.sid) & ~0xffffull) | port);
}

void cm_addr_bytes(const union cm_addr *a, uint8_t bytes[16])
{
	memset(bytes, 0, 16);
	if (a->sa.sa_family == AF_INET)
		memcpy(bytes + 12, &a->in.sin_addr, 4);
	else if (a->sa.sa_family == AF_INET6)
		memcpy(bytes, &a->in6.sin6_addr, 16);
	else
		memcpy(bytes, a->ib.gid, 16);
}

void cm_addr_make(union cm_addr *a, int family, const uint8_t bytes[16], uint16_t port)
{
	memset(a, 0, sizeof(*a));
	a->sa.sa_family = (sa_family_t)family;
	if (family == AF_INET)
		memcpy(&a->in.sin_addr, bytes + 12, 4);
	else
		memcpy(&a->in6.sin6_addr, bytes, 16);
	cm_addr_set_port(a, port);
}

void cm_addr_gid(const union cm_addr *a, union ibv_gid *gid)
{
	cm_addr_bytes(a, gid->raw);
	if (a->sa.sa_family == AF_INET)
		gid->raw[10] = gid->raw[11] = 0xff;
}

/* ---------------------------------------------------------------- whose an address is */

static bool is_v4(const union ibv_gid *gid)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	return !memcmp(gid->raw, mapped, sizeof(mapped));
}

static void take(struct cm_id *id, struct emu_device *d, uint32_t port, uint32_t index)
{
	id->dev = d;
	id->port = (uint8_t)(port + 1);
	id->gid_index = (uint8_t)index;
	id->sgid = d->ports[port].gids[index].gid;
}

/* RoCE v2 is the kernel's default for the CMA (CMA_PREFERRED_ROCE_GID_TYPE in core/cma.c). */
static bool find_gid(const union ibv_gid *gid, struct cm_id *id)
{
	for (int type = IBV_GID_TYPE_ROCE_V2; type >= IBV_GID_TYPE_ROCE_V1; type--)
		for (uint32_t i = 0; i < emu.ndevices; i++)
			for (uint32_t p = 0; p < emu.devices[i].nports; p++)
				for (uint32_t g = 0; g < emu.devices[i].ports[p].ngids; g++) {
					const struct emu_gid *e = &emu.devices[i].ports[p].gids[g];

					if (!e->valid || e->type != type || memcmp(e->gid.raw, gid->raw, sizeof(gid->raw)))
						continue;
					if (id)
						take(id, &emu.devices[i], p, g);
					return true;
				}
	return false;
}

/* The better, the higher: of the right kind before RoCE v2 before any. */
static int gid_rank(const struct emu_gid *e, bool v4)
{
	if (!e->valid)
		return 0;
	return 1 + (e->type == IBV_GID_TYPE_ROCE_V2) * 2 + (is_v4(&e->gid) == v4);
}

static int first_port(struct cm_id *id, bool v4)
{
	for (int active = 1; active >= 0; active--)
		for (uint32_t i = 0; i < emu.ndevices; i++)
			for (uint32_t p = 0; p < emu.devices[i].nports; p++) {
				const struct emu_port_config *port = &emu.devices[i].ports[p];
				int best = 0;

				if ((port->state == IBV_PORT_ACTIVE) != active)
					continue;
				for (uint32_t g = 0; g < port->ngids; g++) {
					int rank = gid_rank(&port->gids[g], v4);

					if (rank <= best)
						continue;
					best = rank;
					take(id, &emu.devices[i], p, g);
				}
				if (best)
					return 0;
			}
	return ENODEV;
}

/* Whether a socket can be bound to it: 0, or an errno. */
static int host_has(const union cm_addr *a)
{
	union cm_addr probe = *a;
	int fd = socket(a->sa.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), err = 0;

	if (fd < 0)
		return errno == EAFNOSUPPORT ? EADDRNOTAVAIL : errno;
	cm_addr_set_port(&probe, 0);
	if (bind(fd, &probe.sa, (socklen_t)cm_addr_size(&probe)))
		err = errno;
	emu_real.close(fd);
	return err;
}

int cm_addr_acquire(struct cm_id *id, const union cm_addr *a)
{
	union ibv_gid gid;

	/* A RoCE port has no AF_IB addresses: rdma_cap_af_ib() of rdma/ib_verbs.h. */
	if (a->sa.sa_family == CM_FAMILY_IB)
		return ENODEV;
	cm_addr_gid(a, &gid);
	if (find_gid(&gid, id))
		return 0;
	/* rdma_translate_ip() of core/addr.c has EADDRNOTAVAIL for what no interface has. */
	if (host_has(a))
		return EADDRNOTAVAIL;
	return first_port(id, a->sa.sa_family == AF_INET || is_v4(&gid));
}

int cm_addr_loopback(struct cm_id *id)
{
	return first_port(id, id->src.sa.sa_family == AF_INET);
}

/* What addr_resolve() of core/addr.c comes to: the routing table's answer is asked of an ordinary socket. With a route, what
 * is missing is a neighbour that answers, and the request times out. */
int cm_addr_reach(const union cm_addr *dst)
{
	union ibv_gid gid;
	int fd, err = 0;

	cm_addr_gid(dst, &gid);
	if (find_gid(&gid, NULL) || !host_has(dst))
		return 0;
	fd = socket(dst->sa.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return errno == EAFNOSUPPORT ? ENETUNREACH : errno;
	if (connect(fd, &dst->sa, (socklen_t)cm_addr_size(dst)))
		err = errno;
	emu_real.close(fd);
	return err ? err : ETIMEDOUT;
}

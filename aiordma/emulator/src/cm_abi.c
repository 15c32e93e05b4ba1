/* SPDX-License-Identifier: MIT
 * The commands that librdmacm writes to /dev/infiniband/rdma_cm: rdma/rdma_user_cm.h, as core/ucma.c answers them.
 *
 * A command is copied in as long as its structure is, whatever the header says, unless the kernel looks at that. */
#define _GNU_SOURCE
#include "cm.h"

#define MAX_BACKLOG 1024 /* net.rdma_ucm.max_backlog */

struct call {
	struct cm_file *file;
	int fd;
	uint64_t in; /* where the command's structure is */
	uint16_t in_len, out_len;
};

/* Fields up to and with this one. */
#define END_OF(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

static int take(const struct call *c, void *cmd, size_t size)
{
	return user_read(cmd, c->in, size);
}

/* ---------------------------------------------------------------- identifiers */

static int create_id(const struct call *c)
{
	struct rdma_ucm_create_id cmd;
	struct rdma_ucm_create_id_resp resp = { 0 };
	struct cm_id *id;
	int err;

	if (c->out_len < sizeof(resp))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	if (!err)
		err = cm_id_create(c->file, cmd.ps, cmd.qp_type, &id);
	if (err)
		return err;
	id->uid = cmd.uid;
	resp.id = id->handle;
	err = user_write(cmd.response, &resp, sizeof(resp));
	if (err)
		cm_id_destroy(id);
	return err;
}

static int destroy_id(const struct call *c)
{
	struct rdma_ucm_destroy_id cmd;
	struct rdma_ucm_destroy_id_resp resp = { 0 };
	struct cm_id *id;
	int err;

	if (c->out_len < sizeof(resp))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	if (!err)
		err = cm_id_find(c->file, cmd.id, &id);
	if (err)
		return err;
	resp.events_reported = cm_id_destroy(id);
	return user_write(cmd.response, &resp, sizeof(resp));
}

/* ucma_migrate_id(): the command comes by the new descriptor. The old one's identifiers were found by the caller. */
static int migrate_id(const struct call *c)
{
	struct rdma_ucm_migrate_id cmd;
	struct rdma_ucm_migrate_resp resp = { 0 };
	struct cm_file *from;
	struct cm_id *id;
	int err;

	if (c->out_len < sizeof(resp))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	if (!err)
		err = cm_file_of((int)cmd.fd, &from);
	if (!err)
		err = cm_id_find(from, cmd.id, &id);
	if (err)
		return err;
	resp.events_reported = id->events_reported;
	if (from != c->file) {
		from->fd = (int)cmd.fd;
		cm_event_move(id, c->file);
		list_del(&id->link);
		list_add_tail(&c->file->ids, &id->link);
		id->file = c->file;
	}
	return user_write(cmd.response, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- addresses */

static void copy_addr(union cm_addr *a, const void *from, size_t size)
{
	memset(a, 0, sizeof(*a));
	memcpy(a, from, MIN(size, sizeof(*a)));
}

static int bind_ip(const struct call *c)
{
	struct rdma_ucm_bind_ip cmd;
	union cm_addr a;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (err)
		return err;
	copy_addr(&a, &cmd.addr, sizeof(cmd.addr));
	if (a.sa.sa_family != AF_INET && a.sa.sa_family != AF_INET6) /* rdma_addr_size_in6() */
		return EINVAL;
	err = cm_id_find(c->file, cmd.id, &id);
	return err ? err : cm_id_bind(id, &a);
}

static int bind_addr(const struct call *c)
{
	struct rdma_ucm_bind cmd;
	union cm_addr a;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (err)
		return err;
	copy_addr(&a, &cmd.addr, sizeof(cmd.addr));
	if (cmd.reserved || !cmd.addr_size || cmd.addr_size != cm_addr_size(&a))
		return EINVAL;
	err = cm_id_find(c->file, cmd.id, &id);
	return err ? err : cm_id_bind(id, &a);
}

static int resolve_ip(const struct call *c)
{
	struct rdma_ucm_resolve_ip cmd;
	union cm_addr src, dst;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (err)
		return err;
	copy_addr(&src, &cmd.src_addr, sizeof(cmd.src_addr));
	copy_addr(&dst, &cmd.dst_addr, sizeof(cmd.dst_addr));
	if ((src.sa.sa_family && (!cm_addr_size(&src) || src.sa.sa_family == CM_FAMILY_IB)) || !cm_addr_size(&dst) ||
	    dst.sa.sa_family == CM_FAMILY_IB)
		return EINVAL;
	err = cm_id_find(c->file, cmd.id, &id);
	return err ? err : cm_id_resolve_addr(id, &src, &dst, cmd.timeout_ms);
}

static int resolve_addr(const struct call *c)
{
	struct rdma_ucm_resolve_addr cmd;
	union cm_addr src, dst;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (err)
		return err;
	copy_addr(&src, &cmd.src_addr, sizeof(cmd.src_addr));
	copy_addr(&dst, &cmd.dst_addr, sizeof(cmd.dst_addr));
	if (cmd.reserved || (cmd.src_size && cmd.src_size != cm_addr_size(&src)) || !cmd.dst_size ||
	    cmd.dst_size != cm_addr_size(&dst))
		return EINVAL;
	if (!cmd.src_size)
		src.sa.sa_family = 0;
	err = cm_id_find(c->file, cmd.id, &id);
	return err ? err : cm_id_resolve_addr(id, &src, &dst, cmd.timeout_ms);
}

static int resolve_route(const struct call *c)
{
	struct rdma_ucm_resolve_route cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err)
		err = cm_id_find_bound(c->file, cmd.id, &id);
	return err ? err : cm_id_resolve_route(id, cmd.timeout_ms);
}

static int query_route(const struct call *c)
{
	struct rdma_ucm_query cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err && c->out_len < offsetof(struct rdma_ucm_query_route_resp, ibdev_index))
		err = ENOSPC;
	if (!err)
		err = cm_id_find(c->file, cmd.id, &id);
	return err ? err : cm_query_route(id, cmd.response, c->out_len);
}

static int query(const struct call *c)
{
	struct rdma_ucm_query cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err)
		err = cm_id_find(c->file, cmd.id, &id);
	if (err)
		return err;
	switch (cmd.option) {
	case RDMA_USER_CM_QUERY_ADDR:
		return cm_query_addr(id, cmd.response, c->out_len);
	case RDMA_USER_CM_QUERY_PATH:
		return cm_query_path(id, cmd.response, c->out_len);
	case RDMA_USER_CM_QUERY_GID:
		return cm_query_gid(id, cmd.response, c->out_len);
	default:
		return ENOSYS;
	}
}

static int set_option(const struct call *c)
{
	struct rdma_ucm_set_option cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err)
		err = cm_id_find(c->file, cmd.id, &id);
	return err ? err : cm_id_set_option(id, cmd.level, cmd.optname, cmd.optval, cmd.optlen);
}

/* ---------------------------------------------------------------- connections */

static int listen_id(const struct call *c)
{
	struct rdma_ucm_listen cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));
	int32_t backlog;

	if (!err)
		err = cm_id_find(c->file, cmd.id, &id);
	if (err)
		return err;
	backlog = (int32_t)cmd.backlog;
	return cm_id_listen(id, backlog <= 0 || backlog > MAX_BACKLOG ? MAX_BACKLOG : backlog);
}

/* ucma_copy_conn_param(): only AF_IB addresses come with a Q_Key of the application's. */
static void fix_params(const struct cm_id *id, struct rdma_ucm_conn_param *p)
{
	if (id->src.sa.sa_family != CM_FAMILY_IB)
		p->qkey = 0;
}

static int connect_id(const struct call *c)
{
	struct rdma_ucm_connect cmd = { 0 };
	struct cm_params p;
	struct cm_id *id;
	int err;

	if (c->in_len < END_OF(struct rdma_ucm_connect, reserved))
		return EINVAL;
	err = take(c, &cmd, MIN(c->in_len, sizeof(cmd)));
	if (!err && !cmd.conn_param.valid)
		err = EINVAL;
	if (!err)
		err = cm_id_find_bound(c->file, cmd.id, &id);
	if (err)
		return err;
	p.conn = cmd.conn_param;
	fix_params(id, &p.conn);
	/* Whole or not at all. */
	memset(&p.ece, 0, sizeof(p.ece));
	if (c->in_len >= END_OF(struct rdma_ucm_connect, ece))
		p.ece = cmd.ece;
	return cm_connect(id, &p);
}

static int accept_id(const struct call *c)
{
	struct rdma_ucm_accept cmd = { 0 };
	struct cm_params p;
	struct cm_id *id;
	int err;

	if (c->in_len < END_OF(struct rdma_ucm_accept, reserved))
		return EINVAL;
	err = take(c, &cmd, MIN(c->in_len, sizeof(cmd)));
	if (!err)
		err = cm_id_find_bound(c->file, cmd.id, &id);
	if (err)
		return err;
	if (!cmd.conn_param.valid)
		return cm_accept(id, NULL);
	p.conn = cmd.conn_param;
	fix_params(id, &p.conn);
	memset(&p.ece, 0, sizeof(p.ece));
	if (c->in_len >= END_OF(struct rdma_ucm_accept, ece))
		p.ece = cmd.ece;
	err = cm_accept(id, &p);
	/* From here on its events are told; the peer's answer can't have come, as we hold the lock. */
	if (!err)
		id->uid = cmd.uid;
	return err;
}

static int reject_id(const struct call *c)
{
	struct rdma_ucm_reject cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (err)
		return err;
	if (!cmd.reason)
		cmd.reason = CM_REJ_CONSUMER_DEFINED;
	if (cmd.reason != CM_REJ_CONSUMER_DEFINED && cmd.reason != CM_REJ_VENDOR_OPTION_NOT_SUPPORTED)
		return EINVAL;
	err = cm_id_find_bound(c->file, cmd.id, &id);
	return err ? err : cm_reject(id, cmd.reason, cmd.private_data, cmd.private_data_len);
}

static int disconnect_id(const struct call *c)
{
	struct rdma_ucm_disconnect cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err)
		err = cm_id_find_bound(c->file, cmd.id, &id);
	return err ? err : cm_disconnect(id);
}

static int notify_id(const struct call *c)
{
	struct rdma_ucm_notify cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err)
		err = cm_id_find(c->file, cmd.id, &id);
	return err ? err : cm_notify(id, cmd.event);
}

static int init_qp_attr(const struct call *c)
{
	struct rdma_ucm_init_qp_attr cmd;
	struct ib_uverbs_qp_attr resp;
	struct cm_id *id;
	int err;

	if (c->out_len < sizeof(resp))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	if (!err && cmd.qp_state > IBV_QPS_ERR)
		err = EINVAL;
	if (!err)
		err = cm_id_find_bound(c->file, cmd.id, &id);
	if (!err)
		err = cm_init_qp_attr(id, cmd.qp_state, &resp);
	return err ? err : user_write(cmd.response, &resp, sizeof(resp));
}

/* ---------------------------------------------------------------- multicast
 * There is none: as with a device that has neither rdma_protocol_roce() nor rdma_cap_ib_mcast(), rdma_join_multicast() of
 * core/cma.c. */

static int join(const struct call *c, uint32_t handle, const union cm_addr *a, size_t size, uint16_t flags)
{
	struct cm_id *id;
	int err;

	if (!size || size != cm_addr_size(a) || flags > RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER)
		return EINVAL;
	err = cm_id_find_bound(c->file, handle, &id);
	if (err)
		return err;
	if ((id->state != CM_ADDR_BOUND && id->state != CM_ADDR_RESOLVED) || id->qp_type != IBV_QPT_UD)
		return EINVAL;
	emu_log(EMU_INFO, "rdma_cm: multicast isn't implemented");
	return ENOSYS;
}

static int join_ip_mcast(const struct call *c)
{
	struct rdma_ucm_join_ip_mcast cmd;
	union cm_addr a;
	int err;

	if (c->out_len < sizeof(struct rdma_ucm_create_id_resp))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	if (err)
		return err;
	copy_addr(&a, &cmd.addr, sizeof(cmd.addr));
	return join(c, cmd.id, &a, cm_addr_size(&a), 0);
}

static int join_mcast(const struct call *c)
{
	struct rdma_ucm_join_mcast cmd;
	union cm_addr a;
	int err;

	if (c->out_len < sizeof(struct rdma_ucm_create_id_resp))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	if (err)
		return err;
	copy_addr(&a, &cmd.addr, sizeof(cmd.addr));
	return join(c, cmd.id, &a, cmd.addr_size, cmd.join_flags);
}

static int leave_mcast(const struct call *c)
{
	struct rdma_ucm_destroy_id cmd;
	int err;

	if (c->out_len < sizeof(struct rdma_ucm_destroy_id_resp))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	return err ? err : ENOENT; /* nobody has ever joined */
}

/* ---------------------------------------------------------------- events */

/* Without the lock: it may wait. */
static int get_event(const struct call *c)
{
	struct rdma_ucm_event_resp resp;
	struct rdma_ucm_get_event cmd;
	struct cm_event *e;
	int err;

	/* Old libraries have neither the padding nor what came after it. */
	if (c->out_len < sizeof(resp) - sizeof(resp.reserved) - sizeof(resp.ece))
		return ENOSPC;
	err = take(c, &cmd, sizeof(cmd));
	if (!err)
		err = -cm_event_wait(c->file, c->fd);
	if (err)
		return err;
	e = container_of(c->file->events.next, struct cm_event, link);
	err = user_write(cmd.response, &e->resp, MIN(c->out_len, sizeof(e->resp)));
	if (!err) {
		e->id->events_reported++;
		if (e->resp.event == CM_EV_CONNECT_REQUEST)
			e->id->backlog++;
		cm_event_pop(c->file);
	}
	cm_unlock();
	return err;
}

/* ---------------------------------------------------------------- what came with Linux 6.17
 * rdma/rdma_user_cm.h of then; the distributions' are older. */

enum { CM_CMD_RESOLVE_IB_SERVICE = RDMA_USER_CM_CMD_JOIN_MCAST + 1, CM_CMD_WRITE_CM_EVENT };
enum { CM_EV_USER = 18, CM_EV_INTERNAL = 19 }; /* RDMA_CM_EVENT_* */

struct write_cm_event {
	uint32_t id, reserved, event, status;
	union {
		struct rdma_ucm_conn_param conn;
		struct rdma_ucm_ud_param ud;
		uint64_t arg;
	} param;
};

/* ucma_write_cm_event(): an event that the application sends itself. */
static int write_cm_event(const struct call *c)
{
	struct rdma_ucm_event_resp resp = { 0 };
	struct write_cm_event cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err && cmd.event != CM_EV_USER && cmd.event != CM_EV_INTERNAL)
		err = EINVAL;
	if (!err)
		err = cm_id_find(c->file, cmd.id, &id);
	if (err)
		return err;
	resp.event = cmd.event;
	resp.status = cmd.status;
	memcpy(&resp.param, &cmd.param.arg, sizeof(cmd.param.arg));
	cm_event_push(id, &resp, NULL);
	return 0;
}

/* rdma_resolve_ib_service() of core/cma.c: a subnet administrator is asked, which Ethernet has none of. */
static int resolve_ib_service(const struct call *c)
{
	struct {
		uint32_t id, reserved;
	} cmd;
	struct cm_id *id;
	int err = take(c, &cmd, sizeof(cmd));

	if (!err)
		err = cm_id_find_bound(c->file, cmd.id, &id);
	if (!err)
		err = id->state == CM_ADDR_BOUND ? EOPNOTSUPP : EINVAL;
	return err;
}

/* ---------------------------------------------------------------- write() */

static const struct {
	int (*run)(const struct call *);
	const char *name;
	bool unlocked;
} commands[] = {
	[RDMA_USER_CM_CMD_CREATE_ID] = { create_id, "CREATE_ID" },
	[RDMA_USER_CM_CMD_DESTROY_ID] = { destroy_id, "DESTROY_ID" },
	[RDMA_USER_CM_CMD_BIND_IP] = { bind_ip, "BIND_IP" },
	[RDMA_USER_CM_CMD_RESOLVE_IP] = { resolve_ip, "RESOLVE_IP" },
	[RDMA_USER_CM_CMD_RESOLVE_ROUTE] = { resolve_route, "RESOLVE_ROUTE" },
	[RDMA_USER_CM_CMD_QUERY_ROUTE] = { query_route, "QUERY_ROUTE" },
	[RDMA_USER_CM_CMD_CONNECT] = { connect_id, "CONNECT" },
	[RDMA_USER_CM_CMD_LISTEN] = { listen_id, "LISTEN" },
	[RDMA_USER_CM_CMD_ACCEPT] = { accept_id, "ACCEPT" },
	[RDMA_USER_CM_CMD_REJECT] = { reject_id, "REJECT" },
	[RDMA_USER_CM_CMD_DISCONNECT] = { disconnect_id, "DISCONNECT" },
	[RDMA_USER_CM_CMD_INIT_QP_ATTR] = { init_qp_attr, "INIT_QP_ATTR" },
	[RDMA_USER_CM_CMD_GET_EVENT] = { get_event, "GET_EVENT", true },
	[RDMA_USER_CM_CMD_GET_OPTION] = { NULL, "GET_OPTION" }, /* the kernel has none either */
	[RDMA_USER_CM_CMD_SET_OPTION] = { set_option, "SET_OPTION" },
	[RDMA_USER_CM_CMD_NOTIFY] = { notify_id, "NOTIFY" },
	[RDMA_USER_CM_CMD_JOIN_IP_MCAST] = { join_ip_mcast, "JOIN_IP_MCAST" },
	[RDMA_USER_CM_CMD_LEAVE_MCAST] = { leave_mcast, "LEAVE_MCAST" },
	[RDMA_USER_CM_CMD_MIGRATE_ID] = { migrate_id, "MIGRATE_ID" },
	[RDMA_USER_CM_CMD_QUERY] = { query, "QUERY" },
	[RDMA_USER_CM_CMD_BIND] = { bind_addr, "BIND" },
	[RDMA_USER_CM_CMD_RESOLVE_ADDR] = { resolve_addr, "RESOLVE_ADDR" },
	[RDMA_USER_CM_CMD_JOIN_MCAST] = { join_mcast, "JOIN_MCAST" },
	[CM_CMD_RESOLVE_IB_SERVICE] = { resolve_ib_service, "RESOLVE_IB_SERVICE" },
	[CM_CMD_WRITE_CM_EVENT] = { write_cm_event, "WRITE_CM_EVENT" },
};

/* ucma_write() */
ssize_t emu_cm_write(struct cm_file *f, int fd, const void *buf, size_t len)
{
	struct rdma_ucm_cmd_hdr h;
	struct call c = { .file = f, .fd = fd, .in = (uintptr_t)buf + sizeof(h) };
	int err;

	if (len < sizeof(h))
		return -EINVAL;
	if (user_read(&h, (uintptr_t)buf, sizeof(h)))
		return -EFAULT;
	if (h.cmd >= ARRAY_LEN(commands) || h.in + sizeof(h) > len)
		return -EINVAL;
	if (!commands[h.cmd].run)
		return -ENOSYS;
	c.in_len = h.in;
	c.out_len = h.out;
	if (commands[h.cmd].unlocked) {
		err = commands[h.cmd].run(&c);
	} else {
		cm_lock();
		f->fd = fd;
		err = f->closed ? EBADF : commands[h.cmd].run(&c);
		cm_unlock();
	}
	if (err && err != EAGAIN)
		emu_log(EMU_INFO, "rdma_cm: %s: %s", commands[h.cmd].name, strerror(err));
	else
		emu_log(EMU_DEBUG, "rdma_cm: %s%s", commands[h.cmd].name, err ? ": nothing there" : "");
	return err ? -err : (ssize_t)len;
}

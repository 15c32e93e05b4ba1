/* SPDX-License-Identifier: MIT
 * The connection manager: what answers on /dev/infiniband/rdma_cm in place of the kernel.
 *
 *   cm_abi.c      the commands that librdmacm writes, and their errors (core/ucma.c)
 *   cm_query.c    the commands that ask for addresses and paths
 *   cm_file.c     the device's descriptors and their queues of events
 *   cm_id.c       identifiers, and what may be set on them (core/cma.c)
 *   cm_addr.c     from an address to a device, port and GID (core/addr.c, core/cma.c)
 *   cm_ports.c    port numbers, which all processes of a user share
 *   cm_message.c  messages: REQ, REP, RTU, REJ, DREQ, DREP (core/cm.c)
 *   cm_connect.c  what a program does to a connection
 *   cm_receive.c  what messages, and their absence, do to it
 *   cm_sidr.c     where a datagram service is: SIDR_REQ, SIDR_REP
 *   cm_attr.c     what a QP has to be set to
 *   cm_links.c    messages to other processes, the thread that waits for theirs, timers
 *
 * "core/" is drivers/infiniband/core/ of Linux, as in control.h. One lock of its own guards all this; emu.lock is never
 * taken with it held. Functions that return int give 0 or a positive errno unless they say otherwise. */
#ifndef AIORDMA_CM_H
#define AIORDMA_CM_H

#include <netinet/in.h>
#include <sys/socket.h>

#include <rdma/rdma_user_cm.h>

#include "control.h"
#include "registry.h"

#define CM_FAMILY_IB 27 /* AF_IB of linux/socket.h: addresses are GIDs */

/* rdma/rdma_cma.h, which is librdmacm's: events and the default Q_Key. */
enum cm_event_type {
	CM_EV_ADDR_RESOLVED,
	CM_EV_ADDR_ERROR,
	CM_EV_ROUTE_RESOLVED,
	CM_EV_ROUTE_ERROR,
	CM_EV_CONNECT_REQUEST,
	CM_EV_CONNECT_RESPONSE,
	CM_EV_CONNECT_ERROR,
	CM_EV_UNREACHABLE,
	CM_EV_REJECTED,
	CM_EV_ESTABLISHED,
	CM_EV_DISCONNECTED,
	CM_EV_DEVICE_REMOVAL,
	CM_EV_MULTICAST_JOIN,
	CM_EV_MULTICAST_ERROR,
	CM_EV_ADDR_CHANGE,
	CM_EV_TIMEWAIT_EXIT,
};
#define CM_UDP_QKEY 0x01234567u /* RDMA_UDP_QKEY */

/* Reasons and states that messages carry: rdma/ib_cm.h. */
#define CM_REJ_TIMEOUT 4
#define CM_REJ_INVALID_SERVICE_ID 8
#define CM_REJ_CONSUMER_DEFINED 28
#define CM_REJ_VENDOR_OPTION_NOT_SUPPORTED 35
#define CM_SIDR_SUCCESS 0
#define CM_SIDR_UNSUPPORTED 1
#define CM_SIDR_REJECT 2

/* Private data that a message has room for (rdma/ib_cm.h); REQ and SIDR_REQ begin with the CMA's own header. */
#define CM_HDR_BYTES 36
#define CM_REQ_DATA (92 - CM_HDR_BYTES)
#define CM_REP_DATA 196
#define CM_REJ_DATA 148
#define CM_SIDR_REQ_DATA (216 - CM_HDR_BYTES)
#define CM_SIDR_REP_DATA 136
#define CM_MAX_DATA 196

/* core/cma.c: enum rdma_cm_state. Resolving a route takes no time here. */
enum cm_state {
	CM_IDLE,
	CM_ADDR_BOUND,
	CM_ADDR_QUERY,
	CM_ADDR_RESOLVED,
	CM_ROUTE_RESOLVED,
	CM_CONNECT,
	CM_DISCONNECT,
	CM_LISTEN,
};

/* core/cm.c: enum ib_cm_state, of the identifier's half below. The states that end in MRA are folded into those that they
 * come from: that a peer said it needs time is in the deadline. */
enum cm_conn_state {
	CONN_NONE, /* nothing there yet: the kernel's cm_id.ib is NULL */
	CONN_IDLE,
	CONN_LISTEN,
	CONN_REQ_SENT,
	CONN_REQ_RCVD,
	CONN_REP_SENT,
	CONN_REP_RCVD,
	CONN_ESTABLISHED,
	CONN_DREQ_SENT,
	CONN_DREQ_RCVD,
	CONN_TIMEWAIT,
	CONN_SIDR_REQ_SENT,
	CONN_SIDR_REQ_RCVD,
};

enum cm_message_type {
	CM_REQ = 1,
	CM_MRA,
	CM_REJ,
	CM_REP,
	CM_RTU,
	CM_DREQ,
	CM_DREP,
	CM_SIDR_REQ,
	CM_SIDR_REP,
};

/* What goes from one identifier to another, in whatever process that is: the fields of the MADs in IBTA volume 1, 12.6,
 * and of the CMA's header (annex A11), that mean anything here. */
struct cm_message {
	uint32_t type;
	uint32_t from_slot, from_generation; /* the sender's process, see registry.h */
	uint32_t from, to;		     /* identifiers: cm_id.comm; a REQ's `to` is the listener's */
	uint32_t qpn, qkey, psn;
	uint32_t ece_vendor, ece_options;
	uint16_t ps, port, source_port; /* host order */
	uint16_t status;		/* of REJ, its reason, and SIDR_REP */
	uint8_t family;			/* AF_INET or AF_INET6 */
	uint8_t qp_type, responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq, mtu,
		packet_life_time, traffic_class, sl, hop_limit, repeated;
	uint8_t source[16], destination[16]; /* addresses; IPv4 in the last four bytes */
	uint8_t gid[16];		     /* of the sender's port */
	uint8_t data_len;
	uint8_t data[CM_MAX_DATA];
};

union cm_addr {
	struct sockaddr sa;
	struct sockaddr_in in;
	struct sockaddr_in6 in6;
	struct __kernel_sockaddr_storage ss;
	struct { /* struct sockaddr_ib of rdma/ib.h */
		uint16_t family, pkey;
		uint32_t flow_info;
		uint8_t gid[16];
		uint64_t sid, sid_mask, scope_id;
	} ib;
};

struct cm_file;

/* An identifier: the kernel's struct ucma_context, rdma_id_private and cm_id_private in one. */
struct cm_id {
	uint32_t handle;     /* what librdmacm knows it by */
	uint32_t comm;	     /* what peers know it by: not used again for a long time */
	struct emu_list link; /* of cm_file.ids */
	struct emu_list hash; /* by comm */
	struct cm_file *file;
	uint64_t uid; /* 0: a request that isn't accepted, whose events nobody hears of */
	uint32_t events_reported;
	bool untold; /* a request whose event still waits */
	int32_t backlog;

	uint16_t ps;
	uint8_t qp_type;
	enum cm_state state;
	enum cm_conn_state conn;
	union cm_addr src, dst;
	uint16_t bound_ps; /* the port space that the port was taken from */
	int32_t port_slot; /* its entry in the table of ports; -1: none */
	bool reuseaddr, afonly, afonly_set, timeout_set;
	uint8_t tos, timeout;

	struct emu_device *dev; /* NULL: not bound to one */
	uint8_t port, gid_index;
	union ibv_gid sgid, dgid;
	uint8_t num_paths, mtu, packet_life_time, traffic_class, sl, hop_limit;

	uint32_t seq_num, qkey, qp_num;
	bool srq;
	struct registry_peer peer;
	uint32_t via; /* by what its last message went or came */
	uint32_t peer_comm, remote_qpn, sq_psn;
	uint8_t initiator_depth, responder_resources, retry_count, rnr_retry_count, ack_timeout, path_mtu;

	struct emu_list timer; /* on the list of timers while `deadline` counts */
	uint64_t deadline;
	uint32_t timeout_ms, retries;
	struct cm_message *sent; /* what is repeated when the deadline has passed */
};

struct cm_event {
	struct emu_list link;
	struct cm_id *id;      /* whose event it is; of a request, the listener */
	struct cm_id *request; /* the new identifier; NULL if it's gone again */
	struct rdma_ucm_event_resp resp;
};

/* A descriptor of the device. The application has one end of a pair of sockets, which is readable while events wait. */
struct cm_file {
	struct emu_list link;
	uint32_t refs;
	bool closed, orphan;
	int fd; /* the application's, as it was when a command came by it */
	int wfd;
	struct emu_list ids, events;
};

/* ---------------------------------------------------------------- cm_file.c */

void cm_lock(void);
void cm_unlock(void); /* delivers what is on the way within the process first */

bool emu_cm_is_node(const char *path);
/* Called by context.c, which keeps starts and ends apart; without the locks. */
int cm_file_open(int flags, struct cm_file **); /* a descriptor, or -errno */
void cm_file_close(struct cm_file *);		/* its descriptor is gone */
void cm_file_orphan(struct cm_file *);		/* the same, for where it can't be closed; it is in cm_file_reap() */
void cm_file_reap(void);
int cm_file_of(int fd, struct cm_file **); /* with the lock held; ENOENT, EINVAL */
void cm_file_get(struct cm_file *);
void cm_file_put(struct cm_file *);
uint32_t cm_files(void); /* how many there are */
void cm_before_fork(void);
void cm_after_fork(bool child);

void cm_event_push(struct cm_id *, const struct rdma_ucm_event_resp *, struct cm_id *request);
/* The common kind: type and status (negative errno, or a positive reason). */
void cm_event_plain(struct cm_id *, enum cm_event_type, int32_t status);
/* Waits, if the descriptor does. Without the lock. -errno, or 0 with the lock held and an event at the head. */
int cm_event_wait(struct cm_file *, int fd);
void cm_event_pop(struct cm_file *); /* frees the event at the head */
void cm_event_drop(struct cm_id *);  /* those of an identifier that is destroyed */
void cm_event_move(struct cm_id *, struct cm_file *to);

/* ---------------------------------------------------------------- cm_id.c */

int cm_id_create(struct cm_file *, uint16_t ps, uint8_t qp_type, struct cm_id **);
/* Destroys it as rdma_destroy_id() does, the peer being told. The events that were reported. */
uint32_t cm_id_destroy(struct cm_id *);
int cm_id_find(struct cm_file *, uint32_t handle, struct cm_id **); /* ENOENT, EINVAL: core/ucma.c, ucma_get_ctx() */
int cm_id_find_bound(struct cm_file *, uint32_t handle, struct cm_id **); /* EINVAL without device: ucma_get_ctx_dev() */
struct cm_id *cm_id_by_comm(uint32_t comm);
void cm_ids_each(void (*)(struct cm_id *, void *), void *); /* which may not destroy any */
uint32_t cm_ids(void);
int cm_id_bind(struct cm_id *, const union cm_addr *);
int cm_id_resolve_addr(struct cm_id *, const union cm_addr *src, const union cm_addr *dst, uint32_t timeout_ms);
int cm_id_resolve_route(struct cm_id *, uint32_t timeout_ms);
int cm_id_listen(struct cm_id *, int32_t backlog);
int cm_id_set_option(struct cm_id *, uint32_t level, uint32_t name, uint64_t value, uint32_t len);
void cm_id_path(struct cm_id *); /* fills in the one path that there is */
void cm_ids_forked(void);

/* ---------------------------------------------------------------- cm_addr.c */

size_t cm_addr_size(const union cm_addr *); /* rdma_addr_size(): 0 for families that it doesn't know */
bool cm_addr_any(const union cm_addr *);
bool cm_addr_link_local(const union cm_addr *);
uint16_t cm_addr_port(const union cm_addr *);
void cm_addr_set_port(union cm_addr *, uint16_t);
void cm_addr_gid(const union cm_addr *, union ibv_gid *); /* rdma_ip2gid() */
void cm_addr_bytes(const union cm_addr *, uint8_t bytes[16]);
void cm_addr_make(union cm_addr *, int family, const uint8_t bytes[16], uint16_t port);
/* The device, port and GID that stand for an address of this host; EADDRNOTAVAIL, ENODEV. */
int cm_addr_acquire(struct cm_id *, const union cm_addr *);
int cm_addr_loopback(struct cm_id *); /* for the address "any" as destination */
/* 0: the address is one of this host or its devices; else what rdma_resolve_ip() would end in. */
int cm_addr_reach(const union cm_addr *dst);

/* ---------------------------------------------------------------- cm_ports.c */

void cm_ports_start(void);
void cm_ports_stop(void);
int cm_port_take(struct cm_id *); /* cma_get_port() */
void cm_port_release(struct cm_id *);
int cm_port_listen(struct cm_id *); /* from now on it's found */
void cm_port_unlisten(struct cm_id *);
enum cm_found { CM_FOUND, CM_FOUND_OTHER_ADDRESS, CM_FOUND_NOTHING };
enum cm_found cm_port_find(uint16_t ps, uint16_t port, int family, const uint8_t address[16], struct registry_peer *,
			   uint32_t *comm);

/* ---------------------------------------------------------------- cm_connect.c, cm_receive.c, cm_sidr.c, cm_attr.c */

struct cm_params {
	struct rdma_ucm_conn_param conn;
	struct rdma_ucm_ece ece;
};

int cm_connect(struct cm_id *, const struct cm_params *);
int cm_accept(struct cm_id *, const struct cm_params *); /* NULL: the active side's answer to CONNECT_RESPONSE */
int cm_reject(struct cm_id *, uint8_t reason, const void *data, uint8_t len);
int cm_disconnect(struct cm_id *);
int cm_notify(struct cm_id *, uint32_t event);
void cm_conn_destroy(struct cm_id *); /* tells the peer what cm_destroy_id() tells it */

void cm_conn_timeout(struct cm_id *); /* its deadline has passed */
void cm_link_died(uint32_t via);
void cm_message_receive(const struct cm_message *);

int cm_sidr_connect(struct cm_id *, const struct cm_params *);
int cm_sidr_reply(struct cm_id *, uint16_t status, uint32_t qkey, const void *data, uint8_t len);
void cm_sidr_receive(const struct cm_message *);
int cm_set_qkey(struct cm_id *, uint32_t qkey); /* cma_set_qkey(); 0: the default */

int cm_init_qp_attr(struct cm_id *, uint32_t state, struct ib_uverbs_qp_attr *);
void cm_ah_attr(const struct cm_id *, struct ib_uverbs_ah_attr *);

/* ---------------------------------------------------------------- cm_links.c */

int cm_links_start(void);
void cm_links_stop(void);
void cm_links_forked(void);
const struct registry_peer *cm_self(void);
/* Takes it to a process: ours, by way of a queue that cm_unlock() empties, or another one. By what: see cm_id.via; 0: it
 * isn't there. */
uint32_t cm_send(const struct registry_peer *, const struct cm_message *);
uint32_t cm_via(void); /* by what the message came that is being received */
#define CM_VIA_LOCAL 1
void cm_deliver_local(void);
void cm_timer(struct cm_id *, uint32_t ms); /* from now on */
void cm_timer_stop(struct cm_id *);
uint32_t cm_links(void);

/* cm_abi.c: what write() on the descriptor gives; the length, or -errno. Without the locks. */
ssize_t emu_cm_write(struct cm_file *, int fd, const void *buf, size_t len);
/* cm_query.c: into the application's memory, which has room for `out` bytes. */
int cm_query_route(const struct cm_id *, uint64_t response, uint16_t out);
int cm_query_addr(const struct cm_id *, uint64_t response, uint16_t out);
int cm_query_gid(const struct cm_id *, uint64_t response, uint16_t out);
int cm_query_path(const struct cm_id *, uint64_t response, uint16_t out);

#endif

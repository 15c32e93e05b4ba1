/* SPDX-License-Identifier: MIT
 * The connection manager: commands as any program may write them to /dev/infiniband/rdma_cm, messages as another process
 * may send them, and the passing of time. An input is a list of operations, each a byte and its operands.
 *
 * There is no thread of the connection manager's: what it would do an input says. The other process is only what it sends. */
#define _GNU_SOURCE
#include "fuzz.h"
#include "nic_world.h"
#include "cm.h"

#include <fcntl.h>
#include <sys/mman.h>

#define FILES 3u
#define IDS 64u
#define AS_IT_IS 0xff

/* The other process, its identifier, the port at which it listens, and by what its messages come. */
#define PEER_SLOT 3u
#define PEER_GENERATION 1u
#define PEER_COMM 99u
#define PEER_PORT 7777u
#define PEER_VIA 5u

#define RESPONSE 4096u /* where in the arena */
#define COMMAND 65536u

enum op {
	OP_COMMAND, /* u8 command, u8 file, u8 identifier, u16 n, n bytes of its structure; the rest is zero */
	OP_RAW,	    /* u8 file, u16 n, n bytes: a command with its header, as it is */
	OP_EVENT,   /* u8 file */
	OP_MESSAGE, /* u8 type, u8 to which identifier, u8 n, n times (u16 offset, u8 value) */
	OP_TIMEOUT, /* u8: which of those that wait for something */
	OP_DIED,    /* the other process */
	OP_REACH,   /* u8: can anything be sent to it? */
	OP_CLOSE,   /* u8 file */
	OP_UNMAP,   /* u32 offset in the arena, u32 length */
	OPS
};

static const char config[] = "spin_us 0\nreach_host 0\nuse_uffd 0\n"
			     "device mlx5_0 00005cfffe000001\n"
			     "port 1 gids 16\n"
			     "gid 1 0 fe80::5cff:fe00:1 v2 lo\ngid 1 1 ::ffff:c000:201 v1 lo\ngid 1 2 ::ffff:c000:201 v2 lo\n"
			     "device mlx5_1 00005cfffe000003\n"
			     "port 1 gids 16\ngid 1 0 ::ffff:c000:203 v2 lo\n";

static int fds[FILES];
static uint32_t ids[IDS];
static unsigned nids;
static bool reachable, foreign;

/* ---------------------------------------------------------------- in place of the thread and of sockets */

int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_join(pthread_t, void **);
uint32_t __real_cm_send(const struct registry_peer *, const struct cm_message *);
uint32_t __wrap_cm_send(const struct registry_peer *, const struct cm_message *);
uint32_t __real_cm_via(void);
uint32_t __wrap_cm_via(void);
enum cm_found __real_cm_port_find(uint16_t, uint16_t, int, const uint8_t[16], struct registry_peer *, uint32_t *);
enum cm_found __wrap_cm_port_find(uint16_t, uint16_t, int, const uint8_t[16], struct registry_peer *, uint32_t *);

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*run)(void *), void *arg)
{
	(void)a;
	(void)run;
	(void)arg;
	*t = pthread_self();
	return 0;
}

int __wrap_pthread_join(pthread_t t, void **result)
{
	(void)t;
	(void)result;
	return 0;
}

uint32_t __wrap_cm_send(const struct registry_peer *to, const struct cm_message *m)
{
	if (to->slot == cm_self()->slot && to->generation == cm_self()->generation)
		return __real_cm_send(to, m);
	return reachable ? PEER_VIA : 0;
}

uint32_t __wrap_cm_via(void)
{
	return foreign ? PEER_VIA : __real_cm_via();
}

enum cm_found __wrap_cm_port_find(uint16_t ps, uint16_t port, int family, const uint8_t address[16],
				  struct registry_peer *peer, uint32_t *comm)
{
	if (port != PEER_PORT)
		return __real_cm_port_find(ps, port, family, address, peer, comm);
	*peer = (struct registry_peer){ .slot = PEER_SLOT, .generation = PEER_GENERATION };
	*comm = PEER_COMM;
	return CM_FOUND;
}

/* ---------------------------------------------------------------- commands */

#define NO SIZE_MAX
#define HAS(type, id, response) { sizeof(struct type), id, response }
#define AT(type, member) offsetof(struct type, member)

static const struct {
	size_t size, id, response;
} commands[] = {
	[RDMA_USER_CM_CMD_CREATE_ID] = HAS(rdma_ucm_create_id, NO, AT(rdma_ucm_create_id, response)),
	[RDMA_USER_CM_CMD_DESTROY_ID] =
		HAS(rdma_ucm_destroy_id, AT(rdma_ucm_destroy_id, id), AT(rdma_ucm_destroy_id, response)),
	[RDMA_USER_CM_CMD_BIND_IP] = HAS(rdma_ucm_bind_ip, AT(rdma_ucm_bind_ip, id), NO),
	[RDMA_USER_CM_CMD_RESOLVE_IP] = HAS(rdma_ucm_resolve_ip, AT(rdma_ucm_resolve_ip, id), NO),
	[RDMA_USER_CM_CMD_RESOLVE_ROUTE] = HAS(rdma_ucm_resolve_route, AT(rdma_ucm_resolve_route, id), NO),
	[RDMA_USER_CM_CMD_QUERY_ROUTE] = HAS(rdma_ucm_query, AT(rdma_ucm_query, id), AT(rdma_ucm_query, response)),
	[RDMA_USER_CM_CMD_CONNECT] = HAS(rdma_ucm_connect, AT(rdma_ucm_connect, id), NO),
	[RDMA_USER_CM_CMD_LISTEN] = HAS(rdma_ucm_listen, AT(rdma_ucm_listen, id), NO),
	[RDMA_USER_CM_CMD_ACCEPT] = HAS(rdma_ucm_accept, AT(rdma_ucm_accept, id), NO),
	[RDMA_USER_CM_CMD_REJECT] = HAS(rdma_ucm_reject, AT(rdma_ucm_reject, id), NO),
	[RDMA_USER_CM_CMD_DISCONNECT] = HAS(rdma_ucm_disconnect, AT(rdma_ucm_disconnect, id), NO),
	[RDMA_USER_CM_CMD_INIT_QP_ATTR] =
		HAS(rdma_ucm_init_qp_attr, AT(rdma_ucm_init_qp_attr, id), AT(rdma_ucm_init_qp_attr, response)),
	[RDMA_USER_CM_CMD_GET_EVENT] = HAS(rdma_ucm_get_event, NO, AT(rdma_ucm_get_event, response)),
	[RDMA_USER_CM_CMD_SET_OPTION] = HAS(rdma_ucm_set_option, AT(rdma_ucm_set_option, id), NO),
	[RDMA_USER_CM_CMD_NOTIFY] = HAS(rdma_ucm_notify, AT(rdma_ucm_notify, id), NO),
	[RDMA_USER_CM_CMD_JOIN_IP_MCAST] =
		HAS(rdma_ucm_join_ip_mcast, AT(rdma_ucm_join_ip_mcast, id), AT(rdma_ucm_join_ip_mcast, response)),
	[RDMA_USER_CM_CMD_LEAVE_MCAST] =
		HAS(rdma_ucm_destroy_id, AT(rdma_ucm_destroy_id, id), AT(rdma_ucm_destroy_id, response)),
	[RDMA_USER_CM_CMD_MIGRATE_ID] =
		HAS(rdma_ucm_migrate_id, AT(rdma_ucm_migrate_id, id), AT(rdma_ucm_migrate_id, response)),
	[RDMA_USER_CM_CMD_QUERY] = HAS(rdma_ucm_query, AT(rdma_ucm_query, id), AT(rdma_ucm_query, response)),
	[RDMA_USER_CM_CMD_BIND] = HAS(rdma_ucm_bind, AT(rdma_ucm_bind, id), NO),
	[RDMA_USER_CM_CMD_RESOLVE_ADDR] = HAS(rdma_ucm_resolve_addr, AT(rdma_ucm_resolve_addr, id), NO),
	[RDMA_USER_CM_CMD_JOIN_MCAST] =
		HAS(rdma_ucm_join_mcast, AT(rdma_ucm_join_mcast, id), AT(rdma_ucm_join_mcast, response)),
	[RDMA_USER_CM_CMD_JOIN_MCAST + 1] = { 8, 0, NO },  /* RESOLVE_IB_SERVICE */
	[RDMA_USER_CM_CMD_JOIN_MCAST + 2] = { 16 + sizeof(struct rdma_ucm_conn_param), 0, NO }, /* WRITE_CM_EVENT */
};

static int file(unsigned i)
{
	i %= FILES;
	if (fds[i] < 0)
		fds[i] = emu_hook_open("/dev/infiniband/rdma_cm", O_RDWR | O_NONBLOCK | O_CLOEXEC, 0);
	return fds[i];
}

static bool usable(uint64_t offset, size_t len)
{
	uint64_t page = offset & ~(uint64_t)(EMU_PAGE - 1);

	return !madvise(arena(page), (offset - page + len + EMU_PAGE - 1) & ~(size_t)(EMU_PAGE - 1), MADV_POPULATE_WRITE);
}

static uint32_t id_number(unsigned i)
{
	return nids ? ids[i % nids] : 0;
}

static void new_id(uint32_t handle)
{
	if (nids < IDS)
		ids[nids++] = handle;
}

static void run_command(unsigned command, unsigned f, unsigned id, const uint8_t *bytes, size_t n)
{
	size_t size = commands[command].size;
	struct rdma_ucm_cmd_hdr h = { .cmd = command, .in = (uint16_t)size, .out = 1024 };
	uint64_t response = ARENA + RESPONSE;
	uint8_t body[1024] = { 0 };
	uint32_t handle = id_number(id);
	int fd = file(f);

	if (!size || fd < 0 || !usable(COMMAND, sizeof(h) + size))
		return;
	if (n)
		memcpy(body, bytes, MIN(n, size));
	if (commands[command].response != NO)
		memcpy(body + commands[command].response, &response, sizeof(response));
	if (commands[command].id != NO && id != AS_IT_IS)
		memcpy(body + commands[command].id, &handle, sizeof(handle));
	if (command == RDMA_USER_CM_CMD_MIGRATE_ID) {
		struct rdma_ucm_migrate_id *m = (void *)body;

		m->fd = (uint32_t)file(m->fd);
	}
	memcpy(arena(COMMAND), &h, sizeof(h));
	memcpy(arena(COMMAND + sizeof(h)), body, size);
	if (emu_hook_write(fd, arena(COMMAND), sizeof(h) + size) < 0)
		return;
	if (command == RDMA_USER_CM_CMD_CREATE_ID)
		new_id(((struct rdma_ucm_create_id_resp *)(void *)arena(RESPONSE))->id);
	if (command == RDMA_USER_CM_CMD_GET_EVENT) {
		const struct rdma_ucm_event_resp *e = (void *)arena(RESPONSE);

		if (e->event == CM_EV_CONNECT_REQUEST)
			new_id(e->id);
	}
}

static void do_command(struct input *in)
{
	unsigned command = (unsigned)take(in, 1) % ARRAY_LEN(commands), f = (unsigned)take(in, 1);
	unsigned id = (unsigned)take(in, 1);
	size_t n = take(in, 2);
	const uint8_t *bytes = take_bytes(in, &n);

	run_command(command, f, id, bytes, n);
}

static void do_raw(struct input *in)
{
	int fd = file((unsigned)take(in, 1));
	size_t n = take(in, 2);
	const uint8_t *bytes = take_bytes(in, &n);
	/* At the arena's end, so that what reads too far is told EFAULT. */
	uint64_t at = ARENA_SIZE - ((n + 7) & ~7ul);

	if (fd < 0 || !n || !usable(at, n))
		return;
	memcpy(arena(at), bytes, n);
	emu_hook_write(fd, arena(at), n);
}

/* ---------------------------------------------------------------- from the other process, and time */

struct choice {
	unsigned n;
	struct cm_id *id;
};

static void choose_waiting(struct cm_id *id, void *data)
{
	struct choice *c = data;

	if (!list_empty(&id->timer) && !c->n--)
		c->id = id;
}

static void do_timeout(unsigned which)
{
	struct choice c = { .n = which };

	cm_lock();
	cm_ids_each(choose_waiting, &c);
	if (c.id) {
		list_del(&c.id->timer);
		cm_conn_timeout(c.id);
	}
	cm_unlock();
}

static void choose_handle(struct cm_id *id, void *data)
{
	struct choice *c = data;

	if (id->handle == c->n)
		c->id = id;
}

static void do_message(struct input *in)
{
	struct cm_message m = {
		.type = (uint32_t)take(in, 1), .from_slot = PEER_SLOT, .from_generation = PEER_GENERATION,
		.from = PEER_COMM, .qpn = 0x1234, .psn = 77, .ps = RDMA_PS_TCP, .family = AF_INET,
		.qp_type = IBV_QPT_RC, .mtu = IBV_MTU_1024, .packet_life_time = 16, .source_port = 5,
		.source = { [12] = 192, 0, 2, 1 }, .gid = { [10] = 0xff, 0xff, 192, 0, 2, 1 }, .data_len = 4,
	};
	struct choice c = { .n = id_number((unsigned)take(in, 1)) };

	cm_lock();
	cm_ids_each(choose_handle, &c);
	if (c.id) {
		m.to = c.id->comm;
		m.ps = c.id->bound_ps;
		m.port = cm_addr_port(&c.id->src);
		m.family = (uint8_t)c.id->src.sa.sa_family;
		m.qp_type = c.id->qp_type;
		cm_addr_bytes(&c.id->src, m.destination);
	}
	for (unsigned n = (unsigned)take(in, 1) % 32; n; n--) {
		size_t at = take(in, 2) % sizeof(m);

		((uint8_t *)&m)[at] = (uint8_t)take(in, 1);
	}
	/* Who it comes from the socket says (cm_links.c), and it isn't ourselves. */
	m.from_slot = PEER_SLOT;
	m.from_generation = PEER_GENERATION;
	foreign = true;
	cm_message_receive(&m);
	foreign = false;
	cm_unlock();
}

static void close_file(unsigned i)
{
	if (fds[i] >= 0)
		emu_hook_close(fds[i]);
	fds[i] = -1;
}

static void step(struct input *in)
{
	switch (take(in, 1) % OPS) {
	case OP_COMMAND:
		do_command(in);
		break;
	case OP_RAW:
		do_raw(in);
		break;
	case OP_EVENT:
		run_command(RDMA_USER_CM_CMD_GET_EVENT, (unsigned)take(in, 1), 0, NULL, 0);
		break;
	case OP_MESSAGE:
		do_message(in);
		break;
	case OP_TIMEOUT:
		do_timeout((unsigned)take(in, 1));
		break;
	case OP_DIED:
		cm_lock();
		cm_link_died(PEER_VIA);
		cm_unlock();
		break;
	case OP_REACH:
		reachable = take(in, 1) & 1;
		break;
	case OP_CLOSE:
		close_file((unsigned)take(in, 1) % FILES);
		break;
	default: {
		uint64_t offset = take(in, 4);

		arena_unmap(offset, take(in, 4));
	}
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input in = { data, size };

	configure_once(config, fds, FILES);
	nids = 0;
	reachable = true;
	for (unsigned i = 0; i < 400 && in.n; i++)
		step(&in);
	for (unsigned i = 0; i < FILES; i++)
		close_file(i);
	/* Nothing is left of it. */
	CHECK_EQ(cm_ids(), 0);
	CHECK_EQ(cm_files(), 0);
	arena_reset();
	return 0;
}

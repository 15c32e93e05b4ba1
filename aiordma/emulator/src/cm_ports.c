/* SPDX-License-Identifier: MIT
 * Port numbers of the connection manager, and who listens: the bind lists of core/cma.c.
 *
 * The kernel has one table for a network namespace. Here the processes of a user that can reach each other share a file
 * beside the registry. An entry belongs to a process, and stands for nothing when that has ended. Who looks into
 * the table or changes it holds a lock on the file, which the kernel takes back if the process dies. Like what else is in
 * that folder, it's read as something that anybody may have written or cut short: copied, not mapped. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "capability.h"
#include "cm.h"

#define PORTS_NAME "ports"
#define ENTRIES 65536u
#define PRIVILEGED 1024u
#define LOCK_TRIES 2000

enum { ENTRY_REUSE = 1, ENTRY_AFONLY = 2, ENTRY_LISTENS = 4, ENTRY_ANY = 8 };

struct entry {
	uint32_t used;
	uint32_t slot, generation, comm;
	uint16_t ps, port, family, flags;
	uint8_t address[16];
};

struct table {
	uint32_t high; /* entries from here on were never used */
	uint32_t reserved[15];
	struct entry entry[ENTRIES];
};

static struct table *table; /* with a file, what it said when the lock was taken */
static int file = -1;

/* ---------------------------------------------------------------- the file */

static bool open_shared(void)
{
	char path[PATH_MAX];
	struct stat st;

	snprintf(path, sizeof(path), "%s/" PORTS_NAME, registry_folder());
	file = emu_real.open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	return file >= 0 && !fstatat(file, "", &st, AT_EMPTY_PATH) && st.st_uid == geteuid() && S_ISREG(st.st_mode);
}

void cm_ports_start(void)
{
	/* Without the registry it's this process's own table. */
	if (registry_on() && !open_shared() && file >= 0) {
		emu_real.close(file);
		file = -1;
	}
	/* Pages of it exist once there's something in them. */
	table = emu_real.mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (table == MAP_FAILED)
		table = NULL;
}

void cm_ports_stop(void)
{
	if (table)
		emu_real.munmap(table, sizeof(*table));
	if (file >= 0)
		emu_real.close(file);
	table = NULL;
	file = -1;
}

static uint32_t high(void)
{
	return table->high < ENTRIES ? table->high : ENTRIES;
}

/* What can't be read is as if it were zero. */
static void load(void)
{
	size_t head = offsetof(struct table, entry), len;
	ssize_t n;

	if (file < 0)
		return;
	memset(table, 0, head);
	n = pread(file, table, head, 0);
	if (n != (ssize_t)head)
		table->high = 0;
	len = high() * sizeof(struct entry);
	n = pread(file, table->entry, len, (off_t)head);
	n = n < 0 ? 0 : n;
	memset((uint8_t *)table->entry + n, 0, len - (size_t)n);
}

static void store(uint32_t index)
{
	const struct entry *e = &table->entry[index];
	off_t at = (off_t)offsetof(struct table, entry) + (off_t)(index * sizeof(*e));

	if (file >= 0 && pwrite(file, e, sizeof(*e), at) != sizeof(*e))
		emu_log(EMU_WARN, "rdma_cm: the table of ports can't be written: %s", strerror(errno));
}

static void store_high(void)
{
	if (file >= 0 && pwrite(file, &table->high, sizeof(table->high), 0) != sizeof(table->high))
		emu_log(EMU_WARN, "rdma_cm: the table of ports can't be written: %s", strerror(errno));
}

/* Held for some microseconds. A process that was stopped in them holds everybody up, but not for ever. */
static void lock_table(void)
{
	struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1 };

	for (int i = 0; file >= 0 && fcntl(file, F_SETLK, &l); i++) {
		struct timespec t = { 0, 1000000 };

		if (i == LOCK_TRIES || (errno != EAGAIN && errno != EACCES)) {
			emu_log(EMU_WARN, "rdma_cm: the table of ports is locked by a process that doesn't go on");
			break;
		}
		if (i > 10)
			nanosleep(&t, NULL);
		else
			usleep(20);
	}
	load();
}

static void unlock_table(void)
{
	struct flock l = { .l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1 };

	if (file >= 0)
		fcntl(file, F_SETLK, &l);
}

static bool is_own(const struct entry *e)
{
	return e->slot == cm_self()->slot && e->generation == cm_self()->generation;
}

/* Of a process that lives; else it's free. */
static bool in_use(struct entry *e)
{
	if (!e->used)
		return false;
	if (is_own(e) || registry_alive(e->slot, e->generation))
		return true;
	e->used = 0;
	store((uint32_t)(e - table->entry));
	return false;
}

/* ---------------------------------------------------------------- taking a port */

static void describe(const struct cm_id *id, struct entry *e)
{
	memset(e, 0, sizeof(*e));
	e->slot = cm_self()->slot;
	e->generation = cm_self()->generation;
	e->comm = id->comm;
	e->ps = id->bound_ps;
	e->port = cm_addr_port(&id->src);
	e->family = id->src.sa.sa_family;
	e->flags = (uint16_t)((id->reuseaddr ? ENTRY_REUSE : 0) | (id->afonly ? ENTRY_AFONLY : 0) |
			      (cm_addr_any(&id->src) ? ENTRY_ANY : 0));
	cm_addr_bytes(&id->src, e->address);
}

/* cma_check_port() of core/cma.c. `reuse` is false for one that is going to listen. */
static int check(const struct entry *mine, int32_t but, bool reuse)
{
	for (uint32_t i = 0; i < high(); i++) {
		struct entry *e = &table->entry[i];

		if (e->port != mine->port || e->ps != mine->ps || (int32_t)i == but || !in_use(e))
			continue;
		if (reuse && e->flags & ENTRY_REUSE)
			continue;
		if (mine->flags & e->flags & ENTRY_AFONLY && mine->family != e->family)
			continue;
		if ((mine->flags | e->flags) & ENTRY_ANY)
			return EADDRNOTAVAIL;
		if (mine->family == e->family && !memcmp(mine->address, e->address, sizeof(e->address)))
			return EADDRINUSE;
	}
	return 0;
}

static bool is_taken(const struct entry *mine)
{
	for (uint32_t i = 0; i < high(); i++)
		if (table->entry[i].port == mine->port && table->entry[i].ps == mine->ps && in_use(&table->entry[i]))
			return true;
	return false;
}

static int insert(struct cm_id *id, const struct entry *mine)
{
	static uint32_t from;
	uint32_t h = high(), at = h;

	for (uint32_t n = 0; n < h && at == h; n++)
		if (!table->entry[(from + n) % h].used)
			at = (from + n) % h;
	for (uint32_t i = 0; i < h && at == ENTRIES; i++)
		if (!in_use(&table->entry[i])) /* of who has ended */
			at = i;
	if (at == ENTRIES)
		return ENOMEM;
	from = at + 1;
	table->entry[at] = *mine;
	table->entry[at].used = 1;
	store(at);
	if (at == h) {
		table->high = h + 1;
		store_high();
	}
	id->port_slot = (int32_t)at;
	return 0;
}

static void port_range(uint32_t *first, uint32_t *last)
{
	FILE *f = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");

	if (!f || fscanf(f, "%u %u", first, last) != 2 || !*first || *last > 65535 || *first > *last) {
		*first = 32768;
		*last = 60999;
	}
	if (f)
		fclose(f);
}

/* cma_alloc_any_port(): from a random one on, the first that nobody has. */
static int take_any(struct cm_id *id)
{
	static uint32_t first, last;
	struct entry mine;
	uint32_t n, start = 0;

	if (!first)
		port_range(&first, &last);
	n = last - first + 1;
	if (getrandom(&start, sizeof(start), GRND_NONBLOCK) != sizeof(start))
		start = (uint32_t)now_ns();
	for (uint32_t i = 0; i < n; i++) {
		cm_addr_set_port(&id->src, (uint16_t)(first + (start + i) % n));
		describe(id, &mine);
		if (!is_taken(&mine))
			return insert(id, &mine);
	}
	cm_addr_set_port(&id->src, 0);
	return EADDRNOTAVAIL;
}

/* cma_use_port() */
static int take_this(struct cm_id *id)
{
	struct entry mine;
	int err;

	describe(id, &mine);
	if (mine.port < PRIVILEGED && !has_capability(CAP_NET_BIND_SERVICE))
		return EACCES;
	err = check(&mine, -1, id->reuseaddr);
	return err ? err : insert(id, &mine);
}

/* cma_select_ib_ps(): an AF_IB address names the port space in its service identifier. The numbers are those of
 * RDMA_IB_IP_PS_* in rdma/rdma_cma.h. */
static uint16_t select_ib_space(struct cm_id *id)
{
	static const uint16_t spaces[] = { RDMA_PS_IB, RDMA_PS_TCP, RDMA_PS_UDP };
	uint64_t mask = be64toh(id->src.ib.sid_mask) & 0xffffffffffff0000ull, sid = be64toh(id->src.ib.sid) & mask;

	for (uint32_t i = 0; i < ARRAY_LEN(spaces); i++) {
		uint64_t prefix = (uint64_t)spaces[i] << 16;

		if ((id->ps != RDMA_PS_IB && id->ps != spaces[i]) || sid != (prefix & mask))
			continue;
		id->src.ib.sid = htobe64(prefix | cm_addr_port(&id->src));
		id->src.ib.sid_mask = htobe64(mask | 0xffff);
		return spaces[i];
	}
	return 0;
}

int cm_port_take(struct cm_id *id)
{
	int err;

	id->bound_ps = id->src.sa.sa_family == CM_FAMILY_IB ? select_ib_space(id) : id->ps;
	if (!id->bound_ps)
		return EPROTONOSUPPORT;
	if (!table)
		return ENOMEM;
	lock_table();
	err = cm_addr_port(&id->src) ? take_this(id) : take_any(id);
	unlock_table();
	return err;
}

/* NULL if somebody else wrote into it. */
static struct entry *own_entry(const struct cm_id *id)
{
	struct entry *e = &table->entry[id->port_slot];

	return (uint32_t)id->port_slot < high() && e->used && is_own(e) && e->comm == id->comm ? e : NULL;
}

void cm_port_release(struct cm_id *id)
{
	struct entry *e;

	if (id->port_slot < 0 || !table)
		return;
	lock_table();
	e = own_entry(id);
	if (e) {
		e->used = 0;
		store((uint32_t)id->port_slot);
	}
	unlock_table();
	id->port_slot = -1;
}

/* ---------------------------------------------------------------- listening */

/* A listener has to be alone, whatever was said of reuse before: rdma_listen(). */
int cm_port_listen(struct cm_id *id)
{
	struct entry mine, *e;
	int err = 0;

	if (!table || id->port_slot < 0)
		return EINVAL;
	lock_table();
	if (id->reuseaddr) {
		describe(id, &mine);
		err = check(&mine, id->port_slot, false);
	}
	e = own_entry(id);
	if (!err && !e)
		err = EADDRINUSE;
	if (!err) {
		e->flags = (uint16_t)((e->flags & ~ENTRY_REUSE) | ENTRY_LISTENS);
		store((uint32_t)id->port_slot);
	}
	unlock_table();
	return err;
}

void cm_port_unlisten(struct cm_id *id)
{
	struct entry *e;

	if (id->port_slot < 0 || !table)
		return;
	lock_table();
	e = own_entry(id);
	if (e) {
		e->flags &= (uint16_t)~ENTRY_LISTENS;
		store((uint32_t)id->port_slot);
	}
	unlock_table();
}

/* cma_match_private_data(): a wildcard of IPv6 takes IPv4 too, unless it was told not to. */
static bool matches(const struct entry *e, int family, const uint8_t address[16])
{
	if (e->flags & ENTRY_ANY && !(e->flags & ENTRY_AFONLY))
		return true;
	if (e->family != family)
		return false;
	return e->flags & ENTRY_ANY || !memcmp(e->address, address, sizeof(e->address));
}

enum cm_found cm_port_find(uint16_t ps, uint16_t port, int family, const uint8_t address[16], struct registry_peer *peer,
			   uint32_t *comm)
{
	enum cm_found found = CM_FOUND_NOTHING;

	if (!table)
		return found;
	lock_table();
	for (uint32_t i = 0; i < high() && found != CM_FOUND; i++) {
		struct entry *e = &table->entry[i];

		if (e->port != port || e->ps != ps || !(e->flags & ENTRY_LISTENS) || !in_use(e))
			continue;
		found = CM_FOUND_OTHER_ADDRESS;
		if (!matches(e, family, address))
			continue;
		found = CM_FOUND;
		peer->slot = e->slot;
		peer->generation = e->generation;
		*comm = e->comm;
	}
	unlock_table();
	return found;
}

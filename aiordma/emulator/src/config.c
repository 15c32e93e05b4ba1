/* SPDX-License-Identifier: MIT
 * Configuration: text, one directive a line, '#' starts a comment. aiordma/emulator/config.py writes it.
 *
 *   spin_us 50                     the device thread polls that long after the last work before it sleeps
 *   legacy_write 0|1               1: no ioctl form of commands, as with kernels before 4.20
 *   use_uffd 0|1                   wake the sleeping device thread by page protection
 *   reach_host 0|1                 the devices of this user's other processes are on the same network
 *   cm_response_timeout 20         how long the connection manager waits for an answer: 4.096 us, times two to that
 *   cm_retries 15                  how often it asks again
 *   one_copy 0|1                   long payload between processes is read where it lies, if the system allows it
 *   device NAME GUID               a new device; the lines below are about it. GUID is 16 hex digits
 *   limit NAME VALUE               one of the limits listed below
 *   port N state NAME mtu BYTES max_mtu BYTES link_layer NAME gids N
 *                                  any of the pairs; default: active, 4096, 4096, ethernet, 16. gids is the size of the
 *                                  GID table
 *   gid PORT INDEX ADDRESS v1|v2 NETDEV
 *   fault KIND NAME=VALUE ...      a fault on purpose, in force from the start: inject_text.c
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "control.h"
#include "inject.h"

#define MAX_CONFIG (1u << 20)
#define DEFAULT_GIDS 16

/* ---------------------------------------------------------------- limits */

struct limit {
	const char *name;
	size_t offset, size;
	uint64_t value, max; /* default, and the largest that the ABI or the PRM's fields can carry */
};

#define LIMIT(member, value, max) \
	{ #member, offsetof(struct emu_limits, member), sizeof(((struct emu_limits *)0)->member), (value), (max) }

/* Defaults in the order of what a ConnectX-6 Dx reports through ibv_devinfo -v. */
static const struct limit limits[] = {
	LIMIT(max_qp, 131072, 1u << 23),
	LIMIT(max_qp_wr, 32768, 32768),	/* doorbell records count in 16 bits */
	LIMIT(max_sge, 30, 30),		/* what a 512-byte receive descriptor and a 1008-byte send one hold */
	LIMIT(max_sge_rd, 30, 30),
	LIMIT(max_inline, 1000, 1000),
	LIMIT(max_cq, 65536, 1u << 23),
	LIMIT(max_cqe, (1u << 22) - 1, (1u << 22) - 1), /* consumer indexes have 24 bits, PRM's log_max_cq_sz is 22 */
	LIMIT(max_mr, 1u << 20, 1u << 24), /* a key is 24 bits of index and 8 of variant */
	LIMIT(max_pd, 1u << 16, 1u << 24),
	LIMIT(max_mw, 1u << 16, 1u << 24),
	LIMIT(max_ah, 1u << 20, INT32_MAX),
	LIMIT(max_srq, 1u << 16, 1u << 23),
	LIMIT(max_srq_wr, 32767, 32767),
	LIMIT(max_srq_sge, 31, 31),
	LIMIT(max_qp_rd_atom, 16, 128),
	LIMIT(max_qp_init_rd_atom, 16, 128),
	LIMIT(max_msg_sz, 1u << 30, 1u << 30),
	LIMIT(max_mr_size, UINT64_MAX, UINT64_MAX),
	LIMIT(comp_vectors, 4, 1024),
	LIMIT(max_wr_memcpy_length, 1u << 31, 1u << 31),
	LIMIT(max_dm_size, 128u << 10, 512u << 10),
	LIMIT(atomics, 1, 1),
	LIMIT(devx, 1, 1), /* 0: no firmware commands from user space, and what libmlx5 learns by them is unknown to it */
	LIMIT(dc, 1, 1),
	LIMIT(log_max_dci_streams, EMU_LOG_DCI_STREAMS, EMU_LOG_DCI_STREAMS),
	LIMIT(xrc, 1, 1),
	LIMIT(umr, 1, 1),  /* 0: no indirect keys that work requests change */
};

static void set_limit(struct emu_limits *l, const struct limit *row, uint64_t value)
{
	void *at = (char *)l + row->offset;

	switch (row->size) {
	case 1:
		*(bool *)at = value;
		break;
	case 4:
		*(uint32_t *)at = (uint32_t)value;
		break;
	default:
		*(uint64_t *)at = value;
		break;
	}
}

/* ---------------------------------------------------------------- parsing */

struct parser {
	unsigned line;
	char *error;
	size_t error_size;
	bool failed;
	char *words[24];
	unsigned nwords;
	struct emu_world *world; /* filled first, taken over only if all is well */
	struct emu_device *device;
	struct inject_rule *faults;
	uint32_t nfaults;
};

static bool __attribute__((format(printf, 2, 3))) fail(struct parser *p, const char *fmt, ...)
{
	va_list args;
	int n;

	if (p->failed)
		return false;
	p->failed = true;
	if (!p->error_size)
		return false;
	n = p->line ? snprintf(p->error, p->error_size, "line %u: ", p->line) : 0;
	if (n < 0 || (size_t)n >= p->error_size)
		return false;
	va_start(args, fmt);
	vsnprintf(p->error + n, p->error_size - (size_t)n, fmt, args);
	va_end(args);
	return false;
}

static bool number(struct parser *p, const char *word, uint64_t max, uint64_t *value)
{
	char *end;

	errno = 0;
	*value = strtoull(word, &end, 0);
	if (errno || end == word || *end || word[0] == '-')
		return fail(p, "\"%s\" is not a number", word);
	if (*value > max)
		return fail(p, "%s is more than %" PRIu64, word, max);
	return true;
}

/* One of several words. */
static bool choice(struct parser *p, const char *word, const char *const *names, const uint8_t *values, unsigned n,
		   uint8_t *value)
{
	for (unsigned i = 0; i < n; i++)
		if (!strcmp(word, names[i])) {
			*value = values[i];
			return true;
		}
	return fail(p, "\"%s\" is unknown here", word);
}

static bool need_words(struct parser *p, unsigned n)
{
	return p->nwords == n || fail(p, "\"%s\" takes %u words, not %u", p->words[0], n - 1, p->nwords - 1);
}

static bool parse_device(struct parser *p)
{
	struct emu_device *d = &p->world->devices[p->world->ndevices];
	const char *name = p->words[1];
	char *end;

	if (!need_words(p, 3))
		return false;
	if (p->world->ndevices == EMU_MAX_DEVICES)
		return fail(p, "more than %d devices", EMU_MAX_DEVICES);
	if (strlen(name) >= EMU_NAME_MAX)
		return fail(p, "the name is longer than %d bytes", EMU_NAME_MAX - 1);
	for (const char *c = name; *c; c++)
		if (!isalnum((unsigned char)*c) && *c != '_' && *c != '-')
			return fail(p, "\"%s\": a name has letters, digits, '_' and '-'", name);
	for (uint32_t i = 0; i < p->world->ndevices; i++)
		if (!strcmp(p->world->devices[i].name, name))
			return fail(p, "there is a device %s already", name);
	memset(d, 0, sizeof(*d));
	errno = 0;
	d->node_guid = strtoull(p->words[2], &end, 16);
	if (errno || *end || strlen(p->words[2]) != 16)
		return fail(p, "\"%s\" is not a GUID of 16 hex digits", p->words[2]);
	strcpy(d->name, name);
	d->index = p->world->ndevices++;
	d->uverbs_minor = d->index;
	for (unsigned i = 0; i < ARRAY_LEN(limits); i++)
		set_limit(&d->limits, &limits[i], limits[i].value);
	p->device = d;
	return true;
}

static bool parse_limit(struct parser *p)
{
	uint64_t value;

	if (!need_words(p, 3))
		return false;
	for (unsigned i = 0; i < ARRAY_LEN(limits); i++) {
		if (strcmp(p->words[1], limits[i].name))
			continue;
		if (!number(p, p->words[2], limits[i].max, &value))
			return false;
		set_limit(&p->device->limits, &limits[i], value);
		return true;
	}
	return fail(p, "there is no limit \"%s\"", p->words[1]);
}

/* A port exists from its first mention on. */
static struct emu_port_config *port_named(struct parser *p, const char *word)
{
	uint64_t n;

	if (!number(p, word, EMU_MAX_PORTS, &n))
		return NULL;
	if (!n || n > p->device->nports + 1) {
		fail(p, "port %" PRIu64 ": ports are numbered from 1, in order", n);
		return NULL;
	}
	if (n > p->device->nports) {
		struct emu_port_config *port = &p->device->ports[p->device->nports++];

		memset(port, 0, sizeof(*port));
		port->state = IBV_PORT_ACTIVE;
		port->active_mtu = port->max_mtu = IBV_MTU_4096;
		port->link_layer = IBV_LINK_LAYER_ETHERNET;
		port->ngids = DEFAULT_GIDS;
	}
	return &p->device->ports[n - 1];
}

static bool set_gid_table_size(struct parser *p, struct emu_port_config *port, const char *word)
{
	uint64_t n;

	if (!number(p, word, EMU_MAX_GIDS, &n))
		return false;
	for (uint32_t i = (uint32_t)n; i < EMU_MAX_GIDS; i++)
		if (port->gids[i].valid)
			return fail(p, "GID %u is beyond a table of %s", i, word);
	port->ngids = (uint32_t)n;
	return true;
}

static bool parse_port(struct parser *p)
{
	static const char *const states[] = { "down", "init", "armed", "active" };
	static const uint8_t state_values[] = { IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE };
	static const char *const mtus[] = { "256", "512", "1024", "2048", "4096" };
	static const uint8_t mtu_values[] = { IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 };
	static const char *const layers[] = { "ethernet" };
	static const uint8_t layer_values[] = { IBV_LINK_LAYER_ETHERNET };
	struct emu_port_config *port;

	if (p->nwords < 2 || p->nwords % 2)
		return fail(p, "\"port\" takes a number and pairs of words");
	port = port_named(p, p->words[1]);
	if (!port)
		return false;
	for (unsigned i = 2; i + 1 < p->nwords; i += 2) {
		const char *key = p->words[i], *value = p->words[i + 1];
		bool ok;

		if (!strcmp(key, "state"))
			ok = choice(p, value, states, state_values, ARRAY_LEN(states), &port->state);
		else if (!strcmp(key, "mtu"))
			ok = choice(p, value, mtus, mtu_values, ARRAY_LEN(mtus), &port->active_mtu);
		else if (!strcmp(key, "max_mtu"))
			ok = choice(p, value, mtus, mtu_values, ARRAY_LEN(mtus), &port->max_mtu);
		else if (!strcmp(key, "link_layer"))
			ok = choice(p, value, layers, layer_values, ARRAY_LEN(layers), &port->link_layer);
		else if (!strcmp(key, "gids"))
			ok = set_gid_table_size(p, port, value);
		else
			ok = fail(p, "a port has no \"%s\"", key);
		if (!ok)
			return false;
	}
	if (port->active_mtu > port->max_mtu)
		return fail(p, "mtu is more than max_mtu");
	return true;
}

static bool parse_gid(struct parser *p)
{
	static const char *const types[] = { "v1", "v2" };
	/* The same numbers in enum ibv_gid_type and in the kernel's enum ib_uverbs_gid_type. */
	static const uint8_t type_values[] = { IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 };
	struct emu_port_config *port;
	struct emu_gid *g;
	uint64_t index;

	if (!need_words(p, 6))
		return false;
	port = port_named(p, p->words[1]);
	if (!port || !number(p, p->words[2], EMU_MAX_GIDS - 1, &index))
		return false;
	if (index >= port->ngids)
		return fail(p, "GID %" PRIu64 " is beyond a table of %u", index, port->ngids);
	g = &port->gids[index];
	if (g->valid)
		return fail(p, "GID %" PRIu64 " of port %s is there already", index, p->words[1]);
	if (inet_pton(AF_INET6, p->words[3], g->gid.raw) != 1)
		return fail(p, "\"%s\" is not an IPv6 address", p->words[3]);
	if (!choice(p, p->words[4], types, type_values, ARRAY_LEN(types), &g->type))
		return false;
	if (strlen(p->words[5]) >= sizeof(g->ndev))
		return fail(p, "\"%s\" is too long for a network device", p->words[5]);
	strcpy(g->ndev, p->words[5]);
	g->valid = true;
	return true;
}

static bool parse_global(struct parser *p)
{
	uint64_t value;

	if (!need_words(p, 2))
		return false;
	if (!strcmp(p->words[0], "spin_us")) {
		if (!number(p, p->words[1], UINT32_MAX, &value))
			return false;
		p->world->spin_us = (uint32_t)value;
		return true;
	}
	/* Fields of a REQ have 5 and 4 bits (IBTA volume 1, 12.7). */
	if (!strcmp(p->words[0], "cm_response_timeout")) {
		if (!number(p, p->words[1], 31, &value))
			return false;
		if (value < 8)
			return fail(p, "cm_response_timeout is at least 8, a millisecond");
		p->world->cm_response_timeout = (uint32_t)value;
		return true;
	}
	if (!strcmp(p->words[0], "cm_retries")) {
		if (!number(p, p->words[1], 15, &value))
			return false;
		p->world->cm_retries = (uint32_t)value;
		return true;
	}
	if (!number(p, p->words[1], 1, &value))
		return false;
	if (!strcmp(p->words[0], "legacy_write"))
		p->world->legacy_write = value;
	else if (!strcmp(p->words[0], "reach_host"))
		p->world->reach_host = value;
	else if (!strcmp(p->words[0], "one_copy"))
		p->world->one_copy = value;
	else
		p->world->use_uffd = value;
	return true;
}

static bool parse_fault(struct parser *p)
{
	struct inject_rule *more = realloc(p->faults, (p->nfaults + 1) * sizeof(*more));
	char why[200] = "";

	if (!more)
		return fail(p, "out of memory");
	p->faults = more;
	if (!inject_parse(&more[p->nfaults], p->words + 1, p->nwords - 1, why, sizeof(why)))
		return fail(p, "fault: %s", why);
	p->nfaults++;
	return true;
}

static bool parse_line(struct parser *p)
{
	static const struct {
		const char *name;
		bool of_device;
		bool (*parse)(struct parser *);
	} directives[] = {
		{ "spin_us", false, parse_global },	 { "legacy_write", false, parse_global },
		{ "use_uffd", false, parse_global }, { "reach_host", false, parse_global },
		{ "cm_response_timeout", false, parse_global },
		{ "cm_retries", false, parse_global },
		{ "one_copy", false, parse_global }, { "device", false, parse_device },
		{ "limit", true, parse_limit },	 { "port", true, parse_port },
		{ "gid", true, parse_gid },	 { "fault", false, parse_fault },
	};

	for (unsigned i = 0; i < ARRAY_LEN(directives); i++) {
		if (strcmp(p->words[0], directives[i].name))
			continue;
		if (directives[i].of_device && !p->device)
			return fail(p, "\"%s\" comes before any \"device\"", p->words[0]);
		return directives[i].parse(p);
	}
	return fail(p, "\"%s\" is no directive", p->words[0]);
}

static bool split(struct parser *p, char *line)
{
	char *save, *hash = strchr(line, '#');

	if (hash)
		*hash = 0;
	p->nwords = 0;
	for (char *w = strtok_r(line, " \t\r", &save); w; w = strtok_r(NULL, " \t\r", &save)) {
		if (p->nwords == ARRAY_LEN(p->words))
			return fail(p, "too many words");
		p->words[p->nwords++] = w;
	}
	return true;
}

static bool check_whole(struct parser *p)
{
	p->line = 0;
	if (!p->world->ndevices)
		return fail(p, "no device");
	for (uint32_t i = 0; i < p->nfaults; i++) {
		uint32_t d = 0;

		while (d < p->world->ndevices && strcmp(p->world->devices[d].name, p->faults[i].device))
			d++;
		if (*p->faults[i].device && d == p->world->ndevices)
			return fail(p, "fault: there is no device %s", p->faults[i].device);
		if (p->faults[i].kind == INJECT_PORT_DOWN && p->faults[i].port > p->world->devices[d].nports)
			return fail(p, "fault: %s has no port %" PRIu64, p->faults[i].device, p->faults[i].port);
	}
	for (uint32_t i = 0; i < p->world->ndevices; i++) {
		struct emu_device *d = &p->world->devices[i];
		char one[] = "1";

		p->device = d;
		if (!d->nports)
			port_named(p, one);
		for (uint32_t j = 0; j < i; j++)
			if (p->world->devices[j].node_guid == d->node_guid)
				return fail(p, "%s and %s have the same GUID", d->name, p->world->devices[j].name);
	}
	return true;
}

int emu_config_parse(const char *text, char *error, size_t error_size)
{
	struct parser p = { .error = error, .error_size = error_size };
	char *copy = strdup(text), *rest = copy, *line;

	p.world = calloc(1, sizeof(*p.world));
	if (!copy || !p.world) {
		fail(&p, "out of memory");
	} else {
		p.world->spin_us = 50;
		p.world->cm_response_timeout = 20; /* CMA_CM_RESPONSE_TIMEOUT and CMA_MAX_CM_RETRIES of core/cma.c */
		p.world->cm_retries = 15;
		p.world->use_uffd = p.world->reach_host = p.world->one_copy = true;
		while (!p.failed && (line = strsep(&rest, "\n"))) {
			p.line++;
			if (split(&p, line) && p.nwords)
				parse_line(&p);
		}
		if (!p.failed)
			check_whole(&p);
	}
	if (!p.failed) {
		emu_lock();
		memcpy(emu.devices, p.world->devices, sizeof(emu.devices));
		emu.ndevices = p.world->ndevices;
		emu.legacy_write = p.world->legacy_write;
		emu.spin_us = p.world->spin_us;
		emu.use_uffd = p.world->use_uffd;
		emu.reach_host = p.world->reach_host;
		emu.one_copy = p.world->one_copy;
		emu.cm_response_timeout = p.world->cm_response_timeout;
		emu.cm_retries = p.world->cm_retries;
		inject_configure(p.faults, p.nfaults);
		emu_unlock();
	}
	free(p.faults);
	free(p.world);
	free(copy);
	return p.failed ? EINVAL : 0;
}

/* ---------------------------------------------------------------- the file */

static pthread_once_t file_once = PTHREAD_ONCE_INIT;

static char *read_file(const char *path)
{
	char *text = malloc(MAX_CONFIG + 1);
	size_t len = 0;
	ssize_t n = -1;
	int fd = emu_real.open(path, O_RDONLY | O_CLOEXEC);

	while (text && fd >= 0 && (n = emu_real.read(fd, text + len, MAX_CONFIG - len)) > 0)
		len += (size_t)n;
	if (fd >= 0)
		emu_real.close(fd);
	if (n) {
		free(text);
		return NULL;
	}
	text[len] = 0;
	return text;
}

static void load_file(void)
{
	const char *path = getenv("AIORDMA_EMULATOR_CONFIG");
	char error[256] = "", *text;

	if (__atomic_load_n(&emu.ndevices, __ATOMIC_ACQUIRE) || !path || !*path)
		return;
	emu_real_init();
	text = read_file(path);
	if (!text)
		emu_log(EMU_ERROR, "can't read AIORDMA_EMULATOR_CONFIG=%s: %s", path, strerror(errno));
	else if (emu_config_parse(text, error, sizeof(error)))
		emu_log(EMU_ERROR, "%s: %s; there will be no emulated device", path, error);
	free(text);
}

bool emu_configured(void)
{
	pthread_once(&file_once, load_file);
	return __atomic_load_n(&emu.ndevices, __ATOMIC_ACQUIRE) != 0;
}

struct emu_device *emu_device_by_node(const char *path)
{
	char node[64];

	for (uint32_t i = 0; i < emu.ndevices; i++) {
		snprintf(node, sizeof(node), "/dev/infiniband/uverbs%u", emu.devices[i].uverbs_minor);
		if (!strcmp(path, node))
			return &emu.devices[i];
	}
	return NULL;
}

unsigned emu_node_rdev_minor(const struct emu_device *d)
{
	return EMU_UVERBS_BASE_MINOR + d->uverbs_minor;
}

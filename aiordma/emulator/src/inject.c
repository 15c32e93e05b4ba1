/* SPDX-License-Identifier: MIT
 * Faults on purpose: the rules. See inject.h. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "inject.h"

#define MAX_WORDS 24

uint32_t emu_injecting;

/* All of it with emu.lock held. */
struct inject_rule **inject_rules;
uint32_t inject_nrules;
uint32_t inject_epoch;
static uint32_t room, last_id;

struct emu_device *inject_device(const char *name)
{
	for (uint32_t i = 0; i < emu.ndevices; i++)
		if (!strcmp(emu.devices[i].name, name))
			return &emu.devices[i];
	return NULL;
}

void inject_for_each_qp(struct emu_device *dev, void (*fn)(struct emu_qp *))
{
	for (uint32_t i = 0; i < dev->qps_size; i++)
		if (dev->qps[i]) {
			fn(dev->qps[i]);
			emu_qp_for_each_lane(dev->qps[i], fn);
		}
}

void inject_count(void)
{
	uint32_t n = inject_nrules + inject_options();

	if (n && !emu_injecting)
		inject_epoch++;
	__atomic_store_n(&emu_injecting, n, __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------- when one fires */

/* splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators"): the n-th number of a seed without
 * those before it. */
uint64_t inject_random(const struct inject_rule *r, uint64_t n)
{
	uint64_t z = r->seed + (n + 1) * 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

bool inject_fires(struct inject_rule *r, uint64_t own)
{
	uint64_t every = r->every ? r->every : 1;
	uint64_t first = r->nth ? r->nth : every;
	uint64_t n = ++r->seen;
	uint64_t most = r->count;

	/* The n-th alone is one; with more said, it's where the others begin. */
	if (!most && r->nth && !r->every && !r->random)
		most = 1;
	if (most && r->hits >= most)
		return false;
	if (n < first || (n - first) % every)
		return false;
	return !r->random || inject_random(r, own) >> 32 < r->chance;
}

void inject_hit(struct inject_rule *r, const struct emu_device *dev, uint32_t qpn)
{
	r->hits++;
	if (qpn)
		emu_log(EMU_INFO, "%s: QP 0x%x: fault %u, %s", dev->name, qpn, r->id, inject_name(r->kind));
	else
		emu_log(EMU_INFO, "%s: fault %u, %s", dev->name, r->id, inject_name(r->kind));
}

static unsigned weight(const struct inject_rule *r)
{
	return (r->qpn ? 4u : 0) + (r->dev ? 2u : 0) + (r->opcodes ? 1u : 0);
}

struct inject_rule *inject_choose(struct inject_rule *a, struct inject_rule *b)
{
	return !a || weight(b) > weight(a) ? b : a;
}

/* ---------------------------------------------------------------- which there are */

bool inject_in_force(uint32_t id)
{
	for (uint32_t i = 0; i < inject_nrules; i++)
		if (inject_rules[i]->id == id)
			return true;
	return false;
}

static struct inject_rule *rule_by_id(int id)
{
	for (uint32_t i = 0; i < inject_nrules; i++)
		if (inject_rules[i]->id == (uint32_t)id)
			return inject_rules[i];
	return NULL;
}

/* Which ports a rule takes down: one, or, since nobody reaches a device that is gone, all of it. */
static bool takes_down(const struct inject_rule *r, uint32_t port_num)
{
	return r->kind == INJECT_DEVICE_FATAL || (r->kind == INJECT_PORT_DOWN && r->port == port_num);
}

static void take_down(struct emu_device *dev, struct inject_rule *r)
{
	bool gone = r->kind == INJECT_DEVICE_FATAL;

	if (!gone && r->kind != INJECT_PORT_DOWN)
		return;
	for (uint32_t n = 1; n <= dev->nports; n++) {
		struct emu_port_config *port = &dev->ports[n - 1];
		bool was_up = port->state == IBV_PORT_ACTIVE;

		if (!takes_down(r, n))
			continue;
		if (!port->taken_down++)
			port->own_state = port->state;
		port->state = IBV_PORT_DOWN;
		if (was_up && !gone)
			inject_tell_all(dev, IBV_EVENT_PORT_ERR, n);
	}
	r->hits = r->seen = 1;
	inject_forget_routes();
	if (gone)
		inject_tell_all(dev, IBV_EVENT_DEVICE_FATAL, 0);
}

/* A port is up again, if it was, when the last rule that took it down is gone. */
static void bring_back(const struct inject_rule *r)
{
	bool gone = r->kind == INJECT_DEVICE_FATAL;
	struct emu_device *dev = gone || r->kind == INJECT_PORT_DOWN ? inject_device(r->device) : NULL;

	for (uint32_t n = 1; dev && n <= dev->nports; n++) {
		struct emu_port_config *port = &dev->ports[n - 1];

		if (!takes_down(r, n) || --port->taken_down)
			continue;
		port->state = port->own_state;
		inject_forget_routes();
		if (port->state == IBV_PORT_ACTIVE && !gone)
			inject_tell_all(dev, IBV_EVENT_PORT_ACTIVE, n);
	}
}

static bool make_room(void)
{
	struct inject_rule **more;

	if (inject_nrules < room)
		return true;
	more = realloc(inject_rules, (room + 16) * sizeof(*more));
	if (!more)
		return false;
	inject_rules = more;
	room += 16;
	return true;
}

uint32_t inject_add(const struct inject_rule *rule, char *error, size_t error_size)
{
	struct emu_device *dev = *rule->device ? inject_device(rule->device) : NULL;
	struct inject_rule *r;

	if (*rule->device && !dev) {
		snprintf(error, error_size, "there is no emulated device %s", rule->device);
		return 0;
	}
	if (rule->kind == INJECT_PORT_DOWN && rule->port > dev->nports) {
		snprintf(error, error_size, "there is no emulated device %s with a port %" PRIu64, rule->device, rule->port);
		return 0;
	}
	r = malloc(sizeof(*r));
	if (!r || !make_room()) {
		free(r);
		snprintf(error, error_size, "out of memory");
		return 0;
	}
	*r = *rule;
	r->dev = dev;
	r->id = ++last_id;
	inject_rules[inject_nrules++] = r;
	inject_count();
	/* What runs now, in the middle of its work, shall see it. */
	inject_let_go();
	take_down(dev, r);
	return r->id;
}

static void clear(void)
{
	for (uint32_t i = 0; i < inject_nrules; i++)
		free(inject_rules[i]);
	inject_nrules = 0;
}

void inject_configure(const struct inject_rule *rules, uint32_t n)
{
	char error[128] = "";

	clear();
	for (uint32_t i = 0; i < n; i++)
		if (!inject_add(&rules[i], error, sizeof(error)))
			emu_log(EMU_ERROR, "fault: %s", error);
	inject_count();
}

/* ---------------------------------------------------------------- what Python calls */

int aiordma_emu_fault_add(const char *text, char *error, size_t error_size)
{
	char *copy = strdup(text), *save, *words[MAX_WORDS];
	struct inject_rule r;
	unsigned n = 0;
	uint32_t id = 0;

	for (char *w = copy ? strtok_r(copy, " ", &save) : NULL; w && n < MAX_WORDS; w = strtok_r(NULL, " ", &save))
		words[n++] = w;
	if (inject_parse(&r, words, n, error, error_size)) {
		emu_lock();
		id = inject_add(&r, error, error_size);
		emu_unlock();
	}
	free(copy);
	return id ? (int)id : -1;
}

int aiordma_emu_fault_counts(int id, uint64_t *hits, uint64_t *seen)
{
	const struct inject_rule *r;

	emu_lock();
	r = rule_by_id(id);
	if (r) {
		*hits = r->hits;
		*seen = r->seen;
	}
	emu_unlock();
	return r ? 0 : -1;
}

int aiordma_emu_fault_stop(int id)
{
	int found = -1;

	emu_lock();
	for (uint32_t i = 0; i < inject_nrules; i++) {
		if (inject_rules[i]->id != (uint32_t)id)
			continue;
		bring_back(inject_rules[i]);
		free(inject_rules[i]);
		memmove(&inject_rules[i], &inject_rules[i + 1], (--inject_nrules - i) * sizeof(*inject_rules));
		found = 0;
		break;
	}
	inject_count();
	if (!found)
		inject_let_go();
	emu_unlock();
	return found;
}

void aiordma_emu_fault_reset(void)
{
	emu_lock();
	for (uint32_t i = 0; i < inject_nrules; i++)
		bring_back(inject_rules[i]);
	clear();
	inject_options_reset();
	inject_count();
	inject_let_go();
	emu_unlock();
}

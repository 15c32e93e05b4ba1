/* SPDX-License-Identifier: MIT
 * Byte order, lists, clocks, and reads of memory that the application writes without a lock. */
#ifndef AIORDMA_EMU_UTIL_H
#define AIORDMA_EMU_UTIL_H

#include <endian.h>
#include <time.h>

#include "emu.h"

#define container_of(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

static inline void list_init(struct emu_list *l)
{
	l->next = l->prev = l;
}

static inline bool list_empty(const struct emu_list *l)
{
	return l->next == l;
}

static inline void list_add_tail(struct emu_list *head, struct emu_list *n)
{
	n->prev = head->prev;
	n->next = head;
	head->prev->next = n;
	head->prev = n;
}

static inline void list_del(struct emu_list *n)
{
	n->prev->next = n->next;
	n->next->prev = n->prev;
	list_init(n);
}

/* A big-endian 32-bit word in shared memory: doorbell records, arm words. */
static inline uint32_t load_be32(const uint32_t *p)
{
	return be32toh(__atomic_load_n(p, __ATOMIC_ACQUIRE));
}

static inline uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif

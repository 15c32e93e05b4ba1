/* SPDX-License-Identifier: MIT
 * Who else of this user runs an emulated NIC on this machine (registry.c).
 *
 * A file that all of them map has an entry for each, and says whose a QP number is. All zero, as the file is made, is its
 * valid initial state, so that nobody has to initialise it. What is read from it was written by others, and may be
 * anything. */
#ifndef AIORDMA_REGISTRY_H
#define AIORDMA_REGISTRY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define REGISTRY_SLOTS 512u /* processes at a time */

/* QP numbers have 24 bits. A process takes them a block at a time, so that they are different in all processes, as those
 * of one device are in the processes that share it. Block 0 has the numbers of the management QPs, and is nobody's. */
#define QPN_BLOCK_BITS 12u
#define QPN_BLOCK_SIZE (1u << QPN_BLOCK_BITS)
#define QPN_BLOCKS (1u << (24 - QPN_BLOCK_BITS))

struct registry_entry {
	uint32_t generation; /* of the slot: another one, another process */
	int32_t pid;
	int32_t thread; /* its device thread: as long as that one lives, so does the memory; 0: there is none */
	/* Where `nonce` is to be found in the process's memory: who reads it there can read the rest as well. */
	uint64_t nonce, nonce_address;
	uint32_t asleep;    /* its device thread has to be woken */
	uint32_t attention; /* counts what was set in `calling` */
	uint64_t calling[REGISTRY_SLOTS / 64]; /* a bit for each process that wants to talk */
} __attribute__((aligned(128)));

struct registry {
	uint32_t next_block;
	uint16_t block_owner[QPN_BLOCKS]; /* slot + 1 */
	struct registry_entry entry[REGISTRY_SLOTS] __attribute__((aligned(128)));
};

struct registry_peer {
	uint32_t slot, generation;
	pid_t pid;
};

/* Takes an entry. False: there is no other process for us, and QP numbers are the tables' own; the log says why. */
bool registry_start(void); /* each that returned true has its registry_stop() */
void registry_stop(void);
void registry_forked(void);

bool registry_on(void);
/* As wire_torn(). From then on nobody is found in it. */
bool registry_torn(uintptr_t address, uintptr_t *start, size_t *len);
bool registry_lost(void);
const struct registry_peer *registry_self(void);
void registry_thread(pid_t); /* our device thread */
struct registry_entry *registry_entry(uint32_t slot);
const char *registry_folder(void);

/* Does the process live that has this slot in this generation? A system call. */
bool registry_alive(uint32_t slot, uint32_t generation);
/* Whose is the QP number? False: nobody's, or ours. */
bool registry_owner(uint32_t qpn, struct registry_peer *);

/* ---------------------------------------------------------------- QP numbers */

/* From a place in a device's table to the number that everybody knows, and back. Not ours: UINT32_MAX. */
void qpn_share(void); /* from here on they're unique among processes; with the registry on and before there are any */
bool qpn_reserve(uint32_t indices); /* false: there are no more */
uint32_t qpn_limit(void);	    /* indices below it have numbers */
uint32_t qpn_of_index(uint32_t index);
extern bool qpn_shared;
extern uint32_t qpn_first_block; /* has the first indices */
extern uint16_t qpn_block_index[QPN_BLOCKS]; /* of our own blocks: place + 1 */

static inline uint32_t qpn_to_index(uint32_t qpn)
{
	uint32_t place;

	if (__builtin_expect(qpn >> QPN_BLOCK_BITS == qpn_first_block, 1))
		return qpn & (QPN_BLOCK_SIZE - 1);
	if (!qpn_shared)
		return qpn;
	place = qpn_block_index[qpn >> QPN_BLOCK_BITS & (QPN_BLOCKS - 1)];
	return place ? (place - 1) << QPN_BLOCK_BITS | (qpn & (QPN_BLOCK_SIZE - 1)) : UINT32_MAX;
}

#endif

/* SPDX-License-Identifier: MIT
 * Links to the emulated NICs of other processes.
 *
 * Two processes share a file that both map, with one half for the requests of each side. A request goes into a slot, the
 * slot's number into a ring; the other side's device thread does the request at once, as it would one from its own
 * process, and the answer goes into the same slot and the slot's number into a second ring. Nothing waits for anything
 * in there: an RNR NAK is an answer, and so is "dropped". So no QP holds up another. Slots come back in any order, and
 * as the rings have room for all slots they never overflow.
 *
 * Small payload lies in the slot. Long payload stays where it is and the slot says where; the side that it goes to reads it
 * with process_vm_readv(2), in one copy. Where the system doesn't let it, all payload goes through slots, in more slices.
 * It may cease to let it at any time: what was to be read then is asked for, or sent, once more through slots.
 *
 * All zero but for the epoch is a new file's state, and either side may make it. What the other side writes there may be anything:
 * numbers are checked, headers are copied out before they're looked at, and of payload nothing but bytes is believed. */
#ifndef AIORDMA_WIRE_H
#define AIORDMA_WIRE_H

#include "nic.h"
#include "registry.h"

#define WIRE_SLOTS 128u
#define WIRE_PAYLOAD 16384u
/* Longer slices than within a process: each costs a way there and back. */
#define WIRE_SLICE (1u << 20)
#define WIRE_PIECES (WIRE_PAYLOAD / sizeof(struct wire_piece))
/* Up to this long, payload is copied twice rather than with a system call. */
#define WIRE_INLINE 8192u

/* Where bytes are in the memory of whose slot it is (or, for a READ's answer, of the other side). */
struct wire_piece {
	uint64_t address, len;
};

enum wire_flags {
	WIRE_FIRST = 1,
	WIRE_LAST = 2,
	WIRE_SOLICITED = 4,
	WIRE_PIECES_FOLLOW = 8,	 /* the slot's payload is a list of pieces */
	WIRE_WANT_PIECES = 16, /* a READ: so may the answer's be */
};

struct wire_request {
	uint8_t opcode, flags, src_type, src_mtu;
	uint8_t traffic_class, hop_limit, gid_type, sl;
	uint32_t imm, src_qpn, dst_qpn, psn, packets, rkey, qkey, srqn, npieces;
	uint16_t src_stream;
	uint64_t msg_len, off, len, raddr, swap_add, compare, dc_key;
	uint8_t sgid[16], dgid[16];
};

struct wire_answer {
	uint8_t reply, rnr_timer;
	uint32_t npieces; /* 0: a READ's bytes are the payload */
	uint64_t result;
};

enum wire_slot_state { SLOT_NEW, SLOT_ASKED, SLOT_TAKEN, SLOT_ANSWERED, SLOT_CANCELLED };

struct wire_slot {
	uint32_t state; /* atomic: only from ASKED do both sides change it */
	struct wire_answer answer;
	struct wire_request request;
	uint8_t payload[WIRE_PAYLOAD] __attribute__((aligned(64)));
};

struct wire_ring {
	uint32_t head __attribute__((aligned(128)));
	uint16_t slot[WIRE_SLOTS];
};

struct wire_half {
	struct wire_ring asked, answered;
	struct wire_slot slots[WIRE_SLOTS];
};

enum wire_reach { REACH_UNKNOWN, REACH_YES, REACH_NO };

struct wire_shared {
	uint32_t epoch;	   /* never zero: one that was cut short and has grown again is another */
	uint32_t here[2];  /* side 0, of the lower slot in the registry, and side 1 have it open */
	uint32_t reach[2]; /* enum wire_reach: can the side read the other's memory? */
	struct wire_half half[2];
};

struct wire_link {
	struct emu_list link;
	struct registry_peer peer;
	struct nic_foreign memory; /* of the peer, if we may read it */
	bool barred[2];		   /* the side may not read the other's memory any more, whatever `reach` says */
	struct wire_shared *shared;
	struct wire_half *mine, *theirs; /* where we ask; where the other side does */
	uint32_t side;			 /* ours */
	int fifo;			 /* wakes its device thread */
	uint32_t epoch;			 /* of its file: it may have been replaced by another of the same name */
	bool torn;			 /* somebody cut the file short: zeros stand in for it */
	char name[64];
	/* Of our own half. */
	struct emu_qp *asking[WIRE_SLOTS]; /* NULL: nobody waits for the answer any more */
	bool busy[WIRE_SLOTS];
	bool pieces[WIRE_SLOTS];	   /* its payload, or its answer's, may be pieces */
	void *sent[WIRE_SLOTS];		   /* what the slot's pieces point at, if it had to be gathered */
	uint16_t unused[WIRE_SLOTS];
	uint32_t nunused, answers_seen;
	uint32_t stuck; /* a slot that the other side began, and was waited for in vain; WIRE_SLOTS: none */
	struct emu_list full; /* struct nic_qp.wire_wait: they want a slot */
	/* Of theirs. */
	uint32_t requests_seen;
	void *bounce[WIRE_SLOTS];
};

extern struct emu_list wire_links;
extern bool wire_on;
extern uint32_t *wire_attention; /* others count it up to have us look */
extern uint32_t wire_attention_seen;

static inline bool wire_called(void)
{
	return __atomic_load_n(wire_attention, __ATOMIC_ACQUIRE) != wire_attention_seen;
}

/* wire.c */
int wire_start(void);
void wire_stop(void);
void wire_forked(void);
struct wire_link *wire_find(uint32_t qpn);
bool wire_poll_(void);
int wire_fd(void);	   /* becomes readable when somebody wakes us; -1: there is none */
void wire_asleep(bool);	   /* others see it, and wake us when they want something */
void wire_woken(void);	   /* empties wire_fd() */
void wire_check_alive(void); /* seldom: drops the links to the dead */
/* stand_in.c asks, when an access has failed: all of a link's mapping, which is of no more use. False: it's no link's. */
bool wire_torn(uintptr_t address, uintptr_t *start, size_t *len);
void wire_call(struct wire_link *); /* something is in a ring: wakes the other side, if it sleeps */

/* True if there was anything from other processes. */
static inline bool wire_poll(void)
{
	return unlikely(wire_on) && (!list_empty(&wire_links) || wire_called()) && wire_poll_();
}

/* A ring's next entry, if its head has gone on to `head`. */
static inline bool wire_next(const struct wire_ring *r, uint32_t head, uint32_t *seen, uint32_t *slot)
{
	if (head == *seen)
		return false;
	*slot = __atomic_load_n(&r->slot[(*seen)++ % WIRE_SLOTS], __ATOMIC_RELAXED);
	return true;
}

static inline void wire_put(struct wire_ring *r, uint32_t slot)
{
	uint32_t head = __atomic_load_n(&r->head, __ATOMIC_RELAXED);

	__atomic_store_n(&r->slot[head % WIRE_SLOTS], (uint16_t)slot, __ATOMIC_RELAXED);
	__atomic_store_n(&r->head, head + 1, __ATOMIC_RELEASE);
}

/* ask.c: see fabric.h for the first four */
enum nic_reply wire_ask(struct emu_qp *, struct wire_link *, struct nic_req *, struct nic_sgl *data);
enum nic_reply wire_answered(struct emu_qp *, struct nic_req *, struct nic_sgl *data, uint8_t *rnr_timer);
void wire_cancel(struct emu_qp *);
uint64_t wire_slice(struct wire_link *, const struct nic_req *);
bool wire_take_answers(struct wire_link *);
void wire_lose(struct wire_link *); /* it goes: who waits for it waits in vain */
/* The side was refused what it could read before: from now on payload to it is copied twice. */
void wire_bar(struct wire_link *, uint32_t side);

/* A request into a slot, and on its way; false: there is no slot free, or its payload is not there. */
bool wire_post(struct emu_qp *, struct wire_link *, struct nic_req *, struct nic_sgl *data, uint16_t *slot);
enum nic_reply wire_reply(const struct wire_link *, uint32_t slot);
/* What the answer to a READ or an atomic says. */
bool wire_data(struct wire_link *, const struct wire_flight *, struct nic_sgl *data, uint64_t *result);
void wire_release(struct wire_link *, uint32_t slot);
bool wire_take_back(struct wire_link *, uint32_t slot); /* false: the other side has begun */
void wire_abandon(struct wire_link *, uint32_t slot);	 /* whatever is done of it was done when this returns */

/* flight.c */
#define WIRE_FLIGHTS 32u

bool flight_room(struct emu_qp *);
enum nic_step flight_launch(struct emu_qp *, const struct nic_wqe *, struct wire_link *, struct nic_req *,
			    struct nic_sgl *data);
void flight_answered(struct emu_qp *, uint32_t slot);
void flights_land(struct emu_qp *); /* completes those whose answers are there; a turn of the QP begins with it */
bool flights_can_land(const struct emu_qp *); /* the answer to the first is there, and it wasn't its turn; there is a first */
void flights_cancel(struct emu_qp *);
void flights_lose(struct emu_qp *);

/* answer.c */
extern bool wire_serving; /* it's in the middle of a request of another process */
bool wire_take_requests(struct wire_link *, uint32_t head); /* those that came before the ring's head was there */

/* foreign.c */
bool foreign_reachable(const struct registry_peer *, struct nic_foreign *); /* may we read its memory? */
void foreign_allow(pid_t);			      /* it may read ours, if that is for us to say */
/* All of them in one new piece of our own memory, to be free()d; NULL: no memory, or *copied says what else. */
void *foreign_gather(const struct nic_sgl *, uint64_t len, enum nic_copied *copied);

#endif

/* SPDX-License-Identifier: MIT
 * What the files of the data half share: the one that plays the hardware.
 *
 * Sources are cited as in control.h: "mlx5dv.h", "qp.c", "cq.c", "srq.c" are those of rdma-core's providers/mlx5, the
 * public description of the device's queues; "rxe" is the kernel's drivers/infiniband/sw/rxe, a public implementation of
 * the InfiniBand transport; "IBTA" is the InfiniBand Architecture Specification, volume 1, as those two quote it.
 *
 * Everything here runs with emu.lock held, in the device thread unless it says otherwise.
 */
#ifndef AIORDMA_NIC_H
#define AIORDMA_NIC_H

#include <signal.h>

#include <infiniband/mlx5dv.h>

#include "emu.h"
#include "fabric.h"
#include "inject.h"
#include "util.h"

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
/* Out of the way of what is done for every work request in one process. */
#define SELDOM_CALLED __attribute__((noinline, cold))

static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#else
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
#endif
}

/* ---------------------------------------------------------------- memory (mkey.c, copy.c, fault.c) */

struct nic_piece {
	uint8_t *p;
	uint64_t len;
};

/* The memory of another process: it's that process's as long as `nonce` is at its address. */
struct nic_foreign {
	pid_t thread;
	uint64_t nonce, nonce_address;
	uint64_t seen; /* when it was last found there */
};

/* Pieces of host memory, in order. Grows as needed and keeps what it grew to. */
struct nic_sgl {
	struct nic_piece *v;
	uint32_t n, cap;
	struct nic_foreign *owner; /* whose memory it is, if not ours */
};

static inline void sgl_reset(struct nic_sgl *s)
{
	s->n = 0;
	s->owner = NULL;
}

bool sgl_grow(struct nic_sgl *);

static inline bool sgl_add(struct nic_sgl *s, uint8_t *p, uint64_t len)
{
	if (unlikely(s->n == s->cap) && !sgl_grow(s))
		return false;
	s->v[s->n++] = (struct nic_piece){ p, len };
	return true;
}

/* Moves at most `len` bytes and returns how many there were. */
uint64_t sgl_copy(const struct nic_sgl *dst, const struct nic_sgl *src, uint64_t len);

/* The same, in the device thread, if the memory may be gone. */
enum nic_copied { COPY_DONE, COPY_BAD_SOURCE, COPY_BAD_TARGET, COPY_GONE, COPY_BARRED };
enum nic_copied fault_guard_copy(const struct nic_sgl *dst, const struct nic_sgl *src, uint64_t len);
/* From another process's memory (foreign.c). COPY_GONE: it's gone, and its process with it, or all but. COPY_BARRED: we may
 * not read there (any more). */
enum nic_copied foreign_copy(const struct nic_sgl *dst, const struct nic_sgl *src, uint64_t len);

static inline enum nic_copied nic_copy(const struct nic_sgl *dst, const struct nic_sgl *src, uint64_t len)
{
	return likely(!src->owner) ? fault_guard_copy(dst, src, len) : foreign_copy(dst, src, len);
}

void fault_guard_start(void);
void fault_guard_stop(void);
void fault_guard_take(bool take); /* the calling thread copies from now on, or the device thread again */
void fault_forked(void);
int fault_handler_install(void); /* by whoever needs it before the device thread has come to it */
/* To the handler that was there before. */
void signal_pass_on(const struct sigaction *old, int sig, siginfo_t *info, void *context);
/* stand_in.c: a fault of the device's, or of a command, on memory of its own. True: the access works now. */
bool stand_in(int sig, const siginfo_t *info);
void stand_in_noted(uintptr_t address); /* a fault of which somebody else takes care */
void stand_in_begin(void); /* around a command, emu.lock held; the mask is to be set when it isn't any more */
void stand_in_end(sigset_t *mask);
void stand_in_forked(void);
/* mmio.c: a fault that an access to a register made. False: it's none of these. */
bool mmio_fault(const siginfo_t *info, void *context);

/* Who wants to use a key. A remote user comes in through a QP from the fabric, and may use what the key was given
 * remote rights for; a local one names it in a WQE as an lkey. */
struct nic_access {
	struct emu_device *dev;
	uint32_t pdn, qpn;
	bool remote;
	uint32_t rights; /* IBV_ACCESS_* */
};

/* Appends where [addr, addr + len) of the key is; false if any of it may not be used so. sgl NULL: only checks the key
 * itself, not those that an indirect one names. */
bool mkey_translate(const struct nic_access *, uint32_t key, uint64_t addr, uint64_t len, struct nic_sgl *sgl);

/* A data segment of a WQE. Inline data lies in the decoded WQE itself, at `addr`, and needs no key. */
struct nic_seg {
	uint64_t addr;
	uint32_t len, key;
	bool inl;
};

/* The same for the bytes [off, off + len) of a list of segments. */
bool segs_translate(const struct nic_access *, const struct nic_seg *, uint32_t n, uint64_t off, uint64_t len,
		    struct nic_sgl *sgl);

/* ---------------------------------------------------------------- CQ (cq.c) */

/* What an incoming packet has as its network header: MLX5_CQE_ROCE_L3_HEADER_TYPE_* of the kernel's mlx5/device.h. */
enum nic_l3 { L3_GRH, L3_IPV6, L3_IPV4 };

struct nic_cqe {
	uint8_t op;	   /* MLX5_CQE_* */
	uint8_t syndrome;  /* MLX5_CQE_SYNDROME_*, of an error CQE */
	uint8_t wqe_op;	   /* MLX5_OPCODE_*, of a requester's CQE */
	bool solicited, grh;
	uint8_t l3; /* enum nic_l3 */
	uint16_t counter;
	uint32_t uidx, qpn, src_qpn, bytes;
	uint32_t imm; /* as on the wire, big-endian */
};

/* False: the CQ is in error, or became so by this. */
bool cq_write(struct emu_cq *, const struct nic_cqe *);
void cq_overrun(struct emu_cq *); /* in error for good */
/* Raises the event that the CQ is armed for, if it is due. True if there was one. */
bool cq_check_armed(struct emu_cq *);
/* A CQ in error takes its QPs down: raises IBV_EVENT_QP_FATAL. */
bool cq_write_for(struct emu_qp *, struct emu_cq *, const struct nic_cqe *);

/* ---------------------------------------------------------------- WQEs (wqe.c) */

#define NIC_WQE_MAX 1024 /* ds has 6 bits of 16 bytes: below 64 of them */
#define NIC_SEGS_MAX 63

struct nic_wqe {
	uint8_t opcode, opmod, flags; /* flags: fm_ce_se */
	uint16_t counter, nbb;	      /* its index; how many basic blocks it takes */
	uint16_t stream;	      /* DCI stream channel */
	uint32_t imm;		      /* big-endian */
	const struct mlx5_wqe_av *av; /* UD and DCI; into raw */
	bool av_extended;
	uint32_t xrc_srqn;
	uint64_t raddr;
	uint32_t rkey;
	uint64_t swap_add, compare; /* as in the WQE, big-endian */
	uint32_t nseg, body;	    /* body: where the segments after the control segment begin, in raw */
	uint32_t size;		    /* bytes in raw */
	uint64_t len;		    /* of the payload */
	struct nic_seg seg[NIC_SEGS_MAX];
	uint8_t raw[NIC_WQE_MAX] __attribute__((aligned(64)));
};

/* Copies the WQE at the head of the SQ out of the ring and takes it apart: 0, or the syndrome it fails with. In any
 * case counter, opcode, flags and nbb are set. */
uint8_t wqe_decode(struct emu_qp *, struct nic_wqe *);
/* One that the queue has gone past already, and that isn't completed: the ring still has it. */
uint8_t wqe_decode_at(struct emu_qp *, uint16_t ci, struct nic_wqe *);

/* ---------------------------------------------------------------- receive queues (rq.c, srq.c) */

#define NIC_RECV_SEGS 64

struct nic_recv {
	bool taken;
	uint16_t counter; /* RQ: consumer counter; SRQ: index of the WQE */
	struct emu_srq *srq;
	uint32_t pdn;
	uint32_t nseg;
	uint64_t capacity;
	struct nic_seg seg[NIC_RECV_SEGS];
};

/* The receiving of one message. */
struct nic_rx {
	struct nic_rx *next;
	union ibv_gid sgid; /* of a DCT's: whose message it is */
	uint32_t src_qpn;
	uint16_t src_stream;
	bool busy;
	struct nic_recv recv;
};

bool rq_take(struct emu_qp *, struct emu_srq *, struct nic_recv *); /* false: none is posted */
bool rq_pending(const struct emu_qp *);
uint32_t rq_flush(struct emu_qp *, uint32_t budget); /* CQEs written */
bool srq_take(struct emu_srq *, struct nic_recv *);
void recv_parse(struct nic_recv *, const uint8_t *data_segs, uint32_t size);

/* ---------------------------------------------------------------- the data half's part of a QP */

enum emu_stall { STALL_NONE, STALL_ACK, STALL_RNR, STALL_WIRE, STALL_FAULT /* inject_wqe.c */ };

/* What a QP has under way to another process (ask.c). */
enum nic_wire_state {
	WIRE_IDLE,
	WIRE_FULL,    /* nothing: it waits for room on the link */
	WIRE_ASKED,   /* slot `wire_slot` of `wire_link` */
	WIRE_ANSWERED, /* and the answer is in it */
	WIRE_LOST,    /* the link is gone: no answer will come */
};

/* How far the WQE at the head of the queue has come. */
enum nic_wqe_state {
	WQE_DECODED = 1,
	WQE_HOLD_DECIDED = 2, /* inject_wqe.c */
	WQE_DECIDED = 4,
};

struct nic_qp {
	struct emu_qp *qp;
	struct nic_wqe *wqe; /* the one at sq_ci, if decoded */
	uint8_t decoded; /* enum nic_wqe_state; 0: it isn't */
	uint8_t decode_error; /* syndrome it will fail with */
	uint8_t wire;	      /* enum nic_wire_state */
	uint8_t nflights;     /* flight.c */
	struct nic_rx *rx; /* for the message that is coming in; of a DCT a list, one for each sender that is sending */
	bool comm_est;	   /* IBV_EVENT_COMM_EST was raised */
	uint32_t tx_psn, rx_psn;
	uint32_t tx_messages, rx_messages; /* 24 bits */
	uint64_t rx_result; /* of the last atomic, for its answer once more */
	uint64_t rx_off;    /* of a message of several slices: where the next one begins */
	/* streams.c: of a DCI that has any, and of its lanes, whose QP is none but in name: theirs is `owner` */
	struct nic_streams *streams;
	struct emu_qp *owner;
	/* fabric.c: where the connection leads */
	struct nic_route route;
	/* engine.c */
	uint32_t scan_index;
	bool hot, last_wqe_raised;
	struct emu_list stall_link, error_link;
	/* ask.c */
	bool wire_waits; /* for the answer, with wire_tries timeouts left; the next at wire_deadline */
	uint8_t wire_tries;
	uint16_t wire_slot;
	uint64_t wire_deadline;
	uint32_t wire_len; /* the slice that is under way */
	struct wire_link *wire_link;
	struct emu_list wire_wait;
	/* flight.c */
	struct wire_flight *flights;
	uint8_t flight_tries; /* timeouts since something was answered */
	uint8_t flight_reads; /* READs and atomics among them */
	uint8_t flight_far;   /* READs whose bytes are still in the other side's memory when it has answered */
	uint32_t flight_first;
	uint64_t flight_deadline;
	struct inject_qp *inject; /* inject_wqe.c */
};

static inline struct nic_qp *nic(const struct emu_qp *qp)
{
	return qp->priv;
}

static inline bool qp_can_receive(const struct emu_qp *qp)
{
	return qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RTS || qp->state == IBV_QPS_SQD ||
	       qp->state == IBV_QPS_SQE;
}

static inline bool sq_pending(const struct emu_qp *qp)
{
	return qp->sq_nbb && qp->db && qp->sq_ci != (uint16_t)load_be32(&qp->db[1]);
}

/* ---------------------------------------------------------------- the receiving end (responder.c); fabric.h */

enum nic_reply responder_receive(struct emu_qp *, struct nic_req *, struct nic_sgl *data);
void responder_reset(struct emu_qp *);
void responder_forget(struct emu_qp *); /* the QP goes: frees its nic_rx */

/* ---------------------------------------------------------------- send queues (sq.c, requester.c, umr.c, mmo.c) */

enum nic_step {
	STEP_DONE,
	STEP_MORE, /* a slice is done, others may run */
	STEP_WAIT, /* until qp->deadline_ns */
	STEP_FAIL,
	STEP_LAUNCHED, /* on its way, and the next one may follow */
	STEP_LAUNCHED_SLICE, /* not its last one: that may follow */
	STEP_LANDING,  /* those that are on their way come first */
	STEP_AGAIN,    /* its payload couldn't be had where it lies: nothing has been done, it goes the other way */
};

enum nic_step requester_step(struct emu_qp *, struct nic_wqe *, uint8_t *syndrome);
enum nic_step mmo_step(struct emu_qp *, struct nic_wqe *, uint8_t *syndrome);
enum nic_step umr_step(struct emu_qp *, struct nic_wqe *, uint8_t *syndrome);
/* The same as requester_step() while rules are in force. */
enum nic_step inject_step(struct emu_qp *, struct nic_wqe *, uint8_t *syndrome);
/* As if the request at the head of the queue had got no answer, or the receiver had said that it's not ready. */
enum nic_step requester_lost(struct emu_qp *, uint8_t *syndrome);
enum nic_step requester_not_ready(struct emu_qp *, uint8_t timer, uint8_t *syndrome);
uint64_t requester_ack_deadline(const struct emu_qp *); /* of a request that is sent now; UINT64_MAX: it has all the time */

/* fm_ce_se: strong, initiator-small and the others of mlx5dv.h, MLX5_WQE_CTRL_FENCE and so on */
#define NIC_FENCES 0xe0

/* May the WQE be sent behind others that are on their way? */
bool requester_may_launch(const struct emu_qp *, const struct nic_wqe *);

/* A slice of one that was sent with others. */
struct wire_flight {
	uint16_t slot, ci, nbb, counter;
	uint8_t opcode, flags;
	bool answered, last;
	bool lands;	  /* its answer brings something */
	bool reads, far; /* counted in nic_qp, each message with its last slice */
	uint32_t psn, len, msg_len;
	uint64_t off;
};
void sq_complete_flight(struct emu_qp *, const struct wire_flight *);
/* What it brought back, if it brings anything, to where it's wanted. False: not possible. */
bool requester_land(struct emu_qp *, const struct wire_flight *);

/* What is left of the QP's work after a turn of it. */
enum nic_left { LEFT_NOTHING, LEFT_WORK, LEFT_WAITING };
enum nic_left sq_turn(struct emu_qp *, bool *worked);

/* WQEs, and flushes, that a QP gets in one turn before the others have theirs. */
#define SQ_TURN_WQES 64u

/* How a WQE ended: its CQE, if there is to be one. */
struct sq_outcome {
	uint8_t opcode, flags, syndrome;
	uint16_t counter;
	uint32_t len;
};
void sq_report(struct emu_qp *, const struct sq_outcome *);
enum nic_step sq_run_one(struct emu_qp *);

/* ---------------------------------------------------------------- DCI streams (streams.c) */

/* Of a QP without streams these do nothing. */
int streams_make(struct emu_qp *);
void streams_free(struct emu_qp *);
void streams_reset(struct emu_qp *);
void streams_stop(struct emu_qp *); /* nothing more is executed; what was handed out is to be flushed */
uint32_t streams_flush(struct emu_qp *, uint32_t budget);
bool streams_busy(const struct emu_qp *); /* something was handed out that isn't reported */
enum nic_left streams_turn(struct emu_qp *, bool *worked);
void stream_finish(struct emu_qp *lane, const struct nic_wqe *, uint8_t syndrome);
/* A DCI with streams keeps their faults apart: only what else is on the stream is flushed, until the application resets
 * it; too many streams in error at once, and the DCI is: man mlx5dv_dci_stream_id_reset. True: it's still alive. */
bool streams_fail(struct emu_qp *, uint16_t stream);
bool stream_failed_(const struct emu_qp *, uint16_t stream);

static inline bool stream_failed(const struct emu_qp *qp, uint16_t stream)
{
	return unlikely(nic(qp)->streams) && stream_failed_(qp, stream);
}

/* To ERR (or SQE), with an event for the application or none (0). Flushing is the engine's, later. */
void qp_to_error(struct emu_qp *, uint32_t event);
void qp_async_event(struct emu_qp *, uint32_t event);

/* ---------------------------------------------------------------- tables (table.c) */

struct emu_qp *qp_find(struct emu_device *, uint32_t qpn);
struct emu_cq *cq_find(struct emu_device *, uint32_t cqn);
struct emu_srq *srq_find(struct emu_device *, uint32_t srqn);
/* Numbers rotate through [first, first + range), so that one freed isn't used again soon. 0: none is free. */
uint32_t table_insert(void *table, uint32_t *size, uint32_t *next, uint32_t first, uint32_t range, void *what);
void table_remove(void *table, uint32_t size, uint32_t number, const void *what);

/* ---------------------------------------------------------------- engine (engine.c, scan.c, doorbell.c, idle.c) */

void engine_activate(struct emu_qp *);
void engine_forget_qp(struct emu_qp *);
void engine_stall(struct emu_qp *); /* it waits for qp->deadline_ns, UINT64_MAX: for ever */
void engine_unstall(struct emu_qp *);
void engine_timer(uint64_t at); /* look at the CQs then */
void engine_channel_overflow(struct emu_channel *, bool);
void engine_run_ready(void); /* those that have something to do, now rather than in their turn */
void engine_answer(struct emu_qp *); /* what it waited for is there */
bool engine_is_this_thread(void);
/* For measurements and tests that must not depend on how threads are scheduled: the device thread rests, and the device
 * does what there is to do when, and only when, aiordma_emu_step() is called, in the thread that called this first. */
EMU_EXPORT int aiordma_emu_stepping(int on);
EMU_EXPORT int aiordma_emu_step(void); /* 1: there was something */
void engine_read_clock(void);
uint64_t engine_now(void);		    /* read once a turn: good for timestamps, and to see what is due */
uint64_t engine_deadline(uint64_t ns); /* the moment `ns` from now, by a clock that is read for it */

/* scan.c: finding work that no doorbell told of */
void scan_add_qp(struct emu_qp *);
void scan_remove_qp(struct emu_qp *);
void scan_add_cq(struct emu_cq *);
void scan_remove_cq(struct emu_cq *);
void scan_make_hot(struct emu_qp *);
void scan_watch_error(struct emu_qp *, bool); /* in ERR: its RQ gets posts that ring no doorbell */
bool scan_errors_watched(void);
bool scan_hot(void);
bool scan_some(uint32_t n); /* a few more of them, in turn */
bool scan_records(uint32_t n); /* of so many only whether their records changed */
void scan_watch_record(struct emu_qp *, bool);
void scan_seen(const struct emu_qp *); /* its record is what has been done */
bool scan_errors(void);
bool scan_all(void);
void scan_forget(void);

/* doorbell.c: what applications wrote to UAR pages since the last time */
bool doorbell_poll(void);
extern uint32_t doorbells_seen;
void doorbell_forget(void);

struct nic_uar {
	struct emu_uar *uar;
	struct emu_list link;
	uint64_t qp_seen[4], cq_seen;
	uint32_t warm; /* turns for which it's looked at every turn */
	bool registered, armed; /* idle.c */
};
extern struct emu_list nic_uars;

/* channel.c */
bool channel_flush(struct emu_channel *); /* moves what overflowed; true if nothing is left over */
void channel_send(struct emu_channel *, const void *record);
uint32_t channel_purge(struct emu_channel *, uint64_t element); /* records taken back */

/* cpu.c */
void cpu_short_slices(void);
bool cpu_crowded(uint64_t now); /* better sleep than poll */

/* idle.c */
int idle_init(void);
void idle_fini(bool forked);
void idle_wake(void); /* any thread */
void idle_page_removed(struct nic_uar *);
bool idle_arm(void);	/* lock held: any store to a UAR page wakes from now on. False: only naps find out */
void idle_disarm(void); /* lock held */
/* Without the lock. Sleeps until woken (true) or for `ns`. */
bool idle_sleep(uint64_t ns);
void idle_release_writers(void); /* those whose doorbell was the reason */
bool idle_released_writer(void); /* since this was last asked: a doorbell is on its way */

/* Has it work that its state lets it do? A QP that waits for a timer has not. */
static inline bool engine_runnable(struct emu_qp *qp)
{
	if (inject_any() && !inject_look_(qp))
		return false;
	switch (qp->state) {
	case IBV_QPS_RTS:
	case IBV_QPS_SQE:
		return qp->stall == STALL_NONE && sq_pending(qp);
	case IBV_QPS_SQD:
		return qp->stall == STALL_NONE && (qp->progress || qp->sq_draining);
	case IBV_QPS_ERR:
		return sq_pending(qp) || rq_pending(qp);
	default:
		return false;
	}
}

#endif

/* SPDX-License-Identifier: MIT
 * Faults on purpose: where the device asks whether one applies. aiordma/emulator/faults.py is the other side.
 *
 *   inject.c          the rules: which there are, when one fires
 *   inject_text.c     a rule as text
 *   inject_wqe.c      faults of work requests
 *   inject_command.c  faults of commands, DEVX ones too
 *   inject_event.c    asynchronous events with what leads to them
 *   inject_cq.c       liberties that a device may take with completions, which the project's own tests ask for
 *
 * While nothing is injected each question costs one load and a branch that is never taken. */
#ifndef AIORDMA_EMU_INJECT_H
#define AIORDMA_EMU_INJECT_H

#include "emu.h"

struct nic_wqe;

/* Not zero while anything is injected. */
extern uint32_t emu_injecting;

static inline bool inject_any(void)
{
	return __builtin_expect(__atomic_load_n(&emu_injecting, __ATOMIC_RELAXED) != 0, 0);
}

/* Commands, before they are looked at and without the lock: waits as long as a rule says, and gives the errno that the
 * command shall fail with, or 0. */
int inject_ioctl_(int fd, const void *arg);
int inject_write_(int fd, const void *buf, size_t len);

static inline int inject_ioctl(int fd, const void *arg)
{
	return inject_any() ? inject_ioctl_(fd, arg) : 0;
}

static inline int inject_write(int fd, const void *buf, size_t len)
{
	return inject_any() ? inject_write_(fd, buf, len) : 0;
}

/* The rest with emu.lock held. */

/* The status that the firmware shall refuse a DEVX command with, and its syndrome; 0: as without injection. */
uint8_t inject_devx_(const struct emu_device *, uint16_t opcode, uint32_t *syndrome);

static inline uint8_t inject_devx(const struct emu_device *dev, uint16_t opcode, uint32_t *syndrome)
{
	return inject_any() ? inject_devx_(dev, opcode, syndrome) : 0;
}

/* inject_wqe.c. The device looks at the QP's doorbell record: how long a work request has been there is counted from here
 * on. False: the QP does nothing, whatever there is. */
bool inject_look_(struct emu_qp *);
bool inject_hung_(const struct emu_qp *);
void inject_forget(struct emu_qp *); /* the QP goes */
void inject_reset(struct emu_qp *);  /* its queue begins anew */

/* The QP does nothing at all, not even flush. */
static inline bool inject_hung(const struct emu_qp *qp)
{
	return inject_any() && inject_hung_(qp);
}

/* inject_cq.c: around the writing of a CQE. */
void inject_before_cqe(struct emu_cq *);
void inject_after_cqe(void);
void inject_error_cqe(void *cqe);
uint32_t inject_arm_index_(const struct emu_cq *, uint32_t index);

/* From which consumer index on a completion raises the event that was just asked for with `index`. */
static inline uint32_t inject_arm_index(const struct emu_cq *cq, uint32_t index)
{
	return inject_any() ? inject_arm_index_(cq, index) : index;
}

/* ---------------------------------------------------------------- rules */

enum inject_kind {
	INJECT_NONE,
	/* All that fire apply, one after the other. */
	INJECT_HOLD,	/* the work request isn't executed while the rule is in force; flushing goes on */
	INJECT_HANG,	/* nothing of the QP is, nor flushed */
	INJECT_DELAY,	/* it is executed later; with a bandwidth, one after the other */
	INJECT_REORDER, /* after work requests of other QPs */
	/* One of them applies: see inject_choose(). */
	INJECT_DROP,
	INJECT_DROP_ANSWER,
	INJECT_RNR,
	INJECT_FAIL,
	INJECT_QP_FATAL,
	INJECT_CQ_OVERRUN,
	/* Commands. */
	INJECT_VERB,
	INJECT_DEVX,
	INJECT_DEVICE_FATAL,
	/* Neither. */
	INJECT_PORT_DOWN,
	INJECT_KINDS,
};

struct inject_rule {
	enum inject_kind kind;
	uint32_t id;
	uint64_t hits, seen;

	/* what it's about */
	char device[EMU_NAME_MAX]; /* empty: any */
	const struct emu_device *dev;
	uint32_t qpn;	  /* 0: any */
	uint64_t opcodes; /* a bit each, MLX5_OPCODE_*; 0: all that the kind makes sense for */
	/* when */
	uint64_t nth, every, count; /* 0: not given */
	uint64_t chance;	    /* of 1 << 32; only with `random` */
	uint64_t seed;
	bool random;
	/* how */
	uint64_t delay_ns, jitter_ns, bandwidth; /* bytes a second; 0: any */
	uint64_t by, limit_ns;			 /* reorder */
	uint64_t timer;				 /* RNR NAK timer field */
	uint8_t syndrome;			 /* MLX5_CQE_SYNDROME_*, fail */
	int32_t verb;				 /* inject_command.c's number */
	uint64_t error;				 /* errno */
	int32_t state;				 /* enum ibv_qp_state, of modify_qp; -1: any */
	uint64_t devx, status, devx_syndrome;

	uint64_t port;

	uint64_t free_at; /* when what was sent through it has left */
};

/* In the order in which they were made. */
extern struct inject_rule **inject_rules;
extern uint32_t inject_nrules;
/* Another number each time that the first rule is made. */
extern uint32_t inject_epoch;

/* inject_text.c */
const char *inject_name(enum inject_kind);
/* Fills a rule from words ("drop", "qp=257", "nth=3"); false, and why in `error`. */
bool inject_parse(struct inject_rule *, char **words, unsigned n, char *error, size_t error_size);
/* Takes the rule over; its number, or 0: no such device, or no memory. */
uint32_t inject_add(const struct inject_rule *, char *error, size_t error_size);
bool inject_in_force(uint32_t id);

static inline bool inject_is(const struct inject_rule *r, const struct emu_device *dev, uint32_t qpn)
{
	return (!r->dev || r->dev == dev) && (!r->qpn || r->qpn == qpn);
}

/* The rule matches: does it fire? Counts. `own` counts the matches of the QP, which is what chance depends on. */
bool inject_fires(struct inject_rule *, uint64_t own);
/* It did: counts, and says so. */
void inject_hit(struct inject_rule *, const struct emu_device *, uint32_t qpn);
/* A number made of the rule's seed and of `n`. */
uint64_t inject_random(const struct inject_rule *, uint64_t n);
/* The one of two that applies: that for the QP before that for the device before that for all, of those the one for
 * certain opcodes, and then the one that was made first. `a` is older, or NULL. */
struct inject_rule *inject_choose(struct inject_rule *a, struct inject_rule *b);

/* inject_command.c: -1: there is no such verb, or no command of it */
int32_t inject_verb_number(const char *name);
/* inject_wqe.c: rules have changed: who waited because of one may go on */
void inject_let_go(void);
/* inject_event.c */
void inject_tell_all(const struct emu_device *, uint32_t event, uint64_t element);
/* What was known of the ways to peers isn't any more: a port went up or down. */
void inject_forget_routes(void);
/* inject_cq.c: liberties taken, to be counted among the rules */
uint32_t inject_options(void);
void inject_options_reset(void);

struct emu_device *inject_device(const char *name);
void inject_for_each_qp(struct emu_device *, void (*fn)(struct emu_qp *));
void inject_count(void);

/* config.c: there are other devices now, and the rules are these. */
void inject_configure(const struct inject_rule *rules, uint32_t n);

/* ---------------------------------------------------------------- what Python calls */

/* A rule as text, in force at once. Its number, or -1 and a message. */
EMU_EXPORT int aiordma_emu_fault_add(const char *text, char *error, size_t error_size);
/* How often it fired, and how often it could have. -1: there is no such rule (any more). */
EMU_EXPORT int aiordma_emu_fault_counts(int id, uint64_t *hits, uint64_t *seen);
/* Takes it away; what it held back goes on. 0, or -1 as above. */
EMU_EXPORT int aiordma_emu_fault_stop(int id);
/* Takes all rules and liberties away. */
EMU_EXPORT void aiordma_emu_fault_reset(void);

enum inject_element { INJECT_BY_PORT, INJECT_BY_QP, INJECT_BY_SEND_CQ, INJECT_BY_RECV_CQ, INJECT_BY_SRQ };

/* Raises an asynchronous event with what leads to it: a port that goes up or down, a QP that goes to ERR, a CQ that is of
 * no more use. The number is that of a port, or of a QP that the event is about or whose CQ or SRQ it's about; for QPs the
 * device may be "": any. 0, or -1: there is no such thing. */
EMU_EXPORT int aiordma_emu_raise_event(const char *device, uint32_t event, uint32_t kind, uint64_t number);

enum inject_option {
	/* A CQE that was there before the CQ was armed raises no event, whatever index the arming names: what
	 * ibv_req_notify_cq(3) promises, and less than ConnectX does. */
	INJECT_STRICT_ARM = 1,
	/* Bytes of error CQEs that mean nothing are not zero. */
	INJECT_GARBAGE = 2,
};

EMU_EXPORT int aiordma_emu_inject_options(uint32_t options);

/* Takes the place of two verbs of a context, until it's called again: ibv_req_notify_cq() first calls `before_arm`, if
 * there is one; ibv_poll_cq() fills the fields that are undefined in a failed completion with garbage. NULL: only
 * restores. The context must still be open then. */
EMU_EXPORT int aiordma_emu_inject_verbs(struct ibv_context *, void (*before_arm)(struct ibv_cq *), int garbage);

#endif

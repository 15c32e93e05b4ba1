/* SPDX-License-Identifier: MIT
 * Faults on purpose, for tests: what aiordma/emulator/_inject.py asks for, and where the device asks whether it applies.
 *
 * While nothing is injected each of these costs one load and a branch that is never taken. */
#ifndef AIORDMA_EMU_INJECT_H
#define AIORDMA_EMU_INJECT_H

#include "emu.h"

/* Not zero while anything is injected. */
extern uint32_t emu_injecting;

static inline bool inject_any(void)
{
	return __builtin_expect(__atomic_load_n(&emu_injecting, __ATOMIC_RELAXED) != 0, 0);
}

/* Commands, before they are looked at and without the lock: waits as long as was asked for, and gives the errno that
 * the command shall fail with, or 0. */
int inject_ioctl_(const void *arg);
int inject_write_(const void *buf, size_t len);

static inline int inject_ioctl(const void *arg)
{
	return inject_any() ? inject_ioctl_(arg) : 0;
}

static inline int inject_write(const void *buf, size_t len)
{
	return inject_any() ? inject_write_(buf, len) : 0;
}

/* The rest with emu.lock held. */

bool inject_held_(const struct emu_qp *);
bool inject_lost_(const struct emu_qp *);

/* The QP's queues don't run now: its work requests stay where they are. */
static inline bool inject_held(const struct emu_qp *qp)
{
	return inject_any() && inject_held_(qp);
}

/* What the QP sends now doesn't arrive. */
static inline bool inject_lost(const struct emu_qp *qp)
{
	return inject_any() && inject_lost_(qp);
}

/* Around the writing of a CQE. */
void inject_before_cqe_(struct emu_cq *);
void inject_error_cqe_(void *cqe);
void inject_after_cqe_(void);
uint32_t inject_arm_index_(const struct emu_cq *, uint32_t index);

static inline void inject_before_cqe(struct emu_cq *cq)
{
	if (inject_any())
		inject_before_cqe_(cq);
}

static inline void inject_error_cqe(void *cqe)
{
	if (inject_any())
		inject_error_cqe_(cqe);
}

static inline void inject_after_cqe(void)
{
	if (inject_any())
		inject_after_cqe_();
}

/* From which consumer index on a completion raises the event that was just asked for with `index`. */
static inline uint32_t inject_arm_index(const struct emu_cq *cq, uint32_t index)
{
	return inject_any() ? inject_arm_index_(cq, index) : index;
}

/* ---------------------------------------------------------------- what _inject.py calls. 0, or -1: no such thing */

enum inject_qp {
	INJECT_HOLD = 1, /* work requests aren't executed; flushing goes on */
	INJECT_HANG = 2, /* nor flushed */
	INJECT_LOSE = 4, /* requests get no answer */
};

enum inject_option {
	/* A CQE that was there before the CQ was armed raises no event, whatever index the arming names: what
	 * ibv_req_notify_cq(3) promises, and less than ConnectX does. */
	INJECT_STRICT_ARM = 1,
	/* Bytes of error CQEs that mean nothing are not zero. */
	INJECT_GARBAGE = 2,
};

/* `what` of enum inject_qp for one QP, or for all with qpn 0; of one device, or of all with an empty name. It takes the
 * place of what was set for the same before; 0 takes it away. */
EMU_EXPORT int aiordma_emu_inject_qp(const char *device, uint32_t qpn, uint32_t what);

/* The next `count` commands of the verb (all with -1) take `delay_ms` longer, and fail with `error` if it isn't 0.
 * `state` -1, or for modify_qp: only those that go to this state. count 0 takes it away. */
EMU_EXPORT int aiordma_emu_inject_command(const char *verb, int state, uint32_t delay_ms, int error, int count);

/* Raises an asynchronous event with what leads to it: a port that goes up or down, a QP that goes to ERR, a CQ that is of
 * no more use, a device on which nothing happens any more. `element` is a port's number, or the address of the struct
 * ibv_cq, ibv_qp or ibv_srq. */
EMU_EXPORT int aiordma_emu_inject_event(const char *device, uint32_t event, uint64_t element);

EMU_EXPORT int aiordma_emu_inject_options(uint32_t options);

/* Takes the place of two verbs of a context, until it's called again: ibv_req_notify_cq() first calls `before_arm`, if
 * there is one; ibv_poll_cq() fills the fields that are undefined in a failed completion with garbage. NULL: only
 * restores. The context must still be open then. */
EMU_EXPORT int aiordma_emu_inject_verbs(struct ibv_context *, void (*before_arm)(struct ibv_cq *), int garbage);

/* Everything but aiordma_emu_inject_verbs() is as without injection; port states stay. */
EMU_EXPORT void aiordma_emu_inject_reset(void);

#endif

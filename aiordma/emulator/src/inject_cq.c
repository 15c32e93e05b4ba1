/* SPDX-License-Identifier: MIT
 * Liberties that a device, or the library, may take with completions. See inject.h. */
#define _GNU_SOURCE
#include <string.h>

#include "inject.h"
#include "nic.h"

static uint32_t options;
static bool putting_cqe;

uint32_t inject_options(void)
{
	return options;
}

void inject_options_reset(void)
{
	options = 0;
	putting_cqe = false;
}

/* ---------------------------------------------------------------- CQEs */

void inject_before_cqe(struct emu_cq *cq)
{
	if (!(options & INJECT_STRICT_ARM))
		return;
	/* An arming that is seen here came before the CQE, one that is seen after it may have: then the reader, which looks
	 * once more after arming, may not have seen the CQE, and needs the event. */
	if (cq->channel)
		cq_check_armed(cq);
	putting_cqe = true;
}

void inject_after_cqe(void)
{
	putting_cqe = false;
}

uint32_t inject_arm_index_(const struct emu_cq *cq, uint32_t index)
{
	return options & INJECT_STRICT_ARM && !putting_cqe ? cq->pi & 0xffffff : index;
}

void inject_error_cqe(void *cqe)
{
	struct mlx5_err_cqe *e = cqe;

	if (!(options & INJECT_GARBAGE))
		return;
	memset(e->rsvd0, 0xa5, sizeof(e->rsvd0));
	memset(e->rsvd1, 0x5a, sizeof(e->rsvd1));
	e->s_wqe_opcode_qpn |= htobe32(0xee000000u);
}

int aiordma_emu_inject_options(uint32_t value)
{
	emu_lock();
	options = value;
	inject_count();
	emu_unlock();
	return 0;
}

/* ---------------------------------------------------------------- verbs of the library */

static struct {
	struct ibv_context *context;
	int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
	int (*req_notify_cq)(struct ibv_cq *, int);
	void (*before_arm)(struct ibv_cq *);
} wrapped;

static int poll_with_garbage(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	int got = wrapped.poll_cq(cq, n, wc);

	/* ibv_poll_cq(3): of a failed completion only wr_id, status, qp_num and vendor_err are valid. */
	for (int i = 0; i < got; i++) {
		if (wc[i].status == IBV_WC_SUCCESS)
			continue;
		wc[i].opcode = (enum ibv_wc_opcode)(i & 1 ? IBV_WC_RECV : 0x5a5a);
		wc[i].byte_len = 0xdeadbeef;
		wc[i].imm_data = 0xfeedface;
		wc[i].src_qp = 0xabcdef;
		wc[i].wc_flags = ~0u;
		wc[i].pkey_index = 0xffff;
	}
	return got;
}

static int call_before_arm(struct ibv_cq *cq, int solicited_only)
{
	wrapped.before_arm(cq);
	return wrapped.req_notify_cq(cq, solicited_only);
}

int aiordma_emu_inject_verbs(struct ibv_context *context, void (*before_arm)(struct ibv_cq *), int garbage)
{
	if (wrapped.context) {
		wrapped.context->ops.poll_cq = wrapped.poll_cq;
		wrapped.context->ops.req_notify_cq = wrapped.req_notify_cq;
	}
	wrapped.context = context;
	if (!context)
		return 0;
	wrapped.poll_cq = context->ops.poll_cq;
	wrapped.req_notify_cq = context->ops.req_notify_cq;
	wrapped.before_arm = before_arm;
	if (before_arm)
		context->ops.req_notify_cq = call_before_arm;
	if (garbage)
		context->ops.poll_cq = poll_with_garbage;
	return 0;
}

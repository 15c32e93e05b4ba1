/* SPDX-License-Identifier: MIT
 * Completion queues: writing CQEs, overrun, events, resizing.
 *
 * The layout of a CQE is struct mlx5_cqe64 (mlx5dv.h); in a 128-byte one it is the second half. A CQE belongs to the
 * reader when its owner bit equals the parity of its lap around the ring and its opcode isn't INVALID: get_sw_cqe() in
 * cq.c. */
#include <errno.h>
#include <string.h>

#include "nic.h"

#define CQN_FIRST 0x400u
#define CQN_RANGE (1u << 20)

/* No arm word looks like this: bits 31..30 of one are zero (cq.c, mlx5_arm_cq()). The record is zero at creation, and
 * so is the first arm word, "sn 0, index 0": without a mark that one would go unseen. */
#define ARM_SENTINEL 0xffffffffu

#define INDEX_MASK 0xffffffu /* consumer indices have 24 bits */

/* vendor_err_synd of the firmware, as logs of users show it with each syndrome: "synd 0x15 vend 0x81" and so on
 * (openucx/ucx issues 2973 and 5472, linux-rdma/perftest issue 173, linux-nvme/nvme-cli issue 3268). */
static uint8_t vendor_syndrome(uint8_t syndrome)
{
	switch (syndrome) {
	case MLX5_CQE_SYNDROME_LOCAL_PROT_ERR:
		return 0x51;
	case MLX5_CQE_SYNDROME_WR_FLUSH_ERR:
		return 0xf9;
	case MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR:
		return 0x81;
	case MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR:
		return 0x88;
	case MLX5_CQE_SYNDROME_REMOTE_OP_ERR:
		return 0x89;
	case MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR:
		return 0x8a;
	default:
		return 0;
	}
}

static struct mlx5_cqe64 *cqe_at(const struct emu_cq *cq, uint64_t index)
{
	uint8_t *cqe = cq->buf + (size_t)(index & (cq->ncqe - 1)) * cq->cqe_size;

	return (struct mlx5_cqe64 *)(cq->cqe_size == 128 ? cqe + 64 : cqe);
}

/* How many CQEs the reader has still to take. Its index is read only if the one known isn't good enough: that cache line
 * is the reader's. */
static uint32_t unread(struct emu_cq *cq)
{
	uint32_t ci = load_be32(&cq->db[0]) & INDEX_MASK;

	/* The library skips the RESIZE_CQ mark, but writes its index only with the next CQE it takes. A reader doesn't go
	 * back, so what was read is the floor from then on: one that stayed would be ahead of the index again after 2^23. */
	if (((ci - cq->ci) & INDEX_MASK) <= INDEX_MASK / 2)
		cq->ci = ci;
	return ((uint32_t)cq->pi - cq->ci) & INDEX_MASK;
}

static bool full(struct emu_cq *cq)
{
	return (((uint32_t)cq->pi - cq->ci) & INDEX_MASK) >= cq->ncqe && unread(cq) >= cq->ncqe;
}

static void put(struct emu_cq *cq, const struct nic_cqe *c)
{
	struct mlx5_cqe64 *cqe = cqe_at(cq, cq->pi);
	uint8_t owner = !!(cq->pi & cq->ncqe);

	memset(cqe, 0, offsetof(struct mlx5_cqe64, op_own));
	cqe->srqn_uidx = htobe32(c->uidx & INDEX_MASK);
	cqe->sop_drop_qpn = htobe32((uint32_t)c->wqe_op << 24 | (c->qpn & 0xffffff));
	cqe->wqe_counter = htobe16(c->counter);
	if (c->syndrome) {
		struct mlx5_err_cqe *err = (struct mlx5_err_cqe *)cqe;

		err->syndrome = c->syndrome;
		err->vendor_err_synd = vendor_syndrome(c->syndrome);
		if (unlikely(inject_any()))
			inject_error_cqe(err);
	} else {
		cqe->imm_inval_pkey = c->imm;
		cqe->byte_cnt = htobe32(c->bytes);
		/* MLX5_CQE_ROCE_L3_HEADER_TYPE_*, at bits 25..24: handle_responder() in the kernel's cq.c. libmlx5 has it in
		 * wc.sl, where UCX looks for it. */
		cqe->flags_rqpn = htobe32((c->src_qpn & 0xffffff) | (uint32_t)c->l3 << 24 | (uint32_t)c->grh << 28);
		cqe->timestamp = htobe64(engine_now());
	}
	cq->pi++;
	/* An error counts as solicited: IBTA 11.4.2.2, "the next solicited or unsuccessful completion". */
	if (c->solicited || c->syndrome)
		cq->solicited_pi = cq->pi;
	__atomic_store_n(&cqe->op_own, (uint8_t)(c->op << 4 | (c->solicited ? 2 : 0) | owner), __ATOMIC_RELEASE);
}

void cq_overrun(struct emu_cq *cq)
{
	if (!cq || cq->overrun)
		return;
	cq->overrun = true;
	emu_async_event(cq->o.ctx, IBV_EVENT_CQ_ERR, cq->user_handle, &cq->async_events);
}

bool cq_write(struct emu_cq *cq, const struct nic_cqe *c)
{
	bool injecting;

	if (unlikely(!cq || cq->overrun))
		return false;
	if (unlikely(full(cq))) {
		/* IBTA 10.10.2.6 and man ibv_get_async_event: the CQ is in error for good, what didn't fit is lost. */
		emu_log(EMU_INFO, "%s: CQ 0x%x overrun, %u CQEs", cq->dev->name, cq->cqn, cq->ncqe);
		cq_overrun(cq);
		return false;
	}
	injecting = inject_any();
	if (unlikely(injecting))
		inject_before_cqe(cq);
	put(cq, c);
	emu_log(EMU_DEBUG, "CQ 0x%x[%u]: op %u wqe op 0x%x qp 0x%x counter %u bytes %u syndrome 0x%x", cq->cqn,
		(uint32_t)cq->pi - 1, c->op, c->wqe_op, c->qpn, c->counter, c->bytes, c->syndrome);
	if (cq->channel)
		cq_check_armed(cq);
	if (unlikely(injecting))
		inject_after_cqe();
	return true;
}

bool cq_write_for(struct emu_qp *qp, struct emu_cq *cq, const struct nic_cqe *c)
{
	if (likely(cq_write(cq, c)))
		return true;
	/* IBTA 10.10.2.6: a QP that cannot complete on its CQ is a catastrophic error of the work queue. */
	if (qp->state != IBV_QPS_ERR)
		qp_to_error(qp, IBV_EVENT_QP_FATAL);
	return false;
}

/* ---------------------------------------------------------------- events */

/* The producer index, of all its bits, at which the reader's was `index`, or will be: it's within half a lap. */
static uint64_t whole_index(const struct emu_cq *cq, uint32_t index)
{
	uint32_t behind = ((uint32_t)cq->pi - index) & INDEX_MASK;

	return behind <= INDEX_MASK / 2 ? cq->pi - behind : cq->pi + (INDEX_MASK + 1 - behind);
}

static void fire(struct emu_cq *cq)
{
	uint64_t record = cq->user_handle; /* struct ib_uverbs_comp_event_desc */

	cq->armed = 0;
	cq->comp_events++;
	channel_send(cq->channel, &record);
}

/* ibv_modify_cq(): an event for `moderate_count` completions, or when the first of them is `moderate_period` us old. */
static bool moderated(struct emu_cq *cq, uint64_t pi)
{
	if (cq->moderate_count <= 1 || !cq->moderate_period)
		return false;
	if (pi - cq->arm_ci >= cq->moderate_count)
		return false;
	if (!cq->event_due_ns)
		cq->event_due_ns = engine_deadline(cq->moderate_period * 1000ull);
	if (engine_now() >= cq->event_due_ns)
		return false;
	engine_timer(cq->event_due_ns);
	return true;
}

bool cq_check_armed(struct emu_cq *cq)
{
	uint32_t word = __atomic_load_n(&cq->db[1], __ATOMIC_ACQUIRE);
	uint64_t pi;

	if (word != cq->last_arm) {
		/* Its sequence number, bits 29..28, changes with every event the reader took, so a new request is a new
		 * word; the same word again asks for what is armed, or was answered, already. */
		cq->last_arm = word;
		word = be32toh(word);
		cq->armed = word & MLX5_CQ_DB_REQ_NOT_SOL ? 2 : 1;
		cq->event_due_ns = 0; /* its period begins with the first completion for this request */
		cq->arm_ci = whole_index(cq, inject_arm_index(cq, word & INDEX_MASK));
	}
	if (!cq->armed)
		return false;
	pi = cq->armed == 1 ? cq->pi : cq->solicited_pi;
	if ((int64_t)(pi - cq->arm_ci) <= 0 || moderated(cq, pi))
		return false;
	fire(cq);
	return true;
}

/* ---------------------------------------------------------------- control's calls */

static void mark_invalid(const struct emu_cq *cq)
{
	for (uint32_t i = 0; i < cq->ncqe; i++)
		cqe_at(cq, i)->op_own = MLX5_CQE_INVALID << 4;
}

int emu_cq_insert(struct emu_device *dev, struct emu_cq *cq)
{
	uint32_t cqn = table_insert(&dev->cqs, &dev->cqs_size, &dev->next_cqn, CQN_FIRST, CQN_RANGE, cq);

	if (!cqn)
		return ENOMEM;
	cq->dev = dev;
	cq->cqn = cqn;
	mark_invalid(cq);
	__atomic_store_n(&cq->db[1], ARM_SENTINEL, __ATOMIC_RELEASE);
	cq->last_arm = ARM_SENTINEL;
	scan_add_cq(cq);
	return 0;
}

void emu_cq_remove(struct emu_cq *cq)
{
	if (!cq->dev)
		return;
	scan_remove_cq(cq);
	table_remove(&cq->dev->cqs, cq->dev->cqs_size, cq->cqn, cq);
	/* What the library will never read must not be counted, or its destroy waits for it: ib_uverbs_release_ucq() in
	 * core/uverbs_std_types_cq.c. */
	if (cq->channel)
		cq->comp_events -= channel_purge(cq->channel, cq->user_handle);
	if (cq->o.ctx->async)
		cq->async_events -= channel_purge(cq->o.ctx->async, cq->user_handle);
}

int emu_cq_resize(struct emu_cq *cq, uint8_t *buf, uint32_t ncqe, uint32_t cqe_size)
{
	struct mlx5_cqe64 *mark;

	/* The unread ones move to the new ring, and the mark needs a place in the old one. */
	if (unread(cq) >= ncqe || unread(cq) >= cq->ncqe)
		return EINVAL;
	/* The mark takes an index of its own; the library copies what is before it, each one place on, and continues
	 * behind it: mlx5_cq_resize_copy_cqes() in cq.c. */
	mark = cqe_at(cq, cq->pi);
	mark->op_own = (uint8_t)(MLX5_CQE_RESIZE_CQ << 4 | !!(cq->pi & cq->ncqe));
	cq->pi++;
	cq->solicited_pi += cq->solicited_pi == cq->pi - 1;
	cq->ci = (cq->ci + 1) & INDEX_MASK;
	cq->buf = buf;
	cq->ncqe = ncqe;
	cq->cqe_size = cqe_size;
	mark_invalid(cq);
	return 0;
}

/* SPDX-License-Identifier: MIT
 * The DMA engine in a send queue: memcpy by the device, mlx5dv_wr_memcpy().
 *
 * The WQE is a control segment, the place of the result, a source and a destination: struct mlx5_mmo_wqe in wqe.h. Like
 * everything long it goes in slices. */
#include <string.h>

#include "nic.h"

#define OPMOD_DMA 0x1	      /* MLX5_OPC_MOD_MMO_DMA */
#define MAX_LENGTH (1ull << 31) /* MLX5_DMA_MMO_MAX_SIZE, on the wire 0: qp.c, mlx5_wr_memcpy() */

struct mmo_segs {
	uint8_t result[16];
	struct mlx5_wqe_data_seg src, dst;
};

static struct nic_sgl src, dst;

static enum nic_step fail(uint8_t *syndrome, uint8_t value)
{
	*syndrome = value;
	return STEP_FAIL;
}

static uint64_t seg_length(const struct mlx5_wqe_data_seg *s)
{
	uint32_t n = be32toh(s->byte_count);

	return n ? n : MAX_LENGTH;
}

enum nic_step mmo_step(struct emu_qp *qp, struct nic_wqe *w, uint8_t *syndrome)
{
	struct nic_access read = { qp->dev, qp->pd->pdn, qp->qpn, false, 0 };
	struct nic_access write = { qp->dev, qp->pd->pdn, qp->qpn, false, IBV_ACCESS_LOCAL_WRITE };
	uint64_t total, n;
	struct mmo_segs s;

	if (!qp->mmo || w->opmod != OPMOD_DMA || w->size < w->body + sizeof(s))
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
	memcpy(&s, w->raw + w->body, sizeof(s));
	total = seg_length(&s.src);
	if (total != seg_length(&s.dst) || total > qp->dev->limits.max_wr_memcpy_length)
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	n = total - qp->progress < NIC_SLICE ? total - qp->progress : NIC_SLICE;
	sgl_reset(&src);
	sgl_reset(&dst);
	if (!mkey_translate(&read, be32toh(s.src.lkey), be64toh(s.src.addr) + qp->progress, n, &src) ||
	    !mkey_translate(&write, be32toh(s.dst.lkey), be64toh(s.dst.addr) + qp->progress, n, &dst))
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	if (fault_guard_copy(&dst, &src, n) != COPY_DONE)
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	qp->progress += n;
	w->len = total;
	return qp->progress < total ? STEP_MORE : STEP_DONE;
}

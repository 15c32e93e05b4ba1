/* SPDX-License-Identifier: MIT
 * Taking send WQEs apart.
 *
 * The application may write anything into a WQE, at any time. So it is copied out of the ring first, whole, and only the
 * copy is looked at; every length in it is held against the copy's size. The layout is that of mlx5dv.h, the order of the
 * segments that of qp.c, _mlx5_post_send(). */
#include <string.h>

#include "nic.h"

#define BB MLX5_SEND_WQE_BB

/* Inline segments carry their length in the low bits: "inl | MLX5_INLINE_SEG" in qp.c. */
#define INLINE_LENGTH_MASK 0x3ffu

static uint32_t be32_at(const struct nic_wqe *w, uint32_t at)
{
	uint32_t v;

	memcpy(&v, w->raw + at, sizeof(v));
	return be32toh(v);
}

/* Blocks wrap around the ring's end; the copy is straight. */
static void copy_out(const struct emu_qp *qp, struct nic_wqe *w, uint32_t from, uint32_t to)
{
	uint32_t ring = qp->sq_nbb * BB;
	uint32_t at = (qp->sq_ci & (qp->sq_nbb - 1)) * BB + from;

	at = at >= ring ? at - ring : at;
	while (from < to) {
		uint32_t n = to - from < ring - at ? to - from : ring - at;

		memcpy(w->raw + from, qp->sq + at, n);
		from += n;
		at = 0;
	}
}

/* Takes `size` bytes at *at as a segment of their own. */
static bool segment(const struct nic_wqe *w, uint32_t *at, uint32_t size, uint32_t *seg)
{
	if (w->size - *at < size)
		return false;
	*seg = *at;
	*at += size;
	return true;
}

static bool decode_address(const struct emu_qp *qp, struct nic_wqe *w, uint32_t *at)
{
	const struct mlx5_wqe_av *av;
	uint32_t seg;

	if (qp->type == IBV_QPT_XRC_SEND) {
		/* wqe.h, struct mlx5_wqe_xrc_seg */
		if (!segment(w, at, 16, &seg))
			return false;
		w->xrc_srqn = be32_at(w, seg) & 0xffffff;
		return true;
	}
	if (qp->type != IBV_QPT_UD && !qp->dci)
		return true;
	/* The short form of an address vector ends before the part that only a GRH needs. */
	if (!segment(w, at, offsetof(struct mlx5_wqe_av, reserved0), &seg))
		return false;
	av = (const struct mlx5_wqe_av *)(w->raw + seg);
	w->av_extended = be32toh(av->dqp_dct) & MLX5_EXTENDED_UD_AV;
	if (w->av_extended && !segment(w, at, sizeof(*av) - offsetof(struct mlx5_wqe_av, reserved0), &seg))
		return false;
	w->av = av;
	return true;
}

static bool decode_remote(struct nic_wqe *w, uint32_t *at)
{
	struct mlx5_wqe_raddr_seg r;
	uint32_t seg;

	if (!segment(w, at, sizeof(r), &seg))
		return false;
	memcpy(&r, w->raw + seg, sizeof(r));
	w->raddr = be64toh(r.raddr);
	w->rkey = be32toh(r.rkey);
	return true;
}

static bool decode_atomic(struct nic_wqe *w, uint32_t *at)
{
	struct mlx5_wqe_atomic_seg a;
	uint32_t seg;

	if (!segment(w, at, sizeof(a), &seg))
		return false;
	memcpy(&a, w->raw + seg, sizeof(a));
	w->swap_add = be64toh(a.swap_add);
	w->compare = be64toh(a.compare);
	return true;
}

static bool decode_data(struct nic_wqe *w, uint32_t at)
{
	while (w->size - at >= 4) {
		uint32_t bytes = be32_at(w, at);
		struct nic_seg *s = &w->seg[w->nseg];

		if (bytes & MLX5_INLINE_SEG) {
			bytes &= INLINE_LENGTH_MASK;
			if (bytes > w->size - at - 4)
				return false;
			s->addr = (uintptr_t)(w->raw + at + 4);
			s->key = 0;
			s->inl = true;
			at += (4 + bytes + 15) & ~15u; /* a segment ends on 16 bytes, as does the WQE */
		} else {
			struct mlx5_wqe_data_seg d;

			memcpy(&d, w->raw + at, sizeof(d));
			s->addr = be64toh(d.addr);
			s->key = be32toh(d.lkey);
			s->inl = false;
			at += sizeof(d);
		}
		s->len = bytes;
		w->len += bytes;
		if (bytes)
			w->nseg++;
	}
	return true;
}

/* What the transport can do, IBTA table 37 ("Operations for service types"); XRC and DC are as RC. */
static bool opcode_fits(const struct emu_qp *qp, uint8_t opcode)
{
	switch (opcode) {
	case MLX5_OPCODE_NOP:
		return true;
	case MLX5_OPCODE_SEND:
	case MLX5_OPCODE_SEND_IMM:
		return true;
	case MLX5_OPCODE_SEND_INVAL:
	case MLX5_OPCODE_UMR:
	case MLX5_OPCODE_RDMA_WRITE:
	case MLX5_OPCODE_RDMA_WRITE_IMM:
		return qp->type != IBV_QPT_UD;
	case MLX5_OPCODE_RDMA_READ:
	case MLX5_OPCODE_ATOMIC_CS:
	case MLX5_OPCODE_ATOMIC_FA:
	case MLX5_OPCODE_MMO:
		return qp->type != IBV_QPT_UD && qp->type != IBV_QPT_UC;
	default:
		return false;
	}
}

static bool decode_body(const struct emu_qp *qp, struct nic_wqe *w)
{
	uint32_t at = sizeof(struct mlx5_wqe_ctrl_seg);

	w->body = at;
	switch (w->opcode) {
	case MLX5_OPCODE_NOP:
	case MLX5_OPCODE_UMR: /* umr.c reads its own segments */
	case MLX5_OPCODE_MMO:
		return true;
	case MLX5_OPCODE_RDMA_WRITE:
	case MLX5_OPCODE_RDMA_WRITE_IMM:
	case MLX5_OPCODE_RDMA_READ:
		return decode_address(qp, w, &at) && decode_remote(w, &at) && decode_data(w, at);
	case MLX5_OPCODE_ATOMIC_CS:
	case MLX5_OPCODE_ATOMIC_FA:
		return decode_address(qp, w, &at) && decode_remote(w, &at) && decode_atomic(w, &at) && decode_data(w, at);
	default:
		return decode_address(qp, w, &at) && decode_data(w, at);
	}
}

uint8_t wqe_decode_at(struct emu_qp *qp, uint16_t ci, struct nic_wqe *w)
{
	uint16_t now = qp->sq_ci;
	uint8_t syndrome;

	qp->sq_ci = ci;
	syndrome = wqe_decode(qp, w);
	qp->sq_ci = now;
	return syndrome;
}

uint8_t wqe_decode(struct emu_qp *qp, struct nic_wqe *w)
{
	const struct mlx5_wqe_ctrl_seg *c = (const struct mlx5_wqe_ctrl_seg *)w->raw;
	uint16_t posted = (uint16_t)(load_be32(&qp->db[1]) - qp->sq_ci);
	uint32_t op, ds;

	copy_out(qp, w, 0, BB);
	op = be32toh(c->opmod_idx_opcode);
	ds = be32toh(c->qpn_ds) & 0x3f;
	w->opcode = op & 0xff;
	w->opmod = op >> 24;
	w->flags = c->fm_ce_se;
	w->imm = c->imm;
	w->stream = be16toh(c->dci_stream_channel_id);
	w->counter = qp->sq_ci;
	w->nbb = ds ? (uint16_t)((ds + 3) / 4) : 1;
	w->size = ds * 16;
	w->nseg = 0;
	w->len = 0;
	w->av = NULL;
	w->raddr = 0;
	w->rkey = 0;
	if (w->nbb > posted) {
		/* It says it's longer than all that was posted: what comes after it begins where it really ends. */
		w->nbb = posted;
		return MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR;
	}
	if (!ds || w->nbb > qp->sq_nbb || !opcode_fits(qp, w->opcode))
		return MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR;
	if (w->size > BB)
		copy_out(qp, w, BB, w->size);
	return decode_body(qp, w) ? 0 : MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR;
}

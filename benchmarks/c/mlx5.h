/* SPDX-License-Identifier: MIT
 * What the programs on mlx5's own operations begin with. */
#ifndef BENCH_MLX5_H
#define BENCH_MLX5_H

#include "harness.h"

#include <infiniband/mlx5dv.h>

/* An RC QP that does RDMA writes and \p operations (MLX5DV_QP_EX_WITH_...), connected to another one of this process.
 * \p inline_bytes: 0, or what a work request must hold. */
static struct ibv_qp_ex *make_mlx5_qp(struct ibv_cq *cq, uint64_t operations, uint32_t inline_bytes)
{
	struct mlx5dv_qp_init_attr dv = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
		.send_ops_flags = operations,
	};
	struct ibv_qp_init_attr_ex wish = qp_wish(cq, cq);
	struct ibv_qp *here;

	if (inline_bytes)
		wish.cap.max_inline_data = inline_bytes;
	wish.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	wish.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
	here = mlx5dv_create_qp(ctx, &wish, &dv);
	if (!here)
		die("mlx5dv_create_qp");
	connect_both(here, make_qp(cq, cq));
	return ibv_qp_to_qp_ex(here);
}

#endif

/* SPDX-License-Identifier: MIT
 * Copies within this process.
 *
 *   memcpy     by the device (mlx5dv_wr_memcpy), WINDOW in flight
 *   memmove    by the CPU
 */
#include "harness.h"

#include <infiniband/mlx5dv.h>

static struct ibv_cq *cq;
static struct ibv_qp_ex *qp;
static struct mlx5dv_qp_ex *dv_qp;

static void set_up(void)
{
	struct mlx5dv_qp_init_attr dv = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
		.send_ops_flags = MLX5DV_QP_EX_WITH_MEMCPY,
	};
	struct ibv_qp_init_attr_ex wish;
	struct ibv_qp *here;

	cq = make_cq(256);
	wish = qp_wish(cq, cq);
	wish.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	wish.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
	here = mlx5dv_create_qp(ctx, &wish, &dv);
	if (!here)
		die("mlx5dv_create_qp");
	connect_both(here, make_qp(cq, cq));
	qp = ibv_qp_to_qp_ex(here);
	dv_qp = mlx5dv_qp_ex_from_ibv_qp_ex(qp);
}

static unsigned by_device(unsigned ops)
{
	unsigned posted = 0, done = 0;

	while (done < ops) {
		for (; posted < ops && posted - done < options.window; posted++) {
			ibv_wr_start(qp);
			qp->wr_id = 0;
			qp->wr_flags = IBV_SEND_SIGNALED;
			mlx5dv_wr_memcpy(dv_qp, target_mr->lkey, (uintptr_t)target, source_mr->lkey, (uintptr_t)source,
					 options.size);
			check(ibv_wr_complete(qp), "ibv_wr_complete");
		}
		done += reap(cq, POLL);
	}
	return done;
}

static unsigned by_cpu(unsigned ops)
{
	for (unsigned i = 0; i < ops; i++) {
		memmove(target, source, options.size);
		__asm__ volatile("" ::: "memory"); /* each of them */
	}
	return ops;
}

int main(int argc, char **argv)
{
	parse(argc, argv);
	if (workload_is("memmove")) {
		source = page_aligned(options.size);
		target = page_aligned(options.size);
		return serve(by_cpu);
	}
	if (!workload_is("memcpy"))
		return unknown_workload();
	open_device();
	make_memory(options.size, options.size);
	set_up();
	return serve(by_device);
}

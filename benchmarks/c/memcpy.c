/* SPDX-License-Identifier: MIT
 * Copies within this process.
 *
 *   memcpy     by the device (mlx5dv_wr_memcpy), WINDOW in flight
 *   memmove    by the CPU
 */
#include "mlx5.h"

static struct ibv_cq *cq;
static struct ibv_qp_ex *qp;
static struct mlx5dv_qp_ex *dv_qp;

static void set_up(void)
{
	cq = make_cq(256);
	qp = make_mlx5_qp(cq, MLX5DV_QP_EX_WITH_MEMCPY, 0);
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

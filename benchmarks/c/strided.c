/* SPDX-License-Identifier: MIT
 * A block of a matrix, written to a peer's contiguous memory: SIZE bytes in rows of 256, 1024 bytes apart.
 *
 *   strided    through an mkey with an interleaved layout (UMR), registered once; WINDOW in flight
 *   packed     the rows copied into a staging buffer by the CPU, which is then written; WINDOW staging buffers
 */
#include "mlx5.h"

enum { ROW = 256, PITCH = 1024 };

static struct ibv_cq *cq;
static struct ibv_qp_ex *qp;
static struct mlx5dv_mkey *mkey;
static unsigned char *staging;
static struct ibv_mr *staging_mr;

static void set_up(void)
{
	cq = make_cq(256);
	qp = make_mlx5_qp(cq, MLX5DV_QP_EX_WITH_MR_INTERLEAVED, 512 /* a layout goes inline */);
}

static void bind_layout(void)
{
	struct mlx5dv_mkey_init_attr wish = {
		.pd = pd,
		.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT,
		.max_entries = 4, /* an interleaved layout needs one entry more than it has blocks */
	};
	struct mlx5dv_mr_interleaved rows = {
		.addr = (uintptr_t)source,
		.bytes_count = ROW,
		.bytes_skip = PITCH - ROW,
		.lkey = source_mr->lkey,
	};

	mkey = mlx5dv_create_mkey(&wish);
	if (!mkey)
		die("mlx5dv_create_mkey");
	ibv_wr_start(qp);
	qp->wr_id = 0;
	qp->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	mlx5dv_wr_mr_interleaved(mlx5dv_qp_ex_from_ibv_qp_ex(qp), mkey, IBV_ACCESS_LOCAL_WRITE, options.size / ROW, 1, &rows);
	check(ibv_wr_complete(qp), "ibv_wr_complete");
	reap(cq, 1);
}

static void post(uint32_t lkey, uint64_t addr)
{
	ibv_wr_start(qp);
	qp->wr_id = 0;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(qp, target_mr->rkey, (uintptr_t)target);
	ibv_wr_set_sge(qp, lkey, addr, options.size);
	check(ibv_wr_complete(qp), "ibv_wr_complete");
}

static unsigned strided(unsigned ops)
{
	unsigned posted = 0, done = 0;

	while (done < ops) {
		for (; posted < ops && posted - done < options.window; posted++)
			post(mkey->lkey, 0);
		done += reap(cq, POLL);
	}
	return done;
}

static unsigned packed(unsigned ops)
{
	unsigned posted = 0, done = 0;

	while (done < ops) {
		for (; posted < ops && posted - done < options.window; posted++) {
			unsigned char *to = staging + (size_t)(posted % options.window) * options.size;

			for (size_t row = 0; row < options.size / ROW; row++)
				memcpy(to + row * ROW, source + row * PITCH, ROW);
			post(staging_mr->lkey, (uintptr_t)to);
		}
		done += reap(cq, POLL);
	}
	return done;
}

int main(int argc, char **argv)
{
	parse(argc, argv);
	if (!workload_is("strided") && !workload_is("packed"))
		return unknown_workload();
	if (options.size % ROW) {
		fprintf(stderr, "%s: SIZE is a multiple of %d\n", argv[0], ROW);
		return 2;
	}
	open_device();
	make_memory((size_t)options.size / ROW * PITCH, options.size);
	set_up();
	if (workload_is("strided")) {
		bind_layout();
		return serve(strided);
	}
	staging = page_aligned((size_t)options.window * options.size);
	staging_mr = ibv_reg_mr(pd, staging, (size_t)options.window * options.size, IBV_ACCESS_LOCAL_WRITE);
	if (!staging_mr)
		die("ibv_reg_mr");
	return serve(packed);
}

/* SPDX-License-Identifier: MIT
 * The same writes by the interface that goes straight to the driver: ibv_wr_*() on a QP of mlx5dv_create_qp(3), and
 * ibv_start_poll() on a CQ of ibv_create_cq_ex(3).
 *
 *   write      WINDOW in flight, each signalled, a new one for each that completes
 *   turns      the same, where QPS queue pairs take turns
 *   batch      WINDOW at a time with one doorbell, the last one signalled
 */
#include "harness.h"

#include <infiniband/mlx5dv.h>

static struct ibv_cq_ex *cq;
static struct ibv_qp_ex **qps;

static void set_up(void)
{
	struct ibv_cq_init_attr_ex cq_wish = { .cqe = options.window * 2 + 64 };
	struct mlx5dv_qp_init_attr dv = { 0 };

	cq = ibv_create_cq_ex(ctx, &cq_wish);
	qps = calloc(options.qps, sizeof(*qps));
	if (!cq || !qps)
		die("ibv_create_cq_ex");
	for (unsigned i = 0; i < options.qps; i++) {
		struct ibv_qp_init_attr_ex wish = qp_wish(ibv_cq_ex_to_cq(cq), ibv_cq_ex_to_cq(cq));
		struct ibv_qp *qp;

		wish.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		wish.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
		qp = mlx5dv_create_qp(ctx, &wish, &dv);
		if (!qp)
			die("mlx5dv_create_qp");
		connect_both(qp, make_qp(wish.send_cq, wish.recv_cq));
		qps[i] = ibv_qp_to_qp_ex(qp);
	}
}

static void build(struct ibv_qp_ex *qp, unsigned flags, bool with_inline)
{
	qp->wr_id = 0;
	qp->wr_flags = flags;
	ibv_wr_rdma_write(qp, target_mr->rkey, (uintptr_t)target);
	if (with_inline)
		ibv_wr_set_inline_data(qp, source, options.size);
	else
		ibv_wr_set_sge(qp, source_mr->lkey, (uintptr_t)source, options.size);
}

static void post(struct ibv_qp_ex *qp)
{
	ibv_wr_start(qp);
	build(qp, IBV_SEND_SIGNALED, options.size <= INLINE);
	check(ibv_wr_complete(qp), "ibv_wr_complete");
}

static unsigned poll_some(unsigned most)
{
	struct ibv_poll_cq_attr attr = { 0 };
	unsigned n = 0;
	int err;

	while ((err = ibv_start_poll(cq, &attr)) == ENOENT)
		;
	check(err, "ibv_start_poll");
	do {
		if (cq->status) {
			fprintf(stderr, "%s: a write failed: %s\n", options.program, ibv_wc_status_str(cq->status));
			exit(1);
		}
		n++;
	} while (n < most && !ibv_next_poll(cq));
	ibv_end_poll(cq);
	return n;
}

static unsigned one_at_a_time(unsigned ops)
{
	for (unsigned i = 0; i < ops; i++) {
		post(qps[0]);
		poll_some(1);
	}
	return ops;
}

static unsigned windowed(unsigned ops)
{
	unsigned posted = 0, done = 0, turn = 0;

	while (done < ops) {
		for (; posted < ops && posted - done < options.window; posted++) {
			post(qps[turn]);
			turn = turn + 1 == options.qps ? 0 : turn + 1;
		}
		done += poll_some(POLL);
	}
	return done;
}

static unsigned batches(unsigned ops)
{
	unsigned done = 0;

	while (done < ops) {
		ibv_wr_start(qps[0]);
		for (unsigned i = 1; i <= options.window; i++)
			build(qps[0], i == options.window ? IBV_SEND_SIGNALED : 0, false);
		check(ibv_wr_complete(qps[0]), "ibv_wr_complete");
		poll_some(1);
		done += options.window;
	}
	return done;
}

int main(int argc, char **argv)
{
	bool batch;

	parse(argc, argv);
	batch = workload_is("batch");
	if (!batch && !workload_is("write") && !workload_is("turns"))
		return unknown_workload();
	open_device();
	make_memory(options.size, options.size);
	set_up();
	return serve(batch ? batches : options.window == 1 ? one_at_a_time : windowed);
}

/* SPDX-License-Identifier: MIT
 * Writes to 64 DC targets in turn from one initiator with 16 streams.
 *
 *   fanout     WINDOW in flight
 */
#include "harness.h"

#include <infiniband/mlx5dv.h>

enum { TARGETS = 64, LOG_STREAMS = 4 };

static const uint64_t key = 0x1234567890;
static struct ibv_cq *cq;
static struct ibv_qp_ex *dci;
static struct mlx5dv_qp_ex *dv_dci;
static struct ibv_ah *ah;
static uint32_t numbers[TARGETS];

static void make_target(unsigned i, struct ibv_srq *srq, const struct address *own)
{
	struct mlx5dv_qp_init_attr dv = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCT, .dct_access_key = key },
	};
	struct ibv_qp_init_attr_ex wish = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_DRIVER,
					    .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd };
	struct ibv_port_attr port;
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .min_rnr_timer = RNR_TIMER, .ah_attr = path_to(own) };
	struct ibv_qp *dct = mlx5dv_create_qp(ctx, &wish, &dv);

	if (!dct)
		die("mlx5dv_create_qp, a DCT");
	check(ibv_query_port(ctx, PORT, &port), "ibv_query_port");
	rtr.path_mtu = port.active_mtu;
	check(ibv_modify_qp(dct, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "DCT to INIT");
	check(ibv_modify_qp(dct, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_MIN_RNR_TIMER), "DCT to RTR");
	numbers[i] = dct->qp_num;
}

static void make_initiator(void)
{
	struct mlx5dv_qp_init_attr dv = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC | MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCI, .dci_streams = { .log_num_concurent = LOG_STREAMS } },
	};
	struct ibv_qp_init_attr_ex wish = qp_wish(cq, cq);
	struct ibv_port_attr port;
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = PORT };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = TIMEOUT, .retry_cnt = RETRIES, .rnr_retry = 7,
				   .max_rd_atomic = 1 };
	struct ibv_qp *qp;

	check(ibv_query_port(ctx, PORT, &port), "ibv_query_port");
	rtr.path_mtu = port.active_mtu;
	wish.qp_type = IBV_QPT_DRIVER;
	wish.cap.max_recv_wr = 0;
	wish.cap.max_recv_sge = 0;
	wish.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	wish.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
	qp = mlx5dv_create_qp(ctx, &wish, &dv);
	if (!qp)
		die("mlx5dv_create_qp, a DCI");
	check(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT), "DCI to INIT");
	check(ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_PATH_MTU), "DCI to RTR");
	check(ibv_modify_qp(qp, &rts,
			    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				    IBV_QP_MAX_QP_RD_ATOMIC),
	      "DCI to RTS");
	dci = ibv_qp_to_qp_ex(qp);
	dv_dci = mlx5dv_qp_ex_from_ibv_qp_ex(dci);
}

static void set_up(void)
{
	struct ibv_srq_init_attr srq_wish = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct address own = own_address(0);
	struct ibv_ah_attr path = path_to(&own);
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_wish);

	cq = make_cq(256);
	if (!srq)
		die("ibv_create_srq");
	for (unsigned i = 0; i < TARGETS; i++)
		make_target(i, srq, &own);
	make_initiator();
	ah = ibv_create_ah(pd, &path);
	if (!ah)
		die("ibv_create_ah");
}

static unsigned fanout(unsigned ops)
{
	unsigned posted = 0, done = 0;

	while (done < ops) {
		for (; posted < ops && posted - done < options.window; posted++) {
			unsigned i = posted % TARGETS;

			ibv_wr_start(dci);
			dci->wr_id = 0;
			dci->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_rdma_write(dci, target_mr->rkey, (uintptr_t)target);
			mlx5dv_wr_set_dc_addr_stream(dv_dci, ah, numbers[i], key, (uint16_t)(i % (1 << LOG_STREAMS)));
			if (options.size <= INLINE)
				ibv_wr_set_inline_data(dci, source, options.size);
			else
				ibv_wr_set_sge(dci, source_mr->lkey, (uintptr_t)source, options.size);
			check(ibv_wr_complete(dci), "ibv_wr_complete");
		}
		done += reap(cq, POLL);
	}
	return done;
}

int main(int argc, char **argv)
{
	parse(argc, argv);
	if (!workload_is("fanout"))
		return unknown_workload();
	open_device();
	make_memory(options.size, options.size);
	set_up();
	return serve(fanout);
}

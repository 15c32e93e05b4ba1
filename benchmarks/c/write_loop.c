/* SPDX-License-Identifier: MIT
 * The reference: 8-byte RDMA writes between two connected QPs of one device, in plain C on libibverbs.
 *
 *   write_loop DEVICE one   SLICES OPS          post one, poll until it's there, again
 *   write_loop DEVICE many  SLICES OPS N        N outstanding, each signalled, a new one for each that completes
 *   write_loop DEVICE batch SLICES OPS N        N at a time with one doorbell, the last one signalled
 *
 * Prints one line of JSON: nanoseconds an operation, for each slice of OPS operations.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <infiniband/verbs.h>

#define PORT 1
#define BYTES 8
#define MAX_OUTSTANDING 1024
#define POLL 32

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2];
static struct ibv_mr *mr;
static uint64_t memory[2];
static struct ibv_sge sge;
static struct ibv_send_wr wrs[MAX_OUTSTANDING];

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---------------------------------------------------------------- setting up */

static void open_device(const char *name)
{
	int n = 0;
	struct ibv_device **list = ibv_get_device_list(&n);

	for (int i = 0; list && i < n && !ctx; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			ctx = ibv_open_device(list[i]);
	if (!ctx) {
		fprintf(stderr, "write_loop: no device %s\n", name);
		exit(1);
	}
	ibv_free_device_list(list);
}

static struct ibv_qp *create_qp(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = MAX_OUTSTANDING, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1,
			 .max_inline_data = 64 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	if (!qp)
		die("ibv_create_qp");
	return qp;
}

/* The first RoCE v2 entry of the port's table; without one, whatever comes first. */
static uint8_t choose_gid(union ibv_gid *gid)
{
	struct ibv_gid_entry e;

	for (uint32_t i = 0; i < 32; i++)
		if (!ibv_query_gid_ex(ctx, PORT, i, &e, 0) && e.gid_type == IBV_GID_TYPE_ROCE_V2) {
			*gid = e.gid;
			return (uint8_t)i;
		}
	if (ibv_query_gid(ctx, PORT, 0, gid))
		die("ibv_query_gid");
	return 0;
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_port_attr port;
	union ibv_gid gid;
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .dest_qp_num = peer, .min_rnr_timer = 12, .max_dest_rd_atomic = 1 };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };

	if (ibv_query_port(ctx, PORT, &port))
		die("ibv_query_port");
	rtr.path_mtu = port.active_mtu;
	rtr.ah_attr.port_num = PORT;
	rtr.ah_attr.dlid = port.lid;
	if (port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		rtr.ah_attr.is_global = 1;
		rtr.ah_attr.grh.sgid_index = choose_gid(&gid);
		rtr.ah_attr.grh.dgid = gid;
		rtr.ah_attr.grh.hop_limit = 64;
	}
	if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
	    ibv_modify_qp(qp, &rtr,
			  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
	    ibv_modify_qp(qp, &rts,
			  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				  IBV_QP_MAX_QP_RD_ATOMIC))
		die("ibv_modify_qp");
}

static void set_up(const char *device)
{
	open_device(device);
	pd = ibv_alloc_pd(ctx);
	cq = pd ? ibv_create_cq(ctx, 4096, NULL, NULL, 0) : NULL;
	if (!cq)
		die("ibv_create_cq");
	qps[0] = create_qp();
	qps[1] = create_qp();
	connect_qp(qps[0], qps[1]->qp_num);
	connect_qp(qps[1], qps[0]->qp_num);
	mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!mr)
		die("ibv_reg_mr");
	sge = (struct ibv_sge){ .addr = (uintptr_t)&memory[0], .length = BYTES, .lkey = mr->lkey };
	for (unsigned i = 0; i < MAX_OUTSTANDING; i++)
		wrs[i] = (struct ibv_send_wr){
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.wr.rdma = { .remote_addr = (uintptr_t)&memory[1], .rkey = mr->rkey },
		};
}

static void tear_down(void)
{
	ibv_destroy_qp(qps[0]);
	ibv_destroy_qp(qps[1]);
	ibv_dereg_mr(mr);
	ibv_destroy_cq(cq);
	ibv_dealloc_pd(pd);
	ibv_close_device(ctx);
}

/* ---------------------------------------------------------------- the loops */

static void post(struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;
	int err = ibv_post_send(qps[0], wr, &bad);

	if (err) {
		fprintf(stderr, "ibv_post_send: %s\n", strerror(err));
		exit(1);
	}
}

/* Polls until something is there. */
static unsigned reap(int most)
{
	struct ibv_wc wc[POLL];
	int n;

	do
		n = ibv_poll_cq(cq, most, wc);
	while (!n);
	for (int i = 0; i < n; i++)
		if (wc[i].status) {
			fprintf(stderr, "a write failed: %s\n", ibv_wc_status_str(wc[i].status));
			exit(1);
		}
	if (n < 0) {
		fprintf(stderr, "ibv_poll_cq failed\n");
		exit(1);
	}
	return (unsigned)n;
}

static void one_at_a_time(unsigned ops)
{
	for (unsigned i = 0; i < ops; i++) {
		post(&wrs[0]);
		reap(1);
	}
}

static void many(unsigned ops, unsigned outstanding)
{
	unsigned posted = 0, done = 0;

	for (; posted < ops && posted < outstanding; posted++)
		post(&wrs[0]);
	while (done < ops) {
		unsigned n = reap(POLL);

		done += n;
		for (; n && posted < ops; n--, posted++)
			post(&wrs[0]);
	}
}

static void batches(unsigned ops, unsigned size)
{
	for (unsigned i = 0; i < ops; i += size) {
		post(&wrs[0]);
		reap(1);
	}
}

int main(int argc, char **argv)
{
	const char *mode = argc > 2 ? argv[2] : "";
	unsigned slices = argc > 3 ? (unsigned)atoi(argv[3]) : 0, ops = argc > 4 ? (unsigned)atoi(argv[4]) : 0;
	unsigned n = argc > 5 ? (unsigned)atoi(argv[5]) : 1;
	bool batch = !strcmp(mode, "batch");

	if (!slices || !ops || !n || n > MAX_OUTSTANDING || (strcmp(mode, "one") && strcmp(mode, "many") && !batch)) {
		fprintf(stderr, "usage: write_loop DEVICE one|many|batch SLICES OPS [N]\n");
		return 2;
	}
	set_up(argv[1]);
	wrs[0].send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	if (batch) {
		/* As aiordma's batches: not inline. */
		for (unsigned i = 0; i < n; i++) {
			wrs[i].send_flags = i == n - 1 ? IBV_SEND_SIGNALED : 0;
			wrs[i].next = i == n - 1 ? NULL : &wrs[i + 1];
		}
		ops -= ops % n;
	}
	printf("{\"ns\": [");
	for (unsigned i = 0; i <= slices; i++) {
		uint64_t began = now_ns();

		if (batch)
			batches(ops, n);
		else if (!strcmp(mode, "one"))
			one_at_a_time(ops);
		else
			many(ops, n);
		if (i) /* the first one warms up */
			printf("%s%.1f", i > 1 ? ", " : "", (double)(now_ns() - began) / ops);
	}
	printf("]}\n");
	tear_down();
	return 0;
}

/* SPDX-License-Identifier: MIT
 * What the C contenders share: the protocol with bench.py, a device, connected QPs, memory.
 *
 *   PROGRAM DEVICE WORKLOAD SIZE WINDOW QPS
 *
 * SIZE: bytes of an operation. WINDOW: operations in flight. QPS: queue pairs that take turns. When all is set up, it
 * prints "ready". Then each line "run OPS" on standard input is answered by {"ns": ..., "ops": ..., "cpu_ns": ...} (the
 * CPU time is this thread's), each line "sample OPS" by {"samples": [...]}, nanoseconds of each operation. It ends with
 * its standard input.
 */
#ifndef AIORDMA_BENCH_HARNESS_H
#define AIORDMA_BENCH_HARNESS_H

#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#define PORT 1
#define POLL 32
#define LINE 64
#define PAGE 4096
#define INLINE 64 /* as aiordma's default: what is no longer goes inline, except in batches */
#define UNUSED __attribute__((unused))

/* As QPConfig's defaults. */
enum { TIMEOUT = 14, RETRIES = 7, RNR_TIMER = 12, HOP_LIMIT = 64 };

static struct {
	const char *program, *device, *workload;
	unsigned size, window, qps;
} options;

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static unsigned char *source, *target;
static struct ibv_mr *source_mr, *target_mr;

UNUSED static void die(const char *what)
{
	fprintf(stderr, "%s: %s: %s\n", options.program, what, strerror(errno));
	exit(1);
}

UNUSED static void check(int err, const char *what)
{
	if (err) {
		errno = err > 0 ? err : errno;
		die(what);
	}
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---------------------------------------------------------------- the device */

static void parse(int argc, char **argv)
{
	options.program = argv[0];
	if (argc != 6) {
		fprintf(stderr, "usage: %s DEVICE WORKLOAD SIZE WINDOW QPS\n", argv[0]);
		exit(2);
	}
	options.device = argv[1];
	options.workload = argv[2];
	options.size = (unsigned)strtoul(argv[3], NULL, 10);
	options.window = (unsigned)strtoul(argv[4], NULL, 10);
	options.qps = (unsigned)strtoul(argv[5], NULL, 10);
	if (!options.size || !options.window || !options.qps) {
		fprintf(stderr, "%s: SIZE, WINDOW and QPS are numbers from 1\n", argv[0]);
		exit(2);
	}
}

static bool workload_is(const char *name)
{
	return !strcmp(options.workload, name);
}

UNUSED static void open_device(void)
{
	int n = 0;
	struct ibv_device **list = ibv_get_device_list(&n);

	for (int i = 0; list && i < n && !ctx; i++)
		if (!strcmp(ibv_get_device_name(list[i]), options.device))
			ctx = ibv_open_device(list[i]);
	if (!ctx) {
		fprintf(stderr, "%s: no device %s\n", options.program, options.device);
		exit(1);
	}
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(ctx);
	if (!pd)
		die("ibv_alloc_pd");
}

static void *page_aligned(size_t bytes)
{
	void *found = aligned_alloc(PAGE, (bytes + PAGE - 1) & ~(size_t)(PAGE - 1));

	if (!found)
		die("aligned_alloc");
	memset(found, 0x5a, bytes);
	return found;
}

UNUSED static void make_memory(size_t source_bytes, size_t target_bytes)
{
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

	source = page_aligned(source_bytes);
	target = page_aligned(target_bytes);
	source_mr = ibv_reg_mr(pd, source, source_bytes, access);
	target_mr = ibv_reg_mr(pd, target, target_bytes, access);
	if (!source_mr || !target_mr)
		die("ibv_reg_mr");
}

UNUSED static struct ibv_cq *make_cq(unsigned entries)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, (int)entries, NULL, NULL, 0);

	if (!cq)
		die("ibv_create_cq");
	return cq;
}

/* Of every contender's send queues. Small where there may be many, so that their number is all that differs. */
UNUSED static unsigned depth(void)
{
	if (workload_is("turns") || workload_is("regions") || workload_is("pages"))
		return 16;
	return options.window > 128 ? options.window : 128;
}

UNUSED static struct ibv_qp_init_attr_ex qp_wish(struct ibv_cq *send_cq, struct ibv_cq *recv_cq)
{
	return (struct ibv_qp_init_attr_ex){
		.send_cq = send_cq,
		.recv_cq = recv_cq,
		.cap = { .max_send_wr = depth(), .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1,
			 .max_inline_data = INLINE },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd,
	};
}

UNUSED static struct ibv_qp *make_qp(struct ibv_cq *send_cq, struct ibv_cq *recv_cq)
{
	struct ibv_qp_init_attr_ex wish = qp_wish(send_cq, recv_cq);
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &wish);

	if (!qp)
		die("ibv_create_qp_ex");
	return qp;
}

/* ---------------------------------------------------------------- connecting */

struct address {
	uint32_t qpn;
	uint16_t lid;
	uint8_t gid_index;
	union ibv_gid gid;
};

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

UNUSED static struct address own_address(uint32_t qpn)
{
	struct ibv_port_attr port;
	struct address own = { .qpn = qpn };

	check(ibv_query_port(ctx, PORT, &port), "ibv_query_port");
	own.lid = port.lid;
	own.gid_index = choose_gid(&own.gid);
	return own;
}

UNUSED static struct ibv_ah_attr path_to(const struct address *peer)
{
	struct ibv_port_attr port;
	struct ibv_ah_attr ah = { .port_num = PORT, .dlid = peer->lid };
	union ibv_gid own;

	check(ibv_query_port(ctx, PORT, &port), "ibv_query_port");
	if (port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		ah.is_global = 1;
		ah.grh.sgid_index = choose_gid(&own);
		ah.grh.dgid = peer->gid;
		ah.grh.hop_limit = HOP_LIMIT;
	}
	return ah;
}

UNUSED static void connect_qp(struct ibv_qp *qp, const struct address *peer)
{
	struct ibv_port_attr port;
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.dest_qp_num = peer->qpn,
		.min_rnr_timer = RNR_TIMER,
		.max_dest_rd_atomic = 1,
		.ah_attr = path_to(peer),
	};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.timeout = TIMEOUT,
		.retry_cnt = RETRIES,
		.rnr_retry = 7,
		.max_rd_atomic = 1,
	};

	check(ibv_query_port(ctx, PORT, &port), "ibv_query_port");
	rtr.path_mtu = port.active_mtu;
	check(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
	check(ibv_modify_qp(qp, &rtr,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
	      "RTR");
	check(ibv_modify_qp(qp, &rts,
			    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				    IBV_QP_MAX_QP_RD_ATOMIC),
	      "RTS");
}

UNUSED static void connect_both(struct ibv_qp *one, struct ibv_qp *other)
{
	struct address a = own_address(one->qp_num), b = own_address(other->qp_num);

	connect_qp(one, &b);
	connect_qp(other, &a);
}

/* ---------------------------------------------------------------- completions */

/* Polls until something is there. */
UNUSED static unsigned reap(struct ibv_cq *cq, int most)
{
	struct ibv_wc wc[POLL];
	int n;

	do
		n = ibv_poll_cq(cq, most, wc);
	while (!n);
	if (n < 0)
		die("ibv_poll_cq");
	for (int i = 0; i < n; i++)
		if (wc[i].status) {
			fprintf(stderr, "%s: an operation failed: %s\n", options.program, ibv_wc_status_str(wc[i].status));
			exit(1);
		}
	return (unsigned)n;
}

/* ---------------------------------------------------------------- the protocol */

/* Does OPS operations, or where they go in groups, some more; returns how many. */
typedef unsigned (*run_function)(unsigned ops);

UNUSED static int serve(run_function run)
{
	char line[64];

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		unsigned ops = 0;

		if (sscanf(line, "run %u", &ops) == 1 && ops) {
			uint64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID), began = clock_ns(CLOCK_MONOTONIC);
			unsigned done = run(ops);
			uint64_t ended = clock_ns(CLOCK_MONOTONIC);

			printf("{\"ns\": %" PRIu64 ", \"ops\": %u, \"cpu_ns\": %" PRIu64 "}\n", ended - began, done,
			       clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu);
		} else if (sscanf(line, "sample %u", &ops) == 1 && ops) {
			uint64_t *times = malloc((ops + 1) * sizeof(*times));

			if (!times)
				die("malloc");
			times[0] = clock_ns(CLOCK_MONOTONIC);
			for (unsigned i = 1; i <= ops; i++) {
				run(1);
				times[i] = clock_ns(CLOCK_MONOTONIC);
			}
			printf("{\"samples\": [");
			for (unsigned i = 1; i <= ops; i++)
				printf("%s%" PRIu64, i > 1 ? ", " : "", times[i] - times[i - 1]);
			printf("]}\n");
			free(times);
		} else {
			fprintf(stderr, "%s: not understood: %s", options.program, line);
			return 2;
		}
		fflush(stdout);
	}
	return 0;
}

UNUSED static int unknown_workload(void)
{
	fprintf(stderr, "%s: no workload %s\n", options.program, options.workload);
	return 2;
}

#endif

/* SPDX-License-Identifier: MIT
 * RDMA writes with ibv_post_send and ibv_poll_cq: the reference.
 *
 *   write      WINDOW in flight, each signalled, a new one for each that completes
 *   turns      the same, where QPS queue pairs take turns
 *   regions    the same, and ten times as many memory regions of SIZE take turns too; pages: each region on a page of its own
 *   batch      WINDOW at a time with one doorbell, the last one signalled
 *   write2     as write, to another process
 *   target     that other process
 */
#include "peer.h"

static struct ibv_cq *cq;
static struct ibv_qp **qps;
static struct ibv_sge sge;
static struct ibv_send_wr *wrs;
static struct ibv_sge *regions; /* `nregions` of them */
static unsigned nregions;

static void set_up_qps(unsigned n, bool pairs)
{
	cq = make_cq(options.window * 2 + 64);
	qps = calloc(n, sizeof(*qps));
	for (unsigned i = 0; qps && i < n; i++) {
		qps[i] = make_qp(cq, cq);
		if (pairs)
			connect_both(qps[i], make_qp(cq, cq));
	}
}

static void set_up_requests(uint64_t addr, uint32_t rkey, bool batch)
{
	sge = (struct ibv_sge){ .addr = (uintptr_t)source, .length = options.size, .lkey = source_mr->lkey };
	wrs = calloc(options.window, sizeof(*wrs));
	for (unsigned i = 0; wrs && i < options.window; i++) {
		bool last = i == options.window - 1;

		wrs[i] = (struct ibv_send_wr){
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.wr.rdma = { .remote_addr = addr, .rkey = rkey },
		};
		if (batch) { /* as aiordma's batches: not inline */
			wrs[i].send_flags = last ? IBV_SEND_SIGNALED : 0;
			wrs[i].next = last ? NULL : &wrs[i + 1];
		} else {
			wrs[i].send_flags = IBV_SEND_SIGNALED | (options.size <= INLINE ? IBV_SEND_INLINE : 0);
		}
	}
}

/* `apart` bytes from the beginning of one to the next one's, at least SIZE. */
static void set_up_regions(unsigned apart)
{
	unsigned char *memory;

	nregions = 10 * options.qps;
	memory = page_aligned((size_t)nregions * apart);
	regions = calloc(nregions, sizeof(*regions));
	for (unsigned i = 0; regions && i < nregions; i++) {
		unsigned char *at = memory + (size_t)i * apart;
		struct ibv_mr *mr = ibv_reg_mr(pd, at, options.size, IBV_ACCESS_LOCAL_WRITE);

		if (!mr)
			die("ibv_reg_mr");
		regions[i] = (struct ibv_sge){ .addr = (uintptr_t)at, .length = options.size, .lkey = mr->lkey };
	}
}

static void post(struct ibv_qp *qp)
{
	struct ibv_send_wr *bad;

	check(ibv_post_send(qp, wrs, &bad), "ibv_post_send");
}

static unsigned one_at_a_time(unsigned ops)
{
	for (unsigned i = 0; i < ops; i++) {
		post(qps[0]);
		reap(cq, 1);
	}
	return ops;
}

static unsigned windowed(unsigned ops)
{
	unsigned posted = 0, done = 0, turn = 0, region = 0;

	while (done < ops) {
		for (; posted < ops && posted - done < options.window; posted++) {
			if (nregions) {
				wrs->sg_list = &regions[region];
				region = region + 1 == nregions ? 0 : region + 1;
			}
			post(qps[turn]);
			turn = turn + 1 == options.qps ? 0 : turn + 1;
		}
		done += reap(cq, POLL);
	}
	return done;
}

static unsigned batches(unsigned ops)
{
	unsigned done = 0;

	while (done < ops) {
		post(qps[0]);
		reap(cq, 1);
		done += options.window;
	}
	return done;
}

int main(int argc, char **argv)
{
	bool batch, two, here, many;

	parse(argc, argv);
	batch = workload_is("batch");
	two = workload_is("write2");
	many = workload_is("regions") || workload_is("pages");
	here = !two && !workload_is("target");
	if (here && !batch && !many && !workload_is("write") && !workload_is("turns"))
		return unknown_workload();
	open_device();
	make_memory(options.size, options.size);
	set_up_qps(options.qps, here);
	if (workload_is("target"))
		return be_the_target(qps[0]);
	if (two) {
		struct offer offer = connect_to_target(qps[0]);

		set_up_requests(offer.addr, offer.rkey, false);
	} else {
		set_up_requests((uintptr_t)target, target_mr->rkey, batch);
		if (many)
			set_up_regions(workload_is("pages") ? PAGE : LINE);
	}
	return serve(batch ? batches : options.window == 1 ? one_at_a_time : windowed);
}

/* SPDX-License-Identifier: MIT
 * Send and receive, there and back; an operation is one message. Every send is signalled and its completion taken.
 *
 *   pingpong   two QPs of this process
 */
#include "harness.h"

static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qps[2];

static void receive(unsigned side)
{
	struct ibv_sge sge = { .addr = (uintptr_t)target, .length = options.size, .lkey = target_mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	check(ibv_post_recv(qps[side], &wr, &bad), "ibv_post_recv");
}

static void message(unsigned from)
{
	struct ibv_sge sge = { .addr = (uintptr_t)source, .length = options.size, .lkey = source_mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED | (options.size <= INLINE ? IBV_SEND_INLINE : 0),
	}, *bad;

	check(ibv_post_send(qps[from], &wr, &bad), "ibv_post_send");
	reap(recv_cq, 1);
	receive(!from);
	reap(send_cq, 1);
}

static unsigned run(unsigned ops)
{
	static unsigned turn;

	for (unsigned i = 0; i < ops; i++)
		message(turn++ & 1);
	return ops;
}

int main(int argc, char **argv)
{
	parse(argc, argv);
	if (!workload_is("pingpong"))
		return unknown_workload();
	open_device();
	make_memory(options.size, options.size);
	send_cq = make_cq(256);
	recv_cq = make_cq(256);
	for (unsigned i = 0; i < 2; i++)
		qps[i] = make_qp(send_cq, recv_cq);
	connect_both(qps[0], qps[1]);
	for (unsigned i = 0; i < 8; i++)
		receive(i & 1);
	return serve(run);
}

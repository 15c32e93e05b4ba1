/* SPDX-License-Identifier: MIT
 * Another process that owns the memory that is written to: this program again, as the workload "target". It tells its QP
 * and its memory on its standard output, is told the QP that connects to it on its standard input, and then sleeps until
 * that ends: the device does the rest.
 */
#ifndef AIORDMA_BENCH_PEER_H
#define AIORDMA_BENCH_PEER_H

#include "harness.h"

struct offer {
	struct address address;
	uint32_t rkey;
	uint64_t addr;
};

static void move(int fd, void *data, size_t bytes, ssize_t (*call)(int, void *, size_t))
{
	for (size_t done = 0; done < bytes;) {
		ssize_t n = call(fd, (char *)data + done, bytes - done);

		if (n <= 0)
			die("the other process");
		done += (size_t)n;
	}
}

static ssize_t put(int fd, void *data, size_t bytes)
{
	return write(fd, data, bytes);
}

/* In the new process. */
static int be_the_target(struct ibv_qp *qp)
{
	struct offer offer = { .address = own_address(qp->qp_num), .rkey = target_mr->rkey, .addr = (uintptr_t)target };
	struct address peer;
	char end;

	move(1, &offer, sizeof(offer), put);
	move(0, &peer, sizeof(peer), read);
	connect_qp(qp, &peer);
	move(1, &offer, 1, put);
	while (read(0, &end, 1) > 0)
		;
	return 0;
}

/* In the first one: starts the other and connects to it. Its standard input ends with this process. */
static struct offer connect_to_target(struct ibv_qp *qp)
{
	int to[2], from[2];
	struct offer offer;
	struct address own = own_address(qp->qp_num);
	char size[16], ready;

	if (pipe(to) || pipe(from))
		die("pipe");
	snprintf(size, sizeof(size), "%u", options.size);
	switch (fork()) {
	case -1:
		die("fork");
		break;
	case 0:
		dup2(to[0], 0);
		dup2(from[1], 1);
		close(to[0]), close(to[1]), close(from[0]), close(from[1]);
		execl("/proc/self/exe", options.program, options.device, "target", size, "1", "1", (char *)NULL);
		_exit(127);
	}
	close(to[0]);
	close(from[1]);
	move(from[0], &offer, sizeof(offer), read);
	move(to[1], &own, sizeof(own), put);
	connect_qp(qp, &offer.address);
	move(from[0], &ready, 1, read);
	return offer;
}

#endif

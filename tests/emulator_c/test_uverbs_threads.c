/* SPDX-License-Identifier: MIT
 * Threads that send commands to one device node at the same time: objects come and go, are destroyed twice and while they are
 * in use, and the descriptor is closed under them. Every answer is one that the kernel could give. Also built with
 * -fsanitize=thread (tox -e tsan). */
#define _GNU_SOURCE
#include "control.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(x)                                                                          \
	do {                                                                              \
		if (!(x)) {                                                               \
			fprintf(stderr, "%s:%d: %s: not so\n", __FILE__, __LINE__, #x); \
			abort();                                                          \
		}                                                                         \
	} while (0)

enum { THREADS = 6, ROUNDS = 300, SHARED = 8 };

static int node;
static uint32_t shared_mr[SHARED];

static int command(int fd, uint32_t number, void *request, size_t size, void *response, size_t response_size)
{
	uint8_t buf[512] = { 0 };
	struct ib_uverbs_cmd_hdr h = { number, (uint16_t)((sizeof(h) + size) / 4), (uint16_t)(response_size / 4) };
	uint64_t address = (uintptr_t)response;

	CHECK(sizeof(h) + size <= sizeof(buf));
	if (response_size)
		memcpy(request, &address, sizeof(address)); /* each request with a response begins with its place */
	memcpy(buf, &h, sizeof(h));
	memcpy(buf + sizeof(h), request, size);
	if (emu_hook_write(fd, buf, sizeof(h) + size) >= 0)
		return 0;
	return errno;
}

static int get_context(int fd)
{
	struct {
		struct ib_uverbs_get_context core;
		struct mlx5_ib_alloc_ucontext_req_v2 mlx5;
	} request = { .mlx5 = { .total_num_bfregs = 16, .num_low_latency_bfregs = 4, .flags = 1, .max_cqe_version = 1 } };
	struct {
		struct ib_uverbs_get_context_resp core;
		struct mlx5_ib_alloc_ucontext_resp mlx5;
	} response;

	return command(fd, IB_USER_VERBS_CMD_GET_CONTEXT, &request, sizeof(request), &response, sizeof(response));
}

static int alloc_pd(int fd, uint32_t *handle)
{
	struct {
		struct ib_uverbs_alloc_pd core;
	} request = { 0 };
	struct {
		struct ib_uverbs_alloc_pd_resp core;
		struct mlx5_ib_alloc_pd_resp mlx5;
	} response = { 0 };
	int err = command(fd, IB_USER_VERBS_CMD_ALLOC_PD, &request, sizeof(request), &response, sizeof(response));

	*handle = response.core.pd_handle;
	return err;
}

static int dealloc_pd(int fd, uint32_t handle)
{
	struct ib_uverbs_dealloc_pd request = { .pd_handle = handle };

	return command(fd, IB_USER_VERBS_CMD_DEALLOC_PD, &request, sizeof(request), NULL, 0);
}

static int reg_mr(int fd, uint32_t pd, void *p, size_t len, uint32_t *handle)
{
	struct ib_uverbs_reg_mr request = {
		.start = (uintptr_t)p, .length = len, .hca_va = (uintptr_t)p, .pd_handle = pd, .access_flags = 7,
	};
	struct ib_uverbs_reg_mr_resp response = { 0 };
	int err = command(fd, IB_USER_VERBS_CMD_REG_MR, &request, sizeof(request), &response, sizeof(response));

	*handle = response.mr_handle;
	return err;
}

static int dereg_mr(int fd, uint32_t handle)
{
	struct ib_uverbs_dereg_mr request = { .mr_handle = handle };

	return command(fd, IB_USER_VERBS_CMD_DEREG_MR, &request, sizeof(request), NULL, 0);
}

static int create_channel(int fd, int *channel)
{
	struct ib_uverbs_create_comp_channel request = { 0 };
	struct ib_uverbs_create_comp_channel_resp response = { 0 };
	int err = command(fd, IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, &request, sizeof(request), &response, sizeof(response));

	*channel = (int)response.fd;
	return err;
}

/* libmlx5 has the ring and the record on pages of its own. */
static int create_cq(int fd, uint8_t *page, int channel, uint32_t *handle)
{
	struct {
		struct ib_uverbs_create_cq core;
		struct mlx5_ib_create_cq mlx5;
	} request = {
		.core = { .cqe = 15, .comp_channel = channel },
		.mlx5 = { .buf_addr = (uintptr_t)page, .db_addr = (uintptr_t)page + 2048, .cqe_size = 64 },
	};
	struct {
		struct ib_uverbs_create_cq_resp core;
		struct mlx5_ib_create_cq_resp mlx5;
	} response = { 0 };
	int err = command(fd, IB_USER_VERBS_CMD_CREATE_CQ, &request, sizeof(request), &response, sizeof(response));

	*handle = response.core.cq_handle;
	return err;
}

static int destroy_cq(int fd, uint32_t handle)
{
	struct ib_uverbs_destroy_cq request = { .cq_handle = handle };
	struct ib_uverbs_destroy_cq_resp response;

	return command(fd, IB_USER_VERBS_CMD_DESTROY_CQ, &request, sizeof(request), &response, sizeof(response));
}

static bool among(int err, int a, int b, int c)
{
	return err == a || err == b || err == c;
}

/* Objects of its own, and regions that all threads register and destroy as they like. */
static void *storm(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)arg;
	uint8_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(page != MAP_FAILED);
	for (unsigned round = 0; round < ROUNDS; round++) {
		uint32_t pd, mr, cq, other, *shared = &shared_mr[(unsigned)rand_r(&seed) % SHARED];
		int channel;

		CHECK(!alloc_pd(node, &pd));
		CHECK(!reg_mr(node, pd, page, 4096, &mr));
		CHECK(dealloc_pd(node, pd) == EBUSY);
		CHECK(reg_mr(node, pd, (void *)8, 4096, &other) == EFAULT);
		CHECK(!create_channel(node, &channel));
		CHECK(!create_cq(node, page, channel, &cq));
		/* Its number may be anybody's by now. */
		other = __atomic_load_n(shared, __ATOMIC_RELAXED);
		CHECK(among(other == mr || other == UINT32_MAX ? 0 : dereg_mr(node, other), 0, ENOENT, EINVAL) || errno == EBUSY);
		if (rand_r(&seed) % 2)
			emu_hook_close(channel); /* before the CQ that uses it */
		/* Somebody may have taken it for a region that was registered here before: never a CQ, which is no region. */
		CHECK(!destroy_cq(node, cq));
		CHECK(among(destroy_cq(node, cq), ENOENT, EINVAL, 0));
		emu_hook_close(channel);
		CHECK(among(dereg_mr(node, mr), 0, ENOENT, EINVAL));
		CHECK(among(dealloc_pd(node, pd), 0, EBUSY, ENOENT));
		if (!alloc_pd(node, &pd) && !reg_mr(node, pd, page, 64, &mr))
			__atomic_store_n(shared, mr, __ATOMIC_RELAXED);
	}
	munmap(page, 4096);
	return NULL;
}

/* Commands on a descriptor that somebody closes. */
static void *until_closed(void *arg)
{
	int fd = (int)(intptr_t)arg, err;
	uint32_t pd;

	while (!(err = alloc_pd(fd, &pd)))
		;
	/* Closed; or the number is that of another file by now, which knows no such command. */
	CHECK(among(err, EBADF, EINVAL, ENOMEM));
	return NULL;
}

static void run(void *(*f)(void *), void *(*argument)(unsigned))
{
	pthread_t t[THREADS];

	for (unsigned i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&t[i], NULL, f, argument(i)));
	for (unsigned i = 0; i < THREADS; i++)
		CHECK(!pthread_join(t[i], NULL));
}

static void *seed_of(unsigned i)
{
	return (void *)(uintptr_t)(i + 1);
}

static int open_node(void)
{
	int fd = emu_hook_open("/dev/infiniband/uverbs0", O_RDWR | O_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK(!get_context(fd));
	return fd;
}

static void closed_under_them(void)
{
	for (unsigned round = 0; round < 20; round++) {
		pthread_t t[THREADS];
		int fd = open_node();

		for (unsigned i = 0; i < THREADS; i++)
			CHECK(!pthread_create(&t[i], NULL, until_closed, (void *)(intptr_t)fd));
		usleep(500);
		CHECK(!emu_hook_close(fd));
		for (unsigned i = 0; i < THREADS; i++)
			CHECK(!pthread_join(t[i], NULL));
	}
}

int main(void)
{
	char error[200];

	if (aiordma_emu_configure("reach_host 0\ndevice mlx5_0 0000000000000001\nport 1 gids 4\ngid 1 0 fe80::1 v2 lo\n", error, sizeof(error))) {
		fprintf(stderr, "%s\n", error);
		return 1;
	}
	for (unsigned i = 0; i < SHARED; i++)
		shared_mr[i] = UINT32_MAX;
	node = open_node();
	run(storm, seed_of);
	CHECK(!emu_hook_close(node));
	closed_under_them();
	CHECK(!emu_open_contexts());
	return 0;
}

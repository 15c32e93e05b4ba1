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

#define CHECK_EQ(a, b)                                                                                        \
	do {                                                                                                  \
		long long a_ = (long long)(a), b_ = (long long)(b);                                           \
		if (a_ != b_) {                                                                               \
			fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #a, a_, b_);     \
			abort();                                                                              \
		}                                                                                             \
	} while (0)

enum { THREADS = 6, ROUNDS = 300 };

static int node;

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

/* Objects of its own. */
static void *storm(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)arg;
	uint8_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(page != MAP_FAILED);
	for (unsigned round = 0; round < ROUNDS; round++) {
		bool early = rand_r(&seed) % 2;
		uint32_t pd, mr, cq, none;
		int channel;

		CHECK_EQ(alloc_pd(node, &pd), 0);
		CHECK_EQ(reg_mr(node, pd, page, 4096, &mr), 0);
		CHECK_EQ(dealloc_pd(node, pd), EBUSY);
		CHECK_EQ(reg_mr(node, pd, (void *)8, 4096, &none), EFAULT);
		CHECK_EQ(create_channel(node, &channel), 0);
		CHECK_EQ(create_cq(node, page, channel, &cq), 0);
		if (early)
			emu_hook_close(channel); /* before the CQ that uses it */
		CHECK_EQ(destroy_cq(node, cq), 0);
		if (!early)
			emu_hook_close(channel);
		CHECK_EQ(dereg_mr(node, mr), 0);
		CHECK_EQ(dealloc_pd(node, pd), 0);
	}
	munmap(page, 4096);
	return NULL;
}

/* The same object, destroyed by all threads at once: it's there for one of them. */
static pthread_barrier_t barrier;
static uint32_t victim_pd, victim_mr, victim_cq, destroyed[3];

static void count(unsigned which, int err)
{
	CHECK(among(err, 0, ENOENT, EINVAL));
	if (!err)
		__atomic_add_fetch(&destroyed[which], 1, __ATOMIC_RELAXED);
}

static void *destroyer(void *arg)
{
	uint8_t *page = NULL;
	int channel = -1;

	if (arg) {
		page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(page != MAP_FAILED);
		CHECK_EQ(create_channel(node, &channel), 0);
	}
	for (unsigned round = 1; round <= ROUNDS / 3; round++) {
		if (arg) {
			CHECK_EQ(alloc_pd(node, &victim_pd), 0);
			CHECK_EQ(reg_mr(node, victim_pd, page, 4096, &victim_mr), 0);
			CHECK_EQ(create_cq(node, page, channel, &victim_cq), 0);
		}
		pthread_barrier_wait(&barrier);
		count(0, dereg_mr(node, victim_mr));
		count(1, destroy_cq(node, victim_cq));
		pthread_barrier_wait(&barrier);
		count(2, dealloc_pd(node, victim_pd));
		pthread_barrier_wait(&barrier);
		for (unsigned i = 0; i < 3; i++)
			CHECK_EQ(__atomic_load_n(&destroyed[i], __ATOMIC_RELAXED), round);
		pthread_barrier_wait(&barrier);
	}
	if (arg) {
		emu_hook_close(channel);
		munmap(page, 4096);
	}
	return NULL;
}

#ifndef __SANITIZE_THREAD__ /* see main() */
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

#endif

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

static void *is_first(unsigned i)
{
	return i ? NULL : &node;
}

static int open_node(void)
{
	int fd = emu_hook_open("/dev/infiniband/uverbs0", O_RDWR | O_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK(!get_context(fd));
	return fd;
}

#ifndef __SANITIZE_THREAD__
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
#endif

int main(void)
{
	char error[200];

	if (aiordma_emu_configure("reach_host 0\ndevice mlx5_0 0000000000000001\nport 1 gids 4\ngid 1 0 fe80::1 v2 lo\n", error, sizeof(error))) {
		fprintf(stderr, "%s\n", error);
		return 1;
	}
	node = open_node();
	run(storm, seed_of);
	CHECK(!pthread_barrier_init(&barrier, NULL, THREADS));
	run(destroyer, is_first);
	pthread_barrier_destroy(&barrier);
	CHECK(!emu_hook_close(node));
#ifndef __SANITIZE_THREAD__ /* the use of a number whose file was closed is a race to it, and just what is tested */
	closed_under_them();
#endif
	CHECK(!emu_open_contexts());
	return 0;
}

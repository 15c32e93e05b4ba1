/* SPDX-License-Identifier: MIT
 * A world for tests of the emulator's data half: devices, queues and keys in plain memory, as the library and the
 * control half would have set them up, and the library's part of posting and polling written by hand.
 */
#ifndef NIC_WORLD_H
#define NIC_WORLD_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/mlx5dv.h>

#include "emu.h"
#include "nic.h"

#define CHECK(x)                                                                          \
	do {                                                                              \
		if (!(x)) {                                                               \
			fprintf(stderr, "%s:%d: %s: not so\n", __FILE__, __LINE__, #x); \
			abort();                                                          \
		}                                                                         \
	} while (0)

#define CHECK_EQ(a, b)                                                                                   \
	do {                                                                                             \
		long long a_ = (long long)(a), b_ = (long long)(b);                                      \
		if (a_ != b_) {                                                                          \
			fprintf(stderr, "%s:%d: %s is %lld (0x%llx), not %lld\n", __FILE__, __LINE__, #a, a_, a_, b_); \
			abort();                                                                         \
		}                                                                                        \
	} while (0)

/* How long anything is waited for that must come. A machine may have other things to do for seconds; only what never comes
 * takes as long as this. */
#define PATIENCE_MS 60000u
#define PATIENCE_US (PATIENCE_MS * 1000ull)

/* A time of microseconds that can't have been shorter, by the device's clock: no timer runs out early. How much longer it was
 * is the machine's affair, unless it's another unit. */
#define CHECK_TIME(t, least)                                                                                        \
	do {                                                                                                        \
		unsigned long long t_ = (t);                                                                        \
		if (t_ < (least) || t_ > 500ull * (least)) {                                                        \
			fprintf(stderr, "%s:%d: %s is %llu us, not %d\n", __FILE__, __LINE__, #t, t_, (least));    \
			abort();                                                                                    \
		}                                                                                                   \
	} while (0)

#define ALL_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

/* What one application has of one device. */
struct app {
	struct emu_device *dev;
	struct emu_ucontext ctx;
	struct emu_channel async;
	struct emu_pd pd;
	struct emu_uar uar;
	unsigned bf; /* half of the BlueFlame register to use next */
};

struct tcq {
	struct emu_cq cq;
	struct app *app;
	uint32_t ci, sn;
	uint32_t db[16] __attribute__((aligned(64)));
};

struct tsrq {
	struct emu_srq srq;
	uint32_t head, posted;
	uint32_t db[16] __attribute__((aligned(64)));
};

struct tqp {
	struct emu_qp qp;
	struct app *app;
	struct tcq *scq, *rcq;
	uint32_t sq_pi, rq_pi;
	uint32_t db[16] __attribute__((aligned(64)));
};

struct tmr {
	struct emu_mkey m;
	uint8_t *p;
};

struct wc {
	uint8_t op, syndrome, wqe_op;
	bool solicited;
	uint32_t uidx, qpn, bytes, imm, src_qpn;
	uint16_t counter;
};

struct sge {
	void *p;
	uint32_t len, key;
};

struct wr {
	uint8_t opcode, opmod;
	bool unsignalled, solicited, fence;
	uint32_t imm; /* host order */
	uint64_t raddr;
	uint32_t rkey;
	uint64_t swap_add, compare;
	const struct sge *sg;
	uint32_t nsg;
	const void *inl;
	uint32_t ninl;
	/* datagrams, DC, XRC */
	uint32_t dqpn, qkey, srqn;
	uint64_t dc_key;
	uint16_t stream;
	const union ibv_gid *dgid;
	/* anything else: used instead of all above but opcode */
	const void *raw;
	uint32_t nraw; /* bytes after the control segment */
	int ds;	       /* what to claim, if not what it is; 0: the truth */
};

void world_open(unsigned ndevices);
void world_close(void);
void app_open(struct app *, unsigned device);
void app_close(struct app *);
union ibv_gid device_gid(unsigned device);

void cq_new(struct tcq *, struct app *, uint32_t ncqe, struct emu_channel *);
void cq_free(struct tcq *);
bool cq_poll(struct tcq *, struct wc *);
void cq_wait(struct tcq *, struct wc *); /* PATIENCE_MS, then it's a failure */
void cq_expect_nothing(struct tcq *, unsigned ms);
void cq_arm(struct tcq *, bool solicited);

void mr_new(struct tmr *, struct app *, void *, size_t, uint32_t access);
void mr_free(struct tmr *);

void srq_new(struct tsrq *, struct app *, uint32_t n, uint32_t max_sge);
void srq_free(struct tsrq *);
void srq_post(struct tsrq *, const struct sge *, uint32_t n);

struct qp_opts {
	uint8_t type;
	uint32_t sq_nbb, rq_nwqe, rq_sge;
	struct tsrq *srq;
	bool dci, dct;
	uint8_t log_num_concurrent, log_num_errored; /* DCI streams */
};
void qp_new(struct tqp *, struct app *, struct tcq *scq, struct tcq *rcq, struct qp_opts);
void qp_free(struct tqp *);
void qp_state(struct tqp *, uint8_t state);
uint8_t qp_state_now(struct tqp *);
void qp_set_peer(struct tqp *, unsigned device, uint32_t qpn);
void qp_to_rts(struct tqp *); /* through INIT and RTR, with what is set in qp->qp */
void qp_connect(struct tqp *, struct tqp *);
void qp_post(struct tqp *, const struct wr *);
void qp_post_quietly(struct tqp *, const struct wr *); /* rings no doorbell */
void qp_recv(struct tqp *, const struct sge *, uint32_t n);

/* The next event of the context: its type, or -1 if none comes within ms. */
int async_event(struct app *, uint64_t *element, unsigned ms);
bool channel_readable(struct emu_channel *, unsigned ms);
uint64_t channel_read(struct emu_channel *);

pid_t start_process(void); /* fork(), and the child ends with its parent: if one fails all end */
void remove_folder(const char *);

uint64_t monotonic_us(void);
void sleep_ms(unsigned ms);

#endif

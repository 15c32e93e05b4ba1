/* SPDX-License-Identifier: MIT
 * Unreliable datagrams and connections. */
#include "nic_world.h"

static struct app app[2];
static struct tcq scq[2], rcq[2];
static struct tqp qp[2];
static struct tmr mr[2];
static uint8_t mem[2][1 << 20];
static union ibv_gid gid;

static void open_all(uint8_t type)
{
	for (unsigned i = 0; i < 2; i++) {
		app_open(&app[i], i);
		cq_new(&scq[i], &app[i], 64, NULL);
		cq_new(&rcq[i], &app[i], 64, NULL);
		mr_new(&mr[i], &app[i], mem[i], sizeof(mem[i]), ALL_ACCESS);
		qp_new(&qp[i], &app[i], &scq[i], &rcq[i], (struct qp_opts){ .type = type });
		qp[i].qp.qkey = 0x1111;
	}
	memset(mem, 0, sizeof(mem));
	for (unsigned k = 0; k < sizeof(mem[0]); k++)
		mem[0][k] = (uint8_t)(k * 5 + 1);
	if (type == IBV_QPT_UC) {
		qp_connect(&qp[0], &qp[1]);
	} else {
		qp_to_rts(&qp[0]);
		qp_to_rts(&qp[1]);
	}
	gid = device_gid(1);
}

static void close_all(void)
{
	for (unsigned i = 0; i < 2; i++) {
		qp_free(&qp[i]);
		cq_free(&scq[i]);
		cq_free(&rcq[i]);
		mr_free(&mr[i]);
		app_close(&app[i]);
	}
}

static void recv_at(uint32_t off, uint32_t len)
{
	struct sge s = { mem[1] + off, len, mr[1].m.key };

	qp_recv(&qp[1], &s, 1);
}

static void sent(uint8_t syndrome)
{
	struct wc wc;

	cq_wait(&scq[0], &wc);
	CHECK_EQ(wc.syndrome, syndrome);
}

static struct wr datagram(const struct sge *s, uint32_t n)
{
	return (struct wr){
		.opcode = MLX5_OPCODE_SEND_IMM, .sg = s, .nsg = n, .imm = 77, .dqpn = qp[1].qp.qpn, .qkey = 0x1111,
		.dgid = &gid,
	};
}

static void datagrams(void)
{
	struct sge s = { mem[0], 4096, mr[0].m.key };
	static const uint8_t ip[20] = { 0x45, [8] = 64, [9] = 17, [12] = 10, [15] = 1, [16] = 10, [19] = 2 };
	struct wr w;
	struct wc wc;

	open_all(IBV_QPT_UD);
	s.key = mr[0].m.key;
	w = datagram(&s, 1);
	recv_at(0, 4136);
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_SEND_IMM);
	CHECK_EQ(wc.bytes, 4136);
	CHECK_EQ(wc.imm, 77);
	CHECK_EQ(wc.src_qpn, qp[0].qp.qpn);
	CHECK(!memcmp(mem[1] + 40, mem[0], 4096));
	/* The IPv4 header of RoCE v2, in the last 20 of the 40 bytes; its length and checksum aren't compared. */
	CHECK_EQ(mem[1][20], ip[0]);
	CHECK(!memcmp(mem[1] + 28, ip + 8, 2));
	CHECK(!memcmp(mem[1] + 32, ip + 12, 8));

	/* Empty, and inline. */
	w = datagram(NULL, 0);
	recv_at(0, 40);
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.bytes, 40);
	w.inl = "hello";
	w.ninl = 5;
	recv_at(0, 45);
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);
	CHECK(!memcmp(mem[1] + 40, "hello", 5));

	/* Into the void, without a complaint: wrong key, wrong QP, nowhere, no receive posted. */
	w.qkey = 5;
	recv_at(0, 4096);
	qp_post(&qp[0], &w);
	sent(0);
	w.qkey = 0x1111;
	w.dqpn ^= 0x800;
	qp_post(&qp[0], &w);
	sent(0);
	w.dqpn ^= 0x800;
	gid.raw[15] = 9;
	qp_post(&qp[0], &w);
	sent(0);
	gid = device_gid(1);
	cq_expect_nothing(&rcq[1], 3);
	w.qkey = 0x80000000; /* the QP's own */
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);
	qp_post(&qp[0], &w);
	sent(0);
	cq_expect_nothing(&rcq[1], 3);

	/* Too long for a packet: an error of the sender, which stops, until it's told to go on. */
	s.len = 4097;
	w = datagram(&s, 1);
	qp_post(&qp[0], &w);
	sent(MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	qp_post(&qp[0], &w);
	sent(MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	CHECK_EQ(qp_state_now(&qp[0]), IBV_QPS_SQE);
	s.len = 10;
	qp_state(&qp[0], IBV_QPS_RTS);
	recv_at(0, 4096);
	w = datagram(&s, 1);
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);

	/* Too long for the buffer: an error of the receiver's. */
	recv_at(0, 49);
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.syndrome, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	/* What a datagram can't do. */
	w.opcode = MLX5_OPCODE_RDMA_WRITE;
	qp_post(&qp[0], &w);
	sent(MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
	close_all();
}

static void connections(void)
{
	struct sge s = { mem[0], sizeof(mem[0]), 0 };
	struct wr w;
	struct wc wc;

	open_all(IBV_QPT_UC);
	s.key = mr[0].m.key;
	w = (struct wr){ .opcode = MLX5_OPCODE_RDMA_WRITE_IMM, .sg = &s, .nsg = 1, .raddr = (uintptr_t)mem[1],
			 .rkey = mr[1].m.key };
	recv_at(0, 8);
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.op, MLX5_CQE_RESP_WR_IMM);
	CHECK(!memcmp(mem[0], mem[1], sizeof(mem[0])));

	memset(mem[1], 0, sizeof(mem[1]));
	w.opcode = MLX5_OPCODE_SEND;
	recv_at(0, sizeof(mem[1]));
	qp_post(&qp[0], &w);
	sent(0);
	cq_wait(&rcq[1], &wc);
	CHECK_EQ(wc.bytes, sizeof(mem[1]));
	CHECK(!memcmp(mem[0], mem[1], sizeof(mem[0])));

	/* No receive, no right, a wrong key: dropped, and nobody is told. */
	qp_post(&qp[0], &w);
	sent(0);
	w.opcode = MLX5_OPCODE_RDMA_WRITE;
	w.rkey ^= 0x100;
	qp_post(&qp[0], &w);
	sent(0);
	CHECK_EQ(async_event(&app[1], NULL, 2), -1);
	CHECK_EQ(qp_state_now(&qp[1]), IBV_QPS_RTS);
	cq_expect_nothing(&rcq[1], 2);
	/* READ is for the reliable; and then the queue has stopped. */
	w.opcode = MLX5_OPCODE_RDMA_READ;
	qp_post(&qp[0], &w);
	sent(MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
	CHECK_EQ(qp_state_now(&qp[0]), IBV_QPS_SQE);
	close_all();
}

int main(void)
{
	world_open(2);
	datagrams();
	connections();
	world_close();
	return 0;
}

/* SPDX-License-Identifier: MIT
 * The sending end: turns one WQE into requests, and their answers into what happens to the WQE.
 *
 * A long message is sent in slices, one a step, so that a gigabyte on one QP doesn't stall the others, and a command that
 * takes a key or a QP away doesn't wait for it. */
#include <string.h>

#include "nic.h"
#include "wire.h"

static struct nic_sgl local, remote; /* only for the length of one call */

static bool reliable(const struct emu_qp *qp)
{
	return qp->type != IBV_QPT_UC && qp->type != IBV_QPT_UD;
}

/* ---------------------------------------------------------------- waiting */

/* RNR NAK timer codes, IBTA table 45, in units of 10 us: rxe_qp.c and rxe_comp.c have the same table. */
static const uint32_t rnr_timer_10us[32] = {
	65536, 1,   2,   3,   4,    6,	  8,	12,   16,   24,	  32,	48,   64,    96,    128,   192,
	256,   384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
};

static enum nic_step fail(uint8_t *syndrome, uint8_t value)
{
	*syndrome = value;
	return STEP_FAIL;
}

static void begin_stall(struct emu_qp *qp, enum emu_stall kind, uint8_t tries)
{
	if (qp->stall == kind)
		return;
	qp->stall = kind;
	qp->tries = tries;
}

/* The receiver had no receive posted: try again after its timer, rnr_retry times, 7 meaning for ever. */
static enum nic_step wait_rnr(struct emu_qp *qp, uint8_t timer, uint8_t *syndrome)
{
	begin_stall(qp, STALL_RNR, qp->rnr_retry);
	if (qp->rnr_retry != 7 && !qp->tries--)
		return fail(syndrome, MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);
	qp->deadline_ns = engine_deadline(rnr_timer_10us[timer & 31] * 10000ull);
	return STEP_WAIT;
}

/* 4.096 us * 2^timeout; a timeout of 0 means that the timer never runs out: man ibv_modify_qp. */
uint64_t requester_ack_deadline(const struct emu_qp *qp)
{
	return qp->timeout ? engine_deadline(4096ull << (qp->timeout & 31)) : UINT64_MAX;
}

/* No answer: the ack timer runs out, and the request goes out again, retry_cnt times. */
static enum nic_step wait_ack(struct emu_qp *qp, uint8_t *syndrome)
{
	bool again = qp->stall == STALL_ACK;

	begin_stall(qp, STALL_ACK, qp->retry_cnt);
	/* `tries` counts the sendings that are left; this one failed when its timer ends. */
	if (qp->timeout && again && !qp->tries--)
		return fail(syndrome, MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	qp->deadline_ns = requester_ack_deadline(qp);
	return STEP_WAIT;
}

/* The request is under way to another process. While that one lives and runs, so does the request: what a timeout counts
 * here are the sendings that a network would have needed; sent it was once. The unreliable wait only for their payload
 * to have been read. */
#define UNRELIABLE_NS 500000000ull

SELDOM_CALLED static enum nic_step wait_wire(struct emu_qp *qp, uint8_t *syndrome)
{
	struct nic_qp *n = nic(qp);

	if (qp->stall == STALL_NONE || !n->wire_waits) {
		n->wire_tries = reliable(qp) ? qp->retry_cnt : 0;
		/* A stall that has begun goes on, with its own count of tries, if the answer is another refusal. */
		if (qp->stall == STALL_NONE)
			qp->stall = STALL_WIRE;
	} else if (engine_now() < n->wire_deadline) {
		qp->deadline_ns = n->wire_deadline;
		return STEP_WAIT;
	} else if (!n->wire_tries--) {
		fabric_cancel(qp);
		n->wire_waits = false;
		if (reliable(qp))
			return fail(syndrome, MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
		qp->stall = STALL_NONE;
		return STEP_DONE;
	}
	n->wire_waits = true;
	n->wire_deadline = reliable(qp) ? requester_ack_deadline(qp) : engine_deadline(UNRELIABLE_NS);
	qp->deadline_ns = n->wire_deadline;
	return STEP_WAIT;
}

enum nic_step requester_lost(struct emu_qp *qp, uint8_t *syndrome)
{
	return reliable(qp) ? wait_ack(qp, syndrome) : STEP_DONE;
}

enum nic_step requester_not_ready(struct emu_qp *qp, uint8_t timer, uint8_t *syndrome)
{
	return wait_rnr(qp, timer, syndrome);
}

static enum nic_step after_reply(struct emu_qp *qp, enum nic_reply reply, uint8_t rnr_timer, uint8_t *syndrome)
{
	if (likely(reply == REPLY_ACK)) {
		qp->stall = STALL_NONE;
		return STEP_DONE;
	}
	if (reply == REPLY_PENDING)
		return wait_wire(qp, syndrome);
	if (reply == REPLY_BAD_SOURCE)
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	if (reply == REPLY_OUT_OF_REACH)
		return STEP_AGAIN;
	if (!reliable(qp))
		return STEP_DONE; /* sent, which is all that is promised */
	switch (reply) {
	case REPLY_RNR:
		return wait_rnr(qp, rnr_timer, syndrome);
	case REPLY_NAK_INVALID:
		return fail(syndrome, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
	case REPLY_NAK_ACCESS:
		return fail(syndrome, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	case REPLY_NAK_OPERATION:
		return fail(syndrome, MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
	default:
		return wait_ack(qp, syndrome);
	}
}

/* ---------------------------------------------------------------- addressing */

static void address_from_path(struct emu_qp *qp, const struct emu_path *path, struct nic_req *req)
{
	const struct emu_port_config *port = &qp->dev->ports[(path->port ? path->port : 1) - 1];
	const struct emu_gid *sgid = &port->gids[path->sgid_index < port->ngids ? path->sgid_index : 0];

	req->sgid = path->is_global ? &sgid->gid : NULL;
	req->dgid = &path->dgid;
	req->gid_type = sgid->type;
	req->traffic_class = path->traffic_class;
	req->hop_limit = path->hop_limit;
}

static struct nic_route connected_route(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);

	if (unlikely(!n->route.port_num))
		n->route = fabric_route(qp->dev, &qp->av, qp->dest_qpn);
	return n->route;
}

/* A datagram and a DC request carry their address in the WQE: mlx5_create_ah() in verbs.c says how it's packed. */
static struct nic_route datagram_route(struct emu_qp *qp, const struct nic_wqe *w, struct nic_req *req)
{
	static struct emu_path path;
	const struct mlx5_wqe_av *av = w->av;

	path = (struct emu_path){ .port = qp->av.port ? qp->av.port : 1 };
	req->dst_qpn = be32toh(av->dqp_dct) & 0xffffff;
	if (w->av_extended) {
		path.is_global = true;
		memcpy(path.dgid.raw, av->rgid, sizeof(path.dgid.raw));
		path.sgid_index = (uint8_t)(be32toh(av->grh_gid_fl) >> 20);
		path.traffic_class = av->tclass;
		path.hop_limit = av->hop_limit;
	}
	address_from_path(qp, &path, req);
	return fabric_route(qp->dev, &path, req->dst_qpn);
}

static struct nic_route route(struct emu_qp *qp, const struct nic_wqe *w, struct nic_req *req)
{
	if (!w->av) {
		req->dst_qpn = qp->dest_qpn;
		address_from_path(qp, &qp->av, req);
		return connected_route(qp);
	}
	if (qp->dci) {
		req->src_type = IBV_QPT_DRIVER;
		req->src_stream = w->stream;
		req->dc_key = be64toh(w->av->key.dc_key);
	} else {
		req->qkey = be32toh(w->av->key.qkey.qkey);
		if (req->qkey & 0x80000000u)
			req->qkey = qp->qkey; /* IBTA 10.2.5: the high bit asks for the QP's own */
	}
	return datagram_route(qp, w, req);
}

/* ---------------------------------------------------------------- requests */

static uint32_t packets(const struct emu_qp *qp, uint64_t len)
{
	unsigned shift = qp->mtu ? 7u + qp->mtu : 12u;

	return len ? (uint32_t)((len + (1ull << shift) - 1) >> shift) : 1;
}

static bool gather(struct emu_qp *qp, const struct nic_wqe *w, uint64_t off, uint64_t len, uint32_t rights)
{
	struct nic_access a = { qp->dev, qp->pd->pdn, qp->qpn, false, rights };

	sgl_reset(&local);
	return segs_translate(&a, w->seg, w->nseg, off, len, &local);
}

static bool under_way(const struct emu_qp *qp)
{
	return unlikely(nic(qp)->wire != WIRE_IDLE);
}

static enum nic_reply ask(struct emu_qp *qp, struct nic_route to, struct nic_req *req, struct nic_sgl *data,
			  uint8_t *rnr_timer)
{
	return under_way(qp) ? fabric_answer(qp, req, data, rnr_timer) : fabric_request(qp, to, req, data, rnr_timer);
}

static enum nic_step step_send(struct emu_qp *qp, struct nic_wqe *w, struct nic_route to, struct nic_req *req,
			       uint8_t *syndrome)
{
	enum nic_reply reply;
	uint8_t timer = 0;

	if (under_way(qp))
		reply = fabric_answer(qp, req, &local, &timer);
	else if (gather(qp, w, req->off, req->len, 0))
		reply = fabric_request(qp, to, req, &local, &timer);
	else
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	return after_reply(qp, reply, timer, syndrome);
}

static enum nic_step step_read(struct emu_qp *qp, struct nic_wqe *w, struct nic_route to, struct nic_req *req,
			       uint8_t *syndrome)
{
	uint8_t timer = 0;
	enum nic_reply reply = ask(qp, to, req, &remote, &timer);
	enum nic_step step = after_reply(qp, reply, timer, syndrome);

	if (step != STEP_DONE || !req->len)
		return step;
	if (!gather(qp, w, req->off, req->len, IBV_ACCESS_LOCAL_WRITE))
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	switch (nic_copy(&local, &remote, req->len)) {
	case COPY_GONE:
		/* An answer that can't be taken is none, and there won't be another. */
		nic(qp)->wire = WIRE_LOST;
		return wait_wire(qp, syndrome);
	case COPY_BARRED:
		/* It's asked for once more, as a NIC asks again for a READ's answer that was lost. */
		wire_bar(nic(qp)->wire_link, nic(qp)->wire_link->side);
		return STEP_AGAIN;
	case COPY_BAD_SOURCE:
		return fail(syndrome, MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
	case COPY_BAD_TARGET:
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	default:
		return STEP_DONE;
	}
}

static enum nic_step step_atomic(struct emu_qp *qp, struct nic_wqe *w, struct nic_route to, struct nic_req *req,
				 uint8_t *syndrome)
{
	uint64_t value = 0;
	uint8_t timer = 0;
	enum nic_step step;

	req->swap_add = w->swap_add;
	req->compare = w->compare;
	req->result = &value;
	step = after_reply(qp, ask(qp, to, req, NULL, &timer), timer, syndrome);
	if (step != STEP_DONE)
		return step;
	if (!gather(qp, w, 0, 8, IBV_ACCESS_LOCAL_WRITE))
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	sgl_reset(&remote);
	if (!sgl_add(&remote, (uint8_t *)&value, 8))
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
	if (fault_guard_copy(&local, &remote, 8) != COPY_DONE)
		return fail(syndrome, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	return STEP_DONE;
}

static uint8_t check_length(const struct emu_qp *qp, const struct nic_wqe *w)
{
	if (w->len > qp->dev->limits.max_msg_sz)
		return MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR;
	/* One packet is all a datagram has: IBTA 11.4.1.1. */
	if (qp->type == IBV_QPT_UD) {
		const struct emu_port_config *port = &qp->dev->ports[(qp->av.port ? qp->av.port : 1) - 1];

		if (w->len > 128ull << port->active_mtu)
			return MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR;
	}
	return 0;
}

static bool is_atomic(uint8_t opcode)
{
	return opcode == MLX5_OPCODE_ATOMIC_CS || opcode == MLX5_OPCODE_ATOMIC_FA;
}

/* A READ or atomic waits if as many are on their way as may be (max_rd_atomic, man ibv_modify_qp), and one with a fence if
 * there are any (man ibv_post_send). Without a fence a write may overtake a READ, by the book (IBTA 10.8.3.3); what hardware
 * answers it has read by then, so programs may not know. Here, bytes that the answer only points at are read later. */
static bool waits_for_reads(const struct emu_qp *qp, const struct nic_wqe *w)
{
	const struct nic_qp *n = nic(qp);

	/* What has begun has waited. */
	if (likely(!n->flight_reads) || qp->progress)
		return false;
	if (w->flags & NIC_FENCES)
		return true;
	if (w->opcode == MLX5_OPCODE_RDMA_READ)
		return n->flight_reads >= qp->rd_atomic;
	return n->flight_far || (is_atomic(w->opcode) && n->flight_reads >= qp->rd_atomic);
}

bool requester_may_launch(const struct emu_qp *qp, const struct nic_wqe *w)
{
	if ((qp->type != IBV_QPT_RC && qp->type != IBV_QPT_XRC_SEND) || qp->state != IBV_QPS_RTS || waits_for_reads(qp, w) ||
	    inject_any())
		return false;
	switch (w->opcode) {
	case MLX5_OPCODE_SEND:
	case MLX5_OPCODE_SEND_IMM:
	case MLX5_OPCODE_SEND_INVAL:
	case MLX5_OPCODE_RDMA_WRITE:
	case MLX5_OPCODE_RDMA_WRITE_IMM:
	case MLX5_OPCODE_RDMA_READ:
	case MLX5_OPCODE_ATOMIC_CS:
	case MLX5_OPCODE_ATOMIC_FA:
		return true;
	default:
		return false;
	}
}

bool requester_land(struct emu_qp *qp, const struct wire_flight *f)
{
	static struct nic_wqe w;
	uint64_t value = 0;

	if (wqe_decode_at(qp, f->ci, &w) || w.opcode != f->opcode || !wire_data(nic(qp)->wire_link, f, &remote, &value))
		return false;
	if (!f->len)
		return true;
	if (is_atomic(f->opcode)) {
		sgl_reset(&remote);
		if (!sgl_add(&remote, (uint8_t *)&value, 8))
			return false;
	}
	return gather(qp, &w, f->off, f->len, IBV_ACCESS_LOCAL_WRITE) && nic_copy(&local, &remote, f->len) == COPY_DONE;
}

/* Of long messages only so much is on its way that the other side has the next slice when it's done with one: whatever others
 * send it comes behind them. */
#define LONG_FLIGHTS 2u
#define LONG_FLIGHTS_IN_SLOTS 16u

static bool enough_on_its_way(const struct emu_qp *qp, const struct nic_req *req, uint64_t slice)
{
	return req->len != req->msg_len &&
	       nic(qp)->nflights >= (slice == WIRE_SLICE ? LONG_FLIGHTS : LONG_FLIGHTS_IN_SLOTS);
}

/* On a link, behind others. STEP_LANDING: only alone. */
SELDOM_CALLED static enum nic_step launch(struct emu_qp *qp, struct nic_wqe *w, struct wire_link *link, struct nic_req *req,
					  uint64_t slice)
{
	bool reads = w->opcode == MLX5_OPCODE_RDMA_READ || is_atomic(w->opcode);

	if (enough_on_its_way(qp, req, slice) || !requester_may_launch(qp, w) || qp->stall != STALL_NONE || !flight_room(qp) ||
	    !gather(qp, w, req->off, req->len, reads ? IBV_ACCESS_LOCAL_WRITE : 0))
		return STEP_LANDING;
	req->swap_add = w->swap_add;
	req->compare = w->compare;
	return flight_launch(qp, w, link, req, &local);
}

static enum nic_step step_transport(struct emu_qp *qp, struct nic_wqe *w, uint8_t *syndrome)
{
	uint64_t total = is_atomic(w->opcode) ? 8 : w->len;
	uint64_t left = total - qp->progress;
	struct nic_req req = {
		.opcode = w->opcode,
		.first = !qp->progress,
		.solicited = w->flags & MLX5_WQE_CTRL_SOLICITED,
		.imm = w->imm,
		.src_qpn = qp->qpn,
		.psn = nic(qp)->tx_psn,
		.packets = packets(qp, total),
		.src_type = qp->type,
		.src_mtu = qp->mtu,
		.msg_len = total,
		.off = qp->progress,
		.raddr = w->raddr,
		.rkey = w->rkey,
		.srqn = w->xrc_srqn,
	};
	struct nic_route to = { .port_num = 0 };
	enum nic_step step;
	uint64_t slice;

	if (!qp->progress) {
		*syndrome = check_length(qp, w);
		if (*syndrome)
			return nic(qp)->nflights ? STEP_LANDING : STEP_FAIL;
	}
	if (under_way(qp)) {
		slice = nic(qp)->wire_len;
	} else {
		to = route(qp, w, &req);
		slice = likely(to.port_num != ROUTE_LINK) ? NIC_SLICE : fabric_slice(to, &req);
	}
	req.last = left <= slice;
	req.len = req.last ? left : slice;
	if (unlikely(to.port_num == ROUTE_LINK)) {
		step = launch(qp, w, to.link, &req, slice);
		if (step != STEP_LANDING || nic(qp)->nflights)
			return step;
	}
	if (w->opcode == MLX5_OPCODE_RDMA_READ)
		step = step_read(qp, w, to, &req, syndrome);
	else if (is_atomic(w->opcode))
		step = step_atomic(qp, w, to, &req, syndrome);
	else
		step = step_send(qp, w, to, &req, syndrome);
	/* Only once for each way: wire_bar() and wire_reply() see to it. */
	if (step == STEP_AGAIN)
		return step_transport(qp, w, syndrome);
	if (step != STEP_DONE)
		return step;
	qp->progress += req.len;
	if (!req.last)
		return STEP_MORE;
	nic(qp)->tx_psn = (nic(qp)->tx_psn + req.packets) & 0xffffff;
	nic(qp)->tx_messages++;
	return STEP_DONE;
}

enum nic_step requester_step(struct emu_qp *qp, struct nic_wqe *w, uint8_t *syndrome)
{
	switch (w->opcode) {
	case MLX5_OPCODE_NOP:
		return STEP_DONE;
	case MLX5_OPCODE_UMR:
		return umr_step(qp, w, syndrome);
	case MLX5_OPCODE_MMO:
		return mmo_step(qp, w, syndrome);
	default:
		return step_transport(qp, w, syndrome);
	}
}

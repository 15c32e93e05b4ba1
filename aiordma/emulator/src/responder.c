/* SPDX-License-Identifier: MIT
 * The receiving end of a request: checks it, moves the data, completes receives, answers.
 *
 * Which fault is answered how follows the classes of responder errors in IBTA 9.9.3 as rxe's rxe_resp.c has them: on a
 * reliable connection it is told by a NAK and ends in ERR; an unreliable receiver drops the message in silence. */
#include <stdlib.h>
#include <string.h>

#include "nic.h"

static struct nic_sgl remote; /* where the request wants to read or write; only for the length of one call */

static bool reliable(const struct emu_qp *qp)
{
	return qp->type != IBV_QPT_UC && qp->type != IBV_QPT_UD;
}

/* A refusal takes a connection down. A DCT serves many senders and goes on. */
static enum nic_reply refuse(struct emu_qp *qp, enum nic_reply nak, uint32_t event)
{
	if (!reliable(qp))
		return REPLY_NONE;
	if (!qp->dct)
		qp_to_error(qp, event);
	return nak;
}

static enum nic_reply refuse_invalid(struct emu_qp *qp)
{
	return refuse(qp, REPLY_NAK_INVALID, IBV_EVENT_QP_REQ_ERR);
}

static struct emu_srq *request_srq(const struct emu_qp *qp, const struct nic_req *req)
{
	struct emu_srq *srq;

	if (qp->type != IBV_QPT_XRC_RECV)
		return qp->srq;
	srq = srq_find(qp->dev, req->srqn);
	return srq && srq->xrc ? srq : NULL;
}

/* Whose protection domain guards the memory: on an XRC connection that of the SRQ the request names. */
static uint32_t request_pdn(const struct emu_qp *qp, const struct nic_req *req)
{
	const struct emu_srq *srq = request_srq(qp, req);

	return qp->type == IBV_QPT_XRC_RECV && srq ? srq->pd->pdn : qp->pd->pdn;
}

/* ---------------------------------------------------------------- receives */

static void complete(struct emu_qp *qp, const struct nic_recv *r, struct nic_cqe *c)
{
	struct emu_cq *cq = qp->rcq;

	c->uidx = qp->uidx;
	c->qpn = qp->qpn;
	c->counter = r->counter;
	if (r->srq && r->srq->xrc) {
		/* An XRC SRQ completes on a CQ of its own, and the library finds it by its own index: get_resp_ctx_v1() in
		 * cq.c. */
		cq = r->srq->cq;
		c->uidx = r->srq->uidx;
	}
	cq_write_for(qp, cq, c);
}

static void complete_error(struct emu_qp *qp, struct nic_rx *rx, uint8_t syndrome)
{
	struct nic_cqe c = { .op = MLX5_CQE_RESP_ERR, .syndrome = syndrome };

	rx->recv.taken = rx->busy = false;
	complete(qp, &rx->recv, &c);
}

static enum nic_l3 l3_of(const struct nic_req *req)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	if (req->gid_type != IBV_GID_TYPE_ROCE_V2)
		return L3_GRH;
	return memcmp(req->dgid->raw, mapped, sizeof(mapped)) ? L3_IPV6 : L3_IPV4;
}

/* `extra`: bytes before the payload, where a datagram has its header. */
static void complete_receive(struct emu_qp *qp, struct nic_rx *rx, const struct nic_req *req, uint32_t extra)
{
	struct nic_cqe c = {
		.solicited = req->solicited,
		.bytes = (uint32_t)(req->msg_len + extra),
		.src_qpn = req->src_qpn,
		.grh = extra != 0,
		.l3 = extra ? l3_of(req) : L3_GRH,
	};

	switch (req->opcode) {
	case MLX5_OPCODE_RDMA_WRITE_IMM:
		c.op = MLX5_CQE_RESP_WR_IMM;
		c.imm = req->imm;
		break;
	case MLX5_OPCODE_SEND_IMM:
		c.op = MLX5_CQE_RESP_SEND_IMM;
		c.imm = req->imm;
		break;
	case MLX5_OPCODE_SEND_INVAL:
		c.op = MLX5_CQE_RESP_SEND_INV;
		c.imm = req->imm;
		break;
	default:
		c.op = MLX5_CQE_RESP_SEND;
	}
	rx->recv.taken = rx->busy = false;
	complete(qp, &rx->recv, &c);
}

/* The messages of a connection come one after the other. Those of many senders to one DCT are mixed. */
static struct nic_rx *rx_of(struct emu_qp *qp, const struct nic_req *req)
{
	struct nic_rx *rx = nic(qp)->rx, *unused = NULL;

	if (!qp->dct)
		return rx;
	for (; rx; rx = rx->next) {
		if (!rx->recv.taken)
			unused = rx;
		else if (rx->src_qpn == req->src_qpn && rx->src_stream == req->src_stream &&
			 !memcmp(rx->sgid.raw, req->sgid->raw, sizeof(rx->sgid.raw)))
			return rx;
	}
	rx = unused;
	if (!rx) {
		rx = calloc(1, sizeof(*rx));
		if (!rx)
			return NULL;
		rx->next = nic(qp)->rx;
		nic(qp)->rx = rx;
	}
	rx->src_qpn = req->src_qpn;
	rx->src_stream = req->src_stream;
	rx->sgid = *req->sgid;
	return rx;
}

/* Takes a receive WQE for the message that begins. */
static enum nic_reply take(struct emu_qp *qp, struct nic_rx *rx, const struct nic_req *req)
{
	/* One that a message which was never finished had taken serves the next one: rxe, class D1; the initiator of a
	 * DC connection that failed comes back; and so does a message of any kind whose payload was out of reach. */
	if (rx->recv.taken)
		return REPLY_ACK;
	if (!rq_take(qp, request_srq(qp, req), &rx->recv))
		return reliable(qp) ? REPLY_RNR : REPLY_NONE;
	rx->recv.taken = true;
	return REPLY_ACK;
}

static enum nic_reply too_long(struct emu_qp *qp, struct nic_rx *rx)
{
	complete_error(qp, rx, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	/* Its owner learns from the receive completion, so there is no event. */
	if (!qp->dct)
		qp_to_error(qp, 0);
	return reliable(qp) ? REPLY_NAK_INVALID : REPLY_NONE;
}

static enum nic_reply bad_buffer(struct emu_qp *qp, struct nic_rx *rx)
{
	complete_error(qp, rx, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	if (!qp->dct)
		qp_to_error(qp, 0);
	return reliable(qp) ? REPLY_NAK_OPERATION : REPLY_NONE;
}

static enum nic_reply scatter(struct emu_qp *qp, struct nic_rx *rx, uint64_t off, const struct nic_sgl *data,
			      uint64_t len)
{
	const struct nic_recv *r = &rx->recv;
	struct nic_access a = { qp->dev, r->pdn, qp->qpn, false, IBV_ACCESS_LOCAL_WRITE };

	if (!len)
		return REPLY_ACK;
	sgl_reset(&remote);
	if (!segs_translate(&a, r->seg, r->nseg, off, len, &remote))
		return bad_buffer(qp, rx);
	switch (nic_copy(&remote, data, len)) {
	case COPY_BAD_SOURCE:
		return REPLY_BAD_SOURCE;
	case COPY_GONE:
		return REPLY_NONE;
	case COPY_BARRED:
		return REPLY_OUT_OF_REACH;
	case COPY_BAD_TARGET:
		return bad_buffer(qp, rx);
	default:
		return REPLY_ACK;
	}
}

/* SEND with invalidate: IBTA 9.4.1.1.3. It takes a window of type 2 that this QP bound, or an mkey created for it
 * (MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE); never an MR's own key. */
static bool invalidate(struct emu_qp *qp, const struct nic_req *req)
{
	uint32_t key = be32toh(req->imm);
	struct emu_mkey *m = emu_mkey_find(qp->dev, key);

	if (!m || m->pdn != request_pdn(qp, req) || m->free)
		return false;
	if (m->o.type == EMU_MW ? m->bound_qpn != qp->qpn : !m->remote_invalidate)
		return false;
	m->free = true;
	return true;
}

static enum nic_reply receive_send(struct emu_qp *qp, struct nic_req *req, struct nic_sgl *data)
{
	struct nic_rx *rx = rx_of(qp, req);
	enum nic_reply done;

	if (!rx)
		return REPLY_NONE;
	if (req->first) {
		done = take(qp, rx, req);
		if (done != REPLY_ACK)
			return done;
		rx->busy = true;
		if (req->msg_len > rx->recv.capacity)
			return too_long(qp, rx);
	} else if (!rx->busy) {
		return REPLY_NONE; /* the rest of a message whose beginning was dropped */
	}
	done = scatter(qp, rx, req->off, data, req->len);
	if (done == REPLY_OUT_OF_REACH && req->first)
		rx->busy = false; /* it begins again, with the receive that it has */
	if (done != REPLY_ACK || !req->last)
		return done;
	if (req->opcode == MLX5_OPCODE_SEND_INVAL && !invalidate(qp, req)) {
		/* rxe, class J: the receive fails, the sender is not told. */
		complete_error(qp, rx, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
		if (!qp->dct)
			qp_to_error(qp, 0);
		return REPLY_ACK;
	}
	complete_receive(qp, rx, req, 0);
	return REPLY_ACK;
}

/* ---------------------------------------------------------------- one-sided */

/* May the QP's peer do this at all, and with this memory? What is outside the QP's own rights is an operation it doesn't
 * support: rxe, check_op_valid(). */
static enum nic_reply check_rights(struct emu_qp *qp, const struct nic_req *req, uint32_t rights)
{
	struct nic_access a = { qp->dev, request_pdn(qp, req), qp->qpn, true, rights };
	uint32_t allowed = qp->access;

	/* mlx5/qp.c, set_qpc_atomic_flags(): with no responder resources a QP serves no READ and no atomic.
	 * A DCT isn't told how many it has. */
	if (!qp->dest_rd_atomic && !qp->dct)
		allowed &= ~(uint32_t)(IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	if (rights & ~allowed)
		return refuse_invalid(qp);
	/* Of no bytes neither address nor key is looked at: IBTA 9.7.4.1.3, rxe check_rkey(). All of a long message is
	 * checked with every slice: the key may have gone meanwhile. */
	if (req->msg_len && !mkey_translate(&a, req->rkey, req->raddr, req->msg_len, NULL))
		return refuse(qp, REPLY_NAK_ACCESS, IBV_EVENT_QP_ACCESS_ERR);
	return REPLY_ACK;
}

static bool remote_slice(struct emu_qp *qp, const struct nic_req *req, uint32_t rights, struct nic_sgl *sgl)
{
	struct nic_access a = { qp->dev, request_pdn(qp, req), qp->qpn, true, rights };

	sgl_reset(sgl);
	return !req->len || mkey_translate(&a, req->rkey, req->raddr + req->off, req->len, sgl);
}

static enum nic_reply receive_write(struct emu_qp *qp, struct nic_req *req, struct nic_sgl *data)
{
	struct nic_rx *notify = req->opcode == MLX5_OPCODE_RDMA_WRITE_IMM && req->last ? rx_of(qp, req) : NULL;
	enum nic_reply got = check_rights(qp, req, IBV_ACCESS_REMOTE_WRITE);

	if (got != REPLY_ACK)
		return got;
	/* The packet with the immediate data, the last, is the one that needs a receive. */
	if (notify) {
		got = take(qp, notify, req);
		if (got != REPLY_ACK)
			return got;
	}
	if (!remote_slice(qp, req, IBV_ACCESS_REMOTE_WRITE, &remote))
		return refuse(qp, REPLY_NAK_ACCESS, IBV_EVENT_QP_ACCESS_ERR);
	switch (nic_copy(&remote, data, req->len)) {
	case COPY_BAD_SOURCE:
		return REPLY_BAD_SOURCE;
	case COPY_GONE:
		return REPLY_NONE;
	case COPY_BARRED:
		return REPLY_OUT_OF_REACH;
	case COPY_BAD_TARGET:
		return refuse(qp, REPLY_NAK_OPERATION, IBV_EVENT_QP_FATAL);
	default:
		break;
	}
	if (notify)
		complete_receive(qp, notify, req, 0);
	return REPLY_ACK;
}

static enum nic_reply receive_read(struct emu_qp *qp, struct nic_req *req, struct nic_sgl *data)
{
	enum nic_reply got = check_rights(qp, req, IBV_ACCESS_REMOTE_READ);

	if (got == REPLY_ACK && !remote_slice(qp, req, IBV_ACCESS_REMOTE_READ, data))
		return refuse(qp, REPLY_NAK_ACCESS, IBV_EVENT_QP_ACCESS_ERR);
	return got;
}

static enum nic_reply receive_atomic(struct emu_qp *qp, struct nic_req *req)
{
	static struct nic_sgl probe;
	enum nic_reply got;
	uint64_t *target;

	if (req->raddr & 7)
		return refuse_invalid(qp); /* IBTA 9.4.5.1; rxe, atomic_reply() */
	got = check_rights(qp, req, IBV_ACCESS_REMOTE_ATOMIC);
	if (got != REPLY_ACK)
		return got;
	if (!remote_slice(qp, req, IBV_ACCESS_REMOTE_ATOMIC, &remote))
		return refuse(qp, REPLY_NAK_ACCESS, IBV_EVENT_QP_ACCESS_ERR);
	/* A target in two pieces, or one whose memory isn't aligned as its address says, can't be done in one go. */
	if (remote.n != 1 || remote.v[0].len != 8 || ((uintptr_t)remote.v[0].p & 7))
		return refuse_invalid(qp);
	target = (uint64_t *)(void *)remote.v[0].p;
	/* Is it there? */
	sgl_reset(&probe);
	if (!sgl_add(&probe, (uint8_t *)req->result, 8) || fault_guard_copy(&probe, &remote, 8) != COPY_DONE)
		return refuse(qp, REPLY_NAK_OPERATION, IBV_EVENT_QP_FATAL);
	if (req->opcode == MLX5_OPCODE_ATOMIC_FA) {
		*req->result = __atomic_fetch_add(target, req->swap_add, __ATOMIC_SEQ_CST);
	} else {
		*req->result = req->compare;
		__atomic_compare_exchange_n(target, req->result, req->swap_add, false, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST);
	}
	nic(qp)->rx_result = *req->result;
	return REPLY_ACK;
}

/* ---------------------------------------------------------------- datagrams */

static void ipv4_checksum(uint8_t header[20])
{
	uint32_t sum = 0;

	for (uint32_t i = 0; i < 20; i += 2)
		sum += (uint32_t)header[i] << 8 | header[i + 1];
	sum = (sum & 0xffff) + (sum >> 16);
	sum = ~(sum + (sum >> 16));
	header[10] = (uint8_t)(sum >> 8);
	header[11] = (uint8_t)sum;
}

/* The 40 bytes before a datagram's payload: a GRH, which for RoCE v2 is the IP header; an IPv4 header lies in the last 20
 * of them (man ibv_post_recv, ibv_init_ah_from_wc()). */
static void make_grh(uint8_t grh[40], const struct nic_req *req)
{
	uint16_t payload = (uint16_t)(req->msg_len + 24); /* IB BTH, DETH and ICRC around it */

	memset(grh, 0, 40);
	if (l3_of(req) == L3_IPV4) {
		uint16_t total = (uint16_t)(payload + 8 + 20);

		grh += 20;
		grh[0] = 0x45;
		grh[1] = req->traffic_class;
		grh[2] = (uint8_t)(total >> 8);
		grh[3] = (uint8_t)total;
		grh[6] = 0x40; /* don't fragment */
		grh[8] = req->hop_limit;
		grh[9] = 17; /* UDP */
		memcpy(grh + 12, req->sgid->raw + 12, 4);
		memcpy(grh + 16, req->dgid->raw + 12, 4);
		ipv4_checksum(grh);
		return;
	}
	grh[0] = (uint8_t)(0x60 | req->traffic_class >> 4);
	grh[1] = (uint8_t)(req->traffic_class << 4);
	grh[4] = (uint8_t)(payload >> 8);
	grh[5] = (uint8_t)payload;
	grh[6] = req->gid_type == IBV_GID_TYPE_ROCE_V2 ? 17 : 0x1b; /* next header: UDP, or IBA transport */
	grh[7] = req->hop_limit;
	memcpy(grh + 8, req->sgid->raw, 16);
	memcpy(grh + 24, req->dgid->raw, 16);
}

static enum nic_reply receive_datagram(struct emu_qp *qp, struct nic_req *req, struct nic_sgl *data)
{
	struct nic_rx *rx = nic(qp)->rx;
	static struct nic_sgl header;
	enum nic_reply done;
	uint8_t grh[40];

	if (take(qp, rx, req) != REPLY_ACK)
		return REPLY_NONE;
	/* Room for the header is always used, whether there is one or not: IBTA 11.4.1.2. */
	if (req->msg_len + sizeof(grh) > rx->recv.capacity)
		return too_long(qp, rx);
	make_grh(grh, req);
	sgl_reset(&header);
	if (!sgl_add(&header, grh, sizeof(grh)))
		return REPLY_NONE;
	done = scatter(qp, rx, 0, &header, sizeof(grh));
	if (done == REPLY_ACK)
		done = scatter(qp, rx, sizeof(grh), data, req->len);
	if (done == REPLY_ACK)
		complete_receive(qp, rx, req, sizeof(grh));
	return done;
}

/* ---------------------------------------------------------------- in order */

/* Both ends cut a message into packets of their own path MTU's size, so what is longer than either's is not what the
 * other expects: a first packet must be of the receiver's MTU exactly, rxe check_length(). */
static bool mtu_differs(const struct emu_qp *qp, const struct nic_req *req)
{
	uint8_t smaller = qp->mtu < req->src_mtu ? qp->mtu : req->src_mtu;

	if (likely(qp->mtu == req->src_mtu))
		return false;
	return req->src_mtu >= NIC_REFUSE_INVALID || (smaller && req->msg_len > 128ull << smaller);
}

/* For that reason, or because it asks for it (inject_wqe.c). */
SELDOM_CALLED static enum nic_reply refuse_mtu(struct emu_qp *qp, uint8_t src_mtu)
{
	switch (src_mtu) {
	case NIC_REFUSE_ACCESS:
		return refuse(qp, REPLY_NAK_ACCESS, IBV_EVENT_QP_ACCESS_ERR);
	case NIC_REFUSE_OPERATION:
		return refuse(qp, REPLY_NAK_OPERATION, IBV_EVENT_QP_FATAL);
	default:
		return refuse_invalid(qp);
	}
}

/* The peer is in RTS already: what the CM would have told comes with the first message, IBTA 11.6.3.1. */
static void raise_established(struct emu_qp *qp)
{
	if (!nic(qp)->comm_est)
		qp_async_event(qp, IBV_EVENT_COMM_EST);
	nic(qp)->comm_est = true;
}

/* The last message once more, because its answer was lost (only inject_wqe.c loses answers): it's acknowledged and not done
 * again; an atomic's answer is the one that it had. READs are done again, the last and those before it: their bytes may have
 * been out of the asking side's reach. What is earlier and what is later is as in rxe: check_psn(), psn_compare(),
 * duplicate_request(). */
SELDOM_CALLED static enum nic_reply duplicate(struct emu_qp *qp, struct nic_req *req, struct nic_sgl *data)
{
	const struct nic_qp *n = nic(qp);
	uint32_t ago = (n->rx_psn - req->psn) & 0xffffff;
	bool last = ago == (req->packets & 0xffffff);
	bool earlier = ago > req->packets && ago < 1u << 23;

	if (!n->rx_messages || !(last || (earlier && req->opcode == MLX5_OPCODE_RDMA_READ)))
		return REPLY_NONE;
	switch (req->opcode) {
	case MLX5_OPCODE_RDMA_READ:
		return receive_read(qp, req, data);
	case MLX5_OPCODE_ATOMIC_CS:
	case MLX5_OPCODE_ATOMIC_FA:
		*req->result = n->rx_result;
		return REPLY_ACK;
	default:
		return REPLY_ACK;
	}
}

/* The one that a message names has to be there until it is whole, and each packet names it: an XRC SRQ isn't held by the QPs
 * that come to it. */
static bool srq_fits(const struct emu_qp *qp, const struct nic_req *req)
{
	const struct nic_rx *rx = nic(qp)->rx;
	const struct emu_srq *srq = request_srq(qp, req);

	return srq && (!rx->recv.taken || rx->recv.srq == srq);
}

/* Slices that are behind one which wasn't done aren't done either. A READ's may be asked for again, as in duplicate(). */
static bool follows(const struct emu_qp *qp, const struct nic_req *req)
{
	uint64_t next = nic(qp)->rx_off;

	return req->opcode == MLX5_OPCODE_RDMA_READ ? req->off <= next : req->off == next;
}

enum nic_reply responder_receive(struct emu_qp *qp, struct nic_req *req, struct nic_sgl *data)
{
	bool connected = qp->type == IBV_QPT_RC || qp->type == IBV_QPT_XRC_RECV;
	struct nic_qp *n = nic(qp);
	enum nic_reply reply;

	/* Packets out of sequence are asked for again, and with a wrong start of the sequence again and again, until the
	 * sender gives up: rxe check_psn(). */
	if (connected && req->psn != n->rx_psn)
		return duplicate(qp, req, data);
	if (qp->type == IBV_QPT_XRC_RECV && !srq_fits(qp, req))
		return refuse_invalid(qp);
	if (req->first && connected && n->rx->busy)
		return REPLY_NONE;
	if (unlikely(!req->first) && connected && !follows(qp, req))
		return REPLY_NONE;
	if (req->first && qp->type != IBV_QPT_UD && mtu_differs(qp, req))
		return refuse_mtu(qp, req->src_mtu);
	switch (req->opcode) {
	case MLX5_OPCODE_RDMA_WRITE:
	case MLX5_OPCODE_RDMA_WRITE_IMM:
		reply = receive_write(qp, req, data);
		break;
	case MLX5_OPCODE_RDMA_READ:
		reply = receive_read(qp, req, data);
		break;
	case MLX5_OPCODE_ATOMIC_CS:
	case MLX5_OPCODE_ATOMIC_FA:
		reply = receive_atomic(qp, req);
		break;
	default:
		reply = qp->type == IBV_QPT_UD ? receive_datagram(qp, req, data) : receive_send(qp, req, data);
	}
	if (reply == REPLY_ACK && qp->state == IBV_QPS_RTR && (qp->type == IBV_QPT_RC || qp->type == IBV_QPT_UC))
		raise_established(qp);
	if (unlikely(!(req->first && req->last)) && reply == REPLY_ACK)
		n->rx_off = req->last ? 0 : req->off + req->len;
	if (connected && req->last && reply == REPLY_ACK) {
		n->rx_psn = (n->rx_psn + req->packets) & 0xffffff;
		n->rx_messages++;
	}
	return reply;
}

void responder_reset(struct emu_qp *qp)
{
	for (struct nic_rx *rx = nic(qp)->rx; rx; rx = rx->next)
		rx->busy = rx->recv.taken = false;
}

void responder_forget(struct emu_qp *qp)
{
	while (nic(qp)->rx) {
		struct nic_rx *rx = nic(qp)->rx;

		nic(qp)->rx = rx->next;
		free(rx);
	}
}

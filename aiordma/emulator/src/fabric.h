/* SPDX-License-Identifier: MIT
 * Between the sending end and the receiving end: what a request says, and how it comes from one to the other.
 *
 * requester.c knows nothing of where a peer is, and responder.c nothing of where a request came from. fabric.c brings
 * a request to a QP of this process by a call; ask.c and answer.c bring it to another process. A further wire, as to
 * other machines, would be a third way here. */
#ifndef AIORDMA_FABRIC_H
#define AIORDMA_FABRIC_H

#include "emu.h"

struct nic_sgl;
struct wire_link;

/* The longest slice of a message that goes as one request. */
#define NIC_SLICE (256u * 1024)

/* MTUs that there aren't: requests that the receiving end refuses. inject_wqe.c sends them. */
enum nic_refuse {
	NIC_REFUSE_INVALID = 0xf0,
	NIC_REFUSE_ACCESS,
	NIC_REFUSE_OPERATION,
};

/* One slice of a request: what its packets say. Payload goes with it, or comes back. */
struct nic_req {
	uint8_t opcode; /* MLX5_OPCODE_* */
	bool first, last, solicited;
	uint32_t imm; /* immediate data or key to invalidate, big-endian */
	uint32_t src_qpn, dst_qpn, psn, packets;
	uint8_t src_type, src_mtu;
	uint16_t src_stream; /* of a DCI, whose streams are as connections of their own */
	uint64_t msg_len, off, len; /* the whole message, and this slice */
	uint64_t raddr;
	uint32_t rkey;
	uint64_t swap_add, compare, *result;
	uint32_t qkey, srqn;
	uint64_t dc_key;
	const union ibv_gid *sgid, *dgid;
	uint8_t traffic_class, hop_limit, gid_type, sl;
};

enum nic_reply {
	REPLY_ACK,
	REPLY_NONE, /* lost, or refused in silence */
	REPLY_RNR,
	REPLY_NAK_INVALID,
	REPLY_NAK_ACCESS,
	REPLY_NAK_OPERATION,
	REPLY_BAD_SOURCE, /* nothing the network says: the payload's memory, on the sender's side, is gone */
	REPLY_OUT_OF_REACH, /* nor this: the payload's memory may not be read from there. Nothing counts as received */
	REPLY_PENDING,	  /* under way: the QP gets a turn when the answer is there */
};

/* Where a path leads: to a port of this process, or over a link. port_num 0 means nowhere. */
#define ROUTE_LINK 0xff

struct nic_route {
	union {
		struct emu_device *dev;
		struct wire_link *link; /* with port_num ROUTE_LINK */
	};
	uint8_t port_num;
};

struct nic_route fabric_route(const struct emu_device *from, const struct emu_path *, uint32_t dst_qpn);
/* How much of a message may go at a time, if it goes over a link. */
uint64_t fabric_slice(struct nic_route, const struct nic_req *);
/* Carries a request to the QP it names and brings the answer. `data` is the payload, or for a READ receives where the
 * remote bytes are; *rnr_timer is set by an RNR NAK. */
enum nic_reply fabric_request(struct emu_qp *from, struct nic_route, struct nic_req *, struct nic_sgl *data,
			      uint8_t *rnr_timer);
/* After REPLY_PENDING: what the same would have given. Once it gives another answer, that is over. */
enum nic_reply fabric_answer(struct emu_qp *from, struct nic_req *, struct nic_sgl *data, uint8_t *rnr_timer);
/* Nothing of what is under way touches the QP's memory after this, and no answer comes. */
void fabric_cancel(struct emu_qp *);

/* The receiving side: looks for the QP, and if it takes the request has it done. */
enum nic_reply fabric_deliver(struct emu_device *, uint8_t port_num, struct nic_req *, struct nic_sgl *data,
			      uint8_t *rnr_timer);
/* The device and port that answer to a request's address. */
struct nic_route fabric_destination(const union ibv_gid *dgid, uint8_t gid_type);

#endif

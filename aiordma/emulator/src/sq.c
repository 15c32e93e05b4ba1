/* SPDX-License-Identifier: MIT
 * Send queues: running them, completing and flushing; and the life of a QP on the device. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "nic.h"
#include "registry.h"
#include "wire.h"

/* QPNs 0 and 1 are the management QPs; a device starts far above. The range bounds only how soon one is used again. */
#define QPN_FIRST 0x100u
#define QPN_END (1u << 20)

/* ---------------------------------------------------------------- errors */

void qp_async_event(struct emu_qp *qp, uint32_t event)
{
	emu_async_event(qp->o.ctx, event, qp->user_handle, &qp->async_events);
}

/* IBTA 10.2.9.3 and man ibv_get_async_event: a QP on an SRQ that went to ERR takes no more of its WQEs. */
static void raise_last_wqe(struct emu_qp *qp)
{
	if (!qp->srq || qp->dct || nic(qp)->last_wqe_raised)
		return;
	nic(qp)->last_wqe_raised = true;
	qp_async_event(qp, IBV_EVENT_QP_LAST_WQE_REACHED);
}

static void enter_error(struct emu_qp *qp)
{
	/* In the middle of a peer's request it has to wait: the peer may be in the middle of one of ours, for which cancelling
	 * waits, and wait for this one. */
	if (!wire_serving)
		fabric_cancel(qp);
	streams_stop(qp);
	engine_unstall(qp);
	qp->stall = STALL_NONE;
	scan_watch_error(qp, true);
	engine_activate(qp);
	raise_last_wqe(qp);
}

void qp_to_error(struct emu_qp *qp, uint32_t event)
{
	if (nic(qp)->owner)
		qp = nic(qp)->owner;
	if (qp->state == IBV_QPS_ERR)
		return;
	emu_log(EMU_DEBUG, "QP 0x%x to ERR, event %u", qp->qpn, event);
	qp->state = IBV_QPS_ERR;
	if (event)
		qp_async_event(qp, event);
	enter_error(qp);
}

/* ---------------------------------------------------------------- completions */

static inline void report(struct emu_qp *qp, const struct sq_outcome *o)
{
	struct nic_cqe c = {
		.op = o->syndrome ? MLX5_CQE_REQ_ERR : MLX5_CQE_REQ,
		.syndrome = o->syndrome,
		.wqe_op = o->opcode,
		.counter = o->counter,
		.uidx = qp->uidx,
		.qpn = qp->qpn,
		.bytes = o->len,
	};

	if (o->syndrome || (o->flags & MLX5_WQE_CTRL_CQ_UPDATE))
		cq_write_for(qp, qp->scq, &c);
}

void sq_report(struct emu_qp *qp, const struct sq_outcome *o)
{
	report(qp, o);
}

static void complete(struct emu_qp *qp, const struct nic_wqe *w, uint8_t syndrome)
{
	if (unlikely(nic(qp)->owner))
		stream_finish(qp, w, syndrome);
	else
		report(qp, &(struct sq_outcome){ w->opcode, w->flags, syndrome, w->counter, (uint32_t)w->len });
}

static void retire(struct emu_qp *qp, const struct nic_wqe *w)
{
	qp->sq_ci += w->nbb;
	qp->progress = 0;
	qp->stall = STALL_NONE;
	nic(qp)->decoded = 0;
}

/* A failed WQE ends the work of its queue: a connected or reliable QP goes to ERR, of an unreliable one only the send
 * queue stops, in SQE (IBTA 10.3.1.6). */
static void fail_wqe(struct emu_qp *qp, const struct nic_wqe *w, uint8_t syndrome)
{
	emu_log(EMU_DEBUG, "QP 0x%x WQE %u op 0x%x fails, syndrome 0x%x", qp->qpn, w->counter, w->opcode, syndrome);
	complete(qp, w, syndrome);
	retire(qp, w);
	if (qp->type == IBV_QPT_UD || qp->type == IBV_QPT_UC) {
		if (qp->state != IBV_QPS_ERR)
			qp->state = IBV_QPS_SQE;
		return;
	}
	if (!streams_fail(qp, w->stream))
		qp_to_error(qp, 0);
}

static uint32_t sq_flush(struct emu_qp *qp, uint32_t budget)
{
	struct nic_qp *n = nic(qp);
	uint32_t done = 0;

	while (done < budget && sq_pending(qp)) {
		if (!n->decoded)
			wqe_decode(qp, n->wqe);
		complete(qp, n->wqe, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		retire(qp, n->wqe);
		done++;
	}
	return done;
}

/* ---------------------------------------------------------------- running */

static enum nic_left flush_turn(struct emu_qp *qp, bool *worked)
{
	uint32_t done;

	fabric_cancel(qp); /* where enter_error() had to leave it */
	if (inject_hung(qp))
		return LEFT_NOTHING;
	done = streams_flush(qp, SQ_TURN_WQES);
	done += sq_flush(qp, SQ_TURN_WQES - done);
	if (qp->state == IBV_QPS_ERR)
		done += rq_flush(qp, SQ_TURN_WQES);
	*worked |= done != 0;
	return sq_pending(qp) || streams_busy(qp) || (qp->state == IBV_QPS_ERR && rq_pending(qp)) ? LEFT_WORK : LEFT_NOTHING;
}

/* In SQD the WQE that has begun is finished, no other begins, and then it's drained: IBTA 10.3.1.4. */
static enum nic_left drained(struct emu_qp *qp)
{
	if (qp->sq_draining) {
		qp->sq_draining = 0;
		qp_async_event(qp, IBV_EVENT_SQ_DRAINED);
	}
	return LEFT_NOTHING;
}

static bool begun(const struct emu_qp *qp)
{
	if (unlikely(nic(qp)->streams))
		return streams_busy(qp);
	return qp->progress || qp->stall != STALL_NONE || nic(qp)->wire != WIRE_IDLE || nic(qp)->nflights;
}

/* One WQE, or a slice of it. */
static inline enum nic_step run_one(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);
	struct nic_wqe *w = n->wqe;
	uint8_t syndrome = 0;
	enum nic_step step;

	if (!n->decoded) {
		n->decode_error = wqe_decode(qp, w);
		n->decoded = WQE_DECODED;
	}
	if (unlikely(n->nflights) && (n->decode_error || !requester_may_launch(qp, w)))
		return STEP_LANDING;
	if (stream_failed(qp, w->stream)) {
		complete(qp, w, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
		retire(qp, w);
		return STEP_DONE;
	}
	if (n->decode_error) {
		fail_wqe(qp, w, n->decode_error);
		return STEP_FAIL;
	}
	step = likely(!inject_any()) ? requester_step(qp, w, &syndrome) : inject_step(qp, w, &syndrome);
	if (step == STEP_FAIL) {
		fail_wqe(qp, w, syndrome);
	} else if (step == STEP_DONE) {
		complete(qp, w, 0);
		retire(qp, w);
	} else if (step == STEP_LAUNCHED) {
		retire(qp, w);
	}
	return step;
}

enum nic_step sq_run_one(struct emu_qp *qp)
{
	return run_one(qp);
}

void sq_complete_flight(struct emu_qp *qp, const struct wire_flight *f)
{
	report(qp, &(struct sq_outcome){ f->opcode, f->flags, 0, f->counter, f->msg_len });
}

/* Until something of what is on its way is answered, or should have been. `rest`: nothing else is done before. */
SELDOM_CALLED static enum nic_left wait_for_flights(struct emu_qp *qp, bool rest)
{
	if (flights_can_land(qp))
		return LEFT_WORK;
	if (rest)
		qp->stall = STALL_WIRE;
	qp->deadline_ns = nic(qp)->flight_deadline;
	engine_stall(qp);
	return rest ? LEFT_WAITING : LEFT_NOTHING;
}

enum nic_left sq_turn(struct emu_qp *qp, bool *worked)
{
	if (qp->state == IBV_QPS_ERR || qp->state == IBV_QPS_SQE)
		return flush_turn(qp, worked);
	if (unlikely(nic(qp)->nflights))
		flights_land(qp);
	if (unlikely(nic(qp)->streams) && (qp->state == IBV_QPS_RTS || (qp->state == IBV_QPS_SQD && begun(qp))))
		return streams_turn(qp, worked);
	for (uint32_t i = 0; i < SQ_TURN_WQES; i++) {
		if (qp->state == IBV_QPS_SQD && !begun(qp))
			return drained(qp);
		if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD)
			return qp->state == IBV_QPS_ERR || qp->state == IBV_QPS_SQE ? LEFT_WORK : LEFT_NOTHING;
		if (!sq_pending(qp) || (unlikely(qp->state == IBV_QPS_SQD) && nic(qp)->nflights)) {
			return likely(!nic(qp)->nflights) ? LEFT_NOTHING : wait_for_flights(qp, false);
		}
		*worked = true;
		switch (run_one(qp)) {
		case STEP_MORE:
			return LEFT_WORK;
		case STEP_WAIT:
			engine_stall(qp);
			return LEFT_WAITING;
		case STEP_LANDING:
			return wait_for_flights(qp, true);
		default:
			break;
		}
	}
	return LEFT_WORK;
}

/* ---------------------------------------------------------------- control's calls */

static void forget(struct emu_qp *qp)
{
	struct nic_qp *n = qp->priv;

	free(n->wqe);
	responder_forget(qp);
	inject_forget(qp);
	streams_free(qp);
	free(n->flights);
	free(n);
	qp->priv = NULL;
}

/* Numbers are taken a block at a time (registry.h), and rotate in those that there are. */
static uint32_t insert(struct emu_device *dev, struct emu_qp *qp)
{
	uint32_t index = 0, limit;

	do {
		limit = qpn_limit() < QPN_END ? qpn_limit() : QPN_END;
		if (limit > QPN_FIRST)
			index = table_insert(&dev->qps, &dev->qps_size, &dev->next_qpn, QPN_FIRST, limit - QPN_FIRST, qp);
	} while (!index && limit < QPN_END && qpn_reserve(limit + 1));
	return index ? qpn_of_index(index) : 0;
}

int emu_qp_insert(struct emu_device *dev, struct emu_qp *qp)
{
	struct nic_qp *n = calloc(1, sizeof(*n));

	qp->priv = n;
	if (!n)
		return ENOMEM;
	n->qp = qp;
	n->wqe = aligned_alloc(64, sizeof(*n->wqe));
	n->rx = calloc(1, sizeof(*n->rx));
	if (n->wqe && n->rx && !streams_make(qp))
		qp->qpn = insert(dev, qp);
	if (!qp->qpn) {
		forget(qp);
		return ENOMEM;
	}
	qp->dev = dev;
	list_init(&qp->active_link);
	list_init(&n->stall_link);
	list_init(&n->error_link);
	list_init(&n->wire_wait);
	qp->active = false;
	scan_add_qp(qp);
	return 0;
}

void emu_qp_remove(struct emu_qp *qp)
{
	if (!qp->priv)
		return;
	fabric_cancel(qp);
	engine_unstall(qp);
	scan_watch_error(qp, false);
	engine_forget_qp(qp);
	table_remove(&qp->dev->qps, qp->dev->qps_size, qpn_to_index(qp->qpn), qp);
	if (qp->o.ctx->async)
		qp->async_events -= channel_purge(qp->o.ctx->async, qp->user_handle);
	forget(qp);
}

static void reset(struct emu_qp *qp)
{
	struct nic_qp *n = nic(qp);

	fabric_cancel(qp);
	engine_unstall(qp);
	scan_watch_error(qp, false);
	qp->sq_ci = qp->rq_ci = 0;
	qp->stall = STALL_NONE;
	qp->progress = 0;
	qp->sq_draining = 0;
	n->decoded = 0;
	n->last_wqe_raised = n->comm_est = false;
	n->route = (struct nic_route){ .port_num = 0 };
	n->tx_psn = n->rx_psn = n->tx_messages = n->rx_messages = 0;
	n->rx_off = 0;
	inject_reset(qp);
	streams_reset(qp);
	responder_reset(qp);
}

void emu_qp_state_changed(struct emu_qp *qp, uint8_t old)
{
	struct nic_qp *n = nic(qp);

	scan_watch_record(qp, qp->state == IBV_QPS_RTS);
	switch (qp->state) {
	case IBV_QPS_RESET:
		reset(qp);
		return;
	case IBV_QPS_RTR:
		n->rx_psn = qp->rq_psn & 0xffffff;
		break;
	case IBV_QPS_RTS:
		if (old == IBV_QPS_RTR)
			n->tx_psn = qp->sq_psn & 0xffffff;
		break;
	case IBV_QPS_SQD:
		qp->sq_draining = old != IBV_QPS_SQD;
		break;
	case IBV_QPS_ERR:
		enter_error(qp);
		break;
	default:
		break;
	}
	n->route = (struct nic_route){ .port_num = 0 };
	emu_qp_kick(qp);
}

void emu_qp_kick(struct emu_qp *qp)
{
	engine_activate(qp);
	emu_engine_wake();
}

void emu_qp_progress(const struct emu_qp *qp, struct emu_qp_progress *p)
{
	const struct nic_qp *n = nic(qp);

	*p = (struct emu_qp_progress){
		.next_send_psn = n->tx_psn,
		.next_rcv_psn = n->rx_psn,
		.messages_sent = n->tx_messages & 0xffffff,
		.messages_received = n->rx_messages & 0xffffff,
	};
}

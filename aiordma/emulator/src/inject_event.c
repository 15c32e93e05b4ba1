/* SPDX-License-Identifier: MIT
 * Asynchronous events on purpose, with what leads to them. See inject.h. */
#define _GNU_SOURCE
#include "control.h"
#include "inject.h"
#include "nic.h"

void inject_tell_all(const struct emu_device *dev, uint32_t event, uint64_t element)
{
	for (struct emu_list *l = emu.contexts.next; l != &emu.contexts; l = l->next) {
		struct emu_ucontext *ctx = container_of(l, struct emu_ucontext, link);

		if (ctx->dev == dev)
			emu_async_event(ctx, event, element, NULL);
	}
}

static void forget_route(struct emu_qp *qp)
{
	nic(qp)->route = (struct nic_route){ .port_num = 0 };
}

void inject_forget_routes(void)
{
	for (uint32_t i = 0; i < emu.ndevices; i++)
		inject_for_each_qp(&emu.devices[i], forget_route);
}

static int port_event(struct emu_device *dev, uint32_t event, uint64_t port_num)
{
	struct emu_port_config *port = emu_port(dev, (uint32_t)port_num);

	if (!port)
		return -1;
	if (event == IBV_EVENT_PORT_ACTIVE || event == IBV_EVENT_PORT_ERR) {
		/* What a fault has taken down stays down until that ends. */
		*(port->taken_down ? &port->own_state : &port->state) =
			event == IBV_EVENT_PORT_ACTIVE ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
		inject_forget_routes();
	}
	inject_tell_all(dev, event, port_num);
	return 0;
}

static int cq_event(struct emu_cq *cq)
{
	if (!cq)
		return -1;
	cq_overrun(cq);
	return 0;
}

static int qp_event(struct emu_qp *qp, uint32_t event)
{
	if (event == IBV_EVENT_QP_FATAL || event == IBV_EVENT_QP_REQ_ERR || event == IBV_EVENT_QP_ACCESS_ERR) {
		qp_to_error(qp, event);
		emu_engine_wake();
	} else {
		qp_async_event(qp, event);
	}
	return 0;
}

static int srq_event(struct emu_srq *srq, uint32_t event)
{
	if (!srq)
		return -1;
	srq->failed |= event == IBV_EVENT_SRQ_ERR;
	emu_async_event(srq->o.ctx, event, srq->user_handle, &srq->async_events);
	return 0;
}

static struct emu_qp *find_qp(const char *device, uint32_t qpn)
{
	struct emu_qp *qp = NULL;

	for (uint32_t i = 0; i < emu.ndevices && !qp; i++)
		if (!*device || !strcmp(emu.devices[i].name, device))
			qp = qp_find(&emu.devices[i], qpn);
	return qp;
}

static int event_of_qp(struct emu_qp *qp, uint32_t event, uint32_t kind)
{
	if (!qp)
		return -1;
	switch (kind) {
	case INJECT_BY_QP:
		return qp_event(qp, event);
	case INJECT_BY_SEND_CQ:
		return cq_event(qp->scq);
	case INJECT_BY_RECV_CQ:
		return cq_event(qp->rcq);
	default:
		return srq_event(qp->srq, event);
	}
}

int aiordma_emu_raise_event(const char *device, uint32_t event, uint32_t kind, uint64_t number)
{
	struct emu_device *dev;
	int err = -1;

	emu_lock();
	dev = inject_device(device);
	if (kind != INJECT_BY_PORT)
		err = event_of_qp(find_qp(device, (uint32_t)number), event, kind);
	else if (dev)
		err = port_event(dev, event, number);
	emu_unlock();
	return err;
}

/* SPDX-License-Identifier: MIT
 * Faults on purpose, for tests. See inject.h. */
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>

#include "control.h"
#include "inject.h"
#include "nic.h"

#define MAX_QP_RULES 64
#define MAX_COMMAND_RULES 16

uint32_t emu_injecting;

/* All of it with emu.lock held. */
static struct qp_rule {
	const struct emu_device *dev; /* NULL: of any device */
	uint32_t qpn;		      /* 0: any */
	uint32_t what;
} qp_rules[MAX_QP_RULES];

struct verb {
	const char *name;
	int32_t write, write_ex; /* -1: there is none */
	int32_t object, method;
};

static struct command_rule {
	const struct verb *verb;
	int state;
	uint32_t delay_ms;
	int error;
	int count;
} command_rules[MAX_COMMAND_RULES];

static uint32_t options;
static bool putting_cqe;

static void count_rules(void)
{
	uint32_t n = options;

	for (uint32_t i = 0; i < MAX_QP_RULES; i++)
		n += qp_rules[i].what != 0;
	for (uint32_t i = 0; i < MAX_COMMAND_RULES; i++)
		n += command_rules[i].verb != NULL;
	__atomic_store_n(&emu_injecting, n, __ATOMIC_RELEASE);
}

static struct emu_device *device_named(const char *name)
{
	for (uint32_t i = 0; i < emu.ndevices; i++)
		if (!strcmp(emu.devices[i].name, name))
			return &emu.devices[i];
	return NULL;
}

/* ---------------------------------------------------------------- commands */

#define CMD(name) IB_USER_VERBS_CMD_##name
#define EX_CMD(name) IB_USER_VERBS_EX_CMD_##name
#define IOCTL(object, method) UVERBS_OBJECT_##object, UVERBS_METHOD_##method

static const struct verb verbs[] = {
	{ "open_device", CMD(GET_CONTEXT), -1, IOCTL(DEVICE, GET_CONTEXT) },
	{ "query_device", CMD(QUERY_DEVICE), EX_CMD(QUERY_DEVICE), -1, -1 },
	{ "query_port", CMD(QUERY_PORT), -1, IOCTL(DEVICE, QUERY_PORT) },
	{ "alloc_pd", CMD(ALLOC_PD), -1, -1, -1 },
	{ "dealloc_pd", CMD(DEALLOC_PD), -1, IOCTL(PD, PD_DESTROY) },
	{ "reg_mr", CMD(REG_MR), -1, -1, -1 },
	{ "dereg_mr", CMD(DEREG_MR), -1, IOCTL(MR, MR_DESTROY) },
	{ "create_comp_channel", CMD(CREATE_COMP_CHANNEL), -1, -1, -1 },
	{ "create_cq", CMD(CREATE_CQ), EX_CMD(CREATE_CQ), IOCTL(CQ, CQ_CREATE) },
	{ "destroy_cq", CMD(DESTROY_CQ), -1, IOCTL(CQ, CQ_DESTROY) },
	{ "create_qp", CMD(CREATE_QP), EX_CMD(CREATE_QP), IOCTL(QP, QP_CREATE) },
	{ "modify_qp", CMD(MODIFY_QP), EX_CMD(MODIFY_QP), -1, -1 },
	{ "query_qp", CMD(QUERY_QP), -1, -1, -1 },
	{ "destroy_qp", CMD(DESTROY_QP), -1, IOCTL(QP, QP_DESTROY) },
	{ "create_srq", CMD(CREATE_SRQ), CMD(CREATE_XSRQ), IOCTL(SRQ, SRQ_CREATE) },
	{ "modify_srq", CMD(MODIFY_SRQ), -1, -1, -1 },
	{ "destroy_srq", CMD(DESTROY_SRQ), -1, IOCTL(SRQ, SRQ_DESTROY) },
	{ "create_ah", CMD(CREATE_AH), -1, -1, -1 },
	{ "destroy_ah", CMD(DESTROY_AH), -1, IOCTL(AH, AH_DESTROY) },
};

/* With the lock. The delay and errno of the rule that holds for the command, which is one less then. */
static int apply(const struct verb *verb, int state, uint32_t *delay_ms)
{
	for (uint32_t i = 0; i < MAX_COMMAND_RULES; i++) {
		struct command_rule *r = &command_rules[i];
		int error = r->error;

		if (r->verb != verb || (r->state >= 0 && r->state != state))
			continue;
		*delay_ms = r->delay_ms;
		if (r->count > 0 && !--r->count) {
			r->verb = NULL;
			count_rules();
		}
		return error;
	}
	return 0;
}

static int modify_state(uint64_t request)
{
	struct ib_uverbs_modify_qp m;

	if (user_read(&m, request, sizeof(m)) || !(m.attr_mask & IBV_QP_STATE))
		return -1;
	return m.qp_state;
}

/* A command in the write form, or one carried by INVOKE_WRITE; `request` is what comes after all headers. */
static int apply_write(uint32_t command, uint64_t request, uint32_t *delay_ms)
{
	int32_t number = (int32_t)(command & IB_USER_VERBS_CMD_COMMAND_MASK);
	bool extended = command & IB_USER_VERBS_CMD_FLAG_EXTENDED;

	for (uint32_t i = 0; i < ARRAY_LEN(verbs); i++) {
		const struct verb *v = &verbs[i];

		if (extended ? v->write_ex == number : v->write == number)
			return apply(v, v->write == IB_USER_VERBS_CMD_MODIFY_QP ? modify_state(request) : -1, delay_ms);
	}
	return 0;
}

static int apply_invoke_write(const struct ib_uverbs_ioctl_hdr *h, uint64_t attrs, uint32_t *delay_ms)
{
	uint32_t command = UINT32_MAX;
	uint64_t request = 0;

	for (uint32_t i = 0; i < h->num_attrs; i++) {
		uint64_t at = attrs + i * sizeof(struct ib_uverbs_attr);
		struct ib_uverbs_attr a;

		if (user_read(&a, at, sizeof(a)))
			return 0;
		if (a.attr_id == UVERBS_ATTR_WRITE_CMD)
			command = (uint32_t)a.data;
		else if (a.attr_id == UVERBS_ATTR_CORE_IN)
			request = a.len <= 8 ? at + offsetof(struct ib_uverbs_attr, data) : a.data;
	}
	return apply_write(command, request, delay_ms);
}

static void wait_ms(uint32_t ms)
{
	struct timespec left = { ms / 1000, (long)(ms % 1000) * 1000000 };

	while (ms && nanosleep(&left, &left) && errno == EINTR)
		;
}

int inject_ioctl_(const void *arg)
{
	uint64_t user = (uintptr_t)arg;
	struct ib_uverbs_ioctl_hdr h;
	uint32_t delay_ms = 0;
	int err = 0;

	emu_lock();
	if (emu.legacy_write || user_read(&h, user, sizeof(h)))
		goto out; /* what it will fail with anyway */
	if (h.object_id == UVERBS_OBJECT_DEVICE && h.method_id == UVERBS_METHOD_INVOKE_WRITE) {
		err = apply_invoke_write(&h, user + sizeof(h), &delay_ms);
		goto out;
	}
	for (uint32_t i = 0; i < ARRAY_LEN(verbs); i++)
		if (verbs[i].object == h.object_id && verbs[i].method == h.method_id)
			err = apply(&verbs[i], -1, &delay_ms);
out:
	emu_unlock();
	wait_ms(delay_ms);
	return err;
}

int inject_write_(const void *buf, size_t len)
{
	uint64_t user = (uintptr_t)buf;
	struct ib_uverbs_cmd_hdr h;
	uint32_t delay_ms = 0;
	int err = 0;

	emu_lock();
	if (len >= sizeof(h) && !user_read(&h, user, sizeof(h))) {
		bool extended = h.command & IB_USER_VERBS_CMD_FLAG_EXTENDED;

		user += sizeof(h) + (extended ? sizeof(struct ib_uverbs_ex_cmd_hdr) : 0);
		err = apply_write(h.command, user, &delay_ms);
	}
	emu_unlock();
	wait_ms(delay_ms);
	return err;
}

int aiordma_emu_inject_command(const char *verb, int state, uint32_t delay_ms, int error, int count)
{
	struct command_rule *at = NULL;
	const struct verb *v = NULL;

	for (uint32_t i = 0; i < ARRAY_LEN(verbs); i++)
		if (!strcmp(verbs[i].name, verb))
			v = &verbs[i];
	if (!v)
		return -1;
	emu_lock();
	for (uint32_t i = 0; i < MAX_COMMAND_RULES; i++) {
		struct command_rule *r = &command_rules[i];

		if (r->verb == v && r->state == state) {
			at = r;
			break;
		}
		if (!r->verb && !at)
			at = r;
	}
	if (at)
		*at = (struct command_rule){ count ? v : NULL, state, delay_ms, error, count };
	count_rules();
	emu_unlock();
	return at ? 0 : -1;
}

/* ---------------------------------------------------------------- QPs */

static uint32_t rules_of(const struct emu_qp *qp)
{
	uint32_t what = 0;

	for (uint32_t i = 0; i < MAX_QP_RULES; i++) {
		const struct qp_rule *r = &qp_rules[i];

		if ((!r->dev || r->dev == qp->dev) && (!r->qpn || r->qpn == qp->qpn))
			what |= r->what;
	}
	return what;
}

bool inject_held_(const struct emu_qp *qp)
{
	uint32_t what = rules_of(qp);

	if (what & INJECT_HANG)
		return true;
	return what & INJECT_HOLD && (qp->state == IBV_QPS_RTS || qp->state == IBV_QPS_SQD);
}

bool inject_lost_(const struct emu_qp *qp)
{
	return rules_of(qp) & INJECT_LOSE;
}

static void for_each_qp(struct emu_device *dev, void (*fn)(struct emu_qp *))
{
	for (uint32_t i = 0; i < dev->qps_size; i++)
		if (dev->qps[i])
			fn(dev->qps[i]);
}

static int set_rule(const struct emu_device *dev, uint32_t qpn, uint32_t what)
{
	struct qp_rule *at = NULL;

	for (uint32_t i = 0; i < MAX_QP_RULES; i++) {
		struct qp_rule *r = &qp_rules[i];

		if (r->what && r->dev == dev && r->qpn == qpn) {
			at = r;
			break;
		}
		if (!r->what && !at)
			at = r;
	}
	if (!at)
		return -1;
	*at = (struct qp_rule){ dev, qpn, what };
	count_rules();
	/* Those that may go on again don't know it, and what none of them may do is looked at again for nothing. */
	for (uint32_t i = 0; i < emu.ndevices; i++)
		for_each_qp(&emu.devices[i], emu_qp_kick);
	return 0;
}

int aiordma_emu_inject_qp(const char *device, uint32_t qpn, uint32_t what)
{
	struct emu_device *dev;
	int err = -1;

	emu_lock();
	dev = device_named(device);
	if (dev || !*device)
		err = set_rule(dev, qpn, what);
	emu_unlock();
	return err;
}

/* ---------------------------------------------------------------- CQEs */

void inject_before_cqe_(struct emu_cq *cq)
{
	if (!(options & INJECT_STRICT_ARM))
		return;
	/* An arming that is seen here came before the CQE, one that is seen after it may have: then the reader, which looks
	 * once more after arming, may not have seen the CQE, and needs the event. */
	if (cq->channel)
		cq_check_armed(cq);
	putting_cqe = true;
}

void inject_after_cqe_(void)
{
	putting_cqe = false;
}

uint32_t inject_arm_index_(const struct emu_cq *cq, uint32_t index)
{
	return options & INJECT_STRICT_ARM && !putting_cqe ? cq->pi & 0xffffff : index;
}

void inject_error_cqe_(void *cqe)
{
	struct mlx5_err_cqe *e = cqe;

	if (!(options & INJECT_GARBAGE))
		return;
	memset(e->rsvd0, 0xa5, sizeof(e->rsvd0));
	memset(e->rsvd1, 0x5a, sizeof(e->rsvd1));
	e->s_wqe_opcode_qpn |= htobe32(0xee000000u);
}

int aiordma_emu_inject_options(uint32_t value)
{
	emu_lock();
	options = value;
	count_rules();
	emu_unlock();
	return 0;
}

/* ---------------------------------------------------------------- verbs of the library */

static struct {
	struct ibv_context *context;
	int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
	int (*req_notify_cq)(struct ibv_cq *, int);
	void (*before_arm)(struct ibv_cq *);
} wrapped;

static int poll_with_garbage(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	int got = wrapped.poll_cq(cq, n, wc);

	/* ibv_poll_cq(3): of a failed completion only wr_id, status, qp_num and vendor_err are valid. */
	for (int i = 0; i < got; i++) {
		if (wc[i].status == IBV_WC_SUCCESS)
			continue;
		wc[i].opcode = (enum ibv_wc_opcode)(i & 1 ? IBV_WC_RECV : 0x5a5a);
		wc[i].byte_len = 0xdeadbeef;
		wc[i].imm_data = 0xfeedface;
		wc[i].src_qp = 0xabcdef;
		wc[i].wc_flags = ~0u;
		wc[i].pkey_index = 0xffff;
	}
	return got;
}

static int call_before_arm(struct ibv_cq *cq, int solicited_only)
{
	wrapped.before_arm(cq);
	return wrapped.req_notify_cq(cq, solicited_only);
}

int aiordma_emu_inject_verbs(struct ibv_context *context, void (*before_arm)(struct ibv_cq *), int garbage)
{
	if (wrapped.context) {
		wrapped.context->ops.poll_cq = wrapped.poll_cq;
		wrapped.context->ops.req_notify_cq = wrapped.req_notify_cq;
	}
	wrapped.context = context;
	if (!context)
		return 0;
	wrapped.poll_cq = context->ops.poll_cq;
	wrapped.req_notify_cq = context->ops.req_notify_cq;
	wrapped.before_arm = before_arm;
	if (before_arm)
		context->ops.req_notify_cq = call_before_arm;
	if (garbage)
		context->ops.poll_cq = poll_with_garbage;
	return 0;
}

/* ---------------------------------------------------------------- events */

static void tell_all(const struct emu_device *dev, uint32_t event, uint64_t element)
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

static int port_event(struct emu_device *dev, uint32_t event, uint64_t port_num)
{
	struct emu_port_config *port = emu_port(dev, (uint32_t)port_num);

	if (!port)
		return -1;
	if (event == IBV_EVENT_PORT_ACTIVE || event == IBV_EVENT_PORT_ERR) {
		port->state = event == IBV_EVENT_PORT_ACTIVE ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
		for (uint32_t i = 0; i < emu.ndevices; i++)
			for_each_qp(&emu.devices[i], forget_route);
	}
	tell_all(dev, event, port_num);
	return 0;
}

/* The element of an event is what the application called the object: for libibverbs its address. */
#define FIND(table, type, user)                                                              \
	static struct type *find_##type(const struct emu_device *dev, uint64_t element)      \
	{                                                                                    \
		for (uint32_t i = 0; i < dev->table##_size; i++)                             \
			if (dev->table[i] && dev->table[i]->user == element)                 \
				return dev->table[i];                                        \
		return NULL;                                                                 \
	}
FIND(cqs, emu_cq, user_handle)
FIND(qps, emu_qp, user_handle)
FIND(srqs, emu_srq, user_handle)

static int cq_event(struct emu_device *dev, uint64_t element)
{
	struct emu_cq *cq = find_emu_cq(dev, element);

	if (!cq)
		return -1;
	cq->overrun = true;
	emu_async_event(cq->o.ctx, IBV_EVENT_CQ_ERR, cq->user_handle, &cq->async_events);
	return 0;
}

static int qp_event(struct emu_device *dev, uint32_t event, uint64_t element)
{
	struct emu_qp *qp = find_emu_qp(dev, element);

	if (!qp)
		return -1;
	if (event == IBV_EVENT_QP_FATAL || event == IBV_EVENT_QP_REQ_ERR || event == IBV_EVENT_QP_ACCESS_ERR) {
		qp_to_error(qp, event);
		emu_engine_wake();
	} else {
		qp_async_event(qp, event);
	}
	return 0;
}

static int srq_event(struct emu_device *dev, uint32_t event, uint64_t element)
{
	struct emu_srq *srq = find_emu_srq(dev, element);

	if (!srq)
		return -1;
	srq->failed |= event == IBV_EVENT_SRQ_ERR;
	emu_async_event(srq->o.ctx, event, srq->user_handle, &srq->async_events);
	return 0;
}

static int raise_event(struct emu_device *dev, uint32_t event, uint64_t element)
{
	switch (event) {
	case IBV_EVENT_CQ_ERR:
		return cq_event(dev, element);
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return qp_event(dev, event, element);
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return srq_event(dev, event, element);
	case IBV_EVENT_DEVICE_FATAL:
		if (set_rule(dev, 0, INJECT_HANG))
			return -1;
		tell_all(dev, event, 0);
		return 0;
	default:
		return port_event(dev, event, element);
	}
}

int aiordma_emu_inject_event(const char *device, uint32_t event, uint64_t element)
{
	struct emu_device *dev;
	int err;

	emu_lock();
	dev = device_named(device);
	err = dev ? raise_event(dev, event, element) : -1;
	emu_unlock();
	return err;
}

void aiordma_emu_inject_reset(void)
{
	emu_lock();
	memset(qp_rules, 0, sizeof(qp_rules));
	memset(command_rules, 0, sizeof(command_rules));
	options = 0;
	putting_cqe = false;
	count_rules();
	for (uint32_t i = 0; i < emu.ndevices; i++)
		for_each_qp(&emu.devices[i], emu_qp_kick);
	emu_unlock();
}

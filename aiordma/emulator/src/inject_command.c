/* SPDX-License-Identifier: MIT
 * Faults of commands: slow ones, failing ones, those of a device that is gone. See inject.h. */
#define _GNU_SOURCE
#include <time.h>

#include "control.h"
#include "inject.h"

#define CMD(name) IB_USER_VERBS_CMD_##name
#define EX_CMD(name) IB_USER_VERBS_EX_CMD_##name
#define IOCTL(object, method) UVERBS_OBJECT_##object, UVERBS_METHOD_##method
#define MLX5(object, method) MLX5_IB_OBJECT_##object, MLX5_IB_METHOD_##method

/* The commands to the kernel that a verb is made of; -1: there is none of that form. */
struct verb {
	const char *name;
	int32_t write, write_ex;
	int32_t object, method;
	bool fine_without_device; /* see gone() */
};

static const struct verb verbs[] = {
	{ "open_device", CMD(GET_CONTEXT), -1, IOCTL(DEVICE, GET_CONTEXT), false },
	{ "query_device", CMD(QUERY_DEVICE), EX_CMD(QUERY_DEVICE), -1, -1, true },
	{ "query_port", CMD(QUERY_PORT), -1, IOCTL(DEVICE, QUERY_PORT), false },
	{ "query_gid_table", -1, -1, IOCTL(DEVICE, QUERY_GID_TABLE), true },
	{ "query_gid_ex", -1, -1, IOCTL(DEVICE, QUERY_GID_ENTRY), true },
	{ "alloc_pd", CMD(ALLOC_PD), -1, -1, -1, false },
	{ "dealloc_pd", CMD(DEALLOC_PD), -1, IOCTL(PD, PD_DESTROY), true },
	{ "reg_mr", CMD(REG_MR), -1, -1, -1, false },
	{ "rereg_mr", CMD(REREG_MR), -1, -1, -1, false },
	{ "reg_dmabuf_mr", -1, -1, IOCTL(MR, REG_DMABUF_MR), false },
	{ "reg_dm_mr", -1, -1, IOCTL(MR, DM_MR_REG), false },
	{ "advise_mr", -1, -1, IOCTL(MR, ADVISE_MR), false },
	{ "dereg_mr", CMD(DEREG_MR), -1, IOCTL(MR, MR_DESTROY), true },
	{ "alloc_mw", CMD(ALLOC_MW), -1, -1, -1, false },
	{ "dealloc_mw", CMD(DEALLOC_MW), -1, IOCTL(MW, MW_DESTROY), true },
	{ "alloc_dm", -1, -1, IOCTL(DM, DM_ALLOC), false },
	{ "free_dm", -1, -1, IOCTL(DM, DM_FREE), true },
	{ "create_comp_channel", CMD(CREATE_COMP_CHANNEL), -1, -1, -1, true },
	{ "create_cq", CMD(CREATE_CQ), EX_CMD(CREATE_CQ), IOCTL(CQ, CQ_CREATE), false },
	{ "resize_cq", CMD(RESIZE_CQ), -1, -1, -1, false },
	{ "modify_cq", -1, EX_CMD(MODIFY_CQ), -1, -1, false },
	{ "destroy_cq", CMD(DESTROY_CQ), -1, IOCTL(CQ, CQ_DESTROY), true },
	{ "create_qp", CMD(CREATE_QP), EX_CMD(CREATE_QP), IOCTL(QP, QP_CREATE), false },
	{ "open_qp", CMD(OPEN_QP), -1, -1, -1, false },
	{ "modify_qp", CMD(MODIFY_QP), EX_CMD(MODIFY_QP), -1, -1, false },
	{ "query_qp", CMD(QUERY_QP), -1, -1, -1, false },
	{ "destroy_qp", CMD(DESTROY_QP), -1, IOCTL(QP, QP_DESTROY), true },
	{ "attach_mcast", CMD(ATTACH_MCAST), -1, -1, -1, false },
	{ "detach_mcast", CMD(DETACH_MCAST), -1, -1, -1, true },
	{ "create_srq", CMD(CREATE_SRQ), -1, IOCTL(SRQ, SRQ_CREATE), false },
	{ "create_srq", CMD(CREATE_XSRQ), -1, -1, -1, false },
	{ "modify_srq", CMD(MODIFY_SRQ), -1, -1, -1, false },
	{ "query_srq", CMD(QUERY_SRQ), -1, -1, -1, false },
	{ "destroy_srq", CMD(DESTROY_SRQ), -1, IOCTL(SRQ, SRQ_DESTROY), true },
	{ "create_ah", CMD(CREATE_AH), -1, -1, -1, false },
	{ "destroy_ah", CMD(DESTROY_AH), -1, IOCTL(AH, AH_DESTROY), true },
	{ "open_xrcd", CMD(OPEN_XRCD), -1, -1, -1, false },
	{ "close_xrcd", CMD(CLOSE_XRCD), -1, IOCTL(XRCD, XRCD_DESTROY), true },
	{ "create_wq", -1, EX_CMD(CREATE_WQ), IOCTL(WQ, WQ_CREATE), false },
	{ "modify_wq", -1, EX_CMD(MODIFY_WQ), -1, -1, false },
	{ "destroy_wq", -1, EX_CMD(DESTROY_WQ), IOCTL(WQ, WQ_DESTROY), true },
	{ "create_rwq_ind_table", -1, EX_CMD(CREATE_RWQ_IND_TBL), -1, -1, false },
	{ "destroy_rwq_ind_table", -1, EX_CMD(DESTROY_RWQ_IND_TBL), IOCTL(RWQ_IND_TBL, RWQ_IND_TBL_DESTROY), true },
	{ "devx_general_cmd", -1, -1, MLX5(DEVX, DEVX_OTHER), false },
	{ "devx_query_eqn", -1, -1, MLX5(DEVX, DEVX_QUERY_EQN), false },
	{ "devx_obj_create", -1, -1, MLX5(DEVX_OBJ, DEVX_OBJ_CREATE), false },
	{ "devx_obj_destroy", -1, -1, MLX5(DEVX_OBJ, DEVX_OBJ_DESTROY), true },
	{ "devx_obj_modify", -1, -1, MLX5(DEVX_OBJ, DEVX_OBJ_MODIFY), false },
	{ "devx_obj_query", -1, -1, MLX5(DEVX_OBJ, DEVX_OBJ_QUERY), false },
	{ "devx_obj_query_async", -1, -1, MLX5(DEVX_OBJ, DEVX_OBJ_ASYNC_QUERY), false },
	{ "devx_umem_reg", -1, -1, MLX5(DEVX_UMEM, DEVX_UMEM_REG), false },
	{ "devx_umem_dereg", -1, -1, MLX5(DEVX_UMEM, DEVX_UMEM_DEREG), true },
	{ "devx_create_cmd_comp", -1, -1, MLX5(DEVX_ASYNC_CMD_FD, DEVX_ASYNC_CMD_FD_ALLOC), true },
	{ "devx_alloc_uar", -1, -1, MLX5(UAR, UAR_OBJ_ALLOC), true },
	{ "devx_free_uar", -1, -1, MLX5(UAR, UAR_OBJ_DESTROY), true },
	{ "var_alloc", -1, -1, MLX5(VAR, VAR_OBJ_ALLOC), false },
	{ "pp_alloc", -1, -1, MLX5(PP, PP_OBJ_ALLOC), false },
};

/* The extended verbs are the same commands. */
static const struct {
	const char *name, *is;
} aliases[] = {
	{ "query_device_ex", "query_device" }, { "create_cq_ex", "create_cq" },	  { "create_qp_ex", "create_qp" },
	{ "create_srq_ex", "create_srq" },     { "reg_mr_iova", "reg_mr" },	  { "reg_mr_iova2", "reg_mr" },
};

int32_t inject_verb_number(const char *name)
{
	for (uint32_t i = 0; i < ARRAY_LEN(aliases); i++)
		if (!strcmp(aliases[i].name, name))
			name = aliases[i].is;
	for (uint32_t i = 0; i < ARRAY_LEN(verbs); i++)
		if (!strcmp(verbs[i].name, name))
			return (int32_t)i;
	return -1;
}

/* ---------------------------------------------------------------- which command it is */

struct command {
	const struct emu_device *dev;
	const struct verb *verb; /* NULL: none of these */
	int32_t state;		 /* of modify_qp, -1: it isn't changed */
};

static int32_t modify_state(uint64_t request)
{
	struct ib_uverbs_modify_qp m;

	if (user_read(&m, request, sizeof(m)) || !(m.attr_mask & IBV_QP_STATE))
		return -1;
	return m.qp_state;
}

/* A command in the write form, or one carried by INVOKE_WRITE; `request` is what comes after all headers. */
static void find_write(struct command *c, uint32_t word, uint64_t request)
{
	int32_t number = (int32_t)(word & IB_USER_VERBS_CMD_COMMAND_MASK);
	bool extended = word & IB_USER_VERBS_CMD_FLAG_EXTENDED;

	for (uint32_t i = 0; i < ARRAY_LEN(verbs); i++)
		if ((extended ? verbs[i].write_ex : verbs[i].write) == number) {
			c->verb = &verbs[i];
			if (number == CMD(MODIFY_QP))
				c->state = modify_state(request);
			return;
		}
}

static void find_invoke_write(struct command *c, const struct ib_uverbs_ioctl_hdr *h, uint64_t attrs)
{
	uint32_t word = UINT32_MAX;
	uint64_t request = 0;

	for (uint32_t i = 0; i < h->num_attrs; i++) {
		uint64_t at = attrs + i * sizeof(struct ib_uverbs_attr);
		struct ib_uverbs_attr a;

		if (user_read(&a, at, sizeof(a)))
			return;
		if (a.attr_id == UVERBS_ATTR_WRITE_CMD)
			word = (uint32_t)a.data;
		else if (a.attr_id == UVERBS_ATTR_CORE_IN)
			request = a.len <= 8 ? at + offsetof(struct ib_uverbs_attr, data) : a.data;
	}
	if (word != UINT32_MAX)
		find_write(c, word, request);
}

static void find_ioctl(struct command *c, uint64_t user)
{
	struct ib_uverbs_ioctl_hdr h;

	if (emu.legacy_write || user_read(&h, user, sizeof(h)))
		return; /* it fails anyway */
	if (h.object_id == UVERBS_OBJECT_DEVICE && h.method_id == UVERBS_METHOD_INVOKE_WRITE) {
		find_invoke_write(c, &h, user + sizeof(h));
		return;
	}
	for (uint32_t i = 0; i < ARRAY_LEN(verbs); i++)
		if (verbs[i].object == h.object_id && verbs[i].method == h.method_id)
			c->verb = &verbs[i];
}

/* ---------------------------------------------------------------- what comes of it */

/* A device that reported that it's broken gives no more resources, and takes back what it gave: mlx5/core/cmd.c,
 * mlx5_internal_err_ret_value(), where leaving a state for RESET or ERR succeeds as well; mlx5/main.c,
 * mlx5_ib_alloc_ucontext(), for opening it. */
static int gone(const struct command *c)
{
	if (c->verb->fine_without_device || c->state == IBV_QPS_RESET || c->state == IBV_QPS_ERR)
		return 0;
	return c->verb == &verbs[0] ? EAGAIN : EIO;
}

static bool same_verb(const struct verb *a, const struct verb *b)
{
	return a == b || !strcmp(a->name, b->name);
}

/* What makes a command slow. */
struct slow {
	uint32_t n;
	struct {
		uint32_t rule;
		uint64_t ns;
	} by[16];
};

static void add_delay(struct slow *slow, const struct inject_rule *r)
{
	if (!r->delay_ns || slow->n == ARRAY_LEN(slow->by))
		return;
	slow->by[slow->n].rule = r->id;
	slow->by[slow->n++].ns = r->delay_ns;
}

/* With the lock. The errno of the rule that applies, and the times of the first 16 that fire. */
static int apply(const struct command *c, struct slow *slow)
{
	struct inject_rule *best = NULL;

	if (!c->verb || !c->dev)
		return 0;
	for (uint32_t k = 0; k < inject_nrules; k++) {
		struct inject_rule *r = inject_rules[k];

		if (r->kind == INJECT_DEVICE_FATAL && r->dev == c->dev && gone(c))
			return gone(c);
		if (r->kind != INJECT_VERB || !same_verb(&verbs[r->verb], c->verb) || (r->dev && r->dev != c->dev) ||
		    (r->state >= 0 && r->state != c->state) || !inject_fires(r, r->seen))
			continue;
		add_delay(slow, r);
		if (r->error)
			best = inject_choose(best, r);
		else
			inject_hit(r, c->dev, 0);
	}
	if (!best)
		return 0;
	inject_hit(best, c->dev, 0);
	return (int)best->error;
}

static bool in_force(uint32_t rule)
{
	bool is;

	emu_lock();
	is = inject_in_force(rule);
	emu_unlock();
	return is;
}

/* As long as the rules say, one after the other, and no longer than they last. */
static void wait_for(const struct slow *slow)
{
	const uint64_t slice = 10000000;

	for (uint32_t i = 0; i < slow->n; i++) {
		uint64_t begun = now_ns(), passed = 0;

		while (passed < slow->by[i].ns && in_force(slow->by[i].rule)) {
			uint64_t left = slow->by[i].ns - passed;
			struct timespec t = { 0, (long)(left < slice ? left : slice) };

			nanosleep(&t, NULL);
			passed = now_ns() - begun;
		}
	}
}

static const struct emu_device *device_of(int fd)
{
	const struct emu_file *f = emu_fd_get(fd);

	return f && f->ctx ? f->ctx->dev : NULL;
}

int inject_ioctl_(int fd, const void *arg)
{
	struct command c = { .state = -1 };
	struct slow slow = { .n = 0 };
	int err;

	emu_lock();
	c.dev = device_of(fd);
	find_ioctl(&c, (uintptr_t)arg);
	err = apply(&c, &slow);
	emu_unlock();
	wait_for(&slow);
	return err;
}

int inject_write_(int fd, const void *buf, size_t len)
{
	struct command c = { .state = -1 };
	struct ib_uverbs_cmd_hdr h;
	struct slow slow = { .n = 0 };
	int err;

	emu_lock();
	c.dev = device_of(fd);
	if (len >= sizeof(h) && !user_read(&h, (uintptr_t)buf, sizeof(h))) {
		bool extended = h.command & IB_USER_VERBS_CMD_FLAG_EXTENDED;

		find_write(&c, h.command,
			   (uintptr_t)buf + sizeof(h) + (extended ? sizeof(struct ib_uverbs_ex_cmd_hdr) : 0));
	}
	err = apply(&c, &slow);
	emu_unlock();
	wait_for(&slow);
	return err;
}

/* ---------------------------------------------------------------- DEVX */

uint8_t inject_devx_(const struct emu_device *dev, uint16_t opcode, uint32_t *syndrome)
{
	struct inject_rule *best = NULL;

	for (uint32_t k = 0; k < inject_nrules; k++) {
		struct inject_rule *r = inject_rules[k];

		if (r->kind == INJECT_DEVX && r->devx == opcode && (!r->dev || r->dev == dev) && inject_fires(r, r->seen))
			best = inject_choose(best, r);
	}
	if (!best)
		return 0;
	inject_hit(best, dev, 0);
	*syndrome = (uint32_t)best->devx_syndrome;
	return (uint8_t)best->status;
}

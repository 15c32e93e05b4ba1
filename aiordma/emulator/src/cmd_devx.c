/* SPDX-License-Identifier: MIT
 * The ioctl methods of DEVX: mlx5/devx.c of the kernel, whose checks and whose order of them these are.
 *
 * A command that the firmware refuses is EREMOTEIO here, with status and syndrome in the output; kernels before 5.18
 * gave an errno made of the status instead, and no output.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "devx.h"

/* ---------------------------------------------------------------- which command may go where */

/* devx_is_obj_create_cmd(): whether or not this firmware knows the command. */
static bool kernel_creates(uint16_t opcode)
{
	static const uint16_t opcodes[] = {
		OP_CREATE_GENERAL_OBJECT, OP_CREATE_MKEY, OP_CREATE_CQ, OP_ALLOC_PD, 0x816 /* ALLOC_TRANSPORT_DOMAIN */,
		OP_CREATE_RMP, OP_CREATE_SQ, OP_CREATE_RQ, OP_CREATE_RQT, 0x900 /* CREATE_TIR */, 0x912 /* CREATE_TIS */,
		0x771 /* ALLOC_Q_COUNTER */, 0x930 /* CREATE_FLOW_TABLE */, 0x933 /* CREATE_FLOW_GROUP */,
		OP_ALLOC_FLOW_COUNTER, 0x93d /* ALLOC_PACKET_REFORMAT_CONTEXT */, 0x940 /* ALLOC_MODIFY_HEADER_CONTEXT */,
		0x782 /* CREATE_SCHEDULING_ELEMENT */, 0x827 /* ADD_VXLAN_UDP_DPORT */, 0x829 /* SET_L2_TABLE_ENTRY */,
		OP_CREATE_QP, OP_CREATE_SRQ, OP_CREATE_XRC_SRQ, OP_CREATE_DCT, OP_CREATE_XRQ, 0x806 /* ATTACH_TO_MCG */,
		OP_ALLOC_XRCD, OP_CREATE_PSV, 0x936 /* SET_FLOW_TABLE_ENTRY */,
	};

	for (size_t i = 0; i < ARRAY_LEN(opcodes); i++)
		if (opcodes[i] == opcode)
			return true;
	return false;
}

/* devx_is_general_cmd() */
static bool kernel_general(uint16_t opcode)
{
	static const uint16_t opcodes[] = {
		OP_QUERY_HCA_CAP, 0x762 /* QUERY_HCA_VPORT_CONTEXT */, 0x752 /* QUERY_ESW_VPORT_CONTEXT */,
		0x750 /* QUERY_VPORT_STATE */, OP_QUERY_ADAPTER, OP_QUERY_ISSI, 0x754 /* QUERY_NIC_VPORT_CONTEXT */,
		0x760 /* QUERY_ROCE_ADDRESS */, 0x76f /* QUERY_VNIC_ENV */, 0x770 /* QUERY_VPORT_COUNTER */,
		0x80a /* GET_DROPPED_PACKET_LOG */, OP_NOP, 0x822 /* QUERY_CONG_STATUS */, 0x824 /* QUERY_CONG_PARAMS */,
		0x826 /* QUERY_CONG_STATISTICS */, 0x842 /* QUERY_LAG */,
	};

	if (opcode >= 0xb00 && opcode < 0xd00) /* MLX5_CMD_OP_GENERAL_START, _END */
		return true;
	for (size_t i = 0; i < ARRAY_LEN(opcodes); i++)
		if (opcodes[i] == opcode)
			return true;
	return false;
}

/* devx_is_whitelist_cmd(): libmlx5 needs these in contexts without DEVX as well. */
static bool kernel_whitelisted(uint16_t opcode)
{
	return opcode == OP_QUERY_HCA_CAP || opcode == 0x762 || opcode == 0x752;
}

/* devx_get_uid() */
static int check_uid(const struct emu_ucontext *ctx, uint16_t opcode)
{
	if (ctx->devx)
		return 0;
	if (!kernel_whitelisted(opcode))
		return EINVAL;
	return ctx->dev->limits.devx ? 0 : EOPNOTSUPP;
}

/* ---------------------------------------------------------------- buffers */

/* Takes the input over; what to free afterwards is in c->in and c->out. */
static int prepare(struct emu_ioctl_call *call, struct devx_call *c, uint16_t in_id, size_t outlen)
{
	const struct emu_attr *a = attr_get(call, in_id);
	uint8_t *in;

	*c = (struct devx_call){ .ctx = call->cmd.ctx, .inlen = a->len, .outlen = outlen };
	in = malloc(a->len);
	c->out = calloc(1, MAX(outlen, DEVX_OUT));
	c->in = in;
	if (!in || !c->out)
		return ENOMEM;
	return attr_in(call, in_id, in, a->len);
}

static void release(struct devx_call *c)
{
	free((void *)c->in);
	free(c->out);
}

static uint16_t opcode_of(const struct devx_call *c)
{
	return (uint16_t)prm_get(c->in, CMD_OPCODE);
}

static int execute(struct emu_ioctl_call *call, struct devx_call *c, uint16_t out_id)
{
	uint8_t status = devx_execute(c);
	int err = attr_out(call, out_id, c->out, c->outlen);

	return !err && status ? EREMOTEIO : err;
}

/* ---------------------------------------------------------------- general commands */

static int devx_other(struct emu_ioctl_call *call)
{
	struct devx_call c;
	int err = prepare(call, &c, MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, attr_get(call, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT)->len);

	if (!err)
		err = check_uid(c.ctx, opcode_of(&c));
	if (!err && !kernel_general(opcode_of(&c)))
		err = EINVAL;
	if (!err)
		err = execute(call, &c, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT);
	release(&c);
	return err;
}

/* mlx5_vector2eqn() in mlx5/core/eq.c. Event queues have numbers only: CQs signal through descriptors here. */
static int query_eqn(struct emu_ioctl_call *call)
{
	uint32_t vector = (uint32_t)attr_in_value(call, MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC), eqn;

	if (vector >= call->cmd.ctx->dev->limits.comp_vectors)
		return ENOENT;
	eqn = DEVX_FIRST_EQN + vector;
	return attr_out(call, MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, &eqn, sizeof(eqn));
}

/* bfregn_to_uar_index() in mlx5/main.c: for UAR pages that the context mapped by index. libmlx5 takes the number of a
 * page that was allocated as an object from its creation, and for others this emulator keeps no index. */
static int query_uar(struct emu_ioctl_call *call)
{
	emu_log(EMU_INFO, "%s: there is no UAR page by index", call->cmd.ctx->dev->name);
	return EINVAL;
}

/* ---------------------------------------------------------------- objects */

static int obj_create(struct emu_ioctl_call *call)
{
	struct devx_call c;
	int err = prepare(call, &c, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN,
			  attr_get(call, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT)->len);

	if (!err && prm_get(c.in, CMD_TUNNEL))
		err = EINVAL;
	if (!err)
		err = check_uid(c.ctx, opcode_of(&c));
	if (!err && !kernel_creates(opcode_of(&c)))
		err = EINVAL;
	if (!err)
		err = execute(call, &c, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT);
	if (!err)
		err = emu_object_publish(c.created);
	if (!err)
		err = attr_out_id(call, MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE, c.created->handle);
	if (err && c.created)
		emu_object_destroy(c.created);
	release(&c);
	return err;
}

static int obj_destroy(struct emu_ioctl_call *call)
{
	struct emu_object *o = attr_object(call, MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE);

	if (o->type != EMU_DEVX_OBJ && o->type != EMU_DEVX_MKEY)
		return EINVAL;
	if (o->usecnt || devx_object_busy(o))
		return EBUSY;
	emu_object_destroy(o);
	return 0;
}

static int check_target(struct devx_call *c, struct emu_object *target, enum devx_kind kind)
{
	const struct devx_command *k = devx_find(opcode_of(c));
	int err;

	if (prm_get(c->in, CMD_TUNNEL))
		return EINVAL;
	err = check_uid(c->ctx, opcode_of(c));
	if (err)
		return err;
	if (!k || k->kind != kind || devx_named_object(c->in) != devx_object_identity(target)) {
		emu_log(EMU_INFO, "%s: command 0x%x is not one for this object", c->ctx->dev->name, opcode_of(c));
		return EINVAL;
	}
	c->target = target;
	return 0;
}

static int obj_modify(struct emu_ioctl_call *call)
{
	struct devx_call c;
	int err = prepare(call, &c, MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN,
			  attr_get(call, MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT)->len);

	if (!err)
		err = check_target(&c, attr_object(call, MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE), DEVX_MODIFY);
	if (!err)
		err = execute(call, &c, MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT);
	release(&c);
	return err;
}

static int obj_query(struct emu_ioctl_call *call)
{
	struct devx_call c;
	int err = prepare(call, &c, MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN,
			  attr_get(call, MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT)->len);

	if (!err)
		err = check_target(&c, attr_object(call, MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE), DEVX_QUERY);
	if (!err)
		err = execute(call, &c, MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT);
	release(&c);
	return err;
}

/* ---------------------------------------------------------------- queries that answer through a descriptor */

static int cmd_fd_alloc(struct emu_ioctl_call *call)
{
	struct emu_channel *channel;
	int err = devx_cmd_fd_create(call->cmd.ctx, &channel);

	return err ? err : attr_out_id(call, MLX5_IB_ATTR_DEVX_ASYNC_CMD_FD_ALLOC_HANDLE, channel->rfd);
}

/* A refusal of the firmware's is no error here: it comes with the answer. */
static int obj_async_query(struct emu_ioctl_call *call)
{
	uint16_t outlen = (uint16_t)attr_in_value(call, MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_OUT_LEN);
	struct devx_call c;
	int err = prepare(call, &c, MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_CMD_IN, outlen);

	if (!err)
		err = check_target(&c, attr_object(call, MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_HANDLE), DEVX_QUERY);
	if (!err) {
		devx_execute(&c);
		err = devx_cmd_fd_send(attr_object(call, MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_FD),
				       attr_in_value(call, MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_WR_ID), c.out, outlen);
	}
	release(&c);
	return err;
}

/* ---------------------------------------------------------------- memory for objects that DEVX makes */

/* devx_umem_get() */
static int umem_reg(struct emu_ioctl_call *call)
{
	const uint32_t allowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	uint64_t access = attr_in_value(call, MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS);
	struct emu_umem *u;
	int err;

	if (!call->cmd.ctx->devx || access & ~(uint64_t)allowed)
		return EINVAL;
	if (access & IBV_ACCESS_REMOTE_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL; /* ib_check_mr_access() */
	u = emu_object_alloc(call->cmd.ctx, EMU_UMEM, sizeof(*u));
	if (!u)
		return ENOMEM;
	u->addr = attr_in_value(call, MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR);
	u->len = attr_in_value(call, MLX5_IB_ATTR_DEVX_UMEM_REG_LEN);
	u->writable = access & IBV_ACCESS_LOCAL_WRITE;
	u->id = ++call->cmd.ctx->dev->next_umem;
	err = umem_get(u->addr, u->len, u->writable, &u->pinned);
	if (err) {
		emu_object_free(&u->o);
		return err;
	}
	err = emu_object_publish(&u->o);
	if (!err)
		err = attr_out(call, MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, &u->id, sizeof(u->id));
	if (!err)
		err = attr_out_id(call, MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE, u->o.handle);
	if (err)
		emu_object_destroy(&u->o);
	return err;
}

static int umem_dereg(struct emu_ioctl_call *call)
{
	emu_object_destroy(attr_object(call, MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE));
	return 0;
}

/* ---------------------------------------------------------------- tables */

#define COMMAND_IN(id_) { .id = (id_), .kind = ATTR_IN, .mandatory = true, .min = CMD_HEADER }
#define COMMAND_OUT(id_) { .id = (id_), .kind = ATTR_OUT, .mandatory = true, .min = CMD_HEADER }
#define ANY_OBJECT EMU_NONE

static const struct emu_attr_spec other_attrs[] = {
	COMMAND_IN(MLX5_IB_ATTR_DEVX_OTHER_CMD_IN),
	COMMAND_OUT(MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT),
};
static const struct emu_attr_spec eqn_attrs[] = {
	ATTR_IN_TYPE(MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC, uint32_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, uint32_t, true),
};
static const struct emu_attr_spec uar_attrs[] = {
	ATTR_IN_TYPE(MLX5_IB_ATTR_DEVX_QUERY_UAR_USER_IDX, uint32_t, true),
	ATTR_OUT_TYPE(MLX5_IB_ATTR_DEVX_QUERY_UAR_DEV_IDX, uint32_t, true),
};
static const struct emu_attr_spec create_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE, ATTR_IDR_NEW, EMU_DEVX_OBJ, true),
	COMMAND_IN(MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN),
	COMMAND_OUT(MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT),
};
static const struct emu_attr_spec destroy_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE, ATTR_IDR, ANY_OBJECT, true),
};
static const struct emu_attr_spec modify_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE, ATTR_IDR, ANY_OBJECT, true),
	COMMAND_IN(MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN),
	COMMAND_OUT(MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT),
};
static const struct emu_attr_spec query_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE, ATTR_IDR, ANY_OBJECT, true),
	COMMAND_IN(MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN),
	COMMAND_OUT(MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT),
};
static const struct emu_attr_spec async_query_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_HANDLE, ATTR_IDR, ANY_OBJECT, true),
	COMMAND_IN(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_CMD_IN),
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_FD, ATTR_FD, EMU_CMD_FD, true),
	ATTR_IN_TYPE(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_WR_ID, uint64_t, true),
	ATTR_CONST_IN(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_OUT_LEN),
};
static const struct emu_attr_spec cmd_fd_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_ASYNC_CMD_FD_ALLOC_HANDLE, ATTR_FD_NEW, EMU_CMD_FD, true),
};
static const struct emu_attr_spec umem_reg_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE, ATTR_IDR_NEW, EMU_UMEM, true),
	ATTR_IN_TYPE(MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR, uint64_t, true),
	ATTR_IN_TYPE(MLX5_IB_ATTR_DEVX_UMEM_REG_LEN, uint64_t, true),
	ATTR_FLAGS_IN(MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS, false),
	/* Says how large the pages may be that the device sees; here memory isn't cut into pages. */
	{ .id = MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP, .kind = ATTR_IN, .min = 1, .max = 8 },
	ATTR_OUT_TYPE(MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, uint32_t, true),
};
static const struct emu_attr_spec umem_dereg_attrs[] = {
	ATTR_HANDLE(MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE, ATTR_IDR_DESTROY, EMU_UMEM, true),
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_OTHER, other_attrs, devx_other),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_QUERY_EQN, eqn_attrs, query_eqn),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_QUERY_UAR, uar_attrs, query_uar),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_CREATE, create_attrs, obj_create),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_DESTROY, destroy_attrs, obj_destroy),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_MODIFY, modify_attrs, obj_modify),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_QUERY, query_attrs, obj_query),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_METHOD_DEVX_OBJ_ASYNC_QUERY, async_query_attrs, obj_async_query),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_ASYNC_CMD_FD, MLX5_IB_METHOD_DEVX_ASYNC_CMD_FD_ALLOC, cmd_fd_attrs, cmd_fd_alloc),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_UMEM, MLX5_IB_METHOD_DEVX_UMEM_REG, umem_reg_attrs, umem_reg),
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX_UMEM, MLX5_IB_METHOD_DEVX_UMEM_DEREG, umem_dereg_attrs, umem_dereg),
};

const struct emu_methods emu_devx_methods = { NULL, 0, ioctl_methods, ARRAY_LEN(ioctl_methods) };

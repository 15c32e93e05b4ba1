/* SPDX-License-Identifier: MIT
 * DEVX commands on their way: which there are, what they name, how the firmware refuses one.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "devx.h"
#include "inject.h"
#include "wq.h"

static const struct devx_commands *const all[] = {
	&devx_caps_commands,
	&devx_mkey_commands,
	&devx_qp_commands,
	&devx_qp_modify_commands,
	&devx_create_commands,
	&devx_rq_commands,
};

const struct devx_command *devx_find(uint16_t opcode)
{
	for (size_t i = 0; i < ARRAY_LEN(all); i++)
		for (uint32_t j = 0; j < all[i]->n; j++)
			if (all[i]->commands[j].opcode == opcode)
				return &all[i]->commands[j];
	return NULL;
}

uint8_t devx_refuse(struct devx_call *c, uint8_t status, uint32_t syndrome, const char *why)
{
	emu_log(EMU_INFO, "%s: firmware command 0x%x refused with status 0x%x, syndrome 0x%x: %s", c->ctx->dev->name,
		(unsigned)prm_get(c->in, CMD_OPCODE), status, syndrome, why);
	prm_set(c->out, CMD_SYNDROME, syndrome);
	return status;
}

static uint8_t check_and_run(struct devx_call *c)
{
	const struct devx_command *k = c->command;

	if (!k) {
		emu_log(EMU_WARN, "%s: firmware command 0x%x is not implemented", c->ctx->dev->name,
			(unsigned)prm_get(c->in, CMD_OPCODE));
		return devx_refuse(c, STAT_BAD_OP, SYN_UNKNOWN_COMMAND, "not implemented");
	}
	if (c->inlen < k->in)
		return devx_refuse(c, STAT_BAD_INP_LEN, SYN_INPUT_LENGTH, "the input is too short");
	if (c->outlen < k->out)
		return devx_refuse(c, STAT_BAD_OUTP_LEN, SYN_OUTPUT_LENGTH, "the output is too short");
	return k->run(c);
}

uint8_t devx_execute(struct devx_call *c)
{
	uint32_t syndrome = 0;
	uint8_t status;

	c->command = devx_find((uint16_t)prm_get(c->in, CMD_OPCODE));
	status = inject_devx(c->ctx->dev, (uint16_t)prm_get(c->in, CMD_OPCODE), &syndrome);
	status = status ? devx_refuse(c, status, syndrome, "a fault on purpose") : check_and_run(c);
	if (status) {
		/* A refusal has nothing but its reason in the output. */
		memset(c->out + 8, 0, MAX(c->outlen, DEVX_OUT) - 8);
	}
	prm_set(c->out, CMD_STATUS, status);
	emu_log(EMU_DEBUG, "%s: firmware %s: status 0x%x", c->ctx->dev->name, c->command ? c->command->name : "command",
		status);
	return status;
}

/* ---------------------------------------------------------------- what commands are about */

static uint64_t identity(uint64_t opcode, uint64_t type, uint32_t number)
{
	return type << 48 | opcode << 32 | number;
}

uint64_t devx_named_object(const uint8_t *in)
{
	uint16_t opcode = (uint16_t)prm_get(in, CMD_OPCODE);
	const struct devx_command *k = devx_find(opcode);

	if (!k || (k->kind != DEVX_MODIFY && k->kind != DEVX_QUERY))
		return 0;
	if (k->creates == OP_CREATE_GENERAL_OBJECT)
		return identity(k->creates, prm_get(in, CMD_OBJECT_TYPE), (uint32_t)prm_get(in, CMD_OBJECT_ID));
	return identity(k->creates, 0, (uint32_t)prm_get(in, CMD_NUMBER));
}

/* devx_is_valid_obj_id() in mlx5/devx.c: what the driver made for each verbs object. A basic SRQ is an RMP there, as on
 * every device with an ISSI (interface step sequence identifier) of 1. */
uint64_t devx_object_identity(const struct emu_object *o)
{
	const struct emu_qp *qp = (const struct emu_qp *)o;
	const struct emu_srq *srq = (const struct emu_srq *)o;
	const struct devx_object *d = (const struct devx_object *)o;

	switch (o->type) {
	case EMU_QP:
		return identity(qp->dct ? OP_CREATE_DCT : OP_CREATE_QP, 0, qp->qpn);
	case EMU_CQ:
		return identity(OP_CREATE_CQ, 0, ((const struct emu_cq *)o)->cqn);
	case EMU_SRQ:
		return identity(srq->xrc ? OP_CREATE_XRC_SRQ : OP_CREATE_RMP, 0, srq->srqn);
	case EMU_WQ:
		return identity(OP_CREATE_RQ, 0, ((const struct emu_wq *)o)->rqn);
	case EMU_RWQ_IND_TBL:
		return identity(OP_CREATE_RQT, 0, ((const struct emu_rwq_ind_tbl *)o)->rqtn);
	case EMU_DEVX_MKEY:
		return identity(OP_CREATE_MKEY, 0, ((const struct emu_mkey *)o)->key >> 8);
	case EMU_DEVX_OBJ:
		return identity(d->opcode, d->object_type, d->id);
	default:
		return 0;
	}
}

struct emu_pd *devx_pd(struct emu_ucontext *ctx, uint32_t pdn)
{
	for (uint32_t h = 0; h < ctx->nhandles; h++) {
		struct emu_pd *pd = (struct emu_pd *)ctx->handles[h];

		if (pd && pd->o.type == EMU_DEVX_OBJ)
			pd = (struct emu_pd *)((struct devx_object *)pd)->inner;
		if (pd && pd->o.type == EMU_PD && pd->pdn == pdn)
			return pd;
	}
	return NULL;
}

/* SPDX-License-Identifier: MIT
 * DEVX: firmware commands from user space. Of these, opening a context needs QUERY_HCA_CAP; it is the only one so far.
 *
 * A command is big-endian words: input starts with the opcode (16 bits) and, in the low half of the second word, its
 * modifier; output with the status (8 bits) and a syndrome (32 bits). Bit positions are those of mlx5_ifc.h (the PRM in
 * the kernel's include/linux/mlx5, and in rdma-core's providers/mlx5).
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "control.h"

#define CMD_HEADER 16	/* bytes before the command's own output; also the least input */
#define CMD_MAX 0x4000	/* more than any command that is known here answers */

enum { OP_QUERY_HCA_CAP = 0x100 };

/* Modifier of QUERY_HCA_CAP: the kind of capabilities above bit 0, which chooses current or greatest possible. */
#define CAP_KIND(modifier) ((modifier) >> 1)
enum { CAP_GENERAL = 0 };

/* Firmware status codes, and what mlx5_cmd_check() makes of them on the way to user space. */
enum { STATUS_OK = 0, STATUS_BAD_OP = 0x02, STATUS_BAD_PARAM = 0x03 };

/* Fields of the general capabilities, in bits from their start. */
struct field {
	uint16_t offset;
	uint8_t width;
};
static const struct field LOG_MAX_RA_REQ_QP = { 0xe2, 6 }, LOG_MAX_RA_RES_QP = { 0xea, 6 }, PORT_TYPE = { 0x1c8, 2 },
			  NUM_PORTS = { 0x1d8, 8 }, CQE_VERSION = { 0x236, 4 };

/* Sets `width` bits from bit `offset` on, counted from the most significant bit of the first byte. */
static void set_bits(uint8_t *at, struct field f, uint32_t value)
{
	for (unsigned i = 0; i < f.width; i++) {
		unsigned bit = f.offset + i;
		uint8_t mask = (uint8_t)(0x80 >> bit % 8);

		if (value >> (f.width - 1 - i) & 1)
			at[bit / 8] |= mask;
		else
			at[bit / 8] &= (uint8_t)~mask;
	}
}

static uint8_t log2_floor(uint32_t n)
{
	return (uint8_t)(n ? 31 - __builtin_clz(n) : 0);
}

/* What isn't set reads as "no": no DMA memcpy, no dynamically connected transport, no crypto, no reserved numbers. */
static void fill_general_caps(const struct emu_device *d, uint8_t *caps)
{
	set_bits(caps, LOG_MAX_RA_REQ_QP, log2_floor(d->limits.max_qp_rd_atom));
	set_bits(caps, LOG_MAX_RA_RES_QP, log2_floor(d->limits.max_qp_init_rd_atom));
	set_bits(caps, PORT_TYPE, 1); /* Ethernet */
	set_bits(caps, NUM_PORTS, d->nports);
	set_bits(caps, CQE_VERSION, 1);
}

static uint8_t run(const struct emu_device *d, const uint8_t *in, uint8_t *out, size_t outlen)
{
	uint16_t opcode = (uint16_t)(in[0] << 8 | in[1]), modifier = (uint16_t)(in[6] << 8 | in[7]);
	uint8_t caps[256] = { 0 };

	if (opcode != OP_QUERY_HCA_CAP) {
		emu_log(EMU_WARN, "%s: firmware command 0x%x is not implemented", d->name, opcode);
		return STATUS_BAD_OP;
	}
	if (CAP_KIND(modifier) == CAP_GENERAL)
		fill_general_caps(d, caps);
	memcpy(out + CMD_HEADER, caps, MIN(sizeof(caps), outlen - CMD_HEADER));
	return STATUS_OK;
}

/* UVERBS_HANDLER(MLX5_IB_METHOD_DEVX_OTHER) in mlx5/devx.c. A status of the firmware's isn't an errno of the ioctl's
 * except EREMOTEIO, which tells the library to look into the output. */
static int devx_other(struct emu_ioctl_call *call)
{
	struct emu_attr *out = attr_get(call, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT);
	uint8_t in[CMD_HEADER], *answer;
	uint8_t status;
	int err;

	if (!call->cmd.ctx->devx || out->len > CMD_MAX)
		return EINVAL;
	err = attr_in(call, MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, in, sizeof(in));
	if (err)
		return err;
	answer = calloc(1, out->len);
	if (!answer)
		return ENOMEM;
	status = run(call->cmd.ctx->dev, in, answer, out->len);
	answer[0] = status;
	err = attr_out(call, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT, answer, out->len);
	free(answer);
	if (!err && status != STATUS_OK)
		err = EREMOTEIO;
	return err;
}

static const struct emu_attr_spec other_attrs[] = {
	{ .id = MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, .kind = ATTR_IN, .mandatory = true, .min = CMD_HEADER },
	{ .id = MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT, .kind = ATTR_OUT, .mandatory = true, .min = CMD_HEADER },
};

static const struct emu_ioctl_method ioctl_methods[] = {
	IOCTL_METHOD(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_OTHER, other_attrs, devx_other),
};

const struct emu_methods emu_devx_methods = { NULL, 0, ioctl_methods, ARRAY_LEN(ioctl_methods) };

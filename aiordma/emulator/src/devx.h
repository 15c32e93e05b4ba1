/* SPDX-License-Identifier: MIT
 * DEVX: firmware commands from user space. What the devx_*.c files share.
 *
 * The kernel checks who may send which command to what (mlx5/devx.c); the firmware then does it or answers a status and a
 * syndrome. In user space that is EREMOTEIO, with both in the output. Syndromes of real firmware aren't public: those
 * here are this emulator's own, one for each reason, and the log says the reason in words.
 */
#ifndef AIORDMA_DEVX_H
#define AIORDMA_DEVX_H

#include "control.h"
#include "devx_prm.h"

#define DEVX_FIRST_EQN 8 /* the number of completion vector 0's event queue */
#define DEVX_MAX_KLM (1u << 16) /* entries of an indirect key */
#define DEVX_OUT 4096   /* room for an output whatever the caller asked for, see struct devx_call */

struct devx_command;

/* A command on its way through the firmware. `out` is zeroed and at least `outlen` and DEVX_OUT bytes long, so that
 * commands may write what they have; the caller gets as much as it asked for. */
struct devx_call {
	struct emu_ucontext *ctx;
	const struct devx_command *command;
	const uint8_t *in;
	size_t inlen;
	uint8_t *out;
	size_t outlen;
	struct emu_object *target;  /* queries and changes */
	struct emu_object *created; /* creations: what `run` leaves, not published yet */
};

enum devx_kind { DEVX_GENERAL, DEVX_CREATE, DEVX_MODIFY, DEVX_QUERY };

struct devx_command {
	uint16_t opcode;
	uint8_t kind;
	uint16_t in, out;	    /* least lengths */
	uint16_t creates;	    /* of queries and changes: the opcode that makes their objects */
	uint8_t (*run)(struct devx_call *); /* enum prm_status */
	const char *name;
};

/* Objects that DEVX made and that have no emu_type of their own. `inner` is what the data half works with, if anything;
 * it has no handle and belongs to this object. */
struct devx_object {
	struct emu_object o; /* EMU_DEVX_OBJ */
	uint16_t opcode;     /* what made it */
	uint16_t object_type; /* general objects */
	uint32_t id;
	struct emu_object *inner;
	struct emu_object *umems[2]; /* in use by it */
};

/* Memory of the application's that DEVX objects are made in. */
struct emu_umem {
	struct emu_object o; /* EMU_UMEM */
	uint32_t id;
	uint64_t addr, len, pinned;
	bool writable;
};

/* Every command that works, by file; the tables are joined in devx.c. */
struct devx_commands {
	const struct devx_command *commands;
	uint32_t n;
};
extern const struct devx_commands devx_caps_commands, devx_mkey_commands, devx_qp_commands, devx_qp_modify_commands,
	devx_create_commands, devx_rq_commands;

/* Refuses: logs the reason, sets the syndrome, gives the status back. */
uint8_t devx_refuse(struct devx_call *, uint8_t status, uint32_t syndrome, const char *why);
enum devx_syndrome {
	SYN_UNKNOWN_COMMAND = 0xe0001,
	SYN_INPUT_LENGTH,
	SYN_OUTPUT_LENGTH,
	SYN_NOT_IMPLEMENTED,
	SYN_RESERVED_BITS,
	SYN_NO_SUCH_PD,
	SYN_NO_SUCH_CQ,
	SYN_NO_SUCH_RQ,
	SYN_NO_SUCH_UMEM,
	SYN_UMEM_TOO_SMALL,
	SYN_LIMIT,
	SYN_NO_MEMORY,
	SYN_ACCESS_MODE,
	SYN_KEY_SIZE,
	SYN_NO_UMR,
	SYN_NO_SIGNATURE,
	SYN_QP_STATE,
	SYN_OPT_PARAM,
	SYN_VALUE,
	SYN_IN_USE,
	SYN_RQ_STATE,
	SYN_RQT_SIZE,
	SYN_NO_MMO,
	SYN_DCI_STREAM,
};

/* Runs one as the firmware would: fills in status and syndrome. */
uint8_t devx_execute(struct devx_call *);
const struct devx_command *devx_find(uint16_t opcode);

/* Which object of which creator a command names; 0: none (the kernel's devx_get_obj_id()). The lower half is the
 * number, above it the opcode of the creator and the type of a general object. */
uint64_t devx_named_object(const uint8_t *in);
uint64_t devx_object_identity(const struct emu_object *);

/* The object behind a query or change: the verbs object itself, or what a DEVX object holds. */
static inline void *devx_target(const struct devx_call *c)
{
	struct devx_object *d = (struct devx_object *)c->target;

	return d->o.type == EMU_DEVX_OBJ && d->inner ? d->inner : c->target;
}
uint8_t devx_log2(uint64_t n); /* rounded down; 0 of 0 */
uint8_t devx_qp_state(const struct emu_qp *); /* of the qpc's numbers */

struct emu_pd *devx_pd(struct emu_ucontext *, uint32_t pdn);
struct emu_umem *devx_umem(struct emu_ucontext *, uint32_t id);
bool devx_object_busy(const struct emu_object *);

/* Descriptors of asynchronous queries. */
int devx_cmd_fd_create(struct emu_ucontext *, struct emu_channel **);
int devx_cmd_fd_send(struct emu_channel *, uint64_t wr_id, const uint8_t *data, size_t len); /* EAGAIN: full */

/* objects.c calls these when one goes away */
void devx_object_retire(struct devx_object *);
void devx_context_destroy(struct emu_ucontext *);

#endif

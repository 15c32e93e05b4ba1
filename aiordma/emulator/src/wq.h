/* SPDX-License-Identifier: MIT
 * Receive work queues of their own and indirection tables of them: made, changed and queried, but no traffic arrives there.
 * Raw Ethernet and receive-side scaling, which would bring it, aren't emulated.
 */
#ifndef AIORDMA_WQ_H
#define AIORDMA_WQ_H

#include "control.h"

#define EMU_LOG_MAX_RQT_SIZE 11

struct emu_wq {
	struct emu_object o; /* EMU_WQ */
	struct emu_pd *pd;
	struct emu_cq *cq;
	uint32_t rqn, uidx;
	uint8_t state; /* enum ibv_wq_state */
	uint32_t *db;
	uint32_t log_size, log_stride; /* WQEs; bytes of one */
	uint64_t user_handle;
	uint64_t pinned;
};

struct emu_rwq_ind_tbl {
	struct emu_object o; /* EMU_RWQ_IND_TBL */
	uint32_t rqtn, max, n;
	struct emu_wq **wqs;
};

void emu_wq_retire(struct emu_wq *);
void emu_rwq_ind_tbl_retire(struct emu_rwq_ind_tbl *);
struct emu_wq *emu_wq_find(struct emu_ucontext *, uint32_t rqn);

#endif

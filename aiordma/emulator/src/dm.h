/* SPDX-License-Identifier: MIT
 * Device memory: what cmd_dm.c offers to the other command files.
 */
#ifndef AIORDMA_DM_H
#define AIORDMA_DM_H

#include "control.h"

#define EMU_DM_LOG_MIN_SIZE 6
#define EMU_DM_LOG_MAX_ALIGNMENT 6 /* above the 64 bytes that are the least: a page */

/* Operations at addresses of their own, mlx5dv_dm_map_op_addr(3); their numbers as in rdma-core's tests/test_mlx5_dm_ops.py */
enum emu_dm_op { EMU_DM_INCREMENT, EMU_DM_TEST_AND_SET };
#define EMU_DM_OP_SIZES 0x1 /* of either, a bit for each power of two: single bytes */

uint64_t emu_dm_bar_size(const struct emu_device *);
uint32_t emu_dm_operations(void); /* a bit for each that works here */
void *emu_dm_mmap(struct emu_ucontext *, uint32_t index, size_t len);
void emu_dm_retire(struct emu_object *);
void emu_dm_release(const struct emu_ucontext *); /* what is left of a context's, a child's too */

#endif

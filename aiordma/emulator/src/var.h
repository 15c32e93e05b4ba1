/* SPDX-License-Identifier: MIT
 * Virtio access regions: what cmd_var.c offers to cmd_uar.c, and the other way round.
 */
#ifndef AIORDMA_VAR_H
#define AIORDMA_VAR_H

#include "control.h"

bool emu_var_known(const struct emu_ucontext *, uint32_t page_id);
void *emu_var_mmap(void *addr);

/* cmd_uar.c: the offset that a page is mapped by */
uint64_t emu_page_offset(uint32_t page_id);

#endif

/* SPDX-License-Identifier: MIT
 * Packet pacing: what cmd_pp.c offers to the other command files.
 */
#ifndef AIORDMA_PP_H
#define AIORDMA_PP_H

#include "control.h"

#define EMU_PP_TABLE_SIZE 128
#define EMU_PP_MIN_RATE 1u	   /* kbit/s */
#define EMU_PP_MAX_RATE 100000000u /* the link's */

void emu_pp_retire(struct emu_object *);
void emu_pp_forked(void);

#endif

/* SPDX-License-Identifier: MIT
 * The operations of which inputs for fuzz_uverbs.c consist. Numbers are little-endian. */
#ifndef PROGRAM_H
#define PROGRAM_H

#include "fuzz.h"

enum op {
	OP_RUN,		  /* the device does what there is to do */
	OP_MEMORY,	  /* u32 offset in the arena, u16 n, n bytes */
	OP_IOCTL,	  /* u16 n, n bytes: header and attributes, lengths put right */
	OP_IOCTL_RAW,	  /* the same as it is */
	OP_WRITE,	  /* u16 n, n bytes: header and request, in_words put right */
	OP_WRITE_RAW,	  /* the same as it is */
	OP_MMAP,	  /* u64 offset, u32 length, u8 prot */
	OP_MUNMAP,	  /* u8 which mapping */
	OP_CLOSE,	  /* u16 descriptor of a channel */
	OP_CONTEXT,	  /* u8: which context is meant from here on; opened when first used */
	OP_CLOSE_CONTEXT,
	OP_RING,	  /* u8 mapping, u16 offset, u64 value: a store to a page of registers */
	OP_UNMAP_MEMORY,  /* u32 offset in the arena, u32 length */
	OPS
};

#endif

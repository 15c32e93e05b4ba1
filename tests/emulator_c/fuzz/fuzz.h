/* SPDX-License-Identifier: MIT
 * What the fuzz targets share. Each is a LLVMFuzzerTestOneInput(), for libFuzzer or for replay.c, and links with the
 * emulator's objects and common.c.
 *
 * There is no device thread: a target runs the device itself, so that the same input does the same every time. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "nic.h"

/* The application's memory, at the same address in every run, so that inputs have addresses in them as they are. Nothing
 * is mapped right before and behind it. */
#define ARENA 0x200000000000ull
#define ARENA_SIZE (4u << 20)

static inline uint8_t *arena(uint64_t offset)
{
	return (uint8_t *)(uintptr_t)(ARENA + offset);
}

void arena_map(void);	 /* once */
void arena_unmap(uint64_t offset, uint64_t len); /* as a program does that forgets what it had registered */
void arena_reset(void); /* all of it there again, and zero */

/* Before the first input: the emulator's devices, the arena, and no descriptor in any of the target's n places. */
void configure_once(const char *config, int *fds, unsigned n);

/* Descriptors of channels are numbers from here on, in the order in which they are made. */
#define FIRST_FD 800
void channels_restart(void);

void engine_pump(unsigned rounds); /* with emu.lock held */
/* Clocks of the device's tables begin anew: numbers depend on the input alone. All contexts are closed. */
void numbers_restart(void);

/* Bytes of an input. What is missing reads as zero. */
struct input {
	const uint8_t *p;
	size_t n;
};

uint64_t take(struct input *, unsigned bytes);		 /* little-endian */
const uint8_t *take_bytes(struct input *, size_t *n); /* at most *n */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif

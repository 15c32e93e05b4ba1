/* SPDX-License-Identifier: MIT
 * Messages to stderr: AIORDMA_EMULATOR_LOG=error|warn|info|debug, "warn" if unset. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "emu.h"

enum emu_level emu_level = EMU_WARN;

static const char *const level_names[] = { "error", "warn", "info", "debug" };

static void __attribute__((constructor)) read_level(void)
{
	const char *wanted = getenv("AIORDMA_EMULATOR_LOG");

	if (!wanted || !*wanted)
		return;
	for (unsigned i = 0; i < sizeof(level_names) / sizeof(level_names[0]); i++) {
		if (!strcmp(wanted, level_names[i])) {
			emu_level = (enum emu_level)i;
			return;
		}
	}
	emu_log(EMU_WARN, "AIORDMA_EMULATOR_LOG=%s is none of error, warn, info, debug", wanted);
}

void emu_log_(enum emu_level level, const char *fmt, ...)
{
	char line[512];
	va_list args;
	int n = snprintf(line, sizeof(line), "aiordma emulator[%d] %s: ", (int)getpid(), level_names[level]);

	va_start(args, fmt);
	n += vsnprintf(line + n, sizeof(line) - (size_t)n - 1, fmt, args);
	va_end(args);
	if ((size_t)n > sizeof(line) - 2)
		n = sizeof(line) - 2;
	line[n++] = '\n';
	/* One write, past stdio and past our own write hook: lines of several threads stay whole. */
	if (syscall(SYS_write, STDERR_FILENO, line, (size_t)n) < 0)
		return; /* nowhere left to complain to */
}

/* SPDX-License-Identifier: MIT
 * What Python calls: see aiordma/emulator/_native.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "cm.h"

EMU_EXPORT int aiordma_emu_detach(void);
EMU_EXPORT int aiordma_emu_open_contexts(void);
EMU_EXPORT int aiordma_emu_configured(void);
EMU_EXPORT void aiordma_emu_cm_counts(uint32_t counts[3]);
EMU_EXPORT int aiordma_emu_preloaded(void);

static int complain(char *error, size_t size, const char *what)
{
	if (size)
		snprintf(error, size, "%s", what);
	return -1;
}

/* 0, or -1 and a message. The devices of an open context can't be replaced under it. */
int aiordma_emu_configure(const char *text, char *error, size_t error_size)
{
	if (emu_open_contexts() || cm_files())
		return complain(error, error_size, "a device is open");
	emu_real_init();
	return emu_config_parse(text, error, error_size) ? -1 : 0;
}

int aiordma_emu_attach(char *error, size_t error_size)
{
	int slots;

	if (!emu_configured())
		return complain(error, error_size, "no configuration");
	slots = emu_attach_loaded();
	if (slots)
		return slots;
	return complain(error, error_size, "no RDMA library with import slots is loaded");
}

/* 0, or -1 while a device is open: its library would go on with calls to a kernel that knows nothing of it. */
int aiordma_emu_detach(void)
{
	if (emu_open_contexts() || cm_files())
		return -1;
	emu_detach_loaded();
	emu_lock();
	emu.ndevices = 0;
	emu_unlock();
	return 0;
}

int aiordma_emu_open_contexts(void)
{
	return (int)emu_open_contexts();
}

/* Of the connection manager: open descriptors, identifiers, connections to other processes. */
void aiordma_emu_cm_counts(uint32_t counts[3])
{
	counts[0] = cm_files();
	cm_lock();
	counts[1] = cm_ids();
	counts[2] = cm_links();
	cm_unlock();
}

/* Preloaded, our definitions come before the C library's for the whole program. A library that ctypes loads has a scope
 * of its own behind that. */
int aiordma_emu_preloaded(void)
{
	Dl_info ours, first;

	return dladdr((void *)aiordma_emu_preloaded, &ours) && dladdr(dlsym(RTLD_DEFAULT, "socket"), &first) &&
	       ours.dli_fbase == first.dli_fbase;
}

/* Also true in a preloaded program, by the file that AIORDMA_EMULATOR_CONFIG names. */
int aiordma_emu_configured(void)
{
	return emu_configured();
}

/* -1: there is no such device. */
int aiordma_emu_counts(const char *device, uint32_t *counts, uint32_t n)
{
	int found = -1;

	emu_lock();
	for (uint32_t i = 0; i < emu.ndevices; i++) {
		if (strcmp(emu.devices[i].name, device))
			continue;
		memcpy(counts, emu.devices[i].count, MIN(n, EMU_TYPES) * sizeof(*counts));
		found = 0;
	}
	emu_unlock();
	return found;
}

/* Raised whenever an exported function or the configuration's language changes. */
int aiordma_emu_version(void)
{
	return 2;
}

/* SPDX-License-Identifier: MIT */
#ifndef AIORDMA_EMU_CAPABILITY_H
#define AIORDMA_EMU_CAPABILITY_H

#include <linux/capability.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Effective, by the raw call: libcap would be a dependency for one bit. Root of a user namespace seems to have it here and
 * doesn't in the kernel, which asks for it in the initial namespace. */
static inline bool has_capability(unsigned capability)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = { { 0, 0, 0 } };

	return !syscall(SYS_capget, &header, data) && data[0].effective >> capability & 1;
}

#endif

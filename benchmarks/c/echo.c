/* SPDX-License-Identifier: MIT
 * A shared library: the least that a device could be. A thread watches a word of memory, and writes to an eventfd for each
 * change. What a loop needs to be woken by it is the floor for an operation that is waited for through a descriptor.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

static volatile uint64_t *word;
static uint64_t seen;
static volatile int ended;
static int event_fd;
static pthread_t thread;

static void *watch(void *unused)
{
	(void)unused;
	while (!ended) {
		uint64_t now = *word;
		const uint64_t one = 1;

		if (now == seen)
			continue;
		seen = now;
		if (write(event_fd, &one, sizeof(one)) != sizeof(one))
			break;
	}
	return NULL;
}

/* It spins: to be started for a measurement only. */
int echo_start(volatile uint64_t *watched, int fd)
{
	word = watched;
	seen = *watched;
	event_fd = fd;
	ended = 0;
	return pthread_create(&thread, NULL, watch, NULL);
}

int echo_stop(void)
{
	ended = 1;
	return pthread_join(thread, NULL);
}

/* SPDX-License-Identifier: MIT
 * Tables from the numbers in WQEs, CQEs and doorbells to objects.
 *
 * Numbers rotate: a QPN that was freed comes back only after the whole range was given out, so that a late doorbell, a
 * late CQE or a peer that was never told does not meet its successor. */
#include <stdlib.h>
#include <string.h>

#include "nic.h"
#include "registry.h"

#define TABLE_MIN 256u

static bool grow(void ***table, uint32_t *size, uint32_t need)
{
	uint32_t n = *size ? *size : TABLE_MIN;
	void **t;

	while (n <= need)
		n *= 2;
	if (n == *size)
		return true;
	t = realloc(*table, n * sizeof(*t));
	if (!t)
		return false;
	memset(t + *size, 0, (n - *size) * sizeof(*t));
	*table = t;
	*size = n;
	return true;
}

uint32_t table_insert(void *table, uint32_t *size, uint32_t *next, uint32_t first, uint32_t range, void *what)
{
	void ***t = table;

	if (*next < first || *next >= first + range)
		*next = first;
	for (uint32_t i = 0; i < range; i++) {
		uint32_t number = *next;

		*next = number + 1 < first + range ? number + 1 : first;
		if (number < *size && (*t)[number])
			continue;
		if (number >= *size && !grow(t, size, number))
			return 0;
		(*t)[number] = what;
		return number;
	}
	return 0;
}

void table_remove(void *table, uint32_t size, uint32_t number, const void *what)
{
	void **t = *(void ***)table;

	/* After fork() the child's tables are empty, and what it destroys is no longer in them. */
	if (number < size && t[number] == what)
		t[number] = NULL;
}

struct emu_qp *qp_find(struct emu_device *dev, uint32_t qpn)
{
	uint32_t index = qpn_to_index(qpn);

	return index < dev->qps_size ? dev->qps[index] : NULL;
}

struct emu_cq *cq_find(struct emu_device *dev, uint32_t cqn)
{
	return cqn < dev->cqs_size ? dev->cqs[cqn] : NULL;
}

struct emu_srq *srq_find(struct emu_device *dev, uint32_t srqn)
{
	return srqn < dev->srqs_size ? dev->srqs[srqn] : NULL;
}

/* SPDX-License-Identifier: MIT
 * Reading and writing fields of firmware commands.
 */
#include "devx_prm.h"

uint64_t prm_get(const uint8_t *structure, struct prm_field f)
{
	unsigned bit = f.offset, left = f.width;
	uint64_t value = 0;

	while (left) {
		unsigned here = 8 - bit % 8, n = here < left ? here : left;

		value = value << n | (structure[bit / 8] >> (here - n) & ((1u << n) - 1));
		bit += n;
		left -= n;
	}
	return value;
}

void prm_set(uint8_t *structure, struct prm_field f, uint64_t value)
{
	unsigned bit = f.offset, left = f.width;

	while (left) {
		unsigned here = 8 - bit % 8, n = here < left ? here : left, shift = here - n;
		uint8_t mask = (uint8_t)(((1u << n) - 1) << shift);

		left -= n;
		structure[bit / 8] =
			(uint8_t)((structure[bit / 8] & ~mask) | ((uint8_t)(value >> left << shift) & mask));
		bit += n;
	}
}

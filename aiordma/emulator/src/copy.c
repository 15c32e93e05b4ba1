/* SPDX-License-Identifier: MIT
 * Moving payload between pieces of host memory. */
#include <stdlib.h>
#include <string.h>

#include "nic.h"

bool sgl_grow(struct nic_sgl *s)
{
	uint32_t cap = s->cap ? s->cap * 2 : 64;
	struct nic_piece *v = realloc(s->v, cap * sizeof(*v));

	if (!v)
		return false;
	s->v = v;
	s->cap = cap;
	return true;
}

/* The order of the store that comes last. */
#if defined(__SANITIZE_THREAD__)
/* Around a store with release the sanitizer holds a lock of its own, which a fault in the store (fault_guard_copy()) would
 * leave locked for ever. */
#define LAST __ATOMIC_RELAXED
#else
#define LAST __ATOMIC_RELEASE
#endif

/* Programs poll on memory that a peer writes, and rely on two habits of the hardware: aligned 8 bytes never appear
 * half written, and of one write the last byte comes last (UCX and MPI libraries poll on a trailing flag). memmove()
 * promises neither, so the last 8 bytes are a store of their own, after the rest. */
static void copy_piece(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	uint64_t tail;

	if (len >= 8) {
		memcpy(&tail, src + len - 8, 8); /* before the copy, which may overlap it */
		if (len > 8)
			memmove(dst, src, len - 8);
		dst += len - 8;
		if (likely(!((uintptr_t)dst & 7))) {
			__atomic_store_n((uint64_t *)dst, tail, LAST);
		} else {
			memcpy(dst, &tail, 7);
			__atomic_store_n(dst + 7, ((const uint8_t *)&tail)[7], LAST);
		}
		return;
	}
	if (len == 4 && !((uintptr_t)dst & 3)) {
		uint32_t word;

		memcpy(&word, src, 4);
		__atomic_store_n((uint32_t *)dst, word, LAST);
		return;
	}
	if (len) {
		uint8_t last = src[len - 1];

		memmove(dst, src, len - 1);
		__atomic_store_n(dst + len - 1, last, LAST);
	}
}

uint64_t sgl_copy(const struct nic_sgl *dst, const struct nic_sgl *src, uint64_t len)
{
	uint64_t done = 0, doff = 0, soff = 0;
	uint32_t d = 0, s = 0;

	while (done < len && d < dst->n && s < src->n) {
		uint64_t n = dst->v[d].len - doff, have = src->v[s].len - soff;

		if (have < n)
			n = have;
		if (len - done < n)
			n = len - done;
		copy_piece(dst->v[d].p + doff, src->v[s].p + soff, n);
		done += n;
		doff += n;
		soff += n;
		if (doff == dst->v[d].len) {
			d++;
			doff = 0;
		}
		if (soff == src->v[s].len) {
			s++;
			soff = 0;
		}
	}
	return done;
}

/* SPDX-License-Identifier: MIT
 * Payload in the memory of another process: process_vm_readv(2).
 *
 * The kernel lets a process read another's memory if it could trace it: the same user, and what a security module adds.
 * Yama's usual setting (ptrace_scope 1, Documentation/admin-guide/LSM/Yama.rst) is that only a parent may, or whoever the
 * other process names with prctl(PR_SET_PTRACER), of which there can be one. Containers may refuse the call altogether. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "wire.h"

_Static_assert(sizeof(struct nic_piece) == sizeof(struct iovec) &&
		       offsetof(struct nic_piece, len) == offsetof(struct iovec, iov_len),
	       "a list of pieces is an iovec");

/* Ids are used again, but not so soon. */
#define SEEN_NS 50000000u

static ssize_t read_from(pid_t pid, const struct nic_piece *local, uint32_t nlocal, const struct nic_piece *remote,
			 uint32_t nremote)
{
	return process_vm_readv(pid, (const struct iovec *)(const void *)local, nlocal < IOV_MAX ? nlocal : IOV_MAX,
				(const struct iovec *)(const void *)remote, nremote < IOV_MAX ? nremote : IOV_MAX, 0);
}

/* What the call failed with. EPERM is also what it says of whoever has a dead one's id and is somebody else's; who takes
 * that for the peer's refusal asks it to send what it will never send. One without memory (ESRCH) is about to end, or has.
 * ENOSYS, and what a filter says instead, may come late: seccomp(2) can be put on at any time. */
static enum nic_copied failed(void)
{
	return errno == EPERM || errno == EACCES || errno == ENOSYS ? COPY_BARRED : COPY_GONE;
}

/* Its id means another process, or none, or even us, if it's in another PID namespace, or if it has ended. */
static enum nic_copied is_there(struct nic_foreign *f)
{
	uint64_t value = 0;
	struct nic_piece local = { (uint8_t *)&value, sizeof(value) };
	struct nic_piece remote = { (uint8_t *)(uintptr_t)f->nonce_address, sizeof(value) };

	if (!f->nonce)
		return COPY_GONE;
	if (read_from(f->thread, &local, 1, &remote, 1) != sizeof(value))
		return failed();
	if (value != f->nonce)
		return COPY_GONE;
	f->seen = engine_now();
	return COPY_DONE;
}

bool foreign_reachable(const struct registry_peer *peer, struct nic_foreign *f)
{
	const struct registry_entry *e = registry_entry(peer->slot);

	f->thread = __atomic_load_n(&e->thread, __ATOMIC_ACQUIRE);
	f->nonce = e->nonce;
	f->nonce_address = e->nonce_address;
	return emu.one_copy && peer->pid != getpid() && f->thread > 0 && is_there(f) == COPY_DONE;
}

void foreign_allow(pid_t pid)
{
	static bool named;
	char scope = 0;
	int fd;

	if (named || !emu.one_copy)
		return;
	fd = emu_real.open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	named = emu_real.read(fd, &scope, 1) == 1 && scope == '1' && !prctl(PR_SET_PTRACER, (unsigned long)pid, 0, 0, 0);
	emu_real.close(fd);
}

/* Leaves out the first `n` bytes. */
static void advance(struct nic_sgl *s, uint32_t *first, uint64_t n)
{
	while (*first < s->n && n >= s->v[*first].len)
		n -= s->v[(*first)++].len;
	if (*first < s->n && n) {
		s->v[*first].p += n;
		s->v[*first].len -= n;
	}
}

static bool copy_pieces(struct nic_sgl *to, const struct nic_sgl *from, uint64_t len)
{
	sgl_reset(to);
	for (uint32_t i = 0; i < from->n && len; i++) {
		uint64_t n = from->v[i].len < len ? from->v[i].len : len;

		if (!sgl_add(to, from->v[i].p, n))
			return false;
		len -= n;
	}
	return !len;
}

/* A process that is being killed loses its memory before anything else of it, one thread after the other (do_exit() in the
 * kernel's exit.c), and may lose it to the OOM killer while all of them still stand. Its device thread is what would
 * answer us, so it's that one's memory that is read: if the nonce can't be had from it any more, no more can an answer.
 * Otherwise it lives. EFAULT says that some address was wrong, not on which side. */
static enum nic_copied whose_fault(struct nic_foreign *owner, const struct nic_piece *target)
{
	static struct nic_sgl there, here;
	enum nic_copied copied = is_there(owner);
	uint8_t byte;

	if (copied != COPY_DONE)
		return copied;
	sgl_reset(&there);
	sgl_reset(&here);
	if (!sgl_add(&there, target->p, 1) || !sgl_add(&here, &byte, 1))
		return COPY_BAD_SOURCE;
	return fault_guard_copy(&here, &there, 1) == COPY_DONE ? COPY_BAD_SOURCE : COPY_BAD_TARGET;
}

enum nic_copied foreign_copy(const struct nic_sgl *dst, const struct nic_sgl *src, uint64_t len)
{
	static struct nic_sgl local, remote, from, to;
	uint32_t l = 0, r = 0;
	uint64_t tail = 0, left = len;
	struct nic_piece *last;
	uint8_t *tail_at;
	size_t ntail;

	if (!len)
		return COPY_DONE;
	if (src->owner->thread <= 0)
		return COPY_GONE; /* nobody's: 0 is ourselves */
	/* This process may have been stopped meanwhile, for as long as anybody likes. */
	if (unlikely(engine_now() - src->owner->seen >= SEEN_NS)) {
		enum nic_copied there = is_there(src->owner);

		if (there != COPY_DONE)
			return there;
	}
	if (!copy_pieces(&local, dst, len) || !copy_pieces(&remote, src, len))
		return COPY_BAD_SOURCE;
	/* The last bytes come last, as in copy.c: the kernel reads them to a place of our own. */
	last = &local.v[local.n - 1];
	ntail = last->len < sizeof(tail) ? last->len : sizeof(tail);
	last->len -= ntail;
	tail_at = last->p + last->len;
	if (!sgl_add(&local, (uint8_t *)&tail, ntail))
		return COPY_BAD_TARGET;
	while (left) {
		ssize_t n;

		advance(&local, &l, 0);
		n = read_from(src->owner->thread, local.v + l, local.n - l, remote.v + r, remote.n - r);
		if (n < 0 && failed() == COPY_BARRED)
			return COPY_BARRED;
		if (n <= 0)
			return whose_fault(src->owner, &local.v[l]);
		left -= (uint64_t)n;
		advance(&local, &l, (uint64_t)n);
		advance(&remote, &r, (uint64_t)n);
	}
	sgl_reset(&from);
	sgl_reset(&to);
	if (!sgl_add(&from, (uint8_t *)&tail, ntail) || !sgl_add(&to, tail_at, ntail))
		return COPY_BAD_TARGET;
	return fault_guard_copy(&to, &from, ntail);
}

void *foreign_gather(const struct nic_sgl *from, uint64_t len, enum nic_copied *copied)
{
	static struct nic_sgl to;
	uint8_t *p = malloc(len);

	*copied = COPY_DONE;
	sgl_reset(&to);
	if (p && sgl_add(&to, p, len))
		*copied = fault_guard_copy(&to, from, len);
	else
		*copied = COPY_BAD_TARGET;
	if (*copied == COPY_DONE)
		return p;
	free(p);
	return NULL;
}

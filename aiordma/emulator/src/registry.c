/* SPDX-License-Identifier: MIT
 * The registry of this user's processes: see registry.h.
 *
 * There is no daemon. A process lives in a slot as long as it holds the lock on that slot's byte of the file. The kernel
 * lets go of such a lock (fcntl(2), F_SETLK) when the process ends, however it ends; fork() doesn't hand it on; and
 * other than a process id it isn't used again by somebody else and means the same in every container that sees the file.
 *
 * The folder is the user's own, mode 0700. Whoever may write there may stop us or send us requests; what a request may do
 * is decided here, by the keys, as for any other. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "registry.h"
#include "emu.h"

/* In the name, so that builds with another layout don't meet. */
#define REGISTRY_NAME "registry"

/* Of everything in the folder: another layout needs another number. Processes of different versions don't meet, and don't
 * take each other's files for those of the dead. */
#define LAYOUT 4u

bool qpn_shared;
uint32_t qpn_first_block;
uint16_t qpn_block_index[QPN_BLOCKS];

static struct registry *shared;
static struct registry_peer self;
static int file = -1;
static char folder[PATH_MAX - 64];
static uint16_t own_blocks[QPN_BLOCKS];
static uint32_t nown;
static uint64_t nonce; /* others read it here */
static uint32_t users;
static bool lost;

/* ---------------------------------------------------------------- the folder */

static bool ours(const char *path)
{
	struct stat st;

	return !fstatat(AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode) && st.st_uid == geteuid() &&
	       !(st.st_mode & 077);
}

static bool make_folder(const char *parent, const char *name)
{
	int n = snprintf(folder, sizeof(folder), "%s/%s", parent, name);

	if (n < 0 || (size_t)n >= sizeof(folder) || (mkdir(folder, 0700) && errno != EEXIST))
		return false;
	if (ours(folder))
		return true;
	emu_log(EMU_WARN, "%s isn't a folder that only we may use", folder);
	return false;
}

/* The first that works. /dev/shm comes before XDG_RUNTIME_DIR, because a program from a login session and one from a
 * service must meet, and only the former has that variable. */
static bool find_folder(void)
{
	const char *asked = getenv("AIORDMA_EMULATOR_RUNTIME_DIR"), *runtime = getenv("XDG_RUNTIME_DIR");
	char name[32];

	snprintf(name, sizeof(name), "aiordma-%u.%u", (unsigned)geteuid(), LAYOUT);
	if (asked && *asked)
		return make_folder(asked, name);
	return make_folder("/dev/shm", name) || (runtime && *runtime && make_folder(runtime, name)) ||
	       make_folder("/tmp", name);
}

static bool map_file(void)
{
	char path[PATH_MAX];
	struct stat st;

	snprintf(path, sizeof(path), "%s/" REGISTRY_NAME, folder);
	file = emu_real.open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (file < 0 || fstatat(file, "", &st, AT_EMPTY_PATH) || st.st_uid != geteuid() || !S_ISREG(st.st_mode))
		return false;
	if (st.st_size < (off_t)sizeof(*shared) && ftruncate(file, sizeof(*shared)))
		return false;
	shared = emu_real.mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (shared == MAP_FAILED)
		shared = NULL;
	return shared;
}

/* ---------------------------------------------------------------- slots */

static struct flock slot_lock(uint32_t slot)
{
	return (struct flock){ .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1 };
}

static bool slot_locked(uint32_t slot)
{
	struct flock l = slot_lock(slot);

	return slot == self.slot || (!fcntl(file, F_GETLK, &l) && l.l_type != F_UNLCK);
}

static void free_blocks(uint32_t slot)
{
	for (uint32_t b = 0; b < QPN_BLOCKS; b++) {
		uint16_t owner = (uint16_t)(slot + 1);

		__atomic_compare_exchange_n(&shared->block_owner[b], &owner, 0, false, __ATOMIC_SEQ_CST,
					    __ATOMIC_RELAXED);
	}
}

static bool take_slot(void)
{
	struct registry_entry *e;

	self.slot = UINT32_MAX;
	for (uint32_t i = 0; i < REGISTRY_SLOTS && self.slot == UINT32_MAX; i++) {
		struct flock l = slot_lock(i);

		if (!fcntl(file, F_SETLK, &l))
			self.slot = i;
	}
	if (self.slot == UINT32_MAX)
		return false;
	e = &shared->entry[self.slot];
	free_blocks(self.slot);
	self.pid = getpid();
	self.generation = __atomic_add_fetch(&e->generation, 1, __ATOMIC_SEQ_CST);
	if (getrandom(&nonce, sizeof(nonce), GRND_NONBLOCK) != sizeof(nonce))
		nonce = (uint64_t)self.pid << 32 | self.generation;
	e->nonce = nonce;
	e->nonce_address = (uintptr_t)&nonce;
	memset(e->calling, 0, sizeof(e->calling));
	__atomic_store_n(&e->asleep, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&e->thread, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&e->pid, self.pid, __ATOMIC_RELEASE);
	return true;
}

bool registry_alive(uint32_t slot, uint32_t generation)
{
	return shared && slot < REGISTRY_SLOTS && slot_locked(slot) &&
	       __atomic_load_n(&shared->entry[slot].generation, __ATOMIC_ACQUIRE) == generation;
}

/* Files that belong to processes: "KIND-SLOT.GENERATION", "KIND-SLOT.GENERATION-SLOT.GENERATION". */
static bool file_is_stale(const char *name)
{
	const char *dash = strchr(name, '-');
	unsigned slot, generation;
	bool any = false;

	if (!strncmp(name, "registry-", 9))
		return false;
	for (; dash; dash = strchr(dash + 1, '-')) {
		if (sscanf(dash, "-%u.%u", &slot, &generation) != 2)
			return false; /* not ours */
		any = true;
		if (!registry_alive(slot, generation))
			return true;
	}
	return any && registry_self()->slot == UINT32_MAX;
}

/* An owner takes its slot before it makes a file, so a file whose owner has none is left over. */
static void sweep(void)
{
	DIR *dir = opendir(folder);
	struct dirent *d;
	char path[PATH_MAX];

	while (dir && (d = readdir(dir))) {
		if (d->d_name[0] == '.' || strlen(d->d_name) > 60 || !file_is_stale(d->d_name))
			continue;
		snprintf(path, sizeof(path), "%s/%s", folder, d->d_name);
		unlink(path);
	}
	if (dir)
		closedir(dir);
}

/* ---------------------------------------------------------------- QP numbers */

static bool claim_block(void)
{
	for (uint32_t i = 0; i < QPN_BLOCKS; i++) {
		uint32_t b = __atomic_fetch_add(&shared->next_block, 1, __ATOMIC_RELAXED) % QPN_BLOCKS;
		uint16_t nobody = 0;

		if (!b || !__atomic_compare_exchange_n(&shared->block_owner[b], &nobody, (uint16_t)(self.slot + 1), false,
						       __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
			continue;
		own_blocks[nown++] = (uint16_t)b;
		qpn_block_index[b] = (uint16_t)nown;
		qpn_first_block = own_blocks[0];
		return true;
	}
	return false;
}

static void free_blocks_of_the_dead(void)
{
	for (uint32_t s = 0; s < REGISTRY_SLOTS; s++)
		if (!slot_locked(s))
			free_blocks(s);
}

void qpn_share(void)
{
	qpn_shared = true;
}

bool qpn_reserve(uint32_t indices)
{
	if (!qpn_shared)
		return true;
	while (qpn_limit() < indices) {
		if (claim_block())
			continue;
		free_blocks_of_the_dead();
		if (!claim_block())
			return false;
	}
	return true;
}

uint32_t qpn_limit(void)
{
	return qpn_shared ? nown << QPN_BLOCK_BITS : UINT32_MAX;
}

uint32_t qpn_of_index(uint32_t index)
{
	if (!qpn_shared)
		return index;
	return (uint32_t)own_blocks[index >> QPN_BLOCK_BITS] << QPN_BLOCK_BITS | (index & (QPN_BLOCK_SIZE - 1));
}

bool registry_owner(uint32_t qpn, struct registry_peer *peer)
{
	uint32_t slot;

	if (!shared)
		return false;
	slot = __atomic_load_n(&shared->block_owner[qpn >> QPN_BLOCK_BITS & (QPN_BLOCKS - 1)], __ATOMIC_ACQUIRE);
	if (!slot || slot > REGISTRY_SLOTS || --slot == self.slot)
		return false;
	peer->slot = slot;
	peer->generation = __atomic_load_n(&shared->entry[slot].generation, __ATOMIC_ACQUIRE);
	peer->pid = __atomic_load_n(&shared->entry[slot].pid, __ATOMIC_RELAXED);
	return registry_alive(slot, peer->generation);
}

/* ---------------------------------------------------------------- start and end */

bool registry_on(void)
{
	return shared;
}

bool registry_torn(uintptr_t address, uintptr_t *start, size_t *len)
{
	if (!shared || address - (uintptr_t)shared >= sizeof(*shared))
		return false;
	lost = true;
	*start = (uintptr_t)shared;
	*len = (sizeof(*shared) + EMU_PAGE - 1) & ~(size_t)(EMU_PAGE - 1);
	return true;
}

bool registry_lost(void)
{
	return lost;
}

const struct registry_peer *registry_self(void)
{
	return &self;
}

void registry_thread(pid_t thread)
{
	if (shared)
		__atomic_store_n(&shared->entry[self.slot].thread, thread, __ATOMIC_RELEASE);
}

struct registry_entry *registry_entry(uint32_t slot)
{
	return &shared->entry[slot];
}

const char *registry_folder(void)
{
	return folder;
}

static void forget(void)
{
	if (shared)
		emu_real.munmap(shared, sizeof(*shared));
	if (file >= 0)
		emu_real.close(file);
	shared = NULL;
	file = -1;
	users = 0;
	lost = false;
	nown = 0;
	qpn_shared = false;
	qpn_first_block = 0;
	memset(qpn_block_index, 0, sizeof(qpn_block_index));
}

bool registry_start(void)
{
	int err;

	if (users) {
		users++;
		return true;
	}
	if (find_folder() && map_file() && take_slot()) {
		users = 1;
		sweep();
		emu_log(EMU_DEBUG, "process %u.%u in %s", self.slot, self.generation, folder);
		return true;
	}
	err = errno;
	forget();
	emu_log(EMU_WARN, "other processes can't be reached: nothing to meet them at (%s)", strerror(err));
	return false;
}

void registry_stop(void)
{
	if (!shared || --users)
		return;
	free_blocks(self.slot);
	forget(); /* the lock goes with the descriptor */
}

void registry_forked(void)
{
	/* The child has no lock: those of fcntl() are the parent's alone, and stay its own when our copy is closed. */
	forget();
	nonce = 0; /* its memory isn't the parent's */
}

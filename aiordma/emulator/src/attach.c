/* SPDX-License-Identifier: MIT
 * In-process attachment: patches the import slots (GOT) of the RDMA libraries that are loaded already, so that their
 * calls to the C library come to our hooks. Nothing else in the process is touched, and no environment variable or
 * second start of the program is needed.
 *
 * The layout is the generic ELF ABI's: DT_JMPREL and DT_RELA list the slots, each naming a symbol of DT_SYMTAB.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "control.h"

#if defined(__x86_64__)
#define SLOT_TYPES R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64
#elif defined(__aarch64__)
#define SLOT_TYPES R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64
#else
#error "attach.c doesn't know the relocation types of this machine"
#endif

/* By the start of the file's name, because wheels carry copies such as libibverbs-1b2c3d4e.so.1. */
static const char *const libraries[] = { "libibverbs", "libmlx5", "librdmacm", "libnl-3", "libnl-route-3" };

static const char *const hooked[] = {
	"open",	    "open64",	"__open_2", "__open64_2", "openat", "openat64", "__openat_2", "__openat64_2",
	"stat",	    "stat64",	"__xstat",  "__xstat64",  "fstat",  "fstat64",	"__fxstat",   "__fxstat64",
	"ioctl",    "write",	"mmap",	    "mmap64",	  "munmap", "close",	"socket",
};

struct patch {
	void **slot;
	void *original;
	bool relro;
};

static struct patch *patches;
static size_t npatches;
static pthread_mutex_t patch_lock = PTHREAD_MUTEX_INITIALIZER;

/* Our definition of a hooked name, exported for LD_PRELOAD by interpose.c. */
static void *replacement(const char *name)
{
	static void *self;
	Dl_info info;

	if (!strcmp(name, "dlopen"))
		return (void *)emu_hook_dlopen;
	for (size_t i = 0; i < ARRAY_LEN(hooked); i++) {
		if (strcmp(name, hooked[i]))
			continue;
		if (!self && dladdr((void *)replacement, &info) && info.dli_fname)
			self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
		return self ? dlsym(self, name) : NULL;
	}
	return NULL;
}

struct image {
	const ElfW(Rela) *tables[2];
	size_t lengths[2];
	const ElfW(Sym) *symbols;
	const char *strings;
	ElfW(Addr) base, relro, relro_end;
};

/* glibc has relocated the pointers of the dynamic section, other loaders haven't. */
static ElfW(Addr) pointer(const struct dl_phdr_info *info, ElfW(Addr) value)
{
	return value < info->dlpi_addr ? value + info->dlpi_addr : value;
}

static bool read_image(const struct dl_phdr_info *info, struct image *image)
{
	const ElfW(Dyn) *d = NULL;

	memset(image, 0, sizeof(*image));
	image->base = info->dlpi_addr;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];

		if (p->p_type == PT_DYNAMIC)
			d = (const ElfW(Dyn) *)(info->dlpi_addr + p->p_vaddr);
		if (p->p_type == PT_GNU_RELRO) {
			image->relro = info->dlpi_addr + p->p_vaddr;
			image->relro_end = image->relro + p->p_memsz;
		}
	}
	for (; d && d->d_tag != DT_NULL; d++) {
		ElfW(Addr) at = pointer(info, d->d_un.d_ptr);

		switch (d->d_tag) {
		case DT_JMPREL:
			image->tables[0] = (const ElfW(Rela) *)at;
			break;
		case DT_PLTRELSZ:
			image->lengths[0] = d->d_un.d_val / sizeof(ElfW(Rela));
			break;
		case DT_RELA:
			image->tables[1] = (const ElfW(Rela) *)at;
			break;
		case DT_RELASZ:
			image->lengths[1] = d->d_un.d_val / sizeof(ElfW(Rela));
			break;
		case DT_SYMTAB:
			image->symbols = (const ElfW(Sym) *)at;
			break;
		case DT_STRTAB:
			image->strings = (const char *)at;
			break;
		default:
			break;
		}
	}
	return image->symbols && image->strings;
}

static bool is_slot(unsigned type)
{
	static const unsigned types[] = { SLOT_TYPES };

	for (size_t i = 0; i < ARRAY_LEN(types); i++)
		if (type == types[i])
			return true;
	return false;
}

/* With full RELRO the slots were made read-only after loading. They are again afterwards. */
static int store(void **slot, void *value, bool relro)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)slot & ~(page - 1);

	if (relro && mprotect((void *)at, page, PROT_READ | PROT_WRITE))
		return errno;
	__atomic_store_n(slot, value, __ATOMIC_RELEASE);
	if (relro)
		mprotect((void *)at, page, PROT_READ);
	return 0;
}

static bool in_relro(const struct image *image, void **slot)
{
	/* The loader protects whole pages; a slot in the last, partial one is still writable. */
	ElfW(Addr) page = (ElfW(Addr))sysconf(_SC_PAGESIZE);

	return (ElfW(Addr))slot >= (image->relro & ~(page - 1)) && (ElfW(Addr))slot < (image->relro_end & ~(page - 1));
}

static void patch_slot(const struct image *image, void **slot, void *value)
{
	struct patch *grown;
	int err;

	if (*slot == value)
		return;
	grown = realloc(patches, (npatches + 1) * sizeof(*patches));
	if (!grown)
		return;
	patches = grown;
	patches[npatches] = (struct patch){ slot, *slot, in_relro(image, slot) };
	err = store(slot, value, patches[npatches].relro);
	if (err)
		emu_log(EMU_ERROR, "can't patch an import slot: %s", strerror(err));
	else
		npatches++;
}

static int visit(struct dl_phdr_info *info, size_t size, void *data)
{
	const char *slash = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
	const char *name = slash ? slash + 1 : info->dlpi_name;
	struct image image;
	bool ours = false;

	(void)size;
	(void)data;
	for (size_t i = 0; name && i < ARRAY_LEN(libraries); i++)
		ours |= !strncmp(name, libraries[i], strlen(libraries[i]));
	if (!ours || !read_image(info, &image))
		return 0;
	for (unsigned t = 0; t < 2; t++)
		for (size_t i = 0; i < image.lengths[t]; i++) {
			const ElfW(Rela) *r = &image.tables[t][i];
			const char *symbol;
			void *value;

			if (!is_slot(ELF64_R_TYPE(r->r_info)))
				continue;
			symbol = image.strings + image.symbols[ELF64_R_SYM(r->r_info)].st_name;
			value = replacement(symbol);
			if (value)
				patch_slot(&image, (void **)(image.base + r->r_offset), value);
		}
	return 0;
}

/* Returns the number of slots that are patched now. */
int emu_attach_loaded(void)
{
	int n;

	emu_real_init();
	pthread_mutex_lock(&patch_lock);
	/* Resolved before dl_iterate_phdr() takes the loader's lock, in which dlopen() must not be called. */
	for (size_t i = 0; i < ARRAY_LEN(hooked); i++)
		replacement(hooked[i]);
	dl_iterate_phdr(visit, NULL);
	n = (int)npatches;
	pthread_mutex_unlock(&patch_lock);
	return n;
}

int emu_detach_loaded(void)
{
	int n;

	pthread_mutex_lock(&patch_lock);
	/* The libraries are still there: _native.py holds libibverbs and libmlx5, and those hold libnl. */
	for (size_t i = 0; i < npatches; i++)
		store(patches[i].slot, patches[i].original, patches[i].relro);
	n = (int)npatches;
	free(patches);
	patches = NULL;
	npatches = 0;
	pthread_mutex_unlock(&patch_lock);
	return n;
}

/* SPDX-License-Identifier: MIT
 * What the files of the control half share: the one that answers the kernel's uverbs ABI.
 *
 * Kernel sources are cited by their path in the Linux tree: "core/" stands for drivers/infiniband/core/ and "mlx5/" for
 * drivers/infiniband/hw/mlx5/. Functions returning int give 0 or a positive errno unless they say otherwise.
 */
#ifndef AIORDMA_CONTROL_H
#define AIORDMA_CONTROL_H

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
#include <rdma/mlx5_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>

#include "emu.h"
#include "util.h"

#define EMU_PORT_PKEYS 1 /* RoCE has the default partition only: mlx5/main.c, mlx5_query_port_roce() */

#define EMU_LOG_DCI_STREAMS 16 /* a WQE names its stream in 16 bits */
#define EMU_TIMESTAMP_MASK ((1ull << 63) - 1)

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---------------------------------------------------------------- usermem.c
 * An application's bad pointer must give EFAULT, as from the kernel, and not end the process. */

int user_read(void *dst, uint64_t addr, size_t len);
int user_write(uint64_t addr, const void *src, size_t len);
int user_zero(uint64_t addr, size_t len);
/* 0: all zero; EOPNOTSUPP: not, which is what the kernel says of request bytes it doesn't know; EFAULT */
int user_check_zero(uint64_t addr, size_t len);

/* The kernel's ib_umem_get() (core/umem.c): checks that memory is there and writable if it must be, and charges its
 * pages to RLIMIT_MEMLOCK. *pages is what to give back to umem_release(). */
int umem_get(uint64_t addr, uint64_t len, bool writable, uint64_t *pages);
void umem_release(uint64_t pages);
/* A queue's buffer: its offset in a page is told to the device in units of 64 bytes, and what can't be told is EINVAL:
 * __mlx5_umem_find_best_quantized_pgoff() in mlx5/mem.c. */
static inline bool queue_misaligned(uint64_t addr)
{
	return addr & 63;
}
void umem_reset(void); /* in a fork() child, which owns none of it */

/* ---------------------------------------------------------------- context.c */

/* A device node's descriptor and a channel's both come to our hooks by number. */
enum emu_file_kind { EMU_FILE_NONE, EMU_FILE_NODE, EMU_FILE_CHANNEL, EMU_FILE_CM, EMU_FILE_DEAD };

struct cm_file; /* cm.h: an open /dev/infiniband/rdma_cm */

struct emu_file {
	enum emu_file_kind kind;
	uint64_t dev, ino; /* what the descriptor must still be: it may have been closed where no hook saw it */
	struct emu_ucontext *ctx;
	struct emu_channel *channel;
	struct cm_file *cm;
};

/* Without the lock and in a few loads: false for nearly every descriptor of a preloaded program. */
bool emu_fd_known(int fd);
/* The rest with emu.lock held. */
struct emu_file *emu_fd_get(int fd); /* NULL if it isn't ours any more */
int emu_fd_set(int fd, enum emu_file_kind, struct emu_ucontext *, struct emu_channel *);
void emu_fd_clear(int fd);  /* closed: drop what it held */
void emu_fd_forget(int fd); /* only the table's entry */

/* These take the lock themselves. */
int emu_node_open(struct emu_device *, int flags); /* a descriptor, or -errno */
int emu_cm_open(int flags);			   /* the same, of /dev/infiniband/rdma_cm */
void emu_node_adopt(int fd);			   /* if it's a dup() of a node we know: remember it */
uint64_t emu_node_st_dev(void);			   /* st_dev of every node's descriptor; 0 before the first */
int emu_fd_close(int fd);			   /* what close(fd) returns, with errno */
bool emu_foreign(void);				   /* a fork() or vfork() child in which nothing may be touched */
uint32_t emu_open_contexts(void);

/* ---------------------------------------------------------------- config.c */

/* Reads the file that AIORDMA_EMULATOR_CONFIG names, once, unless aiordma_emu_configure() came first. */
bool emu_configured(void);
int emu_config_parse(const char *text, char *error, size_t error_size); /* fills emu.devices */
struct emu_device *emu_device_by_node(const char *path);
unsigned emu_node_rdev_minor(const struct emu_device *);
#define EMU_UVERBS_MAJOR 231	  /* IB_UVERBS_MAJOR, core/uverbs_main.c */
#define EMU_UVERBS_BASE_MINOR 192 /* IB_UVERBS_BASE_MINOR */
#define EMU_CM_MAJOR 10		  /* MISC_MAJOR */
#define EMU_CM_MINOR 58		  /* one of those that the kernel gives as it likes; sysfs.py has the same */

/* ---------------------------------------------------------------- hooks.c */

int emu_hook_open(const char *path, int flags, mode_t mode);
int emu_hook_openat(int dirfd, const char *path, int flags, mode_t mode);
int emu_hook_stat_path(const char *path, struct stat *st); /* 1: it was ours and *st is filled; 0: not; -1: errno */
void emu_hook_fstat_fix(int fd, struct stat *st);	     /* after the real fstat() succeeded */
int emu_hook_ioctl(int fd, unsigned long request, void *arg);
ssize_t emu_hook_write(int fd, const void *buf, size_t len);
void *emu_hook_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset);
int emu_hook_munmap(void *addr, size_t len);
int emu_hook_close(int fd);
int emu_hook_socket(int domain, int type, int protocol);
void *emu_hook_dlopen(const char *path, int flags);
void emu_real_init(void);

/* ---------------------------------------------------------------- attach.c */

int emu_attach_loaded(void);
int emu_detach_loaded(void);

/* ---------------------------------------------------------------- objects.c
 * Handles as the kernel's xarray gives them: the lowest free one, from 0 (core/rdma_core.c, idr_add_uobj()). */

void *emu_object_alloc(struct emu_ucontext *, enum emu_type, size_t size); /* no handle yet; NULL: no memory */
int emu_object_publish(struct emu_object *);				   /* gives it a handle and counts it */
void *emu_object_get(struct emu_ucontext *, enum emu_type, uint32_t handle); /* NULL: none of that type */
/* For destruction: ENOENT no such handle, EINVAL another type, EBUSY in use (core/rdma_core.c). */
int emu_object_get_destroy(struct emu_ucontext *, enum emu_type, uint32_t handle, void *object);
void emu_object_free(struct emu_object *); /* takes the handle back, if it had one */
/* Undoes what creation did, by type: the hardware's object, counts on others, pinned memory. After retire() the event
 * counts of a CQ, QP or SRQ are final; destroy() is retire() and free(). */
void emu_object_retire(struct emu_object *);
void emu_object_destroy(struct emu_object *);
void emu_context_destroy_objects(struct emu_ucontext *);
int emu_limit(struct emu_ucontext *, enum emu_type, uint32_t max); /* ENOMEM if there are max already */

struct emu_channel *emu_channel_by_fd(struct emu_ucontext *, enum emu_type, int fd);
int emu_channel_create(struct emu_ucontext *, uint32_t record, struct emu_channel **);
void emu_channel_put(struct emu_channel *); /* the application closed it, or the last CQ on it went */
bool emu_channel_is_open(const struct emu_channel *);

/* ---------------------------------------------------------------- commands
 * One command in either form of the ABI: the core's request and response, and the provider's (mlx5) beside them. Where
 * a buffer is absent its length is 0. */

struct emu_ubuf {
	uint64_t addr;
	size_t len;
};

struct emu_cmd {
	struct emu_ucontext *ctx;
	struct emu_ubuf in, out, uhw_in, uhw_out;
	bool settled; /* see EMU_SETTLE */
};

/* Shorter requests are extended with zeros, longer ones must be zero beyond what is known; responses are cut short or
 * filled up with zeros: uverbs_request() and uverbs_response() of core/uverbs_cmd.c. */
int cmd_request(struct emu_cmd *, void *request, size_t size);
int cmd_response(struct emu_cmd *, const void *response, size_t size);
static inline uint32_t cmd_response_length(const struct emu_cmd *c, size_t size)
{
	return (uint32_t)MIN(c->out.len, size);
}
/* The provider's part, which must be at least `min` long and is zero-extended to `size`. */
int cmd_uhw_request(struct emu_cmd *, void *request, size_t min, size_t size);
int cmd_uhw_response(struct emu_cmd *, const void *response, size_t size);

struct emu_write_method {
	uint32_t command; /* IB_USER_VERBS_CMD_*, or IB_USER_VERBS_EX_CMD_* if `extended` */
	bool extended, has_response, has_udata;
	uint16_t request, response; /* least sizes */
	int (*run)(struct emu_cmd *);
	const char *name;
};
const struct emu_write_method *emu_write_method_find(uint32_t command, int *error);

/* run() is called with emu.lock held, and needs no context only for GET_CONTEXT. */
ssize_t emu_write(struct emu_ucontext *, const void *buf, size_t len, bool settled); /* len, or -errno */
int emu_ioctl(struct emu_ucontext *, void *hdr, bool settled);

/* What a command returns, and nobody else sees, if it must find executed what was posted before it: a firmware command
 * takes long enough for that. It's run again every EMU_SETTLE_US, the last time with `settled` set. */
#define EMU_SETTLE 4096
#define EMU_SETTLE_US 500
#define EMU_SETTLE_TRIES 2000 /* a second: the device thread may have to wait long for a CPU */

/* ---------------------------------------------------------------- the ioctl form (uverbs_ioctl.c) */

enum emu_attr_kind { ATTR_IN, ATTR_OUT, ATTR_IDR, ATTR_IDR_NEW, ATTR_IDR_DESTROY, ATTR_FD, ATTR_FD_NEW };

struct emu_attr_spec {
	uint16_t id;
	uint8_t kind;
	bool mandatory;
	uint16_t min, max; /* bytes, ATTR_IN and ATTR_OUT; max 0: any length from min on */
	uint8_t type;	   /* enum emu_type, ATTR_IDR* */
	bool zero_trailing; /* longer than max is fine if the rest is zero (in) or will be zeroed (out) */
};

#define EMU_METHOD_ATTRS 18

struct emu_attr {
	bool present;
	uint16_t len;
	uint64_t data;	    /* inline value, or address */
	uint64_t user;	    /* where the application's struct ib_uverbs_attr is */
	uint16_t flags;
	void *object;	    /* ATTR_IDR*, ATTR_FD */
};

struct emu_ioctl_method;

struct emu_ioctl_call {
	struct emu_cmd cmd; /* ctx and the UHW buffers, if the method has them */
	const struct emu_ioctl_method *method;
	struct emu_attr attrs[EMU_METHOD_ATTRS];
};

struct emu_ioctl_method {
	uint16_t object, method;
	bool udata;
	bool no_context; /* may run before GET_CONTEXT */
	bool inherited;	 /* works in a fork() child too */
	const struct emu_attr_spec *attrs;
	uint32_t nattrs;
	int (*run)(struct emu_ioctl_call *);
	const char *name;
};

struct emu_attr *attr_get(struct emu_ioctl_call *, uint16_t id); /* NULL: not given */
int attr_in(struct emu_ioctl_call *, uint16_t id, void *dst, size_t size); /* zero-extended; zeros if not given */
uint64_t attr_in_value(struct emu_ioctl_call *, uint16_t id); /* of up to 8 bytes, these are inline; 0 if not given */
int attr_out(struct emu_ioctl_call *, uint16_t id, const void *src, size_t size);
int attr_out_id(struct emu_ioctl_call *, uint16_t id, int64_t value); /* a new handle or descriptor */
void *attr_object(struct emu_ioctl_call *, uint16_t id);

#define ATTR_IN_TYPE(id_, type_, must) { .id = (id_), .kind = ATTR_IN, .mandatory = (must), .min = sizeof(type_), .max = sizeof(type_) }
#define ATTR_OUT_TYPE(id_, type_, must) { .id = (id_), .kind = ATTR_OUT, .mandatory = (must), .min = sizeof(type_), .max = sizeof(type_) }
#define ATTR_FLAGS_IN(id_, must) { .id = (id_), .kind = ATTR_IN, .mandatory = (must), .min = 4, .max = 8 }
/* A constant of at most 64 bits; libibverbs sends all eight bytes whatever the enum behind it (fill_attr_const_in). */
#define ATTR_CONST_IN(id_) { .id = (id_), .kind = ATTR_IN, .mandatory = true, .min = 1, .max = 8 }
#define ATTR_HANDLE(id_, kind_, type_, must) { .id = (id_), .kind = (kind_), .mandatory = (must), .type = (type_) }
/* The provider's data passes as it is; its own reader checks the length. */
#define ATTR_UHW                                                                       \
	{ .id = UVERBS_ATTR_UHW_IN, .kind = ATTR_IN, .min = 0, .max = 0 },             \
	{ .id = UVERBS_ATTR_UHW_OUT, .kind = ATTR_OUT, .min = 0, .max = 0 }

#define IOCTL_METHOD(object_, method_, specs, run_, ...)                                                   \
	{ .object = (object_), .method = (method_), .attrs = (specs), .nattrs = ARRAY_LEN(specs), .run = (run_), \
	  .name = #method_, __VA_ARGS__ }

/* Each command file offers its methods in both forms. */
struct emu_methods {
	const struct emu_write_method *write;
	uint32_t nwrite;
	const struct emu_ioctl_method *ioctl;
	uint32_t nioctl;
};
extern const struct emu_methods emu_device_methods, emu_pd_methods, emu_mr_methods, emu_ah_methods, emu_cq_methods,
	emu_qp_methods, emu_srq_methods, emu_xrcd_methods, emu_devx_methods, emu_uar_methods, emu_wq_methods, emu_dm_methods,
	emu_pp_methods, emu_var_methods;
extern const struct emu_methods *const emu_all_methods[];
extern const uint32_t emu_all_methods_len;

/* ---------------------------------------------------------------- pieces that several command files use */

static inline struct emu_port_config *emu_port(struct emu_device *d, uint32_t port)
{
	return port >= 1 && port <= d->nports ? &d->ports[port - 1] : NULL;
}

/* cmd_device.c */
int emu_context_establish(struct emu_cmd *);
void emu_fill_ucontext(struct emu_ucontext *, struct mlx5_ib_alloc_ucontext_resp *);

/* cmd_ah.c: checks a path as rdma_check_ah_attr() and rdma_get_gid_attr() do. */
int emu_path_check(struct emu_device *, const struct ib_uverbs_qp_dest *, struct emu_path *);
void emu_path_from_ah(const struct ib_uverbs_ah_attr *, struct ib_uverbs_qp_dest *);
void emu_path_to_dest(const struct emu_path *, struct ib_uverbs_qp_dest *);

/* qp_create.c */
struct emu_qp_request {
	uint64_t user_handle;
	struct emu_pd *pd;
	struct emu_cq *scq, *rcq;
	struct emu_srq *srq;
	struct emu_xrcd *xrcd;
	uint32_t type, create_flags;
	bool sig_all;
	struct ib_uverbs_qp_cap cap;
};
int emu_qp_create(struct emu_cmd *, const struct emu_qp_request *, struct emu_qp **);
uint32_t emu_qp_visible_number(const struct emu_qp *); /* 0: a DCT before it is ready to receive */

/* qp_state.c: the kernel's ib_modify_qp_is_ok(). */
bool emu_qp_modify_is_ok(const struct emu_qp *, uint8_t cur, uint8_t next, uint32_t mask);
/* and which of those transitions the mlx5 driver has a firmware command for. */
bool emu_qp_hardware_can(uint8_t cur, uint8_t next);
int emu_modify_qp(struct emu_cmd *, struct ib_uverbs_ex_modify_qp *);
void emu_qp_forget_attributes(struct emu_qp *); /* to RESET: what changes of state had set */

/* cmd_uar.c: pages that the library maps. */
void *emu_uar_mmap(struct emu_ucontext *, void *addr, size_t len, int prot, off_t offset);
void emu_uar_unmap_range(void *addr, size_t len); /* takes the lock if a page of ours is in there */
void emu_uar_adopt(struct emu_ucontext *);	  /* before the context's queues: what was mapped past the hooks */
struct emu_uar *emu_uar_find(struct emu_ucontext *, uint32_t page_id);
void emu_uar_retire(struct emu_uar *);

#endif

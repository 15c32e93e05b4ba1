/* SPDX-License-Identifier: MIT
 *
 * The emulated ConnectX: shared types and the interface between its two halves.
 *
 *   control  (interpose.c attach.c config.c context.c objects.c uverbs_*.c cmd_*.c devx_*.c)
 *            answers the kernel's uverbs ABI: open/ioctl/write/mmap/close on the device node
 *   data     (engine.c doorbell.c mkey.c cq.c channel.c sq.c requester.c responder.c rq.c fabric.c)
 *            plays the hardware: reads doorbell records and WQEs, moves memory, writes CQEs, raises events
 *
 * Control calls data, through the functions declared at the end of this file. Data never calls control.
 *
 * Locking: one mutex, emu.lock, guards every structure below. Commands take it with emu_lock(), which also asks the
 * device thread to let go early; the device thread holds it for one bounded slice of work at a time. What an
 * application writes with no lock (doorbell records, WQEs, UAR pages) is read with the acquire helpers of util.h.
 */
#ifndef AIORDMA_EMU_H
#define AIORDMA_EMU_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <infiniband/verbs.h>

#define EMU_EXPORT __attribute__((visibility("default")))

#define EMU_MAX_DEVICES 16
#define EMU_MAX_PORTS 2
#define EMU_MAX_GIDS 32
#define EMU_NAME_MAX 64 /* IBV_SYSFS_NAME_MAX */
#define EMU_PAGE 4096u
/* Keys that name keys that name keys: how far the device follows. It tells, as max_indirection (mlx5_ifc.h). */
#define EMU_MAX_INDIRECTION 4

/* ---------------------------------------------------------------- lists */

struct emu_list {
	struct emu_list *next, *prev;
};

/* ---------------------------------------------------------------- configuration (config.c) */

struct emu_gid {
	union ibv_gid gid;
	uint8_t type; /* enum ibv_gid_type: IB/RoCE v1 = 0.., as the kernel's gid_attrs/types shows */
	bool valid;
	char ndev[16];
};

struct emu_port_config {
	struct emu_gid gids[EMU_MAX_GIDS];
	uint32_t ngids;
	uint8_t state;	    /* enum ibv_port_state */
	uint8_t active_mtu; /* enum ibv_mtu */
	uint8_t max_mtu;
	uint8_t link_layer;
	/* Faults in force that take it down (inject.c), and its state without them. */
	uint8_t own_state;
	uint32_t taken_down;
};

/* Everything a test may want smaller, larger or absent. One row a limit: config.c names them for the config text. */
struct emu_limits {
	uint32_t max_qp, max_qp_wr, max_sge, max_sge_rd, max_inline;
	uint32_t max_cq, max_cqe;
	uint32_t max_mr, max_pd, max_mw, max_ah;
	uint32_t max_srq, max_srq_wr, max_srq_sge;
	uint32_t max_qp_rd_atom, max_qp_init_rd_atom;
	uint32_t max_msg_sz; /* bytes */
	uint64_t max_mr_size;
	uint32_t comp_vectors;
	uint32_t max_wr_memcpy_length; /* bytes; 0: the device has no DMA memcpy */
	uint32_t max_dm_size; /* bytes of device memory in one piece; 0: there is none */
	bool atomics;
	bool devx, umr;
	uint32_t log_max_dci_streams; /* 0: DCIs have none */
	bool dc, xrc; /* dynamically connected transport; extended reliable connections */
};

struct emu_device;

/* ---------------------------------------------------------------- objects */

enum emu_type {
	EMU_NONE,
	EMU_PD,
	EMU_MR,
	EMU_MW,
	EMU_DEVX_MKEY,
	EMU_AH,
	EMU_CHANNEL,
	EMU_CQ,
	EMU_QP,
	EMU_SRQ,
	EMU_XRCD,
	EMU_UAR,
	EMU_DEVX_OBJ,
	EMU_UMEM,
	EMU_WQ,
	EMU_RWQ_IND_TBL,
	EMU_DM,
	EMU_VAR,
	EMU_PP,
	EMU_CMD_FD, /* counted as a channel */
	EMU_TYPES,
};

struct emu_ucontext;

/* Header of every object. Handles are per context, as the kernel's are per ufile. usecnt counts the objects that
 * depend on this one; destroying while it is not zero is EBUSY. */
struct emu_object {
	enum emu_type type;
	uint32_t handle;
	uint32_t usecnt;
	struct emu_ucontext *ctx;
};

struct emu_pd {
	struct emu_object o;
	uint32_t pdn; /* unique in the device; what keys are checked against */
};

/* A completion channel or a context's async-event queue: a pipe the library reads, records that did not fit kept
 * in `overflow` (the kernel's own list has no limit) and moved by the device thread when the reader makes room. */
struct emu_channel {
	struct emu_object o;
	int rfd, wfd;	     /* rfd is the library's; wfd is ours, O_NONBLOCK */
	uint32_t record;     /* bytes a record */
	uint8_t *overflow;   /* records that wait */
	size_t nover, cover; /* used, capacity, in records */
	struct emu_list link;
};

struct emu_klm {
	uint64_t addr;
	uint64_t len;
	uint32_t key;
	uint32_t stride;
};

/* A memory key: MR, memory window, or indirect mkey. */
struct emu_mkey {
	struct emu_object o;
	struct emu_device *dev;
	uint32_t key;	 /* index << 8 | variant */
	uint32_t pdn;
	uint32_t access; /* IBV_ACCESS_* */
	uint64_t iova;	 /* address a WQE uses for the first byte */
	uint64_t len;
	uint64_t host;	 /* where the bytes are, for a direct key */
	uint64_t pinned; /* bytes charged to RLIMIT_MEMLOCK */
	bool direct, free, strided;
	bool remote_invalidate; /* DEVX mkey: mkc.en_rinval */
	bool umr_en;		/* DEVX mkey: UMR may change it */
	struct emu_object *umem; /* control's: the memory object that a direct key is made of, a DEVX umem or device memory */
	uint32_t repeat, nklm, max_klm; /* max_klm: entries of 16 bytes, mkc.translations_octword_size */
	uint32_t cap_klm; /* umr.c: entries `klm` has room for */
	uint64_t repeat_bytes;
	struct emu_klm *klm;
	struct emu_mkey *parent; /* memory window: the MR it is bound to */
	uint32_t bound_qpn;	 /* type 2B memory window */
	uint8_t mw_type;	 /* memory window: enum ibv_mw_type */
	struct emu_pd *pd;	 /* control's, for usecnt; keys are checked against pdn */
};

struct emu_cq {
	struct emu_object o;
	struct emu_device *dev;
	uint32_t cqn;
	uint8_t *buf;
	uint32_t *db; /* [0] consumer index, [1] arm; big-endian; in the application's memory */
	uint32_t ncqe, cqe_size;
	/* The producer index: now, behind the last solicited CQE, and where the reader had read to when it armed. Of the
	 * 24 bits that the reader sees of them an old one would look new again after half a lap. */
	uint64_t pi, solicited_pi, arm_ci;
	uint8_t armed; /* 0, 1 next completion, 2 next solicited */
	uint32_t uar_page, comp_vector; /* control's, for queries; also uar_page of QPs and WQs */
	bool overrun; /* in error: IBV_EVENT_CQ_ERR raised, no further CQE */
	uint64_t user_handle;
	struct emu_channel *channel;
	uint32_t comp_events, async_events; /* written to the channel and not taken back */
	uint16_t moderate_count, moderate_period;
	struct emu_list armed_link;
	/* cq.c and engine.c: the consumer index as last read (or where it must be, after a resize), the arm word that
	 * was last acted upon, when a moderated event is due, place in the engine's scan */
	uint32_t ci, last_arm, scan_index;
	uint64_t event_due_ns;
	uint64_t pinned; /* control's: pages charged to RLIMIT_MEMLOCK for the buffer; also in SRQs and QPs */
};

struct emu_srq {
	struct emu_object o;
	struct emu_device *dev;
	struct emu_pd *pd;
	uint32_t srqn, uidx;
	uint8_t *buf;
	uint32_t *db;
	uint32_t wqe_shift, nwqe, max_wr, max_sge;
	uint32_t head; /* index of the next WQE to take */
	uint16_t taken; /* counter beside db[0] */
	uint32_t limit;
	uint64_t user_handle;
	uint32_t async_events;
	struct emu_cq *cq; /* XRC */
	struct emu_xrcd *xrcd;
	bool xrc;
	bool failed; /* rq.c: its list of WQEs is broken, IBV_EVENT_SRQ_ERR was raised */
	uint64_t pinned;
};

/* An XRC domain: the link between a target QP and the SRQs that its messages name. Shared by who opens the same file. */
struct emu_xrcd {
	struct emu_object o;
	bool named; /* made with a file, which is known by its inode; else nobody can share it */
	uint64_t dev, ino;
	uint32_t xrcdn;
};

/* Attributes of the path, as modify_qp left them. */
struct emu_path {
	union ibv_gid dgid;
	uint8_t sgid_index, port, hop_limit, traffic_class, sl;
	uint32_t flow_label;
	bool is_global;
	uint16_t dlid;
	uint8_t dmac[6];
};

struct emu_qp {
	struct emu_object o;
	struct emu_device *dev;
	struct emu_pd *pd;
	struct emu_cq *scq, *rcq;
	struct emu_srq *srq;
	struct emu_xrcd *xrcd; /* XRC_RECV, which has no pd and no CQs */
	uint32_t qpn, uidx, uar_page;
	uint8_t type;  /* enum ibv_qp_type */
	uint8_t state; /* enum ibv_qp_state */
	bool dci, dct, sq_sig_all;
	bool mmo; /* DMA memcpy was enabled: qpc_ext.mmo of INIT2INIT_QP */
	uint64_t dc_key;			   /* DCT: what a DCI has to know */
	uint8_t log_num_concurrent, log_num_errored; /* DCI streams as asked for at creation; 0: none */
	uint64_t user_handle;
	uint32_t async_events;

	/* creation */
	uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline;

	/* queues, in the application's memory */
	uint8_t *buf, *sq, *rq;
	uint32_t *db; /* [0] RQ producer, [1] SQ producer; big-endian, 16 bits count */
	uint32_t sq_nbb, rq_nwqe, rq_shift;
	uint16_t sq_ci, rq_ci; /* consumers; SQ in 64-byte basic blocks */

	/* modify_qp */
	uint32_t attr_mask_seen;
	struct emu_path av, alt;
	uint32_t qkey, rq_psn, sq_psn, dest_qpn, access;
	uint16_t pkey_index, alt_pkey_index;
	uint8_t mtu, mig_state, rd_atomic, dest_rd_atomic, min_rnr_timer, timeout, retry_cnt, rnr_retry, alt_port,
		alt_timeout, sq_draining;
	uint8_t port; /* of RESET to INIT; av.port once there is a path */

	/* engine state */
	struct emu_list active_link; /* on emu.active when there may be work */
	bool active;
	uint8_t stall;	      /* enum emu_stall */
	uint8_t tries;	      /* left, of retry_cnt or rnr_retry */
	uint64_t deadline_ns; /* CLOCK_MONOTONIC: the stalled WQE is tried again or fails then */
	uint64_t progress;    /* bytes of the WQE at sq_ci already moved: long messages go in slices */
	void *priv;	      /* the data half's own */
	uint64_t pinned;
};

struct emu_ah {
	struct emu_object o;
	struct emu_pd *pd;
	struct emu_path av;
};

/* A page of doorbell registers the application writes: mmap'ed by the library through our mmap hook. */
struct emu_uar {
	struct emu_object o;
	uint32_t page_id;
	volatile uint8_t *page; /* in the application's mapping; NULL until mapped */
	struct emu_list link;	/* the data half's */
	void *priv;
	struct emu_list ctx_link; /* control's: on emu_ucontext.uars */
};

struct emu_ucontext {
	int fd; /* the application's descriptor of the device node */
	struct emu_device *dev;
	struct emu_channel *async; /* NULL until ASYNC_EVENT_ALLOC or the write form's GET_CONTEXT */
	struct emu_object **handles;
	uint32_t nhandles, next_handle;
	struct emu_list link;
	pid_t owner; /* a fork child's close() must not take the parent's objects down */
	bool inherited; /* by a fork() child, where little of it works */
	uint64_t tag;   /* unique among this process and its children */
	uint64_t pinned;
	/* control's own (context.c) */
	bool established;	       /* GET_CONTEXT has succeeded */
	bool static_uars;	       /* tot_bfregs != 0: the library maps UAR pages by index, as with old kernels */
	bool devx;		       /* asked for with MLX5_IB_ALLOC_UCTX_DEVX */
	struct emu_list uars;	       /* struct emu_uar.ctx_link */
	struct emu_channel **channels; /* found by descriptor, so not in `handles` */
	uint32_t nchannels;
	uint32_t nfds; /* descriptors of the device node known to be open: dup() shares one context */
	uint64_t node_dev, node_ino; /* st_dev and st_ino of the descriptor */
};

struct emu_device {
	uint32_t index;
	char name[EMU_NAME_MAX];
	uint32_t uverbs_minor; /* /dev/infiniband/uverbsN */
	uint64_t node_guid;
	struct emu_limits limits;
	struct emu_port_config ports[EMU_MAX_PORTS];
	uint32_t nports;
	/* Numbers are per device, as on hardware. Tables of pointers, grown as needed, owned by the data half. */
	struct emu_qp **qps;
	struct emu_cq **cqs;
	struct emu_srq **srqs;
	struct emu_mkey **mkeys;
	uint32_t qps_size, cqs_size, srqs_size, mkeys_size;
	uint32_t next_qpn, next_cqn, next_srqn, next_mkey, next_pdn, next_uar, next_umem, next_rqn, next_rqtn,
		next_xrcdn;
	uint32_t count[EMU_TYPES]; /* live objects, for limits and for leak checks; kept by objects.c, which counts an
				    * object only once its emu_*_insert has succeeded */
};

struct emu_world {
	pthread_mutex_t lock;
	struct emu_device devices[EMU_MAX_DEVICES];
	uint32_t ndevices;
	struct emu_list contexts; /* struct emu_ucontext.link */
	bool legacy_write;	  /* configured: answer ENOTTY to the ioctl form, as an old kernel */
	uint32_t spin_us;	  /* device thread polls this long after the last work before it sleeps */
	bool use_uffd;
	bool reach_host; /* devices of other processes are on the same network */
	uint32_t cm_response_timeout, cm_retries; /* of the connection manager: 4.096 us << it, and how often */
	bool one_copy;	 /* their memory may be read, and they may read ours, where the system lets them */
};
extern struct emu_world emu; /* context.c */

/* engine.c (context.c has weak ones, so that the control half links alone) */
void emu_lock(void);
void emu_unlock(void);

/* ---------------------------------------------------------------- log (log.c) */

enum emu_level { EMU_ERROR, EMU_WARN, EMU_INFO, EMU_DEBUG };
extern enum emu_level emu_level;
void emu_log_(enum emu_level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#define emu_log(level, ...) ((level) <= emu_level ? emu_log_((level), __VA_ARGS__) : (void)0)

/* ---------------------------------------------------------------- real system calls (interpose.c)
 * The library interposes on open, close, ...; its own calls go to libc's through these. */
struct emu_real {
	int (*open)(const char *, int, ...);
	int (*close)(int);
	int (*ioctl)(int, unsigned long, ...);
	ssize_t (*read)(int, void *, size_t);
	ssize_t (*write)(int, const void *, size_t);
	void *(*mmap)(void *, size_t, int, int, int, off_t);
	int (*munmap)(void *, size_t);
};
extern struct emu_real emu_real;

/* ---------------------------------------------------------------- the data half, called by control with emu.lock held
 * unless it says otherwise. Functions that return int give 0 or a positive errno. */

/* engine.c: the device thread is started by the first context and stopped by the last; both without the lock.
 * After fork() the child has no device thread, and its contexts are dead (see context.c). */
int emu_engine_start(void);
void emu_engine_stop(void);
void emu_engine_wake(void); /* any thread, lock or not: there may be work, leave the idle state */
/* In a fork() child, from the pthread_atfork handler, emu.lock fresh and free: there is no device thread any more; forget
 * it and every list of objects, touch nothing that is shared with the parent (pipes!). Control empties the device tables
 * (qps, cqs, ... = NULL, sizes 0) itself. Weak empty default in context.c. */
void emu_engine_forked(void);

/* doorbell.c */
void emu_uar_mapped(struct emu_uar *); /* page is set: watch it */
void emu_uar_unmapped(struct emu_uar *);

/* mkey.c */
int emu_mkey_insert(struct emu_device *, struct emu_mkey *); /* gives it a key; ENOMEM at limits.max_mr */
void emu_mkey_remove(struct emu_mkey *);
struct emu_mkey *emu_mkey_find(struct emu_device *, uint32_t key);

/* cq.c */
int emu_cq_insert(struct emu_device *, struct emu_cq *); /* buf, db, ncqe, cqe_size set: gives it a cqn, marks every CQE
							  * invalid (opcode 0xF), puts the arm sentinel into db[1] */
void emu_cq_remove(struct emu_cq *);			 /* also takes its unread events back: the counts are right after */
int emu_cq_resize(struct emu_cq *, uint8_t *buf, uint32_t ncqe, uint32_t cqe_size); /* EINVAL: does not fit */

/* sq.c, rq.c */
int emu_qp_insert(struct emu_device *, struct emu_qp *); /* gives it a qpn */
void emu_qp_remove(struct emu_qp *);			 /* no CQE of it is written after this; unread events taken back */
void emu_qp_state_changed(struct emu_qp *, uint8_t old); /* qp->state is the new one: RESET clears the queues' counters,
							  * ERR flushes, RTS starts the SQ, SQD drains and raises the event */
void emu_qp_kick(struct emu_qp *);			 /* look at its queues soon */
bool emu_qp_streams_run(const struct emu_qp *); /* a DCI: what was taken off its queue is being executed, and doesn't wait */
/* How far the connection has come. */
/* Of a DCI: what executes its streams looks like a QP too, but is in no table. */
void emu_qp_for_each_lane(struct emu_qp *, void (*fn)(struct emu_qp *));

struct emu_qp_progress {
	uint32_t next_send_psn, next_rcv_psn;
	uint32_t messages_sent, messages_received; /* 24 bits, of what uses sequence numbers */
};
void emu_qp_progress(const struct emu_qp *, struct emu_qp_progress *);
/* Lets a DCI's stream work again after an error; EINVAL if it isn't in error. */
int emu_dci_stream_reset(struct emu_qp *, uint16_t stream);

/* mmio.c: pages of registers. `target` is where in the emulator's mapping of device memory the operations take place. */
enum emu_mmio {
	EMU_MMIO_CLOCK,
	EMU_MMIO_INCREMENT,
	EMU_MMIO_TEST_AND_SET,
};
#define EMU_CLOCK_OFFSET 0x8 /* of the clock register in its page */
bool emu_mmio_supported(void);
/* `fixed`: MAP_FIXED, or 0. MAP_FAILED with errno. */
void *emu_mmio_map(struct emu_ucontext *, void *address, size_t len, int fixed, enum emu_mmio, uint8_t *target);
void emu_mmio_unmapped(const void *address, size_t len); /* without the lock too */
bool emu_mmio_in_use(const uint8_t *target, size_t len);
void emu_mmio_forget(const struct emu_ucontext *);
void emu_mmio_forked(void);

int emu_srq_insert(struct emu_device *, struct emu_srq *);
void emu_srq_remove(struct emu_srq *);
void emu_srq_set_limit(struct emu_srq *, uint32_t limit);

/* channel.c */
int emu_channel_init(struct emu_channel *, uint32_t record_size); /* makes the pipe */
/* May come while CQs still point at the channel (the application closed its descriptor): later events are dropped, wfd
 * is -1 from here on. close_reader is false when the application has closed rfd itself; then rfd is no longer ours to
 * read either. The memory is control's. */
void emu_channel_close(struct emu_channel *, bool close_reader);
void emu_async_event(struct emu_ucontext *, uint32_t event_type, uint64_t element, uint32_t *counter);

/* ---------------------------------------------------------------- Python control, exported (control.c)
 * See aiordma/emulator/_native.py. Config is text, one directive a line; see config.c. */
EMU_EXPORT int aiordma_emu_configure(const char *text, char *error, size_t error_size);
EMU_EXPORT int aiordma_emu_attach(char *error, size_t error_size); /* patches the loaded libraries; slots patched, or -1 */
EMU_EXPORT int aiordma_emu_counts(const char *device, uint32_t *counts, uint32_t n); /* live objects by enum emu_type */
EMU_EXPORT int aiordma_emu_version(void);

#endif

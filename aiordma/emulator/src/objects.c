/* SPDX-License-Identifier: MIT
 * Handles, and the life and death of objects.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "devx.h"
#include "dm.h"
#include "pp.h"
#include "wq.h"

/* ---------------------------------------------------------------- handles */

void *emu_object_alloc(struct emu_ucontext *ctx, enum emu_type type, size_t size)
{
	struct emu_object *o = calloc(1, size);

	if (!o)
		return NULL;
	o->type = type;
	o->ctx = ctx;
	o->handle = UINT32_MAX;
	return o;
}

int emu_object_publish(struct emu_object *o)
{
	struct emu_ucontext *ctx = o->ctx;
	uint32_t h = ctx->next_handle; /* the lowest that may be free */

	while (h < ctx->nhandles && ctx->handles[h])
		h++;
	if (h == ctx->nhandles) {
		uint32_t size = ctx->nhandles ? ctx->nhandles * 2 : 64;
		struct emu_object **table = realloc(ctx->handles, size * sizeof(*table));

		if (!table)
			return ENOMEM;
		memset(table + ctx->nhandles, 0, (size - ctx->nhandles) * sizeof(*table));
		ctx->handles = table;
		ctx->nhandles = size;
	}
	ctx->handles[h] = o;
	ctx->next_handle = h + 1;
	o->handle = h;
	ctx->dev->count[o->type]++;
	return 0;
}

static struct emu_object *by_handle(struct emu_ucontext *ctx, uint32_t handle)
{
	return handle < ctx->nhandles ? ctx->handles[handle] : NULL;
}

void *emu_object_get(struct emu_ucontext *ctx, enum emu_type type, uint32_t handle)
{
	struct emu_object *o = by_handle(ctx, handle);

	return o && o->type == type ? o : NULL;
}

int emu_object_get_destroy(struct emu_ucontext *ctx, enum emu_type type, uint32_t handle, void *object)
{
	struct emu_object *o = by_handle(ctx, handle);

	if (!o)
		return ENOENT;
	if (o->type != type)
		return EINVAL;
	if (o->usecnt)
		return EBUSY;
	*(struct emu_object **)object = o;
	return 0;
}

void emu_object_free(struct emu_object *o)
{
	struct emu_ucontext *ctx = o->ctx;

	if (o->handle != UINT32_MAX) {
		ctx->handles[o->handle] = NULL;
		ctx->next_handle = MIN(ctx->next_handle, o->handle);
		ctx->dev->count[o->type]--;
	}
	free(o);
}

int emu_limit(struct emu_ucontext *ctx, enum emu_type type, uint32_t max)
{
	if (ctx->dev->count[type] < max)
		return 0;
	emu_log(EMU_INFO, "%s: all %u objects of type %d in use", ctx->dev->name, max, (int)type);
	return ENOMEM;
}

/* ---------------------------------------------------------------- destruction */

static void destroy_mkey(struct emu_mkey *m)
{
	emu_mkey_remove(m);
	umem_release(m->pinned);
	m->o.ctx->pinned -= m->pinned;
	if (m->pd)
		m->pd->o.usecnt--;
	if (m->umem)
		m->umem->usecnt--;
	free(m->klm);
}

static void destroy_cq(struct emu_cq *cq)
{
	struct emu_channel *channel = cq->channel;

	emu_cq_remove(cq);
	umem_release(cq->pinned);
	if (channel) {
		channel->o.usecnt--;
		if (!emu_channel_is_open(channel) && !channel->o.usecnt)
			emu_channel_put(channel);
	}
}

static void destroy_qp(struct emu_qp *qp)
{
	emu_qp_remove(qp);
	umem_release(qp->pinned);
	if (qp->pd)
		qp->pd->o.usecnt--;
	if (qp->scq)
		qp->scq->o.usecnt--;
	if (qp->rcq)
		qp->rcq->o.usecnt--;
	if (qp->srq)
		qp->srq->o.usecnt--;
	if (qp->xrcd)
		qp->xrcd->o.usecnt--;
}

static void destroy_srq(struct emu_srq *srq)
{
	emu_srq_remove(srq);
	umem_release(srq->pinned);
	if (srq->pd)
		srq->pd->o.usecnt--;
	if (srq->cq)
		srq->cq->o.usecnt--;
	if (srq->xrcd)
		srq->xrcd->o.usecnt--;
}

void emu_object_retire(struct emu_object *o)
{
	switch (o->type) {
	case EMU_MR:
	case EMU_MW:
	case EMU_DEVX_MKEY:
		destroy_mkey((struct emu_mkey *)o);
		break;
	case EMU_CQ:
		destroy_cq((struct emu_cq *)o);
		break;
	case EMU_QP:
		destroy_qp((struct emu_qp *)o);
		break;
	case EMU_SRQ:
		destroy_srq((struct emu_srq *)o);
		break;
	case EMU_AH:
		((struct emu_ah *)o)->pd->o.usecnt--;
		break;
	case EMU_UAR:
		emu_uar_retire((struct emu_uar *)o);
		break;
	case EMU_DEVX_OBJ:
		devx_object_retire((struct devx_object *)o);
		break;
	case EMU_WQ:
		emu_wq_retire((struct emu_wq *)o);
		break;
	case EMU_RWQ_IND_TBL:
		emu_rwq_ind_tbl_retire((struct emu_rwq_ind_tbl *)o);
		break;
	case EMU_DM:
		emu_dm_retire(o);
		break;
	case EMU_PP:
		emu_pp_retire(o);
		break;
	case EMU_UMEM:
		umem_release(((struct emu_umem *)o)->pinned);
		break;
	default:
		break;
	}
}

void emu_object_destroy(struct emu_object *o)
{
	emu_object_retire(o);
	emu_object_free(o);
}

/* What depends on others goes first. The kernel gets the same by trying again and again what is busy
 * (core/rdma_core.c, uverbs_destroy_ufile_hw()). */
void emu_context_destroy_objects(struct emu_ucontext *ctx)
{
	static const enum emu_type order[] = {
		EMU_QP, EMU_AH, EMU_MW, EMU_SRQ, EMU_RWQ_IND_TBL, EMU_WQ, EMU_CQ, EMU_DEVX_MKEY, EMU_MR, EMU_DEVX_OBJ, EMU_UMEM,
		EMU_DM, EMU_XRCD, EMU_UAR, EMU_VAR, EMU_PP, EMU_PD,
	};

	devx_context_destroy(ctx);
	for (unsigned i = 0; i < ARRAY_LEN(order); i++)
		for (uint32_t h = 0; h < ctx->nhandles; h++)
			if (ctx->handles[h] && ctx->handles[h]->type == order[i])
				emu_object_destroy(ctx->handles[h]);
	while (!list_empty(&ctx->uars))
		emu_object_destroy(&container_of(ctx->uars.next, struct emu_uar, ctx_link)->o);
	emu_dm_release(ctx);
	emu_mmio_forget(ctx);
	/* Completion channels and the async-event file are open files of their own and outlive the context: a read() of
	 * one then finds the end of file. Their descriptors stay the application's. */
	for (uint32_t i = 0; i < ctx->nchannels; i++) {
		struct emu_channel *c = ctx->channels[i];

		if (emu_channel_is_open(c)) {
			emu_fd_forget(c->rfd);
			emu_channel_close(c, false);
		}
		ctx->dev->count[EMU_CHANNEL]--;
		free(c);
	}
	ctx->nchannels = 0;
}

/* ---------------------------------------------------------------- channels */

bool emu_channel_is_open(const struct emu_channel *c)
{
	return c->wfd >= 0;
}

struct emu_channel *emu_channel_by_fd(struct emu_ucontext *ctx, enum emu_type type, int fd)
{
	struct emu_file *f = emu_fd_get(fd);

	return f && f->kind == EMU_FILE_CHANNEL && f->ctx == ctx && f->channel->o.type == type ? f->channel : NULL;
}

int emu_channel_create(struct emu_ucontext *ctx, uint32_t record, struct emu_channel **out)
{
	struct emu_channel **table = realloc(ctx->channels, (ctx->nchannels + 1) * sizeof(*table));
	struct emu_channel *c = emu_object_alloc(ctx, EMU_CHANNEL, sizeof(*c));
	int err = ENOMEM;

	if (table)
		ctx->channels = table;
	if (!table || !c)
		goto fail;
	err = emu_channel_init(c, record);
	if (err)
		goto fail;
	err = emu_fd_set(c->rfd, EMU_FILE_CHANNEL, ctx, c);
	if (err) {
		emu_channel_close(c, true);
		goto fail;
	}
	ctx->channels[ctx->nchannels++] = c;
	ctx->dev->count[EMU_CHANNEL]++;
	*out = c;
	return 0;
fail:
	free(c);
	return err;
}

void emu_channel_put(struct emu_channel *c)
{
	struct emu_ucontext *ctx = c->o.ctx;

	if (emu_channel_is_open(c))
		emu_channel_close(c, false);
	if (c->o.usecnt)
		return; /* the last CQ takes it along */
	for (uint32_t i = 0; i < ctx->nchannels; i++)
		if (ctx->channels[i] == c) {
			ctx->channels[i] = ctx->channels[--ctx->nchannels];
			break;
		}
	if (ctx->async == c)
		ctx->async = NULL;
	ctx->dev->count[EMU_CHANNEL]--;
	free(c);
}

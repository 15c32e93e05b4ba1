/* SPDX-License-Identifier: MIT
 * DEVX: commands about the device. QUERY_HCA_CAP is what libmlx5 learns most of a device from when it opens one.
 *
 * What isn't set reads as "no": only what works is advertised. libmlx5's readers are get_hca_general_caps(),
 * get_hca_general_caps_2(), get_hca_sig_caps(), get_pci_atomic_caps(), get_qos_caps(), get_crypto_caps() in its verbs.c.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "devx.h"
#include "dm.h"
#include "pp.h"
#include "wq.h"


/* Modifier: the kind above bit 0, which chooses the current or the greatest possible; the same here. */
enum cap_kind {
	CAP_KIND_GENERAL = 0x00,
	CAP_KIND_ETHERNET_OFFLOADS = 0x01,
	CAP_KIND_ODP = 0x02,
	CAP_KIND_ATOMIC = 0x03,
	CAP_KIND_ROCE = 0x04,
	CAP_KIND_NIC_FLOW_TABLE = 0x07,
	CAP_KIND_ESWITCH_FLOW_TABLE = 0x08,
	CAP_KIND_ESWITCH = 0x09,
	CAP_KIND_QOS = 0x0c,
	CAP_KIND_DEVICE_MEMORY = 0x0f,
	CAP_KIND_DEBUG = 0x0d,
	CAP_KIND_GENERAL_2 = 0x20,
};

/* enum MLX5_TIMESTAMP_FORMAT_CAP_*: the CQE's timestamp is of a free-running clock */
#define TS_FREE_RUNNING 0

static void fill_limits(const struct emu_limits *l, uint8_t *caps)
{
	prm_set(caps, CAP_LOG_MAX_QP, devx_log2(l->max_qp));
	prm_set(caps, CAP_LOG_MAX_QP_SZ, devx_log2(l->max_qp_wr));
	prm_set(caps, CAP_LOG_MAX_CQ, devx_log2(l->max_cq));
	prm_set(caps, CAP_LOG_MAX_CQ_SZ, devx_log2((uint64_t)l->max_cqe + 1));
	prm_set(caps, CAP_LOG_MAX_SRQ, devx_log2(l->max_srq));
	prm_set(caps, CAP_LOG_MAX_SRQ_SZ, devx_log2((uint64_t)l->max_srq_wr + 1));
	prm_set(caps, CAP_LOG_MAX_MKEY, devx_log2(l->max_mr));
	prm_set(caps, CAP_LOG_MAX_PD, devx_log2(l->max_pd));
	prm_set(caps, CAP_LOG_MAX_MSG, devx_log2(l->max_msg_sz));
	prm_set(caps, CAP_LOG_MAX_MRW_SZ, devx_log2(l->max_mr_size));
	prm_set(caps, CAP_LOG_MAX_RA_REQ_QP, devx_log2(l->max_qp_rd_atom));
	prm_set(caps, CAP_LOG_MAX_RA_RES_QP, devx_log2(l->max_qp_init_rd_atom));
}

static void fill_umr(const struct emu_limits *l, uint8_t *caps)
{
	if (l->umr)
		prm_set(caps, CAP_LOG_MAX_KLM_LIST_SIZE, devx_log2(DEVX_MAX_KLM));
	else
		prm_set(caps, CAP_UMR_INDIRECT_MKEY_DISABLED, 1);
	prm_set(caps, CAP_MAX_INDIRECTION, EMU_MAX_INDIRECTION);
	prm_set(caps, CAP_REPEATED_BLOCK_DISABLED, !l->umr);
	prm_set(caps, CAP_UMR_MODIFY_ENTITY_SIZE_DISABLED, 1); /* keys have pages of one size: there are no pages */
}

/* A length of 2^31 is what libmlx5 takes 0 for: MLX5_DMA_MMO_MAX_SIZE. */
static void fill_mmo(const struct emu_limits *l, uint8_t *caps)
{
	if (!l->max_wr_memcpy_length)
		return;
	prm_set(caps, CAP_DMA_MMO_QP, 1);
	prm_set(caps, CAP_QPC_EXTENSION, 1);
	prm_set(caps, CAP_LOG_DMA_MMO_MAX_SIZE, devx_log2(l->max_wr_memcpy_length));
}

static void fill_dc(const struct emu_limits *l, uint8_t *caps)
{
	if (!l->dc)
		return;
	prm_set(caps, CAP_DCT, 1);
	prm_set(caps, CAP_DC_V2, 1);
	prm_set(caps, CAP_LOG_MAX_RA_REQ_DC, devx_log2(l->max_qp_rd_atom));
	prm_set(caps, CAP_LOG_MAX_RA_RES_DC, devx_log2(l->max_qp_init_rd_atom));
	prm_set(caps, CAP_LOG_MAX_DCI_STREAM_CHANNELS, l->log_max_dci_streams);
	prm_set(caps, CAP_LOG_MAX_DCI_ERRORED_STREAMS, l->log_max_dci_streams);
}

static void fill_general(const struct emu_device *d, uint8_t *caps)
{
	fill_limits(&d->limits, caps);
	fill_umr(&d->limits, caps);
	fill_mmo(&d->limits, caps);
	fill_dc(&d->limits, caps);
	prm_set(caps, CAP_PORT_TYPE, 1); /* Ethernet */
	prm_set(caps, CAP_NUM_PORTS, d->nports);
	prm_set(caps, CAP_CQE_VERSION, 1);
	prm_set(caps, CAP_COMPACT_ADDRESS_VECTOR, 1);
	prm_set(caps, CAP_LOCAL_CA_ACK_DELAY, 16);
	prm_set(caps, CAP_ROCE, 1);
	prm_set(caps, CAP_ATOMIC, d->limits.atomics);
	prm_set(caps, CAP_CQ_MODERATION, 1);
	prm_set(caps, CAP_CQ_RESIZE, 1);
	prm_set(caps, CAP_RC, 1);
	prm_set(caps, CAP_UC, 1);
	prm_set(caps, CAP_UD, 1);
	prm_set(caps, CAP_XRC, d->limits.xrc);
	prm_set(caps, CAP_LOG_PG_SZ, 12);
	prm_set(caps, CAP_BF, 1);
	prm_set(caps, CAP_LOG_BF_REG_SIZE, 9);
	prm_set(caps, CAP_MAX_WQE_SZ_SQ, 1024);
	prm_set(caps, CAP_MAX_WQE_SZ_RQ, 512);
	prm_set(caps, CAP_SQ_TS_FORMAT, TS_FREE_RUNNING);
	prm_set(caps, CAP_RQ_TS_FORMAT, TS_FREE_RUNNING);
	prm_set(caps, CAP_NUM_OF_UARS_PER_PAGE, 1);
	prm_set(caps, CAP_MAX_NUM_EQS, d->limits.comp_vectors);
	prm_set(caps, CAP_LOG_MAX_RQ, 16);
	prm_set(caps, CAP_LOG_MAX_RQT, 16);
	prm_set(caps, CAP_LOG_MAX_RQT_SIZE, EMU_LOG_MAX_RQT_SIZE);
	prm_set(caps, CAP_LOG_MAX_RMP, devx_log2(d->limits.max_srq));
	prm_set(caps, CAP_LOG_MAX_WQ_SZ, devx_log2(d->limits.max_qp_wr));
	prm_set(caps, CAP_DEVICE_MEMORY, d->limits.max_dm_size != 0);
	prm_set(caps, CAP_QOS, 1);
	prm_set(caps, CAP_LOG_MAX_STRIDE_SZ_RQ, 9);
	prm_set(caps, CAP_LOG_MIN_STRIDE_SZ_RQ, 4);
	if (d->limits.devx) {
		prm_set(caps, CAP_LOG_MAX_UCTX, 16);
		prm_set(caps, CAP_LOG_MAX_UMEM, 16);
	}
}

/* MLX5_ATOMIC_OPS_CMP_SWAP, MLX5_ATOMIC_OPS_FETCH_ADD; sizes are a bit for each power of two: 8 bytes. The PCI
 * atomics that get_pci_atomic_caps() looks for aren't there. */
static void fill_atomic(const struct emu_device *d, uint8_t *caps)
{
	if (!d->limits.atomics)
		return;
	prm_set(caps, ATOMIC_CAPS_OPERATIONS, 0x3);
	prm_set(caps, ATOMIC_CAPS_SIZE_QP, 0x8);
	prm_set(caps, ATOMIC_CAPS_SIZE_DC, d->limits.dc ? 0x8 : 0);
}

static void fill_roce(const struct emu_device *d, uint8_t *caps)
{
	prm_set(caps, ROCE_CAP_QP_TS_FORMAT, TS_FREE_RUNNING);
	prm_set(caps, ROCE_CAP_L3_TYPE, 0x3);	     /* IPv4, IPv6 */
	prm_set(caps, ROCE_CAP_ROCE_VERSION, 0x5);   /* bit 0: v1, bit 2: v2 */
	prm_set(caps, ROCE_CAP_R_ROCE_DEST_UDP_PORT, 4791);
	prm_set(caps, ROCE_CAP_R_ROCE_MIN_SRC_UDP_PORT, 0xc000);
	prm_set(caps, ROCE_CAP_R_ROCE_MAX_SRC_UDP_PORT, 0xffff);
	prm_set(caps, ROCE_CAP_ROCE_ADDRESS_TABLE_SIZE, d->ports[0].ngids);
}

/* The sizes that atomic operations come in are in fields that mlx5_ifc.h leaves out: tests/test_mlx5_dm_ops.py of rdma-core. */
static void fill_device_memory(const struct emu_device *d, uint8_t *caps)
{
	if (!d->limits.max_dm_size)
		return;
	prm_set(caps, DEV_MEM_MEMIC, 1);
	prm_set(caps, DEV_MEM_LOG_MIN_ALLOC_SIZE, EMU_DM_LOG_MIN_SIZE);
	prm_set(caps, DEV_MEM_LOG_MAX_ADDR_ALIGNMENT, EMU_DM_LOG_MAX_ALIGNMENT);
	prm_set(caps, DEV_MEM_BAR_SIZE, emu_dm_bar_size(d));
	prm_set(caps, DEV_MEM_MAX_SIZE, d->limits.max_dm_size);
	prm_set(caps, DEV_MEM_OPERATIONS, emu_dm_operations());
	if (emu_dm_operations()) {
		prm_set(caps, DEV_MEM_INCREMENT_SIZES, EMU_DM_OP_SIZES);
		prm_set(caps, DEV_MEM_TEST_AND_SET_SIZES, EMU_DM_OP_SIZES);
	}
}

static void fill_qos(uint8_t *caps)
{
	prm_set(caps, QOS_PACKET_PACING, 1);
	prm_set(caps, QOS_PACKET_PACING_UID, 1);
	prm_set(caps, QOS_PACKET_PACING_MAX_RATE, EMU_PP_MAX_RATE);
	prm_set(caps, QOS_PACKET_PACING_MIN_RATE, EMU_PP_MIN_RATE);
	prm_set(caps, QOS_PACKET_PACING_RATE_TABLE_SIZE, EMU_PP_TABLE_SIZE);
}

static uint8_t query_hca_cap(struct devx_call *c)
{
	const struct emu_device *d = c->ctx->dev;
	uint8_t *caps = c->out + CMD_HEADER;

	switch (prm_get(c->in, CMD_OP_MOD) >> 1) {
	case CAP_KIND_GENERAL:
		fill_general(d, caps);
		return STAT_OK;
	case CAP_KIND_ATOMIC:
		fill_atomic(d, caps);
		return STAT_OK;
	case CAP_KIND_ROCE:
		fill_roce(d, caps);
		return STAT_OK;
	case CAP_KIND_DEVICE_MEMORY:
		fill_device_memory(d, caps);
		return STAT_OK;
	case CAP_KIND_QOS:
		fill_qos(caps);
		return STAT_OK;
	case CAP_KIND_ETHERNET_OFFLOADS: /* there is nothing of these, and nothing more of that */
	case CAP_KIND_ODP:
	case CAP_KIND_NIC_FLOW_TABLE:
	case CAP_KIND_ESWITCH_FLOW_TABLE:
	case CAP_KIND_ESWITCH:
	case CAP_KIND_DEBUG:
	case CAP_KIND_GENERAL_2:
		return STAT_OK;
	default:
		return devx_refuse(c, STAT_BAD_PARAM, SYN_VALUE, "capabilities of an unknown kind");
	}
}

static uint8_t nop(struct devx_call *c)
{
	(void)c;
	return STAT_OK;
}

/* The interface step sequence identifier in use, and the ones there are: QUERY_ISSI of mlx5_ifc.h. */
static uint8_t query_issi(struct devx_call *c)
{
	prm_set(c->out, F(0x50, 16), 1);
	prm_set(c->out, F(0x360, 32), 1u << 0 | 1u << 1);
	return STAT_OK;
}

static const struct devx_command commands[] = {
	{ OP_QUERY_HCA_CAP, DEVX_GENERAL, CMD_HEADER, CMD_HEADER, 0, query_hca_cap, "QUERY_HCA_CAP" },
	{ OP_QUERY_ISSI, DEVX_GENERAL, CMD_HEADER, 112, 0, query_issi, "QUERY_ISSI" },
	{ OP_NOP, DEVX_GENERAL, CMD_HEADER, CMD_HEADER, 0, nop, "NOP" },
};

const struct devx_commands devx_caps_commands = { commands, ARRAY_LEN(commands) };

/* SPDX-License-Identifier: MIT
 * Firmware commands as the Programmer's Reference Manual lays them out: big-endian words, fields at bit positions counted
 * from the most significant bit of the first byte.
 *
 * Names and positions are those of mlx5_ifc.h (the kernel's include/linux/mlx5, rdma-core's providers/mlx5 and, for what
 * those leave out, its tests/mlx5_prm_structs.py). Only what is used here is listed. A field is relative to the structure
 * that its name begins with; every structure starts at a whole byte of the one around it, so that one is P(...)_AT bytes in.
 */
#ifndef AIORDMA_DEVX_PRM_H
#define AIORDMA_DEVX_PRM_H

#include <stdbool.h>
#include <stdint.h>

struct prm_field {
	uint16_t offset; /* bits */
	uint8_t width;	 /* up to 64 */
};

uint64_t prm_get(const uint8_t *structure, struct prm_field);
void prm_set(uint8_t *structure, struct prm_field, uint64_t value); /* as many low bits as the field has */

#define F(offset_, width_) ((struct prm_field){ (offset_), (width_) })

/* ---------------------------------------------------------------- every command */

#define CMD_OPCODE F(0x00, 16)
#define CMD_OP_MOD F(0x30, 16)
#define CMD_TUNNEL F(0x20, 16) /* general_obj_in_cmd_hdr.vhca_tunnel_id */
#define CMD_NUMBER F(0x48, 24) /* qpn, cqn, srqn, rqn, rqtn, mkey_index, ... in most inputs and outputs */
#define CMD_OBJECT_TYPE F(0x30, 16) /* general objects */
#define CMD_OBJECT_ID F(0x40, 32)
#define CMD_STATUS F(0x00, 8)
#define CMD_SYNDROME F(0x20, 32)
#define CMD_HEADER 16 /* bytes, of input and output */

enum prm_opcode {
	OP_QUERY_HCA_CAP = 0x100,
	OP_QUERY_ADAPTER = 0x101,
	OP_QUERY_ISSI = 0x10a,
	OP_CREATE_MKEY = 0x200,
	OP_QUERY_MKEY = 0x201,
	OP_CREATE_CQ = 0x400,
	OP_QUERY_CQ = 0x402,
	OP_MODIFY_CQ = 0x403,
	OP_CREATE_QP = 0x500,
	OP_RST2INIT_QP = 0x502,
	OP_INIT2RTR_QP = 0x503,
	OP_RTR2RTS_QP = 0x504,
	OP_RTS2RTS_QP = 0x505,
	OP_SQERR2RTS_QP = 0x506,
	OP_2ERR_QP = 0x507,
	OP_2RST_QP = 0x50a,
	OP_QUERY_QP = 0x50b,
	OP_SQD_RTS_QP = 0x50c,
	OP_INIT2INIT_QP = 0x50e,
	OP_CREATE_PSV = 0x600,
	OP_CREATE_SRQ = 0x700,
	OP_QUERY_SRQ = 0x702,
	OP_ARM_RQ = 0x703,
	OP_CREATE_XRC_SRQ = 0x705,
	OP_QUERY_XRC_SRQ = 0x707,
	OP_ARM_XRC_SRQ = 0x708,
	OP_CREATE_DCT = 0x710,
	OP_QUERY_DCT = 0x713,
	OP_CREATE_XRQ = 0x717,
	OP_ALLOC_PD = 0x800,
	OP_NOP = 0x80d,
	OP_ALLOC_XRCD = 0x80e,
	OP_CREATE_SQ = 0x904,
	OP_MODIFY_SQ = 0x905,
	OP_QUERY_SQ = 0x907,
	OP_CREATE_RQ = 0x908,
	OP_MODIFY_RQ = 0x909,
	OP_QUERY_RQ = 0x90b,
	OP_CREATE_RMP = 0x90c,
	OP_MODIFY_RMP = 0x90d,
	OP_QUERY_RMP = 0x90f,
	OP_CREATE_RQT = 0x916,
	OP_MODIFY_RQT = 0x917,
	OP_QUERY_RQT = 0x919,
	OP_ALLOC_FLOW_COUNTER = 0x939,
	OP_QUERY_FLOW_COUNTER = 0x93b,
	OP_CREATE_GENERAL_OBJECT = 0xa00,
	OP_MODIFY_GENERAL_OBJECT = 0xa01,
	OP_QUERY_GENERAL_OBJECT = 0xa02,
};

/* enum of MLX5_CMD_STAT_*; the kernel's cmd_status_str() in mlx5/core/cmd.c has a sentence for each. */
enum prm_status {
	STAT_OK = 0x00,
	STAT_INT_ERR = 0x01,
	STAT_BAD_OP = 0x02,
	STAT_BAD_PARAM = 0x03,
	STAT_BAD_SYS_STATE = 0x04,
	STAT_BAD_RES = 0x05,
	STAT_RES_BUSY = 0x06,
	STAT_LIM = 0x08,
	STAT_BAD_RES_STATE = 0x09,
	STAT_IX = 0x0a,
	STAT_NO_RES = 0x0f,
	STAT_BAD_QP_STATE = 0x10,
	STAT_BAD_INP_LEN = 0x50,
	STAT_BAD_OUTP_LEN = 0x51,
};

/* ---------------------------------------------------------------- capabilities: cmd_hca_cap, atomic_caps, roce_cap */

#define CAP_LOG_DMA_MMO_MAX_SIZE F(0x6b, 5)
#define CAP_LOG_MAX_SRQ_SZ F(0x80, 8)
#define CAP_LOG_MAX_QP_SZ F(0x88, 8)
#define CAP_LOG_MAX_QP F(0x9b, 5)
#define CAP_LOG_MAX_SRQ F(0xab, 5)
#define CAP_LOG_MAX_CQ_SZ F(0xc8, 8)
#define CAP_LOG_MAX_CQ F(0xdb, 5)
#define CAP_LOG_MAX_MKEY F(0xea, 6)
#define CAP_LOG_MAX_EQ F(0xfc, 4)
#define CAP_MAX_INDIRECTION F(0x100, 8)
#define CAP_LOG_MAX_MRW_SZ F(0x109, 7)
#define CAP_LOG_MAX_KLM_LIST_SIZE F(0x11a, 6)
#define CAP_QPC_EXTENSION F(0x122, 1)
#define CAP_LOG_MAX_RA_REQ_DC F(0x12a, 6)
#define CAP_LOG_MAX_RA_RES_DC F(0x13a, 6)
#define CAP_LOG_MAX_RA_REQ_QP F(0x14a, 6)
#define CAP_DMA_MMO_SQ F(0x153, 1)
#define CAP_LOG_MAX_RA_RES_QP F(0x15a, 6)
#define CAP_GID_TABLE_SIZE F(0x170, 16)
#define CAP_PKEY_TABLE_SIZE F(0x190, 16)
#define CAP_DEVICE_MEMORY F(0x1a8, 1)
#define CAP_LOCAL_CA_ACK_DELAY F(0x1ab, 5)
#define CAP_PORT_TYPE F(0x1b6, 2)
#define CAP_NUM_PORTS F(0x1b8, 8)
#define CAP_LOG_MAX_MSG F(0x1c3, 5)
#define CAP_CQE_VERSION F(0x1fc, 4)
#define CAP_COMPACT_ADDRESS_VECTOR F(0x200, 1)
#define CAP_REPEATED_BLOCK_DISABLED F(0x206, 1)
#define CAP_UMR_MODIFY_ENTITY_SIZE_DISABLED F(0x207, 1)
#define CAP_UMR_INDIRECT_MKEY_DISABLED F(0x209, 1)
#define CAP_DCT F(0x21a, 1)
#define CAP_QOS F(0x21b, 1)
#define CAP_ROCE F(0x21d, 1)
#define CAP_ATOMIC F(0x21e, 1)
#define CAP_CQ_RESIZE F(0x221, 1)
#define CAP_CQ_MODERATION F(0x222, 1)
#define CAP_DC_V2 F(0x23b, 1)
#define CAP_XRC F(0x23c, 1)
#define CAP_UD F(0x23d, 1)
#define CAP_UC F(0x23e, 1)
#define CAP_RC F(0x23f, 1)
#define CAP_LOG_PG_SZ F(0x258, 8)
#define CAP_BF F(0x260, 1)
#define CAP_LOG_BF_REG_SIZE F(0x26b, 5)
#define CAP_MAX_WQE_SZ_SQ F(0x290, 16)
#define CAP_MAX_WQE_SZ_RQ F(0x2b0, 16)
#define CAP_LOG_MAX_PD F(0x32b, 5)
#define CAP_LOG_MAX_RQ F(0x363, 5)
#define CAP_LOG_MAX_RMP F(0x383, 5)
#define CAP_LOG_MAX_RQT F(0x38b, 5)
#define CAP_LOG_MAX_RQT_SIZE F(0x393, 5)
#define CAP_LOG_MAX_STRIDE_SZ_RQ F(0x3a3, 5)
#define CAP_LOG_MIN_STRIDE_SZ_RQ F(0x3ab, 5)
#define CAP_LOG_MAX_WQ_SZ F(0x3db, 5)
#define CAP_GENERAL_OBJ_TYPES F(0x400, 64)
#define CAP_SQ_TS_FORMAT F(0x440, 2)
#define CAP_RQ_TS_FORMAT F(0x442, 2)
#define CAP_LOG_MAX_UCTX F(0x463, 5)
#define CAP_LOG_MAX_UMEM F(0x46b, 5)
#define CAP_MAX_NUM_EQS F(0x470, 16)
#define CAP_NUM_OF_UARS_PER_PAGE F(0x520, 32)
#define CAP_LOG_MAX_DCI_STREAM_CHANNELS F(0x58b, 5)
#define CAP_LOG_MAX_DCI_ERRORED_STREAMS F(0x593, 5)
#define CAP_DMA_MMO_QP F(0x748, 1)

#define ATOMIC_CAPS_OPERATIONS F(0x90, 16)
#define ATOMIC_CAPS_SIZE_QP F(0xb0, 16)
#define ATOMIC_CAPS_SIZE_DC F(0xd0, 16)

#define ROCE_CAP_QP_TS_FORMAT F(0x1e, 2)
#define ROCE_CAP_L3_TYPE F(0x8c, 4)
#define ROCE_CAP_ROCE_VERSION F(0x98, 8)
#define ROCE_CAP_R_ROCE_DEST_UDP_PORT F(0xb0, 16)
#define ROCE_CAP_R_ROCE_MAX_SRC_UDP_PORT F(0xc0, 16)
#define ROCE_CAP_R_ROCE_MIN_SRC_UDP_PORT F(0xd0, 16)
#define ROCE_CAP_ROCE_ADDRESS_TABLE_SIZE F(0xf0, 16)

/* device_mem_cap */
#define DEV_MEM_MEMIC F(0x00, 1)
#define DEV_MEM_INCREMENT_SIZES F(0x20, 8)
#define DEV_MEM_LOG_MIN_ALLOC_SIZE F(0x2b, 5)
#define DEV_MEM_TEST_AND_SET_SIZES F(0x30, 8)
#define DEV_MEM_LOG_MAX_ADDR_ALIGNMENT F(0x38, 8)
#define DEV_MEM_BAR_SIZE F(0x80, 32)
#define DEV_MEM_MAX_SIZE F(0xa0, 32)
#define DEV_MEM_OPERATIONS F(0x200, 32)

/* qos_cap */
#define QOS_PACKET_PACING F(0x00, 1)
#define QOS_PACKET_PACING_UID F(0x0b, 1)
#define QOS_PACKET_PACING_MAX_RATE F(0x40, 32)
#define QOS_PACKET_PACING_MIN_RATE F(0x60, 32)
#define QOS_PACKET_PACING_RATE_TABLE_SIZE F(0x90, 16)

/* ---------------------------------------------------------------- mkc: a memory key */

#define CREATE_MKEY_IN_MKC_AT (0x80 / 8)
#define CREATE_MKEY_IN_UMEM_VALID F(0x61, 1)
#define CREATE_MKEY_IN_TRANSLATIONS_ACTUAL F(0x300, 32)
#define CREATE_MKEY_IN_UMEM_ID F(0x320, 32)
#define CREATE_MKEY_IN_UMEM_OFFSET F(0x340, 64)
#define CREATE_MKEY_IN_KLM_AT (0x880 / 8)
#define QUERY_MKEY_OUT_MKC_AT (0x80 / 8)

#define MKC_FREE F(0x01, 1)
#define MKC_ACCESS_MODE_4_2 F(0x03, 3)
#define MKC_UMR_EN F(0x10, 1)
#define MKC_A F(0x11, 1)
#define MKC_RW F(0x12, 1)
#define MKC_RR F(0x13, 1)
#define MKC_LW F(0x14, 1)
#define MKC_LR F(0x15, 1)
#define MKC_ACCESS_MODE_1_0 F(0x16, 2)
#define MKC_QPN F(0x20, 24)
#define MKC_MKEY_7_0 F(0x38, 8)
#define MKC_LENGTH64 F(0x60, 1)
#define MKC_BSF_EN F(0x61, 1)
#define MKC_EN_RINVAL F(0x67, 1)
#define MKC_PD F(0x68, 24)
#define MKC_START_ADDR F(0x80, 64)
#define MKC_LEN F(0xc0, 64)
#define MKC_TRANSLATIONS F(0x1a0, 32) /* translations_octword_size */
#define MKC_LOG_PAGE_SIZE F(0x1db, 5)
#define MKC_CRYPTO_EN F(0x1e3, 2)
enum { MKC_MODE_PA = 0, MKC_MODE_MTT = 1, MKC_MODE_KLMS = 2, MKC_MODE_KSM = 3 };

#define KLM_BYTES 16 /* struct mlx5_klm of the kernel's linux/mlx5/qp.h */
#define KLM_BYTE_COUNT F(0x00, 32)
#define KLM_KEY F(0x20, 32)
#define KLM_ADDRESS F(0x40, 64)

/* ---------------------------------------------------------------- qpc, ads: a queue pair */

#define QP_IN_OPT_PARAM_MASK F(0x80, 32) /* also of query_qp_out */
#define QP_IN_QPC_AT (0xc0 / 8)		 /* also of query_qp_out */
#define QP_IN_QPC_EXT F(0x40, 1)
#define QP_IN_OPT_PARAM_MASK_95_32 F(0x840, 64)
#define QP_IN_QPC_DATA_EXT_AT (0x880 / 8)
#define QP_IN_BYTES 272	    /* of every change but 2ERR and 2RST, without the extension */
#define QP_IN_EXT_BYTES 464
#define CREATE_QP_IN_UMEM_OFFSET F(0x800, 64)
#define CREATE_QP_IN_UMEM_ID F(0x840, 32)
#define CREATE_QP_IN_UMEM_VALID F(0x860, 1)

#define QPC_STATE F(0x00, 4)
#define QPC_ST F(0x08, 8)
#define QPC_PM_STATE F(0x13, 2)
#define QPC_PD F(0x28, 24)
#define QPC_MTU F(0x40, 3)
#define QPC_LOG_MSG_MAX F(0x43, 5)
#define QPC_LOG_RQ_SIZE F(0x49, 4)
#define QPC_LOG_RQ_STRIDE F(0x4d, 3)
#define QPC_NO_SQ F(0x50, 1)
#define QPC_LOG_SQ_SIZE F(0x51, 4)
#define QPC_UAR_PAGE F(0x68, 24)
#define QPC_SEND_DBR_MODE F(0x80, 2)
#define QPC_USER_INDEX F(0x88, 24)
#define QPC_REMOTE_QPN F(0xa8, 24)
#define QPC_PRIMARY_PATH_AT (0xc0 / 8)
#define QPC_LOG_SRA_MAX F(0x388, 3)
#define QPC_RETRY_COUNT F(0x38d, 3)
#define QPC_RNR_RETRY F(0x390, 3)
#define QPC_CUR_RNR_RETRY F(0x395, 3)
#define QPC_CUR_RETRY_COUNT F(0x398, 3)
#define QPC_NEXT_SEND_PSN F(0x3c8, 24)
#define QPC_CQN_SND F(0x3e8, 24)
#define QPC_LOG_NUM_DCI_STREAM_CHANNELS F(0x3e3, 5)
#define QPC_LOG_NUM_DCI_ERRORED_STREAMS F(0x403, 5)
#define QPC_LAST_ACKED_PSN F(0x448, 24)
#define QPC_SSN F(0x468, 24)
#define QPC_LOG_RRA_MAX F(0x488, 3)
#define QPC_ATOMIC_MODE F(0x48c, 4)
#define QPC_RRE F(0x490, 1)
#define QPC_RWE F(0x491, 1)
#define QPC_RAE F(0x492, 1)
#define QPC_MIN_RNR_NAK F(0x4a3, 5)
#define QPC_NEXT_RCV_PSN F(0x4a8, 24)
#define QPC_XRCD F(0x4c8, 24)
#define QPC_CQN_RCV F(0x4e8, 24)
#define QPC_DBR_ADDR F(0x500, 64)
#define QPC_Q_KEY F(0x540, 32)
#define QPC_RQ_TYPE F(0x565, 3)
#define QPC_SRQN F(0x568, 24)
#define QPC_RMSN F(0x588, 24)
#define QPC_HW_SQ_COUNTER F(0x5a0, 16)
#define QPC_SW_SQ_COUNTER F(0x5b0, 16)
#define QPC_HW_RQ_COUNTER F(0x5c0, 32)
#define QPC_SW_RQ_COUNTER F(0x5e0, 32)
#define QPC_DC_ACCESS_KEY F(0x640, 64)
#define QPC_DBR_UMEM_VALID F(0x683, 1)
#define QPC_DBR_UMEM_ID F(0x720, 32)

enum { QPC_ST_RC = 0, QPC_ST_UC = 1, QPC_ST_UD = 2, QPC_ST_XRC = 3, QPC_ST_DCI = 5 };
/* enum mlx5_qp_state of linux/mlx5/qp.h: not the numbers of ibv_qp_state */
enum { QPC_RST, QPC_INIT, QPC_RTR, QPC_RTS, QPC_SQER, QPC_SQD, QPC_ERR, QPC_SQ_DRAINING };
enum { QPC_RQ_OWN = 0, QPC_RQ_SRQ = 1, QPC_RQ_NONE = 3 };
enum { QPC_PM_ARMED = 0, QPC_PM_REARM = 1, QPC_PM_MIGRATED = 3 };

#define QPC_EXT_MMO F(0x02, 1)
#define QPC_EXT_DCI_STREAM F(0x10, 16)

#define ADS_PKEY_INDEX F(0x10, 16)
#define ADS_GRH F(0x28, 1)
#define ADS_RLID F(0x30, 16)
#define ADS_ACK_TIMEOUT F(0x40, 5)
#define ADS_SRC_ADDR_INDEX F(0x48, 8)
#define ADS_HOP_LIMIT F(0x58, 8)
#define ADS_TCLASS F(0x64, 8)
#define ADS_FLOW_LABEL F(0x6c, 20)
#define ADS_RGID_AT (0x80 / 8)
#define ADS_DSCP F(0x10a, 6)
#define ADS_ETH_PRIO F(0x121, 3)
#define ADS_SL F(0x124, 4)
#define ADS_PORT F(0x128, 8)
#define ADS_RMAC F(0x130, 48)

/* enum mlx5_qp_optpar */
enum {
	OPT_RRE = 1 << 1,
	OPT_RAE = 1 << 2,
	OPT_RWE = 1 << 3,
	OPT_PKEY_INDEX = 1 << 4,
	OPT_Q_KEY = 1 << 5,
	OPT_RNR_TIMEOUT = 1 << 6,
	OPT_PRIMARY_PATH = 1 << 7,
	OPT_SRA_MAX = 1 << 8,
	OPT_RRA_MAX = 1 << 9,
	OPT_PM_STATE = 1 << 10,
	OPT_RETRY_COUNT = 1 << 12,
	OPT_RNR_RETRY = 1 << 13,
	OPT_ACK_TIMEOUT = 1 << 14,
	OPT_PRI_PORT = 1 << 16,
};
/* Bits of opt_param_mask_95_32: MLX5_QPC_OPT_MASK_32_* */
enum { OPT32_DCI_STREAM_CHANNEL_ID = 1 << 0, OPT32_MMO = 1 << 3 };

/* ---------------------------------------------------------------- dctc */

#define QUERY_DCT_OUT_DCTC_AT (0x80 / 8)
#define DCTC_STATE F(0x04, 4)
#define DCTC_USER_INDEX F(0x28, 24)
#define DCTC_CQN F(0x48, 24)
#define DCTC_RRE F(0x6c, 1)
#define DCTC_RWE F(0x6d, 1)
#define DCTC_RAE F(0x6e, 1)
#define DCTC_MIN_RNR_NAK F(0x93, 5)
#define DCTC_SRQN F(0xa8, 24)
#define DCTC_PD F(0xc8, 24)
#define DCTC_TCLASS F(0xe0, 8)
#define DCTC_FLOW_LABEL F(0xec, 20)
#define DCTC_DC_ACCESS_KEY F(0x100, 64)
#define DCTC_MTU F(0x145, 3)
#define DCTC_PORT F(0x148, 8)
#define DCTC_PKEY_INDEX F(0x150, 16)
#define DCTC_MY_ADDR_INDEX F(0x168, 8)
#define DCTC_HOP_LIMIT F(0x178, 8)

/* ---------------------------------------------------------------- cqc */

#define CQ_CQC_AT (0x80 / 8) /* of create_cq_in, query_cq_out, modify_cq_in */
#define MODIFY_CQ_IN_FIELD_SELECT F(0x60, 32)
#define CREATE_CQ_IN_UMEM_OFFSET F(0x280, 64)
#define CREATE_CQ_IN_UMEM_ID F(0x2c0, 32)
#define CREATE_CQ_IN_UMEM_VALID F(0x2e0, 1)

#define CQC_STATUS F(0x00, 4)
#define CQC_DBR_UMEM_VALID F(0x06, 1)
#define CQC_CQE_SZ F(0x08, 3)
#define CQC_CC F(0x0b, 1)
#define CQC_OI F(0x0e, 1)
#define CQC_CQE_COMP_EN F(0x11, 1)
#define CQC_ST F(0x14, 4)
#define CQC_DBR_UMEM_ID F(0x20, 32)
#define CQC_LOG_CQ_SIZE F(0x63, 5)
#define CQC_UAR_PAGE F(0x68, 24)
#define CQC_CQ_PERIOD F(0x84, 12)
#define CQC_CQ_MAX_COUNT F(0x90, 16)
#define CQC_C_EQN F(0xa0, 32)
#define CQC_LAST_SOLICIT_INDEX F(0x128, 24)
#define CQC_CONSUMER_COUNTER F(0x148, 24)
#define CQC_PRODUCER_COUNTER F(0x168, 24)
#define CQC_DBR_ADDR F(0x1c0, 64)

enum { CQC_STATUS_OK = 0, CQC_STATUS_OVERFLOW = 9 };
enum { CQC_ST_SOLICITED_ARMED = 6, CQC_ST_ARMED = 9, CQC_ST_FIRED = 10 };
enum { MODIFY_CQ_PERIOD = 1 << 0, MODIFY_CQ_MAX_COUNT = 1 << 1 }; /* MLX5_CQ_MODIFY_* */

/* ---------------------------------------------------------------- wq, rqc, rmpc, xrc_srqc, rqtc */

#define CTX_AT (0x100 / 8) /* of create, modify and query of RQ, RMP and RQT */
#define MODIFY_STATE F(0x40, 4)
#define MODIFY_BITMASK F(0x80, 64)
#define ARM_LWM F(0x70, 16)
#define XRC_SRQC_AT (0x80 / 8)
#define SRQ_OUT_BYTES 272 /* of query_rq_out, query_rmp_out, query_xrc_srq_out */

#define RQC_STATE F(0x08, 4) /* the same in rmpc */
#define RQC_VSD F(0x03, 1)
#define RQC_FLUSH_IN_ERROR_EN F(0x0d, 1)
#define RQC_USER_INDEX F(0x28, 24)
#define RQC_CQN F(0x48, 24)
#define RQC_WQ_AT (0x180 / 8) /* the same in rmpc */
enum { RQC_RST = 0, RQC_RDY = 1, RQC_ERR = 3 };

#define WQ_TYPE F(0x00, 4)
#define WQ_LWM F(0x30, 16)
#define WQ_PD F(0x48, 24)
#define WQ_UAR_PAGE F(0x68, 24)
#define WQ_DBR_ADDR F(0x80, 64)
#define WQ_HW_COUNTER F(0xc0, 32)
#define WQ_SW_COUNTER F(0xe0, 32)
#define WQ_LOG_STRIDE F(0x10c, 4)
#define WQ_LOG_SIZE F(0x11b, 5)
enum { WQ_LINKED_LIST = 0, WQ_CYCLIC = 1 };
#define RMP_BITMASK_LWM 1ull /* modify_rmp_in.bitmask */
#define MODIFY_RQ_VSD (1ull << 1)

#define XRC_SRQC_STATE F(0x00, 4)
#define XRC_SRQC_LOG_SIZE F(0x04, 4)
#define XRC_SRQC_LOG_RQ_STRIDE F(0x25, 3)
#define XRC_SRQC_XRCD F(0x28, 24)
#define XRC_SRQC_CQN F(0x48, 24)
#define XRC_SRQC_USER_INDEX F(0x88, 24)
#define XRC_SRQC_PD F(0xc8, 24)
#define XRC_SRQC_LWM F(0xe0, 16)
#define XRC_SRQC_WQE_CNT F(0xf0, 16)

#define RQTC_LIST_Q_TYPE F(0xa5, 3)
#define RQTC_MAX_SIZE F(0xb0, 16)
#define RQTC_ACTUAL_SIZE F(0xd0, 16)
#define RQTC_LIST_AT (0x780 / 8)
#define RQ_NUM F(0x08, 24) /* of each 32-bit entry */
#define RQT_BITMASK_LIST 1ull

#endif

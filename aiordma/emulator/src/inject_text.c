/* SPDX-License-Identifier: MIT
 * A rule as text: its kind and words NAME=VALUE. aiordma/emulator/faults.py writes it, and says more of what it means. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/mlx5dv.h>

#include "control.h"
#include "inject.h"

static const char *const kinds[INJECT_KINDS] = {
	[INJECT_HOLD] = "hold",
	[INJECT_HANG] = "hang",
	[INJECT_DELAY] = "delay",
	[INJECT_REORDER] = "reorder",
	[INJECT_DROP] = "drop",
	[INJECT_DROP_ANSWER] = "drop_answer",
	[INJECT_RNR] = "rnr",
	[INJECT_FAIL] = "fail",
	[INJECT_QP_FATAL] = "qp_fatal",
	[INJECT_CQ_OVERRUN] = "cq_overrun",
	[INJECT_VERB] = "verb",
	[INJECT_DEVX] = "devx",
	[INJECT_DEVICE_FATAL] = "device_fatal",
	[INJECT_PORT_DOWN] = "port_down",
};

const char *inject_name(enum inject_kind kind)
{
	return kinds[kind];
}

/* enum ibv_wr_opcode, and mlx5's own. A window is bound and a key invalidated by what changes keys: mlx5/qp.c,
 * mlx5_ib_opcode[]. */
static const struct {
	const char *name;
	uint8_t opcode;
} opcodes[] = {
	{ "RDMA_WRITE", MLX5_OPCODE_RDMA_WRITE },
	{ "RDMA_WRITE_WITH_IMM", MLX5_OPCODE_RDMA_WRITE_IMM },
	{ "SEND", MLX5_OPCODE_SEND },
	{ "SEND_WITH_IMM", MLX5_OPCODE_SEND_IMM },
	{ "SEND_WITH_INV", MLX5_OPCODE_SEND_INVAL },
	{ "RDMA_READ", MLX5_OPCODE_RDMA_READ },
	{ "ATOMIC_CMP_AND_SWP", MLX5_OPCODE_ATOMIC_CS },
	{ "ATOMIC_FETCH_AND_ADD", MLX5_OPCODE_ATOMIC_FA },
	{ "LOCAL_INV", MLX5_OPCODE_UMR },
	{ "BIND_MW", MLX5_OPCODE_UMR },
	{ "UMR", MLX5_OPCODE_UMR },
	{ "MEMCPY", MLX5_OPCODE_MMO },
	{ "NOP", MLX5_OPCODE_NOP },
};

/* enum ibv_wc_status without IBV_WC_. */
static const struct {
	const char *name;
	uint8_t syndrome;
} statuses[] = {
	{ "LOC_LEN_ERR", MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR },
	{ "LOC_QP_OP_ERR", MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR },
	{ "LOC_PROT_ERR", MLX5_CQE_SYNDROME_LOCAL_PROT_ERR },
	{ "MW_BIND_ERR", MLX5_CQE_SYNDROME_MW_BIND_ERR },
	{ "BAD_RESP_ERR", MLX5_CQE_SYNDROME_BAD_RESP_ERR },
	{ "LOC_ACCESS_ERR", MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR },
	{ "REM_INV_REQ_ERR", MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR },
	{ "REM_ACCESS_ERR", MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR },
	{ "REM_OP_ERR", MLX5_CQE_SYNDROME_REMOTE_OP_ERR },
	{ "RETRY_EXC_ERR", MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR },
	{ "RNR_RETRY_EXC_ERR", MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR },
	{ "REM_ABORT_ERR", MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR },
};

#define NUMBER(member, max) { #member, offsetof(struct inject_rule, member), (max) }

static const struct {
	const char *name;
	size_t offset;
	uint64_t max;
} numbers[] = {
	NUMBER(nth, UINT64_MAX),
	NUMBER(every, UINT64_MAX),
	NUMBER(count, UINT64_MAX),
	NUMBER(chance, 1ull << 32),
	NUMBER(seed, UINT64_MAX),
	NUMBER(delay_ns, UINT64_MAX / 4),
	NUMBER(jitter_ns, UINT64_MAX / 4),
	NUMBER(bandwidth, UINT64_MAX),
	NUMBER(by, UINT32_MAX),
	NUMBER(limit_ns, UINT64_MAX / 4),
	NUMBER(timer, 31),
	NUMBER(error, 4095),
	NUMBER(devx, UINT16_MAX),
	NUMBER(status, UINT8_MAX),
	NUMBER(devx_syndrome, UINT32_MAX),
	NUMBER(port, UINT32_MAX),
};

struct text {
	struct inject_rule *r;
	char *error;
	size_t error_size;
};

static bool __attribute__((format(printf, 2, 3))) fail(struct text *t, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vsnprintf(t->error, t->error_size, fmt, args);
	va_end(args);
	return false;
}

static bool number(struct text *t, const char *name, const char *value, uint64_t max, uint64_t *to)
{
	char *end;

	errno = 0;
	*to = strtoull(value, &end, 0);
	if (errno || end == value || *end || *value == '-')
		return fail(t, "%s: \"%s\" is not a number", name, value);
	return *to <= max || fail(t, "%s: %s is more than %" PRIu64, name, value, max);
}

static bool take_opcodes(struct text *t, char *names)
{
	char *save;

	for (char *w = strtok_r(names, "+", &save); w; w = strtok_r(NULL, "+", &save)) {
		unsigned i = 0;

		while (i < ARRAY_LEN(opcodes) && strcmp(opcodes[i].name, w))
			i++;
		if (i == ARRAY_LEN(opcodes))
			return fail(t, "there is no opcode \"%s\"", w);
		t->r->opcodes |= 1ull << opcodes[i].opcode;
	}
	return true;
}

static bool take_syndrome(struct text *t, const char *name)
{
	for (unsigned i = 0; i < ARRAY_LEN(statuses); i++)
		if (!strcmp(statuses[i].name, name)) {
			t->r->syndrome = statuses[i].syndrome;
			return true;
		}
	return fail(t, "there is no status \"%s\" that a work request could fail with", name);
}

static bool take_state(struct text *t, const char *name)
{
	static const char *const states[] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };

	for (unsigned i = 0; i < ARRAY_LEN(states); i++)
		if (!strcmp(states[i], name)) {
			t->r->state = (int32_t)i;
			return true;
		}
	return fail(t, "there is no state \"%s\"", name);
}

static bool take(struct text *t, const char *name, char *value)
{
	uint64_t n;

	if (!strcmp(name, "device")) {
		if (strlen(value) >= sizeof(t->r->device))
			return fail(t, "device: the name is too long");
		strcpy(t->r->device, value);
		return true;
	}
	if (!strcmp(name, "qp")) {
		if (!number(t, name, value, 0xffffff, &n))
			return false;
		t->r->qpn = (uint32_t)n;
		return true;
	}
	if (!strcmp(name, "opcode"))
		return take_opcodes(t, value);
	if (!strcmp(name, "wc"))
		return take_syndrome(t, value);
	if (!strcmp(name, "state"))
		return take_state(t, value);
	if (!strcmp(name, "verb")) {
		t->r->verb = inject_verb_number(value);
		return t->r->verb >= 0 || fail(t, "there is no verb \"%s\" that is a command to the kernel", value);
	}
	for (unsigned i = 0; i < ARRAY_LEN(numbers); i++) {
		if (strcmp(numbers[i].name, name))
			continue;
		if (!number(t, name, value, numbers[i].max, &n))
			return false;
		*(uint64_t *)(void *)((char *)t->r + numbers[i].offset) = n;
		t->r->random |= !strcmp(name, "chance");
		return true;
	}
	return fail(t, "a fault has no \"%s\"", name);
}

static bool whole(struct text *t)
{
	const struct inject_rule *r = t->r;

	switch (r->kind) {
	case INJECT_FAIL:
		return r->syndrome || fail(t, "fail: no status was given");
	case INJECT_VERB:
		return r->verb >= 0 || fail(t, "verb: no verb was given");
	case INJECT_DEVX:
		return r->status || fail(t, "devx: no status was given");
	case INJECT_DEVICE_FATAL:
		return *r->device || fail(t, "device_fatal: no device was given");
	case INJECT_PORT_DOWN:
		return *r->device || fail(t, "port_down: no device was given");
	default:
		return true;
	}
}

bool inject_parse(struct inject_rule *r, char **words, unsigned n, char *error, size_t error_size)
{
	struct text t = { r, error, error_size };

	memset(r, 0, sizeof(*r));
	r->state = r->verb = -1;
	r->port = 1;
	for (unsigned k = 1; n && k < INJECT_KINDS; k++)
		if (!strcmp(words[0], kinds[k]))
			r->kind = (enum inject_kind)k;
	if (!r->kind)
		return fail(&t, "there is no fault \"%s\"", n ? words[0] : "");
	for (unsigned i = 1; i < n; i++) {
		char *value = strchr(words[i], '=');

		if (!value)
			return fail(&t, "\"%s\" is not NAME=VALUE", words[i]);
		*value++ = 0;
		if (!take(&t, words[i], value))
			return false;
	}
	return whole(&t);
}

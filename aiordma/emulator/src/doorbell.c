/* SPDX-License-Identifier: MIT
 * Doorbells: what libmlx5 writes to its UAR pages.
 *
 * A post to an SQ writes the first 8 bytes of the last WQE's control segment to a BlueFlame register, of which a page has
 * two at 0x800 and 0xa00, each with two halves used in turn (qp.c, post_send_db(); verbs.c, mlx5_insert_dyn_uuars()); in
 * the non-cached mode there are four at the same places. If the WQE itself follows it is in the SQ too and needs no
 * reading here. Arming a CQ writes its arm word and number at 0x20 (cq.c, mlx5_arm_cq()).
 *
 * Nothing is taken out of the registers: reading them leaves the application's cache line alone, and a post always
 * writes something new, as the WQE's index is in it. */
#include <stdlib.h>

#include "nic.h"

#define QP_DOORBELL 0x800
#define QP_DOORBELL_STRIDE 0x100

/* A page that rang is looked at whenever registers are, for a while; of the others one at a time. */
#define WARM_TURNS 4096u

/* Reading a register takes its cache line from the thread that rings, which costs it a miss with every post. So when
 * doorbells only tell what the records of the QPs in use had told already, look at registers less often. */
#define REDUNDANT_MANY 16u
#define TURNS_BETWEEN 32u

struct emu_list nic_uars = { &nic_uars, &nic_uars };
uint32_t doorbells_seen;
static uint32_t redundant, turns;

static uint64_t read_register(const struct emu_uar *uar, uint32_t offset)
{
	return __atomic_load_n((const uint64_t *)(const volatile void *)(uar->page + offset), __ATOMIC_ACQUIRE);
}

/* Registers are two big-endian words; the number is in the second. */
static uint32_t second_word(uint64_t value)
{
	return be32toh((uint32_t)(htole64(value) >> 32));
}

static bool ring_qp(struct emu_device *dev, uint64_t value)
{
	struct emu_qp *qp = qp_find(dev, second_word(value) >> 8);

	if (!qp || qp->active || !engine_runnable(qp)) {
		redundant++;
		return false;
	}
	redundant = 0;
	engine_activate(qp);
	return true;
}

static bool ring_cq(struct emu_device *dev, uint64_t value)
{
	struct emu_cq *cq = cq_find(dev, second_word(value) & 0xffffff);

	return cq && cq->channel && cq_check_armed(cq);
}

static bool poll_page(struct nic_uar *u)
{
	struct emu_device *dev = u->uar->o.ctx->dev;
	bool found = false;
	uint64_t value;

	for (uint32_t i = 0; i < 4; i++) {
		value = read_register(u->uar, QP_DOORBELL + i * QP_DOORBELL_STRIDE);
		if (likely(value == u->qp_seen[i]))
			continue;
		u->qp_seen[i] = value;
		u->warm = WARM_TURNS;
		doorbells_seen++;
		found |= ring_qp(dev, value);
	}
	value = read_register(u->uar, MLX5_CQ_DOORBELL);
	if (unlikely(value != u->cq_seen)) {
		u->cq_seen = value;
		u->warm = WARM_TURNS;
		doorbells_seen++;
		found |= ring_cq(dev, value);
	}
	return found;
}

bool doorbell_poll(void)
{
	struct emu_list *l = nic_uars.next, *next;
	struct nic_uar *cold = NULL;
	bool found = false;

	if (redundant >= REDUNDANT_MANY && ++turns % TURNS_BETWEEN)
		return false;
	for (; l != &nic_uars; l = next) {
		struct nic_uar *u = container_of(l, struct nic_uar, link);

		next = l->next;
		if (u->warm) {
			u->warm--;
			found |= poll_page(u);
		} else if (!cold) {
			cold = u;
		}
	}
	if (cold) {
		found |= poll_page(cold);
		list_del(&cold->link);
		list_add_tail(&nic_uars, &cold->link);
	}
	return found;
}

void doorbell_forget(void)
{
	list_init(&nic_uars);
}

void emu_uar_mapped(struct emu_uar *uar)
{
	struct nic_uar *u = calloc(1, sizeof(*u));

	uar->priv = u;
	if (!u) {
		emu_log(EMU_ERROR, "no memory to watch a UAR page: its doorbells are found by scanning");
		return;
	}
	u->uar = uar;
	u->warm = WARM_TURNS;
	list_add_tail(&nic_uars, &u->link);
	emu_engine_wake(); /* if it sleeps, it doesn't watch this page yet */
}

void emu_uar_unmapped(struct emu_uar *uar)
{
	struct nic_uar *u = uar->priv;

	if (!u)
		return;
	idle_page_removed(u);
	list_del(&u->link);
	free(u);
	uar->priv = NULL;
}

/* SPDX-License-Identifier: MIT
 * WQEs that change memory keys: binding and invalidating windows, laying out indirect keys. */
#include "nic.h"

enum nic_step umr_step(struct emu_qp *qp, struct nic_wqe *w, uint8_t *syndrome)
{
	(void)qp;
	(void)w;
	*syndrome = MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR;
	return STEP_FAIL;
}

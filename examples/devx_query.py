"""DEVX: what a QP is on the device, beyond what verbs tells of it.

Run it:  python examples/devx_query.py
"""

import asyncio

import aiordma
from aiordma.mlx5 import devx


async def main() -> None:
    memory = bytearray(64)
    async with (
        aiordma.open_device() as device,
        device.reg_mr(memory) as mr,
        device.create_qp() as here,
        device.create_qp() as there,
    ):
        print(f"device: {device.describe()}")
        fresh = await devx.query_qp(here)
        print(f"a new QP is in {fresh.state.name}")

        await here.connect(there.info)
        await there.connect(here.info)
        before = await devx.query_qp(here)
        print(f"connected: {before.state.name}, to QP {before.remote_qpn:#x}, which is {there.qp_num:#x}")
        print(f"its path: GID index {before.primary_address_path.src_addr_index}, MTU {128 << before.mtu}")

        for _ in range(3):
            await here.rdma_write(mr[:8], mr.remote()[8:16])
        after = await devx.query_qp(here)
        print(f"packets sent: {(after.next_send_psn - before.next_send_psn) % (1 << 24)}")
        print(f"send queue: {after.sw_sq_wqebb_counter - after.hw_sq_wqebb_counter} blocks wait for the device")

        # The firmware takes a command only in the state that it is for. It says why not.
        try:
            await devx.modify_qp(here, devx.Rst2InitQpIn())
        except aiordma.DevxError as e:
            print(f"refused: {e.opcode_name}, {e.status_text}, syndrome {e.syndrome:#x}")

        caps = await devx.query_hca_cap(device)
        print(f"the device can have 2^{caps.log_max_qp} QPs; DMA memcpy: {'yes' if caps.dma_mmo_qp else 'no'}")


asyncio.run(main())

"""RDMA read: fetch bytes from a peer's memory, while the peer does nothing.

Run it:  python examples/read.py
"""

import array
import asyncio

import aiordma


async def main() -> None:
    # The peer's table of a thousand numbers, and room for three of them here.
    table = array.array("d", (i * i for i in range(1000)))
    found = array.array("d", bytes(8 * 3))
    async with (
        aiordma.open_device() as device,
        # The table may be read, and nothing else.
        device.reg_mr(table, aiordma.Access.REMOTE_READ) as served,
        device.reg_mr(found) as local,
        device.create_qp() as here,
        device.create_qp() as there,
    ):
        print(f"device: {device.describe()}")
        await here.connect(there.info)
        await there.connect(here.info)
        remote = served.remote()

        # One row.
        row = 12
        await here.rdma_read(local[0:8], remote[row * 8 : row * 8 + 8])
        print(f"row {row}: {found[0]}")

        # Several rows into places of their own: posted together with one doorbell, awaited as one.
        rows = [3, 500, 999]
        await here.rdma_read_many((local[i * 8 : i * 8 + 8], remote[r * 8 : r * 8 + 8]) for i, r in enumerate(rows))
        print(f"rows {rows}: {found.tolist()}")

        # The table wasn't offered for writing. aiordma knows that, so the device isn't even asked.
        try:
            await here.rdma_write(local, remote)
        except aiordma.AccessFlagsError as e:
            print(f"refused: {e}")


asyncio.run(main())

"""A block of a matrix over RDMA: one operation, no packing copy on either side.

Run it:  python examples/strided.py
"""

import asyncio

import numpy as np

import aiordma
from aiordma import mlx5


async def main() -> None:
    # Two services with a matrix each. A block of the one is to become a block of the other, elsewhere.
    ours = np.arange(1000 * 800, dtype=np.float64).reshape(1000, 800)
    theirs = np.zeros((500, 600))
    block = ours[100:300, 40:200]
    place = theirs[250:450, 10:170]
    async with (
        aiordma.open_device() as device,
        # What is registered is the whole arrays: the views are parts of them.
        device.reg_mr(ours),
        device.reg_mr(theirs),
        # An mkey stands for a layout, of so many entries at most. Like memory it stands before the queue pairs that use it.
        mlx5.create_mkey(device, 25) as our_mkey,
        mlx5.create_mkey(device, 25) as their_mkey,
        # max_umr_entries makes room for layouts in the work requests.
        mlx5.create_qp(device, max_umr_entries=24) as here,
        mlx5.create_qp(device, max_umr_entries=24) as there,
    ):
        print(f"device: {device.describe()}")
        await here.connect(there.info)
        await there.connect(here.info)

        # Each side describes its own view to the device. The strides are found in the array.
        source = await here.map_strided(our_mkey, block)
        await there.map_strided(their_mkey, place)
        print(f"block of {block.shape[0]} rows, {block.strides[0]} bytes apart: {len(source):,} bytes")

        # The peer needs the key alone. One RDMA write gathers the rows here and scatters them there.
        await here.rdma_write(source, their_mkey.remote())
        print(f"arrived: {np.array_equal(place, block)}")
        print(f"and nothing else was touched: {np.count_nonzero(theirs) == np.count_nonzero(block)}")

        # A slice of the mkey is a slice of the block's bytes: here row 7.
        row = block.shape[1] * block.itemsize
        place[7] = 0
        await here.rdma_write(source[7 * row : 8 * row], their_mkey.remote()[7 * row : 8 * row])
        print(f"row 7 again: {np.array_equal(place[7], block[7])}")

        # Another view for the same key: first the old layout is taken away, which waits until nothing uses it.
        await here.invalidate(our_mkey)
        await there.invalidate(their_mkey)
        sample, corner = ours[:500:10, :40:2], theirs[:50, -20:]
        source = await here.map_strided(our_mkey, sample)
        await there.map_strided(their_mkey, corner)
        await here.rdma_write(source, their_mkey.remote())
        print(f"every tenth row, every other column: {np.array_equal(corner, sample)}")


asyncio.run(main())

"""RDMA write: put bytes into a peer's memory, while the peer does nothing.

Run it:  python examples/write.py
"""

import asyncio

import aiordma


async def main() -> None:
    source = bytearray(b"hello, RDMA")
    target = bytearray(32)
    async with (
        # The first device of the machine; where there is none, the emulated NIC that comes with aiordma.
        aiordma.open_device() as device,
        # Memory that the device may touch has to be registered. Any Python buffer will do. It stays registered until
        # the block ends; so that nothing uses it any more by then, it stands before the queue pairs, which close first.
        device.reg_mr(source) as local,
        device.reg_mr(target) as remote,
        # Two queue pairs of one device, so that one program can play both sides.
        device.create_qp() as here,
        device.create_qp() as there,
    ):
        print(f"device: {device.describe()}")

        # Each side needs the other's `info`: 40 bytes that real programs send over TCP (see exchange.py).
        await here.connect(there.info)
        await there.connect(here.info)

        # What the peer hands out: the address, the length and the key of its memory.
        window = remote.remote()

        # Awaiting a write tells that the data is in the peer's memory.
        await here.rdma_write(local, window)
        print(f"written: {bytes(target[: len(source)]).decode()!r}")

        # Both ends can be sliced, and the bounds are checked here, not by the device.
        await here.rdma_write(local[7:11], window[20:])
        print(f"written at 20: {bytes(target[20:24]).decode()!r}")

        # Calls post at once; the await comes when the answer is needed. These three are under way together.
        writes = [here.rdma_write(local[0:5], window[i * 6 :]) for i in range(3)]
        for write in writes:
            await write
        print(f"pipelined: {bytes(target[:17])!r}")


asyncio.run(main())

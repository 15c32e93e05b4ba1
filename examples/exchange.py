"""Two programs find each other: connection details and buffers over TCP, then RDMA.

Server and client are two tasks here, each with a device of its own as if it were another process, and share nothing but
the TCP port. With a real network between them, each would be a program on its own machine. (The emulated NIC connects
the programs of one machine.)

Run it:  python examples/exchange.py
"""

import asyncio

import aiordma
from aiordma import exchange


async def server(listening: asyncio.Future[int]) -> None:
    async with (
        aiordma.open_device() as device,
        device.reg_mr(bytearray(64)) as inbox,
        device.create_qp() as qp,
        await exchange.serve("127.0.0.1") as listener,
    ):
        print(f"device: {device.describe()}")
        # The client's write is going to carry an immediate value, and so needs a receive here; with no buffer.
        arrived = qp.recv(None)
        listening.set_result(listener.port)

        # Waits for a client, tells it about `qp` and `inbox`, and connects `qp` to the client's.
        peer = await listener.accept(qp, buffers={"inbox": inbox.remote()})
        print(f"server: {peer.data['name']} connected")

        length = (await arrived).imm_data
        print(f"server: found {bytes(inbox.view()[:length])!r} in the inbox")


async def client(listening: asyncio.Future[int]) -> None:
    async with aiordma.open_device() as device, device.create_qp() as qp:
        # `data` is any JSON value.
        peer = await exchange.connect("127.0.0.1", await listening, qp, data={"name": "a client"})
        text = b"written by RDMA"
        # The bytes go straight into the server's inbox; the immediate value wakes the server up.
        await qp.rdma_write(text, peer.buffers["inbox"], imm=len(text))
        print("client: written and acknowledged")


async def main() -> None:
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server(listening))
        tasks.create_task(client(listening))


asyncio.run(main())

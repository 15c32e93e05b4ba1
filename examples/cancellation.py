"""Cancellation: what it ends, and what it can't.

Run it:  python examples/cancellation.py
"""

import asyncio

import aiordma


async def wait_for(operation: aiordma.Completion) -> None:
    await operation


async def main() -> None:
    inbox = bytearray(16)
    async with (
        aiordma.open_device() as device,
        device.reg_mr(inbox) as memory,
        device.create_qp() as here,
        device.create_qp() as there,
    ):
        print(f"device: {device.describe()}")
        await here.connect(there.info)
        await there.connect(here.info)

        # A receive that nothing comes for. Timeouts and cancellation work as with any other await.
        receive = there.recv(memory)
        try:
            async with asyncio.timeout(0.05):
                await receive
        except TimeoutError:
            print("timed out")

        # The timeout ended the waiting and not the receive: the device has the work request, and verbs know no way to
        # take one back. Until it completes, the buffer is the device's.
        print(f"still posted: {receive!r}")

        # So a message that comes after all is put into the buffer, and the same Completion tells.
        await here.send(b"late message")
        done = await receive
        print(f"received after all: {bytes(inbox[: done.byte_len])!r}")

        # The same with a write: whether it has happened yet when its task is cancelled can't be known, but it will.
        # aiordma keeps the memory registered until then, and the connection works on.
        task = asyncio.create_task(wait_for(here.rdma_write(b"cancelled write", memory.remote())))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await here.wait_idle()
        print(f"task cancelled: {task.cancelled()}; in memory: {bytes(inbox[:15])!r}")

        # To end an operation itself, close its queue pair: everything in flight completes, flushed.
        receive = there.recv(memory)
        await there.close()
        try:
            await receive
        except aiordma.WrFlushError as e:
            print(f"closed: {type(e).__name__}, {e.status_name}")


asyncio.run(main())

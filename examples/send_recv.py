"""Send and receive: messages, each into a buffer that the receiver posted beforehand.

Run it:  python examples/send_recv.py
"""

import asyncio
from collections import deque

import aiordma

SLOTS = 4  # receives that the server keeps posted
SLOT_SIZE = 64  # the longest message


async def serve(qp: aiordma.QueuePair, memory: aiordma.MemoryRegion) -> None:
    # Receives are used in the order in which they were posted, one a message.
    slots = [memory[i * SLOT_SIZE : (i + 1) * SLOT_SIZE] for i in range(SLOTS)]
    posted = deque((slot, qp.recv(slot)) for slot in slots)
    while True:
        slot, receive = posted.popleft()
        message = await receive
        text = bytes(slot.view()[: message.byte_len]).decode()
        print(f"server: {text!r}, number {message.imm_data}")
        if text == "bye":
            return
        # The buffer is free again: post it for a later message.
        posted.append((slot, qp.recv(slot)))


async def client(qp: aiordma.QueuePair) -> None:
    # Short messages need no registration: up to `max_inline_data` bytes are copied into the work request.
    for number, text in enumerate(["hello", "how are you", "bye"]):
        # `imm` is a 32-bit number that travels with the message. The await ends when the peer's device has acknowledged
        # the message, which doesn't mean that the peer's program has looked at it.
        await qp.send(text.encode(), imm=number)
    print("client: all acknowledged")


async def main() -> None:
    async with (
        aiordma.open_device() as device,
        # Some receives are still posted at the end, so their memory has to outlive the queue pair: it stands first.
        device.reg_mr(bytearray(SLOTS * SLOT_SIZE)) as memory,
        device.create_qp() as one,
        device.create_qp() as other,
    ):
        print(f"device: {device.describe()}")
        await one.connect(other.info)
        await other.connect(one.info)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(other, memory))
            # A send that finds no receive posted is tried again by the device (without end: QPConfig.rnr_retry is 7), so
            # it wouldn't matter if the client came first.
            tasks.create_task(client(one))


asyncio.run(main())

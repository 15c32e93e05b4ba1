#!/usr/bin/env python3
"""One end of connections between network namespaces, each in a process of its own (test_namespaces.py).

namespace_peer.py serve DEVICE ADDRESS...      answers at each address, over TCP and over rdma_cm, until it's killed
namespace_peer.py call DEVICE ADDRESS...       prints, as JSON, how a message and its answer fared with each
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable

import aiordma

PORT = 18515
VIAS: tuple[aiordma.cm.Via, ...] = ("tcp", "rdma_cm")
#: A peer that isn't reached is given up in two seconds; one that is isn't, when a busy machine stops the VM for a while.
#: With 7 retries rxe never gives up.
CONFIG = aiordma.QPConfig(timeout=16, retry_cnt=6)
Prepare = Callable[[aiordma.QueuePair], None]


async def serve(device: aiordma.Device, addresses: list[str]) -> None:
    async def answer(listener: aiordma.Listener) -> None:
        while True:
            request = await listener.accept()
            with contextlib.suppress(aiordma.RdmaError):
                receive: list[aiordma.Completion] = []
                prepare: Prepare = lambda qp, into=receive: into.append(qp.recv(None))  # noqa: E731
                async with request.accept(config=CONFIG, prepare=prepare) as connection:
                    await receive[0]
                    await connection.send(b"here")
                    await connection.wait_disconnected()

    async with contextlib.AsyncExitStack() as stack:
        listeners = [
            await stack.enter_async_context(aiordma.listen(address, PORT, device=device, via=via))
            for address in addresses
            for via in VIAS
        ]
        print("listening", flush=True)
        await asyncio.gather(*map(answer, listeners))


async def call(device: aiordma.Device, addresses: list[str]) -> None:
    outcomes = {}
    async with device.reg_mr(bytearray(8)) as memory:
        for address in addresses:
            for via in VIAS:
                try:
                    memory.view()[:] = bytes(8)
                    async with aiordma.connect(
                        address, PORT, device=device, via=via, config=CONFIG, timeout=30 if via == "tcp" else 12
                    ) as connection:
                        receive = connection.recv(memory)
                        await connection.send(None)
                        await receive
                        outcomes[f"{address} {via}"] = bytes(memory.view()[:4]).decode()
                except aiordma.RdmaError as e:
                    outcomes[f"{address} {via}"] = type(e).__name__
    print(json.dumps(outcomes))


async def main() -> None:
    role, name, *addresses = sys.argv[1:]
    async with aiordma.open_device(name) as device:
        await {"serve": serve, "call": call}[role](device, addresses)


if __name__ == "__main__":
    asyncio.run(main())

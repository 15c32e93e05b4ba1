"""UCX by its Python package ucxx: DEVICE WORKLOAD SIZE WINDOW QPS

  pingpong   messages there and back between two endpoints of this process, on asyncio

PyPI's UCX has no transport for verbs, so that DEVICE isn't used: it chooses between shared memory and TCP by itself.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

# UCX says things on standard output, which is for answers here.
os.environ.setdefault("UCX_LOG_LEVEL", "error")

import numpy as np
import protocol
import ucxx


async def main(o: protocol.Options) -> None:
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def accept(endpoint: Any) -> None:
        accepted.set_result(endpoint)
        await ended.wait()

    ended = asyncio.Event()
    listener = ucxx.create_listener(accept)
    ends = [await ucxx.create_endpoint("127.0.0.1", listener.port), await accepted]
    source, target = np.zeros(o.size, "u1"), np.zeros(o.size, "u1")
    turn = 0

    async def message() -> None:
        nonlocal turn
        sent, received = ends[turn].send(source), ends[1 - turn].recv(target)
        turn = 1 - turn
        await asyncio.gather(sent, received)

    async def run(ops: int) -> int:
        for _ in range(ops):
            await message()
        return ops

    await protocol.serve_async(run, message)
    ended.set()
    await asyncio.sleep(0)  # the listener's handler ends


if __name__ == "__main__":
    protocol.run_on("asyncio", main, protocol.options())

"""One device, CQ and pair of QPs for longer than their counters: 16 bits in work queues, 24 in CQs and sequence numbers."""

import struct
from collections import deque

import anyio
import pytest
from emulated.core import connected

import aiordma
from aiordma import Completion

# Past half a lap of a CQ's index and of a sequence number, where an old value begins to look like one ahead.
OPERATIONS = (1 << 23) + (1 << 18)
WINDOW = 100


@pytest.mark.timeout(900)
def test_more_operations_than_half_a_lap_of_the_counters() -> None:
    """The counters are the device's and libmlx5's, which know nothing of loops: one loop is enough for it."""

    async def main() -> None:
        async with aiordma.open_device("emulated:mlx5_0") as device, connected(device, 4096) as pair:
            source, sink = pair.local[0:8], pair.remote[0:8]
            write = pair.a.rdma_write
            outstanding: deque[Completion] = deque()
            for _ in range(OPERATIONS):
                if len(outstanding) == WINDOW:
                    await outstanding.popleft()
                outstanding.append(write(source, sink))
            for completion in outstanding:
                await completion
            # What it does then it still does right, both ways and with events.
            struct.pack_into("<Q", pair.left, 0, OPERATIONS)
            await write(source, sink)
            assert struct.unpack_from("<Q", pair.right) == (OPERATIONS,)
            receive = pair.b.recv(pair.peer[8:16])
            await anyio.sleep(0.01)
            await pair.a.send(source)
            await receive
            assert struct.unpack_from("<Q", pair.right, 8) == (OPERATIONS,)

    anyio.run(main, backend_options={"use_uvloop": True})

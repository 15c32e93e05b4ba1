"""The emulated device, stepped by hand: what counting instructions stands on."""

import anyio
import pytest
from emulated.core import open_pair

from aiordma.emulator import _inject


@pytest.mark.anyio
async def test_a_device_that_is_stepped_does_nothing_by_itself() -> None:
    async with open_pair() as p:
        await p.check()
        with _inject.stepping() as step:
            while step():
                pass
            p.left[:8] = b"stepwise"
            write = p.a.rdma_write(p.local[:8], p.remote)
            await anyio.sleep(0.02)
            assert not write.done
            assert p.right[:8] == bytes(8)
            assert step() == 1
            assert p.right[:8] == b"stepwise"
            await write
            assert step() == 0
            late = p.a.rdma_write(p.local[:8], p.remote[8:])
        await late  # the device's thread is back at work
        await p.check()

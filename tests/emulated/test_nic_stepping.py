"""The emulated device, stepped by hand: what counting instructions stands on."""

from contextlib import AsyncExitStack

import anyio
import pytest
from emulated.core import open_pair

import aiordma
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


@pytest.mark.anyio
async def test_stepping_goes_on_until_no_queue_pair_has_anything_though_their_doorbells_overwrite_each_other() -> None:
    async with aiordma.open_device() as device, AsyncExitStack() as stack:
        mr = await stack.enter_async_context(device.reg_mr(bytearray(b"x" * 300 + bytes(300))))
        pairs = []
        for _ in range(300):
            a, b = [await stack.enter_async_context(device.create_qp(max_send_wr=4, max_recv_wr=1)) for _ in range(2)]
            await a.connect(b.info)
            await b.connect(a.info)
            pairs.append(a)
        with _inject.stepping() as step:
            while step():
                pass
            writes = [pairs[i].rdma_write(mr[i : i + 1], mr.remote()[300 + i : 301 + i]) for i in range(0, 300, 50)]
            while step():
                pass
            assert bytes(mr.view()[300:]) == (b"x" + bytes(49)) * 6
            for write in writes:
                await write

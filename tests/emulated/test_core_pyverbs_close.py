"""What happens when somebody closes the pyverbs objects beneath a device instead of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import ClosedError, RdmaError, mlx5

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]


async def _connected() -> tuple[aiordma.Device, aiordma.MemoryRegion, aiordma.QueuePair, aiordma.QueuePair]:
    device = await aiordma.open_device()
    mr = await device.reg_mr(bytearray(4096))
    a, b = await device.create_qp(), await device.create_qp()
    await a.connect(b.info)
    await b.connect(a.info)
    return device, mr, a, b


async def _close_quietly(device: aiordma.Device) -> None:
    """Its objects are half gone; whatever their closing says, it comes to its end."""
    try:
        await device.close()
    except RdmaError:
        pass


async def test_posting_on_a_qp_that_its_pd_took_down_is_an_error() -> None:
    device, mr, a, b = await _connected()
    srq = await device.create_srq()
    waiting = [b.recv(mr[:8]), srq.recv(mr[8:16])]
    with pytest.raises(Exception, match="busy"):
        device.pd.close()  # takes QPs and SRQs down first, and then finds the MR
    for post in (
        lambda: a.send(b"x"),
        lambda: b.recv(mr[:8]),
        lambda: srq.recv(mr[:8]),
        lambda: a.rdma_write(mr[:8], mr.remote()),
    ):
        with pytest.raises(ClosedError):
            post()
    for op in waiting:
        with pytest.raises(ClosedError, match="pyverbs"):
            await op
    await _close_quietly(device)


async def test_closing_a_pyverbs_qp_ends_what_is_in_flight_at_the_next_call() -> None:
    device, mr, a, b = await _connected()
    waiting = b.recv(mr)
    b.pyverbs.close()
    assert b.state == "ERR"
    with pytest.raises(ClosedError, match="pyverbs"):
        b.recv(mr)
    with pytest.raises(ClosedError):
        await waiting
    await a.close()
    await _close_quietly(device)


@pytest.mark.emulated_only("queue pairs of mlx5")
async def test_mlx5_queue_pairs_close_after_pyverbs_has_destroyed_them() -> None:
    """Their pyverbs objects have a second pointer, which outlives the queue pair."""
    async with aiordma.open_device() as device:
        pair = await mlx5.create_qp(device, memcpy=True)
        streams = await mlx5.create_dc_initiator(device, log_streams=1)
        for qp in (pair, streams):
            qp.pyverbs.close()
            assert qp.state == "ERR"
        with pytest.raises(ClosedError):
            await streams.reset_stream(1)
        await pair.close()
        await streams.close()


async def test_awaiting_on_a_cq_that_its_context_took_down_is_an_error() -> None:
    device, mr, _, b = await _connected()
    waiting = b.recv(mr)
    with pytest.raises(Exception, match="busy"):
        device.context.close()
    with pytest.raises(ClosedError):
        await waiting
    await _close_quietly(device)


AT_ONCE = """
    import asyncio, os, sys, threading
    import aiordma
    from aiordma import _offload

    async def main():
        go_on = threading.Event()
        async with aiordma.open_device(os.environ["AIORDMA_DEVICE"]) as device:
            a, b = await device.create_qp(), await device.create_qp()
            await a.connect(b.info)
            await b.connect(a.info)
            workers = _offload._threads("aiordma-verbs")
            for _ in range(workers._max_workers):
                workers.submit(go_on.wait)  # they get to what follows when it's closed
            closing = [a.close(), b.close()]
            getattr(device, sys.argv[1]).close()
            go_on.set()
            for each in closing:
                await each
        print("CLOSED")

    asyncio.run(main())
"""


@pytest.mark.parametrize("of", ["pd", "qp_pd"])
def test_queue_pairs_that_are_closing_when_pyverbs_destroys_them_come_to_their_end(
    run_python: Callable[..., Any], of: str
) -> None:
    """The worker thread that takes them to the error state finds nothing any more."""
    assert run_python(AT_ONCE, of).stdout == "CLOSED\n"

"""Testing a service with faults on demand: a reader that connects anew when its connection is lost, and its tests.

Run it:  python examples/fault_tests.py, or pytest examples/fault_tests.py
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import aiordma

# ------------------------------------------------------------------ the service


class Reader:
    """Reads a peer's memory. ``connect`` makes a connected queue pair; it's called anew when a connection has failed."""

    def __init__(self, connect: Callable[[], Awaitable[aiordma.QueuePair]], attempts: int = 3) -> None:
        self._connect = connect
        self._attempts = attempts
        self._qp: aiordma.QueuePair | None = None
        self.connections = 0

    async def read(self, into: aiordma.MemorySlice, remote: aiordma.RemoteBuffer) -> None:
        for left in reversed(range(self._attempts)):
            try:
                if self._qp is None:
                    self._qp = await self._connect()
                    self.connections += 1
                await self._qp.rdma_read(into, remote)
                return
            except ConnectionError:  # as every error of the connection is, and what is flushed behind it
                # A queue pair that had an error is of no more use. Reading is safe to repeat; a write might have arrived.
                await self.close()
                if not left:
                    raise

    async def close(self) -> None:
        qp, self._qp = self._qp, None
        if qp is not None:
            await qp.close()


# ------------------------------------------------------------------ its tests


@asynccontextmanager
async def served(device: aiordma.Device) -> AsyncIterator[tuple[Reader, aiordma.MemorySlice, aiordma.RemoteBuffer]]:
    """A reader, where it reads to, and what it reads: the server's side is in the same process."""
    servers = []

    async def connect() -> aiordma.QueuePair:
        client, server = await device.create_qp(timeout=8, retry_cnt=1), await device.create_qp()
        servers.append(server)
        await client.connect(server.info)
        await server.connect(client.info)
        return client

    async with (
        device.reg_mr(bytearray(b"the model's weights")) as memory,
        device.reg_mr(bytearray(len(memory))) as into,
    ):
        reader = Reader(connect)
        yield reader, into[:], memory.remote()
        await reader.close()
        for server in servers:
            await server.close()


@pytest.mark.asyncio
async def test_a_lost_request_is_no_trouble(rdma_device, rdma_faults):
    async with served(rdma_device) as (reader, into, remote):
        with rdma_faults.drop(opcode="RDMA_READ", nth=1) as lost:
            await reader.read(into, remote)
        # The queue pair itself sent again.
        assert lost.hits == 1
        assert reader.connections == 1
        assert bytes(into.view()) == b"the model's weights"


@pytest.mark.asyncio
async def test_it_connects_anew_when_the_peer_is_silent(rdma_device, rdma_faults):
    async with served(rdma_device) as (reader, into, remote):
        with rdma_faults.drop(opcode="RDMA_READ", count=2):
            await reader.read(into, remote)
        assert reader.connections == 2
        assert bytes(into.view()) == b"the model's weights"


@pytest.mark.asyncio
async def test_it_connects_anew_when_its_own_queue_pair_breaks(rdma_device, rdma_faults):
    async with served(rdma_device) as (reader, into, remote):
        for number in range(1, 4):
            with rdma_faults.qp_fatal(opcode="RDMA_READ", count=1):
                await reader.read(into, remote)
            assert reader.connections == number + 1


@pytest.mark.asyncio
async def test_it_gives_up_in_the_end(rdma_device, rdma_faults):
    async with served(rdma_device) as (reader, into, remote):
        with rdma_faults.retry_exceeded(opcode="RDMA_READ") as fault, pytest.raises(aiordma.RetryExceededError):
            await reader.read(into, remote)
        assert fault.hits == reader.connections == 3


@pytest.mark.asyncio
async def test_no_queue_pair_to_be_had_is_said(rdma_device, rdma_faults):
    async with served(rdma_device) as (reader, into, remote):
        with rdma_faults.verb("create_qp", "ENOMEM"), pytest.raises(aiordma.VerbsError, match="ibv_create_qp"):
            await reader.read(into, remote)
        await reader.read(into, remote)


if __name__ == "__main__":
    # What is imported already isn't rewritten by pytest, which it says.
    raise SystemExit(pytest.main([__file__, "-q", "-W", "ignore:Module already imported"]))

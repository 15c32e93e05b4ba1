"""Connections over the kernel's rdma_cm, between the VM's two devices, by IPv4 and by IPv6 addresses."""

import contextlib
import os
from collections.abc import AsyncIterator

import anyio
import pytest
from rxe.test_link import GIVES_UP, cut, mend, packets

import aiordma
from aiordma import (
    CompletionError,
    Connection,
    ConnectTimeoutError,
    DisconnectedError,
    GidType,
    QueuePair,
    RejectedError,
    Request,
    ResolutionError,
    UnreachableError,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.environ.get("AIORDMA_IN_VM") != "rxe", reason="is about the VM of tests/rxe/vm/run.py"),
]

#: Addresses of rxe0's netdev and of rxe1's.
ADDRESSES = {"IPv4": ("192.0.2.1", "192.0.2.2"), "IPv6": ("2001:db8::1", "2001:db8::2")}
families = pytest.mark.parametrize("family", ADDRESSES)


@contextlib.asynccontextmanager
async def joined(family: str, **options: object) -> AsyncIterator[tuple[Connection, Connection]]:
    """A connection from rxe0 to rxe1, both ends of it."""
    _, there = ADDRESSES[family]
    accepted: list[Connection] = []

    async def accept(listener: aiordma.Listener) -> None:
        request = await listener.accept()
        accepted.append(await request.accept())

    async with aiordma.listen(there, via="rdma_cm") as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(accept, listener)
            a = await aiordma.connect(there, listener.port, via="rdma_cm", timeout=30, **options)
        async with a, accepted[0] as b:
            yield a, b


def address_of(qp: QueuePair) -> tuple[str, GidType]:
    """The address and type of the GID that a QP sends from, as the device has it."""
    attributes, _ = qp.pyverbs.query(1 << 7)  # IBV_QP_AV
    index = attributes.ah_attr.sgid_index
    gid = next(gid for gid in qp.device.gids if gid.index == index)
    return str(gid.address.ipv4_mapped or gid.address), gid.type


@families
async def test_a_connection_runs_between_the_devices_of_its_addresses_over_roce_v2(family: str) -> None:
    here, there = ADDRESSES[family]
    async with joined(family) as (a, b):
        assert (a.device.name, b.device.name) == ("rxe0", "rxe1")
        assert (a.remote_address.host, b.remote_address.host) == (there, here)
        assert address_of(a.qp) == (here, GidType.ROCE_V2)
        assert address_of(b.qp) == (there, GidType.ROCE_V2)
        async with b.device.reg_mr(bytearray(64)) as memory:
            before = packets()
            receive = b.recv(memory[:32])
            await a.send(b"by way of rdma_cm")
            assert (await receive).byte_len == 17
            await a.rdma_write(b"written", memory.remote()[32:39])
            assert bytes(memory.view()[32:39]) == b"written"
            assert packets()[0] - before[0] >= 2


@families
async def test_private_data_arrives_on_both_sides(family: str) -> None:
    _, there = ADDRESSES[family]
    seen: list[bytes] = []

    async def serve(listener: aiordma.Listener) -> None:
        request = await listener.accept()
        seen.append(request.private_data)
        async with request.accept(private_data=b"welcome") as connection:
            await connection.wait_disconnected()

    async with aiordma.listen(there, via="rdma_cm") as listener, anyio.create_task_group() as group:
        group.start_soon(serve, listener)
        async with aiordma.connect(there, listener.port, via="rdma_cm", private_data=b"who I am", timeout=30) as a:
            assert a.private_data.rstrip(b"\0") == b"welcome"
    assert [data.rstrip(b"\0") for data in seen] == [b"who I am"]


@families
async def test_a_rejection_has_its_reason(family: str) -> None:
    _, there = ADDRESSES[family]

    async def refuse(listener: aiordma.Listener) -> None:
        request: Request = await listener.accept()
        await request.reject(77, b"full")

    async with aiordma.listen(there, via="rdma_cm") as listener, anyio.create_task_group() as group:
        group.start_soon(refuse, listener)
        with pytest.raises(RejectedError) as caught:
            await aiordma.connect(there, listener.port, via="rdma_cm", timeout=30)
    assert (caught.value.reason, caught.value.private_data.rstrip(b"\0")) == (77, b"full")


@families
async def test_where_nobody_listens_the_peer_says_so(family: str) -> None:
    with pytest.raises(RejectedError) as caught:
        await aiordma.connect(ADDRESSES[family][1], 1, via="rdma_cm", timeout=30)
    assert caught.value.status == 8  # invalid service id


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77"])
async def test_an_address_that_nobody_has_is_unreachable(host: str) -> None:
    with pytest.raises((UnreachableError, ResolutionError, ConnectTimeoutError)):
        await aiordma.connect(host, 1, via="rdma_cm", timeout=3)


@families
async def test_a_request_that_nobody_answers_times_out(family: str) -> None:
    _, there = ADDRESSES[family]
    async with aiordma.listen(there, via="rdma_cm") as listener:
        with pytest.raises(ConnectTimeoutError):
            await aiordma.connect(there, listener.port, via="rdma_cm", timeout=1)


@families
async def test_a_peer_that_disconnects_is_noticed_and_ends_what_is_in_flight(family: str) -> None:
    async with joined(family) as (a, b):
        waiting = a.send(b"for which there is no receive")
        await b.aclose()
        with anyio.fail_after(30):
            await a.wait_disconnected()
            with pytest.raises((DisconnectedError, CompletionError)):
                await waiting
        assert a.disconnected


@families
async def test_a_link_that_is_cut_ends_operations_and_a_new_connection_works(family: str) -> None:
    async with joined(family, config=GIVES_UP) as (a, b), b.device.reg_mr(bytearray(64)) as memory:
        await a.rdma_write(b"12345678", memory.remote())
        cut("veth1")
        try:
            with anyio.fail_after(100), pytest.raises(CompletionError):
                await a.rdma_write(b"12345678", memory.remote())
        finally:
            mend()
    async with joined(family) as (a, b), b.device.reg_mr(bytearray(8)) as memory:
        await a.rdma_write(b"12345678", memory.remote())


async def test_one_loop_serves_connections_and_completions_of_both_families_at_once() -> None:
    async with contextlib.AsyncExitStack() as stack:
        a, b = await stack.enter_async_context(joined("IPv4"))
        c, d = await stack.enter_async_context(joined("IPv6"))
        async with b.device.reg_mr(bytearray(800)) as left, d.device.reg_mr(bytearray(800)) as right:

            async def write(connection: Connection, memory: aiordma.MemoryRegion) -> None:
                for i in range(50):
                    await connection.rdma_write(bytes([i + 1]) * 8, memory.remote()[8 * i : 8 * i + 8])

            async with anyio.create_task_group() as group:
                group.start_soon(write, a, left)
                group.start_soon(write, c, right)
                for _ in range(3):
                    async with joined("IPv4"):
                        pass
            expected = b"".join(bytes([i + 1]) * 8 for i in range(50))
            assert bytes(left.view()[:400]) == bytes(right.view()[:400]) == expected

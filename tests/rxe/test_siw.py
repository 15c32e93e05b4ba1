"""aiordma on iWARP, RDMA over TCP, in software: the VM's two siw devices, where its kernel has them (run.py --rdma siw).

Debian's kernels don't; docs/soft-roce.md says what this was run with.
"""

import json
import os

import anyio
import pytest
from rxe.test_cm import ADDRESSES, joined
from rxe.test_doctor import report

import aiordma
from aiordma import RejectedError, UnsupportedError, WrFlushError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.environ.get("AIORDMA_IN_VM") != "siw", reason="is about the VM with siw devices"),
    pytest.mark.timeout(300),
]
families = pytest.mark.parametrize("family", ADDRESSES)


@families
async def test_connections_carry_messages_writes_and_reads(family: str) -> None:
    async with (
        joined(family) as (a, b),
        a.device.reg_mr(bytearray(64)) as here,
        b.device.reg_mr(bytearray(64)) as there,
    ):
        assert (a.device.name, b.device.name) == ("siw0", "siw1")
        assert a.device.is_iwarp
        assert (a.qp.state, b.qp.state) == ("RTS", "RTS")
        receive = b.recv(there[:32])
        await a.send(b"by way of TCP")
        assert (await receive).byte_len == 13
        # A completed write of iWARP's has left. That it's there tells what comes after it.
        receive = b.recv(there[40:48])
        await a.rdma_write(b"written", there.remote()[32:39])
        await a.send(b"x")
        await receive
        assert bytes(there.view()[32:39]) == b"written"
        await a.rdma_read(here[:7], there.remote()[32:39])
        assert bytes(here.view()[:7]) == b"written"
        # What the device says of a QP's state doesn't change what may be posted.
        await a.qp.query_state()
        assert a.qp.state == "RTS"
        back = a.recv(here[32:])
        await b.send(b"and back")
        assert (await back).byte_len == 8


async def test_private_data_and_rejections_arrive() -> None:
    there = ADDRESSES["IPv4"][1]
    seen: list[bytes] = []

    async def serve(listener: aiordma.Listener) -> None:
        request = await listener.accept()
        seen.append(request.private_data.rstrip(b"\0"))
        async with request.accept(private_data=b"welcome") as connection:
            await connection.wait_disconnected()
        await (await listener.accept()).reject(77, b"full")

    async with aiordma.listen(there, via="rdma_cm") as listener, anyio.create_task_group() as group:
        group.start_soon(serve, listener)
        async with aiordma.connect(there, listener.port, via="rdma_cm", private_data=b"who", timeout=30) as a:
            assert a.private_data.rstrip(b"\0") == b"welcome"
        with pytest.raises(RejectedError):
            await aiordma.connect(there, listener.port, via="rdma_cm", timeout=30)
    assert seen == [b"who"]


async def test_a_peer_that_disconnects_ends_what_waits() -> None:
    async with joined("IPv4") as (a, b), a.device.reg_mr(bytearray(8)) as memory:
        receive = a.recv(memory)
        await b.aclose()
        await a.wait_disconnected()
        # The QP ends with its TCP connection, before anybody says why.
        with pytest.raises(WrFlushError):
            await receive


async def test_what_needs_no_rdma_cm_elsewhere_is_refused() -> None:
    async with aiordma.open_device("siw0") as device, device.create_qp() as a, device.create_qp() as b:
        with pytest.raises(UnsupportedError, match="rdma_cm"):
            await a.connect(b.info)


def test_doctor_finds_nothing_wrong() -> None:
    status, answer = report()
    assert status == 0, json.dumps(answer["findings"])
    said = [(f["status"], f["reason"]) for f in answer["findings"] if f["check"] == "gid"]
    assert said == [("info", "iwarp")] * 2

"""aiordma's connections and librdmacm's own program for trying them understand each other."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from emulated.cm import HOST, world

import aiordma
from aiordma import QueuePair

pytestmark = [pytest.mark.anyio, pytest.mark.librdmacm]

# What rping tells of its buffer (librdmacm/examples/rping.c: struct rping_rdma_info): address, key and size, 16 bytes.
INFO = 16


@contextmanager
def rping(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """rping on the emulated NIC. It's ended at the end of the block."""
    aiordma_program = Path(sys.executable).parent / "aiordma"
    started = subprocess.Popen(
        [aiordma_program, "emulate", "--", "rping", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


async def test_rping_connects_to_a_listener_and_says_where_its_buffer_is() -> None:
    async with world("rdma_cm") as w, w.device.reg_mr(bytearray(64)) as memory:

        def window(qp: QueuePair) -> aiordma.Completion:
            return qp.recv(memory[:INFO])

        with rping("-c", "-a", HOST, "-p", str(w.listener.port), "-C", "1", "-S", "100"):
            with anyio.fail_after(60):
                request = await w.listener.accept()
                async with request.accept(prepare=window) as connection:
                    assert (await connection.prepared).byte_len == INFO
                    with memory.view() as view:
                        addr, rkey, size = (int.from_bytes(view[a:b], "big") for a, b in ((0, 8), (8, 12), (12, 16)))
                    assert size == 100
                    await connection.rdma_read(memory[16:48], aiordma.RemoteBuffer(addr, size, rkey)[:32])
                    with memory.view() as view:
                        assert bytes(view[16:28]) == b"rdma-ping-0:"


async def test_a_connection_to_rpings_server_is_made_and_ended() -> None:
    async with world("rdma_cm") as w:
        port = w.listener.port
        await w.listener.aclose()
        with rping("-s", "-a", HOST, "-p", str(port), "-C", "1"):
            with anyio.fail_after(60):
                while True:
                    try:
                        connection = await w.connect(timeout=5)
                    except ConnectionError:
                        await anyio.sleep(0.02)  # it isn't there yet
                    else:
                        break
            assert connection.remote_address == (HOST, port)
            assert connection.qp.state == "RTS"
            await connection.aclose()

"""aiordma in two processes: its exchange, and DC."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from anyio import to_thread
from emulated.core import DEVICE
from emulated.ipc import stop

import aiordma
from aiordma import RemoteBuffer, mlx5
from aiordma.mlx5 import DCTInfo

PROGRAM = """
import asyncio, json, sys
import aiordma, aiordma.emulator
from aiordma import exchange

async def server():
    async with (
        aiordma.open_device("emulated") as device,
        device.reg_mr(bytearray(1 << 20)) as inbox,
        device.create_qp(timeout=18) as qp,
        await exchange.serve("127.0.0.1") as listener,
    ):
        arrived = qp.recv(None)
        print(listener.port, flush=True)
        await listener.accept(qp, buffers={"inbox": inbox.remote()})
        length = (await arrived).imm_data
        assert bytes(inbox.view()[:length]) == bytes(range(256)) * (length // 256)
        last = qp.recv(None)
        await last
        print("done", flush=True)

async def client(port):
    async with aiordma.open_device("emulated") as device, device.create_qp(timeout=18) as qp:
        peer = await exchange.connect("127.0.0.1", port, qp)
        inbox = peer.buffers["inbox"]
        async with device.reg_mr(bytearray(range(256)) * 1024) as mr, device.reg_mr(bytearray(len(mr.view()))) as back:
            await qp.rdma_write(mr, inbox[: len(mr.view())])
            await qp.rdma_read(back, inbox[: len(mr.view())])
            assert bytes(back.view()) == bytes(mr.view())
            await asyncio.gather(*(qp.rdma_write(mr[:64], inbox[64 * i : 64 * i + 64]) for i in range(500)))
            await qp.rdma_write(mr, inbox[: len(mr.view())], imm=len(mr.view()))
        await qp.send(b"")

asyncio.run(server() if len(sys.argv) == 1 else client(int(sys.argv[1])))
"""


DC = """
import asyncio, json, sys
import aiordma, aiordma.emulator
from aiordma import mlx5
from aiordma.mlx5 import DCTInfo

aiordma.emulator.attach()

async def target():
    async with (
        aiordma.open_device("emulated") as device,
        device.reg_mr(bytearray(1 << 16)) as inbox,
        device.create_srq(64) as srq,
        mlx5.create_dc_target(device, srq) as target,
    ):
        receives = [srq.recv(inbox[i * 64 : i * 64 + 64]) for i in range(2)]
        print(target.info.to_json(), flush=True)
        print(json.dumps(inbox.remote().to_json()), flush=True)
        assert (await receives[0]).byte_len == 6
        assert (await receives[1]).imm_data == 5
        assert bytes(inbox.view()[1000:1008]) == b"written!"
        print("done", flush=True)

async def initiator(info, remote):
    async with (
        aiordma.open_device("emulated") as device,
        device.reg_mr(bytearray(1 << 16)) as mr,
        mlx5.create_dc_initiator(device, timeout=18) as dci,
    ):
        peer = await dci.reach(DCTInfo.from_json(info))
        remote = aiordma.RemoteBuffer.from_json(json.loads(remote))
        await dci.rdma_write(peer, b"written!", remote[1000:1008])
        await dci.rdma_read(peer, mr[:8], remote[1000:1008])
        assert bytes(mr.view()[:8]) == b"written!"
        assert (await dci.atomic_fetch_add(peer, mr[8:16], remote[2000:2008], 7)).value == 0
        assert (await dci.atomic_fetch_add(peer, mr[8:16], remote[2000:2008], 7)).value == 7
        await dci.send(peer, b"inline")
        await dci.rdma_write(peer, mr[:40000], remote[4000:44000])
        await dci.send(peer, b"", imm=5)

asyncio.run(target() if len(sys.argv) == 1 else initiator(*sys.argv[1:]))
"""


STREAM_TARGET = """
import asyncio, json
import aiordma, aiordma.emulator
from aiordma import mlx5

async def target():
    async with (
        aiordma.open_device("emulated") as device,
        device.reg_mr(bytearray(1 << 20)) as inbox,
        device.create_srq(64) as srq,
        mlx5.create_dc_target(device, srq) as target,
    ):
        receives = [srq.recv(inbox) for _ in range(2)]
        print(target.info.to_json(), flush=True)
        print(json.dumps(inbox.remote().to_json()), flush=True)
        for receive in receives:
            print((await receive).imm_data, flush=True)

aiordma.emulator.attach()
asyncio.run(target())
"""


def start_target() -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", STREAM_TARGET], stdout=subprocess.PIPE, text=True)


@pytest.mark.anyio
async def test_a_stream_to_a_process_that_is_stopped_holds_up_no_other() -> None:
    """The long write waits for it, and so do completions behind it; what goes to another process arrives."""
    targets = [start_target() for _ in range(2)]

    def line(i: int) -> str:
        out = targets[i].stdout
        assert out is not None
        return out.readline()

    try:
        infos = [(DCTInfo.from_json(line(i)), RemoteBuffer.from_json(json.loads(line(i)))) for i in range(2)]
        async with (
            aiordma.open_device(DEVICE) as device,
            device.reg_mr(bytearray(1 << 20)) as mr,
            mlx5.create_dc_initiator(device, log_streams=1, timeout=20, retry_cnt=7) as dci,  # 4 s, eight times
        ):
            peers = [await dci.reach(info) for info, _ in infos]
            there = [remote for _, remote in infos]
            for i in range(2):
                await dci.rdma_write(peers[i], mr[:8], there[i], stream_id=i, imm=i)
                assert line(i) == f"{i}\n"
            stop(targets[0].pid)
            stopped = dci.rdma_write(peers[0], mr, there[0], stream_id=0, imm=7)
            moving = dci.rdma_write(peers[1], mr, there[1], stream_id=1, imm=8)
            assert await to_thread.run_sync(line, 1) == "8\n"
            assert not stopped.done
            assert not moving.done
            targets[0].send_signal(signal.SIGCONT)
            assert await to_thread.run_sync(line, 0) == "7\n"
            await stopped
            await moving
    finally:
        for target in targets:
            target.kill()
            target.wait(60)
            assert target.stdout is not None
            target.stdout.close()


def test_aiordma_and_its_exchange(tmp_path: Path) -> None:
    run(tmp_path, PROGRAM, 1)


def test_dc(tmp_path: Path) -> None:
    run(tmp_path, DC, 2)


def run(tmp_path: Path, program: str, lines: int) -> None:
    """One process prints what the other gets as its arguments, and at its end "done"."""
    env = os.environ | {"AIORDMA_EMULATOR_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            words = [server.stdout.readline().strip() for _ in range(lines)]
            done = subprocess.run(
                [sys.executable, "-c", program, *words],
                env=env,
                timeout=60,
                check=False,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert server.stdout.read() == "done\n"
            assert server.wait(60) == 0
        finally:
            server.kill()

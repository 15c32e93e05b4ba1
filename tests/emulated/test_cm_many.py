"""Many connections, one after the other and at a time: nothing is left of them."""

# ruff: noqa: SIM117

import anyio
import pytest
from emulated.cm import EMULATED, both, fds, hold, qps, world
from emulated.core import eventually, rss_kib

import aiordma
from aiordma import emulator

pytestmark = [pytest.mark.anyio, pytest.mark.librdmacm]


def _objects(*made: str) -> dict[str, int]:
    """Verbs objects of the device, but for those that it keeps once they were ``made``; libmlx5 keeps UARs."""
    if not EMULATED:
        return {}
    return {kind: n for kind, n in emulator.object_counts("mlx5_0").items() if kind not in ("uar", *made)}


@both
async def test_a_thousand_connections_one_after_the_other_leave_nothing(via: str) -> None:
    async with world(via) as w, w.device.reg_mr(bytearray(64)) as memory:
        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, hold)
            descriptors = memory_used = 0
            objects: dict[str, int] = {}
            for i in range(1000):
                if i == 100:
                    await eventually(lambda: qps(w.device) == 0)
                    descriptors, memory_used, objects = fds(), rss_kib(), _objects()
                async with w.connect(max_send_wr=8, max_recv_wr=8) as connection:
                    await connection.rdma_write(b"ping", memory.remote())
            await eventually(lambda: qps(w.device) == 0)
            await eventually(lambda: _objects() == objects)
            await eventually(lambda: fds() <= descriptors)
            # Not a byte for each connection would be too much to ask of an allocator; a lost QP is some KiB.
            assert rss_kib() - memory_used < 4096
            group.cancel_scope.cancel()


@both
async def test_two_hundred_connections_at_a_time_work_and_leave_nothing(via: str) -> None:
    async with world(via, backlog=256) as w, w.device.reg_mr(bytearray(4096)) as memory:
        async with anyio.create_task_group() as group:
            group.start_soon(w.serve, hold)
            async with w.connect():
                pass
            await eventually(lambda: qps(w.device) == 0)
            descriptors, objects = fds(), _objects("cq", "channel")
            for _ in range(2):
                open_: list[aiordma.Connection] = []

                async def one(number: int, open_: list[aiordma.Connection] = open_) -> None:
                    connection = await w.connect(max_send_wr=8, max_recv_wr=8, timeout=60)
                    await connection.rdma_write(number.to_bytes(8, "big"), memory.remote()[number * 8 :][:8])
                    open_.append(connection)

                async with anyio.create_task_group() as clients:
                    for number in range(200):
                        clients.start_soon(one, number)
                assert len(open_) == 200
                assert qps(w.device) == 400
                with memory.view() as view:
                    assert bytes(view[:1600]) == b"".join(number.to_bytes(8, "big") for number in range(200))
                async with anyio.create_task_group() as clients:
                    for connection in open_:
                        clients.start_soon(connection.aclose)
                del connection
                await eventually(lambda: qps(w.device) == 0)
            # More CQs were made for so many QPs; they are the device's, and stay.
            await eventually(lambda: _objects("cq", "channel") == objects)
            cqs = sum(len(role) for role in w.device.statistics()["completion_queues"].values())
            await eventually(lambda: fds() <= descriptors + 2 * cqs)
            group.cancel_scope.cancel()

"""What no program should do, and what must not end the interpreter or take something else down when one does."""

from __future__ import annotations

import anyio
import pytest

import aiordma
from aiordma import ClosedError, UsageError, mlx5

pytestmark = pytest.mark.anyio


async def test_closing_waits_for_queries_of_the_state() -> None:
    async with aiordma.open_device("emulated:mlx5_0") as device:
        for _ in range(50):
            qp = await device.create_qp()
            queries = [qp.query_state() for _ in range(8)]
            await qp.close()
            assert {await query for query in queries} <= {"INIT", "ERR"}


async def test_closing_waits_for_the_arming_of_a_limit() -> None:
    async with aiordma.open_device("emulated:mlx5_0") as device:
        for _ in range(20):
            srq = await device.create_srq()
            srq.recv(None)

            async def reach(srq: aiordma.SharedReceiveQueue = srq) -> None:
                with pytest.raises(ClosedError):
                    await srq.limit_reached(1)

            async with anyio.create_task_group() as group:
                group.start_soon(reach)
                await anyio.lowlevel.checkpoint()
                await srq.close()


async def test_an_srq_outlives_what_is_being_made_for_it() -> None:
    async with aiordma.open_device("emulated:mlx5_0") as device:
        for create in (
            lambda srq: device.create_qp(srq=srq),
            lambda srq: mlx5.create_qp(device, srq=srq, max_umr_entries=4),
            lambda srq: mlx5.create_dc_target(device, srq),
        ):
            for _ in range(10):
                srq = await device.create_srq()
                making = create(srq)
                await srq.close()
                try:
                    made = await making
                except ClosedError:
                    continue
                assert made.closed
            with pytest.raises(ClosedError):
                create(srq)


async def test_an_srq_with_a_dc_target_stays_open() -> None:
    async with aiordma.open_device("emulated:mlx5_0") as device, device.create_srq() as srq:
        async with mlx5.create_dc_target(device, srq):
            with pytest.raises(UsageError, match="still use this SRQ"):
                srq.close()
        with pytest.raises(UsageError, match="not NoneType"):
            mlx5.create_dc_target(device, None)  # type: ignore[arg-type]


async def test_the_state_of_a_qp_whose_pyverbs_object_is_closed_cannot_be_asked() -> None:
    async with aiordma.open_device("emulated:mlx5_0") as device:
        qp, srq = await device.create_qp(), await device.create_srq()
        qp.pyverbs.close()
        with pytest.raises(ClosedError, match="pyverbs"):
            await qp.query_state()
        srq.pyverbs.close()
        with pytest.raises(ClosedError, match="pyverbs"):
            await srq.limit_reached(1)

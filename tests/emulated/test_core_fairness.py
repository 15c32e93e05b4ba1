"""Tasks whose operations complete at once leave the loop to others."""

import anyio
import pytest
from emulated.core import open_pair

from aiordma.emulator import _inject, faults

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

TASKS, EACH = 64, 600


async def test_many_tasks_that_never_wait_do_not_take_a_turn_of_the_loop_for_themselves() -> None:
    """A millisecond of it is theirs together, not of each. Counted in operations: all of them take tens of milliseconds."""
    done = most = 0
    async with open_pair() as p:
        with _inject.stepping() as step:
            first = p.a.rdma_write(p.local[:8], p.remote)
            while not first.done:  # a queue pair that was idle isn't found by the first step
                step()
                await anyio.lowlevel.checkpoint()

            async def busy() -> None:
                nonlocal done
                for _ in range(EACH):
                    write = p.a.rdma_write(p.local[:8], p.remote)
                    step()
                    await write
                    done += 1

            async def other() -> None:
                nonlocal most
                while done < TASKS * EACH:
                    before = done
                    await anyio.lowlevel.checkpoint()
                    most = max(most, done - before)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other)
                for _ in range(TASKS):
                    tasks.start_soon(busy)
        assert done == TASKS * EACH
        assert most < done / 2


@pytest.mark.parametrize("tasks", [1, 4])
async def test_operations_that_are_spun_for_longer_than_a_turn_may_last_take_one_each(tasks: int) -> None:
    """Each takes two milliseconds, and sixty-four that take next to nothing are no turn. Counted in operations."""
    done = most = 0
    async with open_pair() as p:
        p.a.device.spin_us = 10_000

        async def busy() -> None:
            nonlocal done
            quick = p.a.rdma_write(p.local[:8], p.remote)
            for _ in range(60):
                await quick
            for _ in range(80 // tasks):
                await p.a.rdma_read(p.local[:8], p.remote[:8])
                done += 1

        async def other() -> None:
            nonlocal most
            while done < 80:
                before = done
                await anyio.lowlevel.checkpoint()
                most = max(most, done - before)

        with faults.delay(0.002, p.a, opcode="RDMA_READ"):
            async with anyio.create_task_group() as group:
                group.start_soon(other)
                for _ in range(tasks):
                    group.start_soon(busy)
    assert done == 80
    # One each, but what is there before it's awaited, on a busy machine, takes next to nothing.
    assert most < done / 2

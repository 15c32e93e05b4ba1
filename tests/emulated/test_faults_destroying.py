"""Verbs objects that can't be destroyed, and devices that can't be opened: an error that says so, and never a crash."""

from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
    import asyncio, gc, sys
    import aiordma
    from aiordma import emulator
    from aiordma.emulator import faults
    from aiordma.testing import connected_pair

    emulator.attach(1)

    async def use():
        async with aiordma.open_device("emulated") as device, device.reg_mr(bytearray(64)) as memory:
            async with device.create_srq(8) as srq, device.create_qp(srq=srq), connected_pair(device) as (a, b):
                await a.rdma_write(memory, memory.remote())

    verb, count, end = sys.argv[1], int(sys.argv[2]) or None, sys.argv[3]
    rule = faults.verb(verb, "EBUSY", count=count)
    try:
        asyncio.run(use())
    except aiordma.VerbsError as e:
        assert e.errno == 16, e
    else:
        sys.exit(f"no error, {rule}")
    if end == "lifted":
        rule.stop()
    for _ in range(3):
        gc.collect()
    faults.reset()
    asyncio.run(use())
    gc.collect()
    # What fails once is tried again when the device is closed.
    left = {kind: n for kind, n in emulator.object_counts("mlx5_0").items() if n}
    assert count != 1 or not left, left
    print("fine", rule.hits)
"""


@pytest.mark.parametrize("end", ["lifted", "lasting"])
@pytest.mark.parametrize("count", [1, 2, 3, 0])
@pytest.mark.parametrize("verb", ["destroy_cq", "destroy_qp", "destroy_srq", "dereg_mr", "dealloc_pd"])
def test_what_cannot_be_destroyed_is_an_error_and_crashes_nothing(
    verb: str, count: int, end: str, run_python: Callable[..., Any]
) -> None:
    done = run_python(PROGRAM, verb, str(count), end)
    assert done.stdout.startswith("fine")
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("verb", ["query_device", "query_port", "alloc_pd", "open_device"])
def test_a_device_that_cannot_be_opened_is_a_verbs_error(verb: str, run_python: Callable[..., Any]) -> None:
    assert run_python(PROGRAM, verb, "0", "lifted").stdout.startswith("fine")

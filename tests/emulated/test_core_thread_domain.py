"""QPs are made in a parent domain with a thread domain, where the provider has them; nothing depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from emulated.core import eventually
from pyverbs.pd import ParentDomain

import aiordma
from aiordma import VerbsError, _control, _opening, emulator, mlx5
from aiordma import qp as qp_module
from aiordma.emulator import faults

pytestmark = pytest.mark.anyio


async def _writes(device: aiordma.Device, a: aiordma.QueuePair, b: aiordma.QueuePair) -> bytes:
    memory = bytearray(b"from here" + bytes(9))
    async with device.reg_mr(memory) as mr:
        await a.connect(b.info)
        await b.connect(a.info)
        await a.rdma_write(mr[:9], mr.remote()[9:])
    return bytes(memory[9:])


async def test_queue_pairs_are_in_a_parent_domain_of_the_pd_with_a_thread_domain() -> None:
    async with aiordma.open_device() as device:
        assert isinstance(device.qp_pd, ParentDomain)
        assert device.qp_pd is not device.pd
        # A thread domain that a parent domain has can't go (ibv_dealloc_td(3)).
        with pytest.raises(VerbsError) as caught:
            _control.dealloc_td(device._facts["thread_domain"])
        assert caught.value.errno == errno.EBUSY
        async with device.create_qp() as a, mlx5.create_qp(device) as b:
            assert await _writes(device, a, b) == b"from here"


async def test_nothing_of_it_is_left_when_the_device_is_closed() -> None:
    before = emulator.object_counts("mlx5_0")
    device = await aiordma.open_device()
    a, b = await device.create_qp(), await device.create_qp()
    await _writes(device, a, b)
    domain = device._facts["thread_domain"]
    assert domain is not None
    await device.close()
    await device.close()
    assert not domain.alive
    gc.collect()
    assert emulator.object_counts("mlx5_0") == before


async def test_without_memory_for_a_thread_domain_queue_pairs_are_in_the_pd_itself() -> None:
    """libmlx5 asks for a doorbell page with each context, for what has none of its own, and then with a thread domain."""
    with faults.verb("devx_alloc_uar", "ENOMEM", nth=2, count=1) as refused:
        async with aiordma.open_device() as device:
            assert refused.hits == 1
            assert device.qp_pd is device.pd
            async with device.create_qp() as a, device.create_qp() as b:
                assert await _writes(device, a, b) == b"from here"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # it may be there before its loop has ended
async def test_a_device_whose_loop_ends_while_it_opens_leaves_no_thread_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a page of the device mapped, for which the kernel would keep the context."""
    made = []
    alloc_td = _control.alloc_td

    def record(context: int) -> _control.ThreadDomain:
        made.append(alloc_td(context))
        return made[-1]

    async def given_up() -> None:
        aiordma.open_device()

    monkeypatch.setattr(_control, "alloc_td", record)
    before = emulator.object_counts("mlx5_0")
    with faults.verb("alloc_pd", delay=0.1, count=1):
        await anyio.to_thread.run_sync(asyncio.run, given_up())
        await eventually(lambda: made and not made[0].alive)
    await eventually(lambda: emulator.object_counts("mlx5_0") == before)  # the rest of it goes after the thread domain


# The loop can't watch the device's descriptor; what was opened is then in a reference cycle, and goes with it.
NO_WATCH = """
    import asyncio, errno, gc
    import aiordma

    class Loop(asyncio.SelectorEventLoop):
        def add_reader(self, fd, *args):
            if refusing:
                raise OSError(errno.ENOSPC, "no watch is left")
            super().add_reader(fd, *args)

    refusing = False

    async def main():
        global refusing
        for _ in range(40):
            refusing = True
            try:
                await aiordma.open_device("emulated")
            except OSError as e:
                assert e.errno == errno.ENOSPC, e
                e.itself = e
            else:
                raise AssertionError
            refusing = False
        gc.collect()
        async with aiordma.open_device("emulated") as device, device.create_qp():
            print("OPEN")

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
"""


def test_a_device_that_the_loop_can_not_watch_is_an_error_and_no_crash(run_python: Callable[..., Any]) -> None:
    ended = run_python(NO_WATCH)
    assert (ended.stdout, ended.stderr) == ("OPEN\n", "")


async def test_verbs_objects_in_a_reference_cycle_go_in_their_order() -> None:
    """pyverbs alone would destroy some of them on memory that is freed."""
    before = emulator.object_counts("mlx5_0")
    for _ in range(20):
        _, facts = _opening.open_verbs("mlx5_0", 1, None, None)
        facts["cycle"] = facts
        domain = facts["thread_domain"]
        del facts
        gc.collect()
        assert not domain.alive
    assert emulator.object_counts("mlx5_0") == before


async def test_queue_pairs_of_other_providers_keep_their_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some, ibv_modify_qp(3) to the error state takes them, and that runs in a worker thread."""
    monkeypatch.setattr(_control, "is_mlx5", lambda context: False)
    async with aiordma.open_device() as device:
        assert device.qp_pd is device.pd
        async with device.create_qp() as a, device.create_qp() as b:
            assert await _writes(device, a, b) == b"from here"


@pytest.mark.parametrize("of", ["pd", "qp_pd", "context"])
async def test_closing_the_domain_beneath_queue_pairs_is_an_error_and_no_crash(of: str) -> None:
    device = await aiordma.open_device()
    a, b = await device.create_qp(), await device.create_qp()
    await _writes(device, a, b)
    with contextlib.suppress(Exception):  # pyverbs closes the queue pairs first, and then finds that others are left
        getattr(device, of).close()
    with pytest.raises(aiordma.ClosedError):
        a.send(b"x")
    with contextlib.suppress(aiordma.RdmaError):
        await device.close()


@pytest.mark.parametrize("of", ["pd", "qp_pd", "context"])
@pytest.mark.parametrize("busy", [False, True])
async def test_making_something_where_the_domain_beneath_was_closed_is_an_error_or_goes_on_without_it(
    of: str, busy: bool
) -> None:
    """pyverbs has no PD any more when it closed one, and nothing may be made with it. One that is busy stays."""
    device = await aiordma.open_device()
    mr = await device.reg_mr(bytearray(64)) if busy else None
    with contextlib.suppress(Exception):
        getattr(device, of).close()
    for make in (
        device.create_qp,
        device.create_srq,
        lambda: device.reg_mr(bytearray(8)),
        lambda: mlx5.create_qp(device),
        lambda: mlx5.create_dc_initiator(device),
        lambda: mlx5.create_dma_engine(device),
    ):
        with contextlib.suppress(aiordma.ClosedError):
            made = await make()
            await made.close()
    if of == "qp_pd":
        assert device.qp_pd is device.pd
        async with device.create_qp() as a, device.create_qp() as b:
            assert await _writes(device, a, b) == b"from here"
    if mr is not None:
        await mr.close()
    with contextlib.suppress(aiordma.RdmaError):
        await device.close()


async def test_queues_are_all_made_in_one_thread_however_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So their memory is in one of malloc's arenas: where it's in several, many queue pairs in turn take longer."""
    threads = set()
    made = qp_module.make_plain

    def record(*args: object) -> object:
        threads.add(threading.get_ident())
        return made(*args)

    monkeypatch.setattr(qp_module, "make_plain", record)
    async with aiordma.open_device() as device:
        kept = [await making for making in [device.create_qp() for _ in range(20)]]
        kept += [await device.create_qp() for _ in range(20)]
        assert len({qp.qp_num for qp in kept}) == 40
    assert len(threads) == 1
    assert threading.get_ident() not in threads

"""What no program should do, and what must not end the interpreter or take something else down when one does."""

from __future__ import annotations

import copy
import ctypes
import mmap
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest
import pyverbs.enums as e
from emulated.core import DEVICE, connected, open_pair
from pyverbs.cq import CQ
from pyverbs.device import DM, AllocDmAttr
from pyverbs.mr import DMMR, MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPCap, QPInitAttr

import aiordma
from aiordma import Access, BufferAccessError, ClosedError, RemoteBuffer, UsageError, _control, mlx5

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]


async def test_closing_waits_for_queries_of_the_state() -> None:
    async with aiordma.open_device(DEVICE) as device:
        for _ in range(50):
            qp = await device.create_qp()
            queries = [qp.query_state() for _ in range(8)]
            await qp.close()
            assert {await query for query in queries} <= {"INIT", "ERR"}


async def test_closing_waits_for_the_arming_of_a_limit() -> None:
    async with aiordma.open_device(DEVICE) as device:
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


@pytest.mark.emulated_only("is about objects that mlx5 devices have")
async def test_an_srq_outlives_what_is_being_made_for_it() -> None:
    async with aiordma.open_device(DEVICE) as device:
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


@pytest.mark.emulated_only("is about objects that mlx5 devices have")
async def test_an_srq_with_a_dc_target_stays_open() -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_srq() as srq:
        async with mlx5.create_dc_target(device, srq):
            with pytest.raises(UsageError, match="still use this SRQ"):
                srq.close()
        with pytest.raises(UsageError, match="not NoneType"):
            mlx5.create_dc_target(device, None)  # type: ignore[arg-type]


async def test_the_state_of_a_qp_whose_pyverbs_object_is_closed_cannot_be_asked() -> None:
    async with aiordma.open_device(DEVICE) as device:
        qp, srq = await device.create_qp(), await device.create_srq()
        qp.pyverbs.close()
        with pytest.raises(ClosedError, match="pyverbs"):
            await qp.query_state()
        srq.pyverbs.close()
        with pytest.raises(ClosedError, match="pyverbs"):
            await srq.limit_reached(1)


class GuardedCQ(CQ):  # type: ignore[misc]
    @property
    def cq(self) -> int:
        raise AssertionError


class GuardedQP(QP):  # type: ignore[misc]
    @property
    def qp(self) -> int:
        raise AssertionError


async def test_the_structs_behind_pyverbs_objects_are_found_without_their_attributes() -> None:
    """pyverbs before rdma-core 61 may give a pointer there as if it were a Python object, and whoever looks at it counts a
    reference on the struct's first word. From Python 3.12 on the count doesn't always go back."""

    async with aiordma.open_device(DEVICE) as device:
        cq, guarded = CQ(device.context, 16), GuardedCQ(device.context, 16)
        qp = GuardedQP(device.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1, 0)))
        try:
            found = [_control.cq_address(each, device.context_address) for each in (cq, guarded)]
            assert len({*found, _control.qp_address(qp, device.context_address)}) == 3
        finally:
            qp.close()
            cq.close()
            guarded.close()


@pytest.mark.emulated_only("is about objects that mlx5 devices have")
async def test_nothing_of_a_device_can_be_copied_or_pickled() -> None:
    async with open_pair() as p:
        srq = await p.device.create_srq()
        mkey = await mlx5.create_mkey(p.device, 4)
        target = await mlx5.create_dc_target(p.device, srq)
        dci = await mlx5.create_dc_initiator(p.device)
        peer = await dci.reach(target.info)
        pool = await mlx5.create_dci_pool(p.device, 1)
        engine = await mlx5.create_dma_engine(p.device)
        making = p.device.reg_mr(bytearray(8))
        things: list[Any] = [p.device, p.local, p.local[:8], p.a, srq, p.a.batch(), p.a.rdma_write(b"x", p.remote)]
        things += [making, p.device.events(), mkey, target, dci, peer, pool, engine]
        for thing in things:
            for take in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"{type(thing).__name__} can't be copied or pickled"):
                    take(thing)
        await making
        del things, thing
        await p.check()
        await engine.close()


async def test_what_has_no_device_of_its_own_can_be_copied() -> None:
    async with open_pair() as p:
        for thing in (p.remote, p.a.info, p.a.config, p.device.gid):
            assert copy.copy(thing) == copy.deepcopy(thing) == pickle.loads(pickle.dumps(thing)) == thing


@pytest.mark.parametrize("cls", [aiordma.Completion, aiordma.Batch, aiordma.MemorySlice, aiordma.QueuePair])
async def test_an_object_that_was_never_made_raises(cls: type[Any]) -> None:
    empty = cls.__new__(cls)
    calls: list[Callable[[], object]] = [
        lambda: empty.__await__(),
        lambda: empty.send(b"x"),
        lambda: empty.recv(None),
        lambda: empty.view(),
        lambda: empty.post(),
        lambda: repr(empty),
    ]
    for call in calls:
        try:
            call()
        except (AttributeError, UsageError):
            pass


async def test_a_callback_may_end_the_queue_whose_completions_are_being_handled() -> None:
    async with aiordma.open_device(DEVICE) as device, connected(device) as p:
        for _ in range(10):
            p.a.rdma_write(p.local[:8], p.remote, signaled=False).on_finish(p.a.close_now)
        with pytest.raises(ClosedError):
            await p.a.rdma_write(p.local[:8], p.remote)


async def test_a_callback_may_end_the_device_whose_completions_are_being_handled() -> None:
    device = await aiordma.open_device(DEVICE)
    mr, a, b = await device.reg_mr(bytearray(64)), await device.create_qp(), await device.create_qp()
    await a.connect(b.info)
    await b.connect(a.info)
    for _ in range(10):
        a.rdma_write(mr[:8], mr.remote(), signaled=False).on_finish(device.close_now)
    with pytest.raises(ClosedError):
        await a.rdma_write(mr[:8], mr.remote())


class _TwoFaced(list[Any]):
    """Looks like one list at first, and like another later."""

    def __init__(self, first: Any, second: Any, then: Callable[[], object] = list) -> None:
        super().__init__([first])
        self.answers = [[first], [second]]
        self.then = then

    def __iter__(self) -> Iterator[Any]:
        self.then()
        return iter(self.answers.pop(0))


async def test_a_list_that_changes_while_it_is_looked_at_does_no_harm() -> None:
    async with open_pair() as p:
        p.local.view()[:8] = b"12345678"
        batch = p.a.batch()
        batch.rdma_write(_TwoFaced(p.local[:8], b"no memory"), p.remote)

        def more() -> None:
            for _ in range(200):
                batch.rdma_write(p.local[:8], p.remote[8:16])

        batch.rdma_write(_TwoFaced(p.local[:8], None, more), p.remote[16:24])
        assert len(batch) == 202
        await batch
        assert bytes(p.right[:24]) == b"12345678" * 3


async def test_wrap_mr_refuses_what_is_no_open_mr_of_the_pd() -> None:
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises(UsageError, match="bytes"):
            device.wrap_mr(b"x", Access.NONE)
        closed = MR(device.pd, 64, e.IBV_ACCESS_LOCAL_WRITE)
        closed.close()
        with PD(device.context) as other, MR(other, 64, e.IBV_ACCESS_LOCAL_WRITE) as foreign:
            for mr in (closed, foreign):
                with pytest.raises(UsageError, match="closed, or not of this device's PD"):
                    device.wrap_mr(mr, Access.LOCAL_WRITE)


@pytest.mark.emulated_only("is about objects that mlx5 devices have")
async def test_device_memory_is_left_to_the_device() -> None:
    async with open_pair() as p:
        access = Access.ALL | Access.ZERO_BASED
        with DM(p.device.context, AllocDmAttr(length=64)) as dm, DMMR(p.device.pd, 64, access, dm, 0) as mr:
            dm.copy_to_dm(0, b"on board", 8)
            wrapped = p.device.wrap_mr(mr, Access.ALL)
            await p.a.rdma_write(wrapped[:8], p.remote)
            assert bytes(p.right[:8]) == b"on board"
            with pytest.raises(UsageError, match="device memory"):
                p.a.rdma_write(wrapped[:8], p.remote, inline=True)
            with pytest.raises(BufferAccessError, match="device memory"):
                p.a.atomic_fetch_add(wrapped[:8], p.remote[:8], 1)
            await wrapped.close()


async def test_memory_that_is_gone_is_called_so() -> None:
    released, closed = memoryview(bytearray(8)), mmap.mmap(-1, 4096)
    released.release()
    closed.close()
    async with open_pair() as p:
        for gone in (released, closed):
            with pytest.raises(BufferAccessError, match="has no memory any more"):
                p.device.reg_mr(gone)
            with pytest.raises(BufferAccessError, match="has no memory any more"):
                p.a.rdma_write(gone, p.remote)


class _Holder(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("thing", ctypes.py_object))


class _Other(ctypes.Structure):
    _fields_ = (("Objects", ctypes.c_int),)


async def test_pointers_to_objects_inside_ctypes_are_found() -> None:
    async with aiordma.open_device(DEVICE) as device:
        for holder in ((ctypes.py_object * 4)(), _Holder(), (_Holder * 2)()):
            with pytest.raises(BufferAccessError, match="Python objects"):
                device.reg_mr(holder)
        async with device.reg_mr(_Other()):
            pass


async def test_numbers_of_numpy_are_numbers() -> None:
    async with open_pair() as p:
        remote = RemoteBuffer(np.uint64(p.remote.addr), np.int64(64), np.uint32(p.remote.rkey))
        receive = p.b.recv(None)
        await p.a.rdma_write(b"x", remote, imm=np.uint32(7))
        assert (await receive).imm_data == 7
        await p.a.atomic_fetch_add(p.local[:8], remote[8:16], np.int64(-1))
        assert p.right[8:16] == b"\xff" * 8
        for wrong in (1.5, "1", np.float64(1), -1, 1 << 32):
            with pytest.raises(UsageError):
                p.a.rdma_write(b"x", remote, imm=wrong)  # type: ignore[arg-type]


@pytest.mark.emulated_only("is about objects that mlx5 devices have")
async def test_no_layout_on_an_mkey_that_is_being_closed() -> None:
    async with open_pair() as p, mlx5.create_qp(p.device, max_umr_entries=4) as qp:
        await qp.connect(qp.info)
        mkey = await mlx5.create_mkey(p.device, 4)
        closing = mkey.close()
        for register in (
            lambda: qp.register_list(mkey, [p.local[:8]]),
            lambda: qp.register_interleaved(mkey, [(p.local[:64], 8, 8)], repeat_count=4),
            lambda: qp.invalidate(mkey),
        ):
            with pytest.raises(ClosedError):
                register()
        await closing
        await p.local.close()  # nothing is left that uses it
        for call in (lambda: qp.invalidate("mkey"), lambda: qp.map_strided("mkey", np.zeros(4))):  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="not str"):
                call()

"""Memory that a device uses, and when it may go: faults that users of RDMA met, each with its source."""

import gc
import mmap
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy
import pytest
from emulated.core import DEVICE, ON_EMULATED, ON_RXE, connect, connected, object_counts

import aiordma
from aiordma import Access, AccessFlagsError, BufferAccessError, ClosedError, Device, UsageError
from aiordma.emulator import faults

pytestmark = pytest.mark.anyio

SOON = 20


@pytest.fixture(autouse=True)
def no_injection(leak_check: None) -> Iterator[None]:
    yield
    if ON_EMULATED:
        faults.reset()


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Device]:
    options.setdefault("spin_us", 0)
    async with aiordma.open_device(DEVICE, **options) as device:
        yield device


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what nothing tells of."""
    with anyio.fail_after(SOON):
        while not condition():
            gc.collect()
            await anyio.sleep(0.005)


class Buffer(bytearray):
    """A bytearray that weak references can be made to."""


# ------------------------------------------------------------------ cancelling and closing


async def test_a_cancelled_read_keeps_its_buffer_until_the_device_is_done() -> None:
    """async-rdma#47, nixl#2067: dropping a future freed memory that the device then wrote to."""
    async with opened() as device, connected(device) as pair:
        pair.right[:] = b"\xaa" * len(pair.right)
        buffer = Buffer(len(pair.right))
        alive = weakref.ref(buffer)
        mr = await device.reg_mr(buffer)
        with faults.hold(pair.a) as go:
            operation = pair.a.rdma_read(mr, pair.remote)
            with anyio.move_on_after(0.05) as scope:
                await operation
            assert scope.cancelled_caught
            del operation, buffer
            closing = mr.close()
            del mr
            gc.collect()
            await anyio.sleep(0.05)
            held = alive()
            assert held is not None
            assert not any(held)
            assert not closing.done
            go.stop()
            with anyio.fail_after(SOON):
                await closing
            # It was given up, and the device filled it all the same.
            assert held == pair.right
        del held
        await until(lambda: alive() is None)
        await pair.check()


async def test_what_a_dropped_operation_uses_goes_when_the_device_is_done() -> None:
    """async-rdma#47: the same, with nothing left that names the region: it's released, and the leak is told."""
    async with opened() as device, connected(device) as pair:
        buffer = Buffer(4096)
        alive = weakref.ref(buffer)
        mr = await device.reg_mr(buffer)
        before = object_counts()["mr"]
        with faults.hold(pair.a) as go:
            pair.a.rdma_read(mr[:64], pair.remote)
            del buffer, mr
            gc.collect()
            await anyio.sleep(0.05)
            assert alive() is not None
            assert object_counts()["mr"] == before
            with pytest.warns(ResourceWarning, match="unclosed <MemoryRegion"):
                await release_and_wait(go, alive)
        assert object_counts()["mr"] == before - 1
        await pair.check()


async def release_and_wait(go: Callable[[], None], alive: "weakref.ref[Buffer]") -> None:
    go.stop()
    await until(lambda: alive() is None)


async def test_closing_a_region_waits_for_operations_in_flight_and_in_the_queue() -> None:
    """monarch#3825: deregistering memory under outstanding work ended the process."""
    async with opened() as device, connected(device, max_send_wr=2) as pair:
        async with device.reg_mr(bytearray(4096)) as mr:
            before = object_counts()["mr"]
            with faults.hold(pair.a) as go:
                operations = [pair.a.rdma_write(mr[:1024], pair.remote) for _ in range(5)]
                assert pair.a.statistics()["send"]["waiting"] == 3
                closing = mr.close()
                await anyio.sleep(0.05)
                assert not closing.done
                assert object_counts()["mr"] == before
                for use in (
                    lambda: pair.a.rdma_write(mr[:8], pair.remote),
                    lambda: pair.a.send(mr[:8]),
                    lambda: pair.b.recv(mr[:8]),
                    mr.remote,
                ):
                    with pytest.raises(ClosedError):
                        use()
                go.stop()
                with anyio.fail_after(SOON):
                    for operation in operations:
                        await operation
                    await closing
            assert object_counts()["mr"] == before - 1
        await pair.check()


async def test_a_region_whose_qp_is_closed_under_it_closes() -> None:
    """monarch#3825: in whatever order; the flush ends the operations that the region waits for."""
    async with opened() as device, connected(device) as pair:
        with faults.hold(pair.a):
            operations = [pair.a.rdma_read(pair.local[:1024], pair.remote) for _ in range(5)]
            receive = pair.b.recv(pair.peer)
            closings = [pair.local.close(), pair.peer.close()]
            await anyio.sleep(0.05)
            assert not any(closing.done for closing in closings)
            with anyio.fail_after(SOON):
                await pair.a.close()
                await pair.b.close()
                for closing in closings:
                    await closing
        assert all(isinstance(o.exception(), aiordma.WrFlushError) for o in (*operations, receive))


@pytest.mark.any_device
async def test_registered_memory_can_be_neither_unmapped_nor_resized() -> None:
    """libfabric-cray#1000: memory that was unmapped while it was registered."""
    async with opened() as device:
        mapped = mmap.mmap(-1, 8192)
        array = bytearray(100)
        async with device.reg_mr(mapped) as first, device.reg_mr(array) as second:
            with pytest.raises(BufferError):
                mapped.close()
            with pytest.raises(BufferError):
                mapped.resize(4096)
            with pytest.raises(BufferError):
                array.append(1)
            first.view()[:5] = b"still"
            assert mapped[:5] == b"still"
            assert len(second) == 100
        array.append(1)
        mapped.close()


# ------------------------------------------------------------------ order of destruction

_RANDOM_ORDER = """
    import asyncio, gc, logging, os, random, signal, sys, warnings
    import aiordma
    import aiordma.cli  # what else an application may have loaded

    warnings.simplefilter("ignore", ResourceWarning)  # nothing is closed, which is what this is about
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # not that a step was slow

    async def make():
        device = await aiordma.open_device(spin_us=0)
        mrs = [await device.reg_mr(bytearray(4096)) for _ in range(2)]
        srq = await device.create_srq(16)
        a, b = await device.create_qp(), await device.create_qp(srq=srq)
        await a.connect(b.info)
        await b.connect(a.info)
        receives = [srq.recv(mrs[0][:64]), a.recv(mrs[1][:64])]
        sent = a.send(mrs[1][:8])
        await sent
        late = b.send(mrs[0][:8])
        ours = [device, *mrs, srq, a, b, *receives, sent, late]
        # pyverbs objects of ours that somebody kept
        queue = device.engine.completion_queues[0]
        kept = [device.pd, device.context, a.pyverbs, b.pyverbs, srq.pyverbs, queue.pyverbs, queue.pyverbs_channel]
        return ours + kept

    def child(seed):
        order = random.Random(seed)
        objects = asyncio.run(make())
        order.shuffle(objects)
        # Some are dropped one by one, some together in a cycle, some not at all.
        for _ in range(order.randrange(len(objects))):
            objects.pop()
            if order.random() < 0.2:
                gc.collect()
        if order.random() < 0.5:
            cycle = [objects[: len(objects) // 2]]
            cycle.append(cycle)
            del objects[: len(objects) // 2], cycle
        if order.random() < 0.5:
            globals()["kept"] = objects
        else:
            sys.modules["kept"] = objects

    children = {}
    for seed in map(int, sys.argv[1:]):
        pid = os.fork()
        if not pid:
            signal.alarm(90)
            child(seed)
            break  # to the end of the program, as any other
        children[pid] = seed
        while len(children) >= 3:
            pid, status = os.wait()
            seed = children.pop(pid)
            if status:
                print(f"order {seed}: status {status}", flush=True)
    else:
        while children:
            pid, status = os.wait()
            seed = children.pop(pid)
            if status:
                print(f"order {seed}: status {status}", flush=True)
        print("all done")
"""


@pytest.mark.any_device
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_objects_dropped_in_any_order_end_quietly(first: int, run_python: Callable[..., Any]) -> None:
    """rdma-core PR1618: garbage collection closed a CQ after its context: EBADF, or the end of the process."""
    # A VM starts a process for each, which takes it seconds.
    done = run_python(_RANDOM_ORDER, *map(str, range(first, first + (4 if ON_RXE else 20))))
    assert (done.stdout, done.stderr) == ("all done\n", "")


@pytest.mark.any_device
async def test_closing_twice_and_in_any_order_is_fine() -> None:
    """spead2 PR134, ucx-py#59: EBUSY from the wrong order, and a crash from the second close."""
    async with opened() as device:
        mr = await device.reg_mr(bytearray(4096))
        srq = await device.create_srq(16)
        a, b = await device.create_qp(), await device.create_qp(srq=srq)
        await connect(a, b)
        srq.recv(mr[:8])
        # What needs others first.
        with pytest.raises(UsageError, match="1 QPs still use this SRQ"):
            srq.close()
        first = device.close()
        assert device.close() is first
        await first
        for thing in (device, mr, srq, a, b):
            assert thing.closed
            closing = thing.close()
            assert thing.close() is closing
            await closing
            thing.close_now()
        for use in (
            lambda: a.send(None),
            lambda: b.rdma_write(None, aiordma.RemoteBuffer(0, 0, 0)),
            lambda: srq.recv(None),
        ):
            with pytest.raises(ClosedError):
                use()
        for make in (lambda: device.reg_mr(bytearray(8)), device.create_qp, device.create_srq, device.events):
            with pytest.raises(ClosedError):
                make()


@pytest.mark.any_device
async def test_a_pd_that_is_closed_first_says_busy_and_harms_nothing() -> None:
    """spead2 PR134: PD before MR."""
    from pyverbs.pyverbs_error import PyverbsError

    async with opened() as device:
        async with device.reg_mr(bytearray(64)) as mr:
            with pytest.raises(PyverbsError, match="busy"):
                device.pd.close()
            assert mr.lkey
        async with connected(device) as pair:
            await pair.check()


# ------------------------------------------------------------------ limits of locked memory

_MEMLOCK = """
    import asyncio, ctypes, resource, struct
    import aiordma

    def drop_cap_ipc_lock():
        libc = ctypes.CDLL(None, use_errno=True)
        header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
        data = ctypes.create_string_buffer(24)
        assert not libc.capget(header, data)
        words = list(struct.unpack("=6I", data.raw))
        for i in (0, 1):  # effective and permitted; CAP_IPC_LOCK is 14
            words[i] &= ~(1 << 14)
        assert not libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *words))), ctypes.get_errno()

    async def main():
        async with aiordma.open_device("emulated") as device:
            for what, make in {
                "ibv_reg_mr": lambda: device.reg_mr(bytearray(1 << 20)),
                "ibv_create_cq": device.create_qp,
            }.items():
                try:
                    await make()
                except aiordma.VerbsError as e:
                    print(e)
                    assert e.errno == 12, e
                    for word in (what, "65536 bytes", "RLIMIT_MEMLOCK", "ulimit -l", "limits.conf", "LimitMEMLOCK"):
                        assert word in str(e), (word, str(e))
                else:
                    raise AssertionError(f"{what} succeeded")
            await (await device.reg_mr(bytearray(100))).close()

    drop_cap_ipc_lock()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    asyncio.run(main())
"""


def test_little_lockable_memory_is_named_with_its_cure(run_python: Callable[..., Any]) -> None:
    """cudf-spark PR7632: all that was said was "Cannot allocate memory"."""
    done = run_python(_MEMLOCK)
    assert done.stderr == ""


# ------------------------------------------------------------------ what is no region


@pytest.mark.any_device
async def test_arrays_with_gaps_are_refused() -> None:
    """nixl#563, vllm PR52818: every second element was asked for, and the bytes between moved as well."""
    async with opened() as device, connected(device) as pair:
        array = numpy.arange(256, dtype=numpy.uint8).reshape(16, 16)
        for part in (array[:, ::2], array[:, 2:4], array.T, array[::-1]):
            with pytest.raises(BufferAccessError, match="contiguous"):
                device.reg_mr(part)
            with pytest.raises(BufferAccessError, match="contiguous"):
                pair.a.send(part[:2])
            with pytest.raises(BufferAccessError, match="contiguous"):
                pair.a.rdma_write([pair.local[:4], part[:2]], pair.remote)
        view = memoryview(bytearray(16))[::2]
        with pytest.raises(BufferAccessError, match="contiguous"):
            device.reg_mr(view)
        # Rows one after the other have no gaps.
        async with device.reg_mr(array[2:4]) as mr:
            assert mr.length == 32
            await pair.a.rdma_write(mr, pair.remote)
        assert pair.right[:32] == bytes(range(32, 64))
        await pair.a.rdma_write(array[4, 4:8], pair.remote)
        assert pair.right[:4] == bytes(range(68, 72))


@pytest.mark.any_device
async def test_access_rights_are_checked_before_anything_is_posted() -> None:
    """libfabric PR7243: rights that contradict each other, read-only memory as a target: late and misleading errors."""
    async with opened() as device, connected(device) as pair:
        for access in (Access.REMOTE_WRITE, Access.REMOTE_ATOMIC, Access.REMOTE_READ | Access.REMOTE_ATOMIC):
            with pytest.raises(AccessFlagsError, match="LOCAL_WRITE"):
                device.reg_mr(bytearray(8), access)
        with pytest.raises(AccessFlagsError, match="unknown"):
            device.reg_mr(bytearray(8), 1 << 30)
        with pytest.raises(BufferAccessError, match="read-only"):
            device.reg_mr(b"constant")
        readonly = numpy.zeros(8, numpy.uint8)
        readonly.flags.writeable = False
        with pytest.raises(TypeError, match="read-only"):
            device.reg_mr(readonly)

        async with device.reg_mr(b"constant", Access.REMOTE_READ) as constant:
            # A source, here and for the peer.
            await pair.a.rdma_write(constant, pair.remote)
            assert pair.right[:8] == b"constant"
            await pair.b.rdma_read(pair.peer[8:16], constant.remote())
            assert pair.right[8:16] == b"constant"
            receive = pair.b.recv(pair.peer[16:24])
            await pair.a.send(constant)
            await receive
            # No target.
            for use in (
                lambda: pair.a.rdma_read(constant, pair.remote),
                lambda: pair.a.recv(constant),
                lambda: pair.a.atomic_fetch_add(constant[:8], pair.remote[:8], 1),
                lambda: pair.b.rdma_write(pair.peer[:8], constant.remote()),
            ):
                with pytest.raises(AccessFlagsError):
                    use()

        # Bytes are a source, copied into the work request.
        receive = pair.b.recv(pair.peer[24:32])
        await pair.a.send(b"inline")
        assert (await receive).byte_len == 6
        for use in (
            lambda: pair.a.rdma_read(b"constant", pair.remote),
            lambda: pair.a.rdma_read(bytearray(8), pair.remote),
            lambda: pair.a.recv(bytearray(8)),
            lambda: pair.a.atomic_fetch_add(bytearray(8), pair.remote[:8], 1),
            lambda: pair.a.send("text"),
        ):
            with pytest.raises(TypeError):
                use()
        async with device.reg_mr(bytearray(8), Access.LOCAL_WRITE) as private:
            for use in (
                lambda: pair.b.rdma_write(pair.peer[:8], private.remote()),
                lambda: pair.b.rdma_read(pair.peer[:8], private.remote()),
                lambda: pair.b.atomic_fetch_add(pair.peer[:8], private.remote(), 1),
            ):
                with pytest.raises(AccessFlagsError):
                    use()
        await pair.check()

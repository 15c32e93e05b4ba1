"""What aiordma makes of each fault: the right exception and event, no hang, no leak, others unaffected, and how to go on.

The table of docs/faults.md says in words what is tested here.
"""

import dataclasses
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from emulated.core import Pair, connect, connected, eventually, reported

import aiordma
from aiordma import (
    Completion,
    CompletionQueueError,
    Device,
    DeviceFatalError,
    DevxError,
    Events,
    EventType,
    LocalProtectionError,
    MemoryWindowBindError,
    RemoteAccessError,
    RemoteInvalidRequestError,
    RemoteOperationError,
    RetryExceededError,
    RnrRetryExceededError,
    VerbsError,
    WrFlushError,
    mlx5,
)
from aiordma.emulator import faults
from aiordma.mlx5 import devx

pytestmark = pytest.mark.anyio

SOON = 20
PORT_DOWN, PORT_ACTIVE = 1, 4  # enum ibv_port_state


@pytest.fixture(autouse=True)
def no_faults(leak_check: None) -> Iterator[None]:
    yield
    faults.reset()


@asynccontextmanager
async def opened() -> AsyncIterator[Device]:
    async with aiordma.open_device("emulated:mlx5_0") as device:
        yield device


async def next_events(events: Events, count: int) -> set[tuple[EventType | int, object]]:
    with anyio.fail_after(SOON):
        found = [await anext(events) for _ in range(count)]
    return {(event.type, event.element) for event in found}


async def replace(pair: Pair) -> Pair:
    """How a connection is recovered: both queue pairs are closed and new ones connected; the memory stays registered."""
    device = pair.device
    with anyio.fail_after(SOON):
        await pair.a.close()
        await pair.b.close()
    a, b = await device.create_qp(min_rnr_timer=1), await device.create_qp(min_rnr_timer=1)
    await connect(a, b)
    return dataclasses.replace(pair, a=a, b=b)


# ------------------------------------------------------------------ operations that fail

Make = Callable[[Pair], faults.Fault]

#: A fault, what the operation raises, and the event with the QP that it's about.
FAILURES: dict[str, tuple[Make, type[Exception], list[tuple[EventType, str]]]] = {
    "drop": (lambda p: faults.drop(p.a), RetryExceededError, []),
    "drop_answer": (lambda p: faults.drop_answer(p.a), RetryExceededError, []),
    "retry_exceeded": (lambda p: faults.retry_exceeded(p.a), RetryExceededError, []),
    "remote_access_error": (
        lambda p: faults.remote_access_error(p.a),
        RemoteAccessError,
        [(EventType.QP_ACCESS_ERR, "b")],
    ),
    "REM_INV_REQ_ERR": (
        lambda p: faults.fail("REM_INV_REQ_ERR", p.a),
        RemoteInvalidRequestError,
        [(EventType.QP_REQ_ERR, "b")],
    ),
    "REM_OP_ERR": (lambda p: faults.fail("REM_OP_ERR", p.a), RemoteOperationError, [(EventType.QP_FATAL, "b")]),
    "LOC_PROT_ERR": (lambda p: faults.fail("LOC_PROT_ERR", p.a), LocalProtectionError, []),
    "qp_fatal": (lambda p: faults.qp_fatal(p.a), WrFlushError, [(EventType.QP_FATAL, "a")]),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_ends_the_connection_and_a_new_one_works(name: str) -> None:
    make, error, expected = FAILURES[name]
    async with opened() as device, connected(device) as other:
        events = device.events()
        async with connected(device, timeout=8, retry_cnt=1) as pair:
            with make(pair) as fault, anyio.fail_after(SOON):
                failed = pair.a.rdma_write(pair.local[:8], pair.remote)
                behind = [pair.a.rdma_write(pair.local[8:16], pair.remote[8:16]) for _ in range(5)]
                with pytest.raises(error):
                    await failed
                for operation in behind:
                    with pytest.raises(WrFlushError):
                        await operation
                assert fault.hits >= 1
                assert await next_events(events, len(expected)) == {
                    (event, getattr(pair, qp)) for event, qp in expected
                }
                await other.check()
            new = await replace(pair)
            await new.check()
            await new.a.close()
            await new.b.close()


@pytest.mark.parametrize("opcode", ["write", "read", "send", "atomic", "write_imm"])
async def test_what_a_lost_answer_concealed_is_done_once(opcode: str) -> None:
    """The request arrived twice; the receiver does it once, and an atomic has the result of the first time."""
    async with opened() as device, connected(device, timeout=4, retry_cnt=7) as pair:
        pair.left[:8] = b"one time"
        pair.right[8:16] = b"the peer"
        pair.right[16:24] = (40).to_bytes(8, sys.byteorder)
        receives = [pair.b.recv(pair.peer[64:72]) for _ in range(2)]
        with faults.drop_answer(pair.a, count=3) as fault, anyio.fail_after(SOON):
            if opcode == "write":
                await pair.a.rdma_write(pair.local[:8], pair.remote[:8])
                assert pair.right[:8] == b"one time"
            elif opcode == "read":
                await pair.a.rdma_read(pair.local[8:16], pair.remote[8:16])
                assert pair.left[8:16] == b"the peer"
            elif opcode == "send":
                await pair.a.send(pair.local[:8])
            elif opcode == "write_imm":
                await pair.a.rdma_write(pair.local[:8], pair.remote[64:72], imm=7)
            else:
                assert (await pair.a.atomic_fetch_add(pair.local[24:32], pair.remote[16:24], 2)).value == 40
                assert int.from_bytes(pair.right[16:24], sys.byteorder) == 42
        assert fault.hits == 3
        if opcode in ("send", "write_imm"):
            await receives[0]
            assert pair.right[64:72] == b"one time"
        await anyio.lowlevel.checkpoint()
        assert not receives[1].done
        # The sequence numbers of both sides agree.
        await pair.a.send(pair.local[:8])
        await pair.a.rdma_write(pair.local[:8], pair.remote[:8])


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_as_many_are_lost_as_there_are_sendings(retries: int) -> None:
    """One, and retry_cnt more."""
    async with opened() as device:
        for lost, error in ((1 + retries, RetryExceededError), (retries, None)):
            async with connected(device, timeout=4, retry_cnt=retries) as pair:
                rule = faults.drop(pair.a, count=lost) if lost else faults.drop(pair.a, probability=0)
                with rule, anyio.fail_after(SOON):
                    if error is None:
                        await pair.a.rdma_write(pair.local[:8], pair.remote)
                    else:
                        with pytest.raises(error):
                            await pair.a.rdma_write(pair.local[:8], pair.remote)
                assert rule.hits == lost


async def test_lost_answers_until_the_end_leave_what_was_done() -> None:
    async with opened() as device, connected(device, timeout=4, retry_cnt=2) as pair:
        pair.left[:8] = b"but done"
        with faults.drop_answer(pair.a), pytest.raises(RetryExceededError), anyio.fail_after(SOON):
            await pair.a.rdma_write(pair.local[:8], pair.remote)
        assert pair.right[:8] == b"but done"


@pytest.mark.parametrize("size", [8, 1 << 20])
async def test_long_messages_get_lost_as_a_whole(size: int) -> None:
    async with opened() as device, connected(device, size=size, timeout=4, retry_cnt=7) as pair:
        pair.left[:] = bytes(range(256)) * (size // 256) if size > 8 else b"8 bytes!"
        with faults.drop(pair.a, nth=1), faults.drop_answer(pair.a, nth=2), anyio.fail_after(SOON):
            await pair.a.rdma_write(pair.local, pair.remote)
        assert pair.left == pair.right


async def test_losses_at_random_change_nothing_but_the_time() -> None:
    """Every operation is done once and in order, whatever gets lost; seeded, and with as many retries as it takes."""
    async with opened() as device, connected(device, timeout=1, retry_cnt=7, max_send_wr=64) as pair:
        rng = random.Random(20240521)
        expected = bytearray(1024)
        with (
            faults.drop(pair.a, probability=0.1, seed=1),
            faults.drop_answer(pair.a, probability=0.1, seed=2),
            faults.delay(0, pair.a, jitter=0.0002, seed=3),
            anyio.fail_after(60),
        ):
            operations: list[Completion] = []
            for number in range(256):
                at = 8 * rng.randrange(127)
                value = number.to_bytes(8, "little")
                pair.left[8 * number : 8 * number + 8] = value
                expected[at : at + 8] = value
                operations.append(pair.a.rdma_write(pair.local[8 * number : 8 * number + 8], pair.remote[at : at + 8]))
                operations.append(
                    pair.a.atomic_fetch_add(
                        pair.local[4096 + 8 * number : 4104 + 8 * number], pair.remote[1016:1024], 1
                    )
                )
            results = [await operation for operation in operations]
        assert [result.value for result in results[1::2]] == list(range(256))
        expected[1016:1024] = (256).to_bytes(8, sys.byteorder)
        assert pair.right[:1024] == expected


async def test_unreliable_operations_succeed_and_never_arrive() -> None:
    async with opened() as device, connected(device, qp_type="UC") as pair:
        pair.left[:8] = b"nowhere!"
        with faults.drop(pair.a, count=1) as fault:
            await pair.a.rdma_write(pair.local[:8], pair.remote)
            assert pair.right[:8] == bytes(8)
            await pair.a.rdma_write(pair.local[:8], pair.remote)
            assert pair.right[:8] == b"nowhere!"
        assert fault.hits == 1


# ------------------------------------------------------------------ receivers that aren't ready


async def test_a_receiver_that_is_not_ready_is_asked_again() -> None:
    async with opened() as device, connected(device, rnr_retry=7) as pair:
        receive = pair.b.recv(pair.peer[:8])
        with faults.rnr(pair.a, count=20) as fault, anyio.fail_after(SOON):
            await pair.a.send(pair.local[:8])
            await receive
        assert (fault.hits, fault.seen) == (20, 21)


async def test_a_receiver_that_is_never_ready_ends_the_retries() -> None:
    async with opened() as device, connected(device, rnr_retry=2) as pair, connected(device) as other:
        receive = pair.b.recv(pair.peer[:8])
        with faults.rnr(pair.a) as fault, anyio.fail_after(SOON):
            with pytest.raises(RnrRetryExceededError):
                await pair.a.send(pair.local[:8])
            assert fault.hits == 3
            await other.check()
        assert not receive.done
        new = await replace(pair)
        assert isinstance(receive.exception(), WrFlushError)
        await new.check()
        await new.a.close()
        await new.b.close()


# ------------------------------------------------------------------ later, slower, in another order


async def test_a_delay_lasts_as_long_as_it_says_for_all_at_once() -> None:
    async with opened() as device, connected(device) as pair, connected(device) as other:
        with faults.delay(0.05, pair.a) as fault:
            begin = time.monotonic()
            operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(50)]
            await other.check()
            for operation in operations:
                await operation
                assert time.monotonic() - begin >= 0.05
            # A delay each would be 2.5 seconds; a busy machine takes its time too.
            assert fault.hits == 50


async def test_latency_counts_from_the_post_for_each() -> None:
    async with opened() as device, connected(device) as pair:
        with faults.shape(pair.a, latency=0.03, jitter=0.01, seed=4):
            times = []
            for _ in range(3):
                begin = time.monotonic()
                await pair.a.rdma_write(pair.local[:8], pair.remote)
                times.append(time.monotonic() - begin)
        assert min(times) >= 0.03


@pytest.mark.parametrize("operation", ["rdma_write", "rdma_read"])
async def test_a_bandwidth_is_shared_by_all_that_the_rule_is_about(operation: str) -> None:
    async with opened() as device, connected(device) as one, connected(device) as two:
        with faults.shape(device=device, bandwidth=1_000_000):
            begin = time.monotonic()
            operations = []
            for _ in range(5):
                for pair in (one, two):
                    local, remote = pair.local[:10_000], pair.remote[:10_000]
                    operations.append(getattr(pair.a, operation)(local, remote))
            for each in operations:
                await each
            assert time.monotonic() - begin >= 0.1  # 100,000 bytes


async def test_operations_are_overtaken_by_others_of_the_device_only() -> None:
    """The order within a queue pair is kept: the second waits with the first."""
    async with opened() as device, connected(device) as one, connected(device) as two:
        with faults.reorder(one.a, by=3, limit=3600, nth=1) as fault, anyio.fail_after(SOON):
            late = [one.a.rdma_write(one.local[:8], one.remote) for _ in range(2)]
            await eventually(lambda: fault.hits)
            for _ in range(2):
                await two.a.rdma_write(two.local[:8], two.remote)
            await anyio.sleep(0.02)
            assert not any(operation.done for operation in late)
            await two.a.rdma_write(two.local[:8], two.remote)
            for operation in late:
                await operation
        assert fault.hits == 1


async def test_who_is_overtaken_by_nobody_goes_on() -> None:
    async with opened() as device, connected(device) as pair:
        with faults.reorder(pair.a, limit=0.02) as fault, anyio.fail_after(SOON):
            begin = time.monotonic()
            await pair.a.rdma_write(pair.local[:8], pair.remote)
            assert time.monotonic() - begin >= 0.02
        assert fault.hits == 1


async def test_all_of_a_device_reordered_all_arrive() -> None:
    async with opened() as device, connected(device) as one, connected(device) as two, connected(device) as three:
        with faults.reorder(device=device, probability=0.5, seed=9, limit=0.005), anyio.fail_after(60):
            operations = []
            for number in range(32):
                for pair in (one, two, three):
                    pair.left[8 * number] = number
                    part = slice(8 * number, 8 * number + 8)
                    operations.append(pair.a.rdma_write(pair.local[part], pair.remote[part]))
            for operation in operations:
                await operation
        for pair in (one, two, three):
            assert [pair.right[8 * n] for n in range(32)] == list(range(32))


# ------------------------------------------------------------------ what isn't sent


async def test_memory_copies_are_late_and_fail_too() -> None:
    async with (
        opened() as device,
        device.reg_mr(bytearray(b"to be copied")) as source,
        device.reg_mr(bytearray(12)) as to,
        mlx5.create_dma_engine(device) as engine,
    ):
        with faults.delay(0.02, engine.qp, opcode="MEMCPY") as late, anyio.fail_after(SOON):
            begin = time.monotonic()
            await engine.copy(to[:], source[:])
            assert time.monotonic() - begin >= 0.02
        with faults.fail("LOC_PROT_ERR", engine.qp) as fault, pytest.raises(LocalProtectionError):
            await engine.copy(to[:], source[:])
        assert (late.hits, fault.hits) == (1, 1)


async def test_registering_a_layout_fails_too() -> None:
    async with (
        opened() as device,
        device.reg_mr(bytearray(64)) as mr,
        mlx5.create_mkey(device, 2) as key,
        mlx5.create_qp(device, max_umr_entries=2) as a,
        mlx5.create_qp(device, max_umr_entries=2) as b,
    ):
        await connect(a, b)
        with (
            faults.drop(a) as lost,
            faults.fail("MW_BIND_ERR", a, opcode="UMR") as fault,
            pytest.raises(MemoryWindowBindError),
            anyio.fail_after(SOON),
        ):
            await a.register_list(key, [mr[:8], mr[16:24]])
        # Nothing of it goes over the network, so nothing of it gets lost.
        assert (lost.seen, fault.hits) == (0, 1)


# ------------------------------------------------------------------ queues


async def test_an_overrun_ends_the_queue_and_new_queue_pairs_get_another() -> None:
    async with opened() as device, connected(device) as pair:
        events = device.events()
        with faults.cq_overrun(pair.a, nth=2) as fault, anyio.fail_after(SOON):
            await pair.a.rdma_write(pair.local[:8], pair.remote)
            with pytest.raises(CompletionQueueError):
                await pair.a.rdma_write(pair.local[:8], pair.remote)
            assert await next_events(events, 2) == {(EventType.CQ_ERR, None), (EventType.QP_FATAL, pair.a)}
        assert fault.hits == 1
        new = await replace(pair)
        await new.check()
        await new.a.close()
        await new.b.close()


@pytest.mark.parametrize("queue", ["send", "recv"])
async def test_a_queue_that_breaks_ends_what_waits_for_it(queue: Any) -> None:
    async with opened() as device, connected(device) as pair:
        events = device.events()
        receive = pair.b.recv(pair.peer[:8])
        with faults.hold(pair.a):
            write = pair.a.rdma_write(pair.local[:8], pair.remote)
            faults.cq_error(pair.a if queue == "send" else pair.b, queue)
            with pytest.raises(CompletionQueueError), anyio.fail_after(SOON):
                await (write if queue == "send" else receive)
        with anyio.fail_after(SOON):
            assert (await anext(events)).type is EventType.CQ_ERR


async def test_an_srq_that_breaks_says_so() -> None:
    async with opened() as device:
        events = device.events()
        async with device.create_srq(8) as srq, device.create_qp(srq=srq) as qp:
            faults.raise_event(EventType.SRQ_ERR, qp)
            assert await next_events(events, 1) == {(EventType.SRQ_ERR, srq)}


async def test_events_without_consequences_are_only_told() -> None:
    async with opened() as device, connected(device) as pair:
        events = device.events()
        faults.raise_event(EventType.COMM_EST, pair.a)
        faults.raise_event(EventType.GID_CHANGE, device=device, port=1)
        with anyio.fail_after(SOON):
            # The first messages of check() establish the connection, which says so too.
            first, second = await anext(events), await anext(events)
        assert (first.type, first.element) == (EventType.COMM_EST, pair.a)
        assert (second.type, second.port) == (EventType.GID_CHANGE, 1)
        await pair.check()


# ------------------------------------------------------------------ ports and devices


async def test_a_port_that_is_down_for_a_while_costs_retries() -> None:
    async with opened() as device, connected(device, timeout=17, retry_cnt=7) as pair:  # 0.5 s, eight times
        events = device.events()
        with faults.port_down(device) as down:
            operation = pair.a.rdma_write(pair.local[:8], pair.remote)
            event = await anext(events)
            assert (event.type, event.port) == (EventType.PORT_ERR, 1)
            assert not operation.done
        assert down.hits == 1
        with anyio.fail_after(SOON):
            event = await anext(events)
            assert (event.type, event.port) == (EventType.PORT_ACTIVE, 1)
            try:
                await operation
            except RetryExceededError:  # the machine was too busy for the port to come up in time
                pair = await replace(pair)
            await pair.check()
            await pair.a.close()
            await pair.b.close()


async def test_a_port_that_stays_down_ends_connections() -> None:
    async with opened() as device, connected(device, timeout=1, retry_cnt=1) as pair:
        with faults.port_down(device), pytest.raises(RetryExceededError), anyio.fail_after(SOON):
            await pair.a.rdma_write(pair.local[:8], pair.remote)
        new = await replace(pair)
        await new.check()
        await new.a.close()
        await new.b.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("end", ["stop", "reset"])
async def test_a_port_is_up_again_when_the_last_of_its_faults_ends(order: tuple[int, ...], end: str) -> None:
    async def state() -> int:
        async with aiordma.open_device("emulated:mlx5_0") as device:
            return int(device.context.query_port(1).state)

    async with aiordma.open_device("emulated:mlx5_0") as device:
        events = device.events()
        rules = [faults.port_down("mlx5_0"), faults.port_down("mlx5_0"), faults.device_fatal("mlx5_0")]
        if end == "reset":
            faults.reset()
        for index in order:
            rules[index].stop()
            if faults.active() and rules[2].stopped:
                assert await state() == PORT_DOWN
        assert await state() == PORT_ACTIVE
        with anyio.fail_after(SOON):
            seen = [(await anext(events)).type for _ in range(2)]
        assert seen == [EventType.PORT_ERR, EventType.DEVICE_FATAL]
        # Who sees that it's up again is told, once; of a device that is gone nothing more is told.
        with anyio.move_on_after(0.2):
            async for event in events:
                assert event.type is not EventType.PORT_ERR


async def test_a_port_that_was_down_stays_down() -> None:
    try:
        faults.raise_event(EventType.PORT_ERR, device="mlx5_0", port=1)
        with faults.port_down("mlx5_0"), faults.device_fatal("mlx5_0"):
            pass
        async with aiordma.open_device("emulated:mlx5_0") as device:
            assert device.context.query_port(1).state == PORT_DOWN
    finally:
        faults.raise_event(EventType.PORT_ACTIVE, device="mlx5_0", port=1)


@pytest.mark.parametrize("fault", [faults.port_down, faults.device_fatal])
async def test_an_established_connection_is_cut_too(fault: Any) -> None:
    async with (
        opened() as device,
        aiordma.open_device("emulated:mlx5_1") as other,
        connected(device, other=other, timeout=4, retry_cnt=2) as pair,
    ):
        await pair.check()
        with fault(other), pytest.raises(RetryExceededError), anyio.fail_after(SOON):
            await pair.a.rdma_write(pair.local[:8], pair.remote)


async def test_a_device_that_is_gone_ends_everything_and_is_opened_anew() -> None:
    async with opened() as other_user, connected(other_user) as unconcerned:
        del unconcerned
        device = await aiordma.open_device("emulated:mlx5_1")
        events = device.events()
        async with connected(device) as pair:
            operations = [pair.a.rdma_write(pair.local[:8], pair.remote) for _ in range(3)]
            for operation in operations:
                await operation
            receive = pair.b.recv(pair.peer[:8])
            gone = faults.device_fatal(device)
            with anyio.fail_after(SOON):
                assert (await anext(events)).type is EventType.DEVICE_FATAL
                with pytest.raises(DeviceFatalError):
                    await receive
                with pytest.raises(DeviceFatalError):
                    pair.a.send(pair.local[:8])
                with pytest.raises(VerbsError) as caught:
                    await device.reg_mr(bytearray(64))
                assert caught.value.errno == errno.EIO
                with pytest.raises(VerbsError):
                    await aiordma.open_device("emulated:mlx5_1")
                await device.close()
        gone.stop()
        async with aiordma.open_device("emulated:mlx5_1") as again, connected(again) as pair:
            await pair.check()


async def test_nobody_reaches_a_device_that_is_gone() -> None:
    async with opened() as device, aiordma.open_device("emulated:mlx5_1") as gone:
        async with connected(device, other=gone, timeout=4, retry_cnt=2) as pair:
            with faults.device_fatal(gone), pytest.raises(RetryExceededError), anyio.fail_after(SOON):
                await pair.a.rdma_write(pair.local[:8], pair.remote)
        # It's back; what was opened before isn't.
        async with aiordma.open_device("emulated:mlx5_1") as back, connected(device, other=back) as pair:
            await pair.check()


# ------------------------------------------------------------------ commands

COMMANDS: dict[str, Callable[[Device], Any]] = {
    "reg_mr": lambda device: device.reg_mr(bytearray(64)),
    "create_qp": lambda device: device.create_qp(),
    "create_srq": lambda device: device.create_srq(8),
    "create_cq": lambda device: device.create_qp(),
    "create_comp_channel": lambda device: device.create_qp(),
}


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN])
@pytest.mark.parametrize("verb", COMMANDS)
async def test_a_verb_that_fails_raises_and_works_the_next_time(verb: str, error: int) -> None:
    async with opened() as device:
        with faults.verb(verb, error, nth=1) as fault:
            with pytest.raises(VerbsError) as caught:
                await COMMANDS[verb](device)
            assert caught.value.errno == error
            async with COMMANDS[verb](device):
                pass
        assert fault.hits == 1


@pytest.mark.parametrize("state", ["INIT", "RTR", "RTS"])
async def test_connecting_fails_in_any_of_its_steps(state: str) -> None:
    async with opened() as device:
        with faults.verb("modify_qp", "ETIMEDOUT", state=state, nth=1):
            with pytest.raises(VerbsError) as caught:
                async with device.create_qp() as a, device.create_qp() as b:
                    await connect(a, b)
            assert caught.value.errno == errno.ETIMEDOUT
        async with connected(device) as pair:
            await pair.check()


async def test_slow_verbs_leave_the_loop_alone() -> None:
    async with opened() as device:
        with faults.verb("ibv_reg_mr", delay=0.1) as slow:
            begin = time.monotonic()
            turns = 0
            registering = device.reg_mr(bytearray(64))
            while not registering.done:
                await anyio.sleep(0.005)
                turns += 1
            assert time.monotonic() - begin >= 0.1
            assert turns
            await (await registering).close()
        assert slow.hits == 1


async def test_a_refused_firmware_command_tells_status_and_syndrome() -> None:
    async with opened() as device:
        with faults.devx(devx.Opcode.QUERY_ISSI, status=devx.Status.NO_RES, syndrome=0xABCDE) as fault:
            with pytest.raises(DevxError) as caught:
                await devx.general_command(device, devx.QueryIssiIn())
            assert (caught.value.status, caught.value.syndrome) == (devx.Status.NO_RES, 0xABCDE)
        assert fault.hits == 1


# ------------------------------------------------------------------ what nobody awaits


async def test_faults_that_nobody_awaits_are_reported() -> None:
    async with opened() as device, connected(device) as pair:
        with reported() as reports, faults.fail("REM_OP_ERR", pair.a):
            pair.a.rdma_write(pair.local[:8], pair.remote)
            await eventually(lambda: reports.found)
        assert isinstance(reports.found[0], RemoteOperationError)


# ------------------------------------------------------------------ between processes

PEER = """
import json
import sys
import anyio
import aiordma
from aiordma import QPInfo

async def main():
    async with aiordma.open_device("emulated:mlx5_0") as device:
        async with device.reg_mr(bytearray(64)) as mr, device.create_qp() as qp:
            print(qp.info.to_json(), json.dumps(mr.remote().to_json()), sep="\\n", flush=True)
            await qp.connect(QPInfo.from_json(sys.stdin.readline()))
            events = device.events()
            print("connected", flush=True)
            sys.stdin.readline()
            with anyio.fail_after(30):
                event = await anext(events)
            print(event.type.name, event.element is qp, bytes(mr.view()[:8]), flush=True)

anyio.run(main)
"""


@asynccontextmanager
async def peer_process(device: Device, **config: Any) -> AsyncIterator[tuple[aiordma.QueuePair, Any, Any]]:
    """A queue pair connected to one of another process, that one's memory, and how to hear of what it saw."""
    program = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert program.stdin is not None
    assert program.stdout is not None

    def say(line: str) -> str:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(line + "\n")
        program.stdin.flush()
        return program.stdout.readline()

    try:
        async with device.create_qp(**config) as qp:
            info = await anyio.to_thread.run_sync(program.stdout.readline)
            remote = await anyio.to_thread.run_sync(program.stdout.readline)
            assert await anyio.to_thread.run_sync(say, qp.info.to_json()) == "connected\n"
            await qp.connect(aiordma.QPInfo.from_json(info))
            yield qp, aiordma.RemoteBuffer.from_json(json.loads(remote)), lambda: anyio.to_thread.run_sync(say, "")
    finally:
        program.stdin.close()
        try:
            program.wait(30)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGKILL)
            program.wait()
        program.stdout.close()


async def test_between_processes_the_senders_faults_apply() -> None:
    async with (
        opened() as device,
        device.reg_mr(bytearray(b"in time!")) as mr,
        peer_process(device, timeout=16, retry_cnt=7) as (qp, remote, heard),
    ):
        with (
            faults.drop(qp, count=2) as lost,
            faults.delay(0.02, qp, count=1) as late,
            faults.drop_answer(qp, nth=4) as unheard,
            anyio.fail_after(60),
        ):
            for _ in range(4):
                await qp.rdma_write(mr, remote[:8])
        assert (lost.hits, late.hits, unheard.hits) == (2, 1, 1)
        with faults.remote_access_error(qp), pytest.raises(RemoteAccessError):
            await qp.rdma_write(mr, remote[:8])
        assert await heard() == "QP_ACCESS_ERR True b'in time!'\n"

"""Random programs: against a model of the memory, and many QPs with cancellations and closings at any moment."""

# ruff: noqa: SIM117

import gc
import os
import random
import struct
from typing import Any

import anyio
import pytest
from emulated.core import DEVICE, ON_RXE, connect, object_counts, open_pair, reported

import aiordma
from aiordma import ClosedError, Completion, MemorySlice, RemoteBuffer

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]

# A failure prints its seed; AIORDMA_TEST_SEED runs it again.
SEED = int(os.environ.get("AIORDMA_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
SIZE = 4096
HALF = SIZE // 2
MASK64 = (1 << 64) - 1


class _Program:
    """Operations of ``a`` and what they must do to the memory.

    The lower half of the local memory is read by the device, the upper half written, so that no operation depends on
    when an earlier one read its data.
    """

    def __init__(self, rng: random.Random, a: Any, b: Any, here: Any, there: Any, sides: tuple[Any, Any]) -> None:
        self.rng = rng
        self.a, self.b = a, b
        self.here, self.there = here, there
        self.mine, self.theirs = sides
        self.remote: RemoteBuffer = there.remote()
        self.checks: list[tuple[Completion, Any]] = []

    def source(self, most: int) -> tuple[list[MemorySlice], bytes]:
        parts, data = [], b""
        for _ in range(self.rng.randrange(4)):
            start = self.rng.randrange(HALF)
            part = self.here[start : self.rng.randint(start, min(HALF, start + (most - len(data))))]
            parts.append(part)
            data += bytes(self.mine[part.offset : part.offset + len(part)])
        return parts, data

    def options(self) -> dict[str, bool]:
        # Soft-RoCE's fence may wait for ever when a receive is late (docs/soft-roce.md).
        return {"signaled": self.rng.random() < 0.6, "fence": self.rng.random() < 0.2 and not ON_RXE}

    def write(self) -> None:
        parts, data = self.source(1000)
        at = self.rng.randrange(SIZE - len(data) + 1)
        if self.rng.random() < 0.3 and len(data) <= 64:
            op = self.a.rdma_write(data, self.remote[at:], **self.options())
        else:
            op = self.a.rdma_write(parts, self.remote[at:], **self.options())
        self.theirs[at : at + len(data)] = data
        self.checks.append((op, None))

    def read(self) -> None:
        start = self.rng.randrange(HALF, SIZE)
        part = self.here[start : self.rng.randint(start, SIZE)]
        at = self.rng.randrange(SIZE - len(part) + 1)
        op = self.a.rdma_read(part, self.remote[at:], **self.options())
        self.mine[start : start + len(part)] = self.theirs[at : at + len(part)]
        self.checks.append((op, None))

    def atomic(self) -> None:
        offset = -self.there.addr % 8 + 8 * self.rng.randrange(SIZE // 8 - 2)
        into = self.rng.randrange(HALF, SIZE - 8)
        (before,) = struct.unpack_from("=Q", self.theirs, offset)
        value = self.rng.getrandbits(64)
        # Their result is read from local memory when it is taken off the CQ: nothing else may have written there.
        if self.rng.random() < 0.5:
            op = self.a.atomic_fetch_add(self.here[into : into + 8], self.remote[offset:], value)
            after = (before + value) & MASK64
        else:
            compare = before if self.rng.random() < 0.5 else self.rng.getrandbits(64)
            op = self.a.atomic_cmp_swp(self.here[into : into + 8], self.remote[offset:], compare, value)
            after = value if compare == before else before
        struct.pack_into("=Q", self.theirs, offset, after)
        struct.pack_into("=Q", self.mine, into, before)
        self.checks.append((op, ("atomic", before)))

    def message(self) -> None:
        parts, data = self.source(600)
        # Two buffers that don't overlap, with room enough.
        start = self.rng.randrange(SIZE - 700)
        cut = self.rng.randrange(start, start + 650)
        end = start + 650
        receive = self.b.recv([self.there[cut:end], self.there[start:cut]])
        imm = self.rng.getrandbits(32) if self.rng.random() < 0.5 else None
        op = self.a.send(parts, imm=imm, **self.options())
        room = end - cut
        self.theirs[cut : cut + min(room, len(data))] = data[:room]
        self.theirs[start : start + max(0, len(data) - room)] = data[room:]
        self.checks += [(op, None), (receive, ("message", len(data), imm))]

    def batch(self) -> None:
        batch = self.a.batch()
        for _ in range(self.rng.randrange(1, 40)):
            parts, data = self.source(60)
            at = self.rng.randrange(SIZE - len(data) + 1)
            batch.rdma_write(parts, self.remote[at:])
            self.theirs[at : at + len(data)] = data
        self.checks.append((batch.post(), None))

    async def settle(self) -> None:
        self.rng.shuffle(self.checks)
        for op, expected in self.checks:
            await op
            if expected is None:
                continue
            if expected[0] == "message":
                assert (op.byte_len, op.imm_data) == expected[1:]
        self.checks.clear()
        await self.a.wait_idle()

    async def run(self, steps: int) -> None:
        actions = [self.write] * 6 + [self.read] * 4 + [self.atomic] * 3 + [self.message] * 3 + [self.batch]
        atomics: list[tuple[Completion, int]] = []
        for _ in range(steps):
            self.rng.choice(actions)()
            if self.checks and self.checks[-1][1] and self.checks[-1][1][0] == "atomic":
                op, (_, before) = self.checks.pop()
                await op
                assert op.value == before
                atomics.append((op, before))
        await self.settle()
        assert [op.value for op, _ in atomics] == [before for _, before in atomics]


@pytest.mark.parametrize("round_", range(4))
async def test_random_programs_do_to_memory_what_the_model_says(round_: int) -> None:
    seed = SEED + round_
    print("seed", seed)
    rng = random.Random(seed)
    depth = rng.choice([1, 2, 7, 16, 64])
    spin = rng.choice([0, 20, 500])
    async with open_pair(size=SIZE, max_send_wr=depth, max_recv_wr=rng.choice([2, 64])) as p:
        p.device.spin_us = spin
        models = [bytearray(SIZE), bytearray(SIZE)]
        for _ in range(25):
            for model, mr in zip(models, (p.local, p.peer), strict=True):
                # The processors write too, while nothing is under way.
                start = rng.randrange(SIZE)
                data = rng.randbytes(rng.randrange(SIZE - start + 1))
                model[start : start + len(data)] = data
                mr.view()[start : start + len(data)] = data
            forward = _Program(rng, p.a, p.b, p.local, p.peer, (models[0], models[1]))
            backward = _Program(rng, p.b, p.a, p.peer, p.local, (models[1], models[0]))
            with anyio.fail_after(60):
                await rng.choice([forward, backward]).run(rng.randrange(1, 60))
            assert p.left == models[0], f"seed {seed}"
            assert p.right == models[1], f"seed {seed}"


# ---------------------------------------------------------------- stress


class _Stress:
    """Tasks that use QPs which others cancel, break and close."""

    def __init__(self, seed: int, seconds: float, least: int) -> None:
        self.rng = random.Random(seed)
        self.end = anyio.current_time() + seconds
        self.least = least
        self.done = 0
        self.failed = 0

    def over(self) -> bool:
        """The time is, and not before enough was done in it."""
        return anyio.current_time() >= self.end and self.done > self.least and self.failed > 0

    async def use(self, qp: Any, mr: Any, remote: RemoteBuffer) -> None:
        rng = self.rng
        kind = rng.randrange(6)
        some = mr[: rng.choice([0, 8, 64, 5000])]
        if kind == 0:
            op = qp.rdma_read(some, remote)
        elif kind == 1:
            op = qp.atomic_fetch_add(mr[:8], remote, 1)
        elif kind == 2:
            op = qp.rdma_write_many([(some, remote)] * rng.randrange(1, 30))
        elif kind == 3:
            op = qp.send(some)
        else:
            op = qp.rdma_write(some, remote, signaled=rng.random() < 0.5)
        if rng.random() < 0.3:
            with anyio.move_on_after(rng.choice([0, 0.0005, 0.002])):
                await op
        elif rng.random() < 0.9:
            await op
        self.done += 1

    async def user(self, qp: Any, peer: Any, mr: Any, remote: RemoteBuffer) -> None:
        while not self.over() and not qp.closed:
            try:
                if self.rng.random() < 0.5 and not peer.closed:
                    peer.recv(mr[8192:])
                await self.use(qp, mr, remote)
                if self.rng.random() < 0.01:
                    await qp.rdma_write(mr[:8], RemoteBuffer(remote.addr, 8, remote.rkey ^ 0xFFFF00))
            except (aiordma.CompletionError, ClosedError):
                self.failed += 1
                if qp.state == "ERR":
                    return
            if self.rng.random() < 0.2:
                await anyio.lowlevel.checkpoint()

    async def pair(self, device: Any, mr: Any) -> None:
        """One pair of QPs after the other, each for a while."""
        rng = self.rng
        while not self.over():
            options = {
                "max_send_wr": rng.choice([1, 4, 32]),
                "max_recv_wr": rng.choice([1, 16]),
                "timeout": 8,
                "retry_cnt": 1,
                "rnr_retry": rng.choice([0, 1, 7]),
                "min_rnr_timer": 1,
            }
            try:
                async with device.create_qp(**options) as a, device.create_qp(**options) as b:
                    await connect(a, b)
                    with anyio.move_on_after(rng.uniform(0, 0.2)):
                        async with anyio.create_task_group() as group:
                            for _ in range(rng.randrange(1, 8)):
                                group.start_soon(self.user, a, b, mr, mr.remote())
                                group.start_soon(self.user, b, a, mr, mr.remote())
                            if rng.random() < 0.3:
                                await anyio.sleep(rng.uniform(0, 0.05))
                                closing = rng.choice([a, b]).close()
                                if rng.random() < 0.5:
                                    await closing
            except ClosedError:
                assert device.closed
                return

    async def device(self) -> None:
        while not self.over():
            async with aiordma.open_device(DEVICE, spin_us=self.rng.choice([0, 20])) as device:
                async with device.reg_mr(bytearray(1 << 14)) as mr:
                    with anyio.move_on_after(self.rng.uniform(0.3, 2)):
                        async with anyio.create_task_group() as group:
                            for _ in range(self.rng.randrange(1, 12)):
                                group.start_soon(self.pair, device, mr)
                    unknown = [
                        cq["unknown"] for role in device.statistics()["completion_queues"].values() for cq in role
                    ]
                    assert not any(unknown)


@pytest.mark.slow_in_vm
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_many_qps_with_cancels_and_closes_at_any_moment_hang_and_leak_nothing() -> None:
    before = sum(object_counts().values())
    print("seed", SEED)
    # In a VM a device alone takes seconds to open when the machine is busy.
    stress = _Stress(SEED, *((15, 0) if ON_RXE else (4, 500)))
    # Failures that nobody awaits are plenty here, and they are reported.
    with reported() as reports:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(stress.device)
        gc.collect()
    assert all(isinstance(error, aiordma.CompletionError) for error in reports.found), reports.found
    assert stress.done > stress.least
    assert stress.failed > 0
    assert sum(object_counts().values()) == before

"""DC: initiators that name the target in each work request, with and without streams. mlx5dv_create_qp(3)."""

import gc
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest
from emulated.core import eventually, reported
from emulated.mlx5 import WC_MEMCPY, Bytes, opened, pair, targets, wrong_key
from pyverbs import enums as e
from pyverbs.wr import SGE

from aiordma import (
    Access,
    BufferAccessError,
    ClosedError,
    Device,
    LocalQpOperationError,
    MemoryRegion,
    QPConfig,
    RemoteAccessError,
    RemoteBuffer,
    RemoteInvalidRequestError,
    RetryExceededError,
    RnrRetryExceededError,
    SharedReceiveQueue,
    UnknownCompletionError,
    UsageError,
    VerbsError,
    WrFlushError,
    mlx5,
)
from aiordma.emulator import faults
from aiordma.mlx5 import DCInitiator, DcPeer, DCTarget, DCTInfo

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

SOON = 20
#: Nobody answers for 4.096 us * 2**8, once more, and it's an error.
QUICK: dict[str, Any] = {"timeout": 8, "retry_cnt": 1}
STREAMS: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"log_streams": 2, "log_errored": 2}, id="streams"),
]


@dataclass
class Setting:
    """A DCI and a target, with memory on both sides: ``left`` is random, ``right`` zeros."""

    device: Device
    dci: DCInitiator
    target: DCTarget
    peer: DcPeer
    srq: SharedReceiveQueue
    left: Bytes
    right: Bytes
    local: MemoryRegion
    there: MemoryRegion
    remote: RemoteBuffer

    async def reach_wrong(self) -> DcPeer:
        return await self.dci.reach(wrong_key(self.target.info))


@asynccontextmanager
async def setting(target_config: QPConfig | None = None, **options: Any) -> AsyncIterator[Setting]:
    left = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    right = np.zeros(1 << 16, np.uint8)
    async with (
        opened() as device,
        device.reg_mr(left) as local,
        device.reg_mr(right) as there,
        device.create_srq(64) as srq,
        mlx5.create_dc_target(device, srq, config=target_config) as target,
        mlx5.create_dc_initiator(device, **{**QUICK, **options}) as dci,
    ):
        peer = await dci.reach(target.info)
        yield Setting(device, dci, target, peer, srq, left, right, local, there, there.remote())


# ------------------------------------------------------------------ operations


@pytest.mark.parametrize("options", STREAMS)
async def test_every_operation(options: dict[str, int]) -> None:
    async with setting(memcpy=True, **options) as s:
        dci, peer = s.dci, s.peer
        for stream in dci.streams:
            s.right[:] = 0
            done = await dci.rdma_write(peer, s.local[10:1010], s.remote, stream_id=stream)
            assert (done.opcode, done.request) == (1, "RDMA_WRITE")
            assert (s.right[:1000] == s.left[10:1010]).all()

            receive = s.srq.recv(None)
            await dci.rdma_write(peer, s.local[0:4], s.remote[2000:], imm=0xFFFFFFFE, stream_id=stream)
            got = await receive
            assert (got.imm_data, got.receiver_qp_num) == (0xFFFFFFFE, s.target.dctn)

            await dci.rdma_read(peer, s.local[5000:5500], s.remote[0:500], stream_id=stream)
            assert (s.left[5000:5500] == s.right[0:500]).all()

            receives = [s.srq.recv(s.there[3000:3100]) for _ in range(3)]
            await dci.send(peer, s.local[7:17], stream_id=stream)
            assert ((await receives[0]).byte_len, receives[0].imm_data) == (10, None)
            assert (s.right[3000:3010] == s.left[7:17]).all()
            await dci.send(peer, b"inline", imm=9, stream_id=stream)
            assert ((await receives[1]).byte_len, receives[1].imm_data) == (6, 9)
            assert s.right[3000:3006].tobytes() == b"inline"
            await dci.send(peer, None, stream_id=stream)
            assert (await receives[2]).byte_len == 0

            s.right[4000:4008] = np.frombuffer(struct.pack("=Q", 100), np.uint8)
            eight, counter = s.local[6000:6008], s.remote[4000:4008]
            assert (await dci.atomic_fetch_add(peer, eight, counter, -1, stream_id=stream)).value == 100
            assert (await dci.atomic_cmp_swp(peer, eight, counter, 99, 7, stream_id=stream)).value == 99
            assert struct.unpack("=Q", s.right[4000:4008].tobytes()) == (7,)

            copied = await dci.memcpy(s.there[8000:9000], s.local[0:1000])
            assert copied.opcode == WC_MEMCPY
            assert (s.right[8000:9000] == s.left[0:1000]).all()
            # gathered
            await dci.rdma_write(peer, [s.local[0:3], s.local[9:12]], s.remote[9000:], stream_id=stream)
            assert s.right[9000:9006].tobytes() == s.left[0:3].tobytes() + s.left[9:12].tobytes()
        assert dci.state == "RTS"
        assert dci.qp_type == "DCI"


async def test_a_send_does_not_invalidate_an_mkey() -> None:
    """mlx5dv_create_mkey() makes keys that peers may not invalidate (no remote invalidation in the mkey context)."""
    async with setting() as s, pair(max_umr_entries=1, device=s.device) as p, mlx5.create_mkey(s.device, 1) as mkey:
        await p.a.register_list(mkey, [s.there[:8]])
        receive = s.srq.recv(None)
        await s.dci.send(s.peer, None, invalidate_rkey=mkey.rkey)
        with pytest.raises(LocalQpOperationError):
            await receive
        await s.dci.rdma_write(s.peer, s.local[:8], mkey.remote())
        assert (s.right[:8] == s.left[:8]).all()


async def test_one_initiator_reaches_targets_on_several_devices() -> None:
    async with (
        setting(log_streams=3) as s,
        opened("mlx5_1") as other,
        other.create_srq(4) as srq,
        mlx5.create_dc_target(other, srq) as far,
        mlx5.create_dc_target(s.device, s.srq) as near,
        other.reg_mr(bytearray(64)) as memory,
    ):
        one, two = await s.dci.reach(far.info), await s.dci.reach(near.info)
        for i in range(20):
            await s.dci.rdma_write(one, s.local[i : i + 8], memory.remote()[0:8], stream_id=1)
            assert bytes(memory.view()[0:8]) == s.left[i : i + 8].tobytes()
            await s.dci.rdma_write(two, s.local[i : i + 8], s.remote, stream_id=2)
            await s.dci.rdma_write(s.peer, s.local[i : i + 8], s.remote[8:], stream_id=1)
            assert s.right[:16].tobytes() == s.left[i : i + 8].tobytes() * 2


async def test_a_stream_that_waits_holds_up_no_other() -> None:
    """Its own stream it does, and completions keep the order of the queue."""
    async with setting(log_streams=2) as s:
        waits = s.dci.send(s.peer, s.local[:8], stream_id=1)
        behind = s.dci.rdma_write(s.peer, s.local[8:16], s.remote[8:16], stream_id=1)
        others = [
            s.dci.rdma_write(s.peer, s.local[i : i + 8], s.remote[i:], stream_id=i % 4) for i in (1018, 2004, 3011)
        ]
        await eventually(lambda: s.right[3011:3019].tobytes() == s.left[3011:3019].tobytes())
        await eventually(lambda: s.right[1018:1026].tobytes() == s.left[1018:1026].tobytes())
        await eventually(lambda: s.right[2004:2012].tobytes() == s.left[2004:2012].tobytes())
        await anyio.sleep(0.02)
        assert not s.right[8:16].any()
        assert not any(one.done for one in (waits, behind, *others))
        await s.srq.recv(s.there[:8])
        for one in (waits, behind, *others):
            await one
        assert (s.right[:16] == s.left[:16]).all()


async def test_initiators_share_a_target() -> None:
    async with setting(log_streams=1) as s:
        dcis = [await mlx5.create_dc_initiator(s.device) for _ in range(5)]
        receives = [s.srq.recv(s.there[100 * i : 100 * i + 100]) for i in range(50)]
        sends = [dcis[i % 5].send(s.peer, struct.pack("=I", i)) for i in range(50)]
        for send in sends:
            await send
        seen = []
        for receive in receives:
            await receive
            at = receives.index(receive) * 100
            seen.append(struct.unpack("=I", s.right[at : at + 4].tobytes())[0])
        assert sorted(seen) == list(range(50))
        for n in range(5):
            assert [i for i in seen if i % 5 == n] == list(range(n, 50, 5))
        for dci in dcis:
            await dci.close()


@pytest.mark.parametrize("options", STREAMS)
async def test_they_wait_for_room_and_everything_is_signalled(options: dict[str, int]) -> None:
    async with setting(max_send_wr=4, **options) as s:
        n = len(s.dci.streams)
        writes = [
            s.dci.rdma_write(
                s.peer,
                s.local[i : i + 1],
                s.remote[i:],
                stream_id=s.dci.streams[i % n],
                signaled=False,
                inline=i % 2 == 0,
            )
            for i in range(500)
        ]
        with anyio.fail_after(SOON):
            await s.dci.wait_idle()
            assert all(write.done and write.opcode == 1 for write in writes)
        assert (s.right[:500] == s.left[:500]).all()
        await s.dci.rdma_write(s.peer, s.local[:1], s.remote, signaled=False)
        await s.dci.wait_idle()


async def test_memory_of_a_dci_may_be_a_layout() -> None:
    async with (
        setting(log_streams=1) as s,
        pair(max_umr_entries=4, device=s.device) as p,
        mlx5.create_mkey(s.device, 5) as mkey,
    ):
        data = await p.a.map_strided(mkey, s.left.reshape(256, 256)[:100, 3:5])
        await s.dci.rdma_write(s.peer, data, s.remote, stream_id=1)
        assert s.right[:200].tobytes() == s.left.reshape(256, 256)[:100, 3:5].tobytes()


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("wrong", ["key", "number"])
async def test_a_wrong_key_or_number_costs_its_operation_alone(wrong: str) -> None:
    """F62, F60 (torchcomms pull request 958): with streams, and the error names key and DCT."""
    async with setting(log_streams=2, log_errored=2) as s:
        info = s.target.info
        bad_info = wrong_key(info) if wrong == "key" else DCTInfo(0xABCDEF, info.dc_key, info.gid, info.gid_type)
        bad = await s.dci.reach(bad_info)
        failing = s.dci.rdma_write(bad, s.local[:8], s.remote, stream_id=3)
        going = [s.dci.rdma_write(s.peer, s.local[i : i + 8], s.remote[i:], stream_id=1 + i % 2) for i in range(100)]
        with pytest.raises(RetryExceededError) as error:
            await failing
        for name in (f"DCT {bad_info.dctn:#x}", f"key={bad_info.dc_key:#x}", "RDMA_WRITE"):
            assert name in str(error.value)
        for write in going:
            await write
        assert s.dci.state == await s.dci.query_state() == "RTS"
        # The stream is in error until it's reset; others go on.
        with pytest.raises(WrFlushError):
            await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=3)
        await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=4)
        await s.dci.reset_stream(3)
        await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=3)
        with pytest.raises(VerbsError, match="stream 3"):
            await s.dci.reset_stream(3)  # it isn't in error


async def test_what_is_behind_the_error_on_its_stream_is_flushed() -> None:
    async with setting(log_streams=2, log_errored=2) as s:
        bad = await s.reach_wrong()
        with faults.hold(s.dci):
            first = s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=1)
            failing = s.dci.rdma_write(bad, s.local[:8], s.remote, stream_id=1)
            behind = s.dci.rdma_write(s.peer, s.local[8:16], s.remote[8:], stream_id=1)
            beside = s.dci.rdma_write(s.peer, s.local[16:24], s.remote[16:], stream_id=2)
        await first
        await beside
        with pytest.raises(RetryExceededError):
            await failing
        with pytest.raises(WrFlushError, match=rf"{s.target.dctn:#x}"):
            await behind
        assert s.right[:24].tobytes() == s.left[:8].tobytes() + bytes(8) + s.left[16:24].tobytes()


async def test_without_streams_the_initiator_is_in_error() -> None:
    async with setting() as s:
        bad = await s.reach_wrong()
        failing = s.dci.rdma_write(bad, s.local[:8], s.remote)
        behind = s.dci.rdma_write(s.peer, s.local[:8], s.remote)
        with pytest.raises(RetryExceededError):
            await failing
        with pytest.raises(WrFlushError):
            await behind
        assert s.dci.state == await s.dci.query_state() == "ERR"
        with pytest.raises(UsageError, match="without streams"):
            s.dci.reset_stream(0)
        with pytest.raises(UsageError, match="without streams"):
            s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=1)
        assert s.dci.streams == range(1)


@pytest.mark.parametrize("log_errored", [0, 1, 2])
async def test_too_many_streams_in_error_take_the_initiator_with_them(log_errored: int) -> None:
    """mlx5dv_dci_stream_id_reset(3): when the number of streams in error reaches what was set."""
    async with setting(log_streams=3, log_errored=log_errored) as s:
        assert s.dci.max_errored_streams == 1 << log_errored
        bad = await s.reach_wrong()
        for n in range(1, (1 << log_errored) + 1):
            with pytest.raises(RetryExceededError):
                await s.dci.rdma_write(bad, s.local[:8], s.remote, stream_id=n)
            last = n == 1 << log_errored
            assert await s.dci.query_state() == ("ERR" if last else "RTS")
        with pytest.raises(WrFlushError):
            await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=7)
        with pytest.raises(VerbsError):
            await s.dci.reset_stream(7)


async def test_reset_streams_do_not_count_any_more() -> None:
    async with setting(log_streams=3, log_errored=1) as s:
        bad = await s.reach_wrong()
        for i in range(10):
            stream = 1 + i % 8
            with pytest.raises(RetryExceededError):
                await s.dci.rdma_write(bad, s.local[:8], s.remote, stream_id=stream)
            await s.dci.reset_stream(stream)
        await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=1)


async def test_no_stream_is_stream_0() -> None:
    """mlx5dv_wr_post(3): calls to mlx5dv_wr_set_dc_addr() are equivalent to using stream_id 0."""
    async with setting(log_streams=2, log_errored=2) as s:
        bad = await s.reach_wrong()
        qp = s.dci.pyverbs
        with reported() as reports:
            qp.wr_start()
            qp.wr_id, qp.wr_flags = 77, e.IBV_SEND_SIGNALED
            qp.wr_rdma_write(s.remote.rkey, s.remote.addr)
            qp.wr_set_dc_addr(bad.owner, bad.dctn, bad.key)
            qp.wr_set_sge(SGE(s.local.addr, 8, s.local.lkey))
            qp.wr_complete()
            await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=1)
            await eventually(lambda: s.device.engine.completion_queues[0].poll() or reports.found)
            gc.collect()
        assert [type(found) for found in reports.found] == [UnknownCompletionError]
        with pytest.raises(WrFlushError):
            await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=0)
        with pytest.raises(VerbsError):
            await s.dci.reset_stream(1)
        await s.dci.reset_stream(0)
        await s.dci.rdma_write(s.peer, s.local[:8], s.remote)


async def test_a_target_serves_on_after_what_it_refused() -> None:
    config = QPConfig(access=Access.REMOTE_READ)
    async with setting(config, log_streams=3, log_errored=3, rnr_retry=0) as s:
        with pytest.raises(RemoteInvalidRequestError, match=rf"DCT {s.target.dctn:#x}"):
            await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=1)
        with pytest.raises(RemoteAccessError):
            await s.dci.rdma_read(s.peer, s.local[:8], RemoteBuffer(s.remote.addr, 8, 0xDEAD00), stream_id=2)
        with pytest.raises(RnrRetryExceededError):
            await s.dci.send(s.peer, b"no receive", stream_id=3)
        receive = s.srq.recv(s.there[:4])
        with pytest.raises(RemoteInvalidRequestError):
            await s.dci.send(s.peer, b"too long", stream_id=4)
        with pytest.raises(Exception, match="RECV"):
            await receive
        await s.dci.rdma_read(s.peer, s.local[:8], s.remote, stream_id=5)


async def test_a_target_that_is_closed_answers_no_more() -> None:
    async with setting(log_streams=1, log_errored=1) as s:
        await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=1)
        await s.target.close()
        assert s.target.closed
        with pytest.raises(RetryExceededError):
            await s.dci.rdma_write(s.peer, s.local[:8], s.remote, stream_id=1)


# ------------------------------------------------------------------ arguments


async def test_impossible_requests_are_refused_before_they_are_posted() -> None:
    async with (
        setting(log_streams=2) as s,
        opened("mlx5_1") as other,
        mlx5.create_dc_initiator(other) as far,
        other.create_srq(4) as srq,
    ):
        foreign = await far.reach(s.target.info)
        w, local, remote = s.dci.rdma_write, s.local[:8], s.remote
        refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (UsageError, "made for another device", lambda: w(foreign, local, remote)),
            (UsageError, "not None", lambda: w(None, local, remote)),  # type: ignore[arg-type]
            (TypeError, "DcAddress", lambda: w(s.target.info, local, remote)),  # type: ignore[arg-type]
            (BufferAccessError, "remote is a RemoteBuffer", lambda: w(s.peer, local, None)),  # type: ignore[arg-type]
            (BufferAccessError, "remote is", lambda: w(s.peer, local, s.there)),  # type: ignore[arg-type]
            (BufferAccessError, "remote is", lambda: s.dci.rdma_read(s.peer, local, None)),  # type: ignore[arg-type]
            (
                BufferAccessError,
                "remote is",
                lambda: s.dci.atomic_fetch_add(s.peer, local, None, 1),  # type: ignore[arg-type]
            ),
            (BufferAccessError, "8 bytes", lambda: s.dci.atomic_fetch_add(s.peer, s.local[:9], remote, 1)),
            (UsageError, "multiple of 8", lambda: s.dci.atomic_cmp_swp(s.peer, local, remote[4:], 1, 2)),
            (UsageError, "don't fit", lambda: w(s.peer, local, remote[:4])),
            (UsageError, "stream_id", lambda: w(s.peer, local, remote, stream_id=1 << 16)),
            (UsageError, "stream_id", lambda: w(s.peer, local, remote, stream_id=-1)),
            (UsageError, "stream_id", lambda: w(s.peer, local, remote, stream_id="1")),  # type: ignore[arg-type]
            (UsageError, "not both", lambda: s.dci.send(s.peer, local, imm=1, invalidate_rkey=2)),
            (BufferAccessError, "inline", lambda: s.dci.send(s.peer, bytes(2000))),
            (BufferAccessError, "registered memory", lambda: s.dci.rdma_read(s.peer, bytearray(8), remote)),  # type: ignore[arg-type]
            (UsageError, "only sends", lambda: s.dci.recv(local)),
            (UsageError, "one by one", s.dci.batch),
            (UsageError, "one by one", lambda: s.dci.rdma_write_many([(local, remote)])),
            (UsageError, "one by one", lambda: s.dci.rdma_read_many([(local, remote)])),
            (UsageError, "RC QP", lambda: s.dci.local_inv(5)),
            (UsageError, "stream_id", lambda: s.dci.reset_stream(1 << 16)),
            (UsageError, "DCTInfo", lambda: s.dci.reach(s.target.info.to_bytes())),  # type: ignore[arg-type]
            (UsageError, "another device", lambda: mlx5.create_dc_target(s.device, srq)),
            (UsageError, "dc_key", lambda: mlx5.create_dc_target(s.device, s.srq, dc_key=1 << 64)),
            (UsageError, "dc_key", lambda: mlx5.create_dc_target(s.device, s.srq, dc_key=-1)),
            (UsageError, "log_streams", lambda: mlx5.create_dc_initiator(s.device, log_streams=17)),
            (UsageError, "log_streams", lambda: mlx5.create_dc_initiator(s.device, log_streams=-1)),
            (UsageError, "log_errored", lambda: mlx5.create_dc_initiator(s.device, log_streams=1, log_errored=17)),
            (UsageError, "fields of QPConfig", lambda: mlx5.create_dc_initiator(s.device, streams=1)),
            (UsageError, "timeout", lambda: mlx5.create_dc_initiator(s.device, timeout=32)),
        ]
        for error, match, call in refused:
            with pytest.raises(error, match=match):
                call()
        assert s.dci.statistics()["send"]["posted"] == 0
        await w(s.peer, local, remote)
        await s.peer.close()
        with pytest.raises(ClosedError, match="closed"):
            w(s.peer, local, remote)
        await foreign.close()


async def test_a_key_of_ones_choice() -> None:
    async with setting() as s, mlx5.create_dc_target(s.device, s.srq, dc_key=(1 << 64) - 1) as target:
        assert target.info.dc_key == (1 << 64) - 1
        assert target.info.dctn == target.dctn == target.pyverbs.qp_num
        assert target.srq is s.srq
        assert target.address
        async with s.dci.reach(target.info) as peer:
            await s.dci.rdma_write(peer, s.local[:8], s.remote)


async def test_a_forgotten_address_is_reported_and_destroyed() -> None:
    async with setting() as s:
        before = s.device.statistics()["dc_peers"]
        made = [await s.dci.reach(s.peer.info)]
        with pytest.warns(ResourceWarning, match="unclosed <DcPeer"):
            made.clear()
        await eventually(lambda: s.device.statistics()["dc_peers"] == before)


# ------------------------------------------------------------------ ends


async def test_an_address_lives_until_what_waits_with_it_is_posted() -> None:
    async with setting(max_send_wr=2, log_streams=1) as s:
        with faults.hold(s.dci):
            writes = [s.dci.rdma_write(s.peer, s.local[i : i + 1], s.remote[i:], stream_id=1) for i in range(20)]
            closing = s.peer.close()
            assert s.peer.close() is closing
            await anyio.sleep(0.01)
            assert not closing.done
            with pytest.raises(ClosedError):
                s.dci.rdma_write(s.peer, s.local[:1], s.remote)
        with anyio.fail_after(SOON):
            for write in writes:
                await write
            await closing
        assert (s.right[:20] == s.left[:20]).all()


async def test_an_address_that_is_closed_while_numbers_are_read_is_not_used() -> None:
    async with opened() as device, targets(device, 1) as made, mlx5.create_dc_initiator(device) as dci:
        [(target, _, mr)] = made
        peer = await dci.reach(target.info)

        class Closing:
            def __index__(self) -> int:
                peer.close()
                return 1

        with pytest.raises(ClosedError, match="DcPeer"):
            dci.atomic_fetch_add(peer, mr[:8], mr.remote(), Closing())  # type: ignore[arg-type]


async def test_closing_flushes_streams_and_what_waits() -> None:
    async with setting(max_send_wr=4, log_streams=2) as s:
        with faults.hold(s.dci):
            writes = [s.dci.rdma_write(s.peer, s.local[:1], s.remote, stream_id=1 + i % 4) for i in range(20)]
            with anyio.fail_after(SOON):
                await s.dci.close()
        for write in writes:
            with pytest.raises(WrFlushError):
                await write
        with pytest.raises(ClosedError):
            s.dci.rdma_write(s.peer, s.local[:1], s.remote)
        for call in (lambda: s.dci.reset_stream(1), lambda: s.dci.reach(s.target.info), s.dci.query_state):
            with pytest.raises(ClosedError):
                call()


async def test_a_cancelled_await_leaves_the_operation_to_the_device() -> None:
    async with setting(log_streams=1) as s:
        memory = bytearray(b"12345678")
        mr = await s.device.reg_mr(memory)
        with faults.hold(s.dci):
            write = s.dci.rdma_write(s.peer, mr, s.remote, stream_id=1, inline=False)
            with anyio.move_on_after(0.01) as scope:
                await write
            assert scope.cancelled_caught
            closing = mr.close()
        await closing
        assert (await write).status == 0
        assert s.right[:8].tobytes() == memory


async def test_a_device_closes_with_everything_of_dc_in_it() -> None:
    async with opened() as device:
        srq = await device.create_srq(8)
        target = await mlx5.create_dc_target(device, srq)
        dci = await mlx5.create_dc_initiator(device, log_streams=1, **QUICK)
        peer = await dci.reach(target.info)
        pool = await mlx5.create_dci_pool(device, 2)
        memory = await device.reg_mr(bytearray(64))
        with faults.hold(dci):
            write = dci.rdma_write(peer, memory[:8], memory.remote(), stream_id=1, inline=False)
            with anyio.fail_after(SOON):
                await device.close()
        with pytest.raises(WrFlushError):
            await write
        for thing in (target, dci, peer, pool, memory, srq):
            assert thing.closed
        for make in (
            lambda: mlx5.create_dc_target(device, srq),
            lambda: mlx5.create_dc_initiator(device),
            lambda: mlx5.create_dci_pool(device),
            lambda: pool.reach(target.info),
        ):
            with pytest.raises(ClosedError):
                make()


async def test_what_is_forgotten_warns() -> None:
    async with opened() as device, device.create_srq(8) as srq:
        held: list[Any] = [await mlx5.create_dc_target(device, srq)]
        with pytest.warns(ResourceWarning, match="unclosed <DCTarget"):
            held.clear()
        held.append(await mlx5.create_dc_initiator(device))
        with pytest.warns(ResourceWarning, match="unclosed <DCInitiator"):
            held.clear()
        await eventually(lambda: not device.statistics().get("dc_targets") and not device.statistics()["queue_pairs"])


def test_a_fork_with_addresses_open(run_python: Any) -> None:
    run_python("""
        import asyncio, os
        import aiordma
        from aiordma import mlx5

        async def main():
            async with aiordma.open_device("emulated") as device, device.create_srq(4) as srq:
                async with mlx5.create_dc_target(device, srq) as target, mlx5.create_dc_initiator(device) as dci:
                    peer = await dci.reach(target.info)
                    async with mlx5.create_dci_pool(device, 1) as pool, device.reg_mr(bytearray(8)) as mr:
                        child = os.fork()
                        if child == 0:
                            try:
                                dci.rdma_write(peer, mr, mr.remote())
                            except aiordma.ForkError:
                                os._exit(0)
                            os._exit(1)
                        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                        await dci.rdma_write(peer, mr, mr.remote())
                        await pool.rdma_write(peer, mr, mr.remote())

        asyncio.run(main())
    """)

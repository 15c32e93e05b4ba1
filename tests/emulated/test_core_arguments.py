"""Bad arguments get a clear Python error before anything is posted, and the QP works afterwards."""

# ruff: noqa: PT017, SIM117

from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv6Address
from typing import Any

import anyio
import numpy as np
import pytest
from emulated.core import DEVICE, OTHER_DEVICE, Pair, connect, connected, object_counts, open_pair
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.wr import SGE, SendWR

import aiordma
from aiordma import (
    Access,
    AccessFlagsError,
    BufferAccessError,
    ClosedError,
    MemorySlice,
    QPConfig,
    QPStateError,
    QueueFullError,
    RdmaError,
    RemoteBuffer,
    UsageError,
    VerbsError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]

NOT_32_BITS = [-1, 1 << 32, "1", 1.0, b"1", [1]]
NOT_64_BITS = [1 << 64, -(1 << 63) - 1, "1", 1.0, None, b"12345678"]
NO_MEMORY = [5, 1.0, "text", object(), {"a": 1}, [b"ok", 7], ["x"], iter([]), {1, 2}]
NO_REGISTERED_MEMORY = [b"bytes", bytearray(8), memoryview(b"8 bytes."), 5, "text", object(), [b"bytes"], [5]]
NO_REMOTE = [None, b"12345678", 5, "remote", {"addr": 0, "length": 8, "rkey": 1}]

CASES: list[tuple[str, type[Exception], Callable[[Pair], object]]] = []


def _case(name: str, error: type[Exception], call: Callable[[Pair], object]) -> None:
    CASES.append((name, error, call))


for _i, _value in enumerate(NOT_32_BITS):
    _case(f"send-imm-{_i}", UsageError, lambda p, v=_value: p.a.send(p.local[:8], imm=v))
    _case(f"write-imm-{_i}", UsageError, lambda p, v=_value: p.a.rdma_write(p.local[:8], p.remote, imm=v))
    _case(f"send-invalidate-{_i}", UsageError, lambda p, v=_value: p.a.send(p.local[:8], invalidate_rkey=v))
    _case(f"local-inv-{_i}", UsageError, lambda p, v=_value: p.a.local_inv(v))
    _case(f"batch-imm-{_i}", UsageError, lambda p, v=_value: p.a.batch().send(p.local[:8], imm=v))
for _i, _value in enumerate(NOT_64_BITS):
    _case(f"add-{_i}", UsageError, lambda p, v=_value: p.a.atomic_fetch_add(p.local[:8], p.remote, v))
    _case(f"compare-{_i}", UsageError, lambda p, v=_value: p.a.atomic_cmp_swp(p.local[:8], p.remote, v, 0))
    _case(f"swap-{_i}", UsageError, lambda p, v=_value: p.a.atomic_cmp_swp(p.local[:8], p.remote, 0, v))
for _i, _value in enumerate(NO_MEMORY):
    _case(f"send-{_i}", BufferAccessError, lambda p, v=_value: p.a.send(v))
    _case(f"write-{_i}", BufferAccessError, lambda p, v=_value: p.a.rdma_write(v, p.remote))
    _case(f"batch-send-{_i}", BufferAccessError, lambda p, v=_value: p.a.batch().send(v))
for _i, _value in enumerate(NO_REGISTERED_MEMORY):
    _case(f"read-{_i}", BufferAccessError, lambda p, v=_value: p.a.rdma_read(v, p.remote))
    _case(f"recv-{_i}", BufferAccessError, lambda p, v=_value: p.b.recv(v))
    _case(f"fetch-add-{_i}", BufferAccessError, lambda p, v=_value: p.a.atomic_fetch_add(v, p.remote, 1))
    _case(f"batch-read-{_i}", BufferAccessError, lambda p, v=_value: p.a.batch().rdma_read(v, p.remote))
    _case(f"batch-write-{_i}", BufferAccessError, lambda p, v=_value: p.a.batch().rdma_write(v, p.remote))
for _i, _value in enumerate(NO_REMOTE):
    _case(f"write-to-{_i}", TypeError, lambda p, v=_value: p.a.rdma_write(p.local[:8], v))
    _case(f"read-from-{_i}", TypeError, lambda p, v=_value: p.a.rdma_read(p.local[:8], v))
    _case(f"atomic-at-{_i}", TypeError, lambda p, v=_value: p.a.atomic_fetch_add(p.local[:8], v, 1))
    _case(f"batch-write-to-{_i}", TypeError, lambda p, v=_value: p.a.batch().rdma_write(p.local[:8], v))
for _i, _size in enumerate([0, 1, 4, 7, 9, 16]):
    _case(
        f"atomic-local-size-{_i}",
        BufferAccessError,
        lambda p, s=_size: p.a.atomic_fetch_add(p.local[:s], p.remote, 1),
    )
for _i, _size in enumerate([0, 7]):
    _case(
        f"atomic-remote-size-{_i}",
        UsageError,
        lambda p, s=_size: p.a.atomic_fetch_add(p.local[:8], p.remote[:s], 1),
    )
for _i, _odd in enumerate([1, 4, 7]):
    _case(
        f"atomic-misaligned-{_i}",
        UsageError,
        lambda p, o=_odd: p.a.atomic_fetch_add(
            p.local[:8], RemoteBuffer((p.remote.addr & ~7) + o, 8, p.remote.rkey), 1
        ),
    )
_case("write-longer-than-remote", UsageError, lambda p: p.a.rdma_write(p.local, p.remote[:-1]))
_case("read-longer-than-remote", UsageError, lambda p: p.a.rdma_read(p.local, p.remote[1:]))
_case("gather-longer-than-remote", UsageError, lambda p: p.a.rdma_write([p.local[:9], p.local[:9]], p.remote[:17]))
_case("too-many-sge", UsageError, lambda p: p.a.send([p.local[:1]] * 40))
_case("too-many-recv-sge", UsageError, lambda p: p.b.recv([p.peer[:1]] * 40))
_case("too-many-batch-sge", UsageError, lambda p: p.a.batch().send([p.local[:1]] * 40))
_case("inline-read", TypeError, lambda p: p.a.rdma_read(p.local[:8], p.remote, inline=True))  # type: ignore[call-arg]
_case("unknown-keyword", TypeError, lambda p: p.a.send(p.local[:8], urgent=True))  # type: ignore[call-arg]
_case("positional-option", TypeError, lambda p: p.a.send(p.local[:8], 5))  # type: ignore[misc]
_case("remote-without-write", AccessFlagsError, lambda p: p.a.rdma_write(p.local[:8], _remote(p, Access.REMOTE_READ)))
_case("remote-without-read", AccessFlagsError, lambda p: p.a.rdma_read(p.local[:8], _remote(p, Access.REMOTE_WRITE)))
_case(
    "remote-without-atomic",
    AccessFlagsError,
    lambda p: p.a.atomic_fetch_add(p.local[:8], _remote(p, Access.REMOTE_WRITE), 1),
)
_case("many-no-tuples", (TypeError), lambda p: p.a.rdma_write_many([p.local[:8]]))  # type: ignore[list-item]
_case("many-one-bad", UsageError, lambda p: p.a.rdma_write_many([(p.local[:8], p.remote), (p.local, p.remote[:8])]))


def _remote(p: Pair, access: int) -> RemoteBuffer:
    return RemoteBuffer(p.remote.addr, 64, p.remote.rkey, access)


async def test_every_bad_argument_is_refused_and_nothing_was_posted() -> None:
    async with open_pair() as p:
        await p.check()
        before = p.a.statistics(), p.b.statistics()
        inflight = p.local.region.inflight, p.peer.region.inflight
        wrong = []
        for name, error, call in CASES:
            try:
                result = call(p)
            except error as e:
                assert str(e), name
                if not isinstance(e, RdmaError) and type(e) is not TypeError:
                    wrong.append((name, repr(e)))
            except Exception as e:
                wrong.append((name, repr(e)))
            else:
                wrong.append((name, repr(result)))
        assert wrong == []
        assert (p.a.statistics(), p.b.statistics()) == before
        assert (p.local.region.inflight, p.peer.region.inflight) == inflight
        await p.check()


async def test_a_refused_call_with_the_queue_full_posts_nothing_either() -> None:
    async with open_pair(max_send_wr=1) as p:
        blocker = p.block()
        waiting = p.a.rdma_write(p.local[:8], p.remote)
        for _name, error, call in CASES:
            with pytest.raises(error):
                call(p)
        assert p.a.statistics()["send"]["waiting"] == 1
        p.unblock()
        await blocker
        await waiting
        await p.check()


@pytest.mark.skipif(OTHER_DEVICE is None, reason="there is only one device")
async def test_memory_of_another_device_is_refused_by_name() -> None:
    async with aiordma.open_device(OTHER_DEVICE) as other, open_pair() as p:
        async with other.reg_mr(bytearray(64)) as foreign:
            for call in (
                lambda: p.a.send(foreign),
                lambda: p.a.rdma_write(foreign[:8], p.remote),
                lambda: p.a.rdma_write([p.local[:8], foreign[:8]], p.remote),
                lambda: p.a.rdma_read(foreign[:8], p.remote),
                lambda: p.a.atomic_fetch_add(foreign[:8], p.remote, 1),
                lambda: p.b.recv(foreign),
                lambda: p.a.batch().rdma_write(foreign[:8], p.remote),
                lambda: p.a.rdma_write(foreign[:0], p.remote),
            ):
                with pytest.raises(UsageError, match="another device"):
                    call()
        async with other.create_srq() as srq:
            with pytest.raises(UsageError, match="another device"):
                p.device.create_qp(srq=srq)
        await p.check()


async def test_a_closed_region_is_refused() -> None:
    async with open_pair() as p:
        mr = await p.device.reg_mr(bytearray(64))
        batch = p.a.batch()
        batch.rdma_write(mr[:8], p.remote)
        await mr.close()
        assert mr.closed
        for call in (
            lambda: p.a.send(mr),
            lambda: p.a.rdma_write([mr[:8]], p.remote),
            lambda: p.a.rdma_read(mr[:8], p.remote),
            lambda: p.b.recv(mr),
            lambda: p.a.batch().send(mr),
            batch.post,
            mr.remote,
            mr.view,
        ):
            with pytest.raises(ClosedError):
                call()
        assert mr.region.inflight == 0
        await p.check()


async def test_a_closing_region_takes_no_new_work_while_the_old_goes_on() -> None:
    async with open_pair() as p:
        mr = await p.device.reg_mr(bytearray(b"12345678"))
        blocker = p.block()
        op = p.a.rdma_write(mr, p.remote, inline=False)
        closing = mr.close()
        assert mr.close() is closing
        assert not closing.done
        with pytest.raises(ClosedError):
            p.a.rdma_write(mr, p.remote)
        with pytest.raises(ClosedError):
            mr.remote()
        p.unblock()
        await op
        await closing
        await blocker
        assert p.right[:8] == b"12345678"


async def test_a_read_only_region_is_no_target() -> None:
    async with open_pair() as p, p.device.reg_mr(b"constant", Access.NONE) as mr:
        await p.a.rdma_write(mr, p.remote)
        assert p.right[:8] == b"constant"
        for call in (
            lambda: p.a.rdma_read(mr, p.remote),
            lambda: p.a.recv(mr),
            lambda: p.a.atomic_fetch_add(mr, p.remote, 1),
            lambda: p.a.rdma_read([p.local[:8], mr], p.remote),
        ):
            with pytest.raises(AccessFlagsError, match="LOCAL_WRITE"):
                call()
        await p.check()


@pytest.mark.parametrize("when", ["closing", "closed"])
async def test_a_closed_qp_refuses_every_call(when: str) -> None:
    async with open_pair() as p:
        batch = p.a.batch()
        batch.rdma_write(p.local[:8], p.remote)
        closing = p.a.close()
        if when == "closed":
            await closing
        for call in (
            lambda: p.a.send(p.local[:8]),
            lambda: p.a.recv(p.local[:8]),
            lambda: p.a.rdma_write(p.local[:8], p.remote),
            lambda: p.a.rdma_read(p.local[:8], p.remote),
            lambda: p.a.atomic_fetch_add(p.local[:8], p.remote, 1),
            lambda: p.a.local_inv(1),
            lambda: p.a.batch().send(p.local[:8]),
            batch.post,
            p.a.query_state,
            lambda: p.a.connect(p.b.info),
        ):
            with pytest.raises(ClosedError):
                call()
        with anyio.fail_after(10):
            await p.a.wait_idle()
        assert p.a.close() is closing
        await closing
        assert (p.a.closed, p.a.state) == (True, "ERR")
        assert "closed" in repr(p.a)
        assert p.a.info.qp_num == p.a.qp_num


async def test_before_connect_sends_are_refused_and_receives_are_not() -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_qp() as qp:
        async with device.reg_mr(bytearray(64)) as mr:
            assert qp.state == "INIT"
            remote = mr.remote()
            for call in (
                lambda: qp.send(mr),
                lambda: qp.rdma_write(mr, remote),
                lambda: qp.rdma_read(mr, remote),
                lambda: qp.atomic_cmp_swp(mr[:8], remote[:8], 0, 0),
                lambda: qp.local_inv(5),
                lambda: qp.batch().rdma_write(mr, remote),
            ):
                with pytest.raises(QPStateError, match="INIT: connect it"):
                    call()
            receive = qp.recv(mr)
            await qp.close()
            with pytest.raises(aiordma.WrFlushError):
                await receive


async def test_connect_checks_the_peer_before_anything_changes() -> None:
    async with aiordma.open_device(DEVICE) as device:
        async with device.create_qp() as a, device.create_qp() as b, device.create_qp(qp_type="UC") as uc:
            for peer in (None, b.info.to_bytes(), b.info.to_json(), b, 5):
                with pytest.raises(UsageError, match="QPInfo"):
                    a.connect(peer)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="UC"):
                a.connect(uc.info)
            assert a.state == "INIT"
            assert a.peer is None
            await a.connect(b.info)
            assert a.peer == b.info
            with pytest.raises(QPStateError, match="new QP"):
                a.connect(b.info)
            await b.connect(a.info)
            assert (a.state, b.state) == ("RTS", "RTS")


async def test_connect_to_a_gid_that_can_not_be_reached_shows_the_table_and_may_be_repeated() -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_qp() as a, device.create_qp() as b:
        elsewhere = replace(b.info, gid=IPv6Address("fe80::1").packed, gid_type=aiordma.GidType.IB)
        with pytest.raises(aiordma.GidError, match="It has"):
            await a.connect(elsewhere)
        assert a.state == "INIT"
        await a.connect(b.info)
        assert a.state == "RTS"


@pytest.mark.parametrize(
    "options",
    [
        {"max_send_wr": 0},
        {"max_recv_wr": -1},
        {"max_send_sge": 33},
        {"max_inline_data": "64"},
        {"qp_type": "XRC"},
        {"timeout": 32},
        {"access": 1 << 40},
        {"no_such_option": 1},
    ],
)
async def test_bad_qp_options_are_refused_at_once(options: dict[str, Any]) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises(UsageError, match=next(iter(options))):
            device.create_qp(**options)
        with pytest.raises(UsageError):
            device.create_qp(QPConfig(), **options)


@pytest.mark.parametrize("config", [5, {"max_send_wr": 5}, "RC"])
async def test_a_config_that_is_none_is_refused(config: Any) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises(UsageError, match="QPConfig"):
            device.create_qp(config)
        with pytest.raises(UsageError, match="SharedReceiveQueue"):
            device.create_qp(srq=config)


@pytest.mark.emulated_only("wants a device with small limits")
@pytest.mark.parametrize(
    "options", [{"max_send_wr": 1 << 20}, {"max_recv_wr": 1 << 20}, {"max_send_wr": 100}, {"max_send_sge": 30}]
)
async def test_more_than_the_device_has_is_a_verbs_or_usage_error_and_leaves_nothing(options: dict[str, Any]) -> None:
    async with aiordma.open_device("emulated:mlx5_small") as device:
        for _ in range(3):
            with pytest.raises((VerbsError, UsageError)) as caught:
                await device.create_qp(**{"max_send_wr": 8, "max_recv_wr": 8, "max_inline_data": 0, **options})
            assert next(iter(options)) in str(caught.value)
        assert device.statistics()["queue_pairs"] == 0
        async with device.create_qp(max_send_wr=8, max_recv_wr=8, max_inline_data=0):
            pass


@pytest.mark.parametrize("options", [{"max_wr": 0}, {"max_wr": 1 << 21}, {"max_sge": 0}, {"max_sge": 33}])
async def test_bad_srq_sizes_are_refused(options: dict[str, int]) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises(UsageError, match=next(iter(options))):
            device.create_srq(**options)


@pytest.mark.parametrize("options", [{"max_wr": "5"}, {"max_sge": None}, {"max_wr": 2.0}])
async def test_srq_sizes_that_are_no_numbers_are_refused(options: dict[str, Any]) -> None:
    async with aiordma.open_device(DEVICE) as device:
        with pytest.raises((UsageError, TypeError)):
            device.create_srq(**options)


@pytest.mark.parametrize("value", [-1, -0.5, 10_001, float("nan"), float("inf")])
async def test_a_spin_budget_out_of_range_is_refused_before_and_after_there_are_cqs(value: float) -> None:
    with pytest.raises(UsageError, match="spin_us"):
        await aiordma.open_device(DEVICE, spin_us=value)
    async with aiordma.open_device(DEVICE, spin_us=3) as device:
        with pytest.raises(UsageError, match="spin_us"):
            device.spin_us = value
        assert device.spin_us == 3
        async with connected(device) as p:
            with pytest.raises(UsageError, match="spin_us"):
                device.spin_us = value
            assert device.spin_us == 3
            await p.check()


class Odd:
    """A number that fails when it's asked for its value."""

    def __index__(self) -> int:
        raise ZeroDivisionError("odd")


async def test_what_a_number_raises_itself_comes_through_and_leaves_nothing_behind() -> None:
    """As with operator.index(): it's no wrong argument but a fault of the number's class, which must be seen as it is."""
    odd: Any = Odd()
    before = object_counts()
    for option in ("port", "gid_index", "cq_depth", "spin_us"):
        with pytest.raises(ZeroDivisionError):
            await aiordma.open_device(DEVICE, **{option: odd})
    assert object_counts() == before
    async with open_pair() as p, p.device.create_srq() as srq:
        made, posted = object_counts(), (p.a.statistics(), p.b.statistics(), p.local.region.inflight)
        for call in (
            lambda: p.device.create_qp(max_send_wr=odd),
            lambda: p.device.create_qp(max_recv_wr=odd, srq=srq),
            lambda: p.device.create_srq(max_wr=odd),
            lambda: p.device.create_srq(max_sge=odd),
            lambda: p.device.reg_mr(bytearray(8), access=odd),
            lambda: setattr(p.device, "spin_us", odd),
            lambda: aiordma.listen("127.0.0.1", odd, device=p.device, via="tcp"),
            lambda: aiordma.listen("127.0.0.1", 0, device=p.device, via="tcp", backlog=odd),
            lambda: p.a.send(p.local, imm=odd),
            lambda: p.a.atomic_fetch_add(p.local[:8], p.remote, odd),
            lambda: p.a.batch().rdma_write(p.local, p.remote, imm=odd),
            lambda: p.local[odd:],
            lambda: p.remote[:odd],
        ):
            with pytest.raises(ZeroDivisionError):
                await call()
        with pytest.raises(ZeroDivisionError):
            await srq.limit_reached(odd)
        assert object_counts() == made
        assert (p.a.statistics(), p.b.statistics(), p.local.region.inflight) == posted
        await p.check()
    assert object_counts() == before


@pytest.mark.parametrize("value", [0, -1, 1 << 40, 2.5, "many"])
async def test_a_depth_of_cqs_that_the_device_can_not_have_is_refused_and_nothing_is_opened(value: Any) -> None:
    before = object_counts()
    with pytest.raises(UsageError, match="cq_depth"):
        await aiordma.open_device(DEVICE, cq_depth=value)
    assert object_counts() == before


@pytest.mark.parametrize("depth", [1, 64, 40 * 16])
async def test_a_cq_with_room_for_all_qps_is_the_only_one_and_smaller_ones_are_followed_by_others(depth: int) -> None:
    sizes = {"max_send_wr": 16, "max_recv_wr": 16}
    async with aiordma.open_device(DEVICE, cq_depth=depth) as device:
        async with connected(device, **sizes) as first:
            more = [await device.create_qp(**sizes) for _ in range(36)]
            async with connected(device, **sizes) as last:
                for role, cqs in device.statistics()["completion_queues"].items():
                    capacities = [cq["capacity"] for cq in cqs]
                    assert sum(capacities) >= 40 * 16
                    assert all(capacity >= depth << n for n, capacity in enumerate(capacities)), role
                    assert (len(cqs) == 1) == (capacities[0] >= 40 * 16), role
                await first.check()
                await last.check()
            for qp in more:
                await qp.close()


async def test_a_queue_that_somebody_else_filled_is_an_error_that_says_so_and_nothing_hangs() -> None:
    async with open_pair(max_send_wr=16, max_send_sge=1, max_inline_data=0) as p:

        def foreign(count: int) -> int:
            """Work requests past aiordma, which mustn't be; as many as fit."""
            for number in range(count):
                request = SendWR(opcode=0, num_sge=1, sg=[SGE(p.local.addr, 8, p.local.lkey)], send_flags=0)
                request.set_wr_rdma(p.remote.rkey, p.remote.addr)
                try:
                    p.a.pyverbs.post_send(request)
                except PyverbsError:
                    return number
            return count

        blocker = p.block()
        room = foreign(1000)
        assert room < 1000
        for call in (
            lambda: p.a.rdma_write(p.local[:8], p.remote),
            lambda: p.a.rdma_write_many([(p.local[:8], p.remote)] * 10),
        ):
            with pytest.raises(VerbsError, match="something else posts"):
                call()
        assert p.local.region.inflight == 0
        p.unblock()
        await blocker
        await p.check()
        # Part of a batch fits: it ends with the error when that part is over.
        for _ in range(3):
            blocker = p.block()
            foreign(room - 5)
            op = p.a.rdma_write_many([(p.local[:8], p.remote)] * 10)
            p.unblock()
            await blocker
            with anyio.fail_after(20), pytest.raises(VerbsError, match="something else posts"):
                await op
            await p.check()


async def test_slices_are_checked_before_posting() -> None:
    async with open_pair(size=64) as p:
        with pytest.raises(UsageError):
            p.local[:65]
        with pytest.raises(UsageError):
            p.remote[-65:]
        part = p.local[8:16]
        assert isinstance(part, MemorySlice)
        assert (part.owner, part.offset) == (p.local, 8)
        await p.check()


async def test_numbers_of_numpy_are_numbers() -> None:
    n = np.int64
    async with (
        aiordma.open_device(DEVICE, port=n(1), spin_us=n(0)) as device,
        device.create_srq(max_wr=n(8), max_sge=np.uint8(2)) as srq,
        device.create_qp(max_send_wr=np.uint16(4), max_inline_data=n(0), timeout=np.int8(10), srq=srq) as a,
        device.create_qp(max_recv_wr=n(4)) as b,
        device.reg_mr(bytearray(64), access=n(int(aiordma.Access.ALL))) as mr,
    ):
        await connect(a, b)
        assert a.config.max_send_wr == 4
        await a.rdma_write(mr[n(0) : n(8)], mr.remote()[n(8) :], imm=None)
        receive = b.recv(mr[16:24])
        await a.send(mr[:8], imm=np.uint32(7))
        assert (await receive).imm_data == 7


@pytest.mark.emulated_only("wants a device with small limits")
async def test_inline_data_up_to_the_devices_limit_is_granted_however_the_library_rounds() -> None:
    async with aiordma.open_device("emulated:mlx5_small") as device:
        for sges in (1, 2, 4):
            for size in (0, 1, 60, 64):
                async with device.create_qp(
                    max_send_wr=4, max_recv_wr=4, max_send_sge=sges, max_recv_sge=1, max_inline_data=size
                ) as qp:
                    assert qp.max_inline_data >= size
        with pytest.raises(VerbsError, match="ibv_create_qp"):
            await device.create_qp(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1, max_inline_data=256)


async def test_more_than_max_queued_wait_nowhere() -> None:
    async with open_pair(max_send_wr=4, max_recv_wr=4, max_queued=3) as p:
        block = p.block()
        ops = [p.a.rdma_write(p.local[:8], p.remote) for _ in range(6)]
        inflight = p.local.region.inflight
        for refused in (
            lambda: p.a.rdma_write(p.local[:8], p.remote),
            lambda: p.a.rdma_write_many([(p.local[:8], p.remote)]),
            lambda: p.a.atomic_fetch_add(p.local[:8], p.remote, 1),
        ):
            with pytest.raises(QueueFullError, match="max_queued is 3"):
                refused()
        assert p.local.region.inflight == inflight
        assert p.a.statistics()["send"]["waiting"] == 3
        # What aiordma posts itself isn't counted.
        idle = p.a.wait_idle()
        await p.unblock()
        await block
        for op in ops:
            await op
        await idle
        # A batch that would leave more waiting is refused whole.
        with pytest.raises(QueueFullError):
            p.a.rdma_write_many([(p.local[:8], p.remote)] * 8)
        await p.a.rdma_write_many([(p.local[:8], p.remote)] * 7)
        receives = [p.b.recv(p.peer[:8]) for _ in range(7)]
        with pytest.raises(QueueFullError, match="recv queue"):
            p.b.recv(p.peer[:8])
        for receive in receives:
            await p.a.send(p.local[:8])
            await receive
        await p.check()

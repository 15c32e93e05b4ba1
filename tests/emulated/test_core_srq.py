"""Shared receive queues, their limit, and the device's asynchronous events."""

# ruff: noqa: SIM117

import anyio
import pytest
from emulated.core import DEVICE, TOO_LONG_RECEIVED, TOO_LONG_SENT, connect, eventually, open_pair, settle

import aiordma
from aiordma import ClosedError, EventType, UsageError

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]


def armed(srq: aiordma.SharedReceiveQueue, limit: int) -> bool:
    """Whether the device has the limit by now, and will tell. On rxe there is no event for having fewer already."""
    return bool(srq.pyverbs.query().srq_limit == limit)


async def test_receives_of_one_srq_serve_many_qps_and_tell_whose_message_it_was() -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_srq(max_wr=64) as srq:
        async with device.reg_mr(bytearray(64 * 100)) as mr, device.reg_mr(bytearray(64)) as source:
            senders, receivers = [], []
            for _ in range(5):
                senders.append(await device.create_qp())
                receivers.append(await device.create_qp(srq=srq))
                await connect(senders[-1], receivers[-1])
            receives = [srq.recv(mr[64 * i : 64 * i + 64]) for i in range(40)]
            for i in range(40):
                source.view()[:1] = bytes([i])
                await senders[i % 5].send(source[:1], imm=i)
            seen = {}
            for i, receive in enumerate(receives):
                got = await receive
                assert got.qp_num == 0
                assert got.byte_len == 1
                assert mr.view()[64 * i] == got.imm_data
                seen[got.imm_data] = got.receiver_qp_num
            assert seen == {i: receivers[i % 5].qp_num for i in range(40)}
            with pytest.raises(UsageError, match="SRQ"):
                receivers[0].recv(mr[:8])
            assert "recv" not in receivers[0].statistics()
            for qp in [*senders, *receivers]:
                await qp.close()


async def test_more_receives_than_the_srq_holds_wait_and_are_used_in_order() -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_srq(max_wr=4, max_sge=1) as srq:
        async with device.create_qp() as a, device.create_qp(srq=srq) as b, device.reg_mr(bytearray(100)) as mr:
            await connect(a, b)
            receives = [srq.recv(mr[i : i + 1]) for i in range(50)]
            assert srq.statistics()["waiting"] == 46
            for i in range(50):
                await a.send(bytes([i + 1]))
            with anyio.fail_after(20):
                for receive in receives:
                    await receive
            assert bytes(mr.view()[:50]) == bytes(range(1, 51))
            with pytest.raises(UsageError, match="max_recv_sge"):
                srq.recv([mr[:1]] * 3)


async def test_slots_of_an_srq_are_reused_for_ever_whatever_the_order_of_completion() -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_srq(max_wr=3) as srq:
        async with device.create_qp() as a, device.create_qp(srq=srq) as b, device.reg_mr(bytearray(8)) as mr:
            await connect(a, b)
            for i in range(500):
                receive = srq.recv(mr)
                await a.send(None, imm=i)
                assert (await receive).imm_data == i


async def test_the_limit_wakes_its_waiter_when_fewer_receives_are_left() -> None:
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(64)) as mr:
        async with device.create_srq(max_wr=64) as srq, device.create_qp() as a, device.create_qp(srq=srq) as b:
            await connect(a, b)
            receives = [srq.recv(mr) for _ in range(20)]
            reached = anyio.Event()

            async def wait() -> None:
                await srq.limit_reached(15)
                reached.set()

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                for i in range(5):
                    assert not reached.is_set()
                    await a.send(None)
                    await receives[i]
                    await settle()
                await a.send(None)
                with anyio.fail_after(20):
                    await reached.wait()
            # Below it already: at once.
            with anyio.fail_after(20):
                await srq.limit_reached(60)
            # And armed again after more were posted.
            more = [srq.recv(mr) for _ in range(10)]
            async with anyio.create_task_group() as group:
                reached = anyio.Event()
                group.start_soon(wait)
                for receive in [*receives[6:], *more][:11]:
                    await a.send(None)
                    await receive
                with anyio.fail_after(20):
                    await reached.wait()


async def test_a_cancelled_wait_for_the_limit_leaves_the_srq_usable() -> None:
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(64)) as mr:
        async with device.create_srq(max_wr=8) as srq, device.create_qp() as a, device.create_qp(srq=srq) as b:
            await connect(a, b)
            receives = [srq.recv(mr) for _ in range(3)]
            for _ in range(3):
                with anyio.move_on_after(0.005) as scope:
                    await srq.limit_reached(2)
                assert scope.cancelled_caught
            async with anyio.create_task_group() as group:
                group.start_soon(srq.limit_reached, 2)
                await anyio.sleep(0.005)
                with pytest.raises(UsageError, match="another task"):
                    await srq.limit_reached(2)
                for receive in receives[:2]:
                    await a.send(None)
                    await receive


@pytest.mark.parametrize("limit", [0, -1, 9, 1 << 40])
async def test_a_limit_out_of_range_is_refused(limit: int) -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_srq(max_wr=8) as srq:
        with pytest.raises(UsageError, match="limit"):
            await srq.limit_reached(limit)


async def test_closing_an_srq_ends_its_receives_and_its_waiter() -> None:
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(64)) as mr:
        srq = await device.create_srq(max_wr=4)
        receives = [srq.recv(mr) for _ in range(9)]
        ended = []

        async def wait() -> None:
            try:
                await srq.limit_reached(2)
            except ClosedError as e:
                ended.append(e)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.005)
            await srq.close()
        assert len(ended) == 1
        for receive in receives:
            with pytest.raises(ClosedError):
                await receive
        assert mr.region.inflight == 0
        with pytest.raises(ClosedError):
            srq.recv(mr)
        with pytest.raises(ClosedError):
            await srq.limit_reached(1)


async def test_a_qp_that_fails_leaves_the_srq_to_the_others() -> None:
    async with aiordma.open_device(DEVICE) as device, device.create_srq(max_wr=8) as srq:
        async with device.reg_mr(bytearray(64)) as mr:
            pairs = []
            for _ in range(2):
                pairs.append((await device.create_qp(), await device.create_qp(srq=srq)))
                await connect(*pairs[-1])
            short, long = srq.recv(mr[:4]), srq.recv(mr)
            with pytest.raises(TOO_LONG_SENT):
                await pairs[0][0].send(bytes(8))
            with pytest.raises(TOO_LONG_RECEIVED):
                await short
            await pairs[1][0].send(bytes(8))
            assert (await long).receiver_qp_num == pairs[1][1].qp_num
            for pair in pairs:
                for qp in pair:
                    await qp.close()


# ---------------------------------------------------------------- events


async def test_events_come_to_every_listener_until_the_device_closes() -> None:
    seen: list[list[object]] = [[], [], []]
    device = await aiordma.open_device(DEVICE)

    async def listen(number: int, events: aiordma.Events) -> None:
        async for event in events:
            seen[number].append(event.type)

    srq = await device.create_srq(max_wr=8)
    a, b = await device.create_qp(), await device.create_qp(srq=srq)
    await connect(a, b)
    mr = await device.reg_mr(bytearray(64))
    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(listen, number, device.events())
        receives = [srq.recv(mr), srq.recv(mr)]
        group.start_soon(srq.limit_reached, 2)
        await eventually(lambda: armed(srq, 2))
        await a.send(None)
        await receives[0]
        await eventually(lambda: all(EventType.SRQ_LIMIT_REACHED in found for found in seen))
        with anyio.fail_after(20):
            await device.close()
    assert seen[0] == seen[1] == seen[2]


async def test_an_srq_event_names_its_srq_and_port_events_none() -> None:
    async with aiordma.open_device(DEVICE) as device, device.reg_mr(bytearray(64)) as mr:
        async with device.create_srq(max_wr=8) as srq, device.create_qp() as a, device.create_qp(srq=srq) as b:
            await connect(a, b)
            events = device.events()
            receives = [srq.recv(mr), srq.recv(mr)]
            async with anyio.create_task_group() as group:
                group.start_soon(srq.limit_reached, 2)
                await eventually(lambda: armed(srq, 2))
                await a.send(None)
                await receives[0]
            with anyio.fail_after(20):
                async for event in events:
                    if event.type is EventType.SRQ_LIMIT_REACHED:
                        assert event.element is srq
                        assert event.port is None
                        break


async def test_unread_events_are_bounded_and_counted() -> None:
    async with open_pair() as p:
        events = p.device.events(limit=3)
        for number in range(5):
            events.put(aiordma.AsyncEvent(EventType.PORT_ACTIVE, port=number))
        assert events.dropped == 2
        got = [(await anext(events)).port for _ in range(3)]
        assert got == [2, 3, 4]


async def test_waiting_for_events_can_be_cancelled_and_goes_on() -> None:
    async with open_pair() as p:
        events = p.device.events()
        for _ in range(3):
            with anyio.move_on_after(0.002) as scope:
                await anext(events)
            assert scope.cancelled_caught
        events.put(aiordma.AsyncEvent(EventType.PORT_ERR, port=1))
        assert (await anext(events)).type is EventType.PORT_ERR
        events.close()
        with pytest.raises(StopAsyncIteration):
            await anext(events)

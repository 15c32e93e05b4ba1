"""DEVX queries and changes of verbs objects: what the device says is what it does."""

import errno
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from emulated.core import connect, open_pair
from pyverbs import enums as e
from pyverbs.cq import CQ, CompChannel
from pyverbs.qp import QP, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqInitAttr
from pyverbs.wq import WQ, RwqIndTable, RwqIndTableInitAttr, WQInitAttr
from pyverbs.wr import SGE, RecvWR

import aiordma
from aiordma import Device, DevxError, EventType, UsageError, VerbsError, emulator
from aiordma.mlx5 import devx

pytestmark = pytest.mark.anyio

S = devx.QpState


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = emulator.object_counts("mlx5_0")
    yield
    if emulator.object_counts("mlx5_0") != before:
        gc.collect()
    assert emulator.object_counts("mlx5_0") == before


@pytest.fixture
async def device() -> AsyncIterator[Device]:
    async with aiordma.open_device("emulated:mlx5_0") as device:
        yield device


# ---------------------------------------------------------------- queue pairs


async def test_a_qp_through_its_states(device: Device) -> None:
    async with (
        device.create_qp(max_send_wr=10, max_recv_wr=20) as a,
        device.create_qp(max_rd_atomic=8) as b,
    ):
        fresh = await devx.query_qp(a)
        assert fresh.state is S.INIT
        assert fresh.st is devx.ServiceType.RC
        assert fresh.pm_state is devx.PmState.MIGRATED
        assert fresh.remote_qpn == 0
        assert fresh.primary_address_path.vhca_port_num == 1
        assert (fresh.rre, fresh.rwe, fresh.rae) == (1, 1, 1)
        assert 2**fresh.log_rq_size >= 20
        assert fresh.rq_type is devx.RqType.OWN
        assert fresh.cqn_snd != fresh.cqn_rcv
        await connect(a, b)
        mine, theirs = await devx.query_qp(a), await devx.query_qp(b)
        assert mine.state is theirs.state is S.RTS
        assert (mine.remote_qpn, theirs.remote_qpn) == (b.qp_num, a.qp_num)
        assert mine.primary_address_path.rgid_rip == device.gid.raw  # type: ignore[union-attr]
        assert mine.primary_address_path.src_addr_index == device.gid.index  # type: ignore[union-attr]
        assert 128 << theirs.mtu == 128 << mine.mtu == min(4096, device.active_mtu)
        assert 1 << theirs.log_sra_max == 8
        assert mine.next_send_psn == theirs.next_rcv_psn
        await devx.modify_qp(a, devx.ToErrQpIn())
        assert (await devx.query_qp(a)).state is S.ERR


async def test_counters_move() -> None:
    async with open_pair() as p:
        before = await devx.query_qp(p.a)
        for _ in range(3):
            await p.a.rdma_write(p.local[:8], p.remote)
        await p.a.rdma_write(p.local[:10000], p.remote)
        after = await devx.query_qp(p.a)
        packets = 3 + -(-10000 // (128 << after.mtu))
        assert after.next_send_psn == (before.next_send_psn + packets) & 0xFFFFFF
        assert after.ssn - before.ssn == 4
        assert after.hw_sq_wqebb_counter == after.sw_sq_wqebb_counter
        assert after.hw_sq_wqebb_counter - before.hw_sq_wqebb_counter >= 4
        there = await devx.query_qp(p.b)
        assert there.next_rcv_psn == after.next_send_psn
        assert there.rmsn == after.ssn
        receives = [p.b.recv(p.peer) for _ in range(5)]
        waiting = await devx.query_qp(p.b)
        assert waiting.sw_rq_counter - waiting.hw_rq_counter == 5
        for _ in receives:
            await p.a.send(p.local[:1])
        done = await devx.query_qp(p.b)
        assert done.sw_rq_counter == done.hw_rq_counter == there.hw_rq_counter + 5
        for receive in receives:
            await receive


async def test_what_waits_in_the_send_queue() -> None:
    async with open_pair() as p:
        ops = [p.block(), *(p.a.rdma_write(p.local[:8], p.remote) for _ in range(4))]
        state = await devx.query_qp(p.a)
        assert state.sw_sq_wqebb_counter - state.hw_sq_wqebb_counter >= 5
        await p.unblock()
        for op in ops:
            await op
        state = await devx.query_qp(p.a)
        assert state.sw_sq_wqebb_counter == state.hw_sq_wqebb_counter


def _pyverbs_qp(device: Device, cq: CQ, qp_type: int = e.IBV_QPT_RC, srq: SRQ | None = None) -> QP:
    cap = QPCap(max_send_wr=8, max_recv_wr=0 if srq else 8)
    return QP(device.pd, QPInitAttr(qp_type=qp_type, scq=cq, rcq=cq, srq=srq, cap=cap))


async def test_every_transition_by_firmware_command(device: Device) -> None:
    cq = CQ(device.context, 16)
    a, b = _pyverbs_qp(device, cq), _pyverbs_qp(device, cq)

    async def state(qp: QP) -> devx.Qpc:
        return await devx.query_qp(qp, device=device)

    async def change(qp: QP, command: Any, wanted: devx.QpState) -> devx.Qpc:
        await devx.modify_qp(qp, command, device=device)
        now = await state(qp)
        assert now.state is wanted
        return now

    gid = device.gid
    assert gid is not None
    assert (await state(a)).state is S.RST
    for qp, other in ((a, b), (b, a)):
        init = devx.Rst2InitQpIn()
        init.qpc = {"rre": 1, "rwe": 1, "primary_address_path": {"vhca_port_num": 1}}
        now = await change(qp, init, S.INIT)
        assert (now.rre, now.rwe, now.rae) == (1, 1, 0)
        more = devx.Init2InitQpIn(opt_param_mask=devx.OptParam.RAE)
        more.qpc.rae = 1
        now = await change(qp, more, S.INIT)
        assert (now.rre, now.rwe, now.rae) == (1, 1, 1)
        rtr = devx.Init2RtrQpIn()
        rtr.qpc = {"mtu": 3, "remote_qpn": other.qp_num, "next_rcv_psn": 100, "min_rnr_nak": 12, "log_rra_max": 2}
        path = rtr.qpc.primary_address_path
        path.rgid_rip, path.src_addr_index, path.hop_limit, path.vhca_port_num = gid.raw, gid.index, 64, 1
        path.rmac = bytes.fromhex("02005c000001")
        now = await change(qp, rtr, S.RTR)
        assert now.primary_address_path.rmac.hex() == "02005c000001"
        assert (now.mtu, now.next_rcv_psn, now.min_rnr_nak, now.log_rra_max) == (3, 100, 12, 2)
        rts = devx.Rtr2RtsQpIn()
        rts.qpc = {"next_send_psn": 100, "log_sra_max": 1, "retry_count": 7, "rnr_retry": 6}
        rts.qpc.primary_address_path.ack_timeout = 14
        now = await change(qp, rts, S.RTS)
        assert (now.next_send_psn, now.log_sra_max, now.retry_count, now.rnr_retry) == (100, 1, 7, 6)
        assert now.primary_address_path.ack_timeout == 14
    again = devx.Rts2RtsQpIn(opt_param_mask=devx.OptParam.RNR_TIMEOUT)
    again.qpc.min_rnr_nak = 20
    assert (await change(a, again, S.RTS)).min_rnr_nak == 20
    await change(a, devx.ToErrQpIn(), S.ERR)
    reset = await change(a, devx.ToRstQpIn(), S.RST)
    assert (reset.remote_qpn, reset.mtu, reset.rre) == (0, 0, 0)
    for thing in (a, b, cq):
        thing.close()


async def test_mmo_is_enabled_by_init2init(device: Device) -> None:
    cq = CQ(device.context, 16)
    qp = _pyverbs_qp(device, cq)
    init = devx.Rst2InitQpIn()
    init.qpc.primary_address_path.vhca_port_num = 1
    await devx.modify_qp(qp, init, device=device)
    assert (await devx.query_qp_ext(qp, device=device)).mmo == 0
    mmo = devx.Init2InitQpIn(qpc_ext=1, opt_param_mask_95_32=devx.OptParam32.INIT2INIT_MMO)
    mmo.qpc_data_ext.mmo = 1
    await devx.modify_qp(qp, mmo, device=device)
    assert (await devx.query_qp_ext(qp, device=device)).mmo == 1
    qp.close()
    cq.close()


async def test_an_sq_error_is_over() -> None:
    """UD and UC only: an RC QP goes to ERR at once."""
    async with open_pair(qp_type="UC") as p:
        mr = await p.device.reg_mr(bytearray(8))
        stolen = mr[:]
        await mr.close()
        with pytest.raises(aiordma.RdmaError):
            await p.a.rdma_write(stolen, p.remote)
        if (await devx.query_qp(p.a)).state is S.SQER:
            await devx.modify_qp(p.a, devx.SqErr2RtsQpIn())
            assert (await devx.query_qp(p.a)).state is S.RTS


async def test_service_types(device: Device) -> None:
    cq = CQ(device.context, 16)
    for qp_type, st in (
        (e.IBV_QPT_RC, devx.ServiceType.RC),
        (e.IBV_QPT_UC, devx.ServiceType.UC),
        (e.IBV_QPT_UD, devx.ServiceType.UD),
    ):
        qp = _pyverbs_qp(device, cq, qp_type)
        assert (await devx.query_qp(qp, device=device)).st is st
        qp.close()
    cq.close()


async def test_dc(device: Device) -> None:
    from aiordma import mlx5

    async with (
        device.create_srq() as srq,
        mlx5.create_dc_target(device, srq, dc_key=0x1234567) as target,
        mlx5.create_dc_initiator(device) as initiator,
    ):
        dctc = await devx.query_dct(target)
        assert dctc.dc_access_key == 0x1234567
        assert dctc.port == 1
        assert (dctc.rre, dctc.rwe) == (1, 1)
        assert dctc.srqn_xrqn != 0
        qpc = await devx.query_qp(initiator)
        assert qpc.st is devx.ServiceType.DCI
        assert qpc.state is S.RTS
        assert 2**qpc.log_num_dci_stream_channels >= len(initiator.streams)
        reset = devx.Rts2RtsQpIn(qpc_ext=1, opt_param_mask_95_32=devx.OptParam32.DCI_STREAM_CHANNEL_ID)
        reset.qpc_data_ext.dci_stream_channel_id = 1
        with pytest.raises(DevxError):  # it isn't in error
            await devx.modify_qp(initiator, reset)


# ---------------------------------------------------------------- completion queues


async def test_a_cq_by_the_numbers() -> None:
    async with open_pair() as p:
        send, recv = p.device.engine.completion_queues
        qpc = await devx.query_qp(p.a)
        before = await devx.query_cq(send, device=p.device)
        assert before.status is devx.CqStatus.OK
        assert before.cqe_sz is devx.CqeSize.BYTES_64
        assert 2**before.log_cq_size > send.capacity
        for _ in range(7):
            await p.a.rdma_write(p.local[:8], p.remote)
        after = await devx.query_cq(send, device=p.device)
        assert after.producer_counter - before.producer_counter == 7
        assert after.consumer_counter == after.producer_counter
        other = await devx.query_cq(recv, device=p.device)
        assert other.producer_counter == 0
        raw = await devx.cq_query(send, devx.QueryCqIn(cqn=qpc.cqn_snd), 272, device=p.device)
        assert devx.QueryCqOut(raw).cq_context == after


async def test_a_cq_that_overflowed(device: Device) -> None:
    cq = CQ(device.context, 1)
    qp = _pyverbs_qp(device, cq)
    init = devx.Rst2InitQpIn()
    init.qpc.primary_address_path.vhca_port_num = 1
    await devx.modify_qp(qp, init, device=device)
    for _ in range(8):
        qp.post_recv(RecvWR(wr_id=1, sg=[SGE(0, 0, 0)], num_sge=1))
    await devx.modify_qp(qp, devx.ToErrQpIn(), device=device)
    with anyio.fail_after(10):
        while (await devx.query_cq(cq, device=device)).status is not devx.CqStatus.OVERFLOW:
            await checkpoint()
    qp.close()
    cq.close()


async def test_how_a_cq_is_armed(device: Device) -> None:
    channel = CompChannel(device.context)
    cq = CQ(device.context, 16, None, channel, 1)
    idle = await devx.query_cq(cq, device=device)
    other = CQ(device.context, 16, None, None, 0)
    assert idle.st is devx.CqArm.FIRED
    assert idle.c_eqn_or_apu_element == (await devx.query_cq(other, device=device)).c_eqn_or_apu_element + 1
    cq.req_notify(True)
    assert (await devx.query_cq(cq, device=device)).st is devx.CqArm.SOLICITED
    cq.req_notify()
    assert (await devx.query_cq(cq, device=device)).st is devx.CqArm.ANY
    for thing in (cq, other, channel):
        thing.close()


async def test_moderation_of_a_cq(device: Device) -> None:
    cq = CQ(device.context, 16)
    await devx.modify_cq(cq, period=20, max_count=5, device=device)
    context = await devx.query_cq(cq, device=device)
    assert (context.cq_period, context.cq_max_count) == (20, 5)
    await devx.modify_cq(cq, max_count=6, device=device)
    context = await devx.query_cq(cq, device=device)
    assert (context.cq_period, context.cq_max_count) == (20, 6)
    with pytest.raises(UsageError, match="cq_period has 12 bits"):
        devx.modify_cq(cq, period=5000, device=device)
    with pytest.raises(UsageError, match="period, max_count"):
        devx.modify_cq(cq, device=device)
    resize = devx.ModifyCqIn(cqn=(await _cqn(cq, device)), op_mod=1, modify_field_select=1)
    with pytest.raises(DevxError) as caught:
        await devx.cq_modify(cq, resize, device=device)
    assert caught.value.status == devx.Status.BAD_PARAM
    cq.close()


async def _cqn(cq: CQ, device: Device) -> int:
    qp = _pyverbs_qp(device, cq)
    number = (await devx.query_qp(qp, device=device)).cqn_snd
    qp.close()
    return number


async def test_asking_for_a_cq_leaves_it_to_libmlx5(device: Device) -> None:
    """mlx5dv_init_obj() would have made it leave the completions of destroyed QPs in the queue, where no QP is found
    for them any more."""
    cq = CQ(device.context, 64)
    await devx.query_cq(cq, device=device)
    for _ in range(3):
        qp = _pyverbs_qp(device, cq)
        init = devx.Rst2InitQpIn()
        init.qpc.primary_address_path.vhca_port_num = 1
        await devx.modify_qp(qp, init, device=device)
        qp.post_recv(RecvWR(wr_id=1, sg=[SGE(0, 0, 0)], num_sge=1))
        await devx.modify_qp(qp, devx.ToErrQpIn(), device=device)
        with anyio.fail_after(10):
            while True:
                context = await devx.query_cq(cq, device=device)
                if context.producer_counter != context.consumer_counter:
                    break
        qp.close()
        assert cq.poll(1) == (0, [])
    cq.close()


# ---------------------------------------------------------------- shared receive queues


async def test_an_srq_is_a_pool(device: Device) -> None:
    async with device.reg_mr(bytearray(64)) as mr, device.create_srq(max_wr=20, max_sge=3) as srq:
        fresh = await devx.query_srq(srq)
        assert isinstance(fresh, devx.Rmpc)
        assert fresh.state is devx.RqState.RDY
        assert fresh.wq.wq_type is devx.WqType.LINKED_LIST
        assert 2**fresh.wq.log_wq_sz > 20
        assert 2**fresh.wq.log_wq_stride >= 16 * 4
        assert fresh.wq.sw_counter == fresh.wq.hw_counter == 0
        receives = [srq.recv(mr[:8]) for _ in range(6)]
        async with device.create_qp(srq=srq) as a, device.create_qp(srq=srq) as b:
            await connect(a, b)
            assert (await devx.query_qp(a)).rq_type is devx.RqType.SRQ
            events = device.events()
            await devx.modify_srq(srq, limit=5)
            posted = await devx.query_srq(srq)
            assert isinstance(posted, devx.Rmpc)
            assert (posted.wq.lwm, posted.wq.sw_counter, posted.wq.hw_counter) == (5, 6, 0)
            for _ in range(2):
                await a.send(mr[:4])
            with anyio.fail_after(10):
                async for event in events:
                    if event.type is EventType.SRQ_LIMIT_REACHED:
                        break
            taken = await devx.query_srq(srq)
            assert isinstance(taken, devx.Rmpc)
            assert (taken.wq.lwm, taken.wq.hw_counter) == (0, 2)
        for receive in receives[:2]:
            await receive
    for receive in receives[2:]:
        receive.exception()


async def test_a_pyverbs_srq_and_limits_beyond_it(device: Device) -> None:
    srq = SRQ(device.pd, SrqInitAttr())
    context = await devx.query_srq(srq, device=device)
    assert isinstance(context, devx.Rmpc)
    with pytest.raises(DevxError) as caught:
        await devx.modify_srq(srq, limit=2**context.wq.log_wq_sz, device=device)
    assert caught.value.status == devx.Status.BAD_PARAM
    srq.close()


# ---------------------------------------------------------------- receive work queues


async def test_work_queues_and_their_table(device: Device) -> None:
    cq = CQ(device.context, 16)
    attr = WQInitAttr(wq_context=None, wq_pd=device.pd, wq_cq=cq, wq_type=e.IBV_WQT_RQ, max_wr=16, max_sge=2)
    queues = [WQ(device.context, attr) for _ in range(4)]
    for queue in queues:
        context = await devx.query_wq(queue, device=device)
        assert context.state is devx.RqState.RST
        assert context.wq.wq_type is devx.WqType.CYCLIC
        assert 2**context.wq.log_wq_sz >= 16
        await devx.modify_wq(queue, state=devx.RqState.RDY, current=devx.RqState.RST, device=device)
        assert (await devx.query_wq(queue, device=device)).state is devx.RqState.RDY
    with pytest.raises(DevxError) as caught:
        await devx.modify_wq(queues[0], state=devx.RqState.ERR, current=devx.RqState.RST, device=device)
    assert caught.value.status == devx.Status.BAD_RES_STATE
    table = RwqIndTable(device.context, RwqIndTableInitAttr(2, queues))
    context = await devx.query_ind_table(table, device=device)
    numbers = [queue.wqn for queue in queues]
    assert context.rqt_max_size == context.rqt_actual_size == 4
    assert context.rq_num == numbers
    await devx.modify_ind_table(table, [numbers[3], numbers[0]], device=device)
    assert (await devx.query_ind_table(table, device=device)).rq_num == [numbers[3], numbers[0]]
    await devx.modify_ind_table(table, numbers, device=device)
    for wrong, status in (
        (numbers[:3], devx.Status.BAD_PARAM),
        (numbers * 2, devx.Status.BAD_PARAM),
        ([1], devx.Status.BAD_RES),
    ):
        with pytest.raises(DevxError) as caught:
            await devx.modify_ind_table(table, wrong, device=device)
        assert caught.value.status == status
    number = (await devx.ind_tbl_query(table, devx.QueryRqtIn(rqtn=_table_number(table, device)), 8192, device=device))[
        0
    ]
    assert number == 0
    table.close()
    for thing in (*queues, cq):
        thing.close()


def _table_number(table: RwqIndTable, device: Device) -> int:
    from aiordma import _control, _devx

    return _devx.ind_table_number(_control.ind_table_address(table, device.context_address))


async def test_arm_rq_is_refused(device: Device) -> None:
    cq = CQ(device.context, 16)
    attr = WQInitAttr(wq_context=None, wq_pd=device.pd, wq_cq=cq, wq_type=e.IBV_WQT_RQ, max_wr=16, max_sge=2)
    queue = WQ(device.context, attr)
    from aiordma.mlx5.devx.commands import ArmRqIn

    with pytest.raises(DevxError):
        await devx.wq_modify(queue, ArmRqIn(srq_number=queue.wqn, lwm=2), device=device)
    queue.close()
    cq.close()


# ---------------------------------------------------------------- raw calls


async def test_raw_calls_agree_with_the_typed_ones() -> None:
    async with open_pair() as p:
        raw = await devx.qp_query(p.a, bytes(devx.QueryQpIn(qpn=p.a.qp_num)), 272)
        assert devx.QueryQpOut(raw).qpc == await devx.query_qp(p.a)
        out = await devx.qp_modify(p.b, devx.ToErrQpIn(qpn=p.b.qp_num))
        assert out == bytes(16)


@pytest.mark.parametrize("number", [0, 1, 0xFFFFFF])
async def test_another_objects_number_is_einval(device: Device, number: int) -> None:
    async with device.create_qp() as qp:
        with pytest.raises(VerbsError) as caught:
            await devx.qp_query(qp, devx.QueryQpIn(qpn=number), 272)
        assert caught.value.errno == errno.EINVAL
        assert not isinstance(caught.value, DevxError)
        assert "QUERY_QP" in str(caught.value)


async def test_a_command_for_another_kind_of_object_is_einval(device: Device) -> None:
    async with device.create_qp() as qp, device.create_srq() as srq:
        for obj, call, command in (
            (qp, devx.qp_query, devx.QueryCqIn(cqn=qp.qp_num)),
            (qp, devx.qp_query, devx.ToErrQpIn(qpn=qp.qp_num)),  # a change isn't a query
            (srq, devx.srq_query, devx.QueryQpIn(qpn=1)),
        ):
            with pytest.raises(VerbsError) as caught:
                await call(obj, command, 512)
            assert caught.value.errno == errno.EINVAL

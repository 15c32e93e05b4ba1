"""Queues and keys that DEVX makes in registered memory (UMEM): made, asked about, used, refused."""

import ctypes
import errno
import gc
import mmap
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pyverbs import enums as e
from pyverbs.providers.mlx5.mlx5dv import Mlx5UMEM
from pyverbs.pyverbs_error import PyverbsError

import aiordma
from aiordma import Device, DevxError, VerbsError, emulator
from aiordma.mlx5 import devx
from aiordma.mlx5.devx import commands
from aiordma.mlx5.devx.prm import Field, Nested

pytestmark = pytest.mark.anyio


class CreateCqOut(commands.Output, size=16):
    cqn = Field(0x48, 24)


class CreateCqIn(commands.Command, size=272, code=devx.Opcode.CREATE_CQ, out=CreateCqOut):
    """A command that the package doesn't have: describing one takes a few lines."""

    cq_context = Nested(0x80, devx.Cqc)
    cq_umem_offset = Field(0x280, 64)
    cq_umem_id = Field(0x2C0, 32)
    cq_umem_valid = Field(0x2E0, 1)


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


def umem(device: Device, size: int, access: int = e.IBV_ACCESS_LOCAL_WRITE) -> Mlx5UMEM:
    return Mlx5UMEM(device.context, size=size, access=access)


def cq_command(buf: Mlx5UMEM, record: Mlx5UMEM, **cqc: int) -> CreateCqIn:
    context = {"log_cq_size": 4, "c_eqn_or_apu_element": 9, "dbr_umem_id": record.umem_id, "dbr_umem_valid": 1}
    return CreateCqIn(cq_umem_id=buf.umem_id, cq_umem_valid=1, cq_context={**context, **cqc})


def qp_command(buf: Mlx5UMEM, record: Mlx5UMEM, pdn: int, cqn: int, **qpc: Any) -> devx.CreateQpIn:
    sizes = {"log_rq_size": 3, "log_rq_stride": 0, "log_sq_size": 4}
    numbers = {"pd": pdn, "cqn_snd": cqn, "cqn_rcv": cqn, "dbr_umem_id": record.umem_id, "dbr_umem_valid": 1}
    return devx.CreateQpIn(wq_umem_id=buf.umem_id, wq_umem_valid=1, qpc={**sizes, **numbers, **qpc})


async def test_a_cq_and_a_qp(device: Device) -> None:
    buf, records = umem(device, 8192), umem(device, 4096)
    cq = await devx.create_object(device, cq_command(buf, records))
    context = (await cq.query(devx.QueryCqIn(cqn=cq.out.cqn))).cq_context
    assert (context.log_cq_size, context.producer_counter, context.c_eqn_or_apu_element) == (4, 0, 9)
    pd = await devx.create_object(device, devx.AllocPdIn())
    command = qp_command(buf, records, pd.out.pd, cq.out.cqn, user_index=0x55)
    command.wq_umem_offset = 4096
    command.qpc.dbr_addr = 64
    qp = await devx.create_object(device, command)
    number = qp.out.qpn

    async def state() -> devx.Qpc:
        out = await qp.query(devx.QueryQpIn(qpn=number))
        return devx.Qpc(bytes(out.qpc))

    fresh = await state()
    assert fresh.state is devx.QpState.RST
    assert (fresh.cqn_snd, fresh.pd, fresh.user_index) == (cq.out.cqn, pd.out.pd, 0x55)
    assert (fresh.log_rq_size, fresh.log_sq_size) == (3, 4)
    init = devx.Rst2InitQpIn(qpn=number)
    init.qpc.primary_address_path.vhca_port_num = 1
    await qp.modify(init)
    assert (await state()).state is devx.QpState.INIT
    await qp.modify(devx.ToErrQpIn(qpn=number))
    assert (await state()).state is devx.QpState.ERR
    for used in (cq, pd):
        with pytest.raises(VerbsError) as caught:
            await used.close()
        assert caught.value.errno == errno.EBUSY
        assert not used.closed
    for made in (qp, cq, pd):
        await made.close()
    for memory in (buf, records):
        memory.close()


async def test_a_key_on_a_umem(device: Device) -> None:
    memory = umem(device, 4096, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE)
    async with (
        device.reg_mr(bytearray(b"data in a UMEM!!")) as mr,
        device.create_qp() as a,
        device.create_qp() as b,
    ):
        await a.connect(b.info)
        await b.connect(a.info)
        mkc = {"access_mode_1_0": devx.AccessMode.MTT, "pd": (await devx.query_qp(a)).pd, "len": 64, "lr": 1}
        command = devx.CreateMkeyIn(mkey_umem_id=memory.umem_id, mkey_umem_valid=1, mkey_umem_offset=128)
        command.memory_key_mkey_entry = {**mkc, "lw": 1, "rr": 1, "rw": 1, "start_addr": 0x1000, "qpn": 0xFFFFFF}
        async with devx.create_object(device, command) as key:
            remote = aiordma.RemoteBuffer(0x1000, 64, key.out.mkey_index << 8)
            await a.rdma_write(mr, remote[8:24])
            mr.view()[:] = bytes(16)
            await a.rdma_read(mr, remote[8:24])
            assert bytes(mr.view()) == b"data in a UMEM!!"
            assert (await key.query(devx.QueryMkeyIn(mkey_index=key.out.mkey_index))).memory_key_mkey_entry.len == 64
        wrong = devx.CreateMkeyIn(bytes(command))
        wrong["memory_key_mkey_entry.len"] = 4096
        with pytest.raises(DevxError):
            await devx.create_object(device, wrong)
    memory.close()


@pytest.mark.parametrize(
    ("cqc", "status"),
    [
        ({"log_cq_size": 10}, devx.Status.BAD_PARAM),  # larger than the memory
        ({"log_cq_size": 25}, devx.Status.LIM),
        ({"dbr_umem_id": 0xFFFF}, devx.Status.BAD_RES),
        ({"dbr_addr": 4}, devx.Status.BAD_PARAM),
        ({"dbr_addr": 1 << 40}, devx.Status.BAD_PARAM),
        ({"c_eqn_or_apu_element": 200}, devx.Status.BAD_PARAM),
        ({"cqe_comp_en": 1}, devx.Status.BAD_PARAM),
    ],
)
async def test_cqs_that_are_refused(device: Device, cqc: dict[str, int], status: devx.Status) -> None:
    buf, records = umem(device, 4096), umem(device, 4096)
    with pytest.raises(DevxError) as caught:
        await devx.create_object(device, cq_command(buf, records, **cqc))
    assert caught.value.status == status
    buf.close()
    records.close()


@pytest.mark.parametrize(
    ("qpc", "status"),
    [
        ({"pd": 0xFFFFFF}, devx.Status.BAD_RES),
        ({"cqn_snd": 0xFFFFFF}, devx.Status.BAD_RES),
        ({"rq_type": devx.RqType.SRQ, "srqn_rmpn_xrqn": 0xFFFFFF}, devx.Status.BAD_RES),
        ({"log_sq_size": 10}, devx.Status.BAD_PARAM),
        ({"st": devx.ServiceType.XRC}, devx.Status.BAD_PARAM),
        ({"send_dbr_mode": 1}, devx.Status.BAD_PARAM),
    ],
)
async def test_qps_that_are_refused(device: Device, qpc: dict[str, int], status: devx.Status) -> None:
    buf, records = umem(device, 4096), umem(device, 4096)
    async with (
        devx.create_object(device, devx.AllocPdIn()) as pd,
        devx.create_object(device, cq_command(buf, records, log_cq_size=2)) as cq,
    ):
        with pytest.raises(DevxError) as caught:
            await devx.create_object(device, qp_command(buf, records, pd.out.pd, cq.out.cqn, **qpc))
        assert caught.value.status == status
    for memory in (buf, records):
        memory.close()


async def test_memory_in_use_stays(device: Device) -> None:
    """pyverbs frees memory of its own even if it's still in use: so this is ours."""
    own = mmap.mmap(-1, 8192)
    at = ctypes.addressof(ctypes.c_char.from_buffer(own))
    buf, records = (
        Mlx5UMEM(device.context, size=4096, addr=at + offset, access=e.IBV_ACCESS_LOCAL_WRITE) for offset in (0, 4096)
    )
    cq = await devx.create_object(device, cq_command(buf, records))
    count = emulator.object_counts("mlx5_0")["umem"]
    with pytest.raises(PyverbsError):
        buf.close()
    assert emulator.object_counts("mlx5_0")["umem"] == count
    await cq.close()
    buf.close()
    records.close()

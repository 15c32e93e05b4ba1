"""Objects that DEVX makes, general commands, and queries that answer through a descriptor."""

# ruff: noqa: PT031

import errno
import gc
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from emulated.core import eventually

import aiordma
from aiordma import ClosedError, Device, DevxError, UsageError, VerbsError, emulator
from aiordma.mlx5 import devx

pytestmark = pytest.mark.anyio


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


async def _pdn(device: Device) -> int:
    async with device.create_qp() as qp:
        return (await devx.query_qp(qp)).pd


def mkey_command(pd: int, entries: int = 4, **mkc: int) -> devx.CreateMkeyIn:
    fields = {"access_mode_1_0": devx.AccessMode.KLMS, "umr_en": 1, "free": 1, "lr": 1, "qpn": 0xFFFFFF, "pd": pd}
    return devx.CreateMkeyIn(memory_key_mkey_entry={**fields, "translations_octword_size": entries, **mkc})


# ---------------------------------------------------------------- objects


async def test_a_memory_key(device: Device) -> None:
    command = mkey_command(await _pdn(device), 8, mkey_7_0=0x42, rw=1, rr=1, len=4096, start_addr=1 << 40)
    async with devx.create_object(device, command) as mkey:
        assert isinstance(mkey.out, devx.CreateMkeyOut)
        assert emulator.object_counts("mlx5_0")["mkey"] == 1
        out = await mkey.query(devx.QueryMkeyIn(mkey_index=mkey.out.mkey_index))
        mkc = out.memory_key_mkey_entry
        assert (mkc.mkey_7_0, mkc.rw, mkc.rr, mkc.lw, mkc.umr_en, mkc.free) == (0x42, 1, 1, 0, 1, 1)
        assert (mkc.len, mkc.start_addr, mkc.translations_octword_size) == (4096, 1 << 40, 8)
        assert device.statistics()["devx_objects"] == 1
        assert "CREATE_MKEY" in repr(mkey)
    assert emulator.object_counts("mlx5_0")["mkey"] == 0
    assert "closed" in repr(mkey)
    with pytest.raises(ClosedError):
        mkey.query(devx.QueryMkeyIn())


async def test_a_key_that_comes_with_its_list_carries_data(device: Device) -> None:
    """Two pieces of a region, in reverse order, read through a key that needs no UMR."""
    memory = bytearray(b"0123456789abcdef" * 16)
    async with device.reg_mr(memory) as mr, device.create_qp() as a, device.create_qp() as b:
        await a.connect(b.info)
        await b.connect(a.info)
        pdn = (await devx.query_qp(a)).pd
        command = mkey_command(pdn, 4, free=0, umr_en=0, rr=1, len=16)
        command.translations_octword_actual_size = 2
        klms = [
            devx.Klm(byte_count=8, mkey=mr.lkey, address=mr.remote().addr + 8),
            devx.Klm(byte_count=8, mkey=mr.lkey, address=mr.remote().addr),
        ]
        data = bytes(command) + b"".join(map(bytes, klms))
        async with devx.create_object(device, data, 16) as mkey:
            index = devx.CreateMkeyOut(mkey.out).mkey_index
            await a.rdma_read(mr[128:144], aiordma.RemoteBuffer(0, 16, index << 8))
            assert memory[128:144] == b"89abcdef01234567"


async def test_what_is_in_use_stays(device: Device) -> None:
    async with devx.create_object(device, devx.AllocPdIn()) as pd:
        mkey = await devx.create_object(device, mkey_command(pd.out.pd))
        closing = pd.close()
        with pytest.raises(VerbsError) as caught:
            await closing
        assert caught.value.errno == errno.EBUSY
        await mkey.close()
        assert not pd.closed
        assert emulator.object_counts("mlx5_0")["devx"] == 1
    assert emulator.object_counts("mlx5_0")["devx"] == 0


async def test_closing_the_device_closes_the_newest_first() -> None:
    device = await aiordma.open_device("emulated:mlx5_0")
    pds = [await devx.create_object(device, devx.AllocPdIn()) for _ in range(3)]
    keys = [await devx.create_object(device, mkey_command(pd.out.pd)) for pd in pds]
    channel = await devx.open_command_channel(device)
    await device.close()
    assert all(thing.closed for thing in [*pds, *keys, channel])
    with pytest.raises(ClosedError):
        devx.create_object(device, devx.AllocPdIn())


async def test_a_forgotten_object_warns(device: Device) -> None:
    made = await devx.create_object(device, devx.AllocPdIn())
    with pytest.warns(ResourceWarning, match="unclosed <DevxObject of ALLOC_PD>"):
        del made
        gc.collect()
    await eventually(lambda: not emulator.object_counts("mlx5_0")["devx"])


async def test_a_cancelled_creation_leaves_nothing(device: Device) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await devx.create_object(device, devx.AllocPdIn())
    await eventually(lambda: not device._making)
    await eventually(lambda: not device.statistics().get("devx_objects"))
    assert not emulator.object_counts("mlx5_0")["devx"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"memory_key_mkey_entry.pd": 0xFFFFFF}, devx.Status.BAD_RES),
        ({"memory_key_mkey_entry.translations_octword_size": 0}, devx.Status.BAD_PARAM),
        ({"memory_key_mkey_entry.access_mode_1_0": devx.AccessMode.KSM}, devx.Status.BAD_PARAM),
        ({"memory_key_mkey_entry.access_mode_1_0": devx.AccessMode.MTT}, devx.Status.BAD_RES),
        ({"memory_key_mkey_entry.bsf_en": 1}, devx.Status.BAD_PARAM),
        ({"translations_octword_actual_size": 1}, devx.Status.BAD_PARAM),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_keys_that_the_firmware_refuses(device: Device, change: dict[str, int], status: devx.Status) -> None:
    command = mkey_command(await _pdn(device))
    for name, value in change.items():
        command[name] = value
    with pytest.raises(DevxError) as caught:
        await devx.create_object(device, command)
    assert caught.value.status == status
    assert caught.value.opcode == devx.Opcode.CREATE_MKEY
    assert caught.value.syndrome
    assert emulator.object_counts("mlx5_0")["mkey"] == 0


async def test_commands_that_create_nothing_or_nothing_known(device: Device) -> None:
    with pytest.raises(VerbsError) as caught:
        await devx.create_object(device, devx.QueryQpIn())
    assert (caught.value.errno, type(caught.value)) == (errno.EINVAL, VerbsError)
    general = devx.CreateGeneralObjectIn(obj_type=devx.ObjectType.MATCH_DEFINER)
    with pytest.raises(DevxError) as refused:
        await devx.create_object(device, general)
    assert refused.value.status == devx.Status.BAD_OP
    assert "CREATE_GENERAL_OBJECT" in str(refused.value)


# ---------------------------------------------------------------- general commands


async def test_capabilities(device: Device) -> None:
    caps = await devx.query_hca_cap(device)
    assert (caps.port_type, caps.num_ports, caps.rc, caps.roce) == (1, 1, 1, 1)
    assert 1 << caps.log_max_qp == device.attributes.max_qp
    assert 1 << caps.log_max_ra_req_qp == device.max_qp_rd_atom
    assert caps.dma_mmo_qp == 1
    assert caps.crypto == caps.sho == caps.tag_matching == 0
    assert await devx.query_hca_cap(device, maximum=True) == caps
    atomic = await devx.query_hca_cap(device, devx.AtomicCap, devx.CapKind.ATOMIC)
    assert (atomic.atomic_operations, atomic.atomic_size_qp) == (3, 8)
    roce = await devx.query_hca_cap(device, devx.RoceCap, devx.CapKind.ROCE)
    assert roce.r_roce_dest_udp_port == 4791
    with pytest.raises(DevxError) as caught:
        await devx.query_hca_cap(device, devx.HcaCap, devx.CapKind.CRYPTO)
    assert caught.value.status == devx.Status.BAD_PARAM


async def test_general_commands(device: Device) -> None:
    out = await devx.general_command(device, devx.QueryIssiIn())
    assert out.current_issi == 1
    assert await devx.general_command(device, b"\x08\x0d" + bytes(14), 16) == bytes(16)  # NOP
    with pytest.raises(VerbsError) as caught:  # the kernel has other ways for this one
        await devx.general_command(device, devx.QueryQpIn())
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(DevxError) as refused:  # QUERY_LAG: allowed, and unknown to this firmware
        await devx.general_command(device, b"\x08\x42" + bytes(14))
    assert refused.value.status == devx.Status.BAD_OP


async def test_buffers_that_are_too_short(device: Device) -> None:
    async with device.create_qp() as qp:
        with pytest.raises(UsageError, match="at least 16 bytes"):
            devx.general_command(device, b"\x01\x00")
        with pytest.raises(UsageError, match="QUERY_QP needs an output of 272"):
            devx.qp_query(qp, devx.QueryQpIn(qpn=qp.qp_num), 271)
        with pytest.raises(UsageError, match="QUERY_ISSI needs an output of 112"):
            devx.general_command(device, bytes(devx.QueryIssiIn()), 16)
        with pytest.raises(UsageError, match="command 0xfff needs an output of 16"):
            devx.general_command(device, b"\x0f\xff" + bytes(14), 15)
        with pytest.raises(UsageError, match="to 65535"):
            devx.qp_query(qp, devx.QueryQpIn(qpn=qp.qp_num), 1 << 16)
        # An input that is too short for its command is for the firmware to refuse.
        with pytest.raises(DevxError) as caught:
            await devx.qp_modify(qp, bytes(devx.Init2RtrQpIn(qpn=qp.qp_num))[:32])
        assert caught.value.status == devx.Status.BAD_INP_LEN


# ---------------------------------------------------------------- asynchronous queries


async def _keys(device: Device, n: int) -> tuple[list[Any], int]:
    pdn = await _pdn(device)
    return [await devx.create_object(device, mkey_command(pdn, 4 + i)) for i in range(n)], pdn


def _question(mkey: Any) -> devx.QueryMkeyIn:
    return devx.QueryMkeyIn(mkey_index=mkey.out.mkey_index)


async def test_many_queries_at_a_time(device: Device) -> None:
    keys, pdn = await _keys(device, 5)
    async with devx.open_command_channel(device) as channel:
        answers = [channel.query(keys[i % 5], _question(keys[i % 5])) for i in range(200)]
        assert channel.pending == 200
        for i, answer in enumerate(answers):
            mkc = (await answer).memory_key_mkey_entry
            assert (mkc.pd, mkc.translations_octword_size) == (pdn, 4 + i % 5)
        assert channel.pending == 0
        raw = await channel.query(keys[0], bytes(_question(keys[0])), 304)
        assert devx.QueryMkeyOut(raw).memory_key_mkey_entry.pd == pdn
    for key in keys:
        await key.close()


async def test_more_answers_than_the_kernel_keeps(device: Device) -> None:
    """It says EAGAIN then: the channel waits for some to be read, and asks again."""
    keys, _ = await _keys(device, 1)
    async with devx.open_command_channel(device) as channel:
        answers = [channel.query(keys[0], bytes(_question(keys[0])), 60000) for _ in range(100)]
        with anyio.fail_after(60):
            for answer in answers:
                assert devx.QueryMkeyOut(await answer).memory_key_mkey_entry.translations_octword_size == 4
    await keys[0].close()


async def test_a_channel_is_a_descriptor(device: Device) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with devx.open_command_channel(device):
            assert len(os.listdir("/proc/self/fd")) > len(before)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_refused_query_fails_alone(device: Device) -> None:
    keys, _ = await _keys(device, 2)
    async with devx.open_command_channel(device) as channel:
        good = channel.query(keys[0], _question(keys[0]))
        with pytest.raises(VerbsError) as caught:  # another object's number: the kernel refuses to send it
            await channel.query(keys[0], _question(keys[1]))
        assert caught.value.errno == errno.EINVAL
        assert (await good).memory_key_mkey_entry.translations_octword_size == 4
        assert channel.pending == 0
    for key in keys:
        await key.close()


async def test_a_cancelled_query_disturbs_nobody(device: Device) -> None:
    keys, _ = await _keys(device, 1)
    async with devx.open_command_channel(device) as channel:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await channel.query(keys[0], _question(keys[0]))
        for _ in range(3):
            assert (await channel.query(keys[0], _question(keys[0]))).memory_key_mkey_entry.umr_en == 1
        assert channel.pending == 0
    await keys[0].close()


async def test_closing_a_channel_answers_everybody(device: Device) -> None:
    keys, _ = await _keys(device, 1)
    channel = await devx.open_command_channel(device)
    answers = [channel.query(keys[0], _question(keys[0])) for _ in range(20)]
    closing = channel.close()
    assert channel.close() is closing
    await closing
    for answer in answers:
        with pytest.raises(ClosedError):
            await answer
    with pytest.raises(ClosedError):
        channel.query(keys[0], _question(keys[0]))
    assert "closed" in repr(channel)
    await keys[0].close()


async def test_closing_the_device_answers_everybody() -> None:
    device = await aiordma.open_device("emulated:mlx5_0")
    keys, _ = await _keys(device, 1)
    channel = await devx.open_command_channel(device)
    answers = [channel.query(keys[0], _question(keys[0])) for _ in range(20)]
    with anyio.fail_after(20):
        await device.close()
        for answer in answers:
            try:
                await answer
            except ClosedError:
                pass


async def test_closing_a_qp_waits_for_its_queries(device: Device) -> None:
    """The structure that libmlx5 looks into must not be freed under it."""
    for _ in range(10):
        qp = await device.create_qp()
        asked = [devx.query_qp(qp) for _ in range(8)]
        closing = qp.close()
        for answer in asked:
            # The QP is being closed meanwhile, which takes it to ERR.
            assert (await answer).state in (devx.QpState.INIT, devx.QpState.ERR)
        await closing
        with pytest.raises(ClosedError):
            devx.query_qp(qp)

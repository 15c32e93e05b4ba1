"""What the firmware refuses is an exception with its reasons (fault F63), and a device without DEVX says so."""

import errno
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pyverbs.cq import CQ
from pyverbs.qp import QP, QPCap, QPInitAttr

import aiordma
from aiordma import Device, DevxError, UnsupportedError, UsageError, VerbsError
from aiordma.mlx5 import devx

pytestmark = pytest.mark.anyio


@pytest.fixture
async def device() -> AsyncIterator[Device]:
    async with aiordma.open_device("emulated:mlx5_0") as device:
        yield device


async def test_a_refused_query_carries_opcode_status_and_syndrome(device: Device) -> None:
    async with device.create_qp() as qp:
        with pytest.raises(DevxError) as caught:
            await devx.qp_query(qp, devx.QueryQpIn(qpn=qp.qp_num, qpc_ext=1), 272)
        error = caught.value
        assert isinstance(error, VerbsError)
        assert error.errno == errno.EREMOTEIO
        assert error.verb == "mlx5dv_devx_qp_query"
        assert (error.opcode, error.opcode_name) == (0x50B, "QUERY_QP")
        assert error.status == devx.Status.BAD_OUTP_LEN
        assert error.status_text.startswith("BAD_OUTP_LEN: ")
        assert error.syndrome != 0
        for part in ("QUERY_QP", "0x50b", "BAD_OUTP_LEN", hex(error.syndrome)):
            assert part in str(error)
        assert (await devx.query_qp(qp)).state is devx.QpState.INIT


def _rtr(device: Device, **qpc: Any) -> devx.Init2RtrQpIn:
    gid = device.gid
    assert gid is not None
    path = {"rgid_rip": gid.raw, "src_addr_index": gid.index, "vhca_port_num": 1}
    return devx.Init2RtrQpIn(qpc={"mtu": 3, "remote_qpn": 1, "primary_address_path": path, **qpc})


async def test_a_refused_change_changes_nothing(device: Device) -> None:
    async with device.create_qp() as qp:
        before = await devx.query_qp(qp)
        wrong: list[tuple[Any, devx.Status]] = [
            (devx.Rst2InitQpIn(), devx.Status.BAD_QP_STATE),
            (devx.Rtr2RtsQpIn(), devx.Status.BAD_QP_STATE),
            (devx.Rts2RtsQpIn(), devx.Status.BAD_QP_STATE),
            (devx.SqErr2RtsQpIn(), devx.Status.BAD_QP_STATE),
            (devx.Init2InitQpIn(opt_param_mask=devx.OptParam.Q_KEY), devx.Status.BAD_PARAM),
            (devx.Init2InitQpIn(opt_param_mask=devx.OptParam.PKEY_INDEX), None),
            (_rtr(device, mtu=6), devx.Status.BAD_PARAM),
            (_rtr(device, mtu=0), devx.Status.BAD_PARAM),
            (_rtr(device, log_rra_max=7), devx.Status.BAD_PARAM),
            (_rtr(device, primary_address_path={"src_addr_index": 200}), devx.Status.BAD_PARAM),
        ]
        pkey = wrong[5][0]
        pkey.qpc.primary_address_path.pkey_index = 5
        port = devx.Init2InitQpIn(opt_param_mask=devx.OptParam.PRI_PORT)
        port.qpc.primary_address_path.vhca_port_num = 3
        ext = devx.Init2InitQpIn(qpc_ext=1, opt_param_mask_95_32=devx.OptParam32.UDP_SPORT)
        wrong[5] = (pkey, devx.Status.BAD_PARAM)
        for command, status in [*wrong, (port, devx.Status.BAD_PARAM), (ext, devx.Status.BAD_PARAM)]:
            with pytest.raises(DevxError) as caught:
                await devx.modify_qp(qp, command)
            assert caught.value.status == status, command
            assert caught.value.opcode == command.opcode
            assert await devx.query_qp(qp) == before


async def test_what_the_kernel_does_not_pass_on(device: Device) -> None:
    """devx_is_obj_modify_cmd() in mlx5/devx.c knows neither RTS2SQD nor SQD_RTS: EINVAL, and no firmware was asked."""
    async with device.create_qp() as qp:
        for opcode in (0x508, devx.Opcode.SQD_RTS_QP, devx.Opcode.CREATE_QP):
            command = bytes(devx.ToErrQpIn(qpn=qp.qp_num, opcode=opcode))
            with pytest.raises(VerbsError) as caught:
                await devx.qp_modify(qp, command)
            assert (caught.value.errno, type(caught.value)) == (errno.EINVAL, VerbsError)


async def test_what_is_no_verbs_object(device: Device) -> None:
    cq = CQ(device.context, 16)
    qp = QP(device.pd, QPInitAttr(scq=cq, rcq=cq, cap=QPCap()))
    with pytest.raises(UsageError, match="device="):
        devx.query_qp(qp)
    with pytest.raises(UsageError, match="a CQ is needed, not a QP"):
        devx.query_cq(qp, device=device)
    with pytest.raises(UsageError, match="no verbs object"):
        devx.query_qp(object(), device=device)
    with pytest.raises(UsageError, match="a QP is needed, not a SharedReceiveQueue"):
        async with device.create_srq() as srq:
            devx.query_qp(srq)
    with pytest.raises(UsageError, match="a change of a QP, not QueryQpIn"):
        devx.modify_qp(qp, devx.QueryQpIn(), device=device)  # type: ignore[arg-type]
    qp.close()
    cq.close()


async def test_an_object_of_another_device(device: Device) -> None:
    async with aiordma.open_device("emulated:mlx5_1") as other:
        cq = CQ(other.context, 16)
        with pytest.raises(aiordma.ProviderError):
            devx.query_cq(cq, device=device)
        cq.close()


async def test_a_closed_device() -> None:
    device = await aiordma.open_device("emulated:mlx5_0")
    await device.close()
    for call in (devx.query_hca_cap, devx.open_command_channel, lambda d: devx.create_object(d, devx.AllocPdIn())):
        with pytest.raises(aiordma.ClosedError):
            call(device)


async def test_a_device_without_devx_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another provider's device: nothing of libmlx5 is called."""
    async with device.create_qp() as qp:
        monkeypatch.setitem(device._facts, "mlx5", None)
        calls: list[Callable[[], Any]] = [
            lambda: devx.query_qp(qp),
            lambda: devx.qp_query(qp, devx.QueryQpIn(qpn=qp.qp_num), 272),
            lambda: devx.query_hca_cap(device),
            lambda: devx.general_command(device, devx.QueryIssiIn()),
            lambda: devx.create_object(device, devx.AllocPdIn()),
            lambda: devx.open_command_channel(device),
        ]
        for call in calls:
            with pytest.raises(UnsupportedError, match=r"mlx5_0 does not support .*DEVX") as caught:
                call()
            assert caught.value.device == "mlx5_0"


PROGRAM = """
    import asyncio, sys
    import aiordma
    from aiordma import emulator
    from aiordma.emulator import EmulatedDevice, Limits
    from aiordma.mlx5 import devx

    emulator.attach([EmulatedDevice(name="mlx5_0", limits=Limits(**eval(sys.argv[1])))])

    async def main():
        async with aiordma.open_device("emulated") as device, device.create_qp() as qp:
            await run(device, qp)

    async def run(device, qp):
"""


def _run(run_python: Callable[..., Any], limits: str, body: str) -> str:
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    import textwrap

    program = textwrap.dedent(PROGRAM) + lines + "\nasyncio.run(main())\n"
    return str(run_python(program, limits).stdout)


def test_devx_switched_off(run_python: Callable[..., Any]) -> None:
    """Everything else works; libmlx5 opens the device without."""
    out = _run(
        run_python,
        "dict(devx=False)",
        """
print(device.mlx5)
try:
    devx.query_qp(qp)
except aiordma.UnsupportedError as e:
    print(e.device, e.capability)
mr = await device.reg_mr(bytearray(16))
async with device.create_qp() as other:
    await qp.connect(other.info)
    await other.connect(qp.info)
    await qp.rdma_write(mr[:8], mr.remote()[8:])
print("written")
""",
    )
    assert out.split() == ["None", "mlx5_0", "DEVX", "written"]


def test_umr_switched_off(run_python: Callable[..., Any]) -> None:
    out = _run(
        run_python,
        "dict(umr=False)",
        """
caps = await devx.query_hca_cap(device)
print(caps.log_max_klm_list_size, caps.umr_indirect_mkey_disabled)
pd = (await devx.query_qp(qp)).pd
mkc = dict(access_mode_1_0=devx.AccessMode.KLMS, umr_en=1, free=1, pd=pd, translations_octword_size=4)
try:
    await devx.create_object(device, devx.CreateMkeyIn(memory_key_mkey_entry=mkc))
except devx.DevxError as e:
    print(e.opcode_name, e.status)
""",
    )
    assert out.split() == ["0", "1", "CREATE_MKEY", "3"]


def test_memcpy_switched_off(run_python: Callable[..., Any]) -> None:
    out = _run(
        run_python,
        "dict(max_wr_memcpy_length=0)",
        """
caps = await devx.query_hca_cap(device)
print(caps.dma_mmo_qp, caps.log_dma_mmo_max_size)
mmo = devx.Init2InitQpIn(qpc_ext=1, opt_param_mask_95_32=devx.OptParam32.INIT2INIT_MMO)
mmo.qpc_data_ext.mmo = 1
try:
    await devx.modify_qp(qp, mmo)
except devx.DevxError as e:
    print(e.opcode_name, e.status)
""",
    )
    assert out.split() == ["0", "0", "INIT2INIT_QP", "3"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [("dict(dc=False)", ["0", "0", "0"]), ("dict(log_max_dci_streams=0)", ["1", "0", "0"])],
)
def test_dc_and_its_streams_switched_off(run_python: Callable[..., Any], limits: str, expected: list[str]) -> None:
    out = _run(
        run_python,
        limits,
        """
caps = await devx.query_hca_cap(device)
print(caps.dct, caps.log_max_dci_stream_channels, caps.log_max_dci_errored_streams)
""",
    )
    assert out.split() == expected

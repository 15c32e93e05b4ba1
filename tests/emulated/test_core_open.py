"""Which device is opened: by name, by variable, or the emulated NIC where there is none, never in another's place."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import DeviceNotFoundError, GidError, GidType, UsageError

NO_HARDWARE = pytest.mark.skipif(
    any(Path("/sys/class/infiniband_verbs").glob("uverbs*")), reason="this machine has RDMA devices of its own"
)
Run = Callable[..., Any]

# Opens what the arguments say in a process of its own, and tells what came of it.
OPEN = """
    import asyncio, logging, sys
    import aiordma
    from aiordma import emulator

    logging.basicConfig(stream=sys.stdout, format="LOG %(levelname)s %(message)s")

    async def main():
        try:
            async with aiordma.open_device(*sys.argv[1:]) as device:
                print("OPEN", device.name, device.is_emulated)
        except aiordma.RdmaError as e:
            print("ERROR", type(e).__name__, e)
        print("ATTACHED", emulator.is_attached())

    print("LISTED", [info.name for info in aiordma.list_devices()], emulator.is_attached())
    asyncio.run(main())
"""


def _opened(run: Run, *arguments: str, variable: str = "") -> list[str]:
    lines: list[str] = run(OPEN, *arguments, AIORDMA_DEVICE=variable).stdout.splitlines()
    assert lines[0] == "LISTED [] False", "asking for devices attaches nothing"
    return lines[1:]


@NO_HARDWARE
def test_without_hardware_and_name_it_is_the_emulated_nic_and_the_log_says_so(run_python: Run) -> None:
    log, opened, attached = _opened(run_python)
    assert log.startswith("LOG WARNING no RDMA device on this machine")
    assert "emulated" in log
    assert "AIORDMA_DEVICE" in log
    assert opened == "OPEN mlx5_0 True"
    assert attached == "ATTACHED True"


@NO_HARDWARE
@pytest.mark.parametrize("how", ["argument", "variable"])
@pytest.mark.parametrize("name", ["mlx5_0", "rxe0", "mlx5_7", "Emulated", " emulated", "emulate"])
def test_a_name_that_is_not_there_is_an_error_and_nothing_is_emulated_in_its_place(
    run_python: Run, how: str, name: str
) -> None:
    lines = _opened(run_python, *([name] if how == "argument" else []), variable=name if how == "variable" else "")
    assert lines[0].startswith("ERROR DeviceNotFoundError")
    assert repr(name) in lines[0]
    assert '"emulated"' in lines[0]
    assert lines[1:] == ["ATTACHED False"]


@NO_HARDWARE
@pytest.mark.parametrize("how", ["argument", "variable"])
@pytest.mark.parametrize("name", ["emulated", "emulated:mlx5_0", "emulated:"])
def test_the_emulated_nic_asked_for_is_opened_without_a_warning(run_python: Run, how: str, name: str) -> None:
    lines = _opened(run_python, *([name] if how == "argument" else []), variable=name if how == "variable" else "")
    assert lines == ["OPEN mlx5_0 True", "ATTACHED True"]


@NO_HARDWARE
def test_an_argument_goes_before_the_variable(run_python: Run) -> None:
    assert _opened(run_python, "emulated", variable="mlx5_9") == ["OPEN mlx5_0 True", "ATTACHED True"]
    assert _opened(run_python, "mlx5_9", variable="emulated")[0].startswith("ERROR DeviceNotFoundError")


@NO_HARDWARE
def test_an_emulated_device_that_is_not_there_is_an_error_with_those_that_are(run_python: Run) -> None:
    line = _opened(run_python, "emulated:mlx5_3")[0]
    assert line.startswith("ERROR DeviceNotFoundError")
    assert "'mlx5_3'" in line
    assert "there are: mlx5_0" in line


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["mlx5_0", "mlx5_1", "emulated:mlx5_1", "mlx5_small"])
async def test_once_attached_the_emulated_devices_are_opened_by_name(name: str) -> None:
    async with aiordma.open_device(name) as device:
        assert device.name == name.rpartition(":")[2]
        assert device.is_emulated
        assert not device.closed
        assert not device.lost
        assert device.name in device.describe()
        assert "emulated" in device.describe()
        assert device.name in repr(device)


@pytest.mark.anyio
async def test_devices_are_listed_with_guids_of_their_own() -> None:
    found = aiordma.list_devices()
    assert [info.name for info in found] == ["mlx5_0", "mlx5_1", "mlx5_small"]
    assert all(info.is_emulated for info in found)
    assert len({info.guid for info in found}) == 3
    assert all(int(info.guid.replace(":", ""), 16) for info in found)


@pytest.mark.anyio
async def test_a_device_opened_without_a_name_is_the_first_and_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIORDMA_DEVICE", raising=False)
    with caplog.at_level(logging.WARNING):
        async with aiordma.open_device() as device:
            assert device.name == "mlx5_0"
        monkeypatch.setenv("AIORDMA_DEVICE", "")
        async with aiordma.open_device() as device:
            assert device.name == "mlx5_0"
        monkeypatch.setenv("AIORDMA_DEVICE", "emulated:mlx5_1")
        async with aiordma.open_device() as device:
            assert device.name == "mlx5_1"
    assert caplog.records == []


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["mlx5_9", "emulated:mlx5_9", "", "emulated:emulated", "MLX5_0", "mlx5_0\0"])
async def test_another_name_is_not_found(name: str) -> None:
    with pytest.raises(DeviceNotFoundError, match="mlx5_0, mlx5_1"):
        await aiordma.open_device(name)


@pytest.mark.anyio
@pytest.mark.parametrize("name", [5, b"mlx5_0", ["mlx5_0"]])
async def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="name"):
        await aiordma.open_device(name)


@pytest.mark.anyio
@pytest.mark.parametrize("port", [0, 2, -1, 300])
async def test_a_port_that_is_not_there_is_refused_with_those_that_are(port: int) -> None:
    with pytest.raises(UsageError, match="ports 1 to 1"):
        await aiordma.open_device("mlx5_0", port=port)


@pytest.mark.anyio
@pytest.mark.parametrize("port", ["1", None, 1.0])
async def test_a_port_that_is_no_number_is_refused(port: Any) -> None:
    with pytest.raises(UsageError, match="port"):
        await aiordma.open_device("mlx5_0", port=port)


@pytest.mark.anyio
async def test_a_port_that_is_down_is_opened_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with aiordma.open_device("mlx5_small", port=2) as device:
        assert device.port == 2
    assert "port 2 is not active" in caplog.text


@pytest.mark.anyio
async def test_the_best_gid_is_used_or_the_one_asked_for() -> None:
    async with aiordma.open_device("mlx5_0") as device:
        assert device.gid is not None
        assert device.gid.type is GidType.ROCE_V2
        table = device.gids
        assert device.gid in table
    for gid in table:
        async with aiordma.open_device("mlx5_0", gid_index=gid.index) as device:
            assert device.gid == gid
            async with device.create_qp() as qp:
                assert (qp.info.gid, qp.info.gid_type) == (gid.raw, gid.type)


@pytest.mark.anyio
@pytest.mark.parametrize("index", [9999, -1, 200])
async def test_a_gid_index_that_is_not_there_shows_the_table_and_closes_the_device(
    index: int, leak_check: None
) -> None:
    with pytest.raises(GidError, match=r"(?s)no GID at index.*RoCE v2"):
        await aiordma.open_device("mlx5_0", gid_index=index)


@pytest.mark.anyio
async def test_every_failed_open_leaves_nothing_open(leak_check: None) -> None:
    for arguments in ({"name": "mlx5_9"}, {"port": 9}, {"gid_index": 999}, {"spin_us": -1}):
        for _ in range(3):
            with pytest.raises(aiordma.RdmaError):
                await aiordma.open_device(**{"name": "mlx5_0", **arguments})


@pytest.mark.anyio
async def test_one_device_may_be_opened_many_times() -> None:
    devices = [await aiordma.open_device("mlx5_0") for _ in range(10)]
    for device in reversed(devices):
        await device.close()


@pytest.mark.anyio
async def test_what_a_device_says_of_itself_agrees_with_pyverbs() -> None:
    async with aiordma.open_device("mlx5_0") as device:
        attributes = device.context.query_device()
        port = device.context.query_port(1)
        assert device.max_message == port.max_msg_sz == 1 << 30
        assert device.active_mtu in (1024, 2048, 4096)
        assert device.max_qp_rd_atom == attributes.max_qp_rd_atom
        assert device.max_qp_init_rd_atom == attributes.max_qp_init_rd_atom
        assert device.attributes.fw_version == attributes.fw_version
        assert device.lid == port.lid
        assert device.remote_access == aiordma.Access.REMOTE

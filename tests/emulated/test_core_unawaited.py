"""Control operations that nobody awaits: they happen, and an error of one doesn't get lost."""

from typing import Any

import anyio
import pytest
from emulated.core import DEVICE, eventually, reported, settle

from aiordma import Device, VerbsError, open_device
from aiordma._offload import Pending
from aiordma.emulator import faults

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leak_check")]

EINVAL = 22


async def ended(operation: Pending[Any]) -> None:
    """Without awaiting it."""
    await eventually(lambda: operation.done)


async def test_the_error_of_an_operation_that_nobody_awaited_is_reported() -> None:
    async with open_device(DEVICE) as device:
        with reported() as reports:
            qp = await device.create_qp()
            with faults.verb("modify_qp", EINVAL):
                connecting = qp.connect(qp.info)
                await ended(connecting)
            assert not reports.found  # somebody may await it yet
            del connecting
            await settle()
            assert len(reports.found) == 1
            await qp.close()
        assert [type(found) for found in reports.found] == [VerbsError]
        assert "ibv_modify_qp" in str(reports.found[0])


async def test_who_has_heard_of_the_error_is_not_told_again() -> None:
    async def awaited(device: Device) -> None:
        with faults.verb("create_qp", 12), pytest.raises(VerbsError):
            await device.create_qp()

    async def awaited_late(device: Device) -> None:
        with faults.verb("create_qp", 12):
            making = device.create_qp()
            await ended(making)
        with pytest.raises(VerbsError):
            await making

    async def looked_at(device: Device) -> None:
        with faults.verb("create_qp", 12):
            making = device.create_qp()
            await ended(making)
        with pytest.raises(VerbsError):
            making.result()

    async def given_up(device: Device) -> None:
        with faults.verb("create_qp", 12, delay=0.1):
            making = device.create_qp()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await making
            assert scope.cancelled_caught
            await ended(making)

    async with open_device(DEVICE) as device:
        for case in (awaited, awaited_late, looked_at, given_up):
            with reported() as reports:
                await case(device)
                await settle()
            assert reports.found == [], case.__name__


async def test_what_ends_by_closing_here_is_no_error_to_report() -> None:
    async with open_device(DEVICE) as device, open_device(DEVICE) as other, other.create_qp() as there:
        with reported() as reports:
            with faults.verb("modify_qp", delay=0.02):
                qp = await device.create_qp()
                connecting = qp.connect(there.info)
                await qp.close()
                await ended(connecting)
            del qp, connecting
            await settle()
        assert reports.found == []


async def test_what_goes_well_is_not_reported() -> None:
    async with open_device(DEVICE) as device:
        with reported() as reports:
            making = device.create_qp()
            await ended(making)
            making.result().close()
            del making
            await settle()
        assert reports.found == []

"""For tests of programs that use aiordma: what the pytest plugin's fixtures are made of, for use without pytest too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiordma import emulator
from aiordma._opening import DEVICE_VARIABLE, EMULATED, list_devices
from aiordma.device import Device
from aiordma.qp import QueuePair

__all__ = ["Ledger", "RdmaPair", "connected_pair", "device_name", "is_emulated_name", "open_objects"]

#: What an open aiordma Device has none of by itself.
_COUNTED = ("mr", "mw", "mkey", "ah", "qp", "srq", "xrcd", "devx", "umem", "wq", "rwq_ind_tbl", "dm", "var", "pp")


@dataclass(frozen=True, slots=True)
class RdmaPair:
    """Two connected RC queue pairs of one device. ``a, b = pair``."""

    a: QueuePair
    b: QueuePair

    @property
    def device(self) -> Device:
        """The device of both."""
        return self.a.device

    def __iter__(self) -> Iterator[QueuePair]:
        return iter((self.a, self.b))


@contextlib.asynccontextmanager
async def connected_pair(device: Device, **config: Any) -> AsyncIterator[RdmaPair]:
    """Two queue pairs of a device, connected with each other, closed at the end.

    ``config``: fields of :class:`aiordma.QPConfig`, for both.
    """
    async with device.create_qp(**config) as a, device.create_qp(**config) as b:
        await a.connect(b.info)
        await b.connect(a.info)
        yield RdmaPair(a, b)


def device_name() -> str:
    """What tests open: the device that the environment variable AIORDMA_DEVICE names, else ``"emulated"``."""
    return os.environ.get(DEVICE_VARIABLE) or EMULATED


def is_emulated_name(name: str) -> bool:
    """Tell whether :func:`aiordma.open_device` opens an emulated device by this name."""
    return name.partition(":")[0] == EMULATED or emulator.is_attached()


def open_objects(device: Device) -> list[str]:
    """What of an open device's objects wasn't closed: queue pairs, regions and so on, each as text."""
    return sorted(repr(child) for child in device.objects() if not child.closed)


class Ledger:
    """Counts the verbs objects on the emulated devices, whoever made them: what is there more at the end was left over."""

    def __init__(self) -> None:
        self._before = self._count()

    @staticmethod
    def _count() -> Mapping[str, Mapping[str, int]]:
        if not emulator.is_attached():
            return {}
        return {info.name: emulator.object_counts(info.name) for info in list_devices()}

    def left_over(self, device: str | None = None) -> list[str]:
        """What there is more than at the beginning, of one device or of all, as ``"mlx5_0: 2 mr"``."""
        found = []
        for name, counts in self._count().items():
            if device is not None and name != device:
                continue
            before = self._before.get(name, {})
            for kind in _COUNTED:
                more = counts[kind] - before.get(kind, 0)
                if more > 0:
                    found.append(f"{name}: {more} {kind}")
        return found

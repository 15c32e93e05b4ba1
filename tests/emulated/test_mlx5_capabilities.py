"""Devices that lack something: UnsupportedError says which device and what."""

from typing import Any

import pytest

PROGRAM = """
    import sys
    import anyio
    import aiordma
    from aiordma import UnsupportedError, emulator, mlx5

    backend, name, value, *expected = sys.argv[1:]
    limits = emulator.Limits(**{name: int(value)})
    emulator.attach([emulator.EmulatedDevice(name="mlx5_0", limits=limits)])

    async def refused(what, make):
        try:
            await make()
        except UnsupportedError as e:
            assert "mlx5_0" in str(e), e
            for text in expected:
                assert text in str(e), e
        else:
            raise SystemExit(f"{what} was made")

    async def main():
        async with aiordma.open_device() as device, device.create_srq(4) as srq:
            made = {
                "mkey": lambda: mlx5.create_mkey(device, 4),
                "umr qp": lambda: mlx5.create_qp(device, max_umr_entries=4),
                "memcpy qp": lambda: mlx5.create_qp(device, memcpy=True),
                "engine": lambda: mlx5.create_dma_engine(device),
                "raw qp": lambda: mlx5.create_qp(device, raw_wqe=True),
                "target": lambda: mlx5.create_dc_target(device, srq),
                "initiator": lambda: mlx5.create_dc_initiator(device),
                "streams": lambda: mlx5.create_dc_initiator(device, log_streams=1),
                "pool": lambda: mlx5.create_dci_pool(device, 1),
                "stream pool": lambda: mlx5.create_dci_pool(device, 1, log_streams=1),
            }
            lacking = LACKING[name]
            for what, make in made.items():
                if what in lacking:
                    await refused(what, make)
                else:
                    thing = await make()
                    await thing.close()
            # And what everybody has works.
            async with device.create_qp() as a, device.create_qp() as b, device.reg_mr(bytearray(8)) as mr:
                await a.connect(b.info)
                await b.connect(a.info)
                await a.rdma_write(mr, mr.remote())
            assert emulator.object_counts("mlx5_0").get("qp", 0) == 0, emulator.object_counts("mlx5_0")

    LACKING = {
        "umr": ["mkey", "umr qp"],
        "dc": ["target", "initiator", "streams", "pool", "stream pool"],
        "devx": ["mkey", "umr qp", "memcpy qp", "engine", "raw qp", "target", "initiator", "streams", "pool", "stream pool"],
        "max_wr_memcpy_length": ["memcpy qp", "engine"],
    }
    anyio.run(main, backend=backend)
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("umr", ["UMR", "umr_indirect_mkey_disabled"]),
        ("dc", ["DC"]),
        ("devx", ["DEVX"]),
        ("max_wr_memcpy_length", ["DMA memcpy", "max_wr_memcpy_length is 0"]),
    ],
)
def test_it_says_what_the_device_lacks(backend: str, name: str, expected: list[str], run_python: Any) -> None:
    run_python(PROGRAM, backend, name, "0", *expected)

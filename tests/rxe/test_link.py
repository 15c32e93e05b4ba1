"""The VM's two devices are what the other tests take them for: their packets cross a link, which can be cut."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from emulated.core import DEVICE, PEER_DEVICE, Pair, connected, open_pair, why_uncounted

import aiordma
from aiordma import CompletionError, GidType, LocalQpOperationError, QPConfig, RetryExceededError, WrFlushError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.environ.get("AIORDMA_IN_VM") != "rxe", reason="is about the VM of tests/rxe/vm/run.py"),
]

LINK = Path(__file__).parent / "vm" / "link.sh"
#: Two seconds: long enough for a VM that a busy machine stops for a while. With 7 retries, the default, rxe never gives up.
GIVES_UP = QPConfig(timeout=16, retry_cnt=6)


def packets(netdev: str = "veth0") -> tuple[int, int]:
    """Packets that a netdev sent and received."""
    folder = Path("/sys/class/net", netdev, "statistics")
    return int((folder / "tx_packets").read_text()), int((folder / "rx_packets").read_text())


def cut(netdev: str) -> None:
    subprocess.run(["ip", "link", "set", netdev, "down"], check=True, timeout=100)


def mend() -> None:
    subprocess.run([LINK, "restore"], check=True, timeout=100)


async def test_the_devices_are_the_kernels() -> None:
    assert [info.name for info in aiordma.list_devices()] == ["rxe0", "rxe1"]
    assert (DEVICE, PEER_DEVICE) == ("rxe0", "rxe1")
    assert why_uncounted() == ""
    async with aiordma.open_device() as device:
        assert (device.name, device.is_emulated, device.mlx5) == ("rxe0", False, None)
        # RoCE v2 is all that rxe has; of its GIDs the IPv4 one is taken, not the link-local one of entry 0.
        assert device.gid is not None
        assert {gid.type for gid in device.gids} == {GidType.ROCE_V2}
        assert str(device.gid.address) in ("::ffff:192.0.2.1", "::ffff:c000:201", "192.0.2.1")


OPERATIONS: dict[str, Callable[[Pair], object]] = {
    "write": lambda p: p.a.rdma_write(p.local[:8], p.remote[:8]),
    "read": lambda p: p.a.rdma_read(p.local[:8], p.remote[:8]),
    "atomic": lambda p: p.a.atomic_fetch_add(p.local[:8], p.remote[:8], 1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_each_operation_between_the_devices_crosses_the_link_and_comes_back(operation: str) -> None:
    async with open_pair() as pair:
        await pair.check()  # the neighbours know each other by now
        sent, received = packets()
        for _ in range(20):
            await OPERATIONS[operation](pair)  # type: ignore[misc]
        sent_then, received_then = packets()
        # A request, and an acknowledgement or a response, each a packet.
        assert sent_then - sent >= 20
        assert received_then - received >= 20


async def test_a_long_message_crosses_in_packets_of_the_path_mtu() -> None:
    async with open_pair(1 << 20) as pair:
        await pair.check()
        sent, _ = packets()
        await pair.a.rdma_write(pair.local[: 1 << 20], pair.remote[: 1 << 20])
        assert packets()[0] - sent >= (1 << 20) // pair.device.active_mtu


async def test_one_device_talks_to_itself_without_the_link() -> None:
    async with aiordma.open_device(DEVICE) as device, connected(device) as pair:
        await pair.check()
        before = packets()
        for _ in range(20):
            await pair.a.rdma_write(pair.local[:8], pair.remote[:8])
        assert packets()[0] - before[0] < 20


@pytest.mark.parametrize(
    ("netdev", "error"),
    [
        # 6.12's rxe sees that this end has no carrier then, and only flushes what it can't send (docs/soft-roce.md).
        pytest.param("veth1", (RetryExceededError, WrFlushError), id="at the peer"),
        # With its own netdev down there is no route, which rxe answers at once, in its own way (docs/soft-roce.md).
        pytest.param("veth0", (LocalQpOperationError, WrFlushError), id="here"),
    ],
)
async def test_a_link_that_is_cut_ends_operations_and_works_again_for_new_qps(
    netdev: str, error: tuple[type[CompletionError], ...]
) -> None:
    async with open_pair(timeout=GIVES_UP.timeout, retry_cnt=GIVES_UP.retry_cnt) as pair:
        await pair.check()
        cut(netdev)
        try:
            with anyio.fail_after(60), pytest.raises(error):
                await pair.a.rdma_write(pair.local[:8], pair.remote[:8])
            assert pair.a.state == "ERR"
            with pytest.raises(WrFlushError):
                await pair.a.rdma_write(pair.local[:8], pair.remote[:8])
        finally:
            mend()
    async with open_pair() as pair:
        await pair.check()

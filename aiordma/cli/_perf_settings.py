"""What `aiordma perf` was asked to do, checked before anything is opened."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

__all__ = ["ALL_SIZES", "DEFAULT_PORT", "MAX_QPS", "MAX_SIZE", "Kind", "Loop", "QpType", "Settings"]

DEFAULT_PORT = 18515  # perftest's
MAX_SIZE = 1 << 30
MAX_QPS = 1024
ALL_SIZES = tuple(1 << power for power in range(1, 24))  # perftest's -a


class Kind(enum.StrEnum):
    """What is measured."""

    WRITE_LAT = "write-lat"
    WRITE_BW = "write-bw"
    READ_LAT = "read-lat"
    READ_BW = "read-bw"
    SEND_LAT = "send-lat"
    SEND_BW = "send-bw"
    ATOMIC_LAT = "atomic-lat"
    ATOMIC_BW = "atomic-bw"

    @property
    def verb(self) -> str:
        """ "write", "read", "send" or "atomic"."""
        return self.value.partition("-")[0]

    @property
    def is_latency(self) -> bool:
        """Whether one operation at a time is measured."""
        return self.value.endswith("-lat")


class Loop(enum.StrEnum):
    """An event loop."""

    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"
    TRIO = "trio"


class QpType(enum.StrEnum):
    """A transport."""

    RC = "RC"
    UC = "UC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The command line. ``host``: the server's, None on the server. Raises ValueError for what doesn't go together."""

    test: Kind
    host: str | None = None
    port: int = DEFAULT_PORT
    device: str | None = None
    emulated: bool = False
    ib_port: int | None = None
    gid_index: int | None = None
    size: int | None = None
    all_sizes: bool = False
    iterations: int | None = None
    duration: float | None = None
    warmup: int = 100
    qps: int = 1
    qp_type: QpType = QpType.RC
    depth: int = 128
    batch: int = 1
    inline: int | None = None
    loop: Loop = Loop.ASYNCIO
    spin_us: float = 20.0
    verify: bool = False
    rdma_cm: bool = False
    loopback: bool = False
    json: bool = False
    histogram: bool = False

    def __post_init__(self) -> None:
        for wrong, text in (
            (self.loopback and self.host is not None, "--loopback has both ends in this program: leave the host out"),
            (self.size is not None and self.all_sizes, "-s is one size and -a all of them: give one"),
            (self.iterations is not None and self.duration is not None, "-n counts and -D takes time: give one"),
            (self.size is not None and not 1 <= self.size <= MAX_SIZE, f"-s: 1 to {MAX_SIZE} bytes, not {self.size}"),
            (
                self.test.verb == "atomic" and (self.all_sizes or self.size not in (None, 8)),
                "atomics are of 8 bytes: leave -s and -a out",
            ),
            (
                self.qp_type is QpType.UC and self.test.verb in ("read", "atomic"),
                f"UC has no {self.test.verb}s: -c RC, or a test of writes or sends",
            ),
            (
                self.qp_type is QpType.UC and self.test is Kind.SEND_LAT,
                "send-lat waits for answers, which UC may lose: -c RC, or send-bw",
            ),
            (self.qps > 1 and self.test.is_latency, "-q: a latency test is of one QP; use a -bw test"),
            (self.batch > 1 and self.test.is_latency, "-l: a latency test posts one operation; use a -bw test"),
            (self.batch > 1 and self.test.verb == "atomic", "-l: there are no batches of atomics"),
            (self.batch > self.depth, f"-l {self.batch} is more than -t {self.depth}: raise -t"),
            (
                self.inline is not None and self.test.verb in ("read", "atomic"),
                f"-I: only what is sent can be inline, and {self.test.verb}s send nothing",
            ),
            (self.inline is not None and self.batch > 1, "-I and -l: operations of a batch are never inline"),
            (
                self.duration is not None and not 0 < self.duration <= 86400,
                f"-D: more than 0 and at most 86400 seconds, not {self.duration}",
            ),
            (
                self.emulated and self.device is not None and self.device.startswith("emulated"),
                "--emulated and -d: with --emulated, -d is the device's name alone, as mlx5_0",
            ),
        ):
            if wrong:
                raise ValueError(text)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes to measure, in bytes."""
        if self.test.verb == "atomic":
            return (8,)
        if self.all_sizes:
            return ALL_SIZES
        # perftest's: 2 bytes for latency, 64 KiB for bandwidth.
        return (self.size if self.size is not None else 2 if self.test.is_latency else 1 << 16,)

    @property
    def count(self) -> int | None:
        """Operations to measure; None where it's the time that counts."""
        if self.duration is not None:
            return None
        return self.iterations if self.iterations is not None else 1000 if self.test.is_latency else 5000

    @property
    def device_name(self) -> str | None:
        """What open_device() takes."""
        if self.emulated:
            return f"emulated:{self.device}" if self.device else "emulated"
        return self.device

    @property
    def via(self) -> Literal["rdma_cm", "tcp"]:
        """How to connect."""
        return "rdma_cm" if self.rdma_cm else "tcp"

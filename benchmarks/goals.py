"""What aiordma means to reach, and whether it does. Everything is a ratio within one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Keys = Mapping[str, float]
LOOP = "aiordma_uvloop"
KIB = 1 << 10


@dataclass(frozen=True)
class Goal:
    """``value`` is to be at most ``limit``, or at least. None: what it takes wasn't measured."""

    text: str
    value: float | None
    limit: float
    at_least: bool = False
    unit: str = ""
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        reached = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "reached" if reached else "missed"

    def shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f}{self.unit}" if self.unit else f"{value:.2f}"

    @property
    def aim(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.shown(self.limit)}"


def _over(keys: Keys, one: str, other: str) -> float | None:
    if one in keys and other in keys:
        return keys[one] / keys[other]
    return None


def goals(keys: Keys) -> Iterator[Goal]:
    spin, nospin = f"{LOOP}_spin", f"{LOOP}_nospin"
    yield Goal(
        "8 B awaited one at a time, with spin: times C's one at a time (L)", keys.get(f"write_8B.{spin}.ratio"), 2.5
    )
    yield Goal(
        "the same: times PyPI ibverbs' synchronous loop at its best (one request reused)",
        _over(keys, f"write_8B.{spin}.ns", "write_8B.ibverbs.ns"),
        1.0,
    )
    yield Goal(
        "the same: times PyPI ibverbs' synchronous loop with a request for each write",
        _over(keys, f"write_8B.{spin}.ns", "write_8B.ibverbs_new.ns"),
        1.0,
    )
    yield Goal(
        "100 outstanding, each awaited: times C with 100 outstanding (T)",
        keys.get(f"outstanding_100.{spin}.ratio"),
        4.0,
    )
    yield Goal(
        "batches of 64: an operation's time, times T",
        _over(keys, f"batch_64.{spin}.ns", "outstanding_100.c_verbs.ns"),
        1.3,
        detail=_beside("times C's own batches", keys.get(f"batch_64.{spin}.ratio")),
    )
    for size in ("64KiB", "1MiB"):
        text = size.replace("KiB", " KiB").replace("MiB", " MiB")
        yield Goal(
            f"{text}, 16 outstanding: bandwidth, times C's",
            _invert(keys.get(f"bandwidth_{size}.{spin}.ratio")),
            0.97,
            True,
        )
        yield Goal(
            f"{text}, one at a time: bandwidth, times C's", _invert(keys.get(f"write_{size}.{spin}.ratio")), 0.97, True
        )
    for name, text in (
        ("memcpy_64KiB", "64 KiB, one at a time"),
        ("memcpy_64KiB_8", "64 KiB, 8 in flight"),
        ("memcpy_1MiB", "1 MiB, one at a time"),
        ("memcpy_1MiB_8", "1 MiB, 8 in flight"),
    ):
        yield Goal(
            f"copies by the device, {text}: times C's rate", _invert(keys.get(f"{name}.{spin}.ratio")), 0.95, True
        )
    yield Goal(
        "strided (UMR), 64 KiB, 4 outstanding: times C's rate",
        _invert(keys.get(f"strided_64KiB.{spin}.ratio")),
        0.95,
        True,
    )
    for loop in ("asyncio", "uvloop", "trio"):
        yield Goal(
            f"{loop}, no spin, one at a time: times a bare eventfd answered by a thread",
            _over(keys, f"wake.aiordma_{loop}_nospin.ns", f"wake.eventfd_thread_{loop}.ns"),
            1.15,
            detail=_beside(
                "times an eventfd that the loop writes itself, which nobody is waited for",
                _over(keys, f"wake.aiordma_{loop}_nospin.ns", f"wake.eventfd_self_{loop}.ns"),
            ),
        )
    yield Goal(
        "1,000 queue pairs: times the cost with one", _over(keys, f"qps_1000.{spin}.ns", f"qps_1.{spin}.ns"), 1.2
    )
    yield Goal(
        "256 tasks: times the cost with one, with spin",
        _over(keys, f"tasks_256.{spin}.ns", f"tasks_1.{spin}.ns"),
        1.5,
        detail=_beside("without spin", _over(keys, f"tasks_256.{nospin}.ns", f"tasks_1.{nospin}.ns")),
    )
    yield Goal(
        "Python heap for each operation outstanding", keys.get("heap.aiordma_asyncio_spin.bytes"), 300, unit=" bytes"
    )
    rss = next((key for key in keys if key.startswith("rss.") and key.endswith(".growth_bytes")), None)
    if rss is not None:
        ops = keys[rss.replace(".growth_bytes", ".ops")]
        yield Goal(
            f"resident memory: growth over {ops * 0.9:,.0f} operations, after {ops * 0.1:,.0f}",
            keys[rss] / KIB,
            256,
            unit=" KiB",
        )
    yield Goal("import aiordma: more than importing pyverbs", keys.get("import.aiordma.more_ms"), 120, unit=" ms")
    for loop in ("asyncio", "uvloop", "trio"):
        yield Goal(
            f"{loop}, no spin: CPU of the loop's thread while an await waits for nothing",
            keys.get(f"cpu_waiting.aiordma_{loop}_nospin.loop_cpu_percent"),
            5,
            unit="%",
        )


def _invert(value: float | None) -> float | None:
    return None if value is None else 1 / value


def _beside(text: str, value: float | None) -> str:
    return "" if value is None else f"{text}: {value:.2f}"

"""What aiordma means to reach, and whether it does. Everything is a ratio within one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Keys = Mapping[str, float]
#: A ratio of medians, and that of the best rounds: those that were disturbed least.
Pair = tuple[float | None, float | None]
LOOP = "aiordma_uvloop"
KIB = 1 << 10


@dataclass(frozen=True)
class Goal:
    """``value`` is to be at most ``limit``, or at least. None: it wasn't measured. ``best``: by the best rounds."""

    text: str
    value: float | None
    limit: float
    best: float | None = None
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


class Times:
    """Ratios of contenders' times."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def of(self, one: str, other: str) -> Pair:
        """``one`` and ``other``: WORKLOAD.CONTENDER."""
        return self._divide(f"{one}.ns", f"{other}.ns"), self._divide(f"{one}.ns_best", f"{other}.ns_best")

    def _divide(self, one: str, other: str) -> float | None:
        if one in self._keys and other in self._keys:
            return self._keys[one] / self._keys[other]
        return None

    def single(self, one: str, other: str) -> float | None:
        """Of the medians of operations that were timed one by one."""
        return self._divide(f"{one}.p50_ns", f"{other}.p50_ns")

    def growth(self, one: str, first: str) -> Pair:
        """``one``: WORKLOAD.CONTENDER; to the same contender's time in ``first``, a workload that was measured with it,
        round by round."""
        return self._keys.get(f"{one}.to_{first}"), self._keys.get(f"{one}.to_{first}_best")

    def to_reference(self, one: str) -> Pair:
        """To the workload's first contender, round by round."""
        return self._keys.get(f"{one}.ratio"), self._keys.get(f"{one}.ratio_best")


def at_most(text: str, pair: Pair, limit: float, detail: str = "") -> Goal:
    return Goal(text, pair[0], limit, pair[1], detail=detail)


def beside(text: str, value: float | None) -> str:
    return "" if value is None else f"{text}: {value:.2f}"


def goals(keys: Keys) -> Iterator[Goal]:
    spin, nospin = f"{LOOP}_spin", f"{LOOP}_nospin"
    times = Times(keys)
    yield from _small(times, spin)
    yield from _large(times, spin)
    for loop in ("asyncio", "uvloop", "trio"):
        one = f"wake.aiordma_{loop}_nospin"
        yield at_most(
            f"{loop}, no spin, one at a time: times a bare eventfd answered by a thread",
            times.of(one, f"wake.eventfd_thread_{loop}"),
            1.15,
            beside("times an eventfd that the loop writes itself", times.of(one, f"wake.eventfd_self_{loop}")[0]),
        )
    yield at_most(
        "1,000 queue pairs: times the cost with one",
        times.growth(f"qps_1000.{spin}", "qps_1"),
        1.2,
        beside("C's", times.growth("qps_1000.c_verbs", "qps_1")[0]),
    )
    yield at_most(
        "1,000 queue pairs and 10,000 memory regions: times the cost with one of each",
        times.growth(f"regions_10000.{spin}", "qps_1"),
        1.3,
        beside("C's", times.growth("regions_10000.c_verbs", "qps_1")[0]),
    )
    yield at_most(
        "256 tasks, with spin: times the cost with one",
        times.growth(f"tasks_256.{spin}", "tasks_1"),
        1.5,
        beside("without spin", times.growth(f"tasks_256.{nospin}", "tasks_1")[0]),
    )
    yield from _other(keys)


def _small(times: Times, spin: str) -> Iterator[Goal]:
    one = f"write_8B.{spin}"
    yield at_most(
        "8 B awaited one at a time, with spin: times C's one at a time (L)",
        times.to_reference(one),
        2.5,
        beside("by the medians of single writes, each timed", times.single(one, "write_8B.c_verbs")),
    )
    yield at_most(
        "the same: times PyPI ibverbs' synchronous loop, a request for each write",
        times.of(one, "write_8B.ibverbs_new"),
        1.0,
    )
    yield at_most("the same, one request reused for all", times.of(one, "write_8B.ibverbs"), 1.0)
    many = f"outstanding_100.{spin}"
    yield at_most("100 outstanding, each awaited: times C with 100 outstanding (T)", times.to_reference(many), 4.0)
    yield at_most(
        "batches of 64: an operation's time, times T",
        times.of(f"batch_64.{spin}", "outstanding_100.c_verbs"),
        1.3,
        beside("times C's own batches", times.to_reference(f"batch_64.{spin}")[0]),
    )
    yield at_most(
        "the same, one batch posted again and again",
        times.of(f"batch_64.{spin}_reposted", "outstanding_100.c_verbs"),
        1.3,
        beside("times C's own batches", times.to_reference(f"batch_64.{spin}_reposted")[0]),
    )


def _large(times: Times, spin: str) -> Iterator[Goal]:
    """Rates with several in flight, which is what bandwidth means; one at a time is beside each."""
    for size in ("64KiB", "1MiB"):
        text = f"writes of {size.replace('KiB', ' KiB').replace('MiB', ' MiB')}, 16 outstanding: bandwidth, times C's"
        yield _rate(times, text, f"bandwidth_{size}.{spin}", 0.97, f"write_{size}.{spin}")
    for size in ("64KiB", "1MiB"):
        text = (
            f"copies of {size.replace('KiB', ' KiB').replace('MiB', ' MiB')} by the device, 8 in flight: times C's rate"
        )
        yield _rate(times, text, f"memcpy_{size}_8.{spin}", 0.95, f"memcpy_{size}.{spin}")
    yield _rate(times, "strided (UMR), 64 KiB, 4 outstanding: times C's rate", f"strided_64KiB.{spin}", 0.95)


def _rate(times: Times, text: str, many: str, limit: float, single: str | None = None) -> Goal:
    """From times: a rate is the inverse."""
    value, best = (None if time is None else 1 / time for time in times.to_reference(many))
    alone = None if single is None else times.to_reference(single)[0]
    detail = beside("one at a time", None if alone is None else 1 / alone)
    return Goal(text, value, limit, best, at_least=True, detail=detail)


def _other(keys: Keys) -> Iterator[Goal]:
    heap = keys.get("heap.aiordma_asyncio_spin.bytes")
    yield Goal("Python heap for each operation outstanding", heap, 300, unit=" bytes")
    rss = next((key for key in keys if key.startswith("rss.") and key.endswith(".growth_bytes")), None)
    if rss is not None:
        ops = keys[rss.replace(".growth_bytes", ".ops")]
        text = f"resident memory: growth over {ops * 0.9:,.0f} operations, after {ops * 0.1:,.0f}"
        yield Goal(text, keys[rss] / KIB, 256, unit=" KiB")
    more, best = keys.get("import.aiordma.more_ms"), keys.get("import.aiordma.more_ms_best")
    yield Goal("import aiordma: more than importing pyverbs", more, 120, best, unit=" ms")
    for loop in ("asyncio", "uvloop", "trio"):
        value = keys.get(f"cpu_waiting.aiordma_{loop}_nospin.loop_cpu_percent")
        text = f"{loop}, no spin: CPU of the loop's thread while an await waits for nothing"
        yield Goal(text, value, 5, unit="%")

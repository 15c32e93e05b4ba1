"""What `aiordma perf` accepts, how it counts, and how it reports, without a device."""

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.cli._perf_settings import ALL_SIZES, Kind, Loop, QpType, Settings
from aiordma.cli.perf.pattern import first_difference, pattern
from aiordma.cli.perf.report import Outcome, Result, as_json, histogram, line, title
from aiordma.cli.perf.samples import Samples

importlib.import_module("aiordma.cli.perf")
durations = st.integers(0, 1 << 40)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loopback": True, "host": "x"}, "leave the host out"),
        ({"size": 8, "all_sizes": True}, "give one"),
        ({"iterations": 5, "duration": 1.0}, "give one"),
        ({"size": 0}, "-s"),
        ({"size": (1 << 30) + 1}, "-s"),
        ({"test": Kind.ATOMIC_BW, "size": 16}, "8 bytes"),
        ({"test": Kind.ATOMIC_LAT, "all_sizes": True}, "8 bytes"),
        ({"test": Kind.READ_BW, "qp_type": QpType.UC}, "-c RC"),
        ({"test": Kind.ATOMIC_BW, "qp_type": QpType.UC}, "-c RC"),
        ({"test": Kind.SEND_LAT, "qp_type": QpType.UC}, "-c RC"),
        ({"qps": 2}, "-bw"),
        ({"batch": 2}, "-bw"),
        ({"test": Kind.ATOMIC_BW, "batch": 2}, "no batches of atomics"),
        ({"test": Kind.WRITE_BW, "batch": 129}, "raise -t"),
        ({"test": Kind.READ_LAT, "inline": 8}, "-I"),
        ({"test": Kind.WRITE_BW, "inline": 8, "batch": 4}, "-I and -l"),
        ({"duration": 0.0}, "-D"),
        ({"duration": float("nan")}, "-D"),
        ({"emulated": True, "device": "emulated:mlx5_0"}, "--emulated and -d"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_do(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**{"test": Kind.WRITE_LAT, **options})


@pytest.mark.parametrize(
    ("options", "sizes", "count", "device"),
    [
        ({"test": Kind.WRITE_LAT}, (2,), 1000, None),
        ({"test": Kind.SEND_BW}, (65536,), 5000, None),
        ({"test": Kind.ATOMIC_BW}, (8,), 5000, None),
        ({"test": Kind.ATOMIC_LAT, "size": 8}, (8,), 1000, None),
        ({"test": Kind.READ_BW, "all_sizes": True, "iterations": 7}, ALL_SIZES, 7, None),
        ({"test": Kind.READ_BW, "size": 1, "duration": 2.5}, (1,), None, None),
        ({"test": Kind.WRITE_LAT, "emulated": True}, (2,), 1000, "emulated"),
        ({"test": Kind.WRITE_LAT, "emulated": True, "device": "mlx5_1"}, (2,), 1000, "emulated:mlx5_1"),
        ({"test": Kind.WRITE_LAT, "device": "rxe0"}, (2,), 1000, "rxe0"),
    ],
)
def test_defaults(options: dict[str, Any], sizes: tuple[int, ...], count: int | None, device: str | None) -> None:
    settings = Settings(**options)
    assert (settings.sizes, settings.count, settings.device_name) == (sizes, count, device)


# ---------------------------------------------------------------- samples


@given(st.lists(durations, min_size=1, max_size=400), st.sampled_from([3, 16, 1 << 20]))
def test_samples(values: list[int], kept: int) -> None:
    """Exact while all are kept; to within 1% and on the safe side when they're folded."""
    samples = Samples(kept)
    for value in values:
        samples.record(value)
    ranked = sorted(values)
    assert len(samples) == len(values)
    assert (samples.minimum, samples.maximum) == (ranked[0], ranked[-1])
    assert samples.mean == pytest.approx(sum(values) / len(values))
    wanted = (1.0, 50.0, 90.0, 99.0, 99.9, 100.0)
    found = samples.percentiles(wanted)
    for percent in wanted:
        rank = max(1, -(-int(len(values) * percent * 10) // 1000))
        exact = ranked[rank - 1]
        if kept > len(values):
            assert found[percent] == exact
        else:
            assert exact <= found[percent] <= exact * 1.01
    assert list(found.values()) == sorted(found.values())
    assert found[100.0] == ranked[-1]
    assert sum(count for _, count in samples.histogram()) == len(values)


@given(st.lists(durations, min_size=1, max_size=100))
def test_histogram_counts_what_is_below_each_power_of_two(values: list[int]) -> None:
    samples = Samples()
    for value in values:
        samples.record(value)
    for upper, count in samples.histogram():
        assert count == sum(upper >> 1 <= value < upper or (upper == 1 and value == 0) for value in values)
    assert histogram(samples).count("\n") == len(samples.histogram()) - 1


# ---------------------------------------------------------------- patterns


@given(st.integers(1, 300), st.integers(0, 5), st.data())
def test_one_wrong_byte_is_found(size: int, index: int, data: st.DataObject) -> None:
    wanted = pattern(size, index)
    assert len(wanted) == size
    assert first_difference(memoryview(bytearray(wanted)), wanted) is None
    place = data.draw(st.integers(0, size - 1))
    wrong = bytearray(wanted)
    wrong[place] ^= data.draw(st.integers(1, 255))
    assert first_difference(memoryview(wrong), wanted) == place
    assert first_difference(memoryview(wrong)[:place], wanted) == place


def test_qps_have_patterns_of_their_own() -> None:
    assert len({pattern(64, index) for index in range(100)}) == 100


# ---------------------------------------------------------------- reports


def test_lines_and_json() -> None:
    result = Result(64, operations=1000, seconds=0.5, complete=True)
    settings = Settings(test=Kind.WRITE_BW)
    assert line(result, False).split() == ["64", "1000", "0.12", "0.001", "0.002000"]
    result.verified, result.lost = False, 3
    assert line(result, False).endswith("3 lost, WRONG DATA")
    outcome = Outcome([result], "mlx5_0", True, "10.0.0.1:5")
    assert outcome.exit_status == 1
    facts = json.loads(as_json(settings, outcome, "client"))
    assert facts["schema"] == 1
    (found,) = facts["results"]
    assert (found["operations_per_second"], found["bytes_per_second"], found["lost"]) == (1994, 127616, 3)
    assert "latency_us" not in found
    assert "mlx5_0 (emulated)" in title(settings, outcome)


def test_what_was_lost_is_no_bandwidth() -> None:
    result = Result(1 << 20, operations=1000, seconds=1.0, lost=750, complete=True)
    size, operations, mib, gb, million, *lost = line(result, False).split()
    assert (size, operations, " ".join(lost)) == ("1048576", "1000", "750 lost")
    assert (float(mib), float(gb), float(million)) == (250, 2.097, 0.00025)
    assert Result(64, operations=5, seconds=0.0, lost=5).rate == 0


def test_latency_lines() -> None:
    result = Result(2, operations=4, seconds=1.0, complete=True)
    for value in (1000, 2000, 3000, 10000):
        result.samples.record(value)
    assert line(result, True).split() == ["2", "4", "1.00", "4.00", "2.00", "10.00", "10.00", "10.00", "10.00"]
    assert result.facts(True)["latency_us"] == {
        "min": 1.0,
        "avg": 4.0,
        "p50": 2.0,
        "p90": 10.0,
        "p99": 10.0,
        "p99.9": 10.0,
        "max": 10.0,
    }
    empty = Result(2)
    assert "NOT COMPLETE" in line(empty, True)
    assert empty.facts(True)["latency_us"] is None


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(), 0),
        (Outcome(error="no"), 1),
        (Outcome(interrupted=True), 130),
        (Outcome(interrupted=True, error="no"), 130),
        (Outcome([Result(2, verified=True)]), 0),
        (Outcome([Result(2, verified=False)]), 1),
    ],
)
def test_exit_status(outcome: Outcome, status: int) -> None:
    assert outcome.exit_status == status


def test_loops_have_their_usual_names() -> None:
    assert [str(loop) for loop in Loop] == ["asyncio", "uvloop", "trio"]

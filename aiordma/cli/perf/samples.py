"""Durations: recorded cheaply, in bounded memory, and what is reported of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

__all__ = ["PERCENTILES", "Samples"]

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
#: So many are kept as they are; then they're folded into classes, whose width is under 1% of what they hold.
KEPT = 1 << 20
_BITS = 7


class Samples:
    """Durations in nanoseconds. ``record`` them, and ask. Percentiles are exact up to 2**20 samples, then to within 1%."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._recent = array("q")
        self._folded: Counter[int] = Counter()
        self._minimum: int | None = None
        self._maximum = 0
        self._sum = 0
        self._count = 0

    def record(self, duration: int) -> None:
        """Adds one."""
        self._recent.append(duration)
        if len(self._recent) >= self._kept:
            self._note(fold=True)

    def _note(self, fold: bool = False) -> None:
        if not self._recent:
            return
        if fold:
            low, high = min(self._recent), max(self._recent)
            self._minimum = low if self._minimum is None else min(self._minimum, low)
            self._maximum = max(self._maximum, high)
            self._sum += sum(self._recent)
            self._count += len(self._recent)
            self._folded.update(map(_class_of, self._recent))
            self._recent = array("q")

    def __len__(self) -> int:
        return self._count + len(self._recent)

    @property
    def minimum(self) -> int:
        """The shortest."""
        values = [*([] if self._minimum is None else [self._minimum]), *([min(self._recent)] if self._recent else [])]
        return min(values)

    @property
    def maximum(self) -> int:
        """The longest."""
        return max(self._maximum, max(self._recent, default=0))

    @property
    def mean(self) -> float:
        """The average."""
        return (self._sum + sum(self._recent)) / len(self)

    def _counts(self) -> Iterator[tuple[int, int]]:
        """Values and how many there are of each, in order; of a class the value is its upper end."""
        counts = Counter(self._recent)
        for index, count in self._folded.items():
            counts[min(_upper(index), self.maximum)] += count
        yield from sorted(counts.items())

    def percentiles(self, wanted: tuple[float, ...] = PERCENTILES) -> dict[float, int]:
        """For each P the least duration that P% of all don't exceed (nearest rank)."""
        found: dict[float, int] = {}
        left = sorted(wanted)
        seen = 0
        total = len(self)
        for value, count in self._counts():
            seen += count
            while left and seen * 100 >= left[0] * total:
                found[left.pop(0)] = value
        return found

    def histogram(self) -> list[tuple[int, int]]:
        """How many are below each power of two of nanoseconds, and not below the one before."""
        powers: Counter[int] = Counter()
        for value, count in self._counts():
            powers[1 << value.bit_length()] += count
        return sorted(powers.items())


def _class_of(value: int) -> int:
    """Values below 256 are classes of their own; above, each power of two has 128 of them."""
    shift = max(0, value.bit_length() - _BITS - 1)
    return (shift << _BITS) + (value >> shift)


def _upper(index: int) -> int:
    shift = max(0, (index >> _BITS) - 1)
    return ((index - (shift << _BITS) + 1) << shift) - 1

"""Slices of registered and of remote memory: those of a bytes object, except that nothing outside is clipped."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import ClosedError, MemorySlice, RemoteBuffer, UsageError
from aiordma._memory import BufferPin, Region

BASE = 0x7F12_3456_7000

sizes = st.integers(0, 200)
bounds = st.none() | st.integers(-250, 250)


def _region(size: int) -> Region:
    return Region(BASE, size, 11, 12, 7)


def _expected(size: int, start: int | None, stop: int | None) -> tuple[int, int] | None:
    """Offset and length by the model: None where it must be refused."""
    first = 0 if start is None else start + size if start < 0 else start
    last = size if stop is None else stop + size if stop < 0 else stop
    if not 0 <= first <= last <= size:
        return None
    # Inside, it's what Python's own slicing gives.
    assert bytes(size)[start:stop] == bytes(last - first)
    return first, last - first


@given(st.sampled_from(["local", "remote"]), sizes, st.lists(st.tuples(bounds, bounds), max_size=4))
def test_slices_of_slices_are_those_of_bytes_and_never_reach_outside(kind: str, size: int, cuts: list[Any]) -> None:
    part: Any = MemorySlice(_region(size)) if kind == "local" else RemoteBuffer(BASE, size, 12, 7)
    model = (BASE, size)
    for start, stop in cuts:
        expected = _expected(model[1], start, stop)
        if expected is None:
            with pytest.raises(UsageError, match="outside"):
                part[start:stop]
            continue
        part = part[start:stop]
        model = (model[0] + expected[0], expected[1])
        assert (part.addr, part.length, len(part)) == (*model, model[1])
        assert part.rkey == 12
        assert BASE <= part.addr <= part.addr + part.length <= BASE + size


@pytest.mark.parametrize("step", [1, None])
def test_step_one_is_no_step(step: int | None) -> None:
    assert RemoteBuffer(0, 10, 1)[2:8:step].length == 6


@pytest.mark.parametrize("step", [2, -1, 0])
def test_other_steps_are_refused(step: int) -> None:
    for whole in (RemoteBuffer(0, 10, 1), MemorySlice(_region(10))):
        with pytest.raises(UsageError, match="step"):
            whole[::step]


@pytest.mark.parametrize("key", [0, -1, "a", None, (0, 1), slice("a", "b"), slice(0.0, 1.0)])
def test_what_is_no_slice_of_numbers_is_a_type_error(key: Any) -> None:
    for whole in (RemoteBuffer(0, 10, 1), MemorySlice(_region(10))):
        with pytest.raises(TypeError):
            whole[key]


@given(st.integers(-(1 << 70), 1 << 70), st.integers(-(1 << 70), 1 << 70))
def test_huge_bounds_are_refused_and_never_wrap(start: int, stop: int) -> None:
    for whole in (RemoteBuffer(BASE, 64, 1), MemorySlice(_region(64))):
        expected = _expected(64, start, stop) if abs(start) <= 64 and abs(stop) <= 64 else None
        if expected is None:
            with pytest.raises(UsageError):
                whole[start:stop]


def test_an_index_object_is_a_bound() -> None:
    class Three:
        def __index__(self) -> int:
            return 3

    assert RemoteBuffer(BASE, 10, 1)[Three() :].addr == BASE + 3  # type: ignore[misc]


@given(sizes, st.integers(0, 300), st.none() | st.integers(0, 300))
def test_a_slice_can_only_be_made_inside_its_region(size: int, offset: int, length: int | None) -> None:
    fits = offset <= size and (length is None or offset + length <= size)
    if fits:
        part = MemorySlice(_region(size), offset, length)
        assert (part.offset, part.length) == (offset, size - offset if length is None else length)
    else:
        with pytest.raises(UsageError, match="outside"):
            MemorySlice(_region(size), offset, length)


@given(st.binary(min_size=1, max_size=64), bounds, bounds)
def test_view_shows_exactly_the_bytes_of_the_slice(data: bytes, start: int | None, stop: int | None) -> None:
    buffer = bytearray(data)
    held = BufferPin(buffer, True)
    whole = MemorySlice(Region(held.address, held.nbytes, 1, 2, 7, None, held))
    if _expected(len(data), start, stop) is None:
        return
    with whole[start:stop].view() as view:
        assert bytes(view) == data[start:stop]
        assert not view.readonly
        if len(view):
            view[0] ^= 0xFF
    assert bytes(whole.view()[start:stop]) == bytes(buffer[start:stop])


def test_a_closed_region_has_no_view_and_no_remote() -> None:
    region = _region(8)
    region.shut()
    region.release()
    with pytest.raises(ClosedError):
        MemorySlice(region).remote()
    with pytest.raises(ClosedError):
        MemorySlice(region).view()


def test_a_slice_knows_its_keys_and_rights() -> None:
    part = MemorySlice(_region(64))[8:16]
    assert (part.lkey, part.rkey, part.access, part.offset) == (11, 12, 7, 8)
    assert part.remote() == RemoteBuffer(BASE + 8, 8, 12, 7)
    assert "+8" in repr(part)

"""Layouts of strided memory, against numpy's own idea of what a view's bytes are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import UsageError
from aiordma.mlx5.layout import (
    MAX_PIECE,
    MAX_STRIDE,
    Interleaved,
    Limits,
    Nested,
    Node,
    Piece,
    depth,
    extent,
    pieces,
    plan,
    runs,
)

WIDE = Limits(52, 51)


def gathered(node: Node, base: np.ndarray[Any, Any], start: int) -> bytes:
    """The bytes that a layout describes."""
    memory = base.view(np.uint8).reshape(-1)
    return b"".join(memory[start + offset : start + offset + length].tobytes() for offset, length in pieces(node))


def nodes(node: Node) -> Iterator[Node]:
    yield node
    if isinstance(node, Nested):
        for entry in node.entries:
            yield from nodes(entry)


def start_of(view: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> int:
    return int(view.__array_interface__["data"][0] - base.__array_interface__["data"][0])


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """An array of random bytes, and a view of it."""
    dtype = draw(st.sampled_from(["u1", "<u2", "<f4", "<f8", "<c16", "V3"]))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    count = int(np.prod(shape))
    size = np.dtype(dtype).itemsize
    base = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, count * size, dtype=np.uint8)
    view = base.view(dtype).reshape(shape)
    view = view.transpose(draw(st.permutations(range(len(shape)))))
    index = []
    for n in view.shape:
        first = draw(st.integers(0, n - 1))
        last = draw(st.integers(first + 1, n))
        index.append(slice(first, last, draw(st.integers(1, 3))))
    view = view[tuple(index)]
    for axis in range(view.ndim):
        if draw(st.booleans()) and draw(st.booleans()):
            view = np.flip(view, axis)
    if draw(st.booleans()):
        view = np.broadcast_to(view[np.newaxis], (draw(st.integers(1, 3)), *view.shape))
    return base, view


@given(views(), st.integers(2, 52), st.integers(0, 51))
def test_a_plan_describes_what_numpy_copies(
    arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], list_entries: int, interleaved_entries: int
) -> None:
    base, view = arrays
    limits = Limits(list_entries, interleaved_entries)
    node = plan(view.shape, view.strides, view.itemsize, limits)
    assert gathered(node, base, start_of(view, base)) == view.tobytes()
    for part in nodes(node):
        if isinstance(part, Nested):
            assert 1 <= len(part.entries) <= list_entries
        elif isinstance(part, Interleaved):
            assert 1 <= len(part.offsets) <= interleaved_entries
            assert 0 < part.length <= part.stride <= MAX_STRIDE
            assert part.repeat >= 1
        else:
            assert 0 < part.length <= MAX_PIECE
    assert plan(view.shape, view.strides, view.itemsize, Limits(list_entries, interleaved_entries, depth(node))) == node


@given(views())
def test_the_extent_holds_every_byte_and_no_more(
    arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
) -> None:
    _, view = arrays
    low, high = extent(view.shape, view.strides, view.itemsize)
    touched = list(pieces(plan(view.shape, view.strides, view.itemsize, WIDE)))
    assert low == min(offset for offset, _ in touched)
    assert high == max(offset + length for offset, length in touched)


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "expected"),
    [
        ((6,), (1,), 1, (6, [])),
        ((2, 3), (3, 1), 1, (6, [])),  # contiguous, whatever its shape
        ((4, 2), (8, 1), 1, (2, [(4, 8)])),
        ((4, 2, 3), (6, 3, 1), 1, (24, [])),
        ((4, 2, 3), (12, 6, 2), 1, (1, [(24, 2)])),  # dimensions without a gap between them are one
        ((4, 1, 2), (8, 999, 1), 1, (2, [(4, 8)])),  # one of length 1 has no stride that counts
        ((), (), 8, (8, [])),
        ((3,), (-4,), 4, (4, [(3, -4)])),
        ((5,), (0,), 4, (4, [(5, 0)])),
    ],
)
def test_runs(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, expected: tuple[int, list[tuple[int, int]]]
) -> None:
    assert runs(shape, strides, itemsize) == expected


def test_rows_with_a_distance_are_one_interleaved_block() -> None:
    matrix = np.zeros((1000, 100))
    part = matrix[10:500, 3:7]
    assert plan(part.shape, part.strides, 8, WIDE) == Interleaved((0,), 32, 800, 490)


def test_a_block_of_three_dimensions_is_one_interleaved_pattern() -> None:
    cube = np.zeros((10, 6, 8), np.uint8)
    part = cube[:, 1:3, 2:5]
    assert plan(part.shape, part.strides, 1, WIDE) == Interleaved((0, 8), 3, 48, 10)


def test_a_stride_that_the_device_has_no_field_for_is_a_list() -> None:
    wide = np.zeros((5, 70000), np.uint8)
    part = wide[:, :10]
    node = plan(part.shape, part.strides, 1, WIDE)
    assert node == Nested(tuple(Piece(i * 70000, 10) for i in range(5)))


def test_more_pieces_than_a_list_has_entries_are_lists_of_lists() -> None:
    node = plan((10,), (-2,), 1, Limits(4, 0))
    assert isinstance(node, Nested)
    assert [len(entry.entries) for entry in node.entries if isinstance(entry, Nested)] == [4, 4, 2]
    assert list(pieces(node)) == [(-2 * i, 1) for i in range(10)]
    assert depth(node) == 2


def test_more_than_2_gib_are_several_pieces() -> None:
    length = 5 << 30
    node = plan((length,), (1,), 1, WIDE)
    assert isinstance(node, Nested)
    assert all(isinstance(entry, Piece) and entry.length <= MAX_PIECE for entry in node.entries)
    assert sum(n for _, n in pieces(node)) == length


def test_what_no_layout_can_say() -> None:
    with pytest.raises(UsageError, match="no elements"):
        plan((3, 0), (8, 8), 8, WIDE)
    with pytest.raises(UsageError, match="at least 2"):
        plan((3,), (-8,), 8, Limits(1, 0))
    # 1,000 separate pieces in lists of 8: 1,000 / 8 / 8 / 8, four levels.
    assert depth(plan((1000,), (-8,), 8, Limits(8, 0, 4))) == 4
    with pytest.raises(
        UsageError, match=r"takes 4 levels of mkeys, of which the device follows 3.*more entries than 8"
    ):
        plan((1000,), (-8,), 8, Limits(8, 0, 3))

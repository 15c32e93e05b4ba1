"""How strided memory becomes mkey layouts: pure arithmetic, no device.

A numpy view is a run of contiguous bytes repeated in some dimensions. The device knows two layouts: a list of buffers, and
an interleaved pattern (some blocks, each going on by a fixed distance, repeated). :func:`plan` says a view in as few
of them as it can, nesting lists where one layout can't hold it all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiordma.errors import UsageError

__all__ = ["Interleaved", "Limits", "Nested", "Node", "Piece", "depth", "extent", "pieces", "plan", "runs"]

# The strided entry's 16-bit fields, and libmlx5's 31 bits of an entry's length (mlx5dv.h).
MAX_STRIDE = 0xFFFF
MAX_PIECE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes: ``offset`` from the start of the view's memory."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Interleaved:
    """``repeat`` rounds of: ``length`` bytes at each of ``offsets``, which then move on by ``stride``."""

    offsets: tuple[int, ...]
    length: int
    stride: int
    repeat: int


@dataclass(frozen=True, slots=True)
class Nested:
    """A list: its entries one after the other. Entries that aren't pieces need an mkey of their own."""

    entries: tuple[Node, ...]


Node = Piece | Interleaved | Nested


@dataclass(frozen=True, slots=True)
class Limits:
    """Entries that one layout may have, in a list and in an interleaved pattern; how many levels of mkeys, 0 for any."""

    list_entries: int
    interleaved_entries: int
    depth: int = 0


def runs(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """The view as ``(run, dimensions)``: bytes of a contiguous run, and ``(count, stride)`` of what repeats it, outermost
    first. Dimensions that follow each other without a gap are merged."""
    if any(n == 0 for n in shape):
        raise UsageError(f"an array of shape {tuple(shape)} has no elements")
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    run = itemsize
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    merged: list[tuple[int, int]] = []
    for n, s in dims:
        if merged and merged[-1][1] == s * n:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    return run, merged


def plan(shape: Sequence[int], strides: Sequence[int], itemsize: int, limits: Limits) -> Node:
    """The layout of a view whose first element is at offset 0."""
    run, dims = runs(shape, strides, itemsize)
    node = _node(0, run, dims, limits)
    needed = depth(node)
    if limits.depth and needed > limits.depth:
        raise UsageError(
            f"an array of shape {tuple(shape)} with strides {tuple(strides)} takes {needed} levels of mkeys, of which the "
            f"device follows {limits.depth}: make QP and mkey for more entries than {limits.list_entries}, or split it"
        )
    return node


def depth(node: Node) -> int:
    """Levels of mkeys."""
    if isinstance(node, Nested):
        return 1 + max(0 if isinstance(entry, Piece) else depth(entry) for entry in node.entries)
    return 1


def _node(offset: int, run: int, dims: list[tuple[int, int]], limits: Limits) -> Node:
    if not dims:
        if run <= MAX_PIECE:
            return Piece(offset, run)
        return _nest([Piece(offset + at, min(MAX_PIECE, run - at)) for at in range(0, run, MAX_PIECE)], limits)
    (count, stride), rest = dims[0], dims[1:]
    if run <= stride <= MAX_STRIDE and math.prod(n for n, _ in rest) <= limits.interleaved_entries:
        # Rounds over the outermost dimension; everything within is one block each, in order.
        return Interleaved(tuple(_offsets(offset, rest)), run, stride, count)
    return _nest([_node(offset + i * stride, run, rest, limits) for i in range(count)], limits)


def _offsets(offset: int, dims: list[tuple[int, int]]) -> Iterator[int]:
    if not dims:
        yield offset
        return
    count, stride = dims[0]
    for i in range(count):
        yield from _offsets(offset + i * stride, dims[1:])


def _nest(nodes: list[Node], limits: Limits) -> Nested:
    """A list of nodes: lists in it are opened where they fit, and what is too long is cut into lists of lists."""
    entries: list[Node] = []
    for node in nodes:
        entries.extend(node.entries if isinstance(node, Nested) else (node,))
    while len(entries) > limits.list_entries:
        if limits.list_entries < 2:
            raise UsageError(
                f"{len(entries)} pieces, but layouts of {limits.list_entries} entry: make QP and mkey for at least 2"
            )
        size = limits.list_entries
        groups = [entries[i : i + size] for i in range(0, len(entries), size)]
        entries = [group[0] if len(group) == 1 else Nested(tuple(group)) for group in groups]
    return Nested(tuple(entries))


def pieces(node: Node) -> Iterator[tuple[int, int]]:
    """``(offset, length)`` of the bytes that a node describes, in order; what the device does, for tests and checks."""
    if isinstance(node, Piece):
        yield node.offset, node.length
    elif isinstance(node, Interleaved):
        for r in range(node.repeat):
            for offset in node.offsets:
                yield offset + r * node.stride, node.length
    else:
        for entry in node.entries:
            yield from pieces(entry)


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """``(low, high)``: the bytes that a view touches lie in this range of offsets from its first element."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True)) + itemsize
    return low, high

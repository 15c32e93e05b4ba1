"""Where many QPs and regions take turns their objects are in no cache: each cache line of them that a call touches counts."""

from __future__ import annotations

import pytest

import aiordma
from aiordma import mlx5
from aiordma._memory import Region

GC_HEAD = 16  # bytes in front of an object that the garbage collector knows (Include/internal/pycore_gc.h)


@pytest.mark.parametrize("kind", [aiordma.QueuePair, mlx5.Mlx5QueuePair])
def test_calling_a_method_of_a_queue_pair_looks_at_no_dict(kind: type) -> None:
    assert kind.__dictoffset__ == 0
    assert kind.__weakrefoffset__ != 0


def test_a_region_is_as_large_as_what_the_allocator_aligns_to_cache_lines() -> None:
    """128 bytes are two lines; blocks of so many begin 48 bytes into a page of the allocator, and the object 64."""
    assert Region.__basicsize__ + GC_HEAD == 128

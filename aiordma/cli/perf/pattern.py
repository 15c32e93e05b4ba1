"""What --verify sends and expects: bytes that look random, other ones for each QP, the same on both ends."""

from __future__ import annotations

import functools
import random

__all__ = ["first_difference", "pattern"]


@functools.lru_cache(maxsize=64)
def pattern(size: int, index: int) -> bytes:
    """``size`` bytes for QP number ``index``; a byte of one is where another's is different, or nearly always."""
    return random.Random(size * 1024 + index).randbytes(size)


def first_difference(found: memoryview, wanted: bytes) -> int | None:
    """The place of the first byte that is wrong; None if all are right."""
    if found == wanted:
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
    )

"""Arguments that are numbers."""

from __future__ import annotations

from operator import index
from typing import Any

__all__ = ["whole", "whole_fields"]


def whole(value: Any) -> Any:
    """An int of whatever is one, numpy's too (operator.index()); anything else as it is, for the check that follows.

    What an ``__index__`` raises, but TypeError, is raised.
    """
    if isinstance(value, int) or value is None:
        return value
    try:
        return index(value)
    except TypeError:
        return value


def whole_fields(instance: Any) -> None:
    """The same for all fields of a dataclass, frozen or not; for its ``__post_init__``."""
    for name in instance.__dataclass_fields__:
        value = getattr(instance, name)
        number = whole(value)
        if number is not value:
            object.__setattr__(instance, name, number)

"""What can be awaited or entered: ``await aiordma.connect(...)``, ``async with aiordma.connect(...) as connection``."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, Protocol, Self, TypeVar

__all__ = ["Opening"]


class Closing(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: Any) -> None: ...


T = TypeVar("T", bound=Closing)


class Opening(Generic[T]):
    """The opening of something that closes. It starts when it's awaited or entered, which can be done once."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._coroutine
        return await self._opened.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(*error)

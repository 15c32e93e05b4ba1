"""What the connections of a loop share: opened by the first that needs it, closed with the last."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from aiordma import _backends
from aiordma._offload import Pending

__all__ = ["Lease", "share"]


class Shareable(Protocol):
    @property
    def closed(self) -> bool: ...

    def close(self) -> Pending[None]: ...

    def close_now(self) -> None: ...


T = TypeVar("T", bound=Shareable)


class _Shared(Generic[T]):
    """``opening`` goes on, and closes what it opened, if nobody waits for it any more."""

    def __init__(self, key: Hashable, opening: Pending[T]) -> None:
        self.key = key
        self.opening = opening
        self.users = 1

    @property
    def thing(self) -> T | None:
        """What is there and open, if anything."""
        if not self.opening.done:
            return None
        try:
            found = self.opening.result()
        except Exception:
            return None
        return None if found.closed else found

    def leave(self) -> T | None:
        """One user less. Gives what is to be closed, if that was the last."""
        self.users -= 1
        if self.users:
            return None
        if _shared.get(self.key) is self:
            del _shared[self.key]
        return self.thing


_shared: dict[Hashable, _Shared[object]] = {}  # type: ignore[type-var]


class Lease(Generic[T]):
    """The use of something, shared or the user's own. A second release does nothing."""

    def __init__(self, thing: T, shared: _Shared[T] | None = None) -> None:
        self.thing = thing
        self._shared = shared

    def release(self) -> Pending[None] | None:
        """Gives it back; the closing of what nobody uses any more, where that's what follows."""
        shared, self._shared = self._shared, None
        last = shared.leave() if shared is not None else None
        return last.close() if last is not None else None

    def release_now(self) -> None:
        """The same without a loop."""
        shared, self._shared = self._shared, None
        last = shared.leave() if shared is not None else None
        if last is not None:
            last.close_now()

    def another(self) -> Lease[T]:
        """A further lease of the same, with an end of its own."""
        if self._shared is not None:
            self._shared.users += 1
        return Lease(self.thing, self._shared)


async def share(key: Hashable, open_: Callable[[], Pending[T]]) -> Lease[T]:
    """What this loop has under ``key``, or what ``open_`` opens."""
    key = (_backends.current().loop, key)
    shared: _Shared[T] | None = _shared.get(key)  # type: ignore[assignment]
    if shared is not None and (not shared.opening.done or shared.thing is not None):
        shared.users += 1
    else:
        shared = _Shared(key, open_())
        _shared[key] = shared  # type: ignore[assignment]
    try:
        return Lease(await shared.opening, shared)
    except BaseException:
        # It may have come in this turn, been taken by another who has left already, and be nobody's.
        last = shared.leave()
        if last is not None:
            last.close()
        raise

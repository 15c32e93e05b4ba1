"""The server's books: which key is in which slot, what goes when it's full. No RDMA here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from kv_cache.layout import HEADER, seal, unseal


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is, or is going to be."""

    slot: int
    version: int
    length: int


class Store:
    """Slots in ``memory``. A slot is free, reserved by a client that writes it, or holds a key's value.

    A value that is replaced gets another slot, so that whoever reads the old one gets it whole, until that slot is taken
    again. Versions are never used twice, so a reader knows.
    """

    def __init__(self, memory: memoryview, slots: int) -> None:
        self._memory = memory
        self._slot_bytes = len(memory) // slots
        self._free = list(range(slots))
        self._places: OrderedDict[bytes, Place] = OrderedDict()  # used longest ago first
        self._reserved: dict[int, tuple[Hashable, bytes, Place]] = {}
        self._version = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def reserved(self) -> int:
        """Slots that clients are writing."""
        return len(self._reserved)

    @property
    def max_value(self) -> int:
        """Bytes of the longest value."""
        return self._slot_bytes - HEADER

    def _slot(self, number: int) -> memoryview:
        return self._memory[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def lookup(self, key: bytes) -> Place | None:
        """Where a key's value is. Reads that clients do by themselves aren't seen here: this is what counts as use."""
        place = self._places.get(key)
        if place is not None:
            self._places.move_to_end(key)
        return place

    def reserve(self, owner: Hashable, key: bytes, length: int) -> Place | None:
        """A slot for ``owner`` to write; None where every slot is being written. What was used longest ago goes for it.

        An owner has one at a time. If it asks again it has given up the one before, and whatever it wrote there has
        arrived: the question came behind it, on the same queue pair.
        """
        self.abandon(owner)
        if not self._free:
            if not self._places:
                return None
            self.delete(next(iter(self._places)))
        self._version += 1
        place = Place(self._free.pop(), self._version, length)
        self._reserved[place.slot] = (owner, key, place)
        return place

    def commit(self, owner: Hashable, key: bytes, slot: int, version: int) -> bool:
        """The owner says that it has written the slot. It's looked at before anybody is sent there."""
        found = self._reserved.get(slot)
        if found is None or found[0] != owner or found[1] != key or found[2].version != version:
            return False
        del self._reserved[slot]
        if unseal(self._slot(slot), version, key) is None:
            self._release(slot)
            return False
        self.delete(key)
        self._places[key] = found[2]
        return True

    def delete(self, key: bytes) -> bool:
        """Forgets a key. Whoever knows its slot finds that it isn't there any more."""
        place = self._places.pop(key, None)
        if place is None:
            return False
        self._release(place.slot)
        return True

    def abandon(self, owner: Hashable) -> int:
        """Frees what an owner has reserved. Only once it writes there no more: it says so, or its queue pair is closed."""
        left = [slot for slot, (of, _, _) in self._reserved.items() if of == owner]
        for slot in left:
            del self._reserved[slot]
            self._release(slot)
        return len(left)

    def _release(self, slot: int) -> None:
        # Version 0 is nobody's.
        self._slot(slot)[:HEADER] = seal(0, b"", b"")
        self._free.insert(0, slot)  # the others have waited longer, and have fewer late readers

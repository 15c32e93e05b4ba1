"""examples/kv_cache: the server's books, and that nobody takes a torn value for a whole one."""

import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from kv_cache.layout import HEADER, KEY_BYTES, Greeting, Message, seal, unseal
from kv_cache.store import Place, Store

from aiordma import RemoteBuffer

SLOTS, SLOT_BYTES = 4, HEADER + 16
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])
VALUES = st.binary(max_size=16)


class Books(RuleBasedStateMachine):
    """A store, clients that write as clients do, and what a reader must find."""

    writes: Any = Bundle("writes")

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(SLOTS * SLOT_BYTES)
        self.store = Store(memoryview(self.memory), SLOTS)
        self.values: dict[bytes, bytes] = {}
        self.gone: list[tuple[bytes, Place]] = []
        self.versions: set[int] = set()

    @rule(target=writes, owner=st.integers(0, 5), key=KEYS, value=VALUES)
    def reserve(self, owner: int, key: bytes, value: bytes) -> Any:
        before = {k: self.store._places[k] for k in self.store._places}
        oldest = next(iter(self.store._places), None)
        place = self.store.reserve(owner, key, len(value))
        if place is None:
            assert self.store.reserved == SLOTS, "refused only when every slot is being written"
            return None
        assert place.version not in self.versions, "a version is never used twice"
        self.versions.add(place.version)
        evicted = before.keys() - self.store._places.keys()
        assert evicted in (set(), {oldest}), "what was used longest ago goes first"
        for k in evicted:
            self.gone.append((k, before[k]))
            del self.values[k]
        return owner, key, value, place

    @rule(write=consumes(writes), whole=st.booleans())
    def commit(self, write: Any, whole: bool) -> None:
        if write is None:
            return
        owner, key, value, place = write
        live = place.slot in self.store._reserved and self.store._reserved[place.slot][2] == place
        slot = seal(place.version, key, value) + value
        if live:
            start = place.slot * SLOT_BYTES
            written = slot if whole else slot[: len(slot) // 2]
            self.memory[start : start + len(written)] = written
        assert not self.store.commit(1 - owner, key, place.slot, place.version), "nobody commits another's slot"
        done = self.store.commit(owner, key, place.slot, place.version)
        assert not (done and not live)
        if done:
            self.values[key] = value

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        place = self.store.lookup(key)
        assert self.store.delete(key) == (key in self.values)
        if place is not None:
            self.gone.append((key, place))
            del self.values[key]

    @rule(owner=st.integers(0, 1))
    def leave(self, owner: int) -> None:
        self.store.abandon(owner)

    @invariant()
    def every_value_is_found_and_nothing_that_went_is(self) -> None:
        assert len(self.store) == len(self.values)
        for key, value in self.values.items():
            place = self.store._places[key]
            start = place.slot * SLOT_BYTES
            assert unseal(self.memory[start : start + SLOT_BYTES], place.version, key) == value
        for key, place in self.gone:
            start = place.slot * SLOT_BYTES
            assert unseal(self.memory[start : start + SLOT_BYTES], place.version, key) is None

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        slots = [place.slot for place in self.store._places.values()]
        slots += [*self.store._reserved, *self.store._free]
        assert sorted(slots) == list(range(SLOTS))


Books.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestBooks: Any = Books.TestCase


@given(
    st.binary(min_size=1, max_size=KEY_BYTES),
    st.binary(max_size=200),
    st.binary(max_size=200),
    st.integers(1, 1 << 60),
    st.data(),
)
def test_a_mixture_of_two_values_is_never_taken_for_one(
    key: bytes, old: bytes, new: bytes, version: int, data: Any
) -> None:
    before, after = seal(version, key, old) + old, seal(version + 1, key, new) + new
    size = max(len(before), len(after))
    before, after = before.ljust(size, b"\0"), after.ljust(size, b"\0")
    cut = data.draw(st.integers(0, size))
    mixed = after[:cut] + before[cut:]
    for seen, value in ((version, old), (version + 1, new)):
        found = unseal(mixed, seen, key)
        assert found is None or found == value
    assert unseal(before, version, key) == old
    assert unseal(before, version, key + b"x") is None
    assert unseal(before, version + 1, key) is None


@given(st.integers(0, 255), st.integers(0, 0xFFFFFFFF), st.binary(max_size=KEY_BYTES))
def test_messages_and_greetings_survive_the_wire(code: int, number: int, key: bytes) -> None:
    message = Message(code, number, 3, 4, 5, key)
    assert Message.unpack(message.pack()) == message
    greeting = Greeting(10, 100, RemoteBuffer(1 << 40, 1000, 7))
    padded = greeting.pack().ljust(196, b"\0")
    assert Greeting.unpack(padded) == greeting
    assert greeting.slot(9).addr == (1 << 40) + 900

"""Which GID is used: what is routable first, and of the peer's kind."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import Gid, GidError, GidType
from aiordma.gid import choose, match, table

V1, V2, IB = GidType.ROCE_V1, GidType.ROCE_V2, GidType.IB
LINK_LOCAL = "fe80::5054:ff:fe12:3456"
V4 = "::ffff:192.0.2.7"
V4_LINK_LOCAL = "::ffff:169.254.3.4"
V6 = "2001:db8::7"


def _raw(address: str) -> bytes:
    return ipaddress.IPv6Address(address).packed


def _gids(*entries: tuple[str, GidType]) -> list[Gid]:
    return [Gid(index, _raw(address), kind) for index, (address, kind) in enumerate(entries)]


USUAL = _gids((LINK_LOCAL, V1), (LINK_LOCAL, V2), (V4, V1), (V4, V2))


@pytest.mark.parametrize(
    ("entries", "chosen"),
    [
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (V4, V1), (V4, V2)], 3),
        ([(V6, V2), (V4, V2)], 1),
        ([(LINK_LOCAL, V2), (V6, V2)], 1),
        ([(V4_LINK_LOCAL, V2), (V6, V2)], 1),
        ([(V4, V1), (LINK_LOCAL, V2)], 1),
        ([(V4, V1), (V6, V1)], 0),
        ([("::", V2), (V4, V2)], 1),
        ([(LINK_LOCAL, IB)], 0),
        ([(V4, V2), ("::ffff:192.0.2.8", V2)], 0),
    ],
)
def test_the_best_gid_is_chosen(entries: list[tuple[str, GidType]], chosen: int) -> None:
    assert choose(_gids(*entries)).index == chosen


def test_a_given_index_is_used_whatever_it_is() -> None:
    for index in range(4):
        assert choose(USUAL, index).index == index


@pytest.mark.parametrize("index", [4, 255, -1])
def test_an_index_that_is_not_there_names_the_table(index: int) -> None:
    with pytest.raises(GidError, match=r"(?s)no GID at index.*192\.0\.2\.7.*RoCE v2"):
        choose(USUAL, index)


def test_an_empty_entry_can_not_be_chosen() -> None:
    with pytest.raises(GidError):
        choose(_gids(("::", V2)), 0)


@pytest.mark.parametrize("gids", [[], _gids(("::", V1), ("::", V2))])
def test_no_gid_says_what_to_look_at(gids: list[Gid]) -> None:
    with pytest.raises(GidError, match="address"):
        choose(gids)


addresses = st.sampled_from([LINK_LOCAL, V4, V4_LINK_LOCAL, V6, "::", "2001:db8::8", "::ffff:198.51.100.1"])
tables = st.lists(st.tuples(addresses, st.sampled_from(GidType)), max_size=12).map(lambda entries: _gids(*entries))


@given(tables)
def test_a_choice_is_an_entry_that_no_other_beats(gids: list[Gid]) -> None:
    usable = [gid for gid in gids if any(gid.raw)]
    if not usable:
        with pytest.raises(GidError):
            choose(gids)
        return
    chosen = choose(gids)
    assert chosen in usable
    routable = [gid for gid in usable if gid.type is V2 and not gid.is_link_local]
    if routable:
        assert chosen in routable
        if any(gid.is_ipv4 for gid in routable):
            assert chosen.is_ipv4
    elif any(gid.type is not V1 for gid in usable):
        assert chosen.type is not V1


@given(tables, st.integers(0, 11), addresses.filter(lambda a: a != "::"), st.sampled_from(GidType))
def test_a_match_is_of_the_peers_type_family_and_scope(gids: list[Gid], at: int, peer: str, kind: GidType) -> None:
    preferred = gids[at % len(gids)] if gids else Gid(0, bytes(16), V2)
    other = Gid(0, _raw(peer), kind)

    def fits(gid: Gid) -> bool:
        return (
            any(gid.raw)
            and (gid.type, gid.is_ipv4) == (kind, other.is_ipv4)
            and (gid.is_link_local == other.is_link_local)
        )

    if not any(fits(gid) for gid in [*gids, preferred]):
        with pytest.raises(GidError, match="no GID of that type"):
            match(gids, preferred, _raw(peer), kind)
        return
    found = match(gids, preferred, _raw(peer), kind)
    assert fits(found)
    if fits(preferred):
        assert found is preferred


def test_the_table_shows_every_entry_with_its_index_and_type() -> None:
    text = table(USUAL)
    assert [line.strip()[0] for line in text.splitlines()] == ["0", "1", "2", "3"]
    assert "RoCE v1" in text
    assert "empty" in table([])

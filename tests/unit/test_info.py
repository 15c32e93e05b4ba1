"""QPInfo and RemoteBuffer travel between machines: what comes out is what went in, and nothing malformed comes in."""

import json
import pickle
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import GidType, QPInfo, RemoteBuffer, UsageError

infos = st.builds(
    QPInfo,
    qp_type=st.sampled_from(["RC", "UC"]),
    qp_num=st.integers(0, (1 << 24) - 1),
    psn=st.integers(0, (1 << 24) - 1),
    gid=st.binary(min_size=16, max_size=16),
    gid_type=st.sampled_from(GidType),
    lid=st.integers(0, 0xFFFF),
    mtu=st.sampled_from([256, 512, 1024, 2048, 4096]),
    max_rd_atomic=st.integers(0, 255),
    max_dest_rd_atomic=st.integers(0, 255),
)


@st.composite
def _buffers(draw: st.DrawFn) -> RemoteBuffer:
    addr = draw(st.integers(0, (1 << 64) - 1))
    length = draw(st.integers(0, min((1 << 64) - addr, (1 << 63) - 1)))
    access = draw(st.none() | st.integers(0, (1 << 31) - 1))
    return RemoteBuffer(addr, length, draw(st.integers(0, (1 << 32) - 1)), access)


buffers = _buffers()

GOOD = QPInfo("RC", 0x123456, 0xABCDEF, bytes(range(16)), GidType.ROCE_V2, 7, 4096, 16, 8)
GOOD_BUFFER = RemoteBuffer(0x7F00_0000_1000, 4096, 0xDEADBEEF, 7)


# ---------------------------------------------------------------- QPInfo


@given(infos)
def test_info_survives_bytes(info: QPInfo) -> None:
    data = info.to_bytes()
    assert len(data) == 40
    for form in (data, bytearray(data), memoryview(data)):
        assert QPInfo.from_bytes(form) == info


@given(infos)
def test_info_survives_json(info: QPInfo) -> None:
    text = info.to_json()
    for form in (text, text.encode(), json.loads(text)):
        assert QPInfo.from_json(form) == info


@given(infos)
def test_info_survives_pickle(info: QPInfo) -> None:
    assert pickle.loads(pickle.dumps(info)) == info


def test_info_on_the_wire_is_in_network_byte_order() -> None:
    data = GOOD.to_bytes()
    assert data[:4] == b"aiQP"
    assert data[8:12] == b"\x00\x12\x34\x56"
    assert data[12:16] == b"\x00\xab\xcd\xef"


@given(st.binary(max_size=80))
def test_info_of_random_bytes_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        QPInfo.from_bytes(data)


@given(infos, st.integers(0, 39), st.integers(0, 255))
def test_info_with_any_byte_changed_is_refused_or_another_info(info: QPInfo, place: int, value: int) -> None:
    data = bytearray(info.to_bytes())
    before = data[place]
    data[place] = value
    try:
        found = QPInfo.from_bytes(data)
    except UsageError:
        assert value != before
    else:
        assert (found == info) == (value == before), "a byte that means nothing"


@given(infos, st.integers(0, 39))
def test_info_cut_short_is_refused(info: QPInfo, size: int) -> None:
    with pytest.raises(UsageError, match="40 bytes"):
        QPInfo.from_bytes(info.to_bytes()[:size])


@pytest.mark.parametrize("data", [None, 40, "x" * 40, [1] * 40, object()])
def test_info_from_what_is_no_buffer_is_refused(data: Any) -> None:
    with pytest.raises(UsageError):
        QPInfo.from_bytes(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qp_type", "UD"),
        ("qp_type", None),
        ("qp_type", ["RC"]),
        ("qp_num", -1),
        ("qp_num", 1 << 24),
        ("qp_num", "5"),
        ("qp_num", 5.0),
        ("qp_num", True),
        ("psn", 1 << 24),
        ("psn", -1),
        ("psn", None),
        ("lid", 1 << 16),
        ("lid", -1),
        ("mtu", 0),
        ("mtu", 1000),
        ("mtu", 8192),
        ("mtu", 1024.0),
        ("max_rd_atomic", 256),
        ("max_rd_atomic", -1),
        ("max_dest_rd_atomic", 256),
        ("max_dest_rd_atomic", "1"),
        ("gid", b""),
        ("gid", bytes(15)),
        ("gid", bytes(17)),
        ("gid", "x" * 16),
        ("gid", [0] * 16),
        ("gid", None),
        ("gid", 16),
        ("gid_type", 3),
        ("gid_type", -1),
        ("gid_type", "ROCE_V2"),
        ("gid_type", None),
    ],
)
def test_info_names_the_field_that_is_wrong(name: str, value: Any) -> None:
    fields = {field: getattr(GOOD, field) for field in QPInfo.__slots__}
    with pytest.raises(UsageError, match=name):
        QPInfo(**{**fields, name: value})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(json_values)
def test_info_from_any_other_json_is_refused(value: Any) -> None:
    with pytest.raises(UsageError):
        QPInfo.from_json(json.dumps(value))
    if not isinstance(value, str | bytes):
        with pytest.raises(UsageError):
            QPInfo.from_json(value)


@given(st.sampled_from(sorted(QPInfo.__slots__)), json_values)
def test_info_from_json_with_a_wrong_field_is_refused(name: str, value: Any) -> None:
    fields = json.loads(GOOD.to_json())
    fields[name] = value
    try:
        found = QPInfo.from_json(fields)
    except UsageError:
        return
    # Then it was a right one.
    assert asdict(found) == {**asdict(GOOD), name: bytes.fromhex(value) if name == "gid" else value}
    assert QPInfo.from_bytes(found.to_bytes()) == found


@given(st.binary(max_size=64) | st.text(max_size=64))
def test_info_from_what_is_no_json_is_refused(data: bytes | str) -> None:
    with pytest.raises(UsageError):
        QPInfo.from_json(data)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\x00", '{"qp_type": "RC"', "nan"])
def test_info_from_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        QPInfo.from_json(text)


@pytest.mark.parametrize("name", QPInfo.__slots__)
def test_info_from_json_without_a_field_names_it(name: str) -> None:
    fields = json.loads(GOOD.to_json())
    del fields[name]
    with pytest.raises(UsageError, match=name):
        QPInfo.from_json(fields)


# ---------------------------------------------------------------- RemoteBuffer


@given(buffers)
def test_remote_survives_bytes(buffer: RemoteBuffer) -> None:
    data = buffer.to_bytes()
    assert len(data) == 32
    for form in (data, bytearray(data), memoryview(data)):
        assert RemoteBuffer.from_bytes(form) == buffer


@given(buffers)
def test_remote_survives_json(buffer: RemoteBuffer) -> None:
    assert RemoteBuffer.from_json(json.loads(json.dumps(buffer.to_json()))) == buffer


@given(buffers)
def test_remote_survives_pickle_and_has_the_hash_of_its_equal(buffer: RemoteBuffer) -> None:
    again = pickle.loads(pickle.dumps(buffer))
    assert again == buffer
    assert hash(again) == hash(buffer)
    assert again.access_flags == buffer.access_flags


@given(buffers, buffers)
def test_remotes_are_equal_only_when_everything_is(a: RemoteBuffer, b: RemoteBuffer) -> None:
    assert (a == b) == (a.to_bytes() == b.to_bytes())
    assert a != a.to_bytes()


@given(st.binary(max_size=64))
def test_remote_of_random_bytes_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        RemoteBuffer.from_bytes(data)


@given(buffers, st.integers(0, 31), st.integers(0, 255))
def test_remote_with_any_byte_changed_is_refused_or_another_one(buffer: RemoteBuffer, place: int, value: int) -> None:
    data = bytearray(buffer.to_bytes())
    before = data[place]
    data[place] = value
    try:
        found = RemoteBuffer.from_bytes(data)
    except UsageError:
        assert value != before
    else:
        assert (found == buffer) == (value == before), "a byte that means nothing"


@pytest.mark.parametrize("data", [None, 32, "x" * 32, [1] * 32, object()])
def test_remote_from_what_is_no_buffer_is_refused(data: Any) -> None:
    with pytest.raises(UsageError):
        RemoteBuffer.from_bytes(data)


@pytest.mark.parametrize(
    ("arguments"),
    [
        (-1, 0, 0),
        (1 << 64, 0, 0),
        (0, -1, 0),
        (0, 1 << 64, 0),
        (1, (1 << 64) - 1 + 1, 0),
        ((1 << 64) - 1, 2, 0),
        (0, 0, -1),
        (0, 0, 1 << 32),
        (0, 0, 0, -1),
        (0, 0, 0, 1 << 31),
        ("0", 0, 0),
        (0, "0", 0),
        (0, 0, "0"),
        (0, 0, 0, "0"),
        (0.5, 0, 0),
        (0, 1.5, 0),
        (0, 0, 1.5),
        (None, 0, 0),
        (0, None, 0),
        (0, 0, None),
    ],
)
def test_remote_of_impossible_numbers_is_refused(arguments: Any) -> None:
    with pytest.raises(UsageError):
        RemoteBuffer(*arguments)


@given(json_values)
def test_remote_from_any_other_json_is_refused(value: Any) -> None:
    with pytest.raises(UsageError):
        RemoteBuffer.from_json(value)


@given(st.sampled_from(["addr", "length", "rkey", "access"]), json_values)
def test_remote_from_json_with_a_wrong_field_is_refused(name: str, value: Any) -> None:
    fields = {**GOOD_BUFFER.to_json(), name: value}
    try:
        found = RemoteBuffer.from_json(fields)
    except UsageError:
        return
    if name == "addr":
        assert found.addr == (int(value, 16) if isinstance(value, str) else value)
    elif name == "access":
        assert found.access_flags == value
    else:
        assert getattr(found, name) == value
    assert type(value) is not bool
    assert type(value) is not float


@pytest.mark.parametrize("name", ["addr", "length", "rkey"])
def test_remote_from_json_without_a_field_names_it(name: str) -> None:
    fields = GOOD_BUFFER.to_json()
    del fields[name]
    with pytest.raises(UsageError, match=name):
        RemoteBuffer.from_json(fields)


def test_remote_json_keeps_addresses_that_javascript_would_round() -> None:
    buffer = RemoteBuffer((1 << 63) + 1, 8, 1)
    assert isinstance(buffer.to_json()["addr"], str)

"""What DC initiators are told of a target."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import UsageError
from aiordma.gid import GidType
from aiordma.mlx5 import DCTInfo

INFO = DCTInfo(0x1234, 0xFEDCBA9876543210, bytes(range(16)), GidType.ROCE_V2, 7)


@given(
    st.builds(
        DCTInfo,
        st.integers(0, 2**24 - 1),
        st.integers(0, 2**64 - 1),
        st.binary(min_size=16, max_size=16),
        st.sampled_from(list(GidType)),
        st.integers(0, 2**16 - 1),
    )
)
def test_it_survives_both_ways_of_sending_it(info: DCTInfo) -> None:
    assert len(info.to_bytes()) == 36
    assert DCTInfo.from_bytes(info.to_bytes()) == info
    assert DCTInfo.from_bytes(memoryview(bytearray(info.to_bytes()))) == info
    assert DCTInfo.from_json(info.to_json()) == info
    assert DCTInfo.from_json(json.loads(info.to_json())) == info


@pytest.mark.parametrize(
    "fields",
    [
        {"dctn": 1 << 24},
        {"dctn": -1},
        {"dctn": "5"},
        {"dc_key": 1 << 64},
        {"lid": 1 << 16},
        {"gid": bytes(15)},
        {"gid": "fe80::1"},
        {"gid_type": 9},
    ],
)
def test_fields_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="DCTInfo"):
        DCTInfo(**{"dctn": 1, "dc_key": 2, "gid": bytes(16), "gid_type": GidType.ROCE_V2, **fields})


@pytest.mark.parametrize(
    "data", [b"", bytes(36), INFO.to_bytes()[:-1], INFO.to_bytes() + b"x", INFO.to_bytes()[:5] + b"\xff" + bytes(30)]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="DCTInfo"):
        DCTInfo.from_bytes(data)


@pytest.mark.parametrize("data", ["", "[]", "{}", "null", INFO.to_json().replace("0x", "zz"), '{"dctn": 1}'])
def test_other_json_is_refused(data: str) -> None:
    with pytest.raises(UsageError, match="DCTInfo"):
        DCTInfo.from_json(data)

"""QPConfig: every field within what verbs allow, and errors that name the field."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import Access, AccessFlagsError, QPConfig, UsageError

RANGES = {
    "max_send_wr": (1, 1 << 20),
    "max_recv_wr": (1, 1 << 20),
    "max_send_sge": (1, 32),
    "max_recv_sge": (1, 32),
    "max_inline_data": (0, 4096),
    "timeout": (0, 31),
    "retry_cnt": (0, 7),
    "rnr_retry": (0, 7),
    "min_rnr_timer": (0, 31),
    "traffic_class": (0, 255),
    "hop_limit": (0, 255),
    "flow_label": (0, (1 << 20) - 1),
    "service_level": (0, 15),
    "max_rd_atomic": (0, 255),
    "max_queued": (0, (1 << 32) - 1),
}


def test_the_defaults_are_good() -> None:
    QPConfig().check()


def test_every_number_has_a_range_here() -> None:
    assert {field.name for field in fields(QPConfig)} == {*RANGES, "qp_type", "access"}


@given(st.sampled_from(sorted(RANGES)), st.data())
def test_what_is_in_range_is_taken(name: str, data: st.DataObject) -> None:
    low, high = RANGES[name]
    replace(QPConfig(), **{name: data.draw(st.integers(low, high))}).check()


@pytest.mark.parametrize("name", RANGES)
def test_what_is_out_of_range_or_no_number_is_refused_by_name(name: str) -> None:
    low, high = RANGES[name]
    for value in (low - 1, high + 1, -1, 1 << 70, "1", 1.0, None, [], float("nan")):
        if name in ("max_rd_atomic", "max_queued") and value is None:
            continue
        with pytest.raises(UsageError, match=name):
            replace(QPConfig(), **{name: value}).check()


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_numbers_of_numpy_are_numbers(kind: Any) -> None:
    config = QPConfig(
        max_send_wr=kind(16), max_rd_atomic=kind(4), timeout=kind(0), access=Access(kind(int(Access.REMOTE)))
    )
    config.check()
    assert config == QPConfig(max_send_wr=16, max_rd_atomic=4, timeout=0)
    assert type(config.max_send_wr) is int
    with pytest.raises(UsageError, match="timeout"):
        QPConfig(timeout=kind(32)).check()
    with pytest.raises(UsageError, match="timeout"):
        QPConfig(timeout=np.float64(3)).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["UD", "rc", "", None, 2, b"RC"])
def test_another_qp_type_is_refused_with_those_there_are(value: Any) -> None:
    with pytest.raises(UsageError, match="RC, UC"):
        QPConfig(qp_type=value).check()


@pytest.mark.parametrize("value", [1 << 40, -1, "all", None, 1.0])
def test_access_that_is_no_flags_is_refused(value: Any) -> None:
    with pytest.raises(AccessFlagsError):
        QPConfig(access=value).check()


@pytest.mark.parametrize("value", [Access.NONE, Access.REMOTE, Access.REMOTE_READ, Access.REMOTE_WRITE, Access.ALL, 0])
def test_access_of_a_qp_needs_no_local_write(value: Any) -> None:
    QPConfig(access=value).check()

"""Access flags: what ibv_reg_mr(3) would answer with a bare EINVAL is refused by name."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import Access, AccessFlagsError
from aiordma.access import check_access

FLAGS = [flag for flag in Access if flag is not Access.NONE]


@pytest.mark.parametrize("count", range(5))
def test_remote_write_and_atomic_need_local_write_and_everything_else_goes(count: int) -> None:
    for chosen in combinations(FLAGS, count):
        flags = Access.NONE
        for flag in chosen:
            flags |= flag
        needs_local = flags & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
        if (needs_local and not flags & Access.LOCAL_WRITE) or flags & Access.ZERO_BASED:
            with pytest.raises(AccessFlagsError):
                check_access(flags)
        else:
            assert check_access(int(flags)) == flags


@given(st.integers(0, 62).filter(lambda bit: 1 << bit not in {int(flag) for flag in FLAGS}))
def test_unknown_flags_are_refused_by_number(bit: int) -> None:
    with pytest.raises(AccessFlagsError, match=f"{1 << bit:#x}"):
        check_access((1 << bit) | Access.LOCAL_WRITE)


@pytest.mark.parametrize("access", [-1, None, "LOCAL_WRITE", 1.0, b"", [1]])
def test_what_is_no_flag_is_refused(access: object) -> None:
    with pytest.raises(AccessFlagsError):
        check_access(access)  # type: ignore[arg-type]


def test_the_defaults_are_what_their_names_say() -> None:
    assert Access.REMOTE == Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
    assert Access.ALL == Access.REMOTE | Access.LOCAL_WRITE
    assert check_access(Access.ALL) == Access.ALL
    assert check_access(0) == Access.NONE

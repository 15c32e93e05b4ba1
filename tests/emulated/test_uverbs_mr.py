"""Registering memory: what is checked, what is pinned, what stays when it fails."""

import ctypes
import errno
import itertools
import mmap
from collections.abc import Iterator

import pytest
from emulated.uverbs import REREG_MR, Raw
from emulated.verbs import LOCAL, MR, PD, Context
from pyverbs import enums as e
from pyverbs.mr import MW

pytestmark = pytest.mark.usefixtures("leak_check")

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@pytest.fixture
def raw() -> Iterator[tuple[Raw, int]]:
    with Raw() as device:
        yield device, device.alloc_pd()


ACCESS = {
    "local": e.IBV_ACCESS_LOCAL_WRITE,
    "write": e.IBV_ACCESS_REMOTE_WRITE,
    "read": e.IBV_ACCESS_REMOTE_READ,
    "atomic": e.IBV_ACCESS_REMOTE_ATOMIC,
    "bind": e.IBV_ACCESS_MW_BIND,
    "relaxed": e.IBV_ACCESS_RELAXED_ORDERING,
}


@pytest.mark.parametrize(
    "names", [c for n in range(4) for c in itertools.combinations(ACCESS, n)], ids=lambda c: "+".join(c) or "none"
)
def test_remote_writes_and_atomics_need_local_writes(raw: tuple[Raw, int], names: tuple[str, ...]) -> None:
    device, pd = raw
    access = sum(ACCESS[n] for n in names)
    bad = ("write" in names or "atomic" in names) and "local" not in names
    assert device.reg_mr_error(pd, access=access) == (errno.EINVAL if bad else 0)


@pytest.mark.parametrize(
    ("access", "code"),
    [
        (e.IBV_ACCESS_ON_DEMAND, errno.EOPNOTSUPP),
        (1 << 8, errno.EINVAL),
        (1 << 19, errno.EINVAL),
        (1 << 30, errno.EINVAL),
    ],
)
def test_access_that_the_device_does_not_know_is_refused(raw: tuple[Raw, int], access: int, code: int) -> None:
    device, pd = raw
    assert device.reg_mr_error(pd, access=access) == code


def test_memory_that_is_not_there_is_a_fault(raw: tuple[Raw, int]) -> None:
    device, pd = raw
    address = libc.mmap(None, 4 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE, -1, 0)
    libc.munmap(address + PAGE, PAGE)
    assert device.reg_mr_error(pd, start=address, length=PAGE) == 0
    assert device.reg_mr_error(pd, start=address, length=2 * PAGE) == errno.EFAULT
    assert device.reg_mr_error(pd, start=address + PAGE + 8, length=8) == errno.EFAULT
    assert device.reg_mr_error(pd, start=address + PAGE - 1, length=2) == errno.EFAULT
    assert device.reg_mr_error(pd, start=address + 2 * PAGE, length=2 * PAGE) == 0
    libc.munmap(address, 4 * PAGE)


@pytest.mark.parametrize(
    ("protection", "access", "code"),
    [
        (mmap.PROT_READ, 0, 0),
        (mmap.PROT_READ, e.IBV_ACCESS_REMOTE_READ, 0),
        (mmap.PROT_READ, LOCAL, errno.EFAULT),
        (mmap.PROT_READ, e.IBV_ACCESS_MW_BIND, errno.EFAULT),
        (0, 0, errno.EFAULT),
        (0, LOCAL, errno.EFAULT),
        (mmap.PROT_READ | mmap.PROT_WRITE, LOCAL, 0),
    ],
)
def test_memory_must_allow_what_the_region_would(raw: tuple[Raw, int], protection: int, access: int, code: int) -> None:
    device, pd = raw
    address = libc.mmap(None, PAGE, protection, PRIVATE, -1, 0)
    assert device.reg_mr_error(pd, start=address, access=access) == code
    libc.munmap(address, PAGE)


def test_nothing_can_be_registered_only_where_it_touches_a_page(raw: tuple[Raw, int]) -> None:
    """ib_umem_get() counts pages: none is EINVAL, and an empty range within a page has one."""
    device, pd = raw
    assert device.reg_mr_error(pd, length=0) == errno.EINVAL
    assert device.reg_mr_error(pd, start=device.address + 8, length=0) == 0


def test_a_range_that_wraps_around_is_refused(raw: tuple[Raw, int]) -> None:
    device, pd = raw
    assert device.reg_mr_error(pd, length=(1 << 64) - 1) == errno.EINVAL
    assert device.reg_mr_error(pd, length=(1 << 64) - device.address - 1) == errno.EINVAL


def test_another_address_must_have_the_same_place_in_its_page(raw: tuple[Raw, int]) -> None:
    device, pd = raw
    assert device.reg_mr_error(pd, start=device.address + 8, length=8, iova=PAGE + 8) == 0
    assert device.reg_mr_error(pd, start=device.address + 8, length=8, iova=PAGE) == errno.EINVAL


def test_a_protection_domain_must_exist(raw: tuple[Raw, int]) -> None:
    device, _ = raw
    assert device.reg_mr_error(77) == errno.EINVAL


def test_keys_differ_between_regions_of_the_same_memory() -> None:
    buffer = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    with Context(name="mlx5_0") as context, PD(context) as pd:
        regions = [MR(pd, PAGE, LOCAL, address) for _ in range(10)]
        assert len({m.lkey for m in regions}) == 10
        assert all(m.lkey == m.rkey for m in regions)


def test_the_limits_of_registration_are_the_devices(raw: tuple[Raw, int]) -> None:
    with Raw("mlx5_small") as device:
        pd = device.alloc_pd()
        memory = mmap.mmap(-1, 2 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert device.reg_mr_error(pd, start=address, length=1 << 20) == 0
        assert device.reg_mr_error(pd, start=address, length=(1 << 20) + 1) == errno.EINVAL


# ------------------------------------------------------------------ changing a region


def rereg(
    device: Raw, mr: int, flags: int, *, start: int = 0, length: int = 0, iova: int = 0, pd: int = 0, access: int = 0
) -> int:
    import struct

    return device.error(REREG_MR, struct.pack("=IIQQQII", mr, flags, start, length, iova, pd, access), 8)


TRANSLATION, DOMAIN, FLAGS = 1, 2, 4


def test_a_region_can_get_other_memory_another_domain_and_other_access(raw: tuple[Raw, int]) -> None:
    device, pd = raw
    other, mr = device.alloc_pd(), device.reg_mr(pd)
    assert rereg(device, mr, TRANSLATION, start=device.address + PAGE, length=64, iova=PAGE) == 0
    assert rereg(device, mr, DOMAIN, pd=other) == 0
    assert device.destroy("pd", pd) == 0, "it's still held by the region"
    assert device.destroy("pd", other) == errno.EBUSY
    assert rereg(device, mr, FLAGS, access=LOCAL | e.IBV_ACCESS_REMOTE_WRITE) == 0
    assert device.destroy("mr", mr) == 0


@pytest.mark.parametrize(
    ("flags", "more", "code"),
    [
        (0, {}, errno.EINVAL),
        (8, {}, errno.EOPNOTSUPP),
        (FLAGS, {"access": e.IBV_ACCESS_REMOTE_WRITE}, errno.EINVAL),
        (DOMAIN, {"pd": 99}, errno.EINVAL),
        (TRANSLATION, {"start": 8 * PAGE, "length": 8, "iova": 1}, errno.EINVAL),
        (TRANSLATION, {"start": 0, "length": 8, "iova": 0}, errno.EFAULT),
    ],
)
def test_a_change_that_fails_leaves_the_region_whole(raw: tuple[Raw, int], flags: int, more: dict, code: int) -> None:
    device, pd = raw
    mr = device.reg_mr(pd)
    assert rereg(device, mr, flags, **more) == code
    assert rereg(device, 99, FLAGS, access=1) == errno.ENOENT
    assert device.destroy("mr", mr) == 0


def test_read_only_memory_can_not_become_writable_by_a_change_of_access(raw: tuple[Raw, int]) -> None:
    device, pd = raw
    address = libc.mmap(None, PAGE, mmap.PROT_READ, PRIVATE, -1, 0)
    mr = device.reg_mr(pd, start=address, access=0)
    assert rereg(device, mr, FLAGS, access=LOCAL) == errno.EFAULT
    libc.munmap(address, PAGE)


# ------------------------------------------------------------------ windows


def test_windows_of_both_types() -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd:
        keys = set()
        for kind in (e.IBV_MW_TYPE_1, e.IBV_MW_TYPE_2):
            with MW(pd, kind) as window:
                keys.add(window.rkey >> 8)
        assert len(keys) == 2


def test_a_window_of_another_type_is_refused(raw: tuple[Raw, int]) -> None:
    device, pd = raw
    for kind in (0, 3, 255):
        assert device.alloc_mw_error(pd, kind) == errno.EINVAL
    assert device.alloc_mw_error(99) == errno.EINVAL


# ------------------------------------------------------------------ RLIMIT_MEMLOCK

_MEMLOCK = """
    import ctypes, errno, mmap, os, resource, sys
    import aiordma.emulator
    aiordma.emulator.attach()
    from pyverbs import enums as e
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsRDMAError
    PAGE = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    root = os.geteuid() == 0

    def limited(limit):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))

    def reg(pages, at=0):
        try:
            return MR(pd, pages * PAGE, e.IBV_ACCESS_LOCAL_WRITE, address + at * PAGE)
        except PyverbsRDMAError as x:
            return x.error_code

    context = Context(name="mlx5_0")
    pd = PD(context)
    """


def test_memlock_limits_what_is_pinned_at_a_time(run_python) -> None:
    run_python(
        _MEMLOCK
        + """
    limited(64 * 1024)
    if root:
        os.seteuid(65534)
    first = reg(10)
    assert isinstance(first, MR), first
    assert reg(7) == errno.ENOMEM
    second = reg(6)
    assert isinstance(second, MR), second
    assert reg(1) == errno.ENOMEM
    second.close()
    third = reg(6)
    assert isinstance(third, MR), "the pages of a region that is gone still count"
    try:
        CQ(context, 1000)
    except PyverbsRDMAError as x:
        assert x.error_code == errno.ENOMEM, "a CQ's buffer is pinned as well"
    else:
        raise SystemExit("a CQ's buffer isn't counted")
    first.close()
    assert isinstance(reg(10), MR)
    """
    )


def test_no_memlock_at_all_is_a_matter_of_permission(run_python) -> None:
    run_python(
        _MEMLOCK
        + """
    limited(0)
    if root:
        os.seteuid(65534)
    assert reg(1) == errno.EPERM
    """
    )


def test_who_may_lock_memory_has_no_limit(run_python) -> None:
    import os

    if os.geteuid() != 0:
        pytest.skip("needs CAP_IPC_LOCK")
    run_python(
        _MEMLOCK
        + """
    limited(64 * 1024)
    assert isinstance(reg(512), MR)
    """
    )

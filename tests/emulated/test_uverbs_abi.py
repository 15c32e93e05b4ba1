"""Commands that libibverbs never sends: wrong lengths, wrong fields, wrong pointers. They fail as in the kernel, and
nothing crashes."""

import ctypes
import errno
import mmap
import os
import struct

import pytest
from emulated import uverbs as u
from emulated.uverbs import Attr, Raw, lib

pytestmark = pytest.mark.usefixtures("leak_check")

#: In the first page, where nothing is mapped; and beyond every user address.
BAD_POINTERS = [0, 8, 0x7FFF_FFFF_F000_0000, 0xFFFF_FFFF_FFFF_FF00]


# ------------------------------------------------------------------ the write form


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", errno.EINVAL),
        (b"\0" * 7, errno.EINVAL),
        (struct.pack("=IHH", u.ALLOC_PD, 4, 2), errno.EINVAL),  # in_words is more than was written
        (struct.pack("=IHHQ", u.ALLOC_PD, 2, 2, 0), errno.EINVAL),  # and less
        (struct.pack("=IHH", u.ALLOC_PD, 2, 2), errno.ENOSPC),  # no room for the request
        (struct.pack("=IHHQ", u.ALLOC_PD, 4, 0, 0), errno.ENOSPC),  # none for the response
        (struct.pack("=IHHQ", 63, 4, 2, 0), errno.EOPNOTSUPP),  # no such command
        (struct.pack("=IHHQ", u.EXTENDED | 63, 4, 2, 0), errno.EOPNOTSUPP),
        (struct.pack("=IHHQ", 0x40000000 | u.ALLOC_PD, 4, 2, 0), errno.EINVAL),  # flag bits that mean nothing
        (struct.pack("=IHHQ", u.ALLOC_PD, 4, 2, 8), errno.EFAULT),
    ],
)
def test_a_malformed_command_is_refused(data: bytes, code: int) -> None:
    with Raw() as raw:
        assert raw.write(data) == code


@pytest.mark.parametrize("pointer", BAD_POINTERS)
def test_bad_pointers_give_efault(pointer: int) -> None:
    with Raw() as raw:
        assert lib.write(raw.fd, ctypes.c_void_p(pointer), 64) == -1
        assert ctypes.get_errno() == errno.EFAULT
        assert lib.ioctl(raw.fd, u.RDMA_VERBS_IOCTL, ctypes.c_void_p(pointer)) == -1
        assert ctypes.get_errno() == errno.EFAULT
        assert raw.error(u.ALLOC_PD, b"", 8, response=pointer) == errno.EFAULT
        pd = raw.alloc_pd()
        assert raw.reg_mr_error(pd, start=pointer & ~0xFFF) in (errno.EFAULT, errno.EINVAL)
        assert raw.create_cq_error(buf=pointer) in (errno.EFAULT, errno.EINVAL)
        assert raw.create_cq_error(db=pointer) in (errno.EFAULT, errno.EINVAL)
        cq = raw.create_cq()
        assert raw.create_qp_error(pd, cq, buf=pointer) in (errno.EFAULT, errno.EINVAL)
        assert raw.create_qp_error(pd, cq, db=pointer) in (errno.EFAULT, errno.EINVAL)
        assert raw.create_srq_error(pd, buf=pointer) in (errno.EFAULT, errno.EINVAL)


def test_an_object_whose_response_can_not_be_delivered_is_not_left_behind() -> None:
    """The check is leak_check's."""
    with Raw() as raw:
        pd = raw.alloc_pd()
        for number, request in (
            (u.REG_MR, raw.reg_mr_request(pd)),
            (u.CREATE_CQ, raw.cq_request()),
            (u.CREATE_SRQ, raw.srq_request(pd)),
            (u.CREATE_COMP_CHANNEL, b""),
        ):
            assert raw.error(number, request, 64, response=8) == errno.EFAULT
        assert raw.destroy("pd", pd) == 0


def test_commands_come_after_the_context() -> None:
    with Raw(context=False) as raw:
        assert raw.error(u.ALLOC_PD, b"", 8) == errno.EINVAL
        raw.get_context()
        assert raw.error(u.ALLOC_PD, b"", 8) == 0
        with pytest.raises(OSError) as caught:
            raw.get_context()
        assert caught.value.errno == errno.EINVAL


def extended(command: int, core: bytes, uhw: bytes = b"", out: int = 0, uhw_out: int = 0, **fields: int) -> bytes:
    return (
        struct.pack("=IHH", u.EXTENDED | command, fields.get("in_words", len(core) // 8), out // 8)
        + struct.pack("=QHHI", fields.get("response", 0), len(uhw) // 8, uhw_out // 8, fields.get("reserved", 0))
        + core
        + uhw
    )


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (extended(1, b"\0" * 8)[:16], errno.EINVAL),  # no extended header
        (extended(1, b"\0" * 8, in_words=7), errno.EINVAL),
        (extended(1, b""), errno.ENOSPC),
        (extended(1, b"\0" * 8, out=512), errno.EINVAL),  # room for a response, but no address
        (extended(1, b"\0" * 8, response=8), errno.EINVAL),  # an address, but no room
        (extended(1, b"\0" * 8, response=8, out=8), errno.ENOSPC),
        (extended(1, b"\0" * 8, response=8, out=512, reserved=1), errno.EINVAL),
        (extended(1, b"\0" * 8, response=8, out=512), errno.EFAULT),
        (extended(1, struct.pack("=II", 1, 0), response=8, out=512), errno.EINVAL),  # comp_mask
        (extended(1, b"\0" * 8 + b"\1" + b"\0" * 7, response=8, out=512), errno.EOPNOTSUPP),  # unknown request bytes
    ],
)
def test_a_malformed_extended_command_is_refused(data: bytes, code: int) -> None:
    with Raw() as raw:
        assert raw.write(data) == code


def test_an_extended_response_is_cut_to_the_callers_room_and_says_so() -> None:
    out = ctypes.create_string_buffer(b"\xff" * 4096, 4096)
    with Raw() as raw:
        for room in (184, 4096):
            assert raw.write(extended(1, b"\0" * 8, response=ctypes.addressof(out), out=room)) == 0
            length = struct.unpack_from("=I", out, 180)[0]
            assert length <= room
            assert not any(out.raw[length:room]), "the rest is not zeroed"


# ------------------------------------------------------------------ the ioctl form

DEVICE, PD, CQ = 0, 1, 3
INVOKE_WRITE, DEVICE_QUERY_PORT = 0, 2


def test_libibverbs_finds_invoke_write_by_enospc() -> None:
    with Raw() as raw:
        probe = Attr(2, struct.pack("=Q", u.QUERY_DEVICE))
        assert raw.ioctl(DEVICE, INVOKE_WRITE, probe) == errno.ENOSPC


def test_a_method_that_is_not_there_is_a_protocol_that_is_not_supported() -> None:
    with Raw() as raw:
        assert raw.ioctl(DEVICE, 999) == errno.EPROTONOSUPPORT
        assert raw.ioctl(999, 0) == errno.EPROTONOSUPPORT
        assert raw.ioctl(0x1005, 0x1000) == errno.EPROTONOSUPPORT


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({"length": 23}, errno.EINVAL),
        ({"length": 25}, errno.EINVAL),
        ({"length": 0xFFFF}, errno.EINVAL),
        ({"num_attrs": 5}, errno.EINVAL),
        ({"reserved1": 1}, errno.EPROTONOSUPPORT),
        ({"reserved2": 1}, errno.EPROTONOSUPPORT),
        ({"driver_id": 2}, errno.EINVAL),
    ],
)
def test_a_malformed_header_is_refused(header: dict[str, int], code: int) -> None:
    with Raw() as raw:
        assert raw.ioctl(DEVICE, 999, **header) == code


def query_port(*, port: bytes = b"\1" + b"\0" * 7, more: tuple[Attr, ...] = (), size: int = 48) -> list[Attr]:
    return [Attr(0, port), Attr(1, out=size), *more]


def test_attributes_are_checked() -> None:
    with Raw() as raw:
        attrs = query_port()
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, *attrs) == 0
        assert attrs[1].flags & u.VALID_OUTPUT
        assert attrs[1].buffer.raw[32] == 2 or attrs[1].buffer.raw[24] == 4 or any(attrs[1].buffer.raw)
        # one missing
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, attrs[0]) == errno.EINVAL
        # twice
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, *query_port(more=(Attr(0, b"\1"),))) == errno.EINVAL
        # too long, too short
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, Attr(0, b"\1" * 9), Attr(1, out=48)) == errno.EINVAL
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, *query_port(size=8)) == errno.EINVAL
        # unknown: passed over, unless the caller can't do without
        unknown = Attr(77, b"\1", flags=0)
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, *query_port(more=(unknown,))) == 0
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, *query_port(more=(Attr(77, b"\1"),))) == errno.EPROTONOSUPPORT
        # nowhere to answer to
        bad = Attr(1, out=48)
        bad.value = 8
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, Attr(0, b"\1"), bad) == errno.EFAULT


def test_more_attributes_than_any_method_has_are_refused() -> None:
    with Raw() as raw:
        assert raw.ioctl(DEVICE, DEVICE_QUERY_PORT, *[Attr(100 + i, flags=0) for i in range(200)]) == errno.EINVAL


def test_a_handle_attribute_has_no_length() -> None:
    with Raw() as raw:
        pd = raw.alloc_pd()
        bad = Attr(0, handle=pd)
        bad.len = 4
        assert raw.ioctl(PD, 0, bad) == errno.EINVAL
        assert raw.ioctl(PD, 0, Attr(0, handle=-1)) == errno.EINVAL
        assert raw.ioctl(PD, 0, Attr(0, handle=1 << 32)) == errno.ENOENT
        assert raw.ioctl(PD, 0, Attr(0, handle=pd)) == 0
        assert raw.ioctl(PD, 0, Attr(0, handle=pd)) == errno.ENOENT


def test_ioctls_that_are_not_ours_go_to_the_kernel() -> None:
    with Raw() as raw:
        assert lib.ioctl(raw.fd, 0x5401, None) == -1  # TCGETS
        assert ctypes.get_errno() == errno.ENOTTY


# ------------------------------------------------------------------ what the provider's part must be


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"cqe_size": 32}, errno.EINVAL),
        ({"cqe_size": 0}, errno.EINVAL),
        ({"flags": 0}, errno.EINVAL),  # no UAR page, and none by index
        ({"flags": 2 | 0x80}, errno.EINVAL),
        ({"flags": 2 | 4}, errno.EOPNOTSUPP),  # real time timestamps
        ({"flags": 2 | 1}, errno.EOPNOTSUPP),  # padding of 128 byte CQEs for 64 byte ones
        ({"comp": 1}, errno.EOPNOTSUPP),
        ({"reserved": 1}, errno.EINVAL),
        ({"cqe": 1 << 22}, errno.EINVAL),
        ({"cqe": 0xFFFFFFFF}, errno.EINVAL),
        ({"vector": 4}, errno.EINVAL),
    ],
)
def test_completion_queues_the_device_can_not_make(change: dict[str, int], code: int) -> None:
    with Raw() as raw:
        assert raw.create_cq_error(**change) == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"sq_wqe_count": 15}, errno.EINVAL),
        ({"sq_wqe_count": 1 << 16}, errno.EINVAL),
        ({"sq_wqe_count": 0x80000000}, errno.EINVAL),
        ({"rq_wqe_count": 3}, errno.EINVAL),
        ({"rq_wqe_count": 1 << 16}, errno.EINVAL),
        ({"rq_wqe_shift": 3}, errno.EINVAL),
        ({"rq_wqe_shift": 64}, errno.EINVAL),
        ({"max_send_wr": 1 << 16}, errno.EINVAL),
        ({"max_recv_wr": 1 << 16}, errno.EINVAL),
        ({"max_send_sge": 31}, errno.EINVAL),
        ({"max_recv_sge": 33}, errno.EINVAL),
        ({"max_inline": 4096}, errno.EINVAL),
        ({"uidx": 1 << 24}, errno.EINVAL),
        ({"flags": 1}, errno.EOPNOTSUPP),  # WQE signatures
        ({"flags": 1 << 4}, errno.EOPNOTSUPP),  # dynamically connected target
        ({"flags": 1 << 30}, errno.EINVAL),
    ],
)
def test_queue_pairs_the_device_can_not_make(change: dict[str, int], code: int) -> None:
    with Raw() as raw:
        assert raw.create_qp_error(raw.alloc_pd(), raw.create_cq(), **change) == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"max_wr": 1 << 15}, errno.EINVAL),
        ({"max_sge": 32}, errno.EINVAL),
        ({"flags": 1}, errno.EOPNOTSUPP),
    ],
)
def test_shared_receive_queues_the_device_can_not_make(change: dict[str, int], code: int) -> None:
    with Raw() as raw:
        assert raw.create_srq_error(raw.alloc_pd(), **change) == code


# ------------------------------------------------------------------ the descriptor itself


def test_the_node_looks_like_a_character_device_to_those_who_ask() -> None:
    class Stat(ctypes.Structure):
        _fields_ = [("raw", ctypes.c_uint64 * 64)]

    with Raw() as raw:
        st = Stat()
        assert lib.fstat(raw.fd, ctypes.byref(st)) == 0
        by_fd = bytes(st)
        assert lib.stat(b"/dev/infiniband/uverbs0", ctypes.byref(st)) == 0
        mode = (by_fd if os.uname().machine == "x86_64" else bytes(st))[24:28]
        if os.uname().machine == "x86_64":
            assert struct.unpack("=I", mode)[0] & 0o170000 == 0o020000
            assert by_fd[40:48] == bytes(st)[40:48] == struct.pack("=Q", os.makedev(231, 192))
        assert lib.stat(b"/dev/infiniband/uverbs9", ctypes.byref(st)) == -1


def test_a_number_that_was_closed_behind_our_back_is_somebody_elses() -> None:
    raw = Raw()
    fd = raw.fd
    os.close(fd)  # not through the hooks
    stranger = os.open("/dev/null", os.O_RDWR)
    try:
        if stranger == fd:
            assert raw.write(b"x" * 64) == 0, "a command, not a write to /dev/null"
            assert lib.close(fd) == 0
            stranger = -1
    finally:
        if stranger >= 0:
            os.close(stranger)
    Raw().__exit__(None, None, None)  # opening looks for such contexts and removes them


# ------------------------------------------------------------------ doorbell pages

UAR_OBJECT, UAR_ALLOC, UAR_DESTROY = 0x1008, 0x1000, 0x1001


def alloc_uar(raw: Raw, kind: int = 1) -> tuple[int, int, int]:
    attrs = [
        Attr(0x1000, handle=0),
        Attr(0x1001, struct.pack("=Q", kind)),
        Attr(0x1002, out=8),
        Attr(0x1003, out=4),
        Attr(0x1004, out=4),
    ]
    code = raw.ioctl(UAR_OBJECT, UAR_ALLOC, *attrs)
    if code:
        raise OSError(code, "UAR")
    offset, length = struct.unpack("=Q", attrs[2].buffer.raw)[0], struct.unpack("=I", attrs[3].buffer.raw)[0]
    assert length == mmap.PAGESIZE
    return attrs[0].value, offset, struct.unpack("=I", attrs[4].buffer.raw)[0]


def test_a_doorbell_page_is_mapped_by_the_offset_that_came_with_it() -> None:
    with Raw() as raw:
        handle, offset, _ = alloc_uar(raw)
        address = lib.mmap(None, 4096, mmap.PROT_WRITE, mmap.MAP_SHARED, raw.fd, offset)
        ctypes.c_uint64.from_address(address + 0x800).value = 1
        for length, where in ((8192, offset), (4096, offset + (1 << 20)), (4096, 0)):
            assert ctypes.c_void_p(lib.mmap(None, length, mmap.PROT_WRITE, mmap.MAP_SHARED, raw.fd, where)).value == (
                ctypes.c_void_p(-1).value
            )
            assert ctypes.get_errno() == errno.EINVAL
        assert lib.munmap(address, 4096) == 0
        assert raw.ioctl(UAR_OBJECT, UAR_DESTROY, Attr(0x1000, handle=handle)) == 0


def test_a_doorbell_page_may_be_destroyed_before_it_is_unmapped() -> None:
    with Raw() as raw:
        handle, offset, _ = alloc_uar(raw)
        address = lib.mmap(None, 4096, mmap.PROT_WRITE, mmap.MAP_SHARED, raw.fd, offset)
        assert raw.ioctl(UAR_OBJECT, UAR_DESTROY, Attr(0x1000, handle=handle)) == 0
        ctypes.c_uint64.from_address(address).value = 1
        assert lib.munmap(address, 4096) == 0


def test_a_doorbell_page_of_an_unknown_kind_is_refused() -> None:
    with Raw() as raw, pytest.raises(OSError) as caught:
        alloc_uar(raw, 7)
    assert caught.value.errno == errno.EOPNOTSUPP

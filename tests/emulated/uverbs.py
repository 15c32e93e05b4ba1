"""The uverbs ABI with nothing above it: commands as bytes, straight to the emulator's hooks.

libibverbs and libmlx5 never send most of what a hostile or broken program can; this does. Structures are those of
rdma/ib_user_verbs.h, rdma/mlx5-abi.h and rdma/rdma_user_ioctl_cmds.h, as format strings of the struct module.
"""

import ctypes
import errno
import mmap
import os
import struct
from types import TracebackType
from typing import Any

from aiordma.emulator._library import library_path

lib = ctypes.CDLL(os.fspath(library_path()), use_errno=True)
lib.open.argtypes = [ctypes.c_char_p, ctypes.c_int]
lib.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
lib.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
lib.write.restype = ctypes.c_ssize_t
lib.close.argtypes = [ctypes.c_int]
lib.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
lib.mmap.restype = ctypes.c_void_p
lib.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

RDMA_VERBS_IOCTL = 0xC0181B01
DRIVER_MLX5 = 1
MANDATORY, VALID_OUTPUT = 1, 2
EXTENDED = 0x80000000
UHW_IN, UHW_OUT = 0x1000, 0x1001

GET_CONTEXT, QUERY_DEVICE, QUERY_PORT, ALLOC_PD, DEALLOC_PD = 0, 1, 2, 3, 4
CREATE_AH, DESTROY_AH, REG_MR, REREG_MR, DEREG_MR, ALLOC_MW, DEALLOC_MW = 5, 8, 9, 11, 13, 14, 16
CREATE_COMP_CHANNEL, CREATE_CQ, RESIZE_CQ, DESTROY_CQ = 17, 18, 19, 20
CREATE_QP, MODIFY_QP, DESTROY_QP, CREATE_SRQ, DESTROY_SRQ = 24, 26, 27, 32, 35


class Attr:
    """An attribute of an ioctl command; data of up to eight bytes goes inline."""

    def __init__(
        self, id: int, data: bytes = b"", *, out: int = 0, handle: int | None = None, flags: int = MANDATORY
    ) -> None:
        self.id, self.flags = id, flags
        self.buffer: Any = None
        if handle is not None:
            self.len, self.value = 0, handle & 0xFFFFFFFFFFFFFFFF
        elif out:
            self.buffer = ctypes.create_string_buffer(out)
            self.len, self.value = out, ctypes.addressof(self.buffer)
        elif len(data) <= 8:
            self.len, self.value = len(data), int.from_bytes(data, "little")
        else:
            self.buffer = ctypes.create_string_buffer(data, len(data))
            self.len, self.value = len(data), ctypes.addressof(self.buffer)

    def pack(self) -> bytes:
        return struct.pack("=HHHHQ", self.id, self.len, self.flags, 0, self.value)


class Raw:
    """An open device node. Methods return handles and raise OSError; those named *_error return the errno."""

    def __init__(self, device: str = "mlx5_0", *, context: bool = True) -> None:
        from emulated.conftest import CONFIG

        index = [d.name for d in CONFIG.devices].index(device)
        self.fd = lib.open(b"/dev/infiniband/uverbs%d" % index, os.O_RDWR | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "open")
        self.memory = mmap.mmap(-1, 1 << 16)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.fds: list[int] = []
        if context:
            self.get_context()

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close(self.fd)

    def close(self, fd: int) -> int:
        return int(lib.close(fd))

    # ---- the two forms

    def ioctl(self, object: int, method: int, *attrs: Attr, **header: int) -> int:
        """Run a method; return the errno."""
        count = header.get("num_attrs", len(attrs))
        packed = struct.pack(
            "=HHHHQII",
            header.get("length", 24 + 16 * len(attrs)),
            object,
            method,
            count,
            header.get("reserved1", 0),
            header.get("driver_id", DRIVER_MLX5),
            header.get("reserved2", 0),
        ) + b"".join(a.pack() for a in attrs)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        if lib.ioctl(self.fd, RDMA_VERBS_IOCTL, buffer):
            return ctypes.get_errno()
        for i, attr in enumerate(attrs):
            _, _, attr.flags, _, attr.value = struct.unpack_from("=HHHHQ", buffer, 24 + 16 * i)
        return 0

    def write(self, data: bytes) -> int:
        """Write bytes as they are; return the errno."""
        buffer = ctypes.create_string_buffer(data, len(data))
        n = lib.write(self.fd, buffer, len(data))
        assert n in (-1, len(data))
        return 0 if n >= 0 else ctypes.get_errno()

    def command(self, number: int, request: bytes, size: int = 0, *, has_response: bool = True, **header: int) -> bytes:
        """Run a command in the write form. The request is without its response field; OSError on failure."""
        out = ctypes.create_string_buffer(max(size, 1))
        if has_response:
            request = struct.pack("=Q", header.get("response", ctypes.addressof(out))) + request
        words = (8 + len(request)) // 4
        head = struct.pack(
            "=IHH", header.get("command", number), header.get("in_words", words), header.get("out_words", size // 4)
        )
        code = self.write(head + request)
        if code:
            raise OSError(code, f"command {number}")
        return out.raw[:size]

    def error(self, number: int, request: bytes, size: int = 0, **header: Any) -> int:
        """The same, and return the errno."""
        try:
            self.command(number, request, size, **header)
        except OSError as x:
            return x.errno or 0
        return 0

    # ---- objects

    def get_context(self) -> None:
        request = struct.pack("=IIIIBBHIQ", 16, 4, 0, 0, 1, 0, 0, 0, 2)  # lib_caps: dynamic UAR
        out = self.command(GET_CONTEXT, request, 8 + 64)
        self.async_fd, self.num_comp_vectors = struct.unpack_from("=II", out)
        self.fds.append(self.async_fd)

    def alloc_pd(self) -> int:
        return int(struct.unpack_from("=I", self.command(ALLOC_PD, b"", 8))[0])

    def reg_mr_request(
        self, pd: int, start: int | None = None, length: int = 4096, access: int = 1, iova: int | None = None
    ) -> bytes:
        start = self.address if start is None else start
        return struct.pack("=QQQII", start, length, start if iova is None else iova, pd, access)

    def reg_mr(self, pd: int, **args: int) -> int:
        return int(struct.unpack_from("=I", self.command(REG_MR, self.reg_mr_request(pd, **args), 12))[0])

    def reg_mr_error(self, pd: int, **args: int) -> int:
        return self.error(REG_MR, self.reg_mr_request(pd, **args), 12)

    def alloc_mw(self, pd: int, kind: int = 1) -> int:
        return int(struct.unpack_from("=I", self.command(ALLOC_MW, struct.pack("=IBxxx", pd, kind), 8))[0])

    def alloc_mw_error(self, pd: int, kind: int = 1) -> int:
        return self.error(ALLOC_MW, struct.pack("=IBxxx", pd, kind), 8)

    def ah_request(self, pd: int, *, sgid_index: int = 3, is_global: int = 1, port: int = 1) -> bytes:
        dgid = bytes.fromhex("00000000000000000000ffffc0000201")
        attr = dgid + struct.pack("=IBBBx", 0, sgid_index, 64, 0) + struct.pack("=HBBBBBx", 0, 0, 0, 0, is_global, port)
        return struct.pack("=QIxxxx", 0, pd) + attr

    def create_ah(self, pd: int, **args: int) -> int:
        return int(struct.unpack_from("=I", self.command(CREATE_AH, self.ah_request(pd, **args), 4 + 16))[0])

    def create_ah_error(self, pd: int, **args: int) -> int:
        return self.error(CREATE_AH, self.ah_request(pd, **args), 4 + 16)

    def create_comp_channel(self) -> int:
        fd = int(struct.unpack("=I", self.command(CREATE_COMP_CHANNEL, b"", 4))[0])
        self.fds.append(fd)
        return fd

    def cq_request(
        self,
        *,
        cqe: int = 7,
        channel: int = -1,
        vector: int = 0,
        buf: int | None = None,
        db: int | None = None,
        cqe_size: int = 64,
        flags: int = 2,
        comp: int = 0,
        reserved: int = 0,
    ) -> bytes:
        buf = self.address if buf is None else buf
        db = self.address + 0x8000 if db is None else db
        core = struct.pack("=QIIiI", 0x1234, cqe, vector, channel, 0)
        return core + struct.pack("=QQIBBHHHI", buf, db, cqe_size, comp, 0, flags, 1, reserved, 0)

    def create_cq(self, **args: int) -> int:
        return int(struct.unpack_from("=I", self.command(CREATE_CQ, self.cq_request(**args), 8 + 8))[0])

    def create_cq_error(self, **args: int) -> int:
        return self.error(CREATE_CQ, self.cq_request(**args), 8 + 8)

    def qp_request(
        self,
        pd: int,
        send_cq: int,
        recv_cq: int | None = None,
        *,
        srq: int | None = None,
        qp_type: int = 2,
        max_send_wr: int = 4,
        max_recv_wr: int = 4,
        max_send_sge: int = 1,
        max_recv_sge: int = 1,
        max_inline: int = 0,
        buf: int | None = None,
        db: int | None = None,
        sq_wqe_count: int = 16,
        rq_wqe_count: int = 4,
        rq_wqe_shift: int = 4,
        flags: int = 1 << 10,
        uidx: int = 1,
    ) -> bytes:
        core = struct.pack(
            "=QIIIIIIIIIBBBx",
            0x5678,
            pd,
            send_cq,
            send_cq if recv_cq is None else recv_cq,
            srq or 0,
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline,
            0,
            qp_type,
            srq is not None,
        )
        buf = self.address + 0x1000 if buf is None else buf
        db = self.address + 0x8100 if db is None else db
        mlx5 = struct.pack("=QQIIIIIIQ", buf, db, sq_wqe_count, rq_wqe_count, rq_wqe_shift, flags, uidx, 1, 0)
        return core + mlx5

    def create_qp(self, *args: int, **more: Any) -> int:
        return int(struct.unpack_from("=I", self.command(CREATE_QP, self.qp_request(*args, **more), 32 + 40))[0])

    def create_qp_error(self, *args: int, **more: Any) -> int:
        return self.error(CREATE_QP, self.qp_request(*args, **more), 32 + 40)

    def srq_request(
        self,
        pd: int,
        *,
        max_wr: int = 3,
        max_sge: int = 1,
        buf: int | None = None,
        db: int | None = None,
        flags: int = 0,
    ) -> bytes:
        buf = self.address + 0x4000 if buf is None else buf
        db = self.address + 0x8200 if db is None else db
        return struct.pack("=QIIII", 0x9ABC, pd, max_wr, max_sge, 0) + struct.pack("=QQIIII", buf, db, flags, 0, 0, 0)

    def create_srq(self, pd: int, **args: Any) -> int:
        return int(struct.unpack_from("=I", self.command(CREATE_SRQ, self.srq_request(pd, **args), 16 + 8))[0])

    def create_srq_error(self, pd: int, **args: Any) -> int:
        return self.error(CREATE_SRQ, self.srq_request(pd, **args), 16 + 8)

    def destroy(self, kind: str, handle: int) -> int:
        """Destroy an object; return the errno."""
        if kind in ("cq", "qp", "srq"):
            number, size = {"cq": (DESTROY_CQ, 8), "qp": (DESTROY_QP, 4), "srq": (DESTROY_SRQ, 4)}[kind]
            return self.error(number, struct.pack("=II", handle, 0), size)
        number = {"pd": DEALLOC_PD, "mr": DEREG_MR, "mw": DEALLOC_MW, "ah": DESTROY_AH}[kind]
        return self.error(number, struct.pack("=I", handle), has_response=False)


__all__ = ["Attr", "Raw", "errno", "lib"]

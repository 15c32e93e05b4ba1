"""DC, mlx5's dynamically connected transport: one initiator reaches any number of targets without a connection to each.

A :class:`DCTarget` (DCT) receives, on an SRQ; a :class:`DCInitiator` (DCI) names the target in each work request: by
address handle, DCT number and DC access key. With streams, a DCI works on several targets side by side, and an error on
one stream leaves the others alone (mlx5dv_create_qp(3), mlx5dv_wr_set_dc_addr(3), mlx5dv_dci_stream_id_reset(3)).
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from aiordma import _control, _pyverbs
from aiordma._cq import CompletionQueue
from aiordma._memory import MemorySlice, RemoteBuffer
from aiordma._mlx5 import DcAddress, DcInitiatorBase
from aiordma._offload import Pending, in_thread, in_use, make_verbs_object, until, using
from aiordma._operation import Completion
from aiordma._owned import Owned
from aiordma._values import whole, whole_fields
from aiordma._waitable import Signal
from aiordma.errors import ClosedError, UnsupportedError, UsageError
from aiordma.gid import GidType, match
from aiordma.mlx5.qp import INIT_PD, INIT_SEND_OPS, MASK_DC, MASK_DCI_STREAMS, MASK_SEND_OPS, OPS_MEMCPY, VERBS_OPS_DCI
from aiordma.qp import INIT, RTR, RTS, QPConfig, VerbsQueuePair, cap, check_limits, make
from aiordma.srq import SharedReceiveQueue

if TYPE_CHECKING:
    from aiordma._batch import Batch
    from aiordma._post import Source, Target
    from aiordma.device import Device

__all__ = ["DCInitiator", "DCTInfo", "DCTarget", "DcPeer", "create_dc_initiator", "create_dc_target"]

QPT_DRIVER = 0xFF  # enum ibv_qp_type
DCTYPE_DCT, DCTYPE_DCI = 1, 2  # enum mlx5dv_dc_type
# enum ibv_qp_attr_mask
_STATE, _ACCESS, _PKEY, _PORT, _AV, _MTU = 1 << 0, 1 << 3, 1 << 4, 1 << 5, 1 << 7, 1 << 8
_TIMEOUT, _RETRY, _RNR_RETRY, _RD_ATOMIC, _MIN_RNR, _SQ_PSN = 1 << 9, 1 << 10, 1 << 11, 1 << 13, 1 << 15, 1 << 16
_MTU_CODE = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
# enum ibv_wr_opcode, ibv_send_flags
_WRITE, _WRITE_IMM, _SEND, _SEND_IMM, _READ, _CMP_SWP, _FETCH_ADD = range(7)
_SEND_INV = 9
_FENCE, _SIGNALED, _SOLICITED = 1 << 0, 1 << 1, 1 << 2

_MAGIC = b"aiDT"
_WIRE = struct.Struct("!4sBBHIQ16s")


@dataclass(frozen=True, slots=True)
class DCTInfo:
    """A DC target, for initiators elsewhere: DCT number (24 bits), DC access key (64 bits), its port's GID and LID."""

    dctn: int
    dc_key: int
    gid: bytes
    gid_type: GidType
    lid: int = 0

    def __post_init__(self) -> None:
        whole_fields(self)
        for name, limit in (("dctn", 1 << 24), ("dc_key", 1 << 64), ("lid", 1 << 16)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < limit:
                raise UsageError(f"DCTInfo: {name} is a number below {limit:#x}, not {value!r}")
        if not isinstance(self.gid, bytes) or len(self.gid) != 16:
            raise UsageError("DCTInfo: gid is 16 bytes")
        try:
            object.__setattr__(self, "gid_type", GidType(self.gid_type))
        except ValueError as e:
            raise UsageError(f"DCTInfo: {e}") from e

    def to_bytes(self) -> bytes:
        """36 bytes in network byte order, for :meth:`from_bytes`."""
        return _WIRE.pack(_MAGIC, 1, int(self.gid_type), self.lid, self.dctn, self.dc_key, self.gid)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> DCTInfo:
        """The inverse of :meth:`to_bytes`; :class:`UsageError` for anything else."""
        data = bytes(data)
        if len(data) != _WIRE.size or not data.startswith(_MAGIC + b"\1"):
            raise UsageError(f"not a DCTInfo of {_WIRE.size} bytes: {data[:8]!r}")
        _, _, gid_type, lid, dctn, dc_key, gid = _WIRE.unpack(data)
        try:
            return cls(dctn, dc_key, gid, GidType(gid_type), lid)
        except ValueError as e:
            raise UsageError(f"not a DCTInfo: {e}") from e

    def to_json(self) -> str:
        """A JSON object, for :meth:`from_json`; 64-bit numbers as hex strings, since JSON's lose them."""
        values = asdict(self)
        return json.dumps(
            {**values, "dc_key": f"{self.dc_key:#x}", "gid": self.gid.hex(), "gid_type": int(self.gid_type)}
        )

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any]) -> DCTInfo:
        """From JSON text or from a dict that was decoded from it; :class:`UsageError` names what is wrong."""
        try:
            fields: Mapping[str, Any] = json.loads(data) if isinstance(data, str | bytes) else data
            key = fields["dc_key"]
            return cls(
                fields["dctn"],
                int(key, 16) if isinstance(key, str) else key,
                bytes.fromhex(fields["gid"]),
                GidType(fields["gid_type"]),
                fields.get("lid", 0),
            )
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError) as e:
            raise UsageError(f"not a DCTInfo: {type(e).__name__}: {e}") from e


def check_dc(device: Device) -> None:
    """:class:`UnsupportedError` where DC can't be had."""
    device._check_open()
    if device.mlx5 is None:
        raise UnsupportedError(device.name, "DC transport", "it isn't an mlx5 device, or DEVX isn't permitted")


def _init_attr(device: Device, config: QPConfig, cqs: tuple[Any, Any], srq: SharedReceiveQueue | None, ops: int) -> Any:
    return _pyverbs.module("qp").QPInitAttrEx(
        qp_type=QPT_DRIVER,
        scq=cqs[0],
        rcq=cqs[1],
        srq=srq.pyverbs if srq is not None else None,
        cap=cap(config, False),
        pd=device.qp_pd if ops else device.pd,  # a target posts nothing
        comp_mask=INIT_PD | (INIT_SEND_OPS if ops else 0),
        send_ops_flags=ops,
        sq_sig_all=0,
    )


# ---------------------------------------------------------------- targets


class DCTarget(Owned):
    """A DCT: any initiator that knows its :attr:`info` reaches the SRQ's receives and this PD's memory through it.

    Made by :func:`create_dc_target`, ready. Close it before its SRQ.
    """

    kind: ClassVar[str] = "dc_targets"
    close_order: ClassVar[int] = 0

    def __init__(
        self, device: Device, pyverbs: Any, srq: SharedReceiveQueue, dc_key: int, config: QPConfig, cqs: Any
    ) -> None:
        self._pyverbs = pyverbs
        self._srq = srq
        self._dc_key = dc_key
        self._config = config
        self._send_cq: CompletionQueue = cqs
        self._number: int = pyverbs.qp_num
        self._address = _control.qp_address(pyverbs, device.context_address)
        self._belong(device)

    @property
    def pyverbs(self) -> Any:
        """The pyverbs Mlx5QP."""
        return self._pyverbs

    @property
    def address(self) -> int:
        """Address of the ``struct ibv_qp``."""
        return self._address

    @property
    def srq(self) -> SharedReceiveQueue:
        """Where its receives come from."""
        return self._srq

    @property
    def dctn(self) -> int:
        """The DCT number, 24 bits."""
        return self._number

    @property
    def info(self) -> DCTInfo:
        """What initiators need."""
        gid = self._device.gid
        return DCTInfo(
            self._number,
            self._dc_key,
            gid.raw if gid is not None else bytes(16),
            gid.type if gid is not None else GidType.IB,
            self._device.lid,
        )

    def close(self) -> Pending[None]:
        """Destroys it, off the loop; started by the call, a second call gives the same operation.

        Initiators get errors from then on. The SRQ's receives stay posted.
        """
        return super().close()

    def _used_at(self) -> int:
        return self._address

    def _destroy(self) -> None:
        try:
            self._pyverbs.close()
        except Exception as e:
            raise _pyverbs.translate(e, "ibv_destroy_qp", f"DCT {self._number:#x}") from e

    def _release(self) -> None:
        self._srq.detach(self)

    def __repr__(self) -> str:
        return f"<DCTarget {self._number:#x} on {self._device.name}{' closed' if self.closed else ''}>"


def create_dc_target(
    device: Device, srq: SharedReceiveQueue, *, dc_key: int | None = None, config: QPConfig | None = None
) -> Pending[DCTarget]:
    """Makes a DC target that receives on ``srq``, off the loop; or ``async with``.

    ``dc_key``: the 64-bit key that initiators must know; None: a random one. ``config``: its ``access`` says what
    initiators may do to this PD's memory; ``min_rnr_timer``, ``hop_limit`` and ``traffic_class`` are used too.
    """
    check_dc(device)
    if not isinstance(srq, SharedReceiveQueue):
        raise UsageError(f"create_dc_target: srq is a SharedReceiveQueue, not {type(srq).__name__}")
    srq.check_usable(device)
    key = secrets.randbits(64) if dc_key is None else whole(dc_key)
    if not isinstance(key, int) or not 0 <= key < 1 << 64:
        raise UsageError(f"dc_key: an unsigned 64-bit number, not {dc_key!r}")
    wanted = config if config is not None else QPConfig()
    wanted.check()
    return device._made(Pending(device.control, _create_target(device, srq, key, wanted), dispose=True))


async def _create_target(device: Device, srq: SharedReceiveQueue, key: int, config: QPConfig) -> DCTarget:
    send_cq = await device.engine.acquire("send", 0)

    def make_verbs() -> Any:
        dv = _pyverbs.module("providers.mlx5.mlx5dv")
        init = _init_attr(device, replace(config, max_send_wr=1), (send_cq.pyverbs, srq.cq.pyverbs), srq, 0)
        dc = dv.Mlx5DVDCInitAttr(dc_type=DCTYPE_DCT, dct_access_key=key)
        try:
            qp = dv.Mlx5QP(device.context, init, dv.Mlx5DVQPInitAttr(comp_mask=MASK_DC, dc_init_attr=dc))
        except Exception as e:
            raise _refused(device, e, "DC targets") from e
        try:
            address = _control.qp_address(qp, device.context_address)
            _control.modify_qp(
                address,
                _STATE | _PKEY | _PORT | _ACCESS,
                {
                    "qp_state": INIT,
                    "port_num": device.port,
                    "qp_access_flags": int(config.access & device.remote_access),
                    "_detail": "DCT to INIT",
                },
            )
            _control.modify_qp(
                address,
                _STATE | _AV | _MTU | _MIN_RNR,
                {
                    "qp_state": RTR,
                    "path_mtu": _MTU_CODE[device.active_mtu],
                    "min_rnr_timer": config.min_rnr_timer,
                    "ah_port": device.port,
                    "is_global": int(device.gid is not None),
                    "dgid": device.gid.raw if device.gid is not None else b"",
                    "sgid_index": device.gid.index if device.gid is not None else 0,
                    "hop_limit": config.hop_limit,
                    "traffic_class": config.traffic_class,
                    "_detail": "DCT to RTR",
                },
            )
        except BaseException:
            qp.close()
            raise
        return qp

    srq.check_usable(device)  # it may have been closed since the call
    with using(device.control, srq.address):
        target = DCTarget(device, await make_verbs_object(device.control, make_verbs), srq, key, config, send_cq)
        srq.attach(target)
        device.adopt(target)
    return target


def _refused(device: Device, e: Exception, what: str) -> BaseException:
    error = _pyverbs.translate(e, "mlx5dv_create_qp", what)
    if getattr(error, "errno", None) == 95:  # EOPNOTSUPP
        return UnsupportedError(device.name, what, str(error))
    return error


# ---------------------------------------------------------------- initiators


class DcPeer(Owned, DcAddress):
    """A DC target as an initiator's device reaches it; made by ``reach``. Close it when it's of no more use."""

    kind: ClassVar[str] = "dc_peers"
    close_order: ClassVar[int] = 2

    def __init__(self, device: Device, pyverbs_ah: Any, info: DCTInfo) -> None:
        address = _control.ah_address(pyverbs_ah, device.context_address, device.pd_address)
        super().__init__(address, info.dctn, info.dc_key, pyverbs_ah, device.pd)
        self._pyverbs = pyverbs_ah
        self._info = info
        self._belong(device)

    @property
    def info(self) -> DCTInfo:
        """The target."""
        return self._info

    def close(self) -> Pending[None]:
        """Destroys the address handle, off the loop, as soon as no work request that waits for a slot uses it.

        Started by the call; a second call gives the same operation.
        """
        return super().close()

    def _stop(self) -> None:
        self._shut()

    async def _quiesce(self) -> None:
        # A posted WQE holds a copy of the address vector, not the handle.
        idle = Signal(self._device.control.hooks)
        self._notify_idle(idle)
        await until(idle)

    def _destroy(self) -> None:
        try:
            self._pyverbs.close()
        except Exception as e:
            raise _pyverbs.translate(e, "ibv_destroy_ah", f"{self._info}") from e

    def __repr__(self) -> str:
        return f"<DcPeer DCT {self.dctn:#x} key={self.key:#x}{' closed' if self.closed else ''}>"


class DCInitiator(VerbsQueuePair, DcInitiatorBase):
    """A DCI: the posting calls of a QP, each with the target that it goes to, and with the stream it's on.

    Made by :func:`create_dc_initiator`, in RTS. All of them post at once and return a :class:`Completion`; all requests are
    signalled, whatever ``signaled`` says. Requests of one stream happen in order; those of different streams side by
    side. See :class:`DCIPool` for many targets.

    Without streams an operation that fails puts the DCI into the error state. With them only its stream fails: what else
    is on the stream is flushed, and :meth:`reset_stream` makes it usable again; when 2**log_errored streams are in error
    at the same time the DCI goes to the error state (mlx5dv_dci_stream_id_reset(3)).
    """

    _log_streams: int = 0

    def _send_kind(self) -> str:
        return "streams" if self._config.qp_type == "DCI streams" else "send"

    def set_up_dci(self, log_streams: int, log_errored: int, streams: bool, memcpy_limit: int) -> None:
        self._setup_mlx5(self.device.name, 0, 0, memcpy_limit, False)
        self._set_streams(streams)
        self._log_streams = log_streams
        self._log_errored = log_errored
        self._has_streams = streams

    @property
    def qp_type(self) -> str:
        """``"DCI"``."""
        return "DCI"

    @property
    def streams(self) -> range:
        """The stream ids to use: 1 to 2**log_streams; only 0 where it was made without streams."""
        return range(1, (1 << self._log_streams) + 1) if self._has_streams else range(1)

    @property
    def max_errored_streams(self) -> int:
        """So many streams in error at the same time put the DCI into the error state."""
        return 1 << self._log_errored

    def reach(self, info: DCTInfo) -> Pending[DcPeer]:
        """Makes the address of a target (ibv_create_ah(3)), off the loop. The peers of a DCI work on its whole device."""
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        return reach(self.device, info, self._config)

    def reset_stream(self, stream_id: int) -> Pending[None]:
        """Makes a stream in error usable again (mlx5dv_dci_stream_id_reset(3)), off the loop.

        To be called when everything on the stream has been flushed. :class:`VerbsError` when the stream isn't in error.
        """
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        stream_id = whole(stream_id)
        if not isinstance(stream_id, int) or not 0 <= stream_id <= 0xFFFF:
            raise UsageError(f"stream_id: 0 to 65535, not {stream_id!r}")
        if not self._has_streams:
            raise UsageError(f"{self!r} was made without streams")
        self.device.control.hooks.verify()
        return Pending(self.device.control, self.reset_stream_now(stream_id))

    async def reset_stream_now(self, stream_id: int) -> None:
        """Inside a control operation: see :meth:`reset_stream`."""
        if self.closed or not _control.holds(self.pyverbs, self.address):
            raise ClosedError(f"{self!r} is closed")
        await in_use(self.device.control, self.address, _control.dci_stream_id_reset, self.address, stream_id)

    # The requests of a DCI need a target, so its calls can't have the signatures of a connected QP's.

    def send(  # type: ignore[override]
        self,
        target: DcPeer,
        local: Source,
        *,
        imm: int | None = None,
        invalidate_rkey: int | None = None,
        stream_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
        solicited: bool = False,
        inline: bool | None = None,
    ) -> Completion:
        """SEND, with immediate or invalidate, to ``target``'s SRQ; as :meth:`QueuePair.send`."""
        if imm is not None and invalidate_rkey is not None:
            raise UsageError("a send carries an imm or an rkey to invalidate, not both")
        opcode, extra = (_SEND_IMM, imm) if imm is not None else (_SEND, None)
        if invalidate_rkey is not None:
            opcode, extra = _SEND_INV, invalidate_rkey
        flags = _flags(signaled, fence, solicited)
        return self._post_to(target, opcode, local, None, extra, inline, flags, stream_id, None, None)

    def rdma_write(  # type: ignore[override]
        self,
        target: DcPeer,
        local: Source,
        remote: RemoteBuffer,
        *,
        imm: int | None = None,
        stream_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
        solicited: bool = False,
        inline: bool | None = None,
    ) -> Completion:
        """RDMA WRITE to memory of ``target``'s PD; as :meth:`QueuePair.rdma_write`."""
        opcode = _WRITE if imm is None else _WRITE_IMM
        flags = _flags(signaled, fence, solicited)
        return self._post_to(target, opcode, local, remote, imm, inline, flags, stream_id, None, None)

    def rdma_read(  # type: ignore[override]
        self,
        target: DcPeer,
        local: Target,
        remote: RemoteBuffer,
        *,
        stream_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
    ) -> Completion:
        """RDMA READ of memory of ``target``'s PD; as :meth:`QueuePair.rdma_read`."""
        flags = _flags(signaled, fence, False)
        return self._post_to(target, _READ, local, remote, None, None, flags, stream_id, None, None)

    def atomic_fetch_add(  # type: ignore[override]
        self,
        target: DcPeer,
        local: MemorySlice,
        remote: RemoteBuffer,
        add: int,
        *,
        stream_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
    ) -> Completion:
        """Atomic addition; as :meth:`QueuePair.atomic_fetch_add`."""
        flags = _flags(signaled, fence, False)
        return self._post_to(target, _FETCH_ADD, local, remote, None, None, flags, stream_id, add, 0)

    def atomic_cmp_swp(  # type: ignore[override]
        self,
        target: DcPeer,
        local: MemorySlice,
        remote: RemoteBuffer,
        compare: int,
        swap: int,
        *,
        stream_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
    ) -> Completion:
        """Atomic compare and swap; as :meth:`QueuePair.atomic_cmp_swp`."""
        flags = _flags(signaled, fence, False)
        return self._post_to(target, _CMP_SWP, local, remote, None, None, flags, stream_id, compare, swap)

    def recv(self, local: Target) -> Completion:
        """A DCI receives nothing: :class:`UsageError`."""
        raise UsageError("a DCI only sends: receives are posted to the SRQ of a DCTarget")

    def local_inv(self, rkey: int, *, signaled: bool = True, fence: bool = False) -> Completion:
        """Not on a DCI: :class:`UsageError`."""
        raise UsageError("mkeys and windows are invalidated on an RC QP")

    def batch(self) -> Batch:
        """Not on a DCI: :class:`UsageError`."""
        raise UsageError("the requests of a DCI each name a target: post them one by one")

    def rdma_write_many(self, pairs: object) -> Completion:
        """Not on a DCI: :class:`UsageError`."""
        raise UsageError("the requests of a DCI each name a target: post them one by one")

    def rdma_read_many(self, pairs: object) -> Completion:
        """Not on a DCI: :class:`UsageError`."""
        raise UsageError("the requests of a DCI each name a target: post them one by one")

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.state
        return f"<DCInitiator {self.qp_num:#x} {state} on {self.device.name}>"


def _flags(signaled: bool, fence: bool, solicited: bool) -> int:
    return (_SIGNALED if signaled else 0) | (_FENCE if fence else 0) | (_SOLICITED if solicited else 0)


def reach(device: Device, info: DCTInfo, config: QPConfig) -> Pending[DcPeer]:
    """The address of a target from ``device``; see :meth:`DCInitiator.reach`."""
    device._check_open()
    if not isinstance(info, DCTInfo):
        raise UsageError(f"reach() takes the target's DCTInfo, not {type(info).__name__}")
    return device._made(Pending(device.control, _reach(device, info, config), dispose=True))


async def _reach(device: Device, info: DCTInfo, config: QPConfig) -> DcPeer:
    def make_verbs() -> Any:
        addr = _pyverbs.module("addr")
        options: dict[str, Any] = {"port_num": device.port, "sl": config.service_level, "dlid": info.lid}
        if any(info.gid) and device.gid is not None:
            gid = match(device.gids, device.gid, info.gid, info.gid_type)
            text = ":".join(info.gid[i : i + 2].hex() for i in range(0, 16, 2))
            options["is_global"] = 1
            options["gr"] = addr.GlobalRoute(
                dgid=addr.GID(text),
                sgid_index=gid.index,
                hop_limit=config.hop_limit,
                traffic_class=config.traffic_class,
                flow_label=config.flow_label,
            )
        try:
            return addr.AH(device.pd, attr=addr.AHAttr(**options))
        except Exception as e:
            raise _pyverbs.translate(e, "ibv_create_ah", f"{info}") from e

    peer = DcPeer(device, await in_thread(device.control, make_verbs), info)
    device.adopt(peer)
    return peer


def create_dc_initiator(
    device: Device,
    config: QPConfig | None = None,
    *,
    log_streams: int | None = None,
    log_errored: int = 0,
    memcpy: bool = False,
    **options: Any,
) -> Pending[DCInitiator]:
    """Makes a DCI, off the loop; or ``async with``.

    ``log_streams``: 2**log_streams streams; None: without streams (stream_id 0 only). ``log_errored``: see
    :class:`DCInitiator`. ``memcpy``: DMA memcpy too. ``options``: fields of :class:`QPConfig`.

    Raises :class:`UnsupportedError`, naming the device, where it lacks DC, streams or memcpy.
    """
    check_dc(device)
    try:
        wanted = replace(config if config is not None else QPConfig(), **options)
    except TypeError as e:
        raise UsageError(f"create_dc_initiator: {e}; the options are the fields of QPConfig") from e
    wanted.check()
    check_limits(device, wanted)
    if log_streams is not None:
        caps = device.mlx5.dci_streams_caps
        if not caps["max_log_num_concurent"]:
            raise UnsupportedError(device.name, "DCI streams", "max_log_num_concurent is 0 (mlx5dv_query_device(3))")
        log_streams, log_errored = whole(log_streams), whole(log_errored)
        if not isinstance(log_streams, int) or not 0 <= log_streams <= caps["max_log_num_concurent"]:
            raise UsageError(f"log_streams: 0 to {caps['max_log_num_concurent']} on {device.name}, not {log_streams}")
        if not isinstance(log_errored, int) or not 0 <= log_errored <= caps["max_log_num_errored"]:
            raise UsageError(f"log_errored: 0 to {caps['max_log_num_errored']} on {device.name}, not {log_errored}")
    limit = int(device.mlx5.max_wr_memcpy_length)
    if memcpy and not limit:
        raise UnsupportedError(device.name, "DMA memcpy", "max_wr_memcpy_length is 0 (mlx5dv_query_device(3))")
    creation = create_initiator(device, wanted, log_streams, log_errored, limit if memcpy else 0)
    return device._made(Pending(device.control, creation, dispose=True))


async def create_initiator(
    device: Device, config: QPConfig, log_streams: int | None, log_errored: int, memcpy_limit: int
) -> DCInitiator:
    """Inside a control operation: see :func:`create_dc_initiator`."""

    def maker(device: Device, config: QPConfig, cqs: tuple[Any, Any], srq: SharedReceiveQueue | None, /) -> Any:
        dv = _pyverbs.module("providers.mlx5.mlx5dv")
        init = _init_attr(device, config, cqs, None, VERBS_OPS_DCI)
        mask = MASK_DC | (MASK_SEND_OPS if memcpy_limit else 0)
        streams = None
        if log_streams is not None:
            mask |= MASK_DCI_STREAMS
            streams = dv.Mlx5DCIStreamInitAttr(log_num_concurent=log_streams, log_num_errored=log_errored)
        dc = dv.Mlx5DVDCInitAttr(dc_type=DCTYPE_DCI, dci_streams=streams)
        attr = dv.Mlx5DVQPInitAttr(comp_mask=mask, dc_init_attr=dc, send_ops_flags=OPS_MEMCPY if memcpy_limit else 0)
        try:
            qp = dv.Mlx5QP(device.context, init, attr)
        except Exception as e:
            raise _refused(device, e, "DC initiators") from e
        try:
            _ready(device, config, qp)
        except BaseException:
            qp.close()
            raise
        return qp, init

    kind = "DCI streams" if log_streams is not None else "DCI"
    dci = await make(device, replace(config, qp_type=kind, max_recv_wr=1), None, DCInitiator, maker, initialise=False)
    dci.set_up_dci(log_streams or 0, log_errored, log_streams is not None, memcpy_limit)
    return dci


def _ready(device: Device, config: QPConfig, qp: Any) -> None:
    """A DCI from RESET to RTS: it needs no peer."""
    address = _control.qp_address(qp, device.context_address)
    depth = 255 if config.max_rd_atomic is None else config.max_rd_atomic
    steps: tuple[tuple[int, dict[str, Any]], ...] = (
        (_STATE | _PKEY | _PORT, {"qp_state": INIT, "port_num": device.port, "_detail": "DCI to INIT"}),
        (_STATE | _MTU, {"qp_state": RTR, "path_mtu": _MTU_CODE[device.active_mtu], "_detail": "DCI to RTR"}),
        (
            _STATE | _TIMEOUT | _RETRY | _RNR_RETRY | _SQ_PSN | _RD_ATOMIC,
            {
                "qp_state": RTS,
                "timeout": config.timeout,
                "retry_cnt": config.retry_cnt,
                "rnr_retry": config.rnr_retry,
                "sq_psn": secrets.randbits(24),
                "max_rd_atomic": min(depth, device.max_qp_init_rd_atom),
                "_detail": "DCI to RTS",
            },
        ),
    )
    for mask, values in steps:
        _control.modify_qp(address, mask, values)

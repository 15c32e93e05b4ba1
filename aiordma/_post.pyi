from collections.abc import Sequence
from typing import TypeAlias

from typing_extensions import Buffer

from aiordma._memory import MemorySlice, RemoteBuffer
from aiordma._operation import Completion
from aiordma._workqueue import WorkQueue

Target: TypeAlias = MemorySlice | Sequence[MemorySlice] | None
Source: TypeAlias = MemorySlice | Buffer | Sequence[MemorySlice | Buffer] | None

class Receiver:
    def _attach_queue(self, queue: WorkQueue, domain: object, max_sge: int) -> None: ...
    def _post_receive(self, local: Target) -> Completion: ...

class QueuePairBase(Receiver):
    def _setup(
        self,
        qp: int,
        send: WorkQueue,
        recv: WorkQueue | None,
        domain: object,
        max_send_sge: int,
        max_recv_sge: int,
        max_inline_data: int,
        max_message: int,
        always_signal: bool,
    ) -> None: ...
    def _detach(self) -> None: ...
    def send(
        self,
        local: Source,
        *,
        imm: int | None = None,
        invalidate_rkey: int | None = None,
        signaled: bool = True,
        fence: bool = False,
        solicited: bool = False,
        inline: bool | None = None,
    ) -> Completion: ...
    def recv(self, local: Target) -> Completion: ...
    def rdma_write(
        self,
        local: Source,
        remote: RemoteBuffer,
        *,
        imm: int | None = None,
        signaled: bool = True,
        fence: bool = False,
        solicited: bool = False,
        inline: bool | None = None,
    ) -> Completion: ...
    def rdma_read(
        self, local: Target, remote: RemoteBuffer, *, signaled: bool = True, fence: bool = False
    ) -> Completion: ...
    def atomic_fetch_add(
        self, local: MemorySlice, remote: RemoteBuffer, add: int, *, signaled: bool = True, fence: bool = False
    ) -> Completion: ...
    def atomic_cmp_swp(
        self,
        local: MemorySlice,
        remote: RemoteBuffer,
        compare: int,
        swap: int,
        *,
        signaled: bool = True,
        fence: bool = False,
    ) -> Completion: ...
    def local_inv(self, rkey: int, *, signaled: bool = True, fence: bool = False) -> Completion: ...

"""The server: a listener, a task for each client, and an end in good order."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Callable

import anyio

import aiordma
from aiordma import Completion, Connection, Device, MemoryRegion, QPConfig, QueuePair, Request
from kv_cache.layout import KEY_BYTES, MESSAGE, WINDOW, Greeting, LayoutError, Message, Op, Status
from kv_cache.store import Store

# Messages fit into a work request: no buffer has to live until a send completes.
CONFIG = QPConfig(max_send_wr=2 * WINDOW, max_recv_wr=WINDOW, max_inline_data=MESSAGE, timeout=18)
MAX_CLIENTS = 1024


class Server:
    """Slots of registered memory, and the clients that use them."""

    def __init__(self, device: Device, memory: MemoryRegion, slots: int) -> None:
        self._device = device
        self._view = memory.view()
        self.store = Store(self._view, slots)
        self.clients = 0
        self._greeting = Greeting(slots, len(memory) // slots, memory.remote()).pack()
        self._sessions = itertools.count()

    def close(self) -> None:
        """Lets go of the memory, so that it can be deregistered."""
        self._view.release()

    async def session(self, request: Request) -> None:
        """One client, from its request to its end. What goes wrong with it is no other client's business."""
        me = next(self._sessions)
        self.clients += 1
        try:
            if self.clients > MAX_CLIENTS:
                await request.reject(1, b"too many clients")
                return
            async with self._device.reg_mr(bytearray(WINDOW * MESSAGE)) as inbox:

                def window(qp: QueuePair) -> deque[tuple[Completion, int]]:
                    # Before the client hears that it's accepted: its first message finds a receive.
                    return deque((qp.recv(_part(inbox, i)), i) for i in range(WINDOW))

                async with request.accept(private_data=self._greeting, prepare=window) as connection:
                    await self._serve(connection, inbox, me)
        except (aiordma.RdmaError, LayoutError) as e:
            # It left, sent what fits into no message, or there is no memory or queue pair for it.
            print(f"client {request.remote_address.host}: {e}", flush=True)
        finally:
            # Here the queue pair is closed, and nothing that the client sent before can reach the slots any more.
            self.store.abandon(me)
            self.clients -= 1

    async def _serve(self, connection: Connection, inbox: MemoryRegion, me: int) -> None:
        window: deque[tuple[Completion, int]] = connection.prepared
        while True:
            completion, i = window[0]
            try:
                received = await completion
            except aiordma.DisconnectedError:
                return  # the client has left
            window.popleft()
            with inbox.view() as view:
                message = Message.unpack(bytes(view[i * MESSAGE :][: received.byte_len]))
            # First a receive in its place, then the answer that lets the client send again.
            window.append((connection.recv(_part(inbox, i)), i))
            await connection.send(self._answer(message, me).pack())

    def _answer(self, message: Message, me: int) -> Message:
        store, key, number = self.store, message.key, message.number
        if not 0 < len(key) <= KEY_BYTES and message.code != Op.COUNT:
            return Message(Status.REFUSED, number)
        if message.code == Op.LOOKUP:
            place = store.lookup(key)
            if place is None:
                return Message(Status.NOT_FOUND, number)
            return Message(Status.OK, number, place.slot, place.length, place.version)
        if message.code == Op.RESERVE:
            if message.length > store.max_value:
                return Message(Status.REFUSED, number)
            place = store.reserve(me, key, message.length)
            if place is None:
                return Message(Status.FULL, number)
            return Message(Status.OK, number, place.slot, place.length, place.version)
        if message.code == Op.COMMIT:
            done = store.commit(me, key, message.slot, message.version)
            return Message(Status.OK if done else Status.REFUSED, number)
        if message.code == Op.DELETE:
            return Message(Status.OK if store.delete(key) else Status.NOT_FOUND, number)
        if message.code == Op.COUNT:
            return Message(Status.OK, number, length=len(store))
        return Message(Status.REFUSED, number)


def _part(inbox: MemoryRegion, i: int) -> aiordma.MemorySlice:
    return inbox[i * MESSAGE : (i + 1) * MESSAGE]


async def serve(
    host: str | None,
    port: int,
    *,
    slots: int = 1024,
    slot_bytes: int = 4096,
    device: str | None = None,
    via: aiordma.cm.Via | None = None,
    ready: Callable[[int], object] = lambda port: None,
) -> None:
    """Serves until SIGTERM or SIGINT; ``ready`` is told the port."""
    async with (
        aiordma.open_device(device) as opened,
        opened.reg_mr(bytearray(slots * slot_bytes)) as memory,
    ):
        server = Server(opened, memory, slots)
        try:
            async with (
                aiordma.listen(host, port, device=opened, config=CONFIG, via=via) as listener,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(_stop_on_signal, tasks.cancel_scope)
                ready(listener.port)
                async for request in listener:
                    tasks.start_soon(server.session, request)
        finally:
            server.close()


async def _stop_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            print(f"{signal.Signals(number).name}: stopping", flush=True)
            # Each session closes its connection on the way out, which its client hears; nothing new is accepted.
            scope.cancel()
            return

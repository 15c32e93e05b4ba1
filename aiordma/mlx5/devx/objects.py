"""Objects that DEVX makes, and queries that answer through a descriptor."""

from __future__ import annotations

import errno
import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from aiordma import _devx
from aiordma._offload import Pending, in_thread, in_use, until, unused, using
from aiordma._owned import Owned
from aiordma._waitable import Signal
from aiordma.errors import ClosedError, VerbsError
from aiordma.mlx5.devx.calls import CommandLike, check_output, command_bytes, failure, require
from aiordma.mlx5.devx.commands import Command, Output, output_size
from aiordma.mlx5.devx.enums import opcode_name

if TYPE_CHECKING:
    from aiordma.device import Device

__all__ = ["CommandChannel", "DevxObject", "create_object", "open_command_channel"]

_order = itertools.count()


class DevxObject(Owned):
    """An object that a firmware command made (mlx5dv_devx_obj_create(3)): a memory key, a protection domain, a queue.

    Made by :func:`create_object`. ``out`` is the creating command's output, with the object's number. ``close()``
    destroys it; closing the device closes those that are left, the newest first.
    """

    kind: ClassVar[str] = "devx_objects"
    close_order: ClassVar[int] = 2

    def __init__(self, device: Device, handle: _devx.Object, opcode: int, out: Any) -> None:
        self._pyverbs = handle
        self._opcode = opcode
        self._out = out
        self._order = next(_order)
        self._belong(device)

    @property
    def teardown(self) -> Callable[[], object]:
        """Destroys it, for the device's own end."""
        destroy: Callable[[], object] = self._pyverbs.destroy
        return destroy

    @property
    def out(self) -> Any:
        """The creating command's output: bytes, or the command's kind of :class:`Output`."""
        return self._out

    def _call(self, modify: bool, command: CommandLike, out_size: int | None) -> Pending[Any]:
        require(self._device)
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        data, kind, size = _prepared(command, out_size)
        return self._device._made(Pending(self._device.control, self._run(modify, data, kind, size)))

    async def _run(self, modify: bool, data: bytes, kind: type[Output] | None, size: int) -> Any:
        handle = self._pyverbs
        call = handle.modify if modify else handle.query
        code, out = await in_use(self._device.control, id(handle), call, data, size)
        if code:
            raise failure(f"mlx5dv_devx_obj_{'modify' if modify else 'query'}", data, code, out)
        return out if kind is None else kind(out)

    def query(self, command: CommandLike, out_size: int | None = None) -> Pending[Any]:
        """mlx5dv_devx_obj_query(3), off the loop. A :class:`Command` gives its :class:`Output`, bytes give bytes."""
        return self._call(False, command, out_size)

    def modify(self, command: CommandLike, out_size: int | None = None) -> Pending[Any]:
        """mlx5dv_devx_obj_modify(3), off the loop."""
        return self._call(True, command, out_size)

    def close(self) -> Pending[None]:
        """Destroys it (mlx5dv_devx_obj_destroy(3)); started by the call; a second call gives the same operation.

        Calls under way end first. EBUSY (:class:`VerbsError`) if another object uses it: it's open then as before.
        """
        return super().close()

    def _used_at(self) -> int:
        return id(self._pyverbs)

    async def _close(self) -> None:
        try:
            await super()._close()
        except VerbsError as e:
            if e.errno == errno.EBUSY:  # it's still there, and may be closed again
                self._closed = False
                self._closing = None
            raise

    async def _quiesce(self) -> None:
        """At the device's end what was made later may have been made on top of this."""
        if not self._device.closed:
            return
        for other in list(self._device._children):
            if isinstance(other, DevxObject) and other._order > self._order:
                ended = Signal(self._device.control.hooks)
                other.close().on_done(ended.finish)
                await until(ended)

    def _destroy(self) -> None:
        code = self._pyverbs.destroy()
        if code:
            raise VerbsError("mlx5dv_devx_obj_destroy", code, opcode_name(self._opcode))

    def _finish(self) -> None:
        if not self._pyverbs.alive:
            super()._finish()

    def __repr__(self) -> str:
        return f"<DevxObject of {opcode_name(self._opcode)}{' closed' if self.closed else ''}>"


def _prepared(command: CommandLike, out_size: int | None) -> tuple[bytes, type[Output] | None, int]:
    data = command_bytes(command)
    kind = command.OUT if isinstance(command, Command) else None
    size = out_size if out_size is not None else kind.SIZE if kind is not None else output_size(data)
    check_output(data, size)
    return data, kind, size


def create_object(device: Device, command: CommandLike, out_size: int | None = None) -> Pending[DevxObject]:
    """Makes an object by a firmware command, off the loop; or ``async with``.

    Raises :class:`UnsupportedError`, :class:`UsageError` at once; awaiting raises :class:`DevxError` where the firmware
    refuses, :class:`VerbsError` where the kernel does (EINVAL: no command that creates anything).
    """
    require(device)
    data, kind, size = _prepared(command, out_size)
    return device._made(Pending(device.control, _create(device, data, kind, size), dispose=True))


async def _create(device: Device, data: bytes, kind: type[Output] | None, size: int) -> DevxObject:
    code, out, handle = await in_thread(device.control, _devx.create, device.context_address, data, size)
    if handle is None:
        raise failure("mlx5dv_devx_obj_create", data, code, out)
    made = DevxObject(device, handle, int.from_bytes(data[:2], "big"), out if kind is None else kind(out))
    device.adopt(made)
    return made


# ------------------------------------------------------------------ asynchronous queries


class _Question:
    """A query whose answer hasn't come."""

    def __init__(self, data: bytes, kind: type[Output] | None, size: int, signal: Signal) -> None:
        self.data = data
        self.kind = kind
        self.size = size
        self.signal = signal
        self.sent = False


class CommandChannel(Owned):
    """Where answers to asynchronous queries arrive (mlx5dv_devx_create_cmd_comp(3)): a descriptor that the loop watches.

    Made by :func:`open_command_channel`. The firmware works on the queries meanwhile, so many can be under way at a time with
    no thread each. A cancelled await detaches from its query; the answer is dropped when it comes.
    """

    kind: ClassVar[str] = "devx_channels"
    close_order: ClassVar[int] = 0

    def __init__(self, device: Device, commands: _devx.Commands) -> None:
        self._pyverbs = commands
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._answered = 0
        self._room: list[Signal] = []  # who waits for an answer to be read
        self._last: Signal | None = None  # ends the turn of who sends last
        os.set_blocking(commands.fd, False)
        self._watch = device.control.backend.watch(commands.fd, _weak(self))
        self._belong(device)

    @property
    def teardown(self) -> Callable[[], object]:
        """Closes the descriptor, for the device's own end."""
        destroy: Callable[[], object] = self._pyverbs.destroy
        return destroy

    @property
    def pending(self) -> int:
        """Queries whose answer hasn't come."""
        return len(self._questions)

    def query(self, obj: DevxObject, command: CommandLike, out_size: int | None = None) -> Pending[Any]:
        """Sends a query about ``obj`` (mlx5dv_devx_obj_query_async(3)); awaiting gives the answer, as ``obj.query`` does.

        When the kernel has no room for more answers, it waits for others to come first. :class:`ClosedError` when the
        channel is closed meanwhile.
        """
        require(self._device)
        if self.closed:
            raise ClosedError("the command channel is closed")
        if obj.closed:
            raise ClosedError(f"{obj!r} is closed")
        data, kind, size = _prepared(command, out_size)
        # The device's closing doesn't wait for the answer, only for the sending: it closes the channel.
        return Pending(self._device.control, self._ask(obj, data, kind, size))

    async def _ask(self, obj: DevxObject, data: bytes, kind: type[Output] | None, size: int) -> Any:
        control = self._device.control
        number = next(self._numbers)
        question = _Question(data, kind, size, Signal(control.hooks))
        # Before it's sent: its answer may come before the thread that sends it has told so.
        self._questions[number] = question
        before, turn = self._last, Signal(control.hooks)
        self._last = turn
        try:
            if before is not None:
                await until(before)
            await self._send(obj, question, number)
        except BaseException:
            self._questions.pop(number, None)
            raise
        finally:
            turn.finish(None)
        return await until(question.signal)

    async def _send(self, obj: DevxObject, question: _Question, number: int) -> None:
        """One at a time, so that EAGAIN means that answers wait to be read."""
        control, handle = self._device.control, obj._pyverbs
        while True:
            if self.closed or obj.closed:
                raise ClosedError("the command channel or the object was closed before the query was sent")
            answered = self._answered
            with using(control, id(self._pyverbs), id(handle)):
                code = await in_thread(control, handle.query_async, question.data, question.size, number, self._pyverbs)
            if not code:
                question.sent = True
                return
            if code != errno.EAGAIN:
                raise failure("mlx5dv_devx_obj_query_async", question.data, code, b"\0" * Output.SIZE)
            if any(other.sent for other in self._questions.values()):
                signal = Signal(control.hooks)
                self._room.append(signal)
                await until(signal)
            elif answered == self._answered:
                raise failure("mlx5dv_devx_obj_query_async", question.data, code, b"\0" * Output.SIZE)

    def _on_readable(self) -> None:
        """All that has come, without blocking."""
        while self._questions and not self.closed:
            longest = max(question.size for question in self._questions.values())
            code, number, out = self._pyverbs.read(longest)
            if code:
                if code not in (errno.EAGAIN, errno.EINTR):
                    self._fail(VerbsError("mlx5dv_devx_get_async_cmd_comp", code))
                return
            self._answer(number, out)

    def _answer(self, number: int, out: bytes) -> None:
        question = self._questions.pop(number, None)
        self._answered += 1
        room, self._room = self._room, []
        for signal in room:
            signal.finish(None)
        if question is None:
            return
        out = out[: question.size]
        if out[0]:
            question.signal.fail(failure("mlx5dv_devx_obj_query_async", question.data, errno.EREMOTEIO, out))
        else:
            question.signal.finish(out if question.kind is None else question.kind(out))

    def _fail(self, error: BaseException) -> None:
        questions, self._questions = self._questions, {}
        room, self._room = self._room, []
        for signal in room:
            signal.finish(None)
        for question in questions.values():
            question.signal.fail(error)

    def close(self) -> Pending[None]:
        """Closes it; what waits for an answer ends with :class:`ClosedError`. A second call gives the same operation."""
        return super().close()

    def _used_at(self) -> int:
        return id(self._pyverbs)

    def _stop(self) -> None:
        try:
            self._watch.close()
        except RuntimeError:  # the loop is closed, and its watches with it
            pass
        self._fail(ClosedError("the command channel was closed before the answer came"))

    async def _quiesce(self) -> None:
        # A query that was being sent when it stopped is one more to end.
        await unused(self._device.control, self._used_at())
        self._fail(ClosedError("the command channel was closed before the answer came"))

    def _destroy(self) -> None:
        self._pyverbs.destroy()

    def __repr__(self) -> str:
        return f"<CommandChannel {'closed' if self.closed else f'{self.pending} pending'}>"


def _weak(channel: CommandChannel) -> Any:
    """The loop must not keep a forgotten channel alive."""
    reference = weakref.ref(channel)

    def on_readable() -> None:
        alive = reference()
        if alive is not None:
            alive._on_readable()

    return on_readable


def open_command_channel(device: Device) -> Pending[CommandChannel]:
    """A descriptor for asynchronous queries, off the loop; or ``async with``."""
    require(device, "asynchronous DEVX queries")
    return device._made(Pending(device.control, _open(device), dispose=True))


async def _open(device: Device) -> CommandChannel:
    code, commands = await in_thread(device.control, _devx.create_commands, device.context_address)
    if commands is None:
        raise VerbsError("mlx5dv_devx_create_cmd_comp", code)
    channel = CommandChannel(device, commands)
    device.adopt(channel)
    return channel

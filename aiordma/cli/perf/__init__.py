"""``aiordma perf``: bandwidth and latency between two hosts, in the manner of perftest, through aiordma.

What is measured is what a program gets that awaits its operations, event loop and all; see docs/perf.md.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

import aiordma
from aiordma.cli._perf_settings import DEFAULT_PORT, Settings
from aiordma.cli.perf.client import measure
from aiordma.cli.perf.control import PeerError
from aiordma.cli.perf.report import Outcome, Result, as_json, header, histogram, line, title
from aiordma.cli.perf.server import serve
from aiordma.errors import RdmaError

__all__ = ["run"]

#: How long a measurement may take to end after Ctrl-C before it's cancelled.
_GRACE = 10.0


class _Watcher:
    """Prints each size as it's done, with a progress bar on a terminal."""

    def __init__(self, settings: Settings, outcome: Outcome) -> None:
        self.stop = False
        self._settings = settings
        self._outcome = outcome
        self._began = 0.0
        self._task: TaskID | None = None
        self._result: Result | None = None
        self._progress: Progress | None = None
        if sys.stderr.isatty() and not settings.json:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                # No thread of its own, which would take the GIL from the measurement at its own times.
                auto_refresh=False,
            )

    def opened(self, outcome: Outcome) -> None:
        if not self._settings.json:
            print(title(self._settings, outcome))
            print(header(self._settings.test.is_latency), flush=True)
        if self._progress is not None:
            self._progress.start()

    def begun(self, result: Result) -> None:
        self._result = result
        self._began = time.perf_counter()
        if self._progress is not None:
            total = self._settings.count or self._settings.duration
            self._task = self._progress.add_task(f"{result.size} bytes", total=total)

    def tick(self) -> None:
        """From time to time, between operations."""
        if self._progress is None or self._task is None or self._result is None:
            return
        elapsed = time.perf_counter() - self._began
        done = self._result.operations if self._settings.count is not None else elapsed
        self._progress.update(self._task, completed=done)
        self._progress.refresh()

    def _done(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
            self._progress.refresh()
        self._task = self._result = None

    def ended(self, result: Result) -> None:
        self._done()
        self.show(result)

    def show(self, result: Result) -> None:
        if self._settings.json:
            return
        print(line(result, self._settings.test.is_latency), flush=True)
        if self._settings.histogram and len(result.samples):
            print(histogram(result.samples), flush=True)

    def close(self) -> None:
        """Shows what was left incomplete."""
        left = self._result
        self._done()
        if self._progress is not None:
            self._progress.stop()
        if left is not None:
            self.show(left)


def run(settings: Settings) -> int:
    """Measures, or serves one client; prints the report and returns the exit status."""
    outcome = Outcome()
    server = settings.host is None and not settings.loopback
    options: dict[str, Any] = {}
    backend = "trio" if settings.loop == "trio" else "asyncio"
    if backend == "asyncio":
        options["use_uvloop"] = settings.loop == "uvloop"
    try:
        anyio.run(_main, settings, outcome, server, backend=backend, backend_options=options)
    except (ImportError, LookupError) as e:
        if isinstance(e, RdmaError):
            raise
        outcome.error = (
            f"--loop {settings.loop} needs a package that isn't installed ({e}): pip install {settings.loop}"
        )
    except KeyboardInterrupt:
        outcome.interrupted = True
    if settings.json:
        print(as_json(settings, outcome, "server" if server else "client"))
    elif server:
        _server_report(settings, outcome)
    if outcome.error is not None:
        print(f"aiordma perf: {outcome.error}", file=sys.stderr)
    elif outcome.interrupted:
        print("aiordma perf: interrupted", file=sys.stderr)
    return outcome.exit_status


def _server_report(settings: Settings, outcome: Outcome) -> None:
    for result in outcome.results:
        notes = ("", ", verified", ", WRONG DATA")[0 if result.verified is None else 1 if result.verified else 2]
        lost = f", {result.lost} lost" if result.lost else ""
        done = f"{result.operations} operations" if result.complete else "not complete"
        print(f" {settings.test} of {result.size} bytes by {outcome.peer}: {done}{lost}{notes}")


async def _main(settings: Settings, outcome: Outcome, server: bool) -> None:
    watcher = _Watcher(settings, outcome)
    try:
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()
            group.start_soon(_interrupts, watcher, outcome, scope, server)
            group.start_soon(_ticks, watcher)
            with scope:
                await (_serve(settings, outcome) if server else _measure(settings, outcome, watcher))
            group.cancel_scope.cancel()
    except BaseException as e:
        outcome.error = _explain(e, settings, outcome, server)
        if outcome.error is None:
            raise
    finally:
        watcher.close()


async def _interrupts(watcher: _Watcher, outcome: Outcome, scope: anyio.CancelScope, server: bool) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            outcome.interrupted = True
            if watcher.stop or server:
                scope.cancel()
                continue
            # The measurement ends after its next operation, and is reported; one that is stuck is given up.
            watcher.stop = True
            await anyio.sleep(_GRACE)
            scope.cancel()


async def _ticks(watcher: _Watcher) -> None:
    while True:
        await anyio.sleep(0.2)
        watcher.tick()


def _explain(error: BaseException, settings: Settings, outcome: Outcome, server: bool) -> str | None:
    """A sentence for what is no fault of this program."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            text = _explain(inner, settings, outcome, server)
            if text is not None:
                return text
        return None
    if isinstance(error, PeerError | aiordma.UsageError):
        return str(error)
    if isinstance(error, ConnectionError) and outcome.peer:
        done = sum(result.operations for result in outcome.results)
        return f"the peer {outcome.peer} is gone, after {done} operations: {error}"
    if isinstance(error, aiordma.RejectedError | ConnectionRefusedError):
        command = f"aiordma perf {settings.test}{' -R' if settings.rdma_cm else ''}"
        return f"{error} (is `{command}` running on {settings.host}, port {settings.port}?)"
    if isinstance(error, RdmaError | OSError):
        return str(error)
    return None


async def _device(settings: Settings, stack: AsyncExitStack) -> aiordma.Device | None:
    """The device that was asked for. None where rdma_cm is to choose one by the address."""
    chosen = settings.device_name is not None or settings.ib_port is not None or settings.gid_index is not None
    if settings.rdma_cm and not chosen:
        return None
    return await stack.enter_async_context(
        aiordma.open_device(
            settings.device_name, port=settings.ib_port or 1, gid_index=settings.gid_index, spin_us=settings.spin_us
        )
    )


async def _measure(settings: Settings, outcome: Outcome, watcher: _Watcher) -> None:
    async with AsyncExitStack() as stack:
        device = await _device(settings, stack)
        if not settings.loopback:
            assert settings.host is not None
            await measure(settings, device, settings.host, settings.port, outcome, watcher)
            return
        listener = await stack.enter_async_context(aiordma.listen("127.0.0.1", 0, via=settings.via))
        async with anyio.create_task_group() as group:
            group.start_soon(serve, listener, settings.test, device, Outcome())
            await measure(settings, device, "127.0.0.1", listener.port, outcome, watcher)


async def _serve(settings: Settings, outcome: Outcome) -> None:
    async with AsyncExitStack() as stack:
        device = await _device(settings, stack)
        listener = await stack.enter_async_context(aiordma.listen(None, settings.port, via=settings.via))
        where = "" if listener.port == DEFAULT_PORT else f" -p {listener.port}"
        if settings.rdma_cm:
            where += " -R"
        print(
            f"waiting for a client on port {listener.port}: aiordma perf {settings.test} HOST{where}",
            file=sys.stderr,
            flush=True,
        )
        await serve(listener, settings.test, device, outcome)

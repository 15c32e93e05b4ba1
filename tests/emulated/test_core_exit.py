"""A process that ends with everything open ends well, and says only what was forgotten."""

import os
import subprocess
import sys
import textwrap

import pytest
from emulated.core import DEVICE

pytestmark = pytest.mark.any_device

PROLOGUE = """
    import asyncio, gc, os, sys, threading
    import aiordma, anyio
    from aiordma import emulator
    from aiordma.emulator import faults

    async def open_all(device=None):
        device = device or await aiordma.open_device(os.environ["AIORDMA_DEVICE"])
        mrs = [await device.reg_mr(bytearray(4096)) for _ in range(3)]
        srq = await device.create_srq()
        a, b, c = await device.create_qp(), await device.create_qp(), await device.create_qp(srq=srq)
        await a.connect(b.info)
        await b.connect(a.info)
        ops = [a.send(mrs[0]), *(a.rdma_write(mrs[0], mrs[1].remote()) for _ in range(300)), srq.recv(mrs[2])]
        ops.append(a.recv(mrs[2]))
        return device, mrs, srq, (a, b, c), ops

    def run(main):
        kind = sys.argv[1]
        if kind == "trio":
            import trio
            return trio.run(main)
        if kind == "uvloop":
            import uvloop
            return uvloop.run(main())
        return asyncio.run(main())
"""

PROGRAMS: dict[str, tuple[str, int, list[str] | None]] = {
    # name: program, exit status, what must be named in ResourceWarnings
    "locals": (
        """
        async def main():
            everything = await open_all()
            await anyio.sleep(0.01)
        run(main)
        """,
        0,
        ["Device"],
    ),
    "globals": (
        """
        async def main():
            global everything
            everything = await open_all()
        run(main)
        """,
        0,
        ["Device"],
    ),
    "cycle": (
        """
        async def main():
            everything = [*await open_all()]
            everything.append(everything)
        run(main)
        gc.collect()
        """,
        0,
        ["Device"],
    ),
    "exception": (
        """
        async def main():
            global everything
            everything = await open_all()
            raise SystemExit(3)
        run(main)
        """,
        3,
        ["Device"],
    ),
    "awaiting": (
        """
        async def main():
            global everything
            everything = await open_all()
            with anyio.move_on_after(0.05):
                await everything[-1][0]
        run(main)
        """,
        0,
        ["Device"],
    ),
    "tasks": (
        """
        async def wait(op):
            await op
        async def main():
            global everything
            everything = await open_all()
            async with anyio.create_task_group() as group:
                for op in everything[-1]:
                    group.start_soon(wait, op)
                await anyio.sleep(0.01)
                group.cancel_scope.cancel()
        run(main)
        """,
        0,
        ["Device"],
    ),
    "closing device": (
        """
        async def main():
            global everything, closing
            everything = await open_all()
            closing = everything[0].close()
        run(main)
        """,
        0,
        [],
    ),
    "closing qps": (
        """
        async def main():
            global everything, closing
            everything = await open_all()
            closing = [qp.close() for qp in everything[3]]
        run(main)
        """,
        0,
        ["Device"],
    ),
    "closing regions": (
        """
        async def main():
            global everything, closing
            everything = await open_all()
            closing = [mr.close() for mr in everything[1]]
        run(main)
        """,
        0,
        ["Device"],
    ),
    "making": (
        """
        async def main():
            global device, making
            device = await aiordma.open_device(os.environ["AIORDMA_DEVICE"])
            making = [device.reg_mr(bytearray(100)), device.create_qp(), device.create_srq()]
        run(main)
        """,
        0,
        ["Device"],
    ),
    "waiting for a CQ": (
        """
        async def main():
            global device, making
            device = await aiordma.open_device(os.environ["AIORDMA_DEVICE"])
            # The first makes a CQ for all, and is stopped only by the end of everything: then the others are next.
            faults.verb("create_cq", delay=0.1)
            making = [device.create_srq(max_wr=4000) for _ in range(3)]
        run(main)
        """,
        0,
        ["Device"],
    ),
    "opening": (
        """
        async def main():
            global opening
            opening = aiordma.open_device(os.environ["AIORDMA_DEVICE"])
        run(main)
        """,
        0,
        None,
    ),
    "parts of it": (
        """
        async def main():
            global op, view
            device, mrs, srq, qps, ops = await open_all()
            op, view = ops[0], mrs[0].view()
        run(main)
        gc.collect()
        """,
        0,
        ["Device"],
    ),
    "closed": (
        """
        async def main():
            global everything
            everything = await open_all()
            await everything[0].close()
            for op in everything[-1]:
                op.exception()
        run(main)
        """,
        0,
        [],
    ),
    "several loops": (
        """
        async def main():
            everything.append(await open_all())
        everything = []
        for _ in range(3):
            run(main)
        """,
        0,
        ["Device"],
    ),
    "thread": (
        """
        async def main():
            everything.append(await open_all())
        everything = []
        thread = threading.Thread(target=run, args=(main,))
        thread.start()
        thread.join()
        """,
        0,
        ["Device"],
    ),
    "daemon thread at work": (
        """
        async def main():
            device, mrs, srq, (a, b, c), ops = await open_all()
            x, y = await device.create_qp(), await device.create_qp()
            await x.connect(y.info)
            await y.connect(x.info)
            started.set()
            while True:
                await x.rdma_write(mrs[0], mrs[1].remote())
        started = threading.Event()
        thread = threading.Thread(target=run, args=(main,), daemon=True)
        thread.start()
        started.wait()
        import time
        time.sleep(0.05)
        """,
        0,
        None,
    ),
    "os._exit": (
        """
        async def main():
            await open_all()
            os._exit(5)
        run(main)
        """,
        5,
        None,
    ),
}


@pytest.mark.slow_in_vm
@pytest.mark.parametrize("kind", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.emulated_only("delays a verb") if "faults." in PROGRAMS[name][0] else ())
        for name in PROGRAMS
    ],
)
def test_a_process_ends_well_with_everything_open(name: str, kind: str) -> None:
    program, status, named = PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(PROLOGUE) + textwrap.dedent(program), kind],
        env={**os.environ, "AIORDMA_DEVICE": DEVICE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # Python's development mode turns asyncio's on, which tells of slow steps.
    lines = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith(("Executing <", "  ", "ResourceWarning: Enable tracemalloc"))
    ]
    warned = [line for line in lines if "ResourceWarning: unclosed <" in line]
    assert done.returncode == status, done.stderr
    assert [line for line in lines if line not in warned] == [], done.stderr
    assert done.stdout == ""
    if named is not None:
        for what in named:
            assert any(f"unclosed <{what}" in line for line in warned), done.stderr
        if not named:
            assert not warned, done.stderr


def test_memory_registered_too_late_for_its_loop_goes_with_the_device() -> None:
    """The worker's result is on its way to the loop, which ends before it comes to it."""
    program = """
        import time
        async def opened():
            return await aiordma.open_device(os.environ["AIORDMA_DEVICE"])

        loop = asyncio.new_event_loop()
        device = loop.run_until_complete(opened())
        made = device.reg_mr(bytearray(100))
        while not device.control.undelivered:
            time.sleep(0.001)
        loop.close()
        device.close_now()
        assert not made.done
        """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(PROLOGUE) + textwrap.dedent(program)],
        env={**os.environ, "AIORDMA_DEVICE": DEVICE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_child_that_ends_like_any_process_leaves_its_parents_work_alone() -> None:
    program = """
        import ctypes, warnings
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        loop = asyncio.new_event_loop()
        device, mrs, srq, (a, b, c), ops = loop.run_until_complete(open_all())
        pid = os.fork()
        if not pid:
            # asyncio's own cleanup would take descriptors out of the epoll set that the parent shares.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))
            # Then all that an interpreter does at its end, with the parent's objects in its memory.
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0

        async def finish():
            b.recv(mrs[2])
            with anyio.fail_after(20):
                for op in ops[:301]:
                    await op
                await device.close()
            for op in ops[301:]:
                op.exception()

        loop.run_until_complete(finish())
        loop.close()
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(PROLOGUE) + textwrap.dedent(program), "asyncio"],
        env={**os.environ, "AIORDMA_DEVICE": DEVICE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # asyncio's debug mode tells of steps that took long, which on a busy machine any may.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert (done.stdout, said) == ("", [])

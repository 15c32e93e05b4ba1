"""A process that ends with connections open ends well, and says only what was forgotten."""

import subprocess
import sys
import textwrap

import pytest
from emulated.cm import DEVICE, HOST, both

PROLOGUE = """
import gc, sys
import aiordma, anyio

BACKEND, VIA, HOST, DEVICE = sys.argv[1:]
kept = []

def run(main):
    anyio.run(
        main,
        backend="trio" if BACKEND == "trio" else "asyncio",
        backend_options={"use_uvloop": True} if BACKEND == "uvloop" else {},
    )

async def connected(**options):
    listener = await aiordma.listen(HOST, via=VIA)
    async with anyio.create_task_group() as group:
        async def accept():
            kept.append(await (await listener.accept()).accept(**options))
        group.start_soon(accept)
        # Two that share the device of the address.
        kept.append(await aiordma.connect(HOST, listener.port, via=VIA, **options))
    kept.append(listener)
"""

PROGRAMS: dict[str, tuple[str, int]] = {
    "shared device": ("run(connected)", 0),
    "own device": (
        """
        async def main():
            device = await aiordma.open_device(DEVICE)
            kept.append(device)
            await connected(device=device)
        run(main)
        """,
        0,
    ),
    "dropped after the loop": ("run(connected)\nkept.clear()\ngc.collect()", 0),
    "half closed": (
        """
        async def main():
            await connected()
            kept[0].close()
            kept[-1].close()
        run(main)
        """,
        0,
    ),
    "exit": (
        """
        async def main():
            await connected()
            sys.exit(3)
        run(main)
        """,
        3,
    ),
    "another loop afterwards": (
        """
        run(connected)
        async def again():
            try:
                await aiordma.connect(HOST, 1, via=VIA)
            except ConnectionRefusedError:
                pass
            async with aiordma.listen(HOST, via=VIA):
                pass
        run(again)
        """,
        0,
    ),
}


@both
@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_that_forgets_its_connections_ends_well(name: str, backend: str, via: str) -> None:
    program, status = PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PROLOGUE + textwrap.dedent(program), backend, via, HOST, DEVICE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "Traceback" not in said, said
    assert "closing what is left" not in said, said
    assert "unclosed" in said, said

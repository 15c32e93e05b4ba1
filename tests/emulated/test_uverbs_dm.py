"""Device memory, the addresses of its operations, and the clock register. rdma-core's tests of them: tests/conformance."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from pyverbs import enums as e
from pyverbs.device import DM, AllocDmAttr, Context
from pyverbs.mr import DMMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError

from aiordma import emulator

ACCESS = e.IBV_ACCESS_ZERO_BASED | e.IBV_ACCESS_LOCAL_WRITE
BAR = 256 * 1024

pytestmark = pytest.mark.usefixtures("leak_check")


def alloc(context: Context, length: int, alignment: int = 0) -> DM:
    return DM(context, AllocDmAttr(length=length, log_align_req=alignment))


def test_it_starts_as_zeros_whoever_had_it() -> None:
    with Context(name="mlx5_0") as context:
        for _ in range(2):
            with alloc(context, 100) as memory:
                assert memory.copy_from_dm(0, 100) == bytes(100)
                memory.copy_to_dm(0, b"x" * 100, 100)


def test_there_is_only_so_much() -> None:
    with Context(name="mlx5_0") as context:
        largest = context.query_device_ex().max_dm_size
        pieces = [alloc(context, largest) for _ in range(BAR // largest)]
        with pytest.raises(PyverbsRDMAError):
            alloc(context, 1)
        pieces.pop().close()
        alloc(context, largest)
    with Context(name="mlx5_0") as context:  # what wasn't freed goes with its context
        alloc(context, largest)


def test_an_alignment_beyond_a_page_is_refused() -> None:
    with Context(name="mlx5_0") as context:
        alloc(context, 64, 12).close()
        with pytest.raises(PyverbsRDMAError):
            alloc(context, 64, 13)


def test_none_without_a_limit(run_python) -> None:
    run_python(
        """
        from aiordma import emulator
        from aiordma.emulator import EmulatedDevice, Limits
        emulator.attach([EmulatedDevice(name="mlx5_0", limits=Limits(max_dm_size=0))])
        from pyverbs.device import Context, DM, AllocDmAttr
        from pyverbs.pyverbs_error import PyverbsError
        context = Context(name="mlx5_0")
        assert not context.query_device_ex().max_dm_size
        try:
            DM(context, AllocDmAttr(length=64))
        except PyverbsError:
            pass
        else:
            raise AssertionError
        """
    )


def test_registered_memory_is_busy() -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd:
        memory = alloc(context, 4096)
        region = DMMR(pd, 4096, ACCESS, memory, 0)
        counts = emulator.object_counts("mlx5_0")
        assert (counts["dm"], counts["mr"]) == (1, 1)
        region.write("12345678", 8, 8)
        assert memory.copy_from_dm(8, 8) == b"12345678"
        region.close()
        memory.close()


@pytest.mark.parametrize(
    ("offset", "length", "access"),
    [
        (0, 4100, ACCESS),
        (4096, 4, ACCESS),
        (0, 64, e.IBV_ACCESS_LOCAL_WRITE),  # zero-based it must be
        (0, 64, e.IBV_ACCESS_ZERO_BASED | e.IBV_ACCESS_REMOTE_WRITE),  # remote write needs local write
        (0, 64, ACCESS | e.IBV_ACCESS_MW_BIND),
    ],
)
def test_refused_registrations(offset: int, length: int, access: int) -> None:
    with Context(name="mlx5_0") as context, PD(context) as pd, alloc(context, 4096) as memory:
        with pytest.raises(PyverbsError) as x:
            DMMR(pd, length, access, memory, offset)
        assert x.value.error_code == errno.EINVAL


def test_a_child_takes_from_the_same_memory(run_python) -> None:
    run_python(
        """
        import os
        from aiordma import emulator
        emulator.attach()
        from pyverbs.device import Context, DM, AllocDmAttr
        from pyverbs.pyverbs_error import PyverbsRDMAError
        context = Context(name="mlx5_0")
        first = DM(context, AllocDmAttr(length=4096))
        largest = context.query_device_ex().max_dm_size
        pid = os.fork()
        if not pid:
            memory = DM(context, AllocDmAttr(length=largest))
            memory.copy_to_dm(0, b"child", 8)
            os._exit(0)
        assert not os.waitpid(pid, 0)[1]
        try:
            DM(context, AllocDmAttr(length=largest))
        except PyverbsRDMAError:
            pass
        else:
            raise AssertionError("the child's is still the context's")
        context.close()
        context = Context(name="mlx5_0")
        DM(context, AllocDmAttr(length=largest))
        DM(context, AllocDmAttr(length=largest))
        """
    )


def test_the_clock_register_goes_on() -> None:
    with Context(name="mlx5_0") as context:
        before = time.monotonic_ns()
        readings = [context.query_rt_values_ex()[1] for _ in range(3)]
        after = time.monotonic_ns()
    assert before <= readings[0] < readings[1] < readings[2] <= after


FAULTS = """
import ctypes, faulthandler, signal, sys
from aiordma import emulator
emulator.attach()
from pyverbs.device import Context
context = Context(name="mlx5_0")
context.query_rt_values_ex()
{}
"""


without_sanitizer = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer takes faults for its own"
)


@without_sanitizer
@pytest.mark.parametrize(
    ("cause", "expected"),
    [("ctypes.string_at(8)", signal.SIGSEGV), ("signal.raise_signal(signal.SIGTRAP)", signal.SIGTRAP)],
)
def test_other_faults_end_the_program_as_ever(cause: str, expected: signal.Signals) -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS.format(cause)], capture_output=True, check=False, timeout=60)
    assert done.returncode == -expected


@without_sanitizer
def test_other_handlers_have_their_faults() -> None:
    """Python's fault handler, which was there first, tells of a fault that isn't the emulator's."""
    program = FAULTS.format("ctypes.string_at(8)")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGSEGV
    assert b"Segmentation fault" in done.stderr

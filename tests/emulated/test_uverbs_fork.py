"""fork(): a child inherits descriptors, and must not disturb what they stand for in its parent."""

import pytest

PRELUDE = """
    import errno, os, signal, sys, time
    import aiordma.emulator as emulator
    emulator.attach(devices=2)
    from pyverbs import enums as e
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsRDMAError
    from pyverbs.qp import QP, QPCap, QPInitAttr

    def in_child(body, leave=os._exit):
        pid = os.fork()
        if not pid:
            try:
                leave(body() or 0)
            except Exception as x:
                print(type(x), x, file=sys.stderr, flush=True)
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    context = Context(name="mlx5_0")
    pd, channel = PD(context), CompChannel(context)
    cq = CQ(context, 10, None, channel)
    mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1)))

    def works():
        counts = emulator.object_counts("mlx5_0")
        assert {k: counts[k] for k in ("pd", "mr", "cq", "qp")} == {"pd": 1, "mr": 1, "cq": 1, "qp": 1}, counts
        assert context.query_port(1).state == e.IBV_PORT_ACTIVE
        MR(pd, 64, 0).close()
        QP(pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1))).close()

    works()
"""


def test_commands_in_the_child_fail_as_on_a_device_that_is_gone(run_python) -> None:
    run_python(
        PRELUDE
        + """
    def body():
        for command in (lambda: PD(context), lambda: MR(pd, 64, 0), lambda: context.query_port(1), qp.close):
            try:
                command()
            except PyverbsRDMAError as x:
                assert x.error_code == errno.EIO or "EIO" in str(x) or "Input/output" in str(x), x
            else:
                raise AssertionError("worked")
    in_child(body)
    works()
    """
    )


@pytest.mark.parametrize("ending", ["os._exit", "sys.exit"])
def test_a_child_that_ends_leaves_everything_to_its_parent(run_python, ending: str) -> None:
    run_python(
        PRELUDE
        + f"""
    in_child(lambda: 0, {ending})
    works()
    """
    )


def test_a_child_that_closes_the_descriptors_leaves_everything_to_its_parent(run_python) -> None:
    run_python(
        PRELUDE
        + """
    def body():
        from aiordma.emulator._library import library_path
        import ctypes
        lib = ctypes.CDLL(str(library_path()))
        for fd in range(3, 64):
            lib.close(fd)
        os.closerange(3, 64)
    in_child(body)
    works()
    """
    )


def test_events_are_not_taken_from_the_parent(run_python) -> None:
    """A child shares the pipes."""
    run_python(
        PRELUDE
        + """
    def body():
        try:
            cq.close()
        except Exception:
            pass
    in_child(body)
    cq.req_notify()
    qp.close(); cq.close(); channel.close()
    """
    )


def test_a_child_may_open_the_device_for_itself(run_python) -> None:
    run_python(
        PRELUDE
        + """
    def body():
        assert not any(emulator.object_counts("mlx5_0").values())
        own = Context(name="mlx5_0")
        domain = PD(own)
        region = MR(domain, 4096, e.IBV_ACCESS_LOCAL_WRITE)
        queue = CQ(own, 10)
        pair = QP(domain, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue, rcq=queue, cap=QPCap(4, 4, 1, 1)))
        assert emulator.object_counts("mlx5_0")["qp"] == 1
        own.close()
        assert not any(emulator.object_counts("mlx5_0").values())
    for _ in range(3):
        in_child(body)
    works()
    """
    )


def test_a_grandchild_is_a_child_too(run_python) -> None:
    run_python(
        PRELUDE
        + """
    def grandchild():
        own = Context(name="mlx5_1")
        PD(own).close()
        own.close()
    def child():
        own = Context(name="mlx5_1")
        in_child(grandchild)
        PD(own).close()
        own.close()
    in_child(child)
    works()
    """
    )


def test_pinned_memory_counts_anew_in_the_child(run_python) -> None:
    run_python(
        PRELUDE
        + """
    import resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (128 * 1024, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    root = os.geteuid() == 0
    unprivileged = lambda: root and os.seteuid(65534)
    unprivileged()
    big = MR(pd, 80 * 1024, e.IBV_ACCESS_LOCAL_WRITE)
    def body():
        root and os.seteuid(0)  # the folder that stands for /sys is its owner's alone
        own = Context(name="mlx5_0")
        unprivileged()
        domain = PD(own)
        MR(domain, 80 * 1024, e.IBV_ACCESS_LOCAL_WRITE)
    in_child(body)
    try:
        MR(pd, 80 * 1024, e.IBV_ACCESS_LOCAL_WRITE)
    except PyverbsRDMAError as x:
        assert x.error_code == errno.ENOMEM
    else:
        raise SystemExit("the parent's memory is no longer counted")
    """
    )


def test_many_forks_at_once_with_a_busy_device(run_python) -> None:
    """fork() in the middle of other threads' commands: neither side hangs."""
    run_python(
        PRELUDE
        + """
    import threading
    stop = False
    def commands():
        while not stop:
            MR(pd, 64, 0).close()
    threads = [threading.Thread(target=commands) for _ in range(2)]
    for t in threads:
        t.start()
    def body():
        Context(name="mlx5_1").close()
    for _ in range(30):
        in_child(body)
    stop = True
    for t in threads:
        t.join()
    works()
    """
    )


def test_programs_started_meanwhile_do_not_disturb_either(run_python) -> None:
    """subprocess uses vfork(): the child runs in the parent's memory until it executes the program."""
    run_python(
        PRELUDE
        + """
    import subprocess
    for close_fds in (True, False):
        for _ in range(5):
            subprocess.run(["true"], check=True, close_fds=close_fds)
    os.system("true")
    works()
    """
    )

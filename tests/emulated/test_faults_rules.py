"""aiordma.emulator.faults: which operations a rule hits, which of several applies, how rules come and go."""

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from emulated.core import Pair, connected, eventually
from hypothesis import given
from hypothesis import strategies as st

import aiordma
from aiordma import Device, LocalProtectionError, RemoteOperationError, WrFlushError
from aiordma.emulator import EmulatorError, _fault_text, faults

pytestmark = pytest.mark.anyio

SOON = 20


@pytest.fixture(autouse=True)
def no_faults(leak_check: None) -> Iterator[None]:
    yield
    faults.reset()


@asynccontextmanager
async def opened(name: str = "mlx5_0") -> AsyncIterator[Device]:
    async with aiordma.open_device(f"emulated:{name}") as device:
        yield device


async def losses(pair: Pair, count: int, rule: faults.Fault) -> list[int]:
    """Which of so many writes, from 1 on, the rule hit. They're made one by one."""
    hit = []
    for number in range(1, count + 1):
        before = rule.hits
        with anyio.fail_after(SOON):
            await pair.a.rdma_write(pair.local[:8], pair.remote)
        if rule.hits > before:
            hit.append(number)
    return hit


#: Conditions, and which of twelve operations fulfil them. Delays of no time: every operation counts once.
CONDITIONS = [
    ({}, list(range(1, 13))),
    ({"nth": 3}, [3]),
    ({"every": 5}, [5, 10]),
    ({"count": 2}, [1, 2]),
    ({"nth": 4, "count": 3}, [4, 5, 6]),
    ({"nth": 2, "every": 4}, [2, 6, 10]),
    ({"nth": 2, "every": 4, "count": 2}, [2, 6]),
    ({"probability": 0.0}, []),
    ({"probability": 1.0}, list(range(1, 13))),
    ({"probability": 1.0, "nth": 11}, [11, 12]),
]


@pytest.mark.parametrize(("when", "expected"), CONDITIONS, ids=[str(when) for when, _ in CONDITIONS])
async def test_conditions_say_which_operations_are_hit(when: dict[str, Any], expected: list[int]) -> None:
    async with opened() as device, connected(device) as pair:
        with faults.delay(0, pair.a, **when) as rule:
            assert await losses(pair, 12, rule) == expected
        assert rule.hits == len(expected)
        assert rule.seen == 12
        assert rule.stopped


async def test_the_same_seed_gives_the_same_decisions_whatever_others_do() -> None:
    async with opened() as device, connected(device) as pair, connected(device) as other:
        with faults.delay(0, device=device, probability=0.3, seed=7) as rule:
            first = await losses(pair, 64, rule)
        with faults.delay(0, device=device, probability=0.3, seed=7) as rule:
            hit = []
            for number in range(1, 65):
                # Two of another QP's between each two of this one's.
                await other.a.rdma_write(other.local[:8], other.remote)
                await other.a.rdma_write(other.local[:8], other.remote)
                hit += [number] if await losses(pair, 1, rule) else []
        with faults.delay(0, device=device, probability=0.3, seed=8) as rule:
            another = await losses(pair, 64, rule)
        assert first == hit
        assert first != another
        assert 8 < len(first) < 32
        assert all(1 <= number <= 64 for number in first)


async def test_a_lost_request_that_is_sent_again_is_another_one() -> None:
    """What decides over a retransmission is the rule again: with a chance of a half it's not lost for ever."""
    async with opened() as device, connected(device, timeout=1, retry_cnt=7) as pair:
        with faults.drop(pair.a, count=3) as rule, anyio.fail_after(SOON):
            await pair.a.rdma_write(pair.local[:8], pair.remote)
        assert (rule.hits, rule.seen) == (3, 4)
        with faults.drop(pair.a, probability=0.5, seed=3) as rule, anyio.fail_after(SOON):
            await losses(pair, 32, rule)
        assert rule.seen == rule.hits + 32
        assert rule.hits > 4


async def test_only_operations_with_one_of_the_opcodes_count() -> None:
    async with opened() as device, connected(device) as pair:
        with (
            faults.delay(0, pair.a, opcode="SEND") as sends,
            faults.delay(0, pair.a, opcode=["RDMA_READ", "SEND"]) as both,
        ):
            await pair.a.rdma_write(pair.local[:8], pair.remote)
            await pair.a.rdma_read(pair.local[:8], pair.remote)
            pair.b.recv(pair.peer[:8])
            await pair.a.send(pair.local[:8])
        assert (sends.seen, both.seen) == (1, 2)


async def test_only_what_it_can_happen_to_is_hit() -> None:
    """A send has no key that could be refused, a write needs no receive."""
    async with opened() as device, connected(device) as pair:
        with faults.remote_access_error(pair.a) as access, faults.fail("MW_BIND_ERR", pair.a) as bind:
            receive = pair.b.recv(pair.peer[:8])
            await pair.a.send(pair.local[:8])
            await receive
        with faults.rnr(pair.a) as rnr:
            await pair.a.rdma_write(pair.local[:8], pair.remote)
        assert (access.seen, bind.seen, rnr.seen) == (0, 0, 0)


async def test_a_rule_for_a_qp_leaves_others_alone() -> None:
    async with opened() as device, connected(device) as pair, connected(device) as other:
        with faults.fail("REM_OP_ERR", pair.a) as rule:
            await other.check()
            with pytest.raises(RemoteOperationError):
                await pair.a.rdma_write(pair.local[:8], pair.remote)
        assert rule.hits == 1
        await other.check()


async def test_a_rule_for_a_device_leaves_others_alone() -> None:
    async with opened() as one, opened("mlx5_1") as two, connected(one) as pair, connected(two) as other:
        with faults.fail("LOC_PROT_ERR", device=one):
            await other.check()
            with pytest.raises(LocalProtectionError):
                await pair.a.rdma_write(pair.local[:8], pair.remote)


async def test_the_most_specific_of_several_applies() -> None:
    """QP before device before all; of those the one with opcodes; of those the first. The others count, and don't hit."""
    async with opened() as device:
        async with connected(device) as pair:
            made = {
                "all": faults.fail("LOC_LEN_ERR"),
                "device": faults.fail("LOC_QP_OP_ERR", device=device),
                "qp": faults.fail("LOC_PROT_ERR", pair.a),
                "qp again": faults.fail("LOC_ACCESS_ERR", pair.a),
                "qp and opcode": faults.fail("REM_OP_ERR", pair.a, opcode="RDMA_WRITE"),
            }
            with pytest.raises(RemoteOperationError):
                await pair.a.rdma_write(pair.local[:8], pair.remote)
            assert {name: rule.hits for name, rule in made.items()} == dict.fromkeys(made, 0) | {"qp and opcode": 1}
            assert all(rule.seen == 1 for rule in made.values())
        made["qp and opcode"].stop()
        async with connected(device) as pair:
            first, second = faults.fail("LOC_PROT_ERR", pair.a), faults.fail("LOC_ACCESS_ERR", pair.a)
            with pytest.raises(LocalProtectionError):
                await pair.a.rdma_write(pair.local[:8], pair.remote)
            assert (first.hits, second.hits) == (1, 0)


async def test_delays_of_several_rules_add_up() -> None:
    async with opened() as device, connected(device) as pair:
        with faults.delay(0.03, pair.a), faults.shape(device=device, latency=0.03), faults.delay(0.03):
            begin = time.monotonic()
            await pair.a.rdma_write(pair.local[:8], pair.remote)
            assert time.monotonic() - begin >= 0.09


async def test_it_lasts_without_with_until_reset() -> None:
    async with opened() as device, connected(device) as pair:
        rules = [faults.delay(0, pair.a), faults.hold(pair.a, nth=3)]
        assert faults.active() == rules
        await losses(pair, 2, rules[0])
        held = pair.a.rdma_write(pair.local[:8], pair.remote)
        await eventually(lambda: rules[1].hits)
        assert not held.done
        # What is held hasn't come to the other rules yet.
        assert (rules[0].seen, rules[1].hits) == (2, 1)
        faults.reset()
        assert faults.active() == []
        assert all(rule.stopped for rule in rules)
        with anyio.fail_after(SOON):
            await held
        before = [rule.hits for rule in rules]
        await losses(pair, 3, rules[0])
        assert [rule.hits for rule in rules] == before
        rules[0].stop()


async def test_what_a_stopped_rule_held_back_goes_on() -> None:
    async with opened() as device, connected(device) as pair:
        for make in (
            lambda: faults.delay(3600, pair.a),
            lambda: faults.hold(pair.a),
            lambda: faults.reorder(pair.a, limit=3600),
            lambda: faults.hang(pair.a),
        ):
            with make():
                operation = pair.a.rdma_write(pair.local[:8], pair.remote)
                await anyio.sleep(0.01)
                assert not operation.done
            with anyio.fail_after(SOON):
                await operation


async def test_closing_ends_what_a_rule_holds_back() -> None:
    async with opened() as device:
        for make in (
            faults.hold,
            lambda qp: faults.delay(3600, qp),
            lambda qp: faults.reorder(qp, limit=3600),
            faults.drop,
        ):
            async with connected(device, timeout=0) as pair:
                make(pair.a)
                operation = pair.a.rdma_write(pair.local[:8], pair.remote)
                await anyio.sleep(0.01)
                with anyio.fail_after(SOON):
                    await pair.a.close()
                assert isinstance(operation.exception(), WrFlushError)
            faults.reset()


async def test_a_slow_verb_is_let_go_when_its_rule_ends() -> None:
    async with opened() as device, anyio.create_task_group() as tasks:
        rule = faults.verb("reg_mr", delay=3600)
        with anyio.fail_after(SOON):
            registered = anyio.Event()

            async def register() -> None:
                async with device.reg_mr(bytearray(64)):
                    registered.set()

            tasks.start_soon(register)
            await eventually(lambda: rule.hits)
            assert not registered.is_set()
            rule.stop()
            await registered.wait()


def test_a_child_of_fork_can_make_rules_whatever_threads_did_before(run_python: Callable[..., Any]) -> None:
    run_python("""
        import os, signal, threading
        from aiordma import emulator
        from aiordma.emulator import faults

        emulator.attach(1)
        rule = faults.drop(nth=5)
        ended = False

        def make_rules():
            while not ended:
                with faults.delay(0.001) as fault:
                    fault.hits

        threads = [threading.Thread(target=make_rules) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                pid = os.fork()
                if not pid:
                    signal.alarm(30)
                    rule.stop()
                    with faults.drop():
                        pass
                    faults.reset()
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
        finally:
            ended = True
        assert not rule.stopped
    """)


async def test_pyverbs_objects_and_numbers_name_qps_and_devices() -> None:
    async with opened() as device, connected(device) as pair:
        for qp in (pair.a, pair.a.pyverbs, pair.a.qp_num):
            for where in (device, device.context, "mlx5_0", None):
                with faults.delay(0, qp, device=where) as rule:
                    await pair.a.rdma_write(pair.local[:8], pair.remote)
                assert rule.hits == 1, (qp, where)
        assert f"qp={pair.a.qp_num}" in repr(rule)
        assert "1 of 1" in repr(rule)


# ------------------------------------------------------------------ what is refused

WRONG: list[tuple[Any, str]] = [
    (lambda: faults.drop(nth=0), "nth"),
    (lambda: faults.drop(every=-1), "every"),
    (lambda: faults.drop(count=1.5), "count"),  # type: ignore[arg-type]
    (lambda: faults.drop(probability=1.01), "probability"),
    (lambda: faults.drop(probability="often"), "probability"),  # type: ignore[arg-type]
    (lambda: faults.drop(seed=-1, probability=0.5), "seed"),
    (lambda: faults.drop(opcode="RDMA_WROTE"), "opcode is one of"),
    (lambda: faults.drop(opcode=[]), "at least one"),
    (lambda: faults.drop("the first"), "qp is a QueuePair"),  # type: ignore[arg-type]
    (lambda: faults.drop(device=object()), "device is a Device"),  # type: ignore[arg-type]
    (lambda: faults.delay(-1), "seconds"),
    (lambda: faults.delay(float("inf")), "seconds"),
    (lambda: faults.shape(), "needs latency"),
    (lambda: faults.shape(bandwidth=0), "bandwidth"),
    (lambda: faults.fail("SUCCESS"), "status is one of"),
    (lambda: faults.rnr(timer=32), "timer"),
    (lambda: faults.verb("reg_mr"), "needs error or delay"),
    (lambda: faults.verb("reg_mr", "EWRONG"), "error"),
    (lambda: faults.verb("reg_mr", 0), "error"),
    (lambda: faults.verb("make_tea", 12), "there is no verb"),
    (lambda: faults.verb("ibv_post_send", 12), "never leaves the library"),
    (lambda: faults.verb("modify_qp", 12, state="DONE"), "state is one of"),
    (lambda: faults.devx(0x100, 0), "status"),
    (lambda: faults.cq_error(1, "both"), "queue is"),  # type: ignore[arg-type]
    (lambda: faults.raise_event(8, device="mlx5_0"), "device_fatal"),
    (lambda: faults.raise_event(9), "device and port"),
    (lambda: faults.raise_event(1), "one of a QP"),
    (lambda: faults.from_text("drop:nth"), "NAME=VALUE"),
    (lambda: faults.from_text("drip:nth=1"), "there is no fault 'drip'"),
    (lambda: faults.from_text("drop:seconds=1"), "takes no 'seconds'"),
    (lambda: faults.from_text("hang:nth=1"), "takes no conditions"),
    (lambda: faults.from_text("port_down:device=mlx5_0,nth=1"), "lasts from now on"),
    (lambda: faults.from_text("drop:nth=1,nth=2"), "nth is given twice"),
    (lambda: faults.from_text("verb:name=reg_mr count=3,error=5"), "name is a name"),
    (lambda: faults.drop(device="\0"), "device is a name"),
    (lambda: faults.cq_error((1 << 32) + 1), "24 bits"),
    (lambda: faults.raise_event(19, device="mlx5_0", port=1), "event is an EventType"),
    (lambda: faults.raise_event((1 << 32) + 11, device="mlx5_0", port=1), "event is an EventType"),
    (lambda: faults.raise_event(11, device="mlx5_0", port=(1 << 64) + 1), "port is the number"),
]


@pytest.mark.parametrize(("call", "match"), WRONG, ids=[match for _, match in WRONG])
def test_what_makes_no_sense_is_refused(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
    assert faults.active() == []


#: Nothing that an argument of any of the functions can be.
NONSENSE: tuple[Any, ...] = (-1, 1.5, float("nan"), float("inf"), 1j, 1 << 80, 1e300, "?", "a b", "\0", b"x", [1], {})

FUNCTIONS: dict[str, Any] = {
    "drop": faults.drop,
    "delay": lambda **given: faults.delay(**({"seconds": 1} | given)),
    "shape": lambda **given: faults.shape(**({"latency": 1} | given)),
    "reorder": faults.reorder,
    "rnr": faults.rnr,
    "fail": lambda **given: faults.fail(**({"status": "REM_OP_ERR"} | given)),
    "verb": lambda **given: faults.verb(**({"name": "reg_mr", "error": 12} | given)),
    "devx": lambda **given: faults.devx(**({"command": 0x100} | given)),
    "port_down": lambda **given: faults.port_down(**({"device": "mlx5_0"} | given)),
    "device_fatal": faults.device_fatal,
    "cq_error": lambda **given: faults.cq_error(**({"qp": 1} | given)),
    "raise_event": lambda **given: faults.raise_event(**({"event": 11, "device": "mlx5_0", "port": 1} | given)),
    "from_text": faults.from_text,
}
ARGUMENTS: dict[str, str] = {
    "drop": "qp device opcode nth every count probability",
    "delay": "seconds",
    "shape": "latency bandwidth jitter",
    "reorder": "by limit",
    "rnr": "timer",
    "fail": "status",
    "verb": "name error delay state device",
    "devx": "command status syndrome",
    "port_down": "device port",
    "device_fatal": "device",
    "cq_error": "qp queue device",
    "raise_event": "event device port",
    "from_text": "text",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nonsense_is_refused_in_every_argument(function: str) -> None:
    for argument in ARGUMENTS[function].split():
        for value in NONSENSE:
            if argument in ("seconds", "latency", "jitter", "limit", "delay") and value == 1.5:
                continue
            with pytest.raises((ValueError, EmulatorError)):
                pytest.fail(f"{function}({argument}={value!r}): {FUNCTIONS[function](**{argument: value})}")
    assert faults.active() == []


def test_what_is_not_there_is_named() -> None:
    for call in (
        lambda: faults.drop(device="mlx5_9"),
        lambda: faults.device_fatal("mlx5_9"),
        lambda: faults.port_down("mlx5_0", 2),
        lambda: faults.port_down("mlx5_9"),
        lambda: faults.cq_error(0xFFFFFE),
    ):
        with pytest.raises(EmulatorError, match=r"mlx5_9|port 2|0xfffffe"):
            call()
    assert faults.active() == []


def test_without_an_emulated_nic_it_says_how_to_get_one() -> None:
    program = """
from aiordma.emulator import EmulatorError, faults
faults.reset()
try:
    faults.drop()
except EmulatorError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "attach()" in done.stdout
    assert "aiordma emulate" in done.stdout


@given(
    nth=st.none() | st.integers(1, 1 << 64),
    seed=st.none() | st.integers(0, 1 << 70),
    probability=st.none() | st.floats(0, 1),
    seconds=st.floats(0, 1e9),
    opcodes=st.none() | st.lists(st.sampled_from(_fault_text.OPCODES), min_size=1),
)
def test_every_rule_of_python_is_one_for_the_device(
    nth: int | None, seed: int | None, probability: float | None, seconds: float, opcodes: list[str] | None
) -> None:
    conditions = {"nth": nth, "seed": seed, "probability": probability, "opcode": opcodes}
    if nth == 1 << 64:
        with pytest.raises(ValueError, match="nth"):
            faults.delay(seconds, device="mlx5_1", **conditions)  # type: ignore[arg-type]
        return
    with faults.delay(seconds, device="mlx5_1", **conditions) as rule:  # type: ignore[arg-type]
        assert rule.hits == 0


# ------------------------------------------------------------------ any program


PROGRAM = """
import errno
import anyio
import aiordma
from aiordma.emulator import faults
from aiordma.testing import connected_pair

async def main():
    async with aiordma.open_device() as device, device.reg_mr(bytearray(8)) as mr:
        try:
            await device.reg_mr(bytearray(8))
        except aiordma.VerbsError as e:
            print(errno.errorcode[e.errno])
        async with connected_pair(device, timeout=8) as (a, b):
            for _ in range(5):
                await a.rdma_write(mr, mr.remote())
        faults.reset()
        await (await device.reg_mr(bytearray(8))).close()

anyio.run(main)
"""


def emulate(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "aiordma.cli", "emulate", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )


def test_a_program_is_run_with_faults() -> None:
    done = emulate(
        *("--fault", "drop:opcode=RDMA_WRITE,nth=2,count=2"),
        *("--fault", "verb:name=reg_mr,error=ENOMEM,nth=2,every=1"),
        *("--", sys.executable, "-c", PROGRAM),
        AIORDMA_EMULATOR_LOG="info",
        AIORDMA_DEVICE="",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ENOMEM\n"
    assert done.stderr.count(": fault 1, drop") == 2
    assert done.stderr.count("mlx5_0: fault 2, verb") == 1


def test_every_kind_of_rule_has_a_text() -> None:
    """docs/faults.md: "The kind and its arguments are those of the functions"."""
    arguments = {"delay": "seconds=1", "shape": "latency=1", "fail": "status=REM_OP_ERR", "verb": "name=reg_mr,error=5"}
    arguments |= {"devx": "command=256,status=8", "port_down": "device=mlx5_1", "device_fatal": "device=mlx5_1"}
    not_rules = {"Fault", "active", "cq_error", "from_text", "raise_event", "reset"}
    for kind in set(faults.__all__) - not_rules:
        with faults.from_text(f"{kind}:{arguments.get(kind, '')}") as fault:
            assert faults.active() == [fault]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("drip", "there is no fault 'drip'"),
        ("drop:often", "'often' is not NAME=VALUE"),
        ("verb:name=poll_cq,error=EIO", "never leaves the library"),
        ("verb:name=make_tea,error=EIO", 'there is no verb "make_tea"'),
        ("drop:device=mlx5_3", "there is no device mlx5_3"),
        ("port_down:device=mlx5_0,port=2", "mlx5_0 has no port 2"),
        ("port_down", "no device was given"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_before_the_program_runs(fault: str, why: str) -> None:
    done = emulate("--fault", fault, "--", "echo", "ran", COLUMNS="200")
    assert done.returncode == 2
    assert why in done.stderr
    assert "ran" not in done.stdout

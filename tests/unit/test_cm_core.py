"""The states of a connection's end, in every order of events, failures, timeouts and cancellations."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiordma import DisconnectedError
from aiordma.cm._core import Action, Core, Event, Phase

STEPS = {
    True: [Action.RESOLVE, Action.ROUTE, Action.PREPARE, Action.REQUEST, Action.READY, Action.CONFIRM],
    False: [Action.PREPARE, Action.READY, Action.ACCEPT],
}
ANSWERS = {
    Action.RESOLVE: Event.RESOLVED,
    Action.ROUTE: Event.ROUTED,
    Action.REQUEST: Event.RESPONSE,
    Action.ACCEPT: Event.ESTABLISHED,
}


def _open(core: Core, active: bool) -> None:
    for step in STEPS[active]:
        assert core.next() is step
        core.done(step)
        if step in ANSWERS:
            assert core.next() is None
            core.event(ANSWERS[step])
    assert core.phase is Phase.OPEN


def _run_out(core: Core) -> list[Action]:
    """Carries out everything that is due."""
    done = []
    while (action := core.next()) is not None:
        done.append(action)
        core.done(action)
    return done


class Ends(RuleBasedStateMachine):
    """A core, and a driver that does what drivers may do."""

    @initialize(active=st.booleans())
    def begin(self, active: bool) -> None:
        self.active = active
        self.core = Core(active=active)
        self.busy: Action | None = None
        self.begun: list[Action] = []
        self.completed: list[Action] = []
        self.was_open = False
        self.failed_before_open = False
        self.stopped = False
        self.met = False

    @precondition(lambda self: self.busy is None)
    @rule()
    def take(self) -> None:
        action = self.core.next()
        assert self.core.next() is None or action is None, "one action at a time"
        if action is None:
            return
        assert Action.RELEASE not in self.begun, "nothing follows the release"
        self.busy = action
        self.begun.append(action)
        if action in (Action.REQUEST, Action.ACCEPT):
            assert Action.PREPARE in self.completed
        if action in (Action.CONFIRM, Action.ACCEPT):
            assert Action.READY in self.completed
        if action in (Action.FLUSH, Action.REJECT, Action.DISCONNECT, Action.RELEASE):
            assert self.begun.count(action) == 1
        if action in STEPS[self.active]:
            assert not self.failed_before_open
            assert self.begun.count(action) == 1

    @precondition(lambda self: self.busy is not None)
    @rule()
    def done(self) -> None:
        assert self.busy is not None
        self.met |= self.busy in (Action.CONFIRM, Action.ACCEPT)
        self.completed.append(self.busy)
        self.core.done(self.busy)
        self.busy = None

    @precondition(lambda self: self.busy is not None)
    @rule()
    def fail(self) -> None:
        assert self.busy is not None
        self.core.failed(self.busy, OSError("failed"))
        self.busy = None

    @precondition(lambda self: self.busy in STEPS[self.active] if hasattr(self, "active") else False)
    @rule()
    def cancel_step(self) -> None:
        """What a cancellation or a timeout does to a step under way."""
        assert self.busy is not None
        self.met |= self.busy in (Action.CONFIRM, Action.ACCEPT)
        self.core.cut(self.busy)
        self.busy = None
        self.stop()

    @rule()
    def stop(self) -> None:
        self.core.stop(TimeoutError())
        self.core.close(patient=False)
        self.stopped = True

    @rule(event=st.sampled_from(list(Event)))
    def event(self, event: Event) -> None:
        self.core.event(event, OSError("event") if event is Event.FAILED else None)

    @precondition(lambda self: self.core.phase is Phase.OPEN)
    @rule(patient=st.booleans())
    def close(self, patient: bool) -> None:
        self.core.close(patient=patient)
        self.stopped |= not patient

    @invariant()
    def opens_once_or_fails_once(self) -> None:
        if not hasattr(self, "core"):
            return
        if self.core.phase is Phase.OPENING and self.core.error is not None:
            self.failed_before_open = True
        if self.core.phase is Phase.OPEN:
            assert not self.failed_before_open
            self.was_open = True
        assert self.core.settled or self.core.phase is Phase.OPENING

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        # Whoever closes it gets to the end, by whatever way it came here.
        if self.busy is not None:
            self.done()
        self.stop()
        for _ in range(10):
            self.take()
            if self.busy is None:
                break
            self.done()
        assert self.core.ended
        assert self.begun[-1] is Action.RELEASE
        assert self.begun.count(Action.RELEASE) == 1
        if not self.active and Action.ACCEPT not in self.begun:
            assert Action.REJECT in self.begun
        if self.was_open or (self.met and Action.DISCONNECT in self.begun):
            assert self.begun.index(Action.DISCONNECT) < self.begun.index(Action.RELEASE)
        if self.met:
            assert Action.DISCONNECT in self.begun, "the peer may think that it's connected"
        before = (self.core.phase, self.core.error)
        for event in Event:
            self.core.event(event, OSError("late"))
        assert self.core.next() is None
        assert (self.core.phase, self.core.error) == before


Ends.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestEnds: Any = Ends.TestCase


@pytest.mark.parametrize("active", [True, False])
def test_an_end_that_nothing_disturbs_opens_and_closes(active: bool) -> None:
    core = Core(active=active)
    _open(core, active)
    core.close(patient=True)
    assert _run_out(core) == [Action.DISCONNECT]
    core.event(Event.DISCONNECTED)
    assert _run_out(core) == [Action.FLUSH, Action.RELEASE]
    assert core.ended


@pytest.mark.parametrize("active", [True, False])
def test_a_peer_that_leaves_is_answered_and_the_qp_flushed_before_anything_is_released(active: bool) -> None:
    core = Core(active=active)
    _open(core, active)
    core.event(Event.DISCONNECTED, DisconnectedError("gone"))
    assert _run_out(core) == [Action.FLUSH, Action.DISCONNECT]
    assert core.lost
    assert not core.ended
    core.close(patient=True)
    assert _run_out(core) == [Action.RELEASE]


def test_an_answer_that_comes_before_the_call_returns_counts() -> None:
    core = Core(active=True)
    assert core.next() is Action.RESOLVE
    core.event(Event.RESOLVED)
    core.done(Action.RESOLVE)
    assert core.next() is Action.ROUTE


@pytest.mark.parametrize("steps", range(6))
def test_a_timeout_names_the_step_that_it_came_in(steps: int) -> None:
    core = Core(active=True)
    for step in STEPS[True][:steps]:
        assert core.next() is step
        core.done(step)
        if step in ANSWERS:
            core.event(ANSWERS[step])
    assert core.next() is STEPS[True][steps]
    assert core.step is STEPS[True][steps]
    core.cut(core.step)
    core.stop(TimeoutError())
    expected = [Action.DISCONNECT, Action.RELEASE] if steps == 5 else [Action.RELEASE]
    assert _run_out(core) == expected


def test_a_request_that_is_not_accepted_is_rejected() -> None:
    core = Core(active=False)
    assert core.next() is Action.PREPARE
    core.failed(Action.PREPARE, OSError("no memory"))
    assert _run_out(core) == [Action.REJECT, Action.RELEASE]
    assert isinstance(core.error, OSError)


@pytest.mark.parametrize("active", [True, False])
def test_a_peer_that_leaves_before_this_side_knows_that_it_is_open_leaves_an_open_end(active: bool) -> None:
    """What the peer sent before it left is in the receives that were posted, and isn't lost."""
    core = Core(active=active)
    for step in STEPS[active][:-1]:
        assert core.next() is step
        core.done(step)
        if step in ANSWERS:
            core.event(ANSWERS[step])
    last = STEPS[active][-1]
    assert core.next() is last
    if last in ANSWERS:
        core.event(ANSWERS[last])
    core.event(Event.DISCONNECTED)
    assert not core.settled
    core.done(last)
    assert core.phase is Phase.OPEN
    assert core.lost
    assert _run_out(core) == [Action.FLUSH, Action.DISCONNECT]


def test_a_peer_that_leaves_without_having_confirmed_was_never_connected() -> None:
    core = Core(active=False)
    for step in STEPS[False]:
        assert core.next() is step
        core.done(step)
    core.event(Event.DISCONNECTED)
    assert core.phase is Phase.OPENING
    assert isinstance(core.error, DisconnectedError)

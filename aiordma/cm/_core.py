"""The states of one end of a connection, without I/O: what happened goes in, what is to be done comes out.

:meth:`Core.next` gives the next action, one at a time; whoever carries it out says :meth:`Core.done`, :meth:`Core.failed`
or, where it was cancelled and may still be running, :meth:`Core.cut`. Events come in whatever order the network has them,
also before the call that they answer returns, and after everything is over.

What holds for every order of events, timeouts and cancellations:

* An end opens once or fails once, and never opens after it failed.
* The QP exists, with its receives posted, before the peer hears of it (REQUEST, ACCEPT), and is in RTS before the
  peer hears that the connection is there (CONFIRM, ACCEPT).
* A request that isn't accepted is rejected. A peer that may think that it's connected is told of the end.
* RELEASE is the last action, comes once, and never while another action is under way.
"""

from __future__ import annotations

import enum

from aiordma.errors import DisconnectedError

__all__ = ["Action", "Core", "Event", "Phase"]


class Action(enum.Enum):
    """What is to be done; the value says it in a sentence that begins with "no end of"."""

    RESOLVE = "resolving the address"
    ROUTE = "resolving the route"
    PREPARE = "making the QP and preparing it"
    REQUEST = "waiting for the peer's answer"
    READY = "bringing the QP to RTS"
    CONFIRM = "confirming the connection"
    ACCEPT = "waiting for the peer's confirmation"
    REJECT = "rejecting the request"
    FLUSH = "bringing the QP to the error state"
    DISCONNECT = "disconnecting"
    RELEASE = "releasing the connection's objects"


class Event(enum.Enum):
    """What the peer or the connection manager did."""

    RESOLVED = enum.auto()
    ROUTED = enum.auto()
    RESPONSE = enum.auto()
    ESTABLISHED = enum.auto()
    FAILED = enum.auto()
    DISCONNECTED = enum.auto()


class Phase(enum.Enum):
    """Where an end is."""

    OPENING = enum.auto()
    OPEN = enum.auto()
    ENDED = enum.auto()


_ACTIVE = (Action.RESOLVE, Action.ROUTE, Action.PREPARE, Action.REQUEST, Action.READY, Action.CONFIRM)
_PASSIVE = (Action.PREPARE, Action.READY, Action.ACCEPT)
# The event with which an action is complete; the others are when they are done.
_ANSWER = {
    Action.RESOLVE: Event.RESOLVED,
    Action.ROUTE: Event.ROUTED,
    Action.REQUEST: Event.RESPONSE,
    Action.ACCEPT: Event.ESTABLISHED,
}
# From these on the peer may think that it's connected.
_MEETING = (Action.CONFIRM, Action.ACCEPT)


class Core:
    """One end: ``active`` connects, the other has a request to answer."""

    def __init__(self, *, active: bool) -> None:
        self.phase = Phase.OPENING
        #: Why it didn't open, or why it ended.
        self.error: BaseException | None = None
        #: The peer is gone, or was told that this end goes.
        self.lost = False
        self._steps = _ACTIVE if active else _PASSIVE
        self._position = 0
        self._called: set[Action] = set()
        self._seen: set[Event] = set()
        self._early: BaseException | None = None
        self._busy: Action | None = None
        self._answered = active
        self._met = False
        self._flushed = False
        self._said = False
        self._closing = False
        self._patient = True

    # ---------------------------------------------------------------- what it says

    @property
    def settled(self) -> bool:
        """It's open, or it failed."""
        return self.phase is not Phase.OPENING or self.error is not None

    @property
    def ended(self) -> bool:
        """Everything is released."""
        return self.phase is Phase.ENDED

    @property
    def step(self) -> Action:
        """The step that it's at, while it opens."""
        return self._steps[min(self._position, len(self._steps) - 1)]

    def next(self) -> Action | None:
        """The next action, which is then under way; None when there is nothing to do but to wait."""
        if self._busy is not None or self.phase is Phase.ENDED:
            return None
        self._busy = self._choose()
        return self._busy

    def _choose(self) -> Action | None:
        if self.phase is Phase.OPENING and self.error is None:
            return None if self.step in self._called else self.step
        if not self._answered:
            return Action.REJECT
        open_ = self.phase is Phase.OPEN
        if open_ and self.lost and not self._flushed:
            return Action.FLUSH
        ending = self._closing or self.lost or not open_
        if (open_ or self._met) and ending and not self._said:
            return Action.DISCONNECT
        if not open_ or (self._closing and (self.lost or not self._patient)):
            return Action.RELEASE
        return None

    # ---------------------------------------------------------------- what happened

    def done(self, action: Action) -> None:
        """The action under way was carried out."""
        self._over(action)
        if action in self._steps:
            self._called.add(action)
            self._met = self._met or action in _MEETING
            self._answered = self._answered or action is Action.ACCEPT
            self._advance()

    def failed(self, action: Action, error: BaseException) -> None:
        """It failed. Those that end something count as done: there is nothing more to be tried."""
        self._over(action)
        if action in self._steps:
            # There's nobody to be rejected any more when accepting fails.
            self._answered = self._answered or action is Action.ACCEPT
            self.stop(error)

    def cut(self, action: Action) -> None:
        """It was cancelled, and may be running still, or have happened."""
        self._over(action)
        if action in _MEETING:
            self._met = self._answered = True

    def _over(self, action: Action) -> None:
        assert action is self._busy, f"{action} isn't under way"
        self._busy = None
        if action is Action.REJECT:
            self._answered = True
        elif action is Action.FLUSH:
            self._flushed = True
        elif action is Action.DISCONNECT:
            self._said = True
        elif action is Action.RELEASE:
            self.phase = Phase.ENDED

    def event(self, event: Event, error: BaseException | None = None) -> None:
        """The connection manager reports something. ``error``: with FAILED, why."""
        if event in (Event.FAILED, Event.DISCONNECTED):
            if event is Event.DISCONNECTED and self._as_good_as_open():
                # It was open at the other side, which may have sent something meanwhile: it opens first, and is lost then.
                self._early = error or DisconnectedError("the peer disconnected")
            elif self.phase is Phase.OPENING:
                self.stop(error or DisconnectedError("the peer disconnected while the connection was made"))
            elif self.phase is Phase.OPEN and not self.lost:
                self.error = self.error or error
                self.lost = True
            return
        self._seen.add(event)
        self._advance()

    def _as_good_as_open(self) -> bool:
        """The last step's call is under way, and nothing else is missing."""
        if self.phase is not Phase.OPENING or self.error is not None or self._busy not in _MEETING:
            return False
        return self._busy not in _ANSWER or _ANSWER[self._busy] in self._seen

    def _advance(self) -> None:
        if self.phase is not Phase.OPENING or self.error is not None:
            return
        while self.step in self._called and (self.step not in _ANSWER or _ANSWER[self.step] in self._seen):
            self._position += 1
            if self._position == len(self._steps):
                self.phase = Phase.OPEN
                if self._early is not None:
                    self.event(Event.DISCONNECTED, self._early)
                return

    def stop(self, error: BaseException) -> None:
        """Whoever wanted it doesn't any more (a timeout, a cancellation); without effect once it's open or failed."""
        if self.phase is Phase.OPENING and self.error is None:
            self.error = error

    def close(self, *, patient: bool) -> None:
        """It's to be closed; if ``patient``, when the peer has answered or :meth:`close` comes again without."""
        self._closing = True
        self._patient = self._patient and patient

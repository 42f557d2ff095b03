"""A worker at the coordinator: beats from a thread of its own, and what it hears, brought to the one that trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from unisono.errors import InvalidInput
from unisono.membership.agent import AbortView, Action, Agent, Exit, JoinView
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import WordMessage
from unisono.membership.protocol import CoordinatorAddress, StateVersion, View, ViewUpdate
from unisono.observe.activity import Activity, Phase

LOG = logging.getLogger("unisono")
_REST_SECONDS = 0.1  # less than a beat's time
_RETRY_SECONDS = 0.2  # while the coordinator is away
_REFUSED_SECONDS = 30.0  # after which who never had an answer gives up, as the run is over that it was to join
_GONE_SECONDS = 300.0  # the same, of who had one: a coordinator may be started again
_LEDGER_SECONDS = 1.0  # between two tellings where the time went


class CoordinatorClient:
    """Speaks for one worker, until it is closed.

    One thread listens: its beats are answered when there is news. What this worker has to say itself it says at once,
    beside that.

    Args:
        contact: of the coordinator.
        agent: this worker's half of the protocol.
        abort: called by the listening thread, which may happen at any time, with the number of a view whose group is
            to be broken off.
        leaving: whether this worker was asked to go; asked before every beat.
        stopping: whether the run was asked to stop, so that no view is worth waiting for.
        doing: what the worker does; called by the listening thread.
        spent: seconds of its life, by phase.
        told: called with what the coordinator has to tell people, a sentence each.

    Raises:
        InvalidInput: the contact's URL is none, or its authority cannot be read.
    """

    def __init__(
        self,
        contact: CoordinatorAddress,
        agent: Agent,
        abort: Callable[[int], None],
        *,
        leaving: Callable[[], bool] = lambda: False,
        stopping: Callable[[], bool] = lambda: False,
        doing: Callable[[], Activity] | None = None,
        spent: Callable[[], Mapping[Phase, float]] | None = None,
        told: Callable[[str], None] = LOG.warning,
    ) -> None:
        self._listening = HttpConnection(contact)
        self._saying = self._listening.sibling()
        self._url = contact.url
        self._refused_at: float | None = None  # since when nobody has listened there
        self._agent, self._abort, self._leaving, self._stopping = agent, abort, leaving, stopping
        self._doing, self._spent, self._told = doing, spent, told
        self._heard, self._spent_at = 0, float("-inf")
        self._knows: ViewUpdate | None = None
        self._news = threading.Condition()  # guards the agent and what follows
        self._view: View | None = None
        self._dismissed = self._closed = self._resting = False
        self._said, self._hearing = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="unisono attendance", daemon=True)
        self._thread.start()

    def next_view(self) -> View | None:
        """Waits for a view to meet; None once the others go on without this worker, which asked to leave, or the
        training is over.

        Raises:
            InvalidInput: nobody has listened there for a while.
        """
        began = time.monotonic()
        with self._news:
            self._news.wait_for(
                lambda: self._view or self._dismissed or self._closed or self._nobody(began) or self._stopping()
            )
            if self._view is None and not (self._dismissed or self._closed) and self._nobody(began):
                raise InvalidInput(
                    "coordinator",
                    self._url,
                    "nobody listens there any more",
                    "it went with its run: see how that ended",
                )
            view, self._view = self._view, None
            return view

    def _nobody(self, began: float) -> bool:
        """Whether nobody has listened there for too long; for who had an answer before, since it `began` to wait."""
        if self._refused_at is None:
            return False
        if self._knows is None:
            return time.monotonic() - self._refused_at > _REFUSED_SECONDS
        return time.monotonic() - max(began, self._refused_at) > _GONE_SECONDS

    @property
    def votes(self) -> bool:
        """See `Agent.votes`."""
        return self._agent.votes

    @property
    def standing(self) -> StateVersion:
        """See `Agent.standing`."""
        return self._agent.standing

    def met(self, number: int, step: int, digest: str) -> None:
        """See `Agent.met`."""
        self._turn(lambda: self._agent.met(number, step, digest))

    def done(self, number: int, steps: int = 1) -> None:
        """So many more steps are in the state; told with the next beat."""
        self._agent.done(number, steps=steps)  # without a lock: only who trains changes how far it is

    def part(self, number: int, digest: str) -> None:
        """See `Agent.part`; `digest` of the state as it now is."""
        self._tell(lambda: self._agent.part(number, digest))

    def broken(self, number: int, digest: str, missed: tuple[str, ...] = ()) -> None:
        """See `Agent.broken`; `digest` of the state as it now is."""
        self._turn(lambda: self._agent.broken(number, missed, digest))

    def finish(self) -> None:
        """See `Agent.finish`."""
        self._tell(self._agent.finish)

    def leave(self) -> None:
        """See `Agent.leave`."""
        self._tell(self._agent.leave)

    def close(self) -> None:
        """Say no more."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._listening.cut()
        self._thread.join()
        for line in (self._saying, self._listening):
            line.close()

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _turn(self, change: Callable[[], list[Action] | None]) -> None:
        with self._news:
            self._do(change() or [])
            if self._resting:  # then the thread that listens says it, and hears the next view in answer
                self._resting = False
                return
        self._tell(list)

    def _tell(self, change: Callable[[], list[Action] | None]) -> None:
        with self._news:
            self._do(change() or [])
        with self._said:  # if the coordinator is away, a later beat says it
            self._exchange(self._saying, waits=False)

    def _listen(self) -> None:
        while not self._closed:
            with self._news:
                self._resting = self._agent.turning
                self._news.wait_for(lambda: self._closed or not self._resting, _REST_SECONDS)
                self._resting = False
            answered = self._exchange(self._listening, waits=True)
            with self._news:
                if answered or not self._listening.refused:
                    self._refused_at = None
                elif self._refused_at is None:
                    self._refused_at = time.monotonic()
                if not answered:
                    self._news.notify_all()
                    self._news.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _exchange(self, line: HttpConnection, *, waits: bool) -> bool:
        with self._news:
            if self._leaving():
                self._do(self._agent.leave())
            beat, knows = self._agent.beat(), self._knows if waits else None
        told = vars(beat) | {  # `dataclasses.asdict` would copy all of it, at ten times the cost
            "standing": vars(beat.standing),
            "place": vars(beat.place),
            "knows": knows.view.number if knows else 0,
            "knows_over": knows.over.value if knows else "",
            "waits": waits,
        }
        answer = line.post("/v1/beat", told | self._of_itself(seldom=not waits), WordMessage)
        if answer is None:
            return False
        try:
            word = answer.value(knows)
        except ValueError:  # whoever says this does not know what it has said before
            return False
        self._tell_people(answer)
        with self._news:
            self._knows = word
            self._do(self._agent.hear(word))
        return True

    def _of_itself(self, *, seldom: bool) -> dict[str, Any]:
        """What the worker does, and now and then where its time went; with what is said `seldom`, each time."""
        told: dict[str, Any] = {"heard": self._heard}
        if self._doing:
            told["doing"] = vars(doing := self._doing()) | {"phase": doing.phase.value}
        now = time.monotonic()
        if self._spent and (seldom or now - self._spent_at >= _LEDGER_SECONDS):
            self._spent_at = now
            told["spent"] = {phase.value: seconds for phase, seconds in self._spent().items() if seconds}
        return told

    def _tell_people(self, answer: WordMessage) -> None:
        with self._hearing:
            new = answer.says if answer.said > self._heard else []
            self._heard = max(self._heard, answer.said)
        for sentence in new:
            self._told(sentence)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AbortView(number):
                    self._view = None
                    self._abort(number)
                case JoinView(view):
                    self._view = view
                case Exit():
                    self._dismissed = True
        self._news.notify_all()

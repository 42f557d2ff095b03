"""A worker at the coordinator: beats from a thread of its own, and what it hears, brought to the one that trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType

from unisono.membership.agent import Abort, Action, Agent, Exit, Meet
from unisono.membership.line import Line
from unisono.membership.values import Contact, Over, Place, Standing, View, Word

_RETRY_SECONDS = 0.2  # while the coordinator is away


class Attendance:
    """Speaks for one worker, until it is closed.

    One thread listens: its beats are answered when there is news. What this worker has to say itself it says at once,
    beside that.

    Args:
        contact: of the coordinator.
        agent: this worker's half of the protocol.
        abort: called by the listening thread, which may happen at any time, with the number of a view whose group is
            to be broken off.

    Raises:
        InvalidInput: the contact's URL is none, or its authority cannot be read.
    """

    def __init__(self, contact: Contact, agent: Agent, abort: Callable[[int], None]) -> None:
        self._saying, self._listening = (Line(contact) for _ in "12")
        self._agent, self._abort = agent, abort
        self._knows: Word | None = None
        self._news = threading.Condition()  # guards the agent and what follows
        self._view: View | None = None
        self._dismissed = self._closed = False
        self._said = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="unisono attendance", daemon=True)
        self._thread.start()

    def next_view(self) -> View | None:
        """Waits for a view to meet; None once the others go on without this worker, which asked to leave, or the
        training is over."""
        with self._news:
            self._news.wait_for(lambda: self._view is not None or self._dismissed or self._closed)
            view, self._view = self._view, None
            return view

    @property
    def votes(self) -> bool:
        """See `Agent.votes`."""
        return self._agent.votes

    @property
    def standing(self) -> Standing:
        """See `Agent.standing`."""
        return self._agent.standing

    def met(self, number: int, step: int, digest: str) -> None:
        """See `Agent.met`."""
        self._tell(lambda: self._agent.met(number, step, digest))

    def done(self, number: int) -> None:
        """One more step is in the state; told with the next beat."""
        with self._news:
            self._agent.done(number, "", boundary=False)

    def boundary(self, number: int, digest: str) -> None:
        """One more step is in the state, with which some voted to end."""
        self._tell(lambda: self._agent.done(number, digest, boundary=True))

    def broken(self, number: int, digest: str, missed: tuple[str, ...] = ()) -> None:
        """See `Agent.broken`; `digest` of the state as it now is."""
        self._tell(lambda: self._agent.broken(number, missed, digest))

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

    def __enter__(self) -> Attendance:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tell(self, change: Callable[[], list[Action] | None]) -> None:
        with self._news:
            self._do(change() or [])
        with self._said:  # if the coordinator is away, a later beat says it
            self._exchange(self._saying, waits=False)

    def _listen(self) -> None:
        while not self._closed:
            if not self._exchange(self._listening, waits=True):
                with self._news:
                    self._news.wait_for(lambda: self._closed, _RETRY_SECONDS)

    def _exchange(self, line: Line, *, waits: bool) -> bool:
        with self._news:
            beat, knows = self._agent.beat(), self._knows if waits else None
        told = asdict(beat) | {
            "knows": knows.view.number if knows else 0,
            "knows_over": knows.over.value if knows else "",
        }
        answer = line.post("/v1/beat", told)
        if answer is None:
            return False
        word = _word(answer)
        with self._news:
            self._knows = word
            self._do(self._agent.hear(word))
        return True

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Abort(number):
                    self._view = None
                    self._abort(number)
                case Meet(view):
                    self._view = view
                case Exit():
                    self._dismissed = True
        self._news.notify_all()


def _word(told: object) -> Word:
    assert isinstance(told, dict)
    view = told["view"]
    start = Standing(**view["start"])
    places = tuple(Place(**place) for place in view["places"])
    return Word(View(view["number"], tuple(view["members"]), start, tuple(view["sources"]), places), Over(told["over"]))

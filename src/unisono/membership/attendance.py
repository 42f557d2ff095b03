"""A worker at the coordinator: beats from a thread of its own, and what it hears, brought to the one that trains."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from urllib.parse import urlsplit

from unisono.errors import InvalidInput
from unisono.membership.agent import Abort, Action, Agent, Exit, Meet
from unisono.membership.values import Contact, Over, Place, Standing, View, Word

_LONGEST_ANSWER_BYTES = 16 << 20
_ANSWER_SECONDS = 10.0
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
        leaving: whether this worker was asked to go; asked before every beat.
        stopping: whether the run was asked to stop, so that no view is worth waiting for.

    Raises:
        InvalidInput: the contact's URL is none.
    """

    def __init__(
        self,
        contact: Contact,
        agent: Agent,
        abort: Callable[[int], None],
        *,
        leaving: Callable[[], bool] = lambda: False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        parts = urlsplit(contact.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise InvalidInput("coordinator", contact.url, "no address of one", "write http://host:port")
        self._saying, self._listening = (
            _Line(parts.scheme == "https", parts.hostname, parts.port, contact.token) for _ in "12"
        )
        self._agent, self._abort, self._leaving, self._stopping = agent, abort, leaving, stopping
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
            self._news.wait_for(lambda: self._view is not None or self._dismissed or self._closed or self._stopping())
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

    @property
    def works(self) -> bool:
        """Whether the group of the view at hand has been met."""
        return self._agent.working

    def done(self, number: int) -> None:
        """One more step is in the state; told with the next beat."""
        with self._news:
            self._agent.done(number)

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

    def _exchange(self, line: _Line, *, waits: bool) -> bool:
        with self._news:
            if self._leaving():
                self._do(self._agent.leave())
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


class _Line:
    """A connection that is made again when it is needed."""

    def __init__(self, secure: bool, host: str, port: int, token: str) -> None:
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._made: http.client.HTTPConnection
        if secure:
            context = ssl.create_default_context()
            self._made = http.client.HTTPSConnection(host, port, timeout=_ANSWER_SECONDS, context=context)
        else:
            self._made = http.client.HTTPConnection(host, port, timeout=_ANSWER_SECONDS)

    def post(self, path: str, message: object) -> object | None:
        """The answer; None if there is none, or it is an error."""
        try:
            self._made.request("POST", path, json.dumps(message), self._headers)
            answer = self._made.getresponse()
            body = answer.read(_LONGEST_ANSWER_BYTES)
            return json.loads(body) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            self._made.close()
            return None

    def cut(self) -> None:
        """Whoever waits for an answer gets none."""
        wire = self._made.sock
        if wire is not None:
            with suppress(OSError):  # it was not connected any more
                wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody asks any more."""
        self._made.close()


def _word(told: object) -> Word:
    assert isinstance(told, dict)
    view = told["view"]
    start = Standing(**view["start"])
    places = tuple(Place(**place) for place in view["places"])
    return Word(View(view["number"], tuple(view["members"]), start, tuple(view["sources"]), places), Over(told["over"]))

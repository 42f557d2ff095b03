"""The coordinator over HTTP: a thin shell that gives the protocol its clock, its disk and its ears.

A worker's beat is answered when there is news, or when the next one is due: so news reach it at once, and a worker
that dies closes a connection.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from unisono.membership.coordinator import Coordinator, Formed, Happened
from unisono.membership.messages import (
    BeatMessage,
    ChangeMessage,
    DoingMessage,
    GoneMessage,
    HappenedMessage,
    LookMessage,
    RunningMessage,
    StatusMessage,
    ViewMessage,
    WordMessage,
    WorkerMessage,
)
from unisono.membership.protocol import View, ViewStatus
from unisono.membership.server.response_cache import Reply, ResponseCache, answer
from unisono.membership.server.run_spec_routes import offer
from unisono.membership.server.stall_reports import Reports
from unisono.membership.server.store import Store, words
from unisono.membership.server.token_auth import App, Receive, Scope, Send, TokenAuth, body, unpacks
from unisono.membership.view_delta import change
from unisono.observe.activity import Phase

BEAT = "/v1/beat"
_DOUBT_BEATS = 8  # after which who vouches for workers is answered, though none be late
_DOUBT_SECONDS = 2.0  # the same, at the latest


@dataclass(eq=False)
class Waiting:
    """A worker's request that is answered once, unless it hangs up before."""

    worker: str
    answer: Callable[[], None]
    due: asyncio.TimerHandle | None = None


class Service:
    """A `Coordinator` with a clock and a disk.

    Args:
        now: seconds of a clock that does not jump.
        today: seconds since the epoch.
        told: called with each decision in words.

    Attributes:
        stalled_seconds: that this process was stopped, or waited for a processor.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        now: Callable[[], float] = time.monotonic,
        today: Callable[[], float] = time.time,
        told: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.coordinator, self.store, self._clock, self._today, self._told = coordinator, store, now, today, told
        self.stalled_seconds = 0.0
        self.word = coordinator.word  # what is on disk
        self._before = View()  # the one before
        self._last_due = 0.0
        self.reports = Reports(int(1000 * today()))
        self._unwritten: list[Happened] = []
        self._waiting: set[Waiting] = set()
        self._late = asyncio.Event()  # set for a moment
        self._listening: Counter[str] = Counter()  # requests of a worker that wait
        self._answers = ResponseCache()

    def now(self) -> float:
        """Seconds of a clock that stands still while this process does: nobody else is late then."""
        return self._clock() - self.stalled_seconds

    def decide(self, happened: Sequence[Happened]) -> None:
        """Nobody hears of a view, or of the end of all, that is not on disk; what cannot be written now is tried again
        with the next tick. That a view ends is heard at once: who ended it says so again and again, so it would be
        concluded anew."""
        if any(isinstance(each, Formed) for each in happened):
            self.reports.formed(self.word.view, self.coordinator, self.now())
        self._unwritten += happened
        binding = any(isinstance(each, Formed) or each.over is ViewStatus.FOR_EVER for each in self._unwritten)
        if self._unwritten and (binding or not happened) and not self._write():
            return
        if self.word != self.coordinator.word:
            self._say()

    def _write(self) -> bool:
        try:
            self.store.save(self.coordinator.saved, self._unwritten, self._today())
        except sqlite3.Error as error:
            self._told(f"what was decided cannot be written: {error}")
            return False
        for each in self._unwritten:
            self._told(words(each))
        self._unwritten = []
        return True

    def _say(self) -> None:
        if self.word.view != self.coordinator.view:
            self._before = self.word.view
        self.word = self.coordinator.word
        self._answers.forget()
        self._wake()

    def look(self) -> None:
        """Say what holds a step up, if something does."""
        found = self.reports.look(self.coordinator, self.now())
        for sentence in found:
            self._told(sentence)
        if found:
            self._wake()

    def release(self) -> None:
        """Whoever waits is answered: this process ends."""
        self._late.set()
        self._wake()

    def _wake(self) -> None:
        for waiting in self._waiting:  # not now: who decides is not done yet
            asyncio.get_running_loop().call_soon(self._settle, waiting)

    async def tick(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            self.decide(self.coordinator.tick(self.now()))
            self.look()
            between = self.coordinator.beat_seconds
            if self.coordinator.doubtful(self.now()):
                self._late.set()
                self._late.clear()
                between /= 2
            began, at = self._clock(), loop.time()
            pause = between * (at // between + 1) - at
            await asyncio.sleep(pause)
            late = self._clock() - began - pause
            if late > between:
                self.stalled_seconds += late

    def hear(self, message: BeatMessage) -> bool:
        """Whether there is news for the worker."""
        spent = None if message.spent is None else {phase.value: time for phase, time in message.spent.items()}
        doing = message.doing.value() if message.doing else None
        self.reports.hear(message.worker, doing, spent, self.now())
        self.decide(self.coordinator.hear(message.value(), self.now()))
        told = not message.heard or message.heard >= self.reports.latest
        return not told or (message.knows, message.knows_over) != (self.word.view.number, self.word.over.value)

    def wait(self, worker: str, answer: Callable[[], None]) -> Waiting:
        """Has `answer` called once there is news for `worker`, or its next beat is due."""
        loop, waiting = asyncio.get_running_loop(), Waiting(worker, answer)
        waiting.due = loop.call_at(self._due(loop.time()), self._settle, waiting)
        self._waiting.add(waiting)
        self._listening[worker] += 1
        return waiting

    def hung_up(self, waiting: Waiting) -> None:
        """That worker has closed the connection on which it waited."""
        if self._ends(waiting) and waiting.worker not in self._listening:
            self.decide(self.coordinator.hung_up(waiting.worker, self.now()))

    def _settle(self, waiting: Waiting) -> None:
        if self._ends(waiting):
            waiting.answer()

    def _ends(self, waiting: Waiting) -> bool:
        if waiting not in self._waiting:
            return False
        assert waiting.due is not None
        waiting.due.cancel()
        self._waiting.remove(waiting)
        self._listening[waiting.worker] -= 1
        if not self._listening[waiting.worker]:
            del self._listening[waiting.worker]
        return True

    async def doubt(self, receive: Receive) -> bool:
        """Waits until a worker is late, for a while, or until who asks has hung up; whether one is late."""
        late, closed = (asyncio.ensure_future(each) for each in (self._late.wait(), receive()))
        seconds = min(_DOUBT_SECONDS, _DOUBT_BEATS * self.coordinator.beat_seconds)
        await asyncio.wait((late, closed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        found = late.done()
        late.cancel()
        closed.cancel()
        return found

    def _due(self, now: float) -> float:
        """When the next beat is: at its time, or, where news made all begin anew at once, up to twice as late, one
        after the other: the last of all after half as much again.

        Where they are few, all are answered together with a tick: workers who wait for each other in each step are
        interrupted at the same time, and this process wakes up once.
        """
        seconds, policy = self.coordinator.beat_seconds, self.coordinator.policy
        if seconds <= policy.beat_seconds:
            return (now + seconds) // seconds * seconds
        self._last_due = min(now + 2 * seconds, max(now + seconds, self._last_due + 0.5 / policy.beats_per_second))
        return self._last_due

    def answer(self, message: BeatMessage, packed: bool) -> Reply:
        """What the worker is told: the view only if it does not know it."""
        word, reports, seconds = self.word, self.reports, round(self.coordinator.beat_seconds, 3)
        knows = message.knows if message.knows_over else -1
        heard = message.heard if message.heard < reports.latest else reports.latest

        def make() -> bytes:
            told = WordMessage.of(word, seconds, reports.latest, reports.after(heard))
            return told.model_copy(update=self._known(knows)).model_dump_json().encode()

        return self._answers.of((word.over, seconds, knows, heard, reports.latest), packed, make)

    def _known(self, number: int) -> dict[str, object]:
        """What need not be said to who knows the view of that number."""
        if number == self.word.view.number:
            return {"view": None}
        found = change(self._before, self.word.view) if number == self._before.number else None
        return {"view": None, "change": ChangeMessage.of(found)} if found else {}


class HeartbeatRoute:
    """Hears beats, which thousands of workers send all the time: past all that FastAPI does with a request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def hear(self, said: bytes, packed: bool, reply: Callable[[Reply], None]) -> Waiting | None:
        """`reply` gets the answer to what a worker `said`, now, or later: then what waits is returned. `packed`: for
        who can unpack it."""
        try:
            message = BeatMessage.model_validate_json(said)
        except ValidationError as error:
            wrong = error.json(include_url=False, include_context=False, include_input=False)
            reply(answer(422, f'{{"detail":{wrong}}}'.encode()))
            return None
        if not self._service.hear(message) and message.waits:
            return self._service.wait(message.worker, lambda: reply(self._service.answer(message, packed)))
        reply(self._service.answer(message, packed))
        return None

    def hung_up(self, waiting: Waiting) -> None:
        """Nobody is there any more to be answered."""
        self._service.hung_up(waiting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same as ASGI."""
        said = await body(receive)
        if said is None:
            return
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        waiting = self.hear(said, unpacks(scope["headers"]), answered.set_result)
        if waiting is not None:
            closed = asyncio.ensure_future(receive())  # of what comes after a request there is only its end
            try:
                await asyncio.wait((answered, closed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                closed.cancel()
            if not answered.done():
                return self.hung_up(waiting)
        for each in answered.result().messages():
            await send(each)


def application(service: Service, token: str) -> TokenAuth:
    """The service for whoever has `token`, which every call has to bear."""

    @asynccontextmanager
    async def ticking(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(service.tick())
        yield
        task.cancel()

    app = FastAPI(title="Unisono coordinator", version="1", lifespan=ticking, docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)

    @app.post(BEAT)
    async def beat(message: BeatMessage) -> WordMessage:
        """A worker says how it stands, and hears which view there is."""
        raise NotImplementedError("an Ear answers before")

    @app.post("/v1/gone", status_code=204)
    async def gone(message: GoneMessage) -> None:
        """Who started a worker saw its process end."""
        service.decide(service.coordinator.gone(message.worker, service.now()))
        service.look()

    @app.post("/v1/running")
    async def running(message: RunningMessage, request: Request) -> LookMessage:
        """Who started workers sees that their processes compute, or wait for a processor; answered when it is time to
        look again, or after a while."""
        for worker in message.workers:
            service.coordinator.running(worker, service.now())
        late = await service.doubt(request.receive)
        return LookMessage(late=late, **vars(service.coordinator.step_count))

    @app.get("/v1/status", response_model=StatusMessage)
    async def status() -> Response:
        """Who is here, and what happened."""
        # What is made of checked values need not be checked again: with thousands of workers others would wait for it.
        return Response(_status(service).model_dump_json(), media_type="application/json")

    offer(app, service.store)
    return TokenAuth(_shortcut(HeartbeatRoute(service), app), token)


async def _refuse(_: Request, error: Exception) -> Response:
    """What is wrong with a message; without the message, which may hold anything."""
    assert isinstance(error, RequestValidationError)
    wrong = [{name: each[name] for name in ("type", "loc", "msg")} for each in error.errors()]
    return Response(json.dumps({"detail": wrong}), 422, media_type="application/json")


def _shortcut(ear: App, app: App) -> App:
    async def shortcut(scope: Scope, receive: Receive, send: Send) -> None:
        beat = scope["type"] == "http" and scope["path"] == BEAT and scope["method"] == "POST"
        await (ear if beat else app)(scope, receive, send)

    return shortcut


def _status(service: Service) -> StatusMessage:
    now, word = service.now(), service.word
    doings = {worker: DoingMessage.of(doing) for worker, (doing, _) in service.reports.doings.items()}
    spent = {
        worker: {Phase(name): seconds for name, seconds in each.items()}
        for worker, each in service.reports.spent.items()
    }
    workers = [
        WorkerMessage(worker=beat.worker, works_in=beat.works_in, step=beat.standing.step, leaving=beat.leaving,
                      silent_seconds=round(now - last, 3), doing=doings.get(beat.worker),
                      spent=spent.get(beat.worker, {})) for beat, last in service.coordinator.heard()
    ]  # fmt: skip
    happened = [HappenedMessage(at_seconds=at, words=said) for at, said in service.store.happened()]
    return StatusMessage(
        view=ViewMessage.of(word.view), over=word.over, workers=workers, happened=happened,
        says=service.reports.sentences, spent=spent)  # fmt: skip

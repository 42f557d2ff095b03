"""Workers submit operations by name, in any order; two threads of each worker agree with the others, and execute them.

submit ─► [asking thread] ─► worker 0's actor: Agreement ─► every worker's actor ─► [executing thread] ─► Handle

Worker 0 counts who has submitted what. It sends what all have submitted to all workers, as one batch. Further requests
accumulate while two batches are executed, and form the next. So all workers execute the same operations in the same
order. All threads sleep while nothing is submitted.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any

import torch

from unisono.comm import ActorConnection, ActorMessage, Answer, Communicator
from unisono.errors import PeerLost
from unisono.horovod.agreement import Agreement
from unisono.horovod.errors import HorovodInternalError, InvalidArgument, WorkersLost, failure
from unisono.horovod.execution import Executor, Job
from unisono.horovod.handle import Handle
from unisono.horovod.requests import AGREEMENTS, REQUESTS, Agreed, Key, Request, from_bytes, to_bytes

LOG = logging.getLogger("unisono")
_SUBMIT, _AGREED, _MISSING, _DONE = "submit", "agreed", "missing", "done"
_BATCHES_IN_FLIGHT = 2
_CHECK_SECONDS = 1.0
_CHECKS_BEFORE_WARNING = 60
_LOSS_SECONDS = 30.0
_Batch = list[Agreed]


class _Event(Enum):
    """What the asking thread is told besides requests, and handles that wait too long."""

    BATCH_DONE = auto()
    CLOSE = auto()


class NegotiationActor:
    """Receives what workers submit, if it is that of worker 0, and what is agreed on.

    Args:
        agreement: of worker 0; None on the others.
        deliver: called with each batch.
        abandoned: called when worker 0 is lost or shuts down.
    """

    largest_bytes = 1 << 26

    def __init__(
        self, agreement: Agreement | None, deliver: Callable[[_Batch], None], abandoned: Callable[[], None]
    ) -> None:
        self._agreement, self._deliver, self._abandoned = agreement, deliver, abandoned
        self._peers: Sequence[ActorConnection] = ()
        self._waiting: _Batch = []
        self._in_flight = 0

    def connected(self, peers: Sequence[ActorConnection]) -> None:
        """See `Actor.connected`."""
        self._peers = peers

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """See `Actor.receive`."""
        fields: dict[str, Any] = {}
        if message.kind == _AGREED and sender == -1:
            self._deliver(from_bytes(AGREEMENTS, message.tensors[0]))
        elif self._agreement is None or sender < 0:
            raise ValueError(f"actor {-1 - sender} sends a {message.kind!r} here")
        elif message.kind == _SUBMIT:
            self._publish(self._agreement.submit(sender, from_bytes(REQUESTS, message.tensors[0])))
        elif message.kind == _DONE and sender == 0:
            self._in_flight -= int(message.fields["batches"])
            self._publish([])
        elif message.kind == _MISSING:
            fields = {"ranks": self._agreement.missing((message.fields["members"], message.fields["name"]))}
        answer(ActorMessage(message.kind, fields))

    def lost(self, sender: int) -> None:
        """See `Actor.lost`."""
        if sender == -1:
            self._abandoned()
        elif sender >= 0 and self._agreement is not None:
            self._publish(self._agreement.leave(sender))

    def _publish(self, agreed: _Batch) -> None:
        """Send `agreed`, and what has accumulated, to all workers; or accumulate it."""
        self._waiting += agreed
        if self._waiting and self._in_flight < _BATCHES_IN_FLIGHT:
            self._in_flight += 1
            message, self._waiting = ActorMessage(_AGREED, tensors=[to_bytes(AGREEMENTS, self._waiting)]), []
            for peer in self._peers:
                peer.send(message, lambda answer: None)


class Negotiation:
    """One worker's part: its operations in flight, and its two threads.

    Collective: all workers make one. From then on, its threads use `comm`, and no other thread does.

    Args:
        comm: of all workers.
        device: of this worker.
        check: raises `PeerLost` once the workers of `comm` do not belong together any more.
        on_batch, on_finished: called in the executing thread with the time at which it begins a batch, and with each
            handle just before its result is available.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
        on_batch: Callable[[float], None] = lambda at: None,
        on_finished: Callable[[Handle], None] = lambda handle: None,
    ) -> None:
        self._comm, self._device, self._executor = comm, device, Executor(comm)
        self._check, self._on_batch, self._on_finished = check, on_batch, on_finished
        self._lock = threading.Lock()
        self._handles: dict[Key, Handle] = {}
        self._failure: HorovodInternalError | None = None
        self._abandoned = threading.Event()
        self._questions: SimpleQueue[Request | Handle | _Event] = SimpleQueue()
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._waited: tuple[str, tuple[int, ...]] = ("", ())
        agreement = Agreement(comm.size) if comm.rank == 0 else None
        self._leader = comm.host(NegotiationActor(agreement, self._deliver, self._leader_lost))[0]
        self._threads = [
            threading.Thread(target=target, name=f"horovod {name}", daemon=True)
            for name, target in (("asks", self._ask), ("executes", self._execute))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, handle: Handle) -> Handle:
        """Submit an operation; any thread may.

        Raises:
            InvalidArgument: one with the same name is in flight.
            HorovodInternalError: a worker is lost, or has shut down.
        """
        key = handle.request.key
        with self._lock:
            if self._failure is not None:
                raise copy.copy(self._failure)
            if key in self._handles:
                raise InvalidArgument("name", key[1], "an operation of this name is in flight",
                                      "wait for it by hvd.synchronize, or choose another name")  # fmt: skip
            handle.on_finished = self._finished
            self._handles[key] = handle
        self._questions.put(handle.request)
        return handle

    def wait(self, handle: Handle) -> Any:
        """The result of `handle`; a warning is logged, again and again, about workers that have not submitted it.

        Raises:
            HorovodInternalError: it has failed.
        """
        checks = 0
        while not handle.wait(_CHECK_SECONDS):
            self.check_workers()
            checks += 1
            if checks % _CHECKS_BEFORE_WARNING == 0 and not handle.times.agreed:
                self._questions.put(handle)
        return handle.result()

    def check_workers(self) -> None:
        """All operations in flight fail if the workers do not belong together any more."""
        try:
            self._check()
        except PeerLost as lost:
            self._fail(failure(lost), agreed=True)

    def close(self) -> None:
        """Execute what is agreed on, and end the threads; operations that are still in flight fail."""
        self._fail(WorkersLost("this worker has left the others"), agreed=False)
        self._questions.put(_Event.CLOSE)
        self._threads[0].join()
        self._batches.put(None)
        self._threads[1].join()

    # The threads.

    def _ask(self) -> None:
        """Submit, as one message, what has accumulated while worker 0 received the one before."""
        try:
            questions: list[Request | Handle | _Event] = []
            while _Event.CLOSE not in questions:
                questions = _take_all(self._questions, _CHECK_SECONDS * _CHECKS_BEFORE_WARNING)
                if not questions:
                    self._report_wait()
                requests = [each for each in questions if isinstance(each, Request)]
                if requests:
                    self._leader.call(ActorMessage(_SUBMIT, tensors=[to_bytes(REQUESTS, requests)])).wait()
                if done := questions.count(_Event.BATCH_DONE):
                    self._leader.call(ActorMessage(_DONE, {"batches": done})).wait()
                for handle in (each for each in questions if isinstance(each, Handle)):
                    self._report_stall(handle)
        except PeerLost as lost:
            # What worker 0 has sent before it ended arrives at the actor, which learns of the end after that.
            self._abandoned.wait(_LOSS_SECONDS)
            self._fail(failure(lost), agreed=False)
        except Exception as error:  # raised in the threads that wait for results, which would wait in vain
            self._fail(failure(error), agreed=False)

    def _execute(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (batch := self._batches.get()) is not None:
            self._on_batch(time.time())
            with self._lock:
                jobs = [Job(agreed, self._handles.get(agreed.request.key)) for agreed in batch]
            try:
                self._executor.run(jobs)
            except Exception as error:  # raised in the threads that wait for the results
                self._fail(failure(error), agreed=True)
                return
            if self._comm.rank == 0:
                self._questions.put(_Event.BATCH_DONE)

    def _finished(self, handle: Handle) -> None:
        """`handle` has ended: its name can be used again."""
        with self._lock:
            self._handles.pop(handle.request.key, None)
        self._on_finished(handle)

    def _report_stall(self, handle: Handle) -> None:
        members, name = handle.request.key
        answer = self._leader.call(ActorMessage(_MISSING, {"members": members, "name": name})).wait()
        if ranks := answer.fields["ranks"]:
            workers = ", ".join(map(str, ranks))
            LOG.warning("%s waits for worker %s to submit it", name, workers)

    def _report_wait(self) -> None:
        """Nothing was submitted for long: warn of an exchange without negotiation that was waiting then already."""
        waits = self._comm.waits_for
        if waits[0] and waits == self._waited:
            LOG.warning("%s waits for worker %s to start it", waits[0], ", ".join(map(str, waits[1])) or "(unknown)")
        self._waited = waits

    # Called in the thread of the actor.

    def _deliver(self, batch: _Batch) -> None:
        with self._lock:
            for agreed in batch:
                if handle := self._handles.get(agreed.request.key):
                    handle.times.agreed = time.time()
        self._batches.put(batch)

    def _leader_lost(self) -> None:
        self._abandoned.set()
        self._fail(WorkersLost("the connection to worker 0 was lost"), agreed=False)

    def _fail(self, error: HorovodInternalError, *, agreed: bool) -> None:
        """Nothing more can be submitted, and what is in flight fails; what is agreed on only if `agreed`."""
        with self._lock:
            self._failure = self._failure or error
            failed = [h for h in self._handles.values() if agreed or not h.times.agreed]
        for handle in failed:
            handle.fail(error)


def _take_all(queue: SimpleQueue[Request | Handle | _Event], seconds: float) -> list[Request | Handle | _Event]:
    """What is in `queue`; waits for the first at most `seconds`."""
    found = []
    with suppress(Empty):
        found.append(queue.get(timeout=seconds))
        while True:
            found.append(queue.get_nowait())
    return found

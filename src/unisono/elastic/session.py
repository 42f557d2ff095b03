"""One worker's membership in a run, from view to view.

next view ─► rendezvous ─► the state that the view starts from ─► train ─┬─ the view ends ─► next view
                                                                         └─ all steps are taken ─► finish
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import torch

from unisono.comm import Abort, Communicator, Rendezvous, TorchWorld, for_attempt, host_name, in_blocks, open_store
from unisono.elastic.presence import Presence
from unisono.elastic.worker_context import Worker
from unisono.errors import CommunicationError, PeerLost
from unisono.membership import Agent, CoordinatorAddress, StateVersion, View, WorkerAddress
from unisono.membership.client import CoordinatorClient
from unisono.observe import ThreadTracker, Watchdog
from unisono.observe.rate_limit import RateLimit

log = logging.getLogger("unisono")


class RendezvousPoint(Protocol):
    """The part of a `Rendezvous` that is used here."""

    def connect(self, ranks: Sequence[int], name: str = "") -> Communicator:
        """See `Rendezvous`."""

    def open_world(self) -> TorchWorld:
        """See `Rendezvous`."""


class Session(Presence, Protocol):
    """The views of one worker, one after the other; a `Presence` in the current one.

    Attributes:
        view: the current one.
        rank: of this worker in it.
    """

    view: View
    rank: int

    def next(self) -> bool:
        """Wait for the next view with this worker; False if there will be none."""

    def meeting(self, device: torch.device) -> RendezvousPoint:
        """The rendezvous of the view's members."""

    def met(self, step: int, digest: str) -> None:
        """All members are connected, and this worker has the state that the view starts from."""

    def ended(self, digest: str) -> None:
        """Leave the view at a step boundary, with a state of that `digest`."""

    def broken(self, error: CommunicationError, digest: str) -> None:
        """Leave the view because of `error`, with a state of that `digest`. Raises `error` where the run cannot recover
        from it."""

    def finish(self) -> None:
        """All steps are taken, and the result is about to be sent."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class StaticSession:
    """The one view of a run whose group does not change."""

    changing = parting = leaving = False

    def __init__(self, worker: Worker, communicator: str, timeout_seconds: float, watch: ThreadTracker) -> None:
        self._worker, self._left = worker, 1
        self._communicator, self._timeout_seconds = communicator, timeout_seconds
        self._watchdog = Watchdog(watch)  # nobody else sees when this worker is stuck
        who = worker.identity
        self.rank, self.view = who.rank, View(1, tuple(map(str, range(who.size))))

    @property
    def stop(self) -> bool:
        return self._worker.stop.requested

    def next(self) -> bool:
        self._left -= 1
        return self._left == 0

    def meeting(self, device: torch.device) -> Rendezvous:
        who = self._worker.identity
        hosts = in_blocks(who.size, who.local_size)
        return Rendezvous(who.rank, hosts, who.rendezvous, self._communicator, device, self._timeout_seconds)

    def met(self, step: int, digest: str) -> None:
        pass

    def name_of(self, rank: int) -> str:
        return self.view.members[rank]

    def leave(self) -> None:
        pass

    def check(self) -> None:
        pass

    def stepped(self) -> None:
        pass

    def done(self, steps: int = 1) -> None:
        pass

    def ended(self, digest: str) -> None:
        pass

    def broken(self, error: CommunicationError, digest: str) -> None:
        raise error

    def finish(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watchdog.close()


class ElasticSession:
    """The views that a coordinator forms.

    Args:
        contact: of the coordinator.
        watch: on what this worker does, which the coordinator is told.
    """

    changing = True

    def __init__(
        self,
        worker: Worker,
        communicator: str,
        timeout_seconds: float,
        contact: CoordinatorAddress,
        watch: ThreadTracker,
    ) -> None:
        self._worker = worker
        self._communicator, self._timeout_seconds = communicator, timeout_seconds
        self._door = open_store(contact.meets_at, contact.url, contact.token)
        self._name, self._contact = worker.name, contact
        self.view, self.rank = View(), 0
        self._meeting: Rendezvous | None = None
        self._pace = RateLimit(_TELL_SECONDS)
        self._sent_away = False
        self._abort, self._broken_off, self._lock = Abort(), 0, threading.Lock()
        agent = Agent(self._name, StateVersion(), WorkerAddress(host_name(), self._door.url))
        stop = worker.stop
        self._attendance = CoordinatorClient(
            contact,
            agent,
            self._break_off,
            leaving=lambda: self.leaving,
            stopping=lambda: stop.requested,
            doing=watch.doing,
            spent=watch.ledger.seconds,
            told=self._tell,
        )

    @property
    def stop(self) -> bool:
        return self._worker.stop.requested

    @property
    def leaving(self) -> bool:
        return self._sent_away or self._worker.stop.leaving

    @property
    def parting(self) -> bool:
        return self._attendance.votes

    def next(self) -> bool:
        view = self._attendance.next_view()
        if view is None:
            return False
        with self._lock:
            self.view, self.rank = view, view.members.index(self._name)
            self._abort, self._meeting = Abort(), None
            self._pace = RateLimit(_TELL_SECONDS)  # a view's first step is told: the launcher counts losses without any
            if self._broken_off >= view.number:
                self._abort.set(_CHANGED)
        log.info("view %d: %s; this is worker %d of %d", view.number, " ".join(view.members), self.rank,
                 len(view.members))  # fmt: skip
        return True

    def meeting(self, device: torch.device) -> Rendezvous:
        hosts = [place.host for place in self.view.places]
        where = for_attempt(self.view.places[0].meets_at, self.view.number)
        self._meeting = Rendezvous(self.rank, hosts, where, self._communicator, device,
                                self._timeout_seconds, abort=self._abort, token=self._contact.token,
                                encrypted=self._contact.secure)  # fmt: skip
        return self._meeting

    def met(self, step: int, digest: str) -> None:
        self._attendance.met(self.view.number, step, digest)

    def name_of(self, rank: int) -> str:
        return self.view.members[rank]

    def leave(self) -> None:
        self._sent_away = True

    def check(self) -> None:
        self._abort.check("step")

    def stepped(self) -> None:
        if self._pace.due():
            self._worker.report({"kind": "step", "members": list(self.view.members)})

    def done(self, steps: int = 1) -> None:
        self._attendance.done(self.view.number, steps)

    def ended(self, digest: str) -> None:
        self._attendance.part(self.view.number, digest)

    def broken(self, error: CommunicationError, digest: str) -> None:
        if not isinstance(error, PeerLost):  # nobody is lost, and it would happen again
            raise error
        log.warning("view %d is over: %s", self.view.number, error)
        # Once all were connected, whoever is lost was within reach; and the ranks may be those of a part of the view.
        reached = self._meeting is not None and self._meeting.complete
        missed = [] if reached else [self.view.members[rank] for rank in error.ranks]
        self._attendance.broken(self.view.number, digest, tuple(missed))

    def finish(self) -> None:
        self._attendance.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._attendance.close()
        self._door.close()

    def _tell(self, words: str) -> None:
        """All workers hear it, so that somebody is there to pass it on to the launcher, which says it once."""
        log.warning(words)
        self._worker.report({"kind": "finding", "text": words})

    def _break_off(self, number: int) -> None:
        with self._lock:
            self._broken_off = max(self._broken_off, number)
            if self.view.number == number:
                self._abort.set(_CHANGED)


_TELL_SECONDS = 0.5
_CHANGED = "the coordinator counts on other workers"

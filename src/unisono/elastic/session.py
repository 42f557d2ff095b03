"""One worker's membership in a run, from view to view.

next view ─► rendezvous ─► the state that the view starts from ─► train ─┬─ the view ends ─► next view
                                                                         └─ all steps are taken ─► finish
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch

from unisono.comm import (
    Abort,
    Communicator,
    Rendezvous,
    Security,
    TorchWorld,
    for_attempt,
    host_name,
    in_blocks,
    open_store,
)
from unisono.elastic.worker_context import Identity, Worker
from unisono.errors import CommunicationError, PeerLost
from unisono.membership import Agent, CoordinatorAddress, StateVersion, View, WorkerAddress
from unisono.membership.client import CoordinatorClient
from unisono.observe import ThreadTracker
from unisono.observe.rate_limit import RateLimit

log = logging.getLogger("unisono")


class ViewRendezvous(Protocol):
    """How the members of one view connect. See `unisono.comm.Rendezvous`."""

    def connect(self, ranks: Sequence[int], name: str = "") -> Communicator:
        """Collective among `ranks`: their communicator."""

    def open_world(self) -> TorchWorld:
        """Collective: torch's default process group, of all members."""


class Session(Protocol):
    """One worker's membership in a run, from view to view. Only `next_view` and `rendezvous` wait for other workers.

    Attributes:
        elastic: whether workers may join and leave, so that a run recovers from the loss of a worker.
        view: the current view.
        rank: the rank of this worker in the view.
    """

    elastic: bool
    view: View
    rank: int

    @property
    def stop_requested(self) -> bool:
        """Whether the run is to stop. If so, all workers stop after the same step."""

    @property
    def leave_requested(self) -> bool:
        """Whether this worker is to leave, while the others continue."""

    @property
    def view_end_requested(self) -> bool:
        """Whether the view is to end, after a step that all members take."""

    def next_view(self) -> bool:
        """Wait for the next view with this worker. Returns False if there will be none."""

    def rendezvous(self, device: torch.device) -> ViewRendezvous:
        """The rendezvous of the view's members, whose tensors are on `device`."""

    def joined(self, step: int, digest: str) -> None:
        """Report that all members are connected, and that this worker has the state from which the view starts.

        Args:
            step, digest: the number of steps of that state, and its digest.
        """

    def check(self) -> None:
        """Raise `PeerLost` if the view has ended. Called before each micro-batch, and before a step is applied."""

    def stepped(self) -> None:
        """Report that this worker has applied a step, which is committed now or later."""

    def committed(self, steps: int = 1) -> None:
        """Count `steps` more committed steps."""

    def end_view(self, digest: str, error: CommunicationError | None = None) -> None:
        """Leave the view, after a step that all members took or because of `error`.

        Args:
            digest: the digest of this worker's state.

        Raises:
            CommunicationError: `error`, if the run cannot recover from it.
        """

    def finish(self) -> None:
        """Report that all steps are taken, and that the result is about to be sent."""

    def leave(self) -> None:
        """Let this worker leave, as if it had been asked to. No effect in a group that does not change."""

    def worker_name(self, rank: int) -> str:
        """The name of the worker of that rank in the launcher's messages, and in the name of its log."""

    def close(self) -> None:
        """End the membership. May be called twice."""


class StaticSession:
    """A `Session` in a group that does not change, which has one view.

    Args:
        identity: the identity of this worker; None: it is the only one.
        stop_requested: returns whether this worker was asked to stop.
        connect: creates the rendezvous; not needed if the workers are already connected.
    """

    elastic = leave_requested = view_end_requested = False

    def __init__(
        self,
        identity: Identity | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        connect: Callable[[torch.device], ViewRendezvous] | None = None,
    ) -> None:
        self.rank, size = (identity.rank, identity.size) if identity else (0, 1)
        self.view = View(1, tuple(map(str, range(size))))
        self._stop_requested, self._connect = stop_requested, connect
        self._begun = False

    @staticmethod
    def connecting(worker: Worker, communicator: str, timeout_seconds: float) -> StaticSession:
        """The session of a worker whose launcher told it where the other workers are."""
        who = worker.identity
        hosts = in_blocks(who.size, who.local_size)
        return StaticSession(
            who, lambda: worker.stop.requested,
            lambda device: Rendezvous(who.rank, hosts, who.rendezvous, communicator, device, timeout_seconds),
        )  # fmt: skip

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested()

    def next_view(self) -> bool:
        first, self._begun = not self._begun, True
        return first

    def rendezvous(self, device: torch.device) -> ViewRendezvous:
        assert self._connect is not None, "the workers of this session are connected already"
        return self._connect(device)

    def joined(self, step: int, digest: str) -> None:
        pass

    def check(self) -> None:
        pass

    def stepped(self) -> None:
        pass

    def committed(self, steps: int = 1) -> None:
        pass

    def end_view(self, digest: str, error: CommunicationError | None = None) -> None:
        if error is not None:
            raise error

    def finish(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def worker_name(self, rank: int) -> str:
        return str(rank)

    def close(self) -> None:
        pass


class ElasticSession:
    """A `Session` in the views that a coordinator forms. Used as a context, it is closed at the end.

    Args:
        contact: the address of the coordinator.
        watch: records the activity of this worker, which its heartbeats report.
    """

    elastic = True

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
        self._store = open_store(contact.rendezvous_url, contact.url, contact.token)
        self._name, self._contact = worker.name, contact
        self.view, self.rank = View(), 0
        self._rendezvous: Rendezvous | None = None
        self._report_limit = RateLimit(_REPORT_SECONDS)
        self._leaves = self._closed = False
        self._abort, self._aborted_view, self._lock = Abort(), 0, threading.Lock()
        agent = Agent(self._name, StateVersion(), WorkerAddress(host_name(), self._store.url))
        stop = worker.stop
        self._client = CoordinatorClient(
            contact,
            agent,
            self._abort_view,
            leaving=lambda: self.leave_requested,
            stopping=lambda: stop.requested,
            activity=watch.activity,
            spent=watch.ledger.seconds,
            on_finding=self._report_finding,
        )

    @property
    def stop_requested(self) -> bool:
        return self._worker.stop.requested

    @property
    def leave_requested(self) -> bool:
        return self._leaves or self._worker.stop.leaving

    @property
    def view_end_requested(self) -> bool:
        return self._client.votes_to_end

    def next_view(self) -> bool:
        view = self._client.next_view()
        if view is None:
            return False
        with self._lock:
            self.view, self.rank = view, view.members.index(self._name)
            self._abort, self._rendezvous = Abort(), None
            # The first step of each view is reported, because the launcher counts losses without a step between them.
            self._report_limit = RateLimit(_REPORT_SECONDS)
            if self._aborted_view >= view.number:
                self._abort.set(_CHANGED)
        log.info("view %d: %s; this is worker %d of %d", view.number, " ".join(view.members), self.rank,
                 len(view.members))  # fmt: skip
        return True

    def rendezvous(self, device: torch.device) -> Rendezvous:
        hosts = [place.host for place in self.view.addresses]
        url = for_attempt(self.view.addresses[0].rendezvous_url, self.view.number)
        security = Security(self._contact.token, self._contact.uses_tls)
        self._rendezvous = Rendezvous(self.rank, hosts, url, self._communicator, device,
                                      self._timeout_seconds, abort=self._abort, security=security)  # fmt: skip
        return self._rendezvous

    def joined(self, step: int, digest: str) -> None:
        self._client.joined(self.view.number, step, digest)

    def check(self) -> None:
        self._abort.check("step")

    def stepped(self) -> None:
        if self._report_limit.due():
            self._worker.report({"kind": "step", "members": list(self.view.members)})

    def committed(self, steps: int = 1) -> None:
        self._client.add_steps(self.view.number, steps)

    def end_view(self, digest: str, error: CommunicationError | None = None) -> None:
        if error is None:
            self._client.end_view(self.view.number, digest)
            return
        if not isinstance(error, PeerLost):  # no worker is lost, and the error would occur again
            raise error
        log.warning("view %d is over: %s", self.view.number, error)
        # Once all members were connected, a lost worker was reachable. Then `ranks` may be of a part of the view.
        reachable = self._rendezvous is not None and self._rendezvous.complete
        unreachable = [] if reachable else [self.view.members[rank] for rank in error.ranks]
        self._client.fail_view(self.view.number, digest, tuple(unreachable))

    def finish(self) -> None:
        self._client.finish()

    def leave(self) -> None:
        self._leaves = True

    def worker_name(self, rank: int) -> str:
        return self.view.members[rank]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.close()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _report_finding(self, words: str) -> None:
        """Send a finding of the coordinator to the launcher. Every worker sends it, as any worker may be lost, and the
        launcher prints it once."""
        log.warning(words)
        self._worker.report({"kind": "finding", "text": words})

    def _abort_view(self, number: int) -> None:
        with self._lock:
            self._aborted_view = max(self._aborted_view, number)
            if self.view.number == number:
                self._abort.set(_CHANGED)


_REPORT_SECONDS = 0.5
_CHANGED = "the coordinator has ended the view"

"""The workers around a custom loop: connected before the loop begins, then view by view."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

import torch

from unisono.comm import Communicator
from unisono.elastic.admission import admit, compare
from unisono.elastic.session import ElasticSession, Session, StaticSession
from unisono.elastic.trait_check import Traits
from unisono.elastic.worker_context import ElasticWorker, Identity
from unisono.errors import UnisonoError
from unisono.membership import View
from unisono.observe import ThreadTracker, Watchdog
from unisono.observe.activity import Phase

# The compute phase of a custom loop may take any time.
STUCK_IN = frozenset({Phase.DATA, Phase.COMMUNICATION})


class LoopGroup:
    """A group of workers that does not change.

    Args:
        comm: connects the workers.
        watchdog: reports a stall of this worker, where no coordinator does. Closed with the group.

    Attributes:
        rank, size: of this worker, and of the group.
        session: of the loop, once it has begun.
    """

    def __init__(
        self, identity: Identity, comm: Communicator, watch: ThreadTracker, watchdog: Watchdog | None = None
    ) -> None:
        self.rank, self.size, self._identity = identity.rank, identity.size, identity
        self.session: Session | None = None
        self._watch, self._watchdog = watch, watchdog
        self._comm: Communicator | None = None
        self._use(comm)

    @property
    def comm(self) -> Communicator:
        """The group's communicator. Raises `UnisonoError` where there is none yet."""
        if self._comm is None:
            raise UnisonoError(
                "the other workers are in their loop already, and cannot be reached before world.steps begins here: "
                "leave out collective calls before the loop"
            )
        return self._comm

    @property
    def metrics(self) -> Communicator:
        """A channel of `comm`. Raises `UnisonoError` where there is none yet."""
        return self._metrics if self._comm is not None else self.comm

    @property
    def late(self) -> bool:
        """Whether the loop of the other workers has begun, so that this one receives their state when its own does."""
        return self._comm is None

    @property
    def recovers(self) -> bool:
        """Whether the others continue when a worker is lost."""
        return self.session is not None and self.session.elastic

    def admit(self, traits: Callable[[], Traits]) -> None:
        """Before the loop begins: compare `traits` with those of the others. Raises `TaskMismatch`."""
        compare(self.comm, traits)

    def freeze(self) -> None:
        """The group does not change any more: the loop is one of which no other worker could take over a part."""

    def begin(self, *, recovers: bool) -> Session:
        """Begin the loop; returns the session whose views it goes through. `recovers`: the loop can recover from the
        loss of a worker."""
        self.session = StaticSession(self._identity)
        return self.session

    def connect(self, view: View) -> Communicator:
        """Collective: connect the members of `view`, in its order."""
        return self.comm

    def connect_in_order(self, view: View) -> Communicator:
        """Collective: connect the members of `view`; their ranks are those of the loop."""
        return self.comm

    def disconnect(self) -> None:
        """The view has ended."""

    def finish(self) -> None:
        """Collective: all workers have taken all steps."""

    def finished_by_others(self) -> None:
        """The others have taken all steps, and this worker has not joined them in time."""

    def close(self, *, finished: bool) -> None:
        """Leave the group. `finished`: the others have no steps left either. May be called twice."""
        self._end_watchdog()
        if self._comm is not None:
            self._comm.close()

    def _use(self, comm: Communicator) -> Communicator:
        self._comm, self._metrics = comm, comm.channel("metrics")
        self._watch.set_phase(Phase.COMPUTE, comm)
        return comm

    def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None


class ElasticLoopGroup(LoopGroup):
    """An elastic group.

    Until the loop begins, the group is the set of workers that the run started with. A worker that joins later is a
    group of one until its own loop begins. It then receives the group's state.

    Args:
        communicator, timeout_seconds: as for `unisono.join`.
        connect: connects the workers that the run starts with.
    """

    def __init__(
        self,
        context: ElasticWorker,
        device: torch.device,
        watch: ThreadTracker,
        communicator: str,
        timeout_seconds: float,
        connect: Callable[[], Communicator],
    ) -> None:
        self._context, self._device, self._watch = context, device, watch
        self._communicator, self._timeout_seconds = communicator, timeout_seconds
        self._identity = who = context.worker.identity
        self.session = None
        self._comm: Communicator | None = None
        self._former: Communicator | None = None
        self._over = self._closed = False
        # A worker that joins later is never worker 0, which may begin with what is done only once.
        self.rank, self.size = (who.rank, who.size) if context.first else (who.size, who.size + 1)
        if context.first:
            self._use(connect())
        self._watchdog = Watchdog(watch, STUCK_IN)

    def admit(self, traits: Callable[[], Traits]) -> None:
        context = self._context
        admit(context.contact, context.worker, traits(), lambda: context.worker.stop.leaving)

    def freeze(self) -> None:
        if self._comm is None:
            raise UnisonoError("a worker was lost, and a loop like this one cannot be taken up by another")
        self._report_over(recovers=False)

    def begin(self, *, recovers: bool) -> Session:
        if not recovers:
            self.freeze()
            return super().begin(recovers=False)
        context = self._context
        context.worker.report({"kind": "loop", "place": context.worker.identity.rank})
        if threading.current_thread() is threading.main_thread():
            context.leave_when_asked()
        self._end_watchdog()  # from now on the coordinator sees when this worker is stuck
        # The former group is closed once the first view is connected: others may still receive its last message.
        self._former, self._comm = self._comm, None
        self.session = ElasticSession(
            context.worker, self._communicator, self._timeout_seconds, context.contact, self._watch
        )
        return self.session

    def connect(self, view: View) -> Communicator:
        if not isinstance(self.session, ElasticSession):
            return super().connect(view)
        return self._connect(self.session, range(len(view.members)))

    def connect_in_order(self, view: View) -> Communicator:
        if not isinstance(self.session, ElasticSession):
            return super().connect_in_order(view)
        return self._connect(self.session, [view.members.index(name) for name in in_order(view.members)])

    def _connect(self, session: ElasticSession, ranks: Sequence[int]) -> Communicator:
        members = session.view.members
        self.rank, self.size = in_order(members).index(members[session.rank]), len(members)
        comm = self._use(session.rendezvous(self._device).connect(ranks))
        if self._former is not None:
            self._former.close()
            self._former = None
        if self.rank == 0:  # the launcher prints its output
            sys.stdout.flush()
            self._context.worker.report({"kind": "speaks", "at": os.fstat(1).st_size})
        return comm

    def disconnect(self) -> None:
        if self._comm is not None and self.recovers:
            self._comm.close()
            self._comm = None

    def finish(self) -> None:
        if self.recovers:
            self.comm.gather(torch.zeros(1)).wait()  # all have come as far
            self._report_over()

    def finished_by_others(self) -> None:
        self._report_over()

    def close(self, *, finished: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if finished and self.session is not None and self.recovers and not self._over:
            self._report_over()
            self.session.finish()
        super().close(finished=finished)
        if self._former is not None:
            self._former.close()
        if self.session is not None:
            self.session.close()

    def _report_over(self, *, recovers: bool = True) -> None:
        """From now on this worker is not replaced when it is lost, and not asked to leave. `recovers`: in the loop, it
        would have been."""
        self._over = True
        place = self._context.worker.identity.rank
        self._context.worker.report({"kind": "over", "place": place, "recovers": recovers})
        self._context.interrupt_again()


def in_order(members: Sequence[str]) -> list[str]:
    """The `members` of a view by rank in the loop: those that the run began with by their numbers, then the others."""
    return sorted(members, key=lambda name: (0, int(name)) if name.isdecimal() else (1, members.index(name)))

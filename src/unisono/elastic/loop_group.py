"""The group of workers that a custom loop runs in: one that does not change, or an elastic one.

begin ─► steps ─┬─ the view ends ─► next view ─► steps ─► ...
                └─ all steps are taken ─► finish
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from unisono.comm import Communicator
from unisono.elastic.admission import admit, compare
from unisono.elastic.agreement import start_alike
from unisono.elastic.control_word import NUMBERS, ControlWord, heard, numbers
from unisono.elastic.extra_state import ExtraState
from unisono.elastic.session import ElasticSession
from unisono.elastic.snapshot import Snapshot
from unisono.elastic.state_transfer import Progress, describe, digest_of, take_over
from unisono.elastic.trait_check import Traits
from unisono.elastic.worker_context import ElasticWorker, Identity
from unisono.errors import Left, PeerLost, UnisonoError
from unisono.observe import ThreadTracker, Watchdog
from unisono.observe.activity import Phase

# What a loop of the user's own computes may be anything, for as long as it likes.
STUCK_IN = frozenset({Phase.DATA, Phase.COMMUNICATION})


class TrainingState:
    """A model, its optimizer, the user's extra state, and their progress.

    Args:
        walks: replicas take local steps, which are committed at the next synchronization.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, walks: bool = False) -> None:
        self.model, self.optimizer, self.kept, self.walks = model, optimizer, ExtraState(optimizer), walks
        self.reached = Progress()
        self._milestone = Snapshot() if walks else None
        self._before: dict[str, torch.Tensor] | None = None

    def agree(self, comm: Communicator) -> None:
        """Collective: all workers of `comm` start from the weights and the optimizer state of the first.

        Raises:
            InvalidInput: they have built different models or optimizers.
        """
        start_alike(comm, self.model, self.optimizer)

    def digest(self) -> str:
        """A digest of the replicated state, without the extra state, which may differ between workers."""
        return digest_of(*describe(self.model, self.optimizer, self.reached), walks=self.walks)

    def begin(self) -> None:
        """A step begins: what is kept goes back to this moment, or to the first such since `hold`, if it does not
        come to count."""
        if self._before is None:
            self._before = self.kept.take()

    def take(self) -> None:
        """A step was applied."""
        self.reached = Progress(self.reached.steps + 1, 0, self.reached.shared)

    def hold(self, shared: Mapping[str, torch.Tensor] | None = None) -> None:
        """All that is taken counts. `shared`: what the synchronizer has now beside it, if that is new."""
        self._before = None
        if shared is not None:
            self.reached = replace(self.reached, shared=shared)
        if self._milestone is not None:
            self._milestone.take(self.model, self.optimizer, self.reached)

    def roll_back(self) -> None:
        """What does not count is not taken."""
        if self._milestone is not None:
            self.reached = self._milestone.restore(self.model, self.optimizer) or self.reached
        if self._before is not None:
            self.kept.give(self._before)
            self._before = None


class LoopGroup(Protocol):
    """The group, as one worker's loop uses it.

    Attributes:
        rank, size: of this worker, and of the group.
        comm: the group's communicator; `metrics` is a channel of it.
        recovers: whether the others continue when a worker is lost.
        ended: the view ends before the next step.
        lost: a member of the view was lost.
        late: this worker is not connected to the others yet, which are in their loop. It receives their state when
            its own loop begins.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def comm(self) -> Communicator: ...
    @property
    def metrics(self) -> Communicator: ...
    @property
    def recovers(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    @property
    def lost(self) -> bool: ...
    @property
    def late(self) -> bool: ...

    def agree(self, state: TrainingState) -> None:
        """Once, before `begin`: all workers start from the same weights."""

    def admit(self, traits: Callable[[], Traits]) -> None:
        """Once, before `begin` or `stay`: compare `traits` with those of the others. Raises `TaskMismatch`."""

    def stay(self) -> None:
        """There will be no `begin`: the group does not change any more."""

    def begin(self, state: TrainingState) -> None:
        """Begin the loop with `state`, or with that of the others if their loop has begun before."""

    def again(self) -> bool:
        """Join the next view, whose members then have the same state. False if all steps are taken. Raises `Left` if
        the others continue without this worker."""

    def says(self) -> list[float]:
        """This worker's part of the control word; empty in a group that does not change."""

    def hear(self, words: Sequence[float]) -> None:
        """Act on the control words of all workers, which came with a step."""

    def check(self) -> None:
        """Before a step is applied. Raises `PeerLost` if this worker was evicted."""

    def stepped(self) -> None:
        """This worker has applied a step; `done` commits it, perhaps later."""

    def done(self, steps: int) -> None:
        """So many more steps are committed."""

    def lose(self, error: PeerLost) -> None:
        """Record that a peer was lost. Raises `error` where the loop cannot recover from it."""

    def finish(self) -> None:
        """All workers have taken all steps."""

    def close(self, *, finished: bool) -> None:
        """Leave the group. `finished`: the others have no steps left either. May be called twice."""


class StaticGroup:
    """A group that does not change.

    Args:
        watchdog: reports a stall of this worker, where no coordinator does; closed with the group.
    """

    recovers = ended = lost = late = False

    def __init__(
        self, identity: Identity, comm: Communicator, watch: ThreadTracker, watchdog: Watchdog | None = None
    ) -> None:
        self.rank, self.size, self.comm = identity.rank, identity.size, comm
        self.metrics = comm.channel("metrics")
        watch.set_phase(Phase.COMPUTE, comm)
        self._watchdog = watchdog

    def agree(self, state: TrainingState) -> None:
        state.agree(self.comm)

    def admit(self, traits: Callable[[], Traits]) -> None:
        compare(self.comm, traits)

    def stay(self) -> None:
        pass

    def begin(self, state: TrainingState) -> None:
        pass

    def again(self) -> bool:
        return False

    def says(self) -> list[float]:
        return []

    def hear(self, words: Sequence[float]) -> None:
        pass

    def check(self) -> None:
        pass

    def stepped(self) -> None:
        pass

    def done(self, steps: int) -> None:
        pass

    def lose(self, error: PeerLost) -> None:
        raise error

    def finish(self) -> None:
        pass

    def close(self, *, finished: bool) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        self.comm.close()


class ElasticGroup:
    """An elastic group, as a custom loop sees it.

    Until the loop begins, the group is the set of workers that the run started with. A worker that joins later is a
    group of one until its own loop begins. It then receives the group's state.

    Args:
        communicator, timeout_seconds: as for `unisono.join`.
        connect: connects the workers that the run starts with.
    """

    def __init__(
        self,
        given: ElasticWorker,
        device: torch.device,
        watch: ThreadTracker,
        communicator: str,
        timeout_seconds: float,
        connect: Callable[[], Communicator],
    ) -> None:
        self._given, self._device, self._watch = given, device, watch
        self._communicator, self._timeout_seconds = communicator, timeout_seconds
        self._views: ElasticSession | None = None
        self._state: TrainingState | None = None
        self._comm: Communicator | None = None
        self._error: PeerLost | None = None
        self._parting = self._all_leave = self._finished = self._closed = False
        self._knows = False  # whether the state has anything to do with the others'
        who = given.worker.identity
        # Whoever comes later is not worker 0, which may begin with what is done only once.
        self.rank, self.size = (who.rank, who.size) if given.first else (who.size, who.size + 1)
        if given.first:
            self._use(connect())
        self._watchdog: Watchdog | None = Watchdog(watch, STUCK_IN)

    @property
    def comm(self) -> Communicator:
        """Raises `UnisonoError` before there is one."""
        if self._comm is None:
            raise UnisonoError(
                "the others are in their loop already, and cannot be asked anything before world.steps begins here: "
                "leave out what workers do together before the loop"
            )
        return self._comm

    @property
    def metrics(self) -> Communicator:
        """See `comm`."""
        return self._metrics if self._comm is not None else self.comm

    @property
    def recovers(self) -> bool:
        """See `LoopGroup`."""
        return self._state is not None

    @property
    def ended(self) -> bool:
        """See `LoopGroup`."""
        return self._parting or self.lost

    @property
    def lost(self) -> bool:
        """See `LoopGroup`."""
        return self._error is not None

    @property
    def late(self) -> bool:
        """See `LoopGroup`."""
        return self._comm is None

    def agree(self, state: TrainingState) -> None:
        """See `LoopGroup`."""
        if self._comm is not None:
            state.agree(self._comm)

    def admit(self, traits: Callable[[], Traits]) -> None:
        """See `LoopGroup`."""
        given = self._given
        admit(given.contact, given.worker, traits(), lambda: given.worker.stop.leaving)

    def stay(self) -> None:
        """See `LoopGroup`."""
        if self._comm is None:
            raise UnisonoError("a worker was lost, and a loop like this one cannot be taken up by another")
        self._tell_over()

    def begin(self, state: TrainingState) -> None:
        """See `LoopGroup`."""
        self._state = state
        self._given.worker.report({"kind": "loop", "place": self._given.worker.identity.rank})
        if threading.current_thread() is threading.main_thread():
            self._given.leave_when_asked()
        self._end_watchdog()  # from now on the coordinator sees when this worker is stuck
        former, self._comm = self._comm, None
        self._views = ElasticSession(
            self._given.worker, self._communicator, self._timeout_seconds, self._given.contact, self._watch
        )
        met = self._meet(self._views)
        if former is not None:
            former.close()  # not sooner: others may have been about to hear the last of it
        if not met:
            raise Left

    def again(self) -> bool:
        """See `LoopGroup`."""
        assert self._state is not None
        assert self._views is not None
        if self._all_leave:
            raise Left
        if self.lost:
            self._state.roll_back()
        self._watch.set_phase(Phase.RECOVERY)
        self._end(self._views, self._error)
        if self._meet(self._views):
            return True
        if self._views.leaving:
            raise Left
        self._finished, self._error = True, PeerLost((), "view", "the others have come to the end of their loops")
        self._tell_over()
        return False

    def says(self) -> list[float]:
        """See `LoopGroup`."""
        if not self.recovers:
            return []
        assert self._views is not None
        said = ControlWord(parting=self._views.parting, leaving=self._views.leaving)
        return numbers(said, self.rank, self.size)

    def hear(self, words: Sequence[float]) -> None:
        """See `LoopGroup`."""
        said = heard(words)
        self._all_leave = all(each.leaving for each in said)
        self._parting = self._all_leave or any(each.parting for each in said)

    def check(self) -> None:
        """See `LoopGroup`."""
        if self._views is not None:
            self._views.check()

    def stepped(self) -> None:
        """See `LoopGroup`."""
        if self._views is not None:
            self._views.stepped()

    def done(self, steps: int) -> None:
        """See `LoopGroup`."""
        assert self._views is not None
        self._views.done(steps)

    def lose(self, error: PeerLost) -> None:
        """See `LoopGroup`."""
        if self._state is None or self._finished:
            raise error
        self._error = self._error or error

    def finish(self) -> None:
        """See `LoopGroup`."""
        if not self.recovers:
            return
        self.comm.gather(torch.zeros(1)).wait()  # all have come as far
        assert self._views is not None
        self._views.finish()
        self._finished = True
        self._tell_over()

    def close(self, *, finished: bool) -> None:
        """See `LoopGroup`."""
        if self._closed:
            return
        self._closed = True
        if finished and self.recovers and not (self._finished or self.lost):
            assert self._views is not None
            self._tell_over()
            self._views.finish()
        self._end_watchdog()
        if self._comm is not None:
            self._comm.close()
        if self._views is not None:
            self._views.__exit__(None, None, None)

    def _tell_over(self) -> None:
        """From now on this worker is not one who could be replaced, or asked to leave the others alone."""
        self._given.worker.report({"kind": "over", "place": self._given.worker.identity.rank})
        self._given.interrupt_again()

    def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def _use(self, comm: Communicator) -> Communicator:
        self._comm, self._metrics = comm, comm.channel("metrics")
        self._watch.set_phase(Phase.COMPUTE, comm)
        return comm

    def _meet(self, views: ElasticSession) -> bool:
        """Meet the members of the next view that comes about, in the state that it starts from; False if there is
        none."""
        while views.next():
            try:
                self._settle(views, self._connect(views))
                return True
            except PeerLost as error:
                self._end(views, error)
        return False

    def _connect(self, views: ElasticSession) -> Communicator:
        members = views.view.members
        self.rank, self.size = in_order(members).index(members[views.rank]), len(members)
        comm = self._use(views.meeting(self._device).connect(range(self.size)))
        if self.rank == 0:  # whose words are those that are shown
            sys.stdout.flush()
            self._given.worker.report({"kind": "speaks", "at": os.fstat(1).st_size})
        return comm

    def _settle(self, views: ElasticSession, comm: Communicator) -> None:
        """Have the state that the view starts from."""
        assert self._state is not None
        state, view = self._state, views.view
        if not view.start.view:
            state.agree(comm)
        else:
            me = view.members[views.rank]
            has = state.reached if me in view.sources else None
            beside = state.kept.take() if me == view.sources[0] else {}
            taken = take_over(view, comm, state.model, state.optimizer, has, beside=beside, walks=state.walks)
            state.reached = taken.reached
            if has is None:
                state.kept.give(taken.beside)
        state.hold()
        self._met(views)

    def _met(self, views: ElasticSession) -> None:
        assert self._state is not None
        start, self._knows = views.view.start, True
        views.met(start.step if start.view else self._state.reached.steps, start.digest)

    def _end(self, views: ElasticSession, error: PeerLost | None) -> None:
        """The view at hand is over."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None
        digest = self._state.digest() if self._state is not None and self._knows else ""
        if error is None:
            views.ended(digest)
        else:
            self._watch.discard()
            views.broken(error, digest)
        self._error, self._parting = None, False


def words_of(company: LoopGroup) -> int:
    """How many numbers a control word has for what all say."""
    return NUMBERS * company.size if company.recovers else 0


def in_order(members: Sequence[str]) -> list[str]:
    """`members` of a view in the order of their numbers: those with whom the run began by their places, as before the
    loop, and then who came later."""
    return sorted(members, key=lambda name: (0, int(name)) if name.isdecimal() else (1, members.index(name)))

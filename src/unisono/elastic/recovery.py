"""How a worker obtains the state that a view starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from unisono.bad_steps import AnomalyDetector
from unisono.comm import Communicator
from unisono.comm.process_groups import ProcessGroups
from unisono.elastic.state_transfer import Progress, receive_state
from unisono.elastic.training_state import TrainingState
from unisono.membership import View


class Recovery(Protocol):
    """What a worker keeps of the state from view to view, and how it obtains the state of the next one.

    In each view: `restore`, `begin`, then `committed` after each commit, and `release` at its end.

    Attributes:
        detector: its history of bad steps is a part of the state.
    """

    detector: AnomalyDetector

    def restore(self, view: View, groups: ProcessGroups, state: TrainingState) -> bool:
        """Collective: obtain the state that the view starts from. False, and nothing has changed, where workers do not
        have it in memory: a checkpoint is to be read.

        Raises:
            PeerLost: a worker was lost meanwhile.
        """

    def begin(self, view: View, groups: ProcessGroups, state: TrainingState, replica: int) -> None:
        """Collective: train from `state` on, as a part of that `replica`."""

    def committed(self, progress: Callable[[], Progress], *, view_ending: bool) -> None:
        """Collective: all workers have committed the steps of ``progress()``. `view_ending`: the view ends now."""

    def release(self, state: TrainingState) -> None:
        """The view has ended: drop what belongs to its process groups, and keep what the next view needs."""


class ReplicatedRecovery:
    """Each worker has the whole state: a worker that joins receives it from the others."""

    def __init__(self, detector: AnomalyDetector) -> None:
        self.detector = detector

    def restore(self, view: View, groups: ProcessGroups, state: TrainingState) -> bool:
        return receive(view, groups.world, state, self.detector)

    def begin(self, view: View, groups: ProcessGroups, state: TrainingState, replica: int) -> None:
        pass

    def committed(self, progress: Callable[[], Progress], *, view_ending: bool) -> None:
        pass

    def release(self, state: TrainingState) -> None:
        pass


def receive(view: View, comm: Communicator, state: TrainingState, detector: AnomalyDetector | None = None) -> bool:
    """Collective: have the state that `view` starts from, this worker's own or that of workers that have it. With
    local steps, what differs between replicas becomes their mean. False in the first view, which starts from none.

    Args:
        detector: has afterwards the history of bad steps that belongs to the state.

    Raises:
        StateDamaged, StateMissing, PeerLost: as `receive_state`.
    """
    if not view.start.view:
        return False
    me = view.members[comm.rank]
    own = state.progress if me in view.sources else None
    extra = state.extra.state_dict() if state.extra is not None and me == view.sources[0] else {}
    meta = [detector.state() if detector else None, state.progress.loss]
    received = receive_state(view, comm, state.model, state.optimizer, own, meta, extra, local_steps=state.local_steps)
    history, loss = received.meta
    state.progress = replace(received.progress, loss=loss)
    if own is None and detector is not None:
        detector.replace(history)
    if own is None and state.extra is not None:
        state.extra.load_state_dict(received.extra)
    return True

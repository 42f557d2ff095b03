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
    """Keeps what a worker needs of the state from view to view, and obtains the state from which a view starts.

    Each view calls `restore` and `begin`, then `committed` after each commit, and `release` at its end.

    Attributes:
        detector: the detector of bad steps, whose history is a part of the state.
    """

    detector: AnomalyDetector

    def restore(self, view: View, groups: ProcessGroups, state: TrainingState) -> bool:
        """Collective: obtain the state from which the view starts.

        Returns False, and changes nothing, if the workers do not have that state in memory. It must then be read from
        a checkpoint.

        Raises:
            PeerLost: a worker was lost meanwhile.
        """

    def begin(self, view: View, groups: ProcessGroups, state: TrainingState, replica: int) -> None:
        """Collective: training begins in the view, from `state`; this worker is a part of replica number `replica`."""

    def committed(self, progress: Callable[[], Progress], *, view_ending: bool) -> None:
        """Collective: all workers have committed the steps of ``progress()``; with `view_ending`, the view ends now."""

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
    """Collective: load the state from which `view` starts, which its sources send to the workers that lack it.

    With local steps, tensors that differ between replicas become their mean. Returns False in the first view, which
    starts from no state.

    Args:
        detector: the detector of bad steps, which gets the history that belongs to the state.

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

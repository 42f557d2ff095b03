"""The views that a custom loop goes through: how it joins one, agrees to end it, and commits steps in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from unisono.elastic.control_word import ControlWord, decode, encode
from unisono.elastic.loop_group import LoopGroup
from unisono.elastic.recovery_loop import Attempt
from unisono.elastic.session import Session
from unisono.elastic.state_recovery import receive
from unisono.elastic.training_state import TrainingState
from unisono.errors import Left, PeerLost
from unisono.observe import ThreadTracker
from unisono.trainer.loop_models import LoopModels

T = TypeVar("T")


class LoopViews:
    """One worker's membership while a custom loop runs."""

    def __init__(self, group: LoopGroup, watch: ThreadTracker, state: TrainingState) -> None:
        self._group, self._watch, self._state = group, watch, state
        self._attempt: Attempt | None = None
        self._all_leave = self._ending = False
        self._committed = 0

    @property
    def lost(self) -> bool:
        """Whether a worker was lost, and the view is over."""
        return self._attempt is not None and self._attempt.lost

    @property
    def ended(self) -> bool:
        """Whether the view ends before the next step."""
        return self._ending or self.lost

    def unless_lost(self, call: Callable[[], T]) -> T | None:
        """See `Attempt.unless_lost`. Before the loop begins, the loss of a worker is an error."""
        return self._attempt.unless_lost(call) if self._attempt is not None else call()

    def join(self, session: Session, attempt: Attempt) -> None:
        """Collective: connect to the members of the view, and have the state that it starts from."""
        self._attempt, self._ending = attempt, False
        comm, state = self._group.connect(session.view), self._state
        if session.elastic:
            state.allow_roll_back()
            if not receive(session.view, comm, state):
                state.broadcast_initial(comm)
        state.commit()
        attempt.joined()
        self._committed = state.progress.steps

    def finish_if_done(self, attempt: Attempt, synchronize: Callable[[], None]) -> None:
        """Collective, after the last step of the view: finish, if it is the last one of all.

        Raises:
            Left: all workers were asked to leave.
        """
        if self._all_leave:
            raise Left
        if not self.ended:
            synchronize()
            self._group.finish()
            attempt.finish()

    def end(self, session: Session) -> None:
        """There is no further view.

        Raises:
            Left: the others continue without this worker.
        """
        attempt = self._attempt
        if attempt is not None and attempt.finished:
            return
        if attempt is None or session.leave_requested or not self._state.joined:
            raise Left
        attempt.fail(PeerLost((), "view", "the others have come to the end of their loops"))
        self._group.finished_by_others()

    def control_word(self) -> list[float]:
        """This worker's part of the control word; empty in a group that does not change."""
        session = self._group.session
        if session is None or not session.elastic:
            return []
        word = ControlWord(end_view=session.view_end_requested, leave=session.leave_requested)
        return encode(word, self._group.rank, self._group.size)

    def gather_control(self, models: LoopModels) -> None:
        """Collective: exchange control words, once this worker has computed all that it has leased."""
        words = self._group.comm.gather(torch.tensor(self.control_word(), dtype=torch.float64)).wait()
        self.act_on_control(words.sum(0).tolist(), models)

    def act_on_control(self, numbers: Sequence[float], models: LoopModels) -> None:
        """Collective, between two steps: end the view if the control words of all workers say so, and commit."""
        words = decode(numbers)
        self._all_leave = all(word.leave for word in words)
        self._ending = self._all_leave or any(word.end_view for word in words)
        if self.ended:  # a worker that leaves contributes its local steps
            models.synchronize()
        self.commit(models)

    def commit(self, models: LoopModels) -> None:
        """Collective: all workers have synchronized; commit the steps that they have taken."""
        session = self._group.session
        assert session is not None
        models.quiesce()
        self._state.commit(models.state_dict() if self._state.local_steps else None)
        if new := self._state.progress.steps - self._committed:
            self._committed += new
            session.committed(new)
            self._watch.commit(self._watch.steps + new)

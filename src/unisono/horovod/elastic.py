"""Elastic training by Horovod's interface: state that is committed, restored and synchronized, and `run`.

@hvd.elastic.run
def train(state):
    while state.step < steps:
        ...
        state.step += 1
        state.commit()

train(hvd.elastic.TorchState(model, optimizer, step=0))
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler

from unisono.elastic.loop_group import in_order
from unisono.elastic.recovery_loop import attempts
from unisono.elastic.state_transfer import Progress
from unisono.errors import Left, PeerLost, StateMissing
from unisono.horovod.collectives import allreduce
from unisono.horovod.errors import HostsUpdatedInterrupt, WorkersLost
from unisono.horovod.objects import broadcast_object
from unisono.horovod.participant import current
from unisono.horovod.reductions import Max
from unisono.horovod.state import broadcast_optimizer_state, broadcast_parameters
from unisono.membership import View
from unisono.trainer.traits import of_script

T = TypeVar("T")


class State:
    """What workers have in common. A subclass defines `save`, `restore` and `sync`."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Have `callbacks` called, in order, when the group has changed, before its workers synchronize."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """The group has changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Collective: save the state, to which `restore` goes back; and let workers join or leave.

        Raises:
            HostsUpdatedInterrupt: workers join or leave; `run` handles it.
            HorovodInternalError: a worker is lost; `run` handles it.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Collective, after `save`: count the commit; raises `HostsUpdatedInterrupt` where workers join or leave."""
        views = current().views
        if views is None or not views.elastic:
            return
        ending = allreduce(torch.tensor([int(views.view_end_requested)]), op=Max)
        views.stepped()
        views.committed()
        if ending.item():
            raise HostsUpdatedInterrupt("workers join or leave")

    def reset(self) -> None:
        """Adapt to the new group."""

    def save(self) -> None:
        """Copy the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what `save` copied last."""
        raise NotImplementedError

    def sync(self, root_rank: int = 0) -> None:
        """Collective: get the state of worker `root_rank`, and save it."""
        raise NotImplementedError


class ObjectState(State):
    """The attributes that are given by name: objects with ``state_dict()`` and ``load_state_dict(state)``, and values
    that `broadcast_object` can send."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = tuple(values)
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(_state_of(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        self._load(copy.deepcopy(self._saved))

    def sync(self, root_rank: int = 0) -> None:
        rest = {}
        for name in self._names:
            match getattr(self, name):
                case nn.Module() as model:
                    broadcast_parameters(model.state_dict(), root_rank)
                case Optimizer() as optimizer:
                    broadcast_optimizer_state(optimizer, root_rank)
                case value:
                    rest[name] = _state_of(value)
        self._load(broadcast_object(rest, root_rank))
        self.save()

    def _load(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            value = getattr(self, name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(state)
            else:
                setattr(self, name, state)


class TorchState(ObjectState):
    """As `ObjectState`, with a model and its optimizer."""

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in named.items() if value is not None}, **values)


class ElasticSampler(Sampler[int]):
    """Divides the samples of an epoch among the workers; those that are processed are left out when the group changes.

    To be a part of the `TorchState`. The last samples are repeated where they cannot be divided evenly.

    Args:
        shuffle: draw the order of samples from `seed` and the number of the epoch; the same on all workers.

    Attributes:
        epoch: its number.
        processed_num: samples of this epoch that all workers have recorded.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._count, self._shuffle, self._seed = len(dataset), shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; to be called at the end of the one before, so that a commit between them repeats nothing."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every worker has processed `batch_size` samples."""
        self.processed_num += batch_size * current().size

    def state_dict(self) -> dict[str, int]:
        """The state of the whole group."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Divide the samples that are left among the workers of the group as it is now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        order = torch.randperm(self._count, generator=generator) if self._shuffle else torch.arange(self._count)
        left, own = order[self.processed_num :], current()
        padded = torch.cat([left, left[: -left.numel() % own.size]])
        self._mine: list[int] = padded[own.rank :: own.size].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Call ``function(state, ...)`` on the workers of an elastic run, again and again until it returns.

    When a worker is lost, the others go back to the last commit; after a commit, workers join and leave. Then `state`
    is synchronized, and the function called again with the new group. Workers join under `unisono launch`; elsewhere
    the group does not change, and the loss of a worker is an error.

    Raises (from the function that is returned):
        HorovodInternalError: workers asked for different things.
        PeerLost: a worker is lost where the group does not change.
        TaskMismatch: workers run different scripts.
        Left: this worker was asked to leave, and the others continue.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        own, committed = current(), _Committed(state)
        own.group.admit(of_script)
        views = own.group.begin(recovers=True)
        for attempt in attempts(views, committed, own.watch, own.end_view):
            with attempt, _losses_of_workers():
                own.begin_view(views)
                if committed.joined:
                    state.on_reset()
                state.sync(_source(views.view))
                attempt.joined()
                try:
                    result = function(state, *args, **kwargs)
                except HostsUpdatedInterrupt:
                    continue
                own.finish_run()
                attempt.finish()
                return result
        own.group.finished_by_others()
        raise Left

    return wrapper


class _Committed:
    """A `State` as the loop over views goes back to its last commit."""

    def __init__(self, state: State) -> None:
        self._state, self.progress, self.joined = state, Progress(), False

    def roll_back(self) -> None:
        self._state.restore()

    def digest(self) -> str:
        return ""  # workers with the same number of commits have the same state


@contextmanager
def _losses_of_workers() -> Iterator[None]:
    """Raise `WorkersLost` as the `PeerLost` from which the loop over views recovers."""
    try:
        yield
    except WorkersLost as error:
        raise PeerLost((), "hvd.elastic.run", str(error)) from error


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _source(view: View) -> int:
    """The rank of a worker that has the state that `view` starts from.

    Raises:
        StateMissing: no member has it.
    """
    if not view.start.view:
        return 0
    if not view.sources:
        raise StateMissing(["the state of hvd.elastic.run"])
    return in_order(view.members).index(view.sources[0])

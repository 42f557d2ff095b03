"""All models of a custom loop, as the one replica that is saved, synchronized and committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from unisono.comm import Communicator
from unisono.sync.bucket_reduction import under
from unisono.trainer.loop_model import LoopModel, LoopShape


class LoopModels:
    """The models in the order in which they were bound. With several, names in states begin with a model's number."""

    def __init__(self) -> None:
        self._models: list[LoopModel] = []
        self._numbers: dict[LoopModel, int] = {}  # of their channels, which no other model had before
        self._added = 0

    def __iter__(self) -> Iterator[LoopModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def add(self, models: Iterable[LoopModel]) -> None:
        """Append `models`."""
        for model in models:
            self._models.append(model)
            self._numbers[model] = self._added = self._added + 1

    def remove(self, model: LoopModel) -> None:
        """Release `model`."""
        self._models.remove(model)
        del self._numbers[model]
        model.release()

    def bind(self, comm: Communicator, shape: LoopShape) -> None:
        """Collective: bind those that are not bound yet to the workers of `comm`."""
        for model in self._models:
            if not model.bound:
                model.bind(comm.channel(f"model {self._numbers[model]}"), shape)

    @property
    def bound(self) -> bool:
        """Whether there are models, and they are bound."""
        return any(model.bound for model in self._models)

    @property
    def sync(self) -> LoopModels:
        """The state of the synchronizers, as one."""
        return self

    @property
    def synchronous(self) -> bool:
        """Whether all models are equal on all workers after every step."""
        return all(model.sync.synchronous for model in self._models)

    @property
    def has_residuals(self) -> bool:
        """Whether compressed messages may leave out what `residual_state` then has."""
        return any(model.has_residuals for model in self._models)

    def synchronize(self) -> None:
        """Collective, between two steps: make weights, buffers and optimizer state equal on all workers."""
        for model in self._models:
            model.synchronize()

    def quiesce(self) -> None:
        """See `BoundSynchronizer.quiesce`."""
        for model in self._models:
            model.sync.quiesce()

    def state_dict(self) -> dict[str, Tensor]:
        """See `BoundSynchronizer.state_dict`."""
        return self._joined(lambda model: model.sync.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `BoundSynchronizer.load_state_dict`."""
        for model, own in self._divided(state):
            model.sync.load_state_dict(own)

    def residual_state(self) -> dict[str, Tensor]:
        """See `BoundSynchronizer.residual_state`."""
        return self._joined(lambda model: model.sync.residual_state())

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """See `BoundSynchronizer.load_residuals`."""
        for model, own in self._divided(residuals):
            model.sync.load_residuals(own)

    def begin(self) -> None:
        """Drop the gradients of a step that is not taken."""
        for model in self._models:
            model.drop()

    def _joined(self, state_of: Callable[[LoopModel], dict[str, Tensor]]) -> dict[str, Tensor]:
        if len(self._models) == 1:
            return state_of(self._models[0])
        return {f"{i}/{name}": t for i, model in enumerate(self._models) for name, t in state_of(model).items()}

    def _divided(self, state: Mapping[str, Tensor]) -> Iterator[tuple[LoopModel, Mapping[str, Tensor]]]:
        """Each model that has a part in `state`, with that part."""
        if len(self._models) == 1 and state:
            yield self._models[0], state
        elif len(self._models) > 1:
            parts = ((model, under(str(i), state)) for i, model in enumerate(self._models))
            yield from ((model, part) for model, part in parts if part)

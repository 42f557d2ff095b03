"""Parameter servers in a loop of the user's own: gradients stay in the parameters until the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from unisono.sync.local_gradients import LocalGradients, LocalMean
from unisono.sync.synchronizer import BoundSynchronizer, PendingUpdate, WorkItem


class PushAtStep(BoundSynchronizer):
    """Pushes the gradients of a step when the step is taken, as they are then, instead of during backward.

    Args:
        client: exchanges with the servers.
        reference: as in `Loop`.
        clip: largest 2-norm of the mean gradient on the servers; None: not clipped.
    """

    optimizer_on_server = True

    def __init__(
        self, client: BoundSynchronizer, parameters: Mapping[str, nn.Parameter], reference: float, clip: float | None
    ) -> None:
        self.client, self._parameters, self._reference, self._clip = client, parameters, reference, clip
        self.synchronous = client.synchronous
        self._gradients = LocalGradients(parameters)

    def begin(self) -> None:
        self._gradients.begin()
        self.client.begin()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._gradients.close(control, weight)
        self._weight = weight

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        self._gradients.offer(name, gradient, weight)

    def settle(self) -> PushedStep:
        return PushedStep(self, self._gradients.settle())

    def push(self, control: list[float], step: Callable[[], Any]) -> PendingUpdate:
        """Push every ``grad``, with the weight of this worker's samples; then the servers take the step."""
        self.client.close(control, self._weight)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.client.offer(name, parameter.grad, self._weight / self._reference)
        self.client.fold()
        update = self.client.settle()
        scale = min(1.0, self._clip / (update.norm() + 1e-6)) if self._clip is not None else 1.0
        update.apply(step, scale)
        self.client.wait_parameters()
        return update

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem] | None:
        return self.client.work_items(first, until, stop)

    @property
    def leased_until(self) -> int:
        return self.client.leased_until

    def synchronize(self) -> None:
        self.client.synchronize()

    def quiesce(self) -> None:
        self.client.quiesce()

    def averaged_weights(self) -> AbstractContextManager[None]:
        return self.client.averaged_weights()

    def state_dict(self) -> dict[str, Tensor]:
        return self.client.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.client.load_state_dict(state)

    def residual_state(self) -> dict[str, Tensor]:
        return self.client.residual_state()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        self.client.load_residuals(residuals)


class PushedStep:
    """The update of one step, which is pushed by `apply`; a `PendingUpdate`. Before, its control word is this worker's
    own."""

    agreed = False

    def __init__(self, sync: PushAtStep, mean: LocalMean) -> None:
        self._sync, self._mean, self.control = sync, mean, mean.control

    def norm(self, without: Collection[str] = ()) -> float:
        return self._mean.norm(without)

    def write(self, scale: float = 1.0) -> None:
        self._mean.write(scale)

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        update = self._sync.push(self.control, step)
        self.control, self.agreed = update.control, update.agreed

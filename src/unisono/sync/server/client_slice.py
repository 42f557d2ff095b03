"""One slice on a worker: accumulates and sends its gradient, and copies new weights into the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono.comm.actor import ActorMessage
from unisono.compress import CompressorMemory, views
from unisono.sync.buckets import refused
from unisono.sync.server.shard_client import ShardCall, ShardClient
from unisono.sync.server.slice_optimizer import Numbers
from unisono.sync.server.slices import Slice
from unisono.sync.server.weight_deltas import decoded


class ClientSlice:
    """The worker's state of one slice.

    Attributes:
        version, delta_number: the version and the delta number of the weights in the parameters; see `WeightDeltas`.
        pushed: the call that pushed the gradient of this step; None before that.
        pull_in_flight: the request for new weights that is not answered yet.
        push_in_flight: the push of an earlier step that is not answered yet; it still reads the sum.
        applied: whether an update was applied that the servers have not confirmed yet. `begin` then keeps the residual.
    """

    def __init__(self, number: int, plan: Slice, parameters: Mapping[str, nn.Parameter], to: ShardClient) -> None:
        self.number, self.plan, self._to = number, plan, to
        self.memory = CompressorMemory()
        self._pieces = [piece.of(parameters[piece.span.name].detach()) for piece in plan.pieces]
        self.version = self.delta_number = 0
        self.pushed: ShardCall | None = None
        self.pull_in_flight: ShardCall | None = None
        self.push_in_flight: ShardCall | None = None
        self.applied = False
        self._allocate()
        self.begin()

    def _allocate(self) -> None:
        plan = self.plan
        self.total = torch.zeros(plan.numel, dtype=plan.compress.total_dtype(plan.dtype), device=plan.device)
        self._parts = views(self.total, plan.spans)

    def begin(self) -> None:
        """Begin a step. Gradients that were added and not applied are discarded."""
        if self.pushed is not None and not self.pushed.answered:
            self.pushed.abandon()
            self._allocate()  # the connection may still read the discarded sum
        self.pushed = None
        self.seen = [False] * len(self._parts)
        self.missing = set(range(len(self._parts)))
        if not self.applied:
            self.memory.discard()

    def commit(self) -> None:
        """Commit the residual, because the servers have confirmed the step."""
        self.applied = False
        self.memory.commit()

    def add(self, i: int, gradient: Tensor, weight: float) -> None:
        """Add ``weight * gradient`` to piece `i`, where `gradient` is that of the whole parameter of the piece."""
        try:
            self.plan.compress.add(self._parts[i], self.plan.pieces[i].of(gradient), weight, not self.seen[i])
        except ValueError as error:
            raise refused(self.plan.spans[i].name, error) from error
        self.seen[i] = True

    def seal(self) -> None:
        """Complete the sum: pieces without a gradient become 0."""
        for part, seen in zip(self._parts, self.seen):
            if not seen:
                part.zero_()

    def value(self) -> Tensor:
        """The accumulated gradient."""
        return self.plan.compress.value(self.total, self.plan.dtype)

    def push(
        self, number: int, groups: Sequence[Numbers] = (), *, tick: int = 0, count: int = 1, scale: float = 1.0
    ) -> ShardCall:
        """Send the accumulated gradient, with error feedback."""
        fields = {
            "slice": self.number, "number": number, "version": self.version, "used": self.seen,
            "tick": tick, "count": count, "scale": scale, "groups": groups,
        }  # fmt: skip
        tensors = (
            [self.plan.compress.encode_with_feedback(self.total, self.plan.spans, self.memory)]
            if any(self.seen)
            else []
        )
        return self._to.call("push", fields, tensors)

    def request_weights(self, version: int) -> None:
        """Request the newest weights, which the server sends once it has `version`."""
        self.pull_in_flight = self._to.call(
            "pull", {"slice": self.number, "need": version, "edition": self.delta_number}
        )

    def receive(self) -> None:
        """Wait for the requested weights. Raises `PeerLost`, and raises it again in a further call."""
        if self.pull_in_flight is not None:
            self._update(self.pull_in_flight.wait())
            self.pull_in_flight = None

    def _update(self, answer: ActorMessage) -> None:
        """Write the weights of `answer` into the parameters, or add its weight deltas to them."""
        plan = self.plan
        for tensor in answer.tensors:
            local = tensor.to(plan.device)
            if answer.fields["whole"]:
                self.write(local)
            else:
                difference = decoded(plan.compress, local, plan.spans, plan.numel, plan.dtype)
                for piece, part in zip(self._pieces, views(difference, plan.spans)):
                    piece += part
        self.version, self.delta_number = answer.fields["version"], answer.fields["edition"]

    def read(self) -> Tensor:
        """A flat copy of the slice's weights in the parameters."""
        flat = torch.empty(self.plan.numel, dtype=self.plan.dtype, device=self.plan.device)
        for piece, part in zip(self._pieces, views(flat, self.plan.spans)):
            part.copy_(piece)
        return flat

    def write(self, flat: Tensor) -> None:
        """Copy the slice's weights `flat` into the parameters."""
        for piece, part in zip(self._pieces, views(flat, self.plan.spans)):
            piece.copy_(part)

    def init(self, optimizer_state: Mapping[str, Mapping[str, object]]) -> ShardCall:
        """Send the initial weights and optimizer state of this slice."""
        places, state = [], []
        for i, (piece, own) in enumerate(zip(self.plan.pieces, self._pieces)):
            for key, value in optimizer_state[piece.span.name].items():
                if value is None:
                    continue
                tensor = torch.as_tensor(value)
                like = tensor.dim() > 0 or own.dim() == 0
                places.append((i, key, like))
                state.append(_in_memory_order(piece.of(tensor)) if like else tensor)
        return self._to.call("init", {"slice": self.number, "places": places}, [self.read(), *state])

    def request_state(self, state: bool) -> ShardCall:
        """Request the exact weights, with `state` also the optimizer's state."""
        return self._to.call("look", {"slice": self.number, "state": int(state)})

    def request_exact(self) -> ShardCall:
        """Let the next pull return the exact weights."""
        return self._to.call("level", {"slice": self.number})


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor, whose elements are in the order of memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())

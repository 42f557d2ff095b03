"""One slice on a worker: what is summed for it and sent, and how what comes back gets into the parameters."""

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
    """The slice's gradient under way.

    Attributes:
        version, edition: what the parameters here hold.
        pushed: the push of this step, None before it.
        coming: new weights that are on their way here.
        applied: whether the step that was pushed is taken, but nobody has said so yet: what was put into memory, and
            the sum if it is still `push_in_flight`, outlive `begin`.
        leaving: the push of a step before this one, which its sum belongs to.
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
        """A new step; what was added and not applied is forgotten."""
        if self.pushed is not None and not self.pushed.answered:
            self.pushed.abandon()
            self._allocate()  # the line may still read what was dropped
        self.pushed = None
        self.seen = [False] * len(self._parts)
        self.missing = set(range(len(self._parts)))
        if not self.applied:
            self.memory.discard()

    def commit(self) -> None:
        """The step that was applied is taken for sure."""
        self.applied = False
        self.memory.commit()

    def add(self, i: int, gradient: Tensor, weight: float) -> None:
        """``weight * gradient``, of the whole parameter, goes into piece `i`."""
        try:
            self.plan.compress.add(self._parts[i], self.plan.pieces[i].of(gradient), weight, not self.seen[i])
        except ValueError as error:
            raise refused(self.plan.spans[i].name, error) from error
        self.seen[i] = True

    def seal(self) -> None:
        """Nothing more is added."""
        for part, seen in zip(self._parts, self.seen):
            if not seen:
                part.zero_()

    def value(self) -> Tensor:
        """What was added, as a gradient."""
        return self.plan.compress.value(self.total, self.plan.dtype)

    def push(
        self, number: int, groups: Sequence[Numbers] = (), *, tick: int = 0, count: int = 1, scale: float = 1.0
    ) -> ShardCall:
        """Send what was added, and what earlier messages left out of it."""
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
        """Ask for what is newest, once `version` is there."""
        self.pull_in_flight = self._to.call(
            "pull", {"slice": self.number, "need": version, "edition": self.delta_number}
        )

    def receive(self) -> None:
        """Wait for what was asked for. Raises `PeerLost`, also when it is called again then."""
        if self.pull_in_flight is not None:
            self._put(self.pull_in_flight.wait())
            self.pull_in_flight = None

    def _put(self, answer: ActorMessage) -> None:
        """New weights go into the parameters."""
        plan = self.plan
        for tensor in answer.tensors:
            here = tensor.to(plan.device)
            if answer.fields["whole"]:
                self.write(here)
            else:
                difference = decoded(plan.compress, here, plan.spans, plan.numel, plan.dtype)
                for piece, part in zip(self._pieces, views(difference, plan.spans)):
                    piece += part
        self.version, self.delta_number = answer.fields["version"], answer.fields["edition"]

    def read(self) -> Tensor:
        """The parameters' numbers, flat."""
        flat = torch.empty(self.plan.numel, dtype=self.plan.dtype, device=self.plan.device)
        for piece, part in zip(self._pieces, views(flat, self.plan.spans)):
            part.copy_(piece)
        return flat

    def write(self, flat: Tensor) -> None:
        """`flat` goes into the parameters."""
        for piece, part in zip(self._pieces, views(flat, self.plan.spans)):
            piece.copy_(part)

    def init(self, optimizer_state: Mapping[str, Mapping[str, object]]) -> ShardCall:
        """Send the weights and the optimizer's state for these pieces, for the first time."""
        places, state = [], []
        for i, (piece, own) in enumerate(zip(self.plan.pieces, self._pieces)):
            for key, value in optimizer_state[piece.span.name].items():
                if value is None:
                    continue
                tensor = torch.as_tensor(value)
                like = tensor.dim() > 0 or own.dim() == 0
                places.append((i, key, like))
                state.append(_as_it_lies(piece.of(tensor)) if like else tensor)
        return self._to.call("init", {"slice": self.number, "places": places}, [self.read(), *state])

    def request_state(self, state: bool) -> ShardCall:
        """Ask for the weights as they are, and perhaps the optimizer's state."""
        return self._to.call("look", {"slice": self.number, "state": int(state)})

    def request_exact(self) -> ShardCall:
        """The next `pull` is to give the weights as they are."""
        return self._to.call("level", {"slice": self.number})


def _as_it_lies(tensor: Tensor) -> Tensor:
    """The numbers of a dense tensor in the order of memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())

"""A worker's part of a pipeline under way, on torch's stages and schedules.

torch fixes the shapes of a schedule when it first runs. Here one is kept for every list of shapes that was seen; a new
one costs a forward pass of one micro-batch, in evaluation mode, that leaves no trace.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from unisono.layout.pipeline.schedules import check, kind, possible, worker_of
from unisono.layout.pipeline.split import undisturbed
from unisono.layout.pipeline.stage import Inputs, Stage, by_name
from unisono.layout.pipeline.wire import Wire, outline

Enter = Callable[[int, int], None]
Loss = Callable[[int, Any], Tensor]
Watch = Callable[[int, tuple[Tensor, ...], tuple[Tensor, ...]], None]  # a stage, what arrived, what leaves


@dataclass
class _Feed:
    """The micro-batches of the run under way; torch's stages and loss come here for what is theirs."""

    enter: Enter
    inputs: Sequence[Mapping[str, Any]] = ()
    first: int = 0
    loss: Loss | None = None

    def begin(self, place: int, stage: int) -> Mapping[str, Any]:
        """Before the forward pass of the `place`-th micro-batch of this run."""
        self.enter(self.first + place, stage)
        return self.inputs[place]


class _Entering(PipelineStage):
    """A stage that takes each micro-batch's own inputs from the feed."""

    feed: _Feed

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        inputs = self.feed.begin(fwd_chunk_id, self.stage_index)
        return super().forward_one_chunk(fwd_chunk_id, (), dict(inputs), *rest, **options)


@dataclass
class Pipeline:
    """The stages that this worker holds, ready to run.

    Args:
        stages: by their number.
        count: stages in all.
        group: the workers of this pipeline, in order.
        schedule: a name from `SCHEDULES`.
        device: where the stages live.
        tied: parameters that several stages hold (``Stages.tied``).
        enter: ``enter(micro_batch, stage)`` is called before each forward pass, for instance to seed its randomness.
        kept: for how many lists of shapes a schedule is kept, the latest ones.
        apart: whether the gradients of a stage's inputs may be taken before those of its weights, in a backward pass
            of their own; not where it computes again, or is compiled.
    """

    stages: Mapping[int, Stage]
    count: int
    group: dist.ProcessGroup
    schedule: str = "1F1B"
    device: torch.device = torch.device("cpu")
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    enter: Enter = lambda micro_batch, stage: None
    kept: int = 8
    apart: bool = True

    def __post_init__(self) -> None:
        kind(self.schedule)
        self._workers, self._me = dist.get_world_size(self.group), dist.get_rank(self.group)
        assert all(self._worker(s) == self._me for s in self.stages)
        self._feed = _Feed(self.enter)
        self._wire = Wire(self.group, self.device)
        self._ready: OrderedDict[Any, Any] = OrderedDict()

    @property
    def holds_last(self) -> bool:
        """Whether losses and outputs come out here."""
        return self.count - 1 in self.stages

    def step(self, micro_batches: Sequence[Inputs], loss: Loss) -> list[float] | None:
        """Forward and backward of all micro-batches of one optimizer step; gradients add up in ``.grad``.

        Every worker gives the same inputs: a tensor, a tuple of arguments or a mapping of keywords for each
        micro-batch. The worker with the last stage computes ``loss(micro_batch, output)``, a scalar that bears the
        micro-batch's weight already. Neighbours of the same shapes run through the
        pipeline together, each other shape by itself.

        Returns:
            The losses, on the worker with the last stage; None on the others.

        Raises:
            InvalidInput: the schedule cannot do that many micro-batches.
        """
        check(self.schedule, self._workers, self.count, len(micro_batches))
        losses: list[Tensor] = []
        for first, shapes, inputs in self._runs(micro_batches):
            self._feed.inputs, self._feed.first, self._feed.loss = inputs, first, loss
            schedule = self._schedule(shapes, len(inputs))
            some: list[Tensor] = []
            schedule.step(target=torch.arange(len(inputs)), losses=some, return_outputs=False)
            losses += some
        self._feed.inputs, self._feed.loss = (), None
        return torch.stack([one.detach() for one in losses]).tolist() if self.holds_last else None

    def on_entering(self, enter: Enter) -> None:
        """From now on, ``enter(micro_batch, stage)`` is called before each forward pass."""
        self._feed.enter = enter

    def forward_only(self, micro_batches: Sequence[Inputs]) -> list[Any] | None:
        """The model's outputs, without gradients, on the worker with the last stage; None on the others."""
        stage = next(iter(self.stages.values()))
        self._feed.inputs, self._feed.first = [by_name(stage.call_signature, m) for m in micro_batches], 0
        with torch.no_grad():
            outputs = self._chain(len(micro_batches), self._feed.begin)
        self._feed.inputs = ()
        return outputs if self.holds_last else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """This worker's parameters by their names in the whole model; of a tied one the first stage's."""
        found: dict[str, nn.Parameter] = {}
        for _, stage in sorted(self.stages.items()):
            found = stage.whole_names() | found
        return found

    def sum_tied(self) -> None:
        """Once per step, after it: give tied parameters the sum of their gradients over all stages that hold them."""
        for name in sorted(self.tied):
            workers = sorted({self._worker(s) for s in self.tied[name]})
            first, *copies = self._copies(name)
            if self._me in workers and first is not None and first.requires_grad:
                for copy in copies:
                    first.grad = copy.grad if first.grad is None else _plus(first.grad, copy.grad)
                    copy.grad = None
                if len(workers) > 1:
                    _set_sum(first, partial(self._wire.exchange, ranks=workers))

    def copy_tied(self) -> None:
        """After the optimizer's step: renew the copies that sharding made of parameters tied within this worker."""
        with torch.no_grad():
            for name in self.tied:
                first, *copies = self._copies(name)
                for copy in copies:
                    copy.copy_(first)

    def _copies(self, name: str) -> list[Any]:
        """The parameters of that name on this worker, the first stage's first; [None] where it holds none."""
        found = [p for _, s in sorted(self.stages.items()) if (p := s.whole_names().get(name)) is not None]
        return list({id(p): p for p in found}.values()) or [None]

    def counted(self) -> list[str]:
        """Names of the parameters that this worker counts in norms: a tied one is the first holder's."""
        return [
            name
            for place, stage in sorted(self.stages.items())
            for name in stage.whole_names()
            if self.tied.get(name, (place,))[0] == place
        ]

    def forget(self) -> None:
        """Drop all kept schedules, for instance after parameters were frozen."""
        self._ready.clear()

    def _worker(self, stage: int) -> int:
        return worker_of(self.schedule, self._workers, self.count, stage)

    def _runs(self, micro_batches: Sequence[Inputs]) -> list[tuple[int, Any, list[dict[str, Any]]]]:
        """Neighbours of the same shapes: where each run begins, its shapes, its inputs."""
        signature = next(iter(self.stages.values())).call_signature
        named = [by_name(signature, inputs) for inputs in micro_batches]
        found, first = [], 0
        for shapes, members in groupby(named, _shapes):
            inputs = list(members)
            found.append((first, shapes, inputs))
            first += len(inputs)
        return found

    def _schedule(self, shapes: Any, micro_batches: int) -> Any:
        """torch's schedule for these shapes, made anew where it is not kept."""
        key = (shapes, micro_batches)
        if key not in self._ready:
            self._ready[key] = self._made(micro_batches)
            if len(self._ready) > self.kept:
                self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return self._ready[key]

    def _made(self, micro_batches: int) -> Any:
        name = self.schedule
        while not possible(name, self._workers, self.count, micro_batches):
            name = kind(name).rest
        stages = self._stages()
        several = kind(name).several
        return kind(name).torch(stages if several else stages[0], micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Any, place: Tensor) -> Tensor:
        feed = self._feed
        assert feed.loss is not None
        return feed.loss(feed.first + int(place), self.stages[self.count - 1].assemble(output))

    def _stages(self) -> list[_Entering]:
        """torch's stages for the shapes that the run's first micro-batch has on this worker."""
        made: list[_Entering] = []

        def watch(place: int, arrives: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> None:
            # What a sharded part holds changes between the two halves of a zero-bubble schedule's backward pass.
            sharded = any(isinstance(m, FSDPModule) for m in self.stages[place].modules())
            apart = self.apart and not sharded and (place == 0 or separable(arrives, leaves))
            made.append(
                _Entering(
                    self.stages[place],
                    place,
                    self.count,
                    self.device,
                    input_args=tuple(map(outline, arrives)),
                    output_args=tuple(map(outline, leaves)),
                    group=self.group,
                    dw_builder=None if apart else lambda: lambda: None,
                )
            )
            made[-1].feed = self._feed

        eager = torch.compiler.set_stance("force_eager")  # a shape seen once is not worth a compilation
        with eager, undisturbed(*self.stages.values()), torch.enable_grad():
            self._chain(1, lambda place, stage: self._feed.inputs[place], watch)
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return made

    def _chain(
        self,
        micro_batches: int,
        begin: Callable[[int, int], Mapping[str, Any]],
        watch: Watch = lambda place, arrives, leaves: None,
    ) -> list[Any]:
        """Forward passes, each micro-batch through all of this worker's stages before the next."""
        outputs: list[Any] = []
        near: tuple[Tensor, ...] = ()  # on its way to a stage of this worker
        for micro_batch in range(micro_batches):
            for place, stage in sorted(self.stages.items()):
                if place == 0:
                    near = ()
                elif self._worker(place - 1) != self._me:
                    near = self._wire.receive(self._worker(place - 1))
                leaves = stage(*near, **begin(micro_batch, place))
                watch(place, near, leaves)
                near = tuple(v.detach().requires_grad_(v.requires_grad) for v in leaves)
                if place == self.count - 1:
                    outputs.append(stage.assemble(leaves))
                elif self._worker(place + 1) != self._me:
                    self._wire.send(near, self._worker(place + 1))
        self._wire.flush()
        return outputs


def separable(arrives: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether torch's zero-bubble schedules can take the gradients of a stage's inputs first and its weights' later.

    They leave out the weights' where nothing that arrives needs a gradient, and fail where a weight is used twice.
    """
    uses: Counter[Any] = Counter()
    nodes = [v.grad_fn for v in leaves if v.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for following, _ in nodes.pop().next_functions:
            if hasattr(following, "variable"):
                uses[following] += 1
            elif following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return any(v.requires_grad for v in arrives) and max(uses.values(), default=0) <= 1


def _shapes(inputs: Mapping[str, Any]) -> Any:
    leaves, form = tree_flatten(dict(inputs))
    return str(form), tuple((v.shape, v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves)


def _plus(mine: Tensor, other: Tensor | None) -> Tensor:
    return mine if other is None else mine + other


def _set_sum(parameter: nn.Parameter, exchange: Callable[[Tensor], list[Tensor]]) -> None:
    """Sum a gradient over its holders, in their order; it stays None where nobody has one."""
    mine = parameter.grad
    gradient = torch.zeros_like(parameter) if mine is None else mine
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    message = torch.cat([local.reshape(-1), local.new_tensor([float(mine is not None)])])
    total = torch.stack(exchange(message)).sum(0)
    if total[-1] > 0:
        local.copy_(total[:-1].view_as(local))
        parameter.grad = gradient

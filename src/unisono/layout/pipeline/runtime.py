"""Runs one worker's stages of a pipeline, by torch's pipeline stages and schedules.

torch fixes the shapes of a schedule at its first run. So one schedule is kept for each combination of shapes and number
of micro-batches. A new schedule costs an extra forward pass of one micro-batch, without lasting effects. That pass also
shows which stages draw random numbers. From the first of these on, the generators' states travel with the activations,
so that a pipeline draws what one worker would.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

from unisono.layout.pipeline.p2p import StageLink, meta_like
from unisono.layout.pipeline.preserved_state import preserved_state
from unisono.layout.pipeline.rng_states import Generators
from unisono.layout.pipeline.schedules import check, kind, possible, worker_of
from unisono.layout.pipeline.stage import Inputs, Stage, by_name

ForwardContext = Callable[[int, int], AbstractContextManager[object]]
BackwardContext = Callable[[int], AbstractContextManager[object]]
Loss = Callable[[int, Any], Tensor]
_Run = tuple[int, Any, list[dict[str, Any]]]  # the index of its first micro-batch, the shapes and inputs of all of them
OnStage = Callable[[int, tuple[Tensor, ...], tuple[Tensor, ...]], None]  # a stage, its input, its output


@dataclass
class _RunState:
    """The micro-batches of the current run, from which torch's stages and loss take their inputs."""

    forward_context: ForwardContext
    backward_context: BackwardContext
    generators: Generators
    inputs: Sequence[Mapping[str, Any]] = ()
    first: int = 0
    loss: Loss | None = None
    rng_states: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # those after a stage and micro-batch


class _TorchStage(PipelineStage):
    """A stage that takes each micro-batch's inputs from the run state, and begins with the random states of the
    previous stage's end.

    Attributes:
        arriving, leaving: indices of the generators whose states are received and sent.
    """

    run_state: _RunState
    arriving: frozenset[int]
    leaving: frozenset[int]

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        feed, me = self.run_state, self.stage_index
        inputs = dict(feed.inputs[fwd_chunk_id])
        with feed.forward_context(feed.first + fwd_chunk_id, me):
            if self.arriving:
                stage: Any = self.submod
                stage.begin_with(partial(feed.generators.unpack, feed.rng_states[me - 1, fwd_chunk_id], self.arriving))
            output = super().forward_one_chunk(fwd_chunk_id, (), inputs, *rest, **options)
        if self.leaving:
            feed.rng_states[me, fwd_chunk_id] = feed.generators.pack(self.leaving)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        with self.run_state.backward_context(self.run_state.first + bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        with self.run_state.backward_context(self.run_state.first + bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        return operations + self._rng_operation(dist.irecv, -1, fwd_chunk_id, self.arriving)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        return operations + self._rng_operation(dist.isend, 1, fwd_chunk_id, self.leaving)

    def _rng_operation(self, verb: Any, toward: int, micro_batch: int, which: frozenset[int]) -> list[dist.P2POp]:
        """The operation that sends the random states to the next stage, or receives them from the previous one."""
        if not which:
            return []
        feed, sender = self.run_state, self.stage_index + min(toward, 0)
        if toward < 0:
            feed.rng_states[sender, micro_batch] = torch.empty_like(feed.generators.pack(which))
        peer = self.stage_index_to_group_rank[self.stage_index + toward]
        return [dist.P2POp(verb, feed.rng_states[sender, micro_batch], group=self.group, group_peer=peer)]


@dataclass
class Pipeline:
    """Runs the stages that this worker holds of a pipeline.

    Args:
        stages: this worker's stages, by number.
        count: the number of stages on all workers.
        group: the workers of this pipeline, in order.
        schedule: a name in `SCHEDULES`.
        device: the device of the stages.
        tied: parameters that several stages hold (``Stages.tied``).
        forward_context: ``with forward_context(micro_batch, stage):`` surrounds each forward pass, for instance to seed
            its random numbers as for the first stage. If an earlier stage drew random numbers, the generators' states
            after that stage replace this seed.
        backward_context: ``with backward_context(micro_batch):`` surrounds each backward pass.
        kept_schedules: how many schedules are kept, the most recently used ones.
        sharding_groups: groups of workers that hold shards of the same stages, and compute their own micro-batches.
            They gather parameters collectively, so all of them must make the same passes.
        split_backward: whether gradients of a stage's inputs may be computed before those of its weights, in a separate
            backward pass. Must be False with activation checkpointing or compilation.
    """

    stages: Mapping[int, Stage]
    count: int
    group: dist.ProcessGroup
    schedule: str = "1F1B"
    device: torch.device = torch.device("cpu")
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    forward_context: ForwardContext = lambda micro_batch, stage: nullcontext()
    backward_context: BackwardContext = lambda micro_batch: nullcontext()
    kept_schedules: int = 8
    sharding_groups: Sequence[dist.ProcessGroup] = ()
    split_backward: bool = True

    def __post_init__(self) -> None:
        kind(self.schedule)
        self._workers, self._me = dist.get_world_size(self.group), dist.get_rank(self.group)
        assert all(self._worker(s) == self._me for s in self.stages)
        self._generators = Generators(self.device)
        self._run_state = _RunState(self.forward_context, self.backward_context, self._generators)
        self._link = StageLink(self.group, self.device)
        self._schedules: OrderedDict[Any, Any] = OrderedDict()

    @property
    def holds_last(self) -> bool:
        """Whether losses and outputs are computed on this worker."""
        return self.count - 1 in self.stages

    def step(self, micro_batches: Sequence[Inputs], loss: Loss) -> list[float] | None:
        """Collective: forward and backward of all micro-batches of one optimizer step; gradients accumulate in
        ``.grad``.

        Every worker passes the same inputs: a tensor, a tuple of arguments or a mapping of keywords per micro-batch.
        The worker with the last stage computes ``loss(micro_batch, output)``, a scalar that includes the micro-batch's
        weight. Consecutive micro-batches of the same shapes run through the pipeline together. Where the sharding
        groups disagree on these runs, each micro-batch runs separately.

        Returns:
            The losses, on the worker with the last stage; None on the others.

        Raises:
            InvalidInput: the schedule cannot run this number of micro-batches.
        """
        check(self.schedule, self._workers, self.count, len(micro_batches))
        losses: list[Tensor] = []
        for (first, shapes, inputs), new in self._agreed_runs(self._runs(micro_batches)):
            self._run_state.inputs, self._run_state.first, self._run_state.loss = inputs, first, loss
            schedule = self._schedule(shapes, len(inputs), new)
            some: list[Tensor] = []
            with self._gradients_kept() if new else nullcontext():
                schedule.step(target=torch.arange(len(inputs)), losses=some, return_outputs=False)
            losses += some
            self._run_state.rng_states.clear()
        self._run_state.inputs, self._run_state.loss = (), None
        while len(self._schedules) > self.kept_schedules:
            self._schedules.popitem(last=False)
        return torch.stack([one.detach() for one in losses]).tolist() if self.holds_last else None

    def set_contexts(self, around: ForwardContext, behind: BackwardContext) -> None:
        """Set `forward_context` and `backward_context`."""
        self._run_state.forward_context, self._run_state.backward_context = around, behind

    def forward_only(self, micro_batches: Sequence[Inputs]) -> list[Any] | None:
        """Collective: the model's outputs, without gradients, on the worker with the last stage; None on the others."""
        stage = next(iter(self.stages.values()))
        with torch.no_grad():
            outputs = self._forward_chain([by_name(stage.call_signature, inputs) for inputs in micro_batches])
        return outputs if self.holds_last else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """This worker's parameters by global name; a tied parameter is that of the first stage that holds it."""
        found: dict[str, nn.Parameter] = {}
        for _, stage in sorted(self.stages.items()):
            found = stage.whole_names() | found
        return found

    def sum_tied(self) -> None:
        """Collective, once after each `step`: give tied parameters the sum of their gradients over all stages that hold
        them."""
        for name in sorted(self.tied):
            workers = sorted({self._worker(s) for s in self.tied[name]})
            first, *copies = self._copies(name)
            if self._me in workers and first is not None and first.requires_grad:
                for copy in copies:
                    first.grad = copy.grad if first.grad is None else _add(first.grad, copy.grad)
                    copy.grad = None
                if len(workers) > 1:
                    _set_sum(first, partial(self._link.exchange, ranks=workers))

    def copy_tied(self) -> None:
        """After the optimizer's step: update the copies that sharding made of parameters tied within this worker."""
        with torch.no_grad():
            for name in self.tied:
                first, *copies = self._copies(name)
                for copy in copies:
                    copy.copy_(first)

    def _copies(self, name: str) -> list[Any]:
        """The parameters of that name on this worker, the first stage's first; [None] if there is none."""
        found = [p for _, s in sorted(self.stages.items()) if (p := s.whole_names().get(name)) is not None]
        return list({id(p): p for p in found}.values()) or [None]

    def counted_names(self) -> list[str]:
        """Names of the parameters that this worker counts in norms. A tied parameter counts in its first stage only."""
        return [
            name
            for place, stage in sorted(self.stages.items())
            for name in stage.whole_names()
            if self.tied.get(name, (place,))[0] == place
        ]

    def clear_schedules(self) -> None:
        """Drop all kept schedules, for instance after parameters were frozen."""
        self._schedules.clear()

    def _worker(self, stage: int) -> int:
        return worker_of(self.schedule, self._workers, self.count, stage)

    def _runs(self, micro_batches: Sequence[Inputs]) -> list[_Run]:
        """Runs of consecutive micro-batches of the same shapes."""
        signature = next(iter(self.stages.values())).call_signature
        named = [by_name(signature, inputs) for inputs in micro_batches]
        found, first = [], 0
        for shapes, members in groupby(named, _shapes):
            inputs = list(members)
            found.append((first, shapes, inputs))
            first += len(inputs)
        return found

    def _agreed_runs(self, runs: list[_Run]) -> list[tuple[_Run, bool]]:
        """Collective over the sharding groups: the runs that all of their workers make, and whether each needs a new
        schedule.

        Making a schedule takes an extra pass, so if one worker needs it, all workers make it.
        """
        lengths = [len(inputs) for _, _, inputs in runs]
        digest = float(zlib.crc32(repr(lengths).encode()))
        most, least, *new = self._maximum([digest, -digest, *self._missing(runs)], _agreement_length(sum(lengths)))
        if most != -least:
            runs = [(first + i, shapes, [one]) for first, shapes, inputs in runs for i, one in enumerate(inputs)]
            new = self._maximum(self._missing(runs), len(runs))
        return [(run, bool(each)) for run, each in zip(runs, new)]

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Preserve the gradients of the step's earlier runs: the first run of a torch schedule drops those of sharded
        parameters."""
        parameters = {parameter for stage in self.stages.values() for parameter in stage.parameters()}
        before = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        for parameter in before:
            parameter.grad = None
        yield
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else _add(gradient, parameter.grad)

    def _missing(self, runs: Sequence[_Run]) -> list[float]:
        """1 for each run whose schedule is neither kept nor made for an earlier run."""
        keys = [(shapes, len(inputs)) for _, shapes, inputs in runs]
        return [float(key not in self._schedules and key not in keys[:place]) for place, key in enumerate(keys)]

    def agreement_messages(self, micro_batches: int) -> list[tuple[tuple[int, ...], int]]:
        """The messages of a step by which the sharding groups agree on their passes: the ranks and bytes of each."""
        return [
            (tuple(dist.get_process_group_ranks(group)), 8 * _agreement_length(micro_batches))
            for group in self.sharding_groups
        ]

    def _maximum(self, numbers: Sequence[float], width: int) -> list[float]:
        """Collective: the maximum of each number over the sharding groups; `width` is the same on all their workers."""
        if not self.sharding_groups:
            return [*numbers]
        padded = torch.zeros(width, dtype=torch.float64)
        padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        padded = padded.to(self.device)
        for group in self.sharding_groups:
            dist.all_reduce(padded, dist.ReduceOp.MAX, group)
        return padded.tolist()

    def _schedule(self, shapes: Any, micro_batches: int, new: bool) -> Any:
        """torch's schedule for these shapes, made if it is `new` here or in a sharding group."""
        key = (shapes, micro_batches)
        if new:
            self._schedules[key] = self._make_schedule(micro_batches)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make_schedule(self, micro_batches: int) -> Any:
        name = self.schedule
        while not possible(name, self._workers, self.count, micro_batches):
            name = kind(name).fallback
        stages = self._stages()
        several = kind(name).multi_stage
        return kind(name).torch(stages if several else stages[0], micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Any, place: Tensor) -> Tensor:
        feed = self._run_state
        assert feed.loss is not None
        return feed.loss(feed.first + int(place), self.stages[self.count - 1].assemble(output))

    def _stages(self) -> list[_TorchStage]:
        """torch's stages for the shapes of the run's first micro-batch."""
        stages: list[_TorchStage] = []
        draws = torch.zeros(self.count, self._generators.count, device=self.device)
        states = self._generators.states()

        def watch(place: int, received: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
            nonlocal states
            draws[place] = torch.tensor(self._generators.drawn_since(states))
            states = self._generators.states()
            stages.append(self._torch_stage(place, received, outputs))

        eager = torch.compiler.set_stance("force_eager")  # avoids a compilation for shapes that may not recur
        with eager, preserved_state(*self.stages.values()), torch.enable_grad():
            self._forward_chain(self._run_state.inputs[:1], watch)
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        drawn = torch.stack(self._link.exchange(draws, range(self._workers))).sum(0).cumsum(0).cpu()
        upto = [frozenset(row.nonzero().view(-1).tolist()) for row in drawn]
        for each in stages:
            each.arriving = frozenset() if each.is_first else upto[each.stage_index - 1]
            each.leaving = frozenset() if each.is_last else upto[each.stage_index]
        return stages

    def _torch_stage(self, place: int, received: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> _TorchStage:
        stage = self.stages[place]
        # A sharded stage reshards its parameters between the two parts of a split backward pass.
        sharded = any(isinstance(m, FSDPModule) for m in stage.modules())
        apart = self.split_backward and not sharded and (place == 0 or can_split_backward(received, outputs))
        made = _TorchStage(
            stage, place, self.count, self.device, input_args=tuple(map(meta_like, received)),
            output_args=tuple(map(meta_like, outputs)), group=self.group,
            dw_builder=None if apart else lambda: lambda: None)  # fmt: skip
        made.run_state = self._run_state
        return made

    def _forward_chain(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        on_stage: OnStage = lambda place, arrives, leaves: None,
    ) -> list[Any]:
        """Collective: forward passes. Each micro-batch passes all of this worker's stages before the next begins."""
        outputs: list[Any] = []
        received: tuple[Tensor, ...] = ()  # the input of this worker's next stage
        for inputs in micro_batches:
            for place, stage in sorted(self.stages.items()):
                if place == 0:
                    received = ()
                elif self._worker(place - 1) != self._me:
                    received = self._link.receive(self._worker(place - 1))
                leaves = stage(*received, **inputs)
                on_stage(place, received, leaves)
                received = tuple(v.detach().requires_grad_(v.requires_grad) for v in leaves)
                if place == self.count - 1:
                    outputs.append(stage.assemble(leaves))
                elif self._worker(place + 1) != self._me:
                    self._link.send(received, self._worker(place + 1))
        self._link.flush()
        return outputs


def can_split_backward(received: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether torch's zero-bubble schedules can compute the gradients of a stage's inputs before those of its weights.

    torch omits the weights' gradients if no input requires a gradient, and fails if a weight is used twice.
    """
    uses: Counter[Any] = Counter()
    nodes = [v.grad_fn for v in outputs if v.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for following, _ in nodes.pop().next_functions:
            if hasattr(following, "variable"):
                uses[following] += 1
            elif following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return any(v.requires_grad for v in received) and max(uses.values(), default=0) <= 1


def _agreement_length(micro_batches: int) -> int:
    return 2 + micro_batches


def _shapes(inputs: Mapping[str, Any]) -> Any:
    leaves, form = tree_flatten(dict(inputs))
    return str(form), tuple((v.shape, v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves)


def _add(mine: Tensor, other: Tensor | None) -> Tensor:
    return mine if other is None else mine + other


def _set_sum(parameter: nn.Parameter, exchange: Callable[[Tensor], list[Tensor]]) -> None:
    """Sum a gradient over its holders, in their order; it stays None if no holder has one."""
    mine = parameter.grad
    gradient = torch.zeros_like(parameter) if mine is None else mine
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    message = torch.cat([local.reshape(-1), local.new_tensor([float(mine is not None)])])
    total = torch.stack(exchange(message)).sum(0)
    if total[-1] > 0:
        local.copy_(total[:-1].view_as(local))
        parameter.grad = gradient

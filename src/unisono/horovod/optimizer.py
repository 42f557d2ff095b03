"""`DistributedOptimizer`: a torch optimizer whose step is that of all workers, by Horovod's interface.

The exchange of each gradient starts as soon as backward has accumulated it; `synchronize` waits for all, and `step`
calls it.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.horovod.compression import Compression, notation_of
from unisono.horovod.errors import InvalidArgument
from unisono.horovod.fixed_order import FixedOrder
from unisono.horovod.gradient_exchange import Finish, GradientExchange
from unisono.horovod.participant import current, is_initialized
from unisono.horovod.process_sets import ProcessSet, global_process_set
from unisono.horovod.reductions import Adasum, Average, ReduceOp

Buckets = Sequence[Sequence[Tensor]]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the class of `optimizer`, with its state, whose steps all members take with reduced gradients.

    Gradients can be read and changed between ``optimizer.synchronize()`` and the step, which is then taken within
    ``with optimizer.skip_synchronize():``.

    Args:
        named_parameters: for instance ``model.named_parameters()``: all parameters of `optimizer`, by the names under
            which workers exchange gradients. None: by their places in `optimizer`.
        compression: `Compression.none`, `Compression.fp16`, a class with the same interface, or a compressor of
            Unisono such as ``unisono.TopK(0.01)``, with error feedback.
        backward_passes_per_step: backward passes before each step; their gradients add up.
        op: how gradients are reduced. With `Adasum`, each worker takes a step by itself, and those are reduced.
        gradient_predivide_factor: divides gradients before they are added up, and multiplies the mean.
        num_groups: deprecated; use `groups`.
        groups: a number of groups of parameters whose gradients are exchanged together, or these groups.
        sparse_as_dense: exchange sparse gradients as dense ones.

    Raises:
        InvalidArgument: parameters without names, names twice, or other arguments that cannot work together.
    """
    if num_groups:
        warnings.warn("num_groups= is deprecated: use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step < 1:
        raise InvalidArgument("backward_passes_per_step", backward_passes_per_step, "is less than 1", "use 1 or more")
    exchange = GradientExchange(compression, notation_of(compression), ReduceOp(op), gradient_predivide_factor,
                                sparse_as_dense, process_set)  # fmt: skip
    base = _LocalSteps if op == Adasum else _ReducedGradients
    kind = type(type(optimizer).__name__, (base, type(optimizer)), {})
    distributed: Any = object.__new__(kind)
    # A scheduler made before replaces the step of its own optimizer, which is not the one that is taken.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed.distribute(_named(optimizer, named_parameters), exchange, backward_passes_per_step, groups)
    return distributed


class _Distributed(Optimizer):
    """What both kinds of distributed optimizer have in common. Made by `distribute`, not by a constructor."""

    def distribute(
        self,
        names: dict[Tensor, str],
        exchange: GradientExchange,
        backward_passes_per_step: int,
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        """Begin to exchange gradients."""
        self._parameter_names, self._exchange = names, exchange
        self.backward_passes_per_step = backward_passes_per_step
        self._bucket_of = _buckets(list(names), groups)
        self._passes: Counter[Tensor] = Counter()
        self._started: dict[Tensor, Finish] = {}
        self._synchronized, self._skips, self._in_step = False, False, False
        hook = partial(_accumulated, weakref.ref(self))  # which lets an optimizer end before its parameters
        for parameter in names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)
        self._prepare(grouped=groups is not None)

    def _prepare(self, *, grouped: bool) -> None:
        """Gradients are about to be exchanged; `grouped`: in groups of the caller's."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Take `passes` backward passes before each step, from the next step on."""
        self.backward_passes_per_step = passes
        self._passes.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's.

        Raises:
            AssertionError: gradients are in flight.
        """
        if self._started:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward, and before optimizer.step() or "
                "optimizer.synchronize(), while gradients are in flight"
            )
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `InvalidArgument`: the gradients of new parameters would not be exchanged."""
        raise InvalidArgument("param_group", "(new)", "parameters cannot be added to a distributed optimizer",
                              "add them to the optimizer before, and name them all")  # fmt: skip

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's. What was accumulated for the next step does not count any more."""
        self._passes.clear()
        self._started.clear()
        self._synchronized = self._in_step = False
        super().load_state_dict(state_dict)

    def accumulated(self, parameter: Tensor) -> None:
        """Backward has added to the gradient of `parameter`."""
        if not self._begun():
            return
        if self._passes[parameter] >= self.backward_passes_per_step:
            raise AssertionError(
                f"{self._parameter_names[parameter]} had more backward passes than backward_passes_per_step = "
                f"{self.backward_passes_per_step} before optimizer.step(): increase it"
            )
        self._passes[parameter] += 1
        self._counted(parameter)

    def _counted(self, parameter: Tensor) -> None:
        """A backward pass was counted for `parameter`."""

    def _begun(self) -> bool:
        """Begin a step, unless that was done; returns whether gradients are exchanged in it."""
        if not self._in_step and self._exchanged():  # other workers may join later
            self._in_step = True
            self._begin()
        return self._in_step

    def _begin(self) -> None:
        """A step begins."""

    def _exchanged(self) -> bool:
        return is_initialized() and current().size > 1 and bool(self._exchange.process_set.included())


def _accumulated(optimizer: weakref.ref[_Distributed], parameter: Tensor) -> None:
    if (found := optimizer()) is not None:
        found.accumulated(parameter)


class _ReducedGradients(_Distributed):
    """Takes the step of the reduced gradients."""

    def _prepare(self, *, grouped: bool) -> None:
        names, exchange = self._parameter_names, self._exchange
        compress = None if grouped else exchange.fixed_compressor(names)
        self._fixed = FixedOrder(names, exchange, compress) if compress else None

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's. What was accumulated for the next step does not count any more."""
        if self._fixed:
            self._fixed.discard()
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        """Collective: start what was not started, and wait for all gradients, which are reduced afterwards."""
        if self._begun():
            for parameter in self._parameter_names:
                if parameter.requires_grad and parameter not in self._started:
                    self._start(parameter)
            for finish in dict.fromkeys([self._finish_fixed, *self._started.values()]):
                finish()
            if self._fixed:
                self._fixed.end()
        self._started.clear()
        self._passes.clear()
        self._synchronized, self._in_step = True, False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context, `step` does not synchronize: the caller has done so."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Collective: synchronize, and step. Gradients that `closure` computes are synchronized each time."""
        if closure is not None:
            result: Any = super().step(self._synchronizing(closure))
        else:
            if self._synchronized and not self._skips:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "gradients are reduced twice",
                    stacklevel=2,
                )
            if not self._skips:
                self.synchronize()
            result = super().step()
        self._synchronized = False
        return result

    def _synchronizing(self, closure: Callable[[], float]) -> Callable[[], float]:
        def call() -> float:
            loss = closure()
            if not self._skips:
                self.synchronize()
            return loss

        return call

    def _counted(self, parameter: Tensor) -> None:
        bucket = [each for each in self._bucket_of[parameter] if each.requires_grad]
        if all(self._passes[each] == self.backward_passes_per_step for each in bucket):
            self._start(parameter)

    def _begin(self) -> None:
        if self._fixed:
            self._fixed.begin()

    def _finish_fixed(self) -> None:
        if self._fixed:
            self._fixed.finish()

    def _start(self, parameter: Tensor) -> None:
        """Start the bucket of `parameter`. Other workers may have gradients that are missing here."""
        if self._fixed and self._fixed.offer(parameter):
            self._started[parameter] = self._finish_fixed
            return
        bucket = [each for each in self._bucket_of[parameter] if each.requires_grad]
        for each in bucket:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        gradients = [each.grad for each in bucket if each.grad is not None]
        finish = self._exchange.start(self._parameter_names[bucket[0]], gradients)
        self._started.update(dict.fromkeys(bucket, finish))


class _LocalSteps(_Distributed):
    """Takes a step of this worker's own gradients, and reduces what it changed by Adasum."""

    def synchronize(self) -> None:
        """No effect: steps are exchanged, and not gradients."""

    def skip_synchronize(self) -> None:
        """Raises `AssertionError`: there is nothing to skip."""
        raise AssertionError("with op=hvd.Adasum steps are exchanged: there is no synchronize() to skip")

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Collective: step, and apply the reduction of all workers' changes instead of this worker's."""
        parameters = [p for p in self._parameter_names if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        result = super().step(closure)
        self._passes.clear()
        self._in_step = False
        if self._exchanged():
            with torch.no_grad():
                changes = [p - start for p, start in zip(parameters, before)]
                finishes = [
                    self._exchange.start(self._parameter_names[p], [change]) for p, change in zip(parameters, changes)
                ]
                for parameter, start, change, finish in zip(parameters, before, changes, finishes):
                    finish()
                    parameter.copy_(start + change)
        return result


def _named(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """The name of each parameter, in the order of the optimizer.

    Raises:
        InvalidArgument: as `DistributedOptimizer`.
    """
    own = [(f"{i}.{j}", p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    pairs = own if named is None else list(named)
    if wrong := [pair for pair in pairs if not isinstance(pair, tuple)]:
        raise InvalidArgument("named_parameters", type(wrong[0]).__name__, "is not a pair of name and parameter",
                              "pass model.named_parameters()")  # fmt: skip
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise InvalidArgument("named_parameters", ", ".join(twice), "is the name of several parameters",
                              "give each another name")  # fmt: skip
    names = {parameter: name for name, parameter in pairs}
    if unnamed := [place for place, parameter in own if parameter not in names]:
        raise InvalidArgument("named_parameters", f"{len(names)} names",
                              f"{len(unnamed)} parameters of the optimizer have none (by group and number: "
                              f"{', '.join(unnamed[:5])})", "name all of them, or leave the argument out")  # fmt: skip
    return {parameter: names[parameter] for _, parameter in own}


def _buckets(parameters: Sequence[Tensor], groups: int | Buckets | None) -> dict[Tensor, Sequence[Tensor]]:
    """The parameters that each parameter is exchanged with.

    Raises:
        InvalidArgument: `groups` is neither a number nor lists of parameters, each in one list.
    """
    if groups is None:
        return {parameter: [parameter] for parameter in parameters}
    if isinstance(groups, int):
        if groups < 1:
            raise InvalidArgument("groups", groups, "is less than 1", "use 1 or more, or leave it out")
        shares = torch.arange(len(parameters)).tensor_split(groups)
        groups = [[parameters[i] for i in share.tolist()] for share in shares]
    own, found = set(parameters), dict[Tensor, Sequence[Tensor]]()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, Tensor) or parameter in found:
                raise InvalidArgument("groups", type(parameter).__name__, "is no parameter, or is in two groups",
                                      "give lists of parameters, each in one list")  # fmt: skip
            found[parameter] = group
    return {
        parameter: [x for x in found.get(parameter, [parameter]) if x in own and _kind(x) == _kind(parameter)]
        for parameter in parameters
    }


def _kind(x: Tensor) -> tuple[torch.dtype, str]:
    """What tensors that are exchanged together have in common."""
    return x.dtype, x.device.type

"""Verifies in one process, before training, that a model computes the same on parts of a sequence as on the whole."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unisono.errors import InvalidInput
from unisono.layout.context.data_dependence import DataDependence
from unisono.layout.context.function_mode import attending
from unisono.layout.context.padding import Inputs, hide_padding
from unisono.layout.context.sequence_batch import loss_share, part_loss, sequence_length, take_part
from unisono.layout.context.sequence_split import SequenceSplit
from unisono.layout.context.threaded_group import ThreadedGroup, run_members
from unisono.layout.pipeline.rng_states import Generators
from unisono.tensors.batch import tensors

LOG = logging.getLogger("unisono")
Forward = Callable[[Any], Any]
_TRIALS = 8  # each with other weights; more than one only if the code reads values on which it may branch
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_CURE = (
    "let forward take the positions of its tokens as an input (position_ids, as in transformers), and mix tokens only"
    " in scaled_dot_product_attention; or use context=1"
)


def verify(
    model: nn.Module,
    sample: Any,
    size: int,
    *,
    balanced: bool = True,
    forward: Forward | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    weight: Callable[[Any], float] | None = None,
    inputs: Inputs = lambda batch: batch,
) -> None:
    """Compare outputs and gradients of `model` on `sample` with those of `size` simulated workers on its parts.

    Weights are temporarily perturbed, so that tables initialized with zeros count, and dropout of activations is off.
    Needs memory for the weights twice. Use sequence lengths of the training data: a constant in the model that equals
    the local length can be mistaken for that length.

    Args:
        model: the whole model, before it is wrapped or split.
        sample: a batch.
        forward: ``forward(batch)`` returns the model's output. Default: the model is called with the elements of a
            tuple, the items of a mapping as keywords, or else the batch itself.
        loss: the task's loss; if given, the sum of the parts' losses is compared with the loss of the whole too.
        weight: the task's weight, see `loss_share`.
        inputs: ``inputs(batch)`` returns the model's arguments. On parts, a padding mask among them (``attention_mask``
            in transformers) is hidden from the model, and passed to its attention.

    Raises:
        InvalidInput: outputs, losses or gradients differ; names the first module whose output differs, and a remedy.
    """
    split = SequenceSplit(sequence_length(sample), size, balanced)
    run = forward or (lambda batch: _call(model, batch))
    trial = _SplitComparison(model, sample, split, run, loss, weight, inputs)
    for seed in range(_TRIALS):
        found = trial.difference_with_noise(seed)
        if found:
            problem = f"{type(model).__name__} does not compute the same on parts of a sequence: {found}"
            raise InvalidInput("context", size, problem, _CURE)
        if not trial.reads_values:
            return
    if not trial.same_decisions:  # decisions differ between parts, and results do not
        return
    LOG.warning(
        "%s branches on values that it computes. In %d trials, parts of a sequence took the branches of the whole; "
        "in training, a part that takes another branch computes a different result than one worker",
        type(model).__name__,
        _TRIALS,
    )


@dataclass
class _SplitComparison:
    """Compares the model on the whole sequence and on its parts; has the arguments of `verify`, and observations.

    Attributes:
        reads_values: whether the code reads values that it computes.
        same_decisions: whether the code made the same decisions on all parts as on the whole sequence.
    """

    model: nn.Module
    sample: Any
    split: SequenceSplit
    run: Forward
    loss: Any
    weight: Any
    inputs: Inputs
    reads_values: bool = False
    same_decisions: bool = False

    def difference_with_noise(self, seed: int) -> str | None:
        """A description of the difference with perturbed weights and without dropout; None if there is none."""
        with _perturbed(self.model, seed), _NoDropout():
            try:
                return self.difference()
            except InvalidInput:
                raise
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                return f"it cannot run on a part of a sequence ({type(error).__name__}: {str(error).splitlines()[0]})"

    def difference(self) -> str | None:
        """A description of the difference; None if there is none."""
        split, model = self.split, self.model
        sample, keys = hide_padding(self.sample, self.inputs, split.length)
        parts = [take_part(sample, split, r) for r in range(split.size)]
        idents, asked = [0] * split.size, [DataDependence(model.parameters()) for _ in range(split.size + 1)]

        def member(peers: ThreadedGroup) -> Any:
            idents[peers.rank] = threading.get_ident()
            with _NoDropout(), attending(peers, split, "gather", keys), asked[peers.rank]:
                return self.run(parts[peers.rank])

        generators = Generators(next(model.parameters()).device)
        drawn = generators.states()
        with _module_outputs(model) as notes:
            with asked[-1]:
                output = self.run(self.sample)
            outputs = run_members(split.size, member, generators, drawn)
        self.same_decisions = all(each.decisions == asked[-1].decisions for each in asked)
        self.reads_values = bool(asked[-1].answers)
        differs = _first_module(notes[threading.get_ident()], [notes[i] for i in idents], split)
        joined = [_join(pieces, of, split, 1) for of, *pieces in zip(tensors(output), *map(tensors, outputs))]
        if any(got is not None and not _close(got, want) for got, want in zip(joined, tensors(output))):
            return f"the output differs{differs}"
        if self.loss is None:
            goal, goals = _weighted_sum(list(tensors(output))), _weighted_sum([x for x in joined if x is not None])
        else:
            shares = [loss_share(self.weight, sample, split, r) for r in range(split.size)]
            goal = self.loss(output, self.sample)
            goals = torch.stack([part_loss(self.loss, *of) for of in zip(outputs, parts, shares)]).sum()
            if not _close(goals, goal):
                return (
                    f"the parts' losses add up to {goals.item():.6g} instead of {goal.item():.6g}, with equal outputs"
                    " (does the loss look at several tokens? does the task's weight count the tokens that the loss "
                    "does?)"
                )
        return _gradients(model, goal, goals, differs)


def _gradients(model: nn.Module, goal: Tensor, goals: Tensor, differs: str) -> str | None:
    names, weights = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    want = torch.autograd.grad(goal, weights, allow_unused=True)
    got = torch.autograd.grad(goals, weights, allow_unused=True)
    scale = max((float(g.to_dense().abs().max()) for g in want if g is not None and g.numel()), default=0.0)
    for name, a, b in zip(names, got, want):
        a, b = (torch.zeros(()) if g is None else g.to_dense() for g in (a, b))
        if not _close(a, b, scale * 1e-2):
            return f"the gradient of {name} differs{differs}"
    return None


def _first_module(whole: Mapping[str, Tensor], parts: list[dict[str, Tensor]], split: SequenceSplit) -> str:
    for name, want in whole.items():
        pieces = [part[name] for part in parts if name in part]
        joined = [_join(pieces, want, split, d) for d in range(want.dim()) if len(pieces) == split.size]
        if any(got is not None and not _close(got, want) for got in joined):
            return f", first in {name}"
    return ""


def _join(pieces: list[Tensor], want: Tensor, split: SequenceSplit, dim: int) -> Tensor | None:
    """The parts joined to the shape of `want`; None if they are not parts along `dim`."""
    cut = (*want.shape[:dim], split.local, *want.shape[dim + 1 :])
    if want.dim() <= dim or want.shape[dim] != split.length or any(piece.shape != cut for piece in pieces):
        return None
    return split.join(pieces, dim)


def _weighted_sum(outputs: list[Tensor]) -> Tensor:
    """A scalar in which every output element has a different weight."""
    floating = [x for x in outputs if x.is_floating_point() and x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    return torch.stack([
        (x.float() * torch.randn(x.shape, generator=generator).to(x.device)).mean() for x in floating
    ]).sum()  # fmt: skip


def _close(got: Tensor, want: Tensor, least: float = 0.0) -> bool:
    """Whether `got` is `want` up to rounding in another order of summation, relative to the magnitude of `want`."""
    if not want.is_floating_point():
        return bool((got == want).all())
    rough = 5e-2 if want.dtype in (torch.bfloat16, torch.float16) else 1e-4
    got, want = got.detach().double(), want.detach().double()
    scale = float(want.abs().nan_to_num(0.0, 0.0, 0.0).max()) if want.numel() else 0.0
    return torch.allclose(got, want, rtol=0.0, atol=rough * max(scale, least, 1e-12), equal_nan=True)


@contextmanager
def _module_outputs(model: nn.Module) -> Iterator[dict[int, dict[str, Tensor]]]:
    """A context that records the first output of each module, by thread and by name, in order of completion."""
    notes: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                notes[threading.get_ident()].setdefault(name, output.detach())

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _perturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """A context with noise added to the weights; on exit, weights and buffers have their former bits."""
    generator = torch.Generator().manual_seed(seed)
    weights = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        for p, kept in weights:
            p.data = kept + 0.05 * torch.randn(p.shape, generator=generator).to(kept)
        yield
    finally:
        for p, kept in weights:
            p.data = kept
        for b, before in buffers:
            b.copy_(before)


class _NoDropout(TorchFunctionMode):
    """Disables dropout of activations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

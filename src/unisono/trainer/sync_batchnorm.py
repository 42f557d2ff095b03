"""Batch normalisation over the workers' concurrent micro-batches, on any device (torch's own works on GPUs only)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.comm import Communicator
from unisono.errors import UnisonoError


class SyncBatchNorm(_BatchNorm):
    """Normalises ``[samples, features, ...]`` by the mean and variance over all workers' micro-batches.

    Ioffe & Szegedy 2015, algorithm 1, over the union of the batches; workers' means and sums of squares are merged in
    the order of ranks (Chan et al. 1979, eq. 2.1), which does not cancel as the mean of squares would. All workers then
    hold the same running statistics. Each must call the same layers in the same order.

    Attributes:
        names: of all such layers of the model; this one's is at `number`.
    """

    comm: Communicator
    names: Sequence[str] = ("it",)
    number: int = 0
    buffers_agree = True  # see `BufferSync`

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm wants [samples, features, ...], not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalised `input`, of its shape; updates the running statistics in training.

        Raises:
            UnisonoError: another worker calls another layer.
        """
        if not self.training or self.comm.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.comm, self.number, self.names
        )
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), factor)
        assert isinstance(output, Tensor)
        return output


def synchronize_batchnorm(model: nn.Module, comm: Communicator) -> nn.Module:
    """`model` with every BatchNorm layer in it replaced by a `SyncBatchNorm` that holds the same tensors."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    made = {id(m): _synchronized(m, comm, tuple(layers), i) for i, m in enumerate(layers.values())}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # a layer that is used twice is here twice
            parent._modules[name] = made.get(id(child), child)
    return made.get(id(model), model)


def _synchronized(layer: _BatchNorm, comm: Communicator, names: Sequence[str], number: int) -> SyncBatchNorm:
    new = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
    )
    new.comm, new.training, new.names, new.number = comm, layer.training, names, number
    new._parameters, new._buffers = layer._parameters, layer._buffers
    return new


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        comm: Communicator,
        number: int,
        names: Sequence[str],
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        features, over = x.shape[1], [0, *range(2, x.dim())]
        shape = [1, features] + [1] * (x.dim() - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        near, n = wide.mean(over), x.numel() // features
        centred = wide - near.view(shape)
        # What `near` was rounded by; beside a mean that is large for the deviations it would not be small.
        rest = centred.mean(over).double()
        squares = centred.square().sum(over).double() - n * rest.square()
        mine = torch.cat([rest.new_tensor([float(number)]), near + rest, squares, rest.new_tensor([float(n)])])
        rows = comm.gather(mine).wait()
        _check_alike(rows[:, 0].tolist(), names)
        mean, squares, count = _merge(rows[:, 1:], features)
        variance = squares / count
        inverse = torch.rsqrt(variance + eps).to(wide.dtype)
        normal = centred.sub_((mean - near).to(wide.dtype).view(shape)).mul_(inverse.view(shape))
        output = normal if weight is None else normal * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.comm, ctx.count, ctx.over, ctx.shape, ctx.affine = comm, count, over, shape, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, inverse, weight = ctx.saved_tensors
        g = gradient.to(normal.dtype)
        of_bias, of_weight = g.sum(ctx.over), (g * normal).sum(ctx.over)
        sums = ctx.comm.sum(torch.cat([of_bias, of_weight])).wait() / ctx.count
        of_mean, of_scale = (half.view(ctx.shape) for half in sums.chunk(2))
        factor = inverse if weight is None else inverse * weight
        of_x = (g - of_mean - normal * of_scale) * factor.view(ctx.shape)
        return (
            of_x.to(gradient.dtype),
            None if weight is None else of_weight,
            of_bias if ctx.affine else None,
            *[None] * 4,
        )


def _check_alike(numbers: Sequence[float], names: Sequence[str]) -> None:
    for worker, number in enumerate(numbers):
        if number != numbers[0]:
            here, there = (names[int(which)] for which in (numbers[0], number))
            raise UnisonoError(
                f"sync_batchnorm: worker 0 calls {here} while worker {worker} calls {there}; let all workers call the "
                "same layers in every pass, or set sync_batchnorm=False"
            )


def _merge(rows: Tensor, features: int) -> tuple[Tensor, Tensor, float]:
    """Mean, sum of squared deviations and count of the union, from ``[mean, squares, count]`` of each worker."""
    mean, squares, count = rows[0, :features], rows[0, features:-1], float(rows[0, -1])
    for row in rows[1:]:
        m = float(row[-1])
        delta, total = row[:features] - mean, count + m
        squares = squares + row[features:-1] + delta.square() * (count * m / total)
        mean = mean + delta * (m / total)
        count = total
    return mean, squares, count

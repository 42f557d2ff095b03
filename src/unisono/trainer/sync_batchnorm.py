"""Batch normalization over the concurrent micro-batches of all workers, on any device (torch's needs GPUs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.comm import Communicator
from unisono.errors import UnisonoError


class SyncBatchNorm(_BatchNorm):
    """Normalizes ``[samples, features, ...]`` by the mean and variance over the micro-batches of all workers.

    Collective in training: all workers must call the same layers in the same order. Ioffe & Szegedy 2015, algorithm 1,
    over the union of the batches. Means and sums of squared deviations are merged in the order of ranks (Chan et al.
    1979, eq. 2.1), which avoids the cancellation in a mean of squares. Running statistics are equal on all workers.

    Attributes:
        comm: the communicator of the workers.
        names: the names of all such layers of the model.
        number: the index of this layer in `names`.
    """

    comm: Communicator
    names: Sequence[str] = ("it",)
    number: int = 0
    buffers_agree = True  # see `BufferSync`

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm expects [samples, features, ...], not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; updates the running statistics in training. The output has the shape of `input`.

        Raises:
            UnisonoError: workers call different layers.
        """
        if not self.training or self.comm.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
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
    """`model` with every BatchNorm layer replaced by a `SyncBatchNorm` with the same tensors."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    replacements = {id(m): _synchronized(m, comm, tuple(layers), i) for i, m in enumerate(layers.values())}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # a layer can have several parents
            parent._modules[name] = replacements.get(id(child), child)
    return replacements.get(id(model), model)


def _synchronized(layer: _BatchNorm, comm: Communicator, names: Sequence[str], number: int) -> SyncBatchNorm:
    new = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
    )
    new.comm, new.training, new.names, new.number = comm, layer.training, names, number
    new._parameters, new._buffers = layer._parameters, layer._buffers
    return new


class _Normalize(torch.autograd.Function):
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
        features, dims = x.shape[1], [0, *range(2, x.dim())]
        shape = [1, features] + [1] * (x.dim() - 2)
        promoted = x.to(torch.promote_types(x.dtype, torch.float32))
        rough_mean, n = promoted.mean(dims), x.numel() // features
        centered = promoted - rough_mean.view(shape)
        # The rounding error of `rough_mean`, which is not small if the mean is large compared with the deviations.
        correction = centered.mean(dims).double()
        squares = centered.square().sum(dims).double() - n * correction.square()
        statistics = torch.cat(
            [
                correction.new_tensor([float(number)]),
                rough_mean + correction,
                squares,
                correction.new_tensor([float(n)]),
            ]
        )
        rows = comm.gather(statistics).wait()
        _check_same_layer(rows[:, 0].tolist(), names)
        mean, squares, count = _merge(rows[:, 1:], features)
        variance = squares / count
        inverse = torch.rsqrt(variance + eps).to(promoted.dtype)
        normal = centered.sub_((mean - rough_mean).to(promoted.dtype).view(shape)).mul_(inverse.view(shape))
        output = normal if weight is None else normal * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.comm, ctx.count, ctx.dims, ctx.shape, ctx.affine = comm, count, dims, shape, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, inverse, weight = ctx.saved_tensors
        g = gradient.to(normal.dtype)
        bias_gradient, weight_gradient = g.sum(ctx.dims), (g * normal).sum(ctx.dims)
        sums = ctx.comm.sum(torch.cat([bias_gradient, weight_gradient])).wait() / ctx.count
        mean_term, scale_term = (half.view(ctx.shape) for half in sums.chunk(2))
        factor = inverse if weight is None else inverse * weight
        x_gradient = (g - mean_term - normal * scale_term) * factor.view(ctx.shape)
        return (
            x_gradient.to(gradient.dtype),
            None if weight is None else weight_gradient,
            bias_gradient if ctx.affine else None,
            *[None] * 4,
        )


def _check_same_layer(numbers: Sequence[float], names: Sequence[str]) -> None:
    for worker, number in enumerate(numbers):
        if number != numbers[0]:
            first, other = (names[int(index)] for index in (numbers[0], number))
            raise UnisonoError(
                f"sync_batchnorm: worker 0 calls {first} while worker {worker} calls {other}; let all workers call the "
                "same layers in every pass, or set sync_batchnorm=False"
            )


def _merge(rows: Tensor, features: int) -> tuple[Tensor, Tensor, float]:
    """The mean, sum of squared deviations and count of all samples, from each worker's ``[mean, squares, count]``."""
    mean, squares, count = rows[0, :features], rows[0, features:-1], float(rows[0, -1])
    for row in rows[1:]:
        m = float(row[-1])
        delta, total = row[:features] - mean, count + m
        squares = squares + row[features:-1] + delta.square() * (count * m / total)
        mean = mean + delta * (m / total)
        count = total
    return mean, squares, count

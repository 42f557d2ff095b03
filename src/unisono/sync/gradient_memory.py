"""The memory of the mean gradients in ``parameter.grad``: one flat tensor per bucket, of this worker alone.

The result of a reduction may be memory that peers read, and it changes with the next reduction. A user may write into a
gradient, and may keep it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from unisono.compress import views
from unisono.sync.bucket_reduction import RoundMeans
from unisono.sync.buckets import BucketPlan

_OWN_REFERENCES = 3  # of a view: the list of views, a loop variable and the argument of `getrefcount`


class GradientMemory:
    """Writes means of the same buckets into ``parameter.grad``, round after round."""

    def __init__(self) -> None:
        self._buckets: list[_Flat] = []

    def write(
        self, means: RoundMeans, scale: float, parameters: Mapping[str, nn.Parameter], sparse: Collection[str]
    ) -> None:
        """Add ``scale * mean`` to every ``grad``; one that is None stays None if no worker used the parameter.

        Args:
            sparse: names of the parameters that get a sparse gradient.
        """
        self._buckets = self._buckets or [_Flat(plan) for plan in means.plans]
        unused = means.unused
        for bucket, mean in zip(self._buckets, means.flats()):
            for span, part in zip(bucket.plan.spans, bucket.parts(mean, scale, parameters)):
                if span.name in unused:
                    continue
                parameter = parameters[span.name]
                gradient = part.to_sparse(1) if span.name in sparse else part
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _Flat:
    """The memory of one bucket, and a view of it for each parameter."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan
        self._views: list[Tensor] = []
        self._flat = torch.empty(0)

    def parts(self, mean: Tensor, scale: float, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """``scale * mean``, one tensor per parameter: in this memory, unless a ``grad`` is there, to which it is added.

        Memory that a user still refers to is not used again.
        """
        if any(parameters[span.name].grad is not None for span in self.plan.spans):
            return views(mean.mul(scale), self.plan.spans)
        if not self._views or self._is_shared():
            self._flat = torch.empty_like(mean)
            self._views = [_without_base(view) for view in views(self._flat, self.plan.spans)]
        torch.mul(mean, scale, out=self._flat) if scale != 1.0 else self._flat.copy_(mean)
        return self._views

    def _is_shared(self) -> bool:
        """Whether anything but this object refers to the memory."""
        tensors = torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)
        return tensors > len(self._views) + 2 or any(sys.getrefcount(view) > _OWN_REFERENCES for view in self._views)


def _without_base(view: Tensor) -> Tensor:
    """The same memory as a tensor that is no view for autograd, so that users may detach it in place."""
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(
        view.untyped_storage(), view.storage_offset(), view.shape, view.stride()
    )

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
        self._buckets: dict[str, _Flat] = {}  # by the name of the first parameter

    def take(self, plan: BucketPlan, more: int) -> Tensor:
        """Memory for the mean of the bucket `plan` and `more` numbers, to which no gradient of a user's refers."""
        return self._of(plan).take(more)

    def _of(self, plan: BucketPlan) -> _Flat:
        first = plan.spans[0].name if plan.spans else ""
        if first not in self._buckets:
            self._buckets[first] = _Flat(plan)
        return self._buckets[first]

    def write(
        self, means: RoundMeans, scale: float, parameters: Mapping[str, nn.Parameter], sparse: Collection[str]
    ) -> None:
        """Add ``scale * mean`` to every ``grad``; one that is None stays None if no worker used the parameter.

        Args:
            sparse: names of the parameters that get a sparse gradient.
        """
        unused = means.unused
        for plan, mean in zip(means.plans, means.flats()):
            for span, part in zip(plan.spans, self._of(plan).parts(mean, scale, parameters)):
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

    def take(self, more: int) -> Tensor:
        """This memory, or other memory, if a user still refers to it."""
        plan = self.plan
        if not self._views or self._is_shared() or self._flat.numel() != plan.numel + more:
            self._flat = torch.empty(plan.numel + more, dtype=plan.dtype, device=plan.device)
            self._views = [_without_base(view) for view in views(self._flat, plan.spans)]
        return self._flat

    def parts(self, mean: Tensor, scale: float, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """``scale * mean``, one tensor per parameter: in this memory, unless a ``grad`` is there, to which it is added.

        Args:
            mean: in the memory that was taken last, or elsewhere.
        """
        if any(parameters[span.name].grad is not None for span in self.plan.spans):
            return views(mean.mul(scale), self.plan.spans)
        inside = mean.data_ptr() == self._flat.data_ptr()
        target = mean if inside else self.take(0)
        if scale != 1.0:
            torch.mul(mean, scale, out=target)
        elif not inside:
            target.copy_(mean)
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

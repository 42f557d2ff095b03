"""The gradients of one optimizer that are exchanged without negotiation.

    step 1        each gradient is negotiated, which shows which of them are sparse
    step 2        the workers compare what they want to exchange
    from step 3   if it is the same, gradients are added to the buckets of a `FixedExchange`, which leave as they fill

After a `join`, and in a new group, steps are counted anew, so that all workers compare in the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from unisono.compress import Compressor
from unisono.horovod.fixed_exchange import FixedExchange, FixedExchanges, FixedPlan
from unisono.horovod.gradient_exchange import GradientExchange, write
from unisono.horovod.handle import Handle
from unisono.horovod.participant import current

_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class FixedOrder:
    """The part of an optimizer's gradients that is exchanged without negotiation.

    Per step: `begin` before the first gradient; `offer` for each; `finish`, and `end` once all are reduced.

    Args:
        names: of all parameters of the optimizer.
        exchange: how they are exchanged.
        compress: of the same effect as that of `exchange`.
    """

    def __init__(self, names: Mapping[Tensor, str], exchange: GradientExchange, compress: Compressor) -> None:
        self._names, self._how, self._compress = names, exchange, compress
        self._joins = 0
        self._use(None)

    def _use(self, exchanges: FixedExchanges | None) -> None:
        """Begin in a new group."""
        self._exchanges = exchanges
        self._exchange: FixedExchange | None = None
        self._exchanged: dict[Tensor, str] = {}  # the parameters that are part of it
        self._dense: set[Tensor] = set()  # those that could be
        self._negotiated: list[Tensor] = []  # in this step
        self._comparing: Handle | None = None
        self._steps = 0

    def begin(self) -> None:
        """Collective in the second step, and where the parameters have changed: compare them with the other workers.

        Raises:
            HorovodInternalError: a worker is lost.
        """
        own = current()
        if own.fixed is not self._exchanges:
            self._use(own.fixed)
        if own.fixed is None or own.device.type != "cpu":
            return  # on GPUs, NCCL wants the operations of all channels in one order
        if own.fixed.joins != self._joins:
            self._joins, self._steps = own.fixed.joins, 0
        if self._steps and self._comparing is None and self._dense and self._dense != self._exchanged.keys():
            parameters = {name: cast(nn.Parameter, p) for p, name in self._names.items() if p in self._dense}
            plan = FixedPlan.of(parameters, self._compress.for_sums_of(own.size), self._how.weight(own.size))
            self._comparing = own.compare(self, self._exchange, plan)

    def offer(self, parameter: Tensor) -> bool:
        """Exchange the gradient of `parameter`, if it is a part; returns whether it is.

        Raises:
            InvalidArgument: a gradient of that name is in flight.
        """
        name, gradient = self._exchanged.get(parameter), parameter.grad
        is_sparse = gradient is not None and gradient.is_sparse
        if self._exchange is None or name is None or (is_sparse and not self._how.sparse_as_dense):
            self._negotiated.append(parameter)
            return False
        if gradient is not None:  # else zeros, which need not be added
            self._exchange.offer(self, name, gradient.to_dense() if is_sparse else gradient)
        return True

    def finish(self) -> None:
        """Collective: wait for the exchange, if there is one, and write the results into the gradients.

        Raises:
            HorovodInternalError: a worker is lost.
        """
        if self._exchange is None:
            return
        sums, own = self._exchange.finish(self), current()
        divisor = self._how.divisor(own.size)
        with torch.no_grad():
            for parameter, name in self._exchanged.items():
                total, gradient = sums[name], parameter.grad
                if total is None:  # no worker has one
                    if parameter.requires_grad and gradient is None:
                        parameter.grad = torch.zeros_like(parameter)
                elif gradient is None:
                    parameter.grad = torch.div(total, divisor, out=torch.empty_like(parameter))
                elif gradient.is_sparse:
                    write([gradient], [total / divisor])
                else:
                    torch.div(total, divisor, out=gradient)
        own.timeline.exchanged(f"gradients.{next(iter(self._exchanged.values()))}", self._exchange.began)

    def end(self) -> None:
        """All gradients of the step are reduced."""
        for parameter in self._negotiated:
            is_sparse = parameter.grad is not None and parameter.grad.is_sparse and not self._how.sparse_as_dense
            if is_sparse or parameter.dtype not in _DTYPES or parameter.device.type != "cpu":
                self._dense.discard(parameter)
            else:
                self._dense.add(parameter)
        self._negotiated.clear()
        self._steps += 1
        if self._comparing is not None and self._exchanges is not None:
            handle, self._comparing = self._comparing, None
            if (exchange := current().wait(handle)) is not None:
                self._exchange = exchange
                self._exchanged = {p: name for p, name in self._names.items() if name in exchange.plan.names}
                self._exchanges.use(self, exchange)

    def discard(self) -> None:
        """The gradients of this step do not count."""
        self._negotiated.clear()
        if self._exchange is not None:
            self._exchange.discard(self)

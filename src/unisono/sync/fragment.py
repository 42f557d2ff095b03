"""A fragment of the parameters, with the anchor from which all replicas take local steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Compressor, views
from unisono.sync.bucket_reduction import BucketedReduction
from unisono.sync.buckets import BucketPlan, plan_buckets
from unisono.sync.outer_optimizer import Outer

_BUCKET_BYTES = 8 << 20
_UNLIMITED = 1 << 62  # bytes: with one bucket, an exchange in the background needs no poll between buckets


class Fragment:
    """Exchanges the local updates of some parameters, and updates their anchor.

    An exchange is `send`, `poll` during training, `receive`:

        send        g_i = anchor - theta_i                  summed, compressed, over all replicas i
        receive     anchor <- outer(anchor, mean of g_i)
                    theta_i <- mix theta_i + (1 - mix) anchor

    In the mean, replica i has weight n_i / n, as in federated averaging (McMahan et al. 2017, algorithm 1): n_i is the
    weight of its samples since the last exchange, n that of all replicas. The n_i are sent with the g_i, which are
    divided by the usual n before they are summed.

    Args:
        comm: a channel that nothing else uses.
        reference: the usual sum of the weights of one step over all replicas.
        mix: the fraction of a replica's weights that stays when the anchor is mixed in.
        delayed: whether training continues between `send` and `receive`.
        control: the length of the control word that is sent with the update.

    Attributes:
        sent: whether an exchange is in flight, between `send` and `receive`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        outer: Outer,
        *,
        mix: float,
        delayed: bool,
        control: int,
        reference: float,
    ) -> None:
        self._parameters, self._outer, self._mix = parameters, outer, mix
        self._rank, self._size, self._reference = comm.rank, comm.size, reference
        self._steps, self._weight, self._usual = 0, 0.0, reference
        bucket_bytes = _UNLIMITED if delayed else _BUCKET_BYTES
        plans = plan_buckets(parameters, compress, bucket_bytes, bucket_bytes)
        self._reduction = BucketedReduction(plans, comm, control=comm.size + control, overlap=False)
        self._anchor = Flat(plans)
        self._velocity = Flat(plans if outer.has_velocity else [])
        self.sent = False
        self.set_anchor()

    @property
    def anchor(self) -> Mapping[str, Tensor]:
        """The anchor by name, the same on all replicas."""
        return self._anchor.named

    @property
    def velocity(self) -> Mapping[str, Tensor]:
        """The state of the outer optimizer by name, the same on all replicas."""
        return self._velocity.named

    @torch.no_grad()
    def set_anchor(self) -> None:
        """Set the anchor to the parameters, which are the same on all replicas."""
        for name, parameter in self._parameters.items():
            self._anchor.named[name].copy_(parameter)

    def count_step(self, weight: float) -> None:
        """Count one more local step of this replica; `weight` is the weight of its samples."""
        self._steps, self._weight = self._steps + 1, self._weight + weight

    def reset_count(self) -> None:
        """Reset the counts, because all replicas have the same parameters."""
        self._steps, self._weight = 0, 0.0

    @torch.no_grad()
    def send(self, control: list[float]) -> None:
        """Start the exchange of the local updates, and return at once."""
        self._usual = self._reference * self._steps
        weights = [self._weight if rank == self._rank else 0.0 for rank in range(self._size)]
        self._reduction.begin()
        self._reduction.close(weights + control)
        for name, parameter in self._parameters.items():
            self._reduction.add(name, self._anchor.named[name] - parameter, self._weight / self._usual)
        self.sent = True
        self.reset_count()
        self._reduction.launch()

    def residual_state(self) -> dict[str, Tensor]:
        """See `BucketedReduction.residual_state`."""
        return self._reduction.residual_state()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """See `BucketedReduction.load_residuals`."""
        self._reduction.load_residuals(residuals)

    def poll(self) -> None:
        """Let an exchange in flight make progress, without blocking."""
        if self.sent:
            self._reduction.poll()

    @torch.no_grad()
    def receive(self) -> list[float]:
        """Collective: wait for the mean update, apply it to anchor and parameters, return the sum of control words.

        Raises:
            PeerLost, MessageMismatch: neither anchor nor parameters have changed.
        """
        mean = self._reduction.wait()
        weights, control = mean.control[: self._size], mean.control[self._size :]
        total = math.fsum(weights)
        flats = mean.flats(self._usual / total if total else 1.0)
        for anchor, gradient, velocity in zip_longest(self._anchor.flats, flats, self._velocity.flats):
            self._outer.update(anchor, gradient, velocity)
        self._reduction.commit()
        self.sent = False
        for name, parameter in self._parameters.items():
            if self._mix:
                parameter.lerp_(self._anchor.named[name], 1.0 - self._mix)
            else:
                parameter.copy_(self._anchor.named[name])
        return control


class Flat:
    """One flat tensor for each bucket plan, initially 0.

    Attributes:
        named: views of the flat tensors by the parameters' names, in the parameters' shapes and memory formats.
    """

    def __init__(self, plans: Sequence[BucketPlan]) -> None:
        self.flats = [torch.zeros(c.numel, dtype=c.dtype, device=c.device) for c in plans]
        self.named = {
            span.name: view for flat, c in zip(self.flats, plans) for span, view in zip(c.spans, views(flat, c.spans))
        }

"""Some of the parameters, and the anchor from which all replicas walk with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.compress import Compressor, views
from unisono.sync.bucket_reduction import BucketedReduction
from unisono.sync.buckets import Cut
from unisono.sync.outer_optimizer import Outer

_BUCKET_BYTES = 8 << 20
_WHOLE = 1 << 62  # bytes: no exchange that nobody waits for should wait for somebody to poll between its buckets


class Fragment:
    """Per exchange: `send`, `poll` while training goes on, `take_in`.

        send        g_i = anchor - theta_i                  add up, compressed, over all replicas i
        take in     anchor <- outer(anchor, mean of g_i)
                    theta_i <- mix theta_i + (1 - mix) anchor

    In the mean a replica counts n_i / n, as in federated averaging (McMahan et al. 2017, algorithm 1): n_i is what its
    samples since the last exchange weigh, n what all replicas' do. The n_i travel with the g_i, which are divided by
    what n usually is before they are added up.

    Args:
        comm: a lane of its own.
        reference: what the weights of one step usually add up to over all replicas.
        mix: how much of a replica's own weights stays.
        delayed: whether training goes on between `send` and `take_in`.
        control: length of the control word that travels along.

    Attributes:
        sent: between `send` and `take_in`.
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
        bucket_bytes = _WHOLE if delayed else _BUCKET_BYTES
        self._reduction = BucketedReduction(
            parameters,
            comm,
            compress,
            bucket_bytes=bucket_bytes,
            first_bytes=bucket_bytes,
            control=comm.size + control,
            overlap=False,
        )
        cuts = self._reduction.cuts
        self._anchor = Flat(cuts)
        self._velocity = Flat(cuts if outer.remembers else [])
        self.sent = False
        self.anchor_here()

    @property
    def anchor(self) -> Mapping[str, Tensor]:
        """By name: the same on all replicas."""
        return self._anchor.named

    @property
    def velocity(self) -> Mapping[str, Tensor]:
        """By name: what the outer optimizer remembers, the same on all replicas."""
        return self._velocity.named

    @torch.no_grad()
    def anchor_here(self) -> None:
        """The parameters, which are the same on all replicas, are the anchor from now on."""
        for name, parameter in self._parameters.items():
            self._anchor.named[name].copy_(parameter)

    def count(self, weight: float) -> None:
        """This replica has taken one more local step, with samples of that weight."""
        self._steps, self._weight = self._steps + 1, self._weight + weight

    def forget(self) -> None:
        """All replicas have the same parameters: what is counted begins anew."""
        self._steps, self._weight = 0, 0.0

    @torch.no_grad()
    def send(self, control: list[float]) -> None:
        """Start the exchange of the walks; returns at once."""
        self._usual = self._reference * self._steps
        weights = [self._weight if rank == self._rank else 0.0 for rank in range(self._size)]
        self._reduction.begin()
        self._reduction.close(weights + control)
        for name, parameter in self._parameters.items():
            self._reduction.add(name, self._anchor.named[name] - parameter, self._weight / self._usual)
        self.sent = True
        self.forget()
        self._reduction.launch()

    def residual_state(self) -> dict[str, Tensor]:
        """See `BucketedReduction.residual_state`."""
        return self._reduction.residual_state()

    def load_residuals(self, owed: Mapping[str, Tensor]) -> None:
        """See `BucketedReduction.load_residuals`."""
        self._reduction.load_residuals(owed)

    def poll(self) -> None:
        """Go on without waiting."""
        if self.sent:
            self._reduction.poll()

    @torch.no_grad()
    def take_in(self) -> list[float]:
        """Wait for the mean walk, move the anchor and the parameters; the sum of all control words.

        Raises:
            PeerLost, MessageMismatch: nothing has moved.
        """
        mean = self._reduction.wait()
        weights, control = mean.control[: self._size], mean.control[self._size :]
        total = math.fsum(weights)
        flats = mean.flats(self._usual / total if total else 1.0)
        for anchor, gradient, velocity in zip_longest(self._anchor.flats, flats, self._velocity.flats):
            self._outer.move(anchor, gradient, velocity)
        self._reduction.commit()
        self.sent = False
        for name, parameter in self._parameters.items():
            if self._mix:
                parameter.lerp_(self._anchor.named[name], 1.0 - self._mix)
            else:
                parameter.copy_(self._anchor.named[name])
        return control


class Flat:
    """One tensor per bucket, zero at first.

    Attributes:
        named: views of them by the parameters' names, in the parameters' shapes and memory formats.
    """

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self.flats = [torch.zeros(c.numel, dtype=c.dtype, device=c.device) for c in cuts]
        self.named = {
            span.name: view for flat, c in zip(self.flats, cuts) for span, view in zip(c.spans, views(flat, c.spans))
        }

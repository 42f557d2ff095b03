"""Gossip: each replica takes local steps and mixes its weights with a few neighbours'.

Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?" (D-PSGD, algorithm 1). W[i][j] is
the part that *i* receives of *j*. Messages are in flight while the gradient is computed::

    x_i(k+1) = sum_j W[i][j] x_j(k)  -  lr * g(x_i(k))

In a directed topology only the columns of W add up to 1. Assran et al. 2019, "Stochastic Gradient Push" (SGP, algorithm
1 and its overlap), also mixes a scalar weight, and computes gradients at the ratio::

    x_i(k+1) = sum_j W[i][j] x_j(k)  -  lr * g(z_i(k))      w_i(k+1) = sum_j W[i][j] w_j(k)      z_i = x_i / w_i

With a lossy compressor, the neighbours' estimate of a replica replaces its weights (Koloskova et al. 2019, CHOCO-SGD,
algorithm 2; see `peer_estimate`). Each edge carries the part ``gamma * W[i][j]`` of the estimate, which *j* loses and
*i* gains, so the mean over all replicas is preserved. Gamma follows from the loss of the edge's last messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator, Work
from unisono.compress import Compressor
from unisono.sync.async_gossip import BoundAsyncGossip
from unisono.sync.flat_weights import Weights, mean
from unisono.sync.local_gradients import LocalGradients, LocalMean
from unisono.sync.peer_estimate import PeerEstimate, gamma, message_bytes
from unisono.sync.synchronizer import BoundSynchronizer, Loop
from unisono.sync.topology import Parts, Ring, Topology


@dataclass(frozen=True)
class Gossip:
    """Mixes weights with neighbours in each step.

    All replicas have the same weight: the mixing matrix preserves their mean only if it is doubly stochastic (with
    push-sum, column-stochastic). Each of N replicas steps by the mean gradient over its own samples. So a sample of a
    replica with n_i of the n samples of a step has weight ``n / (N n_i)``, which is 1 for equal shares. Choose a number
    of micro-batches that the number of workers divides.

    Args:
        topology: which workers mix with each other.
        asynchronous: whether a worker mixes with one neighbour, drawn in each step, without waiting for it (see
            `async_gossip`). Work is then leased, so that a faster worker computes more.
        push_sum: whether a scalar weight is mixed too; None: only if the topology is directed.
        synchronize_every: the number of steps from one exchange of control words to the next. Only after an exchange,
            workers know each other's losses and requests to stop, and checkpoints are taken. With `asynchronous`: the
            number of steps from one synchronization to the next in elastic runs; no effect in others.
        seed: the seed with which `asynchronous` draws neighbours.

    With a lossy compressor, a worker has two more copies of the weights per neighbour; with `asynchronous`, four.

    Raises:
        ValueError: `synchronize_every` is out of its bounds; push_sum=False with a directed topology; push_sum=True
            with asynchronous=True.
    """

    topology: Topology = Ring()
    asynchronous: bool = False
    push_sum: bool | None = None
    synchronize_every: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.synchronize_every, int) or self.synchronize_every < 1:
            raise ValueError(f"synchronize_every={self.synchronize_every!r} is not a whole number from 1")
        if self.asynchronous and self.push_sum:
            raise ValueError(
                "push_sum=True with asynchronous=True, in which neighbours mix equal parts of each other; "
                "leave push_sum out"
            )
        if self.push_sum is False and self.topology.directed and not self.asynchronous:
            raise ValueError(
                f"push_sum=False with the directed topology {self.topology!r}, which preserves the mean of the "
                "weights only with push-sum; leave push_sum out"
            )

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundSynchronizer:
        """See `Synchronizer.bind`."""
        if self.asynchronous:
            every = self.synchronize_every if loop.elastic else 0
            return BoundAsyncGossip(parameters, comm, compress, self.topology, loop.micro_batches, self.seed, every)
        return BoundGossip(parameters, comm, compress, self, loop.control)


class BoundGossip(BoundSynchronizer):
    """The bound synchronous `Gossip`; see `BoundSynchronizer` for the order of calls."""

    synchronous = False
    local_gradients = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        value: Gossip,
        control: int,
    ) -> None:
        self._gradients, self._parameters, self.comm = LocalGradients(parameters), parameters, comm
        self.zero_control = [0.0] * control
        self._topology, self._synchronize_every = value.topology, value.synchronize_every
        self._period = self._topology.period(comm.size)
        self._push_sum = self._topology.directed if value.push_sum is None else value.push_sum
        self._weights = Weights(parameters, compress)
        self._flats = self._weights.blank()
        plans = self._weights.plans
        self._lossless = [plan.compress.is_lossless(plan.dtype) for plan in plans]
        self._message = torch.empty(message_bytes(plans, len(plans)), dtype=torch.uint8, device=plans[0].device)
        self._no_message = self._message[:0]
        self._step = 0
        self._swap: Work[dict[int, Tensor]] | None = None
        self._reset(self._weights.read())

    def begin(self) -> None:
        self._gradients.begin()
        self._start()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._gradients.close(control, weight)
        self._start()
        self._poll()

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        self._gradients.offer(name, gradient, weight)
        self._poll()

    def settle(self) -> GossipStep:
        self._start()
        self._poll()
        return GossipStep(self, self._gradients.settle())

    def synchronize(self) -> None:
        self._discard()
        average = self._mean()
        self._weights.write(average)
        self._reset(average)

    def averaged_weights(self) -> AbstractContextManager[None]:
        return self._weights.replaced(self._mean())

    def state_dict(self) -> dict[str, Tensor]:
        """The number of steps taken, on which the topology depends."""
        return {"step": torch.tensor(self._step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._discard()
        self._step = int(state["step"])
        self._reset(self._weights.read())

    def is_control_step(self) -> bool:
        """Whether control words are exchanged in this step."""
        return (self._step + 1) % self._synchronize_every == 0

    def mix_and_step(self, step: Callable[[], Any]) -> Any:
        """Mix, then take the optimizer's `step`; with push-sum, the step changes the numerators x."""
        if self._swap is not None:
            self._mix(self._swap.wait())
            self._weights.write(self._flats)
        result = step()
        self._weights.multiply([1 / w for w in self._w])
        self._swap = None
        self._step += 1
        return result

    def _reset(self, flats: list[Tensor]) -> None:
        """Begin from the weights `flats`, which are equal on all replicas."""
        self._known = flats
        self._w = [1.0] * len(flats)
        self._sent: dict[int, PeerEstimate] = {}
        self._received: dict[int, PeerEstimate] = {}

    def _estimate(self, edges: dict[int, PeerEstimate], peer: int) -> PeerEstimate:
        if peer not in edges:
            edges[peer] = PeerEstimate(self._weights.plans, self._known)
        return edges[peer]

    def _mean(self) -> list[Tensor]:
        """Collective: the sum of all numerators x, divided by the sum of all w, which is the number of workers."""
        return mean([x.mul_(w) for x, w in zip(self._weights.read(), self._w)], self.comm)

    def _edges(self) -> tuple[Parts, Parts]:
        key = self.comm.rank, self.comm.size, self._step
        return self._topology.sends(*key), self._topology.receives(*key)

    def _start(self) -> None:
        """Send this step's messages, unless they are in flight."""
        if self._swap is not None or self.comm.size == 1:
            return
        sends, receives = self._edges()
        self._weights.read(self._flats)
        messages: dict[int, Tensor] = {}
        for peer in sends:
            # Lossless messages are the same for all neighbours.
            same = next(iter(messages.values()), None) if all(self._lossless) else None
            messages[peer] = self._estimate(self._sent, peer).send(self._flats, self._w) if same is None else same
        peers = {*sends, *receives}
        self._swap = self.comm.swap(
            {peer: messages.get(peer, self._no_message) for peer in peers},
            {peer: self._message if peer in receives else self._no_message for peer in peers},
        )

    def _poll(self) -> None:
        if self._swap is not None:
            self._swap.poll()

    def _discard(self) -> None:
        """Collective: discard the messages in flight."""
        if self._swap is not None:
            self._swap.wait()
            self._swap = None

    def _mix(self, messages: Mapping[int, Tensor]) -> None:
        """Replace the weights that were sent by the mixed numerators, and w by the w of the next step."""
        sends, receives = self._edges()
        ws = {peer: self._estimate(self._received, peer).receive(messages[peer]) for peer in receives}
        for b, x in enumerate(self._flats):
            w = self._w[b]
            losses = {peer: w * part * self._gamma(b, peer, self._sent) for peer, part in sends.items()}
            gains = {peer: ws[peer][b] * part * self._gamma(b, peer, self._received) for peer, part in receives.items()}
            if self._lossless[b]:
                x.mul_(w - sum(losses.values()))
            else:
                x.mul_(w)
                for peer, part in losses.items():
                    x.sub_(self._sent[peer].estimates[b], alpha=part)
            for peer, part in gains.items():
                x.add_(self._received[peer].estimates[b], alpha=part)
            if self._push_sum:
                self._w[b] = w - sum(losses.values()) + sum(gains.values())
        for estimate in (*self._sent.values(), *self._received.values()):
            estimate.release()

    def _gamma(self, bucket: int, peer: int, edges: Mapping[int, PeerEstimate]) -> float:
        """The fraction of its part that an edge carries. It is the same in both directions, except with push-sum."""
        if self._lossless[bucket]:
            return 1.0
        if self._push_sum:
            return gamma(edges[peer].fidelity[bucket], self._period)
        return gamma(min(self._sent[peer].fidelity[bucket], self._received[peer].fidelity[bucket]), self._period)


class GossipStep:
    """The update of one step of synchronous gossip; a `PendingUpdate`."""

    def __init__(self, gossip: BoundGossip, mean: LocalMean) -> None:
        self._gossip, self._mean = gossip, mean
        self.control = mean.control or gossip.zero_control
        self.agreed = gossip.comm.size == 1

    def norm(self, without: Collection[str] = ()) -> float:
        return self._mean.norm(without)

    def write(self, scale: float = 1.0) -> None:
        self._mean.write(scale)

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Exchange control words if they are due, mix, and take the step."""
        if self._gossip.is_control_step() and not self.agreed:
            words = torch.tensor(self.control, dtype=torch.float64)
            self.control = self._gossip.comm.sum(words).wait().tolist()
            self.agreed = True
        return self._gossip.mix_and_step(lambda: self._mean.apply(step, scale))

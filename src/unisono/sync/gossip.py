"""Gossip: each replica takes its own steps and mixes its weights with a few others', never with all at once.

Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?" (D-PSGD, algorithm 1), with W[i][j]
= what *i* gets of *j*; a message is on its way while the gradient is computed::

    x_i(k+1) = sum_j W[i][j] x_j(k)  -  lr * g(x_i(k))

In a directed topology only the columns of W add up to 1. Assran et al. 2019, "Stochastic Gradient Push" (SGP, algorithm
1 and its overlap), mixes a weight alike and sees the model through it::

    x_i(k+1) = sum_j W[i][j] x_j(k)  -  lr * g(z_i(k))      w_i(k+1) = sum_j W[i][j] w_j(k)      z_i = x_i / w_i

Where a compressor loses something, what the others hold of a replica takes its place (Koloskova et al. 2019,
CHOCO-SGD, algorithm 2; see `likeness`): each edge carries the part ``gamma * W[i][j]`` of it, which *j* loses and *i*
gets, so that the mean over all replicas stays as it is. Gamma follows from what the edge's last letters have lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator, Work
from unisono.compress import Compressor
from unisono.sync.async_gossip import BoundPartners
from unisono.sync.flat_weights import Weights, mean
from unisono.sync.local_gradients import LocalGradients, LocalMean
from unisono.sync.peer_estimate import PeerEstimate, gamma, letter_bytes
from unisono.sync.synchronizer import BoundSynchronizer, Loop
from unisono.sync.topology import Parts, Ring, Topology


@dataclass(frozen=True)
class Gossip:
    """Mix weights with neighbours in each step.

    All replicas count alike: the mixing matrix leaves their mean as it is only if it is doubly stochastic (or, with
    push-sum, column-stochastic), and so has no place for weights. Of N replicas, each takes steps of the mean gradient
    over its own samples. A sample of a replica with n_i of the n samples of a step therefore counts ``n / (N n_i)``
    times: once, where shares are equal. Choose a number of micro-batches that the number of workers divides.

    Args:
        topology: who mixes with whom.
        asynchronous: ask one neighbour, drawn anew each step, and wait for nobody (see `partner`); work is dealt out,
            so that a faster worker computes more.
        push_sum: mix a weight with the weights; None: where the topology is directed.
        synchronize_every: steps from one exchange of control words to the next. Only there workers learn of each
            other's losses and wish to stop, and checkpoints are taken. Asynchronously, the steps from one
            synchronization to the next in elastic runs, and without meaning elsewhere.
        seed: of the draw of neighbours.

    With a compressor that keeps no bits a worker holds two more copies of the weights per neighbour, asynchronously
    four.

    Raises:
        ValueError: a number out of its bounds; push_sum=False with a directed topology; push_sum=True asynchronously.
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
            raise ValueError("push_sum=True: asynchronous partners both take the same part of each other; leave it out")
        if self.push_sum is False and self.topology.directed and not self.asynchronous:
            raise ValueError(f"push_sum=False: in the directed {self.topology!r} weights would not stay a mean")

    def bind(
        self, parameters: Mapping[str, nn.Parameter], comm: Communicator, compress: Compressor, loop: Loop
    ) -> BoundSynchronizer:
        """See `Synchronizer.bind`."""
        if self.asynchronous:
            every = self.synchronize_every if loop.awaits else 0
            return BoundPartners(parameters, comm, compress, self.topology, loop.micro_batches, self.seed, every)
        return BoundGossip(parameters, comm, compress, self, loop.control)


class BoundGossip(BoundSynchronizer):
    """Synchronous `Gossip` in its world; see `BoundSynchronizer` for the order of calls."""

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
        self._silence = [0.0] * control
        self._topology, self._synchronize_every = value.topology, value.synchronize_every
        self._turns = self._topology.turns(comm.size)
        self._push_sum = self._topology.directed if value.push_sum is None else value.push_sum
        self._weights = Weights(parameters, compress)
        self._flats = self._weights.blank()
        cuts = self._weights.cuts
        self._keeps = [plan.compress.keeps(plan.dtype) for plan in cuts]
        self._letter = torch.empty(letter_bytes(cuts, len(cuts)), dtype=torch.uint8, device=cuts[0].device)
        self._nothing = self._letter[:0]
        self._step = 0
        self._swap: Work[dict[int, Tensor]] | None = None
        self._anchor(self._weights.read())

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
        return GossipStep(self, self._parameters, self._gradients.settle().control or self._silence)

    def synchronize(self) -> None:
        self._drop()
        together = self._mean()
        self._weights.write(together)
        self._anchor(together)

    def averaged_weights(self) -> AbstractContextManager[None]:
        return self._weights.replaced(self._mean())

    def state_dict(self) -> dict[str, Tensor]:
        """The number of the step, on which the topology depends."""
        return {"step": torch.tensor(self._step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._drop()
        self._step = int(state["step"])
        self._anchor(self._weights.read())

    def meets(self) -> bool:
        """Whether control words are exchanged in this step."""
        return (self._step + 1) % self._synchronize_every == 0

    def take(self, step: Callable[[], Any]) -> Any:
        """Mix, and take the optimizer's own `step` from there: with push-sum it moves the numerators."""
        if self._swap is not None:
            self._mix(self._swap.wait())
            self._weights.write(self._flats)
        result = step()
        self._weights.multiply([1 / w for w in self._w])
        self._swap = None
        self._step += 1
        return result

    def _anchor(self, flats: list[Tensor]) -> None:
        """All replicas are at `flats`, and know it."""
        self._known = flats
        self._w = [1.0] * len(flats)
        self._to: dict[int, PeerEstimate] = {}
        self._of: dict[int, PeerEstimate] = {}

    def _likeness(self, of: dict[int, PeerEstimate], peer: int) -> PeerEstimate:
        if peer not in of:
            of[peer] = PeerEstimate(self._weights.cuts, self._known)
        return of[peer]

    def _mean(self) -> list[Tensor]:
        """All numerators' sum over the sum of all w, which is the worker count."""
        return mean([x.mul_(w) for x, w in zip(self._weights.read(), self._w)], self.comm)

    def _edges(self) -> tuple[Parts, Parts]:
        place = self.comm.rank, self.comm.size, self._step
        return self._topology.sends(*place), self._topology.receives(*place)

    def _start(self) -> None:
        """Send this step's letters, unless they are under way."""
        if self._swap is not None or self.comm.size == 1:
            return
        sends, receives = self._edges()
        self._weights.read(self._flats)
        letters: dict[int, Tensor] = {}
        for peer in sends:
            # What keeps all bits says the same to everybody.
            said = next(iter(letters.values()), None) if all(self._keeps) else None
            letters[peer] = self._likeness(self._to, peer).send(self._flats, self._w) if said is None else said
        peers = {*sends, *receives}
        self._swap = self.comm.swap(
            {peer: letters.get(peer, self._nothing) for peer in peers},
            {peer: self._letter if peer in receives else self._nothing for peer in peers},
        )

    def _poll(self) -> None:
        if self._swap is not None:
            self._swap.poll()

    def _drop(self) -> None:
        """Forget what is under way: all workers do so alike."""
        if self._swap is not None:
            self._swap.wait()
            self._swap = None

    def _mix(self, arrived: Mapping[int, Tensor]) -> None:
        """Numerators, in place of the weights that were sent, and w of the next step."""
        sends, receives = self._edges()
        theirs = {peer: self._likeness(self._of, peer).take(arrived[peer]) for peer in receives}
        for b, x in enumerate(self._flats):
            w = self._w[b]
            gives = {peer: w * part * self._gamma(b, peer, self._to) for peer, part in sends.items()}
            gets = {peer: theirs[peer][b] * part * self._gamma(b, peer, self._of) for peer, part in receives.items()}
            if self._keeps[b]:
                x.mul_(w - sum(gives.values()))
            else:
                x.mul_(w)
                for peer, part in gives.items():
                    x.sub_(self._to[peer].held[b], alpha=part)
            for peer, part in gets.items():
                x.add_(self._of[peer].held[b], alpha=part)
            if self._push_sum:
                self._w[b] = w - sum(gives.values()) + sum(gets.values())
        for likeness in (*self._to.values(), *self._of.values()):
            likeness.release()

    def _gamma(self, bucket: int, peer: int, edge: Mapping[int, PeerEstimate]) -> float:
        """How much of its part an edge carries: both ways the same, but where w goes along."""
        if self._keeps[bucket]:
            return 1.0
        if self._push_sum:
            return gamma(edge[peer].fidelity[bucket], self._turns)
        return gamma(min(self._to[peer].fidelity[bucket], self._of[peer].fidelity[bucket]), self._turns)


class GossipStep(LocalMean):
    """What a step of gossip is about to do; see `PendingUpdate`."""

    def __init__(self, gossip: BoundGossip, parameters: Mapping[str, nn.Parameter], control: list[float]) -> None:
        super().__init__(parameters, control)
        self._gossip = gossip
        self.agreed = gossip.comm.size == 1

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Exchange control words where it is time, mix, and step from there."""
        if self._gossip.meets() and not self.agreed:
            words = torch.tensor(self.control, dtype=torch.float64)
            self.control = self._gossip.comm.sum(words).wait().tolist()
            self.agreed = True
        return self._gossip.take(lambda: super(GossipStep, self).apply(step, scale))

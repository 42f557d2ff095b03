"""Asynchronous gossip: ask one neighbour, both take the mean, and nobody waits for anybody.

Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent" (AD-PSGD, algorithm 1). An actor
beside each training thread holds the replica's weights, and answers at once::

    training thread            own actor            partner's actor
    begin          ──── its weights x_i ────────────►  x_j' = x_j + part * (x_i - x_j)
    forward, backward                                      │
    settle         ◄──── x_j, part ────────────────────────┘
                     x_i' = x_i + part * (x_j - x_i)
    apply: take the actor's weights, step from there, hand the difference back

Nothing touches parameters while autograd needs them. What one gets the other loses, so the mean over all replicas stays
as it is once all answers have come. `part` is 1/2, and less where many ask while an actor's own call is under way:
half of what it sent is spoken for, so it gives away no more than it has left, and weights stay means of weights.

Where a compressor loses something, both see each other through likenesses (see `likeness`), of which a pair has two
each way, for its two roles: letters of one role come in the order in which they were sent.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator, Work
from unisono.comm.actor import ActorConnection, ActorMessage, Answer
from unisono.compress import Compressor
from unisono.sync.buckets import Cut
from unisono.sync.flat_weights import Weights, mean
from unisono.sync.local_gradients import LocalGradients, LocalMean
from unisono.sync.peer_estimate import PeerEstimate, gamma, letter_bytes
from unisono.sync.synchronizer import BoundSynchronizer, Share
from unisono.sync.topology import Topology
from unisono.sync.work_leasing import LeaseClient


class GossipActor:
    """The actor: one replica's weights, one flat tensor per bucket, which are replaced and never written into.

    Args:
        turns: how many neighbours a replica has in all, of which it asks one after the other.
    """

    def __init__(self, cuts: Sequence[Cut], weights: list[Tensor], turns: int) -> None:
        self._turns = turns
        self.largest_bytes = 2 * letter_bytes(cuts, 1) + (1 << 12)  # the last one may still be read
        self._cuts, self._lock = cuts, threading.Lock()
        self.reset(weights)

    def reset(self, weights: list[Tensor]) -> None:
        """All replicas have `weights`, and know it; nothing is under way."""
        with self._lock:
            self._weights, self._known = weights, weights
            self._free = 1.0
            self._pairs: dict[tuple[int, str], Pair] = {}

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """``connected``: a letter, which is answered with one."""
        pair = self._pair(sender, "asked by")
        pair.theirs.take(message.tensors[0].to(self._cuts[0].device))
        with self._lock:
            weights, part = self._weights, self._share()
        letter = pair.mine.send(weights, [part])
        self._draw(pair, part)
        answer(ActorMessage("met", {}, [letter.cpu()]))

    def lost(self, sender: int) -> None:
        pass

    def connected(self, lines: Sequence[ActorConnection]) -> None:
        pass

    def ask(self, peer: int, line: ActorConnection) -> Work[ActorMessage]:
        """Send the weights as they are now to `peer`, at the other end of `line`."""
        with self._lock:
            weights, self._free = self._weights, 0.5
        letter = self._pair(peer, "asks").mine.send(weights, [0.0])
        return line.call(ActorMessage("meet", {}, [letter.cpu()]))

    def hear(self, peer: int, answered: ActorMessage) -> None:
        """Take in the answer of `peer`."""
        pair = self._pair(peer, "asks")
        part = pair.theirs.take(answered.tensors[0].to(self._cuts[0].device))[0]
        self._draw(pair, part)
        with self._lock:
            self._free = 1.0

    def weights(self) -> list[Tensor]:
        """The weights as they are now, to be read only."""
        with self._lock:
            return self._weights

    def moved(self, taken: list[Tensor], stepped: list[Tensor]) -> None:
        """The optimizer has moved what `weights` gave from `taken` to `stepped`, which belongs to this actor now."""
        with self._lock:
            if self._weights is not taken:  # somebody has met this replica meanwhile
                stepped = [s + (now - t) for s, now, t in zip(stepped, self._weights, taken)]
            self._weights = stepped

    def _pair(self, peer: int, role: str) -> Pair:
        if (peer, role) not in self._pairs:
            self._pairs[peer, role] = Pair(self._cuts, self._known)
        return self._pairs[peer, role]

    def _share(self) -> float:
        """Which part of the weights can be given away. Of what this actor sent with its own call, as much as 1/2 will
        be asked for: with c as what is left of it, ``(1 - part) * c`` has to be above 1/2."""
        if self._free == 1.0:
            return 0.5
        part = self._free / 2 / (self._free + 0.5)
        self._free /= 2
        return part

    def _draw(self, pair: Pair, part: float) -> None:
        """Both come nearer to each other; the other side does the same the other way round."""
        with self._lock:
            self._weights = pair.nearer(self._weights, part, self._turns)
        pair.mine.release()
        pair.theirs.release()


class Pair:
    """Two likenesses in one role of a pair: what the other holds of this replica, and what this one holds of it."""

    def __init__(self, cuts: Sequence[Cut], known: Sequence[Tensor]) -> None:
        self.mine, self.theirs = PeerEstimate(cuts, known), PeerEstimate(cuts, known)

    def nearer(self, weights: list[Tensor], part: float, turns: int) -> list[Tensor]:
        """`weights` after this replica has got `part` of what the likenesses differ by."""
        fidelities = zip(self.mine.fidelity, self.theirs.fidelity)
        gaps = (theirs - mine for mine, theirs in zip(self.mine.held, self.theirs.held))
        return [x.add(gap, alpha=part * gamma(min(pair), turns)) for x, gap, pair in zip(weights, gaps, fidelities)]


class BoundPartners(BoundSynchronizer):
    """Asynchronous gossip in its world; see `BoundSynchronizer` for the order of calls.

    Args:
        synchronize_every: steps that are dealt out before all meet; 0: as many as are asked for.
    """

    synchronous = False
    local_gradients = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        compress: Compressor,
        topology: Topology,
        micro_batches: int,
        seed: int,
        synchronize_every: int = 0,
    ) -> None:
        self._gradients, self._parameters, self._comm = LocalGradients(parameters), parameters, comm
        self._topology, self._seed, self._synchronize_every = topology, seed, synchronize_every
        self._weights = Weights(parameters, compress)
        at_once = max(len(topology.sends(rank, comm.size, 0)) for rank in range(min(2, comm.size)))
        neighbours = topology.turns(comm.size) * at_once
        self._partner = GossipActor(self._weights.cuts, self._weights.read(), neighbours)
        self._lines = comm.host(self._partner)
        self._dealing = LeaseClient(comm, micro_batches)
        self._step = 0
        self._asked: tuple[int, Work[ActorMessage]] | None = None

    def begin(self) -> None:
        self._gradients.begin()
        self._hear()
        if self._asked is None:
            self._ask()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._gradients.close(control, weight)
        self._hear()

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        self._gradients.offer(name, gradient, weight)

    def settle(self) -> PartnersStep:
        self._hear()
        return PartnersStep(self, self._parameters, self._gradients.settle().control)

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[Share] | None:
        every = self._synchronize_every
        return self._dealing.shares(first, min(until, every * (first // every + 1)) if every else until, stop)

    @property
    def leased_until(self) -> int:
        return self._dealing.dealt

    def synchronize(self) -> None:
        together = self._mean()
        self._weights.write(together)
        self._partner.reset(together)
        self._together()  # nobody asks one who has not been reset

    def quiesce(self) -> None:
        self._quiet()
        self._weights.write(self._partner.weights())

    def averaged_weights(self) -> AbstractContextManager[None]:
        return self._weights.replaced(self._mean())

    def state_dict(self) -> dict[str, Tensor]:
        """How many steps the worker with the most of them has taken, on which the draw of neighbours depends."""
        return {"step": torch.tensor(self._step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._quiet()
        self._step = int(state["step"])
        self._partner.reset(self._weights.read())
        self._together()

    def take(self, step: Callable[[], Any]) -> Any:
        """Take the optimizer's own `step` from the actor's weights."""
        taken = self._partner.weights()
        self._weights.write(taken)
        result = step()
        self._partner.moved(taken, self._weights.read())
        self._step += 1
        return result

    def _ask(self) -> None:
        neighbours = sorted(self._topology.sends(self._comm.rank, self._comm.size, self._step))
        if neighbours:
            peer = random.Random(f"{self._seed} {self._comm.rank} {self._step}").choice(neighbours)
            self._asked = peer, self._partner.ask(peer, self._lines[peer])

    def _hear(self, wait: bool = False) -> None:
        """Take in the answer, if it is there."""
        if self._asked and (wait or self._asked[1].poll()):
            peer, work = self._asked
            self._asked = None
            self._partner.hear(peer, work.wait())

    def _quiet(self) -> None:
        """Return when nothing is under way any more; all workers call it alike."""
        self._hear(wait=True)
        self._together()

    def _together(self) -> None:
        """Return when all workers are here; all go on from the step of the one that is furthest."""
        self._step = int(self._comm.gather(torch.tensor([self._step])).wait().max())

    def _mean(self) -> list[Tensor]:
        self._quiet()
        return mean(self._partner.weights(), self._comm)


class PartnersStep(LocalMean):
    """The update of one step; see `PendingUpdate`. Work is leased, so control words are never agreed on in it."""

    agreed = False

    def __init__(self, partners: BoundPartners, parameters: Mapping[str, nn.Parameter], control: list[float]) -> None:
        super().__init__(parameters, control)
        self._partners = partners

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Step from what this replica and its neighbours have become."""
        return self._partners.take(lambda: super(PartnersStep, self).apply(step, scale))

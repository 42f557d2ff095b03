"""Asynchronous gossip: in each step a worker mixes its weights with one neighbour, and no worker waits for another.

Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent" (AD-PSGD, algorithm 1). An actor
beside each training thread has the replica's weights, and answers at once::

    training thread            own actor            neighbour's actor
    begin          ──── its weights x_i ────────────►  x_j' = x_j + part * (x_i - x_j)
    forward, backward                                      │
    settle         ◄──── x_j, part ────────────────────────┘
                     x_i' = x_i + part * (x_j - x_i)
    apply: take the step from the actor's weights, and return the difference to the actor

Parameters do not change while autograd needs them. What one replica gains the other loses, so the mean over all
replicas is preserved once all answers have arrived. `part` is 1/2. It is less while a request of the actor itself is in
flight: half of the weights that the request sent are then promised to its receiver. So the weights of a replica stay a
weighted mean of the replicas' weights.

With a lossy compressor, both workers use estimates of each other's weights (see `peer_estimate`). A pair of workers has
two estimates for the requests and answers of one worker, and two for those of the other. Only the messages of one such
role arrive in the order in which they were sent.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator, Work
from unisono.comm.actor import ActorConnection, ActorMessage, Answer
from unisono.compress import Compressor
from unisono.sync.buckets import BucketPlan
from unisono.sync.flat_weights import Weights, mean
from unisono.sync.local_gradients import LocalGradients, LocalMean
from unisono.sync.peer_estimate import PeerEstimate, gamma, message_bytes
from unisono.sync.synchronizer import BoundSynchronizer, WorkItem
from unisono.sync.topology import Topology
from unisono.sync.work_leasing import LeaseClient


class GossipActor:
    """The actor that has the weights of one replica, and mixes them with those of neighbours.

    The weights are one flat tensor per bucket. A tensor is replaced, never written into.

    Args:
        neighbours: the number of neighbours with which a replica mixes in turn.
    """

    def __init__(self, plans: Sequence[BucketPlan], weights: list[Tensor], neighbours: int) -> None:
        self._neighbours = neighbours
        self.largest_bytes = 2 * message_bytes(plans, 1) + (1 << 12)  # the previous message may still be read
        self._plans, self._lock = plans, threading.Lock()
        self.reset(weights)

    def reset(self, weights: list[Tensor]) -> None:
        """Set the weights to `weights`, which are equal on all replicas, while no request is in flight."""
        with self._lock:
            self._weights, self._known = weights, weights
            self._free = 1.0
            self._pairs: dict[tuple[int, str], PairEstimates] = {}

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Process ``meet``, which brings a neighbour's weights: answer with this replica's weights, and mix the two."""
        pair = self._pair(sender, "answers")
        pair.theirs.receive(message.tensors[0].to(self._plans[0].device))
        with self._lock:
            weights, part = self._weights, self._take_part()
        reply = pair.mine.send(weights, [part])
        self._mix(pair, part)
        answer(ActorMessage("met", {}, [reply.cpu()]))

    def lost(self, sender: int) -> None:
        pass

    def connected(self, connections: Sequence[ActorConnection]) -> None:
        pass

    def request(self, peer: int, connection: ActorConnection) -> Work[ActorMessage]:
        """Send the current weights to the actor of `peer`; the result of the returned work is its answer."""
        with self._lock:
            weights, self._free = self._weights, 0.5
        message = self._pair(peer, "requests").mine.send(weights, [0.0])
        return connection.call(ActorMessage("meet", {}, [message.cpu()]))

    def receive_answer(self, peer: int, answer: ActorMessage) -> None:
        """Mix with the weights in the answer of `peer`."""
        pair = self._pair(peer, "requests")
        part = pair.theirs.receive(answer.tensors[0].to(self._plans[0].device))[0]
        self._mix(pair, part)
        with self._lock:
            self._free = 1.0

    def weights(self) -> list[Tensor]:
        """The current weights, to be read only."""
        with self._lock:
            return self._weights

    def add_step(self, before: list[Tensor], after: list[Tensor]) -> None:
        """Add the optimizer's step, from `before` to `after`, to the current weights.

        `before` is what `weights` returned. `after` belongs to the actor from now on.
        """
        with self._lock:
            if self._weights is not before:  # this replica has mixed with another one meanwhile
                after = [x + (now - old) for x, now, old in zip(after, self._weights, before)]
            self._weights = after

    def _pair(self, peer: int, role: str) -> PairEstimates:
        if (peer, role) not in self._pairs:
            self._pairs[peer, role] = PairEstimates(self._plans, self._known)
        return self._pairs[peer, role]

    def _take_part(self) -> float:
        """The part of this replica's weights that the next answer exchanges for the neighbour's.

        While a request is in flight, half of the weights that it sent are promised to its receiver. Let c be the
        fraction of the sent weights that the current weights still contain: ``(1 - part) * c`` has to stay above 1/2.
        """
        if self._free == 1.0:
            return 0.5
        part = self._free / 2 / (self._free + 0.5)
        self._free /= 2
        return part

    def _mix(self, pair: PairEstimates, part: float) -> None:
        """Mix the weights with the neighbour's; the neighbour makes the opposite change to its own."""
        with self._lock:
            self._weights = pair.mixed(self._weights, part, self._neighbours)
        pair.mine.release()
        pair.theirs.release()


class PairEstimates:
    """The estimates of a pair of workers in one role.

    Attributes:
        mine: the peer's estimate of this replica's weights.
        theirs: this replica's estimate of the peer's weights.
    """

    def __init__(self, plans: Sequence[BucketPlan], known: Sequence[Tensor]) -> None:
        self.mine, self.theirs = PeerEstimate(plans, known), PeerEstimate(plans, known)

    def mixed(self, weights: list[Tensor], part: float, neighbours: int) -> list[Tensor]:
        """`weights` plus ``part * gamma`` times the difference between the two estimates."""
        gammas = [gamma(min(pair), neighbours) for pair in zip(self.mine.fidelity, self.theirs.fidelity)]
        gaps = (theirs - mine for mine, theirs in zip(self.mine.estimates, self.theirs.estimates))
        return [x.add(gap, alpha=part * factor) for x, gap, factor in zip(weights, gaps, gammas)]


class BoundAsyncGossip(BoundSynchronizer):
    """The bound asynchronous `Gossip`; see `BoundSynchronizer` for the order of calls.

    Args:
        synchronize_every: work is leased up to the next multiple of this number of steps, where all workers
            synchronize; 0: up to the end of the steps that `work_items` asks for.
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
        neighbours = topology.period(comm.size) * at_once
        self._actor = GossipActor(self._weights.plans, self._weights.read(), neighbours)
        self._connections = comm.host(self._actor)
        self._leases = LeaseClient(comm, micro_batches)
        self._step = 0
        self._in_flight: tuple[int, Work[ActorMessage]] | None = None

    def begin(self) -> None:
        self._gradients.begin()
        self._receive_answer()
        if self._in_flight is None:
            self._request()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._gradients.close(control, weight)
        self._receive_answer()

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        self._gradients.offer(name, gradient, weight)

    def settle(self) -> AsyncGossipStep:
        self._receive_answer()
        return AsyncGossipStep(self, self._gradients.settle())

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem] | None:
        every = self._synchronize_every
        return self._leases.work_items(first, min(until, every * (first // every + 1)) if every else until, stop)

    @property
    def leased_until(self) -> int:
        return self._leases.leased_until

    def synchronize(self) -> None:
        average = self._mean()
        self._weights.write(average)
        self._actor.reset(average)
        self._barrier()  # so that no request arrives at an actor before it is reset

    def quiesce(self) -> None:
        self._drain()
        self._weights.write(self._actor.weights())

    def averaged_weights(self) -> AbstractContextManager[None]:
        return self._weights.replaced(self._mean())

    def state_dict(self) -> dict[str, Tensor]:
        """The largest number of steps that a worker has taken, which determines the draw of neighbours."""
        return {"step": torch.tensor(self._step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._drain()
        self._step = int(state["step"])
        self._actor.reset(self._weights.read())
        self._barrier()

    def take_step(self, step: Callable[[], Any]) -> Any:
        """Take the optimizer's `step` from the actor's weights, and add the change to these."""
        before = self._actor.weights()
        self._weights.write(before)
        result = step()
        self._actor.add_step(before, self._weights.read())
        self._step += 1
        return result

    def _request(self) -> None:
        neighbours = sorted(self._topology.sends(self._comm.rank, self._comm.size, self._step))
        if neighbours:
            peer = random.Random(f"{self._seed} {self._comm.rank} {self._step}").choice(neighbours)
            self._in_flight = peer, self._actor.request(peer, self._connections[peer])

    def _receive_answer(self, wait: bool = False) -> None:
        """Process the answer to the request in flight, if it has arrived; with `wait`, wait for it."""
        if self._in_flight and (wait or self._in_flight[1].poll()):
            peer, work = self._in_flight
            self._in_flight = None
            self._actor.receive_answer(peer, work.wait())

    def _drain(self) -> None:
        """Collective: wait until no request is in flight on any worker."""
        self._receive_answer(wait=True)
        self._barrier()

    def _barrier(self) -> None:
        """Collective: a barrier, which also sets the step number to the largest one of all workers."""
        self._step = int(self._comm.gather(torch.tensor([self._step])).wait().max())

    def _mean(self) -> list[Tensor]:
        self._drain()
        return mean(self._actor.weights(), self._comm)


class AsyncGossipStep:
    """The update of one step; a `PendingUpdate`. Work is leased, so workers never agree on control words in it."""

    agreed = False

    def __init__(self, gossip: BoundAsyncGossip, mean: LocalMean) -> None:
        self._gossip, self._mean, self.control = gossip, mean, mean.control

    def norm(self, without: Collection[str] = ()) -> float:
        return self._mean.norm(without)

    def write(self, scale: float = 1.0) -> None:
        self._mean.write(scale)

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Take the step from the current, mixed weights of this replica."""
        return self._gossip.take_step(lambda: self._mean.apply(step, scale))

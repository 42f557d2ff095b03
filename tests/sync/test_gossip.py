"""What is particular to gossip: equations of its papers, invariants, rate of consensus, waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from tests.compress.laws import TABLE as COMPRESSORS
from tests.compress.laws import Row
from tests.support.processes import run as run_processes
from tests.sync.regression_task import RegressionTask, in_a_process
from tests.sync.test_topology import matrix
from unisono import notation
from unisono.comm import Communicator, Link, simulate
from unisono.comm.actor import ActorMessage
from unisono.compress import Cast, Compressor, CompressorMemory, Exact, OneBit, Quantize, RandomK, TopK, TwoBit
from unisono.config import Config
from unisono.sync import AllReduce, Complete, Gossip, Loop, OnePeerExponential, RandomPairs, Ring, Synchronizer, Torus
from unisono.sync.async_gossip import GossipActor
from unisono.sync.flat_weights import Weights
from unisono.sync.peer_estimate import PeerEstimate, fit, gamma

TOPOLOGIES = [Ring(), Torus(), Complete(), RandomPairs(), OnePeerExponential()]
EVERY = [Gossip(topology, asynchronous) for topology in TOPOLOGIES for asynchronous in (False, True)]
LOSSY = [Exact(), Cast("bf16"), Quantize(bits=4), OneBit(block=64), TopK(0.2), RandomK(0.2)]
each = pytest.mark.parametrize("sync", EVERY, ids=notation.show)


@dataclass(frozen=True)
class Lopsided:
    """Directed, and not doubly stochastic: worker 0 sends to all others, each of which sends to the next one only."""

    directed = True

    def sends(self, rank: int, size: int, step: int) -> dict[int, float]:
        peers = range(1, size) if rank == 0 else [(rank + 1) % size]
        return {peer: 1 / (len(peers) + 1) for peer in peers}

    def receives(self, rank: int, size: int, step: int) -> dict[int, float]:
        parts = {peer: self.sends(peer, size, step).get(rank, 0.0) for peer in range(size) if peer != rank}
        return {peer: part for peer, part in parts.items() if part}

    def period(self, size: int) -> int:
        return 1


class Worker:
    """A parameter whose gradient is ``w - target``, the worker's own; `size` numbers, in two tensors."""

    def __init__(self, comm: Communicator, sync: Synchronizer, compress: Compressor, lr: float, numbers: int = 40):
        random = torch.Generator().manual_seed(comm.rank)
        self.target = torch.randn(numbers, generator=random, dtype=torch.float64)
        self.w = nn.Parameter(torch.zeros(numbers, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.w], lr)
        self.bound = sync.bind({"w": self.w}, comm, compress, Loop(self.optimizer, control=comm.size))
        self.comm = comm

    def step(self) -> torch.Tensor:
        """One step; the weights after it."""
        self.bound.begin()
        self.bound.close([float(self.comm.rank == rank) for rank in range(self.comm.size)])
        self.bound.offer("w", self.w.detach() - self.target, 1.0)
        self.change = self.bound.settle()
        self.change.apply(self.optimizer.step)
        return self.w.detach().clone()


def trajectories(size: int, sync: Synchronizer, compress: Compressor, steps: int, lr: float) -> torch.Tensor:
    """Weights of all workers after each step, ``[step, worker, number]``."""

    def run(comm: Communicator) -> torch.Tensor:
        worker = Worker(comm, sync, compress, lr)
        return torch.stack([worker.step() for _ in range(steps)])

    return torch.stack(simulate(size, run), dim=1)


def targets(size: int, numbers: int = 40) -> torch.Tensor:
    draw = lambda rank: torch.randn(numbers, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return torch.stack([draw(rank) for rank in range(size)])


def apart(x: torch.Tensor) -> torch.Tensor:
    """Distance of all workers from their mean, per step."""
    return (x - x.mean(-2, keepdim=True)).flatten(-2).norm(dim=-1)


@pytest.mark.parametrize("topology", [Ring(), Torus(), RandomPairs(seed=1), Complete()], ids=notation.show)
def test_d_psgd_is_its_equation(topology) -> None:
    x, lr, expected = torch.zeros(4, 40, dtype=torch.float64), 0.1, []
    for step in range(12):
        gradient = x - targets(4)
        x = torch.from_numpy(matrix(topology, 4, step)) @ x - lr * gradient
        expected.append(x)
    torch.testing.assert_close(
        trajectories(4, Gossip(topology), Cast(), 12, lr), torch.stack(expected), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("topology", [Lopsided(), OnePeerExponential()], ids=notation.show)
def test_stochastic_gradient_push_is_its_equations(topology) -> None:
    x, w, lr, expected = torch.zeros(4, 40, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64), 0.1, []
    for step in range(12):
        gradient = x / w - targets(4)
        mix = torch.from_numpy(matrix(topology, 4, step))
        x, w = mix @ x - lr * gradient, mix @ w
        expected.append(x / w)
    torch.testing.assert_close(
        trajectories(4, Gossip(topology), Cast(), 12, lr), torch.stack(expected), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("compress", LOSSY, ids=notation.show)
def test_choco_sgd_is_its_equations(compress) -> None:
    """An independent implementation for a ring of 4, all of whose edges carry a third."""
    plan = Weights({"w": nn.Parameter(torch.zeros(40, dtype=torch.float64))}, compress).plans[0]
    edges = [(j, i) for j in range(4) for i in ((j - 1) % 4, (j + 1) % 4)]
    x, lr, expected = torch.zeros(4, plan.numel, dtype=torch.float64), 0.1, []
    aim = torch.zeros(4, plan.numel, dtype=torch.float64)
    aim[:, :40] = targets(4)
    mixed = {edge: torch.zeros(plan.numel, dtype=torch.float64) for edge in edges}
    memory = {edge: CompressorMemory() for edge in edges}
    for _ in range(6):
        fidelity = {}
        for edge in edges:
            d = x[edge[0]] - mixed[edge]
            total = torch.zeros(plan.numel, dtype=compress.total_dtype(torch.float64))
            compress.add(total, d, 1.0, True)
            message = compress.encode(total, plan.spans, memory[edge])
            memory[edge].commit()
            arrives = compress.value(compress.decode(message, plan.spans, plan.numel, total.dtype), torch.float64)
            scale, fidelity[edge] = fit(d, arrives)
            mixed[edge] = mixed[edge] + scale * arrives
        gradient = x - aim
        for j, i in edges:
            part = gamma(min(fidelity[j, i], fidelity[i, j])) / 3
            x[i] += part * mixed[j, i]
            x[j] -= part * mixed[j, i]
        x = x - lr * gradient
        x[:, 40:] = 0.0  # padding
        expected.append(x[:, :40].clone())
    torch.testing.assert_close(trajectories(4, Gossip(), compress, 6, lr), torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("topology", [Ring(), Torus()], ids=notation.show)
def test_workers_agree_at_the_rate_of_the_spectral_gap(topology) -> None:
    def run(comm: Communicator) -> torch.Tensor:
        worker = Worker(comm, Gossip(topology), Cast(), 0.0)
        with torch.no_grad():
            worker.w.copy_(worker.target)
        return torch.stack([worker.step() for _ in range(25)])

    distances = apart(torch.stack(simulate(8, run), dim=1))
    w = matrix(topology, 8, 0)
    rate = sorted(np.abs(np.linalg.eigvalsh(w)))[-2]
    ratios = distances[1:] / distances[:-1]
    assert (ratios <= rate + 1e-9).all()
    assert ratios[-1] == pytest.approx(rate, abs=0.02)  # what is left is the slowest direction


@pytest.mark.short(6)
@each
@pytest.mark.parametrize("compress", [Cast(), RandomK(0.2)], ids=notation.show)
def test_the_mean_is_preserved_while_workers_agree(sync, compress) -> None:
    """With a learning rate of 0, one worker gains what another loses, with any compressor."""

    def run(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        worker = Worker(comm, sync, compress, 1.0)
        worker.step()  # every worker is at its own target
        path = torch.stack([_still(worker) for _ in range(60)])
        worker.bound.synchronize()
        return path, worker.w.detach().clone()

    outcome = simulate(6, run)
    paths = torch.stack([path for path, _ in outcome], dim=1)
    average = torch.stack([end for _, end in outcome])
    assert all(torch.equal(each, average[0]) for each in average)
    torch.testing.assert_close(average[0], targets(6).mean(0), rtol=0, atol=1e-6)
    assert apart(paths)[-1] < 0.2 * apart(targets(6))


def _still(worker: Worker) -> torch.Tensor:
    worker.optimizer.param_groups[0]["lr"] = 0.0
    return worker.step()


def test_push_sum_finds_the_mean_with_uneven_parts() -> None:
    def run(comm: Communicator) -> torch.Tensor:
        worker = Worker(comm, Gossip(Lopsided()), Cast(), 1.0)
        worker.step()
        return torch.stack([_still(worker) for _ in range(60)])[-1]

    for end in simulate(5, run):
        torch.testing.assert_close(end, targets(5).mean(0), rtol=0, atol=1e-9)


def test_control_words_are_agreed_at_synchronizations() -> None:
    def run(comm: Communicator) -> list[list[float] | None]:
        worker, agreed = Worker(comm, Gossip(synchronize_every=3), Cast(), 0.1), []
        for _ in range(7):
            worker.step()
            agreed.append(worker.change.control if worker.change.agreed else None)
        return agreed

    none, agreed = None, [1.0, 1.0, 1.0]
    assert simulate(3, run) == [[none, none, agreed, none, none, agreed, none]] * 3


def test_a_step_sends_one_message_to_each_neighbour_and_nothing_else() -> None:
    def run(comm: Communicator, sync: Synchronizer, compress: Compressor) -> int:
        worker = Worker(comm, sync, compress, 0.1, numbers=10_000)
        before = comm.bytes_sent
        for _ in range(10):
            worker.step()
        return comm.bytes_sent - before

    model = 80_000
    for sync, messages in [(Gossip(), 2), (Gossip(OnePeerExponential()), 1), (Gossip(RandomPairs()), 1)]:
        for sent in simulate(4, run, sync, Cast()):
            assert 10 * messages * model <= sent <= 10 * messages * (model + 100)
    assert max(simulate(4, run, Gossip(), OneBit())) < 20 * model / 28
    # One call out and one answer back per step: all calls of all workers, and as many answers.
    assert sum(simulate(4, run, Gossip(asynchronous=True), Cast())) == pytest.approx(80 * model, rel=0.02)


@pytest.mark.parametrize("sync", [Gossip(), Gossip(RandomPairs()), Gossip(Lopsided())], ids=notation.show)
@pytest.mark.parametrize("compress", [Cast(), Quantize(bits=4, stochastic=True)], ids=notation.show)
def test_a_resumed_run_equals_an_uninterrupted_one_with_any_compressor(sync, compress) -> None:
    def run(comm: Communicator) -> None:
        one = Worker(comm, sync, compress, 0.1)
        for _ in range(5):
            one.step()
        one.bound.begin()  # messages of the next step are in flight
        one.bound.synchronize()
        two = Worker(comm.channel("another attempt"), sync, compress, 0.1)
        two.bound.begin()
        with torch.no_grad():
            two.w.copy_(one.w)
        two.bound.load_state_dict(one.bound.state_dict())
        assert all(torch.equal(one.step(), two.step()) for _ in range(5))

    simulate(3, run)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_one_replica_it_is_the_local_optimizer(asynchronous) -> None:
    """Also with a lossy compressor: no message is sent."""
    expected, x = [], torch.zeros(40, dtype=torch.float64)
    for _ in range(5):
        x = x - 0.1 * (x - targets(1)[0])
        expected.append(x)
    for topology in TOPOLOGIES:
        path = trajectories(1, Gossip(topology, asynchronous), OneBit(), 5, 0.1)
        torch.testing.assert_close(path[:, 0], torch.stack(expected), rtol=0, atol=1e-12)


# Learning.


TASK = RegressionTask(30)


@dataclass(frozen=True)
class Isolated:
    """No worker mixes with another."""

    directed = False

    def sends(self, rank: int, size: int, step: int) -> dict[int, float]:
        return {}

    receives = sends

    def period(self, size: int) -> int:
        return 1


def taught(size: int, sync: Synchronizer, compress: Compressor) -> float:
    """The final loss, which is the same on all workers."""
    losses = {loss for loss, _, _ in simulate(size, TASK.learn, sync, compress)}
    assert len(losses) == 1
    return losses.pop()


@pytest.fixture(scope="module")
def loss_of() -> Callable[[float], float]:
    """A loss between that of all-reduce (0) and that of workers that do not mix before the end (1)."""
    mixed_loss, isolated_loss = taught(4, AllReduce(), Cast()), taught(4, Gossip(Isolated()), Cast())
    assert 1.15 * mixed_loss < isolated_loss
    return lambda part: mixed_loss + part * (isolated_loss - mixed_loss)


@pytest.mark.short(4)
@each
def test_every_topology_learns_as_all_reduce_does(sync, loss_of) -> None:
    assert taught(4, sync, Cast()) <= loss_of(0.3)


@pytest.mark.long
@pytest.mark.parametrize("sync", [Gossip(), Gossip(OnePeerExponential()), Gossip(asynchronous=True)], ids=notation.show)
def test_every_compressor_learns_and_helps(sync, loss_of) -> None:
    one_of_each = {type(row.compress): row for row in reversed(COMPRESSORS)}
    one_of_each[TwoBit] = Row(TwoBit(0.1), 1.0)  # no two workers differ by the table's threshold
    losses = {row: taught(4, sync, row.compress) for row in one_of_each.values()}
    assert [row for row, loss in losses.items() if loss > loss_of(0.4 if row.relative < 1 else 0.9)] == []


@pytest.mark.parametrize("sync", [Gossip(), Gossip(asynchronous=True)], ids=notation.show)
def test_same_seed_same_run_with_stochastic_rounding(sync) -> None:
    def run(comm: Communicator):
        return TASK.learn(comm, sync, Quantize(bits=4, stochastic=True)), comm.now()

    assert simulate(3, run) == simulate(3, run)


def test_a_slow_worker_delays_no_other_and_every_micro_batch_is_computed_once() -> None:
    paces, task = [1.0, 1.0, 1.0, 0.3], RegressionTask(60)  # micro-batches per 10 ms

    def run(comm: Communicator):
        return task.learn(comm, Gossip(asynchronous=True), Cast(), lambda: comm.compute(0.01 / paces[comm.rank]))

    outcome = simulate(4, run, link=Link(latency_seconds=1e-3))
    computed = sorted(key for _, keys, _ in outcome for key in keys)
    assert computed == [(t, m) for t in range(task.steps) for m in range(task.COUNT)]
    done_per_second = len(computed) / max(seconds for _, _, seconds in outcome)
    assert done_per_second >= 0.85 * sum(paces) * 100
    even = simulate(4, task.learn, AllReduce(), Cast())[0][0]
    assert outcome[0][0] <= 1.1 * even


# Actors.


def test_weights_stay_weighted_means_with_any_number_of_concurrent_requests() -> None:
    """All send requests before any answer is processed, so workers with a request in flight receive several."""
    size, random = 8, np.random.default_rng(0)
    parameters = {"w": nn.Parameter(torch.zeros(size, dtype=torch.float64))}
    plans = Weights(parameters, Cast()).plans
    partners = [
        GossipActor(plans, [torch.eye(size, dtype=torch.float64)[rank].repeat(2)], size) for rank in range(size)
    ]

    class DirectConnection:
        """Calls the actor at once; the test processes the answer later."""

        def __init__(self, caller: int, called: int) -> None:
            self.caller, self.called = caller, called

        def call(self, message: ActorMessage) -> list[ActorMessage]:
            answers: list[ActorMessage] = []
            partners[self.called].receive(self.caller, message, answers.append)
            return answers

    for _ in range(30):
        requests = [(rank, (rank + int(random.integers(1, size))) % size) for rank in range(size)]
        answers = [partners[rank].request(peer, DirectConnection(rank, peer)) for rank, peer in requests]
        for i in random.permutation(size):
            rank, peer = requests[i]
            partners[rank].receive_answer(peer, answers[i][0])
        mixed = torch.stack([partner.weights()[0][:size] for partner in partners])
        assert mixed.min() >= -1e-12
        torch.testing.assert_close(mixed.sum(0), torch.ones(size, dtype=torch.float64))
    assert apart(mixed) < 1e-3


def test_optimizer_steps_and_concurrent_mixing_add_up() -> None:
    w = {"w": nn.Parameter(torch.zeros(16))}
    plans = Weights(w, Cast()).plans
    partner, other = GossipActor(plans, [torch.zeros(16)], 1), GossipActor(plans, [torch.full((16,), 4.0)], 1)
    taken = partner.weights()
    answers: list[ActorMessage] = []
    other.request(0, type("Line", (), {"call": lambda _, message: partner.receive(1, message, answers.append)})())
    partner.add_step(taken, [taken[0] + 1])
    assert partner.weights()[0][0] == 3.0
    other.receive_answer(0, answers[0])
    assert other.weights()[0][0] == 2.0


# Estimates.


@pytest.mark.parametrize("row", COMPRESSORS, ids=lambda row: notation.show(row.compress))
def test_both_ends_have_the_same_estimate_and_it_converges(row) -> None:
    shape = {"a": nn.Parameter(torch.zeros(20, 30)), "b": nn.Parameter(torch.zeros(70))}
    weights = Weights(shape, row.compress)
    sender, receiver = (PeerEstimate(weights.plans, weights.read()) for _ in range(2))
    with torch.no_grad():
        for i, p in enumerate(shape.values()):
            p.copy_(100 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    xs = weights.read()
    distance = before = float(torch.cat(xs).norm())
    for _ in range(100):
        noted = receiver.receive(sender.send(xs, [0.25, 3.0]))
        assert noted[:2] == [0.25, 3.0]
        assert all(torch.equal(a, b) for a, b in zip(sender.estimates, receiver.estimates))
        assert sender.fidelity == receiver.fidelity
        assert all(0 <= f <= 1 for f in sender.fidelity)
        remaining = float(torch.cat([x - h for x, h in zip(xs, sender.estimates)]).norm())
        assert remaining <= distance * (1 + 1e-6) + 1e-6
        distance = remaining
    assert distance <= 0.15 * before


def test_a_message_that_is_too_short_is_refused() -> None:
    weights = Weights({"w": nn.Parameter(torch.zeros(40))}, Cast("bf16"))
    message = PeerEstimate(weights.plans, weights.read()).send(weights.read(), [1.0])
    for wrong in (message[:64], message[:0], message.float()):
        with pytest.raises(ValueError, match="does not fit these weights"):
            PeerEstimate(weights.plans, weights.read()).receive(wrong)


# Values.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"synchronize_every": 0}, "synchronize_every=0 is not a whole number from 1"),
        ({"topology": OnePeerExponential(), "push_sum": False}, "push_sum=False with the directed topology"),
        ({"asynchronous": True, "push_sum": True}, "push_sum=True with asynchronous=True"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Gossip(**arguments)


@each
def test_values_are_written_and_read(sync) -> None:
    assert Config.of({"sync": notation.show(sync)}).sync == sync


# Real processes.


@pytest.mark.parametrize(
    ("size", "sync", "compress", "kind"),
    [
        (3, Gossip(), Cast(), "shared_memory"),
        (2, Gossip(OnePeerExponential()), TopK(0.2), "gloo"),
        (3, Gossip(asynchronous=True), Quantize(bits=8), "shared_memory"),
    ],
    ids=["ring", "one peer", "asynchronous"],
)
def test_real_processes_learn_too(tmp_path, size, sync, compress, kind) -> None:
    outcome = run_processes(size, in_a_process, TASK.steps, sync, compress, kind, f"file://{tmp_path}/store")
    computed = sorted(key for _, keys in outcome for key in keys)
    assert computed == [(t, m) for t in range(TASK.steps) for m in range(TASK.COUNT)]
    (loss,) = {loss for loss, _ in outcome}
    assert loss == pytest.approx(taught(size, sync, compress), rel=0.15 if sync.asynchronous else 1e-3)

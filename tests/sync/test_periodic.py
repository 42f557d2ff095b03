"""Local SGD, block momentum and DiLoCo against their papers' equations, for four workers."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from unisono import notation
from unisono.comm import Faulty, InjectedFailure, Link, outcomes, simulate
from unisono.compress import Cast, Exact, Quantize
from unisono.config import Config
from unisono.errors import InvalidInput, PeerLost
from unisono.sync import (
    AllReduce,
    Average,
    BlockMomentum,
    DiLoCo,
    LocalSGD,
    Loop,
    Momentum,
    Nesterov,
)
from unisono.sync.sync_schedule import SyncSchedule, divide

N, LR, MOMENTUM = 4, 0.1, 0.9
SHAPES = [(6,), (2, 3), (5,), (4,)]
FORMS = [
    LocalSGD(4),
    LocalSGD(3, start=2),
    BlockMomentum(4),
    BlockMomentum(4, nesterov=True),
    DiLoCo(4),
    DiLoCo(6, fragments=2),
    DiLoCo(6, fragments=2, delay=2),
    DiLoCo(5, outer=Average(), delay=4, mix=0.25),
]
form = pytest.mark.parametrize("sync", FORMS, ids=notation.show)


# --- the library, bound by hand


def start() -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]


def gradient(theta: Tensor, rank: int, t: int) -> Tensor:
    return torch.sin(theta * 2 + rank + 0.3 * t) + 0.1 * theta


class BoundWorker:
    """One worker of a run, with a synthetic gradient of `tensors` in each step."""

    def __init__(self, comm, sync, compress=None, *, tensors=None, momentum=MOMENTUM, seconds=0.0) -> None:
        self.comm, self.seconds = comm, seconds
        self.parameters = {f"p{i}": nn.Parameter(x.clone()) for i, x in enumerate(tensors or start())}
        self.optimizer = torch.optim.SGD(self.parameters.values(), LR, momentum=momentum)
        self.bound = sync.bind(self.parameters, comm, compress or Cast(), Loop(self.optimizer, control=comm.size))
        self.controls: dict[int, list[float]] = {}
        self.step_seconds: list[float] = []

    def now(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters.values()]

    def take_steps(self, first: int, until: int) -> list[list[Tensor]]:
        """The parameters after each of these steps."""
        return [self.step(t) for t in range(first, until)]

    def step(self, t: int) -> list[Tensor]:
        began, bound = self.comm.now(), self.bound
        bound.begin()
        if self.seconds:
            self.comm.compute(self.seconds)
        bound.close([t + 1.0 if rank == self.comm.rank else 0.0 for rank in range(self.comm.size)])
        for name, p in self.parameters.items():
            bound.offer(name, gradient(p.detach(), self.comm.rank, t), 1 / self.comm.size)
        change = bound.settle()
        change.apply(self.local_step, 1.0 if change.agreed else self.comm.size)
        if change.agreed:
            self.controls[t] = change.control
        self.step_seconds.append(self.comm.now() - began)
        return self.now()

    def local_step(self) -> None:
        self.optimizer.step()
        self.after_local_step = self.now()


def trajectory(comm, sync, steps, **options) -> list[list[Tensor]]:
    return BoundWorker(comm, sync, **options).take_steps(0, steps)


# --- the papers, by hand


class Worker:
    """Momentum SGD on a list of tensors."""

    def __init__(self, rank: int) -> None:
        self.rank, self.theta = rank, start()
        self.speed = [torch.zeros_like(x) for x in self.theta]

    def gradients(self, t: int) -> list[Tensor]:
        return [gradient(x, self.rank, t) for x in self.theta]

    def step(self, gradients: list[Tensor]) -> None:
        self.speed = [MOMENTUM * v + g for v, g in zip(self.speed, gradients)]
        self.theta = [x - LR * v for x, v in zip(self.theta, self.speed)]


def mean(many: list[list[Tensor]]) -> list[Tensor]:
    return [sum(group) / len(many) for group in zip(*many)]


def by_stich_and_lin(steps: int, every: int, first: int):
    workers = [Worker(rank) for rank in range(N)]
    for t in range(steps):
        if t < first:
            together = mean([w.gradients(t) for w in workers])
        for w in workers:
            w.step(together if t < first else w.gradients(t))
        if t >= first and (t + 1 - first) % every == 0:
            average = mean([w.theta for w in workers])
            for w in workers:
                w.theta = average
        yield [w.theta for w in workers]


def by_chen_and_huo(steps: int, every: int, eta: float, nesterov: bool):
    workers = [Worker(rank) for rank in range(N)]
    w_t, w_g, delta = start(), start(), [torch.zeros(shape) for shape in SHAPES]
    for t in range(steps):
        for w in workers:
            w.step(w.gradients(t))
        if (t + 1) % every == 0:
            g = [a - b for a, b in zip(mean([w.theta for w in workers]), w_g)]
            delta = [eta * d + x for d, x in zip(delta, g)]
            w_t = [a + d for a, d in zip(w_t, delta)]
            w_g = [a + eta * d for a, d in zip(w_t, delta)] if nesterov else w_t
            for w in workers:
                w.theta = w_g
        yield [w.theta for w in workers]


def by_douillard(steps: int, every: int, fragments: list[list[int]], offsets: list[int], delay: int, alpha: float):
    """Algorithm 2 of the second paper, which with one fragment and no delay is algorithm 1 of the first. The outer
    optimizer is torch's."""
    workers = [Worker(rank) for rank in range(N)]
    anchor = [nn.Parameter(x) for x in start()]
    outer = [torch.optim.SGD([anchor[i] for i in f], 0.7, momentum=0.9, nesterov=True) for f in fragments]
    in_flight: dict[int, list[Tensor]] = {}
    for t in range(1, steps + 1):
        for w in workers:
            w.step(w.gradients(t - 1))
        for f, which in enumerate(fragments):
            if (t - offsets[f]) % every == 0:
                in_flight[f] = mean([[anchor[i].detach() - w.theta[i] for i in which] for w in workers])
            if (t - offsets[f] - delay) % every == 0 and f in in_flight:
                for i, g in zip(which, in_flight.pop(f)):
                    anchor[i].grad = g
                outer[f].step()
                for w in workers:
                    for i in which:
                        w.theta[i] = alpha * w.theta[i] + (1 - alpha) * anchor[i].detach()
        yield [list(w.theta) for w in workers]


DIVIDED = [[0, 2], [1, 3]]  # 6 and 6 numbers, then 5 and 4: each to the lighter one
PAPERS = [
    (LocalSGD(4), by_stich_and_lin(12, 4, 0)),
    (LocalSGD(4, start=3), by_stich_and_lin(15, 4, 3)),
    (BlockMomentum(4), by_chen_and_huo(12, 4, 0.75, False)),
    (BlockMomentum(4, nesterov=True), by_chen_and_huo(12, 4, 0.75, True)),
    (BlockMomentum(3, momentum=0.5), by_chen_and_huo(9, 3, 0.5, False)),
    (DiLoCo(4), by_douillard(12, 4, [[0, 1, 2, 3]], [0], 0, 0.0)),
    (DiLoCo(6, fragments=2), by_douillard(18, 6, DIVIDED, [3, 0], 0, 0.0)),
    (DiLoCo(6, fragments=2, delay=2), by_douillard(18, 6, DIVIDED, [3, 0], 2, 0.5)),
    (DiLoCo(6, fragments=2, delay=5, mix=0.1), by_douillard(20, 6, DIVIDED, [3, 0], 5, 0.1)),
]


@pytest.mark.parametrize(("sync", "paper"), PAPERS, ids=lambda v: notation.show(v) if v in FORMS else None)
def test_every_step_is_the_papers(sync, paper) -> None:
    expected = list(paper)
    ours = simulate(N, trajectory, sync, len(expected))
    for t, workers in enumerate(expected):
        for rank, theta in enumerate(workers):
            torch.testing.assert_close(ours[rank][t], theta, rtol=0, atol=1e-9)


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_averaging_after_each_step_of_plain_sgd_is_all_reduce() -> None:
    plain = partial(trajectory, momentum=0.0)
    close(simulate(N, plain, LocalSGD(1), 6), simulate(N, plain, AllReduce(), 6))


def test_with_one_replica_block_momentum_is_the_local_optimizer() -> None:
    close(simulate(1, trajectory, BlockMomentum(2), 6), simulate(1, trajectory, AllReduce(), 6))


@pytest.mark.parametrize("outer", [Momentum(1.0, 0.0), Nesterov(1, 0), Average()])
def test_an_outer_step_of_one_without_momentum_is_local_sgd(outer) -> None:
    close(simulate(N, trajectory, DiLoCo(3, outer=outer), 9), simulate(N, trajectory, LocalSGD(3), 9))


# --- the wire


@pytest.mark.parametrize("compress", [Cast(), Quantize(4)])
def test_a_delay_hides_communication(compress) -> None:
    tensors, link = [torch.ones(50, 40), torch.ones(3000)], Link(bytes_per_second=2e4 * bits(compress) / 32)

    def run(comm, sync):
        worker = BoundWorker(comm, sync, compress, tensors=tensors, seconds=1.0)
        worker.take_steps(0, 16)
        return worker.step_seconds

    for seconds in simulate(N, run, DiLoCo(8, fragments=2, delay=3), link=link):
        assert seconds == pytest.approx([1.0] * 16, abs=1e-6)
    for seconds in simulate(N, run, DiLoCo(8), link=link):
        assert [s > 1.5 for s in seconds] == [t % 8 == 7 for t in range(16)]


def test_a_step_waits_for_communication_after_the_delay() -> None:
    def run(comm):
        worker = BoundWorker(comm, DiLoCo(8, delay=2), tensors=[torch.ones(5000)], seconds=1.0)
        worker.take_steps(0, 10)
        return worker.step_seconds

    for seconds in simulate(N, run, link=Link(bytes_per_second=1e4)):  # 3 seconds for 2/4 of 20 kB, three times
        assert seconds[:9] == pytest.approx([1.0] * 9, abs=1e-6)
        assert 1.5 < seconds[9] < 2.5


def bits(compress) -> float:
    return compress.blank((), 1 << 16, torch.float32, torch.device("meta")).nbytes * 8 / (1 << 16)


def test_four_bits_each_64_steps_send_a_450th_of_all_reduce() -> None:
    tensors = [torch.ones(500, 500)]

    def run(comm, sync, compress, steps):
        trajectory(comm, sync, steps, compress=compress, tensors=tensors)
        return comm.bytes_sent

    for sent, all_reduce in zip(simulate(N, run, DiLoCo(64), Quantize(4), 64),
                                simulate(N, run, AllReduce(), Cast(), 2)):  # fmt: skip
        assert 0 < sent <= all_reduce / 2 * 64 / 450


# --- the contract


AGREED = {
    LocalSGD(4): {3: 3, 7: 7, 11: 11},
    LocalSGD(4, start=2): {0: 0, 1: 1, 5: 5, 9: 9},
    BlockMomentum(5): {4: 4, 9: 9},
    DiLoCo(6, fragments=2): {5: 5, 11: 11},
    DiLoCo(6, fragments=2, delay=2): {7: 5},  # the control words of two steps before
}


@pytest.mark.parametrize("sync", AGREED, ids=notation.show)
def test_control_words_arrive_in_the_same_steps_on_all_workers(sync) -> None:
    def run(comm):
        worker = BoundWorker(comm, sync)
        worker.take_steps(0, 12)
        return worker.controls

    assert simulate(N, run) == [{t: [sent_at + 1.0] * N for t, sent_at in AGREED[sync].items()}] * N


@pytest.mark.short(8)
@form
@pytest.mark.parametrize("compress", [Cast(), Cast("bf16"), Exact()], ids=notation.show)
def test_after_a_synchronization_all_are_equal_and_the_mean_is_preserved(sync, compress) -> None:
    def run(comm, steps):
        worker = BoundWorker(comm, sync, compress)
        worker.take_steps(0, steps)
        before = worker.now()
        worker.bound.synchronize()
        sent = comm.bytes_sent
        worker.bound.synchronize()
        assert comm.bytes_sent == sent  # they are known to be equal
        return before, worker.now()

    for steps in range(0, 13):
        synchronized = simulate(N, run, steps)
        assert all(torch.equal(a, b) for _, after in synchronized for a, b in zip(after, synchronized[0][1]))
        if not getattr(sync, "delay", 0):
            close(synchronized[0][1], mean([before for before, _ in synchronized]))


@form
def test_averaged_weights_are_equal_inside_and_restored_outside(sync) -> None:
    def run(comm, steps):
        worker = BoundWorker(comm, sync)
        worker.take_steps(0, steps)
        before, sent = worker.now(), comm.bytes_sent
        with worker.bound.averaged_weights():
            inside = worker.now()
        assert comm.bytes_sent == sent
        assert all(map(torch.equal, worker.now(), before))
        return inside

    for steps in (0, 1, 4, 6, 8, 9):
        first, *others = simulate(N, run, steps)
        assert all(all(map(torch.equal, first, other)) for other in others)


def test_averaged_weights_are_those_of_the_last_average() -> None:
    def run(comm):
        worker = BoundWorker(comm, LocalSGD(3))
        worker.take_steps(0, 3)
        at_average = worker.now()
        worker.step(3)
        with worker.bound.averaged_weights():
            return all(map(torch.equal, worker.now(), at_average))

    assert all(simulate(2, run))


@form
@pytest.mark.parametrize("synchronized", [1, 2, 3, 4, 5, 7, 8])
def test_a_resumed_run_equals_an_uninterrupted_one(sync, synchronized) -> None:
    def run(comm):
        one = BoundWorker(comm, sync)
        one.take_steps(0, synchronized)
        one.bound.synchronize()
        state = {name: x.clone() for name, x in one.bound.state_dict().items()}
        two = BoundWorker(comm.channel("another attempt"), sync, tensors=one.now())
        for p, q in zip(one.parameters.values(), two.parameters.values()):
            two.optimizer.state[q] = {k: v.clone() for k, v in one.optimizer.state[p].items()}
        two.bound.load_state_dict(state)
        uninterrupted, resumed = (
            one.take_steps(synchronized, synchronized + 15),
            two.take_steps(synchronized, synchronized + 15),
        )
        assert {t: words for t, words in one.controls.items() if t >= synchronized} == two.controls
        assert len(two.controls) >= 2
        assert all(torch.equal(a, b) for x, y in zip(uninterrupted, resumed) for a, b in zip(x, y))
        return {name: x.tolist() for name, x in state.items()}

    first, *others = simulate(N, run)
    assert all(state == first for state in others)


@form
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_lost_peer_leaves_the_survivors_after_their_own_step(sync, count) -> None:
    workers: dict[int, BoundWorker] = {}

    def run(comm):
        workers[comm.rank] = worker = BoundWorker(Faulty(comm, [InjectedFailure(rank=1, verb="*", count=count)]), sync)
        worker.after_local_step = worker.now()
        worker.take_steps(0, 40)

    outcome = outcomes(N, run)
    for rank in (0, 2, 3):
        assert isinstance(outcome[rank], PeerLost)
        assert all(map(torch.equal, workers[rank].now(), workers[rank].after_local_step))


# --- values


@pytest.mark.parametrize(
    "text",
    [
        "DiLoCo()",
        "DiLoCo(every=64, outer=Nesterov(0.7, 0.9), fragments=4, delay=2)",
        "DiLoCo(100, Momentum(lr=0.5), mix=0.3)",
        "DiLoCo(100, Average())",
        "LocalSGD(16, start=100)",
        "BlockMomentum(every=4, momentum=0.9, nesterov=True)",
    ],
)
def test_a_config_reads_and_shows_them(text) -> None:
    config = Config.of({"sync": text})
    assert Config.of(config.mapping()) == config
    assert type(config.sync).__name__ == text.partition("(")[0]


def test_an_outer_optimizer_is_not_a_synchronizer() -> None:
    with pytest.raises(InvalidInput, match="sync"):
        Config.of({"sync": "Nesterov()"})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LocalSGD(0), "every=0"),
        (lambda: LocalSGD(True), "every=True"),
        (lambda: LocalSGD(2, start=-1), "start=-1"),
        (lambda: BlockMomentum(momentum=1.0), "momentum=1.0"),
        (lambda: BlockMomentum(nesterov=1), "nesterov=1"),
        (lambda: DiLoCo(4, fragments=5), "fragments=5 is more than 4"),
        (lambda: DiLoCo(4, delay=4), "delay=4 is more than 3"),
        (lambda: DiLoCo(mix=1.0), "mix=1.0"),
        (lambda: DiLoCo(outer="Nesterov"), "outer='Nesterov'"),
        (lambda: Nesterov(lr=0), "lr=0"),
        (lambda: Momentum(momentum=float("nan")), "momentum=nan"),
    ],
)
def test_invalid_arguments_are_refused_by_name(build, words) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(InvalidInput, match="fragments = 5"):
        simulate(1, trajectory, DiLoCo(9, fragments=5), 1)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 30))
def test_fragments_are_balanced_to_within_the_largest_tensor(sizes, count) -> None:
    count = min(count, len(sizes))
    given = {f"p{i}": nn.Parameter(torch.zeros(n)) for i, n in enumerate(sizes)}
    parts = divide(given, count)
    assert sorted(name for part in parts for name in part) == sorted(given)
    assert all(parts)
    weights = [sum(p.numel() for p in part.values()) for part in parts]
    assert max(weights) - min(weights) <= max(sizes)


def test_equal_layers_are_strided() -> None:
    layers = {f"layer{i}": nn.Parameter(torch.zeros(8)) for i in range(6)}
    assert [list(part) for part in divide(layers, 2)] == [
        ["layer0", "layer2", "layer4"],
        ["layer1", "layer3", "layer5"],
    ]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_each_fragment_is_due_once_in_each_period(every, fragments, first) -> None:
    schedule = SyncSchedule(every, start=first, fragments=min(every, fragments))
    due = [schedule.due(taken) for taken in range(1, first + 2 * every + 1)]
    assert due[:first] == [None] * first
    for period in (due[first : first + every], due[first + every :]):
        assert [f for f in period if f is not None] == list(range(schedule.fragments))
        assert period[-1] == schedule.fragments - 1

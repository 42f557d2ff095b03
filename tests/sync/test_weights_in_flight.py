"""Weights that arrive during the forward pass: never used before they have arrived, never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding
from torch.utils.checkpoint import checkpoint

from tests.support.replicas import replica_of
from tests.sync.nets import MICRO_BATCHES, SAMPLES, adamw, advance, bound, sgd, train
from unisono import notation
from unisono.checkpoint import fingerprint
from unisono.comm import Link, Simulated, simulate
from unisono.compress import Cast, Compressor, Exact, OneBit, Quantize, TopK
from unisono.elastic.model_state import weights_of
from unisono.errors import PeerLost, UnisonoError
from unisono.sync import AllReduce, LocalSGD, ParameterServer, Synchronizer
from unisono.sync.server.shard_client import ShardClient

SLOW = Link(bytes_per_second=2e4, latency_seconds=1e-3)
SMALL = ParameterServer(servers=2, slice_bytes=64)


class Crooked(nn.Module):
    """Uses weights in every way except by calling their modules in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # has an out_proj that it never calls
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.again = nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # computed twice
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.late = nn.Linear(8, 10, bias=False)  # used before it is called
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.embed.weight
        self.in_loss = nn.Linear(8, 10, bias=False)  # used when all else is over

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embed(x) + embedding(x, self.late.weight))
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        for scale in self.scales:
            hidden = hidden * scale
        hidden = self.parametrized(hidden) + checkpoint(self.again, hidden, use_reentrant=False)
        hidden = self.recurrent(hidden)[0].mean(1)
        self.hidden = hidden
        return self.tied(hidden) + self.late(hidden)


class Trainee:
    """A replica of `model`, and its steps."""

    def __init__(self, comm: Simulated, model: nn.Module, sync: Synchronizer, compress: Compressor = Exact(),
                 optimizer: Callable[..., torch.optim.Optimizer] = adamw, **options: Any) -> None:  # fmt: skip
        self.comm, self.model = comm, model
        self.replica = replica_of(model, optimizer(model.parameters()), comm, sync=sync, compress=compress,
                               micro_batches=comm.size, reference_weight=float(comm.size), **options)  # fmt: skip

    def step(self, loss: Callable[[], torch.Tensor]) -> None:
        self.replica.begin_micro_batch(self.comm.rank, 1.0)
        value = loss()
        self.replica.end_forward(float(value.detach()), last=True)
        self.replica.backward(value)
        self.replica.settle().apply()


def learn_crooked(comm: Simulated, sync: Synchronizer, steps: int = 6, **options: Any) -> str:
    torch.manual_seed(0)
    trainee = Trainee(comm, Crooked(), sync, **options)
    random = torch.Generator().manual_seed(1)
    for x, y in zip(*torch.randint(0, 10, (2, steps, 4, 5), generator=random)):

        def loss(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            model: Any = trainee.model
            out = model(x.roll(comm.rank))
            return cross_entropy(out + model.hidden @ model.in_loss.weight.T, y[:, 0])

        trainee.step(loss)
    trainee.replica.sync.wait_parameters()
    return fingerprint(weights_of(trainee.model))


def test_every_use_of_a_weight_sees_the_new_one() -> None:
    expected = set(simulate(2, learn_crooked, AllReduce()))
    assert len(expected) == 1
    for sync in (SMALL, ParameterServer()):
        assert set(simulate(2, learn_crooked, sync, link=SLOW)) == expected
        assert set(simulate(2, partial(learn_crooked, overlap=False), sync, link=SLOW)) == expected


class Layer(nn.Module):
    """Takes a second; records when it begins and how many slices are still in flight then."""

    def __init__(self, trace: list[tuple[float, int]], comm: Simulated) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10_000))  # in two bytes each, a second on a slow link
        self.trace, self.comm = trace, comm
        self.pull_in_flight: Callable[[], int] = lambda: 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trace.append((self.comm.now(), self.pull_in_flight()))
        self.comm.compute(1.0)
        return x * self.weight


def layers(
    comm: Simulated, sync: Synchronizer, steps: int = 3, **options: Any
) -> tuple[float, list[tuple[float, int]]]:
    """When the last step was applied, and the trace of its forward pass."""
    trace: list[tuple[float, int]] = []
    model = nn.Sequential(*[Layer(trace, comm) for _ in range(4)])
    trainee = Trainee(comm, model, sync, Cast("bf16"), sgd, **options)
    for layer in model:
        layer.pull_in_flight = lambda: sum(out.pull_in_flight is not None for out in trainee.replica.sync.client_slices)
    applied = 0.0
    shares: Iterator[Any] = iter(trainee.replica.sync.work_items(0, steps, lambda: False) or range(steps))
    for _ in shares:
        trace.clear()
        trainee.step(lambda: model(torch.ones(10_000)).mean())
        applied, began = comm.now(), applied
    return began, trace


def test_the_first_layers_compute_while_the_last_weights_are_in_flight() -> None:
    sync = ParameterServer(slice_bytes=40_000)
    began, trace = simulate(1, layers, sync, link=SLOW)[0]
    assert [pull_in_flight for _, pull_in_flight in trace] == [
        3,
        2,
        1,
        0,
    ]  # each layer has waited for its own, and for no other
    begins = [time - began for time, _ in trace]
    assert begins == pytest.approx([1, 2, 3, 4], abs=0.1)
    _, whole = simulate(1, partial(layers, overlap=False), sync, link=SLOW)[0]
    _, eager = simulate(1, partial(layers, lazy=False), sync, link=SLOW)[0]
    assert [pull_in_flight for _, pull_in_flight in whole + eager] == [0] * 8


@pytest.mark.parametrize("staleness", [0, 1, inf])
def test_overlap_saves_the_time_of_the_forward_pass(staleness: float) -> None:
    def seconds(**options: Any) -> float:
        ((_, trace),) = simulate(1, partial(layers, steps=8, **options), sync, link=SLOW)
        return trace[-1][0]

    sync = ParameterServer(slice_bytes=40_000, staleness=staleness)
    saved = seconds(lazy=False) - seconds()
    assert saved / 6 > 2.9  # of 4 seconds forward in each step from the third on, which the weights take as well


def test_pushes_are_in_flight_while_the_next_item_begins() -> None:
    """Layers begin before all pushes are answered; the sums of these pushes are not overwritten."""

    def run(comm: Simulated) -> list[int]:
        trace: list[tuple[float, int]] = []
        model = nn.Sequential(*[Layer(trace, comm) for _ in range(2)])
        sync = ParameterServer(slice_bytes=40_000, staleness=inf)
        trainee = Trainee(comm, model, sync, Cast("bf16"), sgd)
        push_in_flight = []
        for _ in trainee.replica.sync.work_items(0, 3, lambda: False):
            trainee.step(lambda: model(torch.ones(10_000)).mean())
            push_in_flight.append(sum(out.push_in_flight is not None for out in trainee.replica.sync.client_slices))
        trainee.replica.synchronize()
        return [*push_in_flight, sum(out.push_in_flight is not None for out in trainee.replica.sync.client_slices)]

    assert simulate(1, run, link=SLOW) == [[2, 2, 2, 0]]


def test_a_weight_that_was_not_waited_for_is_refused_with_the_cure() -> None:
    class Whimsical(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.way = "not at all"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            if self.way == "called":
                return self.two(x)
            return x @ self.two.weight if self.way == "used" else x

    def run(comm: Simulated, way: str, **options: Any) -> None:
        model = Whimsical()
        trainee = Trainee(comm, model, SMALL, **options)
        for model.way in ("not at all", "not at all", way):
            trainee.step(lambda: model(torch.ones(2, 4)).sum())

    with pytest.raises(UnisonoError, match=r"two\.weight has a gradient.*overlap=False"):
        simulate(2, run, "used")
    simulate(2, run, "called")
    simulate(2, partial(run, overlap=False), "used")
    simulate(2, partial(run, lazy=False), "used")


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_there_are_no_hooks_where_no_weights_are_in_flight() -> None:
    def hooks(comm: Simulated, sync: Synchronizer, **options: Any) -> int:
        return hooks_of(bound(comm, sync, Cast(), **options).model)

    assert simulate(2, hooks, SMALL) != [0, 0]
    for sync in (AllReduce(), LocalSGD(2), ParameterServer(backup_workers=1)):
        assert simulate(2, hooks, sync) == [0, 0]
    for options in ({"overlap": False}, {"lazy": False}):
        assert simulate(2, partial(hooks, **options), SMALL) == [0, 0]
    assert simulate(1, hooks, SMALL) == [0]  # a single replica has no server


def test_hooks_are_removed_and_the_model_can_be_copied_with_them() -> None:
    def run(comm: Simulated) -> None:
        replica = bound(comm, SMALL, Cast())
        advance(replica, comm, 0, 2)
        twin = copy.deepcopy(replica.model)
        twin(torch.arange(4))
        replica.unbind()
        assert hooks_of(replica.model) == 0

    simulate(2, run)


def test_weights_that_are_not_lazy_are_there_right_after_the_step() -> None:
    def run(comm: Simulated, sync: Synchronizer, **options: Any) -> list[str]:
        seen = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        trainee = Trainee(comm, model, sync, **options)
        for _ in range(4):
            trainee.step(lambda: model(torch.ones(2, 6)).sum())
            seen.append(fingerprint(weights_of(model)))
        return seen

    expected = simulate(2, run, AllReduce())
    assert simulate(2, partial(run, lazy=False), SMALL, link=SLOW) == expected
    assert simulate(2, run, SMALL, link=SLOW) != expected  # else this would show nothing


@pytest.mark.parametrize("between", ["synchronize", "averaged_weights", "state_dict", "unbind", "wait_parameters"])
def test_weights_read_between_steps_are_the_new_ones(between: str) -> None:
    def run(comm: Simulated, sync: Synchronizer) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        trainee = Trainee(comm, model, sync)
        for _ in range(3):
            trainee.step(lambda: model(torch.ones(2, 6)).sum())
        if between == "averaged_weights":
            with trainee.replica.sync.averaged_weights():
                return fingerprint(weights_of(model))
        owner = trainee.replica if between in ("synchronize", "unbind") else trainee.replica.sync
        getattr(owner, between)()
        return fingerprint(weights_of(model))

    expected = simulate(2, run, AllReduce())
    assert simulate(2, run, SMALL, link=SLOW) == expected


@pytest.mark.short(2)
@pytest.mark.parametrize("compress", [OneBit(), TopK(0.2), Quantize(4)], ids=notation.show)
@pytest.mark.parametrize(("sync", "size"), [(SMALL, 2), (ParameterServer(staleness=inf, slice_bytes=64), 1)])
def test_residuals_are_committed_once_and_in_time(sync: ParameterServer, size: int, compress: Compressor) -> None:
    late = simulate(size, partial(train, steps=8), sync, compress, adamw, link=SLOW)
    here = simulate(size, partial(train, steps=8, lazy=False), sync, compress, adamw, link=SLOW)
    assert [digest for _, digest, _ in late] == [digest for _, digest, _ in here]


def test_a_step_counts_as_taken_when_its_weights_are_here_and_all_answers_may_come_before_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listened: list[int] = []
    monkeypatch.setattr(ShardClient, "listen", lambda self: listened.append(self._shard))

    def run(comm: Simulated) -> tuple[set[bool], ...]:
        replica = bound(comm, SMALL, Quantize(4))
        advance(replica, comm, 0, 3, wait=False)
        server: Any = replica.sync
        before, taking = {out.applied for out in server.client_slices}, len(server._taking)
        replica.sync.wait_parameters()
        after, left = {out.applied for out in server.client_slices}, len(server._taking)
        assert (taking, left) == (2, 0)
        assert all(not each._open for each in server.shard_clients)
        return before, after

    assert simulate(2, run, link=SLOW) == [({True}, {False})] * 2
    assert sorted(listened) == [0] * 6 + [1] * 6  # both workers to both servers, after each of three steps


# --- a server that is lost meanwhile


def learn_with_a_loss(comm: Simulated, sync: Synchronizer, lost: int | None, where: str) -> str:
    """Server `lost` is lost in the fourth step: before its forward pass, or after the module `where`."""
    replica = bound(comm, sync, Exact(), adamw)
    armed = False

    def lose(*_: Any) -> None:
        nonlocal armed
        if armed and comm.rank == 0 and lost is not None:
            comm.world.lose_server(lost)
        armed = False

    if where:
        replica.model.get_submodule(where).register_forward_hook(lose)
    advance(replica, comm, 0, 3, wait=False)
    armed = True
    if not where:
        lose()
    advance(replica, comm, 3, 6)
    comm.channel("end").gather(torch.zeros(1)).wait()  # who leaves takes its server along
    return fingerprint(weights_of(replica.model))


@pytest.mark.short(3)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("where", ["", "embed", "first", "second"])
def test_a_server_may_be_lost_while_weights_are_in_flight(where: str, lost: int) -> None:
    expected = simulate(2, learn_with_a_loss, AllReduce(), None, where)
    assert simulate(2, learn_with_a_loss, SMALL, lost, where, link=SLOW) == expected


@pytest.mark.parametrize("where", ["", "first"])
def test_without_a_copy_the_loss_shows_where_the_weights_are_needed(where: str) -> None:
    def run(comm: Simulated) -> bool:
        with pytest.raises(PeerLost, match="server"):
            learn_with_a_loss(comm, ParameterServer(servers=2, copies=1, slice_bytes=64), 1, where)
        return True

    assert simulate(2, run, link=SLOW) == [True, True]


def test_micro_batches_after_the_first_wait_for_nothing() -> None:
    assert MICRO_BATCHES // 2 > 1 < SAMPLES

    def run(comm: Simulated) -> list[int]:
        replica = bound(comm, SMALL, Cast())
        waits: list[int] = []
        need = replica.sync.wait_parameters
        assert replica._lazy is not None
        replica._lazy._need = lambda names: (waits.append(len(replica.sync._pending)), need(names))
        advance(replica, comm, 0, 3)
        return waits

    for waits in simulate(2, run):
        modules = 5  # embed, first, norm, second, head; the root has the tied weight
        assert len(waits) <= 3 * (modules + 2)

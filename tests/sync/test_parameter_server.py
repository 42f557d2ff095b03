"""Parameter servers, synchronous, bounded and asynchronous: staleness, lost workers, refusals."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.compress.laws import TABLE
from tests.support.communicators import connected
from tests.support.pair_task import learn, loss_of, network
from tests.support.processes import run
from tests.support.replicas import replica_of
from tests.sync.nets import adamw, advance, bound, plain, sgd, train
from unisono import notation
from unisono.checkpoint import fingerprint
from unisono.comm import ActorMessage, Communicator, Link, simulate
from unisono.compress import COMPRESSORS, Cast, Exact, Quantize, Span, TwoBit
from unisono.elastic.model_state import load_state, state_of, weights_of
from unisono.errors import InvalidInput, PeerLost
from unisono.sync import AllReduce, DelayCompensation, Loop, ParameterServer, ScaledByStaleness
from unisono.sync.server.actor import MOVED, ParameterServerActor, slice_specs
from unisono.sync.server.slice_optimizer import ELEMENTWISE, SliceOptimizer, numbers_of
from unisono.sync.server.slice_state import Push, ServerSlice, ServerTerms, SliceSpec
from unisono.sync.server.slices import plan_slices

INF = math.inf


# --- the value


def test_values_are_written_and_read() -> None:
    from unisono.config import Config

    for text in (
        "ParameterServer()",
        "ParameterServer(servers=2, staleness=4, compensate=DelayCompensation(strength=0.1, adaptive=True))",
        "ParameterServer(staleness=inf, compensate=ScaledByStaleness(), per_update=1)",
        "ParameterServer(backup_workers=1)",
    ):
        assert notation.show(Config.of({"sync": text}).sync) == text


@pytest.mark.parametrize(
    "options",
    [
        {"servers": 0},
        {"staleness": -1},
        {"staleness": 1.5},
        {"staleness": math.nan},
        {"copies": 2},
        {"copies": 3, "servers": 3},
        {"backup_workers": 1, "staleness": 1},
        {"per_update": 1},
        {"start": 10},
        {"lease": 1},
        {"start": -1, "staleness": 1},
        {"compensate": DelayCompensation()},
        {"compensate": 3, "staleness": 1},
        {"slice_bytes": 0},
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_by_name(options) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ParameterServer(**options)


def bound_with_one_worker(sync, optimizer, parameters, **options):
    return simulate(1, lambda comm: sync.bind(parameters, comm, Cast(), Loop(optimizer, **options)))


def test_an_optimizer_that_needs_whole_parameters_is_refused_with_the_cure() -> None:
    w = nn.Parameter(torch.zeros(3))
    with pytest.raises(InvalidInput, match=r"optimizer = LBFGS.*AdamW.*AllReduce"):
        bound_with_one_worker(ParameterServer(), torch.optim.LBFGS([w]), {"w": w})
    with pytest.raises(InvalidInput, match="backup_workers = 1"):
        bound_with_one_worker(ParameterServer(backup_workers=1), sgd([w]), {"w": w})
    with pytest.raises(InvalidInput, match="per_update = 4"):
        bound_with_one_worker(ParameterServer(staleness=1, per_update=4), sgd([w]), {"w": w}, micro_batches=6)
    with pytest.raises(InvalidInput, match="lease = 4"):
        bound_with_one_worker(ParameterServer(staleness=1, lease=4), sgd([w]), {"w": w}, micro_batches=6)


@dataclass(frozen=True)
class OwnCompressor(Cast):
    """Does not come with the library."""


@dataclass(frozen=True)
class OwnCompensation(ScaledByStaleness):
    """Does not come with the library."""


def test_a_value_that_a_server_process_cannot_make_is_refused_with_the_cure() -> None:
    def bind(comm, sync, compress):
        w = nn.Parameter(torch.zeros(3))
        return sync.bind({"w": w}, comm, compress, Loop(sgd([w])))

    with pytest.raises(InvalidInput, match=r"compress = OwnCompressor.*use Cast, Exact"):
        simulate(1, bind, ParameterServer(), OwnCompressor())
    with pytest.raises(InvalidInput, match=r"compensate = OwnCompensation.*use DelayCompensation, ScaledByStaleness"):
        simulate(1, bind, ParameterServer(staleness=1, compensate=OwnCompensation()), Cast())


@pytest.mark.parametrize("compress", [*COMPRESSORS.values()], ids=lambda kind: kind.__name__)
def test_a_server_process_makes_every_compressor(compress) -> None:
    w = {"w": nn.Parameter(torch.zeros(40, 40))}
    value = (TwoBit(0.1) if compress is TwoBit else compress()).for_sums_of(4)
    slices = plan_slices(w, value, 1 << 20, 1)
    config = ParameterServer()._config(slices, sgd(w.values()), {"w": 0}, {"workers": 1, "control": 0, "needed": 1})
    ((_, spec),) = slice_specs(json.loads(json.dumps(config))).values()
    assert spec.compress == slices[0].compress


def test_the_config_of_a_server_cannot_name_an_import() -> None:
    w = {"w": nn.Parameter(torch.zeros(4))}
    slices = plan_slices(w, Cast(), 1 << 20, 1)
    config = ParameterServer()._config(slices, sgd(w.values()), {"w": 0}, {"workers": 1, "control": 0, "needed": 1})
    for text in ("os.system('true')", "__import__('os')", "subprocess:Popen", "Path()"):
        with pytest.raises(InvalidInput, match="compress = "):
            ParameterServerActor(0, {**config, "compressors": [text]})
        with pytest.raises(InvalidInput, match="compensate = "):
            ParameterServerActor(0, {**config, "terms": {**config["terms"], "compensate": text}})


# --- slices


def test_slices_cover_every_number_once_and_shards_are_of_about_the_same_size() -> None:
    torch.manual_seed(0)
    shapes = [(300, 64), (64,), (64, 7, 3, 3), (), (5, 2000), (3,), (0, 4)]
    parameters = {str(i): nn.Parameter(torch.randn(shape)) for i, shape in enumerate(shapes)}
    parameters["last"] = nn.Parameter(torch.randn(8, 6, 4, 4).to(memory_format=torch.channels_last))
    parameters["turned"] = nn.Parameter(torch.randn(40, 50).t())
    parameters["half"] = nn.Parameter(torch.randn(100, 30).bfloat16())
    for servers in (1, 2, 3):
        slices = plan_slices(parameters, Cast(), 4000, servers)
        counted = {name: torch.zeros_like(p) for name, p in parameters.items()}
        loads = [0] * servers
        for each in slices:
            assert each.nbytes <= 8000  # a single row of the widest matrix
            loads[each.shard] += each.nbytes
            flat = torch.empty(each.numel, dtype=each.dtype)
            for piece in each.pieces:
                part = piece.of(counted[piece.span.name])
                view = flat[piece.span.start : piece.span.stop].as_strided(piece.span.shape, piece.span.stride)
                assert view.shape == part.shape
                part += 1
        assert all(bool((c == 1).all()) for c in counted.values())
        assert max(loads) - min(loads) <= 8000
        assert slices[0].pieces[0].span.name == "0"


# --- synchronous


def test_it_is_all_reduce_to_the_bit_in_exact_mode() -> None:
    expected = {digest for _, digest, _ in simulate(3, train, AllReduce(), Exact(), adamw)}
    for servers, size in ((1, 4), (2, 3), (3, 2)):
        sync = ParameterServer(servers=servers, slice_bytes=300)
        assert {digest for _, digest, _ in simulate(size, train, sync, Exact(), adamw)} == expected


OPTIMIZERS = {name: lambda p, kind=kind: kind(p, lr=0.01) for name, kind in ELEMENTWISE.items()} | {
    "Nesterov": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1),
    "fused amsgrad": lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.9), amsgrad=True, fused=True),
    "centered": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
}
NOISE = ("first.bias", "norm.running_mean")  # the norm takes them out, so that their gradient is rounding


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_elementwise_optimizer_steps_as_locally_and_its_state_is_fetched(optimizer) -> None:
    def run(comm, sync):
        replica = bound(comm, sync, Cast(), optimizer)
        advance(replica, comm, 0, 4)
        replica.synchronize()
        return replica

    (local,), (remote, _) = simulate(1, run, AllReduce()), simulate(2, run, ParameterServer(slice_bytes=300))
    names = {id(p): name for name, p in local.model.named_parameters()}
    for (p, mine), theirs in zip(local.optimizer.state.items(), remote.optimizer.state.values(), strict=True):
        assert {k for k, v in mine.items() if v is not None} == set(theirs), names[id(p)]
        for key, value in theirs.items() if names[id(p)] not in NOISE else ():
            torch.testing.assert_close(value, mine[key], rtol=1e-3, atol=1e-4)
            assert value.dtype == mine[key].dtype
    for name, weight in weights_of(remote.model).items():
        if name not in NOISE:
            torch.testing.assert_close(weight, weights_of(local.model)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_server_takes_the_plain_step_where_a_worker_on_a_gpu_takes_the_fused_one(dtype) -> None:
    weight, gradient = torch.randn(2, 99, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain = nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([plain], 0.1, 0.9)
    ours = SliceOptimizer("SGD", [{**numbers_of(optimizer)[0], "fused": True}], [0], [weight])
    for _ in range(2):
        ours.step([gradient], [{**numbers_of(optimizer)[0], "fused": True}])
        plain.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weight, plain.detach())


@pytest.mark.parametrize("sync", [ParameterServer(), ParameterServer(servers=3, slice_bytes=300)], ids=notation.show)
def test_clipping_is_on_the_norm_over_all_shards(sync) -> None:
    clipped = partial(train, clip=0.05)
    expected, _, _ = simulate(2, clipped, AllReduce(), Cast())[0]
    assert simulate(2, clipped, sync, Cast())[0][0] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("sync", [ParameterServer(), ParameterServer(servers=3, slice_bytes=300)], ids=notation.show)
def test_the_norm_excludes_given_parameters(sync) -> None:
    """Slices hold several parameters, and parts of one."""

    def norms(comm: Communicator, sync) -> list[float]:
        torch.manual_seed(0)
        parameters = {f"p{i}": nn.Parameter(torch.randn(40, 3 + i)) for i in range(4)}
        optimizer = torch.optim.SGD(parameters.values(), 0.1)
        bound = sync.bind(parameters, comm, Cast(), Loop(optimizer))
        bound.begin()
        bound.close([])
        for i, (name, parameter) in enumerate(parameters.items()):
            bound.offer(name, parameter.detach() * (i + 1) * (comm.rank + 1), 0.5)
        change = bound.settle()
        found = [change.norm(without) for without in ((), ("p0",), ("p1", "p3"), tuple(parameters))]
        change.apply(optimizer.step)
        bound.wait_parameters()
        return found

    expected, found = simulate(2, norms, AllReduce())[0], simulate(2, norms, sync)
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-5)
    assert expected[0] > expected[1] > expected[2] > expected[3] == 0


def test_a_late_request_for_a_norm_gets_that_of_its_own_step() -> None:
    """The other worker is at the next step by then: each worker is late once."""

    def late(comm, model, step) -> None:
        comm.compute(10.0 if comm.rank == len(seen[comm.rank]) % 2 else 0.0)
        seen[comm.rank].append(step)

    seen: list[list] = [[], []]
    run = lambda comm: train(comm, ParameterServer(), Cast(), clip=0.05, on_step=partial(late, comm))
    expected, _, _ = simulate(2, partial(train, clip=0.05), AllReduce(), Cast())[0]
    assert simulate(2, run)[0][0] == pytest.approx(expected, abs=2e-6)


def test_sparse_gradients_are_taken_as_dense_ones() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    expected, _ = plain(optimizer, sparse=True)
    losses, _, _ = simulate(2, partial(train, sparse=True), ParameterServer(), Cast(), optimizer)[0]
    assert losses == pytest.approx(expected, abs=2e-6)


def test_groups_schedules_frozen_groups_and_several_dtypes() -> None:
    def step(comm, sync):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4).double(), "c": nn.Linear(4, 4)})
        groups = [{"params": model["a"].parameters(), "lr": 0.5, "momentum": 0.9}, {"params": model["b"].parameters()}]
        optimizer = torch.optim.SGD(groups, 0.1)
        replica = replica_of(model, optimizer, comm, sync=sync, compress=Cast(), micro_batches=2, reference_weight=2.0)
        x = torch.randn(2, 4)
        for t in range(3):
            optimizer.param_groups[0]["lr"] = 0.5 / (t + 1)
            for m in range(2) if comm.size == 1 else [comm.rank]:
                replica.begin_micro_batch(m, 1.0)
                replica.end_forward(0.0, last=m == 1 or comm.size == 2)
                replica.backward(model["b"](model["c"](model["a"](x[m])).double()).square().sum())
            replica.settle().apply()
        replica.sync.wait_parameters()
        return weights_of(model)

    (expected,), got = simulate(1, step, AllReduce()), simulate(2, step, ParameterServer(servers=2, slice_bytes=64))
    for name, tensor in expected.items():
        torch.testing.assert_close(got[0][name], tensor)
        assert torch.equal(got[0][name], got[1][name])


def test_a_step_that_was_dropped_is_computed_again() -> None:
    def run(comm, attempts):
        replica = bound(comm, ParameterServer(servers=2, slice_bytes=300), Exact())
        advance(replica, comm, 0, 2)
        for attempt in range(attempts):
            model = replica.model
            replica.begin_micro_batch(comm.rank, 4.0)
            replica.end_forward(0.0, last=attempt != 1)
            replica.backward(model(torch.arange(4)).sum() * 100)
            if attempt == 2:
                replica.settle()  # the gradient is received, but not applied
            replica.begin()
        advance(replica, comm, 2, 5)
        return fingerprint(dict(replica.model.named_parameters()))

    assert simulate(2, run, 3) == simulate(2, run, 0)


@pytest.mark.parametrize("compress", [Exact(), Cast("bf16")], ids=notation.show)
def test_a_resumed_run_equals_an_uninterrupted_one(compress) -> None:
    def run(comm):
        one = bound(comm, ParameterServer(), compress, adamw)
        advance(one, comm, 0, 4)
        one.synchronize()
        two = bound(comm.channel("another attempt"), ParameterServer(servers=2, slice_bytes=300), compress, adamw)
        state, numbers = state_of(one.optimizer, one.model)
        load_state(two.optimizer, two.model, {name: x.clone() for name, x in state.items()}, numbers)
        two.model.load_state_dict(one.model.state_dict())
        two.sync.load_state_dict(one.sync.state_dict())
        two.begin()
        for each in (one, two):
            advance(each, comm, 4, 8)
            each.synchronize()
        assert state_of(one.optimizer, one.model)[0].keys() == state_of(two.optimizer, two.model)[0].keys() != set()
        for name, tensor in weights_of(one.model).items():
            torch.testing.assert_close(weights_of(two.model)[name], tensor, rtol=1e-6, atol=1e-7)

    simulate(2, run)


# --- compression

EVERY_KIND = list({type(row.compress): row.compress for row in TABLE}.values())
EVERY_KIND = [TwoBit(0.02) if isinstance(each, TwoBit) else each for each in EVERY_KIND]


@pytest.mark.short(8)
@pytest.mark.parametrize("sync", [ParameterServer(), ParameterServer(staleness=INF)], ids=notation.show)
@pytest.mark.parametrize("compress", EVERY_KIND, ids=notation.show)
def test_it_learns_with_every_compressor(sync, compress) -> None:
    start, losses = loss_of(network()), simulate(2, learn, sync, compress, 30)
    assert len(set(losses)) == 1
    assert losses[0] < start * (0.5 if compress.is_lossless(torch.float32) else 0.9)


def test_weights_are_compressed_like_gradients() -> None:
    def run(comm, compress, steps):
        learn(comm, ParameterServer(), compress, steps)
        return comm.world.hosts, comm.bytes_sent

    def sent(compress, steps):
        """The bytes that worker 1 sends; the answers of the servers are as long, and not counted."""
        return simulate(2, run, compress, steps)[1][1]

    raw, small = (sent(c, 9) - sent(c, 4) for c in (Cast(), Quantize(8)))
    assert small < raw / 3


# --- staleness


class Counter(nn.Module):
    """Its gradient is always -1, so that its weight counts the updates."""

    def __init__(self, numel: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self) -> torch.Tensor:
        return -self.weight.sum()


def counting(comm, sync, *, micro_batches=4, optimizer=lambda p: torch.optim.SGD(p, 1.0), compress=Cast(), numel=5):
    model = Counter(numel)
    return replica_of(model, optimizer(model.parameters()), comm, sync=sync, compress=compress,
                   micro_batches=micro_batches, reference_weight=float(micro_batches))  # fmt: skip


def counted(replica) -> float:
    (count,) = set(replica.model.weight.tolist())
    return count


def one_step(replica, micro_batches, before=lambda: None) -> None:
    for m in micro_batches:
        replica.begin_micro_batch(m, 1.0)
        before()
        replica.end_forward(0.0, last=m == micro_batches[-1])
        replica.backward(replica.model())
    replica.settle().apply()


def count_steps(comm, sync, steps, seconds, micro_batches=4):
    """Train a `Counter` for `steps` steps; all work items, and when each was begun and computed."""
    replica, trace = counting(comm, sync, micro_batches=micro_batches), []
    for t, mine in replica.sync.work_items(0, steps, lambda: False):
        replica.sync.wait_parameters()  # what takes time here is computing with the weights
        began, ended = comm.now(), []

        def compute(ended=ended) -> None:
            comm.compute(seconds(comm.rank))
            ended.append(comm.now())

        one_step(replica, mine, before=compute)
        trace.append((t, mine, began, ended[-1]))
    end = comm.now()
    replica.synchronize()
    assert replica.sync.leased_until == steps
    return trace, counted(replica), end


@pytest.mark.parametrize("staleness", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_never_exceeded_and_every_micro_batch_is_used_once(staleness, seed) -> None:
    draw = random.Random(seed)
    traces = simulate(
        3, count_steps, ParameterServer(staleness=staleness), 20, lambda rank: draw.choice([0.1, 1.0, 30.0]), 6
    )
    shares = sorted((t, m) for trace, *_ in traces for t, mine, *_ in trace for m in mine)
    assert shares == [(t, m) for t in range(20) for m in range(6)]
    assert [count for _, count, _ in traces] == pytest.approx([20] * 3)  # one step for each global batch
    assert min(staleness, 2) <= max(map(max, lateness(traces).values())) <= staleness  # and made use of


def lateness(traces) -> dict[int, list[int]]:
    """For each step, how many steps older the weights of its work items were."""
    ended = [(end, t) for trace, *_ in traces for t, _, _, end in trace]
    late: dict[int, list[int]] = {}
    for t, _, began, _ in (share for trace, *_ in traces for share in trace):
        late.setdefault(t, []).append(t - min([s for end, s in ended if end > began] + [t]))
    return late


@pytest.mark.parametrize("per_update", [None, 2])
def test_nothing_is_late_before_the_start(per_update) -> None:
    sync = ParameterServer(staleness=INF, start=8, per_update=per_update)
    late = lateness(simulate(3, count_steps, sync, 20, [0.1, 1.0, 3.0].__getitem__, 6))
    assert all(late[t] == [0] * len(late[t]) for t in range(8))
    assert max(max(late[t]) for t in range(8, 20)) >= 1


def test_a_fast_worker_waits_only_at_the_bound() -> None:
    def run(staleness):
        speeds = {0: 0.1, 1: 0.1, 2: 50.0}
        return simulate(3, count_steps, ParameterServer(staleness=staleness), 12, speeds.get, 3)

    held, free = run(2), run(INF)
    # The slow worker is at step 0, so the others come to step 2, and no further.
    assert max(t for t, _, began, _ in held[0][0] + held[1][0] if began < 49) == 2
    assert max(t for t, _, began, _ in free[0][0] + free[1][0] if began < 49) == 11
    waited = [then - end for (*_, end), (*_, then, _) in pairwise(held[0][0]) if then < 49]
    assert max(waited) < 0.01  # until then they do not wait


def test_asynchronous_workers_run_at_full_speed() -> None:
    speeds = [0.1, 0.1, 0.1, 0.1 / 0.3]
    outcome = simulate(4, count_steps, ParameterServer(staleness=INF), 60, speeds.__getitem__, 4)
    seconds = max(end for *_, end in outcome)
    possible = sum(1 / s for s in speeds)
    assert 60 * 4 / seconds >= 0.85 * possible


@pytest.mark.parametrize(
    ("lease", "compensate", "waits"),
    [
        (1, None, lambda s: s < 0.5),
        (1, ScaledByStaleness(), lambda s: s < 0.5),
        (1, DelayCompensation(), lambda s: s > 1.0),  # looks at what the push was computed on
        (4, None, lambda s: s > 1.0),
    ],
)
def test_a_push_of_a_small_part_of_an_update_is_not_waited_for(lease, compensate, waits) -> None:
    """A push takes a second to send, and computing longer. An answer without new weights is a few bytes."""
    compute_seconds, link = 5.0, Link(bytes_per_second=1000.0, latency_seconds=0.0)

    def run(comm):
        replica = counting(comm, ParameterServer(staleness=INF, lease=lease, compensate=compensate),
                           micro_batches=32, numel=250)  # fmt: skip
        begun = []
        for _, mine in replica.sync.work_items(0, 1, lambda: False):
            replica.sync.wait_parameters()
            begun.append(comm.now())
            one_step(replica, mine, before=lambda: comm.compute(compute_seconds))
        replica.synchronize()
        return [after - before - lease * compute_seconds for before, after in pairwise(begun)]

    waited = [seconds for each in simulate(2, run, link=link) for seconds in each[:-1]]
    assert len(waited) >= 4
    assert waits(statistics.median(waited))


def test_smaller_leases_shorten_waits() -> None:
    """No worker may compute on old weights here, so all wait for the last lease of each step."""
    speeds = [0.1, 0.1, 0.1, 0.1 / 0.3]
    possible = 40 * 16 / sum(1 / s for s in speeds)
    seconds = {}
    for lease in (4, 1):
        sync = ParameterServer(staleness=INF, start=40, lease=lease)
        outcome = simulate(4, count_steps, sync, 40, speeds.__getitem__, 16)
        shares = [mine for trace, *_ in outcome for _, mine, *_ in trace]
        assert {len(mine) for mine in shares} == {lease}
        assert sum(map(len, shares)) == 40 * 16
        seconds[lease] = max(end for *_, end in outcome)
    assert possible / seconds[1] > 0.7
    assert possible / seconds[4] < 0.5


def test_a_range_ends_for_all_workers_after_a_step_that_was_begun() -> None:
    def run(comm):
        replica, done = counting(comm, ParameterServer(staleness=1)), []

        def stop() -> bool:
            return comm.rank == 1 and len(done) >= 5

        for t, mine in replica.sync.work_items(0, 100, stop):
            one_step(replica, mine, before=lambda: comm.compute(0.1 + comm.rank))
            done += [(t, m) for m in mine]
        first = replica.sync.leased_until
        for t, mine in replica.sync.work_items(first, first + 3, lambda: False):
            one_step(replica, mine)
            done += [(t, m) for m in mine]
        replica.synchronize()
        return first, replica.sync.leased_until, done, counted(replica)

    outcome = simulate(3, run)
    ((first, last, *_),) = {each[:2] for each in outcome}
    assert last == first + 3 < 100
    assert sorted(m for each in outcome for m in each[2]) == [(t, m) for t in range(last) for m in range(4)]
    assert all(each[3] == last for each in outcome)


@pytest.mark.parametrize(("per_update", "steps"), [(None, 10), (2, 20), (1, 40)])
def test_as_many_steps_as_there_are_updates(per_update, steps) -> None:
    sync = ParameterServer(staleness=INF, per_update=per_update)
    outcome = simulate(3, count_steps, sync, 10, lambda rank: 0.1 * (1 + rank))
    assert [count for _, count, _ in outcome] == [steps] * 3


def test_late_gradients_are_dropped_and_counted_with_backup_workers() -> None:
    def run(comm):
        replica = counting(comm, ParameterServer(backup_workers=1), micro_batches=3)
        taken = []
        for t, mine in replica.sync.work_items(0, 20, lambda: False):
            seconds = 10.0 if comm.rank == 2 and t == 3 else 1.0
            one_step(replica, mine, before=partial(comm.compute, seconds))
            taken.append(t)
        replica.synchronize()
        return taken, counted(replica), replica.sync.dropped, replica.sync.leased_until, comm.now()

    outcome = simulate(3, run)
    assert [taken for taken, *_ in outcome[:2]] == [list(range(20))] * 2
    slow = outcome[2][0]
    assert slow[:4] == [0, 1, 2, 3]
    assert slow[4] > 10  # where the others are by then
    assert all(count == 20 for _, count, *_ in outcome)
    assert sum(dropped for _, _, dropped, *_ in outcome) >= 10  # one of each complete step, but not of those left out
    assert outcome[2][2] >= 1
    assert all(leased_until == 20 for *_, leased_until, _ in outcome)
    assert max(now for *_, now in outcome) < 25  # no worker waited for the slow one


# --- compensation, against an independent implementation


def server_slice(compensate, workers=2, numel=4, lr=0.5) -> ServerSlice:
    w = nn.Parameter(torch.zeros(numel))
    spec = SliceSpec((Span("w", torch.Size([numel]), (1,), 0, numel),), (0,), torch.float32, Cast())
    terms = ServerTerms(workers, False, 1, False, compensate, 0, "SGD", numbers_of(torch.optim.SGD([w], lr)))
    return ServerSlice(spec, terms, torch.linspace(-1, 1, numel))


@pytest.mark.parametrize(
    "compensate", [DelayCompensation(0.3), DelayCompensation(2.0, adaptive=True, decay=0.9), ScaledByStaleness(), None]
)
def test_late_gradients_are_corrected_as_in_the_papers(compensate) -> None:
    torch.manual_seed(0)
    keeps, lr = server_slice(compensate), 0.5
    now = torch.linspace(-1, 1, 4)
    held, versions, square = [now.clone(), now.clone()], [0, 0], torch.zeros(4)
    groups = keeps._terms.groups
    for number, worker in enumerate([0, 0, 1, 0, 1, 1, 0]):
        g = torch.randn(4)
        send = [0, 0, 1, 0, 1, 1, 0][:number].count(worker) + 1
        keeps.add_push(Push(worker, send, g.clone(), [True], versions[worker]), groups)
        late = number - versions[worker]
        if isinstance(compensate, DelayCompensation):
            square = compensate.decay * square + (1 - compensate.decay) * g * g
            strength = compensate.strength / ((square + 1e-7).sqrt() if compensate.adaptive else 1)
            g = g + strength * g * g * (now - held[worker])
        elif compensate is not None:
            g = g / max(1, late)
        now = now - lr * g
        answer, _ = keeps.update(worker, versions[worker])
        held[worker], versions[worker] = now.clone(), number + 1
        assert answer.fields["version"] == number + 1
        torch.testing.assert_close(keeps.weights, now)


# --- a server that is lost


def counted_through_a_loss(comm, sync, lost, seconds, together) -> tuple[float, list[float]]:
    """Train a `Counter`; server `lost` is lost after so many `seconds`."""
    replica = counting(comm, sync, micro_batches=4)
    if comm.rank == 0:
        comm.world.scheduler.at(comm.now() + seconds, lambda: comm.world.lose_server(lost))
    mine, times = range(comm.rank * 2, comm.rank * 2 + 2), []
    for _ in range(8):
        one_step(replica, mine, before=lambda: comm.compute(0.01))
        times.append(comm.now())
    replica.synchronize()
    return counted(replica), times


MOMENTS = [0.0, 0.0001, 0.0003, 0.02, 0.0201, 0.0202, 0.0203, 0.0204, 0.0206, 0.021, 0.0215, 0.022, 0.05, 0.1, 0.3]


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("seconds", MOMENTS)
@pytest.mark.parametrize("staleness", [0, INF])
def test_a_lost_server_loses_no_acknowledged_push(lost, seconds, staleness) -> None:
    sync = ParameterServer(servers=2, staleness=staleness, slice_bytes=8)
    outcome = simulate(2, counted_through_a_loss, sync, lost, seconds, None)
    assert [count for count, _ in outcome] == [8.0, 8.0]
    gaps = [later - earlier for _, times in outcome for earlier, later in pairwise(times)]
    assert max(gaps) < 2


@pytest.mark.short(3)
@pytest.mark.parametrize("compress", [Exact(), Quantize(8), Cast("bf16")], ids=notation.show)
@pytest.mark.parametrize("seconds", [0.0203, 0.05, 0.1001])
def test_a_copy_continues_with_the_same_bits(compress, seconds) -> None:
    def run(comm, lose):
        if lose and comm.rank == 0:
            comm.world.scheduler.at(seconds, lambda: comm.world.lose_server(1))
        replica = bound(comm, ParameterServer(servers=3, slice_bytes=300), compress, adamw)
        advance(replica, comm, 0, 3)
        comm.compute(0.1)
        advance(replica, comm, 3, 6)
        replica.synchronize()
        return fingerprint(dict(replica.model.named_parameters()))

    assert simulate(2, run, True) == simulate(2, run, False)


def test_without_a_copy_a_lost_server_is_a_lost_peer() -> None:
    def run(comm):
        replica = counting(comm, ParameterServer(servers=2, copies=1, slice_bytes=8))
        one_step(replica, [comm.rank])
        comm.world.lose_server(1)
        with pytest.raises(PeerLost, match="server"):
            one_step(replica, [comm.rank])
        return True

    assert simulate(2, run) == [True, True]


class FakeLine:
    """A connection to a server in this thread."""

    def __init__(self, to: ParameterServerActor, sender: int) -> None:
        self.to, self.sender, self.gone = to, sender, False

    def send(self, message, then) -> None:
        then(None) if self.gone else self.to.receive(self.sender, message, then)


def servers_of(sync, numel=6, workers=2, control=1):
    """Two connected servers, with their weights."""
    w = nn.Parameter(torch.zeros(numel))
    slices = plan_slices({"w": w}, Cast(), sync.slice_bytes, sync.servers)
    terms = {"workers": workers, "control": control, "needed": 2}
    config = sync._config(slices, torch.optim.SGD([w], 1.0), {"w": 0}, terms)
    servers = [ParameterServerActor(i, config) for i in range(sync.servers)]
    for server in servers:
        server.connected([FakeLine(each, -1 - server._number) for each in servers])
    for i, each in enumerate(slices):
        send(servers[each.shard], 0, "init", [torch.zeros(each.numel)], shard=each.shard, slice=i, places=[])
    return servers, slices, config["terms"]["groups"]


def send(server, worker, kind, tensors=(), **fields) -> list[ActorMessage]:
    """Send a message; returns the list of its answers, to which later ones are appended."""
    answers: list[ActorMessage] = []
    server.receive(worker, ActorMessage(kind, fields, list(tensors)), answers.append)
    return answers


def test_an_unreachable_server_redirects_its_workers_to_the_copy() -> None:
    servers, _, groups = servers_of(ParameterServer(servers=2, staleness=INF, slice_bytes=12))
    push = {"shard": 0, "slice": 0, "used": [True], "version": 0, "tick": 0, "count": 2, "scale": 1.0, "groups": groups}
    waiting = send(servers[0], 1, "pull", shard=0, slice=0, need=3, edition=0)
    assert send(servers[0], 0, "push", [-torch.ones(3)], number=1, **push)[0].kind == "taken"
    assert send(servers[1], 0, "push", [-torch.ones(3)], number=1, **push)[0].kind == "taken"  # once more: counts once
    answer = send(servers[1], 0, "pull", shard=0, slice=0, need=0, edition=0)
    assert answer[0].tensors[0].tolist() == [1.0] * 3
    late = send(servers[0], 1, "push", [-torch.ones(3)], number=1, **push)
    assert [each.kind for each in late + waiting] == [MOVED.kind] * 2
    assert send(servers[0], 1, "look", shard=0, slice=0, state=0)[0].kind == MOVED.kind


@pytest.mark.parametrize("staleness", [0, INF])
def test_invalid_messages_are_refused_and_change_nothing(staleness) -> None:
    servers, slices, groups = servers_of(ParameterServer(servers=2, staleness=staleness, slice_bytes=12))
    server = servers[0]
    good = {"shard": 0, "slice": 0, "number": 1, "used": [True], "version": 0, "tick": 0, "count": 1, "scale": 1.0,
            "groups": groups}  # fmt: skip
    x = torch.ones(3)
    bad: list[tuple[str, dict, list]] = [
        ("drop table", {"shard": 0}, []),
        ("__init__", {"shard": 0}, []),
        ("push", {}, []),
        ("push", {**good, "shard": 5}, [x]),
        ("push", {**good, "slice": 7}, [x]),
        ("push", {**good, "slice": True}, [x]),
        ("push", {**good, "slice": next(i for i, s in enumerate(slices) if s.shard == 1)}, [x]),
        ("push", good, [torch.ones(4)]),
        ("push", good, [torch.ones(3, dtype=torch.float64)]),
        ("push", good, []),
        ("push", good, [x, x]),
        ("push", {**good, "used": [True] * 2}, [x]),
        ("push", {**good, "used": [1]}, [x]),
        ("push", {**good, "version": 9}, [x]),
        ("push", {**good, "number": -1}, [x]),
        ("push", {**good, "count": 0}, [x]),
        ("push", {**good, "scale": math.nan}, [x]),
        ("push", {**good, "scale": "1"}, [x]),
        ("hear", {"shard": 0, "round": 1}, [torch.ones(2, dtype=torch.float64)]),
        ("take", {"shard": 0, "round": 1, "scale": math.inf, "groups": groups}, []),
        ("take", {"shard": 0, "round": 1, "scale": 1.0, "groups": []}, []),
        ("take", {"shard": 0, "round": 1, "scale": 1.0, "groups": [{**groups[0], "lr": "much"}]}, []),
        ("pull", {"shard": 0, "slice": 0, "need": -1, "edition": 0}, []),
        ("pull", {"shard": 0, "slice": 0, "need": 0}, []),
        ("init", {"shard": 0, "slice": 0, "places": []}, [torch.ones(2)]),
        ("init", {"shard": 0, "slice": 0, "places": 3}, [x]),
    ]
    if staleness:
        bad += [("push", {**good, "number": 5}, [x]), ("push", {**good, "groups": None}, [x])]
    for kind, fields, tensors in bad:
        with pytest.raises(ValueError, match=r"\w"):
            send(server, 0, kind, tensors, **fields)
    for sender in (2, 99, -1, -7):  # not workers of this run, or not servers that have this shard
        with pytest.raises(ValueError, match=r"shard|worker"):
            send(server, sender, "push", [x], **good)
    assert send(server, 0, "look", shard=0, slice=0, state=0)[0].tensors[0].tolist() == [0.0] * 3
    for worker in (0, 1):
        send(server, worker, "push", [-x], **good)
    send(server, 0, "take", shard=0, round=1, scale=1.0, groups=groups) if not staleness else None
    assert send(server, 0, "pull", shard=0, slice=0, need=0, edition=0)[0].fields["version"] == 1


def test_weights_in_flight_are_not_overwritten() -> None:
    servers, _, groups = servers_of(ParameterServer(staleness=INF))
    push = {"shard": 0, "slice": 0, "used": [True], "version": 0, "tick": 0, "count": 2, "scale": 1.0, "groups": groups}
    (sent,) = send(servers[0], 0, "pull", shard=0, slice=0, need=0, edition=9)
    held, before = sent.tensors[0], sent.tensors[0].clone()
    send(servers[0], 1, "push", [-torch.ones(6)], number=1, **push)
    assert torch.equal(held, before)
    (new,) = send(servers[0], 1, "pull", shard=0, slice=0, need=0, edition=0)
    assert torch.equal(new.tensors[0], before + 1)
    send(servers[0], 0, "look", shard=0, slice=0, state=0)  # worker 0 has got what it was sent
    servers[0].lost(0)
    servers[0].lost(1)
    send(servers[0], 1, "push", [-torch.ones(6)], number=2, **push)
    assert torch.equal(new.tensors[0], before + 2)  # in place again


# --- real processes


def on_processes(size, directory, law, *args):
    return run(size, connected, "gloo", f"file://{directory}", 60.0, law, *args, timeout_seconds=150.0)


def synchronous_and_asynchronous(comm: Communicator) -> tuple[str, float]:
    digest = train(comm.channel("one"), ParameterServer(servers=2, slice_bytes=300), Exact(), steps=3)[1]
    replica = counting(comm.channel("other"), ParameterServer(staleness=1))
    for _, mine in replica.sync.work_items(0, 5, lambda: False):
        one_step(replica, mine)
    replica.synchronize()
    return digest, counted(replica)


def test_real_processes_compute_what_simulated_ones_do(tmp_path) -> None:
    assert on_processes(2, tmp_path, synchronous_and_asynchronous) == simulate(2, synchronous_and_asynchronous)


def count_while_a_server_is_killed(comm: Communicator, staleness: float) -> tuple[float, float]:
    replica = counting(comm, ParameterServer(servers=2, staleness=staleness, slice_bytes=8), micro_batches=2)
    times = []
    for t in range(40):
        if t == 20 and comm.rank == 0:  # the other one is somewhere in the midst of a step
            os.kill(replica.sync.shard_clients[0].connection.pid, signal.SIGKILL)
        one_step(replica, [comm.rank])
        times.append(time.monotonic())
    replica.synchronize()
    return counted(replica), max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.short(1)
@pytest.mark.parametrize("staleness", [0, INF])
def test_a_killed_server_costs_no_acknowledged_push_and_less_than_two_seconds(tmp_path, staleness) -> None:
    outcome = on_processes(2, tmp_path, count_while_a_server_is_killed, staleness)
    assert [count for count, _ in outcome] == [40.0, 40.0]
    assert max(gap for _, gap in outcome) < 2


def test_a_piece_may_get_its_first_gradient_later_than_others() -> None:
    stepped = []
    for fused in (False, True):
        whole = torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1, momentum=0.9, nesterov=True, fused=fused)
        weights, numbers = [torch.ones(3), torch.ones(2)], numbers_of(whole)
        optimizer = SliceOptimizer("SGD", numbers, [0, 0], weights)
        for late in (None, torch.ones(2), None, torch.ones(2)):
            optimizer.step([torch.ones(3), late], numbers)
        stepped.append(weights)
    torch.testing.assert_close(stepped[0], stepped[1])
    assert stepped[0][1][0] < 1

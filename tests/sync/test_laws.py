"""Laws of every synchronizer, on the simulated communicator. A new synchronizer needs a row."""

from functools import partial
from math import inf

import pytest
import torch

from tests.sync.nets import MICRO_BATCHES, Net, adamw, advance, bound, plain, sgd, train
from unisono import notation
from unisono.checkpoint import fingerprint
from unisono.comm import Faulty, InjectedFailure, outcomes, simulate
from unisono.compress import Cast, Exact
from unisono.elastic.model_state import load_state, state_of, weights_of
from unisono.errors import PeerLost
from unisono.sync import (
    SYNCHRONIZERS,
    AllReduce,
    BlockMomentum,
    DiLoCo,
    Gossip,
    LocalSGD,
    OnePeerExponential,
    ParameterServer,
    Synchronizer,
)
from unisono.trainer.replica import Replica

SYNCHRONOUS: list[Synchronizer] = [
    AllReduce(),
    AllReduce(bucket_bytes=600, first_bytes=100),
    ParameterServer(),
    ParameterServer(servers=2, slice_bytes=200),
]
LOCAL_STEPS: list[Synchronizer] = [
    LocalSGD(2),
    LocalSGD(2, start=2),
    BlockMomentum(3),
    DiLoCo(3),
    DiLoCo(4, fragments=3, delay=2),
    Gossip(synchronize_every=2),
    Gossip(OnePeerExponential()),
    Gossip(asynchronous=True),
    ParameterServer(staleness=1),
    ParameterServer(servers=2, staleness=inf, slice_bytes=200),
]
TABLE = SYNCHRONOUS + LOCAL_STEPS
law = pytest.mark.parametrize("sync", TABLE, ids=notation.show)
synchronous = pytest.mark.parametrize("sync", SYNCHRONOUS, ids=notation.show)
with_local_steps = pytest.mark.parametrize("sync", LOCAL_STEPS, ids=notation.show)


def test_every_synchronizer_is_in_the_table() -> None:
    assert {type(s) for s in TABLE} == set(SYNCHRONIZERS.values())


@law
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_with_one_replica_it_is_the_local_optimizer(sync, optimizer) -> None:
    expected, model = plain(optimizer)
    ((losses, _, trained),) = simulate(1, train, sync, Cast(), optimizer)
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, tensor in weights_of(model).items():
        if name not in (
            "first.bias",
            "norm.running_mean",
        ):  # the norm cancels it: its gradient is noise, which Adam enlarges
            torch.testing.assert_close(weights_of(trained)[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.short(10)
@synchronous
@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_many_replicas_compute_what_one_does(sync, size, optimizer) -> None:
    expected, model = plain(optimizer)
    outcome = simulate(size, train, sync, Cast(), optimizer)
    assert len({digest for _, digest, _ in outcome}) == 1
    losses, _, trained = outcome[0]
    assert losses == pytest.approx(expected, abs=2e-6)
    # An unused parameter must not change, not even by weight decay.
    assert torch.equal(trained.unused.weight, model.unused.weight)
    assert torch.equal(trained.frozen.weight, model.frozen.weight)
    assert int(trained.norm.num_batches_tracked) == 5 * MICRO_BATCHES == int(trained.count)
    torch.testing.assert_close(trained.norm.running_var, model.norm.running_var, rtol=1e-4, atol=1e-5)


@pytest.mark.short(3)
@synchronous
@pytest.mark.parametrize("clip", [None, 0.05])
def test_exact_has_the_same_bits_on_any_number_of_workers(sync, clip) -> None:
    digests = {
        digest
        for size in (1, 2, 3, 4, 6)
        for overlap in (True, False)
        for _, digest, _ in simulate(size, partial(train, clip=clip, overlap=overlap), sync, Exact(), adamw)
    }
    assert len(digests) == 1


@synchronous
def test_uneven_shares_give_the_same_bits_too(sync) -> None:
    def run(comm, shares):
        return train(comm, sync, Exact(), shares=shares)[1]

    assert set(simulate(3, run, [1, 1, 1])) == set(simulate(3, run, [4, 1, 1])) == set(simulate(2, run, [5, 1]))


@pytest.mark.short(5)
@law
def test_same_seed_same_run_and_the_same_clock(sync) -> None:
    def run(comm):
        return train(comm, sync, Cast("bf16"))[:2], comm.now()

    assert simulate(3, run) == simulate(3, run)


@law
def test_nothing_changes_before_apply(sync) -> None:
    def run(comm):
        seen: list[str] = []

        def look(model, step) -> None:
            seen.append(fingerprint(dict(model.named_parameters())))

        _, _, model = train(comm, sync, Cast(), steps=3, on_step=look)
        return seen, fingerprint(dict(model.named_parameters()))

    torch.manual_seed(0)
    start = fingerprint(dict(Net().named_parameters()))
    for seen, end in simulate(2, run):
        assert seen[0] == start  # forward, backward and the exchange of the first step do not change weights
        # Without waiting for others, a worker may receive no new weights after a step.
        assert len({*seen, end}) == 4 or (sync in LOCAL_STEPS and end != start)


@synchronous
@pytest.mark.parametrize("count", [1, 2, 3, 6, 9, 10])
def test_a_crash_at_any_verb_leaves_the_survivors_equal(sync, count) -> None:
    done: dict[int, list[str]] = {}

    def run(comm):
        done[comm.rank] = []

        def note(model, step) -> None:
            done[comm.rank].append(fingerprint(dict(model.named_parameters())))

        train(Faulty(comm, [InjectedFailure(rank=1, verb="*", count=count)]), sync, Exact(), steps=12, on_step=note)

    outcome = outcomes(3, run)
    assert all(isinstance(outcome[rank], PeerLost) for rank in (0, 2)), outcome
    shorter = min(len(done[0]), len(done[2]))
    assert done[0][:shorter] == done[2][:shorter]
    assert abs(len(done[0]) - len(done[2])) <= 1


@law
def test_state_is_loaded_again(sync) -> None:
    def run(comm):
        replica = bound(comm, sync, Cast())
        replica.sync.load_state_dict(replica.sync.state_dict())
        return True

    assert simulate(2, run) == [True, True]


def all_of(replica: Replica) -> dict[str, torch.Tensor]:
    """Weights, buffers, optimizer state and the synchronizer's replicated state."""
    state, _ = state_of(replica.optimizer, replica.model)
    return {**weights_of(replica.model), **state, **replica.sync.state_dict()}


@with_local_steps
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_after_a_synchronization_all_replicas_are_equal(sync, steps) -> None:
    def run(comm):
        replica = bound(comm, sync, Cast())
        advance(replica, comm, 0, steps)
        replica.synchronize()
        return fingerprint(all_of(replica))

    assert len(set(simulate(3, run))) == 1


@with_local_steps
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_averaged_weights_are_the_same_on_all_workers_and_restore_the_parameters(sync, steps) -> None:
    def run(comm):
        replica = bound(comm, sync, Cast())
        parameters = dict(replica.model.named_parameters())
        advance(replica, comm, 0, steps)
        before = fingerprint(parameters)
        with replica.sync.averaged_weights():
            inside = fingerprint(parameters)
        assert fingerprint(parameters) == before
        return inside

    assert len(set(simulate(3, run))) == 1


@pytest.mark.short(8)
@with_local_steps
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_resumed_run_equals_an_uninterrupted_one(sync, optimizer) -> None:
    def run(comm):
        one = bound(comm, sync, Cast(), optimizer)
        advance(one, comm, 0, 5)
        one.synchronize()
        another = comm.channel("another attempt")
        two = bound(another, sync, Cast(), optimizer)
        state, numbers = state_of(one.optimizer, one.model)
        load_state(two.optimizer, two.model, {name: x.clone() for name, x in state.items()}, numbers)
        with torch.no_grad():
            for name, tensor in weights_of(two.model).items():
                tensor.copy_(weights_of(one.model)[name])
        two.sync.load_state_dict({name: x.clone() for name, x in one.sync.state_dict().items()})
        two.begin()
        advance(one, comm, 5, 12)
        advance(two, another, 5, 12)
        assert fingerprint(all_of(one)) == fingerprint(all_of(two))

    simulate(3, run)

"""Laws that every synchronizer keeps, on the simulated communicator. Whoever adds one adds a row."""

from functools import partial

import pytest
import torch

from tests.sync.nets import MICRO_BATCHES, Net, adamw, plain, sgd, train
from unisono import notation
from unisono.checkpoint import fingerprint
from unisono.comm import Appointment, Faulty, outcomes, simulate
from unisono.compress import Cast, Exact
from unisono.errors import PeerLost
from unisono.replica import weights_of
from unisono.sync import SYNCHRONIZERS, AllReduce, Synchronizer

TABLE: list[Synchronizer] = [AllReduce(), AllReduce(bucket_bytes=600, first_bytes=100)]
law = pytest.mark.parametrize("sync", TABLE, ids=notation.show)


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


@law
@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_many_replicas_compute_what_one_does(sync, size, optimizer) -> None:
    expected, model = plain(optimizer)
    outcome = simulate(size, train, sync, Cast(), optimizer)
    assert len({digest for _, digest, _ in outcome}) == 1
    losses, _, trained = outcome[0]
    assert losses == pytest.approx(expected, abs=2e-6)
    # A parameter that nobody uses must not even feel weight decay.
    assert torch.equal(trained.unused.weight, model.unused.weight)
    assert torch.equal(trained.frozen.weight, model.frozen.weight)
    assert int(trained.norm.num_batches_tracked) == 5 * MICRO_BATCHES == int(trained.count)
    torch.testing.assert_close(trained.norm.running_var, model.norm.running_var, rtol=1e-4, atol=1e-5)


@law
@pytest.mark.parametrize("clip", [None, 0.05])
def test_exact_has_the_same_bits_on_any_number_of_workers(sync, clip) -> None:
    digests = {
        digest
        for size in (1, 2, 3, 4, 6)
        for overlap in (True, False)
        for _, digest, _ in simulate(size, partial(train, clip=clip, overlap=overlap), sync, Exact(), adamw)
    }
    assert len(digests) == 1


@law
def test_uneven_shares_give_the_same_bits_too(sync) -> None:
    def run(comm, shares):
        return train(comm, sync, Exact(), shares=shares)[1]

    assert set(simulate(3, run, [1, 1, 1])) == set(simulate(3, run, [4, 1, 1])) == set(simulate(2, run, [5, 1]))


@law
def test_same_seed_same_run_and_the_same_clock(sync) -> None:
    def run(comm):
        return train(comm, sync, Cast("bf16"))[:2], comm.now()

    assert simulate(3, run) == simulate(3, run)


@law
def test_nothing_moves_before_apply(sync) -> None:
    def run(comm):
        seen: list[str] = []

        def look(model, step) -> None:
            seen.append(fingerprint(dict(model.named_parameters())))

        _, _, model = train(comm, sync, Cast(), steps=3, on_step=look)
        return seen, fingerprint(dict(model.named_parameters()))

    torch.manual_seed(0)
    start = fingerprint(dict(Net().named_parameters()))
    for seen, end in simulate(2, run):
        assert seen[0] == start  # forward, backward and the exchange of the first step left the weights alone
        assert len({*seen, end}) == 4


@law
@pytest.mark.parametrize("count", [1, 2, 3, 6, 9, 10])
def test_a_crash_at_any_verb_leaves_the_survivors_equal(sync, count) -> None:
    done: dict[int, list[str]] = {}

    def run(comm):
        done[comm.rank] = []

        def note(model, step) -> None:
            done[comm.rank].append(fingerprint(dict(model.named_parameters())))

        train(Faulty(comm, [Appointment(rank=1, verb="*", count=count)]), sync, Exact(), on_step=note)

    outcome = outcomes(3, run)
    assert all(isinstance(outcome[rank], PeerLost) for rank in (0, 2)), outcome
    shorter = min(len(done[0]), len(done[2]))
    assert done[0][:shorter] == done[2][:shorter]
    assert abs(len(done[0]) - len(done[2])) <= 1


@law
def test_state_comes_back(sync) -> None:
    def run(comm):
        w = torch.nn.Parameter(torch.zeros(3))
        bound = sync.bind({"w": w}, comm, Cast(), optimizer=sgd([w]))
        bound.load_state_dict(bound.state_dict())
        return True

    assert simulate(2, run) == [True, True]

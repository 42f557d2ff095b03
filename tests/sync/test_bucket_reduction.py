"""What is sent in one round."""

import torch
from torch import nn

from unisono.comm import simulate
from unisono.compress import Auto, Cast, Compressor
from unisono.sync.bucket_reduction import BucketedReduction
from unisono.sync.buckets import plan_buckets

AUTO = Auto((Cast(),), steps=4, again=0)
TRIED = AUTO.steps * 3 + 1  # rounds until it has chosen


def bytes_of_rounds(comm, compress: Compressor) -> list[int]:
    """The bytes that each round sends, with two buckets and a control word, whose sum is checked."""
    parameters = {name: nn.Parameter(torch.zeros(300)) for name in "ab"}
    reduction = BucketedReduction(plan_buckets(parameters, compress, 1200, 1200), comm, control=2)
    sent = []
    for round_ in range(TRIED + 2):
        before = comm.bytes_sent
        reduction.close([0.5 * round_ if comm.rank == i else 0.0 for i in (0, 1)])  # the others send zeros
        for name in "ab":
            reduction.add(name, torch.full((300,), float(round_)), 1 / comm.size)
            comm.compute(0.001)
        agreed = reduction.wait()
        assert agreed.control == [0.5 * round_, 0.5 * round_]
        assert all(torch.allclose(mean, torch.full((300,), float(round_))) for mean in agreed.results().values())
        reduction.commit()
        reduction.begin()
        sent.append(comm.bytes_sent - before)
    return sent


def test_a_chosen_compressor_sends_what_it_sends_alone() -> None:
    fixed, chosen = simulate(3, bytes_of_rounds, Cast())[0], simulate(3, bytes_of_rounds, AUTO)[0]
    assert len(set(fixed)) == 1
    assert chosen[0] > fixed[0]
    assert chosen[-2:] == fixed[-2:]

"""What is sent in one round."""

import torch
from torch import nn

from unisono.comm import simulate
from unisono.compress import Auto, Cast, Compressor
from unisono.sync.bucket_reduction import BucketedReduction

AUTO = Auto((Cast(),), steps=4, again=0)
TRIED = AUTO.steps * 3 + 1  # rounds until it has chosen


def _bytes(comm, compress: Compressor) -> list[int]:
    """What each round sent, of two buckets and a control word that arrives."""
    parameters = {name: nn.Parameter(torch.zeros(300)) for name in "ab"}
    reduction = BucketedReduction(parameters, comm, compress, bucket_bytes=1200, first_bytes=1200, control=2)
    sent = []
    for turn in range(TRIED + 2):
        before = comm.bytes_sent
        reduction.close([0.5 * turn if comm.rank == i else 0.0 for i in (0, 1)])  # one speaks, the others are silent
        for name in "ab":
            reduction.add(name, torch.full((300,), float(turn)), 1 / comm.size)
            comm.compute(0.001)
        agreed = reduction.wait()
        assert agreed.control == [0.5 * turn, 0.5 * turn]
        assert all(torch.allclose(mean, torch.full((300,), float(turn))) for mean in agreed.results().values())
        reduction.commit()
        reduction.begin()
        sent.append(comm.bytes_sent - before)
    return sent


def test_what_was_chosen_travels_as_if_nothing_had_been_to_choose() -> None:
    fixed, chosen = simulate(3, _bytes, Cast())[0], simulate(3, _bytes, AUTO)[0]
    assert len(set(fixed)) == 1
    assert chosen[0] > fixed[0]
    assert chosen[-2:] == fixed[-2:]

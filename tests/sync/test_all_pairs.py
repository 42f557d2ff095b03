"""Every synchronizer learns with every compressor, on real digits and the simulated communicator.

Each synchronizer and each compressor has a bound, in nats of training loss above uncompressed all-reduce. The bound of
a pair is their sum. Without training the loss is 2.33.
"""

from functools import cache
from math import inf

import pytest

from tests.support.pair_task import WORKERS, learn
from unisono import notation
from unisono.comm import simulate
from unisono.compress import (
    COMPRESSORS,
    Auto,
    ByName,
    BySize,
    Cast,
    Compressor,
    Exact,
    OneBit,
    PowerSGD,
    Quantize,
    RandomK,
    TopK,
    TwoBit,
    WithErrorFeedback,
)  # fmt: skip
from unisono.sync import (
    SYNCHRONIZERS,
    AllReduce,
    BlockMomentum,
    DelayCompensation,
    DiLoCo,
    Gossip,
    LocalSGD,
    OnePeerExponential,
    ParameterServer,
    RandomPairs,
    ScaledByStaleness,
    Synchronizer,
    Torus,
)  # fmt: skip

SYNC: dict[Synchronizer, float] = {
    AllReduce(): 0.0,
    AllReduce(reduce="adasum"): 0.0,
    ParameterServer(): 0.0,
    ParameterServer(servers=2, staleness=2, compensate=DelayCompensation()): 0.1,
    ParameterServer(staleness=inf, compensate=ScaledByStaleness()): 0.1,
    LocalSGD(every=4, start=8): 0.1,
    BlockMomentum(every=4, nesterov=True): 0.1,
    DiLoCo(every=8, fragments=2, delay=2): 0.1,
    Gossip(): 0.15,
    Gossip(Torus()): 0.15,
    Gossip(OnePeerExponential()): 0.15,
    Gossip(RandomPairs()): 0.15,
    Gossip(asynchronous=True): 0.15,
}
COMPRESS: dict[Compressor, float] = {
    Cast(): 0.01,
    Cast("bf16"): 0.01,
    Exact(): 0.01,
    Quantize(8): 0.02,
    Quantize(4): 0.03,
    Quantize(4, stochastic=True): 0.03,
    OneBit(): 0.15,
    TwoBit(0.01): 0.9,
    TopK(0.1): 0.15,
    RandomK(0.5): 0.15,
    PowerSGD(4): 0.3,
    WithErrorFeedback(Cast("bf16")): 0.01,
    BySize(below=500, small=Cast(), large=Quantize(8)): 0.02,
    ByName(rules=(("*.bias", Cast()),), otherwise=Quantize(4)): 0.03,
    Auto(): 0.15,
}
OTHERWISE: dict[tuple[type, type], float] = {
    (BlockMomentum, RandomK): 0.7,  # the momentum repeats updates that lack half of their numbers
    # The first seven exchanges measure, with any candidate; that is half of so few exchanges.
    (LocalSGD, Auto): 0.4,
    (DiLoCo, Auto): 0.4,
    # One absolute threshold cannot fit both gradients and local updates.
    (AllReduce, TwoBit): 1.6,
}


def test_everything_public_is_in_the_tables() -> None:
    assert {type(s) for s in SYNC} == set(SYNCHRONIZERS.values())
    assert {type(c) for c in COMPRESS} == set(COMPRESSORS.values())


@cache
def uncompressed() -> float:
    """The loss of all-reduce without compression."""
    return simulate(WORKERS, learn, AllReduce(), Cast())[0]


@pytest.mark.short(10)
@pytest.mark.parametrize("compress", COMPRESS, ids=notation.show)
@pytest.mark.parametrize("sync", SYNC, ids=notation.show)
def test_every_pair_learns(sync: Synchronizer, compress: Compressor) -> None:
    losses = simulate(WORKERS, learn, sync, compress)
    assert len(set(losses)) == 1  # the replicas are synchronized
    distance = SYNC[sync] + OTHERWISE.get((type(sync), type(compress)), COMPRESS[compress])
    assert losses[0] <= uncompressed() + distance

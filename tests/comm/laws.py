"""Laws of every communicator, as functions of one. All ranks run them, and they assert."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import CommunicationError, MessageMismatch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
# The last is more than any mailbox holds.
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 0, 2), (3, 5), (1001,), (700_001,)]


def sample(rank: int, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Small whole numbers: their sums are exact in every dtype and in any order."""
    return _drawn(1000 * seed + rank, shape).to(dtype, copy=True)


@lru_cache(maxsize=1024)  # every verb and dtype asks for the same ones, and to draw them takes longer than to send them
def _drawn(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def neighbours(comm: Communicator) -> list[int]:
    return sorted({(comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size} - {comm.rank})


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


# One start and one check for each verb.


def start_sum(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    work = comm.sum(sample(comm.rank, dtype, shape, seed))
    expected = in_order([sample(rank, dtype, shape, seed) for rank in range(comm.size)])
    return work, lambda result: same(result, expected)


def start_gather(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    x = sample(comm.rank, dtype, shape, seed)
    work = comm.gather(x)
    expected = torch.stack([sample(rank, dtype, shape, seed) for rank in range(comm.size)])
    return work, lambda result: same(result, expected) and same(x, expected[comm.rank])


def start_broadcast(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    root = seed % comm.size
    x = sample(comm.rank, dtype, shape, seed)
    work = comm.broadcast(x, root)
    expected = sample(root, dtype, shape, seed)
    return work, lambda result: same(result, expected) and same(x, expected)


def start_exchange(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Every pair has its own size; some are empty."""

    def message(sender: int, receiver: int) -> Tensor:
        return sample(sender * 10 + receiver, dtype, ((sender + 2 * receiver) % 3, *shape), seed)

    me, everybody = comm.rank, range(comm.size)
    expected = [message(rank, me) for rank in everybody]
    work = comm.exchange([message(me, rank) for rank in everybody], [torch.empty_like(x) for x in expected])
    return work, lambda result: all(map(same, result, expected))


def start_swap(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    others = neighbours(comm)
    expected = {rank: sample(rank * 10 + comm.rank, dtype, shape, seed) for rank in others}
    sent = {rank: sample(comm.rank * 10 + rank, dtype, shape, seed) for rank in others}
    work = comm.swap(sent, {rank: torch.empty_like(x) for rank, x in expected.items()})
    return (
        work,
        lambda result: set(result) == set(others) and all(same(result[r], expected[r]) for r in others),
    )


def start_allocated_sum(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    """The sum of a part of an allocated tensor, with what else lies in it untouched."""
    x = sample(comm.rank, dtype, shape, seed)
    whole = comm.allocate(x.numel() + 3, dtype)
    assert whole.shape == (x.numel() + 3,)
    assert not whole.any()
    part = whole[3:].view(shape)
    part.copy_(x)
    work = comm.sum(part)
    expected = in_order([sample(rank, dtype, shape, seed) for rank in range(comm.size)])
    return work, lambda result: same(result, expected) and not whole[:3].any()


def start_narrowed_sum(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Float64 parts of one allocated tensor, side by side and under way together: one sum is converted, one is not."""
    parts = [sample(rank, dtype, shape, seed).double() for rank in range(comm.size)]
    n = parts[0].numel()
    whole = comm.allocate(2 * n, torch.float64)
    left, right = whole[:n].view(shape), whole[n:].view(shape)
    for part in (left, right):
        part.copy_(parts[comm.rank])
    kept, narrowed = comm.sum(left), comm.sum(right, torch.float32)
    expected = in_order(parts)
    return narrowed, lambda result: same(result, expected.float()) and same(kept.wait(), expected)


def start_private_sum(comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Sums into memory of the caller, which may be written, and outlives the next sum of the same tensor."""
    parts = [sample(rank, dtype, shape, seed) for rank in range(comm.size)]
    n, expected = parts[0].numel(), in_order(parts)
    allocated = comm.allocate(n, dtype).view(shape)
    outs = [torch.empty(n, dtype=dtype) for _ in range(3)]
    wide = torch.empty(n, dtype=torch.float64 if dtype.is_floating_point else dtype)
    own, again = parts[comm.rank].clone(), comm.allocate(n, wide.dtype).view(shape)
    again.copy_(parts[comm.rank])
    narrowed = comm.sum(again, dtype, outs[2])
    allocated.copy_(parts[comm.rank])
    first = comm.sum(allocated, out=outs[0])
    mailed = comm.sum(own, out=outs[1])

    def good(result: Tensor) -> bool:
        kept = first.wait()
        private = all(x.data_ptr() == out.data_ptr() for x, out in zip((kept, result, narrowed.wait()), outs))
        right = same(kept, expected) and same(result, expected) and same(narrowed.wait(), in_order_wide(parts, wide))
        kept.copy_(expected)  # of this worker alone: a peer that reads its own later finds it unchanged
        return private and right

    return mailed, good


def in_order_wide(parts: list[Tensor], like: Tensor) -> Tensor:
    """The sum in the dtype of `like`, converted to that of the parts."""
    return in_order([part.to(like.dtype) for part in parts]).to(parts[0].dtype)


STARTS: dict[str, Callable[..., Any]] = {
    "sum": start_sum,
    "gather": start_gather,
    "broadcast": start_broadcast,
    "exchange": start_exchange,
    "swap": start_swap,
    "allocated_sum": start_allocated_sum,
    "narrowed_sum": start_narrowed_sum,
    "private_sum": start_private_sum,
}


# The laws.


def every_verb_gives_what_the_contract_says(comm: Communicator) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            for verb, start in STARTS.items():
                work, good = start(comm, dtype, shape, seed=len(shape))
                assert good(work.wait()), (verb, dtype, shape)
                assert good(work.wait()), "wait may be called again"


def many_works_may_be_in_flight(comm: Communicator) -> None:
    """More than any queue of headers holds, waited for in the reverse order."""
    verbs = list(STARTS)
    works = []
    for seed in range(100):
        verb = verbs[seed % len(verbs)]
        works.append((verb, *STARTS[verb](comm, torch.float32, (300_000 if seed % 17 == 0 else seed,), seed)))
    for verb, work, good in reversed(works):
        assert good(work.wait()), verb


def polls_move_everything(comm: Communicator) -> None:
    """Polling the last work advances all before it, without which it could not finish."""
    works = [STARTS[verb](comm, torch.int64, (5,)) for verb in STARTS]
    last = works[-1][0]
    while not last.poll():
        pass
    assert all(good(work.wait()) for work, good in works)


def channels_are_independent(comm: Communicator) -> None:
    """Workers wait for two channels in different orders, and number the messages of each separately."""
    first, second = comm.channel("first"), comm.channel("second")
    for seed in range(5):
        pending = [
            STARTS["allocated_sum"](first, torch.float32, (11,), seed),
            STARTS["exchange"](second, torch.bfloat16, (3,), seed),
        ]
        for work, good in pending if comm.rank % 2 else reversed(pending):
            assert good(work.wait())
    assert comm.bytes_sent == first.bytes_sent == second.bytes_sent
    work, good = start_gather(comm, torch.float32, (2,))
    assert good(work.wait())


def a_result_outlives_the_next_start_of_faster_peers(comm: Communicator) -> None:
    """Worker 0 reads the sum of round *t* after all others have filled in and started round *t+1*."""
    x, aside = comm.allocate(40_000, torch.float32), comm.channel("aside")

    def fill(t: int) -> None:
        x.fill_(float(comm.rank + t))

    fill(0)
    work = comm.sum(x)
    for t in range(30):
        result = work.wait()
        expected = float(sum(rank + t for rank in range(comm.size)))
        if comm.rank:
            # May be read only until the next sum of x is started, so by now.
            assert (result == expected).all()
            fill(t + 1)
            work = comm.sum(x)
        aside.gather(torch.zeros(1)).wait()
        if not comm.rank:
            assert (result == expected).all()
            fill(t + 1)
            work = comm.sum(x)
    work.wait()


def sums_are_in_the_order_of_ranks(comm: Communicator) -> None:
    """Where the backend promises it: the same bits as adding rank after rank, in the tensor's own dtype."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        parts = [
            torch.randn(5001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(comm.size)
        ]
        allocated = comm.allocate(5001, dtype)
        allocated.copy_(parts[comm.rank])
        assert same(comm.sum(parts[comm.rank].clone()).wait(), in_order(parts))
        assert same(comm.sum(allocated).wait(), in_order(parts))


def any_sequence_of_verbs_works(comm: Communicator, rounds: int, longest_pause_seconds: float = 0.0) -> None:
    """Random verbs, sizes and pauses; all workers draw the same verbs and different pauses."""
    verbs, pauses = random.Random(1), random.Random(2 + comm.rank)
    in_flight: list[Any] = []
    channels = [comm, comm.channel("other")]
    for seed in range(rounds):
        verb = verbs.choice([verb for verb in STARTS if "_sum" not in verb])
        shape = (verbs.choice([0, 1, 3, 100, 5000]),)
        channel, dtype = verbs.choice(channels), verbs.choice(DTYPES)
        in_flight.append(((verb, dtype, shape), STARTS[verb](channel, dtype, shape, seed)))
        if longest_pause_seconds and pauses.random() < 0.05:
            time.sleep(pauses.random() * longest_pause_seconds)
        while len(in_flight) > verbs.randrange(8):
            (name, dtype, n), (work, good) = in_flight.pop(0)
            assert good(work.wait()), (seed, name, dtype, n, work.wait())
    assert all(good(work.wait()) for _, (work, good) in in_flight)


def wrong_arguments_are_refused(comm: Communicator) -> None:
    one = torch.zeros(1)
    for call in (
        lambda: comm.broadcast(one, root=comm.size),
        lambda: comm.exchange([one] * (comm.size + 1), [one] * comm.size),
        lambda: comm.swap({comm.rank: one}, {comm.rank: one}),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("no ValueError")
    work, good = start_sum(comm, torch.float32, (3,))
    assert good(work.wait()), "nothing was started"


# Mismatches: what worker 1 calls, what all others call, and the two names that the error must have.

MISMATCHES: dict[str, tuple[Callable[[Communicator], Any], Callable[[Communicator], Any], str, str]] = {
    "size": (
        lambda comm: comm.sum(torch.zeros(4)),
        lambda comm: comm.sum(torch.zeros(10)),
        "message 0: sum of 4 x float32",
        "message 0: sum of 10 x float32",
    ),
    "result": (
        lambda comm: comm.sum(comm.allocate(10, torch.float64), torch.float32),
        lambda comm: comm.sum(comm.allocate(10, torch.float64)),
        "sum of 10 x float64 to float32",
        "sum of 10 x float64",
    ),
    "verb": (
        lambda comm: comm.gather(torch.zeros(4, dtype=torch.int64)),
        lambda comm: comm.sum(torch.zeros(10)),
        "message 0: gather of 4 x int64",
        "message 0: sum of 10 x float32",
    ),
    "dtype": (
        lambda comm: comm.sum(torch.zeros(10, dtype=torch.int32)),
        lambda comm: comm.sum(torch.zeros(10)),
        "message 0: sum of 10 x int32",
        "message 0: sum of 10 x float32",
    ),
    "root": (
        lambda comm: comm.broadcast(torch.zeros(3), root=1),
        lambda comm: comm.broadcast(torch.zeros(3), root=0),
        "message 0: broadcast of 3 x float32 from worker 1",
        "message 0: broadcast of 3 x float32 from worker 0",
    ),
    "large after small": (
        lambda comm: comm.gather(torch.zeros(700_000)),
        lambda comm: comm.sum(torch.zeros(1)),
        "message 0: gather of 700000 x float32",
        "message 0: sum of 1 x float32",
    ),
    "pair": (
        lambda comm: comm.exchange([torch.zeros(2)] * comm.size, [torch.zeros(5)] * comm.size),
        lambda comm: comm.exchange([torch.zeros(5)] * comm.size, [torch.zeros(5)] * comm.size),
        "message 0: exchange",
        "",
    ),
    "neighbour": (
        lambda comm: comm.swap({0: torch.zeros(2)}, {0: torch.zeros(2)}),
        lambda comm: comm.swap(*([{1: torch.zeros(3)}] * 2 if comm.rank == 0 else [{}, {}])),
        "message 0: swap",
        "",
    ),
}


def mismatch(comm: Communicator, case: str) -> str:
    """The text of the error that this worker saw, empty where it saw none."""
    ones, others, *_ = MISMATCHES[case]
    try:
        (ones if comm.rank == 1 else others)(comm).wait()
    except MessageMismatch as error:
        return str(error)
    return ""


def mismatches_name_both_sides(comm: Communicator) -> dict[str, str]:
    """What this worker saw in each case. Each has a channel of its own, and the other channels continue."""
    seen = {case: mismatch(comm.channel(case), case) for case in MISMATCHES}
    work, good = start_sum(comm, torch.float32, (3,))
    assert good(work.wait())
    return seen


def everything_fails_from_now_on(comm: Communicator) -> list[CommunicationError]:
    """The error of each verb on a communicator that has failed."""
    seen = []
    for verb in ("sum", "gather", "broadcast", "exchange", "swap"):
        try:
            STARTS[verb](comm, torch.float32, (4,))[0].wait()
        except CommunicationError as error:
            seen.append(error)
    return seen


COMMON = [
    every_verb_gives_what_the_contract_says,
    many_works_may_be_in_flight,
    polls_move_everything,
    channels_are_independent,
    a_result_outlives_the_next_start_of_faster_peers,
    wrong_arguments_are_refused,
]

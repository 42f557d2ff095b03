"""State transfer to workers that lack it: whole replicas, shards, and other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.processes import run
from unisono.checkpoint import Box, TensorShard
from unisono.comm import Communicator, Rendezvous, simulate
from unisono.elastic.transfer import LocalTensors, state_digest, transfer_tensors
from unisono.errors import StateDamaged, StateMissing

STATE: dict[str, Tensor] = {
    "model/weight": torch.arange(60.0).view(12, 5),
    "model/half": torch.arange(30).to(torch.bfloat16),
    "model/mask": torch.arange(7) % 2 == 0,
    "optimizer/step": torch.tensor(17),
    "optimizer/none": torch.zeros(0, 3),
}


def whole(state: dict[str, Tensor]) -> dict[str, TensorShard]:
    return LocalTensors(state).shards


def rows(worker: int, of: int) -> dict[str, Box]:
    """This worker's rows of each tensor that has any."""
    found = {}
    for name, x in STATE.items():
        if x.dim() and x.shape[0]:
            begin, end = (x.shape[0] * each // of for each in (worker, worker + 1))
            found[name] = Box.whole(x.shape).cut(0, begin, end)
    return found


def shard(worker: int, of: int) -> LocalTensors:
    boxes = rows(worker, of)
    whole = {name: Box.whole(x.shape) for name, x in STATE.items()}
    return LocalTensors({name: x[boxes.get(name, whole[name]).slices(whole[name])] for name, x in STATE.items()}, boxes)


def good(found: dict[str, Tensor], expected: LocalTensors) -> bool:
    return found.keys() == expected.tensors.keys() and all(
        x.dtype == expected.tensors[name].dtype and torch.equal(x, expected.tensors[name]) for name, x in found.items()
    )


def newcomers(comm: Communicator, round_bytes: int) -> bool:
    """The last two have nothing, all others everything."""
    new = comm.rank >= comm.size - 2
    found = transfer_tensors(
        comm, [] if new else [LocalTensors(STATE)], whole(STATE) if new else {}, round_bytes=round_bytes
    )
    return good(found, LocalTensors(STATE if new else {}))


@pytest.mark.parametrize(("size", "round_bytes"), [(3, 1 << 20), (5, 64), (6, 1)])
def test_newcomers_take_everything_from_equals(size: int, round_bytes: int) -> None:
    assert all(simulate(size, newcomers, round_bytes))


def replacement(comm: Communicator) -> bool:
    """Two replicas over three workers each; worker 4 is new, and takes the place of worker 1's like."""
    mine = shard(comm.rank % 3, 3)
    new = comm.rank == 4
    found = transfer_tensors(comm, [] if new else [mine], mine.shards if new else {}, hosts=list("aaabbb"))
    return good(found, mine if new else LocalTensors({}))


def test_a_new_part_of_a_replica_takes_the_lost_ones_place() -> None:
    assert all(simulate(6, replacement))


def relaid(comm: Communicator) -> bool:
    """What lay on two workers is to lie on four, and what lay in one part and a kept copy too."""
    here = [shard(comm.rank, 2)] if comm.rank < 2 else []
    mine = shard(comm.rank, comm.size)
    return good(transfer_tensors(comm, here, mine.shards), mine)


def test_state_is_cut_anew() -> None:
    assert all(simulate(4, relaid))


def copies(comm: Communicator) -> bool:
    """Of three parts one is lost; a survivor has its own and a copy of the lost one."""
    here = [[shard(0, 3)], [shard(1, 3), shard(2, 3)]][comm.rank]
    return good(transfer_tensors(comm, here, whole(STATE)), LocalTensors(STATE))


def test_kept_copies_are_as_good() -> None:
    assert all(simulate(2, copies))


def lacking(comm: Communicator) -> Any:
    here = [shard(comm.rank, 3)] if comm.rank < 2 else []
    with pytest.raises(StateMissing) as caught:
        transfer_tensors(comm, here, whole(STATE) if comm.rank == 2 else {})
    return caught.value.missing


def test_what_nobody_has_is_named_to_all() -> None:
    missing = simulate(3, lacking)
    assert missing[0] == missing[1] == missing[2]
    assert missing[0] == (
        "model/half [20:30] of [30]",
        "model/mask [4:7] of [7]",
        "model/weight [8:12, 0:5] of [12, 5]",
    )


class Lying:
    """A communicator that changes one byte of what worker 1 gives."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def exchange(self, xs: Any, like: Any) -> Any:
        for x in xs:
            if self.rank == 1 and x.numel():
                x[20] ^= 1
        return self._comm.exchange(xs, like)


def damaged(comm: Communicator) -> str:
    new = comm.rank == 2
    with pytest.raises(StateDamaged) as caught:
        transfer_tensors(
            Lying(comm), [] if new else [LocalTensors(STATE)], whole(STATE) if new else {}, round_bytes=100
        )
    return str(caught.value)


def test_what_came_otherwise_than_it_was_is_named_to_all() -> None:
    texts = simulate(3, damaged)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith(("model/", "optimizer/"))
    assert texts[0].endswith("arrived from worker 1 at worker 2 with other bytes than were sent")


def test_digests_are_equal_where_states_are() -> None:
    numbers = {"lr": 0.1, "step": 3}
    original = state_digest(STATE, numbers)
    assert original == state_digest(dict(reversed(STATE.items())), dict(reversed(numbers.items())))
    assert original == state_digest({**STATE, "model/weight": STATE["model/weight"].t().contiguous().t()}, numbers)
    others = [
        state_digest(STATE, {**numbers, "step": 4}),
        state_digest({**STATE, "model/weight": STATE["model/weight"].view(5, 12)}, numbers),
        state_digest({**STATE, "model/weight": STATE["model/weight"].view(torch.int32)}, numbers),
        state_digest(
            {**STATE, "model/weight": STATE["model/weight"].clone().index_fill_(0, torch.tensor(3), -0.5)}, numbers
        ),
        state_digest({name.replace("half", "full"): x for name, x in STATE.items()}, numbers),
        state_digest({name: x for name, x in STATE.items() if name != "optimizer/none"}, numbers),
    ]
    assert len({original, *others}) == 1 + len(others)


# Real workers.

LARGE = {f"model/{i}": torch.arange(700_000.0).view(700, 1000) + i for i in range(4)}


def take(rank: int, size: int, kind: str, url: str) -> tuple[bool, int]:
    comm = Rendezvous(rank, ["h"] * size, url, kind, torch.device("cpu"), 60.0).connect(range(size))
    new = rank == size - 1
    before = comm.bytes_sent
    found = transfer_tensors(
        comm, [] if new else [LocalTensors(LARGE)], whole(LARGE) if new else {}, round_bytes=2 << 20
    )
    sent = comm.bytes_sent - before
    comm.gather(torch.zeros(1)).wait()
    comm.close()
    return good(found, LocalTensors(LARGE if new else {})), sent


@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
def test_real_workers_share_the_work(kind: str, tmp_path: Path) -> None:
    *holders, (fine, _) = run(3, take, kind, f"file://{tmp_path}/place")
    assert fine
    total = sum(x.nbytes for x in LARGE.values())
    for came, sent in holders:
        assert came
        assert total / 2 <= sent < total / 2 * 1.01 + (4 << 20)

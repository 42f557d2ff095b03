"""Every synchronizer trains real digits on real processes, and opens the checkpoints of every other."""

from __future__ import annotations

import json
from collections import Counter
from itertools import cycle
from math import inf
from pathlib import Path

import pytest

from tests.support.training_runs import source, train
from unisono import notation
from unisono.sync import (
    SYNCHRONIZERS,
    AllReduce,
    BlockMomentum,
    DiLoCo,
    Gossip,
    LocalSGD,
    ParameterServer,
    Synchronizer,
)  # fmt: skip

ROWS: list[Synchronizer] = [
    AllReduce(reduce="adasum"),
    ParameterServer(servers=2),
    ParameterServer(staleness=2),
    ParameterServer(staleness=inf),
    LocalSGD(every=8, start=4),
    BlockMomentum(every=4),
    DiLoCo(every=8, fragments=2, delay=2),
    Gossip(synchronize_every=8),
    Gossip(asynchronous=True),
]
COMPRESS = ("Cast()", "Quantize(4)", "Cast('bf16')")


def events(path: Path, kind: str) -> list[dict[str, float]]:
    with (path / "events.jsonl").open() as lines:
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_every_synchronizer_is_in_the_table() -> None:
    assert {type(s) for s in ROWS} == set(SYNCHRONIZERS.values())


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("sync", "compress"), list(zip(ROWS, cycle(COMPRESS))), ids=lambda v: v if isinstance(v, str) else notation.show(v)
)
def test_it_trains_and_its_checkpoint_opens_under_another(sync: Synchronizer, compress: str, tmp_path: Path) -> None:
    settings = {"workers": 2, "threads": 1, "compress": compress, "checkpoint_every": 8, "evaluate_every": 8}
    path, task = tmp_path / "run", source("digits", hidden=16)
    first = train(2, task, path, steps=32, sync=notation.show(sync), **settings)
    assert (first["steps"], first["samples"]) == (32, 32 * 64)
    assert first["metrics"]["accuracy"] > 0.6
    assert len(events(path, "checkpoint")) >= 2
    assert len(events(path, "metrics")) >= 2
    # Others go on from it, on another number of workers, and then it goes on from theirs.
    for steps, workers, other in ((40, 1, AllReduce()), (56, 2, sync)):
        settings["workers"] = workers
        again = train(workers, task, path, steps=steps, sync=notation.show(other), resume=True, **settings)
        assert again["steps"] == steps
        assert again["metrics"]["accuracy"] > 0.8
    starts = [event["first_step"] for event in events(path, "start")]
    assert starts == [0, 32, 40]
    assert not Counter(event["event"] for event in events(path, "checkpoint failed"))

"""Runs with sharded replicas survive lost workers.

The other replicas continue, lost shards come from memory checkpoints, and joining workers complete replicas.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.elastic.sharded.runs import UnderWay, under_way
from unisono.launch.stop_request import STOP_ALL

STEPS, LOST_AT = 24, 9
LAYOUT = "Layout(shard=2)"
CLOSE = 2e-5  # of losses around 3, as other replicas sum in another order


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, float]]:
    """What comes of a replica on two workers that nobody disturbs: the hash of its weights, and its losses."""
    with under_way("gpt", tmp_path_factory.mktemp("calm"), 2, layout=LAYOUT, steps=STEPS) as run:
        return run.result()["weights_sha256"], dict(run.losses)


@contextmanager
def without_end(path: Path, workers: int, **settings: object) -> Iterator[UnderWay]:
    """A run that is stopped after the block."""
    with under_way("gpt", path, workers, layout=LAYOUT, steps=100_000, **settings) as run:
        yield run
        run.kill(next(reversed(run.workers)), STOP_ALL)
        run.result()


def differ(run: UnderWay, losses: dict[int, float]) -> float:
    common = run.losses.keys() & losses.keys()
    assert len(common) >= STEPS - 4  # what is told while a worker dies may be lost with it
    return max(abs(run.losses[step] - losses[step]) for step in common)


@pytest.mark.long
def test_what_the_only_replica_lost_with_a_worker_comes_from_the_others_memory(calm, tmp_path) -> None:
    with under_way("gpt", tmp_path, 2, layout=LAYOUT, steps=STEPS) as run:
        run.until(LOST_AT)
        run.kill("1")
        run.start(["1.2"])
        weights, losses = run.result()["weights_sha256"], dict(run.losses)
        (event,) = run.events("view")
    assert event["members"] == ["0", "1.2"]
    assert event["step"] > 0  # not from the beginning, and there is no checkpoint
    assert not list((tmp_path / "checkpoints").glob(f"*{event['step']}"))
    assert weights == calm[0]
    assert losses[STEPS] == calm[1][STEPS]


@pytest.mark.long
def test_what_a_lost_worker_remembered_of_whole_tensors_comes_from_memory_too(tmp_path) -> None:
    settings = {"layout": LAYOUT, "optimizer": "adafactor", "steps": STEPS}
    with under_way("gpt", tmp_path / "calm", 2, **settings) as run:
        calm = run.result()["weights_sha256"]
    with under_way("gpt", tmp_path / "rough", 2, **settings) as run:
        run.until(LOST_AT)
        run.kill("1")
        run.start(["1.2"])
        assert run.result()["weights_sha256"] == calm
        (event,) = run.events("view")
    assert event["step"] > 0


@pytest.mark.long
def test_a_lost_worker_takes_its_replica_out_and_survivors_make_others(calm, tmp_path) -> None:
    with without_end(tmp_path, 4) as run:
        run.until(5)
        a, b, c, d = run.members
        run.kill(d)
        first = run.view(a, b, of=2)  # c stands by
        run.until(first + 4)
        run.kill(a)
        second = run.view(b, c, of=2)  # c has an old part, of another place; a's lies with b
        run.start([f"{d}.2", f"{a}.2"])
        third = run.view(b, c, of=4)
        run.until(max(third + 1, STEPS))
    assert 0 < first < second < third
    assert differ(run, calm[1]) < CLOSE


@pytest.mark.long
@pytest.mark.parametrize(
    ("sync", "optimizer"),
    [("LocalSGD(every=4)", "plain"), ("DiLoCo(every=4)", "plain"), ("Gossip(synchronize_every=4)", "adamw")],
)
def test_replicas_that_walk_take_the_round_again(sync, optimizer, tmp_path) -> None:
    """Two of two workers each; another comes in place of the lost one before they go on."""
    settings = {"layout": LAYOUT, "sync": sync, "steps": STEPS, "min_workers": 4}
    with under_way("gpt", tmp_path / "calm", 4, optimizer, **settings) as run:
        whole = run.result()["weights_sha256"], run.losses[STEPS]
    with under_way("gpt", tmp_path / "rough", 4, optimizer, **settings) as run:
        run.until(LOST_AT)
        lost = run.members[1]
        run.kill(lost)
        run.start([f"{lost}.2"])
        found = run.result()["weights_sha256"], run.losses[STEPS]
        (event,) = run.events("view")
    assert len(event["members"]) == 4
    assert event["step"] % 4 == 0 < event["step"]
    assert found[1] == pytest.approx(whole[1], abs=0.05)
    assert found == whole or optimizer == "adamw"  # of which the lost replica's memory is gone, if nobody has a copy


def test_who_leaves_hands_its_part_over(tmp_path) -> None:
    with without_end(tmp_path, 2, max_workers=3) as run:
        run.until(4)
        run.start(["2"])
        run.kill("1", signal.SIGTERM)
        after = run.view("0", "2", of=2)
        assert run.returned("1") is None
        run.until(after + 2)
    assert "not all is there" not in run.log("0")  # no step is taken back


@pytest.mark.long
def test_without_copies_there_is_the_disk(calm, tmp_path) -> None:
    with under_way("gpt", tmp_path, 2, layout=LAYOUT, steps=STEPS, memory_checkpoints=False, checkpoint_every=4) as run:
        run.until(LOST_AT + 1)
        run.kill("1")
        run.start(["1.2"])
        assert run.result()["weights_sha256"] == calm[0]
        (resumed,) = run.events("resume")
    assert resumed["step"] % 4 == 0
    assert resumed["step"] > 0

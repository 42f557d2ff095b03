"""A custom loop that is resumed from a checkpoint continues as if it had not been interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import flip
from tests.support.training_runs import source, train
from tests.trainer.small_loops import MAKERS, SHARE, data, loss_of, net, noisy, samples, state, world_of
from unisono import DiLoCo, Exact, LocalSGD, ParameterServer, PowerSGD, TopK, WithErrorFeedback, World
from unisono.checkpoint import checkpoints, open_checkpoint
from unisono.comm import simulate
from unisono.errors import CheckpointError, InvalidInput, UnisonoError

SAVED, STEPS = 4, 8
SIZES = {"global_batch": 12, "micro_batch": 3, "seed": 1}


def ran(size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    return simulate(size, lambda comm: function(comm, *arguments, **options))


def scheduled(world: World, build: Callable[[], nn.Module] = noisy, maker: str = "adamw", **options: Any) -> Any:
    """A model, its optimizer and a scheduler that is kept."""
    model = build()
    _, optimizer = world.bind(model, MAKERS[maker](model.parameters()), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    world.register_state("scheduler", scheduler)
    return model, optimizer, scheduler


def loop(
    comm: Any, at: Path, steps: int = STEPS, loads: bool = False, **options: Any
) -> tuple[torch.Tensor, list[int]]:
    """Takes `steps` in all, and saves after each `SAVED`; what came of it, and which steps it took."""
    world, taken = world_of(comm), []
    model, optimizer, scheduler = scheduled(world, **options)
    assert (world.load(at) > 0) == loads
    for batches in world.steps(data(), steps=steps, **SIZES):
        optimizer.zero_grad()
        for x, y in batches:
            loss_of(model, x, y).backward()
        optimizer.step()
        scheduler.step()
        taken.append(batches.step)
        if batches.step % SAVED == SAVED - 1:
            assert world.save(at) == at / f"step-{batches.step + 1:08d}"
    world.synchronize()
    learned = [s.double().reshape(-1) for p in model.parameters() for _, s in sorted(optimizer.state[p].items())]
    return torch.cat([state(model), *learned, torch.tensor(scheduler.get_last_lr())]), taken


@pytest.mark.parametrize(("first", "then"), [(1, 1), (1, 3), (2, 2), (3, 1), (2, 4)])
def test_the_bits_are_those_of_a_loop_that_never_ended(first: int, then: int, tmp_path: Path) -> None:
    ((expected, _),) = ran(1, loop, tmp_path / "whole", compress=Exact())
    for _, taken in ran(first, loop, tmp_path / "cut", SAVED, compress=Exact()):
        assert taken == list(range(SAVED))
    for found, taken in ran(then, loop, tmp_path / "cut", loads=True, compress=Exact()):
        assert taken == list(range(SAVED, STEPS))
        assert torch.equal(found, expected)


@pytest.mark.short(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 0.5, "maker": "sgd"}, {"sync": LocalSGD(3)}, {"sync": DiLoCo(2)}, {"sync": ParameterServer()},
     {"compress": WithErrorFeedback(TopK(0.1))}, {"compress": PowerSGD(1)},
     {"sync": LocalSGD(2), "compress": WithErrorFeedback(TopK(0.1))}],
    ids=str,
)  # fmt: skip
def test_so_they_are_under_every_synchronizer_and_compressor_on_as_many_workers(options, tmp_path: Path) -> None:
    """Replicas that take steps of their own meet to be saved, in the loop that does not end too."""
    whole = ran(2, loop, tmp_path / "whole", **options)
    ran(2, loop, tmp_path / "cut", SAVED, **options)
    cut = ran(2, loop, tmp_path / "cut", loads=True, **options)
    for (expected, _), (found, _) in zip(whole, cut):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_with_data_of_its_own_goes_on_where_it_says(size: int, tmp_path: Path) -> None:
    def run(comm: Any, until: int) -> tuple[torch.Tensor, int]:
        world = world_of(comm)
        model, optimizer, scheduler = scheduled(world, net)
        first = world.load(tmp_path)
        for step in range(first, until):
            x, y = (t[world.rank * SHARE : (world.rank + 1) * SHARE] for t in samples(step, world.size))
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if step == 0 and size > 1:
                with pytest.raises(UnisonoError, match="in the middle of a step"):
                    world.save(tmp_path)
            optimizer.step()
            scheduler.step()
        if until == SAVED:
            assert world.save(tmp_path) is not None
        return state(model), first

    whole = ran(size, run, STEPS)
    ran(size, run, SAVED)
    for (expected, _), (found, first) in zip(whole, ran(size, run, STEPS)):
        assert first == SAVED
        assert torch.equal(found, expected)


def test_of_several_the_newest_sound_one_counts_and_the_oldest_go(tmp_path: Path) -> None:
    ran(1, loop, tmp_path, 3 * SAVED)
    assert [step for step, _ in checkpoints(tmp_path)] == [2 * SAVED, 3 * SAVED]
    stored = open_checkpoint(tmp_path / f"step-{3 * SAVED:08d}").stored["model/0.weight"][0]
    flip(stored.file, stored.begin)
    ((_, taken),) = ran(1, loop, tmp_path, 3 * SAVED, loads=True)
    assert taken[0] == 2 * SAVED


@pytest.mark.parametrize(
    ("change", "words"),
    [({"global_batch": 24}, "global_batch = 24: the checkpoint was saved with 12"),
     ({"micro_batch": 4}, "micro_batch = 4: the checkpoint was saved with 3"),
     ({"seed": 2}, "seed = 2: the checkpoint was saved with 1"),
     ({"samples": 41}, "data = 41: the checkpoint was saved with 40"),
     ({"maker": "sgd"}, "optimizer = SGD: the checkpoint was saved with AdamW"),
     ({"compress": Exact()}, r"compress = Exact\(\): the checkpoint was saved with Cast\(\)"),
     ({"build": net}, r"model = Sequential: the checkpoint is of another one: .*; build the model that was saved"),
     ({"kept": "other"}, "register_state = other: the checkpoint has scheduler; register the same by "
      "world.register_state")],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_another_loop_is_refused(change, words, tmp_path: Path) -> None:
    ran(1, loop, tmp_path, SAVED)

    def run(comm: Any) -> None:
        world = world_of(comm)
        model = change.get("build", noisy)()
        options = {"compress": change["compress"]} if "compress" in change else {}
        _, optimizer = world.bind(model, MAKERS[change.get("maker", "adamw")](model.parameters()), **options)
        world.register_state(change.get("kept", "scheduler"), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        world.load(tmp_path)
        world.steps(data(change.get("samples", 40)), **{**SIZES, **{k: v for k, v in change.items() if k in SIZES}})

    with pytest.raises(InvalidInput, match=words):
        ran(2, run)


def test_exact_refuses_another_number_of_threads(tmp_path: Path) -> None:
    def run(comm: Any, threads: int, **options: Any) -> None:
        torch.set_num_threads(threads)  # of the thread that is this worker
        loop(comm, tmp_path, compress=Exact(), **options)

    ran(1, run, 1, steps=SAVED)
    with pytest.raises(InvalidInput, match="threads = 2: the checkpoint was saved with 1"):
        ran(1, run, 2, loads=True)


def test_save_and_load_have_their_time(tmp_path: Path) -> None:
    def run(comm: Any) -> None:
        world = world_of(comm)
        for call in (world.save, world.load):
            with pytest.raises(UnisonoError, match=r"world\.bind"):
                call(tmp_path)
        model, optimizer, _ = scheduled(world)
        with pytest.raises(UnisonoError, match="no step has been taken yet"):
            world.save(tmp_path)
        with pytest.raises(InvalidInput, match="keep = 0: below 1"):
            world.save(tmp_path, keep=0)
        for batches in world.steps(data(), steps=2, **SIZES):
            optimizer.zero_grad()
            for x, y in batches:
                loss_of(model, x, y).backward()
            with pytest.raises(UnisonoError, match="in the middle of a step"):
                world.save(tmp_path)
            optimizer.step()
            with pytest.raises(UnisonoError, match=r"between world\.bind and the first step"):
                world.load(tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="file cannot hold checkpoints"):
            world.save(tmp_path / "file")

    ran(2, run)


def test_a_loop_goes_on_from_what_unisono_train_has_saved(tmp_path: Path) -> None:
    """With the same data, batches and optimizer: the position in the data, and all of the state."""
    task = source("regression", optimizer="sgd").load()
    sizes = {"global_batch": 24, "micro_batch": 4}
    settings = {"workers": 1, "compress": "Exact()", "threads": 1}
    train(1, source("regression", optimizer="sgd"), tmp_path / "whole", steps=6, **settings)
    train(1, source("regression", optimizer="sgd"), tmp_path / "cut", steps=3, **settings)

    def run(comm: Any) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)  # of the thread that is this worker
        world, model = world_of(comm), task.model()
        _, optimizer = world.bind(model, task.optimizer(model.parameters()), compress=Exact())
        assert world.load(tmp_path / "cut") == 3
        for batches in world.steps(task.data, steps=6, **sizes):
            optimizer.zero_grad()
            for batch in batches:
                task.loss(model(batch[0]), batch).backward()
            optimizer.step()
        return model.state_dict()

    (path,) = [path for _, path in checkpoints(tmp_path / "whole" / "checkpoints")]
    whole = open_checkpoint(path)
    for found in ran(2, run):
        assert all(torch.equal(tensor, whole.read(f"model/{name}")) for name, tensor in found.items())


# --- steps that are left out


def skipping(comm: Any, leaves_out: Callable[[int], bool], after_data: bool = False, **options: Any) -> torch.Tensor:
    world = world_of(comm)
    model, optimizer, scheduler = scheduled(world, **options)
    for batches in world.steps(data(), steps=STEPS, **SIZES):
        optimizer.zero_grad()
        if leaves_out(batches.step) and not after_data:
            batches.skip()
            continue
        for x, y in batches:
            loss_of(model, x * (float("nan") if leaves_out(batches.step) else 1.0), y).backward()
        if leaves_out(batches.step):
            batches.skip()
            continue
        optimizer.step()
        scheduler.step()
    return state(model)


@pytest.mark.parametrize("compress", [Exact(), WithErrorFeedback(TopK(0.5))], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_that_is_left_out_leaves_no_trace(size: int, compress, tmp_path: Path) -> None:
    """Whether before its data is taken or after; whatever that was, as far as the compressor can hold it."""
    odd = lambda step: step % 3 == 1
    options: dict[str, Any] = {"compress": compress, "maker": "sgd"}
    before = ran(size, skipping, odd, **options)
    if not isinstance(compress, Exact):
        assert all(torch.equal(a, b) for a, b in zip(before, ran(size, skipping, odd, True, **options)))
    else:
        assert torch.equal(before[0], ran(1, skipping, odd, **options)[0])
    assert not torch.equal(before[0], ran(size, skipping, lambda step: False, **options)[0])


def no_step(batches: Any, optimizer: Any) -> None:
    pass


def no_last_step(batches: Any, optimizer: Any) -> None:
    if batches.step < STEPS - 1:
        batches.skip()


def twice(batches: Any, optimizer: Any) -> None:
    batches.skip()
    batches.skip()


def half(batches: Any, optimizer: Any) -> None:
    next(batches)
    batches.skip()


def again(batches: Any, optimizer: Any) -> None:
    batches.skip()
    optimizer.step()


@pytest.mark.parametrize(
    ("body", "words"),
    [(no_step, r"before optimizer.step\(\): .* batches.skip\(\) leaves it out"),
     (no_last_step, r"before optimizer.step\(\)"),
     (twice, "batches.skip\\(\\) came after optimizer.step"), (half, "before all micro-batches of this worker"),
     (again, "called outside of the loop")],
)  # fmt: skip
def test_each_step_is_taken_or_left_out_once(body, words) -> None:
    def run(comm: Any) -> None:
        world = world_of(comm)
        _, optimizer, _ = scheduled(world)
        for batches in world.steps(data(), steps=STEPS, **SIZES):
            body(batches, optimizer)

    with pytest.raises(UnisonoError, match=words):
        ran(2, run)


def test_an_optimizer_whose_state_has_lists_goes_on_too(tmp_path: Path) -> None:
    """LBFGS keeps directions of earlier steps in lists."""

    def run(comm: Any, until: int) -> torch.Tensor:
        world, model = world_of(comm), net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        world.bind(model, optimizer, compress=Exact())
        world.load(tmp_path)
        for batches in world.steps(data(), steps=until, **SIZES):

            def loss() -> torch.Tensor:
                optimizer.zero_grad()
                losses = []
                for x, y in batches:  # noqa: B023 (it is called in this iteration)
                    losses.append(loss_of(model, x, y))
                    losses[-1].backward()
                return torch.stack(losses).mean()

            optimizer.step(loss)
        if until == SAVED:
            assert world.save(tmp_path) is not None
        return state(model)

    (whole,) = ran(1, run, STEPS)
    ran(2, run, SAVED)
    for found in ran(2, run, STEPS):
        assert torch.equal(found, whole)

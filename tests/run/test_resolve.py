"""Settings of a run: the user's override the task's, and the task's override the defaults."""

import pytest
from torch import nn

from unisono import Config, Exact, Task
from unisono.config import IDENTITY, LIBRARY_GLOBAL_BATCH
from unisono.errors import InvalidInput
from unisono.run.resolve import check_same_run, resolve_config


def task(**defaults) -> Task:
    return Task(model=lambda: nn.Linear(1, 1), data=[0.0], loss=lambda output, batch: output.mean(), defaults=defaults)


@pytest.mark.parametrize(
    ("defaults", "given", "expected"),
    [
        ({}, {}, {"global_batch": LIBRARY_GLOBAL_BATCH}),
        ({"lr": 0.1, "steps": 5}, {}, {"lr": 0.1, "steps": 5}),
        ({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.2}),
        ({"lr": 0.1}, {"lr": None}, {"lr": None}),
        ({"steps": 5}, {"epochs": 2.0}, {"steps": None, "epochs": 2.0}),
        ({"epochs": 5}, {"steps": 2}, {"steps": 2, "epochs": None}),
        ({"global_batch": 32, "micro_batch": 8}, {"global_batch": 12}, {"global_batch": 12, "micro_batch": 3}),
        ({"global_batch": 32, "micro_batch": 8}, {"micro_batch": 4}, {"global_batch": 32, "micro_batch": 4}),
        ({"compress": "Exact()"}, {}, {"compress": Exact(), "threads": 1}),
        ({}, {"compress": "Exact()", "threads": 3}, {"threads": 3}),
    ],
)
def test_who_has_the_last_word(defaults, given, expected) -> None:
    config = resolve_config(task(**defaults), given)
    assert {name: getattr(config, name) for name in expected} == expected


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"sync_batchnorm = True: .*Exact"):
        resolve_config(task(), {"sync_batchnorm": True, "compress": "Exact()"})
    with pytest.raises(InvalidInput, match=r"stepz = 3: there is no such field; did you mean steps"):
        resolve_config(task(stepz=3), {})
    with pytest.raises(InvalidInput, match="activation_checkpointing = selective: a compiled block"):
        resolve_config(task(), {"activation_checkpointing": "selective", "compile": True})
    with pytest.raises(InvalidInput, match=r"precision = bf16_parameters: .* write bf16, or a layout"):
        resolve_config(task(), {"precision": "bf16_parameters"})


OTHER = {"seed": 5, "global_batch": 48, "micro_batch": 2, "compress": "Exact(32)", "sync": "AllReduce(4096)",
         "precision": "bf16", "sync_batchnorm": True}  # fmt: skip
FREE = {"workers": 3, "steps": 9, "lr": 0.3, "clip": 1.0, "schedule": "Cosine()", "keep_checkpoints": 5,
         "overlap": False,
        "communicator": "gloo", "threads": 2, "timeout_seconds": 9.0, "checkpoint_every": 4}  # fmt: skip


@pytest.mark.parametrize("name", IDENTITY)
def test_a_resumed_run_is_the_same_run(name) -> None:
    before = Config(global_batch=24).mapping()
    with pytest.raises(InvalidInput, match=f"^{name} = .*: the run to resume was started with"):
        check_same_run(Config(global_batch=24).but({name: OTHER[name]}), before)


def test_what_only_changes_how_fast_or_how_long_may_change() -> None:
    check_same_run(Config(global_batch=24).but(FREE), Config(global_batch=24).mapping())


def test_in_exact_mode_the_number_of_threads_belongs_to_the_run() -> None:
    before = Config(compress=Exact(), threads=1).mapping()
    check_same_run(Config(compress=Exact(), threads=1, workers=4), before)
    with pytest.raises(InvalidInput, match=r"threads = 2: .* can change bits"):
        check_same_run(Config(compress=Exact(), threads=2), before)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": 4, "max_workers": 3}, "workers = 4: above max_workers = 3"),
        ({"workers": 2, "min_workers": 3}, "min_workers = 3: there are never more than 2 workers"),
        ({"workers": 9}, "workers = 9: a step has only 4 micro-batches, each worker needs one; use at most 4 workers"),
        ({"workers": "2:8", "global_batch": 64, "micro_batch": 16}, "max_workers = 8: a step has 4 micro-batches"),
    ],
)
def test_as_many_workers_as_may_come_can_train(given, words) -> None:
    with pytest.raises(InvalidInput) as refused:
        resolve_config(task(), given)
    assert words in str(refused.value)


def test_fewer_workers_may_be_started_than_are_waited_for() -> None:
    config = resolve_config(task(), {"workers": 1, "min_workers": 2, "max_workers": 4})
    assert (config.workers, config.min_workers, config.max_workers) == (1, 2, 4)

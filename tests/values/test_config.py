"""A config survives round trips through Python, TOML and text."""

import copy
import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tests.values.test_notation import VALUES
from unisono import Config, Exact
from unisono.compress import Cast
from unisono.config import CHOICES, FIELDS, NOTED
from unisono.errors import InvalidInput

# fmt: off
FACTOR = st.floats(1e-6, 1e6)
FIELD_VALUES = VALUES | {name: st.sampled_from(choices) for name, choices in CHOICES.items()} | {
    "workers": st.integers(1, 99), "min_workers": st.integers(1, 99), "max_workers": st.integers(1, 99),
    "elastic": st.booleans(),
    "memory_checkpoints": st.booleans(),
    "steps": st.integers(1, 10**9), "epochs": FACTOR,
    "global_batch": st.integers(1, 4096), "micro_batch": st.integers(1, 4096), "seed": st.integers(0, 2**63 - 1),
    "lr": FACTOR, "clip": FACTOR,
    "checkpoint_every": st.integers(0, 999), "keep_checkpoints": st.integers(1, 9),
    "evaluate_every": st.integers(0, 999),
    "compare_replicas_every": st.integers(0, 999), "record_seconds": st.floats(0, 1e6),
    "run_dir": st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
        lambda run: run.lower() != "none"),  # which means that none is given; such a directory is written ./none
    "resume": st.booleans(),
    "overlap": st.booleans(), "threads": st.integers(0, 64), "compile": st.booleans(), "sync_batchnorm": st.booleans(),
    "remove_slower_than": st.floats(1.01, 1e6), "timeout_seconds": FACTOR,
}
# fmt: on


def test_every_field_has_its_values() -> None:
    assert FIELD_VALUES.keys() == FIELDS.keys() == {f.name for f in dataclasses.fields(Config)} - {"given"}


@given(st.fixed_dictionaries({}, optional={n: v for n, v in FIELD_VALUES.items() if n != "epochs"}))
def test_a_config_survives_toml_and_json(values) -> None:
    config = Config(**values)
    assert Config.of(tomllib.loads(tomli_w.dumps(config.mapping()))) == config
    assert Config.of(json.loads(json.dumps(config.mapping()))) == config


@pytest.mark.parametrize("name", FIELDS)
@given(st.data())
def test_every_field_is_read_from_text(name, data) -> None:
    config = Config(**{name: data.draw(FIELD_VALUES[name])})
    plain = config.mapping().get(name)
    if plain is not None:
        assert Config.of({name: str(plain)}) == config


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_written_is_known_to_be_so_whatever_its_value(name) -> None:
    default = getattr(Config(), name)
    assert Config().given == frozenset()
    written = Config(**{name: default})
    assert written == Config()
    for config in (written, Config().but({name: default}), copy.deepcopy(written)):
        assert config.given == {name}
    assert dataclasses.replace(written, seed=7).given == {name, "seed"}
    assert Config(7, 2).given == {"workers", "min_workers"}


def test_a_range_of_workers_says_three_things() -> None:
    assert Config.of({"workers": "2:8"}) == Config(workers=2, min_workers=2, max_workers=8)
    assert Config.of({"workers": "3"}) == Config(workers=3)


def test_a_path_is_kept_as_text() -> None:
    assert Config(run_dir=Path("a/b")).mapping()["run_dir"] == "a/b"


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"worker": 2}, "worker = 2: there is no such field; did you mean workers?"),
        ({"workers": 0}, "workers = 0: below 1; use 1 or more."),
        ({"workers": 2.0}, "workers = 2.0: not a whole number; write a whole number."),
        ({"workers": True}, "workers = True: not a whole number"),
        ({"workers": "two"}, "workers = two: not a whole number"),
        ({"workers": "2:many"}, "workers = 2:many: not a range of whole numbers; write for instance 2:8, or one"),
        ({"workers": None}, "workers = None: not a whole number"),
        ({"lr": float("nan")}, "lr = nan: not a positive number"),
        ({"lr": "fast"}, "lr = fast: not a number"),
        ({"clip": 0}, "clip = 0: not a positive number"),
        ({"resume": "yes"}, "resume = yes: not true or false"),
        ({"precision": "fp8"}, "precision = fp8: not one of the choices; choose fp32 or bf16 or bf16_parameters."),
        ({"steps": 3, "epochs": 1}, "epochs = 1: steps = 3 is given too; give one of the two."),
        ({"layout": "Layout(shard=0)"}, "shard=0 is not a whole number from 1"),
        ({"layout": "Layout(shard=2, zero=0)"}, "zero=0 is none of 1, 2, 3"),
        ({"layout": "Layout(zero=2)"}, "zero=2: no gradients are summed over workers"),
        ({"layout": "Layout(shard=2, offload=1)"}, "offload=1 is not True or False"),
        (
            {"activation_checkpointing": "all"},
            "activation_checkpointing = all: not one of the choices; choose none or blocks or selective.",
        ),
        ({"layout": "Layout(pipeline=2, schedule='2F2B')"}, "schedule='2F2B' is none of GPipe, 1F1B"),
        ({"seed": -1}, "seed = -1: below 0"),
        ({"run_dir": 7}, "run_dir = 7: not text"),
        ({"schedule": "Cosine(warmup=-1)"}, "warmup=-1 is not a whole number of steps from 0"),
    ],
)
def test_bad_values_are_named_with_their_cure(given_, words) -> None:
    with pytest.raises(InvalidInput) as caught:
        Config.of(given_)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "values", [{"compress": Exact}, {"sync": "AllReduce()"}, {"compress": None}, {"layout": Cast()},
               {"schedule": lambda step, steps: 1.0}], ids=["class", "text", "none", "other", "call"])  # fmt: skip
def test_what_is_no_value_of_the_field_is_refused(values) -> None:
    (name,) = values
    with pytest.raises(InvalidInput, match=rf"{name} = .*: not one of .*; write it as in {name}="):
        Config(**values)


def test_values_are_frozen_comparable_and_printable() -> None:
    assert Config(compress=Exact(), workers=2) == Config.of({"compress": "Exact()", "workers": "2"})
    assert hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().workers = 2  # type: ignore[misc]
    assert NOTED.keys() <= FIELDS.keys()

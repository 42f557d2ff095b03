"""The notation of variants to compare."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training_runs import regression
from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.plan.scenarios import variants
from unisono.plan.variants import changes, label


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("AllReduce()", {"sync": "AllReduce()", "compress": "Cast()"}),
        ("LocalSGD(every=8) + Quantize(4)", {"sync": "LocalSGD(every=8)", "compress": "Quantize(4)"}),
        ("Quantize(4)+LocalSGD(8)", {"sync": "LocalSGD(8)", "compress": "Quantize(4)"}),
        ("Exact()", {"compress": "Exact()"}),
        ("Exact", {"compress": "Exact"}),
        ("Cast('bf16') + lr=1e+2", {"compress": "Cast('bf16')", "lr": "1e", "2": None}),
        ("Cast('a+b')", {"compress": "Cast('a+b')"}),
        ("global-batch=48 + Exact()", {"global_batch": "48", "compress": "Exact()"}),
    ],
)
def test_terms(text: str, fields: dict[str, Any]) -> None:
    if "2" in fields:  # a plus sign outside of parentheses always begins a term
        with pytest.raises(InvalidInput, match="2 is neither a synchronizer nor a compressor"):
            changes("--against", text)
    else:
        assert changes("--against", text) == fields


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a term is missing"),
        ("AllReduce() +", "a term is missing"),
        ("AllReduc()", "AllReduc is neither a synchronizer nor a compressor; did you mean AllReduce?"),
        ("AllReduce() + AllReduce()", "sync occurs twice"),
        ("larning_rate=3", "there is no setting larning_rate"),
    ],
)
def test_what_is_no_way_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(InvalidInput) as told:
        changes("--against", text)
    assert says in str(told.value)


def test_a_synchronizer_alone_sends_what_it_has_and_a_compressor_alone_keeps_the_synchronizer() -> None:
    given = {"workers": 2, "sync": "LocalSGD(every=4)", "compress": "Quantize(8)"}
    found = variants(
        regression(), given, ["AllReduce()", "Exact()", "AllReduce() + Quantize(4)", "AllReduce() + lr=0.5"]
    )
    assert list(found) == [
        "LocalSGD(every=4) + Quantize()",
        "AllReduce()",
        "LocalSGD(every=4) + Exact()",
        "AllReduce() + Quantize(bits=4)",
        "AllReduce() + lr=0.5",
    ]
    assert [config.lr for config in found.values()] == [None, None, None, None, 0.5]


def test_the_same_way_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the same as another variant"):
        variants(regression(), {"workers": 2}, ["AllReduce()"])


def test_a_layout_is_refused_rather_than_forecast_as_if_it_were_none() -> None:
    with pytest.raises(InvalidInput, match=r"Layout\(shard=2\): virtual workers are whole replicas"):
        variants(regression(), {"workers": 2, "layout": "Layout(shard=2)"}, [])


def test_more_workers_than_micro_batches_get_one_each_unless_the_batch_was_given() -> None:
    (fits,) = variants(regression(), {"workers": 16}, []).values()
    assert (fits.global_batch, fits.micro_batch) == (64, 4)
    (many,) = variants(regression(), {"workers": 40}, []).values()
    assert (many.global_batch, many.micro_batch) == (80, 2)  # of 96 samples
    with pytest.raises(InvalidInput, match="workers = 16: a step has only 4 micro-batches"):
        variants(regression(), {"workers": 16, "global_batch": 24}, [])
    (few,) = variants(regression(), {"workers": 6}, []).values()
    assert (few.global_batch, few.micro_batch) == (24, 4)


def test_a_way_is_named_by_what_it_agrees_by_and_what_else_it_changes() -> None:
    assert label(Config(), {}) == "AllReduce()"
    assert label(Config.of({"compress": "Exact()"}), {"lr": "0.1"}) == "AllReduce() + Exact() + lr=0.1"

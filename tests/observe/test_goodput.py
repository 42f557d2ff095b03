"""Goodput from the time ledgers of a run, case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.activity import Phase
from unisono.observe.goodput import advice, goodput, shares_text, table, total_seconds

SECONDS = st.dictionaries(st.sampled_from([phase.value for phase in Phase]), st.floats(0, 1e6), max_size=9)


@pytest.mark.parametrize(("ledgers", "text"), [
    ([{"start": 5, "compute": 90, "communication": 5}] * 2, ""),
    ([{"compute": 60, "communication": 40}] * 2, "40% of the time was spent waiting for others"),
    ([{"compute": 60, "data": 40}], "40% of the time was spent waiting for data"),
    ([{"compute": 60, "checkpoint": 30, "communication": 10}] * 3, "spent on checkpoints"),
    ([{"compute": 60, "evaluation": 40}] * 2, "evaluate less often"),
    ([{"compute": 60, "recovery": 15, "lost work": 15, "data": 10}] * 2, "recoveries and repeated steps"),
    ([{"compute": 90, "communication": 0}, {"compute": 30, "communication": 60}, {"compute": 31, "communication": 59}],
     "worker 0 took 3.0 times as long as the others to load and compute as much, and they waited for it: look at what"),
    ([{"compute": 10, "communication": 80}, {"compute": 10, "data": 80}], "look at where its data comes from"),
    ([{"start": 99, "compute": 1}], ""),  # the start is paid once
    ([{"compute": 0.1, "checkpoint": 0.9}], ""),  # too little could be saved
    ([{}], ""),
    ([], ""),
])  # fmt: skip
def test_the_most_useful_advice_is_given(ledgers, text) -> None:
    assert text in advice(ledgers)
    assert bool(advice(ledgers)) == bool(text)


def test_goodput_is_the_share_of_computing_after_the_start() -> None:
    ledgers = [{"start": 10, "compute": 60, "communication": 30, "lost work": 10}, {"start": 50, "compute": 100}]
    assert goodput(ledgers) == 160 / 200
    assert shares_text(ledgers) == "80% compute, 15% communication, 5% lost work"


@given(st.lists(SECONDS, max_size=5))
def test_any_ledger_can_be_described(ledgers) -> None:
    assert 0 <= goodput(ledgers) <= 1 + 1e-9
    assert isinstance(advice(ledgers), str)
    assert isinstance(shares_text(ledgers), str)
    lines = table(ledgers, [f"worker {i}" for i in range(len(ledgers))])
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[-1] for line in lines[1:]] == [f"{total_seconds(spent):.2f}" for spent in ledgers]

"""The law of the time ledger: at every moment, exactly one phase."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.activity import Phase
from unisono.observe.time_ledger import STEP_PHASES, TimeLedger, seconds_by_name

# Times are whole numbers, so that sums are exact and equality means equality.
PHASES = st.sampled_from(list(Phase))
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "set", "commit", "discard", "each"]), PHASES, st.integers(0, 50)),
    max_size=60,
)


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@given(OPERATIONS, st.integers(0, 100))
def test_phases_add_up_to_the_elapsed_time(operations, age) -> None:
    clock = Clock(1000.0)
    ledger = TimeLedger(clock, float(age))
    depth = 0
    for what, phase, seconds in operations:
        clock.seconds += seconds
        match what:
            case "enter":
                ledger.push(ledger(phase))
                depth += 1
            case "leave" if depth:
                ledger.pop()
                depth -= 1
            case "set":
                ledger.set_phase(phase)
            case "commit":
                ledger.commit()
            case "discard":
                ledger.discard()
            case "each":
                list(ledger.each(phase, range(3)))
        assert sum(ledger.seconds().values()) == age + clock.seconds - 1000
    assert all(spent >= 0 for spent in ledger.seconds().values())


@given(OPERATIONS)
def test_exactly_the_discarded_time_is_lost(operations) -> None:
    clock = Clock()
    ledger = TimeLedger(clock)
    kept = ledger.seconds()
    for what, phase, seconds in operations:
        clock.seconds += seconds
        with ledger(phase):
            clock.seconds += seconds
        if what in ("commit", "discard"):
            before = ledger.seconds()
            getattr(ledger, what)()
            after = ledger.seconds()
            if what == "discard":
                assert all(after[each] == kept[each] for each in STEP_PHASES)
                lost = sum(before[each] - kept[each] for each in STEP_PHASES)
                assert after[Phase.LOST] == before[Phase.LOST] + lost
            kept = after


def test_only_the_time_until_an_item_is_available_counts_for_the_phase() -> None:
    clock = Clock()
    ledger = TimeLedger(clock)
    ledger.set_phase(Phase.COMPUTE)

    def items():
        for i in range(3):
            clock.seconds += 10
            yield i
        clock.seconds += 5

    for _ in ledger.each(Phase.DATA, items()):
        clock.seconds += 1
    assert seconds_by_name(ledger.seconds()) == {"compute": 3.0, "data": 35.0}


def test_an_error_inside_a_phase_ends_it() -> None:
    clock = Clock()
    ledger = TimeLedger(clock)

    def broken():
        clock.seconds += 2
        raise KeyError
        yield

    with pytest.raises(KeyError):
        list(ledger.each(Phase.DATA, broken()))
    clock.seconds += 3
    assert seconds_by_name(ledger.seconds()) == {"start": 3.0, "data": 2.0}
    assert ledger.current == (Phase.START, 3.0)


def test_concurrent_readers_see_sums_that_add_up() -> None:
    """The clock advances only while nothing is charged: an inconsistent read would give a sum between two times."""
    clock = Clock()
    ledger = TimeLedger(clock)
    over = threading.Event()
    seen: list[tuple[float, float, float]] = []

    def read() -> None:
        while not over.is_set():
            before = clock.seconds
            total = sum(ledger.seconds().values())
            seen.append((before, total, clock.seconds))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        with ledger(Phase.DATA):
            clock.seconds += 1.0
    over.set()
    reader.join()
    assert [each for each in seen if not each[0] <= each[1] <= each[2]] == []
    assert sum(ledger.seconds().values()) == 20_000

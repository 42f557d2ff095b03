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
HAPPENINGS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "be", "commit", "discard", "each"]), PHASES, st.integers(0, 50)),
    max_size=60,
)


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@given(HAPPENINGS, st.integers(0, 100))
def test_phases_add_up_to_the_time_that_has_passed(happenings, age) -> None:
    clock = Clock(1000.0)
    ledger = TimeLedger(clock, float(age))
    depth = 0
    for what, phase, seconds in happenings:
        clock.seconds += seconds
        match what:
            case "enter":
                ledger.push(ledger(phase))
                depth += 1
            case "leave" if depth:
                ledger.pop()
                depth -= 1
            case "be":
                ledger.set_phase(phase)
            case "commit":
                ledger.commit()
            case "discard":
                ledger.discard()
            case "each":
                list(ledger.each(phase, range(3)))
        assert sum(ledger.seconds().values()) == age + clock.seconds - 1000
    assert all(spent >= 0 for spent in ledger.seconds().values())


@given(HAPPENINGS)
def test_what_is_not_kept_and_only_that_is_lost(happenings) -> None:
    clock = Clock()
    ledger = TimeLedger(clock)
    kept = ledger.seconds()
    for what, phase, seconds in happenings:
        clock.seconds += seconds
        with ledger(phase):
            clock.seconds += seconds
        if what in ("commit", "discard"):
            before = ledger.seconds()
            getattr(ledger, what)()
            after = ledger.seconds()
            if what == "discard":
                assert all(after[each] == kept[each] for each in STEP_PHASES)
                gone = sum(before[each] - kept[each] for each in STEP_PHASES)
                assert after[Phase.LOST] == before[Phase.LOST] + gone
            kept = after


def test_the_time_until_an_item_is_there_is_the_phases_and_what_is_done_with_it_is_not() -> None:
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


def test_who_looks_meanwhile_sees_sums_that_add_up() -> None:
    """The clock goes only while nothing is charged, so a torn look would show as a sum that is no whole time."""
    clock = Clock()
    ledger = TimeLedger(clock)
    over = threading.Event()
    seen: list[tuple[float, float, float]] = []

    def look() -> None:
        while not over.is_set():
            before = clock.seconds
            together = sum(ledger.seconds().values())
            seen.append((before, together, clock.seconds))

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(20_000):
        with ledger(Phase.DATA):
            clock.seconds += 1.0
    over.set()
    looking.join()
    assert [each for each in seen if not each[0] <= each[1] <= each[2]] == []
    assert sum(ledger.seconds().values()) == 20_000

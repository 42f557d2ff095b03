"""Fault schedules: which faults come and which workers they may hit, over all seeds and run states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.chaos.fault_schedule import Fault, FaultKind, FaultSchedule, Moment, Pending, RunStatus, aim, draw

SEEDS = st.integers(0, 2**32)
WANTED = st.fixed_dictionaries({kind: st.integers(0, 4) for kind in FaultKind})
WORKERS = tuple("abcde")


@st.composite
def seen(draw: st.DrawFn) -> RunStatus:
    """Anything that a run may look like."""
    able = draw(st.lists(st.sampled_from(WORKERS), unique=True))
    takers = [worker for worker in WORKERS if worker not in able and draw(st.booleans())]
    givers = [worker for worker in able if takers and draw(st.booleans())]
    apart = [worker for worker in able if draw(st.booleans())]
    return RunStatus(draw(st.floats(0, 1)), draw(st.booleans()), *map(tuple, (able, givers, takers, apart)))


FAULTS = st.builds(
    Fault, st.sampled_from(FaultKind), st.floats(0, 1), st.sampled_from(Moment), st.floats(0, 1, exclude_max=True)
)


@given(SEEDS, WANTED)
def test_a_seed_has_one_schedule_with_as_many_faults_as_are_wanted_in_their_order(seed, wanted) -> None:
    schedule = draw(seed, wanted)
    assert schedule == draw(seed, wanted)
    assert {kind: schedule.count(kind) for kind in FaultKind} == wanted
    moments = [fault.after for fault in schedule.faults]
    assert moments == sorted(moments)
    assert all(0 < moment < 1 for moment in moments)
    assert all(0 <= fault.whom < 1 and fault.seconds > 0 for fault in schedule.faults)


def test_other_seeds_have_other_schedules() -> None:
    wanted = {FaultKind.KILL: 1}
    assert len({draw(seed, wanted).faults for seed in range(50)}) == 50


@given(SEEDS)
def test_of_three_kills_one_is_aimed_at_a_checkpoint_and_two_at_a_handing_over(seed) -> None:
    moments = {fault.moment for fault in draw(seed, {FaultKind.KILL: 3}).faults}
    assert moments == {Moment.SAVING, Moment.TAKING, Moment.GIVING}


@given(FAULTS, seen())
def test_a_fault_hits_only_whom_it_may_and_never_the_last_who_is_able(fault, now) -> None:
    strike = aim(fault, now)
    if strike is None:
        return
    if not strike.victim:
        assert fault.kind in (FaultKind.JOIN, FaultKind.COORDINATOR)
        return
    assert set(now.trainable) - {strike.victim}
    assert strike.moment in (fault.moment, Moment.ANY)
    allowed = {Moment.TAKING: now.receivers, Moment.GIVING: now.senders}.get(strike.moment, now.trainable)
    assert strike.victim in (now.cuttable if fault.kind is FaultKind.PARTITION else allowed)
    assert now.saving or strike.moment is not Moment.SAVING or fault.kind is FaultKind.PARTITION


def _order(fault: Fault) -> tuple[str, float]:
    return fault.kind.value, fault.after


@given(SEEDS, WANTED, st.lists(seen(), max_size=30))
def test_each_fault_comes_once_at_most_and_not_before_its_time(seed, wanted, moments) -> None:
    pending, struck = Pending(draw(seed, wanted)), []
    for now in moments:
        strikes = list(pending.due(now))
        assert all(strike.fault.after <= now.share for strike in strikes)
        assert sum(bool(strike.victim) for strike in strikes) <= 1
        struck += [strike.fault for strike in strikes]
    assert sorted([*struck, *pending.faults], key=_order) == sorted(draw(seed, wanted).faults, key=_order)


@given(FAULTS.filter(lambda fault: fault.kind is not FaultKind.PARTITION and fault.after < 0.7))
def test_a_moment_that_never_comes_is_not_waited_for_for_ever(fault) -> None:
    pending = Pending(FaultSchedule(0, (fault,)))
    calm = [RunStatus(share / 10, trainable=("a", "b")) for share in range(11)]
    assert len([strike for now in calm for strike in pending.due(now)]) == 1

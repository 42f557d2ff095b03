"""How long an evicted worker waits before it may join again."""

from unisono.membership.readmission import Readmission

MEMBERS = 3


def quarantines(stays_seconds: list[float], members: int = MEMBERS) -> list[float]:
    """Quarantines after evictions that follow such stays in the view."""
    readmission, now, found = Readmission(0.0), 0.0, []
    for stay in stays_seconds:
        readmission.join(now)
        now += stay
        readmission.evict(members, now)
        found.append(readmission.quarantine_seconds)
    return found


def test_quarantines_double_up_to_four_seconds_per_member() -> None:
    assert quarantines([5.0] * 8) == [0, 1, 2, 4, 8, 12, 12, 12]
    assert quarantines([5.0] * 20, members=4096)[-1] == 600


def test_a_long_stay_resets_quarantines() -> None:
    assert quarantines([5.0, 5.0, 5.0, 12.0, 5.0]) == [0, 1, 2, 0, 1]


def test_a_quarantine_starts_with_the_next_heartbeat() -> None:
    readmission = Readmission(0.0)
    for now in (1.0, 2.0):
        readmission.evict(MEMBERS, now)
    assert not readmission.is_quarantined(2.0)
    readmission.start_quarantine(50.0)
    assert readmission.is_quarantined(50.9)
    assert not readmission.is_quarantined(51.0)

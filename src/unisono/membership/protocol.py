"""What coordinator and agents say to each other.

Each message holds all that its sender has to say, so that one that is lost, late or said twice does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, order=True)
class StateVersion:
    """How far a worker's state is; of two, the one reached in the later view is right, then the one of more steps.

    Args:
        view: in which it was reached; 0: in none, it is what the run starts from.
        step: steps that are in it.
        digest: of the state; replicas that stand alike are equal.
    """

    view: int = 0
    step: int = 0
    digest: str = ""


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker is.

    Args:
        host: a name that only workers who share memory and loopback have in common.
        meets_at: a URL at which others can meet it, see `unisono.comm.rendezvous.address`.
    """

    host: str = ""
    meets_at: str = ""


@dataclass(frozen=True)
class View:
    """The replicas present, from one change to the next.

    Args:
        number: 1, 2, ...; there is one view of each number; 0 is before the first.
        members: workers by name, in the order of their ranks.
        start: what every member's state is before its first step.
        sources: members whose state that is already; the others take it from them. Without any, all take what was
            kept for the worst case, in memory or on disk, and `start` says nothing.
        places: where the members are, in their order; they meet where the first is.
    """

    number: int = 0
    members: tuple[str, ...] = ()
    start: StateVersion = StateVersion()
    sources: tuple[str, ...] = ()
    places: tuple[WorkerAddress, ...] = ()


class ViewStatus(Enum):
    """Whether a view goes on; it goes through some of these, in their order."""

    NO = "no"
    AT_A_BOUNDARY = "at a boundary"  # after a step that all of its members take
    NOW = "now"
    WITH_TOO_FEW = "with too few to go on"  # left behind; who wants to leave may
    FOR_EVER = "for ever"  # all that was to be trained is

    @property
    def at_once(self) -> bool:
        """Whether no member of the view takes one more step in it."""
        return self in (ViewStatus.NOW, ViewStatus.WITH_TOO_FEW)


@dataclass(frozen=True)
class Heartbeat:
    """A worker to the coordinator, every so often and whenever something changes.

    Args:
        worker: its name, which no other process ever has.
        count: of this worker's beats; later ones hold more.
        works_in: number of the view whose group it has met, and is in now; 0: in none.
        ended: number of the latest view that it will never work in, or not again; nor in one before.
        standing: of its state.
        missed: workers that it could not reach when it last met a group.
        leaving: it wants to go after a step that all take.
        finished: all that was to be trained is, and its result lies where it belongs.
        place: where it is.
        broke: number of the latest view that it ended because it lost others, and not at a boundary.
    """

    worker: str
    count: int
    works_in: int = 0
    ended: int = 0
    standing: StateVersion = StateVersion()
    missed: tuple[str, ...] = ()
    leaving: bool = False
    finished: bool = False
    place: WorkerAddress = WorkerAddress()
    broke: int = 0


@dataclass(frozen=True)
class ViewUpdate:
    """The coordinator to a worker: the latest view, and whether it goes on."""

    view: View
    over: ViewStatus


@dataclass(frozen=True)
class StepCount:
    """Steps of a run that all members of a view took together.

    Args:
        taken: since the coordinator's process began; those that were lost and taken again count again.
        furthest: in the state of the latest view.
    """

    taken: int = 0
    furthest: int = 0


@dataclass(frozen=True)
class Policy:
    """What the user decides.

    Args:
        minimum: workers below which nothing is trained.
        maximum: workers above which further ones stand by.
        expected: workers that the first view waits for.
        unit: workers of one replica; a view has whole replicas.
        shares: what is shared out over replicas: as many each, so that their number divides it; 0: any number.
        patience_seconds: how long the first view waits for `expected`, and any for workers without whom something
            committed may be lost.
        beat_seconds: between a worker's beats; each costs the worker, and the host of the coordinator, some processor
            time. Three of them are the shortest silence.
        beats_per_second: of all workers together, at most: where they are many, each beats more seldom, and is waited
            for longer.
        silence_seconds: the shortest silence after which a worker may be taken for lost. On a busy host a process may
            get no processor for tenths of a second.
        estranged_seconds: how long two workers that could not reach each other are kept apart, at first; then twice as
            long each time.
    """

    minimum: int = 1
    maximum: int = 1 << 30
    expected: int = 1
    unit: int = 1
    shares: int = 0
    patience_seconds: float = 30.0
    beat_seconds: float = 0.25
    beats_per_second: float = 1000.0
    silence_seconds: float = 0.75
    estranged_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.expected <= self.maximum:
            raise ValueError(
                f"minimum={self.minimum}, expected={self.expected}, maximum={self.maximum}: not in this order, from 1"
            )
        if self.unit < 1 or self.maximum < self.unit:
            raise ValueError(f"unit={self.unit}: not from 1 to maximum={self.maximum}")
        if self.shares < 0:
            raise ValueError(f"shares={self.shares}: below 0")


@dataclass(frozen=True)
class CoordinatorAddress:
    """How a worker reaches the coordinator of its run.

    Args:
        url: ``http://host:port`` or ``https://``.
        token: that every call bears.
        meets_at: where workers of this host meet each other, ``file:///private/directory``; empty: each opens a door
            of its own, that other hosts can reach.
        authority: by what an ``https://`` coordinator is known, where the system's own list does not have it: a file
            with a certificate, or the fingerprint of the coordinator's own, ``sha256:`` and 64 hexadecimal digits.
    """

    url: str
    token: str = field(repr=False)
    meets_at: str = ""
    authority: str = ""

    @property
    def private(self) -> bool:
        """Whether only the coordinator's own host reaches it."""
        return urlsplit(self.url).hostname in LOOPBACK

    @property
    def secure(self) -> bool:
        """Whether the coordinator is reached by TLS."""
        return urlsplit(self.url).scheme == "https"

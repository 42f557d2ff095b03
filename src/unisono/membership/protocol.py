"""Messages of the membership protocol, and its policy.

Each message holds everything that its receiver needs, so that lost, late and duplicated messages do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated
from urllib.parse import urlsplit

from unisono.system.bounds import PRINTABLE, STRICT, Bounds, Count

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_MEMBERS = 1 << 16  # of a view
MAX_UNREACHABLE = 1 << 13  # workers that one heartbeat names
Name = Annotated[str, Bounds(min_length=1, max_length=128, pattern=r"^[\w.:@-]+$")]

# Keys of the coordinator's store and of `unisono status --json`, by field.
_JSON_KEYS = {"rendezvous_url": "meets_at", "addresses": "places"}
_STRICT_WITH_KEYS = {**STRICT, "alias_generator": lambda field: _JSON_KEYS.get(field, field)}


@dataclass(frozen=True, order=True)
class StateVersion:
    """Which state a worker has. Of two, the one of the later view is newer, and in one view the one of more steps.

    Args:
        view: in which the state was reached; 0: in none, the run starts from it.
        step: number of steps in the state.
        digest: of the state; replicas with equal versions are equal.
    """

    view: Count = 0
    step: Count = 0
    digest: Annotated[str, Bounds(max_length=128, pattern=PRINTABLE)] = ""

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker runs.

    Args:
        host: a name that is equal only for workers that share memory and loopback.
        rendezvous_url: where others can connect to the worker, see `unisono.comm.rendezvous.address`.
    """

    host: Annotated[str, Bounds(max_length=256, pattern=PRINTABLE)] = ""
    rendezvous_url: Annotated[str, Bounds(max_length=1024, pattern=PRINTABLE)] = ""

    __pydantic_config__ = _STRICT_WITH_KEYS


@dataclass(frozen=True)
class View:
    """A numbered set of workers that train together.

    Args:
        number: 1, 2, ...; unique; 0 is before the first.
        members: names of workers, in the order of their ranks.
        start: version of every member's state before its first step.
        sources: members that have this state already and send it to the others. Without any, all members restore
            memory checkpoints or a checkpoint, and `start` has no meaning.
        addresses: of the members, in their order; the rendezvous is at the first.
    """

    number: Count = 0
    members: Annotated[tuple[Name, ...], Bounds(max_length=MAX_MEMBERS)] = ()
    start: StateVersion = StateVersion()
    sources: Annotated[tuple[Name, ...], Bounds(max_length=MAX_MEMBERS)] = ()
    addresses: Annotated[tuple[WorkerAddress, ...], Bounds(max_length=MAX_MEMBERS)] = ()

    __pydantic_config__ = _STRICT_WITH_KEYS


class ViewStatus(Enum):
    """Whether a view continues. It passes through some of these, in this order."""

    ACTIVE = "no"
    ENDING_AT_BOUNDARY = "at a boundary"  # after a step that all of its members take
    ABORTED = "now"
    BELOW_MINIMUM = "with too few to go on"  # aborted; too few workers remain, and those that asked to leave may
    FINISHED = "for ever"  # the training is complete

    @property
    def stops_at_once(self) -> bool:
        """Whether no member of the view takes a further step in it."""
        return self in (ViewStatus.ABORTED, ViewStatus.BELOW_MINIMUM)


@dataclass(frozen=True)
class Heartbeat:
    """A worker's message to the coordinator, at intervals and whenever something changes.

    Args:
        worker: its name, which no other process ever has.
        count: of this worker's heartbeats; a later one replaces those before it.
        active_view: number of the view in whose group it trains; 0: none.
        ended_view: the worker will not train again in the view of this number, nor in one before it.
        version: of its state.
        unreachable: workers that it could not reach when it last tried to connect a group.
        leaving: it asks to leave after a step that all members take.
        finished: the training is complete, and its result is stored.
        failed_view: number of the latest view that it ended because it lost others, and not at a boundary.
    """

    worker: Name
    count: Count
    active_view: Count = 0
    ended_view: Count = 0
    version: StateVersion = StateVersion()
    unreachable: Annotated[tuple[Name, ...], Bounds(max_length=MAX_UNREACHABLE)] = ()
    leaving: bool = False
    finished: bool = False
    address: WorkerAddress = WorkerAddress()
    failed_view: Count = 0

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class ViewUpdate:
    """The coordinator's message to a worker: the latest view, and whether it continues."""

    view: View
    status: ViewStatus


@dataclass(frozen=True)
class StepCount:
    """Steps of a run, each taken by all members of a view.

    Args:
        taken: since the coordinator's process started; a step that is repeated counts again.
        furthest: steps in the state of the latest view.
    """

    taken: Count = 0
    furthest: Count = 0

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Policy:
    """The user's rules for views.

    Args:
        min_workers: with fewer, no view is formed.
        max_workers: further workers wait as spares.
        expected_workers: the first view waits for this number.
        replica_size: workers of one replica; a view has complete replicas only.
        micro_batches: of a step; the number of replicas divides it. 0: any number of replicas.
        join_timeout_seconds: how long the first view waits for `expected_workers`, and how long any view waits for
            workers without which committed steps may be lost.
        heartbeat_seconds: interval of a worker's heartbeats. Each costs processor time of the worker and of the
            coordinator's host. A timeout is at least three intervals.
        heartbeats_per_second: upper bound over all workers; with many workers, intervals and timeouts become longer.
        min_heartbeat_timeout_seconds: shortest time without a heartbeat after which a worker may be taken for lost. On
            a busy host a process may get no processor for tenths of a second.
        quarantine_seconds: for how long two workers that could not reach each other are kept out of one view, the first
            time; then twice as long each time.
    """

    min_workers: int = 1
    max_workers: int = 1 << 30
    expected_workers: int = 1
    replica_size: int = 1
    micro_batches: int = 0
    join_timeout_seconds: float = 30.0
    heartbeat_seconds: float = 0.25
    heartbeats_per_second: float = 1000.0
    min_heartbeat_timeout_seconds: float = 0.75
    quarantine_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.expected_workers <= self.max_workers:
            raise ValueError(
                f"min_workers={self.min_workers}, expected_workers={self.expected_workers}, "
                f"max_workers={self.max_workers}: not in this order, from 1"
            )
        if self.replica_size < 1 or self.max_workers < self.replica_size:
            raise ValueError(f"replica_size={self.replica_size}: not from 1 to max_workers={self.max_workers}")
        if self.micro_batches < 0:
            raise ValueError(f"micro_batches={self.micro_batches}: below 0")


@dataclass(frozen=True)
class CoordinatorAddress:
    """How a worker reaches the coordinator of its run.

    Args:
        url: ``http://host:port`` or ``https://``.
        token: which every request proves.
        rendezvous_url: where workers of this host connect to each other, ``file:///private/directory``; empty: each
            opens a listening socket, which other hosts can reach.
        authority: identifies an ``https://`` coordinator whose certificate the system does not trust: a file with a
            certificate, or the fingerprint of the coordinator's own, ``sha256:`` and 64 hexadecimal digits.
    """

    url: str
    token: str = field(repr=False)
    rendezvous_url: str = ""
    authority: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only the coordinator's own host reaches it."""
        return urlsplit(self.url).hostname in LOOPBACK

    @property
    def uses_tls(self) -> bool:
        """Whether the coordinator is reached by TLS."""
        return urlsplit(self.url).scheme == "https"

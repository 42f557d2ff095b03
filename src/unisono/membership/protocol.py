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
MAX_MEMBERS = 1 << 16  # the most members of a view
MAX_UNREACHABLE = 1 << 13  # the most workers that one heartbeat names
Name = Annotated[str, Bounds(min_length=1, max_length=128, pattern=r"^[\w.:@-]+$")]

# Keys of the coordinator's store and of `unisono status --json`, by field.
_JSON_KEYS = {"rendezvous_url": "meets_at", "addresses": "places"}
_STRICT_WITH_KEYS = {**STRICT, "alias_generator": lambda field: _JSON_KEYS.get(field, field)}


@dataclass(frozen=True, order=True)
class StateVersion:
    """Identifies the state that a worker has. The version with the later view is newer; in one view, with more steps.

    Args:
        view: number of the view in which the state was reached; 0: the run starts from this state.
        step: number of steps in the state.
        digest: a digest of the state; replicas with equal versions have equal states.
    """

    view: Count = 0
    step: Count = 0
    digest: Annotated[str, Bounds(max_length=128, pattern=PRINTABLE)] = ""

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker runs.

    Args:
        host: a name that is equal only for workers that share memory and the loopback device.
        rendezvous_url: where other workers can meet this worker, see `unisono.comm.rendezvous.address`.
    """

    host: Annotated[str, Bounds(max_length=256, pattern=PRINTABLE)] = ""
    rendezvous_url: Annotated[str, Bounds(max_length=1024, pattern=PRINTABLE)] = ""

    __pydantic_config__ = _STRICT_WITH_KEYS


@dataclass(frozen=True)
class View:
    """A numbered set of workers that train together.

    Args:
        number: 1, 2, ...; unique; 0 stands for the time before the first view.
        members: names of workers, in the order of their ranks.
        start: the version of every member's state before the view's first step.
        sources: members that have this state already and send it to the others. If there is none, all members restore
            memory checkpoints or a checkpoint, and `start` has no meaning.
        addresses: the members' addresses, in the same order; the rendezvous takes place at the first one.
    """

    number: Count = 0
    members: Annotated[tuple[Name, ...], Bounds(max_length=MAX_MEMBERS)] = ()
    start: StateVersion = StateVersion()
    sources: Annotated[tuple[Name, ...], Bounds(max_length=MAX_MEMBERS)] = ()
    addresses: Annotated[tuple[WorkerAddress, ...], Bounds(max_length=MAX_MEMBERS)] = ()

    __pydantic_config__ = _STRICT_WITH_KEYS


class ViewStatus(Enum):
    """Whether a view continues. A view passes through some of these statuses, in this order."""

    ACTIVE = "no"
    ENDING_AT_BOUNDARY = "at a boundary"  # after a step that all of its members take
    ABORTED = "now"
    BELOW_MINIMUM = "with too few to go on"  # aborted; too few workers remain, and those that asked to leave may do so
    FINISHED = "for ever"  # the training is complete

    @property
    def stops_at_once(self) -> bool:
        """Whether no member of the view takes a further step in it."""
        return self in (ViewStatus.ABORTED, ViewStatus.BELOW_MINIMUM)


@dataclass(frozen=True)
class Heartbeat:
    """A worker's message to the coordinator, at intervals and whenever something changes.

    Args:
        worker: the worker's name, which no other process ever has.
        count: the number of this heartbeat among the worker's heartbeats; it replaces those with lower numbers.
        active_view: number of the view in whose group the worker trains; 0: none.
        ended_view: the worker will not train again in the view of this number, nor in earlier ones.
        version: the version of the worker's state.
        unreachable: workers that it could not reach when it last tried to connect a group.
        leaving: whether the worker asks to leave after a step that all members take.
        finished: whether the training is complete, and its result is stored.
        address: where the worker runs.
        failed_view: number of the latest view that the worker ended because it lost others, and not at a boundary.
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
    """The coordinator's message to a worker: the latest view, and whether this view continues."""

    view: View
    status: ViewStatus


@dataclass(frozen=True)
class StepCount:
    """Steps of a run, each taken by all members of a view.

    Args:
        taken: steps taken since the coordinator's process started; a step that is repeated counts again.
        furthest: steps in the state that the latest view has reached.
    """

    taken: Count = 0
    furthest: Count = 0

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Policy:
    """The user's rules for views.

    Args:
        min_workers: no view is formed with fewer workers.
        max_workers: workers beyond this number wait as spares.
        expected_workers: the first view waits for this number of workers.
        replica_size: workers of one replica; a view has complete replicas only.
        micro_batches: micro-batches of a step, which the number of replicas must divide; 0: any number of replicas.
        join_timeout_seconds: how long the first view waits for `expected_workers`, and how long any view waits for
            workers without which committed steps may be lost.
        heartbeat_seconds: interval of a worker's heartbeats. Each costs processor time of the worker and of the
            coordinator's host. A timeout is at least three intervals.
        heartbeats_per_second: upper bound over all workers; with many workers, intervals and timeouts become longer.
        min_heartbeat_timeout_seconds: shortest time without a heartbeat after which a worker may be taken for lost. On
            a busy host a process may get no processor for tenths of a second.
        quarantine_seconds: how long two workers that could not reach each other are kept out of one view, the first
            time; each further time, twice as long as before.
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
                f"max_workers={self.max_workers}: must be at least 1, and each at least the previous one"
            )
        if self.replica_size < 1 or self.max_workers < self.replica_size:
            raise ValueError(f"replica_size={self.replica_size}: must be from 1 to max_workers={self.max_workers}")
        if self.micro_batches < 0:
            raise ValueError(f"micro_batches={self.micro_batches}: must not be below 0")


@dataclass(frozen=True)
class CoordinatorAddress:
    """How a worker reaches the coordinator of its run.

    Args:
        url: ``http://host:port`` or ``https://``.
        token: the run's token; every request proves that its sender knows it.
        rendezvous_url: where workers of this host connect to each other, ``file:///private/directory``; empty: each
            worker opens a listening socket, which other hosts can reach.
        authority: identifies an ``https://`` coordinator whose certificate the system does not trust: a file with a
            certificate, or the fingerprint of the coordinator's certificate, ``sha256:`` and 64 hexadecimal digits.
    """

    url: str
    token: str = field(repr=False)
    rendezvous_url: str = ""
    authority: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only the coordinator's own host can reach the coordinator."""
        return urlsplit(self.url).hostname in LOOPBACK

    @property
    def uses_tls(self) -> bool:
        """Whether the coordinator is reached by TLS."""
        return urlsplit(self.url).scheme == "https"

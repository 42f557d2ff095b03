"""Checks, before a worker takes part in a run, that it would train the same task as the other workers.

In an elastic run the coordinator keeps the traits that the first worker of the run's launcher reported. A worker
compares its own with them before it asks to join, so that refusing it costs the others nothing. Without a coordinator
all workers compare their traits when they first meet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.elastic.trait_check import Traits, check
from unisono.elastic.worker_context import Worker
from unisono.membership import CoordinatorAddress
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import TraitsMessage

_PATH, _NOT_YET = "/v1/traits", 404
_RETRY_SECONDS = 0.2
_AWAY_SECONDS = 30.0


def compare(comm: Communicator, traits: Callable[[], Traits]) -> None:
    """Collective: raise `TaskMismatch` on all workers, unless all have the same `traits`."""
    if comm.size == 1:
        return
    first, *others = (json.loads(text) for text in gather_text(comm, json.dumps(dict(traits()))))
    for rank, each in enumerate(others, 1):
        check(each, first, f"worker {rank}'s", "worker 0")


def admit(contact: CoordinatorAddress, worker: Worker, traits: Traits, stopped: Callable[[], bool]) -> None:
    """Compare `traits` with those of the run whose coordinator `contact` reaches.

    A worker of the run's own launcher tells them if it is the first; others wait until one has. Returns without a
    comparison if `stopped` becomes true, or while the coordinator is away for too long.

    Raises:
        TaskMismatch: they differ.
    """
    own = worker.name.partition(".")[0].isdecimal()
    line, away_since = HttpConnection(contact), time.monotonic()
    try:
        while not stopped():
            told = {"traits": dict(traits)}
            answer = line.request("PUT", _PATH, told, TraitsMessage) if own else line.get(_PATH, TraitsMessage)
            if answer is not None and answer.status != _NOT_YET:
                return _compare_with(answer.body, traits)
            if answer is not None:
                away_since = time.monotonic()
            elif time.monotonic() - away_since > _AWAY_SECONDS:
                return
            time.sleep(_RETRY_SECONDS)
    finally:
        line.close()


def _compare_with(told: TraitsMessage | None, traits: Traits) -> None:
    """Raise `TaskMismatch` if a coordinator reports other traits; one that refuses these has none to compare with."""
    if told is not None:
        check(traits, told.traits, "this worker's", "the run")

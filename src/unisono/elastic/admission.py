"""Checks, before a worker joins a run, that it would train the same task as the other workers.

In an elastic run, the coordinator stores the traits that the first worker of the run's launcher reported. Every worker
compares its own traits with them before it asks to join, so a refusal does not disturb the other workers. Without a
coordinator, all workers compare their traits at the start of the first view.
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
    """Compare `traits` with the traits of the run whose coordinator is at `contact`.

    Workers of the run's launcher report their traits; the first report gives the run its traits. Workers of other
    launchers wait for that report. Returns without a comparison if `stopped` returns true, or if the coordinator does
    not answer for `_AWAY_SECONDS`.

    Raises:
        TaskMismatch: the traits differ.
    """
    of_first_launcher = worker.name.partition(".")[0].isdecimal()
    connection, away_since = HttpConnection(contact), time.monotonic()
    try:
        while not stopped():
            if of_first_launcher:
                answer = connection.request("PUT", _PATH, {"traits": dict(traits)}, TraitsMessage)
            else:
                answer = connection.get(_PATH, TraitsMessage)
            if answer is not None and answer.status != _NOT_YET:
                return _compare_with(answer.body, traits)
            if answer is not None:
                away_since = time.monotonic()
            elif time.monotonic() - away_since > _AWAY_SECONDS:
                return
            time.sleep(_RETRY_SECONDS)
    finally:
        connection.close()


def _compare_with(reported: TraitsMessage | None, traits: Traits) -> None:
    """Raise `TaskMismatch` if the coordinator reports other traits. It reports None if it has refused `traits`."""
    if reported is not None:
        check(traits, reported.traits, "this worker's", "the run")

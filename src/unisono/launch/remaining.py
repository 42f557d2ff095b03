"""Whether a run goes on elsewhere when all workers of one launcher have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Set

from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import StatusMessage
from unisono.membership.protocol import CoordinatorAddress

_ANSWER_SECONDS = 3.0
_WAIT_SECONDS = 10.0  # longer than others take to a view without the workers that ended, and to a step in it
_LOOK_SECONDS = 0.1


def goes_on(contact: CoordinatorAddress, without: Set[str]) -> bool:
    """Whether others take a step in a view `without` these workers, whose processes have ended. Waits until that is
    known, and takes it for no after ten seconds, or where the coordinator has ended with its run."""
    until = time.monotonic() + _WAIT_SECONDS
    with contextlib.closing(HttpConnection(contact, _ANSWER_SECONDS)) as line:
        while time.monotonic() < until:
            answer = line.get("/v1/status", StatusMessage)
            if answer is None or answer.body is None:
                return False
            view = answer.body.view
            if without >= set(view.members):
                return False
            stepped = any(
                worker.works_in == view.number and worker.step > view.start.step for worker in answer.body.workers
            )
            if stepped and not without & set(view.members):
                return True
            time.sleep(_LOOK_SECONDS)
    return False

"""Finds out whether other launchers continue a run when all workers of this launcher have exited."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Set

from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import StatusMessage
from unisono.membership.protocol import CoordinatorAddress

_ANSWER_SECONDS = 3.0
_WAIT_SECONDS = 10.0  # longer than other workers need for a view without those that exited, and for a step in it
_POLL_SECONDS = 0.1


def others_continue(contact: CoordinatorAddress, without: Set[str]) -> bool:
    """Whether other workers take a step in a view without the workers `without`, whose processes have exited.

    Waits until that is known. The result is False after ten seconds, or if the coordinator has ended with its run.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    with contextlib.closing(HttpConnection(contact, _ANSWER_SECONDS)) as line:
        while time.monotonic() < deadline:
            answer = line.get("/v1/status", StatusMessage)
            if answer is None or answer.body is None:
                return False
            view = answer.body.view
            if without >= set(view.members):
                return False
            stepped = any(
                worker.active_view == view.number and worker.step > view.start.step for worker in answer.body.workers
            )
            if stepped and not without & set(view.members):
                return True
            time.sleep(_POLL_SECONDS)
    return False

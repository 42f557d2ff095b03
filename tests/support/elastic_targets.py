"""Worker programs that join, leave and train nothing, for the tests of the supervisor."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from unisono.errors import PeerLost
from unisono.launch import WorkerContext
from unisono.membership import Agent, CoordinatorAddress, StateVersion, View
from unisono.membership.client import CoordinatorClient

STEP_SECONDS = 0.02


def train(worker: WorkerContext, contact: CoordinatorAddress, finish: str) -> dict[str, Any] | None:
    """Takes steps with the members of each view, until the file `finish` exists, or it is asked to stop or leave."""
    worker.report({"name": worker.name, "pid": os.getpid()})
    ended: set[int] = set()
    agent = Agent(worker.name, StateVersion())
    with CoordinatorClient(contact, agent, ended.add) as attendance:
        while (view := attendance.next_view()) is not None:
            attendance.joined(view.number, view.start.step, "")
            worker.report({"name": worker.name, "view": view.number, "members": view.members})
            if _take_steps(worker, attendance, view, ended, Path(finish)):
                attendance.finish()
                return {"name": worker.name, "stopped": worker.stop.requested}
            attendance.fail_view(view.number, "")
    return None


def _take_steps(
    worker: WorkerContext, attendance: CoordinatorClient, view: View, ended: set[int], finish: Path
) -> bool:
    """Whether all is done; else the view is."""
    while not (attendance.votes_to_end or view.number in ended):
        if worker.stop.requested or finish.exists():
            return True
        if worker.stop.leaving:
            attendance.request_leave()
        attendance.add_steps(view.number)
        worker.report({"kind": "step"})
        threading.Event().wait(STEP_SECONDS)
    return False


def train_unless(
    worker: WorkerContext, contact: CoordinatorAddress, finish: str, place: int, how: str
) -> dict[str, Any] | None:
    """As `train`, but the worker at `place` ends in the way `how`, each time."""
    if worker.identity.rank == place:
        worker.report({"name": worker.name, "pid": os.getpid()})
        end(how)
    return train(worker, contact, finish)


def end(how: str) -> None:
    """As a process may: killed, gone, or by an error."""
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "gone":
            os._exit(3)
        case "wrong":
            raise ValueError("the user's own")
        case "lost":
            raise PeerLost([1], "sum", "silent")


def leave(worker: WorkerContext, contact: CoordinatorAddress, finish: str) -> None:
    """Has been asked to go."""


def stay(worker: WorkerContext, contact: CoordinatorAddress, finish: str) -> dict[str, Any]:
    """Worker 0 has the result; the others do not end unless they are stopped."""
    if worker.identity.rank:
        threading.Event().wait()
    return {"name": worker.name}

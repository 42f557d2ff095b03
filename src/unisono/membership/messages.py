"""What coordinator, workers and launchers send each other as JSON; sender and receiver use the same definitions.

A message that does not fit its definition is refused: the coordinator responds with 422, and a client discards such a
response. Text in messages is printable, because terminals show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from unisono.membership.protocol import Heartbeat, Name, StepCount, View, ViewStatus, ViewUpdate
from unisono.membership.view_delta import ViewDelta, apply_delta
from unisono.observe.activity import Activity, Phase
from unisono.system.bounds import PRINTABLE, Bounds, Count, Seconds

_MAX_WORKERS = 4096  # the most workers that one message names
Spent = Annotated[dict[Phase, Seconds], Field(max_length=len(Phase))]
"""Seconds by phase."""
Sentence = Annotated[str, Field(max_length=4096, pattern=PRINTABLE)]
"""A sentence for people."""
Text = Annotated[str, Field(max_length=4096)]


class WireModel(BaseModel):
    """A message; JSON keys are the fields' names, except those in `_STATUS_KEYS`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def json_text(self, indent: int | None = None) -> str:
        """The message as JSON."""
        return self.model_dump_json(by_alias=True, indent=indent)


@dataclass(frozen=True)
class HeartbeatRequest(Heartbeat):
    """A heartbeat, and what else a worker sends with it.

    Args:
        known_view, known_status: number and status of the view in the last update that the worker received; the status
            is empty if it received none.
        waits: whether the coordinator responds only when it has news, or the next heartbeat is due; else at once.
        last_finding: number of the last finding that the worker received; 0: it received none.
        activity: what the worker is doing.
        spent: seconds of the worker's time by phase; sent now and then.
    """

    known_view: Count = 0
    known_status: Annotated[str, Bounds(max_length=32)] = ""
    waits: bool = True
    last_finding: Count = 0
    activity: Activity | None = None
    spent: Spent | None = None


HEARTBEAT_REQUEST = TypeAdapter(HeartbeatRequest)
VIEW = TypeAdapter(View)


class HeartbeatReply(WireModel):
    """The response to a heartbeat: a `ViewUpdate`, and findings.

    Args:
        view: the latest view; None: it is the view that the worker knows, or follows from that view by `change`.
        change: the difference between the view that the worker knows and the latest view.
        status: the status of the latest view.
        heartbeat_seconds: in how many seconds the next heartbeat is due.
        last_finding: number of the latest finding.
        findings: the findings that the worker has not received.
    """

    view: View | None
    change: ViewDelta | None = None
    status: ViewStatus
    heartbeat_seconds: Seconds
    last_finding: Count = 0
    findings: list[Sentence] = []

    def update(self, known: ViewUpdate | None) -> ViewUpdate:
        """The update in this reply, for a worker that has the update `known` (None: it has received none).

        Raises:
            ValueError: this reply has no view, and `known` is None or does not fit `change`.
        """
        if self.view is not None:
            return ViewUpdate(self.view, self.status)
        if known is None:
            raise ValueError("the reply has no view, and this worker has not received any view yet")
        return ViewUpdate(apply_delta(known.view, self.change) if self.change else known.view, self.status)


class ExitMessage(WireModel):
    """A launcher's report that the process of a worker has exited."""

    worker: Name


class RunningMessage(WireModel):
    """A launcher's report of those workers whose processes are running or runnable."""

    workers: Annotated[list[Name], Field(max_length=_MAX_WORKERS)]


class RunningReply(WireModel):
    """The response to a `RunningMessage`.

    Args:
        late: whether a member is late with its heartbeat, so that its launcher should check its process.
        steps: the steps taken so far.
    """

    late: bool
    steps: StepCount


_STATUS_KEYS = {
    "active_view": "works_in",
    "activity": "doing",
    "age_seconds": "silent_seconds",
    "decisions": "happened",
    "findings": "says",
    "status": "over",
    "text": "words",
}
"""Keys of ``unisono status --json``, by field."""


class _StatusModel(WireModel):
    model_config = ConfigDict(alias_generator=lambda field: _STATUS_KEYS.get(field, field), populate_by_name=True)


class WorkerMessage(_StatusModel):
    """A worker, as of its last heartbeat, `age_seconds` ago."""

    worker: Name
    active_view: Count
    step: Count
    age_seconds: Seconds
    leaving: bool
    activity: Activity | None
    spent: Spent


class DecisionMessage(_StatusModel):
    """A decision of the coordinator as text, and its time in seconds since the epoch."""

    at_seconds: Seconds
    text: Sentence


class StatusMessage(_StatusModel):
    """Everything that the coordinator knows; `spent` includes workers that have left."""

    view: View
    status: ViewStatus
    workers: list[WorkerMessage]
    decisions: list[DecisionMessage]
    findings: list[Sentence]
    spent: dict[Name, Spent]


class HolderMessage(WireModel):
    """The process that holds the lock on the run directory: its host, its id, and since when, in seconds since 1970."""

    host: Annotated[str, Field(max_length=256)]
    process: Count
    since: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RunSpecMessage(WireModel):
    """The run that a coordinator serves, as launchers on other hosts receive it.

    Args:
        task: the task's name, which has the same meaning in every directory; empty if the task has no name.
        arguments: the arguments of the task.
        script: in place of a task, the path of a script with a custom loop, and the script's arguments.
        settings: fields of `Config`.
        run: the run directory, if it is the same on all hosts.
        meets_at: `CoordinatorAddress.rendezvous_url` of the launcher that started the run.
        began: when the run was started, in seconds since 1970.
        holder: the process that holds the lock on the run directory.
    """

    task: Text
    arguments: dict[str, Any] = {}
    script: list[Text] = []
    settings: dict[str, Any] = {}
    run: Text = ""
    meets_at: Text = ""
    began: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    holder: HolderMessage | None = None


class TraitsMessage(WireModel):
    """What must be equal on all workers of a run, see `unisono.trainer.traits`."""

    traits: Annotated[dict[Annotated[str, Field(max_length=256)], Text], Field(max_length=256)]


def seconds_by_phase(seconds: Mapping[str, float]) -> dict[Phase, float]:
    """`seconds`, with each phase's value as key, by `Phase` instead."""
    return {Phase(name): value for name, value in seconds.items()}

"""What workers and their coordinator say to each other, as JSON: each message is written and read by the same model.

What does not fit its model does not exist: a coordinator answers 422, and a client takes such an answer for none. Text
in messages is printable, since it is shown on terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from unisono.membership.protocol import Heartbeat, StateVersion, StepCount, View, ViewStatus, ViewUpdate, WorkerAddress
from unisono.membership.view_delta import MOST_MEMBERS, ViewDelta, changed
from unisono.observe.activity import LONGEST_WORDS, MOST_MISSING, Activity, Phase

MOST_MISSED = 1 << 13
_MOST_WORKERS = 4096  # that one message names
# No control characters, line ends, nor what is invisible or changes the direction of text.
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]*$"
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:@-]+$")]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StandingMessage(_Message):
    """See `StateVersion`."""

    view: Count = 0
    step: Count = 0
    digest: Annotated[str, Field(max_length=128, pattern=_PRINTABLE)] = ""

    @staticmethod
    def of(standing: StateVersion) -> StandingMessage:
        """Of how far a worker is, as the protocol says it."""
        return StandingMessage(view=standing.view, step=standing.step, digest=standing.digest)

    def value(self) -> StateVersion:
        """As the protocol takes it."""
        return StateVersion(self.view, self.step, self.digest)


class PlaceMessage(_Message):
    """See `WorkerAddress`."""

    host: Annotated[str, Field(max_length=256, pattern=_PRINTABLE)] = ""
    meets_at: Annotated[str, Field(max_length=1024, pattern=_PRINTABLE)] = ""

    @staticmethod
    def of(place: WorkerAddress) -> PlaceMessage:
        """Of a place as the protocol says it."""
        return PlaceMessage(host=place.host, meets_at=place.meets_at)

    def value(self) -> WorkerAddress:
        """As the protocol takes it."""
        return WorkerAddress(self.host, self.meets_at)


Seconds = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
PhaseName = Annotated[Phase, Field(strict=False)]  # JSON knows no enumerations
Spent = Annotated[dict[PhaseName, Seconds], Field(max_length=len(Phase))]  # seconds by phase
Sentence = Annotated[str, Field(max_length=LONGEST_WORDS, pattern=_PRINTABLE)]


class DoingMessage(_Message):
    """See `Activity`."""

    phase: PhaseName
    step: Count = 0
    micro_batch: Annotated[int, Field(ge=-1, lt=1 << 62)] = -1
    since_seconds: Seconds = 0.0
    waits_for: Sentence = ""
    missing: Annotated[list[Count], Field(max_length=MOST_MISSING)] = []
    line: Sentence = ""

    @staticmethod
    def of(doing: Activity) -> DoingMessage:
        """Of what the worker says."""
        return DoingMessage(
            phase=doing.phase, step=doing.step, micro_batch=doing.micro_batch, since_seconds=doing.since_seconds,
            waits_for=doing.waits_for, missing=list(doing.missing), line=doing.line)  # fmt: skip

    def value(self) -> Activity:
        """As it is thought about."""
        return Activity(
            self.phase, self.step, self.micro_batch, self.since_seconds, self.waits_for, tuple(self.missing),
            self.line)  # fmt: skip


class BeatMessage(_Message):
    """See `Heartbeat`; `knows` and `knows_over` are the word that the worker heard last, `heard` the number of the
    latest sentence; `doing` and `spent`, seconds by phase, are told now and then. Who `waits` is answered when there is
    news, or the next beat is due."""

    worker: Name
    count: Count
    works_in: Count = 0
    ended: Count = 0
    broke: Count = 0
    standing: StandingMessage = StandingMessage()
    missed: Annotated[list[Name], Field(max_length=MOST_MISSED)] = []
    leaving: bool = False
    finished: bool = False
    place: PlaceMessage = PlaceMessage()
    knows: Count = 0
    knows_over: Annotated[str, Field(max_length=32)] = ""
    waits: bool = True
    heard: Count = 0
    doing: DoingMessage | None = None
    spent: Spent | None = None

    @staticmethod
    def of(beat: Heartbeat, knows: ViewUpdate | None = None) -> BeatMessage:
        """Of a beat as the protocol says it, from a worker that `knows` a word."""
        return BeatMessage(
            worker=beat.worker, count=beat.count, works_in=beat.works_in, ended=beat.ended, broke=beat.broke,
            standing=StandingMessage.of(beat.standing), missed=list(beat.missed), leaving=beat.leaving,
            finished=beat.finished, place=PlaceMessage.of(beat.place),
            knows=knows.view.number if knows else 0, knows_over=knows.over.value if knows else "")  # fmt: skip

    def value(self) -> Heartbeat:
        """As the protocol takes it."""
        return Heartbeat(
            self.worker, self.count, self.works_in, self.ended, self.standing.value(), tuple(self.missed), self.leaving,
            self.finished, self.place.value(), self.broke)  # fmt: skip


Members = Annotated[list[Name], Field(max_length=MOST_MEMBERS)]
OverName = Annotated[ViewStatus, Field(strict=False)]
Told = Annotated[str, Field(max_length=4096, pattern=_PRINTABLE)]  # a sentence for people


class ViewMessage(_Message):
    """See `View`."""

    number: Count
    members: Members
    start: StandingMessage
    sources: Members
    places: Annotated[list[PlaceMessage], Field(max_length=MOST_MEMBERS)]

    @staticmethod
    def of(view: View) -> ViewMessage:
        """Of a view as the protocol says it."""
        return ViewMessage(
            number=view.number, members=list(view.members), start=StandingMessage.of(view.start),
            sources=list(view.sources), places=[PlaceMessage.of(each) for each in view.places])  # fmt: skip

    def value(self) -> View:
        """As the protocol takes it."""
        places = tuple(each.value() for each in self.places)
        return View(self.number, tuple(self.members), self.start.value(), tuple(self.sources), places)


RunOfRanks = Annotated[tuple[Count, Count], Field(strict=False)]  # JSON knows no tuples


class ChangeMessage(_Message):
    """See `ViewDelta`, from the view that the worker said it knows."""

    number: Count
    members: Annotated[list[RunOfRanks | Name], Field(max_length=MOST_MEMBERS)]
    places: Annotated[list[PlaceMessage], Field(max_length=MOST_MEMBERS)]
    start: StandingMessage
    sources: Annotated[list[RunOfRanks], Field(max_length=MOST_MEMBERS)]

    @staticmethod
    def of(told: ViewDelta) -> ChangeMessage:
        """Of a change as the protocol says it."""
        return ChangeMessage(
            number=told.number, members=list(told.members), places=[PlaceMessage.of(each) for each in told.places],
            start=StandingMessage.of(told.start), sources=list(told.sources))  # fmt: skip

    def value(self) -> ViewDelta:
        """As the protocol takes it."""
        places = tuple(each.value() for each in self.places)
        return ViewDelta(self.number, tuple(self.members), places, self.start.value(), tuple(self.sources))


class WordMessage(_Message):
    """See `ViewUpdate`; with the seconds after which the coordinator wants to hear again, and what there is to tell
    people: sentences that the worker has not heard, and the number of the latest. Without `view`: it is the one that
    the worker said it knows, with the `change` if there is one."""

    view: ViewMessage | None
    change: ChangeMessage | None = None
    over: OverName
    beat_seconds: Seconds
    said: Count = 0
    says: list[Told] = []

    @staticmethod
    def of(word: ViewUpdate, beat_seconds: float, said: int = 0, says: Sequence[str] = ()) -> WordMessage:
        """Of a word as the protocol says it, to whom it is news."""
        return WordMessage(
            view=ViewMessage.of(word.view), over=word.over, beat_seconds=beat_seconds, said=said, says=list(says)
        )

    def value(self, known: ViewUpdate | None) -> ViewUpdate:
        """As the protocol takes it, for who `known` a word before.

        Raises:
            ValueError: it says what has changed, and the view before is not known, or another one.
        """
        if self.view is not None:
            return ViewUpdate(self.view.value(), self.over)
        if known is None:
            raise ValueError("no view is told to who knows none")
        return ViewUpdate(changed(known.view, self.change.value()) if self.change else known.view, self.over)


class GoneMessage(_Message):
    """The process of a worker has ended, as who started it saw."""

    worker: Name


class RunningMessage(_Message):
    """The processes of these workers want processors, as who started them sees."""

    workers: Annotated[list[Name], Field(max_length=_MOST_WORKERS)]


class LookMessage(_Message):
    """Whether it is time to look which processes want processors, as a worker is `late`; and the `StepCount`, so that
    who replaces workers knows that it is of use."""

    late: bool
    taken: Count
    furthest: Count

    @property
    def count(self) -> StepCount:
        """As the protocol has it."""
        return StepCount(self.taken, self.furthest)


class WorkerMessage(_Message):
    """A worker, as last heard."""

    worker: Name
    works_in: Count
    step: Count
    silent_seconds: Seconds
    leaving: bool
    doing: DoingMessage | None
    spent: Spent


class HappenedMessage(_Message):
    """A decision, with its time in seconds since the epoch."""

    at_seconds: Seconds
    words: Told


class StatusMessage(_Message):
    """All that the coordinator knows; `says` are its latest sentences about what holds steps up, `spent` is of all
    workers that ever were."""

    view: ViewMessage
    over: OverName
    workers: list[WorkerMessage]
    happened: list[HappenedMessage]
    says: list[Told]
    spent: dict[Name, Spent]


Text = Annotated[str, Field(max_length=4096)]


class HolderMessage(_Message):
    """The command that holds the lock on the run's directory: its host, its process there, and since when, in seconds
    since 1970."""

    host: Annotated[str, Field(max_length=256)]
    process: Count
    since: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OrderMessage(_Message):
    """A run, as any host can be told of it.

    Args:
        task: by a name that means the same in every directory; empty for one that cannot be told.
        arguments: of the task.
        script: in place of a task, the path of a script with a loop of its own, and the words that follow it.
        settings: Config fields.
        run: the run's directory, where it is the same on all hosts.
        meets_at: see `CoordinatorAddress`, of who gave the order.
        began: seconds since 1970 when the command was given.
        holder: of the lock on the run's directory.
    """

    task: Text
    arguments: dict[str, Any] = {}
    script: list[Text] = []
    settings: dict[str, Any] = {}
    run: Text = ""
    meets_at: Text = ""
    began: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    holder: HolderMessage | None = None


class TraitsMessage(_Message):
    """What all workers of the run must have in common, see `unisono.trainer.traits`."""

    traits: Annotated[dict[Annotated[str, Field(max_length=256)], Text], Field(max_length=256)]

"""Workers, coordinator or launcher are killed, leave, fail or hang: what happens to the other workers."""

from __future__ import annotations

import os
import re
import signal
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import await_running, code, toy
from tests.support.leftovers import processes, within
from tests.support.observers import NoObserver
from unisono.errors import UnisonoError, WorkerFailed
from unisono.launch import CoordinatorProcess, ElasticOptions, Interrupted, LaunchOptions, launch, supervisor
from unisono.launch.failure import Failure
from unisono.launch.restart_policy import JoinedLauncher, RestartFailed
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership.endpoint import Endpoint
from unisono.membership.protocol import StepCount

PRELOAD = ("unisono.membership.client", "tests.support.elastic_targets")
Act = tuple[Callable[["Drill"], bool], Callable[["Drill"], object]]


class Drill:
    """A run of three, to which `acts` happen one after the other, each as soon as its condition holds."""

    def __init__(self, path: Path, acts: Sequence[Act] = (), **policy: Any) -> None:
        self.path, self.acts = path, list(acts)
        self.finish = path / "finish"
        self.pids: dict[str, int] = {}
        self.views: dict[str, tuple[int, frozenset[str]]] = {}
        self.notices: list[str] = []
        self.lock = threading.Lock()
        # Heartbeats are missed only after seconds: the launcher reports exits before.
        self.policy = Policy(**{"expected_workers": 3, "max_workers": 3, "heartbeat_seconds": 2.0, **policy})

    def run(self, target: str = "train", *arguments: Any) -> list[Any]:
        with CoordinatorProcess(
            Endpoint(), self.policy, self.path / "state", "a token", self.log, self.notices.append
        ) as here:
            self.coordination = here
            contact = CoordinatorAddress(here.url, "a token")
            given = (contact, str(self.finish), *arguments)
            return launch(
                f"tests.support.elastic_targets:{target}", given,
                LaunchOptions(self.path / "logs", 3, preload=PRELOAD, stop_seconds=5.0),
                on_message=self.hear, elastic=ElasticOptions(contact, here))  # fmt: skip

    @property
    def log(self) -> Path:
        return self.path / "coordinator.log"

    def join(self, name: str) -> Callable[[], list[Any]]:
        """One more worker, of another launcher; to be called for its results."""
        contact, results = CoordinatorAddress(self.coordination.url, "a token"), []
        thread = threading.Thread(target=lambda: results.extend(launch(
            "tests.support.elastic_targets:train", (contact, str(self.finish)),
            LaunchOptions(self.path / "others", preload=PRELOAD), on_message=self.hear,
            elastic=ElasticOptions(contact, launcher=name))))  # fmt: skip
        thread.start()
        return lambda: [thread.join(), results][1]

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        with self.lock:
            self.take(message)

    def take(self, message: Mapping[str, Any]) -> None:
        if "pid" in message:
            self.pids[message["name"]] = message["pid"]
        elif "view" in message:
            self.views[message["name"]] = message["view"], frozenset(message["members"])
        elif message["kind"] == "notice":
            self.notices.append(message["text"])
        while self.acts and self.acts[0][0](self):
            self.acts.pop(0)[1](self)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[name], number)


def together(*names: str) -> Callable[[Drill], bool]:
    """Whether one view has exactly these members."""
    return lambda drill: (
        {drill.views.get(name, name) for name in names}
        in ({(number, frozenset(names))} for number, _ in drill.views.values())
    )


def killed(name: str, number: int = signal.SIGKILL) -> Callable[[Drill], object]:
    return lambda drill: drill.kill(name, number)


def done(drill: Drill) -> None:
    drill.finish.touch()


def test_killed_workers_are_replaced_and_the_run_completes(tmp_path) -> None:
    drill = Drill(tmp_path, [
        (together("0", "1", "2"), killed("1")),
        (together("0", "1.2", "2"), killed("1.2", signal.SIGSEGV)),
        (together("0", "1.3", "2"), killed("0")),
        (together("0.2", "1.3", "2"), done),
    ])  # fmt: skip
    results = drill.run()
    assert results[0]["name"] in ("0.2", "1.3", "2")
    assert len(results) == 3
    assert not drill.acts
    assert drill.notices[0] == (
        "worker 1 was killed by SIGKILL (out of memory?): 2 workers continue, a replacement is started"
    )
    assert drill.notices[1].startswith("worker 1.2 was killed by SIGSEGV")
    assert "the process of 1 has exited" in drill.log.read_text()


def test_all_processes_of_a_slot_write_one_log(tmp_path) -> None:
    drill = Drill(tmp_path, [(together("0", "1", "2"), killed("1")), (together("0", "1.2", "2"), done)])
    drill.run()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"worker-{place}.log" for place in range(3)}


def test_a_worker_that_was_asked_to_leave_is_not_replaced(tmp_path) -> None:
    drill = Drill(tmp_path, [
        (together("0", "1", "2"), killed("1", signal.SIGTERM)),
        (lambda drill: together("0", "2")(drill) and bool(drill.notices), done),
    ])  # fmt: skip
    results = drill.run()
    assert [result is None for result in results] in ([False, False, True], [False, True, True])
    assert drill.notices == ["worker 1 has left: 2 workers continue"]
    assert set(drill.pids) == {"0", "1", "2"}


def test_a_run_that_all_workers_have_left_was_interrupted(tmp_path) -> None:
    with pytest.raises(
        Interrupted, match="SIGTERM: every worker was asked to leave before the run was over"
    ) as stopped:
        Drill(tmp_path).run("leave")
    assert stopped.value.exit_code == 143


def test_a_killed_coordinator_is_restarted_at_the_same_port_with_its_state(tmp_path) -> None:
    def strike(drill: Drill) -> None:
        drill.url = drill.coordination.url
        os.kill(drill.coordination.pid, signal.SIGKILL)
        drill.kill("2")

    drill = Drill(tmp_path, [(together("0", "1", "2"), strike), (together("0", "1", "2.2"), done)])
    results = drill.run()
    assert results[0] is not None
    assert drill.coordination.url == drill.url
    assert any(words.startswith("the coordinator was killed by SIGKILL") for words in drill.notices)
    assert any(words.startswith("worker 2 was killed") for words in drill.notices)
    formed = re.findall(r"view (\d+): ", drill.log.read_text())
    assert formed == [str(1 + number) for number in range(len(formed))]


def test_workers_of_another_launcher_join_and_leave(tmp_path) -> None:
    def call(drill: Drill) -> None:
        drill.results = drill.join("other")

    drill = Drill(tmp_path, [
        (together("0", "1", "2"), call),
        (together("0", "1", "2", "other:0"), killed("other:0")),
        (together("0", "1", "2", "other:0.2"), killed("other:0.2", signal.SIGTERM)),
        (together("0", "1", "2"), done),
    ], max_workers=4)  # fmt: skip
    assert drill.run()[0] is not None
    assert drill.results() == [None]
    assert not drill.acts
    assert [words.partition(":")[0] for words in drill.notices] == ["worker other", "worker other"]


@pytest.mark.short(1)
@pytest.mark.parametrize(("how", "reason"), [("killed", "killed by SIGKILL"), ("gone", "ended with exit code 3")])
def test_a_slot_in_which_every_process_fails_at_once_ends_the_run(how, reason, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.5)
    drill = Drill(tmp_path)  # the first view waits for three
    with pytest.raises(WorkerFailed, match=f"worker 1 failed: {reason}"):
        drill.run("train_unless", 1, how)
    assert [name for name in drill.pids if name.startswith("1")] == ["1", "1.2", "1.3"]


@pytest.mark.parametrize(("how", "said"), [("wrong", "ValueError: the user's own"), ("lost", "worker 1 lost during")])
def test_an_error_that_a_replacement_would_repeat_ends_the_run(how, said, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.5)
    drill = Drill(tmp_path)
    with pytest.raises(WorkerFailed, match=said):
        drill.run("train_unless", 1, how)
    assert set(drill.pids) <= {"0", "1", "2"}


def test_a_worker_that_hangs_after_the_result_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "_FINISH_SECONDS", 0.5)
    assert Drill(tmp_path).run("stay") == [{"name": "0"}, None, None]


def test_ctrl_c_stops_all_and_counts_no_worker_as_failed(tmp_path) -> None:
    drill = Drill(tmp_path, [(together("0", "1", "2"), lambda drill: os.kill(os.getpid(), signal.SIGINT))])
    with pytest.raises(Interrupted) as stopped:
        drill.run()
    assert any(result["stopped"] for result in stopped.value.results if result)
    assert set(drill.pids) == {"0", "1", "2"}


def test_a_coordinator_that_cannot_begin_ends_the_run_with_its_reason(tmp_path) -> None:
    (tmp_path / "state").write_text("no such file" * 100)
    with pytest.raises(UnisonoError, match="file is not a database"):
        Drill(tmp_path).run()


def test_nothing_of_a_run_stays(tmp_path) -> None:
    drill = Drill(tmp_path, [(lambda drill: len(drill.pids) == 3, done)])
    drill.run()
    assert within(5, lambda: not processes(str(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_when_the_launcher_ends(number: signal.Signals, tmp_path) -> None:
    marker = f"toy-{uuid.uuid4().hex}"
    with toy(marker, tmp_path, "", module="tests.support.toy_elastic_launcher") as launcher:
        await_running(launcher)
        roles = ("launcher", "forkserver", "coordinator", "worker 0", "worker 1", "worker 2")
        assert set(processes(marker).values()) == {f"{marker} {role}" for role in roles}
        launcher.send_signal(number)
    assert launcher.returncode == code(number)


def fallen(place: int, at_seconds: float = 0.0) -> Failure:
    return Failure(place, at_seconds, "killed by SIGKILL")


STEP = {"kind": "step"}


def causes(policy: RestartFailed, places: Sequence[int]) -> list[str]:
    """Why the run fails after each of these failures; empty if it continues."""
    found = [policy.worker_failed(fallen(place), 3, 99.0).failure for place in places]
    return ["" if cause is None else cause.error().args[0] for cause in found]


def test_only_failures_without_a_step_between_them_count() -> None:
    policy = RestartFailed(4, NoObserver())
    for _ in range(3):
        assert causes(policy, [1, 1]) == [""] * 2
        policy.on_message(STEP)
    assert causes(policy, [1, 2, 1]) == [""] * 3
    assert causes(policy, [1]) == [
        "worker 1 failed: killed by SIGKILL; 3 processes of worker 1 were lost in a row without a step in between "
        "(the limit is 3)"
    ]


def test_many_failures_in_several_slots_end_a_run_too() -> None:
    found = causes(RestartFailed(4, NoObserver()), [0, 1, 2, 3] * 2)
    assert found[:-1] == [""] * 7
    assert found[-1] == (
        "worker 0 failed: killed by SIGKILL; 8 processes of 4 workers were lost in a row without a step in between "
        "(the limit is 8)"
    )


@pytest.mark.parametrize("kind", [RestartFailed, JoinedLauncher])
def test_steps_count_if_worker_0_belongs_to_another_launcher(kind: type[RestartFailed]) -> None:
    elsewhere = NoObserver()
    policy = kind(4, elsewhere)
    for step in range(9):
        elsewhere.step_count = StepCount(step + 1, step + 1)
        assert causes(policy, [1]) == [""]
    assert [bool(each) for each in causes(policy, [1, 1])] == [False, True]


def test_the_step_count_is_fetched_before_a_run_fails() -> None:
    """The count that it reported last may be some seconds old."""

    class Late(NoObserver):
        def fetch_step_count(self) -> StepCount:
            self.step_count = StepCount(1, 1)
            return self.step_count

    found = causes(RestartFailed(4, Late()), [1] * 6)
    assert [bool(each) for each in found] == [False] * 5 + [True]


def test_steps_that_are_repeated_each_time_do_not_count_forever() -> None:
    """As if each process failed in the same step, and the steps before were repeated."""
    elsewhere = NoObserver()
    policy = RestartFailed(4, elsewhere)
    found = []
    for death in range(14):
        elsewhere.step_count = StepCount(10 * death, 7)
        found += causes(policy, [1])
        policy.on_message(STEP)
    assert found[:9] == [""] * 9
    assert found[9] == (
        "worker 1 failed: killed by SIGKILL; 10 processes of worker 1 were lost in a row with no step beyond step 7 "
        "(the limit is 10)"
    )


@pytest.mark.parametrize("kind", [RestartFailed, JoinedLauncher])
def test_a_replacement_with_another_task_is_refused_and_the_others_continue(kind: type[RestartFailed]) -> None:
    refused = replace(
        fallen(1), original=("TaskMismatch", ["samples", "8", "the run has 9", "give every host the same"])
    )
    policy = kind(2, NoObserver())
    policy.next_name(1)
    assert policy.worker_failed(refused, 1, 1.0).failure is refused, "one of the first"
    policy.next_name(1)
    found = policy.worker_failed(refused, 1, 1.0)
    assert found.notice.startswith(
        "worker 1.2 cannot take part, 1 worker continues without it: samples = 8: the run has 9"
    )
    assert found.failure is None
    assert found.restart_in_seconds is None
    assert policy.worker_failed(refused, 0, 1.0).failure is refused, "no other worker is left"


def test_a_launcher_that_joined_is_never_incomplete() -> None:
    assert JoinedLauncher(4, NoObserver()).incomplete_reason([None]) == ""


def test_the_restart_interval_grows_for_processes_that_fail_at_once() -> None:
    others = NoObserver()
    policy = RestartFailed(4, others)
    pauses = []
    for step in range(9):
        pauses.append(policy.worker_failed(fallen(1), 3, 0.0).restart_in_seconds)
        others.step_count = StepCount(step + 1, step + 1)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    for step in range(9, 1200):  # as often as it may be in a run of days
        assert policy.worker_failed(fallen(1), 3, 0.0).restart_in_seconds == 60
        others.step_count = StepCount(step + 1, step + 1)
    assert policy.worker_failed(fallen(1), 3, 99.0).restart_in_seconds == 0


def test_the_lifetime_of_a_process_counts_towards_the_restart_interval() -> None:
    """What counts is how often the others are held up."""
    policy = RestartFailed(4, NoObserver())
    pauses = []
    for _ in range(6):
        pauses.append(policy.worker_failed(fallen(1), 3, 7.0).restart_in_seconds)
        policy.on_message(STEP)
    assert pauses == [0, 0, 0, 0, 1, 9]

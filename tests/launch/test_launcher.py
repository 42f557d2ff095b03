"""The launcher with real workers: results, failures, names, logs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import leftovers
from tests.support.leftovers import within
from unisono.errors import InvalidInput, WorkerFailed
from unisono.launch import PRELOAD, LaunchOptions, ScriptExited, launch, start_fork_server
from unisono.launch.supervisor import OnMessage

HERE = "tests.support.launch_targets"


def start(
    target: str, tmp_path: Path, *arguments: Any, workers: int = 3, on_message: OnMessage | None = None, **options: Any
) -> list[Any]:
    chosen = LaunchOptions(**({"logs": tmp_path, "workers": workers, "preload": ()} | options))
    return launch(f"{HERE}:{target}", arguments, chosen, on_message=on_message or (lambda rank, message: None))


def test_results_come_in_the_order_of_ranks(tmp_path: Path) -> None:
    heard: list[tuple[int, Any]] = []
    results = start("answer", tmp_path, "x", 2, on_message=lambda rank, message: heard.append((rank, message)))
    assert [result[:2] + result[3:] for result in results] == [[rank, 3, "x", 2] for rank in range(3)]
    assert len({result[2] for result in results}) == 1
    assert sorted(heard, key=lambda item: item[0]) == [(rank, {"rank": rank}) for rank in range(3)]


def test_what_the_main_script_defines_travels_by_value(tmp_path: Path) -> None:
    results = start("call", tmp_path, lambda rank: rank * 10)
    assert results == [0, 10, 20]


def test_each_worker_has_its_name_place_and_threads(tmp_path: Path) -> None:
    found = start("environment", tmp_path, workers=2, threads=3, name="toy")
    for rank, worker in enumerate(found):
        assert worker["title"] == f"toy worker {rank}"
        assert [worker[f"UNISONO_{name}"] for name in ("RANK", "SIZE")] == [str(rank), "2"]
        assert [worker[f"UNISONO_LOCAL_{name}"] for name in ("RANK", "SIZE")] == [str(rank), "2"]
        assert worker["OMP_NUM_THREADS"] == "3"
        assert worker["interrupt ignored"]
        assert not worker["torch"]
        assert worker["mode"] == 0o700
        assert not Path(worker["directory"]).exists()


def test_logs_are_private_and_hold_what_was_printed(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    start("answer", tmp_path, logs=logs)
    for rank in range(3):
        log = logs / f"worker-{rank}.log"
        assert log.read_text() == f"printed by {rank}\ncomplained by {rank}\n"
        assert log.stat().st_mode & 0o777 == 0o600


def test_a_killed_worker_leaves_no_semaphore(tmp_path: Path) -> None:
    names: list[str] = []
    with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
        start("with_semaphore", tmp_path, workers=1, on_message=lambda rank, message: names.append(message["name"]))
    (name,) = names
    assert within(5, lambda: not Path("/dev/shm", f"sem.{name.removeprefix('/')}").exists())


def test_a_failure_ends_the_others_and_comes_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        start("fail_at", tmp_path, 1)
    assert (caught.value.rank, caught.value.reason) == (1, "ValueError: the cause")
    lines = caught.value.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "targets.py" in lines[1]
    assert lines[-1] == "ValueError: the cause"
    assert (tmp_path / "worker-1.log").read_text().endswith("ValueError: the cause\n")
    assert (tmp_path / "worker-0.log").read_text() == ""


def test_a_cause_is_reported_although_its_consequence_arrived_before(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        start("fail_as_consequence", tmp_path, workers=2)
    assert (caught.value.rank, caught.value.reason) == (1, "killed by SIGKILL (out of memory?)")


def test_a_consequence_without_a_cause_is_reported_and_workers_that_do_not_stop_are_killed(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        start("only_lose_peers", tmp_path, workers=2)
    assert caught.value.rank == 0
    assert caught.value.reason.endswith("PeerLost: worker 1 lost during sum: silent")


@pytest.mark.short(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_named_with_its_signal(number: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=f"worker 1 failed: killed by {number.name}"):
        start("die", tmp_path, int(number), workers=2)
    if number is signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in (tmp_path / "worker-1.log").read_text()


def test_invalid_input_comes_through_as_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        start("refuse", tmp_path)
    assert str(caught.value) == str(InvalidInput("steps", 3, "too few", "use 4 or more"))


@pytest.mark.parametrize(("target", "said"), [("vanish", "without a result"), ("unspeakable", "TypeError")])
def test_a_worker_must_return_a_result(target: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=said):
        start(target, tmp_path, workers=1)


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), ("no", 1)])
def test_sys_exit_gives_the_exit_code(code: Any, exit_code: int, tmp_path: Path) -> None:
    with pytest.raises(ScriptExited) as caught:
        start("leave", tmp_path, code, workers=1)
    assert caught.value.exit_code == exit_code


@pytest.mark.parametrize("code", [0, None])
def test_sys_exit_without_a_code_is_no_failure(code: Any, tmp_path: Path) -> None:
    assert start("leave", tmp_path, code, workers=2) == [None, None]


def test_an_unknown_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="no_such_function"):
        start("no_such_function", tmp_path, workers=1)


def test_a_launch_from_another_thread_works_too(tmp_path: Path) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(start("answer", tmp_path, workers=1)))
    thread.start()
    thread.join(30)
    assert len(results) == 1


def test_a_prepared_forkserver_that_is_not_used_leaves_nothing() -> None:
    with start_fork_server(("json",), name="prepared-only"):
        assert within(10, lambda: bool(leftovers.processes("prepared-only")))
    assert not leftovers.processes("prepared-only")


def test_torch_is_imported_before_the_workers_are(tmp_path: Path) -> None:
    found = start("environment", tmp_path, workers=1, preload=PRELOAD)
    assert found[0]["torch"]

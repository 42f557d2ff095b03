"""Runs that lose several workers in quick succession, and the checks of their results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.lost_workers.killing_launcher import Plan, steps
from tests.campaigns.lost_workers.tasks import BATCH, SAMPLES, STEPS
from tests.support.checkpoints import load_newest
from tests.support.layout_runs import ROOT
from tests.support.leftovers import session
from unisono.launch.restart_policy import AFTER_LOOP, BEFORE_LOOP, WITHOUT_STEP

HERE = Path(__file__).parent
STILL_SECONDS = 200.0  # without a step, also on a busy machine: the run waits for something
CLOSE = 2e-5  # of losses around 3, as other replicas sum in another order


@dataclass(frozen=True)
class Kind:
    """What is trained, and how.

    Args:
        words: of the command, for a run in the directory `run`, whose raid ends with a file `over`.
        judge: what is wrong with the run in that directory; empty if nothing is.
        beside: an undisturbed run, see `calm`, is to be there to compare it with.
    """

    words: Callable[[Path, Path], list[str]]
    judge: Callable[[Path], str]
    beside: bool


def trains(task: str, workers: int, judge: Callable[[Path], str], *more: str) -> Kind:
    """``unisono train``."""

    def words(run: Path, over: Path) -> list[str]:
        return ["train", f"{HERE}/tasks.py:{task}", "--over", str(over), "--workers", str(workers),
                "--threads", "1", "--record-seconds", "0", "--run-dir", str(run), *more]  # fmt: skip

    return Kind(words, judge, judge in (same_losses, same_bits))


def loops(sync: str, judge: Callable[[Path], str]) -> Kind:
    """``unisono launch``."""

    def words(run: Path, over: Path) -> list[str]:
        script = [f"{HERE}/loop.py", str(run), str(over), sync]
        return ["launch", "--workers", "3", "--run-dir", str(run), *script]

    return Kind(words, judge, False)


def losses(run: Path) -> dict[int, float]:
    """Of each step that is on record; of one that was taken again, the last."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def same_losses(run: Path) -> str:
    """As those of an undisturbed run, but for the last digits."""
    found, whole = losses(run), losses(calm(run))
    differ = max(abs(found[step] - whole[step]) for step in found.keys() & whole.keys())
    if STEPS not in found or differ > CLOSE:
        return f"the losses of {len(found)} steps differ by up to {differ:.3g} from those of an undisturbed run"
    return ""


def same_bits(run: Path) -> str:
    """The weights and the last loss are those of an undisturbed run."""
    found, whole = (json.loads((each / "summary.json").read_text()) for each in (run, calm(run)))
    differ = [name for name in ("steps", "weights_sha256", "loss") if found[name] != whole[name]]
    return f"{', '.join(differ)} differ from those of an undisturbed run" if differ else ""


def counts(run: Path) -> str:
    """Each sample was learned from once in each epoch."""
    told = [json.loads(each.read_text()) for each in run.glob("told-*.json")]
    if told:  # of a loop
        seen = [each["seen"] for each in told]
    else:
        loaded = load_newest(run / "checkpoints", lambda error: None)
        if loaded is None or loaded.step != STEPS:
            return "there is no checkpoint of the last step"
        seen = [loaded.tensors["model/seen"].tolist()]
    wrong = {round(number, 3) for each in seen for number in each if abs(number - STEPS * BATCH / SAMPLES) > 1e-3}
    return f"samples count {sorted(wrong)} times and not {STEPS * BATCH / SAMPLES:g}" if wrong else ""


def all_steps(run: Path) -> str:
    """They were taken, where what comes of them depends on who was there."""
    taken = json.loads((run / "summary.json").read_text())["steps"]
    return "" if taken == STEPS else f"{taken} steps were taken"


def calm(run: Path) -> Path:
    """An undisturbed run beside `run`."""
    return run.with_name("calm")


KINDS = {
    "shard": trains("gpt", 4, same_losses, "--layout", "Layout(shard=2)"),
    "shard, all of them": trains("gpt", 4, same_bits, "--layout", "Layout(shard=2)", "--min-workers", "4"),
    "shard, tensor": trains("gpt", 4, same_bits, "--layout", "Layout(shard=2,tensor=2)"),
    "tensor": trains("gpt", 4, same_losses, "--layout", "Layout(tensor=2)"),
    "pipeline": trains("gpt", 4, same_losses, "--layout", "Layout(pipeline=2)", "--checkpoint-every", "10"),
    "shard, DiLoCo": trains("gpt", 4, all_steps, "--layout", "Layout(shard=2)", "--sync", "DiLoCo(every=4)"),
    "AllReduce": trains("gpt", 3, same_bits, "--compress", "Exact()"),
    "LocalSGD": trains("tally", 3, counts, "--sync", "LocalSGD(every=4)"),
    "BlockMomentum": trains("tally", 3, counts, "--sync", "BlockMomentum(every=8,momentum=0)"),
    "DiLoCo": trains("tally", 3, counts, "--sync", "DiLoCo(every=6,outer=Average())"),
    "Gossip": trains("tally", 3, all_steps, "--sync", "Gossip(synchronize_every=4)"),
    "Gossip, asynchronous": trains("tally", 3, all_steps, "--sync", "Gossip(asynchronous=True,synchronize_every=4)"),
    "loop, AllReduce": loops("AllReduce()", counts),
    "loop, LocalSGD": loops("LocalSGD(every=4)", counts),
}


@dataclass(frozen=True)
class Came:
    """What came of one run.

    Args:
        wrong: empty if nothing is.
        given_up: it was given up, and said why.
        strikes: who was killed, and after which step.
    """

    wrong: str
    given_up: bool
    strikes: Sequence[Any]
    seconds: float


def trial(kind: Kind, seed: int, directory: Path, kills: int, heirs: float) -> Came:
    """One run that a raid befalls; ``calm`` in `directory` is the undisturbed one, which is made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    if kind.beside and not calm(directory / "run").exists():
        code, said, _ = conduct(kind, calm(directory / "run"), directory / "in-peace", None)
        assert code == 0, said
    here = directory / f"seed-{seed}"
    here.mkdir()
    run = here.with_name(f"run-{seed}")
    plan = Plan.draw(seed, run, here / "over", kills, heirs)
    code, said, seconds = conduct(kind, run, here, plan)
    struck = here / "strikes.jsonl"
    strikes = [json.loads(line) for line in struck.read_text().splitlines()] if struck.exists() else []
    wrong = kind.judge(run) if code == 0 else ended_early(code, said.splitlines()[-1], strikes)
    return Came(wrong, code == 1 and not wrong, strikes, seconds)


def ended_early(code: int, last: str, strikes: Sequence[Any]) -> str:
    """What is wrong with a run that did not come to its end, by its `last` words; nothing, if they are a reason."""
    if code < 0:
        return "it stood still"
    limit = re.search(rf"; (\d+) processes of (?:worker (\d+)|\d+ workers) were lost in a row {WITHOUT_STEP}", last)
    if limit is None:
        told = any(words in last for words in (BEFORE_LOOP, AFTER_LOOP))
        return "" if told else f"it ended with {code}: {last}"
    places = [each["worker"].partition(".")[0] for each in strikes]
    row = [each["taken"] for place, each in zip(places, strikes) if limit[2] in (None, place)][-int(limit[1]) :]
    return "it was given up, though there was a step" if row[-1] > row[0] else ""


def conduct(kind: Kind, run: Path, here: Path, plan: Plan | None) -> tuple[int, str, float]:
    """The exit code, what was said, and the seconds that it took; a run that stands still is ended, and each worker's
    log has the lines at which it was."""
    here.mkdir(parents=True, exist_ok=True)
    words = kind.words(run, here / "over")
    if plan is None:
        (here / "over").touch()
    line = [
        sys.executable,
        "-m",
        *(["unisono"] if plan is None else ["tests.campaigns.lost_workers.killing_launcher", plan.write()]),
        *words,
    ]
    log, began = here / "said", time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    with log.open("w") as file:
        process = subprocess.Popen(
            line, cwd=ROOT, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        _until_over(process, run)
    finally:
        _end(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, log.read_text(), time.monotonic() - began


def _until_over(process: subprocess.Popen[bytes], run: Path) -> None:
    taken, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        if len(steps(run)) != taken:
            taken, since = len(steps(run)), time.monotonic()
        if time.monotonic() - since > STILL_SECONDS:
            workers = [pid for pid, name in session(process.pid).items() if "worker" in name]
            os.kill(process.pid, signal.SIGSTOP)  # replaces nobody
            for pid in workers:
                os.kill(pid, signal.SIGABRT)  # who writes down where it is
            time.sleep(1.0)
            return


def _end(leader: int, number: signal.Signals) -> None:
    for pid in session(leader):
        os.kill(pid, number)

"""``unisono chaos TASK``: a training under faults beside one without, and whether they come to the same."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.chaos.fault_schedule import FaultKind
from unisono.cli.argument_words import whole
from unisono.cli.request import Request, request
from unisono.cli.task_help import task_options
from unisono.cli.train_options import given
from unisono.errors import InvalidInput, UnisonoError

if TYPE_CHECKING:
    from rich.console import Console

    from unisono.chaos.outcome import RunOutcome
    from unisono.chaos.trial import Ground, Trial

USAGE = """\
usage: unisono chaos TASK [options] [options of unisono train] [options of TASK]

Train TASK twice: once in peace, and once while workers are killed, frozen, cut off and started, at moments that a seed
decides; some while a checkpoint is written, or while state is handed over. Then compare: steps, samples, the loss of
every step, metrics and weights. With Exact(), which is the default here, all of it has to be equal to the bit.
The exit code is 0 where it is, and 1 where it is not.

what befalls the run
  --kill N           SIGKILL to a worker; another one takes its place [3]
  --freeze N         SIGSTOP to a worker, and SIGCONT after a while [1]
  --partition N      a worker's network link is cut for a while; needs root and the command ip, and is left out without
                     them [1]
  --join N           further workers are started (unisono join) [2]
  --drain N          SIGTERM to a worker: it leaves after the step in hand [1]
  --coordinator N    SIGKILL to the coordinator [1]

how it is tried
  --seed N           of all that befalls the run; that of the training is --set seed=N [0]
  --seeds N          try so many seeds, from --seed on [1]
  --virtual          on made-up processes, network and clock, in this process: the trainer and the protocol are the
                     real ones, and a seed gives the same to the bit again. A second for a small run
  --json FILE        write what happened and what was compared there
  --run-dir DIR      keep the runs in DIR; else they are kept only where something differs

4 workers, unless you say otherwise, and a checkpoint each 10 steps. A process takes seconds to start: take so many
--steps that an undisturbed run lasts 20 s or more, and a --micro-batch small enough for those who join (each worker of
a step computes one at least). --virtual needs 30 steps or so.

for instance:
  unisono chaos digits --virtual --steps 40 --micro-batch 8 --seeds 20
  unisono chaos digits --steps 1500 --micro-batch 8 --kill 2 --freeze 1 --join 1 --seed 7
"""
_FAULTS = {
    FaultKind.KILL: 3,
    FaultKind.FREEZE: 1,
    FaultKind.PARTITION: 1,
    FaultKind.JOIN: 2,
    FaultKind.DRAIN: 1,
    FaultKind.COORDINATOR: 1,
}
_NUMBERS = {f"--{kind.value}": count for kind, count in _FAULTS.items()} | {"--seed": 0, "--seeds": 1}


@dataclass(frozen=True)
class ChaosRequest:
    """What is to be tried, as the user wrote it.

    Args:
        words: after ``unisono chaos``.
        request: as of ``unisono train``.
        wanted: faults of each kind.
    """

    words: Sequence[str]
    request: Request
    wanted: Mapping[FaultKind, int]
    seeds: range
    virtual: bool

    def again(self, seed: int) -> str:
        """The command that tries one seed again."""
        rest, _, _ = _own(self.words, {"--seed", "--seeds"})
        return shlex.join(["unisono", "chaos", *rest, "--seed", str(seed)])


def chaos(words: list[str]) -> int:
    """Run the words after ``unisono chaos``; 0 where faults changed nothing, 1 where they did.

    Raises:
        UnisonoError: what was written cannot work, or the undisturbed run failed.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    asked = read(words)
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    with _kept(asked.request.settings.get("run_dir")) as (directory, keep):
        found: list[Trial] = []
        for trial in _tried(asked, directory, console):
            found.append(trial)
            if asked.request.json:  # many seeds take long, and something is better than nothing
                _write(asked.request.json, found)
        wrong = [trial for trial in found if trial.differences]
        if wrong and not asked.virtual:
            keep()
            console.print(f"the runs lie in {directory}", markup=False)
    if len(found) > 1:
        count = f"{len(found) - len(wrong)} of {len(found)} seeds came to the same as the undisturbed run"
        console.print(count, style="red" if wrong else "green")
    for trial in wrong if len(found) > 1 else ():
        console.print(f"  {asked.again(trial.schedule.seed)}", markup=False)
    return 1 if wrong else 0


def read(words: Sequence[str]) -> ChaosRequest:
    """Our own options, and the rest as ``unisono train`` reads it.

    Raises:
        InvalidInput: an option of ours without a number; whatever ``unisono train`` refuses.
    """
    rest, numbers, virtual = _own(words, set(_NUMBERS) | {"--virtual"})
    counts = {name: whole(name, numbers.get(name, str(count)), 0) for name, count in _NUMBERS.items()}
    made = request(given(rest))
    if made.calling is not None:
        raise InvalidInput("chaos", made.source.name, "its coordinator is one of its own", "leave out where it is")
    seeds = range(counts["--seed"], counts["--seed"] + counts["--seeds"])
    if not seeds:
        raise InvalidInput("--seeds", 0, "nothing is tried", "use 1 or more")
    return ChaosRequest(words, made, {kind: counts[f"--{kind.value}"] for kind in FaultKind}, seeds, virtual)


def _own(words: Sequence[str], ours: set[str]) -> tuple[list[str], dict[str, str], bool]:
    """All other words, our own options with their numbers, and whether ``--virtual`` is among them."""
    rest, numbers, left, virtual = list[str](), dict[str, str](), list(words), False
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name not in ours:
            rest.append(word)
        elif name == "--virtual":
            virtual = True
        elif not equals and not left:
            raise InvalidInput(name, "(nothing)", "a number is missing", f"write {name} 1")
        else:
            numbers[name] = value if equals else left.pop(0)
    return rest, numbers, virtual


def _tried(asked: ChaosRequest, directory: Path, console: Console) -> Iterator[Trial]:
    from unisono.chaos.trial import NO_FAULTS, dependence, settings_of, trials  # imports torch
    from unisono.config import FIELDS

    wanted = {**asked.wanted, FaultKind.PARTITION: _cuts(asked, console)}
    task = asked.request.source.load(FIELDS)
    settings = {name: value for name, value in asked.request.settings.items() if name != "run_dir"}
    settings = settings_of(task, settings, wanted)
    ground = _ground(asked, task, settings, directory)
    with console.status("training in peace"):
        undisturbed = ground.run("undisturbed", NO_FAULTS, None, [])
    console.print(_heading(asked, settings, undisturbed), style="bold", markup=False)
    if why := dependence(task, settings):
        console.print(why, style="yellow", markup=False)
    for seed in asked.seeds:
        with console.status(f"training under the faults of seed {seed}"):
            (trial,) = trials(ground, undisturbed, [seed], wanted)
        _print(asked, trial, console)
        yield trial


def _ground(asked: ChaosRequest, task: Any, settings: Mapping[str, Any], directory: Path) -> Ground:
    from unisono.chaos.process_ground import ProcessGround
    from unisono.chaos.virtual_ground import VirtualGround

    return (
        VirtualGround.of(task, settings) if asked.virtual else ProcessGround(asked.request.source, settings, directory)
    )


def _cuts(asked: ChaosRequest, console: Console) -> int:
    """How many links can be cut of those that were to be."""
    from unisono.chaos.network_namespace import unavailable

    cuts = asked.wanted[FaultKind.PARTITION]
    why = "" if asked.virtual or not cuts else unavailable()
    if why:
        console.print(f"no link is cut: {why}", style="yellow", markup=False)
    return 0 if why else cuts


def _heading(asked: ChaosRequest, settings: Mapping[str, Any], undisturbed: RunOutcome) -> str:
    where = "made-up processes" if asked.virtual else "processes"
    took = f", {undisturbed.seconds:.1f} s" if undisturbed.seconds else ""
    return (
        f"{asked.request.source.name} on {settings['workers']} {where}, undisturbed: {undisturbed.steps:,} steps{took}"
    )


def _print(asked: ChaosRequest, trial: Trial, console: Console) -> None:
    """One seed: all of it, or a line where there are many."""
    from unisono.chaos.report import show

    equal = not trial.differences
    if len(asked.seeds) == 1:
        show(trial, console)
    console.print(f"seed {trial.schedule.seed}: ", end="")
    console.print("equal" if equal else "DIFFERENT", style="green" if equal else "red", end="")
    missing = len(trial.schedule.faults) - len(trial.injected)
    left_out = f", {missing} more found no moment: take more --steps" if missing else ""
    console.print(f" after {len(trial.injected)} faults{left_out}", markup=False)
    for words in trial.differences:
        console.print(f"  {words}", markup=False)
    if not equal:
        console.print(f"  again: {asked.again(trial.schedule.seed)}", markup=False)


@contextlib.contextmanager
def _kept(run: str | None) -> Iterator[tuple[Path, Any]]:
    """A directory for the runs, and what keeps it, which is gone afterwards otherwise."""
    if run:
        path = Path(run).absolute()
        if path.exists():
            raise InvalidInput("run_dir", run, "the directory exists", "name another")
        path.mkdir(parents=True, mode=0o700)
        try:
            yield path, lambda: None
        finally:
            with contextlib.suppress(OSError):  # there are runs in it
                path.rmdir()
        return
    path, kept = Path(tempfile.mkdtemp(prefix="unisono-chaos-")), list[bool]()
    try:
        yield path, lambda: kept.append(True)
    finally:
        if not kept:
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, found: Sequence[Trial]) -> None:
    from unisono.chaos.report import trial_mapping
    from unisono.observe import write_summary

    try:
        write_summary(path, {"seeds": [trial_mapping(trial) for trial in found]})
    except OSError as error:
        raise UnisonoError(f"what was found was not written to {path}: {error.strerror}") from error


def _help(words: Sequence[str]) -> int:
    rest, _, _ = _own([word for word in words if word not in ("--help", "-h")], set(_NUMBERS) | {"--virtual"})
    task = given(rest).task
    print(USAGE + (f"\n{task_options(task)}\n" if task else ""), end="")
    return 0

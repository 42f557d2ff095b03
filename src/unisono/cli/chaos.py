"""``unisono chaos TASK``: trains with and without faults, and compares the results."""

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
from unisono.cli.argument_words import Others, read_options, whole_number
from unisono.cli.merged_options import TrainRequest, build_request
from unisono.cli.task_help import task_options
from unisono.cli.train_options import parse_arguments
from unisono.errors import InvalidInput, UnisonoError

if TYPE_CHECKING:
    from rich.console import Console

    from unisono.chaos.outcome import RunOutcome
    from unisono.chaos.trial import Ground, Trial

USAGE = """\
usage: unisono chaos TASK [options] [options of unisono train] [options of TASK]

Train TASK twice: once without faults (the baseline), and once while workers are killed, frozen, disconnected and
started. A seed decides the moments; some are during a checkpoint or a state transfer. Then compare steps, samples, the
loss of every step, metrics and weights. With Exact(), the default here, all of them have to be equal to the bit.
The exit code is 0 if they are, and 1 if they are not.

faults
  --kill N           kill a worker (SIGKILL); a replacement is started [3]
  --freeze N         freeze a worker (SIGSTOP), and thaw it after a while (SIGCONT) [1]
  --partition N      cut a worker's network link for a while; needs root and the command ip, left out without them [1]
  --join N           start further workers (unisono join) [2]
  --drain N          ask a worker to leave (SIGTERM); it leaves after the current step [1]
  --coordinator N    kill the coordinator (SIGKILL) [1]

trials
  --seed N           seed of the faults; the seed of the training is --set seed=N [0]
  --seeds N          try this number of seeds, from --seed on [1]
  --virtual          simulate processes, network and clock in this process, with the real trainer and protocol. A seed
                     then reproduces a trial to the bit, and a small run takes a second
  --json FILE        write the faults and the comparison to this file
  --run-dir DIR      keep the runs in DIR [kept only if a result differs]

Defaults are 4 workers, and a checkpoint every 10 steps. A process takes seconds to start: choose enough --steps for a
baseline of 20 s or more (30 steps with --virtual), and a --micro-batch small enough that every worker that joins gets
one.

examples:
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
_TABLE: dict[str, str | None] = {**dict.fromkeys(_NUMBERS, "N"), "--virtual": None}


@dataclass(frozen=True)
class ChaosRequest:
    """What the command was asked to try.

    Args:
        words: the arguments of ``unisono chaos``.
        request: what to train, as ``unisono train`` reads it.
        wanted: the number of faults of each kind.
        seeds: the seeds to try.
        virtual: whether processes and network are simulated.
    """

    words: Sequence[str]
    request: TrainRequest
    wanted: Mapping[FaultKind, int]
    seeds: range
    virtual: bool

    def command(self, seed: int) -> str:
        """The command that tries `seed` again."""
        _, rest = read_options(self.words, {"--seed": "N", "--seeds": "N"}, others=Others.KEEP)
        return shlex.join(["unisono", "chaos", *rest, "--seed", str(seed)])


def chaos(words: list[str]) -> int:
    """Run ``unisono chaos`` with the arguments `words`; 0 if all results are equal, 1 if any differs.

    Raises:
        UnisonoError: the arguments are invalid, or the baseline failed.
    """
    if "--help" in words or "-h" in words:
        return _help(words)
    asked = read_request(words)
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    with _run_directory(asked.request.settings.get("run_dir")) as (directory, keep):
        tried: list[Trial] = []
        for trial in _trials(asked, directory, console):
            tried.append(trial)
            if asked.request.json:  # after each seed, since all of them may take hours
                _write(asked.request.json, tried)
        failed = [trial for trial in tried if trial.differences]
        if failed and not asked.virtual:
            keep()
            console.print(f"the run directories are in {directory}", markup=False)
    if len(tried) > 1:
        count = f"{len(tried) - len(failed)} of {len(tried)} seeds gave the result of the baseline"
        console.print(count, style="red" if failed else "green")
    for trial in failed if len(tried) > 1 else ():
        console.print(f"  {asked.command(trial.schedule.seed)}", markup=False)
    return 1 if failed else 0


def read_request(words: Sequence[str]) -> ChaosRequest:
    """Read the command's own options, and the others as ``unisono train`` does.

    Raises:
        InvalidInput: an option has no number, or ``unisono train`` would refuse the arguments.
    """
    options, rest = read_options(words, _TABLE, others=Others.KEEP)
    counts = {name: whole_number(name, options.get(name, str(count)), 0) for name, count in _NUMBERS.items()}
    request = build_request(parse_arguments(rest))
    if request.coordinator is not None:
        problem = "unisono chaos starts a coordinator of its own for each run"
        raise InvalidInput("chaos", request.source.name, problem, "leave out the options about the coordinator")
    seeds = range(counts["--seed"], counts["--seed"] + counts["--seeds"])
    if not seeds:
        raise InvalidInput("--seeds", 0, "no seed is tried", "use 1 or more")
    wanted = {kind: counts[f"--{kind.value}"] for kind in FaultKind}
    return ChaosRequest(words, request, wanted, seeds, "--virtual" in options)


def _trials(asked: ChaosRequest, directory: Path, console: Console) -> Iterator[Trial]:
    from unisono.chaos.trial import NO_FAULTS, dependence, settings_of, trials  # imports torch
    from unisono.config import FIELDS

    wanted = {**asked.wanted, FaultKind.PARTITION: _possible_partitions(asked, console)}
    task = asked.request.source.load(FIELDS)
    settings = {name: value for name, value in asked.request.settings.items() if name != "run_dir"}
    settings = settings_of(task, settings, wanted)
    ground = _ground(asked, task, settings, directory)
    with console.status("training without faults"):
        baseline = ground.run("baseline", NO_FAULTS, None, [])
    console.print(_heading(asked, settings, baseline), style="bold", markup=False)
    if why := dependence(task, settings):
        console.print(why, style="yellow", markup=False)
    for seed in asked.seeds:
        with console.status(f"training with the faults of seed {seed}"):
            (trial,) = trials(ground, baseline, [seed], wanted)
        _print(asked, trial, console)
        yield trial


def _ground(asked: ChaosRequest, task: Any, settings: Mapping[str, Any], directory: Path) -> Ground:
    from unisono.chaos.process_ground import ProcessGround
    from unisono.chaos.virtual_ground import VirtualGround

    return (
        VirtualGround.of(task, settings) if asked.virtual else ProcessGround(asked.request.source, settings, directory)
    )


def _possible_partitions(asked: ChaosRequest, console: Console) -> int:
    """The number of partitions that are wanted; 0 if this host cannot cut links."""
    from unisono.chaos.network_namespace import unavailable

    wanted = asked.wanted[FaultKind.PARTITION]
    why = "" if asked.virtual or not wanted else unavailable()
    if why:
        console.print(f"no link is cut: {why}", style="yellow", markup=False)
    return 0 if why else wanted


def _heading(asked: ChaosRequest, settings: Mapping[str, Any], baseline: RunOutcome) -> str:
    processes = "virtual workers" if asked.virtual else "workers"
    duration = f", {baseline.seconds:.1f} s" if baseline.seconds else ""
    run = f"{asked.request.source.name} on {settings['workers']} {processes}"
    return f"{run}, baseline: {baseline.steps:,} steps{duration}"


def _print(asked: ChaosRequest, trial: Trial, console: Console) -> None:
    """Print the result of one seed; the faults as well if it is the only one."""
    from unisono.chaos.report import show

    equal = not trial.differences
    if len(asked.seeds) == 1:
        show(trial, console)
    console.print(f"seed {trial.schedule.seed}: ", end="")
    console.print("equal" if equal else "DIFFERENT", style="green" if equal else "red", end="")
    missing = len(trial.schedule.faults) - len(trial.injected)
    left_out = f"; the run was too short for {missing} more faults: use more --steps" if missing else ""
    console.print(f" after {len(trial.injected)} faults{left_out}", markup=False)
    for difference in trial.differences:
        console.print(f"  {difference}", markup=False)
    if not equal:
        console.print(f"  reproduce with: {asked.command(trial.schedule.seed)}", markup=False)


@contextlib.contextmanager
def _run_directory(run: str | None) -> Iterator[tuple[Path, Any]]:
    """A context with a directory for the runs, and a function to call so that it is not removed at the end."""
    if run:
        path = Path(run).absolute()
        if path.exists():
            raise InvalidInput("run_dir", run, "the directory exists", "name another directory")
        path.mkdir(parents=True, mode=0o700)
        try:
            yield path, lambda: None
        finally:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()
        return
    path, keep = Path(tempfile.mkdtemp(prefix="unisono-chaos-")), list[bool]()
    try:
        yield path, lambda: keep.append(True)
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, tried: Sequence[Trial]) -> None:
    from unisono.chaos.report import trial_mapping
    from unisono.observe import write_summary

    try:
        write_summary(path, {"seeds": [trial_mapping(trial) for trial in tried]})
    except OSError as error:
        raise UnisonoError(f"the comparison was not written to {path}: {error.strerror}") from error


def _help(words: Sequence[str]) -> int:
    _, rest = read_options([word for word in words if word not in ("--help", "-h")], _TABLE, others=Others.KEEP)
    task = parse_arguments(rest).task
    print(USAGE + (f"\n{task_options(task)}\n" if task else ""), end="")
    return 0

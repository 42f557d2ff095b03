"""``unisono launch SCRIPT``: a script with a training loop of its own, on several workers of this host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.cli.argument_words import unknown, whole
from unisono.cli.coordinator_options import OPTIONS as CALLING
from unisono.cli.coordinator_options import calling
from unisono.errors import InvalidInput
from unisono.launch import PRELOAD as LAUNCHER_PRELOAD
from unisono.launch import ElasticOptions, ForkServer, LaunchOptions, launch_script, start_fork_server
from unisono.launch.coordinator_setup import coordinator_for
from unisono.launch.limit import check_worker_count
from unisono.launch.lock import Holder, hold_lock, make_unique_directory
from unisono.membership import Policy
from unisono.membership.contact_file import not_writable, remove_contact
from unisono.membership.endpoint import CoordinatorOptions
from unisono.system.process import age_seconds

PRELOAD = (*LAUNCHER_PRELOAD, "unisono.world")

USAGE = """\
usage: unisono launch [options] SCRIPT.py [arguments of the script …]

Run SCRIPT.py on N workers of this host. In it, unisono.join() is all that a worker needs to find the others.
What worker 0 prints is shown; what each prints is kept in DIR/logs/worker-<number>.log. In the loop of world.steps
workers may join and leave, and one that dies is replaced. RANK, WORLD_SIZE, MASTER_PORT and the others of torchrun are
set, so that a script that calls torch.distributed.init_process_group() runs too; a worker that replaces another has its
RANK.

  --workers N            processes to start; 2:4 goes on with 2 at least, and others may join up to 4 [1]
  --run-dir DIR          the run's directory [runs/<script>-<date>]
  --logs DIR             where the logs go [DIR/logs]
  --no-elastic           a worker that is lost ends the run
  --debug RANK           the worker that reads from this terminal, and whose breakpoint() has it [one that is alone]
  --listen HOST[:PORT]   have workers of other hosts join (unisono join); this, --coordinator and what belongs to them
                         are as in unisono train --help
"""
_STOP_SECONDS = 10.0
_VALUES = ("--workers", "--run-dir", "--logs", "--debug", *CALLING)


@dataclass(frozen=True)
class Launch:
    """What is to be run.

    Args:
        script: the file.
        arguments: what follows it, handed on untouched.
        workers: processes.
        logs: directory for the workers' output.
        run: directory for all else; one that the user does not name gets another name where that is taken.
        min_workers, max_workers: workers, if some come and go; None: as many as there are processes.
        elastic: whether they may.
        calling: where they find their coordinator, if that is said.
        debug: the worker that has the terminal, if that is said.
    """

    script: Path
    arguments: tuple[str, ...]
    workers: int
    logs: Path
    run: Path
    min_workers: int = 1
    max_workers: int | None = None
    elastic: bool = True
    calling: CoordinatorOptions | None = None
    named: bool = True
    debug: int | None = None

    @property
    def largest(self) -> int:
        """Workers that may be there at a time."""
        return self.workers if self.max_workers is None else self.max_workers


def launch(words: list[str]) -> int:
    """Run the words after ``unisono launch``; 0 when every worker has come to its end.

    Raises:
        UnisonoError: what was written cannot work, or a worker failed.
    """
    if words[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    asked = read(words)

    began, told = time.time() - age_seconds(), Notices()
    with ExitStack() as stack:
        server = stack.enter_context(start_fork_server(PRELOAD))
        asked = stack.enter_context(_locked(asked))
        elastic = stack.enter_context(_may_come_and_go(asked, server, told.say, began))
        launch_script(
            asked.script,
            asked.arguments,
            LaunchOptions(
                asked.logs,
                asked.workers,
                threads=max(1, len(os.sched_getaffinity(0)) // asked.workers),
                echo=sys.stdout.buffer,
                stop_seconds=_STOP_SECONDS,
                debug_rank=asked.debug,
            ),
            fork_server=server,
            on_message=told,
            elastic=elastic,
        )
    return 0


class Notices:
    """What workers and launcher have to say to people, on the error stream; what all workers say, once."""

    def __init__(self) -> None:
        self._found: set[str] = set()

    def __call__(self, rank: int, message: Mapping[str, Any]) -> None:
        text = str(message.get("text", ""))
        match message.get("kind"):
            case "notice":
                self.say(text)
            case "finding" if text not in self._found:
                self._found.add(text)
                self.say(text)

    def say(self, text: str) -> None:
        """Show `text`."""
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _locked(asked: Launch) -> Iterator[Launch]:
    """`asked` with the directory that it gets, which is made, and held until the context ends."""
    with ExitStack() as stack:
        try:
            if not asked.named:
                run = make_unique_directory(asked.run, 0o700)
                asked = replace(asked, run=run, logs=run / asked.logs.name)
            for directory in (asked.run, asked.logs):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(hold_lock(asked.run, Holder.current()))
            remove_contact(asked.run)
        except OSError as error:
            raise not_writable(asked.run, error) from None
        yield asked


def _may_come_and_go(
    asked: Launch, server: ForkServer, told: Callable[[str], None], began: float
) -> AbstractContextManager[ElasticOptions | None]:
    """What workers need to do so, if they may."""
    if not asked.elastic or (asked.largest == 1 and asked.calling is None):
        return nullcontext()
    first = max(asked.workers, asked.min_workers)
    policy = Policy(min_workers=asked.min_workers, max_workers=asked.largest, expected_workers=first)
    script = [str(asked.script.absolute()), *asked.arguments]
    order = {"task": "", "script": script, "run": str(asked.run.absolute()), "began": began}
    calling = asked.calling or CoordinatorOptions()
    return coordinator_for(policy, order, asked.run, server, told, calling, asked.logs, independent_exit=True)


def read(words: list[str]) -> Launch:
    """Our options up to the script; everything after it is the script's.

    Raises:
        InvalidInput: an unknown option, no script, or a number of workers that is none.
    """
    options, rest = _options(words)
    if not rest:
        raise InvalidInput("script", "(nothing)", "no script is given", "write unisono launch SCRIPT.py")
    script = Path(rest[0])
    if not script.is_file():
        raise InvalidInput("script", rest[0], "there is no such file", "check the path")
    logs = options.get("--logs")
    run = Path(options.get("--run-dir") or logs or f"runs/{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    workers, min_workers, max_workers = _workers(options.get("--workers", "1"))
    check_worker_count(workers, "--workers")
    elastic, where = "--no-elastic" not in options, calling({n: v for n, v in options.items() if n in CALLING})
    if not elastic and (max_workers is not None or where is not None):
        raise InvalidInput("--no-elastic", "(given)", "then no worker can come or go",
                           "leave it out, or give one number of workers and no coordinator")  # fmt: skip
    found, named = Path(logs) if logs else run / "logs", bool(logs or options.get("--run-dir"))
    debug = whole("--debug", options["--debug"], 0) if "--debug" in options else None
    if debug is not None and debug >= workers:
        raise InvalidInput("--debug", debug, f"there are workers 0 to {workers - 1}", "choose one of them")
    return Launch(script, tuple(rest[1:]), workers, found, run, min_workers, max_workers, elastic, where, named, debug)


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name == "--no-elastic" and not equals:
            found[name] = ""
            continue
        if name not in _VALUES:
            raise unknown(name, value, [*_VALUES, "--no-elastic"])
        if not equals and not rest:
            raise InvalidInput(name, "(nothing)", "a value is missing", f"write {name} VALUE")
        found[name] = value if equals else rest.pop(0)
    return found, rest


def _workers(text: str) -> tuple[int, int, int | None]:
    """How many are started, how many there are at least, and at most."""
    if ":" not in text:
        return whole("--workers", text), 1, None
    min_workers, max_workers = (whole("--workers", part) for part in text.split(":", 1))
    if min_workers > max_workers:
        raise InvalidInput(
            "--workers", text, f"there are never more than {max_workers}", "write for instance --workers 2:4"
        )
    return min_workers, min_workers, max_workers

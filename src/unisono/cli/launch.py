"""``unisono launch SCRIPT``: runs a script with its own training loop in several workers of this host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.cli import coordinator_options
from unisono.cli.argument_words import Others, option_table, read_options, whole_number
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

Run SCRIPT.py in N workers of this host. In the script, unisono.join() connects a worker to the others. The output of
worker 0 is shown; that of each worker is written to DIR/logs/worker-<rank>.log. During the loop over world.steps,
workers can join and leave, and a worker that fails is replaced by one with the same rank. The environment variables of
torchrun (RANK, WORLD_SIZE, MASTER_PORT, …) are set, so torch.distributed.init_process_group() works as well.

  --workers N            processes to start; 2:4: start 2, and let others join up to 4 [1]
  --run-dir DIR          the run's directory [runs/<script>-<date>]
  --logs DIR             directory for the workers' logs [DIR/logs]
  --no-elastic           end the run when a worker is lost
  --debug RANK           the worker that reads from this terminal and may call breakpoint() [0 if it is the only worker]
  --listen HOST[:PORT]   let workers of other hosts join (unisono join). This option, --coordinator and those that go
                         with them are described in unisono train --help
"""
_STOP_SECONDS = 10.0
_TABLE = option_table(USAGE) | {name: value for name, (value, _) in coordinator_options.OPTIONS.items()}


@dataclass(frozen=True)
class LaunchRequest:
    """What the command was asked to run.

    Args:
        script: the file of the script.
        arguments: the arguments of the script.
        workers: the number of processes.
        logs: the directory for the workers' logs.
        run: the directory of the run.
        min_workers: the run continues as long as it has this number of workers.
        max_workers: further workers may join up to this number; None: up to `workers`.
        elastic: whether workers may join and leave.
        coordinator: where the run's coordinator is; None: no option says so.
        named: whether the user has named a directory; otherwise another name is chosen if `run` exists.
        debug: the rank of the worker that has the terminal; None: no option names one.
    """

    script: Path
    arguments: tuple[str, ...]
    workers: int
    logs: Path
    run: Path
    min_workers: int = 1
    max_workers: int | None = None
    elastic: bool = True
    coordinator: CoordinatorOptions | None = None
    named: bool = True
    debug: int | None = None

    @property
    def most_workers(self) -> int:
        """The largest number of workers at a time."""
        return self.workers if self.max_workers is None else self.max_workers


def launch(words: list[str]) -> int:
    """Run ``unisono launch`` with the arguments `words`; 0 when the script has finished in every worker.

    Raises:
        UnisonoError: the arguments are invalid, or a worker failed.
    """
    if words[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    request = read_request(words)

    started_at, printer = time.time() - age_seconds(), NoticePrinter()
    with ExitStack() as stack:
        server = stack.enter_context(start_fork_server(PRELOAD))
        request = stack.enter_context(_claim_directory(request))
        elastic = stack.enter_context(_elastic_options(request, server, printer.show, started_at))
        launch_script(
            request.script,
            request.arguments,
            LaunchOptions(
                request.logs,
                request.workers,
                threads=max(1, len(os.sched_getaffinity(0)) // request.workers),
                echo=sys.stdout.buffer,
                stop_seconds=_STOP_SECONDS,
                debug_rank=request.debug,
            ),
            fork_server=server,
            on_message=printer,
            elastic=elastic,
        )
    return 0


class NoticePrinter:
    """Prints notices of workers and launcher to standard error. A finding that all workers report is printed once."""

    def __init__(self) -> None:
        self._findings: set[str] = set()

    def __call__(self, rank: int, message: Mapping[str, Any]) -> None:
        text = str(message.get("text", ""))
        match message.get("kind"):
            case "notice":
                self.show(text)
            case "finding" if text not in self._findings:
                self._findings.add(text)
                self.show(text)

    def show(self, text: str) -> None:
        """Print `text`."""
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _claim_directory(request: LaunchRequest) -> Iterator[LaunchRequest]:
    """Create the run's directory and hold its lock; yields `request` with the final name of the directory."""
    with ExitStack() as stack:
        try:
            if not request.named:
                run = make_unique_directory(request.run, 0o700)
                request = replace(request, run=run, logs=run / request.logs.name)
            for directory in (request.run, request.logs):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(hold_lock(request.run, Holder.current()))
            remove_contact(request.run)
        except OSError as error:
            raise not_writable(request.run, error) from None
        yield request


def _elastic_options(
    request: LaunchRequest, server: ForkServer, on_notice: Callable[[str], None], started_at: float
) -> AbstractContextManager[ElasticOptions | None]:
    """A context with the coordinator for workers that join and leave; with None if no worker may join or leave."""
    if not request.elastic or (request.most_workers == 1 and request.coordinator is None):
        return nullcontext()
    expected = max(request.workers, request.min_workers)
    policy = Policy(min_workers=request.min_workers, max_workers=request.most_workers, expected_workers=expected)
    script = [str(request.script.absolute()), *request.arguments]
    spec = {"task": "", "script": script, "run": str(request.run.absolute()), "began": started_at}
    options = request.coordinator or CoordinatorOptions()
    return coordinator_for(policy, spec, request.run, server, on_notice, options, request.logs, independent_exit=True)


def read_request(words: list[str]) -> LaunchRequest:
    """Read the command's options up to the script; everything after it belongs to the script.

    Raises:
        InvalidInput: an unknown option, no script, an invalid number of workers, or options that exclude each other.
    """
    options, rest = read_options(words, _TABLE, others=Others.STOP_AT_ARGUMENT)
    if not rest:
        raise InvalidInput("script", "(nothing)", "no script is given", "write unisono launch SCRIPT.py")
    script = Path(rest[0])
    if not script.is_file():
        raise InvalidInput("script", rest[0], "there is no such file", "check the path")
    logs = options.get("--logs")
    run = Path(options.get("--run-dir") or logs or f"runs/{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    workers, min_workers, max_workers = _workers(options.get("--workers", "1"))
    check_worker_count(workers, "--workers")
    elastic = "--no-elastic" not in options
    coordinator = coordinator_options.coordinator_options(
        {name: value for name, value in options.items() if name in coordinator_options.OPTIONS}
    )
    if not elastic and (max_workers is not None or coordinator is not None):
        other = f"--workers {options['--workers']}" if max_workers is not None else "the options about the coordinator"
        raise InvalidInput("--no-elastic", "(given)", f"it excludes {other}, since no worker can join or leave then",
                           "leave it out, or give one number of workers and no coordinator")  # fmt: skip
    debug = whole_number("--debug", options["--debug"], 0) if "--debug" in options else None
    if debug is not None and debug >= workers:
        raise InvalidInput("--debug", debug, f"there are workers 0 to {workers - 1}", "choose one of them")
    return LaunchRequest(
        script,
        tuple(rest[1:]),
        workers,
        Path(logs) if logs else run / "logs",
        run,
        min_workers,
        max_workers,
        elastic,
        coordinator,
        named=bool(logs or options.get("--run-dir")),
        debug=debug,
    )


def _workers(text: str) -> tuple[int, int, int | None]:
    """The number of workers to start, and the least and the largest number."""
    if ":" not in text:
        return whole_number("--workers", text), 1, None
    minimum, maximum = (whole_number("--workers", part) for part in text.split(":", 1))
    if minimum > maximum:
        cure = "write for instance --workers 2:4"
        raise InvalidInput("--workers", text, f"the first number is larger than {maximum}", cure)
    return minimum, minimum, maximum

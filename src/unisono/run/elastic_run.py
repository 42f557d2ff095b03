"""How the workers of a run find each other where they may come and go: a coordinator, and the order that lies there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.launch import ElasticOptions, ForkServer
from unisono.launch.coordinator_setup import coordinator_for, fetch_run_spec
from unisono.launch.lock import Holder
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership.endpoint import CoordinatorOptions
from unisono.run.consent import Consent
from unisono.run.spec import PickledTask, RunSpec
from unisono.tasks.source import NamedTask


def policy_of(config: Config) -> Policy:
    """What `config` says of who is present."""
    most = config.workers if config.max_workers is None else config.max_workers
    first = max(config.workers, config.min_workers)
    layout = config.layout
    apart = layout.data_parallel_size > 1 or layout.pipeline > 1  # then all of them take as many micro-batches
    shares = (config.global_batch or 0) // (config.micro_batch or 1) // layout.data_parallel_size if apart else 0
    return Policy(
        min_workers=config.min_workers,
        max_workers=most,
        expected_workers=first,
        replica_size=layout.workers,
        micro_batches=shares,
    )


def gathered(
    config: Config,
    order: RunSpec,
    server: ForkServer,
    told: Callable[[str], None],
    calling: CoordinatorOptions = CoordinatorOptions(),
) -> AbstractContextManager[ElasticOptions]:
    """A coordinator that knows `order`, whose first workers `server` forks; see `coordinator_for`."""
    assert order.path is not None
    return coordinator_for(policy_of(config), _told_of(order), order.path, server, told, calling)


@dataclass(frozen=True)
class Script:
    """What workers of another launcher run, in place of a task.

    Args:
        path: of the file, here.
        arguments: that follow it.
        run: the run's directory.
        contact: of the coordinator.
    """

    path: Path
    arguments: Sequence[str]
    run: str
    contact: CoordinatorAddress


def called(contact: CoordinatorAddress, server: ForkServer, consent: Consent) -> RunSpec | Script:
    """What workers that `server` forks are to do as part of the run whose coordinator `contact` reaches.

    Raises:
        InvalidInput: nobody answers there, there is nothing that this host could do, or it is not what `consent` says.
    """
    told, here = fetch_run_spec(contact, server)
    if told.script or told.task:
        consent.check(told)
    if told.script:
        path = Path(told.script[0])
        if not path.is_file():
            raise InvalidInput("script", told.script[0], "the run is that of a script, which this host does not have",
                               "copy it there, with all that it needs")  # fmt: skip
        return Script(path, told.script[1:], told.run, here)
    if not told.task:
        raise InvalidInput(
            "coordinator", contact.url, "its run has a task that a Python program made and carries to its own workers",
            "start it by unisono train, with a task that has a name on every host")  # fmt: skip
    source = NamedTask(told.task, told.arguments, consent.directory)
    source.place()
    consent.check_function(source)
    holder = Holder(**dict(told.holder)) if told.holder else None
    return RunSpec(source, told.settings, Path(told.run), told.began, here, holder)


def _told_of(order: RunSpec) -> dict[str, Any]:
    named = not isinstance(order.source, PickledTask)
    return {
        "task": order.source.absolute() if named else "",
        "arguments": dict(order.source.arguments) if named else {},
        "settings": dict(order.settings),
        "run": str(order.path or ""),
        "began": order.began,
        "holder": asdict(order.holder) if order.holder else None,
    }

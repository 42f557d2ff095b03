"""An elastic run: its coordinator, the policy by which views are formed, and the run spec that joining hosts fetch."""

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
    """The limits on the workers of a view that follow from `config`."""
    most = config.workers if config.max_workers is None else config.max_workers
    first = max(config.workers, config.min_workers)
    layout = config.layout
    equal_work = layout.data_parallel_size > 1 or layout.pipeline > 1  # all replicas take equally many micro-batches
    micro_batches = (config.global_batch or 0) // (config.micro_batch or 1) // layout.data_parallel_size
    return Policy(
        min_workers=config.min_workers,
        max_workers=most,
        expected_workers=first,
        replica_size=layout.workers,
        micro_batches=micro_batches if equal_work else 0,
    )


def elastic_run(
    config: Config,
    spec: RunSpec,
    server: ForkServer,
    notify: Callable[[str], None],
    coordinator: CoordinatorOptions = CoordinatorOptions(),
) -> AbstractContextManager[ElasticOptions]:
    """A context with a coordinator that serves `spec`, and whose first workers `server` forks; see `coordinator_for`.

    Args:
        notify: receives notices for the user.
    """
    assert spec.path is not None
    return coordinator_for(policy_of(config), _message_fields(spec), spec.path, server, notify, coordinator)


@dataclass(frozen=True)
class Script:
    """The script that the workers of a joining launcher run, in place of a task.

    Args:
        path: the path of the script on this host.
        arguments: the script's arguments.
        run: the run's directory.
        contact: the address of the coordinator.
    """

    path: Path
    arguments: Sequence[str]
    run: str
    contact: CoordinatorAddress


def fetch_work(contact: CoordinatorAddress, server: ForkServer, consent: Consent) -> RunSpec | Script:
    """Fetch what the workers that `server` forks run, from the coordinator at `contact`.

    Raises:
        InvalidInput: no coordinator answers; the task or script cannot be run on this host; or `consent` does not
            allow it.
    """
    message, here = fetch_run_spec(contact, server)
    if message.script or message.task:
        consent.check(message)
    if message.script:
        path = Path(message.script[0])
        if not path.is_file():
            raise InvalidInput("script", message.script[0], "the run is of a script that this host does not have",
                               "copy the script to this path, with all that it needs")  # fmt: skip
        return Script(path, message.script[1:], message.run, here)
    if not message.task:
        raise InvalidInput(
            "coordinator", contact.url, "its run has a task that a Python program made, and that only its own "
            "launcher can start", "start it by unisono train, with a task that has a name on every host")  # fmt: skip
    source = NamedTask(message.task, message.arguments, consent.directory)
    source.place()
    consent.check_function(source)
    holder = Holder(**dict(message.holder)) if message.holder else None
    return RunSpec(source, message.settings, Path(message.run), message.began, here, holder)


def _message_fields(spec: RunSpec) -> dict[str, Any]:
    """The fields of the `RunSpecMessage` of `spec`; without the task if it has no name that is valid on other hosts."""
    named = not isinstance(spec.source, PickledTask)
    return {
        "task": spec.source.absolute() if named else "",
        "arguments": dict(spec.source.arguments) if named else {},
        "settings": dict(spec.settings),
        "run": str(spec.path or ""),
        "began": spec.started_at,
        "holder": asdict(spec.holder) if spec.holder else None,
    }

"""Sets up the coordinator of an elastic run; it also keeps the run's spec for workers that join.

No module imported here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.errors import InvalidInput
from unisono.launch.coordinator_process import CoordinatorProcess
from unisono.launch.forkserver import ForkServer
from unisono.launch.options import ElasticOptions
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership import contact_file as card
from unisono.membership.certificate import fingerprint, with_certificate
from unisono.membership.endpoint import CoordinatorOptions
from unisono.membership.http_client import EmptyBody, HttpConnection, check_response, fetch
from unisono.membership.messages import RunSpecMessage
from unisono.membership.server.store import Store
from unisono.system import atomic_files as atomic

RunSpecFields = Mapping[str, Any]  # fields of `unisono.membership.messages.RunSpecMessage`


@contextlib.contextmanager
def coordinator_for(
    policy: Policy, spec: RunSpecFields, run: Path, server: ForkServer, on_notice: Callable[[str], None],
    options: CoordinatorOptions = CoordinatorOptions(), logs: Path | None = None, independent_exit: bool = False,
) -> Iterator[ElasticOptions]:  # fmt: skip
    """A context with a coordinator that has the spec of a run, whose first workers `server` forks.

    A coordinator is started, unless `options` name one that runs elsewhere. It keeps its decisions in the directory
    `run`, in ``coordinator/<n>.sqlite`` for the n-th attempt of the run. Each attempt has its own file, since it has
    other workers. Within the context, ``coordinator/contact.json`` has the coordinator's address.

    Args:
        policy: the rules for views, for a coordinator that is started here.
        spec: the run's spec without ``meets_at``, which is added here.
        on_notice: called with sentences for the user.
        logs: directory for the coordinator's log; default: ``logs`` in `run`.
        independent_exit: see `ElasticOptions`.

    Raises:
        InvalidInput: the address to listen at is not available, the directory cannot be written, or the coordinator
            refuses the run.
    """
    if options.existing is not None:
        coordinator = _use_running(options.existing, spec, server)
    else:
        coordinator = _start_coordinator(policy, spec, run, logs or run / "logs", server, on_notice, options)
    with coordinator as elastic:
        shown = card.write_contact(run, elastic.contact)
        if not elastic.contact.is_local:
            command = card.join_command(elastic.contact, *_join_options(spec))
            on_notice(f"other hosts join with  {command}  and the token in {shown}")
        try:
            yield replace(elastic, independent_exit=independent_exit)
        finally:
            shown.unlink(missing_ok=True)


def fetch_run_spec(contact: CoordinatorAddress, server: ForkServer) -> tuple[RunSpecMessage, CoordinatorAddress]:
    """Fetch the spec of a run from its coordinator, and the addresses for workers that `server` forks.

    Raises:
        InvalidInput: no coordinator answers at `contact`, or its run has not started yet.
    """
    spec = fetch(contact, "/v1/order", RunSpecMessage)
    if spec is None:
        raise InvalidInput(
            "coordinator", contact.url, "no run has been started there yet",
            "start one with unisono train TASK --coordinator URL")  # fmt: skip
    return spec, replace(contact, rendezvous_url=_rendezvous_url(_is_local(spec.meets_at), server))


@contextlib.contextmanager
def _use_running(contact: CoordinatorAddress, spec: RunSpecFields, server: ForkServer) -> Iterator[ElasticOptions]:
    contact = replace(contact, rendezvous_url=_rendezvous_url(contact.is_local, server))
    _send_spec(contact, {**spec, "meets_at": contact.rendezvous_url})
    yield ElasticOptions(contact)


@contextlib.contextmanager
def _start_coordinator(
    policy: Policy, spec: RunSpecFields, run: Path, logs: Path, server: ForkServer, on_notice: Callable[[str], None],
    options: CoordinatorOptions,
) -> Iterator[ElasticOptions]:  # fmt: skip
    token, meets_at = options.token or secrets.token_urlsafe(32), _rendezvous_url(options.endpoint.is_local, server)
    state, log, directory = _new_state_file(run), logs / "coordinator.log", card.coordinator_directory(run)
    place, authority = options.endpoint, options.authority
    if place.create_certificate:
        place = with_certificate(place, directory / "certificate.pem", directory / "key.pem")
        authority = fingerprint(directory / "certificate.pem")
    with contextlib.closing(Store(state)) as store:
        store.put_run_spec(json.dumps({**spec, "meets_at": meets_at}, default=str))
    with CoordinatorProcess(place, policy, state, token, log, on_notice) as process:
        yield ElasticOptions(CoordinatorAddress(process.url, token, meets_at, authority), process)


def _send_spec(contact: CoordinatorAddress, spec: RunSpecFields) -> None:
    """Store the spec of the run at the coordinator."""
    body = json.loads(json.dumps(spec, default=str))
    answer = check_response(contact, HttpConnection(contact).request("PUT", "/v1/order", body, EmptyBody))
    if answer.status == 409:
        raise InvalidInput(
            "--coordinator", contact.url, "it serves another run, and a coordinator serves one run",
            f"join that run with unisono join {contact.url}; if it has ended, start unisono coordinator with "
            "another --state for this one")  # fmt: skip
    if answer.status != 204:
        problem = f"the coordinator refuses the run (HTTP status {answer.status})"
        raise InvalidInput("--coordinator", contact.url, problem, "see the coordinator's log")


def _join_options(spec: RunSpecFields) -> list[str]:
    """Options of ``unisono join`` that name the task or script."""
    if script := spec.get("script"):
        return ["--script", script[0]]
    return ["--task", spec["task"]] if spec["task"] else []


def _rendezvous_url(local: bool, server: ForkServer) -> str:
    """The rendezvous of the workers of `server`: a directory if all workers are on this host, otherwise empty.

    Without a directory, each worker serves a socket. Each launcher has a directory of its own, and removes it at its
    end.
    """
    return f"file://{server.rendezvous_directory}" if local else ""


def _is_local(meets_at: str) -> bool:
    """Whether the run's rendezvous is a directory that this process can write."""
    directory = meets_at.removeprefix("file://")
    return directory != meets_at and os.access(directory, os.W_OK | os.X_OK)


def _new_state_file(run: Path) -> Path:
    """Create the state file of a new attempt."""
    directory = card.coordinator_directory(run)
    try:
        number = 1
        while (state := directory / f"{number}.sqlite").exists():
            number += 1
        atomic.write(state, b"")
    except OSError as error:
        raise card.not_writable(run, error) from None
    return state

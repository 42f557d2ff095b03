"""Where the workers of a run find each other if they may come and go: a coordinator, at which lies what they are to do.

NoBody here imports torch.
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
from unisono.launch.forkserver import Forkserver
from unisono.launch.launcher import ElasticOptions
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership import contact_file as card
from unisono.membership.certificate import certified, fingerprint
from unisono.membership.endpoint import CoordinatorOptions
from unisono.membership.http_client import HttpConnection, NoBody, ask, heard
from unisono.membership.messages import OrderMessage
from unisono.membership.server.store import Store
from unisono.system import atomic_files as atomic

Order = Mapping[str, Any]  # what lies at a coordinator, see `unisono.membership.server.run_spec_routes`


@contextlib.contextmanager
def rallied(
    policy: Policy, order: Order, run: Path, server: Forkserver, told: Callable[[str], None],
    calling: CoordinatorOptions = CoordinatorOptions(), logs: Path | None = None, each_to_its_end: bool = False,
) -> Iterator[ElasticOptions]:  # fmt: skip
    """A coordinator that knows `order`, whose first workers `server` forks.

    One that is started here lies in the directory `run`: what it decides in ``coordinator/<n>.sqlite`` for the n-th
    life of the run, where what happened can be read later (each life has a file of its own, since its workers are not
    those of the one before); how it is reached in ``coordinator/contact.json``, as long as it is up.

    Args:
        policy: of a coordinator that is started here.
        order: without ``meets_at``, which is said here.
        told: called with what happens to the coordinator, in words.
        logs: directory for what it prints; default: ``logs`` in `run`.
        each_to_its_end: see `ElasticOptions`.

    Raises:
        InvalidInput: nobody can listen there, the directory cannot be written, or the coordinator is none of ours.
    """
    if calling.elsewhere is not None:
        found = _elsewhere(calling.elsewhere, order, server)
    else:
        found = _beside(policy, order, run, logs or run / "logs", server, told, calling)
    with found as elastic:
        shown = card.keep(run, elastic.contact)
        if not elastic.contact.private:
            joining = card.joining(elastic.contact, *_named(order))
            told(f"others join with  {joining}  and the token in {shown}")
        try:
            yield replace(elastic, each_to_its_end=each_to_its_end)
        finally:
            shown.unlink(missing_ok=True)


def lying_at(contact: CoordinatorAddress, server: Forkserver) -> tuple[OrderMessage, CoordinatorAddress]:
    """What workers that `server` forks are to do as part of the run whose coordinator `contact` reaches, and how they
    reach it and each other.

    Raises:
        InvalidInput: nobody answers there, or nothing is to be done yet.
    """
    order = ask(contact, "/v1/order", OrderMessage)
    if order is None:
        raise InvalidInput(
            "coordinator", contact.url, "no run has been started there yet",
            "start one with unisono train TASK --coordinator URL")  # fmt: skip
    return order, replace(contact, meets_at=_meets_at(_is_here(order.meets_at), server))


@contextlib.contextmanager
def _elsewhere(contact: CoordinatorAddress, order: Order, server: Forkserver) -> Iterator[ElasticOptions]:
    contact = replace(contact, meets_at=_meets_at(contact.private, server))
    _give(contact, {**order, "meets_at": contact.meets_at})
    yield ElasticOptions(contact)


@contextlib.contextmanager
def _beside(
    policy: Policy, order: Order, run: Path, logs: Path, server: Forkserver, told: Callable[[str], None],
    calling: CoordinatorOptions,
) -> Iterator[ElasticOptions]:  # fmt: skip
    token, meets_at = calling.token or secrets.token_urlsafe(32), _meets_at(calling.place.private, server)
    state, log, kept = _new_life(run), logs / "coordinator.log", card.directory(run)
    place, authority = calling.place, calling.authority
    if place.makes_certificate:
        place = certified(place, kept / "certificate.pem", kept / "key.pem")
        authority = fingerprint(kept / "certificate.pem")
    with contextlib.closing(Store(state)) as store:
        store.keep_order(json.dumps({**order, "meets_at": meets_at}, default=str))
    with CoordinatorProcess(place, policy, state, token, log, told) as coordination:
        yield ElasticOptions(CoordinatorAddress(coordination.url, token, meets_at, authority), coordination)


def _give(contact: CoordinatorAddress, order: Order) -> None:
    """Have the coordinator know what is to be done."""
    told = json.loads(json.dumps(order, default=str))
    answer = heard(contact, HttpConnection(contact).ask("PUT", "/v1/order", told, NoBody))
    if answer.status == 409:
        raise InvalidInput(
            "--coordinator", contact.url, "it is another run's, and a coordinator serves one run",
            f"take part in that run with unisono join {contact.url}; if it has ended, start unisono coordinator with "
            "another --state for this one")  # fmt: skip
    if answer.status != 204:
        raise InvalidInput("--coordinator", contact.url, f"it refuses the run ({answer.status})", "see its log")


def _named(order: Order) -> list[str]:
    """How a host that joins names what it runs."""
    if script := order.get("script"):
        return ["--script", script[0]]
    return ["--task", order["task"]] if order["task"] else []


def _meets_at(here: bool, server: Forkserver) -> str:
    """Where workers of `server` are met: in its directory by those who are all `here`, else at a door that each opens.
    Each launcher offers a directory of its own, since another's goes with it."""
    return f"file://{server.meeting}" if here else ""


def _is_here(meets_at: str) -> bool:
    """Whether others meet in a directory that this process can write to as well."""
    directory = meets_at.removeprefix("file://")
    return directory != meets_at and os.access(directory, os.W_OK | os.X_OK)


def _new_life(run: Path) -> Path:
    """A file that is there from now on, and was not before."""
    directory = card.directory(run)
    try:
        number = 1
        while (state := directory / f"{number}.sqlite").exists():
            number += 1
        atomic.write(state, b"")
    except OSError as error:
        raise card.refused(run, error) from None
    return state

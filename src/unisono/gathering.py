"""How the workers of a run find each other where they may come and go: a coordinator, and the order that lies there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.launch import Coordination, Elastic, Forkserver
from unisono.membership import Contact, Policy, card
from unisono.membership.line import Line, ask, heard
from unisono.membership.place import Calling
from unisono.membership.store import Store
from unisono.order import Carried, Order
from unisono.source import Source


def policy_of(config: Config) -> Policy:
    """What `config` says of who is present."""
    most = config.workers if config.most is None else config.most
    first = max(config.workers, config.fewest)
    layout = config.layout
    apart = layout.side_by_side > 1 or layout.pipeline > 1  # then all of them take as many micro-batches
    shares = (config.global_batch or 0) // (config.micro_batch or 1) // layout.side_by_side if apart else 0
    return Policy(minimum=config.fewest, maximum=most, expected=first, unit=layout.workers, shares=shares)


@contextlib.contextmanager
def gathered(
    config: Config, order: Order, server: Forkserver, told: Callable[[str], None], calling: Calling = Calling()
) -> Iterator[Elastic]:
    """A coordinator that knows `order`, whose first workers `server` forks.

    One that is started here lies in the run's directory: what it decides in ``coordinator/<n>.sqlite`` for the n-th
    life of the run, where what happened can be read later (each life has a file of its own, since its workers are not
    those of the one before); how it is reached in ``coordinator/contact.json``, as long as it is up.

    Args:
        told: called with what happens to the coordinator, in words.

    Raises:
        InvalidInput: nobody can listen there, the directory cannot be written, or the coordinator is none of ours.
    """
    assert order.path is not None
    if calling.elsewhere is not None:
        found = _elsewhere(calling.elsewhere, order, server)
    else:
        found = _beside(config, order, server, told, calling)
    with found as elastic:
        shown = card.keep(order.path, elastic.contact)
        if not elastic.contact.private:
            told(f"others join with  unisono join {elastic.contact.url}  and the token in {shown}")
        try:
            yield elastic
        finally:
            shown.unlink(missing_ok=True)


@contextlib.contextmanager
def _elsewhere(contact: Contact, order: Order, server: Forkserver) -> Iterator[Elastic]:
    contact = replace(contact, meets_at=_meets_at(contact.private, server))
    _give(contact, _told_of(order, contact.meets_at))
    yield Elastic(contact)


@contextlib.contextmanager
def _beside(
    config: Config, order: Order, server: Forkserver, told: Callable[[str], None], calling: Calling
) -> Iterator[Elastic]:
    assert order.path is not None
    token, meets_at = calling.token or secrets.token_urlsafe(32), _meets_at(calling.place.private, server)
    state, log = _new_life(order.path), order.path / "logs" / "coordinator.log"
    with contextlib.closing(Store(state)) as store:
        store.keep_order(json.dumps(_told_of(order, meets_at), default=str))
    with Coordination(calling.place, policy_of(config), state, token, log, told) as coordination:
        yield Elastic(Contact(coordination.url, token, meets_at, calling.authority), coordination)


def called(contact: Contact, server: Forkserver) -> Order:
    """What workers that `server` forks are to do as part of the run whose coordinator `contact` reaches.

    Raises:
        InvalidInput: nobody answers there, or there is nothing that this host could do.
    """
    told = ask(contact, "/v1/order")
    if told is None:
        raise InvalidInput(
            "coordinator", contact.url, "no run has been started there yet",
            "start one with unisono train TASK --coordinator URL")  # fmt: skip
    if not told["task"]:
        raise InvalidInput(
            "coordinator", contact.url, "its run has a task that a Python program made and carries to its own workers",
            "start it by unisono train, with a task that has a name on every host")  # fmt: skip
    source = Source(told["task"], told["arguments"])
    source.place()
    meets_at = _meets_at(_is_here(told["meets_at"]), server)
    return Order(source, told["settings"], Path(told["run"]), told["began"], replace(contact, meets_at=meets_at))


def _give(contact: Contact, told: dict[str, Any]) -> None:
    """Have the coordinator know what is to be done."""
    answer = heard(contact, Line(contact).ask("PUT", "/v1/order", json.loads(json.dumps(told, default=str))))
    if answer.status == 409:
        raise InvalidInput(
            "--coordinator", contact.url, "it is another run's", "join that with unisono join, or start a coordinator "
            "with another --state")  # fmt: skip
    if answer.status != 204:
        raise InvalidInput("--coordinator", contact.url, f"it refuses the run ({answer.status})", "see its log")


def _told_of(order: Order, meets_at: str) -> dict[str, Any]:
    named = not isinstance(order.source, Carried)
    return {
        "task": order.source.absolute() if named else "",
        "arguments": dict(order.source.arguments) if named else {},
        "settings": dict(order.settings),
        "run": str(order.path or ""),
        "meets_at": meets_at,
        "began": order.began,
    }


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
        card.write(state, "")
    except OSError as error:
        raise card.refused(run, error) from None
    return state

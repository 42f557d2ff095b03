"""The coordinator of a run whose workers may come and go, beside the launcher that starts the first of them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.launch import Coordination, Elastic, Forkserver
from unisono.membership import Contact, Policy
from unisono.membership.place import Place

DIRECTORY = "coordinator"  # in the run's
CONTACT = "contact.json"  # there, as long as the coordinator is


@dataclass(frozen=True)
class Calling:
    """How others reach the coordinator.

    Args:
        place: where it listens; on loopback only workers of this host reach it, and meet without opening a port.
        authority: see `Contact`.
    """

    place: Place = Place()
    authority: str = ""

    @property
    def private(self) -> bool:
        """Whether all workers are on this host."""
        return self.place.host in ("127.0.0.1", "::1", "localhost")


def policy_of(config: Config) -> Policy:
    """What `config` says of who is present."""
    most = config.workers if config.most is None else config.most
    first = max(config.workers, config.fewest)
    return Policy(minimum=config.fewest, maximum=most, expected=first, unit=config.layout.workers)


@contextlib.contextmanager
def gathered(
    config: Config, path: Path, server: Forkserver, told: Callable[[str], None], calling: Calling = Calling()
) -> Iterator[Elastic]:
    """A coordinator for the run in `path`, whose workers `server` forks.

    What it decides stays in ``coordinator/<n>.sqlite`` for the n-th life of the run: what happened in it can be read
    there later. Each life has a file of its own, since its workers are not those of the one before.

    Args:
        told: called with what happened to the coordinator, in words.

    Raises:
        InvalidInput: nobody can listen there, or the directory cannot be written.
    """
    token = secrets.token_urlsafe(32)
    state = _new_life(path / DIRECTORY)
    log = path / "logs" / "coordinator.log"
    with Coordination(calling.place, policy_of(config), state, token, log, told) as coordination:
        meets_at = f"file://{server.meeting}" if calling.private else ""
        contact = Contact(coordination.url, token, meets_at, calling.authority)
        card = path / DIRECTORY / CONTACT
        _write(card, json.dumps(asdict(contact)))
        try:
            yield Elastic(contact, coordination)
        finally:
            card.unlink(missing_ok=True)


def contact_in(path: Path) -> Contact:
    """Of the coordinator of the run in `path`.

    Raises:
        InvalidInput: there is none.
    """
    try:
        return Contact(**json.loads((path / DIRECTORY / CONTACT).read_text()))
    except (OSError, ValueError, TypeError):
        raise InvalidInput("run", str(path), "no coordinator of it is up", "name a run that is under way") from None


def _new_life(directory: Path) -> Path:
    """A file that is there from now on, and was not before."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        number = 1
        while (state := directory / f"{number}.sqlite").exists():
            number += 1
        _write(state, "")
    except OSError as error:
        raise InvalidInput(
            "run", str(directory), f"cannot be written ({error.strerror})", "name another directory"
        ) from None
    return state


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)

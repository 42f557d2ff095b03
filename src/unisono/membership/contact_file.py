"""How the coordinator of a run is reached, in the run's directory, for its owner only."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from unisono.errors import InvalidInput
from unisono.membership.certificate import is_pin
from unisono.membership.protocol import CoordinatorAddress
from unisono.system import atomic_files as atomic

DIRECTORY = "coordinator"  # in the run's
CONTACT = "contact.json"  # there


def keep(run: Path, contact: CoordinatorAddress) -> Path:
    """The file in the run's directory that says it from now on.

    Raises:
        InvalidInput: it cannot be written.
    """
    path = directory(run) / CONTACT
    try:
        atomic.write(path, json.dumps(asdict(contact)).encode())
    except OSError as error:
        raise refused(run, error) from None
    return path


def directory(run: Path) -> Path:
    """Where all that concerns the coordinator lies, made if it is not there.

    Raises:
        InvalidInput: it cannot be made.
    """
    path = run / DIRECTORY
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise refused(run, error) from None
    return path


def refused(run: Path, error: OSError) -> InvalidInput:
    """Nothing can be written there."""
    return InvalidInput("run_dir", str(run), f"cannot be written ({error.strerror})", "name another directory")


def contact_in(run: Path) -> CoordinatorAddress:
    """Of the coordinator of the run in that directory.

    Raises:
        InvalidInput: there is none.
    """
    try:
        return CoordinatorAddress(**json.loads((run / DIRECTORY / CONTACT).read_text()))
    except (OSError, ValueError, TypeError):
        raise InvalidInput("run_dir", str(run), "no coordinator of it is up", "name a run that is under way") from None


def joining(contact: CoordinatorAddress, *words: str) -> str:
    """The command with which workers of other hosts join, with further `words`; they have the token by other means."""
    command = ["unisono", "join", contact.url]
    if not contact.secure or is_pin(contact.authority):
        command += ["--authority", contact.authority or "none"]
    return shlex.join([*command, *words])


def forget(run: Path) -> None:
    """Remove what an earlier life of the run has left of it, which nobody answers any more. Raises OSError."""
    place = run / DIRECTORY
    for path in (place / CONTACT, *atomic.unfinished(place, CONTACT)):
        path.unlink(missing_ok=True)

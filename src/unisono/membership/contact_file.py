"""The file in a run directory that says how to reach the run's coordinator; only its owner can read it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from unisono.errors import InvalidInput
from unisono.membership.certificate import is_pin
from unisono.membership.protocol import CoordinatorAddress
from unisono.system import atomic_files as atomic

DIRECTORY = "coordinator"  # in the run directory
CONTACT = "contact.json"  # in `DIRECTORY`


def write_contact(run: Path, contact: CoordinatorAddress) -> Path:
    """Write the contact file of the run whose directory is `run`; returns the file's path.

    Raises:
        InvalidInput: the file cannot be written.
    """
    path = coordinator_directory(run) / CONTACT
    fields = {"url": contact.url, "token": contact.token, "meets_at": contact.rendezvous_url,
              "authority": contact.authority}  # fmt: skip
    try:
        atomic.write(path, json.dumps(fields).encode())
    except OSError as error:
        raise not_writable(run, error) from None
    return path


def coordinator_directory(run: Path) -> Path:
    """The directory for the coordinator's files in the run directory `run`; it is created if it does not exist.

    Raises:
        InvalidInput: the directory cannot be created.
    """
    path = run / DIRECTORY
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise not_writable(run, error) from None
    return path


def not_writable(run: Path, error: OSError) -> InvalidInput:
    """The error for a run directory that cannot be written to."""
    return InvalidInput("run_dir", str(run), f"cannot be written ({error.strerror})", "name another directory")


def read_contact(run: Path) -> CoordinatorAddress:
    """The address of the coordinator of the run whose directory is `run`.

    Raises:
        InvalidInput: the directory has no valid contact file, so no coordinator of the run is active.
    """
    try:
        fields = json.loads((run / DIRECTORY / CONTACT).read_text())
        url, token = fields["url"], fields["token"]
        return CoordinatorAddress(url, token, fields.get("meets_at", ""), fields.get("authority", ""))
    except (OSError, ValueError, TypeError, KeyError):
        raise InvalidInput(
            "run_dir", str(run), "the run in this directory has no active coordinator", "name a run that is active"
        ) from None


def join_command(contact: CoordinatorAddress, *words: str) -> str:
    """The command with which other hosts join the run, followed by `words`; the token is not part of the command."""
    command = ["unisono", "join", contact.url]
    if not contact.uses_tls or is_pin(contact.authority):
        command += ["--authority", contact.authority or "none"]
    return shlex.join([*command, *words])


def remove_contact(run: Path) -> None:
    """Remove the contact file that an earlier attempt of the run has left. Raises OSError."""
    directory = run / DIRECTORY
    for path in (directory / CONTACT, *atomic.unfinished(directory, CONTACT)):
        path.unlink(missing_ok=True)

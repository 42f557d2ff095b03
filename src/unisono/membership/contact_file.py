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
CONTACT = "contact.json"  # in that one


def write_contact(run: Path, contact: CoordinatorAddress) -> Path:
    """Write the file of the run in that directory, and return its path.

    Raises:
        InvalidInput: it cannot be written.
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
    """The directory of the coordinator's files in the run directory; created if it does not exist.

    Raises:
        InvalidInput: it cannot be created.
    """
    path = run / DIRECTORY
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise not_writable(run, error) from None
    return path


def not_writable(run: Path, error: OSError) -> InvalidInput:
    """The error that the run directory cannot be written to."""
    return InvalidInput("run_dir", str(run), f"cannot be written ({error.strerror})", "name another directory")


def read_contact(run: Path) -> CoordinatorAddress:
    """The address of the coordinator of the run in that directory.

    Raises:
        InvalidInput: the run has no coordinator at present.
    """
    try:
        fields = json.loads((run / DIRECTORY / CONTACT).read_text())
        url, token = fields["url"], fields["token"]
        return CoordinatorAddress(url, token, fields.get("meets_at", ""), fields.get("authority", ""))
    except (OSError, ValueError, TypeError, KeyError):
        raise InvalidInput(
            "run_dir", str(run), "no coordinator of it is running", "name a run that is running"
        ) from None


def join_command(contact: CoordinatorAddress, *words: str) -> str:
    """The command with which other hosts join the run, followed by `words`; the token is not in it."""
    command = ["unisono", "join", contact.url]
    if not contact.uses_tls or is_pin(contact.authority):
        command += ["--authority", contact.authority or "none"]
    return shlex.join([*command, *words])


def remove_contact(run: Path) -> None:
    """Remove the file that an earlier attempt of the run has left. Raises OSError."""
    directory = run / DIRECTORY
    for path in (directory / CONTACT, *atomic.unfinished(directory, CONTACT)):
        path.unlink(missing_ok=True)

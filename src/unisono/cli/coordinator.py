"""``unisono coordinator``: the service at which workers learn who takes part, by itself."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from unisono.cli.argument_words import read, whole
from unisono.cli.coordinator_options import NEW, place
from unisono.cli.token import VARIABLE, token
from unisono.errors import InvalidInput
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership.certificate import fingerprint, with_certificate
from unisono.membership.contact_file import join_command
from unisono.system import atomic_files as atomic

USAGE = f"""\
usage: unisono coordinator [options]

Agree on who trains. unisono train starts a coordinator of its own; one that runs elsewhere outlives every worker's
host. It ends on Ctrl-C, SIGTERM and SIGHUP; started again with the same --state and --port, it goes on where it was.

  --host HOST         address to listen at; any but loopback is reached from other machines [127.0.0.1]
  --port PORT         0 takes a free one [0]
  --state FILE        where its decisions lie [coordinator.sqlite]
  --certificate FILE  of this host, for TLS, with --key FILE; none: plain HTTP, which is not encrypted
  --make-certificate  make one, beside --state; others know it by its fingerprint, which is printed (--certificate new)
  --min-workers N     workers below which nothing is trained [1]
  --max-workers N     workers above which further ones stand by [as many as come]
  --expected-workers N
                      workers that the first view waits for, for 30 s [--min-workers]
  --replica-size N    workers of one replica, for runs with a --layout; a view has whole replicas [1]
  --micro-batches N   micro-batches of a step, by those that a replica computes at once: the number of replicas divides
                      it, where a layout has all of them take as many [any number]
  --token-file FILE   holds the run's token [{VARIABLE} of the environment, or a new one,
                      which is kept beside --state, readable for this user only]
"""
_OPTIONS = ("--host", "--port", "--state", "--certificate", "--key", "--min-workers", "--max-workers",
            "--expected-workers", "--replica-size", "--micro-batches", "--token-file")  # fmt: skip
_RENAMED = {
    "--minimum": "--min-workers",
    "--maximum": "--max-workers",
    "--expected": "--expected-workers",
    "--unit": "--replica-size",
    "--shares": "--micro-batches",
}  # options of an earlier version, and what to write today


def coordinator(words: list[str]) -> int:
    """Run the words after ``unisono coordinator``; 0 when it was asked to end.

    Raises:
        UnisonoError: what was written cannot work.
    """
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read(words, {**dict.fromkeys(_OPTIONS, True), "--make-certificate": False}, _RENAMED)
    if "--make-certificate" in options:
        options.setdefault("--certificate", NEW)
    if rest:
        raise InvalidInput("coordinator", " ".join(rest), "it takes options only", "see unisono coordinator --help")
    port = whole("--port", options.get("--port", "0"), 0)
    where = place(options.get("--host", "127.0.0.1"), port, options)
    policy, state = policy_of(options), Path(options.get("--state", "coordinator.sqlite"))
    given = token(options)
    if state.is_dir():
        raise InvalidInput("--state", str(state), "it is a directory", "name a file in it")
    door, kept = where.listen(), Path(f"{state}.token")

    makes, where = (
        where.create_certificate,
        with_certificate(where, Path(f"{state}.certificate.pem"), Path(f"{state}.key.pem")),
    )

    from unisono.membership.server.http_server import CoordinatorServer  # imports the web server

    try:
        serving = CoordinatorServer(where, policy, state, given or _kept(kept), _print, door)
    except (sqlite3.Error, OSError) as error:
        raise InvalidInput("--state", str(state), str(error), "name another file") from error
    print(f"coordinator at {serving.url}")
    print("" if given else f"its token, for --token-file of workers, is in {kept}\n", end="", flush=True)
    authority = fingerprint(where.certificate) if makes and where.certificate else ""
    if authority or not where.is_local:
        print(f"others join with  {join_command(CoordinatorAddress(serving.url, '', authority=authority))}", flush=True)
    serving.run()
    return 0


def _kept(file: Path) -> str:
    """The token that lies in `file`, which has one from now on.

    Raises:
        InvalidInput: it cannot be written, or others can read it.
    """
    try:
        if not file.exists():
            atomic.write(file, f"{secrets.token_urlsafe(32)}\n".encode())
        state = file.stat()
    except OSError as error:
        raise InvalidInput("--state", str(file), str(error), "name another file") from error
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise InvalidInput("--token-file", str(file), "others can read it, or write it", "remove it: another is chosen")
    return token({"--token-file": str(file)}, {})


def policy_of(options: Mapping[str, str]) -> Policy:
    """Who may take part.

    Raises:
        InvalidInput: numbers that contradict each other.
    """
    least = whole("--min-workers", options.get("--min-workers", "1"))
    first = whole("--expected-workers", options.get("--expected-workers", str(least)))
    most = whole("--max-workers", options.get("--max-workers", str(Policy().max_workers)))
    if not least <= first <= most:
        raise InvalidInput(
            "--expected-workers", first, f"not between --min-workers {least} and --max-workers {most}",
            "choose them in that order")  # fmt: skip
    replica_size = whole("--replica-size", options.get("--replica-size", "1"))
    micro_batches = whole("--micro-batches", options.get("--micro-batches", "0"), 0)
    if most < replica_size:
        raise InvalidInput(
            "--max-workers", most, f"below one replica of --replica-size {replica_size}", "write a multiple of that"
        )
    return Policy(
        min_workers=least,
        expected_workers=first,
        max_workers=most,
        replica_size=replica_size,
        micro_batches=micro_batches,
    )


def _print(words: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), words, flush=True)

"""``unisono coordinator``: runs a coordinator as a process of its own."""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from unisono.cli.argument_words import option_table, read_options, whole_number
from unisono.cli.coordinator_options import NEW, endpoint
from unisono.cli.token import VARIABLE, read_token
from unisono.errors import InvalidInput
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership.certificate import fingerprint, with_certificate
from unisono.membership.contact_file import join_command
from unisono.system import atomic_files as atomic

USAGE = f"""\
usage: unisono coordinator [options]

Run a coordinator, which decides which workers of a run train together. unisono train starts one itself; a coordinator
on another host survives the loss of any worker's host. It ends on Ctrl-C, SIGTERM and SIGHUP. Started again with the
same --state and --port, it continues where it stopped.

  --host HOST         address to listen at; any but loopback is reachable from other hosts [127.0.0.1]
  --port PORT         port to listen at; 0: a free port [0]
  --state FILE        file for its decisions [coordinator.sqlite]
  --certificate FILE  certificate of this host for TLS, with --key; none: plain HTTP, which is not encrypted
  --key FILE          private key of the certificate
  --make-certificate  make a certificate next to --state; clients verify it by its printed fingerprint (the same as
                      --certificate new)
  --min-workers N     do not train with fewer workers [1]
  --max-workers N     do not train with more workers; others wait as spares [no limit]
  --expected-workers N
                      wait up to 30 s for this number of workers before the first step [--min-workers]
  --replica-size N    workers of one replica, for a run with --layout; only complete replicas train [1]
  --micro-batches N   for a layout that needs equal work of all replicas, whose number must then divide N: the
                      micro-batches of a step, divided by those that a replica computes at a time [any number of
                      replicas]
  --token-file FILE   file with the run's token [{VARIABLE} of the environment, or a new token, kept next to --state
                      and readable by this user only]
"""
_RENAMED = {
    "--minimum": "--min-workers",
    "--maximum": "--max-workers",
    "--expected": "--expected-workers",
    "--unit": "--replica-size",
    "--shares": "--micro-batches",
}  # options of an earlier version, and what to write today


def coordinator(words: list[str]) -> int:
    """Run ``unisono coordinator`` with the arguments `words`; returns 0 when it was asked to end.

    Raises:
        UnisonoError: the arguments are invalid.
    """
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read_options(words, option_table(USAGE), _RENAMED)
    if "--make-certificate" in options:
        options.setdefault("--certificate", NEW)
    if rest:
        raise InvalidInput("coordinator", " ".join(rest), "it takes options only", "see unisono coordinator --help")
    port = whole_number("--port", options.get("--port", "0"), 0)
    place = endpoint(options.get("--host", "127.0.0.1"), port, options)
    policy, state = policy_of(options), Path(options.get("--state", "coordinator.sqlite"))
    token = read_token(options)
    if state.is_dir():
        raise InvalidInput("--state", str(state), "it is a directory", "name a file in it")
    listener, token_file = place.listen(), Path(f"{state}.token")

    made, place = (
        place.create_certificate,
        with_certificate(place, Path(f"{state}.certificate.pem"), Path(f"{state}.key.pem")),
    )

    from unisono.membership.server.http_server import CoordinatorServer  # imports the web server

    try:
        server = CoordinatorServer(place, policy, state, token or _stored_token(token_file), _print, listener)
    except (sqlite3.Error, OSError) as error:
        raise InvalidInput("--state", str(state), str(error), "name another file") from error
    print(f"coordinator at {server.url}")
    print("" if token else f"its token, for --token-file of workers, is in {token_file}\n", end="", flush=True)
    authority = fingerprint(place.certificate) if made and place.certificate else ""
    if authority or not place.is_local:
        command = join_command(CoordinatorAddress(server.url, "", authority=authority))
        print(f"other hosts join with  {command}", flush=True)
    server.run()
    return 0


def _stored_token(file: Path) -> str:
    """The token in `file`, which is created with a new token unless it exists.

    Raises:
        InvalidInput: the file cannot be written, or other users can read or write it.
    """
    try:
        if not file.exists():
            atomic.write(file, f"{secrets.token_urlsafe(32)}\n".encode())
        status = file.stat()
    except OSError as error:
        raise InvalidInput("--state", str(file), str(error), "name another file") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        problem = "other users can read or write it"
        raise InvalidInput("--token-file", str(file), problem, "remove it, and a new token is chosen")
    return read_token({"--token-file": str(file)}, {})


def policy_of(options: Mapping[str, str]) -> Policy:
    """The numbers of workers that `options` allow.

    Raises:
        InvalidInput: the numbers contradict each other.
    """
    minimum = whole_number("--min-workers", options.get("--min-workers", "1"))
    expected = whole_number("--expected-workers", options.get("--expected-workers", str(minimum)))
    maximum = whole_number("--max-workers", options.get("--max-workers", str(Policy().max_workers)))
    if not minimum <= expected <= maximum:
        raise InvalidInput(
            "--expected-workers", expected, f"not between --min-workers {minimum} and --max-workers {maximum}",
            "choose --min-workers <= --expected-workers <= --max-workers")  # fmt: skip
    replica_size = whole_number("--replica-size", options.get("--replica-size", "1"))
    micro_batches = whole_number("--micro-batches", options.get("--micro-batches", "0"), 0)
    if maximum < replica_size:
        raise InvalidInput(
            "--max-workers",
            maximum,
            f"less than the {replica_size} workers of one replica (--replica-size)",
            f"write a multiple of {replica_size}",
        )
    return Policy(
        min_workers=minimum,
        expected_workers=expected,
        max_workers=maximum,
        replica_size=replica_size,
        micro_batches=micro_batches,
    )


def _print(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)

"""Whose identity the environment holds: that of the process which first takes it, not of those that this one starts.

A child process inherits the variables that identify its parent, and would meet the other workers in its place. So the
process that takes an identity leaves a mark in its environment: its number, and a digest of each launcher's variables.
In another process, variables that still have that digest do not count; those that a launcher has set since do.
"""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import Mapping

from unisono.errors import UnisonoError
from unisono.launch.cluster_environment import CONVENTIONS, WorkerIdentity, identify

_MARK = "UNISONO_CLAIM"


def claim() -> WorkerIdentity:
    """The identity of this process, taken: processes that it starts have none of it.

    Raises:
        InvalidInput: as `identify`.
        UnisonoError: multiprocessing has started this process, and is importing the user's script in it.
    """
    _check_not_importing()
    own = unclaimed(os.environ, os.getpid())
    for name in os.environ.keys() - own.keys():
        del os.environ[name]
    identity = identify(own)
    if identity.launcher != "none":
        os.environ[_MARK] = mark(os.environ, os.getpid())
    return identity


def identity_here() -> WorkerIdentity:
    """The identity of this process. Raises as `identify`."""
    return identify(unclaimed(os.environ, os.getpid()))


def mark(environ: Mapping[str, str], process: int) -> str:
    """What `process` leaves in its environment when it takes the identity that is there."""
    return " ".join(map(str, (process, *(_digest(environ, names) for names in CONVENTIONS))))


def unclaimed(environ: Mapping[str, str], process: int) -> Mapping[str, str]:
    """`environ` without the variables by which another process than `process` was identified."""
    owner, *digests = environ.get(_MARK, str(process)).split()
    if owner == str(process):
        return environ
    theirs = [names for names, digest in zip(CONVENTIONS, digests) if str(_digest(environ, names)) == digest]
    left_out = {name for names in theirs for name in names}
    return {name: value for name, value in environ.items() if name not in left_out}


def _digest(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    return zlib.crc32(repr([environ.get(name) for name in names]).encode())


def _check_not_importing() -> None:
    # As multiprocessing itself finds out, to refuse to start a process there.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UnisonoError(
            "a process that multiprocessing started, by spawn or forkserver, runs the script again and has come to "
            'unisono: put what the script does under `if __name__ == "__main__":`, so that DataLoader workers only '
            "import what is above it"
        )

"""Decides which process has the identity in the environment: the first that claims it, not its children.

A child process inherits the variables that identify its parent, and would connect to the other workers in the parent's
place. So the process that claims an identity sets a variable, `UNISONO_CLAIM`. It has the process's pid, and a digest
of the variables of each launcher. In another process, variables that still have that digest are ignored; variables that
a launcher has set since are used.
"""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import Mapping

from unisono.errors import UnisonoError
from unisono.launch.cluster_environment import CONVENTIONS, WorkerIdentity, identify

_CLAIM = "UNISONO_CLAIM"


def claim_identity(given: WorkerIdentity | None = None) -> WorkerIdentity:
    """Claim the identity in the environment for this process; processes that it starts do not have this identity.

    Args:
        given: the identity of this process; None: what the environment says.

    Raises:
        InvalidInput: as for `identify`.
        UnisonoError: multiprocessing has started this process, and imports the user's script in it.
    """
    _check_not_importing()
    own = unclaimed(os.environ, os.getpid())
    for name in os.environ.keys() - own.keys():
        del os.environ[name]
    identity = given or identify(own)
    if identity.launcher != "none":
        os.environ[_CLAIM] = claim_marker(os.environ, os.getpid())
    return identity


def current_identity() -> WorkerIdentity:
    """The identity of this process. Raises the errors of `identify`."""
    return identify(unclaimed(os.environ, os.getpid()))


def claim_marker(environ: Mapping[str, str], pid: int) -> str:
    """Value of the variable by which the process `pid` claims the identity in `environ`."""
    return " ".join(map(str, (pid, *(_digest(environ, names) for names in CONVENTIONS))))


def unclaimed(environ: Mapping[str, str], pid: int) -> Mapping[str, str]:
    """`environ` without the variables that another process than `pid` has claimed."""
    owner, *digests = environ.get(_CLAIM, str(pid)).split()
    if owner == str(pid):
        return environ
    claimed = [names for names, digest in zip(CONVENTIONS, digests) if str(_digest(environ, names)) == digest]
    ignored = {name for names in claimed for name in names}
    return {name: value for name, value in environ.items() if name not in ignored}


def _digest(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    return zlib.crc32(repr([environ.get(name) for name in names]).encode())


def _check_not_importing() -> None:
    # multiprocessing itself refuses to start a process by this test.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UnisonoError(
            "a process that multiprocessing started, by spawn or forkserver, runs the script again and has reached "
            'unisono: put the script\'s actions under `if __name__ == "__main__":`, so that DataLoader workers only '
            "import what is above it"
        )

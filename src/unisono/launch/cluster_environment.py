"""Finds out which worker this process is, from the environment variables that a launcher sets.

The first of these conventions that is set is used. A later one then belongs to the program that started the launcher
(torchrun inside an srun step, mpirun inside a Slurm allocation):

    1. ours         UNISONO_RANK, UNISONO_SIZE, UNISONO_LOCAL_RANK, UNISONO_LOCAL_SIZE, UNISONO_RENDEZVOUS
    2. torchrun     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    3. Open MPI     OMPI_COMM_WORLD_RANK, …_SIZE, …_LOCAL_RANK, …_LOCAL_SIZE
    4. Slurm        SLURM_PROCID and others, inside a step (srun) only: no batch script, no salloc shell
    5. none         rank 0 of 1

For 3 and 4, MASTER_ADDR and MASTER_PORT are used if they are set. A convention that is set in part is an error.

The rendezvous of the workers is a URL: ``file:///directory`` (one host), or ``tcp://host:port?attempt=K``. At ``tcp``,
rank 0 serves the store; with ``&served=1``, another process serves it, and all ranks are clients. `attempt` counts
restarts, so that keys of an earlier attempt are ignored if the store still exists.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.errors import InvalidInput
from unisono.launch import slurm_hostlist

OURS = ("UNISONO_RANK", "UNISONO_SIZE", "UNISONO_LOCAL_RANK", "UNISONO_LOCAL_SIZE")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
CONVENTIONS = (  # by launcher: variables that together distinguish one worker from all others
    (*OURS, "UNISONO_RENDEZVOUS"),
    (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    (*OPEN_MPI, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
LOOPBACK = "127.0.0.1"
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # Slurm's numbers for a batch script, an interactive shell, …, which are no steps
_FIRST_PORT, _PORTS = 12000, 20000  # below the kernel's range for outgoing connections


@dataclass(frozen=True)
class WorkerIdentity:
    """Rank of one worker, number of workers, and their rendezvous.

    Args:
        rank: rank of this worker, ``0 .. size-1``.
        size: number of workers.
        local_rank: rank of this worker on its host.
        local_size: number of workers on its host.
        rendezvous: URL by which the workers find each other; empty for a single worker.
        launcher: ``unisono``, ``torchrun``, ``openmpi``, ``slurm`` or ``none``.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: str = ""
    launcher: str = "none"

    def environ(self) -> dict[str, str]:
        """The variables from which `identify` reads this identity, as unisono's own launcher sets them."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size)
        return dict(zip(OURS, map(str, numbers))) | {"UNISONO_RENDEZVOUS": self.rendezvous}

    def torch_environ(self, port: int) -> dict[str, str]:
        """The variables that torchrun sets, for scripts that call ``init_process_group`` themselves.

        ``env://`` then finds the store that the launcher serves at `port` of this host.
        """
        numbers = (self.rank, self.size, self.local_rank, self.local_size)
        store = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return dict(zip(TORCHRUN, map(str, numbers))) | store


def identify(environ: Mapping[str, str]) -> WorkerIdentity:
    """The identity that a launcher has set in `environ`; rank 0 of 1 if there is none.

    Raises:
        InvalidInput: a convention is set in part, contradicts itself, or does not name a rendezvous.
    """
    if any(name in environ for name in (*OURS, "UNISONO_RENDEZVOUS")):
        return _ours(environ)
    if "RANK" in environ:
        return _torchrun(environ)
    if any(name in environ for name in OPEN_MPI):
        return _check_world_size(_open_mpi(environ), environ)
    if _in_slurm_step(environ):
        return _check_world_size(_slurm(environ), environ)
    if any(name in environ for name in TORCHRUN):
        _numbers(environ, TORCHRUN, "torchrun")  # raises: RANK is missing
    return WorkerIdentity()


def _ours(environ: Mapping[str, str]) -> WorkerIdentity:
    numbers = _numbers(environ, OURS, "unisono")
    url = environ.get("UNISONO_RENDEZVOUS", "")
    if numbers[1] > 1 and not url.startswith(("file:///", "tcp://")):
        problem = "neither file:///directory nor tcp://host:port"
        raise InvalidInput("UNISONO_RENDEZVOUS", url, problem, "give all workers the same UNISONO_RENDEZVOUS")
    return WorkerIdentity(*numbers, rendezvous=url, launcher="unisono")


def _torchrun(environ: Mapping[str, str]) -> WorkerIdentity:
    numbers = _numbers(environ, TORCHRUN, "torchrun")
    if numbers[1] == 1:
        return WorkerIdentity(*numbers, launcher="torchrun")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise _unset(name, "start the workers by torchrun, or set MASTER_ADDR and MASTER_PORT to those of rank 0")
    attempt = _number(environ, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environ else 0
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    url = _tcp(environ["MASTER_ADDR"], _port(environ), attempt, served)
    return WorkerIdentity(*numbers, rendezvous=url, launcher="torchrun")


def _open_mpi(environ: Mapping[str, str]) -> WorkerIdentity:
    numbers = _numbers(environ, OPEN_MPI, "Open MPI")
    _, size, _, local_size = numbers
    if size == 1:
        return WorkerIdentity(*numbers, launcher="openmpi")
    host = environ.get("MASTER_ADDR") or (LOOPBACK if local_size == size else "")
    if not host:
        problem = f"only {local_size} of {size} workers are on this host; the others do not know the host of rank 0"
        raise InvalidInput("MASTER_ADDR", "unset", problem, "add `-x MASTER_ADDR=<host of rank 0>` to mpirun")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if not job and "MASTER_PORT" not in environ:
        raise _unset("MASTER_PORT", "add `-x MASTER_PORT=29500` to mpirun")
    port = _port(environ, seed=zlib.crc32((job or "").encode()))
    return WorkerIdentity(*numbers, rendezvous=_tcp(host, port), launcher="openmpi")


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return False
    return _number(environ, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP


def _slurm(environ: Mapping[str, str]) -> WorkerIdentity:
    size_name = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    counts_name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = slurm_hostlist.counts(counts_name, environ[counts_name])
    node = _number(environ, "SLURM_NODEID")
    rank, size, local_rank = (_number(environ, name) for name in ("SLURM_PROCID", size_name, "SLURM_LOCALID"))
    if sum(counts) != size or node >= len(counts):
        problem = f"does not fit {size_name} = {size} and SLURM_NODEID = {node}"
        raise InvalidInput(counts_name, environ[counts_name], problem, "start the workers by srun, unchanged")
    numbers = (rank, size, local_rank, counts[node])
    _check_order(numbers, ("SLURM_PROCID", size_name, "SLURM_LOCALID", counts_name))
    if size == 1:
        return WorkerIdentity(*numbers, launcher="slurm")
    host = environ.get("MASTER_ADDR") or (LOOPBACK if len(counts) == 1 else _first_host(environ))
    # 31 is coprime to the number of ports, so that jobs with consecutive numbers get different ports
    job = _number(environ, _first(environ, "SLURM_JOB_ID", "SLURM_JOBID"))
    step = _number(environ, "SLURM_STEP_ID")
    attempt = _number(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0
    url = _tcp(host, _port(environ, seed=31 * job + step), attempt)
    return WorkerIdentity(*numbers, rendezvous=url, launcher="slurm")


def _first_host(environ: Mapping[str, str]) -> str:
    name = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    return slurm_hostlist.expand(name, environ[name])[0]


def _check_world_size(identity: WorkerIdentity, environ: Mapping[str, str]) -> WorkerIdentity:
    """Return `identity`; raise if WORLD_SIZE, which job scripts often export, differs."""
    if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE") != identity.size:
        problem = f"{identity.launcher} has started {identity.size} workers"
        raise InvalidInput("WORLD_SIZE", environ["WORLD_SIZE"], problem, "unset it, or start as many workers")
    return identity


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], launcher: str) -> tuple[int, int, int, int]:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        example = next((f" ({name} = {environ[name]} is set)" for name in names if environ.get(name)), "")
        raise _unset(missing[0], f"set it too{example}, or unset all variables of {launcher}")
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    _check_order((rank, size, local_rank, local_size), names)
    return rank, size, local_rank, local_size


def _check_order(numbers: tuple[int, int, int, int], names: tuple[str, ...]) -> None:
    rank, size, local_rank, local_size = numbers
    cure = "start the workers by their launcher, and do not change its variables"
    if rank >= size:
        raise InvalidInput(names[0], rank, f"ranks go from 0 to {names[1]} - 1 = {size - 1}", cure)
    if local_size > size:
        raise InvalidInput(names[3], local_size, f"more workers on this host than {names[1]} = {size} in all", cure)
    if local_rank >= local_size:
        raise InvalidInput(names[2], local_rank, f"local ranks go from 0 to {local_size - 1} on this host", cure)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if value is None:
        raise _unset(name, "start the worker by its launcher, and do not change its variables")
    if not re.fullmatch(r"[0-9]{1,19}", value):
        raise InvalidInput(name, value, "not a whole number from 0", "write digits only")
    return int(value)


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of `names` that is set. Raises `InvalidInput` if none is."""
    first = next((name for name in names if environ.get(name)), names[0])
    if not environ.get(first):
        raise _unset(first, "start the workers by srun, and do not change its variables")
    return first


def _port(environ: Mapping[str, str], seed: int | None = None) -> int:
    """MASTER_PORT, or a port derived from `seed`, a number that all workers of the job know."""
    if seed is not None and not environ.get("MASTER_PORT"):
        return _FIRST_PORT + seed % _PORTS
    port = _number(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise InvalidInput("MASTER_PORT", port, "not a port", "use 1 to 65535")
    return port


def _tcp(host: str, port: int, attempt: int = 0, served: bool = False) -> str:
    if not re.fullmatch(r"[0-9A-Za-z._:%-]+", host):
        raise InvalidInput("MASTER_ADDR", host, "not a host name or address", "give the host of rank 0")
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{port}?attempt={attempt}" + ("&served=1" if served else "")


def _unset(name: str, cure: str) -> InvalidInput:
    return InvalidInput(name, "unset", "the environment of a launcher is incomplete", cure)

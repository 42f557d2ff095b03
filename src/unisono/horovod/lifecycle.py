"""Begin and end; which worker this is, among how many; what this program was built with."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from unisono.horovod import participant
from unisono.horovod.errors import InvalidArgument
from unisono.horovod.participant import Participant, current
from unisono.horovod.process_sets import ProcessSet, add_process_set
from unisono.launch import current_identity
from unisono.world import join_group


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    device: str = "auto",
    communicator: str = "auto",
    timeout_seconds: float = 300.0,
) -> None:
    """Collective: connect to the other workers. No effect where that was done already.

    Args:
        comm: all ranks, or None.
        process_sets: those that can be used from the beginning. ``"dynamic"`` means none: sets may be added at any
            time.
        device, communicator, timeout_seconds: as for `unisono.join`.

    Raises:
        InvalidArgument: `comm` is a part of the workers, or a process set cannot be added.
        PeerLost: other workers did not connect within `timeout_seconds`.
    """
    if participant.is_initialized():
        return
    identity = current_identity()
    if comm is not None and sorted(comm) not in ([], list(range(identity.size))):
        raise InvalidArgument("comm", list(comm), f"is not the ranks of all {identity.size} workers",
                              "leave it out, and use hvd.add_process_set for a part of them")  # fmt: skip
    group, where, watch = join_group(device, communicator, 0, timeout_seconds)
    participant.begin(Participant(identity, group, where, watch))
    atexit.register(shutdown)
    for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(each)
    if (path := os.environ.get("HOROVOD_TIMELINE", "DYNAMIC")) != "DYNAMIC":
        start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") == "1")


def shutdown() -> None:
    """Leave the other workers, whose later operations fail; call it on all workers. May be called twice."""
    atexit.unregister(shutdown)
    participant.end()


def rank() -> int:
    """This worker's number, from 0. Raises `InvalidArgument` before `init`, as the following functions do."""
    return current().rank


def size() -> int:
    """The number of workers."""
    return current().size


def local_rank() -> int:
    """This worker's number on its host."""
    return current().identity.local_rank


def local_size() -> int:
    """The number of workers on this host."""
    return current().hosts.count(_own_host())


def cross_rank() -> int:
    """The number of this worker's host, among those that have a worker with its `local_rank`."""
    return _hosts_with_local_rank().index(_own_host())


def cross_size() -> int:
    """The number of hosts that have a worker with this one's `local_rank`."""
    return len(_hosts_with_local_rank())


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of workers."""
    return len(set(Counter(current().hosts).values())) == 1


def _own_host() -> str:
    return current().hosts[rank()]


def _hosts_with_local_rank() -> list[str]:
    workers = Counter(current().hosts)
    return [host for host in workers if host == _own_host() or workers[host] > local_rank()]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record operations from now on, for a file in the format of Chrome's traces, which worker 0 writes.

    Args:
        mark_cycles: mark the beginning of each batch of operations.

    Raises:
        OSError: the file cannot be written.
    """
    if current().rank == 0:
        current().timeline.start(Path(file_path), mark_cycles)


def stop_timeline() -> None:
    """Write the file that `start_timeline` named, and record nothing more."""
    current().timeline.stop()


def mpi_threads_supported() -> bool:
    """Whether threads may call MPI, which Unisono does not use."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI is in use."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used."""
    return False


def gloo_enabled() -> bool:
    """Whether gloo may be in use: between hosts, and where workers of a host cannot share memory."""
    return gloo_built()


def gloo_built() -> bool:
    """Whether gloo can be used."""
    return True


def nccl_built() -> int:
    """The version of NCCL, as ``major * 10000 + minor * 100 + patch``; 0 where it cannot be used."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Whether IBM's DDL can be used."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL can be used."""
    return False

"""Starts one worker per host, with the environment variables of torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.errors import Failed
from benchmarks.netlab.network import Host, Netlab

PORT = 29500  # every host has its own ports
_OF_LAUNCHERS = ("UNISONO_", "OMPI_", "SLURM_", "TORCHELASTIC_", "PMI")


@dataclass(frozen=True)
class Finished:
    """What came of a command on all hosts.

    Args:
        codes: exit status per host; negative for a signal.
        seconds: from the first start to the last end.
        sent_bytes: per host, all that left by its cable, headers included.
        stopped: the caller's `until` ended it.
    """

    codes: tuple[int, ...]
    seconds: float
    sent_bytes: tuple[int, ...]
    stopped: bool = False

    @property
    def well(self) -> bool:
        """Whether it came to its end everywhere, or was stopped."""
        return self.stopped or not any(self.codes)


def environment(rank: int, size: int, master: str) -> dict[str, str]:
    """The variables of worker `rank` of `size`, one on each host; rank 0 is reached at `master`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


def run_workers(
    lab: Netlab,
    command: Sequence[str | Path],
    *,
    timeout_seconds: float,
    until: Callable[[Host], bool] = lambda host: False,
) -> Finished:
    """Run `command` once on every host as worker 0, 1, …; wait for all.

    Args:
        timeout_seconds: after which all are killed.
        until: asked about host 0 every fifth of a second; True kills all and counts as an end.

    Raises:
        Failed: a worker ended with something else than 0 (all are then killed after a second), or the time is over;
            with the end of the first such worker's output.
    """
    before, began = lab.sent_bytes, time.monotonic()
    clean = {name: "" for name in os.environ if name.startswith(_OF_LAUNCHERS)}
    size, master = len(lab.hosts), lab.hosts[0].address
    wrap = ["env", *(word for name in clean for word in ("-u", name))]
    started = [host.start([*wrap, *command], **environment(host.number, size, master)) for host in lab.hosts]
    stopped = False
    while any(process.poll() is None for process in started):
        time.sleep(0.2)
        stopped = until(lab.hosts[0])
        if stopped:
            break
        if any(process.poll() for process in started):
            time.sleep(1.0)  # the others detect it and report it
            break
        if time.monotonic() - began > timeout_seconds:
            break
    seconds = time.monotonic() - began
    sent = tuple(after - earlier for after, earlier in zip(lab.sent_bytes, before, strict=True))
    codes = [process.poll() for process in started]
    lab.end()
    if not stopped and any(codes[k] != 0 for k in range(size)):
        first = next((k for k in range(size) if codes[k]), 0)
        how = f"ended with {codes[first]}" if codes[first] else f"was still running after {seconds:.0f} s"
        log_tail = (lab.hosts[first].home / "stderr").read_text(errors="replace")[-3000:]
        raise Failed(f"{' '.join(map(str, command))}\nworker {first} {how}:\n{log_tail}")
    return Finished(tuple(code or 0 for code in codes), seconds, sent, stopped)

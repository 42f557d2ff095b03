"""Two workers and one server on this machine: round-trip time and throughput.

Run by `benchmarks.communication.actor_round_trip`; writes a JSON object to ``--report``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.comm import ActorConnection, ActorMessage, Answer, connect

WORKERS = 2
LARGE_ELEMENTS, SMALL_ELEMENTS = 10_000_000, 1024


class Store:
    """Answers a push with what it holds; `adds`: after adding what was pushed."""

    def __init__(self, adds: bool) -> None:
        self._adds = adds
        self._held: dict[int, torch.Tensor] = {}

    def connected(self, lines: Sequence[ActorConnection]) -> None:
        """Needs no connections."""

    def lost(self, sender: int) -> None:
        """Does not wait for senders."""

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """The tensor that arrived is memory of this sender only, so the sum may be returned in it."""
        (x,) = message.tensors
        if x.numel() not in self._held:
            self._held[x.numel()] = torch.zeros_like(x)
        held = self._held[x.numel()]
        if self._adds:
            held += x
            x.copy_(held)
        answer(ActorMessage("held", {}, [x if self._adds else held]))


def make_store(number: int, config: Mapping[str, Any]) -> Store:
    """The server's actor."""
    return Store(config["adds"])


def work(rank: int, url: str, adds: bool, rounds: int, trips: int, together: Any, results: Any) -> None:
    """One worker: round trips (worker 0 alone, the other asleep), then large pushes of both at once."""
    torch.set_num_threads(1)
    comm = connect(rank, WORKERS, rendezvous=url, local_size=WORKERS)
    (line,) = comm.serve(1, f"{Path(__file__).stem}:make_store", {"adds": adds})
    push = lambda x: line.call(ActorMessage("push", {"step": 1}, [x])).wait()
    small, large = torch.ones(SMALL_ELEMENTS), torch.ones(LARGE_ELEMENTS)
    microseconds = sorted(timed(push, small) * 1e6 for _ in range(trips)) if rank == 0 else []
    together.wait()
    for _ in range(2):
        push(large)
    together.wait()
    seconds = [timed(push, large) for _ in range(rounds)]
    together.wait()
    comm.close()
    results.put((rank, microseconds, seconds))


def timed(push: Any, x: torch.Tensor) -> float:
    """Seconds from call to answer."""
    began = time.perf_counter()
    push(x)
    return time.perf_counter() - began


def main() -> None:
    """Start the workers and report what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adds", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trips", type=int, default=2000)
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, together = context.SimpleQueue(), context.Barrier(WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"file://{folder}", asked.adds, asked.rounds, asked.trips, together, results)
        processes = [context.Process(target=work, args=(rank, *arguments), daemon=True) for rank in range(WORKERS)]
        for process in processes:
            process.start()
        found = sorted(results.get() for _ in processes)
        for process in processes:
            process.join()
    microseconds = found[0][1]
    both_ways = 2 * LARGE_ELEMENTS * 4
    report = {
        "round_trip_microseconds": statistics.median(microseconds),
        "round_trip_microseconds_p99": microseconds[len(microseconds) * 99 // 100],
        "gigabytes_per_second": sum(both_ways / statistics.median(seconds) for _, _, seconds in found) / 1e9,
    }
    asked.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()

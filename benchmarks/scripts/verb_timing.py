"""One worker of `benchmarks.communication.links`: times the communicator's verbs; rank 0 prints seconds as JSON."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm import connect
from unisono.launch import identify

BYTES = (4_000, 100_000, 1_000_000, 4_000_000)
_REPEATS = 3


def main() -> None:
    who = identify(os.environ)
    torch.set_num_threads(1)
    comm = connect(
        who.rank, who.size, rendezvous=who.rendezvous, local_size=who.local_size, kind="gloo",
        device=torch.device("cpu"), timeout_seconds=120)  # fmt: skip

    def took(start: Callable[[], Any]) -> float:
        times = []
        for _ in range(_REPEATS):
            comm.gather(torch.zeros(1)).wait()
            began = time.perf_counter()
            start().wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    found = {}
    for size in BYTES:
        whole, part = torch.ones(size // 4), torch.ones(size // 4 // who.size)
        parts = [part] * who.size
        found[f"sum {size}"] = took(lambda whole=whole: comm.sum(whole))
        found[f"gather {part.nbytes}"] = took(lambda part=part: comm.gather(part))
        found[f"exchange {part.nbytes}"] = took(lambda parts=parts: comm.exchange(parts, parts))
    if who.rank == 0:
        print(json.dumps(found))
    comm.close()


if __name__ == "__main__":
    main()

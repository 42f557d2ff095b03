"""Counts the samples that a virtual run uses, at the place where they are fetched."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from unisono.chaos.virtual_cluster import Process


class Samples:
    """The samples that each worker fetched, for each step of each view."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}  # by the identifier of its thread
        self._fetched: dict[int, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))

    def fetch(self, numbers: Sequence[int]) -> None:
        """Count the samples `numbers` as fetched by the process of the calling thread."""
        process = self.processes[threading.get_ident()]
        self._fetched[process.agent.version.step + 1][process.view.number].update(numbers)

    def kept(self, steps: int) -> dict[int, dict[int, int]]:
        """For each step from 1 to `steps`, how often each sample was fetched for it in the last view that computed it.

        Only this last computation of a step is in the final state.
        """
        return {step: dict(views[max(views)]) for step, views in self._fetched.items() if step <= steps}


class SampleCount:
    """A dataset that passes requests on to `dataset`, and counts in `samples` which samples are fetched."""

    def __init__(self, dataset: Any, samples: Samples) -> None:
        self._dataset, self._samples = dataset, samples

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        self._samples.fetch(numbers)
        many = getattr(self._dataset, "__getitems__", None)
        return many(numbers) if many else [self._dataset[number] for number in numbers]

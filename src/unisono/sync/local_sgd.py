"""Local SGD: replicas take local steps, and average their weights periodically.

Stich 2019, "Local SGD Converges Fast and Communicates Little"; Lin et al. 2020, "Don't Use Large Mini-Batches, Use
Local SGD".
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.sync.periodic import Periodic
from unisono.sync.sync_schedule import SyncSchedule


@dataclass(frozen=True)
class LocalSGD(Periodic):
    """Each replica takes local steps; after each `every` of them, the weights are averaged (Stich 2019, algorithm 1).

        theta_i <- theta_i - lr g_i(theta_i)                                in every step
        theta_i <- sum over j of n_j / n theta_j                            and then, in every `every`-th one

    n_j is the number of samples of replica j since the last mean, n that of all replicas (McMahan et al. 2017,
    algorithm 1). So ``LocalSGD(every=1)`` with plain SGD equals `AllReduce` for any distribution of the samples.

    With `start` it is post-local SGD (Lin et al. 2020, section 3): the first `start` steps, in which weights change the
    most, are synchronous.

    Args:
        every: steps between two averages, from 1.
        start: synchronous steps before the first local one, from 0.

    Raises:
        ValueError: a number is out of its bounds.
    """

    every: int = 8
    start: int = 0

    def __post_init__(self) -> None:
        self.schedule(1)

    def schedule(self, workers: int) -> SyncSchedule:
        """See `Periodic`."""
        return SyncSchedule(self.every, start=self.start)

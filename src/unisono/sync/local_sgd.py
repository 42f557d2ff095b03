"""Local SGD: replicas take their own steps, and average their weights now and then.

Stich 2019, "Local SGD Converges Fast and Communicates Little"; Lin et al. 2020, "Don't Use Large Mini-Batches, Use
Local SGD".
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.sync.periodic import Periodic
from unisono.sync.sync_schedule import SyncSchedule


@dataclass(frozen=True)
class LocalSGD(Periodic):
    """Each replica i takes steps of its own gradient; each `every` steps the weights become their mean (Stich 2019,
    algorithm 1):

        theta_i <- theta_i - lr g_i(theta_i)                                in every step
        theta_i <- sum over j of n_j / n theta_j                            and then, in every `every`-th one

    n_j is the number of samples of replica j since the last mean, n that of all (McMahan et al. 2017, algorithm 1). So
    ``LocalSGD(every=1)`` with plain SGD is `AllReduce`, whatever the replicas' shares of the samples are.

    With `start` it is post-local SGD (Lin et al. 2020, section 3): the first `start` steps, in which weights move the
    most, are those of synchronous all-reduce.

    Args:
        every: steps between two averages, from 1.
        start: synchronous steps before the first local one, from 0.

    Raises:
        ValueError: a number out of its bounds.
    """

    every: int = 8
    start: int = 0

    def __post_init__(self) -> None:
        self.rhythm(1)

    def rhythm(self, workers: int) -> SyncSchedule:
        """See `Periodic`."""
        return SyncSchedule(self.every, start=self.start)

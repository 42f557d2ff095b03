"""Block momentum: local steps, with a momentum over averages.

Chen & Huo 2016, "Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-block Parallel
Optimization and Blockwise Model-Update Filtering".
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.sync.outer_optimizer import Momentum, Nesterov
from unisono.sync.periodic import Periodic
from unisono.sync.sync_schedule import SyncSchedule


@dataclass(frozen=True)
class BlockMomentum(Periodic):
    """Blockwise model-update filtering (BMUF).

    Replicas start block t from the global model ``Wg(t-1)``. After `every` local steps, ``W̄(t)`` is the mean of the
    replicas' weights, weighted by their samples in the block:

        G(t)  = W̄(t) - Wg(t-1)                             update of the block
        Δ(t)  = η Δ(t-1) + G(t)                            filtered; block momentum η, block learning rate 1
        W(t)  = W(t-1) + Δ(t)
        Wg(t) = W(t)                                       classical block momentum (CBM)
        Wg(t) = W(t) + η Δ(t)                              Nesterov block momentum (NBM)

    ``Wg`` is the anchor. Eliminating W from the Nesterov form leaves ``Wg(t) = Wg(t-1) + G(t) + η Δ(t)``. The mean
    update of n replicas is only about as large as the update of one replica. η = 1 - 1/n compensates for this, because
    each update contributes ``1 / (1 - η) = n`` times over the following blocks.

    Args:
        every: local steps of a block, from 1.
        momentum: η, from 0 to below 1; None takes ``1 - 1/n`` for n replicas.
        nesterov: NBM in place of CBM.

    Raises:
        ValueError: a number is out of its bounds.
    """

    every: int = 8
    momentum: float | None = None
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov={self.nesterov!r} is neither True nor False")
        self.schedule(1)

    def schedule(self, workers: int) -> SyncSchedule:
        """See `Periodic`."""
        momentum = 1 - 1 / workers if self.momentum is None else self.momentum
        outer = Nesterov(1.0, momentum) if self.nesterov else Momentum(1.0, momentum)
        return SyncSchedule(self.every, outer=outer)

"""DiLoCo: hundreds of local steps, then an outer step; also its streaming form, which overlaps communication.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"; Douillard et al. 2025,
"Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch".
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.sync.outer_optimizer import OUTER, Nesterov, Outer
from unisono.sync.periodic import Periodic
from unisono.sync.sync_schedule import SyncSchedule


@dataclass(frozen=True)
class DiLoCo(Periodic):
    """Replicas take local steps from an anchor, which an outer optimizer then moves by the mean local update.

    Douillard et al. 2023, algorithm 1, with H = `every`. For replica m, with inner optimizer AdamW in the paper:

        theta_m(t) = inner(theta_m(t-1))                                    in every step
        Δ          = mean over m of (anchor - theta_m(t))                   in every H-th step, weighted by samples
        anchor     = outer(anchor, Δ)
        theta_m(t) = anchor

    Streaming (Douillard et al. 2025, algorithm 2): the parameters are divided into P = `fragments` of about equal
    bytes, strided over the model's layers. Fragment p has offset ``t_p = (p + 1) H / P``, so that communication is
    even over time. A mean update is applied τ = `delay` steps after it was sent, with local steps in between:

        send     Δ_p = mean over m of (anchor_p - theta_m,p(t))             if t - t_p mod H = 0
        apply    anchor_p = outer(anchor_p, Δ_p)                            if t - t_p - τ mod H = 0
                 theta_m,p(t) = α theta_m,p(t) + (1 - α) anchor_p

    The paper sends outer gradients in 4 bits; here the compressor of the run applies. In the paper, a τ of 1 to 5 steps
    was best. A step waits only if an exchange takes longer than τ steps. Losses and control words are exchanged with
    the last fragment, so they arrive τ steps late too.

    Args:
        every: H, from 1.
        outer: `Nesterov`, `Momentum` or `Average`.
        fragments: P, from 1 to `every` and to the number of the model's trainable tensors.
        delay: τ, from 0 to below `every`.
        mix: α, from 0 to below 1; None takes 0.5 with a delay, as the paper does, and 0 without.

    Raises:
        ValueError: a number is out of its bounds, or `outer` is not an outer optimizer.
    """

    every: int = 500
    outer: Outer = Nesterov()
    fragments: int = 1
    delay: int = 0
    mix: float | None = None

    def __post_init__(self) -> None:
        if type(self.outer) not in OUTER.values():
            raise ValueError(f"outer={self.outer!r} is none of {', '.join(OUTER)}")
        self.schedule(1)

    def schedule(self, workers: int) -> SyncSchedule:
        """See `Periodic`."""
        mix = (0.5 if self.delay else 0.0) if self.mix is None else self.mix
        return SyncSchedule(self.every, fragments=self.fragments, delay=self.delay, mix=mix, outer=self.outer)
